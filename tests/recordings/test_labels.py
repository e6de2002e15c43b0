"Decisions by people: durable appends, hostile tables, and the label that follows."

import csv
import multiprocessing
import os
from pathlib import Path

import pytest
from each import each

from leakmel.core.errors import DataError, OutputError
from leakmel.recordings.labels import (
    LABELS_COLUMNS,
    Decision,
    append_decision,
    check_paths,
    current_labels,
    read_decisions,
    read_labels,
    relabel,
)

A, B = "a" * 32, "b" * 32
HEADER = ",".join(LABELS_COLUMNS) + "\n"


def said(label: str, by: str = "ann", minute: int = 0, digest: str = A, path: str = "LEAK/a.wav") -> Decision:
    return Decision(path, digest, label, by, f"2026-01-31T08:{minute:02}:00Z")


@each(
    "changes",
    [
        {"path": ""},
        {"path": "/etc/passwd"},
        {"path": "a/../../b.wav"},
        {"path": "a\0.wav"},
        {"digest": "A" * 32},
        {"digest": "a" * 31},
        {"label": "LEAK\nNOISE"},
        {"label": "x" * 1001},
        {"note": "\x1b[2J"},
        {"by": " "},
        {"when": "2026-01-31"},
        {"when": "2026-13-31T08:00:00Z"},
        {"when": "2026-01-31T08:00:00+01:00"},
        {"label": 1},
    ],
)
def test_invalid_decisions(changes):
    good = {"path": "a.wav", "digest": A, "label": "LEAK", "by": "ann", "when": "2026-01-31T08:00:00Z"}
    with pytest.raises(DataError) as e:
        Decision(**(good | changes))
    assert e.value.code == "invalid-decision"
    assert e.value.found == repr(str(*changes.values())[:80] if changes != {"label": 1} else 1)


def test_round_trip(tmp_path):
    file = tmp_path / "labels.csv"
    odd = Decision('LEAK/a "b",c.wav', A, "LEAK, big", "änn", "2026-01-31T08:00:00.125Z", "=1+1; 'x'")
    for d in (odd, said("?"), said("", digest="")):
        append_decision(file, d)
    assert read_decisions(file) == [odd, said("?"), said("", digest="")]
    assert file.read_bytes().startswith(HEADER.encode())
    assert file.read_bytes().count(b"\n") == 4


def test_a_path_that_is_not_utf8(tmp_path):
    file, path = tmp_path / "labels.csv", os.fsdecode(b"LEAK/\xff\n.wav")
    append_decision(file, said("LEAK", path=path))
    assert read_labels(file).labels == {A: "LEAK"}
    with pytest.raises(DataError, match="needs a digest"):
        append_decision(file, said("LEAK", path=path, digest=""))


@pytest.mark.parametrize("with_bom", [False, True])
def test_append_repairs_any_incomplete_last_line(tmp_path, with_bom):
    "A crash may leave any beginning of the file; complete lines stay, and the next append repairs the end."
    file = tmp_path / "labels.csv"
    first, second = said("LEAK"), Decision("LEAK/ü.wav", B, "NOLEAK", "ben", "2026-01-31T09:00:00Z", "a, tap")
    append_decision(file, first)
    n_first = file.stat().st_size
    append_decision(file, second)
    whole = file.read_bytes()
    bom = b"\xef\xbb\xbf" * with_bom
    for n in range(len(whole)):
        file.write_bytes(bom + whole[:n])
        n_read = len(read_decisions(file))
        assert n_read >= (n >= n_first)
        append_decision(file, said("LEAK", "cid", 30))
        after = read_decisions(file)
        assert len(after) >= n_read + 1
        assert after[-1].by == "cid"
        assert (first in after) == (n >= n_first - 1 or n_read > 0)
    file.write_bytes(whole + b"\0" * 100)  # of a file system that lost the last write
    assert read_decisions(file) == [first, second]


