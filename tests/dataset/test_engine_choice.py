"Choice of the engine by `engine='auto'`: expected wall time, measured rates, existing data sets."

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

import leakmel as lm
from leakmel import __version__
from leakmel.core.errors import DataError
from leakmel.dataset import config as engine_choice
from leakmel.dataset import targets
from leakmel.dataset.config import (
    EXPECTED,
    SCHEMA,
    EngineCost,
    PipelineConfig,
    choose_engine,
    engine_costs,
    read_tuned,
    this_machine,
    tuned_path,
    write_tuned,
)
from leakmel.dataset.existing import engine_of_journal, journal_path
from leakmel.mel.spec import MelSpec

SPEC = MelSpec.preset("disjoint")
ORDER = [("triton", "cuda"), ("torch", "cuda"), ("cpu", "cpu"), ("torch", "cpu"), ("reference", "cpu")]
QUIET: dict[str, Any] = {"progress": "none", "check": 4}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    "A machine with a CUDA driver, 2 cores, and all compiled code stored; the card itself is absent."
    monkeypatch.setattr(engine_choice, "engine_candidates", lambda device: list(ORDER))
    monkeypatch.setattr(engine_choice, "usable_cores", lambda: 2)
    monkeypatch.setattr(targets, "may_have_cuda", lambda: True)


@pytest.mark.parametrize("preset", ["disjoint", "overlap"])
def test_few_recordings_go_to_the_processor_and_many_to_a_gpu(card, tmp_path: Path, preset: str) -> None:
    spec = MelSpec.preset(preset)
    few, many = (choose_engine(spec, n, root=tmp_path) for n in (1000, 10_000_000))
    assert few.order[0] == ("cpu", "cpu")
    assert many.order[0] == ("triton", "cuda")
    assert set(few.order) == set(many.order) == set(ORDER), (
        "all others are tried if the first cannot be opened"
    )
    assert few.order[-1] == ("reference", "cpu"), "an engine without a figure is the last resort"
    for word in ("1,000 recordings", "cpu on cpu", "triton on cuda", "start-up", EXPECTED):
        assert word in few.reason
    cpu, gpu = (next(c for c in engine_costs(spec, has_gpu=True) if c.engine == e) for e in ("cpu", "triton"))
    size = equal_size(cpu, gpu)
    assert choose_engine(spec, math.floor(size * 0.99), root=tmp_path).order[0] == ("cpu", "cpu")
    assert choose_engine(spec, math.ceil(size * 1.01), root=tmp_path).order[0] == ("triton", "cuda")


def equal_size(one: EngineCost, other: EngineCost) -> float:
    "The number of recordings for which both take as long."
    return (other.start_s - one.start_s) / (1 / one.files_per_s - 1 / other.files_per_s)


def test_cores_and_frames_count() -> None:
    def size(**given: Any) -> float:
        cpu, gpu = (
            next(c for c in engine_costs(SPEC, has_gpu=True, **given) if c.engine == e)
            for e in ("cpu", "triton")
        )
        return equal_size(cpu, gpu)

    assert size(cores=2) < size(cores=4), "cores help the processor"
    costs = [engine_costs(MelSpec.preset(p), has_gpu=False, cores=2)[0] for p in ("disjoint", "overlap")]
    assert costs[0].files_per_s > costs[1].files_per_s > 0.5 * costs[0].files_per_s
    assert {c.device for c in engine_costs(SPEC, has_gpu=False)} == {"cpu"}


def stored_rates(root: Path, **rates: float) -> None:
    body = {
        "schema": SCHEMA,
        "leakmel_version": __version__,
        "machine": this_machine(),
        "engine": "auto",
        "device": "auto",
        "settings": {},
        "made_utc": "2026-11-24T00:00:00",
        "rates": {
            k: {"files_per_s": v, "made_utc": "2026-11-24T00:00:00", "spec": SPEC.fingerprint()}
            for k, v in rates.items()
        },
    }
    write_tuned(root, body)


