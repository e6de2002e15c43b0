"""Run commands while the disk fails, as a user's program sees it: calls of the C library return errors, short counts or no reserved space.

A library that is loaded first (LD_PRELOAD, disk_faults.c) wraps the calls for files. It is compiled once for a test; a test that needs it is
skipped where there is no C compiler.
"""

import errno
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from children import BUILDS, Ended, Server, server
from conftest import need

SHORT = 0  # instead of an error number: half of the bytes are read or written
FULL = (errno.ENOSPC, errno.EDQUOT)
# The errors of each kind of call that a failing or full disk can give; "create" is an open that creates, "release" closes a file that was read.
ERRORS: dict[str, tuple[int, ...]] = dict.fromkeys(
    ("create", "write", "fsync", "ftruncate", "fallocate", "close", "rename", "link", "unlink"),
    (errno.EIO, *FULL, errno.EINTR),
)
ERRORS |= dict.fromkeys(("open", "read", "release"), (errno.EIO, errno.EINTR))
ERRORS["read"] += (SHORT,)
ERRORS["write"] += (SHORT,)
# Calls that Python repeats after EINTR; the others are reported, as a network folder may interrupt them.
REPEATED = ("create", "open", "read", "write", "fsync", "ftruncate", "fallocate")


@dataclass(frozen=True)
class Fault:
    "Calls of a kind that fail: those with the numbers `at` to `last`."

    kind: str
    at: int
    code: int  # error number, or SHORT
    last: int | None = None  # None: only one; large: the disk stays broken

    def __str__(self) -> str:
        name = errno.errorcode.get(self.code, "half")
        return f"{self.kind} {self.at}{'' if self.last is None else ' and all after it'}: {name}"


class Disk:
    "Runs commands of leakmel whose calls for files below some folders may fail."

    def __init__(self, children: Server, log: Path, below: tuple[Path, ...], *, no_fallocate: bool):
        self.children, self.log, self.below, self.no_fallocate = children, log, below, no_fallocate

    def run(self, *argv: str, fault: Fault | None = None) -> tuple[Ended, list[str]]:
        "Run a command; return how it ended and its calls, each as kind and path."
        self.log.unlink(missing_ok=True)
        env = {"DISK_LOG": str(self.log), "DISK_BELOW": ":".join(map(str, self.below))}
        if self.no_fallocate:
            env["DISK_NO_FALLOCATE"] = "1"
        if fault is not None:
            env |= {"DISK_KIND": fault.kind, "DISK_AT": str(fault.at), "DISK_ERRNO": str(fault.code)}
            env |= {} if fault.last is None else {"DISK_LAST": str(fault.last)}
        done = self.children.run(*argv, code=f"os.environ.update({env!r})")
        calls = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return done, calls


def counts(calls: list[str]) -> Counter[str]:
    "Calls by kind."
    return Counter(call.partition(" ")[0] for call in calls)


@contextmanager
def failing_disk(
    folder: Path, *below: Path, no_fallocate: bool = False, imports: str = BUILDS
) -> Iterator[Disk]:
    "A disk that fails for the files below some folders; `folder` is for the library and its log."
    compiler = shutil.which("gcc") or shutil.which("cc")
    need(compiler, "a C compiler")
    library = folder / "disk_faults.so"
    source = Path(__file__).with_name("disk_faults.c")
    subprocess.run(
        [str(compiler), "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source, "-ldl"],
        check=True,
    )
    with server(imports, env={**os.environ, "LD_PRELOAD": str(library)}) as children:
        yield Disk(children, folder / "calls", below, no_fallocate=no_fallocate)
