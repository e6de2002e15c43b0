"Generated recordings with names, groups, rates and copies like those of the public sets; nothing of the sets is in them."

import io
from collections.abc import Iterator
from itertools import product

import numpy as np
import soundfile


def wav(seed: int, rate: int = 8000, seconds: float = 1.0, level: int = 1000) -> bytes:
    "Noise as a WAV file."
    samples = np.random.default_rng(seed).integers(-level, level, round(rate * seconds)).astype(np.int16)
    out = io.BytesIO()
    soundfile.write(out, samples, rate, subtype="PCM_16", format="WAV")
    return out.getvalue()


def raw(seed: int, seconds: float = 1.0, is_clipped: bool = False, tone: float = 0.0) -> bytes:
    "Noise as 32-bit samples without a header; the lower half of each is zero."
    n = round(8000 * seconds)
    samples = np.random.default_rng(seed).integers(-1000, 1000, n)
    samples += np.round(tone * np.sin(2 * np.pi * 0.1 * np.arange(n))).astype(samples.dtype)
    if is_clipped:
        samples[:3] = 32767
    return (samples << 16).astype("<i4").tobytes()


def aghashahi(seconds: float = 0.1, tone: float = 0.0) -> dict[str, bytes]:
    "120 recordings of 40 tests and 2 of background noise, 44 of all clipped."
    files: dict[str, bytes] = {}
    for topology, leak, flow in product(
        ("BR", "LO"), ("CC", "GL", "LC", "NL", "OL"), ("0.18 LPS", "0.47 LPS", "ND", "Transient")
    ):
        for noise in ("N", "NN") if flow in ("ND", "Transient") else ("N",):
            for sensor in ("H1", "H2"):
                k = len(files)
                name = f"{topology}_{leak}_{flow}_{noise}_{sensor}.raw"
                files[f"Hydrophone/{name}"] = raw(k, seconds, k < 43, 0.0 if leak == "NL" else tone)
    files["Hydrophone/Background Noise_H1.raw"] = raw(500, seconds, True)
    files["Hydrophone/Background Noise_H2.raw"] = raw(501, seconds)
    files["Hydrophone/BR_CC_ND_A1.csv"] = b"not a hydrophone"
    return files


def _spread(n_clips: int, n_groups: int) -> Iterator[tuple[int, int]]:
    "Yield group and number within the group of each clip."
    for k in range(n_clips):
        yield k % n_groups, k // n_groups


def dongguan() -> dict[str, dict[str, bytes]]:
    "500, 386 and 114 clips in 271, 18 and 33 groups, with 36 byte-equal pairs of which 6 have names of two groups."
    archives: dict[str, dict[str, bytes]] = {"leak": {}, "no leak": {}, "noise": {}}
    # 5 pairs of two leak groups and 1 of two noise groups: as many groups more by name
    for group, k in _spread(500, 276):
        name = f"ductile iron-zone 2-0.{group:03d} MPa-0.9 ms-hydrophone-0-1{f'_{k}' if k else ''}.wav"
        archives["leak"][name] = wav(10_000 + len(archives["leak"]))
    for group, k in _spread(386, 18):
        name = f"pe-zone {group}-NA-NA-noise logger_{k % 5}-{k % 5 + 1}_{k // 5}.wav"
        archives["no leak"][name] = wav(20_000 + len(archives["no leak"]))
    for group, k in _spread(114, 34):
        archives["noise"][f"dog_{group}-NA-noise logger_{k}-{k + 1}.wav"] = wav(
            30_000 + len(archives["noise"])
        )
    leaks, noises = list(archives["leak"]), list(archives["noise"])
    for k in range(5):  # other groups
        archives["leak"][leaks[2 * k + 1]] = archives["leak"][leaks[2 * k]]
    archives["noise"][noises[1]] = archives["noise"][noises[0]]
    for k in range(30):  # within a group
        archives["leak"][leaks[276 + 100 + k]] = archives["leak"][leaks[100 + k]]
    return archives


def hongkong_hydrophones(seconds: float = 0.1) -> dict[str, bytes]:
    "40 leaks, 28 of them at 4096 Hz, and 40 recordings without a leak at 8092 Hz."
    files = {}
    for k in range(40):
        site, time = f"{1 + k % 3}.{1 + k // 3 % 3}", f"{k // 9:02d}.{k:04d}"
        files[f"Hydrophones/Leak/{site}.{time}.wav"] = wav(k, 4096 if k < 28 else 8092, seconds)
        files[f"Hydrophones/No-Leak/{site}.{time}.wav"] = wav(100 + k, 8092, seconds)
    return files


def hongkong_loggers(seconds: float = 0.1) -> dict[str, bytes]:
    "60 recordings of loggers on two materials, two of them byte-equal."
    files = {}
    for k in range(60):
        folder = ("Leak-Metal", "Leak-NonMetal", "No-Leak-Metal", "No-Leak-NonMetal")[k % 4]
        name = f"{k:03d}_{5593 + k // 2:05d}-2018{1 + k % 12:02d}27"
        files[f"Noise Loggers/{folder}/{name}.wav"] = wav(k, 4096, seconds)
    names = list(files)
    files[names[5]] = files[names[1]]
    return files
