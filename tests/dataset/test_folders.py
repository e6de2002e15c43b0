"The folders of dataset have an order: a module imports from its own folder and from folders on its left only."

import ast
from pathlib import Path

import pytest

import leakmel as lm

pytestmark = pytest.mark.quick

ORDER = ("file", "source", "check", "run", "resident")


def imported(path: Path, package: Path) -> set[str]:
    "Names of the modules of the package that a file imports anywhere, with dots."
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = path.relative_to(package.parent).parts[: -node.level] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def test_folders_import_only_to_the_left():
    package = Path(lm.__file__).parent
    wrong = []
    for k, folder in enumerate(ORDER):
        later = tuple(f"leakmel.dataset.{name}." for name in ORDER[k + 1 :])
        for path in sorted((package / "dataset" / folder).glob("*.py")):
            wrong += [
                f"{folder}/{path.stem}: {n}" for n in imported(path, package) if f"{n}.".startswith(later)
            ]
    assert wrong == []
