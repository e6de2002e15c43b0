"Generalisation by several groupings and learning curves: figures, rules of the answers, resume, files and command line."

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from each import each

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, OutputError, UsageError
from leakmel.detector.evaluate.resampling import Generalisation
from leakmel.detector.metrics.significance import (
    Bootstrap,
    Groups,
    describe_gain,
    differences,
    new_group_answer,
    score_model,
)
from leakmel.detector.train import folds
from leakmel.detector.train.folds import CURVES, FoldTrainer, find_grouping, smaller_part
from leakmel.recordings.demo import write_wav

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),  # of splits of a few sensors
    pytest.mark.usefixtures("one_thread", "few_trees"),
]
SPECTRAL = lm.TrainSettings(detector="spectral")
QUIET: dict[str, Any] = {"settings": SPECTRAL, "n_draws": 200, "progress": "none", "device": "cpu", "jobs": 1}
FIT = FoldTrainer.fit


@pytest.fixture(scope="module")
def noises(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A data set of 36 recordings: 12 sensors, sessions equal to sensors, 3 sites, and one street for all leaks."
    folder = tmp_path_factory.mktemp("noises") / "data"
    folder.mkdir()
    rng = np.random.default_rng(3)
    rows = ["path,label,sensor,session,site,street"]
    for k in range(36):
        sensor, is_leak = k // 3, k % 2 == 0
        noise = rng.standard_normal(4096)
        noise = noise + (0.2 * (k % 5) if is_leak else 0.0) * np.roll(noise, 1)
        write_wav(folder / f"{k}.wav", (2000 * noise).astype(np.int16), 4096)
        place = f"s{sensor},night {sensor},site {sensor % 3},{'a' if is_leak else 'b'}"
        rows.append(f"{k}.wav,{'LEAK' if is_leak else 'NOLEAK'},{place}")
    (folder / "t.csv").write_text("\n".join(rows) + "\n")
    manifest = lm.scan(folder, table=folder / "t.csv", progress="none")
    lm.build(folder, manifest=manifest, out=folder.with_name("set.h5"), check=1, progress="none")
    return folder.with_name("set.h5")


ASKED = ("recording", "session", "sensor", "site", "street", "town")


@pytest.fixture(scope="module")
def found(noises: Path) -> Generalisation:
    return lm.generalisation(noises, groups=ASKED, seeds=1, **QUIET)


@pytest.fixture
def count_fits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    "Count the fits of detectors; the fit of a given number is interrupted."

    def count(interrupted: int = 0) -> list[str]:
        done: list[str] = []

        def fit(self: FoldTrainer, kind: str, *args: Any) -> Any:
            if len(done) + 1 == interrupted:
                raise KeyboardInterrupt
            done.append(kind)
            return FIT(self, kind, *args)

        monkeypatch.setattr(FoldTrainer, "fit", fit)
        return done

    return count


@pytest.mark.slow
def test_groupings_that_are_left_out_have_a_reason(found: Generalisation) -> None:
    assert set(found.tested) == {"recording", "session", "site"}
    areas = [result.detector.figures["auc"] for result in found.tested.values()]
    assert areas == sorted(areas, reverse=True)  # from the easiest to the hardest
    assert [g["by"] for g in found.groupings[:3]] == list(found.tested)
    codes = {g["by"]: g["left_out"]["code"] for g in found.groupings if g["left_out"]}
    assert codes == {"sensor": "given-twice", "street": "label-in-one-part", "town": "unknown-column"}
    assert found.left_out["sensor"] == "Its groups are those of session."
    assert {g["by"]: g["same_groups"] for g in found.groupings}["session"] == ["sensor"]
    text = repr(found)
    assert "session = sensor: 12 groups" in text
    assert "no column town" in text


@pytest.mark.slow
def test_figures_are_those_of_cross_validation(noises: Path, found: Generalisation) -> None:
    for name in ("session", "site"):
        alone = lm.cross_validate(noises, group=name, **QUIET)
        assert alone.to_dict()["pooled"] == found.tested[name].to_dict()["pooled"]
        assert alone.to_dict()["baselines"] == found.tested[name].to_dict()["baselines"]
        assert alone.table["score"].equals(found.tested[name].table["score"])


@pytest.mark.slow
def test_counts_add_up_in_table_and_plain_values(found: Generalisation) -> None:
    table = found.table.set_index("grouping")
    tested = table[table["left_out"] == ""]
    assert tested["recordings"].tolist() == [36.0] * 3
    assert tested["leaks"].tolist() == [18.0] * 3
    assert tested["groups"].to_dict() == {"recording": 36, "session": 12, "site": 3}
    for result in found.tested.values():
        assert result.folds["recordings"].sum() == 36
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [row["by"] for row in plain["generalisation"]] == list(table.index)
    for row, auc in zip(plain["generalisation"], tested["detector_auc"], strict=False):
        assert row["models"]["detector"]["figures"]["auc"]["value"] == pytest.approx(auc)
    assert plain["answer"]["hardest"] == "sensor", "three sites are too few"
    assert "only 3 groups" in plain["answer"]["text"]


def test_figure_shows_each_tested_grouping(found: Generalisation) -> None:
    fig = found.plots()["generalisation"]
    assert [len(trace.x) for trace in fig.data] == [3] * 4
    assert "session = sensor<br>12 groups" in fig.layout.xaxis.ticktext
    assert fig.layout.title.text.startswith("On a new sensor, expect an AUC of")


@pytest.mark.slow
def test_interrupted_run_is_resumed(
    noises: Path, tmp_path: Path, count_fits: Callable[..., list[str]]
) -> None:
    some: dict[str, Any] = dict(
        groups=("recording", "sensor"), n_folds=2, seeds=1, out=tmp_path / "out", **QUIET
    )
    first = count_fits(interrupted=4)
    with pytest.raises(KeyboardInterrupt):
        lm.generalisation(noises, **some)
    second = count_fits()
    resumed = lm.generalisation(noises, **some)
    assert (len(first), len(second)) == (3, resumed.n_done)
    third = count_fits()
    again = lm.generalisation(noises, **some)
    assert third == []
    assert again.n_done == 0
    assert again.answer == resumed.answer
    rows = pd.read_csv(tmp_path / "out" / "generalisation.csv")
    assert set(rows["grouping"]) == {"recording", "sensor"}
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["fits_of_this_run"] == 0
    page = (tmp_path / "out" / "generalisation.html").read_text()
    assert again.answer["text"] in page.partition("</h1>")[0]
    assert str(tmp_path) not in page
    with pytest.raises(OutputError) as error:
        lm.cross_validate(noises, out=tmp_path / "out", **QUIET)
    assert error.value.code == "other-file-in-the-way"


def test_wrong_arguments(noises: Path) -> None:
    for given in ({"groups": ()}, {"n_folds": 1}, {"seeds": 0}, {"jobs": 0}):
        with pytest.raises(UsageError):
            lm.generalisation(noises, **(QUIET | given))
    with pytest.raises(DataError) as error:
        lm.generalisation(noises, groups=("town", "street"), **QUIET)
    assert error.value.code == "no-group"
    assert "street" in str(error.value.found)


def test_recordings_with_equal_content_are_one_group() -> None:
    table = pd.DataFrame({"path": list("abcd"), "content": ["1", "1", "", ""], "sensor": ["x", "", "y", ""]})
    alone = find_grouping(table, "recording")[0]
    assert alone.names == ("a + b", "c", "d")
    sensors = find_grouping(table, "sensor")[0]
    assert "2 of 4 recordings have no sensor" in sensors.note


def numbered(by: str, code: np.ndarray) -> Groups:
    return Groups(by, code, tuple(map(str, range(int(code.max()) + 1))))


def answer_of(
    hard_sensors: int, n_sensors: int = 20, names: tuple[str, str] = ("recording", "sensor")
) -> Any:
    "Answer for 80 recordings, of which those of some sensors are not separated by the harder grouping."
    rng = np.random.default_rng(1)
    truth, sensor = np.tile([True, False], 40), np.arange(80) // 4 % n_sensors
    easy = truth + 0.4 * rng.standard_normal(80)
    hard = np.where(sensor < hard_sensors, rng.random(80), easy)
    tested = [
        (names[0], numbered(names[0], np.arange(80)), easy),
        (names[1], numbered(names[1], sensor), hard),
    ]
    return new_group_answer(truth, tested, n_draws=400)


def test_answer_states_a_fall_only_where_it_is_shown() -> None:
    falls = answer_of(10)
    assert falls["fall"]["better"]
    assert "less (95 % interval" in falls["text"]
    same = answer_of(0)
    assert not same["fall"]["better"]
    assert (same["fall"]["low"], same["fall"]["high"]) == (0, 0), "equal scores, so it is paired"
    assert "A fall from folds by recording" in same["text"]
    chance = answer_of(20)
    assert "not shown to be better than chance" in chance["text"]


def test_undecidable_answer_is_stated() -> None:
    few = answer_of(3, n_sensors=4)
    assert few["hardest"] == "recording"
    assert few["fall"] is None
    assert "only 4 sensors" in few["text"]
    assert "What happens on a new pipe cannot be told" in few["text"]
    sessions = answer_of(10, names=("recording", "session"))
    assert "folds by session test known pipes too" in sessions["text"]
    truth = np.array([True, False, True, False])
    none = new_group_answer(truth, [("sensor", numbered("sensor", np.arange(4)), truth * 1.0)])
    assert none["hardest"] == ""
    assert none["auc"] is None
    assert none["text"].startswith("What happens on a new pipe cannot be told")


@pytest.mark.slow
def test_command_line_with_several_groups(
    noises: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["train", str(noises), "--out", str(tmp_path / "out"), "--cross-validate", "--folds", "2"]
    words += ["--detector", "spectral", "--device", "cpu", "--group", "sensor,recording,town"]
    assert main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["ok"]
    assert [row["by"] for row in body["generalisation"]] == ["recording", "sensor", "town"]
    assert body["answer"]["hardest"] == "sensor"
    assert main([*words, "--quiet"]) == 0
    assert "On a new sensor" in capsys.readouterr().out


CURVE: dict[str, Any] = {"sizes": (0.5,), "seeds": 2, "n_folds": 2}


@pytest.mark.slow
def test_curve_ends_at_the_figure_of_cross_validation(
    noises: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = QUIET | CURVE | {"out": tmp_path}
    found = lm.learning_curve(noises, **some)
    monkeypatch.setattr(folds, "choose_kind", lambda *a, **k: None)  # a curve chooses no vote
    whole = lm.cross_validate(noises, n_folds=2, seeds=2, **QUIET)
    table = found.table.set_index("curve")
    ends = table[table["share"] == 1]
    assert list(ends.index) == ["recordings", "groups"]
    for areas in ends[["auc_1", "auc_2"]].to_numpy():
        assert areas == pytest.approx(whole.seeds["auc"])
    halves = table[table["share"] == 0.5]
    assert halves["groups"]["recordings"] == ends["groups"]["groups"]
    assert halves["groups"]["groups"] == pytest.approx(ends["groups"]["groups"] / 2)
    half, end = (table.loc["groups"].iloc[k] for k in (0, 1))
    assert f"after {half['groups']:.0f}: {half['auc']:.2f} (" in found.visits
    assert f", after {end['groups']:.0f}: {end['auc']:.2f} ({end['auc_low']:.2f} to " in found.visits
    assert found.n_fits == found.n_done == 2 * 2 * 3
    assert json.loads((tmp_path / "summary.json").read_text())["gains"].keys() == {"recordings", "groups"}
    again = lm.learning_curve(noises, **some)
    assert again.n_done == 0
    assert again.table.equals(found.table)
    assert pd.read_csv(tmp_path / "learning_curve.csv")["share"].tolist() == [0.5, 1, 0.5, 1]


def test_interrupted_curve_is_resumed(
    noises: Path, tmp_path: Path, count_fits: Callable[..., list[str]]
) -> None:
    some = QUIET | CURVE | {"out": tmp_path, "seeds": 1}
    count_fits(interrupted=3)
    with pytest.raises(KeyboardInterrupt):
        lm.learning_curve(noises, **some)
    rest = count_fits()
    assert lm.learning_curve(noises, **some).n_done == len(rest) == 4


@each("curve", CURVES)
def test_smaller_parts_are_nested_and_keep_all_classes(curve: str) -> None:
    rng = np.random.default_rng(5)
    for seed in range(20):
        code = np.sort(rng.integers(0, 15, 90))
        classes = np.where(code < 3, 1, 0)  # three groups have all leaks
        before: set[int] = set()
        for share in (0.1, 0.25, 0.5, 0.75, 1.0):
            part = smaller_part(classes, code, curve, share, seed)
            assert set(classes[part]) == {0, 1}
            assert before <= set(part.tolist())
            before = set(part.tolist())
            if curve == "recordings":
                assert set(code[part]) == set(code)
            else:
                assert np.isin(code, code[part]).sum() == len(part), "whole groups"
        assert len(before) == 90


def gain_of(smaller: float, whole: float, n_sensors: int = 20) -> dict[str, Any]:
    "Gain for 80 recordings whose scores have noise of two sizes."
    rng = np.random.default_rng(0)
    truth, noise = np.tile([True, False], 40), rng.standard_normal((2, 3, 80))
    boot = Bootstrap(truth, numbered("sensor", np.arange(80) // 4 % n_sensors), n_draws=300)
    scores = (truth + smaller * noise[0], truth + whole * noise[1])
    models = [score_model(boot, score, name="cnn", title="cnn") for score in scores]
    gain = differences(boot, models[1], models[0])["auc"]
    return describe_gain(gain, "groups", 0.5, "sensor")


def test_gain_is_stated_only_where_its_interval_shows_it() -> None:
    assert gain_of(3, 0.3)["finding"] == "helps"
    assert "More sensors would probably help" in gain_of(3, 0.3)["text"]
    assert gain_of(0.01, 0.01)["finding"] == "hardly"
    assert gain_of(1, 1)["finding"] == "unknown"
    few = gain_of(3, 0.3, n_sensors=4)
    assert few["finding"] == "unknown"
    assert "at least 5" in few["text"]


def test_groups_of_one_recording_have_one_curve(noises: Path) -> None:
    found = lm.learning_curve(noises, group="path", **(QUIET | CURVE | {"seeds": 1}))
    assert list(found.gains) == ["groups"]
    assert "too few recordings to leave some of them out" in found.text
    assert found.visits == "", "a recording is not visited"
    assert [len(trace.x) for trace in found.plots()["learning_curve"].data] == [1, 2]


def test_wrong_arguments_of_a_curve(noises: Path) -> None:
    for given in (
        {"sizes": ()},
        {"sizes": (0, 0.5)},
        {"sizes": (2,)},
        {"seeds": 0},
        {"n_folds": 1},
        {"jobs": 0},
    ):
        with pytest.raises(UsageError):
            lm.learning_curve(noises, **(QUIET | given))
    with pytest.raises(UsageError):
        lm.learning_curve(noises, **(QUIET | {"settings": lm.TrainSettings(detector="blend")}))


@pytest.mark.slow
def test_command_line_of_a_curve(noises: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["train", str(noises), "--out", str(tmp_path / "out"), "--learning-curve", "--folds", "2"]
    words += ["--seeds", "1", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["detector"] == "spectral"
    assert "ten times as many fits" in body["note"]
    shares = [p["share"] for p in body["learning_curve"] if p["curve"] == "groups"]
    assert shares == [0.25, 0.5, 0.75, 1.0]
    assert main([*words, "--quiet"]) == 0
    assert "visits: AUC at sensors that were not visited" in capsys.readouterr().out
    assert main([*words, "--cross-validate"]) == 2
    assert main([*words, "--group", "sensor,path"]) == 2
