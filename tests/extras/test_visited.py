"Outcomes of visits: leakmel visited, the table of visits, and what a nightly run makes of it."

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from each import each
from made_detectors import made_detector
from test_nightly import QUIET, refused, write_nights
from test_nightly_history import run, scored_nights

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import UsageError
from leakmel.extras.nightly.history import HISTORY_FILE, History
from leakmel.extras.nightly.nights import (
    Visit,
    add_visit,
    last_visits,
    read_all_visits,
    recordings_of_visit,
    repaired,
    visit_results,
)
from leakmel.extras.nightly.run import (
    SENSORS_JSON,
    VISIT_LABELS_CSV,
    VISITS_CSV,
    VISITS_HTML,
    nightly,
    record_visit,
)
from leakmel.recordings.labels import read_decisions

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> Path:
    "State folder of five nights of three sensors."
    folder = tmp_path_factory.mktemp("nights")
    model = made_detector().save(folder / "model.pt")
    write_nights(folder / "r", range(1, 6), sensors=3)
    nightly(folder / "r", model, folder / "s", **QUIET)
    return folder / "s"


@pytest.fixture
def table(state) -> Any:
    yield state / VISITS_CSV
    (state / VISITS_CSV).unlink(missing_ok=True)


def again(state: Path) -> Any:
    return nightly(state.parent / "r", state.parent / "model.pt", state, **QUIET)


