"Compiled reading, digests, moments and row checks: bit-identical to Python, and no faulty file is read as a recording."

import ast
import ctypes
import errno
import importlib.abc
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import odd_wavs
import pytest
import xxhash
from each import each
from fuzzer import mutated
from hypothesis import given, settings
from hypothesis import strategies as st
from messy import write_messy

import leakmel as lm
from leakmel.core import machine_code
from leakmel.core.errors import MachineError, RecordingError, VerifyError
from leakmel.core.machine_code import BoundCall
from leakmel.dataset import job, loader, verify
from leakmel.dataset import modes as held
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.mel import cpu_engine
from leakmel.recordings import conform, native
from leakmel.recordings.conform import digests_of, int16_moments, moments_of
from leakmel.recordings.native import READ, USE_FALLBACK, read_and_compute, read_rows
from leakmel.recordings.wav import canonical_header, read_wav

ROOT = Path(__file__).resolve().parents[2]

N = 512
HEADER = canonical_header(4096, N)
QUIET: dict[str, Any] = {
    "progress": "none",
    "pipeline": PipelineConfig(files_per_batch=8, monitor_interval_s=0.0),
}


@pytest.fixture(autouse=True)
def clear_cached_availability():
    "Check the availability of compiled code again in every test."
    conform.native.cache_clear()
    yield
    conform.native.cache_clear()


def written(path: Path, x: np.ndarray, header: bytes = HEADER, more: bytes = b"") -> bytes:
    "A file and its path as bytes."
    path.write_bytes(header + x.tobytes() + more)
    return os.fsencode(path)


def noise(n_rows: int, n: int = N, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-32_768, 32_768, (n_rows, n)).astype(np.int16)


def mtimes(paths: list[bytes]) -> np.ndarray:
    return np.array([os.stat(p).st_mtime_ns if os.path.exists(p) else 0 for p in paths])


# ---- digests and moments


@settings(deadline=None, max_examples=200)
@given(n_rows=st.integers(0, 3), n_bytes=st.integers(1, 9000), seed=st.integers(0, 2**32 - 1))
def test_digests_are_those_of_xxhash(n_rows: int, n_bytes: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (n_rows, n_bytes), dtype=np.uint8)
    assert digests_of(rows).tolist() == [xxhash.xxh3_128_hexdigest(row.tobytes()).encode() for row in rows]


@each("n_bytes", [8, 240, 241, 248, 256, 1016, 1024, 1032, 1088, 2048, 81_920, 1 << 20])
def test_digests_at_block_boundaries(n_bytes: int) -> None:
    assert native.can_digest(n_bytes) == (n_bytes > 240 and n_bytes % 8 == 0)
    for fill in (0, 255):
        rows = np.full((2, n_bytes), fill, np.uint8)
        rows[1, -1] ^= 1
        assert digests_of(rows).tolist() == [
            xxhash.xxh3_128_hexdigest(row.tobytes()).encode() for row in rows
        ]


def test_digests_of_rows_of_any_shape() -> None:
    mels = np.random.default_rng(2).normal(size=(3, 5, 2, 64, 1)).astype(np.float16)
    assert digests_of(mels).tolist() == [xxhash.xxh3_128_hexdigest(row.tobytes()).encode() for row in mels]


@settings(deadline=None, max_examples=100)
@given(
    n=st.integers(1, 5000),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["noise", "low", "high", "quiet"]),
)
def test_moments_are_exact(n: int, seed: int, kind: str) -> None:
    x = {
        "noise": noise(2, n, seed),
        "low": np.full((2, n), -32_768, np.int16),
        "high": np.full((2, n), 32_767, np.int16),
        "quiet": noise(2, n, seed) // np.int16(3000),
    }[kind]
    assert np.array_equal(int16_moments(x), moments_of(x))


