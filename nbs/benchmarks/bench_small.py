"""Detectors and baselines on many small tasks of real recordings, by cross-validation with groups."""

import csv
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import leakmel as lm
from leakmel.core.errors import DataError
from leakmel.extras.machine.bench import record_head

Row = tuple[str, str, str]  # path below the root, label, group
Reader = Callable[[Path, Path], tuple[Path, list[Row]]]  # source, work folder -> root, rows


@dataclass(frozen=True)
class SmallSet:
    "Public set of recordings with two labels, which is cut into small tasks; nothing of it is part of the project."

    source: str  # folder below `sources`, as its repository is called
    leak: str  # what stands for a leak
    group: str  # what is held out together
    read: Reader
    spec: dict[str, Any] = field(default_factory=dict)  # of the features


def _cries(source: Path, work: Path) -> tuple[Path, list[Row]]:
    root = source / "donateacry_corpus_cleaned_and_updated_data"
    paths = sorted(root.glob("*/*.wav"))
    return root, [
        (str(p.relative_to(root)), "OTHER" if "hungry" in str(p) else "LEAK", p.name[:36]) for p in paths
    ]


def _instruments(*names: str) -> Reader:
    def read(source: Path, work: Path) -> tuple[Path, list[Row]]:
        root = source / "wavfiles"
        paths = sorted(root.glob("*/*.wav"))
        return root, [
            (str(p.relative_to(root)), "LEAK" if p.parent.name in names else "OTHER", p.name) for p in paths
        ]

    return read


def _digits(digits: str) -> Reader:
    def read(source: Path, work: Path) -> tuple[Path, list[Row]]:
        root, rows = source / "recordings", []
        for p in sorted(root.glob("*.wav")):
            digit, speaker, _ = p.stem.split("_")
            rows.append((p.name, "LEAK" if digit in digits else "OTHER", speaker))
        return root, rows

    return read


def _gas(source: Path, work: Path) -> tuple[Path, list[Row]]:
    import soundfile

    root, rows = work / "gpla12", []
    root.mkdir(parents=True, exist_ok=True)
    tables = [
        (source / "data" / "data_v1" / name).read_text().splitlines() for name in ("data.csv", "label.csv")
    ]
    for k, (line, label) in enumerate(zip(*tables, strict=True)):
        x = np.array(line.split(","), np.float64)
        soundfile.write(root / f"{k:04d}.wav", (x - x.mean()) / 1500, 4096, subtype="PCM_16")
        condition = int(label)
        rows.append((f"{k:04d}.wav", "LEAK" if condition % 2 else "OTHER", f"c{condition}b{k % 57 // 10}"))
    return root, rows


_CLIPS = {"sample_rate": 8000, "duration_s": 4.0}
_WORDS = {"duration_s": 0.5}
SETS = {
    "cries": SmallSet("donateacry-corpus", "not hungry", "recorder", _cries, {"sample_rate": 8000}),
    "winds": SmallSet(
        "Audio-Classification",
        "wind instrument",
        "recording",
        _instruments("Flute", "Saxophone", "Clarinet"),
        _CLIPS,
    ),
    "strings": SmallSet(
        "Audio-Classification",
        "string instrument",
        "recording",
        _instruments("Cello", "Violin_or_fiddle", "Double_bass", "Acoustic_guitar"),
        _CLIPS,
    ),
    "digits 367": SmallSet("free-spoken-digit-dataset", "3, 6 or 7", "speaker", _digits("367"), _WORDS),
    "even digits": SmallSet("free-spoken-digit-dataset", "even digit", "speaker", _digits("02468"), _WORDS),
    "digits 1459": SmallSet("free-spoken-digit-dataset", "1, 4, 5 or 9", "speaker", _digits("1459"), _WORDS),
    "gas": SmallSet("acoustic-leakage-dataset-GPLA-12", "odd condition", "block of a condition", _gas),
}


def cut_rows(
    rows: Sequence[Row],
    n: int,  # recordings
    seed: int = 0,
) -> list[Row]:  # n, or a few less
    "Choose whole groups at random with both labels; of a group that is larger than 15 % of the task, some recordings."
    rng = np.random.default_rng([seed, n])
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[2], []).append(row)
    counts, chosen = {"LEAK": 0, "OTHER": 0}, []
    for name in rng.permutation(sorted(groups)).tolist():
        own = groups[name]
        most = max(2, round(0.15 * n))
        if len(own) > most:
            own = [own[k] for k in np.sort(rng.choice(len(own), most, replace=False))]
        added = {label: sum(row[1] == label for row in own) for label in counts}
        if any(counts[label] + added[label] > 0.7 * n for label in counts):
            continue
        counts = {label: counts[label] + added[label] for label in counts}
        chosen += own
        if sum(counts.values()) >= n:
            break
    return sorted(chosen)


