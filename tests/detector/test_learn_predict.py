"Recordings of any shape and length are scored as a data set's rows would be, all of them or with a reason; and what is written is whole."

import base64
import csv
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from errors import raises
from left_threads import left_threads
from made_detectors import RATE, made_detector, noise, put, write_mixed

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, EngineError, LeakmelError, OutputError, RecordingError, UsageError
from leakmel.core.progress import Progress
from leakmel.detector.data.segments import (
    Segments,
    conform_recording,
    covered_samples,
    cut_into_rows,
    segment_count,
)
from leakmel.detector.metrics.metrics import VOTES, vote_scores
from leakmel.detector.model.detector import Detector, load_detector, score_rows
from leakmel.detector.predict import predict as prediction
from leakmel.detector.predict.predict import COLUMNS, Predictions, rule_of
from leakmel.detector.predict.scoring import RowBlock
from leakmel.mel.engines import load_class
from leakmel.recordings.demo import write_wav
from leakmel.recordings.manifest import scan

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET: dict[str, Any] = {"progress": "none", "device": "cpu", "engine": "torch"}


def all_scores(p: Predictions) -> dict[bytes, np.ndarray]:
    return {s.path: s.segment_scores for s in p.scored}


def test_csv_file_has_the_bytes_of_the_csv_package(tmp_path):
    names = {name: prediction.COLUMNS[name] for name in ("path", "label", "score", "segment_scores")}
    texts = ["a.wav", "b, c.wav", 'd "e".wav', "", "two\nlines", " f", "ä", '"', ","]
    n = len(texts)
    page: dict[str, Any] = {"path": texts, "label": texts[::-1], "score": np.arange(n) / 7}
    page["segment_scores"] = [np.ones(2)] * n
    prediction._write_csv(tmp_path / "x.csv", names, iter([page, {name: page[name][:0] for name in names}]))
    right = io.StringIO(newline="")
    rows = zip(texts, texts[::-1], [repr(k / 7) for k in range(n)], ["1.000 1.000"] * n, strict=True)
    csv.writer(right, lineterminator="\n").writerows([names, *rows])
    assert (tmp_path / "x.csv").read_bytes() == right.getvalue().encode()


@pytest.mark.slow
def test_scores_are_made_without_pandas():
    "Loading it takes half a second, and only tables need it."
    code = "import sys; from leakmel.detector.predict import predict; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scores_of_segments_are_rounded_as_texts():
    "Also halves of a thousandth, of which each is rounded to the even neighbour."
    scores = np.concatenate([np.random.default_rng(0).random(5000), np.arange(2**12 + 1) / 2**12])
    scores = np.append(scores, np.arange(1000) / 1000 + 0.0005).astype(np.float32)
    each = [scores[k : k + 7] for k in range(0, len(scores), 7)]
    expected = [" ".join([f"{x:.3f}" for x in own.tolist()]) for own in each]
    assert prediction._cells("scores", each) == expected


@pytest.fixture(scope="module")
def detector() -> Detector:
    return made_detector()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed") / "flat")


def test_names_are_the_same_by_folder_and_by_manifest(tmp_path, detector):
    root = tmp_path / "set"
    for k, (split, gain) in enumerate(
        [("TRAINING", "20"), ("TRAINING", "0.1"), ("TESTING", "-1.25"), ("TESTING", "x")]
    ):
        put(root, f"{split}/LEAK/S\udcffensor {k}~{k}~20240101_101010~{gain}.wav", noise(k))
    by_folder = lm.predict(root, detector, **QUIET)
    by_manifest = lm.predict(root, detector, manifest=scan(root, progress="none"), **QUIET)
    for p in (by_folder, by_manifest):
        found = {s.sensor: s.gain for s in p.scored}
        assert {k: v for k, v in found.items() if v == v} == {
            "S\udcffensor 0": 20.0,
            "S\udcffensor 1": 0.1,
            "S\udcffensor 2": -1.25,
        }
        assert np.isnan(found["S\udcffensor 3"])
    assert by_folder.scored.paths == by_manifest.scored.paths


# ---- the same scores as by way of a data set


@pytest.mark.slow
@each("engine", ["auto", "torch", "reference"])
def test_scores_are_those_of_a_data_set(demo, tmp_path, engine):
    built = lm.build(
        demo,
        split="training",
        out=tmp_path / "x.h5",
        engine=engine,
        progress="none",
        pipeline=lm.PipelineConfig(device="cpu"),
    )
    with Segments(built.path, level="recording") as rows:
        detector = made_detector(rows.sources[0].spec)
        right = score_rows(detector, rows)
        paths = rows.sources[0].files["path"].tolist()
        columns = rows.sources[0].files
    p = lm.predict(demo, detector, split="training", engine=engine, device="cpu", progress="none")
    assert [os.fsdecode(s.path) for s in p.scored] == [f"TRAINING/{path}" for path in paths]
    assert np.array_equal(np.stack([s.segment_scores for s in p.scored]), right)
    assert p.engine == built.summary["engine"]
    for name in ("rms_db", "clipped_share", "sample_rate", "silent", "status", "sensor", "gain"):
        assert p.table[name].tolist() == columns[name].tolist(), name


