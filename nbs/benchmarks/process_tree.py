"""What a command took: wall time, processor time, and the memory of its whole process tree."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import psutil

from leakmel.core.errors import MachineError


def tree_bytes(process: psutil.Process) -> int:  # bytes; 0 when it has ended
    "Memory of a process and of all that descend from it, as it is now."
    resident, shares, tree = [], [], [process]
    with suppress(psutil.Error):
        tree += process.children(recursive=True)
    for each in tree:
        with suppress(psutil.Error):  # ended meanwhile
            resident.append(each.memory_info().rss)
            if len(tree) > 1:
                shares.append(getattr(each.memory_full_info(), "pss", resident[-1]))
    return max(sum(shares), max(resident, default=0))


class TreeWatch:
    "Look at a process tree again and again while the body runs."

    def __init__(self, pid: int, interval_s: float = 0.02):  # seconds between looks
        self.peak_bytes, self._pid, self._interval_s, self._stop = 0, pid, interval_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="leakmel-tree", daemon=True)

    def __enter__(self) -> "TreeWatch":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(psutil.Error):
            process = psutil.Process(self._pid)
            while not self._stop.is_set():
                self.peak_bytes = max(self.peak_bytes, tree_bytes(process))
                self._stop.wait(self._interval_s)


@dataclass(frozen=True)
class Took:
    "A command that ended."

    status: int  # exit status; -n: ended by signal n
    wall_s: float  # from start to end of the process
    cpu_s: float  # user and system time, that of children it waited for included
    peak_bytes: int | None  # of the tree; None: it was not watched
    text: str  # what it wrote to standard output
    stderr_end: str  # the end of what it wrote to standard error


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run_command(
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,  # added to the environment
    watch: bool = False,  # look at the memory of its tree
    limit_s: float = 600,  # after which it is ended
) -> Took:  # raises MachineError for one that had to be ended
    "Run a command and account for it."
    with tempfile.TemporaryFile("w+", errors="replace") as err:
        began = time.perf_counter()
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        timer = threading.Timer(limit_s, _end_group, [process.pid])
        timer.start()
        try:
            watching = TreeWatch(process.pid) if watch else None
            text, status, usage = _wait(process, watching)
            wall_s = time.perf_counter() - began
        finally:
            timer.cancel()
            _end_group(process.pid)  # children that were left behind
        err.seek(0)
        stderr_end = err.read()[-2000:]
    if wall_s >= limit_s:
        raise MachineError(
            f"no end after {limit_s:g} s", found=stderr_end[-200:], remedy="give it fewer recordings"
        )
    return Took(
        status,
        wall_s,
        usage.ru_utime + usage.ru_stime,
        None if watching is None else watching.peak_bytes,
        text,
        stderr_end,
    )


def _wait(process: subprocess.Popen, watching: TreeWatch | None) -> tuple[str, int, "os.struct_rusage"]:  # type: ignore[name-defined]
    "Wait for a process; what it printed, its exit status, what it used."
    assert process.stdout is not None
    with watching or nullcontext(), process.stdout:
        text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return text, process.returncode, usage
