"History, nights and table of sensors of nightly runs: crashes, hostile state files, repeated and late recordings."

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from each import each
from history_of_rows import write_history_of_rows
from nightly_world import evidence_of, recordings_of, rows_of

from leakmel.core.errors import DataError, LeakmelError, SpaceError
from leakmel.extras.nightly.history import _COLUMNS, HISTORY_FILE, History, HistoryEntry
from leakmel.extras.nightly.nights import (
    Budget,
    Evidence,
    SensorStates,
    first_listing,
    first_nights,
    highest_from_start,
    last_visits,
    nights_to_list,
    read_all_visits,
    record_run,
    sensor_table,
)


def scored_nights(n_nights: int = 20, leak_from: int = 12, seed: int = 1) -> list[HistoryEntry]:
    "Two sensors, one recording a night; a leak begins at P2."
    rng = np.random.default_rng(seed)
    entries: list[HistoryEntry] = []
    for k in range(n_nights):
        for sensor in ("P1", "P2"):
            night = f"2026-11-{k + 1:02d}"
            leak = 0.4 * (sensor == "P2" and k >= leak_from)
            score = float(np.clip(rng.normal(0.3 + leak, 0.05), 0, 1))
            name = f"{sensor}~{k}.wav"
            digest = f"{len(entries):032x}"
            entries.append(
                HistoryEntry(
                    digest, sensor, name, f"{night}T23:00:00", night, score, -40.0, -60.0, 0.0, "", ""
                )
            )
    return entries


def run(folder: Path, entries: list[HistoryEntry], visits: dict[str, str] | None = None) -> int:
    with History(folder) as history:
        history.begin()
        new = record_run(history, entries, Budget(), visits)
        history.commit()
    return len(new)


def content(folder: Path) -> list[str]:
    db = sqlite3.connect(folder / HISTORY_FILE)
    try:
        return list(db.iterdump())
    finally:
        db.close()


def test_the_same_recordings_again_change_nothing(tmp_path):
    assert run(tmp_path, scored_nights()) == 40
    before = (tmp_path / HISTORY_FILE).read_bytes()
    assert run(tmp_path, scored_nights()) == 0
    with History(tmp_path) as history:
        first = sensor_table(history, Budget())
        assert sensor_table(history, Budget()) == first
    after = (tmp_path / HISTORY_FILE).read_bytes()
    assert before[100:] == after[100:]  # the header counts transactions


def test_late_recordings_give_the_same_nights(tmp_path):
    entries = scored_nights()
    run(tmp_path / "once", entries)
    run(tmp_path / "parts", entries[20:])
    run(tmp_path / "parts", entries[:20])
    once, parts = (rows_of(tmp_path / name, evidence_of) for name in ("once", "parts"))
    assert once == parts


def test_a_visit_restarts_the_sensor(tmp_path):
    run(tmp_path, scored_nights())
    with History(tmp_path) as history:
        assert [r.sensor for r in sensor_table(history, Budget()) if r.visit == "evidence"] == ["P2"]
    run(tmp_path, [], {"P2": "2026-11-19"})
    with History(tmp_path) as history:
        rows = {r.sensor: r for r in sensor_table(history, Budget(), audits=0)}
    assert (rows["P2"].visit, rows["P2"].nights, rows["P1"].nights) == ("", 1, 20)


def test_visits_need_dates(tmp_path):
    table = tmp_path / "visits.csv"
    table.write_text("sensor,night\nP1,2026-11-02\nP1,2026-11-01\n")
    assert last_visits(read_all_visits(table)) == {"P1": "2026-11-02"}
    table.write_text("sensor,night\nP1,yesterday\n")
    with pytest.raises(DataError) as e:
        read_all_visits(table)
    assert e.value.code == "invalid-visits"


