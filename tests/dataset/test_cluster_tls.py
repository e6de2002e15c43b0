"A cluster with TLS, by the commands of the guide: only who has a certificate of its authority can use it."

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_guide import ROOT, certificates
from conftest import need

import leakmel as lm
from leakmel.recordings.demo import write_demo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    "Address of a scheduler with one worker, and the environment in which it is reached."
    need(shutil.which("openssl"), "openssl")
    pytest.importorskip("distributed")
    folder = tmp_path_factory.mktemp("tls")
    env = certificates(folder / "certificates")
    file = folder / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    local = ["--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
    commands = [
        [*dask, "scheduler", "--protocol", "tls", *local, "--scheduler-file", str(file)],
        [
            *dask,
            "worker",
            "--scheduler-file",
            str(file),
            "--nthreads",
            "1",
            "--dashboard-address",
            "127.0.0.1:0",
        ],
    ]
    started = []
    try:
        for command in commands:
            with (folder / f"{command[3]}.log").open("w") as log:
                started.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log))
            end = time.monotonic() + 60
            while not file.exists():
                assert time.monotonic() < end, (folder / "scheduler.log").read_text()
                time.sleep(0.05)
        yield json.loads(file.read_bytes())["address"], env
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def build(address: str, env: dict[str, str], out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "leakmel", "build", str(out.parent / "d"), "--split", "training"]
    command += ["--out", str(out), "--engine", "cpu", "--quiet", "--json", "--cluster", address]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_build_with_certificates(cluster: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, env = cluster
    assert address.startswith("tls://")
    write_demo(tmp_path / "d", n_files=60)
    done = build(address, env, tmp_path / "x.h5")
    assert done.returncode == 0, done.stderr
    assert "not encrypted" not in done.stderr
    right = lm.build(tmp_path / "d", split="training", out=tmp_path / "y.h5", engine="cpu", progress="none")
    assert (tmp_path / "x.h5").read_bytes() == right.path.read_bytes()


@pytest.mark.parametrize("who", ["without a certificate", "of another authority"])
def test_others_are_refused(cluster: tuple[str, dict[str, str]], tmp_path: Path, who: str) -> None:
    address, _ = cluster
    write_demo(tmp_path / "d", n_files=12)
    env = os.environ | {"PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "3"}
    if who == "of another authority":
        env = certificates(tmp_path / "other") | env
    done = build(address, env, tmp_path / "x.h5")
    assert json.loads(done.stdout)["code"] == "no-cluster", done.stdout + done.stderr
    assert not (tmp_path / "x.h5").exists()
