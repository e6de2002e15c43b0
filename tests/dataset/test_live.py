"While a build runs its bars state what it does."

from pathlib import Path

import pytest

import leakmel as lm
from leakmel.core.timeline import Span, Timeline
from leakmel.dataset.run import pipeline
from leakmel.dataset.run.config import PipelineConfig
from leakmel.dataset.run.pipeline import pulse_text
from outsider import leftovers


@pytest.fixture
def data(tmp_path, make_wav) -> Path:
    "Two splits of twelve recordings of a second, one of them no recording."
    for split in ("TRAINING", "TESTING"):
        for i in range(12):
            make_wav(tmp_path / "data" / split / ("LEAK", "NOLEAK")[i % 2] / f"{i:02d}.wav", seed=i)
    (tmp_path / "data" / "TRAINING" / "LEAK" / "00.wav").write_bytes(b"")
    return tmp_path / "data"


def test_the_log_tells_how_far_a_build_is(data, tmp_path, caplog):
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


def test_rates_are_those_of_the_last_seconds(monkeypatch):
    timeline, now_s = Timeline(), [2.0]
    monkeypatch.setattr(pipeline, "_WINDOW_S", 10)
    timeline.now_s = lambda: now_s[0]  # type: ignore[method-assign]

    def did(stage: str, n: int) -> None:
        timeline.spans.append(Span(stage, "a", 0.0, now_s[0], "TRAINING", 0, n, 1_000_000 * n))

    did("read", 100)
    did("compute", 40)
    assert pulse_text(timeline, 4) == ["reading 50.0 MB/s", "computing 20 files/s"]
    now_s[0] = 20.0
    did("read", 180)
    assert pulse_text(timeline, 4) == ["reading 18.0 MB/s"]
    now_s[0] = 40.0
    assert pulse_text(timeline, 4) == []


def test_queues_and_machine_are_those_that_were_noted_last():
    timeline = Timeline()
    for value in (1, 4):
        timeline.gauge("queue.compute", value)
    timeline.gauge("memory", 99)
    timeline.samples.append(
        {"cpu_percent": 197.4, "rss_bytes": 2.1e8, "gpu_percent": 35.0, "vram_bytes": 1.5e9}
    )
    texts = ["compute queue 4 of 6", "CPU 197 %", "GPU 35 %", "210 MB RAM", "1.50 GB VRAM"]
    assert pulse_text(timeline, 6) == texts
