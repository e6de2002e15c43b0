"Labels and sensors that differ only in what cannot be seen: training and evaluation stop, groups and sensors are one."

import json
import os
import unicodedata
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from each import each
from errors import raises
from made_detectors import made_detector, noise, put

import leakmel as lm
from leakmel.cli import main
from leakmel.detector.data.segments import Segments, find_label, make_task
from leakmel.detector.data.splits import (
    LeakySplitWarning,
    existing_split,
    find_shared,
    group_split,
    group_values,
)
from leakmel.detector.metrics.significance import recording_groups
from leakmel.extras.nightly import run
from leakmel.extras.nightly.history import History
from leakmel.extras.nightly.nights import last_visits, read_all_visits
from leakmel.extras.nightly.run import nightly
from leakmel.recordings.labels import read_labels

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET: dict[str, Any] = {"device": "cpu", "progress": "none"}
NFD = unicodedata.normalize("NFD", "Süd")
TWINS = ["LEAK ", "LEAK\u200b", "\ufeffLEAK", "LEAK\u00a0", "LE\u00adAK", "leak", "leak "]


def make_set(folder: Path, *labels: str, sensors: tuple[str, ...] = ("S1", "S2", "S3", "S4")) -> Path:
    for k, label in enumerate(labels):
        for s, sensor in enumerate(sensors):
            put(folder / "wav", f"{label}/{sensor}~{k}~20250101_020000~8.wav", noise(10 * k + s))
    spec = lm.MelSpec(sample_rate=4096, duration_s=1.0)
    return lm.build(folder / "wav", out=folder / "set.h5", spec=spec, check=0, progress="none").path


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    return make_set(tmp_path_factory.mktemp("clean"), "LEAK", "NOLEAK")


@pytest.fixture(scope="module", params=TWINS, ids=ascii)
def twins(tmp_path_factory, request) -> Path:
    return make_set(tmp_path_factory.mktemp("twins"), "LEAK", request.param, "NOLEAK")


# ---- labels


@pytest.mark.slow
def test_training_and_cross_validation_stop(tmp_path, twins, capsys):
    with raises("ambiguous-label") as e:
        lm.train(twins, out=tmp_path / "m", **QUIET)
    assert "'LEAK'" in e.value.found
    with raises("ambiguous-label"):
        lm.cross_validate(twins, out=tmp_path / "m", **QUIET)
    for more in ([], ["--cross-validate"]):
        assert main(["train", str(twins), "--out", str(tmp_path / "m"), "--device", "cpu", *more]) == 2
        assert "'LEAK'" in capsys.readouterr().err
    assert not (tmp_path / "m" / "model.pt").exists()


@pytest.mark.slow
def test_evaluation_stops_at_twins_in_the_data_and_in_the_model(clean, twins):
    detector = made_detector(lm.MelSpec(sample_rate=4096, duration_s=1.0))
    with raises("ambiguous-label"):
        lm.evaluate(detector, twins, **QUIET)
    with lm.open_dataset(twins) as ds:
        (other,) = set(ds.class_names) - {"LEAK", "NOLEAK"}
    task = make_task(["LEAK", "NOLEAK", "x"])  # of a model that an earlier version made
    task = replace(task, class_names=("LEAK", "NOLEAK", other), model_names=("LEAK", "NOLEAK", other))
    for data in (clean, twins):
        with raises("ambiguous-label"):
            Segments(data, task=task, preload_to_ram=False)


@pytest.mark.slow
def test_a_leak_label_that_looks_the_same_is_the_leak_label(tmp_path, clean):
    other = make_set(tmp_path, "LEAK\u200b", "NOLEAK ")
    task = make_task(["LEAK", "NOLEAK"])
    with Segments([clean, other], level="recording", task=task, preload_to_ram=False) as rows:
        assert np.bincount(rows.labels).tolist() == [8, 8]
    assert find_label(" leak\u00a0", ["NOLEAK", "LEAK\u200b"]) == 1
    with raises("ambiguous-label"):
        find_label("x", ["y", "x", "x\u200d"])
    with raises("unknown-label"):
        find_label("LEAKS", ["LEAK", "NOLEAK"])


def test_labels_by_people_are_those_of_the_data_set(tmp_path):
    path = make_set(tmp_path, "LEAK", "Geräusch")
    name = unicodedata.normalize("NFD", "Geräusch")
    (tmp_path / "t.csv").write_text(f"path,label\nLEAK/S1~0~20250101_020000~8.wav,{name}\n", encoding="utf-8")
    with lm.open_dataset(path, people=read_labels(tmp_path / "t.csv")) as ds:
        assert sorted(np.bincount(ds.labels).tolist()) == [3, 5]


# ---- sensors and other groups


def test_groups_that_look_the_same_are_one():
    values = ["Süd", NFD, " Süd ", "S\u200büd", "süd", ""]
    table = pd.DataFrame({"sensor": values, "path": [f"{k}.wav" for k in range(6)]})
    assert group_values(table, missing="one").tolist() == ["Süd"] * 4 + ["süd", ""]
    assert group_values(table, values, missing="one").tolist() == ["Süd"] * 4 + ["süd", ""]
    groups = recording_groups(table.iloc[:5])
    assert (groups.by, len(groups)) == ("sensor", 2)


