"Tables as spreadsheets save them, at each place that reads a table of a person."

import json
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from each import each
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from spreadsheets import NAMED, Dialect, as_saved, dialects

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, text_key
from leakmel.extras.nightly.nights import last_visits, read_all_visits
from leakmel.extras.nightly.run import place_of
from leakmel.extras.review.review import read_score_table
from leakmel.recordings.labels import (
    LABELS_COLUMNS,
    Decision,
    append_decision,
    read_decisions,
    read_labels,
    unused_tables,
)
from leakmel.recordings.naming import dashed_date
from leakmel.recordings.tables import csv_table, decode_text, read_table, table_number
from leakmel.recordings.wav import canonical_header


def fuzz(n: int) -> settings:
    "The same `n` examples each time, none kept on disk."
    return settings(max_examples=n, deadline=None, derandomize=True, database=None)


# cells as people write them: delimiters, quotes, letters of several scripts
texts = st.text("abz09 äÜéЖ水,;'\"|.-=()", max_size=8).map(str.strip)
words = texts.filter(bool)
numbers = st.integers(-99_999, 99_999).map(lambda k: k / 100)
scores = st.integers(0, 1000).map(lambda k: k / 1000)
dates = st.dates(date(1990, 1, 1), date(2100, 1, 1))


def written(x: float, comma: bool) -> str:
    return f"{x:.3f}".rstrip("0").replace(".", "," if comma else ".") if comma else repr(x)


def dated(data, day) -> str:
    "A date as spreadsheets show it."
    forms = [
        "{0:%Y}-{0:%m}-{0:%d}",
        "{0.day}.{0.month}.{0:%Y}",
        "{0:%d}.{0:%m}.{0:%Y}",
        "{0:%Y}/{0.month}/{0.day}",
    ]
    form = data.draw(st.sampled_from(forms)).format(day)
    return form + data.draw(st.sampled_from(["", " 00:00:00", " 0:00"]))


def file_of(tmp_path_factory, data: bytes) -> Path:
    file = tmp_path_factory.mktemp("t", numbered=True) / "t.csv"
    file.write_bytes(data)
    return file


@pytest.mark.slow
@given(
    data=st.data(),
    d=dialects,
    rows=st.lists(st.tuples(texts, texts, numbers, dates, texts), min_size=1, max_size=4),
)
@fuzz(150)
def test_tables_of_recordings(tmp_path_factory, data, d, rows):
    "--table of scan, build, predict, nightly, verify; and the recordings of suggestions."
    comma = data.draw(st.booleans())
    cells = [["path", "label", "sensor", "gain", "start_time", "remark"]]
    for k, (label, sensor, gain, day, remark) in enumerate(rows):
        given_date = dated(data, day).partition(" ")[0]
        cells.append(
            [f"{k} {remark}.wav", label or "x", sensor, written(gain, comma), f"{given_date} 02:03", remark]
        )
    t = read_table(file_of(tmp_path_factory, as_saved(cells, d)))
    assert t.paths == [row[0].encode() for row in cells[1:]]
    assert t.labels == [row[1] for row in cells[1:]]
    assert [p.sensor for p in t.parts] == [sensor for _, sensor, *_ in rows]
    assert np.allclose([p.gain for p in t.parts], [gain for _, _, gain, *_ in rows])
    assert [p.start_time for p in t.parts] == [f"{day.isoformat()}T02:03:00" for *_, day, _ in rows]
    assert t.extra[getattr("remark", d.header)()] == [remark for *_, remark in rows]


@given(d=dialects, rows=st.lists(st.tuples(words, words, texts), min_size=1, max_size=4))
@fuzz(150)
def test_labels_by_people(tmp_path_factory, d, rows):
    "labels.csv of review, build, train, evaluate, retrain; and a table of paths and labels in its place."
    when = "2026-01-31T08:15:00Z"
    made = [
        Decision(f"{k}.wav", f"{k:032x}", label, by, when, note) for k, (label, by, note) in enumerate(rows)
    ]
    cells = [[getattr(m, name) for name in LABELS_COLUMNS] for m in made]
    file = file_of(tmp_path_factory, as_saved([LABELS_COLUMNS, *cells], d))
    assert read_decisions(file) == made
    assert read_labels(file).labels.keys() == {m.digest for m in made if m.label != "?"}
    by_hand = [["path", "label"], *([m.path, m.label] for m in made)]
    found = read_labels(file_of(tmp_path_factory, as_saved(by_hand, d)))
    assert {path: last[0].label for path, last in found.last.items()} == {m.path: m.label for m in made}


