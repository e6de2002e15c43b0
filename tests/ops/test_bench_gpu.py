"The suite for a machine with a GPU: all of it on a bare image, parity before figures, a budget that is kept, and rehearsals that are no figures."

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bench_gpu_design
import numpy as np
import pytest
import torch
from errors import raises

from leakmel.audio.synth import write_demo
from leakmel.cli import main
from leakmel.core.errors import SpaceError
from leakmel.mel.engines import ENGINES
from leakmel.mel.torch_engine import TorchEngine
from leakmel.ops import bench, bench_gpu_parts
from leakmel.ops.bench import newest, store, synthetic_set_of_size
from leakmel.ops.bench_gpu import bench_gpu, gather, gpu_table, plan_parts
from leakmel.ops.bench_gpu_parts import Worker, answer, build_figures

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
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "bare"), str(ROOT / "tests")]),
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


# The whole suite in one process, on the device of the tests; a command of its own would not know that device.
WHOLE = """
import fake_device, sys
fake_device.register()
from leakmel.ops.bench import store
from leakmel.ops.bench_gpu import bench_gpu, gpu_table, plan_parts
from leakmel.ops.bench_gpu_parts import answer

class Here:
    def ask(self, request, limit_s): return answer(request)
    def close(self): pass

def plan(*given): return [p for p in plan_parts(*given) if p.group != "processes"]

figures = bench_gpu(sys.argv[1], n_files=48, rounds=1, device=sys.argv[3], engines=("torch",), tiny=True, plan=plan, start_worker=Here, commit_id="0123abcd")
print(gpu_table(figures))
store(figures, sys.argv[2])
"""


@pytest.mark.slow
def test_all_of_it_on_a_bare_image(tmp_path, bare):
    done = bare("-c", WHOLE, tmp_path / "work", tmp_path / "store", DEVICE)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "store").iterdir()
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert path.name.startswith("gpu-rehearsal-")
    assert (figures["suite"], figures["rehearsal"]) == ("gpu-rehearsal", True)
    assert figures["errors"] == []
    assert figures["finished"]
    assert figures["ok"]
    missed = [x["what"] for x in figures["not_measured"]]
    asked = {tuple(what.split(": ", 1)) for what in figures["order"]} - {("varied", "cold")}
    assert set(missed) <= {"varied: cold"}, "the file system may keep its page cache"
    assert all(name in figures[group] for group, name in asked), "each question has its answer"
    checks = figures["parity"]["torch"]["checks"]
    assert len(checks) == 12
    assert all(c["ok"] for c in checks.values())
    for name in ("A, torch", "B, torch"):
        build = figures["builds"][name]
        assert build["found"]["median"] == build["rows"]["median"] == figures["n_files"] == 48
        assert build["copy_in_bytes"]["median"] == 48 * 2 * 40_960
        for key in ("listing_s", "opening_s", "pinning_s", "work_s", "cpu_s"):
            assert 0 <= build[key]["least"] < 30
        assert figures["verified"][name]["ok"]
    assert done.stdout.startswith("REHEARSAL")
    assert [p.name for p in (tmp_path / "work").iterdir()] == ["demo-48"], (
        "data sets are removed, recordings stay"
    )
    assert newest("gpu", tmp_path / "store") is None


@pytest.mark.slow
def test_builds_and_checks_on_a_bare_image(tmp_path, bare):
    write_demo(tmp_path / "set", n_files=12)
    words = ("--split", "training", "--device", "cpu", "--engine", "torch", "--quiet")
    done = bare("-m", "leakmel", "build", tmp_path / "set", "--out", tmp_path / "x.h5", *words)
    assert done.returncode == 0, done.stderr
    verify = ("verify", tmp_path / "x.h5", "--root", tmp_path / "set", "--sample", "all")
    assert bare("-m", "leakmel", *verify).returncode == 0


@pytest.mark.slow
def test_gpu_tests_can_be_collected_on_a_bare_image(bare):
    "Files that hold no such test are not imported: some of them need what is missing there."
    done = bare("-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    files = {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    with_mark = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "tests").rglob("test_*.py")
        if "@pytest.mark." + "gpu" in p.read_text(encoding="utf-8")
    }
    assert with_mark | {"tests/mel/test_mel.py"} <= files
    assert "tests/audio/test_wav.py" not in files


