"Any rate, channel count, length and encoding: built, reported in the columns and counts, and every row recomputed independently."

import json
import math
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from each import each
from errors import raises
from independent import check, content, leftovers, same

import leakmel as lm
from leakmel.core.errors import EngineError, MachineError, SpecError
from leakmel.dataset.config import PipelineConfig
from leakmel.mel.engines import ENGINES, open_engine

RATES = [292, 1000, 4095, 4096, 8000, 11_025, 16_000, 44_100, 48_000, 51_200]
QUIET: dict[str, Any] = {"progress": "none"}
SECOND = lm.MelSpec(sample_rate=4096, duration_s=1.0)


def noise(n: int, channels: int = 1, seed: int = 0) -> np.ndarray:
    "Noise [n, C] between -1 and 1 with a tone in it, in steps of 16 bits."
    rng = np.random.default_rng(seed)
    tone = 0.3 * np.sin(0.31 * np.arange(n))[:, None]
    return np.round(np.clip(rng.normal(0, 0.1, (n, channels)) + tone, -1, 32_767 / 32_768) * 32_768) / 32_768


def put(path: Path, samples: np.ndarray, rate: int = 4096, subtype: str = "PCM_16") -> None:
    "A recording in an encoding."
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, subtype=subtype)


def statuses(path: Path) -> dict[str, str]:
    "File name without its ending -> status."
    got = content(path)
    return {
        Path(os.fsdecode(p)).stem: s.decode()
        for p, s in zip(got["files/path"], got["files/status"], strict=True)
    }


def counted(result: lm.BuildResult) -> None:
    "The report counts what the rows say."
    output = Counter(statuses(result.path).values())
    output.pop("ok", None)
    report = json.loads(Path(f"{result.path}.report.json").read_text())
    assert result.summary["status_counts"] == report["status_counts"] == dict(output)


# -- rates --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each("preset", ["disjoint", "overlap"])
@each("rate", RATES)
def test_the_rate_of_the_data(tmp_path: Path, rate: int, preset: str) -> None:
    "Windows of a preset fit each rate."
    seconds = 1 if rate > 2000 else math.ceil(2048 / rate)
    for k in range(2):
        put(tmp_path / "data" / "A" / f"{k}.wav", noise(seconds * rate, seed=k), rate)
    spec: dict[str, Any] = {"preset": preset}
    r = lm.build(tmp_path / "data", out=tmp_path / "x.h5", spec=spec, **QUIET)
    config = json.loads(check(r.path, tmp_path / "data")["@config_json"])
    assert (config["sample_rate"], config["duration_s"], r.rows) == (rate, seconds, 2)
    assert set(statuses(r.path).values()) == {"ok"}
    assert r.summary["status_counts"] == {}


def test_recording_shorter_than_a_window_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    put(tmp_path / "data" / "A" / "a.wav", noise(200), 292)
    with raises("window-too-long", SpecError) as e:
        lm.build(tmp_path / "data", out=tmp_path / "x.h5", **QUIET)
    assert e.value.remedy == "lower long_window, or raise duration_s"
    small = {
        "long_window": 128,
        "long_hop": 128,
        "short_window": 64,
        "short_hop": 64,
        "n_fft": 64,
        "hop_length": 64,
        "n_mels": 16,
    }
    check(lm.build(tmp_path / "data", out=tmp_path / "x.h5", spec=small, **QUIET).path, tmp_path / "data")


@each("files_per_batch", [1, 2, 7])
def test_all_rates_at_4096_hz(tmp_path: Path, files_per_batch: int) -> None:
    for rate in RATES:
        put(tmp_path / "data" / "A" / f"{rate}.wav", noise(rate, seed=rate), rate)
    r = lm.build(
        tmp_path / "data",
        out=tmp_path / "x.h5",
        spec=SECOND,
        check=None,
        pipeline=PipelineConfig(files_per_batch=files_per_batch),
        **QUIET,
    )
    got = check(r.path, tmp_path / "data")
    assert statuses(r.path) == {str(rate): "ok" if rate == 4096 else "resampled" for rate in RATES}
    assert sorted(got["files/sample_rate"]) == RATES
    assert sorted(got["files/n_samples"]) == RATES
    counted(r)


def test_a_missing_resampler_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "data" / "A" / "a.wav", noise(4096))
    put(tmp_path / "data" / "A" / "b.wav", noise(8000), 8000)
    monkeypatch.setitem(sys.modules, "soxr", None)
    with raises("missing-package", MachineError, says="soxr") as e:
        lm.build(tmp_path / "data", out=tmp_path / "x.h5", spec=SECOND, **QUIET)
    assert "pip install soxr" in (e.value.remedy or "")
    assert "rate='reject'" in (e.value.remedy or "")
    assert leftovers(tmp_path, "data") in ([], [".x.h5.journal", ".x.h5.partial"]), (
        "the package may be installed, and the build gone on with"
    )
    r = lm.build(tmp_path / "data", out=tmp_path / "x.h5", spec=replace(SECOND, rate="reject"), **QUIET)
    assert leftovers(tmp_path, "data") == ["x.h5", "x.h5.report.json", "x.h5.timeline.json"]
    assert (r.rows, [x.code for x in r.rejections]) == (1, ["wrong_rate"])


