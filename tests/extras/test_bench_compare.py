"The comparison with other tools: verified results only, missing or broken tools are named, and memory is that of the process tree."

import errno
import importlib.util
import os
import platform
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import bench_compare as suite
import bench_figures
import contestants
import pytest
from bench_compare import (
    Contestant,
    add_figures,
    against_targets,
    all_contestants,
    check_file,
    compare_markdown,
    compare_table,
    in_turn,
    linked_set,
    part_of,
    run_once,
)
from bench_gpu import geometry_spec
from contestants import LIMIT, TOOLS, compiled_c, list_split
from each import each
from process_tree import run_command

from leakmel.core.errors import LeakmelError, MachineError, OutputError, UsageError
from leakmel.extras.machine.bench import run_leakmel
from leakmel.mel.engines import EngineUnavailable
from leakmel.mel.spec import MelSpec
from leakmel.recordings.demo import write_demo

pytestmark = pytest.mark.site

HELPERS = str(Path(suite.__file__).parent)

# A contestant whose file is right, unless it is told what to do wrong.
PLANTED = """
import json, sys, time
root, out, geometry, wrong, helpers = sys.argv[1:]
sys.path.append(helpers)
if wrong == "missing": sys.exit(print(json.dumps({"missing": "No module named 'frobnicate'"})))
if wrong == "crash": raise ValueError("it broke in the middle")
import h5py, numpy as np
from leakmel.recordings.wav import read_wav
from leakmel.mel.spec import reference_log_mel
from bench_gpu import geometry_spec
from contestants import list_split
began = time.perf_counter()
paths, ids = list_split(root)
rows = np.stack([reference_log_mel(read_wav(p).samples[:, 0], geometry_spec(geometry)) for p in paths]).astype(np.float16)
if wrong == "buffer": rows[40:] = rows[:len(rows) - 40]      # as a shared buffer does: right as long as there are few
if wrong == "labels": ids = ids[::-1]
if wrong == "shape": rows = rows[..., 0]
if wrong != "nothing":
    with h5py.File(out, "w") as f: f["segments_mel"], f["labels"] = rows, ids
print("a line that is no figure")
print(json.dumps({"seconds": time.perf_counter() - began, "versions": {"planted": "1"}}))
"""


def planted(wrong: str = "") -> Contestant:
    return Contestant(
        f"planted {wrong}",
        lambda root, out, geometry: [
            sys.executable,
            "-c",
            PLANTED,
            str(root),
            str(out),
            geometry,
            wrong,
            HELPERS,
        ],
    )


