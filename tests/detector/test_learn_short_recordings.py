"Recordings shorter than a row: training, evaluation and prediction exclude the padding after them, and give the same scores."

import functools
import json
import operator
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from each import each
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st

import leakmel as lm
from leakmel.core.errors import DataError, RecordingError, UsageError
from leakmel.detector.data.segments import (
    LEVELS,
    BatchOrder,
    Segments,
    conform_recording,
    cut_into_rows,
    make_task,
    open_loader,
    segments_per_row,
)
from leakmel.detector.metrics.metrics import VOTES, vote_scores
from leakmel.detector.model import detector as detector_module
from leakmel.detector.model.detector import Detector, score_rows
from leakmel.detector.model.net import LeakNet, NetSettings, band_statistics
from leakmel.detector.model.settings import TrainSettings
from leakmel.detector.model.spectral import baseline_features, fit_logistic, levels
from leakmel.detector.train.state import TooShortWarning, open_training, trailing_silence
from leakmel.recordings.demo import write_wav
from leakmel.recordings.wav import Recording

pytestmark = pytest.mark.usefixtures("one_thread", "few_trees")
RATE = 4096
SPEC = lm.MelSpec.preset("disjoint", duration_s=1.0)  # four long segments of 1,024 samples
QUIET: dict[str, Any] = {"progress": "none", "device": "cpu"}
QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def noise(seed: int, n: int = RATE, level: int = 900) -> np.ndarray:
    return np.random.default_rng(seed).integers(-level, level, n).astype(np.int16)


def made_detector(spec: lm.MelSpec = SPEC, names: tuple[str, ...] = ("LEAK", "NOLEAK")) -> Detector:
    "A net that was never trained, with scores all over the range."
    torch.manual_seed(0)
    _, n_short, n_mels, n_frames = spec.row_shape
    settings = NetSettings(n_mels, n_frames * n_short, channels=(8, 8))
    net = LeakNet(settings, np.full(n_mels, -30.0), np.full(n_mels, 3.0))
    with torch.no_grad():
        net.classes.weight.mul_(20)
    return Detector(net.eval(), make_task(names), spec)


# samples and rate of each recording: around the edges of segments, at the model's rate and at others
LENGTHS = [
    (4096, 4096),
    (4095, 4096),
    (3072, 4096),
    (3071, 4096),
    (1024, 4096),
    (1023, 4096),
    (300, 4096),
    (9000, 4096),
    (8192, 8192),
    (2047, 8192),
    (2049, 8192),
    (2046, 8192),
    (44_100, 44_100),
    (22_047, 44_100),
    (11_025, 44_100),
    (11_020, 44_100),
    (1000, 2048),
    (511, 2048),
    (2000, 4096),
    (2048, 4096),
]


def write_uneven(folder: Path) -> Path:
    "Recordings of many lengths and rates, leaks and others."
    for k, (n, rate) in enumerate(LENGTHS):
        path = folder / ("LEAK", "NOLEAK")[k % 2] / f"S{k % 3}~{k:04}~2024030{1 + k % 7}_020000~8.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_wav(path, noise(k, n, 200 + 40 * k), rate)
    return folder


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Path:
    return write_uneven(tmp_path_factory.mktemp("uneven") / "wavs")


def built(wavs: Path, out: Path, spec: lm.MelSpec = SPEC) -> Path:
    return lm.build(
        wavs, out=out, spec=spec, engine="torch", progress="none", pipeline=lm.PipelineConfig(device="cpu")
    ).path


@pytest.fixture(scope="module")
def rows(uneven, tmp_path_factory) -> Path:
    return built(uneven, tmp_path_factory.mktemp("sets") / "x.h5")


# ---- votes


@QUICK
@given(
    st.integers(1, 90),
    st.integers(1, 12),
    st.integers(0, 1 << 30),
    st.sampled_from([0.02, 0.2, 1 / 3, 0.5, 0.9, 1.0]),
)
def test_score_does_not_depend_on_other_recordings(n_long, n, seed, share):
    rng = np.random.default_rng(seed)
    scores, counts = rng.random((n, n_long)).astype(np.float32), rng.integers(1, n_long + 1, n)
    table = np.where(np.arange(n_long) < counts[:, None], scores, np.nan)
    mixed = rng.permuted(table, axis=1)
    for rule in VOTES:
        alone = [vote_scores(row[:k], rule, share) for row, k in zip(scores, counts, strict=True)]
        assert vote_scores(table, rule, share).tolist() == alone
        if rule != "mean":
            assert vote_scores(mixed, rule, share).tolist() == alone
        assert vote_scores(table[0], rule, share) == alone[0]
        assert vote_scores(table[None], rule, share).shape == (1, n)


