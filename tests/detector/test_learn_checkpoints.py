"Checkpoints: whatever a writer is killed at, the newest whole one loads; a damaged one is passed over, and one that would run code is refused."

import io
import os
import random
import signal
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import server
from each import each

from leakmel.core.errors import DataError, OutputError, SpaceError
from leakmel.core.files import sealed
from leakmel.detector.model import files
from leakmel.detector.model.files import (
    CheckpointWarning,
    latest_checkpoint,
    list_checkpoints,
    load_plain,
    plain_bytes,
    save_checkpoint,
)
from leakmel.recordings.wav import digest_of

N = 300_000  # numbers in a state: more than one piece


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((N,), float(step)), "names": ["a", None, 2.5, True]}


def assert_whole(values: dict[str, Any], step: int) -> None:
    assert values["step"] == step
    assert torch.equal(values["weights"], torch.full((N,), float(step)))
    assert values["names"] == ["a", None, 2.5, True]


IMPORTS = (
    "import os, torch\nfrom leakmel.detector.model.files import save_checkpoint\ntorch.set_num_threads(1)\n"
)
# Saves four checkpoints and notes each that is through; the process is killed at one of its steps, of a write perhaps in the middle.
KILLED = f"""
import itertools, signal
at, torn, marker = {{at}}, {{torn}}, {{marker!r}}
real_write, real_open = os.write, os.open
count = itertools.count(1)
def stepping(name, real):
    def step(*args, **named):
        if next(count) == at:
            if torn and name == "write": real_write(args[0], memoryview(args[1])[:len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **named)
    return step
note = real_open(marker, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for name in ("open", "write", "fsync", "replace", "unlink"): setattr(os, name, stepping(name, getattr(os, name)))
for step in range(1, 5):
    save_checkpoint({{folder!r}}, {{{{"step": step, "weights": torch.full(({N},), float(step)), "names": ["a", None, 2.5, True]}}}}, step, keep={{keep}})
    real_write(note, b"%d" % step)
"""


# Every tenth step by default, for the two kinds of kill not the same ones; each step in the long variants.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "torn", "first", "every"),
    [
        (2, False, 3, 10),
        (1, True, 8, 10),
        pytest.param(2, False, 1, 1, marks=pytest.mark.long),
        pytest.param(1, True, 1, 1, marks=pytest.mark.long),
    ],
)
def test_killed_at_each_step_of_writing(
    tmp_path: Path, tried: Callable, keep: int, torn: bool, first: int, every: int
) -> None:
    marker = tmp_path / "marker"
    with server(IMPORTS) as children:
        for at in range(first, 1000, every):
            folder = tmp_path / f"{at}"
            done = children.run(
                code=KILLED.format(at=at, torn=torn, marker=str(marker), folder=str(folder), keep=keep)
            )
            if done.status == 0:
                break
            assert done.status == -signal.SIGKILL, done.err
            through = len(marker.read_bytes())
            newest = latest_checkpoint(
                folder
            )  # a warning would be an error: nothing torn has the name of a checkpoint
            if newest is None:
                assert through == 0
            else:
                assert newest[0].step in (through, through + 1), f"killed at step {at}"
                assert_whole(newest[1], newest[0].step)
            save_checkpoint(folder, state(9), 9, keep=1)
            assert [c.step for c in list_checkpoints(folder)] == [9]
            assert len(os.listdir(folder)) == 1, "nothing torn is left"
            tried("S16")
    assert 30 < at < 100 + every
    assert [c.step for c in list_checkpoints(folder)] == [1, 2, 3, 4][-keep:]


@each("damage", ["cut", "empty", "flipped", "longer", "zeros"])
def test_damaged_checkpoint_is_skipped(tmp_path: Path, tried: Callable, damage: str) -> None:
    rng = random.Random(damage)
    for k in range(5):
        folder = tmp_path / f"{k}"
        for step in (1, 2):
            save_checkpoint(folder, state(step), step, sync=False)
        newest = list_checkpoints(folder)[-1].path
        content = bytearray(newest.read_bytes())
        at = rng.randrange(len(content))
        if damage == "flipped":
            content[at] ^= 1 << rng.randrange(8)
        new: Any = {
            "cut": content[:at],
            "empty": b"",
            "flipped": content,
            "longer": content + b"x",
            "zeros": content[:at].ljust(len(content), b"\0"),
        }[damage]
        newest.write_bytes(new)
        if bytes(new) == bytes(state_bytes := plain_bytes(state(2))):
            continue  # zeros where zeros were
        assert digest_of(bytes(new)) != digest_of(state_bytes)
        with pytest.warns(
            CheckpointWarning, match="checkpoint skipped: .*step-000000002.*(digest|truncated)"
        ):
            found = latest_checkpoint(folder)
        assert found is not None
        assert_whole(found[1], 1)
        tried("S16")


def test_no_checkpoint_is_loaded_if_all_are_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, {"step": step}, step, sync=False).path.write_bytes(b"PK")
    with pytest.warns(CheckpointWarning) as caught:
        assert latest_checkpoint(tmp_path) is None
    assert len(caught) == 2


