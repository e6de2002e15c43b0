"What users and networks change while a data set is built: the build says so, and the next one keeps the rows that are right."

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from each import each
from errors import raises

import leakmel as lm
from leakmel.core.errors import DataError, MachineError, OutputError
from leakmel.dataset import publish
from leakmel.dataset.config import PipelineConfig, TunedConfig
from leakmel.dataset.pipeline import build_part, join
from leakmel.recordings.labels import Decision, append_decision, now_utc

SHORT = {"sample_rate": 4096, "duration_s": 1.0}
QUIET: dict[str, Any] = {
    "progress": "none",
    "engine": "reference",
    "spec": SHORT,
    "pipeline": PipelineConfig(monitor_interval_s=0.0, files_per_batch=4),
}
N = 12


@pytest.fixture
def data(tmp_path: Path, make_wav: Callable[..., Any]) -> Path:
    "Twelve recordings of a second, which were written long enough ago to be trusted without their content."
    for i in range(N):
        path = tmp_path / "data" / ("LEAK", "NOLEAK")[i % 2] / f"{i:02d}.wav"
        make_wav(path, seed=i)
    return tmp_path / "data"


def before_the_check(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    "Let something happen once, after all rows were computed and before they are checked."
    real, left = publish._check, [act]

    def check(*given: Any) -> Any:
        if left:
            left.pop()()
        return real(*given)

    monkeypatch.setattr(publish, "_check", check)


def is_resumable(target: Path) -> bool:
    return sorted(p.name for p in target.parent.glob(f".{target.name}*")) == [
        f".{target.name}.journal",
        f".{target.name}.partial",
    ]


def test_a_recording_that_was_replaced_costs_only_its_row(tmp_path, data, make_wav, monkeypatch):
    target = tmp_path / "x.h5"
    before_the_check(monkeypatch, lambda: make_wav(data / "LEAK" / "00.wav", seed=99))
    with raises("recordings-changed", DataError):
        lm.build(data, out=target, **QUIET)
    assert is_resumable(target)
    again = lm.build(data, out=target, **QUIET)
    assert again.summary["resumed_rows"] == N - 1
    assert again.path.read_bytes() == lm.build(data, out=tmp_path / "y.h5", **QUIET).path.read_bytes()


@pytest.mark.slow
@each("with_waveforms", [False, True])
@each("rejected", [[0], [0, 1, 5, 6, 12, 13], [13]])
def test_rows_that_were_moved_together_are_found_again(
    tmp_path, data, make_wav, monkeypatch, rejected, with_waveforms
):
    "Rejected recordings leave gaps, which are closed before the check; a recording is replaced then."
    target, options = tmp_path / "x.h5", QUIET | {"with_waveforms": with_waveforms}
    for i, path in enumerate(sorted([*data.rglob("*.wav"), data / "LEAK/aa.wav", data / "NOLEAK/zz.wav"])):
        if not path.exists():
            make_wav(path, seed=i + 60)
        if i in rejected:
            path.write_bytes(path.read_bytes()[:3000])
    whole = sorted(p for p in data.rglob("*.wav") if p.stat().st_size > 3000)
    before_the_check(monkeypatch, lambda: make_wav(whole[3], seed=99))
    with raises("recordings-changed", DataError):
        lm.build(data, out=target, **options)
    again = lm.build(data, out=target, **options)
    assert (again.rows, again.summary["resumed_rows"]) == (len(whole), len(whole) - 1)
    assert again.path.read_bytes() == lm.build(data, out=tmp_path / "y.h5", **options).path.read_bytes()


def test_rows_of_a_compressed_file_are_not_said_to_be_kept(tmp_path, data, make_wav, monkeypatch):
    target = tmp_path / "x.h5"
    packed = PipelineConfig(monitor_interval_s=0.0, compression="gzip")
    before_the_check(monkeypatch, lambda: make_wav(data / "LEAK" / "00.wav", seed=99))
    with raises("recordings-changed", DataError) as e:
        lm.build(data, out=target, **QUIET | {"pipeline": packed})
    assert not getattr(e.value, "__notes__", [])
    assert list(tmp_path.glob(".x.h5*")) == []
    assert lm.build(data, out=target, **QUIET | {"pipeline": packed}).rows == N


def test_a_network_folder_that_went_away_costs_no_row(tmp_path, data, monkeypatch):
    target, away = tmp_path / "x.h5", tmp_path / "away"
    before_the_check(monkeypatch, lambda: data.rename(away))
    with raises("recordings-changed", DataError):
        lm.build(data, out=target, **QUIET)
    assert is_resumable(target)
    away.rename(data)
    assert lm.build(data, out=target, **QUIET).summary["resumed_rows"] == N


def test_a_stale_folder_is_a_fault_of_the_machine(tmp_path, data, monkeypatch):
    target, real, stale = tmp_path / "x.h5", os.stat, [False]

    def stat(path: Any, *given: Any, **options: Any) -> os.stat_result:
        if stale[0] and path == data:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real(path, *given, **options)

    monkeypatch.setattr(os, "stat", stat)
    before_the_check(monkeypatch, lambda: stale.__setitem__(0, True))
    with raises("io-fault", MachineError, path=data):
        lm.build(data, out=target, **QUIET)
    assert is_resumable(target)
    with raises("io-fault", MachineError, path=data):
        lm.scan(data)


def test_a_file_that_was_still_being_copied_is_not_a_wrong_row(tmp_path, data, make_wav, monkeypatch):
    target, late = tmp_path / "x.h5", data / "LEAK" / "late.wav"
    make_wav(late, seed=50)
    whole = late.read_bytes()
    late.write_bytes(whole[:5000])
    before_the_check(monkeypatch, lambda: late.write_bytes(whole))
    with raises("recordings-changed", DataError, says="rejected as truncated, but it now is valid"):
        lm.build(data, out=target, **QUIET)
    assert lm.build(data, out=target, **QUIET).rows == N + 1


def flat(data: Path) -> Path:
    "The same recordings in one folder."
    folder = data.parent / "flat"
    folder.mkdir()
    for path in data.rglob("*.wav"):
        shutil.copy2(path, folder)
    return folder


def write_table(path: Path, names: list[str], head: str = "path,label", between: str = ",") -> None:
    lines = [head, *(f"{name}{between}{('LEAK', 'NOLEAK')[int(name[:2]) % 2]}" for name in names)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_table_that_is_edited_during_a_build_counts_for_the_next_one(tmp_path, data, make_wav, monkeypatch):
    folder, table, target = flat(data), tmp_path / "t.csv", tmp_path / "x.h5"

    def build() -> lm.BuildResult:
        return lm.build(folder, manifest=lm.scan(folder, table=table), out=target, **QUIET)

    names = sorted(p.name for p in folder.iterdir())
    write_table(table, names)

    def edit() -> None:
        make_wav(folder / "20.wav", seed=20)
        write_table(table, [*names, "20.wav"])

    before_the_check(monkeypatch, edit)
    assert build().rows == N
    again = build()
    assert (again.rows, again.summary["copied_rows"]) == (N + 1, N)


def test_a_stored_listing_with_another_table_is_refused_before_the_build(tmp_path, data):
    folder, table = flat(data), tmp_path / "t.csv"
    write_table(table, sorted(p.name for p in folder.iterdir()))
    lm.scan(folder, table=table).save(tmp_path / "l.npz")
    lm.build(folder, manifest=lm.Manifest.load(tmp_path / "l.npz"), out=tmp_path / "x.h5", **QUIET)
    table.write_text(table.read_text() + "\n")
    with raises("table-changed", DataError, path=table, remedy="scan the folder again, then build"):
        lm.build(folder, manifest=lm.Manifest.load(tmp_path / "l.npz"), out=tmp_path / "y.h5", **QUIET)
    assert list(tmp_path.glob(".y.h5*")) == []


def label(file: Path, data: Path, skip: str = "") -> None:
    "Labels by people for all recordings of a folder."
    for path in sorted(data.rglob("*.wav")):
        if path.name != skip:
            digest = lm.read_wav(path).digest if path.stat().st_size > 6000 else ""
            name = path.relative_to(data).as_posix()
            append_decision(
                file, Decision(name, digest, ("LEAK", "NOLEAK")[int(path.name[:2]) % 2], "ann", now_utc(), "")
            )


@pytest.mark.slow
@pytest.mark.parametrize("with_table", [False, True])
def test_labels_by_people_and_rejected_recordings(tmp_path, data, make_wav, with_table):
    "A recording that people labelled, and that is too short, is rejected for its length."
    folder, labels, target = flat(data), tmp_path / "labels.csv", tmp_path / "x.h5"
    make_wav(folder / "30.wav", n=2000)
    make_wav(folder / "31.wav", seed=31)  # nobody labels it
    label(labels, folder, skip="31.wav")
    table = None
    if with_table:
        names = sorted(p.name for p in folder.iterdir())
        table = tmp_path / "t.csv"
        table.write_text("path,label\n" + "".join(f"{name},\n" for name in names))
    options = QUIET | {"spec": SHORT | {"short": "reject"}}
    built = lm.build(folder, manifest=lm.scan(folder, table=table), labels=labels, out=target, **options)
    assert built.rows == N
    assert built.summary["rejected_by_code"] == {"too_short": 1, "no_label": 1}
    assert lm.verify(target, root=folder, table=table).problems == []


def test_parts_with_tuned_settings_can_be_joined(tmp_path, data):
    tuned = TunedConfig(monitor_interval_s=0.0, files_per_batch=4, tuned_from="tuned.json")
    target = tmp_path / "x.h5"
    for k in (1, 2):
        build_part(data, part=(k, 2), out=target, **QUIET | {"pipeline": tuned})
    assert join(target, progress="none").rows == N


def test_systems_without_functions_of_linux(tmp_path, data, monkeypatch):
    "macOS has neither O_PATH nor fdatasync."
    monkeypatch.delattr(os, "O_PATH")
    monkeypatch.delattr(os, "fdatasync")
    options = QUIET | {"pipeline": PipelineConfig(monitor_interval_s=0.0, files_per_batch=4, journal_bytes=1)}
    for _ in range(2):
        assert lm.build(data, out=tmp_path / "x.h5", fresh=True, **options).rows == N


def test_a_user_without_a_home_folder_can_build(tmp_path, data, monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: pytest.fail("there is none"))
    assert lm.build(data, out=tmp_path / "x.h5", **QUIET).rows == N


def test_paths_that_the_system_refuses_have_clear_errors(tmp_path, data):
    with raises("write-failed", OutputError):
        lm.build(data, out=tmp_path / ("x" * 300 + ".h5"), **QUIET)
    with raises("folder-unreadable", DataError):
        lm.scan(tmp_path / ("x" * 300))
