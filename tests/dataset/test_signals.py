"Ctrl-C and SIGTERM at many moments of a build: it ends within seconds, says so, and the same command goes on to the same bytes."

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from children import Ended, Server, server
from independent import check, leftovers

BESIDE = ["x.h5", "x.h5.report.json", "x.h5.timeline.json"]
SWIFT = "os.fsync = os.fdatasync = lambda fd: None\n"  # what the disk confirms is tried elsewhere
# A moment is a step of some thread: a call that changes the disk, a batch that is read, computed or taken, a row that is checked.
AT_A_STEP = """
import itertools, time
import h5py
from leakmel.dataset import writer
number, at, marker = {number}, {at}, {marker!r}
count = itertools.count(1)
def stepping(real):
    def step(*args, **named):
        n = next(count)
        if n == at:
            with real_open(marker, "w") as f: f.write(str(time.monotonic()))
            os.kill(os.getpid(), number)
        return real(*args, **named)
    return step
real_open = open
for owner, names in ((os, ("pwrite", "write", "ftruncate", "fsync", "fdatasync", "replace", "unlink", "open", "preadv")),
                     (writer, ("fallocate",)), (h5py.File, ("close",)),
                     (h5py.Group, ("create_dataset",)), (loader.BatchReader, ("fill",)), (engines.ReferenceEngine, ("run",)),
                     (job.Job, ("take",))):
    for name in names: setattr(owner, name, stepping(getattr(owner, name)))
if at == 0:
    import atexit
    atexit.register(lambda: print(next(count)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "with_old", "n"),
    [
        (2, True, 3),
        (15, False, 3),
        *(
            pytest.param(number, with_old, 30, marks=pytest.mark.long)
            for number in (2, 15)
            for with_old in (False, True)
        ),
    ],
)
def test_a_signal_at_any_moment(
    tmp_path: Path, make_wav: Callable, tried: Callable, number: int, with_old: bool, n: int
) -> None:
    data, old, right, target, marker = (
        tmp_path / name for name in ("data", "old", "right", "out/x.h5", "marker")
    )
    words = [
        "build",
        str(data),
        "--engine",
        "reference",
        "--check",
        "4",
        "--files-per-batch",
        "3",
        "--duration-s",
        "1",
        "--quiet",
        "--out",
    ]
    for k in range(24):
        make_wav(data / ("LEAK" if k % 2 else "NOLEAK") / f"{k:02d}.wav", seed=k)
    with server() as children:
        if with_old:
            run_with_signal(children, *words, str(old / "x.h5"))
            for k in range(24, 40):
                make_wav(data / "LEAK" / f"{k:02d}.wav", seed=k)
            for k in range(4):
                (data / "NOLEAK" / f"{2 * k:02d}.wav").unlink()
        run_with_signal(children, *words, str(right / "x.h5"))
        if with_old:
            shutil.copytree(old, target.parent)
        whole = run_with_signal(
            children, *words, str(target), code=SWIFT + AT_A_STEP.format(number=0, at=0, marker="")
        )
        n_steps = int(whole.out.split()[-1])
        assert n_steps > 60
        n_tried = 0
        for k in range(n):
            at = 1 + k * (n_steps - 1) // n
            shutil.rmtree(target.parent, ignore_errors=True)
            if with_old:
                shutil.copytree(old, target.parent)
            stood = target.read_bytes() if with_old else None
            marker.unlink(missing_ok=True)
            code = SWIFT + AT_A_STEP.format(number=number, at=at, marker=str(marker))
            done = children.run(*words, str(target), code=code)
            about = f"at step {at} of {n_steps}: status {done.status}: {done.err}"
            assert not done.hung, about
            if done.status == 0 and not marker.exists():
                continue  # it was through with fewer steps
            assert done.status == 128 + number, about
            assert "Traceback" not in done.err, about
            assert f"stopped by signal {number}" in done.err, about
            there = target.read_bytes() if target.exists() else None
            assert there in (stood, (right / "x.h5").read_bytes()), about
            assert leftovers(target.parent, *BESIDE) in ([], [".x.h5.journal", ".x.h5.partial"]), about
            run_with_signal(children, *words, str(target))
            assert target.read_bytes() == (right / "x.h5").read_bytes(), about
            assert leftovers(target.parent, *BESIDE) == [], about
            n_tried += 1
            tried("S10")
    assert n_tried > 0.8 * n
    check(target, data)


def run_with_signal(children: Server, *words: str, code: str = SWIFT) -> Ended:
    done = children.run(*words, code=code)
    assert done.status == 0, done.err
    return done
