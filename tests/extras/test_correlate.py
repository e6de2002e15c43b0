"""Correlation of two loggers on synthetic pairs: delay, interval, verdicts, refusals, figure, command."""

import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError

pytest.importorskip("scipy")
import soundfile
from scipy import signal
from scipy.stats import binom

from leakmel.extras.locate.correlate import METHODS, correlogram, cross_spectra, synthetic_pair
from leakmel.extras.locate.sections import SHARES

correlate: Any = lm.correlate  # positions and limits may be None
PIPE: dict[str, Any] = {"distance_m": 120.0, "speed_m_s": 1200.0}
EXACT: dict[str, Any] = PIPE | {"speed_error_m_s": 0.0, "distance_error_m": 0.0}


def channel(pair: lm.Recording, k: int) -> lm.Recording:
    """Return one logger of a pair."""
    return replace(pair, samples=pair.samples[:, [k]])


def write(path: Path, recording: lm.Recording) -> Path:
    """Write a recording as a WAV file of float samples."""
    soundfile.write(path, recording.samples, recording.sample_rate, subtype="FLOAT")
    return path


# ---- delay and position


@each("position_m", [20.0, 41.37, 60.0, 97.5])
def test_delay_is_exact_to_a_tenth_of_a_sample(position_m: float) -> None:
    found = correlate(synthetic_pair(position_m=position_m, snr_db=30.0), **PIPE)
    true_s = (2 * position_m - 120) / 1200
    for method in ("phat", "scot", "ml", "phase", "plain"):
        assert abs(found.delays_s[method] - true_s) * 4096 < 0.1, method
    assert found.verdict == "leak"
    assert found.position_m == pytest.approx(position_m, abs=0.02)
    assert found.low_m is not None
    assert found.high_m is not None
    assert found.low_m < position_m < found.high_m


def test_estimates_equal_those_of_scipy() -> None:
    a, b = synthetic_pair(position_m=35.0, snr_db=6.0).samples.T.astype(float)
    x = cross_spectra(a, b, 4096, 1024, (10.0, 1900.0))
    n = (x.n_segments + 1) * 512
    _, expected = signal.coherence(a[:n], b[:n], 4096, nperseg=1024)
    np.testing.assert_allclose(x.coherence(), expected, rtol=1e-9)
    lags = signal.correlation_lags(len(a), len(b)) / 4096
    by_scipy = lags[signal.correlate(a, b).argmax()]
    for method in METHODS:
        at, values = correlogram(x, method)
        assert abs(at[values.argmax()] - by_scipy) <= 1 / 4096, method
    assert abs(correlate(synthetic_pair(position_m=35.0, snr_db=6.0), **PIPE).delay_s - by_scipy) < 1 / 4096


def test_swapped_loggers_mirror_the_position() -> None:
    pair = synthetic_pair(position_m=30.0, snr_db=3.0)
    one = correlate(pair, **PIPE)
    two = correlate(replace(pair, samples=pair.samples[:, ::-1]), **PIPE)
    assert one.position_m is not None
    assert two.position_m is not None
    assert one.position_m + two.position_m == pytest.approx(120, abs=0.01)
    assert one.low_m == pytest.approx(120 - two.high_m, abs=0.01)


def test_narrow_band_and_opposite_polarity() -> None:
    narrow = correlate(synthetic_pair(position_m=100.0, band_hz=(300, 360)), **PIPE)
    assert narrow.position_m == pytest.approx(100, abs=0.1)
    pair = synthetic_pair(position_m=30.0)
    turned = correlate(replace(pair, samples=pair.samples * np.array([1, -1], np.float32)), **PIPE)
    assert turned.position_m == pytest.approx(30, abs=0.05)
    assert "polarity" in turned.text()


