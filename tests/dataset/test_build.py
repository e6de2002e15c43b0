"From a folder to a data set: every row, every name and every byte, verified independently."

import json
import os
import struct
import subprocess
import sys
import threading
import time
from datetime import datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from each import each
from errors import raises
from independent import check, content, leftovers, read, same, walk

import leakmel as lm
from leakmel.core import monitor
from leakmel.core.errors import DataError, UsageError
from leakmel.core.timeline import read_timeline
from leakmel.dataset import publish
from leakmel.dataset.loader import BatchReader
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.dataset.writer import RowFile
from leakmel.mel.engines import ReferenceEngine
from leakmel.recordings.demo import write_wav

SPLITS = ("TRAINING", "VALIDATION", "TESTING")
STATED = {"sample_rate": 4096, "duration_s": 10.0}
QUIET: dict[str, Any] = {"progress": "none"}


@pytest.fixture
def small(tmp_path, make_wav) -> Path:
    "Two labels, 25 recordings of 1 s side by side."
    root = tmp_path / "small"
    for k in range(25):
        make_wav(
            root / ("LEAK" if k % 3 else "NOLEAK") / f"s{k % 4}~{k:03d}~20240229_1200{k:02d}~{k % 7}.wav",
            seed=k,
        )
    return root


def coded_wav(path: Path, samples: np.ndarray, rate: int, bits: int) -> None:
    "24-bit PCM or 32-bit float samples, from numbers between -1 and 1."
    if bits == 24:
        whole = np.round(samples * 2**23).clip(-(2**23), 2**23 - 1).astype("<i4")
        body = whole.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    else:
        body = samples.astype("<f4").tobytes()
    step = bits // 8
    kind = 1 if bits == 24 else 3
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        36 + len(body),
        b"WAVE",
        b"fmt ",
        16,
        kind,
        1,
        rate,
        rate * step,
        step,
        bits,
        b"data",
        len(body),
    )
    path.write_bytes(head + body)


# ---- every row, by somebody else


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["disjoint", "overlap"])
def test_all_rows_of_all_splits(demo, tmp_path, preset):
    results = lm.build_all(demo, out_dir=tmp_path, spec={"preset": preset}, **QUIET)
    assert [r.split for r in results] == list(SPLITS)
    for r in results:
        got = check(r.path, demo / r.split)
        assert r.rows + len(r.rejected) == r.found == len(walk(demo / r.split)) == len(got["labels"])
        assert r.verified.ok
        assert r.verified.checked == min(64, r.rows)
        assert got["segments_mel"].shape[1:] == ((40, 2, 64, 1) if preset == "disjoint" else (79, 3, 32, 1))
        assert json.loads(got["@config_json"])["preset_name"] == f"{preset}@2"
        assert lm.verify(r.path, root=demo, sample=None).checked == r.rows


@pytest.mark.slow
@each("engine", ["torch", "torchaudio", "reference"])
def test_faulty_set_with_a_given_spec(faulty, tmp_path, engine):
    if engine == "torchaudio" and find_spec("torchaudio") is None:
        pytest.skip("torchaudio is not installed here")
    results = lm.build_all(faulty, out_dir=tmp_path, spec=STATED, engine=engine, **QUIET)
    for r in results:
        got = check(r.path, faulty / r.split)
        assert r.rows + len(r.rejections) == r.found == len(walk(faulty / r.split))
        assert lm.verify(r.path, root=faulty, sample=None).ok
    got = content(results[0].path)
    reasons = {
        os.fsdecode(p).split("~")[1]: c
        for p, c in zip(got["rejected/path"], got["rejected/code"], strict=True)
    }
    assert reasons == {
        "F00": b"empty",
        "F01": b"empty",
        "F02": b"truncated",
        "F03": b"not_wav",
        "F09": b"nonfinite",
        "F13": b"no_label",
    }
    status = {
        os.fsdecode(p).split("~")[1]: s for p, s in zip(got["files/path"], got["files/status"], strict=True)
    }
    assert {k: v for k, v in status.items() if v != b"ok"} == {
        "F04": b"resampled",
        "F05": b"identical_channels",
        "F06": b"padded",
    }
    silent = {
        os.fsdecode(p).split("~")[1] for p, s in zip(got["files/path"], got["files/silent"], strict=True) if s
    }
    assert "F08" in silent
    assert all(m.endswith(b")") or m[0:1].islower() for m in got["rejected/message"])


