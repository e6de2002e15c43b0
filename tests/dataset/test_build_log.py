"While a build runs its bars state what it does."

from pathlib import Path

import pytest
from independent import leftovers

import leakmel as lm
from leakmel.dataset.config import PipelineConfig


@pytest.fixture
def data(tmp_path, make_wav) -> Path:
    "Two splits of twelve recordings of a second, one of them no recording."
    for split in ("TRAINING", "TESTING"):
        for i in range(12):
            make_wav(tmp_path / "data" / split / ("LEAK", "NOLEAK")[i % 2] / f"{i:02d}.wav", seed=i)
    (tmp_path / "data" / "TRAINING" / "LEAK" / "00.wav").write_bytes(b"")
    return tmp_path / "data"


def test_log_shows_the_progress_of_a_build(data, tmp_path, caplog):
    config = PipelineConfig(monitor_interval_s=0.05, files_per_batch=2)
    with caplog.at_level("INFO", logger="leakmel"):
        lm.build_all(data, out_dir=tmp_path / "out", progress="log", pipeline=config)
    lines = [r.getMessage() for r in caplog.records]
    for start in ("TRAINING: 12 of 12 files", "TESTING: 12 of 12 files"):
        assert any(line.startswith(start) and "published" in line for line in lines), lines
    assert any("1 rejected" in line for line in lines)
    assert leftovers(tmp_path / "out") == sorted(
        f"{split}_DATASET.H5{end}"
        for split in ("TRAINING", "TESTING")
        for end in ("", ".report.json", ".timeline.json")
    )
