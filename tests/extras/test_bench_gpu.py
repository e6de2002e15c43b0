"The suite for a machine with a GPU: a rehearsal on a bare image, parity before figures, a budget that is kept, and rehearsals that are no figures."

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_card
import bench_gpu as suite
import psutil
import pytest
import torch
from bench_gpu import MEASURED_ENGINES, bench_gpu, gpu_table
from bench_train import StepInOneGraph, card_facts
from each import each
from errors import raises

from leakmel.core.errors import LeakmelError, SpaceError
from leakmel.detector.model.settings import TrainSettings
from leakmel.detector.train.state import TrainingState, open_training
from leakmel.extras.machine import bench
from leakmel.extras.machine.bench import (
    ProcessRun,
    newest,
    run_leakmel,
    store,
    synthetic_set_of_size,
    touch_memory,
)
from leakmel.recordings.demo import WAV_BYTES, write_demo

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "fake"  # that is none

# What a CUDA image has not; the finder stands before all others in this process's children, too.
BARE = """
import sys
MISSING = {"soundfile", "soxr", "plotly", "ipywidgets", "papermill", "jupyter", "jupyterlab", "ipykernel", "IPython", "nbdev", "fastcore", "nbformat",
           "nbclient", "nvtx", "torchaudio", "librosa", "playwright", "hdf5plugin"}
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING: raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Bare())
"""


@pytest.fixture
def bare(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    "Run Python from the checkout on an image that lacks some packages."
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE, encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "bare"), str(ROOT / "tests" / "helpers")]),
        "OMP_NUM_THREADS": "1",
    }

    def run(*words: str | os.PathLike, timeout: float = 240) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    assert "No module named 'soxr'" in run("-c", "try: import soxr\nexcept ImportError as e: print(e)").stdout
    return run


# -- on a bare image ------------------------------------------------------------------------------------------------------


WHOLE = """
import sys
sys.path.append("nbs/benchmarks")
import bench_gpu as suite
from leakmel.extras.machine.bench import store
from bench_gpu import bench_gpu, gpu_table

suite.MEASURED_ENGINES = ("triton", "cpu")
figures = bench_gpu(sys.argv[1], n_files=48, rounds=1, device="cpu", commit_id="0123abcd")
print(gpu_table(figures))
store(figures, sys.argv[2])
"""


@pytest.mark.slow
def test_gpu_suite_on_an_image_without_extras(tmp_path, bare):
    done = bare("-c", WHOLE, tmp_path / "work", tmp_path / "store")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "store").iterdir()
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert path.name.startswith("gpu-rehearsal-")
    assert (figures["suite"], figures["rehearsal"]) == ("gpu-rehearsal", True)
    assert (figures["errors"], figures["ok"]) == ([], True)
    assert [x["what"] for x in figures["not_measured"]] == ["engine triton"]
    assert list(figures["builds"]) == ["A, cpu", "B, cpu"]
    for name in ("A, cpu", "B, cpu"):
        build = figures["builds"][name]
        assert build["found"]["median"] == figures["n_files"] == 48
        for key in ("read_s", "compute_s", "write_s", "publish_s", "work_s", "cpu_s", "to_first_batch_s"):
            assert 0 < build[key]["least"] < 60, key
        assert build["work_s"]["median"] < build["seconds"]["median"] < build["process_s"]["median"]
    assert figures["verified"]["data_sets"] == 3 * 2
    assert figures["verified"]["rows"] == 2 * 48
    assert done.stdout.startswith("REHEARSAL")
    assert newest("gpu", tmp_path / "store") is None


@pytest.mark.slow
def test_builds_and_checks_on_an_image_without_extras(tmp_path, bare):
    write_demo(tmp_path / "set", n_files=12)
    words = ("--split", "training", "--device", "cpu", "--engine", "torch", "--quiet")
    done = bare("-m", "leakmel", "build", tmp_path / "set", "--out", tmp_path / "x.h5", *words)
    assert done.returncode == 0, done.stderr
    verify = ("verify", tmp_path / "x.h5", "--root", tmp_path / "set", "--sample", "all")
    assert bare("-m", "leakmel", *verify).returncode == 0


