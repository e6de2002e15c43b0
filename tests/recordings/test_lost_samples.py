"Samples that are lost or wrong without an error: behind the data chunk, in stalled writes, and floats in the scale of integers."

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from each import each
from odd_wavs import chunk, fmt, rf64, riff, sub_format

import leakmel as lm
from leakmel.dataset.schema import DIGEST_ATTRIBUTE, metadata_digest
from leakmel.recordings import conform
from leakmel.recordings.conform import has_stalled, native
from leakmel.recordings.wav import canonical_header, read_wav

RATE, N = 4096, 20_480
SPEC = {"sample_rate": RATE, "duration_s": N / RATE}
QUIET: dict[str, Any] = {"progress": "none", "spec": SPEC}


def noise(seed: int, level: float = 500.0, n: int = N) -> np.ndarray:
    return np.round(np.random.default_rng(seed).normal(0, level, n)).clip(-32_768, 32_767).astype("<i2")


BODY = noise(0).tobytes()
MORE = noise(1, n=3000).tobytes()
DATA = chunk(b"data", BODY)


def unclaimed(path: Path, content: bytes) -> int:
    path.write_bytes(content)
    return read_wav(path).unclaimed


# -- behind the data chunk --------------------------------------------------------------------------------------------


@each(
    ("head", "bits"),
    [
        (riff(fmt(), DATA), 16),
        (riff(fmt(channels=2), DATA), 16),
        (riff(fmt(bits=8), DATA), 8),
        (riff(fmt(bits=24), chunk(b"data", BODY[:30_000])), 24),
        (riff(fmt(3, bits=32), chunk(b"data", np.ones(900, "<f4").tobytes())), 32),
        (riff(fmt(6, bits=8), DATA), 8),
        (riff(sub_format(16), DATA), 16),
        (riff(chunk(b"LIST", b"INFO"), fmt(), DATA), 16),
        (riff(fmt(), DATA, chunk(b"bext", bytes(602))), 16),
        (riff(fmt(order=">"), chunk(b"data", BODY, order=">"), kind=b"RIFX", order=">"), 16),
        (rf64(BODY), 16),
    ],
)
@each("seed", range(4))
def test_samples_behind_the_data_chunk_are_counted(tmp_path: Path, head: bytes, bits: int, seed: int) -> None:
    "Loud ones, whose bytes look like names of chunks now and then, too."
    rest = noise(seed, level=(3, 100, 3000, 12_000)[seed], n=2000).tobytes()
    assert unclaimed(tmp_path / "x.wav", head) == 0
    assert unclaimed(tmp_path / "x.wav", head + rest) > len(rest) // 2


@each(
    "rest",
    [
        b"",
        chunk(b"LIST", b"INFOISFT" + bytes(600)),
        chunk(b"bext", bytes(range(1, 200)) * 4),
        chunk(b"\x41\x42\x43\x44", noise(3).tobytes()),  # no known name, and whole
        chunk(b"id3 ", b"ID3\x03" + bytes(range(250)) * 3) + chunk(b"cue ", bytes(28)),
        chunk(b"LIST", b"INFO" + bytes(range(1, 250)) * 3, size=4_000_000_000),
        b"ID3\x04" + bytes(range(250)) * 4,
        b"TAG" + b"title".ljust(125, b"\1"),
        bytes(4096),
        b'{"temperature": 7.5, "battery": 3.6}\r\n' * 20,
        b"\1\2\3" * 70,
    ],
)
def test_chunks_padding_and_texts_behind_the_samples_are_no_samples(tmp_path: Path, rest: bytes) -> None:
    assert unclaimed(tmp_path / "x.wav", riff(fmt(), DATA) + rest) == 0
    odd = riff(fmt(bits=8), chunk(b"data", BODY + b"x"))
    assert unclaimed(tmp_path / "x.wav", odd + rest) == 0
    if rest[:4] == b"LIST":
        assert unclaimed(tmp_path / "x.wav", odd[:-1] + rest) == 0, "without the padding"


