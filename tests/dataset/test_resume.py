"Interrupted builds are resumed and data sets updated: always with the bytes of a fresh build."

import base64
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from each import each
from errors import raises
from independent import check, leftovers

import leakmel as lm
from leakmel.core import files
from leakmel.core.errors import DataError, OutputError, SpaceError, VerifyError
from leakmel.core.files import read_own_json
from leakmel.dataset import existing, loader, writer
from leakmel.dataset import job as job_module
from leakmel.dataset.existing import journal_path, read_state, state_path, write_state
from leakmel.dataset.job import Job, may_resume
from leakmel.dataset.loader import BadFilesError
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.recordings.demo import write_wav

CONFIG = PipelineConfig(
    files_per_batch=4, compute_workers=2, fsync=False, monitor_interval_s=0.0, journal_bytes=1
)
SPEC = lm.MelSpec.preset("disjoint", duration_s=1.0)
BESIDE = ["x.h5", "x.h5.report.json", "x.h5.timeline.json"]


def build(root: Path, out: Path, **options: Any) -> lm.BuildResult:
    "A build by the reference, in small batches."
    usual: dict[str, Any] = {
        "spec": SPEC,
        "engine": "reference",
        "progress": "none",
        "check": 4,
        "pipeline": CONFIG,
    }
    return lm.build(root, out=out, **usual | options)


def fresh_bytes(root: Path, folder: Path, **options: Any) -> bytes:
    "The bytes of a build from nothing."
    out = folder / "from nothing" / "x.h5"
    build(root, out, fresh=True, **options)
    return out.read_bytes()


def settle() -> None:
    "Let the files' times grow old enough to be told from a further change."
    time.sleep(0.05)


@pytest.fixture
def data(tmp_path: Path, make_wav: Callable) -> Path:
    "30 recordings of 1 s with two labels, one of them padded, and two files that are none."
    root = tmp_path / "data"
    for k in range(30):
        make_wav(root / ("LEAK" if k % 2 else "NOLEAK") / f"{k:02d}.wav", seed=k, n=4096 if k != 7 else 3000)
    (root / "LEAK" / "zero.wav").write_bytes(b"")
    (root / "NOLEAK" / "text.wav").write_bytes(b"no recording")
    settle()
    return root


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    "The paths of recordings that builds read."
    paths: list[bytes] = []
    real = loader.BatchReader.fill

    def fill(self: loader.BatchReader, slot: loader.Slot) -> int:
        paths.extend(self.listing.paths[slot.first : slot.first + slot.n])
        return real(self, slot)

    monkeypatch.setattr(loader.BatchReader, "fill", fill)
    return paths


# ---- nothing to do


