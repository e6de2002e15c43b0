"The quality report: each planted problem is found, and none below its threshold, in a scan, a build and a card."

import json
import os
import re
import shlex
import threading
import tracemalloc
from collections.abc import Iterable
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from errors import raises
from hypothesis import given
from hypothesis import strategies as st

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import MachineError, how_many, noun_of
from leakmel.core.progress import Progress
from leakmel.pages.dashboard import build_card
from leakmel.pages.plots import MAX_POINTS, level_by_label
from leakmel.recordings import manifest as manifest_module
from leakmel.recordings import problems as problems_module
from leakmel.recordings.demo import wav_bytes, write_demo
from leakmel.recordings.manifest import FILES_PER_TASK, read_content, scan
from leakmel.recordings.problems import (
    ALWAYS_SHOWN,
    CLIPPED_SHARE,
    DC_OFFSET,
    DEAD_FILES,
    FACTS,
    KIND_GROUPS,
    WORTH_A_LOOK,
    Columns,
    Problem,
    ProblemReport,
    content_problems,
    count_kinds,
    first_of_each_kind,
    group_of,
    label_auc,
    tied_values,
)

MEANINGS = {kind: text for kinds in KIND_GROUPS.values() for kind, text in kinds.items()}

SPEC = {"sample_rate": 4096, "duration_s": 1}
HEALTHY_RMS = 2000


# -- columns by hand ------------------------------------------------------------------------------------------------------------


