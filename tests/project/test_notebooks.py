"Run notebooks through papermill, as people run them, on tiny sets."

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bench_notebook
import nbformat
import numpy as np
import papermill.cli as papermill_command
import pytest
import run_build
from each import each
from notebook_runs import PLOTLY, ROOT, Run, RunHere, copy_project, error_of, papermill, run_here, titles_of

import leakmel as lm
from leakmel.extras.machine import bench
from leakmel.recordings.demo import wav_bytes, write_demo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "tiny"
    write_demo(root, n_files=24)
    return root


@dataclass(frozen=True)
class Made(Run):
    "What `make build DATA=... OUT=...` made."

    said: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny) -> Made:
    "All splits by `make build`, from a folder with an odd name."
    place = tmp_path_factory.mktemp("whole")
    data, out = place / "my data $HOME", place / "my results"
    shutil.copytree(tiny, data)
    done = make_build(data, out)
    return Made(done.returncode, done.stdout + done.stderr, out / "build.ipynb", out, done.stdout)


def assert_looks_right(run: Run) -> None:
    "What every saved notebook of a good run shows."
    assert run.status == 0, run.log
    assert run.errors == []
    assert sum(PLOTLY in o.get("data", {}) for o in run.outputs) == 5
    assert "verified" in run.text
    assert "NOT verified" not in run.text
    assert re.search(r"\b([\d,]+) of \1 files in", run.text), "progress that reads right when it is saved"
    assert not any("widget" in kind for o in run.outputs for kind in o.get("data", {}))
    assert "widgets" not in nbformat.read(run.notebook, as_version=4).metadata
    assert not re.search(r"\b0%\||Widget\(|HBox\(|FloatProgress", run.text)
    assert run.notebook.stat().st_size < 3_500_000


def summary_of(run: Run) -> dict:
    (path,) = run.project.rglob("summary.json")
    return json.loads(path.read_text())


def test_all_splits(whole, tiny):
    assert_looks_right(whole)
    summary = summary_of(whole)
    assert (summary["ok"], summary["found"], summary["rows"]) == (True, 24, 24)
    assert [p.name for p in whole.data_sets] == [
        "TESTING_DATASET.H5",
        "TRAINING_DATASET.H5",
        "VALIDATION_DATASET.H5",
    ]
    for path in whole.data_sets:
        report = lm.verify(path, root=tiny, sample=None)
        assert report.ok, report.problems
    for name in ("TRAINING", "VALIDATION", "TESTING"):
        assert re.search(rf"{name}: (\d+) of \1 files", whole.text)