@pytest.fixture
def hide(tmp_path, monkeypatch):
    "Hide packages from the processes that are started."

    def without(*names: str) -> None:
        (tmp_path / "hidden").mkdir()
        (tmp_path / "hidden" / "sitecustomize.py").write_text(
            textwrap.dedent(f"""
            import sys
            class Hidden:
                def find_spec(self, name, path=None, target=None):
                    if name.split(".")[0] in {set(names)!r}: raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
            sys.meta_path.insert(0, Hidden())"""),
            encoding="utf-8",
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hidden"))

    return without


# -- the whole suite ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_suite_end_to_end(tmp_path, hide):
    hide("librosa")
    who = "scipy threads, librosa, leakmel reference"
    figures = suite.bench_compare(tmp_path / "work", n_files=12, originals=8, rounds=1, only=who)
    text = compare_table(figures)
    linked = list((tmp_path / "work" / "linked").rglob("*.wav"))
    assert (len(linked), len({p.stat().st_ino for p in linked})) == (12, 8)
    assert "up to 12 files (hard links to 8 recordings, which leakmel reports as duplicates), 1 round" in text
    assert (figures["suite"], figures["n_files"], figures["caches"], figures["ok"]) == (
        "compare",
        12,
        ["warm"],
        True,
    )
    assert figures["machine"]["n_cores"] >= 1
    assert figures["commit"] is None or len(figures["commit"]) == 40
    assert figures["ratio_to"] == {"A, warm": "scipy threads", "B, warm": "scipy threads"}, (
        "the best that is there, for want of DALI"
    )
    for name in ("scipy threads", "leakmel reference"):
        entry = figures["contestants"][name]
        assert (entry["status"], entry["n_files"], entry["check"]["B"]["checked"]) == (
            "ok",
            {"A": 12, "B": 12},
            24,
        )
        assert 0 < entry["check"]["A"]["max_abs_db"] < 0.06
        for setting in ("A, warm", "B, warm"):
            (one,) = entry["rounds"][setting]
            assert (
                entry["figures"][setting]["files_per_s"]["median"]
                == one["files_per_s"]
                == 12 / one["seconds"]
            )
            assert 0 < one["seconds"] < one["process_s"]
            assert one["cpu_s"] > 0
        assert all(20e6 < peak < 3e9 for peak in entry["peak_bytes"].values())
    assert figures["contestants"]["scipy threads"]["versions"].keys() == {"scipy", "numpy", "h5py"}
    absent = figures["contestants"]["librosa"]
    assert (absent["status"], absent["rounds"], absent["figures"]) == ("not installed", {}, {})
    assert "librosa: not installed: No module named 'librosa'" in text
    assert "A: 80 frames a file; B: 237 frames a file, 159 of them distinct; 64 bands" in text
    assert "measure starting up more than anything else: leakmel reference, " in text, "twelve recordings"
    assert "MUST" not in text
    assert any(
        line.startswith("leakmel reference ") and f"{12 / one['seconds']:,.0f}" in line
        for line in text.splitlines()
    )
    assert "| librosa | not installed: No module named 'librosa' |" in compare_markdown(figures)
    assert "scipy threads" in compare_markdown(figures)
    assert not (tmp_path / "work" / "compare").exists(), "results and parts are taken away"


@pytest.mark.slow
def test_only_correct_tools_get_figures(tmp_path):
    wrong = {
        "buffer": "not right",
        "labels": "not right",
        "shape": "not right",
        "nothing": "not right",
        "crash": "failed",
        "missing": "not installed",
    }
    output: list[str] = []
    figures = suite.bench_compare(
        tmp_path,
        n_files=60,
        rounds=2,
        run_s=60,
        who={"right": planted(), **{w: planted(w) for w in wrong}},
        log=output.append,
    )
    entries = figures["contestants"]
    assert {name: entries[name]["status"] for name in wrong} == wrong
    assert not any(
        entries[name]["rounds"] or entries[name]["figures"] or entries[name]["ratio"] for name in wrong
    )
    assert "rows are not right, first row 4" in entries["buffer"]["why"]
    assert "labels" in entries["labels"]["why"]
    assert "segments_mel is float16" in entries["shape"]["why"]
    assert "no HDF5 file" in entries["nothing"]["why"]
    assert "ended with status 1" in entries["crash"]["why"]
    assert "ValueError: it broke in the middle" in entries["crash"]["why"]
    assert "frobnicate" in entries["missing"]["why"]
    right = entries["right"]
    assert (right["status"], right["n_files"]) == ("ok", {"A": 60, "B": 60})
    assert right["check"]["A"]["checked"] == 48 + 24, "all of few, then a sample of many"
    assert [len(right["rounds"][s]) for s in ("A, warm", "B, warm")] == [2, 2]
    assert figures["ok"] is False
    assert figures["ratio_to"] == {"A, warm": "right", "B, warm": "right"}
    table = compare_table(figures)
    assert "NOT RIGHT: " in table
    assert "FAILED: " in table
    assert "missing: not installed" in table
    assert any("round 2 of 2: B, warm: right" in line for line in output)


def test_failed_round_removes_all_figures_of_a_tool(tmp_path, demo, monkeypatch):
    "A figure of the rounds before would stand for a tool that breaks."
    entry = {"status": "ok", "n_files": {"A": 4, "B": 4}, "rounds": {}}

    def run(contestant: Contestant, root: Path, out: Path, geometry: str, **options: object) -> dict:
        if geometry == "B":
            raise LeakmelError("gone")
        return {"files_per_s": 1.0, "cpu_s": 1.0, "versions": {}, "peak_bytes": None}

    monkeypatch.setattr(suite, "run_once", run)
    every = {"a": entry, "b": dict(entry, rounds={}, status="not installed")}
    suite._run_rounds(
        suite.Ground(demo, tmp_path, 4, 1), {"a": planted(), "b": planted()}, every, 2, ["warm"], print
    )
    assert (entry["status"], entry["rounds"]) == ("failed", {})
    assert every["b"]["rounds"] == {}


@each(("per_s", "expected"), [(10_000.0, [48, 48, 900]), (20.0, [48, 48, 120]), (0.1, [48, 48])])
def test_compile_time_does_not_reduce_the_number_of_recordings(per_s, expected, demo, tmp_path, monkeypatch):
    asked: list[int] = []

    def run(contestant: Contestant, root: Path, out: Path, geometry: str, **options: object) -> dict:
        asked.append(int(root.name))
        return {"seconds": asked[-1] / per_s + 60 * (len(asked) == 1), "versions": {}, "peak_bytes": 1}

    monkeypatch.setattr(suite, "run_once", run)
    monkeypatch.setattr(suite, "check_file", lambda *given: {"ok": True, "checked": 1, "max_abs_db": 0.0})
    monkeypatch.setattr(suite.Ground, "part", lambda self, n: Path(str(n)))
    assert suite.admit(suite.Ground(demo, tmp_path, 900, 6), "a", planted(), "A")["n_files"] == expected[-1]
    assert asked == expected


def test_invalid_arguments_are_refused(tmp_path):
    with pytest.raises(UsageError, match="dalli"):
        suite.bench_compare(tmp_path, only="dalli")
    with pytest.raises(UsageError, match="rounds"):
        suite.bench_compare(tmp_path, rounds=0)
    with pytest.raises(UsageError, match="originals"):
        suite.bench_compare(tmp_path, originals=0)
    with pytest.raises(UsageError, match="time"):
        suite.bench_compare(tmp_path, run_s=0)
    assert list(tmp_path.iterdir()) == [], "nothing was written before"


# -- each tool ------------------------------------------------------------------------------------------------------------


def is_installed_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False  # not even its parent


@pytest.fixture(scope="module")
def few(demo, tmp_path_factory) -> Path:
    "A batch of recordings and some of another."
    return part_of(demo, tmp_path_factory.mktemp("few"), 19)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",  # "read first" computes as torchaudio does
    [pytest.param(n, marks=pytest.mark.long if n == "read first" else []) for n in TOOLS if n != LIMIT],
)
def test_each_tool_is_correct_with_overlapping_segments(name, few, tmp_path):
    "On a number of recordings that fills no whole batch; what is not installed says so."
    out = tmp_path / "T.H5"
    if not all(map(is_installed_here, TOOLS[name].modules)):
        with pytest.raises(EngineUnavailable, match=TOOLS[name].modules[0].split(".")[0]):
            run_once(all_contestants()[name], few, out, "B")
        return
    done = run_once(all_contestants()[name], few, out, "B")
    assert len(list_split(few)[0]) == 19, "one batch of 16, and 3"
    assert done["n_files"] == len(list_split(few)[0])
    assert TOOLS[name].modules[0].split(".")[0] in {m.split(".")[0] for m in done["versions"]}
    verdict = check_file(out, few, geometry_spec("B"))
    assert verdict["ok"], verdict
    assert verdict["checked"] == done["n_files"]


