"Log-mel features: every engine against the float64 reference, the reference against other libraries, and a tolerance that can fail."

import json
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from leakmel.core.errors import EngineError, SpecError, UsageError
from leakmel.mel import engines
from leakmel.mel import spec as spec_module
from leakmel.mel.engines import (
    COMPARISON_ENGINES,
    CPU_ENGINES,
    DEVICE_ENGINES,
    ENGINES,
    Engine,
    EngineUnavailable,
    UnsupportedSpec,
    check_recording,
    log_mel,
    open_engine,
    self_check,
)
from leakmel.mel.spec import (
    PRESETS,
    Bounds,
    MelSpec,
    bounds_of,
    compare,
    compare_each,
    hann_periodic,
    mel_filterbank,
    reference_features,
    reference_log_mel,
    spec_from_dict,
)
from leakmel.recordings.conform import even_step, moments_of

# Every engine that knows a CPU there, and on a GPU those that know one. (Triton's kernels are interpreted in tests of their own.)
ON_CPU = [pytest.param(name, "cpu", id=f"{name}-cpu") for name in (*CPU_ENGINES, *COMPARISON_ENGINES)]
ON_GPU = [
    pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu)
    for name in (*DEVICE_ENGINES, *COMPARISON_ENGINES)
]
every_engine = pytest.mark.parametrize(("name", "device"), ON_CPU + ON_GPU)
# The reference compared with itself would say nothing.
every_other_engine = pytest.mark.parametrize(
    ("name", "device"), [p for p in ON_CPU + ON_GPU if p.values[0] != "reference"]
)
OWN_KERNELS = ("cpu", "triton")  # compared in all geometries; the others, which call FFTs of torch, in a few


def opened(name: str, device: str, spec: MelSpec) -> Engine:
    "An engine that passed its self-check; skips where there is no GPU, or no torchaudio."
    if name == "torchaudio" and find_spec("torchaudio") is None:
        pytest.skip("torchaudio is not installed here")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return open_engine(name, spec, device=device)


def features(engine: Engine, samples: np.ndarray, dtype: type = np.float16) -> np.ndarray:
    "What an engine makes of some recordings, in a poisoned array."
    out: np.ndarray = np.full((len(samples), *engine.spec.row_shape), np.nan, dtype)
    moments = engine.run(samples, out)
    assert np.array_equal(moments, moments_of(samples)) or samples.dtype != np.int16
    return out


# -- signals ------------------------------------------------------------------------------------------------------------


def to_int16(x: np.ndarray) -> np.ndarray:
    "Rounded and clipped to 16 bits."
    return np.clip(np.round(x), -32_768, 32_767).astype(np.int16)


