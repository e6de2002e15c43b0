"Nightly runs on folders of recordings: scores, repeated runs, crashes, copies, clocks, names, models, exit codes."

import csv
import errno
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from children import server
from each import each
from made_detectors import made_detector, noise, put
from spreadsheets import NAMED, as_saved, saved_again

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import LeakmelError
from leakmel.extras.nightly import history
from leakmel.extras.nightly import run as module
from leakmel.extras.nightly.history import HISTORY_FILE, History, HistoryEntry
from leakmel.extras.nightly.run import SENSORS_CSV, SENSORS_JSON, VISITS_HTML, RunCounts, nightly

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET: dict[str, Any] = {"device": "cpu", "progress": "none"}
TABLES = (SENSORS_CSV, SENSORS_JSON, VISITS_HTML)
WRITTEN = datetime(2025, 3, 1).timestamp()  # of every file


def name(sensor: str, day: int, gain: int = 24) -> str:
    return f"{sensor}~{day}~202501{day:02d}_230000~{gain}.wav"


def put_at(folder: Path, path: str, samples: np.ndarray) -> None:
    put(folder, path, samples)
    os.utime(folder / path, (WRITTEN, WRITTEN))


def write_nights(folder: Path, days: range, sensors: int = 2) -> Path:
    for day in days:
        for s in range(sensors):
            put_at(folder, f"d{day}/{name(f'P{s}', day)}", noise(100 * day + s, level=300 + 40 * s))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return made_detector().save(tmp_path_factory.mktemp("model") / "model.pt")


def dump(state: Path) -> list[str]:
    db = sqlite3.connect(state / HISTORY_FILE)
    try:
        return list(db.iterdump())
    finally:
        db.close()


def tables(state: Path) -> list[bytes]:
    return [(state / table).read_bytes() for table in TABLES]