@pytest.mark.parametrize("geometry", ["A", "B"])
def test_c_without_checks_is_correct(geometry, few, tmp_path):
    try:
        compiled_c()
    except EngineUnavailable as e:
        with pytest.raises(EngineUnavailable, match=re.escape(str(e))):
            run_once(all_contestants()[LIMIT], few, tmp_path / "T.H5", geometry)
        return
    done = run_once(all_contestants()[LIMIT], few, tmp_path / "T.H5", geometry)
    verdict = check_file(tmp_path / "T.H5", few, geometry_spec(geometry))
    assert (verdict["ok"], verdict["checked"], done["n_files"]) == (True, 19, 19), verdict


def test_c_ends_with_the_error_of_a_recording(few, tmp_path):
    try:
        compiled_c()
    except EngineUnavailable:
        return  # the test above shows that it is reported
    cut = shutil.copytree(few, tmp_path / "cut")
    Path(list_split(cut)[0][17]).write_bytes(b"RIFF")
    with pytest.raises(LeakmelError, match="status 1"):
        run_once(all_contestants()[LIMIT], cut, tmp_path / "T.H5", "A")


def test_c_refuses_another_geometry():
    spec = MelSpec.preset("disjoint", n_mels=32)
    with pytest.raises(EngineUnavailable, match="64 bands"):
        contestants.fill_c(contestants.Job([], spec, 1), None)


