"Splits: recordings and groups on both sides are reported, and groups stay together."

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from each import each
from errors import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, UsageError
from leakmel.dataset.reader import MelDataset
from leakmel.detector.data.segments import Segments, make_task
from leakmel.detector.data.splits import (
    KINDS,
    MAX_EXHAUSTIVE,
    LeakySplitWarning,
    Split,
    SplitWarning,
    divide_groups,
    existing_split,
    find_shared,
    group_split,
    group_values,
    join_groups,
    shared_values,
    why_no_split,
)
from leakmel.recordings.demo import write_wav

pytestmark = pytest.mark.quick

quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
N, HALVES = 4096, {"training": 0.5, "testing": 0.5}


def make_sound(seed: int, n: int = N, gain: float = 0.2) -> np.ndarray:
    return (np.random.default_rng(seed).normal(0, gain, n).clip(-1, 1) * 32_000).astype(np.int16)


def make_set(out: Path, files: dict[str, int], *, rate: int = 4096, **samples: np.ndarray) -> Path:
    "A data set of recordings `label/name` -> seed."
    root = out.parent / f"{out.stem}_wavs"
    for name, seed in files.items():
        path = root / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_wav(path, samples.get(path.stem, make_sound(seed)), rate)
    return lm.build(root, out=out, progress="none", check=0, spec=lm.MelSpec(duration_s=1.0)).path


def logger(label: str, sensor: str, k: int) -> str:
    return f"{label}/{sensor}~{k:06d}~20240301_120000~8"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Iterator[MelDataset]:
    "24 recordings of 6 sensors, two labels each."
    files = {
        logger(label, f"H{s}", 10 * s + 2 * k + i): 100 * s + 10 * k + i
        for s in range(6)
        for k in range(2)
        for i, label in enumerate(("LEAK", "NOLEAK"))
    }
    with lm.open_dataset(make_set(tmp_path_factory.mktemp("plain") / "x.h5", files)) as ds:
        yield ds


def two_sides(split: Split, values: np.ndarray) -> list[set]:
    return [set(values[rows].tolist()) for rows in split.parts.values()]


# ---- existing splits -------------------------------------------------------------------------------------------------


def pair(tmp_path: Path, a: dict[str, int], b: dict[str, int], **options: Any) -> dict[str, Path]:
    return {
        "training": make_set(tmp_path / "a.h5", a, **options),
        "testing": make_set(tmp_path / "b.h5", b, **options),
    }


def test_a_clean_split(tmp_path):
    made = pair(
        tmp_path,
        {logger("LEAK", "A", 1): 1, logger("NO", "A", 2): 2},
        {logger("LEAK", "B", 3): 3, logger("NO", "B", 4): 4},
    )
    split = existing_split(made)
    assert not split.leaky
    assert split.stamp == ""
    assert split.unchecked == split.problems == ()
    assert [rows.tolist() for rows in split.parts.values()] == [[0, 1], [2, 3]]
    with (
        Segments(list(made.values()), rows=split.parts["testing"], level="recording") as ds,
        lm.open_dataset(made["testing"]) as raw,
    ):
        assert np.array_equal(ds.batch([0]).x[0], raw[0][0])


@pytest.mark.slow
@each(
    ("kind", "a", "b", "message"),
    [
        (
            "sensor",
            {logger("LEAK", "A", 1): 1, "NO/x1": 2},
            {logger("LEAK", "A", 3): 3, "NO/x2": 4},
            "1 sensor in more than one of {} (2 recordings): A",
        ),
        (
            "recording",
            {"LEAK/r7": 1, "NO/x1": 2},
            {"LEAK/R7": 3, "NO/x2": 4},
            "1 recording name in more than one of {} (2 recordings): r7",
        ),
        (
            "content",
            {"LEAK/r1": 1, "NO/x1": 2},
            {"LEAK/r2": 1, "NO/x2": 4},
            "1 recording with the same samples in more than one of {} (2 recordings): LEAK/",
        ),
    ],
)
def test_recordings_on_both_sides_are_reported(tmp_path, kind, a, b, message):
    made, message = pair(tmp_path, a, b), message.format("training, testing")
    with pytest.warns(LeakySplitWarning, match=re.escape(message)) as seen:
        split = existing_split(made)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert split.leaky
    assert [s.kind for s in split.shared] == [kind]
    assert split.stamp.startswith("LEAKY SPLIT: ")
    assert kind in repr(split)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = existing_split(made, allow_leaky_split=True)
    assert quiet.stamp == split.stamp  # allowed, not forgotten
    assert quiet.allowed_leaky


