"Bad files: rejected or a reason to stop; too many prevent publication; many consecutive ones are a machine fault."

import errno
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
from each import each
from errors import raises
from independent import check, leftovers, walk

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import LeakmelError, MachineError, UsageError
from leakmel.dataset import job, loader, schema
from leakmel.dataset.config import PipelineConfig
from leakmel.dataset.loader import MOST_LISTED, BadFilesError
from leakmel.recordings import listing
from leakmel.recordings.manifest import read_content
from leakmel.recordings.wav import MACHINE_FAULTS, MAX_READ_FAILURES

CONFIG = PipelineConfig(
    files_per_batch=4, compute_workers=2, fsync=False, monitor_interval_s=0.0, journal_bytes=1
)
WORKER_LAYOUTS: dict[str, dict[str, Any]] = {
    "each for itself": {},
    "hand to hand": {"read_workers": 2, "slots": 4},
}
SPEC = lm.MelSpec.preset("disjoint", duration_s=1.0)
BESIDE = ["x.h5", "x.h5.report.json", "x.h5.timeline.json"]
RESUMABLE = [".x.h5.journal", ".x.h5.partial"]


def build(root: Path, out: Path, worker_layout: str = "each for itself", **options: Any) -> lm.BuildResult:
    "A build in small batches; fields of PipelineConfig go there."
    config = replace(
        CONFIG,
        **WORKER_LAYOUTS[worker_layout],
        **{k: options.pop(k) for k in list(options) if hasattr(CONFIG, k)},
    )
    usual: dict[str, Any] = {
        "spec": SPEC,
        "engine": "reference",
        "progress": "none",
        "check": 4,
        "pipeline": config,
    }
    return lm.build(root, out=out, **usual | options)


def settle(root: Path) -> None:
    "Let the files be old enough to be told from a further change: builds ask for the time of the last change of any kind."
    time.sleep(max(0.0, max(p.stat().st_ctime for p in root.rglob("*.wav")) + 0.05 - time.time()))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKMEL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path, make_wav: Callable) -> Path:
    "30 recordings of 1 s, and ten files that are none: a quarter of forty."
    root = tmp_path / "data"
    for k in range(30):
        make_wav(root / ("LEAK" if k % 2 == 0 else "NOLEAK") / f"{k:02d}.wav", seed=k)
    for k in range(7):
        (root / "NOLEAK" / f"y {k}.wav").write_bytes(b"")
    for k in range(3):
        (root / "NOLEAK" / f"z {k}.wav").write_bytes(b"no recording")
    settle(root)
    return root


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    "The paths of recordings that builds read."
    paths: list[bytes] = []
    real = loader.BatchReader.fill

    def fill(self: loader.BatchReader, slot: loader.Slot) -> int:
        paths.extend(self.listing.paths[slot.first : slot.first + slot.n])
        return real(self, slot)

    monkeypatch.setattr(loader.BatchReader, "fill", fill)
    return paths


# ---- more than may be


