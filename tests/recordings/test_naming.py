"Sources of labels: patterns compared with a regular expression, tables with every fault, and builds verified independently."

import base64
import errno
import json
import os
import re
import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pandas as pd
import pytest
from each import each
from errors import raises
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from independent import content, fit, log_mel, off, read, walk

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, UsageError, VerifyError
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.dataset.schema import DIGEST_ATTRIBUTE, metadata_digest
from leakmel.recordings import naming
from leakmel.recordings.demo import wav_bytes
from leakmel.recordings.manifest import Manifest, scan
from leakmel.recordings.naming import (
    FIELDS,
    NameParts,
    Naming,
    iso_time,
    match_pattern,
    pattern_naming,
    pattern_tokens,
)
from leakmel.recordings.tables import NameTable, read_table


def fuzz(n: int) -> settings:
    "The same `n` examples each time, none kept on disk."
    return settings(max_examples=n, deadline=None, derandomize=True, database=None)


QUIET = PipelineConfig(monitor_interval_s=0.0)


def put(root: Path, *names: str | bytes) -> None:
    "Write a recording of half a second under each name, each with its own noise."
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        seed = np.random.default_rng(list(os.fsencode(name)))
        with open(path, "wb") as f:
            f.write(wav_bytes(seed.integers(-8000, 8000, 2048, dtype=np.int16)))


def kinds(manifest: Manifest) -> dict[str, list[str]]:
    "Paths of the problems by kind."
    found = manifest.problems
    return {kind: found["path"][found["kind"] == kind].tolist() for kind in set(found["kind"])}


def parse_by_pattern(pattern: str, name: str) -> tuple[str | None, str | None, NameParts]:
    "Split, label and parts of a name by a pattern."
    found = pattern_naming(pattern).read(os.fsencode(name))
    return found.split, found.label, found.parts


# ---- patterns: what fits -----------------------------------------------------------------------------------------------------

TEXTS = st.text("abXY09 .+[]\\$^\udcffé", min_size=1, max_size=5)
FORMS = ["%Y%m%d_%H%M%S", "%Y%m%dT%H%M%S", "%Y-%m-%d_%H-%M-%S", "%Y-%m-%dT%H:%M:%S"]
TIMES = st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1)).map(lambda t: t.replace(microsecond=0))


@st.composite
def patterns_and_names(draw: st.DrawFn) -> tuple[str, str, dict[str, str]]:
    "A pattern, a name made from values without a separator, and the values."
    fields = draw(st.permutations(FIELDS))[: draw(st.integers(1, len(FIELDS)))]
    values: dict[str, str] = {}
    pattern = name = ""
    if draw(st.booleans()):
        pattern, name = "{**}/", "".join(f"{draw(TEXTS)}/" for _ in range(draw(st.integers(0, 2))))
    for k, field in enumerate(fields):
        between = draw(st.sampled_from(["~", "@", "~~", "@~", "/", "/~"])) if k else ""
        if field == "start_time":
            value = draw(TIMES).strftime(draw(st.sampled_from(FORMS)))
        elif field == "split":
            value = draw(st.sampled_from(["train", "DATASET_VALIDATION", "Test"]))
        elif field == "gain":
            value = str(draw(st.integers(-99, 99)))
        else:
            value = draw(TEXTS)
        ignored = draw(st.booleans())
        pattern += between + "{" + field + "}" + ("@{*}" if ignored else "")
        name += between + value + (f"@{draw(st.text('ab', max_size=3))}" if ignored else "")
        values[field] = value
    assume(not name.rpartition("/")[2].startswith("."))  # such a file is hidden, and no recording
    return pattern, name, values


@pytest.mark.slow
@given(patterns_and_names())
@fuzz(300)
def test_formatted_names_parse_to_the_same_fields(made):
    pattern, name, values = made
    if name.startswith("/") or pattern.startswith("/"):
        return
    assert match_pattern(pattern, name) == values
    naming = pattern_naming(pattern)
    assert Naming.from_json(naming.to_json()) == naming
    parts = naming.read(os.fsencode(name + ".WAV")).parts
    for field in ("sensor", "recording", "session", "folder"):
        if field in values:
            assert getattr(parts, field) == values[field]
    if "start_time" in values:
        assert re.sub(r"\D", "", parts.start_time) == re.sub(r"\D", "", values["start_time"])
    if "gain" in values:
        assert parts.gain == int(values["gain"])


TIME_PIECES = [
    *(
        "20251110",
        "020000",
        "0200",
        "2025-11-10",
        "02-00-00",
        "10.11.2025",
        "251110020000",
        "20251399",
        "1001",
    ),
    *(
        "_",
        "_",
        "-",
        "/",
        "/",
        " ",
        "~",
        "T",
        "Z",
        "+0100",
        ".5",
        "$",
        "\u00a0",
        "LOG",
        "S1",
        "a",
        "train",
        "16",
    ),
]
TIME_PATTERNS = [
    *naming._GUESSES,
    "{label}/{session}/{sensor}~{*}~{start_time}~{gain}",
    "{split}_{label}_{sensor}_{start_time}",
    "{**}/{gain}_{start_time}",
    "{*}_{start_time}-{sensor}",
    "{start_time}",
    "{folder}a{gain}_{split}",
]


@pytest.mark.slow
@given(st.sampled_from(TIME_PATTERNS), st.lists(st.sampled_from(TIME_PIECES), max_size=9))
@fuzz(3000)
def test_expressions_find_what_the_search_finds(pattern, pieces):
    "The quick way to match a name has the result of the search for all ends, also for guesses."
    name, guess = "".join(pieces), "start_time" in pattern and "sensor" in pattern
    quick = match_pattern(pattern, name), guess and naming._read_guess(pattern, name)
    with mock.patch.object(naming, "_expressions", return_value=[]):
        assert quick == (match_pattern(pattern, name), guess and naming._read_guess(pattern, name))


def as_expression(pattern: str) -> str:
    "The pattern as a lazy regular expression: the same meaning, in another's words, and no bound on the time."
    out = ""
    for word in re.findall(r"\{\*\*\}/|\{[^}]*\}|[^{]", pattern):
        if word == "{**}/":
            out += "(?:[^/]*/)*?"
        elif word == "{*}":
            out += "[^/]*?"
        elif word.startswith("{"):
            out += f"(?P<{word[1:-1]}>[^/]+?)"
        else:
            out += re.escape(word)
    return out


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(
            ["{label}", "{sensor}", "{session}", "{*}", "{*}", "{**}/", "_", "a", "/", "_a", "a/"]
        ),
        min_size=1,
        max_size=7,
    ),
    st.text("a_/b", max_size=12),
)
@fuzz(1500)
def test_patterns_match_like_a_lazy_regular_expression(words, name):
    pattern = "".join(words)
    try:
        pattern_tokens(pattern)
    except UsageError:
        return
    m = re.fullmatch(as_expression(pattern), name)
    assert match_pattern(pattern, name) == (m.groupdict() if m else None)


@each(
    ("pattern", "name", "expected"),
    [
        (
            "{label}/{session}/{sensor}~{recording}~{start_time}~{gain}",
            "LEAK/night 3/H07~12~20250314_020000~gain16.wav",
            (None, "LEAK", NameParts("H07", "12", "2025-03-14T02:00:00", 16.0, "night 3")),
        ),
        ("{split}_{label}_{sensor}_{*}", "train_LEAK_H1_x_y.wave", ("TRAINING", "LEAK", NameParts("H1"))),
        ("{split}_{label}_{sensor}_{*}", "Dataset_Val_LEAK_H1_.WAV", ("VALIDATION", "LEAK", NameParts("H1"))),
        (
            "{sensor}_{start_time}_{gain}",
            "LEAK/pump_2_2025-03-14_02-00-00_-3.5.wav",
            (None, "LEAK", NameParts()),
        ),
        (
            "{label}/{sensor}_{start_time}_{gain}",
            "LEAK/pump_2_2025-03-14_02-00-00_-3.5.wav",
            (None, "LEAK", NameParts("pump_2", "", "2025-03-14T02:00:00", -3.5)),
        ),
        ("{*}/{sensor}_{start_time}", "LEAK/a/b.wav", (None, "LEAK", NameParts(folder="a"))),
        ("{label}-{sensor}", "LEAK/a.wav", (None, None, NameParts())),
        ("{folder}/{sensor}_{start_time}", "LEAK/a/b.wav", (None, "LEAK", NameParts())),
        ("{split}_{sensor}", "LEAK/b.wav", (None, "LEAK", NameParts())),
        (
            "{**}/{sensor}-{gain}",
            "LEAK/site/pit 1/H1-8.wav",
            (None, "LEAK", NameParts("H1", gain=8.0, folder="site/pit 1")),
        ),
        ("{**}/{sensor}", "a.wav", (None, None, NameParts("a"))),
        ("{label}.{sensor}", "LEAK.H1.wav", (None, "LEAK", NameParts("H1"))),
        ("{{{label}}}_{sensor}", "{LEAK}_H1.wav", (None, "LEAK", NameParts("H1"))),
        ("{folder}/{label}_{*}", "pit/LEAK_3.wav", (None, "LEAK", NameParts(folder="pit"))),
    ],
)
def test_examples_of_patterns(pattern, name, expected):
    got = parse_by_pattern(pattern, name)
    assert got[:2] == expected[:2]
    assert repr(got[2]) == repr(expected[2])  # NaN is NaN


