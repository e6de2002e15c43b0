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
from leakmel.recordings.naming import (
    Naming,
    columns_of_names,
    guess_pattern,
    iso_time,
    parse_name,
    unread_times,
    whole_time,
)

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

    short = ("20251110_0203", "2025-11-10_02-03", "202511100203", "251110020300", "10.11.2025 02.03")
    assert {iso_time(text) for text in short} == {"2025-11-10T02:03:00"}
    assert [text for text in NO_TIMES if iso_time(text)] == []


@given(st.text("0123456789_-T$:.+Z a", max_size=40))
def test_what_is_read_as_a_time_is_a_time(text: str) -> None:
    "And it is read again as the same one."
    if time := iso_time(text):
        assert datetime.fromisoformat(time).isoformat() == iso_time(time) == whole_time(time) == time


DAY = "2026-11-01T00:00:00"
TWO = "2026-11-01T02:00:00"


@each(
    ("names", "expected"),
    [
        ("LOG1001_20261101_0200 LOG1002_20261101_0200", ("LOG1001", TWO)),
        ("LOG1001_20261101 LOG1002_20261101", ("LOG1001", DAY)),
        ("1001 2026-11-01 0200|1002 2026-11-01 0200", ("1001", TWO)),
        ("1001-20261101-020000 1002-20261101-020000", ("1001", TWO)),
        ("Haupt_str_12_20261101_0200 Haupt_str_14_20261101_0200", ("Haupt_str_12", TWO)),
        ("1001_01.11.2026 1002_01.11.2026", ("1001", DAY)),
        ("LOG1 1.11.2026 02-00-00|LOG2 1.11.2026 02-00-00", ("LOG1", TWO)),
        ("LOG1001_20261101020000 LOG1002_20261101020000", ("LOG1001", TWO)),
        ("LOG1001_202611010200 LOG1002_202611010200", ("LOG1001", TWO)),
        ("5147.261101020000 5148.261101020000", ("5147", TWO)),  # SoundTrap
        ("24F319055FDF2902_20261101_020000T 24F319055FDF2903_20261101_020000", ("24F319055FDF2902", TWO)),  # AudioMoth
        ("SM4-A_20261101$020000 SM4-B_20261101_020000", ("SM4-A", TWO)),  # Song Meter
        ("SM2-1_20261101_020000_000 SM2-2_20261101_020000_000", ("SM2-1", TWO)),
        ("SBW1234_20261101_020000 SBW1235_20261101_020000", ("SBW1234", TWO)),  # icListen
        ("20261101T020000+0100_BAR01 20261101T020000+0100_BAR02", ("BAR01", f"{TWO}+01:00")),  # Frontier Labs
        ("LOG1-2026-11-01T02-00-00 LOG2-2026-11-01T02-00-00", ("LOG1", TWO)),
        ("LOG1_20261101T020000Z LOG2_20261101T020000Z", ("LOG1", f"{TWO}+00:00")),
        ("20261101_0200_LOG1 20261101_0200_LOG2", ("LOG1", TWO)),
        ("LOG1/20261101_0200 LOG2/20261101_0200", ("LOG1", TWO)),
        ("LOG1/2026-11-01 LOG2/2026-11-01", ("LOG1", DAY)),
        ("LOG1/2026-11-01/0200 LOG2/2026-11-01/0200", ("LOG1", DAY)),
        ("2026-11-01/LOG1 2026-11-01/LOG2", ("LOG1", DAY)),
        ("2026-11-01/LOG1_0200 2026-11-01/LOG2_0200", ("LOG1", DAY)),
        ("Nord/2026-11-01/LOG1 Süd/2026-11-01/LOG2", ("LOG1", DAY)),
        ("Nord/20261101_LOG1 Süd/20261101_LOG2", ("LOG1", DAY)),
        ("2026/11/LOG1_20261101_0200 2026/11/LOG2_20261101_0200", ("LOG1", TWO)),
        # a counter is no sensor
        ("A/R1_20261101_0200 A/R2_20261102_0200 B/R1_20261101_0200 B/R3_20261102_0200", ("A", TWO)),
        ("LOG1_20261101_0200_a LOG2_20261101_0200_b", ("LOG1", TWO)),
        # a serial number that looks like a date: the line of the run shows it
        ("20231105_20261101_0200 20231106_20261101_0200", ("20231105", TWO)),
        # one name in ten may be another
        ("x " + " ".join(f"LOG{k}_20261101_0200" for k in range(10)), ("", "")),
        # two meanings, or none
        ("LOG1001_01-11-2026_0200 LOG1002_01-11-2026_0200", "01-11-2026 has more than one meaning"),
        ("LOG1001_01112026_0200 LOG1002_01112026_0200", "01112026 has more than one meaning"),
        ("LOG1001_261101_0200 LOG1002_261101_0200", "261101_0200 has more than one meaning"),
        ("2026-11-01/1001 2026-11-01/1002", "2026-11-01/1001.wav, 2026-11-01/1002.wav"),
        ("20261101_0200 20261101_0300", ""),
        ("LOG1001_1793498400 LOG1002_1793498400", ""),
        ("5BE2F1A0 5BE2F1A1", ""),
        ("LOG1 LOG2", ""),
    ],
)  # fmt: skip
def test_names_of_loggers(names: str, expected: tuple[str, str] | str) -> None:
    "Sensor and time of the first name by the pattern that is guessed, or why there is none."
    paths = [f"{name}.wav".encode() for name in names.split("|" if "|" in names else " ")]
    pattern = guess_pattern(paths)
    if isinstance(expected, str):
        assert not pattern
        assert expected in unread_times(paths)
    else:
        parts = Naming("pattern", pattern).read(paths[0]).parts
        assert (parts.sensor, parts.start_time) == expected
