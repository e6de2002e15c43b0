"Odd WAV files: each is read as libsndfile reads it, bit for bit, or refused by name; faults of the machine are told apart."
import contextlib, errno, io, os, struct, subprocess, sys, tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from leakmel.audio import wav
from leakmel.audio.wav import MAX_CHUNKS, canonical_header, digest_of, parse_header, read_wav
from leakmel.core.errors import REJECT_CODES, MachineError, RecordingError

N = 100
MONO = np.round(9000 * np.sin(np.arange(N) / 3)).astype("<i2")
STEREO = np.stack([MONO, -MONO[::-1]], axis=1)
PCM16 = MONO.tobytes()
GUID = bytes.fromhex("0000" "0000" "1000" "8000" "00aa00389b71")   # what follows the format tag in a plain sub-format


# -- making files -----------------------------------------------------------------------------------------------------

def fmt(tag: int = 1, *, channels: int = 1, rate: int = 4096, bits: int = 16, align: int | None = None, more: bytes = b"", order: str = "<") -> bytes:
    "A format chunk."
    align = channels * -(-bits // 8) if align is None else align
    return chunk(b"fmt ", struct.pack(order + "HHIIHH", tag, channels, rate, rate * align, align, bits) + more, order=order)


def chunk(name: bytes, body: bytes, *, size: int | None = None, order: str = "<") -> bytes:
    "A chunk, padded to an even length, with a size that may lie."
    return name + struct.pack(order + "I", len(body) if size is None else size) + body + bytes(len(body) % 2)


def riff(*chunks: bytes, kind: bytes = b"RIFF", size: int | None = None, order: str = "<") -> bytes:
    "A file of chunks."
    body = b"WAVE" + b"".join(chunks)
    return kind + struct.pack(order + "I", len(body) if size is None else size) + body


def coded(subtype: str, *, container: str = "WAV", samples: np.ndarray = MONO, rate: int = 4096, endian: str = "FILE") -> bytes:
    "What libsndfile writes."
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=container, subtype=subtype, endian=endian)
    return out.getvalue()


def extensible(bits: int, body: bytes, *, valid: int | None = None, channels: int = 1, tag: int = 1, guid: bytes = GUID, align: int | None = None) -> bytes:
    "A WAVE_FORMAT_EXTENSIBLE file."
    more = struct.pack("<HHIH", 22, bits if valid is None else valid, 4, tag) + guid
    return riff(fmt(0xFFFE, channels=channels, bits=bits, align=align, more=more), chunk(b"data", body))