def test_a_recording_without_a_score_is_refused():
    with pytest.raises(UsageError, match="some recordings have no score; found 1 of 2"):
        vote_scores(np.array([[0.5, np.nan], [np.nan, np.nan]]))


# ---- how much of a row was recorded


@QUICK
@given(
    st.sampled_from(["disjoint", "overlap"]),
    st.sampled_from([4096, 8192, 8000, 2048, 44_100, 3999]),
    st.integers(0, 12),
    st.integers(-2, 2),
)
def test_segments_are_counted_as_for_a_prediction(preset, rate, k, off):
    "Around every edge, at every rate: by the samples themselves, and by their number only."
    spec = lm.MelSpec.preset(preset, duration_s=1.0)
    n = max(1, (spec.long_window + (k - 1) * spec.long_hop) * rate // spec.sample_rate + off)
    recording = Recording(np.zeros((n, 1), np.int16), rate, "pcm16", "")
    try:
        right = int(cut_into_rows(conform_recording(recording, spec, "spec")[0], spec)[1].sum())
    except RecordingError as e:
        right = {"too_short": 0}[e.reject_code]
    found = segments_per_row(np.array([n, n]), np.array([rate, rate]), spec)
    assert found.tolist() == [right, right]
    assert found.dtype == np.int64
    if right:
        assert right == min(
            spec.row_shape[0], int(cut_into_rows(conform_recording(recording, spec)[0], spec)[1].sum())
        )


def test_segments_per_row_of_an_empty_list():
    assert segments_per_row(np.zeros(0, np.int64), np.zeros(0, np.int64), SPEC).shape == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["disjoint", "overlap"])
def test_scores_of_short_recordings_are_those_of_a_prediction(uneven, tmp_path, preset):
    "Bit for bit, for recordings of every length and rate; who is too short for the one is too short for the other."
    spec = lm.MelSpec.preset(preset, duration_s=1.0)
    detector = made_detector(spec)
    with Segments(built(uneven, tmp_path / "x.h5", spec), level="recording") as ds:
        right, heard, paths = (
            score_rows(detector, ds),
            ds.segment_counts,
            ds.sources[0].files["path"].to_numpy(),
        )
        assert ds.n_too_short == 4
        assert np.array_equal(~np.isnan(right), ds.segment_mask)
        left_out = set(paths) - set(paths[ds.rows])
        paths = paths[ds.rows]
    for length in ("spec", "whole"):
        p = lm.predict(uneven, detector, length=length, engine="torch", **QUIET)
        assert [os.fsdecode(s.path) for s in p.scored] == paths.tolist()
        assert {os.fsdecode(r.path): r.code for r in p.rejections} == dict.fromkeys(left_out, "too_short")
        for s, row, n in zip(p.scored, right, heard, strict=True):
            if length == "spec" or len(s.segment_scores) <= spec.row_shape[0]:
                assert len(s.segment_scores) == n
            assert np.array_equal(s.segment_scores[:n], row[:n])
        for rule in VOTES if length == "spec" else ():
            assert detector.recording_scores(right, rule).tolist() == [
                detector.recording_scores(s.segment_scores, rule) for s in p.scored
            ]


def test_rows_of_unknown_length_count_as_whole_rows(rows, tmp_path):
    path = tmp_path / "x.h5"
    path.write_bytes(rows.read_bytes())
    with h5py.File(path, "r+") as f:
        del f["files/n_samples"]
    with Segments(path) as ds:
        assert ds.segment_counts.tolist() == [4] * len(LENGTHS)
        assert (len(ds), ds.n_too_short) == (4 * len(LENGTHS), 0)


