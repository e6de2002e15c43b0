"The suite `train`: what a rehearsal measures and stores, what is refused, and that figures of trainings that failed are none."

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_train as suite
import numpy as np
import pytest
import torch
from bench_train import ON_CPU, ON_GPU, TINY, agreement, bench_train, train_table
from errors import raises

import leakmel as lm
from leakmel.core.errors import LeakmelError
from leakmel.detector.data.segments import make_task
from leakmel.detector.model.detector import Detector
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.model.settings import TrainSettings, with_length
from leakmel.detector.train.step import Stepper
from leakmel.extras.machine.bench import newest, store
from leakmel.recordings.demo import write_wav

pytestmark = pytest.mark.site


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def figures(folder) -> dict[str, Any]:
    return bench_train(folder, n_files=6, rounds=1, rehearse=True, commit_id="abc")


def test_rehearsal_runs_all_measurements(figures):
    assert (figures["suite"], figures["rehearsal"], figures["ok"], figures["errors"], figures["commit"]) == (
        "train",
        True,
        True,
        [],
        "abc",
    )
    assert set(figures["training"]) == set(TINY.changes)
    for f in figures["training"].values():
        assert f["batches_per_s"]["median"] > 0
        assert 0 < f["busy_share"]["median"] <= 1
        assert f["warmup_batches"] == f["n_batches"]["median"] > 0
        assert f["first_step_s"] < f["warmup_s"]
        assert np.isfinite(f["last_loss"])
    assert figures["training"]["as trained"]["loader"] == "device"
    assert figures["training"]["streamed"]["loader"] == "stream"
    assert {kind: (v["n"], v["all_ok"]) for kind, v in figures["verified"].items()} == {
        "cnn": (6, True),
        "spectral": (6, True),
    }
    for group in ("evaluation", "prediction"):
        assert list(figures[group]) == ["cnn, 8", "spectral, 8"]
        assert min(f["files_per_s"]["least"] for f in figures[group].values()) > 0
    assert json.loads(json.dumps(figures)) == figures


def test_number_of_trained_batches_equals_the_record(tmp_path, monkeypatch):
    learned, right = [], Stepper.step

    def step(self: Any, batch: Any) -> Any:
        learned.append(len(batch))
        return right(self, batch)

    monkeypatch.setattr(Stepper, "step", step)
    monkeypatch.setattr(suite, "TINY", suite.TrainPlan(128, TINY.base, {"as trained": {}}, ()))
    f = bench_train(tmp_path, n_files=12, rounds=2, rehearse=True)["training"]["as trained"]
    assert len(learned) == f["warmup_batches"] + 2 * f["n_batches"]["median"]
    assert learned[0] == 128


def test_table_fits_and_marks_a_rehearsal(figures):
    text = train_table(figures)
    assert text.startswith("REHEARSAL")
    assert max(map(len, text.splitlines())) <= 100
    for name in (*TINY.changes, "cnn: prediction and evaluation agree on 6 recordings"):
        assert name in text
    failed = figures | {
        "errors": [{"what": "training: compiled", "error": "no compiler " * 20}],
        "verified": {"cnn": figures["verified"]["cnn"] | {"all_ok": False}},
    }
    text = train_table(failed)
    assert "cnn: prediction and evaluation DO NOT AGREE" in text
    assert "spectral: prediction and evaluation were NOT COMPARED" in text
    assert "not measured: training: compiled" in text
    assert max(map(len, text.splitlines())) <= 100


def test_plans_train_the_network_of_large_sets_though_the_benchmark_has_few_items():
    usual = with_length(TrainSettings(), 1_000_000)
    assert ON_CPU.batch_size == usual.batch_size
    assert {p.settings("as trained", 1).channels for p in (ON_CPU, ON_GPU)} == {usual.channels}
    for plan in (ON_GPU, ON_CPU):
        for name in plan.changes:
            assert plan.settings(name, 7).epochs == 7


