"""Bring package, notebooks and README in line with the notebooks; with --check only say whether they are.

The check works on a copy, so that it tells the same with and without uncommitted changes and touches nothing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from readme import write_readme

ROOT = Path(__file__).resolve().parents[2]
KEPT = (
    "leakmel",
    "nbs",
    "settings.ini",
    "setup.py",
    "pyproject.toml",
    "README.md",
)  # what an export reads or writes
# Results of runs stay as papermill left them: cleaning would take its record away.
RESULTS = "out*.ipynb"
# Run notebooks that `leakmel init` copies into a working folder: they need the package only. Their copies are installed with it.
SHIPPED = (
    "start",
    "build",
    "build_part",
    "train",
    "evaluate",
    "predict",
    "nightly",
    "correlate",
    "retrain",
    "search",
    "tune",
    "doctor",
    "explore",
    "review",
    "dashboard",
)
# nbdev writes one blank line between cells and its own `__all__`; the formatter has the last word.
FORMATTED = ("leakmel", "nbs")

CLEAN = """
import sys
from nbdev.clean import nbdev_clean
for name in sys.argv[1:]: nbdev_clean(name)
"""


def run_front_page(root: Path) -> None:
    "Run index.ipynb, so that what it shows is what the code prints; only text is kept."
    import nbformat
    from nbclient import NotebookClient

    path = root / "nbs" / "index.ipynb"
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.execution_count, cell.metadata = None, nbformat.NotebookNode()
        text = "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    nbformat.write(notebook, path)


def export(root: Path) -> None:
    "Export and clean all notebooks below `root`, and write its README."
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}  # nbdev does nothing where it is set
    notebooks = [str(p) for p in notebooks_of(root)]
    subprocess.run(
        [Path(sys.executable).parent / "nbdev_export", "--skip_file_re", r"^([_.]|out.*\.ipynb)"],
        cwd=root,
        env=env,
        check=True,
    )
    subprocess.run(
        [sys.executable, Path(__file__).with_name("parameter_tables.py"), root],
        env=env | {"PYTHONPATH": str(root)},
        check=True,
    )
    subprocess.run(
        [Path(sys.executable).parent / "ruff", "format", "--quiet", *FORMATTED], cwd=root, check=True
    )
    subprocess.run([sys.executable, "-c", CLEAN, *notebooks], cwd=root, env=env, check=True)
    ship_notebooks(root)
    write_readme(root)


def ship_notebooks(root: Path) -> None:
    "Copy the run notebooks into the package."
    target = root / "leakmel" / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name in SHIPPED:
        shutil.copyfile(root / "nbs" / f"{name}.ipynb", target / f"{name}.ipynb")


def notebooks_of(root: Path) -> list[Path]:
    "The notebooks that are sources."
    found = sorted((root / "nbs").rglob("*.ipynb"))
    return [
        p
        for p in found
        if not p.match(RESULTS) and not any(part[0] in "_." for part in p.relative_to(root).parts)
    ]


def content(root: Path) -> dict[str, bytes]:
    "Every file that an export reads or writes."
    files = [
        f for name in KEPT for f in ((root / name).rglob("*") if (root / name).is_dir() else [root / name])
    ]
    return {
        str(f.relative_to(root)): f.read_bytes()
        for f in files
        if f.is_file() and "__pycache__" not in f.parts and not f.match(RESULTS)
    }


def check(root: Path = ROOT) -> list[str]:
    "Names of the files that an export would change."
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in KEPT:
            if (root / name).is_dir():
                shutil.copytree(
                    root / name,
                    copy / name,
                    ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", RESULTS),
                )
            elif (root / name).exists():
                shutil.copy(root / name, copy / name)
        before = content(copy)
        export(copy)
        after = content(copy)
    return sorted(name for name in before | after if before.get(name) != after.get(name))


def main() -> int:
    "Export, or check."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 1 where something is out of line"
    )
    if not parser.parse_args().check:
        export(ROOT)  # the front page runs the package as it is now
        run_front_page(ROOT)
        export(ROOT)
        return 0
    changed = check()
    for name in changed:
        print(f"out of line with the notebooks: {name}", file=sys.stderr)
    if changed:
        print("run `make export` and look at the difference", file=sys.stderr)
    else:
        print("package, notebooks and README are in line")
    return 1 if changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