def test_all_good_rows_are_kept_when_most_files_are_rejected(tmp_path, make_wav):
    root = tmp_path / "data"
    for k in range(60):
        make_wav(root / "A" / f"{k:02d}.wav", seed=k)
        if k % 10:
            (root / "A" / f"{k:02d}.wav").write_bytes(b"not a recording")
    r = lm.build(root, out=tmp_path / "x.h5", pipeline=PipelineConfig(files_per_batch=7), **QUIET)
    assert (r.rows, len(r.rejections), r.found) == (6, 54, 60)
    check(r.path, root)
    alone = tmp_path / "alone"
    for k in range(0, 60, 10):
        make_wav(alone / "A" / f"{k:02d}.wav", seed=k)
    other = lm.build(alone, out=tmp_path / "y.h5", **QUIET)
    assert same(
        content(r.path),
        content(other.path),
        "rejected/path",
        "rejected/code",
        "rejected/message",
        "@metadata_digest",
    )


# ---- order, labels, splits


def test_rows_come_in_the_order_of_path_bytes(tmp_path, make_wav):
    names = [
        "b.wav",
        "B.WAV",
        "a b.wav",
        "ä.wav",
        "-x.wav",
        "z.Wave",
        "a\nb.wav",
        "A'\".wav",
        os.fsdecode(b"\xff\xfe.wav"),
        "sub/0.wav",
        "sub.wav",
        "sub-/1.wav",
    ]
    root = tmp_path / "data"
    for k, n in enumerate(names):
        make_wav(root / "Straße 1" / n, seed=k)
    (root / "Straße 1" / ".hidden.wav").write_bytes(b"x")
    (root / "Straße 1" / "notes.txt").write_bytes(b"x")
    r = lm.build(root, out=tmp_path / "x.h5", **QUIET)
    got = check(r.path, root)
    assert got["files/path"].tolist() == sorted(os.fsencode(f"Straße 1/{n}") for n in names)
    assert lm.open_dataset(r.path).files["path"].tolist() == [os.fsdecode(p) for p in got["files/path"]]


def test_one_split_uses_the_labels_of_all_splits(tmp_path, make_wav):
    for k, where in enumerate(
        (
            "dataset_training/LEAK",
            "dataset_training/zebra",
            "Validation/LEAK",
            "Validation/CRACK",
            "testing/BACKGROUND",
            "testing/leak",
        )
    ):
        make_wav(tmp_path / "data" / where / "a.wav", seed=k)
    (tmp_path / "data" / "testing" / "LEAK").mkdir()
    names = ["BACKGROUND", "CRACK", "LEAK", "leak", "zebra"]
    for split, folder, labels in (
        ("training", "dataset_training", [2, 4]),
        ("validation", "Validation", [1, 2]),
        ("TEST", "testing", [0, 3]),
    ):
        r = lm.build(tmp_path / "data", split=split, out=tmp_path / f"{split}.h5", **QUIET)
        got = check(r.path, tmp_path / "data" / folder)
        assert json.loads(got["@labels_json"]) == names
        assert json.loads(got["@label2id_json"]) == {n: i for i, n in enumerate(names)}
        assert got["labels"].tolist() == labels


@pytest.mark.slow
def test_all_splits_together_give_the_bytes_of_each_alone(demo, tmp_path):
    together = lm.build_all(demo, out_dir=tmp_path / "all", **QUIET)
    for r in together:
        alone = lm.build(demo, split=r.split.lower(), out=tmp_path / f"{r.split}.h5", **QUIET)
        assert alone.path.read_bytes() == r.path.read_bytes()
    assert leftovers(tmp_path / "all") == sorted(
        f"{s}_DATASET.H5{e}" for s in SPLITS for e in ("", ".report.json", ".timeline.json")
    )


