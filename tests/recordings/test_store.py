"URLs, listings and copies of objects: hostile keys, errors without secrets, credentials, and requests that end at once."

import asyncio
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from errors import raises
from object_server import BUCKET, SECRET, ObjectServer

import leakmel as lm
from leakmel.core import store as store_module
from leakmel.core.errors import DataError, LeakmelError, MachineError, MissingPackageError, UsageError
from leakmel.core.store import Folder, StorePath, is_url, object_stamp, store_path, upload_file
from leakmel.recordings.demo import write_demo

pytest.importorskip("obstore")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def served() -> Iterator[ObjectServer]:
    server = ObjectServer()
    server.connect()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def environment(served, monkeypatch) -> None:
    for name in [n for n in os.environ if n.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store_module, "_RETRY", store_module._RETRY | {"max_retries": 3})


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("store") / "demo"
    write_demo(root, n_files=40, faults=True)
    return root


# ---------------------------------------------------------------- URLs


def test_a_url_is_a_path_that_keeps_its_form():
    url = store_path("s3://pipes/2026/demo/")
    assert str(url / "LEAK") == "s3://pipes/2026/demo/LEAK"
    assert os.fspath(url.parent) == "s3://pipes/2026"
    assert (url.prefix, url.name) == ("2026/demo", "demo")
    assert pickle.loads(pickle.dumps(url)) == url
    assert isinstance(pickle.loads(pickle.dumps(url)), StorePath)
    assert is_url(url)
    assert is_url("az://x")
    assert not is_url(Path("s3:/x"))
    assert not is_url("/data/s3://x")
    assert StorePath("s3:", "pipes").prefix == ""


@each(
    "url",
    [
        f"s3://AKIA:{SECRET}@pipes/x",
        f"s3://pipes/x?X-Amz-Signature={SECRET}",
        f"s3://pipes/x#{SECRET}",
        "s3://",
        "s3:///x",
        "s3://pipes/../x",
        "s3://pipes//x",
        "s3://pipes/a\nb",
        "s3://../x",
    ],
)
def test_urls_with_credentials_or_odd_parts_are_refused_without_being_shown(url):
    with raises("store-url", UsageError) as e:
        lm.scan(url, progress="none")
    assert SECRET not in str(e.value)


# ---------------------------------------------------------------- listings


@pytest.mark.slow
@each("options", [{}, {"split": "validation"}, {"pattern": "{label}/{sensor}~{*}~{start_time}~{gain}"}])
def test_a_listing_of_objects_equals_that_of_the_folder(served, demo, options):
    url = served.put_folder(demo, "listing/demo")
    here, there = lm.scan(demo, progress="none", **options), lm.scan(url, progress="none", **options)
    assert (str(there.root), there.label_names) == (url, here.label_names)
    assert here.counts() == there.counts()
    assert here.problems.equals(there.problems)
    assert here.table.drop(columns="mtime").equals(there.table.drop(columns="mtime"))
    assert [str(x.folder) for x in there.listings] == [f"{url}/{x.folder.name}" for x in here.listings]


@pytest.mark.slow
def test_contents_and_stored_manifests_are_those_of_the_folder(served, demo, tmp_path):
    url = served.put_folder(demo, "content/demo")
    here, there = (lm.scan(root, content=True, progress="none") for root in (demo, url))
    assert here.content is not None
    assert here.content.equals(there.content)  # type: ignore[arg-type]
    assert here.problems.equals(there.problems)
    again = lm.Manifest.load(there.save(tmp_path / "m.npz"))
    assert again.root == there.root
    assert isinstance(again.listings[0].folder, StorePath)
    assert SECRET.encode() not in (tmp_path / "m.npz").read_bytes()


def test_a_split_and_entries_next_to_it_are_found(served):
    for key in ("TRAINING/LEAK/a.wav", "TRAINING/NOLEAK/b.wav", "OTHER/c.wav", "d.wav", "TRAINING/.x/e.wav"):
        served.put(f"next/{key}", b"RIFF")
    found = lm.scan(f"s3://{BUCKET}/next", progress="none")
    assert {
        p for k, p in zip(found.problems["kind"], found.problems["path"], strict=True) if k == "not_a_split"
    } == {"OTHER", "d.wav"}
    assert found.counts() == {"TRAINING": {"LEAK": 1, "NOLEAK": 1}}


def test_the_stamp_follows_the_etag():
    one, other = ({"e_tag": tag, "size": 1, "last_modified": "now"} for tag in ('"a"', '"b"'))
    assert object_stamp(one) == object_stamp(one | {"last_modified": "later"}) != object_stamp(other)
    assert object_stamp(one | {"e_tag": None}) != object_stamp(
        one | {"e_tag": None, "last_modified": "later"}
    )
    stamps = [object_stamp({"e_tag": str(k)}) for k in range(1000)]
    assert len(set(stamps)) == 1000
    assert min(stamps) >= 0
    assert max(stamps) < 2**61


# ---------------------------------------------------------------- hostile keys


