"Rows expected by the check are computed in advance, and recordings that changed afterwards are detected."

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each

import leakmel as lm
from leakmel.core.errors import DataError, LeakmelError, MachineError, VerifyError
from leakmel.core.store import Folder
from leakmel.dataset import consistency as sources
from leakmel.dataset.config import PipelineConfig
from leakmel.dataset.consistency import Sources, expected_bounds, read_source
from leakmel.dataset.job import Job
from leakmel.dataset.verify import check_data_set, pick_rows
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


def test_precomputed_rows_equal_the_reference(data):
    known = Sources(Folder(data), SPEC)
    assert known.precompute(paths_in(data), together=3) == 16
    for path in paths_in(data):
        source, now = known.get(path), read_source(os.path.join(os.fsencode(data), path), SPEC)
        assert now.samples is not None
        assert source.bounds is not None
        right = bounds_of(reference_features(now.samples, SPEC), SPEC)
        assert (source.digest, source.facts, source.samples) == (now.digest, now.facts, None)
        assert all(map(np.array_equal, source.bounds, right))


def test_expected_rows_keep_order_with_precomputed_ones(data):
    both = [read_source(os.path.join(os.fsencode(data), path), SPEC) for path in paths_in(data)[:5]]
    expected_bounds(both[1:4:2], SPEC)
    all_of = expected_bounds(both, SPEC)
    for i, source in enumerate(both):
        assert source.samples is not None
        assert np.array_equal(all_of.db[i], reference_features(source.samples, SPEC).db)


@each("change", ["another recording", "touched", "replaced by the same", "gone"])
def test_a_file_that_changed_is_read_again(data, tmp_path, change):
    known, path = Sources(Folder(data), SPEC), paths_in(data)[0]
    known.precompute([path])
    before, file = known.get(path), data / os.fsdecode(path)
    if change == "another recording":
        write_wav(file, np.arange(4096).astype(np.int16))
    if change == "touched":
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    if change == "replaced by the same":
        (tmp_path / "x.wav").write_bytes(file.read_bytes())
        os.utime(tmp_path / "x.wav", ns=(0, file.stat().st_mtime_ns))
        (tmp_path / "x.wav").replace(file)
    if change == "gone":
        file.unlink()
        with pytest.raises(LeakmelError):
            known.get(path)
        return
    assert known.get(path) is not before
    assert (known.get(path).digest != before.digest) == (change == "another recording")


def test_precomputing_stops_when_all_rows_are_written(data):
    asked = list[int]()

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > 2

    assert Sources(Folder(data), SPEC).precompute(paths_in(data), stopped, together=4) == 8


def test_precomputing_skips_rejected_recordings_and_raises_machine_faults(data, monkeypatch):
    (data / "LEAK" / "00.wav").write_bytes(b"RIFF")
    known = Sources(Folder(data), SPEC)
    assert known.precompute(paths_in(data)) == 15

    def broken(path):
        raise MachineError("the machine failed while reading (EIO)", path=path)

    monkeypatch.setattr(sources, "read_wav", broken)
    with pytest.raises(MachineError, match="EIO"):
        Sources(Folder(data), SPEC).precompute(paths_in(data))


def slow_rows(monkeypatch, until: Callable[[], bool]) -> None:
    "Let writers wait until something is so."
    real, given_up = Job.take, threading.Event()

    def take(self, slot):
        for _ in range(6000):
            if until() or given_up.wait(0.01):
                break
        else:
            given_up.set()
        return real(self, slot)

    monkeypatch.setattr(Job, "take", take)


def test_check_sample_is_read_once_during_the_build(data, tmp_path, monkeypatch):
    read = counted(monkeypatch)
    slow_rows(monkeypatch, lambda: len(read) >= 8)
    result = lm.build(data, out=tmp_path / "x.h5", check=8, **QUIET)
    assert result.verified.checked == 8
    assert result.verified.ok
    names = [path for _, path in read]
    assert 8 <= len(names) <= 10, "the loudest and the quietest row are not known before"
    assert len(set(names)) == len(names)
    assert {name for name, _ in read} == {"leakmel-publisher-0"}
    stages = [(s.start_s, s.stage) for s in result.timeline.spans if s.stage in ("verify", "publish")]
    assert min(stages)[1] == "verify"


def test_recording_changed_after_precomputing_fails_the_build(data, tmp_path, monkeypatch):
    read = counted(monkeypatch)
    victim = data / os.fsdecode(paths_in(data)[0])

    def changed() -> bool:
        if len(read) < 16:
            return False
        write_wav(victim, np.arange(4096).astype(np.int16))
        return True

    slow_rows(monkeypatch, changed)
    with pytest.raises(DataError, match="were changed or removed"):
        lm.build(data, out=tmp_path / "x.h5", check=16, **QUIET)
    assert not (tmp_path / "x.h5").exists()


def test_wrong_rows_are_detected_with_precomputed_rows(data, tmp_path, monkeypatch):
    read, real = counted(monkeypatch), ReferenceEngine.run

    def wrong(self, samples, out, **named):
        moments = real(self, samples, out, **named)
        if len(samples) > 1:
            out[..., 0, :] += 1  # a single one is the check of the engine at its start
        return moments

    slow_rows(monkeypatch, lambda: len(read) >= 16)
    monkeypatch.setattr(ReferenceEngine, "run", wrong)
    with pytest.raises(VerifyError, match="differs from the reference"):
        lm.build(data, out=tmp_path / "x.h5", check=16, engine="reference", **QUIET)
    assert len(read) == 16


class Untrue(Sources):
    "Sources that must not be asked."

    def get(self, path, file=None):
        raise MachineError("asked", path=path)


def test_sources_of_another_folder_or_spec_are_not_used(data, tmp_path):
    lm.build(data, out=tmp_path / "x.h5", **QUIET)
    with lm.open_dataset(tmp_path / "x.h5") as ds:
        spec = ds.spec
    for other in (
        Untrue(Folder(tmp_path), spec),
        Untrue(Folder(data), lm.MelSpec.preset("disjoint", duration_s=1, n_mels=40)),
    ):
        assert check_data_set(tmp_path / "x.h5", root=data, sample=4, sources=other).ok
    with pytest.raises(MachineError, match="asked"):
        check_data_set(tmp_path / "x.h5", root=data, sample=4, sources=Untrue(Folder(data), spec))


def test_waveforms_are_compared_with_precomputed_rows(data, tmp_path, monkeypatch):
    read = counted(monkeypatch)
    slow_rows(monkeypatch, lambda: len(read) >= 16)
    result = lm.build(data, out=tmp_path / "x.h5", check=16, with_waveforms=True, **QUIET)
    assert result.verified.checked == 16
    with lm.open_dataset(tmp_path / "x.h5") as ds:
        bare = Sources(Folder(data), ds.spec)
    bare.precompute(paths_in(data))
    assert check_data_set(tmp_path / "x.h5", root=data, sample=None, sources=bare).ok


def test_precomputed_rows_are_compared_first():
    labels, level = np.zeros(1000, np.int16), np.arange(1000.0)
    picked = pick_rows(1000, 10, labels, level, (500,), [7, 8, 9, 0])
    assert {0, 999, 500, 7, 8, 9} <= set(picked.tolist())
    assert len(set(picked.tolist())) == 10
    assert len(pick_rows(1000, 3, labels, level, (500,), range(1000))) == 3
