"A timeline file is small, follows its schema and survives a round trip; the monitor's queries fail separately and are cheap."

import json
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from each import each
from errors import raises

from leakmel.core.errors import DataError
from leakmel.core.monitor import SAMPLE_KEYS, Sampler
from leakmel.core.timeline import (
    MAX_SAMPLES,
    STAGE_MEANING,
    STAGES,
    Gauge,
    Span,
    Timeline,
    nvtx_range,
    read_timeline,
    write_timeline,
)

# ---- parts of a span


def test_parts_follow_the_body_and_add_up():
    timeline = Timeline()
    clock = iter([1.0, 5.0, 6.0, 7.0])
    timeline.now_s = lambda: next(clock)  # type: ignore[method-assign]
    with timeline.span("read", "reader-0", split="T", batch=3) as moved:
        moved.n_files, moved.n_bytes, moved.parts = 32, 99, {"decode": (1.0, 20, 0), "resample": (2.0, 7, 5)}
    assert sorted(timeline.spans, key=lambda s: s.start_s) == [
        Span("read", "reader-0", 1.0, 2.0, "T", 3, 32, 99),
        Span("decode", "reader-0", 2.0, 3.0, "T", 3, 20),
        Span("resample", "reader-0", 3.0, 5.0, "T", 3, 7, 5),
    ]
    with timeline.span("read", "reader-0") as moved:
        moved.parts = {"decode": (1.5, 1, 0)}  # a clock of its own may say a little more than there was
    assert [(s.stage, s.start_s, s.end_s) for s in timeline.spans[-2:]] == [
        ("decode", 6.0, 7.0),
        ("read", 6.0, 6.0),
    ]


# ---- size


@pytest.mark.slow
def test_all_spans_are_stored_and_samples_are_limited(tmp_path):
    timeline = Timeline()
    timeline.spans = [
        Span("read", f"reader-{i % 4}", i / 8, i / 8 + 0.1, "T", i, 32, 99) for i in range(20_000)
    ]
    timeline.gauges = [Gauge("queue.compute", i / 8, i % 7) for i in range(20_000)]
    timeline.samples = [{"time_s": i / 8} | dict.fromkeys(SAMPLE_KEYS, float(i)) for i in range(25_000)]
    back = read_timeline(write_timeline(timeline, tmp_path / "t.json"))
    assert (back.spans, back.gauges) == (timeline.spans, timeline.gauges)
    assert len(back.samples) <= MAX_SAMPLES
    assert back.meta["joined_samples"] == len(timeline.samples) - len(back.samples)
    assert back.samples == timeline.samples[::3]


# ---- schema


@pytest.fixture
def stored(tmp_path) -> Path:
    timeline = Timeline()
    timeline.spans = [
        Span("read", "reader-0", 0.0, 1.0, "T", 0, 32, 100),
        Span("compute", "engine-0", 1.0, 2.0, "T", 0, 32),
    ]
    timeline.gauges = [Gauge("queue.compute", 0.5, 1)]
    timeline.samples = [{"time_s": 0.1, "cpu_percent": None, "rss_bytes": 5}]
    return write_timeline(timeline, tmp_path / "t.json")


def test_the_schema_is_documented_whole(stored):
    assert tuple(STAGE_MEANING) == STAGES
    assert list(json.loads(stored.read_text())) == ["schema", "wall_s", "spans", "gauges", "samples", "meta"]


@each(
    "change",
    [
        lambda b: b["spans"].update(stage=["read", "reed"]),
        lambda b: b["spans"]["lane"].pop(),
        lambda b: b["spans"].pop("lane"),
        lambda b: b.pop("schema"),
        lambda b: b.pop("meta"),
        lambda b: b["gauges"].append(["q", 1]),
    ],
)
def test_a_damaged_file_is_one_error(stored, change):
    body = json.loads(stored.read_text())
    change(body)
    stored.write_text(json.dumps(body))
    with raises("not-a-timeline", DataError, path=stored):
        read_timeline(stored)


@each("text", ["", "{", "[]", "7", "null", '"schema"', "[" * 100_000, "\udcff"])
def test_a_file_of_something_else_is_one_error(stored, text):
    stored.write_bytes(text.encode("utf-8", "surrogateescape"))
    with raises("not-a-timeline", DataError, path=stored):
        read_timeline(stored)


@pytest.mark.parametrize("schema", [1, 3])
def test_another_schema_is_not_read(stored, schema):
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"schema": schema}))
    with raises("unknown-schema", DataError, path=stored, found=schema):
        read_timeline(stored)


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


@each(
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


PSUTIL_KEYS = {"cpu_total_percent", "ram_used_bytes", "rss_bytes", "disk_read_bytes", "disk_written_bytes"}


@each(
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
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert missing_values(Sampler()) == PSUTIL_KEYS


def monitor_cost(n_samples: int, interval_s: float = 0.1) -> float:
    "Processor seconds per second that sampling takes."
    sampler = Sampler()
    sampler.take()
    before = time.thread_time()
    for _ in range(n_samples):
        time.sleep(interval_s)
        sampler.take()
    return (time.thread_time() - before) / (n_samples * interval_s)


@pytest.mark.slow
def test_the_monitor_takes_less_than_a_hundredth_of_a_core():
    "Processor time, so who else is at work hardly matters; the best of some tries, since caches are shared too."
    assert min(monitor_cost(5) for _ in range(5)) < 0.01


@pytest.mark.parametrize("uses_gpu", [True, False])
def test_spans_are_nvtx_ranges_where_torch_uses_a_gpu(
    monkeypatch: pytest.MonkeyPatch, uses_gpu: bool
) -> None:
    "Also where the body fails; no package is imported for it."
    told = list[str]()

    @contextmanager
    def told_range(text: str, *values: str) -> Iterator[None]:  # as torch.cuda.nvtx.range
        told.append(text.format(*values))
        try:
            yield
        finally:
            told.append("end")

    nvtx = types.SimpleNamespace(range=told_range)
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


@each("torch", [None, types.SimpleNamespace(), types.SimpleNamespace(cuda=types.SimpleNamespace())])
def test_partially_imported_torch_gives_no_nvtx_range(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    with nvtx_range("step"):
        pass
