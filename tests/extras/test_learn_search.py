"Search of settings: repeatable, resumed after kills, pruned, with named errors, and without access to test recordings."

import csv
import inspect
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Server, server
from conftest import need
from each import each
from errors import raises
from tiny_training import at_a_moment, at_every_moment, files, loaded, n_moments, tiny, tiny_words

from leakmel.cli import main
from leakmel.core.errors import DataError, MachineError, OutputError, UsageError
from leakmel.core.files import OutputLock
from leakmel.detector.data.splits import LeakySplitWarning, group_split
from leakmel.detector.model.detector import load_detector
from leakmel.detector.model.settings import CheckpointSettings, TrainSettings
from leakmel.detector.train.loop import train, train_with_validation
from leakmel.extras import search as module
from leakmel.extras.search import (
    DEFAULT_SPACE,
    SearchResult,
    Trial,
    best_of,
    read_space,
    read_state,
    search,
    trial_settings,
    verdict,
    write_state,
)

pytestmark = pytest.mark.usefixtures("one_thread", "with_optuna")
TINY = tiny(2)
SPACE = {
    "learning_rate": [1e-3, 0.1],
    "dropout": [0.0, 0.6],
    "channels": [[4, 8], [2, 4]],
    "band_mask_width": [0, 4],
}
WORDS = [*tiny_words(2), "--space", json.dumps(SPACE), "--again", "1", "--no-fsync"]
LAST = 4  # trials of the delayed_signals search
MIDDLE = 170  # a moment (see MOMENTS) in the middle of it
STAGED = replace(TINY, epochs=1, epoch_share=0.1, channels=(1,))  # where figures are staged, a step is enough


@pytest.fixture(scope="module")
def with_optuna() -> None:
    from importlib.util import find_spec

    need(find_spec("optuna"), "optuna")


@pytest.fixture(scope="module")
def sets(small_sets: Path) -> Path:
    "Data sets of a small synthetic network."
    return small_sets


def searched(sets: Path, out: Path, **options: Any) -> SearchResult:
    "A tiny search."
    given: dict[str, Any] = {
        "out": out,
        "settings": TINY,
        "space": SPACE,
        "trials": LAST,
        "again": 1,
        "device": "cpu",
        "progress": False,
        "checkpoints": CheckpointSettings(fsync=False),
    }
    return search(*files(sets), **given | options)


