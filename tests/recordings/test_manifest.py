"Files, order and labels of a scan, compared with an independent walk, with unusual names and places."

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from each import each
from errors import raises

from leakmel.core.errors import REJECT_CODES, DataError, LeakmelError, MachineError, UsageError
from leakmel.dataset.pipeline import build
from leakmel.recordings import manifest as manifest_module
from leakmel.recordings.demo import wav_bytes, write_demo
from leakmel.recordings.manifest import Manifest, hints, scan, shared_groups
from leakmel.recordings.naming import parse_name, split_name
from leakmel.recordings.problems import WORTH_A_LOOK, group_of

pytestmark = pytest.mark.quick

WAV = wav_bytes(np.arange(64, dtype=np.int16))
SCANDIR = os.scandir


def put(root: Path, *names: str | bytes, content: bytes = WAV) -> None:
    "Write recordings below a root."
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(content)


def found(manifest: Manifest) -> list[bytes]:
    "Paths of all recordings below the root, in the manifest's order."
    return [
        os.path.relpath(x.full_path(i), os.fsencode(manifest.root))
        for x in manifest.listings
        for i in range(len(x))
    ]


def outside_walk(folder: Path) -> list[bytes]:
    "An independent walk by `find`, with its own rules of names and types."
    command = [
        "find",
        os.fspath(folder),
        "-mindepth",
        "1",
        "-name",
        ".*",
        "-prune",
        "-o",
        "-type",
        "f",
        "(",
        "-iname",
        "*.wav",
        "-o",
        "-iname",
        "*.wave",
        ")",
        "-print0",
    ]
    listed = subprocess.run(
        command, capture_output=True, check=True, env=os.environ | {"LC_ALL": "C"}
    ).stdout.split(b"\0")[:-1]
    return sorted(os.path.relpath(p, os.fsencode(folder)) for p in listed)


def kinds(manifest: Manifest) -> dict[str, set[str]]:
    "Paths of the problems by kind."
    table = manifest.problems
    return {kind: set(table["path"][table["kind"] == kind]) for kind in set(table["kind"])}


# -- which files ------------------------------------------------------------------------------------------------------------


def test_scan_finds_the_files_of_an_independent_walk(demo: Path, faulty: Path) -> None:
    for root in (demo, faulty):
        for x in scan(root).listings:
            assert x.paths == outside_walk(x.folder)
            assert x.sizes.tolist() == [os.path.getsize(x.full_path(i)) for i in range(len(x))]
            assert x.mtimes_ns.tolist() == [os.stat(x.full_path(i)).st_mtime_ns for i in range(len(x))]


ODD_NAMES = [
    b"plain.wav",
    b"UPPER.WAV",
    b"Mixed.WaV",
    b"long.wave",
    b"LONG.WAVE",
    b"two blanks  .wav",
    b" leading.wav",
    b"-rf.wav",
    b"--help.wav",
    b"new\nline.wav",
    b"tab\t.wav",
    b"quote'\".wav",
    b"semi;colon$(x).wav",
    b"caf\xe9.wav",
    b"\xff\xfe.wav",
    "Schacht Süd – 3.wav".encode(),
    "水.wav".encode(),
    b"a.b.c.wav",
    b"~~~.wav",
    b"%s%n.wav",
    b"*.wav",
    b"\\.wav",
    b"x" * 251 + b".wav",
    b"w.wav",
    b"a=b&c.wav",
    b"\x7f\x01.wav",
]
NOT_RECORDINGS = [
    b".hidden.wav",
    b".wav",
    b"a.wav.txt",
    b"a.wav~",
    b"wav",
    b"a.mp3",
    b"a.wavs",
    b"awav",
    b"a.wav ",
    b"a.waves",
    b"notes.md",
]


def test_odd_names(tmp_path: Path) -> None:
    put(tmp_path, *(b"LEAK/" + n for n in ODD_NAMES + NOT_RECORDINGS))
    m = scan(tmp_path)
    assert m.listings[0].paths == sorted(b"LEAK/" + n for n in ODD_NAMES) == outside_walk(tmp_path)
    assert [os.fsencode(p) for p in m.table["path"]] == m.listings[0].paths, (
        "names survive the round trip through text"
    )
    assert m.table["label"].eq("LEAK").all()
    assert "\n" not in repr(m)
    assert m._repr_html_().count("<") > 5


