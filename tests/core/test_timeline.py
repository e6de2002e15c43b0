"A timeline file stays small, keeps to its schema and tells the same story; the monitor's queries fail one by one and cost little."

import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from errors import raises

from leakmel.core.errors import DataError
from leakmel.core.monitor import SAMPLE_KEYS, Sampler
from leakmel.core.timeline import (
    MAX_SPANS,
    STAGE_MEANING,
    STAGES,
    Gauge,
    Span,
    Timeline,
    covered_s,
    nvtx_range,
    read_timeline,
    thin,
    thin_samples,
    write_timeline,
)
from leakmel.insight.diagnose import attribute, amdahl_bounds, stage_table


def large_run(n_files: int = 200_000, *, device: bool, n_samples: int = 12_000) -> Timeline:
    "What a build of many recordings leaves behind: on the CPU by four workers, or by eight readers, a device and a writer."
    rng, timeline, at = np.random.default_rng(0), Timeline(), dict[str, float]()

    def work(stage: str, lane: str, seconds: float, batch: int, after_s: float = 1.0) -> float:
        start = max(at.get(lane, 1.0), after_s)
        name = lane.split()[0]
        timeline.spans.append(Span(stage, name, start, start + seconds, "TRAINING", batch, 32, 32 * 81_964))
        at[lane] = start + seconds + rng.uniform(0, 0.004)
        return start + seconds

    timeline.spans.append(Span("start_up", "main", 0.0, 1.0))
    for batch in range(-(-n_files // 32)):
        times = rng.uniform(0.5, 1.5, 5) * (0.010, 0.002, 0.020, 0.001, 0.003)
        if device:
            ready = work("read", f"reader-{batch % 8}", times[0], batch)
            for stage, lane, t in zip(
                ("copy_in", "compute", "copy_out"),
                ("cuda:0 in", "cuda:0 compute", "cuda:0 out"),
                times[1:] / 4,
            ):
                ready = work(stage, lane, t, batch, ready)
            work("write", "writer-0", times[4], batch, ready)
            timeline.gauges += [
                Gauge("queue.compute", ready, batch % 7),
                Gauge("queue.write", ready, batch % 3),
            ]
        else:
            for stage, t in zip(("read", "compute", "write"), times[[0, 2, 4]]):
                work(stage, f"worker-{batch % 4}", t, batch)
    end = max(s.end_s for s in timeline.spans)
    timeline.spans += [
        Span("publish", "publisher-0", end, end + 1, "TRAINING"),
        Span("verify", "publisher-0", end + 0.2, end + 0.6, "TRAINING"),
    ]
    for t in np.linspace(0, end + 1, n_samples):
        timeline.samples.append({"time_s": float(t)} | {k: float(rng.uniform(0, 1e10)) for k in SAMPLE_KEYS})
    return timeline


# ---- parts of a span


def test_parts_stand_behind_the_body_and_last_as_long_together():
    timeline = Timeline()
    clock = iter([1.0, 5.0, 6.0, 7.0])
    timeline.now_s = lambda: next(clock)  # type: ignore[method-assign]
    with timeline.span("read", "reader-0", split="T", batch=3) as moved:
        moved.n_files, moved.n_bytes, moved.parts = 32, 99, {"decode": (1.0, 20), "resample": (2.0, 7)}
    assert sorted(timeline.spans, key=lambda s: s.start_s) == [
        Span("read", "reader-0", 1.0, 2.0, "T", 3, 32, 99),
        Span("decode", "reader-0", 2.0, 3.0, "T", 3, 20),
        Span("resample", "reader-0", 3.0, 5.0, "T", 3, 7),
    ]
    with timeline.span("read", "reader-0") as moved:
        moved.parts = {"decode": (1.5, 1)}  # a clock of its own may say a little more than there was
    assert [(s.stage, s.start_s, s.end_s) for s in timeline.spans[-2:]] == [
        ("decode", 6.0, 7.0),
        ("read", 6.0, 6.0),
    ]


# ---- size


@pytest.mark.parametrize("device", [False, True])
def test_200_000_files_take_less_than_a_megabyte(tmp_path, device):
    timeline = large_run(device=device)
    path = write_timeline(timeline, tmp_path / "t.json")
    assert path.stat().st_size < 1_000_000
    back = read_timeline(path)
    assert len(back.spans) <= MAX_SPANS
    assert back.meta["joined_spans"] == len(timeline.spans) - len(back.spans) > 10_000
    assert back.meta["joined_samples"] == len(timeline.samples) - len(back.samples)
    assert back.samples[0]["rss_bytes"] == pytest.approx(timeline.samples[0]["rss_bytes"])
    assert back.samples[-1]["time_s"] == pytest.approx(timeline.samples[-1]["time_s"], abs=1e-5)


@pytest.mark.parametrize(
    ("device", "near"), [(False, 0.04), (True, 0.02)]
)  # what overlapped by chance is not kept instant by instant
def test_the_stored_timeline_tells_the_same_story(tmp_path, device, near):
    timeline = large_run(device=device, n_samples=10)
    back = read_timeline(write_timeline(timeline, tmp_path / "t.json"))
    wall_s = sum(attribute(timeline).values())
    for stage, seconds in attribute(timeline).items():
        assert attribute(back)[stage] == pytest.approx(seconds, abs=near * wall_s), stage
    for a, b in zip(amdahl_bounds(timeline), amdahl_bounds(back)):
        assert (a.stage, a.gain_s) == (b.stage, pytest.approx(b.gain_s, abs=0.03 * wall_s))
    for old, new in zip(stage_table(timeline), stage_table(back)):
        assert (old.stage, old.n_files, old.n_bytes) == (new.stage, new.n_files, new.n_bytes)
        if old.stage != "publish":
            assert new.total_s == pytest.approx(old.total_s, rel=1e-3)  # the check inside it is cut out


def test_pauses_are_not_counted_as_work():
    spans = [Span("read", "reader-0", i, i + 0.25, "T", i, 1, 10) for i in range(1000)]
    kept = thin(spans, 100)
    assert len(kept) <= 100
    assert covered_s(kept) == pytest.approx(250)


def test_what_lies_inside_of_a_span_is_cut_out_of_it():
    spans = [
        s
        for i in range(0, 400, 2)
        for s in (
            Span("publish", "publisher-0", i, i + 1.5, "T"),
            Span("verify", "publisher-0", i + 0.5, i + 1, "T"),
        )
    ]
    kept = thin(spans, 100)
    assert len(kept) <= 100
    assert covered_s(s for s in kept if s.stage == "verify") == pytest.approx(100)
    assert covered_s(s for s in kept if s.stage == "publish") == pytest.approx(
        200
    )  # without the check inside of it


def test_more_lanes_than_spans_may_be_kept_are_one_slice():
    spans = [Span("read", f"reader-{i}", t, t + 0.5, "T") for t in range(3) for i in range(50)]
    kept = thin(spans, 20)
    assert len(kept) == 50
    assert sum(s.seconds for s in kept) == pytest.approx(75)


def test_samples_are_joined_by_what_they_are():
    made: list[dict[str, Any]] = [
        dict(
            time_s=float(t),
            cpu_percent=None if t < 2 else 10.0 * t,
            rss_bytes=[9, 1, 5, 2, 3][t],
            disk_read_bytes=t,
            gpu_percent=None,
        )
        for t in range(5)
    ]
    first, a, b = thin_samples(made, 3)
    assert first == made[0]
    assert a == dict(
        time_s=2.0,
        cpu_percent=20.0,
        rss_bytes=5,
        disk_read_bytes=2,
        gpu_percent=None,
    )
    assert b == dict(
        time_s=4.0,
        cpu_percent=35.0,
        rss_bytes=3,
        disk_read_bytes=4,
        gpu_percent=None,
    )
    assert thin_samples(made, 5) == made


# ---- schema


@pytest.fixture
def stored(tmp_path) -> Path:
    timeline = Timeline()
    timeline.spans = [
        Span("read", "reader-0", 0.0, 1.0, "T", 0, 32, 100),
        Span("compute", "engine-0", 1.0, 2.0, "T", 0, 32),
    ]
    timeline.gauges = [Gauge("queue.compute", 0.5, 1)]
    timeline.samples = [{"time_s": 0.1, "cpu_percent": None, "cpu_cores_percent": [1, 2], "rss_bytes": 5}]
    return write_timeline(timeline, tmp_path / "t.json")


def test_the_schema_is_documented_whole(stored):
    assert tuple(STAGE_MEANING) == STAGES
    assert list(json.loads(stored.read_text())) == ["schema", "wall_s", "spans", "gauges", "samples", "meta"]


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["spans"].update(start_s=["now", 1.0]),
        lambda b: b["spans"].update(start_s=[float("nan"), 1.0]),
        lambda b: b["spans"].update(stage=["read", "reed"]),
        lambda b: b["spans"].update(n_files=["x", 1]),
        lambda b: b["spans"].update(n_files=[float("inf"), 1]),
        lambda b: b["spans"]["lane"].pop(),
        lambda b: b["spans"].pop("lane"),
        lambda b: b.pop("schema"),
        lambda b: b.pop("meta"),
        lambda b: b.update(samples=["x"]),
        lambda b: b["gauges"].append(["q", 1]),
        lambda b: b["samples"].append({"time_s": None}),
        lambda b: b["samples"].append({"rss_bytes": 1}),
        lambda b: b["samples"].append({"time_s": 1, "rss_bytes": "much"}),
    ],
)
def test_a_damaged_file_is_one_error(stored, change):
    body = json.loads(stored.read_text())
    change(body)
    stored.write_text(json.dumps(body))
    with raises("not-a-timeline", DataError, path=stored):
        read_timeline(stored)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '"schema"', "[" * 100_000, "\udcff"])