def test_missing_device_reports_a_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(bench_gpu.__kwdefaults__, "start_worker", InThisProcess)
    assert main(["bench", str(tmp_path / "work"), "--suite", "gpu", "--out", str(tmp_path / "store")]) == 2
    said = capsys.readouterr().err
    assert "needs a CUDA device" in said
    assert not list(tmp_path.iterdir()), "nothing is written"


# -- those who answer -----------------------------------------------------------------------------------------------------


class InThisProcess:
    "Answers truly, without a process of its own."

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        return answer(request)

    def close(self) -> None:
        pass


class Clock:
    "A time that is set."

    now = 0.0

    def __call__(self) -> float:
        return self.now


def a_build(files_per_s: float = 1000.0, **more: Any) -> dict[str, Any]:
    "Figures as a build has them."
    stages = ("listing", "opening", "pinning", "read", "compute", "copy_out", "write", "publish", "verify")
    return dict.fromkeys([f"{s}_s" for s in stages], 0.125) | {
        "work_s": 1.0,
        "files_per_s": files_per_s,
        "files_per_s_with_listing_and_opening": 500.0,
        "cpu_s": 2.0,
        "peak_rss_bytes": 1e9,
        "torch_vram_bytes": None,
        "copy_in_s": 0.5,
        "copy_in_bytes": 1e9,
        "disk_read_bytes": 10**9,
        **more,
    }


CANNED: dict[str, dict[str, Any]] = {
    "card": {"usable": True, "name": "a card", "torch": "2.11", "cuda": "13.0", "nvml": {"driver": "1.2"}},
    "parity": {"ok": True, "checks": {"A": {"ok": True, "max_abs_db": 0.01}}},
    "copy_alone": {"1000000": {"in": [4.0], "out": [3.0]}},
    "one_build": a_build(),
    "own_process": {"process_s": 5.0, "to_first_batch_s": 3.0, "files_per_s": 900.0},
    "evict_all": {"files": 12},
    "verify_built": {"ok": True, "rows": 12, "checked": 4, "problems": []},
}


class Canned:
    "Answers at once, takes as long as is said, and keeps what it was asked."

    seconds, clock, fails = 1.0, Clock(), staticmethod(lambda request: None)
    asked: list[dict[str, Any]]
    hired = 0

    def __init__(self):
        type(self).hired += 1

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        self.asked.append(request)
        self.clock.now += self.seconds
        error = self.fails(request)
        return ({"error": error} if error else {"figures": dict(CANNED[request["what"]])}) | {
            "seconds": self.seconds,
            "warnings": [],
        }

    def close(self) -> None:
        pass


def canned(**changes: Any) -> type[Canned]:
    "Somebody who answers, with a clock and a record of its own."
    return type("Someone", (Canned,), {"clock": Clock(), "asked": [], "hired": 0} | changes)


def suite(folder: Path, start_worker: type, **options: Any) -> dict[str, Any]:
    "The suite on 12 recordings."
    settings: dict[str, Any] = {
        "n_files": 12,
        "start_worker": start_worker,
        "clock": getattr(start_worker, "clock", time.monotonic),
    } | options
    return bench_gpu(folder, **settings)


# -- parity comes first ---------------------------------------------------------------------------------------------------


class AlteredChain:
    "A chain whose result is changed a little."

    def __init__(self, chain: Any, change: Callable[[torch.Tensor], None]):
        self._chain, self.granule, self._change = chain, chain.granule, change

    def features(self, x: torch.Tensor, mels: torch.Tensor, moments: torch.Tensor | None) -> None:
        self._chain.features(x, mels, moments)
        self._change(mels)


class AlteredEngine(TorchEngine):
    "An engine that passes its self-check and is wrong all the same."

    change: Callable[[torch.Tensor], None]

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        for flight in (f for r in self.runners for f in r.buffers):
            flight.chain = AlteredChain(flight.chain, type(self).change)


class WrongFromTheNinthRow(AlteredEngine):
    @staticmethod
    def change(mels: torch.Tensor) -> None:
        mels[8:, ..., -1, :] += 1


class OtherBitsAlone(AlteredEngine):
    "One unit in the last place, where a block holds a single recording."

    @staticmethod
    def change(mels: torch.Tensor) -> None:
        if len(mels) == 1:
            mels.view(torch.int16)[0, 0, 0, 0] += 1


@pytest.fixture
def quick_parity(monkeypatch):
    "Parity with one small spec."
    spec = bench_gpu_parts.parity_specs(tiny=True)["A"]
    monkeypatch.setattr(
        bench_gpu_parts, "parity_specs", lambda tiny=False: {name: spec for name in ("A", "B")}
    )