def test_one_folder_of_label_folders(small, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    r = lm.build(small, **QUIET)
    assert r.path == tmp_path / "here" / "ALL_DATASET.H5"
    got = check(r.path, small)
    assert json.loads(got["@labels_json"]) == ["LEAK", "NOLEAK"]
    parts = [os.fsdecode(p).split("/")[1].split("~") for p in got["files/path"]]
    assert got["files/sensor"].tolist() == [p[0].encode() for p in parts]
    assert got["files/recording"].tolist() == [p[1].encode() for p in parts]
    assert got["files/start_time"].tolist() == [f"2024-02-29T12:00:{p[2][-2:]}".encode() for p in parts]
    assert got["files/gain"].tolist() == [int(p[3][:-4]) for p in parts]
    assert lm.build_all(small, **QUIET)[0].path.read_bytes() == r.path.read_bytes()


def test_missing_split_argument_lists_the_splits(demo, tmp_path):
    with raises("split-not-named", UsageError, found="TRAINING, VALIDATION, TESTING") as e:
        lm.build(demo, out=tmp_path / "o" / "x.h5", **QUIET)
    assert "build_all" in str(e.value)
    assert leftovers(tmp_path) == []


def test_label_may_have_the_name_of_its_split(tmp_path, make_wav):
    for k, where in enumerate(("TRAINING/LEAK", "TRAINING/train", "TESTING/LEAK", "TESTING/test")):
        make_wav(tmp_path / "data" / where / f"{k}.wav", seed=k)
    for r in lm.build_all(tmp_path / "data", out_dir=tmp_path / "o", **QUIET):
        check(r.path, tmp_path / "data" / r.split)
        assert lm.verify(r.path, root=tmp_path / "data").ok


# ---- the spec


def test_spec_is_inferred_from_the_data(tmp_path, make_wav):
    for k in range(3):
        make_wav(tmp_path / "data" / "A" / f"{k}.wav", n=12_345, rate=8000, seed=k)
    r = lm.build(tmp_path / "data", out=tmp_path / "x.h5", **QUIET)
    spec = lm.open_dataset(r.path).spec
    assert (spec.sample_rate, spec.n_samples) == (8000, 12_345)
    check(r.path, tmp_path / "data")


def test_partial_spec_is_completed_from_the_data(tmp_path, make_wav):
    for k in range(3):
        make_wav(tmp_path / "data" / "A" / f"{k}.wav", n=4096 * (k + 1), seed=k)
    r = lm.build(tmp_path / "data", out=tmp_path / "x.h5", spec={"duration_s": 2.0}, **QUIET)
    assert content(r.path)["files/status"].tolist() == [b"padded", b"ok", b"cut"]
    check(r.path, tmp_path / "data")


def test_given_spec_resamples_and_pads_with_a_report(tmp_path, make_wav):
    root = tmp_path / "data"
    make_wav(root / "A" / "0 fits.wav", n=8192)
    make_wav(root / "A" / "1 long.wav", n=9000)
    make_wav(root / "A" / "2 short.wav", n=100)
    make_wav(root / "A" / "3 fast.wav", n=16_000, rate=8000)
    make_wav(root / "A" / "4 fast and short.wav", n=1000, rate=44_100)
    make_wav(root / "A" / "5 slow and long.wav", n=9000, rate=2000)
    rng = np.random.default_rng(1)
    write_wav(
        root / "A" / "6 twins.wav", np.repeat(rng.integers(-999, 999, (8192, 1), np.int16), 2, axis=1), 4096
    )
    write_wav(root / "A" / "7 stereo.wav", rng.integers(-999, 999, (8192, 2), np.int16), 4096)
    write_wav(root / "A" / "8 stereo fast short.wav", rng.integers(-999, 999, (8000, 3), np.int16), 8000)
    r = lm.build(root, out=tmp_path / "x.h5", spec=lm.MelSpec(duration_s=2.0), **QUIET)
    got = check(r.path, root)
    assert got["files/status"].tolist() == [
        b"ok",
        b"cut",
        b"padded",
        b"resampled",
        b"resampled+padded",
        b"resampled+cut",
        b"identical_channels",
        b"downmixed",
        b"downmixed+resampled+padded",
    ]
    assert got["files/sample_rate"].tolist() == [4096, 4096, 4096, 8000, 44_100, 2000, 4096, 4096, 8000]
    assert got["files/n_samples"].tolist() == [8192, 9000, 100, 16_000, 1000, 9000, 8192, 8192, 8000]
    assert got["files/channels"].tolist() == [1] * 6 + [2, 2, 3]
    first = lm.build(root, out=tmp_path / "y.h5", spec=lm.MelSpec(duration_s=2.0, channels="first"), **QUIET)
    check(first.path, root)


def test_rejection_rules_name_the_rejected_files(tmp_path, make_wav):
    root = tmp_path / "data"
    for name, n, rate in (
        ("fits", 4096, 4096),
        ("long", 4097, 4096),
        ("short", 4095, 4096),
        ("fast", 8000, 8000),
    ):
        make_wav(root / "A" / f"{name}.wav", n=n, rate=rate)
    r = lm.build(
        root,
        out=tmp_path / "x.h5",
        spec=lm.MelSpec(duration_s=1.0, short="reject", long="reject", rate="reject"),
        **QUIET,
    )
    assert {x.path: x.code for x in r.rejections} == {
        b"A/fast.wav": "wrong_rate",
        b"A/long.wav": "too_long",
        b"A/short.wav": "too_short",
    }
    check(r.path, root)


# ---- what lies beside a recording does not change its row


@pytest.mark.parametrize("engine", ["torch", "reference"])
def test_float_recordings_in_a_batch_do_not_change_16_bit_rows(small, tmp_path, engine):
    common: dict[str, Any] = dict(spec=lm.MelSpec(duration_s=1.0), engine=engine, **QUIET)
    before = content(
        lm.build(small, out=tmp_path / "x.h5", pipeline=PipelineConfig(files_per_batch=5), **common).path
    )
    rng = np.random.default_rng(3)
    coded_wav(small / "LEAK" / "s1~0005a.wav", rng.normal(0, 0.1, 4096), 4096, 24)
    coded_wav(small / "LEAK" / "s1~0005b.wav", rng.normal(0, 0.9, 4096), 4096, 32)
    coded_wav(small / "NOLEAK" / "s9.wav", rng.normal(0, 1e-4, 8000), 8000, 32)
    write_wav(small / "LEAK" / "s2 stereo.wav", rng.integers(-32_768, 32_767, (4096, 2), np.int16), 4096)
    after_path = lm.build(
        small, out=tmp_path / "y.h5", pipeline=PipelineConfig(files_per_batch=5), **common
    ).path
    after = check(after_path, small)
    assert len(after["labels"]) == len(before["labels"]) + 4
    stay = np.isin(after["files/path"], before["files/path"])
    for name in before:
        if name.startswith("files/") or name in ("labels", "segments_mel", "digests/rows"):
            assert after[name][stay].astype(before[name].dtype).tobytes() == before[name].tobytes(), name
    assert after["files/encoding"][~stay].tolist() == [b"pcm24", b"float32", b"pcm16", b"float32"]
    for k in np.flatnonzero(~stay):
        x, _ = read(os.fsencode(small) + b"/" + after["files/path"][k])
        if after["files/status"][k] == b"ok":
            assert after["files/rms_db"][k] == pytest.approx(10 * np.log10((x**2).mean()), abs=1e-3)


def test_quality_columns_equal_a_direct_computation(small, tmp_path):
    x = np.zeros(4096, np.int16)
    write_wav(small / "LEAK" / "silent.wav", x, 4096)
    write_wav(
        small / "LEAK" / "loud.wav",
        np.where(np.arange(4096) % 37 < 20, 32_767, -32_768).astype(np.int16),
        4096,
    )
    write_wav(small / "LEAK" / "offset.wav", x + np.int16(1024), 4096)
    got = content(lm.build(small, out=tmp_path / "x.h5", **QUIET).path)
    for k, p in enumerate(got["files/path"]):
        y = read(os.fsencode(small) + b"/" + p)[0][:, 0]
        assert got["files/peak"][k] == pytest.approx(np.abs(y).max())
        assert got["files/dc_offset"][k] == pytest.approx(y.mean(), abs=1e-7)
        assert got["files/clipped_share"][k] == pytest.approx((np.abs(np.round(y * 32_768)) >= 32_767).mean())
        assert bool(got["files/silent"][k]) == (np.ptp(y) <= 1 / 32_768)
        if y.any():
            assert got["files/rms_db"][k] == pytest.approx(20 * np.log10(np.sqrt((y**2).mean())), abs=1e-4)
    assert np.isfinite(got["files/rms_db"]).all()
    assert np.isfinite(got["segments_mel"].astype(np.float64)).all()


@each("engine", ["torch", "reference"])
@each("period", [4, 16, 64, 128])
def test_equal_frames_are_not_reported_as_bias(tmp_path, engine, period):
    "A tone whose period divides the hop gives equal frames; their rounding to float16 is then the same everywhere and does not average out."
    x = np.round(32_767 * np.sin(2 * np.pi * (np.arange(8000) + 0.5) / period)).astype(np.int16)
    (tmp_path / "data" / "A").mkdir(parents=True)
    write_wav(tmp_path / "data" / "A" / "a.wav", x, 8000)
    assert lm.build(tmp_path / "data", out=tmp_path / "x.h5", engine=engine, **QUIET).verified.ok


@pytest.mark.parametrize("peak", [30, 32_767])
def test_a_tone_at_half_the_rate_is_built(tmp_path, peak):
    "A broken logger that alternates between two values: the loudest row of a set, so it is always in the sample."
    (tmp_path / "data" / "A").mkdir(parents=True)
    write_wav(
        tmp_path / "data" / "A" / "a.wav", np.where(np.arange(4096) % 2, peak, -peak).astype(np.int16), 4096
    )
    assert lm.build(tmp_path / "data", out=tmp_path / "x.h5", engine="torch", **QUIET).verified.ok


# ---- same input, same bytes


VARIANTS: list[dict[str, Any]] = [
    {"read_workers": 1, "compute_workers": 1, "files_per_batch": 1, "slots": 1},
    {"read_workers": 5, "compute_workers": 3, "files_per_batch": 3, "slots": 2},
    {"read_workers": 2, "compute_workers": 1, "files_per_batch": 25, "slots": 9},
    {"files_per_batch": 1000},
    {"max_bytes_in_flight": 200_000},
    {"max_bytes_in_flight": 20_000},
    {"compute_workers": 4, "files_per_batch": 2, "slots": 50},
    {"fsync": False, "monitor_interval_s": 0.0},
]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "reference"])
def test_performance_settings_do_not_change_bytes(small, tmp_path, engine):
    coded_wav(small / "LEAK" / "s1~0005a.wav", np.random.default_rng(3).normal(0, 0.1, 4096), 4096, 24)
    (small / "LEAK" / "s3 broken.wav").write_bytes(b"RIFF")
    found = {
        lm.build(
            small, out=tmp_path / "x.h5", engine=engine, pipeline=PipelineConfig(**v), **QUIET
        ).path.read_bytes()
        for v in VARIANTS
    }
    assert len(found) == 1


