"Training on files of the earlier system: from the command line and from train.ipynb's plan."

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from errors import raises
from tiny_training import tiny_words

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import UsageError, VerifyError
from leakmel.core.operation import Run, make
from leakmel.detector.model.detector import load_detector
from leakmel.operations.detector import Train


@pytest.fixture
def earlier(small_sets: Path, tmp_path: Path) -> Path:
    "The data sets as the earlier system would have written them: rows, labels, a few attributes."
    (tmp_path / "sets").mkdir()
    for path in small_sets.glob("*.H5"):
        with h5py.File(path) as f, h5py.File(tmp_path / "sets" / path.name, "w") as g:
            g["segments_mel"], g["labels"] = f["segments_mel"][:], f["labels"][:]
            for name in ("config_json", "labels_json", "label2id_json"):
                g.attrs[name] = f.attrs[name]
    return tmp_path / "sets"


@pytest.mark.slow
def test_train_on_files_of_the_earlier_system(earlier, small_sets, tmp_path, capsys):
    words = ["train", str(earlier), "--out", str(tmp_path / "run"), *tiny_words(1), "--json"]
    assert main(words) == 1
    error = json.loads(capsys.readouterr().out)
    assert (error["code"], "--legacy" in error["error"]) == ("not-a-data-set", True)
    assert main([*words, "--legacy"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["evaluation"] is not None
    detector = load_detector(tmp_path / "run" / "model.pt")
    assert detector.spec is None, "the files do not say how their rows were computed"
    with raises("no-spec", UsageError):
        lm.predict(small_sets.parent / "demo", detector, out=tmp_path / "s.csv", progress="none")


@pytest.mark.slow
def test_cross_validation_of_files_of_the_earlier_system(earlier, few_trees, one_thread):
    found = lm.cross_validate(
        sorted(earlier.glob("*.H5")),
        settings=lm.TrainSettings(detector="spectral"),
        legacy=True,
        n_draws=100,
        n_folds=3,
        jobs=1,
        progress="none",
    )
    assert found.groups.by == "recording"
    assert np.isfinite(found.table["score"]).all()
    assert "each recording is a group of its own" in " ".join(found.cautions)


@pytest.mark.slow
def test_the_parameter_of_the_notebook(earlier, tmp_path):
    given = {"data": str(earlier), "out": str(tmp_path / "run")}
    with raises("not-a-data-set", VerifyError):
        make(Train, given).plan(Run("none", keeps=True))
    assert make(Train, given | {"legacy": True}).plan(Run("none", keeps=True)).given["legacy"]
    with raises("unknown-column"):
        make(Train, given | {"legacy": True, "group": "sensor"}).plan(Run("none", keeps=True))
