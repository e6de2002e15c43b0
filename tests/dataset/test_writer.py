"Rows at a fixed offset, metadata around them, and a final name only for complete files."

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from each import each
from errors import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from independent import content, leftovers, same

from leakmel.core.errors import OutputError, SpaceError, UsageError
from leakmel.core.files import OutputLock, replacing, require_space
from leakmel.dataset import schema, writer
from leakmel.dataset.schema import (
    FILE_COLUMNS,
    Metadata,
    Rejected,
    byte_column,
    name_columns,
    root_attributes,
)
from leakmel.dataset.writer import RowFile, part_offsets, reserve
from leakmel.mel.spec import MelSpec
from leakmel.recordings.wav import digest_of

SMALL = MelSpec(duration_s=0.25)  # one row: [1, 2, 64, 1]


def path_of(k: int) -> bytes:
    return b"LEAK/a%05d.wav" % k


def rows_of(numbers, spec: MelSpec = SMALL) -> np.ndarray:
    "A row for each number that can be told from any other."
    return np.stack(
        [
            np.full(spec.row_shape, -k % 2048, np.float16) + np.arange(spec.n_mels, dtype=np.float16)[:, None]
            for k in numbers
        ]
    )


def metadata_of(numbers, rejected=(), spec: MelSpec = SMALL) -> Metadata:
    "Metadata of a data set whose rows come from these candidates."
    paths = [path_of(k) for k in numbers]
    n = len(paths)
    columns = {"path": byte_column(paths)} | name_columns(paths)
    columns |= {name: np.arange(n, dtype=np.int32) for name in FILE_COLUMNS if name not in columns}
    columns |= {
        "encoding": byte_column([b"pcm16"] * n),
        "status": byte_column([b"ok"] * n),
        "digest": np.array([b"0" * 32] * n, "S32"),
    }
    digests = np.array([digest_of(r) for r in rows_of(numbers, spec)] if n else [], "S32")
    lost = tuple(Rejected(path_of(k), "empty", "the file has no bytes") for k in rejected)
    return Metadata(
        spec,
        root_attributes(spec, "test@1/cpu", "0" * 12, ["LEAK"], "", n),
        np.zeros(n, np.int16),
        columns,
        digests,
        lost,
    )


def build(target: Path, good: np.ndarray, *, block: int = 7, spec: MelSpec = SMALL, order: int = 1) -> bytes:
    "Write a data set in blocks; what is not good is written as noise, as a real batch would."
    file = RowFile(target, spec.row_shape, len(good))
    rows = rows_of(range(len(good)), spec)
    rows[~good] = np.float16(-7777)
    for first in list(range(0, len(good), block))[::order]:
        file.write(first, np.ascontiguousarray(rows[first : first + block]))
    file.compact_rows(good)
    file.finish(metadata_of(np.flatnonzero(good), (), spec))
    file.publish()
    return target.read_bytes()


# ---- where the rows are


@each("shape", [(1, 1, 1, 1), (40, 2, 64, 1), (79, 3, 32, 1), (1, 1, 1, 7), (300, 40, 128, 9)])
def test_offset_does_not_depend_on_the_number_of_rows(tmp_path, shape):
    found = set()
    most = (1 << 43) // (2 * int(np.prod(shape)))  # 8 TiB: ext4 holds 16
    for n in (1, 2, 3, 255, 256, 65_536, 51_434, 2_000_000, 1 << 33):
        if n > most:
            continue
        found.add(schema.create_parts(tmp_path / "x.h5", n, shape, None)[0])
        (tmp_path / "x.h5").unlink()
    (offset,) = found
    assert offset == part_offsets(1, shape)[0]
    assert offset % 4096 == 0
    assert part_offsets(3, shape, (7, 5, 11))[1] % 4096 == 0
    assert not leftovers(tmp_path)


def test_nothing_but_metadata_is_in_memory():
    "A terabyte of rows takes a few kilobytes, and the file is gone after use."
    with schema.memory_file() as path:
        schema.create_parts(path, 1 << 30, (4, 2, 64, 1), (7, 5, 11))
        st = path.stat()
        assert st.st_size > 1 << 40
        assert st.st_blocks * 512 < 100_000
    assert not path.exists() or not os.path.samestat(path.stat(), st)


