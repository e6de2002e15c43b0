"Exports to other formats: every value comes back, nothing leaves the output folder, and an output is complete or absent."

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import need
from each import each
from errors import raises

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import (
    DataError,
    MissingPackageError,
    OutputError,
    SpaceError,
    UsageError,
    VerifyError,
)
from leakmel.core.export import NOT_GIVEN
from leakmel.dataset.schema import (
    FILE_COLUMNS,
    Metadata,
    Rejected,
    create_parts,
    metadata_digest,
    open_file,
    root_attributes,
    write_metadata,
)
from leakmel.extras import formats
from leakmel.recordings.demo import write_wav

RATE = 4096
SPEC = lm.MelSpec.preset("disjoint", sample_rate=RATE, duration_s=1.0)
HOSTILE = (
    b"=cmd|'.C calc'!A1.wav",
    b"a\nb.wav",
    b"<img src=x onerror=alert(1)>.wav",
    b"![x](javascript:alert(1)).wav",
    b"..wav.wav",
    b"caf\xe9.wav",
    b"'; DROP TABLE files; --.wav",
)
LABELS = ("<b>LEAK|x</b>", "=1+1")
EXTRA = ("rows.json", "__proto__", "=SUM(A1)", "<script>")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A data set whose paths, labels and columns are hostile, with a rejected file."
    top = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    lines = [",".join(("path_base64", "label", "gain", "start_time", *EXTRA))]
    for k, name in enumerate((*HOSTILE, b"=broken.wav")):
        path = top / "recordings" / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)
        write_wav(path, rng.integers(-900, 900, RATE).astype(np.int16), RATE)
        if name == b"=broken.wav":
            path.write_bytes(b"RIFF")
        when = ("", "2024-02-29T12:00:00", "2024-02-29T12:00:00.5+01:00")[k % 3]
        cells = (base64.b64encode(name).decode(), LABELS[k % 2], ["", "8.5"][k % 2], when)
        lines.append(",".join((*cells, "../../etc/passwd", "=HYPERLINK(1)", "x", "")))
    (top / "table.csv").write_text("\n".join(lines))
    listed = lm.scan(top / "recordings", table=top / "table.csv", progress="none")
    built = lm.build(top / "recordings", out=top / "t.h5", manifest=listed, spec=SPEC, progress="none")
    assert (built.rows, len(built.rejections)) == (len(HOSTILE), 1)
    return built.path


def need_formats() -> None:
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        need(False, "the extra formats")


