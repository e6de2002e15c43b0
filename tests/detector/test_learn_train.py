"Training: interrupted runs give the same weights, the best epoch is kept, the threshold is chosen on validation, and errors are reported before."

import csv
import json
import math
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from children import Ended, Server, server
from each import each
from errors import raises
from tiny_training import at_a_moment, files, loaded, n_moments, tiny, tiny_words

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, MachineError, OutputError, UsageError
from leakmel.core.files import OutputLock
from leakmel.core.monitor import SAMPLE_KEYS, Sampler
from leakmel.detector.data.splits import LeakySplitWarning, SplitWarning, group_split
from leakmel.detector.metrics.metrics import (
    UNCHOSEN,
    VOTES,
    DecisionRule,
    best_threshold,
    leak_metrics,
    vote_scores,
)
from leakmel.detector.model.detector import load_detector, score_rows
from leakmel.detector.model.files import list_checkpoints, load_plain, plain_bytes, save_checkpoint
from leakmel.detector.model.settings import SPEED_ONLY, CheckpointSettings
from leakmel.detector.train import folds, loop
from leakmel.detector.train.loop import TrainResult, train, train_with_validation
from leakmel.detector.train.state import EpochFigures, bottleneck_text, epoch_times, is_better, open_training
from leakmel.detector.train.step import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = tiny(3)
WORDS = [*tiny_words(3), "--no-evaluation"]


@pytest.fixture(scope="module")
def sets(small_sets: Path) -> Path:
    "Data sets of a small synthetic network: 18 steps of training in three epochs."
    return small_sets


def trained(sets: Path, out: Path, **options: Any) -> TrainResult:
    "A tiny training that keeps its validation: one of six of a training with folds."
    return train_with_validation(*files(sets), **given(out) | options)


def given(out: Path) -> dict[str, Any]:
    return {
        "out": out,
        "settings": TINY,
        "device": "cpu",
        "progress": False,
        "checkpoints": CheckpointSettings(fsync=False),
    }


def fitted(sets: Path, out: Path, **options: Any) -> TrainResult:
    "A tiny training with folds."
    return train(*files(sets), **given(out) | options)


