"Cross-validation of detectors: folds by groups, resume, permuted labels, errors, and the command line."

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest

import leakmel as lm
from leakmel.core.errors import DataError, OutputError, UsageError
from leakmel.learn.evaluate.cross_validation import CrossValidation, joined_groups, outer_folds
from leakmel.learn.train.folds import FoldTrainer
from leakmel.cli import main

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),  # of splits of a few sensors
    pytest.mark.usefixtures("one_thread"),
]
SPECTRAL = lm.TrainSettings(detector="spectral")
FIT = FoldTrainer.fit
TINY: dict[str, Any] = {"epochs": 1, "epoch_share": 0.1, "batch_size": 64, "channels": (2, 4)}


def paths_of(sets: Path) -> list[Path]:
    return sorted(sets.glob("*_DATASET.H5"))


def cross_validated(sets: Path, settings: lm.TrainSettings = SPECTRAL, **given: Any) -> CrossValidation:
    "Cross-validate on all recordings of a folder."
    some = {"settings": settings, "n_draws": 200, "progress": "none", "device": "cpu"}
    return lm.cross_validate(paths_of(sets), **(some | given))


@pytest.fixture(scope="module")
def found(small_sets: Path) -> CrossValidation:
    return cross_validated(small_sets, seeds=2)


@pytest.fixture
def count_fits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    "Count the fits of detectors; the fit of a given number is interrupted."

    def count(interrupted: int = 0) -> list[str]:
        done: list[str] = []

        def fit(self: FoldTrainer, kind: str, chosen: np.ndarray, seed: int = 0) -> Any:
            if len(done) + 1 == interrupted:
                raise KeyboardInterrupt
            done.append(kind)
            return FIT(self, kind, chosen, seed)

        monkeypatch.setattr(FoldTrainer, "fit", fit)
        return done

    return count


def test_each_recording_is_scored_once_for_each_seed_without_its_group(found: CrossValidation) -> None:
    assert len(found.repetitions) == 2
    assert len(found) == len(found.groups.code)
    for repetition in found.repetitions:
        assert np.isfinite(repetition.score).all()
        assert sum(f.recordings for f in repetition.folds) == len(found)
        for k in range(len(found.groups)):
            assert len(np.unique(repetition.fold[found.groups.code == k])) == 1, "a group on both sides"
    one, two = found.repetitions
    assert not np.array_equal(one.fold, two.fold)
    assert np.allclose(found.table["score"], (one.score + two.score) / 2)
    assert found.detector.figures["auc"] > 0.7, "leaks of the demo are easy"


def test_report_plot_and_plain_values(found: CrossValidation) -> None:
    text = repr(found)
    assert "2 seeds" in text
    assert "Level only" in text
    assert "verdict" in text
    assert "10 fits" in text
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["fits"] == len(plain["folds"]) == 10
    assert plain["kinds"] == {"spectral": 10}
    assert list(plain["baselines"]) == ["level", "mean_mels", "trees"]
    assert list(plain["differences"]) == ["level", "mean_mels"], "a spectral detector contains them"
    assert found.plots()["roc"].layout.title.text.startswith("AUC")


def test_interrupted_run_is_resumed_and_fits_nothing_twice(
    small_sets: Path, tmp_path: Path, count_fits: Callable[..., list[str]]
) -> None:
    first = count_fits(interrupted=4)
    with pytest.raises(KeyboardInterrupt):
        cross_validated(small_sets, out=tmp_path / "out")
    second = count_fits()
    resumed = cross_validated(small_sets, out=tmp_path / "out")
    assert (len(first), len(second)) == (3, 2)
    assert resumed.n_done == 2
    assert "3 of them read from an earlier run" in repr(resumed)
    assert resumed.table.equals(cross_validated(small_sets).table), "as if it had not been interrupted"
    rows = pd.read_csv(tmp_path / "out" / "cross_validation.csv")
    assert np.allclose(rows["score"], resumed.table["score"])
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["recordings"] == len(resumed)
    other = cross_validated(small_sets, out=tmp_path / "out", leak_label="NOLEAK")
    assert other.n_done == 5, "scores of another task are not taken"


