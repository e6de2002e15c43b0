"`leakmel doctor`: each kind of bad finding by a fault that is planted, the parity of every engine, one JSON object, no leftovers."

import errno
import fcntl
import json
import os
import subprocess
import sys
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from each import each
from errors import raises

from leakmel.cli import main
from leakmel.mel import cpu_engine, engines
from leakmel.mel.spec import MelSpec
from leakmel.mel.torch_engine import TorchEngine
from leakmel.ops import doctor
from leakmel.ops.doctor import CHECKS, FIGURES, NOT_MEASURED, REPORT_KEYS, Check, Report, examine

REAL = dict(CHECKS)
DEVICE = "fake"  # that is none


@pytest.fixture(scope="module")
def whole(demo) -> Report:
    "All of it, on the machine at hand."
    return examine(demo)


def line(report: Report, key: str) -> Check:
    "The check of that name."
    return next(c for c in report.checks if c.key == key)


def failing(error: Exception):
    "A function that raises."

    def fail(*args: Any, **more: Any) -> Any:
        raise error

    return fail


# ---- the whole page ----------------------------------------------------------------------------------------------------


def test_this_machine_is_ready_and_all_engines_are_correct(whole):
    assert whole.ok, whole
    assert [c.key for c in whole.checks] == list(CHECKS)
    for name in ("reference", "cpu", "torch", *(["torchaudio"] if find_spec("torchaudio") else [])):
        check = line(whole, f"engine_{name}")
        assert check.status == "ok", check
        assert check.figures["identity"].startswith(f"{name}@")
        assert (
            0.001 < check.figures["max_abs_db"] < 0.1
        )  # float16 rounds; the halves of steps at 50 to 100 dB are 0.016 to 0.03
        assert check.figures["n_wrong"] == 0
        assert check.figures["n_values"] == 4 * (8 * 2 * 64 + 15 * 3 * 32)


def test_all_keys_are_documented_and_the_rest_is_json(whole):
    body = json.loads(json.dumps(whole.to_dict(), allow_nan=False))
    assert set(body) == set(REPORT_KEYS)
    for check in body["checks"]:
        assert set(check) == {"key", "title", "status", "found", "advice", "blocks", "figures"}
        assert set(check["figures"]) <= set(FIGURES), check["key"]
        for word in check:
            assert word in REPORT_KEYS["checks"]
    assert sum(body["counts"].values()) == len(CHECKS)


def test_every_requirement_has_a_check():
    wanted = set(doctor.requirements()) - {"python"}
    assert wanted == {name for names in doctor.LINES.values() for name in names}


def test_nothing_is_left_in_the_folder(tmp_path):
    examine(tmp_path)
    assert list(tmp_path.iterdir()) == []


@each("key", CHECKS)
def test_failing_check_is_reported(key, tmp_path, monkeypatch):
    "Each in turn, the others untouched; what a build needs and nobody could look at blocks it."

    def good(key: str, folder: Path) -> Check:
        return Check(key, "ok", "fine")

    for k, line_of in REAL.items():
        monkeypatch.setitem(CHECKS, k, line_of._replace(probe=partial(good, k)))
    bad = REAL[key]._replace(probe=failing(PermissionError(errno.EPERM, "not for you")))
    monkeypatch.setitem(CHECKS, key, bad)
    report = examine(tmp_path)
    assert line(report, key).status == "warn"
    assert "PermissionError" in line(report, key).found
    assert "not for you" in line(report, key).found
    assert report.counts == {"ok": len(CHECKS) - 1, "warn": 1, "missing": 0}
    assert report.ok != (key in ("python", "packages", "hdf5", "engine_reference"))


# ---- Python and packages -------------------------------------------------------------------------------------------------


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    "Packages of other versions, or absent."
    real = metadata.version

    def version(name: str) -> str:
        if name not in versions:
            return real(name)
        if (output := versions[name]) is None:
            raise metadata.PackageNotFoundError(name)
        return output

    monkeypatch.setattr(metadata, "version", version)


def packages(key: str) -> Check:
    "The line of some packages."
    return REAL[key].probe(Path())


