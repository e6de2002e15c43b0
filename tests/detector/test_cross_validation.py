"Cross-validation of detectors: folds by groups, resume, permuted labels, errors, and the command line."

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import psutil
import pytest
from bench_cross_validation import REAL, bench_cross_validation
from each import each
from tiny_training import use_few_trees

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, OutputError, UsageError
from leakmel.core.operation import Run, make
from leakmel.detector.data.splits import recordings_table
from leakmel.detector.evaluate.resampling import CrossValidation
from leakmel.detector.metrics.metrics import leak_metrics
from leakmel.detector.metrics.significance import Bootstrap
from leakmel.detector.model import spectral
from leakmel.detector.model.spectral import baseline_features
from leakmel.detector.reports import training_report
from leakmel.detector.train import folds
from leakmel.detector.train.folds import FoldTrainer, joined_groups
from leakmel.detector.train.state import open_training
from leakmel.operations.detector import Train

pytestmark = [
    pytest.mark.filterwarnings("default::UserWarning"),  # of splits of a few sensors
    pytest.mark.usefixtures("one_thread", "few_trees"),
]
SPECTRAL = lm.TrainSettings(detector="spectral")
KEPT = FoldTrainer._kept
N_TREES = spectral.N_TREES
TINY: dict[str, Any] = {"epochs": 1, "epoch_share": 0.1, "batch_size": 64, "channels": (2, 4)}


def paths_of(sets: Path) -> list[Path]:
    return sorted(sets.glob("*_DATASET.H5"))


def cross_validated(sets: Path, settings: lm.TrainSettings = SPECTRAL, **given: Any) -> CrossValidation:
    "Cross-validate on all recordings of a folder."
    some: dict[str, Any] = {
        "settings": settings,
        "n_draws": 200,
        "progress": "none",
        "device": "cpu",
        "jobs": 1,
    }
    return lm.cross_validate(paths_of(sets), **(some | given))


@pytest.fixture(scope="module")
def found(small_sets: Path) -> CrossValidation:
    return cross_validated(small_sets, seeds=2)


@pytest.fixture
def count_fits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    "Count the fits of detectors; the fit of a given number is interrupted."

    def count(interrupted: int = 0) -> list[str]:
        done: list[str] = []

        def kept(self: FoldTrainer, about: Any, parts: Any, fit: Callable[[Path | None], np.ndarray]) -> Any:
            def counted(folder: Path | None) -> np.ndarray:
                if len(done) + 1 == interrupted:
                    raise KeyboardInterrupt
                done.append(about["kind"])
                return fit(folder)

            return KEPT(self, about, parts, counted)

        monkeypatch.setattr(FoldTrainer, "_kept", kept)
        return done

    return count


@pytest.mark.slow
def test_each_recording_is_scored_once_for_each_seed_without_its_group(found: CrossValidation) -> None:
    assert len(found.seeds) == 2
    assert len(found) == len(found.groups.code)
    one, two = found.scores["detector"]
    assert np.isfinite([one, two]).all()
    assert (found.folds.groupby("seed")["recordings"].sum() == len(found)).all()
    for fold in found.scores["fold"]:
        for k in range(len(found.groups)):
            assert len(np.unique(fold[found.groups.code == k])) == 1, "a group on both sides"
    assert not np.array_equal(*found.scores["fold"])
    assert np.allclose(found.table["score"], (one + two) / 2)
    assert found.detector.figures["auc"] > 0.7, "leaks of the demo are easy"


@pytest.mark.slow
def test_labels_of_a_fold_do_not_change_its_scores(small_sets: Path) -> None:
    "Kind, vote, threshold and fit are chosen without the recordings that are scored."
    with open_training(paths_of(small_sets), settings=SPECTRAL, progress="none") as data:
        groups = joined_groups(recordings_table(data.training.sources, progress="none"))
        n, held_out = len(data.training.rows), np.flatnonzero(groups.code % 5 == 0)
        fit = folds.Fit("", groups, 0, 0, np.setdiff1d(np.arange(n), held_out), held_out)
        trainer = FoldTrainer(data, SPECTRAL, groups, n_threads=1)
        features = baseline_features(trainer.ds, progress="none")
        _, before = folds._score_fit(trainer, features, fit)
        trainer.ds.labels[held_out] = 1 - trainer.ds.labels[held_out]
        facts, after = folds._score_fit(trainer, features, fit)
    assert facts["n_fits"] > 5, "the rule is chosen in folds of the training recordings"
    for name, scores in before.items():
        assert np.array_equal(scores, after[name]), name