@pytest.mark.slow
def test_performance_settings_do_not_change_bytes_of_long_rows(demo, tmp_path):
    found = {
        lm.build(
            demo, split="training", out=tmp_path / "x.h5", pipeline=PipelineConfig(**v), **QUIET
        ).path.read_bytes()
        for v in (VARIANTS[0], VARIANTS[1], VARIANTS[3], {})
    }
    assert len(found) == 1


def test_order_of_the_listing_and_place_of_the_data_do_not_matter(small, tmp_path, monkeypatch):
    first = lm.build(small, out=tmp_path / "x.h5", **QUIET).path.read_bytes()
    real = os.scandir

    class Reversed:
        def __init__(self, path):
            self.inner = real(path)

        def __enter__(self):
            return iter(sorted(self.inner, key=lambda e: e.name, reverse=True))

        def __exit__(self, *exc):
            self.inner.close()

    monkeypatch.setattr(os, "scandir", Reversed)
    assert lm.build(small, out=tmp_path / "y.h5", **QUIET).path.read_bytes() == first
    monkeypatch.undo()
    moved = tmp_path / "elsewhere é"
    small.rename(moved)
    for p in moved.rglob("*.wav"):
        os.utime(p, (1e9, 1e9))
    assert lm.build(moved, out=tmp_path / "z.h5", **QUIET).path.read_bytes() == first
    monkeypatch.chdir(moved.parent)
    assert lm.build(moved.name, out="relative.h5", **QUIET).path.read_bytes() == first


