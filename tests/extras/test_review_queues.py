"Queues of recordings to review: their order, what is left out, and hostile tables of scores."

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from made_detectors import made_detector, noise, put

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, LeakmelError
from leakmel.detector.model.settings import TrainSettings
from leakmel.extras.review.review import (
    QUEUES,
    ReviewRecordings,
    make_queue,
    read_score_table,
    review_recordings,
)
from leakmel.recordings.labels import Decision, current_labels

QUIET: dict[str, Any] = {"device": "cpu", "progress": "none"}
WHEN = "2026-01-31T08:15:00Z"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    "Twelve recordings of four sensors, copies with another label and with the same one, a silent, a loud and a broken one."
    root = tmp_path_factory.mktemp("review") / "heard"
    for k in range(12):
        put(root, f"{'LEAK' if k % 2 else 'NOLEAK'}/S{k % 4}~{k:06d}~20210301_0000{k:02d}~24.wav", noise(k))
    put(root, "LEAK/copy.wav", noise(2))
    put(root, "LEAK/same.wav", noise(1))
    put(root, "NOLEAK/silent.wav", np.zeros_like(noise(0)))
    put(root, "NOLEAK/quiet.wav", noise(30, level=20))
    put(root, "NOLEAK/clipped.wav", np.where(noise(31) > 0, 32767, -32768).astype(np.int16))
    (root / "LEAK/broken.wav").write_bytes(b"RIFF....WAVE")
    return root


@pytest.fixture(scope="module")
def plain(folder) -> ReviewRecordings:
    return review_recordings(folder, progress="none")


def paths(found, name: str, **more) -> list[str]:
    return [item.path for item in make_queue(found, name, **more).items]


def write_rows(file: Path, rows: list[Any]) -> Path:
    with file.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def test_recordings_without_scores(plain, folder):
    assert (len(plain), plain.rejected, plain.leak_label) == (17, 1, "LEAK")
    assert {r.sensor for r in plain.recordings} == {"S0", "S1", "S2", "S3", ""}
    assert paths(plain, "level") == ["NOLEAK/silent.wav", "NOLEAK/clipped.wav", "NOLEAK/quiet.wav"]
    assert paths(plain, "duplicates") == ["LEAK/copy.wav"]
    assert "NOLEAK/S2~000002" in make_queue(plain, "duplicates").items[0].reason
    for name in ("errors", "threshold", "kinds"):
        queue = make_queue(plain, name)
        assert queue.unavailable
        assert not queue.items
    assert "needs" in str(make_queue(plain, "kinds"))


def test_the_random_queue_is_repeatable_and_has_no_copies(plain):
    drawn = paths(plain, "random", n=99)
    assert len(drawn) == 15
    assert drawn == paths(plain, "random", n=99)
    assert drawn != paths(plain, "random", n=99, seed=1)
    assert paths(plain, "random", n=3) == drawn[:3]


def test_decided_recordings_are_left_out(plain):
    first, second, third, *rest = make_queue(plain, "random", n=99).items
    digest = {i.Index: plain.recordings[i.Index].digest for i in (first, second, third)}
    decisions = [
        Decision("moved.wav", digest[first.Index], "LEAK", "ann", WHEN),
        Decision(second.path, "", "?", "ben", WHEN),
        Decision(third.path, digest[third.Index], "", "ann", WHEN),  # skipped
    ]
    current = current_labels(decisions)
    assert paths(plain, "random", n=99, current=current) == [third.path, *(i.path for i in rest)]
    left = paths(plain, "random", n=99, current=current, skipped=[digest[third.Index]])
    assert left == [i.path for i in rest]


def test_disagreements_are_shown_again(plain):
    r = plain.recordings[0]
    decisions = [
        Decision(r.path, r.digest, label, by, WHEN) for label, by in (("LEAK", "ann"), ("NOLEAK", "ben"))
    ]
    (item,) = make_queue(plain, "disagreements", current=current_labels(decisions)).items
    assert item.path == r.path
    assert "ann: LEAK" in item.reason
    assert paths(plain, "disagreements") == []


def test_scores_of_a_model_and_of_its_table_give_the_same_queue(folder, tmp_path):
    detector = made_detector()
    found = review_recordings(folder, detector, **QUIET)
    near = paths(found, "threshold")
    assert len(near) == 15
    for every in (False, True):
        lm.predict(folder, detector, out=tmp_path / "scores.csv", all_columns=every, **QUIET)
        again = review_recordings(folder, tables=[tmp_path / "scores.csv"], **QUIET)
        assert near == paths(again, "threshold")
    distance = {r.path: abs(r.score - r.threshold) for r in found.recordings}
    assert [distance[p] for p in near] == sorted(distance[p] for p in near)
    for a, b in zip(found.recordings, again.recordings, strict=True):
        assert np.allclose(a.segment_scores, b.segment_scores, atol=6e-4)
        assert a.digest == b.digest
        assert b.segment_s == pytest.approx(a.segment_s)


def test_a_cross_validation_gives_the_worst_errors(folder, plain, tmp_path):
    scores = [0.9, 0.4, 0.2, 0.7]
    names = [r.path for r in plain.recordings[:4]]  # all of LEAK
    rows = [
        {"path": name.removeprefix("LEAK/"), "leak": name.startswith("LEAK"), "fold": 0, "score": s}
        for name, s in zip(names, scores, strict=True)
    ]
    table = write_rows(tmp_path / "cross_validation.csv", rows)
    found = review_recordings(folder, tables=[table], **QUIET)
    assert paths(found, "errors") == [names[2], names[1]]
    assert make_queue(found, "threshold").unavailable