class MaliciousPickle:
    "What is called when it is read."

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@each("legacy", [False, True], ids=["archive", "legacy"])
@each("call", ["os.mkdir", "eval", "torch.load", "subprocess.call", "builtins.getattr"])
def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, tried: Callable, call: str, legacy: bool) -> None:
    import subprocess

    goal = tmp_path / "it went off"
    bombs: dict[str, MaliciousPickle] = {
        "os.mkdir": MaliciousPickle(os.mkdir, str(goal)),
        "eval": MaliciousPickle(eval, f"open({str(goal)!r}, 'w')"),
        "torch.load": MaliciousPickle(torch.load, "x"),
        "subprocess.call": MaliciousPickle(subprocess.call, ["touch", str(goal)]),
        "builtins.getattr": MaliciousPickle(getattr, "x", "upper"),
    }
    with io.BytesIO() as out:
        torch.save({"step": 5, "weights": bombs[call]}, out, _use_new_zipfile_serialization=not legacy)
        content = out.getvalue()
    save_checkpoint(tmp_path, state(1), 1, sync=False)
    path = tmp_path / "step-000000005.pt"
    path.write_bytes(sealed(content))
    with pytest.raises(DataError, match="not a torch archive" if legacy else "would run code") as refused:
        load_plain(path)
    assert str(path) in str(refused.value)
    if not legacy:
        assert call.split(".")[-1] in str(refused.value), "by name"
        with pytest.raises(DataError, match="would run code"):
            latest_checkpoint(tmp_path)
    assert not goal.exists()
    tried("S16")


@each("keep", [0, 20, -1])
def test_an_archive_whose_pickle_was_cut_is_refused(tmp_path: Path, keep: int) -> None:
    "Torch raises an error without a word."
    with (
        zipfile.ZipFile(io.BytesIO(plain_bytes(state(1)))) as whole,
        zipfile.ZipFile(tmp_path / "cut.pt", "w") as cut,
    ):
        for part in whole.infolist():
            cut.writestr(
                part.filename,
                whole.read(part)[:keep] if part.filename.endswith("data.pkl") else whole.read(part),
            )
    with pytest.raises(DataError, match="the file cannot be read"):
        load_plain(tmp_path / "cut.pt")


def test_a_large_file_of_something_else_is_not_read(tmp_path: Path) -> None:
    "A data set that was taken for a model."
    with open(tmp_path / "rows.h5", "wb") as f:
        f.write(b"\x89HDF")
        f.truncate(1 << 40)
    with pytest.raises(
        DataError, match="the file is truncated or is not a torch archive; found 1,099,511,627,776 bytes"
    ):
        load_plain(tmp_path / "rows.h5")


def test_files_of_other_programs_are_not_loaded_as_checkpoints(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("no archive")
    for name, message in (
        ("pipe", "not a regular file"),
        ("text", "not a torch archive"),
        ("none", "does not exist"),
        (".", "not a regular file"),
    ):
        with pytest.raises(DataError, match=message):
            load_plain(tmp_path / name)


def test_newest_checkpoints_are_kept_and_abandoned_ones_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4, 5):
        save_checkpoint(tmp_path, {"step": step}, step, keep=3, sync=False)
    assert [c.step for c in list_checkpoints(tmp_path)] == [3, 4, 5]
    (tmp_path / "best.pt").write_bytes(b"kept apart")
    with monkeypatch.context() as m:  # as if it was written on a machine with a GPU
        m.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        again = {"step": 4, "again": torch.ones(2)}
        save_checkpoint(tmp_path, again, 4, keep=3, sync=False)
    assert [c.step for c in list_checkpoints(tmp_path)] == [3, 4]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found[1]["again"].tolist() == [1, 1], "the one that was written later"
    save_checkpoint(tmp_path, {"step": 1}, 1, keep=1, sync=False)
    assert [c.step for c in list_checkpoints(tmp_path)] == [1]
    assert (tmp_path / "best.pt").exists()


def test_links_and_other_names_are_not_loaded_as_checkpoints(tmp_path: Path) -> None:
    one = save_checkpoint(tmp_path / "a", {"step": 1}, 1, sync=False)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / one.path.name.replace("01.", "02.")).symlink_to(one.path)
    (tmp_path / "b" / "step-3.pt").write_bytes(b"")
    assert list_checkpoints(tmp_path / "b") == []


@each(
    ("number", "error"),
    [(28, SpaceError), (5, OutputError), (13, OutputError)],
    ids=["ENOSPC", "EIO", "EACCES"],
)
@each("name", ["write", "fsync", "replace", "open"])
def test_disk_errors_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, error: type[Exception]
) -> None:
    save_checkpoint(tmp_path, state(1), 1)

    def refuse(*args: Any, **named: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as m:
        m.setattr(files.os, name, refuse)
        with pytest.raises(error) as caught:
            save_checkpoint(tmp_path, state(2), 2)
    assert str(tmp_path) in str(caught.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = latest_checkpoint(tmp_path)
    assert found is not None
    assert_whole(found[1], 1)
    assert len(os.listdir(tmp_path)) == 1


def test_signal_is_delivered_after_the_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def interrupted(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        real(*args)

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, state(1), 1)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert_whole(found[1], 1)
