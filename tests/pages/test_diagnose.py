"The limiting stage is named correctly on synthetic timelines and in real builds, its bound holds, and advice fits the machine."

import heapq
import inspect
import json
import os
import random
import time
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import soundfile
from each import each

import leakmel as lm
from leakmel.core.errors import UsageError
from leakmel.core.operation import Run, make
from leakmel.core.timeline import (
    BOTTLENECK_SHARE,
    MAX_SUGGESTIONS,
    META,
    MIN_ANALYSED_S,
    STAGES,
    Analysis,
    Evidence,
    Gauge,
    Span,
    Timeline,
    amdahl_bounds,
    analyse,
    analyse_run,
    analysis_text,
    attribute,
    interval_s,
    is_short_run,
    read_timeline,
    stage_table,
    write_timeline,
)
from leakmel.dataset.config import PipelineConfig
from leakmel.dataset.loader import BatchReader
from leakmel.dataset.writer import RowFile
from leakmel.mel.engines import ReferenceEngine
from leakmel.mel.torch_engine import TorchChain
from leakmel.operations.data import Build
from leakmel.recordings import conform

GPU: dict[str, Any] = {
    "device": "cuda:0",
    "machine": {"n_cores": 8},
    "workers": {
        "read_workers": 8,
        "compute_workers": 1,
        "write_workers": 2,
        "files_per_batch": 512,
        "slots": 12,
    },
}
CPU: dict[str, Any] = {
    "device": "cpu",
    "machine": {"n_cores": 4},
    "workers": {
        "read_workers": 0,
        "compute_workers": 4,
        "write_workers": 0,
        "files_per_batch": 32,
        "slots": 4,
    },
}
FEATURES = {f.name for f in fields(lm.MelSpec)} | {"spec", "preset", "with_waveforms", "compression"}
GPU_SETTINGS = ("async_copies", "gpu_streams", "cuda_graph", "batch_accumulation", "warmup_slots", "device")


def made(meta: dict[str, Any], *spans: Span, **workers: Any) -> Timeline:
    timeline = Timeline()
    timeline.spans, timeline.meta = list(spans), meta | {"workers": meta["workers"] | workers}
    return timeline


def periodic_spans(
    stage: str, lane: str, n: int, busy_s: float, every_s: float, start_s: float = 0.0, **more: Any
) -> list[Span]:
    "n spans of a lane, one in every period."
    return [
        Span(stage, lane, start_s + i * every_s, start_s + i * every_s + busy_s, "T", i, **more)
        for i in range(n)
    ]


def summary_of(**more: Any) -> dict[str, Any]:
    settings = {f.name: f.default for f in fields(PipelineConfig)}
    given = {k: more.pop(k) for k in list(more) if k in settings}
    return {"pipeline": settings | given, "verified": {"checked": 64}} | more


def names(found: Analysis) -> list[str]:
    return [s.parameter for s in found.suggestions]


# ---- the bound


def pipeline(
    times: list[tuple[float, ...]], n_readers: int, n_engines: int, n_slots: int, head_s: float, tail_s: float
) -> tuple[Timeline, float]:
    "The schedule of a ring: readers, engines, one writer, and slots that come back when they are written."
    free, readers, engines = (
        [head_s] * n_slots,
        [(head_s, i) for i in range(n_readers)],
        [(head_s, i) for i in range(n_engines)],
    )
    timeline, writer, end = Timeline(), head_s, head_s
    if head_s:
        timeline.spans.append(Span("start_up", "main", 0.0, head_s))

    def add(stage: str, lane: str, start: float, seconds: float, batch: int) -> float:
        timeline.spans.append(Span(stage, lane, start, start + seconds, "T", batch))
        return start + seconds

    for k, (read, compute, write) in enumerate(times):
        at, i = heapq.heappop(readers)
        done = add("read", f"reader-{i}", max(at, heapq.heappop(free)), read, k)
        heapq.heappush(readers, (done, i))
        at, i = heapq.heappop(engines)
        done = add("compute", f"engine-{i}", max(at, done), compute, k)
        heapq.heappush(engines, (done, i))
        writer = add("write", "writer-0", max(writer, done), write, k)
        heapq.heappush(free, writer)
        end = max(end, writer)
    if tail_s:
        end = add("publish", "publisher-0", end, tail_s, -1)
    return timeline, end


