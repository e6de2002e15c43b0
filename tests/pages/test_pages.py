"Pages that a browser shows without a network: figures, widgets, executed notebooks, reports."

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
from errors import raises

from leakmel.cli import main
from leakmel.core.errors import DataError, OutputError
from leakmel.pages.page_figures import (
    PLOTLY,
    Section,
    figure_html,
    html_figures,
    notebook_page,
    plotly_script,
    write_report,
)
from leakmel.recordings.demo import write_demo
from leakmel.recordings.tables import text_column

v4 = nbformat.v4
BARS = {"data": [{"type": "bar", "y": [1, 2]}], "layout": {"title": {"text": "two bars"}}}


def executed(path: Path, *bundles: dict[str, Any]) -> Path:
    "A notebook whose one cell has these outputs."
    outputs = [v4.new_output("display_data", nbformat.from_dict(b)) for b in bundles]
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell("x", outputs=outputs)]), path)
    return path


def test_script_tags_in_figures_are_escaped():
    html = figure_html({"data": [{"name": "</script><b>"}], "layout": {"height": 300}})
    assert html.count("</script>") == 1
    assert "height:300px" in html


def test_a_page_has_no_widgets(tmp_path):
    "The text that Jupyter stores with a widget stays; figures next to it too."
    path = executed(
        tmp_path / "run.ipynb",
        {"application/vnd.jupyter.widget-view+json": {"model_id": "box"}, "text/plain": "the box"},
        {PLOTLY: BARS},
    )
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    nbformat.write(notebook, path)
    page, n_figures = notebook_page(path)
    text = page.read_text(encoding="utf-8")
    assert n_figures == 1
    assert "the box" in text
    assert "widget-view" not in text


def test_plotly_script_is_stored_once(tmp_path):
    path = executed(
        tmp_path / "run.ipynb", {"text/html": plotly_script()}, {PLOTLY: BARS, "text/html": "twice"}
    )
    notebook = nbformat.read(path, as_version=4)
    assert html_figures(notebook) == 1
    (output,) = notebook.cells[0].outputs
    assert "two bars" in output.data["text/html"]
    page, n_figures = notebook_page(path, tmp_path / "other.html")
    text = page.read_text(encoding="utf-8")
    assert (page.name, n_figures, text.count('id="leakmel-plotly"')) == ("other.html", 1, 1)
    assert "twice" not in text


def test_a_page_without_figures_is_small(tmp_path):
    page, n_figures = notebook_page(executed(tmp_path / "run.ipynb", {"text/plain": "said"}))
    assert (page, n_figures) == (tmp_path / "run.html", 0)
    assert page.stat().st_size < 1_000_000


def test_notebook_without_outputs_is_refused(tmp_path):
    missing, text, empty = (tmp_path / name for name in ("none.ipynb", "text.ipynb", "new.ipynb"))
    text.write_text("{")
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell("1 + 1")]), empty)
    for path, code in ((missing, "no-such-file"), (text, "not-a-notebook"), (empty, "not-executed")):
        with raises(code, DataError, path=path):
            notebook_page(path)
    listing = tmp_path / "list.ipynb"
    listing.write_text("[1]")
    with raises("not-a-notebook", path=listing):
        notebook_page(listing)
    run = executed(tmp_path / "run.ipynb", {PLOTLY: BARS})
    with raises("write-failed", OutputError, path=text / "x.html"):
        notebook_page(run, text / "x.html")
    assert sorted(tmp_path.glob("*.html")) == []


