"`leakmel machine doctor`: each kind of bad finding by a fault that is planted, the parity of every engine, one JSON object, no leftovers."

import errno
import fcntl
import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
from each import each
from errors import raises

from leakmel.cli import main
from leakmel.extras.machine import doctor
from leakmel.extras.machine.doctor import CHECKS, FIGURES, REPORT_KEYS, Check, Report, check_line, examine
from leakmel.mel import cpu_engine, engines

pytestmark = pytest.mark.quick

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


def test_nothing_is_left_in_the_folder(tmp_path):
    examine(tmp_path)
    assert list(tmp_path.iterdir()) == []


@each("key", CHECKS)
def test_failing_check_is_reported(key, tmp_path, monkeypatch):
    "Each in turn, the others untouched; what a build needs and nobody could look at blocks it."

    for k, line_of in REAL.items():
        good = line_of._replace(measure=lambda folder: {}, is_right=lambda f: True, blocks=lambda f: False)
        monkeypatch.setitem(CHECKS, k, good)
    bad = REAL[key]._replace(measure=failing(PermissionError(errno.EPERM, "not for you")))
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
    return check_line(key, Path())


def test_an_old_package_is_named_with_the_range(monkeypatch):
    pretend(monkeypatch, numpy="1.26.4", tqdm="4.1")
    check = packages("packages")
    assert (check.status, check.blocks) == ("warn", True)
    assert "wrong: numpy >=2.0 is needed, tqdm >=4.66 is needed" in check.found
    assert "pip install --upgrade leakmel" in check.advice
    pretend(monkeypatch, numpy="2.0.0")
    pretend(monkeypatch, numpy="2.1", tqdm="4.1")
    assert not packages("packages").blocks


def test_a_version_above_the_range_is_wrong_too(monkeypatch):
    pretend(monkeypatch, numba="0.69.0")
    assert packages("packages").status == "warn"
    pretend(monkeypatch, torch="2.14.1")
    assert packages("torch").figures["wrong"] == {"torch": "<2.14,>=2.9 is needed"}


@each(
    ("key", "name", "blocks"),
    [
        ("packages", "h5py", True),
        ("packages", "soxr", False),
        ("front_end", "plotly", False),
        ("packages", "numba", False),
        ("torch", "torch", False),
    ],
)
def test_a_missing_package(key, name, blocks, monkeypatch):
    pretend(monkeypatch, **{name: None})
    check = packages(key)
    assert (check.status, check.blocks) == ("missing", blocks)
    assert f"{name} missing" in check.found
    assert "pip install --upgrade" in check.advice


def test_a_package_that_does_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    check = packages("packages")
    assert (check.status, check.blocks) == ("warn", False)
    assert check.figures["wrong"]["soxr"].startswith("ModuleNotFoundError")


def test_an_old_python_blocks(monkeypatch):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.10.12")
    check = packages("python")
    assert (check.status, check.blocks) == ("warn", True)
    assert ">=3.11 is needed" in check.found