_KILLED = """
import os, signal, sys
sys.path[:0] = [sys.argv[2], os.path.dirname(sys.argv[2]) + "/helpers"]
from test_nightly_history import scored_nights
from leakmel.extras.nightly.history import History
from leakmel.extras.nightly.nights import Budget, record_run
with History(sys.argv[1]) as history:
    history.db.execute("PRAGMA cache_size = 1")  # pages reach the file before the commit
    history.begin()
    record_run(history, scored_nights(28, seed=2), Budget())
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_the_history_as_it_was(tmp_path):
    run(tmp_path, scored_nights(10))
    before = content(tmp_path)
    done = subprocess.run([sys.executable, "-c", _KILLED, tmp_path, Path(__file__).parent], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert run(tmp_path, []) == 0  # the lock of a dead run does not block
    assert content(tmp_path) == before
    assert run(tmp_path, scored_nights(28)) == 36


def _sql(statement: str) -> Callable[[Path], object]:
    def change(file: Path) -> None:
        db = sqlite3.connect(file)
        db.execute("PRAGMA writable_schema = ON")
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute(statement)
        db.commit()
        db.close()

    return change


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4096:4196] = b"\xff" * 100
    file.write_bytes(data)


def _link(file: Path) -> None:
    file.rename(file.with_name("other"))
    file.symlink_to("other")


HOSTILE: dict[str, Callable[[Path], object]] = {
    "garbage": lambda file: file.write_bytes(b"garbage"),
    "truncated": lambda file: os.truncate(file, 6000),
    "overwritten page": _flip,
    "trigger": _sql("CREATE TRIGGER t AFTER INSERT ON files BEGIN DELETE FROM parts; END"),
    "view": _sql("CREATE VIEW v AS SELECT 1"),
    "table changed": _sql("UPDATE sqlite_master SET sql = replace(sql, ' STRICT', '') WHERE name = 'meta'"),
    "other application": _sql("PRAGMA application_id = 1"),
    "no date": _sql("UPDATE parts SET name = 'tonight' WHERE name = 'state'"),
    "fewer recordings than sensors": _sql("UPDATE parts SET usable = 0 WHERE usable > 0"),
    "write-ahead log": _sql("PRAGMA journal_mode = WAL"),
    "link": _link,
    "journal is a link": lambda file: file.with_name(f"{file.name}-journal").symlink_to("/etc/passwd"),
}


@each("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path, name):
    run(tmp_path, scored_nights(10))
    HOSTILE[name](tmp_path / HISTORY_FILE)
    with pytest.raises(LeakmelError) as e:
        run(tmp_path, scored_nights(20))
    assert e.value.code == "invalid-history"
    assert str(tmp_path) in str(e.value)


VALUES = {  # a change that no constraint of the schema and no check of SQLite notices
    "night": "UPDATE parts SET name = '2026-11-14' WHERE name = '2026-11-04'",
    "recordings of a night": "UPDATE parts SET recordings = recordings + 1 WHERE name = '2026-11-04'",
    "usable recordings": "UPDATE parts SET usable = 1, sensors = 1 WHERE name = '2026-11-04'",
    "sensors of a night": "UPDATE parts SET sensors = 1 WHERE name = '2026-11-04'",
    "digest of a night": "UPDATE parts SET digest = substr(digest, 2) || 'g' WHERE name = '2026-11-04'",
    "a lost night": "DELETE FROM parts WHERE name = '2026-11-04'",
    "no evidence": "DELETE FROM parts WHERE name = 'state'",
    "no sensors": "DELETE FROM parts WHERE name = 'sensors'",
    "a visit": "INSERT INTO visits VALUES ('P9', '2026-11-02')",
    "a lost visit": "DELETE FROM visits",
    "night of a visit": "UPDATE visits SET night = '2026-11-03'",
    "a file": "UPDATE files SET mtime_ns = mtime_ns + 1",
    "meta": "INSERT OR REPLACE INTO meta VALUES ('budget', '9.0')",
    "digest": "UPDATE digests SET digest = substr(digest, 2) || substr(digest, 1, 1) WHERE name = 'parts'",
    "table of a digest": "UPDATE digests SET name = 'partt' WHERE name = 'parts'",
    "a lost digest": "DELETE FROM digests WHERE name = 'visits'",
    "no digests": "DROP TABLE digests",
    "earlier version": "PRAGMA user_version = 0",
    "later version": "PRAGMA user_version = 3",
}


def history_with_all_tables(folder: Path) -> None:
    "Write rows of each table."
    with History(folder) as history:
        history.begin()
        record_run(history, scored_nights(10), Budget(), {"P2": "2026-11-02"})
        history.write("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", [(b"P1~0.wav", 9, 1, "", "dry")])
        history.commit()


# bytes of a part: not read by each run, but by those that use it
CONTENTS = {
    f"{where} of {part}": f"UPDATE parts SET content = CAST(substr(content, 1, {at}) || x'5a5b' || substr(content, {at} + 3) AS BLOB) WHERE name = '{part}'"
    for part in ("2026-11-04", "sensors", "state")
    for where, at in (("head", 2), ("middle", "length(content) / 2"), ("end", "length(content) - 2"))
}


@each("what", [*VALUES, *CONTENTS])
def test_each_damaged_history_is_refused(tmp_path, tried, what):
    history_with_all_tables(tmp_path)
    whole = (tmp_path / HISTORY_FILE).read_bytes()
    _sql((VALUES | CONTENTS)[what])(tmp_path / HISTORY_FILE)
    changed = (tmp_path / HISTORY_FILE).read_bytes()
    assert changed[100:] != whole[100:] or "version" in what
    for _ in range(2):  # a refusal does not bless it
        with pytest.raises(LeakmelError) as e:
            run(tmp_path, scored_nights(20))
        assert e.value.code == "invalid-history"
        assert (tmp_path / HISTORY_FILE).read_bytes() == changed
    tried("S20")
    (tmp_path / HISTORY_FILE).write_bytes(whole)
    assert run(tmp_path, scored_nights(20)) == 20


@each(("column", "value"), [("sensor", 99), ("sensor", -1), ("flags", 9), ("flags", None)])
def test_parts_that_do_not_belong_together_are_refused(tmp_path, column, value):
    "Each matches its digest."
    run(tmp_path, scored_nights(12))
    with History(tmp_path) as history:
        night = history.nights()[-1]
        part = history.night(night)
        columns = {name: part[name].copy() for name in part.packed}
        columns[column] = columns[column][:-1] if value is None else np.full_like(columns[column], value)
        history.begin()
        history.put(night, columns, (1, 1, 1))
        history.commit()
    with pytest.raises(DataError) as e:
        run(tmp_path, scored_nights(20))
    assert e.value.code == "invalid-history"


def test_digests_are_those_of_all_rows(tmp_path):
    "Nights in turn, late recordings, visits, other budgets, and rows that are replaced, changed and deleted."
    entries = scored_nights(12)
    runs = [entries[k : k + 3] for k in range(0, 24, 3)]
    runs = [*runs[:4], runs[5], runs[4], *runs[6:], entries]
    for k, some in enumerate(runs):
        visits = {"P1": f"2026-11-{k:02d}"} if k % 3 == 1 else {}
        with History(tmp_path) as history:
            history.begin()
            record_run(history, some, Budget(0.5 if k == 6 else 0.2), visits)
            history.write(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)",
                [(b"a", k, -k, "", ""), (b"b", k, 0, "", "")],
            )
            history.write("UPDATE files SET size = ? WHERE path = ?", [(2 * k, b"b")])
            history.write("DELETE FROM files WHERE path = ?", [(b"b",)] * (k % 2))
            history.set_meta("reference", "-0.0 é\u2028\U0001fae0"[: k + 3])
            history.commit()
            assert dict(history.query("SELECT name, digest FROM digests")) == history._digests(_COLUMNS)
    _sql(VALUES["no evidence"])(tmp_path / HISTORY_FILE)
    with pytest.raises(DataError):
        run(tmp_path, [])


def test_rows_are_written_in_a_transaction_only(tmp_path):
    with History(tmp_path) as history, pytest.raises(DataError):
        history.set_meta("budget", "9.0")
    assert run(tmp_path, scored_nights(2)) == 4
    with History(tmp_path) as history:
        history.query("PRAGMA max_page_count = 1")  # as on a full disk: no less than the pages in use
        history.begin()
        with pytest.raises(SpaceError, match="no room left for the history"):
            record_run(history, scored_nights(30), Budget(), None)


_KILLED_AFTER_COMMIT = """
import os, signal, sys
sys.path[:0] = [sys.argv[2], os.path.dirname(sys.argv[2]) + "/helpers"]
from test_nightly_history import scored_nights
from leakmel.extras.nightly.history import History
from leakmel.extras.nightly.nights import Budget, record_run
with History(sys.argv[1]) as history:
    history.begin()
    record_run(history, scored_nights(12), Budget(), {"P1": "2026-11-03", "P2": "2026-11-02"})
    history.commit()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@each("script", [_KILLED, _KILLED_AFTER_COMMIT], ids=["before", "behind"])
