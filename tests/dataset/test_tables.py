"Data sets from tables as people have them: other names of columns, more columns, missing labels, and the table of a scan."

import csv
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from build_runs import execute, plan_run
from each import each
from errors import raises
from tiny_training import tiny_words

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, UsageError
from leakmel.recordings.labels import Decision, append_decision, now_utc
from leakmel.recordings.tables import MAX_EXTRA_BYTES, MAX_EXTRA_COLUMNS, MEASURED_COLUMNS, read_table
from leakmel.recordings.wav import canonical_header

SHORT = {"sample_rate": 4096, "duration_s": 1.0}
COLUMNS = "label=condition,sensor=pipe,recording=file"
N = 12


@pytest.fixture
def made(tmp_path: Path) -> Path:
    "A folder of recordings and a table: two recordings have no label, a pipe has two positions."
    rng = np.random.default_rng(0)
    rows = []
    for i in range(N):
        name = f"{i:02d}.wav"
        x = rng.normal(0, 3000, 4096).astype("<i2")
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_bytes(canonical_header(4096, 4096) + x.tobytes())
        label = "" if i >= N - 2 else ("LEAK", "NOLEAK")[i % 2]
        rows.append({"file": name, "condition": label, "pipe": f"P{i // 4}", "position": f"{i // 2} m"})
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    return tmp_path


def build(made: Path, **more):
    m = lm.scan(made / "data", table=made / "t.csv", columns=COLUMNS)
    return lm.build(
        made / "data", manifest=m, out=made / "x.h5", spec=SHORT, progress="none", engine="cpu", **more
    )


def test_table_columns_by_option(made, capsys):
    words = [str(made / "data"), "--table", str(made / "t.csv"), "--columns", COLUMNS]
    assert main(["scan", *words]) == 1, "two recordings have no label"
    assert "no label for 2 of 12 recordings" in capsys.readouterr().out.replace("\n", " ")
    out = made / "x.h5"
    given = ["--sample-rate", "4096", "--duration-s", "1", "--engine", "cpu", "--quiet"]
    assert main(["build", *words, "--out", str(out), *given, "--full"]) == 0
    assert "10 rows + 2 rejected = 12 files found" in capsys.readouterr().out
    with lm.open_dataset(out) as ds:
        assert ds.files["sensor"].tolist() == [f"P{i // 4}" for i in range(N - 2)]
        assert ds.files["recording"].tolist() == [f"{i:02d}.wav" for i in range(N - 2)]
        assert ds.files["extra/position"].tolist() == [f"{i // 2} m" for i in range(N - 2)]
    verify = [
        "verify",
        str(out),
        "--root",
        str(made / "data"),
        "--sample",
        "all",
        "--table",
        str(made / "t.csv"),
    ]
    assert main([*verify, "--columns", COLUMNS]) == 0
    assert main(verify) != 0, "without --columns the table has no label"
    capsys.readouterr()


def test_plan_of_the_build_notebook(made):
    given: dict[str, Any] = {
        "data_root": str(made / "data"),
        "table": str(made / "t.csv"),
        "out": str(made / "run"),
    } | SHORT
    with raises("table-columns", DataError):
        plan_run(given, progress="none")
    plan = plan_run(given | {"columns": COLUMNS, "engine": "cpu"}, progress="none")
    assert "no label for 2 of 12" in dict(plan.rows())["not labelled"]
    (result,) = execute(plan, progress="none")
    assert (result.rows, [r.code for r in result.rejections]) == (N - 2, ["no_label"] * 2)
    assert result.verified.labels_compared
    assert "leakmel predict" in result.summary["unlabelled"]


@each(
    ("columns", "code", "kind"),
    [
        ("sensor=tube", "table-columns", DataError),
        ("pipe=sensor", "table-columns", UsageError),
        ("sensor", "table-columns", UsageError),
        ({"sensor": 3}, "table-columns", UsageError),
        (["sensor"], "wrong-type", UsageError),
    ],
)
def test_columns_that_cannot_be_used(made, columns, code, kind):
    with raises(code, kind):
        lm.scan(made / "data", table=made / "t.csv", columns=columns)


def test_columns_without_a_table(made):
    with raises("conflicting-parameters", UsageError):
        lm.scan(made / "data", columns={"sensor": "pipe"})