@each(
    ("content", "code"),
    [
        (b"path,label\nLEAK/a.wav,LEAK\n", "table-columns"),
        (b"\x7fELF\0\0\0\0" * 100, "table-unreadable"),
        (b"a;b\n" * 1000, "table-columns"),
        (HEADER.encode().replace(b",", b";")[:-1] + b";path\n", "table-columns"),
        (HEADER.encode().replace(b",", b"|"), "table-columns"),
        (HEADER.encode().replace(b",", b";") + b"LEAK/a.wav,,LEAK,ann,2026-01-31T08:00:00Z,\n", "table-row"),
        (HEADER.encode()[:-1] + b",path\n", "table-columns"),
        (HEADER.encode() + b"LEAK/a.wav,,LEAK\nx\n", "table-row"),
        (HEADER.encode() + b"../a.wav,,LEAK,ann,2026-01-31T08:00:00Z,\n", "table-row"),
        (HEADER.encode() + b'"LEAK/a.wav\n' * 10, "table-row"),
        (HEADER.encode() + b"\xff\x81\xfe,,LEAK,ann,2026-01-31T08:00:00Z,\n", "table-row"),
        (HEADER.encode() + b"a" * 200_000 + b",,LEAK,ann,2026-01-31T08:00:00Z,\n", "table-row"),
    ],
)
def test_hostile_tables(tmp_path, content, code):
    file = tmp_path / "labels.csv"
    file.write_bytes(content)
    with pytest.raises(DataError) as e:
        read_decisions(file)
    assert e.value.code == code
    if code != "table-row":
        with pytest.raises(DataError) as e:
            append_decision(file, said("LEAK"))
    assert file.read_bytes() == content  # nothing is written into a foreign file


