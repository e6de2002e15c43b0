"What is guessed from names and from tables that nobody named: never more than they say, and never what they must not do."

import csv
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from each import each

import leakmel as lm
from leakmel.cli import main
from leakmel.recordings.labels import unused_tables
from leakmel.recordings.manifest import with_guess


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"RIFF")
    return root


def table(file: Path, *rows: tuple[str, ...]) -> Path:
    with open(file, "w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows(rows)
    return file


def test_label_folders_are_not_taken_for_sensors(tmp_path: Path) -> None:
    "Names of times alone, as some recorders write them, also with a few others among them."
    times = [f"{label}/202401{k:02d}_000000.WAV" for label in ("LEAK", "NO_LEAK") for k in range(1, 29)]
    put(tmp_path, *times, "LEAK/LOG1_20240101_000000.wav", "LEAK/odd.wav")
    manifest = lm.scan(tmp_path, progress="none")
    assert with_guess(manifest) == (manifest, "")


def test_guessed_sensors_are_built_as_by_the_pattern(
    tmp_path: Path, make_wav: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    "By default, with a line that says so; a data set of before gets them, its rows stay; none switches it off."
    names = [f"LEAK/LOG{k % 3}_202401{1 + k:02d}_0200.wav" for k in range(12)]
    names += ["NO_LEAK/LOG7_20240101_0200.wav", "NO_LEAK/LOG7_20240102_0200.wav", "NO_LEAK/odd.wav"]
    root, file = tmp_path / "own", tmp_path / "own.h5"
    for name in names:
        make_wav(root / name, n=4096)
    guessed, pattern = with_guess(lm.scan(root, progress="none"))
    given = lm.scan(root, pattern=pattern, progress="none")
    assert guessed.naming == given.naming
    assert guessed.table.equals(given.table)
    assert set(guessed.table["sensor"]) == {"LOG0", "LOG1", "LOG2", "LOG7", ""}

    def built(*more: str) -> tuple[str, bytes, list[str]]:
        assert main(["build", str(root), "--out", str(file), "--quiet", *more]) == 0
        with lm.open_dataset(file) as ds:
            return (
                capsys.readouterr().out,
                np.stack([ds[i][0] for i in range(len(ds))]).tobytes(),
                list(ds.files["sensor"]),
            )

    said, rows, sensors = built("--pattern", "none")
    assert "from the names" not in said
    assert set(sensors) == {""}
    assert main(["train", str(file), "--out", str(tmp_path / "m"), "--group", "sensor"]) == 1
    command = f"leakmel build {root} --pattern '{pattern}' --out {file}"
    assert f"Read them from the names ({command}), group by" in capsys.readouterr().err
    said, again, sensors = built()
    assert f"sensors and times from the names: {pattern}\n" in said
    assert "15 rows copied from the existing data set" in said
    assert again == rows
    assert sensors == guessed.table["sensor"].tolist()
    assert "nothing to do" in built()[0]
    assert "from the names" not in built("--pattern", pattern)[0], "it was given"
    for k in range(
        24
    ):  # alone, the three recordings of the test set have no sensors that repeat: all splits decide
        split = "TESTING" if k < 3 else "TRAINING"
        put(
            tmp_path / "two",
            f"{split}/{'LEAK' if k % 2 else 'NO_LEAK'}/LOG{k % 6}_202401{1 + k:02d}_0200.wav",
        )
    assert with_guess(lm.scan(tmp_path / "two", split="testing", progress="none"))[1] == pattern


@each(
    "head",
    [
        ("\x1b[31mfile", "state"),
        ("file\n\x1b[2Jnext: rm -rf x", "state"),
        ("file", "sta\x07te"),
        ("file,name", "state"),
        ("file", "a=b"),
    ],
)
def test_columns_that_no_command_can_hold_are_not_proposed(tmp_path: Path, head: tuple[str, str]) -> None:
    put(tmp_path / "d", "a.wav")
    table(tmp_path / "list.csv", head, ("a.wav", "leak"), ("b.wav", "no leak"))
    for name in ("t\x1b[31m.csv", os.fsdecode(b"t\xff.csv")):
        table(tmp_path / name, ("path", "label"), ("a.wav", "leak"), ("b.wav", "no leak"))
    assert [*unused_tables(tmp_path / "d", {})] == []


def test_cells_are_looked_for_below_the_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "Not elsewhere, and not where a cell is no name of a recording: each costs a call, on a network folder a long one."
    put(tmp_path / "d", "a.wav", "b.wav")
    # also where a row is short; a label repeats, a comment does not
    rows = [("a.wav", "possible leak at valve 3", "leak"), ("b.wav",), ("c.wav", "calm", "no leak")]
    file = table(tmp_path / "list.csv", ("file", "note", "state"), *rows)
    ((kind, found, where, columns),) = unused_tables(tmp_path / "d", {})
    assert (kind, found, where) == ("table", file, tmp_path / "d")
    assert columns in ("path=file,label=note", "path=file,label=state")
    put(tmp_path, "e.wav")
    table(tmp_path / "list.csv", ("file", "state"), ("/etc/passwd", "leak"), ("../e.wav", "no leak"))
    table(tmp_path / "log.csv", ("value", "state"), *[(f"{k}", "leak") for k in range(100)])
    table(tmp_path / "long.csv", ("file", "state"), (f"{'x' * 300}.wav", "leak"), ("a.wav", "no leak"))
    asked = list[str]()
    real = os.path.isfile

    def noting(path: Path) -> bool:
        asked.append(str(path))
        return real(path)

    monkeypatch.setattr(os.path, "isfile", noting)
    ((_, file, *_),) = unused_tables(tmp_path / "d", {})
    assert file.name == "long.csv"
    assert all(path.endswith(".wav") and str(tmp_path) in path for path in asked)


@each(
    ("head", "cells", "expected"),
    [
        (("Logger-ID", "When"), [("L1", "2026-11-01 02:00")], "sensor=Logger-ID,start_time=When"),
        (("Schacht Nr.", "Datum"), [("S", "1.11.2026")], "sensor=Schacht Nr.,start_time=Datum"),
        # names that leakmel knows need no proposal; two of a kind are for a person to choose from
        (("sensor", "start_time"), [("L1", "2026-11-01 02:00")], ""),
        (("sensor", "Logger"), [("L1", "A")], ""),
        (("From", "Until"), [("2026-11-01", "2026-11-02")], ""),
        # other words and other cells, and names that cannot be typed
        (("Operator", "Length"), [("Ann", "20")], ""),
        (("Pipe, no", "a=b"), [("3", "2026-11-01")], ""),
        # a material, a state, an empty cell, a serial number
        (("Pipe", "Valve"), [("steel", "open"), ("PE", "shut")], ""),
        (("Logger", "When"), [("L1", "2026-11-01"), ("", "unknown")], ""),
        (("Logger", "Serial"), [("", "20200101")], ""),
    ],
)
def test_sensor_and_time_of_a_table_are_proposed(tmp_path, head, cells, expected) -> None:
    put(tmp_path / "d", "a.wav")
    rows = [
        (
            f"{'abcdefgh'[k]}.wav",
            ("leak", "no leak")[k % 2],
            *(c.replace("L1", f"L{k % 3}").replace("S", f"S{k % 3}") for c in cells[k % len(cells)]),
        )
        for k in range(8)
    ]
    file = table(tmp_path / "list.csv", ("path", "label", *head), *rows)
    ((kind, *_, columns),) = unused_tables(tmp_path / "d", {})
    assert (kind, columns) == ("table", expected)
    if columns:  # the command that is proposed works
        lm.scan(tmp_path / "d", table=file, columns=columns, progress="none")


def test_a_name_for_each_recording_is_no_sensor(tmp_path) -> None:
    put(tmp_path / "d", "a.wav")
    rows = [(f"{x}.wav", ("leak", "no leak")[k % 2], f"P{k}") for k, x in enumerate("abcdef")]
    table(tmp_path / "list.csv", ("path", "label", "Location"), *rows)
    ((*_, columns),) = unused_tables(tmp_path / "d", {})
    assert columns == ""