@pytest.mark.slow
def test_other_processes_give_the_same_bytes(small, tmp_path):
    first = lm.build(small, out=tmp_path / "x.h5", **QUIET).path.read_bytes()
    surroundings = (
        {"PYTHONHASHSEED": "1", "LC_ALL": "C"},
        {"PYTHONHASHSEED": "77", "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo", "OMP_NUM_THREADS": "1"},
    )
    for k, more in enumerate(surroundings):
        command = [
            sys.executable,
            "-m",
            "leakmel",
            "build",
            str(small),
            "--out",
            str(tmp_path / f"{k}.h5"),
            "--quiet",
        ]
        subprocess.run(command, env=os.environ | more, check=True, capture_output=True)
        assert (tmp_path / f"{k}.h5").read_bytes() == first


def test_gzip_has_the_same_content(small, tmp_path):
    plain = lm.build(small, out=tmp_path / "x.h5", **QUIET)
    packed = lm.build(small, out=tmp_path / "y.h5", pipeline=PipelineConfig(compression="gzip"), **QUIET)
    assert same(content(plain.path), content(packed.path))
    assert lm.verify(packed.path, root=small, sample=None).ok
    again = lm.build(
        small, out=tmp_path / "z.h5", pipeline=PipelineConfig(compression="gzip", files_per_batch=2), **QUIET
    )
    assert packed.path.read_bytes() == again.path.read_bytes()