def fail_training(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    right = suite._train

    def train(bench: Any, name: str, stop_s: float) -> Any:
        if name == failing:
            raise LeakmelError("no such kernel")
        return right(bench, name, stop_s)

    monkeypatch.setattr(suite, "_train", train)


def test_one_setting_that_fails_leaves_the_others(folder, monkeypatch):
    fail_training(monkeypatch, "full precision")
    monkeypatch.setattr(
        suite,
        "TINY",
        suite.TrainPlan(128, TINY.base, {n: TINY.changes[n] for n in ("as trained", "full precision")}, (8,)),
    )
    found = bench_train(folder, n_files=6, rounds=1, rehearse=True)
    assert list(found["training"]) == ["as trained"]
    assert list(found["evaluation"]) == ["cnn, 8", "spectral, 8"], "before the other trainings"
    assert found["errors"] == [{"what": "training: full precision", "error": "no such kernel"}]
    assert not found["ok"]


def test_nothing_is_scored_before_a_training_was_completed(folder, monkeypatch):
    fail_training(monkeypatch, "as trained")
    monkeypatch.setattr(suite, "TINY", suite.TrainPlan(128, TINY.base, TINY.changes, (8,)))
    found = bench_train(folder, n_files=6, rounds=1, rehearse=True)
    assert list(found["training"]) == ["one graph", "full precision", "streamed"]
    assert (found["evaluation"], found["prediction"]) == ({}, {})
    assert {x["why"] for x in found["not_measured"]} == {"no training was completed before it"}
    assert len(found["not_measured"]) == 5


def test_used_up_budget_leaves_one_round_of_the_first_setting(folder, monkeypatch):
    monkeypatch.setattr(suite, "TINY", suite.TrainPlan(128, TINY.base, TINY.changes, (8,)))
    kept: list[str] = []
    found = bench_train(
        folder, n_files=6, rounds=3, budget_s=1e-3, rehearse=True, keep=lambda f: kept.append(json.dumps(f))
    )
    assert {name: f["rounds"] for name, f in found["training"].items()} == {"as trained": 1}
    assert (found["ok"], found["finished"], found["verified"]["cnn"]["all_ok"]) == (True, True, True)
    skipped = [
        "evaluation: cnn, 8",
        "prediction: cnn, 8",
        "spectral detector",
        "evaluation: spectral, 8",
        "prediction: spectral, 8",
        "training: one graph",
        "training: full precision",
        "training: streamed",
    ]
    assert [x["what"] for x in found["not_measured"]] == skipped
    assert "not measured: prediction: cnn, 8: the time budget" in train_table(found)
    assert len(kept) == 4, "at the start, after the data set, after the training and after the check"


KILLED = """
import os, signal, sys
from functools import partial
sys.path.append(sys.argv[4])
from bench_train import bench_train
from leakmel.core import files
from leakmel.extras.machine.bench import store
real, stored = files.write_all, [0]
def write_all(fd, content):
    if b'"made_utc"' not in content: return real(fd, content)
    stored[0] += 1
    if stored[0] > int(sys.argv[3]):
        real(fd, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return real(fd, content)
files.write_all = write_all
keep = partial(store, folder=sys.argv[2])
bench_train(sys.argv[1], n_files=6, rounds=1, rehearse=True, commit_id="abc", keep=keep)
"""


@pytest.mark.parametrize("k", [*(pytest.param(k, marks=pytest.mark.long) for k in (1, 2, 5)), 3])
def test_record_of_a_run_that_is_killed_while_it_writes(folder, tmp_path, k):
    "The state before is there, whole."
    scripts = os.path.dirname(suite.__file__)
    words = [sys.executable, "-c", KILLED, str(folder), str(tmp_path), str(k), scripts]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["ok"], found["finished"]) == (False, False)
    assert len(found["training"]) == {1: 0, 2: 0, 3: 1, 5: 2}[k]
    assert ("cnn" in found["verified"]) == (k > 3)
    assert "UNFINISHED" in train_table(found)