def rows_of(state: Path) -> list[dict[str, str]]:
    with (state / SENSORS_CSV).open(encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def refused(code: str, call: Callable[[], Any]) -> LeakmelError:
    with pytest.raises(LeakmelError) as e:
        call()
    assert e.value.code == code
    return e.value


def stored_entries(state: Path) -> list[HistoryEntry]:
    with History(state) as opened:
        return [h for night in opened.nights() for h in opened.entries(night)]


def test_scores_are_those_of_predict(tmp_path, model):
    folder = write_nights(tmp_path / "r", range(1, 4))
    put_at(folder, f"long/{name('P9', 3)}", noise(7, 40_000))
    nightly(folder, model, tmp_path / "s", **QUIET)
    entries = stored_entries(tmp_path / "s")
    stored = {h.path: h.score for h in entries}
    levels = {h.path: h.rms_db for h in entries}
    table = lm.predict(folder, model, **QUIET).table
    assert stored == dict(zip(table["path"], table["score"], strict=True))
    assert levels == dict(zip(table["path"], table["rms_db"], strict=True))


@pytest.mark.slow
def test_objects_give_the_same_history_as_the_folder(tmp_path, model, monkeypatch):
    pytest.importorskip("moto")
    from object_server import stored

    folder = write_nights(tmp_path / "r", range(1, 4))
    here = nightly(folder, model, tmp_path / "here", **QUIET)
    with stored(folder, monkeypatch) as url:
        there = nightly(url, model, tmp_path / "there", **QUIET)
    assert not there.rejected
    assert replace(there.counts, times_from_file=0) == replace(here.counts, times_from_file=0)
    values = []
    for state in ("here", "there"):
        entries = stored_entries(tmp_path / state)
        values.append(sorted((h.path, h.score, h.floor_db, h.bands) for h in entries))
    assert len(values[0]) == 6
    assert values[0] == values[1]


def test_a_second_run_reads_nothing_and_writes_the_same(tmp_path, model, monkeypatch):
    folder = write_nights(tmp_path / "r", range(1, 9))
    (folder / name("P0", 1)).write_bytes(b"broken")
    nightly(folder, model, tmp_path / "s", **QUIET)
    before = tables(tmp_path / "s"), dump(tmp_path / "s")
    monkeypatch.setattr(module, "predict", lambda *a, **k: pytest.fail("a recording was read"))
    again = nightly(folder, model, tmp_path / "s", **QUIET)
    assert (tables(tmp_path / "s"), dump(tmp_path / "s")) == before
    assert again.counts == RunCounts(found=17, known=16, new=0, copies=0, rejected=1, times_from_file=0)
    assert [(r.path, r.code) for r in again.rejected] == [(name("P0", 1).encode(), "not_wav")]


def test_night_by_night_gives_the_tables_of_one_run(tmp_path, model):
    folder = tmp_path / "r"
    for day in range(1, 9):
        write_nights(folder, range(day, day + 1))
        nightly(folder, model, tmp_path / "parts", **QUIET)
    nightly(folder, model, tmp_path / "once", **QUIET)
    assert tables(tmp_path / "parts") == tables(tmp_path / "once")


def test_a_file_that_changed_is_read_again(tmp_path, model):
    folder = tmp_path / "r"
    bad = folder / name("P1", 2)
    put_at(folder, name("P0", 1), noise(1))
    bad.write_bytes(b"broken")
    os.utime(bad, (WRITTEN, WRITTEN))
    assert nightly(folder, model, tmp_path / "s", **QUIET).counts.rejected == 1
    put_at(folder, bad.name, noise(2))
    counts = nightly(folder, model, tmp_path / "s", **QUIET).counts
    assert (counts.known, counts.new, counts.rejected) == (1, 1, 0)


def test_files_that_cannot_be_opened_are_tried_again(tmp_path, model):
    if os.geteuid() == 0:
        table = tmp_path / "t.csv"
        table.write_text("path,sensor,start_time\na.wav,P0,1.1.2025 23:00\nb.wav,P1,1.1.2025 23:00\n")
        put_at(tmp_path / "r", "a.wav", noise(1))
        first = nightly(
            tmp_path / "r",
            model,
            tmp_path / "s",
            manifest=lm.scan(tmp_path / "r", table=table, with_labels=False),
            **QUIET,
        )
        put_at(tmp_path / "r", "b.wav", noise(2))
        second = nightly(
            tmp_path / "r",
            model,
            tmp_path / "s",
            manifest=lm.scan(tmp_path / "r", table=table, with_labels=False),
            **QUIET,
        )
    else:
        folder = write_nights(tmp_path / "r", range(1, 2))
        closed = folder / "d1" / name("P0", 1)
        closed.chmod(0)
        first = nightly(folder, model, tmp_path / "s", **QUIET)
        closed.chmod(0o644)
        second = nightly(folder, model, tmp_path / "s", **QUIET)
    assert (first.counts.new, first.counts.rejected) == (1, 1)
    assert (second.counts.known, second.counts.new, second.counts.rejected) == (1, 1, 0)


def test_copies_are_dropped_but_silence_is_not(tmp_path, model):
    folder = tmp_path / "r"
    put_at(folder, name("P0", 1), noise(1))
    put_at(folder, name("P1", 1), noise(1))  # a copy under another sensor
    for day in (1, 2, 3):
        put_at(folder, name("P2", day), np.zeros_like(noise(1)))
        put_at(folder, name("P3", day), np.zeros_like(noise(1)))
    done = nightly(folder, model, tmp_path / "s", **QUIET)
    assert (done.counts.new, done.counts.copies) == (7, 1)
    health = {r.sensor: r.health for r in done.sensors}
    assert (health["P2"], health["P3"]) == ("silent", "silent")


def test_clocks_that_are_wrong(tmp_path, model):
    folder = tmp_path / "r"
    put_at(folder, name("P0", 1), noise(1))
    for k, time in enumerate(("21060207_062815", "00010101_000000", "20251301_000000", "19700101_000000")):
        put_at(folder, f"P{k + 1}~1~{time}~24.wav", noise(k + 2))
    named = nightly(folder, model, tmp_path / "named", **QUIET)
    assert (named.counts.new, [r.code for r in named.rejected]) == (1, ["no_time"] * 4)
    assert "rejected: 4 x no_time, first P1~1~21060207" in named.text()
    done = nightly(folder, model, tmp_path / "s", time_from="file", **QUIET)
    assert (done.counts.new, done.counts.times_from_file) == (5, 4)
    assert done.last_night == "2025-01-01"  # that of the clock that is right


@each("sensor", ["P' OR 1=1; --", "<img src=x onerror=alert(1)>", "a\nb", "=cmd()", "x" * 190])
def test_hostile_names_of_sensors(tmp_path, model, sensor):
    folder = tmp_path / "r"
    put_at(folder, name(sensor.replace("/", ""), 1), noise(1))
    odd = os.fsencode(folder) + b"/\xff\xfe~1~20250101_230000~24.wav"
    (folder / name(sensor.replace("/", ""), 1)).rename(folder / "kept.wav")
    os.link(folder / "kept.wav", odd)
    (folder / "kept.wav").rename(folder / name(sensor.replace("/", ""), 1))
    put_at(folder, name("P1", 1), noise(2))
    done = nightly(folder, model, tmp_path / "s", **QUIET)
    assert (done.counts.new, done.counts.copies) == (2, 1)
    rows = rows_of(tmp_path / "s")
    assert [r["sensor"] for r in rows] == [r.sensor for r in done.sensors]
    assert json.loads((tmp_path / "s" / SENSORS_JSON).read_text())["sensors"][0]["rank"] == 1


def test_recordings_without_a_sensor(tmp_path, model):
    folder = tmp_path / "r"
    put_at(folder, "one.wav", noise(1))
    put_at(folder, "P7/20250101_230000.wav", noise(2))
    error = refused("no-sensor", lambda: nightly(folder, model, tmp_path / "s", **QUIET))
    assert "--pattern" in str(error)
    found = lm.scan(folder, pattern="{sensor}/{start_time}")
    done = nightly(folder, model, tmp_path / "s", manifest=found, **QUIET)
    assert [r.sensor for r in done.sensors] == ["P7"]
    assert [(r.path, r.code) for r in done.rejected] == [(b"one.wav", "no_sensor")]


def test_a_history_belongs_to_one_model(tmp_path, model):
    folder = write_nights(tmp_path / "r", range(1, 3))
    nightly(folder, model, tmp_path / "s", **QUIET)
    before = tables(tmp_path / "s"), dump(tmp_path / "s")
    refused("other-model", lambda: nightly(folder, made_detector(seed=5), tmp_path / "s", **QUIET))
    assert (tables(tmp_path / "s"), dump(tmp_path / "s")) == before
    nightly(folder, made_detector(record={"note": "evaluated"}), tmp_path / "s", **QUIET)


def test_a_second_run_at_the_same_time_is_refused(tmp_path, model, monkeypatch):
    folder = write_nights(tmp_path / "r", range(1, 3))

    def in_between(*args: Any, **given: Any) -> Any:
        refused("output-locked", lambda: nightly(folder, model, tmp_path / "s", **QUIET))
        return lm.predict(*args, **given)

    monkeypatch.setattr(module, "predict", in_between)
    assert nightly(folder, model, tmp_path / "s", **QUIET).counts.new == 4


@each("table", TABLES)
def test_files_of_others_are_not_replaced(tmp_path, model, table):
    folder = write_nights(tmp_path / "r", range(1, 2))
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / table).write_text("pipe,position\n")
    refused("other-file-in-the-way", lambda: nightly(folder, model, tmp_path / "s", **QUIET))
    (tmp_path / "s" / table).unlink()
    (tmp_path / "s" / table).symlink_to(tmp_path / "elsewhere")
    refused("other-file-in-the-way", lambda: nightly(folder, model, tmp_path / "s", **QUIET))
    (tmp_path / "s" / table).unlink()
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "s" / f".{table}.new").symlink_to(tmp_path / "victim")
    nightly(folder, model, tmp_path / "s", **QUIET)
    assert (tmp_path / "victim").read_text() == "kept"


