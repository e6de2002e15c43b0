"Downloads of public sets: interrupted, changed, unverified, refused, offline, and a full disk."

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import requests
from each import each
from errors import raises
from made_archives import rar_of, zip_of
from made_sets import wav
from record_server import RecordServer

import leakmel as lm
from leakmel.core.errors import (
    DataError,
    MachineError,
    MissingPackageError,
    OutputError,
    SpaceError,
    UsageError,
)
from leakmel.core.files import OutputLock

Publish = Callable[..., RecordServer]
LEAKS = {f"pe-zone 2-0.3 MPa-1 ms-hydrophone-0-1_{k}.wav": wav(k) for k in range(20)}
OTHERS = {f"pe-zone 2-NA-NA-hydrophone-0-1_{k}.wav": wav(100 + k) for k in range(10)}
ARCHIVES = {
    "leak acoustic data.rar": rar_of(LEAKS),
    "no leak acoustic data.zip": zip_of(OTHERS, method=0),
    "noise.zip": zip_of({"dog_1-NA-hydrophone-0-1.wav": wav(200)}),
}
BLOCK = 1 << 14  # what arrives of a block is kept when the block is whole
LEAK_RAR = "leak acoustic data.rar"


def fetch(folder: Path, **given: Any) -> lm.FetchedSet:
    usual: dict[str, Any] = {"yes": True, "progress": "none"}
    return lm.fetch("dongguan", folder / "set", **usual | given)


@pytest.fixture
def server(publish: Publish) -> RecordServer:
    return publish("dongguan", ARCHIVES)


def test_a_record_is_downloaded_and_compared(server: RecordServer, tmp_path: Path) -> None:
    found = fetch(tmp_path)
    assert found.facts["counts"] | {"LEAK": 20, "NOLEAK": 10} == found.facts["counts"]
    assert found.facts["files"] == [
        {
            "name": name,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "published": f"md5:{hashlib.md5(data).hexdigest()}",
        }
        for name, data in ARCHIVES.items()
    ]
    for name, data in (*LEAKS.items(), *OTHERS.items()):
        assert (found.recordings / ("LEAK" if name in LEAKS else "NOLEAK") / name).read_bytes() == data
    assert os.listdir(tmp_path) == ["set"]
    assert fetch(tmp_path, yes=False).was_complete
    assert len(server.requests) == 3


def test_a_file_is_requested_again_where_the_connection_breaks(server: RecordServer, tmp_path: Path) -> None:
    server.cut[LEAK_RAR] = [6 * BLOCK, 0, 4 * BLOCK]
    fetch(tmp_path)
    assert server.requests.count(LEAK_RAR) == 4
    get, late = requests.get, [requests.ConnectTimeout, requests.ReadTimeout]

    def slow(url: str, **options: Any) -> requests.Response:
        if server.requests.count(LEAK_RAR) == 1 and late:
            raise late.pop()
        return get(url, **options)

    server.requests.clear()
    server.cut[LEAK_RAR] = [6 * BLOCK]
    with mock.patch("requests.get", slow):
        fetch(tmp_path / "late")
    assert server.requests.count(LEAK_RAR) == 2
    assert late == []


def test_an_interrupted_download_goes_on_with_the_file_that_is_not_complete(
    server: RecordServer, tmp_path: Path
) -> None:
    other = "no leak acoustic data.zip"
    server.cut[other] = [6 * BLOCK, 0, 0, 2 * BLOCK]
    with raises("download-interrupted", DataError, found=f"{2 * BLOCK:,} bytes"):
        fetch(tmp_path)
    work = tmp_path / ".set.fetch"
    assert (work / "downloads" / LEAK_RAR).read_bytes() == ARCHIVES[LEAK_RAR]
    assert not (tmp_path / "set").exists()
    assert not (work / "made").exists()
    server.cut.clear()
    server.requests.clear()
    by_hand = tmp_path / "by hand"
    shutil.copytree(work, tmp_path / "other" / work.name)
    by_hand.mkdir()
    for name, data in ARCHIVES.items():
        (by_hand / name).write_bytes(data)
    assert fetch(tmp_path / "other", source=by_hand).facts["counts"]["recordings"] == 31
    assert os.listdir(tmp_path / "other") == ["set"]
    assert server.requests == []
    assert fetch(tmp_path).facts["counts"]["recordings"] == 31
    assert server.requests == [other, "noise.zip"]


def test_another_checksum_is_refused_and_nothing_is_kept(server: RecordServer, tmp_path: Path) -> None:
    server.claimed[LEAK_RAR] = "0" * 32
    with raises("checksum-differs", DataError, path=LEAK_RAR, expected=f"md5:{'0' * 32}"):
        fetch(tmp_path)
    assert not (tmp_path / "set").exists()
    left = [p.name for p in (tmp_path / ".set.fetch").rglob("*") if p.is_file()]
    assert left == []


def test_a_longer_file_than_published_is_cut_off(server: RecordServer, tmp_path: Path) -> None:
    sized = server._zenodo()
    sized["files"][0]["size"] = 1000
    with (
        mock.patch.object(server, "_zenodo", return_value=sized),
        raises("checksum-differs", DataError, says="1,000 bytes"),
    ):
        fetch(tmp_path)


