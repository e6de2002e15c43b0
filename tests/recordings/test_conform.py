"Conforming one recording: every rule, the status it reports, and the resampler compared with analytic tones."

import itertools
import math
import sys
import tracemalloc
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import scipy.signal
from each import each
from errors import raises

from leakmel.core.errors import REJECT_CODES, MachineError, RecordingError
from leakmel.recordings import conform as conform_module
from leakmel.recordings.conform import (
    ConformRules,
    channel_mean,
    conform,
    fit_length,
    opposite_phase,
    to_mono,
    to_rate,
)

pytestmark = pytest.mark.quick

RATE, N = 4096, 4096


def rules(**changes: Any) -> ConformRules:
    "One second at 4,096 Hz."
    return replace(ConformRules(RATE, N), **changes)


def noise(n: int, channels: int = 1, seed: int = 0) -> np.ndarray:
    "Noise [n, C] int16."
    return np.random.default_rng(seed).integers(-9000, 9000, (n, channels), dtype=np.int16)


# -- what is written down -------------------------------------------------------------------------------------------------

STATUSES: dict[str, tuple[np.ndarray, int]] = {
    "ok": (noise(N), RATE),
    "padded": (noise(N - 1), RATE),
    "cut": (noise(N + 1), RATE),
    "identical_channels": (np.repeat(noise(N), 2, 1), RATE),
    "identical_channels+cut": (np.repeat(noise(N + 9), 64, 1), RATE),
    "identical_channels+resampled+padded": (np.repeat(noise(N), 2, 1), 8000),
    "downmixed": (noise(N, 2), RATE),
    "downmixed+cut": (noise(N + 7, 3), RATE),
    "downmixed+padded": (noise(5, 2), RATE),
    "downmixed+resampled": (noise(8000, 2), 8000),
    "downmixed+resampled+cut": (noise(8 * N, 2), 8000),
    "downmixed+opposite_phase": (noise(N) * np.array([[1, -1]], np.int16), RATE),
    "downmixed+opposite_phase+resampled+padded": (noise(N) * np.array([[1, -1]], np.int16), 8000),
    "resampled": (noise(2 * N), 2 * RATE),
    "resampled+padded": (noise(N), 2 * RATE),
    "resampled+cut": (noise(N), RATE // 2 + 1),
}


@each("use_compiled", [False, True])
@each("status", STATUSES)
def test_statuses(status: str, use_compiled: bool) -> None:
    samples, rate = STATUSES[status]
    before = samples.copy()
    row, output = conform(samples, rate, rules(), use_compiled=use_compiled)
    assert output == status
    assert row.shape == (N,)
    assert np.array_equal(samples, before), "the recording itself is left alone"
    changed = "downmixed" in status or "resampled" in status
    assert row.dtype == (np.float32 if changed else np.int16), (
        "16 bits stay 16 bits where no number was changed"
    )


@each("n", [N - 100, N, N + 100])
@each("dtype", [np.int16, np.float32])
def test_matching_recordings_are_unchanged(n: int, dtype: type) -> None:
    samples: np.ndarray = noise(n).astype(dtype)
    row, _ = conform(samples, RATE, rules())
    shared = min(n, N)
    assert row.dtype == dtype
    assert np.array_equal(row[:shared], samples[:shared, 0])
    assert not row[shared:].any()


REJECTED: dict[str, tuple[np.ndarray, int, dict[str, str], str]] = {
    "wrong_rate": (noise(N), 8000, {"rate": "reject"}, "recorded at 8000 Hz, 5000 Hz are asked for"),
    "too_short": (noise(N - 1), 5000, {"short": "reject"}, "4095 samples, 4096 are asked for"),
    "too_long": (noise(N + 1), 5000, {"long": "reject"}, "4097 samples, 4096 are asked for"),
}


@each("code", REJECTED)
def test_rejections(code: str) -> None:
    samples, rate, changes, output = REJECTED[code]
    asked = rules(sample_rate=5000, **changes)  # another number than that of the samples
    with pytest.raises(RecordingError) as caught:
        conform(samples, rate, asked)
    assert caught.value.reject_code == code
    assert code in REJECT_CODES
    assert caught.value.message == output, "the message says what was found and what was asked for"
    assert conform(samples, rate, rules())[0].shape == (N,), "the other rule takes it"


def test_length_is_checked_at_the_target_rate() -> None:
    strict = rules(short="reject", long="reject")
    assert conform(noise(8000), 8000, strict)[1] == "resampled"
    with pytest.raises(RecordingError) as caught:
        conform(noise(7990), 8000, strict)
    assert caught.value.reject_code == "too_short"


# -- channels ---------------------------------------------------------------------------------------------------------------


def test_mean_and_first() -> None:
    stereo = noise(100, 2)
    mean, output = to_mono(stereo, "mean")
    assert output == "downmixed"
    assert np.array_equal(mean, (stereo.astype(np.float64).mean(axis=1) / 32_768).astype(np.float32))
    first, output = to_mono(stereo, "first")
    assert (output, first.dtype) == ("downmixed", np.int16)
    assert np.array_equal(first, stereo[:, 0])


@each("n_channels", [2, 3, 5, 8, 9, 64])
@each("rule", ["mean", "first"])
def test_compiled_code_mixes_channels_to_the_same_bits(
    n_channels: int, rule: Literal["mean", "first"]
) -> None:
    x = np.random.default_rng(n_channels).integers(-32_768, 32_768, (N, n_channels)).astype(np.int16)
    one_differs = np.repeat(x[:, :1], n_channels, axis=1)
    one_differs[-1, -1] ^= 1
    cancelled = x.copy()
    cancelled[:, -1] = np.clip(-x[:, :-1].astype(int).sum(axis=1), -32_768, 32_767)
    outputs = set()
    for samples in (x, one_differs, cancelled, np.full_like(x, -32_768), x[:1], x[::3], np.asfortranarray(x)):
        rows = [to_mono(samples, rule, use_compiled=compiled) for compiled in (False, True)]
        assert rows[0][1] == rows[1][1]
        assert rows[0][0].dtype == rows[1][0].dtype
        assert rows[0][0].tobytes() == rows[1][0].tobytes()
        outputs.add(rows[0][1])
    assert outputs >= {"downmixed", "identical_channels"}


def test_the_mean_of_floats_is_taken_in_float64() -> None:
    x = np.array([[1.0, 2**-30, -1.0]], np.float32)
    assert to_mono(x, "mean")[0][0] == np.float32(2**-30 / 3)
    assert to_mono(x, "mean")[0].dtype == np.float32


def test_mean_of_opposite_channels_is_silent() -> None:
    x = noise(N)
    row, output = conform(np.concatenate([x, -x], axis=1), RATE, rules())
    assert output == "downmixed+opposite_phase"
    assert row.dtype == np.float32
    assert not row.any()
    first, output = conform(np.concatenate([x, -x], axis=1), RATE, rules(channels="first"))
    assert output == "downmixed+opposite_phase", "said under either rule"
    assert np.array_equal(first, x[:, 0])


def share(samples: np.ndarray) -> float:
    "Energy of the channels' mean over their mean energy, as Python's whole and floating numbers give it."
    rows = [[float(v) for v in frame] for frame in samples]
    return math.fsum((math.fsum(r) / len(r)) ** 2 for r in rows) / (
        math.fsum(v * v for r in rows for v in r) / len(rows[0])
    )


@pytest.mark.slow
@each("dtype", [np.int16, np.float32])
@each("n_channels", [2, 3, 8, 64])
def test_opposite_phase_is_flagged_below_one_percent_of_the_energy(dtype: type, n_channels: int) -> None:
    "Channels that cancel but for a growing common part: the flag goes at 1 % of the energy, and nowhere else."
    own = np.random.default_rng(2).normal(0, 3000, (N, n_channels))
    own -= own.mean(axis=1, keepdims=True)
    common, seen = np.random.default_rng(3).normal(0, 1, (N, 1)), set()
    for level in (0, 100, 200, 280, 290, 295, 310, 320, 400, 3000):
        x = (
            np.clip(np.round(own + level * common), -32_768, 32_767).astype(dtype)
            if dtype == np.int16
            else ((own + level * common) / 32_768).astype(dtype)
        )
        assert opposite_phase(x) == (share(x) < 0.01), level
        output = "downmixed+opposite_phase" if share(x) < 0.01 else "downmixed"
        assert to_mono(x, "mean", use_compiled=True)[1] == output
        seen.add(opposite_phase(x))
    assert seen == {True, False}


def test_silence_and_one_channel_are_not_opposite() -> None:
    assert not opposite_phase(np.zeros((N, 2), np.int16))
    assert not opposite_phase(noise(N))
    assert not opposite_phase(noise(N, 64)), (
        "64 channels that have nothing to do with each other lie 18 dB below"
    )
    assert opposite_phase(np.array([[-32_768, 32_767]] * N, np.int16)), "sums do not wrap around"
    assert opposite_phase(np.array([[1e30, -1e30]] * N, np.float32))
    half_dead = noise(N, 2)
    half_dead[:, 1] = 0
    assert to_mono(half_dead, "mean")[1] == "downmixed"


@each("n_channels", [1, 2, 3, 5, 8, 9, 64])
def test_mean_of_channels_has_the_bits_of_numpy(n_channels: int) -> None:
    rng = np.random.default_rng(n_channels)
    for x in (
        rng.integers(-32_768, 32_768, (N, n_channels)).astype(np.int16),
        np.full((N, n_channels), -32_768, np.int16),
        np.full((N, n_channels), -0.0, np.float32),
        (rng.normal(size=(N, n_channels)) * 10.0 ** rng.integers(-30, 30, (N, n_channels))).astype(
            np.float32
        ),
    ):
        mean = channel_mean(x)
        assert mean.dtype == np.float64
        assert np.array_equal(mean.view(np.int64), x.mean(axis=1, dtype=np.float64).view(np.int64))


def test_mono_recordings_are_never_flagged_as_opposite(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*given: np.ndarray) -> bool:
        raise AssertionError("a cost for every mono file")

    monkeypatch.setattr(conform_module, "opposite_phase", looked)
    assert conform(noise(N), RATE, rules())[1] == "ok"
    assert conform(np.repeat(noise(N), 2, 1), RATE, rules())[1] == "identical_channels"
    with pytest.raises(AssertionError):
        conform(noise(N, 2), RATE, rules())


def test_extremes_do_not_wrap_around() -> None:
    loud = np.array([[32_767, 32_766], [-32_768, -32_767]], np.int16)
    assert np.allclose(to_mono(loud, "mean")[0] * 32_768, [32_766.5, -32_767.5], atol=0.01)


def test_one_differing_sample_makes_channels_different() -> None:
    x = np.repeat(noise(N), 2, axis=1)
    assert to_mono(x, "mean")[1] == "identical_channels"
    x[N - 1, 1] += 1
    assert to_mono(x, "mean")[1] == "downmixed"


# -- rate -------------------------------------------------------------------------------------------------------------------

PAIRS = [
    (8000, 4096),
    (48_000, 4096),
    (44_100, 4096),
    (51_200, 4096),
    (292, 4096),
    (4096, 8000),
    (4095, 4096),
    (4096, 292),
    (11_025, 8000),
]


@each(("source", "target"), PAIRS)
def test_resampling_keeps_frequency_phase_and_level_of_tones(source: int, target: int) -> None:
    "Away from the ends a tone keeps frequency and phase, nothing is added, and its level changes by less than 0.01 dB up to 0.84 of half the rate."
    for share, loss in ((0.02, 1e-6), (0.1, 1e-6), (0.2, 1e-5), (0.42, 1e-3)):
        hz = share * min(source, target)
        got = to_rate(
            (0.5 * np.sin(2 * np.pi * hz * np.arange(2 * source) / source + 0.4)).astype(np.float32),
            source,
            target,
        ).astype(np.float64)
        assert len(got) == 2 * target
        inner = slice(target // 2, -target // 2)
        turns = 2 * np.pi * hz * np.arange(2 * target)[inner] / target + 0.4
        basis = np.stack([np.sin(turns), np.cos(turns)], axis=1)
        (in_phase, quadrature), *_ = np.linalg.lstsq(basis, got[inner])
        assert abs(in_phase / 0.5 - 1) < loss, hz
        assert abs(quadrature / 0.5) < 1e-6, hz
        assert np.abs(got[inner] - basis @ [in_phase, quadrature]).max() < 3e-7, hz


@each("source", [8000, 48_000, 51_200])
def test_resampling_removes_frequencies_above_the_new_nyquist(source: int) -> None:
    t = np.arange(2 * source) / source
    for hz in (2200, 2600, 3900):
        got = to_rate((0.5 * np.sin(2 * np.pi * hz * t)).astype(np.float32), source, RATE)
        assert np.abs(got[1000:-1000]).max() < 1e-6, "120 dB down: nothing is wrap_text back"


@each(("source", "target"), [(8000, 4096), (12_288, 4096), (2048, 4096)])
def test_resampler_agrees_with_scipy(source: int, target: int) -> None:
    "A long windowed sinc by scipy, on noise that leaves room for both filters' slopes."
    rng = np.random.default_rng(1)
    spectrum = np.fft.rfft(rng.normal(0, 0.1, 4 * source))
    spectrum[int(0.35 * min(source, target)) * 4 :] = 0
    x = np.fft.irfft(spectrum).astype(np.float32)
    common = np.gcd(source, target)
    up, down = target // common, source // common
    taps = scipy.signal.firwin(2 * 400 * max(up, down) + 1, 1 / max(up, down), window=("kaiser", 14.0))
    theirs = scipy.signal.resample_poly(x.astype(np.float64), up, down, window=taps)
    ours = to_rate(x, source, target)
    assert len(ours) == len(theirs)
    assert (
        np.abs(ours - theirs)[1000:-1000].max() < 1e-4 * np.abs(theirs).max()
    )  # soxr's slope begins early and softly


@each(("source", "target"), PAIRS)
@each("n", [1, 2, 3, 99, 1000, 4097])
def test_resampled_length_follows_the_ratio_of_rates(source: int, target: int, n: int) -> None:
    got = to_rate(noise(n)[:, 0], source, target)
    assert len(got) == int(np.floor(n * target / source + 0.5))
    assert got.dtype == np.float32
    assert np.isfinite(got).all()


@each("source", [292, 8000, 11_025, 44_100, 51_200])
def test_cutting_before_resampling_changes_no_bit(source: int) -> None:
    x = noise(40 * source)
    row, status = conform(x, source, rules())
    assert status == "resampled+cut"
    assert np.array_equal(row, to_rate(x[:, 0], source, RATE)[:N])


@pytest.mark.parametrize("long", ["cut", "reject"])
def test_wrong_rate_in_the_header_takes_no_memory(long: Literal["cut", "reject"]) -> None:
    x = noise(40_960)
    tracemalloc.start()
    if long == "cut":
        assert conform(x, 1, rules(long=long))[1] == "resampled+cut"
    else:
        with pytest.raises(RecordingError, match="167772160 samples"):
            conform(x, 1, rules(long=long))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6


def test_16_bits_and_the_same_numbers_as_floats_give_the_same_bits() -> None:
    x = noise(8000)
    whole, wide = (conform(v, 8000, rules())[0] for v in (x, (x / np.float32(32_768)).astype(np.float32)))
    assert np.array_equal(whole, wide)


def test_missing_soxr_is_an_error_without_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    with raises("missing-package", MachineError, says="soxr"):
        conform(noise(N), 8000, rules())
    assert conform(noise(N), RATE, rules())[1] == "ok", "needed only where a rate is converted"


# -- all together --------------------------------------------------------------------------------------------------------------


def test_every_combination_gives_a_row_or_a_reason() -> None:
    sources = [
        (n, c, rate, dtype)
        for n in (1, N - 1, N, 3 * N)
        for c in (1, 2)
        for rate in (RATE, 8000)
        for dtype in (np.int16, np.float32)
    ]
    choices = itertools.product(
        ("mean", "first"), ("pad", "reject"), ("cut", "reject"), ("resample", "reject")
    )
    for channels, short, long, rate_rule in choices:
        for n, c, rate, dtype in sources:
            x = noise(n, c).astype(dtype) if dtype == np.int16 else (noise(n, c) / 32_768).astype(dtype)
            wanted = rules(channels=channels, short=short, long=long, rate=rate_rule)
            length = (2 * n * RATE + rate) // (2 * rate)
            if (
                (rate != RATE and rate_rule == "reject")
                or (length < N and short == "reject")
                or (length > N and long == "reject")
            ):
                with pytest.raises(RecordingError):
                    conform(x, rate, wanted)
                continue
            row, status = conform(x, rate, wanted)
            assert row.shape == (N,)
            assert row.dtype in (np.int16, np.float32)
            assert set(status.split("+")) <= {
                "ok",
                "padded",
                "cut",
                "resampled",
                "downmixed",
                "identical_channels",
                "opposite_phase",
            }
            assert np.abs(row.astype(np.float64)).max() <= (32_768 if row.dtype == np.int16 else 1.2)


def test_fit_length() -> None:
    x = np.arange(5, dtype=np.int16)
    assert fit_length(x, 3).tolist() == [0, 1, 2]
    assert fit_length(x, 7).tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert fit_length(x, 7).dtype == np.int16
