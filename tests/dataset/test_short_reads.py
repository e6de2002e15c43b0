"File systems that return fewer bytes than were asked for, or interrupt a call: everything has the same bytes as on a disk."

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import need
from each import each
from odd_wavs import READ, REFUSED

import leakmel as lm
from leakmel.core.errors import RecordingError
from leakmel.detector.data.segments import make_task
from leakmel.detector.model.detector import Detector
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.recordings import wav
from leakmel.recordings.wav import canonical_header, pread_all, read_wav

# Reads of files below a folder return at most LIMIT bytes (rotating from 1 to it), and every third call is interrupted.
LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static __thread unsigned calls;
static int ours(int fd) {
    char link[64], path[4096];
    const char *folder = getenv("SHORT_BELOW");
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    errno = saved;
    return folder && n > 0 && !strncmp(path, folder, strlen(folder));
}
static size_t most(void) { return strtoul(getenv("SHORT_LIMIT"), 0, 10); }
static int interrupted(void) { if (++calls % 3) return 0; errno = EINTR; return 1; }
static size_t cut(size_t n) { size_t k = 1 + calls * 7919u % most(); return n < k ? n : k; }
#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define READER(name) ssize_t name(int fd, void *to, size_t n) { REAL(name); if (!ours(fd)) return real(fd, to, n); \
    if (interrupted()) return -1; return real(fd, to, cut(n)); }
#define PREADER(name, off) ssize_t name(int fd, void *to, size_t n, off at) { REAL(name); if (!ours(fd)) return real(fd, to, n, at); \
    if (interrupted()) return -1; return real(fd, to, cut(n), at); }
static int shorten(const struct iovec *v, int n, struct iovec *out) {
    size_t left = cut((size_t)-1); int k = 0;
    for (; k < n && k < 16 && left; k++) { out[k] = v[k]; if (out[k].iov_len > left) out[k].iov_len = left; left -= out[k].iov_len; }
    return k;
}
#define PREADVER(name, off) ssize_t name(int fd, const struct iovec *v, int n, off at) { REAL(name); if (!ours(fd)) return real(fd, v, n, at); \
    if (interrupted()) return -1; struct iovec some[16]; int k = shorten(v, n, some); return real(fd, some, k, at); }
READER(read)
PREADER(pread, off_t)
PREADER(pread64, off64_t)
PREADVER(preadv, off_t)
PREADVER(preadv64, off64_t)
ssize_t readv(int fd, const struct iovec *v, int n) { REAL(readv); if (!ours(fd)) return real(fd, v, n);
    if (interrupted()) return -1; struct iovec some[16]; int k = shorten(v, n, some); return real(fd, some, k); }
"""
RATE, N = 4096, 4096
SCRIPT = """
import json, sys
import leakmel as lm
from leakmel.recordings.labels import Decision, append_decision, now_utc, read_labels
{body}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need(shutil.which("gcc"), "gcc")
    folder = tmp_path_factory.mktemp("library")
    (folder / "short.c").write_text(LIBRARY)
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(folder / "short.so"),
        str(folder / "short.c"),
        "-ldl",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "short.so"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    "Recordings of all ways to be read, some of them refused; long ago, so that rows are kept without their content."
    root = tmp_path / "data"
    for k, label in enumerate(("LEAK", "NOLEAK")):
        (root / label).mkdir(parents=True)
        for i in range(6):
            x = np.random.default_rng(10 * k + i).normal(0, 500, N).astype("<i2")
            (root / label / f"{i}.wav").write_bytes(canonical_header(RATE, N) + x.tobytes())
    for name in (
        "LIST before the samples",
        "pcm24 RIFX",
        "A-law",
        "float64 stereo",
        "RF64 with a small size",
        "streamed",
    ):
        (root / "LEAK" / f"{name}.wav").write_bytes(READ[name].content)
    for name in ("NaN", "pcm16 cut", "two formats", "IMA ADPCM"):
        (root / "LEAK" / f"{name}.wav").write_bytes(REFUSED[name].content)
    time.sleep(0.05)
    return root


def child(body: str, library: Path, below: Path, limit: int, *more: str, **environment: str) -> Any:
    "Run a script that reads files below a folder through the library; what it printed as JSON."
    named = {"LD_PRELOAD": str(library), "SHORT_BELOW": str(below), "SHORT_LIMIT": str(limit)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body), *more],
        env=os.environ | named | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


BUILD = """
spec = {"sample_rate": 4096, "duration_s": 1.0}
r = lm.build(sys.argv[1], out=sys.argv[2], mode=sys.argv[3], engine="cpu", spec=spec, progress="none")
print(json.dumps([r.rows, sorted((x.code, x.message) for x in r.rejections), r.summary["copied_rows"], r.verified.ok]))
"""


