"Recordings that are suggested for labelling: the mix, what is never suggested, the table, and the command."

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from made_detectors import made_detector, noise, put
from spreadsheets import NAMED, saved_again

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import LeakmelError
from leakmel.detector.model.card import Provenance, _short_digests
from leakmel.detector.model.detector import required_spec
from leakmel.extras.review.review import read_score_table, review_recordings
from leakmel.extras.review.suggest import (
    KINDS,
    SUGGESTION_COLUMNS,
    SampleMix,
    band_statistics,
    choose_recordings,
    sample_mix,
)
from leakmel.recordings.labels import Decision, append_decision
from leakmel.recordings.tables import read_table

QUIET: dict[str, Any] = {"device": "cpu", "progress": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    "Twenty recordings of five sensors, a copy, a silent one and a broken one."
    root = tmp_path_factory.mktemp("suggest") / "new"
    for k in range(20):
        put(root, f"S{k % 5}~{k:06d}~20210301_0000{k:02d}~24.wav", noise(k, level=100 * k + 50))
    put(root, "copy.wav", noise(3, level=350))
    put(root, "silent.wav", np.zeros_like(noise(0)))
    (root / "broken.wav").write_bytes(b"RIFF....WAVE")
    return root


def pool_of(n: int = 50, **more) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    given: dict[str, Any] = {
        "distance": rng.uniform(0, 0.5, n),
        "features": rng.normal(0, 1, (n, 6)),
        "sensor": np.array([f"S{k % 7}" for k in range(n)], object),
        "is_open": np.ones(n, bool),
        "is_labelled": np.zeros(n, bool),
    }
    return given | more


@each("n", [1, 2, 7, 30, 49])
@each("mix", [SampleMix(), SampleMix(1, 0, 0), SampleMix(0, 1, 0), SampleMix(0, 0, 1)])
def test_the_mix_is_as_stated(n, mix):
    chosen = choose_recordings(n, mix, **pool_of(), per_sensor=50)
    assert {kind: sum(k == kind for _, k, _ in chosen) for kind in KINDS} == mix.counts(n)
    assert len({i for i, _, _ in chosen}) == n


def test_uncertain_recordings_are_the_nearest_ones():
    pool = pool_of()
    chosen = choose_recordings(5, SampleMix(1, 0, 0), **pool, per_sensor=50)
    assert [i for i, _, _ in chosen] == np.argsort(pool["distance"])[:5].tolist()


def test_random_recordings_do_not_depend_on_scores_or_features():
    "Else they would be no fair sample of the folder."
    one = choose_recordings(10, **pool_of(), seed=3)
    other = choose_recordings(10, **pool_of(distance=np.zeros(50), features=np.full((50, 6), np.nan)), seed=3)
    assert [c for c in one if c[1] == "random"] == [c for c in other if c[1] == "random"]


def test_labelled_and_closed_recordings_are_never_chosen():
    closed, labelled = np.arange(50) < 30, np.arange(50) % 2 == 0
    chosen = choose_recordings(50, **pool_of(is_open=~closed, is_labelled=labelled), per_sensor=50)
    assert {i for i, _, _ in chosen} == set(np.flatnonzero(~closed & ~labelled).tolist())


def test_suggestions_per_sensor_are_limited():
    chosen = [i for i, kind, _ in choose_recordings(30, **pool_of(), per_sensor=2) if kind != "random"]
    assert max(sum(i % 7 == s for i in chosen) for s in range(7)) == 2


@each("text", ["uncertain=0.5", "certain=1", "uncertain=x", "uncertain=2,random=-1", ""])
def test_invalid_mix_is_refused(text):
    with pytest.raises(LeakmelError) as e:
        sample_mix(text)
    assert e.value.code in ("out-of-range", "unknown-value")


@each("given", [{"n": 0}, {"n": 3, "per_sensor": 0}, {"n": 3, "seed": -1}])
def test_numbers_out_of_range_are_refused(folder, given):
    with pytest.raises(LeakmelError) as e:
        lm.suggest(folder, made_detector(), **given, **QUIET)
    assert e.value.code == "out-of-range"


def test_band_statistics_of_what_cannot_be_read_are_not_known(folder):
    paths = list(map(os.fsencode, lm.suggest(folder, made_detector(), n=2, **QUIET).table["path"]))
    paths.insert(1, b"missing.wav")
    found = band_statistics(folder, paths, required_spec(made_detector()), progress="none")
    assert np.isfinite(found).all(1).tolist() == [True, False, True]
    alone = band_statistics(folder, paths[1:2], required_spec(made_detector()), progress="none")
    assert np.isnan(alone).all()


@pytest.mark.slow
def test_diverse_recordings_are_found_among_objects(folder, monkeypatch):
    pytest.importorskip("moto")
    from object_server import stored

    with stored(folder, monkeypatch) as url:
        found = lm.suggest(url, made_detector(), n=6, mix=SampleMix(0, 1, 0), **QUIET)
        paths = list(map(os.fsencode, found.table["path"]))
        statistics = band_statistics(found.folder, paths, required_spec(made_detector()), progress="none")
    assert found.table["kind"].tolist() == ["diverse"] * 6
    local = band_statistics(folder, paths, required_spec(made_detector()), progress="none")
    assert np.isfinite(local).all()
    assert np.array_equal(statistics, local)


def test_reasons_for_left_out_recordings(folder, tmp_path):
    everything = lm.suggest(folder, made_detector(), n=99, mix=SampleMix(0, 0, 1), **QUIET)
    assert len(everything) == 20
    assert everything.left_out["silent"] == 1
    assert everything.left_out["copies"] == 1
    by_path = dict(zip(everything.table["path"], everything.table["digest"], strict=True))
    first, second, *_, learned = sorted(by_path)
    labels = tmp_path / "labels.csv"
    when = "2026-01-31T08:15:00Z"
    append_decision(labels, Decision("another name.wav", by_path[first], "LEAK", "ann", when))
    append_decision(labels, Decision("x.wav", by_path[second], "?", "ann", when))
    seen = Provenance(np.sort(_short_digests([by_path[learned]])), True)
    found = lm.suggest(folder, made_detector(provenance=seen), n=99, labels=labels, **QUIET)
    assert not {first, second, learned} & set(found.table["path"])
    assert found.left_out["labelled"] == 2
    assert found.left_out["in the training of the model"] == 1
    assert found.provenance_known
    assert not everything.provenance_known


def test_rejected_recordings_are_counted(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "broken.wav").write_bytes(b"RIFF")
    assert lm.suggest(copy, made_detector(), n=3, **QUIET).left_out["rejected"] == 1
    alone = tmp_path / "alone"
    alone.mkdir()
    (copy / "broken.wav").rename(alone / "broken.wav")
    with pytest.raises(LeakmelError) as e:
        lm.suggest(alone, made_detector(), n=3, **QUIET)
    assert (e.value.code, e.value.path) == ("all-rejected", alone)


def test_the_table_is_a_table_of_recordings(folder, tmp_path):
    out = tmp_path / "first.csv"
    found = lm.suggest(folder, made_detector(), n=10, out=out, **QUIET)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert list(rows[0]) == list(SUGGESTION_COLUMNS)
    assert [r["split"] == "testing" for r in rows] == [kind == "random" for kind in found.table["kind"]]
    table = read_table(out)
    assert table.paths == list(map(os.fsencode, found.table["path"]))
    assert set(table.labels) == {""}
    again = lm.suggest(folder, made_detector(), n=99, earlier=[out], **QUIET)
    assert not set(again.table["digest"]) & set(found.table["digest"])
    repeated = lm.suggest(folder, made_detector(), n=10, **QUIET)
    assert repeated.table.equals(found.table)


@each("d", NAMED.values(), ids=NAMED)
def test_suggestions_that_a_spreadsheet_saved(folder, tmp_path, d):
    out, saved = tmp_path / "first.csv", tmp_path / "saved.csv"
    found = lm.suggest(folder, made_detector(), n=10, out=out, **QUIET)
    saved.write_bytes(saved_again(out.read_bytes(), d, ("probability", "score")))
    assert read_table(saved).paths == list(map(os.fsencode, found.table["path"]))
    assert repr(read_score_table(saved)) == repr(read_score_table(out))
    reviewed = review_recordings(folder, tables=[saved], device="cpu", progress="none")
    assert sum(r.suggestion != "" for r in reviewed.recordings) == len(found)
    again = lm.suggest(folder, made_detector(), n=99, earlier=[saved], **QUIET)
    assert not set(again.table["digest"]) & set(found.table["digest"])


@each("d", NAMED.values(), ids=NAMED)
def test_scores_that_a_spreadsheet_saved(folder, tmp_path, d):
    "They are read as they were, and a later prediction replaces them."
    out = tmp_path / "scores.csv"
    lm.predict(folder, made_detector(), out=out, **QUIET)
    before, rows = out.read_bytes(), read_score_table(out)
    numbers = (
        "score",
        "probability",
        "threshold",
        "leak_share",
        "segment_scores",
        "scored_s",
        "duration_s",
        "rms_db",
    )
    out.write_bytes(saved_again(before, d, numbers))
    assert repr(read_score_table(out)) == repr(rows)
    reviewed = review_recordings(folder, tables=[out], device="cpu", progress="none")
    assert sum(r.score == r.score for r in reviewed.recordings) == len(rows[1])
    lm.predict(folder, made_detector(), out=out, **QUIET)
    assert out.read_bytes() == before


def test_files_of_people_are_never_replaced(folder, tmp_path):
    (tmp_path / "mine.csv").write_text("path,label\n")
    for out, code, says in (
        (tmp_path / "mine.csv", "other-file-in-the-way", "may hold labels by people"),
        (folder / "new.csv", "output-in-source", "lies inside the folder"),
        (tmp_path / "new.txt", "not-csv", "a CSV file"),
    ):
        with pytest.raises(LeakmelError) as e:
            lm.suggest(folder, made_detector(), n=3, out=out, **QUIET)
        assert e.value.code == code
        assert says in str(e.value)
    (tmp_path / "plain.csv").write_text("path,label\na.wav,LEAK\n")
    with pytest.raises(LeakmelError) as e:
        lm.suggest(folder, made_detector(), n=3, earlier=[tmp_path / "plain.csv"], **QUIET)
    assert e.value.code == "table-columns"


def test_the_command(folder, tmp_path, capsys):
    model = made_detector().save(tmp_path / "model.pt")
    words = ["suggest", str(folder), "--model", str(model), "--n", "5", "--device", "cpu", "--json"]
    assert main([*words, "--out", str(tmp_path / "next.csv")]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["suggested"] == 5
    assert body["by_kind"] == {"uncertain": 2, "diverse": 2, "random": 1}
    assert len(read_table(tmp_path / "next.csv").paths) == 5
