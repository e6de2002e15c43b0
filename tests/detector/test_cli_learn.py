"`leakmel evaluate` and `leakmel retrain`: the whole loop from a shell, what each option leads to, and one clear line for what is wrong."

import csv
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from champions import load_champion
from each import each
from made_detectors import made_detector
from tiny_training import tiny_words

import leakmel as lm
from leakmel import cli
from leakmel.cli import main
from leakmel.core.errors import UsageError
from leakmel.detector.evaluate.evaluation import evaluate
from leakmel.detector.model.detector import load_detector
from leakmel.detector.model.files import round_folder
from leakmel.detector.model.settings import CheckpointSettings, TrainSettings
from leakmel.extras import retrain as rounds
from leakmel.extras.retrain import RoundRules, retrain, weights_digest
from leakmel.operations.detector import find_data_sets

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default::UserWarning"),
]  # of splits of a few sensors

QUICK = ["--device", "cpu", "--quiet"]
ROUND = [*QUICK, "--n-draws", "100", "--no-fsync"]
OF_NET = {"channels", "dropout"}

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture) -> Say:
    "Run main() with some words; returns status, stdout and stderr."

    def run(*words: str | os.PathLike) -> tuple[int, str, str]:
        try:
            status = main([os.fspath(w) for w in words])
        except SystemExit as e:
            status = int(e.code or 0)  # argparse
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return run


def no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def run_json(say: Say, *words: str | os.PathLike) -> dict[str, Any]:
    "Return the JSON output of a command that must succeed."
    status, out, err = say(*words, "--json")
    assert status == 0, err
    body = json.loads(out, parse_constant=no_constant)
    assert (body["ok"], body["exit_status"]) == (True, 0)
    return body


