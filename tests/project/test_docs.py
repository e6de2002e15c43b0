"The site: built from notebooks without a network, every reference found, figures alive when opened from the disk."

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
import outputs
import prepare
import pytest
from api import module_page
from watched import CUT_TITLES, FONTS, Watched, assert_figures, chromium

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
VIEWPORT = {"width": 1200, "height": 1000}
LIBRARY = ["core/errors", "recordings/conform", "mel/spec"]
GUIDES = [str(p.relative_to(ROOT / "nbs").with_suffix("")) for p in prepare.guide_notebooks()]
# A guide, a library notebook and a run notebook whose figures are looked at; nbdev_test executes all guides and library notebooks,
# test_project.py the front page, test_browser.py looks at the figures of the build, tests of their own at the other run notebooks, and the site of all of
# them is a test that is marked long.
EXECUTED = ("explanations/rejected_files", "core/errors", "dashboard")
# Of the whole site: run notebooks with figures that no test in JupyterLab has.
EXECUTED_WHEN_WHOLE = (
    *EXECUTED,
    *("index", "build"),
    *("explanations/promises", "mel/spec"),
    *("build_part", "train", "predict", "explore", "review", "benchmark"),
)


errors_text, public_page = cache(prepare.errors_text), cache(prepare.public_page)


def write_pages() -> None:
    prepare.write_site([ROOT / "nbs" / f"{name}.ipynb" for name in LIBRARY], prepare.guide_notebooks())


@contextmanager
def sources(docs: Path, executed: tuple[str, ...]) -> Iterator[Path]:
    "Sources of the site of a few library notebooks, the guides, the front page and the run notebooks; some are executed."

    def executed_or_not(path: Path, *given: Any, execute=prepare.execute) -> nbformat.NotebookNode:
        name = path.relative_to(ROOT / "nbs").with_suffix("").as_posix()
        return execute(path, *given) if name in executed else nbformat.read(path, as_version=4)

    with pytest.MonkeyPatch.context() as m:
        for name, path in (("DOCS", docs), ("SOURCE", docs / "source"), ("CACHE", docs / "cache")):
            m.setattr(prepare, name, path)
        for name in [k for k in os.environ if k.startswith("LEAKMEL_")]:
            m.delenv(name)
        m.setenv("COLUMNS", "110")
        m.setattr(prepare, "DEMO_FILES", 24)
        m.setattr(prepare, "execute", executed_or_not)
        for page in (errors_text, public_page):  # seconds each, and a site needs them twice
            m.setattr(prepare, page.__name__, page)
        write_pages()
        yield docs


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Iterator[Path]:
    with sources(tmp_path_factory.mktemp("site"), EXECUTED) as docs:
        yield docs


def pages_of(docs: Path) -> Path:
    "The pages that Sphinx makes of the sources."
    sphinx = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        "-c",
        str(ROOT / "nbs" / "_tools"),
    ]
    done = subprocess.run(
        [*sphinx, str(docs / "source"), str(docs / "html")], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return docs / "html"


@pytest.fixture(scope="module")
def site(written) -> Path:
    return pages_of(written)


@pytest.fixture(scope="module")
def page(site) -> Iterator[Any]:
    "A page in the first of the usual fonts."
    with chromium(FONTS[0]) as browser:
        yield browser.new_page(viewport=VIEWPORT)


def assert_titles_are_not_cut(site: Path, font: str, n_figures_of: dict[str, int]) -> None:
    with chromium(font) as browser:
        page = browser.new_page(viewport=VIEWPORT)
        for name, n_figures in n_figures_of.items():
            page.goto((site / f"{name}.html").as_uri())
            assert_figures(page, n_figures)
            assert page.evaluate(CUT_TITLES) == [], name


@pytest.mark.long  # test_pages_in_a_browser looks at them in the first one, which has the widest letters
@pytest.mark.parametrize("font", FONTS[1:])
def test_titles_of_figures_are_not_cut_in_any_usual_font(site, font):
    assert_titles_are_not_cut(site, font, {"dashboard": 7})


@pytest.mark.long
def test_figures_of_all_run_notebooks_in_every_usual_font(tmp_path):
    "Of the whole site."
    names = {"build": 5, "train": 6, "predict": 3, "dashboard": 7, "explore": 2, "benchmark": 1}
    with sources(tmp_path, EXECUTED_WHEN_WHOLE) as docs:
        site = pages_of(docs)
    for font in FONTS:
        assert_titles_are_not_cut(site, font, names)


@pytest.mark.slow
def test_a_second_run_executes_nothing_and_changes_no_file(written, site, monkeypatch):
    "`make docs` is fast if nothing has changed."

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a notebook is executed again")

    def files() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in (written / "source").rglob("*") if p.is_file()}

    before = files()
    left_over = written / "source" / "gone.md"
    left_over.write_text("# Gone")
    monkeypatch.setattr(prepare, "run_cells", never)
    write_pages()
    assert files() == before