COLLECTED = """
import pytest
words = ["-q", "-p", "no:cacheprovider"]
print("status", int(pytest.main(["-m", "gpu", "--collect-only", *words])))
words += ["-k", "fake_device_gives_the_same_scores"]
print("status", int(pytest.main(["tests/detector/test_learn_predict.py", *words])))
"""


@pytest.mark.slow
def test_gpu_tests_are_collected_on_an_image_without_extras(bare):
    "Files that hold no such test are not imported: some of them need what is missing there. A file with such a test needs no extras."
    collected, passed, _ = re.split(r"^status 0$", bare("-c", COLLECTED).stdout, flags=re.MULTILINE)
    files = {line.split("::")[0] for line in collected.splitlines() if "::" in line}
    with_mark = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "tests").rglob("test_*.py")
        if "@pytest.mark." + "gpu" in p.read_text(encoding="utf-8")
    }
    assert with_mark | {"tests/mel/test_mel.py"} <= files
    assert "tests/recordings/test_wav.py" not in files
    assert re.search(r"^\d+ passed", passed, re.MULTILINE), passed[-2000:]


def test_missing_device_reports_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with raises("no-gpu", says="needs a CUDA device"):
        bench_gpu(tmp_path / "work")
    assert not list(tmp_path.iterdir()), "nothing is written"


# -- the plan -------------------------------------------------------------------------------------------------------------


def a_build(files_per_s: float = 1000.0) -> dict[str, float]:
    "Figures as a build has them."
    rates = {"files_per_s": files_per_s, "work_files_per_s": 2 * files_per_s}
    return rates | {"to_first_batch_s": 0.5, "cpu_s": 2.0, "copy_in_s": 0.5, "copy_in_bytes": 1e9}


class Machine:
    "A machine with a GPU whose builds take as long as is said."

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s, self.seconds, self.built = 0.0, 1.0, list[str]()
        keys = ["engine_triton", "engine_torch_cuda", "engine_cpu", "gpu", "compiled"]
        self.status = dict.fromkeys(keys, "ok")
        self.fails: Callable[[str], bool] = lambda name: False
        time = types.SimpleNamespace(monotonic=lambda: self.now_s)
        for name, value in {
            "may_have_cuda": lambda: True,
            "time": time,
            "synthetic_set_of_size": lambda folder, n, log: Path(folder, "demo"),
            "touch_memory": lambda n_bytes: {"bytes": n_bytes, "seconds": 0.1},
            "run_leakmel": self.doctor,
            "build_once": self.build,
            "verify_all": lambda *given: {"all_ok": True, "rows": 12, "checked": 4},
        }.items():
            monkeypatch.setattr(suite, name, value)

    def doctor(self, *words: str) -> ProcessRun:
        assert words[0] == "doctor"
        found = {"usable_by_torch": self.status["gpu"] == "ok"}
        checks = [
            {"key": key, "title": key, "status": status, "found": f"{key} found", "figures": found}
            for key, status in self.status.items()
        ]
        return ProcessRun(1.0, 1.0, 1, {"checks": checks})

    def build(self, root: Path, folder: Path, words: list[str], n_files: int) -> dict[str, float]:
        self.built.append(folder.name)
        self.now_s += self.seconds
        if self.fails(folder.name):
            raise LeakmelError("CUDA error")
        return a_build()


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


def test_geometries_and_engines_alternate(tmp_path, machine):
    figures = bench_gpu(tmp_path, rounds=2)
    turn = [f"{g}-{e}" for g in "AB" for e in MEASURED_ENGINES]
    assert machine.built == turn * 3, "one round that warms, two that count"
    assert figures["ok"]
    assert {f["rounds"] for f in figures["builds"].values()} == {2}
    assert (figures["not_measured"], figures["errors"]) == ([], [])


@pytest.mark.parametrize(("status", "is_error"), [("warn", True), ("missing", False)])
def test_incorrect_engine_gets_no_figure(tmp_path, machine, status, is_error):
    machine.status["engine_torch_cuda"] = status
    figures = bench_gpu(tmp_path)
    assert not [name for name in machine.built if name.endswith("torch")]
    assert [x["what"] for x in figures["not_measured"]] == ["engine torch"]
    assert bool(figures["errors"]) == is_error
    assert figures["ok"] != is_error


def test_a_gpu_that_torch_cannot_use_is_a_usage_error(tmp_path, machine):
    machine.status["gpu"] = "warn"
    with raises("no-gpu", found="gpu found"):
        bench_gpu(tmp_path)


