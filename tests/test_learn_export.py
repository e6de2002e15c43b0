"Detectors as programs: the same scores from samples, for both forms and presets, or no file."
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import leakmel as lm
from leakmel.core.errors import DataError, UsageError
from leakmel.learn import export
from leakmel.learn.detector import Detector, picture_shape
from leakmel.learn.export import MelFeatures, export_detector
from leakmel.learn.net import LeakNet, NetSettings
from leakmel.learn.task import make_task
from leakmel.mel.reference import compare, reference_features, reference_log_mel


pytestmark = pytest.mark.usefixtures("one_thread")


def made(preset: str, form: str = "matrix", **changes: Any) -> Detector:
    "An untrained detector; its classes are told apart by large weights, so that a small error shows."
    spec = lm.MelSpec.preset(preset, duration_s=1, **changes)
    n_mels, width = picture_shape(spec.row_shape, form)
    torch.manual_seed(1)
    net = LeakNet(NetSettings(form=form, n_mels=n_mels, width=width, n_classes=3, channels=(8, 8)), np.full(n_mels, -60.0), np.full(n_mels, 10.0))
    return Detector(net, make_task(["BACKGROUND", "LEAK", "NORMAL"]), spec, vote="frac_vote", share=0.7)


def loaded(path: Path) -> tuple[Any, dict[str, Any]]:
    beside = {"detector.json": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.load(path, extra_files=beside).module(), json.loads(beside["detector.json"])


@pytest.mark.parametrize(("preset", "form", "changes"), [
    ("disjoint", "matrix", {}), ("overlap", "vector", {}), ("overlap", "matrix", {"sample_rate": 8000, "n_fft": 256, "n_mels": 20, "mel_norm": None})])
def test_a_program_says_what_the_detector_says(tmp_path, preset, form, changes):
    detector = made(preset, form, **changes)
    assert detector.spec is not None
    program, about = loaded(export_detector(detector, tmp_path / "model.pt2"))
    for n in (1, 2, 5):
        x = np.random.default_rng(n).normal(0, 10.0 ** -np.arange(n)[:, None], (n, detector.spec.n_samples)).clip(-1, 1).astype(np.float32)
        right = detector.segment_scores(torch.from_numpy(reference_log_mel(x, detector.spec).astype(np.float16)))
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


def test_wrong_features_are_no_program(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "hann_periodic", np.hanning)      # symmetric
    with pytest.raises(DataError, match="features are not those of the detector"): export_detector(made("disjoint"), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_another_output_is_no_program(tmp_path, monkeypatch):
    detector = made("disjoint")
    right = Detector.segment_scores
    monkeypatch.setattr(Detector, "segment_scores", lambda self, rows: right(self, rows) + 0.01)
    with pytest.raises(DataError, match="does not say what the detector says"): export_detector(detector, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_detector_without_a_spec_is_refused(tmp_path):
    detector = made("disjoint")
    detector.spec = None
    with pytest.raises(UsageError, match="does not know how its features were made"): export_detector(detector, tmp_path / "model.pt2")