@pytest.mark.slow
@each("seed", range(10))
def test_no_change_of_a_stage_saves_more_than_its_bound(seed):
    "The same pipeline is run again with a stage that takes no time."
    rng = random.Random(seed)
    for _ in range(30):
        scale = [rng.choice([0.1, 0.3, 1, 3]) for _ in range(3)]
        times = [tuple(s * rng.uniform(0.5, 1.5) for s in scale) for _ in range(rng.randint(2, 30))]
        shape = (
            rng.randint(1, 4),
            rng.randint(1, 2),
            rng.randint(1, 6),
            rng.choice([0, 1, 5]),
            rng.choice([0, 1, 5]),
        )
        timeline, wall_s = pipeline(times, *shape)
        gains = amdahl_bounds(timeline)
        for i, stage in enumerate(("read", "compute", "write")):
            saved = (
                wall_s
                - pipeline([tuple(0 if j == i else t for j, t in enumerate(x)) for x in times], *shape)[1]
            )
            assert saved <= gains[stage] + 1e-6, (stage, shape)


def test_the_largest_share_need_not_be_the_limit():
    "Eight readers that rest most of the time, an engine that never does: quicker reading would give nothing."
    spans = [s for i in range(8) for s in periodic_spans("read", f"reader-{i}", 10, 0.5, 1.0)]
    timeline = made(GPU, Span("compute", "cuda:0", 0, 10, "T"), *spans)
    shares = attribute(timeline)
    assert shares["read"] > 4
    found = amdahl_bounds(timeline)
    assert next(iter(found.items())) == ("compute", pytest.approx(5.0))
    assert found["read"] == 0


def test_copies_and_computing_of_a_device_overlap():
    "They have one lane; each is a stream of its own."
    spans = [
        s
        for i in range(10)
        for s in (
            Span("copy_in", "cuda:0", i, i + 1, "T", i),
            Span("compute", "cuda:0", i + 0.5, i + 1.5, "T", i),
        )
    ]
    timeline = made(GPU, *spans)
    assert attribute(timeline) == pytest.approx(
        {"copy_in": 0.5 + 9.5 / 2, "compute": 0.5 + 9.5 / 2, "wait": 0}
    )
    assert max(amdahl_bounds(timeline).values()) == pytest.approx(0.5)  # each hides the other


@each("stage", [s for s in STAGES if s != "wait"])
def test_every_stage_can_be_the_limit(stage):
    lane = {"start_up": "main", "publish": "publisher-0", "verify": "publisher-0"}.get(stage, "worker-0")
    others = (
        [Span("read", "worker-0", 9, 9.5, "T"), Span("write", "worker-0", 9.5, 10, "T")]
        if stage not in ("publish", "verify")
        else []
    )
    timeline = made(
        CPU,
        Span(stage, lane, 0, 9, "" if stage == "start_up" else "T"),
        *others,
        Span("publish", "publisher-0", 10, 10.1, "T"),
    )
    if stage == "verify":
        timeline.spans.insert(0, Span("publish", lane, -0.1, 0, "T"))
    found = analyse(timeline)
    assert found.limiting == stage
    assert any(line.startswith(f"{stage.upper().replace('_', ' ')} BOTTLENECK: ") for line in found.findings)
    assert sum(found.shares.values()) == pytest.approx(found.wall_s)
    assert f"The limiting stage is {stage}:" in str(found)


def test_a_wait_is_exposed_if_no_lane_is_busy():
    timeline = made(
        CPU,
        Span("read", "worker-0", 0, 1, "A"),
        Span("read", "worker-1", 1, 2, "B"),
        Span("read", "worker-0", 5, 6, "A"),
    )
    assert amdahl_bounds(timeline, "A")["wait"] == amdahl_bounds(timeline)["wait"] == 3
    assert attribute(timeline, "A")["wait"] == 4
    found = analyse(timeline, "A")
    assert (found.limiting, found.bounds["wait"]) == ("wait", 3)
    assert "Exposed wait: no lane was busy for 3.00 s (50 %)." in str(found)


# ---- two splits, of which one is checked while the other is read


def two_splits() -> Timeline:
    return made(
        CPU,
        Span("start_up", "main", 0, 1),
        Span("read", "worker-0", 1, 4, "A"),
        Span("read", "worker-0", 5, 7.5, "B"),
        Span("publish", "publisher-0", 7, 8, "A"),
        Span("verify", "publisher-0", 8, 9, "A"),
        Span("publish", "publisher-1", 8, 8.5, "B"),
        Span("verify", "publisher-1", 8.5, 9, "B"),
    )