def test_measurements_beyond_the_time_limit_are_named(tmp_path, machine):
    machine.seconds = 50.0
    figures = bench_gpu(tmp_path, budget_s=390)
    assert len(machine.built) == 7, "after a build of 50 s no other one is begun 40 s before the end"
    assert list(figures["builds"]) == ["A, triton"]
    assert {"what": "B, cpu", "why": "the time budget was used up before round 3 of 3"} in figures[
        "not_measured"
    ]
    assert "not measured: B, cpu (the time budget" in gpu_table(figures)


def test_an_error_loses_only_its_own_figure(tmp_path, machine):
    kept: list[str] = []
    machine.fails = lambda name: name == "A-torch"
    figures = bench_gpu(tmp_path, rounds=1, keep=lambda f: kept.append(json.dumps(f)))
    assert "A, torch" not in figures["builds"]
    assert len(figures["builds"]) == 5
    assert figures["errors"] == [{"what": "A, torch", "error": "CUDA error"}] * 2
    assert not figures["ok"]
    assert len(kept) == 3 + 2 * 6, "stored at the start, before and after the checks, and after each build"
    assert "ERROR in A, torch: CUDA error" in gpu_table(figures)


@each("k", [0, 1, 2, 3, 7, 14])
def test_record_of_a_killed_run_can_be_read(tmp_path, machine, k):
    "Whatever was measured by then is in it; it is not a result."
    n_stored = [0]

    def keep(figures: dict[str, Any]) -> None:
        store(figures, tmp_path / "store")
        n_stored[0] += 1
        if n_stored[0] > k:
            raise KeyboardInterrupt  # as good as a kill: nothing after this line runs

    with pytest.raises(KeyboardInterrupt):
        bench_gpu(tmp_path, rounds=1, commit_id="abc", keep=keep)
    (path,) = (tmp_path / "store").glob("*.json")
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert (figures["ok"], figures["finished"]) == (False, False)
    assert bool(figures["touched"]) == (k > 0)
    assert bool(figures["checks"]) == (k > 1)
    assert len(figures["builds"]) == max(0, k - 2 - 6), "the warm-up does not count"
    assert gpu_table(figures).startswith("UNFINISHED")
    assert newest("gpu", tmp_path / "store") is None


def test_without_compiled_code_no_figure_is_right(tmp_path, machine):
    machine.status["compiled"] = "missing"
    figures = bench_gpu(tmp_path, rounds=1)
    assert not figures["ok"]
    assert [x["what"] for x in figures["errors"]] == ["compiled code"]


def test_memory_is_touched_before_anything_is_measured(tmp_path, machine, monkeypatch):
    order: list[str] = []
    real = machine.build

    def touch(n_bytes: int) -> dict[str, float]:
        order.append("touched")
        return {"bytes": n_bytes, "seconds": 0.1}

    def build(*given: Any) -> dict[str, float]:
        order.append("built")
        return real(*given)

    monkeypatch.setattr(suite, "touch_memory", touch)
    monkeypatch.setattr(suite, "build_once", build)
    figures = bench_gpu(tmp_path, n_files=1000, rounds=1)
    assert order[0] == "touched"
    assert order.count("touched") == 1
    assert figures["touched"]["bytes"] > 2 * 1000 * 82_000, "recordings and data sets"


def test_memory_of_the_size_of_the_set_is_touched_before_each_build(tmp_path, monkeypatch):
    order: list[Any] = []

    def run(*words: str) -> None:
        order.append(words[0])
        raise LeakmelError("no build here")

    monkeypatch.setattr(bench, "touch_memory", order.append)
    monkeypatch.setattr(bench, "run_leakmel", run)
    with pytest.raises(LeakmelError):
        bench.run_build(tmp_path, tmp_path / "out", ["--split", "all"], 1000)
    assert order == [1000 * WAV_BYTES, "build"]


def test_touched_memory_stays_below_half_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(bench, "free_memory", lambda: 40 << 20)
    assert 19 << 20 < touch_memory(1 << 40)["bytes"] <= 20 << 20


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the system keeps the peak of a process"
)
def test_touched_memory_is_not_counted_in_later_processes(tmp_path):
    write_demo(tmp_path / "demo", n_files=6)
    touched = touch_memory(1 << 30)["bytes"]
    assert (
        run_leakmel("scan", str(tmp_path / "demo")).peak_rss_bytes
        < psutil.Process().memory_info().rss + touched / 2
    )


