"Gzip chunks made in threads are what the HDF5 library itself would have made, and a compression that ends early leaves nothing."

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from each import each
from errors import raises
from independent import content, leftovers, same
from left_threads import left_threads
from test_writer import WAVE, build_both, metadata_of, with_waves

import leakmel as lm
from leakmel.core.errors import OutputError
from leakmel.dataset import writer
from leakmel.dataset.schema import Metadata, new_file
from leakmel.dataset.writer import RowFile, compress_chunk, compress_rows, create_compressed, map_in_order

FILTERS = [(h5py.h5z.FILTER_SHUFFLE, b"shuffle"), (h5py.h5z.FILTER_DEFLATE, b"deflate")]


def packed(folder: Path, rows: np.ndarray, name: str = "packed.h5", **options: Any) -> Path:
    "A file of these rows in gzip chunks; `options` of `create_compressed` and of `compress_rows`."
    path = folder / name
    with h5py.File(folder / "plain.h5", "w") as plain, new_file(path) as file:
        plain.create_dataset("x", data=rows, track_times=False)
        sizes = {k: options.pop(k) for k in ("level", "chunk_bytes") if k in options}
        list(
            compress_rows(
                plain["x"], create_compressed(file, "x", rows.shape, rows.dtype, **sizes), **options
            )
        )
    return path


def whole(folder: Path, n: int, name: str = "a.h5") -> tuple[RowFile, Metadata]:
    "A complete partial file of n rows with waveforms, and its metadata."
    meta = with_waves(metadata_of(range(n)), range(n))
    file = build_both(folder / name, np.ones(n, bool))
    file.finish(meta)
    return file, meta


def noise(n: int, dtype: str = "<f2", row: tuple[int, ...] = (4, 2, 16, 1)) -> np.ndarray:
    "Rows of numbers around -60 that can hardly be told from mels."
    return np.random.default_rng(n).normal(-60, 9, (n, *row)).astype(dtype)


# ---- what is in the file