def test_suggestions_are_a_queue(folder, plain, tmp_path):
    out = tmp_path / "to_label.csv"
    chosen = lm.suggest(folder, made_detector(), n=4, out=out, **QUIET)
    assert read_score_table(out)[0] == "suggestions"
    found = review_recordings(folder, tables=[out], progress="none")
    queue = make_queue(found, "suggested")
    assert sorted(i.path for i in queue.items) == sorted(chosen.table["path"])
    assert queue.items[0].reason.split(":")[0] in ("uncertain", "diverse", "random")
    assert make_queue(found, "threshold").unavailable
    assert make_queue(found, "errors").unavailable
    assert make_queue(plain, "suggested").unavailable


@each(
    ("words", "code"),
    [
        (["--queue", "errors"], "invalid-arguments"),
        (["--queue", "suggested"], "invalid-arguments"),
        (["--queue", "threshold"], "invalid-arguments"),
        (["--model", "missing"], "file-missing"),
        (["--scores", "missing.csv"], "table-unreadable"),
    ],
)
def test_the_command_checks_its_arguments(folder, tmp_path, capsys, words, code):
    given = ["review", str(folder), "--no-lab", "--out", str(tmp_path / "new"), "--json", *words]
    assert main(given) in (1, 2)
    assert json.loads(capsys.readouterr().out)["code"] == code
    assert not (tmp_path / "new").exists()


def test_a_path_that_several_recordings_end_with_is_not_used(tmp_path):
    for split in ("TRAINING", "TESTING"):
        put(tmp_path / "d", f"{split}/LEAK/a.wav", noise(len(split)))
    put(tmp_path / "d", "TESTING/LEAK/b.wav", noise(3))
    rows = [{"path": p, "leak": True, "fold": 0, "score": 0.1} for p in ("LEAK/a.wav", "LEAK/b.wav")]
    table = write_rows(tmp_path / "cv.csv", rows)
    assert paths(review_recordings(tmp_path / "d", tables=[table], **QUIET), "errors") == [
        "TESTING/LEAK/b.wav"
    ]
    put(tmp_path / "d", "LEAK/a.wav", noise(4))  # a whole path wins over ends of others
    both = review_recordings(tmp_path / "d", tables=[table], **QUIET)
    assert sorted(paths(both, "errors")) == ["LEAK/a.wav", "TESTING/LEAK/b.wav"]


@pytest.mark.slow
def test_parts_of_a_blend_disagree(folder, small_sets, tmp_path, one_thread, few_trees):
    settings = TrainSettings(detector="blend", epochs=1, epoch_share=0.1, channels=(4,), batch_size=64)
    lm.train(small_sets / "TRAINING_DATASET.H5", out=tmp_path / "model", settings=settings, **QUIET)
    found = review_recordings(folder, tmp_path / "model", **QUIET)
    queue = make_queue(found, "kinds")
    apart = [np.ptp(list(found.recordings[i.Index].by_kind.values())) for i in queue.items]
    assert apart == sorted(apart, reverse=True)
    assert len(apart) == 15
    assert "cnn" in queue.items[0].reason
    assert "spectral" in queue.items[0].reason


GOOD = {"path": "LEAK/copy.wav", "leak": True, "fold": 0, "score": 0.5}


@each(
    ("row", "code"),
    [
        ({"score": "nan"}, "table-row"),
        ({"score": 2}, "table-row"),
        ({"score": ""}, "table-row"),
        ({"leak": "maybe"}, "table-row"),
        ({"path": ""}, "table-row"),
        ({"path": "../../etc/passwd"}, "unknown-recording"),
    ],
)
def test_hostile_rows(folder, tmp_path, row, code):
    table = write_rows(tmp_path / "cv.csv", [GOOD | row])
    with pytest.raises(DataError) as e:
        review_recordings(folder, tables=[table], **QUIET)
    assert (e.value.code, e.value.path) == (code, table)


@each("content", [b"", b"path,label\na,b\n", b"\xff\xfe\0", b'path,score,fold,leak\n"a,'])
def test_hostile_tables(tmp_path, content):
    table = tmp_path / "cv.csv"
    table.write_bytes(content)
    with pytest.raises(DataError) as e:
        read_score_table(table)
    assert e.value.path == table
    assert e.value.code in ("table-columns", "table-row", "table-unreadable")


def test_wrong_arguments(plain, tmp_path):
    for given, code in (
        ({"name": "loudest"}, "unknown-choice"),
        ({"name": "random", "n": 0}, "out-of-range"),
    ):
        with pytest.raises(LeakmelError) as e:
            make_queue(plain, **given)
        assert e.value.code == code
    (tmp_path / "empty").mkdir()
    for root, code in ((tmp_path / "empty", "no-recordings"), (tmp_path / "none", "no-such-folder")):
        with pytest.raises(DataError) as e:
            review_recordings(root, progress="none")
        assert e.value.code == code
    (tmp_path / "empty/broken.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError) as e:
        review_recordings(tmp_path / "empty", progress="none")
    assert e.value.code == "nothing-readable"


def test_a_folder_where_all_is_silent_or_alike(plain):
    silent = plain.table.assign(silent=True, digest=list(map(str, range(17))))
    assert len(make_queue(replace(plain, table=silent), "level").items) == 17
    alike = plain.table.assign(rms_db=-40.0, silent=False, clipped_share=0.0)
    assert not make_queue(replace(plain, table=alike), "level").items
    assert set(QUEUES) >= {"errors", "threshold", "kinds", "random", "duplicates", "level"}