def test_numbered_files_of_two_sensors_are_two_recordings():
    paths = ["S1/001.wav", "S2/001.wav", "S5/001.wav", "S6/001.wav"]
    table = recordings(path=paths, sensor=["S1", "S2", "S5", "S6"])
    assert kinds(table, [0, 0, 1, 1]) == []
    assert kinds(table.assign(sensor=["S1", "S2", "S1", "S6"]), [0, 0, 1, 1]) == ["sensor", "recording"]
    some = table.assign(sensor=["S1", "S2", "S5", ""])
    assert kinds(some, [0, 0, 1, 1]) == ["recording"]  # the last may be of S1


def test_silent_recordings_are_no_copies(tmp_path):
    silent = np.zeros(N, np.int16)
    made = pair(
        tmp_path, {"LEAK/one": 1, "NO/two": 0}, {"LEAK/three": 2, "NO/four": 0}, two=silent, four=silent
    )
    assert not existing_split(made).leaky


def test_a_label_on_one_side(tmp_path):
    made = pair(tmp_path, {"LEAK/a": 1, "NO/b": 0}, {"NO/d": 3})
    with h5py.File(made["testing"], "r+") as f:  # as a build of both splits numbers labels
        f["labels"][:], f.attrs["labels_json"] = 1, '["LEAK", "NO"]'
    with pytest.warns(SplitWarning, match="LEAK: the label has no recording in testing"):
        split = existing_split(made)
    assert not split.leaky
    assert [p.kind for p in split.problems] == ["empty_label"]


def test_earlier_systems_files(tmp_path):
    "They hold no names: rows stand for content, and what cannot be looked at is said."
    rows = np.random.default_rng(0).normal(-40, 9, (6, 2, 2, 8, 1)).astype(np.float16)
    rows[2] = 0  # what the earlier system wrote for a file that it could not read
    for name, own in (("a", [0, 1, 2]), ("b", [3, 4, 2]), ("c", [5, 1, 4])):
        with h5py.File(tmp_path / name, "w") as f:
            f["labels"], f["segments_mel"] = np.array([0, 1, 1], np.int16), rows[own]
            f.attrs["labels_json"], f.attrs["config_json"] = '["LEAK", "NOLEAK"]', "{}"
    split = existing_split({"training": tmp_path / "a", "testing": tmp_path / "b"}, legacy=True)
    assert not split.leaky
    assert split.unchecked == ("sensor", "recording")
    with pytest.warns(LeakySplitWarning, match="1 recording with the same samples"):
        assert existing_split({"training": tmp_path / "a", "testing": tmp_path / "c"}, legacy=True).leaky
    with pytest.raises(
        UsageError,
        match=r"files of the earlier system store no names|Files of the earlier system store no names",
    ):
        group_split(tmp_path / "a", legacy=True)
    split = group_split([tmp_path / "a", tmp_path / "b"], [1, 1, 1, 2, 2, 2], shares=HALVES, legacy=True)
    assert sorted(map(len, split.parts.values())) == [3, 3]


