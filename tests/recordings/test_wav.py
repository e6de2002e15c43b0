"The WAV reader: errors of a file, names that are not Unicode, and machine faults separated from file faults."

import contextlib
import errno
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from each import each
from errors import raises
from odd_wavs import MONO, PCM16, READ, REFUSED, chunk, fmt, holed, riff, sub_format

from leakmel.core.errors import REJECT_CODES, MachineError, RecordingError
from leakmel.dataset.pipeline import build
from leakmel.recordings import wav
from leakmel.recordings.manifest import scan
from leakmel.recordings.wav import MAX_SAMPLE_BYTES, STREAMED, digest_of, parse_header, read_wav

pytestmark = pytest.mark.quick


def refusal(path: str | bytes | os.PathLike) -> RecordingError:
    "The error with which a file is refused, found to be complete."
    with pytest.raises(RecordingError) as caught:
        read_wav(path)
    error = caught.value
    assert error.reject_code in REJECT_CODES
    assert error.path is not None
    assert os.fsencode(error.path) == os.fsencode(path)
    return error


# -- too large for memory ------------------------------------------------------------------------------------------------


def sparse(path: Path, n_bytes: int, encoding: str = "pcm16") -> Path:
    "A file of so many bytes that takes none, with a data size that was never filled in."
    tag, bits = {"pcm16": (1, 16), "pcm8": (1, 8), "alaw": (6, 8)}[encoding]
    fmt = struct.pack("<HHIIHH", tag, 1, 4096, 4096 * bits // 8, bits // 8, bits)
    path.write_bytes(
        struct.pack("<4sI4s4sI16s4sI", b"RIFF", STREAMED, b"WAVE", b"fmt ", 16, fmt, b"data", STREAMED)
    )
    os.truncate(path, n_bytes)
    return path


@each(
    ("encoding", "n_bytes", "needed"),
    [
        ("pcm16", 1 << 42, (1 << 42) - 44),
        ("pcm16", MAX_SAMPLE_BYTES + 46, MAX_SAMPLE_BYTES + 2),
        ("pcm8", (1 << 30) + 45, (1 << 32) + 4),
        ("alaw", (1 << 30) + 45, (1 << 32) + 4),
    ],
)
def test_more_samples_than_a_recording_may_have_are_refused_before_memory_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, n_bytes: int, needed: int
) -> None:
    monkeypatch.setattr(wav, "read_payload", lambda fd, header: pytest.fail("memory was asked for"))
    error = refusal(sparse(tmp_path / "giant.wav", n_bytes, encoding))
    assert (error.reject_code, error.offset) == ("unsupported", 44)
    assert f"{needed} bytes of samples, at most {MAX_SAMPLE_BYTES} are read" in str(error)


@each(
    ("encoding", "n_bytes"),
    [("pcm16", MAX_SAMPLE_BYTES + 44), ("pcm8", (1 << 30) + 44), ("alaw", (1 << 30) + 44)],
)
def test_recording_may_have_as_many_samples_as_the_header_can_state(
    tmp_path: Path, encoding: str, n_bytes: int
) -> None:
    with open(sparse(tmp_path / "large.wav", n_bytes, encoding), "rb") as f:
        assert parse_header(f.fileno(), n_bytes).data_bytes == n_bytes - 44


def test_file_too_large_for_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "It is no fault of the recording, so it is not rejected: scan, read and build stop."
    path = tmp_path / "LEAK" / "large.wav"
    path.parent.mkdir()
    path.write_bytes(READ["canonical"].content)

    def none(fd: int, header: wav.WavHeader) -> bytearray:
        raise MemoryError

    monkeypatch.setattr(wav, "read_payload", none)
    with raises("out-of-memory", MachineError, says="LEAK/large.wav"):
        read_wav(path)
    with raises("out-of-memory", MachineError, says="LEAK/large.wav"):
        scan(tmp_path, content=True, progress="none")
    spec = {"sample_rate": 8000, "duration_s": 1}
    for mode in ("stream", "preload"):
        with raises("out-of-memory", MachineError, says="LEAK/large.wav"):
            build(
                tmp_path,
                out=tmp_path.with_name("out") / "x.h5",
                spec=spec,
                mode=mode,
                engine="reference",
                progress="none",
            )


