"No process that leakmel starts takes modules from the current folder, or from a folder of recordings."

import ast
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from lab import clean_env
from tiny_training import tiny_words

from leakmel.core.threads import safe_module_path, start_process
from leakmel.recordings.demo import write_demo

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(Path(sys.executable).with_name("leakmel"))
ONE_FUNCTION = "leakmel/core/threads.py"
# Modules that start processes; what others take of subprocess starts none.
STARTING = {"subprocess", "multiprocessing", "pty", "webbrowser", "papermill", "nbclient", "jupyter_client"}
NAMES = {"ProcessPoolExecutor", "DataLoader", "Parallel"}
CONSTANTS = {"PIPE", "DEVNULL", "STDOUT"}
CALLS = ("exec", "spawn", "posix_spawn", "fork", "popen", "system")  # of os


def starts(code: str) -> set[str]:
    "What starts processes in some code; joblib may, within `safe_module_path`."
    found = set[str]()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] in STARTING}
        elif isinstance(node, ast.ImportFrom):
            names = {a.name for a in node.names}
            is_starting = (node.module or "").split(".")[0] in STARTING and not node.level
            found |= names - CONSTANTS if is_starting else names & NAMES
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
            found |= {f"os.{node.attr}"} if node.attr.startswith(CALLS) else set()
    return found - {"Parallel"} if "with safe_module_path()" in code else found


def test_all_processes_start_by_one_function(tried: Callable) -> None:
    code = {str(p.relative_to(ROOT)): p.read_text("utf-8") for p in (ROOT / "leakmel").rglob("*.py")}
    code["run_build.py"] = (ROOT / "nbs" / "_tools" / "run_build.py").read_text("utf-8")
    for path in (ROOT / "leakmel" / "notebooks").glob("*.ipynb"):
        for n, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code":
                code[f"{path.name}, cell {n}"] = cell.source
    assert starts(code.pop(ONE_FUNCTION)) == {"subprocess", "os.fork", "os.posix_spawn"}
    assert {name: found for name, text in code.items() if (found := starts(text))} == {}
    for text in ("from subprocess import run", "import os\nos.execv('a', [])", "from joblib import Parallel"):
        assert starts(text)
    tried("S21", len(code))


# Of these, every Python process imports one, most of them several.
DECOYS = (
    *("sitecustomize", "usercustomize", "leakmel", "numpy", "torch", "pandas", "h5py", "joblib", "papermill"),
    *("jupyterlab", "jupyter_server", "ipykernel", "ipykernel_launcher", "IPython", "traitlets", "sklearn"),
    *("json", "runpy", "pkgutil", "signal", "threading", "multiprocessing", "subprocess", "pickle", "random"),
)


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Path]:
    "A folder of recordings with Python files; each that is executed leaves its name in `proof`."
    folder = tmp_path / "stranger"
    write_demo(folder, n_files=40)
    for name in DECOYS:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'a').write({name + ' '!r})\n")
    (tmp_path / "home").mkdir()
    yield folder
    assert not (tmp_path / "proof").exists(), (tmp_path / "proof").read_text()