def test_failed_agreement_check_gives_no_figure(folder, monkeypatch):
    "The measurements after it go on, and the run is not said to be right."

    def fail(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal address")

    monkeypatch.setattr(suite, "agreement", fail)
    monkeypatch.setattr(suite, "TINY", suite.TrainPlan(128, TINY.base, {"as trained": {}}, (8,)))
    found = bench_train(folder, n_files=6, rounds=1, rehearse=True)
    assert [e["what"] for e in found["errors"]] == ["agreement: cnn", "agreement: spectral"]
    assert {e["error"] for e in found["errors"]} == {"CUDA error: an illegal address"}
    assert (found["verified"], found["ok"]) == ({}, False)
    assert set(found["prediction"]) == {"cnn, 8", "spectral, 8"}
    assert "NOT COMPARED" in train_table(found)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> tuple[Path, Path, Detector]:
    "Recordings of 0.3, 1 and 2.2 s, one that is too short for a segment, and their data set of rows of one second."
    folder, rng = tmp_path_factory.mktemp("uneven"), np.random.default_rng(0)
    for k, n in enumerate((4096, 9000, 1300, 700, 4096, 5000)):
        (sub := folder / "data" / "TRAINING" / ("LEAK", "NORMAL")[k % 2]).mkdir(parents=True, exist_ok=True)
        write_wav(sub / f"{k}.wav", rng.integers(-900, 900, n).astype(np.int16), 4096)
    spec = lm.MelSpec.preset("disjoint", duration_s=1.0)
    lm.build(
        folder / "data",
        split="training",
        out=folder / "x.h5",
        spec=spec,
        progress="none",
        engine="torch",
        pipeline=lm.PipelineConfig(device="cpu"),
    )
    torch.manual_seed(0)
    return (
        folder / "x.h5",
        folder / "data",
        Detector(LeakNet(NetSettings(channels=(8, 8))).eval(), make_task(["LEAK", "NORMAL"]), spec),
    )


def test_agreement_of_recordings_of_any_length(uneven):
    path, root, detector = uneven
    found = agreement(path, root, detector, "cpu")
    assert (found["n"], found["all_ok"]) == (5, True)
    assert found["max_abs"] < 0.01


def test_prediction_and_evaluation_that_differ(uneven, monkeypatch):
    path, root, detector = uneven
    real = suite.score_rows
    monkeypatch.setattr(
        suite, "score_rows", lambda *args, **options: real(*args, **options) + np.float32(0.1)
    )
    found = agreement(path, root, detector, "cpu")
    assert not found["all_ok"]
    assert found["max_abs"] == pytest.approx(0.1, abs=0.01)


def test_prediction_and_evaluation_of_other_recordings(uneven, tmp_path, figures):
    path, root, detector = uneven
    shutil.copytree(root, tmp_path / "data")
    next((tmp_path / "data").rglob("4.wav")).unlink()
    found = agreement(path, tmp_path / "data", detector, "cpu")
    assert found == {"n": 4, "max_abs": None, "all_ok": False}
    text = train_table(figures | {"verified": {"cnn": found}})
    assert "DO NOT AGREE in recordings or their segments" in text
    assert max(map(len, text.splitlines())) <= 100


def test_cpu_record_is_marked_as_cpu(tmp_path, monkeypatch):
    "No record of a CPU hides that of a GPU."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(suite, "N_FILES", {"cuda": 10**9, "cpu": 6})
    monkeypatch.setattr(suite, "ON_CPU", suite.TrainPlan(128, TINY.base, {"as trained": {}}, (8,)))
    found = bench_train(tmp_path / "x", rounds=1, commit_id="abc")
    assert (found["device"], found["rehearsal"], found["ok"], found["set"]["n_files"]) == (
        "cpu",
        False,
        True,
        suite.total_for_training(6),
    )
    text = train_table(found)
    assert "rehearsal" not in text
    assert re.search(r"as trained +\d+(\.\d+)? ", text)
    assert "cores of a CPU" in text.splitlines()[-1]
    assert max(map(len, text.splitlines())) <= 100
    store(found, tmp_path / "records")
    assert newest("train", tmp_path / "records", "cuda") is None
    store(found | {"device": "cuda:0", "made_utc": "2000-01-01T00:00:00+00:00"}, tmp_path / "records")
    assert (newest("train", tmp_path / "records", "cuda") or {})["made_utc"][:4] == "2000"
    assert newest("train", tmp_path / "records", "cpu") == newest("train", tmp_path / "records") == found


def test_invalid_arguments_are_refused(tmp_path):
    with raises("invalid-effort", found=0):
        bench_train(tmp_path / "x", rounds=0, rehearse=True)
    with raises("invalid-effort", found=0):
        bench_train(tmp_path / "x", budget_s=0, rehearse=True)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_script(folder, tmp_path):
    out, script = tmp_path / "figures", suite.__file__
    words = [str(folder), "--rehearse", "--files", "6", "--rounds", "1", "--out", str(out)]
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "REHEARSAL" in done.stdout
    assert [p.name.split("-")[0] for p in out.iterdir()] == ["train"]
    assert newest("train", out) is None, "a rehearsal's figures are none"
