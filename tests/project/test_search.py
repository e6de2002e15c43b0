"The search of the site: the right page is among the first three."

import json
from pathlib import Path

import prepare
import pytest
from each import each
from watched import chromium

pytestmark = pytest.mark.site

STATIC = Path(prepare.__file__).parent / "static"

QUESTIONS = {
    "sample rate": "guides/different_rates",
    "48000": "guides/different_rates",
    "few recordings": "guides/small_sets",
    "wrong labels": "guides/correct_labels",
    "cross validation": "guides/small_sets",
    "silent sensor": "explanations/troubleshooting",
    "resume": "explanations/promises",
    "GPU": "explanations/speed",
    "exit status": "tutorials/every_night",
    "slurm": "guides/cluster",
    "bucket": "guides/cluster",
    "HDF5 format": "explanations/file_format",
    "confidence interval": "explanations/evaluation",
    "out of memory": "explanations/training",
}


@pytest.fixture(scope="module")
def ranked():
    "The names of the first three pages for each question, as the browser ranks them."
    pages = prepare.page_index(prepare.module_notebooks(), prepare.guide_notebooks())
    with chromium() as browser:
        page = browser.new_page()
        page.evaluate(
            "source => { window.rank = new Function(source + '; return rankPages;')(); }",
            (STATIC / "search.js").read_text(encoding="utf-8"),
        )
        page.evaluate("text => { window.pages = JSON.parse(text); }", json.dumps(pages))
        yield lambda query: page.evaluate(
            "query => window.rank(window.pages, query).slice(0, 3).map(([, i]) => window.pages[i][0])", query
        )


@pytest.mark.slow
@each("query", QUESTIONS)
def test_the_right_page_is_among_the_first_three(ranked, query):
    assert QUESTIONS[query] in ranked(query)


@pytest.mark.slow
def test_a_word_that_no_page_has_finds_nothing(ranked):
    assert ranked("xylophone") == []
