"""Each suggestion is tried on a model of a machine: the build with the suggested setting takes less time there.

A model lets a part of a build sleep for what it costs on that machine. The time of a build is the longest sum of one thread, so that
other programs on the machine that runs the tests do not count.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from each import each

import leakmel as lm
from leakmel.core import timeline
from leakmel.core.timeline import Evidence, Suggestion, analyse
from leakmel.dataset import verify
from leakmel.dataset.config import PipelineConfig
from leakmel.dataset.loader import BatchReader
from leakmel.dataset.writer import RowFile
from leakmel.mel.engines import ReferenceEngine
from leakmel.mel.torch_engine import TorchChain
from leakmel.recordings import conform, native

pytestmark = pytest.mark.slow
N_FILES = 37


class Machine:
    "Parts of a build that sleep; `slept` are the seconds of each thread in the latest build."

    def __init__(self, patch: pytest.MonkeyPatch, n_cores: int = 4):
        self.patch, self.n_cores = patch, n_cores
        self.slept = defaultdict[int, float](float)
        self.n_active = 0
        self.lock = threading.Lock()
        self.ahead = False

    def slow(self, owner: Any, name: str, cost_s: Callable[..., float]) -> None:
        real = getattr(owner, name)

        def slower(*args: Any, **options: Any) -> Any:
            with self.lock:
                self.n_active += 1
            seconds = cost_s(*args)
            time.sleep(seconds)
            with self.lock:
                self.n_active -= 1
            self.slept[threading.get_ident()] += seconds
            return real(*args, **options)

        self.patch.setattr(owner, name, slower)

    def build(
        self, root: Path, out: Path, **given: Any
    ) -> tuple[float, lm.BuildResult, dict[str, Suggestion]]:
        "Build; return the time of this machine, the result, and the suggestions by their setting."
        self.slept.clear()
        settings = PipelineConfig(**{"monitor_interval_s": 0.0} | given.get("pipeline", {}))
        options: dict[str, Any] = {"engine": "reference", "check": 2, "progress": "none", "fresh": True}
        options |= {k: v for k, v in given.items() if k not in ("pipeline", "facts")}
        made = lm.build(
            root, out=out, spec={"sample_rate": 4096, "duration_s": 1.0}, pipeline=settings, **options
        )
        facts = made.summary | {"n_cores": self.n_cores}
        found = analyse(made.timeline, made.split, summary=facts | given.get("facts", {}))
        return max(self.slept.values(), default=0.0), made, {s.parameter: s for s in found.suggestions}


@pytest.fixture
def folder(tmp_path: Path, make_wav: Callable[..., Path]) -> Path:
    for i in range(N_FILES):
        make_wav(tmp_path / "data" / ("LEAK", "NOLEAK")[i % 2] / f"{i:02}.wav", seed=i, n=4096)
    return tmp_path / "data"


APART = {"read_workers": 2, "write_workers": 1, "compute_workers": 1, "files_per_batch": 4}
ON_DEVICE = {"engine": "torch", "pipeline": {"device": "fake", "files_per_batch": 4, "slots": 8}}


# name of the setting; what is slow, and its cost in seconds; the first build
@each(
    ("setting", "owner", "name", "cost_s", "given"),
    [
        pytest.param(
            "files_per_batch",
            BatchReader,
            "fill",
            lambda reader, slot: 0.01 * slot.n,
            {"pipeline": {"files_per_batch": 32, "compute_workers": 4}},
            id="few batches",
        ),
        pytest.param("files_per_batch", TorchChain, "features", lambda *_: 0.05, ON_DEVICE, id="launches"),
        pytest.param(
            "batch_accumulation",
            TorchChain,
            "features",
            lambda *_: 0.05,
            ON_DEVICE,
            id="launches of several batches",
        ),
        pytest.param(
            "read_workers",
            BatchReader,
            "fill",
            lambda reader, slot: 0.01 * slot.n,
            {"pipeline": APART},
            id="reader",
        ),
        pytest.param(
            "compute_workers",
            ReferenceEngine,
            "run",
            lambda _, x, *__: 0.02 * len(x),
            {"pipeline": APART},
            id="engine",
        ),
        pytest.param("write_workers", RowFile, "write", lambda *_: 0.05, {"pipeline": APART}, id="writer"),
        pytest.param("check", verify, "expected_row", lambda *_: 0.03, {"check": None}, id="check"),
    ],
)
def test_a_suggestion_helps(folder, tmp_path, monkeypatch, setting, owner, name, cost_s, given):
    monkeypatch.setattr(timeline, "USUAL_CHECK", 8)  # of data sets with more rows, 64
    machine = Machine(monkeypatch)
    machine.slow(owner, name, cost_s)
    before_s, first, suggested = machine.build(folder, tmp_path / "x.h5", **given)
    assert setting in suggested, (suggested, str(analyse(first.timeline, first.split, summary=first.summary)))
    new = suggested[setting].new
    other = {"check": new} if setting == "check" else {"pipeline": given["pipeline"] | {setting: new}}
    after_s, *_ = machine.build(folder, tmp_path / "y.h5", **given | other)
    assert after_s < 0.8 * before_s, (before_s, after_s, suggested[setting])


def test_larger_batches_help_where_the_start_of_each_counts(folder, tmp_path, monkeypatch):
    "All have the same size, so that only their time tells."
    monkeypatch.setattr(timeline, "SHORT_BATCH_S", 0.1)  # of this machine, whose batches take 20 ms at least
    machine = Machine(monkeypatch)
    machine.slow(BatchReader, "fill", lambda *_: 0.02)
    pipeline = {"files_per_batch": 1, "compute_workers": 2}
    before_s, _, suggested = machine.build(
        folder, tmp_path / "x.h5", engine="cpu", check=0, pipeline=pipeline
    )
    pipeline["files_per_batch"] = suggested["files_per_batch"].new
    after_s, *_ = machine.build(folder, tmp_path / "y.h5", engine="cpu", check=0, pipeline=pipeline)
    assert after_s < 0.5 * before_s


def test_fewer_threads_help_where_they_share_cores(folder, tmp_path, monkeypatch):
    machine = Machine(monkeypatch, n_cores=2)

    def cost_s(engine: Any, samples: Any, *_: Any) -> float:
        return 0.02 * len(samples) * (1.0 if machine.n_active <= 2 else 0.75 * machine.n_active)

    machine.slow(ReferenceEngine, "run", cost_s)
    pipeline = {"files_per_batch": 2, "compute_workers": 8}
    before_s, _, suggested = machine.build(folder, tmp_path / "x.h5", pipeline=pipeline)
    pipeline["compute_workers"] = suggested["compute_workers"].new
    assert pipeline["compute_workers"] == 2
    after_s, *_ = machine.build(folder, tmp_path / "y.h5", pipeline=pipeline)
    assert after_s < 0.9 * before_s


def test_files_that_are_requested_ahead_help_where_the_disk_is_slow(folder, tmp_path, monkeypatch):
    machine, requested = Machine(monkeypatch), set[str]()

    def prefetch(paths: list[bytes], sizes: Any) -> int:
        requested.update(os.fsdecode(p) for p in paths)
        return len(paths)

    def cost_s(reader: BatchReader, slot: Any) -> float:
        if reader.cache_use is None or not machine.ahead:
            return 0.02 * slot.n
        for _ in range(200):  # until the disk has begun with the files that come next
            if len(requested) >= slot.n:
                break
            time.sleep(0.005)
        return 0.02 * max(0, slot.n - len(requested))

    monkeypatch.setattr(native, "prefetch_files", prefetch)
    machine.slow(BatchReader, "fill", cost_s)
    cold = {"cache": "cold", "bytes_from_device": 10**6, "bytes_asked": 10**6}
    pipeline = {"files_per_batch": 4, "compute_workers": 2, "read_ahead": 0}
    before_s, _, suggested = machine.build(folder, tmp_path / "x.h5", pipeline=pipeline, facts=cold)
    pipeline["read_ahead"] = suggested["read_ahead"].new
    machine.ahead = True
    after_s, *_ = machine.build(folder, tmp_path / "y.h5", pipeline=pipeline)
    assert after_s < 0.8 * before_s


def test_more_batches_in_flight_help_where_readers_and_engine_wait_for_each_other(
    folder, tmp_path, monkeypatch
):
    "The engine is idle for less of its time; in one of three tries, since this is a time of the machine that runs the test."
    machine = Machine(monkeypatch)
    machine.slow(BatchReader, "fill", lambda *_: 0.05)
    machine.slow(TorchChain, "features", lambda *_: 0.05)
    given: dict[str, Any] = {"engine": "torch"}
    pipeline: dict[str, Any] = {"device": "fake", "files_per_batch": 2, "slots": 1, "read_workers": 2}
    for _ in range(3):
        _, first, suggested = machine.build(folder, tmp_path / "x.h5", pipeline=pipeline, **given)
        if "slots" not in suggested:
            continue
        more = pipeline | {"slots": suggested["slots"].new}
        _, second, _ = machine.build(folder, tmp_path / "y.h5", pipeline=more, **given)
        before, after = (Evidence(r.timeline, r.split, r.summary) for r in (first, second))
        if after.idle_s / after.engine_s < 0.7 * before.idle_s / before.engine_s:
            return
    raise AssertionError((suggested, before.idle_s, before.engine_s, after.idle_s, after.engine_s))


def test_a_cache_file_helps_where_recordings_are_resampled(tmp_path, make_wav, monkeypatch):
    "From the second build on."
    for i in range(12):
        make_wav(tmp_path / "data" / "LEAK" / f"{i}.wav", rate=8000, seed=i)
    for i in range(14):
        make_wav(tmp_path / "data" / "NOLEAK" / f"{i}.wav", rate=4096, seed=i)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = Machine(monkeypatch)
    machine.slow(conform, "to_rate", lambda *_: 0.05)
    pipeline = {"files_per_batch": 4, "compute_workers": 1}
    before_s, _, suggested = machine.build(tmp_path / "data", tmp_path / "x.h5", pipeline=pipeline)
    assert suggested["mode"].new == "memmap"
    for _ in range(2):
        after_s, *_ = machine.build(tmp_path / "data", tmp_path / "y.h5", pipeline=pipeline, mode="memmap")
    assert after_s < 0.2 * before_s
