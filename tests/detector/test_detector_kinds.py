"Kinds of detectors: spectral, network and blend through training, files, scores, export, resume and retraining."

import json
import os
import pickle
import shutil
import warnings
from copy import deepcopy
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from errors import raises

import leakmel as lm
from leakmel.core.errors import DataError, UsageError
from leakmel.core.machine_code import CompiledCode
from leakmel.detector.data import segments
from leakmel.detector.data.segments import LEFT_OUT, Segments, make_task
from leakmel.detector.data.splits import Split
from leakmel.detector.metrics.metrics import UNCHOSEN, DecisionRule
from leakmel.detector.metrics.significance import Groups
from leakmel.detector.model import spectral
from leakmel.detector.model.detector import (
    BlendClassifier,
    BlendSettings,
    Detector,
    load_detector,
    score_rows,
)
from leakmel.detector.model.files import load_plain
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.model.spectral import (
    SpectralClassifier,
    SpectralSettings,
    fit_spectral,
    spectral_features,
    window_numbers,
)
from leakmel.detector.train import folds as folds_module
from leakmel.detector.train.folds import make_folds
from leakmel.detector.train.state import TrainingData
from leakmel.extras.retrain import SegmentSubset, fine_tune, round_settings

pytestmark = pytest.mark.usefixtures("one_thread", "few_trees")
SMALL: dict[str, Any] = {"epochs": 1, "epoch_share": 0.3, "batch_size": 64, "channels": (4, 8)}
QUIET: dict[str, Any] = {"device": "cpu", "progress": False}
KINDS = ("spectral", "cnn", "blend")
LOAD = segments.load_items


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    lm.write_demo(folder / "demo", n_files=60, seed=1)
    results = lm.build_all(folder / "demo", out_dir=folder / "sets", progress="none", check=0)
    found = {r.split.lower(): r.path for r in results}
    assert set(found) == {"training", "validation", "testing"}
    return found | {"recordings": folder / "demo" / "TESTING"}


