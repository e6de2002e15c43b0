"Archives that are not trusted: names that lead out, links, bombs, encryption, and RAR with and without a program."

import errno
import lzma
import os
import struct
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import rarfile
from each import each
from errors import raises
from made_archives import rar_of, zip_of

from leakmel.core.errors import DataError, MissingPackageError, UsageError
from leakmel.extras.sets import fetch as archives
from leakmel.extras.sets.fetch import Member, read_members

PACK = {".zip": zip_of, ".rar": rar_of}


def members(path: Path) -> list[Member]:
    return list(read_members(path, is_file=lambda parts: parts[-1].endswith(".wav")))


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@each("kind", PACK)
def test_wanted_files_are_read_in_the_order_of_their_names(tmp_path: Path, kind: str) -> None:
    files = {"b/2.wav": b"two", "b/desktop.ini": b"no", "a.wav": b"", "__MACOSX/._a.wav": b"no"}
    path = write(tmp_path / f"x{kind}", PACK[kind](files))
    assert [(m.parts, m.data) for m in members(path)] == [
        ((path.name, "a.wav"), b""),
        ((path.name, "b", "2.wav"), b"two"),
    ]


@each("kind", PACK)
@each("name", ["../a.wav", "b/../../a.wav", "/tmp/a.wav", "C:/a.wav", "..\\a.wav", "../x.txt"])
def test_names_that_lead_out_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    path = write(tmp_path / f"x{kind}", PACK[kind]({"ok.wav": b"fine", name: b"bad"}))
    with raises("unsafe-archive", DataError, path=path):
        members(path)
    assert os.listdir(tmp_path) == [path.name]


@each("kind", PACK)
@each("target", ["/etc/passwd", "ok.wav"])
def test_links_are_refused(tmp_path: Path, kind: str, target: str) -> None:
    path = write(tmp_path / f"x{kind}", PACK[kind]({"ok.wav": b"fine"}, {"link.wav": target}))
    with raises("unsafe-archive", DataError, says="link.wav"):
        members(path)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = write(tmp_path / "bomb.zip", zip_of({"a.wav": bytes(archives.MAX_FILE_BYTES + 1)}))
    assert bomb.stat().st_size < archives.MAX_FILE_BYTES / 500
    with raises("unsafe-archive", DataError, says="64,000,001 bytes"):
        members(bomb)
    monkeypatch.setattr(archives, "MAX_TOTAL_BYTES", 1000)
    many = write(tmp_path / "many.zip", zip_of({f"{k}.wav": bytes(400) for k in range(3)}))
    with raises("unsafe-archive", DataError, says="2.wav: 400 bytes"):
        members(many)
    monkeypatch.setattr(archives, "MAX_MEMBERS", 2)
    with raises("unsafe-archive", DataError, path=many):
        members(many)


def test_a_member_that_is_longer_than_it_claims_is_refused(tmp_path: Path) -> None:
    data = bytearray(zip_of({"a.wav": bytes(5000)}))
    for at in (data.find(b"PK\x01\x02") + 24, 22):  # size in the directory and before the file
        data[at : at + 4] = (100).to_bytes(4, "little")
    with raises("damaged-archive", DataError, says="a.wav"):
        members(write(tmp_path / "x.zip", bytes(data)))


def test_archives_in_archives_have_a_depth(tmp_path: Path) -> None:
    data = zip_of({"a.wav": b"x"})
    far = write(tmp_path / "far.zip", zip_of({f"{'x' * 120}/{'y' * 120}/inner.ZIP": data}))
    assert [m.data for m in members(far)] == [b"x"]
    for k in range(3):
        path = write(tmp_path / f"{k}.zip", data)
        if k < 2:
            assert [m.data for m in members(path)] == [b"x"]
        data = zip_of({"inner.zip": data})
    with raises("unsafe-archive", DataError):
        members(path)


def test_an_encrypted_file_and_a_damaged_archive_are_named(tmp_path: Path) -> None:
    data = bytearray(zip_of({"a.wav": b"x" * 100}))
    data[data.find(b"PK\x01\x02") + 8] |= 1
    with raises("unsafe-archive", DataError, says="a.wav"):
        members(write(tmp_path / "x.zip", bytes(data)))
    for name, whole in (("y.zip", zip_of({"a.wav": b"x" * 100})), ("y.rar", rar_of({"a.wav": b"x" * 100}))):
        broken = whole.replace(b"x" * 100, b"y" * 100) if name == "y.rar" else whole[: len(whole) // 2]
        with raises("damaged-archive", DataError, path=tmp_path / name):
            members(write(tmp_path / name, broken))


def test_rar_without_a_program_names_programs_and_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.rar", rar_of({"a.wav": b"packed"}, method=1))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(rarfile, "CURRENT_SETUP", None)
    with raises("no-rar-program", DataError, path=path) as caught:
        members(path)
    assert "--from" in str(caught.value)
    assert "unar" in str(caught.value)


def test_rar_without_the_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rarfile", None)
    with raises("missing-package", MissingPackageError, says="[sets]"):
        members(write(tmp_path / "x.rar", rar_of({"a.wav": b"x"})))


def test_links_and_special_files_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    secret = write(tmp_path / "secret.wav", b"secret")
    write(tmp_path / "set" / "a.wav", b"a")
    (tmp_path / "set" / "b.wav").symlink_to(secret)
    (tmp_path / "set" / "c").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "set" / "d.wav")
    assert [m.data for m in members(tmp_path / "set")] == [b"a"]
    with raises("no-such-source", UsageError):
        members(secret)


