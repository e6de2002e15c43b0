"""Count what makes text hard to read: words of the avoid list, riddles as taglines, exporting cells without an example.

usage: python nbs/_tools/prose.py [--list [PART]] [--examples]     PART: only paths that contain it

`make house` prints the counts. Only messages have a limit, of 0: tests/project/test_prose.py.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# what to avoid -> what to write
AVOID = {
    "anew": "again, new",
    "whoever": "the user, the caller",
    "nobody": "no one; or name what is missing",
    "beside": "next to, in addition to",
    "gone on": "continued, resumed",
    "goes on": "continues, resumes",
    "go on": "continue, resume",
    "taken up": "resumed",
    "of then": "of that time",
    "what stands": "what exists",
    "put up with": "accept",
    "hear": "score, read",
    "hears": "scores, reads",
    "heard": "scored, read",
    "said": "reported",
    "worn": "damaged, overused",
    "held ready": "cached, preloaded",
    "comes out": "results",
    "is there": "exists",
    "are there": "exist",
    "was there": "existed",
    "judged": "evaluated",
    "judges": "evaluates",
    "town": "synthetic network",
}
# Stored in data sets (/rejected/message): another wording would change their bytes.
STORED = "the file was there when listed and is not there now ("
PATTERN = re.compile(r"\b(" + "|".join(AVOID) + r")\b", re.IGNORECASE)


@dataclass(frozen=True)
class Found:
    "A word of the avoid list."

    path: str  # relative to the root
    line: int  # from 1; of a notebook: the cell, from 1
    kind: str  # "message", "docstring", "prose" or "name"
    word: str
    text: str  # the sentence, shortened


def words_in(text: str) -> list[str]:
    "The words of the avoid list in a text, in lower case."
    return [m.group(1).lower() for m in PATTERN.finditer(text)]


def docstrings(tree: ast.AST) -> set[int]:
    "Identities of the nodes that are docstrings."
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def texts_of(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    "Line, kind and text of the docstrings of a module and of its strings with a blank: messages, labels and reports."
    docs = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            if node.value == STORED:
                continue
            yield node.lineno, "docstring" if id(node) in docs else "message", node.value


def names_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    "Line and name of the functions, classes, parameters and variables of a module."
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def markdown_of(path: Path) -> Iterator[tuple[int, str]]:
    "Number and text of the prose cells of a notebook; of a Markdown file: line and text."
    if path.suffix == ".md":
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"], 1):
        if cell["cell_type"] == "markdown":
            yield number, "".join(cell["source"])


def notebooks(root: Path = ROOT) -> list[Path]:
    "The notebooks that are sources."
    found = sorted((root / "nbs").rglob("*.ipynb"))
    return [p for p in found if not any(part[0] in "_." for part in p.relative_to(root).parts)]


def avoided(root: Path = ROOT) -> list[Found]:
    "Every word of the avoid list in messages, docstrings, names and prose."
    found: list[Found] = []

    def note(path: Path, line: int, kind: str, text: str, searched: str) -> None:
        shown = " ".join(text.split())[:100]
        found.extend(Found(str(path.relative_to(root)), line, kind, w, shown) for w in words_in(searched))

    for path in sorted((root / "leakmel").rglob("*.py")):
        if path.name == "_modidx.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, kind, text in texts_of(tree):
            note(path, line, kind, text, text)
        for line, name in names_of(tree):
            note(path, line, "name", name, re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name))
    pages = [*notebooks(root), *sorted(root.glob("*.md"))]
    for path in pages:
        for number, text in markdown_of(path):
            note(path, number, "prose", text, text)
    return found


def taglines(root: Path = ROOT) -> dict[str, str]:
    "The tagline of each notebook that has one."
    found = {}
    for path in notebooks(root):
        for _, text in markdown_of(path):
            if line := next((x[1:].strip() for x in text.splitlines() if x.startswith(">")), None):
                found[str(path.relative_to(root))] = line
                break
    return found


def cells_without_example(root: Path = ROOT) -> list[str]:
    "Exporting cells that define something public and have no cell after them that runs without being exported."
    found = []
    for path in notebooks(root):
        code = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        sources = ["".join(c["source"]) for c in code]
        shown = "\n".join(s for s in sources if not s.startswith("#|"))
        for number, source in enumerate(sources):
            if not source.startswith("#| export"):
                continue
            defined = [
                node.name
                for node in ast.parse(source).body
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            ]
            if defined and not any(re.search(rf"\b{name}\b", shown) for name in defined):
                found.append(f"{path.relative_to(root)}: {', '.join(defined)} (code cell {number + 1})")
    return found


def measure(root: Path = ROOT) -> dict[str, int]:
    "The counts that `make house` prints."
    kinds = Counter(f.kind for f in avoided(root))
    return {
        "avoided words in messages": kinds["message"],
        "avoided words in docstrings": kinds["docstring"],
        "avoided words in names": kinds["name"],
        "avoided words in prose": kinds["prose"],
        "taglines that begin with What or How": sum(
            line.startswith(("What ", "How ")) for line in taglines(root).values()
        ),
        "exporting cells without an example": len(cells_without_example(root)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--list",
        nargs="?",
        const="",
        metavar="PART",
        help="list the words of the avoid list with their places",
    )
    parser.add_argument("--examples", action="store_true", help="list exporting cells without an example")
    args = parser.parse_args()
    if args.list is not None:
        for f in avoided():
            if args.list in f.path:
                print(f"{f.path}:{f.line}: {f.kind}: {f.word}: {f.text}")
    if args.examples:
        print(*cells_without_example(), sep="\n")
    if args.list is None and not args.examples:
        for name, value in measure().items():
            print(f"{value:6,}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