def test_a_visit_restarts_the_sensor_and_is_counted(state, table, capsys):
    words = ["visited", "P0", "2025-01-03", "leak", "--state", str(state), "--by", "ann"]
    assert main([*words, "--note", "joint, 2 m"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("P0: leak, visited after the night 2025-01-03 (")
    assert main(["visited", "P1", "4.1.2025", "no_access", *words[4:]]) == 0
    assert main(["visited", "P2", "2025-01-04", "no_leak", *words[4:], "--json"]) == 0
    body = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (body["sensor"], body["outcome"], body["visits"]) == ("P2", "no_leak", 3)
    with table.open(encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [(r["sensor"], r["night"], r["outcome"], r["by"]) for r in rows] == [
        ("P0", "2025-01-03", "leak", "ann"),
        ("P1", "2025-01-04", "no_access", "ann"),
        ("P2", "2025-01-04", "no_leak", "ann"),
    ]
    assert rows[0]["note"] == "joint, 2 m"
    done = again(state)
    assert {r.sensor: r.nights for r in done.sensors} == {"P0": 2, "P1": 5, "P2": 1}
    assert done.results["visits"] + done.results["leaks_not_listed"] <= 2
    assert "Visits so far: " in done.text()
    assert done.summary["visit_results"] == done.results
    page = (state / VISITS_HTML).read_text()
    assert done.visit_results.split(";")[0] in page
    assert "similar nights in a row raise the rate" in page
    assert f"  visits read from {table}\n" in done.text()
    crew = state.parent / "crew.csv"  # corrects P0, and has a night of P1
    crew.write_text("sensor,night,outcome\nP0,2025-01-03,no_access\nP1,2025-01-02,leak\n")
    both = nightly(state.parent / "r", state.parent / "model.pt", state, visited=crew, **QUIET)
    assert {r.sensor: r.nights for r in both.sensors} == {"P0": 5, "P1": 3, "P2": 1}
    assert f"visits read from {table}, corrected by {crew}" in both.text()
    assert both.summary["visit_tables"] == [str(table), str(crew)]
    assert main(["visited", "P1", "2025-01-02", "no_leak", *words[4:], "--table", str(crew)]) == 0
    assert "run reads them with --visited" in " ".join(capsys.readouterr().out.split())
    table.write_text("sensor,night\n")
    done = nightly(state.parent / "r", state.parent / "model.pt", state, visited=table, **QUIET)
    assert {r.nights for r in done.sensors} == {5}, "the tables are the truth"
    assert done.summary["visit_tables"] == [str(table)]
    assert "2 restarts undone" in done.text()
    assert "<code>leakmel visited P" in page


def test_visits_label_recordings_that_a_build_takes(state, table, capsys):
    "By their digests; a row corrects an earlier one."
    record_visit(state, "P0", "2025-01-04", "leak", by="ann")
    record_visit(state, "P1", "2025-01-03", "no_leak", by="ann")
    record_visit(state, "P2", "2025-01-05", "not_found", by="ann")
    again(state)
    labels = state / VISIT_LABELS_CSV
    with labels.open(encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [(r["path"][:6], r["label"], r["by"]) for r in rows] == [
        *((f"d{day}/P0~", "LEAK", "ann") for day in (2, 3, 4)),
        *((f"d{day}/P1~", "NOLEAK", "ann") for day in (1, 2, 3)),
    ]
    decisions = read_decisions(labels)
    assert len({d.digest for d in decisions}) == 6
    spec = lm.MelSpec.preset("disjoint", duration_s=1.0)
    built = lm.build(
        state.parent / "r", out=state.parent / "x.h5", spec=spec, labels=labels, progress="none", check=0
    )
    with lm.open_dataset(built.path) as ds:
        counts = ds.files["label"].value_counts()
    assert (counts["LEAK"], counts["NOLEAK"]) == (3, 3)  # others have the names of their folders
    recordings = str(state.parent / "r")
    words = ["build", recordings, "--duration-s", "1", "--check", "0", "--quiet", "--out"]
    assert main([*words, str(state.parent / "y.h5"), "--labels", str(labels)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "9 other recordings keep the label of their folder, name or table" in said
    assert main([*words, str(state.parent / "z.h5"), "--table", str(labels)]) == 0
    with lm.open_dataset(state.parent / "z.h5") as ds:
        assert ds.files["label"].value_counts().to_dict() == {"LEAK": 3, "NOLEAK": 3}
    before = read_all_visits(table)
    assert {v.reason for v in before} == {"audit", "not listed"}
    body = json.loads((state / SENSORS_JSON).read_text())
    for row in body["sensors"]:  # the list has changed since
        row["visit"] = "" if row["visit"] else "evidence"
    (state / SENSORS_JSON).write_text(json.dumps(body))
    for v in before:
        corrected, *_ = record_visit(state, v.sensor, v.night, "no_access")
        assert corrected.reason == v.reason
    with table.open(encoding="utf-8", newline="") as f:
        assert [r["reason"] for r in csv.DictReader(f)] == [v.reason for v in before] * 2
    done = again(state)
    assert "P0~" not in labels.read_text()
    assert {r.nights for r in done.sensors} == {5}, "as if they had never started again"
    fresh = nightly(state.parent / "r", state.parent / "model.pt", state.parent / "fresh", **QUIET)
    assert done.sensors == fresh.sensors
    (text,) = done.warnings
    assert text.startswith("3 restarts undone")
    assert "P0 (2025-01-04), P1 (2025-01-03), P2 (2025-01-05)" in text
    assert not again(state).warnings
    labels.write_text("my own\n")
    refused("other-file-in-the-way", lambda: again(state))
    labels.unlink()


def test_a_leak_labels_the_nights_since_the_scores_rose(tmp_path):
    run(tmp_path, scored_nights(20, leak_from=12))
    with History(tmp_path) as history:

        def nights_of(sensor: str, night: str, outcome: str, after: str = "") -> list[str]:
            found = recordings_of_visit(history, Visit(sensor, night, outcome), after)
            return [h.night[-2:] for h in found]

        assert nights_of("P2", "2026-11-18", "leak") == [str(k) for k in range(13, 19)]
        assert nights_of("P1", "2026-11-18", "leak") == ["16", "17", "18"]
        assert nights_of("P1", "2026-11-05", "no_leak", "2026-11-02") == ["03", "04", "05"]
        assert nights_of("P1", "2026-10-05", "leak") == []


@each(
    "sensor, night, outcome, code",
    [
        ("P9", "2025-01-03", "leak", "invalid-visits"),
        ("P0", "3 January", "leak", "invalid-visits"),
        ("P0", "2025-02-03", "leak", "invalid-visits"),
        ("P0", "1910-01-03", "leak", "invalid-visits"),
        ("P0", "2024-12-31", "leak", "invalid-visits"),  # before its first recording
        ("P0", "2025-01-03", "maybe", "unknown-choice"),
    ],
)
def test_wrong_visits_and_folders_are_refused(state, tmp_path, sensor, night, outcome, code):
    refused(code, lambda: record_visit(state, sensor, night, outcome))
    assert not (state / VISITS_CSV).exists()
    refused("no-such-file", lambda: record_visit(tmp_path, sensor, night, outcome))
    whole = (state / SENSORS_JSON).read_text()
    for text in (
        "[]",
        "{}",
        "",
        whole[:200],
        "[" * 100_000,
        whole.replace('"sensor"', '"x"'),
        '{"sensors": [1]}',
    ):
        (tmp_path / SENSORS_JSON).write_text(text)
        e = refused("damaged-record", lambda: record_visit(tmp_path, sensor, night, outcome))
        assert "run leakmel nightly again" in str(e)


def test_a_visit_after_a_night_without_recordings_is_recorded_with_a_warning(state, table, capsys):
    "The visit of a morning, before the loggers have sent the night; also while the history cannot be read."
    words = ["visited", "P0", "2025-01-07", "leak", "--state", str(state), "--by", "ann"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: no recording of this night yet, the last one is of 2025-01-05" in said
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warning"].startswith("no recording of this night yet")
    assert record_visit(state, "P0", "2025-01-05", "leak")[3] == ""
    history = state / HISTORY_FILE
    with History(state):
        assert record_visit(state, "P0", "2025-01-07", "leak")[3]
    whole = history.read_bytes()
    try:
        for content in (b"", b"garbage", whole[:5000]):
            history.write_bytes(content)
            assert record_visit(state, "P0", "2025-01-07", "leak")[3] == ""
    finally:
        history.write_bytes(whole)


def test_of_two_rows_of_a_visit_the_later_entry_counts(tmp_path):
    "In whichever table; without times a later row and a later table."
    head = "sensor,night,outcome,when,reason\n"
    own, crew = tmp_path / "visits.csv", tmp_path / "crew.csv"
    for ours, theirs, outcome in (
        ("2025-01-09T08:00:00Z", "2025-01-08T08:00:00Z", "leak"),
        ("2025-01-09T08:00:00Z", "2025-01-09T10:00:00Z", "no_leak"),
        ("2025-01-09T08:00:00Z", "2025-01-09T08:30:00+01:00", "leak"),
        ("2025-01-09T08:00:00Z", "", "no_leak"),
        ("2025-01-09T08:00:00Z", "2025-01-08T08:00:00", "no_leak"),  # of which zone?
        ("", "2025-01-08T08:00:00Z", "no_leak"),
        ("9.1.2025", "8.1.2025", "no_leak"),
    ):
        own.write_text(f"{head}P1,2025-01-03,leak,{ours},evidence\n")
        crew.write_text(f"{head}P1,2025-01-03,no_leak,{theirs},\nP1,2025-01-02,not_found,,\n")
        found = read_all_visits(own, crew)
        assert [(v.night[-1], v.outcome) for v in found] == [("3", outcome), ("2", "not_found")]
        assert found[0].reason == "evidence"
        assert last_visits(found) == {"P1": "2025-01-03"}
        assert bool(repaired(found)) == (outcome == "leak")


def test_tables_of_people_keep_their_columns_and_delimiter(tmp_path):
    "A later row corrects an earlier one."
    file = tmp_path / "v.csv"
    file.write_text("Sensor;Night;Outcome;lat\nA1;2.1.2025;No leak;48,2\n\n", encoding="utf-8-sig")
    assert add_visit(file, Visit("B;2", "2025-01-03", "leak", "ann")) == 2
    assert file.read_text(encoding="utf-8-sig").splitlines()[-1] == '"B;2";2025-01-03;leak;'
    assert [(v.sensor, v.outcome) for v in read_all_visits(file)] == [("A1", "no_leak"), ("B;2", "leak")]
    assert add_visit(file, Visit("B;2", "2025-01-03", "no_access")) == 2
    assert last_visits(read_all_visits(file)) == {"A1": "2025-01-02"}
    add_visit(file, Visit("B;2", "2025-01-03", "not_found"))
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "cp1252"):
        for end, behind in (("\n", ""), ("\r\n", ""), ("\r\n", "\r\n"), ("\n", "\n\n")):
            old = f"sensor\tnight\toutcome\tnote\nKöln\t2025-01-02\tleak\t\t{behind}".replace("\n", end)
            old = old.replace("\r\r", "\r")
            other = tmp_path / "other.csv"
            other.write_bytes(old.encode(encoding))
            assert add_visit(other, Visit("Köln", "2025-01-03", "leak", note="neben Öl")) == 2
            row = f"Köln\t2025-01-03\tleak\tneben Öl{end}"
            assert other.read_bytes() == f"{old}{'' if behind else end}{row}".encode(encoding)
    refused("invalid-visits", lambda: add_visit(other, Visit("Łódź", "2025-01-03", "leak")))
    assert other.read_bytes() == f"{old}{row}".encode("cp1252"), "these letters do not exist in Windows-1252"
    assert last_visits(read_all_visits(file)) == {"A1": "2025-01-02", "B;2": "2025-01-03"}


@each(
    "text", ["sensor,night\nP0,2025-01-02\n", "sensor,night,outcome\nP0,2025-01-02,perhaps\n", "a,b\n1,2\n"]
)
def test_a_table_that_cannot_be_read_stays_as_it_is(tmp_path, text):
    file = tmp_path / "v.csv"
    file.write_text(text)
    with pytest.raises(Exception, match=r"column|outcome"):
        add_visit(file, Visit("P1", "2025-01-03", "leak"))
    assert file.read_text() == text
    file.write_text("sensor,night,outcome,by,note\nP0,2025-01-02,leak,ann,\n")
    before = file.read_bytes()
    for c in ("\r", "\n", "\0", "\x1b", "\x85", "\u2028", "\udcff"):
        for words in ({"by": f"an{c}n"}, {"note": f"a{c}b"}):
            visit = Visit("P1", "2025-01-03", "leak", **words)
            e = refused("invalid-visits", partial(add_visit, file, visit))
            assert isinstance(e, UsageError)
            assert e.remedy
            assert file.read_bytes() == before
    note = 'a "quoted", note; 2 m'
    assert add_visit(file, Visit("P1", "2025-01-03", "leak", note=note)) == 2
    assert read_all_visits(file)[-1].note == note


def test_a_full_disk_loses_no_visit(tmp_path, monkeypatch):
    from leakmel.core import files

    file = tmp_path / "v.csv"
    add_visit(file, Visit("P1", "2025-01-03", "leak"))
    before = file.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(files.os, "fsync", full)
    refused("no-space", lambda: add_visit(file, Visit("P2", "2025-01-03", "leak")))
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["v.csv"]


def test_results_have_exact_intervals():
    "Clopper-Pearson for the precision, Garwood for the rate; audits and others are no visits of the list."
    visits = [
        Visit(f"P{k}", "2025-01-03", "leak" if k < 7 else "no_leak", reason="evidence") for k in range(10)
    ]
    visits += [
        Visit("A", "2025-01-03", "leak", reason="audit"),
        Visit("B", "2025-01-03", "leak", reason="not listed"),
    ]
    visits += [Visit("C", "2025-01-03", "no_access"), Visit("D", "2025-01-03", "no_leak", reason="audit")]
    found = visit_results(visits, 1000)
    assert (found["visits"], found["leaks"], found["leaks_not_listed"]) == (10, 7, 2)
    assert found["precision_interval"] == pytest.approx([0.3475, 0.9333], abs=1e-4)
    assert found["false_per_100_nights"] == 0.3
    assert found["false_interval"] == pytest.approx([0.0619, 0.8767], abs=1e-4)
    assert visit_results(visits[-2:-1], 1000) == {}
    one = visit_results(visits[:1], 1000)
    assert (one["precision_interval"][1], one["false_interval"][0]) == (1.0, 0.0)
