"What the project starts listens on 127.0.0.1 and nowhere else."

import ast
import json
import os
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import need
from lab import clean_env, is_taken, serving

ROOT = Path(__file__).resolve().parents[2]
LISTENS = "0A"  # the state of a socket in /proc/net/tcp
THIS_MACHINE = {
    "0100007F",
    "00000000000000000000000001000000",
    "0000000000000000FFFF00000100007F",
}  # 127.0.0.1, ::1 and ::ffff:127.0.0.1


def descendants(pid: int) -> set[int]:
    "A process and all that it started."
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> dict[str, str]:
    "Addresses and ports at which some processes listen, as /proc/net/tcp writes them."
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                sockets.add(os.readlink(fd))
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets:
                found[fields[1].split(":")[1] + "/" + fields[9]] = fields[1].split(":")[0]
    return found


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    "What `make lab` starts, on a port that is free and without a browser."
    need(Path("/proc/net/tcp").exists(), "/proc/net/tcp")
    output = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed-all", "lab"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (command,) = [line for line in output.splitlines() if "jupyter-lab" in line]
    folder, started = command.split(" && ")
    words = shlex.split(started)
    assert (folder, words[0]) == ("cd runs/lab", "../../.venv/bin/jupyter-lab")
    words = [
        str(Path(sys.executable).parent / "jupyter-lab"),
        *words[1:],
        "--no-browser",
        "--ServerApp.disable_check_xsrf=True",
        f"--ServerApp.root_dir={tmp_path}",
        *([] if "--allow-root" in words else ["--allow-root"]),
    ]
    with serving(words, tmp_path, tmp_path, limit_s=60) as running:
        yield running


@pytest.mark.site
@pytest.mark.slow
def test_make_lab_listens_on_this_machine_only(
    lab: tuple[subprocess.Popen[bytes], str], tried: Callable
) -> None:
    "The server, and a kernel that it started."
    process, url = lab
    alone = listening(descendants(process.pid))
    assert f"{urlsplit(url).port:04X}" in {place.split("/")[0] for place in alone}
    asked = urllib.request.Request(f"{url}/api/kernels", data=json.dumps({"name": "python3"}).encode())
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert json.load(answer)["id"]
    for _ in range(600):
        found = listening(descendants(process.pid))
        if len(found) >= len(alone) + 5:
            break  # a kernel has five channels
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    assert len(found) >= len(alone) + 5
    assert set(found.values()) <= THIS_MACHINE, found
    tried("S19", len(found))


# A server as Jupyter's is, except that another program takes its port the first time.
FAKE = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
(base,) = [w.partition("=")[2] for w in sys.argv if w.startswith("--ServerApp.base_url=")]
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == base + "api/status" else 404)
        self.end_headers()
server = HTTPServer(("127.0.0.1", 0), Answer)
first = not Path("tried").exists()
Path("tried").touch()
port = TAKEN if first else server.server_port
said = {"url": f"http://127.0.0.1:{port}{base}"}
(Path(os.environ["JUPYTER_RUNTIME_DIR"]) / f"jpserver-{os.getpid()}.json").write_text(json.dumps(said))
if first: sys.exit(f"The port {port} is already in use.")
server.serve_forever()
"""


@pytest.mark.site
def test_port_taken_by_another_program_is_retried(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # nobody listens, so that no asking waits
        command = [sys.executable, "-c", FAKE.replace("TAKEN", str(s.getsockname()[1]))]
        with serving(command, tmp_path, tmp_path, limit_s=60) as (process, url):
            assert urlsplit(url).port not in {None, s.getsockname()[1]}
            assert process.poll() is None
    assert process.poll() is not None, "it ends with the block"
    (tmp_path / "tried").unlink()
    broken = [sys.executable, "-c", "import sys; sys.exit('no such option')"]
    with pytest.raises(AssertionError, match="no such option"), serving(broken, tmp_path, tmp_path):
        pass
    mute = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        pytest.raises(pytest.fail.Exception, match="did not answer"),
        serving(mute, tmp_path, tmp_path, limit_s=0),
    ):
        pass


@pytest.mark.site
@pytest.mark.slow
def test_jupyter_reports_a_taken_port(tmp_path: Path) -> None:
    "In the words by which the tests know it."
    with socket.socket() as s, (tmp_path / "lab.log").open("w") as log:
        s.bind(("127.0.0.1", 0))
        s.listen()
        command = [
            str(Path(sys.executable).parent / "jupyter-server"),
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
            f"--port={s.getsockname()[1]}",
            "--ServerApp.port_retries=0",
        ]
        assert (
            subprocess.run(
                command, cwd=tmp_path, env=clean_env(tmp_path), stdout=log, stderr=log, timeout=60
            ).returncode
            == 1
        )
    assert is_taken(tmp_path / "lab.log")


@pytest.mark.site
def test_public_listener_is_detected() -> None:
    need(Path("/proc/net/tcp").exists(), "/proc/net/tcp")
    for address, seen in (("127.0.0.1", True), ("0.0.0.0", False)):
        with socket.socket() as s:
            s.bind((address, 0))
            s.listen()
            port = f"{s.getsockname()[1]:04X}"
            (place,) = [
                where for key, where in listening({os.getpid()}).items() if key.startswith(port + "/")
            ]
            assert (place in THIS_MACHINE) == seen


def test_package_opens_no_server() -> None:
    "No module of leakmel imports what a server is made of."
    for path in (ROOT / "leakmel").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not {n.split(".")[0] for n in names} & {
                "socket",
                "socketserver",
                "http",
                "xmlrpc",
                "tornado",
                "zmq",
                "dash",
                "flask",
            }, path