@pytest.mark.slow
def test_leakage_is_not_hidden_and_groups_stay_together(tmp_path):
    sensors = ("S1", "S1\u200b", NFD, "Süd", "S3", "S4")
    path = make_set(tmp_path / "one", "LEAK", "NOLEAK", sensors=sensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(5):
            split = group_split(path, shares={"training": 0.5, "testing": 0.5}, seed=seed)
            assert not split.leaky
            with lm.open_dataset(path) as ds:
                sets = [set(ds.files["sensor"].iloc[rows]) for rows in split.parts.values()]
            for pair in (sensors[:2], sensors[2:4]):
                assert any(set(pair) <= own for own in sets)
    others = make_set(tmp_path / "other", "LEAK", "NOLEAK", sensors=("S9", "S1\u00a0", "S3\ufeff"))
    with pytest.warns(LeakySplitWarning, match="2 sensors"):
        existing_split({"training": path, "testing": others})


@each("kind", ["sensor", "session", "site", "date"])
def test_every_kind_of_leakage(kind):
    table = pd.DataFrame(
        {
            "label": ["a", "b"] * 4,
            "content": [""] * 8,
            kind: ["x", "x", "y\u200b", "y", "x\u00a0", "z", "z", "z\u00ad"],
        }
    )
    part = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    assert [s.n_values for s in find_shared(table, part, ("one", "two"))] == [1]
    shared = find_shared(table, part, ("one", "two"), grouped_by={kind: group_values(table, kind)})
    assert [s.n_values for s in shared] == [1]


# ---- nights


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return made_detector().save(tmp_path_factory.mktemp("model") / "model.pt")


def put_night(folder: Path, day: int, *sensors: str) -> None:
    for k, sensor in enumerate(sensors):
        path = f"d{day}/{k}/{sensor}~{day}~202501{day:02d}_230000~24.wav"
        put(folder, path, noise(100 * day + k))
        os.utime(folder / path, (1_740_000_000, 1_740_000_000))


def test_sensors_of_nights(tmp_path, model):
    put_night(tmp_path / "r", 1, "Süd", "S1")
    put_night(tmp_path / "r", 2, NFD, "S1 ")
    put_night(tmp_path / "r", 3, "S\u200büd", "S1\u00a0")
    visits = tmp_path / "v.csv"
    visits.write_text(
        f"sensor,night\n{NFD},2025-01-02\nS1\u200b,2025-01-01\nS7,2025-01-01\n", encoding="utf-8"
    )
    done = nightly(tmp_path / "r", model, tmp_path / "s", visited=visits, **QUIET)
    assert {r.sensor: r.nights for r in done.sensors} == {"Süd": 1, "S1": 2}
    text = "\n".join(done.warnings)
    assert ascii(NFD) in text
    assert ascii("S1 ") in text, "twins are reported"
    assert "1 visits are ignored" in text
    assert "S7 (2025-01-01)" in text


def test_a_history_of_an_earlier_version_goes_on(tmp_path, model, monkeypatch):
    put_night(tmp_path / "r", 1, NFD, "two  blanks")
    with monkeypatch.context() as patched:
        patched.setattr(run, "text_key", str.strip)
        nightly(tmp_path / "r", model, tmp_path / "s", **QUIET)
    put_night(tmp_path / "r", 2, "Süd", "two blanks")
    visits = tmp_path / "v.csv"
    visits.write_text("sensor,night\nSüd,2025-01-01\n", encoding="utf-8")
    done = nightly(tmp_path / "r", model, tmp_path / "s", visited=visits, **QUIET)
    assert {r.sensor: r.nights for r in done.sensors} == {NFD: 1, "two  blanks": 2}
    with History(tmp_path / "s") as history:
        assert sorted(history.sensors()) == [NFD, "two  blanks"]


def test_the_last_of_two_visits_counts(tmp_path):
    (tmp_path / "v.csv").write_text(f"sensor,night\nSüd,2025-01-02\n{NFD},2025-01-05\n", encoding="utf-8")
    assert last_visits(read_all_visits(tmp_path / "v.csv")) == {"Süd": "2025-01-05"}


def test_hidden_recordings_are_not_on_the_list(tmp_path, model, capsys, caplog):
    put_night(tmp_path / "r", 1, "S1")
    put_night(tmp_path / "r" / ".Trash-1000" / "files", 1, "S2")
    put_night(tmp_path / "r" / "$RECYCLE.BIN", 1, "S3")
    words = ["nightly", str(tmp_path / "r"), "--model", str(model), "--device", "cpu", "--quiet", "--json"]
    for k, more in enumerate(([], ["--pattern", "{**}/{sensor}~{recording}~{start_time}~{gain}"])):
        main([*words, "--state", str(tmp_path / f"s{k}"), *more])
        body = json.loads(capsys.readouterr().out)
        assert body["found"] == 1
        assert {row["sensor"] for row in body["visits"]} <= {"S1"}
        assert caplog.text.count("2 recordings in 2 system or hidden folders were passed over") == 1
        caplog.clear()
    assert len(lm.predict(tmp_path / "r", model, **QUIET).scored) == 1
