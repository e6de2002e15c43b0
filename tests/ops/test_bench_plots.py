"Figures of benchmark records: what they draw is what the record says, from every record that is tracked."

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_figures
import numpy as np
import pytest
from each import each
from bench_growth import growth_figure
from errors import raises

from leakmel.core.errors import LeakmelError
from leakmel.insight.plots import SUBTITLE_LETTERS
from leakmel.ops import bench
from leakmel.ops.bench import SUITES, find_records, is_right, store

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
DRAW: dict[str, list[Callable[[Any], Any]]] = {
    "compare": [bench_figures.compare_figure, bench_figures.rate_figure],
    "parts": [bench_figures.parts_figure, bench_figures.trust_figure],
    "growth": [growth_figure],
    "modes": [bench_figures.modes_figure],
    "reader": [bench_figures.reader_figure],
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


def test_reader_of_a_build_is_among_the_measured_ones():
    pytest.importorskip("numba")
    from bench_reader import ways_of_reading

    assert bench_figures.BUILD_WAY in ways_of_reading(2)


def test_long_subtitle_is_wrapped():
    parts = [f"{k} " + "word " * 8 for k in range(6)]
    figure = bench_figures.ladder_figure({"first": [10.0]}, "; ".join(parts))
    lines = figure.layout.title.subtitle.text.split("<br>")
    assert max(map(len, lines)) <= SUBTITLE_LETTERS
    assert " ".join(lines) == "; ".join(parts).strip()
    assert figure.layout.margin.t > bench_figures.ladder_figure({"first": [10.0]}, "here").layout.margin.t


def test_failed_suite_keeps_earlier_records(monkeypatch, tmp_path):
    "Each record is stored as it comes, and a temporary work folder is removed."
    folders: list[Path] = []

    def run(suite: str, folder: Path, out: Path, **options: Any) -> tuple[dict[str, Any], Path]:
        folders.append(Path(folder))
        if suite == "train":
            raise LeakmelError("no room")
        record = {"suite": suite, "made_utc": "2001-01-01T00:00:00+00:00", "commit": None}
        return record, store(record, out)

    monkeypatch.setattr(bench, "measure", run)
    with raises("failed"):
        find_records("all", run=True, out=str(tmp_path / "out"))
    assert len(folders) == len(SUITES)
    assert not folders[0].exists()
    assert sorted(p.name.split("-")[0] for p in (tmp_path / "out").iterdir()) == ["build", "gpu"]
    kept = tmp_path / "work"
    kept.mkdir()
    find_records("build", run=True, folder=str(kept), out=str(tmp_path / "out"))
    assert folders[-1] == kept
    assert kept.is_dir()


def test_an_unknown_suite_is_refused_before_anything_is_measured(tmp_path):
    with raises("unknown-suite"):
        find_records("build,modes", run=True, folder=str(tmp_path / "work"), out=str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())
