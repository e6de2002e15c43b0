"""Promise of cross-validation minus the result on groups that had no part in training, on many small draws."""

import argparse
import csv
import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from bench_small import SETS, Row

import leakmel as lm
from leakmel.core.errors import DataError
from leakmel.detector.data.segments import Segments
from leakmel.detector.metrics.metrics import leak_metrics
from leakmel.detector.model import spectral
from leakmel.detector.model.detector import score_rows
from leakmel.extras.machine.bench import record_head, store
from leakmel.recordings.demo import write_wav

RATE = 4096
N_TREES = 10  # of each forest, a twentieth of the usual ones: cheap fits for many draws
MOST_HELD = 600  # recordings that give the result


@dataclass(frozen=True)
class Network:
    "Synthetic sensors, each with a frequency response of its own; a leak adds a band of noise."

    sensors: int  # of the training
    each: int  # recordings of a sensor
    leak_db: float = 2.0  # mean level of the band of a leak over the noise of the sensor
    one_label: bool = False  # all recordings of a sensor have one label
    share: float = 0.5  # of leaks


NETWORKS = {
    "8 sensors": Network(8, 5),
    "16 sensors": Network(16, 4),
    "one label at each sensor": Network(16, 3, one_label=True),
    "inaudible leaks": Network(12, 4, leak_db=-12),
    "few leaks": Network(16, 4, share=0.2),
}
REAL = {
    "digits 367": (4, 12),
    "digits 1459": (4, 12),
    "cries": (40, 2),
}  # groups of the training, recordings of each


def write_network(folder: Path, net: Network, sensors: int, seed: int, prefix: str) -> list[Row]:
    "Write recordings of a second of some sensors; return path, label and sensor of each."
    rng = np.random.default_rng([seed, sensors])
    hz = np.fft.rfftfreq(RATE, 1 / RATE)
    octave = np.log2(np.maximum(hz, 1))
    rows = []
    for s in range(sensors):
        bumps = zip(rng.normal(0, 3, 5), rng.uniform(6, 11, 5), strict=True)
        colour = sum(db * np.exp(-0.5 * ((octave - at) / 0.6) ** 2) for db, at in bumps)
        of_sensor = rng.random() < net.share
        for k in range(net.each):
            is_leak = of_sensor if net.one_label else rng.random() < net.share
            power = 10 ** ((colour + rng.normal(0, 1.5) * (octave - 8)) / 10)
            if is_leak:
                band = np.exp(-0.5 * ((octave - rng.uniform(7.5, 10)) / 0.7) ** 2)
                power = power + band * 10 ** ((colour + rng.normal(net.leak_db, 3)) / 10)
            parts = rng.normal(size=(2, len(hz))) * np.sqrt(power)
            x = np.fft.irfft(parts[0] + 1j * parts[1])
            x *= 2000 * 10 ** (rng.normal(0, 3) / 20) / x.std()
            path = f"{prefix}{s}_{k}.wav"
            write_wav(folder / path, np.clip(x, -32767, 32767).astype(np.int16), RATE)
            rows.append((path, "LEAK" if is_leak else "OTHER", f"{prefix}{s}"))
    return rows


def build(root: Path, rows: Sequence[Row], out: Path, spec: Any = None) -> Path:
    "Build a data set of some recordings."
    table = out.with_suffix(".csv")
    with table.open("w", newline="") as f:
        csv.writer(f).writerows([("path", "label", "sensor"), *rows])
    manifest = lm.scan(root, table=table, progress="none")
    return lm.build(root, out=out, manifest=manifest, spec=spec, progress="none", check=0).path


def divide(rows: Sequence[Row], groups: int, each: int, seed: int) -> tuple[list[Row], list[Row]]:
    "Draw groups to train on, with some recordings of each, and take the recordings of all others to give the result."
    rng = np.random.default_rng(seed)
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row[2], []).append(row)
    names = rng.permutation(sorted(by_group)).tolist()
    learned, others = [], [row for name in names[groups:] for row in by_group[name]]
    for name in names[:groups]:
        own = by_group[name]
        learned += [own[k] for k in rng.choice(len(own), min(each, len(own)), replace=False)]
    held = [others[k] for k in rng.choice(len(others), min(MOST_HELD, len(others)), replace=False)]
    return sorted(learned), sorted(held)