@each("key", ["../../etc/a.wav", "LEAK//a.wav", "LEAK/./a.wav"])
def test_keys_that_are_no_paths_end_the_listing_with_their_name(served, key):
    served.put(f"bad/{key}", b"RIFF")
    try:
        with raises("object-key", DataError) as e:
            lm.scan(f"s3://{BUCKET}/bad", progress="none")
        assert f"found bad/{key.partition('/')[0]}/" in str(e.value)
    finally:
        served.delete(f"bad/{key}")


def test_keys_are_no_names_of_files(served, tmp_path, monkeypatch):
    "Keys that collide as paths, that are long or strange, are all copied; nothing is written elsewhere."
    monkeypatch.setattr(store_module, "TemporaryDirectory", lambda **k: _Place(tmp_path / "copies"))
    keys = [
        "LEAK/a.wav",
        "LEAK/a.wav/b.wav",
        "LEAK/ -rf *.wav",
        "LEAK/%2e%2e/c.wav",
        "LEAK/ü\\x.wav",
        f"{'l' * 250}/d.wav",
    ]
    for key in [*keys, f"LEAK/{'l' * 300}.wav"]:
        served.put(f"odd/{key}", key.encode())
    found = lm.scan(f"s3://{BUCKET}/odd", progress="none")
    paths = found.listings[0].paths
    assert sorted(paths) == sorted(map(os.fsencode, keys))
    assert list(found.problems["kind"]).count("special") == 1
    with Folder(found.root) as folder, folder.local(paths) as files:
        assert {path: Path(os.fsdecode(file)).read_bytes() for path, file in files.items()} == {
            p: p for p in paths
        }
        assert {Path(os.fsdecode(file)).parent for file in files.values()} == {tmp_path / "copies"}
    assert list(tmp_path.rglob("*")) == []


class _Place:
    "A temporary folder under a known name."

    def __init__(self, path: Path):
        path.mkdir()
        self.name = str(path)

    def cleanup(self) -> None:
        os.rmdir(self.name)


# ---------------------------------------------------------------- copies


def test_copies_have_size_and_stamp_of_the_listing_and_are_removed(served, demo):
    url = served.put_folder(demo, "copies/demo")
    x = lm.scan(url, split="training", progress="none").listings[0]
    with Folder(x.folder) as folder:
        with folder.local([*x.paths, b"absent.wav"]) as files:
            stats = [os.stat(files[path]) for path in x.paths]
            assert [st.st_size for st in stats] == x.sizes.tolist()
            assert [st.st_mtime_ns for st in stats] == x.mtimes_ns.tolist()
            assert not os.path.exists(files[b"absent.wav"])
            place = os.path.dirname(files[x.paths[0]])
            assert os.stat(place).st_mode & 0o777 == 0o700
        assert os.listdir(place) == []
    assert not os.path.exists(place)


def test_large_objects_are_written_as_they_come(served, monkeypatch):
    data = np.random.default_rng(0).bytes(3_000_000)
    served.put("large/a.wav", data)
    monkeypatch.setattr(store_module, "_WHOLE_BYTES", 1 << 20)
    with Folder(store_path(f"s3://{BUCKET}/large")) as folder, folder.local([b"a.wav"]) as files:
        assert Path(os.fsdecode(files[b"a.wav"])).read_bytes() == data


def test_throttled_requests_are_repeated(served, monkeypatch):
    served.put("slow/a.wav", b"x")
    monkeypatch.setattr(served, "n_throttled", 2)
    with Folder(store_path(f"s3://{BUCKET}/slow")) as folder, folder.local([b"a.wav"]) as files:
        assert Path(os.fsdecode(files[b"a.wav"])).read_bytes() == b"x"
    assert served.n_throttled == 0


def test_closing_ends_requests_and_those_who_wait(served, monkeypatch):
    served.put("hang/a.wav", b"x")
    reached, leave = threading.Event(), threading.Event()

    def hang(key: str) -> None:
        reached.set()
        leave.wait(60)

    monkeypatch.setattr(served, "on_get", hang)
    folder = Folder(store_path(f"s3://{BUCKET}/hang"))
    errors = list[LeakmelError]()

    def read() -> None:
        try:
            with folder.local([b"a.wav"]):
                pass
        except LeakmelError as e:
            errors.append(e)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert reached.wait(30)
        folder.close()
        thread.join(30)
        assert not thread.is_alive()
    finally:
        leave.set()
    assert [e.code for e in errors] == ["stopped"]
    with raises("stopped", MachineError):
        folder.start(b"a.wav", b"1")


def test_a_request_that_ends_in_the_last_turn_of_the_loop_is_reported(served, monkeypatch):
    folder = Folder(store_path(f"s3://{BUCKET}/last"))
    assert folder.place  # the loop runs
    closing, asked = threading.Thread(target=folder.close), threading.Event()

    async def get(store: object, key: str) -> None:
        whole = folder._loop.call_soon_threadsafe

        def ask(stop: Any) -> None:
            whole(stop)
            asked.set()

        monkeypatch.setattr(folder._loop, "call_soon_threadsafe", ask)
        closing.start()
        asked.wait(30)
        await asyncio.sleep(0)  # this request ends right after the loop is told to stop
        raise FileNotFoundError

    monkeypatch.setattr(folder, "_get", get)
    copy = folder.start(b"a.wav", b"1")
    assert copy.result(30).endswith(b"/1")  # waited for ever before
    closing.join(30)
    assert not closing.is_alive()