def test_reading_files_of_odd_names(tmp_path: Path) -> None:
    put(tmp_path, *(b"LEAK/" + n for n in ODD_NAMES))
    put(tmp_path, *(b"LEAK/bad" + n for n in ODD_NAMES if len(n) < 200), content=b"no wav")
    m = scan(tmp_path, content=True)
    assert m.table["n_samples"].eq(64).sum() == len(ODD_NAMES)
    paths = kinds(m)["not_wav"]
    assert len(paths) == len(ODD_NAMES) - 1
    assert all(p.isprintable() and p.encode() for p in paths)


def test_order_is_that_of_the_bytes(tmp_path: Path) -> None:
    names = [
        "b.wav",
        "B.wav",
        "a.wav",
        "ä.wav",
        "a-b.wav",
        "a/z.wav",
        "a b.wav",
        "a0.wav",
        "A/z.wav",
        "10.wav",
        "9.wav",
        "é.wav",
        "e\u0301.wav",
    ]
    put(tmp_path, *(f"LEAK/{n}" for n in names))
    got = scan(tmp_path).listings[0].paths
    assert got == sorted(got)
    assert len(got) == len(names)


def test_order_does_not_depend_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, *(f"LEAK/{i}/{j}.wav" for i in range(4) for j in range(4)))
    right, real = scan(tmp_path).listings[0].paths, os.scandir

    class Backwards:
        "A listing from the end."

        def __init__(self, path: bytes):
            with real(path) as entries:
                self.entries = list(entries)[::-1]

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *exc: object) -> None:
            pass

    monkeypatch.setattr(manifest_module.os, "scandir", Backwards)
    assert scan(tmp_path).listings[0].paths == right


def test_groups_hidden_folders_and_loose_files(tmp_path: Path) -> None:
    put(
        tmp_path / "TRAINING",
        "LEAK/a.wav",
        "LEAK/site 1/b.wav",
        "LEAK/site 1/deep/er/c.wav",
        "LEAK/.cache/d.wav",
        ".trash/e.wav",
        "f.wav",
        "NOLEAK/LEAK/g.wav",
    )
    m = scan(tmp_path)
    assert m.listings[0].paths == outside_walk(tmp_path / "TRAINING")
    assert m.label_names == ("LEAK", "NOLEAK"), "a nested folder is a group, a hidden one no label"
    labels = dict(zip(m.listings[0].paths, m.table["label"], strict=True))
    assert labels == {
        b"f.wav": "",
        b"LEAK/a.wav": "LEAK",
        b"LEAK/site 1/b.wav": "LEAK",
        b"LEAK/site 1/deep/er/c.wav": "LEAK",
        b"NOLEAK/LEAK/g.wav": "NOLEAK",
    }
    assert kinds(m)["no_label"] == {"TRAINING/f.wav"}
    assert kinds(m)["passed_over"] == {"TRAINING/.trash"}
    assert m.counts() == {"TRAINING": {"(no label)": 1, "LEAK": 3, "NOLEAK": 1}}
    assert (
        dict(zip(m.listings[0].paths, m.table["folder"], strict=True))[b"LEAK/site 1/deep/er/c.wav"]
        == "site 1/deep/er"
    )
    folders = m.table["folder"]
    assert folders[folders != ""].value_counts().to_dict() == {"LEAK": 1, "site 1": 1, "site 1/deep/er": 1}


@each("name", ["lost+found", "System Volume Information", "@eaDir"])
def test_folders_of_the_operating_system_are_no_labels(tmp_path: Path, name: str) -> None:
    put(tmp_path, "LEAK/a.wav", f"LEAK/{name}/b.wav", "NOLEAK/c.wav", f"{name}/d.wav")
    m = scan(tmp_path)
    assert m.label_names == ("LEAK", "NOLEAK")
    assert m.listings[0].paths == [b"LEAK/a.wav", b"NOLEAK/c.wav"]
    assert kinds(m)["passed_over"] == {min(name, f"LEAK/{name}")}
    table = tmp_path / "t.csv"
    table.write_text("path,label\nLEAK/a.wav,LEAK\nNOLEAK/c.wav,NOLEAK\n")
    real = os.scandir

    def scandir(path: bytes) -> Any:
        if os.fsencode(path).endswith(name.encode()):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    with mock.patch.object(os, "scandir", scandir):
        assert len(scan(tmp_path, table=table)) == 2, "one that only root may read is in nobody's way"


