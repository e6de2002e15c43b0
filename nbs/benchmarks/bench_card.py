"""What a quarter of an hour on a machine with a GPU has to settle, in the order of its worth.

python nbs/benchmarks/bench_card.py WORK [--out FOLDER] [--budget-s S] [--files N] [--commit ID] [--rehearse]

1. Parity: the tests with the marker `gpu`, or `leakmel machine doctor` where pytest is missing. Wrong rows make all figures worthless.
2. Builds of geometries A and B with the engines triton and cpu, in one process: stream and tail apart.
3. Settings that no record has shown to help, each on and off in turn. One that gains less than 3 % goes.
4. Training as it is, compiled, and with each step in one CUDA graph; evaluation and prediction (suite `train`).
5. Recordings at 48 kHz with an FFT of 4,096: whether a GPU is worth it there.
6. The cpu engine with 1, 2, 4 ... threads, with context switches: what more cores bring.

Each step has a share of the time that is left, and gives back what it does not use. The record is stored after each measurement.
A rehearsal takes all steps to their end on a CPU: the engine torch stands for triton, and a function call for a graph. Its figures
are not meaningful.
"""

import os
import re
import resource
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from bench_gpu import GEOMETRIES, LogLine, geometry_spec, log_nothing, run_script, script_parser, version_text
from bench_train import bench_train, card_facts, train_table

import leakmel as lm
from leakmel.core.errors import LeakmelError
from leakmel.core.monitor import usable_cores
from leakmel.core.timeline import aligned
from leakmel.extras.machine.bench import (
    record_head,
    run_leakmel,
    spreads,
    synthetic_set_of_size,
    total_for_training,
    touch_memory,
)
from leakmel.mel import device_engine
from leakmel.mel.spec import MelSpec
from leakmel.recordings.demo import SPLIT_SIZES, WAV_BYTES

ROUNDS = 2  # counted builds of a kind; one more warms
WORTH = 1.03  # ratio of medians from which a setting is worth having
SET_SIZES = 6  # memory that is touched, in sizes of the set

# settings that no record has shown to help: the default, and what it is compared with
NOMINAL: dict[str, dict[str, Any]] = {
    "copies without streams of their own": {"async_copies": False},
    "1 stream": {"gpu_streams": 1},
    "4 streams": {"gpu_streams": 4},
    "4 batches in a launch": {"batch_accumulation": 4},
    "8 batches before the GPU starts": {"warmup_slots": 8},
    "without graphs": {"cuda_graph": False},
}
# the engine torch alone replays graphs: as it is after 100 blocks of a size, here from the second one
GRAPH_AT_ONCE = "graph from the second block"