def test_time_is_shared_by_the_lanes_that_are_busy():
    timeline = two_splits()
    shares = attribute(timeline)
    assert shares == pytest.approx(
        {"start_up": 1, "read": 3 + 2 + 0.25, "publish": 0.25 + 0.5 + 0.25, "verify": 0.25 + 0.5, "wait": 1}
    )
    assert sum(shares.values()) == pytest.approx(9)
    assert interval_s(timeline, "B") == (5, 9)
    assert attribute(timeline, "B") == pytest.approx(
        {"read": 2.5, "publish": 0.5, "verify": 0.5, "wait": 0.5}
    )
    assert analyse(timeline, "B").limiting == "read"


# ---- made timelines with a known answer


def disk_bound(n_readers: int = 2) -> Timeline:
    spans = [
        s
        for i in range(n_readers)
        for s in periodic_spans("read", f"reader-{i}", 10, 1.0, 1.0, n_files=500, n_bytes=40_000_000)
    ]
    timeline = made(
        GPU,
        *spans,
        *periodic_spans("compute", "cuda:0", 10, 0.05, 1.0, 1.0),
        *periodic_spans("write", "writer-0", 10, 0.02, 1.0, 1.1),
        read_workers=n_readers,
    )
    timeline.gauges = [Gauge("queue.compute", 0.0, 0)]
    return timeline


def test_disk_bound():
    cold = summary_of(
        cache="cold",
        bytes_from_device=800_000_000,
        bytes_asked=800_000_000,
        read_ahead_files=0,
        read_workers=2,
    )
    found = analyse(disk_bound(), summary=cold)
    assert found.limiting == "read"
    assert found.findings[0].startswith("READ BOTTLENECK: ")
    assert found.findings[1].startswith(
        "LOW QUEUE DEPTH: 0.00 batches waited for the engine on average (threshold 1), and the engine was idle for 8.55 of 9.05 s"
    )
    assert names(found) == ["read_workers", "read_ahead"]
    assert (found.suggestions[0].present, found.suggestions[0].new) == (2, 4)
    assert "on 8 cores" in found.suggestions[0].evidence
    assert found.suggestions[0].at_most_s == pytest.approx(found.bounds["read"] / 2)
    assert "GPU load of 5 %: computing took " in str(found)


def test_low_gpu_use_is_right_where_the_disk_gives_no_more():
    cold = summary_of(
        cache="cold",
        bytes_from_device=6_400_000_000,
        bytes_asked=6_400_000_000,
        read_ahead_files=80_000,
        read_workers=16,
        read_ahead=1024,
    )
    found = analyse(disk_bound(16), summary=cold)
    assert (found.limiting, found.suggestions) == ("read", ())
    assert found.findings[-1].startswith(
        "GPU load of 5 %: computing took 0.50 of 10.12 s. The limiting stage is read; an infinitely fast GPU would save at most "
    )
    assert found.advice == ["Nothing to change: the measurements show no setting that would shorten read."]


def cpu_bound(n_workers: int) -> Timeline:
    spans = [
        s
        for i in range(n_workers)
        for s in (
            *periodic_spans("read", f"worker-{i}", 10, 0.2, 1.0),
            *periodic_spans("compute", f"worker-{i}", 10, 0.7, 1.0, 0.2),
            *periodic_spans("write", f"worker-{i}", 10, 0.1, 1.0, 0.9),
        )
    ]
    return made(CPU, *spans, compute_workers=n_workers)


def test_cpu_bound():
    found = analyse(cpu_bound(2))
    assert (found.limiting, found.bounds["compute"]) == ("compute", pytest.approx(7))
    assert [(s.parameter, s.present, s.new, s.at_most_s) for s in found.suggestions] == [
        ("compute_workers", 2, 4, pytest.approx(3.5))
    ]
    assert "The limit is compute (7.00 of 10.00 s), on 4 cores." in found.suggestions[0].evidence
    assert "GPU load" not in str(found)


def test_cpu_bound_with_all_cores_at_work_has_nothing_to_change():
    found = analyse(cpu_bound(4))
    assert (found.limiting, found.suggestions) == ("compute", ())
    assert found.advice[0].endswith("no setting that would shorten compute.")


def test_no_more_threads_where_the_cores_are_busy():
    timeline = cpu_bound(2)
    timeline.samples = [{"time_s": float(t), "cpu_percent": 395.0, "gpu_percent": 1.0} for t in range(10)]
    assert analyse(timeline).suggestions == ()
    assert "GPU load" not in str(analyse(timeline))
    (fewer,) = analyse(cpu_bound(6)).suggestions
    assert (fewer.parameter, fewer.present, fewer.new) == ("compute_workers", 6, 4)