@each("what", ["rate", "level"])
def test_property_tied_to_a_label_is_reported(tmp_path, what):
    files = {f"{label}/{label}{k}": 50 * i + k for i, label in enumerate(("LEAK", "NO")) for k in range(24)}
    loud = {
        f"LEAK{k}": make_sound(k, 8000 if what == "rate" else N, 0.2 if what == "rate" else 0.6)
        for k in range(24)
    }
    root = tmp_path / "wavs"
    for name, seed in files.items():
        path = root / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_wav(
            path,
            loud.get(path.stem, make_sound(seed)),
            8000 if what == "rate" and path.stem in loud else 4096,
        )
    path = lm.build(
        root, out=tmp_path / "x.h5", progress="none", check=0, spec=lm.MelSpec(duration_s=1.0)
    ).path
    output = (
        "sample rate: 24 of the 24 recordings with 8000 Hz"
        if what == "rate"
        else "level: in 100.0 % of the pairs"
    )
    with pytest.warns(SplitWarning) as seen:
        split = group_split(path, "path", shares=HALVES)
    assert any(output in str(w.message) for w in seen)
    assert {p.kind for p in split.problems} == {"label_tied"}


def test_names_that_are_not_unicode(tmp_path):
    odd = os.fsdecode(b"H\xff\n~000001~20240301_120000~8")
    made = pair(tmp_path, {f"LEAK/{odd}": 1, "NO/x1": 2}, {f"LEAK/{odd}": 3, "NO/x2": 4})
    with pytest.warns(LeakySplitWarning, match=re.escape(r"H\xff\n")):
        split = existing_split(made)
    assert [s.kind for s in split.shared] == ["sensor", "recording"]


def test_bad_existing_splits(tmp_path):
    with raises("usage", UsageError, found="training"):
        existing_split({"training": tmp_path / "x.h5"})
    with raises("no-such-file", DataError, path=tmp_path / "x.h5"):
        existing_split({"training": tmp_path / "x.h5", "testing": tmp_path / "y.h5"})


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_by_sensor(plain, monkeypatch):
    assert why_no_split(plain) == "24 recordings are fewer than 300"
    monkeypatch.setattr("leakmel.detector.data.splits._FEW_RECORDINGS", 24)
    assert re.fullmatch(
        "(validation|testing|validation and testing) would have one group by sensor", why_no_split(plain)
    )
    monkeypatch.setattr("leakmel.detector.data.splits._FEW_GROUPS", 7)
    assert "has recordings of 6 groups by sensor, fewer than 7" in why_no_split(plain)
    assert why_no_split(plain, "path") == ""
    split = group_split(plain, shares={"training": 0.5, "validation": 0.25, "testing": 0.25}, seed=3)
    sensors = plain.files["sensor"].to_numpy()
    here = two_sides(split, sensors)
    assert sum(map(len, here)) == 6
    assert not split.leaky
    assert sorted(np.concatenate(list(split.parts.values())).tolist()) == list(range(24))
    assert split.groups is not None
    for rows in split.parts.values():
        assert (2 * split.labels[rows].sum() == len(rows)).all()
    sizes = [len(np.unique(split.groups[rows])) for rows in split.parts.values()]
    assert sizes in ([3, 1, 2], [3, 2, 1])
    again = group_split(plain, shares={"training": 0.5, "validation": 0.25, "testing": 0.25}, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(split.parts.values(), again.parts.values(), strict=True))


@pytest.mark.slow
@quick
@given(st.data(), st.integers(0, 5), st.sampled_from([{"a": 0.5, "b": 0.5}, {"a": 0.7, "b": 0.2, "c": 0.1}]))
def test_groups_are_never_divided(plain, draw, seed, shares):
    "Whatever the groups are: each is in one part, and all parts have all labels, or the split is refused."
    groups = np.array(draw.draw(st.lists(st.integers(1, 12), min_size=24, max_size=24)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeakySplitWarning)  # sensors are divided here
        try:
            split = group_split(plain, groups, shares=shares, seed=seed)
        except DataError:
            return  # refused; test_small_divisions_... tells when
        again = group_split(plain, groups, shares=shares, seed=seed)
    here = two_sides(split, groups)
    assert len(set.union(*here)) == sum(map(len, here))
    assert sorted(np.concatenate(list(split.parts.values())).tolist()) == list(range(24))
    for rows in split.parts.values():
        assert set(plain.labels[rows].tolist()) == {0, 1}
    assert "group" not in [s.kind for s in split.shared]
    assert all(np.array_equal(a, b) for a, b in zip(split.parts.values(), again.parts.values(), strict=True))


@quick
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=6), st.integers(2, 3))
def test_small_sets_are_refused_only_without_a_valid_split(pairs, n_parts):
    counts = np.array(pairs)
    assert n_parts ** len(counts) <= MAX_EXHAUSTIVE
    present = counts[:, counts.sum(0) > 0]

    def whole(parts: np.ndarray) -> bool:
        return all((present[parts == p].sum(0) > 0).all() for p in range(n_parts))

    possible = any(whole(np.array(parts)) for parts in np.ndindex(*(n_parts,) * len(counts)))
    assert whole(divide_groups(counts, np.full(n_parts, 1 / n_parts))) is possible


