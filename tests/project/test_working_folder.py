"`leakmel init`: the working folder, and its notebook start.ipynb as a new user sees it in JupyterLab."

import json
import os
from pathlib import Path

import nbformat
import numpy as np
import pytest
from lab import FIGURES, OVER, assert_drawn, assert_quiet, jupyter_lab, open_notebook, run_all
from notebook_runs import run_here

import leakmel as lm
from leakmel.cli import main
from leakmel.operations.extras import LAB, NOTEBOOKS, make_working_folder
from leakmel.recordings.demo import write_wav

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
VIEWPORT = {"width": 1400, "height": 12800}  # tall, so that a picture shows a whole notebook


def test_init_makes_the_folder_and_names_the_next_command(tmp_path, capsys):
    assert main(["init", str(tmp_path / "my work"), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["next"] == f"jupyter lab '{tmp_path / 'my work'}' --LabApp.app_settings_dir={LAB}"
    assert body["kept"] == []
    assert set(os.listdir(tmp_path / "my work")) == {*body["created"], "runs"}
    assert body["created"] == sorted(p.name for p in NOTEBOOKS.iterdir())


def test_init_changes_no_existing_file(tmp_path, capsys):
    (tmp_path / "start.ipynb").write_text("mine")
    (tmp_path / "build.ipynb").symlink_to("nowhere")
    assert main(["init", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "existing notebooks were not changed: build.ipynb, start.ipynb" in out
    assert (tmp_path / "start.ipynb").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_an_interrupted_copy_is_repeated(tmp_path, monkeypatch):
    "A part of a notebook must not count as an existing file."

    def interrupted(path: Path) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make_working_folder(tmp_path)
    (tmp_path / ".build.ipynb.new").write_text("a part, after a kill")
    found = make_working_folder(tmp_path)
    assert not found.kept
    assert set(os.listdir(tmp_path)) == {*found.created, "runs"}
    for path in NOTEBOOKS.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["file", "runs is a file"])
def test_init_refuses_a_path_that_is_not_a_folder(tmp_path, capsys, kind):
    target = tmp_path / "work"
    if kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "runs").write_text("mine")
    assert main(["init", str(target), "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["code"] == ("not-a-folder" if kind == "file" else "output-not-writable")
    assert str(target) in body["error"]


def test_installed_notebooks_need_nothing_but_the_package():
    "No path of the repository, and only links to notebooks that are installed too."
    for path in NOTEBOOKS.glob("*.ipynb"):
        text = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells)
        assert "../" not in text, path.name
        assert "make lab" not in text, path.name
        assert path.read_bytes() == (ROOT / "nbs" / path.name).read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of splits of a few sensors
def test_start_in_this_process(tmp_path, monkeypatch):
    "All steps with small recordings: figures, sound, no error, results below runs/."
    lm.write_demo(tmp_path / "tiny", n_files=60)
    assert main(["init", str(tmp_path / "work")]) == 0
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("LEAKMEL_DATA", str(tmp_path / "tiny"))
    run = run_here("start.ipynb", detector="spectral", device="cpu")
    assert run.error == ""
    assert '"ok": true' in run.text
    assert len(run.figures) >= 10
    assert all(run.titles)
    assert run.text.count("Audio object") >= 2
    assert {p.name.split("-")[2] for p in (tmp_path / "work" / "runs").iterdir()} == {
        "all",
        "train",
        "predict",
    }
    for k in range(24):  # label folders, lengths that all differ, no sensors
        sound = np.random.default_rng(k).normal(0, 3000, 4096 * 2 + 500 * k).astype(np.int16)
        (tmp_path / "own" / "LN"[k % 2]).mkdir(parents=True, exist_ok=True)
        write_wav(tmp_path / "own" / "LN"[k % 2] / f"{k}.wav", sound, 4096)
    own = {"data_root": str(tmp_path / "own"), "leak_label": "L", "detector": "spectral", "device": "cpu"}
    run = run_here("start.ipynb", **own)
    assert run.error == ""
    assert "No part is kept for the test: 24 recordings are fewer than 300" in run.text
    assert "24 recordings (12 leaks) of 24 groups: 5 folds" in run.text
    for k in range(8):  # sensors and dates in names, labels in a table, of one sensor with a leak
        name = f"LOG{k // 2}_2026110{1 + k % 2}_0200.wav"
        (tmp_path / "loggers").mkdir(exist_ok=True)
        write_wav(tmp_path / "loggers" / name, np.random.default_rng(k).integers(-99, 99, 8192, "<i2"), 4096)
    rows = [f"LOG{k // 2}_2026110{1 + k % 2}_0200.wav,{'NL'[k < 2]}" for k in range(8)]
    (tmp_path / "labels.csv").write_text("\n".join(["name,label", *rows]))
    named = {"table": str(tmp_path / "labels.csv"), "columns": "path=name"}
    run = run_here("start.ipynb", **own | {"data_root": str(tmp_path / "loggers")} | named)
    assert run.error == ""
    assert "sensors and times from the names: {**}/{sensor}_{start_time}" in run.text
    assert "The detector was not evaluated: cross-validation is not possible" in run.text
    assert '"ok": true' in run.text
    run = run_here("start.ipynb", **own | {"data_root": str(tmp_path / "absent")})
    assert "no such folder" in run.error
    assert "Traceback" not in run.error + run.text


@pytest.mark.long  # by default test_start_in_this_process runs the notebook, and test_browser.py another one in JupyterLab
def test_start_in_jupyterlab(browser, watched, tmp_path):
    "All steps with small recordings: figures, sound, no error, results below runs/, which the file browser shows."
    lm.write_demo(tmp_path / "tiny", n_files=60)
    assert main(["init", str(tmp_path / "nbs")]) == 0
    path = tmp_path / "nbs" / "start.ipynb"
    path.write_text(path.read_text().replace('detector = "auto"', 'detector = "spectral"'))
    with jupyter_lab(tmp_path, browser, LEAKMEL_DATA=str(tmp_path / "tiny")) as lab:
        page = open_notebook(watched, f"{lab}/lab/tree/start.ipynb?reset")
        run_all(page)
        try:
            page.wait_for_function(OVER, timeout=120_000)
            page.wait_for_function(
                f"{FIGURES}.filter(e => e.querySelector('.gtitle')).length >= 10", timeout=60_000
            )
        finally:
            watched.picture(tmp_path / "start.png")
        assert_quiet(watched, lab)
        assert_drawn(page, lambda f: not f["traces"])
        assert page.locator("audio").count() >= 2
        page.locator(".jp-DirListing-item[title*='runs']").first.wait_for(timeout=10_000)
    assert {p.name.split("-")[2] for p in (tmp_path / "nbs" / "runs").iterdir()} == {
        "all",
        "train",
        "predict",
    }
