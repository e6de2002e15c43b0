"Embeddings do not depend on batches, files of them are read or refused, and the search finds what comparing all finds."

import io
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from each import each
from errors import raises
from made_detectors import RATE, SPEC, made_detector, noise, put

import leakmel as lm
from leakmel.cli import main
from leakmel.detector.data.segments import Segments, make_task
from leakmel.detector.model.detector import BlendClassifier, BlendSettings, Detector, from_plain, to_plain
from leakmel.detector.model.spectral import SpectralClassifier, fit_spectral, spectral_features
from leakmel.detector.predict.scoring import find_recordings
from leakmel.extras import similar as module
from leakmel.extras.similar import (
    SAME_CONTENT,
    SAME_FEATURES,
    embed_recordings,
    embed_rows,
    nearest,
    open_embedder,
)
from leakmel.recordings.wav import read_wav

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET: dict[str, Any] = {"progress": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    "Labelled recordings of several lengths, one without a label, a copy, a copy with 24 bits, a silent and a broken one."
    root = tmp_path_factory.mktemp("embed") / "set"
    for k in range(12):
        name = f"{'LEAK' if k % 2 else 'NOLEAK'}/S{k % 3}~{k:06d}~20210301_0000{k:02d}~24.wav"
        put(root, name, noise(k, RATE + 700 * k, level=100 * k + 90))
    put(root, "unlabelled.wav", noise(30))
    put(root, "LEAK/copy.wav", noise(3, RATE + 2100, level=390))
    soundfile.write(
        root / "NOLEAK/wide.wav", noise(3, RATE + 2100, level=390) / 32768, RATE, subtype="PCM_24"
    )
    put(root, "LEAK/long.wav", noise(31, 9 * RATE + 123))
    put(root, "NOLEAK/silent.wav", np.zeros(RATE, np.int16))
    put(root, "NOLEAK/short.wav", noise(1, 900))
    (root / "broken.wav").write_bytes(b"RIFF....WAVE")
    return root


@pytest.fixture(scope="module")
def built(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("embed-sets") / "set.h5"
    lm.build(folder, out=out, spec=SPEC, engine="cpu", progress="none", check=2)
    return out


@pytest.fixture(scope="module")
def spectral(small_sets) -> Detector:
    "A spectral detector, without the cross-validation of a training."
    with lm.open_dataset(small_sets / "TRAINING_DATASET.H5") as ds:
        rows = Segments([ds], level="recording")
        fitted = fit_spectral(spectral_features(rows), rows.labels, len(ds.class_names))
        return Detector(fitted, make_task(ds.class_names), ds.spec)


def test_a_network_has_no_embeddings(folder, built, tmp_path, capsys):
    network = made_detector()
    for source in (folder, built):
        with raises("not-spectral", says="cnn"):
            lm.embed(network, source, **QUIET)
    with raises("not-spectral"):
        lm.similar(folder / "LEAK/copy.wav", built, model=network, **QUIET)
    model = network.save(tmp_path / "model.pt")
    words = ["embed", str(folder), "--out", str(tmp_path / "e.npz"), "--json"]
    assert main([*words, "--model", str(model)]) == 2
    assert json.loads(capsys.readouterr().out)["code"] == "not-spectral"
    assert not (tmp_path / "e.npz").exists()


def test_a_blend_has_the_embeddings_of_its_spectral_part(built, spectral):
    with lm.open_dataset(built) as ds:
        spec = ds.spec
    alone = replace(spectral, spec=spec)
    blend = BlendClassifier(
        BlendSettings(0, (1.0, 1.0), (0.0, 0.0)), [*spectral.members, *made_detector().members]
    )
    one, other = (lm.embed(d, built, **QUIET) for d in (alone, replace(alone, classifier=blend)))
    assert (one.kind, one.identity) == (other.kind, other.identity)
    assert np.array_equal(one.vectors, other.vectors)


@each("length", ["spec", "whole"])
def test_embeddings_do_not_depend_on_batches(folder, length):
    embedder = open_embedder(None, SPEC)
    found, given = find_recordings(folder, progress="none"), {"length": length, "progress": "none"}
    one, other = (embed_recordings(found, embedder, files_per_batch=n, **given) for n in (1, 7))
    assert one.paths == other.paths
    assert np.array_equal(one.vectors, other.vectors)
    some = embed_recordings(found.part(2, 3), embedder, **given)
    places = [one.paths.index(p) for p in some.paths]
    assert len(places) > 3
    assert np.array_equal(some.vectors, one.vectors[places])
    assert {r.code for r in one.rejections} == {"too_short", "not_wav"} or len(one.rejections) == 2


@pytest.mark.parametrize("model", [None, "spectral"])
def test_a_data_set_gives_the_embeddings_of_its_folder(folder, built, spectral, model):
    detector = model and replace(spectral, spec=SPEC)
    rows = lm.embed(detector, built, **QUIET)
    files = lm.embed(detector, folder, spec=None if model else SPEC, engine="cpu", **QUIET)
    by_path = dict(zip(files.paths, files.vectors, strict=True))
    assert len(rows) >= 14
    assert all(np.array_equal(by_path[p], v) for p, v in zip(rows.paths, rows.vectors, strict=True))
    with lm.open_dataset(built) as ds:
        some = Segments([ds], level="recording", with_labels=False)
        each = embed_rows(some, open_embedder(detector, SPEC), rows_per_block=1, progress="none")
    assert np.array_equal(each.vectors, rows.vectors)


def test_a_missing_label_stays_empty(folder):
    found = lm.embed(None, folder, spec=SPEC, **QUIET)
    labels = dict(zip(found.paths, found.labels, strict=True))
    assert labels[b"unlabelled.wav"] == ""
    assert labels[b"LEAK/copy.wav"] == "LEAK"


def test_spectral_embeddings_are_standardised_by_the_training_recordings(small_sets, spectral):
    found = lm.embed(spectral, small_sets / "TRAINING_DATASET.H5", **QUIET)
    assert found.kind == "spectral"
    assert found.vectors.shape[1] == 128
    assert np.abs(found.vectors.mean(0)).max() < 1e-3
    assert np.allclose(found.vectors.std(0), 1, atol=1e-3)


def test_scales_of_a_spectral_model_are_above_0(spectral):
    head, weights = to_plain(spectral.classifier)
    with pytest.raises(ValueError, match="scale"):
        from_plain(head, weights | {"scale": torch.zeros_like(weights["scale"])})


def test_stored_embeddings_are_equal_after_loading(folder, tmp_path):
    found = lm.embed(None, folder, spec=SPEC, out=tmp_path / "e.npz", **QUIET)
    again = lm.load_embeddings(tmp_path / "e.npz")
    assert np.array_equal(again.vectors, found.vectors)
    assert again.spec == SPEC
    for name in ("paths", "labels", "digests", "kind", "identity", "sources"):
        assert getattr(again, name) == getattr(found, name)
    assert os.listdir(tmp_path) == ["e.npz"]


def test_another_file_is_not_replaced(folder, tmp_path):
    found = lm.embed(None, folder, spec=SPEC, **QUIET)
    (tmp_path / "other.npz").write_bytes(b"mine")
    with raises("other-file-in-the-way"):
        found.save(tmp_path / "other.npz")
    assert (tmp_path / "other.npz").read_bytes() == b"mine"
    with raises("not-npz"):
        found.save(tmp_path / "e.h5")


def _with(path: Path, **changed: bytes) -> Path:
    "A copy of a file of embeddings with other parts."
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_name("bad.npz"), "w") as new:
        for info in old.infolist():
            new.writestr(info, changed.get(info.filename.removesuffix(".npy"), old.read(info)))
    return path.with_name("bad.npz")


def _array(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, values, allow_pickle=True)
    return out.getvalue()


def test_hostile_files_are_refused(folder, tmp_path):
    found = lm.embed(None, folder, spec=SPEC, **QUIET)
    path, n = found.save(tmp_path / "e.npz"), len(found)
    with np.load(path) as parts:
        about = json.loads(parts["about"].tobytes())
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        huge, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 9)}
    )
    bad: dict[str, dict[str, bytes]] = {
        "pickle": {"vectors": _array(np.array([print, 1], object))},
        "no numbers": {"vectors": _array(np.full((n, 3), np.nan, "<f4"))},
        "other length": {"rows": _array(np.zeros(n + 1, "<i8"))},
        "a path too few": {
            "about": _array(
                np.frombuffer(json.dumps(about | {"paths": about["paths"][1:]}).encode(), np.uint8)
            )
        },
        "a label that is no text": {
            "about": _array(np.frombuffer(json.dumps(about | {"labels": [5] * n}).encode(), np.uint8))
        },
        "huge": {"vectors": huge.getvalue()},
        "no JSON": {"about": _array(np.zeros(4, np.uint8))},
        "other kind": {"vectors": _array(np.zeros((n, 2), "<f8"))},
        "no values": {"vectors": _array(np.zeros((n, 0), "<f4"))},
        "squares that overflow": {"vectors": _array(np.full((n, 128), 3e38, "<f4"))},
    }
    for parts in bad.values():
        with raises("invalid-embeddings"):
            lm.load_embeddings(_with(path, **parts))
    for content in (b"", b"PK\x03\x04", path.read_bytes()[:-40], b"text"):
        (tmp_path / "cut.npz").write_bytes(content)
        with raises("invalid-embeddings"):
            lm.load_embeddings(tmp_path / "cut.npz")
    with (
        zipfile.ZipFile(path) as old,
        zipfile.ZipFile(tmp_path / "small.npz", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    with raises("invalid-embeddings"):
        lm.load_embeddings(tmp_path / "small.npz")
    with raises("file-missing"):
        lm.load_embeddings(tmp_path)
    few = _with(path, vectors=_array(np.zeros((n, 5), "<f4")))
    with raises("invalid-embeddings"):
        lm.similar(folder / "LEAK/copy.wav", few, **QUIET)


def test_an_output_is_checked_before_the_work(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_recordings", lambda *a, **k: pytest.fail("recordings were listed"))
    (tmp_path / "mine.npz").write_bytes(b"mine")
    with raises("not-npz"):
        lm.embed(None, folder, out=tmp_path / "e.txt", spec=SPEC, **QUIET)
    with raises("other-file-in-the-way"):
        lm.embed(None, folder, out=tmp_path / "mine.npz", spec=SPEC, **QUIET)


@each("name", ["query.wav", "mine.html"])
def test_a_report_replaces_no_other_file(folder, tmp_path, name, capsys):
    (tmp_path / name).write_bytes(content := (folder / "LEAK/copy.wav").read_bytes())
    words = ["similar", str(tmp_path / name), "--in", str(folder), "--duration-s", "1"]
    assert main([*words, "--html", str(tmp_path / name), "--json"]) != 0
    assert json.loads(capsys.readouterr().out)["code"] in ("invalid-arguments", "other-file-in-the-way")
    assert (tmp_path / name).read_bytes() == content


@each("k", [1, 5, 300])
def test_the_search_is_exact(k, monkeypatch):
    monkeypatch.setattr("leakmel.extras.similar._BLOCK", 64)
    rng = np.random.default_rng(0)
    vectors = rng.normal(0, rng.uniform(0.1, 50, 6), (200, 6)).astype(np.float32)
    vectors[50] = vectors[3]  # of equal ones the first
    vectors[:, 2] = 4  # does not vary
    query = vectors[3].astype(np.float64) + 0.01
    scales = np.where(np.arange(6) == 2, 1, vectors.astype(np.float64).std(0))
    apart = [float(np.sqrt(np.mean(((v - query) / scales) ** 2))) for v in vectors.astype(np.float64)]
    order = sorted(range(200), key=lambda i: (apart[i], i))[:k]
    numbers, distances = nearest(vectors, query, k)
    assert numbers.tolist()[:2] == order[:2]
    assert sorted(numbers.tolist()) == sorted(order)
    assert np.allclose(distances, [apart[i] for i in order], rtol=1e-6)


def test_duplicates_are_marked_and_do_not_count_as_labels(folder):
    with_one = lm.similar(folder / "LEAK/copy.wav", folder, k=6, spec=SPEC, **QUIET)
    marks = {n.path: n.duplicate for n in with_one.neighbours}
    original = next(n.path for n in with_one.neighbours if b"000003" in n.path)
    assert marks[b"LEAK/copy.wav"] == marks[original] == SAME_CONTENT
    assert marks[b"NOLEAK/wide.wav"] == SAME_FEATURES
    assert sum(map(bool, marks.values())) == 3
    assert sum(with_one.labels.values()) <= 3  # of six neighbours, three are duplicates
    assert with_one.neighbours[0].similarity == 1.0
    assert read_wav(folder / "LEAK/copy.wav").digest


def test_data_set_folder_and_stored_file_give_the_same_neighbours(folder, built, tmp_path):
    query = folder / "LEAK/long.wav"
    stored = lm.embed(None, folder, spec=SPEC, engine="cpu", out=tmp_path / "e.npz", **QUIET)
    tables = [
        [(n.path, n.similarity) for n in lm.similar(query, among, k=5, engine="cpu", **QUIET).neighbours]
        for among in (stored, tmp_path / "e.npz")
    ]
    assert tables[0] == tables[1]
    of_rows = lm.similar(query, built, k=5, engine="cpu", **QUIET)
    assert len(of_rows.neighbours) == 5
    assert of_rows.neighbours[0].path == b"LEAK/long.wav"


def test_figures_show_query_and_neighbours(folder, built, tmp_path):
    for among in (folder, built):
        found = lm.similar(folder / "LEAK/long.wav", among, k=3, spec=SPEC, **QUIET)
        figure = found.figure(2)
        assert len(figure.data) == 3
        assert all(np.ptp(np.asarray(t.z)) > 0 for t in figure.data)
        with raises("out-of-range"):
            found.figure(0)
    whole = lm.similar(folder / "LEAK/long.wav", folder, k=3, spec=SPEC, length="whole", **QUIET).figure(2)
    assert whole.data[0].x[-1] > 8 > figure.data[0].x[-1], "seconds of a recording of 9 s"
    gone = replace(found, among=replace(found.among, sources=(str(tmp_path / "gone.h5"),)))
    assert np.ptp(np.asarray(gone.figure(1).data[1].z)) == 0  # empty


def test_wrong_input_is_named(folder, built, spectral, tmp_path):
    detector = replace(spectral, spec=SPEC)
    stored = lm.embed(detector, built, **QUIET)
    query = folder / "LEAK/long.wav"
    with raises("other-embeddings"):
        lm.similar(query, stored, **QUIET)
    weights = {name: v.clone() for name, v in detector.classifier.state_dict().items()}
    other = SpectralClassifier(detector.classifier.settings)
    other.load_state_dict(weights | {"bias": weights["bias"] + 1})
    with raises("other-embeddings"):
        lm.similar(query, stored, model=replace(detector, classifier=other), **QUIET)
    with raises("features-differ"):
        lm.embed(replace(spectral, spec=lm.MelSpec.preset("disjoint", sample_rate=8000)), built, **QUIET)
    for name, code in (
        ("broken.wav", "query-rejected"),
        ("NOLEAK/short.wav", "query-rejected"),
        ("none.wav", "file-missing"),
    ):
        with raises(code):
            lm.similar(folder / name, stored, model=detector, **QUIET)
    with raises("out-of-range"):
        lm.similar(query, stored, k=0, **QUIET)
    empty = tmp_path / "empty"
    put(empty, "short.wav", noise(1, 900))
    with raises("all-rejected"):
        lm.embed(None, empty, spec=SPEC, **QUIET)


def test_options_that_would_be_ignored_are_refused(folder, built, spectral, tmp_path, capsys):
    "Embeddings know how recordings were read: the query is read in the same way."
    query = folder / "LEAK/long.wav"
    stored = lm.embed(None, folder, spec=SPEC, length="whole", out=tmp_path / "e.npz", **QUIET)
    again = lm.load_embeddings(tmp_path / "e.npz")
    assert stored.length == again.length == "whole"
    assert lm.similar(query, again, **QUIET).length == "whole"
    assert (
        lm.similar(query, again, spec={"sample_rate": RATE}, **QUIET).neighbours[0].path == b"LEAK/long.wav"
    )
    with raises("other-embeddings"):
        lm.similar(query, again, length="spec", **QUIET)
    unknown = replace(again, length="")
    assert lm.similar(query, unknown, length="spec", **QUIET).length == "spec"
    words = ["similar", str(query), "--in", str(tmp_path / "e.npz"), "--json"]
    assert main([*words, "--sample-rate", "8000"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["code"] == "other-embeddings"
    assert f"sample_rate 8000, not {RATE}" in body["error"]
    for model, source in ((spectral, folder), (None, built)):
        with raises("unused-option"):
            lm.embed(model, source, spec={"sample_rate": 8000}, **QUIET)
    with raises("unused-option"):
        lm.embed(None, built, length="whole", **QUIET)


def test_commands(folder, tmp_path, capsys):
    features = ["--duration-s", "1"]
    words = [*features, "--json"]
    assert main(["similar", "--store", str(folder), "--out", str(tmp_path / "e.npz"), *words]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["recordings"] == 17
    assert body["values"] == 128
    assert len(body["rejected"]) == 2
    query = str(folder / "LEAK/copy.wav")
    page = ["--html", str(tmp_path / "s.html")]
    assert main(["similar", query, "--in", str(tmp_path / "e.npz"), "--n", "4", *page, *words]) == 0
    body = json.loads(capsys.readouterr().out)
    assert next(n["path"] for n in body["neighbours"]).startswith("LEAK/")
    assert len(body["neighbours"]) == 4
    assert Path(body["html"]).stat().st_size > 10_000
    assert main(["similar", query, "--in", str(folder), "--n", "4", *features, "--quiet"]) == 0
    assert "duplicate: same content" in capsys.readouterr().out
    assert main(["similar", query, "--in", str(tmp_path / "none.npz"), *words]) == 1
    assert json.loads(capsys.readouterr().out)["code"] == "file-missing"
