"""The suite `train`: training, evaluation and prediction.

python nbs/benchmarks/bench_train.py WORK [--out FOLDER] [--budget-s S] [--rounds N] [--files N] [--commit ID] [--rehearse]

Training steps are timed with their loader, augmentation and bookkeeping, in a steady state: the first step, in which kernels are
selected and perhaps compiled, and the first epoch are reported separately. Evaluation is timed from rows of a data set to scores,
prediction from recordings to scores, listing included. The figures are valid only if prediction and evaluation agree on every
recording. A machine without a GPU runs the same batches, but fewer; a rehearsal takes the same steps with sizes that a CPU finishes
in seconds, and its figures are not meaningful.

Each setting differs from the default in one respect. A CPU computes in float32 anyway, has one layout, and compilation takes longer
there than a round; its settings are a small net and streamed rows. An epoch of the benchmark draws all items, not a share of them,
so that batches are full. The time budget is shared among the steps: each gets at least one round, and as many more as begin within
its share. The record is stored after each step, so that a run that is killed loses one step.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_gpu import LogLine, log_nothing, require_rounds, run_script, script_parser

import leakmel as lm
from leakmel.core.errors import LeakmelError, UsageError, show_path
from leakmel.core.monitor import Monitor, _gpu_handle
from leakmel.core.timeline import Timeline, aligned, mean
from leakmel.detector.data.segments import Batch, Segments
from leakmel.detector.model import net as nets
from leakmel.detector.model.detector import Detector, score_rows
from leakmel.detector.model.settings import SMALL_SET, TrainSettings, with_length
from leakmel.detector.model.spectral import fit_spectral, spectral_features
from leakmel.detector.train.state import TrainingState, detector_of, open_training
from leakmel.detector.train.step import StepFigures, Stepper, learning_rate, step_seed
from leakmel.extras.machine.bench import (
    range_text,
    record_head,
    rounds_text,
    spread,
    spreads,
    synthetic_set_of_size,
    total_for_training,
    touch_memory,
)
from leakmel.mel.torch_engine import full_float32_precision


@dataclass(frozen=True)
class TrainPlan:
    "Number of batches and settings of a benchmark run."

    batch_size: int  # long segments
    base: TrainSettings
    changes: dict[str, dict[str, Any]]  # name of a setting -> what it changes
    files_per_batch: tuple[int, ...]  # of evaluation and prediction; a spectral detector gets the last one
    least_s: float = 1.0  # a round of evaluation or prediction is repeated until it has taken so long

    def settings(self, name: str, n_epochs: int) -> TrainSettings:
        "Return the settings of a training with this number of epochs."
        given: dict[str, Any] = {"channels": self.base.channels, "dropout": self.base.dropout}
        given |= {"batch_size": self.batch_size, "epochs": n_epochs, "epoch_share": 1.0, "profile_every": 10}
        return TrainSettings(**(given | self.changes[name]))


_FIRST: dict[str, dict[str, Any]] = {"as trained": {}}
_LAST: dict[str, dict[str, Any]] = {"full precision": {"amp": "off"}, "streamed": {"loader": "stream"}}
ONE_GRAPH = "one graph"  # of each step
_ONE_GRAPH: dict[str, dict[str, Any]] = {ONE_GRAPH: {}}
# compiling comes last: where it fails, the device may fail from then on
_GPU = _FIRST | _ONE_GRAPH | {"channels first": {"channels_last": False}} | _LAST
_GPU |= {"compiled": {"use_compile": True}}
_CPU = _FIRST | {"small net": {"channels": (24, 48, 64)}, "streamed": {"loader": "stream"}}
_LARGE = with_length(TrainSettings(), SMALL_SET)  # also where the benchmark has fewer items
ON_GPU = TrainPlan(5632, _LARGE, _GPU, (64, 256, 512))
ON_CPU = TrainPlan(_LARGE.batch_size, _LARGE, _CPU, (32, 128))
TINY = TrainPlan(128, TrainSettings(channels=(4, 8)), _FIRST | _ONE_GRAPH | _LAST, (8,), 0.0)
SET_SIZES = 3  # memory that is touched, in sizes of the set: recordings, data set and rows in memory
# usual recordings of the training split: the reference set's, or some batches an epoch
N_FILES = {"cuda": 39_563, "cpu": 2000}
N_FOR_TREES = 1000  # recordings at most on which the spectral detector is fitted


@dataclass(frozen=True)
class _Bench:
    "What the measurements of a run share."

    plan: TrainPlan
    path: Path  # of the training rows
    root: Path  # of the recordings
    device: str
    rounds: int  # at most
    log: LogLine


# names in the records, which stay
OF_RECORDS = {"loader_mean_ms": "wait_ms", "loader_max_ms": "wait_max_ms", "learn_s": "seconds"}


Work = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # loss, items that were right, norm


def captured(work: Work) -> Work:  # replays it; the results are always the same tensors
    "Capture what a function launches on the current GPU as a graph, without running it."
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()

    def replay() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        graph.replay()
        return results

    return replay


class StepInOneGraph:
    """The step of a `Stepper` with forward, loss, backward, clipping and optimiser in one CUDA graph.

    Batches of another size than the first one are computed without it, and the first ones warm. Of half precisions only bfloat16
    is possible: the scale of float16 is decided on the host. Follows the example "whole-network capture" of PyTorch's notes on CUDA.
    """

    WARM = 3  # batches

    def __init__(self, stepper: Stepper, capture: Callable[[Work], Work]):  # the CPU has none
        self.stepper = stepper
        self.capture = capture
        self.side = torch.cuda.Stream(stepper.device) if stepper.device.type == "cuda" else None
        for group in stepper.optimiser.param_groups:
            group["capturable"] = self.side is not None
            group["lr"] = torch.tensor(float(group["lr"]), device=stepper.device)
        self.x: torch.Tensor | None = None  # [n, M, W] of the batch
        self.y: torch.Tensor | None = None  # [n]
        self.replay: Work | None = None

    def _work(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s = self.stepper
        s.optimiser.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if s.half is None else torch.autocast(s.device.type, s.half):
            logits, leak_logit = s.net(x)
        totals = nets.batch_totals(y, s.weights)
        loss = nets.micro_batch_loss(logits, leak_logit, y, s.settings, s.weights, totals)
        loss.backward()
        weights = list(s.net.parameters())
        norm = torch.nn.utils.clip_grad_norm_(weights, s.settings.clip_norm or math.inf)
        s.optimiser.step()
        return loss.detach(), (logits.detach().argmax(1) == y).sum(), norm

    def __call__(self, batch: Batch) -> StepFigures:
        "Train on a batch."
        began, s = time.perf_counter(), self.stepper
        s.net.train()
        batch = batch.to(s.device)
        s.generator.manual_seed(step_seed(s.settings.seed, s.n_done, 0))
        images = nets.augment(nets.segment_images(batch.x), s.net.mean, s.settings, s.generator)
        for group in s.optimiser.param_groups:
            group["lr"].fill_(learning_rate(s.n_done, s.n_steps, s.settings))
        with full_float32_precision():
            results = self._run(images, batch.y)
        s.n_done += 1
        if s.first_step_s is None:
            s.first_step_s = time.perf_counter() - began
        loss, n_correct, norm = (each.clone() for each in results)  # the next replay writes to them
        return StepFigures(loss, n_correct, len(batch), norm)

    def _run(self, images: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.x is None or self.y is None:
            self.x, self.y = torch.empty_like(images), torch.empty_like(y)
        if images.shape != self.x.shape:
            return self._work(images, y)
        self.x.copy_(images)
        self.y.copy_(y)
        work = partial(self._work, self.x, self.y)
        if self.stepper.n_done < self.WARM:
            if self.side is None:
                return work()
            self.side.wait_stream(torch.cuda.current_stream(self.stepper.device))
            with torch.cuda.stream(self.side):
                results = work()
            torch.cuda.current_stream(self.stepper.device).wait_stream(self.side)
            return results
        self.replay = self.replay or self.capture(work)
        return self.replay()


def _train_epoch(state: TrainingState) -> dict[str, float]:
    "Train on every batch once."
    for batch in state.timer.batches(state.loader):
        with state.timer.step():
            state.sums.add(state.stepper.step(batch))
    return state.timer.times()


def _train(bench: _Bench, name: str, stop_s: float) -> tuple[dict[str, Any], Detector]:
    "Measure the training steps of one setting, one round and as many more as begin in time; return the figures and the detector."
    settings = bench.plan.settings(name, 1 + bench.rounds)
    with open_training(str(bench.path), settings=settings) as data:
        began, timeline, found = time.perf_counter(), Timeline(), list[dict[str, Any]]()
        state = TrainingState(data, settings, torch.device(bench.device))
        if name == ONE_GRAPH:
            capture = captured if state.stepper.device.type == "cuda" else lambda work: work
            vars(state.stepper)["step"] = StepInOneGraph(state.stepper, capture)
        with state.loader:
            warm, warm_s = _train_epoch(state), time.perf_counter() - began
            with Monitor(timeline, 0.1, bench.device):
                for k in range(bench.rounds):
                    times = _train_epoch(state)
                    rate = times["n_batches"] / times["learn_s"]
                    busy = min(1.0, rate * times["compute_ms"] / 1000)  # gaps between kernels count too
                    known = {OF_RECORDS.get(n, n): None if math.isnan(v) else v for n, v in times.items()}
                    found.append(known | {"batches_per_s": rate, "busy_share": busy})
                    bench.log(f"{name}: round {k + 1} of {bench.rounds}: {rate:,.1f} batches/s")
                    if time.monotonic() >= stop_s:
                        break
            if not math.isfinite(loss := state.sums.mean_loss()):
                raise LeakmelError(
                    "the loss of the training is not a finite number", code="benchmark-not-right", found=loss
                )
            figures = {
                "first_step_s": state.stepper.first_step_s,
                "warmup_s": warm_s,
                "warmup_batches": warm["n_batches"],
                "loader": state.loader.kind,
                "half": str(state.stepper.half),
                "gpu_percent": mean(timeline.samples, "gpu_percent"),
                "last_loss": loss,
                "rounds": len(found),
            }
            return spreads(found) | figures, detector_of(state)


def _rates(bench: _Bench, group: str, detector: Detector, n: int, stop_s: float) -> dict[str, Any]:
    "Return recordings per second of evaluation (rows to scores) or prediction (recordings to scores), over one round and as many more as begin in time."
    options: dict[str, Any] = {"device": bench.device, "files_per_batch": n}
    found = []
    with Segments(str(bench.path), level="recording") as rows:
        for k in range(-1, bench.rounds):
            n_files, seconds = 0, 0.0
            while not n_files or (k >= 0 and seconds < bench.plan.least_s):
                began = time.perf_counter()
                if group == "evaluation":
                    n_files += len(score_rows(detector, rows, **options))
                    seconds += time.perf_counter() - began
                else:
                    p = lm.predict(bench.root, detector, split="training", progress="none", **options)
                    n_files, seconds = n_files + p.found, seconds + p.seconds
            found.append(n_files / seconds)
            when = "warm-up" if k < 0 else f"round {k + 1} of {bench.rounds}"
            bench.log(
                f"{group}, {detector.kind}, batches of {n} recordings: {when}: {found[-1]:,.0f} files/s"
            )
            if k >= 0 and time.monotonic() >= stop_s:
                break
        figures = {"files_per_s": spread(found[1:]), "rounds": len(found) - 1}
        return figures | ({"rows": repr(rows)} if group == "evaluation" else {})


MAX_SCORE_DIFFERENCE = (
    0.02  # of a score: engines agree to half a step of float16, and a score follows its features
)


def agreement(
    path: Path,  # data set
    root: Path,  # of the recordings
    detector: Detector,
    device: str,
) -> dict[str, Any]:  # n, max_abs (None: not of the same recordings and segments), all_ok
    "Compare prediction with evaluation over all recordings, up to the length of a row."
    with Segments(str(path), level="recording") as rows:
        right = score_rows(detector, rows, device=device)
        names = [os.fsencode(n) for n in rows.sources[0].files["path"].iloc[rows.rows]]
        expected = {name: row[:n] for name, row, n in zip(names, right, rows.segment_counts, strict=True)}
    p = lm.predict(root, detector, split="training", length="spec", device=device, progress="none")
    found = {s.path.partition(b"/")[2]: s.segment_scores for s in p.scored}  # without the folder of the split
    if {n: len(s) for n, s in found.items()} != {n: len(s) for n, s in expected.items()}:
        return {"n": len(p), "max_abs": None, "all_ok": False}
    most = max((float(np.abs(s - expected[n]).max()) for n, s in found.items()), default=None)
    return {"n": len(p), "max_abs": most, "all_ok": most is not None and most <= MAX_SCORE_DIFFERENCE}


def _spectral_detector(
    bench: _Bench,
    network: Detector,  # of the same task and features
) -> Detector:
    "Fit a spectral detector on some of the recordings."
    with Segments(str(bench.path), level="recording", task=network.task) as rows:
        some = slice(None, None, -(-len(rows) // N_FOR_TREES))
        features = spectral_features(rows, rows=rows.rows[some], mask=rows.segment_mask[some])
        classifier = fit_spectral(features, rows.labels[some], len(network.task.model_names))
    return replace(network, classifier=classifier)


def _measure_steps(
    bench: _Bench,
    figures: dict[str, Any],  # gets what is measured, errors, and what was not measured
    keep: Callable[[dict[str, Any]], object],
    ends_s: float,  # no step but the first is started later
) -> bool:  # False: every training failed
    "Measure a training, then evaluation and prediction with its network and with a spectral detector, then the other trainings."
    detectors, plan = list[Detector](), bench.plan

    def train(name: str, stop_s: float) -> None:
        figures["training"][name], detector = _train(bench, name, stop_s)
        if not detectors:
            detectors.append(detector)

    def fit(stop_s: float) -> None:
        detectors.append(_spectral_detector(bench, detectors[0]))

    def compare() -> None:
        newest = detectors[-1]
        figures["verified"][newest.kind] = agreement(bench.path, bench.root, newest, bench.device)

    def rate(group: str, kind: str, n: int, stop_s: float) -> None:
        if kind in (by_kind := {d.kind: d for d in detectors}):  # else its fit failed
            figures[group][f"{kind}, {n}"] = _rates(bench, group, by_kind[kind], n, stop_s)

    def attempt(what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except (LeakmelError, RuntimeError) as e:  # RuntimeError: of torch and its device
            figures["errors"].append({"what": what, "error": str(e)})
            bench.log(f"{what}: {e}")
        keep(figures)

    groups = ("evaluation", "prediction")
    rates = [(group, "cnn", n) for group in groups for n in plan.files_per_batch]
    trainings: list[tuple[str, Callable[[float], None]]]
    trainings = [(f"training: {name}", partial(train, name)) for name in plan.changes]
    steps = trainings[:1]
    steps += [(f"{group}: {kind}, {n}", partial(rate, group, kind, n)) for group, kind, n in rates]
    if plan.files_per_batch:
        rates = [(group, "spectral", plan.files_per_batch[-1]) for group in groups]
        steps += [("spectral detector", fit)]
        steps += [(f"{group}: {kind}, {n}", partial(rate, group, kind, n)) for group, kind, n in rates]
    steps += trainings[1:]
    n_compared = 0
    for k, (what, step) in enumerate(steps):
        now = time.monotonic()
        if k and now >= ends_s:
            figures["not_measured"].append({"what": what, "why": "the time budget was used up"})
        elif not detectors and not what.startswith("training"):
            figures["not_measured"].append({"what": what, "why": "no training was completed before it"})
        else:
            attempt(what, partial(step, now + (ends_s - now) / (len(steps) - k)))
        if len(detectors) > n_compared:  # early: without it no figure is valid
            n_compared = len(detectors)
            attempt(f"agreement: {detectors[-1].kind}", compare)
    return bool(detectors)


def card_facts() -> dict[str, Any]:  # None: not reported by the driver; "nvml": why NVML cannot be used
    "Return driver, clocks, power and bus of the first GPU."
    try:
        import pynvml as nv

        gpu = _gpu_handle()
    except Exception as e:
        return {"nvml": f"{type(e).__name__}: {e}"}
    questions: dict[str, Callable[[], Any]] = {
        "name": lambda: nv.nvmlDeviceGetName(gpu),
        "driver": lambda: nv.nvmlSystemGetDriverVersion(),
        "cuda_driver": lambda: nv.nvmlSystemGetCudaDriverVersion_v2(),
        "vram_bytes": lambda: nv.nvmlDeviceGetMemoryInfo(gpu).total,
        "sm_mhz": lambda: nv.nvmlDeviceGetClockInfo(gpu, nv.NVML_CLOCK_SM),
        "sm_max_mhz": lambda: nv.nvmlDeviceGetMaxClockInfo(gpu, nv.NVML_CLOCK_SM),
        "memory_mhz": lambda: nv.nvmlDeviceGetClockInfo(gpu, nv.NVML_CLOCK_MEM),
        "power_limit_w": lambda: nv.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
        "power_w": lambda: nv.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "temperature_c": lambda: nv.nvmlDeviceGetTemperature(gpu, nv.NVML_TEMPERATURE_GPU),
        "throttled_for": lambda: nv.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
        "pcie_generation": lambda: nv.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        "pcie_lanes": lambda: nv.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        "ecc": lambda: bool(nv.nvmlDeviceGetEccMode(gpu)[0]),
    }
    facts = dict[str, Any].fromkeys(questions)
    for name, question in questions.items():
        with contextlib.suppress(Exception):  # not reported by this driver or GPU
            value = question()
            facts[name] = value.decode() if isinstance(value, bytes) else value
    return facts


def bench_train(
    folder: str | os.PathLike,  # work folder: recordings and data set are kept there and reused
    *,
    n_files: int | None = None,  # recordings of the training split; None: N_FILES
    rounds: int = 5,  # counted rounds of each setting, at most
    budget_s: float = 420,  # time limit, seconds; what is left is shared equally among the remaining steps
    rehearse: bool = False,  # on a CPU, tiny
    commit_id: str | None = None,  # stored if git is not available
    keep: Callable[[dict[str, Any]], object] = lambda figures: (
        None
    ),  # called with the record at the start and after each step
    log: LogLine = log_nothing,
) -> dict[str, Any]:  # the figures, as they are stored; "device" says of what
    "Measure training, evaluation and prediction on a synthetic data set."
    from leakmel.recordings.demo import WAV_BYTES

    require_rounds(rounds)
    if budget_s <= 0:
        raise UsageError("the time budget must be above 0", code="invalid-effort", found=budget_s)
    ends_s = time.monotonic() + budget_s
    device = "cuda:0" if torch.cuda.is_available() and not rehearse else "cpu"
    kind = device.partition(":")[0]
    plan = TINY if rehearse else ON_GPU if kind == "cuda" else ON_CPU
    n_files = n_files or N_FILES[kind]
    n_all = total_for_training(min(n_files, 12) if rehearse else n_files)
    figures: dict[str, Any] = record_head("train") | {
        "rehearsal": rehearse,
        "card": card_facts(),
        "device": device,
        "torch": torch.__version__,
        "set": {"n_files": n_all},
        "rounds": rounds,
        "budget_s": budget_s,
        "touched": {},
        "cache": "warm",
        "interval": "training: whole epochs after the warm-up; evaluation: rows to scores; "
        "prediction: listing to the last score",
        "batch_size": plan.batch_size,
        "training": {},
        "evaluation": {},
        "prediction": {},
        "verified": {},  # kind of detector -> result of `agreement`
        "not_measured": [],
        "errors": [],
        "ok": False,
        "finished": False,
    }
    figures["commit"] = commit_id or figures["commit"]
    keep(figures)
    root, path = synthetic_set_of_size(folder, n_all, log), Path(folder) / "train" / f"TRAINING-{n_all}.h5"
    figures["set"]["root"] = show_path(root)
    log("touching memory")
    figures["touched"] = touch_memory(SET_SIZES * n_all * WAV_BYTES)
    log("building the data set")
    lm.build(root, split="training", out=path, progress="none", pipeline=lm.PipelineConfig(device=device))
    keep(figures)
    bench = _Bench(plan, path, root, device, rounds, log)
    if not _measure_steps(bench, figures, keep, ends_s):
        why = figures["errors"][0]["error"]
        raise LeakmelError("the training failed with every setting", code="benchmark-not-right", found=why)
    agree = all(v["all_ok"] for v in figures["verified"].values())
    return figures | {"ok": agree and not figures["errors"], "finished": True}


def train_table(
    figures: dict[str, Any] | None,  # of `bench_train`; None: not measured
) -> str:  # at most 100 columns
    "Return the figures of the suite as a text table."
    if figures is None:
        return "not measured"
    lines = ["REHEARSAL: the figures below are not meaningful"] if figures["rehearsal"] else []
    lines += [] if figures.get("finished", True) else ["UNFINISHED: the run was stopped before its end"]
    head = (
        f"training, batches of {figures['batch_size']:,}",
        "batches/s",
        "range",
        "items/s",
        "wait ms",
        "step ms",
    )
    rows: list[tuple[str, ...]] = [(*head, "busy", "first s")]
    for name, f in figures["training"].items():
        rate, seen = f["batches_per_s"], [f[key] for key in ("wait_ms", "compute_ms", "busy_share")]
        texts = ["-" if each is None else f"{each['median']:.2f}" for each in seen]
        span = f"{rate['least']:,.2f}-{rate['most']:,.2f}"
        items = f"{rate['median'] * figures['batch_size']:,.0f}"
        rows.append((f"  {name}", f"{rate['median']:,.2f}", span, items, *texts, f"{f['first_step_s']:.1f}"))
    lines.append(aligned(rows))
    for group in ("evaluation", "prediction"):
        rates = {name: f["files_per_s"] for name, f in figures[group].items()}
        rows = [(f"  {name}", f"{r['median']:,.0f}", range_text(r)) for name, r in rates.items()]
        lines += ["", aligned([(f"{group}, recordings at once", "files/s", "range"), *rows])]
    lines.append("")
    for kind in ("cnn", "spectral"):
        v = figures["verified"].get(kind)
        if v is None:
            lines.append(f"{kind}: prediction and evaluation were NOT COMPARED")
        elif v["max_abs"] is None:
            lines.append(f"{kind}: prediction and evaluation DO NOT AGREE in recordings or their segments")
        else:
            agree = "agree" if v["all_ok"] else "DO NOT AGREE"
            text = f"{agree} on {v['n']:,} recordings: largest difference {v['max_abs']:.2g}"
            lines.append(f"{kind}: prediction and evaluation {text}")
    lines += [f"not measured: {e['what']}: {e['error']}"[:100] for e in figures["errors"]]
    lines += [f"not measured: {e['what']}: {e['why']}"[:100] for e in figures.get("not_measured", [])]
    on_cpu = f"{figures['machine']['n_cores']} cores of a CPU ({figures['machine']['cpu']})"
    place = on_cpu if figures["device"] == "cpu" else figures["card"].get("name") or figures["device"]
    return "\n".join([*lines, f"{rounds_text(figures)} on {place}"[:100]])


if __name__ == "__main__":
    parser = script_parser(__doc__ or "", 5)
    parser.add_argument("--rehearse", action="store_true", help="tiny settings, on a CPU")
    args = parser.parse_args()
    run_script(bench_train, train_table, args, n_files=args.files, rounds=args.rounds, rehearse=args.rehearse)