def test_leakmel_data_is_used_and_reported(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(copy_project(tmp_path) / "nbs")
    monkeypatch.setenv("LEAKMEL_DATA", str(tiny))
    run = run_here("build.ipynb")
    assert run.error == ""
    assert str(tiny) in run.text
    assert "from the environment variable LEAKMEL_DATA" in run.text
    (folder,) = {p.parent for p in tmp_path.rglob("*.H5")}
    assert re.fullmatch(r"\d{8}-\d{6}-all-[0-9a-f]+", folder.name)
    assert folder.parent == tmp_path / "runs"


def test_figures_have_titles_and_units(whole):
    figures = [o.data[PLOTLY] for o in whole.outputs if PLOTLY in o.get("data", {})]
    for figure in figures:
        assert len(figure["layout"]["title"]["text"]) > 5
        assert figure["data"]
    titles = [
        a["title"]["text"]
        for f in figures
        for k, a in f["layout"].items()
        if k.startswith(("xaxis", "yaxis")) and a.get("title")
    ]
    assert any("(s)" in t for t in titles)
    assert any("(Hz)" in t for t in titles)


def test_missing_figures_are_not_zero(whole):
    "A machine without a GPU has no VRAM: that is not 0 MB."
    card = next(
        o.data["text/plain"] for o in whole.outputs if "VRAM" in o.get("data", {}).get("text/plain", "")
    )
    vram = next(line for line in card.splitlines() if line.split()[:1] == ["VRAM"])
    assert "not available" in vram or re.search(r"[1-9]", vram)


def read_by_papermill(*words: str) -> dict[str, Any]:
    "The parameters that the command papermill makes of its words."
    given: dict[str, Any] = {}
    with mock.patch.object(
        papermill_command, "execute_notebook", lambda **named: given.update(named["parameters"])
    ):
        papermill_command.papermill.main([*words], standalone_mode=False)
    return given


def test_literal_command_writes_a_demo_set(tmp_path, monkeypatch):
    """`papermill build.ipynb out.ipynb -p split training`, with no data anywhere.

    papermill reads its words, and the cells run in this process: `whole` is what papermill saves.
    """
    for name in [k for k in os.environ if k.startswith("LEAKMEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(copy_project(tmp_path) / "nbs")
    given = read_by_papermill("build.ipynb", "out.ipynb", "-p", "split", "training")
    assert given == {"split": "training"}
    run = run_here("build.ipynb", **given)
    assert run.error == ""
    assert len(run.figures) == 5
    assert '"ok": true' in run.text
    assert "NOT verified" not in run.text
    assert "a new demo data set" in run.text
    assert (tmp_path / "runs" / "demo" / "TRAINING").is_dir()
    (made,) = tmp_path.rglob("*.H5")
    assert made.name == "TRAINING_DATASET.H5"
    assert re.search(r"-training-[0-9a-f]+$", made.parent.name)
    names = {p.name for p in (tmp_path / "runs" / "demo" / "TRAINING").iterdir()}
    with lm.open_dataset(made) as ds:
        assert set(ds.class_names) == names


def test_one_folder_of_label_folders_in_the_other_preset(tmp_path, tiny):
    results = tmp_path / "my results"
    given = {"data_root": str(tiny / "TRAINING"), "out": str(results), "preset": "overlap", "n_mels": 24}
    run = run_here("build.ipynb", **given)
    assert run.error == ""
    assert len(run.figures) == 5
    assert '"ok": true' in run.text
    (data_set,) = results.glob("*.H5")
    with lm.open_dataset(data_set) as ds:
        assert ds[0][0].shape[:3] == (79, 3, 24)
    assert lm.verify(data_set, root=tiny / "TRAINING", sample=None).ok


def test_a_wrong_parameter_stops_the_run(tmp_path, tiny):
    run = papermill(copy_project(tmp_path), "-p", "files_per_bach", "3", "-p", "stage_dir", "x", data=tiny)
    assert run.status != 0
    (error,) = run.errors
    for words in (
        "did you mean files_per_batch",
        "is called data_root",
        "read_workers",
        "n_mels",
        "compression",
    ):
        assert words in error
    assert run.data_sets == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"check": "many", "fsync": 3, "preset": 7},
            [
                "check must be a whole number or None, got 'many'",
                "fsync must be True or False",
                "preset must be text",
            ],
        ),
        ({"n_mels": 500}, ["n_mels"]),
    ],
    ids=["ill-typed", "nonsense"],
)
def test_invalid_value_stops_the_run(tmp_path, tiny, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    error = error_of("build.ipynb", data_root=str(tiny), **given)
    for words in message:
        assert words in error
    assert os.listdir(tmp_path) == []


def test_a_failed_build_is_a_failed_notebook(tmp_path):
    "`make build` ends with the status of papermill, and names the notebook up to the error."
    for label in ("LEAK", "NOLEAK"):
        (tmp_path / "bad" / label).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "bad" / label / f"{i}.wav").write_bytes(b"no recording")
    out = tmp_path / "out"
    done = make_build(tmp_path / "bad", out, SETTINGS="sample_rate=4096 duration_s=10")
    assert done.returncode == 1
    run = Run(done.returncode, done.stderr, out / "build.ipynb", out)
    (error,) = run.errors
    assert "bad" in error
    assert run.data_sets == []
    assert not list(out.rglob("*.partial"))
    assert f"the notebook up to the error: {run.notebook}" in done.stderr
    assert "verified" not in done.stdout


def test_a_killed_kernel_is_a_failure(tmp_path, tiny):
    project = copy_project(tmp_path)
    notebook = nbformat.read(project / "nbs" / "build.ipynb", as_version=4)
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    notebook.cells = [nbformat.v4.new_code_cell(kill)]
    nbformat.write(notebook, project / "nbs" / "build.ipynb")
    run = papermill(project, data=tiny)
    assert run.status != 0
    assert run.data_sets == []


