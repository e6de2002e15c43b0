"Messages on new visits: each once, whatever the server does, and through kills; a layer for a GIS."

import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from each import each
from errors import raises
from made_detectors import made_detector, noise, put

from leakmel.cli import main
from leakmel.core.files import OutputLock
from leakmel.extras.nightly import handover, run
from leakmel.extras.nightly.handover import NOTIFIED_JSON, check_address, deliver, geojson
from leakmel.extras.nightly.nights import SensorRow

ROW = SensorRow(
    rank=1,
    sensor="LOG1",
    visit="evidence",
    evidence=900.0,
    first_above="2026-11-20",
    reason="Scores rose.",
    health="ok",
    trend=1.0,
    last_night="2026-11-21",
    nights=20,
    score=0.9,
    recording="a.wav",
    digest="0" * 32,
    loudest="a.wav",
    loudest_db=-20.0,
    leak_score=97,
)
ROWS = tuple(replace(ROW, rank=k, sensor=f"LOG{k}") for k in (1, 2, 3))


class Hook(ThreadingHTTPServer):
    "A webhook that answers with the statuses that a test orders, one for each request, then with 204."

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.statuses: list[int] = []
        self.got: list[tuple[str, dict[str, Any]]] = []  # key and body of each request
        self.delay_s = 0.0
        self.n_slow_bytes = 0
        self.headers: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/secret"

    def accepted(self) -> Counter[str]:
        return Counter(key for key, _ in self.got)


