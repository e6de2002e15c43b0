"Any bytes: the reader of WAV files gives a recording or a refusal, and never allocates what a stranger asks for."

import contextlib
import os
import struct
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fuzzer
import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leakmel.core.errors import REJECT_CODES, RecordingError
from leakmel.recordings.wav import (
    MAX_CHANNELS,
    STREAMED,
    Recording,
    WavHeader,
    canonical_header,
    parse_header,
    read_wav,
)

MAX_BYTES = 16 << 20  # what reading a small file may take


def fuzz(n: int) -> settings:
    "The same `n` examples each time, none kept on disk."
    return settings(
        max_examples=n,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
        derandomize=True,
        database=None,
    )


coded = partial(fuzzer.coded, n_frames=600)


OWN = [
    canonical_header(4096, 200) + bytes(400),
    coded("PCM_16", "WAVEX"),
    coded("PCM_16", "RF64"),
    coded("PCM_16", endian="BIG"),
]
FOREIGN = [
    coded(s)
    for s in (
        "PCM_U8",
        "PCM_24",
        "PCM_32",
        "FLOAT",
        "DOUBLE",
        "ALAW",
        "ULAW",
        "IMA_ADPCM",
        "MS_ADPCM",
        "GSM610",
    )
]

sizes = st.sampled_from(
    [0, 1, 2, 3, 15, 16, 17, 40, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
)
words = st.one_of(
    sizes.map(lambda n: struct.pack("<I", n)),
    sizes.map(lambda n: struct.pack(">I", n)),
    st.binary(min_size=1, max_size=4),
    st.sampled_from(
        [
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
            bytes(4),
        ]
    ),
)


@st.composite
def mutated(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    "A file with some of its first bytes replaced, with pieces put in, taken out or doubled, or cut short."
    content = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 6))):
        at, how = draw(st.integers(0, min(len(content), 120))), draw(st.integers(0, 5))
        if how <= 2:
            word = draw(words)
            content[at : at + len(word)] = word
        elif how == 3:
            content[at:at] = draw(words)
        elif how == 4:
            del content[at : at + draw(st.integers(1, 12))]
        else:
            content = content[: draw(st.integers(0, len(content)))]
    return bytes(content)


# -- any header ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def holding(content: bytes) -> Iterator[int]:
    "A file in memory that holds some bytes."
    fd = os.memfd_create("fuzz") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDONLY)
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)


def check_refusal(error: RecordingError, path: Path | str = "") -> None:
    "A code from the list, an offset that a file may have, the path in the message."
    assert error.reject_code in REJECT_CODES
    assert error.offset is None or 0 <= error.offset < 1 << 43
    assert str(path) in str(error)


def check_header(content: bytes) -> WavHeader | None:
    "Parse; what is accepted has to lie inside the file."
    with holding(content) as fd:
        try:
            header = parse_header(fd, len(content))
        except RecordingError as e:
            check_refusal(e)
            return None
    assert 0 < header.data_start <= len(content)
    assert 0 <= header.data_bytes <= len(content) - header.data_start
    assert 1 <= header.channels <= MAX_CHANNELS
    assert header.sample_rate >= 1
    return header


@pytest.mark.slow
@fuzz(1500)
@given(mutated(OWN + FOREIGN))
def test_mutated_headers(content: bytes) -> None:
    check_header(content)


@fuzz(500)
@given(st.binary(max_size=200))
def test_random_bytes_behind_a_riff_name(body: bytes) -> None:
    check_header(b"RIFF" + body)
    check_header(b"RIFF\0\0\0\0WAVE" + body)
    check_header(b"RIFF\0\0\0\0WAVEfmt " + body)
    check_header(canonical_header(4096, 10)[:36] + body)


@fuzz(300)
@given(
    rate=st.integers(1, 10_000_000), n=st.integers(1, 500), channels=st.integers(1, MAX_CHANNELS), claim=sizes
)
def test_canonical_header_survives_a_round_trip(rate: int, n: int, channels: int, claim: int) -> None:
    header, body = canonical_header(rate, n, channels), bytes(2 * n * channels)
    found = check_header(header + body)
    assert found == WavHeader("RIFF", "pcm16", rate, channels, 16, 2 * channels, 44, 2 * n * channels)
    lying = check_header(header[:40] + struct.pack("<I", claim) + body)
    assert (lying is None) == (claim == 0 or len(body) < claim != STREAMED)
    if lying is not None:
        assert lying.data_bytes == min(claim, len(body))


# -- any file -------------------------------------------------------------------------------------------------------------


def read_or_refuse(path: Path, content: bytes) -> Recording | None:
    "Read a file that holds some bytes, with a bound on what that allocates."
    path.write_bytes(content)
    tracemalloc.start()
    try:
        got = read_wav(path)
    except RecordingError as e:
        check_refusal(e, path)
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_BYTES
    assert got.samples.ndim == 2
    assert len(got.samples) > 0
    assert got.samples.dtype == (np.int16 if got.encoding == "pcm16" else np.float32)
    assert np.isfinite(got.samples).all()
    return got


@pytest.mark.slow
@fuzz(1200)
@given(content=mutated(OWN))
def test_mutated_files_of_16_bits(tmp_path: Path, content: bytes) -> None:
    read_or_refuse(tmp_path / "x.wav", content)


@pytest.mark.slow
@fuzz(1200)
@given(content=mutated(FOREIGN))
def test_mutated_files_for_libsndfile(tmp_path: Path, content: bytes) -> None:
    read_or_refuse(tmp_path / "x.wav", content)


@pytest.mark.slow
@fuzz(400)
@given(content=mutated(OWN + FOREIGN[:7]))
def test_samples_that_are_decoded_here_are_those_of_libsndfile(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.wav"
    got = read_or_refuse(path, content)
    if got is None:
        return
    try:
        right, rate = soundfile.read(
            path, dtype="int16" if got.encoding == "pcm16" else "float32", always_2d=True
        )
    except soundfile.SoundFileError:
        return  # it looks at more fields than are needed to find the samples
    assert rate == got.sample_rate
    assert np.array_equal(got.samples, right)
