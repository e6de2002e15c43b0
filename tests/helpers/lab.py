"JupyterLab on 127.0.0.1, as tests start it for a browser, and a notebook that is opened in it."

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest
from watched import MARKS, Watched

from leakmel.operations.extras import LAB

ROOT = Path(__file__).resolve().parents[2]
# What is asked of a page, in JavaScript.
ERRORS = "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type='application/vnd.jupyter.stderr']"
SAYS_OK = """[...document.querySelectorAll('.jp-Notebook .jp-OutputArea-output pre')].some(e => e.textContent.includes('"ok": true'))"""
OVER = f"""document.querySelector("{ERRORS}") || {SAYS_OK}"""
FIGURES = "[...document.querySelectorAll('.jp-Notebook .js-plotly-plot')]"
SEEN = f"""{FIGURES}.map(e => {{
    const edge = e.getBoundingClientRect().right, texts = [...e.querySelectorAll('.gtitle, .gtitle-subtitle')].map(t => t.getBoundingClientRect().right);
    const title = e.querySelector('.gtitle'), lines = [...title.querySelectorAll('tspan.line')];
    return {{title: lines.length ? lines.map(l => l.textContent).join(' ') : title.textContent, height: e.getBoundingClientRect().height,
             cut: texts.some(x => x > edge),
             traces: e.data.length, marks: e.querySelectorAll('{MARKS}').length}} }})"""


def clean_env(home: Path, **more: str) -> dict[str, str]:
    "An environment without the user's own Jupyter settings; cells that are out of sight stay on the page, so that they can be counted."
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("LEAKMEL_", "JUPYTER", "IPYTHON", "PYTEST_"))
    } | {"HOME": str(home)}
    for name in (
        "JUPYTER_CONFIG_DIR",
        "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR",
        "JUPYTER_RUNTIME_DIR",
        "IPYTHONDIR",
    ):
        (home / name).mkdir(exist_ok=True)
        env[name] = str(home / name)
    for name, text in (
        ("notebook-extension/tracker", '{"windowingMode": "none"}'),
        ("apputils-extension/notification", '{"fetchNews": "false"}'),
    ):
        settings = home / "JUPYTERLAB_SETTINGS_DIR" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(text)
    return env | more


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/status", timeout=5):
            return True
    except OSError:
        return False  # nobody listens, or whoever does is too busy to answer


def address(pid: int, home: Path) -> str:
    "Where a Jupyter server listens, once it says so: its address without the last slash, or nothing."
    output = home / "JUPYTER_RUNTIME_DIR" / f"jpserver-{pid}.json"
    with suppress(OSError, ValueError):
        return json.loads(output.read_bytes())["url"].rstrip("/")  # half written, it is no JSON
    return ""


def is_taken(log: Path) -> bool:
    "Whether a server wrote that another program has its port."
    return "is already in use" in log.read_text()


def end(server: subprocess.Popen[bytes], wait_s: float = 20) -> None:
    with suppress(ProcessLookupError):
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(wait_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@contextmanager
def serving(
    command: list[str],  # without a port
    folder: Path,  # it is started in
    home: Path,  # its settings and its `lab.log`
    limit_s: float = 120,  # until it answers, with all tries
    more: Mapping[str, str] = {},  # of the environment
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:  # process, address
    """A Jupyter server at a port of its own choice.

    It chooses a free port, frees it, and opens it later: where another program was faster, it ends, and is started again. Its address has a part that no
    other server answers to.
    """
    words = [
        *command,
        "--port=0",
        "--ServerApp.port_retries=0",
        f"--ServerApp.base_url=/{secrets.token_hex(8)}/",
        "--IdentityProvider.token=",
        "--ServerApp.password=",
    ]
    env, over = clean_env(home, **more), time.monotonic() + limit_s
    while True:
        with (home / "lab.log").open("w") as log:
            server = subprocess.Popen(
                words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
            )
        try:
            while server.poll() is None:
                if (url := address(server.pid, home)) and is_up(url):
                    yield server, url
                    return
                if time.monotonic() > over:
                    pytest.fail("the server did not answer: " + (home / "lab.log").read_text()[-2000:])
                with suppress(subprocess.TimeoutExpired):
                    server.wait(0.1)
        finally:
            end(server)
        assert is_taken(home / "lab.log"), (home / "lab.log").read_text()
        assert time.monotonic() < over, "every port was taken"


@contextmanager
def jupyter_lab(
    project: Path,  # holds nbs/
    browser: Any,  # that will look at it: where there is none, no server is started
    **more: str,  # of the environment
) -> Iterator[str]:  # address
    "JupyterLab for a browser."
    assert browser.is_connected()
    command = [
        str(Path(sys.executable).parent / "jupyter-lab"),
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--ServerApp.root_dir={project / 'nbs'}",
        "--LabApp.extension_manager=readonly",
        f"--LabApp.app_settings_dir={LAB}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    with serving(command, project / "nbs", project, more=more) as (_, url):
        yield url


def open_notebook(watched: Watched, url: str) -> Any:
    page = watched.page
    page.goto(url, timeout=60_000)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    page.wait_for_selector(
        "text=/ipykernel.* \\| Idle/", timeout=60_000
    )  # before that, running would ask which kernel to take
    return page


def run_all(page: Any) -> None:
    "Run all cells, by the menu."
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()


def clear_outputs(page: Any) -> None:
    "Clear the outputs of all cells, by the menu."
    page.get_by_role("menuitem", name="Edit", exact=True).click()
    page.get_by_text("Clear Outputs of All Cells", exact=True).click()
    page.wait_for_function(f"{FIGURES}.length === 0", timeout=60_000)


def with_parameters(project: Path, name: str, **given: object) -> str:
    "A copy of a run notebook in which some parameters have other values."
    notebook = nbformat.read(ROOT / "nbs" / name, as_version=4)
    (cell,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    lines = cell.source.splitlines()
    kept = [line for line in lines if line.partition(" = ")[0] not in given]
    cell.source = "\n".join([*kept, *(f"{parameter} = {value!r}" for parameter, value in given.items())])
    nbformat.write(notebook, project / "nbs" / name)
    return name


def assert_drawn(page: Any, is_sentence: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    "Figures with titles in full, and something drawn in each that is not a sentence; gives what was seen of each."
    seen = page.evaluate(SEEN)
    for f in seen:
        assert f["height"] > (100 if is_sentence(f) else 150), f
        assert bool(f["marks"]) != is_sentence(f), f
        assert not f["cut"], f
    return seen


def assert_quiet(watched: Watched, url: str) -> None:
    "No error, no widget, no complaint, nothing fetched from elsewhere."
    assert watched.page.locator(ERRORS).all_text_contents() == []
    assert watched.page.locator(".jupyter-widgets").count() == 0
    assert watched.serious == []
    assert watched.outside(url, url.replace("http", "ws")) == []
