"JupyterLab on 127.0.0.1, as tests start it for a browser, and a notebook that is opened in it."
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from watched import Watched

ERRORS = "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type='application/vnd.jupyter.stderr']"


def clean_env(home: Path, **more: str) -> dict[str, str]:
    "An environment without the user's own Jupyter settings; cells that are out of sight stay on the page, so that they can be counted."
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LEAKMEL_", "JUPYTER", "IPYTHON", "PYTEST_"))} | {"HOME": str(home)}
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        (home / name).mkdir(exist_ok=True)
        env[name] = str(home / name)
    for name, text in (("notebook-extension/tracker", '{"windowingMode": "none"}'), ("apputils-extension/notification", '{"fetchNews": "false"}')):
        settings = home / "JUPYTERLAB_SETTINGS_DIR" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(text)
    return env | more


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/status", timeout=5): return True
    except (urllib.error.URLError, ConnectionError): return False


@contextmanager
def jupyter_lab(
    project: Path,      # holds nbs/
    browser: Any,       # that will look at it: where there is none, no server is started
    **more: str,        # of the environment
) -> Iterator[str]:     # address
    "A server on a port that is free."
    assert browser.is_connected()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).parent / "jupyter-lab"), "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
               "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.password=",
               f"--ServerApp.root_dir={project / 'nbs'}", "--LabApp.extension_manager=readonly",
               "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    env = clean_env(project, **more)
    with (project / "lab.log").open("w") as log:
        server = subprocess.Popen(command, cwd=project / "nbs", env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(300):
            if is_up(url): break
            assert server.poll() is None, (project / "lab.log").read_text()
            with suppress(subprocess.TimeoutExpired): server.wait(0.2)
        else: pytest.fail("JupyterLab did not answer: " + (project / "lab.log").read_text()[-2000:])
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try: server.wait(20)
        except subprocess.TimeoutExpired: os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def open_notebook(watched: Watched, url: str) -> Any:
    page = watched.page
    page.goto(url, timeout=60_000)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    page.wait_for_selector("text=/ipykernel.* \\| Idle/", timeout=60_000)     # before that, running would ask which kernel to take
    return page


def run_all(page: Any) -> None:
    "Run all cells, by the menu."
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
