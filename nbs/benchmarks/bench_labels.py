"""Detectors on tasks with 5, 10 and 20 labels, with and without pre-training on recordings without labels."""

import csv
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import leakmel as lm
from leakmel.ops.bench import record_head

METHODS = {  # name -> what it is
    "auto": "detector of leakmel train without options: spectral, on sets of this size",
    "network": "network from random weights",
    "pretrained": "network that begins with pre-trained layers",
    "bands, logistic": "logistic regression on band statistics",
    "bands, nearest": "distance to the nearest recording of each label, band statistics",
    "layers, logistic": "logistic regression on the last hidden layer of the pre-trained network",
    "layers, nearest": "distance to the nearest recording of each label, last hidden layer of the pre-trained network",
}


def halves(groups: Sequence[str], is_leak: np.ndarray, seed: int) -> np.ndarray | None:
    "Divide recordings into a pool (True) and test recordings by whole groups, with both labels in both; None: impossible."
    names, code = np.unique(groups, return_inverse=True)
    for attempt in range(50):
        order = np.random.default_rng([seed, attempt]).permutation(len(names))
        counts = np.bincount(code)[order].cumsum()
        in_pool = np.isin(code, order[counts <= len(code) / 2])
        each = [
            is_leak[in_pool].sum(),
            (~is_leak[in_pool]).sum(),
            is_leak[~in_pool].sum(),
            (~is_leak[~in_pool]).sum(),
        ]
        if min(each) >= 10:
            return in_pool
    return None


def labelled(pool: np.ndarray, is_leak: np.ndarray, n: int, seed: int) -> np.ndarray:
    "Draw n recordings of the pool, as many leaks as others; one more leak where n is odd."
    rng = np.random.default_rng([seed, n])
    parts = [
        rng.permutation(pool[is_leak[pool] == kind])[: n // 2 + (n % 2) * kind] for kind in (True, False)
    ]
    return np.sort(np.concatenate(parts))


def auc(scores: np.ndarray, is_leak: np.ndarray) -> float:
    "Area under the ROC curve."
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(is_leak, scores))


