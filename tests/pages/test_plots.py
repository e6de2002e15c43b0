"Figures of a run's flow and of its data: right numbers, a sentence where there is nothing, small whatever comes."

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from each import each

from leakmel.core.timeline import Gauge, Span, Timeline
from leakmel.pages.dashboard import runs_table
from leakmel.pages.plots import (
    MOST_LABELS,
    batch_timeline,
    classes_by_split,
    exclusive_bar,
    level_by_label,
    mels_by_label,
    spectrum_by_label,
    utilization,
)

MANY = 100_000
LAYOUT_COLOURS = ("white", "black", "#fff", "#000")


def made(n: int, n_labels: int, seed: int = 0) -> dict[str, Any]:
    "Columns of n recordings, as many of them as there are labels at the least."
    rng = np.random.default_rng(seed)
    labels = [f"L{i}" for i in np.arange(n) % n_labels]
    return {
        "splits": [("TRAINING", "TESTING")[int(i > 0.8 * n)] for i in range(n)],
        "labels": labels,
        "level": rng.normal(-30, 5, n),
        "spectra": rng.normal(-30, 5, (min(n, 600), 64)),
        "hz": np.linspace(20, 2000, 64),
    }


def pictures_of(c: dict[str, Any]) -> dict[str, Any]:
    "Every figure of the data."
    k = min(len(c["labels"]), 2)
    return {
        "classes_by_split": classes_by_split(c["splits"], c["labels"]),
        "level_by_label": level_by_label(c["level"], c["labels"]),
        "spectrum_by_label": spectrum_by_label(c["spectra"], c["labels"][: len(c["spectra"])], c["hz"]),
        "mels_by_label": mels_by_label(
            np.zeros((k, 4, 2, 64, 1), np.float16),
            c["labels"][:k],
            c["hz"],
            long_start_s=np.arange(4),
            short_start_s=[0, 0.5],
        ),
    }


def made_run(n: int, batch: int = 32) -> Timeline:
    "A run of n batches by a reader, an engine and a writer; each rests a while between them."
    run = Timeline()
    run.spans.append(Span("start_up", "main", 0.0, 0.5))
    for i in range(n):
        at = 0.5 + 0.01 * i
        run.spans += [
            Span("read", "reader", at, at + 0.004, "T", i, batch),
            Span("compute", "engine", at + 0.004, at + 0.012, "T", i, batch),
            Span("write", "writer", at + 0.012, at + 0.013, "T", i, batch),
        ]
        run.gauges += [Gauge("queue.compute", at + 0.004, i % 3), Gauge("queue.write", at + 0.012, 1)]
    run.spans.append(Span("publish", "main", 0.6 + 0.01 * n, 1.6 + 0.01 * n, "T"))
    run.samples = [
        {"time_s": 0.1 * i, "cpu_percent": 120.0, "rss_bytes": 1e8, "disk_read_bytes": 1e6 * i}
        for i in range(n)
    ]
    return run


RUN_FIGURES: list[Callable[[Timeline], Any]] = [exclusive_bar, batch_timeline, utilization]


def values(trace: Any, axis: str) -> np.ndarray:
    return np.asarray(trace[axis], dtype=np.float64)


# ---- nothing, one, many --------------------------------------------------------------------------------------------


@each(
    "columns",
    [made(0, 1), made(1, 1), made(7, 1), made(60, 2), made(40, 20)],
    ids=["nothing", "one row", "one label", "two labels", "twenty labels"],
)
def test_any_data_give_a_figure_with_a_title(columns):
    for name, figure in pictures_of(columns).items():
        assert len(figure.layout.title.text.replace("<br>", " ")) > 8, name
        assert "nan" not in figure.layout.title.text.replace("<br>", " ").lower(), name
        assert bool(figure.data) == bool(columns["labels"]), name
        json.loads(figure.to_json())


@each("figure", RUN_FIGURES)
def test_empty_run_gives_a_figure_with_a_title(figure):
    one = Timeline()
    one.spans = [Span("read", "reader", 1.0, 1.0, "T", 0, 1)]
    for run in (Timeline(), one, made_run(1)):
        assert len(figure(run).layout.title.text.replace("<br>", " ")) > 8
    assert not figure(Timeline()).data