def rf64(n_bytes: int, *, data_size: int = 0xFFFFFFFF) -> bytes:
    "An RF64 file whose ds64 chunk claims `n_bytes` of samples."
    ds64 = chunk(b"ds64", struct.pack("<QQQI", 0, n_bytes, n_bytes // 2, 0))
    return riff(ds64, fmt(), chunk(b"data", PCM16, size=data_size), kind=b"RF64", size=0xFFFFFFFF)


def holed(value: float, dtype: str) -> bytes:
    "Float samples, one of which is not a finite number."
    x = (MONO / 32768).astype(dtype)
    x[37] = value
    return riff(fmt(3, bits=x.itemsize * 8), chunk(b"data", x.tobytes()))


NOTE = chunk(b"LIST", b"INFOISFT" + struct.pack("<I", 5) + b"logger")
DATA = chunk(b"data", PCM16)

# name -> content that is read
READ = {
    "canonical": canonical_header(4096, N) + PCM16,
    "stereo": canonical_header(4096, N, 2) + STEREO.tobytes(),
    "64 channels": canonical_header(4096, 10, 64) + bytes(range(256)) * 5,
    "PCM_U8": coded("PCM_U8"),
    "PCM_24": coded("PCM_24"),
    "PCM_32": coded("PCM_32"),
    "FLOAT": coded("FLOAT"),
    "DOUBLE": coded("DOUBLE"),
    "PCM_24 stereo": coded("PCM_24", samples=STEREO),
    "float above full scale": coded("FLOAT", samples=np.array([0.5, 1.5, -3.25], np.float32)),
    "A-law": coded("ALAW"),
    "mu-law": coded("ULAW"),
    "A-law stereo": coded("ALAW", samples=STEREO),
    "IMA ADPCM": coded("IMA_ADPCM", samples=np.tile(MONO, 20)),
    "MS ADPCM": coded("MS_ADPCM", samples=np.tile(MONO, 20)),
    "GSM 6.10": coded("GSM610", samples=np.tile(MONO, 20)),
    "G.721": coded("G721_32", samples=np.tile(MONO, 20)),
    "extensible 16": extensible(16, PCM16),
    "extensible 24": extensible(24, bytes(range(150))),
    "extensible of libsndfile": coded("PCM_16", container="WAVEX"),
    "extensible float": extensible(32, (MONO / 32768).astype("<f4").tobytes(), tag=3),
    "extensible, 12 valid bits of 16": extensible(16, PCM16, valid=12),
    "extensible, 24 valid bits of 32": extensible(32, (MONO.astype("<i4") << 16).tobytes(), valid=24),
    "12 bits in 2 bytes": riff(fmt(bits=12), DATA),
    "20 bits in 3 bytes": riff(fmt(bits=20), chunk(b"data", bytes(range(150)))),
    "RIFX 16": coded("PCM_16", endian="BIG"),
    "RIFX 24": coded("PCM_24", endian="BIG"),
    "RIFX float": coded("FLOAT", endian="BIG"),
    "RIFX extensible": riff(
        fmt(0xFFFE, more=struct.pack(">HHIIHH", 22, 16, 4, 1, 0, 16) + GUID[6:], order=">"), chunk(b"data", MONO.astype(">i2").tobytes(), order=">"),
        kind=b"RIFX", order=">"),
    "RF64": rf64(2 * N),
    "RF64 with a small size": rf64(2 * N, data_size=2 * N),
    "RF64 of libsndfile": coded("PCM_16", container="RF64"),
    "ds64 in a RIFF file": riff(chunk(b"ds64", struct.pack("<QQQI", 0, 20, 10, 0)), fmt(), DATA),
    "format chunk of 18 bytes": riff(fmt(more=b"\0\0"), DATA),
    "format chunk of 100 bytes": riff(fmt(more=bytes(84)), DATA),
    "chunk before the format": riff(NOTE, fmt(), DATA),
    "chunk before the samples": riff(fmt(), NOTE, DATA),
    "chunk behind the samples": riff(fmt(), DATA, NOTE),
    "chunk of odd size before": riff(fmt(), chunk(b"junk", b"abc"), DATA),
    "empty chunk before": riff(fmt(), chunk(b"junk", b""), DATA),
    "999 chunks": riff(*[chunk(b"junk", b"")] * (MAX_CHUNKS - 2), fmt(), DATA),
    "odd number of data bytes": riff(fmt(), chunk(b"data", PCM16 + b"x")),
    "data end inside a frame": riff(fmt(channels=2), chunk(b"data", PCM16 + b"xy")),
    "rubbish behind": riff(fmt(), DATA) + b"\0\1\2\3 not a chunk",
    "data, then a chunk that lies": riff(fmt(), DATA, chunk(b"LIST", b"abcd", size=4_000_000_000)),
    "RIFF size 0": riff(fmt(), DATA, size=0),
    "RIFF size too large": riff(fmt(), DATA, size=2_000_000_000),
    "RIFF size all ones": riff(fmt(), DATA, size=0xFFFFFFFF),
    "RIFF size too small": riff(fmt(), DATA, size=60),
    "streamed": riff(fmt(), chunk(b"data", PCM16, size=0xFFFFFFFF)),
    "streamed, odd end": riff(fmt(), chunk(b"data", PCM16, size=0xFFFFFFFF) + b"x"),
    "wrong byte rate": riff(chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, 4096, 1, 2, 16)), DATA),
    "1 Hz": riff(fmt(rate=1), DATA),
    "one sample": canonical_header(4096, 1) + b"\1\2",
}