@pytest.mark.parametrize("preset", ["disjoint", "overlap"])
def test_lengths_and_rates_as_a_data_set_has_them(mixed, tmp_path, preset):
    "Cut, resampled and downmixed rows too, and of padded ones what was recorded."
    spec = lm.MelSpec.preset(preset, duration_s=1.0)
    shutil.copytree(mixed, tmp_path / "data" / "A")
    built = lm.build(
        tmp_path / "data",
        out=tmp_path / "x.h5",
        spec=spec,
        progress="none",
        engine="torch",
        pipeline=lm.PipelineConfig(device="cpu"),
    )
    detector = made_detector(spec)
    with Segments(built.path, level="recording") as rows:
        right, heard, files = score_rows(detector, rows), rows.segment_counts, rows.sources[0].files
        kept, left_out = files.iloc[rows.rows], files.drop(index=rows.rows.tolist())
    p = lm.predict(mixed, detector, length="spec", **QUIET)
    assert [f"A/{os.fsdecode(s.path)}" for s in p.scored] == kept["path"].tolist()
    for s, row, n in zip(p.scored, right, heard, strict=True):
        assert np.abs(s.segment_scores - row[:n]).max() < 1e-6
    assert p.table["status"].tolist() == kept["status"].tolist()
    codes = dict(zip(built.rejected["path"], built.rejected["code"], strict=True)) | dict.fromkeys(
        left_out["path"], "too_short"
    )
    assert {
        f"A/{path}": code for path, code in zip(p.rejected["path"], p.rejected["code"], strict=True)
    } == codes
    assert left_out["path"].tolist() == ["A/tiny.wav"]


@pytest.mark.parametrize("preset", ["disjoint", "overlap"])
def test_a_long_recording_is_scored_to_its_end(mixed, preset):
    "As by a spec that is as long as the recording, segment for segment; none of silence."
    spec = lm.MelSpec.preset(preset, duration_s=1.0)
    detector = made_detector(spec)
    found = all_scores(lm.predict(mixed, detector, **QUIET))
    for name in (b"long.wav", b"short.wav", b"fast.wav", b"same size.wav", b"stereo.wav"):
        row = conform_recording(lm.read_wav(os.fsencode(mixed) + b"/" + name), spec)[0]
        own = lm.MelSpec.preset(preset, duration_s=len(row) / RATE)
        right = detector.segment_scores(torch.from_numpy(lm.log_mel(row, own, engine="torch")[None]).half())[
            0
        ].numpy()
        assert len(found[name]) == own.row_shape[0] == segment_count(len(row), spec)
        assert np.abs(found[name] - right).max() < 1e-5, name


def test_scored_segments_and_seconds_are_reported(mixed, detector):
    table = lm.predict(mixed, detector, **QUIET).table.set_index("path")
    assert table.loc["long.wav", ["n_segments", "scored_s"]].tolist() == [160, 40.0]  # type: ignore[operator]
    assert table.loc["short.wav", ["n_segments", "scored_s"]].tolist() == [2, 0.5]  # type: ignore[operator]
    assert table.loc[  # type: ignore[operator]
        "fast.wav", ["n_segments", "scored_s", "duration_s", "sample_rate", "status"]
    ].tolist() == [24, 6.0, 6.0, 8000, "resampled"]
    assert table.loc["same size.wav", ["n_segments", "duration_s"]].tolist() == [2, 0.5], (  # type: ignore[operator]
        "told by its header and not by its size"
    )
    assert table.loc["plain3.wav", ["n_segments", "scored_s", "status"]].tolist() == [4, 1.0, "ok"]  # type: ignore[operator]


@each(
    "settings",
    [
        {"files_per_batch": 1},
        {"files_per_batch": 3, "read_workers": 4},
        {"files_per_batch": 3, "read_workers": 4, "engine": "cpu"},
        {"files_per_batch": 1000},
        {"read_workers": 1},
    ],
)
def test_batches_and_threads_change_no_score(mixed, detector, settings):
    right = lm.predict(mixed, detector, **QUIET | {"engine": settings.get("engine", "torch")})
    found = lm.predict(mixed, detector, **QUIET | settings)
    assert found.rejections == right.rejections
    for (path, a), (other, b) in zip(all_scores(right).items(), all_scores(found).items(), strict=True):
        assert path == other
        assert np.abs(a - b).max() < 1e-5