def test_wrong_rows_fail_the_suite(tmp_path, machine, monkeypatch):
    def verify_all(*given: Any) -> Any:
        raise LeakmelError("the command leakmel verify failed")

    monkeypatch.setattr(suite, "verify_all", verify_all)
    figures = bench_gpu(tmp_path)
    assert not figures["ok"]
    assert "ERROR in verify: the command leakmel verify failed" in gpu_table(figures)


def test_invalid_arguments_are_usage_errors(tmp_path):
    with raises("invalid-effort"):
        bench_gpu(tmp_path, rounds=0)
    with raises("invalid-effort"):
        bench_gpu(tmp_path, budget_s=0)


def test_the_table_has_the_figures_that_matter(tmp_path, machine):
    text = gpu_table(bench_gpu(tmp_path))
    assert "REHEARSAL" not in text
    for words in ("engine_triton: engine_triton found", "gpu found", "1,000  1,000-1,000", "2,000", "2.0"):
        assert words in text, words
    assert gpu_table(None) == "not measured"


# -- what a GPU has to settle ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rehearsal_takes_every_step_to_its_end(tmp_path):
    kept: list[dict[str, Any]] = []
    figures = bench_card.bench_card(
        tmp_path, rehearse=True, budget_s=600, keep=lambda f: kept.append(json.loads(json.dumps(f)))
    )
    assert (figures["errors"], figures["not_measured"]) == ([], [])
    assert figures["parity"]["status"] == 0
    assert set(figures["builds"]) == {"A, torch", "A, cpu", "B, torch", "B, cpu"}
    assert set(bench_card.NOMINAL) < set(figures["settings"])
    assert set(figures["training"]["training"]) > {"as trained", "one graph"}
    assert len(kept) > len(bench_card.STEPS) + len(figures["settings"])
    text = bench_card.card_table(figures)
    for words in ("REHEARSAL", "8 skipped", "A, cpu", "without graphs: ", "one graph", "2 threads"):
        assert words in text, words
    path = store(figures, tmp_path / "store")
    assert path.name.startswith("card-rehearsal-")
    assert newest("card", tmp_path / "store") is None


def test_settings_are_measured_on_a_device_that_replays_graphs(tmp_path):
    "The fake device runs asynchronously, and has graphs, streams and pinned memory."
    import fake_device

    fake_device.register()
    steps = {"settings": (1.0, bench_card.settings)}
    figures = bench_card.bench_card(tmp_path, rehearse=True, device=DEVICE, steps=steps, budget_s=600)
    assert figures["errors"] == []
    rates = {name: f["files_per_s"]["median"] for name, f in figures["settings"].items()}
    assert len(rates) == len(bench_card.NOMINAL) + 3
    assert all(rate > 0 for rate in rates.values())


def test_steps_without_time_are_named(tmp_path):
    write_demo(tmp_path / "demo-24", n_files=24)
    figures = bench_card.bench_card(tmp_path, rehearse=True, budget_s=1e-6)
    assert [x["what"] for x in figures["not_measured"]] == list(bench_card.STEPS)
    assert figures["errors"] == []


def test_one_step_that_fails_leaves_the_others(tmp_path):
    def fails(card: bench_card.Card, ends_s: float) -> None:
        raise RuntimeError("a device fault")

    def counts(card: bench_card.Card, ends_s: float) -> None:
        card.figures["cores"]["done"] = 1

    steps = {"wide": (1.0, fails), "cores": (1.0, counts)}
    figures = bench_card.bench_card(tmp_path, rehearse=True, steps=steps)
    assert figures["errors"] == [{"what": "wide", "error": "a device fault"}]
    assert figures["cores"] == {"done": 1}
    assert figures["ok"] is False


@each(
    ("least", "most", "said"),
    [
        (1.05, 1.10, "1.08 x: shown"),
        (0.90, 0.96, "0.93 x: shown"),
        (1.01, 1.04, "1.02 x: no effect is shown"),
        (0.99, 1.21, "1.10 x: no effect is shown"),
    ],
    ids=["faster", "slower", "under 3 %", "ranges overlap"],
)
def test_an_effect_counts_from_3_percent_outside_the_noise(least, most, said):
    figures = {
        "as it is": {"files_per_s": bench.spread([0.999, 1.0, 1.001])},
        "1 stream": {"files_per_s": bench.spread([least, most])},
    }
    assert bench_card.verdicts(figures) == [f"1 stream: {said}"]