@pytest.mark.slow
@each(
    ("worker_layout", "mode"),
    [
        ("each for itself", "stream"),
        ("hand to hand", "stream"),
        ("each for itself", "preload"),
        ("hand to hand", "memmap"),
    ],
)
@each("old", [False, True], ids=["alone", "beside an old one"])
def test_too_many_rejected_files_prevent_publication_and_allow_resume(
    data: Path, tmp_path: Path, read: list[bytes], worker_layout: str, mode: str, old: bool
) -> None:
    target, named = tmp_path / "out" / "x.h5", {"mode": mode}
    before = b""
    if old:
        lm.build(data, out=target, spec=replace(SPEC, n_mels=20), engine="reference", progress="none")
        before = target.read_bytes()
    with raises("too-many-rejected", BadFilesError, path=data, says="10 of 40") as raised:
        build(data, target, worker_layout, max_rejected=0.2, **named)
    output = str(raised.value)
    for words in ("25 %", "20 %", "7 empty, 3 not_wav", "NOLEAK/y 0.wav", "NOLEAK/z 0.wav", "max_rejected"):
        assert words in output, words
    assert raised.value.exit_code == 1
    assert raised.value.__notes__ == [
        "30 rows are kept: run the same build again to resume, or use fresh=True (--fresh) to start over"
    ]
    assert (target.read_bytes() if old else b"") == before
    assert leftovers(target.parent, *(BESIDE if old else [])) == RESUMABLE
    read.clear()
    result = build(
        data, target, worker_layout, max_rejected=0.25, **named
    )  # a quarter is not more than a quarter
    assert (result.summary["resumed_rows"], len(result.rejections), result.summary["rejected_share"]) == (
        30,
        10,
        0.25,
    )
    looked_at = [
        p for p in walk(data) if p.startswith((b"NOLEAK/y", b"NOLEAK/z"))
    ]  # again, since they may have been mended
    assert sorted(read) == (
        [] if mode == "memmap" else looked_at
    )  # one by one, where batches come from the cache file
    assert leftovers(target.parent, *BESIDE) == []
    check(target, data)
    build(data, tmp_path / "y.h5", fresh=True)
    assert target.read_bytes() == (tmp_path / "y.h5").read_bytes()  # the policy is in no byte


def test_default_max_rejected_stops_above_90_percent(data: Path, tmp_path: Path) -> None:
    for k in range(230):
        (data / "LEAK" / f"x {k}.wav").write_bytes(b"")
    assert build(data, tmp_path / "x.h5").rows == 30  # 240 of 270, 88.9 %
    for k in range(50):
        (data / "NOLEAK" / f"x {k}.wav").write_bytes(b"")
    with raises("too-many-rejected", BadFilesError, says="290 of 320"):
        build(data, tmp_path / "x.h5")
    assert build(data, tmp_path / "x.h5", max_rejected=1.0).rows == 30


def test_files_that_were_rejected_before_count_without_being_read(
    data: Path, tmp_path: Path, read: list[bytes], make_wav: Callable
) -> None:
    target = tmp_path / "x.h5"
    build(data, target)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}

    def refused(code: str = "too-many-rejected", **options: Any) -> str:
        read.clear()
        with raises(code, BadFilesError) as raised:
            build(data, target, **options)
        assert {
            p.name: p.read_bytes()
            for p in tmp_path.iterdir()
            if p.is_file() and "partial" not in p.name and "journal" not in p.name
        } == before
        return str(raised.value)

    assert "10 of 40 files" in refused(
        max_rejected=0.2
    )  # nothing is to be done, and the answer is that of a build from nothing
    assert "NOLEAK/y 0.wav" in refused("bad-file", on_bad_file="stop")
    assert read == []
    for k in range(2):
        make_wav(data / "LEAK" / f"more {k}.wav", seed=90 + k)
    settle(data)
    assert "10 of 42 files" in refused(max_rejected=0.2)
    assert sorted(read) == [b"LEAK/more 0.wav", b"LEAK/more 1.wav"]
    assert "NOLEAK/y 0.wav" in refused("bad-file", on_bad_file="stop")
    assert read == []
    result = build(data, target, max_rejected=0.24)
    assert (result.rows, result.found) == (32, 42)
    build(data, tmp_path / "y.h5", fresh=True)
    assert target.read_bytes() == (tmp_path / "y.h5").read_bytes()


