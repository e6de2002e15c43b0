"""Run many commands in child processes that end like a user's.

A server imports leakmel once, and forks for each command: the child runs Python code of the test, then the command line, and leaves through
the interpreter's own end, where a library that is in a bad state would crash. Status, time and memory come from the system.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = """
import json, os, resource, select, signal, sys, time
from leakmel.cli import main

def serve():
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0: return asked
        handle = os.pidfd_open(pid)
        hung = not select.select([handle], [], [], asked["seconds"])[0]
        if hung: os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        ended = time.monotonic()
        os.close(handle)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "hung": hung, "ended": ended, "cpu_s": usage.ru_utime + usage.ru_stime,
                          "peak_bytes": usage.ru_maxrss * 1024}), flush=True)

asked = serve()
if asked is not None:
    for fd, name in ((1, "out"), (2, "err")): os.dup2(os.open(os.path.join(asked["place"], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    exec(compile(asked["code"], "code of the test", "exec"))
    if asked["argv"]: sys.exit(main(asked["argv"]))
"""


# Builds by the reference want much that is loaded when it is first used: one is made before the first child. Its threads have ended then.
BUILDS = """
import contextlib, io, tempfile, threading
import leakmel as lm
from leakmel.dataset import job
from leakmel.dataset import loader
from leakmel.mel import engines
with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
    lm.write_demo(place + "/network", n_files=6)
    from leakmel.cli import main
    assert main(["build", place + "/network", "--split", "training", "--out", place + "/x.h5", "--engine", "reference", "--quiet", "--no-fsync"]) == 0
assert threading.active_count() == 1
"""


@dataclass(frozen=True)
class Ended:
    "How a child ended."

    status: int  # negative: the signal that killed it
    hung: bool  # it had to be killed
    ended: float  # of the monotonic clock, s
    cpu_s: float
    peak_bytes: int  # largest resident set
    out: str
    err: str


class Server:
    "Runs children, one after another."

    def __init__(self, process: subprocess.Popen[str], place: Path):
        self.process, self.place = process, place

    def run(self, *argv: str, code: str = "", seconds: float = 60) -> Ended:
        "Run a command of leakmel in a child, after some code in it; without a command, the code alone."
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(
            json.dumps({"argv": argv, "code": code, "place": str(self.place), "seconds": seconds}) + "\n"
        )
        self.process.stdin.flush()
        ended: dict[str, Any] = json.loads(self.process.stdout.readline())
        return Ended(
            **ended,
            out=(self.place / "out").read_text(errors="replace"),
            err=(self.place / "err").read_text(errors="replace"),
        )


@contextmanager
def server(imports: str = BUILDS, env: dict[str, str] | None = None) -> Iterator[Server]:
    "A server that has imported something, and ends with the block; `env` is its environment."
    with (
        tempfile.TemporaryDirectory(prefix="children-") as place,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", imports + SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        ) as process,
    ):
        try:
            yield Server(process, Path(place))
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait(30)
