"Run notebooks through papermill in a copy of the project, and what their outputs show."

import ast
import atexit
import io
import logging
import os
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import nbformat
import plotly.graph_objects as go
from children import Server, server

import leakmel as lm

ROOT = Path(__file__).resolve().parents[2]
PLOTLY = "application/vnd.plotly.v1+json"


@dataclass(frozen=True)
class Run:
    "A run that is over."

    status: int
    log: str
    notebook: Path
    project: Path

    @property
    def outputs(self) -> list:
        return [
            o
            for c in nbformat.read(self.notebook, as_version=4).cells
            if c.cell_type == "code"
            for o in c.outputs
        ]

    @property
    def text(self) -> str:
        "All that the notebook says, as plain text and as HTML."
        output = [
            o.text
            if o.output_type == "stream"
            else "\n".join(str(v) for k, v in o.get("data", {}).items() if k.startswith("text/"))
            for o in self.outputs
        ]
        return "\n".join(output)

    @property
    def errors(self) -> list[str]:
        return [f"{o.ename}: {o.evalue}" for o in self.outputs if o.output_type == "error"]

    @property
    def data_sets(self) -> list[Path]:
        return sorted(self.project.rglob("*.H5"))


def copy_project(folder: Path) -> Path:
    "As much of a checkout as a run notebook needs: its own folder, and the settings that mark the project's root."
    (folder / "nbs").mkdir(parents=True)
    shutil.copy(ROOT / "settings.ini", folder)
    for name in ("build", "benchmark"):
        shutil.copy(ROOT / "nbs" / f"{name}.ipynb", folder / "nbs")
    shutil.copytree(ROOT / "nbs" / "benchmarks", folder / "nbs" / "benchmarks")
    return folder


def papermill(
    project: Path, *args: str, data: Path | None = None, out: str = "out.ipynb", notebook: str = "build.ipynb"
) -> Run:
    "`papermill build.ipynb out.ipynb ...` in nbs/, with nothing of the user's own settings."
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("LEAKMEL_", "JUPYTER", "IPYTHON", "PYTEST_"))
    } | {"HOME": str(project)}
    if data:
        env["LEAKMEL_DATA"] = str(data)
    argv = ["papermill", notebook, out, "--no-progress-bar", *args]
    code = AS_TYPED.format(env=env, cwd=str(project / "nbs"), argv=argv)
    for seconds in (
        150,
        240,
    ):  # now and then papermill waits for an answer of a kernel that is idle and shows widgets
        done = forks().run(code=code, seconds=seconds)
        if not done.hung:
            break
    assert not done.hung, done.err
    return Run(done.status, done.out + done.err, project / "nbs" / out, project)


# The command papermill, in a fork of a process that imported it once: that takes as long as many a notebook.
IMPORTED = "from papermill.__main__ import papermill\n"
AS_TYPED = """
os.environ.clear()
os.environ.update({env!r})
os.chdir({cwd!r})
sys.argv = {argv!r}
papermill()
"""


@cache
def forks() -> Server:
    "The process that forks, which ends with this one."
    opened = server(IMPORTED)
    atexit.register(opened.__exit__, None, None, None)
    return opened.__enter__()


@dataclass(frozen=True)
class RunHere:
    "A run notebook that was executed in this process: what its cells print and show, and the error that ended it."

    text: str
    figures: list[go.Figure]
    error: str  # empty: none

    @property
    def titles(self) -> list[str]:
        return [figure.layout.title.text for figure in self.figures]


def run_here(notebook: str, **given: object) -> RunHere:
    "Execute a run notebook's cells in this process, with parameters as papermill sets them, up to the first error."
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed, error = io.StringIO(), ""
    figures: list[go.Figure] = []
    log = logging.getLogger("leakmel")
    level, path = log.level, list(sys.path)
    try:
        shown = mock.patch.object(go.Figure, "show", lambda figure, *_, **__: figures.append(figure))
        with redirect_stdout(printed), shown:
            for cell in nbformat.read(ROOT / "nbs" / notebook, as_version=4).cells:
                if cell.cell_type != "code":
                    continue
                value = execute_cell(cell.source, namespace, notebook)
                if isinstance(value, go.Figure):
                    figures.append(value)
                elif value is not None:
                    print(value)
                if "parameters" in cell.metadata.get("tags", []):
                    namespace |= given
    except lm.LeakmelError as e:
        error = str(e)
    finally:
        log.setLevel(level)
        sys.path[:] = path
    return RunHere(printed.getvalue(), figures, error)


def execute_cell(source: str, namespace: dict[str, object], notebook: str) -> object:
    "Execute a cell; gives the value of its last line where that is an expression."
    tree = ast.parse(source, notebook)
    value = None
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        tree.body.pop()
        value = ast.Expression(last.value)
    exec(compile(tree, notebook, "exec"), namespace)
    return eval(compile(value, notebook, "eval"), namespace) if value else None


def error_of(notebook: str, **given: object) -> str:
    "What stops a run notebook: see run_here."
    error = run_here(notebook, **given).error
    assert error, f"nothing stopped {notebook}"
    return error


def titles_of(run: Run) -> list[str]:
    return [o.data[PLOTLY]["layout"]["title"]["text"] for o in run.outputs if PLOTLY in o.get("data", {})]