def test_an_old_package_is_named_with_the_range(monkeypatch):
    pretend(monkeypatch, numpy="1.26.4", tqdm="4.1")
    check = packages("packages")
    assert (check.status, check.blocks) == ("warn", True)
    assert "numpy 1.26.4 (>=2.0 is needed)" in check.found
    assert "'numpy>=2.0' 'tqdm>=4.66'" in check.advice
    pretend(monkeypatch, numpy="2.0.0")
    pretend(monkeypatch, numpy="2.1", tqdm="4.1")
    assert not packages("packages").blocks


def test_a_version_above_the_range_is_wrong_too(monkeypatch):
    pretend(monkeypatch, numba="0.69.0")
    assert packages("compiled").status == "warn"
    pretend(monkeypatch, torch="2.14.1")
    assert "(>=2.9,<2.14 is needed)" in packages("torch").found


@each(
    ("key", "name", "blocks"),
    [
        ("packages", "h5py", True),
        ("packages", "soxr", False),
        ("front_end", "plotly", False),
        ("compiled", "numba", False),
        ("torch", "torch", False),
    ],
)
def test_a_missing_package(key, name, blocks, monkeypatch):
    pretend(monkeypatch, **{name: None})
    check = packages(key)
    assert (check.status, check.blocks) == ("missing", blocks)
    assert f"{name} is not installed" in check.found
    assert f"'{name}" in check.advice


def test_a_package_that_does_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    check = packages("packages")
    assert (check.status, check.blocks) == ("warn", False)
    assert "soxr" in check.found
    assert "cannot be loaded: ModuleNotFoundError" in check.found


def test_an_old_python_blocks(monkeypatch):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.10.12")
    check = packages("python")
    assert (check.status, check.blocks) == ("warn", True)
    assert "3.11" in check.advice


CODE = """
import sys
for name in ("numpy", "h5py", "torch", "pandas", "psutil", "numba", "pynvml", "tqdm"): sys.modules[name] = None
from leakmel.cli import main
sys.exit(main(["doctor", sys.argv[1], "--json"]))
"""