def test_moments_of_long_recordings_are_exact() -> None:
    "More samples than sums of 32 bits can take: they are added up in between."
    n = 3_000_000
    x = np.full((3, n), -32_768, np.int16)
    x[1, ::2], x[2] = 32_767, noise(1, n)[0]
    right = [
        [-32_768, -32_768, -32_768 * n, 32_768**2 * n, n],
        [-32_768, 32_767, -(n // 2), (32_768**2 + 32_767**2) * (n // 2), n],
    ]
    got = int16_moments(x)
    assert got[:2].tolist() == right
    assert np.array_equal(got, moments_of(x))


# ---- reading


def test_canonical_recordings_are_read_into_their_rows(tmp_path: Path) -> None:
    x = noise(5)
    paths = [written(tmp_path / f"{i} \u00e4\udcff.wav", row) for i, row in enumerate(x)]
    wanted = np.array([True, False, True, True, True])
    samples = np.full((5, N), 77, np.int16)
    outcomes, ctimes_ns, digests = read_rows(paths, wanted, mtimes(paths), HEADER, samples)
    assert outcomes.tolist() == [READ, USE_FALLBACK, READ, READ, READ]
    assert np.array_equal(samples[wanted], x[wanted])
    assert (samples[1] == 77).all(), "what was not asked for is left alone"
    assert ctimes_ns[wanted].tolist() == [
        os.stat(p).st_ctime_ns for p, w in zip(paths, wanted, strict=True) if w
    ]
    assert digests[wanted].tolist() == [
        xxhash.xxh3_128_hexdigest(row.tobytes()).encode() for row in x[wanted]
    ]


def odd_files(folder: Path) -> dict[str, bytes]:
    "Files that are not what they were listed as, by what is odd about each."
    x = noise(1)[0]
    made = {
        "one byte longer": written(folder / "long", x, more=b"\0"),
        "one byte shorter": written(folder / "short", x[:-1], more=b"\0"),
        "another rate": written(folder / "rate", x, canonical_header(4097, N)),
        "another count": written(folder / "count", x, canonical_header(4096, N - 1)),
        "no header": written(folder / "head", x, bytes(44)),
        "empty": written(folder / "empty", x[:0], b""),
        "header only": written(folder / "only", x[:0]),
    }
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "around").symlink_to("around")
    long = folder / ("n" * 300)
    return made | {
        "a folder": os.fsencode(folder / "folder"),
        "a pipe": os.fsencode(folder / "pipe"),
        "gone": os.fsencode(folder / "gone"),
        "a link to itself": os.fsencode(folder / "around"),
        "too long a name": os.fsencode(long),
        "below a file": made["no header"] + b"/x",
    }


def test_files_of_other_formats_are_not_read_as_recordings(tmp_path: Path) -> None:
    made = odd_files(tmp_path)
    made["modified since"] = written(tmp_path / "late", noise(1)[0])
    good = written(tmp_path / "good", noise(1)[0])
    paths = [*made.values(), good]
    times = mtimes([p if not os.path.islink(p) and len(os.path.basename(p)) < 200 else b"/" for p in paths])
    times[list(made).index("modified since")] += 1
    outcomes, _, _ = read_rows(
        paths, np.ones(len(paths), bool), times, HEADER, np.zeros((len(paths), N), np.int16)
    )
    found = dict(zip(made, outcomes.tolist()[:-1], strict=True))
    assert found.pop("gone") == errno.ENOENT
    assert found.pop("a link to itself") == errno.ELOOP
    assert found.pop("too long a name") == errno.ENAMETOOLONG
    assert found.pop("below a file") == errno.ENOTDIR
    assert found.pop("a folder") in (errno.EISDIR, USE_FALLBACK)
    assert found.pop("a pipe") in (errno.ESPIPE, USE_FALLBACK)
    assert set(found.values()) == {USE_FALLBACK}, found
    assert outcomes[-1] == READ, "and the next one is read all the same"


def read_files(folder: Path, contents: list[bytes], n: int) -> tuple[list[Path], np.ndarray, np.ndarray]:
    "Files, what compiled code says of each, and the rows of n samples that it read."
    files = [folder / f"{k}.wav" for k in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    samples, paths = np.zeros((len(files), n), np.int16), [os.fsencode(file) for file in files]
    sizes = np.array(list(map(len, contents)))
    given = np.ones(len(files), bool), mtimes(paths), canonical_header(4096, n), samples
    return files, read_rows(paths, *given, b"", sizes)[0], samples


def read_alike(file: Path, row: np.ndarray) -> bool:
    "Whether the reader in Python reads the same samples, with the format of the header."
    try:
        r = read_wav(file)
    except RecordingError:
        return False
    return (r.encoding, r.sample_rate, r.samples.shape) == ("pcm16", 4096, (len(row), 1)) and np.array_equal(
        r.samples[:, 0], row
    )


def test_chunks_around_the_samples_are_read_by_compiled_code(tmp_path: Path) -> None:
    made = {name: odd.content for name, odd in odd_wavs.READ.items()}
    made |= {name: odd.content for name, odd in odd_wavs.REFUSED.items()}
    files, outcomes, rows = read_files(tmp_path, list(made.values()), odd_wavs.N)
    read = {name for name, outcome in zip(made, outcomes, strict=True) if outcome == READ}
    for name, file, row in zip(made, files, rows, strict=True):
        if name in read:
            assert read_alike(file, row), name
    for name in odd_wavs.EXTRAS:
        assert {
            f"{name} {place}" for place in ("before the format", "before the samples", "behind the samples")
        } <= read
    others = ("format chunk of 18 bytes", "rubbish behind", "RIFF size 0", "wrong byte rate", "999 chunks")
    assert {"canonical", *others} <= read


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(k, marks=pytest.mark.long) for k in range(2, 12))])
def test_compiled_parser_accepts_nothing_that_is_read_otherwise(tmp_path: Path, seed: int) -> None:
    "Mutated headers: what compiled code reads is what the reader in Python reads."
    extras = [b"", *odd_wavs.EXTRAS.values()]
    originals = [odd_wavs.canonical() + odd_wavs.PCM16]
    originals += [
        odd_wavs.riff(a, odd_wavs.FMT, b, odd_wavs.DATA, c) for a in extras for b in extras for c in extras
    ]
    rng = random.Random(seed)
    contents = [mutated(rng, originals, 200) for _ in range(20_000)]
    files, outcomes, rows = read_files(tmp_path, contents, odd_wavs.N)
    accepted = np.flatnonzero(outcomes == READ)
    assert 0.1 < len(accepted) / len(files) < 0.9
    wrong = [contents[k].hex() for k in accepted if not read_alike(files[k], rows[k])]
    assert not wrong, wrong[0]