def test_a_page_never_replaces_a_notebook(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text("{}")
    for target in (path, tmp_path / "other.ipynb"):
        with raises("output-exists", OutputError, path=target):
            notebook_page(path, target)
    assert path.read_text() == "{}"


def test_page_command_prints_the_path(tmp_path, capsys):
    home, here = str(Path.home()), os.getcwd()
    said = {"text/plain": f"{here}/sets/a.h5, {home}/pipes/b.wav, {tmp_path}/c and https://host{home}"}
    path = executed(tmp_path / "name with blanks.ipynb", {PLOTLY: BARS}, said)
    assert main(["export", "--page", str(path)]) == 0
    page = tmp_path / "name with blanks.html"
    assert capsys.readouterr().out.strip() == str(page)
    assert here in page.read_text(encoding="utf-8")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].outputs.append(v4.new_output("stream", name="stderr", text="a log line"))
    title, end = "# Scores\n\n> of a night\n\nRun it from a shell.", "## Summary as JSON"
    notebook.cells = [v4.new_markdown_cell(title), *notebook.cells, v4.new_markdown_cell(end)]
    notebook.cells[1].source = "hidden_value = 1"
    nbformat.write(notebook, path)
    assert main(["export", "--page", str(path), "--no-code", "--json"]) == 0
    text = page.read_text(encoding="utf-8")
    for shown in ("two bars", "of a night", "sets/a.h5, b.wav, c and https://host"):
        assert shown in text
    for hidden in (
        "hidden_value",
        "a log line",
        "from a shell",
        "as JSON",
        f"{here}/",
        f" {home}",
        str(tmp_path),
    ):
        assert hidden not in text
    capsys.readouterr()
    assert main(["export", "--page", str(tmp_path / "none.ipynb")]) == 1
    assert "none.ipynb" in capsys.readouterr().err


@pytest.mark.slow
def test_a_page_needs_nbconvert(tmp_path):
    code = f"""
import sys
sys.modules["nbconvert"] = None
from leakmel.recordings.demo import write_demo
from leakmel.cli import main
raise SystemExit(main(["export", "--page", {str(tmp_path / "x.ipynb")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "[notebook]" in done.stderr


def test_text_of_a_report_is_escaped(tmp_path):
    shown = [Section("a < b", ["c < d"])]
    text = write_report(tmp_path / "r.html", "e < f", "g < h", shown, ok=False).read_text(encoding="utf-8")
    for part in (
        "<h2>a &lt; b</h2>",
        "<pre>c &lt; d</pre>",
        "<p>e &lt; f</p>",
        "<header class='failed'>",
        "<h1 class='sentence'>g &lt; h</h1>",
    ):
        assert part in text


def figures_of(path: str) -> int:
    return Path(path).read_text(encoding="utf-8").count('class="plotly-figure"')


@pytest.mark.slow
def test_a_build_writes_its_report_next_to_the_data_sets(tmp_path, capsys):
    write_demo(tmp_path / "demo", n_files=24)
    common = ["build", str(tmp_path / "demo"), "--report", "--json", "--check", "1"]
    for words, path in (
        (["--split", "training", "--out", "x.h5"], "x.h5.report.html"),
        (["--split", "all", "--out", "mels"], "mels/report.html"),
    ):
        words[-1] = str(tmp_path / words[-1])
        assert main([*common, *words]) == 0
        report = json.loads(capsys.readouterr().out)["report"]
        assert report == str(tmp_path / path)
        assert figures_of(report) == 5
        text = Path(report).read_text(encoding="utf-8")
        assert "rows, all data sets verified" in text.partition("</h1>")[0].rpartition("<h1")[2]
        assert [str(folder) in text for folder in (Path.home(), Path.cwd(), tmp_path)] == [False] * 3


def test_a_report_of_scores_needs_a_file(tmp_path, capsys):
    assert main(["predict", str(tmp_path), "--model", "model.pt", "--report", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["code"] == "invalid-arguments"


def test_run_notebooks_with_figures_embed_the_script():
    figures, embedded = set(), set()
    for path in sorted((Path(__file__).resolve().parents[2] / "nbs").glob("*.ipynb")):
        first, *others = (c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
        if (
            re.search(r"\.show\(\)|\.plots\(|_plot\(|_mels\(", "\n".join(others))
            and "ParameterCheck(" in first
        ):
            figures.add(path.stem)
        if "embed_plotly()" in first:
            embedded.add(path.stem)
    assert figures - embedded == set()
    assert {"start", "evaluate", "predict", "search", "tune", "doctor"} <= figures
    assert {"build", "train", "dashboard", "benchmark", "explore"} <= embedded


def test_tables_and_names_are_whole(tmp_path):
    path = "LEAK/" + 30 * "long " + "\udcff.wav"
    table = pd.DataFrame({"path": text_column([path])})
    text = write_report(tmp_path / "r.html", "t", "v", [Section("s", [table, path])]).read_text(
        encoding="utf-8"
    )
    assert text.count(path[:-5] + "\\udcff.wav") == 2
