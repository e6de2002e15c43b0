"The monitor measures or reports that it did not; progress ends with the correct count in every front end."

import html
import io
import json
import logging
import re
import signal
import sys
import threading
import time
import types
from importlib import metadata
from typing import Any

import pytest
from each import each

from leakmel.core import monitor as monitor_module
from leakmel.core.monitor import SAMPLE_KEYS, Monitor, Sampler, installed_version, machine_facts
from leakmel.core.progress import Progress, _Terminal, front_end
from leakmel.core.timeline import Timeline, mean, peak, read_timeline, write_timeline

pytestmark = pytest.mark.quick


@each(("quota", "cores"), [(None, 8), (2.0, 2), (1.5, 2), (0.5, 1), (64.0, 8)])
def test_cores_of_a_container_with_a_quota(monkeypatch, quota, cores):
    monkeypatch.setattr(monitor_module.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(monitor_module, "cpu_quota", lambda: quota)
    assert monitor_module.usable_cores() == cores


def run_monitor(seconds: float = 0.15, interval_s: float = 0.03, n_within: int = 0) -> Timeline:
    "Monitor a run that lasts until there are so many samples: on a busy machine the thread that takes them comes late."
    timeline, until = Timeline(), time.monotonic() + 20
    with Monitor(timeline, interval_s):
        time.sleep(seconds)
        while len(timeline.samples) < n_within and time.monotonic() < until:
            time.sleep(0.01)
    return timeline


class Clock:
    "A clock that only the test moves."

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


class Fake:
    "Anything that is asked for an attribute has it."

    def __init__(self, **values):
        self.__dict__.update(values)


def fake_nvml(**broken: Exception) -> types.ModuleType:
    "An NVML with one GPU; functions named in `broken` raise."
    nv = types.ModuleType("pynvml")
    answers = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByIndex": "gpu",
        "nvmlDeviceGetUtilizationRates": Fake(gpu=42),
        "nvmlDeviceGetMemoryInfo": Fake(used=7_000_000_000),
        "nvmlDeviceGetName": "a GPU",
        "nvmlDeviceGetPcieThroughput": 3,
    }

    def function(name):
        def call(*_):
            if name in broken:
                raise broken[name]
            return answers[name]

        return call

    for name in answers:
        setattr(nv, name, function(name))
    nv.NVML_PCIE_UTIL_RX_BYTES, nv.NVML_PCIE_UTIL_TX_BYTES = 1, 0  # type: ignore[attr-defined]
    return nv


@pytest.fixture
def no_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it raises ImportError


def test_samples_cover_the_run(no_nvml):
    timeline = run_monitor(n_within=3)
    assert len(timeline.samples) >= 4
    assert all(set(s) == {"time_s", *SAMPLE_KEYS} for s in timeline.samples)
    times = [s["time_s"] for s in timeline.samples]
    assert times == sorted(times)
    assert times[-1] - times[0] >= 0.15
    assert timeline.samples[0]["cpu_percent"] is None
    assert timeline.samples[0]["rss_bytes"] > 1e6
    assert timeline.meta["monitor"]["n_cores"] >= 1


def test_shortest_run_has_two_samples():
    timeline = Timeline()
    with Monitor(timeline, 10.0):
        pass
    assert len(timeline.samples) == 2


def test_monitor_stops_at_once_with_a_long_interval():
    with Monitor(Timeline(), 86_400.0):
        pass
    assert not [t for t in threading.enumerate() if t.name == "leakmel-monitor"]


def test_pause_while_stopping_loses_no_sample(monkeypatch):
    "The first wait for the thread is over before the thread has had its turn."
    go, waits, real = threading.Event(), list[float | None](), threading.Thread.join

    class Late(Monitor):
        def _run(self) -> None:
            super()._run()
            go.wait(60)

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.append(timeout)
        if len(waits) == 1:
            return
        go.set()
        real(thread, 60)

    monkeypatch.setattr(threading.Thread, "join", join)
    timeline = Timeline()
    with Late(timeline, 10.0):
        pass
    assert len(timeline.samples) == 2
    assert 0 < sum(t or 0 for t in waits) < 1