# name -> content that is refused, with code, and the offset where one can be named
REFUSED: dict[str, tuple[bytes, str, int | None]] = {
    "no bytes": (b"", "empty", None),
    "one byte": (b"R", "not_wav", 0),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "not_wav", 0),
    "zeros": (bytes(4096), "not_wav", 0),
    "W64": (coded("PCM_16", container="W64"), "not_wav", 0),
    "AIFF": (coded("PCM_16", container="AIFF"), "not_wav", 0),
    "FLAC": (coded("PCM_16", container="FLAC"), "not_wav", 0),
    "AVI": (riff().replace(b"WAVE", b"AVI "), "not_wav", 0),
    "OGG": (b"OggS" + bytes(100), "not_wav", 0),
    "JSON": (b'{"error": "not found"}' * 5, "not_wav", 0),
    "RIFF and nothing more": (riff(), "not_wav", 12),
    "no samples": (riff(fmt()), "not_wav", 12),
    "header only": (canonical_header(4096, 0), "empty", 40),
    "data size 0": (riff(fmt(), chunk(b"data", PCM16, size=0)), "empty", 40),
    "RF64, data size 0": (rf64(0), "empty", 76),
    "no format": (riff(DATA), "not_wav", 12),
    "format behind the samples": (riff(DATA, fmt()), "not_wav", 12),
    "two formats": (riff(fmt(), fmt(rate=8000), DATA), "not_wav", 36),
    "a format behind the samples as well": (riff(fmt(), DATA, fmt(rate=8000)), "not_wav", 44 + 2 * N),
    "two data chunks": (riff(fmt(), DATA, chunk(b"data", PCM16[:20])), "not_wav", 44 + 2 * N),
    "format chunk of 14 bytes": (riff(chunk(b"fmt ", fmt()[8:22]), DATA), "not_wav", 20),
    "capital letters": (riff(b"FMT " + fmt()[4:], DATA), "not_wav", None),
    "data size lies": (riff(fmt(), chunk(b"data", PCM16, size=4_000_000_000)), "truncated", 44 + 2 * N),
    "data size one too many": (riff(fmt(), chunk(b"data", PCM16, size=2 * N + 1)), "truncated", 44 + 2 * N),
    "RF64 size lies": (rf64(2**63), "truncated", 80 + 2 * N),
    "RF64 without ds64": (riff(fmt(), DATA, kind=b"RF64"), "not_wav", 36),
    "RF64 with a short ds64": (riff(chunk(b"ds64", bytes(8)), kind=b"RF64"), "not_wav", 12),
    "chunk of odd size without its padding": (riff(fmt(), b"junk\3\0\0\0abc", DATA), "not_wav", 36),
    "zeros between chunks": (riff(fmt(), bytes(16), DATA), "not_wav", 12),
    "24 bits in 4 bytes": (riff(fmt(bits=24, align=4), chunk(b"data", bytes(400))), "unsupported", 20),
    "extensible, 24 bits in 4 bytes": (extensible(24, bytes(400), align=4), "unsupported", 20),
    "extensible, unknown sub-format": (extensible(16, PCM16, guid=b"\1" * 14), "unsupported", None),
    "extensible, cut short": (riff(fmt(0xFFFE, more=b"\0\0"), DATA), "unsupported", None),
    "block align 0": (riff(fmt(align=0), DATA), "unsupported", 20),
    "0 bits": (riff(fmt(bits=0, align=2), DATA), "unsupported", 20),
    "40 bits": (riff(fmt(bits=40), DATA), "unsupported", None),
    "float of 16 bits": (riff(fmt(3), DATA), "unsupported", None),
    "unknown tag": (riff(fmt(0x1234), DATA), "unsupported", None),
    "0 channels": (riff(fmt(channels=0, align=2), DATA), "channels", 20),
    "65 channels": (canonical_header(4096, 10, 65) + bytes(1300), "channels", 20),
    "65,535 channels": (riff(fmt(channels=65_535, align=2), DATA), "channels", 20),
    "rate 0": (riff(fmt(rate=0), DATA), "unsupported", 20),
    "rate 4 GHz": (riff(chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, 2**32 - 1, 0, 2, 16)), DATA), "unsupported", 20),
    "half a sample": (riff(fmt(), chunk(b"data", b"x")), "empty", 44),
    "half a frame": (riff(fmt(channels=2), chunk(b"data", b"xy")), "empty", 44),
    "more than 1,000 chunks": (riff(*[chunk(b"junk", b"")] * MAX_CHUNKS, fmt(), DATA), "unsupported", 12 + 8 * MAX_CHUNKS),
    "NaN": (holed(np.nan, "<f4"), "nonfinite", None),
    "infinity": (holed(-np.inf, "<f4"), "nonfinite", None),
    "NaN in 64 bits": (holed(np.nan, "<f8"), "nonfinite", None),
    "64 bits beyond float32": (holed(1e300, "<f8"), "nonfinite", None),
}