def test_pooled_figures_are_those_of_one_detector(found: CrossValidation) -> None:
    truth = found.table["leak"].to_numpy(bool)
    boot = Bootstrap(truth, found.groups, n_draws=200)
    for name in ("auc", "balanced_accuracy"):
        assert found.detector.figures[name] == np.mean(found.seeds[name])
        draws = [boot.draws(score, 0.5)[name] for score in found.scores["detector"]]
        assert np.allclose(found.detector.draws[name], np.mean(draws, 0), equal_nan=True)
    for name, baseline in found.baselines.items():
        areas = [leak_metrics(truth, score)["auc"] for score in found.scores[name]]
        assert baseline.figures["auc"] == np.mean(areas)
    assert sum(vars(found.detector.counts).values()) == 2 * len(found)


@pytest.mark.slow
def test_promise_is_what_groups_without_a_part_in_training_give(tmp_path: Path) -> None:
    """Train and cross-validate on some sensors, and score those of others.

    Promise and result differ by about 0.08 in a single draw, so the mean of twelve has a standard error of 0.02.
    """
    names = ("16 sensors", "inaudible leaks", *REAL)
    sources = os.environ.get("LEAKMEL_REAL_WAVS", "")
    draws = bench_cross_validation(tmp_path, names=names, draws=6, sources=sources)["draws"]
    assert len(draws) >= 12
    for promise in ("promise", "of_train"):
        assert abs(np.mean([d[promise] - d["result"] for d in draws])) < 0.06, promise
    covered = [d["low"] <= d["result"] <= d["high"] for d in draws if d["low"] is not None]
    assert sum(covered) > 0.6 * len(covered) > 4


def test_report_plot_and_plain_values(found: CrossValidation) -> None:
    text = repr(found)
    assert "2 seeds" in text
    assert "Level only" in text
    assert "verdict" in text
    assert "60 fits" in text  # five folds inside each of ten choose vote and threshold
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["fits"] == 6 * len(plain["folds"]) == 60
    assert plain["kinds"] == {"spectral": 10}
    assert list(plain["baselines"]) == ["level", "mean_mels", "trees"]
    assert list(plain["differences"]) == ["level", "mean_mels"], "a spectral detector contains them"
    assert found.plots()["roc"].layout.title.text.startswith("AUC")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("cnn", marks=pytest.mark.long), "blend"])
def test_interrupted_run_of_a_kind_is_resumed(
    small_sets: Path, tmp_path: Path, count_fits: Callable[..., list[str]], kind: Any
) -> None:
    settings = lm.TrainSettings(detector=kind, **TINY)
    first = count_fits(interrupted=2)
    with pytest.raises(KeyboardInterrupt):
        cross_validated(small_sets, settings, n_folds=2, out=tmp_path)
    second = count_fits()
    resumed = cross_validated(small_sets, settings, n_folds=2, out=tmp_path)
    assert len(first) + len(second) == resumed.folds["n_fits"].sum()
    assert resumed.table.equals(cross_validated(small_sets, settings, n_folds=2).table)


def processes_of_joblib() -> list[int]:
    found = list[int]()
    for p in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            if "LokyProcess" in " ".join(p.cmdline()):
                found.append(p.pid)
    return found