# -- one file ---------------------------------------------------------------------------------------------------------


def test_the_first_bad_sample_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nan.wav"
    path.write_bytes(holed(math.nan, 32, channels=2))
    assert "sample 37 is not a finite number (byte 344)" in str(refusal(path))


@each("name", ["canonical", "pcm24", "pcm16 RF64", "pcm16 extensible", "float32 RIFX", "A-law"])
def test_truncated_anywhere(tmp_path: Path, name: str) -> None:
    "A file cut off at any byte is refused; 16-bit samples never come out shorter than the header says."
    whole, path = READ[name].content, tmp_path / "cut.wav"
    end = parse_file(path, whole)
    cuts = set(range(0, min(end, 160))) | set(range(160, end, 37)) | {end - 1}
    for n in sorted(cuts):
        path.write_bytes(whole[:n])
        error = refusal(path)
        assert error.reject_code in {"empty", "not_wav", "truncated"}, n
        assert error.offset is not None
        assert error.offset <= n


def parse_file(path: Path, content: bytes) -> int:
    "Where the samples of a file end."
    path.write_bytes(content)
    with open(path, "rb") as f:
        header = parse_header(f.fileno(), len(content))
    return header.data_start + header.data_bytes


def test_the_digest_is_that_of_the_payload(tmp_path: Path) -> None:
    for name in ("canonical", "odd before the samples", "RF64 with a small size", "streamed"):
        path = tmp_path / "x.wav"
        path.write_bytes(READ[name].content)
        assert read_wav(path).digest == digest_of(PCM16)


def test_samples_are_writable(tmp_path: Path) -> None:
    "torch warns of arrays that may not be written to."
    for name in ("canonical", "pcm16 RIFX", "pcm24", "float32", "A-law"):
        path = tmp_path / "x.wav"
        path.write_bytes(READ[name].content)
        assert read_wav(path).samples.flags.writeable


# -- what is no file ----------------------------------------------------------------------------------------------------


def test_neither_folder_nor_fifo_nor_device_is_read(tmp_path: Path) -> None:
    (tmp_path / "folder.wav").mkdir()
    os.mkfifo(tmp_path / "fifo.wav")
    for path in (tmp_path / "folder.wav", tmp_path / "fifo.wav", Path("/dev/null")):
        assert refusal(path).reject_code == "unreadable"


def test_broken_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gone.wav").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop.wav").symlink_to(tmp_path / "loop.wav")
    assert (
        refusal(tmp_path / "gone.wav").reject_code == refusal(tmp_path / "loop.wav").reject_code == "changed"
    )


