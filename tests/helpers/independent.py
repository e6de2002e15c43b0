"""An independent implementation that checks a data set without leakmel: h5py, SciPy, float64, its own walk.

Nothing of leakmel is imported here, on purpose.
"""

import json
import os
import warnings
import wave
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.fft
import scipy.io.wavfile
import scipy.signal

SYSTEM_FOLDERS = (  # written by hand: what a list of the project lacks is missed
    b"lost+found",
    b"$recycle.bin",
    b"recycler",
    b"recycled",
    b"system volume information",
    *(b"found.%03d" % k for k in range(1000)),
    b"lost.dir",
    b"__macosx",
    b"@eadir",
    b"#recycle",
    b"@recycle",
    b"#snapshot",
    b"~snapshot",
    b"@recently-snapshot",
    b"network trash folder",
    b"temporary items",
)


def walk(folder: str | os.PathLike) -> list[bytes]:
    "Paths of the recordings below a folder, relative to it, in the order of their bytes; none in folders that are hidden or of a system."
    base = os.fsencode(folder)
    found = [
        os.path.relpath(os.path.join(at, name), base) for at, _, names in os.walk(base) for name in names
    ]
    return sorted(
        p
        for p in found
        if p.lower().endswith((b".wav", b".wave"))
        and not any(part.startswith(b".") for part in p.split(b"/"))
        and not any(part.lower() in SYSTEM_FOLDERS for part in p.split(b"/")[:-1])
    )


def read(path: bytes) -> tuple[np.ndarray, int]:
    "Samples [n, channels] in float64 from -1 to 1, and the rate in Hz."
    try:
        with wave.open(os.fsdecode(path)) as f:
            if f.getsampwidth() == 2:
                raw = np.frombuffer(f.readframes(f.getnframes()), "<i2").reshape(-1, f.getnchannels())
                return raw / 32768.0, f.getframerate()
    except wave.Error:
        pass  # not 16-bit PCM
    with warnings.catch_warnings(
        action="ignore", category=scipy.io.wavfile.WavFileWarning
    ):  # of chunks it does not know
        rate, x = scipy.io.wavfile.read(os.fsdecode(path))
    x = x[:, None] if x.ndim == 1 else x
    if x.dtype == np.uint8:
        return (x - 128.0) / 128, rate
    return (
        x / 2.0**31 if x.dtype == np.int32 else x.astype(np.float64)
    ), rate  # SciPy puts 24 bits into the upper end of 32


def fit(x: np.ndarray, rate: int, config: dict[str, Any]) -> np.ndarray:
    "One channel of the rate and length that the data set's settings ask for."
    x = x[:, 0] if config["channels"] == "first" or (x == x[:, :1]).all() else x.mean(axis=1)
    if rate != config["sample_rate"]:
        import soxr

        n = int(len(x) * config["sample_rate"] / rate + 0.5)
        x = (
            np.resize(soxr.resample(x, rate, config["sample_rate"], quality="VHQ"), n)
            .astype(np.float32)
            .astype(np.float64)
        )
    n = round(config["sample_rate"] * config["duration_s"])
    return np.pad(x[:n], (0, max(0, n - len(x))))


def hz(mel: float, scale: str) -> float:
    "Frequency of a place on the mel scale."
    if scale == "htk":
        return 700 * (10 ** (mel / 2595) - 1)
    return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)


def mel(f: float, scale: str) -> float:
    "Place of a frequency on the mel scale."
    if scale == "htk":
        return 2595 * np.log10(1 + f / 700)
    return f * 3 / 200 if f < 1000 else 15 + 27 * np.log(f / 1000) / np.log(6.4)


