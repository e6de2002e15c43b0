"""Rates of two checkouts side by side: builds A and B, training of a network and prediction as whole processes, in turn.

python nbs/benchmarks/bench_versions.py WORK_FOLDER before=../old now=. --rounds 7 --store runs/benchmarks
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MAIN = "import sys; from leakmel.cli import main; sys.exit(main())"
# one network with a validation set, in every version: what `leakmel train` does in addition is not a rate
TRAIN = """import sys
import leakmel as lm
try:
    from leakmel.detector.train.loop import train_with_validation as train
except ImportError:
    train = lm.train
training, validation, out = sys.argv[1:4]
settings = lm.TrainSettings(detector="cnn", epochs=3)
train(training, validation, out=out, settings=settings, device="cpu", resume="never", progress=False)
"""
N_BUILD, N_TRAIN = 20_000, 1_000  # recordings of the sets


def tasks(work: Path, out: Path) -> dict[str, list[str]]:
    "The command of each task."
    build = ["build", str(work / "large"), "--split", "training", "--engine", "cpu", "--no-fsync", "--fresh"]
    sets = [str(work / "sets" / f"{part}_DATASET.H5") for part in ("TRAINING", "VALIDATION")]
    predict = [
        "predict",
        str(work / "small"),
        "--model",
        str(work / "model"),
        "--engine",
        "cpu",
        "--device",
        "cpu",
    ]
    return {
        "build A": [*build, "--preset", "disjoint", "--out", str(out / "A.H5")],
        "build B": [*build, "--preset", "overlap", "--out", str(out / "B.H5")],
        "training": [TRAIN, *sets, str(out / "model")],
        "prediction": [*predict, "--out", str(out / "scores.csv")],
    }


def run(tree: Path, words: list[str]) -> dict[str, float]:
    "Wall and processor seconds of one command of the package, or of TRAIN, in a checkout."
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "2"}
    started = time.perf_counter()
    code = words if words[0] == TRAIN else [MAIN, *words, "--json"]
    child = subprocess.Popen([sys.executable, "-c", *code], env=env, cwd=tree, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{words[0][:20]} failed with exit status {child.returncode} in {tree}")
    return {"wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime, "peak_rss_bytes": used.ru_maxrss * 1024}


def prepare(work: Path, tree: Path) -> None:
    "Write the recordings, the small data sets and the model once."
    for name, n in (("large", N_BUILD * 10 // 7), ("small", N_TRAIN)):
        if not (work / name).is_dir():
            run(tree, ["demo", str(work / name), "--files", str(n)])
    if not (work / "model").is_dir():
        run(
            tree,
            ["build", str(work / "small"), "--split", "all", "--out", str(work / "sets"), "--engine", "cpu"],
        )
        run(
            tree,
            ["train", str(work / "sets"), "--detector", "cnn", "--epochs", "1", "--out", str(work / "model")],
        )


def compare(work: Path, trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    "Median wall and processor seconds of each task in each checkout."
    prepare(work, next(iter(trees.values())))
    out = work / "out"
    out.mkdir(exist_ok=True)
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        task: {name: [] for name in trees} for task in tasks(work, out)
    }
    for i in range(-1, rounds):  # the round before the first fills the caches
        for task, words in tasks(work, out).items():
            for name, tree in (list(trees.items()), list(trees.items())[::-1])[i % 2]:
                figures = run(tree, words)
                if i >= 0:
                    found[task][name].append(figures)
                print(
                    f"{'warm' if i < 0 else i + 1}: {task}: {name}: {figures['wall_s']:.2f} s",
                    file=sys.stderr,
                )
    return {
        task: {
            name: {
                key: {"median": statistics.median(v), "least": min(v), "most": max(v)}
                for key in kept[0]
                for v in [[one[key] for one in kept]]
            }
            for name, kept in ways.items()
        }
        for task, ways in found.items()
    }


def commit(tree: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, help="folder of the recordings and results")
    parser.add_argument("trees", nargs="+", metavar="NAME=CHECKOUT")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="write a record into this folder")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    trees = {name: Path(path).resolve() for name, _, path in (t.partition("=") for t in args.trees)}
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    record = {
        "suite": "versions",
        "made_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu[1] if cpu else "",
            "n_cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "commits": {name: commit(tree) for name, tree in trees.items()},
        "recordings": {"build A": N_BUILD, "build B": N_BUILD, "training": N_TRAIN, "prediction": N_TRAIN},
        "rounds": args.rounds,
        "interval": "whole processes, imports included; checkouts in turn, in alternating order",
        "figures": compare(args.work.resolve(), trees, args.rounds),
    }
    for task, ways in record["figures"].items():
        for name, f in ways.items():
            print(f"{task:<11} {name:<8} {f['wall_s']['median']:7.2f} s  {f['cpu_s']['median']:7.2f} CPU s")
    if args.store:
        args.store.mkdir(parents=True, exist_ok=True)
        path = (
            args.store
            / f"versions-{record['made_utc'][:10].replace('-', '')}-{list(record['commits'].values())[-1]}.json"
        )
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
