"Every remedy that an error of `leakmel evaluate` prints is run, and helps."

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import leakmel as lm
from leakmel.cli import main
from leakmel.detector.model.detector import load_detector

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of splits of a few sensors
    pytest.mark.usefixtures("one_thread", "few_trees"),
]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture) -> Run:
    "Run a command with --json, and return what it prints."

    def run(*words: str | os.PathLike) -> dict[str, Any]:
        main([*(os.fspath(w) for w in words), "--json"])
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="module")
def model(small_sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("remedies") / "model"
    settings = lm.TrainSettings(detector="spectral")
    lm.train(small_sets / "TRAINING_DATASET.H5", out=out, settings=settings, progress=False)
    return out


def failed(body: dict[str, Any], code: str) -> str:  # its message, which ends with the remedy
    "Check that a command failed with a code."
    assert not body["ok"]
    assert body["code"] == code
    return body["error"]


@pytest.mark.slow
def test_a_missing_test_set_is_built_or_named(
    run: Run, model: Path, small_sets: Path, tmp_path: Path
) -> None:
    (tmp_path / "sets").mkdir()
    remedy = failed(run("evaluate", tmp_path / "sets", "--model", model), "data-set-missing")
    assert "leakmel build ROOT --split all --out DIR" in remedy
    assert "name the file" in remedy
    words = "build ROOT --split all --out DIR".replace("ROOT", str(small_sets.parent / "demo"))
    assert run(*words.replace("DIR", str(tmp_path / "sets")).split())["ok"]
    assert run("evaluate", tmp_path / "sets", "--model", model, "--allow-leaky-split")["ok"]
    (tmp_path / "sets" / "TESTING_DATASET.H5").unlink()
    remedy = failed(run("evaluate", tmp_path / "sets", "--model", model), "data-set-missing")
    again = f"leakmel train {tmp_path / 'sets'} --cross-validate --out folds"
    assert f"Evaluate by cross-validation ({again}), or name the file" in remedy
    assert run(*again.replace("--out folds", f"--detector spectral --out {tmp_path / 'folds'}").split()[1:])[
        "ok"
    ]
    assert run("evaluate", small_sets / "TESTING_DATASET.H5", "--model", model, "--allow-leaky-split")["ok"]


@pytest.mark.slow
def test_an_interrupted_training_is_resumed_or_its_best_epoch_named(
    run: Run, small_sets: Path, tmp_path: Path
) -> None:
    tiny = "--detector cnn --epochs 1 --epoch-share 0.1 --batch-size 64 --channels 2,4 --device cpu --no-evaluation"
    train = ["train", small_sets, "--out", tmp_path / "net", *tiny.split()]
    assert run(*train)["ok"]
    (tmp_path / "net" / "model.pt").unlink()  # as if it had been interrupted before its end
    remedy = failed(run("evaluate", small_sets, "--model", tmp_path / "net"), "no-detector")
    assert "resume it" in remedy
    assert "checkpoints/best.pt" in remedy
    best = shutil.copytree(tmp_path / "net", tmp_path / "copy") / "checkpoints" / "best.pt"
    assert run("evaluate", small_sets, "--model", best, "--allow-leaky-split")["ok"]
    assert run(*train)["ok"]
    assert run("evaluate", small_sets, "--model", tmp_path / "net", "--allow-leaky-split")["ok"]


@pytest.mark.slow
def test_other_features_are_built_again_or_recordings_are_scored(
    run: Run, model: Path, small_sets: Path, tmp_path: Path
) -> None:
    demo = small_sets.parent / "demo"
    lm.build(demo, split="testing", out=tmp_path / "other.h5", spec={"n_mels": 32}, progress="none", check=2)
    remedy = failed(run("evaluate", tmp_path / "other.h5", "--model", model), "features-differ")
    assert "with the spec of the detector" in remedy
    assert "predict from the recordings" in remedy
    spec = load_detector(model / "model.pt").spec
    lm.build(demo, split="testing", out=tmp_path / "same.h5", spec=spec, progress="none", check=2)
    assert run("evaluate", tmp_path / "same.h5", "--model", model, "--allow-leaky-split")["ok"]
    assert run("predict", demo, "--model", model, "--out", tmp_path / "scores.csv")["ok"]


@pytest.mark.slow
def test_a_new_label_is_left_out_or_trained(run: Run, model: Path, small_sets: Path, tmp_path: Path) -> None:
    demo = small_sets.parent / "demo"
    root = shutil.copytree(demo / "TESTING", tmp_path / "root")
    (root / "PUMP").mkdir()
    for path in sorted((root / "LEAK").glob("*.wav"))[:1]:
        path.rename(root / "PUMP" / path.name)
    lm.build(root, out=tmp_path / "pump.h5", progress="none", check=2)
    remedy = failed(run("evaluate", tmp_path / "pump.h5", "--model", model), "unknown-label")
    assert "without these recordings" in remedy
    assert "train with this label" in remedy
    shutil.copytree(root, tmp_path / "two", ignore=shutil.ignore_patterns("PUMP"))
    lm.build(tmp_path / "two", out=tmp_path / "two.h5", progress="none", check=2)
    assert run("evaluate", tmp_path / "two.h5", "--model", model, "--allow-leaky-split")["ok"]
    learned = shutil.copytree(demo / "TRAINING", tmp_path / "learned")
    (learned / "PUMP").mkdir()
    for path in sorted((learned / "NOLEAK").glob("*.wav"))[:4]:
        path.rename(learned / "PUMP" / path.name)
    lm.build(learned, out=tmp_path / "learned.h5", progress="none", check=2)
    words = ["train", tmp_path / "learned.h5", "--out", tmp_path / "three", "--detector", "spectral"]
    assert run(*words)["ok"]
    assert run("evaluate", tmp_path / "pump.h5", "--model", tmp_path / "three", "--allow-leaky-split")["ok"]


@pytest.mark.slow
def test_an_unknown_column_names_columns_that_work(run: Run, model: Path, small_sets: Path) -> None:
    words = ["evaluate", small_sets, "--model", model, "--allow-leaky-split", "--group"]
    body = run(*words, "pipe")
    columns = failed(body, "unknown-column").partition("; expected ")[2].split(", ")
    assert "session" in columns
    for column in columns[:3]:
        assert run(*words, column)["ok"], column


@pytest.mark.slow
def test_a_damaged_model_is_trained_again(run: Run, model: Path, small_sets: Path, tmp_path: Path) -> None:
    content = (model / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(content[: len(content) // 2])
    body = run("evaluate", small_sets, "--model", tmp_path / "model.pt")
    assert not body["ok"]
    words = ["train", small_sets, "--out", tmp_path / "again", "--detector", "spectral", "--no-evaluation"]
    assert run(*words)["ok"]
    assert run("evaluate", small_sets, "--model", tmp_path / "again", "--allow-leaky-split")["ok"]