def test_the_state_folder_lies_outside_the_recordings(tmp_path, model):
    folder = write_nights(tmp_path / "r", range(1, 2))
    (tmp_path / "link").symlink_to(folder)
    for state in (folder / "state", tmp_path / "link" / "state"):
        refused("output-in-source", lambda state=state: nightly(folder, model, state, **QUIET))  # type: ignore[misc]
    (tmp_path / "file").write_text("")
    refused("write-failed", lambda: nightly(folder, model, tmp_path / "file" / "state", **QUIET))


_LOADED = """
import torch
torch.set_num_threads(1)
from leakmel.extras.nightly import nights, run
from leakmel.extras.nightly.history import History
"""
_KILLED = """
import os, signal
folder, model, state, owner, name, when = {given}
owner, after = {{"History": History, "nights": nights, "os": os}}[owner], when == "after"
real = getattr(owner, name)
def killing(*args, **given):
    if after: real(*args, **given)
    os.kill(os.getpid(), signal.SIGKILL)
def arm(*args, **given):
    setattr(owner, name, killing)
    return armed(*args, **given)
armed, run.read_new = run.read_new, arm  # the model is loaded
run.nightly(folder, model, state, device="cpu", progress="none")
"""
KILLS = [
    ("nights", "record_run", "before"),
    ("nights", "record_run", "after"),
    ("nights", "keep_reference", "after"),
    ("History", "commit", "before"),
    ("History", "commit", "after"),
    ("nights", "sensor_table", "after"),
    ("os", "fsync", "before"),
    ("os", "replace", "before"),
    ("os", "replace", "after"),
]


