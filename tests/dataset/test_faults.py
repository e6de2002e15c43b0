"Bad input, broken machines, wrong engines, signals: a clear error with its cause, no thread left, nothing half written, the old data set intact."

import errno
import fcntl
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from errors import raises
from independent import check, content, leftovers, log_mel, walk
from left_threads import left_threads

import leakmel as lm
from leakmel.core.errors import (
    DataError,
    EngineError,
    LeakmelError,
    MachineError,
    OutputError,
    SpaceError,
    SpecError,
    VerifyError,
)
from leakmel.core.files import OutputLock
from leakmel.dataset import inputs, job, loader, publish, writer
from leakmel.dataset.job import Job, may_resume
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.dataset.targets import Ring
from leakmel.dataset.writer import RowFile
from leakmel.mel import engines
from leakmel.mel import spec as mel_spec
from leakmel.mel.engines import ReferenceEngine
from leakmel.recordings.demo import write_demo

IN_SMALL_STEPS = PipelineConfig(
    files_per_batch=4, read_workers=2, compute_workers=2, slots=4, monitor_interval_s=0.0
)
QUIET: dict[str, Any] = {"progress": "none", "fresh": True, "pipeline": IN_SMALL_STEPS}
BESIDE = ["x.h5", "x.h5.report.json", "x.h5.timeline.json"]


@pytest.fixture(autouse=True, params=["hand to hand", "each for itself"])
def worker_layout(request, monkeypatch) -> str:
    "Both layouts of threads: readers, engine threads and a writer, or threads that do all steps."
    alone = {} if request.param == "hand to hand" else {"read_workers": None, "slots": None}
    monkeypatch.setitem(QUIET, "pipeline", replace(QUIET["pipeline"], **alone))
    return request.param


# Of tests whose fault has nothing to do with threads, or happens in a process with a layout of its own.
ANY_LAYOUT = pytest.mark.parametrize(
    "worker_layout", ["each for itself", pytest.param("hand to hand", marks=pytest.mark.long)], indirect=True
)


@pytest.fixture
def data(tmp_path, make_wav) -> Path:
    "30 recordings of 1 s with two labels."
    root = tmp_path / "data"
    for k in range(30):
        make_wav(root / ("LEAK" if k % 2 else "NOLEAK") / f"{k:02d}.wav", seed=k)
    return root


@pytest.fixture
def old(tmp_path, data) -> bytes:
    "An older data set at out/x.h5."
    lm.build(data, out=tmp_path / "out" / "x.h5", engine="reference", **QUIET)
    return (tmp_path / "out" / "x.h5").read_bytes()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    "Every thread of a build has ended when it returns or raises."
    before = left_threads()
    yield
    assert left_threads() <= before


def fails(
    data: Path,
    tmp_path: Path,
    kind: type[BaseException],
    match: str | None = None,
    *,
    code: str | None = None,
    **options,
) -> Any:
    "A build over the old data set fails, and leaves it as it was."
    options = {"engine": "reference"} | QUIET | options
    target = tmp_path / "out" / "x.h5"
    before = target.read_bytes() if target.exists() else None
    threads = left_threads()
    with pytest.raises(kind, match=match) as e:
        lm.build(data, out=target, **options)
    assert code is None or getattr(e.value, "code", None) == code
    assert left_threads() <= threads
    assert (target.read_bytes() if target.exists() else None) == before
    if target.parent.is_dir():
        assert_only_resumable(target, e.value, BESIDE if before else [])
    return e.value


def assert_only_resumable(target: Path, error: BaseException, known: list[str]) -> None:
    "An interrupted build leaves nothing, or what the same build goes on from, and says so."
    left = leftovers(target.parent, *known)
    assert left in ([], [f".{target.name}.journal", f".{target.name}.partial"])
    assert bool(left) == (
        "are kept: run the same build again to resume" in " ".join(getattr(error, "__notes__", []))
    )
    if left:
        assert may_resume(error)


# ---- bad input


@ANY_LAYOUT
def test_missing_root(tmp_path):
    e = fails(tmp_path / "nowhere", tmp_path, DataError, "no such folder")
    assert str(tmp_path / "nowhere") in str(e)
    assert "TRAINING" in str(e)  # the remedy
    assert leftovers(tmp_path) == []


