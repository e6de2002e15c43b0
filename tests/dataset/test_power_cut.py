"""States of the disk after a power cut: unsynced writes are lost, torn or reordered.

Every change that a build makes to its folder is logged. A state after a power cut is made from the log's first part: of each file, what
was written before it was last confirmed (fsync, fdatasync) is there; of later writes each is there, in part, or not at all. Names (made, moved,
removed) are there up to the last confirmation of the folder, and some of the later ones, in their order, as journals of file systems keep it.
"""

import errno
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_resume import all_changes, build, data, fresh_bytes, settle  # noqa: F401 (data is a fixture)

import leakmel as lm
from leakmel.dataset import writer
from leakmel.dataset.job import Job
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.recordings.demo import write_wav

SYNCED = PipelineConfig(
    files_per_batch=4, compute_workers=2, fsync=True, monitor_interval_s=0.0, journal_bytes=1
)


@dataclass
class Op:
    "One change: of a file's content (`number` is the file's), of a name, or a confirmation."

    what: str  # "write", "size", "confirm"; "name", "move", "unname", "confirm names"
    number: int = -1
    at: int = 0
    content: bytes = b""
    name: str = ""
    goal: str = ""


@dataclass
class Log:
    "All changes below one folder, in order."

    folder: str
    ops: list[Op] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)  # as they are now
    lock: Any = field(default_factory=threading.RLock)
    n_files: int = 0
    before: int = 0  # changes that were made and confirmed before the build began

    def ours(self, path: Any) -> str:
        "The name of a file in the folder; empty for others."
        full = os.path.abspath(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else ""
        return os.path.basename(full) if os.path.dirname(full) == self.folder else ""

    def number_of(self, fd: int) -> int:
        "The file behind a descriptor; -1 for others."
        return self.names.get(self.ours(os.readlink(f"/proc/self/fd/{fd}")), -1)

    def add_file(self, name: str, content: bytes = b"") -> None:
        "A file that was not there, or that somebody wrote without our seeing it."
        self.names[name] = number = self.n_files
        self.n_files += 1
        self.ops += [Op("name", number, name=name), *([Op("write", number, 0, content)] if content else [])]

    def confirm_all(self) -> None:
        "What is there now is on the disk."
        for number in self.names.values():
            self.ops.append(Op("confirm", number))
        self.ops.append(Op("confirm names"))
        self.before = len(self.ops)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Log]:
    "Begin to log the changes below a folder, with what is in it confirmed."

    def begin(folder: Path) -> Log:
        folder.mkdir(exist_ok=True)
        log = Log(os.path.abspath(folder))
        for path in sorted(folder.iterdir()):
            log.add_file(path.name, path.read_bytes())
        log.confirm_all()
        patch(monkeypatch, log)
        return log

    return begin


