"What is counted for the promises is what ran."

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from promise_counts import Counted, figures, function_of

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
ROT = "tests/dataset/test_bit_rot.py::test_flipped_bits"  # named by S14


def report(
    outcome: str,
    when: str = "call",
    *,
    nodeid: str = f"{ROT}[a::b]",
    trials: int | None = None,
    cases: int | None = None,
    long: bool = False,
) -> Any:
    "What pytest says of a step."
    return SimpleNamespace(
        nodeid=nodeid,
        when=when,
        keywords={"long": 1} if long else {},
        user_properties=([("tried", ["S14", trials])] if trials else [])
        + ([("cases", cases)] if cases is not None else []),
        passed=outcome == "passed",
        failed=outcome == "failed",
        skipped=outcome == "skipped",
    )


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(
        SimpleNamespace(option=SimpleNamespace(markexpr="not long", numprocesses=2)),  # type: ignore[arg-type]
        tmp_path / "new" / "x.json",
    )


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report("passed", "setup"), report("passed"), report("passed", "teardown")], (1, 1, 0, 0)),
        ([report("passed", trials=25)], (1, 25, 0, 0)),
        ([report("passed", cases=30)], (1, 30, 0, 0)),
        ([report("failed", cases=29)], (1, 30, 1, 0)),
        ([report("passed", cases=30, trials=25)], (1, 25, 0, 0)),
        ([report("failed")], (1, 1, 1, 0)),
        ([report("failed", trials=7)], (1, 8, 1, 0)),
        ([report("failed", "setup"), report("passed", "teardown")], (1, 1, 1, 0)),
        ([report("passed"), report("failed", "teardown")], (1, 1, 1, 0)),
        ([report("failed"), report("failed", "teardown")], (1, 1, 1, 0)),
        ([report("skipped", "setup")], (0, 0, 0, 1)),
        ([report("skipped")], (0, 0, 0, 1)),
        ([report("passed"), report("passed", nodeid=f"{ROT}[2]", trials=3)], (2, 4, 0, 0)),
    ],
)
def test_counts(counted: Counted, reports: list[Any], expected: tuple[int, ...]) -> None:
    for r in reports:
        counted.pytest_runtest_logreport(r)
    (figure,) = figures(counted.tests).values()
    assert tuple(figure["short"].values()) == expected
    assert tuple(figure[key] for key in ("tests", "trials", "failures", "skipped")) == expected
    assert not any(figure["long"].values())


def test_long_variants_are_counted_separately(counted: Counted) -> None:
    for r in (
        report("passed", trials=25),
        report("passed", trials=250, long=True),
        report("failed", nodeid="tests/test_bit_rot.py::test_other"),
    ):
        counted.pytest_runtest_logreport(r)
    found = figures(counted.tests)
    assert list(found) == ["S14"]
    assert (found["S14"]["trials"], found["S14"]["short"]["trials"], found["S14"]["long"]["trials"]) == (
        275,
        25,
        250,
    )


def test_a_second_run_of_the_commit_adds_and_replaces(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now, trials in (("a", 25), ("a", 26), ("b", 27)):
        monkeypatch.setattr("promise_counts.commit", lambda now=now: {"commit": now, "changed": False})
        counted.tests = {}
        counted.pytest_runtest_logreport(report("passed", trials=trials, long=trials == 25))
        counted.pytest_sessionfinish()
        stored = json.loads(counted.path.read_text())
        assert stored["suite"] == "promises"
        assert len(stored["runs"]) == {25: 1, 26: 2, 27: 1}[trials]
        assert stored["figures"]["S14"]["trials"] == {25: 25, 26: 51, 27: 27}[trials]


def test_names_without_parameters() -> None:
    assert (
        function_of("tests/test_x.py::test_y[a::b/c]")
        == function_of("test_x.py::test_y")
        == "test_x.py::test_y"
    )


@pytest.mark.slow
def test_a_run_in_workers_is_counted(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {
        "LEAKMEL_PROMISES": str(tmp_path / "x.json")
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "1",
        "-p",
        "no:cacheprovider",
        f"{ROT}[25-labels]",
        f"{ROT}[25-paths]",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    stored = json.loads((tmp_path / "x.json").read_text())
    assert stored["figures"] == {
        "S14": {
            "tests": 2,
            "trials": 50,
            "failures": 0,
            "skipped": 0,
            "short": {"tests": 2, "trials": 50, "failures": 0, "skipped": 0},
            "long": {"tests": 0, "trials": 0, "failures": 0, "skipped": 0},
        }
    }
    assert stored["machine"]["h5py"]
    assert stored["runs"][0]["markers"] == "not long"
