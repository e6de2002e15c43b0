"""Ways to fit a network on a small set: one validation split, or folds and then all recordings.

This protocol was written before the run. Candidates share the fold fits of a draw: whole groups, at most five folds,
defaults of `TrainSettings`.
- `split` is what ships: one fold is validation and chooses the epoch (with early stopping), vote, threshold and
  calibration. Its figures are means over the folds, each of which could be the validation split.
- `length`: a fit of all recordings for the median number of steps at which the log loss of the folds is lowest.
- `all epochs`: a fit of all recordings to the end of the schedule.
- `average`: mean score of the last networks of the folds, without a further fit.
Vote, threshold and calibration of the last three come from the out-of-fold scores at the same length.

Tasks had no part in the idea: synthetic networks with other sizes and seeds than in `bench_cross_validation`, labels
of spoken digits on which no network was compared before (six speakers, so draws overlap), and cries. Twelve draws
each; each has two protocols: recordings of *new* groups, and further ones of *known* groups. A draw without two folds
is left out.

The score is balanced accuracy; AUC and Brier score stand next to it. Differences from `split` are paired by draw.
The interval of a protocol is Student's over draws (95 %); that of the mean over protocols comes from 10,000 bootstrap
samples of draws within tasks (98.3 %, for three candidates). A candidate lands if
1. the interval of its mean difference over all protocols lies above 0,
2. the interval of no protocol lies wholly below 0,
3. its mean difference over the new groups of the real tasks is not below 0,
4. and the median of its training times is at most 6.5 times that of `split`.
Of several, the one with the highest mean over new groups lands; then blends are measured by the same rules before
they change.

Blends (`--blends`, written after the run of networks and before that of blends): `split` is what ships: kinds are
calibrated by folds of the recordings outside of validation (the first fold), validation chooses the epoch, and both
choose vote and threshold. Its one candidate is `all epochs`: folds of all recordings, then a fit of both kinds on
all of them. Forests have 50 trees. Five draws of each task.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_cross_validation import Network, build, write_network
from bench_small import SETS, Row, SmallSet, _digits
from scipy import stats

import leakmel as lm
from leakmel.core.errors import DataError
from leakmel.detector.data.segments import Segments, Task, make_task
from leakmel.detector.metrics.metrics import (
    DecisionRule,
    HeldOutScores,
    choose_rule,
    fit_calibration,
    leak_metrics,
    vote_scores,
)
from leakmel.detector.model import spectral
from leakmel.detector.model.detector import Detector, score_rows
from leakmel.detector.model.net import LeakNet
from leakmel.detector.model.spectral import fit_spectral, spectral_features
from leakmel.detector.train.folds import blend_scores, calibration_line, make_folds
from leakmel.detector.train.state import (
    TrainingData,
    TrainingState,
    detector_facts,
    end_epoch,
    new_net,
    should_stop,
)
from leakmel.extras.machine.bench import record_head, store

CANDIDATES = ("split", "length", "all epochs", "average")
PROTOCOLS = ("new", "known")
MOST = 400  # recordings of a protocol
OTHERS = 4  # recordings of each known sensor of a synthetic network that are not trained on
FIRST_SEED = 7_000
SYNTHETIC = {
    "12 sensors": Network(12, 6, leak_db=5),
    "24 sensors, quiet leaks": Network(24, 4, leak_db=1),
    "20 sensors, one label each": Network(20, 3, leak_db=5, one_label=True),
    "20 sensors, few leaks": Network(20, 4, leak_db=5, share=0.25),
    "40 sensors": Network(40, 10, leak_db=3),
}
DIGITS_028 = SmallSet(
    "free-spoken-digit-dataset", "0, 2 or 8", "speaker", _digits("028"), {"duration_s": 0.5}
)
# set, groups to train on, recordings of each
REAL: dict[str, tuple[SmallSet, int, int]] = {
    "digits 1459": (SETS["digits 1459"], 4, 16),
    "digits 028": (DIGITS_028, 4, 40),
    "cries": (SETS["cries"], 60, 2),
}
N_TREES = 50  # of each forest of a blend, a quarter of the usual ones
State = dict[str, torch.Tensor]
Members = Callable[[np.ndarray], list[np.ndarray]]  # rows -> segment scores of each kind


def divide(rows: Sequence[Row], groups: int, each: int, seed: int) -> dict[str, list[str]]:
    "Draw groups to train on with some recordings of each; others of theirs are known, those of other groups new."
    rng = np.random.default_rng([FIRST_SEED, seed])
    by_group: dict[str, list[str]] = {}
    for path, _, group in rows:
        by_group.setdefault(group, []).append(path)
    parts: dict[str, list[str]] = {"train": [], "known": [], "new": []}
    for k, name in enumerate(rng.permutation(sorted(by_group)).tolist()):
        own = rng.permutation(sorted(by_group[name])).tolist()
        parts["train" if k < groups else "new"] += own[: each if k < groups else None]
        parts["known"] += own[each:] if k < groups else []
    return {
        name: own if name == "train" else rng.permutation(own)[:MOST].tolist() for name, own in parts.items()
    }


def make_draw(name: str, work: Path, sources: str, k: int) -> tuple[Path, dict[str, list[str]]]:
    "Build the data set of a draw; return its path, and the recordings of each part."
    if name in SYNTHETIC:
        net, root, spec = SYNTHETIC[name], work / "recordings", None
        root.mkdir(exist_ok=True)
        rows = write_network(root, replace(net, each=net.each + OTHERS), 2 * net.sensors, FIRST_SEED + k, "s")
        parts = divide(rows, net.sensors, net.each, k)
    else:
        own, groups, each = REAL[name]
        root, rows = own.read(Path(sources) / own.source, work)
        spec, parts = own.spec, divide(rows, groups, each, k)
    chosen = {path for own in parts.values() for path in own}
    return build(root, [row for row in rows if row[0] in chosen], work / "task.h5", spec), parts


@dataclass
class Fit:
    "Weights of a network after each epoch."

    nets: list[State]
    steps: list[int]  # at the end of each epoch
    losses: list[float]  # log loss of the held-out recordings
    best: int  # epoch that ships, from 0
    rule: DecisionRule  # that ships
    seconds: float
    seconds_stopped: float  # with early stopping

    def nearest(self, steps: float) -> int:
        "Return the epoch whose number of steps is nearest."
        return int(np.abs(np.array(self.steps) - steps).argmin())


class Draw:
    "Data of a draw, with what scores its parts."

    def __init__(self, ds: Any, parts: dict[str, list[str]], seed: int):
        self.ds, self.seed = ds, seed
        self.task: Task = make_task(ds.class_names, "LEAK")
        place = {path: k for k, path in enumerate(ds.files["path"].to_numpy(object).astype(str))}
        rows = {name: np.sort([place[path] for path in own]) for name, own in parts.items()}
        self.rows = {name: self.segments(own, "recording").rows for name, own in rows.items()}  # long enough
        everything = self.segments(self.rows["train"], "recording")
        self.labels, self.is_leak = everything.labels, everything.is_leak
        sensors = ds.files["sensor"].to_numpy(object).astype(str)[self.rows["train"]]
        self.group = np.unique(sensors, return_inverse=True)[1]
        self.net: LeakNet | None = None

    def segments(self, rows: np.ndarray, level: str) -> Segments:
        "Return some recordings."
        return Segments(
            self.ds, level=level, rows=rows, task=self.task, preload_to_ram=level == "long", progress="none"
        )

    def fit(self, learned: np.ndarray, held: np.ndarray | None = None) -> Fit:
        "Train for all epochs."
        rows = self.rows["train"]
        validation = None if held is None else self.segments(rows[held], "recording")
        data = TrainingData(self.segments(rows[learned], "long"), validation, self.task, None, {})
        settings = lm.TrainSettings(detector="cnn", seed=self.seed)
        found = Fit([], [], [], 0, DecisionRule(), 0.0, 0.0)
        began = time.perf_counter()
        with closing(TrainingState(data, settings, "cpu")) as state:
            while len(state.epochs) < settings.epochs:
                for batch in state.loader:
                    state.sums.add(state.stepper.step(batch))
                found.losses.append(end_epoch(state, state.timer.times()).val_loss)
                found.nets.append({n: t.clone() for n, t in state.stepper.net.state_dict().items()})
                found.steps.append(state.stepper.n_done)
                found.seconds = time.perf_counter() - began
                if state.best is not None and not should_stop(state.epochs[:-1], settings.early_stop_epochs):
                    found.best, found.rule = state.best.epoch - 1, state.best.chosen
                    found.seconds_stopped = found.seconds
            self.net = self.net or new_net(data, state.settings)
            self.facts = detector_facts(data)
        return found

    def score(self, net: State, rows: np.ndarray) -> np.ndarray:  # [m, L]
        "Score recordings by a network."
        assert self.net is not None
        self.net.load_state_dict(net)
        return score_rows(Detector(self.net, **self.facts), self.segments(rows, "recording"))

    def figures(
        self, rule: DecisionRule, known: np.ndarray, of: np.ndarray, segments: np.ndarray, part: str
    ) -> dict[str, float]:
        "Evaluate scores of a part: rule and calibration come from `known` segment scores of training recordings `of`."
        own = vote_scores(known, rule.vote, rule.share)
        held = HeldOutScores(np.clip(own, 0, 1), self.is_leak[of], self.group[of], "sensor", "")
        calibration = fit_calibration(held)
        score = vote_scores(segments, rule.vote, rule.share)
        truth = self.segments(self.rows[part], "recording").is_leak
        found = leak_metrics(truth, score, rule.threshold)
        p = score if calibration is None else calibration.probability(np.clip(score, 0, 1))
        return {
            "balanced_accuracy": found["balanced_accuracy"],
            "auc": found["auc"],
            "brier": float(np.mean((p - truth) ** 2)),
        }


def measure_draw(draw: Draw) -> dict[str, Any]:
    "Fit folds and all recordings, and evaluate each candidate on new and on known groups."
    fold = make_folds(draw.labels, draw.group, 5, draw.seed)
    train, n = draw.rows["train"], len(fold)
    places = [np.flatnonzero(fold == k) for k in range(fold.max() + 1)]
    fits = [draw.fit(np.flatnonzero(fold != k), own) for k, own in enumerate(places)]
    whole = draw.fit(np.arange(n))
    length = float(np.median([f.steps[int(np.nanargmin(f.losses))] for f in fits]))
    at = {"length": [f.nearest(length) for f in fits], "all epochs": [len(f.nets) - 1 for f in fits]}
    held: dict[str, np.ndarray] = {}
    for name, epochs in at.items():
        own = [draw.score(f.nets[e], train[p]) for f, e, p in zip(fits, epochs, places, strict=True)]
        held[name] = np.concatenate(own)
    order = np.concatenate(places)
    rules = {name: choose_rule(draw.is_leak[order], own) for name, own in held.items()}
    net_of = {"length": whole.nets[whole.nearest(length)], "all epochs": whole.nets[-1]}
    found: dict[str, Any] = {}
    for part in PROTOCOLS:
        rows = draw.rows[part]
        splits = [
            draw.figures(
                f.rule, draw.score(f.nets[f.best], train[p]), p, draw.score(f.nets[f.best], rows), part
            )
            for f, p in zip(fits, places, strict=True)
        ]
        scores = {name: draw.score(net, rows) for name, net in net_of.items()}
        began = time.perf_counter()
        scores["average"] = np.mean([draw.score(f.nets[-1], rows) for f in fits], 0)
        found[part] = {"split": {key: float(np.mean([s[key] for s in splits])) for key in splits[0]}}
        for name, segments in scores.items():
            source = "all epochs" if name == "average" else name
            found[part][name] = draw.figures(rules[source], held[source], order, segments, part)
        average_s = time.perf_counter() - began
    of_folds = sum(f.seconds for f in fits)
    split_s = float(np.mean([f.seconds_stopped for f in fits]))
    return found | {
        "recordings": n,
        "folds": len(fits),
        "length": length,
        "steps": whole.steps[-1],
        "best_epochs": [f.best + 1 for f in fits],
        "seconds": {
            "split": split_s,
            "length": of_folds + whole.seconds * min(1, length / whole.steps[-1]),
            "all epochs": of_folds + whole.seconds,
            "average": of_folds,
        },
        "average_rate": len(rows) / average_s,
    }


def measure_blend(draw: Draw) -> dict[str, Any]:
    "Fit blends with a validation split and on all recordings, and evaluate both on new and on known groups."
    train = draw.rows["train"]
    features = spectral_features(draw.segments(train, "recording"))
    fold = make_folds(draw.labels, draw.group, 5, draw.seed)
    learned, held = np.flatnonzero(fold != 0), np.flatnonzero(fold == 0)
    seconds = {"split": 0.0, "all epochs": 0.0}

    def members(chosen: np.ndarray, name: str, validation: np.ndarray | None = None) -> Members:
        fit = draw.fit(chosen, validation)
        seconds[name] += fit.seconds if validation is None else fit.seconds_stopped
        trees = fit_spectral(features.of(chosen), draw.labels[chosen], 2, seed=draw.seed, n_threads=1)
        net = fit.nets[-1 if validation is None else fit.best]
        return lambda rows: [
            score_rows(Detector(trees, **draw.facts), draw.segments(rows, "recording")),
            draw.score(net, rows),
        ]

    found: dict[str, Any] = {part: {} for part in PROTOCOLS}
    for name, chosen, validation in (("split", learned, held), ("all epochs", np.arange(len(fold)), None)):
        inner = make_folds(draw.labels[chosen], draw.group[chosen], 5, draw.seed)
        places = [chosen[inner == k] for k in range(inner.max() + 1)]
        each = [members(np.setdiff1d(chosen, own), name)(train[own]) for own in places]
        known, order = [np.concatenate(own) for own in zip(*each, strict=True)], np.concatenate(places)
        lines = [calibration_line(vote_scores(own), draw.is_leak[order]) for own in known]
        last = members(chosen, name, validation)
        scores = blend_scores(known, lines)
        if validation is not None:
            scores = np.concatenate([scores, blend_scores(last(train[validation]), lines)])
            order = np.concatenate([order, validation])
        rule = choose_rule(draw.is_leak[order], scores)
        for part in PROTOCOLS:
            own = blend_scores(last(draw.rows[part]), lines)
            found[part][name] = draw.figures(rule, scores, order, own, part)
    return found | {"recordings": len(fold), "folds": int(fold.max()) + 1, "seconds": seconds}


def bench_networks(
    folder: str | Path,  # work folder
    *,
    sources: str = "",  # folder with the repositories of SETS; tasks that are not there are left out
    draws: int = 12,  # of each task
    blends: bool = False,  # measure blends instead of networks
    log: Callable[[str], None] = print,
) -> dict[str, Any]:  # the record
    "Run the protocol."
    head, work = record_head("blends" if blends else "networks"), Path(folder)
    measure, names = (measure_blend, CANDIDATES[2:3]) if blends else (measure_draw, CANDIDATES[1:])
    work.mkdir(parents=True, exist_ok=True)
    has = [n for n, (own, *_) in REAL.items() if sources and (Path(sources) / own.source).is_dir()]
    found: list[dict[str, Any]] = []
    for k in range(draws):
        for name in (*SYNTHETIC, *has):
            with warnings.catch_warnings(), mock.patch.object(spectral, "N_TREES", N_TREES):
                warnings.simplefilter("ignore")
                path, parts = make_draw(name, work, sources, k)
                try:
                    with lm.open_dataset(path) as ds:
                        found.append({"task": name, "draw": k} | measure(Draw(ds, parts, k)))
                except DataError as e:  # too few groups with one of the labels
                    log(f"{name}, draw {k + 1}: {e}")
                    continue
            (work / "draws.json").write_text(json.dumps(found))
            log(f"{name}, draw {k + 1}: {sum(found[-1]['seconds'].values()):.0f}")
    decisions = {name: decide(found, name) for name in names}
    return {**head, "verified": {"all_ok": True}, "decisions": decisions, "draws": found}


def differences(draws: Sequence[dict[str, Any]], name: str, key: str, of: tuple[str, str]) -> np.ndarray:
    "Return figures of a candidate less those of `split` for each draw of a task and protocol."
    own = [d[of[1]] for d in draws if d["task"] == of[0]]
    return np.array([f[name][key] - f["split"][key] for f in own])


def decide(draws: Sequence[dict[str, Any]], name: str, key: str = "balanced_accuracy") -> dict[str, Any]:
    "Return differences of a candidate from `split` with their intervals, and which rules it meets."
    tasks = list(dict.fromkeys(d["task"] for d in draws))
    of = [(task, part) for task in tasks for part in PROTOCOLS]
    found = {where: differences(draws, name, key, where) for where in of}
    half = {w: stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5 for w, x in found.items()}
    rng = np.random.default_rng(0)
    samples = []
    for task in tasks:
        pairs = np.stack([found[task, part] for part in PROTOCOLS])  # [protocols, draws]
        samples.append(pairs[:, rng.integers(pairs.shape[1], size=(10_000, pairs.shape[1]))].mean((0, 2)))
    low, high = np.quantile(np.mean(samples, 0), (0.05 / 6, 1 - 0.05 / 6))
    real = [found[task, "new"].mean() for task in tasks if task in REAL]
    ratio = np.median([d["seconds"][name] for d in draws]) / np.median([d["seconds"]["split"] for d in draws])
    rules = {
        "mean rises": bool(low > 0),
        "no protocol falls": all(x.mean() + half[w] >= 0 for w, x in found.items()),
        "real sets do not fall": bool(real) and bool(np.mean(real) >= 0),
        "time": bool(ratio <= 6.5),
    }
    return {
        "protocols": {f"{task}, {part}": [found[task, part].mean(), half[task, part]] for task, part in of},
        "mean": float(np.mean([x.mean() for x in found.values()])),
        "interval": [float(low), float(high)],
        "mean_new": float(np.mean([found[task, "new"].mean() for task in tasks])),
        "real_new": float(np.mean(real)) if real else None,
        "time_ratio": float(ratio),
        "rules": rules,
        "lands": all(rules.values()),
    }


def networks_table(record: dict[str, Any]) -> str:
    "Balanced accuracy of `split`, differences of the candidates for each task and protocol, and the decision."
    draws, others = record["draws"], list(record["decisions"])
    decisions = {name: decide(draws, name) for name in others}
    lines = [f"{'balanced accuracy':34s} {'draws':>5s} {'split':>6s}" + "".join(f"{n:>17s}" for n in others)]
    for where in decisions[others[0]]["protocols"]:
        task, part = where.rsplit(", ", 1)
        own = [d[part]["split"]["balanced_accuracy"] for d in draws if d["task"] == task]
        cells = ("{:+.3f} ± {:.3f}".format(*decisions[n]["protocols"][where]) for n in others)
        lines.append(f"{where:34s} {len(own):5d} {np.mean(own):6.3f}" + "".join(f"{c:>17s}" for c in cells))
    for key in ("balanced_accuracy", "auc", "brier"):
        means = [decide(draws, n, key) for n in others]
        cells = ("{:+.3f} ({:+.3f}, {:+.3f})".format(f["mean"], *f["interval"]) for f in means)
        lines.append(
            f"mean difference of {key}: " + ", ".join(f"{n} {c}" for n, c in zip(others, cells, strict=True))
        )
    for name, found in decisions.items():
        failed = ", ".join(rule for rule, holds in found["rules"].items() if not holds)
        verdict = "lands" if found["lands"] else f"does not land ({failed})"
        lines.append(
            f"{name}: {verdict}; new groups {found['mean_new']:+.3f}, {found['time_ratio']:.1f} times as long"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", help="work folder")
    parser.add_argument("--sources", default="", help="folder with the repositories of the real sets")
    parser.add_argument("--draws", type=int, default=12, help="of each task")
    parser.add_argument("--blends", action="store_true", help="measure blends instead of networks")
    given = parser.parse_args()
    made = bench_networks(given.work, sources=given.sources, draws=given.draws, blends=given.blends)
    print(networks_table(made))
    print(store(made, Path(given.work)))