@pytest.fixture(scope="module")
def right(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    "An delayed_signals training."
    return trained(sets, tmp_path_factory.mktemp("right") / "run")


@pytest.fixture(scope="module")
def whole(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    "A training with folds that was not interrupted."
    return fitted(sets, tmp_path_factory.mktemp("whole") / "run")


def assert_same_fit(out: Path, whole: TrainResult) -> None:
    "The same detector, byte for byte, but for times, and the same figures."
    a, b = (load_plain(path) for path in (out / "model.pt", whole.model_path))
    for values in (a, b):
        head = json.loads(values.pop("detector"))
        for timed in (*head["record"]["choice"]["tried"], *head["evaluations"]):
            timed |= {"seconds": 0, "date": ""}
        values["head"] = head
    assert plain_bytes(a) == plain_bytes(b)
    assert_same_history(out, whole)


def assert_same(out: Path, right: TrainResult) -> None:
    "The same model, byte for byte, and the same figures but for times."
    assert (out / "model.pt").read_bytes() == right.model_path.read_bytes()
    assert_same_history(out, right)


def assert_same_history(out: Path, right: TrainResult) -> None:
    for a, b in zip(rows_of(out), rows_of(right.model_path.parent), strict=True):
        for name in (
            "epoch",
            "step",
            "loss",
            "segment_accuracy",
            "learning_rate",
            "val_loss",
            "f1",
            "auc",
            "grad_norm",
            "clipped_share",
        ):
            assert a[name] == b[name], name


def rows_of(out: Path) -> list[dict[str, str]]:
    with open(out / "history.csv", encoding="utf-8") as f:
        return list(csv.DictReader(f))


# ---- interrupted is uninterrupted ----------------------------------------------------------------------------------


def at_a_step(number: int, at: int) -> str:
    "A moment is a step of the training, a batch of validation that is judged, or a call that changes the disk."
    owners = """((os, ("write", "replace", "unlink", "fsync")), (step.Stepper, ("step",)), (torch.optim.AdamW, ("step",)),
                 (detector.Detector, ("segment_scores",)))"""
    return at_a_moment(
        "from leakmel.detector.model import detector; from leakmel.detector.train import step",
        owners,
        number,
        at,
    )


@pytest.fixture(scope="module")
def children(sets: Path) -> Iterator[Server]:
    with server(loaded(sets, "train", "--no-evaluation")) as s:
        yield s


def run_with_signal(children: Server, sets: Path, out: Path, code: str = "", *words: str) -> Ended:
    return children.run("train", str(sets), "--out", str(out), *WORDS, *words, code=code)


def count_steps(children: Server, sets: Path, out: Path, *words: str) -> int:
    done = run_with_signal(children, sets, out, at_a_step(0, 0), *words)
    assert done.status == 0, done.err
    return n_moments(done.out)


@pytest.fixture(scope="module")
def n_steps(children: Server, sets: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    "Moments of a training with checkpoints after epochs only."
    return count_steps(children, sets, tmp_path_factory.mktemp("count") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, pytest.param(10_000, marks=pytest.mark.long)])
def test_training_killed_at_any_moment_gives_the_same_weights(
    sets: Path, tmp_path: Path, whole: TrainResult, children: Server, n_steps: int, tried: Callable, n: int
) -> None:
    words = ("--checkpoint-steps", "2", "--keep-checkpoints", "2")
    if n > 3:
        n_steps = count_steps(children, sets, tmp_path / "whole", *words)  # there are more
        assert_same_fit(tmp_path / "whole", whole)
    # a third of the moments: in a fold; the last one of three: in the last fit
    for at in sorted({1 + (2 * k + 1) * (n_steps - 1) // (2 * n) for k in range(n)}):
        out = tmp_path / f"{at}"
        done = run_with_signal(children, sets, out, at_a_step(signal.SIGKILL, at), *words)
        if done.status == 0 and n > 3:
            continue  # fewer steps this time
        assert done.status == -signal.SIGKILL, done.err
        left = list_checkpoints(out / "checkpoints")
        done = run_with_signal(children, sets, out, "", *words)
        assert done.status == 0, f"killed at step {at} of {n_steps}: {done.err}"
        output = json.loads((out / "summary.json").read_text())["begin"]
        assert ("Resumes" in output or "nothing to do" in output) == bool(left)
        assert_same_fit(out, whole)
        shutil.rmtree(out)
        tried("S16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "share"),
    [
        pytest.param(signal.SIGINT, 0.3, marks=pytest.mark.long),
        (signal.SIGTERM, 0.5),
        pytest.param(signal.SIGINT, 0.95, marks=pytest.mark.long),
        *(
            pytest.param(n, share, marks=pytest.mark.long)
            for n in (signal.SIGINT, signal.SIGTERM)
            for share in np.linspace(0.05, 0.95, 15)
        ),
    ],
)
def test_signal_is_delivered_after_a_checkpoint_with_a_resume_hint(
    sets: Path, tmp_path: Path, whole: TrainResult, children: Server, n_steps: int, number: int, share: float
) -> None:
    out = tmp_path / "run"
    at = int(share * n_steps)
    done = run_with_signal(children, sets, out, at_a_step(number, at))
    assert done.status == 128 + number, done.err
    assert "Traceback" not in done.err
    assert f"by signal {number}" in done.err
    assert "the same command resumes from there" in done.err
    if told := re.search(
        r"after step (\d+): .*\((.*)\)", " ".join(done.err.split())
    ):  # else between two fits
        assert list_checkpoints(Path(told[2]))[-1].step == int(told[1])
    assert not (out / ".model.pt.lock").exists()
    done = run_with_signal(children, sets, out, "", "--resume", "always")
    assert done.status == 0, done.err
    assert_same_fit(out, whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["device", "stream"])
def test_any_loader_resumes_within_an_epoch(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    settings = replace(TINY, loader=kind)
    whole = trained(sets, tmp_path / "whole", settings=settings)
    real = Stepper.step

    def dying(self: Stepper, batch: Any) -> Any:
        if self.n_done == 9:
            raise ZeroDivisionError
        return real(self, batch)

    with monkeypatch.context() as m:
        m.setattr(Stepper, "step", dying)
        with pytest.raises(ZeroDivisionError):
            trained(
                sets, tmp_path / "run", settings=settings, checkpoints=CheckpointSettings(checkpoint_steps=4)
            )
    assert [c.step for c in list_checkpoints(tmp_path / "run" / "checkpoints")][-1] == 8
    again = trained(sets, tmp_path / "run", settings=settings, resume="always")
    assert "Resumes after step 8, in epoch 2" in again.summary["begin"]
    assert_same(tmp_path / "run", whole)


@pytest.mark.slow
def test_ctrl_c_in_a_notebook_is_an_ordinary_interrupt(
    sets: Path, tmp_path: Path, right: TrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Stepper.step

    def interrupted(self: Stepper, batch: Any) -> Any:
        if self.n_done == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, batch)

    for resume, without in (("never", " without resume='never'"), ("auto", "")):
        with monkeypatch.context() as m:
            m.setattr(Stepper, "step", interrupted)
            with pytest.raises(KeyboardInterrupt) as caught:
                trained(sets, tmp_path / resume, resume=resume)
        (note,) = caught.value.__notes__
        assert f"after step 8: the same command{without} resumes from there" in note
        trained(sets, tmp_path / resume)
        assert_same(tmp_path / resume, right)


@pytest.mark.slow
def test_damaged_checkpoint_repeats_one_epoch(
    sets: Path, tmp_path: Path, right: TrainResult, tried: Callable
) -> None:
    trained(sets, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    newest = list_checkpoints(folder)[-1].path
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="checkpoint skipped"):
        again = trained(sets, tmp_path / "run")
    assert "in epoch 3" in again.summary["begin"]
    assert_same(tmp_path / "run", right)
    tried("S16")


@pytest.mark.slow
def test_a_network_is_fitted_on_all_recordings_and_resumes_in_its_fold(
    sets: Path, tmp_path: Path, whole: TrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_training(*files(sets), settings=TINY) as data:
        n = sum(len(part.rows) for part in data.parts.values())
    choice = whole.summary["choice"]
    assert whole.summary["training"]["recordings"] == choice["recordings"] == n
    assert whole.summary["validation"] is None
    assert len(whole.epochs) == whole.best_epoch == TINY.epochs, "the schedule is trained to its end"
    assert f"{n} recordings in cross-validation" in whole.detector.threshold_from
    assert f"epochs  {TINY.epochs} of {TINY.epochs}, on all recordings" in repr(whole)
    assert "F1" not in repr(whole), "the evaluation has the figures of the same scores"
    held_out = whole.detector.held_out
    assert held_out is not None
    assert whole.epochs[-1].balanced_accuracy == pytest.approx(
        leak_metrics(held_out.truth, held_out.score, whole.detector.threshold)["balanced_accuracy"]
    )
    real, steps = Stepper.step, list[int]()

    def dying(self: Stepper, batch: Any) -> Any:
        if len(steps) == last:
            raise ZeroDivisionError
        steps.append(self.n_done)
        return real(self, batch)

    monkeypatch.setattr(Stepper, "step", dying)
    every = CheckpointSettings(checkpoint_steps=1, fsync=False)
    last = 40  # in the third of five folds
    with pytest.raises(ZeroDivisionError):
        fitted(sets, tmp_path / "run", checkpoints=every)
    last = -1
    kept = tmp_path / "run" / "folds"
    strange, other, notes = (kept / name for name in (f"cnn-{'0' * 32}", f"cnn-{'1' * 32}.npy", "notes.npy"))
    strange.mkdir()
    for path in (strange / "x", other, notes):
        path.write_bytes(b"of other settings")
    fitted(sets, tmp_path / "run", checkpoints=every)
    assert [notes.exists(), other.exists()] == [True, False], "only fits of other settings are removed"
    assert all(later in (0, step + 1) for step, later in pairwise(steps)), (
        "the fold goes on with its next step"
    )
    assert steps.count(0) == 6, "five folds and the last fit begin once"
    assert not [p for p in kept.iterdir() if p.is_dir()]
    assert_same_fit(tmp_path / "run", whole)
    (outside := tmp_path / "outside").mkdir()
    shutil.move(next(kept.glob("cnn-*.npy")), moved := outside / f"cnn-{'2' * 32}.npy")
    shutil.rmtree(kept)
    kept.symlink_to(outside)
    folds.remove_fits(kept)
    assert moved.exists(), "what a link leads to is not removed"


@pytest.mark.slow
def test_folds_of_many_recordings_must_not_take_too_long(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(folds, "MOST_FOR_NETWORKS", 20)
    told = {1: "held out once to choose the threshold", 5: "5 folds and a fit on all recordings: about"}
    for n_folds, limit_s in ((1, 0.0), (5, 3600.0)):
        monkeypatch.setattr(folds, "MOST_FOLDS_S", limit_s)
        caplog.clear()
        found = fitted(sets, tmp_path / told[n_folds][:1], settings=replace(TINY, epochs=1), progress="log")
        assert told[n_folds] in caplog.text
        choice = found.summary["choice"]
        assert choice["folds"] == n_folds
        assert (choice["recordings"] < found.summary["training"]["recordings"]) == (n_folds == 1)


# ---- beginning anew, refusing --------------------------------------------------------------------------------------


def interrupted_after_an_epoch(sets: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Stepper.step

    def dying(self: Stepper, batch: Any) -> Any:
        if self.n_done == 7:
            raise ZeroDivisionError
        return real(self, batch)

    with monkeypatch.context() as m:
        m.setattr(Stepper, "step", dying)
        with pytest.raises(ZeroDivisionError):
            trained(sets, out)


@pytest.mark.slow
def test_other_training_is_refused_or_started_over(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: TrainResult
) -> None:
    out = tmp_path / "run"
    interrupted_after_an_epoch(sets, out, monkeypatch)
    before = (out / "checkpoints" / "best.pt").read_bytes()
    with raises("other-training", UsageError, path=out, found="learning_rate=0.01 then, 0.02 now"):
        trained(sets, out, settings=replace(TINY, learning_rate=0.02))
    with raises("other-training", UsageError, says="another task"):
        trained(sets, out, kind="binary")
    with raises("other-training", UsageError, found="other validation data"):
        train_with_validation(
            files(sets)[0], sets / "TESTING_DATASET.H5", out=out, settings=TINY, progress=False
        )
    foreign = save_checkpoint(out / "checkpoints", {"step": 999}, 999, sync=False)
    with raises("not-a-checkpoint", DataError, path=foreign.path):
        trained(sets, out)
    foreign.path.unlink()
    assert (out / "checkpoints" / "best.pt").read_bytes() == before, "nothing was thrown away"
    trained(
        sets, out, settings=replace(TINY, profile_every=3, preload_to_ram=False)
    )  # what changes no weight changes nothing
    shutil.copy(right.model_path, out / "model.pt")
    anew = trained(sets, out, settings=replace(TINY, epochs=1), resume="never")
    assert anew.summary["begin"].startswith("Starts with epoch 1")
    with raises("nothing-to-resume", DataError):
        fitted(sets, tmp_path / "new", resume="always")


def test_finished_training_is_not_repeated(sets: Path, tmp_path: Path, right: TrainResult) -> None:
    out = tmp_path / "run"
    shutil.copytree(right.model_path.parent, out)
    (out / "model.pt").unlink()
    again = trained(sets, out)
    assert "nothing to do" in again.summary["begin"]
    assert_same(out, right)


def test_history_behind_the_last_checkpoint_is_completed(
    sets: Path, tmp_path: Path, right: TrainResult
) -> None:
    "Killed between the two; the training is over."
    for n_epochs in (0, 2):
        shutil.copytree(right.model_path.parent, out := tmp_path / f"{n_epochs}")
        history = out / "history.csv"
        written = history.read_bytes()
        if n_epochs:
            history.write_bytes(b"".join(written.splitlines(keepends=True)[: 1 + n_epochs]))
        else:
            history.unlink()
        for name in ("model.pt", "summary.json"):
            (out / name).unlink()
        assert "nothing to do" in trained(sets, out).summary["begin"]
        assert history.read_bytes() == written


def test_a_finished_model_is_replaced_only_where_that_is_asked_for(
    sets: Path, tmp_path: Path, right: TrainResult
) -> None:
    out, fewer = tmp_path / "run", replace(TINY, epochs=1)
    shutil.copytree(right.model_path.parent, out)
    with raises("other-training", UsageError, path=out, found="epochs=3 then, 1 now"):
        trained(sets, out, settings=fewer)
    shutil.rmtree(out / "checkpoints")
    with raises("model-exists", UsageError, path=out):
        fitted(sets, out, settings=fewer)
    assert_same(out, right)
    assert (
        trained(sets, out, settings=fewer, resume="never").summary["begin"].startswith("Starts with epoch 1")
    )


def test_the_decision_is_made_on_the_device_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: Any = SimpleNamespace(
        best_figures=object(),
        stepper=SimpleNamespace(device=torch.device("cuda:1")),
        data=SimpleNamespace(validation=object()),
    )
    devices = []

    def with_validation(*given: Any) -> None:
        devices.append(given[-1])
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.states, "detector_of", lambda *_, **__: None)
    monkeypatch.setattr(loop, "with_validation", with_validation)
    with pytest.raises(KeyboardInterrupt):
        loop.finish_training(loop.TrainingRun(state, tmp_path, CheckpointSettings()), "")
    assert devices == ["cuda:1"]


def test_after_epoch_is_called_after_the_checkpoint(sets: Path, tmp_path: Path, right: TrainResult) -> None:
    told: list[EpochFigures] = []

    def after(figures: EpochFigures) -> None:
        told.append(figures)
        assert len((tmp_path / "run" / "history.csv").read_text().splitlines()) == 1 + len(told)
        if len(told) == 2:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError):
        trained(sets, tmp_path / "run", after_epoch=after)
    assert [e.epoch for e in told] == [1, 2]
    assert not (tmp_path / "run" / "model.pt").exists()
    assert_same(tmp_path / "run", trained(sets, tmp_path / "run"))
    assert_same(tmp_path / "run", right)


def test_one_training_at_a_time(sets: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        OutputLock(tmp_path / "run" / "model.pt"),
        raises("folder-in-use", OutputError, path=tmp_path / "run"),
    ):
        trained(sets, tmp_path / "run")


@each(
    ("options", "code"),
    [
        ({"leak_label": "EAK"}, "unknown-label"),
        ({"leak_label": "leak", "leave_out": ["nothing"]}, "unknown-label"),
        ({"kind": "several"}, "usage"),
        ({"resume": "perhaps"}, "unknown-choice"),
    ],
    ids=str,
)
def test_training_reports_usage_errors_before_work(
    sets: Path, tmp_path: Path, options: dict[str, Any], code: str
) -> None:
    with raises(code, UsageError):
        fitted(sets, tmp_path / "run", **options)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_parts_without_both_labels_are_refused(sets: Path, tmp_path: Path) -> None:
    with lm.open_dataset(files(sets)[0]) as ds:
        leaks, others = (
            np.flatnonzero((ds.labels == ds.class_names.index("LEAK")) == is_leak)
            for is_leak in (True, False)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SplitWarning)
        split = group_split(
            files(sets)[0], shares={"training": 0.5, "validation": 0.5}, allow_leaky_split=True
        )
    no_leak = replace(split, parts={"training": np.arange(len(leaks) + len(others)), "validation": others})
    with raises("one-class", DataError, says="0 leaks in"):
        train(files(sets)[0], split=no_leak, out=tmp_path, settings=TINY, progress=False)
    only_leaks = replace(split, parts={"training": leaks, "validation": np.arange(len(leaks) + len(others))})
    with raises("empty-class", DataError):
        train(files(sets)[0], split=only_leaks, out=tmp_path, settings=TINY, progress=False)
    with raises("given-twice", UsageError):
        train(*files(sets), split=split, out=tmp_path, settings=TINY, progress=False)
    with raises("other-split", UsageError):
        train(sets / "TESTING_DATASET.H5", split=split, out=tmp_path, settings=TINY, progress=False)


def test_non_finite_loss_ends_the_training(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leakmel.detector.train import state as training_state

    real = training_state.EpochSums.add

    def spoilt(self: Any, figures: Any) -> None:
        real(self, replace(figures, loss=figures.loss * (math.nan if spoil else 1)))

    spoil = False
    monkeypatch.setattr(training_state.EpochSums, "add", spoilt)
    trained(sets, tmp_path / "good", settings=replace(TINY, epochs=1))
    spoil = True
    with raises("training-diverged", DataError, says="lower learning_rate"):
        trained(sets, tmp_path / "run")
    assert not (tmp_path / "run" / "model.pt").exists()


def out_of_memory(*args: Any, **named: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


def test_insufficient_memory_for_items_or_evaluation_is_reported(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leakmel.detector.data import segments as loaders
    from leakmel.detector.train import state as training_state

    with monkeypatch.context() as m:
        m.setattr(loaders, "load_items", out_of_memory)
        on_device = replace(TINY, loader="device", preload_to_ram=False)
        with pytest.raises(MachineError, match=r"do not fit into memory.*loader='stream'"):
            trained(sets, tmp_path / "a", settings=on_device)
    monkeypatch.setattr(training_state, "score_rows", out_of_memory)
    with pytest.raises(MachineError, match="too small to score the validation recordings"):
        trained(sets, tmp_path / "b")


def test_out_of_memory_recovery_is_reported(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leakmel.detector.train import step

    real, batches = step.nets.micro_batch_loss, iter([out_of_memory])
    monkeypatch.setattr(step.nets, "micro_batch_loss", lambda *args: next(batches, real)(*args))
    result = trained(sets, tmp_path, settings=replace(TINY, epochs=1))
    assert (result.summary["n_ran_out"], result.summary["micro_batch"]) == (1, TINY.batch_size // 2)


def test_accumulated_batches_are_a_larger_batch(sets: Path, tmp_path: Path) -> None:
    "As many steps as with batches of that size, and the same weights."
    size = TINY.batch_size
    named: dict[str, dict[str, Any]] = {
        "a": {"accumulate_batches": 2},
        "b": {"batch_size": 2 * size, "micro_batch": size},
    }
    a, b = (
        trained(sets, tmp_path / name, settings=replace(TINY, epochs=1, **changes))
        for name, changes in named.items()
    )
    assert [e.step for e in a.epochs] == [e.step for e in b.epochs]
    old, new = (r.detector.classifier.state_dict() for r in (a, b))
    assert all(torch.equal(old[name], new[name]) for name in new)


def test_performance_settings_do_not_change_weights(
    sets: Path, tmp_path: Path, right: TrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Interrupted in the middle of an epoch, and gone on with another value of every setting of SPEED_ONLY."
    changed: dict[str, Any] = {"preload_to_ram": False, "device_fraction": 0.01, "profile_every": 2}
    assert set(changed) == SPEED_ONLY
    assert all(getattr(TINY, name) != value for name, value in changed.items())
    real = Stepper.step

    def interrupted(self: Stepper, batch: Any) -> Any:
        if self.n_done == 9:
            raise KeyError("here")
        return real(self, batch)

    with monkeypatch.context() as m:
        m.setattr(Stepper, "step", interrupted)
        with pytest.raises(KeyError):
            trained(sets, tmp_path, checkpoints=CheckpointSettings(checkpoint_steps=1, fsync=False))
    found = trained(sets, tmp_path, settings=replace(TINY, **changed), resume="always")
    assert found.summary["begin"].startswith("Resumes after step 9")
    a, b = (r.detector.classifier.state_dict() for r in (found, right))
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert [(e.loss, e.grad_norm, e.clipped_share, e.f1) for e in found.epochs] == [
        (e.loss, e.grad_norm, e.clipped_share, e.f1) for e in right.epochs
    ]


def test_gradient_norms_are_recorded(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "Of all steps, before clipping; those that half precision left out do not count."
    from leakmel.detector.train import state as training_state

    real, norms = training_state.EpochSums.add, list[float]()

    def noting(self: Any, figures: Any) -> None:
        if len(norms) == 2:
            figures = replace(figures, grad_norm=torch.tensor(math.inf))
        norms.append(float(figures.grad_norm))
        real(self, figures)

    monkeypatch.setattr(training_state.EpochSums, "add", noting)
    (epoch,) = trained(sets, tmp_path / "a", settings=replace(TINY, epochs=1, clip_norm=0.6)).epochs
    counted = [n for n in norms if math.isfinite(n)]
    n = len(counted)
    assert n == len(norms) - 1
    assert epoch.grad_norm == pytest.approx(sum(counted) / n, rel=1e-6)
    assert 0 < epoch.clipped_share == sum(v > 0.6 for v in counted) / n < 1
    assert rows_of(tmp_path / "a")[0]["grad_norm"] == str(epoch.grad_norm)
    (never,) = trained(sets, tmp_path / "b", settings=replace(TINY, epochs=1, clip_norm=0.0)).epochs
    assert never.clipped_share == 0


def test_without_fsync_only_the_model_is_synced(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "`fsync=False` is for best.pt too."
    waited, real, write = list[str](), os.fsync, os.open
    paths: dict[int, str] = {}

    def opened(path: Any, *args: Any, **named: Any) -> int:
        paths[fd := write(path, *args, **named)] = os.fspath(path)
        return fd

    def noted(fd: int) -> None:
        waited.append(Path(paths[fd]).name)
        real(fd)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", noted)
    one = replace(TINY, epochs=1)
    trained(sets, tmp_path / "a", settings=one)
    assert ".model.pt.new" in waited
    assert not {n for n in waited if n.startswith((".best", ".step", "checkpoints"))}
    waited.clear()
    trained(sets, tmp_path / "b", settings=one, checkpoints=CheckpointSettings())
    assert {".model.pt.new", ".best.pt.new", "checkpoints"} < set(waited)


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_model_has_the_weights_of_the_best_epoch(sets: Path, right: TrainResult) -> None:
    best = right.epochs[right.best_epoch - 1]
    loaded = load_detector(right.model_path)
    with open_training(*files(sets), settings=TINY) as data:
        assert data.validation is not None
        is_leak = data.validation.is_leak
        chosen = None
        for k, e in enumerate(right.epochs, start=1):
            highest = max(e.f1 for e in right.epochs[:k])
            if is_better(e, chosen, highest, int(is_leak.sum())):
                chosen = e
        assert chosen == best
        scores = score_rows(loaded, data.validation)
        p, truth = np.clip(scores.astype(np.float64), 1e-7, 1 - 1e-7), is_leak[:, None]
    assert math.isclose(float(-np.log(np.where(truth, p, 1 - p)).mean()), best.val_loss, rel_tol=1e-6)
    output = vote_scores(scores, loaded.vote, loaded.share) >= loaded.threshold
    tp, fp, fn = (int(np.count_nonzero(c)) for c in (output & is_leak, output & ~is_leak, ~output & is_leak))
    assert math.isclose(2 * tp / max(1, 2 * tp + fp + fn), best.f1) or math.isnan(best.f1)
    for rule in VOTES:
        assert loaded.thresholds[rule] == best_threshold(is_leak, vote_scores(scores, rule, loaded.share))
    assert "validation" in loaded.threshold_from


def test_record_describes_the_training(right: TrainResult) -> None:
    record = load_detector(right.model_path).record
    assert record["settings"]["channels"] == [4, 8]
    assert record["best_epoch"] == right.best_epoch
    assert record["split"]["leaky"] is False
    assert record["training"]["recordings"] == sum(record["training"]["by_class"].values())
    assert right.summary["f1"] == right.epochs[right.best_epoch - 1].f1
    assert json.loads((right.model_path.parent / "summary.json").read_text())["ok"] is True
    assert right.history.index.tolist() == [1, 2, 3]
    assert "F1" in repr(right)


def test_without_validation_the_last_epoch_and_default_threshold_are_used(sets: Path, tmp_path: Path) -> None:
    result = train_with_validation(
        files(sets)[0],
        out=tmp_path,
        settings=replace(TINY, epochs=2, early_stop_epochs=1),
        device="cpu",
        progress=False,
    )
    assert (len(result.epochs), result.best_epoch) == (2, 2)
    assert set(result.detector.thresholds.values()) == {0.5}
    assert result.detector.threshold_from == UNCHOSEN
    assert math.isnan(result.epochs[-1].f1)
    assert result.summary["f1"] is None
    assert "F1" not in repr(result.epochs[-1])
    assert "not known" in repr(result)


@pytest.mark.slow
def test_leaky_split_is_warned_of_and_stored_in_the_model(sets: Path, tmp_path: Path) -> None:
    path = files(sets)[0]
    with pytest.warns(LeakySplitWarning, match="LEAKY SPLIT"):
        result = train_with_validation(
            path, path, out=tmp_path / "a", settings=replace(TINY, epochs=1), device="cpu", progress=False
        )
    assert repr(result).lstrip().startswith("BEWARE  LEAKY SPLIT")
    split = load_detector(result.model_path).record["split"]
    assert split["leaky"]
    assert split["stamp"].startswith("LEAKY SPLIT")
    allowed = train_with_validation(
        path,
        path,
        out=tmp_path / "b",
        settings=replace(TINY, epochs=1),
        device="cpu",
        progress=False,
        allow_leaky_split=True,
    )
    assert load_detector(allowed.model_path).record["split"]["stamp"] == split["stamp"]


@pytest.mark.slow
def test_early_stopping_waits_for_early_stop_epochs(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    f1 = iter([0.5, 0.7, 0.7, 0.6, 0.7, 0.9])
    from leakmel.detector.train import state as training_state

    real = training_state.validation_figures
    losses = iter([0.5, 0.3, 0.5, 0.6, 0.7, 0.1])  # means of three: 0.5, 0.4, 0.43, 0.47, 0.6

    def staged(scores: np.ndarray, is_leak: np.ndarray, chosen: DecisionRule) -> dict[str, float]:
        return real(scores, is_leak, chosen) | {"f1": next(f1), "val_loss": next(losses)}

    monkeypatch.setattr(training_state, "validation_figures", staged)
    result = trained(sets, tmp_path, settings=replace(TINY, epochs=6, early_stop_epochs=3))
    assert len(result.epochs) == 5
    assert result.best_epoch == 2, "of F1 that are as good as equal the one with the lowest loss"
    assert result.summary["stopped_early"]


def test_split_by_sensor_replaces_folder_splits(sets: Path, tmp_path: Path) -> None:
    sources = [*files(sets), sets / "TESTING_DATASET.H5"]
    split = group_split(sources, "sensor", seed=1)
    result = train_with_validation(
        sources, split=split, out=tmp_path, settings=replace(TINY, epochs=1), device="cpu", progress=False
    )
    assert result.summary["training"]["recordings"] == len(split.parts["training"])
    assert result.summary["validation"]["recordings"] == len(split.parts["validation"])
    assert "by sensor" in result.summary["split"]["method"]


def test_every_figure_of_an_epoch_is_filled(right: TrainResult) -> None:
    for e in right.epochs:
        assert 0 < e.loss < 10
        assert 0 <= e.segment_accuracy <= 1
        assert e.n_batches > 3
        assert e.seconds >= e.learn_s > 0
        assert e.batches_per_s > 0
        assert e.compute_ms > 0
        assert e.loader_mean_ms <= e.loader_max_ms
        assert (e.warm_up_s > 0) == (e.epoch == 1)
        assert math.isnan(e.allocated_bytes), "a CPU has no memory of a device"
        assert 1e7 < e.mean_rss_bytes <= e.peak_rss_bytes < 1e12
        assert math.isnan(e.mean_gpu_percent) == math.isnan(e.peak_vram_bytes)
    assert {"mean_rss_bytes", "peak_rss_bytes", "mean_gpu_percent", "peak_vram_bytes"} <= set(right.history)
    assert isinstance(right.epochs[0], EpochFigures)


def test_the_parts_of_an_epoch_are_its_time(right: TrainResult) -> None:
    "On the CPU, where each batch is timed: the rest is what the parts leave."
    parts = epoch_times(right.epochs)
    assert parts[["forward and backward", "optimiser", "evaluation"]].gt(0).all(axis=None)
    assert parts["host to device"].eq(0).all()
    assert parts["warm-up"].gt(0).tolist() == [True, *[False] * (len(parts) - 1)]
    assert np.allclose(parts.sum(axis=1), right.history["seconds"], rtol=0.2)
    figures = right.plots()
    assert list(figures) == ["learning curves", "times", "machine"]
    assert sum(sum(bar.y) for bar in figures["times"].data) == pytest.approx(parts.to_numpy().sum(), rel=1e-3)
    assert bottleneck_text(right.epochs) in repr(right)


def test_use_of_the_machine_is_that_of_each_epoch(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Samples are dropped after each epoch, so a long training does not keep them; a sensor without a value is no figure."
    n_held = list[int]()
    n_taken = count(1)

    def take(sampler: Sampler) -> dict[str, float | None]:
        return dict.fromkeys(SAMPLE_KEYS) | {"rss_bytes": 1e6 * next(n_taken), "vram_bytes": 5e9}

    monkeypatch.setattr(Sampler, "take", take)
    monkeypatch.setattr(loop, "SAMPLE_S", 0.005)
    real = loop.states.end_epoch

    def counted(state: Any, *rest: Any) -> Any:
        figures = real(state, *rest)
        n_held.append(len(state.timeline.samples))
        return figures

    monkeypatch.setattr(loop.states, "end_epoch", counted)
    result = trained(sets, tmp_path)
    assert len(n_held) == 3
    assert max(n_held) <= 3, "the last one, and what came while it was counted"
    peaks = [e.peak_rss_bytes for e in result.epochs]
    assert peaks == sorted(set(peaks)), "each epoch has its own"
    assert all(e.mean_rss_bytes < e.peak_rss_bytes for e in result.epochs)
    assert {e.peak_vram_bytes for e in result.epochs} == {5e9}
    assert all(math.isnan(e.mean_gpu_percent) for e in result.epochs)


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_command(sets: Path, tmp_path: Path, whole: TrainResult, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run"
    assert main(["train", str(sets), "--out", str(out), *WORDS, "--full"]) == 0
    output = capsys.readouterr()
    assert "on all recordings" in output.out
    assert max(len(line) for line in output.out.splitlines() if str(tmp_path) not in line) <= 100
    assert_same_fit(out, whole)
    assert main(["train", str(sets), "--out", str(out), *WORDS, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["ok"] is True
    assert "nothing to do" in body["begin"]
    assert body["evaluation"] is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::leakmel.detector.data.splits.SplitWarning")
def test_command_evaluates_on_the_test_set(sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [w for w in WORDS if w != "--no-evaluation"]
    assert main(["train", str(sets), "--out", str(tmp_path / "run"), *words, "--epochs", "1", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["evaluation"]
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"].keys()
        == body["evaluation"].keys()
    )


@each(
    ("words", "status", "message"),
    [
        (["--leak-label", "EAK"], 2, "the label does not exist"),
        (["--epochs", "0"], 2, "epochs"),
        (["--channels", "a,b"], 2, "whole numbers"),
        (["--epoch", "3"], 2, "epochs"),
        (["--validation", "nowhere.h5"], 1, "the data set does not exist"),
        (["--resume", "always"], 1, "no training to resume"),
    ],
    ids=str,
)
def test_command_refuses(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture, words: list[str], status: int, message: str
) -> None:
    assert main(["train", str(sets), "--out", str(tmp_path / "run"), *WORDS, *words]) == status
    assert message in capsys.readouterr().err
