"An operation: what a shell and a notebook write becomes the same fields, and nothing is guessed."

import argparse
from pathlib import Path
from typing import Any, get_args

import pytest
from each import each
from errors import raises

from leakmel.core.errors import UsageError
from leakmel.core.operation import Run, add_options, make, parameter_kinds
from leakmel.core.parameters import check_types
from leakmel.detector.metrics.metrics import FIGURES
from leakmel.detector.model.settings import Metric
from leakmel.operations.detector import Evaluate, Predict, Train
from leakmel.operations.extras import Nightly, Retrain, Search

NEEDED: dict[Any, list[str]] = {
    Train: ["mels", "--out", "model"],
    Search: ["mels", "--out", "search"],
    Evaluate: ["mels", "--model", "m.pt"],
    Predict: ["wavs", "--model", "m.pt"],
    Nightly: ["wavs", "--state", "nightly"],
    Retrain: ["new", "--out", "rounds", "--replay", "old", "--testing", "test"],
}


def by_command(cls: Any, *words: str) -> Any:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, cls)
    return make(cls, vars(parser.parse_args([*NEEDED[cls], *words])))


@each(
    ("cls", "words", "given", "name", "value"),
    [
        (Train, ["--validation", "none"], {"validation": "none"}, "validation", "none"),
        (
            Train,
            ["--leave-out", "PUMP,"],
            {"leave_out": "PUMP,"},
            "of_task",
            {"leak_label": "LEAK", "kind": "multiclass", "leave_out": ("PUMP",)},
        ),
        (Train, ["--no-evaluation"], {"evaluation": False}, "evaluation", False),
        (Train, ["--folds", "3"], {"n_folds": 3}, "n_folds", 3),
        (Evaluate, ["--out", "none"], {"out": "none"}, "out", "none"),
        (Evaluate, ["--votes", "mean,"], {"votes": "mean,"}, "votes", ("mean", "")),
        (Evaluate, ["--training", "a", "--training", "b"], {"training": "a, b,"}, "training", ("a", "b")),
        (Retrain, ["--seed", "3"], {"seed": 3}, "seed", 3),
        (Retrain, ["--epochs", "3"], {"epochs": 3}, "settings", {"epochs": 3}),
        (Retrain, [], {"epochs": None, "metric": "auc"}, "settings", {}),
    ],
)
def test_command_and_notebook_give_the_same(
    cls: Any, words: list[str], given: dict[str, Any], name: str, value: object
) -> None:
    check_types(given, parameter_kinds(cls))
    assert get_args(Metric) == tuple(FIGURES)
    assert getattr(by_command(cls, *words), name) == value
    assert getattr(make(cls, given), name) == value


@each("cls", NEEDED)
def test_what_a_command_needs_is_not_empty(cls: Any) -> None:
    "A variable that is not set must not become another model or folder."
    for k, word in enumerate(NEEDED[cls]):
        if not word.startswith("--"):
            parser = argparse.ArgumentParser(exit_on_error=False)
            add_options(parser, cls)
            with pytest.raises(argparse.ArgumentError, match="not empty"):
                parser.parse_args([*NEEDED[cls][:k], "", *NEEDED[cls][k + 1 :]])


@each("text", ["", "many", "4,,8"])
def test_channels_are_numbers(text: str) -> None:
    with raises("invalid-channels", UsageError):
        make(Train, {"channels": text})


def test_a_training_without_validation_reads_none(small_sets: Path, tmp_path: Path) -> None:
    words = {"data": str(small_sets), "out": str(tmp_path), "validation": "none", "device": "cpu"}
    plan = make(Train, words).plan(Run("none"))
    assert list(plan.files) == ["training", "testing"]
    assert plan.given["validation"] is None
    split = (
        make(Train, words | {"group": "sensor", "allow_leaky_split": True}).plan(Run("none")).given["split"]
    )
    assert list(split.parts) == ["training", "testing"]
