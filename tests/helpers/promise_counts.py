"""Count what the tests of each promise tried, and keep it as data for nbs/explanations/promises.ipynb.

`LEAKMEL_PROMISES=FILE pytest ...` writes FILE; without it nothing is written. A test counts for the promises that name it in promises.toml:
one trial, as many as it runs cases by `@each`, or as many as it says by the fixture `tried`. A test that fails counts what held before and
one failure. Only what ran counts, and long variants stand apart from the others. A second run of the same commit adds to FILE; what it ran
again replaces what was there.
"""

import json
import subprocess
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from leakmel.core.monitor import machine_facts
from leakmel.extras.machine.bench import commit

ROOT = Path(__file__).resolve().parents[2]
PROMISES = ROOT / "nbs" / "explanations" / "promises.toml"
COUNTS = ("tests", "trials", "failures", "skipped")


def names_of_promises() -> dict[str, list[str]]:
    "The promises that name each test, by file::function."
    named: dict[str, list[str]] = {}
    for promise, p in tomllib.loads(PROMISES.read_text(encoding="utf-8")).items():
        for test in p["tests"]:
            named.setdefault(test, []).append(promise)
    return named


def function_of(nodeid: str) -> str:
    "file::function of a test, without its parameters."
    file, _, function = nodeid.partition("[")[0].partition("::")
    return f"{file.rpartition('/')[2]}::{function}"


class Counted:
    "A plugin of the process that reports."

    def __init__(self, config: pytest.Config, path: Path):
        self.config, self.path, self.named, self.began = config, path, names_of_promises(), time.monotonic()
        self.tests: dict[
            str, dict[str, dict[str, dict[str, int]]]
        ] = {}  # test -> "short" or "long" -> promise -> counts
        self.bad: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        "The report of a step; of each test one counts: its call, a set-up that did not come to it, or a clean-up that failed."
        if (report.when == "setup" and report.passed) or (
            report.when == "teardown" and (not report.failed or report.nodeid in self.bad)
        ):
            return
        if report.failed:
            self.bad.add(report.nodeid)
        variant = "long" if "long" in report.keywords else "short"
        trials: dict[str, int] = {}
        cases = dict(report.user_properties).get("cases")  # of a test that runs a table of them
        n_held = cast(int, cases) if cases is not None else int(not report.failed)
        for key, value in report.user_properties:
            if key == "tried":
                trials[cast(Any, value)[0]] = trials.get(cast(Any, value)[0], 0) + cast(Any, value)[1]
        for promise in self.named.get(function_of(report.nodeid), []):
            counts = (
                self.tests.setdefault(function_of(report.nodeid), {})
                .setdefault(variant, {})
                .setdefault(promise, dict.fromkeys(COUNTS, 0))
            )
            if report.skipped:
                counts["skipped"] += 1
            elif report.when == "teardown":
                counts["failures"] += 1  # its call was counted
            else:
                counts["tests"] += 1
                counts["trials"] += trials.get(promise, n_held) + report.failed
                counts["failures"] += report.failed

    def pytest_sessionfinish(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")

    def record(self) -> dict[str, Any]:
        "This run, added to those of the same commit that are in the file."
        run = {
            "made_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit()["commit"],
            "changed": is_changed(),
            "markers": self.config.option.markexpr,
            "seconds": round(time.monotonic() - self.began, 1),
            "workers": getattr(self.config.option, "numprocesses", None) or 1,
        }
        earlier = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        if earlier.get("commit") != run["commit"]:
            earlier = {}
        tests = earlier.get("tests", {})
        for name, variants in self.tests.items():
            tests[name] = tests.get(name, {}) | variants
        return {
            "suite": "promises",
            "made_utc": run["made_utc"],
            "commit": run["commit"],
            "machine": machine_facts(),
            "runs": [*earlier.get("runs", []), run],
            "figures": figures(tests),
            "tests": dict(sorted(tests.items())),
        }


def figures(tests: dict[str, dict[str, dict[str, dict[str, int]]]]) -> dict[str, dict[str, Any]]:
    "Sums for each promise: of all, and of short and long variants."
    sums: dict[str, dict[str, Any]] = {}
    for variants in tests.values():
        for variant, promises in variants.items():
            for promise, counts in promises.items():
                mine = sums.setdefault(
                    promise,
                    dict.fromkeys(COUNTS, 0) | {v: dict.fromkeys(COUNTS, 0) for v in ("short", "long")},
                )
                for key in COUNTS:
                    mine[key] += counts[key]
                    mine[variant][key] += counts[key]
    return dict(sorted(sums.items(), key=lambda item: int(item[0][1:])))


def is_changed() -> bool | None:
    "Whether package or tests are other than those of the commit; None where there is no git."
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain", "--", "leakmel", "tests"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return bool(done.stdout.strip())
