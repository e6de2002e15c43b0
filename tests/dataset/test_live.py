"While a build runs it says what it does: in its bars, and in a file that goes away with it."

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import leakmel as lm
from leakmel.audio.synth import write_wav
from leakmel.core.errors import LeakmelError
from leakmel.core.timeline import Span, Timeline
from leakmel.dataset.run import live as live_module
from leakmel.dataset.run.config import PipelineConfig
from leakmel.dataset.run.live import Live, Pulse, queue_lengths, stage_rates, status_path
from leakmel.dataset.run.job import Job
from outsider import leftovers

QUIET = {"progress": "none", "pipeline": PipelineConfig(monitor_interval_s=0.05, files_per_batch=2)}


@pytest.fixture
def data(tmp_path, make_wav) -> Path:
    "Two splits of twelve recordings of a second, one of them no recording."
    for split in ("TRAINING", "TESTING"):
        for i in range(12):
            make_wav(tmp_path / "data" / split / ("LEAK", "NOLEAK")[i % 2] / f"{i:02d}.wav", seed=i)
    (tmp_path / "data" / "TRAINING" / "LEAK" / "00.wav").write_bytes(b"")
    return tmp_path / "data"


@pytest.fixture
def slow(monkeypatch):
    "Builds whose batches take a tenth of a second, and whose status is written ten times a second."
    real = Job.take

    def take(self, slot):
        time.sleep(0.1)
        return real(self, slot)

    monkeypatch.setattr(Job, "take", take)
    monkeypatch.setattr(live_module, "_STATUS_EVERY_S", 0.05)


class Watcher(threading.Thread):
    "Reads a status file again and again; every reading has to be whole."

    def __init__(self, target: Path):
        super().__init__(daemon=True)
        self.path, self.seen, self.broken, self.over = (
            status_path(target),
            list[dict](),
            list[str](),
            threading.Event(),
        )

    def run(self):
        while not self.over.wait(0.005):
            try:
                text = self.path.read_text()
            except FileNotFoundError:
                continue
            try:
                self.seen.append(json.loads(text))
            except ValueError:
                self.broken.append(text)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *failure):
        self.over.set()
        self.join()


def test_the_status_file_tells_how_far_a_build_is_and_goes_away(data, tmp_path, slow, monkeypatch):
    out, real = tmp_path / "out", Job.take
    first, second, until = (
        Watcher(out / "TRAINING_DATASET.H5"),
        Watcher(out / "TESTING_DATASET.H5"),
        time.monotonic() + 60,
    )

    def take(self, slot):
        "A batch is over when both watchers have seen a status that was written after it was begun."
        began_s = max((s["seconds"] for s in first.seen), default=0.0)

        def is_new(watcher: Watcher) -> bool:
            return bool(watcher.seen) and watcher.seen[-1]["seconds"] > began_s

        while not (is_new(first) and is_new(second)) and time.monotonic() < until:
            time.sleep(0.005)
        return real(self, slot)

    monkeypatch.setattr(Job, "take", take)
    with first, second:
        lm.build_all(data, out_dir=out, **QUIET)
    assert (first.broken, second.broken) == ([], [])
    done = [s["files_done"] for s in first.seen]
    assert done == sorted(done)
    assert max(done) > min(done)
    assert {s["files"] for s in first.seen} == {12}
    last = [s for s in first.seen if s["files_done"]][-1]
    assert last["rejected"] == 1
    assert last["schema"] == live_module.STATUS_SCHEMA
    assert last["pid"] == os.getpid()
    assert last["files_per_s"] == pytest.approx(last["files_done"] / last["seconds"])
    assert any(s["rss_bytes"] for s in first.seen)
    assert any("read" in s["stages"] for s in first.seen)
    assert second.seen[0]["phase"] == "waiting"
    assert set(Pulse.__dataclass_fields__) <= set(last)
    kept = sorted(
        f"{split}_DATASET.H5{end}"
        for split in ("TRAINING", "TESTING")
        for end in ("", ".report.json", ".timeline.json")
    )
    assert leftovers(out) == kept