def test_stops_within_a_second_when_a_driver_hangs(monkeypatch):
    release = threading.Event()

    def hanging() -> Monitor:
        monitor, entered = Monitor(Timeline(), 0.01), threading.Event()

        def hang() -> tuple[bool]:
            entered.set()
            return (release.wait(60),)

        monitor.__enter__()
        monitor.sampler.probes.append((("gpu_percent",), hang))
        assert entered.wait(60)
        return monitor

    monitors = [hanging() for _ in range(3)]
    waiting = iter(monitors)
    try:
        next(waiting).__exit__(None, None, None)  # the probe hangs until `release`
    finally:
        release.set()
    for monitor in monitors:
        monitor._stop.set()
        monitor._thread.join()


def test_exception_of_the_body_is_raised():
    timeline = Timeline()
    with pytest.raises(OSError, match="disk full"), Monitor(timeline):
        raise OSError("disk full")
    assert len(timeline.samples) == 2


def test_no_nvml_gives_none_and_one_reason(no_nvml):
    timeline = run_monitor()
    for key in ("gpu_percent", "vram_bytes", "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s"):
        assert all(s[key] is None for s in timeline.samples)
        assert "pynvml" in timeline.meta["monitor"]["missing"][key]
        assert peak(timeline.samples, key) is None