def bus_bound() -> Timeline:
    return made(
        GPU,
        *periodic_spans("copy_in", "cuda:0", 10, 0.9, 1.0, n_files=512, n_bytes=41_000_000),
        *periodic_spans("compute", "cuda:0", 10, 0.1, 1.0, 0.9),
        *periodic_spans("read", "reader-0", 10, 0.2, 1.0),
    )


def test_bus_bound():
    found = analyse(bus_bound(), summary=summary_of())
    assert (found.limiting, found.suggestions) == ("copy_in", ())
    assert "GPU load of 10 %" in str(found)


def test_write_bound():
    spans = [
        *periodic_spans("write", "writer-0", 10, 0.95, 1.0, 0.05),
        *periodic_spans("read", "reader-0", 10, 0.1, 1.0),
        *periodic_spans("compute", "cuda:0", 10, 0.05, 1.0, 0.1),
    ]
    found = analyse(
        made(GPU, *spans, write_workers=1),
        summary=summary_of(write_workers=1, with_waveforms=True, file_bytes=5_000_000_000),
    )
    assert found.limiting == "write"
    assert [(s.parameter, s.present, s.new) for s in found.suggestions] == [("write_workers", 1, 2)]


def test_start_up_bound():
    found = analyse(
        made(
            GPU,
            Span("start_up", "imports", 0, 3),
            Span("start_up", "main", 3, 8),
            *periodic_spans("read", "reader-0", 10, 0.1, 0.1, 8.0),
            *periodic_spans("compute", "cuda:0", 10, 0.02, 0.1, 8.1),
        ),
        summary=summary_of(),
    )
    assert (found.limiting, found.bounds["start_up"]) == ("start_up", pytest.approx(8))
    assert any(line.startswith("START UP BOTTLENECK: ") for line in found.findings)
    assert found.suggestions == ()
    assert found.advice[0].endswith("no setting that would shorten start_up.")


def out_of_memory_step() -> Timeline:
    "One slot: reading and computing take turns."
    spans = [
        *periodic_spans("read", "reader-0", 10, 0.5, 1.0),
        *periodic_spans("compute", "cuda:0", 10, 0.5, 1.0, 0.5),
    ]
    timeline = made(GPU, *spans, slots=1, read_workers=1, files_per_batch=64)
    timeline.gauges = [
        g for i in range(10) for g in (Gauge("queue.compute", i + 0.5, 1), Gauge("queue.compute", i + 0.5, 0))
    ]
    return timeline


def test_starved_queue():
    found = analyse(out_of_memory_step())
    (line,) = [line for line in found.findings if line.startswith("LOW QUEUE DEPTH")]
    assert "0.00 batches" in line
    assert (found.suggestions[0].parameter, found.suggestions[0].present, found.suggestions[0].new) == (
        "slots",
        1,
        3,
    )
    e = Evidence(out_of_memory_step(), None, {})
    assert (e.idle_s, e.engine_s) == (pytest.approx(4.5), pytest.approx(9.5))
    assert "readers were busy for 53 %" in found.suggestions[0].evidence


def test_a_full_queue_is_not_low():
    timeline = out_of_memory_step()
    timeline.gauges = [Gauge("queue.compute", 0, 2)]
    assert not [line for line in analyse(timeline).findings if line.startswith("LOW QUEUE")]


def mixed_rates(stage: str, n_readers: int = 2, n_resampled: int = 64) -> Timeline:
    "Readers that decode or resample most of the time."
    decoded = 0.3 if stage == "resample" else 0.9
    lanes = [
        s
        for i in range(n_readers)
        for k in range(10)
        for s in (
            Span("read", f"reader-{i}", k, k + 0.1, "T", k, 64, 5_000_000),
            Span("decode", f"reader-{i}", k + 0.1, k + decoded, "T", k, 64),
            Span("resample", f"reader-{i}", k + decoded, k + 1, "T", k, n_resampled),
        )
    ]
    meta = GPU | {
        "mode": "stream",
        "settings": asdict(PipelineConfig()),
        "spec": lm.MelSpec.preset("disjoint").to_dict(),
        "check": 64,
        "with_waveforms": False,
    }
    return made(
        meta, *lanes, *periodic_spans("compute", "cuda:0", 10, 0.05, 1.0, 1.0), read_workers=n_readers
    )


