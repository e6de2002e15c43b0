"""The layout contract: what the earlier system's trainer and plain h5py read from a data set.

How features are worked out by SciPy stands in `independent.py`; that the reference agrees with librosa and torchaudio, in `test_mel.py`.
"""

import itertools
import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from build_runs import execute, plan_run
from each import each
from independent import content, fit, leftovers, log_mel, off, read, walk

import leakmel as lm
from leakmel.cli import main
from leakmel.dataset.job import store_waveforms, waveform_shape
from leakmel.dataset.loader import Slot
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.dataset.schema import ALIGNMENT
from leakmel.dataset.writer import RowFile
from leakmel.mel.engines import CPU_ENGINES
from leakmel.recordings.demo import write_wav

SPLITS = ("TRAINING", "VALIDATION", "TESTING")
LABELS = ["LEAK", "NORMAL", "Straße 3"]
QUIET: dict[str, Any] = {"progress": "none"}
TEN_SECONDS = 40_960


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> Path:
    "Three splits of 10-s recordings at 4,096 Hz, 16 bit, quiet ones and loud ones; in each split one file that is none."
    root = tmp_path_factory.mktemp("layout") / "data"
    for s, (split, n) in enumerate(zip(SPLITS, (9, 4, 3), strict=True)):
        for k in range(n):
            label = LABELS[(k + s) % 3]
            (root / split / label).mkdir(parents=True, exist_ok=True)
            loud = (20, 900, 9000)[k % 3]
            x = (
                np.random.default_rng(100 * s + k)
                .normal(0, loud, TEN_SECONDS)
                .clip(-32_768, 32_767)
                .astype(np.int16)
            )
            write_wav(root / split / label / f"H{k % 2}~{k:03d}~20250304_0506{k:02d}~{k % 5}.wav", x, 4096)
        (root / split / LABELS[s % 3] / "H0~000a.wav").write_bytes(b"RIFF")
    return root


@pytest.fixture(scope="module")
def plain(recordings, tmp_path_factory) -> Path:
    "The folder of the three data sets."
    out = tmp_path_factory.mktemp("plain")
    lm.build_all(recordings, out_dir=out, **QUIET)
    return out


@pytest.fixture(scope="module")
def waved(recordings, tmp_path_factory) -> Path:
    "The folder of the three data sets with waveforms."
    out = tmp_path_factory.mktemp("waved")
    lm.build_all(recordings, out_dir=out, with_waveforms=True, **QUIET)
    return out


@pytest.fixture(scope="module", params=["plain", "waved"])
def folder(request) -> Path:
    "Either folder."
    return request.getfixturevalue(request.param)


# ---- as the earlier trainer reads it


def as_the_trainer_reads(path: Path, **how: Any) -> dict[str, Any]:
    "Labels, rows and settings of a data set, in the way and with the keys of the earlier system's trainer."
    with h5py.File(path, "r", **how) as f:
        config = json.loads(f.attrs["config_json"])
        keys = (
            "sample_rate",
            "duration_sec",
            "long_window",
            "short_window",
            "n_mels",
            "n_fft",
            "hop_length",
            "power",
            "center",
        )
        rows = f["segments_mel"]
        return {
            "labels": f["labels"][:],
            "n": rows.shape[0],
            "shape": rows.shape[1:],
            "dtype": rows.dtype,
            "rows": np.stack([rows[i].astype(np.float32) for i in range(rows.shape[0])]),
            "config": {k: config[k] for k in keys},
            "names": json.loads(f.attrs["labels_json"]),
            "ids": json.loads(f.attrs["label2id_json"]),
            "waveforms": f["segments_waveform"][:] if "segments_waveform" in f else None,
        }


def test_names_of_the_files(folder):
    assert leftovers(folder) == sorted(
        f"{s}_DATASET.H5{end}" for s in SPLITS for end in ("", ".report.json", ".timeline.json")
    )