@each("n_groups", [8, 40])
def test_a_small_share_has_all_labels_too(n_groups):
    "One group is far more than was asked for, and still better than none."
    counts = np.random.default_rng(0).integers(1, 9, (n_groups, 2))
    parts = divide_groups(counts, np.array([0.9989, 0.001, 0.0001]))
    assert sorted(np.unique(parts)) == [0, 1, 2]


@each("seed", range(3))
def test_many_groups_come_close_to_the_shares(seed):
    counts = np.random.default_rng(seed).integers(0, 40, (60, 3))
    wanted = np.array([0.7, 0.15, 0.15])
    parts = divide_groups(counts, wanted, seed)
    got = np.stack([counts[parts == p].sum(0) for p in range(3)]) / counts.sum(0)
    assert abs(got - wanted[:, None]).max() < 0.02


def test_seeds_differ(plain):
    counts = np.ones((40, 2), int)
    assert len({divide_groups(counts, np.array([0.5, 0.5]), seed).tobytes() for seed in range(4)}) > 1


def test_one_recording_in_two_groups_joins_them(tmp_path):
    files = {
        logger(label, f"H{s}", 10 * s + i): 100 * s + i
        for s in range(4)
        for i, label in enumerate(("LEAK", "NO"))
    }
    path = make_set(tmp_path / "x.h5", files | {logger("LEAK", "H0", 99): 7, logger("LEAK", "H3", 98): 7})
    for seed in range(4):
        with lm.open_dataset(path) as ds:
            split = group_split(ds, shares=HALVES, seed=seed)
            here = two_sides(split, ds.files["sensor"].to_numpy())
        assert any({"H0", "H3"} <= s for s in here)
        assert not split.leaky


def test_a_label_on_one_side_is_refused(tmp_path):
    files = {logger("LEAK", "H0", k): k for k in range(4)} | {
        logger("NO", f"H{s}", 10 * s): 50 + s for s in range(5)
    }
    path = make_set(tmp_path / "x.h5", files)
    with raises(
        "label-in-one-part", DataError, found="LEAK is in 1 of 5 groups by sensor", says="all divisions"
    ):
        group_split(path, shares=HALVES)
    split = group_split(path, shares=HALVES, allow_leaky_split=True)
    assert split.leaky
    assert (
        split.stamp
        == "LEAKY SPLIT: the scores are too optimistic. 1 sensor in more than one of training, testing (5 recordings): H0"
    )
    assert "were divided" in split.method
    assert all(set(split.labels[rows].tolist()) == {0, 1} for rows in split.parts.values())
    assert (
        len([s for s in two_sides(split, np.array([0] * 4 + [0, 1, 2, 3, 4])) if 1 in s]) == 1
    )  # the other sensors stay whole
    three = {"training": 0.4, "validation": 0.3, "testing": 0.3}
    few = make_set(tmp_path / "few.h5", {"LEAK/a": 1, "LEAK/b": 2, "NO/c": 3, "NO/d": 4, "NO/e": 5})
    with raises("label-in-one-part", DataError, found="LEAK is in 2 of 5 groups by recording"):
        group_split(few, "path", shares=three, allow_leaky_split=True)
    half = {"training": 0.5714, "testing": 0.4286}
    with raises("label-in-one-part", DataError, says=f"--validation none (in Python shares={half})"):
        group_split(few, "path", shares=three)
    assert len(group_split(few, "path", shares=half).parts) == 2


