"Inputs and calls at the edge of what can be answered: each gets a right row or a clear refusal."

import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import raises
from left_threads import left_threads

import leakmel as lm
from leakmel.core.errors import (
    DataError,
    EngineError,
    MachineError,
    OutputError,
    SpecError,
    UsageError,
    VerifyError,
)
from leakmel.core.threads import ThreadGroup
from leakmel.dataset import verify as verify_module
from leakmel.dataset.config import PipelineConfig
from leakmel.dataset.job import Job

QUIET: dict[str, Any] = {
    "progress": "none",
    "pipeline": PipelineConfig(monitor_interval_s=0.0, files_per_batch=4),
}


@pytest.fixture
def data(tmp_path, make_wav) -> Path:
    "Twelve recordings of a second."
    for i in range(12):
        make_wav(tmp_path / "data" / ("LEAK", "NOLEAK")[i % 2] / f"H{i}~{i}~20250101_000000~8.wav", seed=i)
    return tmp_path / "data"


def float_wav(path: Path, samples: np.ndarray) -> None:
    "A mono float32 file at 4,096 Hz."
    body = samples.astype("<f4").tobytes()
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        36 + len(body),
        b"WAVE",
        b"fmt ",
        16,
        3,
        1,
        4096,
        4 * 4096,
        4,
        32,
        b"data",
        len(body),
    )
    path.write_bytes(head + body)


def test_float_recording_with_extreme_samples_is_rejected(tmp_path, data):
    float_wav(data / "LEAK" / "wild.wav", np.full(4096, 1e25))
    result = lm.build(data, out=tmp_path / "x.h5", check=None, **QUIET)
    assert (result.rows, [r.code for r in result.rejections]) == (12, ["unsupported"])
    assert result.verified.ok
    spec = lm.MelSpec.preset("disjoint", duration_s=1)
    for wild in (1e25, np.nan):
        with pytest.raises(SpecError):
            lm.log_mel(np.full(4096, wild, np.float32), spec)


@pytest.mark.parametrize("column", ["rms_db", "sample_rate"])
def test_wrong_columns_prevent_publication(tmp_path, data, monkeypatch, column):
    "A builder that mixes up the facts of a batch, with right features."
    real = Job.take

    def take(self, slot):
        done = real(self, slot)
        part = self.facts[slot.first : slot.first + slot.n]
        part[column] = part[column][::-1].copy() if column == "rms_db" else 1
        return done

    monkeypatch.setattr(Job, "take", take)
    with raises("wrong-rows", VerifyError, says="but the recording has"):
        lm.build(data, out=tmp_path / "x.h5", **QUIET)
    assert not (tmp_path / "x.h5").exists()


def test_machine_fault_during_the_check_is_not_a_wrong_row(tmp_path, data, monkeypatch):
    def read(path):
        raise MachineError("the machine failed while reading (EMFILE)", path=path)

    monkeypatch.setattr("leakmel.dataset.verify.read_wav", read)
    with pytest.raises(MachineError, match="EMFILE"):
        lm.build(data, out=tmp_path / "x.h5", **QUIET)


def test_source_removed_during_the_check_is_named(tmp_path, data, monkeypatch):
    real = verify_module.check_data_set

    def check(*args, **options):
        (data / "LEAK" / "H0~0~20250101_000000~8.wav").unlink()
        return real(*args, **options)

    monkeypatch.setattr("leakmel.dataset.publish.check_data_set", check)
    with raises("recordings-changed", DataError, says="H0~0"):
        lm.build(data, out=tmp_path / "x.h5", **QUIET)


def test_invalid_arguments_have_no_fallback(tmp_path, data):
    for device, kind in (("cuda", EngineError), ("banana", UsageError)):
        with pytest.raises(kind):
            lm.build(data, out=tmp_path / "x.h5", progress="none", pipeline=PipelineConfig(device=device))
    with raises("other-manifest", UsageError):
        lm.build(data, manifest=lm.scan(data / "LEAK"), out=tmp_path / "x.h5", **QUIET)
    for check in (-1, 2.5, "x"):
        with pytest.raises(UsageError, match="at least 0"):
            lm.build(data, out=tmp_path / "x.h5", check=check, **QUIET)  # type: ignore[arg-type]
    for wrong in ({"fsync": "no"}, {"max_bytes_in_flight": "1"}, {"device": 3}):
        with pytest.raises(UsageError):
            PipelineConfig(**wrong)
    assert not (tmp_path / "x.h5").exists()


def test_check_0_verifies_integrity_only(tmp_path, data):
    assert lm.build(data, out=tmp_path / "x.h5", check=0, **QUIET).verified.scope == "integrity only"


