"Hostile model files: they allocate no memory beyond their size, run no code and print no control characters."

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from errors import raises

import leakmel as lm
from leakmel.core.errors import DataError, MachineError, UsageError
from leakmel.detector.data.segments import make_task
from leakmel.detector.metrics.metrics import DecisionRule
from leakmel.detector.model import detector as detector_module
from leakmel.detector.model.detector import Detector, load_detector
from leakmel.detector.model.files import load_plain, plain_bytes
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.predict.predict import block_sizes, rule_of
from leakmel.detector.train import state as training_state

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
SPEC = lm.MelSpec.preset("disjoint", duration_s=1.0)


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    net = LeakNet(NetSettings(channels=(8, 8)), np.full(64, -30.0), np.full(64, 3.0))
    return Detector(net, make_task(["LEAK", "NOLEAK"]), SPEC, "torch@1").save(
        tmp_path_factory.mktemp("model") / "model.pt"
    )


def changed(honest: Path, path: Path, change: Callable[[dict, dict], Any]) -> Path:
    values = load_plain(honest)
    head, weights = json.loads(values["detector"]), values["weights"]
    change(head, weights)
    path.write_bytes(plain_bytes(values | {"detector": json.dumps(head), "weights": weights}))
    return path


HOSTILE: dict[str, Callable[[dict, dict], Any]] = {
    "channels": lambda head, weights: head["classifier"]["settings"].update(channels=[8, 2_000_000_000]),
    "many layers": lambda head, weights: head["classifier"]["settings"].update(channels=[3000] * 5000),
    "bands": lambda head, weights: head["classifier"]["settings"].update(n_mels=4_000_000_000),
    "classes": lambda head, weights: head["classifier"]["settings"].update(n_classes=2_000_000_000),
    "a wide view of one number": lambda head, weights: (
        head["classifier"]["settings"].update(channels=[8, 50_000]),
        weights.update(
            {
                "layers.1.0.weight": torch.zeros(1).expand(50_000, 8, 3, 2),
                "hidden.0.weight": torch.zeros(1).expand(50_000, 100_000),
            }
        ),
    ),
    "weights of nowhere": lambda head, weights: weights.update(
        {"hidden.0.weight": torch.empty(1 << 40, device="meta")}
    ),
    "sparse weights": lambda head, weights: weights.update(
        {"hidden.0.weight": torch.zeros(8, 16).to_sparse()}
    ),
    "a text as weights": lambda head, weights: weights.update({"hidden.0.weight": "no"}),
    "weights of another shape": lambda head, weights: weights.update({"hidden.0.weight": torch.zeros(16, 8)}),
    "weights that are no numbers": lambda head, weights: weights["hidden.0.weight"].fill_(torch.nan),
    "no threshold": lambda head, weights: head["thresholds"].update(mean=float("nan")),
    "a threshold that is a list": lambda head, weights: head["thresholds"].update(mean=[0.5]),
    "a share that is a truth": lambda head, weights: head.update(share=True),
    "a share that is a text": lambda head, weights: head.update(share="0.5"),
    "a share above all": lambda head, weights: head.update(share=2),
}


@each("name", HOSTILE)
def test_a_hostile_detector_is_refused(honest, tmp_path, name):
    path = changed(honest, tmp_path / "model.pt", HOSTILE[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with raises("not-a-detector", DataError, path=path):
        load_detector(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


def test_valid_detector_is_loaded(honest, tmp_path):
    assert load_detector(changed(honest, tmp_path / "model.pt", lambda head, weights: None)).spec == SPEC


def test_integer_share_is_accepted_as_float(honest, tmp_path):
    "1 is 1.0: a detector that was made with it can be read again, also from a file that holds it as a whole number."
    detector = load_detector(honest)
    made = Detector(detector.classifier, detector.task, SPEC, **DecisionRule("frac_vote", 1).options())
    for path in (
        made.save(tmp_path / "made.pt"),
        changed(honest, tmp_path / "whole.pt", lambda head, weights: head.update(share=1)),
    ):
        assert (share := load_detector(path).share) == 1.0
        assert type(share) is float
    bad: list[Any] = [0, True, 1.5, float("nan"), "1"]
    for wrong in bad:
        with raises("usage", UsageError, found=f"'mean', {wrong!r}"):
            Detector(detector.classifier, detector.task, SPEC, share=wrong)


def test_a_checkpoint_that_was_taken_for_a_model(tmp_path):
    (tmp_path / "step-000000009.pt").write_bytes(plain_bytes({"format": training_state.FORMAT}))
    with raises("not-a-detector", DataError, says="checkpoints/best.pt"):
        load_detector(tmp_path / "step-000000009.pt")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [(MemoryError(), MachineError, "out-of-memory"), (RuntimeError(), DataError, "not-a-detector")],
)
def test_errors_without_message_are_distinguished(honest, monkeypatch, error, kind, code):
    "No memory is no fault of the file."

    def failing(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(detector_module, "LeakNet", failing)
    with raises(code, kind):
        load_detector(honest)


def test_spec_with_very_long_rows_is_refused():
    "A spec in a file may name rows of any length; slots for them would take all memory."
    with raises("out-of-memory", MachineError):
        block_sizes(lm.MelSpec.preset("disjoint", duration_s=2.0**31 / 4096 - 1), "cpu", 10, None, 16)
    assert block_sizes(SPEC, "cpu", 10, None, None).n_files == 10


def test_a_threshold_belongs_to_a_share(honest):
    "That of half of the segments is none for a fifth of them."
    detector = load_detector(honest)
    detector.thresholds.update(frac_vote=0.8)
    detector.threshold_from = "highest F1 of 9 recordings of validation"
    same, other = rule_of(detector, "frac_vote"), rule_of(detector, "frac_vote", frac=0.2)
    assert (same.threshold, same.threshold_from) == (0.8, detector.threshold_from)
    assert (other.threshold, other.threshold_from) == (0.5, "not chosen for this share: 0.5")
    assert rule_of(detector, "frac_vote", 0.7, 0.2).threshold == 0.7
