"Import and export of label tracks: round trip, names of recordings, and hostile folders."

import csv
import os
import shutil

import numpy as np
import pytest

from leakmel.cli import main
from leakmel.core.errors import DataError, LeakmelError, OutputError
from leakmel.recordings.demo import write_wav
from leakmel.recordings.labels import (
    TRACK_FORMATS,
    Decision,
    append_decision,
    export_tracks,
    import_tracks,
    now_utc,
    read_decisions,
    read_labels,
)
from leakmel.recordings.wav import read_wav

NAMES = ("LEAK/a.wav", "LEAK/ü b.WAV", "NOLEAK/c.wave", "NOLEAK/deep/d.wav")


@pytest.fixture
def heard(tmp_path, make_wav):
    "Four recordings in label folders."
    for seed, name in enumerate(NAMES):
        make_wav(tmp_path / "heard" / name, seed=seed)
    return tmp_path / "heard"


@pytest.mark.parametrize("format", TRACK_FORMATS)
def test_round_trip(tmp_path, heard, format):
    for name, label in zip(NAMES, ("NOLEAK", "LEAK", "LEAK", "?"), strict=True):
        digest = read_wav(heard / name).digest
        append_decision(tmp_path / "labels.csv", Decision(name, digest, label, "ann", now_utc()))
    before = read_labels(tmp_path / "labels.csv")
    done = export_tracks(tmp_path / "labels.csv", heard, format=format, recordings=heard)
    assert [done.summary[k] for k in ("unsure", "not_found")] == [1, 0]
    assert len(done.summary["written"]) == 3
    back = import_tracks([heard], tmp_path / "back.csv", by="ben")
    assert back.summary["written"] == 3
    assert read_labels(tmp_path / "back.csv").labels == before.labels
    assert {d.by for d in read_decisions(tmp_path / "back.csv")} == {"ben"}
    content = (tmp_path / "back.csv").read_bytes()
    assert import_tracks([heard], tmp_path / "back.csv", by="ben").summary["unchanged"] == 3
    assert (tmp_path / "back.csv").read_bytes() == content
    assert import_tracks([heard], tmp_path / "back.csv", by="cid").summary["written"] == 3


def test_no_track_to_import(tmp_path):
    with pytest.raises(DataError) as e:
        import_tracks([], tmp_path / "labels.csv", by="ben")
    assert (e.value.code, e.value.path) == ("no-recordings", tmp_path / "labels.csv")


def test_a_damaged_recording_ends_no_export(tmp_path, heard):
    for name in NAMES[:2]:
        append_decision(
            tmp_path / "labels.csv", Decision(name, read_wav(heard / name).digest, "LEAK", "ann", now_utc())
        )
    (heard / NAMES[0]).write_bytes(b"RIFF")
    done = export_tracks(tmp_path / "labels.csv", tmp_path / "to", recordings=heard)
    assert (len(done.summary["written"]), done.summary["not_found"]) == (1, 1)
    (heard / "TRAINING").mkdir()
    (heard / NAMES[2]).rename(heard / "TRAINING/x.wav")
    (heard / "x.wav").write_bytes(b"RIFF")
    append_decision(tmp_path / "labels.csv", Decision("x.wav", "", "LEAK", "ann", now_utc()))
    append_decision(tmp_path / "labels.csv", Decision("TRAINING/x.wav", "0" * 32, "LEAK", "ann", now_utc()))
    done = export_tracks(tmp_path / "labels.csv", tmp_path / "more", recordings=heard)
    assert (len(done.summary["written"]), done.summary["not_found"]) == (2, 2), "a decision without a digest"
    shutil.copy(heard / NAMES[3], heard / "x.wav")
    (tmp_path / "paths.csv").write_text("path,label\nx.wav,LEAK\nTRAINING/x.wav,NOLEAK\n")
    with pytest.raises(DataError) as e:
        export_tracks(tmp_path / "paths.csv", tmp_path / "none", recordings=heard)
    assert (e.value.code, (tmp_path / "none").exists()) == ("ambiguous-recording", False)


def test_files_that_exist_are_not_replaced(tmp_path, heard):
    digest = read_wav(heard / NAMES[0]).digest
    append_decision(tmp_path / "labels.csv", Decision(NAMES[0], digest, "LEAK", "ann", now_utc()))
    track = heard / "LEAK/a.txt"
    track.write_text("0\t1\tmine\n")
    with pytest.raises(OutputError) as e:
        export_tracks(tmp_path / "labels.csv", heard, recordings=heard)
    assert (e.value.code, e.value.path) == ("other-file-in-the-way", track)
    assert track.read_text() == "0\t1\tmine\n"


def test_a_renamed_recording_and_one_that_is_gone(tmp_path, heard):
    for name in NAMES[:2]:
        digest = read_wav(heard / name).digest
        append_decision(tmp_path / "labels.csv", Decision(name, digest, "LEAK", "ann", now_utc()))
    (heard / NAMES[0]).rename(heard / "moved.wav")
    (heard / NAMES[1]).unlink()
    done = export_tracks(tmp_path / "labels.csv", tmp_path / "tracks", recordings=heard)
    assert (done.summary["written"], done.summary["not_found"]) == (["moved.txt"], 1)


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
    made = ["labels", "export", str(labels), "--to", str(tmp_path / "t"), "--recordings", str(heard)]
    assert main([*made, "--format", "raven"]) == 0
    assert (tmp_path / "t/LEAK/a.selections.txt").is_file()
    for wrong in ([*made, "--into", "x"], words[:3], [*words, "--to", "x"], [*made[:3], "x", *made[3:]]):
        assert main(wrong) == 2
    capsys.readouterr()


def test_a_recording_of_other_rate(tmp_path):
    "The upper edge of a selection is half the sample rate of its recording."
    write_wav(tmp_path / "a.wav", np.zeros(800, np.int16), 8000)
    (tmp_path / "l.csv").write_text("path,label\na.wav,LEAK\n")
    export_tracks(tmp_path / "l.csv", tmp_path / "t", format="raven", recordings=tmp_path)
    assert "0.100000\t0.0\t4000\tLEAK" in (tmp_path / "t/a.selections.txt").read_text()


def test_a_folder_without_tracks_is_an_error(tmp_path):
    with pytest.raises(DataError) as e:
        import_tracks([tmp_path], tmp_path / "labels.csv", by="ann")
    assert (e.value.code, e.value.path) == ("no-recordings", tmp_path)
    assert not (tmp_path / "labels.csv").exists()


def test_the_leak_label_is_one_of_the_classes(tmp_path):
    with pytest.raises(LeakmelError) as e:
        import_tracks([tmp_path], tmp_path / "labels.csv", by="ann", classes=("crack", "ok"))
    assert e.value.code == "unknown-label"