def test_a_time_or_gain_that_cannot_be_read_stays_empty_and_the_name_still_fits():
    _, label, parts = parse_by_pattern("{label}_{sensor}_{start_time}_{gain}", "LEAK_H1_noon_high.wav")
    assert (label, parts.sensor, parts.start_time) == ("LEAK", "H1", "")
    assert np.isnan(parts.gain)
    assert (
        parse_by_pattern("{label}~{start_time}~{gain}", "LEAK~20250314_020000~high.wav")[2].start_time
        == "2025-03-14T02:00:00"
    )


@each(
    ("text", "expected"),
    [
        ("20250314_020000", "2025-03-14T02:00:00"),
        ("20250314T020000", "2025-03-14T02:00:00"),
        ("20250314T020000Z", "2025-03-14T02:00:00+00:00"),
        ("2025-03-14_02-00-00", "2025-03-14T02:00:00"),
        ("2025-03-14T02:00:00", "2025-03-14T02:00:00"),
        ("2025-03-14 02:00", "2025-03-14T02:00:00"),
        ("2025-03-14T02:00:00.5", "2025-03-14T02:00:00.500000"),
        ("2025-03-14T02:00:00+01:00", "2025-03-14T02:00:00+01:00"),
        ("20250229_000000", ""),
        ("20250314_250000", ""),
        ("2025-03-14", ""),
        ("2025-W11-5", ""),
        ("", ""),
        ("٢٠٢٥0314_020000", ""),
        ("9" * 10_000, ""),
    ],
)
def test_times(text, expected):
    assert iso_time(text) == expected


@each(
    ("pattern", "words"),
    [
        ("{labl}/{sensor}", ["labl is unknown; did you mean label?", "{start_time}"]),
        ("{Label}/{*}", ["Label is written label"]),
        ("{label}/{label}", ["{label} twice"]),
        ("{*}/{**}/{*}", ["has no field"]),
        ("", ["has no field"]),
        ("TRAINING", ["has no field"]),
        ("{label}{sensor}", ["between the fields {label} and {sensor}"]),
        ("{*}{sensor}", ["has no text between"]),
        ("{label}/{**}", ["whole folders"]),
        ("{label}_{**}/{sensor}", ["whole folders"]),
        ("{**}{label}", ["whole folders"]),
        ("{**}{**}/{label}", ["whole folders"]),
        ("{label", ["a single {"]),
        ("label}", ["a single }", "write }}"]),
        ("{}", ["is unknown"]),
        ("/{label}/{*}", ["relative"]),
        ("{label}/{*}.wav", ["the pattern '{label}/{*}.wav' ends in .wav", "remove the extension"]),
        ("{label}/{*}.WAVE", ["ends in .WAVE"]),
        ("{label}" + "x" * 500, ["more than 500"]),
    ],
)
def test_patterns_that_cannot_be_used(tmp_path, pattern, words):
    put(tmp_path, "LEAK/a.wav")
    with pytest.raises(UsageError) as caught:
        scan(tmp_path, pattern=pattern)
    for w in words:
        assert w.casefold() in str(caught.value).casefold()
    assert str(caught.value).startswith("the pattern '")
    for how in (("table", pattern), ("table", pattern, "root"), ("pattern", pattern)):
        if pattern:
            with raises("invalid-pattern", UsageError):
                Naming(*how)


def test_each_name_is_matched_once(tmp_path, monkeypatch):
    "By a listing, its preview and its table, and by a table with a pattern."
    for k in range(30):
        put(tmp_path, f"LEAK/S{k % 3}_{k}.wav")
    matched: list[str] = []

    def counted(pattern, path):
        matched.append(path)
        return match_pattern(pattern, path)

    monkeypatch.setattr(naming, "match_pattern", counted)
    found = scan(tmp_path, pattern="{label}/{sensor}_{recording}")
    assert found.preview is not None
    assert found.preview.n_fit == len(found.table) == 30
    assert len(matched) == len({*matched}) == 30
    table = tmp_path.parent / "list.csv"
    table.write_text("path,label\n" + "".join(f"LEAK/S{k % 3}_{k}.wav,leak\n" for k in range(30)))
    found = scan(tmp_path, table=table, pattern="{**}/{sensor}_{session}")
    assert set(found.table["sensor"]) == {"S0", "S1", "S2"}
    assert len(matched) == 60


HOSTILE_NAMES = [
    "_" * 250,
    "a_1_" * 62,
    "train_" * 40,
    "1_" * 125 + "x",
    "/".join(["a_1_b"] * 600),
    "/".join("a" * 2000),
    "20250101_000000_" * 15,
    "/".join(["1_val_20250101_000000_" * 11] * 16),
]
HOSTILE_PATTERNS = [
    "{sensor}_{recording}_{session}_{folder}_{label}_{*}_{*}_{*}_{*}!",
    "{split}_{sensor}_{start_time}_{recording}_{gain}_{folder}_{label}!",
    "{**}/{sensor}_{split}_{*}_{gain}!",
    "{**}/" * 30 + "{sensor}a{*}!",
    "{sensor}" + "_{*}" * 80 + "!",
    "{**}/a/{**}/a/{**}/{gain}_{split}/{**}/b!",
    "{**}/{sensor}_{gain}_{recording}_{split}_{session}_{start_time}_{*}!",
    "{sensor}_{*}_{*}_{*}_{gain}dB",
    "{sensor}_{*}_{*}_{gain}x!",
]


@each("pattern", HOSTILE_PATTERNS)
def test_pattern_matching_ends(pattern):
    for name in HOSTILE_NAMES:
        assert match_pattern(pattern, name) is None, name[:20]


@each(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '{"source": "pattern", "pattern": "{labl}", "base": "split"}',
        '{"source": "weather"}',
        '{"colour": 1}',
        '{"source": "pattern", "pattern": ["{label}"], "base": "split"}',
        '{"source": "pattern", "pattern": "{label}", "base": "root"}',
        '{"source": "table", "pattern": "{label}", "base": "root"}',
        '{"source": "folders", "base": "root"}',
    ],
)
def test_invalid_naming_is_refused(text):
    with pytest.raises((DataError, UsageError)):
        Naming.from_json(text)


# ---- patterns: what a scan makes of them ----------------------------------------------------------------------------------------


def test_a_pattern_below_split_folders(tmp_path):
    put(
        tmp_path,
        "TRAINING/LEAK_H1.wav",
        "TRAINING/BURST_H2.wav",
        "TRAINING/odd.wav",
        "VALIDATION/NORMAL_H1.wav",
        "VALIDATION/LEAK_H3.wav",
    )
    m = scan(tmp_path, pattern="{label}_{sensor}")
    assert m.label_names == ("BURST", "LEAK", "NORMAL")
    assert [(x.split, x.paths, x.label_ids.tolist()) for x in m.listings] == [
        ("TRAINING", [b"BURST_H2.wav", b"LEAK_H1.wav", b"odd.wav"], [0, 1, -1]),
        ("VALIDATION", [b"LEAK_H3.wav", b"NORMAL_H1.wav"], [1, 2]),
    ]
    assert m.table["sensor"].tolist() == ["H2", "H1", "", "H3", "H1"]
    assert kinds(m)["no_match"] == ["TRAINING/odd.wav"]
    assert "no_label" not in kinds(m), "it lies where it should; its name is the trouble"
    alone = scan(tmp_path, split="val", pattern="{label}_{sensor}")
    assert alone.label_names == m.label_names, "the map is that of all splits"
    assert alone.listings[0].label_ids.tolist() == [1, 2]


