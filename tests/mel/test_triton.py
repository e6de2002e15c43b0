"The fused kernel without a GPU: parity in Triton's interpreter, in a process of its own, and machine code for cards that are not in this machine."

import ctypes
import importlib.util
import json
import mmap
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import need
from each import each
from errors import raises
from test_mel import FRINGE, GEOMETRIES, signals, to_int16

from leakmel.core.errors import EngineError
from leakmel.mel.engines import check_recording
from leakmel.mel.spec import PRESETS, MelSpec, compare, hann_periodic, reference_features
from leakmel.recordings.conform import moments_of

Compute = Callable[..., np.ndarray]


def need_interpreter() -> None:
    "Skip the test where Triton is missing, or is 3.6: its interpreter makes numbers of arrays that NumPy 2.4 no longer converts."
    need(importlib.util.find_spec("triton"), "triton")
    works = not version("triton").startswith("3.6.") or np.lib.NumpyVersion(np.__version__) < "2.4.0"
    need(works, "a Triton from 3.7 on, whose interpreter works with this NumPy,")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    "A process in which Triton interprets: it looks at its setting once, when it is imported, and other tests may have imported it."
    need_interpreter()
    before = dict(os.environ)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            # products are NumPy's here; on some processors its library sums a row in an order that depends on the row's place
            os.environ.update(
                TRITON_INTERPRET="1",
                OMP_NUM_THREADS="1",
                **({"OPENBLAS_CORETYPE": "Sandybridge"} if platform.machine() == "x86_64" else {}),
            )
            pool.submit(os.getpid).result()
        finally:
            os.environ.clear()
            os.environ.update(before)
        yield pool


@pytest.fixture(scope="module")
def compute(interpreter: ProcessPoolExecutor) -> Compute:
    "What the kernel makes of some recordings [n, N], in a poisoned array."

    def run(spec: MelSpec, samples: np.ndarray, **launch: int) -> np.ndarray:
        mels, moments = interpreter.submit(computed, spec.to_dict(), samples, launch).result()
        if moments is not None:
            assert np.array_equal(moments, moments_of(samples))
        return mels

    return run


# -- what runs in that process ----------------------------------------------------------------------------------------------


def computed(
    fields: dict[str, Any], samples: np.ndarray, launch: dict[str, int]
) -> tuple[np.ndarray, np.ndarray | None]:
    "Features and, for 16 bits, moments; more recordings than there are would fit the chain."
    from leakmel.mel.triton_kernel import Launch, TritonChain

    spec = MelSpec(**fields)
    mels = torch.full((len(samples), *spec.row_shape), torch.nan, dtype=torch.float16)
    moments = (
        torch.full((len(samples), 5), torch.nan, dtype=torch.float64) if samples.dtype == np.int16 else None
    )
    TritonChain(spec, torch.device("cpu"), len(samples) + 3, launch=Launch(**launch)).features(
        torch.from_numpy(samples), mels, moments
    )
    return mels.numpy(), None if moments is None else moments.numpy()


def unreserved(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    "Zeros that take no memory until they are written to."
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, n_bytes, flags=flags), dtype).reshape(shape)