def test_a_file_of_something_else_is_one_error(stored, text):
    stored.write_bytes(text.encode("utf-8", "surrogateescape"))
    with raises("not-a-timeline", DataError, path=stored):
        read_timeline(stored)


def test_a_later_schema_is_not_read(stored):
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"schema": 3}))
    with raises("unknown-schema", DataError, path=stored, found=3):
        read_timeline(stored)


def test_files_of_the_schema_before_are_read(stored):
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"schema": 1}))
    assert [s.stage for s in read_timeline(stored).spans] == ["read", "compute"]


# ---- the monitor


class Fake:
    def __init__(self, **values: Any):
        self.__dict__.update(values)


NVML = {
    "nvmlInit": None,
    "nvmlDeviceGetHandleByIndex": "gpu",
    "nvmlDeviceGetUtilizationRates": Fake(gpu=42),
    "nvmlDeviceGetMemoryInfo": Fake(used=7),
    "nvmlDeviceGetPcieThroughput": 3,
}


def with_nvml(monkeypatch, broken: str = "", counter: int | None = None) -> None:
    "An NVML with one GPU, in which one query raises (or, of the PCIe throughput, one counter)."
    nv = types.ModuleType("pynvml")

    def function(name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == broken and counter in (None, args[-1] if args else None):
                raise RuntimeError("Not Supported")
            return NVML[name]

        return call

    for name in NVML:
        setattr(nv, name, function(name))
    nv.NVML_PCIE_UTIL_TX_BYTES, nv.NVML_PCIE_UTIL_RX_BYTES = 0, 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nv)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def missing_values(sampler: Sampler) -> set[str]:
    "What has no value in the second sample: a load has none in the first."
    sampler.take()
    time.sleep(0.1)
    return {key for key, value in sampler.take().items() if value is None}