@pytest.fixture(scope="module")
def exports(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A folder with an export in each format."
    need_formats()
    top = tmp_path_factory.mktemp("exports")
    for to in formats.FORMATS:
        lm.export_dataset(hostile, out=top / to, to=to, progress="none")
    return top


def raw_path(row: dict[str, Any]) -> bytes:
    "Path of a row, from the text and from base64."
    return base64.b64decode(row["path_base64"]) if row["path_base64"] else row["path"].encode()


def expected(path: Path) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
    "Read mels, and label, path and digests of each row, with h5py alone."
    with h5py.File(path) as f:
        names = json.loads(f.attrs["labels_json"])
        columns = [f["files/path"][:].tolist(), f["files/digest"][:].tolist(), f["digests/rows"][:].tolist()]
        labels = [names[k] for k in f["labels"][:].tolist()]
        rows = [(label, p, d.decode(), r.decode()) for label, p, d, r in zip(labels, *columns, strict=True)]
        return f["segments_mel"][:], rows


def facts(row: dict[str, Any], label: str) -> tuple[Any, ...]:
    return label, raw_path(row), row["digest"], row["row_digest"]


def assert_same_bits(found: Any, right: np.ndarray) -> None:
    found = np.ascontiguousarray(found)
    assert (found.dtype, found.shape) == (right.dtype, right.shape)
    assert found.tobytes() == right.tobytes()


# ---- each format, read by its own library


@pytest.mark.slow
def test_parquet_tables_keep_types_and_values(exports: Path, hostile: Path) -> None:
    need_formats()
    import pyarrow.parquet as pq

    table = pq.read_table(exports / "parquet" / "files.parquet")
    kinds = {f.name: str(f.type) for f in table.schema}
    assert kinds["label"].startswith("dictionary<values=string")
    wanted = {
        "start_time": "timestamp[us]",
        "start_utc_offset_s": "int32",
        "digest": "string",
        "row": "int64",
    }
    wanted |= {
        "gain": "float",
        "rms_db": "float",
        "sample_rate": "int32",
        "silent": "bool",
        "n_samples": "int64",
    }
    assert {name: kinds[name] for name in wanted} == wanted
    rows = table.to_pylist()
    _, right = expected(hostile)
    assert [facts(row, row["label"]) for row in rows] == right
    with lm.open_dataset(hostile) as ds:
        files = ds.files
    for name in ("rms_db", "peak", "n_samples", "status", "encoding", *(f"extra/{n}" for n in EXTRA)):
        assert [row[name] for row in rows] == files[name].tolist()
    assert [row["gain"] for row in rows] == [None if g != g else g for g in files["gain"].tolist()]
    times = [row["start_time"].isoformat() if row["start_time"] else "" for row in rows]
    offsets = [row["start_utc_offset_s"] for row in rows]
    shown = [t + ("+01:00" if s == 3600 else "") for t, s in zip(times, offsets, strict=True)]
    assert [t.replace(".500000", ".5") for t in shown] == [
        t.replace(".500000", ".5") for t in files["start_time"]
    ]
    assert {3600, None} == set(offsets)
    (rejected,) = pq.read_table(exports / "parquet" / "rejected.parquet").to_pylist()
    assert (raw_path(rejected), rejected["code"]) == (b"=broken.wav", "truncated") or rejected[
        "code"
    ] == "not_wav"


@pytest.mark.slow
def test_huggingface_loads_without_a_network(exports: Path, hostile: Path, tmp_path: Path) -> None:
    "In a process of its own: the package starts threads and reads the environment when it is imported."
    need_formats()
    code = """
import json, sys
import numpy as np
from datasets import load_dataset
from datasets.utils.logging import disable_progress_bar
disable_progress_bar()
(found,) = load_dataset(sys.argv[1], cache_dir=sys.argv[2]).values()
mels = np.stack([np.array(x.as_py(), np.float16) for x in found.with_format("arrow")[:]["mel"]])
np.save(sys.argv[3], mels)
names = found.features["label"].names
columns = ("path", "path_base64", "digest", "row_digest")
print(json.dumps([{"label": names[r["label"]]} | {n: r[n] for n in columns} for r in found.remove_columns("mel")]))
"""
    words = [str(exports / "huggingface"), str(tmp_path / "cache"), str(tmp_path / "mels.npy")]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    mels, right = expected(hostile)
    assert_same_bits(np.load(tmp_path / "mels.npy"), mels)
    assert [facts(row, row["label"]) for row in json.loads(done.stdout.splitlines()[-1])] == right


# ---- hostile contents


@pytest.mark.slow
@each("to", formats.FORMATS)
def test_nothing_escapes_the_output_folder(hostile: Path, tmp_path: Path, to: str) -> None:
    need_formats()
    changed = tmp_path / "t.h5"
    changed.write_bytes(hostile.read_bytes())
    with h5py.File(changed, "r+") as f:
        f.attrs["split"] = "../../evil"
        f.attrs["metadata_digest"] = metadata_digest(f)  # whoever makes such a file knows the format
    lm.export_dataset(changed, out=tmp_path / "a" / "out", to=to, progress="none")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "t.h5"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["out"]
    names = [p.relative_to(tmp_path / "a" / "out").as_posix() for p in (tmp_path / "a" / "out").rglob("*")]
    plain = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./")
    assert set("".join(names)) <= plain
    assert not any(".." in name or "evil" in name or "passwd" in name for name in names)


def test_card_of_an_export_has_no_html_link_or_image(exports: Path) -> None:
    for to in formats.FORMATS:
        text = (exports / to / "README.md").read_text(encoding="utf-8")
        assert "\\<b\\>LEAK\\|x\\</b\\>" in text
        bare = text.replace("\\\\", "").replace("\\<", "").replace("\\[", "").replace("\\|", "")
        assert "<" not in bare
        assert "](" not in bare.replace("\\]", "")
        assert f"Licence: {NOT_GIVEN}" in text


# ---- an output is complete or absent


@each("to", formats.FORMATS)
def test_existing_output_is_not_replaced(hostile: Path, tmp_path: Path, to: str) -> None:
    need_formats()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("out", "file", "link"):
        with raises("output-exists", OutputError, path=tmp_path / name):
            lm.export_dataset(hostile, out=tmp_path / name, to=to, progress="none")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "out"]
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_empty_folder_and_remains_of_a_killed_export(hostile: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "files.parquet").write_text("torn")
    done = lm.export_dataset(hostile, out=tmp_path / "out", to="parquet", progress="none")
    assert (done.rows, [p.name for p in tmp_path.iterdir()]) == (len(HOSTILE), ["out"])
    for path in (tmp_path / "file", tmp_path / ".y.partial"):  # what is in the way is named
        path.write_text("mine")
    for out, path in (
        (tmp_path / "file" / "y", tmp_path / "file"),
        (tmp_path / "y", tmp_path / ".y.partial"),
    ):
        with raises("write-failed", OutputError, path=path):
            lm.export_dataset(hostile, out=out, to="parquet", progress="none")
        assert path.read_text() == "mine"


