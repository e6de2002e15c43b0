"ONNX export: each kind of detector, calibrations, metadata, and what is refused."

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import soundfile
import torch
from each import each
from errors import raises

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, MissingPackageError, OutputError, UsageError
from leakmel.detector.data.segments import make_task
from leakmel.detector.metrics.metrics import Brier, HeldOutScores, fit_calibration
from leakmel.detector.model.detector import BlendClassifier, BlendSettings, Classifier, Detector
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.model.spectral import (
    SpectralClassifier,
    SpectralFeatures,
    SpectralSettings,
    fit_spectral,
)
from leakmel.extras import onnx as onnx_export
from leakmel.extras.onnx import (
    TOLERANCE,
    TOLERANCE_SEGMENT,
    SamplesToProbability,
    check_recordings,
    compare_model,
    onnx_model,
    tree_attributes,
)
from leakmel.recordings.wav import digest_of

pytestmark = pytest.mark.usefixtures("one_thread", "few_trees")
SPEC = lm.MelSpec.preset("disjoint", duration_s=2)
TASK = make_task(["LEAK", "NOLEAK"])
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("onnx") / "demo"
    lm.write_demo(folder, n_files=12, seed=1)
    return folder


def net() -> LeakNet:
    torch.manual_seed(0)
    found = LeakNet(
        NetSettings(n_mels=64, width=2, channels=(4, 8)), mean=np.full(64, -60), deviation=np.full(64, 10)
    )
    return found.eval()


def spectral() -> SpectralClassifier:
    "Fitted to random features: what it says is of no meaning, but its trees are deep."
    rng = np.random.default_rng(0)
    whole = rng.normal(0, 8, (80, 128)).astype(np.float32)
    windows = np.repeat(whole, 2, 0) + rng.normal(0, 1, (160, 128)).astype(np.float32)
    features = SpectralFeatures(whole, windows, np.repeat(np.arange(80), 2), 4, False)
    return fit_spectral(features, rng.integers(0, 2, 80), 2, n_threads=1)


def held_out(n: int = 60) -> HeldOutScores:
    "Scores around 0.5, where those of the detectors of this page lie."
    rng = np.random.default_rng(1)
    truth = np.arange(n) % 2 == 0
    score = np.clip(0.5 + 0.1 * truth + rng.normal(0, 0.2, n), 0, 1)
    return HeldOutScores(score, truth, np.arange(n), "recording", "a test")


@pytest.fixture(scope="module")
def detectors() -> dict[str, Detector]:
    trees, layers = spectral(), net()
    blend = BlendClassifier(BlendSettings(0, (1.3, 0.8), (0.1, -0.2)), [trees, layers])
    made: dict[str, Classifier] = {"cnn": layers, "spectral": trees, "blend": blend}
    return {kind: Detector(c, TASK, SPEC, held_out=held_out()) for kind, c in made.items()}


@pytest.fixture(scope="module")
def checked(detectors, recordings) -> Any:
    return check_recordings(recordings, detectors["cnn"], most=8, progress="none")


@pytest.fixture(scope="module", autouse=True)
def models() -> Iterator[Callable[..., onnx.ModelProto]]:
    "Let the exports of this page make a model once for each kind, vote and calibration: it takes seconds."
    made: dict[Any, onnx.ModelProto] = {}

    def cached(detector: Detector, calibration: Any = None, **given: Any) -> onnx.ModelProto:
        key = detector.kind, detector.vote, detector.share, calibration
        if key not in made:
            made[key] = onnx_model(detector, calibration, **given)
        copy = onnx.ModelProto()
        copy.CopyFrom(made[key])
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_export, "onnx_model", cached)
        yield cached


