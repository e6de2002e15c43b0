"""Recordings of two loggers on a pipe, made apart from the solver: losses, dispersion, sections, branches, hum, taps, clocks.

A wave is lossy by the constant-Q model in the closed form of Kjartansson (1979, Journal of Geophysical Research 84,
4737-4748). Q of plastics follows from the attenuation 7.25e-5 s/m at 479 m/s that was measured on PVC (Gao et al. 2004,
Journal of Sound and Vibration 277, 133-148): Q = 1 / (2 * 479 * 7.25e-5) = 14. Q of metals is an estimate.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

import leakmel as lm

# Q, and the range of the true speed over that of the formula
METALS = (0.85, 1.06)
PLASTICS = (0.88, 1.35)
MATERIALS = {
    "ductile-iron": (100.0, METALS),
    "cast-iron": (80.0, METALS),
    "steel": (130.0, METALS),
    "pvc": (18.0, PLASTICS),
    "pe": (14.0, PLASTICS),
}
REFERENCE_HZ = 100.0  # frequency of the speeds
RATE = 4096  # Hz
DURATION_S = 10.0


@dataclass
class Section:
    """One pipe."""

    material: str
    diameter_mm: float
    wall_mm: float
    length_m: float
    formula_m_s: float
    speed_m_s: float  # true
    q: float  # true

    def wave_number(self, f: np.ndarray) -> np.ndarray:
        """Complex wave number, 1/m, [F]; the wave is exp(-1j k x)."""
        gamma = np.arctan(1 / self.q) / np.pi
        speed = self.speed_m_s * (np.maximum(f, 1.0) / REFERENCE_HZ) ** gamma
        return 2 * np.pi * f / speed * (1 - 1j * np.tan(np.pi * gamma / 2))


@dataclass
class Case:
    """Two recordings and what is true."""

    kind: str  # "leak", "outside" or "none"
    sections: list[Section]
    position_m: float | None
    samples: np.ndarray  # [2, n] float64
    known_m_s: list[float]  # speeds, wrong by at most 2 %
    snr_db: float
    rate: int = RATE
    has_hum: bool = False
    has_tap: bool = False
    has_branch: bool = False
    clock_s: float = 0.0
    drift: float = 0.0

    @property
    def length_m(self) -> float:
        """Distance of the loggers."""
        return sum(s.length_m for s in self.sections)


def make_sections(rng: np.random.Generator, n: int, material: str | None = None) -> list[Section]:
    """Draw pipes; the first is of a material, the others of any."""
    made = []
    for k in range(n):
        name = material if material and k == 0 else str(rng.choice(list(MATERIALS)))
        q, (low, high) = MATERIALS[name]
        is_plastic = high > 1.1
        diameter = float(rng.choice([80, 100, 150, 200]))
        wall = diameter * (rng.uniform(0.05, 0.1) if is_plastic else rng.uniform(0.03, 0.06))
        total = rng.uniform(35, 90) if is_plastic else rng.uniform(60, 180)
        formula = lm.wave_speed(name, diameter, wall).speed_m_s
        speed = formula * rng.uniform(low, high)
        made.append(Section(name, diameter, wall, total / n, formula, speed, q * rng.uniform(0.7, 1.4)))
    return made


def _passed(sections: list[Section], x: float, y: float, f: np.ndarray) -> np.ndarray:
    """Transfer function of the pipe from x to y, which may lie beyond the ends."""
    low, high = sorted((x, y))
    edges = np.cumsum([0.0, *(s.length_m for s in sections)])
    edges[0], edges[-1] = min(low, 0.0), max(high, edges[-1])
    phase = np.zeros(len(f), complex)
    for s, start, end in zip(sections, edges[:-1], edges[1:], strict=True):
        phase += s.wave_number(f) * max(0.0, min(high, end) - max(low, start))
    return np.exp(-1j * phase)


def _arrival(sections, x: float, y: float, f: np.ndarray, branch: tuple | None) -> np.ndarray:
    """Transfer function with the echoes of a branch: at its mouth, and at its end."""
    direct = _passed(sections, x, y, f)
    if branch is None:
        return direct
    place, end_m, share = branch
    between = min(x, y) < place < max(x, y)
    echo = share * _passed([sections[0]], 0, 2 * end_m, f)
    if between:
        return direct * (1 - share + echo)
    # on the other side of the source: reflected there
    return direct - share * _passed(sections, x, place, f) * _passed(sections, place, y, f)


def _noise(rng: np.random.Generator, n: int, f: np.ndarray) -> np.ndarray:
    """Spectrum of the noise of a logger: white, and more at low frequencies."""
    shape = np.sqrt(1 + (rng.uniform(5, 25) / np.maximum(f, 2.0)) ** 2)
    return np.fft.rfft(rng.standard_normal(n)) * shape


def _burst(rng: np.random.Generator, n: int, f: np.ndarray, loudness: float) -> np.ndarray:
    """Spectrum of a tap or a knock somewhere in the recording."""
    t = np.arange(n) / RATE
    start, length = rng.uniform(0.55, 1.4) * n / RATE / 2, rng.choice([0.05, 0.5, 1.5])
    envelope = (t > start) * np.exp(-(t - start).clip(0) / length * 2) * (t < start + 2 * length)
    return np.fft.rfft(loudness * envelope * rng.standard_normal(n))


def _hum(rng: np.random.Generator, n: int, loudness: float) -> list[np.ndarray]:
    """Samples of mains hum for both loggers."""
    t = np.arange(n) / RATE
    base = rng.choice([50.0, 60.0]) * (1 + 2e-4 * rng.standard_normal())
    made = [np.zeros(n), np.zeros(n)]
    for k in range(1, 12):
        level = loudness * rng.exponential() / np.sqrt(k)
        for x in made:
            x += level * rng.uniform(0.3, 1) * np.sin(2 * np.pi * base * k * t + rng.uniform(0, 2 * np.pi))
    return made


def make_case(
    seed: int,
    kind: str = "leak",  # "leak", "outside" or "none"
    n_sections: int = 1,
    material: str | None = None,
    *,
    night: int | None = None,
    snr_db: float | None = None,
) -> Case:
    """Make a pair of recordings; pipes, place of the source, branch and hum of a seed are the same in all nights."""
    rng = np.random.default_rng([seed, 52])
    sections = make_sections(rng, n_sections, material)
    length = sum(s.length_m for s in sections)
    n = 2 * round(DURATION_S * RATE)
    # the clock of b differs and runs at another rate: its samples are those of other times
    clock, drift = 0.5e-3 * rng.standard_normal(), 20e-6 * rng.uniform(-1, 1)
    f = np.fft.rfftfreq(n, 1 / RATE)
    drawn_db = rng.uniform(-3, 15)
    snr_db = drawn_db if snr_db is None else snr_db
    position = {
        "leak": rng.uniform(0.03, 0.97) * length,
        "outside": rng.choice([-1, 1]) * rng.uniform(3, 40),
        "none": 0.0,
    }[kind]
    if kind == "outside" and position > 0:
        position += length
    has_hum, has_tap, has_branch = rng.random(3) < (0.4, 0.3, 0.3)
    branch = (rng.uniform(0.1, 0.9) * length, rng.uniform(3, 25), rng.uniform(0.1, 0.33))
    if night is not None:
        rng = np.random.default_rng([seed, 52, night])
        clock, drift = 0.5e-3 * rng.standard_normal(), 20e-6 * rng.uniform(-1, 1)
        has_tap = rng.random() < 0.3
    source = np.fft.rfft(rng.standard_normal(n)) * (np.maximum(f, 10.0) / 100) ** -rng.uniform(0, 0.6)
    source *= (f > rng.uniform(8, 20)) / np.sqrt(1 + (f / rng.uniform(800, 1600)) ** 4)
    found = [_noise(rng, n, f) for _ in "ab"]
    if kind != "none":
        arrived = [_arrival(sections, position, y, f, branch if has_branch else None) for y in (0.0, length)]
        arrived = [source * h for h in arrived]
        power = [np.abs(x) ** 2 for x in arrived]
        weak = min(power, key=np.sum)
        top = np.searchsorted(np.cumsum(weak), 0.95 * weak.sum())
        band = slice(int(np.searchsorted(f, 8.0)), max(top, int(np.searchsorted(f, 20.0))))
        noise = np.mean([(np.abs(x[band]) ** 2).sum() for x in found])
        gain = np.sqrt(10 ** (snr_db / 10) * noise / weak[band].sum())
        found = [x + gain * y for x, y in zip(found, arrived, strict=True)]
    if has_tap:
        place, loudness = rng.uniform(-20, length + 20), 10 ** rng.uniform(0.3, 1.3)
        burst = _burst(rng, n, f, loudness)
        found = [
            x + burst * _passed(sections, place, y, f) for x, y in zip(found, (0.0, length), strict=True)
        ]
    found[1] = found[1] * np.exp(-2j * np.pi * f * clock)
    a, b = (np.fft.irfft(x, n) for x in found)
    if has_hum:
        for x, hum in zip((a, b), _hum(rng, n, 10 ** rng.uniform(-0.5, 0.7)), strict=True):
            x += hum
    first, half = n // 4, n // 2
    at = np.arange(half)
    # linear phase in small pieces: the samples of b are those of a clock that runs at another rate
    b = _resampled(b, first + at + drift * at)
    samples = np.stack([a[first : first + half], b]) * 10 ** rng.uniform(-1, 1, (2, 1))
    known = [s.speed_m_s * rng.uniform(0.98, 1.02) for s in sections]
    true = position if kind == "leak" else None
    flags: dict[str, Any] = {
        "has_hum": bool(has_hum),
        "has_tap": bool(has_tap),
        "has_branch": bool(has_branch and kind != "none"),
    }
    return Case(kind, sections, true, samples, known, snr_db, clock_s=clock, drift=drift, **flags)


def _resampled(x: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Values between samples, by a windowed sinc of 32 samples."""
    base = np.floor(at).astype(int)
    steps = np.arange(-15, 17)
    distance = (at - base)[:, None] - steps
    weights = np.sinc(distance) * np.cos(np.pi * distance / 34) ** 2
    return (x[base[:, None] + steps] * weights).sum(axis=1)


