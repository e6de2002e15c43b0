"Figures of benchmark records: what they draw is what the record says, from every record that is tracked."

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_figures
import numpy as np
import pytest
from bench_notebook import is_right
from each import each

from leakmel.pages.plots import SUBTITLE_LETTERS

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
DRAW: dict[str, list[Callable[[Any], Any]]] = {
    "compare": [bench_figures.compare_figure, bench_figures.rate_figure],
    "start": [bench_figures.start_figure],
    "build": [bench_figures.build_figure],
}
RECORDS = [p for p in sorted((ROOT / "runs" / "benchmarks").glob("*.json")) if p.name.split("-")[0] in DRAW]


def drawn(figure: Any) -> list[float]:
    return [float(x) for trace in figure.data if trace.type == "bar" for x in trace.x if np.isfinite(x)]


@each("path", RECORDS, ids=lambda p: p.stem)
def test_tracked_records_can_be_drawn(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert is_right(record)
    for draw in DRAW[record["suite"]]:
        figure = draw(record)
        assert len(figure.layout.title.text) > 5
        assert (
            record["machine"]["cpu"] in (figure.layout.title.subtitle.text or "")
            or record["suite"] == "growth"
        )
        assert sum(len(trace.x) for trace in figure.data) < 2000


def test_bars_are_the_medians_of_the_record():
    record = json.loads(next(p for p in RECORDS if p.name.startswith("build-")).read_text(encoding="utf-8"))
    every = record["figures"].values()
    wanted = [
        *(f["files_per_s"]["median"] for f in every),
        *(1e3 * f["cpu_s"]["median"] / f["found"]["median"] for f in every),
        *(f["peak_rss_bytes"]["median"] / 1e6 for f in every),
    ]
    assert drawn(bench_figures.build_figure(record)) == pytest.approx(wanted)


def test_title_names_the_fastest_step():
    figure = bench_figures.ladder_figure(
        {"first": [10.0], "best": [50.0, 40.0, 30.0], "last": [20.0]}, "here"
    )
    assert figure.layout.title.text == "best: 4.0 times as fast as first"
    assert drawn(figure) == [10, 40, 20]
    assert figure.layout.title.subtitle.text == "here"


def test_long_subtitle_is_wrapped():
    parts = [f"{k} " + "word " * 8 for k in range(6)]
    figure = bench_figures.ladder_figure({"first": [10.0]}, "; ".join(parts))
    lines = figure.layout.title.subtitle.text.split("<br>")
    assert max(map(len, lines)) <= SUBTITLE_LETTERS
    assert " ".join(lines) == "; ".join(parts).strip()
    assert figure.layout.margin.t > bench_figures.ladder_figure({"first": [10.0]}, "here").layout.margin.t