@each(
    ("dtype", "row"),
    [("<f2", (4, 2, 16, 1)), ("<f2", (1, 1, 1, 1)), ("<f4", (2, 3, 33)), (">f4", (2, 3, 33))],
)
@each("n", [1, 2, 7, 8, 9, 64, 65])
def test_chunks_equal_those_of_the_hdf5_library(tmp_path, n, dtype, row):
    "Eight rows to a chunk: one row, a part of a chunk, whole chunks, and whole ones with a part."
    rows = noise(n, dtype, row)
    path = packed(tmp_path, rows, chunk_bytes=8 * rows[0].nbytes, threads=3)
    with h5py.File(path) as file, new_file(tmp_path / "own.h5") as own:
        x = file["x"]
        own.create_dataset(
            "x",
            data=rows,
            chunks=x.chunks,
            compression="gzip",
            compression_opts=1,
            shuffle=True,
            track_times=False,
        )
        declared = [
            x.id.get_create_plist().get_filter(i) for i in range(x.id.get_create_plist().get_nfilters())
        ]
        assert declared == [own["x"].id.get_create_plist().get_filter(i) for i in range(2)]
        assert [(d[0], d[3]) for d in declared] == FILTERS
        assert (x.chunks, x.dtype, x.shape) == (own["x"].chunks, rows.dtype, rows.shape)
        assert (x.chunks[0], x.id.get_num_chunks()) == (min(n, 8), -(-n // 8))
        assert np.array_equal(x[:], rows)
        assert np.array_equal(x[n - 1], rows[n - 1])
        for first in range(0, n, x.chunks[0]):
            mask, stored = x.id.read_direct_chunk((first, *(0 for _ in row)))
            mask_of_own, stored_by_own = own["x"].id.read_direct_chunk((first, *(0 for _ in row)))
            plain = zlib.decompress(stored)
            assert (mask, len(plain)) == (0, x.chunks[0] * rows[0].nbytes), (
                "every chunk is whole, and went through both filters"
            )
            assert plain == (zlib.decompress(stored_by_own) if not mask_of_own & 2 else stored_by_own)


def test_plain_h5py_reads_compressed_data_sets(tmp_path):
    rows = noise(30)
    packed(tmp_path, rows, chunk_bytes=7 * rows[0].nbytes)
    np.save(tmp_path / "rows.npy", rows)
    code = "import h5py, numpy as np, sys\nassert np.array_equal(h5py.File('packed.h5')['x'][:], np.load('rows.npy'))\nassert 'leakmel' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True)


def test_bytes_do_not_depend_on_threads(tmp_path, monkeypatch):
    "Nor on which thread is slow."
    rows, real, calls = noise(200), writer.compress_chunk, iter(range(10_000))
    expected = packed(tmp_path, rows, "one.h5", chunk_bytes=3 * rows[0].nbytes, threads=1).read_bytes()

    def uneven(*a: Any) -> bytes:
        if next(calls) % 5 == 0:
            time.sleep(0.004)
        return real(*a)

    monkeypatch.setattr(writer, "compress_chunk", uneven)
    for threads in (2, 8):
        assert (
            packed(
                tmp_path, rows, f"{threads}.h5", chunk_bytes=3 * rows[0].nbytes, threads=threads
            ).read_bytes()
            == expected
        )


def test_compressed_data_sets_do_not_depend_on_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "create_compressed", partial(create_compressed, chunk_bytes=9000))
    found = []
    for cores in (1, 8):
        monkeypatch.setattr(writer, "usable_cores", lambda cores=cores: cores)
        file, meta = whole(tmp_path, 70, f"{cores}.h5")
        file.compress(meta)
        file.publish()
        found.append((tmp_path / f"{cores}.h5").read_bytes())
    assert found[0] == found[1]
    with h5py.File(tmp_path / "1.h5") as f:
        assert (f["segments_mel"].id.get_num_chunks(), f["segments_waveform"].id.get_num_chunks()) == (2, 35)


def test_chunks_do_not_stay_in_memory(tmp_path, monkeypatch):
    "The HDF5 library places them in a file in memory, from where each is moved to the disk."
    (file, meta), held, real = whole(tmp_path, 1000), list[int](), writer._copy_around
    file.write(0, noise(1000, "<f4", WAVE), 1)

    def noted(memory: Path, *given: Any) -> None:
        held.append(memory.stat().st_blocks * 512)
        real(memory, *given)

    monkeypatch.setattr(writer, "_copy_around", noted)
    monkeypatch.setattr(writer, "create_compressed", partial(create_compressed, chunk_bytes=1 << 16))
    file.compress(meta)
    assert file.partial.stat().st_size > 3_000_000
    assert len(held) == 1
    assert held[0] < 500_000
    file.abort()


@pytest.mark.parametrize("described", [True, False])
def test_unused_reserved_space_is_released(tmp_path, monkeypatch, described):
    "Also where nothing is written behind the last chunk: then the library leaves the end of the file where it is."
    (file, meta), (again, _) = whole(tmp_path, 70), whole(tmp_path, 70, "b.h5")
    asked: list[int] = []
    real = writer.reserve
    if not described:
        monkeypatch.setattr(writer, "write_metadata", lambda f, meta: None)

    def noted(fd: int, n_bytes: int, path: Path) -> None:
        asked.append(n_bytes)
        real(fd, n_bytes, path)

    monkeypatch.setattr(writer, "reserve", noted)
    file.compress(meta)
    st = file.partial.stat()
    with h5py.File(file.partial) as f:
        assert f.id.get_filesize() == st.st_size < asked[0] == 70 * (256 + 4096 + writer.SPARE_BYTES)
    assert st.st_blocks * 512 <= st.st_size + (64 << 10)
    monkeypatch.setattr(writer, "reserve", lambda *a: None)
    again.compress(meta)
    assert file.partial.read_bytes() == again.partial.read_bytes()
    for one in (file, again):
        one.abort()


@each("item_bytes", [1, 2, 4, 8])
def test_shuffle_equals_the_hdf5_filter(item_bytes):
    raw = np.random.default_rng(0).bytes(24)
    assert zlib.decompress(compress_chunk(raw, item_bytes, 1)) == bytes(
        raw[i + k] for k in range(item_bytes) for i in range(0, 24, item_bytes)
    )


def test_a_build_with_waveforms_is_right(tmp_path, make_wav):
    for k in range(12):
        make_wav(tmp_path / "data" / "LEAK" / f"s~{k:03d}~20240229_1200{k:02d}~3.wav", seed=k)
    plain, small = (
        lm.build(
            tmp_path / "data",
            out=tmp_path / f"{how}.h5",
            with_waveforms=True,
            progress="none",
            check=None,
            pipeline=lm.PipelineConfig(compression=how),
        )
        for how in ("none", "gzip")
    )
    assert same(content(plain.path), content(small.path))
    assert lm.verify(small.path, root=tmp_path / "data", sample=None).ok
    assert small.path.stat().st_size < plain.path.stat().st_size
    with lm.open_dataset(small.path) as ds:
        assert (ds.mels.compression, ds.waveforms.compression) == ("gzip", "gzip")  # type: ignore[union-attr]


# ---- memory


def test_number_of_queued_chunks_is_bounded(tmp_path, monkeypatch):
    "A slow writer must not make chunks pile up."
    rows, real, made, ahead = noise(300), writer.compress_chunk, iter(range(10_000)), list[int]()
    last, written = 0, 0

    def counted(*a: Any) -> bytes:
        nonlocal last
        last = next(made) + 1
        return real(*a)

    def slow_writer() -> bool:
        nonlocal written
        time.sleep(0.002)
        ahead.append(last - written)
        written += 1
        return False

    monkeypatch.setattr(writer, "compress_chunk", counted)
    packed(tmp_path, rows, chunk_bytes=rows[0].nbytes, threads=2, stopped=slow_writer)
    assert len(ahead) == 300
    assert 2 <= max(ahead) <= 2 * writer._CHUNKS_PER_THREAD


def test_chunks_are_compressed_in_parallel(tmp_path, monkeypatch):
    "Each of the first two waits for the other: one after the other they would wait for ever."
    both, real, calls = threading.Barrier(2), writer.compress_chunk, iter(range(1000))

    def meeting(*a: Any) -> bytes:
        if next(calls) < 2:
            both.wait(timeout=60)
        return real(*a)

    monkeypatch.setattr(writer, "compress_chunk", meeting)
    rows = noise(40)
    with h5py.File(packed(tmp_path, rows, chunk_bytes=rows[0].nbytes, threads=2)) as f:
        assert np.array_equal(f["x"][:], rows)


def test_results_keep_order_and_errors_are_raised():
    def uneven(k: int) -> int:
        time.sleep(0.001 * (k % 3))
        return k

    with ThreadPoolExecutor(4) as pool:
        assert list(map_in_order(pool, uneven, range(50), 5)) == list(range(50))
        assert list(map_in_order(pool, str, [], 5)) == []
        results = map_in_order(pool, lambda k: 1 // (k - 7), range(50), 5)
        with pytest.raises(ZeroDivisionError):
            list(results)


# ---- ends that are none


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_in_a_thread_leaves_the_whole_file(tmp_path, monkeypatch, code):
    file, meta = whole(tmp_path, 70)
    before, calls = file.partial.read_bytes(), iter(range(1000))

    def broken(*a: Any) -> bytes:
        if next(calls) == 3:
            raise OSError(code, os.strerror(code))
        return b"x"

    monkeypatch.setattr(writer, "create_compressed", partial(create_compressed, chunk_bytes=4096))
    monkeypatch.setattr(writer, "compress_chunk", broken)
    with pytest.raises(OSError, match=os.strerror(code)):
        file.compress(meta)
    assert file.partial.read_bytes() == before
    assert leftovers(tmp_path, file.partial.name) == []
    assert not left_threads()
    file.abort()


def test_a_source_that_ends_early_is_an_error(tmp_path):
    with h5py.File(tmp_path / "plain.h5", "w") as f:
        f.create_dataset("x", data=noise(50))
    with h5py.File(tmp_path / "plain.h5") as plain, new_file(tmp_path / "b.h5") as file:
        os.truncate(tmp_path / "plain.h5", 9000)
        with raises("file-ends-early"):
            list(compress_rows(plain["x"], create_compressed(file, "x", plain["x"].shape, plain["x"].dtype)))


def test_compression_stops_between_chunks(tmp_path, monkeypatch):
    file, meta = whole(tmp_path, 70)
    before, asked = file.partial.read_bytes(), list[int]()
    monkeypatch.setattr(writer, "create_compressed", partial(create_compressed, chunk_bytes=4096))

    def after_four() -> bool:
        asked.append(0)
        return len(asked) > 4

    with raises("stopped", OutputError, path=file.partial):
        file.compress(meta, stopped=after_four)
    assert len(asked) == 5
    assert file.partial.read_bytes() == before
    assert leftovers(tmp_path, file.partial.name) == []
    file.abort()


_NO_ROOM = """
import resource, sys
from pathlib import Path
sys.path[:0] = {tests!r}
from test_gzip import whole
from leakmel.core.errors import LeakmelError
from leakmel.dataset import writer
writer.require_space = lambda *a: None        # somebody else takes the room after it was asked for
file, meta = whole(Path({folder!r}), 300)
before = file.partial.read_bytes()
resource.setrlimit(resource.RLIMIT_FSIZE, (file.partial.stat().st_size, resource.RLIM_INFINITY))
try: file.compress(meta)
except LeakmelError as e: print(e)
assert file.partial.read_bytes() == before
"""


@pytest.mark.slow
def test_full_disk_at_the_compressed_file_is_an_error(tmp_path):
    "The HDF5 library would end the process at its exit; it never comes to that, because the room is reserved first."
    code = _NO_ROOM.format(
        tests=[str(Path(__file__).parent / name) for name in (".", "../helpers")], folder=str(tmp_path)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "EFBIG" in done.stdout
    assert leftovers(tmp_path) == [".a.h5.partial"]


_SLOW = """
import os, sys, time
from functools import partial
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])      # one thread packs
from leakmel.cli import main
from leakmel.dataset import writer
writer.create_compressed = partial(writer.create_compressed, chunk_bytes=1)
real, sent = writer.compress_chunk, sys.argv.pop(1)
def slow(*a):
    os.write(1, b".")
    until = time.monotonic() + 60
    while not os.path.exists(sent) and time.monotonic() < until: time.sleep(0.01)      # however late the signal is
    time.sleep(0.3)
    return real(*a)
writer.compress_chunk = slow
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_compression_leaves_a_resumable_state(tmp_path, make_wav, number):
    for k in range(40):
        make_wav(tmp_path / "data" / "LEAK" / f"s~{k:03d}~20240229_1200{k:02d}~3.wav", seed=k)
    (tmp_path / "out").mkdir()
    words = [
        "build",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "out" / "x.h5"),
        "--compression",
        "gzip",
        "--engine",
        "reference",
        "--quiet",
    ]
    sent = tmp_path / "sent"
    with subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(sent), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"."
        child.send_signal(number)
        sent.touch()
        rest, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert rest.count(b".") < 2 * writer._CHUNKS_PER_THREAD, "the rest was still compressed"
    assert leftovers(tmp_path / "out") == [".x.h5.journal", ".x.h5.partial"]
    config = lm.PipelineConfig(compression="gzip", monitor_interval_s=0.0)
    result = lm.build(
        tmp_path / "data", out=tmp_path / "out" / "x.h5", engine="reference", progress="none", pipeline=config
    )
    assert result.summary["resumed_rows"] == 40, "only packing is left to do"
    lm.build(tmp_path / "data", out=tmp_path / "y.h5", engine="reference", progress="none", pipeline=config)
    assert (tmp_path / "out" / "x.h5").read_bytes() == (tmp_path / "y.h5").read_bytes()
