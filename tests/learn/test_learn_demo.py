"From a synthetic network to an evaluation on held-out sensors: a detector beats the baselines, or its verdict says that it does not."

from pathlib import Path

import pytest

import leakmel as lm
from leakmel.learn.model.settings import TrainSettings

SMALL = TrainSettings(
    channels=(24, 48, 64), epochs=8, epoch_share=0.04, learning_rate=0.003
)  # a network of 22,000 parameters: half a minute on one core


pytestmark = pytest.mark.usefixtures("one_thread")


def evaluated(root: Path, n_files: int, settings: TrainSettings, seed: int = 0) -> lm.Evaluation:
    "Write a synthetic network, build its data sets, train a detector and evaluate it on the test set."
    lm.write_demo(root / "demo", n_files=n_files, seed=seed)
    parts = {
        r.path.name.split("_")[0].lower(): r.path
        for r in lm.build_all(root / "demo", out_dir=root / "sets", progress="none")
    }
    result = lm.train(
        parts["training"],
        parts["validation"],
        out=root / "run",
        settings=settings,
        device="cpu",
        progress=False,
    )
    return lm.evaluate(
        result.detector,
        parts["testing"],
        training=parts["training"],
        validation=parts["validation"],
        progress="none",
    )


def assert_honest(e: lm.Evaluation) -> None:
    "No sensor on both sides, no skill with permuted labels, and a verdict that follows from the intervals."
    assert not e.stamps, "a sensor on both sides"
    assert e.control.holds
    compared = dict(e.verdict.against)
    beaten = {
        name: d["auc"].interval.low > 0
        for name, d in e.differences[e.vote].items()
        if e.baselines[name].title in compared
    }
    assert len(e.differences[e.vote]) == 3
    assert len(beaten) == len(compared) >= 2, "a spectral detector is not compared with trees"
    assert e.beats == all(beaten.values())


@pytest.mark.slow
def test_small_detector_beats_the_level_baseline_on_a_small_synthetic_set(tmp_path):
    e = evaluated(tmp_path, 1200, SMALL)
    assert_honest(e)
    auc, level = e.detector.figures["auc"], next(iter(e.baselines.values())).figures["auc"]
    assert auc > 0.93
    assert auc > level + 0.1


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_default_training_on_the_demo_set_is_worse_than_no_baseline(tmp_path, seed):
    """With the default settings of `leakmel demo`, `leakmel build` and `leakmel train`.

    Ten test sensors do not carry more: trees reach an AUC of 0.999 with seed 0, and with seed 2 the interval of the difference from
    mean mels is -0.014 to +0.074. The test below has the sensors that it takes to show that all baselines are beaten.
    """
    e = evaluated(tmp_path, 1200, TrainSettings(), seed)
    assert_honest(e)
    level, *others = [d["auc"] for d in e.differences[e.vote].values()]
    assert level.interval.low > 0.1, e.report()
    assert all(d.value >= 0 and d.interval.low > -0.02 for d in others), e.report()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_larger_synthetic_sets_show_that_all_baselines_are_beaten(tmp_path, seed):
    "Fifty held-out sensors are enough for a verdict."
    e = evaluated(tmp_path, 6000, SMALL, seed)
    assert_honest(e)
    assert len(e.groups) == 50
    assert e.beats, e.report()
