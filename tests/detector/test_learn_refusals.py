"Errors are reported before a training begins, and files of other programs are not replaced."

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from errors import raises

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import MachineError, OutputError, UsageError
from leakmel.core.operation import Run, make
from leakmel.detector.data import segments as loaders
from leakmel.detector.evaluate.evaluation import evaluate
from leakmel.detector.metrics.significance import Difference, interval_from_draws
from leakmel.detector.model.files import pick_device
from leakmel.detector.model.settings import CheckpointSettings, TrainSettings
from leakmel.detector.train import state as training_state
from leakmel.detector.train.loop import TrainResult, train, train_with_validation
from leakmel.detector.train.state import open_training, trailing_silence
from leakmel.detector.train.step import Stepper
from leakmel.operations.detector import Train

TINY = TrainSettings(
    detector="cnn", epochs=2, epoch_share=1.0, batch_size=200, channels=(4, 8), early_stop_epochs=0
)
WORDS = ["--detector", "cnn", "--epochs", "1", "--channels", "4,8", "--quiet"]
NAMES = [f"{part}_DATASET.H5" for part in ("TRAINING", "VALIDATION", "TESTING")]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("network")
    lm.write_demo(root / "demo", n_files=40)
    lm.build_all(root / "demo", out_dir=root / "sets", progress="none", check=2)
    lm.build_all(
        root / "demo",
        out_dir=root / "others",
        progress="none",
        check=2,
        spec=lm.MelSpec.preset("disjoint", f_min_hz=100.0),
    )
    return root


def trained(network: Path, out: Path, by: Callable = train_with_validation, **options: Any) -> TrainResult:
    given: dict[str, Any] = {
        "out": out,
        "settings": TINY,
        "device": "cpu",
        "progress": False,
        "checkpoints": CheckpointSettings(fsync=False),
    }
    return by(*(network / "sets" / n for n in NAMES[:2]), **given | options)


