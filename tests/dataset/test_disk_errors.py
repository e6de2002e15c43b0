"""A disk that fails, is full or cannot reserve space, as the C library reports it to a program: cause, path and status, and the old data set stays.

Each trial is a command in which one call fails (or all from one on), and the same command without a fault after it.
"""

import errno
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from children import Ended
from disk_faults import ERRORS, FULL, REPEATED, SHORT, Disk, Fault, counts, failing_disk
from independent import leftovers

BESIDE = ["x.h5", "x.h5.report.json", "x.h5.timeline.json"]
FOR_EVER = 1 << 30
LONG = pytest.param(0, marks=pytest.mark.long)  # all faults


def sample(calls: list[str], n: int, seed: int) -> Iterator[Fault]:
    "Yield n of the faults that calls of a command can have, as many of each kind of call; with n = 0 all of them."
    draw, found = random.Random(seed), counts(calls)
    each = {
        kind: [
            Fault(kind, at, code, last)
            for at in range(found[kind])
            for code in ERRORS[kind]
            # a call that is always interrupted is repeated for ever
            for last in (None, at + 2 if code == errno.EINTR else FOR_EVER)
        ]
        for kind in ERRORS
    }
    for faults in each.values():
        draw.shuffle(faults)
    kinds = [kind for kind in each if each[kind]]
    for k in range(n or sum(map(len, each.values()))):
        kind = kinds[k % len(kinds)]
        yield each[kind].pop()
        if not each[kind]:
            kinds.remove(kind)


def why_wrong(fault: Fault, done: Ended, calls: list[str]) -> Iterator[str]:
    "Yield what is wrong with the end of a command one of whose calls has failed."
    if done.status not in (0, 1, 3):
        yield f"status {done.status}"
    for words in ("Traceback", "please report", "report this error"):
        if words in done.err:
            yield words
    if done.status == 0:
        return
    if fault.code == SHORT or (fault.code == errno.EINTR and fault.kind in REPEATED):
        yield "the call was not repeated"
    by_sqlite = "SQLITE_" in done.err  # which tells the cause in its own words
    if not by_sqlite and fault.code != SHORT and errno.errorcode[fault.code] not in done.err:
        yield "no cause"
    if not by_sqlite and (done.status == 3) != (fault.code in FULL):
        yield f"status {done.status}"
    failed = [call.split(" ", 2)[2].removesuffix(" (deleted)") for call in calls if call.startswith("FAULT ")]
    if not any(str(Path(path).parent) in done.err for path in failed):
        yield "no path"


