"train.ipynb through papermill, on a tiny set: training, evaluation, figures, JSON results, and errors."

import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from each import each
from notebook_runs import PLOTLY, ROOT, Run, copy_project, error_of, papermill
from parameter_tables import parameter_defaults

import leakmel as lm
from leakmel.core.operation import parameter_kinds
from leakmel.detector.model.detector import load_detector
from leakmel.operations.detector import Train

TINY = (
    "-p",
    "detector",
    "cnn",
    "-p",
    "epochs",
    "2",
    "-p",
    "batch_size",
    "200",
    "-p",
    "channels",
    "4,8",
    "-p",
    "device",
    "cpu",
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("train")
    lm.write_demo(root / "demo", n_files=60)
    lm.build_all(root / "demo", out_dir=root / "sets", progress="none", check=2)
    return root / "sets"


def train(project: Path, *args: str) -> Run:
    (project / "nbs").mkdir(parents=True, exist_ok=True)
    copy_project(project / "p")
    shutil.copy(ROOT / "nbs" / "train.ipynb", project / "p" / "nbs")
    return papermill(project / "p", *args, notebook="train.ipynb")


@pytest.mark.slow
def test_train_notebook_trains_evaluates_and_plots(sets: Path, tmp_path: Path) -> None:
    run = train(tmp_path, *TINY, "-r", "data", str(sets), "-r", "out", str(tmp_path / "run"))
    assert run.status == 0, run.log
    assert run.errors == []
    titles = [o.data[PLOTLY]["layout"]["title"]["text"] for o in run.outputs if PLOTLY in o.get("data", {})]
    assert titles[0].startswith("F1 of ")
    assert len(titles) > 3
    assert re.search(r"\b([\d,]+) of \1 batches in", run.text), "progress that reads right when it is saved"
    assert "<table" in run.text, "figures of the epochs so far"
    assert not re.search(r"\b0%\||Widget\(", run.text)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ok"] is True
    assert summary["evaluation"]
    assert load_detector(tmp_path / "run" / "model.pt").record["settings"]["epochs"] == 2
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert report.count('class="plotly-figure"') == len(titles)
    assert summary["evaluation"]["verdict"] in report
    assert run.notebook.stat().st_size < 4_000_000


@pytest.mark.slow
def test_failed_training_fails_the_notebook(sets: Path, tmp_path: Path) -> None:
    given = {"data": str(sets), "out": str(tmp_path / "run"), "leak_label": "EAK", "device": "cpu"}
    assert "the label does not exist" in error_of("train.ipynb", **given)
    assert not (tmp_path / "run" / "model.pt").exists()


@each(
    ("given", "message"),
    [
        ({"epoch": 3}, "did you mean epochs"),
        ({"epochs": "many"}, "epochs must be a whole number"),
        ({"channels": "4,x"}, "whole numbers separated by commas"),
        ({"data_dir": "x"}, "is called"),
        ({"loss": "hinge"}, "loss has an unknown value"),
        ({"keep_checkpoints": 0}, "keep_checkpoints"),
        ({"data": "/nowhere"}, "the data set does not exist"),
        ({"resume": "perhaps"}, "resume"),
    ],
    ids=str,
)
def test_a_wrong_parameter_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: Path, given: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_of("train.ipynb", **{"data": str(sets)} | given)
    assert list(tmp_path.iterdir()) == []


def test_notebook_defaults_equal_library_defaults() -> None:
    cells = nbformat.read(ROOT / "nbs" / "train.ipynb", as_version=4).cells
    (cell,) = [c for c in cells if "parameters" in c.metadata.get("tags", [])]
    given: dict[str, object] = {}
    exec(cell.source, {}, given)
    assert 10 <= len(given) <= 16
    assert set(given) <= set(parameter_kinds(Train))
    assert given.items() <= parameter_defaults(Train).items()
    table = next(c.source for c in cells if c.source.startswith("## Other parameters"))
    assert set(given) | set(re.findall(r"^\| `(\w+)`", table, re.M)) == set(parameter_kinds(Train))