def refusal(path: str | bytes | os.PathLike) -> RecordingError:
    "The error with which a file is refused, found to be complete."
    with pytest.raises(RecordingError) as caught: read_wav(path)
    error = caught.value
    assert error.code in REJECT_CODES
    assert error.path is not None
    assert os.fsencode(error.path) == os.fsencode(path)
    return error


# -- the set ----------------------------------------------------------------------------------------------------------

def test_the_set_is_large_enough() -> None:
    assert len(READ) >= 40
    assert len(READ) + len(REFUSED) >= 90


@pytest.mark.parametrize("name", READ)
def test_read_as_libsndfile_reads_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.wav"
    path.write_bytes(READ[name])
    got = read_wav(path)
    dtype = "int16" if got.encoding == "pcm16" else "float32"
    with soundfile.SoundFile(path) as f: right, rate = f.read(f.frames, dtype=dtype, always_2d=True), f.samplerate
    assert got.samples.dtype == dtype
    assert got.samples.dtype.isnative
    assert got.sample_rate == rate
    assert np.array_equal(got.samples, right)
    assert len(right) > 0


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    content, code, offset = REFUSED[name]
    path = tmp_path / f"{name}.wav"
    path.write_bytes(content)
    error = refusal(path)
    assert error.code == code
    assert str(path) in str(error)
    if offset is not None:
        assert error.offset == offset
        assert f"(byte {offset})" in str(error)


def test_the_first_bad_sample_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nan.wav"
    path.write_bytes(holed(np.nan, "<f4"))
    assert "sample 37 is not a finite number" in str(refusal(path))


@pytest.mark.parametrize("name", ["canonical", "PCM_24", "RF64", "extensible 16", "RIFX float", "MS ADPCM"])
def test_truncated_anywhere(tmp_path: Path, name: str) -> None:
    "A file cut off at any byte is refused; 16-bit samples never come out shorter than the header says."
    whole, path = READ[name], tmp_path / "cut.wav"
    end = parse_file(path, whole)
    cuts = set(range(0, min(end, 160))) | set(range(160, end, 37)) | {end - 1}
    for n in sorted(cuts):
        path.write_bytes(whole[:n])
        error = refusal(path)
        assert error.code in {"empty", "not_wav", "truncated"}, n


def parse_file(path: Path, content: bytes) -> int:
    "Where the samples of a file end."
    path.write_bytes(content)
    with open(path, "rb") as f: header = parse_header(f.fileno(), len(content))
    return header.data_start + header.data_bytes


def test_the_digest_is_that_of_the_payload(tmp_path: Path) -> None:
    for name in ("canonical", "chunk of odd size before", "RF64", "streamed"):
        path = tmp_path / "x.wav"
        path.write_bytes(READ[name])
        assert read_wav(path).digest == digest_of(PCM16)


def test_samples_may_be_written_to(tmp_path: Path) -> None:
    "torch warns of arrays that may not be written to."
    for name in ("canonical", "RIFX 16", "FLOAT"):
        path = tmp_path / "x.wav"
        path.write_bytes(READ[name])
        assert read_wav(path).samples.flags.writeable