@pytest.mark.parametrize(("engine", "lane"), [("cpu", "reader"), ("torch", "scorer")])
def test_threads_that_compute_the_features(mixed, detector, monkeypatch, engine, lane):
    "Those that read, in parallel; with torch the one that scores, because its threads are one setting for both."
    used, kind = set[str](), load_class(engine)
    run = kind.run

    def noted(self: Any, *arrays: np.ndarray) -> np.ndarray:
        used.add(threading.current_thread().name)
        return run(self, *arrays)

    monkeypatch.setattr(kind, "run", noted)
    lm.predict(mixed, detector, **QUIET | {"engine": engine})
    used -= {threading.current_thread().name}  # of the self-check
    assert used
    assert all(name.startswith(f"leakmel-{lane}") for name in used)


@pytest.mark.slow
def test_a_cluster_gives_the_same_table(mixed, detector, tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "_LEAST_IN_PART", 1)
    with ThreadPoolExecutor(3) as cluster:
        manifest = lm.scan(mixed, progress="none")
        listed: list[dict[str, Any]] = [{}, {"manifest": manifest}]
        for k, given in enumerate(listed):
            outs = [tmp_path / f"{k}-{where}.csv" for where in ("here", "there")]
            one = lm.predict(mixed, detector, out=outs[0], progress="none", device="cpu", **given)
            many = lm.predict(
                mixed, detector, out=outs[1], progress="none", device="cpu", cluster=cluster, **given
            )
            assert outs[0].read_bytes() == outs[1].read_bytes()
            assert [r.path for r in one.rejections] == [r.path for r in many.rejections]
            assert (one.engine, one.device) == (many.engine, many.device)


@pytest.mark.slow
def test_objects_give_the_same_table_as_the_folder(mixed, detector, model, tmp_path, monkeypatch):
    pytest.importorskip("moto")
    from object_server import ObjectServer

    server = ObjectServer()
    try:
        server.connect()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = server.put_folder(mixed, "mixed")
        here, there = (lm.predict(root, detector, **QUIET) for root in (mixed, url))
        assert there.table.drop(columns="segment_scores").equals(here.table.drop(columns="segment_scores"))
        assert (there.rejections, there.summary["folder"]) == (here.rejections, url)
        there.write(tmp_path / "there.csv")
        here.write(tmp_path / "here.csv")
        assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
        words = ["--model", str(model), "--device", "cpu", "--engine", "torch", "--quiet"]
        for root, name in ((mixed, "a.csv"), (url, "b.csv")):
            assert main(["predict", str(root), *words, "--out", str(tmp_path / name), "--report"]) == 0
            assert (tmp_path / name).with_suffix(".report.html").is_file()
        assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    finally:
        server.close()


def test_fake_device_gives_the_same_scores(mixed, detector):
    "Copies, features and net as a GPU does them, 16-bit and float recordings mixed."
    right = lm.predict(mixed, detector, **QUIET)
    found = lm.predict(mixed, detector, **(QUIET | {"device": "fake"}), files_per_batch=3)
    assert (found.engine, found.device) == ("torch@3/fake", "fake:0")
    for name in ("path", "rms_db", "status", "n_segments"):
        assert found.table[name].tolist() == right.table[name].tolist()
    for a, b in zip(all_scores(right).values(), all_scores(found).values(), strict=True):
        assert np.abs(a - b).max() < 5e-3


@pytest.mark.gpu
def test_gpu_gives_the_same_scores(mixed, detector):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    right = lm.predict(mixed, detector, **QUIET)
    for engine in ("auto", "torch", "reference"):
        found = lm.predict(mixed, detector, engine=engine, device="cuda", progress="none", files_per_batch=4)
        assert found.device == "cuda:0"
        for a, b in zip(all_scores(right).values(), all_scores(found).values(), strict=True):
            assert np.abs(a - b).max() < 2e-2
    detector.classifier.to("cpu")


def test_cut_rows_hold_every_segment_once():
    "Any length, any hop: segment j of the recording is segment j - first of its row."
    rng = np.random.default_rng(0)
    for _ in range(60):
        hop = int(rng.choice([512, 700, 1024, 1500]))
        spec = lm.MelSpec.preset("disjoint", duration_s=float(rng.integers(1, 4)), long_hop=hop)
        x = np.arange(rng.integers(1024, 30_000)).astype(np.float32)
        rows, counts = cut_into_rows(x, spec)
        starts = [
            row[j * hop : j * hop + 1024] for row, n in zip(rows, counts, strict=True) for j in range(n)
        ]
        assert len(starts) == segment_count(len(x), spec)
        for j, piece in enumerate(starts):
            assert np.array_equal(piece, x[j * hop : j * hop + 1024])
        assert covered_samples(len(starts), spec) <= len(x) < covered_samples(len(starts) + 1, spec)