def _figures(model: Any) -> dict[str, Any]:
    i = model.intervals["auc"]
    known = bool(i.known)
    figures = {name: float(model.figures[name]) for name in ("auc", "balanced_accuracy")}
    return figures | {
        "auc_low": float(i.low) if known else None,
        "auc_high": float(i.high) if known else None,
    }


def measure_task(
    path: Path,  # data set
    work: Path,  # finished fits are kept here
    kinds: Sequence[str],  # of detectors
) -> dict[str, Any]:
    "Cross-validate each kind of detector on a task, with the baselines in the same folds."
    found: dict[str, Any] = {"detectors": {}}
    for kind in kinds:
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # recordings that are too short for one segment
            out = lm.cross_validate(
                path,
                out=work,
                settings=lm.TrainSettings(detector=kind),  # type: ignore[arg-type]
                progress="none",
                n_draws=1000,
            )
        is_whole = out.n_done == out.n_fits  # no fit was read from an earlier run
        found["detectors"][kind] = _figures(out.detector) | {
            "seconds": time.perf_counter() - began if is_whole else None,
            "kinds": out.kinds,
        }
        found |= {
            "recordings": len(out),
            "leaks": int(out.table["leak"].sum()),
            "groups": len(out.groups),
            "baselines": {name: _figures(model) for name, model in out.baselines.items()},
        }
    return found


def _cut_task(name: str, source: Path, work: Path, n: int, draw: int) -> tuple[Path, bool]:
    "Build the data set of a task; returns its path, and whether it was verified."
    s = SETS[name]
    root, rows = s.read(source, work)
    table, path = work / f"{name}-{n}-{draw}.csv", work / f"{name}-{n}-{draw}.h5"
    with table.open("w", newline="") as f:
        csv.writer(f).writerows([("path", "label", "sensor"), *cut_rows(rows, n, draw)])
    manifest = lm.scan(root, table=table, progress="none")
    built = lm.build(root, out=path, manifest=manifest, spec=s.spec, progress="none")
    return path, built.verified.ok


def _synthetic_task(work: Path, n: int, draw: int) -> tuple[Path, bool]:
    "Build a data set of a synthetic network; returns its path, and whether it was verified."
    demo, path = work / f"demo-{n}-{draw}", work / f"synthetic-{n}-{draw}.h5"
    if not demo.exists():
        lm.write_demo(demo, n_files=n, seed=draw)
    built = lm.build(demo / "TRAINING", out=path, progress="none")
    return path, built.verified.ok


