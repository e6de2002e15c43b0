"review.ipynb in JupyterLab, driven by keys: every decision is in the table, also after the kernel was killed."

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab import ERRORS, jupyter_lab, open_notebook, run_all
from made_detectors import made_detector

from leakmel.extras.review.review import review_parameters, write_review
from leakmel.recordings.demo import write_demo
from leakmel.recordings.labels import Decision, read_decisions

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.site, pytest.mark.slow]
VIEWPORT = {"width": 1440, "height": 900}
N = 60
GIVES = {"l": "LEAK", "n": "NOLEAK", "u": "?", "s": ""}
FACTS = "[...document.querySelectorAll('.lm-token')].map(e => e.dataset.at).at(-1)"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("review")
    (folder / "nbs").mkdir()
    shutil.copy(ROOT / "settings.ini", folder)
    write_demo(folder / "heard", n_files=80, faults=True)
    made_detector().save(folder / "model.pt")
    given = review_parameters(
        str(folder / "heard"), str(folder / "model.pt"), [], "random", str(folder / "labels.csv"), "ann", N
    )
    write_review(given | {"device": "cpu"}, str(folder / "nbs"))
    return folder


@pytest.fixture(scope="module")
def lab(browser, project) -> Iterator[str]:
    with jupyter_lab(project, browser, PYTHONPATH=str(ROOT)) as url:
        yield url


def shown(page: Any) -> str:
    "Path of the recording that the page shows."
    return str(page.locator(".jp-Notebook b").filter(has_text="~").first.text_content())


def press(page: Any, key: str) -> None:
    "Press a key, and wait until the page shows what follows."
    at = page.evaluate(FACTS)
    page.keyboard.press(key)
    page.wait_for_function(f"{FACTS} !== {at!r}", timeout=30_000)


def begin(page: Any) -> None:
    "Run the notebook, and wait for the page."
    run_all(page)
    page.wait_for_function(f"{FACTS} !== undefined", timeout=90_000)
    assert not page.locator(".jp-Notebook .cm-content").first.is_visible(), "the parameters are hidden"
    assert page.locator(".lm-recording audio").first.bounding_box()["y"] < 850


def kernel_of(project: Path) -> psutil.Process:
    "The kernel's process: it works in the folder of the notebook."
    found = list[psutil.Process]()
    for p in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "ipykernel_launcher" in " ".join(p.cmdline()) and p.cwd() == str(project / "nbs"):
                found.append(p)
    assert len(found) == 1
    return found[0]


def test_thirty_decisions_by_keys_survive_a_killed_kernel(lab, watched, project):
    page = open_notebook(watched, f"{lab}/lab/tree/review.ipynb?reset")
    made: list[tuple[str, str]] = []
    try:
        begin(page)
        watched.picture("review.png")
        assert page.locator(ERRORS).all_text_contents() == []
        for k in range(15):
            key = "lnnus"[k % 5]
            made.append((shown(page), GIVES[key]))
            press(page, key)
        made.append((made[-1][0], ""))  # undo appends a record, and shows the recording again
        press(page, "z")
        assert shown(page) == made[-1][0]
        made.append((shown(page), "LEAK"))
        press(page, "l")
        page.get_by_text(f"15 of {N}").wait_for()
        watched.picture("labelled.png")

        table = project / "labels.csv"
        assert [(d.path, d.label) for d in read_decisions(table)] == made
        os.kill(kernel_of(project).pid, signal.SIGKILL)
        page.wait_for_selector("text=/Restarting|Autorestarting|Unknown/", timeout=60_000)
        page.keyboard.press("Enter")  # closes the message, if JupyterLab shows one
        assert [(d.path, d.label) for d in read_decisions(table)] == made

        page = open_notebook(watched, f"{lab}/lab/tree/review.ipynb?reset")
        begin(page)
        for k in range(15):
            key = "nl"[k % 2]
            assert shown(page) not in {path for path, _ in made}
            made.append((shown(page), GIVES[key]))
            press(page, key)
    finally:
        watched.picture("review_end.png")
    assert [(d.path, d.label) for d in read_decisions(table)] == made
    assert {d.by for d in read_decisions(table)} == {"ann"}
    assert len({path for path, _ in made}) == 30

    kernel = kernel_of(project)
    kernel.suspend()  # a busy kernel: what is typed and clicked meanwhile must arrive in this order
    try:
        page.get_by_placeholder("note").click()
        page.keyboard.type("lunch s")  # no key counts while a text field has the focus
        assert len(read_decisions(table)) == len(made)
        page.locator(".lm-key-l").click()
    finally:
        kernel.resume()
    page.get_by_text("16 of").wait_for()
    last: Decision = read_decisions(table)[-1]
    assert (last.label, last.note) == ("LEAK", "lunch s")
    page.get_by_role("button", name="play").first.click()
    page.wait_for_function("[...document.querySelectorAll('.jp-Notebook audio')].length === 2")
    watched.picture("played.png")
    assert page.locator(ERRORS).all_text_contents() == []
    assert watched.outside(lab, lab.replace("http", "ws")) == []