@pytest.mark.slow
def test_every_error_code_is_on_its_page(site):
    from leakmel.core.error_codes import ERROR_CODES

    text = (site / "errors.html").read_text(encoding="utf-8")
    assert [code for code in ERROR_CODES if f">{code}<" not in text] == []


@pytest.mark.slow
def test_every_page_exists(site):
    names = [
        "index",
        "examples",
        "build",
        "train",
        "predict",
        "nightly",
        "dashboard",
        "benchmark",
        "start",
        "evaluate",
        "retrain",
        "search-settings",
        "tune",
        "doctor",
        "commands",
        "changelog",
        "reference/index",
        "api/index",
        "api/names",
        "explanations/index",
        "tutorials/index",
        *GUIDES,
    ]
    for name in (*names, *(f"{kind}/{name}" for kind in ("reference", "api") for name in LIBRARY)):
        assert (site / f"{name}.html").is_file(), name
    assert len(list(site.rglob("plotly.min.js"))) == 1
    for path in site.rglob("*.html"):
        assert f"{ROOT}/" not in path.read_text(encoding="utf-8"), path.name
    text = (site / "commands.html").read_text(encoding="utf-8")
    for command in ("init --demo", "scan", "build", "verify", "train", "predict"):
        assert f"usage: leakmel {command}" in text
    assert "n_fft" in (site / "api" / "mel" / "spec.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    "The anchors, links and loaded files of a page."

    def __init__(self, path: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given: dict[str, Any] = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("next", "prev", "search", "index"):
            self.loads.append(given.get("href", ""))
        elif "src" in given:
            self.loads.append(given["src"])


@pytest.mark.slow
def test_links_are_valid_and_nothing_is_loaded_from_a_network(site):
    "Links inside the site with their anchors; scripts, styles and pictures of all pages."
    pages = {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}
    assert len(pages) > 30
    bad = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            url = urlsplit(link)
            if url.scheme in ("data", "mailto") or (url.scheme and link in page.links):
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if url.scheme or url.netloc or not target.is_file():
                bad.append(f"{path.relative_to(site)}: {link}")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
                bad.append(f"{path.relative_to(site)}: no anchor {link}")
    assert not bad, "\n".join(bad[:20])


def test_links_of_notebooks_name_existing_files():
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        if any(part[0] in "._" for part in path.relative_to(ROOT / "nbs").parts) or path.match("out*.ipynb"):
            continue
        for cell in nbformat.read(path, as_version=4).cells:
            links = re.findall(r"\]\(([^)\s]+)\)", cell.source) if cell.cell_type == "markdown" else []
            for link in links:
                if not link.startswith(("http", "#")):
                    target = path.parent / link.partition("#")[0]
                    assert target.is_file(), f"{path.name}: {link}"
                    if path.relative_to(ROOT / "nbs").parts[0] in prepare.ROOMS:  # pages below reference/
                        inside = target.resolve().relative_to(ROOT / "nbs").parts[0]
                        assert inside in prepare.ROOMS, f"{path.name}: {link} does not exist on the site"


@pytest.mark.slow
def test_pages_in_a_browser(site, page):
    watched = Watched(page)
    n_figures_of = {
        "index": 0,
        "build": 0,
        "dashboard": 7,
        "reference/core/errors": 0,
        "api/mel/spec": 0,
        "api/names": 0,
    }
    for name in ("explanations/rejected_files", "explanations/speed", "explanations/promises"):
        stored = nbformat.read(ROOT / "nbs" / f"{name}.ipynb", as_version=4)
        kinds = [o.get("data", {}) for cell in stored.cells for o in cell.get("outputs", ())]
        n_figures_of[name] = sum(outputs.PLOTLY in kind for kind in kinds)
    assert n_figures_of["explanations/speed"] > 0
    for name, n_figures in n_figures_of.items():
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_load_state()
        assert_figures(page, n_figures)
        assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)"), (
            f"a picture of {name} is missing"
        )
        assert page.evaluate(CUT_TITLES) == [], name
        watched.picture(f"{name.replace('/', '-')}.png", full_page=True)
    assert page.locator("text=undefined").count() == 0
    page.set_viewport_size({"width": 420, "height": 900})
    page.emulate_media(color_scheme="dark")
    for name in n_figures_of:
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
            f"{name} is wider than a telephone"
        )
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.set_viewport_size(VIEWPORT)
    page.emulate_media(color_scheme="light")
    assert watched.complaints == []
    assert watched.outside("file:") == []