def test_max_rejected_applies_to_each_data_set(data: Path, tmp_path: Path) -> None:
    for split in ("TRAINING", "TESTING"):
        shutil.copytree(data, tmp_path / "network" / split)
    for path in (tmp_path / "network" / "TRAINING").rglob("[yz]*.wav"):
        path.unlink()
    common: dict[str, Any] = {
        "out_dir": tmp_path / "out",
        "spec": SPEC,
        "engine": "reference",
        "progress": "none",
    }
    with raises("too-many-rejected", BadFilesError, says="TESTING: 10 of 40") as raised:
        lm.build_all(tmp_path / "network", pipeline=replace(CONFIG, max_rejected=0.2), **common)
    assert raised.value.n_found == 40
    assert not (tmp_path / "out" / "TESTING_DATASET.H5").exists()
    assert [r.rows for r in lm.build_all(tmp_path / "network", pipeline=CONFIG, **common)] == [30, 30]


# ---- the first one stops


@pytest.mark.slow
@each(
    ("worker_layout", "mode"),
    [
        ("each for itself", "stream"),
        ("hand to hand", "stream"),
        ("each for itself", "preload"),
        ("hand to hand", "memmap"),
    ],
)
def test_on_bad_file_stop_ends_at_the_first_bad_file(
    data: Path, tmp_path: Path, worker_layout: str, mode: str
) -> None:
    target = tmp_path / "out" / "x.h5"
    with raises("bad-file", BadFilesError) as raised:
        build(data, target, worker_layout, mode=mode, on_bad_file="stop")
    (bad,) = raised.value.rejections
    output = str(raised.value)
    for words in (os.fspath(data / os.fsdecode(bad.path)), f"({bad.code})", bad.message, "on_bad_file"):
        assert words in output, words
    assert bad.code in ("empty", "not_wav")
    assert raised.value.exit_code == 1
    assert not target.exists()
    kept = leftovers(target.parent)
    assert kept == (RESUMABLE if mode == "stream" else [])  # else it was met before the first row
    result = build(data, target, worker_layout, mode=mode)
    assert (result.summary["resumed_rows"] > 0) == bool(kept)
    build(data, tmp_path / "y.h5", fresh=True)
    assert target.read_bytes() == (tmp_path / "y.h5").read_bytes()


def test_on_bad_file_stop_builds_good_files(data: Path, tmp_path: Path) -> None:
    for path in data.rglob("[yz]*.wav"):
        path.unlink()
    build(data, tmp_path / "x.h5", on_bad_file="stop", max_rejected=0.0)
    build(data, tmp_path / "y.h5")
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "y.h5").read_bytes()
    (data / "loose.wav").write_bytes(
        (data / "LEAK" / "00.wav").read_bytes()
    )  # a recording without a label is a bad file too
    before = (tmp_path / "x.h5").read_bytes()
    with raises("bad-file", BadFilesError, path=data / "loose.wav", says="no_label"):
        build(data, tmp_path / "x.h5", on_bad_file="stop")
    assert (tmp_path / "x.h5").read_bytes() == before


# ---- how it is asked for, and what is said


@each(
    "wrong",
    [
        {"on_bad_file": "skip"},
        {"on_bad_file": None},
        {"max_rejected": 1.01},
        {"max_rejected": -0.1},
        {"max_rejected": float("nan")},
        {"max_rejected": "1"},
    ],
    ids=str,
)
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        PipelineConfig(**wrong)


def test_bad_files_on_the_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [
        "build",
        str(data),
        "--out",
        str(tmp_path / "x.h5"),
        "--duration-s",
        "1",
        "--engine",
        "reference",
        "--check",
        "4",
    ]
    assert main([*words, "--max-rejected", "0.1", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["ok"], body["error_type"], body["found"], body["rejected"]) == (
        False,
        "BadFilesError",
        40,
        10,
    )
    assert body["rejected_by_code"] == {"empty": 7, "not_wav": 3}
    assert [f["path"] for f in body["rejected_files"]] == [
        os.fsdecode(p) for p in walk(data) if p.startswith((b"NOLEAK/y", b"NOLEAK/z"))
    ]
    assert main([*words, "--on-bad-file", "stop", "--quiet"]) == 1
    assert "NOLEAK/" in capsys.readouterr().err
    for more in (["--on-bad-file", "skip"], ["--max-rejected", "30"], ["--max-rejected", "few"]):
        assert main([*words, *more]) == 2
    assert not (tmp_path / "x.h5").exists()
    capsys.readouterr()
    assert main([*words, "--max-rejected", "0.3", "--quiet", "--full"]) == 0
    assert ": 25 % of the files (at most 30 % allowed)" in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "x.h5.report.json").read_text())
    assert (
        report["rejected_share"],
        report["pipeline"]["max_rejected"],
        report["pipeline"]["on_bad_file"],
    ) == (0.25, 0.3, "reject")