def made(n: int = 120, seed: int = 0, splits: int = 3) -> Columns:
    "Healthy recordings: two labels, six sensors, levels that overlap."
    rng, i = np.random.default_rng(seed), np.arange(n)
    return Columns(
        places=("TRAINING", "VALIDATION", "TESTING")[:splits],
        labels=("LEAK", "NOLEAK"),
        split_id=i * splits // n,
        label_id=i % 2,
        path=[b"%s/H%d~%06d.wav" % ((b"LEAK", b"NOLEAK")[k % 2], k // 2 % 6, k) for k in range(n)],
        sensor=np.array([b"H%d" % (k // 2 % 6) for k in range(n)]),
        status=np.full(n, b"ok", "S40"),
        sample_rate=np.full(n, 4096),
        n_samples=np.full(n, 40_960),
        channels=np.ones(n, np.int64),
        encoding=np.full(n, b"pcm16", "S16"),
        digest=np.array([b"%032x" % k for k in range(n)]),
        rms_db=rng.normal(-30, 5, n).astype(np.float32),
        clipped_share=np.zeros(n, np.float32),
        dc_offset=np.zeros(n, np.float32),
        silent=np.zeros(n, bool),
    )


def change(columns: Columns, **values: dict[int, object]) -> Columns:
    "A copy in which some values of some columns differ: change(c, channels={3: 2})."
    out: dict[str, Any] = {}
    for name, at in values.items():
        out[name] = np.array(getattr(columns, name))
        for i, value in at.items():
            out[name][i] = value
    return replace(columns, **out)


def found(columns: Columns, before: tuple[Columns, ...] = ()) -> dict[str, set[str]]:
    "Paths of the problems by kind."
    out: dict[str, set[str]] = {}
    for p in content_problems(columns, before=before):
        out.setdefault(p.kind, set()).add(p.path)
    return out


def test_healthy_recordings_have_no_problem() -> None:
    for seed in range(20):
        assert not found(made(seed=seed))
    assert not found(made(2, splits=1))
    assert not found(replace(made(120), label_id=np.zeros(120, np.int64))), (
        "a set with one label gives nothing away"
    )
    one = made(2)
    assert not found(
        replace(
            one,
            path=[],
            **{
                f.name: getattr(one, f.name)[:0]
                for f in fields(one)
                if isinstance(getattr(one, f.name), np.ndarray)
            },
        )
    )


def test_rate_and_length_are_compared_with_most() -> None:
    c = made()
    odd = change(c, sample_rate={5: 8000}, n_samples={5: 80_000, 7: 40_961, 9: 12_288})
    assert found(odd) == {"other_rate": {c.show(5)}, "other_length": {c.show(7), c.show(9)}}, (
        "80,000 samples at 8 kHz are as long as 40,960 at 4,096 Hz"
    )
    (rate,) = [p for p in content_problems(odd) if p.kind == "other_rate"]
    assert "8000 Hz" in rate.message
    assert "4096 Hz" in rate.message
    (length,) = [p for p in content_problems(odd) if p.path == c.show(9)]
    assert "3 s" in length.message
    assert "10 s" in length.message
    rounded = change(c, sample_rate={5: 44_100}, n_samples={5: 441_004})
    assert set(found(rounded)) == {"other_rate"}, (
        "less than half a sample of the common rate is no other length"
    )
    assert set(found(change(rounded, n_samples={5: 441_006}))) == {"other_rate", "other_length"}


def test_channels() -> None:
    c = made()
    odd = change(
        c,
        channels={2: 2, 3: 2, 4: 3},
        status={2: b"identical_channels", 3: b"downmixed+padded", 4: b"downmixed+opposite_phase+cut"},
    )
    assert found(odd) == {"stereo": {c.show(2), c.show(3), c.show(4)}, "opposite_phase": {c.show(4)}}
    messages = {p.path: p.message for p in content_problems(odd) if p.kind == "stereo"}
    assert "2 identical channels" in messages[c.show(2)]
    assert "2 different channels" in messages[c.show(3)]
    assert "3 different channels" in messages[c.show(4)]


def test_limits_of_clipping_offset_and_silence() -> None:
    c = made()
    assert found(change(c, clipped_share={1: CLIPPED_SHARE * 1.001, 2: CLIPPED_SHARE * 0.999})) == {
        "clipped": {c.show(1)}
    }
    assert found(
        change(c, dc_offset={1: DC_OFFSET * 1.001, 2: -DC_OFFSET * 1.001, 3: DC_OFFSET * 0.999})
    ) == {"dc_offset": {c.show(1), c.show(2)}}
    assert found(change(c, silent={4: True}, dc_offset={4: 0.5})) == {"silent": {c.show(4)}}, (
        "a silent recording has no offset of its own"
    )


# -- sensors --------------------------------------------------------------------------------------------------------------------


def quiet(rms_lsb: float) -> float:
    return float(20 * np.log10(rms_lsb / 32768))


def test_a_sensor_that_never_recorded_anything() -> None:
    c = made()
    mine = np.flatnonzero(c.sensor == b"H3")
    dead = change(c, rms_db={int(i): quiet(2) for i in mine})
    assert found(dead) == {"dead_sensor": {"H3"}}
    (problem,) = content_problems(dead)
    assert f"all {len(mine)} recordings" in problem.message
    assert not found(change(c, rms_db={int(i): quiet(2.01) for i in mine})), "a notch louder"
    assert not found(change(dead, rms_db={int(mine[0]): -30})), "one recording shows that it lives"
    assert not found(change(dead, encoding={int(i): b"pcm24" for i in mine})).get("dead_sensor"), (
        "finer recordings may hold sound there"
    )
    assert found(
        change(
            dead, dc_offset={int(i): 0.004 for i in mine}, rms_db={int(i): 20 * np.log10(0.004) for i in mine}
        )
    ) == {"dead_sensor": {"H3"}}


def test_sensor_needs_three_silent_recordings_to_be_reported() -> None:
    c = made()
    for n in (DEAD_FILES - 1, DEAD_FILES):
        few = change(c, sensor=dict.fromkeys(range(n), b"X9"), silent=dict.fromkeys(range(n), True))
        assert found(few).get("dead_sensor", set()) == ({"X9"} if n == DEAD_FILES else set())
    nameless = change(c, sensor=dict.fromkeys(range(9), b""), silent=dict.fromkeys(range(9), True))
    assert "dead_sensor" not in found(nameless), "recordings of unknown sensors are no sensor"


# -- copies ---------------------------------------------------------------------------------------------------------------------


def test_copies_name_the_first_one() -> None:
    c = made()
    copies = change(c, digest={2: c.digest[0], 4: c.digest[0], 60: c.digest[0], 61: c.digest[1]})
    assert found(copies) == {
        "duplicate": {c.show(2), c.show(4)},
        "duplicate_across_splits": {c.show(60), c.show(61)},
    }
    assert {p.message for p in content_problems(copies) if p.path != c.show(61)} == {
        f"the samples are the same as those of {c.show(0)}"
    }
    noise = change(c, digest={3: c.digest[0]})
    assert found(noise) == {"duplicate": {c.show(3)}, "duplicate_labels": {c.show(3)}}
    assert found(change(c, digest={61: c.digest[0]})) == {
        "duplicate_across_splits": {c.show(61)},
        "duplicate_labels": {c.show(61)},
    }


def test_silent_recordings_are_no_copies() -> None:
    c = made()
    silent = change(c, digest=dict.fromkeys(range(6), b"0" * 32), silent=dict.fromkeys(range(6), True))
    assert set(found(silent)) == {"silent"}


def test_copies_of_splits_that_were_built_before() -> None:
    c, earlier = made(20, splits=1), change(made(30, splits=1), digest={i: b"x%031d" % i for i in range(30)})
    earlier = replace(
        change(earlier, digest={7: c.digest[4], 9: c.digest[5]}, silent={9: True}), places=("EARLIER",)
    )
    assert found(c, (earlier,)) == {"duplicate_across_splits": {c.show(4)}, "duplicate_labels": {c.show(4)}}
    assert {p.message.split(",")[0] for p in content_problems(c, before=(earlier,))} == {
        f"the samples are the same as those of {earlier.show(7)}"
    }


RECORDINGS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 1), st.booleans()), min_size=1, max_size=40
)


@given(RECORDINGS, st.integers(0, 3))
def test_copies_equal_those_found_by_a_dictionary(
    recordings: list[tuple[int, int, int, bool]], cut: int
) -> None:
    "Digest, split, label, silent; walked through one by one. Cut into the splits before and the last one, the last one's are the same."
    recordings = sorted(recordings, key=lambda r: r[1])
    first: dict[int, tuple[int, int, int]] = {}
    first_in: dict[tuple[int, int], int] = {}
    expected: set[tuple[str, int, int]] = set()
    for k, (digest, split, label, is_silent) in enumerate(recordings):
        if is_silent:
            continue
        origin, origin_split, origin_label = first.setdefault(digest, (k, split, label))
        if (twin := first_in.setdefault((digest, split), k)) != k:
            expected.add(("duplicate", k, twin))
        if split != origin_split:
            expected.add(("duplicate_across_splits", k, origin))
        if label != origin_label:
            expected.add(("duplicate_labels", k, origin))

    def columns(rows: list[tuple[int, tuple[int, int, int, bool]]]) -> Columns:
        c = made(len(rows)) if rows else made(1)
        return replace(
            c,
            split_id=np.array([r[1] for _, r in rows], int),
            label_id=np.array([r[2] for _, r in rows], int),
            path=[b"%d" % k for k, _ in rows],
            digest=np.array([b"%032d" % r[0] for _, r in rows], "S32"),
            silent=np.array([r[3] for _, r in rows], bool),
            places=("", "", ""),
        )

    def copies(c: Columns, before: Iterable[Columns] = ()) -> set[tuple[str, int, int]]:
        from leakmel.recordings.problems import _duplicates

        return {
            (p.kind, int(p.path), int(p.message.split(",")[0].rsplit(" ", 1)[1]))
            for p in _duplicates(c, list(before))
        }

    numbered = list(enumerate(recordings))
    assert copies(columns(numbered)) == expected
    before, after = [x for x in numbered if x[1][1] < cut], [x for x in numbered if x[1][1] >= cut]
    if not after:
        return
    parts = [columns([x for x in before if x[1][1] == s]) for s in range(cut)]
    assert copies(columns(after), [p for p in parts if len(p)]) == {
        x for x in expected if recordings[x[1]][1] >= cut
    }


# -- what gives the label away ----------------------------------------------------------------------------------------------------

TIED = {"sample_rate": 8000, "n_samples": 20_480, "channels": 2, "encoding": b"pcm24"}


@each("name", TIED)
def test_a_property_tied_to_a_label(name: str) -> None:
    c = made()
    leaks = np.flatnonzero(c.label_id == 0)
    tied = [
        p
        for p in content_problems(change(c, **{name: {int(i): TIED[name] for i in leaks}}))
        if p.kind == "label_tied"
    ]
    assert {p.path for p in tied} == {"LEAK", "NOLEAK"}
    assert all("a detector would learn the recorder, not the leak" in p.message for p in tied)
    both = change(c, **{name: dict.fromkeys(range(60), TIED[name])})
    assert "label_tied" not in found(both), "the same property under both labels tells nothing"


def test_a_rate_that_a_part_of_the_leaks_has_is_tied_to_the_label() -> None:
    "As in the hydrophone set of Hong Kong: 28 of 40 leaks at 4096 Hz, all others at 8092 Hz."
    c = made(80, splits=1)
    leaks, others = np.flatnonzero(c.label_id == 0), np.flatnonzero(c.label_id == 1)

    def with_slow(slow: np.ndarray) -> Columns:
        rate = np.where(np.isin(np.arange(80), slow), 4096, 8092)
        return replace(c, sample_rate=rate, n_samples=10 * rate)

    named = [p for p in content_problems(with_slow(leaks[:28])) if p.kind == "label_tied"]
    assert [p.path for p in named] == ["LEAK"]
    assert named[0].message.startswith("sample rate: 28 of the 28 recordings with 4096 Hz have this label")
    assert "label_tied" not in found(with_slow(np.concatenate([leaks[:14], others[:14]])))


def tied(n_with: int, of_them: int, n_without: int, of_those: int) -> bool:
    "Whether a value is tied that n_with recordings have, of_them under label 1, while of_those of n_without others are."
    values = np.repeat([7, 8], [n_with, n_without])
    label = np.concatenate([np.arange(n_with) < of_them, np.arange(n_without) < of_those]).astype(int)
    return any(v == 7 for v, *_ in tied_values(values, label))


def test_limits_of_a_property_tied_to_a_label() -> None:
    assert tied(10, 10, 10, 0)
    assert not tied(9, 9, 1000, 0), "nine recordings are not enough"
    assert tied(100, 95, 100, 20)
    assert not tied(100, 94, 100, 20), "94 % are not enough"
    assert not tied(10, 10, 100, 60), "ten of ten may be chance where six of ten are"
    assert tied(40, 40, 100, 60)
    assert not tied(1000, 970, 12, 6), "hardly more than the set as a whole has"
    assert not tied(10_000, 9700, 10_000, 9450), "more than chance, but it does not halve the doubt"
    assert not tied(100, 100, 100, 100), "one label"


def test_random_values_are_not_tied_to_a_label() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        n, n_values, share = int(rng.integers(20, 400)), int(rng.integers(1, 12)), rng.uniform(0.3, 0.97)
        assert not list(tied_values(rng.integers(0, n_values, n), (rng.random(n) < share).astype(int)))


def test_level_that_separates_labels_is_reported() -> None:
    c = made()
    for shift, word in ((25, "louder"), (-25, "quieter")):
        loud = replace(c, rms_db=c.rms_db + np.where(c.label_id == 0, shift, 0).astype(np.float32))
        (problem,) = content_problems(loud)
        assert (problem.kind, problem.path) == ("label_tied", "LEAK")
        assert word in problem.message
    assert not found(replace(c, rms_db=c.rms_db + np.where(c.label_id == 0, 8, 0).astype(np.float32))), (
        "leaks may well be louder"
    )
    few = made(18)
    assert not found(replace(few, rms_db=np.where(few.label_id == 0, -10.0, -50.0))), (
        "nine of a label are not enough"
    )


def test_limits_of_separated_pairs() -> None:
    "10 recordings of a label against 40 of two others: 380 of 400 pairs are 0.95, 379 are less."
    labels = np.concatenate([np.zeros(10, int), 1 + np.arange(40) % 2])
    c = replace(made(50, splits=1), labels=("LEAK", "NOLEAK", "BURST"), label_id=labels)
    for wrong, is_tied in ((20, True), (21, False)):
        level = np.concatenate([[39.5 - wrong], np.full(9, 50.0), np.arange(40)])
        assert label_auc(level, labels)[0] == pytest.approx(1 - wrong / 400)
        for sign in (1, -1):
            assert found(replace(c, rms_db=sign * level / 2 - 50)) == (
                {"label_tied": {"LEAK"}} if is_tied else {}
            )


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 3)), min_size=1, max_size=40))
def test_pair_shares_are_those_of_all_pairs(recordings: list[tuple[int, int]]) -> None:
    values, labels = (np.array(x) for x in zip(*recordings, strict=True))
    shares = label_auc(values.astype(np.float32), labels)
    for k in range(len(shares)):
        mine, others = values[labels == k], values[labels != k]
        pairs = [(a > b) + (a == b) / 2 for a in mine for b in others]
        assert np.isnan(shares[k]) if not pairs else shares[k] == pytest.approx(np.mean(pairs), abs=1e-12)


