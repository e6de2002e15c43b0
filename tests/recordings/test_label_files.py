"Import of label tracks: repetition, names of recordings, and hostile folders."

import csv
import os

import pytest

from leakmel.cli import main
from leakmel.core.errors import DataError, LeakmelError
from leakmel.recordings.labels import import_tracks, read_decisions, read_labels
from leakmel.recordings.wav import read_wav

NAMES = ("LEAK/a.wav", "LEAK/ü b.WAV", "NOLEAK/c.wave", "NOLEAK/deep/d.wav")


@pytest.fixture
def heard(tmp_path, make_wav):
    "Four recordings in label folders."
    for seed, name in enumerate(NAMES):
        make_wav(tmp_path / "heard" / name, seed=seed)
    return tmp_path / "heard"


def test_the_import_can_be_repeated(tmp_path, heard):
    for name, label in zip(NAMES, ("NOLEAK", "LEAK", "LEAK"), strict=False):
        (heard / name).with_suffix(".txt").write_text(f"0.0\t1.0\t{label}\n")
    back = import_tracks([heard], tmp_path / "back.csv", by="ben")
    assert back.summary["written"] == 3
    found = read_labels(tmp_path / "back.csv").labels
    assert [found[read_wav(heard / name).digest] for name in NAMES[:3]] == ["NOLEAK", "LEAK", "LEAK"]
    assert {d.by for d in read_decisions(tmp_path / "back.csv")} == {"ben"}
    content = (tmp_path / "back.csv").read_bytes()
    assert import_tracks([heard], tmp_path / "back.csv", by="ben").summary["unchanged"] == 3
    assert (tmp_path / "back.csv").read_bytes() == content
    assert import_tracks([heard], tmp_path / "back.csv", by="cid").summary["written"] == 3


def test_no_track_to_import(tmp_path):
    with pytest.raises(DataError) as e:
        import_tracks([], tmp_path / "labels.csv", by="ben")
    assert (e.value.code, e.value.path) == ("no-recordings", tmp_path / "labels.csv")


def test_names_of_tracks(tmp_path, heard, make_wav):
    (heard / "LEAK/a.Table.1.selections.txt").write_text(
        "Selection\tBegin Time (s)\tEnd Time (s)\tCall\n1\t0\t1\tnoleak\n"
    )
    (heard / "README.txt").write_text("not a track")
    far = tmp_path / "tracks" / "c.txt"
    far.parent.mkdir()
    far.write_text("0\t1\ttap\n")
    done = import_tracks([heard], tmp_path / "l.csv", by="ann", column="Call")
    assert done.summary["decisions"] == [{"path": NAMES[0], "label": "NOLEAK"}]
    assert done.summary["without_recording"] == [str(heard / "README.txt")]
    done = import_tracks([far], tmp_path / "l.csv", by="ann", recordings=heard)
    assert done.summary["without_label"] == [f"{far} (tap)"]
    make_wav(heard / "c.wav")
    for tracks, given, code in (
        ([far], {"recordings": heard}, "ambiguous-recording"),
        ([far], {}, "no-recordings"),
        ([tmp_path / "none.txt"], {}, "no-recordings"),
        ([far], {"recordings": tmp_path / "none"}, "no-such-folder"),
    ):
        with pytest.raises(DataError) as e:
            import_tracks(tracks, tmp_path / "l.csv", by="ann", **given)
        assert e.value.code == code
        assert e.value.path is not None


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"0\t1\n2\tx\tLEAK\n", "table-row"),
        (b"0\t1\tLEAK\x1b[2J\n", "table-row"),
        (b"\xff\xfe\0", "table-unreadable"),
        (b"Begin Time (s)\tEnd Time (s)\n0\t1\n", "table-columns"),
        (b"1e309\t1e309\tLEAK\n", "table-row"),
    ],
)
def test_nothing_is_written_where_a_track_is_hostile(tmp_path, heard, content, code):
    (heard / "LEAK/a.txt").write_text("0\t1\tLEAK\n")
    (heard / "NOLEAK/c.txt").write_bytes(content)
    with pytest.raises(DataError) as e:
        import_tracks([heard], tmp_path / "l.csv", by="ann")
    assert (e.value.code, e.value.path) == (code, heard / "NOLEAK/c.txt")
    assert not (tmp_path / "l.csv").exists()


def test_a_damaged_recording_and_special_files(tmp_path, heard):
    (heard / "LEAK/a.txt").write_text("0\t1\tLEAK\n")
    (heard / "LEAK/a.wav").write_bytes(b"RIFF")
    with pytest.raises(LeakmelError) as e:
        import_tracks([heard], tmp_path / "l.csv", by="ann")
    assert e.value.path is not None
    assert os.fsdecode(e.value.path) == str(heard / "LEAK/a.wav")
    (heard / "LEAK/a.txt").unlink()
    os.mkfifo(heard / "LEAK/a.txt")
    with pytest.raises(DataError) as e:
        import_tracks([heard], tmp_path / "l.csv", by="ann")
    assert e.value.code == "no-recordings"  # a named pipe is no track


def test_tracks_that_contradict_each_other(tmp_path, heard):
    (heard / "LEAK/a.txt").write_text("0\t1\tLEAK\n")
    (heard / "LEAK/a.selections.txt").write_text("0\t1\tNOLEAK\n")
    with pytest.raises(DataError) as e:
        import_tracks([heard], tmp_path / "l.csv", by="ann")
    assert e.value.code == "ambiguous-recording"
    assert not (tmp_path / "l.csv").exists()


def test_command_line(tmp_path, heard, capsys):
    (heard / "LEAK/a.txt").write_text("0\t1\tno leak\n")
    labels = tmp_path / "labels.csv"
    words = ["labels", "import", str(heard), "--into", str(labels), "--by", "ann"]
    assert main([*words, "--classes", "LEAK,no leak"]) == 0
    with labels.open(newline="") as f:
        assert [row["label"] for row in csv.DictReader(f)] == ["no leak"]
    for wrong in (words[:3], [*words, "--to", "x"], ["labels", "export", *words[2:]]):
        assert main(wrong) == 2
    capsys.readouterr()


def test_a_folder_without_tracks_is_an_error(tmp_path):
    with pytest.raises(DataError) as e:
        import_tracks([tmp_path], tmp_path / "labels.csv", by="ann")
    assert (e.value.code, e.value.path) == ("no-recordings", tmp_path)
    assert not (tmp_path / "labels.csv").exists()


def test_the_leak_label_is_one_of_the_classes(tmp_path):
    with pytest.raises(LeakmelError) as e:
        import_tracks([tmp_path], tmp_path / "labels.csv", by="ann", classes=("crack", "ok"))
    assert e.value.code == "unknown-label"