def measure_draw(training: Path, held: Path, out: Path, seed: int) -> dict[str, Any]:
    "Train, cross-validate, and score the held-out recordings; return promises and the result."
    settings = lm.TrainSettings(detector="spectral", seed=seed)
    shutil.rmtree(out, ignore_errors=True)
    detector = lm.train(training, out=out, settings=settings, device="cpu", progress=False).detector
    checked = lm.cross_validate(
        training, settings=settings, device="cpu", progress="none", n_draws=400, jobs=1
    ).detector
    with lm.open_dataset(held) as ds:
        others = Segments(ds, level="recording", task=detector.task, preload_to_ram=False)
        score = detector.recording_scores(score_rows(detector, others))
        found = leak_metrics(others.is_leak, score, detector.threshold)
    interval = checked.intervals["balanced_accuracy"]
    record = detector.evaluations[0]
    return {
        "result": found["balanced_accuracy"],
        "result_auc": found["auc"],
        "promise": checked.figures["balanced_accuracy"],
        "low": float(interval.low) if interval.known else None,
        "high": float(interval.high) if interval.known else None,
        "promise_auc": checked.figures["auc"],
        "of_train": record.balanced_accuracy,
        "of_train_auc": record.auc,
        "recordings": record.recordings,
        "groups": record.groups,
    }


def task_of(name: str, work: Path, sources: str) -> Callable[[int], tuple[Path, Path]]:
    "Return a function that builds the training set and the held-out set of a draw."
    if name in NETWORKS:
        net = NETWORKS[name]
        root = work / name
        root.mkdir(exist_ok=True)
        held = build(
            root, write_network(root, net, MOST_HELD // net.each, 99_991, "held"), work / f"{name}-held.h5"
        )

        def draw_network(k: int) -> tuple[Path, Path]:
            return build(root, write_network(root, net, net.sensors, k, "s"), work / f"{name}.h5"), held

        return draw_network
    own = SETS[name]
    root, rows = own.read(Path(sources) / own.source, work)

    def draw_real(k: int) -> tuple[Path, Path]:
        parts = divide(rows, *REAL[name], k)
        paths = (work / f"{name}.h5", work / f"{name}-held.h5")
        return build(root, parts[0], paths[0], own.spec), build(root, parts[1], paths[1], own.spec)

    return draw_real


def bench_cross_validation(
    folder: str | Path,  # work folder
    *,
    sources: str = "",  # folder with the repositories of SETS; sets that are not there are left out
    draws: int = 40,  # of each synthetic network, and half as many of each real set
    names: Sequence[str] = (*NETWORKS, *REAL),
    log: Callable[[str], None] = print,
) -> dict[str, Any]:  # the record
    "Measure promise and result of many draws, whose sensors or groups differ."
    work = Path(folder)
    work.mkdir(parents=True, exist_ok=True)
    found = []
    has = [n for n in names if n in NETWORKS or (sources and (Path(sources) / SETS[n].source).is_dir())]
    with warnings.catch_warnings(), mock.patch.object(spectral, "N_TREES", N_TREES):
        warnings.simplefilter("ignore")
        for name in has:
            draw = task_of(name, work, sources)
            for k in range(draws if name in NETWORKS else draws // 2):
                try:
                    found.append({"task": name, "draw": k} | measure_draw(*draw(k), work / "model", k))
                except (DataError, IndexError):  # too few groups with one of the labels: nothing is promised
                    log(f"{name}, draw {k + 1}: no folds")
                (work / "draws.json").write_text(json.dumps(found))
            log(cross_validation_table([f for f in found if f["task"] == name]).splitlines()[1])
    return {**record_head("cross-validation"), "verified": {"all_ok": True}, "draws": found}


def cross_validation_table(draws: Sequence[dict[str, Any]]) -> str:
    "Mean of promise minus result, its standard error, and the share of intervals that cover the result, for each task and together."
    head = f"{'task':26s} {'draws':>5s} {'result':>7s} {'promise - result':>17s} {'(AUC)':>7s} {'of train':>9s} {'covered':>9s}"
    lines = [head]
    names = list(dict.fromkeys(d["task"] for d in draws))
    for name in [*names, *["together"] * (len(names) > 1)]:
        own = [d for d in draws if name in (d["task"], "together")]
        result, promise, of_train, auc, result_auc = (
            np.array([d[key] for d in own], float)
            for key in ("result", "promise", "of_train", "promise_auc", "result_auc")
        )
        apart = promise - result
        inside = [d["low"] <= d["result"] <= d["high"] for d in own if d["low"] is not None]
        error = apart.std(ddof=1) / len(own) ** 0.5 if len(own) > 1 else np.nan
        lines.append(
            f"{name:26s} {len(own):5d} {result.mean():7.3f} {apart.mean():+9.3f} ± {error:.3f}  {(auc - result_auc).mean():+7.3f} "
            f"{(of_train - result).mean():+9.3f} {sum(inside):4d}/{len(inside):<4d}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", help="work folder")
    parser.add_argument("--sources", default="", help="folder with the repositories of the real sets")
    parser.add_argument(
        "--draws", type=int, default=40, help="of each synthetic network; half as many of a real set"
    )
    parser.add_argument("--names", default=",".join([*NETWORKS, *REAL]), help="tasks, separated by commas")
    given = parser.parse_args()
    made = bench_cross_validation(
        given.work, sources=given.sources, draws=given.draws, names=given.names.split(",")
    )
    print(cross_validation_table(made["draws"]))
    print(store(made, Path(given.work)))
