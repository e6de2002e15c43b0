"Rows that the check expects, and recordings that changed after their rows were computed."

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leakmel as lm
from leakmel.core.errors import DataError, VerifyError
from leakmel.dataset import verify as sources
from leakmel.dataset.config import PipelineConfig
from leakmel.dataset.job import Job
from leakmel.dataset.verify import check_data_set, expected_bounds, read_source
from leakmel.mel.engines import ReferenceEngine
from leakmel.mel.spec import bounds_of, reference_features
from leakmel.recordings.demo import write_wav

pytestmark = pytest.mark.quick

SPEC = lm.MelSpec.preset("disjoint", duration_s=1)
QUIET: dict[str, Any] = {
    "progress": "none",
    "pipeline": PipelineConfig(monitor_interval_s=0.0, files_per_batch=4),
}


@pytest.fixture
def data(tmp_path, make_wav) -> Path:
    "Sixteen recordings of a second."
    for i in range(16):
        make_wav(tmp_path / "data" / ("LEAK", "NOLEAK")[i % 2] / f"{i:02d}.wav", seed=i)
    return tmp_path / "data"


def paths_in(data: Path) -> list[bytes]:
    return sorted(os.fsencode(p.relative_to(data)) for p in data.rglob("*.wav"))


def counted(monkeypatch) -> list[tuple[str, bytes]]:
    "Recordings that the check reads, with the thread that does."
    read, real = list[tuple[str, bytes]](), sources.read_wav

    def spy(path):
        read.append((threading.current_thread().name, path))
        return real(path)

    monkeypatch.setattr(sources, "read_wav", spy)
    return read


def test_expected_rows_are_those_of_the_reference_in_order(data):
    both = [read_source(os.path.join(os.fsencode(data), path), SPEC) for path in paths_in(data)[:5]]
    all_of = expected_bounds(both, SPEC)
    for i, source in enumerate(both):
        assert source.samples is not None
        right = bounds_of(reference_features(source.samples, SPEC), SPEC)
        assert all(np.array_equal(x[i], y) for x, y in zip(all_of, right, strict=True))


def test_check_sample_is_read_once(data, tmp_path, monkeypatch):
    read = counted(monkeypatch)
    result = lm.build(data, out=tmp_path / "x.h5", check=8, **QUIET)
    assert result.verified.checked == 8
    assert result.verified.ok
    names = [path for _, path in read]
    assert len(set(names)) == len(names) == 8
    assert {name for name, _ in read} == {"leakmel-publisher-0"}


def test_recording_changed_after_its_row_was_computed_fails_the_build(data, tmp_path, monkeypatch):
    victim, real = data / os.fsdecode(paths_in(data)[0]), Job.take

    def take(self, slot):
        write_wav(victim, np.arange(4096).astype(np.int16))
        return real(self, slot)

    monkeypatch.setattr(Job, "take", take)
    config = PipelineConfig(monitor_interval_s=0.0, files_per_batch=16, compute_workers=1)
    with pytest.raises(DataError, match="were changed or removed"):
        lm.build(data, out=tmp_path / "x.h5", check=16, progress="none", pipeline=config)
    assert not (tmp_path / "x.h5").exists()


def test_wrong_rows_are_detected(data, tmp_path, monkeypatch):
    read, real = counted(monkeypatch), ReferenceEngine.run

    def wrong(self, samples, out, **named):
        moments = real(self, samples, out, **named)
        if len(samples) > 1:
            out[..., 0, :] += 1  # a single one is the check of the engine at its start
        return moments

    monkeypatch.setattr(ReferenceEngine, "run", wrong)
    with pytest.raises(VerifyError, match="differs from the reference"):
        lm.build(data, out=tmp_path / "x.h5", check=16, engine="reference", **QUIET)
    assert len(read) == 16


def test_waveforms_are_compared(data, tmp_path):
    result = lm.build(data, out=tmp_path / "x.h5", check=16, with_waveforms=True, **QUIET)
    assert result.verified.checked == 16
    assert check_data_set(tmp_path / "x.h5", root=data, sample=None).ok