def test_a_damaged_lzma_file_is_a_damaged_archive(tmp_path: Path) -> None:
    data = bytearray(zip_of({"a.wav": b"x" * 1000}, method=zipfile.ZIP_LZMA))
    data[39] = 255  # first byte of the properties
    with raises("damaged-archive", DataError, path=tmp_path / "x.zip"):
        members(write(tmp_path / "x.zip", bytes(data)))


@each(
    "error",
    [
        lzma.LZMAError("x"),
        ValueError("x"),
        struct.error("x"),
        RuntimeError("x"),
        OSError("x"),
        OSError(errno.EINVAL, "x"),
    ],
)
def test_errors_of_the_libraries_become_a_damaged_archive(tmp_path: Path, error: Exception) -> None:
    path = write(tmp_path / "x.zip", zip_of({"a.wav": b"x"}))
    with (
        mock.patch("zipfile.ZipFile.infolist", side_effect=error),
        raises("damaged-archive", DataError, path=path),
    ):
        members(path)
    disk = OSError(errno.EIO, "x")
    with mock.patch("zipfile.ZipFile.infolist", side_effect=disk), raises("cannot-be-read", DataError):
        members(path)
    with mock.patch("zipfile.ZipFile.infolist", side_effect=MemoryError), pytest.raises(MemoryError):
        members(path)


def end_record(n: int, n_bytes: int, at: int, zip64: bool) -> bytes:
    "End of a ZIP archive that claims a directory."
    if not zip64:
        return struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, n, n, n_bytes, at, 0)
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, n, n, n_bytes, at)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at + n_bytes, 1)
    return record + locator + end_record(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, False)


@each("zip64", [False, True])
def test_a_large_directory_is_refused_before_it_is_parsed(tmp_path: Path, zip64: bool) -> None:
    bomb = bytes(1000 + 8_000_001) + end_record(5, 8_000_001, 1000, zip64)
    outer = write(tmp_path / "outer.zip", zip_of({"a/inner.zip": bomb}))
    path = write(tmp_path / "x.zip", bomb)
    with (
        mock.patch("struct.unpack", wraps=struct.unpack) as parsed,
        raises("unsafe-archive", DataError, path=path, says="8,000,001 bytes"),
    ):
        members(path)
    assert "<4s4B4HL2L5H2L" not in [call.args[0] for call in parsed.call_args_list]  # an entry of a directory
    with raises("unsafe-archive", DataError, path=outer / "a" / "inner.zip"):
        members(outer)


@each("zip64", [False, True])
@each(("n", "n_bytes"), [(20_001, 100), (5, 8_000_001)])
def test_a_directory_that_is_not_there_is_damage(tmp_path: Path, zip64: bool, n: int, n_bytes: int) -> None:
    path = write(tmp_path / "x.zip", bytes(1000) + end_record(n, n_bytes, 1000 - min(n_bytes, 1000), zip64))
    with raises("damaged-archive", DataError, path=path):
        members(path)


def test_a_small_zip64_archive_is_read(tmp_path: Path) -> None:
    data = zip_of({"a.wav": b"x"})
    at = data.find(b"PK\1\2")
    end = data[-22:]
    n_bytes = len(data) - 22 - at
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, n_bytes, at)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(data) - 22, 1)
    marked = end[:8] + b"\xff" * 12 + end[20:]
    path = write(tmp_path / "x.zip", data[:-22] + record + locator + marked)
    assert [m.data for m in members(path)] == [b"x"]


def test_hidden_folders_and_marked_ones_are_skipped(tmp_path: Path) -> None:
    for folder in (".hidden", "made", "raw"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.wav", folder.encode())
    write(tmp_path / "made" / "set.json", b"{}")
    found = read_members(tmp_path, is_file=lambda parts: parts[-1].endswith(".wav"), skip_with="set.json")
    assert [m.data for m in found] == [b"raw"]
