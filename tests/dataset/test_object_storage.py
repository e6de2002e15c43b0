"Builds from object storage: the bytes of a local build, whatever happens to the objects and to the server."

import base64
import hashlib
import hmac
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, suppress
from email.utils import formatdate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import h5py
import pytest
from build_runs import execute, plan_run
from errors import raises
from independent import check
from object_server import BUCKET, SECRET, ObjectServer

import leakmel as lm
from leakmel.core import store as store_module
from leakmel.core.errors import DataError, MachineError, UsageError
from leakmel.core.store import open_store, store_path
from leakmel.dataset import pipeline as parts_module
from leakmel.dataset.loader import BadFilesError
from leakmel.dataset.pipeline import build_part, join
from leakmel.recordings.demo import write_demo

pytest.importorskip("obstore")
pytest.importorskip("moto")

QUIET: dict[str, Any] = {"engine": "cpu", "progress": "none"}
SPEC = {"sample_rate": 4096, "duration_s": 10.0}  # no header is read to infer them
N = iter(range(1000))


@pytest.fixture(scope="module")
def served() -> Iterator[ObjectServer]:
    server = ObjectServer()
    server.connect()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def environment(served, monkeypatch, tmp_path) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)  # TMPDIR is read again
    monkeypatch.setattr(store_module, "_RETRY", store_module._RETRY | {"max_retries": 4})
    served.gets.clear()


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("objects") / "demo"
    write_demo(root, n_files=60, faults=True)
    return root


@pytest.fixture(scope="module")
def whole(demo, tmp_path_factory) -> bytes:
    "Bytes of the training set, built from the folder."
    out = tmp_path_factory.mktemp("whole") / "x.h5"
    return lm.build(demo, split="training", out=out, **QUIET).path.read_bytes()


@pytest.fixture(scope="module")
def url(served, demo) -> str:
    "Objects that no test changes."
    return served.put_folder(demo, f"demo{next(N)}")


@pytest.fixture
def own_url(served, demo) -> str:
    "Objects of one test, which changes some."
    return served.put_folder(demo, f"demo{next(N)}")


def nothing_is_left(tmp_path: Path) -> bool:
    return not os.listdir(tmp_path / "tmp")


def keys_of(url: str, path: Path) -> dict[bytes, str]:
    "path of a row -> key"
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    with h5py.File(path) as f:
        return {p: f"{prefix}/TRAINING/{os.fsdecode(p)}" for p in f["files/path"][:].tolist()}


# ---------------------------------------------------------------- the same bytes


@pytest.mark.slow
def test_a_build_from_objects_has_the_bytes_of_one_from_files(url, demo, whole, tmp_path):
    made = lm.build(url, split="training", out=tmp_path / "x.h5", **QUIET)
    assert made.path.read_bytes() == whole
    assert (made.summary["root"], made.verified.ok) == (url, True)
    assert nothing_is_left(tmp_path)
    check(made.path, demo / "TRAINING")


@pytest.mark.slow
def test_the_run_notebook_builds_from_objects(url, whole, tmp_path):
    "Its data_root is a URL: not a path below the current folder."
    plan = plan_run(
        {"data_root": url, "split": "training", "out": str(tmp_path / "run"), "engine": "cpu"},
        progress="none",
    )
    assert dict(plan.rows())["data"].startswith(url)
    (made,) = execute(plan, progress="none")
    assert made.path.read_bytes() == whole


@pytest.mark.slow
def test_google_storage_gives_the_same_bytes(served, demo, whole, tmp_path, monkeypatch):
    "Google's servers have an interface of the form of S3 too, which obstore uses."
    for path in sorted((demo / "TRAINING").rglob("*.wav")):
        key = f"google/{path.relative_to(demo).as_posix()}"
        served.client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes(), ACL="public-read")
    account = {"gcs_base_url": served.url, "disable_oauth": True, "client_email": "", "private_key": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account | {"private_key_id": ""}))
    for name in served.environment:
        monkeypatch.delenv(name)
    url = f"gs://{BUCKET}/google"
    made = lm.build(
        url, split="training", out=tmp_path / "x.h5", upload=f"gs://{BUCKET}/google-sets", **QUIET
    )
    assert made.path.read_bytes() == whole
    assert lm.verify(made.path, root=url).ok
    key = made.summary["uploaded"].removeprefix(f"gs://{BUCKET}/")
    assert served.client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == whole
    assert nothing_is_left(tmp_path)


