"A detector that was never trained, and folders of recordings for it."

from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import leakmel as lm
from leakmel.detector.data.segments import Segments, make_task
from leakmel.detector.model.detector import Detector
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.recordings.demo import write_wav

RATE = 4096
SPEC = lm.MelSpec.preset("disjoint", duration_s=1.0)  # four long segments


def made_detector(spec: lm.MelSpec = SPEC, seed: int = 0, **more: Any) -> Detector:
    "A net that was never trained, with scores all over the range."
    torch.manual_seed(seed)
    _, n_short, n_mels, n_frames = spec.row_shape
    settings = NetSettings(n_mels, n_frames * n_short, channels=(8, 8))
    net = LeakNet(settings, np.full(n_mels, -30.0), np.full(n_mels, 3.0))
    with torch.no_grad():
        net.classes.weight.mul_(20)
    return Detector(net.eval(), make_task(["LEAK", "NOLEAK"]), spec, **more)


def noise(seed: int, n: int = RATE, level: int = 900) -> np.ndarray:
    return np.random.default_rng(seed).integers(-level, level, n).astype(np.int16)


def put(folder: Path, name: str, samples: np.ndarray, rate: int = RATE) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    write_wav(folder / name, samples, rate)


def is_installed(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True


def write_mixed(folder: Path) -> Path:
    "A flat folder: eight seconds-long recordings as the model knows them, some of other lengths and rates, and two that are none."
    for k in range(8):
        put(folder, f"plain{k}.wav", noise(k, level=200 * k + 50))
    put(folder, "long.wav", noise(20, 40 * RATE + 99))
    put(folder, "short.wav", noise(21, 2500))
    put(folder, "tiny.wav", noise(22, 1023))
    if is_installed("soxr"):  # a CUDA image has none, and a test with these files runs on one
        put(folder, "fast.wav", noise(23, 6 * 8000), 8000)
        put(folder, "same size.wav", noise(24), 8192)
    put(folder, "stereo.wav", np.stack([noise(25, 9000), -noise(25, 9000)], 1))
    (folder / "broken.wav").write_bytes(b"RIFF....WAVE")
    return folder


def earlier_system(path: Path, n: int, seed: int) -> Segments:
    "Recordings in a file of the earlier system: no names, no digests."
    y = np.arange(n) % 2
    rows = np.random.default_rng(seed).normal(-40, 3, (n, 4, 2, 64, 1)) + 4 * y[:, None, None, None, None]
    with h5py.File(path, "w") as f:
        f["labels"], f["segments_mel"] = y.astype(np.int16), rows.astype(np.float16)
        f.attrs["config_json"], f.attrs["labels_json"], f.attrs["label2id_json"] = (
            "{}",
            '["LEAK", "NOLEAK"]',
            '{"LEAK": 0, "NOLEAK": 1}',
        )
    return Segments(path, level="recording", task=None, legacy=True, preload_to_ram=False)
