"Labels, sensors and paths that differ only in what cannot be seen: reported, and the same wherever they are compared."

import ast
import csv
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from each import each
from errors import raises

import leakmel as lm
from leakmel.recordings.demo import wav_bytes
from leakmel.recordings.labels import (
    Decision,
    TimeRange,
    current_labels,
    label_of,
    read_labels,
    relabel,
    relabel_manifest,
)
from leakmel.recordings.manifest import Manifest, scan, shared_groups

TWINS = {
    "blank at the end": ("LEAK", "LEAK "),
    "no-break space": ("NO LEAK", "NO\u00a0LEAK"),
    "two blanks": ("NO LEAK", "NO  LEAK"),
    "accents": ("Geräusch", unicodedata.normalize("NFD", "Geräusch")),
    "zero-width space": ("leak", "le\u200bak"),
    "mark of the byte order": ("LEAK", "\ufeffLEAK"),
    "soft hyphen": ("Rohrbruch", "Rohr\u00adbruch"),
    "variation selector": ("漏水", "漏\ufe00水"),
    "with another case": ("LEAK", "leak\u200d"),
}
NFD = unicodedata.normalize("NFD", "Süd")


def wav(seed: int) -> bytes:
    return wav_bytes(np.random.default_rng(seed).integers(-900, 900, 4096).astype(np.int16))


def put(root: Path, *names: str) -> None:
    for k, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(wav(k))


