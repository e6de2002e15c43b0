"Opening a data set: what it offers, and what it refuses."

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from each import each
from errors import raises
from independent import content

import leakmel as lm
from leakmel.core.errors import DataError, VerifyError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    "A data set of 7 rows of three labels, one of them without rows here."
    from leakmel.recordings.demo import write_wav

    root = tmp_path_factory.mktemp("reader") / "data"
    for k, label in enumerate(["LEAK", "NOLEAK", "LEAK", "Straße 3", "NOLEAK", "LEAK", "LEAK"]):
        (root / "TRAINING" / label).mkdir(parents=True, exist_ok=True)
        write_wav(
            root / "TRAINING" / label / f"s{k}~{k:03d}~20240229_12000{k}~{k}.wav",
            np.random.default_rng(k).integers(-999, 999, 4096, np.int16),
            4096,
        )
    (root / "TESTING" / "CRACK").mkdir(parents=True)
    write_wav(root / "TESTING" / "CRACK" / "a.wav", np.zeros(4096, np.int16), 4096)
    (root / "TRAINING" / "LEAK" / os.fsdecode(b"\xff\n~x~y~2.wav")).write_bytes(
        (root / "TRAINING" / "LEAK" / "s0~000~20240229_120000~0.wav").read_bytes()
    )
    return lm.build(root, split="training", out=root.parent / "x.h5", progress="none").path


def broken(built: Path, path: Path, change) -> Path:
    "A copy of the data set with something changed."
    path.write_bytes(built.read_bytes())
    with h5py.File(path, "r+") as f:
        change(f)
    return path


def test_rows_and_labels(built):
    raw = content(built)
    with lm.open_dataset(built) as ds:
        assert len(ds) == 8
        assert ds.class_names == ["CRACK", "LEAK", "NOLEAK", "Straße 3"]
        assert ds.labels.tolist() == [1, 1, 1, 1, 1, 2, 2, 3]
        assert ds.labels.dtype == np.int16
        for i in (*range(8), *range(-8, 0), np.int64(3), np.int16(-1)):
            row, label = ds[i]
            assert row.dtype == np.float16
            assert row.shape == (4, 2, 64, 1)
            assert isinstance(label, int)
            assert label == raw["labels"][i]
            assert (row == raw["segments_mel"][i]).all()
        row[...] = 0  # the caller's own copy
        assert (ds[-1][0] == raw["segments_mel"][-1]).all()


@each("i", [8, -9, 1 << 40])
def test_missing_row_is_an_index_error(built, i):
    with lm.open_dataset(built) as ds, pytest.raises(IndexError, match=f"row {i} of 8"):
        ds[i]


def test_iteration_ends(built):
    with lm.open_dataset(os.fspath(built)) as ds:
        assert [label for _, label in ds] == ds.labels.tolist()  # type: ignore[attr-defined]  # by IndexError, as sequences do


def test_files_table(built):
    with lm.open_dataset(built) as ds:
        table = ds.files
        assert len(table) == len(ds)
        assert table["label"].tolist() == [ds.class_names[i] for i in ds.labels]
        assert table["path"].map(os.fsencode).tolist() == content(built)["files/path"].tolist()
        assert table["sensor"].tolist()[0] == "s0"
        assert table["start_time"].tolist()[0] == "2024-02-29T12:00:00"
        assert table["gain"].tolist()[:4] == [0, 2, 5, 6]
        assert set(table["status"]) == {"ok"}
        assert {
            "rms_db",
            "peak",
            "clipped_share",
            "dc_offset",
            "silent",
            "digest",
            "encoding",
            "channels",
            "n_samples",
            "sample_rate",
            "recording",
        } <= set(table)
        assert list(table.columns[:2]) == ["label", "path"]


def test_spec_is_read_from_the_file(built):
    with lm.open_dataset(built) as ds:
        assert ds.spec == lm.MelSpec(duration_s=1.0)
        assert ds.spec.preset_name == "disjoint@2"
        assert ds.config["center"] is False
        row, _ = ds[0]
        assert row.shape == ds.spec.row_shape


def test_repr_lists_the_content(built):
    with lm.open_dataset(built) as ds:
        assert repr(ds) == "MelDataset(x.h5: 8 rows of (4, 2, 64, 1), CRACK 0, LEAK 5, NOLEAK 2, Straße 3 1)"


def test_closed_by_with_and_by_close(built):
    with lm.open_dataset(built) as ds:
        assert ds.file
    assert not ds.file
    ds.close()
    assert ds.labels.tolist()[0] == 1  # what was read stays


def test_open_readers_do_not_stop_a_build(built, tmp_path):
    root = built.parent / "data"
    target = tmp_path / "x.h5"
    target.write_bytes(built.read_bytes())
    with lm.open_dataset(target) as ds:
        lm.build(root, split="testing", out=target, progress="none")
        assert len(ds) == 8
        ds[3]
    with lm.open_dataset(target) as ds:
        assert len(ds) == 1


