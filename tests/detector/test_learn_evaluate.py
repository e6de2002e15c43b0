"Evaluation of a detector against baselines, with intervals of nominal coverage, and cautions where nothing can be concluded."

import json
import os
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from each import each
from errors import raises
from sklearn.metrics import roc_auc_score

import leakmel as lm
from leakmel.core.errors import DataError, OutputError, UsageError
from leakmel.detector.data.segments import Segments, make_task
from leakmel.detector.data.splits import LeakySplitWarning, Split, SplitWarning, group_split
from leakmel.detector.evaluate import evaluation
from leakmel.detector.evaluate.evaluation import score_baselines
from leakmel.detector.evaluate.plots import roc_figure
from leakmel.detector.metrics.metrics import FIGURES, UNCHOSEN, best_threshold, leak_metrics, roc
from leakmel.detector.metrics.significance import (
    HARDER,
    MIN_GROUPS,
    Bootstrap,
    Difference,
    Groups,
    Interval,
    Verdict,
    cautions,
    give_verdict,
    interval_from_draws,
    permutation_test,
    permute_group_labels,
    recording_groups,
    score_model,
    source_names,
    source_of_pieces,
)
from leakmel.detector.model.card import evaluation_record, evaluation_result
from leakmel.detector.model.detector import Detector
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.model.spectral import baseline_features, fit_logistic, levels, spectral_features
from leakmel.recordings.demo import write_wav

pytestmark = pytest.mark.usefixtures("one_thread", "few_trees")


def groups_of(code: Any, by: str = "sensor") -> Groups:
    names, number = np.unique(code, return_inverse=True)
    return Groups(by, number.astype(np.int64), tuple(map(str, names)))


# ---- intervals -------------------------------------------------------------------------------------------------------


