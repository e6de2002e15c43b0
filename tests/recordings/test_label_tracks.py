"Label tracks of Audacity and selection tables of Raven."

import os

import pytest
from each import each

from leakmel.core.errors import DataError
from leakmel.recordings.labels import TimeRange, label_of, read_track

LABELS = ["LEAK", "NOLEAK", "PUMP"]


def test_files_of_the_programs(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0,500000\t2,0\tleak\r\n\\\t100.0\t900.0\r\n3.0\t4.0\r\n")
    assert read_track(tmp_path / "a.txt") == [TimeRange(0.5, 2, "leak"), TimeRange(3, 4, "")]
    head = "Selection\tView\tBegin Time (s)\tEnd Time (s)\tCall\n"
    rows = "1\tWaveform 1\t0.5\t1\tLEAK\n1\tSpectrogram 1\t0.5\t1\tLEAK\n2\tWaveform 1\t2\t3\tPUMP\n"
    (tmp_path / "b.txt").write_text(head + rows)
    assert [r.text for r in read_track(tmp_path / "b.txt", "Call")] == ["LEAK", "PUMP"]


@each(
    "text",
    [
        "1\n",
        "a\tb\tLEAK\n",
        "2\t1\tLEAK\n",
        "nan\t1\tLEAK\n",
        "0\tinf\tx\n",
        "-1\t2\tx\n",
        "0\t1\t\x1b[2J\n",
        "0\t1\tA\tmore\n",
    ],
)
def test_hostile_tracks(tmp_path, text):
    (tmp_path / "a.txt").write_text("0\t1\tLEAK\n" + text)
    with pytest.raises(DataError, match="line 2") as e:
        read_track(tmp_path / "a.txt")
    assert e.value.code == "table-row"


def test_other_files_are_refused_as_tracks(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0" * 101)
    for name in ("fifo", "binary", "missing"):
        with pytest.raises(DataError) as e:
            read_track(tmp_path / name)
        assert e.value.code == "table-unreadable"
    (tmp_path / "empty").write_text("")
    assert read_track(tmp_path / "empty") == []
    (tmp_path / "raven").write_text("Begin Time (s)\tEnd Time (s)\n")
    with pytest.raises(DataError, match="no column"):
        read_track(tmp_path / "raven")


@each(
    ("ranges", "label"),
    [
        ([], ""),
        ([("tap", 5)], ""),
        ([("leak", 0), ("NOLEAK", 9)], "LEAK"),
        ([("PUMP", 2), ("NOLEAK", 3)], "NOLEAK"),
        ([("PUMP", 2), ("NOLEAK", 3), ("pump", 2)], "PUMP"),
        ([("PUMP", 2), ("NOLEAK", 2)], "?"),
    ],
)
def test_label_of_a_track(ranges, label):
    assert label_of([TimeRange(0, s, text) for text, s in ranges], LABELS) == label