def test_a_mapped_column_frees_the_column_of_that_name(tmp_path):
    (tmp_path / "t.csv").write_text("path,label,sensor,Pipe\na.wav,LEAK,hydrophone,P1\n")
    t = read_table(tmp_path / "t.csv", {"sensor": "pipe"})
    assert (t.parts[0].sensor, t.extra) == ("P1", {"sensor": ["hydrophone"]})


def test_columns_that_are_not_kept(tmp_path):
    names = [f"c{i}" for i in range(MAX_EXTRA_COLUMNS + 1)]
    head = ["path", "label", "long", "a/b", "..", *names, "digest"]
    with (tmp_path / "t.csv").open("w", newline="") as f:
        csv.writer(f).writerows(
            [head, ["a.wav", "LEAK", "x" * (MAX_EXTRA_BYTES + 1), *"y" * (len(head) - 3)]]
        )
    t = read_table(tmp_path / "t.csv")
    assert set(t.ignored) == {"long", "..", *names[MAX_EXTRA_COLUMNS - 2 :], "digest"}
    assert t.extra["a_b"] == ["y"]


@pytest.mark.slow
def test_changed_extra_columns_are_written_and_compared(made):
    first = build(made)
    assert build(made).summary["nothing_to_do"]
    table = pd.read_csv(made / "t.csv", keep_default_na=False)
    table.loc[3, "position"] = "elsewhere"
    table.to_csv(made / "t.csv", index=False)
    report = lm.verify(first.path, root=made / "data", table=made / "t.csv", columns=COLUMNS)
    assert [p for p in report.problems if "extra/position" in p and "03.wav" in p]
    again = build(made)
    assert (again.summary["nothing_to_do"], again.summary["copied_rows"]) == (False, N - 2)
    table.loc[N - 1, "condition"] = "LEAK"
    table.drop(columns="position").to_csv(made / "t.csv", index=False)
    report = lm.verify(first.path, root=made / "data", table=made / "t.csv", columns=COLUMNS)
    assert len(report.problems) == 2, "a label was added, a column was removed"
    last = build(made)
    assert (last.rows, last.summary["copied_rows"]) == (N - 1, N - 2)
    with h5py.File(last.path) as f:
        assert "files/extra" not in f
    assert lm.verify(last.path, root=made / "data", table=made / "t.csv", columns=COLUMNS, sample=None).ok


def test_no_label_at_all(made):
    table = pd.read_csv(made / "t.csv").assign(condition="")
    table.to_csv(made / "t.csv", index=False)
    with raises("no-label", DataError):
        build(made)


@pytest.mark.slow
@pytest.mark.parametrize("content", [False, True])
def test_the_table_of_a_scan_is_a_table(faulty, tmp_path, content):
    m = lm.scan(faulty, content=content)
    assert set(m.table.columns) - set(MEASURED_COLUMNS) <= {*read_columns(), "sensor"}
    m.table.to_csv(tmp_path / "t.csv", index=content, errors="surrogateescape")
    again = lm.scan(faulty, table=tmp_path / "t.csv")
    assert "missing_file" not in set(again.problems["kind"])
    assert again.label_names == m.label_names
    assert {k: dict(sorted(v.items())) for k, v in again.counts().items()} == {
        k: dict(sorted(v.items())) for k, v in m.counts().items()
    }
    for name in ("sensor", "recording", "start_time", "gain", "session", "folder"):
        pd.testing.assert_series_equal(again.table[name], m.table[name])
    given: dict[str, Any] = {"split": "validation", "spec": SHORT, "progress": "none", "engine": "cpu"}
    by_folder = lm.build(faulty, manifest=m, out=tmp_path / "folder.h5", **given)
    by_table = lm.build(faulty, manifest=again, out=tmp_path / "table.h5", **given)
    with lm.open_dataset(by_folder.path) as a, lm.open_dataset(by_table.path) as b:
        assert np.array_equal(a.mels[:], b.mels[:], equal_nan=True)
        assert np.array_equal(a.labels, b.labels)
    assert lm.verify(by_table.path, root=faulty, table=tmp_path / "t.csv").ok


def read_columns() -> set[str]:
    from leakmel.recordings.tables import TABLE_COLUMNS

    return set(TABLE_COLUMNS)


