"Labels by people replace those of folders in builds, trainings, cross-validations and retraining rounds."

import json
import os
import shutil

import h5py
import numpy as np
import pytest

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError
from leakmel.core.operation import Run, make
from leakmel.dataset.reader import open_dataset
from leakmel.dataset.verify import label_mismatches, labelled_by_people
from leakmel.detector.data.segments import Segments, make_task
from leakmel.detector.data.splits import group_split
from leakmel.detector.model.settings import TrainSettings
from leakmel.detector.train.state import open_training
from leakmel.extras.retrain import UNLABELLED, read_human_labels
from leakmel.operations.detector import Train
from leakmel.recordings.demo import write_demo
from leakmel.recordings.labels import Decision, append_decision, read_labels
from leakmel.recordings.naming import Naming

pytestmark = pytest.mark.usefixtures("one_thread", "few_trees")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    "Recordings of one split, and their data set by folder labels."
    folder = tmp_path_factory.mktemp("network")
    write_demo(folder / "demo", n_files=60)
    recordings = folder / "demo" / "TRAINING"
    built = lm.build(recordings, out=folder / "folders.h5", progress="none")
    with open_dataset(built.path) as ds:
        return recordings, built.path, ds.files[["path", "digest", "label"]].copy()


def decide(file, row, label, by="ann", minute=0, with_digest=True):
    digest = row.digest if with_digest else ""
    append_decision(file, Decision(row.path, digest, label, by, f"2026-01-31T08:{minute:02}:00Z"))


@pytest.fixture
def table(network, tmp_path):
    "Two labels changed (one by path only), one confirmed, one disagreement, one unsure, one not found."
    files, file = network[2], tmp_path / "labels.csv"
    leaks = files[files.label == "LEAK"]
    others = files[files.label == "NOLEAK"]
    decide(file, leaks.iloc[0], "NOLEAK")
    decide(file, leaks.iloc[1], "NOLEAK", with_digest=False)
    decide(file, others.iloc[0], "NOLEAK")
    decide(file, others.iloc[1], "LEAK")
    decide(file, others.iloc[1], "NOLEAK", "ben", 1)
    decide(file, others.iloc[2], "?", "ben", 2)
    append_decision(file, Decision("gone.wav", "f" * 32, "LEAK", "ann", "2026-01-31T08:00:00Z"))
    return file, {leaks.iloc[0].path: "NOLEAK", leaks.iloc[1].path: "NOLEAK"}


COUNTS = {"by_people": 3, "changed": 2, "disagreements": 1, "unsure": 1, "not_found": 1}


def labels_of(path, **given):
    with open_dataset(path, **given) as ds:
        return dict(zip(ds.files.path, ds.files.label, strict=True))


@pytest.mark.slow
def test_build(network, table, tmp_path):
    recordings, before, files = network
    file, changed = table
    out = tmp_path / "set.h5"
    shutil.copy(before, out)
    built = lm.build(recordings, out=out, labels=file, progress="none")
    assert built.verified.ok
    assert built.summary["labels_by_people"] == COUNTS
    expected = dict(zip(files.path, files.label, strict=True)) | changed
    assert labels_of(out) == expected
    assert {k: built.summary["problems_by_kind"][k] for k in ("label_disagreement", "label_unsure")} == {
        "label_disagreement": 1,
        "label_unsure": 1,
    }
    with open_dataset(out) as ds:
        people = ds.files[ds.files["extra/label_by"] != ""]
        assert set(people["extra/label_by"]) == {"ann"}
        assert len(people) == 3
    assert lm.verify(out, root=recordings).ok
    again = lm.build(recordings, out=out, labels=file, progress="none")
    assert again.summary["nothing_to_do"]
    last = open_dataset(out).files
    decide(file, last[last.path == next(iter(changed))].iloc[0], "", "ann", 30)  # withdrawn
    undone = lm.build(recordings, out=out, labels=file, progress="none")
    assert undone.summary["kept_files"] == len(files)
    assert undone.summary["labels_by_people"]["changed"] == 1
    fresh = lm.build(recordings, out=tmp_path / "fresh.h5", labels=file, fresh=True, progress="none")
    assert fresh.path.read_bytes() == undone.path.read_bytes()


