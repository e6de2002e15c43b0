"Pre-training: the same bits after an interruption, its record in the model, recordings without labels, and refusals."

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import raises
from test_learn_predict import RATE, noise, put
from tiny_training import files, tiny, tiny_words

import leakmel as lm
from leakmel.cli import main
from leakmel.learn.data.segments import Segments
from leakmel.learn.model.files import list_checkpoints, save_checkpoint
from leakmel.learn.model.settings import with_length
from leakmel.learn.reports import training_report
from leakmel.learn.train import folds, loop, pretraining
from leakmel.learn.train.history import pretraining_curve
from leakmel.learn.train.inputs import open_training
from leakmel.learn.train.pretraining import Pretraining, open_pretraining, vicreg_terms
from leakmel.learn.train.state import new_net

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET: dict[str, Any] = {"progress": "none", "device": "cpu"}


def train(sets: Path, out: Path, **given: Any) -> lm.TrainResult:
    "A tiny training that begins with a tiny pre-training."
    training, validation = files(sets)
    options = {"settings": tiny(1), "pretrain": training, "pretrain_steps": 6} | QUIET | given
    return lm.train(training, validation, out=out, **options)


def weights_of(result: lm.TrainResult) -> list[torch.Tensor]:
    return [v for _, v in sorted(result.detector.classifier.state_dict().items())]


@pytest.fixture(scope="module")
def trained(small_sets, tmp_path_factory) -> lm.TrainResult:
    return train(small_sets, tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory) -> Path:
    "A flat folder of recordings without labels, two of them of no use."
    root = tmp_path_factory.mktemp("unlabelled") / "flat"
    for k in range(6):
        put(root, f"{k}.wav", noise(k, 10 * RATE, level=90 * k + 60))
    put(root, "deep/er/7.wav", noise(7, 3 * RATE))
    put(root, "short.wav", noise(8, 500))
    (root / "broken.wav").write_bytes(b"RIFF....WAVE")
    return root


def test_the_model_file_says_how_it_was_pretrained(trained, small_sets):
    record = trained.detector.record["pretraining"]
    with lm.open_dataset(files(small_sets)[0]) as ds:
        n = len(Segments([ds], level="recording", with_labels=False).rows)
    assert (record["steps"], record["recordings"]) == (6, n)
    assert len(record["digest"]) == 32
    assert [step for step, _ in record["loss"]] == [1, 2, 3, 4, 5, 6]
    assert record["loss"][-1][1] < record["loss"][0][1]
    assert trained.summary["pretraining"] == record
    assert "pre-training of 6 steps" in repr(trained)


def test_an_interrupted_pretraining_continues_bit_by_bit(small_sets, tmp_path, trained, monkeypatch):
    step = Pretraining._step

    def interrupted(self: Pretraining) -> list[float]:
        found = step(self)
        if len(self.losses) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(Pretraining, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        train(small_sets, tmp_path)
    assert "step 4 of the pre-training" in stopped.value.__notes__[0]
    assert [c.step for c in list_checkpoints(tmp_path / "pretraining")] == [4]
    monkeypatch.undo()
    n_steps = list[int]()

    def counted(self: Pretraining) -> list[float]:
        n_steps.append(len(self.losses))
        return step(self)

    monkeypatch.setattr(Pretraining, "_step", counted)
    again = train(small_sets, tmp_path, resume="always")
    assert n_steps == [4, 5]
    assert all(torch.equal(a, b) for a, b in zip(weights_of(again), weights_of(trained), strict=True))
    assert again.detector.record["pretraining"] == trained.detector.record["pretraining"]


def test_seed_and_data_decide_the_weights(small_sets, tmp_path, trained, unlabelled):
    same = train(small_sets, tmp_path / "same")
    other = train(small_sets, tmp_path / "other", settings=replace(tiny(1), seed=4))
    elsewhere = train(small_sets, tmp_path / "elsewhere", pretrain=files(small_sets)[1])
    first = weights_of(trained)
    assert all(map(torch.equal, first, weights_of(same)))
    assert not all(map(torch.equal, first, weights_of(other)))
    assert (
        elsewhere.detector.record["pretraining"]["digest"] != trained.detector.record["pretraining"]["digest"]
    )


def test_recordings_without_labels_can_be_used(small_sets, tmp_path, unlabelled):
    found = train(small_sets, tmp_path, pretrain=unlabelled)
    record = found.detector.record["pretraining"]
    assert (record["recordings"], record["files"]) == (7, ["recordings.h5"])
    assert [c.step for c in list_checkpoints(tmp_path / "pretraining")] == [6]
    done = lm.predict(unlabelled, found.detector, **QUIET)
    assert all(s.in_training for s in done.scored), "they were used to train the detector"
    again = train(small_sets, tmp_path, pretrain=unlabelled)
    assert again.summary["begin"].startswith("The training was already finished")


def test_the_training_begins_with_the_layers_and_with_new_heads(small_sets, tmp_path):
    training, _ = files(small_sets)
    with open_training(training, settings=tiny(1), progress="none") as data:
        lengths = with_length(tiny(1), len(data.training))
        with open_pretraining(training, data, lengths, 3, tmp_path, progress="none") as pre:
            found = pre.run(progress="none")
        assert found.weights
        assert not any(name.startswith(("classes", "leak")) for name in found.weights)
        fresh, begun = new_net(data, lengths), new_net(replace(data, pretrained=found), lengths)
    states = fresh.state_dict(), begun.state_dict()
    for name in states[0]:
        if name in found.weights:
            assert torch.equal(states[1][name], found.weights[name])
        else:
            assert torch.equal(states[1][name], states[0][name])
    assert not torch.equal(states[0]["layers.0.0.weight"], states[1]["layers.0.0.weight"])


def test_the_loss_is_that_of_the_paper():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 0.5, (2, 9, 4))
    expected = [np.mean((a - b) ** 2), 0.0, 0.0]
    for z in (a, b):
        expected[1] += np.mean(np.maximum(0, 1 - np.sqrt(z.var(0, ddof=1) + 1e-4)))
        covariance = np.cov(z.T)
        expected[2] += (np.square(covariance).sum() - np.square(np.diag(covariance)).sum()) / 4
    assert np.allclose(vicreg_terms(torch.from_numpy(a), torch.from_numpy(b)).numpy(), expected)


