"The work of a nightly run does not grow with the length of the history: counted in steps of SQLite, not in seconds."

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest
from made_detectors import made_detector

from leakmel.extras.nightly.history import History, HistoryEntry
from leakmel.extras.nightly.nights import (
    Budget,
    drift_of,
    keep_reference,
    record_run,
    reference_of_history,
    sensor_table,
)

N_SENSORS = 20
STEPS_AT_ONCE = 100


def night_of_network(k: int) -> list[HistoryEntry]:
    rng = np.random.default_rng(k)
    night = (date(2025, 1, 1) + timedelta(k)).isoformat()
    scores = 1 / (1 + np.exp(-rng.normal(-1, 0.5, N_SENSORS)))
    bands = "-60.0 -61.0 -62.0 -63.0 -64.0 -65.0 -66.0 -67.0"
    return [
        HistoryEntry(
            f"{k * N_SENSORS + s:032x}",
            f"P{s}",
            f"P{s}~{k}.wav",
            f"{night}T23:00:00",
            night,
            float(scores[s]),
            -40.0,
            -60.0,
            0.0,
            "",
            bands,
        )
        for s in range(N_SENSORS)
    ]


@contextmanager
def counted(history: History, found: list[int]) -> Iterator[None]:
    "Count the steps of the virtual machine of SQLite, and its statements."
    counts = [0, 0]

    def step() -> int:
        counts[0] += STEPS_AT_ONCE
        return 0

    def statement(sql: str) -> None:
        counts[1] += 1

    history.db.set_progress_handler(step, STEPS_AT_ONCE)
    history.db.set_trace_callback(statement)
    yield
    history.db.set_progress_handler(None, 0)
    history.db.set_trace_callback(None)
    found[:] = counts


def run(folder: Path, k: int) -> list[int]:
    "Steps and statements of a night."
    found: list[int] = []
    with History(folder) as history, counted(history, found):
        rows = [(f"{s}.wav".encode(), 8236, k, f"{s:032x}", "") for s in range(N_SENSORS)]
        history.begin()
        record_run(history, night_of_network(k), Budget())
        history.write("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", rows)
        keep_reference(history, made_detector(), None)
        history.commit()
        drift_of(history, reference_of_history(history))
        sensor_table(history, Budget(), normal=np.full(30, 0.3))
    return found


@pytest.mark.slow
def test_a_night_after_half_a_year_takes_the_steps_of_one_after_two_months(tmp_path):
    work = [run(tmp_path, k) for k in range(200)]
    early, late = np.array(work[60:74]).mean(0), np.array(work[-14:]).mean(0)
    # the list of nights grows by a row, whatever the number of sensors
    assert late[0] < early[0] + 30 * 126
    assert late[1] == early[1]


def test_a_reset_clock_does_not_begin_the_reference(tmp_path):
    with History(tmp_path) as history:
        history.begin()
        stray = replace(
            night_of_network(0)[0], digest="f" * 32, time="2000-01-01T23:00:00", night="2000-01-01"
        )
        record_run(history, [stray], Budget())
        for k in range(40):
            record_run(history, night_of_network(k), Budget())
        reference = reference_of_history(history)
    assert reference is not None
    assert reference.n == 28 * N_SENSORS
