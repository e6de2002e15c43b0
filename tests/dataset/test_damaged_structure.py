"Damaged, hostile and locked HDF5 files: a child process with limits examines them, and nothing that a build writes escapes the check."

import ast
import errno
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
from each import each

import leakmel as lm
from leakmel.core import threads
from leakmel.core.errors import LeakmelError, MachineError, VerifyError
from leakmel.dataset import schema
from leakmel.dataset.config import PipelineConfig
from leakmel.dataset.reader import open_dataset, requested_spec
from leakmel.detector.data.segments import open_sources
from leakmel.extras.formats import card
from leakmel.extras.formats import open_sources as sources_of_export
from leakmel.pages.dashboard import spectra_figure

KINDS = ("plain", "waveforms", "gzip")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Recordings, and a data set of each kind."
    top = tmp_path_factory.mktemp("structure")
    lm.write_demo(top / "network", n_files=20)
    for kind in KINDS:
        build(top, top / f"{kind}.h5", kind)
    return top


def build(place: Path, out: Path, kind: str = "plain") -> Path:
    config = PipelineConfig(fsync=False, compression="gzip" if kind == "gzip" else "none")
    return lm.build(
        place / "network",
        split="training",
        out=out,
        spec=lm.MelSpec(sample_rate=4096, duration_s=1.0, n_mels=16, long="cut"),
        engine="reference",
        progress="none",
        pipeline=config,
        with_waveforms=kind != "plain",
    ).path


@pytest.fixture
def copy(place: Path, tmp_path: Path) -> Callable[[str], Path]:
    "Copy a data set, so that it can be damaged."

    def make(kind: str = "plain") -> Path:
        path = tmp_path / f"{kind}.h5"
        path.write_bytes((place / f"{kind}.h5").read_bytes())
        return path

    return make


def outside_of_values(path: Path) -> np.ndarray:
    "Places of all bytes of a file that are no values of HDF5 data sets."
    mask = np.ones(path.stat().st_size, bool)
    with h5py.File(path) as f:
        for _, item in schema.all_sets(f):
            assert isinstance(item, h5py.Dataset)
            if item.chunks:
                item.id.chunk_iter(
                    lambda c: mask.__setitem__(slice(c.byte_offset, c.byte_offset + c.size), False)
                )
            elif (at := item.id.get_offset()) is not None:
                mask[at : at + item.id.get_storage_size()] = False
    return np.flatnonzero(mask)


def everything(path: Path) -> dict[str, Any]:
    "All that h5py reads from a file."
    with h5py.File(path) as f:
        read: dict[str, Any] = dict(schema.description(f))
        for name, item in schema.all_sets(f):
            assert isinstance(item, h5py.Dataset)
            read[name] = str(item.dtype), item.shape, item.chunks, np.ascontiguousarray(item[()]).tobytes()
        return read | {"attributes": {name: str(value) for name, value in f.attrs.items()}}


def zero_the_heap(path: Path) -> None:
    "Zero the header of the first object of a global heap that is in use, as a lost sector does."
    raw = bytearray(path.read_bytes())
    at = raw.find(b"GCOL")
    while struct.unpack_from("<Q", raw, at + 24)[0] == 0:
        at = raw.find(b"GCOL", at + 4)
    raw[at + 16 : at + 32] = bytes(16)
    path.write_bytes(raw)


def no_build(path: Path) -> None:
    build(path.parent, path)


