"The compiled engine: every FFT length, no byte beyond its arrays, no lock held, no stale code, and what it cannot do is said."

import ctypes
import json
import logging
import mmap
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from each import each
from errors import raises
from test_mel import GEOMETRIES, PRESETS, features, signals

import leakmel
from leakmel.cli import main
from leakmel.core.errors import EngineError
from leakmel.mel import cpu_engine
from leakmel.mel.cpu_engine import RADICES, CpuEngine
from leakmel.mel.engines import check_recording, open_engine
from leakmel.mel.spec import MelSpec, bounds_of, compare, half_step, reference_features

LENGTHS = [2 * n for n in RADICES]


def of_length(n: int, preset: str) -> MelSpec:
    "A spec with an FFT of this length and as many bands as its bins can fill, up to 128."
    for n_mels in (128, 64, 32, 16, 8, 4):
        try:
            return MelSpec.preset(
                preset,
                duration_s=max(2.5, n / 1024),
                n_fft=n,
                hop_length=n // 4,
                short_window=n,
                short_hop=n // 2,
                long_window=2 * n,
                long_hop=n,
                n_mels=n_mels,
            )
        except leakmel.LeakmelError:
            continue
    raise AssertionError("no number of bands fits")


# -- right ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_fft", "preset"),
    [
        pytest.param(n, preset, marks=pytest.mark.long if n > 8192 and preset != "overlap@2" else [])
        for n in LENGTHS
        for preset in PRESETS
    ],
)
def test_every_fft_length_equals_reference_and_torch(n_fft: int, preset: str) -> None:
    "In the upper 90 dB of a frame the two engines differ by the rounding of float16 at the most; below, both lie within float32's limits."
    spec = of_length(n_fft, preset)
    batch = np.stack(list(signals(spec).values()))
    with open_engine("cpu", spec) as ours, open_engine("torch", spec, device="cpu") as theirs:
        got, other = features(ours, batch), features(theirs, batch)
    for name, mine, torchs, x in zip(signals(spec), got, other, batch, strict=True):
        right = reference_features(x, spec)
        verdict = compare(mine, right, spec)
        assert verdict.ok, f"{name}: {verdict}"
        bounds = bounds_of(right, spec)
        apart = np.abs(mine.astype(np.float64) - torchs)
        assert (apart <= 2 * half_step(right.db) + 0.02)[bounds.upper].all(), (
            f"{name}: {apart[bounds.upper].max()}"
        )
        assert ((torchs >= bounds.low) & (torchs <= bounds.high)).all()


