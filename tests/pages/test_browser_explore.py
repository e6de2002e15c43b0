"explore.ipynb in JupyterLab: sliders and lists that are moved by a mouse and a keyboard, and what they change."

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab import ERRORS, FIGURES, jupyter_lab, open_notebook, run_all
from notebook_runs import PLOTLY

from leakmel.dataset.reader import read_spec
from leakmel.recordings.demo import write_demo

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.site, pytest.mark.slow]
VIEWPORT = {"width": 1500, "height": 2700}  # tall, so that a picture shows a whole notebook
DRAWN = f"{FIGURES}.filter(e => e._fullData)"  # while one is drawn anew it is not there
RECORDING = f"{DRAWN}.find(e => e._fullData.some(t => t.type === 'heatmap'))"
N_MELS, N_BANDS = (
    f"{RECORDING}?._fullData.find(t => t.type === 'heatmap').y.length",
    f"{DRAWN}.find(e => e !== {RECORDING})?._fullData.at(-1).x.length",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("explore")
    (folder / "nbs").mkdir()
    shutil.copy(ROOT / "settings.ini", folder)
    shutil.copy(ROOT / "nbs" / "explore.ipynb", folder / "nbs")
    write_demo(folder / "tiny", n_files=24, faults=True)
    return folder


@pytest.fixture(scope="module")
def lab(browser, project) -> Iterator[str]:
    with jupyter_lab(project, browser, LEAKMEL_DATA=str(project / "tiny")) as url:
        yield url


def widget(page: Any, name: str) -> Any:
    "The row of a widget, by its label."
    return page.locator(".jupyter-widgets", has=page.locator(".widget-label", has_text=name)).last


def says(page: Any, words: str) -> None:
    "Wait until a quiet line has these words."
    page.locator("[role=status]", has_text=words).first.wait_for(timeout=60_000)


def drawn_in(notebook: Path) -> list[int]:
    "Bands of the figures in a file: of the heat map, and of a line of the mean spectrum."
    cells = nbformat.read(notebook, as_version=4).cells
    figures = [
        o.data[PLOTLY]
        for c in cells
        if c.cell_type == "code"
        for o in c.outputs
        if PLOTLY in o.get("data", {})
    ]
    arrays = [next(t["y"] for t in figures[0]["data"] if t["type"] == "heatmap"), figures[1]["data"][-1]["x"]]
    return [len(base64.b64decode(a["bdata"])) // 4 for a in arrays]


def test_explore_in_jupyterlab(lab, watched, project):
    page = open_notebook(watched, f"{lab}/lab/tree/explore.ipynb?reset")
    run_all(page)
    try:
        says(page, "Not written")
        page.wait_for_function(
            f"{FIGURES}.length === 2 && {FIGURES}.every(e => e.querySelector('.gtitle'))", timeout=60_000
        )
        watched.picture("explore.png")
        assert page.locator(ERRORS).all_text_contents() == []
        assert page.locator("audio").count() == 1

        shown = page.locator(".jupyter-widgets .widget-label:visible").all_text_contents()
        assert shown == ["recording", "label", "preset"], "the others are folded away"
        page.get_by_text("More filters").click()
        widget(page, "flag").locator("select").select_option(label="clipped (1)")
        page.wait_for_function(f"{RECORDING}?.layout.title.subtitle.text.includes('clipped')", timeout=60_000)
        says(page, "Recording 1 of 1 (flag clipped)")

        page.get_by_text("More settings").click()
        slider = widget(page, "n_mels").locator(".noUi-handle")
        slider.focus()
        for _ in range(8):
            page.keyboard.press("ArrowLeft")
        says(page, "n_mels 56")
        page.wait_for_function(f"{N_MELS} === 56", timeout=60_000)

        says(page, "The spec or the split has changed since")
        page.get_by_role("button", name="compute the split").click()
        page.wait_for_function(f"{N_BANDS} === 56", timeout=60_000)
        slider.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function(f"{N_MELS} === 57", timeout=60_000)

        longer = widget(page, "long_window").locator("select")
        longer.select_option(label="500 ms, 2,048 samples, 2 Hz")
        says(page, "Windows: long 2,048 samples (500 ms) every 500 ms")

        slider.focus()
        page.keyboard.press("End")
        says(page, "Rejected: mel band 0 contains no frequency bin")
        assert page.evaluate(N_MELS) == 57  # the last good picture stays
        watched.picture("refused.png")

        widget(page, "preset").locator("select").select_option(label="overlap@2")
        says(page, "preset overlap@2 unchanged: a row is 79 long x 3 short segments x 32 mel bands")
        page.get_by_text("write the spec file").click()
        says(page, "Written:")
        page.get_by_role("button", name="compute the split").click()
        page.wait_for_function(f"{N_BANDS} === 32", timeout=60_000)
        page.get_by_role("menuitem", name="File", exact=True).click()
        page.get_by_text("Save Notebook", exact=True).click()
        page.wait_for_function("!document.querySelector('.jp-mod-dirty')", timeout=60_000)
    finally:
        watched.picture("end.png")
    assert drawn_in(project / "nbs" / "explore.ipynb") == [32, 32]  # the saved file is as the page was last
    (path,) = project.glob("runs/specs/*.json")
    assert read_spec(path).changes == {"preset": "overlap@2"}
    assert page.locator(ERRORS).all_text_contents() == []
    assert watched.serious == []
    assert watched.outside(lab, lab.replace("http", "ws")) == []
