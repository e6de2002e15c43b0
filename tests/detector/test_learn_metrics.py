"Figures of a detector: the same as scikit-learn's, undefined where they mean nothing."

import warnings

import numpy as np
import pytest
from each import each
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from leakmel.core.errors import DataError
from leakmel.detector.metrics.metrics import _FEW as FEW
from leakmel.detector.metrics.metrics import (
    FIGURES,
    best_threshold,
    confusion,
    figures_of_counts,
    leak_metrics,
    reliability,
    roc,
    why_undefined,
)

pytestmark = pytest.mark.quick

quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)
# few distinct scores, so that ties are frequent
pairs = st.lists(
    st.tuples(st.booleans(), st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.5000001, 0.75, 1.0])),
    min_size=1,
    max_size=40,
)


def theirs(y: np.ndarray, score: np.ndarray, threshold: float) -> dict[str, float]:
    output = score >= threshold
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "accuracy": sk.accuracy_score(y, output),
            "precision": sk.precision_score(y, output, zero_division=np.nan),
            "sensitivity": sk.recall_score(y, output, zero_division=np.nan),
            "specificity": sk.recall_score(~y, ~output, zero_division=np.nan),
            "f1": sk.f1_score(y, output, zero_division=np.nan),
        }


@pytest.mark.slow
@quick
@given(pairs, st.sampled_from([0.0, 0.3, 0.5, 2.0]))
def test_figures_are_those_of_scikit_learn(found, threshold):
    y, score = np.array([p[0] for p in found]), np.array([p[1] for p in found])
    ours, other = leak_metrics(y, score, threshold), theirs(y, score, threshold)
    assert tuple(ours) == FIGURES
    for name, value in other.items():
        assert ours[name] == pytest.approx(value, abs=1e-12, nan_ok=True), name
    assert ours["balanced_accuracy"] == pytest.approx(
        (other["sensitivity"] + other["specificity"]) / 2, abs=1e-12, nan_ok=True
    )
    assert set(why_undefined(y, score, threshold)) == {n for n, v in ours.items() if np.isnan(v)}
    if 0 < y.sum() < len(y):
        assert ours["auc"] == pytest.approx(sk.roc_auc_score(y, score), abs=1e-12)
        fpr, tpr, _ = sk.roc_curve(y, score, drop_intermediate=False)
        curve = roc(y, score)
        np.testing.assert_allclose(curve.false_alarm_rate, fpr, atol=1e-12)
        np.testing.assert_allclose(curve.sensitivity, tpr, atol=1e-12)
    else:
        assert np.isnan(ours["auc"])
    c = confusion(y, score, threshold)
    np.testing.assert_array_equal(
        [[c.true_normal, c.false_alarm], [c.missed_leak, c.true_leak]],
        sk.confusion_matrix(y, score >= threshold, labels=[False, True]),
    )


def test_the_area_does_not_depend_on_the_order_of_ties():
    rng = np.random.default_rng(0)
    y, score = rng.random(500) < 0.4, rng.integers(0, 6, 500) / 5
    areas = {
        round(leak_metrics(y[p], score[p])["auc"], 12) for p in (rng.permutation(500) for _ in range(10))
    }
    assert areas == {round(sk.roc_auc_score(y, score), 12)}


def test_scores_at_the_threshold_are_leaks():
    assert leak_metrics([1, 0], [0.5, np.nextafter(0.5, 0)], 0.5)["accuracy"] == 1


def test_many_confusions_at_once():
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 3, (200, 4))
    many = figures_of_counts(counts)
    for k, one in enumerate(counts):
        for name, value in figures_of_counts(one).items():
            np.testing.assert_array_equal(value, many[name][k])