def last_programs(fields: dict[str, Any], n: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    "Features and moments of the last of n recordings, x, as the kernels' last programs compute them; the other n - 1 are silent."
    from triton.runtime.interpreter import interpreter_builder as builder

    from leakmel.mel.triton_kernel import FULL_SCALE, TritonChain, _mel_kernel, _moments_kernel

    spec = MelSpec(**fields)
    chain = TritonChain(spec, torch.device("cpu"), n)
    samples, mels = unreserved((n, spec.n_samples), np.int16), unreserved((n, *spec.row_shape), np.float16)
    moments = unreserved((n, 5), np.float64)
    samples[-1] = x
    n_rows = n * chain._constants["n_distinct"]
    n_programs, needed = (
        -(-n_rows // chain.launch.rows),
        -(-chain._constants["n_distinct"] // chain.launch.rows) + 1,
    )
    plain = type(builder).set_grid_idx

    def shifted(by: int) -> Callable[[int, int, int], None]:
        def set_grid_idx(x: int, y: int, z: int) -> None:
            plain(builder, x, y, z)
            builder.grid_idx = (x + by, y, z)

        return set_grid_idx

    try:
        builder.set_grid_idx = shifted(n_programs - needed)
        _mel_kernel[(needed, 1)](
            torch.from_numpy(samples), torch.from_numpy(mels), *chain._tables, n_rows, **chain._constants
        )
        builder.set_grid_idx = shifted(n - 1)
        _moments_kernel[(1,)](
            torch.from_numpy(samples),
            torch.from_numpy(moments),
            n_samples=spec.n_samples,
            full_scale=FULL_SCALE,
            block=2048,
        )
    finally:
        del builder.set_grid_idx
    return mels[-1].copy(), moments[-1].copy()


def features_of_sparse_recordings(fields: dict[str, Any], places: dict[int, np.ndarray]) -> np.ndarray:
    "Features of two recordings of a spec of very long ones, silent but for pieces of the second that start at some places."
    from leakmel.mel.triton_kernel import TritonChain

    spec = MelSpec(**fields)
    samples, mels = (
        unreserved((2, spec.n_samples), np.int16),
        np.full((2, *spec.row_shape), np.nan, np.float16),
    )
    for start, piece in places.items():
        samples[1, start : start + len(piece)] = piece
    TritonChain(spec, torch.device("cpu"), 2).features(
        torch.from_numpy(samples), torch.from_numpy(mels), None
    )
    return mels


def between_guard_pages(fields: dict[str, Any], samples: np.ndarray) -> np.ndarray:
    "Features of samples that end where the memory ends, then of samples that begin where it begins: a read beyond them ends this process."
    page, n_bytes = mmap.PAGESIZE, -(-samples.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    block = mmap.mmap(-1, n_bytes + 2 * page)
    libc, start = ctypes.CDLL(None, use_errno=True), ctypes.addressof(ctypes.c_char.from_buffer(block))
    for wall in (start, start + page + n_bytes):
        assert libc.mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(page), 0) == 0
    found = []
    for offset in (page + n_bytes - samples.nbytes, page):
        x = np.frombuffer(block, samples.dtype, samples.size, offset).reshape(samples.shape)
        x[...] = samples
        found.append(computed(fields, x, {})[0])
    assert np.array_equal(found[0], found[1])
    return found[0]


# -- parity -------------------------------------------------------------------------------------------------------------------


def check_parity(compute: Compute, spec: MelSpec, made: dict[str, np.ndarray], **launch: int) -> None:
    "All signals in one batch, each row against the reference; the same bits from float32 samples."
    batch = np.stack(list(made.values()))
    got = compute(spec, batch, **launch)
    for signal, row, x in zip(made, got, batch, strict=True):
        verdict = compare(row, reference_features(x, spec), spec)
        assert verdict.ok, f"{signal}: {verdict}"
    same = compute(spec, (batch / np.float32(32_768)).astype(np.float32), **launch)
    assert np.array_equal(same, got), "16-bit samples and the same numbers as float32"


PRESETS_IN_SHORT = (("disjoint@2", 64), ("disjoint@2", 128), ("overlap@2", 64))


@pytest.mark.parametrize(
    ("preset", "bins"),
    [
        pytest.param(
            preset,
            bins,
            # the versions of a preset give the kernel the same numbers
            marks=[] if (preset, bins) in PRESETS_IN_SHORT else pytest.mark.long,
        )
        for preset in PRESETS
        for bins in (64, 128)
    ],
)
def test_parity_of_the_presets(compute: Compute, preset: str, bins: int) -> None:
    spec = MelSpec.preset(preset, duration_s=1.25)
    check_parity(compute, spec, signals(spec), bins=bins)


@pytest.mark.parametrize("n_mels", [32, 64, 128])
@pytest.mark.parametrize(
    ("preset", "bins"),
    [
        pytest.param(
            preset,
            bins,
            marks=[] if (preset, bins) in (("disjoint@1", 64), ("overlap@2", 128)) else pytest.mark.long,
        )
        for preset in PRESETS
        for bins in (64, 128)
    ],
)
def test_loud_tone_over_quiet_noise(compute: Compute, preset: str, n_mels: int, bins: int) -> None:
    "A tone at full scale over noise of 1 LSB: one product of float16 numbers is tens of dB wrong there."
    spec = MelSpec.preset(preset, duration_s=2.5, n_mels=n_mels, f_min_hz=60 if n_mels == 128 else 0)
    x = signals(spec)["tone at full scale over noise of 1 LSB"]
    right = reference_features(x, spec)
    assert float((right.db.max(axis=-2) - right.db.min(axis=-2)).max()) > 90
    got = compute(spec, x[None], bins=bins)[0]
    assert compare(got, right, spec).ok, compare(got, right, spec)
    assert (
        np.abs(got - right.db).max() < 0.12
    )  # beyond what the tolerance asks: float32 itself errs by 0.16 and more


# One of each path of the kernel: whole steps, half a step, an odd FFT, fewer bands than a group, frames with several places; the preset `overlap` has squares.
DEFAULT_GEOMETRIES = (
    "64-point FFT",
    "400-point FFT, 3 frames",
    "odd FFT",
    "128-point FFT, 17 mels",
    "uneven starts, some met twice",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "geometry",
    [pytest.param(name, marks=[] if name in DEFAULT_GEOMETRIES else pytest.mark.long) for name in GEOMETRIES],
)
def test_parity_of_other_geometries(compute: Compute, geometry: str) -> None:
    changes = GEOMETRIES[geometry]
    spec = MelSpec(**({"duration_s": max(1.25, changes.get("long_window", 0) / 4096)} | changes))
    made, launch = signals(spec), {}
    if spec.n_fft > 1000:  # the interpreter takes its time: few frames, of which a program takes few
        made = {k: made[k] for k in ("white noise", "tone at full scale over noise of 1 LSB", "impulse")}
        launch = {"rows": 16, "warps": 1, "bins": 512}
    check_parity(compute, spec, made, **launch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "geometry",
    [
        "one mel",
        "a band in the middle",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("slaney scale", "power 2", "htk with norm", "51.2 kHz")
        ),
    ],
)
def test_energy_outside_all_bands(compute: Compute, geometry: str) -> None:
    spec = MelSpec(
        **(
            {"duration_s": 2.5}
            | GEOMETRIES[geometry]
            | {"duration_s": 0.5 if geometry != "51.2 kHz" else 0.1}
        )
    )
    check_parity(compute, spec, {name: to_int16(f(np.arange(spec.n_samples))) for name, f in FRINGE.items()})


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_float_samples_of_any_level(compute: Compute, power: float) -> None:
    "24-bit and resampled recordings, also very quiet ones, in one batch: a frame is scaled by its own power of two."
    spec = MelSpec.preset("disjoint", duration_s=0.5, power=power, floor=1e-30)
    rng = np.random.default_rng(3)
    noise = rng.normal(0, 1, (2, spec.n_samples))
    noise[1, : spec.n_samples // 2] *= 1e-5  # a quiet frame before a loud one
    levels = (1e-30, 1e-18, 1e-12, 1e-6, 0.1, 50.0, 1e6, 1e15)
    batch = np.concatenate([(noise * level).astype(np.float32) for level in levels])
    got = compute(spec, batch)
    for k, level in enumerate(levels):
        x = batch[2 * k : 2 * k + 2]
        verdict = compare(got[2 * k : 2 * k + 2], reference_features(x, spec), spec)
        assert verdict.ok, f"{level}: {verdict}"


def test_24_bit_resolution_is_kept(compute: Compute) -> None:
    "A tone below the last step of 16 bits beside a loud one is seen."
    spec = MelSpec.preset("disjoint", duration_s=0.5, n_mels=32)
    t = np.arange(spec.n_samples)
    x = (
        np.round(2**23 * (0.5 * np.sin(2 * np.pi * 40 * t / 512) + 2e-6 * np.sin(2 * np.pi * 200 * t / 512)))
        / 2**23
    )
    batch = np.stack([x, np.round(x * 32_768) / 32_768]).astype(np.float32)
    got = compute(spec, batch)
    verdict = compare(got, reference_features(batch, spec), spec)
    assert verdict.ok, verdict
    assert np.abs(got[0] - got[1]).max() > 3


@cache
def tensor_core_sums(frames: bytes, n_fft: int) -> np.ndarray:
    "Magnitudes [D, F] of frames of 16-bit samples, every sum cut off at 24 bits after each 16 products, as tensor cores do; the interpreter rounds."
    x = np.frombuffer(frames, np.int16).reshape(-1, n_fft).astype(np.float64)

    def cut(v: np.ndarray, e: np.ndarray) -> np.ndarray:
        return np.ldexp(np.trunc(np.ldexp(v, 24 - e)), e - 24)

    n, total = np.arange(1, n_fft // 2 + 1), np.zeros((len(x), n_fft // 2 + 1))
    window = hann_periodic(n_fft)[n] * np.where(n == n_fft / 2, 0.5, 1)
    angles = 2 * np.pi * (np.outer(n, np.arange(n_fft // 2 + 1)) % n_fft) / n_fft
    for sign, matrix in ((1, np.cos(angles)), (-1, np.sin(angles))):
        a, b = (x[:, n] + sign * x[:, n_fft - n]) / 2, matrix * window[:, None] * 4096
        (a0, b0), so_far = (v.astype(np.float16).astype(np.float64) for v in (a, b)), np.zeros_like(total)
        a1, b1 = ((v - v0).astype(np.float16).astype(np.float64) for v, v0 in ((a, a0), (b, b0)))
        for k in range(0, len(n), 16):
            for left, right in ((a1, b0), (a0, b1), (a0, b0)):
                terms = np.concatenate(
                    [left[:, None, k : k + 16] * right[k : k + 16].T, so_far[..., None]], axis=-1
                )
                total_k = cut(terms, np.frexp(np.abs(terms).max(axis=-1, keepdims=True))[1]).sum(axis=-1)
                so_far = cut(total_k, np.frexp(total_k)[1])
        total += so_far**2
    return np.sqrt(total) * 2.0**-26


@each("n_mels", [32, 64, 128])
@each("preset", PRESETS)
def test_loud_tone_with_truncated_tensor_core_sums(preset: str, n_mels: int) -> None:
    "The arithmetic of the kernel as a card does it (Fasi, Higham, Mikaitis, Pranesh, 2021), without what a card adds in guard bits."
    spec = MelSpec.preset(preset, duration_s=0.5, n_mels=n_mels, f_min_hz=60 if n_mels == 128 else 0)
    x = signals(spec)["tone at full scale over noise of 1 LSB"]
    starts, index = spec.grid.distinct
    magnitude = tensor_core_sums(np.stack([x[s : s + spec.n_fft] for s in starts]).tobytes(), spec.n_fft)
    db = (20 / spec.power * np.log10(magnitude**spec.power @ spec.filterbank))[index].swapaxes(-1, -2)
    right = reference_features(x, spec)
    assert compare(db.astype(np.float16), right, spec).ok
    assert np.abs(db - right.db).max() < 0.15


# -- a row depends on its recording alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"n_fft": 400, "n_mels": 33, "hop_length": 37}, marks=pytest.mark.long),
        GEOMETRIES["uneven starts, some met twice"],
    ],
    ids=["preset", "400", "uneven"],
)
def test_rows_do_not_depend_on_batch_position_and_launch(compute: Compute, changes: dict[str, Any]) -> None:
    spec = MelSpec.preset("overlap", duration_s=0.75, **changes)
    rng, me = np.random.default_rng(5), check_recording(spec)
    for kind in (np.int16, np.float32):
        mine = me if kind is np.int16 else (me / 32_768 + 1e-7).astype(np.float32)
        alone = compute(spec, mine)[0]
        for size, place, launch in (
            (2, 0, {}),
            (3, 1, {"rows": 32}),
            (7, 6, {"rows": 64, "warps": 4, "stages": 2}),
            (17, 9, {"rows": 256}),
        ):
            others = rng.integers(-32_768, 32_767, (size, spec.n_samples), dtype=np.int16)
            batch = others if kind is np.int16 else (others * np.float32(3e4)).astype(np.float32)
            batch[place] = mine[0]
            assert np.array_equal(compute(spec, batch, **launch)[place], alone), (size, place, launch)


def test_nan_recordings_do_not_change_other_rows(compute: Compute) -> None:
    spec = MelSpec.preset("disjoint", duration_s=0.5)
    me = (check_recording(spec) / np.float32(32_768)).astype(np.float32)
    alone = compute(spec, me)[0]
    for neighbour in (np.inf, np.nan):
        got = compute(spec, np.concatenate([np.full_like(me, neighbour), me, np.full_like(me, neighbour)]))
        assert np.array_equal(got[1], alone)
        assert np.isnan(got[[0, 2]]).all(), "what is no number stays visible"


# -- addresses, refusals --------------------------------------------------------------------------------------------------------

BIG: dict[str, tuple[dict[str, Any], int]] = {
    "samples beyond 2**31": ({}, 52_500),
    "features beyond 2**31": (
        {
            "duration_s": 0.125,
            "long_window": 512,
            "short_window": 512,
            "n_fft": 64,
            "hop_length": 1,
            "n_mels": 8,
        },
        600_000,
    ),
}


@pytest.mark.parametrize("case", BIG)
def test_arrays_of_more_than_2_to_the_31_elements(
    interpreter: ProcessPoolExecutor, compute: Compute, case: str
) -> None:
    changes, n = BIG[case]
    spec = MelSpec(**changes)
    assert n * (spec.n_samples if case.startswith("samples") else int(np.prod(spec.row_shape))) > 2**31
    x = check_recording(spec)
    mels, moments = interpreter.submit(last_programs, spec.to_dict(), n, x[0]).result()
    assert np.array_equal(mels, compute(spec, x)[0])
    assert np.array_equal(moments, moments_of(x)[0])


def test_recordings_of_2_to_the_31_samples(interpreter: ProcessPoolExecutor, compute: Compute) -> None:
    "Frames of one program that lie more than 2**31 samples apart."
    spec = MelSpec(
        sample_rate=4096, duration_s=(2**31 - 4096) / 4096, long_window=1024, long_hop=2**30 - 4096
    )
    one = MelSpec(duration_s=0.25)
    x = check_recording(one)
    starts = [i * spec.long_hop for i in range(spec.row_shape[0])]
    assert starts[-1] + spec.n_samples > 2**31
    got = interpreter.submit(
        features_of_sparse_recordings, spec.to_dict(), dict.fromkeys(starts, x[0])
    ).result()
    assert (got[0] == -200).all()
    for row in got[1]:
        assert np.array_equal(row, compute(one, x)[0, 0])


SHORT: dict[str, Any] = {"n_fft": 5, "n_mels": 1, "duration_s": 5 / 4096, "long_window": 5, "short_window": 5}


@each("changes", [{}, {"n_fft": 20, "n_mels": 4}, SHORT], ids=["preset", "20", "5"])
def test_nothing_beyond_the_samples_is_read(
    interpreter: ProcessPoolExecutor, compute: Compute, changes: dict[str, Any]
) -> None:
    spec = MelSpec(**({"duration_s": 0.25} | changes))
    for dtype in (np.int16, np.float32):
        samples = np.random.default_rng(0).integers(-9999, 9999, (3, spec.n_samples)).astype(dtype)
        assert np.array_equal(
            interpreter.submit(between_guard_pages, spec.to_dict(), samples).result(), compute(spec, samples)
        )


# -- the engine ---------------------------------------------------------------------------------------------------------------


def built(root: Path, out: Path) -> tuple[str, bool, int]:
    "The engine that a build on the device of the tests takes, and the verdict over some rows."
    import fake_device

    import leakmel as lm

    fake_device.register()
    done = lm.build(
        root,
        split="testing",
        out=out,
        spec={"duration_s": 0.5, "sample_rate": 4096, "n_mels": 16},
        engine="auto",
        progress="none",
        check=None,
        pipeline=lm.PipelineConfig(device="fake", files_per_batch=4, fsync=False),
    )
    return done.summary["engine"], done.verified.ok, done.verified.checked


def test_a_build_by_the_triton_engine_in_its_interpreter(
    interpreter: ProcessPoolExecutor, demo: Path, tmp_path: Path
) -> None:
    engine, ok, n_checked = interpreter.submit(built, demo, tmp_path / "a.h5").result()
    assert (engine, ok) == ("triton@1/fake", True)
    assert n_checked > 0


# -- compiled ahead -------------------------------------------------------------------------------------------------------------

# Most shared memory of a block: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 227 KB for 9.0, 99 KB for 12.0.
SHARED = {90: 232_448, 120: 101_376}
AHEAD: dict[str, dict[str, Any]] = {
    "disjoint": {},
    "overlap": PRESETS["overlap@1"],
    "128 mels": {"n_mels": 128, "f_min_hz": 60},
    "5 frames": GEOMETRIES["5 overlapping frames"],
    "odd": GEOMETRIES["odd FFT"],
    "1,024 points": {"n_fft": 1024, "short_window": 1024},
    "4,096 points": GEOMETRIES["4,096-point FFT"],
    "long recordings": {"duration_s": 400_000},
}


def cases_of(which: str) -> list[tuple[str, str]]:
    "Names in AHEAD and types of samples."
    return [
        (name, samples)
        for samples in ("int16", "float32")
        for name in (AHEAD if samples == "int16" else ["disjoint", "overlap", "4,096 points"])
        if which == "all" or (name in which.split() and samples == "int16")
    ]


def cross_compile_cases(capability: int, which: str) -> list[dict[str, Any]]:
    "What tests/helpers/cross_compile.py is asked for: the kernel of the moments, then the cases."
    return [
        {"capability": capability, "spec": asdict(MelSpec(**AHEAD[name])), "samples": samples}
        for name, samples in [("disjoint", "moments"), *cases_of(which)]
    ]


@pytest.fixture(scope="module")
def compiled_presets() -> dict[object, list[dict[str, Any]]]:
    "What was compiled of some presets for each card, what launches of all sizes came down to, and the kernel of the oldest and newest card: by one process."
    asked: dict[object, list[dict[str, Any]]] = {"ends": ENDS}
    for c, which in IN_SHORT.items():
        asked[c] = cross_compile_cases(c, which)
    asked["launches"] = [{"capability": 90, "samples": "launches"}]
    found = iter(cross_compiled([case for cases in asked.values() for case in cases]))
    return {c: [next(found) for _ in cases] for c, cases in asked.items()}


def trap_cases(capabilities: Iterable[int]) -> list[dict[str, Any]]:
    "What tests/helpers/cross_compile.py is asked for: the default kernel for some cards, by both types of samples."
    spec = asdict(MelSpec())
    return [
        {"capability": c, "spec": spec, "samples": samples}
        for c in capabilities
        for samples in ("int16", "float32")
    ]


# In the short run: presets for each card, whose kernels differ in little; the oldest card by the samples that take more registers, the newest by the others.
IN_SHORT = {90: "disjoint", 120: "disjoint overlap"}
ENDS = [*trap_cases((80,))[1:], *trap_cases((120,))[:1]]


def cross_compiled(cases: list[dict[str, Any]], folder: str = "") -> list[dict[str, Any]]:
    "What tests/helpers/cross_compile.py found, with the Triton of a folder."
    need(importlib.util.find_spec("triton"), "triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = [folder, str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "cross_compile.py")]
    done = subprocess.run(command, input=json.dumps(cases), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "which"),
    [
        *IN_SHORT.items(),
        *(pytest.param(capability, "all", marks=pytest.mark.long) for capability in (90, 120)),
    ],
)
def test_machine_code_for_other_gpus(capability: int, which: str, request: pytest.FixtureRequest) -> None:
    "Fits a block's shared memory, multiplies on tensor cores, loads tables ahead, and keeps 16-bit samples' values in registers."
    cases = cases_of(which)
    assert len(cases) == (len(AHEAD) + 3 if which == "all" else len(which.split()))
    if which == "all":
        found = cross_compiled(cross_compile_cases(capability, which))
    else:
        found = request.getfixturevalue("compiled_presets")[capability]
    assert found[0]["shared"] < 1024
    assert found[0]["stack"] == 0
    for (name, samples), one in zip(cases, found[1:], strict=True):
        output = f"{name}, {samples}: {one}"
        assert one["shared"] <= SHARED[capability], output
        assert one["wgmma" if capability == 90 else "mma"] > 0, output
        assert one["cp_async"] > 0, output
        # Float samples take a few registers more, and offsets of 64 bits many more, but one build in a million needs those.
        assert one["stack"] <= (256 if name == "long recordings" else 64 if samples == "float32" else 0), (
            output
        )


# Most shared memory of a block, by the same table; cards of 10.x are refused until one has shown parity.
TARGETS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
# Folders in which `pip install --no-deps --target FOLDER triton==VERSION` has put other versions, with colons between.
OTHER_TRITONS = [folder for folder in os.environ.get("LEAKMEL_TRITONS", "").split(":") if folder]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "folder"),
    [("ends", ""), *(pytest.param("all", folder, marks=pytest.mark.long) for folder in ("", *OTHER_TRITONS))],
)
def test_kernel_for_all_supported_gpus_has_no_trap(
    which: str, folder: str, request: pytest.FixtureRequest
) -> None:
    "A trap is sticky: CUDA is dead for the process. Where Triton compiles one, `require_products` and `launch_for` refuse the card."
    cases = ENDS if which == "ends" else trap_cases(TARGETS)
    if which == "ends":
        found = request.getfixturevalue("compiled_presets")["ends"]
    else:
        found = cross_compiled(cases, folder)
    assert len(found) == len(cases)
    for case, one in zip(cases, found, strict=True):
        output = f"{case['capability']}, {case['samples']}: {one}"
        tensor_cores = one["mma"] + one["wgmma"] + one["tcgen05"]
        assert one["refused"] == (one["traps"] > 0 or not tensor_cores), output
        assert one["shared"] <= TARGETS[case["capability"]], output
        if case["capability"] // 10 != 10:
            assert not one["refused"], output
            assert one["stack"] <= 256, output


@each(
    ("capability", "is_supported"),
    [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 0), False), ((10, 3), False), ((12, 0), True)],
)
def test_unproven_gpus_are_refused_before_the_kernel_is_made(
    capability: tuple[int, int], is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(importlib.util.find_spec("triton"), "triton")
    from leakmel.mel.triton_kernel import launch_for

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if is_supported:
        assert launch_for(torch.device("cuda", 0)).rows == 128
        return
    with raises("not-on-device", EngineError, says=f"{capability[0]}.{capability[1]}"):
        launch_for(torch.device("cuda", 0))


@each("ptx", ["trap;", "mma.sync.aligned; trap ;", "mma.sync.aligned;", ""])
def test_machine_code_is_looked_at_before_the_first_launch(ptx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need(importlib.util.find_spec("triton"), "triton")
    from leakmel.mel import triton_kernel

    class Kernel:
        "Notes what is done with it."

        def __init__(self) -> None:
            self.done: list[str] = []

        def warmup(self, *values: Any, **options: Any) -> Any:
            self.done.append("compiled")
            return SimpleNamespace(asm={"ptx": ptx})

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *values, **options: self.done.append("launched")

    kernel = Kernel()
    monkeypatch.setattr(triton_kernel, "_mel_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    spec = MelSpec(duration_s=0.5)
    chain = triton_kernel.TritonChain(spec, torch.device("cpu"), 2)
    chain.device = torch.device("cuda", 0)
    x, mels = torch.zeros((2, spec.n_samples)), torch.zeros((2, *spec.row_shape), dtype=torch.float16)
    if ptx == "mma.sync.aligned;":
        for _ in range(2):
            chain.features(x, mels, None)
        assert kernel.done == ["compiled", "launched", "launched"]
        chain.features(x.to(torch.int16), mels, None)
        assert kernel.done[3:] == ["compiled", "launched"]
        return
    with raises("not-on-device", EngineError, says="trap" if "trap" in ptx else "no product"):
        chain.features(x, mels, None)
    assert kernel.done == ["compiled"]


@pytest.mark.parametrize("capability", [90, pytest.param(120, marks=pytest.mark.long)])
def test_calls_of_all_sizes_launch_the_same_two_kernels(
    capability: int, request: pytest.FixtureRequest
) -> None:
    "Nothing is compiled again for another number of recordings or another address, which would stop a stream or break a capture."
    if capability == 90:
        (found,) = request.getfixturevalue("compiled_presets")["launches"]
    else:
        (found,) = cross_compiled([{"capability": capability, "samples": "launches"}])
    stages = [3, 2] if capability == 90 else [3]
    assert found == {"features": 2, "moments": 1, "options": sorted([8, s, False] for s in stages)}


# -- where triton is not installed ------------------------------------------------------------------------------------------------

# A module without the word imports triton only by way of one that has it; compiled modules, which take seconds, have not.
WITHOUT = """
import importlib, pkgutil, sys
from pathlib import Path
sys.modules["triton"] = None
import leakmel
failed, n = [], 0
for found in pkgutil.walk_packages(leakmel.__path__, "leakmel."):
    path = Path(found.module_finder.path, found.name.rpartition(".")[2])
    path = path / "__init__.py" if found.ispkg else path.with_suffix(".py")
    if found.name.endswith("__main__") or "triton" not in path.read_text(encoding="utf-8"): continue
    n += 1
    try: importlib.import_module(found.name)
    except ImportError: failed.append(found.name)
print(n, *failed)
"""


@pytest.mark.slow
def test_other_modules_do_not_import_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    n, *failed = done.stdout.split()
    assert int(n) > 5
    assert "leakmel.mel.triton_kernel" in failed
    assert all("triton" in name for name in failed), failed
