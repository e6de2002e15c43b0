"Figures of benchmark records: what they draw is what the record says, from every record that is tracked."

import importlib
import inspect
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import pytest
from conftest import need

from leakmel.core.errors import LeakmelError
from leakmel.ops import bench_plots, bench_run
from leakmel.ops.bench_growth import growth_figure
from leakmel.ops.bench_run import SUITES, bench_kinds, find_records, is_right, plan_bench

ROOT = Path(__file__).resolve().parents[2]
DRAW: dict[str, list[Callable[[Any], Any]]] = {
    "compare": [bench_plots.compare_figure, bench_plots.rate_figure],
    "parts": [bench_plots.parts_figure, bench_plots.trust_figure],
    "growth": [growth_figure],
    "modes": [bench_plots.modes_figure],
    "reader": [bench_plots.reader_figure],
    "start": [bench_plots.start_figure],
    "build": [bench_plots.build_figure],
}
RECORDS = [p for p in sorted((ROOT / "runs" / "benchmarks").glob("*.json")) if p.name.split("-")[0] in DRAW]
PARAMETERS: dict[str, Any] = {
    "run": True,
    "suites": "all",
    "folder": None,
    "out": None,
    "n_files": 24,
    "growth_files": 30,
    "listed_files": 40,
    "rounds": 2,
    "run_s": 0.5,
    "cold": True,
    "only": "dali",
}


def drawn(figure: Any) -> list[float]:
    return [float(x) for trace in figure.data if trace.type == "bar" for x in trace.x if np.isfinite(x)]


def test_every_suite_of_the_notebook_has_a_figure():
    assert set(SUITES) == set(DRAW)
    assert set(PARAMETERS) == set(bench_kinds())


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
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
    assert drawn(bench_plots.build_figure(record)) == pytest.approx(wanted)


def test_a_ladder_says_what_is_fastest_even_where_the_last_rung_is_not():
    figure = bench_plots.ladder_figure({"first": [10.0], "best": [50.0, 40.0, 30.0], "last": [20.0]}, "here")
    assert figure.layout.title.text == "best: 4.0 times as fast as first"
    assert drawn(figure) == [10, 40, 20]
    assert figure.layout.title.subtitle.text == "here"


def test_figures_of_readers_know_the_way_of_a_build():
    pytest.importorskip("numba")
    from leakmel.ops.bench_reader import ways_of_reading

    assert bench_plots.BUILD_WAY in ways_of_reading(2)


def test_a_long_subtitle_is_broken_at_semicolons():
    parts = [f"{k} " + "word " * 8 for k in range(6)]
    figure = bench_plots.ladder_figure({"first": [10.0]}, "; ".join(parts))
    lines = figure.layout.title.subtitle.text.split("<br>")
    assert max(map(len, lines)) <= 112
    assert "; ".join(lines) == "; ".join(parts)
    assert figure.layout.margin.t > bench_plots.ladder_figure({"first": [10.0]}, "here").layout.margin.t


def test_each_suite_is_called_as_it_can_be(monkeypatch, tmp_path):
    "Every suite gets its own parameters, is stored as it comes, and one that fails leaves the ones before it."
    homes = {
        "compare": "bench_compare",
        "parts": "bench_parts",
        "growth": "bench_growth",
        "modes": "bench_modes",
        "reader": "bench_reader",
        "start": "bench_start",
        "build": "bench",
    }
    called: dict[str, dict[str, Any]] = {}
    for suite, home in homes.items():
        module = importlib.import_module(f"leakmel.ops.{home}")
        signature = inspect.signature(getattr(module, f"bench_{suite}"))

        def run(
            *args: Any, suite: str = suite, signature: inspect.Signature = signature, **options: Any
        ) -> dict[str, Any]:
            called[suite] = signature.bind(*args, **options).arguments
            if suite == "build":
                raise LeakmelError("no room")
            return {"suite": suite, "made_utc": "2001-01-01T00:00:00+00:00", "commit": None}

        monkeypatch.setattr(module, f"bench_{suite}", run)
    with pytest.raises(LeakmelError, match="no room"):
        find_records(plan_bench(PARAMETERS | {"out": str(tmp_path / "out")}))
    assert list(called) == list(SUITES)
    assert {suite: c["n_files"] for suite, c in called.items()} == dict.fromkeys(SUITES, 24) | {"growth": 30}
    assert (called["compare"]["run_s"], called["compare"]["cold"], called["compare"]["only"]) == (
        0.5,
        True,
        ("dali",),
    )
    assert called["reader"]["listed"] == 40
    assert all(c["rounds"] == 2 for c in called.values())
    assert not Path(called["build"]["folder"]).exists(), "a temporary work folder is removed"
    assert sorted(p.name.split("-")[0] for p in (tmp_path / "out").iterdir()) == sorted(
        set(SUITES) - {"build"}
    )


def test_a_named_work_folder_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(
        bench_run,
        "_run_suite",
        lambda suite, plan, folder, say: {
            "suite": suite,
            "made_utc": "2001",
            "commit": None,
            "at": str(folder),
        },
    )
    given = {"folder": str(tmp_path / "work"), "out": str(tmp_path / "out"), "suites": "modes"}
    assert find_records(plan_bench(PARAMETERS | given))["modes"] == {
        "suite": "modes",
        "made_utc": "2001",
        "commit": None,
        "at": given["folder"],
    }
    assert (tmp_path / "work").is_dir()


def test_a_picture_keeps_its_note():
    png = (ROOT / "nbs" / "images" / "timeline.png").read_bytes()
    assert pictures.note_of(png) is None
    noted = pictures.with_note(png, "2001-02-03T04:05:06+00:00")
    assert pictures.note_of(noted) == "2001-02-03T04:05:06+00:00"
    assert noted.replace(noted[33 : 33 + len(noted) - len(png)], b"", 1) == png


def test_the_chart_says_not_measured_where_there_is_no_record(tmp_path):
    "As it is drawn by the command of the front page."
    need(
        find_spec("kaleido") and (shutil.which("chromium") or shutil.which("google-chrome")),
        "kaleido with a Chromium",
    )
    pictures.draw_compare(tmp_path, tmp_path / "images")
    assert pictures.note_of((tmp_path / "images" / "compare.png").read_bytes()) == "not measured"