@cache
def signals(spec: MelSpec) -> dict[str, np.ndarray]:
    "Recordings [N] int16 with the traits that break engines."
    n, rng = spec.n_samples, np.random.default_rng(7)
    t, bin_hz = np.arange(n) / spec.sample_rate, spec.sample_rate / spec.n_fft

    def tone(hz: float, amplitude: float = 20_000) -> np.ndarray:
        return amplitude * np.sin(2 * np.pi * hz * t + 0.3)

    k = spec.n_fft // 5
    impulse = np.zeros(n)
    impulse[n // 3] = 32_767
    return {
        name: to_int16(x)
        for name, x in {
            "white noise": rng.normal(0, 3000, n),
            "tone in a bin": tone(k * bin_hz),
            "tone between bins": tone((k + 0.5) * bin_hz),
            "tone near half the rate": tone(0.498 * spec.sample_rate),
            "tone near DC": tone(0.3 * bin_hz),
            "silence": np.zeros(n),
            "impulse": impulse,
            "DC": np.full(n, 12_345.0),
            "DC and noise": 12_345 + rng.integers(-3, 4, n),
            "square at full scale": np.where(tone(3.3 * bin_hz) >= 0, 32_767.0, -32_768.0),
            "clipped": rng.normal(0, 60_000, n),
            "noise of 1 LSB": rng.integers(-1, 2, n).astype(float),
            "tone at full scale over noise of 1 LSB": tone((k + 0.3) * bin_hz, 32_766)
            + rng.integers(-1, 2, n),
            "loud, then quiet": np.where(np.arange(n) < n // 2, 30_000.0, 3.0) * rng.normal(0, 0.3, n),
        }.items()
    }


def is_refused(name: str, device: str, spec: MelSpec) -> bool:
    "Whether an engine cannot compute a spec; it says so then, and `auto` takes another one and says so."
    if name == "torchaudio" and (spec.n_fft % 2 or spec.sample_rate % 2):
        with raises("not-stock", UnsupportedSpec):
            opened(name, device, spec)
        return True
    if name != "cpu" or (spec.n_fft & (spec.n_fft - 1) == 0 and 64 <= spec.n_fft <= 16_384):
        return False
    with raises("fft-length", EngineError):
        opened(name, device, spec)
    return True


def check_parity(name: str, device: str, spec: MelSpec) -> None:
    "All signals in one batch, each row against the reference; float32 input gives the same bits."
    if is_refused(name, device, spec):
        return
    made = signals(spec)
    batch = np.stack(list(made.values()))
    with opened(name, device, spec) as engine:
        got = features(engine, batch)
        same = features(engine, (batch / np.float32(32_768)).astype(np.float32))
    for signal, row, x in zip(made, got, batch, strict=True):
        verdict = compare(row, reference_features(x, spec), spec)
        assert verdict.ok, f"{signal}: {verdict}"
    assert np.array_equal(got, same), "16-bit samples and the same numbers as float32"


# -- parity -------------------------------------------------------------------------------------------------------------


@every_other_engine
@each("preset", PRESETS)
def test_parity_of_the_presets(name: str, device: str, preset: str) -> None:
    check_parity(name, device, MelSpec.preset(preset, duration_s=2.5))


@every_other_engine
@each("n_mels", [32, 64, 128])
@each("preset", PRESETS)
def test_loud_tone_over_quiet_noise(name: str, device: str, preset: str, n_mels: int) -> None:
    "A tone at full scale over noise of 1 LSB: a frame of 130 dB, where float32 itself shows."
    spec = MelSpec.preset(preset, duration_s=2.5, n_mels=n_mels, f_min_hz=60 if n_mels == 128 else 0)
    x = signals(spec)["tone at full scale over noise of 1 LSB"]
    right = reference_features(x, spec)
    assert float((right.db.max(axis=-2) - right.db.min(axis=-2)).max()) > 90
    with opened(name, device, spec) as engine:
        verdict = compare(features(engine, x[None])[0], right, spec)
    assert verdict.ok, verdict


GEOMETRIES: dict[str, dict[str, Any]] = {
    "64-point FFT": {
        "n_fft": 64,
        "hop_length": 16,
        "short_window": 64,
        "short_hop": 32,
        "long_window": 256,
        "long_hop": 256,
        "n_mels": 8,
    },
    "400-point FFT, 3 frames": {
        "n_fft": 400,
        "hop_length": 160,
        "short_window": 800,
        "short_hop": 800,
        "long_window": 1600,
        "long_hop": 1600,
        "n_mels": 40,
    },
    **{
        f"{n:,}-point FFT, {m} mels": {
            "n_fft": n,
            "hop_length": n // 4,
            "short_window": n,
            "short_hop": n // 2,
            "long_window": 2 * n,
            "long_hop": 2 * n,
            "n_mels": m,
        }
        for n, m in ((128, 17), (256, 31), (1024, 128), (2048, 200))
    },
    "32-point FFT": {
        "n_fft": 32,
        "hop_length": 8,
        "short_window": 64,
        "short_hop": 32,
        "long_window": 256,
        "long_hop": 256,
        "n_mels": 4,
    },
    "8,192-point FFT": {
        "n_fft": 8192,
        "short_window": 8192,
        "long_window": 8192,
        "long_hop": 2048,
        "short_hop": 2048,
    },
    "4,096-point FFT": {
        "n_fft": 4096,
        "short_window": 4096,
        "long_window": 8192,
        "long_hop": 4096,
        "short_hop": 2048,
    },
    "prime FFT": {"n_fft": 499, "hop_length": 13, "n_mels": 20},
    "odd FFT": {"n_fft": 501, "n_mels": 40},
    "5 overlapping frames": {"n_fft": 256, "hop_length": 64, "n_mels": 24},
    "uneven starts": {"n_fft": 256, "hop_length": 100, "long_hop": 700, "short_hop": 300, "n_mels": 24},
    "uneven starts, some met twice": {
        "n_fft": 256,
        "hop_length": 128,
        "long_hop": 384,
        "short_hop": 192,
        "n_mels": 24,
    },
    "gaps between segments": {"long_hop": 1500, "short_hop": 600, "long_window": 1200},
    "one frame in all": {
        "long_window": 10_240,
        "short_window": 10_240,
        "long_hop": 1,
        "short_hop": 1,
        "n_fft": 2048,
        "hop_length": 9000,
    },
    "one mel": {"n_mels": 1},
    "slaney scale": {"mel_scale": "slaney"},
    "slaney scale and norm, power 2": {"mel_scale": "slaney", "mel_norm": "slaney", "power": 2},
    "htk with norm": {"mel_norm": "slaney"},
    "power 2": {"power": 2},
    "a band in the middle": {"f_min_hz": 300, "f_max_hz": 1500.5, "n_mels": 40},
    "a high floor": {"floor": 1.0},
    "292 Hz": {"sample_rate": 292, "duration_s": 20, "n_mels": 32},
    "8 kHz": {"sample_rate": 8000, "duration_s": 1},
    "51.2 kHz": {"sample_rate": 51_200, "duration_s": 0.2, "n_mels": 40},
    "an odd rate": {"sample_rate": 4095},
}


FEW_GEOMETRIES = (
    "400-point FFT, 3 frames",
    "uneven starts, some met twice",
    "slaney scale and norm, power 2",
    "odd FFT",  # which torchaudio refuses
)


@every_other_engine
@each("geometry", GEOMETRIES)
def test_parity_of_other_geometries(name: str, device: str, geometry: str) -> None:
    if name in OWN_KERNELS or geometry in FEW_GEOMETRIES:
        check_parity(name, device, MelSpec(**({"duration_s": 2.5} | GEOMETRIES[geometry])))


def test_geometries_match_their_names() -> None:
    def made(name: str) -> MelSpec:
        return MelSpec(**({"duration_s": 2.5} | GEOMETRIES[name]))

    assert even_step(made("uneven starts").grid.distinct[0]) is None
    twice = made("uneven starts, some met twice").grid
    assert even_step(twice.distinct[0]) is None
    assert len(twice.distinct[0]) < twice.frame_starts.size
    assert made("400-point FFT, 3 frames").row_shape[-1] == 3
    assert made("one frame in all").grid.frame_starts.size == 1


@every_other_engine
def test_float_samples_beyond_16_bits(name: str, device: str) -> None:
    spec, rng = MelSpec.preset("disjoint", duration_s=1), np.random.default_rng(3)
    x = rng.normal(0, 1, (3, spec.n_samples)) * np.array([[1e-6], [0.1], [50.0]])
    x = x.astype(np.float32)
    with opened(name, device, spec) as engine:
        got = features(engine, x)
    assert compare(got, reference_features(x, spec), spec).ok


@every_engine
def test_float32_output_is_what_is_rounded_to_float16(name: str, device: str) -> None:
    spec = MelSpec.preset("overlap", duration_s=1)
    x = check_recording(spec)
    with opened(name, device, spec) as engine:
        assert np.array_equal(features(engine, x, np.float32).astype(np.float16), features(engine, x))


FRINGE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "full scale DC": lambda phase: np.full(len(phase), -32_768.0),
    "tone at half the rate": lambda phase: 30_000 * np.cos(np.pi * phase),
    "tone just below half the rate": lambda phase: 30_000 * np.sin(0.999 * np.pi * phase),
    "slow tone": lambda phase: 30_000 * np.sin(0.0003 * np.pi * phase),
}


@every_other_engine
@each(
    "geometry",
    [
        "one mel",
        "slaney scale",
        "power 2",
        "a band in the middle",
        "htk with norm",
        "51.2 kHz",
        "4,096-point FFT",
    ],
)
@each("signal", FRINGE)
def test_energy_outside_all_bands(name: str, device: str, geometry: str, signal: str) -> None:
    if name not in OWN_KERNELS and geometry not in ("one mel", "power 2", "51.2 kHz"):
        return
    spec = MelSpec(**({"duration_s": 2.5} | GEOMETRIES[geometry]))
    x = to_int16(FRINGE[signal](np.arange(spec.n_samples)))[None]
    with opened(name, device, spec) as engine:
        verdict = compare(features(engine, x), reference_features(x, spec), spec)
    assert verdict.ok, verdict


# -- a row depends on its recording alone ---------------------------------------------------------------------------------


@every_engine
@each(
    "changes",
    [{}, {"n_fft": 400, "n_mels": 33, "hop_length": 37}, GEOMETRIES["uneven starts"]],
    ids=["preset", "400", "uneven"],
)
def test_rows_do_not_depend_on_batch_size_and_position(
    name: str, device: str, changes: dict[str, Any]
) -> None:
    spec = MelSpec.preset("overlap", duration_s=1.5, **changes)
    if is_refused(name, device, spec):
        return
    rng = np.random.default_rng(5)
    me = check_recording(spec)
    with opened(name, device, spec) as engine:
        alone = features(engine, me)[0]
        for size in (2, 3, 7, 8, 17, 31):
            others = rng.integers(-32_768, 32_767, (size, spec.n_samples), dtype=np.int16)
            for place in {0, size // 2, size - 1}:
                others[place] = me[0]
                assert np.array_equal(features(engine, others)[place], alone), (size, place)


@every_engine
def test_loud_and_nan_recordings_do_not_change_other_rows(name: str, device: str) -> None:
    spec = MelSpec.preset("disjoint", duration_s=1)
    me = (check_recording(spec) / np.float32(32_768)).astype(np.float32)
    with opened(name, device, spec) as engine:
        alone = features(engine, me)[0]
        for neighbour in (1e6, np.inf, np.nan):
            batch = np.concatenate([np.full_like(me, neighbour), me, np.full_like(me, neighbour)])
            with np.errstate(all="ignore"):
                assert np.array_equal(features(engine, batch)[1], alone)


@pytest.mark.slow
@every_engine
def test_threads_change_no_bit(name: str, device: str) -> None:
    "Calls that last long enough to meet, begun together, several times."
    spec, n_threads = MelSpec.preset("disjoint", duration_s=1), 4
    with opened(name, device, spec) as engine:
        n = 300 if engine.n_lanes > 1 else 5
        batches = [
            np.random.default_rng(i).integers(-9000, 9000, (n + i, spec.n_samples), dtype=np.int16)
            for i in range(n_threads)
        ]
        right = [features(engine, b) for b in batches]
        for together in (2, n_threads) * 5 if engine.n_lanes > 1 else (1,):
            got: list[Any] = [None] * together
            begin = threading.Barrier(together)

            def work(i: int, got: list[Any] = got, begin: threading.Barrier = begin) -> None:
                begin.wait(30)
                got[i] = features(engine, batches[i])

            threads = [threading.Thread(target=work, args=(i,)) for i in range(together)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            for mine, alone in zip(got, right[:together], strict=True):
                assert np.array_equal(mine, alone)


def test_the_callers_torch_threads_change_no_bit_and_are_left_alone() -> None:
    spec, before = MelSpec.preset("disjoint", duration_s=1), torch.get_num_threads()
    try:
        with open_engine("torch", spec, device="cpu") as engine:
            right = features(engine, check_recording(spec))
            for n in (1, 2, 4):
                torch.set_num_threads(n)
                assert np.array_equal(features(engine, check_recording(spec)), right)
                assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(before)


@every_engine
@each(
    "changes",
    [{}, GEOMETRIES["uneven starts, some met twice"], GEOMETRIES["5 overlapping frames"]],
    ids=["overlap", "uneven", "T > 1"],
)
def test_frames_one_at_a_time(name: str, device: str, changes: dict[str, Any]) -> None:
    "Computing distinct frames once gives what each frame gives alone."
    spec = MelSpec.preset("overlap", duration_s=1, **changes)
    single = replace(
        spec, duration_s=spec.n_fft / spec.sample_rate, long_window=spec.n_fft, short_window=spec.n_fft
    )
    x = check_recording(spec)[0]
    with opened(name, device, spec) as engine:
        got = features(engine, x[None], np.float32)[0]
    n_long, n_short, n_mels, n_frames = spec.row_shape
    starts = [
        i * spec.long_hop + j * spec.short_hop + t * spec.hop_length
        for i in range(n_long)
        for j in range(n_short)
        for t in range(n_frames)
    ]
    with opened(name, device, single) as engine:
        alone = features(engine, np.stack([x[s : s + spec.n_fft] for s in starts]), np.float32)
    brute = alone.reshape(n_long, n_short, n_frames, n_mels).transpose(0, 1, 3, 2)
    step = (
        0.0 if device == "cpu" else np.spacing(np.abs(brute).astype(np.float16)).astype(np.float32)
    )  # rows leave a device as float16
    assert (np.abs(got - brute) < 0.02 + step).all()


@every_engine
def test_engines_read_no_uninitialised_memory(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    "New arrays hold NaN instead of whatever the memory held."
    spec = MelSpec.preset("overlap", duration_s=1)
    x = np.concatenate([check_recording(spec)] * 3)
    with opened(name, device, spec) as engine:
        right = features(engine, x)
    np_empty, torch_empty = np.empty, torch.empty

    def poisoned(*args: Any, **options: Any) -> np.ndarray:
        made = np_empty(*args, **options)
        if made.dtype.kind == "f":
            made.fill(np.nan)
        return made

    def torch_poisoned(*args: Any, **options: Any) -> torch.Tensor:
        made = torch_empty(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() or made.is_complex() else made

    monkeypatch.setattr(np, "empty", poisoned)
    monkeypatch.setattr(torch, "empty", torch_poisoned)
    with opened(name, device, spec) as engine:
        assert np.array_equal(features(engine, x), right)
        assert np.isfinite(features(engine, x[:1])).all()


# -- choosing an engine ---------------------------------------------------------------------------------------------------


@each("has_driver", [True, False])
@each(
    ("visible", "may"), [(None, True), ("0", True), ("1,0", True), ("", False), (" ", False), ("-1", False)]
)
def test_gpu_detection(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, may: bool, has_driver: bool
) -> None:
    "Hidden devices are none, and without a driver there is none to be seen."

    def load(name: str) -> None:
        assert name == "libcuda.so.1"
        if not has_driver:
            raise OSError("cannot open shared object file")

    monkeypatch.setattr(engines.ctypes, "CDLL", load)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert engines.may_have_cuda() == (may and has_driver)


def test_auto_skips_missing_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = MelSpec.preset("disjoint", duration_s=1)
    monkeypatch.setattr(engines, "may_have_cuda", lambda: True)
    for name in set(ENGINES) - {"reference"}:
        monkeypatch.setitem(ENGINES, name, ("leakmel.mel.no_such_engine", "NoEngine"))
    with caplog.at_level(logging.INFO, "leakmel"), open_engine("auto", spec) as engine:
        assert engine.name == "reference"
    assert [r.message.split()[1] for r in caplog.records] == ["triton", "torch", "cpu", "torch"]
    warned = [r.message.split()[1] for r in caplog.records if r.levelno >= logging.WARNING]
    assert warned == ["cpu"], (
        "a GPU or torch may be missing, but what the compiled engine needs is required: slower rows must not come without a word"
    )
    with raises("engine-missing", EngineUnavailable):
        open_engine("cpu", spec)


def test_auto_skips_failing_engines_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*args: Any, **options: Any) -> None:
        raise EngineError("engine torch does not reproduce the reference", code="self-check")

    for kind in ("torch_engine.TorchEngine", "cpu_engine.CpuEngine"):
        monkeypatch.setattr(f"leakmel.mel.{kind}.__init__", wrong)
    spec = MelSpec.preset("disjoint", duration_s=1)
    with open_engine("auto", spec, device="cpu") as engine:
        assert engine.name == "reference"
    assert [r.levelname for r in caplog.records if "engine torch was skipped" in r.message] == ["WARNING"]
    with raises("self-check", EngineError):
        open_engine("auto", spec, device="fake")  # a device that was asked for is kept to


def test_wrong_engine_fails_the_self_check() -> None:
    class Swapped(engines.ReferenceEngine):
        "Swaps two long segments."

        def run(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
            moments = super().run(samples, out)
            out[:, [0, 1]] = out[:, [1, 0]]
            return moments

    with raises("self-check", EngineError):
        self_check(Swapped(MelSpec.preset("disjoint", duration_s=1)))


def test_unknown_engines_and_devices() -> None:
    spec = MelSpec.preset("disjoint", duration_s=1)
    with raises("unknown-engine", UsageError, found="'quick'"):
        open_engine("quick", spec)
    with raises("unknown-device", UsageError, found="'toaster'"):
        open_engine("torch", spec, device="toaster")
    if not torch.cuda.is_available():
        for name in ("torch", *(["triton"] if find_spec("triton") else [])):
            with raises("no-device", EngineUnavailable):
                open_engine(name, spec, device="cuda")


def test_engine_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    "The same on every machine, whatever is installed and whatever its devices are."
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "leakmel.mel.triton_kernel", raising=False)
    for device in ("auto", "cuda"):
        with raises("engine-missing", EngineUnavailable, says="[gpu]', or use engine='auto'"):
            open_engine("triton", MelSpec.preset("disjoint", duration_s=1), device=device)


# -- log_mel --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", *CPU_ENGINES, *COMPARISON_ENGINES])
@each("shape", [(), (1,), (3,), (2, 3), (0,), (2, 0)])
def test_log_mel_keeps_leading_axes(engine: str, shape: tuple[int, ...]) -> None:
    spec = MelSpec.preset("disjoint", duration_s=0.5)
    x = np.random.default_rng(0).integers(-999, 999, (*shape, spec.n_samples), dtype=np.int16)
    got = log_mel(x, spec, engine=engine)
    assert got.shape == (*shape, *spec.row_shape)
    assert got.dtype == (np.float64 if engine == "reference" else np.float32)
    if got.size:
        assert compare(got, reference_features(x, spec), spec).ok


@each("engine", CPU_ENGINES)
def test_log_mel_accepts_all_sample_types(engine: str) -> None:
    spec = MelSpec.preset("disjoint", duration_s=0.5)
    x = np.random.default_rng(0).integers(-9999, 9999, (2, spec.n_samples), dtype=np.int16)
    right = log_mel(x, spec, engine=engine)
    frozen = x.copy()
    frozen.setflags(write=False)
    for same in (
        frozen,
        x.astype(">i2"),
        np.asfortranarray(x),
        x[:, ::-1][:, ::-1],
        np.repeat(x, 2, axis=0)[::2],
        (x / 32_768).astype(np.float32),
        x / 32_768,
        (x / 32_768).tolist(),
        np.frombuffer(x.tobytes(), np.int16).reshape(x.shape),
    ):
        assert np.array_equal(log_mel(np.asarray(same), spec, engine=engine), right)
    assert np.array_equal(x, frozen), "samples are not written to"


@each("engine", CPU_ENGINES)
@each("dtype", [np.int32, np.int64, np.uint8, np.uint16, np.bool_, np.complex128, object])
def test_log_mel_refuses_numbers_of_unknown_scale(engine: str, dtype: Any) -> None:
    spec = MelSpec.preset("disjoint", duration_s=0.5)
    with raises("sample-type", SpecError):
        log_mel(np.ones((1, spec.n_samples)).astype(dtype), spec, engine=engine)


def test_log_mel_refuses_another_length() -> None:
    spec = MelSpec.preset("disjoint", duration_s=0.5)
    for bad in (
        np.zeros(spec.n_samples - 1, np.int16),
        np.zeros((spec.n_samples, 2), np.int16),
        np.int16(3),
        np.zeros(0, np.int16),
    ):
        with raises("other-length", SpecError):
            log_mel(bad, spec)  # type: ignore[arg-type]
    with raises("other-length", SpecError):
        reference_log_mel(np.zeros(5), spec)
    with raises("unknown-engine", UsageError):
        log_mel(np.zeros(spec.n_samples), spec, engine="quick")


# -- what others define -----------------------------------------------------------------------------------------------------

FILTERS = [
    (4096, 512, 64, 0.0, 2048.0),
    (8000, 512, 40, 20.0, 4000.0),
    (51_200, 2048, 80, 10.0, 20_000.0),
    (4096, 400, 24, 100.0, 1900.0),
]
scales = each(("scale", "norm"), [("htk", None), ("htk", "slaney"), ("slaney", None), ("slaney", "slaney")])


def filters(*values: Any) -> Any:
    "The settings of a filter bank alone, in the order of the tables of this file."
    names = ("sample_rate", "n_fft", "n_mels", "f_min_hz", "top_hz", "mel_scale", "mel_norm")
    return SimpleNamespace(**dict(zip(names, values, strict=True)))


@scales
@each(("rate", "n_fft", "n_mels", "low", "high"), FILTERS)
def test_filterbank_of_librosa(
    rate: int, n_fft: int, n_mels: int, low: float, high: float, scale: Any, norm: Any
) -> None:
    librosa_filters = pytest.importorskip("librosa.filters")
    theirs = librosa_filters.mel(
        sr=rate,
        n_fft=n_fft,
        n_mels=n_mels,
        fmin=low,
        fmax=high,
        htk=scale == "htk",
        norm=norm,
        dtype=np.float64,
    )
    ours = mel_filterbank(filters(rate, n_fft, n_mels, low, high, scale, norm))
    assert np.abs(ours - theirs.T).max() < 1e-9


@scales
@each(("rate", "n_fft", "n_mels", "low", "high"), FILTERS)
def test_filterbank_of_torchaudio(
    rate: int, n_fft: int, n_mels: int, low: float, high: float, scale: Any, norm: Any
) -> None:
    if find_spec("torchaudio") is None:
        pytest.skip("torchaudio is not installed here")
    from leakmel.mel.torch_engine import import_torchaudio

    melscale_fbanks = import_torchaudio().functional.melscale_fbanks
    theirs = melscale_fbanks(n_fft // 2 + 1, low, high, n_mels, rate, norm, scale).numpy()
    ours = mel_filterbank(filters(rate, n_fft, n_mels, low, high, scale, norm))
    assert np.abs(ours - theirs).max() < 2e-4 * ours.max()  # theirs is float32 all the way


@pytest.mark.slow
@scales
@each("power", [1.0, 2.0])
def test_segments_by_librosa(power: float, scale: Any, norm: Any) -> None:
    "A short segment of several frames, not centred: librosa's melspectrogram, in float64."
    feature = pytest.importorskip("librosa.feature")
    spec = MelSpec(
        duration_s=1, hop_length=64, n_fft=256, n_mels=30, mel_scale=scale, mel_norm=norm, power=power
    )
    x = np.random.default_rng(2).normal(0, 0.1, spec.n_samples)
    ours = reference_log_mel(x, spec)
    for i, j in ((0, 0), (1, 1), (3, 0)):
        piece = x[i * 1024 + j * 512 :][:512]
        theirs = feature.melspectrogram(
            y=piece,
            sr=4096,
            n_fft=256,
            hop_length=64,
            window="hann",
            center=False,
            power=power,
            n_mels=30,
            fmin=0.0,
            fmax=2048.0,
            htk=scale == "htk",
            norm=norm,
            dtype=np.float64,
        )
        assert (
            np.abs(20 / power * np.log10(np.maximum(theirs, 1e-10)) - ours[i, j]).max() < 1e-4
        )  # librosa's filters are float32


# -- the tolerance can fail ---------------------------------------------------------------------------------------------------


def realistic_noise(spec: MelSpec) -> np.ndarray:
    "Coloured noise with a hum and a quiet stretch, [N] float64."
    rng = np.random.default_rng(11)
    white = rng.normal(0, 0.05, spec.n_samples)
    x = np.convolve(white, [0.3, 0.5, 0.9, 0.4], "same") + 0.02 * np.sin(
        2 * np.pi * 50 * np.arange(spec.n_samples) / spec.sample_rate
    )
    x[-spec.n_samples // 4 :] = 0
    return x


def symmetric_window(x: np.ndarray, spec: MelSpec, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    "Features with the window that divides by n - 1."
    monkeypatch.setattr(spec_module, "hann_periodic", np.hanning)
    return reference_log_mel(x, spec)


def by_spec(**changes: Any) -> Callable[[np.ndarray, MelSpec, pytest.MonkeyPatch], np.ndarray]:
    "Features by a spec that differs."
    return lambda x, spec, _: reference_log_mel(x, replace(spec, **changes))


def by_features(
    change: Callable[[np.ndarray], np.ndarray],
) -> Callable[[np.ndarray, MelSpec, pytest.MonkeyPatch], np.ndarray]:
    "Right features, changed afterwards."
    return lambda x, spec, _: change(reference_log_mel(x, spec))


SABOTAGE: dict[str, Callable[[np.ndarray, MelSpec, pytest.MonkeyPatch], np.ndarray]] = {
    "symmetric window": symmetric_window,
    "other mel scale": by_spec(mel_scale="slaney", n_mels=32, f_min_hz=0),
    "other norm": lambda x, s, _: reference_log_mel(x, replace(s, mel_norm=None if s.mel_norm else "slaney")),
    "power swapped": lambda x, s, _: reference_log_mel(x, replace(s, power=3 - s.power)),
    "shift by one sample": lambda x, s, _: reference_log_mel(np.roll(x, 1), s),
    "int16 scale by 32,767": lambda x, s, _: reference_log_mel(x * 32_768 / 32_767 * 1.003, s),
    "upper corner 5 Hz lower": by_spec(f_max_hz=2043),
    "dropped floor": by_spec(floor=1e-30),
    "higher floor": by_spec(floor=1e-4),
    "gain of 0.01 dB": by_features(lambda f: f + 0.01),
    "clip 80 dB under the maximum": by_features(lambda f: np.maximum(f, f.max() - 80)),
    "rounded to 8 bits": by_features(lambda f: torch.from_numpy(f).to(torch.bfloat16).double().numpy()),
    "one value off by 0.2 dB": by_features(lambda f: _nudge(f, 0.2)),
    "one NaN": by_features(lambda f: _nudge(f, np.nan)),
    "one infinity": by_features(lambda f: _nudge(f, np.inf)),
    "zeros": by_features(np.zeros_like),
    "shift by one long segment": by_features(lambda f: np.roll(f, 1, axis=0)),
    "shift by one mel": by_features(lambda f: np.roll(f, 1, axis=-2)),
    "two short segments swapped": by_features(lambda f: f[:, ::-1]),
}


def _nudge(f: np.ndarray, by: float) -> np.ndarray:
    "One value changed."
    f = f.copy()
    f[1, 1, 7, 0] += by
    return f


@each("preset", PRESETS)
@each("fault", SABOTAGE)
def test_the_tolerance_can_fail(preset: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MelSpec.preset(preset, duration_s=10, n_mels=32)
    x = realistic_noise(spec)
    right = reference_features(x, spec)
    assert compare(right.db.astype(np.float16), right, spec).ok, "honest rounding is right"
    with np.errstate(over="ignore"):
        wrong = SABOTAGE[fault](x, spec, monkeypatch).astype(np.float16)
    verdict = compare(wrong, right, spec)
    assert not verdict.ok, verdict


def test_a_wrong_value_is_counted_and_measured() -> None:
    spec = MelSpec.preset("disjoint", duration_s=1)
    right = reference_features(realistic_noise(spec), spec)
    verdict = compare(_nudge(right.db, 0.5), right, spec)
    assert verdict.n_wrong == 1
    assert verdict.max_abs_db == pytest.approx(0.5)


def test_each_recording_is_judged_alone() -> None:
    "A wrong recording does not change the figures of the others; values that are not finite are wrong."
    spec = MelSpec.preset("disjoint", duration_s=1)
    right = reference_features(realistic_noise(spec), spec)
    rows = [right.db, _nudge(right.db, 0.5), _nudge(right.db, np.nan), _nudge(right.db, -np.inf)]
    bounds = Bounds(*(np.stack([x] * len(rows)) for x in bounds_of(right, spec)))
    verdicts = compare_each(np.stack(rows).astype(np.float32), bounds)
    for verdict, row in zip(verdicts, rows, strict=True):
        alone = compare(row.astype(np.float32), right, spec)
        assert replace(verdict, mean_db=0) == replace(alone, mean_db=0)
        assert verdict.mean_db == pytest.approx(alone.mean_db, abs=1e-12)
    assert [v.n_wrong for v in verdicts] == [0, 1, 1, 1]
    assert all(v.max_abs_db < 1e-4 for v in (verdicts[0], *verdicts[2:])), "only finite values are measured"


def test_the_window_is_periodic() -> None:
    for n in (2, 5, 400, 512):
        assert np.allclose(
            hann_periodic(n), torch.hann_window(n, periodic=True, dtype=torch.float64).numpy(), atol=1e-15
        )


# -- MelSpec: refusals -----------------------------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "mels as text": ({"n_mels": "64"}, "spec-type"),
    "mels as float": ({"n_mels": 64.0}, "spec-type"),
    "mels as bool": ({"n_mels": True}, "spec-type"),
    "no mels": ({"n_mels": 0}, "spec-range"),
    "negative hop": ({"hop_length": -1}, "spec-range"),
    "no rate": ({"sample_rate": 0}, "spec-range"),
    "rate as float": ({"sample_rate": 4096.0}, "spec-type"),
    "duration 0": ({"duration_s": 0}, "spec-range"),
    "negative duration": ({"duration_s": -1}, "spec-range"),
    "duration NaN": ({"duration_s": float("nan")}, "spec-type"),
    "duration infinite": ({"duration_s": float("inf")}, "spec-type"),
    "duration None": ({"duration_s": None}, "spec-type"),
    "endless duration": ({"duration_s": 1e306}, "spec-range"),
    "floor 0": ({"floor": 0}, "spec-range"),
    "floor negative": ({"floor": -1e-10}, "spec-range"),
    "floor below float32": ({"floor": 1e-40}, "spec-range"),
    "f_max above half the rate": ({"f_max_hz": 2049}, "band-limits"),
    "f_max below f_min": ({"f_min_hz": 900, "f_max_hz": 800}, "band-limits"),
    "f_min negative": ({"f_min_hz": -1}, "band-limits"),
    "f_min as text": ({"f_min_hz": "0"}, "spec-type"),
    "empty band": ({"n_mels": 400}, "empty-mel-band"),
    "more mels than bins": ({"n_mels": 5000}, "empty-mel-band"),
    "absurdly many mels": ({"n_mels": 10**12}, "empty-mel-band"),
    "power 3": ({"power": 3}, "spec-choice"),
    "unknown scale": ({"mel_scale": "bark"}, "spec-choice"),
    "unknown norm": ({"mel_norm": "area"}, "spec-choice"),
    "unknown channels": ({"channels": "left"}, "spec-choice"),
    "unknown rate rule": ({"rate": "drop"}, "spec-choice"),
    "list for a scale": ({"mel_scale": ["htk"]}, "spec-choice"),
}


@each("name", REFUSALS)
def test_invalid_values_are_refused(name: str) -> None:
    changes, code = REFUSALS[name]
    with raises(code, SpecError):
        MelSpec(**changes)


NO_PLACE: dict[str, tuple[dict[str, Any], str]] = {
    "window longer than the segment": ({"n_fft": 1024}, "no frame fits"),
    "segment longer than the recording": ({"duration_s": 0.1}, "no long segment fits"),
    "short longer than long": ({"short_window": 2048}, "no short segment fits"),
}


@each("name", NO_PLACE)
def test_segments_longer_than_the_recording_are_refused(name: str) -> None:
    changes, part = NO_PLACE[name]
    with pytest.raises(SpecError, match=part):
        MelSpec(**changes)


valid_geometry = st.fixed_dictionaries(
    {
        "sample_rate": st.sampled_from([292, 4096, 8000, 48_000, 51_200]),
        "n_mels": st.integers(1, 700),
        "mel_scale": st.sampled_from(["htk", "slaney"]),
        "n_fft": st.sampled_from([16, 64, 256, 400, 512]),
        "f_min_hz": st.sampled_from([0, 1, 20, 100]),
    }
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(valid_geometry)
def test_spec_or_its_proposed_remedy_works(values: dict[str, Any]) -> None:
    try:
        spec = MelSpec(**values)
    except SpecError as e:
        text = str(e)
        if e.code != "empty-mel-band":
            raise
        if "n_mels=" not in text:  # not even one band fits
            with pytest.raises(SpecError):
                MelSpec(**values | {"n_mels": 1})
            return
        spec = MelSpec(**values | {"n_mels": int(text.split("n_mels=")[1].split()[0])})
        assert spec.n_mels < values["n_mels"]
    assert (spec.filterbank.max(axis=0) > 0).all()
    assert spec.filterbank.shape == (spec.n_fft // 2 + 1, spec.n_mels)


# -- MelSpec: identity -------------------------------------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "sample_rate": 8000,
    "duration_s": 9.0,
    "long_window": 2048,
    "long_hop": 512,
    "short_window": 600,
    "short_hop": 256,
    "n_fft": 256,
    "hop_length": 64,
    "n_mels": 32,
    "f_min_hz": 10.0,
    "f_max_hz": 2000.0,
    "mel_scale": "slaney",
    "mel_norm": "slaney",
    "power": 2.0,
    "floor": 1e-9,
    "channels": "first",
    "short": "reject",
    "long": "reject",
    "rate": "reject",
}


def test_every_field_has_a_test_value() -> None:
    assert set(CHANGES) == {f.name for f in fields(MelSpec)} - {"preset_name"}


@each("name", CHANGES)
def test_the_fingerprint_changes_with_every_field(name: str) -> None:
    base = MelSpec(n_fft=512, n_mels=20)
    if name == "n_fft":
        base = replace(base, n_mels=20)
    assert replace(base, **{name: CHANGES[name]}).fingerprint() != base.fingerprint()
    assert base.fingerprint("torch@1/cpu") != base.fingerprint("torch@2/cpu") != base.fingerprint()


may_change = {
    name: [value, getattr(MelSpec(), name)]
    for name, value in CHANGES.items()
    if name not in ("n_mels", "n_fft")
}
values = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(both) for name, both in may_change.items()}
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(values, values)
def test_equal_specs_have_equal_fingerprints_and_others_do_not(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    a, b = MelSpec(n_mels=20, **one), MelSpec(n_mels=20, **other)
    assert (a == b) == (a.fingerprint() == b.fingerprint())
    assert (a == b) <= (hash(a) == hash(b))
    back = spec_from_dict(json.loads(json.dumps(a.to_dict())))
    assert back == a
    assert back.fingerprint() == a.fingerprint()
    assert back.preset_name == a.preset_name


def test_the_same_number_in_another_type_is_the_same_spec() -> None:
    same = MelSpec(sample_rate=np.int64(4096), duration_s=10, power=1, f_min_hz=-0.0, floor=np.float64(1e-10))  # type: ignore[arg-type]
    assert same == MelSpec()
    assert same.fingerprint() == MelSpec().fingerprint()
    assert json.dumps(same.to_dict()) == json.dumps(MelSpec().to_dict())


def test_the_fingerprint_does_not_depend_on_the_preset() -> None:
    assert MelSpec.preset("disjoint@1").fingerprint() == MelSpec().fingerprint()
    assert MelSpec.preset("disjoint@1") == MelSpec()


def test_a_spec_cannot_be_changed() -> None:
    spec = MelSpec()
    with pytest.raises(FrozenInstanceError):
        spec.n_mels = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        spec.filterbank[0] = 1


# -- presets -----------------------------------------------------------------------------------------------------------------------


def test_the_presets_are_those_of_the_design() -> None:
    disjoint, overlap = MelSpec.preset("disjoint"), MelSpec.preset("overlap")
    assert (disjoint.row_shape, overlap.row_shape) == ((40, 2, 64, 1), (79, 3, 32, 1))
    for spec in (disjoint, overlap):
        assert (spec.sample_rate, spec.duration_s, spec.n_samples, spec.n_fft, spec.hop_length) == (
            4096,
            10.0,
            40_960,
            512,
            128,
        )
        assert (spec.f_min_hz, spec.top_hz, spec.floor, spec.mel_scale) == (0.0, 2048.0, 1e-10, "htk")
        assert (spec.channels, spec.short, spec.long, spec.rate) == ("mean", "pad", "cut", "resample")
    assert (disjoint.mel_norm, disjoint.power, overlap.mel_norm, overlap.power) == (None, 1.0, "slaney", 2.0)
    assert (disjoint.preset_name, overlap.preset_name) == ("disjoint@2", "overlap@2")
    assert MelSpec.preset_names() == ("disjoint@2", "overlap@2")


def test_a_name_without_a_version_means_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (9, 10):
        monkeypatch.setitem(spec_module.PRESETS, f"disjoint@{version}", {"n_mels": version})
    assert MelSpec.preset("disjoint").n_mels == 10
    assert MelSpec.preset("disjoint@1").n_mels == 64


def test_unknown_presets_and_settings() -> None:
    with raises("unknown-preset", SpecError, expected="disjoint@2, overlap@2"):
        MelSpec.preset("joint")
    with raises("unknown-preset", SpecError, found="'disjoint@7'"):
        MelSpec.preset("disjoint@7")
    with raises("unknown-spec-setting", SpecError, says=" n_mel;"):
        MelSpec.preset("disjoint", n_mel=3)
    with raises("unknown-spec-setting", SpecError, says="preset_name"):
        MelSpec.preset("disjoint", preset_name="mine")
    with raises("unknown-spec-setting", SpecError, says="mystery"):
        spec_from_dict(MelSpec().to_dict() | {"mystery": 1})


def test_the_repr_is_one_line() -> None:
    for name in PRESETS:
        assert "\n" not in repr(MelSpec.preset(name))
    assert "disjoint@2" in repr(MelSpec.preset("disjoint"))