@pytest.fixture(scope="module")
def place(small_sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A detector, test sets of another network, and unlabelled recordings in folders by date."
    folder = tmp_path_factory.mktemp("place")
    spec = ["--spec", str(small_sets / "TRAINING_DATASET.H5"), "--quiet"]
    assert (
        main(["train", str(small_sets), "--out", str(folder / "run"), "--no-evaluation", *tiny_words(1)]) == 0
    )
    lm.write_demo(folder / "further", n_files=24, seed=2)
    assert (
        main(["build", str(folder / "further"), "--split", "all", "--out", str(folder / "far"), *spec]) == 0
    )
    lm.write_demo(folder / "network", n_files=40, seed=1)
    days = {"new": ["2026-11-01", "2026-11-02"], "one": ["2026-11-03"], "two": ["2026-11-04"]}
    of_day = {day: name for name, own in days.items() for day in own}
    for k, path in enumerate(sorted((folder / "network" / "TRAINING").rglob("*.wav"))):
        day = list(of_day)[k % len(of_day)]
        (folder / of_day[day] / day).mkdir(parents=True, exist_ok=True)
        (folder / of_day[day] / day / path.name).hardlink_to(path)
    for name in days:
        assert main(["build", str(folder / name), "--out", str(folder / f"{name}.h5"), *spec]) == 0
    return folder


def words_of(place: Path, sets: Path, out: Path) -> list[str]:
    "Of a round, without the new recordings."
    return [
        "--replay",
        str(sets),
        "--testing",
        str(sets),
        "--validation",
        str(sets),
        "--out",
        str(out),
        *ROUND,
    ]


def kept(folder: Path) -> list[dict[str, str]]:
    "What a round kept of its new recordings."
    with (folder / "kept.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def days_of(table: list[dict[str, str]]) -> set[str]:
    return {row["path"].split("/")[0] for row in table if row["segments"]}


def by_rule(monkeypatch: pytest.MonkeyPatch, wins: bool) -> None:
    monkeypatch.setattr(rounds, "decide", lambda *a: (wins, "as the test wants it."))


# ---- the loop


@pytest.mark.slow
def test_new_recordings_become_a_champion(
    place: Path, small_sets: Path, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lm.open_dataset(small_sets / "TRAINING_DATASET.H5") as old, lm.open_dataset(place / "new.h5") as new:
        assert new.spec == old.spec
        assert new.file.attrs["fingerprint"] == old.file.attrs["fingerprint"]
        assert new.class_names == ["2026-11-01", "2026-11-02"], "no label of the detector"
        paths = [os.fsdecode(p) for p in new.files["path"]]
    (tmp_path / "heard.csv").write_text(f"path,label\n{paths[0]},NOLEAK\n{paths[1]},LEAK\n")
    out, common = tmp_path / "rounds", words_of(place, small_sets, tmp_path / "rounds")
    by_rule(monkeypatch, True)
    first = run_json(
        say,
        "retrain",
        place / "new.h5",
        "--champion",
        place / "run",
        "--human-labels",
        tmp_path / "heard.csv",
        *common,
    )
    assert (first["number"], first["replaced"], first["folder"]) == (1, True, str(out / "round-0001"))
    assert {n: t["recordings"] for n, t in first["testing"].items()} == {"testing": 3}
    assert {row["path"]: row["class"] for row in first["human_labels"]} == {
        paths[0]: "NOLEAK",
        paths[1]: "LEAK",
    }
    assert weights_digest(load_detector(out / "round-0000" / "model.pt")) == weights_digest(
        load_detector(place / "run" / "model.pt")
    )

    second = run_json(say, "retrain", place / "one.h5", place / "two.h5", *common)
    assert (second["number"], second["replaced"], second["champion"]["round"]) == (2, True, 1)
    assert second["new"]["files"] == ["one.h5", "two.h5"]
    assert days_of(kept(out / "round-0002")) == {"2026-11-03", "2026-11-04"}, (
        "learned, each with labels of its own"
    )

    by_rule(monkeypatch, False)
    third = run_json(say, "retrain", place / "new.h5", *common)
    assert (third["replaced"], third["champion"]["round"]) == (False, 2)
    assert json.loads((out / "champion.json").read_text())["model"] == "round-0002/model.pt"


@pytest.fixture(scope="module")
def two_rounds(place: Path, small_sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    "The second of two rounds was won."
    out = tmp_path_factory.mktemp("won") / "rounds"
    given: dict[str, Any] = {
        "replay": small_sets / "TRAINING_DATASET.H5",
        "testing": small_sets / "TESTING_DATASET.H5",
        "out": out,
        "device": "cpu",
        "progress": False,
        "rules": RoundRules(n_draws=100),
        "allow_leaky_split": True,
        "checkpoints": CheckpointSettings(fsync=False),
    }
    with pytest.MonkeyPatch.context() as m:
        for wins in (False, True):
            by_rule(m, wins)
            retrain(place / "run", place / "new.h5", **given)
    return out


def scored(say: Say, place: Path, model: Path, out: Path) -> list[list[str]]:
    "Scores of recordings, without how they were computed."
    run_json(say, "predict", place / "one", "--model", model, "--out", out, *QUICK)
    with out.open(newline="") as f:
        return [[row["path"], row["score"], row["threshold"]] for row in csv.DictReader(f)]


@pytest.mark.slow
def test_folder_of_rounds_selects_its_champion(
    two_rounds: Path, place: Path, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rounds"
    shutil.copytree(two_rounds, folder)
    champion = scored(say, place, folder, tmp_path / "a.csv")
    by_file = {
        n: scored(say, place, folder / f"round-{n:04d}" / "model.pt", tmp_path / f"{n}.csv") for n in range(3)
    }
    assert champion == by_file[2]
    assert champion not in (by_file[0], by_file[1])
    lineage = json.loads((folder / "champion.json").read_text())
    (folder / "champion.json").write_text(json.dumps(lineage | {"champions": lineage["champions"][:1]}))
    assert scored(say, place, folder, tmp_path / "b.csv") == by_file[0], (
        "what the pointer says, not the newest round"
    )


@pytest.mark.slow
def test_changed_champion_is_refused(
    two_rounds: Path, place: Path, small_sets: Path, tmp_path: Path, say: Say
) -> None:
    folder = tmp_path / "rounds"
    shutil.copytree(two_rounds, folder)
    shutil.copy(place / "run" / "model.pt", folder / "round-0002" / "model.pt")
    for words in (
        ["predict", place / "one", "--model", folder],
        ["evaluate", small_sets, "--model", folder],
        [
            "retrain",
            place / "new.h5",
            "--champion",
            folder,
            *words_of(place, small_sets, tmp_path / "others"),
        ],
        ["retrain", place / "new.h5", *words_of(place, small_sets, folder)],
    ):
        status, out, err = say(*words, *QUICK)
        assert (status, out) == (1, "")
        assert err.endswith(
            "round-0002/model.pt: the model file has changed: its digest does not match. Restore the file from a copy\n"
        )
        assert len(err.splitlines()) == 1
    (folder / "round-0002" / "model.pt").unlink()
    status, _, err = say("predict", place / "one", "--model", folder, *QUICK)
    assert (status, "the model file is missing" in err) == (1, True)


@pytest.mark.slow
def test_evaluate_command_equals_the_library_and_writes_files(
    two_rounds: Path, small_sets: Path, tmp_path: Path, say: Say
) -> None:
    body = run_json(
        say,
        "evaluate",
        small_sets,
        "--model",
        two_rounds,
        "--out",
        tmp_path / "judged",
        "--figures",
        "--draws",
        "200",
        "--seed",
        "4",
        "--votes",
        "any_long, mean",
        *QUICK,
    )
    written = body.pop("written")
    assert sorted(p.name for p in (tmp_path / "judged").iterdir()) == [
        "evaluation.html",
        "recordings.csv",
        "report.txt",
        "summary.json",
    ]
    assert sorted(written.values()) == sorted(str(p) for p in (tmp_path / "judged").iterdir())
    sets = [small_sets / f"{part}_DATASET.H5" for part in ("TESTING", "TRAINING", "VALIDATION")]
    found = evaluate(
        two_rounds / "round-0002" / "model.pt",
        sets[0],
        training=sets[1],
        validation=sets[2],
        votes=("any_long", "mean"),
        n_draws=200,
        seed=4,
        device="cpu",
        progress="none",
    )
    of_time = ("seconds", "files_per_s")
    right = json.loads(json.dumps(found.summary, default=str))
    assert {k: v for k, v in body.items() if k not in ("ok", "exit_status", *of_time)} == {
        k: v for k, v in right.items() if k not in of_time
    }
    assert (
        json.loads((tmp_path / "judged" / "summary.json").read_text())["recordings"]
        == body["recordings"]
        == 3
    )
    status, out, _ = say("evaluate", small_sets, "--model", two_rounds, "--out", tmp_path / "judged", *QUICK)
    assert status == 0
    assert "more lines: --full" in out
    paths = (str(tmp_path), "next: ")  # which are not wrapped
    assert max(len(line) for line in out.splitlines() if not any(text in line for text in paths)) <= 100


@pytest.mark.slow
@each("width", [60, 80, 100])
def test_a_report_fits_into_a_narrow_terminal(
    place: Path, small_sets: Path, say: Say, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    "Tables are cut between columns: wrap_text like sentences, their last column would stand below the first."
    monkeypatch.setattr(cli, "line_width", lambda: width)
    status, out, err = say("evaluate", small_sets, "--model", place / "run", *QUICK)
    assert status == 0, err
    words = " ".join(out.split())
    assert re.search(
        r"of \d+ leaks found \d+; of \d+ without a leak \d+ false alarms? \(threshold 0\.\d\d\) better than a",
        words,
    )
    numbers = re.search(
        r"of (\d+) leaks found (\d+); of (\d+) without a leak (\d+) .*?threshold ([\d.]+)", words
    )
    assert numbers is not None
    body = json.loads(say("evaluate", small_sets, "--model", place / "run", *QUICK, "--json")[1])
    of_vote = body["votes"][body["vote"]]
    counts = of_vote["counts"]
    assert [int(n) for n in numbers.groups()[:4]] == [
        body["leaks"],
        counts["true_leak"],
        body["recordings"] - body["leaks"],
        counts["false_alarm"],
    ]
    assert numbers[5] == f"{of_vote['threshold']:.2f}"
    assert "at a new sensor: " in words
    assert "next: leakmel predict " in words
    assert "Mean of segments" not in words
    status, out, err = say("evaluate", small_sets, "--model", place / "run", *QUICK, "--full")
    lines = out.splitlines()[2:]  # the first ones name the model
    assert max(len(line) for line in lines if str(place) not in line) <= width  # a command is not wrapped
    values = [line for line in lines if re.match(r"(precision|sensitivity|AUC)  ", line)]
    assert len(values) % 3 == 0
    assert len(values) >= (6 if width == 100 else 9)
    head = next(line for line in lines if "Mean of segments" in line)
    assert {len(line.rstrip()) for line in values[:3]} == {len(head.rstrip(chr(92)).rstrip())}, (
        "each value below its head"
    )


@pytest.mark.slow
def test_the_first_champion_is_a_file_or_a_folder_of_a_training_or_of_rounds(
    two_rounds: Path, place: Path, small_sets: Path, tmp_path: Path, say: Say
) -> None:
    right = {"run": place / "run" / "model.pt", "rounds": two_rounds / "round-0002" / "model.pt"}
    for name, given in (("run", place / "run"), ("rounds", two_rounds)):
        run_json(
            say,
            "retrain",
            place / "one.h5",
            "--champion",
            given,
            *words_of(place, small_sets, tmp_path / name),
        )
        assert (round_folder(tmp_path / name, 0) / "model.pt").is_file()
        first = load_detector(round_folder(tmp_path / name, 0) / "model.pt")
        assert weights_digest(first) == weights_digest(load_detector(right[name]))
    assert weights_digest(load_champion(two_rounds)) == weights_digest(load_detector(right["rounds"]))


@pytest.mark.slow
def test_a_seed_reaches_rules_and_training(place: Path, small_sets: Path, tmp_path: Path, say: Say) -> None:
    words: list[str | os.PathLike] = ["retrain", place / "one.h5", "--champion", place / "run"]
    usual = run_json(say, *words, *words_of(place, small_sets, tmp_path / "usual"))
    assert (usual["rules"]["seed"], usual["settings"]["seed"]) == (0, 3), "that of the champion"
    assert (usual["settings"]["epochs"], usual["settings"]["learning_rate"]) == (1, 0.0025), (
        "a third, rounded up, and a quarter"
    )
    other = run_json(
        say,
        *words,
        *words_of(place, small_sets, tmp_path / "other"),
        "--seed",
        "7",
        "--detector",
        "cnn",
        "--epochs",
        "2",
        "--metric",
        "f1",
    )
    assert (other["rules"]["seed"], other["settings"]["seed"], other["settings"]["epochs"]) == (7, 7, 2)
    assert other["rules"]["metric"] == "f1"
    assert (other["settings"]["learning_rate"], other["settings"]["channels"]) == (0.0025, [4, 8]), (
        "what was not asked for stays as usual"
    )


# ---- options


class Caught(UsageError):
    "The call was made."


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    "Where a call of the library ends: its arguments by name."
    seen: dict[str, Any] = {}

    def in_place_of(name: str) -> None:
        signature = inspect.signature(getattr(lm, name))

        def caught(*a: Any, **k: Any) -> None:
            seen.update(signature.bind(*a, **k).arguments)
            raise Caught("caught")

        monkeypatch.setattr(lm, name, caught)

    in_place_of("retrain")
    in_place_of("evaluate")
    return seen


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return made_detector().save(tmp_path / "m.pt")


def test_options_of_evaluate_reach_the_call(
    call: dict[str, Any], small_sets: Path, place: Path, say: Say, model: Path
) -> None:
    testing, training = small_sets / "TESTING_DATASET.H5", small_sets / "TRAINING_DATASET.H5"
    assert (
        say(
            "evaluate",
            testing,
            place / "far",
            "--model",
            model,
            "--training",
            training,
            "--training",
            place / "new.h5",
            "--validation",
            small_sets,
            "--votes",
            "any_long,frac_vote",
            "--group",
            "folder",
            "--metric",
            "f1",
            "--draws",
            "300",
            "--seed",
            "5",
            "--files-per-batch",
            "7",
            "--legacy",
            "--labels",
            "labels.csv",
            "--allow-leaky-split",
            "--device",
            "cpu",
            "--quiet",
        )[0]
        == 2
    )
    assert call == {
        "model": model,
        "data": [testing, place / "far" / "TESTING_DATASET.H5"],
        "training": [training, place / "new.h5"],
        "validation": [small_sets / "VALIDATION_DATASET.H5"],
        "votes": ("any_long", "frac_vote"),
        "group": "folder",
        "metric": "f1",
        "n_draws": 300,
        "seed": 5,
        "files_per_batch": 7,
        "legacy": True,
        "labels": Path("labels.csv").absolute(),
        "allow_leaky_split": True,
        "device": "cpu",
        "progress": "none",
    }
    left = set(inspect.signature(evaluate).parameters) - set(call)
    assert left == {"split", "part"}, "what the command line has no option for"


def test_folder_of_splits_gives_training_and_validation_sets(
    call: dict[str, Any], small_sets: Path, say: Say, model: Path
) -> None:
    assert say("evaluate", small_sets, "--model", model)[0] == 2
    assert [call[n] for n in ("data", "training", "validation")] == [
        [small_sets / f"{n}_DATASET.H5"] for n in ("TESTING", "TRAINING", "VALIDATION")
    ]
    usual = {n: p.default for n, p in inspect.signature(evaluate).parameters.items()}
    for name in (
        "group",
        "metric",
        "files_per_batch",
        "device",
        "n_draws",
        "seed",
        "legacy",
        "allow_leaky_split",
        "progress",
    ):
        assert call[name] == usual[name]
    assert tuple(call["votes"]) == usual["votes"]
    call.clear()
    assert say("evaluate", small_sets / "TESTING_DATASET.H5", "--model", model)[0] == 2
    assert (call["training"], call["validation"]) == (None, None), "a file alone says nothing of others"


def test_options_of_retrain_reach_the_call(
    call: dict[str, Any], small_sets: Path, place: Path, tmp_path: Path, say: Say
) -> None:
    training, validation, testing = (
        small_sets / f"{n}_DATASET.H5" for n in ("TRAINING", "VALIDATION", "TESTING")
    )
    assert (
        say(
            "retrain",
            place / "one.h5",
            small_sets,
            "--out",
            tmp_path / "x",
            "--champion",
            "m.pt",
            "--replay",
            training,
            "--replay",
            place / "far",
            "--testing",
            testing,
            "--testing",
            place / "far",
            "--validation",
            small_sets,
            "--validation",
            place / "far",
            "--human-labels",
            "h.csv",
            "--group",
            "folder",
            "--allow-leaky-split",
            "--resume",
            "never",
            "--device",
            "cpu",
            "--quiet",
            "--keep-share",
            "0.4",
            "--loader",
            "stream",
            "--amp",
            "off",
            "--no-fsync",
            "--checkpoint-steps",
            "5",
        )[0]
        == 2
    )
    far = {n: place / "far" / f"{n}_DATASET.H5" for n in ("TRAINING", "VALIDATION", "TESTING")}
    assert call == {
        "champion": "m.pt",
        "new_data": [place / "one.h5", training],
        "replay": [training, far["TRAINING"]],
        "testing": [testing, far["TESTING"]],
        "validation": [validation, far["VALIDATION"]],
        "out": tmp_path / "x",
        "human_labels": "h.csv",
        "group": "folder",
        "allow_leaky_split": True,
        "resume": "never",
        "device": "cpu",
        "progress": "none",
        "rules": RoundRules(keep_share=0.4),
        "settings": {"loader": "stream", "amp": "off"},
        "checkpoints": CheckpointSettings(fsync=False, checkpoint_steps=5),
    }
    assert set(call) == set(inspect.signature(retrain).parameters)


def test_retrain_defaults_are_used(
    call: dict[str, Any], two_rounds: Path, small_sets: Path, place: Path, say: Say
) -> None:
    assert (
        say(
            "retrain", place / "one.h5", "--out", two_rounds, "--replay", small_sets, "--testing", small_sets
        )[0]
        == 2
    )
    assert (call["champion"], call["validation"], call["human_labels"]) == (None, None, None)
    assert (call["rules"], call["checkpoints"], call["settings"]) == (RoundRules(), CheckpointSettings(), {})
    usual = {n: p.default for n, p in inspect.signature(retrain).parameters.items()}
    for name in ("group", "resume", "allow_leaky_split", "device"):
        assert call[name] == usual[name]


def options_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?--([\w-]+)", text, re.M))


def test_help_has_every_field_of_the_settings(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def names(cls: type) -> set[str]:
        return {f.name.replace("_", "-") for f in fields(cls)}

    own = {
        "help",
        "help-all",
        "json",
        "quiet",
        "full",
        "out",
        "group",
        "allow-leaky-split",
        "device",
        "seed",
        "metric",
        "validation",
    }
    status, text, _ = say("retrain", "--help-all")
    assert status == 0
    of_round = {"champion", "replay", "testing", "labels", "resume"}
    assert options_in(text) == own | of_round | names(RoundRules) | names(CheckpointSettings) | (
        names(TrainSettings) - OF_NET
    )
    assert max(map(len, text.splitlines())) <= 80
    defaults = {
        name: "(default" in output
        for name, output in re.findall(r"^  --([\w-]+)([^\n]*(?:\n   +[^\n]*)*)", text, re.M)
    }
    assert all(defaults[name] for name in names(RoundRules) - {"seed"} | names(CheckpointSettings))
    assert not any(defaults[name] for name in names(TrainSettings) - OF_NET - {"seed"}), (
        "they are the champion's"
    )
    status, text, _ = say("evaluate", "--help-all")
    assert status == 0
    assert options_in(text) == own | {
        "model",
        "training",
        "figures",
        "full",
        "votes",
        "draws",
        "files-per-batch",
        "labels",
        "legacy",
    }
    assert max(map(len, text.splitlines())) <= 80


# ---- what is wrong


def refused(say: Say, status: int, message: str, *words: str | os.PathLike) -> None:
    "A command that ends with a status and one line, and leaves nothing behind."
    got, out, err = say(*words)
    assert (got, out) == (status, ""), err
    assert re.search(message, err), err
    assert len([line for line in err.splitlines() if not line.startswith("warning: ")]) == 1, err
    assert err.splitlines()[-1].startswith(f"leakmel {words[0]}: ")
    got, out, err = say(*words, "--json")
    body = json.loads(out, parse_constant=no_constant)
    assert (got, body["ok"], body["exit_status"]) == (status, False, status)
    assert re.search(message, body["error"])


@pytest.mark.slow
@each(
    ("status", "message", "words"),
    [
        (
            2,
            "The option --figures needs a folder for the page; expected --out DIR",
            "SETS --model RUN --figures",
        ),
        (
            2,
            "the voting rule is unknown; found 'best'; expected mean, long_vote",
            "SETS --model RUN --votes best",
        ),
        (2, "the voting rule is unknown; found ''", "SETS --model RUN --votes mean,"),
        (2, "n_draws must be a whole number of at least 100; found 0", "SETS --model RUN --draws 0"),
        (2, "seed must be a whole number of at least 0; found -1", "SETS --model RUN --seed -1"),
        (
            2,
            "files_per_batch must be a whole number of at least 1; found 0",
            "SETS --model RUN --files-per-batch 0",
        ),
        (2, "the column to group by does not exist; found 'colour'", "SETS --model RUN --group colour"),
        (1, "the folder has no testing data set; expected TESTING_DATASET.H5", "RUN --model RUN"),
        (
            1,
            "the folder has no training data set; expected TRAINING_DATASET.H5",
            "SETS --model RUN --training RUN",
        ),
        (1, "the folder has no validation data set", "SETS --model RUN --validation RUN"),
        (1, "nowhere: the data set does not exist", "nowhere --model RUN"),
        (
            1,
            "the folder holds no detector; expected model.pt of a training, or champion.json of rounds$",
            "SETS --model SETS",
        ),
        (1, r"The training is not finished: resume it, or name checkpoints/best\.pt", "SETS --model EARLY"),
        (1, "nowhere: the file does not exist", "SETS --model nowhere"),
        (
            1,
            "has a label that the task does not include; found 2026-11-01; expected labels of LEAK, NOLEAK",
            "NEW --model RUN",
        ),
        (
            1,
            "report.txt: the path exists and is not a result of an evaluation, so it is not replaced",
            "SETS --model RUN --out MINE",
        ),
        (1, "report.txt: the target is a file", "SETS --model RUN --out MINE/report.txt"),
    ],
)
def test_usage_errors_of_evaluate(
    place: Path, small_sets: Path, tmp_path: Path, say: Say, status: int, message: str, words: str
) -> None:
    refused(say, status, message, "evaluate", *meant(words, place, small_sets, tmp_path), *QUICK)
    assert (tmp_path / "mine" / "report.txt").read_text() == "mine"
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["report.txt"]


def meant(words: str, place: Path, sets: Path, folder: Path) -> list[str]:
    "Words with the files that they stand for."
    (folder / "mine").mkdir()
    (folder / "mine" / "report.txt").write_text("mine")
    (folder / "early" / "checkpoints").mkdir(parents=True)
    shutil.copy(place / "run" / "checkpoints" / "best.pt", folder / "early" / "checkpoints" / "best.pt")
    names = {
        "SETS": sets,
        "RUN": place / "run",
        "NEW": place / "new.h5",
        "MINE": folder / "mine",
        "EARLY": folder / "early",
        "FAR": place / "far",
    }
    return [re.sub(r"\b[A-Z]+\b", lambda m: str(names[m[0]]), word) for word in words.split()]


@each(
    ("status", "message", "words"),
    [
        (2, "the folder has no champion yet", ""),
        (2, "unknown option --also", "--champion RUN --also far=FAR"),
        (2, "unknown option --earlier-share", "--champion RUN --earlier-share 1"),
        (2, "epochs is out of range; found 0", "--champion RUN --epochs 0"),
        (2, "unknown option --channels", "--champion RUN --channels 4,8"),
        (2, "unknown option --dropout", "--champion RUN --dropout 0.2"),
        (2, "unknown option --form", "--champion RUN --form matrix"),
        (2, "keep_share is out of range; found 2.0", "--champion RUN --keep-share 2"),
        (2, "n_draws is out of range; found 7; expected 100 to", "--champion RUN --n-draws 7"),
        (2, "seed is out of range; found -1; expected 0 to", "--champion RUN --seed -1"),
        (2, "metric has an unknown value; found 'best'; expected accuracy", "--champion RUN --metric best"),
        (2, "the column to group by does not exist; found 'colour'", "--champion RUN --group colour"),
        (2, "--resume, one of auto, always, never: perhaps is unknown", "--champion RUN --resume perhaps"),
        (1, "the folder holds no detector", "--champion SETS"),
        (1, r"name checkpoints/best\.pt", "--champion EARLY"),
        (
            1,
            "the folder has no training data set; expected TRAINING_DATASET.H5",
            "--champion RUN --replay RUN",
        ),
        (
            1,
            "the folder has no testing data set; expected TESTING_DATASET.H5",
            "--champion RUN --testing MINE",
        ),
        (
            1,
            "the folder has no validation data set; expected VALIDATION_DATASET.H5",
            "--champion RUN --validation MINE",
        ),
        (1, "nowhere: the data set does not exist", "--champion RUN --testing nowhere"),
        (1, "nowhere.csv: the table cannot be read", "--champion RUN --human-labels nowhere.csv"),
    ],
)
def test_usage_errors_of_retrain(
    place: Path, small_sets: Path, tmp_path: Path, say: Say, status: int, message: str, words: str
) -> None:
    given = ["--replay", "SETS", "--testing", "SETS", "--out", str(tmp_path / "rounds"), *ROUND]
    refused(
        say,
        status,
        message,
        "retrain",
        str(place / "new.h5"),
        *given[4:],
        *meant(f"{' '.join(given[:4])} {words}", place, small_sets, tmp_path),
    )
    assert not (tmp_path / "rounds" / "champion.json").exists()


@pytest.mark.slow
def test_missing_new_recordings_are_refused(place: Path, small_sets: Path, tmp_path: Path, say: Say) -> None:
    common: list[str | os.PathLike] = [
        "--champion",
        place / "run",
        "--replay",
        small_sets,
        "--testing",
        small_sets,
        "--out",
        tmp_path / "rounds",
        *ROUND,
    ]
    refused(say, 1, "the folder has no training data set", "retrain", place / "new", *common)
    refused(say, 1, "nowhere.h5: the data set does not exist", "retrain", "nowhere.h5", *common)
    (tmp_path / "heard.csv").write_text("path,label\n2026-11-01/nobody.wav,LEAK\n")
    for new in ([place / "new.h5"], [place / "one.h5", place / "two.h5"]):
        refused(
            say,
            1,
            re.escape("2026-11-01/nobody.wav"),
            "retrain",
            *new,
            *common,
            "--human-labels",
            tmp_path / "heard.csv",
        )
    lm.build(
        place / "one",
        out=tmp_path / "coarse.h5",
        progress="none",
        check=0,
        spec=lm.MelSpec.preset("disjoint", n_mels=32),
    )
    refused(say, 1, "n_mels", "retrain", tmp_path / "coarse.h5", *common)


def test_folder_of_rounds_continues_with_its_champion_only(
    two_rounds: Path, place: Path, small_sets: Path, tmp_path: Path, say: Say
) -> None:
    run_json(
        say, "train", small_sets, "--out", tmp_path / "run", "--no-evaluation", *tiny_words(1), "--seed", "9"
    )
    refused(
        say,
        2,
        "the given detector is not the champion of this folder",
        "retrain",
        place / "one.h5",
        "--champion",
        tmp_path / "run",
        *words_of(place, small_sets, two_rounds),
    )


@pytest.mark.slow
def test_the_folder_of_one_data_set_without_splits_is_trained_on(
    small_sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    "What `leakmel build` writes for a folder of label folders, and what it prints as the next command."
    shutil.copy(small_sets / "TRAINING_DATASET.H5", tmp_path / "ALL_DATASET.H5")
    assert (
        main(
            ["train", str(tmp_path), "--out", str(tmp_path / "detector"), "--detector", "spectral", "--quiet"]
        )
        == 0
    )
    assert str(tmp_path / "detector" / "model.pt") in capsys.readouterr().out
    shutil.copy(small_sets / "TRAINING_DATASET.H5", tmp_path)
    assert find_data_sets(tmp_path)[0] == {"training": tmp_path / "TRAINING_DATASET.H5"}
