"""Mutated WAV files by the million, in a process that may not allocate more than 16 MB: `python tests/helpers/fuzzer.py headers|coded SEED N`.

Quicker than hypothesis by two orders, and without its shrinking: what fails is printed, and made again by its seed and number. Headers are
parsed from memory by a stand-in for os.pread that refuses any read outside the bounds that a parser needs; one in a thousand is parsed from
a real file too. `coded` reads whole files: A-law and mu-law, and codings that have to be rejected.
"""

import io
import os
import random
import resource
import struct
import sys

import numpy as np
import soundfile

from leakmel.core.errors import REJECT_CODES, RecordingError
from leakmel.recordings import wav
from leakmel.recordings.wav import (
    MAX_CHANNELS,
    MAX_CHUNKS,
    canonical_header,
    decode_payload,
    parse_header,
    read_payload,
)

MOST_BYTES = 16 << 20  # that reading a small file may allocate
MOST_READS = 2 * MAX_CHUNKS + 100  # in one header
MOST_ASKED = 512  # bytes in one read


def coded(subtype: str, container: str = "WAV", endian: str = "FILE", n_frames: int = 300) -> bytes:
    "A file that libsndfile wrote."
    out = io.BytesIO()
    x = 0.5 * np.sin(np.arange(n_frames) / 7)
    soundfile.write(
        out,
        np.stack([x, -x], axis=1) if subtype != "GSM610" else x,
        8000,
        format=container,
        subtype=subtype,
        endian=endian,
    )
    return out.getvalue()


CODED = [coded(s) for s in ("ALAW", "ULAW", "IMA_ADPCM", "MS_ADPCM", "GSM610")]
HEADERS = [
    canonical_header(4096, 200) + bytes(400),
    coded("PCM_16", "WAVEX"),
    coded("PCM_16", "RF64"),
    coded("PCM_16", endian="BIG"),
    *(coded(s) for s in ("PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")),
    *CODED,
]
SIZES = (0, 1, 2, 3, 15, 16, 17, 40, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
WORDS = [struct.pack(order + "I", n) for n in SIZES for order in "<>"] + [
    b"fmt ",
    b"data",
    b"RIFF",
    b"RIFX",
    b"RF64",
    b"ds64",
    b"WAVE",
    b"fact",
    b"LIST",
    b"PEAK",
    b"\xfe\xff",
    bytes(2),
    bytes(8),
    bytes(4),
]


def mutated(rng: random.Random, originals: list[bytes], reach: int) -> bytes:
    "A file with some of its first bytes replaced, with pieces put in, taken out or doubled, or cut short."
    content = bytearray(originals[int(rng.random() * len(originals))])
    for _ in range(1 + int(rng.random() * 4)):
        at, how = int(rng.random() * min(len(content), reach)), int(rng.random() * 12)
        word = (
            WORDS[int(rng.random() * len(WORDS))]
            if rng.random() < 0.6
            else rng.randbytes(1 + int(rng.random() * 4))
        )
        if how < 7:
            content[at : at + len(word)] = word
        elif how < 8:
            content[at:at] = word
        elif how < 9:
            content[at:at] = content[at : at + int(rng.random() * 60)]
        elif how < 10:
            del content[at : at + 1 + int(rng.random() * 12)]
        elif how < 11 and at < len(content):
            content[at] ^= 1 << int(rng.random() * 8)
        else:
            del content[int(rng.random() * len(content)) :]
    return bytes(content)


class Memory:
    "Stands for os where the parser reads."

    content = b""
    reads = 0

    def pread(self, fd: int, n: int, at: int) -> bytes:
        self.reads += 1
        if not (0 <= n <= MOST_ASKED and 0 <= at < 1 << 63):
            raise AssertionError(f"{n} bytes asked at {at}")
        if self.reads > MOST_READS:
            raise AssertionError("the parser goes on and on")
        return self.content[at : at + n]


def outcome(fd: int, content: bytes) -> object:
    "Parse a header: what it says, checked to lie in the file, or the refusal's code and place."
    try:
        header = parse_header(fd, len(content))
    except RecordingError as e:
        if e.reject_code not in REJECT_CODES or not (e.offset is None or 0 <= e.offset < 1 << 43):
            raise AssertionError(repr(e)) from e
        return e.reject_code, e.offset
    ok = 0 < header.data_start <= len(content) and 0 <= header.data_bytes <= len(content) - header.data_start
    if not (ok and 1 <= header.channels <= MAX_CHANNELS and header.sample_rate >= 1):
        raise AssertionError(repr(header))
    return header


def try_headers(rng: random.Random, n: int) -> str:
    "Parse mutated headers; how many were read."
    memory, real, fd, n_read = Memory(), os, os.memfd_create("fuzz"), 0
    for k in range(n):
        content = mutated(rng, HEADERS, 120)
        memory.content, memory.reads, vars(wav)["os"] = content, 0, memory
        try:
            got = outcome(-1, content)
        except BaseException:
            print("failed:", k, content.hex())
            raise
        finally:
            vars(wav)["os"] = real
        n_read += not isinstance(got, tuple)
        if k % 1000 == 0:
            os.ftruncate(fd, 0)
            os.pwrite(fd, content, 0)
            if outcome(fd, content) != got:
                raise AssertionError(f"{k}: from a file it is another: {content.hex()}")
    return f"{n} {n_read}"


def try_coded(rng: random.Random, n: int) -> str:
    "Read mutated files of coded samples; how many of them were read. No library may see one."
    fd, n_read = os.memfd_create("fuzz"), 0
    soundfile.SoundFile = None
    for k in range(n):
        content = mutated(rng, CODED, 200)
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)
        try:
            header = parse_header(fd, len(content))
            got = decode_payload(header, read_payload(fd, header))
        except RecordingError as e:
            if e.reject_code not in REJECT_CODES:
                raise
            continue
        except BaseException:
            print("failed:", k, content.hex())
            raise
        x = got.samples
        if not (x.ndim == 2 and len(x) and x.dtype in (np.int16, np.float32) and np.isfinite(x).all()):
            raise AssertionError(f"{got}: {content.hex()}")
        n_read += 1
    return f"{n} {n_read}"


def main(kind: str, seed: int, n: int) -> None:
    "Try, with everything loaded and little memory to be had from then on."
    trial = {"headers": try_headers, "coded": try_coded}[kind]
    trial(random.Random(-1), 2000)
    with open("/proc/self/statm") as f:
        in_use = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_BYTES,) * 2)
    print(trial(random.Random(seed), n))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