@each("to", formats.FORMATS)
def test_interruption_leaves_nothing(
    hostile: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_formats()

    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(formats, "data_set_facts", stop)
    with pytest.raises(KeyboardInterrupt):
        lm.export_dataset(hostile, out=tmp_path / "out", to=to, progress="none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_damaged_row_is_not_exported(hostile: Path, tmp_path: Path) -> None:
    need_formats()
    content = bytearray(hostile.read_bytes())
    with h5py.File(hostile) as f:
        content[f["segments_mel"].id.get_offset() + 5] ^= 1
    (tmp_path / "t.h5").write_bytes(content)
    with raises("damaged-data-set", VerifyError, path=tmp_path / "t.h5"):
        lm.export_dataset(tmp_path / "t.h5", out=tmp_path / "out", to="huggingface", progress="none")
    assert [p.name for p in tmp_path.iterdir()] == ["t.h5"]


def test_file_that_differs_is_not_published(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "A value of the file is not the one that is read again for the comparison."
    need_formats()
    real = formats.column_pages
    passes = iter(("written", "compared"))

    def changed(source: Any) -> Iterator[dict[str, Any]]:
        is_compared = next(passes) == "compared"
        for page in real(source):
            yield page | {"row_digest": ["0" * 32, *page["row_digest"][1:]]} if is_compared else page

    monkeypatch.setattr(formats, "column_pages", changed)
    with raises("export-differs", VerifyError):
        lm.export_dataset(hostile, out=tmp_path / "out", to="parquet", progress="none")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    "A file system that is too small for any export."
    mount = tmp_path / "disk"
    mount.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8k,nr_inodes=1000", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("to", formats.FORMATS)
def test_full_disk_is_reported(hostile: Path, disk: Path, to: str, capsys: pytest.CaptureFixture) -> None:
    need_formats()
    with raises("no-space", SpaceError):
        lm.export_dataset(hostile, out=disk / "out", to=to, progress="none")
    assert list(disk.iterdir()) == []
    assert main(["export", str(hostile), "--out", str(disk / "out"), "--to", to, "--quiet"]) == 3
    assert "no room left" in (text := capsys.readouterr().err) or "free space" in text


# ---- several splits, errors of usage, and what a plain build imports


@pytest.mark.slow
def test_folder_of_splits_is_one_export(demo: Path, tmp_path: Path) -> None:
    need_formats()
    import pyarrow.parquet as pq

    built = lm.build_all(demo, out_dir=tmp_path / "mels", progress="none", check=0)
    done = lm.export_dataset(tmp_path / "mels", out=tmp_path / "out", progress="none")
    table = pq.read_table(tmp_path / "out" / "files.parquet")
    assert (done.rows, table.num_rows) == (sum(b.rows for b in built),) * 2
    rows = table.select(["split", "row"]).to_pylist()
    right = [
        (s, k)
        for s, b in zip(("training", "validation", "testing"), built, strict=True)
        for k in range(b.rows)
    ]
    assert [(r["split"], r["row"]) for r in rows] == right
    other = lm.MelSpec.preset("overlap", sample_rate=RATE, duration_s=1.0)
    lm.build(
        demo,
        split="testing",
        out=tmp_path / "mels" / "TESTING_DATASET.H5",
        spec=other,
        progress="none",
        check=0,
    )
    with raises("data-sets-differ", DataError):
        lm.export_dataset(tmp_path / "mels", out=tmp_path / "out2", progress="none")


def test_exchanged_labels_are_not_exported(hostile: Path, tmp_path: Path) -> None:
    need_formats()
    (tmp_path / "t.h5").write_bytes(hostile.read_bytes())
    with h5py.File(tmp_path / "t.h5", "r+") as f:
        f["labels"][:] = 1 - f["labels"][:]
    with raises("damaged-data-set", VerifyError, path=tmp_path / "t.h5"):
        lm.export_dataset(tmp_path / "t.h5", out=tmp_path / "out", progress="none")
    (tmp_path / "t.h5").write_bytes(hostile.read_bytes())
    with h5py.File(tmp_path / "t.h5", "r+") as f:  # texts where numbers belong, with the right digest
        n = len(f["files/silent"])
        del f["files/silent"]
        f["files/silent"] = np.full(n, b"no")
        f.attrs["metadata_digest"] = metadata_digest(f)
    with raises("damaged-data-set", VerifyError, path=tmp_path / "t.h5"):
        lm.export_dataset(tmp_path / "t.h5", out=tmp_path / "out", progress="none")
    assert [p.name for p in tmp_path.iterdir()] == ["t.h5"]


def test_the_format_of_a_detector_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.pt").touch()
    for given in (tmp_path / "run", tmp_path / "run" / "model.pt"):
        assert main(["export", str(given), "--out", str(tmp_path / "out"), "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"].endswith("Add --onnx")


def test_errors_of_usage(hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_formats()
    with raises("unknown-choice", UsageError):
        lm.export_dataset(hostile, out=tmp_path / "out", to="csv")
    with raises("no-such-file", DataError):
        lm.export_dataset(tmp_path, out=tmp_path / "out")
    with raises("no-such-file", DataError):
        lm.export_dataset(tmp_path / "no.h5", out=tmp_path / "out", to="parquet")
    for to in formats.FORMATS:
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "pyarrow", None)
            with raises("missing-package", MissingPackageError) as caught:
                lm.export_dataset(hostile, out=tmp_path / "out", to=to, progress="none")
        assert "[formats]" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_plain_build_imports_no_export(demo: Path, tmp_path: Path) -> None:
    code = """
import sys
from leakmel.cli import main
assert main(sys.argv[1:]) == 0
packages = ("pyarrow", "datasets", "duckdb")
print([m for m in sys.modules if m.startswith("leakmel.extras.formats") or m in packages])
"""
    words = [
        "build",
        str(demo),
        "--split",
        "testing",
        "--out",
        str(tmp_path / "t.h5"),
        "--quiet",
        "--check",
        "0",
    ]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


# ---- many rows


def write_many(path: Path, n: int) -> None:
    "Write a data set of many rows: columns of random values, rows that are not written (zeros)."
    rng = np.random.default_rng(0)
    spec = lm.MelSpec.preset("disjoint", sample_rate=RATE, duration_s=0.25)
    numbers = np.arange(n)
    texts = {"sensor": numbers % 300, "recording": numbers, "session": numbers % 7, "folder": numbers % 5}
    columns: dict[str, Any] = {name: values.astype("S7") for name, values in texts.items()}
    columns["path"] = np.char.add(np.char.add(b"LEAK/", columns["recording"]), b".wav")
    when = np.datetime64("2024-02-29T12:00:00") + numbers.astype("timedelta64[s]")
    columns["start_time"] = np.where(numbers % 9 > 0, np.datetime_as_string(when).astype("S19"), b"")
    columns["digest"] = np.array([b"%032x" % k for k in range(n)])
    columns |= {"encoding": np.full(n, b"pcm16"), "status": np.full(n, b"ok")}
    for name in ("rms_db", "peak", "clipped_share", "dc_offset", "gain"):
        columns[name] = rng.random(n, np.float32)
    columns["gain"][::5] = np.nan
    columns |= {"sample_rate": np.full(n, RATE, np.int32), "n_samples": numbers + (1 << 40)}
    columns |= {"channels": np.ones(n, np.int16), "silent": (numbers % 2).astype(np.uint8)}
    assert set(columns) == set(FILE_COLUMNS)
    rejected = tuple(Rejected(b"x/%d.wav" % k, "not_wav", "no RIFF header") for k in range(n // 10))
    labels, digests = (numbers % 2).astype(np.int16), np.full(n, b"0" * 32)
    attributes = root_attributes(spec, "cpu@2/cpu", "0" * 12, ["LEAK", "NOLEAK"], "TRAINING", n)
    create_parts(path, n, spec.row_shape, None)
    with open_file(path, "r+") as file:
        write_metadata(file, Metadata(spec, attributes, labels, columns, digests, rejected))


def check_many(path: Path, out: Path, n: int) -> None:
    "Compare the tables with the HDF5 file, column by column, with DuckDB and pyarrow."
    import pyarrow.parquet as pq

    table = pq.read_table(
        out / "files.parquet", columns=["row", "label_id", "rms_db", "n_samples", "silent", "path"]
    )
    with h5py.File(path) as f:
        assert np.array_equal(table["label_id"].to_numpy(), f["labels"][:])
        for name in ("rms_db", "n_samples"):
            assert np.array_equal(table[name].to_numpy(), f[f"files/{name}"][:])
        assert np.array_equal(table["silent"].to_numpy(), f["files/silent"][:].astype(bool))
        paths = f["files/path"][:].tolist()
        assert table["path"].to_pylist() == [p.decode() for p in paths]
    assert np.array_equal(table["row"].to_numpy(), np.arange(n))
    sql = (
        f"SELECT count(*), count(gain), count(start_time), count(DISTINCT digest) FROM '{out}/files.parquet'"
    )
    assert query(sql) == [(n, n - -(-n // 5), n - -(-n // 9), n)]
    sql = f"SELECT count(*) FROM '{out}/rejected.parquet' WHERE code = 'not_wav'"
    assert query(sql) == [(n // 10,)]
    assert pq.ParquetFile(out / "files.parquet").num_row_groups == -(-n // 32_768)


def query(sql: str) -> list[Any]:
    import duckdb

    found: Any = duckdb.sql(sql)
    return found.fetchall()


EXPORT = """
import re, sys
import leakmel as lm
lm.export_dataset(sys.argv[1], out=sys.argv[2], progress="none")
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("n", [40_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_many_rows_in_a_gigabyte(tmp_path: Path, n: int) -> None:
    need_formats()
    write_many(tmp_path / "t.h5", n)
    words = [sys.executable, "-c", EXPORT, str(tmp_path / "t.h5"), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 1e9
    check_many(tmp_path / "t.h5", tmp_path / "out", n)