@pytest.mark.slow
def test_a_killed_run_is_repeated_by_the_next(tmp_path, model):
    folder = write_nights(tmp_path / "r", range(1, 7))
    nightly(folder, model, tmp_path / "right", **QUIET)
    for k in range(len(KILLS)):
        shutil.copytree(tmp_path / "right", tmp_path / str(k))
    write_nights(folder, range(7, 9))
    nightly(folder, model, tmp_path / "right", **QUIET)
    with server(_LOADED) as children:
        ends = [
            children.run(code=_KILLED.format(given=(str(folder), str(model), str(tmp_path / str(k)), *words)))
            for k, words in enumerate(KILLS)
        ]
    for k, (words, done) in enumerate(zip(KILLS, ends, strict=True)):
        assert (done.status, done.hung) == (-signal.SIGKILL, False), done.err
        nightly(folder, model, tmp_path / str(k), **QUIET)
        assert tables(tmp_path / str(k)) == tables(tmp_path / "right"), words
        assert dump(tmp_path / str(k)) == dump(tmp_path / "right"), words
        names = {p.name for p in (tmp_path / str(k)).iterdir()}
        assert names == {p.name for p in (tmp_path / "right").iterdir()}, words


def test_a_full_disk_loses_nothing(tmp_path, model, monkeypatch):
    folder = write_nights(tmp_path / "r", range(1, 4))
    nightly(folder, model, tmp_path / "s", **QUIET)
    before = tables(tmp_path / "s")
    write_nights(folder, range(4, 6))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "fsync", full)
        error = refused("no-space", lambda: nightly(folder, model, tmp_path / "s", **QUIET))
    assert error.exit_code == 3
    assert tables(tmp_path / "s") == before
    nightly(folder, model, tmp_path / "s", **QUIET)
    nightly(folder, model, tmp_path / "fresh", **QUIET)
    assert tables(tmp_path / "s") == tables(tmp_path / "fresh")