def test_resampling_and_decoding_are_limits_of_their_own(tmp_path):
    "Without a summary, and the same from the stored file."
    for timeline in (
        mixed_rates("resample"),
        read_timeline(write_timeline(mixed_rates("resample"), tmp_path / "t.json")),
    ):
        found = analyse(timeline)
        assert found.findings[0].startswith("RESAMPLE BOTTLENECK: ")
        assert sum(found.shares.values()) == pytest.approx(found.wall_s)
        assert [(s.parameter, s.present, s.new) for s in found.suggestions] == [
            ("read_workers", 2, 8),
            ("mode", "stream", "memmap"),
        ]
        assert "a cache file stores the engine" in found.suggestions[1].evidence
    assert names(analyse(mixed_rates("resample", n_resampled=60))) == [
        "read_workers",
        "mode",
    ]  # some have the data set's rate
    found = analyse(mixed_rates("decode", 8))
    assert found.findings[0].startswith("DECODE BOTTLENECK: ")
    assert names(found) == ["mode"]
    held = mixed_rates("decode", 8)
    held.meta["mode"] = "memmap"
    assert analyse(held).advice[0].startswith("Nothing to change: ")


def test_copying_from_memory_is_no_fault_of_the_bus():
    spans = [
        *periodic_spans("stage", "reader-0", 10, 0.9, 1.0, n_files=512),
        *periodic_spans("copy_in", "cuda:0", 10, 0.1, 1.0, 0.9),
        *periodic_spans("compute", "cuda:0", 10, 0.1, 1.0, 1.0),
    ]
    found = analyse(made(GPU, *spans, read_workers=1), summary=summary_of(read_workers=1))
    assert found.findings[0].startswith("STAGE BOTTLENECK: ")
    assert names(found) == ["read_workers"]


def test_publishing_and_checking():
    after = [Span("read", "worker-0", 0, 1, "T"), Span("publish", "publisher-0", 1, 5, "T")]
    assert analyse(made(CPU, *after), summary=summary_of()).findings[0].startswith("PUBLISH BOTTLENECK")
    found = analyse(made(CPU, *after, Span("sync", "publisher-0", 5, 15, "T")), summary=summary_of())
    assert found.findings == (
        "SYNC BOTTLENECK: 10.00 of 15.00 s (67 %) would be saved without it (threshold 25 %).",
    )
    assert found.suggestions == ()


def test_a_balanced_run_has_nothing_to_change():
    spans = [
        Span(stage, f"worker-{i}", k, k + 1, "T")
        for i in range(4)
        for k, stage in enumerate(s for s in STAGES if s not in ("wait", "start_up"))
    ]
    found = analyse(made(CPU, *spans))
    assert max(found.bounds.values()) < BOTTLENECK_SHARE * found.wall_s
    assert (found.findings, found.suggestions) == ((), ())
    assert found.advice[0].startswith("Nothing to change: no stage reaches the threshold of 25 %")


# ---- what is never said


@pytest.mark.slow
def test_advice_fits_the_machine():
    "Whatever limits: at most three, real settings, values that are taken, no more computing threads than cores, nothing of a GPU on a CPU."
    arguments, settings = inspect.signature(lm.build).parameters, {f.name for f in fields(PipelineConfig)}
    seen, spec = set(), lm.MelSpec.preset("overlap").to_dict()
    for meta in (CPU, GPU):
        for stage in STAGES:
            for cache in ("cold", "warm"):
                for n in (1, 2, 64):
                    apart = 0 if meta is CPU else n
                    workers = {
                        "compute_workers": n,
                        "slots": n,
                        "read_workers": apart,
                        "write_workers": apart,
                        "files_per_batch": 8,
                    }
                    lane = {
                        "copy_in": "cuda:0",
                        "compute": "cuda:0",
                        "copy_out": "cuda:0",
                        "read": "reader-0",
                        "write": "writer-0",
                    }.get(stage, "main")
                    timeline = made(
                        meta,
                        *periodic_spans(
                            stage,
                            lane if meta is GPU else "worker-0",
                            250,
                            0.016,
                            0.016,
                            n_files=32,
                            n_bytes=320_000,
                        ),
                        **workers,
                    )
                    timeline.gauges = [Gauge("queue.compute", 0, 0)]
                    body = summary_of(
                        cache=cache,
                        bytes_from_device=10**9,
                        bytes_asked=10**9,
                        with_waveforms=True,
                        engine="reference@1/cpu" if n == 1 else "torch@2/x",
                        compression="gzip",
                        spec=spec,
                        verified={"checked": 1000},
                        file_bytes=10**9,
                        async_copies=n == 2,
                        gpu_streams=1,
                        cuda_graph=False,
                        **{k: v for k, v in workers.items() if v},
                    )
                    found = analyse(timeline, summary=body)
                    assert len(found.suggestions) <= MAX_SUGGESTIONS
                    assert len(set(names(found))) == len(found.suggestions)
                    assert found.advice[0].startswith("Nothing to change: ") is not bool(found.suggestions)
                    for s in found.suggestions:
                        seen.add(s.parameter)
                        assert s.parameter not in FEATURES, "features decide the content of a data set"
                        assert s.present != s.new
                        assert s.evidence[0].isupper() or s.evidence[0].isdigit()
                        assert any(c.isdigit() for c in s.evidence)
                        if s.parameter in settings:
                            PipelineConfig(**{s.parameter: s.new})
                        else:
                            assert s.parameter in arguments
                        if s.parameter == "compute_workers":
                            assert s.new <= meta["machine"]["n_cores"]
                        if meta is CPU:
                            assert s.parameter not in GPU_SETTINGS
                        assert 0 <= s.at_most_s <= found.wall_s
    assert seen >= {"compute_workers", "read_workers", "write_workers", "read_ahead", "check"}