@pytest.mark.parametrize("absent", ["gcc", "AVX-512"])
def test_c_needs_gcc_and_avx_512(absent, tmp_path, monkeypatch):
    source = tmp_path / "limit.c"
    source.write_text("int has_avx512(void) { return 0; }")
    monkeypatch.setattr(contestants, "C_SOURCE", source)
    if absent == "gcc":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif platform.machine() in ("x86_64", "AMD64") and shutil.which("gcc") is None:
        return
    with pytest.raises(EngineUnavailable, match=absent):
        compiled_c.__wrapped__()
    if absent == "gcc" or platform.machine() not in ("x86_64", "AMD64"):
        return

    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    with monkeypatch.context() as patch:
        patch.setattr(contestants.ctypes, "CDLL", refuse)
        with pytest.raises(EngineUnavailable, match=r"limit.c cannot be compiled or loaded: .*failed to map"):
            compiled_c.__wrapped__()
    source.write_text("no C")
    with pytest.raises(EngineUnavailable, match=r"does not compile limit.c: .*error"):
        compiled_c.__wrapped__()


def test_every_engine_for_cpus_takes_part():
    from leakmel.mel.engines import COMPARISON_ENGINES, CPU_ENGINES

    engines = (*CPU_ENGINES, *COMPARISON_ENGINES)
    assert [n for n in all_contestants() if n.startswith("leakmel")] == [f"leakmel {e}" for e in engines]
    words = all_contestants()["leakmel torch"].command(Path("R"), Path("O"), "B")
    assert words[words.index("--engine") + 1] == "torch"
    assert words[words.index("--preset") + 1] == "overlap"
    assert words[words.index("--mel-norm") + 1] == "none"
    assert "--no-fsync" in words
    assert "--check" not in words, "the sampled check stays on"


# -- fair conditions ------------------------------------------------------------------------------------------------------


def test_parts_are_the_same_files_evenly_chosen(demo, tmp_path):
    paths, ids = list_split(demo)
    part = part_of(demo, tmp_path, 10)
    chosen, labels = list_split(part)
    assert len(chosen) == 10
    assert set(labels) == set(ids)
    known = {os.stat(p).st_ino: p for p in paths}
    assert [Path(known[os.stat(p).st_ino]).name for p in chosen] == [Path(p).name for p in chosen]
    assert {Path(chosen[0]).name, Path(chosen[-1]).name} == {Path(paths[0]).name, Path(paths[-1]).name}
    assert part_of(demo, tmp_path, len(paths)) == demo
    assert part_of(demo, tmp_path, 10) == part


def test_each_round_starts_with_another_tool():
    names = ["a", "b", "c"]
    assert {in_turn(names, i)[0] for i in range(3)} == set(names)
    assert all(sorted(in_turn(names, i)) == names for i in range(7))
    assert in_turn([], 3) == []


@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_cache_state_is_prepared_before_a_run(cache, demo, tmp_path, monkeypatch):
    prepared: dict[str, list[str]] = {}
    monkeypatch.setattr(suite, "read_into_cache", lambda paths: prepared.update(warm=list(paths)))
    monkeypatch.setattr(suite, "evict", lambda paths: prepared.update(cold=list(paths)))
    quick = Contestant("quick", lambda *where: [sys.executable, "-c", "print('{\"seconds\": 2.0}')"])
    done = run_once(quick, demo, tmp_path / "T.H5", "A", cache=cache)
    assert prepared == {cache: list_split(demo)[0]}
    assert done["files_per_s"] == len(list_split(demo)[0]) / 2.0, "counted here, whatever a contestant says"