@pytest.mark.parametrize(
    ("kind", "failed"), [(WrongFromTheNinthRow, "a full block"), (OtherBitsAlone, "same bits")]
)
def test_an_engine_that_is_wrong_gets_no_figure(tmp_path, monkeypatch, quick_parity, kind, failed):
    monkeypatch.setitem(ENGINES, "torch", ("test_bench_gpu", kind.__name__))
    monkeypatch.setitem(sys.modules, "test_bench_gpu", sys.modules[__name__])
    figures = suite(tmp_path, InThisProcess, device=DEVICE, tiny=True, rounds=1, engines=("torch",))
    checks = figures["parity"]["torch"]["checks"]
    assert {f"A, {failed}", f"B, {failed}"} <= {name for name, c in checks.items() if not c["ok"]}
    assert checks["A"]["ok"], "three recordings do not show it"
    assert not {"alone", "builds", "varied"} & set(figures)
    assert [x["what"] for x in figures["not_measured"]] == ["engine torch"]
    assert [x["what"] for x in figures["errors"]] == ["parity: torch", "engines"]
    assert not figures["ok"]
    assert "parity of torch: NOT RIGHT" in gpu_table(figures)


def test_the_other_engine_goes_on(tmp_path):
    start_worker = canned(
        fails=staticmethod(
            lambda r: "it is wrong" if r["what"] == "parity" and r["engine"] == "triton" else None
        )
    )
    figures = suite(tmp_path, start_worker)
    assert set(figures["builds"]) == {"A, torch", "B, torch"}
    assert not [
        r for r in start_worker.asked if r["engine"] == "triton" and r["what"] not in ("card", "parity")
    ]
    assert not figures["ok"]


def test_an_engine_that_is_not_installed_is_no_error(tmp_path, monkeypatch, quick_parity):
    monkeypatch.setitem(ENGINES, "triton", ("leakmel.mel.no_such_engine", "NoEngine"))
    got = answer({"what": "parity", "engine": "triton", "device": DEVICE})["figures"]
    assert "no_such_engine" in got["missing"]


# -- time -----------------------------------------------------------------------------------------------------------------


def test_what_matters_least_is_left_out_and_named(tmp_path):
    whole = suite(tmp_path / "a", canned(), budget_s=10_000)
    assert whole["ok"]
    assert whole["not_measured"] == []
    some = canned()
    figures = suite(tmp_path / "b", some, budget_s=14)
    parts = plan_parts(["triton", "torch"], 3)
    asked = [r["what"] for r in some.asked if r["what"] not in ("card", "parity")]
    assert asked == [p.request["what"] for p in parts[: len(asked)]]
    assert 9 < len(asked) < 12
    assert {x["what"] for x in figures["not_measured"]} == {
        f"{p.group}: {p.name}" for p in parts[len(asked) :]
    }
    reasons = {x["what"]: x["why"] for x in figures["not_measured"]}
    assert reasons["builds: B, torch"] == "the time budget was used up after 1 of its rounds"
    assert reasons["varied: cold"] == "the time budget was used up"
    assert figures["builds"]["B, torch"]["rounds"] == 1
    assert figures["finished"]
    assert "not measured: varied: cold (the time budget was used up)" in gpu_table(figures)
    assert figures["seconds"] <= 14


def test_the_order_of_importance():
    names = [f"{p.group}: {p.name}" for p in plan_parts(["triton", "torch"], 3)]
    at = [names.index(n) for n in ("alone: bus", "builds: A, triton", "processes: A, triton", "varied: cold")]
    assert at == sorted(at)
    assert names.count("builds: B, torch") == 4, "one that warms, three that count"
    rounds = [i for i, name in enumerate(names) if name.startswith("builds: ")]
    assert rounds == list(range(rounds[0], rounds[0] + 16)), "the engines and geometries take turns"