@each("claimed", ["", "crc32:0", "x" * 32])
def test_a_file_without_checksum_needs_consent(server: RecordServer, tmp_path: Path, claimed: str) -> None:
    server.claimed[LEAK_RAR] = claimed
    server.requests.clear()
    with raises("checksum-unknown", UsageError, found=LEAK_RAR) as caught:
        fetch(tmp_path)
    assert "--accept-unverified" in str(caught.value)
    assert server.requests == []
    found = fetch(tmp_path, accept_unverified=True)
    one = found.facts["files"][0]
    assert (one["published"], one["sha256"]) == ("", hashlib.sha256(ARCHIVES[LEAK_RAR]).hexdigest())
    assert "not compared with a published checksum: 1 files" in repr(found)


def test_nothing_is_requested_without_the_licence(server: RecordServer, tmp_path: Path) -> None:
    shown: list[str] = []
    with raises("licence-not-accepted", UsageError):
        lm.fetch("dongguan", tmp_path / "set", show=shown.append)
    assert all(
        word in shown[0] for word in ("CC BY 4.0", "Wang, Q.", "10.5281/zenodo.18631450", "about 6 MB")
    )
    assert (server.listings, server.requests, os.listdir(tmp_path)) == (0, [], [])


@each("answer, goes_on", [("yes\n", True), ("y\n", True), ("no\n", False), ("\n", False), ("", False)])
def test_a_person_at_a_terminal_is_asked(
    server: RecordServer, tmp_path: Path, answer: str, goes_on: bool
) -> None:
    import io

    server.listings = 0
    with (
        mock.patch("leakmel.extras.sets.fetch.is_attended", return_value=True),
        mock.patch("sys.stdin", io.StringIO(answer)),
    ):
        if goes_on:
            assert fetch(tmp_path, yes=False).facts["counts"]["recordings"] == 31
        else:
            with raises("licence-not-accepted", UsageError):
                fetch(tmp_path, yes=False)
            assert server.listings == 0


@each("status", [403, 404, 429, 503])
def test_a_server_that_refuses_is_named(server: RecordServer, tmp_path: Path, status: int) -> None:
    server.status = status
    with raises("set-refused", DataError, found=f"HTTP status {status}") as caught:
        fetch(tmp_path)
    assert "--from PATH" in str(caught.value)
    assert os.listdir(tmp_path) == []
    server.status = 0
    with (
        mock.patch.object(server, "_send_file", lambda request, path: request.send_error(status)),
        mock.patch.object(
            requests.Response, "close", autospec=True, side_effect=requests.Response.close
        ) as closed,
        raises("set-refused", DataError, found=f"HTTP status {status}"),
    ):
        fetch(tmp_path)
    assert closed.call_count == 1  # of the answer with the file


def test_offline_names_the_page_and_the_way_by_hand(server: RecordServer, tmp_path: Path) -> None:
    with (
        mock.patch("requests.get", side_effect=requests.ConnectionError),
        raises("set-unreachable", MachineError) as caught,
    ):
        fetch(tmp_path)
    assert "https://doi.org/10.5281/zenodo.18631450" in str(caught.value)
    assert "--from PATH" in str(caught.value)
    record = mock.Mock(status_code=200, json=server._zenodo)
    with (
        mock.patch("requests.get", side_effect=[record, requests.exceptions.SSLError]),
        raises("set-unreachable", MachineError),
    ):
        fetch(tmp_path)


@each(
    "record",
    [
        [],
        {"files": [{"key": "leak.rar"}]},
        {"files": []},
        {"files": [{"key": "notes.txt", "size": 1, "links": {"self": "https://zenodo.org/x"}}]},
        {"files": [{"key": "leak.rar", "size": 1, "links": {"self": "http://elsewhere.org/x"}}]},
        {"files": [{"key": "leak.rar", "size": -1, "links": {"self": "https://zenodo.org/x"}}]},
    ],
)
def test_a_record_of_another_form_is_named(server: RecordServer, tmp_path: Path, record: object) -> None:
    with mock.patch.object(server, "_zenodo", return_value=record), raises("set-changed", DataError):
        fetch(tmp_path)


def test_a_name_in_the_record_cannot_lead_out(server: RecordServer, tmp_path: Path) -> None:
    record = server._zenodo()
    record["files"][0]["key"] = "../../leak.rar"
    with mock.patch.object(server, "_zenodo", return_value=record), raises("unsafe-archive", DataError):
        fetch(tmp_path)
    assert server.requests == []