@each("timeline", [Timeline(), made(CPU), made(GPU, Span("read", "reader-0", 1, 1, "T"))])
def test_analysis_of_an_almost_empty_timeline(timeline):
    text = analysis_text(timeline)
    assert text.startswith("PERFORMANCE ANALYSIS")
    assert "BOTTLENECK" not in text
    assert json.dumps([asdict(a) for a in analyse_run(timeline)])


def shorter(timeline: Timeline, factor: float) -> Timeline:
    "The same run on a machine that is so many times as fast."
    timeline.spans = [replace(s, start_s=s.start_s / factor, end_s=s.end_s / factor) for s in timeline.spans]
    timeline.gauges = [replace(g, time_s=g.time_s / factor) for g in timeline.gauges]
    return timeline


@each(
    "make",
    [
        lambda: disk_bound(),
        lambda: cpu_bound(2),
        lambda: out_of_memory_step(),
        lambda: bus_bound(),
        lambda: two_splits(),
    ],
)
def test_a_run_of_milliseconds_is_not_analysed(make):
    "A run of 10 s in which every figure means something, and the same in some milliseconds."
    told = analyse(make(), summary=summary_of())
    assert told.limiting is not None
    for found in analyse_run(shorter(make(), 1000), [summary_of()]):
        assert 0 < found.wall_s < MIN_ANALYSED_S
        assert (found.limiting, found.findings, found.suggestions) == (None, (), ())
        assert str(found).splitlines()[1:] == [
            f"  The run of {found.wall_s:.3f} s is too short for an analysis: it needs at least 0.1 s."
        ]
    assert stage_table(shorter(make(), 1000)).startswith("stage ")
    as_long = shorter(shorter(make(), 1000), 0.001)
    assert str(analyse(as_long, summary=summary_of())) == str(told)


def test_idle_time_of_an_engine_of_milliseconds_is_not_reported():
    timeline = shorter(out_of_memory_step(), 1000)
    timeline.spans.append(Span("publish", "publisher-0", 0.01, 3, "T"))
    assert Evidence(timeline, None, {}).engine_s < MIN_ANALYSED_S
    found = analyse(timeline)
    assert [line.split(":")[0] for line in found.findings] == ["PUBLISH BOTTLENECK", "GPU load of 0 %"]
    assert "idle" not in str(found)
    assert "slots" not in names(found)


def test_the_run_and_each_split_are_analysed():
    timeline = two_splits()
    found = analyse_run(timeline, [summary_of(span_name="B", with_waveforms=True)])
    assert [a.title for a in found] == ["the whole run", "A", "B"]
    text = analysis_text(timeline)
    assert text.count("PERFORMANCE ANALYSIS") == 3
    assert text.count("exclusive time: ") == 3


# ---- how much of it is printed


def longer(timeline: Timeline, factor: float) -> Timeline:
    "The same run, so many times as long."
    return shorter(timeline, 1 / factor)