def test_large_sets_are_drawn_within_bounds(small_sets, tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "_MOST_BYTES", 150_000)
    training, _ = files(small_sets)
    with (
        open_training(training, settings=tiny(1), progress="none") as data,
        open_pretraining(training, data, with_length(tiny(1), 9), 2, tmp_path, progress="none") as pre,
    ):
        record = pre.run(progress="none").record
    assert 2 <= record["recordings"] < record["recordings_found"]


def test_wrong_input_is_refused(small_sets, tmp_path, unlabelled):
    with raises("unused-option"):
        train(small_sets, tmp_path / "auto", settings=lm.TrainSettings())
    assert not (tmp_path / "auto" / "pretraining").exists()
    for steps in (0, True, 2.5):
        with raises("out-of-range"):
            train(small_sets, tmp_path / "steps", pretrain_steps=steps)
    lm.build(
        unlabelled.parent,
        out=tmp_path / "other.h5",
        spec={"n_mels": 32, "sample_rate": 4096, "duration_s": 2.0},
        progress="none",
    )
    with raises("features-differ"):
        train(small_sets, tmp_path / "features", pretrain=tmp_path / "other.h5")
    (tmp_path / "empty").mkdir()
    with raises("no-recordings"):
        train(small_sets, tmp_path / "none", pretrain=tmp_path / "empty")
    put(tmp_path / "one", "1.wav", noise(1, 10 * RATE))
    with raises("too-few-recordings"):
        train(small_sets, tmp_path / "few", pretrain=tmp_path / "one")
    with raises("no-such-file"):
        train(small_sets, tmp_path / "gone", pretrain=tmp_path / "gone.h5")


def test_another_pretraining_in_the_folder_is_not_continued(small_sets, tmp_path, trained):
    out = tmp_path / "run"
    shutil.copytree(trained.model_path.parent, out)
    with raises("other-training"):
        train(small_sets, out, pretrain_steps=7)
    with raises("other-training"):
        train(small_sets, out, pretrain=None)
    shutil.rmtree(out / "checkpoints")
    (out / "model.pt").unlink()
    folder = out / "pretraining"
    for values in ({"format": "x"}, {"format": pretraining.FORMAT, "identity": "x"}):
        save_checkpoint(folder, values, 99)
        with raises("other-training"):
            train(small_sets, out)
    again = train(small_sets, out, resume="never")
    assert all(map(torch.equal, weights_of(again), weights_of(trained)))


def test_a_complete_pretraining_is_used_again(small_sets, tmp_path, trained, monkeypatch):
    "Also where the training has no checkpoint yet; and it is said where a pre-training begins."
    out = tmp_path / "run"
    shutil.copytree(trained.model_path.parent, out)
    shutil.rmtree(out / "checkpoints")
    (out / "model.pt").unlink()
    said = list[str]()
    monkeypatch.setattr(pretraining, "announce", lambda text, show: said.append(text))
    with monkeypatch.context() as unused:
        unused.delattr(Pretraining, "_step")  # not one step
        again = train(small_sets, out, resume="always")
    assert all(map(torch.equal, weights_of(again), weights_of(trained)))
    assert again.detector.record["pretraining"] == trained.detector.record["pretraining"]
    train(small_sets, tmp_path / "new", pretrain_steps=2)
    assert "complete in the folder; its 6 steps" in said[0]
    assert "begins with step 1 of 2" in said[1]


def test_nothing_is_resumed_in_a_new_folder(small_sets, tmp_path, unlabelled):
    with raises("nothing-to-resume"):
        train(small_sets, tmp_path / "new", pretrain=unlabelled, resume="always")
    assert not (tmp_path / "new" / "pretraining").exists(), "an empty folder would be resumed the next time"