def rounds_of(**rates: list[float]) -> dict:
    return {
        name.replace("_", " "): {"rounds": {"A, warm": [{"files_per_s": r} for r in each]}}
        for name, each in rates.items()
    }


def test_ratios_are_taken_within_rounds():
    every = rounds_of(leakmel_cpu=[60.0, 20.0, 50.0], scipy=[40.0, 40.0, 40.0], dali=[10.0, 2.0, 9.0])
    assert add_figures(every) == {"A, warm": "dali"}, "DALI where it is there, though another one is faster"
    assert every["leakmel cpu"]["ratio"]["A, warm"] == {"median": 6.0, "least": 50 / 9, "most": 10.0}, (
        "5.6 if the medians were divided"
    )
    assert every["dali"]["ratio"]["A, warm"]["median"] == 1.0
    shown = {"contestants": every, "settings": {"A": {}}, "ratio_to": {"A, warm": "dali"}}
    assert against_targets(shown) == {"A, warm": True}
    slower = rounds_of(leakmel_cpu=[49.0], dali=[10.0])
    assert against_targets(
        {"contestants": slower, "settings": {"A": {}}, "ratio_to": add_figures(slower)}
    ) == {"A, warm": False}
    without = rounds_of(leakmel_cpu=[60.0], scipy=[4.0], librosa=[5.0])
    assert add_figures(without) == {"A, warm": "librosa"}
    assert against_targets(
        {"contestants": without, "settings": {"A": {}}, "ratio_to": {"A, warm": "librosa"}}
    ) == {"A, warm": None}
    with_limit = rounds_of(leakmel_cpu=[60.0, 40.0], librosa=[5.0, 5.0]) | {
        LIMIT: {"rounds": {"A, warm": [{"files_per_s": r} for r in (100.0, 50.0)]}}
    }
    assert add_figures(with_limit) == {"A, warm": "librosa"}, "C without checks is no tool"
    assert suite.shares_of_limit({"contestants": with_limit}) == {
        "A, warm": {"median": 0.7, "least": 0.6, "most": 0.8}
    }
    assert suite.shares_of_limit({"contestants": without}) == {}
    assert len(bench_figures.limit_notes({"contestants": with_limit})) == 1
    absent = without | {LIMIT: {"status": "not installed", "rounds": {}, "figures": {}}}
    assert bench_figures.limit_notes({"contestants": absent}) == [], "no note without a row"
    alone = rounds_of(leakmel_cpu=[60.0])
    assert add_figures(alone) == {"A, warm": None}
    assert alone["leakmel cpu"]["ratio"] == {}


# -- what a process takes -------------------------------------------------------------------------------------------------

HOLD = "import os, sys, time\ndef hold(mb): x = bytearray(mb << 20); x[::4096] = b'1' * len(x[::4096]); return x\n"


def peak_of(body: str, least_mb: float) -> float:
    "Peak of a process tree in MB; looked at again, three times at most, where the tree had ended before who watches it had a turn."
    peaks = list[float]()
    while len(peaks) < 3 and max(peaks, default=0) <= least_mb:
        took = run_command([sys.executable, "-c", HOLD + textwrap.dedent(body)], watch=True)
        assert took.status == 0, took.stderr_end
        assert took.peak_bytes is not None
        peaks.append(took.peak_bytes / 2**20)
    return max(peaks)