def test_bad_files_in_the_notebook(data: Path, tmp_path: Path) -> None:
    from notebook_runs import error_of

    given: dict[str, Any] = {
        "data_root": str(data),
        "out": str(tmp_path / "out"),
        "duration_s": 1.0,
        "sample_rate": 4096,
        "engine": "reference",
    }
    assert "10 of 40 files" in error_of("build.ipynb", max_rejected=0.2, **given)
    assert "a bad file (" in error_of("build.ipynb", on_bad_file="stop", **given)
    assert "on_bad_file" in error_of("build.ipynb", on_bad_file="skip", **given)
    assert not list((tmp_path / "out").glob("*.H5"))


def test_long_lists_are_shortened_in_json() -> None:
    from leakmel.dataset.schema import Rejected

    error = BadFilesError(
        "many", [Rejected(b"%d.wav" % k, "empty", "") for k in range(MOST_LISTED + 5)], 5000
    )
    assert (error.facts["rejected"], len(error.facts["rejected_files"])) == (MOST_LISTED + 5, MOST_LISTED)


# ---- many in a row


@pytest.fixture
def many(tmp_path: Path, make_wav: Callable) -> Path:
    "260 recordings in one folder."
    root = tmp_path / "data"
    make_wav(root / "LEAK" / "00.wav", seed=1)
    content = (root / "LEAK" / "00.wav").read_bytes()
    for k in range(1, 260):
        (root / "LEAK" / f"{k:03d}.wav").write_bytes(content)
    settle(root)
    return root


@pytest.mark.slow
@each(
    ("worker_layout", "mode"),
    [
        ("each for itself", "stream"),
        ("hand to hand", "stream"),
        ("each for itself", "preload"),
        ("hand to hand", "memmap"),
    ],
)
def test_folder_that_disappears_stops_the_build(
    many: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tried: Callable,
    worker_layout: str,
    mode: str,
) -> None:
    "As a mount does: every path says that there is no such file, and good recordings must not be called gone."
    target, away, real = tmp_path / "out" / "x.h5", tmp_path / "away", loader.BatchReader.fill

    def fill(self: loader.BatchReader, slot: loader.Slot) -> int:
        if slot.first >= 40:
            with suppress(FileNotFoundError):
                many.rename(away)
        return real(self, slot)

    with monkeypatch.context() as m:
        m.setattr(loader.BatchReader, "fill", fill)
        with pytest.raises(
            MachineError,
            match=rf"{MAX_READ_FAILURES} recordings in a row could not be opened or read.*ENOENT",
        ) as raised:
            build(many, target, worker_layout, mode=mode)
    assert str(many / "LEAK") in str(raised.value)
    assert not target.exists()
    assert leftovers(target.parent) == (RESUMABLE if mode == "stream" else [])
    away.rename(many)
    result = build(many, target, worker_layout, mode=mode)
    assert (result.rows, result.found) == (260, 260)
    assert (result.summary["resumed_rows"] > 0) == (mode == "stream")
    build(many, tmp_path / "y.h5", fresh=True)
    assert target.read_bytes() == (tmp_path / "y.h5").read_bytes()
    tried("S7")