def test_split_by_another_group_reports_shared_sensors(plain):
    with pytest.warns(LeakySplitWarning, match="sensors in more than one of training, testing"):
        split = group_split(plain, "path", shares=HALVES)
    assert [s.kind for s in split.shared] == ["sensor"]
    split = group_split(plain, r"re:/(H\d)~", shares=HALVES)
    assert not split.leaky
    assert split.method.startswith("Grouped split by match of the pattern")


def test_recordings_without_sensor_are_reported_as_not_compared(tmp_path):
    for k in range(12):
        name = f"s{k % 3}~r{k}~20260101_000000~100.wav" if k < 9 else f"x{k}.wav"
        for label in ("LEAK", "NORMAL"):
            (tmp_path / "data" / label).mkdir(parents=True, exist_ok=True)
            write_wav(
                tmp_path / "data" / label / f"{label}{name}",
                np.random.default_rng([k, len(label)]).integers(-999, 999, 4096).astype(np.int16),
                4096,
            )
    lm.build(
        tmp_path / "data",
        out=tmp_path / "x.h5",
        spec=lm.MelSpec.preset("disjoint", duration_s=1.0),
        progress="none",
    )
    with lm.open_dataset(tmp_path / "x.h5") as ds:
        sensors = ds.files["sensor"].fillna("").replace("", "none").tolist()
    split = group_split(tmp_path / "x.h5", sensors, shares={"training": 0.5, "testing": 0.5})
    assert split.unchecked == ("sensor",)


def test_labels_left_out(plain):
    split = group_split(plain, shares=HALVES, task=make_task(plain.class_names, leave_out=[]))
    assert sum(map(len, split.parts.values())) == 24
    files = {
        f"{label}/{label}{k}": 10 * i + k for i, label in enumerate(("LEAK", "NO", "QUIET")) for k in range(3)
    }
    with pytest.MonkeyPatch.context() as m:
        m.setattr("leakmel.detector.data.splits._tied_labels", lambda *a: ())
        path = make_set(Path(plain.path).parent / "three.h5", files)
        with lm.open_dataset(path) as ds:
            split = group_split(
                ds, "path", shares=HALVES, task=make_task(ds.class_names, leave_out=["QUIET"])
            )
    assert set(split.labels[np.concatenate(list(split.parts.values()))].tolist()) == {0, 1}


def test_group_values():
    table = pd.DataFrame(
        {
            "path": ["a/S1_x.wav", "a/S2_x.wav", "b/x.wav"],
            "sensor": ["A", "", "A"],
            "gain": [1.0, 2.0, np.nan],
        }
    )
    assert group_values(table, re.compile(r"S\d"), missing="one").tolist() == ["S1", "S2", ""]
    assert group_values(table, "gain", missing="one").tolist() == ["1.0", "2.0", ""]
    recordings = table.assign(recording=["r1", "r1", ""])
    assert group_values(recordings, "recording").tolist() == ["r1", "r1", "b/x.wav"], "an unnamed file is one"
    with raises("no-group", DataError, says="1 of 3 recordings have no sensor"):
        group_values(table)
    with raises("unknown-column", UsageError, found="'colour'", expected="path, sensor, gain"):
        group_values(table, "colour")
    with raises("usage", UsageError, found="'re:('"):
        group_values(table, "re:(")
    with raises("lengths-differ", UsageError, found="2 values", expected="3"):
        group_values(table, [1, 2])


def test_missing_group_values_are_distinguished():
    "However a table says it: a column of pandas' own text has a value of its own for that."
    table = pd.DataFrame({"path": ["a/S1_x.wav", None, "b/S2.wav"]})
    columns: list[Any] = [
        [pd.NA, None, "b"],
        pd.Series([None, None, "b"], dtype="string"),
        pd.Categorical([None, None, "b"]),
        [pd.NaT, float("nan"), "b"],
    ]
    for column in columns:
        assert group_values(table, column, missing="one").tolist() == ["", "", "b"]
    assert group_values(table, r"re:S\d", missing="one").tolist() == ["S1", "", "S2"]