@each("name", [b"caf\xe9.wav", b"a\nb.wav", b"-rf.wav", b"quote\"'.wav", b" .wav"])
def test_any_name(tmp_path: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    with open(path, "wb") as f:
        f.write(READ["canonical"].content)
    assert np.array_equal(read_wav(path).samples[:, 0], MONO)
    with open(path, "wb") as f:
        f.write(b"x")
    assert "\n" not in str(refusal(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_is_a_fault_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(READ["canonical"].content)
    path.chmod(0)
    assert refusal(path).reject_code == "unreadable"


# -- faults of the machine ----------------------------------------------------------------------------------------------


def failing(code: int) -> Callable[..., int]:
    "A system call that fails."

    def call(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@each("code", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.ESTALE])
@each("call", ["open", "pread", "preadv"])
def test_a_fault_of_the_machine_rejects_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    path = tmp_path / "good.wav"
    path.write_bytes(READ["canonical"].content)
    monkeypatch.setattr(wav.os, call, failing(code))
    with pytest.raises(MachineError, match=errno.errorcode[code]) as caught:
        read_wav(path)
    assert str(path) in str(caught.value)


@each(
    ("tag", "name"),
    [
        (2, "ADPCM"),
        (17, "ADPCM"),
        (34, "TrueSpeech"),
        (49, "GSM"),
        (85, "MP3"),
        (0x1234, "0x1234"),
        (0, "0x0000"),
    ],
)
@each("extensible", [False, True])
def test_coded_samples_are_refused_with_the_command_that_converts_them(
    tmp_path: Path, tag: int, name: str, extensible: bool
) -> None:
    path = tmp_path / "x.wav"
    chunk_of_format = sub_format(8, tag) if extensible else fmt(tag, bits=8)
    path.write_bytes(riff(chunk_of_format, chunk(b"data", bytes(1000))))
    error = refusal(path)
    assert (error.reject_code, error.offset) == ("unsupported", 20)
    assert name in error.message
    assert "ffmpeg" in error.message
    assert "-c:a pcm_s16le" in error.message


def test_no_library_decodes_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soundfile, "SoundFile", lambda *a, **k: pytest.fail("a library decodes the file"))
    for name, odd in (READ | REFUSED).items():
        (tmp_path / "x.wav").write_bytes(odd.content)
        with contextlib.suppress(RecordingError):
            assert read_wav(tmp_path / "x.wav").encoding.startswith(("pcm", "float", "alaw", "ulaw")), name


def test_a_real_limit_of_open_files(tmp_path: Path) -> None:
    path = tmp_path / "good.wav"
    path.write_bytes(READ["canonical"].content)
    script = f"""
import os, resource
from leakmel.recordings.wav import read_wav
from leakmel.core.errors import MachineError
read_wav({str(path)!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
held = []
try:
    while True: held.append(os.open("/dev/null", os.O_RDONLY))
except OSError: pass
try: read_wav({str(path)!r})
except MachineError as e: print(e)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "EMFILE" in done.stdout
    assert "raise the limit" in done.stdout.lower()


def test_no_descriptor_leaks(tmp_path: Path) -> None:
    n_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    if n_open is None:
        pytest.skip("needs /proc")
    path = tmp_path / "x.wav"
    for content in [*(odd.content for odd in READ.values()), *(odd.content for odd in REFUSED.values())]:
        path.write_bytes(content)
        with contextlib.suppress(RecordingError):
            read_wav(path)
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(READ["canonical"].content)
    fd, n = wav.open_regular(path)
    try:
        path.write_bytes(READ["canonical"].content[:150])
        with pytest.raises(RecordingError) as caught:
            wav.read_payload(fd, wav.parse_header(fd, n))
    finally:
        os.close(fd)
    assert (caught.value.reject_code, caught.value.offset) == ("truncated", 150)


def test_a_stale_network_file_is_a_fault_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecordingError, match="no such file") as caught:
        read_wav(tmp_path / "x.wav")
    assert (caught.value.reject_code, type(caught.value.__cause__)) == ("unreadable", FileNotFoundError)

    def stale(path: object, *given: object, **options: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    monkeypatch.setattr(os, "open", stale)
    monkeypatch.setattr(os, "lstat", stale)
    with pytest.raises(MachineError, match="ESTALE"):
        read_wav(tmp_path / "x.wav")


# -- real recordings ------------------------------------------------------------------------------------------------------


def test_real_recordings() -> None:
    folder = os.environ.get("LEAKMEL_REAL_WAVS", "")
    if not folder:
        pytest.skip("LEAKMEL_REAL_WAVS is not set")
    files = sorted(Path(folder).rglob("*.wav"))
    assert files, "LEAKMEL_REAL_WAVS names a folder without recordings"
    for path in files:
        right, rate = soundfile.read(path, dtype="int16", always_2d=True)
        got = read_wav(path)
        assert got.sample_rate == rate
        if got.encoding == "pcm16":
            assert np.array_equal(got.samples, right)
