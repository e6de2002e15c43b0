"Detectors as programs: the same scores from samples, for both presets. Model files: others are not replaced."

import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from errors import raises

import leakmel as lm
from leakmel.core.errors import OutputError, UsageError
from leakmel.detector.data.segments import make_task
from leakmel.detector.model import files
from leakmel.detector.model.detector import Detector, image_shape, load_detector
from leakmel.detector.model.files import plain_bytes
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.extras.onnx import MelFeatures, SamplesToProbability
from leakmel.mel.spec import compare, reference_features, reference_log_mel
from leakmel.recordings.demo import write_wav

pytestmark = pytest.mark.usefixtures("one_thread")


def made(preset: str, **changes: Any) -> Detector:
    "An untrained detector; its classes are told apart by large weights, so that a small error shows."
    spec = lm.MelSpec.preset(preset, duration_s=1, **changes)
    n_mels, width = image_shape(spec.row_shape)
    torch.manual_seed(1)
    net = LeakNet(
        NetSettings(n_mels=n_mels, width=width, n_classes=3, channels=(8, 8)),
        np.full(n_mels, -60.0),
        np.full(n_mels, 10.0),
    )
    return Detector(net, make_task(["BACKGROUND", "LEAK", "NORMAL"]), spec, vote="frac_vote", share=0.7)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("disjoint", {}), ("overlap", {"sample_rate": 8000, "n_fft": 256, "n_mels": 20, "mel_norm": None})],
)
def test_program_has_the_scores_of_the_detector(preset, changes):
    detector = made(preset, **changes)
    assert detector.spec is not None
    program = SamplesToProbability(detector)
    for n in (1, 2, 5):
        x = (
            np.random.default_rng(n)
            .normal(0, 10.0 ** -np.arange(n)[:, None], (n, detector.spec.n_samples))
            .clip(-1, 1)
            .astype(np.float32)
        )
        right = detector.segment_scores(
            torch.from_numpy(reference_log_mel(x, detector.spec).astype(np.float16))
        )
        found = program(torch.from_numpy(x))[-1]
        assert found.shape == right.shape == (n, detector.spec.row_shape[0])
        assert torch.allclose(found, right, atol=1e-3)


@pytest.mark.parametrize("preset", ["disjoint", "overlap"])
def test_features_keep_to_the_tolerance_of_engines(preset):
    spec = lm.MelSpec.preset(preset, duration_s=1)
    x = np.random.default_rng(0).normal(0, 0.1, (4, spec.n_samples)).astype(np.float32)
    found = MelFeatures(spec)(torch.from_numpy(x)).numpy().astype(np.float16)
    assert compare(found, reference_features(x, spec), spec).ok


def test_a_detector_without_a_spec_is_refused():
    detector = made("disjoint")
    detector.spec = None
    with raises("no-spec", UsageError):
        SamplesToProbability(detector)


def write_other_archive(path: Path) -> None:
    "An archive that speaks of detectors."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "word/document.xml", 'the format is "leakmel detector 1", beside it is detector.json'
        )


def write_model_of_others(path: Path) -> None:
    torch.save({"format": "theirs 1", "note": "not a leakmel detector 1"}, path)


def write_program_of_others(path: Path) -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(
            torch.export.export(Twice(), (torch.ones(2),)), path, extra_files={"detector.json": '{"spec": 1}'}
        )


def write_zip_bomb(path: Path) -> None:
    "Unfolds to a thousand times its size, and would be no mapping then."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("program/extra/detector.json", "[" * 10_000_000)


def write_link(path: Path) -> None:
    (path.parent / "there").write_text("somebody's")
    path.symlink_to("there")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "recording": lambda p: write_wav(p, np.zeros(100, np.int16), 4096),
    "thesis": write_other_archive,
    "model of others": write_model_of_others,
    "program of others": write_program_of_others,
    "bomb": write_zip_bomb,
    "link": write_link,
    "link to nowhere": lambda p: p.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "empty": Path.touch,
    "checkpoint": lambda p: p.write_bytes(plain_bytes({"format": "leakmel training 1"})),
    "no right to read": lambda p: os.close(os.open(p, os.O_CREAT, 0)),
}


def seen(folder: Path) -> dict[str, Any]:
    "Names with what they are, whoever they belong to."
    return {
        p.name: (p.lstat().st_mode, p.lstat().st_ino, p.lstat().st_mtime_ns, p.lstat().st_size)
        for p in folder.iterdir()
    }


@each("foreign", FOREIGN)
def test_other_files_are_not_replaced(tmp_path, foreign):
    FOREIGN[foreign](target := tmp_path / "model")
    before = seen(tmp_path)
    with pytest.raises(
        OutputError,
        match="model: the path exists and is not a detector, so it is not replaced\\. Choose another name, or move it elsewhere",
    ):
        made("disjoint").save(target)
    assert seen(tmp_path) == before


def test_earlier_detector_is_replaced_and_links_are_not_followed(tmp_path):
    mine, other = made("disjoint"), made("disjoint")
    other.share = 0.3
    assert load_detector(other.save(mine.save(tmp_path / "model.pt"))).share == 0.3
    (tmp_path / "link").symlink_to("model.pt")
    assert load_detector(mine.save(tmp_path / "link")).share == 0.7
    assert not (tmp_path / "link").is_symlink()
    assert load_detector(tmp_path / "model.pt").share == 0.3
    (tmp_path / "model.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:-1])  # damaged: still one's own
    assert load_detector(mine.save(tmp_path / "model.pt")).share == 0.7
    assert sorted(os.listdir(tmp_path)) == ["link", "model.pt"]


def test_file_created_while_a_detector_is_written_is_not_replaced(tmp_path, monkeypatch):
    real = os.write

    def slowly(fd: int, piece: memoryview) -> int:
        (tmp_path / "model").write_text("somebody's")
        return real(fd, piece)

    monkeypatch.setattr(files.os, "write", slowly)
    with raises("other-file-in-the-way", OutputError, says="detector"):
        made("disjoint").save(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "somebody's"
    assert os.listdir(tmp_path) == ["model"]