def test_arrays_of_other_lengths_are_refused_before_reading(tmp_path: Path) -> None:
    path = written(tmp_path / "good", noise(1)[0])
    given = [path] * 3, np.ones(3, bool), mtimes([path] * 3)
    with pytest.raises(ValueError, match="1 sizes"):
        read_rows(*given, HEADER, np.zeros((3, N), np.int16), b"", np.array([44 + 2 * N]))
    with pytest.raises(ValueError, match="20 of 44 bytes"):
        read_rows(*given, HEADER[:20], np.zeros((3, N), np.int16))


def test_a_file_that_has_grown_is_not_read_by_compiled_code(tmp_path: Path) -> None:
    content = odd_wavs.riff(odd_wavs.FMT, odd_wavs.DATA, odd_wavs.NOTE)
    (file,), outcomes, _ = read_files(tmp_path, [content], odd_wavs.N)
    assert outcomes.tolist() == [READ]
    path, st = os.fsencode(file), file.stat()
    file.write_bytes(content + odd_wavs.NOTE)
    os.utime(file, ns=(st.st_atime_ns, st.st_mtime_ns))
    given = (
        np.ones(1, bool),
        mtimes([path]),
        canonical_header(4096, odd_wavs.N),
        np.zeros((1, odd_wavs.N), np.int16),
    )
    assert read_rows([path], *given, b"", np.array([st.st_size]))[0].tolist() == [USE_FALLBACK]


def test_path_with_a_zero_byte_does_not_shift_other_paths(tmp_path: Path) -> None:
    good = [written(tmp_path / name, noise(1, seed=k)[0]) for k, name in enumerate("ab")]
    outcomes, _, _ = read_rows(
        [good[0], b"x\0" + good[0], good[1]],
        np.array([True, False, True]),
        mtimes([good[0], b"/", good[1]]),
        HEADER,
        samples := np.zeros((3, N), np.int16),
    )
    assert outcomes.tolist() == [READ, USE_FALLBACK, READ]
    assert np.array_equal(samples[2], noise(1, seed=1)[0])


def test_reading_closes_all_descriptors(tmp_path: Path) -> None:
    paths = [*odd_files(tmp_path).values(), written(tmp_path / "good", noise(1)[0])]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        read_rows(
            paths,
            np.ones(len(paths), bool),
            np.zeros(len(paths), np.int64),
            HEADER,
            np.zeros((len(paths), N), np.int16),
        )
    assert len(os.listdir("/proc/self/fd")) == before


def test_zero_rows() -> None:
    outcomes, ctimes_ns, digests = read_rows(
        [], np.zeros(0, bool), np.zeros(0, np.int64), HEADER, np.zeros((0, N), np.int16)
    )
    assert len(outcomes) == len(ctimes_ns) == len(digests) == 0


