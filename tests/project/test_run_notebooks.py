"""Run notebooks for evaluate, retrain, search, tune and doctor: each runs once on tiny data; a wrong parameter stops it.

They run in this process, which has imported what they need; a long test builds a part by papermill.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import nbformat
import pytest
from each import each
from notebook_runs import ROOT, RunHere, copy_project, error_of, papermill, run_here
from papermill import inspect_notebook
from parameter_tables import parameter_defaults

import leakmel as lm
from leakmel.core.operation import Run, make, parameter_kinds
from leakmel.core.parameters import Kinds
from leakmel.operations.detector import Evaluate
from leakmel.operations.extras import NOTEBOOKS, Correlate, Nightly, Retrain, Search, Tune, start_kinds

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of splits of a few sensors
TINY = {"epochs": 1, "device": "cpu"}
KINDS: dict[str, Callable[[], Kinds]] = {
    "start": start_kinds,
    "evaluate": partial(parameter_kinds, Evaluate),
    "search": partial(parameter_kinds, Search),
    "retrain": partial(parameter_kinds, Retrain),
    "nightly": partial(parameter_kinds, Nightly),
    "tune": lambda: parameter_kinds(Tune) | {"out": (str, None)},
    "correlate": lambda: parameter_kinds(Correlate) | {"out": (str, None)},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A project with data sets of two networks, and a detector."
    project = copy_project(tmp_path_factory.mktemp("runs") / "p")
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, project / "nbs")
    lm.write_demo(project / "demo", n_files=60)
    lm.build_all(project / "demo", out_dir=project / "sets", progress="none", check=2)
    lm.write_demo(project / "other", n_files=40, seed=1)
    lm.build(project / "other", split="training", out=project / "new.H5", progress="none", check=2)
    sets = [project / "sets" / f"{part}_DATASET.H5" for part in ("TRAINING", "VALIDATION")]
    settings = lm.TrainSettings(detector="cnn", epochs=1, channels=(4, 8))
    lm.train(*sets, out=project / "model", settings=settings, device="cpu", progress=False)
    return project


def run(made: Path, name: str, **given: object) -> tuple[RunHere, dict]:
    "Run a notebook with parameters, as papermill gives them, in this process; gives also its summary.json."
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    done = run_here(f"{name}.ipynb", **plain)
    assert done.error == ""
    assert '"ok": true' in done.text
    folder = made / name / ("round-0001" if name == "retrain" else "")
    return done, json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("by_papermill", [False, pytest.param(True, marks=pytest.mark.long)])
def test_parts_and_join(made: Path, tmp_path: Path, by_papermill: bool) -> None:
    "All in this process, or the second part by papermill: what the commands papermill and make do is tested with build.ipynb."
    out = tmp_path / "parts" / "x.h5"
    given = {"data_root": str(made / "demo"), "split": "training", "out": str(out), "engine": "cpu"}
    if by_papermill:
        words = [word for key, value in (given | {"part": "2/2"}).items() for word in ("-p", key, value)]
        done = papermill(made, *words, notebook="build_part.ipynb", out="out-2.ipynb")
        assert (done.status, done.errors) == (0, []), done.log
    for part in ("1/2", "join") if by_papermill else ("2/2", "1/2", "join"):
        assert run_here("build_part.ipynb", **given, part=part).error == ""
    right = lm.build(
        made / "demo", split="training", out=tmp_path / "whole.h5", engine="cpu", progress="none"
    )
    assert out.read_bytes() == right.path.read_bytes()


@pytest.mark.slow
def test_evaluate(made: Path) -> None:
    given = {"data": made / "sets", "model": made / "model", "out": made / "evaluate", "n_draws": 100}
    done, summary = run(made, "evaluate", **given, device="cpu")
    assert summary["recordings"] == 5
    assert len(done.titles) == 5
    assert {"report.txt", "recordings.csv", "evaluation.html"} <= {
        p.name for p in (made / "evaluate").iterdir()
    }


@pytest.mark.slow
def test_nightly(made: Path) -> None:
    given = {"data_root": made / "demo" / "TRAINING", "model": made / "model", "state": made / "nightly"}
    done, summary = run(made, "nightly", **given, device="cpu")
    assert (summary["ok"], summary["rejected"]) == (True, 0)
    assert summary["found"] == summary["new"] > 10
    assert {"sensors.csv", "sensors.json", "visits.html"} <= {p.name for p in (made / "nightly").iterdir()}
    assert done.titles[0].endswith("sensors to visit")


@pytest.mark.slow
def test_retrain(made: Path) -> None:
    given = {"data": made / "new.H5", "replay": made / "sets", "champion": made / "model"}
    done, summary = run(made, "retrain", **given, **TINY, out=made / "retrain", n_draws=100)
    assert summary["ok"] is True
    assert summary["rules"]["n_draws"] == 100
    assert done.titles[0] in ("The champion stays", "The challenger is the new champion")


@pytest.mark.slow
def test_search(made: Path) -> None:
    pytest.importorskip("optuna")
    given = {"data": made / "sets", "out": made / "search", "trials": 2, "again": 0, "channels": "4,8"}
    space = {"space": '{"learning_rate": [0.001, 0.01]}'}
    done, summary = run(made, "search", **given, **space, **TINY)
    assert summary["trials_wanted"] == 2
    assert len(done.titles) >= 1


@pytest.mark.slow
def test_tune_and_doctor(made: Path) -> None:
    given = {"data_root": made / "demo", "out": made / "tune", "budget_s": 3.0}
    done, summary = run(made, "tune", **given)
    assert summary["builds"]["warm"]
    assert summary["advice"]
    measured = ("files/s with", "No setting was measured")  # the latter on a machine that is very busy
    assert done.titles
    assert all(any(words in title for words in measured) for title in done.titles)
    done, summary = run(made, "doctor", data_root=made / "demo", out=made / "doctor")
    assert summary["ready"] is True
    assert done.titles[0].startswith("Engines differ from the reference by at most")
    assert all(c["figures"]["n_wrong"] == 0 for c in summary["checks"] if "n_wrong" in c["figures"])


@pytest.mark.slow
def test_correlate(made: Path) -> None:
    done, summary = run(made, "correlate", distance_m=100.0, out=made / "correlate")
    assert summary["verdict"] == "leak"
    assert abs(summary["position_m"] - 30) < 0.5
    assert done.titles[0].startswith("Leak noise 30.0 m from a")
    assert (made / "correlate" / "report.html").is_file()


@each("name", KINDS)
def test_parameters_are_few_and_have_the_defaults(name: str) -> None:
    cells = nbformat.read(ROOT / "nbs" / f"{name}.ipynb", as_version=4).cells
    (cell,) = [c for c in cells if "parameters" in c.metadata.get("tags", [])]
    given: dict[str, object] = {}
    exec(cell.source, {}, given)
    assert len(given) <= 15
    assert set(given) <= set(KINDS[name]())
    assert set(inspect_notebook(ROOT / "nbs" / f"{name}.ipynb")) == set(given), "papermill reads each line"
    defaults = {
        "evaluate": parameter_defaults(Evaluate),
        "search": parameter_defaults(Search),
        "nightly": parameter_defaults(Nightly),
        "retrain": parameter_defaults(Retrain),
    }.get(name, {})
    assert {n: given[n] for n in given if n in defaults} == {n: defaults[n] for n in given if n in defaults}


@each(
    ("name", "given", "message"),
    [
        ("start", {"detecter": "cnn"}, "did you mean detector"),
        ("evaluate", {"vote": "mean"}, "did you mean votes"),
        ("evaluate", {"model": "/nowhere"}, "/nowhere"),
        ("search", {"trial": 3}, "did you mean trials"),
        ("search", {"trials": "many"}, "trials must be a whole number"),
        ("retrain", {}, "no data set of the new recordings was given"),
        ("retrain", {"data": "/nowhere"}, "no data set of the champion's training recordings was given"),
        ("retrain", {"dropout": 0.5}, "dropout is unknown"),
        ("nightly", {"budgets": 3.0}, "did you mean budget"),
        ("nightly", {"model": "/nowhere"}, "/nowhere"),
        ("tune", {"budget": 3}, "did you mean budget_s"),
        ("tune", {"slots": 3}, "slots is unknown"),
        ("correlate", {"distance": 3.0}, "did you mean distance_m"),
        ("correlate", {"speed_m_s": -3.0}, "a speed above 0"),
        ("doctor", {"folder": "."}, "folder is unknown"),
        ("doctor", {"data_root": "/nowhere"}, "the folder does not exist"),
    ],
    ids=str,
)
def test_a_wrong_parameter_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, given: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_of(f"{name}.ipynb", **given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_champion_of_the_folder_is_retrained(made: Path, tmp_path: Path) -> None:
    "Only before the first round a model is searched."
    asked = {"data": str(made / "new.H5"), "replay": str(made / "sets"), "device": "cpu"}
    (tmp_path / "champion.json").write_text("{}")
    plan = make(Retrain, asked | {"out": str(tmp_path)}).plan(Run("none", keeps=True))
    assert plan.given["champion"] is None
    assert plan.inputs["champion"] == f"the champion of {tmp_path}"