def make_build(data: Path | str, out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    "`make build DATA=... OUT=...`, by the script that it calls."
    given = {
        k: v for k, v in os.environ.items() if not k.startswith(("LEAKMEL_", "JUPYTER", "IPYTHON", "PYTEST_"))
    }
    return subprocess.run(
        [sys.executable, str(ROOT / "nbs" / "_tools" / "run_build.py")],
        env=given | {"DATA": str(data), "OUT": str(out)} | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_make_build_prints_the_output_paths(whole):
    assert whole.status == 0, whole.log
    out = whole.project
    for name in ("TRAINING_DATASET.H5", "VALIDATION_DATASET.H5", "TESTING_DATASET.H5"):
        assert (out / name).is_file()
        assert str(out / name) in whole.said
    assert f"executed notebook: {out / 'build.ipynb'}" in whole.said
    assert f"report: {out / 'report.html'}" in whole.said
    assert (out / "report.html").read_text(encoding="utf-8").count('class="plotly-figure"') == 5
    assert "verdict: all data sets verified" in whole.said


def test_make_build_takes_any_parameter_of_the_notebook(tmp_path, tiny, monkeypatch):
    "Also for mixed data. A table is found from where make was called. papermill reads its words, and the cells run in this process."
    mixed = tmp_path / "mixed"
    shutil.copytree(tiny, mixed)
    wavs = sorted(p.relative_to(mixed) for p in mixed.rglob("*.wav"))
    (mixed / wavs[0]).write_bytes(wav_bytes(np.arange(9000, dtype=np.int16), 8000))
    table = tmp_path / "my list.csv"
    table.write_text("path,label,split\n" + "".join(f"{p},{p.parts[1]},{p.parts[0]}\n" for p in wavs))
    monkeypatch.chdir(ROOT)
    out = tmp_path / "results"
    settings = (
        f"sample_rate=4096 duration_s=10 preset=overlap table='{os.path.relpath(table)}' check=3 "
        "split=validation fsync=False"
    )
    for name, value in {"DATA": str(mixed), "OUT": str(out), "SETTINGS": settings}.items():
        monkeypatch.setenv(name, value)

    def run_papermill(words: list[str], cwd: Path) -> Any:
        command, notebook, executed, *options = words
        assert (Path(command).name, notebook, cwd) == ("papermill", f"{ROOT}/nbs/build.ipynb", ROOT / "nbs")
        assert executed == str(out / "build.ipynb")
        run = run_here("build.ipynb", **read_by_papermill(notebook, executed, *options))
        assert run.error == ""
        return nullcontext(SimpleNamespace(wait=lambda: 0))

    monkeypatch.setattr(run_build, "start_process", run_papermill)
    assert run_build.main() == 0
    (made,) = out.glob("*.H5")
    with lm.open_dataset(made) as ds:
        assert (made.name, ds.spec) == (
            "VALIDATION_DATASET.H5",
            lm.MelSpec.preset("overlap", sample_rate=4096, duration_s=10.0),
        )
        assert json.loads(ds.file.attrs["naming_json"])["source"] == "table"
    summary = json.loads((out / "summary.json").read_text())["splits"][0]
    assert (summary["verified"]["checked"], summary["pipeline"]["fsync"]) == (3, False)


@each(
    ("settings", "message"),
    [
        ("preset", "not NAME=VALUE: 'preset'"),
        ("=3", "not NAME=VALUE"),
        ("a-b=3", "not NAME=VALUE"),
        ("pattern='{label}", "quotation"),
        ("out=x", "OUT=folder"),
        ("data_root=x", "DATA=folder"),
    ],
)
def test_make_build_checks_settings_before_work(tmp_path, tiny, settings, message):
    done = make_build(tiny, tmp_path / "out", SETTINGS=settings)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_make_build_does_not_change_the_data_folder(tmp_path, tiny):
    before = sorted(tiny.rglob("*"))
    for out in (tiny, tiny / "TRAINING", tiny / "new"):
        done = make_build(tiny, out)
        assert done.returncode == 2
        assert "cannot go into the data folder" in done.stderr
    assert sorted(tiny.rglob("*")) == before
    done = make_build(tmp_path / "nowhere", tmp_path / "out")
    assert done.returncode == 2
    assert "there is no data folder" in done.stderr
    assert not (tmp_path / "out").exists()


# ---- benchmark.ipynb -----------------------------------------------------------------------------------------------

MEASURED = {"disjoint, fsync", "disjoint, all splits"}  # the others have the same options, or fewer


@dataclass(frozen=True)
class Measured:
    "What the benchmark said in this process, and the folder of its records."

    run: RunHere
    folder: Path
    progress: mock.Mock


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Measured:
    "The suite build, tiny, with two of its settings, in this process."
    project = copy_project(tmp_path_factory.mktemp("measured"))
    progress = mock.Mock()
    with pytest.MonkeyPatch.context() as m:
        m.chdir(project / "nbs")
        m.setattr(bench, "SETTINGS", {k: v for k, v in bench.SETTINGS.items() if k in MEASURED})
        m.setattr(bench_notebook, "display", lambda *_, display_id: progress)
        run = run_here("benchmark.ipynb", n_files=12, rounds=1)
    (folder,) = (project / "runs").iterdir()
    return Measured(run, folder, progress)


def test_benchmark_measures_stores_and_draws(measured):
    assert measured.run.error == ""
    assert measured.progress.update.called
    (build,) = measured.run.titles
    assert re.search(r"files/s, from listing to published file", build)
    assert re.search(r"^disjoint, fsync +[\d,]+ ", measured.run.text, re.M)
    assert "verified and measured: build" in measured.run.text
    assert re.fullmatch(r"\d{8}-\d{6}-build", measured.folder.name), (
        "a small set is not taken for the project's own figures"
    )
    assert [p.name.split("-")[0] for p in measured.folder.iterdir()] == ["build"]


@pytest.mark.long  # test_benchmark_measures_stores_and_draws runs its cells, and test_all_splits what papermill saves
def test_benchmark_by_papermill(tmp_path):
    run = papermill(
        copy_project(tmp_path), "-p", "n_files", "12", "-p", "rounds", "1", notebook="benchmark.ipynb"
    )
    assert (run.status, run.errors) == (0, []), run.log
    assert len(titles_of(run)) == 1
    assert "verified and measured: build" in run.text
    assert run.notebook.stat().st_size < 3_500_000


def test_benchmark_shows_existing_records(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_project(tmp_path) / "nbs")
    run = run_here("benchmark.ipynb", run=False, out=str(measured.folder))
    assert run.error == ""
    assert run.titles == measured.run.titles
    assert not (tmp_path / "runs").exists(), "nothing is measured"


def test_benchmark_without_records_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(copy_project(tmp_path) / "nbs")
    run = run_here("benchmark.ipynb", run=False)
    assert run.error == ""
    assert [title.endswith("not measured") for title in run.titles] == [True]
    assert "not measured: build" in run.text
    assert not (tmp_path / "runs").exists()


def test_benchmark_with_wrong_rows_fails_and_draws(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_project(tmp_path / "project") / "nbs")
    shutil.copytree(measured.folder, tmp_path / "records")
    (path,) = (tmp_path / "records").glob("build-*.json")
    path.write_text(path.read_text().replace('"all_ok": true', '"all_ok": false'))
    run = run_here("benchmark.ipynb", run=False, out=str(tmp_path / "records"))
    assert len(run.titles) == 1
    assert "the benchmark found wrong results, so its figures are not valid; found build" in run.error


def test_comparison_notebook_measures_stores_and_draws(tmp_path, monkeypatch):
    project = copy_project(tmp_path)
    monkeypatch.chdir(project / "nbs" / "benchmarks")
    progress = mock.Mock()
    monkeypatch.setattr(bench_notebook, "display", lambda *_, display_id: progress)
    run = run_here("benchmarks/start.ipynb", n_files=8, rounds=1)
    assert progress.update.called
    assert run.error == ""
    assert "From command to end" in run.titles[0]
    assert "verified and measured: start" in run.text
    (folder,) = (project / "runs").iterdir()
    assert [p.name.split("-")[0] for p in folder.iterdir()] == ["start"]


@pytest.mark.slow
@each("path", sorted((ROOT / "nbs" / "benchmarks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_of_comparisons_draw_the_stored_records(path, tmp_path, monkeypatch):
    monkeypatch.chdir(copy_project(tmp_path) / "nbs" / "benchmarks")
    run = run_here(f"benchmarks/{path.name}", run=False, out=str(ROOT / "runs" / "benchmarks"))
    assert run.error == ""
    assert re.search(
        r"verified and measured|verified, measured in part: gpu|not measured: public-sets", run.text
    )


@each(
    ("given", "message"),
    [
        ({"n_file": 3, "speed": "x"}, ["n_file is unknown; did you mean n_files?", "speed is unknown"]),
        (
            {"n_files": "many", "run": 3},
            ["n_files must be a whole number, got 'many'", "run must be True or False"],
        ),
        ({"rounds": 0}, ["rounds must be at least 1"]),
    ],
    ids=["unknown", "ill-typed", "no rounds"],
)
def test_a_wrong_parameter_stops_the_benchmark_before_the_work(tmp_path, monkeypatch, given, message):
    project = copy_project(tmp_path)
    before = sorted(os.listdir(project))
    monkeypatch.chdir(project / "nbs")
    error = error_of("benchmark.ipynb", **given)
    for words in message:
        assert words in error
    assert sorted(os.listdir(project)) == before
