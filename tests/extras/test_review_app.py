"The review without a browser: decisions and undo, two people, full disks, the notebook under papermill, and the command."

import json
import os
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from build_runs import execute, plan_run
from each import each
from made_detectors import made_detector, noise, put
from nbclient import NotebookClient

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import LeakmelError, SpaceError, UsageError
from leakmel.extras.review.review import ReviewSession, review_recordings
from leakmel.pages.page_figures import MAX_PLAYED_S, playback, spectrogram_svg
from leakmel.recordings import labels as label_table
from leakmel.recordings.labels import read_decisions, read_labels
from leakmel.recordings.wav import Recording

QUIET: dict[str, Any] = {"device": "cpu", "progress": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    "Twelve recordings of four sensors; one has a hostile name."
    root = tmp_path_factory.mktemp("review") / "heard"
    for k in range(11):
        put(root, f"{'LEAK' if k % 2 else 'NOLEAK'}/S{k % 4}~{k:06d}~20210301_0000{k:02d}~24.wav", noise(k))
    put(root, "LEAK/<img src=x onerror=alert(1)>.wav", noise(50))
    return root


def opened(folder: Path, labels: Path, by: str = "ann", **more: Any) -> ReviewSession:
    return ReviewSession(review_recordings(folder, progress="none"), labels, by=by, **more)


def test_every_decision_is_a_line(folder, tmp_path):
    table = tmp_path / "labels.csv"
    s = opened(folder, table)
    first = s.item
    assert first is not None
    s.act("leak", " a\n tap ")
    s.act("no_leak")
    s.undo()
    s.act("unsure")
    s.act("skip", "noise")
    done = read_decisions(table)
    assert [d.label for d in done] == ["LEAK", "NOLEAK", "", "?", ""]
    assert [d.note for d in done] == ["a tap", "", "undone", "", "skipped: noise"]
    assert s.progress == f"3 of 12; {'1 label' if first.label != 'LEAK' else '0 labels'} changed"
    again = opened(folder, table)
    assert [i.path for i in again.queue.items] == [i.path for i in s.queue.items[3:]]
    other = opened(folder, table, by="ben")  # what ann skipped is open to ben
    assert s.queue.items[2].path in [i.path for i in other.queue.items]


def test_undo_restores_the_earlier_label(folder, tmp_path):
    table = tmp_path / "labels.csv"
    s = opened(folder, table, n=1)
    s.act("leak")
    r = s.found.recordings[s.queue.items[0].Index]
    opened(folder, table, by="ben", queue="random")
    ben = ReviewSession(s.found, table, by="ben", n=20)
    assert r.path not in [i.path for i in ben.queue.items]
    s.position, s.steps = 0, []
    s.act("no_leak")
    s.undo()
    assert read_labels(table).labels[r.digest] == "LEAK"
    s.undo()  # nothing is left to undo
    assert len(read_decisions(table)) == 3


def test_two_people_at_the_same_time(folder, tmp_path):
    table = tmp_path / "labels.csv"
    ann, ben = opened(folder, table), opened(folder, table, by="ben")
    ann.act("leak")
    ben.act("no_leak")
    assert len(ben.disagreements) == 1
    assert "ann: LEAK" in ben.disagreements[0]
    assert len(opened(folder, table, by="cid", queue="disagreements").queue.items) == 1


def test_a_decision_that_cannot_be_stored(folder, tmp_path, monkeypatch):
    table = tmp_path / "labels.csv"
    app = lm.review(folder, labels=table, by="ann", controls=True, progress="none")
    item = app.session.item

    def full(*_: Any) -> None:
        raise SpaceError("there is no room left", code="no-space", path=table)

    monkeypatch.setattr(label_table, "append_decision", full)
    at = app.n_shown
    app.buttons["l"].click()
    assert app.session.item == item
    assert not table.exists()
    assert "Not stored" in app.html["status"].value
    assert app.n_shown == at + 1  # the page takes keys again
    monkeypatch.undo()
    app.buttons["l"].click()
    assert len(read_decisions(table)) == 1


def test_names_of_files_are_no_html(folder, tmp_path):
    app = lm.review(folder, labels=tmp_path / "l.csv", by="<b>", n=99, controls=True, progress="none")
    for _ in range(12):
        shown = [app.html["facts"], app.html["status"], *(text for _, text in app.others)]
        assert not any("<img" in w.value or "by <b>" in w.value for w in shown)
        app.buttons["n"].click()
    assert "finished" in app.html["facts"].value
    assert app.buttons["n"].disabled
    app.queue.value = "kinds"
    assert "not available" in app.html["facts"].value


def test_a_recording_that_vanished(folder, tmp_path):
    for k in range(3):
        put(tmp_path / "d", f"LEAK/{k}.wav", noise(k))
    app = lm.review(tmp_path / "d", labels=tmp_path / "l.csv", by="ann", controls=True, progress="none")
    assert "no model was given" in app.html["sound"].value
    assert repr(app) == f"ReviewApp({app.session!r})"
    assert repr(app.session.found) == f"3 recordings of {tmp_path / 'd'}"
    (tmp_path / "d" / app.session.queue.items[1].path).unlink()
    app.buttons["l"].click()
    assert "cannot be read" in app.html["sound"].value
    app.buttons["s"].click()
    assert "<audio" in app.html["sound"].value


@each("rate", [100, 4096, 8000, 48_000])
@each("n", [1, 63, 5000])
def test_any_recording_can_be_played_and_drawn(rate, n):
    rng = np.random.default_rng(0)
    for samples in (np.zeros((n, 1), np.int16), rng.normal(0, 3, (n, 2)).astype(np.float32)):
        recording = Recording(samples, rate, "pcm16", "0" * 32)
        for band_pass in (False, True):
            wav, _ = playback(recording, band_pass)
            assert len(wav) == 44 + 2 * n
        svg = spectrogram_svg(recording, [0.2] * 1000, 0.5, 0.25)
        assert "nan" not in svg
        assert len(svg) < 600_000


def test_a_long_recording_is_cut_for_playback():
    x = np.full((int(2 * MAX_PLAYED_S * 1000), 1), 900, np.int16)
    wav, _ = playback(Recording(x, 1000, "pcm16", "0" * 32))
    assert len(wav) == 44 + 2 * int(MAX_PLAYED_S * 1000)


def test_several_labels_without_a_leak_need_a_name(tmp_path):
    for label in ("LEAK", "NOLEAK", "PUMP"):
        put(tmp_path / "d", f"{label}/a.wav", noise(len(label)))
    with pytest.raises(UsageError) as e:
        opened(tmp_path / "d", tmp_path / "l.csv")
    assert e.value.code == "ambiguous-label"
    assert opened(tmp_path / "d", tmp_path / "l.csv", other_label="PUMP").other_label == "PUMP"


def test_a_table_that_is_none_of_decisions_is_refused_at_once(folder, tmp_path):
    (tmp_path / "l.csv").write_text("path,label\na.wav,LEAK\n")
    with pytest.raises(LeakmelError) as e:
        opened(folder, tmp_path / "l.csv")
    assert e.value.code == "table-columns"


@pytest.mark.slow
def test_the_command_writes_a_notebook_that_runs_without_a_browser(folder, tmp_path, capsys, monkeypatch):
    made_detector().save(tmp_path / "model.pt")
    words = [
        "review",
        str(folder),
        "--model",
        str(tmp_path / "model.pt"),
        "--labels",
        str(tmp_path / "l.csv"),
    ]
    assert main([*words, "--by", "ann", "--out", str(tmp_path / "run"), "--no-lab", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert "--ServerApp.ip=127.0.0.1" in body["command"]
    notebook = nbformat.read(body["notebook"], as_version=4)
    nbformat.validate(notebook)
    names = ("JPY_SESSION_NAME", "VSCODE_PID")
    env = {k: v for k, v in os.environ.items() if k not in names}
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute(env=env)
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    shown = [o.data["text/html"] for o in outputs if "text/html" in o.get("data", {})]
    assert any("<audio" in html and "near the threshold" in html for html in shown)
    assert not (tmp_path / "l.csv").exists()
    assert main([*words, "--out", str(tmp_path / "run"), "--no-lab"]) == 1  # the notebook exists
    assert main(["review", str(tmp_path / "none"), "--no-lab"]) == 1
    assert main([*words, "--queue", "loudest", "--no-lab"]) == 2
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start.ipynb").touch()
    lm.write_demo(tmp_path / "runs" / "demo", n_files=12)
    assert main(["review", "--no-lab"]) == 0
    assert (
        f"no build here, so the demo: recordings {tmp_path / 'runs' / 'demo'}, model "
        in capsys.readouterr().err
    )


def test_labels_of_a_review_reach_the_notebook_of_builds(folder, tmp_path):
    "The parameter `labels` of build.ipynb."
    s = opened(folder, tmp_path / "labels.csv")
    changed = 0
    for _ in range(4):
        assert s.item is not None
        changed += s.item.label != "LEAK"
        s.act("leak")
    given = {"data_root": str(folder), "labels": str(s.labels), "out": str(tmp_path / "out"), "tuned": False}
    (built,) = execute(plan_run(given, progress="none"), progress="none")
    assert built.summary["labels_by_people"]["changed"] == changed
    (tmp_path / "wrong.csv").write_text("by,when\n")
    with pytest.raises(LeakmelError) as e:
        plan_run(given | {"labels": str(tmp_path / "wrong.csv")}, progress="none")
    assert e.value.code == "table-columns"