def test_a_damage_after_a_killed_run_is_refused(tmp_path, script):
    history_with_all_tables(tmp_path)
    subprocess.run([sys.executable, "-c", script, tmp_path, Path(__file__).parent], timeout=60)
    killed = tmp_path / "killed"
    killed.mkdir()
    for path in tmp_path.glob(f"*{HISTORY_FILE}*"):
        (killed / path.name).write_bytes(path.read_bytes())
    with History(killed) as history:
        n = sum(len(history.night(night).ids) for night in history.nights())
    assert n == (20 if script == _KILLED else 24)
    for what in VALUES:
        for path in tmp_path.glob(f"*{HISTORY_FILE}*"):
            (killed / path.name).write_bytes(path.read_bytes())
        _sql(VALUES[what])(killed / HISTORY_FILE)  # plays the journal back
        with pytest.raises(DataError) as e:
            run(killed, [])
        assert e.value.code == "invalid-history"


@pytest.mark.slow
def test_a_history_is_accepted_after_each_way_that_a_run_can_end(tmp_path):
    "Also after an error before or behind the commit, and after a kill; then all digests are compared."
    entries = scored_nights(10)
    run(tmp_path, entries[:4])

    def failing(some: list[HistoryEntry], *, commits: bool) -> None:
        with History(tmp_path) as history:
            history.begin()
            record_run(history, some, Budget())
            if commits:
                history.commit()
            raise ZeroDivisionError

    for k, commits in ((4, False), (6, True)):
        with pytest.raises(ZeroDivisionError):
            failing(entries[k : k + 2], commits=commits)
    subprocess.run([sys.executable, "-c", _KILLED, tmp_path, Path(__file__).parent], timeout=60)
    assert run(tmp_path, entries) == 14  # 4 and 2 of 20 were committed