@each("delimiter", [";", "\t", ","])
def test_a_table_whose_columns_all_have_other_names(made, delimiter):
    "As Excel writes it in Germany."
    rows = list(csv.DictReader((made / "t.csv").read_text(encoding="utf-8").splitlines()))
    lines = [delimiter.join((r["file"], r["condition"] or "LEAK", r["pipe"])) for r in rows]
    head = delimiter.join(("Datei", '"Klasse"', "Rohr"))
    (made / "t2.csv").write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    columns = "path=Datei,label=klasse,sensor=Rohr"
    m = lm.scan(made / "data", table=made / "t2.csv", columns=columns)
    assert (len(m), m.label_names) == (N, ("LEAK", "NOLEAK"))
    assert set(m.table["sensor"]) == {"P0", "P1", "P2"}


@pytest.mark.slow
def test_the_files_of_a_data_set_with_labels_by_people_are_a_table(made):
    labels = made / "labels.csv"
    for path in sorted((made / "data").glob("*.wav")):
        decision = Decision(
            path.name, lm.read_wav(path).digest, "LEAK" if path.name < "06" else "NOLEAK", "ann", now_utc()
        )
        append_decision(labels, decision)
    first = build(made, labels=labels)
    with lm.open_dataset(first.path) as ds:
        ds.files.to_csv(made / "files.csv", index=False)
    m = lm.scan(made / "data", table=made / "files.csv")
    again = lm.build(made / "data", manifest=m, out=made / "y.h5", spec=SHORT, progress="none", engine="cpu")
    assert (again.rows, again.verified.ok) == (N, True)
    with lm.open_dataset(first.path) as a, lm.open_dataset(again.path) as b:
        assert a.files["label"].tolist() == b.files["label"].tolist()


def test_the_table_of_a_folder_without_splits(made):
    m = lm.scan(made / "data", table=made / "t.csv", columns=COLUMNS)
    m.table.to_csv(made / "again.csv")
    again = lm.scan(made / "data", table=made / "again.csv")
    pd.testing.assert_frame_equal(again.table, m.table)


def test_a_pandas_table_in_place_of_a_manifest_or_a_file(made):
    m = lm.scan(made / "data", table=made / "t.csv", columns=COLUMNS)
    for call in (
        lambda: lm.build(made / "data", manifest=m.table, out=made / "x.h5"),  # type: ignore[arg-type]
        lambda: lm.build_all(made / "data", manifest=m.table, out_dir=made),  # type: ignore[arg-type]
        lambda: lm.preload(made / "data", manifest=m.table),  # type: ignore[arg-type]
        lambda: lm.scan(made / "data", table=m.table),  # type: ignore[arg-type]
    ):
        with raises("wrong-type", UsageError, says="DataFrame"):
            call()


def test_groups_by_a_column_of_the_table(made, capsys):
    table = pd.read_csv(made / "t.csv").assign(condition=["LEAK", "NOLEAK"] * (N // 2))
    table["tank"] = [f"T{i % 6}" for i in range(N)]
    table.to_csv(made / "t.csv", index=False)
    path = build(made).path
    split = lm_group_split(path, "tank")
    assert {len(rows) for rows in split.parts.values()} == {4}
    with raises("unknown-column", UsageError):
        lm_group_split(path, "tanks")


def lm_group_split(path, group):
    from leakmel.detector.data.splits import group_split

    shares = {"training": 1 / 3, "validation": 1 / 3, "testing": 1 - 2 / 3}
    return group_split([path], group, shares=shares, allow_leaky_split=True, progress="none")


@pytest.mark.slow
def test_train_by_a_column_and_predict_unlabelled_recordings(made, capsys):
    table = pd.read_csv(made / "t.csv", keep_default_na=False).assign(tank=[f"T{i // 2}" for i in range(N)])
    table.to_csv(made / "t.csv", index=False)
    path = build(made).path
    words = ["train", str(path), "--group", "tank", "--out", str(made / "model"), *tiny_words(1)]
    assert main([*words, "--allow-leaky-split"]) == 0
    capsys.readouterr()
    words = ["predict", str(made / "data"), "--model", str(made / "model"), "--table", str(made / "t.csv")]
    given = ["--columns", COLUMNS, "--out", str(made / "scores.csv"), "--device", "cpu", "--json"]
    assert main([*words, *given]) == 0
    assert json.loads(capsys.readouterr().out)["found"] == N
    scores = pd.read_csv(made / "scores.csv", keep_default_na=False)
    assert scores["label"].tolist().count("") == 2
    assert len(scores) == N
    m = lm.scan(made / "data", table=made / "t.csv", columns=COLUMNS)
    with raises("wrong-type", UsageError):
        lm.predict(made / "data", made / "model", manifest=m.table, out=made / "s.csv")  # type: ignore[arg-type]
