"Mutated headers and coded files in great numbers: see fuzzer.py. Each part runs in a process that cannot get more than 16 MB."

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from each import each

FUZZER = Path(__file__).parents[1] / "helpers" / "fuzzer.py"


def tried_and_read(kind: str, seed: int, n: int) -> tuple[int, int]:
    "Run a part; a crash, a hang, a read outside, an allocation that is too large, or any exception but a refusal is an error with its output."
    done = subprocess.run(
        [sys.executable, str(FUZZER), kind, str(seed), str(n)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    n_tried, n_read = map(int, done.stdout.split())
    return n_tried, n_read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "n"),
    [(1, 500_000), *(pytest.param(100 + k, 500_000, marks=pytest.mark.long) for k in range(10))],
)
def test_headers(tried: Callable, seed: int, n: int) -> None:
    n_tried, n_read = tried_and_read("headers", seed, n)
    assert n_tried == n
    assert 0.1 < n_read / n_tried < 0.9, "some are read, some refused"
    tried("S4", n_tried)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "n"), [(2, 20_000), *(pytest.param(200 + k, 50_000, marks=pytest.mark.long) for k in range(4))]
)
def test_files_that_libsndfile_decodes(tried: Callable, seed: int, n: int) -> None:
    "Coded files, of which A-law and mu-law are read here; libsndfile sees none of them."
    n_tried, n_read = tried_and_read("coded", seed, n)
    assert n_tried == n
    assert 0.1 < n_read / n_tried < 0.5, "of five codings, two are read"
    tried("S4", n_tried)


@pytest.mark.slow
@each(
    ("fault", "message"),
    [
        (
            "real = wav._fmt_fields; wav._fmt_fields = lambda *a: (bytes(32 << 20), real(*a))[1]",
            "MemoryError",
        ),
        (
            "real = wav._chunks; wav._chunks = lambda read, container: (wav.os.pread(-1, 1 << 20, 0), *real(read, container))[1:]",
            "bytes asked at 0",
        ),
        ("wav._data_size = lambda claimed, start, n_file, may_stream: claimed", "AssertionError"),
        ("import ctypes; wav._fmt_fields = lambda body, order, at: ctypes.string_at(0)", ""),
        ("wav._unclaimed_bytes = lambda *a: {}[a]", "KeyError"),
    ],
)
def test_fuzzer_detects_a_faulty_parser(fault: str, message: str) -> None:
    "The fuzzer detects a large allocation, a wide read, samples beyond the file, a crash and another exception."
    head = f"import sys; sys.path.insert(0, {str(FUZZER.parent)!r}); import fuzzer"
    code = f"{head}\nfrom leakmel.recordings import wav\n{fault}\nfuzzer.main('headers', 1, 1000)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert message in done.stderr