def run(folder: Path, *words: str, **env: str) -> str:
    "Run a program with a folder as its current folder; return what it wrote."
    done = subprocess.run(
        words,
        cwd=folder,
        env=clean_env(folder.parent / "home", **env),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_decoys_work_without_the_function(tmp_path: Path) -> None:
    "The standard way to start a module executes them; `start_process` and `safe_module_path` do not."
    (tmp_path / "this.py").write_text("open('proof', 'w').close()")
    words = [sys.executable, "-m", "this"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert (tmp_path / "proof").exists()
    (tmp_path / "proof").unlink()
    with start_process(words, tmp_path, stdout=subprocess.DEVNULL) as process:
        assert process.wait() == 0
    with safe_module_path():
        subprocess.run(words, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
    assert not (tmp_path / "proof").exists()


def test_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    "An empty entry of PYTHONPATH, a frequent mistake, is the current folder."
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/a", "", "/b", ""]))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = dict(os.environ)
    with safe_module_path():
        assert os.environ["PYTHONPATH"] == os.pathsep.join(["/a", "/b"])
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert dict(os.environ) == before


@pytest.mark.slow
def test_commands_in_a_folder_of_a_stranger(stranger: Path, tried: Callable) -> None:
    commands = [
        "scan . --content",
        "build . --split all --out ../sets --check 2",
        "verify ../sets/TRAINING_DATASET.H5 --root TRAINING",
        f"train ../sets --out ../run {' '.join(tiny_words(1))}",
        "predict . --model ../run --out ../scores.csv",
        "nightly . --model ../run --state ../state",
        "doctor .",
        "tune . --budget-s 1",
    ]
    for command in commands:
        run(stranger, COMMAND, *command.split())
    tried("S21", len(commands))


# A script of another folder: Python has that folder on its module path, and not the current one.
SCRIPT = """
import sys
import leakmel as lm
from leakmel.extras.machine.bench import commit, run_leakmel
if __name__ == "__main__":
    print(run_leakmel("scan", ".").body["found"], commit())
    settings = lm.TrainSettings(detector="cnn", epochs=1, batch_size=64, channels=(2, 4))
    sets = ["../sets/TRAINING_DATASET.H5", "../sets/VALIDATION_DATASET.H5"]
    lm.build_all(".", out_dir="../sets", check=2, progress="none")
    given = {"settings": settings, "device": "cpu", "progress": "none", "jobs": 2, "n_folds": 2}
    print(lm.cross_validate(sets, n_draws=100, **given).n_done)
    print(len(lm.learning_curve(sets, sizes=(0.5, 1.0), seeds=1, n_draws=100, **given).table))
"""


@pytest.mark.slow
def test_processes_of_a_script_and_of_make_build(stranger: Path, tried: Callable) -> None:
    (stranger.parent / "script").mkdir()
    script = stranger.parent / "script" / "work.py"
    script.write_text(SCRIPT)
    assert run(stranger, sys.executable, str(script)).startswith("40 ")
    tool = str(ROOT / "nbs" / "_tools" / "run_build.py")
    made = run(stranger, sys.executable, tool, DATA=".", OUT="../results", SETTINGS="check=2")
    assert "verdict: all data sets verified" in made
    tried("S21", 2)


@pytest.mark.slow
def test_review_and_its_kernel(stranger: Path, tried: Callable) -> None:
    "JupyterLab and a kernel, also where the notebook is put into the folder of the recordings."
    home = stranger.parent / "home"
    env = clean_env(home)
    words = [COMMAND, "review", ".", "--no-browser", "--out", "."]
    with (home / "log").open("w") as log:
        command = subprocess.Popen(
            words, cwd=stranger, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until, kernel = time.monotonic() + 120, ""
        while not kernel:
            assert command.poll() is None, (home / "log").read_text()
            assert time.monotonic() < until, (home / "log").read_text()
            time.sleep(0.2)
            for file in (home / "JUPYTER_RUNTIME_DIR").glob("jpserver-*.json"):
                with suppress(OSError, ValueError):  # half written, or not serving yet
                    server = json.loads(file.read_bytes())
                    asked = urllib.request.Request(
                        f"{server['url']}api/kernels",
                        json.dumps({"name": "python3", "path": "review.ipynb"}).encode(),
                        {"Authorization": f"token {server['token']}"},
                    )
                    with urllib.request.urlopen(asked, timeout=60) as answer:
                        kernel = json.load(answer)["id"]
        client = BlockingKernelClient(
            connection_file=str(home / "JUPYTER_RUNTIME_DIR" / f"kernel-{kernel}.json")
        )
        client.load_connection_file()
        client.start_channels(
            hb=False
        )  # on a busy machine a heartbeat is late, which is taken for a dead kernel
        client.wait_for_ready(120)
        said: list[str] = []
        code = "import os, sys; assert os.path.exists('review.ipynb'); print(sys.path)"
        client.execute_interactive(
            code, timeout=120, output_hook=lambda m: said.append(m["content"].get("text", str(m["content"])))
        )
        client.stop_channels()
    finally:
        os.killpg(command.pid, signal.SIGTERM)
        command.wait(60)
    (text,) = [text for text in said if text.startswith("[")]
    assert not {"", ".", str(stranger)} & set(ast.literal_eval(text)), text
    tried("S21", 2)