@given(
    data=st.data(),
    d=dialects,
    rows=st.lists(st.tuples(words, dates, texts), min_size=1, max_size=4, unique_by=lambda r: text_key(r[0])),
)
@fuzz(150)
def test_visits(tmp_path_factory, data, d, rows):
    "nightly --visited."
    cells = [
        ["remark", "sensor", "night"],
        *([remark, sensor, dated(data, day)] for sensor, day, remark in rows),
    ]
    file = file_of(tmp_path_factory, as_saved(cells, d, ()))
    assert last_visits(read_all_visits(file)) == {
        text_key(sensor): day.isoformat() for sensor, day, _ in rows
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["predict", "cross_validation", "suggest"])
@given(
    data=st.data(),
    d=dialects,
    rows=st.lists(st.tuples(scores, scores, st.booleans(), texts), min_size=1, max_size=4),
)
@fuzz(75)
def test_scores(tmp_path_factory, kind, data, d, rows):
    "--scores of review and explore."
    comma = data.draw(st.booleans())
    truth = data.draw(
        st.sampled_from([("False", "True"), ("FALSE", "TRUE"), ("FALSCH", "WAHR"), ("FAUX", "VRAI")])
    )
    columns = {
        "predict": ["path", "score", "threshold", "segment_scores", "scored_s"],
        "cross_validation": ["path", "score", "fold", "leak"],
        "suggest": ["path", "score", "kind", "reason", "digest", "path_base64"],
    }[kind]
    cells = [columns]
    for k, (score, other, is_leak, text) in enumerate(rows):
        path, one = f"{k} {text}.wav", written(score, comma)
        cells.append(
            {
                "predict": [
                    path,
                    one,
                    written(0.25, comma),
                    f"{written(other, comma)} {one}",
                    written(1.5, comma),
                ],
                "cross_validation": [path, one, "0", truth[is_leak]],
                "suggest": [path, one, "random", text, f"{k:032x}", ""],
            }[kind]
        )
    _, found = read_score_table(file_of(tmp_path_factory, as_saved(cells, d)))
    names, given = zip(*found, strict=True)
    assert list(names) == [row[0] for row in cells[1:]]
    if kind == "predict":
        assert [r["score"] for r in given] == [score for score, *_ in rows]
        assert [r["segment_scores"] for r in given] == [(other, score) for score, other, *_ in rows]
        assert {(r["threshold"], r["segment_s"]) for r in given} == {(0.25, 0.75)}
    elif kind == "cross_validation":
        assert [r["held_out"] for r in given] == [score for score, *_ in rows]
        assert [r["is_leak"] for r in given] == [is_leak for *_, is_leak, _ in rows]
    else:
        assert [r["suggestion"] for r in given] == [f"random: {row[3]}" for row in cells[1:]]