def test_offset_does_not_depend_on_metadata(tmp_path):
    for n in (1, 100, 3000):
        build(tmp_path / "a.h5", np.ones(n, bool))
        with h5py.File(tmp_path / "a.h5") as f:
            assert f["segments_mel"].id.get_offset() == part_offsets(1, SMALL.row_shape)[0]
            assert f["segments_mel"].chunks is None
            assert (f["segments_mel"][:] == rows_of(range(n))).all()


def test_rows_are_at_their_numbers(tmp_path):
    good = np.ones(20, bool)
    assert (
        build(tmp_path / "a.h5", good, order=1)
        == build(tmp_path / "b.h5", good, order=-1)
        == build(tmp_path / "c.h5", good, block=1)
    )


def test_short_writes_are_continued(tmp_path, monkeypatch):
    whole = build(tmp_path / "a.h5", np.ones(9, bool))
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data[:100]), at))
    assert build(tmp_path / "b.h5", np.ones(9, bool)) == whole


# ---- closing ranks


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(good=st.lists(st.booleans(), min_size=1, max_size=90).filter(any), block=st.integers(1, 40))
def test_rejected_files_leave_no_trace(tmp_path, good, block):
    keep = np.array(good)
    numbers = np.flatnonzero(keep)
    build(tmp_path / "a.h5", keep, block=block)
    clean = RowFile(tmp_path / "b.h5", SMALL.row_shape, len(numbers))
    clean.write(0, rows_of(numbers))
    clean.finish(metadata_of(numbers))
    clean.publish()
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert leftovers(tmp_path, "a.h5", "b.h5") == []