def test_the_parts_of_the_design_are_asked_for_in_their_order():
    names = [f"{p.group}: {p.name}" for p in bench_gpu_design.design_parts(["triton", "torch"], 3)]
    wanted = ("kernel: A, triton, block 1024", "builds: A, triton", "varied: graph off", "varied: streams 4")
    at = [names.index(n) for n in (*wanted, "varied: mode preload")]
    assert at == sorted(at)
    assert names.count("varied: as it is") == 3


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_part_of_the_design_answers(tmp_path, quick_parity, is_whole):
    "In the short run, one value of each setting that is varied."

    def plan(*given: Any) -> list[Any]:
        parts = [p for p in bench_gpu_design.design_parts(*given) if p.group != "processes"]
        first = {p.name.split()[0]: p for p in reversed(parts) if p.group == "varied"}
        return [p for p in parts if is_whole or p.group != "varied" or first[p.name.split()[0]] is p]

    figures = bench_gpu_design.bench_gpu_design(
        tmp_path,
        n_files=24,
        rounds=1,
        device=DEVICE,
        tiny=True,
        engines=("torch",),
        start_worker=InThisProcess,
        plan=plan,
    )
    assert figures["errors"] == []
    text = bench_gpu_design.design_table(figures)
    for words in (
        "kernel alone, A, torch",
        "of the floor's",
        "graph off",
        "both ways at once",
        "kept ",
    ):
        assert words in text, words


def test_a_group_of_slow_questions_ends_the_run(tmp_path):
    "After a build of 50 s no other one is begun 40 s before the end."
    figures = suite(tmp_path, slow := canned(seconds=50.0), budget_s=390)
    assert [r["what"] for r in slow.asked] == ["card", "parity", "parity", "copy_alone", *["one_build"] * 3]
    assert figures["seconds"] == 350
    assert {"builds: A, triton", "varied: cold"} <= {x["what"] for x in figures["not_measured"]}


# -- what goes wrong ------------------------------------------------------------------------------------------------------


def test_an_error_loses_only_its_own_figure(tmp_path):
    kept: list[dict[str, Any]] = []
    start_worker = canned(
        fails=staticmethod(lambda r: "CUDA error" if r.get("settings") and r["name"] == "A" else None)
    )
    (tmp_path / "cache").mkdir()
    figures = suite(tmp_path, start_worker, keep=lambda f: kept.append(json.loads(json.dumps(f))))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "demo-12"], "only what it made is removed"
    assert "fsync on" not in figures["varied"]
    assert "cold" in figures["varied"]
    assert figures["errors"] == [{"what": "varied: fsync on", "error": "CUDA error"}]
    assert (figures["ok"], figures["finished"]) == (False, True)
    assert start_worker.hired == 2 + 1, "one for each engine, and a new one after each error"
    assert kept[5]["finished"] is False
    assert len(kept) == 1 + len(plan_parts(["triton", "torch"], 3)), "stored after each answer"
    assert "ERROR in varied: fsync on: CUDA error" in gpu_table(figures)


