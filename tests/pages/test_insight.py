"Shares add up to the wall clock, reports name the right stage, figures hold the recorded numbers."

import itertools
import json

import numpy as np
import pytest
from each import each

from leakmel.core.errors import DataError
from leakmel.core.timeline import (
    STAGES,
    Gauge,
    Span,
    Timeline,
    analyse,
    attribute,
    covered_s,
    interval_s,
    merge_lanes,
    pieces_by_lane,
    queue_stats,
    stage_table,
)
from leakmel.pages.plots import (
    MAX_POINTS,
    STAGE_COLORS,
    batch_timeline,
    exclusive_bar,
    frame_starts_s,
    mels_by_label,
    utilization,
)

pytestmark = pytest.mark.quick


def timeline_of(*spans: Span) -> Timeline:
    timeline = Timeline()
    timeline.spans = list(spans)
    return timeline


def random_timeline(n_spans: int, seed: int, n_lanes: int = 5, splits=("A", "B", "")) -> Timeline:
    "Spans that overlap and nest at random, also within a lane."
    rng = np.random.default_rng(seed)
    starts, lengths = rng.uniform(0, 60, n_spans), rng.exponential(0.5, n_spans)
    timeline = Timeline()
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        stage, lane, split = (
            STAGES[rng.integers(len(STAGES))],
            f"lane-{rng.integers(n_lanes)}",
            splits[rng.integers(len(splits))],
        )
        timeline.spans.append(Span(stage, lane, float(start), float(start + length), split, i, 1, 10))
    return timeline


def brute_shares(timeline: Timeline, split: str | None) -> dict[str, float]:
    "The definition of exclusive time, instant by instant."
    within = interval_s(timeline, split)
    assert within is not None
    spans = [s for s in timeline.spans if split is None or s.split in ("", split)]
    edges = sorted(
        {t for s in spans for t in (s.start_s, s.end_s) if within[0] < t < within[1]} | set(within)
    )
    shares = dict.fromkeys(STAGES, 0.0)
    for a, b in itertools.pairwise(edges):
        lanes: dict[str, Span] = {}
        for s in spans:
            if s.start_s <= a and s.end_s >= b and (s.lane not in lanes or s.start_s > lanes[s.lane].start_s):
                lanes[s.lane] = s
        busy = [s.stage for s in lanes.values() if s.stage != "wait"]
        for stage in busy:
            shares[stage] += (b - a) / len(busy)
        if not busy:
            shares["wait"] += b - a
    return shares


# ---- exclusive time


@each("split", [None, "A", "B"])
@each("seed", range(5))
def test_shares_equal_the_definition_and_add_up(seed, split):
    timeline = random_timeline(120, seed)
    shares, expected = attribute(timeline, split), brute_shares(timeline, split)
    first, last = interval_s(timeline, split) or (0, 0)
    assert abs(sum(shares.values()) - (last - first)) < 1e-6
    for stage in STAGES:
        assert shares.get(stage, 0.0) == pytest.approx(expected[stage], abs=1e-9)


def test_six_thousand_spans_add_up():
    timeline = random_timeline(6000, 1)
    first, last = interval_s(timeline) or (0, 0)
    assert abs(sum(attribute(timeline).values()) - (last - first)) < 1e-6


def test_read_bound_run():
    spans = [Span("read", "reader-0", i, i + 0.9, "T", i) for i in range(10)] + [
        Span("compute", "engine", i + 0.9, i + 1, "T", i) for i in range(10)
    ]
    shares = attribute(timeline_of(*spans), "T")
    assert shares == pytest.approx({"read": 9.0, "compute": 1.0, "wait": 0.0})
    assert analyse(timeline_of(*spans), "T").limit_text.startswith("The limiting stage is read: ")


def test_compute_bound_run_with_overlapping_reads():
    spans = [
        Span("compute", "engine", 0, 10, "T"),
        *(Span("read", "reader", i, i + 0.2, "T") for i in range(10)),
    ]
    assert attribute(timeline_of(*spans)) == pytest.approx({"read": 1.0, "compute": 9.0, "wait": 0.0})


def test_all_lanes_parallel_share_equally():
    spans = [Span(stage, stage, 0, 6, "T") for stage in ("read", "compute", "write")]
    assert attribute(timeline_of(*spans)) == pytest.approx(
        {"read": 2.0, "compute": 2.0, "write": 2.0, "wait": 0.0}
    )