def test_another_budget_gives_another_list(tmp_path, model):
    folder = write_nights(tmp_path / "r", range(1, 9))
    nightly(folder, model, tmp_path / "s", **QUIET)
    nightly(folder, model, tmp_path / "s", budget=10.0, **QUIET)
    nightly(folder, model, tmp_path / "fresh", budget=10.0, **QUIET)
    assert tables(tmp_path / "s") == tables(tmp_path / "fresh")
    refused("out-of-range", lambda: nightly(folder, model, tmp_path / "s", budget=0.0, **QUIET))
    refused("out-of-range", lambda: nightly(folder, model, tmp_path / "s", audits=-1, **QUIET))
    not_whole: Any = {**QUIET, "audits": 1.5}
    refused("out-of-range", lambda: nightly(folder, model, tmp_path / "s", **not_whole))


def test_command_line(tmp_path, model, capsys, monkeypatch):
    folder = write_nights(tmp_path / "r", range(1, 9))
    visits = tmp_path / "visits.csv"
    visits.write_text("sensor,night\nP0,2025-01-05\n")
    words = [
        "nightly",
        str(folder),
        "--model",
        str(model),
        "--state",
        str(tmp_path / "s"),
        "--device",
        "cpu",
        "--json",
    ]
    read_again = "leakmel.detector.model.detector.load_detector"
    monkeypatch.setattr(read_again, lambda *_: pytest.fail("the model is read twice"))
    assert main([*words, "--visited", str(visits), "--audits", "1"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["model"] == str(model)
    assert (body["ok"], body["new"], body["sensors"], body["audits"]) == (True, 16, 2, 1)
    rows = {r["sensor"]: r for r in rows_of(tmp_path / "s")}
    assert (rows["P0"]["nights"], rows["P1"]["nights"]) == ("3", "8")
    listed = (SimpleNamespace(sensor="P 0", last_night="2025-01-08"),)
    monkeypatch.setattr(lm.NightlyRun, "to_visit", listed)
    assert main([*words, "--exit-code"]) == 4
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main([*words[:-1], "--full"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    (line,) = re.findall(r"after a visit: (leakmel .*? --state \S+)", said)
    visited = ["leakmel", "visited", "P 0", "2025-01-08", "OUTCOME", "--state", str(tmp_path / "s")]
    assert shlex.split(line) == visited
    assert main(words[:4]) == 2
    assert main([*words, "--budget", "0"]) == 2
    assert main(["nightly", str(tmp_path / "none"), *words[2:]]) == 1


def test_a_table_without_labels_and_times(tmp_path, model):
    "Times come from the names; recordings that the table lacks are scored and counted."
    folder = write_nights(tmp_path / "r", range(1, 4))
    rows = [f"d{day}/{name(f'P{s}', day)},pipe {s},{50 + s},14" for day in (1, 2) for s in range(2)]
    (tmp_path / "t.csv").write_text("\n".join(["path,sensor,lat,lon", *rows]) + "\n")
    words = ["nightly", str(folder), "--model", str(model), "--state", str(tmp_path / "s"), "--device", "cpu"]
    assert main([*words, "--table", str(tmp_path / "t.csv"), "--quiet"]) == 0
    body = json.loads((tmp_path / "s" / SENSORS_JSON).read_text())
    assert {r["sensor"]: r["nights"] for r in body["sensors"]} == {"pipe 0": 2, "pipe 1": 2, "P0": 1, "P1": 1}
    assert body["last_night"] == "2025-01-03"
    assert any("2 of 6 recordings are not in the table" in text for text in body["warnings"])
    assert "leakmel retrain" not in (tmp_path / "s" / VISITS_HTML).read_text()  # advice on drift


def test_visits_that_cannot_be_are_reported_and_ignored(tmp_path, model):
    folder = write_nights(tmp_path / "r", range(1, 4))
    visits = tmp_path / "visited.csv"
    visits.write_text("sensor,night\nP0,2026-01-02\nP7,2025-01-02\nP1,2025-01-02\n")
    done = nightly(folder, model, tmp_path / "s", visited=visits, **QUIET)
    assert {r.sensor: r.nights for r in done.sensors} == {"P0": 3, "P1": 1}
    (text,) = done.warnings
    assert "P0 (2026-01-02), P7 (2025-01-02)" in text


@pytest.mark.slow
@each("d", NAMED.values(), ids=NAMED)
def test_tables_that_a_spreadsheet_saved(tmp_path, model, d):
    "Recordings, coordinates and visits; and sensors.csv, which a later run replaces."
    folder = write_nights(tmp_path / "r", range(1, 4))
    rows = [
        [f"d{day}/{name(f'P{s}', day)}", f"pipe {s}", f"{50 + s},5", "14,25"]
        for day in (1, 2, 3)
        for s in range(2)
    ]
    (tmp_path / "t.csv").write_bytes(as_saved([["path", "sensor", "lat", "lon"], *rows], d))
    (tmp_path / "v.csv").write_bytes(as_saved([["sensor", "night"], ["pipe 1", "2.1.2025"]], d, ()))
    words = [
        "nightly",
        str(folder),
        "--model",
        str(model),
        "--state",
        str(tmp_path / "s"),
        "--device",
        "cpu",
        "--quiet",
    ]
    words += ["--table", str(tmp_path / "t.csv"), "--visited", str(tmp_path / "v.csv")]
    assert main(words) == 0
    found = {r["sensor"]: r["nights"] for r in rows_of(tmp_path / "s")}
    assert found == {"pipe 0": "3", "pipe 1": "1"}
    assert "class='map'" in (tmp_path / "s" / VISITS_HTML).read_text()
    sensors = tmp_path / "s" / SENSORS_CSV
    before = sensors.read_bytes()
    sensors.write_bytes(saved_again(before, d, ("evidence", "trend", "score", "loudest_db")))
    assert main(words) == 0
    assert sensors.read_bytes() == before
    sensors.write_text("sensor,visit\n")
    assert main(words) != 0
    assert sensors.read_text() == "sensor,visit\n", "a table of a person"


@each("sensor", ["123", "1,23E+05"])
def test_sensors_that_a_spreadsheet_changed_are_noticed(tmp_path, model, sensor):
    folder = tmp_path / "r"
    for day in range(1, 4):
        put_at(folder, name("000123", day), noise(day))
    visits = tmp_path / "v.csv"
    visits.write_bytes(as_saved([["sensor", "night"], [sensor, "02.01.2025"]], NAMED["German Excel"]))
    done = nightly(folder, model, tmp_path / "s", visited=visits, **QUIET)
    (text,) = done.warnings
    assert f"{sensor} (2025-01-02)" in text
    assert "named like 000123 " in text


def test_a_wrong_clock_does_not_move_the_last_night(tmp_path, model):
    folder = write_nights(tmp_path / "r", range(1, 4))
    put_at(folder, "P0~9~20990101_230000~24.wav", noise(9))
    done = nightly(folder, model, tmp_path / "s", time_from="file", **QUIET)
    assert (done.last_night, done.counts.times_from_file) == ("2025-01-03", 1)


@each("written", [0, datetime(2099, 1, 1).timestamp()])
def test_a_file_without_a_plausible_time(tmp_path, model, written):
    "A name with a plausible time counts, one that lies in the future does not."
    folder = write_nights(tmp_path / "r", range(1, 3))
    put_at(folder, "P0~9~20990101_230000~24.wav", noise(9))
    for file in folder.rglob("*.wav"):
        os.utime(file, (written, written))
    assert nightly(folder, model, tmp_path / "named", **QUIET).counts.new == 4
    done = nightly(folder, model, tmp_path / "s", time_from="file", **QUIET)
    assert (done.last_night, done.counts.times_from_file) == ("2025-01-02", 1)


def test_another_program_uses_the_history(tmp_path, model, monkeypatch):
    folder = write_nights(tmp_path / "r", range(1, 3))
    nightly(folder, model, tmp_path / "s", **QUIET)
    write_nights(tmp_path / "r", range(3, 4))
    with sqlite3.connect(tmp_path / "s" / HISTORY_FILE, isolation_level=None) as db:
        db.execute("BEGIN IMMEDIATE")
        with monkeypatch.context() as patched:  # SQLite would wait for five seconds
            patched.setattr(history.sqlite3, "connect", partial(sqlite3.connect, timeout=0.1))
            refused("output-locked", lambda: nightly(folder, model, tmp_path / "s", **QUIET))
    db.close()
    assert nightly(folder, model, tmp_path / "s", **QUIET).counts.new == 2


def test_a_wrong_clock_alone_does_not_move_the_last_night(tmp_path, model):
    folder = write_nights(tmp_path / "r", range(1, 3))
    nightly(folder, model, tmp_path / "s", **QUIET)
    put_at(folder, "P0~9~20990101_230000~24.wav", noise(9))
    by_file: dict[str, Any] = {"time_from": "file", **QUIET}
    assert nightly(folder, model, tmp_path / "s", **by_file).last_night == "2025-01-02"
    put_at(folder, "P0~without a time~24.wav", noise(10))
    found = lm.scan(folder, pattern="{sensor}~{*}")
    assert nightly(folder, model, tmp_path / "s", manifest=found, **by_file).last_night == "2025-02-28"


def test_touched_files_are_known(tmp_path, model):
    folder = write_nights(tmp_path / "r", range(1, 3))
    put_at(folder, "silent/P5~1~x~24.wav", np.zeros_like(noise(1)))
    first = nightly(folder, model, tmp_path / "s", time_from="file", **QUIET)
    for file in folder.rglob("*.wav"):
        os.utime(file, (WRITTEN + 9, WRITTEN + 9))
    second = nightly(folder, model, tmp_path / "s", time_from="file", **QUIET)
    assert first.counts.new == 5
    assert (second.counts.known, second.counts.new, second.counts.copies) == (5, 0, 0)


@each("form", ["noon{}", "S2025010{}_230000", "173577240{}"])
@each("source", ["pattern", "table"])
def test_promised_times_that_no_recording_has_are_an_error(tmp_path, model, form, source):
    "Else all recordings would be dated by the copy; where it is asked for, the times of the files count, and the result says so."
    for day in (1, 2):
        put_at(tmp_path / "r", f"P0/{form.format(day)}.wav", noise(day))
    table = tmp_path / "t.csv"
    lines = [f"P0/{form.format(day)}.wav,P0," for day in (1, 2)]
    table.write_text("\n".join(["path,sensor,start_time", *lines]))
    given: dict[str, Any] = {"pattern": "{sensor}/{start_time}"} if source == "pattern" else {"table": table}
    promised = lm.scan(tmp_path / "r", **given, with_labels=False)
    error = refused(
        "no-times", lambda: nightly(tmp_path / "r", model, tmp_path / "s", manifest=promised, **QUIET)
    )
    for word in (
        "20251110_020000",
        f"P0/{form.format(2)}.wav",
        "--time-from file",
        "--pattern '{**}/{sensor}/{*}'",
    ):
        assert word in str(error)
    assert not (tmp_path / "s" / SENSORS_CSV).exists()
    free = lm.scan(tmp_path / "r", pattern="{sensor}/{recording}")
    done = nightly(tmp_path / "r", model, tmp_path / "s", manifest=free, time_from="file", **QUIET)
    assert (done.counts.new, done.counts.times_from_file) == (2, 2)
    assert "2 new recordings have no valid time in their name" in done.text()


def test_times_of_other_loggers_date_the_nights(tmp_path, model):
    for k, form in enumerate(
        ("2025010{}_230000T", "2025-01-0{}T23-00-00", "2025010{}_230000_123", "SM4_0+1_2025010{}$230000")
    ):
        for day in (1, 2):
            put_at(tmp_path / "r", f"P{k}/{form.format(day)}.WAV", noise(10 * k + day))
    found = lm.scan(tmp_path / "r", pattern="{sensor}/{start_time}")
    done = nightly(tmp_path / "r", model, tmp_path / "s", manifest=found, **QUIET)
    assert (done.counts.new, done.counts.times_from_file, done.last_night) == (8, 0, "2025-01-02")