def test_pattern_with_a_split_field(tmp_path):
    put(
        tmp_path,
        "2025/val_LEAK_1.wav",
        "2025/train_LEAK_2.wav",
        "train_NORMAL_3.wav",
        "2024/holdout_LEAK_4.wav",
        "TRAINING/LEAK/5.wav",
        "test_LEAK_6.WAV",
    )
    m = scan(tmp_path, pattern="{**}/{split}_{label}_{recording}")
    assert [(x.split, x.folder, x.paths) for x in m.listings] == [
        ("TRAINING", tmp_path, [b"2025/train_LEAK_2.wav", b"train_NORMAL_3.wav"]),
        ("VALIDATION", tmp_path, [b"2025/val_LEAK_1.wav"]),
        ("TESTING", tmp_path, [b"test_LEAK_6.WAV"]),
    ]
    assert kinds(m)["no_match"] == ["2024/holdout_LEAK_4.wav", "TRAINING/LEAK/5.wav"]
    assert "no_label" not in kinds(m), "what belongs to no split is no file of any data set"
    assert [
        x.split for x in scan(tmp_path, split="test", pattern="{**}/{split}_{label}_{recording}").listings
    ] == ["TESTING"]
    with raises("no-such-split", DataError):
        scan(tmp_path, split="test", pattern="2025/{split}_{label}_{recording}")
    with pytest.raises(DataError, match="finds no recording") as caught:
        scan(tmp_path, pattern="{split}~{label}")
    assert "2024/holdout_LEAK_4.wav" in str(caught.value)


def test_a_pattern_without_a_label_keeps_the_first_folder(tmp_path):
    put(tmp_path, "LEAK/night/H1_5.wav", "NORMAL/H2_6.wav", "loose_7.wav")
    (tmp_path / "EMPTY").mkdir()
    m = scan(tmp_path, pattern="{**}/{sensor}_{gain}")
    assert m.label_names == ("EMPTY", "LEAK", "NORMAL")
    assert m.table[["label", "sensor", "gain", "folder"]].to_numpy().tolist() == [
        ["LEAK", "H1", 5.0, "night"],
        ["NORMAL", "H2", 6.0, ""],
        ["", "loose", 7.0, ""],
    ]
    put(tmp_path / "splits", "LEAK/train_1.wav", "LEAK/val_1.wav")
    m = scan(tmp_path / "splits", pattern="{*}/{split}_{recording}")
    assert [(x.split, x.label_ids.tolist()) for x in m.listings] == [("TRAINING", [0]), ("VALIDATION", [0])]


def test_odd_names_through_a_pattern(tmp_path):
    put(
        tmp_path,
        b"LEAK\n_caf\xe9.wav",
        b"-rf_\xff\xfe.wav",
        b'it\'s_"q".wav',
        b"a b_ .wav",
        b"\xfe\xfa_ .wav",
    )
    m = scan(tmp_path, pattern="{label}_{sensor}")
    assert sorted(map(os.fsencode, m.label_names)) == [b"-rf", b"LEAK\n", b"a b", b"it's", b"\xfe\xfa"]
    assert "5 of 5 names fit" in m._repr_html_()
    assert {os.fsencode(n.sensor) for n in m.listings[0].names} == {b"caf\xe9", b"\xff\xfe", b'"q"', b" "}
    assert repr(m).isprintable()
    assert m.preview is not None
    assert json.dumps(m.preview.to_dict()).isascii()
    assert repr(m.preview).replace("\n", "").isprintable()


def test_pattern_finds_the_same_files_as_folders(tmp_path):
    put(tmp_path / "outside", "LEAK_secret.wav")
    root = tmp_path / "root"
    put(root, "LEAK_a.wav", ".LEAK_hidden.wav", "sub/LEAK_b.wav")
    (root / "LEAK_out.wav").symlink_to(tmp_path / "outside" / "LEAK_secret.wav")
    os.mkfifo(root / "LEAK_fifo.wav")
    (root / "loop").symlink_to(root)
    m = scan(root, pattern="{**}/{label}_{sensor}", content=True)
    assert m.listings[0].paths == [b"LEAK_a.wav", b"sub/LEAK_b.wav"]
    assert {"link", "special"} <= kinds(m).keys()


def test_preview(tmp_path):
    put(
        tmp_path,
        *(
            f"{s}_{'LEAK' if k % 2 else 'NOLEAK'}_H{k % 3}_20250314_02{k:02d}00.wav"
            for k in range(40)
            for s in ("train", "test")
        ),
        "<b>notes</b>.wav",
        "train_LEAK_H1_noon.wav",
    )
    m = scan(tmp_path, pattern="{split}_{label}_{sensor}_{start_time}")
    p = m.preview
    assert p is not None
    assert (p.n_fit, p.n_not, p.misses) == (81, 1, ("<b>notes</b>.wav",))
    assert p.values["label"] == {"LEAK": 41, "NOLEAK": 40}
    assert p.values["split"] == {"TRAINING": 41, "TESTING": 40}
    assert sum(p.values["sensor"].values()) == 81
    assert p.n_values["start_time"] == 41, "40 times and one that could not be read"
    assert len(p.rows) <= 10
    assert {"TRAINING", "TESTING"} == {row["split"] for row in p.rows}, "the rows are spread over the listing"
    assert list(p.rows[0]) == ["path", "split", "label", "sensor", "start_time"]
    assert "81 of 82 names fit" in repr(p)
    assert "does not fit: <b>notes</b>.wav" in repr(p)
    assert "81 of 82 names fit" in m._repr_html_()
    assert "<b>notes" not in m._repr_html_()
    put(tmp_path, "LEAK/x.wav")
    assert scan(tmp_path).preview is None
    nothing = scan(tmp_path, pattern="{label}~{sensor}").preview
    assert nothing is not None
    assert (nothing.n_fit, nothing.n_not, nothing.rows) == (0, 83, ())
    assert "0 of 83" in repr(nothing)


# ---- tables -----------------------------------------------------------------------------------------------------------------------


def table(tmp_path: Path, text: str | bytes) -> Path:
    "Write a table."
    path = tmp_path / "names.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@each(
    ("name", "text"),
    [
        ("plain", b"path,label,gain\nLEAK/a.wav,LEAK,16\nb.wav,NO LEAK,\n"),
        ("mark", b"\xef\xbb\xbfpath,label,gain\nLEAK/a.wav,LEAK,16\nb.wav,NO LEAK,\n"),
        ("semicolons", b"path;label;gain\r\nLEAK/a.wav;LEAK;16\r\nb.wav;NO LEAK;\r\n"),
        ("tabs", b"path\tlabel\tgain\nLEAK/a.wav\tLEAK\t16\nb.wav\tNO LEAK\t"),
        ("names of columns", b"Label,FileName, GAIN \nLEAK,LEAK/a.wav,16\nNO LEAK,b.wav,\n"),
        ("quotes", b'"path","label","gain"\n"LEAK/a.wav","LEAK","16"\n"b.wav"," NO LEAK ",""\n'),
        ("blank lines", b"file,label,gain\n\nLEAK/a.wav, LEAK,16\n,,\n\nb.wav,NO LEAK,\n\n"),
        ("divider in a name", b"path;label;gain;a,b,c\nLEAK/a.wav;LEAK;16;1\nb.wav;NO LEAK;;2\n"),
    ],
)
def test_spellings_of_a_table(tmp_path, name, text):
    t = read_table(table(tmp_path, text))
    assert (t.paths, t.labels, t.splits) == ([b"LEAK/a.wav", b"b.wav"], ["LEAK", "NO LEAK"], None)
    assert t.parts[0].gain == 16
    assert np.isnan(t.parts[1].gain)