@pytest.mark.slow
def test_the_rate_of_false_visits_is_within_the_budget():
    "500 normal sensors, 150 nights, also with taps; a visit restarts the sensor."
    budget = Budget(0.5)
    for taps in (0.0, 0.05):
        rng = np.random.default_rng(0)
        evidence, n_visits = Evidence(500), 0
        for _ in range(150):
            evidence.add(rng.normal(-1, 0.5, 500) + 1.5 * (rng.random(500) < taps))
            above = evidence.value >= budget.limit
            n_visits += int(above.sum())
            evidence.n[above] = 0
            evidence.r[:, above], evidence.nights[above] = 0, np.nan
        assert 0 < 100 * n_visits / 75_000 <= budget.per_100_nights


def nights_until_listed(start: int, rise: float, budget: Budget, n: int = 40, seed: int = 3) -> np.ndarray:
    "Of n sensors with a leak from night `start` on; the rise is in standard deviations of their nights."
    rng = np.random.default_rng(seed)
    evidence, first = Evidence(n), np.full(n, 999)
    for night in range(1, start + 40):
        evidence.add(rng.normal(-1.5 + 0.4 * rise * (night >= start), 0.4, n))
        first[(evidence.value >= budget.limit) & (first == 999)] = night - start + 1
    return first