@ANY_LAYOUT
def test_root_is_a_file(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    fails(tmp_path / "f", tmp_path, DataError, "is a file")


@ANY_LAYOUT
def test_empty_split(tmp_path, data, make_wav):
    root = tmp_path / "splits"
    make_wav(root / "TRAINING" / "LEAK" / "a.wav")
    (root / "VALIDATION" / "LEAK").mkdir(parents=True)
    e = fails(root, tmp_path, DataError, code="no-recordings", split="validation")
    assert str(root / "VALIDATION") in str(e)
    with raises("no-recordings", DataError):
        lm.build_all(root, out_dir=tmp_path / "out", **QUIET)
    assert leftovers(tmp_path / "out") == []
    with pytest.raises(DataError, match="no folder for the split TESTING"):
        lm.build(root, split="test", out=tmp_path / "out" / "x.h5", **QUIET)


@ANY_LAYOUT
def test_folder_without_anything(tmp_path):
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", tmp_path, DataError, code="no-recordings")


@ANY_LAYOUT
def test_recordings_without_label_folders(tmp_path, make_wav):
    make_wav(tmp_path / "flat" / "a.wav")
    e = fails(tmp_path / "flat", tmp_path, DataError, code="no-label-folders")
    assert e.expected == "one folder per label"


@ANY_LAYOUT
def test_label_without_recordings(tmp_path, make_wav):
    root = tmp_path / "splits"
    for split in ("TRAINING", "TESTING"):
        make_wav(root / split / "LEAK" / "a.wav")
    (root / "TRAINING" / "CRACK").mkdir()
    fails(root, tmp_path, DataError, "CRACK", code="empty-label", split="training")
    make_wav(root / "TESTING" / "CRACK" / "b.wav")
    assert lm.build(root, split="training", out=tmp_path / "y.h5", **QUIET).rows == 1


@ANY_LAYOUT
def test_part_of_a_root_is_not_listed_again(tmp_path, make_wav, monkeypatch):
    "A label that a part lacks is no reason to list the root again: the whole was checked."
    root = tmp_path / "data"
    for label in ("LEAK", "NOLEAK"):
        for k in range(3):
            make_wav(root / label / "deep" / f"{k}.wav", seed=k)
    whole = lm.scan(root)

    def again(*given, **named):
        raise AssertionError("the root must not be listed again")

    with monkeypatch.context() as m:
        m.setattr(inputs, "scan", again)
        made = lm.build_part(
            root, part="1/3", manifest=whole, out=tmp_path / "x.h5", progress="none", engine="cpu"
        )
    assert made.found == 2
    (root / "EMPTY").mkdir()
    fails(root, tmp_path, DataError, "EMPTY", code="empty-label")
    (root / "EMPTY" / "link").symlink_to(root / "spare")
    make_wav(root / "spare" / "a.wav")  # a label of its own, behind the link of another one
    fails(root, tmp_path, DataError, "EMPTY", code="empty-label")


@ANY_LAYOUT
def test_all_files_rejected(tmp_path):
    root = tmp_path / "bad"
    (root / "LEAK").mkdir(parents=True)
    for k in range(9):
        (root / "LEAK" / f"{k}.wav").write_bytes(b"" if k % 2 else b"RIFF....")
    e = fails(root, tmp_path, DataError, "all recordings were rejected", spec=lm.MelSpec(duration_s=1.0))
    assert "5 not_wav" in str(e)
    assert "4 empty" in str(e)
    assert "first LEAK/0.wav" in str(e)
    e = fails(root, tmp_path, DataError, code="nothing-readable")
    assert re.search(r"`leakmel scan .* --content`", str(e))


@ANY_LAYOUT
def test_output_folder_is_a_file(tmp_path, data):
    (tmp_path / "f").write_bytes(b"x")
    for target in (tmp_path / "f" / "x.h5", tmp_path / "f" / "g" / "x.h5"):
        with pytest.raises(OutputError) as e:
            lm.build(data, out=target, **QUIET)
        assert str(tmp_path / "f") in str(e.value)
    assert (tmp_path / "f").read_bytes() == b"x"


@ANY_LAYOUT
def test_output_is_a_folder(tmp_path, data):
    (tmp_path / "x.h5").mkdir()
    with raises("output-is-folder", OutputError, path=tmp_path / "x.h5"):
        lm.build(data, out=tmp_path / "x.h5", **QUIET)
    assert leftovers(tmp_path, "data") == ["x.h5"]


@ANY_LAYOUT
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_folder_without_permission(tmp_path, data):
    (tmp_path / "out").mkdir(mode=0o500)
    fails(data, tmp_path, OutputError, code="output-not-writable")


@ANY_LAYOUT
def test_output_folder_that_refuses_writes(tmp_path, data, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    fails(data, tmp_path, OutputError, code="output-not-writable")


@ANY_LAYOUT
@pytest.mark.parametrize("where", ["x.h5", "LEAK/x.h5", "new/x.h5", "../data/x.h5", "../link/x.h5"])
def test_output_inside_the_input(tmp_path, data, where):
    (tmp_path / "link").symlink_to(data)
    before = walk(data), sorted(os.listdir(data))
    with raises("inside-data", OutputError):
        lm.build(data, out=data / where, **QUIET)
    assert (walk(data), sorted(os.listdir(data))) == before


@ANY_LAYOUT
def test_input_inside_the_output_is_fine(tmp_path, data):
    assert lm.build(data, out=tmp_path / "x.h5", **QUIET).rows == 30


@ANY_LAYOUT
def test_insufficient_space_is_reported_before_work(tmp_path, data, old, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    monkeypatch.setattr(loader.BatchReader, "fill", lambda *a: pytest.fail("work had begun"))
    e = fails(data, tmp_path, SpaceError, "bytes are missing")
    assert isinstance(e, SpaceError)
    assert e.exit_code == 3
    assert str(tmp_path / "out") in str(e)


@ANY_LAYOUT
def test_empty_mel_band(tmp_path, data):
    e = fails(data, tmp_path, SpecError, "contains no frequency bin", spec={"n_fft": 128, "n_mels": 64})
    assert "Use n_mels=60 or fewer" in str(e)
    e = fails(data, tmp_path, SpecError, "no long segment fits", spec={"long_window": 5000})


# ---- a fault in each thread


def test_read_faults_of_the_machine(tmp_path, data, old, monkeypatch):
    monkeypatch.setattr(loader, "native", lambda: None)  # read by Python, where faults can be planted
    real = os.preadv
    for code in (errno.EIO, errno.EMFILE, errno.ENOMEM):
        calls: list[int] = []

        def broken(fd, views, at, *flags, code=code, calls=calls):
            if flags:
                return real(fd, views, at, *flags)  # a look at the page cache, which fails in silence
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(data)):  # not rows that are read back
                calls.append(fd)
                if len(calls) == 12:
                    raise OSError(code, os.strerror(code))
            return real(fd, views, at)

        monkeypatch.setattr(os, "preadv", broken)
        e = fails(data, tmp_path, MachineError, errno.errorcode[code], fresh=True)
        assert str(data) in str(e)
        assert "no recording was rejected" in str(e)


@pytest.mark.slow
@pytest.mark.parametrize("nth", [1, 3])
def test_rows_that_cannot_be_read_back(tmp_path, data, old, monkeypatch, nth):
    "A fault of the disk while a worker reads its rows back, by compiled code or in Python, is an error of the output, not of recordings."
    compiled = importlib.import_module("leakmel.recordings.native")._FUNCTIONS
    real, real_digests, calls = os.preadv, compiled["digest_file_rows"], []

    def is_broken(fd: int) -> bool:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path / "out")):
            return False
        calls.append(fd)
        return len(calls) == nth

    def broken(fd, views, at, *flags):
        if not flags and is_broken(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, at, *flags)

    def broken_digests(place, *arrays):
        return errno.EIO if is_broken(int(place[0])) else real_digests(place, *arrays)

    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setitem(compiled, "digest_file_rows", broken_digests)
    e = fails(data, tmp_path, OutputError, "EIO", fresh=True)
    assert str(tmp_path / "out") in str(e)
    assert len(calls) >= nth
    (data / "LEAK" / "29.wav").unlink()
    calls.clear()
    e = fails(data, tmp_path, OutputError, "EIO")  # an update, which copies rows
    assert str(tmp_path / "out") in str(e)