@each("pattern", ["first", "last", "every second", "first half", "all but one", "none lost"])
def test_rows_are_compacted_over_any_gap(tmp_path, pattern):
    n = 200
    good = np.ones(n, bool)
    match pattern:
        case "first":
            good[0] = False
        case "last":
            good[-1] = False
        case "every second":
            good[::2] = False
        case "first half":
            good[: n // 2] = False
        case "all but one":
            good[:] = np.arange(n) == 117
    file = RowFile(tmp_path / "a.h5", SMALL.row_shape, n)
    file.write(0, rows_of(range(n)))
    file.compact_rows(good)
    file.finish(metadata_of(np.flatnonzero(good)))
    file.publish()
    with h5py.File(tmp_path / "a.h5") as f:
        assert (f["segments_mel"][:] == rows_of(np.flatnonzero(good))).all()


def test_large_rows_are_compacted(tmp_path):
    spec = MelSpec(long_hop=16)  # 0.64 MB a row: a block of 8 MB holds a dozen
    good = np.ones(40, bool)
    good[[0, 5, 6, 29]] = False
    build(tmp_path / "a.h5", good, spec=spec)
    with h5py.File(tmp_path / "a.h5") as f:
        assert (f["segments_mel"][:] == rows_of(np.flatnonzero(good), spec)).all()


# ---- waveforms, where they are wanted

WAVE = (1, 2, 512)  # the segments of one row


def waves_of(numbers) -> np.ndarray:
    "Waveforms for each number that can be told from any other."
    return np.stack(
        [np.arange(np.prod(WAVE), dtype=np.float32).reshape(WAVE) / 1024 + int(k) for k in numbers]
    )


def with_waves(meta: Metadata, numbers) -> Metadata:
    "The metadata of a data set that holds the waveforms of these candidates."
    return replace(meta, waveform_digests=np.array([digest_of(w) for w in waves_of(numbers)], "S32"))


def build_both(target: Path, good: np.ndarray, order: int = 1) -> RowFile:
    "Rows and waveforms of all candidates, in any order; what is not good is noise. Closed, not yet complete."
    file = RowFile(target, SMALL.row_shape, len(good), WAVE)
    for k in range(len(good))[::order]:
        file.write(k, rows_of([k]) if good[k] else np.full((1, *SMALL.row_shape), -7777, np.float16))
        if good[k] or k % 2:
            file.write(k, waves_of([k])[0] if good[k] else np.full(WAVE, np.nan, np.float32), 1)
    file.compact_rows(good)
    return file


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(good=st.lists(st.booleans(), min_size=1, max_size=60).filter(any))
def test_rejected_files_leave_no_trace_in_waveforms(tmp_path, good):
    keep = np.array(good)
    numbers = np.flatnonzero(keep)
    meta = with_waves(metadata_of(numbers), numbers)
    for name, mask, order in (("a.h5", keep, 1), ("b.h5", keep, -1)):
        file = build_both(tmp_path / name, mask, order)
        file.finish(meta)
        file.publish()
    clean = RowFile(tmp_path / "c.h5", SMALL.row_shape, len(numbers), WAVE)
    clean.write(0, rows_of(numbers))
    for k, wave in enumerate(waves_of(numbers)):
        clean.write(k, wave, 1)
    clean.finish(meta)
    clean.publish()
    with h5py.File(tmp_path / "a.h5") as f:
        assert (f["segments_waveform"][:] == waves_of(numbers)).all()
        assert (f["segments_mel"][:] == rows_of(numbers)).all()
    assert (
        (tmp_path / "a.h5").read_bytes()
        == (tmp_path / "b.h5").read_bytes()
        == (tmp_path / "c.h5").read_bytes()
    )
    assert leftovers(tmp_path, "a.h5", "b.h5", "c.h5") == []


@each("n", [1, 2, 9, 500])
def test_offset_of_mels_does_not_depend_on_waveforms(tmp_path, n):
    build(tmp_path / "plain.h5", np.ones(n, bool))
    file = build_both(tmp_path / "a.h5", np.ones(n, bool))
    file.finish(with_waves(metadata_of(range(n)), range(n)))
    file.publish()
    end = part_offsets(1, SMALL.row_shape)[0] + n * file.row_bytes
    with h5py.File(tmp_path / "plain.h5") as a, h5py.File(tmp_path / "a.h5") as b:
        assert "segments_waveform" not in a
        assert "digests/waveforms" not in a
        assert (
            a["segments_mel"].id.get_offset() == b["segments_mel"].id.get_offset() == end - n * file.row_bytes
        )
        begin = b["segments_waveform"].id.get_offset()
        assert end <= begin < end + 3 * schema.ALIGNMENT
        assert begin % schema.ALIGNMENT == 0
        assert b["segments_waveform"].chunks is None
    for name in ("plain.h5", "a.h5"):
        assert (tmp_path / name).read_bytes()[end - n * file.row_bytes : end] == rows_of(range(n)).tobytes()


def test_no_row_is_moved_without_rejections(tmp_path, monkeypatch):
    def never(*a):
        raise AssertionError("bytes were moved")

    file = RowFile(tmp_path / "a.h5", SMALL.row_shape, 20, WAVE)
    before = file.waveform_offset
    monkeypatch.setattr(writer, "write_at", never)
    monkeypatch.setattr(writer, "read_at", never)
    file.compact_rows(np.ones(20, bool))
    assert file.waveform_offset == before
    monkeypatch.undo()
    file.abort()


def test_space_for_waveforms_is_checked_and_reserved(tmp_path, monkeypatch):
    file = RowFile(tmp_path / "a.h5", SMALL.row_shape, 100, WAVE)
    room = file.waveform_offset + 100 * 4096
    assert file.waveform_offset >= file.offset + 100 * 256
    assert file.partial.stat().st_size == room
    assert file.partial.stat().st_blocks * 512 >= room
    file.abort()
    monkeypatch.setattr(os, "statvfs", fake_statvfs(1 << 20))
    missing = f"{1000 * (256 + 4096 + writer.SPARE_BYTES) - (1 << 20):,} bytes"
    with raises("no-space", SpaceError, path=tmp_path, says=missing):
        RowFile(tmp_path / "a.h5", SMALL.row_shape, 1000, WAVE)
    assert leftovers(tmp_path) == []


def test_gzip_compresses_waveforms_and_checks_space(tmp_path, monkeypatch):
    n = 70
    meta = with_waves(metadata_of(range(n)), range(n))
    whole = build_both(tmp_path / "a.h5", np.ones(n, bool))
    whole.finish(meta)
    whole.publish()
    packed = build_both(tmp_path / "b.h5", np.ones(n, bool))
    packed.finish(meta)
    asked: list[int] = []
    monkeypatch.setattr(writer, "require_space", lambda folder, n_bytes: asked.append(n_bytes))
    packed.compress(meta)
    packed.publish()
    assert asked == [n * (256 + 4096 + writer.SPARE_BYTES)]
    assert same(content(tmp_path / "a.h5"), content(tmp_path / "b.h5"))
    with h5py.File(tmp_path / "b.h5") as f:
        assert f["segments_waveform"].compression == "gzip"


def test_missing_compaction_is_detected(tmp_path):
    file = RowFile(tmp_path / "a.h5", SMALL.row_shape, 100, WAVE)
    with raises("layout-changed", OutputError, path=file.partial):
        file.finish(with_waves(metadata_of([0, 1]), [0, 1]))
    file.abort()
    assert leftovers(tmp_path) == []


# ---- what is around the rows


def test_metadata_survive_a_round_trip(tmp_path):
    numbers, lost = [0, 2, 3, 9], [1, 4]
    file = RowFile(tmp_path / "a.h5", SMALL.row_shape, 10)
    file.write(0, rows_of(range(10)))
    file.compact_rows(np.isin(np.arange(10), numbers))
    meta = metadata_of(numbers, lost)
    file.finish(meta)
    file.publish()
    got = content(tmp_path / "a.h5")
    assert got["files/path"].tolist() == [path_of(k) for k in numbers]
    assert got["rejected/path"].tolist() == [path_of(k) for k in lost]
    assert got["rejected/code"].tolist() == [b"empty"] * 2
    assert got["digests/rows"].tolist() == [digest_of(r).encode() for r in got["segments_mel"]]
    for name in FILE_COLUMNS:
        np.testing.assert_array_equal(got[f"files/{name}"], meta.columns[name])
    for name, value in meta.attributes.items():
        assert str(got[f"@{name}"]) == str(np.array(value, object) if name == "axes" else value)
    with h5py.File(tmp_path / "a.h5") as f:
        assert [d.label for d in f["segments_mel"].dims] == [
            "row",
            "long_start_s",
            "short_start_s",
            "mel_hz",
            "frame",
        ]
        np.testing.assert_array_equal(f["segments_mel"].dims[3]["mel_hz"][:], SMALL.mel_hz)
        np.testing.assert_allclose(f["segments_mel"].dims[2]["short_start_s"][:], [0, 0.125])


@pytest.mark.slow
def test_another_process_in_another_zone_writes_the_same_bytes(tmp_path):
    first = build(tmp_path / "a.h5", np.ones(5, bool))
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent / name) for name in ('.', '../helpers')]!r}\nimport numpy as np, pathlib, test_writer\n"
        f"test_writer.build(pathlib.Path({str(tmp_path / 'b.h5')!r}), np.ones(5, bool))"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TZ": "Asia/Tokyo"}, check=True)
    assert (tmp_path / "b.h5").read_bytes() == first
    with h5py.File(tmp_path / "a.h5") as f:
        tracked: list[str] = []
        f.visititems(
            lambda name, item: (
                tracked.append(name)
                if isinstance(item, h5py.Dataset) and item.id.get_create_plist().get_obj_track_times()
                else None
            )
        )
        assert tracked == []


