"The site: built from notebooks without a network, every reference found, figures alive when opened from the disk."
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import prepare
import pytest
from api import module_page
from figures import figure_html
from watched import Watched, assert_figures, chromium

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ["core/errors", "audio/segments", "mel/spec"]
GUIDES = ["explanations/refused", "explanations/gpu_limits", "explanations/gpu_path"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    "The site of a few library notebooks, a guide, the front page and the executed example."
    docs = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as m:
        for name, path in (("DOCS", docs), ("SOURCE", docs / "source"), ("CACHE", docs / "cache")): m.setattr(prepare, name, path)
        for name in [k for k in os.environ if k.startswith("LEAKMEL_")]: m.delenv(name)
        m.setenv("COLUMNS", "110")
        m.setattr(prepare, "DEMO_FILES", 24)
        prepare.write_site([ROOT / "nbs" / f"{name}.ipynb" for name in LIBRARY], [ROOT / "nbs" / f"{name}.ipynb" for name in GUIDES])
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "nbs" / "_tools")]
    done = subprocess.run([*sphinx, str(docs / "source"), str(docs / "html")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return docs / "html"


@pytest.fixture(scope="module")
def page(site) -> Iterator[Any]:
    with chromium() as browser: yield browser.new_page(viewport={"width": 1400, "height": 1000})


@pytest.mark.slow
def test_pages_are_there(site):
    names = ["index", "build", "dashboard", "benchmark", "commands", "changelog", "reference/index", "api/index", "explanations/index", *GUIDES]
    for name in (*names, *(f"{kind}/{name}" for kind in ("reference", "api") for name in LIBRARY)): assert (site / f"{name}.html").is_file(), name
    assert len(list(site.rglob("plotly.min.js"))) == 1
    for path in site.rglob("*.html"): assert f"{ROOT}/" not in path.read_text(encoding="utf-8"), path.name
    text = (site / "commands.html").read_text(encoding="utf-8")
    for command in ("demo", "scan", "build", "verify"): assert f"usage: leakmel {command}" in text
    assert "n_fft" in (site / "api" / "mel" / "spec.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_pages_in_a_browser(site, page, tmp_path):
    watched = Watched(page)
    n_figures_of = {"index": 0, "build": 5, "dashboard": 12, "benchmark": 8, "reference/mel/spec": 0, "api/mel/spec": 0, "explanations/refused": 0,
                    "explanations/gpu_limits": 1, "explanations/gpu_path": 1}
    for name, n_figures in n_figures_of.items():
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_load_state()
        assert_figures(page, n_figures)
        assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)"), f"a picture of {name} is missing"
        page.screenshot(path=tmp_path / f"{name.replace('/', '-')}.png", full_page=True)
    assert page.locator("text=undefined").count() == 0
    assert watched.complaints == []
    assert watched.outside("file:") == []


@pytest.mark.slow
def test_guides_are_in_the_table_of_contents(site):
    front, listed, page = ((site / f"{name}.html").read_text(encoding="utf-8") for name in ("index", "explanations/index", "explanations/refused"))
    assert 'href="explanations/index.html"' in front
    assert "tutorials/index" not in front, "a folder without notebooks has no page"
    assert 'href="refused.html"' in listed
    assert "Each reject code with what it means" in listed
    assert page.count("<table") == 3, "codes, headers that lie, encodings"
    assert "MEANING = {" not in page, "a cell with echo: false shows what it makes, not its source"


def test_guides_are_the_notebooks_of_their_folders():
    "All of them, and they export nothing."
    guides = prepare.guide_notebooks()
    for name in ("explanations/refused", "tutorials/speed_ladder"): assert ROOT / "nbs" / f"{name}.ipynb" in guides
    assert {p.parent.name for p in guides} <= set(prepare.GUIDES)
    assert not [p.name for p in guides if "default_exp" in p.read_text(encoding="utf-8")]


def test_directives_become_tags():
    v4 = nbformat.v4
    cells = [v4.new_code_cell("#| default_exp a.b"), v4.new_code_cell("#| hide\nsecret"), v4.new_code_cell("#| export\ndef one(): pass\nTWO: int = 2"),
             v4.new_code_cell("#| echo: false\nshown()"), v4.new_code_cell("#| cuda\nrun_on_gpu()"), v4.new_markdown_cell("prose")]
    assert [prepare.is_skipped(c) for c in cells] == [False, False, False, False, True, False]
    page = prepare.dress(v4.new_notebook(cells=cells))
    assert [c.source for c in page.cells] == ["def one(): pass\nTWO: int = 2", "shown()", "run_on_gpu()", "prose"]
    assert [c.metadata.get("tags") for c in page.cells] == [["hide-input"], ["remove-input"], [], None]
    assert page.cells[0].metadata["mystnb"]["code_prompt_show"] == "Source of one, TWO"


def test_a_figure_cannot_end_its_script():
    html = figure_html({"data": [{"name": "</script><b>"}], "layout": {"height": 300}})
    assert html.count("</script>") == 1
    assert "height:300px" in html


def test_api_page_shows_units_and_types():
    page = module_page("leakmel.audio.segments")
    assert page.startswith("# audio.segments\n")
    assert ":::{py:function} piece_count(n_samples, window, hop, what)\n" in page
    assert "\n| `window` | `int` | samples in a piece |\n" in page
    assert "\n| returns | `int` | pieces that fit without padding |\n" in page