# A process for all damages: each is tried in a child of its own, in which a signal or a hang is noticed.
DAMAGES = """
import json, os, select, signal, sys
import numpy as np
sys.path[:0] = json.loads(sys.argv[4])
from test_damaged_structure import everything, outside_of_values
from pathlib import Path
import leakmel as lm
from leakmel.core.errors import LeakmelError
source, n, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
raw, path, places = source.read_bytes(), source.with_suffix(".damaged"), outside_of_values(source)
right, rng = everything(source), np.random.default_rng(seed)

def damage(k):
    b, at = bytearray(raw), int(rng.choice(places))
    even, kind = at & ~7, ("flip", "zero", "sector", "ones", "noise", "cut")[k % 6]
    if kind == "flip": b[at] ^= 1 << int(rng.integers(8))
    if kind == "zero": b[even : even + 16] = bytes(len(b[even : even + 16]))
    if kind == "sector": b[at & ~511 : (at & ~511) + 512] = bytes(len(b[at & ~511 : (at & ~511) + 512]))
    if kind == "ones": b[even : even + 8] = b"\\xff" * len(b[even : even + 8])
    if kind == "noise": b[even : even + 8] = rng.bytes(len(b[even : even + 8]))
    if kind == "cut": del b[at:]
    return f"{kind} at {at}", bytes(b)

def read():
    with lm.open_dataset(path) as ds:
        ds.__getitems__(list(range(len(ds))))
        ds.files, ds.spec, ds.config
        if ds.waveforms is not None: ds.waveforms[:]

def outcome():
    try: read()
    except LeakmelError: pass
    except (OSError, RuntimeError) as e:  # waveforms are read by h5py itself
        if "read data" not in str(e): return repr(e)
    if not lm.verify(path).ok: return ""
    found = everything(path)
    return ", ".join(k for k in right.keys() | found.keys() if right.get(k) != found.get(k))

for k in range(n):
    name, content = damage(k)
    path.write_bytes(content)
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try: said = outcome()
        except BaseException as e: said = repr(e)
        os.write(w, json.dumps(said[:200]).encode()); os._exit(0)
    os.close(w)
    said = os.read(r, 9999) if select.select([r], [], [], 200)[0] else b'"hangs"'
    os.close(r); os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
    if said != b'""': print(name, said.decode() or "ended by a signal", flush=True)
print("end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_damages_of_the_structure(place: Path, tmp_path: Path, tried: Callable, kind: str, n: int) -> None:
    "Each is reported by verify, or changes nothing that can be read; no reader hangs, crashes or raises another error."
    (tmp_path / "x.h5").write_bytes((place / f"{kind}.h5").read_bytes())
    paths = json.dumps([f"{os.path.dirname(__file__)}/{name}" for name in (".", "../helpers")])
    argv = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        DAMAGES,
        os.fspath(tmp_path / "x.h5"),
        str(n),
        str(n),
        paths,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60 * n)
    assert (done.stdout, done.returncode) == ("end\n", 0), done.stdout + done.stderr[-2000:]
    tried("S22", n)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_flipped_bits_of_the_structure(copy: Callable, tried: Callable, kind: str, n: int) -> None:
    path = copy(kind)
    raw, right, places = path.read_bytes(), everything(path), outside_of_values(path)
    rng = np.random.default_rng(n)
    for _ in range(n):
        at, bit = int(rng.choice(places)), int(rng.integers(8))
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
        assert not lm.verify(path).ok or everything(path) == right, f"bit {bit} of byte {at}"
        tried("S14")


def of_type(f: h5py.File, name: str, attribute: str, kind: Any) -> None:
    value = f[name].attrs[attribute]
    f[name].attrs.create(attribute, value, dtype=kind)


STRUCTURE: dict[str, Callable[[h5py.File], object]] = {
    "label of an axis": lambda f: f["segments_mel"].dims[3].__setattr__("label", "mel_hx"),
    "labels of axes": lambda f: f["segments_mel"].attrs.__delitem__("DIMENSION_LABELS"),
    "unit of the rows": lambda f: f["segments_mel"].attrs.__setitem__("units", "dC"),
    "unit of a scale": lambda f: f["mel_hz"].attrs.__setitem__("units", "s"),
    "no unit": lambda f: f["long_start_s"].attrs.__delitem__("units"),
    "name of a scale": lambda f: f["mel_hz"].attrs.__setitem__("NAME", np.bytes_("mel_hy")),
    "class of a scale": lambda f: f["short_start_s"].attrs.__setitem__("CLASS", np.bytes_("DIMENSION_SCALF")),
    "scale of another axis": lambda f: (
        f["segments_mel"].dims[1].detach_scale(f["long_start_s"]),
        f["segments_mel"].dims[2].attach_scale(f["long_start_s"]),
    ),
    "scale of no axis": lambda f: f["segments_mel"].dims[3].detach_scale(f["mel_hz"]),
    "references of a scale": lambda f: f["mel_hz"].attrs.__delitem__("REFERENCE_LIST"),
    "type of an attribute": lambda f: of_type(f, "/", "n_rows", "i4"),
    "encoding of a text": lambda f: of_type(f, "/", "split", h5py.string_dtype("ascii")),
    "fill value of a column": lambda f: replaced(f, "labels", fillvalue=7),
    "filter of a column": lambda f: replaced(f, "labels", compression="gzip"),
    "growing column": lambda f: replaced(f, "files/gain", maxshape=(None,)),
}


def replaced(f: h5py.File, name: str, **options: Any) -> None:
    values = f[name][()]
    del f[name]
    f.create_dataset(name, data=values, **options)


@pytest.mark.slow
@each("kind", KINDS)
@each("change", STRUCTURE)
def test_what_no_digest_covers_is_compared_with_a_build(copy: Callable, change: str, kind: str) -> None:
    path = copy(kind)
    assert lm.verify(path).ok
    with h5py.File(path, "r+") as f:
        STRUCTURE[change](f)
        assert f.attrs[schema.DIGEST_ATTRIBUTE] == schema.metadata_digest(f)
    report = lm.verify(path)
    assert not report.ok
    assert "differs from what a build writes" in report.problems[0]


READERS: dict[str, Callable[[Path], object]] = {
    "open": lambda path: open_dataset(path).close(),
    "legacy": lambda path: open_dataset(path, legacy=True).close(),
    "training": lambda path: open_sources([path]),
    "export": lambda path: sources_of_export(path, mock.MagicMock()),
    "card": lambda path: card(path),
    "spec": lambda path: requested_spec(path, None, {}),
    "build": lambda path: build(path.parent, path),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_a_heap_without_a_header(
    place: Path, copy: Callable, tried: Callable, reader: str
) -> None:
    path = copy("waveforms")
    zero_the_heap(path)
    os.symlink(place / "network", path.parent / "network")
    before = path.read_bytes()
    with pytest.raises(LeakmelError) as caught:
        READERS[reader](path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    assert "processor" not in spectra_figure(path).to_json()  # the dashboard shows a sentence
    report = lm.verify(path)
    assert "HDF5 library takes more than" in report.problems[0]
    tried("S22")


def other_writer(path: Path) -> subprocess.Popen[str]:
    "A program that has a file open for writing, until its input ends."
    code = "import h5py, sys; f = h5py.File(sys.argv[1], 'r+'); print(1, flush=True); input()"
    argv = [sys.executable, "-c", code, os.fspath(path)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "1\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_locked_file_is_told_apart_from_damage(place: Path, copy: Callable, reader: str) -> None:
    path = copy()
    os.symlink(place / "network", path.parent / "network")
    before = path.read_bytes()
    process = other_writer(path)
    try:
        with pytest.raises(LeakmelError) as caught:
            READERS[reader](path)
        assert caught.value.code == "data-set-in-use"
        assert str(path) in str(caught.value)
        report = lm.verify(path)
        assert "could not be completed" in report.problems[0]
        assert "another program has the file open" in report.problems[0]
    finally:
        process.communicate("\n")
    assert path.read_bytes() == before
    assert lm.verify(path).ok
    open_dataset(path).close()


def test_a_file_that_a_killed_program_marked_as_being_written(tmp_path: Path) -> None:
    "Of a later format than ours; the library names the program that removes the mark."
    path = tmp_path / "x.h5"
    code = "import h5py, os, sys; f = h5py.File(sys.argv[1], 'w', libver='latest'); f.swmr_mode = True; f.flush(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, os.fspath(path)], check=False)
    with pytest.raises(MachineError) as caught:
        open_dataset(path)
    assert caught.value.code == "data-set-in-use"
    assert "h5clear" in str(caught.value)


@pytest.mark.slow
@each(
    ("number", "code"),
    [
        (errno.EACCES, "read-failed"),
        (errno.EIO, "io-fault"),
        (errno.EMFILE, "io-fault"),
        (errno.ESTALE, "io-fault"),
    ],
)
@each("call", ["open", "fork"])
def test_faults_of_the_machine_are_not_damage(copy: Callable, number: int, code: str, call: str) -> None:
    path = copy()

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number), os.fspath(path))

    module, name = (schema.h5py, "File") if call == "fork" else (schema.os, "open")
    with mock.patch.object(module, name, fail):
        with pytest.raises(MachineError) as caught:
            schema.open_file(path)
        assert caught.value.code == code
        assert "could not be completed" in lm.verify(path).problems[0]
        if number != errno.EACCES:
            assert "intact" in str(caught.value)
    assert lm.verify(path).ok


def test_a_file_system_without_locks(copy: Callable) -> None:
    real, path = h5py.File, copy()

    def fail(*args: Any, **options: Any) -> h5py.File:
        if options.get("locking") is not False:
            raise OSError(errno.ENOLCK, "no locks available")
        return real(*args, **options)

    with mock.patch.object(schema.h5py, "File", fail):
        open_dataset(path).close()


def one_text_for_all(path: Path) -> None:
    "A column of many texts, all of which are the same megabytes of the heap."
    with h5py.File(path, "r+") as f:
        column = f.create_dataset(
            "files/texts", data=["x" * 2_000_000] + ["y"] * 1000, dtype=h5py.string_dtype()
        )
        at, size = column.id.get_offset(), column.id.get_storage_size()
    raw = bytearray(path.read_bytes())
    raw[at : at + size] = raw[at : at + 16] * (size // 16)
    path.write_bytes(raw)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["open", "legacy"])
def test_a_text_that_many_entries_share_takes_limited_memory(
    copy: Callable, tried: Callable, how: str
) -> None:
    path = copy()
    one_text_for_all(path)
    with pytest.raises(VerifyError) as caught:
        READERS[how](path)
    assert caught.value.code == "unsafe-file"
    assert "MB of memory" in str(caught.value)
    tried("S18")


def crash(file: h5py.File) -> tuple[str, str]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "", ""


def test_a_crash_of_the_child_is_an_error(copy: Callable) -> None:
    path = copy()
    with (
        # no other thread: a fork, because a new process would not crash
        mock.patch.object(threads.threading, "enumerate", return_value=[]),
        mock.patch.object(schema, "_read_all", crash),
        pytest.raises(VerifyError) as caught,
    ):
        open_dataset(path)
    assert caught.value.code == "damaged-data-set"
    assert "crashes" in str(caught.value)


@pytest.mark.slow
def test_a_file_is_examined_once_until_it_changes(copy: Callable) -> None:
    path = copy()
    with mock.patch.object(schema, "child_process", wraps=schema.child_process) as start:
        for _ in range(3):
            open_dataset(path).close()
        assert start.call_count == 1
        lm.verify(path)
        assert start.call_count == 1
        os.utime(path, ns=(1, 1))
        open_dataset(path).close()
        assert start.call_count == 2
        zero_the_heap(path)
        with pytest.raises(VerifyError):
            open_dataset(path)


@pytest.mark.slow
def test_a_file_that_is_replaced_while_it_is_examined(copy: Callable) -> None:
    path, other = copy("plain"), copy("waveforms")
    real = schema._examined

    def replace_then(*args: Any) -> tuple[str, str]:
        answer = real(*args)
        if other.exists():
            zero_the_heap(other)
            os.replace(other, path)
        return answer

    with mock.patch.object(schema, "_examined", replace_then), pytest.raises(VerifyError):
        open_dataset(path)


def test_a_build_does_not_examine_what_it_wrote(place: Path, tmp_path: Path) -> None:
    with mock.patch.object(schema, "child_process", wraps=schema.child_process) as start:
        for kind in ("plain", "gzip"):
            build(place, tmp_path / f"{kind}.h5", kind)
        assert start.call_count == 0
        build(place, tmp_path / "plain.h5")  # an update reads the old one
        assert start.call_count == 1


@pytest.mark.slow
def test_where_a_process_cannot_be_forked_one_is_started(copy: Callable) -> None:
    good, bad = copy("plain"), copy("waveforms")
    zero_the_heap(bad)
    with mock.patch.object(threads, "_IS_FORK_SAFE", False):
        open_dataset(good).close()
        with pytest.raises(VerifyError) as caught:
            open_dataset(bad)
    assert caught.value.code == "damaged-data-set"


BESIDE_THREADS = """
import sys, threading
import numpy as np
from leakmel.dataset import schema