class _Answer(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        time.sleep(self.server.delay_s)
        if status < 300:
            self.server.got.append((self.headers["Idempotency-Key"], body))
        with suppress(OSError):  # the other end has left
            for _ in range(self.server.n_slow_bytes):
                self.wfile.write(b"H")
                time.sleep(0.02)
            self.send_response(status)
            for name, value in self.server.headers.items():
                self.send_header(name, value)
            self.end_headers()

    do_GET = do_POST

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def served(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hook(monkeypatch) -> Iterator[Hook]:
    monkeypatch.setattr(handover, "WAITS_S", (0.0, 0.0, 0.0))
    with served(Hook()) as server:
        yield server


def printed(words: list[str]) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    return out.getvalue()


def test_each_visit_is_told_once(hook, tmp_path):
    assert str(deliver(hook.url, ROWS, tmp_path, {}, {})) == "3 messages sent to 127.0.0.1"
    assert deliver(hook.url, ROWS, tmp_path, {}, {}).sent == 0
    again = (*ROWS, replace(ROW, sensor="LOG4"))
    assert deliver(hook.url, again, tmp_path, {}, {}).sent == 1
    assert [body["sensor"] for _, body in hook.got] == ["LOG1", "LOG2", "LOG3", "LOG4"]
    assert set(hook.accepted().values()) == {1}
    body = hook.got[0][1]
    assert body["text"] == "visit LOG1: leak score 97; Scores rose."
    assert (body["event"], body["first_above"], body["key"]) == ("visit", "2026-11-20", hook.got[0][0])


def test_a_sensor_that_rises_again_is_told_again(hook, tmp_path):
    deliver(hook.url, ROWS[:1], tmp_path, {}, {})
    deliver(hook.url, (), tmp_path, {}, {})  # visited
    again = (replace(ROWS[0], first_above="2027-02-01"),)
    for _ in range(2):
        deliver(hook.url, again, tmp_path, {}, {"LOG1": "2026-11-30"})
    assert [body["last_visit"] for _, body in hook.got] == ["", "2026-11-30"]
    assert len(hook.accepted()) == 2


def test_nights_and_budgets_that_move_a_rise_tell_nothing_new(hook, tmp_path):
    for night in ("2026-11-20", "2026-11-19", ""):  # "": high from the start
        row = replace(ROW, first_above=night, last_night=f"2026-12-0{len(night) // 9 + 1}")
        deliver(hook.url, (row,), tmp_path, {}, {})
    assert len(hook.got) == 1


def test_one_run_at_a_time_sends(hook, tmp_path):
    with OutputLock(tmp_path / NOTIFIED_JSON), raises("output-locked"):
        deliver(hook.url, ROWS, tmp_path, {}, {})
    assert hook.got == []


@each(
    ("statuses", "sent", "why"),
    [
        ([500], 3, ""),
        ([503, 429], 3, ""),
        ([204, 500, 500, 500], 1, "HTTP 500"),
        ([404], 0, "HTTP 404: refused, check the address"),
        ([302], 0, "HTTP 302: refused, check the address"),
        ([400], 2, "HTTP 400: refused, check the address"),
    ],
    ids=["once", "twice", "for good", "refused", "redirected", "one message"],
)
def test_a_server_that_fails(statuses, sent, why, tmp_path):
    "What is missing comes with the next run."
    with pytest.MonkeyPatch.context() as patch, served(Hook()) as hook:
        patch.setattr(handover, "WAITS_S", (0.0, 0.0, 0.0))
        state = tmp_path / f"state-{len(list(tmp_path.iterdir()))}"
        state.mkdir()
        hook.statuses = list(statuses)
        hook.headers = {"Location": hook.url}
        done = deliver(hook.url, ROWS, state, {}, {})
        assert (done.sent, done.left, done.why) == (sent, 3 - sent, why)
        assert deliver(hook.url, ROWS, state, {}, {}).sent == 3 - sent
        assert sorted(hook.accepted().values()) == [1, 1, 1]


def test_a_server_that_answers_late_or_never(hook, tmp_path, monkeypatch):
    "A message that arrived without an answer comes again with the same key."
    monkeypatch.setattr(handover, "TIMEOUT_S", 0.2)
    hook.delay_s = 0.5
    done = deliver(hook.url, ROWS, tmp_path, {}, {})
    assert (done.sent, done.left) == (0, 3)
    assert "3 not sent (" in str(done)
    hook.delay_s = 0.0
    monkeypatch.setattr(handover, "TIMEOUT_S", 60.0)
    time.sleep(0.6)  # late answers
    assert deliver(hook.url, ROWS, tmp_path, {}, {}).sent == 3
    assert len(hook.accepted()) == 3
    bodies = dict(hook.got)
    assert all(bodies[key] == body for key, body in hook.got)


def test_a_server_that_answers_byte_by_byte(hook, tmp_path, monkeypatch):
    "No time-out of a socket ever comes."
    monkeypatch.setattr(handover, "MOST_S", 0.5)
    hook.n_slow_bytes = 1000
    done = deliver(hook.url, ROWS, tmp_path, {}, {})
    assert (done.sent, done.left, done.why) == (0, 3, "no time was left after 0 s")
    hook.n_slow_bytes = 0
    monkeypatch.undo()
    assert deliver(hook.url, ROWS, tmp_path, {}, {}).sent == 3
    assert len(hook.accepted()) == 3


def test_no_server(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "WAITS_S", (0.0,))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = deliver(f"http://127.0.0.1:{port}/", ROWS, tmp_path, {}, {})
    assert (done.sent, done.left, done.why) == (0, 3, "ConnectionRefusedError")


RUN = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from leakmel.core import files
from leakmel.cli import main
from leakmel.core.files import OutputLock
from leakmel.extras.nightly import handover, run
from test_handover import ROWS

n, real = int(sys.argv[2]), os.fsync
def fsync(fd):
    global n
    if n == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    n -= 1
    real(fd)
os.fsync = fsync
handover.WAITS_S = (0.0, 0.0)
url, state = sys.argv[1].split("|")
Path(state).mkdir(exist_ok=True)
handover.deliver(url, ROWS, Path(state), {}, {})
"""


@pytest.mark.slow
def test_messages_survive_kills(hook, tmp_path):
    "Killed at each write, then run to the end: every visit is told, with one key."
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    for k in range(4):
        hook.got.clear()
        state = tmp_path / f"state-{k}"
        words = [f"{hook.url}|{state}", str(k), *paths]
        killed = subprocess.run([sys.executable, "-c", RUN, *words], timeout=120, check=False)
        assert killed.returncode in (0, -signal.SIGKILL)
        subprocess.run([sys.executable, "-c", RUN, words[0], "99", *paths], timeout=120, check=True)
        told = hook.accepted()
        assert len(told) == 3
        assert sum(told.values()) <= 4, "at most the one message that was not written down comes again"
    assert killed.returncode == -signal.SIGKILL


def test_a_damaged_list_sends_nothing(hook, tmp_path):
    deliver(hook.url, ROWS[:1], tmp_path, {}, {})
    file = tmp_path / NOTIFIED_JSON
    file.write_bytes(file.read_bytes().replace(b"LOG1", b"LOG9"))
    with raises("damaged-list"):
        deliver(hook.url, ROWS, tmp_path, {}, {})
    assert len(hook.got) == 1


def test_a_rise_of_the_whole_network_is_no_flood(hook, tmp_path):
    rows = tuple(replace(ROW, sensor=f"S{k}") for k in range(handover.MOST_MESSAGES + 5))
    done = deliver(hook.url, rows, tmp_path, {}, {})
    assert (done.sent, done.left) == (handover.MOST_MESSAGES, 5)
    assert deliver(hook.url, rows, tmp_path, {}, {}).left == 0


@each(
    "notify",
    [
        "",
        "hooks.example.org/x",
        "file:///etc/passwd",
        "ftp://h/x",
        "https://",
        "http://[::1",
        "mailto:nobody",
    ],
)
def test_addresses_that_cannot_be_used(notify):
    with raises("wrong-address"):
        check_address(notify)


@contextmanager
def mail_server(refuse: Callable[[str], bool] = lambda line: False) -> Iterator[tuple[str, list[str]]]:
    "A mail server on 127.0.0.1; yields its URL and the letters it accepts."
    letters: list[str] = []
    server = socket.create_server(("127.0.0.1", 0))

    def talk(connection: socket.socket) -> None:
        with connection, connection.makefile("rw", encoding="utf-8", newline="\r\n") as f:

            def say(text: str) -> None:
                f.write(text + "\r\n")
                f.flush()

            say("220 ready")
            for line in f:
                word = line.split()[0].upper() if line.strip() else ""
                if refuse(line):
                    say("550 no")
                elif word == "DATA":
                    say("354 go on")
                    lines = iter(f.readline, ".\r\n")
                    letters.append("".join(lines))
                    say("250 ok")
                elif word == "QUIT":
                    say("221 bye")
                    return
                else:
                    say("250 ok")

    def serve() -> None:
        with suppress(OSError):
            while True:
                talk(server.accept()[0])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"smtp://127.0.0.1:{server.getsockname()[1]}", letters
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def test_mail(tmp_path, monkeypatch):
    with raises("wrong-address"):
        check_address("mailto:crew@example.org")
    with mail_server() as (url, letters):
        monkeypatch.setenv("LEAKMEL_SMTP", url)
        monkeypatch.setenv("LEAKMEL_MAIL_FROM", "leakmel@example.org")
        odd = replace(ROW, sensor="LOG\r\nBcc: x@example.org")
        done = deliver("mailto:crew@example.org", (ROW, odd), tmp_path, {"LOG1": (6.1, 49.6, True)}, {})
        assert str(done) == "2 messages sent to crew@example.org"
    assert "Subject: leakmel: visit LOG1" in letters[0]
    assert "longitude: 6.1" in letters[0]
    head = letters[1].partition("\r\n\r\n")[0]
    assert "\r\nBcc:" not in head
    assert len({line for text in letters for line in text.splitlines() if "Message-ID" in line}) == 2


def test_mail_that_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "WAITS_S", (0.0, 0.0))
    with mail_server(lambda line: line.startswith(("RCPT", "rcpt"))) as (url, letters):
        monkeypatch.setenv("LEAKMEL_SMTP", url)
        monkeypatch.setenv("LEAKMEL_MAIL_FROM", "leakmel@example.org")
        done = deliver("mailto:crew@example.org", ROWS, tmp_path, {}, {})
        assert (done.sent, done.left, letters) == (0, 3, [])


def test_a_password_is_not_sent_without_encryption(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "WAITS_S", (0.0,))
    with mail_server(lambda line: line.upper().startswith("AUTH")) as (url, letters):
        monkeypatch.setenv("LEAKMEL_SMTP", url.replace("//", "//user:password@"))
        done = deliver("mailto:crew@example.org", ROWS, tmp_path, {}, {})
    assert (done.sent, done.why, letters) == (0, "SMTPNotSupportedError", [])


def test_geojson_has_the_sensors_to_visit_with_a_longitude():
    rows = (*ROWS, replace(ROW, sensor="QUIET", visit=""))
    places = {"LOG1": (6.1, 49.6, True), "LOG2": (75000.0, 82000.0, False), "QUIET": (6.2, 49.7, True)}
    layer = geojson(rows, places)
    assert layer["type"] == "FeatureCollection"
    (feature,) = layer["features"]
    assert feature["geometry"] == {"type": "Point", "coordinates": [6.1, 49.6]}
    assert feature["properties"]["reason"] == "Scores rose."


def test_a_run_tells_its_list_and_writes_the_layer(hook, tmp_path, monkeypatch):
    "A table has the coordinates; the second run has nothing new to tell."
    recordings, state = tmp_path / "r", tmp_path / "state"
    with (tmp_path / "t.csv").open("w") as f:
        f.write("path,sensor,lat,lon\n")
        for day in range(24):
            for s in range(3):
                night = date(2025, 1, 1) + timedelta(day)
                name = f"P{s}_{night:%Y%m%d}_230000.wav"
                put(recordings, name, noise(100 * day + s, level=300))
                f.write(f"{name},P{s},49.{s},6.1\n")
    loud = {f"P1_{date(2025, 1, 1) + timedelta(day):%Y%m%d}_230000.wav" for day in range(12, 24)}

    def scored(x: Any, *args: Any) -> Any:
        done = real(x, *args)
        return (*done[:3], [0.9 if s.path.decode() in loud else 0.2 for s in done[0]])

    real = run._scored
    monkeypatch.setattr(run, "_scored", scored)
    model = made_detector().save(tmp_path / "model.pt")
    words = ["nightly", str(recordings), "--model", str(model), "--state", str(state)]
    words += ["--table", str(tmp_path / "t.csv"), "--audits", "0", "--notify", hook.url, "--json", "--quiet"]
    for sent in (1, 0):
        assert json.loads(printed(words))["messages"] == {
            "to": "127.0.0.1",
            "sent": sent,
            "left": 0,
            "why": "",
        }
    ((_, body),) = hook.got
    assert (body["sensor"], body["longitude"], body["latitude"]) == ("P1", 6.1, 49.1)
    (feature,) = json.loads((state / "visits.geojson").read_text())["features"]
    assert (feature["id"], feature["geometry"]["coordinates"]) == ("P1", [6.1, 49.1])


def test_a_wrong_address_ends_the_run_before_it_begins(tmp_path, capsys):
    (tmp_path / "r").mkdir()
    words = [
        "nightly",
        str(tmp_path / "r"),
        "--state",
        str(tmp_path / "s"),
        "--notify",
        "hooks.example.org/T0/secret",
    ]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "https://HOST/PATH" in said.err
    assert "secret" not in said.err + said.out
    assert not (tmp_path / "s").exists()


def test_a_message_that_is_not_sent_is_in_the_answer(hook, tmp_path, monkeypatch, capsys):
    "And not the address, which may be a secret: it can also come from the environment."
    for day in range(20):
        for s in range(3):
            night = date(2025, 1, 1) + timedelta(day)
            put(tmp_path / "r", f"P{s}_{night:%Y%m%d}_230000.wav", noise(100 * day + s, level=300))
    real = run._scored
    monkeypatch.setattr(
        run,
        "_scored",
        lambda x, *a: (*(d := real(x, *a))[:3], [0.9 if b"P1_2025011" in s.path else 0.2 for s in d[0]]),
    )
    hook.statuses = [404] * 9
    monkeypatch.setenv("LEAKMEL_NOTIFY", hook.url)
    model = made_detector().save(tmp_path / "model.pt")
    words = ["nightly", str(tmp_path / "r"), "--model", str(model), "--state", str(tmp_path / "s"), "--quiet"]
    assert main([*words, "--audits", "0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: 0 messages sent to 127.0.0.1, 1 not sent (HTTP 404: refused" in said
    assert "after a visit: leakmel visited P1 2025-01-20 OUTCOME" in said
    assert "secret" not in said + "".join(p.read_text() for p in (tmp_path / "s").glob("*.json"))