# -- what is no file ----------------------------------------------------------------------------------------------------

def test_neither_folder_nor_fifo_nor_device_is_read(tmp_path: Path) -> None:
    (tmp_path / "folder.wav").mkdir()
    os.mkfifo(tmp_path / "fifo.wav")
    for path in (tmp_path / "folder.wav", tmp_path / "fifo.wav", Path("/dev/null")):
        assert refusal(path).code == "unreadable"


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "gone.wav").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop.wav").symlink_to(tmp_path / "loop.wav")
    assert refusal(tmp_path / "gone.wav").code == refusal(tmp_path / "loop.wav").code == "changed"


@pytest.mark.parametrize("name", [b"caf\xe9.wav", b"a\nb.wav", b"-rf.wav", b"quote\"'.wav", b" .wav"])
def test_any_name(tmp_path: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    with open(path, "wb") as f: f.write(READ["canonical"])
    assert np.array_equal(read_wav(path).samples[:, 0], MONO)
    with open(path, "wb") as f: f.write(b"x")
    assert "\n" not in str(refusal(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_is_a_fault_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(READ["canonical"])
    path.chmod(0)
    assert refusal(path).code == "unreadable"


# -- faults of the machine ----------------------------------------------------------------------------------------------

def failing(code: int) -> Callable[..., int]:
    "A system call that fails."
    def call(*args: object, **kwargs: object) -> int: raise OSError(code, os.strerror(code))
    return call


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "pread", "preadv"])
def test_a_fault_of_the_machine_rejects_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str) -> None:
    path = tmp_path / "good.wav"
    path.write_bytes(READ["canonical"])
    monkeypatch.setattr(wav.os, call, failing(code))
    with pytest.raises(MachineError, match=errno.errorcode[code]) as caught: read_wav(path)
    assert str(path) in str(caught.value)


def test_out_of_descriptors_before_the_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "good.wav"
    path.write_bytes(READ["PCM_24"])
    monkeypatch.setattr(wav.os, "dup", failing(errno.EMFILE))
    with pytest.raises(MachineError, match="EMFILE"): read_wav(path)


def test_a_real_limit_of_open_files(tmp_path: Path) -> None:
    path = tmp_path / "good.wav"
    path.write_bytes(READ["canonical"])
    script = f"""
import os, resource
from leakmel.audio.wav import read_wav
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


def test_no_descriptor_is_lost(tmp_path: Path) -> None:
    n_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    if n_open is None: pytest.skip("needs /proc")
    path = tmp_path / "x.wav"
    for content in [*READ.values(), *(c for c, _, _ in REFUSED.values())]:
        path.write_bytes(content)
        with contextlib.suppress(RecordingError): read_wav(path)
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(READ["canonical"])
    fd, n = wav.open_regular(path)
    try:
        path.write_bytes(READ["canonical"][:150])
        with pytest.raises(RecordingError) as caught: wav.read_open_wav(fd, n)
    finally:
        os.close(fd)
    assert (caught.value.code, caught.value.offset) == ("truncated", 150)


def test_lying_sizes_allocate_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    for name in ("data size lies", "RF64 size lies", "65,535 channels"):
        path.write_bytes(REFUSED[name][0])
        tracemalloc.start()
        refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20, name


# -- real recordings ------------------------------------------------------------------------------------------------------

def test_real_recordings() -> None:
    folder = os.environ.get("LEAKMEL_REAL_WAVS", "")
    if not folder: pytest.skip("LEAKMEL_REAL_WAVS is not set")
    files = sorted(Path(folder).rglob("*.wav"))
    assert files, "LEAKMEL_REAL_WAVS names a folder without recordings"
    for path in files:
        right, rate = soundfile.read(path, dtype="int16", always_2d=True)
        got = read_wav(path)
        assert got.sample_rate == rate
        if got.encoding == "pcm16": assert np.array_equal(got.samples, right)