over = threading.Event()
square = np.random.default_rng(0).random((300, 300))

def multiply():
    while not over.is_set():
        square @ square

threads = [threading.Thread(target=multiply) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(10):
    schema._examined.cache_clear()
    schema.open_file(sys.argv[1]).close()
over.set()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_threads_that_multiply_matrices_do_not_stop_the_examination(copy: Callable) -> None:
    "OpenBLAS ends its threads before a fork, and waits for ever for one that another thread uses."
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    words = [sys.executable, "-P", "-c", BESIDE_THREADS, os.fspath(copy("plain"))]
    subprocess.run(words, env=env, check=True, timeout=300)


IN_A_NOTEBOOK = """
import os
from leakmel.dataset import schema
os.posix_spawn = None
schema.open_file({path!r}).close()
"""
BESIDE_CELLS = """
import threading
from ipykernel.thread import BaseThread
from leakmel.core.threads import _start_child
class SubshellThread(BaseThread):
    __module__ = "ipykernel.subshell_manager"
    def run(self): over.wait()
over = threading.Event()
SubshellThread().start()
import os
os.posix_spawn = lambda *words: -7
assert _start_child(print, (), 2) == -7
over.set()
"""


@pytest.mark.slow
def test_a_notebook_examines_files_without_a_new_process_of_python(copy: Callable) -> None:
    "The threads of its kernel multiply nothing, except those that run cells too."
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for code in (IN_A_NOTEBOOK.format(path=os.fspath(copy("plain"))), BESIDE_CELLS):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
        nbclient.NotebookClient(notebook, kernel_name="python3").execute()


@pytest.mark.slow
def test_children_that_the_system_removes(copy: Callable) -> None:
    good, bad = copy("plain"), copy("waveforms")
    zero_the_heap(bad)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        open_dataset(good).close()
        with pytest.raises(VerifyError):
            open_dataset(bad)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow
@each(
    ("number", "missed"), [(n, missed) for n in (signal.SIGINT, signal.SIGTERM) for missed in (False, True)]
)
def test_a_signal_ends_the_examination_at_once(copy: Callable, number: signal.Signals, missed: bool) -> None:
    "Also one that does not wake the wait: it came just before it, or to another thread, as here."
    path = copy()
    zero_the_heap(path)
    code = """
import signal, sys, threading, time
from leakmel.dataset import schema
from leakmel.cli import main
schema._SECONDS = schema._MOST_SECONDS = 1e3
real = schema.select.poll
def missed():
    time.sleep(1)
    signal.pthread_kill(threading.get_ident(), int(sys.argv[2]))
def poll():
    print("started", flush=True)
    if sys.argv[2:]: threading.Thread(target=missed).start()
    return real()
schema.select.poll = poll
sys.exit(main(["verify", sys.argv[1]]))
"""
    argv = [sys.executable, "-c", code, os.fspath(path), *[str(int(number))] * missed]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "started\n"
        if not missed:
            process.send_signal(number)
        assert select.select([process.stdout], [], [], 60)[0]
        process.communicate(timeout=60)
        assert process.returncode == 128 + number
        for _ in range(100):
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
        else:
            pytest.fail("the child lives on")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# Advice that deletes nothing but a line of a table, a column, compiled code, or what leakmel itself fetched.
ADVICE = re.compile(r"\b(remove|delete|erase|unlink)\b", re.IGNORECASE)
MAY = re.compile(
    r"compiled code|column|one of the two|leading /|extension|from the table|after a power cut", re.IGNORECASE
)


@pytest.mark.slow
def test_no_remedy_advises_to_delete_a_file() -> None:
    root = Path(lm.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "remedy":
                parts = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
                text = "".join(str(p) for p in parts)
                if ADVICE.search(text) and not MAY.search(text):
                    found.append(f"{path.relative_to(root)}: {text}")
    assert not found