def test_other_files_are_refused_as_tables(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in ("fifo", ".", "/dev/zero"):
        with pytest.raises(DataError) as e:
            read_decisions(tmp_path / path)
        assert e.value.code == "table-unreadable"
        with pytest.raises((DataError, OutputError)):
            append_decision(tmp_path / path, said("LEAK"))
    with pytest.raises(OutputError):
        append_decision(tmp_path / "no" / "labels.csv", said("LEAK"))


def test_other_columns_and_order(tmp_path):
    "A spreadsheet may add columns, move them, and write Windows line ends."
    file = tmp_path / "labels.csv"
    append_decision(file, said("LEAK"))
    rows = list(csv.reader(file.read_text().splitlines()))
    with open(file, "w", newline="", encoding="utf-8-sig") as f:
        csv.writer(f).writerows([*reversed(row), "x"] for row in rows)
    assert read_decisions(file) == [said("LEAK")]
    file.write_bytes(HEADER.replace("\n", "\r\n").encode())
    append_decision(file, said("LEAK"))
    assert read_decisions(file) == [said("LEAK")]


@each("delimiter", [";", "\t"])
@each("bom", [b"", b"\xef\xbb\xbf"])
def test_another_delimiter(tmp_path, delimiter, bom):
    "A spreadsheet saves the table with the delimiter of its country; appending keeps it."
    file = tmp_path / "labels.csv"
    first = Decision('LEAK/a;"b",c.wav', A, "LEAK", "ann", "2026-01-31T08:00:00.125Z", "a; b, c")
    append_decision(file, first)
    rows = list(csv.reader(file.read_text().splitlines()))
    with open(file, "w", newline="") as f:
        csv.writer(f, delimiter=delimiter).writerows(rows)
    file.write_bytes(bom + file.read_bytes())
    assert read_decisions(file) == [first]
    assert read_labels(file).last[A] == (first,)
    append_decision(file, said("NOLEAK", "ben", 30))
    assert read_decisions(file) == [first, said("NOLEAK", "ben", 30)]
    assert list(read_labels(file).disagreements) == [A]
    whole = file.read_bytes()
    for n in range(1, 40):  # a crash while the last row was written
        file.write_bytes(whole[:-n])
        append_decision(file, said("NOLEAK", "cid", 45))
        assert read_decisions(file)[0] == first
        assert read_decisions(file)[-1].by == "cid"


def test_appending_to_moved_columns_is_refused(tmp_path):
    file = tmp_path / "labels.csv"
    content = ";".join(reversed(LABELS_COLUMNS)).encode() + b"\n"
    file.write_bytes(content)
    assert read_decisions(file) == []
    with pytest.raises(DataError) as e:
        append_decision(file, said("LEAK"))
    assert (e.value.code, e.value.path) == ("table-columns", file)
    assert "save the table" in (e.value.remedy or "")
    assert file.read_bytes() == content


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    file = tmp_path / "labels.csv"
    append_decision(file, said("LEAK"))
    before, write = file.read_bytes(), os.write

    def half(fd, data):
        if len(data) > 20:
            return write(fd, data[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OutputError) as e:
        append_decision(file, said("NOLEAK"))
    assert e.value.code == "no-space"
    assert file.read_bytes() == before


def _many(file: Path, by: str) -> None:
    for minute in range(40):
        append_decision(file, said("LEAK", by, minute))


def test_several_people_at_once(tmp_path):
    file = tmp_path / "labels.csv"
    context = multiprocessing.get_context("fork")
    people = [context.Process(target=_many, args=(file, name)) for name in ("ann", "ben", "cid")]
    for p in people:
        p.start()
    for p in people:
        p.join()
    found = read_decisions(file)
    assert len(found) == 120
    assert {d.by for d in found} == {"ann", "ben", "cid"}
    assert file.read_text().count("path,digest") == 1


@each(
    ("decisions", "kind"),
    [
        ([said("LEAK")], "agreed"),
        ([said("LEAK"), said("leak", "ben", 1)], "agreed"),
        ([said("LEAK"), said("NOLEAK", "ben", 1)], "differ"),
        ([said("LEAK"), said("NOLEAK", "ben", 1), said("NOLEAK", "ann", 2)], "agreed"),
        ([said("NOLEAK", "ann", 2), said("LEAK", "ann", 1)], "agreed"),  # merged files: the time decides
        ([said("LEAK"), said("?", "ben", 1)], "unsure"),
        ([said("LEAK"), said("NOLEAK", "ben", 1), said("?", "cid", 2)], "differ"),
        ([said("LEAK"), said("", "ben", 1)], "agreed"),
        ([said("LEAK"), said("", "ann", 1)], "none"),
        ([said("")], "none"),
    ],
)
def test_current_labels(decisions, kind):
    now = current_labels(decisions)
    assert len(repr(now)) < 100
    found = {"agreed": A in now.labels, "differ": A in now.disagreements, "unsure": A in now.unsure}
    assert [k for k, v in found.items() if v] == ([] if kind == "none" else [kind])
    after = relabel(now, ["LEAK/other.wav"], [A], ["PUMP"])
    assert list(after.persons) == [0] * (kind == "agreed")
    assert (after.labels == ["PUMP"]) == (kind != "agreed")


def test_matching():
    "By content; by path only where the decision has no digest."
    now = current_labels([said("NOLEAK"), said("NOLEAK", digest="", path="LEAK/b.wav")])
    found = relabel(now, ["LEAK/a.wav", "LEAK/b.wav", "copy.wav"], [B, "", A], ["LEAK"] * 3)
    assert found.labels == ["LEAK", "NOLEAK", "NOLEAK"]
    assert not found.missing
    both = current_labels([said("NOLEAK"), said("LEAK", "ben", 1, digest="")])  # the same recording
    assert list(relabel(both, ["LEAK/a.wav"], [A], ["LEAK"]).disagreements) == [0]
    with pytest.raises(DataError) as e:
        check_paths(now, ["LEAK/b.wav", "LEAK/b.wav"])
    assert e.value.code == "ambiguous-recording"