def test_a_step_in_one_graph_learns_what_a_step_learns(tmp_path):
    "On a CPU, where a call stands for the graph."
    import leakmel as lm

    write_demo(tmp_path / "demo", n_files=24)
    lm.build(tmp_path / "demo", split="training", out=tmp_path / "x.h5", progress="none")
    settings = TrainSettings(channels=(4, 8), batch_size=16, epochs=2, dropout=0.0, epoch_share=1.0)
    found = []
    for in_one in (False, True):
        with open_training(str(tmp_path / "x.h5"), settings=settings) as data:
            state = TrainingState(data, settings, "cpu")
            with state.loader:
                step = StepInOneGraph(state.stepper, lambda work: work) if in_one else state.stepper.step
                losses = [float(step(batch).loss) for _ in range(2) for batch in state.loader]
            found.append((losses, [p.detach().clone() for p in state.stepper.net.parameters()]))
    (losses, weights), (others, other_weights) = found
    assert len(losses) > StepInOneGraph.WARM
    assert losses == pytest.approx(others, rel=1e-5)
    for a, b in zip(weights, other_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# -- records --------------------------------------------------------------------------------------------------------------


def test_rehearsals_are_not_recorded_as_figures(tmp_path):
    figures = {
        "suite": "gpu",
        "made_utc": "2026-01-02T00:00:00+00:00",
        "commit": "0123456789",
        "rehearsal": False,
    }
    store(
        figures | {"suite": "gpu-rehearsal", "rehearsal": True, "made_utc": "2026-01-03T00:00:00+00:00"},
        tmp_path,
    )
    store(figures | {"suite": "gpu-rehearsal", "made_utc": "2026-01-03T01:00:00+00:00"}, tmp_path)
    assert newest("gpu", tmp_path) is None
    store(figures | {"rehearsal": True, "made_utc": "2026-01-04T00:00:00+00:00"}, tmp_path)
    assert newest("gpu", tmp_path) is None
    store(figures, tmp_path)
    assert newest("gpu", tmp_path) == figures
    for _ in range(2):
        store(figures | {"made_utc": "2026-01-02T09:00:00+00:00"}, tmp_path)
    assert sorted(p.name for p in tmp_path.glob("gpu-2*")) == [
        "gpu-20260102T000000-01234567.json",
        "gpu-20260102T090000-01234567.json",
        "gpu-20260104T000000-01234567.json",
    ]


# -- the set --------------------------------------------------------------------------------------------------------------


def test_the_set_is_the_demo_set_byte_for_byte(tmp_path):
    write_demo(tmp_path / "demo", n_files=40)
    output: list[str] = []
    root = synthetic_set_of_size(tmp_path / "work", 40, output.append)

    def content(root: Path) -> dict[str, bytes]:
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*.wav")}

    assert content(root) == content(tmp_path / "demo")
    assert synthetic_set_of_size(tmp_path / "work", 40, output.append) == root
    assert len(output) == 1, "one that exists is used again"


def test_demo_set_without_space_leaves_no_files(tmp_path):
    with pytest.raises(SpaceError):
        synthetic_set_of_size(tmp_path, 10**10)
    assert not list(tmp_path.iterdir())


def test_gpu_with_few_facts_is_described(monkeypatch):
    def fails(*args: Any) -> None:
        raise RuntimeError("not supported")

    known = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetName": lambda gpu: b"a card",
        "nvmlDeviceGetClockInfo": fails,
        "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
    }
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(**known))
    facts = card_facts()
    assert (facts["name"], facts["power_limit_w"]) == ("a card", 700)
    assert facts["driver"] is facts["sm_mhz"] is facts["pcie_lanes"] is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvml" in card_facts()


# -- on a card ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_suite_on_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    figures = bench_gpu(tmp_path, n_files=2000, rounds=1, budget_s=200)
    assert figures["errors"] == []
    assert figures["builds"]["A, torch"]["files_per_s"]["median"] > 0
    assert figures["builds"]["A, torch"]["copy_in_bytes"]["median"] > 0