def test_open_faults_of_the_machine(tmp_path, data, old, monkeypatch):
    monkeypatch.setattr(loader, "native", lambda: None)  # read by Python, where faults can be planted
    real = os.open

    def broken(path, flags, *more, **named):
        if str(path).endswith("17.wav'"):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", broken)
    e = fails(data, tmp_path, MachineError, "EMFILE")
    assert "17.wav" in str(e)


@ANY_LAYOUT
def test_machine_fault_while_the_spec_looks_at_the_data(tmp_path, data, old, monkeypatch):
    def broken(fd, n, at):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", broken)
    e = fails(data, tmp_path, MachineError, "EIO")
    assert str(data) in str(e)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access"),
        pytest.param(ValueError("shapes do not fit"), marks=pytest.mark.long),
        EngineError("batch failed"),
    ],
)
def test_engine_raises(tmp_path, data, old, monkeypatch, error):
    calls = []

    def run(self, samples, out, **more):
        calls.append(1)
        if len(calls) == 5:
            raise error
        out[...] = 0
        return np.zeros((len(samples), 5))

    monkeypatch.setattr(engines, "self_check", lambda engine: None)
    monkeypatch.setattr(ReferenceEngine, "run", run)
    e = fails(data, tmp_path, EngineError, str(error))
    assert e is error or e.__cause__ is error


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf, pytest.param(-np.inf, marks=pytest.mark.long)])
def test_engine_that_returns_nan_fails_the_build(tmp_path, data, old, monkeypatch, value):
    real = ReferenceEngine.run

    def run(self, samples, out, **more):
        moments = real(self, samples, out, **more)
        out[-1, -1, -1, -1, -1] = value
        return moments

    monkeypatch.setattr(engines, "self_check", lambda engine: None)
    monkeypatch.setattr(ReferenceEngine, "run", run)
    for checked in (0, 1, 64):
        fails(data, tmp_path, VerifyError, "not finite", code="wrong-rows", check=checked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        (errno.ENOSPC, SpaceError, 3),
        pytest.param(errno.EDQUOT, SpaceError, 3, marks=pytest.mark.long),
        (errno.EIO, OutputError, 1),
        pytest.param(errno.EROFS, OutputError, 1, marks=pytest.mark.long),
    ],
)
def test_writing_fails_in_the_middle(tmp_path, data, old, monkeypatch, code, kind, status):
    real, calls = RowFile.write, []

    def write(self, first, rows, part=0):
        calls.append(first)
        if len(calls) == 4:
            raise OSError(code, os.strerror(code))
        return real(self, first, rows)

    monkeypatch.setattr(RowFile, "write", write)
    e = fails(data, tmp_path, kind, errno.errorcode[code])
    assert isinstance(e, LeakmelError)
    assert e.exit_code == status
    assert str(tmp_path / "out") in str(e)