class Trial:
    "A command, the files that it starts from, and those that it has to make."

    def __init__(self, disk: Disk, out: Path, start: Path | None, words: list[str], made: list[str]):
        self.disk, self.out, self.start, self.words, self.made = disk, out, start, words, made
        self.reset()
        self.stood = self.contents()
        done, self.calls = disk.run(*words)
        assert done.status == 0, done.err
        self.right = self.contents()
        assert None not in self.right

    def reset(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        if self.start is None:
            self.out.mkdir()
        else:
            shutil.copytree(self.start, self.out)

    def contents(self) -> list[bytes | None]:
        paths = [self.out / name for name in self.made]
        return [path.read_bytes() if path.exists() else None for path in paths]

    def wrong(self, fault: Fault) -> list[str]:
        "Return what is wrong with the command under a fault, and with the same command after it."
        self.reset()
        done, calls = self.disk.run(*self.words, fault=fault)
        wrong = [*why_wrong(fault, done, calls)]
        for now, stood, right in zip(self.contents(), self.stood, self.right, strict=True):
            if now != right and (done.status == 0 or now != stood):
                wrong.append("other bytes")
        again, _ = self.disk.run(*self.words)
        if again.status or self.contents() != self.right:
            wrong.append(f"the next run: {again.status}: {again.err[-1000:]}")
        left = set(leftovers(self.out)) - {
            name + end for name in self.made for end in ("", ".report.json", ".timeline.json")
        }
        if left - {f".{name}.state" for name in self.made}:
            wrong.append(f"left: {left}")
        return [
            f"{fault}: {x}\n{[c for c in calls if c.startswith('FAULT')][:3]}\n{done.err[-2000:]}"
            for x in wrong
        ]


@contextmanager
def trial(tmp_path: Path, make_wav: Callable, variant: str, *, no_fallocate: bool) -> Iterator[Trial]:
    "A build of one kind over the folder `out`, or a join."
    data, out = tmp_path / "data", tmp_path / "out"
    names = ["x.h5"]
    options = {"gzip": ["--compression", "gzip", "--with-waveforms"], "waveforms": ["--with-waveforms"]}.get(
        variant, []
    )
    common = ["--engine", "reference", "--quiet", "--files-per-batch", "4", "--duration-s", "1", *options]
    build = ["build", str(data), *common, "--check", "2", "--out", str(out / "x.h5")]
    for k in range(10):
        split = ("TRAINING/" if k % 3 else "TESTING/") if variant == "split all" else ""
        make_wav(data / f"{split}{'LEAK' if k % 2 else 'NOLEAK'}" / f"{k:02d}.wav", seed=k)
    with failing_disk(tmp_path, out, data, no_fallocate=no_fallocate) as disk:
        start, words = None, build
        if variant == "split all":
            names = ["TRAINING_DATASET.H5", "TESTING_DATASET.H5"]
            words = ["build", str(data), *common, "--check", "2", "--split", "all", "--out", str(out)]
        if variant in ("update", "join"):
            start = tmp_path / "start"
            out.mkdir()
            commands = [build]
            if variant == "join":
                part = ["build", str(data), *common, "--out", str(out / "x.h5"), "--part"]
                commands, words = (
                    [[*part, "1/2"], [*part, "2/2"]],
                    ["join", str(out / "x.h5"), "--quiet", "--check", "2"],
                )
            for command in commands:
                done, _ = disk.run(*command)
                assert done.status == 0, done.err
            out.rename(start)
        if variant == "update":
            make_wav(data / "LEAK" / "99.wav", seed=99)
            (data / "LEAK" / "03.wav").unlink()
        yield Trial(disk, out, start, words, names)


@pytest.mark.slow
@pytest.mark.parametrize("n", [8, LONG])
@pytest.mark.parametrize(
    ("variant", "no_fallocate"),
    [
        ("plain", False),
        ("waveforms", True),
        ("gzip", False),
        ("gzip", True),
        ("update", True),
        ("split all", False),
        ("join", False),
    ],
)
def test_every_call_of_a_build_may_fail(
    tmp_path: Path, make_wav: Callable, tried: Callable, variant: str, no_fallocate: bool, n: int
) -> None:
    "Any call for a file, with each error, once or from then on, on file systems with and without reserved space."
    wrong = []
    with trial(tmp_path, make_wav, variant, no_fallocate=no_fallocate) as t:
        for fault in sample(t.calls, n, seed=len(variant)):
            found = t.wrong(fault)
            wrong += found
            if not found:
                tried("S23")
    assert not wrong, f"{len(wrong)} of {n}:\n" + "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_the_hdf5_library_writes_to_no_disk(
    tmp_path: Path, make_wav: Callable, tried: Callable, compression: str
) -> None:
    "Every write of the file of the data set, the metadata behind the rows among them, fails once: none ends by a signal."
    variant = "gzip" if compression == "gzip" else "plain"
    with trial(tmp_path, make_wav, variant, no_fallocate=False) as t:
        writes = [path for kind, _, path in (call.partition(" ") for call in t.calls) if kind == "write"]
        own = [at for at, path in enumerate(writes) if ".x.h5.partial" in path]
        assert len(own) >= 3
        for at in own[-3:]:
            for code in (errno.EIO, errno.ENOSPC):
                assert not t.wrong(Fault("write", at, code))
                tried("S3" if code == errno.ENOSPC else "S7")
    assert not [path for path in writes if path.endswith(".scratch")]


# Much is loaded when it is first used: each command runs once before the first child, with forests of few trees.
OTHERS = """
import contextlib, io, os, shutil, sys, torch
torch.set_num_threads(1)
from leakmel.cli import main
from leakmel.detector.model import spectral
spectral.N_TREES = 5
for words, made in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0, words
    if not made.endswith("run"):
        shutil.rmtree(made)
"""


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, LONG])
@pytest.mark.parametrize("command", ["train", "predict", "nightly"])
def test_every_call_of_other_commands_may_fail(
    tmp_path: Path, demo: Path, small_sets: Path, tried: Callable, command: str, n: int
) -> None:
    "The same for commands that write models, scores and histories: they end well, and so does the next run."
    out, run = tmp_path / "out", tmp_path / "run"
    common = ["--quiet", "--device", "cpu"]
    train = ["train", str(small_sets), "--detector", "spectral", "--no-evaluation", *common, "--out"]
    made = {
        "train": [*train, str(out / "run")],
        "predict": [
            "predict",
            str(demo / "TESTING"),
            "--model",
            str(run),
            *common,
            "--out",
            str(out / "scores.csv"),
        ],
        "nightly": [
            "nightly",
            str(demo / "TESTING"),
            "--model",
            str(run),
            *common,
            "--state",
            str(out / "state"),
        ],
    }
    commands = [([*train, str(run)], str(run)), (made[command], str(out))]
    wrong = []
    with failing_disk(tmp_path, out, demo, imports=OTHERS.format(commands=commands)) as disk:
        done, calls = disk.run(*made[command])
        assert done.status == 0, done.err
        for fault in sample(calls, n, seed=len(command)):
            shutil.rmtree(out, ignore_errors=True)
            done, calls = disk.run(*made[command], fault=fault)
            found = [*why_wrong(fault, done, calls)]
            again, _ = disk.run(*made[command])
            if again.status:
                found.append(f"the next run: {again.status}: {again.err[-1000:]}")
            wrong += [
                f"{fault}: {x}\n{[c for c in calls if c.startswith('FAULT')][:3]}\n{done.err[-2000:]}"
                for x in found
            ]
            if not found:
                tried("S23")
    assert not wrong, f"{len(wrong)} of {n}:\n" + "\n\n".join(wrong)