def signed_put(port: int, account: str, key: str, path: str) -> int:
    "Make a container of a server of Azure's form; return the HTTP status."
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{n}:{v}" for n, v in headers.items())]
    text = "\n".join([*lines, f"/{account}/{account}{path}", "restype:container"])
    sign = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(sign).decode()}"
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(
            "PUT", f"/{account}{path}?restype=container", headers=headers | {"Content-Length": "0"}
        )
        return connection.getresponse().status


@pytest.mark.long
def test_azure_storage_gives_the_same_bytes(demo, whole, tmp_path, monkeypatch):
    import obstore

    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("azurite-blob is not installed (npm install -g azurite)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    account, key = "devstoreaccount1", base64.b64encode(b"x" * 64).decode()
    place = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(tmp_path / "azure")]
    process = subprocess.Popen(
        [program, *place, "--skipApiVersionCheck", "--silent", "--disableTelemetry"],
        env=os.environ | {"AZURITE_ACCOUNTS": f"{account}:{key}"},
        stdout=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        assert signed_put(port, account, key, "/box") == 201
        settings = {"ACCOUNT_NAME": account, "ACCOUNT_KEY": key}
        for name, value in settings.items():
            monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
        monkeypatch.setenv("AZURE_ENDPOINT", f"http://127.0.0.1:{port}/{account}")
        monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
        store, url = open_store(store_path("az://box")), "az://box/leaks"
        for path in sorted(demo.rglob("*.wav")):
            obstore.put(store, f"leaks/{path.relative_to(demo).as_posix()}", path.read_bytes())
        made = lm.build(url, split="training", out=tmp_path / "x.h5", upload="az://box/sets", **QUIET)
        assert made.path.read_bytes() == whole
        assert bytes(obstore.get(store, "sets/x.h5").bytes()) == whole
        assert lm.verify(made.path, root=url).ok
        again = lm.build(url, split="training", out=tmp_path / "x.h5", **QUIET)
        assert (again.summary["mode"], nothing_is_left(tmp_path)) == ("none", True)  # nothing was read
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.slow
def test_small_batches_give_the_same_bytes(url, whole, tmp_path):
    config = lm.PipelineConfig(files_per_batch=5)
    assert (
        lm.build(url, split="training", out=tmp_path / "x.h5", pipeline=config, **QUIET).path.read_bytes()
        == whole
    )


@pytest.mark.slow
def test_the_batches_under_way_bound_the_room_on_disk(url, tmp_path, monkeypatch, served):
    most = list[int]()
    monkeypatch.setattr(served, "on_get", lambda key: most.append(_size(tmp_path)))
    config = lm.PipelineConfig(files_per_batch=2)
    made = lm.build(
        url, split="training", out=tmp_path / "x.h5", spec=SPEC, pipeline=config, check=0, **QUIET
    )
    threads = made.summary["pipeline"]["compute_workers"]
    assert max(most) <= 100_000 * (2 * threads + 1)


def _size(tmp_path: Path) -> int:
    total = 0
    for path in (tmp_path / "tmp").rglob("*"):
        with suppress(OSError):  # removed meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


@pytest.mark.slow
def test_all_splits_waveforms_and_a_label_folder(url, demo, tmp_path):
    there = lm.build_all(url, out_dir=tmp_path / "a", with_waveforms=True, **QUIET)
    here = lm.build_all(demo, out_dir=tmp_path / "b", with_waveforms=True, **QUIET)
    assert [x.path.read_bytes() for x in there] == [x.path.read_bytes() for x in here]
    one = lm.build(f"{url}/TRAINING", out=tmp_path / "c.h5", **QUIET)
    assert (
        one.path.read_bytes() == lm.build(demo / "TRAINING", out=tmp_path / "d.h5", **QUIET).path.read_bytes()
    )


@pytest.mark.slow
def test_parts_and_processes_of_a_cluster(url, whole, tmp_path):
    for k in (2, 1, 3):
        build_part(url, part=(k, 3), split="training", out=tmp_path / "p.h5", **QUIET)
    assert join(tmp_path / "p.h5", progress="none").path.read_bytes() == whole
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        made = lm.build(url, split="training", out=tmp_path / "x.h5", cluster=pool, **QUIET)
    assert made.path.read_bytes() == whole
    assert nothing_is_left(tmp_path)


@pytest.mark.slow
def test_a_cluster_lists_a_bucket_once(url, whole, tmp_path, monkeypatch):
    def listed_again(*args: Any) -> None:
        raise AssertionError("the bucket is listed by the join too")

    monkeypatch.setattr(parts_module, "found_below", listed_again)
    with ThreadPoolExecutor(1) as pool:
        made = lm.build(url, split="training", out=tmp_path / "x.h5", cluster=pool, **QUIET)
    assert made.path.read_bytes() == whole


# ---------------------------------------------------------------- update and resume


@pytest.mark.slow
def test_only_changed_objects_are_downloaded(own_url, demo, served, tmp_path):
    out = tmp_path / "x.h5"
    lm.build(own_url, split="training", out=out, spec=SPEC, check=0, **QUIET)
    before = out.read_bytes()
    served.gets.clear()
    again = lm.build(own_url, split="training", out=out, spec=SPEC, check=0, **QUIET)
    lost = {os.fsdecode(r.path) for r in again.rejections if r.code not in ("no_label", "dry")}
    assert again.summary["nothing_to_do"]
    assert all(key.partition("TRAINING/")[2] in lost for key in served.gets)
    paths = keys_of(own_url, out)
    first, other = sorted(paths)[0], sorted(paths)[5]
    served.put(paths[first], (demo / "TRAINING" / os.fsdecode(other)).read_bytes())  # same size, other ETag
    served.delete(paths[other])
    served.gets.clear()
    made = lm.build(own_url, split="training", out=out, spec=SPEC, check=0, **QUIET)
    assert made.summary["changes"] == {"added": 0, "changed": 1, "removed": 1}
    assert served.gets == [paths[first]]
    fresh = lm.build(own_url, split="training", out=tmp_path / "y.h5", spec=SPEC, **QUIET)
    assert out.read_bytes() == fresh.path.read_bytes() != before


def test_an_interrupted_build_is_resumed(url, served, whole, tmp_path, monkeypatch):
    out, config = tmp_path / "x.h5", lm.PipelineConfig(files_per_batch=4, journal_bytes=1)
    done = threading.Event()

    def deny(method: str, key: str) -> bool:
        return len(served.gets) >= 25 and bool(key) and not done.is_set()

    monkeypatch.setattr(served, "denied", deny)
    with raises("store-denied", MachineError):
        lm.build(url, split="training", out=out, spec=SPEC, pipeline=config, check=0, **QUIET)
    done.set()
    assert not out.exists()
    assert nothing_is_left(tmp_path)
    served.gets.clear()
    made = lm.build(url, split="training", out=out, spec=SPEC, pipeline=config, check=0, **QUIET)
    assert made.path.read_bytes() == whole
    assert made.summary["resumed_rows"] > 10
    assert len(set(served.gets)) <= made.found - made.summary["resumed_rows"]


@pytest.mark.slow
def test_a_resumed_build_reads_replaced_objects_again(own_url, demo, served, tmp_path, monkeypatch):
    out, config = tmp_path / "x.h5", lm.PipelineConfig(files_per_batch=4, journal_bytes=1)
    done = threading.Event()
    monkeypatch.setattr(
        served, "denied", lambda method, key: len(served.gets) >= 25 and bool(key) and not done.is_set()
    )
    with raises("store-denied", MachineError):
        lm.build(own_url, split="training", out=out, spec=SPEC, pipeline=config, check=0, **QUIET)
    done.set()
    first = sorted({key for key in served.gets if "TRAINING/LEAK" in key and "~F" not in key})
    bodies = {key: (demo / key.partition("/")[2]).read_bytes() for key in first}
    same = [key for key in first if len(bodies[key]) == len(bodies[first[0]])]
    for key, other in zip(same[:4], same[4:8], strict=True):
        served.put(key, bodies[other])
    made = lm.build(own_url, split="training", out=out, spec=SPEC, pipeline=config, check=0, **QUIET)
    assert made.summary["resumed_rows"] > 0
    fresh = lm.build(own_url, split="training", out=tmp_path / "y.h5", spec=SPEC, check=0, **QUIET)
    assert out.read_bytes() == fresh.path.read_bytes()


# ---------------------------------------------------------------- objects that vanish or change


@pytest.mark.slow
def test_objects_that_vanish_or_change_in_mid_build_are_rejected(
    own_url, demo, served, tmp_path, monkeypatch
):
    right = lm.build(own_url, split="training", out=tmp_path / "right.h5", spec=SPEC, **QUIET)
    keys = keys_of(own_url, right.path)
    gone, changed = sorted(keys)[3], sorted(keys)[10]
    data = (demo / "TRAINING" / os.fsdecode(sorted(keys)[11])).read_bytes()
    manifest = lm.scan(own_url, progress="none")
    once, lock = iter([True]), threading.Lock()

    def strike(key: str) -> None:
        with lock:
            if next(once, False):  # after the listing, before the first object is sent
                served.delete(keys[gone])
                served.put(keys[changed], data)

    monkeypatch.setattr(served, "on_get", strike)
    made = lm.build(own_url, split="training", out=tmp_path / "x.h5", spec=SPEC, manifest=manifest, **QUIET)
    codes = {r.path: r.code for r in made.rejections}
    assert (codes[gone], codes[changed]) == ("changed", "changed")
    assert made.rows == right.rows - 2
    assert made.rows + len(made.rejections) == made.found
    again = lm.build(
        own_url, split="training", out=tmp_path / "x.h5", spec=SPEC, **QUIET
    )  # the new version is a row
    assert again.rows == right.rows - 1
    assert changed in keys_of(own_url, again.path)


@pytest.mark.slow
def test_a_join_reads_changed_objects_again(own_url, demo, served, tmp_path):
    for k in (1, 2):
        build_part(own_url, part=(k, 2), split="training", out=tmp_path / "p.h5", **QUIET)
    listed = lm.build(demo, split="training", out=tmp_path / "x.h5", **QUIET)  # which has the same rows
    keys = keys_of(own_url, listed.path)
    served.put(keys[min(keys)], (demo / "TRAINING" / os.fsdecode(max(keys))).read_bytes())
    made = join(tmp_path / "p.h5", progress="none")
    assert made.summary["changes"]["changed"] == 1
    assert (
        made.path.read_bytes()
        == lm.build(own_url, split="training", out=tmp_path / "y.h5", **QUIET).path.read_bytes()
    )


@pytest.mark.slow
def test_throttling_gives_the_same_bytes(url, served, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(served, "n_throttled", 40)
    assert lm.build(url, split="training", out=tmp_path / "x.h5", **QUIET).path.read_bytes() == whole
    assert served.n_throttled == 0


def test_on_bad_file_stop_names_the_object(url, tmp_path):
    config = lm.PipelineConfig(on_bad_file="stop")
    with pytest.raises(BadFilesError) as e:
        lm.build(url, split="training", out=tmp_path / "x.h5", pipeline=config, **QUIET)
    assert os.fsdecode(e.value.path or b"").startswith(f"{url}/TRAINING/")
    assert nothing_is_left(tmp_path)


# ---------------------------------------------------------------- verify


@pytest.mark.slow
def test_verify_with_a_table(own_url, demo, served, tmp_path):
    names = sorted(p.relative_to(demo).as_posix() for p in (demo / "TRAINING").rglob("H*.wav"))[:6]
    (tmp_path / "t.csv").write_text("path,label\n" + "".join(f"{n},{n.split('/')[1]}\n" for n in names))
    m = lm.scan(own_url, table=tmp_path / "t.csv")
    made = lm.build(own_url, manifest=m, out=tmp_path / "x.h5", **QUIET)
    assert lm.verify(made.path, root=own_url, table=tmp_path / "t.csv").problems == []
    served.delete(f"{own_url.removeprefix(f's3://{BUCKET}/')}/{names[0]}")
    (problem,) = lm.verify(made.path, root=own_url, table=tmp_path / "t.csv", sample=0).problems
    assert names[0] in problem


@pytest.mark.slow
def test_verify_reads_the_objects_again(own_url, demo, served, tmp_path):
    made = lm.build(own_url, split="training", out=tmp_path / "x.h5", **QUIET)
    for sample in (None, 8):
        report = lm.verify(made.path, root=own_url, sample=sample)
        assert report.ok
        assert report.checked == (made.rows if sample is None else 8)
    assert lm.verify(made.path, root=demo, sample=None).ok
    keys = keys_of(own_url, made.path)
    served.put(keys[min(keys)], (demo / "TRAINING" / os.fsdecode(max(keys))).read_bytes())
    served.put(f"{keys[min(keys)]}.wav", b"new")
    served.delete(keys[max(keys)])
    report = lm.verify(made.path, root=own_url, sample=None)
    text = "\n".join(report.problems)
    assert not report.ok
    assert "has changed since" in text
    assert "no longer exist" in text
    assert "neither rows nor" in text
    assert str(tmp_path / "tmp") not in text
    assert nothing_is_left(tmp_path)


# ---------------------------------------------------------------- upload, options, secrets


@pytest.mark.slow
def test_a_finished_data_set_is_uploaded(url, served, whole, tmp_path, capfd):
    made = lm.build(
        url, split="training", out=tmp_path / "x.h5", upload=f"s3://{BUCKET}/sets{next(N)}", **QUIET
    )
    key = made.summary["uploaded"].removeprefix(f"s3://{BUCKET}/")
    assert served.client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == whole
    with pytest.raises(DataError) as e:
        lm.build(url, split="training", out=tmp_path / "x.h5", upload="s3://absent-bucket/sets", **QUIET)
    assert e.value.code == "no-such-bucket"
    assert "complete on this machine" in e.value.__notes__[0]
    assert (tmp_path / "x.h5").read_bytes() == whole


def test_modes_and_outputs_that_objects_do_not_have(url, tmp_path):
    with raises("unused-option", UsageError):
        lm.build(url, split="training", out=tmp_path / "x.h5", mode="preload", **QUIET)
    with raises("store-url", UsageError):
        lm.build(url, split="training", out=f"s3://{BUCKET}/x.h5", **QUIET)


def build_command(url: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "leakmel", "build", url, "--split", "training", "--out", str(out)]


@pytest.mark.slow
def test_secrets_are_nowhere(url, tmp_path, capfd, caplog):
    caplog.set_level("DEBUG")
    ran = subprocess.run(
        [*build_command(url, tmp_path / "x.h5"), "--json"], capture_output=True, timeout=120, check=False
    )
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["root"] == url
    lm.scan(url, progress="none").save(tmp_path / "listing.npz")
    lm.build(url, split="validation", out=tmp_path / "v.h5", engine="cpu")
    texts = [ran.stdout, ran.stderr, caplog.text.encode(), *(s.encode() for s in capfd.readouterr())]
    texts += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 10
    for text in texts:
        assert SECRET.encode() not in text
        assert b"AKIAMARKER" not in text
        assert str(tmp_path / "tmp").encode() not in text


@pytest.mark.slow
def test_a_signal_ends_a_build_that_waits_for_the_server(url, served, tmp_path, monkeypatch):
    reached, leave = threading.Event(), threading.Event()

    def hang(key: str) -> None:
        if len(served.gets) > 20:
            reached.set()
            leave.wait(60)

    monkeypatch.setattr(served, "on_get", hang)
    process = subprocess.Popen(
        [*build_command(url, tmp_path / "x.h5"), "--sample-rate", "4096", "--duration-s", "10"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert reached.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        leave.set()
        process.kill()
    assert nothing_is_left(tmp_path)
    assert not (tmp_path / "x.h5").exists()


@pytest.mark.slow
def test_objects_in_folders_of_systems_are_passed_over(served, tmp_path):
    root = tmp_path / "d"
    write_demo(root, n_files=12)
    right = lm.build(root, split="training", out=tmp_path / "right.h5", **QUIET)
    first = next((root / "TRAINING").rglob("*.wav"))
    for place in ("TRAINING/.stversions", "TRAINING/LEAK/x/@eaDir/y", "$Recycle.Bin", "TESTING/LEAK/.trash"):
        (root / place).mkdir(parents=True)
        shutil.copy(first, root / place / "old.wav")
    url = served.put_folder(root, f"hidden{next(N)}")
    m = lm.scan(url)
    (text,) = m.problems["message"][m.problems["kind"] == "passed_over"]
    assert text == (
        "4 recordings in 4 system or hidden folders were passed over: "
        "$Recycle.Bin, TESTING/LEAK/.trash, TRAINING/.stversions, ..."
    )
    done = lm.build(url, split="training", out=tmp_path / "x.h5", **QUIET)
    assert done.path.read_bytes() == right.path.read_bytes()
    assert not lm.verify(done.path, root=url).problems
    table = tmp_path / "t.csv"
    table.write_text("path,label\nTRAINING/.stversions/old.wav,LEAK\n")
    named = lm.build(url, out=tmp_path / "t.h5", manifest=lm.scan(url, table=table), **QUIET)
    assert named.rows == 1, "the user named it"
    assert not lm.verify(named.path, root=url, table=table).problems