@pytest.mark.slow
@each(("mode", "limit"), [("stream", 1), ("stream", 4096), ("memmap", 7)])
def test_a_build_has_the_same_bytes(library: Path, data: Path, tmp_path: Path, mode: str, limit: int) -> None:
    "Recordings, rows that are read back, the data set, its state, the cache; and a second build that copies rows."
    (tmp_path / "right").mkdir()
    (tmp_path / "out").mkdir()
    spec = {"sample_rate": RATE, "duration_s": 1.0}
    whole = lm.build(data, out=tmp_path / "right" / "x.h5", engine="cpu", spec=spec, progress="none")
    target = tmp_path / "out" / "x.h5"
    rows, rejected, *_ = child(BUILD, library, tmp_path, limit, str(data), str(target), mode)
    assert rows == whole.rows == 18
    assert rejected == sorted([x.code, x.message] for x in whole.rejections)
    assert target.read_bytes() == whole.path.read_bytes()
    (data / "LEAK" / "0.wav").unlink()
    *_, copied, ok = child(BUILD, library, tmp_path, limit, str(data), str(target), mode)
    assert (copied, ok) == (17, True)


@pytest.mark.parametrize("limit", [7])
def test_an_interrupted_build_is_resumed(library: Path, data: Path, tmp_path: Path, limit: int) -> None:
    "The journal and the rows in the partial file are read whole."
    stop = (
        "import os; from leakmel.dataset import publish; publish._check = lambda *a: os.kill(os.getpid(), 9)"
    )
    body = stop + BUILD
    named = {"LD_PRELOAD": str(library), "SHORT_BELOW": str(tmp_path), "SHORT_LIMIT": str(limit)}
    target = tmp_path / "x.h5"
    command = [sys.executable, "-c", SCRIPT.format(body=body), str(data), str(target), "stream"]
    done = subprocess.run(
        command, env=os.environ | named, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    got = child(
        BUILD.replace("copied_rows", "resumed_rows"),
        library,
        tmp_path,
        limit,
        str(data),
        str(target),
        "stream",
    )
    assert got[2:] == [18, True]


@pytest.mark.slow
@each("limit", [1, 7, 4096])
def test_every_odd_file_is_read_as_before(library: Path, tmp_path: Path, limit: int) -> None:
    "By the parser alone: samples, or code and place of the refusal."
    for name, odd in (READ | REFUSED).items():
        if len(odd.content) < 20_000:
            (tmp_path / f"{name}.wav").write_bytes(odd.content)
    body = """
from pathlib import Path
from leakmel.recordings.wav import read_wav
from leakmel.core.errors import RecordingError
def outcome(path):
    try: return read_wav(path).digest
    except RecordingError as e: return [e.reject_code, e.offset]
print(json.dumps({p.name: outcome(p) for p in Path(sys.argv[1]).glob("*.wav")}))
"""

    def outcome(path: Path) -> Any:
        try:
            return read_wav(path).digest
        except RecordingError as e:
            return [e.reject_code, e.offset]

    assert child(body, library, tmp_path, limit, str(tmp_path)) == {
        p.name: outcome(p) for p in tmp_path.glob("*.wav")
    }


@pytest.mark.slow
@pytest.mark.parametrize("limit", [7])
def test_labels_and_models_are_read_whole(library: Path, data: Path, tmp_path: Path, limit: int) -> None:
    "A table that is appended to several times keeps its lines; a model gives the same scores."
    torch = pytest.importorskip("torch")
    spec = lm.MelSpec.preset("disjoint", duration_s=1.0)
    _, n_short, n_mels, n_frames = spec.row_shape
    torch.manual_seed(0)
    net = LeakNet(
        NetSettings(n_mels, n_frames * n_short, channels=(8, 8)), np.full(n_mels, -30.0), np.full(n_mels, 3.0)
    )
    model = Detector(net.eval(), make_task(["LEAK", "NOLEAK"]), spec)
    body = """
for k in range(3):
    append_decision(sys.argv[2], Decision(f"LEAK/{k}.wav", "", "NOLEAK", "ann", now_utc()))
scores = lm.predict(sys.argv[1], sys.argv[3], device="cpu", progress="none").table
print(json.dumps([open(sys.argv[2]).read().count("\\n"), dict(zip(scores["path"], scores["score"]))]))
"""
    saved = model.save(tmp_path / "model.pt")
    lines, scores = child(body, library, tmp_path, limit, str(data), str(tmp_path / "labels.csv"), str(saved))
    right = lm.predict(data, saved, device="cpu", progress="none").table
    assert lines == 4
    assert scores == dict(zip(right["path"], right["score"], strict=True))


@each("k", [1, 3, 10_000])
def test_bytes_at_an_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    "Without a compiler: a system call that returns at most k bytes."
    real = os.pread
    (tmp_path / "x").write_bytes(bytes(range(256)) * 4)
    monkeypatch.setattr(wav.os, "pread", lambda fd, n, at: real(fd, min(n, k), at))
    with open(tmp_path / "x", "rb") as f:
        for n, at in ((0, 5), (1, 0), (300, 200), (2000, 1000), (10, 1024), (10, 5000)):
            assert pread_all(f.fileno(), n, at) == (bytes(range(256)) * 4)[at : at + n]