@pytest.mark.slow
@each(
    "column",
    [
        np.arange(5),
        np.full(len(LENGTHS), np.nan),
        np.array([b"a"] * len(LENGTHS)),
        np.ones((len(LENGTHS), 2), int),
        3,
        None,
    ],
    ids=["short", "fractions", "text", "wide", "one", "folder"],
)
def test_invalid_length_columns_are_refused(rows, tmp_path, column):
    path = tmp_path / "x.h5"
    path.write_bytes(rows.read_bytes())
    with h5py.File(path, "r+") as f:
        del f["files/n_samples"]
        if column is None:
            f.create_group("files/n_samples")
        else:
            f["files/n_samples"] = column
    with pytest.raises(
        DataError, match=r"x\.h5: the column n_samples does not hold one whole number for each row"
    ):
        Segments(path)


@each("length", [-5, 0, 2**63 - 1])
def test_impossible_lengths_count_as_a_whole_row(rows, tmp_path, length):
    path = tmp_path / "x.h5"
    path.write_bytes(rows.read_bytes())
    with h5py.File(path, "r+") as f:
        f["files/n_samples"][:] = length
    with Segments(path) as ds:
        assert len(ds) == 4 * len(LENGTHS)


# ---- items


@each("level", LEVELS)
@each("preload", [True, False])
def test_items_exclude_padding_after_the_recording(rows, level, preload):
    "Values, classes, rows and places, in the order of the file."
    chosen = np.array([7, 2, 5, 12, 0, 19])
    with Segments(
        [rows, rows], level=level, rows=np.append(chosen, chosen + len(LENGTHS)), preload_to_ram=preload
    ) as ds:
        every, labels = (
            np.concatenate([s.mels[:] for s in ds.sources]),
            np.concatenate([s.labels for s in ds.sources]),
        )
        assert ds.n_too_short == 2
        kept = ds.segment_mask if level != "recording" else np.ones((len(ds.rows), 1), bool)
        expected = every[ds.rows][kept if level != "recording" else slice(None)].reshape(-1, *ds.item_shape)
        of = np.repeat(np.arange(len(ds.rows)), kept.sum(1))
        assert len(ds) == len(expected) == len(of) == ds.counts.sum()
        b = ds.batch(np.arange(len(ds)))
        assert np.array_equal(b.x.numpy(), expected)
        assert np.array_equal(b.y.numpy(), labels[ds.rows][of])
        assert np.array_equal(ds.rows[ds.recording_of(np.arange(len(ds)))], ds.rows[of])
        assert np.array_equal(every.reshape(-1, *ds.item_shape)[ds.places(np.arange(len(ds)))], expected)
        assert ds.n_bytes == expected.nbytes
        assert "too short" in repr(ds)
        with pytest.raises(IndexError):
            ds.batch([len(ds)])


WAYS: list[dict[str, Any]] = [
    {"kind": "device"},
    {"kind": "stream", "block_rows": 2, "buffer_blocks": 2},
    {"kind": "stream", "shuffle": False, "block_rows": 3, "buffer_blocks": 1},
]