def test_verification_names_a_missing_resampler_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "data" / "A" / "b.wav", noise(8000), 8000)
    lm.build(tmp_path / "data", out=tmp_path / "x.h5", spec=SECOND, **QUIET)
    monkeypatch.setitem(sys.modules, "soxr", None)
    problems = lm.verify(tmp_path / "x.h5", root=tmp_path / "data").problems
    assert len(problems) == 1
    assert "the check could not be completed: resampling needs the package soxr" in problems[0]


# -- channels -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["mean", "first"])
def test_each_channel_rule(tmp_path: Path, rule: Any) -> None:
    x, folder = noise(8000), tmp_path / "data" / "A"
    rng = np.random.default_rng(5)
    for rate, output in ((4096, ""), (8000, "+resampled")):
        one = x[:rate]
        put(folder / f"twins{output}.wav", np.repeat(one, 2, axis=1), rate)
        put(folder / f"stereo{output}.wav", noise(rate, 2), rate)
        put(folder / f"opposite{output}.wav", one * [[1, -1]], rate)
        put(folder / f"nearly opposite{output}.wav", one * [[1, -0.9]] + rng.normal(0, 1e-3, (rate, 2)), rate)
        put(folder / f"one is dead{output}.wav", one * [[1, 0]], rate)
        put(folder / f"silent{output}.wav", np.zeros((rate, 2)), rate)
        put(folder / f"eight of 24 bits{output}.wav", noise(rate, 8), rate, "PCM_24")
        put(folder / f"opposite floats{output}.wav", one * [[1, -1]], rate, "FLOAT")
    r = lm.build(
        tmp_path / "data", out=tmp_path / "x.h5", spec=replace(SECOND, channels=rule), check=None, **QUIET
    )
    got = check(r.path, tmp_path / "data")
    first = {
        "twins": "identical_channels",
        "silent": "identical_channels",
        "stereo": "downmixed",
        "one is dead": "downmixed",
        "eight of 24 bits": "downmixed",
        "opposite": "downmixed+opposite_phase",
        "nearly opposite": "downmixed+opposite_phase",
        "opposite floats": "downmixed+opposite_phase",
    }
    assert statuses(r.path) == first | {f"{k}+resampled": f"{v}+resampled" for k, v in first.items()}
    assert r.summary["status_counts"]["downmixed+opposite_phase"] == 3
    assert sorted(got["files/channels"]) == [2] * 14 + [8] * 2
    counted(r)
    loud = [k for k, p in enumerate(got["files/path"]) if p.startswith(b"A/opposite")]
    assert not got["files/silent"][loud].any(), (
        "the mean of opposite channels is nothing, but the recording is not"
    )
    mels = got["segments_mel"][loud].astype(np.float32)
    assert (mels.max() < -100) == (rule == "mean"), "the first of them is whole"


# -- lengths ----------------------------------------------------------------------------------------------------------------


@each("short", ["pad", "reject"])
@each("long", ["cut", "reject"])
def test_each_length_rule(tmp_path: Path, short: Any, long: Any) -> None:
    lengths = {
        "fits": (4096, 4096),
        "short": (4095, 4096),
        "long": (4097, 4096),
        "one sample": (1, 4096),
        "hour": (100_000, 4096),
        "fast fits": (8000, 8000),
        "fast short": (7990, 8000),
        "fast long": (8010, 8000),
        "slow long": (2000, 1000),
    }
    for k, (name, (n, rate)) in enumerate(lengths.items()):
        put(tmp_path / "data" / "A" / f"{name}.wav", noise(n, seed=k), rate, ("PCM_16", "PCM_24")[k % 2])
    r = lm.build(
        tmp_path / "data",
        out=tmp_path / "x.h5",
        spec=replace(SECOND, short=short, long=long),
        check=None,
        **QUIET,
    )
    check(r.path, tmp_path / "data")
    too_short, too_long = {"short", "one sample", "fast short"}, {"long", "hour", "fast long", "slow long"}
    codes = {Path(os.fsdecode(x.path)).stem: x.code for x in r.rejections}
    assert codes == dict.fromkeys(too_short if short == "reject" else (), "too_short") | dict.fromkeys(
        too_long if long == "reject" else (), "too_long"
    )
    output = statuses(r.path)
    assert output.keys() == lengths.keys() - codes.keys()
    for name, status in output.items():
        parts = (
            ["resampled"] * (lengths[name][1] != 4096)
            + ["padded"] * (name in too_short)
            + ["cut"] * (name in too_long)
        )
        assert status == ("+".join(parts) or "ok"), name
    counted(r)


# -- encodings ----------------------------------------------------------------------------------------------------------------