@each("above", ["\n", "\r\n\r\n", ";;\n", " \n\t\n", "\ufeff\n"])
def test_blank_lines_above_the_header(tmp_path, above):
    (tmp_path / "t.csv").write_text(
        above + "path;label;sensor\n\na.wav;LEAK;H1\n;LEAK;\n", encoding="utf-8", newline=""
    )
    line = above.count("\n") + 4
    with raises("table-row", DataError, says=f"line {line}"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text(
        above + "path;label;sensor\n\na.wav;LEAK;H1\n", encoding="utf-8", newline=""
    )
    table = read_table(tmp_path / "t.csv")
    assert (table.paths, table.labels, table.parts[0].sensor) == ([b"a.wav"], ["LEAK"], "H1")


@pytest.mark.slow
@pytest.mark.parametrize("n", [32_767, 32_768])
def test_too_many_labels_are_refused(tmp_path, n):
    "The wrong column was named label: each recording has its own."
    (tmp_path / "t.csv").write_text("path,label\n" + "".join(f"{i}.wav,L{i:05d}\n" for i in range(n)))
    if n == 32_767:
        assert scan(tmp_path, table=tmp_path / "t.csv").listings[0].label_ids.max() == 32_766
        return
    with pytest.raises(
        DataError,
        match=r"32,768 labels, at most 32,767 .* L00000 and L32767\. .*is the label column.*the right one\?",
    ):
        scan(tmp_path, table=tmp_path / "t.csv")


def test_all_columns_of_a_table(tmp_path):
    t = read_table(
        table(
            tmp_path,
            "path,label,split,sensor,recording,session,start_time,gain,folder,remark,who\n"
            "x/a.wav,LEAK,val,H1,7,night 3,20250314_020000,-2.5,pit/2,loud,me\n",
        )
    )
    assert t.parts == [NameParts("H1", "7", "2025-03-14T02:00:00", -2.5, "night 3", "pit/2")]
    assert (t.splits, t.ignored) == (["VALIDATION"], ())
    assert t.extra == {"remark": ["loud"], "who": ["me"]}


ODD = [
    b"two blanks  .wav",
    b" leading.wav",
    b"-rf.wav",
    b"new\nline.wav",
    b"tab\t.wav",
    b"quote'\".wav",
    b"semi;colon,$(x).wav",
    "Schacht Süd.wav".encode(),
    "水.wav".encode(),
    b"back\\slash.wav",
    b"caf\xe9.wav",
    b"\xff\xfe.wav",
    b"=1+1.wav",
    b"\x7f\x01.wav",
]


def test_odd_names_survive_a_round_trip_through_a_table(tmp_path):
    put(tmp_path / "data", *ODD)
    rows = []
    for name in ODD:
        try:
            rows.append('"' + name.decode().replace('"', '""') + '",,LEAK')
        except UnicodeDecodeError:
            rows.append(f"anything,{base64.b64encode(name).decode()},LEAK")
    m = scan(tmp_path / "data", table=table(tmp_path, "path,path_base64,label\n" + "\n".join(rows)))
    assert m.listings[0].paths == sorted(ODD)
    assert (m.listings[0].sizes > 0).all()
    assert kinds(m) == {}
    assert "\n" not in repr(m)


@each(
    ("text", "words"),
    [
        ("", ["names no recording"]),
        ("\n\n", ["names no recording"]),
        ("path,label\n", ["names no recording"]),
        ("path,label\n,\n", ["names no recording"]),
        ("path,class\na.wav,LEAK\n", ["no column label", "found path, class"]),
        ("label,sensor\nLEAK,H1\n", ["no column path"]),
        ("path,file,label\na.wav,a.wav,LEAK\n", ["more than one column path"]),
        ("path,label,Label\na.wav,A,B\n", ["more than one column label"]),
        ("path,label\n,LEAK\n", ["line 2: the path '' is empty"]),
        ("path,label\n/data/a.wav,LEAK\n", ["line 2: the path '/data/a.wav' is"]),
        ("path,label\nx/../../a.wav,LEAK\n", ["line 2: the path 'x/../../a.wav' is"]),
        ("path,label\n./a.wav,LEAK\n", ["line 2: the path './a.wav' is"]),
        ("path,label\nx//a.wav,LEAK\n", ["not in its plain form"]),
        ("path,label\nx/,LEAK\n", ["not in its plain form"]),
        ("path,label\na\0b.wav,LEAK\n", ["line 2"]),
        ("path,label\na.wav,LEAK\n\n\na.wav,NORMAL\n", ["line 5: the path is the same as in line 2"]),
        (
            'path,label,x\n"a\n\n.wav",LEAK,1\n"a\n\n.wav",LEAK,1\n',
            ["line 5: the path is the same as in line 2"],
        ),
        ("path,label,split\na.wav,LEAK,train\nb.wav,LEAK,holdout\n", ["line 3: the split 'holdout' is not"]),
        ("path,label,split\na.wav,LEAK,val\n\nb.wav,LEAK,\n", ["line 4: the split is empty"]),
        ("path,label,start_time\na.wav,LEAK,noon\n", ["line 2: the start time", "noon"]),
        ("path,label,gain\na.wav,LEAK,loud\n", ["line 2: ", "is not a number"]),
        ("path,label,gain\na.wav,LEAK," + "9" * 60 + "\n", ["not a number"]),
        ("path,label\na.wav\n", ["line 2: the row has 1 cells, the header has 2"]),
        ("path,label\na.wav,LEAK,more\n", ["line 2: the row has 3 cells, the header has 2"]),
        ('path,label\n"a.wav,LEAK\nb.wav,LEAK\n', ["line 2: the text is not valid CSV"]),
        ('path,label\nb.wav,LEAK\n"a"b.wav,LEAK\n', ["line 3: the text is not valid CSV"]),
        ("path_base64,label\n????,LEAK\n", ["line 2: "]),
        (
            "path_base64,label\n" + base64.b64encode(b"/a.wav").decode() + ",LEAK\n",
            ["'/a.wav' is empty, not below"],
        ),
        ("path,label\n" + "x" * 140_000 + ".wav,LEAK\n", ["line 2: the text is not valid CSV"]),
        (b"path,label\na.wav,LEAK\ncaf\x81.wav,LEAK\n", ["line 3: the text is not UTF-8", "path_base64"]),
        (b"PK\x03\x04\x14\0\x06\0", ["an Excel workbook", "Save it as CSV UTF-8"]),
        ("name,label\na.wav,LEAK\n", ["path (or file, or filename)"]),
        ('path,label,gain\na.wav,LEAK,"1,500"\n', ["line 2: ", "is not a number"]),
        ("path,label\na.wav,LEAK\n".encode("utf-16")[:-1], ["line 2: the text is not UTF-8", "Unicode text"]),
        (b"path,label\na.wav,S\xc3\x9cD\nb.wav,S\xdcD\n", ["line 3: the text is not UTF-8", "CSV UTF-8"]),
    ],
)
def test_faults_of_a_table_are_named_with_their_line(tmp_path, text, words):
    put(tmp_path / "data", "a.wav", "b.wav")
    with pytest.raises(DataError) as caught:
        scan(tmp_path / "data", table=table(tmp_path, text))
    for w in words:
        assert w in str(caught.value)
    assert "names.csv" in str(caught.value)
    assert str(caught.value).isprintable()


def test_table_path_that_is_not_a_file_is_refused(tmp_path):
    put(tmp_path / "data", "a.wav")
    os.mkfifo(tmp_path / "fifo.csv")
    with open(tmp_path / "sparse.csv", "wb") as f:
        f.truncate(20 << 30)
    for name in ("fifo.csv", "nowhere.csv", "data", "sparse.csv"):
        with pytest.raises(DataError, match=name) as e:
            scan(tmp_path / "data", table=tmp_path / name)
        assert (name == "data") == ("this is a folder" in str(e.value.remedy))
    with raises("no-such-folder", DataError):
        scan(tmp_path / "nowhere", table=table(tmp_path, "path,label\na.wav,LEAK\n"))
    with raises("conflicting-parameters", UsageError):
        scan(tmp_path / "data", table=tmp_path / "names.csv", pattern="{label}")
    with raises("conflicting-parameters", UsageError, remedy="give the table too (table=, --table)"):
        scan(tmp_path / "data", columns="path=file")


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 200])
@given(data=st.data())
@fuzz(15)
def test_table_written_by_pandas_survives_a_round_trip(tmp_path_factory, count, data):
    names = data.draw(
        st.lists(
            st.text(
                st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0\r"),
                min_size=1,
                max_size=8,
            ),
            min_size=count,
            max_size=count,
            unique=True,
        ).filter(lambda n: not {".", ".."} & set(n) and any(x.strip() for x in n))
    )
    labels = data.draw(
        st.lists(st.sampled_from(["LEAK", "a,b", 'say "x"', "ü"]), min_size=count, max_size=count)
    )
    file = tmp_path_factory.mktemp("t") / "names.csv"
    pd.DataFrame({"path": names, "label": labels}).to_csv(
        file, index=False, sep=data.draw(st.sampled_from([",", ";", "\t"]))
    )
    t = read_table(file)
    assert t.paths == [os.fsencode(n) for n in names]
    assert t.labels == labels