def test_gaps_count_as_waiting():
    timeline = timeline_of(Span("read", "a", 1, 2), Span("write", "a", 5, 6))
    assert attribute(timeline) == pytest.approx({"read": 1.0, "write": 1.0, "wait": 3.0})
    assert analyse(timeline).limit_text.startswith("The limiting stage is wait: ")


def test_a_lane_that_waits_is_not_busy():
    timeline = timeline_of(Span("wait", "reader", 0, 4), Span("compute", "engine", 1, 3))
    assert attribute(timeline) == pytest.approx({"compute": 2.0, "wait": 2.0})


def test_innermost_span_counts():
    timeline = timeline_of(
        Span("publish", "main", 0, 10), Span("verify", "main", 0, 4), Span("write", "main", 8, 12)
    )
    assert attribute(timeline) == pytest.approx({"verify": 4.0, "publish": 4.0, "write": 4.0, "wait": 0.0})
    assert pieces_by_lane(timeline.spans)["main"][0] == (0, 4, "verify")


def test_other_splits_do_not_count_but_global_spans_do():
    timeline = timeline_of(
        Span("start_up", "main", 0, 2), Span("read", "r", 1, 3, "A"), Span("compute", "e", 2, 9, "B")
    )
    assert attribute(timeline, "A") == pytest.approx({"start_up": 0.5, "read": 1.5, "wait": 0.0})
    assert attribute(timeline, "B") == pytest.approx({"compute": 7.0, "wait": 0.0})


def test_an_empty_timeline():
    assert attribute(Timeline()) == {}
    assert len(stage_table(Timeline()).splitlines()) == 6
    assert analyse(Timeline()).limit_text == "No span was recorded."
    assert attribute(timeline_of(Span("read", "a", 1, 1))) == {"wait": 0.0}


# ---- table, queues, report


def test_stage_table_counts_work_and_wall_apart():
    spans = [
        Span("read", "r0", 0, 2, "T", 0, 32, 20_000_000),
        Span("read", "r1", 1, 4, "T", 1, 32, 20_000_000),
        Span("compute", "e", 6, 8, "T", 0, 64),
    ]
    timeline = timeline_of(*spans)
    timeline.gauges = [Gauge("queue.compute", 0, 1)]
    timeline.meta["segments_per_file"] = 80
    lines = stage_table(timeline).splitlines()
    head, _, read, compute, wait, _, queue, *_ = map(str.split, lines)
    assert lines[7] == "engine, while it computed (2.000 s): 32 files/s, 2,560 segments/s"
    assert len({len(line) for line in lines[:6]}) == 1
    assert " ".join(queue) == "queue.compute: mean 1.00, max 1"
    assert " ".join(head) == "stage spans total s mean ms max ms files MB/s exclusive s share"
    assert read == ["read", "2", "5.000", "2500.00", "3000.00", "64", "10.0", "4.000", "50.0", "%"]
    assert compute == ["compute", "1", "2.000", "2000.00", "2000.00", "64", "2.000", "25.0", "%"]
    assert wait == ["wait", "2.000", "25.0", "%"]


def test_queue_mean_is_weighted_by_time():
    timeline = timeline_of(Span("read", "r", 0, 10, "T"))
    timeline.gauges = [Gauge("queue.compute", 0, 0), Gauge("queue.compute", 8, 5), Gauge("queue.write", 2, 1)]
    assert queue_stats(timeline) == {"queue.compute": (1.0, 5.0), "queue.write": (1.0, 1.0)}


def test_queue_of_a_split_starts_with_the_previous_value():
    timeline = timeline_of(Span("read", "r", 0, 4, "A"), Span("read", "r", 4, 8, "B"))
    timeline.gauges = [Gauge("q", 0, 9), Gauge("q", 2, 1), Gauge("q", 6, 3)]
    assert queue_stats(timeline, "B") == {"q": (2.0, 3.0)}
    assert queue_stats(timeline, "A") == {"q": (5.0, 9.0)}


@pytest.mark.parametrize("timeline", [Timeline(), timeline_of(Span("read", "a", 0, 0))])
def test_stage_table_of_an_almost_empty_timeline(timeline):
    assert "sum" in stage_table(timeline)


# ---- figures


