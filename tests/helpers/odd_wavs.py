"""A synthetic set of unusual WAV files, built byte by byte, and a manifest of the expected result of each.

Nothing of leakmel is imported here, on purpose. `write_odd_wavs(folder)` writes the files and beside them `manifest.json`, a list with one entry
for each file:

- `file`: its name; `expect`: "samples" or "refused";
- for samples: `encoding`, `sample_rate` (Hz), `channels`, `n_frames`, and `sha256`, in hex, of the samples as a reader has to give them, frame after
  frame, little-endian: int16 for 16-bit PCM, else float32 with 1.0 as full scale;
- for refused: `code`, and `offset`, the byte at which the trouble starts (null: no place can be named).

A key that is left out is not compared.
"""

import gzip
import hashlib
import io
import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

N = 100
MONO = np.round(9000 * np.sin(np.arange(N) / 3)).astype("<i2")
STEREO = np.stack([MONO, -MONO[::-1]], axis=1)
LONG = np.tile(MONO, 20)  # coded samples come in blocks
PCM16 = MONO.tobytes()
GUID = bytes.fromhex("000000001000800000aa00389b71")  # what follows the format tag in a plain sub-format
AMBISONIC = bytes.fromhex("00002107d3118644c8c1ca000000")
ONES = 0xFFFFFFFF


class Read(NamedTuple):
    "A file that is read; without `samples` it has to be read as libsndfile reads it."

    content: bytes
    encoding: str = "pcm16"
    samples: np.ndarray | None = None  # [n, C]


class Refused(NamedTuple):
    "A file that is refused."

    content: bytes
    code: str
    offset: int | None


# -- making files -----------------------------------------------------------------------------------------------------


def chunk(name: bytes, body: bytes, *, size: int | None = None, order: str = "<") -> bytes:
    "A chunk, padded to an even length, with a size that may lie."
    return name + struct.pack(order + "I", len(body) if size is None else size) + body + bytes(len(body) % 2)


def fmt(
    tag: int = 1,
    *,
    channels: int = 1,
    rate: int = 4096,
    bits: int = 16,
    align: int | None = None,
    more: bytes = b"",
    order: str = "<",
) -> bytes:
    "A format chunk."
    align = channels * -(-bits // 8) if align is None else align
    return chunk(
        b"fmt ",
        struct.pack(order + "HHIIHH", tag, channels, rate, rate * align & ONES, align, bits) + more,
        order=order,
    )


def sub_format(
    bits: int,
    tag: int = 1,
    *,
    channels: int = 1,
    guid: bytes = GUID,
    align: int | None = None,
    order: str = "<",
) -> bytes:
    "A format chunk of the extensible kind; `bits` are those that hold something, the rest of the container is what `align` leaves."
    upper, second, third = struct.unpack("<HHH", guid[:6])
    more = struct.pack(order + "HHIIHH", 22, bits, 4, tag | upper << 16, second, third) + guid[6:]
    held = 8 * (-(-bits // 8) if align is None else align // channels)
    return fmt(0xFFFE, channels=channels, bits=held, align=align, more=more, order=order)


def riff(*chunks: bytes, kind: bytes = b"RIFF", size: int | None = None, order: str = "<") -> bytes:
    "A file of chunks."
    body = b"WAVE" + b"".join(chunks)
    return kind + struct.pack(order + "I", len(body) if size is None else size) + body


def canonical(rate: int = 4096, n_bytes: int = 2 * N, channels: int = 1) -> bytes:
    "The 44 bytes before 16-bit samples."
    return riff(fmt(channels=channels, rate=rate), b"data" + struct.pack("<I", n_bytes), size=36 + n_bytes)


def coded(
    subtype: str,
    *,
    container: str = "WAV",
    samples: np.ndarray = MONO,
    rate: int = 4096,
    endian: str = "FILE",
) -> bytes:
    "What libsndfile writes."
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=container, subtype=subtype, endian=endian)
    return out.getvalue()


def plain(kind: str, bits: int, *, channels: int = 1, order: str = "<") -> tuple[bytes, np.ndarray]:
    "Sample bytes of a sine with both extremes in it, and what a reader has to give for them."
    top = 2 ** (bits - 1)
    shares = [-1.0, 1.0, *(0.9 * math.sin(i / 3) for i in range(channels * N - 2))]
    if kind == "float":
        body = struct.pack(f"{order}{len(shares)}{'f' if bits == 32 else 'd'}", *(1.5 * s for s in shares))
        return body, np.array([1.5 * s for s in shares]).astype(np.float32).reshape(-1, channels)
    whole = [max(-top, min(top - 1, round(s * top))) for s in shares]
    side, width = "little" if order == "<" else "big", bits // 8
    body = b"".join(
        (v + 128).to_bytes(1, "little") if bits == 8 else v.to_bytes(width, side, signed=True) for v in whole
    )
    right = np.array(whole, np.int16) if bits == 16 else (np.array(whole) / top).astype(np.float32)
    return body, right.reshape(-1, channels)


def rf64(
    body: bytes = PCM16, format_chunk: bytes | None = None, *, claim: int | None = None, data_size: int = ONES
) -> bytes:
    "An RF64 file whose ds64 chunk claims `claim` bytes of samples."
    claim = len(body) if claim is None else claim
    ds64 = chunk(b"ds64", struct.pack("<QQQI", 0, claim, claim // 2, 0))
    return riff(
        ds64,
        fmt() if format_chunk is None else format_chunk,
        chunk(b"data", body, size=data_size),
        kind=b"RF64",
        size=ONES,
    )


def holed(value: float, bits: int, channels: int = 1) -> bytes:
    "Float samples, frame 37 of which holds one that is not a finite number, in its last channel."
    body, _ = plain("float", bits, channels=channels)
    width, at = bits // 8, (37 * channels + channels - 1) * bits // 8
    body = body[:at] + struct.pack("<f" if bits == 32 else "<d", value) + body[at + width :]
    return riff(fmt(3, bits=bits, channels=channels), chunk(b"data", body))


FMT, DATA = fmt(), chunk(b"data", PCM16)
END = 44 + 2 * N  # of a canonical file
DS64 = chunk(b"ds64", struct.pack("<QQQI", 0, 2 * N, N, 0))
NOTE = chunk(b"LIST", b"INFOISFT" + struct.pack("<I", 5) + b"logger")
EXTRAS = {
    "LIST": NOTE,
    "fact": chunk(b"fact", struct.pack("<I", N)),
    "bext": chunk(b"bext", b"made".ljust(602, b"\0")),
    "JUNK": chunk(b"JUNK", bytes(28)),
    "PAD": chunk(b"PAD ", bytes(3996)),
    "cue": chunk(b"cue ", struct.pack("<IIIIIII", 1, 1, 0, 0x61746164, 0, 0, 7)),
    "odd": chunk(b"note", b"abc"),
    "empty": chunk(b"note", b""),
    "fact that lies": chunk(b"fact", struct.pack("<I", 4_000_000_000)),
}
KINDS = [("pcm", 8), ("pcm", 16), ("pcm", 24), ("pcm", 32), ("float", 32), ("float", 64)]


# -- the set ----------------------------------------------------------------------------------------------------------

READ: dict[str, Read] = {
    "canonical": Read(canonical() + PCM16),
    "stereo": Read(canonical(n_bytes=4 * N, channels=2) + STEREO.tobytes()),
    "64 channels": Read(canonical(n_bytes=1280, channels=64) + bytes(range(256)) * 5),
    "one sample": Read(canonical(n_bytes=2) + b"\1\2"),
    "1 Hz": Read(riff(fmt(rate=1), DATA)),
    "10 MHz": Read(riff(fmt(rate=10_000_000), DATA)),
    "float above full scale": Read(
        riff(fmt(3, bits=32), chunk(b"data", struct.pack("<3f", 0.5, 1.5, -3.25))), "float32"
    ),
    "float that is hardly there": Read(
        riff(fmt(3, bits=32), chunk(b"data", struct.pack("<3f", 1e-45, -0.0, 1e-30))), "float32"
    ),
    "64-bit float below float32": Read(
        riff(fmt(3, bits=64), chunk(b"data", struct.pack("<3d", 1e-300, 0.1, -1e-40))), "float64"
    ),
    "A-law": Read(coded("ALAW"), "alaw"),
    "A-law stereo": Read(coded("ALAW", samples=STEREO), "alaw"),
    "A-law extensible": Read(riff(sub_format(8, 6), chunk(b"data", bytes(range(100)))), "alaw"),
    "mu-law": Read(coded("ULAW"), "ulaw"),
    "mu-law RIFX": Read(coded("ULAW", endian="BIG"), "ulaw"),
    "mu-law stereo": Read(coded("ULAW", samples=STEREO), "ulaw"),
    "all bytes of A-law": Read(riff(fmt(6, bits=8), chunk(b"data", bytes(range(256)))), "alaw"),
    "all bytes of mu-law": Read(riff(fmt(7, bits=8), chunk(b"data", bytes(range(256)))), "ulaw"),
    "samples behind the data chunk": Read(riff(FMT, DATA) + 5 * PCM16),
    "extensible of libsndfile": Read(coded("PCM_16", container="WAVEX")),
    "extensible, 12 valid bits of 16": Read(riff(sub_format(12, align=2), DATA)),
    "extensible, 24 valid bits of 32": Read(
        riff(sub_format(24, align=4), chunk(b"data", (MONO.astype("<i4") << 16).tobytes())), "pcm32"
    ),
    "12 bits in 2 bytes": Read(riff(fmt(bits=12), DATA), "pcm12"),
    "20 bits in 3 bytes": Read(riff(fmt(bits=20), chunk(b"data", bytes(range(150)))), "pcm20"),
    "4 bits in 1 byte": Read(riff(fmt(bits=4), chunk(b"data", bytes(range(150)))), "pcm4"),
    "RF64 with a small size": Read(rf64(data_size=2 * N)),
    "RF64 of libsndfile": Read(coded("PCM_16", container="RF64")),
    "ds64 in a RIFF file": Read(riff(chunk(b"ds64", struct.pack("<QQQI", 0, 20, 10, 0)), FMT, DATA)),
    "format chunk of 18 bytes": Read(riff(fmt(more=b"\0\0"), DATA)),
    "format chunk of 100 bytes": Read(riff(fmt(more=bytes(84)), DATA)),
    "999 chunks": Read(riff(*[EXTRAS["empty"]] * 997, FMT, DATA)),
    "odd number of data bytes": Read(riff(FMT, chunk(b"data", PCM16 + b"x"))),
    "odd number of data bytes, no pad, a chunk behind": Read(
        riff(FMT, chunk(b"data", PCM16 + b"x")[:-1], NOTE)
    ),
    "data end inside a frame": Read(riff(fmt(channels=2), chunk(b"data", PCM16 + b"xy"))),
    "rubbish behind": Read(riff(FMT, DATA) + b"\0\1\2\3 not a chunk"),
    "chunk name that is no text, behind": Read(riff(FMT, DATA, b"\xff\xfe\xfd\xfc" + bytes(4))),
    "data, then a chunk that lies": Read(riff(FMT, DATA, chunk(b"LIST", b"abcd", size=4_000_000_000))),
    "odd chunk without its padding, behind": Read(riff(FMT, DATA, EXTRAS["odd"][:-1], NOTE)),
    "RIFF size 0": Read(riff(FMT, DATA, size=0)),
    "RIFF size too large": Read(riff(FMT, DATA, size=2_000_000_000)),
    "RIFF size all ones": Read(riff(FMT, DATA, size=ONES)),
    "RIFF size too small": Read(riff(FMT, DATA, size=60)),
    "streamed": Read(riff(FMT, chunk(b"data", PCM16, size=ONES))),
    "streamed, odd end": Read(riff(FMT, chunk(b"data", PCM16, size=ONES) + b"x")),
    "streamed, 24 bits": Read(
        riff(fmt(bits=24), chunk(b"data", bytes(range(150)), size=ONES), size=ONES), "pcm24"
    ),
    "wrong byte rate": Read(riff(chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, 4096, 1, 2, 16)), DATA)),
}
for _name, _extra in EXTRAS.items():
    READ[f"{_name} before the format"] = Read(riff(_extra, FMT, DATA), samples=MONO[:, None])
    READ[f"{_name} before the samples"] = Read(riff(FMT, _extra, DATA), samples=MONO[:, None])
    READ[f"{_name} behind the samples"] = Read(riff(FMT, DATA, _extra), samples=MONO[:, None])

REFUSED: dict[str, Refused] = {
    "no bytes": Refused(b"", "empty", 0),
    "large-file pointer": Refused(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 81964\n", "not_wav", 0
    ),
    "HTML page": Refused(
        b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head><body></body></html>\n",
        "not_wav",
        0,
    ),
    "JSON": Refused(b'{"error": "not found"}' * 5, "not_wav", 0),
    "zeros": Refused(bytes(4096), "not_wav", 0),
    "gzip": Refused(gzip.compress(canonical() + PCM16, mtime=0), "not_wav", 0),
    "W64": Refused(coded("PCM_16", container="W64"), "not_wav", 0),
    "AIFF": Refused(coded("PCM_16", container="AIFF"), "not_wav", 0),
    "FLAC": Refused(coded("PCM_16", container="FLAC"), "not_wav", 0),
    "OGG": Refused(coded("VORBIS", container="OGG", samples=LONG, rate=8000), "not_wav", 0),
    "MP3": Refused(coded("MPEG_LAYER_III", container="MP3", samples=LONG, rate=8000), "not_wav", 0),
    "AVI": Refused(riff().replace(b"WAVE", b"AVI "), "not_wav", 0),
    "RIFF and nothing more": Refused(riff(), "not_wav", 12),
    "no samples": Refused(riff(FMT), "not_wav", 36),
    "header only": Refused(canonical(n_bytes=0), "empty", 40),
    "data size 0": Refused(riff(FMT, chunk(b"data", PCM16, size=0)), "empty", 40),
    "RF64, data size 0": Refused(rf64(claim=0), "empty", 76),
    "no format": Refused(riff(DATA), "not_wav", 12),
    "format behind the samples": Refused(riff(DATA, FMT), "not_wav", 12),
    "two formats": Refused(riff(FMT, fmt(rate=8000), DATA), "not_wav", 36),
    "a format behind the samples as well": Refused(riff(FMT, DATA, fmt(rate=8000)), "not_wav", END),
    "two data chunks": Refused(riff(FMT, DATA, chunk(b"data", PCM16[:20])), "not_wav", END),
    "format chunk of 14 bytes": Refused(riff(chunk(b"fmt ", FMT[8:22]), DATA), "not_wav", 20),
    "capital letters": Refused(riff(b"FMT " + FMT[4:], DATA), "not_wav", 36),
    "data size lies": Refused(riff(FMT, chunk(b"data", PCM16, size=4_000_000_000)), "truncated", END),
    "data size lies by the most": Refused(riff(FMT, chunk(b"data", PCM16, size=ONES - 1)), "truncated", END),
    "data size one too many": Refused(riff(FMT, chunk(b"data", PCM16, size=2 * N + 1)), "truncated", END),
    "data size lies, 24 bits": Refused(
        riff(fmt(bits=24), chunk(b"data", bytes(150), size=4_000_000_000)), "truncated", 194
    ),
    "data size lies, A-law": Refused(
        riff(fmt(6, bits=8), chunk(b"data", bytes(150), size=4_000_000_000)), "truncated", 194
    ),
    "RF64 size lies": Refused(rf64(claim=2**63), "truncated", 80 + 2 * N),
    "RF64 size lies by 4 GiB": Refused(rf64(claim=2**32 + 2 * N), "truncated", 80 + 2 * N),
    "RF64 of two sizes": Refused(rf64(data_size=2 * N - 20), "not_wav", 76),
    "RF64 of two sizes, one of them 0": Refused(rf64(claim=0, data_size=2 * N), "not_wav", 76),
    "RF64 with two ds64 chunks": Refused(
        riff(
            DS64,
            chunk(b"ds64", struct.pack("<QQQI", 0, 20, 10, 0)),
            FMT,
            chunk(b"data", PCM16, size=ONES),
            kind=b"RF64",
            size=ONES,
        ),
        "not_wav",
        48,
    ),
    "RF64 without ds64": Refused(riff(FMT, DATA, kind=b"RF64"), "not_wav", 36),
    "RF64 with a short ds64": Refused(riff(chunk(b"ds64", bytes(8)), kind=b"RF64"), "not_wav", 12),
    "chunk before the samples lies": Refused(
        riff(FMT, chunk(b"LIST", b"abcd", size=4_000_000_000), DATA), "not_wav", 48 + len(DATA)
    ),
    "chunk of odd size without its padding": Refused(riff(FMT, EXTRAS["odd"][:-1], DATA), "not_wav", 48),
    "zeros between chunks": Refused(riff(FMT, bytes(16), DATA), "not_wav", 36),
    "chunk name that is no text": Refused(riff(FMT, b"\xff\xfe\xfd\xfc" + bytes(4), DATA), "not_wav", 36),
    "24 bits in 4 bytes": Refused(riff(fmt(bits=24, align=4), chunk(b"data", bytes(400))), "unsupported", 20),
    "24 bits in 4 bytes, stereo": Refused(
        riff(fmt(bits=24, channels=2, align=8), chunk(b"data", bytes(400))), "unsupported", 20
    ),
    "24 bits in 4 bytes, RIFX": Refused(
        riff(
            fmt(bits=24, align=4, order=">"), chunk(b"data", bytes(400), order=">"), kind=b"RIFX", order=">"
        ),
        "unsupported",
        20,
    ),
    "ambisonic": Refused(riff(sub_format(16, guid=AMBISONIC), DATA), "unsupported", 20),
    "32-bit floats in 8 bytes": Refused(
        riff(fmt(3, bits=32, align=8), chunk(b"data", bytes(400))), "unsupported", 20
    ),
    "A-law in 2 bytes": Refused(riff(fmt(6, bits=8, align=2), DATA), "unsupported", 20),
    "extensible, cut short": Refused(riff(fmt(0xFFFE, more=b"\0\0"), DATA), "unsupported", 20),
    "block align 0": Refused(riff(fmt(align=0), DATA), "unsupported", 20),
    "block align 3": Refused(riff(fmt(align=3), DATA), "unsupported", 20),
    "ADPCM with block align 0": Refused(riff(fmt(2, bits=4, align=0), DATA), "unsupported", 20),
    "0 bits": Refused(riff(fmt(bits=0, align=2), DATA), "unsupported", 20),
    "0 bits in 0 bytes": Refused(riff(fmt(bits=0), DATA), "unsupported", 20),
    "40 bits": Refused(riff(fmt(bits=40), DATA), "unsupported", 20),
    "65,535 bits": Refused(riff(fmt(bits=65_535), DATA), "unsupported", 20),
    "float of 16 bits": Refused(riff(fmt(3), DATA), "unsupported", 20),
    "IMA ADPCM": Refused(coded("IMA_ADPCM", samples=LONG), "unsupported", 20),
    "IMA ADPCM stereo": Refused(coded("IMA_ADPCM", samples=np.tile(STEREO, (20, 1))), "unsupported", 20),
    "MS ADPCM": Refused(coded("MS_ADPCM", samples=LONG), "unsupported", 20),
    "GSM 6.10": Refused(coded("GSM610", samples=LONG), "unsupported", 20),
    "G.721": Refused(coded("G721_32", samples=LONG), "unsupported", 20),
    "NMS ADPCM": Refused(coded("NMS_ADPCM_32", samples=LONG), "unsupported", 20),
    "MP3 in WAV": Refused(riff(fmt(0x55, bits=0, align=1), DATA), "unsupported", 20),
    "ADPCM, extensible": Refused(riff(sub_format(4, 17, align=1), DATA), "unsupported", 20),
    "MP3, extensible": Refused(riff(sub_format(16, 0x55), DATA), "unsupported", 20),
    "ADPCM RIFX": Refused(
        riff(fmt(2, bits=4, order=">"), chunk(b"data", PCM16, order=">"), kind=b"RIFX", order=">"),
        "unsupported",
        20,
    ),
    "unknown tag": Refused(riff(fmt(0x1234), DATA), "unsupported", 20),
    "tag 0": Refused(riff(fmt(0), DATA), "unsupported", 20),
    "0 channels": Refused(riff(fmt(channels=0, align=2), DATA), "channels", 20),
    "65 channels": Refused(canonical(n_bytes=1300, channels=65) + bytes(1300), "channels", 20),
    "65,535 channels": Refused(riff(fmt(channels=65_535, align=2), DATA), "channels", 20),
    "rate 0": Refused(riff(fmt(rate=0), DATA), "unsupported", 20),
    "rate 4 GHz": Refused(riff(fmt(rate=ONES), DATA), "unsupported", 20),
    "half a sample": Refused(riff(FMT, chunk(b"data", b"x")), "empty", 44),
    "half a frame": Refused(riff(fmt(channels=2), chunk(b"data", b"xy")), "empty", 44),
    "half a sample of 24 bits": Refused(riff(fmt(bits=24), chunk(b"data", b"xy")), "empty", 44),
    "1,001 chunks": Refused(
        riff(*[EXTRAS["empty"]] * 999, FMT, DATA), "unsupported", 12 + 999 * 8 + len(FMT)
    ),
    "50,000 chunks of no size": Refused(riff(*[EXTRAS["empty"]] * 50_000), "unsupported", 8012),
    "NaN": Refused(holed(math.nan, 32), "nonfinite", 44 + 37 * 4),
    "NaN in the second channel": Refused(holed(math.nan, 32, 2), "nonfinite", 44 + 37 * 8 + 4),
    "infinity": Refused(holed(-math.inf, 32), "nonfinite", 44 + 37 * 4),
    "NaN in 64 bits": Refused(holed(math.nan, 64), "nonfinite", 44 + 37 * 8),
    "64 bits beyond float32": Refused(holed(1e300, 64), "nonfinite", 44 + 37 * 8),
}

for _kind, _bits in KINDS:  # every width in every container
    _encoding, _tag = f"{_kind}{_bits}", 1 if _kind == "pcm" else 3
    (_one, _mono), (_two, _stereo), (_big, _) = (
        plain(_kind, _bits),
        plain(_kind, _bits, channels=2),
        plain(_kind, _bits, order=">"),
    )
    _data = chunk(b"data", _one)
    READ |= {
        _encoding: Read(riff(fmt(_tag, bits=_bits), _data), _encoding, _mono),
        f"{_encoding} stereo": Read(
            riff(fmt(_tag, bits=_bits, channels=2), chunk(b"data", _two)), _encoding, _stereo
        ),
        f"{_encoding} extensible": Read(riff(sub_format(_bits, _tag), _data), _encoding, _mono),
        f"{_encoding} RF64": Read(rf64(_one, fmt(_tag, bits=_bits)), _encoding, _mono),
        f"{_encoding} RIFX": Read(
            riff(fmt(_tag, bits=_bits, order=">"), chunk(b"data", _big, order=">"), kind=b"RIFX", order=">"),
            _encoding,
            _mono,
        ),
        f"{_encoding} RIFX extensible": Read(
            riff(
                sub_format(_bits, _tag, order=">"), chunk(b"data", _big, order=">"), kind=b"RIFX", order=">"
            ),
            _encoding,
            _mono,
        ),
    }
    REFUSED |= {
        f"{_encoding} extensible of another sub-format": Refused(
            riff(sub_format(_bits, _tag, guid=b"\1" * 14), _data), "unsupported", 20
        ),
        f"{_encoding} cut": Refused(riff(fmt(_tag, bits=_bits), _data)[:-5], "truncated", 44 + len(_one) - 5),
        f"{_encoding} RF64 cut": Refused(
            rf64(_one, fmt(_tag, bits=_bits))[:-5], "truncated", 80 + len(_one) - 5
        ),
    }

for _n in (
    *range(1, 45),
    45,
    46,
    100,
    199,
    242,
    243,
):  # a canonical file cut off: where the last part that is whole ends, or the file
    _at = _n if _n >= 44 else max(part for part in (0, 12, 20, 36) if part <= _n)
    REFUSED[f"cut at byte {_n:03}"] = Refused(
        (canonical() + PCM16)[:_n], "truncated" if _n >= 44 else "not_wav", _at
    )


# -- the manifest -------------------------------------------------------------------------------------------------------


def by_libsndfile(content: bytes, encoding: str) -> tuple[np.ndarray, int]:
    "Samples [n, C] and rate of a file."
    with soundfile.SoundFile(io.BytesIO(content)) as f:
        return f.read(
            f.frames, dtype="int16" if encoding == "pcm16" else "float32", always_2d=True
        ), f.samplerate


def sample_digest(samples: np.ndarray) -> str:
    "sha256 of samples, little-endian."
    return hashlib.sha256(
        np.ascontiguousarray(samples, "<i2" if samples.dtype.kind == "i" else "<f4").tobytes()
    ).hexdigest()


def entry_of(name: str, odd: Read | Refused) -> dict[str, Any]:
    "The manifest's entry for a file."
    if isinstance(odd, Refused):
        return {"file": f"{name}.wav", "expect": "refused", "code": odd.code, "offset": odd.offset}
    samples, rate = by_libsndfile(odd.content, odd.encoding)
    if odd.samples is not None:
        samples = odd.samples
    return {
        "file": f"{name}.wav",
        "expect": "samples",
        "encoding": odd.encoding,
        "sample_rate": rate,
        "channels": samples.shape[1],
        "n_frames": len(samples),
        "sha256": sample_digest(samples),
    }


def write_odd_wavs(
    folder: Path,  # made if it is not there
) -> list[dict[str, Any]]:
    "Write the set and its manifest; returns the manifest."
    folder.mkdir(parents=True, exist_ok=True)
    both: dict[str, Read | Refused] = {**READ, **REFUSED}
    for name, odd in both.items():
        (folder / f"{name}.wav").write_bytes(odd.content)
    manifest = [entry_of(name, odd) for name, odd in both.items()]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return manifest