def test_a_build_of_less_than_ten_seconds_gets_three_lines():
    summaries = [summary_of(found=800, kept_files=0, read_workers=2)]
    timeline = shorter(disk_bound(), 10)
    timeline.spans.append(Span("start_up", "imports", 0.0, 0.05, ""))
    assert is_short_run(timeline)
    text = analysis_text(timeline, summaries, width=300, analysis="auto")
    lines = text.splitlines()
    assert len(lines) == 3
    assert [line.split(":")[0] for line in lines] == [
        "Performance",
        "The limiting stage is read",
        "read_workers",
    ]
    assert "(800 files)" in lines[0]
    assert lines[0].endswith('analysis="full"')
    full = analysis_text(timeline, summaries, analysis="full")
    assert full.count("PERFORMANCE ANALYSIS") == 1  # the run is its only split
    assert analysis_text(timeline, summaries) == full
    assert analysis_text(timeline, summaries, analysis="none") == ""
    long = longer(disk_bound(), 2)
    assert not is_short_run(long)
    assert analysis_text(long, summaries, analysis="auto") == analysis_text(long, summaries)


def test_import_time_does_not_count_for_the_ten_seconds():
    timeline = made(CPU, Span("start_up", "imports", 0, 9), Span("read", "worker-0", 9, 12, "T"))
    assert is_short_run(timeline)
    assert analysis_text(timeline, analysis="auto").startswith("Performance: 3.00 s.")


def test_a_short_analysis_without_a_suggestion_or_without_time():
    even = made(CPU, *(Span(s, f"{s}-0", 0, 4, "T") for s in ("read", "compute", "write")))
    assert analysis_text(even, width=300, analysis="auto").splitlines()[-1].startswith("Nothing to change: ")
    brief = analysis_text(shorter(disk_bound(), 1000), analysis="auto").splitlines()
    assert len(brief) == 2
    assert "is too short for an analysis" in brief[1]
    assert analysis_text(Timeline(), analysis="auto").splitlines()[1:] == ["No span was recorded."]


def test_an_unknown_analysis_is_an_error():
    with pytest.raises(UsageError) as caught:
        make(Build, {"analysis": "much"}).plan(Run(keeps=True))
    assert caught.value.code == "out-of-range"


# ---- real builds with a slow part


LANES = {"read_workers": 2, "write_workers": 1, "compute_workers": 1}
CASES = [
    ("read", BatchReader, "fill", "reference"),
    ("compute", ReferenceEngine, "run", "reference"),
    ("write", RowFile, "write", "reference"),
]
ON_DEVICE = [
    ("read", BatchReader, "fill", "torch"),
    ("compute", TorchChain, "features", "torch"),
    ("write", RowFile, "write", "torch"),
]


# Each stage once, each kind of workers at least once.
OFTEN = ("read-workers", "compute-workers", "write-lanes", "read-device", "compute-device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "owner", "name", "engine", "shape"),
    [
        pytest.param(
            *case,
            shape,
            id=f"{case[0]}-{kind}",
            marks=[] if f"{case[0]}-{kind}" in OFTEN else pytest.mark.long,
        )
        for cases, kinds in (
            (CASES, {"workers": {}, "lanes": LANES}),
            (ON_DEVICE, {"device": {"device": "fake"}}),
        )
        for case in cases
        for kind, shape in kinds.items()
    ],
)
def test_a_slow_part_of_a_real_build_is_named(demo, tmp_path, monkeypatch, stage, owner, name, engine, shape):
    real = getattr(owner, name)

    def slower(*args: Any, **options: Any) -> Any:
        time.sleep(0.25)
        return real(*args, **options)

    monkeypatch.setattr(owner, name, slower)
    for _ in range(
        3
    ):  # in one of three tries: another program may hold up another part for longer than this one is slow
        result = lm.build(
            demo,
            split="training",
            out=tmp_path / "x.h5",
            engine=engine,
            progress="none",
            check=4,
            fresh=True,
            pipeline=PipelineConfig(files_per_batch=8, monitor_interval_s=0.05, **shape),
        )
        found = analyse(result.timeline, result.split, summary=result.summary)
        if found.limiting == stage:
            break
    assert found.limiting == stage
    assert found.findings[0].startswith(f"{stage.upper()} BOTTLENECK")
    assert sum(found.shares.values()) == pytest.approx(found.wall_s)


# ---- what a build writes down