def test_audio_of_other_formats_is_counted(tmp_path: Path) -> None:
    put(
        tmp_path,
        "LEAK/a.wav",
        "LEAK/b.flac",
        "LEAK/deep/c.FLAC",
        "LEAK/._d.flac",
        "LEAK/e.mp3",
        "LEAK/f.txt",
        "NOLEAK/g.wav",
    )
    m = scan(tmp_path)
    found = {p.path: p.message for p in m.notes if p.kind == "other_format"}
    assert found.keys() == {"LEAK/b.flac", "LEAK/e.mp3"}
    assert found["LEAK/b.flac"].startswith("2 .flac files in the folder are not read; convert them to WAV")
    assert found["LEAK/e.mp3"].startswith("1 .mp3 file in the folder is not read")
    for path in tmp_path.rglob("*.wav"):
        path.unlink()
    with raises("no-recordings", DataError) as e:
        build(tmp_path, out=tmp_path.parent / "x.h5", progress="none")
    assert "2 .flac files in the folder are not read" in e.value.found


def test_very_deep_folders(tmp_path: Path) -> None:
    depth = (4000 - len(os.fsencode(tmp_path))) // 2
    put(tmp_path, "LEAK/a.wav")
    here = os.open(tmp_path / "LEAK", os.O_RDONLY)
    for _ in range(min(depth, 1500)):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("b.wav", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    try:
        assert len(scan(tmp_path)) == 2
    finally:
        subprocess.run(
            ["rm", "-rf", tmp_path / "LEAK"], check=True
        )  # too deep for what clears away after the tests


# -- links and what is no file ------------------------------------------------------------------------------------------------


def test_links_are_followed_inside_the_root_only(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    put(outside, "secret.wav", "folder/secret.wav")
    put(root / "TRAINING", "LEAK/a.wav")
    put(root / "archive", "b.wav", "more/c.wav")
    leak = root / "TRAINING" / "LEAK"
    (leak / "inside.wav").symlink_to(root / "archive" / "b.wav")
    (leak / "relative.wav").symlink_to("../../archive/b.wav")
    (leak / "group").symlink_to(root / "archive" / "more")
    (leak / "out.wav").symlink_to(outside / "secret.wav")
    (leak / "out").symlink_to(outside / "folder")
    (leak / "nowhere.wav").symlink_to(root / "nothing.wav")
    (leak / "self.wav").symlink_to("self.wav")
    (leak / "up").symlink_to(root / "TRAINING")
    (leak / "root").symlink_to(root)
    (leak / "notes.txt").symlink_to(outside / "secret.wav")
    (root / "rootling").symlink_to(outside)
    m = scan(root, content=True)
    assert m.listings[0].paths == [
        b"LEAK/a.wav",
        b"LEAK/group/c.wav",
        b"LEAK/inside.wav",
        b"LEAK/relative.wav",
    ]
    linked = {os.path.basename(p) for p in kinds(m)["link"]}
    assert {"out.wav", "out", "nowhere.wav", "self.wav", "root"} <= linked
    assert not {"a.wav", "group", "inside.wav", "relative.wav"} & linked


def test_root_may_be_a_link_or_share_a_name_prefix_with_another_folder(tmp_path: Path) -> None:
    put(tmp_path / "data", "LEAK/a.wav")
    put(tmp_path / "data2", "LEAK/b.wav")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "LEAK" / "c.wav").symlink_to(tmp_path / "data" / "LEAK" / "a.wav")
    (tmp_path / "data" / "LEAK" / "d.wav").symlink_to(tmp_path / "data2" / "LEAK" / "b.wav")
    assert (
        scan(tmp_path / "link").listings[0].paths
        == scan(tmp_path / "data").listings[0].paths
        == [b"LEAK/a.wav", b"LEAK/c.wav"]
    )


def test_each_link_of_a_cycle_is_reported_once(tmp_path: Path) -> None:
    put(tmp_path, "Dataset_Training/LEAK/deep/a.wav", "Dataset_Training/NOLEAK/b.wav", "val/LEAK/c.wav")
    training = tmp_path / "Dataset_Training"
    for at, to in (
        ("LEAK/z round", ".."),
        ("LEAK/deep/here", "."),
        ("LEAK/deep/up", "../.."),
        ("NOLEAK/other", "../LEAK/deep"),
        ("again", "../val/LEAK"),
        ("top", "."),
        ("NOLEAK/out", "../../.."),
    ):
        (training / at).symlink_to(to)
    m = scan(tmp_path)
    places = [p["path"] for p in m.problems.to_dict("records") if p["kind"] == "link"]
    assert places == [
        f"Dataset_Training/{x}"
        for x in ("LEAK/deep/here", "LEAK/deep/up", "LEAK/z round", "NOLEAK/other", "NOLEAK/out", "top")
    ]
    assert m.label_names == ("LEAK", "NOLEAK", "again"), "a link to the split itself is no label"
    assert m.listings[0].paths == [b"LEAK/deep/a.wav", b"NOLEAK/b.wav", b"again/c.wav"]
    (tmp_path / "LINK").symlink_to(tmp_path)
    again = scan(tmp_path / "LINK")
    assert [p["path"] for p in again.problems.to_dict("records") if p["kind"] == "link"] == places, (
        "the root may be named by a link"
    )


def test_label_and_split_folders_that_are_links(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    put(outside, "LEAK/secret.wav")
    put(root / "TRAINING", "LEAK/a.wav")
    put(root / "archive", "QUIET/b.wav")
    (root / "TRAINING" / "TWIN").symlink_to("LEAK")
    (root / "TRAINING" / "QUIET").symlink_to("../archive/QUIET")
    (root / "TRAINING" / "BURST").symlink_to(outside / "LEAK")
    m = scan(root)
    assert m.label_names == ("LEAK", "QUIET"), (
        "neither a link out of the root nor another name of a label makes a label"
    )
    assert m.listings[0].paths == [b"LEAK/a.wav", b"QUIET/b.wav"]
    assert kinds(m)["link"] == {"TRAINING/TWIN", "TRAINING/BURST"}
    assert "empty_label" not in kinds(m)
    (root / "VALIDATION").symlink_to(outside)
    with raises("split-outside-root", DataError):
        scan(root)


def test_cycles_of_links_end(tmp_path: Path) -> None:
    put(tmp_path, "LEAK/a/x.wav", "LEAK/b/y.wav")
    (tmp_path / "LEAK" / "a" / "to_b").symlink_to("../b")
    (tmp_path / "LEAK" / "b" / "to_a").symlink_to("../a")
    m = scan(tmp_path)
    assert m.listings[0].paths == [b"LEAK/a/x.wav", b"LEAK/b/y.wav"]
    assert kinds(m)["link"] == {"LEAK/a/to_b", "LEAK/b/to_a"}


def test_folders_that_all_link_to_each_other_are_listed_once(tmp_path: Path) -> None:
    "Each way through them would be a folder of its own: of 8 folders there are 109,600 of them."
    for i in range(8):
        put(tmp_path, f"LEAK/s{i}/{i}.wav")
    for i, j in [(i, j) for i in range(8) for j in range(8) if i != j]:
        (tmp_path / f"LEAK/s{i}/to{j}").symlink_to(f"../s{j}")
    m = scan(tmp_path)
    assert m.listings[0].paths == [f"LEAK/s{i}/{i}.wav".encode() for i in range(8)]
    notes = [n for n in m.notes if n.kind == "link"]
    assert {n.path for n in notes} == {f"LEAK/s{i}/to{j}" for i in range(8) for j in range(8) if i != j}
    assert {n.kind for n in notes} == {"link"}


@contextmanager
def in_reverse_order(path: bytes) -> Iterator[Iterator[os.DirEntry]]:
    "What scandir gives, in the opposite order of the names."
    with SCANDIR(path) as entries:
        yield iter(sorted(entries, key=lambda e: e.name, reverse=True))


@contextmanager
def in_order(path: bytes) -> Iterator[Iterator[os.DirEntry]]:
    "What scandir gives, in the order of the names."
    with SCANDIR(path) as entries:
        yield iter(sorted(entries, key=lambda e: e.name))


@pytest.mark.parametrize("lister", [in_order, in_reverse_order])
def test_linked_folder_outside_the_split_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lister: Callable
) -> None:
    "Whatever order the file system lists them in; a link in a linked folder stands at its place too."
    put(tmp_path / "archive", "top.wav", "deep/b.wav", "deep/er/c.wav")
    put(tmp_path / "other", "d.wav")
    for at, to in (
        ("LEAK/m/deep", "archive/deep"),
        ("LEAK/n", "archive"),
        ("LEAK/z/deep", "archive/deep"),
        ("NOLEAK/all", "archive"),
    ):
        (tmp_path / "TRAINING" / at).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "TRAINING" / at).symlink_to(tmp_path / to)
    (tmp_path / "archive/deep/a").symlink_to(tmp_path / "other")
    (tmp_path / "TRAINING/LEAK/o").symlink_to(tmp_path / "other")
    monkeypatch.setattr(os, "scandir", lister)
    m = scan(tmp_path, split="training")
    assert m.listings[0].paths == [
        b"LEAK/m/deep/a/d.wav",
        b"LEAK/m/deep/b.wav",
        b"LEAK/m/deep/er/c.wav",
        b"LEAK/n/top.wav",
    ]
    assert kinds(m)["link"] == {
        f"TRAINING/{x}" for x in ("LEAK/n/deep", "LEAK/o", "LEAK/z/deep", "NOLEAK/all")
    }


