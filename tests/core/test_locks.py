"Locks with and without `flock`: one holder at a time, dead ones never block, and those of another computer are named."

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import h5py
import pytest
from each import each
from errors import raises
from independent import leftovers

import leakmel as lm
from leakmel.core import files as locks
from leakmel.core.errors import OutputError
from leakmel.core.files import OutputLock, Owner, OwnerLock, lock_kind, read_owner, this_owner
from leakmel.recordings import labels
from leakmel.recordings.labels import Decision, append_decision, read_decisions

WITHOUT_FLOCK = """
import errno, fcntl, os, pathlib, sys, time
def refused(fd, operation): raise OSError(errno.{code}, os.strerror(errno.{code}))
fcntl.flock = refused
from leakmel.core.files import OutputLock, OwnerLock
target = pathlib.Path(sys.argv[1])
"""
HOLD = "with OutputLock(target): print('held', flush=True); time.sleep(60)\n"


@pytest.fixture(params=["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    "A file system without flock, as its error; for flock, one that has it."
    if request.param == "flock":
        return "flock"

    def refused(fd: int, operation: int) -> None:
        raise OSError(getattr(errno, request.param), "no locks")

    monkeypatch.setattr(fcntl, "flock", refused)
    return str(request.param)


@contextmanager
def child(program: str, *words: object) -> Iterator[subprocess.Popen]:
    "A process that runs a program, and has printed its first line."
    command = [sys.executable, "-c", program, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            made.stdout.readline()
            yield made
        finally:
            made.kill()


def leave(target: Path, owner: Owner) -> Path:
    "Make the link of an owner."
    path = OwnerLock(target).path
    os.symlink(json.dumps(asdict(owner)), path)
    return path


def ended() -> Owner:
    "A process of this computer that has ended: another one has its number."
    return replace(this_owner(), started="before")


# ---- one holder


@pytest.mark.slow
def test_two_builders(tmp_path: Path, make_wav: Callable, code: str) -> None:
    "The second is refused and names the first; when the first was killed, the second builds."
    data, target = tmp_path / "data", tmp_path / "out" / "x.h5"
    target.parent.mkdir()
    for k in range(3):
        make_wav(data / "LEAK" / f"{k}.wav", seed=k)
    with child(WITHOUT_FLOCK.format(code=code) + HOLD, target) as holder:
        assert leftovers(target.parent) == [".x.h5.owner"]
        with raises("output-locked", OutputError, path=target, says=f"process {holder.pid} on ") as refused:
            lm.build(data, out=target, engine="reference", progress="none")
        assert str(OwnerLock(target).path) in refused.value.remedy
        holder.send_signal(signal.SIGKILL)  # a zombie: its parent has not asked for its status
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        result = lm.build(data, out=target, engine="reference", progress="none")
    assert result.rows == 3
    assert not any(name.endswith((".owner", ".lock")) for name in os.listdir(target.parent))
    assert lm.verify(target, root=data, sample=None).ok


@pytest.mark.slow
def test_the_hdf5_library_needs_no_lock(
    tmp_path: Path, make_wav: Callable, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    "It reports ENOLCK and EOPNOTSUPP as errors, and has made the file by then."
    real = h5py.File

    def opened(name: Any, mode: str = "r", **options: Any) -> h5py.File:
        file = real(name, mode, **options)
        if options.get("locking") is False:
            return file
        file.close()
        raise OSError(getattr(errno, code), "unable to lock file")

    monkeypatch.setattr(h5py, "File", opened)
    make_wav(tmp_path / "data" / "LEAK" / "a.wav")
    for expected in (1, 2):
        target = tmp_path / "x.h5"
        assert lm.build(tmp_path / "data", out=target, engine="reference", progress="none").rows == expected
        make_wav(tmp_path / "data" / "LEAK" / "b.wav", seed=2)
        with lm.open_dataset(target) as ds:
            assert len(ds) == expected


@pytest.mark.parametrize("code", ["flock", "ENOSYS", "ENOLCK", "EOPNOTSUPP"], indirect=True)
def test_one_holder_among_many_threads(tmp_path: Path, code: str) -> None:
    inside, most, refused = 0, 0, 0
    gate, start = threading.Lock(), threading.Barrier(8)

    def work() -> None:
        nonlocal inside, most, refused
        start.wait()
        for _ in range(30):
            try:
                with OutputLock(tmp_path / "a.h5"):
                    with gate:
                        inside += 1
                        most = max(most, inside)
                    with gate:
                        inside -= 1
            except OutputError:
                with gate:
                    refused += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert most == 1
    assert refused < 240
    assert leftovers(tmp_path) == []


RACE = """
import random
from leakmel.core import files as locks
real = locks.read_owner
def slowly(path):  # what was read may not hold any more when it is used
    found = real(path)
    time.sleep(random.random() / 200)
    return found
locks.read_owner, locks._POLL_S = slowly, 0.001
print("ready", flush=True)
sys.stdin.readline()
for n in range(20):
    lock = OwnerLock(target, wait_s=60).__enter__()
    os.close(os.open(sys.argv[2], os.O_CREAT | os.O_EXCL))
    os.unlink(sys.argv[2])
    if n % 2:  # as a process that is killed here, and whose number another one gets
        new = f"{lock.path}.{os.getpid()}"
        os.symlink(os.readlink(lock.path).replace('"started": "', '"started": "before '), new)
        os.replace(new, lock.path)
    else:
        lock.__exit__()
"""


def test_processes_that_take_over_at_once(tmp_path: Path) -> None:
    "Each holder makes a file that must not exist; every second leaves its link as a process that has ended."
    target, witness = tmp_path / "a.h5", tmp_path / "witness"
    leave(target, ended())
    program = WITHOUT_FLOCK.format(code="ENOSYS") + RACE
    command = [sys.executable, "-c", program, str(target), str(witness)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for child in running:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in running:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in running:
        child.communicate(timeout=120)
    assert [child.returncode for child in running] == [0, 0, 0, 0]


# ---- holders that have ended, and others


def test_processes_that_have_ended_do_not_block(tmp_path: Path) -> None:
    target, me = tmp_path / "a.h5", this_owner()
    reaped = subprocess.Popen(["true"])
    reaped.wait()
    for owner in (ended(), replace(me, pid=reaped.pid), replace(me, pid=1 << 40)):
        leave(target, owner)
        with OwnerLock(target) as lock:
            found = read_owner(lock.path)
            assert found is not None
            assert found.started == me.started
        assert leftovers(tmp_path) == []


def test_a_process_that_was_killed_while_it_removed_a_link_does_not_block(tmp_path: Path) -> None:
    target = tmp_path / "a.h5"
    leave(leave(leave(target, ended()), ended()), ended())
    with OwnerLock(target):
        assert leftovers(tmp_path) == [".a.h5.owner"]
    assert leftovers(tmp_path) == []


def test_a_process_whose_start_cannot_be_read_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "The mount option hidepid hides processes of other users."
    leave(tmp_path / "a.h5", ended())
    monkeypatch.setattr(locks, "_start_of", lambda pid: None)
    with raises("output-locked", OutputError), OwnerLock(tmp_path / "a.h5"):
        pass
    assert replace(this_owner(), pid=4_000_000, machine="").has_ended is False
    assert replace(this_owner(), started="").has_ended is False


@each("changes", [{"host": "node-17"}, {"machine": "another pid:[7]"}, {"host": "node-17", "started": ""}])
def test_a_process_of_another_computer_is_named(tmp_path: Path, code: str, changes: dict[str, str]) -> None:
    "Nothing is known of it: neither a number that is free here, nor a container with the same name, says that it has ended."
    target = tmp_path / "a.h5"
    owner = replace(this_owner(), pid=4_000_000, **changes)
    path = leave(target, owner)
    os.utime(path, (0, 0), follow_symlinks=False)
    with raises("output-locked", OutputError, path=target) as e, OutputLock(target):
        pass
    assert f"process 4000000 on {owner.host}, for " in e.value.found
    assert str(path) in e.value.remedy
    assert read_owner(path) == owner
    path.unlink()  # the remedy
    with OutputLock(target):
        pass


@each("text", ["", "x", "[]", '{"pid": 1}', None])
def test_what_is_no_record_is_an_unknown_owner(tmp_path: Path, text: str | None) -> None:
    path = OwnerLock(tmp_path / "a.h5").path
    if text:
        os.symlink(text, path)
    elif text is None:
        path.mkdir()
    else:
        path.touch()
    with (
        raises("output-locked", OutputError, path=tmp_path / "a.h5", says=str(path)),
        OwnerLock(tmp_path / "a.h5"),
    ):
        pass


def test_a_link_that_somebody_else_put_there_stays(tmp_path: Path) -> None:
    "Deleted by hand while the process ran, and made again by another one."
    target, other = tmp_path / "a.h5", replace(this_owner(), host="node-17")
    with OwnerLock(target) as lock:
        lock.path.unlink()
        leave(target, other)
    assert read_owner(OwnerLock(target).path) == other


def test_a_repeated_request_of_nfs_does_not_lock_out_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "The link was made, the answer was lost, and the repeated request reports that there is a link."
    real = os.symlink

    def twice(*args: Any) -> None:
        real(*args)
        real(*args)

    monkeypatch.setattr(os, "symlink", twice)
    with OwnerLock(tmp_path / "a.h5"):
        pass
    assert leftovers(tmp_path) == []


def test_waiting_for_a_holder(tmp_path: Path) -> None:
    target, said = tmp_path / "a.h5", list[str]()
    first = OwnerLock(target).__enter__()
    timer = threading.Timer(0.3, first.__exit__)
    timer.start()
    with OwnerLock(target, wait_s=60, say=said.append):
        assert said == [f"process {os.getpid()} on {os.uname().nodename}"]
    timer.join()


# ---- the table of decisions

APPEND = """
from leakmel.recordings.labels import Decision, append_decision
for k in range(25): append_decision(target, Decision(f"{sys.argv[2]}/{k}.wav", "", "LEAK", "a", "2026-01-31T08:15:00Z"))
"""


def test_people_who_label_at_once(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    program = WITHOUT_FLOCK.format(code="ENOLCK") + APPEND
    running = [subprocess.Popen([sys.executable, "-c", program, str(table), str(i)]) for i in range(3)]
    assert [each.wait(120) for each in running] == [0, 0, 0]
    assert sorted(d.path for d in read_decisions(table)) == sorted(
        f"{i}/{k}.wav" for i in range(3) for k in range(25)
    )
    assert leftovers(tmp_path) == ["labels.csv"]


def test_a_table_that_another_computer_writes_is_refused_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(labels, "_LOCK_WAIT_S", 0)
    table = tmp_path / "labels.csv"
    leave(table, replace(this_owner(), host="node-17"))
    with raises("output-locked", OutputError, path=table, says="node-17"):
        append_decision(table, Decision("a.wav", "", "LEAK", "a", "2026-01-31T08:15:00Z"))
    assert table.read_bytes() == b""


def test_one_table_by_two_names_has_one_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(labels, "_LOCK_WAIT_S", 0)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "labels.csv").symlink_to(tmp_path / "a" / "labels.csv")
    leave(tmp_path / "a" / "labels.csv", replace(this_owner(), host="node-17"))
    with raises("output-locked", OutputError):
        append_decision(
            tmp_path / "b" / "labels.csv", Decision("a.wav", "", "LEAK", "a", "2026-01-31T08:15:00Z")
        )


# ---- which lock works


def test_kind_of_lock(tmp_path: Path) -> None:
    assert lock_kind(tmp_path) == "flock"
    assert leftovers(tmp_path) == []


def test_kind_of_lock_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    assert lock_kind(tmp_path) == "owner"

    def no_links(*args: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "symlink", no_links)
    assert lock_kind(tmp_path) == ""
    with raises("write-failed", OutputError, says="EPERM"), OutputLock(tmp_path / "a.h5"):
        pass
    assert leftovers(tmp_path) == []