def test_a_cold_build_counts_only_if_the_disk_delivered(tmp_path):
    def warm(self: Canned, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        return Canned.ask(self, request, limit_s) | (
            {"figures": a_build(disk_read_bytes=0)} if request["what"] == "one_build" else {}
        )

    figures = suite(tmp_path / "a", canned(ask=warm))
    assert "cold" not in figures["varied"]
    (why,) = (x["why"] for x in figures["not_measured"] if x["what"] == "varied: cold")
    assert "the page cache was not dropped: the disk delivered 0 of 1 MB" in why
    assert "cold" in suite(tmp_path / "b", canned())["varied"]


def test_rows_that_are_not_right_fail_the_suite(tmp_path, monkeypatch):
    monkeypatch.setitem(
        CANNED, "verify_built", {"ok": False, "rows": 12, "checked": 4, "problems": ["row 3 is wrong"]}
    )
    figures = suite(tmp_path, canned())
    assert not figures["ok"]
    assert {"what": "verified: A, triton", "error": "row 3 is wrong"} in figures["errors"]


def test_wrong_words_are_usage_errors(tmp_path):
    for options in ({"rounds": 0}, {"budget_s": 0}):
        with raises("invalid-effort"):
            suite(tmp_path, canned(), **options)


def test_a_process_that_dies_or_hangs_is_an_error_in_the_answer():
    worker = Worker()
    assert "error" in worker.ask({"what": "card", "device": DEVICE}, 0.01)
    worker.close()
    worker = Worker()
    os.kill(worker._process.pid, 9)
    assert "ended with status -9" in worker.ask({"what": "card", "device": DEVICE}, 60)["error"]
    worker.close()


def test_an_answer_carries_what_was_warned_of(monkeypatch):
    import logging

    def warns() -> dict[str, Any]:
        logging.getLogger("leakmel").warning("going on without a graph")
        return {}

    monkeypatch.setitem(answer.__globals__["QUESTIONS"], "warns", warns)
    assert answer({"what": "warns", "engine": "torch", "root": ""})["warnings"] == [
        "going on without a graph"
    ]
    assert "unexpected keyword" in answer({"what": "warns", "n_blok": 3})["error"]


# -- figures --------------------------------------------------------------------------------------------------------------


def test_what_follows_from_figures():
    figures: dict[str, Any] = {}
    builds = [a_build(900.0), a_build(1000.0), a_build(1300.0)]
    gather(figures, {("alone", "bus"): [CANNED["copy_alone"]], ("builds", "A, triton"): builds})
    build = figures["builds"]["A, triton"]
    assert build["files_per_s"] == {"median": 1000.0, "least": 900.0, "most": 1300.0}
    assert build["rounds"] == 3
    assert build["bus"] == {
        "copying_gb_per_s": 2.0,
        "whole_gb_per_s": 1.0,
        "copying_share": 0.5,
        "whole_share": 0.25,
    }


def test_a_build_is_timed_from_its_first_file_to_its_last_data_set(demo, tmp_path):
    import leakmel as lm

    results = lm.build_all(
        demo,
        out_dir=tmp_path,
        pipeline=lm.PipelineConfig(device=DEVICE, fsync=False),
        engine="torch",
        progress="none",
    )
    figures, spans = build_figures(results, 0.25), results[0].timeline.spans
    first, last = (
        min(s.start_s for s in spans if s.stage == "read"),
        max(s.end_s for s in spans if s.stage == "publish"),
    )
    assert figures["work_s"] == pytest.approx(last - first)
    assert figures["files_per_s"] == pytest.approx(60 / (last - first))
    assert figures["copy_in_bytes"] == 60 * 2 * 40_960
    assert figures["all_s"] > figures["work_s"]
    assert figures["listing_s"] == 0.25


def test_rehearsals_are_no_figures(tmp_path):
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
        "gpu-20260102-01234567-2.json",
        "gpu-20260102-01234567.json",
        "gpu-20260104-01234567.json",
    ]


def test_the_table_has_the_figures_that_matter(tmp_path):
    text = gpu_table(suite(tmp_path, canned()))
    assert "REHEARSAL" not in text
    for words in (
        "a card, driver 1.2, CUDA 13.0, torch 2.11",
        "parity of triton: right (1 checks, at most 0.0100 dB)",
        "1,000  1,000-1,000",
        "plain copy of 1.0 MB: in 4.0, out 3.0 GB/s",
        "fsync on",
        "process, A, torch",
    ):
        assert words in text, words
    assert "must" not in text
    assert gpu_table(None) == "not measured"


# -- the set --------------------------------------------------------------------------------------------------------------


def test_the_set_is_the_demo_set_byte_for_byte(tmp_path):
    write_demo(tmp_path / "demo", n_files=40)
    said: list[str] = []
    root = synthetic_set_of_size(tmp_path / "work", 40, said.append)

    def content(root: Path) -> dict[str, bytes]:
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*.wav")}

    assert content(root) == content(tmp_path / "demo")
    assert synthetic_set_of_size(tmp_path / "work", 40, said.append) == root
    assert len(said) == 1, "one that exists is used again"


def fail_share(*given: Any) -> None:
    raise OSError("no room")


def test_a_set_without_room_or_with_a_share_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda n, context: ThreadPoolExecutor(n))
    monkeypatch.setattr(bench, "write_share", fail_share)
    with pytest.raises(OSError, match="no room"):
        synthetic_set_of_size(tmp_path, 40)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SpaceError):
        synthetic_set_of_size(tmp_path, 10**10)


def test_a_card_that_answers_little_is_still_described(monkeypatch):
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
    facts = bench_gpu_parts.card_facts()
    assert (facts["name"], facts["power_limit_w"]) == ("a card", 700)
    assert facts["driver"] is facts["sm_mhz"] is facts["pcie_lanes"] is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvml" in bench_gpu_parts.card_facts()


# -- on a card ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_suite_on_a_card(tmp_path):
    "Small, but with the sizes of the real one."
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    figures = bench_gpu(tmp_path, n_files=2000, rounds=1, budget_s=200)
    assert figures["errors"] == []
    assert figures["parity"]["torch"]["ok"]
    assert np.isfinite(figures["builds"]["A, torch"]["files_per_s"]["median"])
    Worker().close()
