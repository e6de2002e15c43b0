"Recordings on a disk: prefetching, cache use in the report of a build, and listing by compiled code."

import contextlib
import errno
import functools
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from each import each
from left_threads import left_threads
from messy import write_messy

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import LeakmelError, MachineError, UsageError
from leakmel.dataset import loader
from leakmel.dataset import modes as held
from leakmel.dataset.loader import BatchReader, ReadAhead, cold_share, plan_read_ahead
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.extras.machine.bench import evict, read_into_cache
from leakmel.mel.spec import MelSpec
from leakmel.recordings import conform, native, wav
from leakmel.recordings import listing as listing_module
from leakmel.recordings.listing import Listing
from leakmel.recordings.manifest import Manifest, scan
from leakmel.recordings.naming import Naming
from leakmel.recordings.wav import CacheUse, cached_share, is_in_cache, thread_read_bytes

QUIET: dict[str, Any] = {"engine": "reference", "check": 2, "progress": "none", "fresh": True}
N_FILES, N_SAMPLES = 48, 20_480  # five seconds: ten pages each
SPEC = {"sample_rate": 4096, "duration_s": 5.0}  # given: the headers are not read before the build


def waves(root: Path) -> list[Path]:
    "All recordings below a root."
    return sorted(root.rglob("*.wav"))


@pytest.fixture
def data(tmp_path: Path, make_wav: Callable) -> Path:
    "A folder of splits: 48 recordings and 16, in memory."
    root = tmp_path / "data"
    for k in range(N_FILES):
        make_wav(root / "TRAINING" / ("LEAK", "NOLEAK")[k % 2] / f"{k:02}.wav", n=N_SAMPLES, seed=k)
    for k in range(16):
        make_wav(root / "VALIDATION" / ("LEAK", "NOLEAK")[k % 2] / f"{k:02}.wav", n=N_SAMPLES, seed=100 + k)
    return root


def drop(paths: Iterable[Path]) -> None:
    "Drop files from the page cache; skips the test where this file system cannot, or does not tell."
    paths = list(paths)
    with open(paths[-1], "rb") as f:
        told = is_in_cache(f.fileno(), 0)
    if told is None:
        pytest.skip("this file system does not tell what is in memory")
    if evict(paths):
        pytest.skip("this file system cannot drop a file from memory")
    for path in paths:
        with open(path, "rb") as f:
            assert cached_share(f.fileno()) == 0.0