def test_reading_releases_the_interpreter_lock(tmp_path: Path) -> None:
    "Compiled reading holds no lock: another thread counts on meanwhile, unless another program has its core, which it has not in each of three tries."
    paths = [
        written(tmp_path / f"{k}", noise(1, 40_960)[0], canonical_header(4096, 40_960)) for k in range(64)
    ] * 20
    times, samples, count, over = (
        mtimes(paths),
        np.zeros((len(paths), 40_960), np.int16),
        [0],
        threading.Event(),
    )

    def look_on() -> None:
        while not over.is_set():
            count[0] += 1

    thread = threading.Thread(target=look_on)
    thread.start()
    counts = list[int]()
    try:
        while len(counts) < 3 and max(counts, default=0) <= 1000:
            before = count[0]
            outcomes, _, _ = read_rows(
                paths, np.ones(len(paths), bool), times, canonical_header(4096, 40_960), samples
            )
            counts.append(count[0] - before)
            assert (outcomes == READ).all()
    finally:
        over.set()
        thread.join()
    assert max(counts) > 1000, counts


# ---- rows computed while their recordings are read


def computed(
    engine: cpu_engine.CpuEngine, paths: list[bytes], times: np.ndarray, call: BoundCall
) -> tuple[Any, ...]:
    "Rows, and what `read_and_compute` returns."
    rows = np.zeros((len(paths), *engine.spec.row_shape), np.float16)
    header = canonical_header(4096, engine.spec.n_samples)
    return rows, *read_and_compute(paths, np.ones(len(paths), bool), times, header, call, rows)


def row_call(engine: cpu_engine.CpuEngine) -> BoundCall:
    call = engine.row_call()
    assert call is not None
    return call


@each("changes", [{}, {"preset": "disjoint"}, {"power": 1.0, "n_mels": 40, "n_fft": 256}])
def test_rows_are_the_same_when_they_are_computed_while_reading(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    spec = lm.MelSpec.preset(
        changes.get("preset", "overlap"), **{k: v for k, v in changes.items() if k != "preset"}
    )
    x, header = noise(5, spec.n_samples), canonical_header(4096, spec.n_samples)
    x[1], x[2] = 0, -32_768
    paths = [written(tmp_path / f"{k}.wav", row, header) for k, row in enumerate(x)]
    times, right = mtimes(paths), np.zeros((5, *spec.row_shape), np.float16)
    times[3] += 1  # modified since it was listed
    paths.append(os.fsencode(tmp_path / "gone.wav"))
    with cpu_engine.CpuEngine(spec) as engine:
        moments = engine.run(x, right)
        began_s = time.perf_counter()
        rows, outcomes, _, digests, found, seconds = computed(
            engine, paths, np.append(times, 0), row_call(engine)
        )
        took_s = time.perf_counter() - began_s
    good = [0, 1, 2, 4]
    assert outcomes.tolist() == [READ, READ, READ, USE_FALLBACK, READ, errno.ENOENT]
    assert np.array_equal(rows[good].view(np.uint16), right[good].view(np.uint16))
    assert not rows[[3, 5]].any()
    assert np.array_equal(found[good], moments[good])
    assert digests[good].tolist() == digests_of(x[good]).tolist()
    assert 0 < seconds < took_s


def test_short_recordings_are_computed_together() -> None:
    "One of them alone would leave lanes of the kernel empty."
    for duration_s, is_alone in ((0.5, False), (2, True)):
        with cpu_engine.CpuEngine(lm.MelSpec.preset("disjoint", duration_s=duration_s)) as engine:
            assert (engine.row_call() is not None) == is_alone


def test_rows_of_another_size_do_not_reach_machine_code() -> None:
    with cpu_engine.CpuEngine(lm.MelSpec()) as engine:
        call = row_call(engine)
        with pytest.raises(ValueError, match="values each"):
            read_and_compute(
                [b"x"], np.ones(1, bool), np.zeros(1, np.int64), HEADER, call, np.zeros((1, 7), np.float16)
            )


def test_a_computation_that_fails_leaves_its_recording_to_python(tmp_path: Path) -> None:
    spec = lm.MelSpec()
    header = canonical_header(4096, spec.n_samples)
    paths = [written(tmp_path / f"{k}.wav", row, header) for k, row in enumerate(noise(3, spec.n_samples))]
    statuses = iter([-2, 1, 0])
    fake = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
        lambda *_: next(statuses)
    )
    with cpu_engine.CpuEngine(spec) as engine:
        call = row_call(engine)
        call.places[0] = ctypes.cast(fake, ctypes.c_void_p).value or 0
        outcomes = computed(engine, paths, mtimes(paths), call)[1]
    assert outcomes.tolist() == [READ, USE_FALLBACK, READ]