def test_a_full_disk_keeps_what_has_arrived(
    server: RecordServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(Path, "write_bytes", side_effect=full), raises("no-space", SpaceError):
        fetch(tmp_path)
    assert not (tmp_path / "set").exists()
    assert (tmp_path / ".set.fetch" / "downloads" / LEAK_RAR).read_bytes() == ARCHIVES[LEAK_RAR]
    server.requests.clear()
    fetch(tmp_path)
    assert server.requests == []  # both were there, and were compared again


def test_too_little_room_is_seen_before_the_download(server: RecordServer, tmp_path: Path) -> None:
    with (
        mock.patch("os.statvfs", return_value=mock.Mock(f_bavail=1, f_frsize=1000)),
        raises("no-space", SpaceError),
    ):
        fetch(tmp_path)
    assert server.requests == []


def test_a_damaged_complete_download_is_replaced(server: RecordServer, tmp_path: Path) -> None:
    folder = tmp_path / ".set.fetch" / "downloads"
    folder.mkdir(parents=True)
    (folder / LEAK_RAR).write_bytes(b"of another day")
    assert fetch(tmp_path).facts["counts"]["LEAK"] == 20


def test_other_content_and_another_process_are_not_disturbed(server: RecordServer, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.txt").write_text("mine")
    with raises("output-exists", OutputError):
        fetch(tmp_path)
    (tmp_path / "set" / "mine.txt").unlink()
    with OutputLock(tmp_path / "set"), raises("output-locked", OutputError):
        fetch(tmp_path)
    assert fetch(tmp_path).facts["counts"]["recordings"] == 31  # an empty folder may be there
    next((tmp_path / "set" / "recordings" / "LEAK").iterdir()).unlink()
    with raises("output-exists", OutputError):
        fetch(tmp_path)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "requests", None)
    with raises("missing-package", MissingPackageError, says="[sets]"):
        fetch(tmp_path)


def test_folders_of_mendeley_are_walked(publish: Publish, tmp_path: Path) -> None:
    files = {
        "Noise Loggers/Leak-Metal/001_05593-20180927.wav": wav(1),
        "Noise Loggers/No-Leak/002_05594-20180928.wav": wav(2),
        "Hydrophones/Leak/1.1.01.0345.wav": wav(3),
        "readme.txt": b"text",
    }
    server = publish("hongkong-loggers", files)
    found = lm.fetch("hongkong-loggers", tmp_path / "set", yes=True, progress="none")
    assert [f["name"] for f in found.facts["files"]] == [name for name in files if "Logger" in name]
    assert all(f["published"] == f"sha256:{f['sha256']}" for f in found.facts["files"])
    table = lm.scan(found.recordings, table=found.table, progress="none").table
    assert sorted(table["sensor"]) == ["05593", "05594"]
    assert len(server.requests) == 2
    assert json.loads((found.path / "set.json").read_text())["doi"] == "10.17632/hkn8mxcjyz.1"


def test_a_file_of_another_day_is_replaced(server: RecordServer, tmp_path: Path) -> None:
    server.claimed[LEAK_RAR] = ""
    folder = tmp_path / ".set.fetch" / "downloads"
    folder.mkdir(parents=True)
    (folder / LEAK_RAR).write_bytes(b"of another day")
    assert fetch(tmp_path, accept_unverified=True).facts["counts"]["LEAK"] == 20


def test_a_wrong_checksum_is_named_by_both_digests(server: RecordServer, tmp_path: Path) -> None:
    server.claimed[LEAK_RAR] = "0" * 32
    real = hashlib.md5(ARCHIVES[LEAK_RAR]).hexdigest()
    with raises("checksum-differs", DataError, found=f"md5:{real}", expected=f"md5:{'0' * 32}"):
        fetch(tmp_path)


def test_deep_json_and_names_that_are_no_text_are_a_record_of_another_form(
    server: RecordServer, tmp_path: Path
) -> None:
    deep = mock.Mock(status_code=200, json=lambda: json.loads("[" * 200_000))
    with (
        mock.patch("requests.get", return_value=deep),
        raises("set-changed", DataError, says="RecursionError"),
    ):
        fetch(tmp_path)
    record = server._zenodo()
    record["files"][0]["key"] = "leak\ud800.rar"
    with mock.patch.object(server, "_zenodo", return_value=record), raises("set-changed", DataError):
        fetch(tmp_path)


def test_the_target_is_looked_at_again_when_it_is_locked(server: RecordServer, tmp_path: Path) -> None:
    before = lm.extras.sets.fetch.require_licence  # type: ignore[attr-defined]

    def other_process(*given: object) -> None:
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "mine.txt").write_text("mine")
        before(*given)

    with (
        mock.patch.object(lm.extras.sets.fetch, "require_licence", other_process),  # type: ignore[attr-defined]
        raises("output-exists", OutputError, path=tmp_path / "set"),
    ):
        fetch(tmp_path)
    assert server.requests == []
    assert os.listdir(tmp_path) == ["set"]


def test_a_link_is_no_target_and_errors_name_the_target(server: RecordServer, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "set").symlink_to(tmp_path / "elsewhere")
    with raises("output-exists", OutputError, path=tmp_path / "set"):
        fetch(tmp_path)
    (tmp_path / "set").unlink()
    denied = PermissionError(errno.EACCES, "denied", "made")
    with (
        mock.patch("os.rename", side_effect=denied),
        raises("write-failed", OutputError, path=tmp_path / "set"),
    ):
        fetch(tmp_path)
