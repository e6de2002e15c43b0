"Vectorised parsing of file names equals parsing them one by one."

import os
import tracemalloc
from datetime import datetime
from itertools import product

import numpy as np
import pytest
from each import each
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leakmel.recordings import naming
from leakmel.recordings.naming import columns_of_names, iso_time, parse_name, whole_time

pytestmark = pytest.mark.quick

FIELDS = ("sensor", "recording", "start_time", "gain", "folder")


def check(paths: list[bytes]) -> None:
    "Every field of every path, as `parse_name` gives it; and columns as wide as their longest text."
    columns = columns_of_names(paths)
    assert tuple(columns) == FIELDS
    for field, values in columns.items():
        assert len(values) == len(paths)
        right = [getattr(parse_name(path), field) for path in paths]
        if field == "gain":
            assert np.array_equal(values, np.array(right, float), equal_nan=True)
        else:
            texts = [os.fsencode(text) for text in right]
            assert values.tolist() == texts, field


DAYS = st.sampled_from(
    ["20240229", "20230229", "20241301", "20240101", "00000101", "99991231", "2024010a", "２０２４０１０１"]
)
CLOCKS = st.sampled_from(
    [
        "000000",
        "235959",
        "240000",
        "006000",
        "000060",
        "12345",
        "1234567",
        "12 456",
        "123456Z",
        "123456+01:00",
    ]
)
TIMES = st.one_of(
    st.tuples(DAYS, st.sampled_from("_T-~"), CLOCKS).map("".join),
    st.sampled_from(["", "2024-01-02_03-04-05", "2024-01-02T03:04:05.5"]),
)
WORDS = st.one_of(
    st.text("ab~./ _é\udcff-0123456789", max_size=8),
    st.sampled_from(["g10.5", "-3", "1e9", "1e99", "nan", "²"]),
)
NAMES = st.one_of(st.text("ab~._", max_size=12), st.tuples(WORDS, WORDS, TIMES, WORDS).map("~".join))
PATHS = st.tuples(
    st.lists(st.text("LEAK~.é", min_size=1, max_size=5), max_size=3),
    NAMES,
    st.sampled_from([".wav", ".WAVE", "", ".x.wav"]),
).map(lambda path: os.fsencode("/".join([*path[0], path[1].replace("\0", "") + path[2]])))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(PATHS, max_size=12))
@example([])
@example([b""])
@example([b"", b"a~b~20240101_000000~1.wav", b""])
@example([b"LEAK/~~~.wav", b"LEAK/.wav", b"a~b~c~d", b"~/~/~/~.wav"])
def test_vectorised_parsing_equals_parsing_one_by_one(paths: list[bytes]) -> None:
    check(paths)


@each("at_once", [1, 2, 7])
def test_block_size_does_not_change_columns(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    "Blocks of names of different lengths become one column."
    paths = [
        b"LEAK/" + b"deep/" * (i % 3) + b"s%d~r~20240101_0000%02d~g%d.wav" % (10**i, i, i) for i in range(10)
    ] + [b"LEAK/plain.wav"]
    right = columns_of_names(paths)
    monkeypatch.setattr(naming, "_AT_ONCE", at_once)
    cut = columns_of_names(paths)
    for field in FIELDS:
        assert np.array_equal(cut[field], right[field], equal_nan=field == "gain")
    check(paths)
    check([b"LEAK/s~r~20210301_000001~1.wav"] * 500 + [b"LEAK/s~r~20210301_000060~1.wav"])


def test_one_long_path_uses_little_memory() -> None:
    "A column is as wide as its longest text; steps on the way to it are not."
    paths = [b"LEAK/s%d~r~20240101_000000~1.wav" % i for i in range(20_000)]
    paths[11_000] = b"LEAK/" + b"/".join([b"d" * 200] * 19) + b"/s~r~20240101_000000~1.wav"
    tracemalloc.start()
    try:
        columns = columns_of_names(paths)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert columns["folder"].dtype == "S3818"
    assert columns["folder"][11_000] == paths[11_000].split(b"/", 1)[1].rsplit(b"/", 1)[0]
    assert peak < sum(values.nbytes for values in columns.values()) + (20 << 20), f"{peak / 1e6:.0f} MB"


WHEN = "2025-11-10T02:03:04"


LOGGER_TIMES = [
    "20251110_020304",
    "20251110T020304",
    "20251110 020304",
    "20251110-020304",
    "20251110$020304",
    "20251110_020304T",
    "2025-11-10T02-03-04",
    "2025-11-10_02-03-04",
    "2025-11-10 02-03-04",
    "2025-11-10-02-03-04",
    "2025_11_10_02_03_04",
    "2025.11.10 02.03.04",
    "2025-11-10T02:03:04",
    "2025-11-10T020304",
]
ENDS = [
    ("", ""),
    ("Z", "+00:00"),
    ("+0100", "+01:00"),
    ("-05:30", "-05:30"),
    ("_123", ".123000"),
    (".123", ".123000"),
    ("-123", ".123000"),
    (".123Z", ".123000+00:00"),
    ("_123+0100", ".123000+01:00"),
]
NAMES_WITH_A_TIME = ["{}", "SM4_0+1_{}", "24F319055FDF2902_{}", "A {}_SYNC", "x.{}.rec", "{}_7", "{}_1234"]
NO_TIMES = [
    "",
    "noon",
    "20251110",
    "020304",
    "12345678_123456",
    "20251310_020304",
    "20251131_020304",
    "20251110_250304",
    "20251110_020360",
    "120251110_020304",
    "20251110_0203041",
    "S20251110_020304",
    "x_S20251110_020304",
    "20251110_020304S",
    "20251110_020304TT",
    "20251110__020304",
    "2025-1110_020304",
    "2025-11-10T02-03:04",
    "x_30251110_020304",
    "x_00991110_020304",
    "20251110_020304_20251110_030304",
    "５０２５１１１０_020304",
    "1.2.3_4.5.6",
    "x" * 300 + "_20251110_020304",
]


def test_times_of_loggers() -> None:
    for text, (more, ends), name in product(LOGGER_TIMES, ENDS, NAMES_WITH_A_TIME):
        assert iso_time(name.format(text + more)) == WHEN + ends, name.format(text + more)
        assert whole_time(text + more) == WHEN + ends
        assert whole_time(name.format(text + more)) == (WHEN + ends if name == "{}" else "")


def test_other_numbers_are_no_times() -> None:
    assert {iso_time(text) for text in ("20251110_0203", "2025-11-10_02-03")} == {"2025-11-10T02:03:00"}
    assert [text for text in NO_TIMES if iso_time(text)] == []


@given(st.text("0123456789_-T$:.+Z a", max_size=40))
def test_what_is_read_as_a_time_is_a_time(text: str) -> None:
    "And it is read again as the same one."
    if time := iso_time(text):
        assert datetime.fromisoformat(time).isoformat() == iso_time(time) == whole_time(time) == time