def patch(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    "Log what goes through the system's calls; a file that HDF5 or Python's own files wrote is seen when it is moved or opened."
    allocate = writer.fallocate
    real = {
        name: getattr(os, name)
        for name in ("open", "pwrite", "write", "ftruncate", "fsync", "fdatasync", "replace", "unlink")
    }

    def opened(path: Any, flags: int, *args: Any, **named: Any) -> int:
        with log.lock:
            name = log.ours(path)
            new = bool(name) and flags & os.O_CREAT and not os.path.lexists(path)
            fd = real["open"](path, flags, *args, **named)
            if new:
                log.add_file(name)
            elif name and name not in log.names and stat.S_ISREG(os.fstat(fd).st_mode):
                log.add_file(name, Path(path).read_bytes())
            return fd

    def written(fd: int, content: Any, *at: int) -> int:
        with log.lock:
            place = at[0] if at else os.lseek(fd, 0, os.SEEK_END) if (number := log.number_of(fd)) >= 0 else 0
            n = real["pwrite" if at else "write"](fd, content, *at)
            if (number := log.number_of(fd)) >= 0:
                log.ops.append(Op("write", number, place, bytes(memoryview(content).cast("B")[:n])))
            return n

    def sized(fd: int, size: int) -> None:
        with log.lock:
            real["ftruncate"](fd, size)
            if (number := log.number_of(fd)) >= 0:
                log.ops.append(Op("size", number, size))

    def reserved(fd: int, n: int, **hole: int) -> None:
        with log.lock:
            before = os.fstat(fd).st_size
            allocate(fd, n, **hole)
            if (number := log.number_of(fd)) >= 0 and n > before:
                log.ops.append(Op("size", number, n))

    def confirmed(name: str) -> Callable[[int], None]:
        def confirm(fd: int) -> None:
            with log.lock:
                before = len(log.ops)
            real[name](fd)
            with log.lock:
                where = os.readlink(f"/proc/self/fd/{fd}")
                # what came after the confirmation began may not be covered by it
                if where == log.folder:
                    log.ops.insert(before, Op("confirm names"))
                elif (number := log.number_of(fd)) >= 0:
                    log.ops.insert(before, Op("confirm", number))

        return confirm

    def replaced(source: Any, goal: Any) -> None:
        with log.lock:
            a, b = log.ours(source), log.ours(goal)
            if b and a not in log.names:
                log.add_file(a, Path(source).read_bytes())
            real["replace"](source, goal)
            if b:
                log.ops.append(Op("move", name=a, goal=b))
                log.names[b] = log.names.pop(a)

    def unlinked(path: Any, *args: Any, **named: Any) -> None:
        with log.lock:
            real["unlink"](path, *args, **named)
            if (name := log.ours(path)) in log.names:
                log.ops.append(Op("unname", name=name))
                log.names.pop(name)

    for name, wrapped in {
        "open": opened,
        "pwrite": written,
        "write": written,
        "ftruncate": sized,
        "fsync": confirmed("fsync"),
        "fdatasync": confirmed("fdatasync"),
        "replace": replaced,
        "unlink": unlinked,
    }.items():
        monkeypatch.setattr(os, name, wrapped)
    monkeypatch.setattr(writer, "fallocate", reserved)


def after_the_cut(log: Log, rng: random.Random) -> dict[str, bytes]:
    "One state that the disk may be in: contents by name."
    cut = rng.randint(log.before, len(log.ops))
    ops = log.ops[:cut]
    sure = {op.number: i for i, op in enumerate(ops) if op.what == "confirm"}
    names_sure = max((i for i, op in enumerate(ops) if op.what == "confirm names"), default=-1)
    names_until = rng.randint(names_sure + 1, cut) if names_sure + 1 <= cut else cut
    loss = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    contents: dict[int, bytearray] = {}
    names: dict[str, int] = {}
    for i, op in enumerate(ops):
        is_sure = i <= sure.get(op.number, -1)
        if op.what in ("write", "size") and (is_sure or rng.random() >= loss):
            change(contents.setdefault(op.number, bytearray()), op, None if is_sure else rng)
        if i >= names_until:
            continue
        if op.what == "name":
            names[op.name] = op.number
        elif op.what == "move" and op.name in names:
            names[op.goal] = names.pop(op.name)
        elif op.what == "unname":
            names.pop(op.name, None)
    return {name: bytes(contents.get(number, b"")) for name, number in names.items()}


def change(content: bytearray, op: Op, rng: random.Random | None) -> None:
    "Apply a write, whole or (with rng) perhaps torn, or a size."
    if op.what == "size":
        del content[op.at :]
        content.extend(bytes(op.at - len(content)))
        return
    part = (
        op.content if rng is None or rng.random() < 0.5 else op.content[: rng.randrange(len(op.content) + 1)]
    )
    content.extend(bytes(max(0, op.at + len(part) - len(content))))
    content[op.at : op.at + len(part)] = part


def test_simulation_detects_a_build_without_fsync(
    data: Path,  # noqa: F811
    tmp_path: Path,
    logged: Callable,
) -> None:
    "The states are bad enough to show what waiting is for."
    target = tmp_path / "out" / "x.h5"
    log = logged(target.parent)
    right = build(
        data, target, pipeline=PipelineConfig(files_per_batch=4, fsync=False, monitor_interval_s=0.0)
    ).path.read_bytes()
    rng = random.Random(1)
    wrong = sum(
        state.get("x.h5") not in (None, right) for state in (after_the_cut(log, rng) for _ in range(2000))
    )
    assert wrong > 20


def states_of(log: Log, n: int, seed: int) -> list[dict[str, bytes]]:
    rng = random.Random(seed)
    return [after_the_cut(log, rng) for _ in range(n)]


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("n", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_state_after_a_power_cut_publishes_a_wrong_row(
    data: Path,  # noqa: F811
    tmp_path: Path,
    logged: Callable,
    tried: Callable,
    compression: str,
    n: int,
) -> None:
    "A build from nothing, then one over it: what stands under the final name is nothing, the old or the new data set, to the byte."
    target, config = tmp_path / "out" / "x.h5", PipelineConfig(**{**vars(SYNCED), "compression": compression})
    log = logged(target.parent)
    old = build(data, target, pipeline=config).path.read_bytes()
    assert {state.get("x.h5") for state in states_of(log, n // 2, 2)} == {None, old}
    all_changes(data)
    settle()
    log.ops = [
        op
        for name, number in log.names.items()
        for op in (Op("name", number, name=name), Op("write", number, 0, (target.parent / name).read_bytes()))
    ]
    log.confirm_all()
    new = build(data, target, pipeline=config).path.read_bytes()
    assert {state.get("x.h5") for state in states_of(log, n // 2, 3)} == {old, new}
    tried("S2", n // 2 * 2)


@pytest.mark.slow
@pytest.mark.parametrize("n", [15, pytest.param(400, marks=pytest.mark.long)])
def test_builds_resume_from_any_state_after_a_power_cut(
    data: Path,  # noqa: F811
    tmp_path: Path,
    logged: Callable,
    tried: Callable,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
) -> None:
    target = tmp_path / "out" / "x.h5"
    log, real = logged(target.parent), Job.take

    def slow(job: Job, slot: Any) -> Any:
        time.sleep(0.02)  # so that entries are made on the way
        return real(job, slot)

    monkeypatch.setattr(Job, "take", slow)
    build(data, target, pipeline=SYNCED)
    states = [s for s in states_of(log, 20 * n, 4) if any(name.endswith(".partial") for name in s)][:n]
    assert len(states) == n
    monkeypatch.undo()
    right, resumed = fresh_bytes(data, tmp_path), 0
    for state in states:
        shutil.rmtree(target.parent)
        target.parent.mkdir()
        for name, content in state.items():
            (target.parent / name).write_bytes(content)
        result = build(data, target, pipeline=SYNCED)
        resumed += result.summary["resumed_rows"]
        assert target.read_bytes() == right
        tried("S2")
    assert resumed > 0, "what was confirmed is not done again"


def test_fsync_order_is_rows_then_journal_then_rename(
    data: Path,  # noqa: F811
    tmp_path: Path,
    logged: Callable,
) -> None:
    target = tmp_path / "out" / "x.h5"
    log = logged(target.parent)
    build(data, target, pipeline=SYNCED)
    named = {op.number: op.name for op in log.ops if op.what == "name"}
    moved = next(i for i, op in enumerate(log.ops) if op.what == "move" and op.goal == "x.h5")
    partial = next(number for number, name in named.items() if name == ".x.h5.partial")
    last_write = max(
        i for i, op in enumerate(log.ops) if op.what in ("write", "size") and op.number == partial
    )
    assert any(op.what == "confirm" and op.number == partial for op in log.ops[last_write:moved])
    assert any(op.what == "confirm names" for op in log.ops[moved:])


def test_failed_fsync_stops_the_build(
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    real = Job.take

    def slow(job: Job, slot: Any) -> Any:
        time.sleep(0.02)  # so that entries are made on the way
        return real(job, slot)

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, broken)
        monkeypatch.setattr(Job, "take", slow)
        with pytest.raises(lm.LeakmelError, match="EIO"):
            build(data, tmp_path / "out" / "x.h5", pipeline=SYNCED)
        assert not (tmp_path / "out" / "x.h5").exists()
        monkeypatch.undo()


def test_log_ignores_other_folders(tmp_path: Path) -> None:
    "The log sees nothing of folders that are not its own."
    log = Log(os.path.abspath(tmp_path / "out"))
    write_wav(tmp_path / "a.wav", np.zeros(10, np.int16), 4096)
    assert log.ours(tmp_path / "a.wav") == ""
    assert log.ours(tmp_path / "out" / "x") == "x"