def small_run() -> Timeline:
    timeline = timeline_of(
        Span("start_up", "main", 0, 1),
        Span("read", "reader-0", 1, 2, "A", 0, 64, 5_000_000),
        Span("read", "reader-1", 1, 3, "A", 1, 64, 5_000_000),
        Span("compute", "engine", 3, 7, "A", 0, 128),
        Span("read", "reader-0", 4, 5, "B", 0, 64, 5_000_000),
        Span("write", "writer", 7, 8, "A"),
        Span("compute", "engine", 7, 9, "B", 0, 64),
    )
    timeline.gauges = [Gauge("queue.compute", 1, 1), Gauge("queue.compute", 4, 3)]
    timeline.samples = [
        {
            "time_s": t,
            "cpu_percent": None if t == 0 else 100.0 + t,
            "rss_bytes": (1 + t) * 1e6,
            "disk_read_bytes": t * 2_000_000,
            "disk_written_bytes": None,
            "gpu_percent": None,
            "vram_bytes": None,
        }
        for t in range(10)
    ]
    timeline.meta["monitor"] = {"n_cores": 2}
    return timeline


def values(fig, name: str, what: str = "x") -> np.ndarray:
    return np.concatenate([np.atleast_1d(getattr(t, what)) for t in fig.data if t.name == name])


