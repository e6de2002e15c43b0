"Contradictions that need no digest: rejected files that are good, splits and labels against the folders, and a stranger's long paths."

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from each import each
from independent import leftovers

import leakmel as lm
from leakmel.core.errors import RecordingError, VerifyError
from leakmel.dataset import loader
from leakmel.dataset.loader import BatchReader
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.dataset.schema import DIGEST_ATTRIBUTE, metadata_digest
from leakmel.dataset.verify import pick_rejected
from leakmel.recordings.naming import match_pattern

QUIET: dict[str, Any] = {
    "engine": "reference",
    "progress": "none",
    "pipeline": PipelineConfig(monitor_interval_s=0.0, files_per_batch=2),
}
SETTINGS: dict[str, Any] = {
    "sample_rate": 4096,
    "duration_s": 1.0,
    "preset": "disjoint",
    "long": "reject",
    "rate": "reject",
}


@pytest.fixture
def data(tmp_path, make_wav) -> Path:
    "Twelve good files, and eight that are rejected for five reasons."
    root = tmp_path / "data"
    for k in range(12):
        make_wav(root / ("LEAK" if k % 2 else "DRY") / f"{k:02d}.wav", seed=k)
    for k in range(3):
        (root / "LEAK" / f"broken {k}.wav").write_bytes(b"RIFF")
    (root / "DRY" / "empty.wav").write_bytes(b"")
    make_wav(root / "DRY" / "fast.wav", rate=8000)
    make_wav(root / "DRY" / "long.wav", n=5000)
    make_wav(root / "lost.wav")
    make_wav(root / ".hidden" / "a.wav")
    return root


def forged(path: Path, **attributes) -> None:
    "Give a data set other attributes, and digests that fit."
    with h5py.File(path, "r+") as f:
        f.attrs.update(attributes)
        f.attrs[DIGEST_ATTRIBUTE] = metadata_digest(f)


def set_column(file: Path, **columns: list[bytes]) -> None:
    "Give a data set other rejected files, and digests that fit."
    with h5py.File(file, "r+") as f:
        for name, values in columns.items():
            del f[f"rejected/{name}"]
            f[f"rejected/{name}"] = np.array(values)
        f.attrs[DIGEST_ATTRIBUTE] = metadata_digest(f)


def rejected_of(path: Path) -> tuple[list[bytes], list[bytes]]:
    "Paths and codes of the rejected files."
    with h5py.File(path) as f:
        return f["rejected/path"][:].tolist(), f["rejected/code"][:].tolist()


# ---- rejected files


def test_correct_rejections_are_no_problem(data, tmp_path):
    r = lm.build(data, out=tmp_path / "x.h5", spec=SETTINGS, **QUIET)
    assert {x.code for x in r.rejections} >= {"empty", "wrong_rate", "too_long", "no_label"}
    for sample in (64, 2, None):
        report = lm.verify(r.path, root=data, sample=sample)
        assert report.ok, report.problems
        assert report.checked == min(r.rows, r.rows if sample is None else sample), (
            "rejected files are not counted"
        )


def test_rejected_files_are_reported_in_the_order_of_their_paths(data, tmp_path, monkeypatch):
    "Whatever thread read them, and when."
    real = BatchReader._read

    def read(self, slot, i, k):
        if k < 2:
            time.sleep(0.2)  # the others overtake it
        return real(self, slot, i, k)

    monkeypatch.setattr(BatchReader, "_read", read)
    r = lm.build(
        data,
        out=tmp_path / "x.h5",
        spec=SETTINGS,
        engine="reference",
        progress="none",
        pipeline=PipelineConfig(compute_workers=2, read_workers=3, slots=5, files_per_batch=2),
    )
    shown = [x["path"] for x in json.loads(Path(f"{r.path}.report.json").read_text())["rejected_files"]]
    assert shown == [os.fsdecode(x.path) for x in r.rejections] == sorted(shown)
    assert shown[0] == "DRY/empty.wav"
    assert len(shown) > 5


def test_wrong_rejections_prevent_publication(data, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "native", lambda: None)
    real = BatchReader._read

    def read(self, slot, i, k):
        if self.listing.paths[k] == b"LEAK/03.wav":
            raise RecordingError("unreadable", "the file cannot be read (EFAULT)")
        return real(self, slot, i, k)

    monkeypatch.setattr(BatchReader, "_read", read)
    with pytest.raises(
        VerifyError,
        match=r"03.wav: the file was rejected as unreadable, but it now is valid: either the rejection was wrong, or the file was repaired",
    ):
        lm.build(data, out=tmp_path / "out" / "x.h5", spec=SETTINGS, check=None, **QUIET)
    assert not leftovers(tmp_path / "out")
    r = lm.build(data, out=tmp_path / "x.h5", spec=SETTINGS, check=0, **QUIET)
    assert lm.verify(r.path).ok
    assert not lm.verify(r.path, root=data, sample=None).ok