def undisturbed(test: Callable[..., None]) -> Callable[..., None]:
    "Try a test up to three times: at any time, other processes can make the kernel drop pages of its files."

    @functools.wraps(test)
    def trials(*args: Any, **settings: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(AssertionError):
                return test(*args, **settings)
        return test(*args, **settings)

    return trials


def reader_of(root: Path, split: str = "training") -> BatchReader:
    "A reader of a split."
    return BatchReader(scan(root, split=split).listings[0], MelSpec.preset("disjoint", duration_s=5.0))


def built(
    root: Path, out: Path, *, split: str | None = "training", mode: str = "stream", **settings: Any
) -> Any:
    "A build by the reference, in small batches."
    config = PipelineConfig(
        files_per_batch=4,
        fsync=False,
        monitor_interval_s=0.0,
        cache_dir=str(out.parent / "cache"),
        **settings,
    )
    return lm.build(root, split=split, out=out, mode=mode, pipeline=config, spec=SPEC, **QUIET)


# ---- the look at the page cache


@undisturbed
def test_probe_counts_pages_missing_from_the_page_cache(data: Path) -> None:
    reader = reader_of(data)
    paths = waves(data / "TRAINING")
    drop(paths)
    assert cold_share(reader.listing, CacheUse()) == 1.0
    read_into_cache(paths)
    assert cold_share(reader.listing, reader.cache_use) == 0.0
    assert reader.cache_use.tells
    drop(paths[: len(paths) // 2])
    assert cold_share(reader.listing, CacheUse()) == 0.5


@undisturbed
def test_the_probe_looks_at_the_end_of_files(data: Path) -> None:
    "A program that looked at headers leaves the first page of each file in memory, and no more."
    paths = waves(data / "TRAINING")
    drop(paths)
    for path in paths:
        with open(path, "rb", buffering=0) as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            f.read(44)
            assert is_in_cache(f.fileno(), 0)
    assert (cold_share(reader_of(data).listing, CacheUse()) or 0) > 0.9


def test_the_probe_is_short_and_looks_at_a_few_files_of_all_splits(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bytes] = []
    monkeypatch.setattr(loader, "_is_cached", lambda path, size: looked.append(path))
    monkeypatch.setattr(loader, "PROBES", 16)
    assert not plan_read_ahead([reader_of(data), reader_of(data, "validation")], None).readers
    assert len(looked) == len(set(looked)) == 16
    splits = [path.split(b"/")[-3] for path in looked]
    assert (splits.count(b"TRAINING"), splits.count(b"VALIDATION")) == (12, 4), "by their sizes"


def test_probe_ignores_missing_and_locked_files(data: Path) -> None:
    reader = reader_of(data)
    for path in waves(data / "TRAINING"):
        path.unlink()
    assert cold_share(reader.listing, reader.cache_use) is None
    assert not plan_read_ahead([reader], None).readers


def test_signal_during_the_probe_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def mincore(self, *args: object) -> int:
            raise KeyboardInterrupt

    (tmp_path / "file").write_bytes(b"x" * 10_000)
    monkeypatch.setattr(wav.ctypes, "CDLL", lambda name: Interrupted())
    with open(tmp_path / "file", "rb") as f, pytest.raises(KeyboardInterrupt):
        cached_share(f.fileno())


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EIO])
def test_no_prefetch_on_a_file_system_without_page_information(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    "Nothing is fetched ahead unasked, and the build does not call itself warm."
    real = os.preadv

    def refuse(fd: int, buffers: list, offset: int, *flags: int) -> int:
        if flags:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    summary = built(data, tmp_path / "x.h5").summary
    assert (summary["cache"], summary["bytes_from_device"], summary["read_ahead_files"]) == (
        "unknown",
        None,
        0,
    )
    assert summary["bytes_asked"] == summary["source_bytes"]


# ---- what is fetched ahead


class RecordingAdvice:
    "Simulated system call: records the requests and checks the window."

    def __init__(self, ahead: ReadAhead):
        self.ahead, self.most_files = ahead, 0
        self.paths: list[bytes] = []
        self.sizes: list[int] = []

    def __call__(self, paths: list[bytes], sizes: np.ndarray) -> int:
        assert len(paths) == len(sizes)
        self.paths += paths
        self.sizes += sizes.tolist()
        self.most_files = max(self.most_files, len(self.paths) - self.ahead._taken)
        return len(paths)


def started(ahead: ReadAhead, monkeypatch: pytest.MonkeyPatch) -> tuple[RecordingAdvice, threading.Thread]:
    "The thread of a read-ahead with simulated system calls."
    asked = RecordingAdvice(ahead)
    monkeypatch.setattr(native, "prefetch_files", asked)
    thread = threading.Thread(target=ahead.run, args=("read-ahead",), daemon=True)
    thread.start()
    return asked, thread


def settle(asked: RecordingAdvice, n_files: int) -> int:
    "Wait until so many files are asked for, and a little longer; returns how many were."
    until = time.monotonic() + 60
    while len(asked.paths) < n_files and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(0.03)
    return len(asked.paths)


@each("window", [1, 3, 8, 32])
def test_prefetch_window_is_bounded_and_complete(
    data: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    readers = [reader_of(data), reader_of(data, "validation")]
    ahead = ReadAhead(readers, window)
    asked, thread = started(ahead, monkeypatch)
    assert settle(asked, window) == window
    for n in range(4, N_FILES + 17, 4):
        ahead.take(4)
        most = min(n + window, N_FILES + 16)
        if window > 4:
            assert (
                most - window // 4 < settle(asked, most - window // 4 + 1) <= most
            )  # a quarter of the window at a time
    thread.join(60)
    assert not thread.is_alive()
    assert asked.most_files <= window
    every = [r.base + path for r in readers for path in r.listing.paths]
    if window > 4:
        assert asked.paths == every, "in their order, over both splits"
    assert set(asked.paths) <= set(every)
    assert len(set(asked.paths)) == len(asked.paths)


def reader_of_missing_files(sizes: list[int], label_ids: list[int] | None = None) -> BatchReader:
    "A reader of files that are not there."
    n = len(sizes)
    x = Listing(
        "",
        Path("/nowhere"),
        [f"LEAK/{i:04}.wav".encode() for i in range(n)],
        np.array(sizes, np.int64),
        np.zeros(n, np.int64),
        np.array(label_ids or [0] * n, np.int16),
        Naming(),
    )
    return BatchReader(x, MelSpec.preset("disjoint"))


def test_prefetch_window_is_bounded_in_bytes_and_skips_large_files(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = ReadAhead([reader_of_missing_files([100] * 10 + [5000] + [100] * 10)], files=512, n_bytes=800)
    asked, thread = started(ahead, monkeypatch)
    assert settle(asked, 8) == 8
    ahead.take(4)
    assert settle(asked, 12) == 12, "ten before the large file, which takes no room, and two behind it"
    assert asked.paths[-1].endswith(b"0012.wav")
    ahead.take(17)
    thread.join(60)
    assert not thread.is_alive()
    assert 5000 not in asked.sizes


def test_only_files_to_be_read_are_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = ReadAhead(
        [
            reader_of_missing_files([100, 0, -1, 100, 100], [0, 0, 0, -1, 0]),
            reader_of_missing_files([]),
            reader_of_missing_files([7]),
        ]
    )
    asked, thread = started(ahead, monkeypatch)
    settle(asked, 3)
    ahead.stop()
    thread.join(60)
    assert asked.sizes == [100, 100, 7]


def test_prefetch_skips_files_already_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = ReadAhead([reader_of(data)], files=8)
    ahead.take(40)
    asked, thread = started(ahead, monkeypatch)
    assert settle(asked, 8) == 8
    assert asked.paths[0].endswith(
        b"33.wav"
    )  # LEAK has the 24 even numbers: the 41st path is the 17th odd one
    ahead.take(8)
    thread.join(60)
    assert not thread.is_alive()


def test_waiting_prefetch_thread_ends_when_stopped(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = ReadAhead([reader_of(data)], files=2)
    asked, thread = started(ahead, monkeypatch)
    settle(asked, 2)
    assert thread.is_alive()
    ahead.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_prefetch_loads_files_into_the_page_cache_and_counts_bytes(data: Path) -> None:
    drop(waves(data / "TRAINING"))
    reader = reader_of(data)
    ahead = ReadAhead([reader], files=N_FILES)
    thread = threading.Thread(target=ahead.run, args=("read-ahead",))
    thread.start()
    until = time.monotonic() + 60
    while reader.cache_use.n_ahead < N_FILES and time.monotonic() < until:
        time.sleep(0.01)
    ahead.stop()
    thread.join(60)
    assert reader.cache_use.n_ahead == N_FILES
    assert reader.cache_use.delivered >= 0.9 * reader.listing.n_bytes
    while cold_share(reader.listing, CacheUse()) != 0.0 and time.monotonic() < until:
        time.sleep(0.01)  # on their way
    assert cold_share(reader.listing, CacheUse()) == 0.0


# ---- builds


@pytest.mark.slow
@undisturbed
def test_rows_do_not_depend_on_prefetch(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "Cold and warm, with any window and without, in every mode."
    real, n_wanted, until = BatchReader.fill, 0, time.monotonic() + 60

    def slow(
        self: BatchReader, slot: Any
    ) -> int:  # what reads ahead has its time, whatever else the machine does
        while self.cache_use.n_ahead < n_wanted and time.monotonic() < until:
            time.sleep(0.002)
        return real(self, slot)

    monkeypatch.setattr(BatchReader, "fill", slow)
    right = built(data, tmp_path / "x.h5", read_ahead=0)
    assert right.summary["read_ahead_files"] == 0
    for window in (None, 1, 6, 1000):
        drop(waves(data))
        n_wanted = N_FILES // 2 + 1 if window in (None, 1000) else 0
        result = built(data, tmp_path / "y.h5", read_ahead=window)
        assert result.path.read_bytes() == right.path.read_bytes()
        assert result.summary["cache"] == "cold"
        if window in (None, 1000):
            assert result.summary["read_ahead_files"] > N_FILES // 2
    monkeypatch.setattr(held, "LOAD_FILES", 4)
    n_wanted = 1
    for mode in ("preload", "memmap"):
        drop(waves(data))
        result = built(data, tmp_path / "y.h5", mode=mode, read_workers=1)
        assert result.path.read_bytes() == right.path.read_bytes()
        assert (result.summary["cache"], result.summary["bytes_asked"]) == (
            "cold",
            result.summary["source_bytes"],
        )
        assert result.summary["read_ahead_files"] > 0


@pytest.mark.slow
@undisturbed
def test_build_reports_a_cold_warm_or_mixed_cache(data: Path, tmp_path: Path) -> None:
    drop(waves(data))
    cold = built(data, tmp_path / "x.h5").summary
    assert cold["cache"] == "cold"
    assert cold["bytes_asked"] == cold["source_bytes"] == N_FILES * (44 + 2 * N_SAMPLES)
    assert 0.9 * cold["bytes_asked"] <= cold["bytes_from_device"] <= 1.5 * cold["bytes_asked"], "whole pages"
    warm = built(data, tmp_path / "x.h5").summary
    assert (warm["cache"], warm["bytes_from_device"], warm["read_ahead_files"]) == ("warm", 0, 0)
    drop(waves(data / "TRAINING" / "LEAK"))
    mixed = built(data, tmp_path / "x.h5").summary
    assert mixed["cache"] == "mixed"
    assert mixed["bytes_from_device"] == pytest.approx(0.5 * cold["bytes_from_device"], rel=0.1)


@undisturbed
def test_cache_use_is_counted_for_each_split(data: Path, tmp_path: Path) -> None:
    drop(waves(data / "VALIDATION"))
    config = PipelineConfig(files_per_batch=4, fsync=False, read_ahead=16)
    results = lm.build_all(data, out_dir=tmp_path / "out", pipeline=config, mode="stream", spec=SPEC, **QUIET)
    assert [(r.split, r.summary["cache"]) for r in results] == [("TRAINING", "warm"), ("VALIDATION", "cold")]
    assert results[1].summary["bytes_from_device"] >= 0.9 * results[1].summary["source_bytes"]


@pytest.mark.slow
@undisturbed
def test_preloaded_recordings_count_the_bytes_of_this_build(data: Path, tmp_path: Path) -> None:
    "A cache file that is loaded is what is asked for; what memory holds is asked of no file."
    built(data, tmp_path / "x.h5", mode="memmap")
    [cache] = (tmp_path / "cache").glob("*.samples")
    warm = built(data, tmp_path / "x.h5", mode="memmap").summary
    assert (warm["cache"], warm["bytes_asked"]) == ("warm", N_FILES * 2 * N_SAMPLES)
    drop([cache])
    assert built(data, tmp_path / "x.h5", mode="memmap").summary["cache"] in (
        "cold",
        "mixed",
    )  # its facts are read before its rows
    with lm.preload(data, split="training", progress="none") as ready:
        again = lm.build(data, split="training", out=tmp_path / "x.h5", preloaded=ready, **QUIET).summary
    assert (again["cache"], again["bytes_asked"], again["bytes_from_device"]) == ("warm", 0, 0)


@each(
    ("share", "word"),
    [(0.0, "warm"), (0.009, "warm"), (0.011, "mixed"), (0.89, "mixed"), (0.91, "cold"), (1.05, "cold")],
)
def test_limits_of_cold_mixed_and_warm(share: float, word: str) -> None:
    cache_use = CacheUse()
    cache_use.ask(100_000)
    cache_use.delivered, cache_use.tells = round(100_000 * share), True
    assert cache_use.cache == word


@undisturbed
def test_cache_is_unknown_when_no_byte_was_counted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Files were seen to be missing from memory, and no byte was counted for them."
    monkeypatch.setattr(wav, "thread_read_bytes", lambda: 4096)
    drop(waves(data))
    summary = built(data, tmp_path / "x.h5").summary
    assert (summary["cache"], summary["bytes_from_device"]) == ("unknown", None)
    summary = built(data, tmp_path / "x.h5").summary
    assert (summary["cache"], summary["bytes_from_device"]) == ("warm", 0)


@pytest.mark.slow
@undisturbed
def test_bytes_read_again_are_counted_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "By the build that reads it, where a cache file cannot be read or recordings held are outdated."
    right = built(data, tmp_path / "x.h5", mode="memmap")
    n_bytes = right.summary["source_bytes"]

    def fail(fd: int, out: np.ndarray, offset: int) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(held, "read_at", fail)
        drop(waves(data))
        again = built(data, tmp_path / "y.h5", mode="memmap")
    assert again.path.read_bytes() == right.path.read_bytes()
    assert (again.summary["cache"], again.summary["bytes_asked"]) == ("cold", n_bytes)
    assert 0.9 * n_bytes <= again.summary["bytes_from_device"] <= 1.5 * n_bytes
    with lm.preload(data, split="training", progress="none") as ready:
        for path in waves(data):
            path.chmod(0o600)  # another time of change
        drop(waves(data))
        config = PipelineConfig(files_per_batch=4, fsync=False, monitor_interval_s=0.0)
        again = lm.build(
            data, split="training", out=tmp_path / "y.h5", preloaded=ready, pipeline=config, **QUIET
        )
    assert (again.summary["cache"], again.summary["bytes_asked"]) == ("cold", n_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(held, "read_at", fail)
        for path in (tmp_path / "cache").iterdir():
            path.unlink()
        new = built(data, tmp_path / "y.h5", mode="memmap").summary
    assert new["bytes_asked"] == 2 * n_bytes, "once to hold them, and once again"


@undisturbed
def test_only_bytes_of_the_own_thread_are_counted(data: Path) -> None:
    paths, cache_use = waves(data), CacheUse()
    drop(paths)
    other = threading.Thread(target=read_into_cache, args=(paths[:32],))
    before = thread_read_bytes()
    with cache_use.delivering():
        other.start()
        other.join()
    assert cache_use.delivered == 0
    assert (thread_read_bytes() or 0) == before
    with cache_use.delivering():
        for path in paths[32:]:
            path.read_bytes()
    assert (
        cache_use.delivered
        == (thread_read_bytes() or 0) - (before or 0)
        >= 0.9 * sum(p.stat().st_size for p in paths[32:])
    )


@undisturbed
def test_command_line_reports_cache_use(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    drop(waves(data))
    words = [
        "build",
        str(data),
        "--split",
        "training",
        "--engine",
        "reference",
        "--check",
        "2",
        "--quiet",
        "--no-fsync",
        "--fresh",
        "--full",
        *("--sample-rate", "4096", "--duration-s", "5"),
        "--out",
        str(tmp_path / "x.h5"),
    ]
    assert main(words) == 0
    assert "page cache cold: 2.0 MB requested" in capsys.readouterr().out
    assert main([*words, "--read-ahead", "0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "page cache warm: 2.0 MB requested, 0 bytes read from the device" in said


def test_invalid_prefetch_setting_is_refused() -> None:
    with pytest.raises(UsageError, match="read_ahead") as caught:
        PipelineConfig(read_ahead=-1)
    assert caught.value.code == "out-of-range"


# ---- what goes wrong


def no_thread_is_left() -> bool:
    return not left_threads()


@pytest.mark.slow
@each("mode", ["stream", "preload"])
@each("fault", [OSError(errno.EMFILE, "no"), ImportError("no numba"), RuntimeError("no")])
def test_prefetch_fault_does_not_stop_the_build(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, fault: Exception
) -> None:
    def fail(paths: list[bytes], sizes: np.ndarray) -> int:
        raise fault

    monkeypatch.setattr(native, "prefetch_files", fail)
    result = built(data, tmp_path / "x.h5", mode=mode, read_ahead=8)
    assert result.rows == N_FILES
    assert result.summary["read_ahead_files"] == 0
    assert no_thread_is_left()


@each("mode", ["stream", "preload"])
@each("error", [LeakmelError("a fault in a reader"), KeyboardInterrupt()])
def test_error_of_the_build_stops_prefetch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, error: BaseException
) -> None:
    "It waits for room in its window at that moment."
    real = BatchReader.fill

    def fill(self: BatchReader, slot: Any) -> int:
        if slot.first >= 8:
            raise error
        return real(self, slot)

    monkeypatch.setattr(BatchReader, "fill", fill)
    monkeypatch.setattr(held, "LOAD_FILES", 4)
    with pytest.raises(type(error)):
        built(data, tmp_path / "x.h5", mode=mode, read_ahead=4)
    assert no_thread_is_left()


def test_interrupt_stops_prefetch(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(lanes: Any, finished: threading.Event, watch: Callable[[], None]) -> None:
        class Waits(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                raise KeyboardInterrupt

        real(lanes, Waits(), watch)

    from leakmel.dataset import targets

    real = targets.run_threads
    monkeypatch.setattr(targets, "run_threads", interrupt)
    with pytest.raises(KeyboardInterrupt):
        built(data, tmp_path / "x.h5", read_ahead=4)
    assert no_thread_is_left()


def test_file_that_replaced_a_recording_does_not_block_prefetch(tmp_path: Path) -> None:
    pipe, gone, folder = (os.fsencode(tmp_path / name) for name in ("pipe.wav", "gone.wav", "folder.wav"))
    os.mkfifo(pipe)
    os.mkdir(folder)
    before = len(os.listdir("/proc/self/fd"))
    assert native.prefetch_files([pipe, gone, folder, b"/" * 5000, b""], np.full(5, 100)) <= 1
    assert len(os.listdir("/proc/self/fd")) == before
    assert native.prefetch_files([], np.zeros(0)) == 0


def test_a_small_folder_or_a_scan_alone_imports_no_compiler(data: Path) -> None:
    import subprocess

    code = f"import sys; from leakmel.recordings.manifest import scan; scan({os.fspath(data)!r}); assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- listing by compiled code


def seen(m: Manifest) -> list:
    "All of what a listing says."
    return [
        (x.split, x.paths, x.sizes.tolist(), x.mtimes_ns.tolist(), x.label_ids.tolist()) for x in m.listings
    ] + [m.label_names, m.notes]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    "Everything that a walk can meet."
    write_messy(tmp_path / "tree")
    folder = tmp_path / "tree" / "validation" / "LEAK"
    (tmp_path / "out of it.wav").write_bytes(b"x")
    for name, to in (
        ("out.wav", tmp_path / "out of it.wav"),
        ("round.wav", "round.wav"),
        ("nowhere.wav", "nothing"),
        ("up.wav", ".."),
        ("deep", "../NOLEAK"),
    ):
        (folder / name).symlink_to(to)
    os.mkfifo(folder / "fifo.wav")
    (folder / "folder.wav").mkdir()
    (folder / "folder.wav" / "in it.wav").write_bytes(b"x")
    (folder / "old.wav").write_bytes(bytes(5))
    os.utime(folder / "old.wav", ns=(-1_500_000_001, -1_500_000_001))
    os.utime(folder / "folder.wav" / "in it.wav", ns=(1, 2**62))
    with open(os.path.join(os.fsencode(folder), b"caf\xe9 \n.wav"), "wb") as f:
        f.write(b"x")
    with open(folder / "large.wav", "wb") as f:
        f.truncate(5 << 30)
    return tmp_path / "tree"


def counting() -> tuple[list[int], Callable]:
    "The numbers of files of each call of the compiled function, and that function."
    calls: list[int] = []
    real = native.stat_files

    def stat_files(paths: list[bytes], folder: int) -> np.ndarray:
        calls.append(len(paths))
        return real(paths, folder)

    return calls, stat_files


@pytest.mark.parametrize("n_at_most", [2, 4000])  # entries that are examined together
def test_compiled_and_python_listing_are_equal(
    tree: Path, monkeypatch: pytest.MonkeyPatch, n_at_most: int
) -> None:
    monkeypatch.setitem(sys.modules, "leakmel.recordings.native", None)
    right = seen(scan(tree))
    monkeypatch.undo()
    calls, stat_files = counting()
    monkeypatch.setattr(listing_module, "_MIN_BATCH", 0)
    monkeypatch.setattr(listing_module, "_MAX_BATCH", n_at_most)
    monkeypatch.setattr(native, "stat_files", stat_files)
    assert seen(scan(tree)) == right
    counts = list[int]()
    found, _ = listing_module.found_below(tree, tree, counts.append)
    assert sum(counts) == len(found), "each recording is reported once"
    assert sum(calls) >= 0.9 * sum(len(x[1]) for x in right[:3]), "nearly all were looked at together"


def test_file_that_changes_during_listing_is_examined_again(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "A file that goes, or becomes something else, between the folder's entry and the look at it."
    right = seen(scan(tree))
    real = native.stat_files

    def stat_files(paths: list[bytes], folder: int) -> np.ndarray:
        out = real(paths, folder)
        out[::3, 0] = 0
        out[1::3, 0] = stat.S_IFIFO
        return out

    monkeypatch.setattr(listing_module, "_MIN_BATCH", 0)
    monkeypatch.setattr(native, "stat_files", stat_files)
    assert seen(scan(tree)) == right


def linked(folder: Path) -> Path:
    "Recordings, links to recordings, and a second folder."
    for name in ("a", "z"):
        (folder / name).mkdir(parents=True)
    for i in range(9):
        (folder / "z" / f"{i}.wav").touch()
        (folder / "a" / f"{i}.wav").touch()
        (folder / "a" / f"link {i}.wav").symlink_to(f"../z/{i}.wav")
    return folder


def test_folder_that_is_renamed_while_it_is_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Its links are examined by their paths, after the folder was found to be the same."
    root, same, examined = linked(tmp_path / "root"), os.path.samestat, list[int]()

    def samestat(here: os.stat_result, there: os.stat_result) -> bool:
        examined.append(here.st_ino)
        outcome = same(here, there)
        if examined.count(here.st_ino) == 1 and here.st_ino == inode:
            (root / "a").rename(root / "b")
        return outcome

    inode = (root / "a").stat().st_ino
    monkeypatch.setattr(listing_module, "_MIN_BATCH", 0)
    assert len(listing_module.found_below(root, root)[0]) == 27
    monkeypatch.setattr(os.path, "samestat", samestat)
    with pytest.raises(LeakmelError, match=r"cannot be listed|while listing"):
        listing_module.found_below(root, root)


@pytest.mark.parametrize("fault", ["no thread", "interrupt"])
def test_listing_that_fails_closes_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    root, n_open = linked(tmp_path / "root"), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(listing_module, "_MIN_BATCH", 0)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def interrupt(n: int) -> None:
        raise KeyboardInterrupt

    if fault == "no thread":
        monkeypatch.setattr(native, "_FILES_PER_THREAD", 1)
        monkeypatch.setattr(native, "usable_cores", lambda: 2)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(MachineError, match="raise the limit"):
            listing_module.found_below(root, root)
    else:
        with pytest.raises(KeyboardInterrupt):
            listing_module.found_below(root, root, interrupt)
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_listing_works_without_compiled_code(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = seen(scan(tree))
    monkeypatch.setattr(listing_module, "_MIN_BATCH", 0)
    monkeypatch.setitem(sys.modules, "leakmel.recordings.native", None)
    assert seen(scan(tree)) == right


def test_compiled_code_is_loaded_for_many_recordings(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = seen(scan(tree))
    calls, stat_files = counting()
    monkeypatch.setattr(listing_module, "_MIN_BATCH", 0)
    monkeypatch.setattr(conform, "native", lambda: SimpleNamespace(stat_files=stat_files))
    monkeypatch.delitem(sys.modules, "leakmel.recordings.native")  # as before anything was built
    assert seen(scan(tree)) == right
    assert not calls
    monkeypatch.setattr(listing_module, "_MANY", 1)
    assert seen(scan(tree)) == right
    assert calls


def test_wrong_machine_code_is_detected_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**native._FUNCTIONS, "stat_files": lambda folder, paths, starts, words, out: out.fill(7)}
    monkeypatch.setattr(native, "_FUNCTIONS", wrong)
    with pytest.raises(ImportError, match="remove the compiled code"):
        native.self_check()
