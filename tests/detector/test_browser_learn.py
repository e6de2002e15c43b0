"train.ipynb and predict.ipynb in JupyterLab, on tiny sets: a table that grows while it trains, tables, figures, and no error anywhere."

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import (
    ERRORS,
    FIGURES,
    OVER,
    SAYS_OK,
    assert_drawn,
    assert_quiet,
    jupyter_lab,
    open_notebook,
    run_all,
    with_parameters,
)
from made_detectors import made_detector, write_mixed
from watched import Watched

import leakmel as lm
from leakmel.detector.model.detector import load_detector

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.site, pytest.mark.slow]
VIEWPORT = {"width": 1400, "height": 9600}  # tall, so that a picture shows a whole notebook
EPOCHS = ".jp-Notebook .jp-OutputArea-output table.dataframe"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    "The notebook with tiny data sets, of 60 recordings."
    folder = tmp_path_factory.mktemp("learn")
    (folder / "nbs").mkdir()
    shutil.copy(ROOT / "settings.ini", folder)
    lm.write_demo(folder / "demo", n_files=60)
    lm.build_all(folder / "demo", out_dir=folder / "sets", progress="none", check=2)
    with_parameters(
        folder,
        "train.ipynb",
        data=str(folder / "sets"),
        out=str(folder / "run"),
        detector="cnn",
        epochs=12,
        epoch_share=0.2,
        early_stop_epochs=0,
        batch_size=64,
        channels="4,8",
        device="cpu",
    )
    return folder


@pytest.fixture(scope="module")
def lab(browser, project) -> Iterator[str]:
    with jupyter_lab(project, browser, OMP_NUM_THREADS="1") as url:
        yield url


def assert_sound(watched: Watched, lab: str, n_figures: int) -> list[str]:
    "Figures that are drawn with titles in full, no error, no widget, nothing fetched from elsewhere; gives the titles."
    page = watched.page
    page.wait_for_function(
        f"{FIGURES}.filter(e => e.querySelector('.gtitle')).length >= {n_figures}", timeout=60_000
    )
    assert_quiet(watched, lab)
    seen = assert_drawn(page, lambda f: f["title"] == "No recording was misclassified")
    assert len(seen) == n_figures
    return [f["title"] for f in seen]


def test_train_in_jupyterlab(lab, watched, project):
    page = open_notebook(watched, f"{lab}/lab/tree/train.ipynb?reset")
    run_all(page)
    try:
        page.wait_for_selector(EPOCHS, state="attached", timeout=120_000)
        early = page.locator(EPOCHS).first.locator("tbody tr").count()
        assert not page.evaluate(SAYS_OK), "the table is there while it trains"
        watched.picture("train while it trains.png")
        page.wait_for_function(OVER, timeout=180_000)
    finally:
        watched.picture("train.png")
    assert page.locator(ERRORS).all_text_contents() == []
    n_epochs = load_detector(project / "run" / "model.pt").record["settings"]["epochs"]
    assert early < page.locator(EPOCHS).first.locator("tbody tr").count() == n_epochs, "the same table grew"
    titles = assert_sound(watched, lab, 8)  # three of the training, five of the evaluation
    assert titles[0].startswith("F1 of ")
    assert page.locator(EPOCHS).nth(1).locator("tbody tr").count() == n_epochs, "the history"
    watched.picture("train.png")


@pytest.mark.long  # test_learn_predict_notebook.py::test_notebook runs it, and the training above draws in a browser
def test_predict_in_jupyterlab(lab, watched, project):
    "A folder of 13 recordings and 2 others, by a detector that was never trained."
    with_parameters(
        project,
        "predict.ipynb",
        data_root=str(write_mixed(project / "mixed")),
        model=str(made_detector().save(project / "model.pt")),
        out=str(project / "scores"),
        device="cpu",
        n_shown=2,
    )
    page = open_notebook(watched, f"{lab}/lab/tree/predict.ipynb?reset")
    run_all(page)
    try:
        page.wait_for_function(OVER, timeout=120_000)
    finally:
        watched.picture("predict.png")
    assert page.locator(ERRORS).all_text_contents() == []
    titles = assert_sound(watched, lab, 3)
    assert titles[0] == "The 2 most suspicious recordings"
    assert "13 recordings reach the threshold" in titles[1]
    assert page.get_by_text("13 scored + 2 rejected = 15 files found").count() == 1
    scored, refused = page.locator(".jp-Notebook .jp-OutputArea-output table.dataframe").all()
    assert [t.locator("tbody tr").count() for t in (scored, refused)] == [13, 2]
    assert len((project / "scores" / "predictions.csv").read_text().splitlines()) == 14
    watched.picture("predict.png")


def test_without_a_browser_no_server_is_started(tmp_path):
    "Each of these files skips before anything else is done."
    files = sorted((ROOT / "tests").rglob("test_browser*.py"))
    assert len(files) == 5
    env = {k: v for k, v in os.environ.items() if k != "LEAKMEL_REQUIRE_ALL"} | {"PATH": str(tmp_path)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and importing them takes seconds
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "jupyterlab",
        f"--basetemp={tmp_path / 'base'}",
        *map(str, files),
    ]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert " skipped" in done.stdout.splitlines()[-1], done.stdout
    assert " passed" not in done.stdout.splitlines()[-1]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == []
