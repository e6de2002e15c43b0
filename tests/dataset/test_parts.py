"Parts of a data set: the same bytes as one build, whatever happens to the processes, the recordings and the files of the parts."

import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from each import each
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from independent import check

import leakmel as lm
from leakmel.cli import main
from leakmel.core.cluster import open_cluster, run_tasks
from leakmel.core.errors import (
    DataError,
    EngineError,
    MachineError,
    OutputError,
    RecordingError,
    UsageError,
    VerifyError,
)
from leakmel.core.files import OutputLock
from leakmel.core.progress import Progress
from leakmel.core.timeline import STAGES, analysis_text, attribute, covered_s, interval_s, read_timeline
from leakmel.dataset import existing as existing_module
from leakmel.dataset import job as job_module
from leakmel.dataset import pipeline as parts_module
from leakmel.dataset import targets as targets_module
from leakmel.dataset import verify as verify_module
from leakmel.dataset.loader import BadFilesError
from leakmel.dataset.pipeline import build_part, finished_parts, join, parts_folder
from leakmel.pages.plots import batch_timeline
from leakmel.recordings.conform import digests_of
from leakmel.recordings.demo import write_demo, write_wav
from leakmel.recordings.listing import part_range

QUIET: dict[str, Any] = {"engine": "cpu", "progress": "none"}
ROOT = Path(__file__).resolve().parents[2]


N_FILES = 120


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("parts") / "demo"
    write_demo(root, n_files=N_FILES, faults=True)
    return root


@pytest.fixture(scope="module")
def whole(demo, tmp_path_factory) -> bytes:
    "Bytes of the training set, built in one."
    return built(demo, tmp_path_factory.mktemp("whole") / "x.h5")


def built(root: Path, target: Path, split: str | None = "training", **options: Any) -> bytes:
    return lm.build(root, split=split, out=target, fresh=True, **QUIET | options).path.read_bytes()


def build_parts(root: Path, target: Path, n: int, split: str | None = "training", **options: Any) -> None:
    for k in reversed(range(1, n + 1)):
        build_part(root, part=(k, n), split=split, out=target, **QUIET | options)


# ---------------------------------------------------------------- the same bytes


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.long), 7])
def test_joined_parts_are_equal_to_one_build(demo, whole, tmp_path, n):
    build_parts(demo, tmp_path / "x.h5", n)
    made = join(tmp_path / "x.h5", progress="none")
    assert made.path.read_bytes() == whole
    assert made.rows + len(made.rejections) == made.found
    assert not parts_folder(made.path).exists()
    check(made.path, demo / "TRAINING")


@pytest.mark.slow
def test_more_parts_than_recordings(tmp_path):
    write_demo(tmp_path / "d", n_files=12)
    right = built(tmp_path / "d", tmp_path / "y.h5")
    build_parts(tmp_path / "d", tmp_path / "x.h5", 12)
    assert join(tmp_path / "x.h5", progress="none").path.read_bytes() == right


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"with_waveforms": True},
        {"spec": {"preset": "overlap"}},
        {"pipeline": lm.PipelineConfig(compression="gzip")},
        pytest.param({"pipeline": lm.PipelineConfig(on_dry_file="reject")}, marks=pytest.mark.long),
    ],
    ids=["waveforms", "overlap", "gzip", "dry"],
)
def test_settings_reach_parts_and_join(demo, tmp_path, options):
    right = built(demo, tmp_path / "y.h5", **options)
    build_parts(demo, tmp_path / "x.h5", 3, **options)
    assert join(tmp_path / "x.h5", progress="none").path.read_bytes() == right


@pytest.mark.slow
def test_names_and_labels_from_a_table(demo, tmp_path):
    paths = sorted(p.relative_to(demo) for p in (demo / "TRAINING").rglob("*.wav"))
    lines = [f'"{p}",{p.parts[1]},pipe {k % 7},{k}' for k, p in enumerate(paths)]
    (tmp_path / "t.csv").write_text("path,label,sensor,pressure\n" + "\n".join(lines))
    labels = tmp_path / "labels.csv"
    labels.write_text(f"path,label\n{paths[3]},OTHER\n{paths[80]},OTHER\n")
    manifest = lm.scan(demo, table=tmp_path / "t.csv", progress="none")
    given = {"manifest": manifest, "labels": labels}
    right = built(demo, tmp_path / "y.h5", None, **given)
    build_parts(demo, tmp_path / "x.h5", 4, None, **given)
    made = join(tmp_path / "x.h5", progress="none")
    assert made.path.read_bytes() == right
    with lm.open_dataset(made.path) as ds:
        assert "OTHER" in ds.class_names


def test_table_that_changes_before_the_join_is_named(demo, tmp_path):
    table = tmp_path / "t.csv"
    paths = sorted(p.relative_to(demo) for p in (demo / "TRAINING").rglob("*.wav"))
    table.write_text("path,label\n" + "\n".join(f'"{p}",{p.parts[1]}' for p in paths))
    manifest = lm.scan(demo, table=table, progress="none")
    build_parts(demo, tmp_path / "x.h5", 2, None, manifest=manifest)
    before = table.read_text()
    table.write_text(before.replace(",LEAK", ",BURST"))
    with raises("table-changed", DataError, path=table):
        join(tmp_path / "x.h5", progress="none")
    table.write_text(before)
    assert join(tmp_path / "x.h5", progress="none").rows


@pytest.mark.slow
def test_parts_without_a_row(tmp_path):
    "Two parts of five hold bad files only: they are counted, and the share of rejected files is judged over the whole."
    noise = np.random.default_rng(0).normal(0, 1000, (20, 80_000)).astype(np.int16)
    for k in range(50):
        path = tmp_path / "d" / ("LEAK" if k < 40 else "QUIET") / f"{k:02d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        if 10 <= k < 20 or (k >= 30 and k < 40):
            path.write_bytes(b"no recording")
        else:
            write_wav(path, noise[k % 20], 8000)
    right = built(tmp_path / "d", tmp_path / "y.h5", None)
    build_parts(tmp_path / "d", tmp_path / "x.h5", 5, None)
    endings = [p.suffix for _, p in sorted(finished_parts(parts_folder(tmp_path / "x.h5"), 5).items())]
    assert endings == [".h5", ".empty", ".h5", ".empty", ".h5"]
    strict = lm.PipelineConfig(max_rejected=0.3)
    with raises("too-many-rejected", DataError):
        join(tmp_path / "x.h5", pipeline=strict, progress="none", keep_parts=True)
    made = join(tmp_path / "x.h5", progress="none", keep_parts=True)
    assert made.path.read_bytes() == right
    assert len(made.rejections) == 20


@pytest.mark.slow
def test_part_without_a_row_whose_recordings_change_is_read_again(tmp_path):
    write_demo(tmp_path / "d", n_files=30)
    paths = sorted((tmp_path / "d" / "TRAINING").rglob("*.wav"))
    good = paths[0].read_bytes()
    for path in paths[: len(paths) // 2]:
        path.write_bytes(b"no recording")
    build_parts(tmp_path / "d", tmp_path / "x.h5", 4)
    assert finished_parts(parts_folder(tmp_path / "x.h5"), 4)[1].suffix == ".empty"
    paths[0].write_bytes(good)
    made = join(tmp_path / "x.h5", progress="none")
    assert made.path.read_bytes() == built(tmp_path / "d", tmp_path / "y.h5")


# ---------------------------------------------------------------- changes and damage between part and join


@pytest.mark.slow
def test_recordings_that_change_before_the_join_are_read_again(tmp_path):
    write_demo(tmp_path / "d", n_files=90)
    listing = lm.scan(tmp_path / "d", split="training", progress="none")
    build_parts(tmp_path / "d", tmp_path / "x.h5", 3, manifest=listing)
    paths = sorted((tmp_path / "d" / "TRAINING").rglob("*.wav"))
    data = paths[5].read_bytes()
    paths[5].write_bytes(data[:-2000] + bytes(2000))
    paths[40].write_bytes(b"RIFF")
    (tmp_path / "d" / "TRAINING" / "LEAK" / "new.wav").write_bytes(
        data
    )  # not in the listing, so not in the data set
    paths[60].unlink()
    made = join(tmp_path / "x.h5", progress="none")
    assert made.summary["copied_rows"] == made.found - 3
    assert made.summary["changes"]["changed"] == 3
    assert sorted(r.code for r in made.rejections) == [
        "changed",
        "not_wav",
    ]  # the removed one has no other size than listed
    (tmp_path / "d" / "TRAINING" / "LEAK" / "new.wav").unlink()
    right = lm.build(tmp_path / "d", split="training", out=tmp_path / "y.h5", **QUIET)
    with lm.open_dataset(made.path) as ds, lm.open_dataset(right.path) as other:
        assert np.array_equal(ds.mels[:], other.mels[:])
        assert list(ds.files["path"]) == list(other.files["path"])


@pytest.mark.slow
def test_a_damaged_row_of_a_part_is_computed_again(demo, whole, tmp_path):
    build_parts(demo, tmp_path / "x.h5", 3)
    part = finished_parts(parts_folder(tmp_path / "x.h5"), 3)[2]
    with h5py.File(part, "r") as f:
        offset = f["segments_mel"].id.get_offset()
    times = part.stat()
    with part.open("r+b") as f:
        f.seek(offset + 1000)
        f.write(b"\xff\xff\xff\xff")
    os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns))
    made = join(tmp_path / "x.h5", progress="none")
    assert made.path.read_bytes() == whole
    assert made.summary["copied_rows"] == made.rows - 1


@pytest.mark.slow
@each("how", ["truncated", "no state", "other file"])
def test_a_damaged_part_is_refused_by_name(demo, whole, tmp_path, how):
    build_parts(demo, tmp_path / "x.h5", 3)
    folder = parts_folder(tmp_path / "x.h5")
    part = finished_parts(folder, 3)[2]
    if how == "truncated":
        os.truncate(part, part.stat().st_size - 1000)
    elif how == "no state":
        part.with_name(f".{part.name}.state").unlink()
    else:
        part.write_bytes(b"?")
    with raises("part-unusable", DataError, path=part):
        join(tmp_path / "x.h5", progress="none")
    assert not (tmp_path / "x.h5").exists()
    part.unlink()
    with raises("parts-missing", DataError):
        join(tmp_path / "x.h5", progress="none")
    build_part(demo, part=(2, 3), split="training", out=tmp_path / "x.h5", **QUIET)
    assert join(tmp_path / "x.h5", progress="none").path.read_bytes() == whole


@pytest.mark.parametrize(
    "text",
    ["", pytest.param("{}", marks=pytest.mark.long), "[1]", "{" * 5000, '{"format": "leakmel parts 1"}'],
)
def test_a_damaged_plan_is_refused(demo, tmp_path, text):
    build_parts(demo, tmp_path / "x.h5", 2)
    (parts_folder(tmp_path / "x.h5") / "plan.json").write_text(text)
    with raises("plan-invalid", DataError):
        join(tmp_path / "x.h5", progress="none")


def test_join_without_parts(tmp_path):
    with raises("no-parts", DataError):
        join(tmp_path / "x.h5", progress="none")


@pytest.mark.slow
@pytest.mark.parametrize("keep_parts", [False, True])
def test_a_joined_data_set_may_be_joined_again(demo, whole, tmp_path, capfd, keep_parts):
    "By Python and by the command, with the usual keys, as often as wanted; also after a build has found nothing to do or new recordings."
    root, target = tmp_path / "data", tmp_path / "x.h5"
    shutil.copytree(demo / "TRAINING", root / "TRAINING")
    build_parts(root, target, 3)
    first = join(target, progress="none", keep_parts=keep_parts)
    written = target.stat()
    for _ in range(2):
        again = join(target, progress="none", keep_parts=keep_parts)
        assert again.verified.ok
        assert again.path.read_bytes() == whole
        assert (target.stat().st_ino, target.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
        for name in ("path", "split", "rows", "found", "rejections", "noted"):
            assert getattr(again, name) == getattr(first, name)
        assert again.summary["nothing_to_do"]
        assert "nothing to do" in repr(again)
        assert again.files_per_s == again.segments_per_s == 0
        missing = set(first.summary) - set(again.summary)  # of a build that has nothing to do
        assert all(name.startswith("mode_") for name in missing)
        assert set(again.summary) <= set(first.summary)
    capfd.readouterr()
    assert main(["build", "--join", str(target), "--quiet", "--json", *["--keep-parts"] * keep_parts]) == 0
    assert set(json.loads(capfd.readouterr().out)) == {*again.summary, "ok", "exit_status"}
    assert main(["build", "--join", str(target), "--quiet", *["--keep-parts"] * keep_parts]) == 0
    assert "nothing to do" in capfd.readouterr().out
    shutil.rmtree(parts_folder(target), ignore_errors=True)
    new = next((root / "TRAINING").rglob("*.wav"))
    shutil.copy(new, new.with_name("new_recording.wav"))
    rows = lm.build(root, split="training", out=target, **QUIET).rows
    again = join(target, progress="none")
    assert (again.rows, again.summary["nothing_to_do"]) == (rows, True)


@pytest.mark.slow
@each("what", ["data set", "report", "row", "metadata", "other rows", "new part", "plan"])
def test_joined_again_without_a_whole_data_set_is_an_error(demo, tmp_path, what):
    "A data set that is gone, damaged or not that of its report, and new parts that are not complete."
    target = tmp_path / "x.h5"
    build_parts(demo, target, 2)
    join(target, progress="none")
    stood = target.read_bytes()
    code = "no-parts"
    kind: type[lm.LeakmelError] = DataError
    match what:
        case "data set":
            target.unlink()
        case "report":
            target.with_name("x.h5.report.json").unlink()
        case "row" | "metadata":
            code, kind = "damaged-data-set", VerifyError
            at = len(stood) - 100 if what == "metadata" else 20_000
            target.write_bytes(stood[:at] + bytes([stood[at] ^ 1]) + stood[at + 1 :])
        case "other rows":
            code, kind = "damaged-data-set", VerifyError
            built(demo, tmp_path / "y.h5", "validation")
            (tmp_path / "y.h5").replace(target)
        case "new part":
            code = "parts-missing"
            build_part(demo, part=(1, 2), split="training", out=target, **QUIET)
        case "plan":
            parts_folder(target).mkdir()
    before = target.read_bytes() if target.exists() else None
    with raises(code, kind):
        join(target, progress="none")
    assert (target.read_bytes() if target.exists() else None) == before


# ---------------------------------------------------------------- processes that do not fit


@each(
    "options",
    [
        {"engine": "torch"},
        {"spec": {"n_mels": 32}},
        {"with_waveforms": True},
        {"part": (2, 4)},
        {"labels": {"LEAK": 1}},
    ],
    ids=["engine", "spec", "waveforms", "number", "labels"],
)
def test_a_process_with_another_plan_is_refused(demo, tmp_path, options):
    listing = lm.scan(demo, split="training", progress="none")
    build_part(demo, part=(1, 3), split="training", out=tmp_path / "x.h5", manifest=listing, **QUIET)
    options = {"part": (2, 3)} | options
    if options.pop("labels", None):
        (tmp_path / "labels.csv").write_text(
            f"path,label\n{os.fsdecode(listing.listings[0].paths[0])},OTHER\n"
        )
        options["labels"] = tmp_path / "labels.csv"
    folder = parts_folder(tmp_path / "x.h5")
    before = sorted(folder.iterdir())
    with raises("other-plan", DataError, path=folder):
        build_part(demo, split="training", out=tmp_path / "x.h5", manifest=listing, **QUIET | options)
    assert sorted(folder.iterdir()) == before


def test_other_plan_names_only_the_fields_that_differ(demo, tmp_path):
    build_part(demo, part=(1, 3), split="training", out=tmp_path / "x.h5", **QUIET)
    with raises("other-plan", DataError) as e:
        build_part(demo, part=(2, 3), split="training", out=tmp_path / "x.h5", spec={"n_mels": 32}, **QUIET)
    assert "spec.n_mels: 64, here 32" in e.value.found
    assert "spec.n_fft" not in e.value.found
    assert len(e.value.found) < 300


def test_refused_part_leaves_no_folder(demo, tmp_path):
    out = tmp_path / "a" / "b" / "x.h5"
    (tmp_path / "d" / "LEAK").mkdir(parents=True)
    with raises("no-recordings", DataError):
        build_part(tmp_path / "d", part=(1, 2), out=out, **QUIET)
    with ThreadPoolExecutor(1) as pool, raises("no-recordings", DataError):
        lm.build(tmp_path / "d", out=out, cluster=pool, **QUIET)
    assert not (tmp_path / "a").exists()


def test_part_of_a_root_with_splits_needs_a_split(demo, tmp_path):
    with raises("split-not-named", UsageError) as e:
        build_part(demo, part=(1, 2), out=tmp_path / "x.h5", **QUIET)
    assert "--split training" in e.value.remedy


def test_how_recordings_are_read_cannot_be_chosen_on_a_cluster(demo, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        options = {"split": "training", "out": tmp_path / "x.h5", "cluster": pool, **QUIET}
        with raises("conflicting-parameters", UsageError):
            lm.build(demo, mode="preload", **options)
        with (
            lm.preload(demo, split="training", progress="none") as ready,
            raises("conflicting-parameters", UsageError),
        ):
            lm.build(demo, preloaded=ready, **options)


@pytest.mark.slow
def test_a_second_build_of_the_same_file_leaves_the_parts_of_the_first(demo, tmp_path):
    out = tmp_path / "x.h5"
    folder = parts_folder(out)
    folder.mkdir()
    (folder / "00001-of-00002.0123abcd.h5").touch()
    options = {"split": "training", "out": out, "fresh": True, **QUIET}
    with ThreadPoolExecutor(1) as pool:
        with OutputLock(folder), raises("output-locked", OutputError):
            lm.build(demo, cluster=pool, **options)
        assert os.listdir(folder) == ["00001-of-00002.0123abcd.h5"]
        assert lm.build(demo, cluster=pool, **options).verified.ok
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".lock")]


def test_a_process_of_another_release_is_refused(demo, tmp_path, monkeypatch):
    build_part(demo, part=(1, 2), split="training", out=tmp_path / "x.h5", **QUIET)
    monkeypatch.setattr(lm, "__version__", "9.9")
    with raises("other-plan", DataError):
        build_part(demo, part=(2, 2), split="training", out=tmp_path / "x.h5", **QUIET)


@pytest.mark.slow
def test_a_join_without_the_engine_of_the_parts_copies_but_does_not_compute(
    demo, whole, tmp_path, monkeypatch
):
    build_parts(demo, tmp_path / "x.h5", 2)

    def unavailable(*args: Any, **more: Any) -> None:
        raise EngineError("not here", code="engine-missing")

    monkeypatch.setattr(parts_module, "open_engine", unavailable)
    assert join(tmp_path / "x.h5", progress="none", keep_parts=True).path.read_bytes() == whole
    with lm.open_dataset(tmp_path / "x.h5") as ds:
        good = ds.files["path"].iloc[0]
    (tmp_path / "x.h5").unlink()
    os.utime(demo / "TRAINING" / good)  # has changed, as far as can be told
    with raises("engine-missing", EngineError):
        join(tmp_path / "x.h5", progress="none")


def test_a_part_of_bad_recordings_needs_no_engine(make_wav, tmp_path, monkeypatch):
    "The join reads its recordings again, and computes nothing."
    root = tmp_path / "data"
    for k in range(10):
        (root / "LEAK").mkdir(parents=True, exist_ok=True)
        (root / "LEAK" / f"{k}.wav").write_bytes(b"no recording")
        make_wav(root / "NOLEAK" / f"{k}.wav", seed=k, n=4096)
    target = tmp_path / "x.h5"
    for k in (1, 2):
        build_part(root, part=(k, 2), out=target, spec=lm.MelSpec(duration_s=1.0), **QUIET)

    def unavailable(*args: Any, **more: Any) -> None:
        raise EngineError("not here", code="engine-missing")

    monkeypatch.setattr(parts_module, "open_engine", unavailable)
    joined = join(target, progress="none")
    assert (joined.rows, len(joined.rejected)) == (10, 10)


@each("part", ["0/3", "4/3", "3", "a/b", (1, 2, 3), "1/0", "1/100000000", None])
def test_wrong_numbers_of_parts(demo, tmp_path, part):
    with raises("invalid-part", UsageError):
        build_part(demo, part=part, split="training", out=tmp_path / "x.h5", **QUIET)


# ---------------------------------------------------------------- killed processes

_ONE_PART = """
import sys, leakmel as lm
lm.build_part(sys.argv[1], part=sys.argv[3], split="training", out=sys.argv[2], engine="cpu", progress="none")
"""


def in_a_process(root: Path, target: Path, part: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", _ONE_PART, str(root), str(target), part], env=env)


def wait_for(found: Callable[[], Any], seconds: float = 60) -> Any:
    "Wait until something is there, and return it."
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.001)
    return value


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    "Enough recordings that a part takes some tenths of a second."
    root = tmp_path_factory.mktemp("large") / "demo"
    write_demo(root, n_files=300)
    for path in list((root / "TRAINING").rglob("*.wav")):
        for k in range(25):
            os.link(path, path.with_name(f"H{k}{path.name}"))
    return root


@pytest.fixture(scope="module")
def whole_large(large, tmp_path_factory) -> bytes:
    "Bytes of its training set, built in one."
    return built(large, tmp_path_factory.mktemp("large") / "x.h5")


def partials(folder: Path) -> list[Path]:
    return list(folder.glob(".*.partial")) if folder.exists() else []


@pytest.mark.slow
def test_a_process_that_was_taken_for_dead_does_not_touch_the_joined_file(large, whole_large, tmp_path):
    target = tmp_path / "x.h5"
    folder = parts_folder(target)
    zombie = in_a_process(large, target, "1/2")
    try:
        wait_for(lambda: partials(folder))
        os.kill(zombie.pid, signal.SIGSTOP)
        assert not finished_parts(folder, 2)
        build_parts(large, target, 2)
        made = join(target, progress="none", keep_parts=True)
        before = made.path.read_bytes()
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.wait(60) == 0
    finally:
        zombie.kill()
    assert made.path.read_bytes() == before == whole_large
    assert len(list(folder.glob("00001-of-00002.*.h5"))) == 2  # both attempts are complete, one was joined
    assert join(target, progress="none").summary["nothing_to_do"]


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_nothing_that_is_joined(large, whole_large, tmp_path):
    target = tmp_path / "x.h5"
    process = in_a_process(large, target, "2/2")
    wait_for(lambda: partials(parts_folder(target)))
    process.kill()
    process.wait()
    build_part(large, part=(1, 2), split="training", out=target, **QUIET)
    with raises("parts-missing", DataError):
        join(target, progress="none")
    build_part(large, part=(2, 2), split="training", out=target, **QUIET)
    assert join(target, progress="none").path.read_bytes() == whole_large


@pytest.fixture(scope="module")
def dask() -> Iterator[Any]:
    "Two workers of Dask in processes of their own, over TCP on this machine."
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=50,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.slow
def test_dask_gives_the_same_bytes_by_client_and_by_address(demo, whole, dask, tmp_path, caplog):
    made = lm.build(demo, split="training", out=tmp_path / "x.h5", cluster=dask.scheduler.address, **QUIET)
    assert made.path.read_bytes() == whole
    assert "not encrypted" not in caplog.text
    sets = lm.build_all(demo, out_dir=tmp_path / "all", cluster=dask, **QUIET)
    assert [r.split for r in sets] == ["TRAINING", "VALIDATION", "TESTING"]
    assert sets[0].path.read_bytes() == whole


def profiler_stops() -> bool:
    from distributed import get_worker

    worker = get_worker()
    return bool(wait_for(lambda: not worker.periodic_callbacks["profile"].is_running(), 20))


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="the fault of sys._current_frames is one of Python 3.11"
)
def test_profiler_of_dask_cannot_block_a_part(dask):
    assert dict(run_tasks(dask, profiler_stops, [(), ()], ["a", "b"])) == {0: True, 1: True}


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(large, whole_large, dask, tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_SIZE", 1000)
    monkeypatch.setattr(parts_module, "_MIN_PART_SIZE", 100)
    target = tmp_path / "x.h5"
    killed = threading.Event()

    def kill_one() -> None:
        folder = parts_folder(target)
        wait_for(lambda: partials(folder))
        pids = dask.run(os.getpid)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        killed.set()

    thread = threading.Thread(target=kill_one)
    thread.start()
    made = lm.build(large, split="training", out=target, cluster=dask, **QUIET)
    thread.join()
    assert killed.is_set()
    assert made.summary["parts"] >= 5
    assert made.path.read_bytes() == whole_large


class DeadlyPool(ProcessPoolExecutor):
    "Its fourth task kills the process that begins it: of two processes, the other is within a task, and two tasks or more are done."

    n_tasks = 0

    def submit(self, function: Any, /, *args: Any, **more: Any) -> Any:
        self.n_tasks += 1
        return super().submit(kill if self.n_tasks == 4 else function, *args, **more)


def kill(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_pool_whose_process_dies_says_so_and_the_next_run_goes_on(
    large, whole_large, tmp_path, monkeypatch
):
    monkeypatch.setattr(parts_module, "PART_SIZE", 1000)
    target = tmp_path / "x.h5"
    folder = parts_folder(target)

    with DeadlyPool(2, get_context("spawn")) as pool, raises("worker-died", MachineError):
        lm.build(large, split="training", out=target, cluster=pool, **QUIET)
    n_parts = json.loads((folder / "plan.json").read_text())["n_parts"]
    before = {p: p.stat().st_mtime_ns for p in finished_parts(folder, n_parts).values()}
    assert before
    assert not target.exists()
    kept = dict[Path, int]()

    def note(*args: Any, **more: Any) -> Any:
        kept.update({p: p.stat().st_mtime_ns for p in finished_parts(folder, n_parts).values()})
        return original(*args, **more)

    original = parts_module._join_files
    monkeypatch.setattr(parts_module, "_join_files", note)
    with ThreadPoolExecutor(2) as threads:
        made = lm.build(large, split="training", out=target, cluster=threads, **QUIET)
    assert before.items() <= kept.items()
    assert made.path.read_bytes() == whole_large


_HEAD = """
import sys, leakmel as lm
from concurrent.futures import ThreadPoolExecutor
from leakmel.dataset import pipeline as parts
parts.PART_SIZE = 1000
with ThreadPoolExecutor(1) as pool:
    lm.build(sys.argv[1], split="training", out=sys.argv[2], cluster=pool, engine="cpu", progress="none")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_the_head_that_ends_can_be_started_again(large, whole_large, tmp_path, number):
    target = tmp_path / "x.h5"
    folder = parts_folder(target)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    head = subprocess.Popen(
        [sys.executable, "-c", _HEAD, str(large), str(target)],
        env=env,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for(lambda: (folder / "plan.json").exists())
    n_parts = json.loads((folder / "plan.json").read_text())["n_parts"]
    wait_for(lambda: len(finished_parts(folder, n_parts)) >= 2)
    head.send_signal(number)
    assert head.wait(30) != 0
    assert not target.exists()
    kept = set(finished_parts(folder, n_parts))
    joined = parts_module.finished_parts
    assert kept
    found = list[set[int]]()

    def note(*args: Any) -> dict[int, Path]:
        result = joined(*args)
        found.append(set(result))
        return result

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(parts_module, "PART_SIZE", 1000)
        patch.setattr(parts_module, "finished_parts", note)
        made = lm.build(large, split="training", out=target, cluster=pool, **QUIET)
    assert kept <= found[0]
    assert made.path.read_bytes() == whole_large


def suffixes(target: Path, n: int) -> list[str]:
    return [path.suffix for _, path in sorted(finished_parts(parts_folder(target), n).items())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, MemoryError, pytest.param(EngineError, marks=pytest.mark.long)]
)
def test_an_interrupted_join_computes_no_row_again(demo, whole, tmp_path, monkeypatch, error):
    target, copied = tmp_path / "x.h5", job_module._copy_rows
    build_parts(demo, target, 4)

    calls = list[int]()

    def interrupt(*args: Any) -> Any:
        calls.append(0)
        if len(calls) < 3:
            return copied(*args)
        raise error("stopped", code="engine-missing") if error is EngineError else error

    with monkeypatch.context() as patch:
        patch.setattr(job_module, "_copy_rows", interrupt)
        with pytest.raises(error):
            join(target, progress="none")
    assert not target.exists()
    assert suffixes(target, 4) == [".h5"] * 4
    made = join(target, progress="none")
    assert made.path.read_bytes() == whole
    assert made.summary["copied_rows"] == made.rows  # none was computed again
    assert not parts_folder(target).exists()


@pytest.mark.slow
def test_parts_go_on_after_too_many_bad_files(demo, whole, tmp_path):
    target = tmp_path / "x.h5"
    build_parts(demo, target, 3)
    with pytest.raises(BadFilesError):
        join(target, pipeline={"max_rejected": 0.0}, progress="none")
    assert suffixes(target, 3) == [".h5"] * 3
    made = join(target, progress="none")
    assert made.path.read_bytes() == whole
    assert made.summary["copied_rows"] == made.rows


@pytest.mark.slow
def test_a_join_by_another_release_loses_no_row(demo, whole, tmp_path, monkeypatch):
    target = tmp_path / "x.h5"
    build_parts(demo, target, 3)
    with pytest.raises(BadFilesError):
        join(target, pipeline={"max_rejected": 0.0}, progress="none")
    with monkeypatch.context() as patch:
        patch.setattr(lm, "__version__", "9.9")
        with raises("other-plan", DataError):
            join(target, progress="none")
    made = join(target, progress="none")
    assert made.summary["copied_rows"] == made.rows


@pytest.mark.slow
def test_parts_are_kept_on_request(demo, tmp_path):
    target = tmp_path / "x.h5"
    build_parts(demo, target, 3)
    with pytest.raises(BadFilesError):
        join(target, pipeline={"max_rejected": 0.0}, progress="none")
    join(target, progress="none", keep_parts=True)
    assert suffixes(target, 3) == [".h5"] * 3


# ---------------------------------------------------------------- progress and timeline


@pytest.mark.slow
def test_bar_counts_the_recordings_of_complete_parts(demo, whole, tmp_path, monkeypatch):
    target, events = tmp_path / "x.h5", list[tuple[int, str]]()

    class Recorded(Progress):
        def update(self, n_done: int, note: str = "") -> None:
            super().update(n_done, note)
            events.append((n_done, self.note))

    monkeypatch.setattr(parts_module, "Progress", Recorded)
    monkeypatch.setattr(parts_module, "_MIN_PART_SIZE", 20)
    with ThreadPoolExecutor(2) as pool:
        made = lm.build(demo, split="training", out=target, cluster=pool, **QUIET)
    assert made.path.read_bytes() == whole
    n = made.summary["parts"]
    assert [note for _, note in events] == [f"{k} of {n} parts" for k in range(1, n + 1)]
    assert [k for k, _ in events] == sorted(k for k, _ in events)
    assert events[-1][0] == made.found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "wanted"),
    [(64, 64), pytest.param(20, 32, marks=pytest.mark.long), (3, 32), (0, 0), (None, None)],
)
def test_the_join_recomputes_rows_of_each_part(demo, tmp_path, monkeypatch, check, wanted):
    "Eight rows for each part, its first and last one among them; the processes of the parts recompute none."
    monkeypatch.setattr(parts_module, "PART_SIZE", 30)
    picked, original = list[list[int]](), verify_module.pick_rows

    def noting(*args: Any, **more: Any) -> Any:
        rows = original(*args, **more)
        picked.append(rows.tolist())
        return rows

    monkeypatch.setattr(verify_module, "pick_rows", noting)
    with ThreadPoolExecutor(1) as pool:
        made = lm.build(
            demo, split="training", out=tmp_path / "x.h5", cluster=pool, **QUIET | {"check": check}
        )
    assert made.summary["parts"] == 4
    assert made.verified.checked == (made.rows if wanted is None else wanted)
    assert len(picked) == 1
    if wanted:
        lost = {r.path for r in made.rejections}
        paths = lm.scan(demo, split="training", progress="none").listings[0].paths
        of_part = [
            [path for path in paths[slice(*part_range(len(paths), k, 4))] if path not in lost]
            for k in (1, 2, 3, 4)
        ]
        rows = {path: k for k, path in enumerate(path for path in paths if path not in lost)}
        assert {rows[own[k]] for own in of_part for k in (0, -1)} <= set(picked[0])


@pytest.mark.slow
def test_a_cluster_does_not_look_at_the_recordings_of_new_parts_again(demo, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_SIZE", 30)
    looked, original = list[int](), existing_module.stamps_of

    def counted(listing: Any, numbers: Any) -> Any:
        looked.append(len(numbers))
        return original(listing, numbers)

    build_part(demo, part=(2, 4), split="training", out=tmp_path / "x.h5", **QUIET)
    monkeypatch.setattr(existing_module, "stamps_of", counted)
    monkeypatch.setattr(job_module, "stamps_of", counted)
    with ThreadPoolExecutor(1) as pool:
        made = lm.build(demo, split="training", out=tmp_path / "x.h5", cluster=pool, **QUIET)
    assert made.path.read_bytes() == whole
    first, end = part_range(made.found, 2, 4)  # that part was complete before
    assert sum(looked) <= end - first + 4 * len(made.rejections)


def around_the_parts(monkeypatch, before: Callable[[], Any], after: Callable[[], Any]) -> None:
    "Have something done before and after each part of a build."
    original = parts_module.run_part

    def run_part(*args: Any) -> Any:
        before()
        try:
            return original(*args)
        finally:
            after()

    monkeypatch.setattr(parts_module, "run_part", run_part)


def on_a_thread(root: Path, target: Path, **options: Any) -> Any:
    "Build on a cluster of one thread, in parts of ten recordings."
    with ThreadPoolExecutor(1) as pool:
        return lm.build(root, split="training", out=target, cluster=pool, **QUIET | options)


@pytest.mark.slow
def test_a_recording_that_changes_while_a_cluster_builds_is_read_by_the_next_build(tmp_path, monkeypatch):
    "As in a build on one machine: the row is that of the recording as it was read."
    write_demo(tmp_path / "d", n_files=60)
    path, other = sorted((tmp_path / "d" / "TRAINING").rglob("*.wav"))[:2]
    right = built(tmp_path / "d", tmp_path / "y.h5")
    around_the_parts(monkeypatch, lambda: None, lambda: path.write_bytes(other.read_bytes()))
    assert on_a_thread(tmp_path / "d", tmp_path / "x.h5", check=0).path.read_bytes() == right
    again = lm.build(tmp_path / "d", split="training", out=tmp_path / "x.h5", **QUIET)
    assert again.summary["changes"] == {"added": 0, "changed": 1, "removed": 0}
    assert again.path.read_bytes() == built(tmp_path / "d", tmp_path / "y.h5")


@pytest.mark.slow
def test_a_changed_recording_in_the_sample_of_the_join_costs_no_other_row(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_SIZE", 10)
    write_demo(tmp_path / "d", n_files=60)
    path, other = sorted((tmp_path / "d" / "TRAINING").rglob("*.wav"))[:2]
    around_the_parts(monkeypatch, lambda: None, lambda: path.write_bytes(other.read_bytes()))
    with raises("recordings-changed", DataError) as e:
        on_a_thread(tmp_path / "d", tmp_path / "x.h5", check=None)
    assert f"leakmel build --join {tmp_path / 'x.h5'}" in e.value.remedy
    made = join(tmp_path / "x.h5", progress="none")
    assert made.summary["copied_rows"] == made.rows - 1 == made.found - 1
    assert made.path.read_bytes() == built(tmp_path / "d", tmp_path / "y.h5")


@pytest.mark.slow
@each("kind", ["changed", "unreadable"])
def test_a_recording_that_a_worker_cannot_read_is_read_by_the_join(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(parts_module, "PART_SIZE", 10)
    write_demo(tmp_path / "d", n_files=40)
    right = built(tmp_path / "d", tmp_path / "y.h5")
    path = sorted((tmp_path / "d" / "TRAINING").rglob("*.wav"))[3]

    def hide() -> None:
        path.rename(tmp_path / "away")
        if kind == "unreadable":
            path.mkdir()

    def show() -> None:
        if kind == "unreadable":
            path.rmdir()
        (tmp_path / "away").rename(path)

    around_the_parts(monkeypatch, hide, show)
    made = on_a_thread(tmp_path / "d", tmp_path / "x.h5")
    assert made.path.read_bytes() == right
    assert not made.rejections


@pytest.mark.slow
def test_a_rejected_recording_that_is_repaired_with_its_old_time_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_SIZE", 10)
    write_demo(tmp_path / "d", n_files=40)
    path = sorted((tmp_path / "d" / "TRAINING").rglob("*.wav"))[3]
    good, times = path.read_bytes(), path.stat()

    def write(data: bytes) -> None:
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    write(b"?" * len(good))
    around_the_parts(monkeypatch, lambda: None, lambda: write(good))
    made = on_a_thread(tmp_path / "d", tmp_path / "x.h5")
    assert made.path.read_bytes() == built(tmp_path / "d", tmp_path / "y.h5")
    assert not made.rejections


@pytest.mark.slow
def test_wrong_rows_of_a_part_are_found_and_all_parts_can_be_built_again(demo, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_SIZE", 30)
    with monkeypatch.context() as patch:
        original = parts_module.run_part

        def wrong(request: Any, own: Any, *args: Any) -> Any:
            with patch.context() as inner:
                if own.part_of == (2, 4):
                    inner.setattr(job_module.RowFile, "write", write_more)
                    inner.setattr(job_module, "digests_of", lambda rows: digests_of(rows + np.float16(1)))
                return original(request, own, *args)

        def write_more(self: Any, first: int, rows: np.ndarray, part: int = 0) -> int:
            return right_write(self, first, rows + np.float16(1))

        right_write = job_module.RowFile.write
        patch.setattr(parts_module, "run_part", wrong)
        with raises("wrong-rows", VerifyError):
            on_a_thread(demo, tmp_path / "x.h5")
    assert not (tmp_path / "x.h5").exists()
    assert on_a_thread(demo, tmp_path / "x.h5").path.read_bytes() == whole


@pytest.mark.slow
def test_a_part_that_ends_early_while_it_is_copied_costs_no_other_part(demo, whole, tmp_path, monkeypatch):
    build_parts(demo, tmp_path / "x.h5", 3)

    def cut(*args: Any) -> None:
        raise VerifyError("the file is shorter than its header says", code="file-ends-early")

    with monkeypatch.context() as patch, raises("file-ends-early", VerifyError):
        patch.setattr(job_module, "read_at", cut)
        join(tmp_path / "x.h5", progress="none")
    assert len(finished_parts(parts_folder(tmp_path / "x.h5"), 3)) == 3
    assert join(tmp_path / "x.h5", progress="none").path.read_bytes() == whole


def test_a_part_has_no_parsed_names_no_report_and_no_journal(demo, tmp_path):
    build_parts(demo, tmp_path / "x.h5", 1)
    folder = parts_folder(tmp_path / "x.h5")
    part = finished_parts(folder, 1)[1]
    with h5py.File(part) as f:
        assert {"path", "digest", "sample_rate"} <= set(f["files"])
        assert not {"sensor", "recording", "start_time", "gain"} & set(f["files"])
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [part.name, f".{part.name}.state", "listing.npz", "plan.json"]
    )


def test_a_part_that_fails_leaves_no_file(demo, tmp_path, monkeypatch):
    def fail(*args: Any, **more: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(targets_module, "publish", fail)
    with raises("machine", MachineError):
        build_part(demo, part=(1, 2), split="training", out=tmp_path / "x.h5", **QUIET)
    assert sorted(p.name for p in parts_folder(tmp_path / "x.h5").iterdir()) == ["listing.npz", "plan.json"]


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    "Two processes, whose start takes longer than what a test has them do."
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.slow
def test_timeline_has_a_lane_for_each_process(demo, processes, tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_SIZE", 30)
    results = lm.build_all(demo, out_dir=tmp_path, cluster=processes, **QUIET)
    host = socket.gethostname()
    for made in results:
        for timeline in (made.timeline, read_timeline(made.timeline_path)):
            own = [s for s in timeline.spans if s.split == made.split and s.lane.startswith(host)]
            assert {s.lane for s in own} <= {f"{host}/worker-0", f"{host}/worker-1"}
            assert sum(s.n_files for s in own if s.stage == "read") == made.found
            assert len(own) <= made.summary["parts"] * 40 * len(STAGES)
            for lane in {s.lane for s in own}:
                spans = [s for s in own if s.lane == lane]
                assert covered_s(spans) == pytest.approx(sum(s.seconds for s in spans))  # no two at one time
            every = [s for s in timeline.spans if s.split in ("", made.split)]
            assert (
                0 <= min(s.start_s for s in own) <= max(s.end_s for s in own) <= max(s.end_s for s in every)
            )
            busy = attribute(timeline, made.split)
            first, last = interval_s(timeline, made.split) or (0, 0)
            assert sum(busy.values()) == pytest.approx(last - first)
            assert covered_s(s for s in every if s.end_s > first) >= 0.9 * (last - first)
    waits = [s for s in results[0].timeline.spans if (s.lane, s.stage) == ("main", "wait")]
    assert len(waits) == sum(made.summary["parts"] for made in results)  # else they count as writing
    text = analysis_text(results[0].timeline, [made.summary for made in results], width=100, analysis="full")
    assert "limit" in text.lower()
    lanes = {s.lane for s in results[0].timeline.spans if s.lane.startswith(host)}
    drawn = batch_timeline(results[0].timeline).layout.yaxis.ticktext
    assert lanes <= set(drawn)
    assert "reader-0" not in {s.lane for s in results[0].timeline.spans}


# ---------------------------------------------------------------- updates, clusters, errors


@pytest.mark.slow
def test_an_existing_data_set_is_updated_without_the_cluster(tmp_path):
    write_demo(tmp_path / "d", n_files=60)
    with ThreadPoolExecutor(1) as pool:
        options = dict(split="training", out=tmp_path / "x.h5", cluster=pool, **QUIET)
        assert lm.build(tmp_path / "d", **options).summary["parts"] == 1
        again = lm.build(tmp_path / "d", **options)
        assert again.summary["nothing_to_do"]
        assert again.summary["parts"] == 0
        other = lm.build(tmp_path / "d", spec={"n_mels": 32}, **options)
        assert other.summary["parts"] == 1
        assert lm.build(tmp_path / "d", spec={"n_mels": 32}, fresh=True, **options).summary["parts"] == 1


@pytest.mark.slow
@each("cluster", [3, object(), [], "tcp://127.0.0.1:1"])
def test_what_is_no_cluster(demo, tmp_path, cluster, monkeypatch):
    if isinstance(cluster, str):
        distributed = pytest.importorskip("distributed")
        original = distributed.Client.__init__
        monkeypatch.setattr(
            distributed.Client,
            "__init__",
            lambda self, *a, timeout, **more: original(self, *a, timeout=0.5, **more),
        )
    with raises("no-cluster"):
        lm.build(demo, split="training", out=tmp_path / "x.h5", cluster=cluster, **QUIET)


@each(
    ("address", "warns"),
    [
        ("tcp://10.0.0.1:8786", True),
        ("10.0.0.1:8786", True),
        ("tls://10.0.0.1:8786", False),
        ("tcp://127.0.0.1:8786", False),
        ("tcp://127.9.9.9:8786", False),
        ("tcp://[::1]:8786", False),
        ("localhost:8786", False),
        ("tcp://127.evil.example:8786", True),
        ("tcp://localhost.evil.example:8786", True),
        ("ws://10.0.0.1:8786", True),
        ("wss://10.0.0.1:8786", False),
        ("inproc://10.0.0.1/7/1", False),
    ],
)
def test_an_open_connection_to_another_machine_is_warned_of(address, warns, caplog):
    from leakmel.core.cluster import _warn_if_open

    _warn_if_open(address)
    assert ("not encrypted" in caplog.text) == warns


def fail(number: int) -> int:
    if number == 1:
        raise BadFilesError("bad", [], 3, code="all-rejected", path="/x")
    return number


@pytest.mark.slow
def test_errors_of_tasks_arrive_whole_and_end_the_others(processes):
    with open_cluster(processes) as client:
        with raises("all-rejected", BadFilesError) as e:
            list(run_tasks(client, fail, [(k,) for k in range(3)], ["a", "b", "c"]))
        assert e.value.path == "/x"


class BrokenLater(ThreadPoolExecutor):
    "As a pool of processes that is broken when it gets the second task."

    n_tasks = 0

    def submit(self, function: Any, /, *args: Any, **more: Any) -> Any:
        self.n_tasks += 1
        if self.n_tasks > 1:
            raise BrokenProcessPool("a process was terminated")
        return super().submit(function, *args, **more)


def test_a_pool_that_is_broken_before_a_task_says_so() -> None:
    calls, names = [(k,) for k in range(3)], ["a", "b", "c"]
    with BrokenLater(1) as pool:
        found = run_tasks(pool, abs, calls, names, most=1)
        assert next(found) == (0, 0)
        with raises("worker-died", MachineError, found="b: BrokenProcessPool: a process was terminated"):
            next(found)
    with BrokenLater(1) as pool:
        found = run_tasks(pool, abs, calls, names, most=1, yield_deaths=True)
        assert [getattr(result, "code", result) for _, result in found] == [0, "worker-died"]


@each(
    "error",
    [
        DataError("x", code="data", path="p", found=3, remedy="r"),
        RecordingError("too_short", "{n} s", path="p"),
        BadFilesError("x", [], 4, code="all-rejected"),
    ],
)
def test_errors_can_be_pickled(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


# ---------------------------------------------------------------- stored manifests


def test_stored_manifest_with_odd_names(tmp_path):
    folder = os.fsencode(tmp_path / "d") + b"/LEAK\xff"
    os.makedirs(folder)
    names = [b"a.wav", b"new\nline.wav", b"\xfe.wav", b" .wav", b"-x.wav", "ü.wav".encode()]
    for name in names:
        with open(folder + b"/" + name, "wb"):
            pass
    found = lm.scan(tmp_path / "d", progress="none")
    again = lm.Manifest.load(found.save(tmp_path / "l.npz"))
    assert again.listings[0].paths == found.listings[0].paths
    assert again.label_names == found.label_names
    assert again.counts() == found.counts()
    assert again.problems.equals(found.problems)
    assert np.array_equal(again.listings[0].mtimes_ns, found.listings[0].mtimes_ns)


@each("path", [b"/etc/x.wav", b"../x.wav", b"a/../../x.wav", b"LEAK/..", b".."])
def test_stored_manifest_that_leads_out_of_the_folder_is_refused(demo, tmp_path, path):
    found = lm.scan(demo, split="training", progress="none")
    found.listings[0].paths[3] = path
    with raises("no-manifest", DataError):
        lm.Manifest.load(found.save(tmp_path / "l.npz"))


@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1), data=st.binary(min_size=1, max_size=20), cut=st.booleans())
def test_damaged_stored_manifest_is_refused_or_equal(demo_listing, at, data, cut):
    good, path, right = demo_listing
    k = int(at * (len(good) - 1))
    path.write_bytes(good[:k] if cut else good[:k] + data + good[k + len(data) :])
    try:
        found = lm.Manifest.load(path)
    except DataError:
        return
    assert len(found) == right


@pytest.fixture(scope="module")
def demo_listing(demo, tmp_path_factory) -> tuple[bytes, Path, int]:
    found = lm.scan(demo, split="testing", progress="none")
    path = found.save(tmp_path_factory.mktemp("listing") / "l.npz")
    return path.read_bytes(), path.with_name("m.npz"), len(found)


# ---------------------------------------------------------------- the command line


@pytest.mark.slow
def test_command_line(demo, whole, tmp_path, capsys):
    out, listing = tmp_path / "x.h5", tmp_path / "l.npz"
    assert main(["scan", str(demo), "--save", str(listing), "--quiet"]) in (0, 1)
    common = ["build", str(demo), "--split", "training", "--out", str(out), "--engine", "cpu", "--quiet"]
    for k in (1, 2):
        assert main([*common, "--listing", str(listing), "--part", f"{k}/2"]) == 0
    assert "complete before" not in capsys.readouterr().out
    assert main([*common, "--listing", str(listing), "--part", "1/2"]) == 0
    assert "complete before" in capsys.readouterr().out
    assert main(["build", "--join", str(out), "--quiet", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["parts"] == 2
    assert body["rows"] + body["rejected"] == body["found"]
    assert out.read_bytes() == whole
    assert main([*common, "--part", "1/2", "--fresh"]) == 2
    assert main([*common, "--part", "1/2", "--analysis", "full"]) == 2
    assert main(["build", "--join", str(out), "--quiet"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    out.unlink()
    assert main(["build", "--join", str(out), "--quiet"]) == 1
    assert re.search("no parts", capsys.readouterr().err)


def test_command_line_of_a_part_without_a_row(tmp_path, capsys):
    write_demo(tmp_path / "d", n_files=12)
    common = ["build", str(tmp_path / "d"), "--split", "training", "--out", str(tmp_path / "x.h5")]
    assert main([*common, "--part", "12/12", "--engine", "cpu", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["was_complete"] is False
    for path in (tmp_path / "d" / "TRAINING").rglob("*.wav"):
        path.write_bytes(b"RIFF")
    rate = ["--sample-rate", "8000", "--duration-s", "10"]
    common[5] = str(tmp_path / "y.h5")
    assert main([*common, *rate, "--part", "1/2", "--engine", "cpu", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "none of which can be used" in said
    assert "complete before" not in said


# ---------------------------------------------------------------- folders of parts that cannot be trusted


def test_labels_that_are_given_to_a_later_part_are_refused_or_used(demo, tmp_path):
    listing = lm.scan(demo, split="training", progress="none").listings[0]
    (tmp_path / "labels.csv").write_text(f"path,label\n{os.fsdecode(listing.paths[0])},OTHER\n")
    options = {"split": "training", "out": tmp_path / "x.h5", **QUIET}
    build_part(demo, part=(1, 2), **options)
    with raises("other-plan", DataError):
        build_part(demo, part=(2, 2), labels=tmp_path / "labels.csv", **options)


def test_listing_that_names_another_folder_is_refused(demo, tmp_path):
    found = lm.scan(demo, split="training", progress="none")
    object.__setattr__(found.listings[0], "folder", tmp_path)
    with raises("no-manifest", DataError):
        lm.Manifest.load(found.save(tmp_path / "l.npz"))


@each("how", ["link", "fifo", "many"])
def test_hostile_folder_of_parts_is_refused(demo, tmp_path, how):
    build_parts(demo, tmp_path / "x.h5", 2)
    folder = parts_folder(tmp_path / "x.h5")
    plan = folder / "plan.json"
    if how == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "fifo":
        plan.unlink()
        os.mkfifo(plan)
    else:
        plan.write_text(json.dumps(json.loads(plan.read_text()) | {"n_parts": 10**12}))
    with raises("plan-invalid", DataError):
        join(tmp_path / "x.h5", progress="none")


def test_options_of_a_join_change_only_what_they_name(demo, tmp_path):
    strict = lm.PipelineConfig(max_rejected=0.0)
    build_parts(demo, tmp_path / "x.h5", 2, pipeline=strict)
    with raises("too-many-rejected", DataError):
        join(tmp_path / "x.h5", pipeline={"compression": "gzip"}, progress="none")


def test_save_does_not_write_through_a_link(demo, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".l.npz.new").symlink_to(tmp_path / "victim")
    lm.scan(demo, progress="none").save(tmp_path / "l.npz")
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "l.npz").is_symlink()