def test_a_build_without_people_is_unchanged(network, tmp_path):
    recordings, before, files = network
    empty = tmp_path / "labels.csv"
    decide(empty, files.iloc[0], "?")
    built = lm.build(recordings, out=tmp_path / "a.h5", labels=empty, progress="none")
    assert built.path.read_bytes() == before.read_bytes()


def test_wrong_folder_label_is_detected(network, table, tmp_path):
    "Only the rows that people labelled may differ from their folder."
    out = lm.build(network[0], out=tmp_path / "a.h5", labels=table[0], progress="none").path
    with h5py.File(out, "r+") as f:
        by = f["files/extra/label_by"][:]
        k = int(np.flatnonzero(by == b"")[0])
        f["labels"][k] = 1 - f["labels"][k]
        naming = Naming.from_json(f.attrs["naming_json"])
        names = ["LEAK", "NOLEAK"]
        given = (f["files/path"][:], f["labels"][:], names, naming, "", labelled_by_people(f))
        assert "1 rows have a label that differs from their folder" in next(label_mismatches(*given))
    assert not lm.verify(out).ok


def test_a_new_class(network, tmp_path):
    recordings, _, files = network
    file = tmp_path / "labels.csv"
    decide(file, files.iloc[0], "PUMP")
    built = lm.build(recordings, out=tmp_path / "a.h5", labels=file, progress="none")
    assert built.summary["label_names"] == ["LEAK", "NOLEAK", "PUMP"]
    with pytest.raises(DataError) as e:
        open_dataset(network[1], people=read_labels(file))
    assert e.value.code == "unknown-label"


def test_existing_data_sets(network, table):
    file, changed = table
    _, path, files = network
    expected = dict(zip(files.path, files.label, strict=True)) | changed
    people = read_labels(file)
    assert labels_of(path, people=people) == expected
    with open_training(path, settings=TrainSettings(), labels=file) as data:
        assert data.labels_by_people == COUNTS
        with open_training(path, settings=TrainSettings()) as plain:
            assert plain.labels_by_people == {}
            assert plain.identity != data.identity
    with open_dataset(path) as mine:
        before = mine.labels.copy()
        with open_training(mine, settings=TrainSettings(), labels=file):
            pass
        assert (mine.labels == before).all()
        assert mine.mels.shape


@pytest.mark.slow
def test_train_and_cross_validate(network, table, tmp_path):
    file, _ = table
    fast = TrainSettings(detector="spectral")
    done = lm.train(network[1], out=tmp_path / "model", settings=fast, labels=file, progress=False)
    assert done.summary["labels_by_people"] == COUNTS
    assert done.detector.record["labels_by_people"] == COUNTS
    found = lm.cross_validate(
        network[1], settings=fast, n_folds=2, n_draws=100, jobs=1, labels=file, progress=False
    )
    assert found.to_dict()["labels_by_people"] == COUNTS
    assert found.table.leak.sum() == (network[2].label == "LEAK").sum() - 2


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    "Three splits with equal file names, and their data sets."
    root = tmp_path_factory.mktemp("splits") / "demo"
    write_demo(root, n_files=60)
    for split in ("TRAINING", "VALIDATION", "TESTING"):
        first, *_ = sorted((root / split / "LEAK").glob("*.wav"))
        first.rename(first.with_name("night.wav"))
    lm.build_all(root, out_dir=root.parent, progress="none")
    return root


