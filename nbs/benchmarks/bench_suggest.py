"""Labels that a detector needs to reach an AUC, with recordings chosen by `choose_recordings` and at random."""

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_small import SETS, _cut_task
from sklearn.metrics import roc_auc_score

import leakmel as lm
from leakmel.learn.data.segments import Segments
from leakmel.learn.data.task import make_task
from leakmel.learn.model.spectral import SpectralFeatures, fit_spectral, spectral_features
from leakmel.learn.review.suggest import SampleMix, SamplePool, choose_recordings
from leakmel.ops.bench import record_head

THRESHOLD = 0.5  # of the score; fits have equal weights of the classes
# strategy -> mix of the recordings that are trained on; None: at random
STRATEGIES: dict[str, SampleMix | None] = {
    "random": None,
    "mix": SampleMix(0.5, 0.5, 0.0),  # the default, without its share of test recordings
    "uncertain": SampleMix(1.0, 0.0, 0.0),
    "diverse": SampleMix(0.0, 1.0, 0.0),
}


@dataclass(frozen=True, eq=False)
class LabelledSet:
    "Recordings of which all labels are known, in memory."

    features: SpectralFeatures
    rows: torch.Tensor  # [n, L, S, M, T] float16 dB
    mask: torch.Tensor  # [n, L] bool
    is_leak: np.ndarray  # [n] bool
    sensor: np.ndarray  # [n] of texts

    def scores(self, learned: np.ndarray, tested: np.ndarray, seed: int) -> np.ndarray:
        "Scores of recordings by a spectral classifier that is fitted on others."
        fitted = fit_spectral(
            self.features.of(learned), self.is_leak[learned].astype(np.int64), 2, seed=seed, n_threads=1
        )
        with torch.inference_mode():
            found = fitted.class_probabilities(self.rows[tested], self.mask[tested])[..., 1].numpy()
        counts = self.mask[tested].numpy()
        return np.where(counts, found, 0).sum(1) / counts.sum(1)


def read_set(files: Sequence[Path]) -> LabelledSet:
    "Read data sets."
    with Segments(list(files), level="recording", with_labels=False, preload_to_ram=False) as first:
        names = first.sources[0].class_names
    task = make_task(names, kind="binary")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # recordings that are too short for one segment
        with Segments(list(files), level="recording", task=task) as ds:
            rows = torch.stack([torch.as_tensor(ds[k][0]) for k in range(len(ds))])
            sensors = [str(s) for source in ds.sources for s in source.files["sensor"]]
            return LabelledSet(
                spectral_features(ds, keep_level=False),
                rows,
                torch.from_numpy(ds.segment_mask),
                np.equal(ds.labels, task.leak_in_model),
                np.array(sensors, object)[ds.rows],
            )


def _both_labels(order: np.ndarray, is_leak: np.ndarray, n: int) -> np.ndarray:
    "The first recordings of an order, the last of which is replaced where all have the same label."
    first = order[:n].copy()
    if is_leak[first].all() or not is_leak[first].any():
        first[-1] = next(i for i in order[n:] if is_leak[i] != is_leak[first[0]])
    return first