# -- size -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hundred_thousand_recordings() -> None:
    "Healthy ones within 60 MB, and ones of which each has several problems."
    c = made(100_000)
    tracemalloc.start()
    assert not found(c)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6
    bad = replace(
        c,
        digest=np.full(100_000, b"0" * 32),
        clipped_share=np.ones(100_000, np.float32),
        n_samples=np.arange(1, 100_001),
    )
    assert sum(1 for _ in content_problems(bad)) > 300_000


# -- files ----------------------------------------------------------------------------------------------------------------------


def noise(seed: int, n: int = 4096, level: float = HEALTHY_RMS) -> np.ndarray:
    "Noise that no other seed has."
    return np.rint(np.random.default_rng(seed).normal(0, level, n)).clip(-30_000, 30_000).astype(np.int16)


def put(root: Path, name: str, samples: np.ndarray, rate: int = 4096) -> str:
    "Write a recording below a root; returns its name."
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(wav_bytes(samples, rate))
    return name


def healthy(root: Path, n: int = 12) -> None:
    "Recordings under two labels in two splits."
    for k in range(n):
        label, split = ("LEAK", "NOLEAK")[k % 2], ("TRAINING", "TESTING")[k // 2 % 2]
        put(root, f"{split}/{label}/H{k // 4}~{k:03d}~20250101_000000~8.wav", noise(k))


def kinds_of(problems) -> dict[str, set[str]]:
    "Paths by kind of a table of problems."
    return {kind: set(problems["path"][problems["kind"] == kind]) for kind in problems["kind"]}


@pytest.fixture(scope="module")
def messy(tmp_path_factory) -> tuple[Path, dict[str, set[str]]]:
    "A set with a fault of each kind, and which recordings have it."
    root = tmp_path_factory.mktemp("messy") / "set"
    healthy(root, 16)
    leak, other = "TRAINING/LEAK/H1", "TRAINING/NOLEAK/H1"
    stereo = np.stack([noise(900), noise(900)], axis=1)
    planted = {
        "other_rate": {put(root, f"{leak}~a~x~8.wav", noise(901, 8000), 8000)},
        "other_length": {
            put(root, f"{leak}~b~x~8.wav", noise(902, 3000)),
            put(root, f"{leak}~c~x~8.wav", noise(903, 5000)),
        },
        "stereo": {
            put(root, f"{leak}~d~x~8.wav", stereo),
            put(root, f"{leak}~e~x~8.wav", np.stack([noise(904), -noise(904) // 8 * 7], axis=1)),
        },
        "clipped": {
            put(root, f"{leak}~f~x~8.wav", (noise(905).astype(int) * 40).clip(-32768, 32767).astype(np.int16))
        },
        "silent": {
            put(root, f"TRAINING/LEAK/H9~{k}~x~8.wav", np.full(4096, 100, np.int16)) for k in range(3)
        },
        "dc_offset": {put(root, f"{leak}~g~x~8.wav", noise(906) + np.int16(700))},
        "dead_sensor": {"H9"},
        "duplicate": {put(root, f"{leak}~h~x~8.wav", noise(0)), put(root, f"{other}~i~x~8.wav", noise(0))},
        "duplicate_across_splits": {put(root, "TESTING/LEAK/H1~j~x~8.wav", noise(0))},
        "gain_1": {put(root, f"{leak}~k~x~1.wav", noise(907))},
    }
    planted |= {"opposite_phase": {f"{leak}~e~x~8.wav"}, "duplicate_labels": {f"{other}~i~x~8.wav"}}
    (root / "TRAINING/LEAK/empty.wav").write_bytes(b"")
    return root, planted


def test_each_fault_of_a_messy_set_is_named_and_no_other(messy) -> None:
    root, planted = messy
    problems = scan(root, content=True, progress="none").problems
    assert kinds_of(problems) == planted | {
        "empty": {"TRAINING/LEAK/empty.wav"},
        "missing_split": {"VALIDATION"},
    }
    assert all(problems["message"].str.len() > 10)


def test_build_reports_the_problems_of_a_scan(messy, tmp_path: Path) -> None:
    root, planted = messy
    output: dict[str, set[str]] = {}
    results = lm.build_all(root, out_dir=tmp_path, spec=SPEC, engine="reference", check=4, progress="none")
    for r in results:
        for kind, paths in kinds_of(r.problems).items():
            output.setdefault(kind, set()).update(paths)
        report = json.loads((tmp_path / f"{r.path.name}.report.json").read_text())
        assert report["problems"] == r.problems.to_dict("records")
        assert report["problems_by_kind"] == r.summary["problems_by_kind"] == count_kinds(r.problems["kind"])
    assert output == planted | {"missing_split": {"VALIDATION"}}
    assert set(results[0].rejected["code"]) == {"empty"}
    alone = lm.build(
        root, split="testing", out=tmp_path / "x.h5", spec=SPEC, engine="reference", check=4, progress="none"
    )
    assert "duplicate_across_splits" not in alone.summary["problems_by_kind"], (
        "a split built alone knows nothing of the others"
    )
    same = lm.build(
        root, split="training", out=tmp_path / "y.h5", spec=SPEC, engine="reference", check=4, progress="none"
    ).problems
    seen = scan(root, split="training", content=True, progress="none").problems
    assert kinds_of(same) == {
        k: v
        for k, v in kinds_of(seen).items()
        if group_of(k) == WORTH_A_LOOK or k in ("gain_1", "missing_split")
    }


def test_a_manifest_that_was_read_adds_no_rejected_file_to_the_problems(messy, tmp_path: Path) -> None:
    root, _ = messy
    manifest = scan(root, content=True, progress="none")
    results = lm.build_all(
        root, out_dir=tmp_path, manifest=manifest, spec=SPEC, engine="reference", check=4, progress="none"
    )
    assert "empty" not in {*results[0].problems["kind"], *results[1].problems["kind"]}
    assert not any(p.startswith("TRAINING/") for p in results[1].problems["path"])


def test_notes_are_reported_with_their_split(tmp_path: Path) -> None:
    healthy(tmp_path / "set", 8)
    link = tmp_path / "set" / "TESTING" / "LEAK" / "nowhere.wav"
    link.symlink_to("nothing.wav")
    (tmp_path / "set" / "notes").mkdir()
    training, testing = lm.build_all(
        tmp_path / "set", out_dir=tmp_path, spec=SPEC, engine="reference", check=4, progress="none"
    )
    assert kinds_of(testing.problems) == {
        "link": {"TESTING/LEAK/nowhere.wav"},
        "not_a_split": {"notes"},
        "missing_split": {"VALIDATION"},
    }
    assert set(training.problems["kind"]) == {"not_a_split", "missing_split"}


def test_report_counts_all_problems_and_lists_a_hundred_of_each_kind() -> None:
    found = [Problem(kind, f"{k}.wav", "") for k in range(250) for kind in ("duplicate", "silent")]
    listed = [*first_of_each_kind([*found, Problem("stereo", "x.wav", "")])]
    assert count_kinds(p.kind for p in listed) == {"duplicate": 100, "silent": 100, "stereo": 1}
    assert [p.path for p in listed if p.kind == "silent"] == [f"{k}.wav" for k in range(100)]


def test_padding_does_not_lower_the_clipped_share(tmp_path: Path) -> None:
    "A clipped recording of a tenth of the length: the figures of a build are those of the recording, not of its row."
    healthy(tmp_path / "set", 8)
    name = put(
        tmp_path / "set",
        "TRAINING/LEAK/short.wav",
        np.where(np.arange(409) % 20, noise(1, 409), 32767).astype(np.int16),
    )
    assert name in kinds_of(scan(tmp_path / "set", content=True, progress="none").problems)["clipped"]
    built = lm.build(
        tmp_path / "set",
        split="training",
        out=tmp_path / "x.h5",
        spec=SPEC,
        engine="reference",
        check=4,
        progress="none",
    )
    assert set(built.problems["kind"]) == {"other_length", "missing_split", "clipped", "dc_offset"}


@pytest.mark.parametrize("n_files", [300, pytest.param(1200, marks=pytest.mark.long)])
def test_the_demo_set_is_healthy(tmp_path: Path, n_files: int) -> None:
    write_demo(tmp_path / "set", n_files=n_files)
    assert len(scan(tmp_path / "set", content=True, progress="none").problems) == 0


def test_the_demo_set_s_planted_faults_are_named(tmp_path: Path) -> None:
    planted = {what: path for path, what in write_demo(tmp_path / "set", n_files=120, faults=True).faults}
    by_kind = kinds_of(scan(tmp_path / "set", content=True, progress="none").problems)
    kinds = {
        "8 kHz": "other_rate",
        "two identical channels": "stereo",
        "3 s instead of 10 s": "other_length",
        "clipped": "clipped",
        "silent": "silent",
        "empty file": "empty",
        "header without samples": "empty",
        "truncated": "truncated",
        "git-lfs pointer": "not_wav",
        "float samples with a NaN": "nonfinite",
        "gain 1: the hydrophone was not in the water": "gain_1",
        "directly under the split, without a label": "no_label",
    }
    for what, path in planted.items():
        kind = kinds.get(what) or (
            "duplicate_across_splits"
            if "another split" in what
            else "duplicate"
            if "same content" in what
            else None
        )
        if kind:
            assert path in by_kind[kind], what
        else:
            assert "non-ASCII" in what
    assert {path for kind, paths in by_kind.items() for path in paths} <= set(planted.values()) | set(
        by_kind.get("label_tied", ())
    )
    assert "label_tied" not in by_kind


# -- reading --------------------------------------------------------------------------------------------------------------------


def test_table_of_read_recordings(messy) -> None:
    root, _ = messy
    m = scan(root, content=True, progress="none")
    assert m.content is not None
    assert [*m.content.columns] == ["split", "path", "code", "message", *(FACTS.names or ())]
    assert (
        m.table["path"].tolist()
        == m.content["path"].tolist()
        == [os.fsdecode(p) for x in m.listings for p in x.paths]
    )
    row = m.table.set_index("path").loc["LEAK/H1~e~x~8.wav"]
    assert (row["channels"], row["status"], row["encoding"], row["n_samples"]) == (
        2,
        "downmixed+opposite_phase",
        "pcm16",
        4096,
    )
    lost = m.table[m.table["code"] != ""]
    assert lost["path"].tolist() == ["LEAK/empty.wav"]
    assert lost[["sample_rate", "rms_db", "silent"]].isna().all(axis=None)
    assert lost["digest"].tolist() == [""]


def test_reading_reports_progress_and_holds_one_file_for_each_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy(tmp_path, 5 * FILES_PER_TASK)
    listings = scan(tmp_path).listings
    real, lock, running, most, counts = manifest_module.read_facts, threading.Lock(), [0], [0], []

    def watched(path: bytes) -> tuple:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        try:
            return real(path)
        finally:
            with lock:
                running[0] -= 1

    class Watched(Progress):
        def update(self, n_done: int, note: str = "") -> None:
            counts.append(n_done)
            super().update(n_done, note)

    monkeypatch.setattr(manifest_module, "read_facts", watched)
    monkeypatch.setattr(manifest_module, "Progress", Watched)
    monkeypatch.setattr(manifest_module, "usable_cores", lambda: 3)
    table, problems = read_content(listings, progress="none")
    assert len(table) == counts[-1] == 5 * FILES_PER_TASK
    assert counts == sorted(counts)
    assert not problems
    assert most[0] <= 3


@pytest.mark.parametrize("error", [MachineError("too many open files"), KeyboardInterrupt()])
def test_a_failing_machine_stops_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    healthy(tmp_path, 30 * FILES_PER_TASK)
    calls = []

    def fail(path: bytes) -> tuple:
        calls.append(path)
        raise error

    monkeypatch.setattr(manifest_module, "read_facts", fail)
    monkeypatch.setattr(manifest_module, "usable_cores", lambda: 2)
    with pytest.raises(type(error)):
        read_content(scan(tmp_path).listings, progress="none")
    assert len(calls) < 30, "what has not begun does not begin"


def test_no_memory_is_a_fault_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: bytes) -> None:
        raise MemoryError

    healthy(tmp_path, 2)
    monkeypatch.setattr(problems_module, "read_wav", fail)
    with raises("out-of-memory", MachineError):
        scan(tmp_path, content=True, progress="none")


def test_invalid_samples_are_refused(tmp_path: Path) -> None:
    import soundfile

    healthy(tmp_path, 4)
    soundfile.write(tmp_path / "TRAINING/LEAK/wild.wav", np.full(4096, 1e20), 4096, subtype="FLOAT")
    assert kinds_of(scan(tmp_path, content=True, progress="none").problems)["unsupported"] == {
        "TRAINING/LEAK/wild.wav"
    }


# -- showing --------------------------------------------------------------------------------------------------------------------


def test_every_kind_has_a_meaning_and_one_group() -> None:
    kinds = [kind for names in KIND_GROUPS.values() for kind in names]
    assert len(kinds) == len(set(kinds))
    assert all(MEANINGS[kind] for kind in kinds)
    sources = Path(problems_module.__file__).parent
    output = {
        kind
        for p in sources.glob("*.py")
        for kind in re.findall(r'(?:Problem|leave_out)\("(\w+)"', p.read_text(encoding="utf-8"))
    }
    assert {"duplicate", "gain_1", "link"} <= output
    assert output <= set(kinds), "a kind that is said and not explained"


def test_a_report_stays_bounded() -> None:
    problems = [Problem("duplicate_labels", f"LEAK/{k}.wav", "same samples") for k in range(5000)] + [
        Problem("clipped", "a.wav", "loud")
    ]
    text = repr(ProblemReport(problems, 3))
    assert "    a.wav: loud" in text
    assert len(text.splitlines()) == 1 + 2 + 100 + 1 + 1
    assert f"and {5000 - 100:,} more" in text
    assert "LEAK/0.wav" not in repr(ProblemReport(problems, 0))


def test_definition_of_a_copy(tmp_path: Path) -> None:
    "The same bytes under another name and behind another header are a copy; the same sound in another encoding is none, and the text says so."
    import soundfile

    whole = noise(3).astype(np.float64) / 32768
    for name, subtype in (("a", "PCM_16"), ("b", "PCM_16"), ("c", "PCM_24"), ("d", "FLOAT")):
        path = tmp_path / "LEAK" / f"{name}.wav"
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, whole, 4096, subtype=subtype)
    with (tmp_path / "LEAK" / "b.wav").open("ab") as f:
        f.write(b"LIST\4\0\0\0abcd")
    found_ = scan(tmp_path, content=True, progress="none")
    assert kinds_of(found_.problems)["duplicate"] == {"LEAK/b.wav"}
    assert "another encoding is not found" in repr(found_.report())


class Tags(HTMLParser):
    "Tags and text of a page."

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = [
    "<script>alert(1)</script>.wav",
    '"><img src=x onerror=alert(1)>.wav',
    "a&lt;b>.wav",
    "<!--.wav",
    "new\nline\x1b[31m.wav",
    "caf\udce9.wav",
]


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    for k, name in enumerate(HOSTILE):
        for label in ("LEAK", "<b>NOLEAK"):
            put(tmp_path, f"{label}/{name.replace('/', '')}", noise(k))
    m = scan(tmp_path, content=True, progress="none")
    result = lm.build(
        tmp_path,
        out=tmp_path.parent / f"{tmp_path.name}.h5",
        engine="reference",
        check=2,
        spec=SPEC,
        progress="none",
    )
    for html in (m._repr_html_(), m.report(100)._repr_html_(), build_card([result])._repr_html_()):
        page = Tags(html)
        assert set(page.tags) <= {
            "div",
            "b",
            "p",
            "table",
            "thead",
            "tbody",
            "tr",
            "td",
            "th",
            "code",
            "span",
            "br",
        }
        assert "\n" not in page.text
        assert "\x1b" not in page.text
        html.encode()
    assert "<script>alert(1)<script>.wav" in Tags(m.report(100)._repr_html_()).text
    assert "\x1b" not in repr(m.report(100))


def test_problem_card_counts_and_groups(messy) -> None:
    root, planted = messy
    m = scan(root, content=True, progress="none")
    text = Tags(m._repr_html_()).text
    for group in KIND_GROUPS:
        assert group in text
    for kind in planted:
        assert MEANINGS[kind] in text
    assert "Only file names were checked" not in text
    assert "Only file names were checked" in Tags(scan(root)._repr_html_()).text
    assert not any(word in m._repr_html_() for word in ("background", "color:#")), (
        "the colours of the page, light or dark"
    )
    report = ProblemReport([Problem("clipped", "a.wav", "x")] * 5, most=2)
    assert report.more == 3
    assert "and 3 more" in repr(report)
    assert "and 3 more" in report._repr_html_()
    assert repr(ProblemReport([])) == "No problem was seen."


def test_the_figure_of_levels() -> None:
    rng = np.random.default_rng(0)
    level, labels = rng.normal(-30, 5, 5000), ["LEAK", "<b>NO", "BURST"] * 1666 + ["LEAK", "LEAK"]
    level[np.array(labels) == "BURST"] += 15
    level[:2] = -200
    fig = level_by_label(level, labels)
    assert fig.layout.title.text.startswith("BURST is louder than the others in 9")
    assert "2 silent recordings" in fig.layout.title.subtitle.text
    assert [t.name for t in fig.data] == ["&lt;b&gt;NO (1,665)", "BURST (1,666)", "LEAK (1,667)"]
    for trace in fig.data:
        assert sum(trace.y) == pytest.approx(100, abs=1e-3)
        assert len(trace.x) == len(trace.y) <= MAX_POINTS
    widths = [t.line.width for t in level_by_label([-20.0] * 12, [*"ABCDEF"] * 2).data]
    assert widths == sorted(widths, reverse=True), "what lies below another line shows beside it"
    assert widths[0] > widths[-1]
    assert (
        "half of the recordings are louder than -20 dB"
        in level_by_label([-20.0] * 3, ["LEAK"] * 3).layout.title.text
    )
    assert level_by_label([-200.0], ["LEAK"]).layout.title.text == "No level to show"
    assert len(level_by_label([-1e30, float("nan"), -50.0], ["A"] * 3).data[0].x) < 10


# -- the command line -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def say(capsys):
    "Run the command line: exit status and standard output."

    def run(*argv: object) -> tuple[int, str]:
        status = main([os.fspath(a) if isinstance(a, Path) else str(a) for a in argv])
        return status, capsys.readouterr().out

    return run


def test_exit_codes_of_scan(messy, tmp_path: Path, say) -> None:
    healthy(tmp_path / "good")
    (tmp_path / "good/VALIDATION").mkdir()
    for label in ("LEAK", "NOLEAK"):
        put(tmp_path / "good", f"VALIDATION/{label}/v{label}.wav", noise(len(label) * 50))
    assert [
        say("scan", tmp_path / "good", *more)[0] for more in ((), ("--content",), ("--content", "--strict"))
    ] == [0, 0, 0]
    put(tmp_path / "good", "TRAINING/LEAK/copy.wav", noise(0))
    assert [
        say("scan", tmp_path / "good", *more)[0]
        for more in ((), ("--strict",), ("--content",), ("--content", "--strict"))
    ] == [0, 0, 0, 1]
    (tmp_path / "good/TRAINING/LEAK/bad.wav").write_bytes(b"no wav")
    assert [say("scan", tmp_path / "good", *more)[0] for more in ((), ("--strict",), ("--content",))] == [
        0,
        0,
        1,
    ]
    put(tmp_path / "good", "TRAINING/loose.wav", noise(77))
    assert say("scan", tmp_path / "good")[0] == 1
    assert say("scan", messy[0], "--most", "-1")[0] == 2


def test_help_of_scan_lists_exit_codes(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["scan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for word in (
        "0 no recording would be rejected",
        "1 a recording would be rejected",
        "--strict",
        "any problem",
    ):
        assert word in text


def test_the_text_of_scan_is_grouped(messy, say) -> None:
    root, planted = messy
    _, text = say("scan", root, "--content", "--most", "3")
    for kind, paths in planted.items():
        assert f"  {len(paths)} x {kind}: {MEANINGS[kind]}" in text
    assert [line for line in text.splitlines() if line in {f"{g}:" for g in KIND_GROUPS}] == [
        f"{g}:" for g in KIND_GROUPS
    ]
    kinds = {line.split(" x ")[1].split(":")[0] for line in text.splitlines() if re.match(r"  \d", line)}
    everything = {kind for kind in kinds if kind in ALWAYS_SHOWN}
    assert sum(line.startswith("    ") for line in text.splitlines()) == len(kinds - everything) + sum(
        len(planted.get(k, "x")) for k in everything
    )
    assert "more (--most N, or all)" in text
    assert "--content reads the recordings" not in text


def test_the_json_of_scan(messy, say) -> None:
    root, planted = messy
    body = json.loads(say("scan", root, "--content", "--json")[1])
    assert body["problems_by_kind"] == count_kinds(p["kind"] for p in body["problems"])
    assert {k: n for k, n in body["problems_by_kind"].items() if k in planted} == {
        k: len(v) for k, v in planted.items()
    }
    assert body["would_be_rejected"] == 1


def test_the_text_of_build_counts_problems(messy, tmp_path: Path, say) -> None:
    root, _ = messy
    _, text = say(
        "build",
        root,
        "--split",
        "training",
        "--out",
        tmp_path / "x.h5",
        "--sample-rate",
        "4096",
        "--duration-s",
        "1",
        "--engine",
        "reference",
        "--check",
        "2",
        "--quiet",
    )
    assert all(len(line) <= 100 for line in text.splitlines() if "leakmel " not in line)
    line = " ".join(text.partition("problems: ")[2].split())
    assert "3 x silent" in line
    assert "and 6 more" in line, "the command lists all kinds"
    assert f"leakmel scan {shlex.quote(str(root))} --content" in line


def test_report_of_separating_level_names_what_to_check() -> None:
    c = made()
    level = np.where(c.label_id == 0, -10.0, -40.0)
    told = [
        p.message
        for p in content_problems(change(c, rms_db=dict(enumerate(level))))
        if p.kind == "label_tied"
    ]
    assert len(told) == 1
    assert told[0].endswith(
        "a detector may learn the level alone: check that gain and recorder are the same for all labels"
    )


def test_how_many_uses_the_singular_for_one() -> None:
    assert [how_many(n, "problem") for n in (0, 1, 2, 1000)] == [
        "0 problems",
        "1 problem",
        "2 problems",
        "1,000 problems",
    ]
    nouns = (
        "value of Ort",
        "match of the pattern",
        "recording with the same samples",
        noun_of("sensor"),
        noun_of("Ort"),
    )
    assert [how_many(2, noun) for noun in nouns] == [
        "2 values of Ort",
        "2 matches of the pattern",
        "2 recordings with the same samples",
        "2 sensors",
        "2 values of Ort",
    ]
