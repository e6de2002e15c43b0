"Nightly runs without a model: steady noise against the sensors of the night and a sensor's own nights; state folders of both kinds."

import csv
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from errors import raises
from made_detectors import made_detector, noise, put
from test_nightly import QUIET, dump, name, put_at, refused, rows_of, tables

import leakmel as lm
from leakmel.cli import main
from leakmel.core.operation import Run, make
from leakmel.extras.nightly import nights
from leakmel.extras.nightly import run as module
from leakmel.extras.nightly.nights import Budget, Evidence, compared_scores, levels_of, steady_noise
from leakmel.extras.nightly.run import SENSORS_CSV, VISIT_LABELS_CSV, VISITS_HTML, nightly
from leakmel.operations.extras import Nightly

pytestmark = pytest.mark.usefixtures("one_thread")
N = 4 * 4096  # samples of a recording
LEAK, TAP = "P3", "P5"
LEAK_FROM = 12


def band(rng: np.random.Generator, low: float, high: float) -> np.ndarray:
    "Noise between two frequencies, Hz, of deviation 1."
    bins = np.fft.rfft(rng.normal(size=N))
    hz = np.fft.rfftfreq(N, 1 / 4096)
    x = np.fft.irfft(np.where((hz >= low) & (hz < high), bins, 0), N)
    return x / x.std()


