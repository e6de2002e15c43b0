"Detectors as programs: the same scores from samples, for both presets, or no file."

import json
import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import raises

import leakmel as lm
from leakmel.core.errors import DataError, OutputError, UsageError
from leakmel.audio.synth import write_wav
from leakmel.learn.model import files
from leakmel.learn.model import export
from leakmel.learn.model.files import plain_bytes
from leakmel.learn.model.detector import Detector, load_detector, image_shape
from leakmel.learn.model.export import MelFeatures, export_detector
from leakmel.learn.model.net import LeakNet, NetSettings
from leakmel.learn.data.task import make_task
from leakmel.mel.reference import compare, reference_features, reference_log_mel


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


def loaded(path: Path) -> tuple[Any, dict[str, Any]]:
    beside = {"detector.json": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.load(path, extra_files=beside).module(), json.loads(beside["detector.json"])


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("disjoint", {}),
        ("overlap", {"sample_rate": 8000, "n_fft": 256, "n_mels": 20, "mel_norm": None}),
    ],
)
def test_exported_program_has_the_scores_of_the_detector(tmp_path, preset, changes):
    detector = made(preset, **changes)
    assert detector.spec is not None
    program, about = loaded(export_detector(detector, tmp_path / "model.pt2"))
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
        found = program(torch.from_numpy(x))
        assert found.shape == right.shape == (n, detector.spec.row_shape[0])
        assert torch.allclose(found, right, atol=1e-3)
    assert lm.MelSpec(**about["spec"]) == detector.spec
    assert (about["vote"], about["share"], about["threshold"]) == ("frac_vote", 0.7, 0.5)


@pytest.mark.parametrize("preset", ["disjoint", "overlap"])
def test_features_keep_to_the_tolerance_of_engines(preset):
    spec = lm.MelSpec.preset(preset, duration_s=1)
    x = np.random.default_rng(0).normal(0, 0.1, (4, spec.n_samples)).astype(np.float32)
    found = MelFeatures(spec)(torch.from_numpy(x)).numpy().astype(np.float16)
    assert compare(found, reference_features(x, spec), spec).ok


def test_program_with_wrong_features_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "hann_periodic", np.hanning)  # symmetric
    with raises("program-differs", DataError):
        export_detector(made("disjoint"), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_program_with_other_output_is_not_written(tmp_path, monkeypatch):
    detector = made("disjoint")
    right = Detector.segment_scores
    monkeypatch.setattr(
        Detector, "segment_scores", lambda self, rows, counts=None: right(self, rows, counts) + 0.01
    )
    with raises("program-differs", DataError):
        export_detector(detector, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_detector_without_a_spec_is_refused(tmp_path):
    detector = made("disjoint")
    detector.spec = None
    with raises("no-spec", UsageError):
        export_detector(detector, tmp_path / "model.pt2")


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
WRITERS: dict[str, Callable[[Detector, Path], object]] = {
    "detector": Detector.save,
    "exported detector": export_detector,
}


def seen(folder: Path) -> dict[str, Any]:
    "Names with what they are, whoever they belong to."
    return {
        p.name: (p.lstat().st_mode, p.lstat().st_ino, p.lstat().st_mtime_ns, p.lstat().st_size)
        for p in folder.iterdir()
    }


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("foreign", FOREIGN)
def test_other_files_are_not_replaced(tmp_path, foreign, kind):
    FOREIGN[foreign](target := tmp_path / "model")
    before = seen(tmp_path)
    with pytest.raises(
        OutputError,
        match=f"model: the path exists and is not an? {kind}, so it is not replaced\\. Choose another name, or remove it yourself",
    ):
        WRITERS[kind](made("disjoint"), target)
    assert seen(tmp_path) == before


def test_earlier_export_is_replaced_and_links_are_not_followed(tmp_path):
    mine, other = made("disjoint"), made("disjoint")
    other.share = 0.3
    assert load_detector(other.save(mine.save(tmp_path / "model.pt"))).share == 0.3
    (tmp_path / "link").symlink_to("model.pt")
    assert load_detector(mine.save(tmp_path / "link")).share == 0.7
    assert not (tmp_path / "link").is_symlink()
    assert load_detector(tmp_path / "model.pt").share == 0.3
    (tmp_path / "model.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:-1])  # damaged: still one's own
    assert load_detector(mine.save(tmp_path / "model.pt")).share == 0.7
    assert loaded(export_detector(other, export_detector(mine, tmp_path / "model.pt2")))[1]["share"] == 0.3
    for kind, path in (("exported detector", "model.pt"), ("detector", "model.pt2")):
        with raises("other-file-in-the-way", OutputError, says=kind):
            WRITERS[kind](mine, tmp_path / path)
    assert sorted(os.listdir(tmp_path)) == ["link", "model.pt", "model.pt2"]


@pytest.mark.parametrize("kind", WRITERS)
def test_file_created_during_the_export_is_not_replaced(tmp_path, monkeypatch, kind):
    real = os.write

    def slowly(fd: int, piece: memoryview) -> int:
        (tmp_path / "model").write_text("somebody's")
        return real(fd, piece)

    monkeypatch.setattr(files.os, "write", slowly)
    with raises("other-file-in-the-way", OutputError, says=kind):
        WRITERS[kind](made("disjoint"), tmp_path / "model")
    assert (tmp_path / "model").read_text() == "somebody's"
    assert os.listdir(tmp_path) == ["model"]
