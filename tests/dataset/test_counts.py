"What a build does for each recording, counted: calls of Python functions, which only one thread at a time can make."

import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import leakmel as lm
from leakmel.recordings.conform import native
from leakmel.recordings.demo import write_wav

CONFIG = lm.PipelineConfig(
    compute_workers=2, files_per_batch=256, fsync=False, monitor_interval_s=0, read_ahead=0
)


def python_calls(root: Path, out: Path) -> Counter[str]:
    "Calls of Python functions by name in all threads of a listing and a build."
    calls = Counter[str]()

    def count(frame, event, arg):
        if event == "call":
            calls[f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_qualname}"] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        result = lm.build(root, split="training", out=out, engine="cpu", pipeline=CONFIG, progress="none")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert result.rows == int(root.name)
    return calls


@pytest.mark.skipif(native() is None, reason="without compiled code each recording is read by Python")
def test_calls_of_python_for_each_recording(tmp_path):
    "Listing, reading, writing and checking: about 400 calls for a batch of 256, and none for each."
    small, large = 400, 1600
    noise = np.random.default_rng(1).normal(0, 900, 4096 + large).astype(np.int16)
    for n in (small, large):
        for label in ("LEAK", "NORMAL"):
            (tmp_path / f"{n}/TRAINING/{label}").mkdir(parents=True)
        for k in range(n):
            name = f"H{k % 50}~{k}~202511{1 + k % 28:02}_{k % 24:02}0000~16.wav"
            write_wav(tmp_path / f"{n}/TRAINING/{('LEAK', 'NORMAL')[k % 2]}/{name}", noise[k : k + 4096])
    python_calls(tmp_path / str(small), tmp_path / "first.h5")  # loads what a process loads once
    few = python_calls(tmp_path / str(small), tmp_path / "small.h5")
    many = python_calls(tmp_path / str(large), tmp_path / "large.h5")
    each = {name: (many[name] - few[name]) / (large - small) for name in many}
    most = sorted(each.items(), key=lambda item: -item[1])[:5]
    assert sum(each.values()) < 2, most
