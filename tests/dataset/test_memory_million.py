"What a million recordings must fit into: bytes that one more recording takes in each step around a build."

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from each import each

from leakmel.recordings.demo import wav_bytes

pytestmark = [pytest.mark.site, pytest.mark.slow]
FEW, MANY = 10_000, 50_000
IMPORTS = "import re, sys; import leakmel as lm; root, out, spec = *sys.argv[1:], lm.MelSpec(duration_s=0.25)"
BUILD = "lm.build(root, out=out, spec=spec, engine='cpu', progress='none')"
PREDICT = """
import torch
from leakmel.detector.data.segments import make_task
from leakmel.detector.model.detector import Detector
from leakmel.detector.model.net import LeakNet, NetSettings
Detector.segment_scores = lambda self, mels, counts: torch.rand(mels.shape[:2])
detector = Detector(LeakNet(NetSettings(channels=(8, 8))), make_task(["LEAK", "NOLEAK"]), spec)
"""
SCORE = """
listed = lm.scan(root, progress="none")
p = lm.predict(root, detector, out=out + ".csv", manifest=listed, engine="cpu", device="cpu", progress="none")
p.summary, p.text(), p.table
"""
# When the garbage collector runs is chance: blocks that only it frees would be in memory at some peaks.
NO_GC = "import gc; gc.disable()"
PEAK = "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"

# step -> what is done before, what is done, bytes that one more recording may take at the peak
STEPS = {
    "card of a scan": ("", "m = lm.scan(root, progress='none'); m._repr_html_(); m.table; m.problems", 1000),
    "columns of a data set": ("", "lm.open_dataset(out).files", 1200),
    "update with nothing new": ("", BUILD, 1400),
    "prediction": (PREDICT, SCORE, 1500),
}


def run_child(*lines: str, root: Path) -> str:
    out = root.with_name(f"{root.name}.h5")
    words = [sys.executable, "-c", "\n".join([IMPORTS, *lines]), str(root), str(out)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[int, Path]:
    "FEW and MANY recordings with a data set each: names of short recordings that are all alike but for one sample."
    top = tmp_path_factory.mktemp("names")
    rng = np.random.default_rng(0)
    roots = {n: top / f"names-{n}" for n in (FEW, MANY)}
    for n, root in roots.items():
        for label in ("LEAK", "NOLEAK"):
            (root / label).mkdir(parents=True)
        for i in range(n):
            path = root / ("LEAK" if i % 2 else "NOLEAK") / f"H{i % 300:03d}~{i:07d}~20240229_120000~8.wav"
            if i % 100 == 0:
                original = path
                path.write_bytes(wav_bytes(rng.integers(-999, 999, 1024).astype(np.int16), 4096))
            else:
                os.link(original, path)
        run_child(BUILD, root=root)
    return roots


@each("step", STEPS)
def test_memory_of_one_more_recording(built, step):
    before, work, most = STEPS[step]
    peaks = {n: 1024 * int(run_child(NO_GC, before, work, PEAK, root=root)) for n, root in built.items()}
    more = (peaks[MANY] - peaks[FEW]) / (MANY - FEW)
    assert 100 < more < most, f"{more:.0f} bytes a recording; peaks {peaks}"