def bank(config: dict[str, Any]) -> np.ndarray:
    "Triangles over the FFT bins, one row per band, written as textbooks do."
    rate, n_fft, n_mels, scale = (config[k] for k in ("sample_rate", "n_fft", "n_mels", "mel_scale"))
    top = config["f_max_hz"] or rate / 2
    edges = [hz(m, scale) for m in np.linspace(mel(config["f_min_hz"], scale), mel(top, scale), n_mels + 2)]
    out = np.zeros((n_mels, n_fft // 2 + 1))
    for m in range(n_mels):
        left, centre, right = edges[m : m + 3]
        for k in range(n_fft // 2 + 1):
            f = k * rate / n_fft
            if left < f <= centre:
                out[m, k] = (f - left) / (centre - left)
            elif centre < f < right:
                out[m, k] = (right - f) / (right - centre)
        if config["mel_norm"] == "slaney":
            out[m] *= 2 / (right - left)
    return out


def log_mel(x: np.ndarray, config: dict[str, Any], *, periodic: bool = True) -> np.ndarray:
    "The features [L, S, M, T] of one recording in float64: segments are cut out first, then framed."
    window, triangles = scipy.signal.get_window("hann", config["n_fft"], fftbins=periodic), bank(config)

    def pieces(y: np.ndarray, length: int, hop: int) -> np.ndarray:
        return np.stack([y[..., a : a + length] for a in range(0, y.shape[-1] - length + 1, hop)], axis=-2)

    frames = x
    for length, hop in (("long_window", "long_hop"), ("short_window", "short_hop"), ("n_fft", "hop_length")):
        frames = pieces(frames, config[length], config[hop])
    spectrum = np.abs(scipy.fft.rfft(frames * window, axis=-1))  # [L, S, T, F]
    values = spectrum ** config["power"] @ triangles.T  # [L, S, T, M]
    decibel = (20 if config["power"] == 1 else 10) * np.log10(np.maximum(values, config["floor"]))
    return decibel.swapaxes(-1, -2)


def off(row: np.ndarray, right: np.ndarray) -> float:
    "Largest deviation of a float16 row beyond the tolerance of rounding and float32, dB; 0 or less is good."
    rounding = np.spacing(np.abs(right).astype(np.float16)).astype(np.float64) / 2 + 0.02
    strongest = right.max(axis=-2, keepdims=True)
    wrong = np.abs(row.astype(np.float64) - right) - rounding
    amplitude = np.abs(10 ** (row.astype(np.float64) / 20) - 10 ** (right / 20))
    deep = (right < strongest - 90) & (
        amplitude <= 4e-7 * 10 ** (strongest / 20)
    )  # under the noise of float32
    return float(np.where(deep, -1.0, wrong).max())


def content(path: str | os.PathLike) -> dict[str, Any]:
    "All arrays and attributes of a data set, by name."
    out: dict[str, Any] = {}
    with h5py.File(path, "r") as f:
        out |= {f"@{k}": v for k, v in f.attrs.items()}

        def keep(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                out[name] = item[()]

        f.visititems(keep)
    return out


def same(a: dict[str, Any], b: dict[str, Any], *but: str) -> bool:
    "Whether two contents are equal to the bit, apart from some names."
    if a.keys() != b.keys():
        return False
    return all(
        np.asarray(a[k]).tobytes() == np.asarray(b[k]).tobytes() and np.shape(a[k]) == np.shape(b[k])
        for k in a
        if k not in but and not k.startswith("@")
    ) and all(str(a[k]) == str(b[k]) for k in a if k.startswith("@") and k not in but)


def check(path: str | os.PathLike, folder: str | os.PathLike) -> dict[str, Any]:
    "Check a data set against its folder: accounting, order, labels, every row; returns its content."
    all_of = content(path)
    config, names = json.loads(all_of["@config_json"]), json.loads(all_of["@labels_json"])
    paths, rejected = all_of["files/path"].tolist(), all_of["rejected/path"].tolist()
    assert sorted([*paths, *rejected]) == walk(folder), "rows + rejected are not the files that are there"
    assert paths == sorted(paths)
    assert [names[i] for i in all_of["labels"]] == [os.fsdecode(p).split("/")[0] for p in paths]
    assert all_of["files/folder"].tolist() == [b"/".join(p.split(b"/")[1:-1]) for p in paths]
    assert len(all_of["segments_mel"]) == len(paths) == all_of["@n_rows"]
    for k, p in enumerate(paths):
        x, rate = read(os.path.join(os.fsencode(folder), p))
        worst = off(all_of["segments_mel"][k], log_mel(fit(x, rate, config), config))
        assert worst <= 0, f"row {k} ({p!r}) is {worst:.3g} dB out of what is allowed"
    return all_of


def leftovers(folder: Path, *known: str) -> list[str]:
    "Names in an output folder that should not be there; a data set that stands there has a state beside it."
    there = os.listdir(folder) if folder.is_dir() else []
    return sorted(
        n for n in there if n not in known and not (n.endswith(".state") and n[1 : -len(".state")] in there)
    )