def test_offset_of_the_start_is_taken_into_account() -> None:
    pair = synthetic_pair(position_m=30.0, snr_db=20.0)
    late = replace(pair, samples=pair.samples[1000:, [1]])
    given = PIPE | {"clock_error_s": 0.0, "offset_s": 1000 / 4096 + 1e-4}
    found = correlate(channel(pair, 0), late, **given)
    assert found.delay_s == pytest.approx(-0.05 - 1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("n", [100, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize(("snr_db", "duration_s", "clock_s"), [(0.0, 5.0, 0.0), (5.0, 3.0, 1e-3)])
def test_interval_covers_the_position_as_often_as_it_says(
    snr_db: float, duration_s: float, clock_s: float, n: int
) -> None:
    """With an error of the clocks alone, and of the delay alone (where the larger of two errors may cover more)."""
    rng = np.random.default_rng(5)
    hits = 0
    for seed in range(n):
        given: dict[str, Any] = {"snr_db": snr_db, "duration_s": duration_s, "seed": seed}
        pair = synthetic_pair(position_m=41.3, clock_offset_s=clock_s * rng.standard_normal(), **given)
        found = correlate(pair, clock_error_s=clock_s, **EXACT)
        hits += found.low_m is not None and found.low_m <= 41.3 <= found.high_m
    low, high = binom.interval(0.998, n, 0.95)
    assert low <= hits <= (high if clock_s else n)


def test_errors_add_up() -> None:
    found = correlate(synthetic_pair(position_m=30.0), clock_error_s=0.001, **PIPE)
    parts = {name: value for name, value in found.errors_m.items() if name != "total"}
    assert found.errors_m["total"] == pytest.approx(math.hypot(*parts.values()))
    assert parts["clock"] == pytest.approx(0.6)
    assert parts["speed"] == pytest.approx(0.05 / 2 * 60, rel=1e-2)
    assert parts["distance"] == 0.25
    assert found.high_m - found.low_m == pytest.approx(2 * 1.96 * found.errors_m["total"], rel=0.03)


def test_dispersion_is_noticed() -> None:
    """The phase is no straight line, and the delay lies between those of the slowest and the fastest wave."""
    found = correlate(synthetic_pair(position_m=30.0, snr_db=20.0, dispersion=0.05), **PIPE)
    assert found.verdict == "leak"
    assert found.low_m < 30 < found.high_m
    assert "dispersion" in found.text()
    assert "different rates" in found.text()
    assert -60 / 1200 / 0.9 < found.delay_s < -0.05
    straight = correlate(synthetic_pair(position_m=30.0, snr_db=20.0), **PIPE)
    assert "dispersion" not in straight.text()


# ---- verdicts without a position


@pytest.mark.slow
def test_unrelated_noise_has_no_position() -> None:
    """At most 2 % false alarms are designed; none of the verdicts may be a position more often than 1 %."""
    made = (synthetic_pair(position_m=None, seed=s, duration_s=4.0) for s in range(200))
    verdicts = Counter(correlate(pair, **PIPE).verdict for pair in made)
    assert verdicts["none"] >= 200 - binom.ppf(0.999, 200, 0.02)
    assert verdicts["leak"] + verdicts["outside"] <= binom.ppf(0.999, 200, 0.01)


def recording(*channels: np.ndarray) -> lm.Recording:
    """Return channels as a recording of two loggers."""
    samples = np.stack(channels, axis=1)
    return replace(
        synthetic_pair(position_m=30.0), samples=(0.5 * samples / np.abs(samples).max()).astype(np.float32)
    )


@each("tone_hz", [120.0, 310.0, 700.0])
def test_a_tone_has_no_position(tone_hz: float) -> None:
    found = correlate(synthetic_pair(position_m=30.0, tone_hz=tone_hz), **PIPE)
    assert (found.verdict, found.position_m, found.candidates_m) == ("none", None, ())
    assert "common tones" in found.text()
    assert "common tones" not in correlate(synthetic_pair(position_m=None), **PIPE).text()


def test_a_narrow_band_is_ambiguous() -> None:
    found = correlate(synthetic_pair(position_m=30.0, band_hz=(300, 320)), **PIPE)
    assert found.verdict == "ambiguous"
    assert found.position_m is None
    steps = np.diff(sorted(found.candidates_m)) / (1200 / 2 / 310 / 2)
    assert len(steps)
    assert np.allclose(steps, np.round(steps), atol=0.15)


@pytest.mark.parametrize("loudness", [60, 300])
def test_loud_transients_do_not_hide_a_leak(loudness: float) -> None:
    samples = synthetic_pair(position_m=36.0, snr_db=0.0).samples.astype(float)
    samples /= samples.std(axis=0)
    for k, start in ((0, 9000), (1, 20000)):
        samples[start : start + 400, k] += loudness * np.random.default_rng(k).standard_normal(400)
    assert correlate(recording(*samples.T), **PIPE).position_m == pytest.approx(36, abs=0.05)


def test_a_common_knock_is_no_leak() -> None:
    texts = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        a, b = rng.standard_normal((2, 40960))
        start = 20480 + int(rng.integers(-4000, 4000))
        knock = 60 * np.exp(-np.arange(400) / 40) * rng.standard_normal(400)
        a[start : start + 400] += knock
        delayed = start + int(rng.integers(-350, 350))
        b[delayed : delayed + 400] += knock
        texts.append(correlate(recording(a, b), **PIPE).text())
    assert all(text.startswith("none") for text in texts)
    assert any("a single event" in text for text in texts)


def test_errors_of_clocks_and_speed_do_not_say_outside() -> None:
    found = correlate(synthetic_pair(position_m=40.0), clock_error_s=0.045, **PIPE)
    assert found.verdict == "leak"
    assert found.low_m < 5
    assert "beyond logger a" in found.text()
    assert "beyond" not in correlate(synthetic_pair(position_m=40.0), **PIPE).text()


def test_a_delay_of_zero_may_be_interference() -> None:
    a, b, common = np.random.default_rng(0).standard_normal((3, 40960))
    found = correlate(recording(a + 0.3 * common, b + 0.3 * common), **PIPE)
    assert found.position_m == pytest.approx(60, abs=0.2)
    assert "electrical interference" in found.text()
    assert "interference" not in correlate(synthetic_pair(position_m=57.0), **PIPE).text()


@each("given", [{"distance_m": 1e300}, {"distance_m": 1e12}, {"speed_m_s": 1e-6}])
def test_a_pipe_longer_than_the_recordings(given: dict[str, float]) -> None:
    assert refusal(synthetic_pair(position_m=30.0), **given) == "too-short-to-correlate"


@each("position_m", [-40.0, -1.0, 121.0, 300.0])
def test_a_source_beyond_a_logger_is_outside(position_m: float) -> None:
    found = correlate(synthetic_pair(position_m=position_m), **PIPE)
    assert (found.verdict, found.position_m, found.low_m) == ("outside", None, None)
    assert f"logger {'a' if position_m < 0 else 'b'}" in found.text()


# ---- clocks, start times, hostile input


def refusal(*recordings: Any, **given: Any) -> str:
    """Return the code of the error."""
    with pytest.raises(lm.LeakmelError) as error:
        correlate(*recordings, **(PIPE | given))
    return error.value.code


def test_no_position_without_known_clocks() -> None:
    pair = synthetic_pair(position_m=30.0)
    two = channel(pair, 0), channel(pair, 1)
    assert refusal(*two) == "clocks-unknown"
    assert refusal(*two, clock_error_s=1.0) == "clock-error-too-large"
    assert correlate(*two, clock_error_s=0.0, **PIPE).position_m == pytest.approx(30, abs=0.05)


def test_start_times_in_names(tmp_path: Path) -> None:
    pair = synthetic_pair(position_m=30.0)
    a = write(tmp_path / "A~1~20250101_020000~8.wav", channel(pair, 0))
    b = write(tmp_path / "B~1~20250101_020000~8.wav", channel(pair, 1))
    later = write(tmp_path / "B~2~20250101_030000~8.wav", channel(pair, 1))
    assert correlate(a, b, clock_error_s=0.0, **PIPE).verdict == "leak"
    assert refusal(a, later, clock_error_s=0.0) == "start-times-differ"
    one = write(tmp_path / "H1_20250101_020000T.wav", channel(pair, 0))
    two = write(tmp_path / "SM4_0+1_20250101$020500.wav", channel(pair, 1))
    assert refusal(one, two, clock_error_s=0.0) == "start-times-differ"
    assert correlate(a, later, clock_error_s=0.0, offset_s=0.0, **PIPE).verdict == "leak"
    assert correlate(write(tmp_path / "both.wav", pair), **PIPE).position_m == pytest.approx(30, abs=0.05)


def test_recordings_that_are_silent_in_their_common_time_are_refused() -> None:
    pair = synthetic_pair(position_m=35.0)
    a, b = channel(pair, 0), channel(pair, 1)
    rate = pair.sample_rate
    ends = replace(a, samples=np.where(np.arange(len(a.samples))[:, None] < rate, a.samples, 0))
    with pytest.raises(DataError, match="recording a is silent in the time that both") as e:
        correlate(ends, b, clock_error_s=0.0, offset_s=1.0, **PIPE)
    assert e.value.code == "silent-recording"
    with pytest.raises(DataError, match="both recordings are the same"):
        correlate(a, replace(a, samples=a.samples[rate:]), clock_error_s=0.0, offset_s=1.0, **PIPE)


def test_hostile_recordings(tmp_path: Path) -> None:
    pair = synthetic_pair(position_m=30.0)
    a, b = channel(pair, 0), channel(pair, 1)
    known = partial(refusal, clock_error_s=0.0)
    silent = replace(b, samples=np.zeros_like(b.samples))
    nan = replace(b, samples=np.where(np.arange(len(b.samples))[:, None] == 7, np.nan, b.samples))
    assert known(a, silent) == "silent-recording"
    assert known(a, nan) == known(a, write(tmp_path / "nan.wav", nan)) == "nonfinite"
    assert known(a, a) == "same-recording"
    assert known(a, pair) == known(a) == "channels"
    assert known(a, replace(b, sample_rate=8000)) == "rates-differ"
    assert known(replace(pair, samples=pair.samples[:500])) == "too-short-to-correlate"
    assert refusal(replace(pair, samples=pair.samples[:0])) == "silent-recording"
    (tmp_path / "empty.wav").write_bytes(b"")
    assert known(a, tmp_path / "empty.wav") == "empty"
    assert known(a, tmp_path / "missing.wav") == "unreadable"


@each(
    "given",
    [
        {"distance_m": -1.0},
        {"distance_m": math.nan},
        {"speed_m_s": 0.0},
        {"clock_error_s": -1.0},
        {"speed_error_m_s": math.inf},
        {"band_hz": (500.0, 100.0)},
        {"band_hz": (100.0, 1e6)},
        {"band_hz": (100.01, 100.02)},
        {"offset_s": 1e6},
        {"method": "magic"},
    ],
)
def test_values_that_are_no_pipe(given: dict[str, Any]) -> None:
    assert refusal(synthetic_pair(position_m=30.0), **given) == "wrong-value"


# ---- wave speed, figure, command


def test_wave_speed_is_that_of_the_formula() -> None:
    found = lm.wave_speed("steel", 500.0, 5.0)
    assert found.speed_m_s == pytest.approx(math.sqrt(2.1e9 / 1000 / (1 + 2.1 / 207 * 100)))
    pe = lm.wave_speed("pe", 110.0, 10.0)
    assert pe.low_m_s < pe.speed_m_s < pe.high_m_s
    usual = float(np.median(pe.quantiles_m_s))
    assert usual == pytest.approx(1.115 * pe.speed_m_s)  # the middle of -12 to 35 %
    pair = synthetic_pair(position_m=20.0, distance_m=60.0, speed_m_s=usual, band_hz=(50, 400))
    result = correlate(pair, distance_m=60.0, speed_m_s=pe)
    assert result.position_m == pytest.approx(20, abs=0.1)
    assert result.errors_m["speed"] == pytest.approx(20 / usual / 2 * pe.error_m_s, rel=0.01)


# material, inner diameter and wall in mm, measured or fitted speeds in m/s
PUBLISHED = [
    # site in Ottawa, PVC of 150 mm, about 480 m/s (Hunaidi and Chu 1999; Gao et al. 2005)
    ("pvc", 150.0, 7.0, 470.0, 482.0),
    # buried polyethylene, for which 2.2 GPa fits (Graf et al. 2014): SDR 11 and SDR 17 by the formula
    ("pe", 90.0, 10.0, 460.0, 475.0),
    ("pe", 150.0, 10.0, 365.0, 375.0),
    # water hammer agrees with moduli of slow tests, buried or not (Watters et al. 1976): 2.4 to 3.0 GPa by the formula
    ("pvc", 150.0, 7.0, 327.0, 362.0),
    # plastic pipe of 5 GPa in a soil with a shear modulus of 0.02 to 0.1 GPa (doi 10.1186/s10033-022-00710-7) by the formula
    ("pvc", 150.0, 7.0, 480.0, 536.0),
    # a quarter above the moduli of slow tests
    ("pvc", 150.0, 7.0, 1.25 * 326, 1.25 * 416),
]


@each(("material", "diameter_mm", "wall_mm", "low", "high"), PUBLISHED)
def test_ranges_of_plastic_pipes_cover_published_speeds(material, diameter_mm, wall_mm, low, high) -> None:
    found = lm.wave_speed(material, diameter_mm, wall_mm)
    assert found.low_m_s < low < high < found.high_m_s


def test_soil_does_not_matter_for_metal_pipes() -> None:
    for material in ("steel", "ductile-iron", "cast-iron", "copper"):
        found = lm.wave_speed(material, 150.0, 8.0)
        low, high = found.range_m_s
        assert low <= found.low_m_s < found.high_m_s <= high < 1.1 * found.speed_m_s
        assert low == pytest.approx(0.85 * found.speed_m_s)  # measured on pipes in the ground


@pytest.mark.slow
@pytest.mark.parametrize("clock_s", [0.0, 1e-3])
def test_interval_covers_the_position_with_published_speeds(clock_s: float) -> None:
    """Leaks anywhere between the loggers, in pipes of which only material and size are known; speeds of leak noise."""
    rng = np.random.default_rng(7)
    n_located = n_covered = 0
    pipes = [p for p in PUBLISHED if p[3] > 0.88 * lm.wave_speed(*p[:3]).speed_m_s]
    assert len(pipes) == len(PUBLISHED) - 1  # water hammer is slower
    for seed in range(60):
        material, diameter_mm, wall_mm, low, high = pipes[seed % len(pipes)]
        place, speed = rng.uniform(3, 77), rng.uniform(low, high)
        given: dict[str, Any] = {"band_hz": (40.0, 400.0), "snr_db": 5.0, "duration_s": 10.0, "seed": seed}
        pair = synthetic_pair(
            position_m=place,
            distance_m=80.0,
            speed_m_s=speed,
            clock_offset_s=clock_s * rng.standard_normal(),
            **given,
        )
        pipe = lm.wave_speed(material, diameter_mm, wall_mm)
        found = correlate(pair, distance_m=80.0, speed_m_s=pipe, clock_error_s=clock_s)
        if found.verdict == "outside":  # as a source beyond the logger with another speed
            assert min(place, 80 - place) < 0.2 * 80
        else:
            n_located += 1
            n_covered += found.low_m <= place <= found.high_m
    assert n_covered >= 0.95 * n_located > 40


@pytest.mark.parametrize("place", [20.0, 60.0])
def test_the_interval_of_a_material_is_that_of_its_speeds(place: float) -> None:
    """The position is (distance + speed * delay) / 2: the farther end lies where the range of the speed is longer."""
    pipe = lm.wave_speed("pvc", 150.0, 7.0)
    pair = synthetic_pair(position_m=place, distance_m=80.0, speed_m_s=450.0, snr_db=30.0)
    found = correlate(pair, distance_m=80.0, speed_m_s=pipe, distance_error_m=0.0)
    delay_s = (2 * place - 80) / 450
    slow, usual, fast = np.interp([0.025, 0.5, 0.975], SHARES, pipe.quantiles_m_s)
    ends = sorted((80 + c * delay_s) / 2 for c in (slow, fast))
    # a fast wave explains a delay by more places between the loggers
    assert (found.low_m, found.high_m) == pytest.approx(ends, abs=0.3)
    assert found.position_m == pytest.approx((80 + usual * delay_s) / 2, abs=0.05)


@pytest.mark.parametrize("place", [4.0, 76.0])
def test_a_slow_wave_of_a_leak_near_a_logger_may_come_from_beyond(place: float) -> None:
    """The delay is that of a source beyond the logger in a pipe of usual speed; no position is better than a wrong one."""
    pair = synthetic_pair(position_m=place, distance_m=80.0, speed_m_s=380.0, snr_db=20.0)
    found = correlate(pair, distance_m=80.0, speed_m_s=lm.wave_speed("pvc", 150.0, 7.0))
    assert (found.verdict, found.position_m) == ("outside", None)
    assert f"from logger {'a' if place < 40 else 'b'} or from beyond it" in found.text()


def test_figure_has_the_curves() -> None:
    pytest.importorskip("plotly")
    found = correlate(synthetic_pair(position_m=30.0), **PIPE)
    figure = found.figure()
    traces = {trace.name: trace for trace in figure.data}
    assert set(traces) == {*METHODS, "coherence", "phase", "phase of the delay"}
    assert traces["ml"].x[np.argmax(traces["ml"].y)] == pytest.approx(30, abs=0.2)
    spans = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert [(s.x0, s.x1) for s in spans] == [(found.low_m, found.high_m)]
    assert "30.0 m" in figure.layout.title.text
    none = correlate(synthetic_pair(position_m=None), **PIPE).figure()
    assert not [shape for shape in none.layout.shapes if shape.type == "rect"]
    long = synthetic_pair(position_m=30.0, sample_rate=48000, duration_s=3.0)
    assert max(len(trace.x) for trace in correlate(long, **PIPE).figure().data) <= 2000


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = synthetic_pair(position_m=30.0)
    files = [str(write(tmp_path / f"{n}.wav", channel(pair, k))) for k, n in enumerate("ab")]
    words = ["correlate", *files, "--distance-m", "120", "--speed-m-s", "1200"]
    assert main(words) == 2
    assert "--clock-error-s" in capsys.readouterr().err
    page = tmp_path / "leak.html"
    assert main([*words, "--clock-error-s", "0.001", "--json", "--html", str(page)]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["ok"]
    assert body["verdict"] == "leak"
    assert body["position_m"] == pytest.approx(30, abs=0.1)
    assert body["html"] == str(page)
    assert "plotly-figure" in page.read_text()
    pipe = ["--material", "pvc", "--diameter-mm", "100", "--wall-mm", "5", "--clock-error-s", "0.001"]
    assert main([*words[:5], *pipe]) == 0
    assert main([*words, *pipe]) == 2
    assert main([*words, "--clock-error-s", "0.001", "--band-low-hz", "100"]) == 2


def test_a_build_imports_nothing_of_it() -> None:
    code = (
        "import sys, leakmel as lm, leakmel.cli; lm.build, lm.scan\n"
        "assert not [m for m in sys.modules if m.startswith(('leakmel.extras.locate', 'scipy'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