@pytest.fixture(scope="module")
def trained(sets, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    kind: Any
    for kind in KINDS:
        settings = lm.TrainSettings(detector=kind, **SMALL)
        found[kind] = lm.train(
            sets["training"], sets["validation"], out=folder / kind, settings=settings, **QUIET
        )
    return found


@pytest.fixture(scope="module")
def alone(sets, tmp_path_factory) -> Any:
    "A spectral detector that was trained without recordings for validation."
    settings = lm.TrainSettings(detector="spectral")
    return lm.train(
        sets["training"], out=tmp_path_factory.mktemp("alone") / "run", settings=settings, **QUIET
    )


@pytest.fixture(scope="module")
def chosen(sets, tmp_path_factory) -> Any:
    "The kind was chosen by cross-validation."
    settings = lm.TrainSettings(detector="auto", **SMALL)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(folds_module, "MIN_FOR_NETWORK", 40)
        return lm.train(
            sets["training"], out=tmp_path_factory.mktemp("chosen") / "run", settings=settings, **QUIET
        )


@pytest.mark.slow
@each("kind", KINDS)
def test_a_model_file_gives_the_same_scores(sets, trained, kind):
    detector = trained[kind].detector
    again = load_detector(trained[kind].model_path)
    assert (again.kind, again.threshold, again.record) == (kind, detector.threshold, detector.record)
    with Segments(sets["testing"], level="recording", task=detector.task) as ds:
        scores = score_rows(detector, ds)
        assert np.array_equal(score_rows(again, ds), scores, equal_nan=True)
        assert np.allclose(score_rows(again, ds, files_per_batch=1), scores, atol=1e-6, equal_nan=True)
    assert 0 <= np.nanmin(scores) <= np.nanmax(scores) <= 1


def random_trees(depth: int, seed: int) -> SpectralClassifier:
    "Two forests of three full trees over four features; every second leaf lies one level higher."
    rng, n_trees, n = np.random.default_rng(seed), 3, 2**depth - 1
    settings = SpectralSettings(
        n_mels=2, n_classes=3, window=2, n_nodes=2 * n_trees * n, n_trees=n_trees, depth=depth
    )
    classifier = SpectralClassifier(settings)
    at, first = np.arange(n), np.repeat(n * np.arange(2 * n_trees), n)
    is_leaf = (2 * at + 2 >= n) | ((4 * at + 6 >= n) & (at % 2 == 0))
    arrays = {
        "feature": rng.integers(0, 4, 6 * n),
        "threshold": np.round(rng.normal(0, 1, 6 * n), 1),  # 0.1 and most others are not float32
        "left": np.tile(np.where(is_leaf, at, 2 * at + 1), 6) + first,
        "right": np.tile(np.where(is_leaf, at, 2 * at + 2), 6) + first,
        "share": rng.dirichlet(np.ones(3), 6 * n),
        "root": n * np.arange(6).reshape(2, 3),
    }
    for name, values in arrays.items():
        classifier.get_buffer(name).copy_(torch.from_numpy(values))
    return classifier


@each("n", [0, 1, 15, 16, 17, 100])
@each("depth", [1, 2, 6])
def test_compiled_trees_are_those_of_torch(n, depth, monkeypatch):
    assert spectral._compiled() is not None
    classifier, other = random_trees(depth, 0), random_trees(depth, 1)
    values = np.round(np.random.default_rng(n).normal(0, 1, (n, 4)), 1)  # often equal to a threshold
    values[::7, 1], values[::9, 2] = np.nan, np.inf
    features = torch.from_numpy(values.astype(np.float32))
    found = [classifier.tree_probabilities(features, forest) for forest in (0, 1)]
    classifier.load_state_dict(other.state_dict())  # other trees: those of before are forgotten
    found += [classifier.tree_probabilities(features, forest) for forest in (0, 1)]
    monkeypatch.setattr(spectral, "_compiled", lambda: None)
    right = [each.tree_probabilities(features, k) for each in (random_trees(depth, 0), other) for k in (0, 1)]
    for a, b in zip(found, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, atol=1e-6)
        assert torch.allclose(a.sum(1), torch.ones(n))


def test_trees_that_lead_in_a_circle_end():
    classifier = random_trees(6, 0)
    left = classifier.get_buffer("left")
    left[left > 20] = 0
    assert torch.isfinite(classifier.tree_probabilities(torch.zeros(5, 4), 0)).all()


def test_trees_that_were_evaluated_can_be_sent_to_other_processes():
    "ForkingPickler moves the buffers into shared memory; buffers out of band arrive read-only."
    classifier, features = random_trees(6, 0), torch.zeros(5, 4)
    right = classifier.tree_probabilities(features, 0)
    sent = pickle.loads(bytes(ForkingPickler.dumps(classifier)))
    parts: list[pickle.PickleBuffer] = []
    whole = pickle.dumps(classifier, protocol=5, buffer_callback=parts.append)
    read_only = pickle.loads(whole, buffers=[bytes(part) for part in parts])
    for one in (classifier, sent, read_only, deepcopy(classifier)):
        assert torch.equal(one.tree_probabilities(features, 0), right)
    assert len(pickle.dumps(classifier)) == len(pickle.dumps(random_trees(6, 0)))


def test_traced_trees_follow_their_input():
    classifier = random_trees(6, 0)
    one, other = torch.zeros(5, 4), torch.ones(5, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about tracing
        traced = torch.jit.trace(lambda x: classifier.tree_probabilities(x, 0), (one,))
    assert torch.allclose(traced(other), classifier.tree_probabilities(other, 0), atol=1e-6)


def test_compiled_trees_refuse_another_number_of_features():
    with pytest.raises(ValueError, match="5 features, not 4"):
        random_trees(2, 0).tree_probabilities(torch.zeros(3, 5), 0)


def test_trees_are_evaluated_without_compiled_code(monkeypatch, caplog):
    features, right = torch.zeros(5, 4), random_trees(3, 0).tree_probabilities(torch.zeros(5, 4), 1)
    spectral._compiled.cache_clear()
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    try:
        for _ in range(2):
            found = random_trees(3, 0).tree_probabilities(features, 1)
            assert torch.allclose(found, right, atol=1e-6)
    finally:
        spectral._compiled.cache_clear()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "NUMBA_DISABLE_JIT" in record.getMessage()


def test_compiled_trees_that_compute_something_else_are_not_used(monkeypatch, caplog):
    wrong = CompiledCode({"add_leaves": lambda *arrays: 0}, {"ROWS": 16})
    monkeypatch.setattr(spectral, "load_compiled", lambda name: wrong)
    spectral._compiled.cache_clear()
    try:
        assert spectral._compiled() is None
    finally:
        spectral._compiled.cache_clear()
    assert "wrong results on this machine" in caplog.text


@pytest.mark.slow
@each("kind", KINDS)
def test_a_prediction_scores_recordings_as_the_data_set_does(sets, trained, kind):
    detector = trained[kind].detector
    with Segments(sets["testing"], level="recording", task=detector.task) as ds:
        right = detector.recording_scores(score_rows(detector, ds))
    found = lm.predict(sets["recordings"], detector, device="cpu", engine="torch", progress="none")
    scores = [detector.recording_scores(s.segment_scores) for s in found.scored]
    assert np.allclose(scores, right, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("spectral", marks=pytest.mark.long), "cnn", "blend"]
)  # a blend has both
def test_each_kind_is_evaluated(sets, trained, kind):
    result = trained[kind]
    e = lm.evaluate(result.detector, sets["testing"], training=sets["training"], progress="none", n_draws=100)
    assert len(e.table) == 5


@pytest.mark.slow
def test_a_model_file_holds_no_pickled_objects(trained):
    for result in trained.values():
        values = load_plain(result.model_path)  # refuses everything that is not a tensor or a plain value
        assert all(isinstance(w, torch.Tensor) for w in values["weights"].values())


def test_level_is_removed_by_default(sets):
    with Segments(sets["training"], level="recording") as ds:
        for keep in (False, True):
            features = spectral_features(ds, keep_level=keep)
            classifier = fit_spectral(features, ds.labels, 2, n_threads=1)
            rows = torch.from_numpy(ds.sources[0].mels[:8])
            quiet, loud = (classifier.class_probabilities(rows.float() + db) for db in (0.0, 12.0))
            assert torch.allclose(quiet, loud, atol=1e-4) is not keep


def test_a_spectral_detector_scores_short_recordings_without_the_silence_behind_them(sets):
    with Segments(sets["training"], level="recording") as ds:
        classifier = fit_spectral(spectral_features(ds), ds.labels, 2, n_threads=1)
        rows = torch.from_numpy(ds.sources[0].mels[:4]).float()
        n_long = rows.shape[1]
        silent = rows.clone()
        silent[:, 17:] = -200.0
        mask = (torch.arange(n_long) < 17).expand(4, -1)
        found = classifier.class_probabilities(silent, mask)[:, :17]
        assert torch.allclose(found, classifier.class_probabilities(rows[:, :17]), atol=1e-5)


def test_windows_have_equal_lengths():
    for n in range(1, 50):
        mask = torch.arange(60)[None] < n
        numbers = window_numbers(mask, 4)[0, :n]
        lengths = torch.bincount(numbers)
        assert lengths.min() >= lengths.max() - 1
        assert abs(len(lengths) - n / 4) <= 0.5 or len(lengths) == 1


@pytest.mark.slow
def test_choice_and_thresholds_come_from_recordings_that_were_not_trained_on(chosen):
    choice = chosen.summary["choice"]
    assert {t["kind"] for t in choice["tried"]} == set(KINDS)
    assert (choice["recordings"], choice["by"], choice["folds"]) == (46, "sensor", 5)
    best = max(choice["tried"], key=lambda t: t["auc"])
    within = [t["kind"] for t in choice["tried"] if t["auc"] >= best["auc"] - best["error"]]
    assert choice["kind"] == next(kind for kind in KINDS if kind in within)
    assert "46 recordings in cross-validation" in chosen.detector.threshold_from
    assert chosen.detector.kind == choice["kind"]


@pytest.mark.slow
def test_no_network_is_tried_with_few_recordings(sets, tmp_path):
    result = lm.train(sets["training"], out=tmp_path / "run", settings=lm.TrainSettings(), **QUIET)
    choice = result.summary["choice"]
    assert [t["kind"] for t in choice["tried"]] == ["spectral"]
    assert result.detector.kind == "spectral"
    assert f"{folds_module.MIN_FOR_NETWORK:,}" in choice["reason"]


def test_offset_of_a_calibration_line_does_not_follow_the_share_of_leaks():
    rng = np.random.default_rng(0)
    truth = np.r_[np.ones(40, bool), np.zeros(160, bool)]
    score = 1 / (1 + np.exp(-(2 * truth - 1 + rng.normal(0, 1, 200))))
    slope, offset = folds_module.calibration_line(score, truth)
    assert abs(offset / slope) < 0.3, "the middle between the labels is not moved by a 20 % share of leaks"


@pytest.mark.slow
def test_the_same_training_is_not_repeated(sets, alone, tmp_path, monkeypatch):
    settings = lm.TrainSettings(detector="spectral")
    shutil.copytree(alone.model_path.parent, tmp_path / "run")

    def fitted(*args: Any, **more: Any) -> Any:
        raise AssertionError("fitted again")

    monkeypatch.setattr(spectral, "fit_spectral", fitted)
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    again = lm.train(sets["training"], out=tmp_path / "run", settings=settings, **QUIET)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == written
    folders = {name: alone.summary[name] for name in ("model", "next_steps")}
    assert again.summary | folders == alone.summary
    assert again.detector.record == alone.detector.record


@pytest.mark.slow
def test_no_other_training_is_replaced(sets, alone, tmp_path):
    spectral = lm.TrainSettings(detector="spectral")
    with raises("nothing-to-resume", DataError):
        lm.train(sets["training"], out=tmp_path / "a", settings=spectral, resume="always", **QUIET)
    shutil.copytree(alone.model_path.parent, tmp_path / "a", dirs_exist_ok=True)
    before = (tmp_path / "a" / "model.pt").read_bytes()
    other = lm.TrainSettings(detector="spectral", seed=1)
    with raises("model-exists", UsageError, path=tmp_path / "a"):
        lm.train(sets["training"], out=tmp_path / "a", settings=other, **QUIET)
    assert (tmp_path / "a" / "model.pt").read_bytes() == before
    lm.train(sets["training"], out=tmp_path / "a", settings=other, resume="never", **QUIET)
    assert (tmp_path / "a" / "model.pt").read_bytes() != before

    net = lm.TrainSettings(detector="cnn", **SMALL)
    lm.train(sets["training"], out=tmp_path / "b", settings=net, **QUIET)
    with raises("other-training", UsageError, path=tmp_path / "b"):
        lm.train(sets["training"], out=tmp_path / "b", settings=spectral, **QUIET)
    own = tmp_path / "b" / "folds" / "own.npy"
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(b"a person's")
    lm.train(sets["training"], out=tmp_path / "b", settings=spectral, resume="never", **QUIET)
    own.unlink()
    assert sorted(os.listdir(tmp_path / "b")) == [
        "checkpoints",
        "folds",
        "model.pt",
        "model_card.md",
        "summary.json",
    ]
    assert os.listdir(tmp_path / "b" / "checkpoints") == []


@pytest.mark.slow
def test_an_interrupted_cross_validation_continues_with_the_missing_fit(sets, chosen, tmp_path, monkeypatch):
    monkeypatch.setattr(folds_module, "MIN_FOR_NETWORK", 40)
    settings = lm.TrainSettings(detector="auto", **SMALL)
    kept, done = folds_module.FoldTrainer._kept, list[str]()

    def interrupted(self: Any, about: Any, parts: Any, fit: Any) -> Any:
        def noted(folder: Path | None) -> np.ndarray:
            done.append(about["kind"])
            if len(done) == 8:
                raise KeyboardInterrupt
            return fit(folder)

        return kept(self, about, parts, noted)

    monkeypatch.setattr(folds_module.FoldTrainer, "_kept", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.train(sets["training"], out=tmp_path / "run", settings=settings, **QUIET)
    assert done == ["spectral"] * 5 + ["cnn"] * 3
    resumed = lm.train(sets["training"], out=tmp_path / "run", settings=settings, **QUIET)
    assert done[8:][:3] == ["cnn"] * 3  # the interrupted fold and the two after it
    tried = [[(t["kind"], t["auc"]) for t in r.summary["choice"]["tried"]] for r in (resumed, chosen)]
    assert tried[0] == tried[1]
    assert resumed.detector.thresholds == chosen.detector.thresholds


def test_a_damaged_score_file_is_computed_again(sets, alone, tmp_path):
    settings = lm.TrainSettings(detector="spectral")
    shutil.copytree(alone.model_path.parent, tmp_path / "run")
    scores = sorted((tmp_path / "run" / "folds").glob("*.npy"))
    assert len(scores) == 10, "five folds by sensor, and five of single recordings"
    for path in scores[::2]:
        os.truncate(path, 60)
    os.remove(tmp_path / "run" / "model.pt")
    again = lm.train(sets["training"], out=tmp_path / "run", settings=settings, **QUIET)
    assert again.detector.thresholds == alone.detector.thresholds
    assert again.detector.reliability == alone.detector.reliability


def data_of(ds: lm.MelDataset) -> TrainingData:
    task = make_task(ds.class_names)
    return TrainingData(Segments(ds, level="recording", task=task), None, task, None, {})


def test_scores_of_another_version_are_computed_again(sets, tmp_path, monkeypatch):
    with lm.open_dataset(sets["training"]) as ds:
        n = len(ds)
        groups = Groups("recording", np.arange(n), tuple(map(str, range(n))))
        settings = lm.TrainSettings(detector="spectral")
        trainer = folds_module.FoldTrainer(data_of(ds), settings, groups, "cpu", tmp_path)
        for version, n_done in (("1", 1), ("1", 1), ("2", 2)):
            monkeypatch.setattr(folds_module, "__version__", version, raising=False)
            trainer.scores("spectral", np.arange(4, n), np.arange(4))
            assert trainer.n_done == n_done


def test_groups_stay_together_and_labels_are_in_every_training_part():
    rng = np.random.default_rng(0)
    for _ in range(50):
        code = rng.integers(0, rng.integers(2, 12), 40)
        classes = rng.integers(0, 2, 40)
        groups_of = [len(np.unique(code[classes == k])) for k in (0, 1)]
        if min(groups_of) < 2:
            with raises("label-in-one-part", DataError):
                make_folds(classes, code, 5)
            continue
        fold = make_folds(classes, code, 5)
        for k in np.unique(fold):
            assert not set(code[fold == k]) & set(code[fold != k])
            assert set(classes[fold != k]) == set(classes)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n_loaded"), [("spectral", 0), ("cnn", 6)])
def test_only_the_recordings_of_a_network_are_loaded_into_memory(
    sets, trained, tmp_path, monkeypatch, kind, n_loaded
):
    loaded = []

    def load(ds: Segments, *args: Any, **more: Any) -> Any:
        loaded.extend([ds] * (ds.preloaded is None))
        return LOAD(ds, *args, **more)

    monkeypatch.setattr(segments, "load_items", load)
    settings = lm.TrainSettings(detector=kind, **SMALL)
    made = lm.train(sets["training"], sets["validation"], out=tmp_path / "run", settings=settings, **QUIET)
    assert len(loaded) == n_loaded  # those of five folds, and all of them
    assert made.detector.thresholds == trained[kind].detector.thresholds
    if kind == "spectral":
        lm.cross_validate(sets["training"], settings=settings, jobs=1, n_draws=100, **QUIET)
        assert not loaded


@pytest.mark.slow
@each("kind", ["spectral", "blend"])
@each(("is_mixed", "n_scored"), [(True, 1), (False, 4)])
def test_of_many_recordings_a_fold_with_both_labels_is_scored(sets, monkeypatch, kind, is_mixed, n_scored):
    def folds_of_one_label(classes: np.ndarray, *_: Any) -> np.ndarray:
        fold = np.arange(len(classes)) % 2 + 2 * (classes == 1)
        if is_mixed:
            fold[np.flatnonzero(classes == 0)[:2]] = 2
        return fold

    for name, value in (("MOST_FOR_FOLDS", 20), ("MOST_FOR_NETWORKS", 20), ("MOST_FOLDS_S", 0)):
        monkeypatch.setattr(folds_module, name, value)
    monkeypatch.setattr(folds_module, "make_folds", folds_of_one_label)
    with lm.open_dataset(sets["training"]) as ds:
        rows = np.arange(len(ds))
        groups = Groups("recording", np.arange(len(rows)), tuple(map(str, rows)))
        settings = lm.TrainSettings(detector=kind, **SMALL)
        trainer = folds_module.FoldTrainer(data_of(ds), settings, groups)
        choice = folds_module.choose_kind(trainer, detector=kind)
        assert choice is not None
        truth = trainer.ds.is_leak[choice.scored]
        # the promise of a training: no recording has a part in the choice of the rule that classifies it
        marks = np.linspace(0.01, 0.99, len(choice.scored), dtype=np.float32)
        marked = replace(choice, segment_scores=np.repeat(marks[:, None], 40, 1))
        asked = list[np.ndarray]()

        def noted(is_leak: np.ndarray, scores: np.ndarray, *_: Any) -> DecisionRule:
            asked.append(scores[:, 0])
            return DecisionRule()

        monkeypatch.setattr(folds_module, "choose_rule", noted)
        folds_module._inner_evaluation(marked, trainer)
        left_out = np.concatenate([np.setdiff1d(marks, own) for own in asked])
        assert sorted(left_out) == sorted(marks)
    assert choice.n_folds == n_scored
    assert set(truth.tolist()) == {False, True}
    assert all(np.isfinite(t["auc"]) for t in choice.tried)


def test_a_label_of_one_group_only_gives_a_spectral_detector_without_a_choice(sets, tmp_path, caplog):
    with raises("label-in-one-part", DataError):
        make_folds(np.array([0, 0, 1, 1]), np.array([0, 1, 2, 2]), 5)
    with lm.open_dataset(sets["training"]) as ds:
        sensors = ds.files["sensor"].to_numpy()
        leaks = np.array(ds.class_names)[ds.labels] == "LEAK"
        one = next(s for s in np.unique(sensors[leaks]))
        rows = np.flatnonzero(~leaks | (sensors == one))
        labels = ds.labels.astype(np.int64)
        split = Split({"training": rows}, labels, tuple(ds.class_names), "one sensor with leaks", (), (), ())
        result = lm.train(ds, split=split, out=tmp_path / "run", **QUIET)
    assert result.detector.kind == "spectral"
    assert result.summary["choice"] is None
    assert "cross-validation is not possible" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spectral", "blend"])
def test_a_champion_of_each_kind_is_retrained(sets, trained, kind, tmp_path):
    round_ = lm.retrain(
        trained[kind].detector,
        sets["validation"],
        replay=sets["training"],
        testing=sets["testing"],
        out=tmp_path / "rounds",
        **QUIET,
    )
    challenger = load_detector(round_.folder / "model.pt")
    assert challenger.kind == kind
    old = next(m for m in trained[kind].detector.members if isinstance(m, SpectralClassifier))
    new = next(m for m in challenger.members if isinstance(m, SpectralClassifier))
    assert not torch.equal(old.get_buffer("weight"), new.get_buffer("weight"))
    if kind == "spectral":
        assert challenger.held_out is not None
        assert challenger.threshold_from == f"highest balanced accuracy on {challenger.held_out.method}"
        assert len(challenger.held_out) == round_.record["replay"]["recordings"], (
            "predicted labels judge nothing"
        )
        return
    assert challenger.held_out is None, "there is no validation"
    assert set(challenger.thresholds.values()) == {0.5}, "not those that were chosen for the champion"
    assert challenger.threshold_from == UNCHOSEN


def test_a_fitted_challenger_has_the_decision_of_its_folds(sets, trained, tmp_path):
    champion = trained["spectral"].detector
    with Segments(sets["training"], level="recording", task=champion.task) as old:
        whole = np.where(old.segment_mask, old.labels[:, None], LEFT_OUT)
        items = SegmentSubset([(old, whole)], champion.task)
        settings = round_settings(champion, None)
        usual = round_settings(replace(champion, record={}))
        for unread in ({"old_name": 3}, {"epochs": 0}, None):
            assert round_settings(replace(champion, record={"settings": unread})) == usual
        challenger = fine_tune(champion, items, None, settings, tmp_path, device="cpu", show="none")
        predicted = old.rows[::4]
        few = fine_tune(champion, items, None, settings, tmp_path, predicted=predicted, show="none")
        truth = old.is_leak[~np.isin(old.rows, predicted)]
    assert few.held_out is not None
    assert np.array_equal(few.held_out.truth, truth), "a predicted class judges nothing"
    trained_anew = lm.train(
        sets["training"], out=tmp_path / "anew", settings=lm.TrainSettings(detector="spectral"), **QUIET
    ).detector
    challenger.save(tmp_path / "model.pt")
    saved = load_detector(tmp_path / "model.pt")
    for own in (challenger, saved):
        assert own.held_out is not None
        assert trained_anew.held_out is not None
        assert np.array_equal(own.held_out.score, trained_anew.held_out.score), "the folds of a training"
        assert (own.vote, own.thresholds) == (trained_anew.vote, trained_anew.thresholds)
        assert own.threshold_from == trained_anew.threshold_from
        assert torch.equal(own.classifier.get_buffer("weight"), trained_anew.classifier.get_buffer("weight"))
    found = lm.predict(sets["recordings"], saved, false_alarms=20, device="cpu", progress="none")
    assert found.calibration is not None


HOSTILE = {
    "a node that does not exist": lambda head, weights: weights["left"].fill_(1 << 40),
    "a feature that does not exist": lambda head, weights: weights["feature"].fill_(-1),
    "more nodes than tensors": lambda head, weights: head["classifier"]["settings"].update(n_nodes=1 << 30),
    "another kind": lambda head, weights: head["classifier"].update(kind="forest"),
    "a weight that is no number": lambda head, weights: weights["weight"].fill_(float("nan")),
    "a tree deeper than its nodes": lambda head, weights: head["classifier"]["settings"].update(
        depth=1 << 30
    ),
    "a leak class that does not exist": lambda head, weights: head["task"].update(leak_in_model=9),
    "labels without a class": lambda head, weights: head["task"].update(to_model=[0]),
    "text in an evaluation": lambda head, weights: head["evaluations"][0].update(auc="x"),
    "text as a setting": lambda head, weights: head["classifier"]["settings"].update(depth="9"),
}


def test_sizes_of_a_network_and_members_of_a_blend_are_checked():
    with raises("invalid-net", UsageError):
        NetSettings(channels=(30_000, 30_000), n_classes=-(10**6))
    net = LeakNet(NetSettings(n_mels=8, channels=(2,)))
    for slopes, offsets in (((), ()), ((1.0,), ()), ((float("nan"),), (0.0,))):
        with raises("invalid-net", UsageError):
            BlendClassifier(BlendSettings(1, slopes, offsets), [net][: len(slopes)])
    with raises("invalid-net", UsageError):
        BlendClassifier(BlendSettings(2, (1.0,), (0.0,)), [net])


@each("name", HOSTILE)
def test_a_hostile_spectral_detector_is_refused(trained, tmp_path, name):
    from leakmel.detector.model.files import plain_bytes

    values = load_plain(trained["spectral"].model_path)
    head = json.loads(values["detector"])
    HOSTILE[name](head, values["weights"])
    path = tmp_path / "model.pt"
    path.write_bytes(plain_bytes(values | {"detector": json.dumps(head)}))
    with raises("not-a-detector", DataError, path=path):
        load_detector(path)


def test_a_blend_is_the_mean_of_its_calibrated_members(trained):
    blend: Detector = trained["blend"].detector
    assert isinstance(blend.classifier, BlendClassifier)
    assert [type(m).__name__ for m in blend.members] == ["SpectralClassifier", "LeakNet"]
    assert blend.record["choice"]["kind"] == "blend"