@pytest.mark.slow
@each("code", [errno.EACCES, errno.ENOENT, errno.ENXIO], ids=lambda c: errno.errorcode[c])
def test_consecutive_read_failures_stop_build_and_scan(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Callable, code: int
) -> None:
    "Every file from one on: the build and a scan of the contents stop. One file in two: all of these are rejected."
    monkeypatch.setattr(loader, "native", lambda: None)  # read by Python, where faults can be planted
    monkeypatch.setattr(
        "leakmel.recordings.manifest.usable_cores", lambda: 1
    )  # a thread held up may give one from before after many refused
    real, hit = os.open, [lambda k: k > 100]

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        name = os.path.basename(os.fsdecode(path))
        if name.endswith(".wav") and hit[0](int(name[:-4])):
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *more, **named)

    listings = lm.scan(many).listings
    monkeypatch.setattr(os, "open", refuse)
    for work in (
        lambda: build(many, tmp_path / "x.h5", check=0, compute_workers=1),
        lambda: read_content(listings, progress="none"),
    ):
        with pytest.raises(
            MachineError, match=f"{MAX_READ_FAILURES} recordings in a row.*{errno.errorcode[code]}"
        ):
            work()
        tried("S7")
    hit[0] = lambda k: k % 2 == 1
    result = build(many, tmp_path / "x.h5", check=0, fresh=True)
    assert (result.rows, len(result.rejections)) == (130, 130)
    assert {r.code for r in result.rejections} == {"changed" if code == errno.ENOENT else "unreadable"}
    assert len(read_content(listings, progress="none")[1]) == 130


def test_consecutive_broken_files_are_rejected(many: Path, tmp_path: Path, tried: Callable) -> None:
    for k in range(20, 220):
        (many / "LEAK" / f"{k:03d}.wav").write_bytes(b"RIFF, and no more")
    result = build(many, tmp_path / "x.h5")
    assert (result.rows, len(result.rejections), result.found) == (60, 200, 260)
    assert {r.code for r in result.rejections} == {"not_wav"}
    tried("S7")


def test_special_files_are_no_machine_fault(many: Path, tmp_path: Path) -> None:
    for k in range(20, 220):
        (many / "LEAK" / f"{k:03d}.wav").unlink()
        os.mkfifo(many / "LEAK" / f"{k:03d}.wav")
    result = build(many, tmp_path / "x.h5")
    assert result.rows + len(result.rejections) == result.found
    assert result.rows == 60
    assert stat.S_ISFIFO(os.stat(many / "LEAK" / "100.wav").st_mode)


