"The dashboard: which folders are runs, what is read of them, and the notebook as papermill runs it."

import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from each import each
from errors import raises
from notebook_runs import PLOTLY, Run, copy_project, error_of, papermill, run_here, titles_of

import leakmel as lm
from leakmel.core import timeline as diagnose
from leakmel.core.errors import DataError, UsageError
from leakmel.core.timeline import Span, Timeline
from leakmel.dataset.config import PipelineConfig
from leakmel.pages.dashboard import (
    NO_TIMELINE,
    RunRecord,
    advice,
    build_card,
    data_table,
    differing_settings,
    find_runs,
    joined_timelines,
    mel_pictures,
    modified_data_sets,
    read_run,
    read_runs,
    run_card,
    runs_table,
    spectra_figure,
)
from leakmel.pages.plots import batch_timeline, exclusive_bar, utilization
from leakmel.recordings.demo import write_demo

ROOT = Path(__file__).resolve().parents[2]
SPEC = {"sample_rate": 4096, "duration_s": 10}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    "A folder of three runs, of which `b` is the newest, beside folders that are none."
    root = tmp_path_factory.mktemp("dashboard")
    write_demo(root / "demo", n_files=24, faults=True)
    for k, name in enumerate(("c", "a", "b")):
        results = lm.build_all(
            root / "demo",
            out_dir=root / "runs" / name,
            spec=SPEC,
            progress="none",
            pipeline=PipelineConfig(files_per_batch=2 + k),
        )
        assert build_card(results).ok
        for path in (root / "runs" / name).iterdir():
            os.utime(path, (1000 + k, 1000 + k))
    (root / "runs" / "demo" / "TRAINING").mkdir(parents=True)
    (root / "runs" / ".hidden").mkdir()
    (root / "runs" / ".hidden" / "x.H5").touch()
    return root / "runs"


@pytest.fixture
def copied(runs, tmp_path) -> Path:
    "One of the runs, to be spoilt."
    return Path(shutil.copytree(runs / "b", tmp_path / "copied"))


def seconds_of(run: RunRecord) -> float:
    "The seconds of a run, which says them."
    assert run.seconds is not None
    return run.seconds


# ---- which folders -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_folder_of_runs_gives_its_newest(runs):
    assert [p.name for p in find_runs(str(runs))] == ["b", "a", "c"]
    assert [p.name for p in find_runs(str(runs), most=2)] == ["b", "a"]


def test_a_named_run_is_that_run(runs, tmp_path):
    assert find_runs(f"{runs}/c") == [runs / "c"]


@each(
    ("name", "message"),
    [
        ("empty", "the folder contains no run"),
        ("nowhere", "the folder does not exist"),
        ("file", "the folder does not exist"),
    ],
)
def test_a_folder_without_a_run_is_an_error_with_its_path_and_a_remedy(tmp_path, name, message):
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=message) as caught:
        find_runs(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)
    assert "leakmel build" in str(caught.value)


def test_invalid_values_are_refused(runs):
    with pytest.raises(UsageError, match="compare must be a whole number of at least 1"):
        find_runs(str(runs), most=0)


# ---- what is read --------------------------------------------------------------------------------------------------


def test_run_record_equals_the_build(runs):
    run = read_run(runs / "b")
    assert (run.total("found"), len(run.data_sets), len(run.distinct_timelines)) == (
        sum(r["found"] for r in run.reports.values()),
        3,
        1,
    )
    assert next(iter(run.reports)) == "TRAINING_DATASET.H5", "the largest comes first"
    (clock,) = run.distinct_timelines
    assert {s.split for s in clock.spans if s.split} == {"TRAINING", "VALIDATION", "TESTING"}
    assert min(s.start_s for s in clock.spans) < 0.1, "imports are not on the clock"
    assert run.files_per_s == pytest.approx(run.total("found") / seconds_of(run))


def test_no_span_is_counted_twice_when_splits_are_put_together():
    common = [Span("start_up", "imports", 0.0, 2.0), Span("start_up", "main", 2.0, 2.5)]
    parts = {n: Timeline() for n in "AB"}
    for k, (n, t) in enumerate(parts.items()):
        t.spans = [*common, Span("read", "reader", 3.0 + k, 3.5 + k, n)]
        t.samples = [{"time_s": 1.0}, {"time_s": 2.5}, {"time_s": 3.0}, {"time_s": 4.0}][: 3 + k]
        t.meta = {"clock_origin_s": 7.0}
    joined = joined_timelines(parts)
    whole = joined["A"]
    assert joined["B"] is whole
    assert [(s.stage, s.start_s) for s in whole.spans] == [("start_up", 0.0), ("read", 1.0), ("read", 2.0)]
    assert [s["time_s"] for s in whole.samples] == [0.5, 1.0, 2.0]