# ---- what is published


def test_old_data_set_is_replaced_only_on_success(small, tmp_path, make_wav):
    target = tmp_path / "x.h5"
    old = lm.build(small, out=target, **QUIET).path.read_bytes()
    make_wav(small / "LEAK" / "another.wav", seed=99)
    (small / "LEAK" / "odd.wav").write_bytes((small / "LEAK" / "another.wav").read_bytes()[: 44 + 2000])
    with pytest.raises(DataError):
        lm.build(small, out=target, pipeline=lm.PipelineConfig(on_bad_file="stop"), **QUIET)
    assert target.read_bytes() == old
    r = lm.build(small, out=target, **QUIET)
    assert (r.rows, len(r.rejections)) == (26, 1)
    assert target.read_bytes() != old
    check(target, small)
    assert leftovers(tmp_path, "small") == ["x.h5", "x.h5.report.json", "x.h5.timeline.json"]


def test_earlier_trainer_reads_the_layout(demo, tmp_path):
    lm.build(demo, split="validation", out=tmp_path / "VALIDATION_DATASET.H5", **QUIET)
    with h5py.File(tmp_path / "VALIDATION_DATASET.H5") as f:
        assert f["labels"].dtype == np.int16
        assert f["labels"].shape == (9,)
        assert f["segments_mel"].dtype == np.float16
        assert f["segments_mel"].shape == (9, 40, 2, 64, 1)
        config = json.loads(f.attrs["config_json"])
        wanted = {
            "sample_rate": 4096,
            "duration_sec": 10.0,
            "long_window": 1024,
            "short_window": 512,
            "n_mels": 64,
            "n_fft": 512,
            "hop_length": 128,
            "power": 1.0,
            "center": False,
        }
        assert {k: config[k] for k in wanted} == wanted
        assert json.loads(f.attrs["labels_json"]) == ["LEAK", "NOLEAK"]
        assert json.loads(f.attrs["label2id_json"]) == {"LEAK": 0, "NOLEAK": 1}
        assert isinstance(f.attrs["labels_json"], str)
        assert f.attrs["complete"]
        assert f.attrs["schema_version"] == 1
        assert "created_at_utc" not in f.attrs
        for name in ("engine", "fingerprint", "digest_algorithm", "leakmel_version", "n_rows"):
            assert name in f.attrs
        assert f["mel_hz"].shape == (64,)
        assert f["long_start_s"][1] == 0.25
        assert f["short_start_s"][1] == 0.125


# ---- report, timeline, summary


@pytest.mark.slow
def test_seconds_and_rates_end_when_the_call_returns(demo, tmp_path, monkeypatch):
    write = publish.write_timeline

    def slowly(*given, **named):
        time.sleep(0.4)
        return write(*given, **named)

    monkeypatch.setattr(publish, "write_timeline", slowly)
    began = time.perf_counter()
    results = lm.build_all(demo, out_dir=tmp_path, **QUIET)
    whole = time.perf_counter() - began
    assert all(r.seconds > 0.4 for r in results)
    assert 0.4 * len(results) < results[0].run_s <= whole
    for r in results:
        report = json.loads((tmp_path / f"{r.path.name}.report.json").read_text())
        assert report["seconds"] == r.seconds
        assert r.files_per_s == pytest.approx(r.found / r.seconds)