def test_another_training_is_refused_before_the_pretraining(
    small_sets, tmp_path, trained, unlabelled, monkeypatch, few_trees
):
    "And a refused call leaves the folder as it was."
    monkeypatch.delattr(Pretraining, "_step")  # not one step
    plain, spectral, other = (tmp_path / name for name in ("plain", "spectral", "other"))
    train(small_sets, plain, pretrain=None)
    train(small_sets, spectral, pretrain=None, settings=lm.TrainSettings(detector="spectral"))
    shutil.copytree(trained.model_path.parent, other)
    before = {folder: sorted(folder.rglob("*")) for folder in (plain, spectral, other)}
    with monkeypatch.context() as unused:
        unused.delattr(pretraining, "_build_unlabelled")  # no recording is read
        with raises("other-training"):
            train(small_sets, plain, pretrain=unlabelled)
        with raises("model-exists"):
            train(small_sets, spectral, pretrain=unlabelled)
        with raises("other-training"):
            train(small_sets, other, pretrain=unlabelled, settings=replace(tiny(1), seed=4))
    with raises("other-training"):  # its data set is built, because only its content tells
        train(small_sets, other, pretrain=unlabelled)
    assert {folder: sorted(folder.rglob("*")) for folder in before} == before


def test_the_data_set_of_another_pretraining_is_kept(small_sets, tmp_path, unlabelled):
    out, pool = tmp_path / "run", tmp_path / "pool"
    train(small_sets, out, pretrain=unlabelled, pretrain_steps=2)
    built = out / "pretraining" / "recordings.h5"
    before = built.read_bytes()
    shutil.rmtree(out / "checkpoints")
    (out / "model.pt").unlink()
    shutil.copytree(unlabelled, pool)
    put(pool, "more.wav", noise(9, 10 * RATE))
    with raises("other-training"):
        train(small_sets, out, pretrain=pool, pretrain_steps=2)
    assert built.read_bytes() == before
    (pool / "more.wav").unlink()  # the same recordings in another place
    assert (
        train(small_sets, out, pretrain=pool, pretrain_steps=2).detector.record["pretraining"]["steps"] == 2
    )


def test_a_spectral_detector_does_not_claim_the_pretraining(small_sets, tmp_path, unlabelled, monkeypatch):
    monkeypatch.setattr(folds, "MIN_FOR_NETWORK", 1)
    monkeypatch.setattr(loop, "_chosen_kind", lambda *given: None)  # as where no folds are possible
    found = train(
        small_sets,
        tmp_path,
        pretrain=unlabelled,
        pretrain_steps=2,
        settings=replace(tiny(1), detector="auto"),
    )
    assert found.detector.kind == "spectral"
    assert list_checkpoints(tmp_path / "pretraining")
    assert "pretraining" not in found.detector.record | found.summary
    assert not any(s.in_training for s in lm.predict(unlabelled, found.detector, **QUIET).scored)


def test_a_checkpoint_that_lacks_weights_is_named(small_sets, tmp_path, trained, monkeypatch):
    monkeypatch.setattr(Pretraining, "_settings_identity", lambda self: "same")
    values = {"format": pretraining.FORMAT, "identity": "same", "net": {}, "projector": {}, "optimiser": {}}
    save_checkpoint(tmp_path / "pretraining", values, 3)
    with raises("not-a-checkpoint"):
        train(small_sets, tmp_path)


def test_report_and_figure_show_the_loss(trained, tmp_path):
    figure = pretraining_curve(trained.summary["pretraining"])
    assert list(figure.data[0].x) == [1, 2, 3, 4, 5, 6]
    page = training_report(trained, None, tmp_path / "report.html")
    assert "Pre-training: loss" in page.read_text(encoding="utf-8")


def test_a_training_without_it_is_as_before(small_sets, tmp_path):
    plain = train(small_sets, tmp_path, pretrain=None)
    assert "pretraining" not in plain.detector.record
    assert not (tmp_path / "pretraining").exists()
    identity = torch.load(list_checkpoints(tmp_path / "checkpoints")[-1].path, weights_only=True)["identity"]
    assert sorted(json.loads(identity)) == ["settings", "task", "training", "validation"]


def test_command(small_sets, tmp_path, unlabelled, capsys):
    words = [
        "train",
        str(small_sets),
        "--out",
        str(tmp_path / "run"),
        *tiny_words(1),
        "--no-evaluation",
        "--json",
    ]
    assert main([*words, "--pretrain", str(unlabelled), "--pretrain-steps", "4"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["pretraining"]["steps"] == 4
    assert main([*words, "--pretrain-steps", "4"]) == 2
    assert json.loads(capsys.readouterr().out)["code"] == "invalid-arguments"
    assert main([*words, "--pretrain", str(unlabelled), "--cross-validate"]) == 2
    assert json.loads(capsys.readouterr().out)["code"] == "invalid-arguments"
