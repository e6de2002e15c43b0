"Items of data sets in loaders: every level, process and file form, in an order that can be resumed."

import functools
import json
import multiprocessing
import operator
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
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
from leakmel.core.errors import DataError, LeakmelError, UsageError, VerifyError
from leakmel.core.progress import Progress
from leakmel.dataset.reader import MelDataset, read_rows
from leakmel.detector.data import segments as data
from leakmel.detector.data import segments as loaders
from leakmel.detector.data.segments import (
    LEFT_OUT,
    LEVELS,
    Batch,
    BatchOrder,
    Loader,
    Segments,
    find_label,
    make_task,
    open_loader,
)
from leakmel.detector.data.splits import recordings_table
from leakmel.detector.model.settings import TrainSettings
from leakmel.detector.model.spectral import baseline_features
from leakmel.detector.train.state import open_training
from leakmel.recordings.naming import likely_leaks

SHAPE = (4, 2, 16, 1)  # L, S, M, T
quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def mels(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(-40, 9, (n, *SHAPE)).astype(np.float16)


def legacy_file(
    path: Path,
    n: int = 9,
    *,
    seed: int = 0,
    kind: str = "<f2",
    names: str = '["LEAK", "NOLEAK", "QUIET"]',
    **form: Any,
) -> Path:
    "A file of the earlier system: rows, labels, a few attributes."
    with h5py.File(path, "w") as f:
        f["labels"] = np.arange(n, dtype=np.int16) % 3
        f.create_dataset("segments_mel", data=mels(n, seed).astype(kind), **form)
        f.attrs["labels_json"], f.attrs["config_json"] = (
            names,
            json.dumps({"sample_rate": 4096, "n_mels": SHAPE[2]}),
        )
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    "Two splits of a made set, and one of them packed."
    root = tmp_path_factory.mktemp("learn")
    lm.write_demo(root / "demo", n_files=24)

    def make(split: str, name: str, **options: Any) -> Path:
        return lm.build(root / "demo", split=split, out=root / name, progress="none", check=2, **options).path

    return {
        "training": make("training", "t.h5"),
        "validation": make("validation", "v.h5"),
        "packed": make("training", "p.h5", pipeline=lm.PipelineConfig(compression="gzip")),
    }


@pytest.fixture
def small(tmp_path) -> Iterator[Segments]:
    "Long segments of a few rows, in the file."
    with Segments(legacy_file(tmp_path / "x.h5"), legacy=True, preload_to_ram=False) as ds:
        yield ds


# ---- rows by number --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> Iterator[list[h5py.Dataset]]:
    "The same values contiguous, in chunks, and packed."
    with h5py.File(tmp_path_factory.mktemp("rows") / "x.h5", "w") as f:
        given: list[dict[str, Any]] = [
            {},
            {"chunks": (2, *SHAPE)},
            {"chunks": (5, 1, 2, 16, 1), "compression": "gzip"},
        ]
        found = [f.create_dataset(f"d{k}", data=mels(11), **form) for k, form in enumerate(given)]
        f.flush()
        yield found


@quick
@given(st.data(), st.integers(0, 2))
def test_items_by_number(forms, draw, depth):
    per_row = int(np.prod(SHAPE[:depth]))
    items = draw.draw(st.lists(st.integers(0, 11 * per_row - 1), max_size=30))
    expected = mels(11).reshape(-1, *SHAPE[depth:])[np.array(items, np.int64)]
    for d in forms:
        assert np.array_equal(read_rows(d, np.array(items, np.int64), depth=depth), expected)


def test_missing_items_are_an_index_error(forms):
    for d in forms:
        for items in ([11], [-1], [0, 44]):
            with pytest.raises(IndexError, match="has 11"):
                read_rows(d, np.array(items))


def test_file_truncated_while_open_is_an_error(tmp_path):
    path = legacy_file(tmp_path / "x.h5")
    with lm.open_dataset(path, legacy=True) as ds:
        end = ds.mels.id.get_offset() + ds.mels.nbytes
        os.truncate(path, end - 3)
        ds.__getitems__([0, 7])
        with pytest.raises(VerifyError, match="shorter than its header says; found 3 bytes missing"):
            ds.__getitems__([8])


# ---- the data set itself ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training", "packed"])
def test_several_rows_of_a_data_set(built, name):
    with lm.open_dataset(built[name]) as ds:
        items: list[Any] = [3, 0, -1, 3, np.int16(5)]
        for (x, y), i in zip(ds.__getitems__(items), items, strict=True):
            assert x.dtype == np.float16
            assert np.array_equal(x, ds[int(i)][0])
            assert y == ds[int(i)][1]
        assert ds.__getitems__([]) == []
        with pytest.raises(IndexError, match=f"row {len(ds)} of {len(ds)}"):
            ds.__getitems__([0, len(ds)])


def test_data_set_through_pickle(built, tmp_path, monkeypatch):
    path = tmp_path / "x.h5"
    path.write_bytes(built["training"].read_bytes())
    monkeypatch.chdir(tmp_path)
    with lm.open_dataset("x.h5") as ds:
        packed = pickle.dumps(ds)
        assert len(packed) < 1000
        monkeypatch.chdir("/")
        with pickle.loads(packed) as copy:
            assert np.array_equal(copy[2][0], ds[2][0])
            assert copy.class_names == ds.class_names
    os.utime(path, ns=(1, 1))
    with pytest.raises(VerifyError, match="changed since it was opened"):
        pickle.loads(packed)


def _in_child(ds: MelDataset, queue: Any) -> None:
    try:
        queue.put(
            (
                ds.file.id.get_vfd_handle(),
                [float(x.sum()) for x, _ in ds.__getitems__([1, 2])],
                float(ds[4][0].sum()),
            )
        )
    except LeakmelError as e:
        queue.put(str(e))


@pytest.mark.parametrize("name", ["training", "packed"])
def test_forked_process_opens_the_file_itself(built, name):
    fork = multiprocessing.get_context("fork")
    with lm.open_dataset(built[name]) as ds:
        own, here = ds.file, [float(x.sum()) for x, _ in ds.__getitems__([1, 2])]
        queue = fork.SimpleQueue()
        child = fork.Process(target=_in_child, args=(ds, queue))
        child.start()
        _, sums, last = queue.get()
        child.join()
        assert sums == here
        assert last == float(ds[4][0].sum())
        assert ds.file is own


def test_forked_process_refuses_another_file(built, tmp_path):
    path, fork = tmp_path / "x.h5", multiprocessing.get_context("fork")
    path.write_bytes(built["training"].read_bytes())
    with lm.open_dataset(path) as ds:
        (tmp_path / "new").write_bytes(built["packed"].read_bytes())
        os.replace(tmp_path / "new", path)
        queue = fork.SimpleQueue()
        child = fork.Process(target=_in_child, args=(ds, queue))
        child.start()
        assert "changed since it was opened" in queue.get()
        child.join()
        ds[0]  # the process that opened it still reads the old file


def test_chunk_cache(built):
    for asked in (None, 3 << 20):
        with lm.open_dataset(built["packed"], chunk_cache_bytes=asked) as ds:
            n_bytes = ds.file.id.get_access_plist().get_cache()[2]
            assert n_bytes == asked if asked else n_bytes > 0
            with pickle.loads(pickle.dumps(ds)) as copy:
                assert copy.file.id.get_access_plist().get_cache()[2] == n_bytes


def test_opening_needs_no_torch(built):
    code = f"import leakmel as lm, sys; lm.open_dataset({os.fspath(built['training'])!r}).__getitems__([0, 1]); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- items -----------------------------------------------------------------------------------------------------------


@each("level", LEVELS)
@each("preload", [True, False])
def test_levels(built, level, preload):
    with lm.open_dataset(built["training"]) as raw:
        every = raw.mels[:]
        ds = Segments(raw, level=level, preload_to_ram=preload)
        expected = every.reshape(-1, *every.shape[1 + LEVELS[level] :])
        assert len(ds) == len(expected)
        assert ds.item_shape == expected.shape[1:]
        items = [0, len(ds) - 1, 1, 1, len(ds) // 2]
        b = ds.batch(items)
        assert b.x.dtype == torch.float16
        assert np.array_equal(b.x.numpy(), expected[items])
        assert b.y.tolist() == np.repeat(raw.labels, ds.per_row)[items].tolist()
        assert (
            ds.rows[ds.recording_of(np.arange(len(ds)))].tolist()
            == np.repeat(np.arange(len(raw)), ds.per_row).tolist()
        )


def test_items_beyond_the_end(small):
    for i in (len(small), -len(small) - 1):
        with pytest.raises(IndexError, match=f"item {i} does not exist"):
            small.batch([0, i])


@pytest.mark.slow
@each("form", [{}, {"chunks": True}, {"chunks": (1, *SHAPE), "compression": "gzip"}])
@each("kind", ["<f2", ">f2", "<f4"])
def test_earlier_systems_files(tmp_path, form, kind):
    path = legacy_file(tmp_path / "TRAINING_DATASET.H5", kind=kind, **form)
    with pytest.raises(VerifyError, match="legacy=True"):
        Segments(path)
    for preload in (True, False):
        with Segments(path, legacy=True, preload_to_ram=preload) as ds:
            b = ds.batch([5, 4, 35])
            assert np.array_equal(b.x.numpy(), mels(9).reshape(-1, *SHAPE[1:])[[5, 4, 35]])
            assert b.x.dtype == (torch.float32 if kind == "<f4" else torch.float16)


def test_rows_of_several_files(built):
    paths = [built["training"], built["validation"]]
    with lm.open_dataset(paths[0]) as a, lm.open_dataset(paths[1]) as b:
        every, labels = np.concatenate([a.mels[:], b.mels[:]]), np.concatenate([a.labels, b.labels])
    rows = np.array([len(every) - 1, 0, 3, len(every) - 2])
    for preload in (True, False):
        with Segments(paths, level="recording", rows=rows, preload_to_ram=preload) as ds:
            assert np.array_equal(ds.batch([0, 1, 2, 3, 0]).x.numpy(), every[rows[[0, 1, 2, 3, 0]]])
            assert ds.labels.tolist() == labels[rows].tolist()


def test_files_that_do_not_belong_together(tmp_path, built):
    one = legacy_file(tmp_path / "a.h5")
    other = legacy_file(tmp_path / "b.h5", names='["LEAK", "NOLEAK", "RANDOM"]')
    with raises("data-sets-differ", DataError, path=other, says="labels"):
        Segments([one, other], legacy=True)
    features = legacy_file(tmp_path / "c.h5")
    with h5py.File(features, "r+") as f:
        f.attrs["config_json"] = '{"sample_rate": 8000}'
    with raises("data-sets-differ", DataError, path=features, says="8000"):
        Segments([one, features], legacy=True)
    with lm.open_dataset(built["training"]) as ds:
        with pytest.raises(LeakmelError):
            Segments([ds, tmp_path / "none.h5"])
        ds[0]  # what was open stays open


def test_segments_are_preloaded_only_if_memory_suffices(tmp_path, monkeypatch):
    path = legacy_file(tmp_path / "x.h5")
    n_bytes = mels(9).nbytes
    for free, held in ((2 * n_bytes, True), (2 * n_bytes - 2, False)):
        monkeypatch.setattr(data, "free_memory", lambda free=free: free)
        with Segments(path, legacy=True) as ds:
            assert (ds.preloaded is not None) is held
    with Segments(path, legacy=True, preload_to_ram=True) as ds:
        assert ds.preloaded is not None


def test_loading_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_PIECE_BYTES", 600)
    with Segments(legacy_file(tmp_path / "x.h5"), legacy=True, preload_to_ram=True) as ds:
        assert np.array_equal(ds.batch(np.arange(36)).x.numpy(), mels(9).reshape(36, *SHAPE[1:]))


@each(
    ("options", "code", "found"),
    [
        ({"rows": [0, 9]}, "no-such-rows", "0 to 9"),
        ({"rows": [-1]}, "no-such-rows", "-1 to -1"),
        ({"rows": [0.5]}, "no-such-rows", "float64 (1,)"),
        ({"rows": [[1]]}, "no-such-rows", "int64 (1, 1)"),
    ],
)
def test_bad_settings_of_items(tmp_path, options, code, found):
    with raises(code, UsageError, found=found):
        Segments(legacy_file(tmp_path / "x.h5"), legacy=True, **options)
    with raises("no-data-set", UsageError):
        Segments([])


# ---- tasks -----------------------------------------------------------------------------------------------------------


def test_task_of_items(tmp_path):
    task = make_task(["LEAK", "NOLEAK", "QUIET"], "Leak", kind="binary", leave_out=["quiet"])
    with Segments(
        legacy_file(tmp_path / "x.h5"),
        legacy=True,
        task=task,
        level="recording",
        rows=np.array([0, 1, 2, 8, 7]),
    ) as ds:
        assert ds.rows.tolist() == [0, 1, 7]
        assert ds.labels.tolist() == [1, 0, 0]


def test_labels_are_matched_by_name(tmp_path):
    "A data set that was built alone numbers its labels in its own way, and may lack some."
    task = make_task(["LEAK", "NOLEAK", "QUIET"])
    with Segments(
        legacy_file(tmp_path / "x.h5", names='["quiet", "LEAK", "NoLeak"]'),
        legacy=True,
        task=task,
        level="recording",
    ) as ds:
        assert ds.labels.tolist() == [2, 0, 1] * 3
        assert ds.batch([1, 2]).y.tolist() == [0, 1]
    binary = make_task(["NOLEAK", "QUIET", "LEAK"], kind="binary", leave_out=["quiet"])
    with Segments(tmp_path / "x.h5", legacy=True, task=binary, level="recording", rows=np.arange(2, 9)) as ds:
        assert ds.rows.tolist() == [2, 4, 5, 7, 8]
        assert ds.labels.tolist() == [0, 1, 0, 1, 0]
    with raises("unknown-label", DataError, found="PUMP", says="LEAK, NOLEAK, QUIET"):
        Segments(legacy_file(tmp_path / "y.h5", names='["LEAK", "PUMP", "NOLEAK"]'), legacy=True, task=task)
    with raises("ambiguous-label", DataError, says="z.h5"):
        Segments(legacy_file(tmp_path / "z.h5", names='["LEAK", "leak", "QUIET"]'), legacy=True, task=task)


def test_data_sets_that_number_their_labels_differently_get_the_classes_of_the_task(tmp_path):
    "Labels of rows: 0, 1, 2, 0, 1, 2, ..., in each file with names of its own."
    orders = [["LEAK", "NOLEAK", "QUIET"], ["QUIET", "LEAK", "NOLEAK"], ["noleak", "quiet", "Leak"]]
    paths = [
        legacy_file(tmp_path / f"{k}.h5", 6, seed=k, names=json.dumps(names))
        for k, names in enumerate(orders)
    ]
    for chosen in ([0, 1], [1, 0], [2, 0, 1]):
        for task in (
            make_task(["LEAK", "NOLEAK", "QUIET"]),
            make_task(["QUIET", "NOLEAK", "LEAK"], kind="binary", leave_out=["quiet"]),
        ):
            right = [
                task.to_model[find_label(orders[k][n % 3], task.class_names)]
                for k in chosen
                for n in range(6)
            ]
            with Segments([paths[k] for k in chosen], legacy=True, task=task, level="recording") as ds:
                left = [n for n, c in enumerate(right) if c != LEFT_OUT]
                assert ds.rows.tolist() == left
                assert (
                    ds.labels.tolist() == ds.batch(np.arange(len(ds))).y.tolist() == [right[n] for n in left]
                )
    with raises("data-sets-differ", DataError, says="labels"):
        Segments([paths[0], paths[1]], legacy=True)
    picked = np.array([7, 0, 11, 4])
    with Segments(
        [paths[1], paths[0]],
        legacy=True,
        task=make_task(["LEAK", "NOLEAK", "QUIET"]),
        level="recording",
        rows=picked,
    ) as ds:
        assert ds.rows.tolist() == picked.tolist()
        assert ds.labels.tolist() == [1, 2, 2, 0]


def test_labels_may_differ_without_a_task(tmp_path):
    "New recordings lie in folders by date, which no task knows."
    paths = [
        legacy_file(tmp_path / f"{k}.h5", 6, seed=k, names=json.dumps([f"2026-11-0{k}", "same", f"{k}"]))
        for k in (1, 2)
    ]
    with raises("data-sets-differ", DataError, says="labels"):
        Segments(paths, legacy=True)
    with raises("unknown-label", DataError):
        Segments(paths, legacy=True, task=make_task(["LEAK", "NOLEAK"]))
    for preload in (True, False):
        with Segments(paths, legacy=True, with_labels=False, level="recording", preload_to_ram=preload) as ds:
            assert ds.rows.tolist() == list(range(12))
            assert set(ds.labels.tolist()) == {LEFT_OUT}
            batch = ds.batch(np.arange(12))
            assert set(batch.y.tolist()) == {LEFT_OUT}
            assert np.array_equal(batch.x.numpy(), np.concatenate([mels(6, 1), mels(6, 2)]))
        with Segments(
            paths,
            legacy=True,
            with_labels=False,
            level="long",
            rows=np.array([11, 2]),
            preload_to_ram=preload,
        ) as ds:
            item = ds.batch([5])
            assert (len(ds), ds.rows.tolist(), item.y.tolist()) == (8, [11, 2], [LEFT_OUT])
            assert np.array_equal(item.x[0], mels(6, 1)[2, 1])
    with Segments(
        paths[0],
        legacy=True,
        with_labels=False,
        task=make_task(["2026-11-01", "same", "1"], "same"),
        level="recording",
    ) as ds:
        assert ds.labels.tolist() == [0, 1, 2] * 2, "a task needs its labels in any case"
    coarse = tmp_path / "coarse.h5"
    shutil.copy(paths[1], coarse)
    with h5py.File(coarse, "a") as f:
        f.attrs["config_json"] = json.dumps({"sample_rate": 8000, "n_mels": SHAPE[2]})
    with raises("data-sets-differ", DataError, says="features"):
        Segments([paths[0], coarse], legacy=True, with_labels=False)


def test_nothing_stays_open_after_an_error(tmp_path):
    n, path = len(os.listdir("/proc/self/fd")), legacy_file(tmp_path / "x.h5")
    with raises("no-such-rows", UsageError) as rows:
        Segments([path, path], legacy=True, rows=np.array([10**6]))
    with (
        pytest.raises(DataError) as missing,
        open_training(path, tmp_path / "none.h5", settings=TrainSettings(), legacy=True),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == n, (rows, missing)  # they hold the frames, and what is in them
    with lm.open_dataset(path, legacy=True) as ds:
        with pytest.raises(UsageError):
            Segments(ds, rows=np.array([10**6]))
        assert ds[8][1] == 2, "whoever opened it closes it"


def test_other_rows_have_another_identity(tmp_path):
    "Files of the earlier system hold no digests: files of the same size with other rows are told apart all the same."
    found = []
    for seed, name in ((0, "a.h5"), (1, "b.h5"), (0, "c.h5")):
        path = legacy_file(tmp_path / name, seed=seed)
        with open_training(path, settings=TrainSettings(), legacy=True) as training:
            found.append(training.identity["training"])
    assert os.path.getsize(tmp_path / "a.h5") == os.path.getsize(tmp_path / "b.h5")
    assert found[0] == found[2] != found[1]


@pytest.fixture
def log(monkeypatch, caplog) -> pytest.LogCaptureFixture:
    "The log, in which everything takes long enough to be told."
    begin = Progress.__init__
    monkeypatch.setattr(Progress, "__init__", lambda *args, after_s=0.0, **more: begin(*args, **more))
    caplog.set_level("INFO", "leakmel")
    return caplog


def test_slow_loading_shows_progress(tmp_path, log, monkeypatch):
    path = legacy_file(tmp_path / "x.h5")
    monkeypatch.setattr(data, "_PIECE_BYTES", 500)

    def logged_lines(work: Any) -> list[str]:
        log.clear()
        work("none")
        assert log.messages == []
        work("log")
        return [line.split(" in ")[0] for line in log.messages]

    def segments(show: str) -> Segments:
        return Segments(path, legacy=True, level="long", preload_to_ram=True, progress=show)

    assert logged_lines(segments) == ["loading: 36 of 36 segments"]
    streamed = Segments(path, legacy=True, level="recording", preload_to_ram=False)
    assert logged_lines(lambda show: open_loader(streamed, 4, kind="device", progress=show)) == [
        "loading: 9 of 9 recordings"
    ]
    assert logged_lines(lambda show: baseline_features(streamed, progress=show)) == [
        "baseline features: 9 of 9 recordings"
    ]
    assert logged_lines(lambda show: recordings_table(streamed.sources, progress=show)) == [
        "comparing: 9 of 9 recordings"
    ]

    def opened(show: str) -> None:
        with open_training(path, settings=TrainSettings(preload_to_ram=False), legacy=True, progress=show):
            pass

    assert logged_lines(opened) == ["digests: 9 of 9 recordings"]
    streamed.close()


@pytest.mark.slow
def test_training_and_evaluation_pass_progress_on(small_sets, tmp_path, log):
    training, validation, testing = (
        small_sets / f"{n}_DATASET.H5" for n in ("TRAINING", "VALIDATION", "TESTING")
    )
    given = TrainSettings(detector="cnn", epochs=1, epoch_share=0.05, batch_size=64, channels=(1,))
    for show in ("none", "log"):
        done = lm.train(
            training, validation, out=tmp_path / show, settings=given, device="cpu", progress=show
        )
        lm.evaluate(
            done.detector,
            testing,
            training=training,
            device="cpu",
            n_draws=100,
            progress=show,
            allow_leaky_split=True,
        )
        assert bool(log.messages) == (show == "log")
    for word in ("loading", "baseline features"):
        assert any(line.startswith(f"{word}: ") for line in log.messages), word


def test_quick_loading_shows_no_progress(tmp_path, caplog):
    caplog.set_level("INFO", "leakmel")
    Segments(legacy_file(tmp_path / "x.h5"), legacy=True, preload_to_ram=True, progress="log").close()
    assert caplog.messages == []


@each("names", [["NOLEAK"], ["LEAKY", "NO LEAK"], ["LEAK 2", "QUIET"], []])
def test_a_label_is_never_a_part_of_a_name(names):
    with raises("unknown-label", UsageError, found="'LEAK'"):
        find_label("LEAK", names)


def test_label_numbers_of_data_set_and_model_differ():
    names = ["BACKGROUND", "CRACK", "LEAK", "NORMAL"]
    task = make_task(names, leave_out=["background"])
    assert (task.leak_in_data, task.leak_in_model, task.leak_label, task.model_names) == (
        2,
        1,
        "LEAK",
        ("CRACK", "LEAK", "NORMAL"),
    )
    assert pickle.loads(pickle.dumps(task)) == task
    for kind in ("binary", "multiclass"):
        task = make_task(names, kind=kind)
        assert (task.classes(np.arange(4)) == task.leak_in_model).tolist() == [False, False, True, False]


@each(
    ("names", "options", "code", "found"),
    [
        (["LEAK", "leak", "NOLEAK"], {}, "ambiguous-label", "'LEAK', 'leak'"),
        (["LEAK"], {}, "invalid-task", "only LEAK"),
        (["LEAK", "QUIET"], {"kind": "both"}, "usage", "'both'"),
        (["LEAK", "QUIET"], {"leave_out": ["LEAK"]}, "invalid-task", "LEAK"),
        (["LEAK", "QUIET"], {"kind": "binary", "leave_out": ["LOUD"]}, "unknown-label", "'LOUD'"),
    ],
)
def test_bad_tasks(names, options, code, found):
    with raises(code, UsageError, found=found):
        make_task(names, "LEAK", **options)


# ---- order -----------------------------------------------------------------------------------------------------------


def order_of(n_rows: int, per_row: int = 1, **options: Any) -> BatchOrder:
    return BatchOrder(per_row * np.arange(n_rows + 1), **options)


orders = st.fixed_dictionaries(
    {
        "n_rows": st.integers(1, 30),
        "per_row": st.integers(1, 4),
        "batch_size": st.integers(1, 50),
        "seed": st.integers(0, 9),
        "shuffle": st.booleans(),
        "block_rows": st.integers(0, 8),
        "buffer_blocks": st.integers(1, 5),
    }
)


def run(order: BatchOrder, n: int) -> list[list[int]]:
    "The next n batches."
    found = []
    for _ in range(n):
        first = order.batch * order.batch_size
        found.append(order.items()[0][first : first + order.batch_size].tolist())
        order.advance()
    return found


@quick
@given(orders, st.integers(0, 200))
def test_resumed_order_equals_uninterrupted_order(s, stop):
    n = 2 * len(order_of(**s)) + 3
    stop = min(stop, n)
    whole, first, second = run(order_of(**s), n), order_of(**s), order_of(**s)
    before = run(first, stop)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + run(second, n - stop) == whole


@quick
@given(orders)
def test_an_epoch_has_each_item_once(s):
    for epoch in range(2):
        order = order_of(**s)
        order.epoch = epoch
        found = run(order, len(order))
        assert sorted(functools.reduce(operator.iadd, found, [])) == list(range(order.n_items))
        assert (order.epoch, order.batch) == (epoch + 1, 0)
        if not s["shuffle"]:
            assert functools.reduce(operator.iadd, found, []) == list(range(order.n_items))


def test_epochs_and_seeds_differ():
    def first(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(order_of(50, seed=seed).items(epoch)[0].tolist())

    assert len({first(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    assert first(1, 2) == first(1, 2)


def test_shuffled_blocks_stay_together():
    "A buffer is read in runs: its items are those of whole blocks."
    items, ends = order_of(103, 4, block_rows=10, buffer_blocks=3).items()
    for buffer in np.split(items, ends[:-1]):
        rows, counts = np.unique(buffer // 4, return_counts=True)
        assert (counts == 4).all()
        assert len(np.unique(rows // 10)) <= 3
        for block in np.unique(rows // 10):
            assert (rows // 10 == block).sum() == min(10, 103 - 10 * block)


@each("change", [{"seed": 2}, {"batch_size": 5}, {"n_rows": 13}, {"shuffle": False}, {"block_rows": 2}])
def test_place_in_another_order(change):
    base: dict[str, Any] = {"n_rows": 12, "per_row": 2, "batch_size": 4, "seed": 1}
    order, other = order_of(**base), order_of(**(base | change))
    run(order, 2)
    with raises("order-differs", UsageError):
        other.load_state_dict(order.state_dict())
    assert (other.epoch, other.batch) == (0, 0)


@each(
    "state",
    [{"epoch": -1, "batch": 0, "check": 0, "seed": 0}, {"epoch": 0, "batch": 99, "check": 0, "seed": 0}],
)
def test_bad_places(state):
    with raises("order-differs", UsageError):
        order_of(5).load_state_dict(state)


# ---- loaders ---------------------------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {"kind": "device"},
    {"kind": "stream", "block_rows": 2, "buffer_blocks": 2},
    {"kind": "stream", "shuffle": False, "block_rows": 1, "buffer_blocks": 1},
    {"kind": "stream"},
]


def check_batches(ds: Segments, batches: list[Batch], *, size: int) -> None:
    "Each item once, with its numbers and its class, in full batches."
    assert sorted(torch.cat([b.items for b in batches]).tolist()) == list(range(len(ds)))
    assert [len(b) for b in batches[:-1]] == [size] * (len(batches) - 1)
    for b in batches:
        expected = ds.batch(b.items.numpy())
        assert torch.equal(b.x, expected.x)
        assert torch.equal(b.y, expected.y)


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("size", [1, 7, 36, 100])
def test_loaders_yield_every_item(small, options, size):
    with open_loader(small, size, seed=4, **options) as loader:
        epochs = [list(loader), list(loader)]
        for found in epochs:
            check_batches(small, found, size=size)
        assert len(epochs[0]) == len(loader)
        if options.get("shuffle", True) and size < 36:
            assert not torch.equal(epochs[0][0].items, epochs[1][0].items)
        loader.order.epoch = 0
        for a, b in zip(loader, epochs[0], strict=True):
            assert torch.equal(a.items, b.items)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_loaders_resume_at_their_position(small, options):
    def batches(loader: Loader) -> Iterator[tuple[list[int], dict]]:
        for _ in range(3):
            for b in loader:
                yield b.items.tolist(), loader.order.state_dict()

    def opened() -> Loader:
        return open_loader(small, 7, seed=2, **options)

    whole = list(batches(opened()))
    assert len(whole) == 3 * 6
    for stop in (1, 4, len(whole) // 3, len(whole) // 3 + 2):
        loader = opened()
        loader.order.load_state_dict(json.loads(json.dumps(whole[stop - 1][1])))
        again = [items for items, _ in islice(batches(loader), len(whole) - stop)]
        assert again == [items for items, _ in whole[stop:]]


@pytest.mark.parametrize("size", [3, 7, 16, 36, 100])
def test_streamed_batches_are_pinned_once(small, monkeypatch, size):
    "Batches are those of the order, and slices of a buffer that was locked as it was read."
    locked: list[Batch] = []

    def pin_memory(batch: Batch) -> Batch:
        locked.append(batch)
        return batch

    monkeypatch.setattr(Batch, "pin_memory", pin_memory)
    with open_loader(small, size, kind="stream", block_rows=1, buffer_blocks=2, seed=5) as loader:
        loader.device = torch.device("cuda", 0)
        monkeypatch.setattr(loader, "transfer", lambda batch: batch)
        order = loader.order.items()[0]
        found = list(loader)
    assert torch.cat([b.items for b in found]).tolist() == order.tolist()
    assert [len(b) for b in found] == [min(size, len(order) - k) for k in range(0, len(order), size)]
    assert all(torch.equal(b.x, small.batch(b.items.numpy()).x) for b in found)
    assert sum(map(len, locked)) == len(order)
    ends = [b.items.data_ptr() + b.items.nbytes for b in locked]
    for b in found:
        assert any(
            k.items.data_ptr() <= b.items.data_ptr() < end for k, end in zip(locked, ends, strict=True)
        )


def test_abandoned_epoch_is_resumed(small):
    for options in KINDS:
        loader = open_loader(small, 7, **options)
        for _ in loader:
            break
        assert loader.order.state_dict()["batch"] == 1
        assert len(list(loader)) == 5
        assert (loader.order.epoch, loader.order.batch) == (1, 0)


def test_errors_of_readers_arrive(tmp_path):
    path = legacy_file(tmp_path / "x.h5")
    with Segments(path, legacy=True, preload_to_ram=False) as ds:
        broken = open_loader(ds, 5, kind="stream", block_rows=1, buffer_blocks=2)
        os.truncate(path, ds.sources[0].mels.id.get_offset() + 100)
        with pytest.raises(
            (LeakmelError, RuntimeError),
            match=r"shorter than its header|changed since|cannot be read|not an HDF5",
        ):
            list(broken)
        broken.close()


def test_which_loader(small, monkeypatch):
    need = small.n_bytes
    for free, kind in ((2 * need, "device"), (2 * need - 2, "stream")):
        monkeypatch.setattr(loaders, "free_memory", lambda free=free: free)
        assert open_loader(small, 4).kind == kind
    with Segments(small.sources[0], preload_to_ram=True) as held:
        loader = open_loader(held, 4)
        assert loader.kind == "device"
        assert loader.x.data_ptr() == held.preloaded.data_ptr()  # type: ignore[union-attr]


@each(
    ("names", "expected"),
    [
        (["Leck", "kein Leck"], "Leck"),
        (["NOLEAK", "LEAK_SUSPECTED"], "LEAK_SUSPECTED"),
        (["normal", "fuite"], "fuite"),
        # a leak that is gone, another state, two that may be meant
        (["repaired leak", "active"], None),
        (["leak=0", "leak=1"], "leak=1"),
        (["leck", "pump"], None),
        (["defect", "leak_free"], None),
        (["leak small", "leak large", "no leak"], None),
    ],
)
def test_the_only_label_that_names_leaks_is_taken(names, expected):
    if expected is None:
        with raises("unknown-label", UsageError) as caught:
            make_task(names)
        # a label that names no leak is not proposed
        assert ("leak_label='LABEL'" in str(caught.value.remedy)) == (not likely_leaks(names))
    else:
        assert make_task(names).leak_label == expected