def changed(model: onnx.ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> onnx.ModelProto:
    "Change a constant of a model."
    (value,) = [v for v in model.graph.initializer if v.name.endswith(name)]
    value.CopyFrom(onnx.numpy_helper.from_array(change(onnx.numpy_helper.to_array(value)), value.name))
    return model


def run_file(path: Path, samples: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path)
    return dict(
        zip([o.name for o in session.get_outputs()], session.run(None, {"samples": samples}), strict=True)
    )


def metadata(path: Path) -> dict[str, str]:
    return onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map


def refused(model: Any, code: str, kind: type[lm.LeakmelError], folder: Path, **given: Any) -> None:
    "Assert that nothing is left of an export that is refused."
    before = sorted(os.listdir(folder))
    with raises(code, kind):
        lm.export_onnx(model, folder / "model.onnx", progress="none", **given)
    assert sorted(os.listdir(folder)) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["cnn", pytest.param("spectral", marks=pytest.mark.long), "blend"]
)  # a blend has both
def test_each_kind_equals_predict(detectors, recordings, kind, tmp_path):
    done = lm.export_onnx(
        detectors[kind], tmp_path / "model.onnx", recordings=recordings, most=8, progress="none"
    )
    assert (done.kind, done.check.source, done.check.recordings) == (kind, "recordings", 8)
    assert done.check.score < 1e-4
    assert done.check.probability < 1e-4  # type: ignore[operator]
    assert done.n_bytes == done.path.stat().st_size
    # once more, and independently: samples by soundfile, scores by predict
    found = lm.predict(recordings, detectors[kind], length="spec", device="cpu", progress="none").table
    samples = [soundfile.read(recordings / p, dtype="float32")[0][: SPEC.n_samples] for p in found["path"]]
    outputs = run_file(done.path, np.stack(samples))
    assert np.allclose(outputs["score"], found["score"], atol=1e-4)
    assert np.allclose(outputs["probability"], found["probability"], atol=1e-4)
    assert found["score"].std() > 1e-3  # not one score for all
    alone = [run_file(done.path, s[None])["probability"][0] for s in samples[:3]]
    assert np.allclose(alone, outputs["probability"][:3], atol=1e-6)


@pytest.mark.slow
def test_a_vote_and_a_steep_isotonic_calibration(detectors, recordings, tmp_path):
    detector = replace(detectors["cnn"], vote="frac_vote", share=0.3, held_out=held_out(1200))
    done = lm.export_onnx(detector, tmp_path / "a.onnx", recordings=recordings, most=6, progress="none")
    calibration = json.loads(metadata(done.path)["calibration"])
    assert calibration["method"] == "isotonic"
    assert done.check.score < 1e-4
    right = fit_calibration(detector.held_out)
    assert right is not None
    assert np.diff(right.y).max() > 20 * np.diff(right.x)[np.diff(right.y).argmax()]
    grid = torch.linspace(0, 1, 2001, dtype=torch.float64)
    found = SamplesToProbability(detector, right).calibrated(grid)
    assert np.allclose(found, right.probability(grid.numpy()), atol=1e-12)


@each(("vote", "share"), [("mean", 0.5), ("long_vote", 0.5), ("any_long", 0.5), ("frac_vote", 0.7)])
def test_votes(detectors, vote, share):
    detector = replace(detectors["cnn"], vote=vote, share=share)
    samples = torch.randn(3, SPEC.n_samples, generator=torch.Generator().manual_seed(0)) / 100
    score, segments = SamplesToProbability(detector, None)(samples)
    assert np.allclose(score, detector.recording_scores(segments.numpy()), atol=1e-7)


@pytest.mark.slow
def test_without_held_out_scores_there_is_no_probability(detectors, tmp_path):
    done = lm.export_onnx(replace(detectors["cnn"], held_out=None), tmp_path / "a.onnx", progress="none")
    assert set(run_file(done.path, np.zeros((2, SPEC.n_samples), np.float32))) == {"score", "segment_scores"}
    assert done.check.probability is None
    assert "no output probability" in done.text
    assert (done.check.source, done.check.recordings) == ("synthetic signals", 16)
    assert "synthetic signals" in done.text
    assert "no recordings were given" in done.text