# ---- the earlier system's files


ORIGINAL_CONFIG = {
    "sample_rate": 4096,
    "duration_sec": 10.0,
    "long_window": 1024,
    "short_window": 512,
    "n_mels": 64,
    "n_fft": 512,
    "hop_length": 128,
    "power": 1.0,
    "center": False,
}


def legacy_rows(n: int = 5) -> np.ndarray:
    return np.random.default_rng(0).normal(-40, 9, (n, 40, 2, 64, 1)).astype(np.float16)


def legacy_waves(n: int = 5) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 0.1, (n, 40, 2, 512)).astype(np.float32)


def legacy_file(
    path: Path,
    *,
    storage: str = "contiguous",
    text: str = "string",
    waves: bool = False,
    without: tuple[str, ...] = (),
) -> Path:
    "A file as the earlier system writes it, with h5py's defaults."
    forms: dict[str, dict[str, Any]] = {
        "contiguous": {},
        "gzip": {"chunks": (1, 40, 2, 64, 1), "compression": "gzip"},
        "chunked": {"chunks": True},
    }
    packed = forms[storage]

    def form(s: str) -> str | bytes:
        return np.bytes_(s.encode()) if text == "bytes" else s

    attributes: dict[str, Any] = {
        "config_json": form(json.dumps(ORIGINAL_CONFIG)),
        "labels_json": form('["LEAK", "NOLEAK", "Straße"]'),
        "label2id_json": form('{"LEAK": 0, "NOLEAK": 1, "Straße": 2}'),
        "created_at_utc": form("2025-01-01T00:00:00Z"),
    }
    if text == "list":
        attributes["labels_json"] = ["LEAK", "NOLEAK", "Straße"]
    with h5py.File(path, "w") as f:
        f.create_dataset("labels", data=np.array([0, 1, 1, 2, 0], np.int16))
        f.create_dataset("segments_mel", data=legacy_rows(), **packed)
        if waves:
            f.create_dataset(
                "segments_waveform",
                data=legacy_waves(),
                **(packed if storage != "gzip" else {"compression": "gzip"}),
            )
        for name, value in attributes.items():
            f.attrs[name] = value
        for name in without:
            del (f.attrs if name in f.attrs else f)[name]
    return path


@pytest.mark.slow
@each("storage", ["contiguous", "gzip", "chunked"])
@each("text", ["string", "bytes", "list"])
@each("waves", [False, True])
def test_legacy(tmp_path, storage, text, waves):
    path = legacy_file(tmp_path / "TRAINING_DATASET.H5", storage=storage, text=text, waves=waves)
    with raises("not-a-data-set", VerifyError, path=path, says="legacy=True"):
        lm.open_dataset(path)
    with lm.open_dataset(path, legacy=True) as ds:
        assert ds.class_names == ["LEAK", "NOLEAK", "Straße"]
        assert ds.labels.tolist() == [0, 1, 1, 2, 0]
        assert ds.labels.dtype == np.int16
        for i, right in enumerate(legacy_rows()):
            row, label = ds[i]
            assert row.dtype == np.float16
            assert (row == right).all()
            assert label == [0, 1, 1, 2, 0][i]
        assert ds.config == ORIGINAL_CONFIG
        assert ds.files["label"].tolist() == ["LEAK", "NOLEAK", "NOLEAK", "Straße", "LEAK"]
        assert ds.typical_rows() == {"LEAK": 0, "NOLEAK": 1, "Straße": 3}
        if waves:
            assert (ds.waveforms[:] == legacy_waves()).all()  # type: ignore[index]
        else:
            assert ds.waveforms is None
        with raises("no-spec", DataError, path=path):
            _ = ds.spec
    assert not lm.verify(path).ok


@each(
    "without", [("label2id_json",), ("created_at_utc",), ("label2id_json", "created_at_utc", "config_json")]
)
def test_legacy_files_need_only_rows_labels_and_names(tmp_path, without):
    with lm.open_dataset(legacy_file(tmp_path / "old.h5", without=without), legacy=True) as ds:
        assert len(ds) == 5
        if "config_json" in without:
            with raises("damaged-data-set", VerifyError, path=ds.path, says="config_json"):
                _ = ds.config


@pytest.mark.slow
@each("without", ["segments_mel", "labels", "labels_json"])
def test_legacy_file_names_the_missing_part(tmp_path, without):
    path = legacy_file(tmp_path / "old.h5", without=(without,))
    with raises("damaged-data-set", VerifyError, path=path, says=without):
        lm.open_dataset(path, legacy=True)
    with h5py.File(path, "r+") as f:
        assert f  # nobody holds it any more