def test_builds_one_after_the_other_have_clocks_of_their_own(copied, runs):
    lm.build(
        runs.parent / "demo",
        split="testing",
        out=copied / "TESTING_DATASET.H5",
        spec=SPEC,
        fresh=True,
        progress="none",
    )
    run = read_run(copied)
    assert len(run.distinct_timelines) == 2
    assert run.timelines["TRAINING_DATASET.H5"] is run.timelines["VALIDATION_DATASET.H5"]
    assert advice(run).index("VALIDATION") < advice(run).index("TESTING"), (
        "those that were built together come first"
    )


@each("text", ["{", "[]", "{}"])
def test_damaged_report_is_named(copied, text):
    path = copied / "TESTING_DATASET.H5.report.json"
    path.write_text(text)
    with raises("damaged-record", path=path):
        read_run(copied)


STRANGE = "<img src=x onerror=alert(1)>"
R, T = "TRAINING_DATASET.H5.report.json", "TRAINING_DATASET.H5.timeline.json"


@each("change", [{"found": "x"}, {"found": None}, {"verified": []}, {"seconds": {}}, {"machine": 1}])
def test_a_value_of_another_type_is_reported(copied, change):
    body = json.loads((copied / R).read_text())
    (copied / R).write_text(json.dumps(body | change))
    with raises("damaged-record", path=copied / R):
        read_run(copied)