def test_non_regular_files_are_left_out_and_reported(tmp_path: Path) -> None:
    put(tmp_path, "LEAK/a.wav", "LEAK/folder.wav/b.wav")
    os.mkfifo(tmp_path / "LEAK" / "fifo.wav")
    os.mkfifo(tmp_path / "LEAK" / "fifo")
    (tmp_path / "LEAK" / "linked.wav").symlink_to("fifo.wav")
    m = scan(tmp_path, content=True)
    assert m.listings[0].paths == [b"LEAK/a.wav", b"LEAK/folder.wav/b.wav"]
    assert {os.path.basename(p) for p in kinds(m)["special"]} == {"fifo.wav", "linked.wav"}


# -- labels -------------------------------------------------------------------------------------------------------------------


def test_one_label_map_for_all_splits(tmp_path: Path) -> None:
    put(
        tmp_path,
        "TRAINING/LEAK/a.wav",
        "TRAINING/NORMAL/b.wav",
        "VALIDATION/BURST/c.wav",
        "TESTING/LEAK/d.wav",
    )
    (tmp_path / "TESTING" / "QUIET").mkdir()
    whole = scan(tmp_path)
    assert whole.label_names == ("BURST", "LEAK", "NORMAL", "QUIET")
    for x in whole.listings:
        alone = scan(tmp_path, split=x.split.lower())
        assert alone.label_names == whole.label_names
        assert alone.listings[0].paths == x.paths
        assert alone.listings[0].label_ids.tolist() == x.label_ids.tolist()
    assert {"TRAINING/BURST", "TRAINING/QUIET", "VALIDATION/LEAK", "TESTING/QUIET"} <= kinds(whole)[
        "empty_label"
    ]