def test_few_groups_are_left_out_one_by_one(small_sets: Path, found: CrossValidation) -> None:
    group = [f"pipe {k % 6}" for k in range(len(found))]
    found = cross_validated(small_sets, group=group)
    assert found.repetitions[0].is_one_out
    assert len(found.folds) == 6
    assert found.table.groupby("fold")["group"].nunique().tolist() == [1] * 6
    assert "was left out once" in found.method


def test_groups_with_equal_content_are_one() -> None:
    table = pd.DataFrame({"sensor": list("aabbcc"), "content": ["1", "2", "2", "3", "", ""], "label": "x"})
    groups = joined_groups(table)
    assert groups.names == ("a + b", "c")
    assert groups.code.tolist() == [0, 0, 0, 0, 1, 1]
    assert "hold the same recordings" in groups.note


def test_group_that_alone_has_a_label_is_not_left_out() -> None:
    classes, code = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 1, 2, 3, 4, 4])
    with pytest.raises(DataError) as error:
        outer_folds(classes, code)
    assert error.value.code == "label-in-one-part"


def test_permuted_labels_give_no_skill(small_sets: Path, tmp_path: Path) -> None:
    areas = []
    for seed in range(4):
        shutil.copytree(small_sets, folder := tmp_path / str(seed))
        rng = np.random.default_rng(seed)
        for path in paths_of(folder):
            path.chmod(0o644)
            with h5py.File(path, "r+") as file:
                file["labels"][...] = rng.permutation(file["labels"][:])
        found = cross_validated(folder, group="path")
        areas.append([m.figures["auc"] for m in (found.detector, *found.baselines.values())])
    means = np.mean(areas, 0)
    print("mean AUC of detector and baselines:", means.round(3))
    assert (np.abs(means - 0.5) < 0.15).all(), means


def test_network_and_choice_inside_each_fold(
    small_sets: Path, tmp_path: Path, count_fits: Callable[..., list[str]]
) -> None:
    network = cross_validated(small_sets, lm.TrainSettings(detector="cnn", **TINY), n_folds=2)
    assert network.kinds == {"cnn": 2}
    assert len(network.verdict.against) == 3
    seen = count_fits()
    chosen = cross_validated(small_sets, lm.TrainSettings(detector="blend", **TINY), n_folds=2, out=tmp_path)
    n = sum(f.n_fits for f in chosen.folds)
    assert chosen.kinds == {"blend": 2}
    assert len(seen) == n == chosen.n_done
    assert seen.count("cnn") == seen.count("spectral") == n / 2
    assert np.isfinite(chosen.table["score"]).all()


def test_kind_is_spectral_where_training_recordings_are_one_group(
    small_sets: Path, found: CrossValidation
) -> None:
    group = [f"pipe {k % 2}" for k in range(len(found))]
    halves = cross_validated(small_sets, lm.TrainSettings(detector="auto", **TINY), group=group)
    assert halves.kinds == {"spectral": 2}
    assert "too few groups to choose a kind" in repr(halves)
    assert halves.verdict.beats is None


def test_wrong_arguments_and_folders_of_others(small_sets: Path, tmp_path: Path) -> None:
    for given in ({"n_folds": 1}, {"seeds": 0}):
        with pytest.raises(UsageError):
            cross_validated(small_sets, **given)
    with pytest.raises(DataError) as error:
        cross_validated(small_sets, group="label")
    assert error.value.code == "label-in-one-part"
    (tmp_path / "summary.json").write_text('{"model": "of a training"}')
    with pytest.raises(OutputError) as in_the_way:
        cross_validated(small_sets, out=tmp_path)
    assert in_the_way.value.code == "other-file-in-the-way"


def test_command_line(small_sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["train", str(small_sets), "--out", str(tmp_path / "out"), "--cross-validate"]
    words += ["--detector", "spectral", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["ok"]
    assert body["groups"]["by"] == "sensor"
    assert body["pooled"]["figures"]["auc"]["value"] > 0.5
    assert sorted(p.name for p in (tmp_path / "out").glob("*.*")) == ["cross_validation.csv", "summary.json"]
    assert main([*words, "--folds", "2", "--seeds", "2", "--group", "path", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (len(body["folds"]), len(body["seeds"])) == (4, 2)
    assert main([*words, "--group", "path", "--quiet"]) == 0
    assert "verdict" in capsys.readouterr().out
    assert main([*words, "--report"]) == 2
