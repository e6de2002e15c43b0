"""Whether band levels of a new sensor, aligned by its recordings without labels, help a detector of other sensors."""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_cross_validation import NETWORKS, Network, build, divide, write_network
from bench_small import SETS

import leakmel as lm
from leakmel.core.errors import DataError
from leakmel.detector.data.segments import Segments, make_task
from leakmel.detector.metrics.metrics import leak_metrics
from leakmel.detector.model import spectral
from leakmel.detector.model.spectral import SpectralFeatures, fit_spectral, spectral_features
from leakmel.detector.train.folds import make_folds
from leakmel.extras.machine.bench import record_head, store

N_TREES = 50  # of each forest
REAL = {"digits 367": (6, 16), "even digits": (6, 16), "digits 1459": (6, 16)}  # speakers, recordings of each
# by name, with the number of sensors; the last one was added after the run: with 12 sensors of one label each nothing is found, so nothing can be lost
SYNTHETIC = {name: (replace(net, each=8), 12) for name, net in NETWORKS.items() if name != "8 sensors"} | {
    "one label, loud leaks": (Network(40, 4, leak_db=8, one_label=True), 40)
}
CANDIDATES = ("as it is", "median of new sensors", "quantiles of new sensors", "quantiles of all sensors")


def aligned(
    features: SpectralFeatures,
    sensor: np.ndarray,  # [n] of each recording
    of: np.ndarray,  # sensors to align
    centre: np.ndarray,  # [M] dB, median of the band levels of the training sensors
    spread: np.ndarray,  # [M] dB, between their quartiles
    scale: bool,  # whether the distance of the quartiles is aligned, too
) -> SpectralFeatures:
    "Map the quantiles of the band levels of each sensor, over all of its recordings, to those of the training."
    whole, windows = features.whole.copy(), features.windows.copy()
    m = len(centre)
    for name in of:
        mine = np.flatnonzero(sensor == name)
        own = features.whole[mine, :m]
        low, middle, high = np.quantile(own, (0.25, 0.5, 0.75), axis=0)
        ratio = np.clip(spread / np.maximum(high - low, 0.1), 0.5, 2) if scale else 1.0
        of_windows = np.isin(features.recording, mine)
        whole[mine, :m] = (own - middle) * ratio + centre
        windows[of_windows, :m] = (features.windows[of_windows, :m] - middle) * ratio + centre
    return replace(features, whole=whole, windows=windows)


def score(
    features: SpectralFeatures, classes: np.ndarray, learned: np.ndarray, held: np.ndarray, leak: int
) -> np.ndarray:
    "Fit a classifier on some recordings, and score others: [m] mean probability of a leak."
    fitted = fit_spectral(features.of(learned), classes[learned], 2, n_threads=1)
    own = features.of(held)
    whole, windows = torch.from_numpy(own.whole), torch.from_numpy(own.windows)
    line = (whole.double() @ fitted.get_buffer("weight").T + fitted.get_buffer("bias")).softmax(1)[:, leak]
    trees = [
        fitted.tree_probabilities(x, k)[:, leak].double().numpy() for k, x in enumerate((whole, windows))
    ]
    of_windows = np.bincount(own.recording, trees[1], len(held)) / np.bincount(
        own.recording, minlength=len(held)
    )
    return np.average([line.numpy(), trees[0], of_windows], axis=0, weights=spectral.WEIGHTS)