def test_many_labels_fit_into_the_attributes(tmp_path):
    names = [
        f"a label with a long name {i:05d}" for i in range(5000)
    ]  # far over the 64 KiB of an ordinary attribute
    file = RowFile(tmp_path / "a.h5", SMALL.row_shape, 1)
    meta = metadata_of([0])
    file.write(0, rows_of([0]))
    file.finish(
        Metadata(
            SMALL,
            root_attributes(SMALL, "e", "f", names, "", 1),
            meta.labels,
            meta.columns,
            meta.row_digests,
            (),
        )
    )
    file.publish()
    import json

    assert json.loads(content(tmp_path / "a.h5")["@labels_json"]) == names


def test_gzip_has_the_same_content(tmp_path):
    good = np.ones(70, bool)
    build(tmp_path / "a.h5", good)
    file = RowFile(tmp_path / "b.h5", SMALL.row_shape, len(good))
    file.write(0, rows_of(range(len(good))))
    meta = metadata_of(range(len(good)))
    file.finish(meta)
    file.compress(meta)
    file.sync()
    file.publish()
    assert same(content(tmp_path / "a.h5"), content(tmp_path / "b.h5"))
    with h5py.File(tmp_path / "b.h5") as f:
        assert f["segments_mel"].compression == "gzip"
    assert leftovers(tmp_path, "a.h5", "b.h5") == []
    assert (tmp_path / "b.h5").stat().st_size < (tmp_path / "a.h5").stat().st_size


def test_failed_compression_leaves_the_whole_file(tmp_path, monkeypatch):
    file = RowFile(tmp_path / "a.h5", SMALL.row_shape, 3)
    file.write(0, rows_of(range(3)))
    file.finish(metadata_of(range(3)))
    before = file.partial.read_bytes()

    def full(*a):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "write_metadata", full)
    with pytest.raises(OSError):
        file.compress(metadata_of(range(3)))
    assert file.partial.read_bytes() == before
    assert leftovers(tmp_path) == [file.partial.name]
    file.abort()


# ---- the final name