def test_files_named_and_not_named_by_a_table(tmp_path):
    root = tmp_path / "data"
    put(tmp_path / "outside", "secret.wav")
    put(root, "x/a.wav", "x/b.wav", "c.wav", "d.wav", "notes/deep/e.WAVE")
    (root / "in.wav").symlink_to("x/b.wav")
    (root / "out.wav").symlink_to(tmp_path / "outside" / "secret.wav")
    (root / "outfolder").symlink_to(tmp_path / "outside")
    (root / "loop.wav").symlink_to("loop.wav")
    os.mkfifo(root / "fifo.wav")
    names = [
        "x/a.wav",
        "in.wav",
        "out.wav",
        "outfolder/secret.wav",
        "loop.wav",
        "fifo.wav",
        "x",
        "gone.wav",
        "x\\b.wav",
        "x/a.wav/b.wav",
        "y" * 300 + ".wav",
    ]
    m = scan(
        root,
        table=table(
            tmp_path, "path,label,size\n" + "".join(f"{n},{'B' if n[0] == 'i' else 'A'},\n" for n in names)
        ),
    )
    x = m.listings[0]
    assert x.paths == sorted(n.encode() for n in names)
    assert {p for p, size in zip(x.paths, x.sizes, strict=True) if size >= 0} == {b"x/a.wav", b"in.wav"}
    assert {p for p, k in zip(x.paths, x.label_ids, strict=True) if m.label_names[k] == "B"} == {b"in.wav"}
    assert m.label_names == ("A", "B")
    found = kinds(m)
    assert found.keys() == {"missing_file", "not_in_table", "ignored_column"}
    assert set(found["missing_file"]) == {os.fsdecode(p).replace("\\", "\\") for p in x.paths} - {
        "x/a.wav",
        "in.wav",
    }
    assert found["not_in_table"] == ["c.wav"]
    assert "4 recordings" in m.problems["message"][m.problems["kind"] == "not_in_table"].iloc[0]
    assert 'write "/" between folders' in m.problems["message"][m.problems["path"] == "x\\b.wav"].iloc[0]
    assert found["ignored_column"] == ["size"]


def test_splits_of_a_table(tmp_path):
    put(tmp_path / "data", *"abcdef")
    file = table(
        tmp_path,
        "path,label,split\nf,LEAK,test\na,LEAK,train\nc,NORMAL,VALIDATION\nb,BURST,dataset_train\ne,LEAK,train\n",
    )
    m = scan(tmp_path / "data", table=file)
    assert [(x.split, x.paths, x.label_ids.tolist()) for x in m.listings] == [
        ("TRAINING", [b"a", b"b", b"e"], [1, 0, 1]),
        ("VALIDATION", [b"c"], [2]),
        ("TESTING", [b"f"], [1]),
    ]
    alone = scan(tmp_path / "data", split="val", table=file)
    assert (alone.label_names, [x.split for x in alone.listings]) == (m.label_names, ["VALIDATION"])
    plain = table(tmp_path, "path,label\na,LEAK\n")
    with raises("table-columns", UsageError):
        scan(tmp_path / "data", split="val", table=plain)
    with raises("no-such-split", DataError):
        scan(tmp_path / "data", split="test", table=table(tmp_path, "path,label,split\na,LEAK,train\n"))
    with raises("unknown-split", UsageError):
        scan(tmp_path / "data", split="holdout", table=file)


@pytest.mark.slow
def test_table_of_twenty_thousand_rows(tmp_path):
    (tmp_path / "data").mkdir()
    file = table(
        tmp_path,
        "path,label,split,sensor,start_time,gain\n"
        + "".join(f"LEAK/{k:06d}.wav,L{k % 3},train,H{k % 50},20250314_020000,16\n" for k in range(20_000)),
    )
    m = scan(tmp_path / "data", table=file)
    assert len(m) == 20_000
    assert m.listings[0].n_bytes == 0


# ---- groups ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_grouping_many_labels(tmp_path):
    (tmp_path / "t.csv").write_text(
        "path,label,sensor,split\n"
        + "".join(f"{i}.wav,L{i},s{i % 100},{('train', 'val')[i // 10_000]}\n" for i in range(20_000))
    )
    m = scan(tmp_path, table=tmp_path / "t.csv")
    g = m.groups("sensor")
    assert g.shape == (100, 1 + 2 + 20_000 + 1)
    assert g.index.name == "sensor"
    assert g[["recordings", "TRAINING", "VALIDATION", "n_splits"]].drop_duplicates().values.tolist() == [
        [200, 100, 100, 2]
    ]
    assert (g["label L105"].loc["s5"], g["label L105"].sum(), g["label L19999"].loc["s99"]) == (1, 1, 1)


def test_groups(tmp_path):
    put(
        tmp_path,
        *(
            f"{split}/{label}/pit {k % 2}/H{k % sensors}~{k}~20250314_02{k:02d}00~16.wav"
            for split, sensors in (("TRAINING", 3), ("TESTING", 2))
            for label in ("LEAK", "NORMAL")
            for k in range(6)
        ),
        "TRAINING/LEAK/plain.wav",
    )
    m = scan(tmp_path)
    g = m.groups("sensor")
    assert g.index.tolist() == ["H0", "H1", "H2"]
    assert g.loc["H0"].to_dict() == {
        "recordings": 10,
        "TRAINING": 4,
        "TESTING": 6,
        "label LEAK": 5,
        "label NORMAL": 5,
        "n_splits": 2,
    }
    assert g["n_splits"].tolist() == [2, 2, 1]
    assert int(g["recordings"].sum()) == 24, "a recording of no sensor is in no group"
    assert "2 of 3 sensors lie in more than one split" in m._repr_html_()
    assert "2 of 2 folders lie in more than one split" in m._repr_html_()
    assert m.groups("folder").index.tolist() == ["pit 0", "pit 1"]
    assert len(m.groups("session")) == 0
    assert "sessions" not in m._repr_html_()
    assert "lie in more" not in scan(tmp_path, split="train")._repr_html_()
    with raises("unknown-grouping", UsageError, says="sensor"):
        m.groups("sensors")
    assert scan(tmp_path / "TRAINING").groups("sensor")["n_splits"].tolist() == [1, 1, 1]


# ---- builds ------------------------------------------------------------------------------------------------------------------------


def judge(path: Path, folder: Path, right: dict[bytes, tuple[str, str, str]]) -> dict:
    "What an independent check finds: rows and rejected are `right`, each row has its label, sensor and session, and its own features."
    got = content(path)
    config, names = json.loads(got["@config_json"]), json.loads(got["@labels_json"])
    paths = got["files/path"].tolist()
    assert sorted([*paths, *got["rejected/path"].tolist()]) == sorted(right)
    assert paths == sorted(paths)
    told = zip(
        [names[i] for i in got["labels"]],
        got["files/sensor"].tolist(),
        got["files/session"].tolist(),
        strict=True,
    )
    assert {p: (label, s.decode(), t.decode()) for p, (label, s, t) in zip(paths, told, strict=True)} == {
        p: right[p] for p in paths
    }
    for k, p in enumerate(paths):
        x, rate = read(os.path.join(os.fsencode(folder), p))
        assert off(got["segments_mel"][k], log_mel(fit(x, rate, config), config)) <= 0
    return got


def spoil(path: Path, change: Callable[[h5py.File], None]) -> None:
    "Change a data set and repair its digest, as a builder that is wrong, or a forger, would."
    with h5py.File(path, "r+") as f:
        change(f)
        f.attrs[DIGEST_ATTRIBUTE] = metadata_digest(f)


def bad(report: lm.VerifyReport, *words: str) -> None:
    "The report says no, and why."
    assert not report.ok
    for w in words:
        assert any(w in p for p in report.problems), report.problems


TABLE = (
    "path,label,split,sensor,session\nday 1/a.wav,LEAK,train,H1,s1\nday 1/b.wav,NORMAL,train,H1,s1\nday 2/c.wav,LEAK,train,H2,s2\n"
    "day 2/d.wav,NORMAL,train,H2,s2\ngone.wav,LEAK,train,H3,s3\ne.wav,LEAK,val,H4,s4\nf.wav,NORMAL,val,H4,s4\n"
)


@pytest.fixture(scope="module")
def by_table(tmp_path_factory) -> tuple[Path, Path, list[Path]]:
    "A folder, its table, and the data sets of both splits."
    base = tmp_path_factory.mktemp("by_table")
    put(
        base / "data",
        "day 1/a.wav",
        "day 1/b.wav",
        "day 2/c.wav",
        "day 2/d.wav",
        "e.wav",
        "f.wav",
        "not in the table.wav",
    )
    file = table(base, TABLE)
    results = lm.build_all(
        base / "data",
        out_dir=base / "out",
        manifest=scan(base / "data", table=file),
        progress="none",
        pipeline=QUIET,
    )
    assert all(r.verified.ok and r.verified.labels_compared for r in results)
    return base / "data", file, [r.path for r in results]


@pytest.fixture
def copy(by_table, tmp_path) -> tuple[Path, Path]:
    "The training split's data set and its table, to be spoiled."
    return Path(shutil.copy(by_table[2][0], tmp_path / "x.h5")), Path(
        shutil.copy(by_table[1], tmp_path / "names.csv")
    )