@each(
    "group",
    [
        None,
        5,
        {"a": 1, "b": 2},
        frozenset("a"),
        b"ab",
        np.zeros((2, 2)),
        np.array("sensor"),
        re.compile(b"a"),
        "re:a{" + "9" * 30 + "}",
    ],
    ids=repr,
)
def test_invalid_grouping_is_refused(group):
    "A dict would give its keys, a set its members in any order."
    with pytest.raises(UsageError):
        group_values(pd.DataFrame({"path": ["a", "b"]}), group)


@quick
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(["", "1", "2", "3", "4"])),
        min_size=1,
        max_size=20,
    )
)
def test_joined_groups(pairs):
    groups, content = (np.array(x, dtype=object) for x in zip(*pairs, strict=True))
    code = join_groups(groups.astype(str), content)
    assert sorted(set(code.tolist())) == list(range(code.max() + 1))
    for i in range(len(pairs)):
        for j in range(i):
            if groups[i] == groups[j] or (content[i] and content[i] == content[j]):
                assert code[i] == code[j]
    names = {frozenset(groups[code == k].tolist()) for k in code}
    assert sum(map(len, names)) == len(set(groups.tolist()))  # nothing is joined through another group's name


@each(
    "shares",
    [
        {"training": 1.0},
        {},
        {"training": 0.5, "testing": 0.6},
        {"training": 1.0, "testing": 0.0},
        {"a": float("nan"), "b": 0.5},
    ],
)
def test_bad_shares(plain, shares):
    with raises("usage", UsageError):
        group_split(plain, shares=shares)


# ---- sessions, dates, recorders, sites -------------------------------------------------------------------------------


def recordings(**columns: list) -> pd.DataFrame:
    n = len(next(iter(columns.values())))
    return pd.DataFrame({"label": (["LEAK", "NO"] * n)[:n], "content": [""] * n} | columns)


def kinds(table: pd.DataFrame, part: list[int], **more: Any) -> list[str]:
    names = ["training", "validation", "testing"][: max(part) + 1]
    return [s.kind for s in find_shared(table, np.array(part), names, **more)]


FOUR = np.repeat(["A", "B", "C", "D"], 4).tolist()
HALF = [0] * 8 + [1] * 8


@each("kind", ["session", "recorder", "site"])
def test_group_in_two_parts_counts_if_a_split_could_separate_it(kind):
    crossing = recordings(sensor=FOUR, **{kind: ["x", "x", "x", "x", "y", "y", "y", "y"] * 2})
    assert kinds(crossing, HALF) == [kind]
    apart = recordings(sensor=FOUR, **{kind: ["x"] * 8 + ["y"] * 8})
    assert kinds(apart, HALF) == []
    (found,) = find_shared(crossing, np.array(HALF), ["training", "testing"])
    assert str(found) == f"2 {kind}s in more than one of training, testing (16 recordings): x, y"


def test_dates_are_those_of_the_start_times():
    times = [f"2024-03-{1 + k // 4 % 2:02d}T{k:02d}:00:00" for k in range(16)]
    assert kinds(recordings(sensor=FOUR, start_time=times), HALF) == ["date"]
    assert kinds(recordings(start_time=times), [0, 0, 1, 1] * 4) == ["date"]  # no sensor is known
    assert kinds(recordings(start_time=times, date=["1"] * 8 + ["2"] * 8), HALF) == []  # the table's own


@each(
    ("values", "why"),
    [
        (["2024"] * 16, "one night"),
        (["x", "x", "y", "y"] * 4, "loggers that record every night have all of them"),
        ([""] * 16, "not known"),
        (["x"] * 4 + ["y"] * 4 + [""] * 4 + ["z"] * 4, "none in two parts"),
        (["x"] * 4 + ["x"] * 4 + ["x"] * 4 + ["z"] * 4, "what belongs together is larger than a part"),
    ],
)
def test_group_that_no_split_can_separate_is_not_reported(values, why):
    assert kinds(recordings(sensor=FOUR, session=values), HALF) == [], why