@pytest.mark.slow
@pytest.mark.parametrize("waveforms", [False, True])
def test_a_build_is_the_same_when_rows_are_computed_after_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waveforms: bool
) -> None:
    "Of a folder with recordings of every kind: some batches are computed in two ways, some rows are float32."
    write_messy(tmp_path / "data")
    spec = {"sample_rate": 4096, "duration_s": 1.0, "short_hop": 128}
    with cpu_engine.CpuEngine(lm.MelSpec.preset("overlap", **spec)) as engine:
        row_call(engine)  # enough frames to be computed alone
    made = list[list[bytes]]()
    for how in ("while", "after"):
        if how == "after":
            monkeypatch.setattr(cpu_engine.CpuEngine, "row_call", lambda self: None)
        built = lm.build_all(
            tmp_path / "data",
            out_dir=tmp_path / how,
            spec=spec,
            engine="cpu",
            with_waveforms=waveforms,
            **QUIET,
        )
        computing = [s for s in built[0].timeline.spans if s.stage == "compute"]
        n = sum(s.n_files for s in computing)
        assert n == sum(r.found for r in built)
        assert 2 * 4096 * n <= sum(s.n_bytes for s in computing) <= 4 * 4096 * n  # int16 or float32
        made.append([r.path.read_bytes() for r in built])
    assert made[0] == made[1]


@pytest.mark.parametrize("n", [8192, 8194])
def test_recordings_are_computed_while_reading_if_their_digest_is_compiled_too(
    tmp_path: Path, make_wav, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    "A digest of samples that are not a multiple of 8 bytes needs the samples after reading."
    for k in range(9):
        make_wav(tmp_path / "data" / "A" / f"{k}.wav", n=n, seed=k)
    calls = list[int]()

    def counted(paths, *a):
        calls.append(len(paths))
        return read_and_compute(paths, *a)

    monkeypatch.setattr(
        loader, "native", lambda: SimpleNamespace(**vars(native) | {"read_and_compute": counted})
    )
    built = [
        lm.build(tmp_path / "data", out=tmp_path / f"{name}.h5", engine=engine, **QUIET)
        for name, engine in (("x", "cpu"), ("y", "reference"))
    ]
    assert sum(calls) == (9 if n == 8192 else 0)
    digests = [h5py.File(r.path)["files/digest"][:].tolist() for r in built]
    assert digests[0] == digests[1]


def test_without_stored_machine_code_the_reader_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu_engine, "kernel", lambda *arrays: None
    )  # like a function of numba, without an address
    with cpu_engine.CpuEngine(lm.MelSpec()) as engine:
        assert engine.row_call() is None


# ---- rows that were written


@each(("n_values", "n_rows"), [(124, 3), (128, 1), (132, 9), (5120, 60), (140_000, 2)])
def test_row_checks_equal_those_of_numpy(tmp_path: Path, n_values: int, n_rows: int) -> None:
    "Less, as much and more than a step; less and more than the buffer; every kind of number in the first and the last place."
    kinds = np.array([np.inf, -np.inf, np.nan, 65_504, -65_504, -0.0, 6e-8], np.float16)
    rows = np.random.default_rng(n_values).normal(size=(n_rows, n_values)).astype(np.float16)
    (tmp_path / "rows").write_bytes(bytes(11) + rows.tobytes())
    for k, (kind, place) in enumerate(
        (kind, place) for kind in kinds for place in (0, n_values - 1, n_values - n_values % 64 - 1)
    ):
        rows[k % n_rows, place] = kind
        with open(tmp_path / "rows", "r+b") as file:
            file.seek(11)
            file.write(rows.tobytes())
            file.flush()
            digests, largest = native.digest_file_rows(file.fileno(), 11, n_rows, 2 * n_values)
        assert digests.tolist() == [xxhash.xxh3_128_hexdigest(row.tobytes()).encode() for row in rows]
        assert np.array_equal(largest, (rows.view(np.uint16) & 0x7FFF).max(axis=1))
        assert np.array_equal(largest < 0x7C00, np.isfinite(rows).all(axis=1))


def test_row_checks_refuse_invalid_arrays(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(999))
    with open(tmp_path / "rows", "rb") as file:
        assert len(native.digest_file_rows(file.fileno(), 499, 2, 248)[0]) == 2
        assert len(native.digest_file_rows(file.fileno(), 0, 0, 248)[0]) == 0
        with pytest.raises(EOFError):
            native.digest_file_rows(file.fileno(), 504, 2, 248)
        with pytest.raises(EOFError):
            native.digest_file_rows(file.fileno(), 5000, 2, 248)
    with open(tmp_path / "rows", "ab") as file, pytest.raises(OSError, match="Bad file descriptor"):
        native.digest_file_rows(file.fileno(), 0, 2, 248)


