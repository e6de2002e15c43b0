"predict.ipynb through papermill: scores, pictures and a summary for machines; a parameter that cannot be stops it."

import json
import os
import shutil
from pathlib import Path

import pytest
from each import each
from made_detectors import made_detector, write_mixed
from notebook_runs import PLOTLY, ROOT, Run, copy_project, error_of, papermill, titles_of


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed") / "flat")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return made_detector().save(tmp_path_factory.mktemp("model") / "model.pt")


def notebook(folder: Path, *args: str, data: Path | None = None) -> Run:
    "`papermill predict.ipynb` in a copy of the project."
    project = copy_project(folder)
    shutil.copy(ROOT / "nbs" / "predict.ipynb", project / "nbs")
    return papermill(project, *args, data=data, notebook="predict.ipynb")


@pytest.mark.slow
def test_notebook(tmp_path, mixed, model):
    run = notebook(
        tmp_path / "p", "-r", "model", str(model), "-p", "device", "cpu", "-p", "n_shown", "2", data=mixed
    )
    assert run.status == 0, run.log
    assert run.errors == []
    assert "from the environment variable LEAKMEL_DATA" in run.text
    assert "13 scored + 2 rejected = 15 files found" in run.text
    pictures, histogram, level = titles_of(run)
    assert pictures == "The 2 most suspicious recordings"
    assert "13 recordings reach the threshold" in histogram
    assert "Rank correlation" in level
    for o in run.outputs:
        assert all(
            len(str(a["title"]["text"]))
            for k, a in o.get("data", {}).get(PLOTLY, {"layout": {}})["layout"].items()
            if k.startswith("yaxis") and "title" in a
        )
    (summary,) = run.project.rglob("summary.json")
    body = json.loads(summary.read_text())
    assert (body["ok"], body["scored"], body["rejected"]) == (True, 13, 2)
    assert sorted(p.name for p in summary.parent.iterdir()) == [
        "predictions.csv",
        "predictions.rejected.csv",
        "report.html",
        "summary.json",
    ]
    assert summary.parent.name.endswith("-predict")
    assert run.notebook.stat().st_size < 3_500_000


@each(
    ("given", "message"),
    [
        ({"treshold": 0.5}, "did you mean threshold"),
        ({"threshold": "high"}, "threshold must be a number or None"),
        ({"vote": "half"}, "half"),
        ({"model": "none.pt"}, "none.pt"),
        ({"length": "all"}, "the length is unknown"),
    ],
)
def test_invalid_parameter_stops_the_notebook(tmp_path, monkeypatch, mixed, model, given, message):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(
        "predict.ipynb", **({"data_root": str(mixed), "model": str(model), "device": "cpu"} | given)
    )
    assert os.listdir(tmp_path) == []