@pytest.mark.parametrize("fault", ["engine", "signal"])
def test_the_status_file_goes_away_with_a_build_that_fails(data, tmp_path, slow, monkeypatch, fault):
    out, real = tmp_path / "out" / "x.h5", live_module.write_status

    def struck(*args):
        real(*args)
        if fault == "signal":
            signal.raise_signal(signal.SIGINT)
        raise LeakmelError("planted")

    monkeypatch.setattr(live_module, "write_status", struck)
    with pytest.raises(KeyboardInterrupt if fault == "signal" else LeakmelError):
        lm.build(data, split="training", out=out, **QUIET)
    assert leftovers(tmp_path / "out") == []


def test_a_build_goes_on_where_no_status_can_be_written(data, tmp_path, slow, monkeypatch):
    def refused(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(live_module, "write_status", refused)
    assert lm.build(data, split="training", out=tmp_path / "x.h5", **QUIET).rows == 11


def test_a_status_file_of_a_build_that_was_killed_is_replaced(data, tmp_path, slow):
    target = tmp_path / "x.h5"
    for name in (status_path(target), status_path(target).with_name(f"{status_path(target).name}.new")):
        name.write_text("{")
    lm.build(data, split="training", out=target, **QUIET)
    assert leftovers(tmp_path, "data") == ["x.h5", "x.h5.report.json", "x.h5.timeline.json"]


def test_a_link_in_the_place_of_the_status_file_is_not_followed(data, tmp_path, slow):
    target, other = tmp_path / "x.h5", tmp_path / "precious"
    other.write_text("mine")
    for name in (status_path(target), status_path(target).with_name(f"{status_path(target).name}.new")):
        name.symlink_to(other)
    lm.build(data, split="training", out=target, **QUIET)
    assert other.read_text() == "mine"


def test_a_long_check_has_a_bar_of_its_own(data, tmp_path, slow, monkeypatch, caplog):
    monkeypatch.setattr(live_module, "_WORTH_A_BAR", 5)
    with caplog.at_level("INFO", logger="leakmel"):
        lm.build(data, split="training", out=tmp_path / "x.h5", check=None, **(QUIET | {"progress": "log"}))
    lines = [r.getMessage() for r in caplog.records]
    assert any(line.startswith("TRAINING: check: 11 of 11 rows") for line in lines), lines
    assert any(
        line.startswith("TRAINING: 12 of 12 files") and line.endswith("published") for line in lines
    ), lines


def test_rates_are_those_of_the_last_seconds(monkeypatch):
    timeline, now_s = Timeline(), [2.0]
    monkeypatch.setattr(live_module, "_WINDOW_S", 10)
    timeline.now_s = lambda: now_s[0]  # type: ignore[method-assign]

    def did(stage: str, n: int) -> None:
        timeline.spans.append(Span(stage, "a", 0.0, now_s[0], "TRAINING", 0, n, 100 * n))

    did("read", 100)
    did("compute", 40)
    assert stage_rates(timeline) == {
        "read": {"files_per_s": 50, "bytes_per_s": 5000},
        "compute": {"files_per_s": 20, "bytes_per_s": 2000},
    }
    now_s[0] = 20.0
    did("read", 180)
    assert stage_rates(timeline) == {"read": {"files_per_s": 18, "bytes_per_s": 1800}}
    now_s[0] = 40.0
    assert stage_rates(timeline) == {}


def test_queues_give_the_last_that_was_noted():
    timeline = Timeline()
    assert queue_lengths(timeline) == {}
    for value in (1, 4):
        timeline.gauge("queue.compute", value)
    timeline.gauge("memory", 99)
    assert queue_lengths(timeline) == {"compute": 4}
    timeline.gauge("queue.write", 2)
    assert queue_lengths(timeline) == {"compute": 4, "write": 2}


def test_what_stands_in_a_bar():
    assert repr(Pulse("TRAINING", "waiting", 0, 9, 0)) == "waiting"
    busy = Pulse(
        "TRAINING",
        "checking",
        9,
        9,
        1,
        640,
        2000,
        {"compute": {"files_per_s": 25_301.4, "bytes_per_s": 1.0}},
        {},
        197.4,
        2.1e8,
        35.0,
        1.5e9,
    )
    assert (
        repr(busy)
        == "1 rejected, checking 640 of 2,000 rows, computing 25,301 files/s, CPU 197 %, GPU 35 %, 210 MB RAM, 1.50 GB VRAM"
    )


# The last batches are not taken before somebody has seen a status, however late that is.
WAIT_UNTIL_SEEN = """
import os, sys, time
from leakmel.dataset.run.job import Job
seen, real = sys.argv.pop(1), Job.take
def take(self, slot):
    until = time.monotonic() + 60
    while slot.first >= 200 and not os.path.exists(seen) and time.monotonic() < until: time.sleep(0.01)
    return real(self, slot)
Job.take = take
from leakmel.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_status_of_a_build_in_another_process(tmp_path):
    "What somebody else sees who looks at the folder."
    rng = np.random.default_rng(0)
    for i in range(400):
        (tmp_path / "data" / "LEAK").mkdir(parents=True, exist_ok=True)
        write_wav(tmp_path / "data" / "LEAK" / f"{i}.wav", rng.integers(-999, 999, 40_960).astype(np.int16))
    target = tmp_path / "x.h5"
    words = ["build", str(tmp_path / "data"), "--out", str(target), "--engine", "reference", "--quiet"]
    with (
        Watcher(target) as watcher,
        subprocess.Popen(
            [sys.executable, "-c", WAIT_UNTIL_SEEN, str(tmp_path / "seen"), *words],
            stderr=subprocess.PIPE,
            text=True,
        ) as child,
    ):
        until = time.monotonic() + 60
        while not watcher.seen and child.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        (tmp_path / "seen").touch()
        _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
    assert watcher.broken == []
    assert watcher.seen
    assert watcher.seen[0]["files"] == 400
    assert watcher.seen[0]["pid"] != os.getpid()
    assert not status_path(target).exists()


def test_a_split_that_is_through_when_it_is_looked_at_has_a_rate_that_can_be(tmp_path):
    timeline = Timeline()
    jobs: list[Any] = [
        SimpleNamespace(
            split=split,
            listing=range(100),
            kept=np.zeros(100, bool),
            n_done=0,
            rejected=[],
            checked=(0, 0),
            published_s=None,
            file=SimpleNamespace(target=tmp_path / split),
        )
        for split in ("TRAINING", "TESTING")
    ]
    with Live(jobs, timeline, 2, show="none") as live:
        live.look()
        now_s = timeline.now_s()
        timeline.spans += [
            Span("read", "reader-0", now_s - 900, now_s - 800, "TRAINING"),
            Span("read", "reader-0", now_s - 400, now_s - 300, "TESTING"),
            Span("write", "writer-0", now_s - 300, now_s - 200, "TESTING"),
        ]
        for job in jobs:
            job.n_done = 100
        live.look()
        bar = live._bars["TESTING"]
        assert 400 <= bar.seconds < 800
        assert bar.n_done == 100


def test_a_signal_while_bars_are_made_closes_those_that_stand(tmp_path, monkeypatch):
    jobs: list[Any] = [
        SimpleNamespace(
            split=split,
            listing=range(9),
            kept=np.zeros(9, bool),
            file=SimpleNamespace(target=tmp_path / split),
        )
        for split in "ab"
    ]
    made, real = list[Any](), live_module.Progress

    def stopped(*args, **named):
        if made:
            raise KeyboardInterrupt
        made.append(real(*args, **named))
        return made[0]

    monkeypatch.setattr(live_module, "Progress", stopped)
    live = Live(jobs, Timeline(), 2, show="none")
    with pytest.raises(KeyboardInterrupt), live:
        raise AssertionError("the body is not run")
    assert made[0].state == "stopped"
