"Standard streams that are full, closed, or pipes whose reader ends: the work counts, and nothing ends by a traceback."

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Server, server
from conftest import need
from independent import check
from test_stable import stored, write_places

# Code of a child before its command: what its streams are. The reports of children are in files that replace 1 and 2 first.
BROKEN = {
    "stdout full": "os.dup2(full, 1)",
    "stderr full": "os.dup2(full, 2)",
    "both full": "os.dup2(full, 1); os.dup2(full, 2)",
    "stdout a closed pipe": "os.dup2(no_reader(), 1)",
    "stderr a closed pipe": "os.dup2(no_reader(), 2)",
    "stdin closed": "os.close(0); sys.stdin = sys.__stdin__ = None",
    "stdout closed": "os.close(1); sys.stdout = sys.__stdout__ = None",
    "stderr closed": "os.close(2); sys.stderr = sys.__stderr__ = None",
    "all closed": "os.closerange(0, 3); sys.stdin = sys.stdout = sys.stderr = sys.__stdin__ = sys.__stdout__ = sys.__stderr__ = None",
}
START = """
full = os.open("/dev/full", os.O_WRONLY)
def no_reader():
    reading, writing = os.pipe()
    os.close(reading)
    return writing
{broken}
from leakmel import cli
sys.argv = ["leakmel", *{words!r}]
sys.exit(cli.main())
"""
# One of each way in which a command ends: with its result, with a finding, with an error, with a help text.
COMMANDS = [
    *("--version", "", "build --help-all", "init {new}/work", "scan {faulty} --content"),
    *("scan {missing} --json", "verify {good} --json", "evaluate {good} --model {missing}"),
    *(
        "machine cache list --cache-dir {empty}",
        "export --page {run}.ipynb",
        "fetch",
        "machine bench {new}/bench --files 0",
    ),
    "review {network} --no-lab --out {new}/review",
]
CASES = [
    *((command, name) for command in COMMANDS for name in ("stdout full", "all closed")),
    *((command, name) for command in ("scan {network}", "--help", "scan {missing}") for name in BROKEN),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    write_places(folder)
    return folder


@pytest.fixture(scope="module")
def children() -> Iterator[Server]:
    need(Path("/dev/full").exists(), "/dev/full")
    with server() as running:
        yield running


class Places(dict[str, Path]):
    "Paths of a folder, by the names in the commands."

    def __missing__(self, name: str) -> Path:
        return self["folder"] / name


def run(children: Server, places: Path, command: str, broken: str, new: Path) -> tuple[int, str, str]:
    "Run a command of the list with an empty folder {new}; return status, stdout and stderr."
    new.mkdir()
    words = command.format_map(Places(new=new, folder=places)).split()
    done = children.run(code=START.format(broken=BROKEN.get(broken, ""), words=words))
    return done.status, done.out, done.err


@pytest.mark.slow
def test_status_with_broken_streams(children: Server, places: Path, tmp_path: Path) -> None:
    "Only a result that could not be stored changes the status: 3 where no space was left."
    usual: dict[str, tuple[int, str, str]] = {}
    for n, (command, name) in enumerate(CASES):
        if command not in usual:
            usual[command] = run(children, places, command, "", tmp_path / f"usual-{n}")
        was, out, err = usual[command]
        assert was == stored("exit_codes").get(command, was)
        status, now, err_now = run(children, places, command, name, tmp_path / str(n))
        lost = bool(out) and not err and name in ("stdout full", "both full")
        assert status == (3 if lost else was), (command, name, err_now)
        for text in ("Traceback", "Exception ignored", "Errno"):
            assert text not in now + err_now, (command, name, err_now)
        if lost and name == "stdout full":
            assert f"its work ended with status {was}. standard output: there is no room left" in err_now
        elif name in ("stdout closed", "stdout a closed pipe"):
            assert err_now == err, (command, name)


@pytest.mark.slow
def test_work_that_is_done_is_not_reported_as_failed(children: Server, places: Path, tmp_path: Path) -> None:
    "A build whose summary cannot be printed has its data set, and the message says so."
    for n, name in enumerate(("stdout full", "all closed")):
        command = "build {network} --split training --out {new}/x.h5 --check 2 --json"
        status, _, err = run(children, places, command, name, tmp_path / str(n))
        assert status == (3 if name == "stdout full" else 0), err
        assert check(tmp_path / str(n) / "x.h5", places / "network" / "TRAINING")["@n_rows"] > 0


@pytest.mark.parametrize("closed", ["0<&- >&- 2>&-", "> /dev/full"])
@pytest.mark.slow
def test_streams_of_a_shell(closed: str, places: Path, tmp_path: Path) -> None:
    "As users meet them; a file of the data set never gets the number of a standard stream."
    need(Path("/dev/full").exists(), "/dev/full")
    words = f"-m leakmel build {places}/network --split training --out {tmp_path}/x.h5 --check 2"
    command = f"{sys.executable} {words} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (3 if closed == "> /dev/full" else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert check(tmp_path / "x.h5", places / "network" / "TRAINING")["@n_rows"] > 0


@pytest.mark.slow
def test_reader_that_ends_early(places: Path) -> None:
    "As `head` does: quiet, with the status of the work."
    for command, n_lines in (("scan {p}/network", 1), ("--help", 2), ("build --help-all", 1)):
        words = command.format(p=places)
        text = f"set -o pipefail; {sys.executable} -m leakmel {words} | head -n {n_lines}"
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", n_lines), words


def test_pipe_that_does_not_wait() -> None:
    "A parent may set the pipe that it reads to non-blocking."
    long = "build = cli.OPERATIONS['build']; build.command = replace(build.command, example='x' * 300_000)"
    code = (
        "import os, sys; from dataclasses import replace; from leakmel import cli; os.set_blocking(1, False); "
        f"{long}; sys.argv[1:] = ['build', '--help']; sys.exit(cli.main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert len(process.communicate(timeout=60)[0]) > 300_000
    assert process.returncode == 0