@each(
    ("device", "visible", "is_set_up", "asked"),
    [
        ("cuda:1", None, False, 1),
        ("cuda:1", "3,2", False, 2),
        ("cuda:1", "GPU-a,GPU-b", False, "GPU-b"),
        ("cuda:1", None, True, "GPU-1-of-torch"),
        ("cuda:1", "3,2", True, "GPU-1-of-torch"),
        ("cuda", "3,2", False, 3),
        ("cpu", None, False, 0),
    ],
)
def test_the_gpu_of_the_run_is_watched(monkeypatch, device, visible, is_set_up, asked):
    "By the UUID that torch gives once CUDA is set up: the order of NVML is not that of CUDA."
    found: list[Any] = []
    nv = fake_nvml()
    for name in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID"):
        monkeypatch.setattr(nv, name, found.append, raising=False)
    cuda = types.SimpleNamespace(
        is_initialized=lambda: is_set_up,
        get_device_properties=lambda k: types.SimpleNamespace(uuid=f"{k}-of-torch"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nv)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    Monitor(Timeline(), device=device)
    assert found == [asked]


def test_gpu_figures_come_from_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sample = Sampler().take()
    assert (sample["gpu_percent"], sample["vram_bytes"], sample["pcie_rx_bytes_per_s"]) == (
        42,
        7_000_000_000,
        3 * 1024,
    )
    assert machine_facts()["gpu"] == "a GPU"


def test_one_refused_query_costs_only_its_own_figure(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "pynvml", fake_nvml(nvmlDeviceGetUtilizationRates=RuntimeError("Not Supported"))
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sampler = Sampler()
    sample = sampler.take()
    assert sample["gpu_percent"] is None
    assert sample["vram_bytes"] == 7_000_000_000
    assert sampler.missing["gpu_percent"] == "RuntimeError: Not Supported"
    assert "vram_bytes" not in sampler.missing


def test_hidden_gpu_is_not_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sampler = Sampler()
    assert sampler.take()["vram_bytes"] is None
    assert "hides" in sampler.missing["vram_bytes"]


@pytest.mark.parametrize("error", [AttributeError("no io_counters"), PermissionError("denied")])
def test_no_disk_counters_is_none_not_zero(monkeypatch, error):
    import psutil

    def refuse(self):
        raise error

    monkeypatch.setattr(psutil.Process, "io_counters", refuse, raising=False)
    timeline = run_monitor()
    assert all(s["disk_read_bytes"] is None and s["disk_written_bytes"] is None for s in timeline.samples)
    assert str(error) in timeline.meta["monitor"]["missing"]["disk_written_bytes"]
    assert timeline.samples[-1]["rss_bytes"] > 0


def test_monitor_thread_that_cannot_start_is_reported(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    timeline = run_monitor(0.01)
    assert len(timeline.samples) == 2
    assert "new thread" in timeline.meta["monitor"]["missing"]["thread"]
    monkeypatch.setattr(threading.Thread, "start", lambda self: signal.raise_signal(signal.SIGINT))
    monitor = Monitor(Timeline())
    with pytest.raises(KeyboardInterrupt):
        monitor.__enter__()
    assert monitor._stop.is_set()


def test_samples_survive_a_round_trip(tmp_path):
    timeline = run_monitor()
    back = read_timeline(write_timeline(timeline, tmp_path / "timeline.json"))
    assert len(back.samples) == len(timeline.samples)
    assert back.samples[0]["cpu_percent"] is None


def test_a_busy_thread_loads_about_a_core():
    values = list[float]()
    while len(values) < 3 and not (
        values and values[-1] > 10
    ):  # in one of three tries: another program may have the core for seconds
        sampler = Sampler()
        assert sampler.take()["cpu_percent"] is None
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        value = sampler.take()["cpu_percent"]
        assert value is not None
        values.append(value)
    assert 10 < values[-1] <= 130, (
        values
    )  # the machine may be shared: less than a core is possible, much more is not


def test_mean_weights_by_time_and_peak_skips_none():
    samples: list[dict] = [{"time_s": 0.0, "v": None}, {"time_s": 1.0, "v": 10.0}, {"time_s": 4.0, "v": 30.0}]
    assert mean(samples, "v") == (10 * 1 + 30 * 3) / 4
    assert peak(samples, "v") == 30
    assert mean([{"time_s": 0.0, "v": 5.0}], "v") == 5
    assert mean([], "v") is peak([], "v") is None


def test_machine_facts_are_plain_and_name_no_host(monkeypatch):
    import platform

    monkeypatch.setattr(platform, "node", lambda: "secret-host")
    facts = machine_facts()
    assert "secret-host" not in json.dumps(facts)
    assert set(facts) == {
        "cpu",
        "n_cores",
        "n_cores_machine",
        "ram_bytes",
        "gpu",
        "os",
        "python",
        "numpy",
        "h5py",
        "torch",
    }


def test_machine_without_a_package_has_no_version(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    assert machine_facts()["torch"] is None


def test_installed_versions_are_those_of_importlib():
    for package in ("numpy", "h5py", "torch", "numba", "llvmlite", "soundfile"):
        assert installed_version(package) == metadata.version(package)
    with pytest.raises(ImportError):
        installed_version("no-such-package")


# ---- progress


def moment(n_done: int, total: int, seconds: float, state: str = "running", **given) -> Progress:
    "A progress whose clock stands still."
    progress = Progress(total, show="none", **given)
    progress.update(n_done)
    progress.began_s, progress.ended_s, progress.state = 1.0, 1.0 + seconds, state
    return progress


def test_text_of_a_progress():
    assert repr(moment(0, 10, 0.0)) == "0 of 10 files in 0.0 s"
    verify = moment(5, 10, 2.0, unit="rows", label="verify")
    verify.note = "cpu"
    assert repr(verify) == "verify: 5 of 10 rows in 2.0 s, 2.5 rows/s, about 2.0 s left, cpu"
    assert repr(moment(10, 10, 2.0, "done")) == "10 of 10 files in 2.0 s, 5 files/s"
    assert repr(moment(0, 0, 1.0, "done")) == "0 of 0 files in 1.0 s"
    assert "1 h 01 min" in repr(moment(1, 2, 3660.0))
    assert repr(moment(900, 1000, 10.0, n_before=800)) == (
        "900 of 1,000 files in 10.0 s, 10 files/s, about 10.0 s left"
    )
    assert repr(moment(800, 1000, 10.0, n_before=800)) == "800 of 1,000 files in 10.0 s"


def test_html_holds_the_text_and_escapes_it():
    standing = moment(5, 10, 2.0, label="<b>&")
    shown = standing._repr_html_()
    assert html.escape(repr(standing)) in shown
    assert "<b>" not in shown
    assert len(shown) < 600


class Cell:
    "A notebook output that remembers what it was given."

    def __init__(self, monkeypatch):
        import IPython.display

        self.shown: list[Any] = []

        def keep(progress):
            kept = Fake(html=progress._repr_html_(), state=progress.state, n_done=progress.n_done)
            self.shown.append(kept)

        def display(progress, display_id):
            assert display_id is True
            keep(progress)
            return Fake(update=keep)

        monkeypatch.setattr(IPython.display, "display", display)


def test_notebook_ends_with_n_of_n(monkeypatch):
    cell = Cell(monkeypatch)
    with Progress(40, label="TESTING", show="notebook") as progress:
        for i in range(40):
            progress.update(i + 1)
    assert "40 of 40 files" in cell.shown[-1].html
    assert "width:100.0%" in cell.shown[-1].html
    assert len(cell.shown) == 2  # the first and the last: the rest came too quickly to be drawn


def test_notebook_failure_shows_the_position(monkeypatch):
    cell = Cell(monkeypatch)

    def fail():
        with Progress(40, show="notebook") as progress:
            progress.update(12)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "stopped at 12 of 40 files" in cell.shown[-1].html


@pytest.mark.parametrize("attended", [False, True])
def test_an_unattended_notebook_has_lines_of_long_runs_only(monkeypatch, capsys, attended):
    Cell(monkeypatch)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.delenv("VSCODE_PID", raising=False)
    if attended:
        monkeypatch.setenv("JPY_SESSION_NAME", "/notebooks/build.ipynb")
    with Progress(40, show="notebook") as progress:
        progress.update(40)
    assert capsys.readouterr().err == "", "a short run needs none"
    clock = Clock(monkeypatch)
    with Progress(40, label="TRAINING", show="notebook") as progress:
        for i in range(8):
            progress.update(i, "reading")
            clock.now_s += 8
    lines = capsys.readouterr().err.splitlines()
    assert (len(lines) >= 2) == (not attended)
    if not attended:
        assert "TRAINING" in lines[0]
        assert "7 of 40 files" in lines[-1]


def test_drawing_is_limited(monkeypatch):
    cell, clock = Cell(monkeypatch), Clock(monkeypatch)
    with Progress(1000, show="notebook") as progress:
        for i in range(500):
            clock.now_s += 0.001
            progress.update(i + 1)
    assert 2 <= len(cell.shown) <= 5


def test_updates_from_many_threads(monkeypatch):
    cell = Cell(monkeypatch)
    monkeypatch.setattr("leakmel.core.progress._Notebook.every_s", 0.0)
    progress = Progress(4000, show="notebook")

    def count(k):
        for i in range(1000):
            progress.update(k + 4 * i + 1)

    threads = [threading.Thread(target=count, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    progress.close()
    progress.close()
    assert cell.shown[-1].n_done == 4000
    assert cell.shown[-1].state == "done"
    assert [s.state for s in cell.shown].count("done") == 1


def test_log_has_periodic_lines_and_a_last_line(monkeypatch, caplog):
    clock = Clock(monkeypatch)
    with (
        caplog.at_level(logging.INFO, logger="leakmel"),
        Progress(10, label="TESTING", show="log") as progress,
    ):
        for i in range(10):
            clock.now_s += 1.2
            progress.update(i + 1)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 3, "after five seconds, after ten, and at the end"
    assert lines[-1].startswith("TESTING: 10 of 10 files")


def test_short_work_logs_one_line(monkeypatch, caplog):
    Clock(monkeypatch)
    with caplog.at_level(logging.INFO, logger="leakmel"), Progress(10, show="log") as progress:
        for i in range(10):
            progress.update(i + 1)
    assert len(caplog.records) == 1


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_terminal_bar(monkeypatch, fails):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    assert front_end() == "terminal"
    progress = Progress(40, label="TESTING", show="auto")
    progress.update(12)
    progress.close("stopped" if fails else "done")
    last = screen.getvalue().split("\r")[-1]
    assert "TESTING" in last
    assert "12/40" in last
    assert ("stopped at 12 of 40 files" in last) is fails


class Terminal:
    "What stands on a terminal: rows of text, and the codes that tqdm moves about with."

    def __init__(self):
        self.rows, self.row, self.column = [""], 0, 0

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        raise OSError("no file")

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[A|\r|\n|[^\x1b\r\n]+", text):
            if part == "\x1b[A":
                self.row -= 1
            elif part == "\r":
                self.column = 0
            elif part == "\n":
                self.row, self.column = self.row + 1, 0
            else:
                self.rows += [""] * (self.row + 1 - len(self.rows))
                row = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = row[: self.column] + part + row[self.column + len(part) :]
                self.column += len(part)

    @property
    def lines(self) -> list[str]:
        return [row.rstrip() for row in self.rows if row.strip()]


def test_progress_bars_keep_their_rows(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(_Terminal, "every_s", 0.0)
    first, second = (Progress(40, label=label, show="terminal") for label in ("TRAINING", "TESTING"))
    first.update(12, "reading and computing, 3 rejected")
    assert screen.lines[0].startswith("TRAINING:  30%")
    assert screen.lines[0].endswith("reading and computing, 3 rejected]")
    assert screen.lines[1].startswith("TESTING:   0%")
    first.update(40, "published")
    assert "published" in screen.lines[0]
    for bar in (first, second):
        bar.stop_clock()
    for bar in (first, second):
        bar.close("stopped")
    assert [line.split(":")[0] for line in screen.lines] == ["TRAINING", "TESTING"]
    assert screen.row == 2, "whatever is written next stands below"


def test_progress_clock_starts_and_pauses(monkeypatch):
    clock = Clock(monkeypatch)
    bar = Progress(40, label="TESTING", show="none")
    clock.now_s = 110.0
    bar.begin()
    clock.now_s = 112.0
    bar.update(20)
    assert repr(bar) == "TESTING: 20 of 40 files in 2.0 s, 10 files/s, about 2.0 s left"
    bar.stop_clock()
    clock.now_s = 200.0
    bar.close()
    assert repr(bar) == "TESTING: 20 of 40 files in 2.0 s, 10 files/s"


def test_count_without_total_is_shown_when_slow(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with caplog.at_level("INFO", logger="leakmel"):
        with Progress(None, label="listing", show="log", after_s=1.0) as count:
            for _ in range(9):
                now[0] += 1.0
                count.add(1000)
        failing = Progress(None, label="listing", show="log", after_s=1.0)
        now[0] += 2.0
        failing.add(5)
        failing.__exit__(OSError, OSError(), None)
        with Progress(None, label="quick", show="log", after_s=1.0) as count:
            count.add(3)
        with Progress(None, label="silent", show="none", after_s=1.0) as count:
            now[0] += 9.0
            count.add(3)
    assert [r.getMessage() for r in caplog.records] == [
        "listing: 6,000 files in 6.0 s, 1,000 files/s",
        "listing: 9,000 files in 9.0 s, 1,000 files/s",
        "listing: stopped at 5 files in 2.0 s, 2.5 files/s",
    ]


def test_silent_front_end_and_detection_of_notebooks(capfd):
    assert front_end() in ("log", "terminal")
    with Progress(3, show="none") as progress:
        progress.update(3)
    assert capfd.readouterr() == ("", "")
    assert repr(progress).startswith("3 of 3 files")


def test_broken_progress_display_does_not_stop_the_work(monkeypatch):
    class Broken:
        every_s = 0.0

        def __init__(self, standing):
            pass

        def show(self, standing):
            raise BrokenPipeError

        close = show

    monkeypatch.setitem(__import__("leakmel.core.progress", fromlist=["x"])._FRONT_ENDS, "terminal", Broken)
    with Progress(3, show="terminal") as progress:
        progress.update(3)
    assert progress.n_done == 3


def test_progress_count_never_decreases():
    progress = Progress(10, show="none")
    for n in (3, 7, 5):
        progress.update(n)
    assert progress.n_done == 7


def test_unknown_front_end_is_refused():
    with pytest.raises(ValueError, match="known: auto, notebook"):
        Progress(1, show="tv")