def test_report_and_timeline_agree_with_the_build(faulty, tmp_path):
    results = lm.build_all(faulty, out_dir=tmp_path, spec=STATED, **QUIET)
    for r in results:
        report = json.loads((tmp_path / f"{r.path.name}.report.json").read_text())
        assert datetime.fromisoformat(report["created_at_utc"]).tzinfo is not None
        assert r.summary.items() <= report.items()
        assert report["rows"] + report["rejected"] == report["found"] == len(walk(faulty / r.split))
        assert len(report["rejected_files"]) == report["rejected"] == sum(report["rejected_by_code"].values())
        assert report["rows"] - sum(report["status_counts"].values()) == content(r.path)[
            "files/status"
        ].tolist().count(b"ok")
        assert report["verified"]["ok"] is True
        assert report["file_bytes"] == r.path.stat().st_size
        assert report["files_per_s"] == pytest.approx(r.found / r.seconds)
        n_segments = content(r.path)["segments_mel"].shape[0:3]
        assert r.segments_per_s == report["segments_per_s"] == pytest.approx(np.prod(n_segments) / r.seconds)
        assert f"({r.segments_per_s:,.0f} segments/s)" in repr(r)
        timeline = read_timeline(r.timeline_path)
        stages = {s.stage for s in timeline.spans if s.split == r.split}
        assert {"read", "compute", "write", "publish", "verify"} <= stages
        assert {s.split for s in timeline.spans} == {"", r.split}
        read_spans = [s for s in timeline.spans if s.stage == "read"]
        assert sum(s.n_files for s in read_spans) == r.found
        assert sum(s.n_bytes for s in read_spans) == sum(
            p.stat().st_size for p in (faulty / r.split).rglob("*.wav")
        )


def test_unmeasured_figures_are_null_and_never_zero(small, tmp_path, monkeypatch):
    for name in ("psutil", "pynvml"):
        monkeypatch.setitem(sys.modules, name, None)
    r = lm.build(small, out=tmp_path / "x.h5", **QUIET)
    text = (tmp_path / "x.h5.report.json").read_text()
    report = json.loads(text)
    measured = [k for k in report if k.startswith(("peak_", "mean_", "disk_")) and k != "mean_cpu_percent"]
    assert len(measured) >= 6
    assert {k: report[k] for k in measured} == dict.fromkeys(measured)
    assert report["machine"]["gpu"] is None
    timeline = read_timeline(r.timeline_path)
    assert timeline.samples
    for key in monitor.SAMPLE_KEYS:
        assert all(s[key] is None or key == "cpu_percent" for s in timeline.samples)


def test_report_without_a_monitor_has_no_machine_figures(small, tmp_path):
    r = lm.build(small, out=tmp_path / "x.h5", pipeline=PipelineConfig(monitor_interval_s=0.0), **QUIET)
    assert all(v is None for k, v in r.summary.items() if k.startswith(("peak_", "mean_", "disk_")))


def test_report_of_names_that_are_not_text(tmp_path, make_wav):
    root = tmp_path / os.fsdecode(b"d\xffta")
    make_wav(root / "A" / "good.wav")
    bad = root / "A" / os.fsdecode(b"b\xe4d\n.wav")
    bad.write_bytes(b"")
    r = lm.build(root, out=tmp_path / "x.h5", **QUIET)
    (shown,) = json.loads((tmp_path / "x.h5.report.json").read_text())["rejected_files"]
    import base64

    assert base64.b64decode(shown["path_base64"]) == b"A/b\xe4d\n.wav"
    assert shown["path"] == "A/b\\xe4d\\n.wav"
    assert r.rejected["path"].tolist() == ["A/b\\xe4d\\n.wav"]
    repr(r), json.dumps(r.summary)