@pytest.mark.slow
@each("d", NAMED.values(), ids=NAMED)
def test_commands(tmp_path, capsys, d: Dialect):
    "Tables given to scan, build and verify; the labels of the second table replace those of the first."
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for k in range(4):
        x = rng.normal(0, 3000, 4096).astype("<i2")
        (tmp_path / "data" / f"ü{k}.wav").write_bytes(canonical_header(4096, 4096) + x.tobytes())
    rows = [[f"ü{k}.wav", ("LEAK", "NOLEAK")[k % 2], f"Süd {k}", "1,5", ""] for k in range(4)]
    (tmp_path / "t.csv").write_bytes(as_saved([["path", "label", "sensor", "gain", "remark"], *rows], d))
    (tmp_path / "l.csv").write_bytes(as_saved([["file", "label"], ["ü1.wav", "LEAK"]], d))
    table = [str(tmp_path / "data"), "--table", str(tmp_path / "t.csv")]
    assert main(["scan", *table, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"] == 4
    given = [
        "--labels",
        str(tmp_path / "l.csv"),
        "--sample-rate",
        "4096",
        "--duration-s",
        "1",
        "--engine",
        "cpu",
    ]
    assert main(["build", *table, "--out", str(tmp_path / "x.h5"), *given, "--quiet"]) == 0
    with lm.open_dataset(tmp_path / "x.h5") as ds:
        assert ds.files["sensor"].tolist() == [f"Süd {k}" for k in range(4)]
        assert ds.files["gain"].tolist() == [1.5] * 4
        assert (ds.files["label_by"] if "label_by" in ds.files else ds.files["extra/label_by"]).tolist() == [
            "",
            "l.csv",
            "",
            "",
        ]
    capsys.readouterr()


# ---- what is refused


@each(
    "night",
    ["11/9/2025", "25/12/2025", "9.11.25", "9-11-2025", "45970", "2025-11-09 02:00", "31.11.2025", ""],
)
def test_nights_that_are_not_clear_are_refused(tmp_path, night):
    (tmp_path / "v.csv").write_text(f"sensor;night\r\nH1;9.11.2025\r\n\r\nH2;{night}\r\n", newline="")
    with raises(
        "invalid-visits",
        DataError,
        says="line 4: the night of a visit is not a date",
        path=tmp_path / "v.csv",
    ) as e:
        read_all_visits(tmp_path / "v.csv")
    assert "2025-11-09" in str(e.value.remedy)


@each(
    ("read", "head"),
    [
        (read_table, "path,label,"),
        (read_all_visits, "sensor,night,"),
        (read_score_table, "path,score,threshold,segment_scores,"),
        (read_decisions, ",".join(LABELS_COLUMNS) + ","),
    ],
)
def test_other_encodings_and_broken_rows_are_refused(tmp_path, read, head):
    file = tmp_path / "t.csv"
    for rest, line, words in (
        ("remark\r\n\r\nSüd".encode() + "ü\r\n".encode("cp1252"), 3, "CSV UTF-8"),
        (b'remark\n\n\n"a,b\n', 4, "quotes"),
        (b"remark\n" + b"x," * 9 + b"x\n", 2, "the row has 10 cells"),
    ):
        file.write_bytes(head.encode() + rest)
        with raises("table-row", DataError, says=f"line {line}: ", path=file) as e:
            read(file)
        assert words in str(e.value)


def test_a_number_with_two_meanings_is_refused():
    assert [table_number(text, ";") for text in ("1,500", "1.500", "-,5", "+2.", "7,31E-02")] == [
        1.5,
        1.5,
        -0.5,
        2,
        0.0731,
    ]
    assert [table_number(text, ",") for text in ("0,500", "1,5", "12,3456")] == [0.5, 1.5, 12.3456]
    for text in ("1,500", "-12,345", "1.234,5", "1,2,3", "", "nan", "inf", "1e99", "0x1", "1 5", "１"):
        with pytest.raises(ValueError, match="is "):
            table_number(text, ",")


def test_dates_of_spreadsheets():
    assert dashed_date(" 1.2.2025 0:00") == "2025-02-01 0:00"
    for text in ("2025-02-01", "1.2.20255", "1.2.25", "2/1/2025", "noon", ""):
        assert dashed_date(text) == text


def test_coordinates_with_decimal_commas():
    place = place_of({"Lat": "48,137", "LON": " 11,575 "})
    assert place is not None
    assert place == (11.575, 48.137, True)
    assert place_of({"x": "4468503,333", "y": "5333317,780"}) == place_of(
        {"x": "4468503.333", "y": "5333317.78"}
    )


def test_appending_to_a_saved_table_keeps_it_or_is_refused(tmp_path):
    "A line is never added in another encoding, and no row is lost."
    first = Decision("ü.wav", "", "LEAK", "ann", "2026-01-31T08:15:00Z")
    second = Decision("b.wav", "", "NOLEAK", "ben", "2026-01-31T09:15:00Z")
    rows = [LABELS_COLUMNS, [getattr(first, name) for name in LABELS_COLUMNS]]
    for d in (*NAMED.values(), Dialect("utf-16-be", ";", "\r")):
        file = tmp_path / "labels.csv"
        file.write_bytes(as_saved(rows, d, range(6)))
        before = file.read_bytes()
        if d.encoding in ("utf-16", "utf-16-be", "cp1252") or d.line_end == "\r" or d.sep or d.blank:
            with raises("table-columns", DataError) as e:
                append_decision(file, second)
            assert "CSV UTF-8" in str(e.value.remedy)
            assert file.read_bytes() == before
            assert read_decisions(file) == [first]
        else:
            append_decision(file, second)
            assert file.read_bytes().startswith(before)
            assert read_decisions(file) == [first, second]


def test_a_delimiter_that_is_named_and_an_encoding_that_is_found(tmp_path, caplog):
    (tmp_path / "v.csv").write_bytes(
        "Sensor;Night\r\nA1;1.11.2026\r\nHauptstraße 1;2.11.2026\r\n".encode("cp1252")
    )
    assert last_visits(read_all_visits(tmp_path / "v.csv")) == {
        "A1": "2026-11-01",
        "Hauptstraße 1": "2026-11-02",
    }
    assert "v.csv: read as Windows-1252: Hauptstraße 1" in caplog.text
    (tmp_path / "list.csv").write_bytes("path,label,place\na.wav,leak,Straße\n".encode("cp1252"))
    for with_labels in (True, False):  # as scan and build read it, and then predict and nightly
        caplog.clear()
        read_table(tmp_path / "list.csv", with_labels=with_labels)
        assert ("read as Windows-1252" in caplog.text) == with_labels
    caplog.clear()
    assert [kind for kind, *_ in unused_tables(tmp_path, {})] == []
    assert not caplog.text, "it is not used"
    for text in ("sep=|\r\nSensor|Night\r\n", '"sep=|"\nSensor|Night\n', "SEP=|;;\rSensor|Night\r"):
        table = csv_table(tmp_path, decode_text(text.encode("utf-8-sig"), tmp_path))
        assert (table.columns, table.delimiter) == (["sensor", "night"], "|")
    (tmp_path / "v.csv").write_text("sep=|\nSensor|Night\nH1|tomorrow\n")
    with raises("invalid-visits", DataError, says="line 3: "):
        read_all_visits(tmp_path / "v.csv")