@pytest.mark.slow
def test_a_build_from_a_table(by_table):
    data, file, (training, validation) = by_table
    rows = [line.split(",") for line in TABLE.splitlines()[1:]]
    right = {
        split: {p.encode(): (label, sensor, session) for p, label, s, sensor, session in rows if s == split}
        for split in ("train", "val")
    }
    got = judge(training, data, right["train"])
    assert got["rejected/path"].tolist() == [b"gone.wav"]
    assert got["rejected/code"].tolist() == [b"unreadable"]
    assert b"named in the table" in got["rejected/message"][0]
    assert json.loads(got["@naming_json"]) == {"source": "table", "pattern": "", "base": "root"}
    assert got["@split"] == "TRAINING"
    judge(validation, data, right["val"])
    for path in (training, validation):
        report = lm.verify(path, root=data, table=file, sample=None)
        assert report.ok, report.problems
        assert report.labels_compared
        assert "not compared" not in report.verdict


@each("mode", ["stream", "preload", "memmap"])
def test_a_build_from_a_table_gives_the_same_bytes_in_each_mode(by_table, tmp_path, mode):
    data, file, (training, _) = by_table
    pipeline = replace(QUIET, cache_dir=str(tmp_path / "cache"))
    r = lm.build(
        data,
        split="train",
        manifest=scan(data, split="train", table=file),
        out=tmp_path / "x.h5",
        mode=mode,
        progress="none",
        pipeline=pipeline,
    )
    assert r.path.read_bytes() == training.read_bytes()
    assert (
        r.summary["source_bytes"] == sum((data / "day 1" / n).stat().st_size for n in ("a.wav", "b.wav")) * 2
    )


def test_without_its_table_the_labels_of_a_data_set_are_not_compared(by_table):
    data, _, (training, _) = by_table
    for report in (lm.verify(training), lm.verify(training, root=data)):
        assert report.ok, report.problems
        assert "labels and names were not compared: give the table" in report.verdict
        assert report.to_dict()["labels_compared"] is False


@pytest.mark.slow
@each(
    ("name", "change", "word"),
    [
        (
            "two labels exchanged",
            lambda t: t.replace("a.wav,LEAK", "a.wav,NORMAL").replace("b.wav,NORMAL", "b.wav,LEAK"),
            "2 rows have a label",
        ),
        (
            "one label",
            lambda t: t.replace("day 2/c.wav,LEAK", "day 2/c.wav,NORMAL"),
            "1 rows have a label that differs from the table, first day 2/c.wav",
        ),
        ("a sensor", lambda t: t.replace("H2,s2\nday 2/d", "H9,s2\nday 2/d"), "sensor of 1 rows"),
        ("a session", lambda t: t.replace("s1\n", "s8\n"), "session of 2 rows"),
        (
            "a line less",
            lambda t: t.replace("day 1/a.wav,LEAK,train,H1,s1\n", ""),
            "1 recordings of the data set are not in the table",
        ),
        (
            "a line more",
            lambda t: t + "not in the table.wav,LEAK,train,H1,s1\n",
            "neither rows nor rejected, first not in the table.wav",
        ),
        ("a rejected line less", lambda t: t.replace("gone.wav,LEAK,train,H3,s3\n", ""), "first gone.wav"),
        (
            "another split",
            lambda t: t.replace("c.wav,LEAK,train", "c.wav,LEAK,val"),
            "not in the table for this split",
        ),
        (
            "no splits",
            lambda t: "\n".join(
                ",".join(w for k, w in enumerate(line.split(",")) if k != 2) for line in t.splitlines()
            ),
            "neither rows nor rejected",
        ),
    ],
)
def test_table_changed_after_the_build_is_reported(by_table, copy, name, change, word):
    path, file = copy
    assert lm.verify(path, root=by_table[0], table=file).ok
    assert change(TABLE) != TABLE
    file.write_text(change(TABLE))
    bad(lm.verify(path, root=by_table[0], table=file), word)
    bad(lm.verify(path, table=file), word)


@pytest.mark.slow
@each(
    ("name", "change", "word"),
    [
        (
            "label",
            lambda f: f["labels"].__setitem__(1, 1 - f["labels"][1]),
            "have a label that differs from the table",
        ),
        (
            "two labels",
            lambda f: f["labels"].__setitem__(slice(0, 2), f["labels"][:2][::-1]),
            "2 rows have a label",
        ),
        (
            "names of labels",
            lambda f: f.attrs.update(
                {"labels_json": '["NORMAL", "LEAK"]', "label2id_json": '{"NORMAL": 0, "LEAK": 1}'}
            ),
            "4 rows have a label",
        ),
        ("sensor", lambda f: f["files/sensor"].__setitem__(0, b"H9"), "sensor of 1 rows"),
        ("session", lambda f: f["files/session"].__setitem__(0, b"zz"), "session of 1"),
        ("folder", lambda f: f["files/folder"].__setitem__(0, b"z"), "folder of 1 rows"),
        ("gain", lambda f: f["files/gain"].__setitem__(0, 3), "gain of 1 rows"),
        ("split", lambda f: f.attrs.__setitem__("split", "VALIDATION"), "not in the table for this split"),
        ("rejected path", lambda f: f["rejected/path"].__setitem__(0, b"gony.wav"), "gony.wav"),
        (
            "naming",
            lambda f: f.attrs.__setitem__("naming_json", Naming().to_json()),
            "have a label that differs from their folder",
        ),
        ("no naming", lambda f: f.attrs.__delitem__("naming_json"), "cannot be read as a data set"),
        ("senseless naming", lambda f: f.attrs.__setitem__("naming_json", '{"source": "weather"}'), "naming"),
        (
            "hostile pattern",
            lambda f: f.attrs.__setitem__(
                "naming_json", '{"source": "pattern", "pattern": "{labl}", "base": "split"}'
            ),
            "labl is unknown",
        ),
    ],
)
def test_changed_names_with_repaired_digests_are_reported(by_table, copy, name, change, word):
    path, file = copy
    spoil(path, change)
    bad(lm.verify(path, root=by_table[0], table=file), word)
    bad(lm.verify(path, table=file), word)


def test_missing_sources_of_a_table_are_reported(by_table, copy, tmp_path):
    path, file = copy
    data = Path(shutil.copytree(by_table[0], tmp_path / "data"))
    put(data, "one more that the table does not name.wav")
    assert lm.verify(path, root=data, table=file).ok
    (data / "day 1" / "a.wav").unlink()
    bad(lm.verify(path, root=data, table=file, sample=0), "no longer exist in the folder, first day 1/a.wav")
    bad(lm.verify(path, root=data, sample=0), "no longer exist in the folder")


def test_verify_refuses_unrelated_and_invalid_tables(by_table, tmp_path):
    put(tmp_path / "data", "LEAK/a.wav", "NORMAL/b.wav")
    r = lm.build(tmp_path / "data", out=tmp_path / "x.h5", progress="none", pipeline=QUIET)
    with pytest.raises(UsageError, match="the labels of this data set come from folders: omit the table"):
        lm.verify(r.path, root=tmp_path / "data", table=by_table[1])
    with h5py.File(r.path, "r+") as f:
        f["labels"][0] = 1
    bad(
        lm.verify(r.path, table=by_table[1]), "do not match their digest"
    )  # a damaged file is said to be one, table or not
    with pytest.raises(DataError, match="nowhere"):
        lm.verify(r.path, table=tmp_path / "nowhere.csv")


def test_wrong_labels_of_a_builder_prevent_publication(by_table, tmp_path):
    data, file, _ = by_table
    m = scan(data, split="train", table=file)
    wrong = replace(m.listings[0], label_ids=1 - m.listings[0].label_ids)
    with pytest.raises(VerifyError, match="have a label that differs from the table"):
        lm.build(
            data,
            split="train",
            manifest=replace(m, listings=(wrong,)),
            out=tmp_path / "x.h5",
            progress="none",
            pipeline=QUIET,
        )
    assert not (tmp_path / "x.h5").exists()


PATTERN = "{**}/{split}_{label}_{sensor}_{session}"
PATTERN_NAMES = [
    f"{d}{s}_{label}_H{k}_s{k}.wav"
    for d, s in (("", "train"), ("more/", "val"))
    for k, label in enumerate(("LEAK", "NORMAL", "NORMAL", "LEAK"))
]


