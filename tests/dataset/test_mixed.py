"Folders of mixed rates, lengths and channels: built by default, in every layout, and by every printed remedy."

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from each import each
from errors import raises

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, LeakmelError
from leakmel.dataset.inputs import READ_HEADERS, _round_down, decide_spec, propose_build
from leakmel.pages.explore import Explorer, recordings_of_scan
from leakmel.recordings.demo import write_wav
from leakmel.recordings.manifest import scan
from leakmel.recordings.wav import canonical_header

# rate in Hz, seconds, channels, number: the first is the majority
MIXED = ((8000, 2.0, 1, 7), (16_000, 2.0, 1, 2), (8000, 1.0, 2, 1), (8000, 3.5, 1, 2))
QUIET: dict[str, Any] = {"progress": "none"}


def write_mixed(place: Callable[[str, int], Path], kinds: Any = MIXED) -> None:
    "Write recordings of both labels; `place` gives the path of the i-th recording of a label."
    rng = np.random.default_rng(5)
    for label in ("LEAK", "NOLEAK"):
        i = 0
        for rate, seconds, channels, n in kinds:
            for _ in range(n):
                path = place(label, i)
                path.parent.mkdir(parents=True, exist_ok=True)
                samples = rng.integers(-4000, 4000, (round(rate * seconds), channels)).astype(np.int16)
                write_wav(path, samples if channels > 1 else samples[:, 0], rate)
                i += 1


def label_folders(root: Path) -> list[str]:
    write_mixed(lambda label, i: root / label / f"{i}.wav")
    return []


def splits(root: Path) -> list[str]:
    write_mixed(lambda label, i: root / ("TRAINING", "TESTING")[i % 2] / label / f"{i}.wav")
    return ["--split", "all"]


def sessions(root: Path) -> list[str]:
    write_mixed(lambda label, i: root / label / f"night {i % 3}" / f"S{i % 4}~{i}~20250101_0200{i:02d}~8.wav")
    return []


def table(root: Path) -> list[str]:
    write_mixed(lambda label, i: root / f"{label.lower()}{i}.wav")
    rows = [
        f"{p.name},{'LEAK' if p.name.startswith('leak') else 'NOLEAK'},P{p.stat().st_size % 3}"
        for p in sorted(root.iterdir())
    ]
    (root.parent / "labels.csv").write_text("\n".join(["file,label,sensor", *rows]) + "\n")
    return ["--table", str(root.parent / "labels.csv")]


def pattern(root: Path) -> list[str]:
    write_mixed(lambda label, i: root / f"{label}_S{i % 3}_{i}.wav")
    return ["--pattern", "{label}_{sensor}_{*}"]


LAYOUTS = {f.__name__: f for f in (label_folders, splits, sessions, table, pattern)}