CODE = """
import sys
for name in ("numpy", "h5py", "torch", "pandas", "psutil", "numba", "pynvml", "tqdm"): sys.modules[name] = None
from leakmel.cli import main
sys.exit(main(["machine", "doctor", sys.argv[1], "--json"]))
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
    for key in ("cores", "limits", "python"):
        assert found[key]["status"] != "missing", key


# ---- cores, memory, limits -----------------------------------------------------------------------------------------------


def of_cores(monkeypatch: pytest.MonkeyPatch, cores: int, usable: int, quota: float | None = None) -> Check:
    "What is said of cores and a quota."
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(doctor, "usable_cores", lambda: usable)
    monkeypatch.setattr(doctor, "cpu_quota", lambda: quota)
    return check_line("cores", Path())


def test_cores_that_may_not_be_used(monkeypatch):
    check = of_cores(monkeypatch, 8, 3, 2.5)
    assert (check.status, check.figures["quota_cores"]) == ("warn", 2.5)
    assert "CPU quota of the container" in check.advice
    check = of_cores(monkeypatch, 64, 2)
    assert (check.status, check.found) == ("warn", "cores: 64; usable cores: 2; quota cores: none")
    assert of_cores(monkeypatch, 8, 8, 9.0).status == "ok", "a quota above the cores bounds nothing"


def test_little_memory(monkeypatch):
    monkeypatch.setattr(doctor, "free_memory", lambda: 600_000_000)
    monkeypatch.setattr(doctor, "cgroup_limits", lambda *group: iter([700_000_000, 650_000_000]))
    check = check_line("memory", Path())
    assert (check.status, check.figures["limit_bytes"]) == ("warn", 650_000_000)
    assert check.found.startswith("free: 600 MB")
    assert "--max-bytes-in-flight" in check.advice
    monkeypatch.setattr(doctor, "cgroup_limits", lambda *group: iter([]))
    assert check_line("memory", Path()).figures["limit_bytes"] is None


LOW = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)\n"
    "from leakmel.extras.machine.doctor import check_line; c = check_line('limits', None); print(c.status, c.figures['open_files'], c.advice)"
)


@pytest.mark.parametrize(
    ("limit", "message"), [("100", "warn 100 Raise the limits: ulimit -n 4096"), ("256", "ok 256")]
)
def test_a_low_limit_of_open_files(limit, message):
    done = subprocess.run(
        [sys.executable, "-c", LOW, limit], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(message)


def test_a_low_limit_of_threads(monkeypatch):
    monkeypatch.setattr(doctor, "cgroup_limits", lambda *group: iter([64]))
    check = check_line("limits", Path())
    assert (check.status, check.figures["threads"]) == ("warn", 64)
    assert "pids limit" in check.advice


# ---- mounts and disks ----------------------------------------------------------------------------------------------------


def on_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str) -> None:
    "Pretend that a folder lies on a file system of that kind, which covers another."
    place = os.path.realpath(folder)
    table = [("/", "ext4"), (place, "ext3"), (place, kind), (f"{place}/x", "tmpfs")]
    mounts = [SimpleNamespace(mountpoint=at, fstype=found) for at, found in table]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)


def test_a_disk_of_windows(tmp_path, monkeypatch):
    for version, kind, status in (
        (2, "9p", "warn"),
        (2, "drvfs", "warn"),
        (2, "ext4", "ok"),
        (1, "ext4", "warn"),
        (0, "9p", "ok"),
    ):
        monkeypatch.setattr(doctor, "wsl_version", lambda version=version: version)
        on_disk(monkeypatch, tmp_path, kind)
        check = check_line("wsl", tmp_path)
        assert (check.status, check.figures["wsl"], check.figures["file_system"]) == (status, version, kind)
        assert check.figures["mount"] == os.path.realpath(tmp_path)


@each(
    ("file_system", "kind", "status"),
    [
        ("ext4", "local disk", "ok"),
        ("tmpfs", "memory", "ok"),
        ("nfs4", "network", "warn"),
        ("9p", "network", "warn"),
    ],
)
def test_kinds_of_disk(file_system, kind, status, tmp_path, monkeypatch):
    on_disk(monkeypatch, tmp_path, file_system)
    check = check_line("disk", tmp_path)
    assert (check.status, check.figures["kind"]) == (status, kind)


def has_recordings(folder: Path) -> bool:
    "Whether recordings were found."
    return "command" in doctor.measure_recordings(folder)


def test_only_recordings_of_the_folder_are_found(tmp_path, make_wav):
    "Not those that a scan would leave out, nor what lies elsewhere."
    for name in ("in/.b.wav", "in/.hidden/c.wav", "out/d.wav"):
        make_wav(tmp_path / name)
    (tmp_path / "in" / "text.txt").write_bytes(b"x")
    (tmp_path / "in" / "B").symlink_to(tmp_path / "out")
    os.mkfifo(tmp_path / "in" / "pipe.wav")
    assert not has_recordings(tmp_path / "in")
    make_wav(tmp_path / "in" / "A" / "a.WAV")
    assert has_recordings(tmp_path / "in")


def test_search_for_recordings_is_bounded(tmp_path, make_wav, monkeypatch):
    for k in range(9):
        (tmp_path / "A" / f"{k}").mkdir(parents=True)
    make_wav(tmp_path / "A" / "0" / "x.wav")
    assert has_recordings(tmp_path)
    monkeypatch.setattr(doctor, "MAX_ENTRIES", 5)
    assert not has_recordings(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert check_line("hdf5", tmp_path).figures["folder_writable"] is False


# ---- HDF5 ----------------------------------------------------------------------------------------------------------------


def test_hdf5_that_cannot_write_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(h5py, "File", failing(OSError(errno.ENOSPC, "No space left on device")))
    check = check_line("hdf5", tmp_path)
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

    assert check_line("hdf5", tmp_path).status == "ok"
    monkeypatch.setattr(h5py, "File", altered)
    check = check_line("hdf5", tmp_path)
    assert (check.status, check.blocks) == ("warn", True)
    assert check.figures["hdf5_same"] is False


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(OSError(errno.ENOLCK, "no locks")))
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "FALSE")
    check = check_line("hdf5", tmp_path)
    assert (check.status, check.blocks) == ("warn", False)
    assert (check.figures["kernel_locks"], check.figures["hdf5_locking"]) == (False, "FALSE")
    assert check.figures["lock"] == "owner"
    assert check.figures["hdf5_same"]
    monkeypatch.setattr(os, "symlink", failing(OSError(errno.EPERM, "no links")))
    check = check_line("hdf5", tmp_path)
    assert (check.status, check.blocks, check.figures["lock"]) == ("warn", False, "")


# ---- compiled code, GPU --------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written(monkeypatch):
    assert check_line("compiled", Path()).status == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check = check_line("compiled", Path())
    assert check.status == "warn"
    assert "NUMBA_CACHE_DIR" in check.advice
    assert "__pycache__" in check.found or os.environ.get("NUMBA_CACHE_DIR", "-") in check.found


def test_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check = check_line("gpu", Path())
    assert (check.status, check.blocks) == ("missing", False)
    assert "no CUDA driver" in check.found


def test_gpu_that_torch_cannot_use_is_reported(monkeypatch):
    import torch

    monkeypatch.setattr(engines, "may_have_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    card = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13010,
    )
    monkeypatch.setitem(sys.modules, "pynvml", card)
    check = check_line("gpu", Path())
    assert check.status == "warn"
    assert check.found.startswith("driver: 580.1; driver cuda: 13,010; gpu name: none")
    assert "Install a CUDA build of torch" in check.advice
    assert check.figures["cuda_build"] is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert check_line("gpu", Path()).figures["driver"] is None


# ---- engines -------------------------------------------------------------------------------------------------------------


class Shifted(cpu_engine.CpuEngine):
    "The compiled engine, a tenth of a decibel too loud in one band."

    def run(self, samples: np.ndarray, out: np.ndarray, **more: Any) -> np.ndarray:
        moments = super().run(samples, out, **more)
        out[..., 5, :] += np.float16(0.1)
        return moments


def test_an_engine_whose_parity_is_off_blocks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_engine, "CpuEngine", Shifted)
    assert main(["machine", "doctor", os.fspath(tmp_path), "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    check = next(c for c in body["checks"] if c["key"] == "engine_cpu")
    assert (check["status"], check["blocks"], body["ready"]) == ("warn", True, False)
    assert "WRONG" in check["advice"]
    assert check["figures"]["max_abs_db"] > 0.09
    assert [c["key"] for c in body["checks"] if c["blocks"]] == ["engine_cpu"]


def test_wrong_fft_is_detected(monkeypatch):
    "The compiled engine has an FFT of its own, so a reference that is wrong differs from it."
    real = np.fft.rfft
    monkeypatch.setattr(np.fft, "rfft", lambda x, *a, **k: real(x, *a, **k) * 1.02)
    check = check_line("engine_cpu", Path())
    assert (check.status, check.blocks) == ("warn", True)
    assert check.figures["max_abs_db"] > 0.1


@each(
    ("error", "status", "message"),
    [
        (ImportError("no torch"), "missing", "no torch"),
        (
            engines.EngineUnavailable("no card", code="no-device", remedy="buy one"),
            "missing",
            "not measured: no card",
        ),
        (RuntimeError("illegal instruction"), "warn", "not measured: RuntimeError: illegal instruction"),
    ],
)
def test_engines_that_cannot_run(error, status, message, monkeypatch):
    monkeypatch.setattr(engines, "load_class", failing(error))
    check = check_line("engine_torch", Path())
    assert (check.status, check.blocks) == (status, False)
    assert message in check.found
    assert check_line("engine_reference", Path()).blocks, "there is none below it"


def test_parity_asks_every_device():
    "Two rehearsed devices, each from 16-bit samples and from float32, twice, with two presets."
    one, two = (doctor.measure_engine("torch", f"{DEVICE}{n}")["n_values"] for n in ("", "*2"))
    assert two == 2 * one


# ---- the command ---------------------------------------------------------------------------------------------------------


def test_command_prints_the_report(demo, whole, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda folder, progress=None: whole)
    assert main(["machine", "doctor", os.fspath(demo), "--quiet"]) == 0
    assert capsys.readouterr().out.startswith(whole.title)
    assert main(["machine", "doctor", os.fspath(demo), "--quiet", "--full"]) == 0
    out = capsys.readouterr().out
    for check in whole.checks:
        assert check.title in out
    assert max(map(len, out.splitlines())) <= 120
    assert main(["machine", "doctor", os.fspath(demo), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ready"] is True


def test_no_such_folder(tmp_path, capsys):
    assert main(["machine", "doctor", os.fspath(tmp_path / "nowhere")]) == 1
    assert "the folder does not exist" in capsys.readouterr().err
    with raises("no-folder-to-examine", path=tmp_path / "nowhere"):
        examine(tmp_path / "nowhere")


def test_current_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "CHECKS", {"wsl": REAL["wsl"]})
    assert examine().folder == tmp_path