SUBTYPES = {
    "PCM_U8": b"pcm8",
    "PCM_16": b"pcm16",
    "PCM_24": b"pcm24",
    "PCM_32": b"pcm32",
    "FLOAT": b"float32",
    "DOUBLE": b"float64",
}
OTHERS: list[tuple[int, int, str, int]] = [  # rate, channels, subtype, samples
    (4096, 1, "PCM_24", 4096),
    (8000, 1, "PCM_16", 8000),
    (4096, 2, "PCM_16", 4096),
    (4096, 1, "FLOAT", 3000),
    (51_200, 3, "DOUBLE", 60_000),
    (292, 1, "PCM_U8", 292),
    (4096, 1, "PCM_32", 5000),
]


def cpu_engines() -> list[str]:
    "The engines that compute on a CPU here."
    found = []
    for name in ENGINES:
        try:
            open_engine(name, SECOND, device="cpu").close()
        except EngineError:
            continue
        found.append(name)
    return found


def test_every_encoding_in_one_folder(tmp_path: Path) -> None:
    x = noise(4096)
    for name in SUBTYPES:
        put(tmp_path / "data" / "A" / f"{name}.wav", x, 4096, name)
    r = lm.build(tmp_path / "data", out=tmp_path / "x.h5", check=None, **QUIET)
    got = check(r.path, tmp_path / "data")
    assert (
        dict(zip((Path(os.fsdecode(p)).stem for p in got["files/path"]), got["files/encoding"], strict=True))
        == SUBTYPES
    )
    whole = [k for k, p in enumerate(got["files/path"]) if b"U8" not in p]
    assert len({got["segments_mel"][k].tobytes() for k in whole}) == 1, (
        "the same numbers give the same row, whatever holds them"
    )
    assert np.allclose(got["files/rms_db"], got["files/rms_db"][0], atol=0.01)
    assert r.summary["status_counts"] == {}


@pytest.mark.slow
@each("engine", cpu_engines())
@each("files_per_batch", [1, 2, 7])
def test_row_of_a_16_bit_file_does_not_depend_on_other_files_in_the_batch(
    tmp_path: Path, engine: str, files_per_batch: int
) -> None:
    alone, mixed = tmp_path / "alone", tmp_path / "mixed"
    for k in range(9):
        x = noise(4096, seed=k) * (0.001 if k == 4 else 1)
        for root in (alone, mixed):
            put(root / "A" / f"{k}.wav", x)
    for k, (rate, channels, subtype, n) in enumerate(OTHERS):
        put(mixed / "A" / f"{k}b.wav", noise(n, channels, seed=k), rate, subtype)
    common: dict[str, Any] = dict(
        spec=SECOND,
        engine=engine,
        check=None,
        pipeline=PipelineConfig(files_per_batch=files_per_batch),
        **QUIET,
    )
    before = check(lm.build(alone, out=tmp_path / "x.h5", **common).path, alone)
    r = lm.build(mixed, out=tmp_path / "y.h5", **common)
    after = check(r.path, mixed)
    assert len(after["labels"]) == 9 + len(OTHERS)
    stay = np.isin(after["files/path"], before["files/path"])
    assert after["segments_mel"][stay].tobytes() == before["segments_mel"].tobytes()
    assert after["digests/rows"][stay].tolist() == before["digests/rows"].tolist()
    assert after["files/rms_db"][stay].tobytes() == before["files/rms_db"].tobytes()
    counted(r)
    other = lm.build(
        mixed, out=tmp_path / "z.h5", **(common | {"pipeline": PipelineConfig(files_per_batch=3, slots=1)})
    )
    assert same(content(other.path), after), "nor does the batch change any row"


def test_at_least_two_engines_are_compared() -> None:
    assert {"reference", "torch"} <= set(cpu_engines())


# -- real recordings ------------------------------------------------------------------------------------------------------------


@each("folder", ["clips_5s", "recordings"])
@each("target", [None, 4096])
def test_real_recordings(tmp_path: Path, folder: str, target: int | None) -> None:
    "As they are, and at 4,096 Hz; recordings of different lengths as ten seconds each."
    where = os.environ.get("LEAKMEL_REAL_WAVS")
    if not where:
        pytest.skip("LEAKMEL_REAL_WAVS is not set")
    root = Path(where) / folder
    assert root.is_dir(), f"LEAKMEL_REAL_WAVS names a folder without {folder}"
    spec: dict[str, Any] = ({} if target is None else {"sample_rate": target}) | (
        {"duration_s": 10.0} if folder == "recordings" else {}
    )
    r = lm.build(root, out=tmp_path / "x.h5", spec=spec, check=None, **QUIET)
    got = check(r.path, root)
    assert (r.rows, len(r.rejections)) == (r.found, 0)
    assert all(("resampled" in s) == (target is not None) for s in statuses(r.path).values())
    assert set(got["files/sample_rate"]) == {8000}
    assert lm.verify(r.path, root=root, sample=None).checked == r.rows
    counted(r)