def test_labels_are_numbered_by_their_bytes(tmp_path: Path) -> None:
    put(
        tmp_path,
        *(os.fsencode(n) + b"/a.wav" for n in ("leak", "LEAK", "Zug", "Ärger", "10", "9", " x")),
        b"\xff/a.wav",
    )
    m = scan(tmp_path)
    names = [os.fsencode(n) for n in m.label_names]
    assert names == sorted(names)
    assert [names[i] for i in m.listings[0].label_ids] == [p.split(b"/")[0] for p in m.listings[0].paths]
    assert kinds(m)["case_twins"] == {"LEAK, leak"}


def test_a_folder_of_label_folders(tmp_path: Path) -> None:
    put(tmp_path, "LEAK/a.wav", "NOLEAK/b.wav", "loose.wav")
    (tmp_path / "EMPTY").mkdir()
    m = scan(tmp_path)
    assert [x.split for x in m.listings] == [""]
    assert m.label_names == ("EMPTY", "LEAK", "NOLEAK")
    assert m.listings[0].label_ids.tolist() == [1, 2, -1]
    assert kinds(m) == {"no_label": {"loose.wav"}, "empty_label": {"EMPTY"}}
    with pytest.raises(DataError, match="no split at all") as caught:
        scan(tmp_path, split="training")
    assert "Name no split" in str(caught.value)