def test_next_split_is_read_while_the_last_one_is_published(demo, tmp_path, monkeypatch):
    "The first split's publication waits, so that a build that did not overlap would wait for ever."
    import threading

    read_on = threading.Event()
    real_sync = RowFile.sync
    from leakmel.dataset.loader import BatchReader

    real_fill = BatchReader.fill

    def fill(self, slot):
        if self.listing.split == "VALIDATION":
            read_on.set()
        return real_fill(self, slot)

    def sync(self):
        if "TRAINING" in self.target.name:
            assert read_on.wait(60), "nothing of the next split was read"
        real_sync(self)

    monkeypatch.setattr(BatchReader, "fill", fill)
    monkeypatch.setattr(RowFile, "sync", sync)
    results = lm.build_all(
        demo, out_dir=tmp_path, pipeline=PipelineConfig(read_workers=1, files_per_batch=4, slots=3), **QUIET
    )
    spans = results[0].timeline.spans
    first_read = min(s.start_s for s in spans if s.stage == "read" and s.split == "VALIDATION")
    last_publish = max(s.end_s for s in spans if s.stage == "publish" and s.split == "TRAINING")
    assert first_read < last_publish
    for r in results:
        assert r.verified.ok


@pytest.mark.parametrize(
    "shape",
    [{"compute_workers": 2}, {"read_workers": 1, "compute_workers": 1, "write_workers": 1}],
    ids=["workers", "lanes"],
)
def test_engine_works_while_files_are_read(demo, tmp_path, monkeypatch, shape):
    "The second batch is not read before the engine is at the first one, which waits for that: whoever took turns would wait for ever."
    meet, n_fills, n_runs, real_fill, real_run = (
        threading.Barrier(2, timeout=60),
        count(),
        count(),
        BatchReader.fill,
        ReferenceEngine.run,
    )

    def fill(*args: Any) -> int:
        if next(n_fills) == 1:
            meet.wait()
        return real_fill(*args)

    def run(*args: Any, **options: Any) -> Any:
        if (
            threading.current_thread().name.startswith(("leakmel-worker", "leakmel-engine"))
            and next(n_runs) == 0
        ):
            meet.wait()  # not when it is tried out
        return real_run(*args, **options)

    monkeypatch.setattr(BatchReader, "fill", fill)
    monkeypatch.setattr(ReferenceEngine, "run", run)
    config = PipelineConfig(files_per_batch=2, slots=6, **shape)
    spans = lm.build_all(demo, out_dir=tmp_path, pipeline=config, engine="reference", check=2, **QUIET)[
        0
    ].timeline.spans
    reads, computes = ([s for s in spans if s.stage == stage] for stage in ("read", "compute"))
    assert any(a.start_s < b.end_s and b.start_s < a.end_s for a in reads for b in computes)


# ---- real recordings


def test_real_recordings(tmp_path):
    where = os.environ.get("LEAKMEL_REAL_WAVS")
    root = Path(where or "") / "clips_5s"
    if not where:
        pytest.skip("LEAKMEL_REAL_WAVS is not set")
    assert root.is_dir(), "LEAKMEL_REAL_WAVS names a folder without clips_5s"
    for preset in ("disjoint", "overlap"):
        r = lm.build(root, out=tmp_path / "x.h5", spec={"preset": preset}, **QUIET)
        got = check(r.path, root)
        config = json.loads(got["@config_json"])
        assert (config["sample_rate"], config["duration_s"]) == (8000, 5.0)
        assert (r.rows, len(r.rejections)) == (len(walk(root)), 0)
        assert lm.verify(r.path, root=root, sample=None).checked == r.rows


def test_column_widths_ignore_rejected_files(tmp_path, make_wav):
    "A rejected file with a long name leaves no trace in the columns."
    import h5py

    make_wav(tmp_path / "data" / "A" / "s~r~20240101_000000~2.wav")
    (tmp_path / "data" / "A" / ("long" * 30 + "~r~20240101_000001~2.wav")).write_bytes(b"no recording")
    (tmp_path / "data" / "A" / ("a" * 50 + ".wav")).write_bytes(b"no recording")
    r = lm.build(tmp_path / "data", out=tmp_path / "x.h5", spec={"duration_s": 1.0}, **QUIET)
    assert (r.rows, r.found) == (1, 3)
    with h5py.File(r.path) as f:
        assert f["files/path"][:].tolist() == [b"A/s~r~20240101_000000~2.wav"]
        assert {name: f[f"files/{name}"].dtype.itemsize for name in ("path", "sensor", "folder")} == {
            "path": 27,
            "sensor": 1,
            "folder": 1,
        }