@each("figure", [f(Timeline()) for f in RUN_FIGURES] + [classes_by_split([], [])])
def test_a_title_alone_has_no_axes(figure):
    assert figure.layout.xaxis.visible is False
    assert figure.layout.yaxis.visible is False
    assert runs_table([]).startswith("run")


def test_a_hundred_thousand_recordings_make_small_figures():
    for name, figure in pictures_of(made(MANY, 3)).items():
        assert len(figure.to_json()) < 200_000, name
        for trace in figure.data:
            if trace.type != "heatmap":
                assert len(trace.y) < 2000, name


@pytest.mark.slow
@each("figure", RUN_FIGURES)
def test_a_long_run_makes_small_figures(figure):
    drawn = figure(made_run(20_000))
    assert len(drawn.to_json()) < 500_000
    assert all(len(t.x) < 2000 for t in drawn.data)


@each(
    "figure",
    [*(f(made_run(30)) for f in RUN_FIGURES), *pictures_of(made(60, 2)).values()],
    ids=lambda f: f.layout.title.text.replace("<br>", " ")[:20],
)
def test_figures_fit_light_and_dark_and_their_axes_have_units(figure):
    layout = figure.layout
    assert (layout.paper_bgcolor, layout.plot_bgcolor) == ("rgba(0,0,0,0)",) * 2
    assert layout.font.color not in LAYOUT_COLOURS
    assert any(c.isdigit() for c in layout.title.text.replace("<br>", " ")), "a finding has figures"
    titles = [a.title.text for a in (*figure.select_xaxes(), *figure.select_yaxes()) if a.title.text]
    assert titles
    assert any(
        words in t
        for t in titles
        for words in ("(s)", "(dB", "(Hz)", "recordings", "files per second", "batches")
    )
    assert "http" not in figure.to_json()


def test_names_are_escaped_in_html():
    names = ["<b>x</b>", "a\udcffb", "line\nbreak"]
    for figure in (
        classes_by_split(names, names),
        level_by_label([-20, -30, -40], names),
        spectrum_by_label(np.zeros((3, 2)), names, [1, 2]),
    ):
        text = figure.to_json()
        assert "<b>" not in text.replace("\\u003c", "<")
        json.loads(text.encode("utf-8"))


# ---- right numbers -------------------------------------------------------------------------------------------------


def test_titles_state_the_class_balance_and_the_band_where_labels_differ():
    for splits, labels, message in (
        ("TTUU", "XYXY", "X is 50 % of T"),
        ("TTUU", "AAAB", "A is 50 % of U and 100 % of T"),
        ("TT", "XX", "X is 100 % of T"),
        ("TTT", "XXY", "X is 67 % of T"),
    ):
        title = classes_by_split(list(splits), list(labels)).layout.title.text
        assert title.replace("<br>", " ") == message
    spectra = np.zeros((4, 3))
    spectra[:2, 1] = 12
    figure = spectrum_by_label(spectra, ["A", "A", "B", "B"], [100, 500, 900])
    assert figure.layout.title.text.replace("<br>", " ") == "A is up to 12 dB louder than B, most at 500 Hz"
    spectra[0, 0] = np.nan
    assert "(1)" in next(
        t.name
        for t in spectrum_by_label(spectra, ["A", "A", "B", "B"], [100, 500, 900]).data
        if t.showlegend is None
    )


def test_spread_covers_80_percent():
    spectra = np.tile(np.arange(101.0)[:, None], (1, 2))
    shade = spectrum_by_label(spectra, ["A"] * 101, [1, 2]).data[0]
    np.testing.assert_allclose(values(shade, "y"), [10, 10, 90, 90])


def test_hidden_labels_are_reported():
    n = MOST_LABELS + 4
    figure = spectrum_by_label(np.zeros((n, 2)), [f"L{i:02}" for i in range(n)], [1, 2])
    assert len([t for t in figure.data if t.name]) == MOST_LABELS
    assert f"{MOST_LABELS} largest of {n} labels" in figure.layout.title.subtitle.text.replace("<br>", " ")


def test_level_that_rounds_to_zero_has_no_sign():
    mels = np.stack([np.full((2, 1, 3, 1), level, np.float16) for level in (-18.2, -0.3)])
    title = mels_by_label(
        mels, ["NOLEAK", "LEAK"], [100, 200, 300], long_start_s=[0, 1], short_start_s=[0]
    ).layout.title.text.replace("<br>", " ")
    assert title == "Median level from -18 dB (NOLEAK) to 0 dB (LEAK)"