def test_empty_folder(tmp_path: Path) -> None:
    m = scan(tmp_path, content=True)
    assert (len(m), m.label_names) == (0, ())
    assert m.problems["kind"].tolist() == ["no_recordings"]
    assert f"below {tmp_path}: check" in m.problems["message"][0]
    assert repr(m).endswith("labels none; 1 problem)")
    assert len(m.table) == 0
    assert m._repr_html_()
    (tmp_path / "TRAINING").mkdir()
    assert len(scan(tmp_path, split="training")) == 0


# -- splits -------------------------------------------------------------------------------------------------------------------

SPELLINGS: dict[str, str | None] = {
    "TRAINING": "TRAINING",
    "training": "TRAINING",
    "Train": "TRAINING",
    "DATASET_TRAINING": "TRAINING",
    "dataset-train": "TRAINING",
    "Dataset Training": "TRAINING",
    "VALIDATION": "VALIDATION",
    "val": "VALIDATION",
    "Valid": "VALIDATION",
    "DATASET_VALIDATION": "VALIDATION",
    "TESTING": "TESTING",
    "test": "TESTING",
    "dataset_testing": "TESTING",
    "LEAK": None,
    "TRAININGS": None,
    "my_training": None,
    "": None,
    "DATASET_": None,
}


def test_spellings_of_splits() -> None:
    assert {spelling: split_name(spelling) for spelling in SPELLINGS} == SPELLINGS


@each("folder", [s for s, split in SPELLINGS.items() if split])
def test_each_spelling_is_found(tmp_path: Path, folder: str) -> None:
    put(tmp_path, f"{folder}/LEAK/a.wav")
    for asked in (None, SPELLINGS[folder], str(SPELLINGS[folder]).lower(), folder):
        m = scan(tmp_path, split=asked)
        assert [(x.split, x.paths) for x in m.listings] == [(SPELLINGS[folder], [b"LEAK/a.wav"])]
        assert m.listings[0].folder == tmp_path / folder


def test_splits_are_ordered(tmp_path: Path) -> None:
    put(tmp_path, "test/A/1.wav", "Train/A/1.wav", "DATASET_VALIDATION/A/1.wav", "notes/x.wav")
    assert [x.split for x in scan(tmp_path).listings] == ["TRAINING", "VALIDATION", "TESTING"]


@each("twin", ["train", "DATASET_TRAINING", "Training"])
def test_two_folders_for_one_split(tmp_path: Path, twin: str) -> None:
    put(tmp_path, "TRAINING/A/1.wav", f"{twin}/A/1.wav")
    with raises("duplicate-split", DataError, says="TRAINING") as caught:
        scan(tmp_path)
    assert twin in str(caught.value)


def test_missing_roots_and_splits(tmp_path: Path) -> None:
    put(tmp_path, "TRAINING/A/1.wav")
    with raises("no-such-folder", DataError):
        scan(tmp_path / "nothing")
    with raises("not-a-folder", DataError):
        scan(tmp_path / "TRAINING" / "A" / "1.wav")
    with raises("no-such-split", DataError, says="TESTING") as caught:
        scan(tmp_path, split="test")
    assert "TRAINING" in str(caught.value)
    with raises("unknown-split", UsageError):
        scan(tmp_path, split="trainings")


# -- names --------------------------------------------------------------------------------------------------------------------


