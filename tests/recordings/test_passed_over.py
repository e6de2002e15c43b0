"Folders in which no recordings of the user lie: passed over at any depth by whatever lists recordings, and counted in one line."

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from each import each
from errors import raises
from independent import SYSTEM_FOLDERS, check, walk

import leakmel as lm
from leakmel.cli import main
from leakmel.detector.predict.scoring import find_recordings
from leakmel.extras.machine.doctor import measure_recordings
from leakmel.extras.sets.fetch import read_members
from leakmel.recordings import listing
from leakmel.recordings.demo import wav_bytes
from leakmel.recordings.labels import import_tracks
from leakmel.recordings.listing import is_system_folder
from leakmel.recordings.manifest import Manifest, scan

NAMES = [
    ".Trash-1000",
    ".Trashes",
    ".stversions",
    ".snapshot",
    ".zfs",
    ".AppleDouble",
    ".dropbox.cache",
    *(name.decode() for name in SYSTEM_FOLDERS if not name.startswith(b"found.")),
    "$Recycle.Bin",
    "System Volume Information",
    "FOUND.000",
    "FOUND.017",
    "@eaDir",
    "files_trashbin",
]
SOME = [".stversions", "$RECYCLE.BIN", "@eaDir", "found.003"]
OTHERS = [
    "recycle bin 2",
    "found.0",
    "found.0000",
    "snapshot",
    "lost",
    "trash.2024",
    "eaDir",
    "temporary",
    "~a",
    "#1",
    "@b",
]
QUIET: dict[str, Any] = {"progress": "none"}


def put(root: Path, *names: str) -> None:
    for k, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        sound = np.random.default_rng(len(name) + k).integers(-900, 900, 4096)
        (root / name).write_bytes(wav_bytes(sound.astype(np.int16)))


def note(m: Manifest) -> str:
    "The one line."
    (text,) = m.problems["message"][m.problems["kind"] == "passed_over"]
    return text


@each("name", NAMES)
@each("change", [str, str.upper, str.title])
def test_names_in_any_case(name, change):
    assert is_system_folder(change(name))


@each("name", OTHERS)
def test_other_names_are_folders_of_the_user(name, tmp_path):
    put(tmp_path, f"LEAK/{name}/a.wav", f"{name}/b.wav")
    assert len(scan(tmp_path).listings[0]) == 2


@pytest.mark.slow
@each("name", SOME)
def test_at_any_depth_by_whatever_lists_recordings(tmp_path, name, caplog):
    root = tmp_path / ".data" / "set"  # only the folders below the root count
    put(root, "LEAK/a.wav", "LEAK/day 1/b.wav", "NOLEAK/c.wav")
    put(root, f"{name}/d.wav", f"{name}/LEAK/e.wav", f"LEAK/{name}/f.wav", f"NOLEAK/x/{name}/y/z/g.wav")
    put(root, f"LEAK/{name}/._h.wav")
    m = scan(root)
    right = [b"LEAK/a.wav", b"LEAK/day 1/b.wav", b"NOLEAK/c.wav"]
    assert m.listings[0].paths == walk(root) == right
    assert m.label_names == ("LEAK", "NOLEAK")
    assert set(m.problems["kind"]) == {"passed_over"}
    assert note(m).startswith("4 recordings in 4 system or hidden folders were passed over: ")
    pattern = scan(root, pattern="{label}/{**}/{recording}")
    assert pattern.listings[0].paths == right
    assert note(pattern) == note(m)
    assert not caplog.records
    for given in (None, pattern):
        caplog.clear()
        assert find_recordings(root, manifest=given, **QUIET).listing.paths == right
        assert [r.getMessage() for r in caplog.records] == [note(m)]
    done = lm.build(root, out=tmp_path / "x.h5", **QUIET)
    assert (done.rows, done.found, done.rejections) == (3, 3, ())
    assert done.summary["problems_by_kind"] == {"passed_over": 1}
    check(done.path, root)
    assert not lm.verify(done.path, root=root, sample=None).problems
    shutil.rmtree(root / "LEAK" / "day 1")
    (root / "LEAK" / "a.wav").unlink()
    with pytest.raises(lm.LeakmelError, match="labels have no recordings in any split: LEAK"):
        lm.build(root, out=tmp_path / "y.h5", **QUIET)