# ---------------------------------------------------------------- errors and credentials


def test_each_error_has_a_remedy_and_no_secret(served, monkeypatch):
    served.put("errors/LEAK/a.wav", b"x")
    url = f"s3://{BUCKET}/errors"
    found = list[LeakmelError]()

    def fails(code: str, where: str = url) -> None:
        with pytest.raises(LeakmelError) as e:
            lm.scan(where, progress="none")
        assert e.value.code == code, e.value
        assert e.value.remedy
        found.append(e.value)

    fails("no-such-bucket", "s3://absent-bucket/x")
    fails("no-such-folder", f"s3://{BUCKET}/absent")
    with monkeypatch.context() as m:
        m.setattr(served, "denied", lambda method, key: True)
        fails("store-denied")
    with monkeypatch.context() as m:
        m.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        fails("store-unreachable")
    with monkeypatch.context() as m:
        m.delenv("AWS_ALLOW_HTTP")
        fails("store-settings")
    with monkeypatch.context() as m:
        m.setenv("AWS_PROFILE", "absent")
        fails("no-credentials")
    fails("store-settings", "az://pipes/x")  # no account
    for e in found:
        assert SECRET not in "".join(traceback.format_exception(e))


@each(
    "address",
    ["http://[::1", "127.0.0.1:9000", "http://", "http://127.0.0.1:99999", "http://a b/", "http://a^b", "x"],
)
@each(("scheme", "name"), [("s3", "AWS_ENDPOINT_URL"), ("az", "AZURE_ENDPOINT")])
def test_an_invalid_address_of_the_server_is_named(monkeypatch, scheme, name, address):
    monkeypatch.setenv(name, address)
    with raises("store-settings", UsageError) as e:
        lm.scan(f"{scheme}://{BUCKET}/x", progress="none")
    assert name in e.value.found


def test_an_etag_has_the_same_stamp_with_and_without_quotes():
    meta = {"e_tag": '"0x8DC"', "last_modified": "x", "version": None, "size": 3}
    assert (
        object_stamp(meta) == object_stamp(meta | {"e_tag": "0x8DC"}) != object_stamp(meta | {"e_tag": "0"})
    )


def test_a_profile_gives_the_credentials(served, monkeypatch, tmp_path):
    served.put("profile/LEAK/a.wav", b"x")
    (tmp_path / "credentials").write_text(
        f"[field]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = {SECRET}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "field")
    signed, answer = list[str](), served._app

    def noted(environ, start):
        signed.append(environ.get("HTTP_AUTHORIZATION", ""))
        return answer(environ, start)

    monkeypatch.setattr(served, "_app", noted)
    assert len(lm.scan(f"s3://{BUCKET}/profile", progress="none")) == 1
    assert signed
    assert all("Credential=AKIAPROFILE/" in s for s in signed)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with raises("missing-package", MissingPackageError) as e:
        lm.scan("s3://pipes/x", progress="none")
    assert "[store]" in str(e.value)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_gets_an_error_in_place_of_a_request_that_never_returns(served):
    served.put("fork/LEAK/a.wav", b"x")
    code = (
        "import os, sys, leakmel as lm\n"
        f"url = 's3://{BUCKET}/fork'\n"
        "lm.scan(url, progress='none')\n"
        "if not os.fork():\n"
        "    try:\n"
        "        lm.scan(url, progress='none')\n"
        "    except lm.LeakmelError as e:\n"
        "        os._exit(7 if e.code == 'store-forked' else 1)\n"
        "    os._exit(2)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 7


def test_local_builds_do_not_import_obstore(tmp_path, demo):
    code = (
        "import sys, leakmel as lm\n"
        f"lm.build({str(demo)!r}, split='validation', out={str(tmp_path / 'x.h5')!r}, engine='cpu', progress='none')\n"
        "sys.exit(any(name in sys.modules for name in ('obstore', 'boto3')))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


# ---------------------------------------------------------------- upload


def test_an_upload_in_parts_has_the_bytes_of_the_file(served, tmp_path, monkeypatch):
    data = np.random.default_rng(1).bytes(12_000_000)
    (tmp_path / "x.h5").write_bytes(data)
    monkeypatch.setattr(store_module, "_PART_BYTES", 5 << 20)
    assert upload_file(tmp_path / "x.h5", store_path(f"s3://{BUCKET}/sets")) == f"s3://{BUCKET}/sets/x.h5"
    head = served.client.head_object(Bucket=BUCKET, Key="sets/x.h5")
    assert head["ETag"].endswith('-3"')  # three parts
    assert served.client.get_object(Bucket=BUCKET, Key="sets/x.h5")["Body"].read() == data