@pytest.mark.slow
def test_scores_do_not_depend_on_the_number_of_processes(
    small_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "WORKER_IDLE_S", 1)
    monkeypatch.setattr(spectral, "N_TREES", N_TREES)  # as in those processes
    one = cross_validated(small_sets, n_folds=2)
    two = cross_validated(small_sets, n_folds=2, jobs=2, out=tmp_path)
    assert two.table.equals(one.table)
    assert two.n_done == two.n_fits == one.n_fits >= 2, "fits of other processes are counted"
    until = time.monotonic() + 60
    while left := processes_of_joblib():
        assert time.monotonic() < until, f"idle processes hold their memory: {left}"
        time.sleep(0.2)
    again = cross_validated(small_sets, n_folds=2, out=tmp_path)
    assert again.n_done == 0
    assert again.table.equals(one.table)


INTERRUPTED = """
import sys
import leakmel as lm
settings = lm.TrainSettings(detector="cnn", epochs=2, epoch_share=0.5, batch_size=64, channels=(2, 4))
lm.cross_validate(sys.argv[2:], out=sys.argv[1], settings=settings, jobs=2, device="cpu", progress="none")
"""


@pytest.mark.slow
def test_interrupted_processes_end_and_keep_their_fits(small_sets: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    command = [sys.executable, "-c", INTERRUPTED, str(out), *map(str, paths_of(small_sets))]
    with log.open("w") as f:
        run = subprocess.Popen(command, stdout=f, stderr=f, start_new_session=True)
    for _ in range(1200):
        if list(out.glob("cross-validation/*.npy")) or run.poll() is not None:
            break
        time.sleep(0.1)
    kept = len(list(out.glob("cross-validation/*.npy")))
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(60) != 0, log.read_text()
    assert kept >= 1, log.read_text()
    left = [p for p in psutil.process_iter() if group_of(p.pid) == run.pid]
    psutil.wait_procs(left, 20)
    assert [p.pid for p in left if p.is_running()] == []
    assert "Exception in thread" not in log.read_text()
    settings = lm.TrainSettings(detector="cnn", epochs=2, epoch_share=0.5, batch_size=64, channels=(2, 4))
    resumed = cross_validated(small_sets, settings, out=out)
    assert resumed.n_done <= resumed.n_fits - kept


def group_of(pid: int) -> int | None:
    "Number of the process group; None: the process has ended."
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


@pytest.mark.slow
def test_interrupted_run_is_resumed_and_fits_nothing_twice(
    small_sets: Path, tmp_path: Path, count_fits: Callable[..., list[str]]
) -> None:
    first = count_fits(interrupted=4)
    with pytest.raises(KeyboardInterrupt):
        cross_validated(small_sets, out=tmp_path / "out")
    second = count_fits()
    resumed = cross_validated(small_sets, out=tmp_path / "out")
    assert (len(first), len(second)) == (3, resumed.n_fits - 3)
    assert resumed.n_done == len(second)
    assert "3 of them read from an earlier run" in repr(resumed)
    assert resumed.table.equals(cross_validated(small_sets).table), "as if it had not been interrupted"
    rows = pd.read_csv(tmp_path / "out" / "cross_validation.csv")
    assert np.allclose(rows["score"], resumed.table["score"])
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["recordings"] == len(resumed)
    other = cross_validated(small_sets, out=tmp_path / "out", leak_label="NOLEAK")
    assert other.n_done == other.n_fits == resumed.n_fits, "scores of another task are not taken"


def test_few_groups_are_left_out_one_by_one(small_sets: Path, found: CrossValidation) -> None:
    group = [f"pipe {k % 6}" for k in range(len(found))]
    found = cross_validated(small_sets, group=group)
    assert found.is_one_out
    assert len(found.folds) == 6
    assert found.table.groupby("fold")["group"].nunique().tolist() == [1] * 6
    assert "was left out once" in found.method


def test_groups_with_equal_content_are_one() -> None:
    table = pd.DataFrame({"sensor": list("aabbcc"), "content": ["1", "2", "2", "3", "", ""], "label": "x"})
    groups = joined_groups(table)
    assert groups.names == ("a + b", "c")
    assert groups.code.tolist() == [0, 0, 0, 0, 1, 1]
    assert "hold the same recordings" in groups.note


def test_pieces_of_one_recording_are_in_one_group() -> None:
    paths = [f"LEAK/{name}__t{k:03d}.wav" for name in ("a", "b") for k in (0, 5, 10, 15)]
    table = pd.DataFrame({"path": paths, "content": "", "label": "LEAK"})
    groups = joined_groups(table, "path")
    assert groups.code.tolist() == [0] * 4 + [1] * 4
    assert groups.names[0] == "LEAK/a__t000.wav and 3 others"
    assert "6 fewer are counted" in groups.note


def test_pieces_of_two_sensors_with_one_name_are_not_joined() -> None:
    paths = [f"S{s}/rec_part{k}.wav" for s in range(6) for k in range(3)]
    sensors = [path.partition("/")[0] for path in paths]
    table = pd.DataFrame({"path": paths, "sensor": sensors, "content": "", "label": ["LEAK", "NO", "NO"] * 6})
    assert joined_groups(table).code.tolist() == np.repeat(range(6), 3).tolist()
    unknown = table.assign(sensor=[*sensors[:-1], ""])
    assert len(joined_groups(unknown)) == 1  # the last piece may be of any sensor


def test_group_that_alone_has_a_label_is_not_left_out(small_sets: Path, found: CrossValidation) -> None:
    group = ["leaks" if is_leak else f"pipe {k % 4}" for k, is_leak in enumerate(found.table["leak"])]
    with pytest.raises(DataError) as error:
        cross_validated(small_sets, group=group)
    assert error.value.code == "label-in-one-part"


@pytest.mark.slow
def test_permuted_labels_give_no_skill(small_sets: Path, tmp_path: Path) -> None:
    areas = []
    for seed in range(3):
        shutil.copytree(small_sets, folder := tmp_path / str(seed))
        rng = np.random.default_rng(seed)
        for path in paths_of(folder):
            path.chmod(0o644)
            with h5py.File(path, "r+") as file:
                file["labels"][...] = rng.permutation(file["labels"][:])
        found = cross_validated(folder, group="path")
        areas.append([m.figures["auc"] for m in (found.detector, *found.baselines.values())])
    means = np.mean(areas, 0)
    print("mean AUC of detector and baselines:", means.round(3))
    assert (np.abs(means - 0.5) < 0.15).all(), means


@pytest.mark.slow
def test_network_and_choice_inside_each_fold(
    small_sets: Path, tmp_path: Path, count_fits: Callable[..., list[str]]
) -> None:
    network = cross_validated(small_sets, lm.TrainSettings(detector="cnn", **TINY), n_folds=2)
    assert network.kinds == {"cnn": 2}
    assert network.n_fits == 12, "five folds inside each of two choose vote and threshold"
    assert len(network.verdict.against) == 3
    seen = count_fits()
    chosen = cross_validated(small_sets, lm.TrainSettings(detector="blend", **TINY), n_folds=2, out=tmp_path)
    n = chosen.n_fits
    assert chosen.kinds == {"blend": 2}
    assert len(seen) == n == chosen.n_done
    assert seen.count("cnn") == seen.count("spectral") == n / 2
    assert np.isfinite(chosen.table["score"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("executor", marks=pytest.mark.long), "dask"])
def test_folds_on_a_cluster_give_the_same_scores(small_sets: Path, found: CrossValidation, kind: str) -> None:
    with ExitStack() as stack:
        if kind == "executor":
            cluster: Any = stack.enter_context(ProcessPoolExecutor(2, get_context("spawn"), use_few_trees))
        else:
            distributed = pytest.importorskip("distributed")
            options = {"host": "127.0.0.1", "dashboard_address": None, "silence_logs": 50}
            cluster = stack.enter_context(
                distributed.LocalCluster(n_workers=1, threads_per_worker=1, **options)
            )
            stack.enter_context(distributed.Client(cluster)).run(use_few_trees)
            cluster = cluster.scheduler_address
        again = cross_validated(small_sets, seeds=2, cluster=cluster)
    pd.testing.assert_frame_equal(again.table, found.table)
    assert again.to_dict()["detector"] == found.to_dict()["detector"]


def test_kind_is_spectral_where_training_recordings_are_one_group(
    small_sets: Path, found: CrossValidation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "MIN_FOR_NETWORK", 10)  # else 40 recordings leave nothing to choose
    group = [f"pipe {k % 2}" for k in range(len(found))]
    halves = cross_validated(small_sets, lm.TrainSettings(detector="auto", **TINY), group=group)
    assert halves.kinds == {"spectral": 2}
    assert "too few groups for folds" in repr(halves)
    assert halves.verdict.beats is None


def test_wrong_arguments_and_folders_of_others(small_sets: Path, tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"n_folds": 1}, {"seeds": 0}]
    for given in wrong:
        with pytest.raises(UsageError):
            cross_validated(small_sets, **given)
    with pytest.raises(DataError) as error:
        cross_validated(small_sets, group="label")
    assert error.value.code == "label-in-one-part"
    (tmp_path / "summary.json").write_text('{"model": {\n "cross_validation": 1}}')
    with pytest.raises(OutputError) as in_the_way:
        cross_validated(small_sets, out=tmp_path)
    assert in_the_way.value.code == "other-file-in-the-way"