@pytest.mark.slow
def test_a_build_from_a_pattern(tmp_path):
    data = tmp_path / "data"
    put(data, *PATTERN_NAMES, "notes.wav")
    results = lm.build_all(
        data, out_dir=tmp_path / "out", manifest=scan(data, pattern=PATTERN), progress="none", pipeline=QUIET
    )
    assert [r.split for r in results] == ["TRAINING", "VALIDATION"]
    for r, begin in zip(results, ("train", "more/val"), strict=True):
        names = [n for n in PATTERN_NAMES if n.startswith(begin)]
        judge(
            r.path, data, {n.encode(): (n.split("_")[1], n.split("_")[2], n.split("_")[3][:2]) for n in names}
        )
        report = lm.verify(r.path, root=data, sample=None)
        assert report.ok, report.problems
        assert report.labels_compared
    path = results[0].path
    whole = path.read_bytes()
    for change, word in [
        (
            lambda f: f["labels"].__setitem__(1, 1 - f["labels"][1]),
            "a label that differs from their file name (pattern)",
        ),
        (lambda f: f.attrs.__setitem__("split", "VALIDATION"), "another split according to the pattern"),
        (lambda f: f["files/session"].__setitem__(0, b"zz"), "session is zz"),
        (lambda f: f["files/sensor"].__setitem__(3, b"zz"), "sensor is zz"),
        (
            lambda f: f.attrs.__setitem__(
                "naming_json", pattern_naming("{**}/{split}_{sensor}_{label}_{session}").to_json()
            ),
            "a label that differs from",
        ),
        (
            lambda f: f.attrs.__setitem__(
                "naming_json", pattern_naming("{split}_{label}_{session}_{sensor}").to_json()
            ),
            "session is s0",
        ),
    ]:
        spoil(path, change)
        bad(lm.verify(path, root=data), word)
        path.write_bytes(whole)
    put(data, "sub/train_LEAK_H7_s7.wav")
    bad(lm.verify(path, root=data, sample=0), "neither rows nor rejected, first sub/train_LEAK_H7_s7.wav")
    (data / "sub" / "train_LEAK_H7_s7.wav").rename(data / "test_LEAK_H7_s7.wav")
    assert lm.verify(path, root=data).ok, "a file of another split is no file of this one"
    (data / "train_LEAK_H0_s0.wav").unlink()
    bad(lm.verify(path, root=data, sample=0), "no longer exist in the folder")


def test_build_rejects_names_that_do_not_match_the_pattern(tmp_path):
    data = tmp_path / "data"
    put(data, "TRAINING/LEAK_H1.wav", "TRAINING/NORMAL_H2.wav", "TRAINING/odd.wav", "TESTING/LEAK_H3.wav")
    r = lm.build(
        data,
        split="train",
        manifest=scan(data, split="train", pattern="{label}_{sensor}"),
        out=tmp_path / "x.h5",
        progress="none",
        pipeline=QUIET,
    )
    assert (r.rows, [(x.path, x.code) for x in r.rejections]) == (2, [(b"odd.wav", "no_label")])
    assert lm.verify(r.path, root=data, sample=None).ok
    with pytest.raises(DataError, match="the pattern matches no recording") as caught:
        lm.build(
            data,
            split="train",
            manifest=scan(data, split="train", pattern="{label}~{sensor}"),
            out=tmp_path / "y.h5",
            progress="none",
        )
    assert "LEAK_H1.wav" in str(caught.value)


def test_nothing_outside_the_root_is_read_through_a_table(tmp_path, monkeypatch):
    put(tmp_path / "outside", "secret.wav")
    put(tmp_path / "data", "b.wav")
    (tmp_path / "data" / "a.wav").symlink_to(tmp_path / "outside" / "secret.wav")
    os.mkfifo(tmp_path / "data" / "fifo.wav")
    file = table(tmp_path, "path,label\na.wav,LEAK\nb.wav,NORMAL\nfifo.wav,LEAK\n")
    m = scan(tmp_path / "data", table=file, content=True)
    assert m.table["n_samples"].fillna(0).tolist() == [0, 2048, 0]
    r = lm.build(tmp_path / "data", manifest=m, out=tmp_path / "x.h5", progress="none", pipeline=QUIET)
    assert (r.rows, [(x.path, x.code) for x in r.rejections]) == (
        1,
        [(b"a.wav", "unreadable"), (b"fifo.wav", "unreadable")],
    )
    assert lm.verify(r.path, root=tmp_path / "data", table=file).ok
    assert walk(tmp_path / "data")


def test_odd_names_of_a_table_become_rows(tmp_path):
    names = [n for n in ODD if n != b"\x7f\x01.wav"]
    put(tmp_path / "data", *names)
    file = table(
        tmp_path,
        "path_base64,label,sensor\n"
        + "".join(f'{base64.b64encode(n).decode()},{"AB"[k % 2]},"s\n{k}"\n' for k, n in enumerate(names)),
    )
    r = lm.build(
        tmp_path / "data",
        manifest=scan(tmp_path / "data", table=file),
        out=tmp_path / "x.h5",
        progress="none",
        pipeline=QUIET,
    )
    judge(r.path, tmp_path / "data", {n: ("AB"[k % 2], f"s\n{k}", "") for k, n in enumerate(names)})
    assert lm.verify(r.path, root=tmp_path / "data", table=file, sample=None).ok


# ---- from the shell and in the run notebook --------------------------------------------------------------------------------------------


def shell(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str, str]:
    "Status, standard output and standard error of a command."
    status = main([str(w) for w in words])
    out, err = capsys.readouterr()
    return status, out, err


def test_patterns_from_the_shell(tmp_path, capsys):
    data = tmp_path / "data"
    put(data, *PATTERN_NAMES, "notes.wav")
    status, out, _ = shell(capsys, "scan", data, "--pattern", PATTERN)
    assert status == 0
    assert out.index("8 of 9 names fit") < out.index("no_match")
    assert "notes.wav" in out
    assert "label: LEAK 4, NORMAL 4" in out
    status, out, _ = shell(capsys, "scan", data, "--pattern", PATTERN, "--json")
    preview = json.loads(out)["preview"]
    assert (preview["fit"], preview["do_not_fit"], preview["values"]["label"]) == (
        8,
        1,
        {"LEAK": 4, "NORMAL": 4},
    )
    status, _, err = shell(capsys, "scan", data, "--pattern", "{labl}")
    assert status == 2
    assert "did you mean label" in err
    assert (
        shell(
            capsys,
            "build",
            data,
            "--split",
            "all",
            "--out",
            tmp_path / "out",
            "--pattern",
            PATTERN,
            "--quiet",
        )[0]
        == 0
    )
    assert shell(capsys, "verify", tmp_path / "out" / "VALIDATION_DATASET.H5", "--root", data)[0] == 0


def test_tables_from_the_shell(by_table, tmp_path, capsys):
    data, file, _ = by_table
    status, out, _ = shell(capsys, "scan", data, "--table", file)
    assert status == 1, "a recording would be rejected"
    assert "missing_file" in out
    assert "gone.wav" in out
    target = tmp_path / "x.h5"
    assert (
        shell(capsys, "build", data, "--split", "train", "--out", target, "--table", file, "--quiet")[0] == 0
    )
    assert shell(capsys, "verify", target, "--root", data, "--table", file)[0] == 0
    assert "not compared" in shell(capsys, "verify", target, "--root", data)[1]
    file2 = table(tmp_path, TABLE.replace("a.wav,LEAK", "a.wav,NORMAL"))
    status, out, _ = shell(capsys, "verify", target, "--table", file2)
    assert status == 1
    assert "differs from the table" in out
    status, _, err = shell(capsys, "build", data, "--out", target, "--table", file, "--quiet")
    assert status == 2
    assert "no split was given" in err


def test_a_run_is_planned_from_a_table(by_table, tmp_path):
    from build_runs import execute, plan_run

    data, file, _ = by_table
    given = {
        "data_root": str(data),
        "split": "train",
        "table": str(file),
        "out": str(tmp_path / "run"),
        "check": 4,
    }
    plan = plan_run(given, progress="none")
    (result,) = execute(plan, progress="none")
    assert (result.rows, len(result.rejections)) == (4, 1)
    assert result.verified.labels_compared
    with raises("conflicting-parameters", UsageError):
        plan_run(given | {"pattern": PATTERN}, progress="none")


def test_types(by_table):
    assert isinstance(read_table(by_table[1]), NameTable)


# ---- what people get wrong -------------------------------------------------------------------------------------------------------