def test_publish_replaces_and_abort_does_not(tmp_path):
    target = tmp_path / "a.h5"
    old = build(target, np.ones(3, bool))
    file = RowFile(target, SMALL.row_shape, 4)
    file.write(0, rows_of(range(4)))
    assert target.read_bytes() == old
    file.abort()
    assert target.read_bytes() == old
    assert leftovers(tmp_path, "a.h5") == []
    with h5py.File(target) as reader:
        new = build(target, np.ones(4, bool))
        assert len(reader["segments_mel"]) == 3  # an open reader keeps what it opened
        assert (reader["segments_mel"][:] == rows_of(range(3))).all()
    assert target.read_bytes() == new != old


def test_the_replaced_file_is_closed_in_a_thread(tmp_path, monkeypatch):
    target = tmp_path / "x.h5"
    target.write_bytes(b"old")
    old = os.stat(target).st_ino
    closed, close = [], os.close

    def note(fd: int) -> None:
        closed.append((os.fstat(fd).st_ino, threading.current_thread() is threading.main_thread()))
        close(fd)

    file = RowFile(target, (1, 1, 2, 3), 1)
    monkeypatch.setattr(os, "close", note)
    file.publish()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(10)
    monkeypatch.undo()
    assert (old, False) in closed
    assert os.stat(target).st_ino != old


def test_abort_twice_and_after_publish(tmp_path):
    file = RowFile(tmp_path / "a.h5", SMALL.row_shape, 1)
    file.abort()
    file.abort()
    build(tmp_path / "a.h5", np.ones(1, bool))
    file = RowFile(tmp_path / "a.h5", SMALL.row_shape, 1)
    file.write(0, rows_of([0]))
    file.finish(metadata_of([0]))
    file.publish()
    file.abort()
    assert leftovers(tmp_path) == ["a.h5"]


def test_files_of_a_killed_build_are_reused(tmp_path):
    (tmp_path / ".a.h5.partial").write_bytes(b"x" * 5_000_000)
    (tmp_path / ".a.h5.partial.gz").write_bytes(b"not hdf5")
    assert build(tmp_path / "a.h5", np.ones(3, bool)) == build(tmp_path / "b.h5", np.ones(3, bool))
    assert leftovers(tmp_path, "a.h5", "b.h5") == []


@each("ending", ["partial", "lock", "partial.gz"])
def test_links_in_the_output_folder_are_not_followed(tmp_path, ending):
    "In a folder that others may write to, a link under our working name must not cost its target."
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    out = tmp_path / "out"
    out.mkdir()
    (out / f".a.h5.{ending}").symlink_to(victim)
    try:
        with OutputLock(out / "a.h5"):
            file = RowFile(out / "a.h5", SMALL.row_shape, 1)
            file.write(0, rows_of([0]))
            file.finish(metadata_of([0]))
            file.compress(metadata_of([0]))
            file.publish()
    except OutputError:
        pass  # refusing is as good
    assert victim.read_bytes() == b"precious"


# ---- room


def fake_statvfs(free: int):
    return lambda path: SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)


def test_insufficient_space_is_reported_before_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", fake_statvfs(1 << 20))
    missing = 1_000_000 * (256 + writer.SPARE_BYTES) - (1 << 20)
    with raises("no-space", SpaceError, path=tmp_path, says=f"{missing:,} bytes") as e:
        RowFile(tmp_path / "a.h5", SMALL.row_shape, 1_000_000)
    assert e.value.exit_code == 3
    assert leftovers(tmp_path) == []
    require_space(tmp_path, 1 << 20)
    with raises("no-space", SpaceError, says="1 bytes"):
        require_space(tmp_path, (1 << 20) + 1)


def test_disk_full_while_reserving(tmp_path, monkeypatch):
    old = build(tmp_path / "a.h5", np.ones(2, bool))

    def full(fd, n):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "fallocate", full)
    with raises("no-space", SpaceError, path=tmp_path / ".a.h5.partial") as e:
        RowFile(tmp_path / "a.h5", SMALL.row_shape, 100)
    assert e.value.exit_code == 3
    assert leftovers(tmp_path, "a.h5") == []
    assert (tmp_path / "a.h5").read_bytes() == old


