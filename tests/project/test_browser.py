"What a person sees: JupyterLab in a real browser, and pages of executed notebooks opened from the disk."

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
    assert_drawn,
    assert_quiet,
    clean_env,
    clear_outputs,
    jupyter_lab,
    open_notebook,
    run_all,
    with_parameters,
)
from watched import CUT_TITLES, Watched, assert_figures

import leakmel as lm
from leakmel.dataset.config import PipelineConfig
from leakmel.pages.page_figures import notebook_page
from leakmel.recordings.demo import write_demo

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.site, pytest.mark.slow]
VIEWPORT = {"width": 1400, "height": 6400}  # tall, so that a picture shows a whole notebook


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    "A copy of what a run notebook needs, and a tiny set."
    folder = tmp_path_factory.mktemp("browser")
    (folder / "nbs").mkdir()
    shutil.copy(ROOT / "settings.ini", folder)
    shutil.copy(ROOT / "nbs" / "build.ipynb", folder / "nbs")
    write_demo(folder / "tiny", n_files=24)
    return folder


@pytest.fixture(scope="module")
def lab(browser, project) -> Iterator[str]:
    with jupyter_lab(project, browser, LEAKMEL_DATA=str(project / "tiny")) as url:
        yield url


def assert_shows_results(watched: Watched, lab: str) -> None:
    "Five figures that are drawn, the verdict, no error, no widget, nothing fetched from elsewhere."
    page = watched.page
    page.wait_for_function(
        "document.querySelectorAll('.jp-Notebook .js-plotly-plot .gtitle').length === 5", timeout=60_000
    )
    heights = page.evaluate(
        "[...document.querySelectorAll('.jp-Notebook .js-plotly-plot')].map(e => e.getBoundingClientRect().height)"
    )
    assert len(heights) == 5
    assert min(heights) > 150
    assert page.get_by_text("24 rows, all data sets verified").count() == 1
    assert_quiet(watched, lab)


@pytest.fixture(scope="module")
def executed(project, browser) -> Path:
    "The notebook after papermill."
    done = subprocess.run(
        [str(Path(sys.executable).parent / "papermill"), "build.ipynb", "out.ipynb", "--no-progress-bar"],
        cwd=project / "nbs",
        env=clean_env(project, LEAKMEL_DATA=str(project / "tiny")),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return project / "nbs" / "out.ipynb"


def test_build_in_jupyterlab(lab, watched, project, executed):
    "What papermill saved shows its figures when it is opened, without being run or trusted; and so does a run by the menu."
    page = open_notebook(watched, f"{lab}/lab/tree/{executed.name}?reset")
    assert_shows_results(watched, lab)
    watched.picture("saved.png")

    clear_outputs(page)
    assert page.evaluate(f"{FIGURES}.length") == 0
    assert not page.evaluate(OVER)
    before = set(project.glob("runs/*/*.H5"))
    run_all(page)
    try:
        page.wait_for_function(OVER, timeout=120_000)
    finally:
        watched.picture("lab.png")
    assert page.locator(ERRORS).all_text_contents() == []
    assert_shows_results(watched, lab)
    watched.picture("lab.png")
    assert len(set(project.glob("runs/*/*.H5")) - before) == 3


@pytest.fixture(scope="module")
def dashboard(project, browser) -> str:
    "The dashboard of a folder of two runs, the second with readers of their own."
    for name, config in (("first", PipelineConfig()), ("second", PipelineConfig(read_workers=2))):
        lm.build_all(project / "tiny", out_dir=project / "kept" / name, pipeline=config, progress="none")
    return with_parameters(project, "dashboard.ipynb", run=f"{project}/kept")


@pytest.mark.long  # by default test_docs.py draws its figures in a browser, and test_dashboard.py reads its texts
def test_dashboard_in_jupyterlab(lab, watched, dashboard):
    "The card, the runs, the advice and seven figures, of which one is a sentence."
    watched.page.set_viewport_size({"width": 1400, "height": 9600})
    page = open_notebook(watched, f"{lab}/lab/tree/{dashboard}?reset")
    run_all(page)
    drawn = f"{FIGURES}.filter(e => e.querySelector('.gtitle')).length === 7"
    try:
        page.wait_for_function(f"""document.querySelector("{ERRORS}") || {drawn}""", timeout=120_000)
    finally:
        watched.picture("dashboard.png")
    assert_quiet(watched, lab)
    seen = assert_drawn(page, lambda f: not f["traces"])
    assert len(seen) == 7
    assert page.get_by_text("24 rows, all data sets verified").count() == 1
    assert page.get_by_text("PERFORMANCE ANALYSIS").count() >= 1
    assert page.get_by_text("Settings that differ, in the order of the runs").count() == 1


def test_pages_of_a_run_without_a_network(executed, watched, tmp_path):
    "The notebook by nbconvert and by `leakmel export --page`, and the report of the run: five drawn figures each, nothing fetched."
    nbconvert = [
        str(Path(sys.executable).parent / "jupyter-nbconvert"),
        "--to",
        "html",
        "--output-dir",
        str(tmp_path),
    ]
    subprocess.run([*nbconvert, str(executed)], capture_output=True, check=True, timeout=120)
    own, n_figures = notebook_page(executed, tmp_path / "page.html")
    report = max(executed.parents[1].glob("runs/*/report.html"), key=lambda p: p.stat().st_mtime_ns)
    assert n_figures == 5
    page = watched.page
    page.context.set_offline(True)
    for path in (tmp_path / "out.html", own, report):
        assert path.stat().st_size < 3_500_000
        watched.requests.clear()
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        assert_figures(page, 5)
        assert page.evaluate(CUT_TITLES) == [], path.name
        watched.picture(f"{path.stem}.png", full_page=True)
        assert page.get_by_text("24 rows, all data sets verified").count() >= 1
        assert watched.serious == []
        links = {
            "out.html": ("https://cdnjs.cloudflare.com/",)
        }  # of nbconvert: to scripts that are not needed
        assert watched.outside("file:", *links.get(path.name, ())) == []
