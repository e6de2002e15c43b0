"""Measure the structure of the package: `make house` prints the figures, tests check those that have a limit."""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "leakmel"
LIMITS = {"statements": 18_500, "modules": 125}  # targets; the others have to be 0
WIDE = 110  # columns


def sources(root: Path = ROOT) -> list[Path]:
    "The modules of the package below `root`, without empty `__init__.py` and nbdev's index."
    found = sorted((root / PACKAGE).rglob("*.py"))
    return [p for p in found if p.name != "_modidx.py" and p.read_text(encoding="utf-8").strip()]


@lru_cache(maxsize=1)  # several figures of one module follow each other
def nodes(tree: ast.AST) -> list[ast.AST]:
    "All nodes of a module."
    return list(ast.walk(tree))


def count_statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in nodes(tree))


def only_children(tree: ast.AST) -> list[str]:
    "Private classes from which exactly one class of the same file inherits."
    classes = [node for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    bases = Counter(ast.unparse(base).partition("[")[0] for c in classes for base in c.bases)
    return [c.name for c in classes if c.name.startswith("_") and bases[c.name] == 1]


def packed_assignments(tree: ast.AST) -> int:
    "Assignments of a written tuple to names or attributes, one each: `a, b = 1, 2`."
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(t, ast.Tuple) and len(t.elts) == len(node.value.elts) for t in node.targets)
        for node in nodes(tree)
    )


def compound_lines(tree: ast.AST) -> int:
    "Statements that begin on the line of the statement before them."
    dots = {
        node for node in nodes(tree) if isinstance(node, ast.Expr) and ast.unparse(node) == "..."
    }  # of a protocol's method
    starts = Counter(node.lineno for node in nodes(tree) if isinstance(node, ast.stmt) and node not in dots)
    return sum(n - 1 for n in starts.values())


def long_definitions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    "Name, lines and allowed lines of functions of more than 60 lines and classes of more than 300."
    for node in nodes(tree):
        most = 300 if isinstance(node, ast.ClassDef) else 60
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # an argument per line, its comment and the docstring are documentation
            first = node.body[0]
            start = node.lineno if isinstance(node, ast.ClassDef) else first.lineno
            lines = (node.end_lineno or start) - start + 1
            if lines > most:
                yield node.name, lines, most


def error_classes(trees: list[ast.AST]) -> set[str]:
    "Names of LeakmelError and of all classes that inherit from it."
    parents = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
    }
    family = {"LeakmelError"}
    while more := {name for name, bases in parents.items() if bases & family} - family:
        family |= more
    return family


def classes_with_code(trees: list[ast.AST]) -> set[str]:
    "Classes of errors whose constructor hands a code on."
    return {
        node.name
        for tree in trees
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(call, ast.Call) and any(word.arg == "code" for word in call.keywords)
            for call in ast.walk(node)
        )
    }


def errors_without_code(tree: ast.AST, family: set[str]) -> list[int]:
    "Lines on which an error of one of these classes is made without a code."
    return [
        node.lineno
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in family
        and not any(word.arg in ("code", None) for word in node.keywords)
    ]


def measure(root: Path = ROOT) -> dict[str, int]:
    "The figures of the package below `root`."
    files = sources(root)
    texts = [p.read_text(encoding="utf-8") for p in files]
    trees: list[ast.AST] = [ast.parse(text) for text in texts]
    family = error_classes(trees) - classes_with_code(trees)
    statements = [count_statements(tree) for tree in trees]
    names = [p.name for p in files]
    lines = [line for text in texts for line in text.splitlines()]
    return {
        "statements": sum(statements),
        "lines": len(lines),
        "modules": sum(name not in ("__init__.py", "__main__.py") for name in names),
        "modules under 40 statements": sum(
            n < 40 and name not in ("__init__.py", "__main__.py")
            for n, name in zip(statements, names, strict=True)
        ),
        "modules over 400 lines": sum(len(text.splitlines()) > 400 for text in texts),
        "private base classes with one child": sum(len(only_children(tree)) for tree in trees),
        "packed assignments": sum(map(packed_assignments, trees)),
        "compound statements on one line": sum(map(compound_lines, trees)),
        "functions over 60 lines, classes over 300": sum(len(list(long_definitions(tree))) for tree in trees),
        f"lines over {WIDE} columns": sum(len(line) > WIDE for line in lines),
        "errors without a code": sum(len(errors_without_code(tree, family)) for tree in trees),
    }


def places(root: Path = ROOT) -> dict[str, list[str]]:
    "Where the figures that should be 0 come from."
    found: dict[str, list[str]] = {}
    files = sources(root)
    trees: list[ast.AST] = [ast.parse(p.read_text(encoding="utf-8")) for p in files]
    family = error_classes(trees) - classes_with_code(trees)
    for path, tree in zip(files, trees, strict=True):
        name = str(path.relative_to(root))
        n = count_statements(tree)
        if n < 40 and path.name not in ("__init__.py", "__main__.py"):
            found.setdefault("modules under 40 statements", []).append(f"{name} ({n})")
        length = len(path.read_text(encoding="utf-8").splitlines())
        if length > 400:
            found.setdefault("modules over 400 lines", []).append(f"{name} ({length})")
        for child in only_children(tree):
            found.setdefault("private base classes with one child", []).append(f"{name}: {child}")
        for what, lines, most in long_definitions(tree):
            found.setdefault("functions over 60 lines, classes over 300", []).append(
                f"{name}: {what} ({lines} of {most})"
            )
        for line in errors_without_code(tree, family):
            found.setdefault("errors without a code", []).append(f"{name}:{line}")
    return found


def at_commit(commit: str) -> dict[str, int]:
    "The figures of the package as it was at a commit."
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, PACKAGE], cwd=ROOT, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        return measure(Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", action="store_true", help="list where each figure comes from")
    parser.add_argument(
        "--since", metavar="COMMIT", help="print the figures at a commit next to those of now"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.since and not re.fullmatch(r"[\w./~^-]+", args.since):
        parser.error(f"{args.since!r} is not the name of a commit")
    now = measure()
    before = at_commit(args.since) if args.since else None
    if args.json:
        print(json.dumps({"now": now} | ({"before": before, "since": args.since} if before else {})))
        return 0
    width = max(map(len, now))
    print(f"{'':{width}}  {'before':>8}  {'now':>8}" if before else f"{'':{width}}  {'now':>8}")
    for name, value in now.items():
        columns = [before[name], value] if before else [value]
        print(f"{name:{width}}  " + "  ".join(f"{v:8,}" for v in columns))
    if args.places:
        for name, found in places().items():
            print(f"\n{name}:", *found, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