def check_look(fig, limit: int = 300_000) -> None:
    "What every figure has in common."
    text = fig.to_json()
    assert len(text) < limit
    layout = json.loads(text)["layout"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"
    assert layout["title"]["text"]
    assert layout["height"] > 100
    assert len(json.dumps(layout.get("template", {}))) < 200
    for trace in fig.data:
        assert trace.z is not None if trace.type == "heatmap" else len(trace.x) < 2000


def test_figures_of_a_run_hold_its_shares_and_a_bar_per_span():
    timeline = small_run()
    fig = exclusive_bar(timeline)
    check_look(fig)
    assert list(fig.data[0].y) == ["all splits", "A", "B"]
    for row, split in enumerate([None, "A", "B"]):
        for stage, seconds in attribute(timeline, split).items():
            if seconds:
                assert values(fig, stage.replace("_", " ").capitalize())[row] == pytest.approx(seconds)
    assert {trace.marker.color for trace in fig.data} <= set(STAGE_COLORS.values())
    one = exclusive_bar(timeline_of(Span("compute", "e", 0, 3, "A"), Span("read", "r", 3, 4, "A")))
    assert one.layout.title.text == "Compute takes 75 % of 4.00 s"
    assert list(values(one, "Compute")) == [3]
    fig = batch_timeline(timeline)
    check_look(fig)
    assert {trace.marker.color for trace in fig.data} <= set(STAGE_COLORS.values())
    assert list(values(fig, "Compute")) == [4, 2]
    assert list(values(fig, "Compute", "base")) == [3, 7]
    assert list(fig.layout.yaxis.ticktext) == ["main", "reader-0", "reader-1", "engine", "writer"]
    assert "batch 0" in values(fig, "Read", "hovertext")[0]
    assert "5.00 MB" in values(fig, "Read", "hovertext")[0]
    assert fig.layout.title.text.startswith("1.3 of 5 lanes busy on average")  # 12 busy seconds in 9


def test_batch_timeline_of_one_split():
    fig = batch_timeline(small_run(), "A")
    assert list(fig.layout.yaxis.ticktext) == ["reader-0", "reader-1", "engine", "writer"]
    assert values(fig, "Compute").sum() == 4


@pytest.mark.slow
@each("n_lanes", [1, 5, 40])
def test_long_run_is_drawn_in_slices_that_keep_the_seconds(n_lanes):
    timeline = random_timeline(6000, 3, n_lanes)
    fig = batch_timeline(timeline)
    check_look(fig, 900_000)
    pieces = [p for own in pieces_by_lane(timeline.spans).values() for p in own]
    assert sum(len(t.x) for t in fig.data if t.name == "Read") <= MAX_POINTS
    assert values(fig, "Read").sum() == pytest.approx(
        sum(b - a for a, b, stage in pieces if stage == "read"), rel=1e-3
    )


def test_utilization_draws_measured_values_and_names_missing_ones():
    run = small_run()
    for sample in run.samples[::2]:
        sample["disk_read_bytes"] = None
    fig = utilization(run)
    check_look(fig)
    assert fig.layout.title.subtitle.text == "Not measured: GPU, VRAM"
    assert [t.name for t in fig.data] == ["CPU, this process", "RAM, this process", "read from disk"]
    assert list(values(fig, "CPU, this process", "y")) == [101 + i for i in range(9)]
    assert values(fig, "read from disk", "y") == pytest.approx(2.0)
    assert fig.layout.title.text == "1.1 of 2 cores busy on average, 10 MB of RAM at most"


def test_utilization_without_any_record():
    fig = utilization(Timeline())
    assert fig.layout.title.text == "Nothing was measured"
    assert len(fig.data) == 0


def test_mels_by_label_shows_each_frame_once():
    k, n_long, n_short, n_mels = 3, 79, 3, 32
    frames = np.random.default_rng(0).normal(-40, 10, (k, n_mels, 159)).astype(np.float16)
    at = np.add.outer(
        2 * np.arange(n_long), np.arange(n_short)
    )  # a long segment begins every second frame and has three
    mels = np.moveaxis(frames[:, :, at], 1, 3)[..., None]
    fig = mels_by_label(
        mels,
        ["LEAK", "NO<b>", "c\udcff"],
        np.linspace(20, 2000, n_mels),
        long_start_s=0.125 * np.arange(n_long),
        short_start_s=0.0625 * np.arange(n_short),
        range_db=200,
    )
    check_look(fig)
    assert [a.text for a in fig.layout.annotations] == ["LEAK", "NO&lt;b&gt;", r"c\xff"]
    for i, trace in enumerate(fig.data):
        assert trace.z.dtype == np.int8
        low = fig.layout.coloraxis.cmin
        np.testing.assert_array_equal(trace.z, np.round(np.maximum(frames[i].astype(np.float32), low)))
        assert len(trace.x) == 159
    assert len({t.coloraxis for t in fig.data}) == 1


def test_mels_of_several_frames_and_of_silence():
    times, index = frame_starts_s([0, 1], [0, 0.5], 3, 0.1)
    assert np.allclose(times, [0, 0.1, 0.2, 0.5, 0.6, 0.7, 1, 1.1, 1.2, 1.5, 1.6, 1.7])
    assert list(index) == list(range(12))
    silent = np.full((1, 2, 2, 8, 3), -200, dtype=np.float16)
    fig = mels_by_label(
        silent, ["QUIET"], np.arange(8), long_start_s=[0, 1], short_start_s=[0, 0.5], hop_s=0.1
    )
    assert (fig.data[0].z == -200).all()
    assert fig.layout.title.text == "Median level from -200 dB (QUIET) to -200 dB (QUIET)"


def test_mels_that_do_not_fit_are_refused():
    mels = np.zeros((2, 2, 2, 8, 1), dtype=np.float16)
    with pytest.raises(DataError, match="3 labels"):
        mels_by_label(mels, ["a", "b", "c"], np.arange(8), long_start_s=[0, 1], short_start_s=[0, 1])
    with pytest.raises(DataError, match="band centres"):
        mels_by_label(mels, ["a", "b"], np.arange(9), long_start_s=[0, 1], short_start_s=[0, 1])
    with pytest.raises(DataError, match="shape"):
        mels_by_label(mels[0], ["a"], np.arange(8), long_start_s=[0, 1], short_start_s=[0, 1])
    assert (
        mels_by_label(mels[:0], [], np.arange(8), long_start_s=[0, 1], short_start_s=[0, 1]).layout.title.text
        == "No recording to show"
    )


def test_import_is_light():
    import subprocess
    import sys

    code = (
        "import sys, leakmel.pages.plots, leakmel.core.monitor, leakmel.core.progress\n"
        "bad = {'plotly', 'torch', 'pandas', 'IPython', 'psutil', 'pynvml', 'tqdm'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@each("seed", range(5))
def test_merged_lanes_have_the_attributed_times(seed: int) -> None:
    timeline = random_timeline(300, seed, splits=("A",))
    merged = merge_lanes(timeline.spans, "node/worker-0", split="A", n_slices=20)
    right = attribute(timeline)
    for stage in {s.stage for s in timeline.spans} - {"wait"}:
        own = [s for s in merged if s.stage == stage]
        assert sum(s.seconds for s in own) == pytest.approx(right.get(stage, 0.0))
        assert sum(s.n_bytes for s in own) == sum(s.n_bytes for s in timeline.spans if s.stage == stage)
    assert len(merged) <= 20 * len(STAGES)
    assert covered_s(merged) == pytest.approx(sum(s.seconds for s in merged))
    assert {s.lane for s in merged} == {"node/worker-0"}
    assert merge_lanes([], "x") == merge_lanes([Span("wait", "main", 0, 1)], "x") == []
