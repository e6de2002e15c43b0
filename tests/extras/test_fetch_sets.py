"Whole sets of generated recordings: counts, groups, copies, rates, differences, and a detector that is trained with groups apart."

import csv
import json
import os
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import soundfile
from errors import raises
from made_archives import rar_of, zip_of
from made_sets import aghashahi, dongguan, hongkong_hydrophones, hongkong_loggers, raw, wav
from record_server import RecordServer
from tiny_training import tiny

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, OutputError
from leakmel.detector.data.splits import group_split
from leakmel.extras.sets.fetch import FetchedSet

pytestmark = pytest.mark.usefixtures("one_thread")

Publish = Callable[..., RecordServer]


def rows(found: FetchedSet) -> list[dict[str, str]]:
    with found.table.open(newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def get(name: str, folder: Path, **given: Any) -> FetchedSet:
    usual: dict[str, Any] = {"yes": True, "progress": "none"}
    return lm.fetch(name, folder / "set", **usual | given)


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> FetchedSet:
    "The Aghashahi set, from an archive of the whole record that holds the archive of the hydrophones."
    folder = tmp_path_factory.mktemp("testbed")
    whole = {"Hydrophone.zip": zip_of(aghashahi(1.0, tone=300.0)), "Accelerometer.zip": b"not opened"}
    (folder / "tbrnp6vrnj-1.zip").write_bytes(zip_of(whole))
    return get("aghashahi", folder, source=folder / "tbrnp6vrnj-1.zip")


def test_the_test_bed_has_the_counts_of_its_description(testbed: FetchedSet) -> None:
    assert testbed.facts["differences"] == []
    table = rows(testbed)
    assert len(table) == 120
    assert len({r["group"] for r in table}) == 40
    assert len({r["group"] for r in table if r["label"] == "NOLEAK"}) == 8
    assert {r["sensor"] == r["group"] for r in table} == {True}
    assert sorted(p.name for p in (testbed.path / "background").iterdir()) == [
        "Background Noise_H1.wav",
        "Background Noise_H2.wav",
    ]
    assert len(testbed.facts["clipped"]) == 44
    text = (testbed.path / "README.txt").read_text()
    assert "44 files clip" in text
    assert "CC BY 4.0" in text
    assert "Aghashahi" in text
    assert "spreadsheet" in text


def test_headerless_samples_are_equal_sample_for_sample(testbed: FetchedSet) -> None:
    sources = {Path(name).stem: data for name, data in aghashahi(1.0, tone=300.0).items()}
    for r in rows(testbed):
        path = testbed.recordings / r["path"]
        info = soundfile.info(path)
        assert (info.samplerate, info.subtype, info.channels) == (8000, "PCM_16", 1)
        samples = np.frombuffer(sources[path.stem], "<i4")
        assert np.array_equal(lm.read_wav(path).samples[:, 0].astype(np.int64) * 65536, samples)


@pytest.fixture(scope="module")
def mels(testbed: FetchedSet) -> Path:
    manifest = lm.scan(testbed.recordings, table=testbed.table, progress="none")
    out = testbed.path.parent / "mels.h5"
    built = lm.build(
        testbed.recordings, out=out, manifest=manifest, spec={"sample_rate": 8000}, progress="none"
    )
    assert built.rows == 120
    assert built.verified.ok
    return out


def test_a_detector_is_tested_on_groups_that_it_has_not_learned(
    mels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leakmel.detector.model.spectral.N_TREES", 20)
    settings = lm.TrainSettings(detector="spectral")
    found = lm.cross_validate(
        mels, n_folds=2, settings=settings, device="cpu", jobs=1, n_draws=100, progress="none"
    )
    folds = defaultdict(set)
    for name, fold in zip(found.table["group"], found.table["fold"], strict=True):
        folds[name].add(fold)
    assert len(folds) == 40
    assert all(len(own) == 1 for own in folds.values())
    tests = defaultdict(set)  # a physical test with both hydrophones
    for path, fold in zip(found.table["path"], found.table["fold"], strict=True):
        tests["_".join(Path(path).stem.split("_")[:3])].add(fold)
    assert len(tests) == 40
    assert all(len(own) == 1 for own in tests.values())
    assert found.detector.figures["auc"] > 0.9  # the leaks of this set hold a tone


def test_a_trained_detector_has_validation_tests_of_its_own(mels: Path, tmp_path: Path) -> None:
    split = group_split(mels, shares={"training": 0.7, "validation": 0.3})  # by sensor, which has the group
    with lm.open_dataset(mels) as ds:
        stems = ["_".join(Path(p).stem.split("_")[:3]) for p in ds.files["path"]]
    parts = {name: {stems[k] for k in own} for name, own in split.parts.items()}
    assert parts["training"]
    assert parts["validation"]
    assert not parts["training"] & parts["validation"]
    lm.train(mels, split=split, out=tmp_path / "model", settings=tiny(1), device="cpu", progress=False)
    assert (tmp_path / "model" / "model.pt").is_file()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> FetchedSet:
    "The Dongguan set, from three RAR archives in a folder."
    folder = tmp_path_factory.mktemp("clips")
    names = {"leak": "leak acoustic data", "no leak": "no leak acoustic data", "noise": "environmental noise"}
    (folder / "downloads").mkdir()
    for kind, files in dongguan().items():
        inside = {f"{names[kind]}/{name}": data for name, data in files.items()} | {"desktop.ini": b"x"}
        (folder / "downloads" / f"{names[kind]}.rar").write_bytes(rar_of(inside))
    return get("dongguan", folder, source=folder / "downloads")


def test_clips_have_the_counts_of_their_description(clips: FetchedSet) -> None:
    assert clips.facts["differences"] == []
    assert clips.facts["warnings"] == []
    assert len(clips.facts["byte_equal"]) == 36
    assert len(clips.facts["files"]) == 3
    assert "not compared with a published checksum: 3 files" in repr(clips)
    table = rows(clips)
    assert len({r["group"] for r in table}) == 271 + 18 + 33
    assert not {"pressure", "flow"} & set(table[0])


def test_groups_that_share_files_are_joined_and_copies_stay_together(clips: FetchedSet) -> None:
    group = {r["path"]: r["group"] for r in rows(clips)}
    assert all(group[a] == group[b] for a, b in clips.facts["byte_equal"])
    by_name = {r["path"]: Path(r["source"]).name.rsplit("-", 2)[0] for r in rows(clips)}
    joined = [(a, b) for a, b in clips.facts["byte_equal"] if by_name[a] != by_name[b]]
    assert len(joined) >= 5  # of leaks; names of noise end in another way
    problems = lm.scan(clips.recordings, table=clips.table, content=True, progress="none").problems
    assert (problems["kind"] == "duplicate").sum() == 36
    assert not set(problems["kind"]) & {"label_tied", "not_in_table", "missing_file"}


def test_a_rate_that_is_linked_to_the_label_is_named_by_fetch_scan_and_build(
    publish: Publish, tmp_path: Path
) -> None:
    publish("hongkong-hydrophones", hongkong_hydrophones(1.0))
    found = get("hongkong-hydrophones", tmp_path)
    assert found.facts["differences"] == []
    assert len({r["group"] for r in rows(found)}) == 9
    words = "28 of the 28 recordings with 4096 Hz"
    assert "the sample rate gives the label away" in repr(found)
    manifest = lm.scan(found.recordings, table=found.table, content=True, progress="none")
    tied = manifest.problems[manifest.problems["kind"] == "label_tied"]
    assert any(words in message for message in tied["message"]), tied["message"].tolist()
    built = lm.build(
        found.recordings,
        out=tmp_path / "x.h5",
        manifest=manifest,
        spec={"sample_rate": 4096},
        progress="none",
    )
    assert built.summary["problems_by_kind"]["label_tied"] >= 1


def test_loggers_and_their_copies(publish: Publish, tmp_path: Path) -> None:
    publish("hongkong-loggers", hongkong_loggers())
    found = get("hongkong-loggers", tmp_path)
    assert found.facts["differences"] == []
    assert found.facts["counts"]["LEAK"] == 30
    group = {r["path"]: r["group"] for r in rows(found)}
    ((a, b),) = found.facts["byte_equal"]
    assert group[a] == group[b]
    assert Path(a).stem[4:9] != Path(b).stem[4:9]
    assert {r["date"] for r in rows(found)} == {f"2018-{k:02d}-27" for k in range(1, 13)}
    assert {r["material"] for r in rows(found)} == {"metal", "nonmetal"}


def test_a_changed_layout_is_reported_with_its_counts(tmp_path: Path) -> None:
    source = tmp_path / "Hydrophone"
    source.mkdir()
    for k, name in enumerate(("BR_CC_ND_N_H1", "BR_NL_ND_N_H1")):
        (source / f"{name}.raw").write_bytes(raw(k))
    found = get("aghashahi", tmp_path, source=source)
    assert "recordings: 2 found, 120 stated" in found.facts["differences"]
    assert "DIFFERENT from the description: groups: 2 found, 40 stated" in repr(found)
    (source / "BR_NL_ND_N_H1.raw").write_bytes(b"odd")
    with raises("set-changed", DataError, says="BR_NL_ND_N_H1.raw"):
        lm.fetch("aghashahi", tmp_path / "two", source=source, yes=True, progress="none")
    with raises("set-changed", DataError, says="dongguan"):
        lm.fetch("dongguan", tmp_path / "two", source=source, yes=True, progress="none")
    assert sorted(os.listdir(tmp_path)) == ["Hydrophone", "set"]


def test_an_unreadable_recording_is_counted_and_rejected_by_a_build(tmp_path: Path) -> None:
    for label, seed in (("Leak", 1), ("No-Leak", 2)):
        (tmp_path / "Hydrophones" / label).mkdir(parents=True)
        (tmp_path / "Hydrophones" / label / "1.1.01.0001.wav").write_bytes(wav(seed, 4096, 2.0))
    (tmp_path / "Hydrophones" / "Leak" / "1.2.01.0001.wav").write_bytes(wav(3, 4096, 2.0)[:-1000])
    found = get("hongkong-hydrophones", tmp_path, source=tmp_path / "Hydrophones")
    assert [u["path"] for u in found.facts["unreadable"]] == ["LEAK/1.2.01.0001.wav"]
    manifest = lm.scan(found.recordings, table=found.table, progress="none")
    spec = {"sample_rate": 4096, "duration_s": 2.0}
    built = lm.build(found.recordings, out=tmp_path / "x.h5", manifest=manifest, spec=spec, progress="none")
    assert built.rows == 2
    assert [r.code for r in built.rejections] == ["truncated"]


def run(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str, str]:
    status = main([str(w) for w in words])
    out, err = capsys.readouterr()
    return status, out, err


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "H").mkdir()
    for k, name in enumerate(("BR_CC_ND_N_H1", "BR_NL_ND_N_H1")):
        (tmp_path / "H" / f"{name}.raw").write_bytes(raw(k, 2.0))
    words = ["fetch", "aghashahi", "--from", tmp_path / "H", "--out", tmp_path / "my set"]
    status, out, err = run(capsys, *words, "--json")
    assert (status, json.loads(out)["code"]) == (2, "licence-not-accepted")
    assert "Aghashahi" in err
    status, out, err = run(capsys, *words, "--yes")
    assert status == 0
    assert "CC BY 4.0" in err
    for line in out.split("next:\n")[1].splitlines()[:2]:  # scan and build as they are printed
        status, _, err = run(capsys, *shlex.split(line)[1:], "--quiet")
        assert status == 0, (line, err)
    assert (tmp_path / "my set.h5").is_file()
    status, out, _ = run(capsys, "fetch", "--json")
    assert status == 0
    assert [s["name"] for s in json.loads(out)["sets"]][:2] == ["aghashahi", "dongguan"]
    status, out, err = run(capsys, "fetch", "dongwan")
    assert status == 2
    assert "did you mean dongguan" in err


@pytest.mark.slow
def test_nothing_of_it_is_loaded_by_other_commands(tmp_path: Path) -> None:
    code = (
        "import sys, leakmel.cli; leakmel.cli.main(['demo', sys.argv[1], '--files', '8', '--quiet']);"
        "leakmel.cli.main(['build', sys.argv[1], '--split', 'training', '--out', sys.argv[1] + '.h5', '--quiet']);"
        "print([m for m in sys.modules if m.split('.')[0] in ('pooch', 'requests', 'rarfile') or m.startswith('leakmel.extras.sets')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "demo"], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "demo.h5").is_file()
    assert done.stdout.splitlines()[-1] == "[]"


def sites(folder: Path, *labels: str) -> Path:
    "Hydrophone recordings in a folder for each label."
    for k, label in enumerate(labels):
        (folder / label).mkdir(parents=True)
        (folder / label / f"1.{k}.01.0001.wav").write_bytes(wav(k, 4096, 0.1))
    return folder


def test_a_folder_of_unknown_name_is_reported_and_a_missing_label_refused(tmp_path: Path) -> None:
    source = sites(tmp_path / "Acoustic Leak Detection Data", "Leak", "Normal")
    with raises("set-changed", DataError, says="NOLEAK") as caught:
        get("hongkong-hydrophones", tmp_path, source=source)
    assert "Normal" in str(caught.value)
    found = get("hongkong-hydrophones", tmp_path, source=sites(source, "Non-leak"))
    counts = found.facts["counts"]
    assert (counts["LEAK"], counts["NOLEAK"], counts["recordings without a label"]) == (1, 1, 1)
    assert "1 recordings have no label" in repr(found)
    assert "'Normal'" in repr(found)
    assert len(rows(found)) == 2


def test_only_archives_that_are_used_are_named(tmp_path: Path) -> None:
    source = tmp_path / "home"
    source.mkdir()
    clip = "pe-zone 1-NA-NA-hydrophone-0-1.wav"
    for k, name in enumerate(("leak", "no leak", "noise")):
        (source / f"{name}.zip").write_bytes(zip_of({clip: wav(k)}))
    (source / "private.zip").write_bytes(zip_of({"letter.txt": b"x"}))
    found = get("dongguan", tmp_path, source=source)
    assert [f["name"] for f in found.facts["files"]] == ["leak.zip", "no leak.zip", "noise.zip"]
    assert "private" not in (found.path / "set.json").read_text()
    gone = OSError(5, "x", "leak.zip")
    with (
        mock.patch("leakmel.extras.sets.fetch.digest_of_file", side_effect=gone),
        raises("cannot-be-read", DataError, says="again"),
    ):
        get("dongguan", tmp_path / "other", source=source)
    with raises("output-in-source", OutputError, path=source / "set"):
        get("dongguan", source, source=source)
    assert len(os.listdir(source)) == 4


def test_names_that_are_not_utf8_are_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for k, name in enumerate(("leak", "no leak", "noise")):
        (source / name).mkdir(parents=True)
        path = source / name / os.fsdecode(b"p\xff-zone \xfe-NA-NA-hydrophone-0-1.wav")
        path.write_bytes(wav(k))
    found = get("dongguan", tmp_path, source=source)
    assert {r["group"] for r in rows(found)} == {"p\\xff-zone \\xfe-NA-NA-hydrophone"}