@each("name", SOME)
def test_next_to_and_inside_split_folders(tmp_path, name):
    put(tmp_path, "TRAINING/LEAK/a.wav", "TESTING/LEAK/b.wav")
    put(tmp_path, f"{name}/TRAINING/LEAK/c.wav", f"TESTING/{name}/d.wav", f"{name}/e.txt")
    m = scan(tmp_path)
    assert [x.paths for x in m.listings] == [[b"LEAK/a.wav"], [b"LEAK/b.wav"]]
    assert set(m.problems["kind"]) == {"passed_over", "missing_split"}
    assert note(m).startswith("2 recordings in 2 system or hidden folders were passed over: ")
    assert note(scan(tmp_path, split="training")).startswith(
        "1 recording in 1 system or hidden folder was passed over: "
    )
    by_name = scan(tmp_path, pattern="{split}/{label}/{recording}")
    assert note(by_name) == note(m)
    assert len(by_name) == 2


def test_a_table_that_names_a_recording_there_counts_it(tmp_path):
    put(tmp_path / "d", "LEAK/a.wav", ".old/b.wav", ".old/c.wav", "@eaDir/d.wav")
    (tmp_path / "t.csv").write_text("path,label\nLEAK/a.wav,LEAK\n.old/b.wav,OLD\n")
    m = scan(tmp_path / "d", table=tmp_path / "t.csv")
    assert m.listings[0].paths == [b".old/b.wav", b"LEAK/a.wav"]
    assert (m.listings[0].sizes > 0).all()
    assert note(m) == "2 recordings in 2 system or hidden folders were passed over: .old, @eaDir"
    assert set(m.problems["kind"]) == {"passed_over"}
    done = lm.build(tmp_path / "d", out=tmp_path / "x.h5", manifest=m, **QUIET)
    assert done.rows == 2
    assert not lm.verify(done.path, root=tmp_path / "d", table=tmp_path / "t.csv").problems