def write_table(path: Path, *rows: tuple[str, ...]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows(rows)
    return path


def look_alikes(m: Manifest) -> list[tuple[str, ...]]:
    "The names of each problem, as they are written in it."
    shown = m.problems["path"][m.problems["kind"] == "look_alikes"]
    assert all(text.isascii() for text in shown)
    return [ast.literal_eval(text) for text in shown]


@pytest.mark.slow
@each("twins", TWINS.values(), ids=TWINS.keys())
@each("source", ["folders", "table", "pattern"])
def test_twins_of_a_label_are_reported_and_shown(tmp_path, source, twins):
    root = tmp_path / "data"
    labels = [*twins, "OTHER"]
    if source == "folders":
        put(root, *(f"{label}/{k}.wav" for k, label in enumerate(labels)))
        m = scan(root)
    elif source == "pattern":
        put(root, *(f"{k}_{label}.wav" for k, label in enumerate(labels)))
        m = scan(root, pattern="{recording}_{label}")
    else:
        put(root, *(f"{k}.wav" for k in range(3)))
        rows = [(f"{k}.wav", label) for k, label in enumerate(labels)]
        m = scan(root, table=write_table(tmp_path / "t.csv", ("path", "label"), *rows))
    if source != "table" or twins[1] == twins[1].strip():  # the cells of a table are stripped
        assert set(m.label_names) == set(labels) if source != "pattern" else len(m.label_names) == 3
        assert [set(names) for names in look_alikes(m)] == [set(twins)]
        build = lm.build(root, out=tmp_path / "x.h5", manifest=m, check=0, progress="none")
        assert build.summary["problems_by_kind"]["look_alikes"] == 1
    else:
        assert not look_alikes(m)


def test_labels_that_differ_in_case_are_reported_as_before(tmp_path):
    put(tmp_path, "LEAK/a.wav", "leak/b.wav", "LEAK /c.wav")
    m = scan(tmp_path)
    kinds = dict(zip(m.problems["kind"], m.problems["path"], strict=True))
    assert kinds == {"case_twins": "LEAK, leak", "look_alikes": "'LEAK', 'LEAK '"}


def test_a_label_of_which_nothing_is_seen_is_no_label(tmp_path):
    put(tmp_path / "d", "a.wav", "b.wav")
    m = scan(
        tmp_path / "d",
        table=write_table(tmp_path / "t.csv", ("path", "label"), ("a.wav", "LEAK"), ("b.wav", "\u200b")),
    )
    assert m.label_names == ("LEAK",)
    assert list(m.counts().values()) == [{"(no label)": 1, "LEAK": 1}]


@each("twin", ["S1\u200b", "\u00adS1", "S1\u00a0"])
@each("column", ["sensor", "session"])
def test_twins_of_a_sensor_are_one_and_are_reported(tmp_path, twin, column):
    root = tmp_path / "d"
    put(root, *(f"{split}/LEAK/{k}.wav" for k, split in enumerate(("TRAINING", "TESTING"))))
    rows = [
        ("TRAINING/LEAK/0.wav", "LEAK", "training", "S1"),
        ("TESTING/LEAK/1.wav", "LEAK", "testing", f"{twin}x"[:-1] + "\u200b"),
    ]
    m = scan(root, table=write_table(tmp_path / "t.csv", ("path", "label", "split", column), *rows))
    assert shared_groups(m)[column] == {"n": 1, "in_more_than_one_split": 1}
    assert m.groups(column)["n_splits"].to_dict() == {"S1": 2}
    (names,) = look_alikes(m)
    assert names[0] == "S1"
    assert names[1] != "S1"


def test_values_of_other_columns(tmp_path):
    put(tmp_path / "d", "a.wav", "b.wav", "c.wav")
    rows = [("a.wav", "X", "North"), ("b.wav", "X", "No\u200brth"), ("c.wav", "X", "north")]
    m = scan(tmp_path / "d", table=write_table(tmp_path / "t.csv", ("path", "label", "site"), *rows))
    assert look_alikes(m) == [("North", "No\u200brth")]
    assert m.problems["message"][0].startswith("the values of site differ only in blanks, ")
    assert set(m.problems["kind"]) == {"look_alikes"}, "the case of notes is of no interest"


def test_twins_of_a_sensor_in_file_names_are_in_the_report_of_a_build(tmp_path):
    for k, sensor in enumerate(("Süd", NFD, "S2", "s2")):
        put(tmp_path / "d", f"LEAK/{sensor}~{k}~20250101_020000~8.wav")
    m = scan(tmp_path / "d")
    assert [set(names) for names in look_alikes(m)] == [{"Süd", NFD}]
    done = lm.build(tmp_path / "d", out=tmp_path / "x.h5", check=0, progress="none")
    counts = done.summary["problems_by_kind"]
    assert (counts["look_alikes"], counts["case_twins"]) == (1, 1)
    with lm.open_dataset(done.path) as ds:
        assert set(ds.files["sensor"]) == {"Süd", NFD, "S2", "s2"}, "names are stored as given"


def test_a_table_finds_files_whose_paths_look_the_same(tmp_path):
    on_disk = ["LEAK /a.wav", f"LEAK/{NFD}.wav", "LEAK/c d.wav", "TRAINING/e\u200b.wav"]
    put(tmp_path / "d", *on_disk)
    given = ["LEAK/a.wav", "LEAK/Süd.wav", "LEAK/c\u00a0 d.wav", "e.wav"]
    rows = [(path, "LEAK", "training") for path in given]
    m = scan(tmp_path / "d", table=write_table(tmp_path / "t.csv", ("path", "label", "split"), *rows))
    assert sorted(map(os.fsdecode, m.listings[0].paths)) == sorted(on_disk)
    assert not set(m.problems["kind"]) & {"missing_file", "not_in_table", "wrong_root"}


def test_a_table_prefers_equal_paths_and_refuses_to_guess(tmp_path):
    put(tmp_path / "d", "a.wav", "b.wav", "b\u200b.wav")

    def found(*paths: str) -> Manifest:
        rows = [(path, "X") for path in paths]
        return scan(tmp_path / "d", table=write_table(tmp_path / "t.csv", ("path", "label"), *rows))

    assert found("b.wav", "b\u00ad.wav").listings[0].paths == [b"b.wav", "b\u200b.wav".encode()]
    (message,) = [p for p in found("a.wav", "b\u00ad.wav").problems["message"] if "the table names" in p]
    assert "the table names this file" in message, "one of two"
    with raises("table-row"):
        found("a.wav ", "a\u200b.wav")


@each("name", ["TRAINING ", "train\u200b", "\ufeffdataset_Training"])
def test_folders_of_splits(tmp_path, name):
    put(tmp_path, f"{name}/LEAK/a.wav")
    assert [x.split for x in scan(tmp_path).listings] == ["TRAINING"]


@pytest.mark.parametrize(("typed", "named"), [("Süd", NFD), (NFD, "Süd")])
def test_a_pattern_fits_names_with_either_form_of_accents(tmp_path, typed, named):
    put(tmp_path, f"{named}_LEAK_Tür.wav")
    m = scan(tmp_path, pattern=f"{typed}_{{label}}_{{sensor}}")
    assert m.label_names == ("LEAK",)
    assert m.table["sensor"].tolist() == ["Tür"]


# ---- labels by people


def decision(path: str, label: str, by: str = "ann", digest: str = "") -> Decision:
    return Decision(path, digest, label, by, "2026-01-01T00:00:00Z")


def test_labels_by_people_find_paths_that_look_the_same(tmp_path):
    put(tmp_path / "d", f"LEAK/{NFD}.wav", "LEAK/b.wav", "NOLEAK/c.wav")
    table = write_table(
        tmp_path / "t.csv", ("path", "label"), ("LEAK/Süd.wav", "NOLEAK"), ("LEAK /b.wav", "LEAK")
    )
    m = relabel_manifest(scan(tmp_path / "d"), read_labels(table))
    labels = dict(zip(m.table["path"], m.table["label"], strict=True))
    assert labels == {f"LEAK/{NFD}.wav": "NOLEAK", "LEAK/b.wav": "LEAK", "NOLEAK/c.wav": "NOLEAK"}
    assert m.people["not_found"] == 0


def test_decisions_that_mean_one_recording_count_together():
    given = [decision("a ", "X", "ann"), decision("a\u200b", "Y", "bob"), decision("b", "Y", "bob")]
    found = relabel(current_labels(given), ["a", "b", "b\u00a0"], [""] * 3, ["X", "X", "X"])
    assert list(found.disagreements) == [0]
    assert found.labels == ["X", "Y", "X"], "b is there itself"


def test_a_label_by_people_that_looks_the_same_is_the_same():
    name = unicodedata.normalize("NFD", "Geräusch")
    current = current_labels([decision("a", "Geräusch", "ann"), decision("a", name, "bob")])
    assert not current.disagreements
    found = relabel(current, ["a", "b"], ["", ""], ["GERÄUSCH", "x"])
    assert list(found.persons) == [0]
    assert not found.changed


def test_a_label_by_people_makes_no_second_class(tmp_path):
    name = unicodedata.normalize("NFD", "Geräusch")
    put(tmp_path, "Geräusch/a.wav", "LEAK/b.wav")
    m = relabel_manifest(scan(tmp_path), current_labels([decision("LEAK/b.wav", name)]))
    assert m.label_names == ("Geräusch", "LEAK")
    assert set(m.table["label"]) == {"Geräusch"}
    put(tmp_path / "two", "LEAK/a.wav", "Leak/b.wav", "NOLEAK/c.wav", "NOLEAK/d.wav")
    new = [decision("NOLEAK/c.wav", "LEAK"), decision("NOLEAK/d.wav", "PUMP")]
    m = relabel_manifest(scan(tmp_path / "two"), current_labels(new))
    assert m.table["label"].tolist() == ["LEAK", "Leak", "LEAK", "PUMP"], "folders that differ in case"


def test_marks_of_tracks():
    ranges = [TimeRange(0.0, 1.0, unicodedata.normalize("NFD", "Geräusch"))]
    assert label_of(ranges, ["LEAK", "Geräusch"]) == "Geräusch"