def record(folder: Path, days: range, leak_from: int = LEAK_FROM) -> Path:
    "Eight sensors: a leak at one, at another a tap that runs for two thirds of each recording from the same day on."
    for day in days:
        for s in range(8):
            rng = np.random.default_rng([day, s])
            x = 60 * 10 ** rng.normal(0.1 * (s % 3), 0.05) * rng.normal(size=N)
            if f"P{s}" == LEAK and day >= leak_from:
                x = x + 400 * band(rng, 400, 700)
            if f"P{s}" == TAP and day >= leak_from:
                x[: 2 * N // 3] += 400 * band(rng, 300, 900)[: 2 * N // 3]
            put_at(folder, f"d{day}/{name(f'P{s}', day)}", x.astype(np.int16))
    return folder


def test_the_first_night_shows_a_high_score_and_visits_nobody(tmp_path):
    done = nightly(record(tmp_path / "r", range(1, 2), leak_from=1), state=tmp_path / "s", audits=0, **QUIET)
    assert not done.to_visit
    assert done.high_scores.startswith(f"High scores, too few nights to be sure (1): {LEAK} ")
    row = next(r for r in done.sensors if r.sensor == LEAK)
    assert row.leak_score > 90
    assert max(r.leak_score for r in done.sensors if r.sensor != LEAK) < 50
    assert "dB above the other sensors" in row.reason
    low, high = map(int, row.reason.partition(" Hz")[0].removeprefix("Steady noise at ").split("-"))
    assert 300 <= low <= 500
    assert 600 <= high <= 900


@pytest.fixture(scope="module")
def month(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("month"), range(1, 21))


def test_a_leak_is_listed_with_its_reason_and_a_tap_is_not(tmp_path, month):
    done = nightly(month, state=tmp_path / "s", audits=0, **QUIET)
    assert [r.sensor for r in done.to_visit] == [LEAK]
    row = done.to_visit[0]
    assert row.first_above <= f"2025-01-{LEAK_FROM + 6}"
    assert f"every night since 2025-01-{LEAK_FROM}: evidence" in row.reason
    assert row.trend > 10
    assert "leak score 100  Steady noise at" in done.text()
    page = (tmp_path / "s" / VISITS_HTML).read_text()
    assert row.reason in page
    assert "leak score 100 of 100" in page


@pytest.mark.slow
def test_late_recordings_and_single_nights_give_the_tables_of_one_run(tmp_path, month):
    "The score of a night depends on the other sensors, also on those that send it later."
    nightly(month, state=tmp_path / "once", **QUIET)
    moved = tmp_path / "r"
    for days in (range(1, 14), range(15, 21), range(14, 15)):
        for day in days:
            for path in sorted((month / f"d{day}").iterdir())[: 5 if day == 20 else None]:
                (moved / f"d{day}").mkdir(parents=True, exist_ok=True)
                os.link(path, moved / f"d{day}" / path.name)
        nightly(moved, state=tmp_path / "parts", **QUIET)
    for path in month.glob("d20/*"):
        if not (moved / "d20" / path.name).exists():
            os.link(path, moved / "d20" / path.name)
    nightly(moved, state=tmp_path / "parts", **QUIET)
    assert tables(tmp_path / "parts") == tables(tmp_path / "once")


def test_a_second_run_reads_nothing_and_bad_files_are_rejected(tmp_path, monkeypatch):
    folder = record(tmp_path / "r", range(1, 3))
    put_at(folder, name("P9", 1), np.zeros(N, np.int16))
    (folder / name("P1", 9)).write_bytes(b"broken")
    done = nightly(folder, state=tmp_path / "s", **QUIET)
    assert (done.counts.new, [(r.path, r.code) for r in done.rejected]) == (
        17,
        [(name("P1", 9).encode(), "not_wav")],
    )
    silent = next(r for r in done.sensors if r.sensor == "P9")
    assert (silent.health, silent.score, silent.leak_score) == ("silent", None, 0)
    before = tables(tmp_path / "s"), dump(tmp_path / "s")
    monkeypatch.setattr(nights, "_read_any", lambda *a: pytest.fail("a recording was read"))
    monkeypatch.setattr(module, "_clips", lambda *a: {})
    again = nightly(folder, state=tmp_path / "s", **QUIET)
    assert again.counts.known == 17
    assert dump(tmp_path / "s") == before[1]


def test_a_state_folder_keeps_to_its_kind(tmp_path):
    folder, detector = record(tmp_path / "r", range(1, 3)), made_detector()
    for first, then, words in ((None, detector, "without a model"), (detector, None, "with a model")):
        state = tmp_path / f"s {words}"
        nightly(folder, first, state, **QUIET)
        before = dump(state)
        error = refused("other-model", partial(nightly, folder, then, state, **QUIET))
        assert f"the history was made {words}" in str(error)
        assert "new state folder" in str(error)
        assert dump(state) == before
        assert module.is_without_model(state) == (first is None)
    refused("unused-option", lambda: nightly(folder, state=tmp_path / "new", reference="x.h5", **QUIET))


def test_a_visit_restarts_the_sensor_and_labels_its_nights(tmp_path, month):
    nightly(month, state=tmp_path / "s", **QUIET)
    module.record_visit(tmp_path / "s", LEAK, "2025-01-20", "leak", by="ann")
    done = nightly(month, state=tmp_path / "s", audits=0, **QUIET)
    assert not done.to_visit
    with (tmp_path / "s" / VISIT_LABELS_CSV).open(newline="") as f:
        labels = [(row["path"].split("/")[0], row["label"]) for row in csv.DictReader(f)]
    assert labels == [(f"d{day}", "LEAK") for day in range(LEAK_FROM, 21)]


def test_a_leak_that_goes_on_after_its_repair_is_listed_again(tmp_path, month):
    "The page, the tables and the answer say so; a sensor that is quiet since is said to be."
    state, folder = tmp_path / "s", tmp_path / "r"
    nightly(month, state=state, **QUIET)
    for sensor in (LEAK, TAP, "P7"):
        module.record_visit(state, sensor, "2025-01-20", "leak", by="ann")
    done = nightly(record(folder, range(21, 23)), state=state, audits=0, **QUIET)
    assert done.repairs[LEAK] == "too early to check the repair: 2 of 7 nights"
    table = state / SENSORS_CSV  # of a version without the last columns
    table.write_text(re.sub(r",leak_score,repair$", "", table.read_text(), flags=re.M))
    done = nightly(record(folder, range(23, 29)), state=state, audits=0, **QUIET)
    (row,) = done.to_visit
    assert (row.sensor, row.repair) == (LEAK, "still loud since the repair: second leak or other source")
    assert row.reason.startswith("Still loud since the repair: second leak or other source. Steady noise at ")
    assert "every night since 2025-01-21" in row.reason
    assert done.repairs["P7"].startswith("repair not checked: no clear rise")
    assert f"  repairs: {LEAK} still loud" in done.text()
    assert done.summary["repairs"] == done.repairs
    page = (state / VISITS_HTML).read_text()
    assert f"Repairs: {LEAK} still loud since the repair" in page
    assert {r["sensor"]: r["repair"] for r in rows_of(state)} == {r.sensor: r.repair for r in done.sensors}
    state = tmp_path / "fixed"
    nightly(month, state=state, **QUIET)
    module.record_visit(state, LEAK, "2025-01-20", "leak", by="ann")
    done = nightly(record(tmp_path / "q", range(21, 32), leak_from=99), state=state, audits=0, **QUIET)
    assert done.repairs == {LEAK: "quiet since the repair (11 nights)"}
    reason = next(r.reason for r in done.sensors if r.sensor == LEAK)
    assert reason.endswith("Quiet since the repair (11 nights).")


def test_the_first_nights_are_explained_once(tmp_path):
    folder = record(tmp_path / "r", range(1, 3))
    first = nightly(folder, state=tmp_path / "s", **QUIET)
    assert first.first_nights in first.text()
    then = nightly(folder, state=tmp_path / "s", **QUIET)
    assert "  First nights (2 of 10): no leak can be listed yet\n" in then.text()
    assert then.first_nights not in then.text()
    assert nights.first_nights(Budget(), 5, 8, 19) == nights.first_nights(Budget(), 9, 200, 0) == ""
    assert nights.first_nights(Budget(), 9, 2, 0)


def test_the_command_needs_no_model(tmp_path, capsys):
    folder = record(tmp_path / "r", range(1, 3))
    state = tmp_path / "s"
    assert main(["nightly", str(folder), "--state", str(state), "--json", "--quiet"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["model"], body["evaluation_result"], body["new"]) == ("none", "no model", 16)
    assert {"leak_score", "score"} <= set(rows_of(state)[0])
    # a variable that is not set must not become a run without a model
    assert main(["nightly", str(folder), "--state", str(tmp_path / "t"), "--model", "", "--quiet"]) == 2
    assert not (tmp_path / "t").exists()


@each("rate", [2000, 8000, 48_000])
def test_features_follow_the_rate_of_the_recordings(tmp_path, rate):
    put(tmp_path / "r", name("P0", 1), noise(1, 2 * rate), rate)
    spec = nights.spec_without_model(tmp_path / "r", [name("P0", 1).encode()])
    assert (spec.sample_rate, spec.top_hz) == (rate, min(2048.0, rate / 2))
    assert nightly(tmp_path / "r", state=tmp_path / "s", **QUIET).counts.new == 1


def test_levels_are_those_that_last_and_are_broad():
    mels = np.full((20, 1, 64, 1), -60.0)
    mels[:12] += 20  # a tap
    mels[:, :, 20] += 30  # a line of a pump
    assert levels_of(mels, steady=True)[1] == (-60.0,) * 12
    mels[:, :, 24:36] += 15
    assert max(levels_of(mels, steady=True)[1]) == -45.0


def test_scores_are_equal_for_equal_sensors_and_few_of_them():
    same = np.full((3, 12), -6.0)
    assert np.ptp(compared_scores(same, same)) == 0
    assert compared_scores(same[:1], same[:1])[0] < 0.1
    others = np.random.default_rng(0).normal(-6, 0.2, (40, 12))
    loud = others[:1] + 1.4 * (np.arange(12) == 5)
    assert compared_scores(loud + 1.4 * (np.arange(12) == 6), others)[0] > 0.8
    assert (compared_scores(others, others) < 0.5).mean() > 0.9


def test_evidence_of_many_values_finds_the_one_that_rises():
    rng = np.random.default_rng(0)
    x = rng.normal(-6, 0.1, (30, 100, 12))
    x[20:, :40, 4] += 0.8
    evidence = Evidence(100, 12)
    for night in x:
        evidence.add(np.zeros(100), night)
    found = evidence.value >= Budget().limit
    assert found[:40].all()
    assert found[40:].sum() <= 3


def test_the_sentence_says_where_how_much_and_how_often():
    spec: Any = lm.MelSpec.preset("disjoint")
    over = np.full(12, 1.0)
    assert steady_noise(spec, over, None) == "No steady noise above the other sensors"
    assert steady_noise(spec, None, None) == "No usable recording in the last night of the network"
    gains = np.zeros((3, 12))
    gains[:, 4:6] = (10, 9)
    gains[1] = 0
    text = steady_noise(spec, over, ("2026-03-12", gains))
    assert text.endswith("10 dB above the nights before, on 2 of 3 nights since 2026-03-12")


def test_a_notebook_keeps_to_a_state_folder_without_a_model(tmp_path, monkeypatch):
    "A detector that is trained in the same folder later must not end the nights."
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEAKMEL_MODEL", raising=False)
    folder, notebook = record(tmp_path / "r", range(1, 2)), Run("none", keeps=True)
    given = {"data_root": str(folder), "state": str(tmp_path / "s"), "device": "cpu"}
    operation = make(Nightly, given)
    done = operation.execute(operation.plan(notebook), notebook)
    assert (done.result.model, done.status) == ("none", 0)
    assert f"leakmel review {folder}" in done.text.replace("\n  ", " ")
    made_detector().save(tmp_path / "model.pt")
    assert not operation.plan(notebook).files
    assert make(Nightly, given | {"state": str(tmp_path / "new")}).plan(notebook).files


def test_a_strange_first_recording_does_not_choose_the_features(tmp_path):
    "The rate is that of most recordings which are long enough; where none can be read, the next run chooses."
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "A_20250101_0200.wav").write_bytes(b"RIFF")
    nightly(tmp_path / "r", state=tmp_path / "s", **QUIET)
    put(tmp_path / "r", "B_20250102_0200.wav", noise(1)[:50], rate=100)
    for k in range(4):
        put(tmp_path / "r", f"P{k}_20250102_0200.wav", noise(k), rate=8000)
    done = nightly(tmp_path / "r", state=tmp_path / "s", **QUIET)
    assert {f"P{k}" for k in range(4)} <= {r.sensor for r in done.sensors}
    with module.History(tmp_path / "s") as history:
        spec = nights.stored_spec(history)
    assert spec is not None
    assert spec.sample_rate == 8000


def test_a_rise_of_most_sensors_is_named(tmp_path):
    for day, s in ((d, s) for d in range(1, 17) for s in range(6)):
        gain = 4 if day > 11 else 1
        put_at(tmp_path / "r", f"d{day}/{name(f'P{s}', day)}", gain * noise(100 * day + s, level=300))
    done = nightly(tmp_path / "r", state=tmp_path / "s", audits=0, **QUIET)
    assert done.common_rise.startswith(f"{len(done.to_visit)} of 6 sensors rose: ")
    assert "check gain and coupling" in done.to_visit[0].reason
    assert done.common_rise in done.text()
    assert done.common_rise in (tmp_path / "s" / VISITS_HTML).read_text()


def test_two_sensors_are_not_compared_with_each_other(tmp_path):
    for s in range(2):
        put_at(tmp_path / "r", name(f"P{s}", 1), noise(s, level=300 * 9**s))
    done = nightly(tmp_path / "r", state=tmp_path / "s", audits=2, **QUIET)
    assert all("not compared with others" in r.reason for r in done.sensors)
    assert "none that is older than the recordings" in done.first_nights


@each("text", ["not json", "[1]", "[" * 100_000])
def test_features_that_cannot_be_read_are_refused(text):
    with raises("invalid-history"):
        nights._spec_of(text)
