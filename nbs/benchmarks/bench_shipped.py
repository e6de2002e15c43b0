"""What ships in two checkouts: defaults of `lm.train` and `lm.predict` on small tasks of real recordings, paired.

python nbs/benchmarks/bench_shipped.py WORK before=../old now=. --sources PUBLIC --store runs/benchmarks

This protocol was written before the run. Tasks are the sets of `bench_small`, none of which is part of the project. In
each draw two thirds of the groups (recorders, speakers, recordings, blocks) are there to learn from: 48 or 100
recordings of them, every second draw each, in whole groups; a quarter of these groups, or as many as both labels take,
is given as validation set. Up to 300 recordings of the other groups are predicted from their files, and decided as the
model decides. The score is balanced accuracy; AUC stands next to it. Both checkouts get the same recordings and
settings. A draw whose groups do not give both labels to each part is left out and replaced by the next one; one that a
checkout refuses, for recordings that are too short, is left out.

Differences are paired by draw. The interval of a task is Student's over its draws; that of the mean over tasks comes
from 10,000 bootstrap samples of draws within tasks (95 %). Asked for: at least +0.03 in the mean, and no task below
-0.02.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (48, 100)  # recordings to learn from
MOST_TESTED = 300
FIRST_SEED = 11_000
PARTS = ("training", "validation", "test")


def divide(rows: Sequence[Any], n: int, seed: int) -> dict[str, list[Any]] | None:
    "Divide recordings by whole groups; None if a part lacks a label."
    from bench_small import cut_rows

    rng = np.random.default_rng([FIRST_SEED, seed])
    groups = rng.permutation(sorted({group for *_, group in rows})).tolist()
    learned = set(groups[: round(2 / 3 * len(groups))])
    chosen = cut_rows([row for row in rows if row[2] in learned], n, FIRST_SEED + seed)
    own = rng.permutation(sorted({group for *_, group in chosen})).tolist()
    held: set[str] = set()
    while own and (len(held) < len(own) // 4 or len({label for _, label, g in chosen if g in held}) < 2):
        held.add(own.pop())
    others = sorted(row for row in rows if row[2] not in learned)
    tested = rng.permutation(len(others))[:MOST_TESTED].tolist()
    parts = {
        "training": [row for row in chosen if row[2] not in held],
        "validation": [row for row in chosen if row[2] in held],
        "test": [others[k] for k in tested],
    }
    return parts if all(len({label for _, label, _ in own}) == 2 for own in parts.values()) else None


def prepare(work: Path, sources: Path, draws: int) -> None:
    "Write the tables of all draws."
    from bench_small import SETS

    tasks = []
    for name, s in SETS.items():
        if not (sources / s.source).is_dir():
            raise SystemExit(f"{sources / s.source} is missing: a repository of this name is needed there")
        root, rows = s.read(sources / s.source, work)
        seed = found = 0
        while found < draws and seed < 20 * draws:
            n = SIZES[found % len(SIZES)]
            parts = divide(rows, n, seed)
            seed += 1
            if parts is None:
                continue
            folder = work / f"{name} {found}"
            folder.mkdir(exist_ok=True)
            for part, own in parts.items():
                with (folder / f"{part}.csv").open("w", newline="") as f:
                    csv.writer(f).writerows([("path", "label", "sensor"), *own])
            about = {"set": name, "draw": found, "size": n, "root": str(root), "spec": s.spec}
            tasks.append(about | {"folder": folder.name, "tested": len(parts["test"])})
            found += 1
    # draws of all tasks in turn, so that a run that is stopped has some of each
    (work / "tasks.json").write_text(json.dumps(sorted(tasks, key=lambda t: t["draw"]), indent=1))


def ranked(scores: np.ndarray, is_leak: np.ndarray) -> float:
    "Return the AUC."
    wins = scores[is_leak][:, None] - scores[~is_leak]
    return float((wins > 0).mean() + (wins == 0).mean() / 2)


def measure(folder: Path, about: dict[str, Any], name: str) -> dict[str, float]:
    "Train and predict with the package of this process."
    import leakmel as lm

    root, spec, made = Path(about["root"]), about["spec"], {}
    for part in PARTS[:2]:
        out = folder / f"{name}-{part}.h5"
        manifest = lm.scan(root, table=folder / f"{part}.csv", progress="none")
        lm.build(root, out=out, manifest=manifest, spec=spec, progress="none")
        made[part] = out
        with lm.open_dataset(out) as dataset:  # lengths that are chosen by the recordings
            spec = dataset.spec
    model = folder / f"{name}-model"
    lm.train(made["training"], made["validation"], out=model, progress="none", resume="never")
    manifest = lm.scan(root, table=folder / "test.csv", progress="none")
    scores = folder / f"{name}.csv"
    lm.predict(root, model, out=scores, manifest=manifest, progress="none")
    with scores.open(newline="") as f:
        rows = list(csv.DictReader(f))
    is_leak = np.array([row["label"] == "LEAK" for row in rows])
    called = np.array([row["leak"].lower() in ("true", "1", "leak", "yes") for row in rows])
    right = [float((called == is_leak)[part].mean()) for part in (is_leak, ~is_leak)]
    values = np.array([float(row["score"]) for row in rows])
    return {"balanced_accuracy": sum(right) / 2, "auc": ranked(values, is_leak), "n": len(rows)}


def child(work: Path, name: str) -> None:
    "Measure the draws that have no result of this checkout yet."
    import leakmel as lm

    results = work / f"{name}.jsonl"
    known = (
        {json.loads(line)["folder"] for line in results.read_text().splitlines()}
        if results.exists()
        else set()
    )
    for about in json.loads((work / "tasks.json").read_text()):
        if about["folder"] not in known:
            try:
                found: dict[str, Any] = measure(work / about["folder"], about, name)
            except lm.LeakmelError as e:  # of recordings that are too short, a part has lost a label
                found = {"left_out": e.code}
            with results.open("a") as f:
                f.write(json.dumps({"folder": about["folder"], **found}) + "\n")


def paired(work: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    "Yield the draws that all checkouts have measured."
    found = {
        name: {
            one.pop("folder"): one
            for one in map(json.loads, (work / f"{name}.jsonl").read_text().splitlines())
        }
        for name in names
    }
    for about in json.loads((work / "tasks.json").read_text()):
        if all("auc" in own.get(about["folder"], ()) for own in found.values()):
            kept = {key: about[key] for key in ("set", "draw", "size", "tested")}
            yield kept | {name: own[about["folder"]] for name, own in found.items()}


def shipped_table(draws: Sequence[dict[str, Any]], names: Sequence[str] = ("before", "now")) -> str:
    "Show balanced accuracy of each task before and now, and the differences with intervals."
    from scipy import stats

    first, last = names
    lines = [f"{'task':14s}{'draws':>6s}{first:>8s}{last:>8s}   difference       AUC"]
    sets = list(dict.fromkeys(d["set"] for d in draws))
    gains = {}
    for name in sets:
        own = [d for d in draws if d["set"] == name]
        gain = {
            key: np.array([d[last][key] - d[first][key] for d in own]) for key in ("balanced_accuracy", "auc")
        }
        gains[name] = gain
        ba = gain["balanced_accuracy"]
        half = stats.t.ppf(0.975, len(ba) - 1) * ba.std(ddof=1) / len(ba) ** 0.5
        means = [np.mean([d[key]["balanced_accuracy"] for d in own]) for key in names]
        lines.append(
            f"{name:14s}{len(own):6d}{means[0]:8.3f}{means[1]:8.3f}   {ba.mean():+.3f} ± {half:.3f}  {gain['auc'].mean():+.3f}"
        )
    rng = np.random.default_rng(1)
    for key in ("balanced_accuracy", "auc"):
        samples = np.mean(
            [
                own[key][rng.integers(0, len(own[key]), (10_000, len(own[key])))].mean(1)
                for own in gains.values()
            ],
            axis=0,
        )
        low, high = np.percentile(samples, [2.5, 97.5])
        mean = np.mean([own[key].mean() for own in gains.values()])
        lines.append(f"mean difference of {key}: {mean:+.3f} ({low:+.3f}, {high:+.3f}), {len(draws)} draws")
    return "\n".join(lines)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("work", type=Path)
    ask.add_argument("trees", nargs="*", help="NAME=FOLDER of two checkouts, the earlier one first")
    ask.add_argument("--sources", type=Path, help="folder with the repositories of bench_small.SETS")
    ask.add_argument("--draws", type=int, default=30, help="of each task")
    ask.add_argument("--store", type=Path, help="folder of the record")
    ask.add_argument("--child", help=argparse.SUPPRESS)
    given = ask.parse_args()
    work = given.work.resolve()
    if given.child:
        child(work, given.child)
        return
    trees = {name: Path(folder).resolve() for name, folder in (one.split("=", 1) for one in given.trees)}
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tasks.json").exists():
        prepare(work, given.sources.resolve(), given.draws)
    runs = [
        subprocess.Popen(
            [sys.executable, __file__, str(work), "--child", name],
            env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            cwd=work,
        )
        for name, tree in trees.items()
    ]
    if any(list(map(subprocess.Popen.wait, runs))):
        raise SystemExit("a checkout failed; the same command continues")
    draws = list(paired(work, list(trees)))
    print(shipped_table(draws, list(trees)))
    if given.store:
        from bench_versions import commit

        from leakmel.extras.machine.bench import record_head, store

        head = record_head("shipped")
        print(
            store({**head, "commits": {n: commit(t) for n, t in trees.items()}, "draws": draws}, given.store)
        )


if __name__ == "__main__":
    main()