def test_a_pattern_without_label_leaves_the_labels_to_the_folders(tmp_path):
    put(
        tmp_path / "data",
        "TRAINING/LEAK/H1_5.wav",
        "TRAINING/LEAK/odd.wav",
        "TRAINING/NORMAL/deep/odder.wav",
        "TRAINING/H2_5.wav",
        "TRAINING/stray.wav",
    )
    m = scan(tmp_path / "data", pattern="{*}/{sensor}_{gain}")
    assert m.counts()["TRAINING"] == {"(no label)": 2, "LEAK": 2, "NORMAL": 1}
    assert m.table.set_index("path")["sensor"].to_dict() == {
        "LEAK/H1_5.wav": "H1",
        "LEAK/odd.wav": "",
        "NORMAL/deep/odder.wav": "",
        "H2_5.wav": "",
        "stray.wav": "",
    }
    assert kinds(m)["no_match"] == ["TRAINING/LEAK/odd.wav", "TRAINING/NORMAL/deep/odder.wav"]
    assert kinds(m)["no_label"] == ["TRAINING/H2_5.wav", "TRAINING/stray.wav"], (
        "they lie in no label folder, whatever their names are"
    )
    assert set(m.problems["message"][m.problems["kind"] == "no_match"]) == {
        "the name does not fit the pattern {*}/{sensor}_{gain}, so nothing is read from it"
    }
    assert m.preview is not None
    assert (m.preview.n_fit, m.preview.n_not) == (1, 4)
    assert "no_match" in m.report().groups()["names and folders"]
    assert "1 of 5 names fit" in m._repr_html_()
    r = lm.build(
        tmp_path / "data", split="train", manifest=m, out=tmp_path / "x.h5", progress="none", pipeline=QUIET
    )
    assert (r.rows, [x.message for x in r.rejections]) == (3, ["lies in no label folder"] * 2)
    assert r.summary["problems_by_kind"]["no_match"] == 2
    assert lm.verify(r.path, root=tmp_path / "data", sample=None).ok
    with h5py.File(r.path, "r+") as f:
        f["labels"][1] = 1
        f.attrs[DIGEST_ATTRIBUTE] = metadata_digest(f)
    bad(lm.verify(r.path), "have a label that differs from their folder, first LEAK/odd.wav")


def test_unmatched_name_is_rejected_if_the_pattern_has_the_label(tmp_path, capsys):
    put(tmp_path, "LEAK_H1.wav", "odd.wav")
    assert scan(tmp_path, pattern="{label}_{sensor}").report().groups()["cannot be used"] == ["no_match"]
    assert main(["scan", str(tmp_path), "--pattern", "{label}_{sensor}"]) == 1
    put(tmp_path / "splits", "train_LEAK.wav", "odd.wav")
    by_split = scan(tmp_path / "splits", pattern="{split}_{label}")
    assert by_split.report().groups()["names and folders"][0] == "no_match", "it is rejected by no data set"
    assert main(["scan", str(tmp_path / "splits"), "--pattern", "{split}_{label}"]) == 0
    capsys.readouterr()


def test_pattern_without_match_is_reported_once(tmp_path):
    put(tmp_path, "LEAK/H1_5.wav", "NORMAL/H2_5.wav")
    m = scan(tmp_path, pattern="{label}-*_{sensor}")
    assert "labels none; " in repr(m)
    assert m.preview is not None
    assert repr(m.preview).startswith("0 of 2 names fit {label}-*_{sensor}\n  does not fit: LEAK/H1_5.wav")


def test_table_written_by_excel(tmp_path):
    t = read_table(table(tmp_path, "File;Label;Gain\r\na.wav;LEAK;1,5\r\nb.wav;NORMAL;-3.25\r\n"))
    assert (t.paths, t.labels, [p.gain for p in t.parts]) == (
        [b"a.wav", b"b.wav"],
        ["LEAK", "NORMAL"],
        [1.5, -3.25],
    )


@each(
    "rows",
    [("LEAK/a.wav", "LEAK/b.wav"), ("data/TRAINING/LEAK/a.wav", "gone.wav"), ("x/TRAINING/LEAK/a.wav",)],
)
def test_a_table_written_for_another_folder(tmp_path, rows):
    put(tmp_path / "data", "TRAINING/LEAK/a.wav", "TRAINING/LEAK/b.wav")
    m = scan(tmp_path / "data", table=table(tmp_path, "path,label\n" + "".join(f"{r},LEAK\n" for r in rows)))
    assert kinds(m)["wrong_root"] == [rows[0]]
    (hint,) = m.problems["message"][m.problems["kind"] == "wrong_root"]
    assert hint.startswith(f"paths are relative to {tmp_path / 'data'}, ")
    assert len(kinds(m)["missing_file"]) == len(rows)


def test_a_path_that_differs_only_in_case(tmp_path):
    put(tmp_path / "data", "LEAK/a.wav", "LEAK/b.wav")
    m = scan(tmp_path / "data", table=table(tmp_path, "path,label\nLEAK/a.wav,LEAK\nleak/B.WAV,LEAK\n"))
    (message,) = m.problems["message"][m.problems["kind"] == "missing_file"]
    assert message.endswith("upper and lower case count")
    assert "wrong_root" not in kinds(m), "a row is there, so the root is right"


def test_a_path_that_differs_only_in_how_accents_are_stored(tmp_path):
    "Names from a Mac are decomposed (NFD), those typed into a table are not."
    put(tmp_path / "data", "LEAK/a.wav", unicodedata.normalize("NFD", "LEAK/Süd.wav"))
    m = scan(tmp_path / "data", table=table(tmp_path, "path,label\nLEAK/a.wav,LEAK\nLEAK/Süd.wav,LEAK\n"))
    assert kinds(m) == {}
    assert m.listings[0].sizes.min() > 0
    assert m.listings[0].paths == [os.fsencode(unicodedata.normalize("NFD", "LEAK/Süd.wav")), b"LEAK/a.wav"]


def test_read_error_of_a_table_names_the_table(tmp_path, monkeypatch):
    def fail(path: Path, flags: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with raises("table-unreadable", DataError, path="/dev/null", says="is not a regular file"):
        read_table(Path("/dev/null"))
    file = table(tmp_path, "path,label\na.wav,LEAK\n")
    monkeypatch.setattr(os, "open", fail)
    with raises("table-unreadable", DataError, path=file):
        read_table(file)


# -- fields without a value -------------------------------------------------------------------------------------------


@each(
    ("pattern", "texts", "field"),
    [
        ("{label}/{sensor}_{start_time}", ("noon", "S20251110_020000"), "start_time"),
        ("{label}/{sensor}_{gain}", ("high", "low"), "gain"),
        ("{*}/{sensor}_{start_time}", ("20251340_020000", "1762740000"), "start_time"),
        ("{split}/{label}/{sensor}_{gain}_{*}", ("x_1", "y_2"), "gain"),
    ],
)
def test_a_field_that_is_read_from_no_name_is_a_problem(tmp_path, make_wav, pattern, texts, field):
    "In scan and build, with an example and what is read; such a pattern does not fit."
    folder = tmp_path / "data" / ("TRAINING" if "{split}" in pattern else "")
    for label in ("LEAK", "NOLEAK"):
        for k, text in enumerate(texts):
            make_wav(folder / label / f"H{k}_{text}.wav", seed=k + len(label))
    m = scan(tmp_path / "data", pattern=pattern)
    (p,) = [p for p in m.problems.to_dict("records") if p["kind"] == "unread_field"]
    assert f"{{{field}}} is read from 0 of the 4 names" in p["message"]
    assert p["path"].endswith(".wav")
    assert m.preview is not None
    assert (m.preview.n_fit, m.preview.n_not) == (0, 4)
    assert m.preview.values[field] == {"(not read)": 4}
    assert f"{field}: (not read) 4" in repr(m.preview)
    assert "0 of 4 names fit" in m._repr_html_()
    split = "training" if "{split}" in pattern else None
    r = lm.build(
        tmp_path / "data", manifest=m, split=split, out=tmp_path / "x.h5", progress="none", pipeline=QUIET
    )
    assert r.rows == 4
    assert r.summary["problems_by_kind"]["unread_field"] == 1


def test_names_that_a_field_is_not_read_from_are_counted(tmp_path):
    put(
        tmp_path,
        *(f"LEAK/H{k}_20251110_02000{k}.wav" for k in range(5)),
        "LEAK/H1_noon.wav",
        "NOLEAK/H2_dawn.wav",
        "NOLEAK/x.wav",
    )
    m = scan(tmp_path, pattern="{label}/{sensor}_{start_time}")
    (p,) = [p for p in m.problems.to_dict("records") if p["kind"] == "unread_field"]
    assert "{start_time} is read from 5 of the 7 names" in p["message"]
    assert "'noon'" in p["message"]
    assert p["path"] == "LEAK/H1_noon.wav"
    whole = scan(tmp_path, pattern="{label}/{sensor}")
    assert "unread_field" not in set(whole.problems["kind"])


def test_a_time_within_a_field_does_not_change_the_other_fields(tmp_path):
    "The shortest sensor would take the rest of the name as a time with words before it."
    put(tmp_path, "LEAK/SM4_0+1_20251110$020000.wav", "LEAK/A_B_20251110_020000T.wav")
    m = scan(tmp_path, pattern="{label}/{sensor}_{start_time}")
    assert [p.sensor for p in m.listings[0].names] == ["A_B", "SM4_0+1"]
    m = scan(tmp_path, pattern="{label}/{start_time}")
    assert [p.start_time for p in m.listings[0].names] == ["2025-11-10T02:00:00"] * 2
    assert m.problems.empty