@each("split", SPLITS)
def test_earlier_trainer_reads_rows_labels_and_settings(recordings, folder, split):
    got = as_the_trainer_reads(folder / f"{split}_DATASET.H5")
    paths = [p for p in walk(recordings / split) if b"000a" not in p]
    assert got["n"] == len(paths) == len(got["labels"])
    assert got["shape"] == (40, 2, 64, 1)
    assert got["dtype"] == np.dtype("<f2")
    assert got["labels"].dtype == np.dtype("<i2")
    assert got["config"] == {
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
    assert got["names"] == LABELS
    assert got["ids"] == {name: i for i, name in enumerate(LABELS)}
    assert [LABELS[i] for i in got["labels"]] == [os.fsdecode(p).split("/")[0] for p in paths]
    assert np.isfinite(got["rows"]).all()
    assert got["rows"].max() < 100
    assert got["rows"].min() >= -200


@each(
    "how",
    [
        {"swmr": False, "libver": "earliest"},
        {"libver": "latest"},
        {"locking": False},
        {"driver": "core", "backing_store": False},
        {"driver": "stdio"},
        {"driver": "sec2"},
        {"rdcc_nbytes": 0},
    ],
    ids=str,
)
def test_content_does_not_depend_on_open_options(waved, how):
    path = waved / "TRAINING_DATASET.H5"
    right, got = as_the_trainer_reads(path), as_the_trainer_reads(path, **how)
    for name in right:
        np.testing.assert_array_equal(got[name], right[name], strict=isinstance(right[name], np.ndarray))


def test_read_only_file_is_read_and_not_changed(waved, tmp_path):
    path = tmp_path / "x.h5"
    path.write_bytes(before := (waved / "TRAINING_DATASET.H5").read_bytes())
    path.chmod(0o400)
    as_the_trainer_reads(path)
    assert path.read_bytes() == before


# ---- every name, kind and shape


COLUMNS = {
    "path": "S",
    "sensor": "S",
    "recording": "S",
    "start_time": "S",
    "gain": "<f4",
    "sample_rate": "<i4",
    "n_samples": "<i8",
    "channels": "<i2",
    "encoding": "S",
    "status": "S",
    "rms_db": "<f4",
    "peak": "<f4",
    "clipped_share": "<f4",
    "dc_offset": "<f4",
    "silent": "|u1",
    "digest": "|S32",
}
ATTRIBUTES = {
    "schema_version": np.integer,
    "leakmel_version": str,
    "config_json": str,
    "engine": str,
    "fingerprint": str,
    "n_rows": np.integer,
    "digest_algorithm": str,
    "labels_json": str,
    "label2id_json": str,
    "complete": np.bool_,
    "split": str,
    "metadata_digest": str,
}


def is_kind(dtype: np.dtype, wanted: str) -> bool:
    return dtype.kind == "S" if wanted == "S" else dtype == np.dtype(wanted)


@each("split", SPLITS)
def test_every_name_kind_and_shape(recordings, folder, split):
    n = len(walk(recordings / split)) - 1
    with h5py.File(folder / f"{split}_DATASET.H5", "r") as f:
        waves = {"segments_waveform"} if "segments_waveform" in f else set()
        assert (
            set(f)
            == {
                "segments_mel",
                "labels",
                "files",
                "digests",
                "rejected",
                "mel_hz",
                "long_start_s",
                "short_start_s",
            }
            | waves
        )
        shapes = {
            "segments_mel": ("<f2", (n, 40, 2, 64, 1)),
            "labels": ("<i2", (n,)),
            "digests/rows": ("|S32", (n,)),
            "mel_hz": ("<f8", (64,)),
            "long_start_s": ("<f8", (40,)),
            "short_start_s": ("<f8", (2,)),
            "rejected/path": ("S", (1,)),
            "rejected/code": ("S", (1,)),
            "rejected/message": ("S", (1,)),
        } | {f"files/{name}": (kind, (n,)) for name, kind in COLUMNS.items()}
        if waves:
            shapes |= {"segments_waveform": ("<f4", (n, 40, 2, 512)), "digests/waveforms": ("|S32", (n,))}
        for name, (kind, shape) in shapes.items():
            assert isinstance(f[name], h5py.Dataset), name
            assert is_kind(f[name].dtype, kind), (name, f[name].dtype)
            assert f[name].shape == shape, name
        assert set(f["digests"]) == ({"rows", "waveforms"} if waves else {"rows"})
        assert set(f["rejected"]) == {"path", "code", "message"}
        for name, wanted in ATTRIBUTES.items():
            assert isinstance(f.attrs[name], wanted), name
        assert f.attrs["n_rows"] == n
        assert f.attrs["split"] == split
        assert f.attrs["schema_version"] == 1
        assert f.attrs["complete"]
        assert not [name for name in f.attrs if "time" in name or "created" in name or "date" in name]


def test_settings_hold_every_field_of_the_spec(waved):
    with h5py.File(waved / "TESTING_DATASET.H5", "r") as f:
        config = json.loads(f.attrs["config_json"])
    assert set(config) == set(lm.MelSpec().to_dict()) | {"duration_sec", "center"}
    assert "with_waveforms" not in config


def test_creation_time_is_in_the_report_and_not_in_the_file(folder):
    for split in SPLITS:
        made = json.loads((folder / f"{split}_DATASET.H5.report.json").read_text())["created_at_utc"]
        raw = (folder / f"{split}_DATASET.H5").read_bytes()
        assert made[:4].isdigit()
        assert made.endswith("+00:00")
        assert b"created_at_utc" not in raw
        assert made.encode() not in raw
        assert made[:10].encode() not in raw


def test_dimension_scales(waved):
    with h5py.File(waved / "TRAINING_DATASET.H5", "r") as f:
        rows, waves = f["segments_mel"], f["segments_waveform"]
        assert [d.label for d in rows.dims] == ["row", "long_start_s", "short_start_s", "mel_hz", "frame"]
        assert [d.label for d in waves.dims] == ["row", "long_start_s", "short_start_s", "sample"]
        for part, axis, name in (
            (rows, 1, "long_start_s"),
            (rows, 2, "short_start_s"),
            (rows, 3, "mel_hz"),
            (waves, 1, "long_start_s"),
            (waves, 2, "short_start_s"),
        ):
            assert h5py.h5ds.is_scale(f[name].id)
            assert h5py.h5ds.get_scale_name(f[name].id) == name.encode()
            assert h5py.h5ds.is_attached(part.id, f[name].id, axis)
            assert part.dims[axis][0] == f[name]
            assert len(f[name]) == part.shape[axis]
        assert (rows.attrs["units"], waves.attrs["units"]) == ("dB", "full scale")
        assert [f[n].attrs["units"] for n in ("mel_hz", "long_start_s", "short_start_s")] == ["Hz", "s", "s"]
        np.testing.assert_allclose(f["long_start_s"][:], np.arange(40) * 0.25)
        np.testing.assert_allclose(f["short_start_s"][:], [0, 0.125])
        edges = np.linspace(0, 2595 * np.log10(1 + 2048 / 700), 66)
        np.testing.assert_allclose(f["mel_hz"][:], 700 * (10 ** (edges[1:-1] / 2595) - 1))


# ---- where the bytes are


def walk_low(group: h5py.h5g.GroupID, prefix: bytes = b"") -> dict[bytes, h5py.h5d.DatasetID]:
    "All data sets below a group, by the calls that h5dump uses; links must be hard ones."
    found: dict[bytes, h5py.h5d.DatasetID] = {}
    for i in range(group.get_num_objs()):
        name = group.get_objname_by_idx(i)
        assert group.links.get_info(name).type == h5py.h5l.TYPE_HARD
        item = h5py.h5o.open(group, name)
        if isinstance(item, h5py.h5g.GroupID):
            found |= walk_low(item, prefix + name + b"/")
        else:
            found[prefix + name] = item
    return found


def bytes_at(raw: bytes, item: h5py.h5d.DatasetID) -> bytes:
    "A contiguous data set's bytes, taken from the file by offset."
    return raw[item.get_offset() : item.get_offset() + item.get_storage_size()]


def test_low_level_walk(folder):
    "Each data set is contiguous, unfiltered, without times, and its bytes lie at its offset; none overlaps another."
    for split in SPLITS:
        path = folder / f"{split}_DATASET.H5"
        raw, spans = path.read_bytes(), []
        with h5py.File(path, "r") as f:
            found = walk_low(h5py.h5g.open(f.id, b"/"))
            assert len(found) >= len(COLUMNS) + 9
            for name, item in found.items():
                plist = item.get_create_plist()
                assert plist.get_layout() == h5py.h5d.CONTIGUOUS, name
                assert plist.get_nfilters() == plist.get_external_count() == 0, name
                assert not plist.get_obj_track_times(), name
                assert bytes_at(raw, item) == np.ascontiguousarray(f[name][()]).tobytes(), name
                assert item.get_storage_size() == f[name].nbytes
                spans.append((item.get_offset(), item.get_offset() + item.get_storage_size()))
                for i in range(h5py.h5a.get_num_attrs(item)):
                    assert h5py.h5a.open(item, index=i).get_storage_size() > 0
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert spans[-1][1] <= len(raw)
        assert raw[:9] == b"\x89HDF\r\n\x1a\n\x02"  # the superblock that HDF5 1.8 and later read


def test_waveforms_follow_rows_in_the_file(plain, waved):
    offsets = set()
    for where in (plain, waved):
        for split in SPLITS:
            with h5py.File(where / f"{split}_DATASET.H5", "r") as f:
                found = {
                    name: item.get_offset() for name, item in walk_low(h5py.h5g.open(f.id, b"/")).items()
                }
                offsets.add(found[b"segments_mel"])
                assert min(found, key=lambda name: found[name]) == b"segments_mel"
                if where is waved:
                    assert sorted(found, key=lambda name: found[name])[1] == b"segments_waveform"
                    gap = found[b"segments_waveform"] - found[b"segments_mel"] - f["segments_mel"].nbytes
                    assert 0 <= gap < 3 * ALIGNMENT
                    assert found[b"segments_waveform"] % ALIGNMENT == 0
    assert len(offsets) == 1


def test_mels_are_the_same_bytes_with_and_without_waveforms(plain, waved):
    for split in SPLITS:
        name = f"{split}_DATASET.H5"
        with h5py.File(plain / name, "r") as a, h5py.File(waved / name, "r") as b:
            first, second = (
                bytes_at((p / name).read_bytes(), f["segments_mel"].id) for p, f in ((plain, a), (waved, b))
            )
        assert first == second
        without, both = content(plain / name), content(waved / name)
        assert set(both) - set(without) == {"segments_waveform", "digests/waveforms"}
        for key in without:
            if key != "@metadata_digest":
                np.testing.assert_array_equal(without[key], both[key])


@pytest.mark.slow
def test_two_builds_give_equal_bytes(recordings, plain, waved, tmp_path):
    for where, wanted in ((plain, False), (waved, True)):
        other = PipelineConfig(files_per_batch=2, read_workers=2, compute_workers=2, slots=5)
        lm.build_all(recordings, out_dir=tmp_path, with_waveforms=wanted, pipeline=other, **QUIET)
        for split in SPLITS:
            assert (tmp_path / f"{split}_DATASET.H5").read_bytes() == (
                where / f"{split}_DATASET.H5"
            ).read_bytes()


# ---- waveforms


def cut(x: np.ndarray, long: int, long_hop: int, short: int, short_hop: int) -> np.ndarray:
    "Short segments [L, S, short] of one recording: long ones first, then short ones in each."
    longs = [x[a : a + long] for a in range(0, len(x) - long + 1, long_hop)]
    return np.array(
        [[one[a : a + short] for a in range(0, long - short + 1, short_hop)] for one in longs], np.float32
    )


def test_waveforms_are_the_recordings_samples_in_full_scale(recordings, waved):
    for split in SPLITS:
        got = content(waved / f"{split}_DATASET.H5")
        for path, waves in zip(got["files/path"].tolist(), got["segments_waveform"], strict=True):
            x = np.frombuffer((recordings / split / os.fsdecode(path)).read_bytes()[44:], "<i2")
            assert (waves == cut(x / 32_768, 1024, 1024, 512, 512)).all()
            assert np.abs(waves).max() <= 1


@pytest.mark.slow
@each("engine", CPU_ENGINES)
@each("compression", ["none", "gzip"])
def test_waveforms_equal_the_conformed_samples(tmp_path, make_wav, engine, compression):
    "Stereo, another rate, too short, too long, float; with rejected files before and between; overlapping segments."
    import soundfile

    root = tmp_path / "data"
    make_wav(root / "A" / "1 fits.wav", n=4096, seed=1)
    make_wav(root / "A" / "2 short.wav", n=3000, seed=2)
    make_wav(root / "A" / "4 long.wav", n=6000, seed=3)
    make_wav(root / "A" / "5 fast.wav", n=8000, rate=8000, seed=4)
    rng = np.random.default_rng(0)
    write_wav(root / "A" / "6 stereo.wav", rng.integers(-32_768, 32_767, (4096, 2), np.int16), 4096)
    soundfile.write(
        root / "A" / "7 float.wav", rng.normal(0, 1, 4096).astype(np.float32), 4096, subtype="FLOAT"
    )
    for name in ("0 broken", "3 broken", "8 broken"):
        (root / "A" / f"{name}.wav").write_bytes(b"RIFF")
    spec = lm.MelSpec.preset("overlap", duration_s=1.0)
    for per_batch in (1, 4, 9):
        r = lm.build(
            root,
            out=tmp_path / "x.h5",
            spec=spec,
            engine=engine,
            with_waveforms=True,
            check=None,
            **QUIET,
            pipeline=PipelineConfig(files_per_batch=per_batch, compression=compression),
        )
        got = content(r.path)
        assert got["segments_waveform"].shape == (6, 7, 3, 512)
        for path, waves in zip(got["files/path"].tolist(), got["segments_waveform"], strict=True):
            x = fit(*read(os.fsencode(root) + b"/" + path), spec.to_dict()).astype(np.float32)
            assert (waves == cut(x, 1024, 512, 512, 256)).all(), path
    with lm.open_dataset(r.path) as ds:
        assert ds.waveforms is not None
    assert lm.verify(r.path, root=root, sample=None).checked == 6


def test_memory_of_waveforms_does_not_depend_on_the_batch(tmp_path):
    spec = lm.MelSpec.preset("disjoint")
    slot = Slot(64, spec)
    slot.begin(None, 0, 0, 64)
    slot.facts["good"] = True
    file = RowFile(tmp_path / "x.h5", spec.row_shape, 64, waveform_shape(spec))
    digests = np.zeros(64, "S32")
    tracemalloc.start()
    try:
        assert store_waveforms(slot, spec, file, digests) == 64 * 163_840
        assert tracemalloc.get_traced_memory()[1] < 2 * 163_840
    finally:
        tracemalloc.stop()
        file.abort()
    assert len(set(digests.tolist())) == 1  # 64 times silence


@pytest.mark.slow
def test_waveforms_by_command_line_and_notebook(recordings, waved, plain, tmp_path, capsys):
    for given, right in ((["--with-waveforms"], waved), ([], plain)):
        assert (
            main(
                [
                    "build",
                    str(recordings),
                    "--split",
                    "testing",
                    "--out",
                    str(tmp_path / "x.h5"),
                    "--json",
                    *given,
                ]
            )
            == 0
        )
        assert json.loads(capsys.readouterr().out)["with_waveforms"] == bool(given)
        assert (tmp_path / "x.h5").read_bytes() == (right / "TESTING_DATASET.H5").read_bytes()
    asked = {"data_root": str(recordings), "split": "testing", "check": 4}
    for wanted, output in (
        (True, r"float32, 0\.000655 GB in addition"),
        (False, r"not stored \(with_waveforms; 0\.000655 GB"),
    ):
        plan = plan_run(
            asked | {"out": str(tmp_path / f"run {wanted}"), "with_waveforms": wanted}, progress="none"
        )
        assert re.search(output, dict(plan.rows())["waveforms"])
        (result,) = execute(plan, progress="none")
        assert result.summary["with_waveforms"] == wanted
        assert result.path.read_bytes() == ((waved if wanted else plain) / "TESTING_DATASET.H5").read_bytes()


# ---- both definitions of the features


BUILDER = {
    "sample_rate": 4096,
    "duration_s": 10.0,
    "long_window": 1024,
    "long_hop": 1024,
    "short_window": 512,
    "short_hop": 512,
    "n_fft": 512,
    "hop_length": 128,
    "n_mels": 64,
    "f_min_hz": 0.0,
    "f_max_hz": 2048.0,
    "mel_scale": "htk",
    "mel_norm": None,
    "power": 1,
    "floor": 1e-10,
    "channels": "mean",
}
PIPELINE = BUILDER | {"long_hop": 512, "short_hop": 256, "n_mels": 32, "mel_norm": "slaney", "power": 2}


def decibels_by_librosa(x: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    "The features [L, S, M, 1] of a recording by librosa's melspectrogram, one short segment after the other."
    feature = pytest.importorskip("librosa.feature")
    pieces = cut(x, *(settings[k] for k in ("long_window", "long_hop", "short_window", "short_hop")))
    values = feature.melspectrogram(
        y=pieces.astype(np.float64),
        sr=settings["sample_rate"],
        n_fft=settings["n_fft"],
        hop_length=settings["hop_length"],
        window="hann",
        center=False,
        power=float(settings["power"]),
        n_mels=settings["n_mels"],
        fmin=settings["f_min_hz"],
        fmax=settings["f_max_hz"],
        htk=settings["mel_scale"] == "htk",
        norm=settings["mel_norm"],
        dtype=np.float64,
    )
    return (20 if settings["power"] == 1 else 10) * np.log10(np.maximum(values, 1e-10))


@pytest.mark.slow
@each("engine", CPU_ENGINES)
@each(
    ("name", "settings", "shape"),
    [("builder", BUILDER, (40, 2, 64, 1)), ("pipeline", PIPELINE, (79, 3, 32, 1))],
)
def test_both_definitions_by_spec(recordings, tmp_path, engine, name, settings, shape):
    "Written out field by field, not taken from the file: whole data sets against SciPy and librosa."
    spec = lm.MelSpec(**settings)
    r = lm.build(recordings, split="validation", out=tmp_path / "x.h5", spec=spec, engine=engine, **QUIET)
    got = content(r.path)
    assert got["segments_mel"].shape == (4, *shape)
    for path, row in zip(got["files/path"].tolist(), got["segments_mel"], strict=True):
        x = fit(*read(os.fsencode(recordings / "VALIDATION") + b"/" + path), settings)
        assert off(row, log_mel(x, settings)) <= 0
        assert off(row, decibels_by_librosa(x, settings)) <= 0


@each(
    ("settings", "other"),
    [
        (BUILDER, {"mel_norm": "slaney"}),
        (BUILDER, {"power": 2}),
        (BUILDER, {"mel_scale": "slaney"}),
        (PIPELINE, {"mel_norm": None}),
        (PIPELINE, {"power": 1}),
        (PIPELINE, {"mel_scale": "slaney"}),
    ],
)
def test_comparison_distinguishes_the_presets(recordings, settings, other):
    "The comparison above notices each of the settings that make the definitions differ."
    path = recordings / "VALIDATION" / os.fsdecode(walk(recordings / "VALIDATION")[0])
    x = fit(*read(os.fsencode(path)), settings)
    right = log_mel(x, settings)
    assert (
        off(right.astype(np.float16), right)
        <= 0
        < off(log_mel(x, settings | other).astype(np.float16), right)
    )


def test_presets_are_these_definitions():
    for name, settings in (("disjoint", BUILDER), ("overlap", PIPELINE)):
        stated = lm.MelSpec.preset(name).to_dict()
        assert {k: stated[k] for k in settings if k != "f_max_hz"} == {
            k: v for k, v in settings.items() if k != "f_max_hz"
        }
        assert stated["f_max_hz"] in (None, 2048.0)


# ---- a row depends on its recording alone


def neighbours(root: Path, which: str, victim: np.ndarray) -> bytes:
    "A folder with the victim in it, and others around it; returns the victim's path."
    rng = np.random.default_rng(3)

    def put(name: str, x: np.ndarray) -> None:
        (root / "A").mkdir(parents=True, exist_ok=True)
        write_wav(root / "A" / name, x.astype(np.int16), 4096)

    others = {
        "alone": 0,
        "in front": 8,
        "behind": 8,
        "in the middle": 9,
        "silent": 6,
        "loud": 6,
        "broken": 6,
        "wide": 6,
        "the same": 6,
    }[which]
    name = {"in front": "0.wav", "behind": "z.wav"}.get(which, "m.wav")
    put(name, victim)
    for k in range(others):
        x = {
            "silent": np.zeros(4096),
            "loud": np.where(rng.random(4096) < 0.5, -32_768, 32_767),
            "the same": victim,
        }.get(which, rng.normal(0, 3000, 4096))
        where = f"{'a' if k % 2 else 's'}{k}.wav"
        put(where, x)
        if which == "broken":
            (root / "A" / where).write_bytes(b"RIFF")
        if which == "wide":
            import soundfile

            soundfile.write(root / "A" / where, x / 9000, 4096, subtype="FLOAT")
    return b"A/" + name.encode()


@pytest.mark.slow
@each("engine", CPU_ENGINES)
def test_a_row_never_depends_on_its_batch(tmp_path, engine):
    "Not on how many files a batch holds, on who is in it, on the place in it, on a loud neighbour, on rejected ones; waveforms neither."
    victim = (
        np.random.default_rng(9).normal(0, 15, 4096).astype(np.int16)
    )  # quiet: a clip under a loud neighbour's maximum would show
    mels, waves = set(), set()
    for which in (
        "alone",
        "in front",
        "behind",
        "in the middle",
        "silent",
        "loud",
        "broken",
        "wide",
        "the same",
    ):
        path = neighbours(tmp_path / which, which, victim)
        every = (1, 3, 64) if which in ("in the middle", "loud", "broken") else (3,)
        for per_batch in every:
            r = lm.build(
                tmp_path / which,
                out=tmp_path / "x.h5",
                spec=lm.MelSpec.preset("overlap", duration_s=1.0),
                engine=engine,
                with_waveforms=True,
                check=1,
                **QUIET,
                pipeline=PipelineConfig(files_per_batch=per_batch, fsync=False, monitor_interval_s=0.0),
            )
            got = content(r.path)
            (row,) = np.flatnonzero(got["files/path"] == path)
            mels.add(got["segments_mel"][row].tobytes())
            waves.add(got["segments_waveform"][row].tobytes())
            if which == "loud":  # further under the batch's maximum than the earlier pipeline let anything be
                assert (
                    got["segments_mel"][row].astype(np.float32).min()
                    < got["segments_mel"].astype(np.float32).max() - 80
                )
    assert len(mels) == len(waves) == 1