def label_curves(
    data: LabelledSet,
    *,
    seed: int,
    first: int = 10,  # labels that are drawn at random, the same for all strategies
    step: int = 10,  # labels between two fits
    most: int = 90,  # labels
    per_sensor: int = 3,
) -> dict[str, list[float]]:  # strategy -> AUC on held-out sensors after first, first + step, ... labels
    "Label recordings step by step with each strategy; 40 % of the sensors are held out."
    rng = np.random.default_rng(seed)
    sensors = rng.permutation(sorted(set(data.sensor)))
    share = np.cumsum([(data.sensor == s).mean() for s in sensors])
    held_out = np.isin(data.sensor, sensors[: 1 + int(np.searchsorted(share, 0.4))])
    pool, tested = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    order = rng.permutation(pool)
    start = _both_labels(order, data.is_leak, first)
    found: dict[str, list[float]] = {}
    for name, mix in STRATEGIES.items():
        learned, found[name] = np.sort(start), []
        for n in range(first, most + 1, step):
            score = data.scores(learned, np.concatenate([tested, pool]), seed)
            found[name].append(float(roc_auc_score(data.is_leak[tested], score[: len(tested)])))
            if n + step > most:
                break
            if mix is None:
                new = order[~np.isin(order, learned)][:step]
            else:
                is_known = np.isin(pool, learned)
                some = SamplePool(
                    np.abs(score[len(tested) :] - THRESHOLD),
                    data.features.whole[pool],
                    data.sensor[pool],
                    ~is_known,
                    is_known,
                )
                chosen = choose_recordings(some, step, mix, per_sensor=per_sensor, seed=seed + n)
                new = pool[[c.index for c in chosen]]
            learned = np.sort(np.concatenate([learned, new]))
    return found


def labels_needed(
    curve: np.ndarray,  # [k] AUC
    labels: np.ndarray,  # [k] ascending
    target: float,
) -> float:  # interpolated; infinite where the curve does not reach the target
    "Compute the number of labels at which a curve first reaches an AUC."
    above = np.flatnonzero(curve >= target)
    if not len(above):
        return np.inf
    k = int(above[0])
    if k == 0:
        return float(labels[0])
    share = (target - curve[k - 1]) / (curve[k] - curve[k - 1])
    return float(labels[k - 1] + share * (labels[k] - labels[k - 1]))


