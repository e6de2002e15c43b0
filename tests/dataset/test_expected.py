"A builder that conforms recordings against the rules is stopped by the check."

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from each import each

import leakmel as lm
from leakmel.core.errors import RecordingError, VerifyError
from leakmel.dataset import loader
from leakmel.dataset.verify import expected_row
from leakmel.recordings.conform import ConformRules, conform
from leakmel.recordings.wav import Recording

pytestmark = pytest.mark.quick

SPEC = lm.MelSpec.preset("disjoint", duration_s=0.5)
QUIET: dict[str, Any] = {
    "spec": SPEC,
    "check": None,
    "progress": "none",
    "pipeline": lm.PipelineConfig(monitor_interval_s=0.0),
}
Conform = Callable[[np.ndarray, int, ConformRules], tuple[np.ndarray, str]]


def noise(n: int, channels: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9000, 9000, (n, channels), dtype=np.int16)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    "Recordings to which each rule applies once."
    folder = tmp_path / "data" / "A"
    folder.mkdir(parents=True)
    made = (
        ("plain", 2048, 1, 4096),
        ("long", 3000, 1, 4096),
        ("short", 1500, 1, 4096),
        ("stereo", 2048, 2, 4096),
        ("fast", 8000, 1, 8000),
    )
    for name, n, channels, rate in made:
        soundfile.write(folder / f"{name}.wav", noise(n, channels, len(name)), rate, subtype="PCM_16")
    return tmp_path / "data"


def cut_in_front(x, rate, rules):
    return conform(x[-rules.n_samples :] if rate == rules.sample_rate else x, rate, rules)


def pad_in_front(x, rate, rules):
    row, status = conform(x, rate, rules)
    return (np.roll(row, rules.n_samples - len(x)) if status == "padded" else row), status


def second_channel(x, rate, rules):
    return (
        conform(x[:, ::-1], rate, ConformRules(rules.sample_rate, rules.n_samples, "first"))
        if x.shape[1] > 1
        else conform(x, rate, rules)
    )


def louder_mean(x, rate, rules):
    row, status = conform(x, rate, rules)
    return (row * np.float32(2) if "downmixed" in status else row), status


def dropped_samples(x, rate, rules):
    return (
        (conform(x[::2], rules.sample_rate, rules)[0], "resampled")
        if rate == 8000
        else conform(x, rate, rules)
    )


def without_status(x, rate, rules):
    return conform(x, rate, rules)[0], "ok"


@pytest.mark.slow
@each(
    "wrong",
    [cut_in_front, pad_in_front, second_channel, louder_mean, dropped_samples, without_status],
    ids=lambda f: f.__name__,
)
def test_a_wrong_rule_is_found_before_publishing(tmp_path, mixed, monkeypatch, wrong: Conform):
    assert lm.build(mixed, out=tmp_path / "right.h5", **QUIET).verified.checked == 5
    monkeypatch.setattr(
        loader,
        "conform",
        lambda x, rate, rules, **options: (
            conform(x, rate, rules) if len(x) == 2048 and x.shape[1] == 1 else wrong(x, rate, rules)
        ),
    )
    with pytest.raises(VerifyError):
        lm.build(mixed, out=tmp_path / "x.h5", **QUIET)
    assert not (tmp_path / "x.h5").exists()


@each(("rule", "name"), [("short", "short.wav"), ("long", "long.wav"), ("rate", "fast.wav")])
def test_a_row_that_should_have_been_rejected_is_found(tmp_path, mixed, monkeypatch, rule, name):
    spec = lm.MelSpec.preset("disjoint", duration_s=0.5, **{rule: "reject"})
    monkeypatch.setattr(loader, "conform", lambda x, rate, rules, **options: conform(x, rate, SPEC.rules))
    with pytest.raises(VerifyError, match=f"{name}.*is rejected"):
        lm.build(mixed, out=tmp_path / "x.h5", **QUIET | {"spec": spec})


@each("seed", range(40))
def test_builder_and_check_conform_recordings_equally(seed):
    "The builder's and the check's, on recordings and rules drawn at random: same status or code, same samples."
    rng = np.random.default_rng(seed)
    rate, n, channels = (
        int(rng.choice([292, 4096, 8000, 44_100, 48_000])),
        int(rng.integers(100, 60_000)),
        int(rng.choice([1, 1, 2, 3, 9, 64])),
    )
    x = rng.integers(-9000, 9000, (n, channels), dtype=np.int16)
    if seed % 5 == 0:
        x[:] = x[:, :1]
    if seed % 5 == 1:
        x[:, 1:] = -x[:, :1]
    samples = x if seed % 2 else (x / np.float32(32_768)).astype(np.float32)
    changes = {"channels": str(rng.choice(["mean", "first"])), "duration_s": 0.5}
    changes |= {k: "reject" for k in ("short", "long", "rate") if rng.random() < 0.1}
    spec = lm.MelSpec.preset("disjoint", **changes)

    def outcome(make) -> tuple[np.ndarray | None, str]:
        try:
            return make()
        except RecordingError as e:
            return None, e.reject_code

    (built, output), (ours, status) = (
        outcome(lambda: conform(samples, rate, spec.rules)),
        outcome(lambda: expected_row(Recording(samples, rate, "", ""), spec)),
    )
    assert output == status
    if built is not None and ours is not None:
        assert built.dtype == ours.dtype
        assert np.abs(built.astype(np.float64) - ours).max() <= (0 if built.dtype == np.int16 else 1e-6)
