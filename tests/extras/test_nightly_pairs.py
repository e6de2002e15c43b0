"""nightly --pairs: places between loggers in list, page, JSON and map; a failed correlation loses nothing else."""

import json
import shutil
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from each import each

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError
from leakmel.extras.nightly import run

pytest.importorskip("scipy")
from test_nightly import QUIET
from test_pairs import KEYS, STATE_FILE, line_of

pytestmark = pytest.mark.usefixtures("one_thread")
PLACE = "between LOG1001 and LOG1002, 43 m from LOG1001 ("


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return recordings of two nights, the table of pairs, and a table of recordings with coordinates."""
    folder = tmp_path_factory.mktemp("line")
    recordings, pairs = line_of(folder, 1.1, 2)
    rows = (
        f"{p.name},{p.name[:7]},2025-11-{p.name.split('~')[2][6:8]}T02:00:00,50.0,{10 + int(p.name[6]) / 1000}\n"
        for p in sorted(recordings.iterdir())
    )
    table = folder / "recordings.csv"
    table.write_text("path,sensor,start_time,lat,lon\n" + "".join(rows))
    return recordings, pairs, table


def words(line: tuple[Path, Path, Path], state: Path, *more: str) -> list[str]:
    recordings, pairs, table = map(str, line)
    return [
        "nightly",
        recordings,
        "--state",
        str(state),
        "--pairs",
        pairs,
        "--table",
        table,
        "--quiet",
        *more,
    ]


def test_an_event_joins_the_list(
    tmp_path: Path, line: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(line, tmp_path, "--audits", "4", "--json")) == 0
    body = json.loads(capsys.readouterr().out)
    (event,) = body["events"]
    assert list(event) == KEYS
    assert event["event"].startswith(PLACE)
    assert json.loads((tmp_path / "sensors.json").read_text())["events"] == [event]
    named = {row["sensor"]: f"Noise {event['event']}." in row["reason"] for row in body["visits"]}
    assert named == {"LOG1001": True, "LOG1002": True, "LOG1003": False, "LOG1004": False}
    page = (tmp_path / "visits.html").read_text()
    assert f"<p class='verdict hot'>Noise {event['event']}</p>" in page
    assert "href='pairs/pairs.html'" in page
    assert f"B{PLACE[1:]}" in (tmp_path / "pairs" / "pairs.html").read_text()
    *points, line_on_map = json.loads((tmp_path / "visits.geojson").read_text())["features"]
    assert {point["geometry"]["type"] for point in points} == {"Point"}
    (x, y), (to, _) = line_on_map["geometry"]["coordinates"]
    assert line_on_map["geometry"]["type"] == "LineString"
    assert (x, to, y) == pytest.approx((10.001 + event["low_m"] / 6e4, 10.001 + event["high_m"] / 6e4, 50.0))
    # nothing new: the same answer, and an event is evidence
    assert main(words(line, tmp_path, "--exit-code")) == 4
    said = capsys.readouterr().out
    assert said.splitlines()[1].startswith(f"  noise {PLACE}")
    assert f" pictures and sounds: {tmp_path / 'pairs' / 'pairs.html'} " in " ".join(said.split())


def test_a_failed_correlation_loses_no_sensor(
    tmp_path: Path, line: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / STATE_FILE).write_text("no database at all" * 100)
    assert main(words(line, tmp_path)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  warning: the sensors are listed, but pairs were not correlated:")
    assert lines[-1].startswith("next: leakmel correlate ")
    assert [word in lines[-1] for word in ("--pairs ", "--table ", f"--state {tmp_path / 'pairs'}")] == [
        True
    ] * 3
    assert len(json.loads((tmp_path / "sensors.json").read_text())["sensors"]) == 4
    assert "pairs were not correlated" in (tmp_path / "visits.html").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["ok"], summary["events"], summary["new"]) == (False, [], 8)
    assert summary["warnings"][0] == summary["pairs_failed"]
    # after the repair
    shutil.rmtree(tmp_path / "pairs")
    assert main(words(line, tmp_path, "--json")) == 0
    body = json.loads(capsys.readouterr().out)
    assert (len(body["events"]), body["known"], body["ok"], body["pairs_failed"]) == (1, 8, True, "")
    # a place that was known stays in list, page and map, and so do its reasons
    listed, layer = (tmp_path / name for name in ("sensors.json", "visits.geojson"))
    known = json.loads(listed.read_text()), json.loads(layer.read_text())["features"][-1]
    (tmp_path / "pairs" / STATE_FILE).write_text("no database at all" * 100)
    assert main(words(line, tmp_path)) == 1
    left = json.loads(listed.read_text())
    assert (left["events"], left["sensors"]) == (known[0]["events"], known[0]["sensors"])
    assert "pairs were not correlated" in left["warnings"][0]
    assert json.loads(layer.read_text())["features"][-1] == known[1]
    assert f"Noise {PLACE}" in (tmp_path / "visits.html").read_text()


def test_a_correlation_that_is_stopped_leaves_the_list(
    tmp_path: Path, line: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any, **given: Any) -> None:
        raise KeyboardInterrupt

    sent: list[tuple] = []
    monkeypatch.setattr(run, "deliver", lambda *given: sent.append(given))
    lm.nightly(line[0], state=tmp_path, pairs=line[1], **QUIET)
    monkeypatch.setattr(lm, "correlate_pairs", stopped)
    with pytest.raises(KeyboardInterrupt):
        lm.nightly(line[0], state=tmp_path, pairs=line[1], notify="http://127.0.0.1:9/", **QUIET)
    left = json.loads((tmp_path / "sensors.json").read_text())
    assert (len(left["sensors"]), len(left["events"]), len(sent)) == (4, 1, 1)


@each(
    "text, status, said",
    [
        ("a,length_m\nLOG1001,60\n", 1, "no column b"),
        ("a,b,length_m,speed_m_s\nLOG1001,LOG1002,60,fast\n", 1, "line 2: 'fast' is not a number"),
        ("", 2, "the name of the table of pairs is empty"),
    ],
)
def test_a_wrong_table_is_told_before_the_night_is_scored(
    tmp_path: Path,
    line: tuple[Path, Path, Path],
    capsys: pytest.CaptureFixture[str],
    text: str,
    status: int,
    said: str,
) -> None:
    table = tmp_path / "wrong.csv"
    table.write_text(text)
    assert main(words(line, tmp_path / "state", "--pairs", str(table) if text else "")) == status
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "state").exists()


def test_loggers_without_a_recording(
    tmp_path: Path, line: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recordings, pairs, table = line
    unknown = tmp_path / "unknown.csv"
    unknown.write_text("a,b,length_m,speed_m_s\nX,Y,60,1000\n")
    assert main(words((recordings, unknown, table), tmp_path / "state")) == 1
    assert "not correlated: no recording of X, Y (1 pair)" in " ".join(capsys.readouterr().out.split())
    # some are known
    unknown.write_text(f"{pairs.read_text()}X,Y,60,pvc,150,9\n")
    assert main(words((recordings, unknown, table), tmp_path / "state")) == 0
    assert capsys.readouterr().out.splitlines()[1] == "  warning: pairs: no recording of X, Y (1 pair)"


def test_a_place_that_was_repaired_is_no_event(tmp_path: Path, line: tuple[Path, Path, Path]) -> None:
    recordings, pairs, _ = line
    first = lm.nightly(recordings, state=tmp_path, pairs=pairs, **QUIET)
    visits = tmp_path / "visits.csv"
    visits.write_text(f"sensor,night,outcome\nLOG1002,{first.last_night},no_leak\n")
    assert len(lm.nightly(recordings, state=tmp_path, pairs=pairs, **QUIET).events) == 1
    visits.write_text(f"sensor,night,outcome\nLOG1002,{first.last_night},leak\n")
    done = lm.nightly(recordings, state=tmp_path, pairs=pairs, **QUIET)
    assert (done.events, done.event_lines) == ((), ())
    # it was heard again after a visit
    day = (date.fromisoformat(first.last_night) - timedelta(1)).isoformat()
    visits.write_text(f"sensor,night,outcome\nLOG1002,{day},leak\n")
    assert len(lm.nightly(recordings, state=tmp_path, pairs=pairs, **QUIET).events) == 1


@pytest.mark.slow
def test_recordings_in_object_storage(
    tmp_path: Path, line: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from object_server import stored

    with stored(line[0], monkeypatch) as url:
        done = lm.nightly(url, state=tmp_path, pairs=line[1], **QUIET)
    assert [event["event"].startswith(PLACE) for event in done.events] == [True]
    assert (tmp_path / "pairs" / "pairs.html").read_text().count("<audio") == 4


def test_pairs_from_python(tmp_path: Path, line: tuple[Path, Path, Path]) -> None:
    recordings, pairs, _ = line
    done = lm.nightly(recordings, state=tmp_path, pairs=pairs, **QUIET)
    assert [event["event"].startswith(PLACE) for event in done.events] == [True]
    assert not (tmp_path / "visits.geojson").exists()  # no coordinates
    with pytest.raises(DataError, match="cannot be read"):
        lm.nightly(recordings, state=tmp_path, pairs=pairs.with_name("none.csv"), **QUIET)
    many = replace(done, events=done.events * 5)
    assert many.text().splitlines()[3].startswith("  and 3 more; pictures and sounds: ")
    reasons = {r.sensor: r.reason for r in run._joined(done, many.events, ()).sensors}
    assert reasons["LOG1001"].endswith(f"Noise {done.events[0]['event']}. And 3 more places.")
    assert lm.nightly(recordings, state=tmp_path, **QUIET).body["events"] == []