def test_folders_without_recordings_and_what_cannot_be_read_are_in_nobodys_way(tmp_path):
    put(tmp_path, "LEAK/a.wav", "LEAK/lost+found/b.wav", "LEAK/.snapshot/c.wav")
    (tmp_path / ".git" / "objects").mkdir(parents=True)
    (tmp_path / ".git" / "x").write_text("")
    real = os.scandir

    def scandir(path: bytes) -> Any:
        if os.fsencode(path).endswith(b"lost+found"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    with mock.patch.object(os, "scandir", scandir):
        assert (
            note(scan(tmp_path)) == "1 recording in 1 system or hidden folder was passed over: LEAK/.snapshot"
        )
    shutil.rmtree(tmp_path / "LEAK" / "lost+found")
    shutil.rmtree(tmp_path / "LEAK" / ".snapshot")
    assert scan(tmp_path).problems.empty


def test_links_to_and_in_such_folders(tmp_path):
    put(tmp_path, ".store/x.wav", ".store/y/z.wav", "LEAK/a.wav")
    (tmp_path / "LEAK" / "b.wav").symlink_to("../.store/x.wav")  # as git-annex keeps files
    (tmp_path / "OTHER").symlink_to(".store/y")
    (tmp_path / "LEAK" / ".again").symlink_to("..")
    m = scan(tmp_path)
    assert m.listings[0].paths == [b"LEAK/a.wav", b"LEAK/b.wav", b"OTHER/z.wav"], "the user made these links"
    assert note(m) == "2 recordings in 2 system or hidden folders were passed over: .store, .store/y"


def test_the_count_is_bounded(tmp_path, monkeypatch):
    put(tmp_path, "LEAK/a.wav", *(f".snapshot/{k}/LEAK/{n}.wav" for k in range(9) for n in range(9)))
    monkeypatch.setattr(listing, "MAX_PASSED_OVER", 20)
    n_listed = 0
    real = os.scandir

    def scandir(path: bytes) -> Any:
        nonlocal n_listed
        n_listed += 1
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert note(scan(tmp_path)).startswith("at least ")
    assert n_listed < 12


def test_a_folder_that_holds_nothing_else_says_why(tmp_path):
    put(tmp_path / "d", "LEAK/.stversions/a.wav")
    with raises("no-recordings") as e:
        lm.build(tmp_path / "d", out=tmp_path / "x.h5", **QUIET)
    assert "1 recording in 1 system or hidden folder was passed over" in e.value.found


def test_a_data_set_that_has_such_recordings_can_be_read_and_verified(tmp_path, monkeypatch):
    "As earlier versions made them."
    put(tmp_path / "d", "LEAK/a.wav", "LEAK/.old/b.wav", ".trash/c.wav")
    with monkeypatch.context() as patched:
        patched.setattr(listing, "is_system_folder", lambda name: False)
        done = lm.build(tmp_path / "d", out=tmp_path / "x.h5", **QUIET)
    assert done.found == 3
    assert not lm.verify(done.path, root=tmp_path / "d").problems
    again = lm.build(tmp_path / "d", out=tmp_path / "x.h5", **QUIET)
    assert (again.rows, again.found) == (1, 1), "the next build leaves them out"


def test_archives_label_tracks_and_doctor(tmp_path):
    put(tmp_path / "d", "a/b.wav", "a/$RECYCLE.BIN/c.wav", "found.000/d.wav", ".x/e.wav")
    assert [m.parts for m in read_members(tmp_path / "d", is_file=lambda parts: True)] == [("a", "b.wav")]
    shutil.make_archive(str(tmp_path / "z"), "zip", tmp_path / "d")
    named = [m.parts[-2:] for m in read_members(tmp_path / "z.zip", is_file=lambda parts: True)]
    assert named == [("a", "b.wav")]
    for place in ("a", "a/$RECYCLE.BIN"):
        (tmp_path / "d" / place / "b.txt").write_text("0\t1\tLEAK\n")
    assert import_tracks([tmp_path / "d"], tmp_path / "labels.csv", by="ann").summary["written"] == 1
    (tmp_path / "d" / "a" / "b.wav").unlink()
    assert "no recording" in measure_recordings(tmp_path / "d")["reason"]


def test_command_line_says_it_once(tmp_path, capsys):
    put(tmp_path / "d", "LEAK/a.wav", "NOLEAK/b.wav", ".Trash-1000/files/c.wav")
    assert main(["scan", str(tmp_path / "d"), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["problems"] == [
        {
            "kind": "passed_over",
            "path": ".Trash-1000/files",
            "message": "1 recording in 1 system or hidden folder was passed over: .Trash-1000/files",
        }
    ]


# ---- split folders one level deeper


@each(
    "paths",
    [
        ["LEAK/test/a.wav", "LEAK/b.wav", "NOLEAK/c.wav"],
        ["LEAK/test/a.wav", "NOLEAK/c.wav"],
        ["LEAK/test/a.wav", "LEAK/day 1/b.wav", "NOLEAK/day 1/c.wav"],
        ["LEAK/train/a.wav", "NOLEAK/val/deep/b.wav", "NOLEAK/other/c.wav"],
    ],
)
def test_a_folder_named_like_a_split_inside_a_label(tmp_path, paths):
    put(tmp_path / "d", *paths)
    done = lm.build(tmp_path / "d", out=tmp_path / "x.h5", check=0, **QUIET)
    assert done.rows == len(paths)


@each(
    "paths",
    [
        ["site/TRAINING/LEAK/a.wav", "site/TESTING/LEAK/b.wav"],
        ["one/train/LEAK/a.wav", "two/test/LEAK/b.wav", "loose.wav"],
        ["one/dataset_Training/LEAK/a.wav", "one/.stversions/a.wav"],
    ],
)
def test_folders_that_hold_nothing_but_splits(tmp_path, paths):
    put(tmp_path, *paths)
    with raises("splits-one-level-down"):
        scan(tmp_path)
    put(tmp_path / "labels", "LEAK/training/a.wav", "NOLEAK/training/b.wav", "LEAK/testing/c.wav")
    remedy = "give the pattern {label}/{split}/{*}"
    with raises("splits-one-level-down", says="inside the label folders", remedy=remedy):
        scan(tmp_path / "labels")