@each("start", [3, 6, 10, 20])
@each("per_100", [0.2, 1.0])
def test_a_clear_leak_is_listed_whenever_it_begins(start, per_100):
    "With the first evidence a leak from the sixth night on became usual, and was never listed."
    budget = Budget(per_100)
    found = nights_until_listed(start, 6.0, budget)
    assert np.mean(found > 0) >= 0.95
    assert np.mean(found <= 20) >= 0.95
    assert np.median(found) <= nights_to_list(budget)[start - 2] + 1
    assert start - 1 + np.median(found) >= first_listing(budget) - 2


def test_a_loud_night_alone_lists_no_sensor():
    evidence = Evidence(1)
    for x in (*np.tile([-1.0, -1.2], 15), 6.0):
        evidence.add(np.array([x]))
    assert evidence.value[0] < Budget().limit
    loud = evidence.value[0]
    for x in (-1.1, -1.0, -1.2):
        evidence.add(np.array([x]))
    assert evidence.value[0] < loud / 20


def test_nights_without_recordings_change_nothing():
    rng = np.random.default_rng(0)
    nights = rng.normal(-1, 0.5, (50, 3))
    evidence, some = Evidence(3), Evidence(2)
    for k, x in enumerate(nights):
        evidence.add(np.array([x[0], np.nan, x[2]]) if k % 3 else np.full(3, np.nan))
        if k % 3:
            some.add(x[[0, 2]])
    assert np.array_equal(evidence.r[:, [0, 2]], some.r)
    assert (evidence.n[1], evidence.value[1]) == (0, 0)


def test_sensors_that_are_high_from_the_start_stay_within_the_budget():
    levels = {f"P{k}": -2 + 0.02 * k for k in range(50)} | {"P7": 2.0, "P9": 1.9}
    for nights, listed in ((39, []), (40, ["P7", "P9"]), (900, ["P7", "P9"])):
        assert highest_from_start(levels, dict.fromkeys(levels, nights), Budget()) == listed, nights
    alone = levels | {"P9": -1.5}
    assert highest_from_start(alone, dict.fromkeys(levels, 19), Budget()) == []
    assert highest_from_start(alone, dict.fromkeys(levels, 20), Budget()) == ["P7"]
    steady = {f"P{k}": -2 + 0.02 * k for k in range(50)}
    assert highest_from_start(steady, dict.fromkeys(levels, 900), Budget()) == []
    assert highest_from_start({"P1": 1.0, "P2": -1.0}, {"P1": 900, "P2": 900}, Budget()) == []


@pytest.mark.parametrize("damage", ["", "nights SET r0 = 8", "recordings SET score = 0.4"])
def test_a_history_of_rows_is_read_and_its_evidence_computed_again(tmp_path, damage):
    "As version 1 wrote it: with recordings, visits and files; a changed value is noticed before it is moved."
    entries, visits = scored_nights(), {"P1": "2026-11-05"}
    file = write_history_of_rows(
        tmp_path / "old", entries, visits, {"budget": "0.2; evidence 2", "model": "m"}
    )
    if damage:
        _sql(f"UPDATE {damage} WHERE sensor = 'P1'")(file)
        with pytest.raises(DataError) as e:
            run(tmp_path / "old", [])
        assert e.value.code == "invalid-history"
        return
    run(tmp_path / "new", entries, visits)
    with History(tmp_path / "old") as history:
        assert history.meta("model") == "m"
        assert history.query("SELECT size, problem FROM files") == [(9, "")]
        assert history.query("SELECT * FROM visits") == [*visits.items()]
    assert run(tmp_path / "old", entries) == 0
    for read in (recordings_of, evidence_of):
        assert rows_of(tmp_path / "old", read) == rows_of(tmp_path / "new", read)