@pytest.mark.slow
@ANY_LAYOUT
@pytest.mark.parametrize("step", ["compact_rows", "finish", "sync", "publish"])
def test_publishing_fails(tmp_path, data, old, monkeypatch, step):
    def broken(self, *a, **k):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RowFile, step, broken)
    e = fails(data, tmp_path, SpaceError, "ENOSPC")
    assert str(tmp_path / "out") in str(e)


@ANY_LAYOUT
def test_renaming_fails(tmp_path, data, old, monkeypatch):
    def broken(a, b):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), a)

    monkeypatch.setattr(os, "replace", broken)
    fails(data, tmp_path, OutputError, "EACCES")


@ANY_LAYOUT
def test_metadata_writing_fails(tmp_path, data, old, monkeypatch):
    def broken(file, meta):
        raise OSError(errno.ENOSPC, "Can't write data (No space left on device)")

    monkeypatch.setattr(writer, "write_metadata", broken)
    fails(data, tmp_path, SpaceError)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["read", "compute", "write", "publish"])
def test_memory_runs_out_in_any_thread(tmp_path, data, old, monkeypatch, where):
    def broken(*a, **k):
        raise MemoryError

    match where:
        case "read":
            monkeypatch.setattr(loader.BatchReader, "fill", broken)
        case "compute":
            monkeypatch.setattr(engines, "self_check", lambda engine: None)
            monkeypatch.setattr(ReferenceEngine, "run", broken)
        case "write":
            monkeypatch.setattr(Job, "take", broken)
        case "publish":
            monkeypatch.setattr(publish, "job_metadata", broken)
    e = fails(data, tmp_path, MachineError, "out of memory")
    assert "files_per_batch" in str(e)


def test_slots_that_cannot_be_allocated(tmp_path, data, old, monkeypatch):
    from leakmel.dataset import targets

    def broken(*a):
        raise MemoryError

    monkeypatch.setattr(targets, "Slot", broken)
    fails(data, tmp_path, MachineError, "out of memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    "allowed", [0, pytest.param(1, marks=pytest.mark.long), 3, pytest.param(5, marks=pytest.mark.long)]
)
def test_threads_that_cannot_be_started(tmp_path, data, old, monkeypatch, allowed, worker_layout):
    allowed = min(
        allowed, 5 if worker_layout == "hand to hand" else 2
    )  # two readers, two engine threads, writer, publisher; or two workers, publisher
    begun: list[str] = []
    real = threading.Thread.start

    def start(self):
        if self.name.startswith("leakmel"):
            if len(begun) == allowed:
                raise RuntimeError("can't start new thread")
            begun.append(self.name)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    fails(data, tmp_path, MachineError, "can't start new thread")