def test_the_timeline_alone_gives_the_same_analysis_as_with_the_report(demo, tmp_path):
    "Settings, spec, mode and engine stand beside the times."
    config = PipelineConfig(
        files_per_batch=8,
        monitor_interval_s=0.05,
        fsync=True,
        compression="gzip",
        gpu_streams=1,
        device="fake",
    )
    result = lm.build(
        demo,
        split="training",
        out=tmp_path / "x.h5",
        engine="torch",
        progress="none",
        check=4,
        pipeline=config,
    )
    stored = read_timeline(result.timeline_path)
    assert set(stored.meta) == set(META)
    assert stored.meta["settings"] == asdict(config)
    assert (stored.meta["mode"], stored.meta["check"], stored.meta["engine"]) == (
        "stream",
        4,
        result.summary["engine"],
    )
    assert stored.meta["spec"] == result.summary["spec"]
    assert stored.meta["inflow"][result.split]["cache"] == result.summary["cache"]
    alone, both = analyse(stored, result.split), analyse(stored, result.split, summary=result.summary)
    assert [(s.parameter, s.present, s.new) for s in alone.suggestions] == [
        (s.parameter, s.present, s.new) for s in both.suggestions
    ]
    assert alone.findings == both.findings


def test_fsync_time_is_reported_separately(demo, tmp_path, monkeypatch):
    "Twice: for the bytes before the rename, and for the name after it."
    real, waited = os.fsync, list[int]()

    def slowly(fd: int) -> None:
        waited.append(fd)
        time.sleep(0.4)
        real(fd)

    for fsync in (True, False):
        waited.clear()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", slowly)
            result = lm.build(
                demo,
                split="validation",
                out=tmp_path / "x.h5",
                engine="cpu",
                progress="none",
                check=2,
                pipeline=PipelineConfig(fsync=fsync),
            )
        found = [s for s in result.timeline.spans if s.stage == "sync" and s.lane != "journal"]
        if not fsync:
            assert found == []
            continue
        assert len(found) == 2
        assert all(s.seconds >= 0.4 for s in found)
        rename = max(s.start_s for s in result.timeline.spans if s.stage == "publish")
        assert found[0].end_s <= rename <= found[1].start_s


@pytest.mark.slow
def test_mixed_rates_of_a_real_build(tmp_path, make_wav, monkeypatch):
    "Eight recordings at the data set's rate, six at another one, two of 24 bits: what each took is told apart, and a slow resampler is named."
    folder = tmp_path / "data" / "LEAK"
    for i in range(8):
        make_wav(folder / f"a{i}.wav", seed=i)
    for i in range(6):
        make_wav(folder / f"b{i}.wav", rate=8000, seed=i)
    for i in range(2):
        make_wav(folder / f"c{i}.wav", seed=i)
        soundfile.write(folder / f"c{i}.wav", soundfile.read(folder / f"c{i}.wav")[0], 4096, subtype="PCM_24")
    real = conform.to_rate

    def slower(*args: Any) -> Any:
        time.sleep(0.2)
        return real(*args)

    monkeypatch.setattr(conform, "to_rate", slower)
    for _ in range(3):  # as above
        result = lm.build(
            tmp_path / "data",
            out=tmp_path / "x.h5",
            spec={"sample_rate": 4096, "duration_s": 1.0},
            engine="reference",
            progress="none",
            check=2,
            pipeline=PipelineConfig(files_per_batch=4, compute_workers=1, monitor_interval_s=0.05),
            fresh=True,
        )
        if analyse(result.timeline).limiting == "resample":
            break
    of = {
        stage: [s for s in result.timeline.spans if s.stage == stage]
        for stage in ("read", "decode", "resample")
    }
    assert {stage: sum(s.n_files for s in spans) for stage, spans in of.items()} == {
        "read": 16,
        "decode": 8,
        "resample": 6,
    }
    assert sum(s.seconds for s in of["resample"]) >= 6 * 0.2
    assert min(s.seconds for s in result.timeline.spans) >= 0
    for name in ("decode", "resample"):  # behind the reading of the same batch
        for s in of[name]:
            assert any(r.batch == s.batch and r.end_s <= s.start_s for r in of["read"])
    found = analyse(read_timeline(result.timeline_path))
    assert (found.limiting, found.findings[0].split(":")[0]) == ("resample", "RESAMPLE BOTTLENECK")
    assert sum(found.shares.values()) == pytest.approx(found.wall_s)
    assert "mode" in names(found)
    warm = lm.build(
        tmp_path / "data",
        out=tmp_path / "y.h5",
        spec={"sample_rate": 4096, "duration_s": 1.0},
        engine="reference",
        progress="none",
        check=2,
        mode="preload",
        pipeline=PipelineConfig(files_per_batch=4),
    )
    stages = [s.stage for s in warm.timeline.spans]
    assert stages.count("stage") == 4
    assert (
        sum(s.n_files for s in warm.timeline.spans if s.stage == "resample") == 6
    )  # once, while they were loaded
    assert warm.summary["rows"] == result.rows == 16