@pytest.mark.slow
@each("damage", ["none", "bit", "infinite", "cut"])
def test_damage_is_detected_with_and_without_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_wav, damage: str
) -> None:
    for k in range(9):
        make_wav(tmp_path / "data" / "A" / f"{k}.wav", seed=k)
    path = lm.build(tmp_path / "data", out=tmp_path / "set.h5", **QUIET).path
    with h5py.File(path) as f:
        begin, row = f["segments_mel"].id.get_offset(), f["segments_mel"][0].nbytes
    data = bytearray(path.read_bytes())
    data[begin + 5 * row + 20] ^= damage == "bit"
    if damage == "infinite":
        data[begin + 5 * row + 20 : begin + 5 * row + 22] = b"\x00\xfc"
    path.write_bytes(data)

    def problems() -> list[str]:
        if damage != "cut":
            return lm.verify(path).problems
        with h5py.File(path) as f:
            rows = f["segments_mel"]
            os.truncate(path, begin + 8 * row + 2)
            read = verify._digest_reader(rows)
            assert len(read(0, 8)[0]) == 8
            try:
                read(0, 9)
            except VerifyError as e:
                return [e.code]
            finally:
                path.write_bytes(data)
        return []

    found = problems()
    monkeypatch.setattr(conform, "native", lambda: None)
    assert problems() == found
    wrong = "1 rows do not match their digest, first row 5"
    assert (
        found
        == {
            "none": [],
            "bit": [wrong],
            "infinite": ["values of row 5 are not finite", wrong],
            "cut": ["file-ends-early"],
        }[damage]
    )


# ---- builds with and without


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stream", "memmap"])
def test_build_without_compiled_code_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    write_messy(tmp_path / "data")

    def built(name: str) -> tuple[bytes, list]:
        monkeypatch.setenv(
            "LEAKMEL_CACHE_DIR", str(tmp_path / f"cache {name}")
        )  # nothing of the one is held for the other
        results = lm.build_all(
            tmp_path / "data",
            out_dir=tmp_path / name,
            mode=mode,
            spec={"sample_rate": 4096, "duration_s": 1.0},
            **QUIET,
        )
        return b"".join(r.path.read_bytes() for r in results), [
            x for r in results for x in r.rejected.to_numpy().tolist()
        ]

    compiled_bytes, compiled_rejected = built("with")
    for module in (loader, job, held):
        if hasattr(module, "native"):
            monkeypatch.setattr(module, "native", lambda: None)
        monkeypatch.setattr(
            module,
            "digests_of",
            lambda rows: np.array([xxhash.xxh3_128_hexdigest(r.tobytes()) for r in rows], "S32"),
        )
    assert built("without") == (compiled_bytes, compiled_rejected)
    assert len(compiled_rejected) > 5


def test_only_canonical_files_are_read_by_compiled_code(
    tmp_path: Path, make_wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    "And only what is not goes through Python."
    for k in range(10):
        make_wav(tmp_path / "data" / "A" / f"{k}.wav", seed=k)
    (tmp_path / "data" / "A" / "3.wav").write_bytes(canonical_header(4096, 4096)[:20])
    slow: list[int] = []
    real = loader.BatchReader.fill_row

    def fill_row(self, slot, i):
        slow.append(slot.first + i)
        real(self, slot, i)

    monkeypatch.setattr(loader.BatchReader, "fill_row", fill_row)
    r = lm.build(
        tmp_path / "data", out=tmp_path / "x.h5", spec={"duration_s": 1.0, "short": "reject"}, **QUIET
    )
    assert (r.rows, slow) == (9, [3])


@each("seconds", [0.5, 2])  # computed after reading, and while it goes on
@each("code", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ESTALE])
def test_a_fault_of_the_machine_rejects_no_recording(
    tmp_path: Path, make_wav, monkeypatch: pytest.MonkeyPatch, code: int, seconds: float
) -> None:
    for k in range(10):
        make_wav(tmp_path / "data" / "A" / f"{k}.wav", n=int(4096 * seconds), seed=k)
    name = "read_rows" if seconds < 1 else "read_and_compute"

    def broken(*a):
        outcomes, *others = getattr(native, name)(*a)
        outcomes[-1] = code
        return outcomes, *others

    monkeypatch.setattr(loader, "native", lambda: SimpleNamespace(**vars(native) | {name: broken}))
    with pytest.raises(MachineError, match=errno.errorcode[code]) as caught:
        lm.build(tmp_path / "data", out=tmp_path / "x.h5", **QUIET)
    assert str(tmp_path / "data") in str(caught.value)
    assert "no recording was rejected" in str(caught.value)
    assert not list(tmp_path.glob("*x.h5*"))