def test_each_label_needs_as_many_groups_as_parts():
    table = recordings(sensor=FOUR, site=["x", "x", "x", "x", "y", "y", "y", "y"] * 2)
    table["label"] = ["LEAK" if site == "x" else "NO" for site in table["site"]]
    assert kinds(table, HALF) == []  # both labels in both parts would need two sites of each


def test_a_site_of_a_shared_sensor_adds_nothing():
    table = recordings(sensor=FOUR, site=["x"] * 8 + ["y"] * 8)
    assert kinds(table, [0, 1] * 8) == ["sensor"]
    one = (
        [0, 1, 0, 1] + [0] * 4 + [1] * 8
    )  # sensor A and site x are in two parts, by the same recordings or more
    assert kinds(table, one)[0] == "sensor"
    assert kinds(table, HALF, grouped_by={"site": np.array(["x", "y"] * 8)}) == ["site"]  # always counts


def test_sets_with_two_sessions_are_stamped(tmp_path):
    paths = {
        f"{label}/{s}/{label}{s}{k}": 20 * i + 10 * j + k
        for i, label in enumerate(("LEAK", "NO"))
        for j, s in enumerate("ab")
        for k in range(4)
    }
    for name, seed in paths.items():
        path = tmp_path / "wavs" / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_wav(path, make_sound(seed), 4096)
    out = tmp_path / "x.h5"
    spec = lm.MelSpec(duration_s=1.0)
    found = lm.scan(tmp_path / "wavs", pattern="{label}/{session}/{recording}")
    lm.build(tmp_path / "wavs", manifest=found, out=out, progress="none", check=0, spec=spec)
    with pytest.warns(LeakySplitWarning, match="2 sessions in more than one of training, testing"):
        split = group_split(out, "path", shares=HALVES)
    assert split.stamp.startswith("LEAKY SPLIT: the scores are too optimistic. 2 sessions")
    assert not group_split(out, "session", shares=HALVES).leaky


# ---- remedies --------------------------------------------------------------------------------------------------------


def six_pipes(out: Path) -> Path:
    "Two of six pipes have leaks; every session has both labels."
    spec = lm.MelSpec(duration_s=1.0)
    root = out.parent / "pipes"
    for pipe in range(6):
        for k in range(3):
            label = "LEAK" if pipe < 2 else "NO"
            name = f"{label}/p{pipe}_s{k}_x.wav"
            (root / label).mkdir(parents=True, exist_ok=True)
            write_wav(root / name, make_sound(10 * pipe + k), 4096)
    found = lm.scan(root, pattern="{label}/{sensor}_{session}_{*}")
    return lm.build(root, manifest=found, out=out, progress="none", check=0, spec=spec).path


def test_proposals_of_split_errors_work(tmp_path):
    path = six_pipes(tmp_path / "x.h5")
    with raises("label-in-one-part", DataError, found="LEAK is in 2 of 6 groups by sensor") as caught:
        group_split(path)
    remedy = caught.value.remedy
    assert "--validation none (in Python shares={'training': 0.8235, 'testing': 0.1765})" in remedy
    assert "--cross-validate (lm.cross_validate), where each group is held out once" in remedy
    assert not group_split(path, shares={"training": 0.8235, "testing": 0.1765}).leaky
    with pytest.warns(LeakySplitWarning, match="6 sensors"):
        assert len(group_split(path, group="session").parts) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("default::leakmel.detector.data.splits.LeakySplitWarning")
