"No test and no example asserts a time or a load: it would fail on a busy machine. Loops that wait have a limit, which is no such assertion."

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
CLOCKS = {"perf_counter", "monotonic", "process_time", "time", "cpu_percent", "getloadavg", "loadavg"}


def has_clock(node: ast.AST) -> bool:
    "Whether an expression reads a clock, or a load."
    calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    return any(
        (
            isinstance(f, ast.Attribute)
            and f.attr in CLOCKS
            and ast.unparse(f.value) in ("time", "os", "psutil")
        )
        or ast.unparse(f) in CLOCKS - {"time"}
        for f in calls
    )


def durations(tree: ast.AST) -> set[str]:
    "Names of differences of a clock: `took = perf_counter() - began`, `took.append(...)`."
    found = set()
    for node in ast.walk(tree):
        is_difference = [
            n
            for n in ast.walk(node)
            if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) and has_clock(n)
        ]
        if isinstance(node, ast.Assign) and is_difference:
            found |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Call) and is_difference and isinstance(node.func, ast.Attribute):
            found |= {ast.unparse(node.func.value)} if node.func.attr == "append" else set()
    return found


def assertions_of_times(code: str) -> list[str]:
    "Assertions that compare a duration or a load with a number."
    tree = ast.parse(code)
    scopes: list[ast.AST] = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)] or [tree]
    found = []
    for scope in [*scopes, tree]:
        names = durations(scope) if scope is not tree or len(scopes) == 1 else set()
        for node in ast.walk(scope):
            for part in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
                if not isinstance(part, ast.Compare):
                    continue
                sides = [part.left, *part.comparators]
                measured = [
                    s
                    for s in sides
                    if has_clock(s) or any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(s))
                ]
                if measured and any(isinstance(n, ast.Constant) and n.value for s in sides for n in [s]):
                    found.append(ast.unparse(node))
    return found


def pieces() -> Iterator[tuple[str, str]]:
    "Code of all tests, and of all cells of notebooks."
    for path in (ROOT / "tests").rglob("*.py"):
        yield path.name, path.read_text(encoding="utf-8")
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        if path.name.startswith((".", "_", "out")):
            continue
        for n, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code" and not cell.source.startswith(("%", "!")):
                yield f"{path.relative_to(ROOT)}, cell {n}", cell.source


def test_no_time_is_asserted() -> None:
    bad: tuple[str, ...] = (
        "t0 = time.monotonic()\nassert time.monotonic() - t0 < 5",
        "assert psutil.cpu_percent() > 20",
    )
    bad += (
        "took = []\ntook.append(perf_counter() - a)\nassert took[-1] < 2",
        "s = time.time() - a\nassert 0.1 < s",
    )
    for code in bad:
        assert assertions_of_times(code), code
    assert not assertions_of_times("end = time.monotonic() + 60\nassert time.monotonic() < end, 'it hangs'")
    assert {where: found for where, code in pieces() if (found := assertions_of_times(code))} == {}


def test_tests_run_where_sigint_is_ignored(tmp_path: Path) -> None:
    "As in a background job of a script: tests, and the children that they start, take the signal."
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_it.py").write_text(
        "import os, signal, subprocess, sys, pytest\n"
        "def test_it():\n"
        "    with pytest.raises(KeyboardInterrupt):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    code = 'import os, signal; os.kill(os.getpid(), signal.SIGINT)'\n"
        "    assert subprocess.run([sys.executable, '-c', code], stderr=subprocess.DEVNULL).returncode == -2\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "helpers")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