@pytest.mark.slow
def test_command_line(small_sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["train", str(small_sets), "--out", str(tmp_path / "out"), "--cross-validate"]
    words += ["--detector", "spectral", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["ok"]
    assert body["groups"]["by"] == "sensor"
    assert body["pooled"]["figures"]["auc"]["value"] > 0.5
    assert sorted(p.name for p in (tmp_path / "out").glob("*.*")) == ["cross_validation.csv", "summary.json"]
    assert main([*words, "--folds", "2", "--seeds", "2", "--group", "path", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (len(body["folds"]), len(body["seeds"])) == (4, 2)
    assert main([*words, "--group", "path", "--quiet"]) == 0
    assert "verdict" in capsys.readouterr().out
    assert main([*words, "--report", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    page = Path(body["report"]).read_text()
    assert page.count('class="plotly-figure"') == 2
    assert main([*words[:-5], "--seeds", "2", "--detector", "spectral", "--json"]) == 2
    body = json.loads(capsys.readouterr().out)
    assert body["code"] == "invalid-arguments"
    assert "Add one of them, or leave the option out" in body["error"]


@each("mode", ["--cross-validate", "--learning-curve"])
@each(
    "words",
    [
        "--resume never",
        "--allow-leaky-split",
        "--no-evaluation",
        "--checkpoint-steps 5",
        "--checkpoint-s 9",
        "--keep-checkpoints 2",
        "--no-fsync",
    ],
)
def test_options_of_one_training_are_refused(
    small_sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture, mode: str, words: str
) -> None:
    place = ["train", str(small_sets), "--out", str(tmp_path / "out"), "--json"]
    assert main([*place, mode, *words.split()]) == 2
    body = json.loads(capsys.readouterr().out)
    assert body["code"] == "unused-option"
    assert f"option {words.split()[0]} " in body["error"]
    assert f"together with {mode}" in body["error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_notebook_evaluates_by_cross_validation_before_the_training(small_sets: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "data": str(small_sets),
        "out": str(tmp_path),
        "detector": "spectral",
        "device": "cpu",
    }
    run = Run("none", keeps=True)
    assert make(Train, given).resample([], tmp_path, run) is None
    operation = make(Train, given | {"cross_validate": True, "n_folds": 3})
    plan = operation.plan(run)
    assert "cross-validation" in repr(plan)
    found = operation.resample(list(plan.files.values()), plan.out / "cross-validation", run)
    assert isinstance(found, CrossValidation)
    assert len(found.folds) == 3
    assert (tmp_path / "cross-validation" / "cross_validation.csv").is_file()
    result = operation.train(plan, run)
    page = training_report(result, None, tmp_path / "report.html", found).read_text()
    assert "Cross-validation" in page


def test_reliability_of_calibrated_probabilities_is_drawn(small_sets: Path, found: CrossValidation) -> None:
    figure = found.plots()["reliability"]
    assert [trace.name for trace in figure.data][1:] == ["score", "probability"]
    assert figure.layout.title.text.startswith("Calibrated probability")