def bench_small(
    folder: str | os.PathLike,  # work folder: tasks and finished fits are kept there and used again
    *,
    sources: str = "",  # folder with the repositories of SETS; sets that are not there are left out
    sizes: Sequence[int] = (24, 48, 100, 300),  # recordings of a task
    draws: Sequence[int] = (
        20,
        20,
        5,
        5,
    ),  # random cuts of each set to each size: the smaller, the more they differ
    kinds: Sequence[str] = ("spectral", "cnn", "auto"),  # cnn is fitted on the first draw only: it takes long
    synthetic: bool = True,  # also tasks from the demo generator
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Measure detectors and baselines on small tasks."
    work, tasks, right = Path(folder), [], True
    work.mkdir(parents=True, exist_ok=True)
    names = [name for name, s in SETS.items() if sources and (Path(sources) / s.source).is_dir()]
    names += ["synthetic"] if synthetic else []
    wanted = [
        (n, name, k) for n, most in zip(sizes, draws, strict=True) for name in names for k in range(most)
    ]
    for n, name, draw in wanted:
        log(f"{name}, {n} recordings, draw {draw + 1}")
        if name == "synthetic":
            about = {"leak": "leak", "group": "sensor"}
            path, ok = _synthetic_task(work, n, draw)
        else:
            about = {"leak": SETS[name].leak, "group": SETS[name].group}
            path, ok = _cut_task(name, Path(sources) / SETS[name].source, work, n, draw)
        right &= ok
        fitted = [kind for kind in kinds if kind != "cnn" or draw == 0]
        try:
            found = measure_task(path, path.with_suffix(""), fitted)
        except DataError as e:
            if e.code != "label-in-one-part":
                raise
            log(f"no folds: {e}")  # too few groups with one of the labels
            continue
        tasks.append({"set": name, "size": n, "draw": draw} | about | found)
        (work / "tasks.json").write_text(json.dumps(tasks, indent=1))
    return {**record_head("small-sets"), "verified": {"all_ok": right}, "kinds": list(kinds), "tasks": tasks}


@dataclass(frozen=True)
class SmallTask:
    "A set cut to one size: means over its draws."

    name: str
    size: int  # recordings asked for
    draws: int
    baselines: dict[str, float]  # AUC
    detectors: dict[str, float]  # AUC; a kind that was fitted on the first draw only has that

    @property
    def best(self) -> float:
        "AUC of the baseline that is best on average."
        return max(self.baselines.values())


def small_tasks(record: dict[str, Any]) -> list[SmallTask]:
    "Average the draws of each set and size."
    cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for t in record["tasks"]:
        cells.setdefault((t["set"], t["size"]), []).append(t)

    def means(own: list[dict[str, Any]], part: str) -> dict[str, float]:
        names = dict.fromkeys(name for t in own for name in t[part])
        return {n: float(np.mean([t[part][n]["auc"] for t in own if n in t[part]])) for n in names}

    return [
        SmallTask(name, size, len(own), means(own, "baselines"), means(own, "detectors"))
        for (name, size), own in cells.items()
    ]


def small_table(record: dict[str, Any]) -> str:
    "AUC of each task as a text table, with the distance of the last kind from the best baseline."
    kinds, tasks = record["kinds"], small_tasks(record)
    names = ["level", "mean_mels", "trees", *kinds]
    lines = [
        f"{'task':12s} {'n':>4s} {'draws':>6s} "
        + " ".join(f"{n:>9s}" for n in names)
        + "  last - best baseline"
    ]
    for t in tasks:
        of = t.baselines | t.detectors
        cells = " ".join(f"{of[n]:9.3f}" if n in of else f"{'':9s}" for n in names)
        lines.append(f"{t.name:12s} {t.size:4d} {t.draws:6d} {cells}  {of[kinds[-1]] - t.best:+.3f}")
    if tasks:
        gaps = [t.detectors[kinds[-1]] - t.best for t in tasks]
        average = np.mean([[t.detectors[kinds[-1]], *t.baselines.values()] for t in tasks], 0)
        others = ", ".join(f"{n} {v:.3f}" for n, v in zip(tasks[0].baselines, average[1:], strict=True))
        lines += [
            f"mean AUC of all tasks: {kinds[-1]} {average[0]:.3f}, {others}",
            f"{kinds[-1]} minus the best of three baselines of each task: mean {np.mean(gaps):+.3f}, worst {min(gaps):+.3f}",
        ]
    return "\n".join(lines)


def small_figure(record: dict[str, Any]) -> Any:
    "Draw AUC by task: the best baseline against each kind of detector."
    import plotly.graph_objects as go

    tasks, kinds = small_tasks(record), record["kinds"]
    names = [f"{t.name}, {t.size}" for t in tasks]
    fig = go.Figure()
    fig.add_scatter(
        x=[t.best for t in tasks],
        y=names,
        mode="markers",
        name="best of three baselines",
        marker={"symbol": "line-ns-open", "size": 14},
    )
    for kind in kinds:
        own = [t.detectors.get(kind) for t in tasks]
        shape = (
            {"symbol": "circle-open", "size": 14} if kind == "auto" else {"size": 8}
        )  # spectral lies inside
        name = f"{kind}, first draw only" if kind == "cnn" else kind
        fig.add_scatter(x=own, y=names, mode="markers", name=name, marker=shape)
    gap = np.mean([t.detectors[kinds[-1]] - t.best for t in tasks])
    title = f"AUC of {kinds[-1]} minus the best baseline: {gap:+.3f} on average over {len(tasks)} small tasks"
    fig.update_layout(
        title=title, xaxis_title="AUC, cross-validation with whole groups", height=160 + 26 * len(tasks)
    )
    fig.update_yaxes(autorange="reversed")
    return fig
