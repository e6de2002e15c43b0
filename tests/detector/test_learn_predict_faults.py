"What goes wrong around a prediction: a disk that goes away, parameters that would do nothing, a narrow terminal, a picture of nothing."

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from errors import raises

import leakmel as lm
from leakmel.core.errors import MachineError, UsageError
from leakmel.core.operation import Run, make
from leakmel.detector.data.segments import make_task
from leakmel.detector.model import detector as detector_module
from leakmel.detector.model.detector import Detector
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.predict import predict as prediction
from leakmel.detector.reports import MOST_RECORDINGS, suspicious_mels
from leakmel.operations.detector import Predict
from leakmel.recordings.demo import write_wav

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
RATE = 4096
QUIET: dict[str, Any] = {"progress": "none", "device": "cpu", "engine": "torch"}


@pytest.fixture(scope="module")
def detector() -> Detector:
    torch.manual_seed(0)
    return Detector(
        LeakNet(NetSettings(channels=(8, 8))).eval(),
        make_task(["LEAK", "NOLEAK"]),
        lm.MelSpec.preset("disjoint", duration_s=1.0),
    )


def write_noise(folder: Path, n_files: int, n_samples: int = RATE) -> Path:
    folder.mkdir()
    samples = np.random.default_rng(0).integers(-900, 900, n_samples).astype(np.int16)
    for k in range(n_files):
        write_wav(folder / f"{k:03}.wav", samples, RATE)
    return folder


@pytest.mark.parametrize("n_samples", [RATE, RATE + 1], ids=["as a row", "other"])
def test_lost_disk_stops_the_prediction(tmp_path, detector, monkeypatch, n_samples):
    "And is no list of good recordings called bad; a few that went are."
    folder, right, gone = write_noise(tmp_path / "wav", 200, n_samples), prediction.find_recordings, 9

    def found(*args: Any, **options: Any) -> Any:
        listed = right(*args, **options)
        for path in sorted(folder.iterdir())[10 : 10 + gone]:
            path.unlink()
        return listed

    monkeypatch.setattr(prediction, "find_recordings", found)
    few = lm.predict(folder, detector, **QUIET)
    assert (len(few), few.rejected["code"].tolist()) == (191, ["changed"] * 9)
    gone = 190
    with pytest.raises(MachineError, match="recordings in a row"):
        lm.predict(folder, detector, out=tmp_path / "scores.csv", read_workers=1, **QUIET)
    assert not (tmp_path / "scores.csv").exists()


@each("width", [40, 44, 45, 60, 100])
def test_narrow_terminal_shows_all_lines(tmp_path, detector, width):
    "A terminal may have 40 columns: the scores were written, and then came a traceback."
    found = lm.predict(write_noise(tmp_path / "a folder", 2), detector, **QUIET)
    assert "000.wav" in found.text(width)


def test_number_of_figures_is_limited(tmp_path, detector):
    found = lm.predict(write_noise(tmp_path / "wav", 3), detector, **QUIET)
    assert len(suspicious_mels(found, MOST_RECORDINGS).data) == 6
    assert "No recording is to be shown" in suspicious_mels(found, 0).layout.title.text
    for most in (-1, MOST_RECORDINGS + 1):
        with raises("out-of-range", UsageError, found=str(most)):
            make(Predict, {"n_shown": most}).plan(Run("none", keeps=True))


def test_model_too_large_for_the_device_is_an_error(tmp_path, detector, monkeypatch):
    def refuse(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory: 2 MB")

    monkeypatch.setattr(detector.classifier, "to", refuse)
    with pytest.raises(
        MachineError, match="does not fit into the memory of fake:0; found out of memory: 2 MB"
    ):
        lm.predict(write_noise(tmp_path / "wav", 2), detector, **QUIET | {"device": "fake"})


def test_a_run_reads_its_model_once(tmp_path, detector, monkeypatch):
    "And says where it came from all the same."
    read, real = [], detector_module.load_detector

    def reading(path: Any) -> Detector:
        read.append(path)
        return real(path)

    for module in (detector_module, prediction):
        monkeypatch.setattr(module, "load_detector", reading)
    model = detector.save(tmp_path / "model.pt")
    words = {
        "data_root": str(write_noise(tmp_path / "wav", 3)),
        "model": str(model),
        "out": str(tmp_path / "run"),
        "length": "whole",
        "engine": "torch",
        "device": "cpu",
        "n_shown": 1,
    }
    done = make(Predict, words)(Run("none", keeps=True)).result
    assert read == [model]
    assert done.model == str(model)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["model"] == str(model)
    assert len((tmp_path / "run" / "predictions.csv").read_text().splitlines()) == 4