@pytest.fixture(scope="module")
def right(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    "An delayed_signals search."
    return searched(sets, tmp_path_factory.mktemp("right") / "run")


def stored(out: Path, running: bool = False) -> list[Trial]:
    "The finished or the running trials of a folder, without other seeds."
    found = read_state(out)
    assert found is not None
    return [t for t in found[1] if t.seed is None and (t.state == "running") == running]


def plain(out: Path) -> list[tuple]:
    "The trials of a folder, times aside."
    return [(t.number, t.state, t.changes, t.f1s, t.val_losses) for t in stored(out)]


def assert_same(out: Path, right: SearchResult) -> None:
    "The same trials, seeds and weights."
    assert plain(out) == plain(right.folder)
    a, b = (load_detector(p / "model.pt") for p in (out, right.folder))
    assert all(
        np.array_equal(x, y)
        for x, y in zip(a.classifier.state_dict().values(), b.classifier.state_dict().values(), strict=True)
    )
    told = [json.loads((p / "summary.json").read_bytes()) for p in (out, right.folder)]
    for name in ("trial", "f1", "f1_of_base", "other_seeds", "verdict", "changes"):
        assert told[0][name] == told[1][name], name


class Staged:
    "Simulated trainings with given results."

    def __init__(self, monkeypatch: pytest.MonkeyPatch, figures: Callable[[TrainSettings, int], float]):
        from leakmel.detector.train import state as training_state

        real = training_state.end_epoch
        self.epochs = 0

        def staged(state: Any, *args: Any) -> Any:
            state.stepper.net.eval()
            e = replace(real(state, *args), f1=figures(state.settings, len(state.epochs)), val_loss=0.5)
            state.epochs[-1] = e
            self.epochs += 1
            return e

        monkeypatch.setattr("leakmel.detector.train.state.end_epoch", staged)
        monkeypatch.setattr("leakmel.detector.train.loop.update_card", lambda *args, **named: None)


# ---- what it does --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_first_trial_has_the_base_settings(sets: Path, right: SearchResult, tmp_path: Path) -> None:
    assert right.base.changes == {
        "learning_rate": 0.01,
        "dropout": 0.3,
        "channels": [4, 8],
        "band_mask_width": 6,
    }, "outside of a range or not"
    alone = train_with_validation(
        *files(sets), out=tmp_path / "run", settings=TINY, device="cpu", progress=False
    )
    assert right.base.f1s == tuple(e.f1 for e in alone.epochs)
    assert len(right.trials) == LAST
    for t in right.trials[1:]:
        assert 1e-3 <= t.changes["learning_rate"] <= 0.1
        assert 0 <= t.changes["dropout"] <= 0.6
        assert t.changes["channels"] in ([4, 8], [2, 4])
        assert t.changes["band_mask_width"] in range(5)
    assert len({t.changes["learning_rate"] for t in right.trials}) == LAST


@pytest.mark.long  # test_command makes the same search by the command line
def test_the_same_search_makes_the_same_trials(sets: Path, right: SearchResult, tmp_path: Path) -> None:
    searched(sets, tmp_path / "run")
    assert_same(tmp_path / "run", right)


@pytest.mark.slow
def test_train_with_the_settings_that_were_found_makes_the_model(
    sets: Path, right: SearchResult, tmp_path: Path
) -> None:
    again = train(*files(sets), out=tmp_path / "run", settings=right.settings, device="cpu", progress=False)
    found = load_detector(right.model_path)
    assert all(
        np.array_equal(x, y)
        for x, y in zip(
            again.detector.classifier.state_dict().values(),
            found.classifier.state_dict().values(),
            strict=True,
        )
    )
    assert (found.thresholds, found.vote) == (again.detector.thresholds, again.detector.vote)
    assert found.record["search"]["trials"] == LAST
    assert found.record["search"]["trial"] == right.best.number
    assert "too optimistic" in found.record["search"]["note"]
    assert found.record["best_epoch"] == right.settings.epochs  # nothing is held back
    assert found.held_out is not None
    promised, other = found.evaluations[0], again.detector.evaluations[0]
    assert (promised.method, promised.auc) == (other.method, other.auc)
    assert (promised.kind, promised.recordings) == ("cross-validation", len(found.held_out))
    assert "settings were chosen on some of these recordings" in promised.cautions[-1]


@pytest.mark.slow
def test_search_folder_contents(right: SearchResult) -> None:
    out = right.folder
    assert sorted(p.name for p in out.iterdir()) == [
        "fitted",
        "model.pt",
        "report.html",
        "search.json",
        "summary.json",
        "trials",
        "trials.csv",
    ]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count('class="plotly-figure"') == 1
    assert "<script src" not in page
    kept = {
        p.parent.name: sorted(q.name for q in p.parent.iterdir())
        for p in (out / "trials").glob("*/history.csv")
    }
    assert kept == {f"{t.number:04d}": ["history.csv"] for t in right.trials}
    assert [p.name for p in (out / "fitted").iterdir()] == [right.best.name]
    with open(out / "trials.csv", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    assert [int(r["number"]) for r in rows] == list(range(LAST))
    assert [float(r["f1"]) for r in rows] == [t.f1 for t in right.trials]
    assert rows[0]["channels"] == "4,8"
    assert all(float(r["seconds"]) > 0 and int(r["epochs"]) == 2 for r in rows)
    summary = json.loads((out / "summary.json").read_bytes())
    assert summary["ok"] is True
    assert (summary["f1"], summary["f1_of_base"]) == (right.best.f1, right.base.f1)
    assert trial_settings(TINY, summary["changes"]) == right.settings


def test_result_shows_base_and_best_settings(right: SearchResult) -> None:
    text = repr(right)
    assert f"F1 {right.base.f1:.4f}: learning_rate 0.01" in text
    assert f"{LAST} of {LAST}" in text
    assert "lm.evaluate" in text
    assert text.count("\n") + 1 == right._repr_html_().count("<tr>")
    assert right.table().index.tolist() == list(range(LAST))
    figure = right.plots()["history"]
    assert figure.layout.yaxis.title.text == "F1 of recordings"


def test_other_seeds_are_tried_for_both(right: SearchResult) -> None:
    if right.best.number == 0:
        pytest.fail("the staged network finds nothing better: choose another seed of TINY")
    assert [(a.number, a.seed) for a in right.again] == [(0, 4), (right.best.number, 4)]
    assert right.summary["other_seeds"]["seeds"] == 1
    assert right.summary["verdict"] in repr(right)
    assert "F1 with other seeds (1): " in repr(right)
    seeds = {"seeds": 2, "base": [None, None], "best": [0.5, 0.75]}
    text = repr(replace(right, summary=right.summary | {"other_seeds": seeds}))
    assert (
        "F1 with other seeds (2): undefined for the initial settings, 0.5000 to 0.7500 for the best" in text
    )


@each(
    ("before", "after", "better"),
    [
        ([0.8, 0.82], [0.83, 0.9], True),
        ([0.8, 0.83], [0.83, 0.9], False),
        ([0.9, 0.9], [0.7, 0.8], False),
        ([0.8, 0.8], [math.nan, 0.9], False),
        ([math.nan, 0.8], [0.9, 0.95], False),
        ([0.8], [0.9], None),
        ([], [], None),
    ],
)
def test_verdict(before: list[float], after: list[float], better: bool | None) -> None:
    best = Trial(3, "complete", {}, (0.95,), (0.1,), 1.0)
    others = [[replace(best, f1s=(f,), seed=k) for k, f in enumerate(f1s)] for f1s in (before, after)]
    told, text = verdict(best, *others)
    assert told is better
    assert ("not shown to be better" in text) == (better is False)
    if better:
        assert "once in 6 searches" in text
    assert verdict(replace(best, number=0), [], [])[0] is False


# ---- pruning, failing, time ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_worse_trials_are_pruned(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = Staged(monkeypatch, lambda s, n: 0.9 - abs(s.dropout - 0.3) + 0.01 * n)
    settings = replace(STAGED, epochs=4)
    result = searched(
        sets,
        tmp_path / "run",
        settings=settings,
        space={"dropout": [0.0, 0.9]},
        trials=8,
        again=0,
        prune_after=2,
        prune_epochs=2,
    )
    pruned = [t for t in result.trials if t.state == "pruned"]
    assert pruned
    assert {len(t.f1s) for t in pruned} <= {2, 3}
    assert all(len(t.f1s) == 4 for t in result.trials if t.state == "complete")
    assert staged.epochs == sum(len(t.f1s) for t in result.trials) + 6 * 4  # five folds and the last fit
    for t in pruned:  # by hand: its best lies below the median of the complete ones before it
        k = len(t.f1s)
        assert max(t.objectives) < np.median(
            [max(b.objectives[k - 1 : k]) for b in result.trials[: t.number] if b.state == "complete"]
        )
        assert sorted(p.name for p in (tmp_path / "run" / "trials" / f"{t.number:04d}").iterdir()) == [
            "history.csv"
        ]
    assert "3 pruned" in repr(result)
    whole = searched(
        sets,
        tmp_path / "whole",
        settings=settings,
        space={"dropout": [0.0, 0.9]},
        trials=5,
        again=0,
        prune_after=0,
    )
    assert {t.state for t in whole.trials} == {"complete"}


@pytest.mark.slow
def test_failed_trial_is_recorded_and_the_search_continues(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def astray(s: TrainSettings, n: int) -> float:
        if s.dropout > limit:
            raise DataError("the training went astray")
        return 0.5

    limit = 0.5
    Staged(monkeypatch, astray)
    given: dict[str, Any] = {"space": {"dropout": [0.0, 0.9]}, "again": 0, "settings": STAGED}
    result = searched(sets, tmp_path / "run", **given, trials=8)
    failed = [t for t in result.trials if t.state == "failed"]
    assert failed
    assert all(t.changes["dropout"] > 0.5 and "astray" in t.error for t in failed)
    limit = -1.0
    with pytest.raises(DataError, match="astray"):
        searched(sets, tmp_path / "all", **given)
    limit = 0.3
    with pytest.raises(DataError, match="astray"):
        searched(sets, tmp_path / "most", **given | {"space": {"dropout": [0.31, 0.9]}}, trials=30)
    assert [t.state for t in stored(tmp_path / "most")] == ["complete", *["failed"] * 4]


@pytest.mark.slow
def test_short_calls_still_run_trials(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "An hour each night: time for other seeds had been set aside until none was left, and no call made a trial."
    Staged(monkeypatch, lambda s, n: 0.5 + s.dropout / 10)
    given: dict[str, Any] = {"space": {"dropout": [0.3, 0.9]}, "again": 2, "settings": STAGED}
    searched(sets, tmp_path / "run", **given, trials=1)
    noted = tmp_path / "run" / "search.json"
    values = json.loads(noted.read_bytes())
    values["trials"][0]["seconds"] = 1000.0
    del values["digest"]
    noted.write_text(json.dumps(values))
    right, real = module.create_study, time.monotonic
    late = [0.0]

    def slow(*given: Any, **pruning: Any) -> Any:
        if not pruning:  # to propose
            late[0] += 1000.0
        return right(*given, **pruning)

    with monkeypatch.context() as m:
        m.setattr(module, "create_study", slow)
        m.setattr(module.time, "monotonic", lambda: real() + late[0])
        part = searched(sets, tmp_path / "run", **given, trials=6, hours=0.5)
    assert len(part.trials) == 3
    assert part.again == (), "their turn is that of the call that comes to the last trial"
    done = searched(sets, tmp_path / "run", **given, trials=6, hours=0.5)
    assert (len(done.trials), len(done.again)) == (6, 4)


@pytest.mark.slow
def test_time_limit_and_more_trials_are_the_same_search(
    sets: Path, right: SearchResult, tmp_path: Path
) -> None:
    short = searched(sets, tmp_path / "run", hours=1e-9)
    assert len(short.trials) == 1, "the first one always comes to its end"
    assert f"1 of {LAST}" in repr(short)
    assert short.is_better is False
    searched(sets, tmp_path / "run", trials=2, again=0)
    searched(sets, tmp_path / "run")
    assert_same(tmp_path / "run", right)
    before = (tmp_path / "run" / "search.json").read_bytes()
    done = searched(sets, tmp_path / "run", trials=2)
    assert len(done.trials) == LAST, "what was tried is not forgotten"
    assert (tmp_path / "run" / "search.json").read_bytes() == before


# ---- on a cluster ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pruning_compares_with_the_trials_that_were_finished(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Staged(monkeypatch, lambda s, n: 0.9 - abs(s.dropout - 0.3) + 0.01 * n)
    given: dict[str, Any] = {
        "settings": replace(STAGED, epochs=4),
        "space": {"dropout": [0.0, 0.9]},
        "trials": 8,
        "again": 0,
        "prune_after": 2,
    }
    with ThreadPoolExecutor(1) as pool:
        result = searched(sets, tmp_path / "run", cluster=pool, **given)
    assert "pruned" in {t.state for t in result.trials}
    searched(sets, tmp_path / "alone", **given)
    assert plain(tmp_path / "run") == plain(tmp_path / "alone")


@pytest.mark.slow
def test_processes_train_several_trials(
    sets: Path, right: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        result = searched(sets, tmp_path / "run", cluster=pool)
        assert [t.number for t in result.trials] == list(range(LAST))
        assert plain(tmp_path / "run")[0] == plain(right.folder)[0], "the first one does not depend on others"
        assert len({t.changes["learning_rate"] for t in result.trials}) == LAST
        assert len(result.again) == (2 if result.best.number else 0)
        before = (tmp_path / "run" / "search.json").read_bytes()
        searched(sets, tmp_path / "run", cluster=pool)
    assert (tmp_path / "run" / "search.json").read_bytes() == before
    assert not stored(tmp_path / "run", running=True)
    alone = train_with_validation(
        *files(sets), out=tmp_path / "one", settings=result.settings, device="cpu", progress=False
    )
    assert result.best.f1s == tuple(e.f1 for e in alone.epochs), "training is the same in each process"


class DeadlyPool(ProcessPoolExecutor):
    "A process that is killed when it begins a trial."

    def submit(self, function: Any, /, *args: Any, **more: Any) -> Any:
        return super().submit(kill if args[0].number == 2 else function, *args)


def kill(*args: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingPool(ThreadPoolExecutor):
    "As a pool of one process that was killed when it began a trial."

    def submit(self, function: Any, /, *args: Any, **more: Any) -> Any:
        return super().submit(break_pool if args[0].number == 2 else function, *args)


@pytest.mark.parametrize(
    "lost", ["simulated", pytest.param("killed", marks=(pytest.mark.slow, pytest.mark.long))]
)
def test_trial_of_a_killed_process_fails_and_the_search_is_resumed(
    sets: Path, right: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pool: Executor = DeadlyPool(1, get_context("spawn")) if lost == "killed" else DyingPool(1)
    with pool, raises("worker-died", MachineError, says="leakmel-trial-2"):
        searched(sets, tmp_path / "run", cluster=pool, again=0)
    trials = stored(tmp_path / "run")
    assert [t.state for t in trials] == ["complete", "complete", "failed"]
    assert "leakmel-trial-2" in trials[2].error
    with ThreadPoolExecutor(1) as other:
        result = searched(sets, tmp_path / "run", cluster=other, again=0)
    assert [t.state for t in result.trials] == ["complete", "complete", "failed", "complete"]
    assert plain(tmp_path / "run")[:2] == plain(right.folder)[:2]


class BrokenPool(ThreadPoolExecutor):
    "As a pool of processes of which one was killed: both running tasks are lost."

    def submit(self, function: Any, /, *args: Any, **more: Any) -> Any:
        return super().submit(function if args[0].number == 0 else break_pool, *args)


def break_pool(*args: Any) -> None:
    raise BrokenProcessPool("a process was terminated")


@pytest.mark.slow
def test_trials_of_a_broken_pool_are_repeated_if_several_were_running(sets: Path, tmp_path: Path) -> None:
    with BrokenPool(2) as pool, raises("worker-died", MachineError):
        searched(sets, tmp_path / "run", cluster=pool, again=0, settings=STAGED)
    assert [t.number for t in stored(tmp_path / "run")] == [0]
    assert [t.number for t in stored(tmp_path / "run", running=True)] == [1, 2]
    assert list((tmp_path / "run").glob(".*.stop")), "trainings that go on end after their epoch"
    with BrokenPool(1) as pool, raises("worker-died", MachineError, says="leakmel-trial-1"):
        searched(sets, tmp_path / "run", cluster=pool, again=0, settings=STAGED)
    assert [t.state for t in stored(tmp_path / "run")] == ["complete", "failed"], "it was lost alone"
    with ThreadPoolExecutor(2) as pool:
        result = searched(sets, tmp_path / "run", cluster=pool, again=0, settings=STAGED)
    assert [t.state for t in result.trials] == ["complete", "failed", "complete", "complete"]
    assert not list((tmp_path / "run").glob(".*.stop"))


class KilledWorker(Exception):
    "As Dask raises it after several workers died with one task."


def die(*args: Any) -> None:
    raise KilledWorker("node3")


class RetryingPool(ThreadPoolExecutor):
    "As Dask: a task whose worker died is given to another one."

    def submit(self, function: Any, /, *args: Any, **more: Any) -> Any:
        return super().submit(partial(twice, function) if args[0].number == 1 else function, *args)


def twice(function: Any, task: Any, *args: Any) -> Any:
    from leakmel.detector.train.step import Stepper

    real = Stepper.step

    def dying(self: Stepper, batch: Any) -> Any:
        if self.n_done == 8:
            raise KilledWorker("node3")
        return real(self, batch)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(Stepper, "step", dying)
        with pytest.raises(KilledWorker):
            function(task, *args)
    return function(task, *args)


@pytest.mark.slow
def test_task_of_a_lost_worker_is_continued_by_another(
    sets: Path, right: SearchResult, tmp_path: Path
) -> None:
    with RetryingPool(1) as pool:
        searched(sets, tmp_path / "run", cluster=pool)
    assert_same(tmp_path / "run", right)
    assert sorted(os.listdir(tmp_path / "run")) == sorted(os.listdir(right.folder))


class LosingPool(ThreadPoolExecutor):
    "As Dask: the task is lost, and other tasks are accepted."

    def submit(self, function: Any, /, *args: Any, **more: Any) -> Any:
        return super().submit(die if args[0].number == 2 else function, *args)


@pytest.mark.slow
def test_search_goes_on_after_a_trial_was_lost(sets: Path, tmp_path: Path) -> None:
    with LosingPool(2) as pool:
        result = searched(sets, tmp_path / "run", cluster=pool, again=0, settings=STAGED)
    assert [t.state for t in result.trials] == ["complete", "complete", "failed", "complete"]
    assert "node3" in result.trials[2].error


def arm() -> None:
    "Let this process die when it begins the second trial."
    from leakmel.extras import search as module

    right = module._train

    def deadly(trial: Trial, *more: Any) -> Any:
        return kill() if trial.number == 1 else right(trial, *more)

    module._train = deadly  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.long  # by default: the test above; and test_cross_validation.py gives its tasks to Dask in the same way
def test_dask_continues_the_trial_of_a_killed_worker(sets: Path, right: SearchResult, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=50,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        pids = client.run(os.getpid)
        client.run(arm)
        searched(sets, tmp_path / "run", cluster=client)
        assert client.run(os.getpid) != pids
    assert_same(tmp_path / "run", right)


def copy_without_a_trial(right: SearchResult, out: Path) -> None:
    "The folder of a search that ended while it trained its third trial, as a cluster leaves it."
    shutil.copytree(right.folder, out)
    shutil.rmtree(out / "trials" / "0002")
    noted = out / "search.json"
    values = json.loads(noted.read_bytes())
    values["trials"][2] |= {"state": "running", "f1s": [], "val_losses": [], "seconds": 0.0, "best_epoch": 0}
    del values["digest"]
    noted.write_text(json.dumps(values))


def test_trial_that_was_running_when_a_search_ended_is_continued(
    sets: Path, right: SearchResult, tmp_path: Path
) -> None:
    copy_without_a_trial(right, tmp_path / "run")
    searched(sets, tmp_path / "run")
    assert_same(tmp_path / "run", right)
    assert not stored(tmp_path / "run", running=True)


def test_interrupted_search_stops_the_trainings_of_the_cluster(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, came, kept = tmp_path / "run", list[float](), module._Search.keep

    def staged(s: TrainSettings, n: int) -> float:
        if s.dropout == base.dropout:
            return 0.5
        came.append(s.dropout)
        if s.dropout == came[0]:
            raise DataError("the first one fails")
        wait_until(lambda: list(out.glob(".*.stop")))
        return 0.5

    def interrupt(s: Any, *trials: Any) -> None:
        if all(t.number == 0 or t.state == "running" for t in trials):
            return kept(s, *trials)
        wait_until(lambda: len(came) == 2)
        raise KeyboardInterrupt

    base = replace(STAGED, epochs=9)
    Staged(monkeypatch, staged)
    monkeypatch.setattr(module._Search, "keep", interrupt)
    with ThreadPoolExecutor(2) as pool, pytest.raises(KeyboardInterrupt):
        searched(sets, out, cluster=pool, settings=base, space={"dropout": [0.4, 0.9]}, prune_after=0)
    assert len(came) == 2, "the other training ended after its first epoch"


def wait_until(is_true: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


# ---- interrupted ---------------------------------------------------------------------------------------------------

# A moment is a step of a training, a proposal, or a call that changes the disk.
MOMENTS = (
    "import optuna; from leakmel.detector.train import step",
    """((os, ("replace", "unlink", "rmdir")), (step.Stepper, ("step",)), (optuna.Study, ("ask", "tell")))""",
)


def at_call(number: int, at: int) -> str:
    return at_a_moment(*MOMENTS, number, at)


@pytest.fixture(scope="module")
def children(sets: Path) -> Iterator[Server]:
    with server(
        loaded(
            sets,
            *("search", "--trials", "2", "--again", "1", "--space", json.dumps({"dropout": [0.1, 0.5]})),
            *("--epoch-share", "0.2", "--batch-size", "200"),
            more="import optuna, pandas\nfrom leakmel.extras import search",
        )
    ) as s:
        yield s


def run_with_signal(children: Server, sets: Path, out: Path, code: str = "") -> Any:
    return children.run("search", str(sets), "--out", str(out), *WORDS, "--trials", str(LAST), code=code)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, pytest.param(12, marks=pytest.mark.long)])
def test_search_killed_at_any_moment_gives_the_same_trials(
    sets: Path, right: SearchResult, tmp_path: Path, children: Server, n: int
) -> None:
    "Real kills, spread over the search: in the short run one in the middle, in the long run every so many from one chosen at random."
    places = [MIDDLE]
    if n > 1:
        done = run_with_signal(children, sets, tmp_path / "whole", at_call(0, 0))
        assert done.status == 0, done.err
        assert_same(tmp_path / "whole", right)
        last = n_moments(done.out)
        first = random.randrange(1, 1 + last // n)
        places = sorted({first + k * (last - 1) // n for k in range(n)})
    for at in places:
        out = tmp_path / f"{at}"
        print("killed at moment", at)
        done = run_with_signal(children, sets, out, at_call(signal.SIGKILL, at))
        if done.status == 0 and n > 1:
            continue  # fewer moments this time
        assert done.status == -signal.SIGKILL, done.err
        done = run_with_signal(children, sets, out)
        assert done.status == 0, (at, done.err)
        assert_same(out, right)


@pytest.mark.long
def test_search_resumes_from_any_state_after_a_kill(
    sets: Path, right: SearchResult, tmp_path: Path, children: Server
) -> None:
    """States of the folder that a kill at a moment of the search could leave, taken up again: every second one, from the first or the second at random.

    One search is made, and its folder copied before each moment. Moments between which nothing was written leave the same, and count once;
    that a process which is killed leaves nothing else is what the test above tries.
    """
    out, place = tmp_path / "run", tmp_path / "left"
    place.mkdir()
    done = run_with_signal(children, sets, out, at_every_moment(*MOMENTS, out, place))
    assert done.status == 0, done.err
    assert_same(out, right)
    left = sorted(place.iterdir(), key=lambda p: int(p.name))
    begin = random.randrange(2)
    print(len(left), "states of", n_moments(done.out), "moments; every second one from", begin)
    assert n_moments(done.out) > len(left) > 4 * LAST
    for folder in left[begin::2]:
        shutil.rmtree(out)
        folder.rename(out)  # where it was
        done = run_with_signal(children, sets, out)
        assert done.status == 0, (folder.name, done.err)
        assert_same(out, right)


@pytest.mark.slow
def test_ctrl_c_reports_how_to_resume(
    sets: Path, right: SearchResult, tmp_path: Path, children: Server
) -> None:
    out = tmp_path / "run"
    done = run_with_signal(children, sets, out, at_call(signal.SIGINT, 40))
    assert done.status == 128 + signal.SIGINT, done.err
    assert re.search(r"The search was interrupted after \d trials: run the same command", done.err)
    assert "Traceback" not in done.err
    assert run_with_signal(children, sets, out).status == 0
    assert_same(out, right)


@pytest.mark.slow
def test_finished_trial_without_record_is_not_trained_again(
    sets: Path, right: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_keep = module._Search.keep

    def dying(self: Any, *trials: Trial) -> None:
        if len(trials) == 1:
            raise ZeroDivisionError
        real_keep(self, *trials)

    copy_without_a_trial(right, tmp_path / "run")
    with monkeypatch.context() as m:
        m.setattr(module._Search, "keep", dying)
        with pytest.raises(ZeroDivisionError):
            searched(sets, tmp_path / "run")
    from leakmel.detector.train.step import Stepper

    real, seen = Stepper.step, list[Any]()

    def counted(self: Stepper, batch: Any) -> Any:
        seen.append(batch)
        return real(self, batch)

    with monkeypatch.context() as m:
        m.setattr(Stepper, "step", counted)
        searched(sets, tmp_path / "run")
        assert not seen
    assert_same(tmp_path / "run", right)


# ---- refused -------------------------------------------------------------------------------------------------------


@each(
    ("options", "code", "says"),
    [
        ({"space": {"dropout": [0.1, 1.5]}}, None, "1.5"),
        ({"space": {"drop_out": [0.1, 0.5]}}, "unknown-parameter", "dropout"),
        ({"space": {"dropout": ["a", "b"]}}, None, "dropout"),
        ({"space": {"dropout": 0.3}}, "invalid-range", "0.3"),
        ({"space": {"dropout": [0.5, 0.1]}}, "invalid-range", "dropout is invalid: low must be below high"),
        (
            {"space": {"learning_rate": {"low": 0, "high": 0.1, "log": True}}},
            "invalid-range",
            "learning_rate",
        ),
        ({"space": {"batch_size": [0.5, 8]}}, "invalid-range", "batch_size"),
        ({"space": {"seed": [0, 9]}}, "setting-not-searched", "seed"),
        ({"space": {"profile_every": [1, 4]}}, "setting-not-searched", "profile_every"),
        ({"space": {"detector": ["cnn", "spectral"]}}, "setting-not-searched", "detector"),
        ({"space": {"keep_level": [False, True]}}, "setting-not-searched", "keep_level"),
        ({"settings": replace(TINY, detector="spectral")}, "wrong-value", "spectral"),
        ({"settings": replace(TINY, detector="blend")}, "wrong-value", "blend"),
        ({"space": {"loss": ["ce", "focal"], "label_smoothing": [0.0, 0.1]}}, None, "focal"),
        ({"space": {}}, "nothing-to-search", "{}"),
        ({"space": {"channels": [[4, 8]]}}, "invalid-range", "channels"),
        ({"space": {"channels": [[4, 8], [0]]}}, None, "channels"),
        ({"space": {"batch_size": [128, 256, 128]}}, "invalid-range", "a choice is listed twice"),
        ({"trials": 0}, "out-of-range", "trials"),
        ({"hours": -1.0}, "out-of-range", "hours"),
        ({"hours": math.nan}, "out-of-range", "hours"),
        ({"again": 1.5}, "out-of-range", "again"),
        ({"resume": "perhaps"}, "unknown-value", "perhaps"),
        ({"device": "tpu"}, None, "tpu"),
        ({"leak_label": "EAK"}, None, "EAK"),
    ],
    ids=str,
)
def test_search_reports_usage_errors_before_training(
    sets: Path, tmp_path: Path, options: dict[str, Any], code: str | None, says: str
) -> None:
    "Without a code here: a refusal of the settings, or of the data, that a training makes too."
    with pytest.raises(UsageError, match=re.escape(says)) as raised:
        searched(sets, tmp_path / "run", **options)
    assert code in (None, raised.value.code)
    assert not (tmp_path / "run").exists()


def test_another_search_in_the_folder_is_refused_by_name(sets: Path, right: SearchResult) -> None:
    before = {p: p.read_bytes() for p in right.folder.rglob("*") if p.is_file()}
    with raises("another-run-in-folder", path=right.folder, says="0.7"):
        searched(sets, right.folder, space=SPACE | {"dropout": [0.0, 0.7]})
    with raises("another-run-in-folder", path=right.folder, says="level_db"):
        searched(sets, right.folder, space=SPACE | {"level_db": [0.0, 6.0]})
    with raises("another-run-in-folder", path=right.folder, says="epochs"):
        searched(sets, right.folder, settings=replace(TINY, epochs=3))
    with raises("another-run-in-folder", path=right.folder, says="pruning"):
        searched(sets, right.folder, prune_after=3)
    with raises("another-run-in-folder", path=right.folder, says="validation"):
        search(
            files(sets)[0],
            sets / "TESTING_DATASET.H5",
            out=right.folder,
            settings=TINY,
            space=SPACE,
            progress=False,
        )
    with raises("another-run-in-folder", path=right.folder, says="task"):
        searched(sets, right.folder, kind="binary")
    assert {p: p.read_bytes() for p in right.folder.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_search_starts_over_with_resume_never(sets: Path, right: SearchResult, tmp_path: Path) -> None:
    "The same trials as in a new folder, and nothing is left of the other search."
    out = tmp_path / "run"
    with raises("nothing-to-resume", path=out):
        searched(sets, out, resume="always")
    searched(sets, out, settings=STAGED, space={"dropout": [0.1, 0.5]}, trials=LAST + 1, again=0)
    (out / "trials" / "notes").mkdir()
    with raises("another-run-in-folder", path=out):
        searched(sets, out)
    done = searched(sets, out, resume="never")
    assert_same(out, right)
    assert {p.relative_to(out) for p in out.rglob("*")} == {
        p.relative_to(right.folder) for p in right.folder.rglob("*")
    } | {Path("trials/notes")}
    before = (out / "search.json").read_bytes()
    assert searched(sets, out, resume="always").trials == done.trials
    assert (out / "search.json").read_bytes() == before


@pytest.mark.slow
def test_search_interrupted_while_starting_over_can_start_over_again(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "While the trials of the other search are removed."
    given: dict[str, Any] = {"settings": STAGED, "trials": 2}
    searched(sets, tmp_path / "run", **given, space={"dropout": [0.1, 0.5]}, again=0)

    def dying(folder: Path, ignore_errors: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(module, "rmtree", dying)
        with pytest.raises(KeyboardInterrupt):
            searched(sets, tmp_path / "run", **given, resume="never")
    with raises("another-run-in-folder", path=tmp_path / "run"):
        searched(sets, tmp_path / "run", **given)
    searched(sets, tmp_path / "run", **given, resume="never")
    assert_same(tmp_path / "run", searched(sets, tmp_path / "new", **given))


def test_restarted_search_gives_one_hint_when_interrupted(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "The training under way says that the same command goes on, which would begin anew."

    def dying(*given: Any, **named: Any) -> None:
        e = KeyboardInterrupt()
        e.add_note("the same command resumes from there")
        raise e

    monkeypatch.setattr(module, "train_with_validation", dying)
    for resume in ("never", "auto"):
        with pytest.raises(KeyboardInterrupt) as raised:
            searched(sets, tmp_path / resume, resume=resume)
        assert len(raised.value.__notes__) == 1
        assert ("without resume='never'" in raised.value.__notes__[-1]) == (resume == "never")


def test_folder_of_another_program_is_not_changed(sets: Path, right: SearchResult, tmp_path: Path) -> None:
    trained = train_with_validation(
        *files(sets), out=tmp_path / "model", settings=STAGED, device="cpu", progress=False
    )
    with raises("output-exists", path=trained.model_path.parent):
        searched(sets, trained.model_path.parent)
    with raises("other-file-in-the-way", OutputError):
        train(*files(sets), out=right.folder, settings=TINY, device="cpu", progress=False)
    (tmp_path / "spoilt").mkdir()
    for text in (
        "{}",
        "no JSON",
        '{"format": "leakmel search 3", "identity": {}, "trials": [{"number": 0, "f1s": [], "val_losses": []}]}',
    ):
        (tmp_path / "spoilt" / "search.json").write_text(text)
        for resume in ("auto", "never"):
            with raises("not-a-search", path=tmp_path / "spoilt" / "search.json"):
                searched(sets, tmp_path / "spoilt", resume=resume)
        assert (tmp_path / "spoilt" / "search.json").read_text() == text


def test_one_search_at_a_time(sets: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        OutputLock(tmp_path / "run" / "model.pt"),
        pytest.raises(OutputError, match="another search or training"),
    ):
        searched(sets, tmp_path / "run")


def test_missing_optuna_names_the_package_to_install(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with raises("package-missing", says="[search]"):
        searched(sets, tmp_path / "run")
    assert main(["search", str(sets), "--out", str(tmp_path / "run"), *WORDS]) == 2
    assert "[search]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    trained = train_with_validation(
        *files(sets), out=tmp_path / "model", settings=STAGED, device="cpu", progress=False
    )
    assert trained.epochs, "nothing else needs it"


def test_the_extra_names_optuna() -> None:
    from configparser import ConfigParser

    parser = ConfigParser(delimiters=["="], interpolation=None)
    parser.read(Path(__file__).resolve().parents[2] / "settings.ini", encoding="utf-8")
    asked = parser["DEFAULT"]["search_requirements"].split()
    assert [a.partition(">")[0] for a in asked] == ["optuna"]
    assert "search" in parser["DEFAULT"]["all_requirements"]


# ---- recordings for testing ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_recordings_for_testing_cannot_be_given_and_are_not_opened(
    sets: Path, right: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [n for n in inspect.signature(search).parameters if "test" in n]
    import h5py

    opened: list[str] = []
    real = h5py.File.__init__

    def watched(self: Any, name: Any, *args: Any, **named: Any) -> None:
        if isinstance(name, (str, bytes, os.PathLike)):
            opened.append(os.fsdecode(name))
        real(self, name, *args, **named)

    monkeypatch.setattr(h5py.File, "__init__", watched)
    words = ["search", str(sets), "--out", str(tmp_path / "run"), *WORDS, "--trials", "2", "--again", "0"]
    assert main(words) == 0
    assert {Path(n).name for n in opened} == {p.name for p in files(sets)}
    assert plain(tmp_path / "run") == plain(right.folder)[:2]


def test_search_does_not_use_the_testing_part_of_a_split(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [*files(sets), sets / "TESTING_DATASET.H5"]
    split = group_split(sources, "sensor", seed=1)
    from leakmel.detector.data.segments import Segments

    real, seen = Segments.__init__, []

    def watched(self: Any, *args: Any, **named: Any) -> None:
        real(self, *args, **named)
        seen.append(self.rows)

    monkeypatch.setattr(Segments, "__init__", watched)
    search(
        sources,
        split=split,
        out=tmp_path / "run",
        settings=STAGED,
        space=SPACE,
        trials=2,
        again=0,
        device="cpu",
        progress=False,
    )
    assert not np.intersect1d(np.concatenate(seen), split.parts["testing"]).size
    assert len(split.parts["testing"])


def test_validation_is_needed(sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with raises("validation-missing"):
        search(files(sets)[0], out=tmp_path / "run", settings=TINY, progress=False)
    assert main(["search", str(files(sets)[0]), "--out", str(tmp_path / "run"), *WORDS]) == 2
    assert "needs recordings for validation" in capsys.readouterr().err


def test_leaky_split_is_reported_before_the_search(sets: Path, tmp_path: Path) -> None:
    path = files(sets)[0]
    with pytest.warns(LeakySplitWarning, match="LEAKY SPLIT") as caught:
        result = search(
            path,
            path,
            out=tmp_path / "run",
            settings=STAGED,
            space=SPACE,
            trials=2,
            again=0,
            device="cpu",
            progress=False,
        )
    assert len(caught) == 1, "once, and not for each trial"
    assert repr(result).lstrip().startswith("BEWARE  LEAKY SPLIT")


# ---- the space -----------------------------------------------------------------------------------------------------

ODD = TrainSettings(learning_rate=0.5, dropout=0.9, batch_size=7, weight_decay=0.0, n_band_masks=0)


@each("base", [TrainSettings(), TINY, ODD], ids=["usual", "tiny", "odd"])
def test_default_search_space(base: TrainSettings) -> None:
    assert set(DEFAULT_SPACE) - set(read_space(None, base)) == (
        set() if base.n_band_masks else {"band_mask_width"}
    )


def test_a_space_from_a_file(sets: Path, tmp_path: Path) -> None:
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    assert read_space(tmp_path / "space.json", TINY) == read_space(SPACE, TINY)
    (tmp_path / "space.json").write_text("{")
    with raises("not-json"):
        read_space(tmp_path / "space.json", TINY)
    with raises("cannot-be-read", path=tmp_path / "nowhere.json"):
        read_space(tmp_path / "nowhere.json", TINY)


def test_ties_prefer_lower_loss_then_earlier_trial() -> None:
    def trial(k: int, f1: float, loss: float, state: Any = "complete") -> Trial:
        return Trial(k, state, {}, (f1,), (loss,), 1.0)

    trials = [
        trial(0, 0.9, 0.3),
        trial(1, 0.9, 0.2),
        trial(2, 0.9, 0.2),
        trial(3, 0.8, 0.0),
        trial(4, 1.0, 0.0, "pruned"),
    ]
    assert best_of(trials).number == 1
    assert best_of([trial(0, math.nan, 0.3)]).number == 0


def test_a_trial_has_the_f1_of_the_epoch_that_was_kept(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "A training keeps the lowest loss of epochs that differ by chance, which need not have the highest F1."
    found = Trial(0, "complete", {}, (0.9, 0.8), (0.3, 0.1), 1.0, best_epoch=2)
    assert found.f1 == 0.8
    assert best_of([found, Trial(1, "complete", {}, (0.85,), (0.2,), 1.0)]).number == 1
    real = module.train_with_validation

    def first_kept(**how: Any) -> Any:
        return replace(real(**how), best_epoch=1)

    monkeypatch.setattr(module, "train_with_validation", first_kept)
    searched(sets, tmp_path / "run", trials=1, again=0)
    (only,) = stored(tmp_path / "run")
    assert (only.best_epoch, only.f1) == (1, only.f1s[0])
    changed = re.sub(
        '"digest".*|(?<="best_epoch": )1',
        lambda m: "9" * (m[0] == "1"),
        (tmp_path / "run" / "search.json").read_text(),
    )
    (tmp_path / "run" / "search.json").write_text(changed)
    with raises("not-a-search"):
        read_state(tmp_path / "run")


def test_an_undefined_figure_is_null_in_the_file(tmp_path: Path) -> None:
    "JSON has no NaN: other programs could not read the file."
    write_state(tmp_path, {}, [Trial(0, "complete", {}, (math.nan, 0.5), (math.nan, 0.1), 1.0)])
    assert b"NaN" not in (tmp_path / "search.json").read_bytes()
    (found,) = stored(tmp_path)
    assert math.isnan(found.f1s[0])
    assert math.isnan(found.val_losses[0])
    assert found.f1 == 0.5


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_command(sets: Path, right: SearchResult, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [
        "search",
        str(files(sets)[0]),
        "--validation",
        str(files(sets)[1]),
        "--out",
        str(tmp_path / "run"),
        *WORDS,
        "--trials",
        str(LAST),
    ]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "leakmel evaluate" in output
    assert max(len(line) for line in output.splitlines() if not line.startswith("next:")) <= 100
    assert_same(tmp_path / "run", right)
    assert main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["ok"] is True
    assert body["trial"] == right.best.number
    assert main(["search", str(sets), "--out", str(tmp_path / "x"), "--space", "{dropout}"]) == 2
    assert "not valid JSON" in capsys.readouterr().err