def test_the_remedies_of_the_command_line_work(tmp_path, capsys, few_trees):
    path = six_pipes(tmp_path / "x.h5")
    words = [
        "train",
        str(path),
        "--kind",
        "binary",
        "--detector",
        "cnn",
        "--epochs",
        "1",
        "--channels",
        "4,8",
        "--device",
        "cpu",
    ]
    assert main([*words, "--out", str(tmp_path / "a"), "--group", "sensor"]) == 1
    output = capsys.readouterr().err
    options = re.findall(r"(--(?:group|validation) [\w ]*?) \(", output)
    assert options == ["--validation none"]
    for k, option in enumerate(options):
        by = [] if "--group" in option else ["--group", "sensor"]
        assert main([*words, "--out", str(tmp_path / str(k)), *by, *option.split(), "--no-evaluation"]) == 0
    assert "--cross-validate (" in output
    validated = ["train", str(path), "--detector", "spectral", "--cross-validate", "--group", "sensor"]
    assert main([*validated, "--out", str(tmp_path / "validated")]) == 0


def test_a_label_to_leave_out_is_proposed(tmp_path):
    files = {
        logger(label, f"H{s}", 10 * s + i): 100 * s + i
        for s in range(3)
        for i, label in enumerate(("LEAK", "NO"))
    }
    path = make_set(tmp_path / "x.h5", files | {logger("HUM", "H0", 99): 7, logger("POP", "H1", 99): 8})
    names = ("HUM", "LEAK", "NO", "POP")
    with raises("label-in-one-part", DataError, says="--leave-out POP,HUM"):
        group_split(path, task=make_task(names, leave_out=["POP"]))
    assert len(group_split(path, task=make_task(names, leave_out=["HUM", "POP"])).parts) == 3
    with raises("label-in-one-part", DataError) as caught:  # a detector without leaks is none
        group_split(path, task=make_task(names, "HUM", leave_out=["POP"]))
    assert "--leave-out" not in caught.value.remedy


# ---- shown -----------------------------------------------------------------------------------------------------------


def test_shared_values():
    part = np.array([0, 1, 1, 0, -1, 0])
    found = shared_values(np.array(["x", "x", "y", "", "y", "z"]), part, ["a", "b"], "sensor")
    assert found is not None
    assert (found.n_values, found.n_recordings, found.parts, found.examples) == (1, 2, ("a", "b"), ("x",))
    assert shared_values(np.array([""] * 6), part, ["a", "b"], "sensor") is None
    many = shared_values(np.repeat(np.arange(9), 2).astype(str), np.tile([0, 1], 9), ["a", "b"], "sensor")
    assert str(many) == "9 sensors in more than one of a, b (18 recordings): 0, 1, 2 ..."


def test_shown_as_text(plain):
    split = group_split(plain, shares=HALVES)
    assert repr(split) == "Split(training 12, testing 12)"
    twice = existing_split({"training": plain, "testing": plain}, allow_leaky_split=True)
    assert [s.kind for s in twice.shared] == list(KINDS)


def test_sites_of_a_table_are_compared_between_data_sets(tmp_path: Path) -> None:
    "From the table of a build to the stamp of a split, and to a split by site or date."
    rng = np.random.default_rng(2)
    rows = ["path,label,split,site,date"]
    for k in range(24):
        part, label = ("training", "testing")[k % 2], ("LEAK", "NOLEAK")[k // 2 % 2]
        (tmp_path / "data").mkdir(exist_ok=True)
        write_wav(tmp_path / "data" / f"{k}.wav", rng.integers(-999, 999, 4096).astype(np.int16), 4096)
        rows.append(f"{k}.wav,{label},{part},site {k // 4 % 3},2025-01-0{k // 4 % 3 + 1}")
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    manifest = lm.scan(tmp_path / "data", table=tmp_path / "t.csv", progress="none")
    lm.build_all(tmp_path / "data", out_dir=tmp_path / "sets", manifest=manifest, check=1, progress="none")
    files = {part: tmp_path / "sets" / f"{part.upper()}_DATASET.H5" for part in ("training", "testing")}
    with pytest.warns(LeakySplitWarning, match="3 dates in more than one of"):
        assert existing_split(files).leaky
    for group in ("site", "date"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", LeakySplitWarning)
            split = group_split(list(files.values()), group, shares={"training": 0.5, "testing": 0.5}, seed=1)
        assert not split.leaky