def make_night(
    seed: int,
    section: Section,
    places_m: list[float],  # of loggers on one pipe
    position_m: float | None,  # of the leak
    *,
    snr_db: float = 6.0,
    clock_s: float = 0.5e-3,
) -> np.ndarray:  # [loggers, N] float64
    """Make the recordings of several loggers on one pipe in one night."""
    rng = np.random.default_rng([seed, 3])
    n = 2 * round(DURATION_S * RATE)
    f = np.fft.rfftfreq(n, 1 / RATE)
    source = np.fft.rfft(rng.standard_normal(n)) * (f > 12) / np.sqrt(1 + (f / 1200) ** 4)
    made = []
    arrived = [
        0 * f if position_m is None else source * _passed([section], position_m, y, f) for y in places_m
    ]
    # the noise is that of the logger in the middle
    power = np.median([(np.abs(x) ** 2).sum() for x in arrived])
    for x in arrived:
        noise = _noise(rng, n, f)
        gain = np.sqrt(10 ** (snr_db / 10) * (np.abs(noise) ** 2).sum() / power) if power else 0.0
        delayed = (noise + gain * x) * np.exp(-2j * np.pi * f * clock_s * rng.standard_normal())
        made.append(np.fft.irfft(delayed, n)[n // 4 : n // 4 + n // 2])
    return np.stack(made)