@each(
    ("y", "score", "named"),
    [
        (
            [0, 0],
            [0.1, 0.2],
            {
                "balanced_accuracy": "no recording is a leak",
                "sensitivity": "no recording is a leak",
                "auc": "no recording is a leak",
                "precision": "no recording was classified as a leak",
                "f1": "no recording is a leak or was classified as one",
            },
        ),
        (
            [1, 1],
            [0.1, 0.9],
            dict.fromkeys(("balanced_accuracy", "specificity", "auc"), "every recording is a leak"),
        ),
        ([1, 0], [0.1, 0.2], {"precision": "no recording was classified as a leak"}),
        ([1, 0], [0.9, 0.2], {}),
        ([], [], dict.fromkeys(FIGURES, "no recording")),
    ],
)
def test_undefined_figures_have_a_note(y, score, named):
    assert why_undefined(y, score) == named


@each(
    ("y", "score", "code"),
    [
        ([1, 0], [0.5], "lengths-differ"),
        ([[1, 0]], [[0.5, 0.1]], "lengths-differ"),
        ([1, 2], [0.5, 0.1], "invalid-labels"),
        ([1, 0], [0.5, np.nan], "invalid-scores"),
        ([1, 0], [np.inf, 0], "invalid-scores"),
        ([0.5, 1], [0, 1], "invalid-labels"),
        (["LEAK", "NO"], [0, 1], "invalid-labels"),
    ],
)
def test_invalid_scores_are_refused(y, score, code):
    with raises(code, DataError):
        leak_metrics(y, score)


# ---- the threshold ---------------------------------------------------------------------------------------------------


@quick
@given(pairs, st.booleans())
def test_chosen_threshold_is_optimal(found, single):
    y, score = (
        np.array([p[0] for p in found]),
        np.array([p[1] for p in found], np.float32 if single else np.float64),
    )
    if not 0 < y.sum() < len(y):
        with raises("one-class", DataError):
            best_threshold(y, score)
        return
    best = best_threshold(y, score)
    values = np.unique(score).astype(np.float64)
    tried = [-1, *values, *(values[1:] + values[:-1]) / 2, 2]

    def at(threshold: float) -> float:
        return leak_metrics(y, score.astype(np.float64), threshold)["balanced_accuracy"]

    highest = max(map(at, tried))
    if highest == 0.5:
        assert best == 0.5  # a constant answer is as good
    elif np.diff(values).min() > 1e-4:
        n = int(min(y.sum(), (~y).sum()))
        assert at(0.5 + (best - 0.5) * (n + FEW) / n) == pytest.approx(highest, abs=1e-12)
    assert np.float32(best) == best  # scores of networks are compared in float32


def test_the_threshold_is_the_middle_of_a_gap_moved_towards_one_half_where_recordings_are_few():
    for y, score in (([0, 1], [0.25, 0.75]), ([1, 0], [0.25, 0.75]), ([0, 1], [0.5, 0.5])):
        assert best_threshold(y, score) == 0.5
    for n in (2, FEW, 500):
        score = np.r_[np.linspace(0, 0.1, n), np.linspace(0.3, 1, 3 * n)]
        found = best_threshold(np.repeat([0, 1], [n, 3 * n]), score)
        assert found == pytest.approx(0.5 - 0.3 * n / (n + FEW), abs=1e-6)
    rng = np.random.default_rng(2)
    truth, many = rng.random(300) < 0.5, rng.random(300).astype(np.float32)
    assert len({best_threshold(truth[p], many[p]) for p in (rng.permutation(300) for _ in range(5))}) == 1


# ---- calibration -----------------------------------------------------------------------------------------------------


def test_reliability_is_that_of_scikit_learn():
    from sklearn.calibration import calibration_curve

    rng = np.random.default_rng(3)
    score = rng.random(2000)
    y = rng.random(2000) < score**2
    found = reliability(y, score)
    share, mean = calibration_curve(y, score, n_bins=10)
    np.testing.assert_allclose(found.leak_share, share)
    np.testing.assert_allclose(found.mean_score, mean)
    assert found.n.sum() == 2000
    assert found.error == pytest.approx(np.sum(found.n * np.abs(share - mean)) / 2000)


def test_empty_bins_have_no_weight():
    found = reliability([1, 0, 1], [1.0, 0.0, 1.0])
    assert found.n.tolist() == [1, *[0] * 8, 2]
    assert np.isnan(found.leak_share[1:9]).all()
    assert found.error == 0
