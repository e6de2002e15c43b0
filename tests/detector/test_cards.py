"Cards of data sets and detectors, and tables of predictions and of the nightly history in Parquet."

import csv
import errno
import hashlib
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from errors import raises

import leakmel as lm
from leakmel.cli import main
from leakmel.core import files
from leakmel.core.errors import DataError, MissingPackageError, OutputError, SpaceError
from leakmel.detector.data.segments import make_task
from leakmel.detector.model.card import EvaluationRecord
from leakmel.detector.model.detector import Detector, load_detector, update_card
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.predict.predict import COLUMNS, SHORT_COLUMNS
from leakmel.extras.nightly.history import History, HistoryEntry
from leakmel.operations.detector import Predict
from leakmel.recordings.demo import write_wav

pytestmark = pytest.mark.usefixtures("one_thread", "few_trees")
RATE = 4096
QUIET: dict[str, Any] = {"progress": "none", "device": "cpu", "engine": "torch"}
EVALUATION = EvaluationRecord(
    kind="test set",
    method="<i>north</i>",
    recordings=120,
    leaks=40,
    groups=30,
    by="sensor",
    groups_with_leak=12,
    groups_without_leak=25,
    auc=0.91,
    auc_low=0.84,
    auc_high=0.96,
    balanced_accuracy=0.82,
    beats=True,
    verdict="Better than the baselines",
    cautions=("[few](http://example.org) leaks",),
    stamps=(),
    date="2026-01-02T03:04:05+00:00",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A detector with an evaluation and a record of its training."
    torch.manual_seed(0)
    spec = lm.MelSpec.preset("disjoint", sample_rate=RATE, duration_s=1.0)
    detector = Detector(LeakNet(NetSettings(channels=(4, 4))).eval(), make_task(["LEAK", "NOLEAK"]), spec)
    part = {"files": ["<b>.h5"], "recordings": 7, "by_class": {"LEAK": 3, "NOLEAK": 4}}
    record = {"leakmel_version": "0.1.0", "settings": {"epochs": 5}, "training": part, "validation": None}
    path = tmp_path_factory.mktemp("model") / "model.pt"
    replace(detector, evaluations=(EVALUATION,), record=record).save(path)
    return path


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A folder of recordings, one with a name that looks like a formula and one that cannot be read."
    folder = tmp_path_factory.mktemp("recordings")
    rng = np.random.default_rng(0)
    for k, name in enumerate((b"=1+1.wav", b"a\nb.wav", b"caf\xe9.wav", b"A1~000001~20240229_120000~8.wav")):
        samples = rng.integers(-900, 900, RATE * (1 + k)).astype(np.int16)
        write_wav(folder / os.fsdecode(name), samples, RATE)
    (folder / "broken.wav").write_bytes(b"RIFF")
    return folder


# ---- data sets


def test_card_of_a_data_set(small_sets: Path, tmp_path: Path) -> None:
    path = small_sets / "TRAINING_DATASET.H5"
    made = lm.card(path, out=tmp_path, license="CC-BY-4.0", progress="none")
    assert made.path == tmp_path / "TRAINING_DATASET.H5.card.md"
    text = made.path.read_text(encoding="utf-8")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with lm.open_dataset(path) as ds:
        counts = ds.files["label"].value_counts()
        sensors = ds.files["sensor"].nunique()
        stored = [ds.file.attrs["metadata_digest"], ds.file.attrs["fingerprint"]]
        row = f"| training | {len(ds)} | {counts['LEAK']} | {counts['NOLEAK']} | 0 |"
    wanted = (row, f"| sensors | {sensors} |", digest, "Licence: CC-BY-4.0", "Known problems", lm.__version__)
    for part in (*wanted, *stored):
        assert part in text
    assert (made.license, made.files) == ("CC-BY-4.0", {path.name: digest})
    whole = lm.card(small_sets, progress="none")
    assert "| validation |" in whole.markdown
    assert "Licence: not given" in whole.markdown
    assert whole.license == "not given"
    assert len(whole.files) == len(list(small_sets.glob("*_DATASET.H5")))


def test_report_that_is_damaged_or_hostile_does_not_reach_the_card(small_sets: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    path.write_bytes((small_sets / "VALIDATION_DATASET.H5").read_bytes())
    report = tmp_path / "t.h5.report.json"
    for content in (
        "{",
        "[]",
        "[" * 100_000,
        json.dumps({"problems_by_kind": 3, "verified": "x", "root": 5}),
    ):
        report.write_text(content)
        assert "## Known problems" in lm.card(path, progress="none").markdown
    report.write_text(
        json.dumps({"problems_by_kind": {"a": 2, "b": 9, "c": "x"}, "verified": "x", "root": "/r/s"})
    )
    text = lm.card(path, progress="none").markdown
    assert "Folder of the recordings: s\n" in text
    assert text.index("'b': 9") < text.index("'a': 2")
    assert "hours, sample rates (Hz): {" in text
    assert "dB re full scale" in text
    verdict = "<script>alert(1)</script> [a](b)\n# x"
    report.write_text(json.dumps({"problems_by_kind": {"<img>": 2}, "verified": {"verdict": verdict}}))
    text = lm.card(path, license="<b>", progress="none").markdown
    assert "\\<script\\>" in text
    assert "\\<img\\>" in text
    assert "<" not in text.replace("\\<", "")
    assert "\n# x" not in text


# ---- detectors


def test_card_of_a_detector(model: Path, tmp_path: Path) -> None:
    made = lm.card(model.parent, out=tmp_path, license="MIT", progress="none")
    assert made.path == tmp_path / "model_card.md"
    text = made.markdown
    wanted = (
        "AUC 0.91 (0.84 to 0.96)",
        "better than the baselines",
        "Licence: MIT",
        "epochs 5",
        "\\<b\\>.h5",
        "leakmel 0.1.0",
    )
    for part in (*wanted, hashlib.sha256(model.read_bytes()).hexdigest()):
        assert part in text
    assert "](http" not in text.replace("\\](", "")
    assert "<" not in text.replace("\\<", "")


def test_card_replaces_cards_only(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        lm.card(model, out=tmp_path, progress="none")

    def disk_full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m:
        m.setattr(files, "write_all", disk_full)
        with pytest.raises(SpaceError):
            lm.card(model, out=tmp_path, license="MIT", progress="none")
    assert "MIT" not in (tmp_path / "model_card.md").read_text()
    assert os.listdir(tmp_path) == ["model_card.md"]
    (tmp_path / "model_card.md").write_text("# My notes")
    with raises("other-file-in-the-way", OutputError, path=tmp_path / "model_card.md"):
        lm.card(model, out=tmp_path, license="MIT", progress="none")
    assert (tmp_path / "model_card.md").read_text() == "# My notes"
    with raises("no-such-file", DataError):
        lm.card(tmp_path / "missing.pt", progress="none")


def test_the_licence_of_a_user_stays(model: Path, tmp_path: Path) -> None:
    "Where an evaluation or `card` write the card again; and its digest is that of the new file."
    copy = tmp_path / "model.pt"
    copy.write_bytes(model.read_bytes())
    detector = load_detector(copy)
    card = update_card(detector, copy)
    assert card.read_text().startswith("# Leak detector")
    assert "SHA-256" not in card.read_text(), "nobody has asked for it"
    for license in (None, "[MIT] *x*"):
        lm.card(copy, out=tmp_path, license=license, progress="none")
        replace(detector, evaluations=(), engine=str(license)).save(copy)
        update_card(load_detector(copy), copy)
        assert hashlib.sha256(copy.read_bytes()).hexdigest() in card.read_text()
    text = card.read_text()
    assert "Licence: \\[MIT\\] \\*x\\*" in text
    card.write_text(text.replace("Licence: \\[MIT\\] \\*x\\*", "Licence: CC0-1.0"))
    assert lm.card(copy, out=tmp_path, progress="none").license == "CC0-1.0"
    assert "Licence: CC0-1.0" in card.read_text()


@pytest.mark.slow
def test_an_evaluation_keeps_the_licence(small_sets: Path, tmp_path: Path) -> None:
    settings = lm.TrainSettings(detector="spectral")
    sets = [small_sets / f"{name}_DATASET.H5" for name in ("TRAINING", "TESTING")]
    lm.train(sets[0], out=tmp_path, settings=settings, device="cpu", progress=False)
    assert main(["export", "--card", str(tmp_path), "--license", "MIT", "--quiet"]) == 0
    assert main(["evaluate", str(sets[1]), "--model", str(tmp_path), "--draws", "100", "--quiet"]) == 0
    digest = hashlib.sha256((tmp_path / "model.pt").read_bytes()).hexdigest()
    card = (tmp_path / "model_card.md").read_text()
    assert "TESTING\\_DATASET.H5" in card
    assert "Licence: MIT" in card
    assert "Licence: MIT" in card
    assert digest in card


@each(
    ("words", "option"),
    [
        ("export {model} --onnx --license MIT", "--license"),
        ("export {model} --onnx --to parquet", "--to"),
        ("export {model} --onnx --most 3", "--most"),
        ("export {sets} --out {new} --most 3", "--most"),
        ("export {sets} --out {new} --recordings {sets}", "--recordings"),
        ("export {state} --out {new} --license MIT", "--license"),
        ("fetch --out {new}", "--out"),
        ("fetch --yes", "--yes"),
        ("fetch dongguan --from {sets} --accept-unverified", "--accept-unverified"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    words: str, option: str, model: Path, small_sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "history.sqlite").touch()
    places = {"model": model, "sets": small_sets, "new": tmp_path / "new", "state": tmp_path / "state"}
    assert main([word.format(**places) for word in words.split()] + ["--json"]) == 2
    body = json.loads(capsys.readouterr().out)
    assert body["code"] == "unused-option"
    assert f"The option {option} has no effect" in body["error"]
    assert not (tmp_path / "new").exists()


def test_commands(small_sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [str(small_sets / "VALIDATION_DATASET.H5"), "--out", str(tmp_path / "a"), "--license", "MIT"]
    assert main(["export", "--card", *words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert Path(body["card"]).is_file()
    assert body["license"] == "MIT"
    pytest.importorskip("pyarrow")
    words = ["export", str(small_sets), "--out", str(tmp_path / "b"), "--to", "parquet", "--json"]
    assert main(words) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["format"], body["path"]) == ("parquet", str(tmp_path / "b"))
    assert main(words) == 1
    assert json.loads(capsys.readouterr().out)["code"] == "output-exists"


# ---- predictions


def test_predictions_as_parquet_equal_those_as_csv(model: Path, recordings: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    detector = load_detector(model)
    every: dict[str, Any] = {**QUIET, "all_columns": True}
    done = lm.predict(recordings, detector, out=tmp_path / "scores.parquet", **every)
    lm.predict(recordings, detector, out=tmp_path / "scores.csv", **every)
    table = pq.read_table(tmp_path / "scores.parquet")
    assert tuple(table.schema.names) == tuple(COLUMNS)
    kinds = {f.name: str(f.type) for f in table.schema}
    wanted = {
        "score": "double",
        "leak": "bool",
        "n_segments": "int64",
        "path": "string",
        "in_training": "bool",
    }
    assert {name: kinds[name] for name in wanted} == wanted
    rows = table.to_pylist()
    with (tmp_path / "scores.csv").open(newline="") as f:
        texts = list(csv.DictReader(f))
    for name in ("path", "path_base64", "label", "vote", "status", "encoding", "sensor", "evaluation"):
        assert [row[name] for row in rows] == [text[name] for text in texts]
    assert [row["score"] for row in rows] == [float(text["score"]) for text in texts] == done.score.tolist()
    assert [np.float32(x) for row in rows for x in row["segment_scores"]] == [
        x for k in range(len(done)) for x in done.scored.segment_scores[k].tolist()
    ]
    assert [row["in_training"] for row in rows] == [None] * 4
    assert [row["gain"] for row in rows] == [8.0 if g == 8 else None for g in done.scored.gain.tolist()]
    assert "as CSV or Parquet" in str(Predict.__doc__)  # first line of the help
    done.write(tmp_path / "scores.parquet")
    short = pq.read_table(tmp_path / "scores.parquet").to_pylist()
    assert short == [{name: row[name] for name in SHORT_COLUMNS} for row in rows]
    (rejected,) = pq.read_table(tmp_path / "scores.rejected.parquet").to_pylist()
    assert rejected["path"] == "broken.wav"
    assert rejected["code"] == done.rejections[0].code


def test_predictions_replace_tables_of_predictions_only(
    model: Path, recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow.parquet")
    detector = load_detector(model)
    for _ in range(2):
        lm.predict(recordings, detector, out=tmp_path / "scores.parquet", **QUIET)
    (tmp_path / "scores.rejected.parquet").write_bytes(b"PAR1 something else PAR1")
    with raises("other-file-in-the-way", OutputError, path=tmp_path / "scores.rejected.parquet"):
        lm.predict(recordings, detector, out=tmp_path / "scores.parquet", **QUIET)
    with raises("not-csv", OutputError):
        lm.predict(recordings, detector, out=tmp_path / "scores.xlsx", **QUIET)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises("missing-package", MissingPackageError):
        lm.predict(recordings, detector, out=tmp_path / "other.parquet", **QUIET)
    assert not (tmp_path / "other.parquet").exists()


# ---- history of nightly runs


def test_history_as_parquet(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    duckdb, _ = pytest.importorskip("duckdb"), pytest.importorskip("pyarrow")
    entries = [
        HistoryEntry(
            digest=f"{k:032x}",
            sensor=f"=S{k % 3}",
            path=f"<b>{k}\\n.wav",
            time=f"2026-01-{1 + k % 9:02d}T02:00:00",
            night=f"2026-01-{1 + k % 9:02d}",
            score=k / 5000,
            rms_db=-20.5,
            floor_db=-60.0,
            clipped_share=0.0,
            flags="silent dry" if k % 2 else "",
            bands="1.5 2.5" if k % 2 else "",
        )
        for k in range(5000)
    ]
    with History(tmp_path / "state") as history:
        history.begin()
        history.add_recordings(entries)
        history.commit()
        stored = {h.digest: asdict(h) for night in history.nights() for h in history.entries(night)}
    assert [*stored.values()] == [asdict(h) for h in sorted(entries, key=lambda h: (h.night, h.sensor))]
    before = (tmp_path / "state" / "history.sqlite").read_bytes()
    assert main(["export", str(tmp_path / "state"), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 5000 + 9
    assert (tmp_path / "state" / "history.sqlite").read_bytes() == before
    found = duckdb.sql(f"SELECT * FROM '{tmp_path}/out/recordings.parquet'")
    assert dict(zip(found.columns, map(str, found.types), strict=True))["night"] == "DATE"
    for values in found.fetchall():
        row = dict(zip(found.columns, values, strict=True))
        right = stored[row["digest"]]
        assert (row["sensor"], row["path"], row["score"]) == (right["sensor"], right["path"], right["score"])
        assert (row["night"].isoformat(), row["time"].isoformat()) == (right["night"], right["time"])
        assert (" ".join(row["flags"]), row["bands"]) == (
            right["flags"],
            list(map(float, right["bands"].split())),
        )
    assert len(found.fetchall()) == 5000
    with raises("no-such-file", DataError):
        lm.export_history(tmp_path / "out", out=tmp_path / "out2")
    assert main(["export", "--card", str(tmp_path / "state"), "--json"]) == 2
    assert "the history of nightly runs, which has no card" in json.loads(capsys.readouterr().out)["error"]
    assert (
        main(
            ["export", str(tmp_path / "state"), "--out", str(tmp_path / "x"), "--to", "huggingface", "--json"]
        )
        == 2
    )
    body = json.loads(capsys.readouterr().out)
    assert body["code"] == "unknown-choice"
    assert "load_dataset('parquet'" in body["error"], "a way to read the tables with the package datasets"