@pytest.mark.slow
def test_site_search_finds_names_and_words(site, page):
    "Opened from the disk, where a page may not fetch another one."
    watched = Watched(page)
    for word, found in (("read_wav", "api/names.html"), ("truncated", "explanations/rejected_files.html")):
        page.goto((site / "search.html").as_uri() + f"?q={word}")
        page.wait_for_selector("#search-results li a", timeout=60_000)
        page.wait_for_function(
            "document.querySelector('#search-results').textContent.includes('finished')", timeout=60_000
        )
        assert any(
            found in link
            for link in page.eval_on_selector_all("#search-results li a", "links => links.map(a => a.href)")
        ), word
    assert watched.complaints == []
    assert watched.outside("file:") == []


@pytest.mark.slow
def test_front_page_has_a_picture_and_links_by_task(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    parts = [
        "<h1>leakmel",
        "is a Python package for",
        "visits.png",
        *(
            f"<h2>{title}<"
            for title in (
                "Install",
                "Your own recordings",
                "In Python",
                "What you get",
                "Speed",
                "Documentation",
            )
        ),
    ]
    assert [part for part in parts if part not in text] == []
    assert sorted(parts, key=text.index) == parts
    tasks = dict(re.findall(r"<strong>(\w+)</strong>: (.*?)</li>", text[text.index(parts[-1]) :], re.S))
    for task, link in (
        ("Start", "tutorials/first_build"),
        ("Start", "tutorials/first_detector"),
        ("Data", "guides/different_rates"),
        ("Data", "explanations/rejected_files"),
        ("Data", "explanations/file_format"),
        ("Data", "explanations/promises"),
        ("Detector", "guides/small_sets"),
        ("Detector", "explanations/evaluation"),
        ("Detector", "tutorials/retraining"),
        ("Operation", "tutorials/every_night"),
        ("Operation", "explanations/speed"),
        ("Operation", "explanations/troubleshooting"),
    ):
        assert re.search(rf'href="{link}\.html[#"]', tasks[task]), (task, link)


@pytest.mark.slow
def test_public_names_and_their_index(site):
    import leakmel

    listed = Page(site / "api" / "names.html").ids
    assert {f"leakmel.{name}" for name in leakmel._PUBLIC} <= listed
    index = (site / "genindex.html").read_text(encoding="utf-8")
    for name in ("api/names.html#leakmel.build", "api/mel/spec.html#leakmel.mel.spec.MelSpec"):
        assert name in index


def test_public_names_show_parameters_of_functions_classes_and_dataclasses():
    page = public_page()
    assert "\n| `with_waveforms` | `bool` | `False` |" in page
    assert "\n| `remedy` | `str \\| None` | `None` | what the user can do |\n" in page
    assert "\n| `n_fft` | `int` | `512` | FFT and Hann window length, samples |\n" in page


def test_promises_name_existing_tests():
    promises = tomllib.loads((ROOT / "nbs" / "explanations" / "promises.toml").read_text(encoding="utf-8"))
    assert list(promises) == sorted(promises, key=lambda name: int(name.removeprefix("S")))
    tests_of: dict[str, dict[str, set[str]]] = {}
    for name, p in promises.items():
        assert len(p["promise"]) > 20
        assert p["aim"]
        assert (p["state"] == "not yet") == (not p["tests"]) == (not p["tried"]), name
        assert p["missing"] or p["state"] == "tested", name
        for test in p["tests"]:
            file, _, function = test.partition("::")
            if file not in tests_of:
                (path,) = (ROOT / "tests").rglob(file)
                marked_file = re.findall(
                    r"mark\.\w+",
                    "".join(re.findall(r"^pytestmark = .*", path.read_text(encoding="utf-8"), re.M)),
                )
                tests_of[file] = {
                    n.name: {
                        *marked_file,
                        *(x for d in n.decorator_list for x in re.findall(r"mark\.\w+", ast.unparse(d))),
                    }
                    for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                    if isinstance(n, ast.FunctionDef)
                }
            assert function in tests_of[file], f"{name}: there is no {test}"
        later = {f"mark.{word}" for word in ("slow", "site", "long", "gpu")}
        marks = [tests_of[file][function] for file, function in (test.split("::") for test in p["tests"])]
        assert any(not marked & later for marked in marks), f"{name}: `make test` has no test of it"


def test_formulas_become_html():
    assert (
        prepare.formulas(r"to $2^{-24}$, `a $b$`")
        == "to <span class='formula'>2<sup>−24</sup></span>, `a $b$`"
    )
    with pytest.raises(ValueError, match="a sign that SIGNS does not have"):
        prepare.formulas(r"$\aleph_0$")


def test_signs_of_all_formulas_are_known():
    "Otherwise `make docs` ends at the first page that has another one."
    for path in [*prepare.module_notebooks(), *prepare.guide_notebooks(), *(ROOT / "nbs").glob("*.ipynb")]:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                prepare.formulas(prepare.cards(cell.source))  # raises ValueError


def test_a_list_of_bold_links_becomes_cards():
    text = "- **[One](a.ipynb)**: first\n  line.\n- **[Two](b.ipynb)**: second.\n\n- plain\n- [link](c.ipynb): said"
    page = prepare.cards(text)
    assert page.count("{grid-item-card}") == 2
    assert "**[One](a.ipynb)**\n\nFirst line.\n" in page
    assert page.endswith("- plain\n- [link](c.ipynb): said")


@pytest.mark.slow
def test_guides_are_in_the_table_of_contents(site):
    front, listed, page = (
        (site / f"{name}.html").read_text(encoding="utf-8")
        for name in ("index", "explanations/index", "explanations/rejected_files")
    )
    assert 'href="explanations/index.html"' in front
    assert 'href="rejected_files.html"' in listed
    assert "Reject codes with meaning and remedy" in listed
    assert page.count("<table") == 4, "codes, what ends a build, headers that lie, encodings"
    assert "MEANING = {" not in page, "a cell with echo: false shows what it makes, not its source"


def test_guides_are_the_notebooks_of_their_folders():
    "All of them, and they export nothing."
    guides = prepare.guide_notebooks()
    for name in ("explanations/rejected_files", "tutorials/speed_ladder"):
        assert ROOT / "nbs" / f"{name}.ipynb" in guides
    assert {p.parent.name for p in guides} <= set(prepare.GUIDES)
    assert not [p.name for p in guides if "default_exp" in p.read_text(encoding="utf-8")]


def test_directives_become_tags():
    v4 = nbformat.v4
    cells = [
        v4.new_code_cell("#| default_exp a.b"),
        v4.new_code_cell("#| hide\nsecret"),
        v4.new_code_cell("#| export\ndef one(): pass\nTWO: int = 2"),
        v4.new_code_cell("#| echo: false\nshown()"),
        v4.new_code_cell("#| cuda\nrun_on_gpu()"),
        v4.new_markdown_cell("prose"),
    ]
    assert [outputs.is_skipped(c) for c in cells] == [False, False, False, False, True, False]
    page = prepare.render_cells(v4.new_notebook(cells=cells))
    assert [c.source for c in page.cells] == [
        "def one(): pass\nTWO: int = 2",
        "shown()",
        "run_on_gpu()",
        "prose",
    ]
    assert [c.metadata.get("tags") for c in page.cells] == [["hide-input"], ["remove-input"], [], None]
    assert page.cells[0].metadata["mystnb"]["code_prompt_show"] == "Source of one, TWO"


def test_progress_lines_are_removed():
    v4 = nbformat.v4
    lines = "search: 1 of 4 trials in 8.4 s, 0.12 trials/s, about 25.3 s left, trial 1, epoch 1, F1 1.000\n"
    warning = "memory ran out: continuing with 4 recordings at once\n"
    outputs = [v4.new_output("stream", name="stderr", text=text) for text in (lines, warning + lines)]
    notebook = v4.new_notebook(cells=[v4.new_code_cell("run()", outputs=outputs)])
    prepare.drop_progress(notebook)
    assert [o.text for o in notebook.cells[0].outputs] == [warning]


def test_api_page_shows_units_and_types():
    page = module_page("leakmel.recordings.conform")
    assert page.startswith("# recordings.conform\n")
    assert ":::{py:function} piece_count(n_samples, window, hop, what)\n" in page
    assert "\n| `window` | `int` | samples in a piece |\n" in page
    assert "\n| returns | `int` | pieces that fit without padding |\n" in page
