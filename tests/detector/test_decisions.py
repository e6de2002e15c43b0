"""Decisions: calibration, alarm budgets, conformal thresholds, and the evaluation that a model file carries."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from each import each

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, UsageError
from leakmel.core.operation import Run, make
from leakmel.detector.data.segments import Segments
from leakmel.detector.evaluate.evaluation import record_evaluation
from leakmel.detector.metrics.metrics import (
    MIN_ISOTONIC,
    Brier,
    HeldOutScores,
    alarm_threshold,
    brier_score,
    conformal_threshold,
    cross_calibrated,
    fit_calibration,
    reliability,
)
from leakmel.detector.metrics.significance import Bootstrap, Groups, give_verdict, score_model
from leakmel.detector.model.card import (
    CROSS_VALIDATION,
    NEVER_EVALUATED,
    TEST_SET,
    best_evaluation,
    brier_from_plain,
    evaluation_record,
    evaluation_result,
    evaluation_text,
    next_steps,
    provenance_of,
    record_from_plain,
)
from leakmel.detector.model.detector import load_detector, model_card
from leakmel.detector.model.files import load_plain, plain_bytes
from leakmel.extras.onnx import export_onnx
from leakmel.extras.review.suggest import suggest
from leakmel.operations.detector import Evaluate, Train, run_summary


def network(rng: np.random.Generator, n_groups: int, n_each: int, sure: float = 1.0) -> HeldOutScores:
    "Scores of sensors that differ."
    group = np.repeat(np.arange(n_groups), n_each)
    z = rng.normal(0, 1, len(group)) + rng.normal(0, 0.7, n_groups)[group]
    truth = rng.random(len(group)) < 1 / (1 + np.exp(-2 * z))
    return HeldOutScores(1 / (1 + np.exp(-2 * sure * z)), truth, group, "sensor", "simulated")


@each(("n_groups", "share"), [(19, 0.2), (49, 0.1), (99, 0.05), (199, 0.1)])
def test_conformal_coverage_of_1000_deployments_is_within_two_percent(n_groups: int, share: float) -> None:
    rng = np.random.default_rng(7)
    rates = []
    for _ in range(1000):
        sizes = rng.integers(1, 10, n_groups + 1)
        sizes[-1] = 40  # recordings of the new sensor
        group = np.repeat(np.arange(n_groups + 1), sizes)
        score = rng.normal(0, 1, len(group)) + rng.normal(0, 1, n_groups + 1)[group]
        known = group < n_groups
        threshold = conformal_threshold(score[known], group[known], share)
        assert threshold is not None
        rates.append((score[~known] >= threshold).mean())
    error = np.std(rates) / np.sqrt(1000)
    assert error < 0.01
    assert np.mean(rates) < share + 2 * error, "never more false alarms than promised"
    if n_groups >= 49:  # with fewer sensors the threshold is higher than it has to be
        assert np.mean(rates) > share - 0.02 - 2 * error


def test_quantile_over_recordings_misses_the_coverage_of_conformal() -> None:
    rng, naive, kept = np.random.default_rng(1), [], []
    for _ in range(500):
        sizes = rng.choice([1, 60], 20, p=[0.8, 0.2])  # few sensors have nearly all recordings
        place = rng.normal(0, 2, 20)
        group = np.repeat(np.arange(20), sizes)
        score = rng.normal(0, 0.3, len(group)) + place[group]
        known = group < 19
        threshold = conformal_threshold(score[known], group[known], 0.1)
        assert threshold is not None
        kept.append((score[~known] >= threshold).mean())
        naive.append((score[~known] > np.quantile(score[known], 0.9)).mean())
    assert np.mean(kept) < 0.12 < np.mean(naive)


def test_conformal_needs_enough_groups_and_counts_each_group_once() -> None:
    assert conformal_threshold(np.zeros(8), np.arange(8), 0.1) is None
    assert conformal_threshold(np.zeros(900), np.arange(900) % 8, 0.1) is None, "not more for more recordings"
    assert conformal_threshold(np.zeros(9), np.arange(9), 0.1) == np.nextafter(0, 1)


def test_alarm_threshold_keeps_the_budget_on_the_held_out_recordings() -> None:
    rng = np.random.default_rng(3)
    for n_groups, per_100 in ((6, 10), (6, 1), (120, 5)):
        scores = network(rng, n_groups, 12)
        found = alarm_threshold(scores, per_100)
        assert 100 * (scores.normal[0] >= found.threshold).mean() <= per_100 + 1e-9
        assert found.is_guaranteed == (n_groups >= 100 / per_100 - 1)
        assert found.low <= found.expected <= found.high


def test_guarantee_is_stated_only_where_it_holds() -> None:
    scores = network(np.random.default_rng(3), 120, 12)
    assert "guaranteed" in str(alarm_threshold(scores, 5))
    sure = replace(scores, score=np.where(scores.score > 0.5, 1.0, scores.score))
    clipped = alarm_threshold(sure, 5)
    assert clipped.threshold == 1
    assert clipped.expected > 5, "recordings with the score 1 are alarms"
    assert clipped.sensitivity > 0
    single = replace(scores, group=np.arange(len(scores)), by="recording")
    unnamed = replace(single, by="group")  # of data sets without names
    for found in (clipped, alarm_threshold(single, 5), alarm_threshold(unnamed, 5)):
        assert not found.is_guaranteed
        assert "guaranteed" not in str(found)
        assert "estimated" in str(found)
    assert alarm_threshold(replace(single, by="sensor"), 5).is_guaranteed


def test_alarm_threshold_of_one_sensor_or_without_normal_recordings() -> None:
    rng = np.random.default_rng(3)
    one = alarm_threshold(network(rng, 1, 30), 10)
    assert np.isnan(one.expected)
    assert np.isnan(one.expected)
    assert "no sensor" in str(one)
    scores = network(rng, 3, 4)
    with pytest.raises(DataError) as e:
        alarm_threshold(replace(scores, truth=np.ones(12, bool)), 5)
    assert e.value.code == "one-class"
    for wrong in (0, 100, -1, True):
        with pytest.raises(UsageError):
            alarm_threshold(scores, wrong)


@each(("n_each", "method"), [(5, "Platt"), (60, "isotonic")])
def test_calibration_brings_scores_near_the_share_of_leaks(n_each: int, method: str) -> None:
    scores = network(np.random.default_rng(5), 20, n_each, sure=4)
    calibration = fit_calibration(scores)
    assert calibration is not None
    assert calibration.method == method
    assert (len(scores) >= MIN_ISOTONIC) == (method == "isotonic")
    p = calibration.probability(np.linspace(0, 1, 101))
    assert (np.diff(p) >= 0).all()
    assert 0 <= p[0] <= p[-1] <= 1
    held_out = cross_calibrated(scores)
    assert reliability(scores.truth, held_out).error < reliability(scores.truth, scores.score).error
    assert fit_calibration(replace(scores, truth=np.zeros(len(scores), bool))) is None


def test_platt_calibration_is_not_flattened_by_a_penalty() -> None:
    rng = np.random.default_rng(1)
    slopes = []
    for _ in range(100):
        z = rng.normal(0, 1, 24)
        truth = rng.random(24) < 1 / (1 + np.exp(-3 * z))
        scores = HeldOutScores(1 / (1 + np.exp(-z / 10)), truth, np.arange(24), "sensor", "simulated")
        if (found := fit_calibration(scores)) is not None:
            slopes.append(found.x[0] / 10)
    assert 1.8 < np.median(slopes) < 3.5


def test_platt_calibration_of_separated_scores_is_finite() -> None:
    truth = np.arange(24) >= 12
    scores = HeldOutScores(np.where(truth, 1.0, 0.0), truth, np.arange(24), "sensor", "simulated")
    found = fit_calibration(scores)
    assert found is not None
    p = found.probability(scores.score)
    assert np.allclose(p[truth], 13 / 14, atol=1e-3)  # Platt's target for 12 leaks
    assert np.allclose(p[~truth], 1 / 14, atol=1e-3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, few_trees: None) -> Path:
    folder = tmp_path_factory.mktemp("decisions")
    lm.write_demo(folder / "demo", n_files=80)
    for split in ("training", "testing"):
        lm.build(folder / "demo", split=split, out=folder / f"{split}.h5", progress="none", check=0)
    settings = lm.TrainSettings(detector="spectral")
    lm.train(folder / "training.h5", out=folder / "model", settings=settings, progress=False)
    return folder


@pytest.mark.slow
def test_training_stores_held_out_scores_and_a_cross_validated_verdict(trained: Path) -> None:
    detector = load_detector(trained / "model" / "model.pt")
    n = detector.record["training"]["recordings"]
    assert detector.held_out is not None
    assert len(detector.held_out) == n
    assert [e.kind for e in detector.evaluations] == [CROSS_VALIDATION]
    assert detector.evaluations[0].recordings == n
    assert detector.evaluations[0].beats is not None
    known, new = detector.reliability
    assert (known.by, known.groups, new.by, new.groups) == (
        "recording",
        n,
        "sensor",
        detector.evaluations[0].groups,
    )
    assert new == brier_score(detector.held_out)
    p, truth = cross_calibrated(detector.held_out), detector.held_out.truth
    assert new.score == np.mean((p - truth) ** 2)
    assert new.base == pytest.approx(truth.mean() * (1 - truth.mean()), abs=0.02)
    card = (trained / "model" / "model_card.md").read_text()
    assert str(detector.evaluations[0].groups) in card
    assert "## Next steps" in card
    for brier in detector.reliability:
        assert f"| {brier.by} | {brier.groups} | {brier.score:.3f} | {brier.base:.3f} |" in card


@pytest.mark.slow
def test_prediction_shows_evaluation_probability_and_alarm_threshold(trained: Path, tmp_path: Path) -> None:
    model = trained / "model"
    detector = load_detector(model / "model.pt")
    assert detector.held_out is not None
    found = lm.predict(
        trained / "demo", model, false_alarms=10, out=tmp_path / "s.csv", all_columns=True, progress="none"
    )
    assert found.rule.threshold == alarm_threshold(detector.held_out, 10).threshold
    known, new = detector.reliability
    assert f"Detector: {detector.evaluations[0]}; Brier score {known}, {new}\n" in found.text(1000)
    p = found.table["probability"].to_numpy()
    order = found.table["score"].to_numpy().argsort(kind="stable")
    assert (np.diff(p[order]) >= 0).all()
    assert ((p >= 0) & (p <= 1)).all()
    assert found.summary["evaluation_result"] in (tmp_path / "s.csv").read_text()
    other = next(v for v in ("mean", "long_vote") if v != detector.vote)
    assert lm.predict(trained / "demo", model, vote=other, progress="none").table["probability"].isna().all()
    for wrong in ({"threshold": 0.5}, {"vote": other}):
        with pytest.raises(UsageError) as e:
            lm.predict(trained / "demo", model, false_alarms=10, progress="none", **wrong)
        assert e.value.code == "unused-option"
    # a probability that says less than the share of leaks is kept for the sensors of the training
    useless = replace(detector, reliability=(known, replace(new, score=new.base)))
    less = lm.predict(trained / "demo", useless, out=tmp_path / "s.csv", progress="none")
    is_new = np.asarray(less.withheld)
    assert is_new.tolist() == (~less.table["in_training"].to_numpy(bool)).tolist(), (
        "the demo is split by sensor"
    )
    assert less.table["probability"].isna().tolist() == is_new.tolist()
    assert np.array_equal(less.table["score"], found.table["score"])
    assert (pd.read_csv(tmp_path / "s.csv")["probability"].isna() == is_new).all()
    assert f"no probability for {is_new.sum()} recordings of new or unnamed sensors" in less.text(1000)
    assert less.summary["without_probability"] == is_new.sum()
    # everywhere: the queue of suggestions goes by score, and an ONNX file, which knows no sensors, has no probability
    queue = suggest(trained / "demo", useless, n=8, progress="none")
    missing = {path for path, is_missing in zip(less.table["path"], is_new, strict=True) if is_missing}
    assert queue.table["probability"].isna().tolist() == queue.table["path"].isin(missing).tolist()
    assert queue.table["reason"].str.startswith("score").any()
    assert not queue.table["reason"].str.contains("probability").any()
    assert (queue.is_calibrated, queue.threshold) == (False, detector.threshold)
    assert export_onnx(useless, tmp_path / "less.onnx", most=2, progress="none").check.probability is None
    # files of earlier versions say neither
    values = load_plain(model / "model.pt")
    head = {name: v for name, v in json.loads(values["detector"]).items() if name != "reliability"}
    del values["seen"]["sensors"]
    (tmp_path / "old.pt").write_bytes(plain_bytes(values | {"detector": json.dumps(head)}))
    assert lm.predict(trained / "demo", tmp_path / "old.pt", progress="none").probability.all()


def test_sensors_are_known_by_names_as_a_reader_sees_them_and_only_where_groups_are_sensors(
    trained: Path,
) -> None:
    detector = load_detector(trained / "model" / "model.pt")
    with Segments([trained / "training.h5"], level="recording") as ds:
        own = ds.sources[0].files["sensor"].tolist()
        seen = provenance_of([ds])
    assert seen.has_sensors(own).all()
    assert seen.has_sensors([f" {name.lower()}\u200b" for name in own]).all()
    for by, sensor_counts in {"sensor": True, "site": True, "session": False, "date": False}.items():
        brier = Brier(by, 9, 0.3, 0.2)
        found = replace(detector, reliability=(brier,), provenance=seen)
        known = found.has_probability([own[0].upper(), "another", ""], np.zeros(3, bool))
        assert known.tolist() == [sensor_counts, False, False], by
        assert found.has_probability(["another"], np.ones(1, bool)).all(), "it was trained on"
        assert (
            replace(found, reliability=(replace(brier, score=0.1),))
            .has_probability([""], np.zeros(1, bool))
            .all()
        )


def test_evaluation_checks_the_calibrated_probability_on_test_recordings(trained: Path) -> None:
    found = lm.evaluate(trained / "model", trained / "testing.h5", n_draws=100, progress="none")
    assert found.calibrated is not None
    assert found.calibrated.n.sum() == len(found)
    assert found.summary["calibration"]["error_calibrated"] == found.calibrated.error
    assert "Calibrated probability" in found.report()
    names = [trace.name for trace in found.plots()["reliability"].data]
    assert names[1:] == ["score", "probability"]


@pytest.mark.slow
def test_summary_of_a_training_says_how_the_detector_was_evaluated(small_sets: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "data": str(small_sets),
        "out": str(tmp_path),
        "detector": "cnn",
        "epochs": 1,
        "channels": "4,8",
    }
    operation, run = make(Train, given | {"epoch_share": 0.1, "device": "cpu"}), Run("none", keeps=True)
    plan = operation.plan(run)
    result = operation.train(plan, run)
    assert "In cross-validation inside its training set" in repr(result)
    found = operation.evaluate(plan, result, run)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["evaluation"]["verdict"]
    records = load_detector(result.model_path).evaluations
    assert [r.kind for r in records] == [CROSS_VALIDATION, TEST_SET]
    assert summary["evaluation_result"] == evaluation_result(records) != "never evaluated"
    assert summary["next_steps"] == next_steps(records, model=summary["model"])
    assert run_summary(result, found) == summary | {"evaluation": found and found.summary}
    assert evaluation_text(records) in " ".join(repr(result).split())


def test_detector_without_evaluation_is_reported(trained: Path, tmp_path: Path) -> None:
    plain = replace(load_detector(trained / "model" / "model.pt"), held_out=None, evaluations=())
    plain.save(tmp_path / "model.pt")
    loaded = load_detector(tmp_path / "model.pt")
    assert loaded.held_out is None
    assert loaded.evaluations == ()
    found = lm.predict(trained / "demo", loaded, progress="none")
    assert f"Detector: {NEVER_EVALUATED}" in found.text(1000)
    assert found.summary["evaluation_result"] == "never evaluated"
    assert found.table["probability"].isna().all()
    with pytest.raises(DataError) as e:
        lm.predict(trained / "demo", loaded, false_alarms=5, progress="none")
    assert e.value.code == "no-held-out-scores"
    assert NEVER_EVALUATED in model_card(loaded)
    assert next_steps(())[0].startswith("Evaluate")


def test_an_evaluation_is_recorded_once_in_the_model_file(trained: Path, tmp_path: Path) -> None:
    load_detector(trained / "model" / "model.pt").save(tmp_path / "model.pt")
    sets: dict[str, Any] = {
        "training": trained / "training.h5",
        "allow_leaky_split": True,
        "progress": "none",
    }
    found = lm.evaluate(tmp_path / "model.pt", trained / "testing.h5", **sets)
    for _ in range(2):
        record_evaluation(tmp_path, found, "testing.h5")
    kinds = [e.kind for e in load_detector(tmp_path / "model.pt").evaluations]
    assert kinds == [CROSS_VALIDATION, TEST_SET]
    (tmp_path / "model_card.md").write_text("notes of a person")
    with pytest.raises(lm.LeakmelError) as e:
        record_evaluation(tmp_path, found, "testing.h5")
    assert e.value.code == "other-file-in-the-way"
    (tmp_path / "champion.json").write_text("{}")
    rounds = tmp_path / "round-0001"
    load_detector(tmp_path / "model.pt").save(rounds / "model.pt")
    before = (rounds / "model.pt").read_bytes()
    assert record_evaluation(rounds / "model.pt", found, "testing.h5") is None
    assert (rounds / "model.pt").read_bytes() == before


@pytest.mark.slow
def test_test_sets_of_one_name_keep_their_records(trained: Path, tmp_path: Path) -> None:
    model, sets = tmp_path / "model.pt", list[Path]()
    load_detector(trained / "model" / "model.pt").save(model)
    for k, files in enumerate((40, 60)):
        lm.write_demo(tmp_path / f"demo{k}", n_files=files, seed=k + 5)
        out = tmp_path / f"site{k}" / "TESTING_DATASET.H5"
        sets.append(lm.build(tmp_path / f"demo{k}", split="testing", out=out, progress="none", check=0).path)
    how: dict[str, Any] = {"progress": "none", "allow_leaky_split": True, "n_draws": 100}

    def record(path: Path, name: str = "TESTING_DATASET.H5", **more: Any) -> list[str]:
        record_evaluation(model, lm.evaluate(model, path, **how, **more), name)
        found = load_detector(model).evaluations
        return [e.data_set for e in found if e.kind == TEST_SET]

    (first,) = record(sets[0])
    both = record(sets[1])
    assert len(set(both)) == 2
    assert both[0] == first
    assert record(sets[0]) == both[::-1]  # its own record is replaced
    assert (
        record(Path(shutil.copy(sets[1], tmp_path / "copy.h5")), "copy.h5") == both
    )  # the name does not count
    card = (tmp_path / "model_card.md").read_text()
    assert all(digest in card for digest in both)
    labels = tmp_path / "labels.csv"
    path = lm.open_dataset(sets[0]).files["path"][0]
    labels.write_text(f"path,digest,label,by,when,note\n{path},,NOLEAK,me,2026-01-01T00:00:00Z,\n")
    assert record(sets[0], labels=labels) == both[::-1]  # also with labels by people


def test_a_record_without_a_digest_of_the_test_set_is_replaced(trained: Path, tmp_path: Path) -> None:
    detector = load_detector(trained / "model" / "model.pt")
    path = detector.save(tmp_path / "model.pt")
    found = lm.evaluate(path, trained / "testing.h5", progress="none", n_draws=100)
    new = record_evaluation(path, found, "testing.h5")
    assert new is not None
    record = new.evaluations[-1]
    old = replace(record, data_set="")
    other = replace(old, recordings=old.recordings + 1)  # another test set of this name
    replace(detector, evaluations=(old, other)).save(path)
    again = record_evaluation(path, found, "testing.h5")
    assert again is not None
    assert [replace(e, date="") for e in again.evaluations] == [replace(e, date="") for e in (other, record)]


def test_notebook_and_command_record_the_same(trained: Path, tmp_path: Path) -> None:
    records, cards = [], []
    for k in range(2):
        path = load_detector(trained / "model" / "model.pt").save(tmp_path / str(k) / "model.pt")
        testing = str(trained / "testing.h5")
        if k:
            given: dict[str, Any] = {"data": testing, "model": str(path), "n_draws": 100, "device": "cpu"}
            make(Evaluate, given | {"out": str(tmp_path / "out")})(Run("none", keeps=True))
        else:
            assert (
                main(
                    [
                        "evaluate",
                        testing,
                        "--model",
                        str(path),
                        "--draws",
                        "100",
                        "--device",
                        "cpu",
                        "--quiet",
                    ]
                )
                == 0
            )
        records.append([replace(e, date="") for e in load_detector(path).evaluations])
        cards.append(path.with_name("model_card.md").read_text())
    assert records[0] == records[1]
    assert [e.kind for e in records[0]] == [CROSS_VALIDATION, TEST_SET]
    assert cards[0] == cards[1]


def test_records_of_a_hostile_model_file_are_refused_or_escaped() -> None:
    truth = np.repeat([True, False], 30)
    groups = Groups("sensor", np.arange(60) % 12, tuple(f"S{k}" for k in range(12)))
    boot = Bootstrap(truth, groups, n_draws=100)
    own = score_model(boot, truth * 0.5, name="own", title="own")
    record = evaluation_record(TEST_SET, "x", truth, groups, own, give_verdict(boot, own, []))
    assert record_from_plain(asdict(record)) == record
    earlier = {n: v for n, v in asdict(record).items() if n != "data_set"}
    assert record_from_plain(earlier) == replace(record, data_set=""), "a record of an earlier version"
    hostile = asdict(record) | {"method": "\x1b[2J| <b>", "cautions": ["\x07"]}
    found = record_from_plain(hostile)
    assert "\x1b" not in str(found)
    assert "\x07" not in "".join(found.cautions)
    with pytest.raises((TypeError, LookupError)):
        record_from_plain({"kind": TEST_SET})
    brier = Brier("sensor", 12, 0.1, 0.25)
    assert brier_from_plain(asdict(brier)) == brier
    assert "\x1b" not in str(brier_from_plain(asdict(brier) | {"by": "\x1b[2J"}))
    values: list[dict[str, Any]] = [{"score": float("nan")}, {"base": 1.5}, {"groups": 0}]
    for wrong in values:
        with pytest.raises(UsageError, match="out of range"):
            brier_from_plain(asdict(brier) | wrong)
    assert len(brier_from_plain(asdict(brier) | {"by": "x" * 10_000}).by) == 100
    for wrong in ({"score": "0.1"}, {"by": None}, {"more": 1}):
        with pytest.raises((TypeError, LookupError, UsageError)):
            brier_from_plain(asdict(brier) | wrong)
    small = replace(record, kind=CROSS_VALIDATION), replace(record, auc_low=None, auc_high=None)
    assert best_evaluation(small) is small[0], "a test set without an interval says less"
    assert best_evaluation([small[0], replace(small[0], kind=TEST_SET, stamps=("LEAKY",))]) is small[0]