def compare_strategies(
    curves: dict[str, np.ndarray],  # strategy -> [repetitions, k] AUC
    labels: np.ndarray,  # [k]
    *,
    n_draws: int = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    "Compare with random choice: AUC with all labels, labels needed for the AUC that random choice reaches with all; 95 % intervals over repetitions."
    rng = np.random.default_rng(seed)
    n = len(curves["random"])
    draws = rng.integers(0, n, (n_draws, n))
    rows = []
    for name, own in curves.items():
        target = curves["random"].mean(0)[-1]
        needed = [labels_needed(own[d].mean(0), labels, curves["random"][d].mean(0)[-1]) for d in draws]
        low, high = np.quantile(needed, (0.025, 0.975), method="inverted_cdf")
        gain = (own - curves["random"]).mean(1)  # over all numbers of labels
        gains = gain[draws].mean(1)
        rows.append(
            {
                "strategy": name,
                "auc_first": float(own[:, 0].mean()),
                "auc_last": float(own[:, -1].mean()),
                "target": float(target),
                "labels": _finite(labels_needed(own.mean(0), labels, target)),
                "labels_low": _finite(low),
                "labels_high": _finite(high),
                "gain": float(gain.mean()),
                "gain_low": float(np.quantile(gains, 0.025)),
                "gain_high": float(np.quantile(gains, 0.975)),
            }
        )
    return rows


def _finite(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def bench_suggest(
    folder: str | os.PathLike,  # work folder: data sets and finished repetitions are kept there
    *,
    sources: str = "",  # folder with the repositories of bench_small.SETS; sets that are not there are left out
    n_files: int = 300,  # recordings of a set
    repetitions: int = 10,
    first: int = 10,  # labels at the start
    step: int = 10,
    most: int = 90,  # labels at the end
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Measure the labels that each strategy needs."
    work, right = Path(folder), True
    work.mkdir(parents=True, exist_ok=True)
    names = [name for name, s in SETS.items() if sources and (Path(sources) / s.source).is_dir()]
    labels = np.arange(first, most + 1, step)
    results = []
    for name in ["synthetic", *names]:
        if name == "synthetic":
            built = []
            for split in ("training", "validation", "testing"):
                demo, path = work / "demo", work / f"synthetic-{split}.h5"
                if not demo.exists():
                    lm.write_demo(demo, n_files=n_files)
                done = lm.build(demo, split=split, out=path, progress="none")
                right &= done.verified.ok
                built.append(path)
        else:
            path, ok = _cut_task(name, Path(sources) / SETS[name].source, work, n_files, 0)
            right &= ok
            built = [path]
        data = read_set(built)
        runs: dict[str, list[list[float]]] = {strategy: [] for strategy in STRATEGIES}
        for seed in range(repetitions):
            log(f"{name}, repetition {seed + 1} of {repetitions}")
            kept = work / f"{name}-{n_files}-{first}-{step}-{most}-{seed}.json"
            if not kept.exists():
                found = label_curves(data, seed=seed, first=first, step=step, most=most)
                kept.write_text(json.dumps(found))
            for strategy, curve in json.loads(kept.read_text()).items():
                runs[strategy].append(curve)
        curves = {strategy: np.array(x) for strategy, x in runs.items()}
        about = "leak" if name == "synthetic" else SETS[name].leak
        results.append(
            {
                "set": name,
                "leak": about,
                "recordings": len(data.sensor),
                "sensors": len(set(data.sensor)),
                "curves": runs,
                "compared": compare_strategies(curves, labels),
            }
        )
    return {
        **record_head("suggest"),
        "verified": {"all_ok": right},
        "labels": labels.tolist(),
        "repetitions": repetitions,
        "sets": results,
    }


def suggest_table(record: dict[str, Any]) -> str:
    "Labels and AUC of each set and strategy as a text table."
    most = record["labels"][-1]

    def count(x: float | None) -> str:
        return f">{most}" if x is None else f"{x:.0f}"

    lines = [
        f"{'set':12s} {'strategy':10s} {'AUC first':>9s} {'AUC last':>9s} {'AUC gain (95 %)':>24s}"
        f"  labels for the AUC of {most} random ones (95 %)"
    ]
    for one in record["sets"]:
        for r in one["compared"]:
            gain = f"{r['gain']:+.3f} ({r['gain_low']:+.3f} to {r['gain_high']:+.3f})"
            needed = f"{count(r['labels'])} ({count(r['labels_low'])} to {count(r['labels_high'])}), AUC {r['target']:.3f}"
            lines.append(
                f"{one['set']:12s} {r['strategy']:10s} {r['auc_first']:9.3f} {r['auc_last']:9.3f} {gain:>24s}  {needed}"
            )
    lines.append(
        f"{record['repetitions']} repetitions; gain: mean over {record['labels'][0]} to {most} labels against random choice"
    )
    return "\n".join(lines)


def suggest_figure(record: dict[str, Any]) -> Any:
    "Draw AUC by number of labels: each strategy, a panel for each set."
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    sets, labels = record["sets"], record["labels"]
    colours = dict(zip(STRATEGIES, ("#777777", "#D55E00", "#1F82C6", "#009E73")))
    fig = make_subplots(rows=1, cols=len(sets), subplot_titles=[s["set"] for s in sets])
    for k, one in enumerate(sets, 1):
        for name, runs in one["curves"].items():
            values = np.array(runs)
            error = 1.96 * values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
            fig.add_trace(
                go.Scatter(
                    x=labels,
                    y=values.mean(0),
                    name=name,
                    legendgroup=name,
                    showlegend=k == 1,
                    line={"color": colours[name]},
                    error_y={"type": "data", "array": error, "thickness": 1}
                    if name in ("random", "mix")
                    else None,
                ),
                row=1,
                col=k,
            )
    gains = {s["set"]: next(r["gain"] for r in s["compared"] if r["strategy"] == "mix") for s in sets}
    found = ", ".join(f"{name} {gain:+.3f}" for name, gain in gains.items())
    fig.update_xaxes(title="labels")
    fig.update_yaxes(title="AUC on held-out groups", col=1)
    fig.update_layout(title=f"AUC of chosen minus random recordings: {found}", height=420)
    return fig