@dataclass(frozen=True)
class Card:
    "What the steps share."

    work: Path
    root: Path  # of the recordings
    n_files: int
    device: str
    gpu_engine: str  # triton; torch in a rehearsal
    rehearse: bool
    figures: dict[str, Any]
    keep: Callable[[], object]
    log: LogLine

    def build(
        self, root: Path, spec: MelSpec, engine: str, changes: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        "Build all splits once in this process; raises LeakmelError."
        device = "cpu" if engine == "cpu" else self.device
        config = lm.PipelineConfig(device=device, fsync=False, **(changes or {}))
        for old in (self.work / "built").glob("*.H5"):  # to be examined, they cost more than the build
            old.unlink()
        used = resource.getrusage(resource.RUSAGE_SELF)
        results = lm.build_all(
            root,
            out_dir=self.work / "built",
            spec=spec,
            engine=engine,
            mode="stream",
            pipeline=config,
            fresh=True,
            progress="none",
        )
        after = resource.getrusage(resource.RUSAGE_SELF)
        spans = results[0].timeline.spans
        first_s = min(s.start_s for s in spans if s.stage in ("read", "stage"))
        last_row_s = max(s.end_s for s in spans if s.stage == "write")
        seconds, found = results[0].run_s, sum(r.found for r in results)
        stream_s = last_row_s - first_s
        return {
            "seconds": seconds,
            "files_per_s": found / seconds,
            "stream_s": stream_s,
            "stream_files_per_s": found / stream_s,
            "after_last_row_s": max(s.end_s for s in spans) - last_row_s,
            "cpu_s": after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime,
            "voluntary_switches": float(after.ru_nvcsw - used.ru_nvcsw),
        }

    def in_turn(self, step: str, kinds: Mapping[str, Callable[[], dict[str, float]]], ends_s: float) -> None:
        "Measure kinds of builds in turn until the time of the step is over; the first round warms."
        found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
        late = set[str]()
        for k in range(-1, ROUNDS):
            for name, work in kinds.items():
                if name in late:
                    continue
                if time.monotonic() >= ends_s:
                    late.add(name)
                    self.lacks(f"{step}: {name}", f"the time was used up before round {k + 1} of {ROUNDS}")
                    continue
                if (done := self.attempt(f"{step}: {name}", work)) is None:
                    continue
                self.log(f"{step}: {name}: {done['files_per_s']:,.0f} files/s")
                if k >= 0:
                    found[name].append(done)
                    rows = spreads(found[name]) | {"rounds": len(found[name])}
                    self.figures[step][name] = rows
                    self.keep()

    def attempt(self, what: str, work: Callable[[], Any]) -> Any:
        "Measure something; None, and an entry in `errors`, where it fails."
        try:
            return work()
        except (LeakmelError, RuntimeError, OSError) as e:  # RuntimeError: of torch and its device
            self.figures["errors"].append({"what": what, "error": str(e)[:1000]})
            self.log(f"{what}: {e}")
            self.keep()
            return None

    def lacks(self, what: str, why: str) -> None:
        "Note what was not measured."
        self.figures["not_measured"].append({"what": what, "why": why})


def parity(card: Card, ends_s: float) -> None:
    "Run the tests for a GPU."
    project = Path(__file__).resolve().parents[2]
    if find_spec("pytest") is None:
        checks = run_leakmel("doctor", str(card.root)).body["checks"]
        found = {c["key"]: c["status"] for c in checks if c["key"].startswith("engine_")}
        card.figures["parity"] = {"by": "doctor", "engines": found}
        return
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    words += ["-n", str(min(8, usable_cores()))] if find_spec("xdist") else []
    words += ["tests/detector/test_learn_step.py"] if card.rehearse else ["tests"]
    left_s = max(1.0, ends_s - time.monotonic())
    try:
        done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired:
        card.lacks("parity", f"the tests took more than {left_s:.0f} s")
        return
    last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    card.figures["parity"] = {"by": "pytest", "status": done.returncode, "tests": counts, "last": last}
    if done.returncode or not (card.rehearse or counts.get("passed")):
        card.figures["errors"].append({"what": "parity", "error": done.stdout[-2000:] or done.stderr[-2000:]})


def builds(card: Card, ends_s: float) -> None:
    "Build A and B with each engine."
    kinds = {
        f"{name}, {engine}": partial(card.build, card.root, geometry_spec(name), engine)
        for name in GEOMETRIES
        for engine in (card.gpu_engine, "cpu")
    }
    card.in_turn("builds", kinds, ends_s)


def settings(card: Card, ends_s: float) -> None:
    "Build A with the nominal settings, and what each is worth."
    spec = geometry_spec("A")
    kinds = {"as it is": partial(card.build, card.root, spec, card.gpu_engine)}
    kinds |= {name: partial(card.build, card.root, spec, card.gpu_engine, c) for name, c in NOMINAL.items()}
    for name, after in (("torch, as it is", device_engine.GRAPH_AFTER), (f"torch, {GRAPH_AT_ONCE}", 1)):
        kinds[name] = partial(_with_graph_after, after, partial(card.build, card.root, spec, "torch"))
    card.in_turn("settings", kinds, ends_s)


def _with_graph_after(n_blocks: int, work: Callable[[], dict[str, float]]) -> dict[str, float]:
    "Measure with graphs that are captured after so many blocks of a size."
    before = device_engine.GRAPH_AFTER
    try:
        device_engine.GRAPH_AFTER = n_blocks
        return work()
    finally:
        device_engine.GRAPH_AFTER = before


def training(card: Card, ends_s: float) -> None:
    "Run the suite `train` for the time of this step."

    def keep(record: dict[str, Any]) -> None:
        card.figures["training"] = record
        card.keep()

    card.figures["training"] = bench_train(
        card.work,
        n_files=None if card.n_files == sum(SPLIT_SIZES.values()) else card.n_files // 2,
        rounds=ROUNDS,
        budget_s=max(1.0, ends_s - time.monotonic()),
        rehearse=card.rehearse,
        keep=keep,
        log=card.log,
    )
    card.figures["errors"] += card.figures["training"]["errors"]


WIDE = {"sample_rate": 48_000, "n_fft": 4096, "f_max_hz": 24_000.0, "n_mels": 128}
WIDE_FILES = 3000  # 2.9 GB


def wide_set(folder: Path, n_files: int) -> Path:
    "Write noise at 48 kHz, 10 s each, to a folder of splits and labels; one that exists is used again."
    root = folder / f"wide-{n_files}"
    noise = np.random.default_rng(48).normal(0, 3000, 480_000 + 97 * n_files).astype("<i2")
    for k in range(0 if root.exists() else n_files):
        split = ("TRAINING", "TRAINING", "VALIDATION", "TESTING")[k % 4]
        path = root / split / ("LEAK", "NO_LEAK")[k // 4 % 2] / f"{k:05d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as f:
            f.setparams((1, 2, 48_000, 0, "NONE", ""))
            f.writeframes(noise[97 * k : 97 * k + 480_000].tobytes())
    return root


def wide(card: Card, ends_s: float) -> None:
    "Build recordings at 48 kHz with each engine."
    root = wide_set(card.work, 16 if card.rehearse else WIDE_FILES)
    spec = MelSpec.preset("disjoint", **WIDE)
    engines = dict.fromkeys((card.gpu_engine, "torch", "cpu"))
    card.in_turn("wide", {e: partial(card.build, root, spec, e) for e in engines}, ends_s)


def cores(card: Card, ends_s: float) -> None:
    "Build A with the cpu engine and 1, 2, 4 ... threads."
    n, most = 1, usable_cores()
    counts = []
    while n < most:
        counts.append(n)
        n *= 2
    kinds = {
        f"{k} threads": partial(card.build, card.root, geometry_spec("A"), "cpu", {"compute_workers": k})
        for k in [*counts, most]
    }
    card.in_turn("cores", kinds, ends_s)


STEPS: dict[str, tuple[float, Callable[[Card, float], None]]] = {  # share of the time, and what measures
    "parity": (2.0, parity),
    "builds": (2.0, builds),
    "settings": (2.0, settings),
    "training": (4.0, training),
    "wide": (1.0, wide),
    "cores": (1.0, cores),
}


def bench_card(
    folder: str | os.PathLike,  # work folder, on fast local storage; recordings in it are used again
    *,
    n_files: int | None = None,  # recordings of all splits; None: the reference set's 51,434
    budget_s: float = 840,  # time limit, seconds
    rehearse: bool = False,  # on a CPU, tiny
    device: str | None = None,  # None: cuda:0, or the CPU in a rehearsal
    commit_id: str | None = None,  # where there is no git
    steps: Mapping[str, tuple[float, Callable[[Card, float], None]]] = STEPS,
    keep: Callable[[dict[str, Any]], object] = lambda figures: None,  # called with the record after each step
    log: LogLine = log_nothing,
) -> dict[str, Any]:  # the figures, as they are stored
    "Take all steps within a time limit."
    began = time.monotonic()
    n_files = n_files or (24 if rehearse else sum(SPLIT_SIZES.values()))
    figures = record_head("card-rehearsal" if rehearse else "card") | {
        "rehearsal": rehearse,
        "card": card_facts(),
        "device": device or ("cpu" if rehearse else "cuda:0"),
        "n_files": n_files,
        "budget_s": budget_s,
        "cache": "warm",
        "interval": "listing to the end of the run, all splits, no fsync, one process; stream: first read to last row",
        **{name: {} for name in steps},
        "seconds_of": {},
        "not_measured": [],
        "errors": [],
        "ok": False,
        "finished": False,
    }
    figures["commit"] = figures["commit"] or commit_id
    root = synthetic_set_of_size(folder, n_files, log)
    log("touching memory")
    figures["touched"] = touch_memory(SET_SIZES * n_files * WAV_BYTES)

    def keep_state() -> None:
        keep(figures | {"seconds": time.monotonic() - began})

    engine = "torch" if rehearse else "triton"
    card = Card(root.parent, root, n_files, figures["device"], engine, rehearse, figures, keep_state, log)
    left = sum(share for share, _ in steps.values())
    for name, (share, step) in steps.items():
        now = time.monotonic()
        rest_s = began + budget_s - now
        if rest_s <= 0:
            card.lacks(name, "the time was used up")
        else:
            card.attempt(name, partial(step, card, now + rest_s * share / left))
        left -= share
        figures["seconds_of"][name] = time.monotonic() - now
        keep_state()
    return figures | {"ok": not figures["errors"], "finished": True, "seconds": time.monotonic() - began}


def card_table(
    figures: dict[str, Any] | None,  # of `bench_card`; None: nothing was measured
) -> str:
    "Return the figures as text."
    if figures is None:
        return "not measured"
    lines = ["REHEARSAL: the figures below are not meaningful"] if figures["rehearsal"] else []
    lines += [] if figures["finished"] else ["UNFINISHED: the run was stopped before its end"]
    tests = figures["parity"].get("tests") or figures["parity"].get("engines") or {}
    lines.append("parity: " + (", ".join(f"{n} {what}" for what, n in tests.items()) or "not measured"))
    head = ("files/s", "stream s", "tail s", "CPU s", "switches", "rounds")
    for step in ("builds", "settings", "wide", "cores"):
        rows: list[tuple[str, ...]] = [(step, *head)]
        for name, f in figures[step].items():
            mid = {key: value["median"] for key, value in f.items() if isinstance(value, dict)}
            seconds = [f"{mid[key]:.2f}" for key in ("stream_s", "after_last_row_s", "cpu_s")]
            switches = f"{mid['voluntary_switches']:,.0f}"
            rows.append((name, f"{mid['files_per_s']:,.0f}", *seconds, switches, str(f["rounds"])))
        lines.append(aligned(rows) if len(rows) > 1 else f"{step}: not measured")
    lines += verdicts(figures["settings"])
    lines.append(train_table(figures["training"] or None))
    lines.append(f"{figures['n_files']:,} recordings, {version_text(figures)}")
    lines += [f"not measured: {x['what']} ({x['why']})" for x in figures["not_measured"]]
    lines += [f"ERROR in {x['what']}: {x['error']}" for x in figures["errors"]]
    return "\n".join(lines)


def verdicts(figures: Mapping[str, Any]) -> list[str]:
    "Say of each nominal setting whether its builds show at least 3 %, in one direction or the other."
    said = []
    for name, f in figures.items():
        base = figures.get("torch, as it is" if name.startswith("torch") else "as it is")
        if base is None or f is base:
            continue
        ratio = f["files_per_s"]["median"] / base["files_per_s"]["median"]
        apart = f["files_per_s"]["least"] > base["files_per_s"]["most"] or (
            f["files_per_s"]["most"] < base["files_per_s"]["least"]
        )
        shown = apart and not 1 / WORTH < ratio < WORTH
        said.append(f"{name}: {ratio:.2f} x: {'shown' if shown else 'no effect is shown'}")
    return said


if __name__ == "__main__":
    parser = script_parser(__doc__ or "", ROUNDS)
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU")
    args = parser.parse_args()
    n_files = args.files and total_for_training(args.files)
    run_script(bench_card, card_table, args, n_files=n_files, rehearse=args.rehearse)