def test_rates_of_tune_replace_the_expected_ones(
    card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert choose_engine(SPEC, 10_000_000, root=tmp_path).order[0] == ("triton", "cuda")
    stored_rates(tmp_path, **{"cpu/cpu": 500_000.0})
    choice = choose_engine(SPEC, 10_000_000, root=tmp_path)
    assert choice.order[0] == ("cpu", "cpu")
    assert "500,000 files/s, measured by tune, 2026-11-24" in choice.reason
    assert choose_engine(SPEC, 10_000_000, root=tmp_path / "other").order[0] == ("triton", "cuda")
    overlap = MelSpec.preset("overlap")
    assert choose_engine(overlap, 10_000_000, root=tmp_path).order[0] == ("triton", "cuda"), "not measured"
    stored_rates(tmp_path, **{"cpu/cpu": -1.0})
    with pytest.raises(DataError) as caught:
        read_tuned(tuned_path(tmp_path))
    assert caught.value.code == "invalid-tuned-file"


@pytest.mark.slow
def test_an_update_keeps_the_engine_of_the_data_set(
    demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "d.h5"
    first = lm.build(demo, split="testing", out=out, engine="reference", **QUIET)
    assert first.summary["engine_reason"] == ""
    with caplog.at_level(logging.INFO, "leakmel"):
        again = lm.build(demo, split="testing", out=out, **QUIET)
    assert again.summary["engine"] == first.summary["engine"]
    assert "keeps reference on cpu" in again.summary["engine_reason"]
    assert str(out) in again.summary["engine_reason"]
    assert again.summary["engine_reason"] in caplog.text
    fresh = lm.build(demo, split="testing", out=out, fresh=True, **QUIET)
    assert fresh.summary["engine"].startswith("cpu@")
    report = json.loads(out.with_name("d.h5.report.json").read_bytes())
    assert report["engine_reason"] == fresh.summary["engine_reason"] != ""
    lm.build(demo, split="testing", out=out, engine="reference", **QUIET)
    other = lm.build(demo, split="testing", out=out, spec={"n_mels": 32}, **QUIET)
    assert other.summary["engine"].startswith("cpu@"), "all rows are computed anyway"


def test_an_engine_that_cannot_be_opened_is_named(
    card, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "The choice falls on a GPU that is not there; rows and fingerprint are those of the engine that computed."
    right = lm.build(demo, split="testing", out=tmp_path / "right.h5", engine="cpu", **QUIET)
    costs = engine_choice._EXPECTED
    monkeypatch.setattr(
        engine_choice, "_EXPECTED", {k: v if k[1] == "cpu" else (0, 0, 0, False) for k, v in costs.items()}
    )
    monkeypatch.setattr(engine_choice, "_HOST_US", 0.001)
    made = lm.build(demo, split="testing", out=tmp_path / "x.h5", **QUIET)
    assert made.summary["engine_reason"].startswith("engine auto takes triton on cuda")
    assert made.summary["engine_reason"].endswith("It could not be used, so the engine is cpu on cpu.")
    assert made.path.read_bytes() == right.path.read_bytes()


def test_a_device_that_was_asked_for_is_not_weighed(card, tmp_path: Path) -> None:
    choice = choose_engine(SPEC, 10, root=tmp_path, device="cuda:0")
    assert choice.order[0][0] == "triton"
    assert "device cuda:0 was asked for" in choice.reason
    assert PipelineConfig().device == "auto"


def test_torch_on_the_processor_never_comes_before_the_cpu_engine(
    card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for n in (1, 100, 1000, 5000, 10_000_000):
        order = choose_engine(SPEC, n, root=tmp_path).order
        assert order.index(("cpu", "cpu")) < order.index(("torch", "cpu")), n
        assert order[-1] == ("reference", "cpu")
    stored_rates(tmp_path, **{"torch/cpu": 1e9})
    order = choose_engine(SPEC, 1_000_000, root=tmp_path).order
    assert order.index(("cpu", "cpu")) < order.index(("torch", "cpu"))


def test_the_engine_of_an_existing_data_set_is_kept(
    card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice, "engine_of_data_set", lambda path, spec: ("torch", "cpu"))
    for n_files in (1000, 10_000_000):
        choice = choose_engine(SPEC, n_files, root=tmp_path, targets=[tmp_path / "x.h5"])
        assert choice.order[0] == ("torch", "cpu")
        assert set(choice.order) == set(ORDER)
        assert "engine auto keeps torch on cpu, the engine of the existing data set" in choice.reason


def test_an_interrupted_build_is_resumed_by_its_engine(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    "Caches, measured rates or cores may have changed the choice since."
    out = tmp_path / "d.h5"
    options = QUIET | {"split": "testing", "out": out, "pipeline": PipelineConfig(journal_bytes=1)}

    def interrupt(*args: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("leakmel.dataset.publish.job_metadata", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lm.build(demo, engine="reference", **options)
    head = engine_of_journal(journal_path(out))
    assert head is not None
    assert head[0].startswith("reference@")
    targets = [out.with_name("absent.h5"), out]
    assert choose_engine(SPEC, 10, root=demo, targets=targets).order[0] == ("reference", "cpu")
    assert choose_engine(SPEC, 10, root=demo, targets=targets, fresh=True).order[0] == ("cpu", "cpu")
    other = MelSpec.preset("overlap")
    assert choose_engine(other, 10, root=demo, targets=targets).order[0] == ("cpu", "cpu"), "not resumable"
    lines = journal_path(out).read_bytes().splitlines(keepends=True)
    for broken in (lines[0], lines[0][:-9] + lines[1], b"", b"x" * 100):  # no rows, or damaged
        damaged = tmp_path / ".damaged.h5.journal"
        damaged.write_bytes(broken)
        assert engine_of_journal(damaged) is None
    made = lm.build(demo, **options)
    assert made.summary["engine"] == head[0]
    assert made.summary["resumed_rows"] == made.rows > 0
    assert "keeps reference on cpu, the engine of the interrupted build" in made.summary["engine_reason"]
    assert "cannot resume" not in caplog.text


def test_a_numbered_device_is_of_its_kind(card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered = [("triton", "cuda:0"), ("torch", "cuda:0")]
    monkeypatch.setattr(engine_choice, "engine_candidates", lambda device: list(numbered))
    choice = choose_engine(SPEC, 10, root=tmp_path, device="cuda:0")
    assert choice.order == tuple(numbered)
    monkeypatch.setattr(engine_choice, "engine_of_data_set", lambda path, spec: ("torch", "cuda"))
    kept = choose_engine(SPEC, 10, root=tmp_path, device="cuda:0", targets=[tmp_path / "x.h5"])
    assert kept.order == (("torch", "cuda:0"), ("triton", "cuda:0")), "the device that was asked for"
    assert "keeps torch on cuda:0" in kept.reason
    monkeypatch.setattr(engine_choice, "engine_of_data_set", lambda path, spec: ("cpu", "cpu"))
    other = choose_engine(SPEC, 10, root=tmp_path, device="cuda:0", targets=[tmp_path / "x.h5"])
    assert other.order == tuple(numbered)


def test_hidden_gpus_are_not_called_a_missing_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    reason = choose_engine(SPEC, 10, root=tmp_path).reason
    assert "because no GPU is visible (no CUDA driver, or CUDA_VISIBLE_DEVICES hides every GPU)" in reason