def measure_task(path: Path, seed: int) -> dict[str, dict[str, float]]:
    "Cross-validate each candidate by sensor; return AUC and balanced accuracy at 0.5 of each."
    with lm.open_dataset(path) as ds:
        task = make_task(ds.class_names, "LEAK")
        segments = Segments(ds, level="recording", task=task, preload_to_ram=False)
        features = spectral_features(segments)
        sensor = ds.files["sensor"].to_numpy(object).astype(str)[segments.rows]
        truth, leak = segments.is_leak, task.leak_in_model
        classes = segments.labels
    fold = make_folds(classes, np.unique(sensor, return_inverse=True)[1], 5, seed)
    m = features.whole.shape[1] // 2
    scores = {name: np.empty(len(truth)) for name in CANDIDATES}
    for k in range(fold.max() + 1):
        learned, held = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        low, centre, high = np.quantile(features.whole[learned, :m], (0.25, 0.5, 0.75), axis=0)
        new, every = np.unique(sensor[held]), np.unique(sensor)
        ways = {
            "as it is": features,
            "median of new sensors": aligned(features, sensor, new, centre, high - low, False),
            "quantiles of new sensors": aligned(features, sensor, new, centre, high - low, True),
            "quantiles of all sensors": aligned(features, sensor, every, centre, high - low, True),
        }
        for name, own in ways.items():
            scores[name][held] = score(own, classes, learned, held, leak)
    found = {name: leak_metrics(truth, own) for name, own in scores.items()}
    return {name: {key: own[key] for key in ("auc", "balanced_accuracy")} for name, own in found.items()}


def bench_adaptation(
    folder: str | Path,  # work folder
    *,
    sources: str = "",  # folder with the repositories of SETS; sets that are not there are left out
    draws: int = 6,  # of each set
    log: Callable[[str], None] = print,
) -> dict[str, Any]:  # the record
    "Measure the candidates on synthetic networks and on small tasks of real recordings."
    work, tasks = Path(folder), []
    recordings = work / "recordings"
    recordings.mkdir(parents=True, exist_ok=True)
    real = [n for n in REAL if sources and (Path(sources) / SETS[n].source).is_dir()]
    with warnings.catch_warnings(), mock.patch.object(spectral, "N_TREES", N_TREES):
        warnings.simplefilter("ignore")
        for name in (*SYNTHETIC, *real):
            for k in range(draws):
                if name in SYNTHETIC:
                    rows = write_network(recordings, *SYNTHETIC[name], k, "s")
                    path = build(recordings, rows, work / "task.h5")
                else:
                    root, rows = SETS[name].read(Path(sources) / SETS[name].source, work)
                    path = build(root, divide(rows, *REAL[name], k)[0], work / "task.h5", SETS[name].spec)
                try:
                    tasks.append({"set": name, "draw": k} | measure_task(path, k))
                except DataError as e:  # too few sensors with one of the labels
                    log(f"{name}, draw {k + 1}: {e}")
            log(adaptation_table([t for t in tasks if t["set"] == name]).splitlines()[1])
    return {**record_head("adaptation"), "verified": {"all_ok": True}, "tasks": tasks}


def adaptation_table(tasks: list[dict[str, Any]]) -> str:
    "Mean AUC of the candidates for each set, and their mean change of AUC and balanced accuracy over all tasks."
    names = list(dict.fromkeys(t["set"] for t in tasks))
    lines = [f"{'AUC by sensor':26s}" + "".join(f"{name:>26s}" for name in CANDIDATES)]
    for name in names:
        means = [np.mean([t[c]["auc"] for t in tasks if t["set"] == name]) for c in CANDIDATES]
        lines.append(f"{name:26s}" + "".join(f"{v:26.3f}" for v in means))
    for key in ("auc", "balanced_accuracy"):
        gains = np.array([[t[c][key] - t[CANDIDATES[0]][key] for c in CANDIDATES] for t in tasks])
        cells = "".join(
            f"{f'{m:+.3f} ± {e:.3f}':>26s}"
            for m, e in zip(gains.mean(0), gains.std(0) / len(tasks) ** 0.5, strict=True)
        )
        lines.append(f"{f'change of {key}'.replace('_', ' '):26s}{cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", help="work folder")
    parser.add_argument("--sources", default="", help="folder with the repositories of the real sets")
    parser.add_argument("--draws", type=int, default=6, help="of each set")
    given = parser.parse_args()
    made = bench_adaptation(given.work, sources=given.sources, draws=given.draws)
    print(adaptation_table(made["tasks"]))
    print(store(made, Path(given.work)))