def test_few_missing_files_are_rejected(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "Fewer than would be the machine's fault: somebody takes recordings away while a build runs."
    real, gone = (
        loader.BatchReader.fill,
        [many / "LEAK" / f"{k:03d}.wav" for k in range(120, 120 + MAX_READ_FAILURES - 10)],
    )

    def fill(self: loader.BatchReader, slot: loader.Slot) -> int:
        for path in gone:
            path.unlink(missing_ok=True)
        return real(self, slot)

    monkeypatch.setattr(loader.BatchReader, "fill", fill)
    result = build(many, tmp_path / "x.h5", check=0)
    assert (result.rows, result.summary["rejected_by_code"]) == (260 - len(gone), {"changed": len(gone)})


def test_a_network_folder_without_its_server_is_a_fault_of_the_machine() -> None:
    for name in ("EHOSTDOWN", "ETIMEDOUT", "ECONNRESET", "ENETUNREACH", "ESTALE", "EIO"):
        assert getattr(errno, name) in MACHINE_FAULTS, name
    assert not MACHINE_FAULTS & {
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.EISDIR,
        errno.ELOOP,
        errno.EINVAL,
    }


def as_unprivileged_user(work: Callable[[], object]) -> str:
    "Return the result of a function in a child process without root privileges."
    out, into = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setegid(65534)
                os.seteuid(65534)
            try:
                output = repr(work())
            except Exception as e:
                output = str(e)
            os.write(into, output.encode()[:4000])
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as f:
        output = f.read()
    os.waitpid(pid, 0)
    return output


def test_folder_without_execute_permission_is_reported(make_wav: Callable, tried: Callable) -> None:
    "Its files can be listed and not looked at."
    with tempfile.TemporaryDirectory() as d:  # not below pytest's, which nobody else may enter
        root = Path(d) / "data"
        for k in range(6):
            make_wav(root / ("LEAK" if k % 2 else "NOLEAK") / f"{k}.wav", seed=k)
        for folder in (Path(d), root, root / "NOLEAK"):
            folder.chmod(0o755)
        assert (
            len(lm.scan(root, progress="none")) == 6
        )  # and what that imports is here before the child is another user
        (root / "LEAK").chmod(0o744)
        try:
            output = as_unprivileged_user(lambda: len(lm.scan(root, progress="none")))
        finally:
            (root / "LEAK").chmod(0o755)
        assert "LEAK: the folder cannot be listed (EACCES)" in output
        assert as_unprivileged_user(lambda: len(lm.scan(root, progress="none"))) == "6"
    tried("S7")


@pytest.mark.parametrize("comes_back", [False, True], ids=["gone", "an empty one in its place"])
def test_folder_that_disappears_during_listing_is_an_error(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    "Its names are read, and then none of its files is there: as if each had been taken away."
    real = listing._entry_stat

    def gone(entry: os.DirEntry, *more: Any) -> Any:
        if entry.name.endswith(b"100.wav"):
            (many / "LEAK").rename(tmp_path / "away")
            if comes_back:
                (many / "LEAK").mkdir()
        return real(entry, *more)

    monkeypatch.setattr(listing, "_entry_stat", gone)
    monkeypatch.setattr(listing, "_MIN_BATCH", 1000)  # each entry is examined by Python
    with pytest.raises(
        LeakmelError,
        match=r"LEAK: .*listing a folder \(ESTALE\)|LEAK: the folder cannot be listed \(ENOENT\)",
    ):
        lm.scan(many, progress="none")


@pytest.mark.parametrize(
    "in_body", [True, False], ids=["names parsed in the body", "names parsed at the end"]
)
def test_columns_of_names_are_those_of_the_rows_alone(tmp_path, monkeypatch, make_wav, in_body):
    "The longest names are those of rejected files: columns are as wide as if the files did not exist."
    names = [f"A{k}~{k}~20250101_00000{k}~{10 + k}.wav" for k in range(9)]
    for k, name in enumerate(names):
        make_wav(tmp_path / "data" / ("LEAK", "NOLEAK")[k % 2] / name, seed=k)
    build(tmp_path / "data", tmp_path / "clean.h5")
    for name in (
        "a-sensor-with-a-long-name~9999999~20250101_000000~10.wav",
        "x~/deep/er/b.wav",
        "A0~zzz.wav",
    ):
        path = tmp_path / "data" / "LEAK" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    n_subsets, subset, parse = 0, schema.rows_of_names, job.Job.parse_names

    def make_metadata(this: Any, run: Any, make: Any = job.job_metadata) -> Any:
        parse(this)
        return make(this, run)

    def counted(*args: Any) -> Any:
        nonlocal n_subsets
        n_subsets += 1
        return subset(*args)

    monkeypatch.setattr(job.Job, "parse_names", lambda this: None)
    monkeypatch.setattr(schema, "rows_of_names", counted)
    if in_body:
        monkeypatch.setattr("leakmel.dataset.publish.job_metadata", make_metadata)
    result = build(tmp_path / "data", tmp_path / "x.h5")
    assert n_subsets == in_body
    assert (result.rows, len(result.rejections)) == (9, 3)
    with h5py.File(tmp_path / "clean.h5") as right, h5py.File(tmp_path / "x.h5") as found:
        for name in right["files"]:
            assert found["files"][name].dtype == right["files"][name].dtype, name
            assert (found["files"][name][:] == right["files"][name][:]).all(), name