@pytest.mark.slow
@each(
    ("name", "code", "words"),
    [
        (
            b"DRY/fast.wav",
            b"too_short",
            "the file was rejected as too_short, but it now must be rejected as wrong_rate",
        ),
        (b"DRY/long.wav", b"no_label", "must be rejected as too_long"),
        (b"lost.wav", b"empty", "must be rejected as no_label"),
        (b"DRY/empty.wav", b"unreadable", "must be rejected as empty"),
    ],
)
def test_a_wrong_reason_is_a_problem(data, tmp_path, name, code, words):
    path = lm.build(data, out=tmp_path / "x.h5", spec=SETTINGS, **QUIET).path
    paths, codes = rejected_of(path)
    set_column(path, code=[code if p == name else c for p, c in zip(paths, codes, strict=True)])
    report = lm.verify(path, root=data)
    assert [p for p in report.problems if words in p and os.fsdecode(name) in p] == report.problems != []
    set_column(path, code=[b"changed" if p == name else c for p, c in zip(paths, codes, strict=True)])
    assert lm.verify(path, root=data).ok, "it may have been in the middle of a write"


def test_rejected_file_that_was_repaired_or_removed(data, tmp_path):
    path = lm.build(data, out=tmp_path / "x.h5", spec=SETTINGS, **QUIET).path
    shutil.copy(data / "LEAK" / "01.wav", data / "DRY" / "empty.wav")
    assert ["repaired later" in p for p in lm.verify(path, root=data).problems] == [True]
    (data / "DRY" / "empty.wav").unlink()
    report = lm.verify(path, root=data, accounting=False)
    assert (
        report.problems
        == report.moved
        == ["DRY/empty.wav: the file was rejected as empty and no longer exists"]
    )


def test_a_rejected_file_outside_the_root_is_not_read(data, tmp_path, make_wav):
    path = lm.build(data, out=tmp_path / "x.h5", spec=SETTINGS, **QUIET).path
    make_wav(tmp_path / "outside" / "a.wav")
    (data / "DRY" / "empty.wav").unlink()
    (data / "DRY" / "empty.wav").symlink_to(tmp_path / "outside" / "a.wav")
    assert lm.verify(path, root=data, accounting=False).ok


def test_sample_of_rejected_files():
    codes = np.array(
        [b"empty", b"changed", b"not_wav", *[b"empty"] * 500, b"truncated", b"empty", b"changed"]
    )
    for n in (0, 1, 4, 20, 64):
        picked = pick_rejected(codes, n).tolist()
        assert len(set(picked)) == n
        assert picked == sorted(picked) == pick_rejected(codes, n).tolist()
    assert {0, 2, 503, 504} <= set(pick_rejected(codes, 4).tolist())
    assert set(pick_rejected(codes, None).tolist()) == set(range(506)) - {1, 505}
    assert len(pick_rejected(codes[:0], 5)) == len(pick_rejected(np.array([b"changed"]), 5)) == 0


# ---- folders


@pytest.mark.slow
def test_splits_against_the_folders(demo, data, tmp_path):
    path = lm.build(demo, split="testing", out=tmp_path / "y.h5", **QUIET).path
    assert lm.verify(path, root=demo).ok
    forged(path, split="")
    assert not lm.verify(path, root=demo).ok
    data.rename(tmp_path / "TESTING")
    path = lm.build(
        tmp_path, split="testing", out=tmp_path.parent / f"{tmp_path.name}.h5", spec=SETTINGS, **QUIET
    ).path
    assert lm.verify(path, root=tmp_path / "TESTING").ok, "the split's own folder"
    assert lm.verify(path, root=tmp_path).ok


# ---- a stranger's paths


@pytest.mark.slow
@each("step", [b"a" * 3000, b"a" * 250 + b"/", b"a1_" * 60 + b"/"])
@each(
    "pattern",
    [
        "{start_time}a{gain}a{split}a{label}",
        "{start_time}a{gain}a{sensor}a{label}",
        "{**}/{start_time}a{gain}a{split}a{label}",
        "{*}a{*}a{*}a{gain}a{start_time}a{label}b",
    ],
)
def test_long_paths_in_a_hostile_file_end_the_check(data, tmp_path, pattern, step):
    path = lm.build(data, out=tmp_path / "x.h5", spec=SETTINGS, **QUIET).path
    with h5py.File(path, "r+") as f:
        del f["files/path"]
        f["files/path"] = np.array([(step * 20)[:3990].rstrip(b"/") + b"/%02d.wav" % k for k in range(12)])
    forged(
        path,
        naming_json=json.dumps(
            {"source": "pattern", "pattern": pattern, "base": "root" if "{split}" in pattern else "split"}
        ),
    )

    assert not lm.verify(path).ok
    lm.open_dataset(path).close()


def test_usual_path_lengths_are_within_the_limit():
    name = "train_" + "pump_16_" * 20 + "LEAK_H07_x_20250314_020000_16dB"
    assert len(name) > 190
    found = match_pattern("{split}_{folder}_{label}_{sensor}_{session}_{start_time}_{gain}", name)
    assert found is not None
    assert (found["split"], found["start_time"], found["gain"]) == ("train", "20250314_020000", "16dB")
    pattern = "{label}_{sensor}_{recording}_{session}_{start_time}_{gain}"
    found = match_pattern(pattern, "training" + "_ab" * 72)
    assert found is not None
    assert (found["label"], found["start_time"]) == ("training", "ab")
    found = match_pattern("{start_time}a{gain}a{split}a{sensor}", "a" * 4000)
    assert found is None