@pytest.mark.slow
@each("device", ["cuda:99", "cuda:one", "meta", "mps", "tpu", ""])
def test_missing_device_is_named(
    network: Path, tmp_path: Path, capsys: pytest.CaptureFixture, device: str
) -> None:
    with pytest.raises(UsageError, match="no such"):
        pick_device(device)
    with pytest.raises(UsageError, match="no such"):
        trained(network, tmp_path / "run", train, device=device)
    assert (
        main(["train", str(network / "sets"), "--out", str(tmp_path / "run"), "--device", device, *WORDS])
        == 2
    )
    assert "no such" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused(network: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such GPU"):
        trained(network, tmp_path / "run", device="cuda")


@pytest.mark.slow
def test_testing_recordings_of_other_features_are_refused_before_the_training(
    network: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = [
        "train",
        str(network / "sets"),
        "--testing",
        str(network / "others" / NAMES[2]),
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
        *WORDS,
    ]
    assert main(words) == 1
    assert "the data sets cannot be combined" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "--no-evaluation"]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::leakmel.detector.data.splits.SplitWarning")
def test_recordings_for_testing_may_have_been_built_alone(
    network: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for label in ("LEAK", "HISS"):
        (tmp_path / label / label).mkdir(parents=True)
        for wav in sorted((network / "demo" / "TESTING" / "LEAK").glob("*.wav"))[:2]:
            (tmp_path / label / label / wav.name).hardlink_to(wav)
        lm.build(tmp_path / label, out=tmp_path / f"{label}.h5", progress="none", check=0)
    words = ["train", str(network / "sets"), "--device", "cpu", *WORDS]
    assert main([*words, "--testing", str(tmp_path / "HISS.h5"), "--out", str(tmp_path / "none")]) == 1
    assert "has a label that the task does not include" in capsys.readouterr().err
    assert not (tmp_path / "none").exists(), "before the training, not after it"
    assert (
        main([*words, "--testing", str(tmp_path / "LEAK.h5"), "--out", str(tmp_path / "run"), "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["evaluation"]["recordings"] == 2
    assert (
        main(
            [
                *words,
                "--testing",
                str(tmp_path / "LEAK.h5"),
                "--out",
                str(tmp_path / "divided"),
                "--group",
                "sensor",
            ]
        )
        == 1
    )
    assert "the data sets cannot be combined" in capsys.readouterr().err


@pytest.mark.slow
@each(
    ("name", "content"),
    [
        ("summary.json", b'{"ok": true, "files": 1200}'),
        ("summary.json", b"not JSON"),
        ("summary.json", b"[1]"),
        ("history.csv", b"day,money\n"),
        ("model.pt", b"somebody's"),
        ("model.pt", pickle.dumps({"weights": 1})),
        ("model.pt", None),
    ],
)
def test_files_of_other_programs_are_not_replaced(
    network: Path, tmp_path: Path, name: str, content: bytes | None
) -> None:
    "Such a folder may be one of a build, or of another program."
    if content is None:
        torch.save({"format": "theirs"}, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    before = (tmp_path / name).read_bytes()
    with raises("other-file-in-the-way", OutputError, path=tmp_path / name):
        trained(network, tmp_path, train)
    assert (tmp_path / name).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.slow
def test_output_of_an_earlier_training_is_replaced_and_a_file_is_refused(
    network: Path, tmp_path: Path
) -> None:
    trained(network, tmp_path / "run")
    assert (
        trained(network, tmp_path / "run", settings=replace(TINY, seed=1), resume="never")
        .summary["begin"]
        .startswith("Starts with epoch 1")
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["settings"]["seed"] == 1
    with raises("not-a-folder", OutputError):
        trained(network, tmp_path / "run" / "history.csv")


# ---- free memory is not the same when a training goes on


def interrupted(network: Path, out: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    real = Stepper.step

    def dying(self: Stepper, batch: Any) -> Any:
        if self.n_done == 5:
            raise ZeroDivisionError
        return real(self, batch)

    with monkeypatch.context() as m:
        m.setattr(Stepper, "step", dying)
        m.setattr(loaders, "free_memory", lambda: free)
        settings = replace(TINY, preload_to_ram=False)
        with pytest.raises(ZeroDivisionError):
            trained(network, out, settings=settings, checkpoints=CheckpointSettings(checkpoint_steps=2))


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), [(1 << 40, 1), (1, 1 << 40)])
def test_resumed_training_keeps_its_loader(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: int, now: int
) -> None:
    "Which one suits depends on free memory, and the order of the items on which one it is."
    settings = replace(TINY, preload_to_ram=False)
    interrupted(network, tmp_path / "run", monkeypatch, then)
    with monkeypatch.context() as m:
        m.setattr(loaders, "free_memory", lambda: now)
        assert (
            trained(network, tmp_path / "run", settings=settings, resume="always")
            .summary["begin"]
            .startswith("Resumes after step 4")
        )
    with monkeypatch.context() as m:
        m.setattr(loaders, "free_memory", lambda: then)
        trained(network, tmp_path / "whole", settings=settings)
    assert (tmp_path / "run" / "model.pt").read_bytes() == (tmp_path / "whole" / "model.pt").read_bytes()


def test_items_that_no_longer_fit_into_memory_are_reported(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(network, tmp_path / "run", monkeypatch, 1 << 40)

    def full(*args: Any, real: Any = training_state.open_loader, **options: Any) -> Any:
        if options["kind"] == "device":
            raise MemoryError("no more")
        return real(*args, **options)

    monkeypatch.setattr(loaders, "free_memory", lambda: 1)
    monkeypatch.setattr(training_state, "open_loader", full)
    with raises("out-of-memory", MachineError, says="do not fit into memory"):
        trained(network, tmp_path / "run", settings=replace(TINY, preload_to_ram=False))


def test_difference_of_undefined_figures_is_undefined() -> None:
    nan = float("nan")
    assert (
        str(Difference("precision", nan, interval_from_draws(torch.full((100,), nan).numpy(), 9)))
        == "undefined"
    )


# ---- silence behind recordings


@pytest.mark.slow
def test_trailing_silence_is_excluded_and_reported(network: Path, tmp_path: Path) -> None:
    "Rows of 40 s that hold 10 s of sound: it stands beside the numbers, and nowhere where rows are as long as recordings."
    spec = lm.MelSpec.preset("disjoint", duration_s=40.0)
    built = [
        r.path
        for r in lm.build_all(
            network / "demo", out_dir=tmp_path / "sets", progress="none", check=2, spec=spec
        )
    ]
    files = {p.name: p for p in built}
    done = train_with_validation(
        files[NAMES[0]], out=tmp_path / "run", settings=replace(TINY, epochs=1), device="cpu", progress=False
    )
    output = "75.0% of the long segments are silence behind them and left out"
    with open_training(files[NAMES[0]], settings=TINY) as data:
        assert output in trailing_silence(data.training)
    found = evaluate(done.detector, files[NAMES[2]], device="cpu", progress="none")
    assert output in " ".join(found.report().split())
    assert not any("silence" in c for c in found.cautions)
    own = trained(network, tmp_path / "own").detector
    assert "silence" not in evaluate(own, network / "sets" / NAMES[2], device="cpu", progress="none").report()


def test_labels_of_the_test_set_are_checked_before_the_training(network: Path, tmp_path: Path) -> None:
    "Also where the folder has no validation set, and one is given."
    source = next((network / "demo" / "TESTING").rglob("*.wav"))
    (tmp_path / "wavs" / "BURST").mkdir(parents=True)
    (tmp_path / "wavs" / "BURST" / source.name).write_bytes(source.read_bytes())
    (tmp_path / "sets").mkdir()
    lm.build(tmp_path / "wavs", out=tmp_path / "sets" / NAMES[2], progress="none", check=0)
    (tmp_path / "sets" / NAMES[0]).symlink_to(network / "sets" / NAMES[0])
    given = {
        "data": str(tmp_path / "sets"),
        "validation": str(network / "sets" / NAMES[1]),
        "out": str(tmp_path / "run"),
    }
    with raises("unknown-label", says="BURST"):
        make(Train, given).plan(Run("none", keeps=True))