def put(name: str, value) -> Callable[[h5py.File], None]:
    "A change that puts something in the place of a data set or an attribute."

    def change(f):
        if name in f:
            del f[name]
        (f if name.startswith(("segments", "labels")) and not name.endswith("json") else f.attrs)[name] = (
            value
        )

    return change


@pytest.mark.slow
@each(
    ("change", "code", "message"),
    [
        (put("labels", np.array([0, 1, 1, 2], np.int16)), "incomplete-data-set", "'labels': 4"),
        (put("labels", np.array([0, 1, 1, 3, 0], np.int16)), "damaged-data-set", "labels"),
        (put("labels", np.array([0, 1, 1, -1, 0], np.int16)), "damaged-data-set", "labels"),
        (put("labels", np.zeros(5)), "damaged-data-set", "labels"),
        (put("labels", np.zeros((5, 1), np.int16)), "damaged-data-set", "labels"),
        (put("segments_mel", np.zeros((5, 80, 64), np.float16)), "damaged-data-set", "segments_mel"),
        (put("segments_mel", np.zeros((5, 40, 2, 64, 1), np.int16)), "damaged-data-set", "segments_mel"),
        (
            put("segments_waveform", np.zeros((4, 40, 2, 512), np.float32)),
            "incomplete-data-set",
            "'segments_waveform': 4",
        ),
        (put("segments_waveform", np.zeros((5, 512), np.float32)), "damaged-data-set", "segments_waveform"),
        (put("labels_json", '["LEAK"]'), "damaged-data-set", "labels"),
        (put("labels_json", '{"LEAK": 0, "NOLEAK": 1, "CRACK": 2}'), "damaged-data-set", "labels"),
        (put("labels_json", "[1, 2, 3]"), "damaged-data-set", "labels"),
        (put("labels_json", b"\xff\xfe\xff"), "damaged-data-set", ""),
        (put("labels_json", "[" * 60_000), "damaged-data-set", ""),
        (put("labels_json", "__import__('os').mkdir('made')"), "damaged-data-set", ""),
        (put("labels_json", h5py.Empty("S1")), "damaged-data-set", ""),
    ],
)
def test_legacy_file_of_another_form_is_refused_by_name(tmp_path, monkeypatch, change, code, message):
    monkeypatch.chdir(tmp_path)
    path = legacy_file(tmp_path / "old.h5")
    with h5py.File(path, "r+") as f:
        change(f)
    with raises(code, VerifyError, path=path, says=message):
        lm.open_dataset(path, legacy=True)
    assert os.listdir(tmp_path) == ["old.h5"]  # nothing in it was executed
    with h5py.File(path, "r+") as f:
        assert f