def decide_testing(splits, file, n=3):
    "Change the labels of leaks of the test set."
    with open_dataset(splits.parent / "TESTING_DATASET.H5") as ds:
        leaks = ds.files[ds.files.label == "LEAK"]
    for k in range(n):
        decide(file, leaks.iloc[-1 - k], "NOLEAK")
    return len(leaks) - n


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::leakmel.detector.data.splits.SplitWarning")
def test_evaluation_and_split_use_the_labels(splits, tmp_path):
    file = tmp_path / "labels.csv"
    n_leaks = decide_testing(splits, file)
    sets, fast = splits.parent, {"detector": "spectral"}
    given = {"data": os.fspath(sets), "labels": os.fspath(file), "out": os.fspath(tmp_path / "a"), **fast}
    operation, run = make(Train, given), Run("none", keeps=True)
    plan = operation.plan(run)
    result = operation.train(plan, run)
    found = operation.evaluate(plan, result, run)
    assert found is not None
    assert found.table.leak.sum() == n_leaks
    assert any("3 labelled by people, 3 of them changed" in c for c in found.cautions)
    plain = lm.evaluate(result.detector, sets / "TESTING_DATASET.H5", progress="none")
    assert plain.table.leak.sum() == n_leaks + 3
    every = [sets / f"{name}_DATASET.H5" for name in ("TRAINING", "VALIDATION", "TESTING")]
    counts = [(group_split(every, "path", labels=given).labels == 0).sum() for given in (None, file)]
    assert counts[0] - counts[1] == 3


@pytest.mark.slow
def test_command_lines_of_evaluation(splits, tmp_path, capsys):
    file, sets = tmp_path / "labels.csv", splits.parent
    n_leaks = decide_testing(splits, file)
    model = tmp_path / "model"
    lm.train(
        sets / "TRAINING_DATASET.H5", out=model, settings=TrainSettings(detector="spectral"), progress=False
    )
    given = [
        "evaluate",
        os.fspath(sets / "TESTING_DATASET.H5"),
        "--model",
        os.fspath(model),
        "--draws",
        "100",
    ]
    assert main([*given, "--labels", os.fspath(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["leaks"] == n_leaks


@pytest.mark.slow
def test_a_path_in_two_splits_needs_a_digest(splits, tmp_path, caplog):
    with open_dataset(splits.parent / "TESTING_DATASET.H5") as ds:
        paths = set(ds.files.path)
    with open_dataset(splits.parent / "TRAINING_DATASET.H5") as ds:
        shared = sorted(paths & set(ds.files.path))[0]
    file = tmp_path / "table.csv"
    file.write_text(f"path,label\n{shared},NOLEAK\n")
    with pytest.raises(DataError) as e:
        lm.build_all(splits, out_dir=tmp_path, labels=file, progress="none")
    assert (e.value.code, e.value.found) == ("ambiguous-recording", shared)
    every = [splits.parent / f"{name}_DATASET.H5" for name in ("TRAINING", "TESTING")]
    with pytest.raises(DataError) as e, open_training(every, settings=TrainSettings(), labels=file):
        pass
    assert (e.value.code, e.value.found) == ("ambiguous-recording", shared)
    built = lm.build(splits, split="testing", out=tmp_path / "one.h5", labels=file, progress="none")
    assert built.summary["labels_by_people"]["changed"] == 1
    file.write_text(f"path,label\n{shared},NOLEAK\nLEAK/mistyped.wav,LEAK\n")
    lm.build(splits, split="testing", out=tmp_path / "two.h5", labels=file, progress="none")
    assert "1 of 2 paths in the table of labels were not found, first LEAK/mistyped.wav" in caplog.text


def test_retraining_accepts_both_tables(network, table, tmp_path):
    file, changed = table
    task = make_task(["LEAK", "NOLEAK"])
    by_hand = tmp_path / "by_hand.csv"
    by_hand.write_text("path,label\n" + "".join(f"{p},{label}\n" for p, label in changed.items()))
    with Segments(network[1], level="recording", preload_to_ram=False) as ds:
        classes = read_human_labels(file, ds, task)
        assert (classes != UNLABELLED).sum() == 3
        assert (read_human_labels(by_hand, ds, task) != UNLABELLED).sum() == 2


def test_command_line(network, table, tmp_path, capsys):
    file, _ = table
    out = os.fspath(tmp_path / "set.h5")
    assert main(["build", os.fspath(network[0]), "--out", out, "--labels", os.fspath(file)]) == 0
    assert "labels: 3 labelled by people, 2 of them changed" in capsys.readouterr().out
