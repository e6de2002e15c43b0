"What the project starts listens on 127.0.0.1 and nowhere else."
import ast
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import need
from lab import clean_env, free_port, is_up

ROOT = Path(__file__).resolve().parents[1]
LISTENS = "0A"      # the state of a socket in /proc/net/tcp
THIS_MACHINE = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}      # 127.0.0.1, ::1 and ::ffff:127.0.0.1


def descendants(pid: int) -> set[int]:
    "A process and all that it started."
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError): parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {p for p, parent in parents.items() if parent in found} - found: found |= more
    return found


def listening(pids: set[int]) -> dict[str, str]:
    "Addresses and ports at which some processes listen, as /proc/net/tcp writes them."
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError): sockets.add(os.readlink(fd))
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists(): continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets: found[fields[1].split(":")[1] + "/" + fields[9]] = fields[1].split(":")[0]
    return found


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    "What `make lab` starts, on a port that is free and without a browser."
    need(Path("/proc/net/tcp").exists(), "/proc/net/tcp")
    said = subprocess.run(["make", "-n", "-o", ".venv/.ready", "lab"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (command,) = [line for line in said.splitlines() if "jupyter-lab" in line]
    folder, started = command.split(" && ")
    words = shlex.split(started)
    assert (folder, words[0]) == ("cd nbs", "../.venv/bin/jupyter-lab")
    port = free_port()
    words = [str(Path(sys.executable).parent / "jupyter-lab"), *words[1:], "--no-browser", f"--port={port}", "--ServerApp.port_retries=0",
             "--IdentityProvider.token=", "--ServerApp.password=",
             "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={tmp_path}", *([] if "--allow-root" in words else ["--allow-root"])]
    with (tmp_path / "lab.log").open("w") as log:
        process = subprocess.Popen(words, cwd=tmp_path, env=clean_env(tmp_path), stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(600):
            if is_up(f"http://127.0.0.1:{port}") or process.poll() is not None: break
            with suppress(subprocess.TimeoutExpired): process.wait(0.1)
        assert process.poll() is None, (tmp_path / "lab.log").read_text()
        yield process, f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired): process.wait(10)
        with suppress(ProcessLookupError): os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_make_lab_listens_on_this_machine_only(lab: tuple[subprocess.Popen[bytes], str], tried: Callable) -> None:
    "The server, and a kernel that it started."
    process, url = lab
    alone = listening(descendants(process.pid))
    assert f"{int(url.rpartition(':')[2]):04X}" in {place.split("/")[0] for place in alone}
    asked = urllib.request.Request(f"{url}/api/kernels", data=json.dumps({"name": "python3"}).encode())
    with urllib.request.urlopen(asked, timeout=60) as answer: assert json.load(answer)["id"]
    for _ in range(600):
        found = listening(descendants(process.pid))
        if len(found) >= len(alone) + 5: break      # a kernel has five channels
        with suppress(subprocess.TimeoutExpired): process.wait(0.1)
    assert len(found) >= len(alone) + 5
    assert set(found.values()) <= THIS_MACHINE, found
    tried("S19", len(found))


def test_an_open_door_would_be_seen() -> None:
    need(Path("/proc/net/tcp").exists(), "/proc/net/tcp")
    for address, seen in (("127.0.0.1", True), ("0.0.0.0", False)):
        with socket.socket() as s:
            s.bind((address, 0))
            s.listen()
            port = f"{s.getsockname()[1]:04X}"
            (place,) = [where for key, where in listening({os.getpid()}).items() if key.startswith(port + "/")]
            assert (place in THIS_MACHINE) == seen


def test_nothing_in_the_package_listens() -> None:
    "No module of leakmel imports what a server is made of."
    for path in (ROOT / "leakmel").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {"socket", "socketserver", "http", "xmlrpc", "tornado", "zmq", "dash", "flask"}, path
