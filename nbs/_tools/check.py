"""`make check`, the edit loop: format, lint, notebooks against package, types and the quick tests, side by side; under 90 s on 2 cores.

Quick tests are those of files marked quick, without the ones that are marked slow. What a check prints is shown
where it fails.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Done:
    "A check that has ended."

    name: str
    status: int
    output: str
    seconds: float


def run(name: str, *command: str | Path) -> Done:
    "Run a check and keep what it prints."
    began = time.perf_counter()
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return Done(name, done.returncode, done.stdout, time.perf_counter() - began)


def static_checks() -> list[Done]:
    "All that runs no code of the package but the notebooks' export; the quick ones first."
    return [
        run("format", BIN / "ruff", "format", "--check", "nbs", "tests", "setup.py"),
        run(
            "lint",
            BIN / "ruff",
            "check",
            "leakmel",
            "tests",
            "nbs/_tools",
            *(ROOT / "nbs" / "benchmarks").glob("*.py"),
        ),
        run("notebooks and package", sys.executable, "nbs/_tools/sync.py", "--check"),
        run("types", BIN / "mypy"),
    ]


def quick_tests(workers: str) -> list[Done]:
    chosen = ["-m", "quick and not slow and not long", "-n", workers, "--dist", "loadfile"]
    return [run("quick tests", sys.executable, "-m", "pytest", "-q", *chosen)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="2", help="processes that run tests (default 2)")
    args = parser.parse_args()
    began = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        lanes = [pool.submit(static_checks), pool.submit(quick_tests, args.workers)]
        done = [check for lane in lanes for check in lane.result()]
    for check in done:
        print(f"{'ok' if check.status == 0 else 'FAILED':7} {check.name} ({check.seconds:.0f} s)")
        if check.status:
            print(check.output.rstrip(), end="\n\n")
    print(f"{time.perf_counter() - began:.0f} s")
    return 0 if all(check.status == 0 for check in done) else 1


if __name__ == "__main__":
    sys.exit(main())