def test_many_faults_at_once_give_one_error(tmp_path, data, old, monkeypatch):
    monkeypatch.setattr(loader, "native", lambda: None)  # read by Python, where faults can be planted

    def broken(*a, **k):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setattr(RowFile, "write", broken)
    fails(data, tmp_path, LeakmelError, "EIO")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["fill", "run", "take", "sync"])
def test_interrupt_in_the_main_thread_ends_all_threads(tmp_path, data, old, monkeypatch, stage):
    "Ctrl-C while a thread is busy: everybody leaves."
    busy = threading.Event()
    owner = {"fill": loader.BatchReader, "run": ReferenceEngine, "take": Job, "sync": RowFile}[stage]
    real = getattr(owner, stage)

    def slow(self, *a, **k):
        busy.set()
        return real(self, *a, **k)

    monkeypatch.setattr(owner, stage, slow)

    def wait(self, timeout=None):
        assert busy.wait(60)
        raise KeyboardInterrupt

    ring_wait = type("Finished", (threading.Event,), {"wait": wait})
    real_init = Ring.__init__

    def init(self, *a, **k):
        real_init(self, *a, **k)
        self.finished = ring_wait()

    monkeypatch.setattr(engines, "self_check", lambda engine: None)
    monkeypatch.setattr(Ring, "__init__", init)
    target = tmp_path / "new" / "x.h5"
    with pytest.raises(KeyboardInterrupt) as e:
        lm.build(data, out=target, engine="reference", **QUIET)
    assert_only_resumable(target, e.value, BESIDE if target.exists() else [])
    monkeypatch.undo()
    lm.build(data, out=target, engine="reference", **QUIET | {"fresh": False})
    assert target.read_bytes() == old
    assert leftovers(target.parent, *BESIDE) == []


@ANY_LAYOUT
def test_report_that_cannot_be_written_is_an_output_error(tmp_path, data):
    (tmp_path / "out" / "x.h5.report.json").mkdir(parents=True)
    with raises("report-not-written", OutputError, says="x.h5.report.json"):
        lm.build(data, out=tmp_path / "out" / "x.h5", **QUIET)


@pytest.mark.slow
@ANY_LAYOUT
@pytest.mark.parametrize("lost", ["timeline", "report"])
def test_full_disk_at_the_report_leaves_no_outdated_report(tmp_path, data, old, monkeypatch, lost):
    "What was published stands and is said to; what lies beside it is about it, or is not there."
    target = tmp_path / "out" / "x.h5"
    real = {way: getattr(Path, way) for way in ("write_text", "open")}

    def full(self, *a, way: str, **k):
        if f".{lost}.json" in self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real[way](self, *a, **k)

    for way in real:
        monkeypatch.setattr(Path, way, partialmethod(full, way=way))
    with raises("report-not-written", SpaceError) as e:
        lm.build(data, out=target, spec={"n_mels": 16}, **QUIET)
    assert f"x.h5.{lost}.json: there is no room left on the file system (ENOSPC" in str(e.value)
    monkeypatch.undo()
    with lm.open_dataset(target) as ds:
        assert ds.mels.shape[3] == 16, "the new one"
    assert lm.verify(target, root=data, sample=None).ok
    assert leftovers(target.parent) == ["x.h5"] + ["x.h5.timeline.json"] * (lost == "report")


@ANY_LAYOUT
def test_a_data_set_that_is_not_replaced_keeps_its_report(tmp_path, data, old, monkeypatch):
    reports = {name: (tmp_path / "out" / name).read_bytes() for name in BESIDE}
    monkeypatch.setattr(publish, "check_data_set", lambda *a, **k: 1 / 0)
    fails(data, tmp_path, ZeroDivisionError)
    monkeypatch.undo()

    def broken(columns):
        raise KeyError(f"unable to read: errno = {errno.EIO}, error message = 'Input/output error'")

    monkeypatch.setattr(job, "fields", broken)  # while the columns are read back
    for fresh in (False, True):
        fails(data, tmp_path, MachineError, "EIO", code="io-fault", fresh=fresh)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in BESIDE} == reports


@ANY_LAYOUT
def test_second_build_does_not_disturb_the_first(tmp_path, data, old):
    target = tmp_path / "out" / "x.h5"
    with OutputLock(target):
        with pytest.raises(OutputError, match=f"process {os.getpid()}"):
            lm.build(data, out=target, **QUIET)
        assert leftovers(tmp_path / "out", *BESIDE) == [".x.h5.lock"]
    assert target.read_bytes() == old