# -- stalled writes ---------------------------------------------------------------------------------------------------


def with_run(x: np.ndarray, start: int, n: int, value: int = 0) -> np.ndarray:
    x = x.copy()
    x[start : start + n] = value
    return x


STEADY = {
    "noise": noise(2),
    "quiet": noise(3, level=12),
    "offset": noise(4) + np.int16(9000),
    "8 bits": (noise(5, level=3000) // 256 * 256).astype(np.int16),
    "12 bits": (noise(6) // 16 * 16).astype(np.int16),
    "hum": np.round(9000 * np.sin(np.arange(N) / 13) + noise(7, level=20)).astype(np.int16),
    "low": np.cumsum(noise(8, level=30).astype(float) * 0.97 ** np.arange(N)).round().astype(np.int16)
    + noise(8, level=40),
}


@each("kind", STEADY)
@each(
    ("start", "n", "value"),
    [
        (0, 5000, 0),
        (N - 5000, 5000, 0),
        (N // 2, N // 2, 0),
        (7000, 1100, 0),
        (9000, 4096, -1),
        (9000, 3000, 77),
    ],
)
def test_a_run_of_equal_samples_in_a_steady_signal_is_found(
    kind: str, start: int, n: int, value: int
) -> None:
    x = STEADY[kind]
    stalled = with_run(x, start, n, value)
    assert not has_stalled(x[:, None], RATE)
    for samples in (stalled, (stalled / 32_768).astype(np.float32), np.stack([stalled, stalled], axis=1)):
        assert has_stalled(samples.reshape(N, -1), RATE)
    assert has_stalled(with_run(x, start, n, int(x[start]))[:, None], RATE), "the last sample is held"


def tone(hz: float, level: float, seconds: float = N / RATE) -> np.ndarray:
    return np.round(level * np.sin(2 * np.pi * hz * np.arange(int(RATE * seconds)) / RATE)).astype(np.int16)


X = noise(5, n=2 * N)
FADE = np.clip((N - np.arange(2 * N)) / 1474, 0, 1)
STALLS = {
    "and a short one": with_run(with_run(X, 20_480, 5520), 5000, 130),
    "half, and a shorter one": with_run(with_run(X, N, N), 5000, 614),
    "behind zeros at the start": with_run(with_run(X, 0, 205), 15_000, 9420, 55),
    "many lengths": np.concatenate([with_run(noise(n, n=1300), 100, n) for n in range(20, 1200, 20)]),
    "two": with_run(with_run(X, 5000, 1639), 30_000, 1639, 9),
    "1 of 30 s": with_run(noise(6, n=30 * RATE), 15 * RATE, RATE, 1234),
    "1 of 60 s": with_run(noise(6, n=60 * RATE), 30 * RATE, RATE, 1234),
    "last of 60 s": with_run(noise(6, n=60 * RATE), 59 * RATE, RATE),
    "2 of 60 s": with_run(noise(6, n=60 * RATE), 999, 2 * RATE),
    "quiet, half": with_run(noise(7, level=1), N // 2, N),
    "quiet, 2 s": with_run(noise(7, level=2), 3000, 2 * RATE, 1),
    "fade": np.round(X * FADE).astype(np.int16),
    "tone": with_run(tone(2, 20_000), N // 2, N),
    "one channel": np.stack([X, with_run(X, 9000, RATE, 55)], axis=1),
    "another channel is dead": np.stack([0 * X, with_run(X, 9000, RATE, 55)], axis=1),
}


@each("kind", STALLS)
def test_stalls_are_found_whatever_else_is_in_the_recording(kind: str) -> None:
    samples = STALLS[kind].reshape(len(STALLS[kind]), -1)
    assert has_stalled(samples, RATE)
    assert has_stalled((samples / 32_768).astype(np.float32), RATE)


@pytest.mark.slow
@each("level", [1, 2, 5, 40, 1000, 10_000])
@each("seconds", [2, 5, 17, 60])
@each("rate", [2000, RATE, 8000])
def test_a_stall_of_a_quarter_of_a_second_is_found_in_noise_of_any_level(
    level: int, seconds: int, rate: int
) -> None:
    r = np.random.default_rng(100 * level + seconds)
    x = noise(seconds, level, seconds * rate)
    assert not has_stalled(x[:, None], rate)
    for part in (0, r.uniform(), 1):
        n = int(max(rate / 4, r.uniform(0, 0.8) * part * len(x)))
        start = int(r.integers(len(x) - n + 1))
        for value in (0, 55, int(x[start])):
            assert has_stalled(with_run(x, start, n, value)[:, None], rate), (start, n, value)


@each("sigma", [0.05, 0.1, 0.13, 0.15, 0.17, 0.2, 0.25, 0.3, 0.5, 0.7, 1, 3, 100, 10_000])
@each("step", [1, 16, 256])
@each("seconds", [5, 60])
def test_quiet_recordings_have_not_stalled(sigma: float, step: int, seconds: int) -> None:
    for seed in range(60 // seconds):
        r = np.random.default_rng(seed)
        x = np.round(r.normal(r.uniform(-0.5, 0.5), min(sigma, 10_000 / step), seconds * RATE)) * step
        assert not has_stalled(x.astype(np.int16)[:, None], RATE)


@each("hz", [0.1, 0.5, 2, 50, 1000])
@each("level", [1, 2, 5, 20, 80, 300, 2000, 30_000])
def test_tones_have_not_stalled(hz: float, level: int) -> None:
    assert not has_stalled(tone(hz, level, 20)[:, None], RATE)


STEPS = np.arange(N) % 7000
NO_STALL = {
    "silence": np.zeros(N),
    "one step": np.arange(N) // 5000 % 2,
    "almost silence": noise(1, level=0.1),
    "0 and -1": np.floor(np.random.default_rng(1).normal(0.5, 0.15, N)),
    "few steps": noise(1, level=0.35),
    "8 bits, quiet": 256 * np.round(np.random.default_rng(2).normal(0, 0.25, N)),
    "A-law, quiet": 16 * np.round(np.random.default_rng(2).normal(0, 0.2, N)) + 8,
    "12 bits, quiet": 16 * np.round(np.random.default_rng(2).normal(0, 0.2, N)),
    "slow drift": np.round(5 * np.sin(np.arange(N) / 2000) + np.random.default_rng(2).normal(0, 0.1, N)),
    "clicks": np.where(STEPS == 6000, 3000, 0),
    **{
        f"knocks, {fall}, {level}": np.round(
            9000 * np.exp(-STEPS / fall) * np.sin(STEPS / 3) + level * noise(4, 1000) / 1000
        )
        for fall in (60, 150, 600)
        for level in (0, 0.1, 0.2)
    },
    "loud, then quiet": np.where(np.arange(N) < N // 2, noise(3), noise(4, level=0.2)),
    "short": with_run(noise(5), 9000, 900),
    "one channel": np.stack([noise(6), np.zeros(N, np.int16)], axis=1),
    "clipped": np.clip(3 * noise(7, level=20_000).astype(int), -32_768, 32_767),
}


@each("kind", NO_STALL)
def test_silence_and_quiet_recordings_are_no_stalls(kind: str) -> None:
    samples = np.asarray(NO_STALL[kind]).round().astype(np.int16).reshape(N, -1)
    assert not has_stalled(samples, RATE)
    assert not has_stalled((samples / 32_768).astype(np.float32), RATE)


def test_the_compiled_reader_leaves_all_stalled_recordings_and_few_others(tmp_path: Path) -> None:
    module = native()
    if module is None:
        pytest.skip("no compiled code here")
    cases = [x[:N] for x in STEADY.values()] + [
        np.asarray(x).round() for x in NO_STALL.values() if x.ndim == 1
    ]
    cases += [
        with_run(x, s, n, v)
        for x in (*STEADY.values(), noise(9, level=1))
        for s, n, v in ((0, 1030, 0), (N - 1024, 1024, 5), (300, 9000, -1))
    ]
    cases += [np.round(x[-N:]) for x in STALLS.values() if x.ndim == 1 and len(x) >= N]
    paths = []
    for k, x in enumerate(cases):
        paths.append(bytes(tmp_path / f"{k}.wav"))
        Path(tmp_path / f"{k}.wav").write_bytes(canonical_header(RATE, N) + x.astype("<i2").tobytes())
    mtimes = np.array([Path(p.decode()).stat().st_mtime_ns for p in paths])
    out = np.zeros((len(paths), N), np.int16)
    outcomes = module.read_rows(paths, np.ones(len(paths), bool), mtimes, canonical_header(RATE, N), out)[0]
    stalled = np.array([has_stalled(x.astype(np.int16)[:, None], RATE) for x in cases])
    assert stalled.sum() > 3 * len(STEADY) + 9
    assert (outcomes[stalled] == module.USE_FALLBACK).all()
    assert (outcomes[: len(STEADY)] == module.READ).all(), "good recordings stay on the fast path"


# -- scan and build ---------------------------------------------------------------------------------------------------

KINDS = ("unread_samples", "stalled", "float_scale")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    "Good recordings, and some of each kind; those on the fast path and others."
    root = tmp_path / "data"
    for label in ("LEAK", "NOLEAK"):
        (root / label).mkdir(parents=True)
        for k in range(4):
            (root / label / f"good{k}.wav").write_bytes(
                canonical_header(RATE, N) + noise(10 * k + len(label)).tobytes()
            )
    leak = root / "LEAK"
    (leak / "unread_samples plain.wav").write_bytes(riff(fmt(), chunk(b"data", noise(90).tobytes())) + MORE)
    (leak / "unread_samples stereo.wav").write_bytes(riff(fmt(channels=2), DATA) + MORE)
    (leak / "unread_samples half.wav").write_bytes(riff(fmt(), chunk(b"data", BODY, size=N)[: 8 + 2 * N]))
    (leak / "stalled plain.wav").write_bytes(
        canonical_header(RATE, N) + with_run(noise(91), 9000, 2000).tobytes()
    )
    (leak / "stalled 8 bits.wav").write_bytes(
        riff(fmt(bits=8), chunk(b"data", bytes((with_run(noise(92), 0, 7000) // 64 + 128).astype(np.uint8))))
    )
    for bits in (16, 20):  # 20: up to 2**19
        x = np.random.default_rng(bits).normal(0, 2 ** (bits - 4), N).astype("<f4")
        (leak / f"float_scale {bits}.wav").write_bytes(riff(fmt(3, bits=32), chunk(b"data", x.tobytes())))
    x = np.random.default_rng(9).normal(0, 0.3, N).astype("<f4")
    (leak / "good float.wav").write_bytes(riff(fmt(3, bits=32), chunk(b"data", x.tobytes())))
    return root


def planted(root: Path) -> set[tuple[str, str]]:
    return {
        (p.name.split(" ")[0], f"{p.parent.name}/{p.name}")
        for p in root.rglob("*.wav")
        if "good" not in p.name
    }


def found(problems: Any) -> set[tuple[str, str]]:
    return {
        (p["kind"], p["path"])
        for p in problems.to_dict("records")
        if p["kind"] in (*KINDS, "clipped", "dc_offset")
    }


@pytest.mark.slow
@each("mode", ["stream", "preload", "memmap"])
def test_scan_and_build_name_the_cause(data: Path, tmp_path: Path, mode: str) -> None:
    assert found(lm.scan(data, content=True, progress="none").problems) == planted(data)
    r = lm.build(data, out=tmp_path / "x.h5", mode=mode, engine="cpu", **QUIET)
    assert r.rows == r.found == len(list(data.rglob("*.wav")))
    assert found(r.problems) == planted(data)
    counts = {kind: sum(k == kind for k, _ in planted(data)) for kind in KINDS}
    assert {k: r.summary["problems_by_kind"][k] for k in KINDS} == counts
    assert lm.verify(r.path, root=data, sample=None).ok
    messages = [p.message for p in r.noted if p.kind == "float_scale"]
    assert all("16-bit" in m or "24-bit" in m for m in messages)


@pytest.mark.slow
def test_rows_that_a_later_build_keeps_are_reported_too(data: Path, tmp_path: Path) -> None:
    first = lm.build(data, out=tmp_path / "x.h5", **QUIET)
    (data / "LEAK" / "good new.wav").write_bytes(canonical_header(RATE, N) + noise(99).tobytes())
    second = lm.build(data, out=tmp_path / "x.h5", **QUIET)
    assert second.summary["copied_rows"] == first.rows
    assert found(second.problems) == found(first.problems) == planted(data)
    assert found(lm.build(data, out=tmp_path / "x.h5", **QUIET).problems) == planted(data)


def test_without_compiled_code_the_bytes_are_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lm.build(data, out=tmp_path / "x.h5", engine="reference", **QUIET)
    monkeypatch.setattr("leakmel.dataset.loader.native", lambda: None)
    two = lm.build(data, out=tmp_path / "y.h5", engine="reference", **QUIET)
    with h5py.File(one.path) as a, h5py.File(two.path) as b:
        assert metadata_digest(a) == metadata_digest(b)


def test_a_data_set_of_an_earlier_version_is_still_right(data: Path, tmp_path: Path) -> None:
    "It does not say that recordings have stalled; but a status that contradicts the recording is an error as before."
    path = lm.build(data, out=tmp_path / "x.h5", **QUIET).path

    def change(old: bytes, new: bytes) -> None:
        with h5py.File(path, "r+") as f:
            status = f["files/status"][:]
            f["files/status"][:] = [s.replace(old, new) for s in status]
            f.attrs[DIGEST_ATTRIBUTE] = metadata_digest(f)

    change(b"unread_samples", b"ok")
    change(b"stalled", b"ok")
    change(b"padded+ok", b"padded")
    assert lm.verify(path, root=data, sample=None).ok
    change(b"padded", b"ok")
    assert not lm.verify(path, root=data, sample=None).ok


def float_problems(root: Path, x: np.ndarray) -> list[dict[str, Any]]:
    (root / "LEAK").mkdir()
    (root / "LEAK" / "x.wav").write_bytes(riff(fmt(3, bits=32), chunk(b"data", x.astype("<f4").tobytes())))
    return lm.scan(root, content=True, progress="none").problems.to_dict("records")  # type: ignore[return-value]


@each(("peak", "bits"), [(3000.0, 16), (30_000.0, 16), (70_000.0, 24), (2.0**23, 24), (2.0**31, 32)])
def test_the_scale_of_floats_is_named(tmp_path: Path, peak: float, bits: int) -> None:
    "Also where the samples are so large that the recording is rejected."
    x = np.random.default_rng(0).uniform(-peak, peak, N)
    x[0] = peak
    (p,) = float_problems(tmp_path, x)
    assert p["kind"] == ("float_scale" if peak <= conform.MAX_PEAK else "unsupported")
    assert f"{bits}-bit integers" in p["message"]
    assert str(2 ** (bits - 1)) in p["message"]


@each("gain", [3, 10, 100, 128])
def test_floats_above_1_have_not_always_the_scale_of_integers(tmp_path: Path, gain: int) -> None:
    (p,) = float_problems(tmp_path, gain * np.sin(np.arange(N) / 7))
    assert p["kind"] == "float_scale"
    assert f"reach {gain}" in p["message"]
    assert "-1 to 1" in p["message"]
    assert "bit" not in p["message"]


@each("glitch", [5.0, -30_000.0, 500_000.0])
def test_a_glitch_is_no_scale(tmp_path: Path, glitch: float) -> None:
    x = 0.3 * np.sin(np.arange(N) / 7)
    x[4000] = glitch
    assert "float_scale" not in {p["kind"] for p in float_problems(tmp_path, x)}