def test_descriptors_that_run_out(tmp_path: Path) -> None:
    "For real, in a process of its own."
    path = written(tmp_path / "good", noise(1)[0])
    code = (
        "import os, resource, sys, numpy as np; from leakmel.recordings.native import read_rows; from leakmel.recordings.wav import canonical_header\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1,) * 2)\n"
        f"print(read_rows([{path!r}], np.ones(1, bool), np.zeros(1, np.int64), canonical_header(4096, {N}), np.zeros((1, {N}), np.int16))[0][0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(errno.EMFILE), done.stderr


# ---- where it cannot be had


def test_everything_works_without_numba(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "leakmel.recordings.native", None)
    monkeypatch.delattr("leakmel.recordings.native", raising=False)
    with caplog.at_level(logging.WARNING, "leakmel"):
        x = noise(2)
        assert digests_of(x).tolist() == [xxhash.xxh3_128_hexdigest(row.tobytes()).encode() for row in x]
        assert np.array_equal(int16_moments(x), moments_of(x))
    assert caplog.text.count("without compiled code") == 1, "said once"


class _Damaged(importlib.abc.MetaPathFinder):
    "Simulates numba with a cache of empty files."

    def find_spec(self, fullname: str, *others: Any) -> None:
        if fullname == "leakmel.recordings.native":
            raise EOFError("Ran out of input")


def test_damaged_numba_cache_is_reported_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "leakmel.recordings.native")
    monkeypatch.delattr("leakmel.recordings.native")
    monkeypatch.setattr(sys, "meta_path", [_Damaged(), *sys.meta_path])
    with caplog.at_level(logging.WARNING, "leakmel"):
        assert conform.native() is None
    assert "EOFError: Ran out of input; if this happens again, remove the compiled code" in caplog.text


def test_disabled_numba_is_treated_as_missing() -> None:
    code = "from leakmel.recordings.conform import native; print(native())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
    )
    assert done.stdout.strip() == "None", "compiled reading without compiling cannot make system calls"
    assert "NUMBA_DISABLE_JIT" in done.stderr


@each("part", ["digest_rows", "int16_moments", "digest_file_rows: digests", "digest_file_rows: largest"])
def test_wrong_machine_code_is_detected_at_start(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    part, _, what = part.partition(": ")
    real = getattr(native, part)

    def wrong(*rows):
        out = real(*rows)
        changed = out[what == "largest"] if what else out
        changed[-1] = changed[0] - 1 if what == "largest" else changed[0]
        return out

    native.self_check()
    monkeypatch.setattr(native, part, wrong)
    with pytest.raises(ImportError, match="remove the compiled code"):
        native.self_check()


CHILD = """
import sys
import leakmel as lm
from leakmel.core import machine_code
if sys.argv[1] == "no place": machine_code.cache_folders = lambda: []
from leakmel.recordings.conform import native
r = lm.build(sys.argv[2], out=sys.argv[3], progress="none")
assert native() is not None
print(r.summary["engine"], r.rows)
"""


def built_by_a_child(data: Path, out: Path, cache: Path, kind: str = "") -> tuple[bytes, str]:
    "The data set that a process of its own makes with compiled code stored in a folder or nowhere, and what it said."
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")} | {
        "NUMBA_CACHE_DIR": str(cache),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, kind, str(data), str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.stdout.split() == ["cpu@2/cpu", "6"], done.stderr
    return out.read_bytes(), done.stderr


@pytest.fixture
def six(tmp_path: Path, make_wav) -> tuple[Path, bytes]:
    "A folder of six recordings, and their data set."
    for k in range(6):
        make_wav(tmp_path / "data" / "A" / f"{k}.wav", seed=k)
    return tmp_path / "data", lm.build(
        tmp_path / "data", out=tmp_path / "right.h5", engine="cpu", **QUIET
    ).path.read_bytes()


@pytest.mark.slow
def test_rows_are_the_same_where_compiled_code_cannot_be_stored(
    tmp_path: Path, six: tuple[Path, bytes]
) -> None:
    "No writable folder for compiled code: the same engine, and one warning."
    got, output = built_by_a_child(six[0], tmp_path / "x.h5", tmp_path / "cache", "no place")
    assert got == six[1]
    assert output.count("cannot be kept") == 1, output
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "n_bytes", [pytest.param(0, marks=pytest.mark.long), pytest.param(40, marks=pytest.mark.long), 1 << 14]
)
def test_damaged_object_files_are_made_again(tmp_path: Path, six: tuple[Path, bytes], n_bytes: int) -> None:
    "A full disk leaves files that are empty or end too early; a bit may flip: the same rows, and whole files again."
    (cache := tmp_path / "cache").mkdir()
    files = [
        Path(shutil.copy(code.path, cache))
        for code in (native.CODE, cpu_engine.CODE)
        if code.path is not None
    ]
    assert [p.name.split("-")[0] for p in files] == [
        "leakmel.recordings.native_code",
        "leakmel.mel.cpu_kernel",
    ]
    whole = [p.read_bytes() for p in files]
    files[0].write_bytes(whole[0][:n_bytes])
    files[1].write_bytes(whole[1][:-1] + bytes([whole[1][-1] ^ 1]))
    got, output = built_by_a_child(six[0], tmp_path / "x.h5", cache)
    assert got == six[1]
    assert "cannot be kept" not in output
    assert sorted(cache.glob("*")) == sorted(files), "no other file is left"
    for path in files:
        machine_code._read(path)  # the digest is that of the content