@ANY_LAYOUT
def test_failure_of_one_split_keeps_data_sets_and_reports_consistent(tmp_path, data, make_wav):
    "The first split may stand, then with its own report; of the other one nothing."
    root, out = tmp_path / "splits", tmp_path / "out"
    for k in range(20):
        make_wav(root / "TRAINING" / "LEAK" / f"{k}.wav", seed=k)
    make_wav(root / "VALIDATION" / "LEAK" / "a.wav")
    lm.build_all(root, out_dir=out, **QUIET)
    (root / "VALIDATION" / "LEAK" / "a.wav").write_bytes(b"")
    make_wav(root / "TRAINING" / "LEAK" / "new.wav", seed=77)
    old_validation = (out / "VALIDATION_DATASET.H5").read_bytes()
    with pytest.raises(DataError, match="all recordings were rejected"):
        lm.build_all(root, out_dir=out, **QUIET)
    assert (out / "VALIDATION_DATASET.H5").read_bytes() == old_validation
    import json

    report = json.loads((out / "TRAINING_DATASET.H5.report.json").read_text())
    assert report["rows"] == len(content(out / "TRAINING_DATASET.H5")["labels"])


# ---- files that change between listing and reading


def grow(p: Path) -> None:
    p.write_bytes(p.read_bytes() + b"\0\0")


def shrink(p: Path) -> None:
    p.write_bytes(p.read_bytes()[:-2])


def vanish(p: Path) -> None:
    p.unlink()


def rewrite(p: Path) -> None:
    "Other samples, same size."
    raw = bytearray(p.read_bytes())
    raw[100:200] = bytes(100)
    p.write_bytes(raw)
    os.utime(p, ns=(1, p.stat().st_mtime_ns + 1_000_000_000))


def replace_by_a_fifo(p: Path) -> None:
    p.unlink()
    os.mkfifo(p)


def replace_by_a_folder(p: Path) -> None:
    p.unlink()
    p.mkdir()


def replace_by_a_loop(p: Path) -> None:
    p.unlink()
    p.symlink_to(p)


@pytest.mark.slow
@ANY_LAYOUT
@each("change", [grow, shrink, vanish, rewrite, replace_by_a_fifo, replace_by_a_folder, replace_by_a_loop])
@each("follows", [True, False])
def test_file_that_changed_since_it_was_listed(tmp_path, data, change, follows):
    manifest = lm.scan(data)
    victim = data / "NOLEAK" / "12.wav"
    change(victim)
    r = lm.build(
        data,
        out=tmp_path / "x.h5",
        manifest=manifest,
        spec=None if follows else lm.MelSpec(duration_s=1.0),
        **QUIET,
    )
    assert [(x.path, x.code) for x in r.rejections] == [
        (b"NOLEAK/12.wav", "unreadable" if change in (replace_by_a_fifo, replace_by_a_folder) else "changed")
    ]
    assert (r.rows, r.found) == (29, 30)