def test_evidence_of_another_version_is_computed_again(tmp_path):
    run(tmp_path / "new", scored_nights())
    run(tmp_path / "old", scored_nights(12))
    with History(tmp_path / "old") as history:
        history.begin()
        history.set_meta("budget", "0.2")
        state = SensorStates(history)
        state["r"][:] = 7
        history.put("state", state)
        history.commit()
    run(tmp_path / "old", scored_nights())
    assert rows_of(tmp_path / "old", evidence_of) == rows_of(tmp_path / "new", evidence_of)


def statements(
    folder: Path, n_nights: int, budget: Budget, leak_from: int
) -> dict[str, tuple[str, str, float]]:
    "Visit, reason and trend of each sensor."
    run_with = scored_nights(n_nights, leak_from)
    with History(folder) as history:
        history.begin()
        record_run(history, run_with, budget)
        history.commit()
        return {r.sensor: (r.visit, r.reason, r.trend) for r in sensor_table(history, budget, audits=0)}


def test_each_sensor_has_one_statement(tmp_path):
    "No evidence, and no trend; a rise that is not listed yet; one that is."
    for n_nights, says in ((8, "Too few nights to be sure: 8 of 10."), (12, "No evidence that scores rose")):
        visit, reason, trend = statements(tmp_path / str(n_nights), n_nights, Budget(), 99)["P2"]
        assert (visit, trend) == ("", 0.0)
        assert reason.startswith(says)
    visit, reason, trend = statements(tmp_path / "rising", 14, Budget(), 12)["P2"]
    assert visit == ""
    assert reason.startswith("Scores may have risen on 2026-11-13, from 0.3")
    assert trend > 1
    visit, reason, trend = statements(tmp_path / "listed", 20, Budget(), 12)["P2"]
    assert visit == "evidence"
    assert reason.startswith("Scores rose on 2026-11-13, from 0.3")
    assert "with a limit of 1,000; on the list since 2026-11-1" in reason
    assert trend > 1


def test_a_listed_sensor_that_is_silent_since_keeps_its_place(tmp_path):
    "Its nights of the last month have no usable recording."
    entries = scored_nights(20)
    entries += [
        replace(h, digest=f"5{h.digest[1:]}", path=f"5{h.path}", time=time, night=time[:10], flags="silent")
        for h in entries
        for time in [h.time.replace("2026-11", "2027-01")]
    ]
    run(tmp_path, entries)
    with History(tmp_path) as history:
        rows = {r.sensor: r for r in sensor_table(history, Budget(), audits=0)}
    assert (rows["P2"].visit, rows["P2"].trend, rows["P2"].score) == ("evidence", 0.0, None)
    assert rows["P2"].reason.startswith("Scores rose: evidence")
    assert rows["P1"].reason == "No evidence that scores rose: last night no usable recording."


def test_the_first_nights_say_when_a_leak_can_be_listed():
    few, many = (first_nights(Budget(), 3, n, 0) for n in (8, 50))
    assert few.startswith("First nights (3 of 10): a leak can be listed from about night 10 of a sensor on")
    assert "from night 125 on (8 sensors, budget 0.2)" in few
    assert "from night 20 on (50 sensors" in many
    assert "from night 5 on" in first_nights(Budget(), 3, 8, 19)
    assert first_nights(Budget(), 10, 8, 0) == ""
    assert first_listing(Budget(1.0)) < first_listing(Budget()) < first_listing(Budget(0.05))