@each("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_file_systems_that_cannot_reserve(tmp_path, monkeypatch, code):
    whole = build(tmp_path / "a.h5", np.ones(4, bool))

    def refuse(fd, n):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(writer, "fallocate", refuse)
    assert build(tmp_path / "b.h5", np.ones(4, bool)) == whole


def test_where_blocks_cannot_be_allocated_nothing_is_written(tmp_path, monkeypatch):
    "The C library's `posix_fallocate` would write into every block there."

    def refused(fd, mode, at, n):
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(writer, "_system_fallocate", lambda: refused)
    written = Path("/proc/self/io")

    def bytes_written() -> int:
        return int(dict(line.split(": ") for line in written.read_text().splitlines())["wchar"])

    with open(tmp_path / "x", "wb") as f:
        before = bytes_written()
        reserve(f.fileno(), 1 << 30, tmp_path / "x")
        assert bytes_written() == before
    assert (tmp_path / "x").stat().st_size == 1 << 30
    assert (tmp_path / "x").stat().st_blocks == 0
    monkeypatch.setattr(writer, "_system_fallocate", lambda: None)  # a C library without the call
    with open(tmp_path / "y", "wb") as f:
        reserve(f.fileno(), 1 << 30, tmp_path / "y")
    assert (tmp_path / "y").stat().st_blocks == 0


def test_a_signal_while_reserving_repeats_the_call(tmp_path, monkeypatch):
    codes = [errno.EINTR, errno.EINTR, 0]

    def interrupted(fd, mode, at, n):
        ctypes.set_errno(code := codes.pop(0))
        return -1 if code else 0

    monkeypatch.setattr(writer, "_system_fallocate", lambda: interrupted)
    with open(tmp_path / "x", "wb") as f:
        reserve(f.fileno(), 1 << 20, tmp_path / "x")
    assert codes == []


def test_other_faults_of_reserving(tmp_path, monkeypatch):
    def broken(fd, n):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(writer, "fallocate", broken)
    with raises("write-failed", OutputError, path=tmp_path / ".a.h5.partial", says="EIO"):
        RowFile(tmp_path / "a.h5", SMALL.row_shape, 1)
    assert leftovers(tmp_path) == []


def test_reserve_allocates_blocks(tmp_path):
    with open(tmp_path / "x", "wb") as f:
        reserve(f.fileno(), 1 << 20, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size == 1 << 20
    assert (tmp_path / "x").stat().st_blocks * 512 >= 1 << 20


# ---- the lock


def test_second_builder_is_refused_and_the_first_is_named(tmp_path):
    with (
        OutputLock(tmp_path / "a.h5"),
        raises("output-locked", OutputError, found=f"process {os.getpid()}"),
        OutputLock(tmp_path / "a.h5"),
    ):
        pass
    assert leftovers(tmp_path) == []
    with OutputLock(tmp_path / "a.h5"), OutputLock(tmp_path / "b.h5"):
        pass


def test_stale_lock_file_does_not_block(tmp_path):
    (tmp_path / ".a.h5.lock").write_text("99999999")
    with OutputLock(tmp_path / "a.h5"):
        assert (tmp_path / ".a.h5.lock").read_text() == str(os.getpid())
    assert leftovers(tmp_path) == []


def test_killed_holder_does_not_block(tmp_path):
    code = (
        "import time, pathlib\nfrom leakmel.core.files import OutputLock\n"
        f"with OutputLock(pathlib.Path({str(tmp_path / 'a.h5')!r})): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with (
            raises("output-locked", OutputError, found=f"process {child.pid}"),
            OutputLock(tmp_path / "a.h5"),
        ):
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
    with OutputLock(tmp_path / "a.h5"):
        pass
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("ending", ["lock", "partial"])
def test_folder_at_a_working_name_is_reported_with_its_path(tmp_path, ending):
    (tmp_path / f".a.h5.{ending}").mkdir()
    with (
        raises("write-failed", OutputError, path=tmp_path / f".a.h5.{ending}"),
        OutputLock(tmp_path / "a.h5"),
    ):
        RowFile(tmp_path / "a.h5", SMALL.row_shape, 1)
    assert leftovers(tmp_path, f".a.h5.{ending}") == []


def test_name_too_long_for_its_companions_is_an_output_error(tmp_path):
    name = "x" * 250 + ".h5"  # fits, but not with a dot before and ".partial" behind
    with raises("write-failed", OutputError), OutputLock(tmp_path / name):
        RowFile(tmp_path / name, SMALL.row_shape, 1)
    assert leftovers(tmp_path) == []


def test_a_clean_up_that_fails_does_not_hide_the_error(tmp_path):
    with raises("usage", UsageError), replacing(tmp_path / "x") as new:
        new.mkdir()  # cannot be unlinked
        raise UsageError("the error", code="usage")