def by_vectors(
    vectors: np.ndarray, learned: np.ndarray, test: np.ndarray, is_leak: np.ndarray
) -> dict[str, float]:
    "AUC of logistic regression and of the nearest recordings; values are standardised by all recordings, without labels."
    from sklearn.linear_model import LogisticRegression

    x = (vectors - vectors.mean(0)) / np.maximum(vectors.std(0), 1e-6)
    line = LogisticRegression(C=0.1, class_weight="balanced", max_iter=5000).fit(x[learned], is_leak[learned])
    apart = np.sqrt(np.square(x[test][:, None] - x[learned]).mean(2))
    near = apart[:, ~is_leak[learned]].min(1) - apart[:, is_leak[learned]].min(1)
    found = {"logistic": line.decision_function(x[test]), "nearest": near}
    return {name: auc(scores, is_leak[test]) for name, scores in found.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from leakmel.learn.model.settings import TrainSettings
    from leakmel.learn.train.inputs import open_training

    with open_training(path, settings=TrainSettings(detector="cnn"), progress="none") as data:
        yield data


def measure_labels(path: Path, sizes: Sequence[int], seed: int) -> list[dict[str, Any]]:
    "Measure all methods with each number of labels on one task; the pool without labels is the one that the labels are from."
    import torch
    from leakmel.learn.data.segments import Segments
    from leakmel.learn.data.splits import recordings_table
    from leakmel.learn.embed.embed import embed_rows
    from leakmel.learn.embed.features import open_embedder
    from leakmel.learn.metrics.metrics import vote_scores
    from leakmel.learn.model.detector import Detector, score_rows
    from leakmel.learn.model.settings import TrainSettings, with_length
    from leakmel.learn.train.folds import FoldTrainer, joined_groups
    from leakmel.learn.train.pretraining import PRETRAIN_STEPS, Pretraining
    from leakmel.learn.train.state import new_net

    torch.set_num_threads(1)
    found = []
    with _opened(path) as data:
        table = recordings_table(data.training.sources, progress="none").iloc[data.training.rows]
        groups = joined_groups(table.reset_index(drop=True), "sensor")
        is_leak = data.training.labels == data.task.leak_in_model
        in_pool = halves([str(k) for k in groups.code], is_leak, seed)
        if in_pool is None:
            return []
        pool, test = np.flatnonzero(in_pool), np.flatnonzero(~in_pool)
        settings = with_length(TrainSettings(seed=seed), len(data.training))
        rows = data.training.rows
        some = Segments(
            data.training.sources, level="long", rows=rows[pool], with_labels=False, progress="none"
        )
        began = time.perf_counter()
        folder = path.with_suffix("") / "pretraining"
        classes = len(data.task.model_names)
        pretrained = Pretraining(some, settings, classes, PRETRAIN_STEPS, folder, "cpu").run(
            "never", progress="none"
        )
        pretrain_s = time.perf_counter() - began
        given = (data.training.sources, rows, data.task, TrainSettings(channels=settings.channels), groups)
        trainers = {"network": FoldTrainer(*given, n_threads=1)}
        trainers["pretrained"] = FoldTrainer(*given, n_threads=1, pretrained=pretrained)
        net = new_net(replace(data, pretrained=pretrained), settings)
        layers = Detector(net.eval(), data.task, data.training.sources[0].spec)
        recordings = trainers["network"].ds
        vectors = {
            "bands": embed_rows(recordings, open_embedder(None, layers.spec), progress="none").vectors,
            "layers": embed_rows(recordings, open_embedder(layers), progress="none").vectors,
        }
        held_out = Segments(
            data.training.sources, level="recording", rows=rows[test], task=data.task, progress="none"
        )
        for n in sizes:
            learned, figures, seconds = labelled(pool, is_leak, n, seed), {}, {"pretraining": pretrain_s}
            for name, kind, trainer in (
                ("auto", "spectral", "network"),
                ("network", "cnn", "network"),
                ("pretrained", "cnn", "pretrained"),
            ):
                began = time.perf_counter()
                scores = score_rows(trainers[trainer].fit(kind, learned, seed), held_out)
                seconds[name] = time.perf_counter() - began
                figures[name] = auc(vote_scores(scores), is_leak[test])
            for name, x in vectors.items():
                figures |= {f"{name}, {k}": v for k, v in by_vectors(x, learned, test, is_leak).items()}
            about = {"labels": n, "pool": len(pool), "test": len(test), "seconds": seconds}
            found.append(about | {"auc": figures, "loss": pretrained.record["loss"][-1][1]})
    return found


def _task(
    name: str, sources: str, work: str, n: int, draw: int, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    "Build a task and measure it, in a process of its own."
    from bench_small import SETS, cut_rows

    s, place = SETS[name], Path(work)
    root, rows = s.read(Path(sources) / s.source, place)
    table, path = place / f"labels-{name}-{draw}.csv", place / f"labels-{name}-{draw}.h5"
    with table.open("w", newline="") as f:
        csv.writer(f).writerows([("path", "label", "sensor"), *cut_rows(rows, n, draw)])
    built = lm.build(
        root, out=path, manifest=lm.scan(root, table=table, progress="none"), spec=s.spec, progress="none"
    )
    if not built.verified.ok:
        raise RuntimeError(f"{path} is not right")
    about = {"set": name, "draw": draw, "leak": s.leak, "group": s.group}
    return [about | t for t in measure_labels(path, sizes, draw)]


def bench_labels(
    folder: str | os.PathLike,  # work folder
    *,
    sources: str,  # folder with the repositories of `bench_small.SETS`
    sizes: Sequence[int] = (5, 10, 20),  # labels
    recordings: int = 100,  # of a task: half of them without labels, half for testing
    draws: int = 20,  # of each set at most
    minutes: float = 12,  # after which no further task is begun
    workers: int = 2,  # processes of one thread each
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Measure detectors with few labels, with and without pre-training, until the time is over."
    from bench_small import SETS

    began = time.monotonic()
    Path(folder).mkdir(parents=True, exist_ok=True)
    names = [name for name, s in SETS.items() if sources and (Path(sources) / s.source).is_dir()]
    wanted = iter([(name, draw) for draw in range(draws) for name in names])
    tasks: list[dict[str, Any]] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes:
        pending = {}

        def begin() -> None:
            if time.monotonic() - began < 60 * minutes and (one := next(wanted, None)) is not None:
                call = processes.submit(_task, one[0], sources, os.fspath(folder), recordings, one[1], sizes)
                pending[call] = one

        for _ in range(workers):
            begin()
        while pending:
            call = next(as_completed(pending))
            name, draw = pending.pop(call)
            tasks += call.result()
            (Path(folder) / "labels.json").write_text(json.dumps(tasks, indent=1))
            log(f"{name}, draw {draw + 1}: {len(tasks)} results after {time.monotonic() - began:.0f} s")
            begin()
    head = record_head("few-labels")
    limits = {
        "minutes": minutes,
        "workers": workers,
        "seconds": time.monotonic() - began,
        "recordings": recordings,
    }
    tasks.sort(key=lambda t: (t["labels"], t["set"], t["draw"]))
    return {**head, **limits, "verified": {"all_ok": True}, "methods": METHODS, "tasks": tasks}


def labels_table(record: dict[str, Any]) -> str:
    "Mean AUC by number of labels and method, and the differences from auto as a text table."
    names, lines = list(record["methods"]), []
    sizes = sorted({t["labels"] for t in record["tasks"]})
    head = "".join(f"{f'{n} labels':>12s}{'- auto':>17s}" for n in sizes)
    lines.append(f"{'mean AUC':18s}{head}")
    for name in names:
        cells = ""
        for n in sizes:
            own = [t["auc"] for t in record["tasks"] if t["labels"] == n]
            apart = np.array([a[name] - a["auto"] for a in own])
            error = apart.std(ddof=1) / np.sqrt(len(apart)) if len(apart) > 1 else np.nan
            cells += f"{np.mean([a[name] for a in own]):12.3f}" + (
                f"{apart.mean():+8.3f} ({error:.3f})" if name != "auto" else f"{'':16s}"
            ).rjust(17)
        lines.append(f"{name:18s}{cells}")
    n_tasks = len({(t["set"], t["draw"]) for t in record["tasks"]})
    lines.append(
        f"{n_tasks} tasks of {len({t['set'] for t in record['tasks']})} sets; in brackets the standard error over tasks"
    )
    for n in sizes:
        apart = np.array(
            [t["auc"]["pretrained"] - t["auc"]["network"] for t in record["tasks"] if t["labels"] == n]
        )
        error = apart.std(ddof=1) / np.sqrt(len(apart)) if len(apart) > 1 else np.nan
        change = f"{apart.mean():+.3f} (standard error {error:.3f})"
        better = f"better in {int((apart > 0).sum())} of {len(apart)} tasks"
        lines.append(f"{n} labels: pre-trained minus random weights {change}, {better}")
    return "\n".join(lines)


def labels_figure(record: dict[str, Any]) -> Any:
    "Draw mean AUC by number of labels for each method."
    import plotly.graph_objects as go

    sizes = sorted({t["labels"] for t in record["tasks"]})
    fig = go.Figure()
    for name in record["methods"]:
        means = [np.mean([t["auc"][name] for t in record["tasks"] if t["labels"] == n]) for n in sizes]
        fig.add_scatter(x=[str(n) for n in sizes], y=np.round(means, 3), name=name, mode="lines+markers")
    gains = [t["auc"]["pretrained"] - t["auc"]["network"] for t in record["tasks"]]
    title = f"Pre-training changes the AUC of the network by {np.mean(gains):+.3f} on average"
    fig.update_layout(title=title, xaxis_title="labels", yaxis_title="AUC on other groups", height=420)
    return fig
