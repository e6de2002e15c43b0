"""Write README.md from nbs/index.ipynb: prose as it is, code fenced, stored text below it, hidden cells left out.

Links to files beside the notebook get `nbs/` in front, so that they lead to the same picture or notebook in both places.
"""

import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]


def readme_text(notebook: Path) -> str:
    "The front page as Markdown."
    cells = nbformat.read(notebook, as_version=4).cells
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def _parts(cell: nbformat.NotebookNode) -> list[str]:
    "A cell as blocks of Markdown."
    if cell.cell_type == "markdown":
        return [re.sub(r"\]\((?!https?:|mailto:|[#/])", "](nbs/", cell.source.strip())]
    if cell.cell_type != "code":
        return []
    lines = cell.source.splitlines()
    directives = [line[2:].strip() for line in lines if line.startswith("#|")]
    if "hide" in directives:
        return []
    source = "\n".join(line for line in lines if not line.startswith("#|")).strip()
    code = [f"```python\n{source}\n```"] if source and "echo: false" not in directives else []
    return code + [f"```text\n{text}\n```" for text in map(_text, cell.outputs) if text]


def _text(output: nbformat.NotebookNode) -> str:
    "What an output says in plain text."
    if output.output_type == "stream":
        return output.text.strip("\n")
    if output.output_type in ("execute_result", "display_data"):
        return output.data.get("text/plain", "").strip("\n")
    return ""


def write_readme(root: Path) -> None:
    "Write README.md of the project at `root`, where it has a front page."
    notebook, target = root / "nbs" / "index.ipynb", root / "README.md"
    if not notebook.exists():
        return
    text = readme_text(notebook)
    if not target.exists() or target.read_text(encoding="utf-8") != text:
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_readme(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
