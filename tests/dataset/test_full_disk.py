"A full disk, at many amounts of free space: the build reports it, keeps the old data set, and resumes when there is space."

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import Server, server
from independent import check, leftovers

BESIDE = ["x.h5", "x.h5.report.json", "x.h5.timeline.json", "ballast"]
PAGE = 4096  # the least that such a file system gives
# Room that is there when it is asked for, and then is not: somebody else fills the disk during the build.
SURPRISED = """
from types import SimpleNamespace
os.statvfs = lambda path: SimpleNamespace(f_bavail=1 << 30, f_frsize=4096)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    "A file system of four megabytes."
    mount = tmp_path / "disk"
    mount.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("a file system can be mounted by root only")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def leave_free_pages(disk: Path, pages: int) -> None:
    "Fill the disk but for so many pages."
    (disk / "ballast").unlink(missing_ok=True)
    free = os.statvfs(disk).f_bavail
    assert (os.statvfs(disk).f_frsize, free >= pages) == (PAGE, True)
    (disk / "ballast").write_bytes(bytes((free - pages) * PAGE))
    assert os.statvfs(disk).f_bavail == pages


def empty(disk: Path) -> None:
    for path in disk.iterdir():
        path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("n", [10, pytest.param(100, marks=pytest.mark.long)])
def test_any_amount_of_free_space(
    disk: Path, tmp_path: Path, make_wav: Callable, tried: Callable, n: int
) -> None:
    "From none to enough, foreseen or not, with an old data set in place or without; then there is room, and the same command goes on."
    data, old, new = tmp_path / "data", tmp_path / "old", tmp_path / "new"
    for k in range(12):
        make_wav(data / ("LEAK" if k % 2 else "NOLEAK") / f"{k:02d}.wav", seed=k)
    target = disk / "x.h5"
    words = [
        "build",
        str(data),
        "--engine",
        "reference",
        "--quiet",
        "--check",
        "2",
        "--files-per-batch",
        "4",
        "--duration-s",
        "1",
        "--with-waveforms",
    ]
    with server() as children:
        built(children, *words, "--out", str(old / "x.h5"))
        for k in range(12, 24):
            make_wav(data / "LEAK" / f"{k:02d}.wav", seed=k)
        built(children, *words, "--out", str(new / "x.h5"))
        right, stood = (new / "x.h5").read_bytes(), (old / "x.h5").read_bytes()
        enough = 2 * sum(p.stat().st_size for p in new.iterdir()) // PAGE
        assert enough > 100
        statuses = []
        for k in range(n):
            for surprised, with_old in ((k % 2 == 0, k % 4 < 2), (k % 2 == 1, k % 4 >= 2))[
                : 1 if n < 100 else 2
            ]:
                empty(disk)
                if with_old:
                    for path in old.iterdir():
                        shutil.copy2(path, disk)
                leave_free_pages(disk, k * enough // (n - 1))
                done = children.run(*words, "--out", str(target), code=SURPRISED if surprised else "")
                statuses.append(done.status)
                about = f"{k * enough // (n - 1)} pages, surprised: {surprised}, old: {with_old}: {done.err}"
                assert done.status in (0, 3), about
                assert "Traceback" not in done.err, about
                if done.status == 3:
                    assert str(disk) in done.err, about
                    assert "bytes are missing" in done.err or "no room left" in done.err, about
                    left = leftovers(disk, *(BESIDE if with_old else ["ballast"]))
                    if target.exists() and (not with_old or target.read_bytes() != stood):
                        assert target.read_bytes() == right, about
                    elif left:
                        assert left == [".x.h5.journal", ".x.h5.partial"], about
                else:
                    assert target.read_bytes() == right, about
                (disk / "ballast").unlink()
                built(children, *words, "--out", str(target))
                assert target.read_bytes() == right, about
                assert leftovers(disk, *BESIDE) == [], about
                tried("S3")
        check(target, data)
    assert set(statuses) == {0, 3}
    assert (statuses[0], statuses[-1]) == (3, 0)


def built(children: Server, *words: str) -> None:
    done = children.run(*words)
    assert done.status == 0, done.err