def test_parts_of_names() -> None:
    parts = parse_name(b"/x/TRAINING/LEAK/H07~000123~20250314_020000~16.wav")
    assert (parts.sensor, parts.recording, parts.start_time, parts.gain) == (
        "H07",
        "000123",
        "2025-03-14T02:00:00",
        16.0,
    )
    assert parse_name(b"s~r~20250314_020000~gain-2.5.WAVE").gain == -2.5
    assert parse_name(b"s~r~yesterday~3.wav").start_time == ""
    for name in (b"a.wav", b"a~b~c.wav", b"a~b~c~d~e.wav", b"~~~.wav", b"\xff~\xfe~x~y.wav", b""):
        assert np.isnan(parse_name(name).gain)


def test_a_dry_hydrophone_is_flagged(tmp_path: Path) -> None:
    put(
        tmp_path,
        "TRAINING/LEAK/a~1~20250101_000000~1.wav",
        "TRAINING/LEAK/a~2~20250101_000000~10.wav",
        "TRAINING/LEAK/1.wav",
    )
    assert kinds(scan(tmp_path))["gain_1"] == {"TRAINING/LEAK/a~1~20250101_000000~1.wav"}


# -- content ------------------------------------------------------------------------------------------------------------------


def test_planted_faults_are_named(tmp_path: Path) -> None:
    summary = write_demo(tmp_path / "set", n_files=24, faults=True)
    m = scan(tmp_path / "set", content=True)
    by_path = {
        path: kind
        for kind, paths in kinds(m).items()
        for path in paths
        if group_of(kind) != WORTH_A_LOOK and kind != "empty_label"
    }
    expected = {
        "empty file": "empty",
        "header without samples": "empty",
        "truncated": "truncated",
        "git-lfs pointer": "not_wav",
        "float samples with a NaN": "nonfinite",
        "gain 1: the hydrophone was not in the water": "gain_1",
        "directly under the split, without a label": "no_label",
    }
    planted = {what: path for path, what in summary.faults}
    assert expected.keys() <= planted.keys()
    for what, kind in expected.items():
        assert by_path.pop(planted[what]) == kind, what
    assert not by_path, "no good recording is called bad"
    table = m.table.assign(whole="TRAINING/").set_index(m.table["split"] + "/" + m.table["path"])
    assert len(table) == summary.n_files
    assert table.loc[planted["8 kHz"], "sample_rate"] == 8000
    assert table.loc[planted["two identical channels"], "channels"] == 2
    assert bool(table.loc[planted["silent"], "silent"])
    assert float(table.loc[planted["clipped"], "clipped_share"]) > 0.05  # type: ignore[arg-type]
    assert table.loc[planted["3 s instead of 10 s"], "n_samples"] == 3 * 4096
    assert table["digest"].duplicated().sum() >= 2, "two copies of a recording have its digest"
    assert {k for k in table["code"] if k} <= set(REJECT_CODES)


def test_listing_reads_no_samples(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(manifest_module.os, "open", refuse)
    m = scan(demo)
    assert len(m.table) == 60
    assert "sample_rate" not in m.table.columns


# -- faults of the machine -------------------------------------------------------------------------------------------------------


def failing_below(folder: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    "Listing anything below `folder` fails."
    real = os.scandir

    def call(path: str | bytes | os.PathLike):
        if os.fsencode(path).startswith(os.fsencode(folder)):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real(path)

    monkeypatch.setattr(manifest_module.os, "scandir", call)


@each("below", ["", "TRAINING", "TRAINING/LEAK"])
@each(
    ("code", "kind"),
    [
        (errno.EMFILE, MachineError),
        (errno.EIO, MachineError),
        (errno.EACCES, DataError),
        (errno.ENOENT, DataError),
    ],
)
def test_a_folder_that_cannot_be_listed_stops_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str, code: int, kind: type[LeakmelError]
) -> None:
    put(tmp_path, "TRAINING/LEAK/a.wav")
    failing_below(tmp_path / below, code, monkeypatch)
    with pytest.raises(kind, match=errno.errorcode[code]) as caught:
        scan(tmp_path)
    assert caught.value.path is not None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list everything")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    put(tmp_path, "TRAINING/LEAK/a.wav")
    (tmp_path / "TRAINING" / "LEAK").chmod(0)
    try:
        with raises("folder-unreadable", DataError):
            scan(tmp_path)
    finally:
        (tmp_path / "TRAINING" / "LEAK").chmod(0o755)


def test_machine_fault_while_reading_rejects_no_recording(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leakmel.recordings import wav

    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EMFILE, "")

    monkeypatch.setattr(wav.os, "preadv", fail)
    with raises("io-fault", MachineError, says="EMFILE"):
        scan(demo, content=True)


def test_scan_does_not_depend_on_the_locale(tmp_path: Path) -> None:
    put(tmp_path, *(b"LEAK/" + n for n in ODD_NAMES))
    script = f"""
import hashlib
from leakmel.recordings.manifest import scan
m = scan({os.fspath(tmp_path)!r})
print(hashlib.sha256(repr((m.listings[0].paths, m.label_names)).encode()).hexdigest())
"""
    seen = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ | more
        ).stdout
        for more in (
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONHASHSEED": "1"},
            {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2"},
        )
    }
    assert len(seen) == 1