def stored(folder: Path, **changes: Any) -> Path:
    "An object file as `load_compiled` stores it, with some changes that its digest covers."
    assert native.CODE.path is not None
    head, _, body = native.CODE.path.read_bytes().partition(b"\n")
    about = json.loads(head) | changes
    path = folder / "x.o"
    machine_code._write(path, body, *(about[name] for name in ("functions", "constants", "needs")))
    machine_code._read(native.CODE.path)
    return path


def test_object_files_that_another_user_can_write_are_refused(tmp_path: Path) -> None:
    path = stored(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o644
    machine_code._read(path)
    (tmp_path / "link.o").symlink_to(path)
    with pytest.raises(OSError):
        machine_code._read(tmp_path / "link.o")
    path.chmod(0o666)
    with pytest.raises(ValueError, match="another user"):
        machine_code._read(path)


def test_object_files_of_another_system_are_refused(tmp_path: Path) -> None:
    "A call of a function that the C library lacks would end the process."
    with pytest.raises(ValueError, match="the C library lacks no_such_function"):
        machine_code._read(stored(tmp_path, needs=["no_such_function"]))
    about = {"hash_rows": {"symbol": "no_such_symbol", "arrays": []}}
    with pytest.raises(ValueError, match="the object lacks hash_rows"):
        machine_code._read(stored(tmp_path, functions=about))
    path = stored(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"symbol": "', b'"symbol": "x', 1))
    with pytest.raises(ValueError, match="digest"):
        machine_code._read(path)
    for cut in (0, 40, 1 << 14):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="digest"):
            machine_code._read(path)


@pytest.mark.parametrize("user", ["recordings/native", "mel/cpu_engine"])
def test_all_sources_of_machine_code_are_in_the_name_of_its_file(user: str) -> None:
    tree = ast.parse((ROOT / "leakmel" / f"{user}.py").read_text())
    calls = [
        c for c in ast.walk(tree) if isinstance(c, ast.Call) and getattr(c.func, "id", "") == "load_compiled"
    ]
    ((module, *others),) = [[ast.literal_eval(a) for a in c.args] for c in calls]
    source = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    package = module.rpartition(".")[0].split(".")
    used = set()
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            used.add(".".join([*base, node.module or ""]))
    assert {name for name in used if name.startswith("leakmel")} <= {*others, "leakmel.core.jit"}


def test_arrays_of_another_kind_do_not_reach_machine_code() -> None:
    hash_rows = native.CODE.functions["hash_rows"]
    rows, out = np.zeros((2, 400), np.uint8), np.zeros((2, 2), np.uint64)
    read_only = rows.copy()
    read_only.flags.writeable = False
    for wrong in (rows.astype(np.int8), rows[0], rows[:, ::2], read_only):
        with pytest.raises(TypeError, match="array 0 of hash_rows"):
            hash_rows(wrong, out)
    with pytest.raises(TypeError, match="takes 2 arrays"):
        hash_rows(rows)
    assert not out.any()