def test_doctor_runs_without_extras(tmp_path):
    "A doctor that needs what is missing could not say so."
    done = subprocess.run(
        [sys.executable, "-c", CODE, os.fspath(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    body = json.loads(done.stdout)
    found = {c["key"]: c for c in body["checks"]}
    assert not body["ready"]
    assert set(found) == set(CHECKS)
    for key in ("packages", "hdf5", "engine_reference"):
        assert found[key]["blocks"], key
    for key in ("cores", "limits", "python", "wsl"):
        assert found[key]["status"] != "missing", key


# ---- cores, memory, limits -----------------------------------------------------------------------------------------------


def groups(folder: Path, own: str, files: dict[str, str] | None = None) -> dict[str, Path]:
    "Control groups with some files."
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    (folder / "own").write_text(own)
    return {"root": folder, "own": folder / "own"}


def test_a_quota_of_a_group_above(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "usable_cores", lambda: 3)  # as they follow from the quota
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    made = groups(
        tmp_path, "0::/job/step\n", {"job/cpu.max": "250000 100000", "job/step/cpu.max": "max 100000"}
    )
    check = doctor.examine_cores(**made)
    assert (check.status, check.figures["quota_cores"]) == ("warn", 2.5)
    assert check.advice.startswith("Raise the CPU quota of the container")
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)  # by taskset
    assert "taskset" in doctor.examine_cores(**made).advice
    (tmp_path / "job" / "cpu.max").write_text("900000 100000\n")
    monkeypatch.setattr(doctor, "usable_cores", lambda: 8)
    assert doctor.examine_cores(**made).status == "ok", "a quota above the cores bounds nothing"


def test_a_quota_of_version_1(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "usable_cores", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    made = groups(
        tmp_path,
        "4:memory:/m\n1:cpu,cpuacct:/docker/x\n",
        {"cpu/docker/x/cpu.cfs_quota_us": "50000", "cpu/docker/x/cpu.cfs_period_us": "100000"},
    )
    assert doctor.examine_cores(**made).figures["quota_cores"] == 0.5
    assert doctor.examine_cores(**made).advice.startswith("Raise the CPU quota of the container")
    (tmp_path / "cpu" / "docker" / "x" / "cpu.cfs_quota_us").write_text("-1")
    assert doctor.examine_cores(**made).figures["quota_cores"] is None


def test_cores_that_may_not_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    check = doctor.examine_cores(**groups(tmp_path, ""))
    assert (check.status, check.found) == ("warn", "2 of 64 usable")


def test_little_memory(tmp_path):
    made = groups(
        tmp_path,
        "4:memory:/m\n",
        {
            "memory/m/memory.limit_in_bytes": "600000000",
            "memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    check = doctor.examine_memory(**made)
    assert (check.status, check.figures["limit_bytes"]) == ("warn", 600_000_000)
    assert "--max-bytes-in-flight 150000000" in check.advice
    (tmp_path / "memory" / "m" / "memory.limit_in_bytes").unlink()
    assert doctor.examine_memory(**made).figures["limit_bytes"] is None, "a huge number is no limit"


LOW = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)\n"
    "from leakmel.ops.doctor import examine_limits as e; c = e(); print(c.status, c.figures['open_files'], c.advice)"
)


@pytest.mark.parametrize(("limit", "message"), [("100", "warn 100 Set ulimit -n 4096"), ("256", "ok 256")])
def test_a_low_limit_of_open_files(limit, message):
    done = subprocess.run(
        [sys.executable, "-c", LOW, limit], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(message)


def test_a_low_limit_of_threads(tmp_path):
    check = doctor.examine_limits(**groups(tmp_path, "0::/a\n", {"a/pids.max": "64"}))
    assert (check.status, check.figures["threads"]) == ("warn", 64)
    assert "pids limit" in check.advice


# ---- mounts and disks ----------------------------------------------------------------------------------------------------

WSL2, PLAIN = "5.15.153.1-microsoft-standard-WSL2", "6.8.0-generic"


def wsl(tmp_path: Path, release: str, kind: str = "9p", name: str = "data set") -> Check:
    "What is said of a folder with a blank in its name, on a mount table with it."
    folder = tmp_path / name / "xy"
    folder.mkdir(parents=True, exist_ok=True)
    at = os.path.realpath(tmp_path / name).replace(" ", "\\040")
    (tmp_path / "mounts").write_text(
        f"none / ext4 rw 0 0\nC:\\134 {at} {kind} rw,aname=drvfs 0 0\ntmp {at}/x tmpfs rw 0 0\n"
    )
    (tmp_path / "release").write_text(release + "\n")
    return doctor.examine_wsl(folder, mounts=tmp_path / "mounts", release=tmp_path / "release")


def test_a_disk_of_windows(tmp_path):
    check = wsl(tmp_path, WSL2)
    assert check.status == "warn"
    assert check.figures["file_system"] == "9p"
    assert check.figures["mount"].endswith("/data set")
    assert wsl(tmp_path, WSL2, kind="drvfs").status == "warn"
    assert wsl(tmp_path, WSL2, kind="ext4").status == "ok"
    assert wsl(tmp_path, PLAIN).found == "this is not WSL"
    assert wsl(tmp_path, "4.4.0-19041-Microsoft").figures["wsl"] == 1
    assert "WSL2" in wsl(tmp_path, "4.4.0-19041-Microsoft").advice


def test_kinds_of_disk(tmp_path, monkeypatch):
    for file_system, kind in {
        "tmpfs": "memory",
        "nfs4": "network",
        "9p": "network",
        "ext4": "local disk",
    }.items():
        monkeypatch.setattr(doctor, "mount_of", lambda folder, found=file_system: ("/", found))
        assert doctor.examine_disk(tmp_path).found == kind


def on_disk(monkeypatch: pytest.MonkeyPatch, kind: str = "local disk") -> None:
    "Pretend that all lies on that kind of disk."
    file_system = {"memory": "tmpfs", "network": "nfs4"}.get(kind, "ext4")
    monkeypatch.setattr(doctor, "mount_of", lambda folder: ("/", file_system))


def test_only_recordings_of_the_folder_are_found(tmp_path, make_wav):
    "Not those that a scan would leave out, nor what lies elsewhere."
    for name in ("in/.b.wav", "in/.hidden/c.wav", "out/d.wav"):
        make_wav(tmp_path / name)
    (tmp_path / "in" / "text.txt").write_bytes(b"x")
    (tmp_path / "in" / "B").symlink_to(tmp_path / "out")
    os.mkfifo(tmp_path / "in" / "pipe.wav")
    assert not doctor.has_recordings(tmp_path / "in")
    make_wav(tmp_path / "in" / "A" / "a.WAV")
    assert doctor.has_recordings(tmp_path / "in")


def test_search_for_recordings_is_bounded(tmp_path, make_wav, monkeypatch):
    for k in range(9):
        (tmp_path / "A" / f"{k}").mkdir(parents=True)
    make_wav(tmp_path / "A" / "0" / "x.wav")
    assert doctor.has_recordings(tmp_path)
    monkeypatch.setattr(doctor, "MAX_ENTRIES", 5)
    assert not doctor.has_recordings(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    on_disk(monkeypatch)
    real = doctor.tempfile.TemporaryDirectory

    def refuse(*args: Any, dir: Any = None, **more: Any) -> Any:
        if dir == tmp_path:
            raise OSError(errno.EROFS, "read-only")
        return real(prefix=more["prefix"], dir=dir)

    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", refuse)
    assert "because the folder is not writable" in doctor.examine_hdf5(tmp_path).found


@each(("kind", "status"), [("local disk", "ok"), ("memory", "ok"), ("network", "warn")])
def test_a_network_folder_is_named(kind, status, demo, monkeypatch):
    on_disk(monkeypatch, kind)
    check = doctor.examine_disk(demo)
    assert (check.status, check.found) == (status, kind)


# ---- HDF5 ----------------------------------------------------------------------------------------------------------------


def test_hdf5_that_cannot_write_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(h5py, "File", failing(OSError(errno.ENOSPC, "No space left on device")))
    check = doctor.examine_hdf5(tmp_path)
    assert (check.status, check.blocks) == ("warn", True)
    assert "No space left on device" in check.found
    assert list(tmp_path.iterdir()) == []


def test_hdf5_that_gives_back_something_else_blocks(tmp_path, monkeypatch):
    real = h5py.File

    def altered(path: Path, mode: str, **more: Any) -> Any:
        if mode == "r":
            with real(path, "r+") as f:
                f["segments_mel"][2, 7] = 1
        return real(path, mode, **more)

    assert doctor.examine_hdf5(tmp_path).status == "ok"
    monkeypatch.setattr(h5py, "File", altered)
    check = doctor.examine_hdf5(tmp_path)
    assert (check.status, check.blocks) == ("warn", True)
    assert "differ from those that were written" in check.found


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(OSError(errno.ENOLCK, "no locks")))
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "FALSE")
    check = doctor.examine_hdf5(tmp_path)
    assert (check.status, check.blocks) == ("warn", False)
    assert (check.figures["kernel_locks"], check.figures["hdf5_locking"]) == (False, "FALSE")
    assert check.figures["lock"] == "owner"
    assert check.figures["hdf5_same"]
    monkeypatch.setattr(os, "symlink", failing(OSError(errno.EPERM, "no links")))
    check = doctor.examine_hdf5(tmp_path)
    assert (check.status, check.blocks, check.figures["lock"]) == ("warn", False, "")


# ---- compiled code, GPU --------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written(monkeypatch):
    assert doctor.examine_compiled().status == "ok"
    monkeypatch.setattr(doctor, "_can_write", lambda folder: False)
    check = doctor.examine_compiled()
    assert check.status == "warn"
    assert "NUMBA_CACHE_DIR" in check.advice
    assert "__pycache__" in check.found or os.environ.get("NUMBA_CACHE_DIR", "-") in check.found


def test_writable_folders(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    can_write = doctor._can_write
    assert can_write(tmp_path)
    assert can_write(tmp_path / "made" / "later")
    assert not can_write(tmp_path / "file")
    assert not can_write("/proc/self")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides every GPU" in doctor.examine_gpu().found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(engines, "may_have_cuda", lambda: False)
    assert doctor.examine_gpu().status == "missing"


def test_gpu_that_torch_cannot_use_is_reported(monkeypatch):
    import torch

    monkeypatch.setattr(engines, "may_have_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    card = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13010,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=failing(RuntimeError("no name")),
        nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(total=24e9),
    )
    monkeypatch.setitem(sys.modules, "pynvml", card)
    check = doctor.examine_gpu()
    assert (check.status, check.found) == (
        "warn",
        "GPU without a name, driver 580.1, CUDA 13.1, 24.00 GB, torch cannot use a GPU",
    )
    assert check.figures["gpu_name"] is None
    assert (
        doctor.examine_torch().status,
        "install a CUDA build" in doctor.examine_torch().advice,
    ) == ("warn", True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert f"driver {NOT_MEASURED}" in doctor.examine_gpu().found


def test_bus_of_a_fake_device(monkeypatch):
    monkeypatch.setattr(doctor, "MIN_BUS_RATE", 0)
    check = doctor.examine_bus(DEVICE)
    assert check.status == "ok"
    assert check.figures["to_device_bytes_per_s"] > 1e6
    monkeypatch.setattr(doctor, "MIN_BUS_RATE", 1e15)
    assert "slot" in doctor.examine_bus(DEVICE).advice


# ---- engines -------------------------------------------------------------------------------------------------------------


class Shifted(cpu_engine.CpuEngine):
    "The compiled engine, a tenth of a decibel too loud in one band."

    def run(self, samples: np.ndarray, out: np.ndarray, **more: Any) -> np.ndarray:
        moments = super().run(samples, out, **more)
        out[..., 5, :] += np.float16(0.1)
        return moments


def test_an_engine_whose_parity_is_off_blocks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_engine, "CpuEngine", Shifted)
    assert main(["doctor", os.fspath(tmp_path), "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    check = next(c for c in body["checks"] if c["key"] == "engine_cpu")
    assert (check["status"], check["blocks"], body["ready"]) == ("warn", True, False)
    assert check["found"].startswith("WRONG")
    assert check["figures"]["max_abs_db"] > 0.09
    assert [c["key"] for c in body["checks"] if c["blocks"]] == ["engine_cpu"]


def test_wrong_fft_is_detected(monkeypatch):
    "The compiled engine has an FFT of its own, so a reference that is wrong differs from it."
    real = np.fft.rfft
    monkeypatch.setattr(np.fft, "rfft", lambda x, *a, **k: real(x, *a, **k) * 1.02)
    check = doctor.examine_engine("cpu")
    assert (check.status, check.blocks) == ("warn", True)
    assert check.figures["max_abs_db"] > 0.1


@each(
    ("error", "status", "message"),
    [
        (ImportError("no torch"), "missing", "no torch"),
        (engines.EngineUnavailable("no card", remedy="buy one"), "missing", "no card"),
        (RuntimeError("illegal instruction"), "warn", "failed: RuntimeError: illegal instruction"),
    ],
)
def test_engines_that_cannot_run(error, status, message, monkeypatch):
    monkeypatch.setattr(engines, "load_class", failing(error))
    check = doctor.examine_engine("torch")
    assert (check.status, check.blocks) == (status, False)
    assert message in check.found
    assert doctor.examine_engine("reference").blocks, "there is none below it"


def test_parity_asks_every_device():
    "Two rehearsed devices, each from 16-bit samples and from float32, twice."
    spec = MelSpec.preset("disjoint", duration_s=2)
    with TorchEngine(spec, device=f"{DEVICE}*2") as engine:
        found = doctor.parity(engine)
    assert len(found) == 8
    assert all(c.ok for c in found)


# ---- the command ---------------------------------------------------------------------------------------------------------


def test_command_prints_the_report(demo, whole, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda folder, progress=None: whole)
    assert main(["doctor", os.fspath(demo), "--quiet"]) == 0
    out = capsys.readouterr().out
    for check in whole.checks:
        assert check.title in out
    assert out.rstrip().splitlines()[-1] == whole.title
    assert max(map(len, out.splitlines())) <= 120
    assert main(["doctor", os.fspath(demo), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ready"] is True


def test_no_such_folder(tmp_path, capsys):
    assert main(["doctor", os.fspath(tmp_path / "nowhere")]) == 1
    assert "the folder does not exist" in capsys.readouterr().err
    with raises("no-folder-to-examine", path=tmp_path / "nowhere"):
        examine(tmp_path / "nowhere")


def test_current_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "CHECKS", {"wsl": REAL["wsl"]})
    assert examine().folder == tmp_path