def simulate_network(
    rng: np.random.Generator, n_sensors: int, n_each: int = 10, gap: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    "Truth, score and sensor of recordings whose sensors differ by more than chance."
    of = np.repeat(np.arange(n_sensors), n_each)
    truth, shift = rng.random(len(of)) < 0.5, rng.normal(0, 0.7, (2, n_sensors))
    return truth, np.where(truth, gap + shift[0][of], shift[1][of]) + rng.normal(0, 1, len(of)), of


def coverage_of(n_sensors: int, n_sets: int, n_draws: int = 1000) -> dict[str, float]:
    "Share of the intervals of synthetic data that contain the figure of the whole network."
    whole, held = simulate_network(np.random.default_rng(7), 20_000), {name: [] for name in FIGURES}  # type: ignore[var-annotated]
    true = leak_metrics(whole[0], whole[1], 0.5)
    for seed in range(n_sets):
        truth, score, of = simulate_network(np.random.default_rng(seed), n_sensors)
        boot = Bootstrap(truth, groups_of(of), n_draws=n_draws, seed=seed)
        for name, i in boot.intervals(boot.draws(score, 0.5)).items():
            if i.known:
                held[name].append(i.low <= true[name] <= i.high)
    assert all(len(h) > 0.9 * n_sets for h in held.values())
    return {name: float(np.mean(h)) for name, h in held.items()}


@pytest.mark.slow
@pytest.mark.parametrize("n_sensors", [6, pytest.param(20, marks=pytest.mark.long)])
def test_intervals_have_nominal_coverage(n_sensors):
    "200 sets of a network whose figures are known: 95 % of the intervals, as far as 200 sets can tell."
    shares = coverage_of(n_sensors, 200, n_draws=400)
    assert all(0.88 <= s <= 0.99 for s in shares.values()), shares


@pytest.mark.long
def test_intervals_have_nominal_coverage_in_a_thousand_sets():
    for n in (5, 8, 12, 30):
        shares = coverage_of(n, 1000)
        assert all(0.87 <= s <= 0.98 for s in shares.values()), (n, shares)


def test_bootstrap_over_recordings_is_too_narrow():
    "Why groups are drawn: the same intervals over recordings miss the truth far more often."
    truth, score, of = simulate_network(np.random.default_rng(1), 12, 40)
    width = {}
    for by, code in (("sensor", of), ("recording", np.arange(len(of)))):
        boot = Bootstrap(truth, groups_of(code, by))
        i = boot.intervals(boot.draws(score, 0.5))["auc"]
        width[by] = i.high - i.low
    assert width["sensor"] > 1.5 * width["recording"]


@each("n_groups", [3, 12, 300])
def test_figures_of_draws_are_those_of_the_recordings_drawn(n_groups):
    "Weighted counts against recordings that are really repeated; more than 256 groups take another way."
    rng = np.random.default_rng(0)
    truth, score, of = (
        rng.random(600) < 0.4,
        rng.integers(0, 30, 600) / 30,
        rng.permutation(np.arange(600) % n_groups),
    )
    boot = Bootstrap(truth, groups_of(of), n_draws=100, seed=3)
    draws = boot.draws(score, 0.5)
    for d in range(0, 100, 9):
        again = np.repeat(np.arange(600), boot.times[d, of].astype(int))
        for name, value in leak_metrics(truth[again], score[again], 0.5).items():
            assert draws[name][d] == pytest.approx(value, abs=1e-12, nan_ok=True)


def test_draws_are_the_same_for_the_same_seed():
    truth, score, of = simulate_network(np.random.default_rng(0), 8)
    a, b, c = (
        Bootstrap(truth, groups_of(of), n_draws=100, seed=s).draws(score, 0.5)["auc"] for s in (1, 1, 2)
    )
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_bootstrap_draws_with_one_class_are_ignored():
    truth = np.array([True] * 5 + [False] * 5)
    boot = Bootstrap(truth, groups_of(np.arange(10), "recording"), n_draws=2000, seed=0)
    draws = boot.draws(truth * 0.8, 0.5)
    one_class = (boot.times[:, :5].sum(1) == 0) | (boot.times[:, 5:].sum(1) == 0)
    assert one_class.any()
    assert np.array_equal(np.isnan(draws["auc"]), one_class)
    i = boot.intervals(draws)["auc"]
    assert (i.low, i.high) == (1, 1)
    assert "the same in all draws" in i.note


def test_a_figure_that_is_often_undefined_has_no_interval():
    draws = np.where(np.arange(1000) < 60, np.nan, 0.5 + np.arange(1000) / 5000)
    assert interval_from_draws(draws, 30).note == "the figure is undefined in 6% of the draws"
    assert interval_from_draws(draws[20:], 30).known


@each("n", range(1, MIN_GROUPS + 1))
def test_too_few_groups_give_a_sentence(n):
    truth, score, of = simulate_network(np.random.default_rng(0), n, 40)
    boot = Bootstrap(truth, groups_of(of))
    for name, i in boot.intervals(boot.draws(score, 0.5)).items():
        assert i.known == (n >= MIN_GROUPS), name
        assert i.known or (i.note.startswith(f"only {n} sensor") and str(i) == "no interval")


def test_intervals_count_only_groups_that_contribute_to_the_figure():
    "Twenty sensors, of which two heard leaks: nothing can be said of the leaks."
    of = np.repeat(np.arange(20), 10)
    truth = (of < 2) & (np.arange(200) % 2 == 0)
    boot = Bootstrap(truth, groups_of(of))
    found = boot.intervals(boot.draws(np.random.default_rng(0).random(200), 0.5))
    assert {n for n, i in found.items() if i.known} == {"accuracy", "specificity"}
    assert found["auc"].note == "only 2 sensors with a leak: an interval needs at least 5"


def test_too_few_draws_are_refused():
    with pytest.raises(UsageError, match="n_draws"):
        Bootstrap(np.ones(3, bool), groups_of([1, 2, 3]), n_draws=10)


def frame(**columns: list) -> pd.DataFrame:
    return pd.DataFrame(columns)


@each(
    ("table", "by", "code"),
    [
        (frame(sensor=["B", "A", "B"], start_time=["2024-03-01T23:00:00"] * 3), "sensor", [1, 0, 1]),
        (
            frame(
                sensor=["B", "", "B"],
                start_time=["2024-03-01T23:00:00", "2024-03-02T11:59:00", "2024-03-02T12:00:00"],
            ),
            "night",
            [0, 0, 1],
        ),
        (
            frame(
                sensor=["", "", ""],
                start_time=["", "", "x"],
                path=["L/a__t000.wav", "L/a__t005.wav", "N/b.wav"],
            ),
            "source",
            [1, 1, 0],
        ),
        (frame(sensor=["", ""], path=["L/a1.wav", "L/a2.wav"]), "recording", [0, 1]),
        (frame(label=["L", "N"]), "recording", [0, 1]),
    ],
)
def test_recordings_of_a_group_are_resampled_together(table, by, code):
    found = recording_groups(table)
    assert (found.by, found.code.tolist()) == (by, code)
    assert bool(found.note) == (by != "sensor")


def test_groups_that_are_asked_for():
    table = frame(path=["L/p1_a.wav", "L/p2_a.wav", "N/p1_b.wav"], sensor=["x", "y", "z"])
    assert recording_groups(table, r"re:(p\d)").code.tolist() == [0, 1, 0]
    assert recording_groups(table, ["u", "u", "v"]).code.tolist() == [0, 0, 1]
    with pytest.raises(UsageError, match="column to group by"):
        recording_groups(table, "pipe")


def test_recordings_without_a_group_are_reported():
    table = frame(path=["L/p1_a.wav", "L/b.wav", "N/c.wav"])
    found = recording_groups(table, r"re:p\d")
    assert (found.code.tolist(), found.names) == ([1, 0, 0], ("(none)", "p1"))
    assert found.note == "2 of 3 recordings have no match of the pattern and form one group"
    assert cautions(np.array([True, False, True]), found)[-1].startswith("2 of 3 recordings have no match")
    assert recording_groups(table, ["u", "u", "v"]).note == ""


def test_names_of_pieces():
    names = [
        "x/a__t000.wav",
        "a_part2.WAV",
        "a-clip_07.wav",
        "A_seg3.wav",
        "leak01.wav",
        "H1~000123~20240301_120000~8.wav",
        "bt12.wav",
    ]
    assert source_names(names).tolist() == ["a", "a", "a", "A", "", "", ""]
    table = pd.DataFrame({"path": names[:3], "sensor": ["S1", "S1", "S2"]})
    assert source_of_pieces(table).tolist() == ["S1/a", "S1/a", "S2/a"]
    assert source_of_pieces(table.drop(columns="sensor")).tolist() == ["a", "a", "a"]


def test_draws_are_in_memory_once():
    groups = groups_of(np.arange(5000))
    tracemalloc.start()
    boot = Bootstrap(np.arange(5000) % 2 == 0, groups, n_draws=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * boot.times.nbytes
    assert (boot.times.sum(1) == 5000).all()


# ---- the verdict -----------------------------------------------------------------------------------------------------


def ways(
    gaps: dict[str, float], n_sensors: int = 12, seed: int = 0, n_draws: int = 2000
) -> tuple[Bootstrap, dict[str, Any]]:
    "Detectors that are as good as they are told to be, on the same recordings."
    rng = np.random.default_rng(seed)
    of = np.repeat(np.arange(n_sensors), 30)
    truth, shift = rng.random(len(of)) < 0.5, rng.normal(0, 0.4, n_sensors)[of]
    boot = Bootstrap(truth, groups_of(of), n_draws=n_draws)
    scores = {n: gap * truth + shift + rng.normal(0, 1, len(of)) for n, gap in gaps.items()}
    return boot, {n: score_model(boot, s, name=n, title=n, threshold=gaps[n] / 2) for n, s in scores.items()}


@each(
    ("gaps", "beats", "message"),
    [
        ({"cnn": 3, "level": 1, "mels": 1.5}, True, "The detector beats all baselines in AUC"),
        ({"cnn": 1.5, "level": 1, "mels": 3}, False, "worse than mels"),
        ({"cnn": 1.5, "level": 0.3, "mels": 1.5}, False, "does not beat mels"),
        ({"cnn": 3}, None, "The detector was not compared with a baseline"),
        (
            {"cnn": 50, "level": 50, "mels": 1},
            False,
            f"The detector is as good as level here: they reach AUC 1.000, so {HARDER}",
        ),
        ({"cnn": 50, "mels": 1}, True, "beats all"),
    ],
)
def test_verdict_is_better_worse_or_undecided(gaps, beats, message):
    boot, found = ways(gaps)
    verdict = give_verdict(boot, found.pop("cnn"), list(found.values()))
    assert verdict.beats is beats
    assert message in verdict.text
    assert (beats is False) == verdict.text.startswith(
        ("The detector is not useful", "The detector is as good")
    )


def test_with_few_sensors_the_best_detector_beats_nothing():
    boot, found = ways({"cnn": 9, "level": 0, "mels": 0}, n_sensors=4)
    verdict = give_verdict(boot, found.pop("cnn"), list(found.values()))
    assert verdict.beats is None
    assert "only 4 sensors" in verdict.text


@pytest.mark.slow
def test_equally_good_detectors_are_rarely_called_better():
    "Two detectors that are equally good: each is called better in about 2.5 % of the sets."
    called = 0
    for seed in range(80):
        boot, found = ways({"a": 1.5, "b": 1.5}, seed=seed, n_draws=500)
        called += bool(give_verdict(boot, found["a"], [found["b"]]).beats)
    assert called <= 7


def test_a_constant_detector_is_useless():
    boot, found = ways({"level": 1})
    constant = score_model(boot, np.full(len(boot.truth), 0.5), name="cnn", title="cnn")
    assert constant.figures["auc"] == 0.5
    assert constant.intervals["auc"].low == constant.intervals["auc"].high == 0.5
    assert constant.figures["specificity"] == 0
    verdict = give_verdict(boot, constant, list(found.values()))
    assert verdict.beats is False
    again = give_verdict(boot, constant, [constant])
    assert again.beats is False


def test_one_class_gives_no_verdict():
    boot = Bootstrap(np.ones(40, bool), groups_of(np.arange(40) // 4))
    a, b = (
        score_model(boot, np.random.default_rng(k).random(40), name=n, title=n) for k, n in enumerate("ab")
    )
    verdict = give_verdict(boot, a, [b])
    assert verdict.beats is None
    assert "every recording is a leak" in verdict.text
    assert a.summary["figures"]["auc"] == {
        "value": None,
        "low": None,
        "high": None,
        "note": "every recording is a leak",
    }
    json.dumps(a.summary, allow_nan=False)


@each(
    ("truth", "code", "message"),
    [
        ([], [], "The test set is empty, so the evaluation proves nothing"),
        ([1, 0], [0, 1], "only 1 recording with a leak"),
        ([1] * 20, [*range(20)], "The test set has no recording with no leak"),
        ([1] * 20 + [0] * 6, [*range(20), *[20] * 6], "All recordings with no leak come from 1 sensor"),
        ([1, 0] * 20, [0] * 40, "All recordings come from 1 sensor, so the evaluation proves nothing"),
        ([1, 0] * 20, [k // 10 for k in range(40)], "only 4 sensors"),
        ([1] * 20 + [0] * 20, [k // 2 for k in range(40)], "has one label only"),
        (
            [1, 0] * 30,
            [0] * 40 + [*range(1, 6)] * 4,
            "One of 6 sensors has 67% of the recordings with a leak",
        ),
    ],
)
def test_cautions_for_insufficient_data_sets(truth, code, message):
    found = cautions(np.array(truth, bool), groups_of(np.array(code, int)))
    assert any(message in c for c in found), found


def test_no_cautions_for_a_sufficient_data_set():
    truth, _, of = simulate_network(np.random.default_rng(0), 12, 20)
    assert cautions(truth, groups_of(of)) == ()


# ---- the control -----------------------------------------------------------------------------------------------------


@each("gap", [0.0, 2.0])
def test_interval_of_permuted_labels_contains_auc_of_one_half(gap):
    truth, score, of = simulate_network(np.random.default_rng(2), 12, 20, gap)
    control = permutation_test(truth, score, groups_of(of))
    assert control.holds
    assert control.n_with_interval == control.n_permutations == 100
    assert control.mean_auc == pytest.approx(0.5, abs=0.02)
    assert control.auc_range[0] < 0.5 < control.auc_range[1]
    assert (control.n_at_least == 0) == (gap == 2.0)
    assert "contains 0.5 in" in str(control)


def sensors_only(
    rng: np.random.Generator,
    n_sensors: int,
    labels: str,
    most: int | None,  # recordings of a sensor are fewer than this; None: 20 of each
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    "Truth, score and sensor where scores hang on the sensor, and labels too, and the one knows nothing of the other."
    n = np.full(n_sensors, 20) if most is None else rng.integers(2, most, n_sensors)
    of = np.repeat(np.arange(n_sensors), n)
    share = (
        rng.permutation(np.arange(n_sensors) % 2).astype(float)
        if labels == "one each"
        else rng.beta(0.5, 0.5, n_sensors)
    )
    return rng.random(len(of)) < share[of], rng.normal(0, 1, n_sensors)[of] + rng.normal(0, 0.7, len(of)), of


def permute_recordings(truth: np.ndarray, score: np.ndarray, n_permutations: int) -> np.ndarray:
    "AUCs with labels that are dealt out over single recordings."
    rng = np.random.default_rng(0)
    return np.array([roc(rng.permutation(truth), score).auc for _ in range(n_permutations)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_sensors", "labels", "most"),
    [
        (12, "one each", None),
        pytest.param(12, "one each", 24, marks=pytest.mark.long),
        pytest.param(20, "mixed", 24, marks=pytest.mark.long),
        pytest.param(12, "one each", 60, marks=pytest.mark.long),
        pytest.param(20, "mixed", 60, marks=pytest.mark.long),
    ],
)
def test_permutation_test_keeps_its_error_rate_under_chance(n_sensors, labels, most):
    "Detectors that know sensors and no leaks: how often the control says that chance would hardly do as well, and whether intervals hold a half."
    called, called_by_recordings, held, areas, spreads, by_recordings = 0, 0, [], [], [], []
    sets = [sensors_only(np.random.default_rng(seed), n_sensors, labels, most) for seed in range(60)]
    for seed, (truth, score, of) in enumerate(sets):
        control = permutation_test(truth, score, groups_of(of), n_permutations=40, seed=seed)
        plain = permute_recordings(truth, score, 40)
        own = roc(truth, score).auc
        called += control.n_at_least <= 2
        called_by_recordings += int((plain >= own).sum()) <= 2
        held.append(control.n_covering / control.n_with_interval)
        areas.append(own)
        spreads.append(control.auc_range[1] - control.auc_range[0])
        by_recordings.append(np.ptp(np.quantile(plain, (0.025, 0.975))))
    assert called_by_recordings >= 15, (
        "dealt over recordings, a quarter of them would be called good and more"
    )
    assert called <= 9, "one in twenty, as far as 60 sets can tell"
    assert 0.9 <= np.mean(held) <= 0.99
    apart = np.ptp(np.quantile(areas, (0.025, 0.975)))  # of AUCs that are chance
    assert np.mean(spreads) == pytest.approx(apart, rel=0.3)
    assert np.mean(by_recordings) < 0.5 * apart


def test_permuted_labels_keep_group_sizes_and_purity():
    rng = np.random.default_rng(0)
    of = rng.permutation(np.repeat(np.arange(9), [1, 2, 3, 5, 8, 13, 21, 34, 55]))
    pure = np.isin(of, [0, 3, 5, 8])
    seen = set()
    for _ in range(50):
        dealt = permute_group_labels(pure, groups_of(of), rng)
        assert all(len(np.unique(dealt[of == k])) == 1 for k in range(9)), (
            "a sensor with one label keeps one label"
        )
        holds = tuple(int(dealt[of == k][0]) for k in range(9))
        assert sum(holds) == 4
        seen.add(holds)
    assert len(seen) > 20, "another sensor's label"
    even = np.repeat(np.arange(6), 10)
    mixed = np.arange(60) % 10 < np.repeat([0, 1, 3, 5, 9, 10], 10)
    n_leaks = [
        np.bincount(even, weights=permute_group_labels(mixed, groups_of(even), rng)) for _ in range(50)
    ]
    assert all(sorted(n) == [0, 1, 3, 5, 9, 10] for n in n_leaks)
    assert len({tuple(n) for n in n_leaks}) > 30
    places = np.array([permute_group_labels(mixed, groups_of(even), rng) for _ in range(2000)])
    assert np.allclose(places.mean(0), 28 / 60, atol=0.06), "each recording is a leak as often as any other"


@each("truth", [[1] + [0] * 99, [0] + [1] * 99])
def test_permutation_keeps_both_classes(truth):
    "One recording of a class, in a large group; small groups get a hundredth of it."
    of = np.r_[np.zeros(70, int), 1 + np.arange(30)]
    for seed in range(200):
        dealt = permute_group_labels(np.array(truth, bool), groups_of(of), np.random.default_rng(seed))
        assert 0 < dealt.sum() < 100


def test_permutation_by_recording_without_groups():
    truth = np.arange(60) < 20
    dealt = np.array(
        [
            permute_group_labels(truth, groups_of(np.arange(60), "recording"), np.random.default_rng(seed))
            for seed in range(500)
        ]
    )
    assert (dealt.sum(1) == 20).all()
    assert np.allclose(dealt.mean(0), 1 / 3, atol=0.1)
    control = permutation_test(
        truth, np.random.default_rng(0).random(60), groups_of(np.arange(60), "recording"), n_permutations=20
    )
    assert str(control).startswith("Labels permuted: mean AUC")


def test_permutation_test_text_names_the_permuted_units():
    truth, score, of = simulate_network(np.random.default_rng(2), 12, 20)
    assert str(permutation_test(truth, score, groups_of(of))).startswith(
        "Labels permuted by whole groups (12 sensors): mean AUC"
    )


def test_permutation_test_without_an_interval_reports_the_reason():
    assert permutation_test(np.ones(9, bool), np.arange(9) / 9, groups_of(range(9))).holds is None
    few = permutation_test(
        np.arange(40) % 2 == 0, np.random.default_rng(0).random(40), groups_of(np.arange(40) // 20)
    )
    assert few.holds is None
    assert "no interval: only 2 sensors" in str(few)


@pytest.mark.slow
def test_baselines_trained_on_permuted_labels_have_auc_of_one_half(parts):
    "A single one leans one way or the other; the mean over many is 0.5."
    rng = np.random.default_rng(0)
    x, y, test, truth = (
        baseline_features(parts["training"])["mean_mels"],
        parts["training"].is_leak,
        baseline_features(parts["testing"])["mean_mels"],
        parts["testing"].is_leak,
    )
    areas = [
        roc_auc_score(truth, fit_logistic(x, rng.permutation(y)).predict_proba(test)[:, 1]) for _ in range(40)
    ]
    assert np.std(areas) > 0.02
    assert abs(np.mean(areas) - 0.5) < 4 * np.std(areas) / np.sqrt(40)


# ---- baselines -------------------------------------------------------------------------------------------------------


def test_the_logistic_regression_is_at_the_minimum_of_its_loss():
    "Half the squared weights of standardised features and the log loss, classes of equal weight; the bias is free."
    rng = np.random.default_rng(0)
    x = rng.normal(-40, 8, (300, 12)) @ rng.normal(0, 1, (12, 12))
    y = rng.random(300) < 1 / (1 + np.exp(-(x[:, 0] - x[:, 0].mean()) / 20))
    line = fit_logistic(x, y)
    p = line.predict_proba(x)[:, 1]
    z = (x - x.mean(0)) / x.std(0)
    weight = np.where(y, len(y) / y.sum(), len(y) / (~y).sum()) / 2
    np.testing.assert_allclose((weight * (p - y)) @ z + line[-1].coef_[0], 0, atol=1e-5)
    assert abs((weight * (p - y)).sum()) < 1e-5


def test_logistic_regression_is_the_same_each_time_and_survives_odd_features():
    rng = np.random.default_rng(1)
    x, y = (
        np.column_stack([rng.normal(0, 1, 50), np.full(50, -200.0), np.arange(50) * 1e-30]),
        np.arange(50) >= 25,
    )
    a, b = fit_logistic(x, y), fit_logistic(x, y)
    assert np.array_equal(a[-1].coef_, b[-1].coef_)
    assert a[-1].coef_[0, 1] == 0
    apart = fit_logistic(np.where(y, 1.0, -1.0)[:, None], y)
    score = apart.predict_proba(np.where(y, 1.0, -1.0)[:, None])[:, 1]
    assert leak_metrics(y, score)["auc"] == 1
    wide = fit_logistic(rng.normal(0, 1, (20, 200)), np.arange(20) % 2 == 0)
    assert np.isfinite(wide[-1].coef_).all()


@each(("x", "y"), [(np.ones((3, 1)), [1, 1, 1]), (np.full((2, 1), np.nan), [1, 0])])
def test_logistic_fit_refuses_unusable_input(x, y):
    with pytest.raises(DataError):
        fit_logistic(x, np.array(y, bool))


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("evaluate")
    lm.write_demo(folder / "wavs", n_files=360, seed=1)
    return [r.path for r in lm.build_all(folder / "wavs", out_dir=folder, progress="none", spec=None)]


@pytest.fixture(scope="module")
def split(sets) -> Split:
    return group_split(sets, "sensor", shares={"training": 0.4, "validation": 0.2, "testing": 0.4})


@pytest.fixture(scope="module")
def parts(sets, split):
    with lm.open_dataset(sets[0]) as ds:
        task = make_task(ds.class_names)
    found = {
        name: Segments(sets, level="recording", rows=rows, task=task, preload_to_ram=False)
        for name, rows in split.parts.items()
    }
    yield found
    for ds in found.values():  # type: ignore[assignment]
        ds.close()


@pytest.mark.slow
def test_baseline_features_equal_mean_mels_levels_and_band_statistics(parts):
    ds = parts["testing"]
    rows = [ds.batch([i]).x[0].double().numpy() for i in range(0, len(ds), 17)]
    features = baseline_features(ds)
    np.testing.assert_allclose(features["mean_mels"][::17], [r.mean((0, 1, 3)) for r in rows], atol=1e-9)
    np.testing.assert_array_equal(features["trees"], spectral_features(ds).whole)
    table = pd.concat([s.files for s in ds.sources], ignore_index=True).iloc[ds.rows]
    level = levels(ds)
    assert level is not None
    np.testing.assert_array_equal(level[:, 0], table["rms_db"])
    assert np.array_equal(ds.is_leak, table["label"] == "LEAK")


@pytest.mark.slow
def test_baselines_choose_on_validation_only(parts):
    boots = {name: Bootstrap(ds.is_leak, groups_of(np.arange(len(ds)))) for name, ds in parts.items()}

    def scored(name: str, *validation: Segments) -> dict[str, Any]:
        return score_baselines(boots[name], parts[name], parts["training"], *validation)

    own = scored("validation")
    for (name, a), b in zip(
        scored("testing", parts["validation"]).items(), scored("testing").values(), strict=True
    ):
        assert np.array_equal(a.score, b.score)
        assert (a.threshold_from, b.threshold_from, b.threshold) == ("validation", UNCHOSEN, 0.5)
        score, truth = own[name].score, parts["validation"].is_leak
        assert a.threshold == best_threshold(truth, score)
    assert [j.title for j in own.values()] == [
        "Level only",
        "Mean mels, logistic",
        "Trees on band statistics",
    ]


# ---- all of it -------------------------------------------------------------------------------------------------------


def detector(sets: list[Path], **more: Any) -> Detector:
    with lm.open_dataset(sets[0]) as ds:
        spec, task = ds.spec, make_task(ds.class_names)
    torch.manual_seed(0)
    return Detector(
        LeakNet(NetSettings(channels=(4, 8)), np.full(64, -60.0), np.full(64, 12.0)), task, spec, **more
    )


def informed_detectors(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    "Replace scores by the truth with noise."

    def scores(detector: Detector, ds: Segments, **how: Any) -> np.ndarray:
        rng = np.random.default_rng(5)
        logit = (
            4.0 * (ds.is_leak - 0.5)[:, None]
            + rng.normal(0, noise, (len(ds.rows), 1))
            + rng.normal(0, 0.5, (len(ds.rows), ds.row_shape[0]))
        )
        if how["progress"] is not None:
            how["progress"](len(ds.rows))
        return (1 / (1 + np.exp(-logit))).astype(np.float32)

    monkeypatch.setattr(evaluation, "score_rows", scores)


def test_untrained_detector_does_not_beat_the_baselines(sets, split, tmp_path):
    model = detector(sets).save(tmp_path / "model.pt")
    e = lm.evaluate(model, sets, split=split, progress="none", n_draws=500)
    assert isinstance(e, lm.Evaluation)
    assert e.beats is False
    assert "The detector is not useful" in e.report()
    assert not e.leaky
    assert e.cautions == ()
    assert len(e.table) == len(split.parts["testing"]) == len(e.segment_scores)
    assert set(e.table["sensor"]) <= set(e.groups.names)
    assert e.detector.threshold_from == UNCHOSEN
    assert {n: j.title for n, j in e.votes.items()} == {
        "mean": "Mean of segments",
        "long_vote": "Half of segments",
    }
    np.testing.assert_allclose(e.detector.score, e.segment_scores.mean(1, dtype=np.float64), atol=1e-6)
    np.testing.assert_array_equal(e.votes["long_vote"].score, np.sort(e.segment_scores, axis=1)[:, 20])
    assert 0 < len(e.worst) <= 10
    assert all(w.is_leak != (w.score >= w.threshold) for w in e.worst)
    assert e.summary["files_per_s"] > 0


def test_perfect_detector_beats_all_baselines(sets, split, monkeypatch):
    informed_detectors(monkeypatch, 0.5)
    e = lm.evaluate(detector(sets), sets, split=split, progress="none", n_draws=500)
    assert e.beats is True
    assert "The detector beats all baselines" in e.report()
    assert "beats the baselines" in repr(e)
    assert e.control.holds
    assert e.control.n_at_least == 0
    assert e.summary["control"]["between"] == e.control.between != ""
    assert all(d["auc"].is_better for own in e.differences.values() for d in own.values())


def test_scores_do_not_depend_on_batches(sets):
    scores = [
        lm.evaluate(
            detector(sets), sets[2], progress="none", n_draws=100, files_per_batch=n, device="cpu"
        ).segment_scores
        for n in (1, 7, 500)
    ]
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-6)
    np.testing.assert_allclose(scores[0], scores[2], atol=2e-6)


def test_thresholds_are_never_chosen_on_test_recordings(sets, split, monkeypatch):
    informed_detectors(monkeypatch, 0.5)
    d, chosen = detector(sets), detector(sets, threshold_from="validation (f1)")
    chosen.thresholds["mean"] = 0.875
    alone = lm.evaluate(d, sets[2], progress="none", n_draws=100)
    assert {j.threshold for j in alone.votes.values()} == {0.5}
    assert alone.detector.threshold_from == UNCHOSEN
    assert lm.evaluate(chosen, sets, split=split, progress="none", n_draws=100).detector.threshold == 0.875
    assert "The detector was not compared with a baseline" in alone.report()
    assert any("was not checked" in c for c in alone.cautions)


@pytest.mark.slow
def test_evaluation_summary_report_table_and_files(sets, split, tmp_path):
    e = lm.evaluate(
        detector(sets), sets, split=split, progress="none", n_draws=200, votes=("long_vote", "any_long")
    )
    summary = json.loads(json.dumps(e.summary, allow_nan=False))
    assert summary["recordings"] == len(e.table)
    assert set(summary["votes"]) == {"mean", "long_vote", "any_long"}
    assert set(summary["votes"]["mean"]["figures"]) == set(FIGURES)
    assert summary["differences"]["mean"]["level"]["auc"]["better"] is False
    assert max(map(len, e.report().splitlines())) <= 100
    figures = e.plots()
    assert list(figures) == ["roc", "confusion", "reliability", "groups", "errors"]
    assert all(fig.layout.title.text.replace("<br>", " ") for fig in figures.values())
    assert max(len(t.x) for fig in figures.values() for t in fig.data) < 2000
    written = e.save(tmp_path / "out")
    assert json.loads(written["summary.json"].read_text()) == summary
    assert len(pd.read_csv(written["recordings.csv"])) == len(e.table)
    page = written["evaluation.html"].read_text()
    assert page.count("Level only") > 2
    assert "http-equiv" not in page
    assert page.index("false alarms") < page.index("</h1>") or e.leaky
    assert page.index("Misclassified recordings") < page.index("Comparison with baselines")
    assert str(tmp_path) not in page
    assert set(e.save(tmp_path / "small", plots=False)) == {"summary.json", "report.txt", "recordings.csv"}
    (tmp_path / "file").write_text("")
    with raises("not-a-folder", OutputError):
        e.save(tmp_path / "file")
    before = {name: path.stat().st_ino for name, path in e.save(tmp_path / "small", plots=False).items()}
    assert all(
        path.stat().st_ino != before[name] for name, path in e.save(tmp_path / "small", plots=False).items()
    ), "its own are replaced"
    for name, text in (
        ("summary.json", '{"best_epoch": 3}'),
        ("summary.json", "{"),
        ("report.txt", "My report"),
        ("report.txt", "My Evaluation of pipes"),
        ("recordings.csv", "a,b"),
        ("recordings.csv", "a,b\ncalled_leak,1"),
    ):
        (here := tmp_path / f"{name}{len(text)}").mkdir()
        (here / name).write_text(text)
        with raises("other-file-in-the-way", OutputError, path=here / name):
            e.save(here, plots=False)
        assert [p.read_text() for p in here.iterdir()] == [text]


@pytest.mark.slow
def test_test_set_of_one_label_is_matched_by_name(sets, tmp_path):
    "A test set that was built alone has numbers of its own for its labels: they are told by name."
    for split, label, name in (("TESTING", "LEAK", "leak"), ("TESTING", "NOLEAK", "NOLEAK")):
        for wav in sorted((sets[0].parent / "wavs" / split / label).glob("*.wav"))[:3]:
            (tmp_path / label / name).mkdir(parents=True, exist_ok=True)
            os.link(wav, tmp_path / label / name / wav.name)
        alone = lm.build(tmp_path / label, out=tmp_path / f"{label}.h5", progress="none", check=0).path
        e = lm.evaluate(detector(sets), alone, votes="any_long", progress="none", n_draws=100)
        assert set(e.votes) == {"mean", "any_long"}, "a rule may be given alone, too"
        assert e.table["leak"].tolist() == [label == "LEAK"] * 3
        assert any("The test set has no recording with" in c for c in e.cautions)
        with pytest.warns(
            SplitWarning,
            match=f"{'NOLEAK' if label == 'LEAK' else 'LEAK'}: the label has no recording in testing",
        ):
            beside = lm.evaluate(
                detector(sets), alone, training=sets[0], progress="none", n_draws=100, allow_leaky_split=True
            )
        assert set(beside.baselines) == {"level", "mean_mels", "trees"}
        rest = "specificity" if label == "LEAK" else "sensitivity"
        for text in (
            f"AUC, {rest} and a comparison with baselines need both labels",
            "The detector cannot be compared with the baselines",
        ):
            assert text in " ".join(beside.report().split())
        known = {n for n, v in beside.detector.figures.items() if not np.isnan(v)}
        assert {"auc", "balanced_accuracy", rest}.isdisjoint(known)
        assert {"accuracy", "sensitivity" if label == "LEAK" else "specificity"} <= known
        np.testing.assert_array_equal(
            beside.segment_scores,
            lm.evaluate(detector(sets), alone, progress="none", n_draws=100).segment_scores,
        )
        assert beside.save(tmp_path / f"{label} out")["evaluation.html"].exists()


def test_without_both_labels_no_figure_compares(sets):
    boot = Bootstrap(np.ones(40, bool), groups_of(np.arange(40) // 4))
    best, worst = (
        score_model(boot, np.full(40, s), name=n, title=n) for n, s in (("best", 0.9), ("worst", 0.1))
    )
    for figure in FIGURES:
        verdict = give_verdict(boot, best, [worst], figure)
        assert verdict.beats is None, figure
        assert "a comparison needs both labels" in verdict.text


def test_figure_title_names_the_baselines_that_were_not_beaten():
    "The baseline with the highest AUC may be one that is beaten."
    boot, found = ways({"cnn": 3, "level": 1, "mels": 1.5})
    own = found.pop("cnn")
    better = Difference("auc", 0.3, Interval(0.2, 0.4))
    same = Difference("auc", 0.1, Interval(-0.1, 0.3))

    def title(verdict: Verdict | None) -> str:
        fig = roc_figure(boot.truth, [own], list(found.values()), verdict=verdict)
        return fig.layout.title.text.replace("<br>", " ")

    against = (("level", same), ("mels", better))
    assert title(Verdict(False, "", "auc", against)).endswith("not shown to be better than level")
    assert title(Verdict(True, "", "auc", against)).endswith("better than all baselines")
    assert title(Verdict(None, "", "auc", against)).endswith("not possible")
    # where both reach the most, in every form in which the two are compared
    boot, found = ways({"cnn": 50, "level": 50})
    verdict = give_verdict(boot, found["cnn"], [found["level"]])
    assert title(verdict).endswith("as good as level")
    assert verdict.against[0][1].answer == f"as good as it here, {HARDER}"
    record = evaluation_record("test set", "set", boot.truth, boot.groups, found["cnn"], verdict)
    assert str(record).endswith(f"as good as a baseline, {HARDER}")
    assert evaluation_result([record]) == "as good as a baseline (test set)"
    assert "not compared" in title(None)


@pytest.mark.slow
def test_leaky_split_stamp_is_on_all_outputs(sets, tmp_path):
    with pytest.warns(LeakySplitWarning):
        e = lm.evaluate(detector(sets), sets[1], training=sets, progress="none", n_draws=200)
    assert e.leaky
    assert e.report().splitlines()[2].startswith("LEAKY SPLIT")
    assert "LEAKY SPLIT" in repr(e)
    assert "LEAKY SPLIT" in e._repr_html_()
    assert e.summary["leaky_split"] is True
    assert all(
        fig.layout.title.subtitle.text.replace("<br>", " ").startswith("LEAKY SPLIT")
        for fig in e.plots().values()
    )
    rows = pd.read_csv(e.save(tmp_path, plots=False)["recordings.csv"])
    assert rows["stamp"].str.startswith("LEAKY SPLIT").all()


@pytest.mark.slow
def test_leaky_split_stamp_of_the_training_is_kept(sets, split):
    d = detector(
        sets, record={"split": {"stamp": "LEAKY SPLIT: scores say more than they should. 3 sensors"}}
    )
    e = lm.evaluate(d, sets, split=split, progress="none", n_draws=100)
    assert e.stamps == ("In training: LEAKY SPLIT: scores say more than they should. 3 sensors",)
    assert not lm.evaluate(
        detector(sets, record={"split": None}), sets, split=split, progress="none", n_draws=100
    ).leaky


def clips(folder: Path, names: dict[str, int]) -> Path:
    for name, seed in names.items():
        path = folder / "wavs" / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_wav(
            path,
            (np.random.default_rng(seed).normal(0, 0.1, 4096).clip(-1, 1) * 32_000).astype(np.int16),
            4096,
        )
    return lm.build(
        folder / "wavs", out=folder / "x.h5", progress="none", check=0, spec=lm.MelSpec(duration_s=1.0)
    ).path


@pytest.mark.slow
def test_one_recording_per_class_gives_no_verdict(tmp_path):
    "Pieces of one recording of each class, as people who start out have them."
    made = {
        part: clips(
            tmp_path / part,
            {
                f"{label}/{label.lower()}_rec__t{k:03}": 100 * k + 10 * i + len(part)
                for i, label in enumerate(("LEAK", "NO"))
                for k in range(a, b)
            },
        )
        for part, (a, b) in {"training": (0, 12), "testing": (12, 20)}.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SplitWarning)
        e = lm.evaluate(
            detector([made["testing"]]),
            made["testing"],
            training=made["training"],
            progress="none",
            n_draws=100,
        )
    assert e.groups.by == "source"
    assert e.beats is None
    assert any("the evaluation proves nothing" in c for c in e.cautions)
    assert any("Pieces of one recording" in s for s in e.stamps)
    assert "not comparable" in repr(e)


def test_pieces_of_five_real_recordings_give_no_verdict(tmp_path):
    "One recording without a leak, cut into pieces: it runs, and says that nothing follows."
    where = os.environ.get("LEAKMEL_REAL_WAVS")
    if not where:
        pytest.skip("LEAKMEL_REAL_WAVS is not set")
    spec = lm.MelSpec(sample_rate=8000, duration_s=5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SplitWarning)
        made = lm.build(
            Path(where) / "clips_5s", out=tmp_path / "x.h5", spec=spec, progress="none", check=0
        ).path
        d = Detector(
            LeakNet(NetSettings(channels=(4,), width=spec.row_shape[1] * spec.row_shape[3])),
            make_task(["leak", "no_leak"], "leak"),
            spec,
        )
        e = lm.evaluate(d, made, progress="none", n_draws=100)
        for group in ("sensor", "path"):  # pieces of one recording are never in two folds
            with pytest.raises(DataError) as refused:
                lm.cross_validate(made, group=group, leak_label="leak", progress="none")
            assert refused.value.code == "label-in-one-part"
            assert "5 groups, 1 with the rarest label" in str(refused.value)
    assert e.groups.by == "source"
    assert len(e.groups) == 5
    assert e.beats is None
    assert any(
        c.startswith("All recordings with no leak come from 1 source recording") and "proves nothing" in c
        for c in e.cautions
    )
    assert not any(
        i.known for i in (e.detector.intervals[f] for f in ("auc", "specificity", "balanced_accuracy"))
    )


@pytest.mark.slow
def test_files_of_the_earlier_system(tmp_path):
    "Neither names nor levels: each recording stands alone, mean mels stand for the level."
    rng = np.random.default_rng(0)
    for name, n in (("a", 30), ("b", 20)):
        y = np.arange(n) % 2
        rows = rng.normal(-40, 3, (n, 4, 2, 64, 1)) + 4 * y[:, None, None, None, None]
        with h5py.File(tmp_path / name, "w") as f:
            f["labels"], f["segments_mel"] = y.astype(np.int16), rows.astype(np.float16)
            f.attrs["config_json"], f.attrs["labels_json"], f.attrs["label2id_json"] = (
                "{}",
                '["NO", "LEAK"]',
                '{"NO": 0, "LEAK": 1}',
            )
    d = Detector(LeakNet(NetSettings(channels=(4,))), make_task(["NO", "LEAK"]), None)
    e = lm.evaluate(d, tmp_path / "b", training=tmp_path / "a", legacy=True, progress="none", n_draws=200)
    assert e.groups.by == "recording"
    assert e.baselines["level"].figures["auc"] == 1
    assert e.beats is False
    assert len(e.plots()["errors"].data) == 2 * len(e.worst) > 0
    assert "each recording is a group" in e.report()


@each(
    ("options", "code"),
    [
        ({"votes": "median"}, "unknown-choice"),
        ({"votes": ("median",)}, "unknown-choice"),
        ({"metric": "loss"}, "unknown-choice"),
        ({"part": "training", "training": "x"}, "given-twice"),
    ],
)
def test_options_that_do_not_exist_are_refused(sets, options, code):
    with raises(code, UsageError):
        lm.evaluate(detector(sets), sets[2], progress="none", **options)


@each(
    ("options", "error", "message"),
    [
        ({"files_per_batch": 0}, UsageError, "files_per_batch must be a whole number of at least 1"),
        ({"device": "tpu9x"}, UsageError, "no such device"),
    ],
)
def test_evaluate_refuses_invalid_arguments(sets, options, error, message):
    with pytest.raises(error, match=message):
        lm.evaluate(detector(sets), sets[2], progress="none", **options)


def test_splits_that_do_not_fit(sets, split):
    with raises("given-twice", UsageError):
        lm.evaluate(detector(sets), sets, split=split, training=sets[0], progress="none")
    with raises("other-split", UsageError):
        lm.evaluate(detector(sets), sets[2], split=split, progress="none")
    with raises("no-such-part", UsageError, found="'exam'"):
        lm.evaluate(detector(sets), sets, split=split, part="exam", progress="none")


def test_data_sets_that_were_open_stay_open(sets, split):
    opened = [lm.open_dataset(p) for p in sets]
    lm.evaluate(detector(sets), opened, split=split, progress="none", n_draws=100)
    assert all(len(ds) and ds[0][0].shape for ds in opened)
    for ds in opened:
        ds.close()