# ---- which recordings


def test_scored_and_rejected_recordings_are_complete(mixed, detector):
    p = lm.predict(mixed, detector, **QUIET)
    assert p.found == len(list(mixed.iterdir())) == len(p) + len(p.rejections)
    assert p.rejected[["path", "code"]].values.tolist() == [
        ["broken.wav", "not_wav"],
        ["tiny.wav", "too_short"],
    ]
    assert [s.path for s in p.scored] == sorted(s.path for s in p.scored)


def test_predict_and_build_reject_the_same_files(tmp_path, detector):
    "In a messy tree the builds and the detector reject the same files, but for those that only lack a label."
    from messy import (
        write_messy,
    )  # needs soundfile, which a CUDA image has not, and a test of this file runs on one

    messy = write_messy(tmp_path / "messy")
    for split in ("TRAINING", "VALIDATION"):
        p = lm.predict(messy.root, detector, split=split.lower(), length="spec", **QUIET)
        planted = {f.below_root: f for f in messy.of(split)}
        assert {s.path for s in p.scored} | {r.path for r in p.rejections} == set(planted)
        for r in p.rejections:
            assert planted[r.path].code == r.code
        for s in p.scored:
            assert planted[s.path].status == s.status or planted[s.path].code == "no_label"
            assert s.label == (planted[s.path].label or "")
    whole = lm.predict(messy.root, detector, **QUIET)
    seen = {
        os.path.realpath(os.path.join(os.fsencode(messy.root), p))
        for p in [*(s.path for s in whole.scored), *(r.path for r in whole.rejections)]
    }
    assert {
        os.path.realpath(os.path.join(os.fsencode(messy.root), f.below_root)) for f in messy.files
    } <= seen, "once, where a link leads there too"


def test_seconds_end_when_the_table_is_written(mixed, detector, tmp_path, monkeypatch):
    write = prediction._write_csv

    def slowly(*given):
        time.sleep(0.2)
        write(*given)

    monkeypatch.setattr(prediction, "_write_csv", slowly)
    p = lm.predict(mixed, detector, out=tmp_path / "x.csv", **QUIET)
    assert p.seconds > 0.4
    assert p.files_per_s == p.found / p.seconds


def test_scored_recordings_are_a_sequence(mixed, detector):
    p = lm.predict(mixed, detector, **QUIET)
    every = list(p.scored)
    assert len(every) == len(p) > 2
    assert p.scored[-1].path == every[-1].path
    assert [s.path for s in p.scored[1:]] == [s.path for s in every[1:]]
    columns = vars(p.scored)
    columns = columns | {"path": columns["paths"], "segment_scores": list(columns["segment_scores"])}
    for name in every[0]._fields:
        for found, expected in zip((getattr(s, name) for s in every), columns[name], strict=True):
            assert np.array_equal(found, expected, equal_nan=name == "gain"), name
    assert p.score.tolist() == [p.rule.score(s.segment_scores) for s in every]
    assert [row["path"] for row in p.rows()] == p.table["path"].tolist()


def test_folders_of_any_shape(tmp_path, detector, mixed):
    demo = tmp_path / "demo"
    lm.write_demo(demo, n_files=12)
    everything = lm.predict(demo, detector, **QUIET)
    assert len(everything) == 12
    assert {s.label for s in everything.scored} == {p.name for p in (demo / "TRAINING").iterdir()}
    one = lm.predict(demo, detector, split="testing", **QUIET)
    assert {s.path for s in one.scored} == {
        s.path for s in everything.scored if s.path.startswith(b"TESTING/")
    }
    named = lm.predict(demo, detector, manifest=scan(demo), **QUIET)
    assert named.table.drop(columns="segment_scores").equals(everything.table.drop(columns="segment_scores"))
    assert all(s.label == "" for s in lm.predict(mixed, detector, **QUIET).scored)
    for wrong, what in (
        ({"split": "night"}, DataError),
        ({"manifest": scan(tmp_path / "demo" / "TRAINING")}, UsageError),
    ):
        with pytest.raises(what):
            lm.predict(demo, detector, **QUIET, **wrong)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(DataError):
            lm.predict(folder, detector, **QUIET)


def test_a_table_names_the_recordings(tmp_path, detector, mixed):
    (tmp_path / "list.csv").write_text("path,label\nplain5.wav,X\nplain1.wav,Y\nnot there.wav,X\n")
    p = lm.predict(mixed, detector, manifest=scan(mixed, table=tmp_path / "list.csv"), **QUIET)
    assert [(s.path, s.label) for s in p.scored] == [(b"plain1.wav", "Y"), (b"plain5.wav", "X")]
    assert p.rejected[["path", "code"]].values.tolist() == [["not there.wav", "unreadable"]]