def test_a_split_without_recordings_is_named(tmp_path: Path) -> None:
    put(tmp_path, "TRAINING/A/1.wav")
    (tmp_path / "TESTING" / "A").mkdir(parents=True)
    found = scan(tmp_path).problems
    assert found["path"][found["kind"] == "no_recordings"].tolist() == ["TESTING"]
    assert repr(scan(tmp_path, split="train")).startswith("Manifest(1 recording: TRAINING 1; labels A; ")


def test_single_label_folder_is_distinguished_from_a_data_set(tmp_path: Path) -> None:
    put(tmp_path, "TRAINING/A/1.wav", "TRAINING/A/2.wav", "TRAINING/B/3.wav")
    assert list(hints(scan(tmp_path / "TRAINING" / "A"))) == [
        "no recording lies in a label folder (leakmel nightly and leakmel predict need no labels); "
        f"this looks like one label folder: give its parent {tmp_path / 'TRAINING'}"
    ]
    for root in (tmp_path, tmp_path / "TRAINING"):
        assert not list(hints(scan(root)))
    put(tmp_path, "TRAINING/stray.wav")
    assert not list(hints(scan(tmp_path / "TRAINING"))), (
        "a set of label folders, and a recording that lies beside them"
    )


def test_groups_in_several_splits_are_reported(tmp_path: Path) -> None:
    put(
        tmp_path,
        *(
            f"{place}~1~20250101_000000~5.wav"
            for place in ("TRAINING/A/x/H1", "TRAINING/A/x/H2", "TESTING/A/x/H1", "TESTING/A/y/H3")
        ),
    )
    m = scan(tmp_path)
    assert shared_groups(m) == {
        "sensor": {"n": 3, "in_more_than_one_split": 1},
        "folder": {"n": 2, "in_more_than_one_split": 1},
    }
    assert list(hints(m)) == [
        "1 of 3 sensors lie in more than one split",
        "1 of 2 folders lie in more than one split",
    ]
    for sentence in hints(m):
        assert sentence in m._repr_html_()
    assert shared_groups(scan(tmp_path, split="train")) == {}
    assert scan(tmp_path, pattern="{label}-{sensor}").groups("sensor").empty, "nothing has a label"


@each("how", ["folders", "pattern", "table", "many"])
def test_listing_counts_every_recording_it_finds(tmp_path, make_wav, monkeypatch, how):
    "The progress bar while a large folder is listed."
    counts, real = [], manifest_module.Progress

    def counted(*args, **options):
        counts.append(real(*args, **options))
        return counts[-1]

    monkeypatch.setattr(manifest_module, "Progress", counted)
    for label, n in (("LEAK", 2100 if how == "many" else 5), ("NOLEAK", 3)):
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(n):
            (tmp_path / "data" / label / f"{label}{i}.wav").write_bytes(b"")
    named: dict = {"pattern": {"pattern": "{label}/{*}"}, "table": {"table": tmp_path / "t.csv"}}.get(how, {})
    (tmp_path / "t.csv").write_text("path,label\n" + "".join(f"LEAK/LEAK{i}.wav,LEAK\n" for i in range(5)))
    found = scan(tmp_path / "data", progress="none", **named)
    assert [c.n_done for c in counts] == [2103 if how == "many" else 8]
    assert len(found) == (5 if how == "table" else counts[0].n_done)