@ANY_LAYOUT
def test_unreadable_file_is_rejected_and_others_are_not(tmp_path, data, monkeypatch):
    monkeypatch.setattr(loader, "native", lambda: None)  # read by Python, where faults can be planted
    real = os.open

    def broken(path, flags, *more, **named):
        if os.fsencode(path).endswith(b"17.wav"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", broken)
    r = lm.build(data, out=tmp_path / "x.h5", check=0, **QUIET)
    assert [(x.path, x.code) for x in r.rejections] == [(b"LEAK/17.wav", "unreadable")]


@ANY_LAYOUT
def test_fifo_in_the_folder_does_not_hang_a_build(tmp_path, data):
    os.mkfifo(data / "LEAK" / "pipe.wav")
    (data / "LEAK" / "loop").symlink_to(data)
    (data / "LEAK" / "self.wav").symlink_to(data / "LEAK" / "self.wav")
    (data / "LEAK" / "zero.wav").symlink_to("/dev/zero")
    (data / "LEAK" / "outside.wav").symlink_to("/etc/passwd")
    r = lm.build(data, out=tmp_path / "x.h5", **QUIET)
    assert (r.rows, r.rejections) == (30, ())


# ---- engines that are wrong


def corrupting_engine(monkeypatch, wrong) -> None:
    "An engine that passes its self-check and then spoils batches."
    real = ReferenceEngine.run

    def run(self, samples, out, **more):
        if len(samples) == 1:
            return real(self, samples, out, **more)  # the self-check
        moments = real(self, samples, out, **more)
        wrong(self, samples, out)
        return moments

    monkeypatch.setattr(ReferenceEngine, "run", run)


def swap_two_rows(engine, samples, out) -> None:
    out[[0, 1]] = out[[1, 0]]


def shift_a_frame(engine, samples, out) -> None:
    out[0] = np.roll(out[0], 1, axis=0)


def shift_a_sample(engine, samples, out) -> None:
    out[...] = mel_spec.reference_log_mel(np.roll(samples, 1, axis=1), engine.spec)


def other_scale(engine, samples, out) -> None:
    out[...] = mel_spec.reference_log_mel(samples, lm.MelSpec(duration_s=1.0, mel_scale="slaney"))


def small_bias(engine, samples, out) -> None:
    out[...] = out * np.float16(1) + np.float16(0.0625)


def zero_one(engine, samples, out) -> None:
    out[-1] = 0


def shared_buffer(engine, samples, out) -> None:
    out[...] = out[-1]  # all rows are views of one buffer, which holds the last one


def half_a_batch(engine, samples, out) -> None:
    out[len(out) // 2 :] = out[: len(out) - len(out) // 2]


@pytest.mark.slow
@ANY_LAYOUT
@pytest.mark.parametrize(
    "wrong",
    [
        swap_two_rows,
        shift_a_frame,
        shift_a_sample,
        other_scale,
        small_bias,
        zero_one,
        shared_buffer,
        half_a_batch,
    ],
)
def test_wrong_rows_are_not_published(tmp_path, data, old, monkeypatch, wrong):
    corrupting_engine(monkeypatch, wrong)
    e = fails(data, tmp_path, VerifyError, "nothing was published", check=None)
    assert "differs from the reference" in str(e)


@ANY_LAYOUT
def test_symmetric_window_is_not_published(tmp_path, data, old, monkeypatch):
    def symmetric(engine, samples, out):
        for x, row in zip(samples, out, strict=True):
            row[...] = log_mel(x / 32_768, engine.spec.to_dict(), periodic=False)

    corrupting_engine(monkeypatch, symmetric)
    fails(data, tmp_path, VerifyError, "differs from the reference", check=None)


@ANY_LAYOUT
def test_sample_of_64_finds_a_shared_buffer(tmp_path, make_wav, monkeypatch):
    "Rows of one shared buffer: 64 rows show it without doubt. A single swapped pair among thousands they may miss: that needs check=None."
    root = tmp_path / "many"
    for k in range(200):
        make_wav(root / "LEAK" / f"{k:03d}.wav", seed=k)
    corrupting_engine(monkeypatch, shared_buffer)
    fails(root, tmp_path, VerifyError, "differs from the reference")


@ANY_LAYOUT
def test_engine_that_fails_its_self_check_is_not_used(tmp_path, data, old, monkeypatch):
    real = ReferenceEngine.run

    def run(self, samples, out, **more):
        moments = real(self, samples, out, **more)
        out[...] += np.float16(0.25)
        return moments

    monkeypatch.setattr(ReferenceEngine, "run", run)
    fails(data, tmp_path, EngineError, "does not reproduce the reference")


def test_engine_that_skips_rows_is_detected(tmp_path, data, old, monkeypatch):
    "Slots are reused: rows that were not computed hold another recording's."
    real = ReferenceEngine.run

    def run(self, samples, out, **more):
        n = max(1, len(samples) - 1)
        moments = np.zeros((len(samples), 5))
        moments[:n] = real(self, samples[:n], out[:n], **more)
        return moments

    monkeypatch.setattr(ReferenceEngine, "run", run)
    fails(data, tmp_path, VerifyError, r"row 3 .*but the recording has", check=None)


# ---- signals


WAIT_FOR_ROWS = """
import os, sys, signal, threading, time
from leakmel.dataset.job import Job
real, n = Job.take, [0]
def take(self, slot):
    n[0] += 1
    if n[0] == 3:
        print("signal at", time.monotonic(), file=sys.stderr, flush=True)
        os.kill(os.getpid(), {number})
    return real(self, slot)
Job.take = take
from leakmel.cli import main
sys.exit(main(sys.argv[1:]))
"""


def build_with_signal(number: int, data: Path, target: Path) -> subprocess.CompletedProcess:
    "Run a build that gets a signal with its third batch, so always in the middle."
    command = [
        sys.executable,
        "-c",
        WAIT_FOR_ROWS.format(number=int(number)),
        "build",
        str(data),
        "--out",
        str(target),
        "--quiet",
        "--engine",
        "reference",
        "--files-per-batch",
        "1",
        "--fresh",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@ANY_LAYOUT
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_signal_during_a_build(tmp_path, data, old, number):
    for path in data.rglob("*.wav"):
        os.utime(path)  # else the old data set may stand for all of them, and nothing is to be gone on with
    done = build_with_signal(number, data, tmp_path / "out" / "x.h5")
    assert done.returncode == 128 + number
    assert f"signal {int(number)}" in done.stderr
    assert "Traceback" not in done.stderr
    assert "run the same build again to resume" in done.stderr
    assert (tmp_path / "out" / "x.h5").read_bytes() == old
    assert leftovers(tmp_path / "out", *BESIDE) == [".x.h5.journal", ".x.h5.partial"]
    r = lm.build(data, out=tmp_path / "out" / "x.h5", engine="reference", **QUIET | {"fresh": False})
    assert r.summary["resumed_rows"] >= 2
    assert r.path.read_bytes() == old
    assert leftovers(tmp_path / "out", *BESIDE) == []


@ANY_LAYOUT
@pytest.mark.parametrize("place", ["fcntl.flock", "os.pwrite", "writer.fallocate", "os.unlink"])
def test_ctrl_c_while_files_are_created_or_removed_leaves_none(tmp_path, data, monkeypatch, place):
    "Between the step that makes a file and the one that notes it."
    target, owner = (
        tmp_path / "out" / "x.h5",
        {"fcntl": fcntl, "writer": writer, "os": os}[place.split(".")[0]],
    )
    name, came = place.split(".")[1], list[str]()
    real = getattr(owner, name)

    def pressed(*args, **named):
        done = real(*args, **named)
        if not came and threading.current_thread() is threading.main_thread():
            came.append(place)
            signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(owner, name, pressed)
    with pytest.raises(KeyboardInterrupt):
        lm.build(data, out=target, engine="reference", **QUIET)
    assert came == [place]
    assert leftovers(tmp_path / "out") in (
        [],
        ["x.h5"],
        ["x.h5", "x.h5.report.json", "x.h5.timeline.json"],
        [".x.h5.journal", ".x.h5.partial"],
    )


# The last split is not begun before the signal was sent, however late that is.
WAIT_FOR_SIGNAL = """
import os, sys, time
from leakmel.dataset.loader import BatchReader
sent, real = sys.argv.pop(1), BatchReader.fill
def fill(self, slot):
    open(sent + ".begun", "w").close()
    until = time.monotonic() + 60
    while self.listing.split == "VALIDATION" and not os.path.exists(sent) and time.monotonic() < until: time.sleep(0.01)
    return real(self, slot)
BatchReader.fill = fill
from leakmel.cli import main
sys.exit(main(sys.argv[1:]))
"""


@ANY_LAYOUT
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "delay"), [(signal.SIGTERM, 0.0), pytest.param(signal.SIGINT, 0.3, marks=pytest.mark.long)]
)
def test_signal_from_outside_ends_the_build(tmp_path, number, delay):
    write_demo(tmp_path / "data", n_files=600)
    sent, begun = tmp_path / "sent", tmp_path / "sent.begun"

    words = ["build", str(tmp_path / "data"), "--split", "all", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", WAIT_FOR_SIGNAL, str(sent), *words, "--engine", "reference", "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 60
        while not begun.exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        child.send_signal(number)
        sent.touch()
        _, output = child.communicate(timeout=60)
    assert child.returncode == 128 + number, output
    # a split that was published before the signal came stays, whole; of the others, if anything, what a build goes on from
    names, complete = leftovers(tmp_path / "out"), sorted((tmp_path / "out").glob("*.H5"))
    partial = sorted((tmp_path / "out").glob(".*.partial"))
    assert names == sorted(
        [
            *(p.name + end for p in complete for end in ("", ".report.json", ".timeline.json")),
            *(p.name for p in partial),
            *(p.name.replace(".partial", ".journal") for p in partial),
        ]
    )
    assert all(lm.verify(p, root=tmp_path / "data").ok for p in complete)
    assert len(complete) < 3, "the signal came too late to show anything"


@ANY_LAYOUT
@pytest.mark.slow
def test_killed_build_leaves_the_old_data_set_and_does_not_block(tmp_path, data, old):
    done = build_with_signal(signal.SIGKILL, data, tmp_path / "out" / "x.h5")
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out" / "x.h5").read_bytes() == old
    r = lm.build(data, out=tmp_path / "out" / "x.h5", engine="reference", **QUIET)
    assert r.path.read_bytes() == old
    assert leftovers(tmp_path / "out", *BESIDE) == []
    check(r.path, data)