def test_names_that_are_not_unicode(tmp_path, detector):
    folder = tmp_path / "wav"
    folder.mkdir()
    for name in (b"a\xff.wav", b"line\nbreak,comma.wav", "Größe.wav".encode(), b"=1+1.wav"):
        write_wav(os.fsdecode(os.fsencode(folder) + b"/" + name), noise(1))
    p = lm.predict(folder, detector, out=tmp_path / "scores.csv", all_columns=True, **QUIET)
    with (tmp_path / "scores.csv").open(encoding="utf-8", newline="") as f:
        read = list(csv.DictReader(f))
    assert [r["path"] for r in read] == [
        "=1+1.wav",
        "Größe.wav",
        r"a\xff.wav",
        r"line\nbreak,comma.wav",
    ] or len(read) == 4
    assert (
        {base64.b64decode(r["path_base64"]) or r["path"].encode() for r in read}
        == {s.path for s in p.scored}
        == set(os.listdir(os.fsencode(folder)))
    )
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 5


def test_problems_of_recordings_are_reported(tmp_path, detector):
    folder = tmp_path / "wav"
    put(folder, "S1~7~20240101_000000~1.wav", noise(1))
    put(folder, "S1~8~20240101_000000~24.wav", noise(1))
    put(folder, "silent.wav", np.zeros(RATE, np.int16))
    put(
        folder,
        "clipped.wav",
        np.clip(noise(2, level=32_000).astype(int) * 4, -32_768, 32_767).astype(np.int16),
    )
    put(folder, "opposite.wav", np.stack([noise(3), -noise(3)], 1))
    table = lm.predict(folder, detector, **QUIET).table.set_index("path")
    assert table.index[table["dry"]].tolist() == ["S1~7~20240101_000000~1.wav"]
    assert table.index[table["silent"]].tolist() == ["silent.wav"]
    assert table.index[table["opposite_phase"]].tolist() == ["opposite.wav"]
    assert table.index[table["clipped_share"] > 0.1].tolist() == ["clipped.wav"]
    assert table.loc["silent.wav", "rms_db"] == -200


# ---- verdicts


@each("vote", [None, *VOTES])
def test_votes_and_thresholds(mixed, tmp_path, vote):
    "The model's threshold belongs to its rule; what is given wins; a score at the threshold is a leak."
    thresholds = {"mean": 0.4, "long_vote": 0.55, "any_long": 0.9, "frac_vote": 0.6}
    model = made_detector(thresholds=thresholds, threshold_from="validation", vote="long_vote", share=0.25)
    p = lm.predict(mixed, model, vote=vote, **QUIET)
    rule = vote or "long_vote"
    assert (p.rule.vote, p.rule.threshold, p.rule.frac, p.rule.threshold_from) == (
        rule,
        thresholds[rule],
        0.25,
        "validation",
    )
    for s, row in zip(p.scored, p.rows(), strict=True):
        assert row["score"] == vote_scores(s.segment_scores, rule, 0.25)
        assert row["leak"] == (row["score"] >= thresholds[rule])
        if rule == "long_vote":
            assert row["leak"] == (row["leak_share"] >= 0.5)
        if rule == "frac_vote":
            assert row["leak"] == (row["leak_share"] >= 0.25)
        if rule == "any_long":
            assert row["leak"] == (row["leak_share"] > 0)
    edge = sorted(row["score"] for row in p.rows())[3]
    own: dict[str, Any] = {"frac": 0.25} if rule == "frac_vote" else {}
    at = lm.predict(mixed, model, vote=vote, threshold=edge, out=tmp_path / "x.csv", **own, **QUIET)
    assert at.rule.threshold_from == "given"
    assert at.summary["leaks"] == sum(row["score"] >= edge for row in p.rows())
    with (tmp_path / "x.csv").open() as f:
        read = list(csv.DictReader(f))
    assert [int(r["leak"]) for r in read] == [
        int(float(r["score"]) >= float(r["threshold"])) for r in read
    ], "also as they are written"


@each(
    ("wrong", "kind"),
    [
        ({"vote": "half"}, UsageError),
        ({"threshold": 1.5}, UsageError),
        ({"threshold": float("nan")}, UsageError),
        ({"frac": 0.0}, UsageError),
        ({"frac": 0.3}, UsageError),
        ({"frac": 0.3, "vote": "mean"}, UsageError),
        ({"frac": 0.0, "vote": "frac_vote"}, UsageError),
        ({"length": "all"}, UsageError),
        ({"engine": "gpu"}, UsageError),
        ({"device": "tpu"}, UsageError),
        ({"files_per_batch": 0}, UsageError),
        ({"read_workers": 1.5}, UsageError),
        ({"device": "cuda:77"}, UsageError),
    ],
)
def test_settings_that_do_not_exist(mixed, detector, tmp_path, wrong, kind):
    with pytest.raises(kind):
        lm.predict(mixed, detector, out=tmp_path / "x" / "x.csv", **(QUIET | wrong))
    assert not (tmp_path / "x").exists()