@each("options", WAYS, ids=str)
def test_loaders_exclude_padding_after_the_recording(rows, options):
    with Segments(rows, preload_to_ram=False) as ds:
        n = int(ds.segment_counts.sum())
        whole = len(LENGTHS) * ds.per_row
        assert n < whole
        with open_loader(ds, 5, seed=3, **options) as loader:
            epochs = [list(loader), list(loader)]
            assert len(loader) == -(-n // 5) == len(epochs[0])
            for found in epochs:
                items = torch.cat([b.items for b in found])
                assert len(items) == len(set(items.tolist())) == n
                for b in found:
                    right = ds.batch(b.items.numpy())
                    assert torch.equal(b.x, right.x)
                    assert torch.equal(b.y, right.y)
            loader.order.epoch = 0
            for _ in loader:
                break
            place = json.loads(json.dumps(loader.order.state_dict()))
            with open_loader(ds, 5, seed=3, **options) as other:
                other.order.load_state_dict(place)
                for a, b in zip(other, epochs[0][1:], strict=True):
                    assert torch.equal(a.items, b.items)
        with open_loader(ds, 5, epoch_share=0.5, **options) as half:
            assert sum(map(len, half)) == round(n / 2)


@QUICK
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=25),
    st.integers(0, 6),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 3),
)
def test_an_epoch_of_uneven_rows_has_each_item_once(counts, block_rows, buffer_blocks, shuffle, epoch):
    starts = np.cumsum([0, *counts])
    s = BatchOrder(starts, 4, seed=1, shuffle=shuffle, block_rows=block_rows, buffer_blocks=buffer_blocks)
    items, ends = s.items(epoch)
    assert sorted(items.tolist()) == list(range(sum(counts))) == list(range(s.n_items))
    if not shuffle:
        assert items.tolist() == list(range(sum(counts)))
    if block_rows:
        for part in np.split(items, ends[:-1]):
            rows_read = np.unique(np.searchsorted(starts, part, side="right") - 1)
            assert len(np.unique(rows_read // block_rows)) <= buffer_blocks
            assert len(part) == sum(counts[k] for k in rows_read), "whole rows"


@each(
    ("change", "check", "n_batches"),
    [
        ({}, 3195699917, 18),
        ({"block_rows": 3, "buffer_blocks": 2}, 3445056134, 18),
        ({"shuffle": False}, 2355849293, 18),
        ({"shuffle": False, "block_rows": 3, "buffer_blocks": 2}, 2355849293, 18),
        ({"epoch_share": 0.3}, 2847262128, 6),
    ],
)
def test_checkpoints_of_equal_rows_are_resumed(change, check, n_batches):
    "Check sums that were noted before rows could be uneven."
    order = BatchOrder(4 * np.arange(31), 7, seed=5, **change)
    order.epoch = 2
    assert (order.state_dict()["check"], len(order)) == (check, n_batches)


# ---- the same recordings in rows of another length


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> dict[float, list[Path]]:
    "The same recordings of ten seconds in rows of ten and of twenty."
    root = tmp_path_factory.mktemp("network")
    lm.write_demo(root / "demo", n_files=60)

    def sets(duration_s: float) -> list[Path]:
        spec = lm.MelSpec.preset("disjoint", duration_s=duration_s)
        return [
            r.path
            for r in lm.build_all(
                root / "demo", out_dir=root / f"{duration_s:g}", spec=spec, progress="none", check=2
            )
        ]

    return {s: sets(s) for s in (10.0, 20.0)}


@pytest.mark.slow
@pytest.mark.parametrize("loader", [pytest.param("device", marks=pytest.mark.long), "stream"])
def test_rows_of_twice_the_length_train_the_same_weights(network, tmp_path, loader):
    "Classes, bands and every weight; epochs and thresholds too."
    learned = TrainSettings(detector="cnn", epochs=2, batch_size=64, channels=(4, 8), loader=loader, seed=2)
    found = []
    for duration_s, sets in network.items():
        training, validation = sets[:2]
        with open_training(training, validation, settings=learned) as data:
            found.append((data.class_counts, *(bands.tolist() for bands in band_statistics(data.training))))
        done = lm.train(
            training,
            validation,
            out=tmp_path / f"{duration_s:g}",
            settings=learned,
            device="cpu",
            progress=False,
        )
        found[-1] += (
            {n: w.tolist() for n, w in done.detector.classifier.state_dict().items()},
            done.detector.thresholds,
            done.detector.vote,
            done.history[["loss", "val_loss", "val_segment_accuracy", "f1", "auc"]].to_numpy().tolist(),
        )
    assert found[0] == found[1]


@pytest.mark.slow
def test_rows_of_twice_the_length_have_the_same_evaluation(network):
    "Figures, thresholds, baselines and the pictures of errors."
    judged = []
    for sets in network.values():
        with lm.open_dataset(sets[0]) as ds:
            detector = made_detector(ds.spec, names=tuple(ds.class_names))
        e = lm.evaluate(
            detector,
            sets[2],
            training=sets[0],
            validation=sets[1],
            votes=("mean", "long_vote", "any_long", "frac_vote"),
            n_draws=100,
            **QUIET,
        )
        judged.append(e)
        assert max(map(len, e.report().splitlines())) <= 100
        json.dumps(e.summary, allow_nan=False)
    short, long = judged
    assert short.segment_scores.shape[1] * 2 == long.segment_scores.shape[1]
    assert np.isnan(long.segment_scores[:, 40:]).all()
    assert short.figures().equals(long.figures())
    assert [str(w) for w in short.worst] == [str(w) for w in long.worst] != []
    assert short.table.filter(like="score_").equals(long.table.filter(like="score_"))
    assert "50.0% of the long segments are silence" in long.report()
    assert "silence" not in short.report()
    assert short.cautions == long.cautions
    for a, b in zip(short.plots()["errors"].data, long.plots()["errors"].data, strict=True):
        assert [*np.ravel(a.z if a.type == "heatmap" else a.y)] == [
            *np.ravel(b.z if b.type == "heatmap" else b.y)
        ]
        assert len(a.x) == len(b.x)


@pytest.mark.slow
def test_error_plot_covers_rows_longer_than_training_rows(network):
    with lm.open_dataset(network[10.0][0]) as ds:
        detector = made_detector(replace(ds.spec, duration_s=5.0), names=tuple(ds.class_names))
    drawn = lm.evaluate(detector, network[20.0][2], n_draws=100, **QUIET).plots()["errors"].data
    assert len(drawn) > 0
    for trace in drawn:
        assert max(trace.x) == pytest.approx(10.0, abs=0.5)
        if trace.type == "scatter":
            assert len(trace.x) == len(trace.y) == 41


def test_evaluation_equals_prediction_for_recordings_of_different_lengths(uneven, rows, tmp_path):
    detector = made_detector()
    e = lm.evaluate(detector, rows, n_draws=100, votes=VOTES, **QUIET)
    p = lm.predict(uneven, detector, length="spec", engine="torch", **QUIET)
    assert e.table["path"].tolist() == p.table["path"].tolist()
    assert e.table["score_mean"].tolist() == p.table["score"].tolist()
    assert [j.title for j in e.votes.values()] == [
        "Mean of segments",
        "Half of segments",
        "Any segment",
        "50 % of segments",
    ]
    assert any("4 of 20 recordings are shorter than one long segment" in c for c in e.cautions)
    assert e.details["too_short"] == 4
    assert all(
        np.isfinite(w.segment_scores).sum() == np.isfinite(w.mels).all((1, 2, 3)).sum() for w in e.worst
    )
    assert set(e.save(tmp_path / "out")) == {
        "summary.json",
        "report.txt",
        "recordings.csv",
        "evaluation.html",
    }
    for trace in e.plots()["errors"].data:
        assert len(trace.x) > 0
        assert np.isfinite(np.asarray(trace.x, float)).all()


@pytest.mark.slow
def test_too_short_recordings_are_reported_before_training(rows, tmp_path):
    given = TrainSettings(detector="cnn", epochs=1, batch_size=16, channels=(4, 8))
    with pytest.warns(
        TooShortWarning, match="training: 4 of 20 recordings are shorter than one long segment"
    ):
        done = lm.train(rows, out=tmp_path / "run", settings=given, device="cpu", progress=False)
    assert done.detector.record["training"]["recordings"] == 16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TooShortWarning)
        with open_training(rows, settings=given) as data:
            assert sum(data.class_counts) == len(data.training) == data.training.segment_counts.sum()
            assert "end before their rows do" in trailing_silence(data.training)


def test_a_data_set_of_too_short_recordings_is_refused(tmp_path):
    for k in range(6):
        write_wav_in(tmp_path / "wavs" / ("LEAK", "NOLEAK")[k % 2] / f"{k}.wav", noise(k, 500))
    path = built(tmp_path / "wavs", tmp_path / "x.h5")
    with Segments(path) as ds:
        assert (len(ds), len(ds.rows), ds.n_too_short) == (0, 0, 6)
    with pytest.warns(TooShortWarning), raises("empty-class", DataError):
        lm.train(
            path,
            out=tmp_path / "run",
            settings=TrainSettings(detector="cnn", channels=(4, 8)),
            device="cpu",
            progress=False,
        )
    with raises("no-recordings", DataError, says="6 of 6 recordings"):
        lm.evaluate(made_detector(), path, **QUIET)


def write_wav_in(path: Path, samples: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_wav(path, samples, RATE)


def test_nan_scores_are_refused(rows):
    detector = made_detector()
    with torch.no_grad():
        detector.classifier.get_parameter("classes.bias")[0] = torch.nan
    with Segments(rows, level="recording") as ds, pytest.raises(DataError, match="NaN or infinite"):
        score_rows(detector, ds)


class FakeGpuScores:
    "Scores on a simulated GPU, which logs each operation."

    device, dtype = torch.device("cuda", 0), torch.float32

    def __init__(self, log: list[str], k: int, values: torch.Tensor):
        self.log, self.k, self.values, self.shape = log, k, values, values.shape

    def cpu(self) -> torch.Tensor:
        self.log.append(f"waited for all until {self.k}")
        return self.values


class FakePinnedBuffer:
    "Simulated page-locked memory, which logs each copy."

    def copy_(self, scores: FakeGpuScores, *, non_blocking: bool) -> None:
        assert non_blocking
        scores.log.append(f"copy {scores.k}")
        self.got = scores

    def numpy(self) -> np.ndarray:
        return self.got.values.numpy()


def test_gpu_scores_are_read_one_batch_later(rows, monkeypatch):
    "A copy is queued right behind what it copies, and its own event is waited for when the next batch is queued."
    output: list[str] = []
    real, empty = detector_module.Detector.class_scores, torch.empty

    def scored(*args: Any) -> FakeGpuScores:
        output.append(f"compute {(k := sum(s.startswith('compute') for s in output))}")
        return FakeGpuScores(output, k, real(*args))

    class Event:
        def record(self, stream: str) -> None:
            self.k = output[-1].removeprefix("copy ")
            output.append(f"record {self.k} on {stream}")

        def synchronize(self) -> None:
            output.append(f"wait {self.k}")

    with Segments(rows, level="recording", rows=np.arange(8)) as ds:
        right = score_rows(made_detector(), ds, files_per_batch=3)
        n = -(-len(ds) // 3)
        monkeypatch.setattr(detector_module.Detector, "class_scores", scored)
        monkeypatch.setattr(
            torch, "empty", lambda *a, **k: FakePinnedBuffer() if k.get("pin_memory") else empty(*a, **k)
        )
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: str(device))
        assert np.array_equal(score_rows(made_detector(), ds, files_per_batch=3), right, equal_nan=True)
    assert n > 1
    steps = [
        [f"compute {k}", f"copy {k}", f"record {k} on cuda:0", *([f"wait {k - 1}"] if k else [])]
        for k in range(n)
    ]
    assert output == [*functools.reduce(operator.iadd, steps, []), f"wait {n - 1}"]


def test_batches_of_zero_files_are_refused(rows):
    with (
        Segments(rows, level="recording") as ds,
        pytest.raises(UsageError, match="must be a whole number of at least 1"),
    ):
        score_rows(made_detector(), ds, files_per_batch=0)


# ---- baselines


def test_mean_mels_exclude_padding_after_the_recording(rows):
    with Segments(rows, level="recording") as ds:
        every = ds.sources[0].mels[:].astype(np.float64)
        means = baseline_features(ds)["mean_mels"]
        for k, (row, n) in enumerate(zip(ds.rows, ds.segment_counts, strict=True)):
            assert np.allclose(means[k], every[row, :n].mean((0, 1, 3)), atol=1e-9)


@pytest.mark.slow
@each("part", ["training", "validation", "testing"])
def test_the_level_baseline_has_one_scale_in_all_splits(network, tmp_path, part):
    "A part without known levels is scored with the level of the mels."
    sets: dict[str, Any] = dict(zip(("training", "validation", "testing"), network[10.0], strict=True))
    path = tmp_path / "x.h5"
    path.write_bytes(sets[part].read_bytes())
    with h5py.File(path, "r+") as f:
        del f["files/rms_db"]
    with lm.open_dataset(path) as ds:
        task = make_task(ds.class_names)
    parts = {
        name: Segments(path if name == part else own, level="recording", task=task)
        for name, own in sets.items()
    }
    right = {name: baseline_features(ds)["mean_mels"].mean(1, keepdims=True) for name, ds in parts.items()}
    line = fit_logistic(right["training"], parts["training"].is_leak)
    e = lm.evaluate(
        made_detector(parts["testing"].sources[0].spec),
        parts["testing"].sources[0],
        training=parts["training"].sources[0],
        validation=parts["validation"].sources[0],
        n_draws=100,
        **QUIET,
    )
    assert np.allclose(e.table["score_level"], line.predict_proba(right["testing"])[:, 1], atol=1e-9)
    assert levels(parts[part]) is None
    assert parts["testing"].is_leak.any()
    for ds in parts.values():  # type: ignore[assignment]
        ds.close()