@pytest.mark.slow
@each("layout", LAYOUTS)
def test_mixed_folder_is_built_by_default(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    root = tmp_path / "my recordings"
    options = LAYOUTS[layout](root)
    assert main(["scan", str(root), *[o for o in options if o not in ("--split", "all")], "--json"]) == 0
    scanned = json.loads(capsys.readouterr().out)
    command = shlex.split(scanned["proposal"]["command"])
    assert command[:3] == ["leakmel", "build", str(root)]
    assert "8,000 Hz, 2 s, rate and length of" in scanned["proposal"]["reason"]
    os.chdir(tmp_path)  # restored by the fixture below
    assert main([*command[1:], "--json", "--quiet", "--engine", "reference", "--check", "2"]) == 0
    built = json.loads(capsys.readouterr().out)
    parts = built.get("splits", [built])
    total: dict[str, int] = {}
    for part in parts:
        assert part["spec"]["sample_rate"] == 8000
        assert part["spec"]["duration_s"] == 2.0
        for status, n in part["status_counts"].items():
            for word in status.split("+"):
                total[word] = total.get(word, 0) + n
    assert sum(part["rows"] for part in parts) == 24
    assert total == {"resampled": 4, "padded": 2, "downmixed": 2, "cut": 4}
    if len(parts) == 1:
        assert "2 resampled" not in scanned["proposal"]["reason"]
        assert "4 resampled, 2 padded, 4 cut" in scanned["proposal"]["reason"]


@pytest.fixture(autouse=True)
def _same_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_plan_report_and_explore_agree_with_the_build(tmp_path: Path) -> None:
    from build_runs import plan_run

    root = tmp_path / "data"
    label_folders(root)
    plan = plan_run({"data_root": str(root), "out": str(tmp_path / "run")}, **QUIET)
    assert dict(plan.rows())["rate and length"] == (
        "rate and length of 14 of 24 recordings; 4 resampled, 2 padded, 4 cut"
    )
    assert "4,096 samples" not in dict(plan.rows())["windows"]
    assert "long 2,048 samples (256 ms)" in dict(plan.rows())["windows"]
    assert "7.812 Hz per bin" in dict(plan.rows())["windows"]
    result = lm.build(root, out=tmp_path / "x.h5", engine="reference", **QUIET)
    assert result.summary["spec"] == plan.spec.to_dict()
    report = json.loads((tmp_path / "x.h5.report.json").read_text())
    assert report["status_counts"] == result.summary["status_counts"]
    assert Explorer(recordings_of_scan(scan(root, content=True, **QUIET))).spec == plan.spec


def test_recordings_shorter_than_a_segment_do_not_count_for_the_majority(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_mixed(lambda label, i: root / label / f"{i}.wav", ((4096, 10.0, 1, 3), (4096, 0.1, 1, 5)))
    decision = decide_spec(None, scan(root, **QUIET).listings)
    assert (decision.spec.duration_s, decision.counts["padded"]) == (10.0, 10)


def test_sample_is_read_of_many_recordings(tmp_path: Path) -> None:
    root = tmp_path / "data"
    n = READ_HEADERS
    write_mixed(lambda label, i: root / label / f"{i}.wav", ((4096, 0.5, 1, n), (4096, 1.0, 1, 3)))
    listings = scan(root, **QUIET).listings
    decision = decide_spec(None, listings)
    assert (decision.spec.duration_s, decision.n_read, decision.n_recordings) == (0.5, n, 2 * n + 6)
    assert f"of {n} headers read" in decision.changes_text
    write_mixed(lambda label, i: root / label / f"more {i}.wav", ((8000, 1.0, 1, n),))
    decision = decide_spec(None, scan(root, **QUIET).listings)  # the sample is not clear, so all are read
    assert (decision.has_majority, decision.n_read) == (False, decision.n_recordings)


# ---- remedies ----------------------------------------------------------------------------------------------------------


def proposals_in(text: str) -> list[list[str]]:
    "Options that a message proposes, one list for each proposal."
    return [
        shlex.split(found)
        for found in re.findall(r"(--sample-rate [\d.]+ --duration-s [\d.]+|--duration-s [\d.]+) \(", text)
    ]


NO_MAJORITY = {
    "two rates": ((40_000, 5.3, 1, 2), (48_000, 5.3, 1, 2)),
    "all lengths": tuple((40_000 if k % 2 else 48_000, 3 + k / 3, 1, 1) for k in range(8)),
    "slow and short": ((2000, 1.5, 1, 2), (1000, 3.0, 1, 2)),
    "one click": ((8000, 0.3, 1, 1), (8000, 4.0, 1, 2), (8000, 5.0, 1, 2), (8000, 6.0, 1, 2)),
}


TOO_DIFFERENT = ((8000, 0.5, 1, 3), (8000, 6.0, 1, 3))  # each length changes more than half of the samples


@pytest.mark.slow
@each("name", [*NO_MAJORITY, "clips"])
def test_recordings_without_a_majority_build_or_have_proposals(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "data"
    kinds = NO_MAJORITY.get(name, TOO_DIFFERENT)
    caplog.clear()
    write_mixed(lambda label, i: root / label / f"{i}.wav", kinds)
    assert main(["machine", "doctor", str(root)]) == 0
    status = main(["build", str(root), "--out", "x.h5", "--engine", "reference", "--check", "1"])
    text = capsys.readouterr().err
    proposal = propose_build(scan(root, **QUIET), str(root))
    if name == "clips":
        assert (status, proposal.command) == (1, "")
        spec = eval(re.search(r"spec=(\{.*?\})", text)[1])  # type: ignore[index]
        python = lm.build(root, out=tmp_path / "python.h5", spec=spec, engine="reference", check=1, **QUIET)
        assert python.verified.ok
        found = proposals_in(text)
    else:
        assert status == 0
        assert caplog.text.count("The recordings differ: ") == 1
        with h5py.File("x.h5") as f:
            assert len(f["labels"]) == 2 * sum(n for *_, n in kinds)  # none is lost
        assert main([*shlex.split(proposal.command)[1:], "--quiet", "--check", "1"]) == 0
        found = proposals_in("; ".join(proposal.alternatives))
    assert 1 <= len(found) <= 3
    for k, options in enumerate(found):
        assert main(["build", str(root), "--out", f"{k}.h5", *options, "--check", "1", "--quiet"]) == 0
        with h5py.File(f"{k}.h5") as f:
            assert len(f["labels"]) == 2 * sum(n for *_, n in kinds)


def test_build_of_too_different_recordings_leaves_no_files(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_mixed(lambda label, i: root / label / f"{i}.wav", TOO_DIFFERENT)
    for build in (
        lambda: lm.build(root, out=tmp_path / "o" / "x.h5", **QUIET),
        lambda: lm.build_all(root, out_dir=tmp_path / "o", **QUIET),
    ):
        with raises("recordings-differ", DataError, path=root):
            build()
        assert not (tmp_path / "o").exists()


def test_disagreement_is_found_before_band_problems(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_mixed(lambda label, i: root / label / f"{i}.wav", ((4096, 0.5, 1, 2), (8192, 5.0, 1, 2)))
    with raises("recordings-differ"):
        lm.build(root, out=tmp_path / "x.h5", spec={"n_mels": 64}, **QUIET)
    with raises("empty-mel-band") as e:
        lm.build(
            root, out=tmp_path / "x.h5", spec={"n_mels": 400, "sample_rate": 4096, "duration_s": 1.0}, **QUIET
        )
    fewer = re.search(r"n_mels=(\d+)", str(e.value))
    assert fewer
    spec = {"n_mels": int(fewer[1]), "sample_rate": 4096, "duration_s": 1.0}
    assert lm.build(root, out=tmp_path / "x.h5", spec=spec, engine="reference", **QUIET).verified.ok


def test_remedies_of_layout_errors_help(tmp_path: Path) -> None:
    root = tmp_path / "data"
    splits(root)
    with raises("split-not-named") as e:
        lm.build(root, out=tmp_path / "x.h5", **QUIET)
    word = re.search(r"split='(\w+)'", str(e.value))
    assert word
    quick: dict[str, Any] = {"engine": "reference", "check": 1, **QUIET}
    assert lm.build(root, out=tmp_path / "x.h5", split=word[1], **quick).verified.ok
    assert all(r.verified.ok for r in lm.build_all(root, out_dir=tmp_path / "all", **quick))
    with raises("inside-data"):
        lm.build_all(root, out_dir=root / "out", **quick)
    with raises("output-is-folder") as e:
        (tmp_path / "folder").mkdir()
        lm.build(root, out=tmp_path / "folder", split="training", **quick)
    named = re.search(r"for example (\S+)", str(e.value))
    assert named
    assert lm.build(root, out=named[1].rstrip("."), split="training", **quick).verified.ok


def test_parent_of_a_label_folder_is_named(tmp_path: Path) -> None:
    root = tmp_path / "data"
    label_folders(root)
    with pytest.raises(LeakmelError) as e:
        lm.build(root / "LEAK", out=tmp_path / "x.h5", **QUIET)
    assert e.value.code == "no-label-folders"
    assert "parent" in str(e.value)
    assert lm.build(root, out=tmp_path / "x.h5", engine="reference", check=1, **QUIET).verified.ok


# ---- what a scan proposes ------------------------------------------------------------------------------------------------


def test_proposal_names_groups_of_the_table_and_keeps_its_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    root = tmp_path / "data"
    label_folders(root)
    rows = [
        f"{p.relative_to(root)},{p.parent.name},pipe {k % 3}"
        for k, p in enumerate(sorted(root.rglob("*.wav")))
    ]
    (tmp_path / "t.csv").write_text("\n".join(["Datei,Klasse,pipe", *rows]) + "\n")
    words = [str(root), "--table", "t.csv", "--columns", "path=Datei,label=Klasse"]
    assert main(["scan", *words, "--json"]) == 0
    proposal = json.loads(capsys.readouterr().out)["proposal"]
    assert proposal["groups"] == {"pipe": 3}
    assert main([*shlex.split(proposal["command"])[1:], "--quiet", "--check", "1"]) == 0


def test_proposed_file_is_not_among_the_recordings(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    label_folders(root)
    monkeypatch.chdir(root)
    assert main(["scan", ".", "--json"]) == 0
    command = shlex.split(json.loads(capsys.readouterr().out)["proposal"]["command"])
    assert main([*command[1:], "--quiet", "--check", "1"]) == 0
    assert (tmp_path / "data.h5").is_file()


def test_no_command_is_proposed_where_a_build_would_fail(tmp_path: Path) -> None:
    write_mixed(lambda label, i: tmp_path / "flat" / f"{label}{i}.wav")
    write_mixed(lambda label, i: tmp_path / "one empty" / label / f"{i}.wav")
    (tmp_path / "one empty" / "OTHER").mkdir()
    for name in ("flat", "one empty"):
        proposal = propose_build(scan(tmp_path / name, **QUIET), name)
        assert proposal.command == ""
        assert next(proposal.lines()).startswith("No build can be proposed: ")
        with pytest.raises(LeakmelError) as e:
            lm.build(tmp_path / name, out=tmp_path / "x.h5", **QUIET)
        assert str(e.value) == proposal.reason


def test_lengths_that_differ_by_a_little_are_cut_to_the_shortest(tmp_path: Path) -> None:
    "Recorders stop within a few hundred milliseconds: no length has a majority, yet nobody has to choose one."
    lengths = tuple((8000, 6.64 + 0.03 * k, 1, 2) for k in range(12))
    write_mixed(lambda label, i: tmp_path / "in" / label / f"{i}.wav", (*lengths, (8000, 30.0, 1, 1)))
    result = lm.build(tmp_path / "in", out=tmp_path / "x.h5", progress="none")
    assert (result.rows, len(result.rejected)) == (50, 0)
    with lm.open_dataset(result.path) as ds:
        assert (ds.spec.sample_rate, ds.spec.duration_s) == (8000, 6.6)
    decision = decide_spec(None, [lm.scan(tmp_path / "in").listings[0]])
    assert decision.counts["cut"] == 50
    assert "shortest of 48 of 50" in decision.reason


def test_a_new_recording_does_not_change_the_length_of_all(tmp_path: Path) -> None:
    "Else each update of a data set would compute all rows again, and splits that are built one by one would differ."
    rng, decided = np.random.default_rng(0), set()
    for n in (400, 401, 402):
        for i in range(len(list(tmp_path.rglob("*.wav"))), n):
            path, length = (
                tmp_path / ("LEAK", "NOLEAK")[i % 2] / f"{i}.wav",
                int(rng.uniform(9.21, 10.2) * 1000),
            )
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(canonical_header(1000, length))
            os.truncate(path, 44 + 2 * length)
        decided.add(decide_spec({"sample_rate": 1000}, list(lm.scan(tmp_path).listings)).spec.duration_s)
    assert decided == {9.2}


@each(
    ("shortest", "used"), [(6.64, 6.6), (10.0, 10.0), (1.0, 1.0), (0.99, 0.98), (47.3, 46.0), (120.5, 120.0)]
)
def test_lengths_are_rounded_down_by_less_than_five_percent(shortest: float, used: float) -> None:
    assert _round_down(shortest) == used
    assert 0.95 * shortest < used <= shortest