@pytest.mark.parametrize(
    ("broken", "counter", "lost"),
    [
        ("", None, set()),
        ("nvmlDeviceGetUtilizationRates", None, {"gpu_percent"}),
        ("nvmlDeviceGetMemoryInfo", None, {"vram_bytes"}),
        ("nvmlDeviceGetPcieThroughput", 1, {"pcie_rx_bytes_per_s"}),
        ("nvmlDeviceGetPcieThroughput", 0, {"pcie_tx_bytes_per_s"}),
    ],
)
def test_a_query_of_nvml_that_raises_costs_its_own_figure(monkeypatch, broken, counter, lost):
    with_nvml(monkeypatch, broken, counter)
    sampler = Sampler()
    assert missing_values(sampler) == lost
    assert set(sampler.missing) == lost


@pytest.mark.parametrize(
    ("owner", "broken", "lost"),
    [
        (psutil, "cpu_times", {"cpu_total_percent"}),
        (psutil, "virtual_memory", {"ram_used_bytes"}),
        (psutil.Process, "memory_info", {"rss_bytes"}),
        (psutil.Process, "io_counters", {"disk_read_bytes", "disk_written_bytes"}),
        (psutil, "Process", {"rss_bytes", "disk_read_bytes", "disk_written_bytes"}),
    ],
)
def test_a_query_of_psutil_that_raises_costs_its_own_figures(monkeypatch, owner, broken, lost):
    def refuse(*args: Any, **options: Any) -> Any:
        raise PermissionError("denied")

    with_nvml(monkeypatch)
    monkeypatch.setattr(owner, broken, refuse, raising=False)
    sampler = Sampler()
    assert missing_values(sampler) == lost
    assert set(sampler.missing) == lost
    assert all("denied" in why for why in sampler.missing.values())


def monitor_cost(n_samples: int, interval_s: float = 0.1) -> float:
    "Processor seconds per second that sampling takes."
    sampler = Sampler()
    sampler.take()
    before = time.thread_time()
    for _ in range(n_samples):
        time.sleep(interval_s)
        sampler.take()
    return (time.thread_time() - before) / (n_samples * interval_s)


def test_the_monitor_takes_less_than_a_hundredth_of_a_core():
    "Processor time, so who else is at work hardly matters; the best of some tries, since caches are shared too."
    assert min(monitor_cost(5) for _ in range(5)) < 0.01


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_spans_are_nvtx_ranges_where_torch_uses_a_gpu(
    monkeypatch: pytest.MonkeyPatch, uses_gpu: bool
) -> None:
    "Also where the body fails; no package is imported for it."
    told = list[str]()
    nvtx = types.SimpleNamespace(range_push=told.append, range_pop=lambda: told.append("end"))
    cuda = types.SimpleNamespace(is_initialized=lambda: uses_gpu, nvtx=nvtx)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "nvtx", None)
    timeline = Timeline()
    with timeline.span("read", "reader-0", split="TRAINING", batch=3):
        pass
    with pytest.raises(OSError, match="full"), timeline.span("sync", "main"):
        raise OSError("disk full")
    assert told == (["read TRAINING 3", "end", "sync", "end"] if uses_gpu else [])
    assert [s.stage for s in timeline.spans] == ["read", "sync"]


@pytest.mark.parametrize(
    "torch", [None, types.SimpleNamespace(), types.SimpleNamespace(cuda=types.SimpleNamespace())]
)
def test_a_torch_that_is_still_being_imported_marks_nothing(
    monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    with nvtx_range("step"):
        pass