def test_memory_of_children_counts_and_shared_pages_count_once():
    alone = max(peak_of("time.sleep(0.3)", 5) for _ in range(3))
    assert alone < 50
    children = peak_of(
        """
        for _ in range(2):
            if os.fork() == 0: x = hold(100); time.sleep(0.8); os._exit(0)
        for _ in range(2): os.wait()""",
        200,
    )
    assert 200 < children < 200 + 2 * alone, "neither the largest process nor the first one alone"
    shared = peak_of(
        """
        x = hold(100)
        for _ in range(3):
            if os.fork() == 0: time.sleep(0.6); os._exit(0)
        for _ in range(3): os.wait()""",
        100,
    )
    assert 100 < shared < 100 + 3 * alone, "four processes, one set of pages"


def test_unmonitored_run_has_no_peak_memory():
    took = run_command(
        [sys.executable, "-c", "import os; print(os.environ['ANSWER']); raise SystemExit(7)"],
        env={"ANSWER": "42"},
    )
    assert (took.status, took.text, took.peak_bytes) == (7, "42\n", None)
    busy = run_command(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time; subprocess.run([sys.executable, '-c', '''\n"
            "import time\nwhile time.process_time() < 0.4: pass''']); time.sleep(0.3)",
        ]
    )
    assert 0.4 < busy.cpu_s < busy.wall_s, "the child's processor time, and not the time it slept"


def has_ended(pid: int) -> bool:
    "Whether a process ends within seconds; whoever inherited it may take a moment."
    for _ in range(1200):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("ends", [False, True])
def test_no_child_outlives_its_command(ends, tmp_path):
    noted, new = tmp_path / "pid", tmp_path / "new"
    body = (
        "import os, subprocess, time; p = subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL); "
        f"f = open({str(new)!r}, 'w'); f.write(str(p.pid)); f.close(); os.replace({str(new)!r}, {str(noted)!r}); time.sleep({0 if ends else 300})"
    )
    if ends:
        assert run_command([sys.executable, "-c", body]).status == 0
    for limit_s in () if ends else (1.5, 6, 24):
        with pytest.raises(MachineError, match=f"no end after {limit_s:g} s"):
            run_command([sys.executable, "-c", body], limit_s=limit_s)
        if noted.exists():
            break  # else it had no turn to start its own child
    assert has_ended(int(noted.read_text()))


# ---- many names for a few recordings


def test_each_linked_name_is_a_separate_recording(tmp_path):
    "Names differ, contents repeat: as many rows as names, in both labels, and copies are told."
    root = write_demo(tmp_path / "demo", n_files=40).root
    n = len(list((root / "TRAINING").glob("*/*.wav")))
    data = linked_set(root, tmp_path / "growth", 3 * n + 5)
    body = run_leakmel("build", str(data), "--out", str(tmp_path / "x.h5")).body
    assert (body["found"], body["rows"], body["rejected"]) == (3 * n + 5, 3 * n + 5, 0)
    assert body["label_names"] == ["LEAK", "NOLEAK"]
    assert body["problems_by_kind"]
    assert {
        len(list(data.glob(f"{label}/*x{k:03d}~*"))) > 0 for label in body["label_names"] for k in range(3)
    } == {True}
    sensors = {p.name.split("~")[0] for p in (root / "TRAINING").glob("*/*.wav")}
    assert {p.name.split("~")[0] for p in data.glob("*/*.wav")} == sensors
    before = data.stat().st_mtime_ns
    assert linked_set(root, tmp_path / "growth", 3 * n + 5).stat().st_mtime_ns == before, (
        "one that is there is used again"
    )


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.EMLINK, "no more names"),
        (errno.EPERM, "cannot be linked"),
        (errno.EOPNOTSUPP, "cannot be linked"),
        (errno.ENOSPC, "no room left"),
    ],
)
def test_links_that_cannot_be_created_are_reported(tmp_path, monkeypatch, code, says):
    root = write_demo(tmp_path / "demo", n_files=12).root
    real, calls = os.link, iter(range(100))

    def few(a: Path, b: Path) -> None:
        if next(calls) > 5:
            raise OSError(code, os.strerror(code), str(a))
        real(a, b)

    monkeypatch.setattr(os, "link", few)
    with pytest.raises(OutputError, match=says):
        linked_set(root, tmp_path / "growth", 20)
    assert os.listdir(tmp_path / "growth") == []