def test_share_is_refused_without_its_vote():
    "A share that no vote asks for would change nothing; where the model's own vote asks for it, it may be given alone."
    with raises("unused-option", UsageError, found="frac 0.3 with mean"):
        rule_of(made_detector(), frac=0.3, threshold=0.4)
    assert (
        rule_of(made_detector(vote="frac_vote"), frac=0.3).frac
        == rule_of(made_detector(), "frac_vote", frac=0.3).frac
        == 0.3
    )


def test_a_model_that_cannot_be_used(mixed, tmp_path):
    (tmp_path / "model.pt").write_bytes(b"nothing")
    for model in (tmp_path / "model.pt", tmp_path / "none.pt"):
        with pytest.raises(LeakmelError):
            lm.predict(mixed, model, **QUIET)
    earlier = made_detector()
    earlier.spec = None
    with raises("no-spec", UsageError):
        lm.predict(mixed, earlier, **QUIET)


# ---- faults on the way


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_failing_model_ends_the_prediction_cleanly(mixed, monkeypatch, tmp_path, device):
    calls = []

    def fail(*args: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("no such kernel")
        return torch.zeros(args[1].shape[:2])

    monkeypatch.setattr(Detector, "segment_scores", fail)
    with pytest.raises((RuntimeError, EngineError), match="no such kernel"):
        lm.predict(
            mixed, made_detector(), out=tmp_path / "x.csv", **(QUIET | {"device": device}), files_per_batch=2
        )
    assert os.listdir(tmp_path) == []


def test_failing_reader_ends_the_prediction_cleanly(mixed, detector, monkeypatch):
    def fail(self: RowBlock, *args: Any) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(RowBlock, "put", fail)
    with pytest.raises(LeakmelError, match="Input/output error"):
        lm.predict(mixed, detector, **QUIET)


def test_ctrl_c_ends_the_prediction_cleanly(mixed, detector, monkeypatch, tmp_path):
    def interrupt(self: Progress, *args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lm.predict(mixed, detector, out=tmp_path / "new" / "x.csv", **QUIET)
    assert os.listdir(tmp_path) == []
    assert not left_threads()


def test_other_rates_are_rejected_without_resampling(mixed):
    p = lm.predict(
        mixed, made_detector(lm.MelSpec.preset("disjoint", duration_s=1.0, rate="reject")), **QUIET
    )
    assert [r.path for r in p.rejections if r.code == "wrong_rate"] == [b"fast.wav", b"same size.wav"]


def test_nan_scores_are_not_returned(mixed):
    broken = made_detector()
    with torch.no_grad():
        broken.classifier.get_parameter("classes.weight").fill_(torch.nan)
    with raises("scores-not-finite", DataError):
        lm.predict(mixed, broken, **QUIET)


# ---- files


def test_the_same_recordings_give_the_same_bytes(mixed, detector, tmp_path):
    for k in (1, 2):
        out = tmp_path / f"{k}" / "scores.csv"
        lm.predict(mixed, detector, out=out, all_columns=True, **QUIET, read_workers=k)
    for name in ("scores.csv", "scores.rejected.csv"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    with (tmp_path / "1" / "scores.csv").open() as f:
        assert tuple(next(csv.reader(f))) == tuple(COLUMNS)


def test_output_file_is_complete_or_missing(mixed, detector, tmp_path, monkeypatch):
    out = tmp_path / "scores.csv"
    lm.predict(mixed, detector, out=out, **QUIET)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError):
        lm.predict(mixed, detector, out=out, threshold=0.9, **QUIET)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_foreign_files_are_not_overwritten(mixed, detector, tmp_path):
    mine = tmp_path / "mine.csv"
    mine.write_text("date,depth\n")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "b.rejected.csv").write_text("date,depth\n")
    for out in (mine, tmp_path / "folder.csv", tmp_path / "b.csv", mixed / "x.csv", tmp_path / "scores.xlsx"):
        with pytest.raises(OutputError):
            lm.predict(mixed, detector, out=out, **QUIET)
    assert mine.read_text() == "date,depth\n"
    assert sorted(os.listdir(tmp_path)) == ["b.rejected.csv", "folder.csv", "mine.csv"]
    assert not list(mixed.glob("*.csv"))


# ---- command line


@pytest.fixture(scope="module")
def model(tmp_path_factory, detector) -> Path:
    return detector.save(tmp_path_factory.mktemp("model") / "model.pt")


def test_command(mixed, model, tmp_path, capsys):
    out = tmp_path / "results" / "scores.csv"
    words = ["predict", str(mixed), "--model", str(model), "--device", "cpu", "--engine", "torch"]
    assert main([*words, "--quiet", "--out", str(out), "--vote", "any_long", "--threshold", "0.6"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "13 of 13 recordings are leaks at threshold 0.6 (100 %), the most suspicious first:\n"
    )
    assert text.endswith(f"next: leakmel review {mixed} --scores {out}\n")
    for output in ("1 x not_wav", "1 x too_short", "more lines: --full"):
        assert output in text
    assert tuple(out.read_text().split("\n", 1)[0].split(",")) == tuple(prediction.SHORT_COLUMNS)
    assert (
        main([*words, "--quiet", "--full", "--columns", "all", "--out", str(out), "--threshold", "0.6"]) == 0
    )
    assert tuple(out.read_text().split("\n", 1)[0].split(",")) == tuple(COLUMNS)
    assert "13 scored + 2 rejected = 15 files found" in capsys.readouterr().out
    assert max(map(len, text.replace(str(tmp_path), "").replace(str(mixed.parent), "").splitlines())) <= 100
    assert main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert main([*words, "--quiet"]) == 0
    answer, first, *_ = capsys.readouterr().out.splitlines()
    assert answer.startswith(f"{body['leaks']} of {body['scored']} recordings are leaks at threshold ")
    assert f"threshold {body['rule']['threshold']:.3g} " in answer
    assert answer.endswith(", not stored (--out FILE):")
    assert first.split()[0] == f"{body['most_suspicious'][0]['score']:.3f}"
    assert (body["ok"], body["found"], body["scored"], body["rejected"], body["rule"]["vote"]) == (
        True,
        15,
        13,
        2,
        "mean",
    )
    assert len(body["most_suspicious"]) == 10
    assert [r["score"] for r in body["most_suspicious"]] == sorted(
        (r["score"] for r in body["most_suspicious"]), reverse=True
    )


def test_exit_status(mixed, model, tmp_path, capsys):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "x.wav").write_bytes(b"no recording")
    assert (
        main(
            [
                "predict",
                str(bad),
                "--model",
                str(model),
                "--out",
                str(tmp_path / "x.csv"),
                "--device",
                "cpu",
                "--quiet",
            ]
        )
        == 1
    )
    assert "0 of 0 recordings are leaks" in capsys.readouterr().out
    assert (tmp_path / "x.rejected.csv").read_text().count("\n") == 2
    assert main(["predict", str(mixed), "--model", str(tmp_path / "none.pt"), "--quiet"]) == 1
    assert main(["predict", str(mixed)]) == 2
    assert main(["predict", str(mixed), "--model", str(model), "--vote", "half", "--quiet"]) == 2
    assert main(["predict", str(mixed), "--model", str(model), "--treshold", "0.5"]) == 2
    assert "did you mean threshold" in capsys.readouterr().err


def test_help_imports_no_torch():
    "Nobody waits for torch who asks for help."
    code = "import sys, leakmel.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- which model


def test_newest_model_is_the_default(tmp_path, monkeypatch, detector):
    from leakmel.dataset.pipeline import newest_recordings
    from leakmel.operations.detector import find_model, with_newest

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEAKMEL_DATA", raising=False)
    monkeypatch.delenv("LEAKMEL_MODEL", raising=False)
    with raises("no-model", DataError):
        find_model(None)
    for name, age_s in (("old", 100), ("new", 1), ("middle", 50)):
        path = detector.save(tmp_path / "runs" / name / "model.pt")
        os.utime(path, (1_700_000_000 - age_s,) * 2)
    assert find_model(None)[0] == tmp_path / "runs" / "new" / "model.pt"
    own, demo = tmp_path / "own", tmp_path / "runs" / "demo"
    for folder, run in ((demo, tmp_path / "runs" / "d"), (own, tmp_path / "mels")):  # the demo is older
        folder.mkdir()
        run.mkdir()
        (run / "A.H5.report.json").write_text(json.dumps({"root": str(folder), "path": "mels/A.H5"}))
        os.utime(run / "A.H5.report.json", (1_700_000_000 + (folder == demo),) * 2)
    assert newest_recordings() is not None
    path = detector.save(tmp_path / "detector" / "model.pt")  # a command writes next to runs/
    os.utime(path, (1_700_000_001,) * 2)
    of_demo = detector.save(tmp_path / "runs" / "of_demo" / "model.pt")  # newer, but of the demo
    (of_demo.parent / "summary.json").write_text(json.dumps({"data": [str(tmp_path / "runs/d/A.H5")]}))
    given, text = with_newest({"data_root": None, "model": None})
    assert (given["data_root"], given["model"]) == (str(own), str(path))
    assert text.splitlines()[0] == (
        f"{own}: recordings of the newest build (mels/A.H5); for other recordings, set data_root or LEAKMEL_DATA"
    )
    assert with_newest({"data_root": str(own), "model": None})[0]["model"] is None
    monkeypatch.setenv("LEAKMEL_MODEL", "named.pt")
    assert find_model(None)[0] == tmp_path / "named.pt"
    assert find_model("given.pt")[0] == tmp_path / "given.pt"


# ---- memory

PEAK = """
import resource, sys, torch
torch.set_num_threads(1)
from leakmel.detector.predict.predict import predict
p = predict(sys.argv[1], sys.argv[2], device="cpu", engine="torch", progress="none")
print(len(p), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_recordings(tmp_path, model):
    "Thirty times the recordings, and one of an hour, in the same memory but for what is kept of them."
    few, many = tmp_path / "few", tmp_path / "many"
    put(few, "0.wav", noise(0))
    many.mkdir()
    for k in range(3000):
        os.link(few / "0.wav", many / f"{k}.wav")
    for k in range(1, 100):
        os.link(few / "0.wav", few / f"{k}.wav")
    used = {}
    for folder in (few, many):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(folder), str(model)],
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        n, used[folder] = map(int, done.stdout.split())
        assert n == len(list(folder.iterdir()))
    assert used[many] - used[few] < 24, (
        used
    )  # MB; the recordings are 25 MB, their segments' features 3 MB more


# ---- real recordings


def test_a_changed_file_is_not_shown_with_old_scores(tmp_path, detector):
    from leakmel.detector.reports import suspicious_mels

    folder = tmp_path / "wav"
    put(folder, "a.wav", noise(1))
    p = lm.predict(folder, detector, **QUIET)
    assert len(suspicious_mels(p).data) == 2
    put(folder, "a.wav", noise(2))
    with pytest.raises(RecordingError):
        suspicious_mels(p)


def test_real_recordings_end_to_end(tmp_path):
    "Clips are built, learned and scored again; then the recordings they were cut from, as long as they are."
    where = os.environ.get("LEAKMEL_REAL_WAVS")
    if not where:
        pytest.skip("LEAKMEL_REAL_WAVS is not set")
    clips, whole = Path(where) / "clips_5s", Path(where) / "recordings"
    assert clips.is_dir(), "LEAKMEL_REAL_WAVS names a folder without clips_5s"
    assert whole.is_dir(), "LEAKMEL_REAL_WAVS names a folder without recordings"
    built = lm.build(
        clips,
        out=tmp_path / "x.h5",
        progress="none",
        engine="torch",
        pipeline=lm.PipelineConfig(device="cpu"),
    )
    leak = sorted(p.name for p in clips.iterdir() if p.is_dir())[0]
    settings = lm.TrainSettings(
        detector="cnn", epochs=1, batch_size=256, channels=(8, 16), early_stop_epochs=0
    )
    done = lm.train(
        built.path, out=tmp_path / "trained", leak_label=leak, settings=settings, device="cpu", progress=False
    )
    with Segments(built.path, level="recording") as rows:
        right = score_rows(load_detector(done.model_path), rows)
    p = lm.predict(clips, done.model_path, out=tmp_path / "clips.csv", **QUIET)
    assert len(p) == built.rows
    assert np.array_equal(np.stack([s.segment_scores for s in p.scored]), right)
    q = lm.predict(whole, done.model_path, out=tmp_path / "whole.csv", **QUIET)
    assert (len(q), q.found) == (q.found, len([x for x in whole.rglob("*") if x.suffix.lower() == ".wav"]))
    table = q.table
    assert (table["duration_s"] > 5).any()
    long_window_s = 2048 / 8000  # of the preset at 8,000 Hz
    assert ((table["duration_s"] - table["scored_s"]).abs() < long_window_s).all(), (
        "all of each recording was heard"
    )


def test_prediction_module_is_the_public_name():
    assert lm.predict is prediction.predict
    assert lm.Predictions is Predictions


def test_faults_of_recordings_are_in_their_status(tmp_path, detector):
    "A stalled write, and samples that the header does not declare."
    put(tmp_path, "whole.wav", noise(1))
    put(tmp_path, "stalled.wav", np.append(noise(2)[: RATE // 2], np.zeros(RATE // 2, np.int16)))
    put(tmp_path, "unread.wav", noise(3))
    with (tmp_path / "unread.wav").open("ab") as f:
        f.write(noise(4).tobytes())
    table = lm.predict(tmp_path, detector, **QUIET).table.set_index("path")
    assert table["status"].to_dict() == {
        "whole.wav": "ok",
        "stalled.wav": "stalled",
        "unread.wav": "unread_samples",
    }