@pytest.mark.slow
@each("value", ["[]", "7", "{", b"\xff", "__import__('os').mkdir('made')"])
def test_invalid_legacy_settings_are_refused(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    path = legacy_file(tmp_path / "old.h5")
    with h5py.File(path, "r+") as f:
        f.attrs["config_json"] = value
    with lm.open_dataset(path, legacy=True) as ds, raises("damaged-data-set", VerifyError, path=path):
        _ = ds.config
    assert os.listdir(tmp_path) == ["old.h5"]


def test_current_file_opens_as_legacy_file(built):
    with lm.open_dataset(built, legacy=True) as ds:
        assert len(ds) == 8


# ---- waveforms


@pytest.mark.slow
def test_waveforms_where_the_data_set_has_them(built, tmp_path):
    root = built.parent / "data"
    path = lm.build(root, split="training", out=tmp_path / "w.h5", with_waveforms=True, progress="none").path
    with lm.open_dataset(built) as ds:
        assert ds.waveforms is None
    with lm.open_dataset(path) as ds, h5py.File(built) as plain:
        assert isinstance(ds.waveforms, h5py.Dataset)
        assert ds.waveforms.shape == (8, 4, 2, 512)
        assert (ds.waveforms[7] == content(path)["segments_waveform"][7]).all()
        assert (ds.mels[:] == plain["segments_mel"][:]).all()
    for change in (
        lambda f: (
            f.__delitem__("segments_waveform"),
            f.__setitem__("segments_waveform", np.zeros((7, 4, 2, 512), np.float32)),
        ),
        lambda f: (f.__delitem__("segments_waveform"), f.create_group("segments_waveform")),
    ):
        with pytest.raises(VerifyError) as caught:
            lm.open_dataset(broken(path, tmp_path / "y.h5", change))
        assert caught.value.code in ("incomplete-data-set", "damaged-data-set")


# ---- refusals


def test_missing_and_other_files_are_refused(tmp_path):
    with raises("no-such-file", DataError, path=tmp_path / "nowhere.h5"):
        lm.open_dataset(tmp_path / "nowhere.h5")
    for name, raw in (("a", b""), ("b", b"RIFF"), ("c", b"\x89HDF\r\n\x1a\n" + bytes(99))):
        (tmp_path / name).write_bytes(raw)
        with raises("not-hdf5", VerifyError, path=tmp_path / name):
            lm.open_dataset(tmp_path / name)
    with raises("not-a-file", path=tmp_path):
        lm.open_dataset(tmp_path)


def test_named_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.h5")
    with raises("not-a-file", path=tmp_path / "pipe.h5"):
        lm.open_dataset(tmp_path / "pipe.h5")


@pytest.mark.slow
@each(
    ("name", "change", "code"),
    [
        ("incomplete", lambda f: f.attrs.__setitem__("complete", False), "incomplete-data-set"),
        ("no word on it", lambda f: f.attrs.__delitem__("complete"), "incomplete-data-set"),
        ("other count", lambda f: f.attrs.__setitem__("n_rows", 7), "incomplete-data-set"),
        ("other schema", lambda f: f.attrs.__setitem__("schema_version", 2), "other-schema"),
        ("no schema", lambda f: f.attrs.__delitem__("schema_version"), "not-a-data-set"),
        ("no rows", lambda f: f.__delitem__("segments_mel"), "damaged-data-set"),
        ("no labels", lambda f: f.__delitem__("labels"), "damaged-data-set"),
        ("no names", lambda f: f.attrs.__delitem__("labels_json"), "damaged-data-set"),
        ("names that are no JSON", lambda f: f.attrs.__setitem__("labels_json", "["), "damaged-data-set"),
        ("names that are a number", lambda f: f.attrs.__setitem__("labels_json", 7), "damaged-data-set"),
        ("names too few", lambda f: f.attrs.__setitem__("labels_json", "[]"), "damaged-data-set"),
        (
            "rows are a group",
            lambda f: (f.__delitem__("segments_mel"), f.create_group("segments_mel")),
            "damaged-data-set",
        ),
        (
            "rows are a scalar",
            lambda f: (f.__delitem__("segments_mel"), f.__setitem__("segments_mel", 1.0)),
            "damaged-data-set",
        ),
        (
            "labels are a scalar",
            lambda f: (f.__delitem__("labels"), f.__setitem__("labels", 1)),
            "damaged-data-set",
        ),
        (
            "rows are flat",
            lambda f: (f.__delitem__("segments_mel"), f.__setitem__("segments_mel", np.zeros(8, np.float16))),
            "damaged-data-set",
        ),
    ],
)
def test_refusals_name_the_file_and_close_it(built, tmp_path, name, change, code):
    path = broken(built, tmp_path / "y.h5", change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with raises(code, VerifyError, path=path):
            lm.open_dataset(path)
    with h5py.File(path, "r+") as f:
        assert f  # nobody holds it any more


@pytest.mark.slow
@each("kind", ["external storage", "external link", "soft link", "virtual", "huge"])
@each("legacy", [False, True])
def test_hostile_file_is_refused_before_data_are_read(built, tmp_path, kind, legacy):
    "Such a file could show other files of this machine as rows, or ask for terabytes."
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(256)) * 4096)

    def change(f):
        shape = (8, 4, 2, 64, 1)
        del f["segments_mel"]
        match kind:
            case "external storage":
                f.create_dataset("segments_mel", shape, "f2", external=[(os.fspath(secret), 0, 8192)])
            case "external link":
                with h5py.File(tmp_path / "other.h5", "w") as g:
                    g["segments_mel"] = np.zeros(shape, np.float16)
                f["segments_mel"] = h5py.ExternalLink(os.fspath(tmp_path / "other.h5"), "segments_mel")
            case "soft link":
                f["elsewhere"] = np.zeros(shape, np.float16)
                f["segments_mel"] = h5py.SoftLink("/elsewhere")
            case "virtual":
                with h5py.File(tmp_path / "other.h5", "w") as g:
                    g["segments_mel"] = np.zeros(shape, np.float16)
                layout = h5py.VirtualLayout(shape, "f2")
                layout[:] = h5py.VirtualSource(os.fspath(tmp_path / "other.h5"), "segments_mel", shape)
                f.create_virtual_dataset("segments_mel", layout)
            case "huge":
                f.create_dataset("segments_mel", (1 << 33, *shape[1:]), "f2", chunks=(8, *shape[1:]))
                del f["labels"]
                f.create_dataset("labels", (1 << 33,), "i2", chunks=(1 << 20,))
                f.attrs["n_rows"] = 1 << 33

    path = broken(built, tmp_path / "y.h5", change)

    with raises("unsafe-file", VerifyError, path=path):
        lm.open_dataset(path, legacy=legacy)
    assert not lm.verify(path).ok


def test_warnings_are_not_given_for_a_good_file(built):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lm.open_dataset(built) as ds:
            assert ds.files is ds.files