@each("name", [R, T])
@each("content", [b"[" * 100_000, b'{"schema": 2', b"\xff\xfe\x00", b"[1]", b"1", b""])
def test_invalid_json_file_is_named(copied, name, content):
    (copied / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_run(copied)
    assert str(copied / name) in str(caught.value)


def test_hostile_text_is_escaped(copied):
    "Names with tags are shown as they are written, in text, HTML and figures."
    body, times = json.loads((copied / R).read_text()), json.loads((copied / T).read_text())
    changes = dict.fromkeys(
        ("root", "engine", "device", "mode", "cache", "span_name", "created_at_utc", "leakmel_version"),
        STRANGE,
    )
    body |= changes | {
        "label_names": [STRANGE],
        "status_counts": {STRANGE: 1},
        "problems_by_kind": {STRANGE: 1},
    }
    body["machine"] |= {"cpu": STRANGE, "os": STRANGE}
    body["verified"]["verdict"] = STRANGE
    times["spans"]["split"] = [STRANGE if s == "TRAINING" else s for s in times["spans"]["split"]]
    times["spans"]["lane"] = [s + STRANGE for s in times["spans"]["lane"]]
    times["gauges"] = [[STRANGE, 0.0, 1.0], [STRANGE, 0.1, 2.0]]
    times["meta"]["engine"] = STRANGE
    (copied / R).write_text(json.dumps(body))
    (copied / T).write_text(json.dumps(times))
    run = read_run(copied)
    card = run_card(run)
    draws = (exclusive_bar, batch_timeline, utilization)
    figures = [draw(t) for t in run.distinct_timelines for draw in draws]
    assert "<img" in repr(card), "text is shown as it is"
    assert "<img" not in card._repr_html_() + "".join(f.to_json() for f in figures)


def test_damaged_run_is_left_out_of_the_comparison(copied, runs):
    (copied / R).write_text("{")
    found, skipped = read_runs([runs / "a", copied, runs / "b"])
    assert [r.folder.name for r in found] == ["a", "b"]
    assert len(skipped) == 1
    assert str(copied / R) in skipped[0]
    with raises("damaged-record", path=copied / R):
        read_runs([copied, runs / "a"])


# ---- what is said --------------------------------------------------------------------------------------------------


def test_run_card_has_verdict_time_machine_and_data(runs, monkeypatch):
    monkeypatch.setattr(diagnose, "MIN_ANALYSED_S", 0)  # a fast machine builds so few recordings in less
    run = read_run(runs / "b")
    card = run_card(run)
    text, page = repr(card), card._repr_html_()
    rows, rejected = (sum(r[key] for r in run.reports.values()) for key in ("rows", "rejected"))
    assert card.ok
    assert text.startswith(f"{rows:,} rows, all data sets verified")
    for words in (
        f"{run.files_per_s:,.0f} files/s end to end",
        "The limiting stage is",
        f"{rows} rows + {rejected} rejected = {run.total('found')}",
        " UTC",
        f"{os.cpu_count()} cores" if os.cpu_count() == len(os.sched_getaffinity(0)) else "cores",
        str(runs.parent / "demo"),
        "LEAK, NOLEAK",
        "1 x clipped",
        "TESTING_DATASET.H5",
        "cpu@",
    ):
        assert words in text, words
    assert "#2e8b57" in page
    assert "http" not in page


def test_a_data_set_that_was_not_verified_is_not_green(copied):
    path = copied / "TESTING_DATASET.H5.report.json"
    body = json.loads(path.read_text())
    body["verified"]["ok"] = False
    path.write_text(json.dumps(body))
    card = run_card(read_run(copied))
    assert (card.ok, card.title) == (False, "NOT verified")
    assert "#c0392b" in card._repr_html_()
    assert " NO " in runs_table([read_run(copied)])


@pytest.mark.slow
def test_a_data_set_that_changed_since_is_not_green(copied):
    path = copied / "TRAINING_DATASET.H5"
    path.write_bytes(path.read_bytes()[:-1000])
    run = read_run(copied)
    card = run_card(run)
    assert modified_data_sets(run) == ("TRAINING_DATASET.H5",)
    assert (card.ok, card.title) == (False, "CHANGED after verification: TRAINING_DATASET.H5")
    assert "changed after verification" in " ".join(repr(card).split())
    table, skipped = data_table(run)
    assert "TRAINING_DATASET.H5 was skipped" in skipped[0]
    assert set(table["split"]) == {"VALIDATION", "TESTING"}
    for draw in (spectra_figure, mel_pictures):
        assert "No recording can be shown" in draw(path).layout.title.text


@pytest.mark.slow
@each("part", ["mel_hz", "long_start_s", "files/rms_db", "files/sensor", "files/silent"])
def test_data_set_with_a_damaged_part_is_drawn(copied, part):
    for value in (None, np.zeros(1), np.array([b"x"])):
        with h5py.File(copied / "TRAINING_DATASET.H5", "r+") as f:
            if part in f:
                del f[part]
            if value is not None:
                f[part] = value
        run = read_run(copied)
        assert len(data_table(run)[0]) > 0
        for draw in (spectra_figure, mel_pictures):
            assert draw(run.data_sets[0]).layout.title.text.replace("<br>", " ")


def test_reused_rows_are_reported(copied, runs):
    body = json.loads((copied / R).read_text())
    (copied / R).write_text(json.dumps(body | {"kept_rows": 3, "cache": "cold"}))
    run, other = read_run(copied), read_run(runs / "a")
    assert "3 rows reused" in " ".join(repr(run_card(run)).split())
    head, _, *lines = runs_table([run, other]).splitlines()
    at = head.index("files/s")
    first, second = (line[at : at + len("files/s")].strip() for line in lines[:2])
    assert first == "", "its rate is not one of building"
    assert second == f"{other.files_per_s:,.0f}"
    assert "reused" not in repr(run_card(other))


def test_names_are_escaped_in_html(copied):
    (copied / "TESTING_DATASET.H5").rename(copied / "<b>x.H5")
    assert "<b>x" not in run_card(read_run(copied))._repr_html_()
    assert "&lt;b&gt;x.H5" in run_card(read_run(copied))._repr_html_()


def test_missing_files_are_reported(copied):
    for path in copied.glob("*.timeline.json"):
        path.unlink()
    run = read_run(copied)
    assert advice(run) == NO_TIMELINE
    assert run.seconds == sum(r["seconds"] for r in run.reports.values())
    for path in copied.glob("*.H5"):
        path.unlink()
    run = read_run(copied)
    assert "file missing" in repr(run_card(run))
    assert len(data_table(run)[0]) == 0
    for draw in (spectra_figure, mel_pictures):
        assert "No recording" in draw(None).layout.title.text


@pytest.mark.slow
def test_data_sets_alone_are_enough_for_the_pictures_of_the_data(copied):
    for path in copied.glob("*.json"):
        path.unlink()
    (copied / "foreign.h5").write_bytes(b"something else")
    run = read_run(copied)
    (table, skipped), card = data_table(run), run_card(run)
    assert (card.ok, run.files_per_s, run.distinct_timelines) == (None, None, [])
    assert "without a report" in card.title
    assert len(table) > 0
    assert len(skipped) == 1
    assert "foreign.h5 was skipped" in skipped[0]
    assert run.folder.name in runs_table([run])


@pytest.mark.slow
def test_facts_are_those_of_the_data_sets(runs):
    table, skipped = data_table(read_run(runs / "b"))
    assert skipped == []
    n = 0
    for name in ("TRAINING", "VALIDATION", "TESTING"):
        with lm.open_dataset(runs / "b" / f"{name}_DATASET.H5") as ds:
            mine = slice(n, n + len(ds))
            own = table.iloc[mine]
            assert list(own["split"]) == [name] * len(ds)
            assert list(own["label"]) == list(ds.files["label"])
            np.testing.assert_allclose(own["rms_db"], ds.files["rms_db"])
            n += len(ds)
    assert n == len(table)
    path = runs / "b" / "TRAINING_DATASET.H5"
    with lm.open_dataset(path) as ds:
        expected = ds[0][0].astype(np.float64).mean(axis=(0, 1, 3))
    np.testing.assert_allclose(spectra_figure(path, most=1).data[-1].y, expected, rtol=1e-4)


# ---- comparison ----------------------------------------------------------------------------------------------------


def test_settings_that_differ_are_named_and_no_others(runs):
    both = [read_run(runs / n) for n in "ac"]
    differing = differing_settings(both)
    assert differing["files_per_batch"] == [3, 2]
    assert set(differing) <= {"files_per_batch", "slots", "compute_workers"}, "what follows from it"
    assert "files_per_batch: 3, 2" in runs_table(both)
    assert "All settings are the same." in runs_table([both[0], both[0]])


# ---- the notebook --------------------------------------------------------------------------------------------------


def dashboard(project: Path, *args: str) -> Run:
    shutil.copy(ROOT / "nbs" / "dashboard.ipynb", project / "nbs")
    return papermill(project, *args, notebook="dashboard.ipynb")


@pytest.fixture(scope="module")
def executed(tmp_path_factory, runs) -> Run:
    return dashboard(copy_project(tmp_path_factory.mktemp("executed")), "-r", "run", str(runs))


@pytest.mark.slow
def test_the_notebook_shows_all_of_a_run(executed, runs):
    assert executed.status == 0, executed.log
    assert executed.errors == []
    titles = titles_of(executed)
    assert len(titles) == 7
    assert "all data sets verified" in executed.text
    assert str(runs / "b") in executed.text
    assert "files_per_batch: 4, 3, 2" in executed.text
    assert advice(read_run(runs / "b")) in executed.text
    for name in ("TRAINING", "VALIDATION", "TESTING"):
        assert f"PERFORMANCE ANALYSIS: {name}" in executed.text
    assert not any("widget" in kind for o in executed.outputs for kind in o.get("data", {})), (
        "complete without a kernel"
    )
    assert executed.notebook.stat().st_size < 3_500_000
    assert "http" not in executed.text


@pytest.mark.slow
def test_a_session_chooses_run_split_and_row(tmp_path, runs, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "dashboard.ipynb")
    run = dashboard(copy_project(tmp_path), "-r", "run", str(runs))
    assert run.errors == []
    widgets = [o for o in run.outputs if any("widget-view" in kind for kind in o.get("data", {}))]
    assert len(widgets) == 2
    path = read_run(runs / "b").data_sets[0]
    with lm.open_dataset(path) as ds:
        assert mel_pictures(path, 10**6).layout.annotations[0].text.startswith(f"{len(ds) - 1}: ")


@pytest.mark.slow
def test_every_figure_of_the_notebook_has_axes_with_units(executed):
    figures = [o.data[PLOTLY] for o in executed.outputs if PLOTLY in o.get("data", {})]
    for figure in figures:
        assert len(json.dumps(figure)) < 2_000_000
        if not figure["data"]:
            continue  # a sentence
        axes = [a for k, a in figure["layout"].items() if k.startswith("xaxis")]
        assert any(a.get("title", {}).get("text") for a in axes), figure["layout"]["title"]["text"]


@pytest.mark.slow
def test_notebook_finds_the_newest_run_of_the_project(tmp_path, runs, monkeypatch):
    project = copy_project(tmp_path)
    monkeypatch.chdir(project / "nbs")
    assert "the folder does not exist" in error_of("dashboard.ipynb")
    assert not (project / "runs").exists()
    shutil.copytree(runs / "a", project / "runs" / "20260101-000000-all-0123456789ab")
    run = run_here("dashboard.ipynb")
    assert run.error == ""
    assert "20260101-000000-all-0123456789ab" in run.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"runs": "x", "compare": "many"}, "runs is unknown; did you mean run?"),
        ({"compare": "many"}, "compare must be a whole number, got 'many'"),
    ],
)
def test_a_wrong_parameter_stops_the_dashboard(given, message):
    assert message in error_of("dashboard.ipynb", **given)