def test_unchanged_folder_changes_no_file_and_is_reported(
    data: Path, tmp_path: Path, read: list[bytes]
) -> None:
    first = build(data, tmp_path / "out" / "x.h5")
    before = {
        p.name: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "out").iterdir()
    }
    assert len(read) == 32
    read.clear()
    again = build(data, first.path)
    assert read == []
    assert {
        p.name: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "out").iterdir()
    } == before
    assert again.summary["nothing_to_do"]
    assert again.summary["kept_rows"] == 30
    assert again.files_per_s == again.segments_per_s == 0
    assert (again.rows, again.found, again.rejections) == (first.rows, first.found, first.rejections)
    assert again.verified.ok
    assert again.verified.checked == first.verified.checked
    assert [(p.kind, p.path) for p in again.noted] == [(p.kind, p.path) for p in first.noted]
    assert not first.summary["nothing_to_do"]
    assert first.summary["kept_rows"] == 0
    for ending in (".report.json", ".timeline.json"):  # damaged ones are written again, as lost ones are
        report = first.path.with_name(f"x.h5{ending}")
        for damage in (lambda text: b"", lambda text: text[: len(text) // 2], lambda text: b"[1]"):
            report.write_bytes(damage(report.read_bytes()))
            build(data, first.path)
            assert report.read_bytes()[-40:] != damage(report.read_bytes())[-40:]
            assert isinstance(read_own_json(report), dict)
    assert read == []
    assert first.path.read_bytes() == before["x.h5"][2]


@pytest.mark.slow
def test_only_the_changed_split_is_rebuilt(demo: Path, tmp_path: Path, read: list[bytes]) -> None:
    root = tmp_path / "demo"
    shutil.copytree(demo, root)
    settle()
    common: dict[str, Any] = {
        "out_dir": tmp_path / "out",
        "engine": "reference",
        "progress": "none",
        "pipeline": CONFIG,
        "check": 2,
    }
    first = lm.build_all(root, **common)
    assert [r.summary["nothing_to_do"] for r in lm.build_all(root, **common)] == [True] * 3
    gone = next(p for p in sorted((root / "VALIDATION").rglob("*.wav")))
    gone.unlink()
    read.clear()
    again = lm.build_all(root, **common)
    assert [r.split for r in again] == [r.split for r in first]
    assert [r.summary["nothing_to_do"] for r in again] == [True, False, True]
    assert again[1].rows == first[1].rows - 1
    assert again[1].summary["changes"] == {"added": 0, "changed": 0, "removed": 1}
    assert read == []
    for r in again:
        lm.build(
            root,
            split=r.split.lower(),
            out=tmp_path / "alone.h5",
            engine="reference",
            progress="none",
            pipeline=CONFIG,
            fresh=True,
        )
        assert r.path.read_bytes() == (tmp_path / "alone.h5").read_bytes()


def test_command_line_reports_reused_rows(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from leakmel.cli import main

    words = [
        "build",
        str(data),
        "--out",
        str(tmp_path / "x.h5"),
        "--duration-s",
        "1",
        "--engine",
        "reference",
        "--quiet",
        "--check",
        "4",
    ]
    assert main(words) == 0
    assert "nothing to do" not in capsys.readouterr().out
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "nothing to do" in output
    assert "PERFORMANCE" not in output
    assert "files/s" not in output
    (data / "LEAK" / "01.wav").unlink()
    assert main(words) == 0
    assert (
        "29 rows copied from the existing data set; recordings changed since then: 0 added, 0 changed, 1 removed"
        in " ".join(capsys.readouterr().out.split())
    )
    assert main([*words, "--fresh"]) == 0
    assert "copied" not in capsys.readouterr().out


# ---- brought up to date


def write(path: Path, times: int = 1) -> None:
    "A recording that the fixture lacks."
    path.parent.mkdir(exist_ok=True)
    write_wav(path, np.arange(4096, dtype=np.int16) * times, 4096)


def add(data: Path) -> None:
    write(data / "LEAK" / "00b.wav")


def remove(data: Path) -> None:
    (data / "LEAK" / "05.wav").unlink()


def change(data: Path) -> None:
    write(data / "LEAK" / "09.wav")


def relabel(data: Path) -> None:
    (data / "LEAK" / "11.wav").rename(data / "NOLEAK" / "11.wav")


def rename(data: Path) -> None:
    (data / "LEAK" / "13.wav").rename(data / "LEAK" / "zz.wav")


def touch(data: Path) -> None:
    os.utime(data / "NOLEAK" / "00.wav")


def mend(data: Path) -> None:
    write(data / "LEAK" / "zero.wav")


def spoil(data: Path) -> None:
    (data / "LEAK" / "03.wav").write_bytes(b"RIFF")


def add_label(data: Path) -> None:
    write(data / "AIR" / "a.wav")


def all_changes(data: Path) -> None:
    for step in (add, remove, change, relabel, rename, touch, mend, spoil, add_label):
        step(data)


CHANGES: dict[Callable[[Path], None], tuple[int, int, int, list[str]]] = {  # added, changed, removed, read
    add: (1, 0, 0, ["LEAK/00b.wav"]),
    remove: (0, 0, 1, []),
    change: (0, 1, 0, ["LEAK/09.wav"]),
    relabel: (1, 0, 1, ["NOLEAK/11.wav"]),
    rename: (1, 0, 1, ["LEAK/zz.wav"]),
    touch: (0, 1, 0, ["NOLEAK/00.wav"]),
    mend: (0, 1, 0, ["LEAK/zero.wav"]),
    spoil: (0, 1, 0, ["LEAK/03.wav"]),
    add_label: (1, 0, 0, ["AIR/a.wav"]),
    all_changes: (
        4,
        4,
        3,
        [
            "AIR/a.wav",
            "LEAK/00b.wav",
            "LEAK/03.wav",
            "LEAK/09.wav",
            "LEAK/zero.wav",
            "LEAK/zz.wav",
            "NOLEAK/00.wav",
            "NOLEAK/11.wav",
        ],
    ),
}


@pytest.mark.slow
@each("step", CHANGES, ids=lambda f: f.__name__)
def test_update_reads_only_changes_and_equals_a_fresh_build(
    data: Path, tmp_path: Path, read: list[bytes], step: Callable
) -> None:
    added, changed, removed, paths = CHANGES[step]
    target = tmp_path / "out" / "x.h5"
    build(data, target)
    step(data)
    read.clear()
    result = build(data, target)
    assert sorted(os.fsdecode(p) for p in read) == paths
    assert result.summary["changes"] == {"added": added, "changed": changed, "removed": removed}
    assert (
        result.summary["copied_rows"]
        == result.summary["kept_rows"]
        == result.found
        - len(paths)
        - len(result.rejections)
        + sum(1 for r in result.rejections if r.path in read)
    )
    assert target.read_bytes() == fresh_bytes(data, tmp_path)
    check(target, data)
    assert leftovers(tmp_path / "out", *BESIDE) == []


@pytest.mark.slow
@each(
    "options",
    [
        {"with_waveforms": True},
        {"pipeline": PipelineConfig(fsync=False, compression="gzip", files_per_batch=4)},
        {"engine": "cpu"},
        {"engine": "cpu", "mode": "preload"},
    ],
    ids=str,
)
def test_with_waveforms_packed_and_by_other_engines(
    data: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    target = tmp_path / "out" / "x.h5"
    build(data, target, **options)
    assert build(data, target, **options).summary["nothing_to_do"]
    all_changes(data)
    result = build(data, target, **options)
    assert result.summary["copied_rows"] == 24
    assert target.read_bytes() == fresh_bytes(data, tmp_path, **options)


def test_rows_are_reused_with_another_compression(data: Path, tmp_path: Path, read: list[bytes]) -> None:
    target = tmp_path / "out" / "x.h5"
    build(data, target)
    read.clear()
    packed = {"pipeline": PipelineConfig(fsync=False, compression="gzip", files_per_batch=4)}
    result = build(data, target, **packed)
    assert (read, result.summary["nothing_to_do"], result.summary["copied_rows"]) == ([], False, 30)
    assert target.read_bytes() == fresh_bytes(data, tmp_path, **packed)


def test_changed_labels_of_a_table_need_no_reading(data: Path, tmp_path: Path, read: list[bytes]) -> None:
    target, table = tmp_path / "out" / "x.h5", tmp_path / "names.csv"
    paths = sorted(str(p.relative_to(data)) for p in data.rglob("*.wav"))

    def built(labels: dict[str, str]) -> lm.BuildResult:
        table.write_text("path,label\n" + "".join(f"{p},{labels.get(p, 'a')}\n" for p in paths))
        return build(data, target, manifest=lm.scan(data, table=table))

    built({})
    read.clear()
    result = built({paths[3]: "b"})
    assert read == []
    assert result.summary["copied_rows"] == 30
    with lm.open_dataset(target) as ds:
        assert sorted(ds.class_names) == ["a", "b"]
    assert target.read_bytes() == fresh_bytes(data, tmp_path, manifest=lm.scan(data, table=table))


def test_a_recording_without_a_label_gets_one(data: Path, tmp_path: Path) -> None:
    write(data / "stray.wav")
    settle()
    target = tmp_path / "out" / "x.h5"
    assert "no_label" in {r.code for r in build(data, target).rejections}
    assert build(data, target).summary["nothing_to_do"]
    (data / "stray.wav").rename(data / "LEAK" / "stray.wav")
    assert "no_label" not in {r.code for r in build(data, target).rejections}
    assert target.read_bytes() == fresh_bytes(data, tmp_path)


# ---- what is not trusted


def state_lost(target: Path) -> None:
    state_path(target).unlink()


def state_cut(target: Path) -> None:
    os.truncate(state_path(target), state_path(target).stat().st_size - 1)


def state_empty(target: Path) -> None:
    state_path(target).write_bytes(b"")


def state_nonsense(target: Path) -> None:
    state_path(target).write_bytes(b"[" * 100_000)


def state_flipped(target: Path) -> None:
    flip(state_path(target), -5)


def state_linked(target: Path) -> None:
    state_path(target).symlink_to(state_path(target).rename(target.parent / "elsewhere"))


def data_set_touched(target: Path) -> None:
    os.utime(target)


def labels_flipped(target: Path) -> None:
    keeping_time(target, lambda: edit(target, lambda f: f["labels"].__setitem__(0, 1 - f["labels"][0])))


def facts_flipped(target: Path) -> None:
    keeping_time(target, lambda: edit(target, lambda f: f["files/rms_db"].__setitem__(0, 1.0)))


def data_set_cut(target: Path) -> None:
    keeping_time(target, lambda: os.truncate(target, target.stat().st_size // 2))


def flip(path: Path, at: int) -> None:
    "Change one byte."
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit(path: Path, change: Callable[[h5py.File], None]) -> None:
    with h5py.File(path, "r+") as f:
        change(f)


def keeping_time(path: Path, do: Callable[[], None]) -> None:
    "Change a file and keep its modification time."
    st = path.stat()
    do()
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


@pytest.mark.slow
@each(
    "fault",
    [
        state_lost,
        state_cut,
        state_empty,
        state_nonsense,
        state_flipped,
        state_linked,
        data_set_touched,
        labels_flipped,
        facts_flipped,
        data_set_cut,
    ],
    ids=lambda f: f.__name__,
)
def test_data_set_that_differs_from_its_state_is_rebuilt(
    data: Path, tmp_path: Path, read: list[bytes], fault: Callable
) -> None:
    target = tmp_path / "out" / "x.h5"
    right = build(data, target).path.read_bytes()
    fault(target)
    read.clear()
    if fault is data_set_cut:
        with raises("output-exists", path=target):
            build(data, target)
        return
    result = build(data, target)
    assert len(read) == 32
    assert result.summary["kept_rows"] == 0
    assert target.read_bytes() == right


def test_damaged_rows_are_repaired(
    data: Path, tmp_path: Path, read: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "out" / "x.h5"
    right = build(data, target).path.read_bytes()
    with h5py.File(target) as f:
        offset, n_bytes = f["segments_mel"].id.get_offset(), f["segments_mel"][0].nbytes
    keeping_time(target, lambda: flip(target, offset + 9 * n_bytes + 17))
    read.clear()
    result = build(data, target)
    assert len(read) == 1
    assert result.summary["copied_rows"] == 29
    assert target.read_bytes() == right
    assert "failed verification" in caplog.text


@pytest.mark.slow
@each(
    "options",
    [
        {"spec": lm.MelSpec.preset("disjoint", duration_s=1.0, n_mels=32)},
        {"engine": "torch"},
        {"with_waveforms": True},
    ],
    ids=str,
)
def test_other_settings_start_a_fresh_build(
    data: Path, tmp_path: Path, read: list[bytes], options: dict[str, Any]
) -> None:
    target = tmp_path / "out" / "x.h5"
    build(data, target)
    read.clear()
    assert build(data, target, **options).summary["kept_rows"] == 0
    assert len(read) == 32
    assert target.read_bytes() == fresh_bytes(data, tmp_path, **options)


def test_another_release_starts_a_fresh_build(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out" / "x.h5"
    build(data, target)
    monkeypatch.setattr(lm, "__version__", "99")
    assert build(data, target).summary["kept_rows"] == 0


def test_content_changed_with_equal_mtime_is_read_again(
    data: Path, tmp_path: Path, read: list[bytes]
) -> None:
    "Length and time of modification can be set back; the time of any change cannot."
    target, path = tmp_path / "out" / "x.h5", data / "LEAK" / "01.wav"
    build(data, target)
    keeping_time(path, lambda: flip(path, 1000))
    read.clear()
    build(data, target)
    assert read == [b"LEAK/01.wav"]
    assert target.read_bytes() == fresh_bytes(data, tmp_path)


def test_recordings_modified_just_before_a_build_are_read_again(
    data: Path, tmp_path: Path, read: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    "A further change in the same step of the file system's clock could not be seen."
    monkeypatch.setattr(existing, "_CLOCK_STEP_NS", 3600 * 10**9)
    target = tmp_path / "out" / "x.h5"
    build(data, target)
    read.clear()
    assert build(data, target).summary["kept_rows"] == 0
    assert len(read) == 32


def test_build_succeeds_without_space_for_the_state_file(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "out" / "x.h5"
    real = files.write_all

    def full(fd: int, content: bytes) -> None:
        if ".state" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        real(fd, content)

    monkeypatch.setattr(files, "write_all", full)
    assert build(data, target).rows == 30
    assert "the next build reads all recordings again" in caplog.text
    assert leftovers(target.parent, *BESIDE) == []


# ---- interrupted and gone on with


def killed(data: Path, target: Path, at: int, **options: Any) -> None:
    "Build in a child that is killed with its at-th batch, as soon as something is in the journal."
    if (pid := os.fork()) == 0:
        try:
            real, n = Job.take, [0]

            def dying(job: Job, slot: loader.Slot) -> Any:
                n[0] += 1
                if n[0] == at:
                    until = time.monotonic() + 30
                    while job.journal is not None and job.journal.n_entered == 0 and time.monotonic() < until:
                        time.sleep(0.001)
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(job, slot)

            Job.take = dying  # type: ignore[method-assign,assignment]
            build(data, target, **options)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (0, -signal.SIGKILL)


@pytest.fixture
def interrupted(data: Path, tmp_path: Path) -> Iterator[Path]:
    "A target whose build was killed with its sixth batch."
    target = tmp_path / "out" / "x.h5"
    killed(data, target, 6)
    assert leftovers(target.parent, ".x.h5.lock") == [".x.h5.journal", ".x.h5.partial"]
    yield target
    assert leftovers(target.parent, *BESIDE) == []


def test_killed_build_is_resumed(data: Path, tmp_path: Path, interrupted: Path, read: list[bytes]) -> None:
    result = build(data, interrupted)
    assert result.summary["resumed_rows"] >= 4
    assert len(read) == 32 - result.summary["resumed_rows"]
    assert interrupted.read_bytes() == fresh_bytes(data, tmp_path)
    check(interrupted, data)


def test_interrupt_before_rows_are_checked_keeps_them(
    data: Path, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_module, "_keep_rows", stop)
    with pytest.raises(KeyboardInterrupt):
        build(data, interrupted)
    monkeypatch.undo()
    assert build(data, interrupted).summary["resumed_rows"] >= 4


def test_failed_clean_up_keeps_rows_of_other_splits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job.__new__(Job)
    job.is_closed = False

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(5, "Input/output error")

    job.journal = SimpleNamespace(enter=fail, n_entered=3, close=fail)  # type: ignore[assignment]
    job.file = SimpleNamespace(abort=fail, is_packed=False)  # type: ignore[assignment]
    job.folder = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    assert (job.close(keep=True), job.close(keep=True)) == (3, 0)


def test_space_for_all_splits_is_checked_before_the_first_file(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def no_space(folder: Path, n_bytes: int) -> None:
        asked.append(n_bytes)
        raise SpaceError("not enough room", code="no-space", path=folder)

    monkeypatch.setattr(job_module, "require_space", no_space)
    with raises("no-space", SpaceError, path=tmp_path / "out"):
        lm.build_all(demo, out_dir=tmp_path / "out", spec=SPEC, progress="none")
    n_files = sum(len(x) for x in lm.scan(demo).listings)
    assert asked == [n_files * 2 * int(np.prod(replace(SPEC, sample_rate=4096).row_shape))]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@each(
    "options",
    [
        {"with_waveforms": True},
        {"engine": "cpu"},
        {
            "pipeline": PipelineConfig(
                fsync=True, files_per_batch=4, read_workers=2, compute_workers=2, slots=4, journal_bytes=1
            )
        },
    ],
    ids=str,
)
def test_resume_with_waveforms_other_engines_and_one_thread(
    data: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    target = tmp_path / "out" / "x.h5"
    killed(data, target, 6, **options)
    assert build(data, target, **options).summary["resumed_rows"] >= 4
    assert target.read_bytes() == fresh_bytes(data, tmp_path, **options)


def test_fresh_option_starts_a_fresh_build(data: Path, interrupted: Path, read: list[bytes]) -> None:
    assert build(data, interrupted, fresh=True).summary["resumed_rows"] == 0
    assert len(read) == 32


def rows_flipped(target: Path) -> None:
    flip(target.with_name(".x.h5.partial"), 4096 + 5)


def rows_cut(target: Path) -> None:
    os.truncate(target.with_name(".x.h5.partial"), 20_000)


def rows_lost(target: Path) -> None:
    target.with_name(".x.h5.partial").unlink()


def rows_linked(target: Path) -> None:
    os.link(target.with_name(".x.h5.partial"), target.parent.parent / "mine")


def journal_torn(target: Path) -> None:
    os.truncate(journal_path(target), journal_path(target).stat().st_size - 7)


def journal_lost(target: Path) -> None:
    journal_path(target).unlink()


def journal_nonsense(target: Path) -> None:
    journal_path(target).write_bytes(os.urandom(5000))


def journal_flipped(target: Path) -> None:
    flip(journal_path(target), journal_path(target).stat().st_size // 2)


def journal_huge(target: Path) -> None:
    os.truncate(journal_path(target), 1 << 40)


def journal_pipe(target: Path) -> None:
    journal_path(target).unlink()
    os.mkfifo(journal_path(target))


def claimed(*numbers: int, encoding: int = 0) -> str:
    "What is known of some candidates, as an entry of the journal has it."
    known = np.zeros(len(numbers), existing.KNOWN)
    known["number"] = numbers
    known["facts"]["encoding"] = encoding
    return base64.b64encode(known.tobytes()).decode()


def journal_forged(target: Path) -> None:
    "Entries that are whole lines, and claim what is not so."
    lines = journal_path(target).read_bytes().splitlines(keepends=True)
    forgeries: list[dict[str, Any]] = [
        {"known": claimed(-3, -2)},
        {"known": claimed(0, 1 << 60)},
        {"known": claimed(1, -(2**63), -1, 5)},  # their differences overflow
        {"known": "A"},
        {"known": 7},
        {"known": claimed(1, encoding=255)},
    ]
    for changes in forgeries:
        body = json.loads(lines[1][33:]) | changes
        journal_path(target).write_bytes(lines[0] + existing._line(json.dumps(body).encode()))
        assert len(existing.read_journal(journal_path(target), json.loads(lines[0][33:])).entries) == 0, (
            changes
        )


def test_a_flipped_byte_anywhere_ends_the_journal_before_its_line(data: Path, interrupted: Path) -> None:
    lines = journal_path(interrupted).read_bytes().splitlines(keepends=True)
    identity = json.loads(lines[0][33:])

    def n_entries(entry: bytes) -> int:
        journal_path(interrupted).write_bytes(lines[0] + entry)
        return len(existing.read_journal(journal_path(interrupted), identity).entries)

    accepted = []
    for at in range(len(lines[1])):
        entry = bytearray(lines[1])
        entry[at] ^= 1
        if n_entries(bytes(entry)):
            accepted.append(at)
    assert accepted == [32], "the blank behind the digest says nothing"
    assert n_entries(lines[1]) == 1
    assert build(data, interrupted).verified.ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        rows_flipped,
        rows_cut,
        rows_lost,
        rows_linked,
        journal_torn,
        journal_lost,
        journal_nonsense,
        journal_flipped,
        journal_pipe,
        journal_huge,
        journal_forged,
    ],
    ids=lambda f: f.__name__,
)
def test_resume_from_any_damaged_state(
    data: Path, tmp_path: Path, interrupted: Path, fault: Callable
) -> None:
    fault(interrupted)
    mine = tmp_path / "mine"
    content = mine.read_bytes() if mine.exists() else b""
    result = build(data, interrupted)
    assert interrupted.read_bytes() == fresh_bytes(data, tmp_path)
    assert result.verified.ok
    if content:
        assert mine.read_bytes() == content, "a file of another name is not written to"


@pytest.mark.parametrize("step", [add, remove], ids=lambda f: f.__name__)
def test_a_build_of_other_recordings_is_not_resumed(
    data: Path, tmp_path: Path, interrupted: Path, step: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    step(data)
    assert build(data, interrupted).summary["resumed_rows"] == 0
    assert "recordings were added, removed or renamed" in caplog.text
    assert interrupted.read_bytes() == fresh_bytes(data, tmp_path)


@pytest.mark.parametrize("step", [change, touch], ids=lambda f: f.__name__)
def test_resume_reads_changed_recordings_again(
    data: Path, tmp_path: Path, interrupted: Path, step: Callable, read: list[bytes]
) -> None:
    step(data)
    assert build(data, interrupted).summary["resumed_rows"] > 0
    assert {change: b"LEAK/09.wav", touch: b"NOLEAK/00.wav"}[step] in read
    assert interrupted.read_bytes() == fresh_bytes(data, tmp_path)


def test_resume_reads_recordings_changed_with_equal_mtime_again(
    data: Path, tmp_path: Path, interrupted: Path, read: list[bytes]
) -> None:
    path = data / "LEAK" / "01.wav"
    keeping_time(path, lambda: flip(path, 1000))
    build(data, interrupted)
    assert b"LEAK/01.wav" in read
    assert interrupted.read_bytes() == fresh_bytes(data, tmp_path)


def test_other_features_start_a_fresh_build_with_a_reason(
    data: Path, interrupted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = build(data, interrupted, spec=lm.MelSpec.preset("disjoint", duration_s=1.0, n_mels=32))
    assert result.summary["resumed_rows"] == 0
    assert "the features, the engine or its processor differ" in caplog.text


def test_interrupted_update_is_resumed(data: Path, tmp_path: Path, read: list[bytes]) -> None:
    target = tmp_path / "out" / "x.h5"
    old = build(data, target).path.read_bytes()
    for k in range(40, 60):
        write(data / "LEAK" / f"{k}.wav", k)
    settle()
    killed(data, target, 4)
    assert target.read_bytes() == old
    read.clear()
    result = build(data, target)
    assert result.summary["kept_rows"] == 52 - len(read) - 2
    assert result.summary["resumed_rows"] + result.summary["copied_rows"] > 30
    assert len(read) < 20
    assert target.read_bytes() == fresh_bytes(data, tmp_path)


@pytest.mark.slow
def test_repeatedly_killed_build_is_resumed(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "x.h5"
    for _ in range(12):
        killed(data, target, 2)
        if target.exists():
            break
    assert build(data, target).path.read_bytes() == fresh_bytes(data, tmp_path)


def test_no_files_are_left_without_a_journal(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PipelineConfig(files_per_batch=4, compute_workers=2, fsync=False, journal_bytes=0)

    def broken(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("leakmel.dataset.publish.job_metadata", broken)
    with pytest.raises(KeyboardInterrupt):
        build(data, tmp_path / "out" / "x.h5", pipeline=config)
    assert leftovers(tmp_path / "out") == []


def test_disk_that_is_full_for_the_journal_stops_the_build(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def full(fd: int, content: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".journal"):
            raise OSError(28, "No space left on device")
        return real(fd, content)

    target = tmp_path / "out" / "x.h5"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(SpaceError) as e:
            build(data, target)
    assert str(journal_path(target)) in str(e.value)
    assert not target.exists()
    assert build(data, target).path.read_bytes() == fresh_bytes(data, tmp_path)
    assert leftovers(tmp_path / "out", *BESIDE) == []


def test_failed_builds_leave_no_files() -> None:
    from leakmel.core.errors import EngineError, MachineError, SpaceError, UsageError, VerifyError

    to_blame: list[BaseException] = [
        DataError("x"),
        EngineError("x"),
        VerifyError("x"),
        UsageError("x"),
        ValueError(),
    ]
    from_outside: list[BaseException] = [
        MachineError("x"),
        SpaceError("x"),
        OutputError("x"),
        MemoryError(),
        KeyboardInterrupt(),
        SystemExit(),
    ]
    assert not any(map(may_resume, to_blame))
    assert all(map(may_resume, from_outside))


# ---- what must not be kept


def swap_folders(data: Path) -> None:
    for old, new in (("LEAK", "aside"), ("NOLEAK", "LEAK"), ("aside", "NOLEAK")):
        (data / old).rename(data / new)


@pytest.fixture
def alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "Recordings with two labels, of the same names, lengths and times: a file system of coarse times, and files that were made together."
    root = tmp_path / "alike"
    root.mkdir()
    for k in range(8):
        for label in ("LEAK", "NOLEAK"):
            write(root / label / f"{k}.wav", k + 10 * (label == "LEAK"))
            os.utime(root / label / f"{k}.wav", ns=(10**18, 10**18))
    settle()
    real = existing.stamps_of

    def same_times(*args: Any) -> np.ndarray:
        stamps = real(*args)
        stamps["ctime_ns"] = 10**18 + 1
        return stamps

    for module in (job_module, existing):
        monkeypatch.setattr(module, "stamps_of", same_times)
    return root


def test_swapped_folders_are_detected(alike: Path, tmp_path: Path, read: list[bytes]) -> None:
    "Renaming a folder leaves no trace on its files: their labels would be swapped, and their rows not."
    target = tmp_path / "out" / "x.h5"
    build(alike, target)
    state = read_state(target)
    assert state is not None
    stamps = state[1].copy()
    stamps["ctime_ns"] = 10**18 + 1
    write_state(target, target, state[0], stamps)
    assert build(alike, target).summary["nothing_to_do"]
    swap_folders(alike)
    read.clear()
    assert build(alike, target).summary["kept_rows"] == 0
    assert len(read) == 16
    assert target.read_bytes() == fresh_bytes(alike, tmp_path)


def test_folders_swapped_before_a_resume_are_detected(
    alike: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "out" / "x.h5"
    killed(alike, target, 3)
    swap_folders(alike)
    assert build(alike, target).summary["resumed_rows"] == 0
    assert "folders have changed" in caplog.text
    assert target.read_bytes() == fresh_bytes(alike, tmp_path)


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_other_decoders_start_a_fresh_build(
    data: Path,
    tmp_path: Path,
    is_interrupted: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = tmp_path / "out" / "x.h5"
    if is_interrupted:
        killed(data, target, 6)
    else:
        build(data, target)
    monkeypatch.setattr(existing, "decoders", lambda: {"soxr": "another"})
    assert build(data, target).summary["kept_rows"] == 0
    assert not is_interrupted or "have other versions" in caplog.text


def test_recordings_modified_just_before_an_interrupted_build_are_read_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out" / "x.h5"
    killed(data, target, 6)
    monkeypatch.setattr(existing, "_CLOCK_STEP_NS", 3600 * 10**9)
    assert build(data, target).summary["resumed_rows"] == 0


def test_a_preload_reads_no_recording_whose_row_is_kept(
    data: Path, tmp_path: Path, read: list[bytes]
) -> None:
    target = tmp_path / "out" / "x.h5"
    build(data, target, mode="preload")
    add(data)
    settle()
    read.clear()
    result = build(data, target, mode="preload")
    assert read == [b"LEAK/00b.wav"]
    assert "rows of an earlier build are reused" in result.summary["mode_lines"][0]
    assert target.read_bytes() == fresh_bytes(data, tmp_path)


def test_missing_recording_of_a_table_causes_no_rebuild(data: Path, tmp_path: Path) -> None:
    table, target = tmp_path / "t.csv", tmp_path / "out" / "x.h5"
    paths = sorted(p.relative_to(data) for p in data.rglob("*.wav"))
    table.write_text(
        "path,label\n" + "".join(f"{p},{p.parts[0]}\n" for p in paths) + "LEAK/missing.wav,LEAK\n"
    )
    assert [
        build(data, target, manifest=lm.scan(data, table=table)).summary["nothing_to_do"] for _ in range(2)
    ] == [False, True]
    write(data / "LEAK" / "missing.wav")
    assert build(data, target, manifest=lm.scan(data, table=table)).rows == 31


# ---- what is left, and what is said


@pytest.mark.parametrize("stage", ["check_data_set", "job_metadata"])
def test_interrupt_after_the_last_row_reuses_all_rows(
    data: Path, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch, read: list[bytes]
) -> None:
    target = tmp_path / "out" / "x.h5"

    def interrupted(*args: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(f"leakmel.dataset.publish.{stage}", interrupted)
        with pytest.raises(KeyboardInterrupt) as raised:
            build(data, target)
    assert raised.value.__notes__[0].startswith("30 rows are kept")
    assert leftovers(target.parent) == [".x.h5.journal", ".x.h5.partial"]
    read.clear()
    assert build(data, target).summary["resumed_rows"] > 0
    assert len(read) < 32
    assert target.read_bytes() == fresh_bytes(data, tmp_path)


def test_unchanged_build_removes_files_of_killed_builds(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "x.h5"
    build(data, target)
    left = (".x.h5.partial", ".x.h5.journal", ".x.h5.partial.gz", "..x.h5.state.new", ".x.h5.report.json.new")
    for name in left:
        (target.parent / name).write_bytes(b"x")
    assert build(data, target).summary["nothing_to_do"]
    assert leftovers(target.parent, *BESIDE) == []


def test_resumed_build_removes_an_incomplete_compressed_file(interrupted: Path, data: Path) -> None:
    interrupted.with_name(".x.h5.partial.gz").write_bytes(b"x")
    assert build(data, interrupted).summary["resumed_rows"] > 0


@pytest.mark.slow
def test_copies_between_a_changed_and_an_unchanged_split_are_reported(demo: Path, tmp_path: Path) -> None:
    root = tmp_path / "demo"
    common: dict[str, Any] = {
        "out_dir": tmp_path / "out",
        "engine": "reference",
        "progress": "none",
        "pipeline": CONFIG,
        "check": 2,
    }
    shutil.copytree(demo, root)
    settle()
    before = lm.build_all(root, **common)[1]
    kept = sorted((root / "VALIDATION").rglob("*.wav"))[0]
    twin = root / "TRAINING" / kept.parent.name / f"copy of {kept.name}"
    shutil.copy(kept, twin)
    settle()
    after = lm.build_all(root, **common)[1]
    report = json.loads((tmp_path / "out" / "VALIDATION_DATASET.H5.report.json").read_text())
    assert after.summary["nothing_to_do"]
    assert [(p["kind"], p["path"]) for p in report["problems"]] == [(p.kind, p.path) for p in after.noted]
    assert (
        report["problems_by_kind"].get("duplicate_across_splits", 0)
        == before.summary["problems_by_kind"].get("duplicate_across_splits", 0) + 1
    )
    assert report["seconds"] == before.summary["seconds"]


def test_no_rate_is_reported_for_reused_rows(data: Path, tmp_path: Path) -> None:
    from leakmel.pages.dashboard import build_card

    target = tmp_path / "out" / "x.h5"
    assert "files/s" in repr(build(data, target)) + repr(build_card([build(data, target, fresh=True)]))
    result = build(data, target)
    assert "files/s" not in repr(result) + repr(build_card([result]))
    assert "reused" in repr(build_card([result]))
    assert result.summary["kept_files"] == 32


def test_rate_of_a_resumed_build_counts_the_recordings_it_reads(tmp_path: Path) -> None:
    from leakmel.core.progress import Progress

    bar = Progress(1000, show="none", n_before=800)
    bar.begin(10.0)
    bar.update(900)
    assert repr(bar).startswith("900 of 1,000 files in 10.0 s, 10 files/s, about 10.0 s left")


# ---- strangers in the output folder


def test_hard_linked_lock_file_is_not_written(data: Path, tmp_path: Path) -> None:
    mine, target = tmp_path / "mine", tmp_path / "out" / "x.h5"
    target.parent.mkdir()
    mine.write_bytes(b"precious")
    os.link(mine, target.with_name(".x.h5.lock"))
    build(data, target)
    assert mine.read_bytes() == b"precious"
    os.mkfifo(target.with_name(".x.h5.lock"))
    assert build(data, target).summary["nothing_to_do"]
    assert leftovers(target.parent, *BESIDE) == []


def state_huge(target: Path) -> None:
    os.truncate(state_path(target), 1 << 40)


def state_nested(target: Path) -> None:
    state_path(target).write_bytes(b"[" * 4000 + b"\n")


def state_list(target: Path) -> None:
    state_path(target).write_bytes(b"[]\n")


def state_pipe(target: Path) -> None:
    state_path(target).unlink()
    os.mkfifo(state_path(target))


@pytest.mark.slow
@each("fault", [state_huge, state_nested, state_list, state_pipe], ids=lambda f: f.__name__)
def test_invalid_state_file_gives_a_fresh_build(data: Path, tmp_path: Path, fault: Callable) -> None:
    target = tmp_path / "out" / "x.h5"
    right = build(data, target).path.read_bytes()
    fault(target)
    assert build(data, target).summary["kept_rows"] == 0
    assert target.read_bytes() == right


FORGERIES: list[dict[str, Any]] = [
    {"known": float("inf")},
    {"known": claimed(0, 1, 0, 1)},
    {"known": claimed(2, 3, 0, 1)},
    {"known": claimed(5 * 10**18, -5 * 10**18)},
    {"known": claimed(0, 1, 2)[:-4]},
    {"known": claimed(0, 1, encoding=255)},
    {"known": claimed(0, encoding=36)},
    {"known": claimed(*[0, 1, 2, 3] * 5_000)},
]


@pytest.mark.slow
@pytest.mark.parametrize("forgery", range(len(FORGERIES)))
def test_forged_journal_entries_are_ignored(data: Path, interrupted: Path, forgery: int) -> None:
    "Whole lines with the right digests of their own: they must not stop later builds, let them wait for ever, or take memory."
    lines = journal_path(interrupted).read_bytes().splitlines(keepends=True)
    journal_path(interrupted).write_bytes(
        lines[0] + existing._line(json.dumps(json.loads(lines[1][33:]) | FORGERIES[forgery]).encode())
    )
    result = build(data, interrupted)
    assert (result.rows, result.summary["resumed_rows"]) == (30, 0)


# ---- killed at every step that the disk sees


STEPS = [
    (os, name)
    for name in (
        "pwrite",
        "write",
        "ftruncate",
        "truncate",
        "fsync",
        "fdatasync",
        "replace",
        "unlink",
        "open",
    )
] + [(writer, "fallocate"), (h5py.File, "close"), (h5py.Group, "create_dataset")]


def crash(data: Path, target: Path, at: int, **options: Any) -> bool:
    "Build in a child that is killed at its at-th step; whether it was."
    if (pid := os.fork()) == 0:
        try:
            n, own = [0], os.getpid()  # a file may be examined in a child

            def stepping(real: Callable) -> Callable:
                def step(*args: Any, **named: Any) -> Any:
                    n[0] += 1
                    if n[0] == at and os.getpid() == own:
                        os.kill(own, signal.SIGKILL)
                    return real(*args, **named)

                return step

            for owner, name in STEPS:
                setattr(owner, name, stepping(getattr(owner, name)))
            build(data, target, **options)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def sweep(data: Path, folder: Path, every: int, **options: Any) -> int:
    "Kill builds at every n-th step, and let each go on; returns how many were killed."
    right = fresh_bytes(data, folder, **options)
    target = folder / "swept" / "x.h5"
    for n, at in enumerate(range(1, 100_000, every)):
        shutil.rmtree(target.parent, ignore_errors=True)
        if not crash(data, target, at, **options):
            return n
        assert not target.exists() or target.read_bytes() == right
        build(data, target, **options)
        assert target.read_bytes() == right, f"killed at step {at}"
        assert leftovers(target.parent, *BESIDE) == []
    raise AssertionError("the build has no end")


@pytest.mark.slow
def test_killed_at_steps_of_a_build(data: Path, tmp_path: Path, tried: Callable) -> None:
    n = sweep(data, tmp_path, every=5)
    tried("S1", n)
    assert n > 20


@pytest.mark.slow
def test_killed_at_steps_of_a_build_over_an_old_data_set(data: Path, tmp_path: Path, tried: Callable) -> None:
    "The old data set is intact, or the new one complete, at every point."
    old_target = tmp_path / "old" / "x.h5"
    old = build(data, old_target).path.read_bytes()
    all_changes(data)
    settle()
    right, n = fresh_bytes(data, tmp_path), 0
    for at in range(1, 100_000, 9):
        target = tmp_path / f"t{at}" / "x.h5"
        shutil.copytree(old_target.parent, target.parent)
        if not crash(data, target, at):
            break
        n += 1
        assert target.read_bytes() in (old, right)
        build(data, target)
        assert target.read_bytes() == right
        assert leftovers(target.parent, *BESIDE) == []
        tried("S1")
    assert n > 12


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{"max_rejected": 0.05}, {"on_bad_file": "stop"}], ids=str)
def test_killed_at_steps_of_a_build_with_too_many_bad_files(
    data: Path, tmp_path: Path, tried: Callable, policy: dict[str, Any]
) -> None:
    "No kill lets it publish; the old data set is intact at every point, and who may leave the files out goes on from the rows that are there."
    refusing, old_target = {"pipeline": replace(CONFIG, **policy)}, tmp_path / "old" / "x.h5"
    old = build(data, old_target).path.read_bytes()
    all_changes(data)  # 2 of 33 files are bad, 6.1 %
    settle()
    right, n, n_kept = fresh_bytes(data, tmp_path), 0, 0
    for at in range(1, 100_000, 7):
        target = tmp_path / f"t{at}" / "x.h5"
        shutil.copytree(old_target.parent, target.parent)
        was_killed = crash(data, target, at, **refusing)
        assert target.read_bytes() == old
        with pytest.raises(BadFilesError):
            build(data, target, **refusing)
        assert target.read_bytes() == old
        left = leftovers(target.parent, *BESIDE)  # none where all rows so far are in the old data set
        assert left in ([], [".x.h5.journal", ".x.h5.partial"])
        n_kept += build(data, target).summary["kept_rows"] > 0
        assert target.read_bytes() == right
        assert leftovers(target.parent, *BESIDE) == []
        if not was_killed:
            break
        n += 1
        tried("S1")
    assert n >= 3
    assert n_kept > n


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "cpu"},
        {"engine": "cpu", "with_waveforms": True},
        {"engine": "cpu", "pipeline": replace(CONFIG, compression="gzip", fsync=True)},
    ],
    ids=str,
)
def test_killed_at_every_step_of_a_build_of_200_files(
    tmp_path: Path, make_wav: Callable, tried: Callable, options: dict[str, Any]
) -> None:
    data = tmp_path / "data"
    for k in range(200):
        make_wav(data / ("LEAK" if k % 2 else "NOLEAK") / f"{k:03d}.wav", seed=k)
    (data / "LEAK" / "zero.wav").write_bytes(b"")
    settle()
    n = sweep(data, tmp_path, every=1, **options)
    tried("S1", n)
    assert n > 100


# ---- clocks of whole seconds


@pytest.fixture
def whole_seconds(data: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    "A file system that keeps whole seconds, and whose clock stands at a second that is given: recordings get this time, whatever happens to them."
    monkeypatch.setattr(
        loader, "native", lambda: None
    )  # times are taken by Python, where they can be changed
    monkeypatch.setattr(existing, "native", lambda: None)
    clock, real_stat, real_fstat = [0], os.stat, os.fstat

    def coarse(st: os.stat_result, path: Any) -> os.stat_result:
        if not stat.S_ISREG(st.st_mode) or not os.fsdecode(path).startswith(f"{data}/"):
            return st
        fields = {name: getattr(st, name) for name in dir(st) if name.startswith("st_")}
        return os.stat_result(
            tuple(st), fields | {"st_ctime_ns": clock[0] * 10**9, "st_ctime": float(clock[0])}
        )

    def of_path(path: Any, **named: Any) -> os.stat_result:
        return coarse(real_stat(path, **named), path) if not isinstance(path, int) else of_fd(path)

    def of_fd(fd: int) -> os.stat_result:
        return coarse(real_fstat(fd), os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "stat", of_path)
    monkeypatch.setattr(os, "fstat", of_fd)

    def put(second: int) -> None:
        clock[0] = second
        for path in data.rglob("*.wav"):
            os.utime(path, (second, second))

    return put


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True], ids=["complete", "interrupted"])
def test_change_within_the_second_of_a_build_is_detected(
    data: Path,
    tmp_path: Path,
    whole_seconds: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    interrupted: bool,
) -> None:
    "It leaves no trace where times are whole seconds; so what is as young as that is read again."
    now, target, path = int(time.time()), tmp_path / "out" / "x.h5", data / "LEAK" / "01.wav"
    monkeypatch.setattr(
        existing, "_WHOLE_SECOND_NS", 600 * 10**9
    )  # two seconds, and the time that this test may take
    whole_seconds(now)

    def first() -> None:
        with monkeypatch.context() as m:
            if interrupted:
                m.setattr(
                    "leakmel.dataset.publish.check_data_set",
                    lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt()),
                )
            with suppress(KeyboardInterrupt):
                build(data, target)
        flip(path, 1000)
        whole_seconds(now)

    first()
    result = build(data, target)
    assert (result.summary["kept_rows"], result.summary["nothing_to_do"]) == (0, False)
    assert target.read_bytes() == fresh_bytes(data, tmp_path)
    monkeypatch.setattr(existing, "_WHOLE_SECOND_NS", -600 * 10**9)  # without this rule the change is missed
    build(data, target, fresh=True)
    first()
    with suppress(DataError, VerifyError):
        build(data, target)  # the check may find the row that is not the recording's any more
    assert target.read_bytes() != fresh_bytes(data, tmp_path)


def test_least_age_of_a_modification_time(monkeypatch: pytest.MonkeyPatch) -> None:
    "Two seconds where it may be a whole one, 20 ms else."
    second, fine = 1_700_000_000 * 10**9, 1_700_000_000 * 10**9 + 5
    monkeypatch.setattr(
        existing, "_CLOCK_STEP_NS", 20_000_000
    )  # the shipped value, which other tests set to 0
    for ctime_ns, after_ns, is_settled in (
        (second, 1_999_999_999, False),
        (second, 2_000_000_001, True),
        (fine, 19_999_999, False),
        (fine, 20_000_001, True),
    ):
        assert existing.is_settled(np.array([ctime_ns]), ctime_ns + after_ns).tolist() == [is_settled]


def test_old_times_in_whole_seconds_are_trusted(
    data: Path, tmp_path: Path, whole_seconds: Callable[[int], None], read: list[bytes]
) -> None:
    whole_seconds(int(time.time()) - 10)
    build(data, tmp_path / "x.h5")
    read.clear()
    assert build(data, tmp_path / "x.h5").summary["nothing_to_do"]
    whole_seconds(int(time.time()) - 5)
    assert build(data, tmp_path / "x.h5").summary["changes"] == {"added": 0, "changed": 32, "removed": 0}
    assert len(read) == 32