@pytest.mark.slow
def test_a_model_that_differs_leaves_no_file(detectors, checked, models, tmp_path, monkeypatch):
    detector = detectors["cnn"]
    right, calibration = models(detector), fit_calibration(detector.held_out)
    assert compare_model(right, checked, None, 0.5, TOLERANCE).score < 1e-4
    for change in (lambda x: x + np.array([0.02, 0], np.float32), lambda x: x * np.float32("nan")):
        wrong = changed(models(detector), "classes.bias", change)
        with raises("program-differs", DataError):
            compare_model(wrong, checked, None, 0.5, TOLERANCE)
    wrong = changed(
        models(detector, calibration), "classes.bias", lambda x: x + np.array([0.02, 0], np.float32)
    )
    monkeypatch.setattr(onnx_export, "onnx_model", lambda *_, **__: wrong)
    refused(detector, "program-differs", DataError, tmp_path)
    (tmp_path / "model.onnx").write_bytes(right.SerializeToString())  # an earlier export stays as it was
    refused(detector, "program-differs", DataError, tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == right.SerializeToString()


@pytest.mark.slow
def test_segments_that_differ_are_refused_though_their_mean_does_not(detectors, checked, models):
    model = models(detectors["cnn"])
    apart = np.zeros_like(checked.segment_scores)
    apart[:, 0], apart[:, 1] = 1.5 * TOLERANCE_SEGMENT, -1.5 * TOLERANCE_SEGMENT
    with raises("program-differs", DataError):
        compare_model(
            model, replace(checked, segment_scores=checked.segment_scores + apart), None, 0.5, TOLERANCE
        )
    near = replace(checked, segment_scores=checked.segment_scores + apart / 2)
    assert compare_model(model, near, None, 0.5, TOLERANCE).segment_score > TOLERANCE


def test_metadata(detectors, tmp_path):
    brier = Brier("sensor", 12, 0.1, 0.25)
    file = replace(detectors["cnn"], reliability=(brier,)).save(tmp_path / "model.pt")
    done = lm.export_onnx(file, progress="none")
    assert done.path == tmp_path / "model.onnx"
    found = metadata(done.path)
    assert lm.MelSpec(**json.loads(found["mel_spec"])) == SPEC
    assert (found["sample_rate"], found["n_samples"]) == ("4096", str(SPEC.n_samples))
    assert float(found["threshold"]) == detectors["cnn"].threshold
    assert found["format"] == "leakmel onnx 1"
    assert found["leakmel_version"] == lm.__version__
    assert json.loads(found["classes"]) == ["LEAK", "NOLEAK"]
    assert found["leak_label"] == "LEAK"
    assert found["model_digest"] == digest_of(file.read_bytes())
    assert json.loads(found["reliability"]) == [asdict(brier)]
    check = json.loads(found["check"])
    assert check["score"] == done.check.score
    assert check["recordings"] == 16
    assert "least the threshold" in found["verdict"]
    content = done.path.read_bytes()
    assert not any(
        word in content for word in (b"site-packages", b".py", os.fsencode(tmp_path), os.fsencode(ROOT))
    )
    again = lm.export_onnx(file, progress="none")  # replaces a file of its own kind
    assert again.path.read_bytes() == content


def test_what_cannot_be_exported(detectors, recordings, tmp_path):
    refused(replace(detectors["cnn"], spec=None), "no-spec", UsageError, tmp_path)
    refused(detectors["cnn"], "out-of-range", UsageError, tmp_path, most=0)
    for name, content in {"text": b"no model", "zip": b"PK\x03\x04" + bytes(100)}.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "damaged-file", DataError, tmp_path)
    torch.save({"format": os.system}, tmp_path / "code")
    refused(tmp_path / "code", "unsafe-pickle", DataError, tmp_path)
    torch.save({"format": "another"}, tmp_path / "other")
    refused(tmp_path / "other", "not-a-detector", DataError, tmp_path)
    refused(tmp_path / "missing", "file-missing", DataError, tmp_path)
    refused(tmp_path, "no-detector", DataError, tmp_path)
    soundfile.write(tmp_path / "short.wav", np.zeros(5000), 4096)
    refused(detectors["cnn"], "no-recordings", DataError, tmp_path, recordings=tmp_path)
    with raises("usage", UsageError):
        lm.export_onnx(detectors["cnn"])
    (tmp_path / "model.onnx").write_bytes(b"another program's file")
    refused(detectors["cnn"], "other-file-in-the-way", OutputError, tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == b"another program's file"


def test_nodes_that_form_no_trees_are_refused():
    classifier = SpectralClassifier(SpectralSettings(n_mels=2, n_classes=2, window=1, n_nodes=4, depth=3))
    for name, children in (("left", [1, 2, 0, 3]), ("right", [3, 3, 3, 3])):  # 0, 1, 2 and again 0
        classifier.get_buffer(name).copy_(torch.tensor(children))
    with raises("not-a-detector", DataError):
        tree_attributes(classifier, 0)


@each("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named(detectors, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=r"\[onnx\]"):
        lm.export_onnx(detectors["cnn"], tmp_path / "model.onnx")
    assert os.listdir(tmp_path) == []


def test_command(detectors, recordings, tmp_path, capsys):
    detectors["cnn"].save(tmp_path / "model.pt")
    words = ["export", str(tmp_path / "model.pt"), "--onnx", "--recordings", str(recordings), "--most", "4"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["check"]["recordings"] == 4
    assert Path(found["path"]).is_file()
    assert main(["export", str(tmp_path / "model.pt")]) == 2
    assert "--onnx" in capsys.readouterr().err


def example() -> str:
    "The example of the guide."
    nb = json.loads((ROOT / "nbs" / "guides" / "open_formats.ipynb").read_text(encoding="utf-8"))
    (found,) = [s for c in nb["cells"] if (s := "".join(c["source"])).startswith("# score_wav.py")]
    return found


@pytest.mark.slow
def test_the_example_of_the_guide_needs_no_leakmel(detectors, recordings, tmp_path):
    script = example()
    assert len(script.splitlines()) <= 40
    (tmp_path / "score_wav.py").write_text(
        "import sys\nfor name in ('leakmel', 'torch', 'onnx'): sys.modules[name] = None\n"
        + script
        + "\nprint(*main(*sys.argv[1:]))\n"
    )
    path = lm.export_onnx(detectors["blend"], tmp_path / "model.onnx", progress="none").path
    found = lm.predict(recordings, detectors["blend"], length="spec", device="cpu", progress="none").table
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def scored(wav: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "score_wav.py", str(path), str(wav)]
        return subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True)

    for row in found.iloc[:2].itertuples():
        done = scored(recordings / row.path)
        assert done.returncode == 0, done.stderr
        probability, is_leak = done.stdout.split()
        assert abs(float(probability) - row.probability) < 1e-4  # type: ignore[arg-type, operator]
        assert is_leak == str(bool(row.leak))
    soundfile.write(tmp_path / "other.wav", np.zeros(9000), 8000)
    assert "4096 Hz" in scored(tmp_path / "other.wav").stderr
    soundfile.write(tmp_path / "short.wav", np.zeros(9), 4096)
    assert "samples" in scored(tmp_path / "short.wav").stderr
    for value in (np.nan, np.inf):
        broken = np.where(np.arange(SPEC.n_samples + 5) == 7, value, 0.01)
        soundfile.write(tmp_path / "broken.wav", broken, 4096, subtype="FLOAT")
        done = scored(tmp_path / "broken.wav")
        assert done.returncode == 1
        assert "NaN or infinite samples" in done.stderr
        # what the guide says of the model itself
        score = run_file(path, broken[None, : SPEC.n_samples].astype(np.float32))["score"]
        assert np.isnan(score).all()