@each("power", [1.0, 2.0])
@each("n_fft", [64, 512, 4096, 16384])
@each("level", [1e-30, 1e-18, 1e-12, 1e-6, 0.1, 50.0, 1e6])
def test_float_samples_of_any_level(level: float, n_fft: int, power: float) -> None:
    "From below anything recorded up to the loudest samples that are accepted."
    spec = MelSpec(
        duration_s=max(2.5, 2 * n_fft / 4096),
        n_mels=8,
        power=power,
        floor=1e-30,
        n_fft=n_fft,
        short_window=n_fft,
        long_window=n_fft,
        long_hop=n_fft,
    )
    noise = np.random.default_rng(3).normal(0, 1, (2, spec.n_samples)).clip(-1, 1)
    noise[1, : spec.n_samples // 2] *= 1e-5  # a quiet frame before a loud one
    x = (noise * level).astype(np.float32)
    with open_engine("cpu", spec) as engine:
        verdict = compare(features(engine, x), reference_features(x, spec), spec)
    assert verdict.ok, verdict


@each("wrong", [np.nan, np.inf, -np.inf])
def test_nan_samples_give_nan_frames(wrong: float) -> None:
    "A frame with such a sample has no value that looks right; the others are untouched."
    spec = MelSpec.preset("disjoint", duration_s=1)
    x = (check_recording(spec) / np.float32(32_768)).astype(np.float32)
    with CpuEngine(spec) as engine:
        right = features(engine, x)
        x[0, 700] = wrong
        with np.errstate(all="ignore"):
            got = features(engine, x)
    hit = (spec.grid.frame_starts <= 700) & (spec.grid.frame_starts + spec.n_fft > 700)  # [L, S, T]
    assert hit.any()
    rows, others = (np.moveaxis(v[0], -2, -1) for v in (got, right))  # [L, S, T, M]
    assert not np.isfinite(rows[hit]).any()
    assert np.array_equal(rows[~hit], others[~hit])


# -- its arrays and no byte more ------------------------------------------------------------------------------------------------


def before_guard_page(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    "An array that ends where memory ends that must not be touched, and begins at most a page after such memory."
    n_bytes, page = int(np.prod(shape)) * np.dtype(dtype).itemsize, mmap.PAGESIZE
    n_pages = -(-n_bytes // page)
    memory = mmap.mmap(-1, (n_pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    no_access = 0
    for wall in (start, start + (n_pages + 1) * page):
        assert protect(ctypes.c_void_p(wall), ctypes.c_size_t(page), no_access) == 0
    return np.frombuffer(memory, np.uint8, n_bytes, (n_pages + 1) * page - n_bytes).view(dtype).reshape(shape)


@each(
    "geometry",
    [
        "preset",
        "overlap",
        "64-point FFT",
        "4,096-point FFT",
        "128-point FFT, 17 mels",
        "2,048-point FFT, 200 mels",
        "one mel",
        "uneven starts, some met twice",
        "5 overlapping frames",
    ],
)
@each("out_type", [np.float16, np.float32])
@each("in_type", [np.int16, np.float32])
def test_kernel_stays_within_its_arrays(
    in_type: type, out_type: type, geometry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    "All arrays, the tables and the work space too, end at a wall: a byte too many ends the process."
    spec = MelSpec.preset(
        geometry if geometry == "overlap" else "disjoint", duration_s=2.5, **GEOMETRIES.get(geometry, {})
    )

    def walled(array: np.ndarray) -> np.ndarray:
        made = before_guard_page(array.shape, array.dtype.type)
        made[...] = array
        return made

    plain = cpu_engine.work_space
    monkeypatch.setattr(cpu_engine, "work_space", lambda *sizes: tuple(map(walled, plain(*sizes))))
    x = (
        check_recording(spec)
        if in_type is np.int16
        else (check_recording(spec) / np.float32(32_768)).astype(np.float32)
    )
    batch = walled(np.concatenate([x] * 3))
    with CpuEngine(spec) as engine:
        right = features(engine, np.array(batch), out_type)
        engine._tables = {kind: tuple(map(walled, tables)) for kind, tables in engine._tables.items()}
        out = before_guard_page((3, *spec.row_shape), out_type)
        engine.run(batch, out)
    assert np.array_equal(out, right)


def test_arrays_that_do_not_fit_are_refused() -> None:
    spec = MelSpec.preset("disjoint", duration_s=1)
    x, out = check_recording(spec), np.zeros((1, *spec.row_shape), np.float16)
    with CpuEngine(spec) as engine:
        for wrong in (
            x[:, :-1],
            x[0],
            x.astype(np.float64),
            x.astype(np.uint16),
            np.concatenate([x, x]),
            np.asfortranarray(np.concatenate([x, x])),
        ):
            with raises("not-a-batch", EngineError):
                engine.run(wrong, out)
        locked = out.copy()
        locked.setflags(write=False)
        for wrong in (
            locked,
            out[:, :-1],
            out.astype(np.float64),
            np.zeros((1, *spec.row_shape[::-1]), np.float16).T.reshape(out.shape)[..., ::-1],
        ):
            with raises("not-a-batch", EngineError):
                engine.run(x, wrong)
        out.setflags(write=False)
        with raises("not-a-batch", EngineError):
            engine.run(x, out)
        assert not out.any()


def test_read_only_and_non_contiguous_samples() -> None:
    spec = MelSpec.preset("disjoint", duration_s=1)
    x = np.concatenate([check_recording(spec)] * 2)
    with CpuEngine(spec) as engine:
        right = features(engine, x)
        locked = x.copy()
        locked.setflags(write=False)
        for same in (locked, np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2]):
            assert np.array_equal(features(engine, same), right)
        assert features(engine, x[:0]).shape == (0, *spec.row_shape)


def test_kernel_releases_its_memory() -> None:
    "A thousand calls take no more memory than a hundred."

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE

    spec = MelSpec.preset("disjoint", duration_s=1)
    x, out = check_recording(spec), np.zeros((1, *spec.row_shape), np.float16)
    with CpuEngine(spec) as engine:
        for _ in range(100):
            engine.run(x, out)
        before = resident()
        for _ in range(1000):
            engine.run(x, out)
    assert resident() - before < 2 << 20


# -- no lock ------------------------------------------------------------------------------------------------------------------


def test_kernel_releases_the_interpreter_lock() -> None:
    """One call over many recordings; meanwhile another thread counts, which it could not while the interpreter's lock is held.

    In one of three calls: during one of them another program may have the core of the thread that counts.
    """
    spec = MelSpec.preset("disjoint")
    x = np.repeat(check_recording(spec), 512, axis=0)
    out = np.zeros((512, *spec.row_shape), np.float16)
    tables, counts, ready, done = None, list[int](), threading.Event(), threading.Event()
    with CpuEngine(spec) as engine:
        numbers = np.array([2, 1, *engine._numbers], np.int64)
        tables, space = (
            engine._tables[np.dtype(np.int16)],
            cpu_engine.work_space(spec.n_fft // 2, spec.n_mels),
        )

        def compute() -> None:
            ready.set()
            cpu_engine.kernel(
                x.view(np.uint8), out.reshape(512, -1).view(np.uint16), *space, numbers, *tables
            )  # one call of compiled code
            done.set()

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            while len(counts) < 3 and max(counts, default=0) <= 1000:
                ready.clear()
                done.clear()
                thread, counted = threading.Thread(target=compute), 0
                thread.start()
                ready.wait()
                while not done.is_set():
                    counted += 1
                thread.join()
                counts.append(counted)
        finally:
            sys.setswitchinterval(before)
    assert max(counts) > 1000, counts


# -- no stale code --------------------------------------------------------------------------------------------------------------

ROWS = (
    "import sys, numpy as np; from leakmel.mel import cpu_engine as c; from leakmel.mel.engines import check_recording; from leakmel.mel.spec import MelSpec\n"
    "c.int16_moments = lambda x: None\n"
    "s = MelSpec.preset('disjoint', duration_s=1); out = np.zeros((1, *s.row_shape), np.float16)\n"
    "c.CpuEngine(s).run(check_recording(s), out); print(int('numba' not in sys.modules), out.tobytes().hex())"
)


@pytest.mark.slow
def test_a_cache_of_code_is_not_used_when_its_sources_changed(tmp_path: Path) -> None:
    "Also where the change is in another file than the function: values rounded in another way must show in the rows."
    shutil.copytree(
        Path(leakmel.__file__).parent, tmp_path / "leakmel", ignore=shutil.ignore_patterns("__pycache__")
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def rows() -> tuple[int, str]:
        hits, text = subprocess.run(
            [sys.executable, "-c", ROWS],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        return int(hits), text

    first, again = rows(), rows()
    assert (first[0], again[0]) == (0, 1)
    assert first[1] == again[1]
    source = tmp_path / "leakmel" / "core" / "jit.py"
    text, n = re.subn(
        r"\(0xFFF - \(112 << 23\)\)", "(0x7FF - (112 << 23))", source.read_text(encoding="utf-8")
    )
    assert n == 1
    source.write_text(text, encoding="utf-8")
    changed = rows()
    assert changed[0] == 0
    assert changed[1] != first[1]


def test_wrong_machine_code_fails_the_self_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    "One band of one frame is off by half a decibel: the engine refuses itself, and `auto` goes on with torch and says why."
    spec, right = MelSpec.preset("disjoint", duration_s=1), cpu_engine.kernel

    def stale(samples: np.ndarray, rows: np.ndarray, *tables: np.ndarray) -> None:
        right(samples, rows, *tables)
        rows.view(np.float16)[:, 5] += np.float16(0.5)

    monkeypatch.setattr(cpu_engine, "kernel", stale)
    with raises("self-check", EngineError):
        open_engine("cpu", spec)
    with caplog.at_level(logging.INFO, "leakmel"), open_engine("auto", spec, device="cpu") as engine:
        assert engine.name == "torch"
    assert [r.levelname for r in caplog.records if "engine cpu was skipped" in r.message] == ["WARNING"]


# -- what it cannot do ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_unsupported_fft_lengths_fall_back_with_a_warning(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["build", str(demo), "--split", "validation", "--out", str(tmp_path / "D.H5")]
    words += ["--n-fft", "400", "--hop-length", "100", "--n-mels", "40", "--device", "cpu", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "leakmel", *words], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["engine"].startswith("torch@")
    assert "engine cpu was skipped" in done.stderr
    assert "a power of two from 64 to 16,384" in done.stderr
    assert main([*words, "--engine", "cpu"]) == 2
    assert "does not support this FFT length" in json.loads(capsys.readouterr().out)["error"]


def test_engine_refuses_other_devices() -> None:
    with raises("not-on-device", EngineError):
        open_engine("cpu", MelSpec.preset("disjoint"), device="fake")


def test_build_with_the_cpu_engine_imports_no_torch(demo: Path, tmp_path: Path) -> None:
    "Memory and start-up: torch alone takes 200 MB and a second."
    code = (
        "import sys, leakmel as lm\n"
        f"r = lm.build({str(demo)!r}, split='validation', out={str(tmp_path / 'D.H5')!r}, progress='none')\n"
        "print(r.summary['engine'], *sorted(m for m in ('torch', 'pandas', 'plotly', 'IPython') if m in sys.modules))"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["cpu@2/cpu"]