def test_length_without_integer_ratio_is_inferred(tmp_path, make_wav):
    for i in range(3):
        make_wav(tmp_path / "data" / "A" / f"{i}.wav", n=40_001, rate=8000, seed=i)
    result = lm.build(tmp_path / "data", out=tmp_path / "x.h5", spec={"sample_rate": 4096}, **QUIET)
    assert result.rows == 3
    assert result.summary["status_counts"] == {"resampled": 3}


def test_labels_with_equal_escaped_text_are_refused(tmp_path, make_wav):
    for i, name in enumerate(("X\ny", "X\\ny")):
        make_wav(tmp_path / "data" / name / "a.wav", seed=i)
    with raises("labels-alike", DataError):
        lm.build(tmp_path / "data", out=tmp_path / "x.h5", **QUIET)


def test_files_next_to_the_splits_are_reported(tmp_path, make_wav):
    for place in ("TRAINING/A", "TRAINING_OLD/A", "."):
        make_wav(tmp_path / place / "a.wav")
    problems = lm.scan(tmp_path).problems
    assert problems[problems["kind"] == "not_a_split"]["path"].tolist() == ["TRAINING_OLD", "a.wav"]


def test_a_second_interrupt_does_not_leave_threads(tmp_path, data, monkeypatch):
    "The first comes while the caller waits, the second while the threads are being stopped."
    first, second, real = [True], [True], ThreadGroup.stop

    def wait(self, timeout=None):
        if first:
            first.clear()
            raise KeyboardInterrupt
        return True

    def stop(self, error=None):
        if second:
            second.clear()
            raise KeyboardInterrupt
        real(self, error)

    monkeypatch.setattr(threading.Event, "wait", wait)
    monkeypatch.setattr(ThreadGroup, "stop", stop)
    with pytest.raises(KeyboardInterrupt):
        lm.build(data, out=tmp_path / "x.h5", engine="reference", **QUIET)
    assert not left_threads()
    assert not (tmp_path / "x.h5").exists()
    assert not list(tmp_path.glob(".x*"))


def test_only_a_data_set_is_replaced(tmp_path, data):
    for name, content in (("notes.txt", b"mine"), ("other.wav", b"RIFF")):
        (tmp_path / name).write_bytes(content)
        with raises("output-exists", OutputError, path=tmp_path / name):
            lm.build(data, out=tmp_path / name, **QUIET)
        assert (tmp_path / name).read_bytes() == content
    assert (
        lm.build(data, out=tmp_path / "x.h5", **QUIET).path
        == lm.build(data, out=tmp_path / "x.h5", **QUIET).path
    )


def test_root_one_level_too_high_is_refused(tmp_path, make_wav):
    make_wav(tmp_path / "up" / "set" / "TRAINING" / "LEAK" / "a.wav")
    make_wav(tmp_path / "up" / "set" / "Testing" / "day" / "LEAK" / "b.wav")
    make_wav(tmp_path / "up" / "other" / "a.wav")
    with pytest.raises(DataError, match=r"one level deeper.*found set/TRAINING, set/Testing") as error:
        lm.scan(tmp_path / "up")
    assert str(tmp_path / "up" / "set") in str(error.value.remedy)


def test_a_hidden_folder_of_splits_is_not_taken_for_the_data(tmp_path, make_wav):
    make_wav(tmp_path / "up" / "LEAK" / "a.wav")
    make_wav(tmp_path / "up" / ".copy" / "TRAINING" / "LEAK" / "a.wav")
    make_wav(tmp_path / "up" / "LEAK" / "pump" / "TRAINING" / "b.wav")
    assert lm.scan(tmp_path / "up").label_names == ("LEAK",)


def test_a_refused_build_leaves_no_folder(tmp_path, data, make_wav):
    with raises("empty-mel-band"):
        lm.build(data, out=tmp_path / "new" / "x.h5", spec={"n_mels": 400}, **QUIET)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_forked_process_builds_too(tmp_path, data):
    "After a build in its parent, whose threads it has not got: a notebook's worker processes are made like that."
    code = (
        f"import os, leakmel as lm\n"
        f"def build(name): return lm.build({str(data)!r}, out={str(tmp_path)!r} + '/' + name, engine='torch', progress='none').rows\n"
        "assert build('parent.h5') == 12\n"
        "if (child := os.fork()) == 0: os._exit(build('child.h5'))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "12", done.stderr
    assert (tmp_path / "parent.h5").read_bytes() == (tmp_path / "child.h5").read_bytes()
