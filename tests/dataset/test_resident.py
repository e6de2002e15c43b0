"Recordings that stay on a device: the rows of a build for one spec after another, memory asked for beforehand, and nothing kept afterwards."

import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import need
from fake_device import Use, counted, taken

import leakmel as lm
from leakmel.audio.synth import SPLIT_SIZES
from leakmel.core.errors import (
    DataError,
    EngineError,
    LeakmelError,
    MachineError,
    SpecError,
    UsageError,
    VerifyError,
)
from leakmel.dataset.resident import recompute
from leakmel.dataset.resident import resident
from leakmel.dataset.resident import upload
from leakmel.dataset.source.loader import BatchReader
from leakmel.dataset.resident.resident import ResidentAudio, ResidentMels, hold_on_device, time_resident
from fake_device import Faults, FakeDevice, FakeStream, FakeOutOfMemory

BASE = {"sample_rate": 4096, "duration_s": 1.0}
SHORT = {"sample_rate": 4096, "duration_s": 0.5}
SPECS: dict[str, dict[str, Any]] = {
    "disjoint": {},
    "overlap": {"preset": "overlap"},
    "uneven": {"n_fft": 256, "hop_length": 100, "long_hop": 700, "short_hop": 300, "n_mels": 24},
}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    yield from counted(monkeypatch, resident)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Mixed rates, encodings and faults in three splits."
    need(
        importlib.util.find_spec("soundfile"), "soundfile"
    )  # not imported above: the tests for a card are collected where it is missing
    from messy import write_messy

    root = tmp_path_factory.mktemp("resident") / "data"
    write_messy(root)
    return root


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Short recordings: eleven of 24 bits, one of 16, and eleven more of 24."
    root = tmp_path_factory.mktemp("wide") / "data"
    (root / "LEAK").mkdir(parents=True)
    for k in range(23):
        x = np.random.default_rng(k).normal(0, 2**28, 2048).astype("<i4").view(np.uint8).reshape(-1, 4)
        with wave.open(str(root / "LEAK" / f"{k:02}.wav"), "wb") as f:
            f.setparams((1, 2 if k == 11 else 3, 4096, 2048, "NONE", ""))
            f.writeframes(x[:, 2 if k == 11 else 1 :].tobytes())
    return root


def hold(
    root: Path, split: str | None = "training", device: str = "fake", **settings: Any
) -> ResidentAudio:
    return hold_on_device(root, split=split, device=device, progress="none", **{"spec": BASE} | settings)


def built(
    root: Path,
    out: Path,
    split: str | None,
    spec: dict[str, Any],
    engine: str = "torch",
    device: str = "fake",
) -> lm.BuildResult:
    pipeline = lm.PipelineConfig(
        device=device, monitor_interval_s=0.0, fsync=False, files_per_batch=8, read_workers=2
    )
    return lm.build(
        root,
        split=split,
        out=out,
        spec=BASE | spec,
        engine=engine,
        progress="none",
        fresh=True,
        pipeline=pipeline,
    )


def check_same(mels: ResidentMels, audio: ResidentAudio, result: lm.BuildResult) -> None:
    "Everything that a data set says of its rows, and of the files that are none."
    with lm.open_dataset(result.path) as ds:
        assert np.array_equal(mels.numpy().view(np.int16), ds.mels[:].view(np.int16))
        assert mels.numpy().dtype == np.float16
        assert mels.labels.tolist() == ds.labels.tolist()
        assert mels.paths == list(ds.files["path"])
        assert mels.class_names == ds.class_names
        assert mels.spec == ds.spec
    assert mels.engine == result.summary["engine"]
    assert audio.rejected.equals(result.rejected)
    assert (len(audio), len(audio.listing)) == (result.rows, result.found)


@pytest.fixture(scope="module")
def right(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    "The rows of a build, training split, disjoint."
    with lm.open_dataset(built(mixed, tmp_path_factory.mktemp("right") / "a.h5", "training", {}).path) as ds:
        return ds.mels[:]


def same(mels: ResidentMels, right: np.ndarray) -> bool:
    return np.array_equal(mels.numpy().view(np.int16), right.view(np.int16))


# ---- the same rows


def on_card(engine: str) -> Any:
    return pytest.param(engine, "cuda", marks=pytest.mark.gpu, id=f"{engine}-cuda")


on_each = pytest.mark.parametrize(
    ("engine", "device"), [("torch", "fake"), on_card("torch"), on_card("triton")]
)


def skip_without(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


@on_each
@pytest.mark.parametrize("split", [s.lower() for s in SPLIT_SIZES])
def test_rows_are_those_of_a_build(mixed: Path, tmp_path: Path, engine: str, device: str, split: str) -> None:
    "Of a tree with everything that goes wrong, for one spec after another."
    skip_without(device)
    with hold(mixed, split, device) as audio:
        assert audio.n_wide > 5
        for name, spec in SPECS.items():
            mels = audio.log_mel(spec, engine=engine, check=None)
            assert (mels.verified.ok, mels.verified.checked) == (True, len(audio))
            check_same(mels, audio, built(mixed, tmp_path / name, split, spec, engine, device))
            assert (mels.tensor.device.type, mels.tensor.dtype) == (
                "cuda" if device == "cuda" else "cpu",
                torch.float16,
            )


@on_each
def test_rows_of_made_recordings(demo: Path, wide: Path, tmp_path: Path, engine: str, device: str) -> None:
    "Ten seconds of 16 bits, and half a second of 24: what needs nothing but this package."
    skip_without(device)
    for root, split, own in (
        (demo, "validation", {"sample_rate": 4096, "duration_s": 10.0}),
        (wide, None, SHORT),
    ):
        with hold(root, split, device, spec=own) as audio:
            mels = audio.log_mel({"preset": "overlap"}, engine=engine)
            assert audio.n_wide == (22 if root == wide else 0)
            check_same(
                mels,
                audio,
                built(
                    root,
                    tmp_path / f"{root.parent.name}.h5",
                    split,
                    own | {"preset": "overlap"},
                    engine,
                    device,
                ),
            )


INTERPRETED = """
import sys, leakmel as lm, numpy as np
root, out = sys.argv[1:]
spec = {"duration_s": 0.5, "sample_rate": 4096, "n_mels": 16}
with lm.hold_on_device(root, device="fake", spec=spec, progress="none") as audio: mels = audio.log_mel({"n_mels": 16}, engine="auto")
lm.build(root, out=out, spec=spec, engine="triton", progress="none", pipeline=lm.PipelineConfig(device="fake"))
with lm.open_dataset(out) as ds: assert np.array_equal(mels.numpy().view(np.int16), ds.mels[:].view(np.int16))
print(mels.engine, len(mels))
"""


def test_triton_in_its_interpreter(wide: Path, tmp_path: Path) -> None:
    need(importlib.util.find_spec("triton"), "triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, wide, tmp_path / "a.h5"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("triton@")
    assert done.stdout.endswith("/rehearsal 23\n")


@pytest.mark.parametrize("n_block", [1, 7, 4096])
def test_blocks_pages_slots_and_delays_change_no_bit(
    mixed: Path, right: np.ndarray, devices: Use, monkeypatch: pytest.MonkeyPatch, n_block: int
) -> None:
    monkeypatch.setattr(upload, "SLOT_BYTES", 5 * 8192)
    monkeypatch.setattr(recompute, "MOST_RECORDINGS", n_block)
    for module in (upload, recompute):
        monkeypatch.setattr(module, "PAGE_ROWS", 3)
    devices(Faults(delay_s=0.003, seed=n_block))
    with hold(mixed, read_workers=5) as audio:
        assert same(audio.log_mel(), right)


def test_a_split_of_more_than_16_bits(
    wide: Path, tmp_path: Path, devices: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Blocks in which all recordings are float32 are passed over; those of several pages find their places."
    launches: list[int] = []
    real = FakeStream.do

    def do(self: FakeStream, fn: Callable[[], object]) -> None:
        launches.append(1)
        real(self, fn)

    monkeypatch.setattr(FakeStream, "do", do)
    monkeypatch.setattr(recompute, "MOST_RECORDINGS", 4)
    for module in (upload, recompute):
        monkeypatch.setattr(module, "PAGE_ROWS", 8)
    devices(Faults())
    with hold(wide, None, spec=SHORT) as audio:
        assert (audio.n_wide, audio.n_bytes) == (22, 23 * 2 * 2048 + 3 * 8 * 4 * 2048)
        launches.clear()
        mels = audio.log_mel(check=None)
        assert len(launches) == 2 + 1 + 6 + 1, (
            "the self-checks, the block of the only one of 16 bits, pages in fours, sums"
        )
        check_same(mels, audio, built(wide, tmp_path / "a.h5", None, SHORT))


def test_samples_are_computed_from_where_they_lie(
    mixed: Path, devices: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    "No copy of a sample: what a chain is given lies in what is held, and nothing but features is new."
    (device,) = devices(Faults())
    seen: list[tuple[int, int]] = []
    from leakmel.mel.torch_engine import TorchChain

    real = TorchChain.features

    def features(self: TorchChain, x: torch.Tensor, mels: torch.Tensor, moments: torch.Tensor | None) -> None:
        seen.append((x.data_ptr(), x.data_ptr() + x.nbytes))
        assert moments is None
        real(self, x, mels, moments)

    monkeypatch.setattr(TorchChain, "features", features)
    with hold(mixed) as audio:
        audio.log_mel()
        held = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (audio._rows.samples, *audio._rows.pages)]
        before = device.counts["device_bytes"]
        seen.clear()
        mels = audio.log_mel()
        assert len(seen) == 1 + len(audio._rows.pages)
        assert all(any(a <= first and last <= b for a, b in held) for first, last in seen)
        assert device.counts["device_bytes"] - before == mels.tensor.nbytes
        del mels


def test_the_spec_follows_the_data_and_the_first_device_is_taken(
    demo: Path, devices: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Others are given back at once; so is the pinned memory that was read into."
    first, second = devices(Faults(), Faults())
    closed: list[FakeDevice] = []
    real = FakeDevice.close

    def close(self: FakeDevice) -> None:
        closed.append(self)
        real(self)

    monkeypatch.setattr(FakeDevice, "close", close)
    with hold(demo, "validation", spec=None, manifest=lm.scan(demo)) as audio:
        assert closed == [second]
        assert (first.counts["copies"] > 0, first.counts["pinned_bytes"]) == (True, 0)
        mels = audio.log_mel({"preset": "overlap"})
        assert (audio.spec.sample_rate, mels.spec.duration_s, mels.spec.n_mels) == (4096, 10.0, 32)
        assert mels.engine.startswith("torch@"), "auto: triton does not compute here"
    assert first.counts["launches"] > 0
    assert second.counts["operations"] == 0


@contextmanager
def error_saying(word: str) -> Iterator[list[str]]:
    "Let an error of leakmel end the body, if it says what it has to; gives what was said."
    said: list[str] = []
    try:
        yield said
    except LeakmelError as e:
        said.append(str(e))
    assert all(word in text for text in said), said


# ---- what does not fit


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"duration_s": 2.0}, "n_samples 8192"),
        ({"sample_rate": 8192, "duration_s": 0.5}, "sample_rate 8192"),
        ({"channels": "first"}, "channels first"),
        ({"short": "reject"}, "short reject"),
        ({"long": "reject"}, "long reject"),
        ({"rate": "reject"}, "rate reject"),
    ],
)
def test_a_spec_that_does_not_fit_what_is_held(
    mixed: Path, right: np.ndarray, devices: Use, change: dict[str, Any], word: str
) -> None:
    devices(Faults())
    with hold(mixed) as audio:
        for spec in (lm.MelSpec(**{"duration_s": 1.0} | change), change):
            with pytest.raises(SpecError, match=f"found [^;]*{word}.*Give the mel settings only"):
                audio.log_mel(spec)
        assert same(audio.log_mel(lm.MelSpec(duration_s=1.0)), right)


def test_what_cannot_be_asked_for(demo: Path, devices: Use) -> None:
    devices(Faults())
    for settings, word in (
        ({"device": "cpu"}, "leakmel.preload"),
        ({"split": None}, "Name one"),
        ({"read_workers": 0}, "from 1"),
        ({"manifest": lm.scan(demo, split="testing")}, "one split"),
        ({"spec": 3}, "spec must be"),
    ):
        with pytest.raises(UsageError, match=word):
            hold(demo, **settings)
    with pytest.raises(UsageError, match="another folder"):
        hold(demo.parent, manifest=lm.scan(demo))
    with hold(demo, spec=None) as audio:
        for settings, word in (
            ({"engine": "reference"}, "auto or triton, torch"),
            ({"check": -1}, "0 or more"),
            ({"spec": 3}, "spec must be"),
        ):
            with pytest.raises(UsageError, match=word):
                audio.log_mel(**settings)
        with pytest.raises(SpecError, match="unknown setting"):
            audio.log_mel({"bands": 3})
        with pytest.raises(UsageError, match="rounds"):
            time_resident(audio, None, 0)
        with pytest.raises(EngineError, match="interpreter"):
            audio.log_mel(engine="triton")
    with pytest.raises(UsageError, match="given back"):
        audio.log_mel()
    assert "given back" in repr(audio)


def test_no_cuda_device_is_answered_with_what_to_do(demo: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(EngineError, match="leakmel.preload"):
        hold(demo, device="cuda")


def test_recordings_that_differ_or_are_all_rejected(faulty: Path, wide: Path, devices: Use) -> None:
    devices(Faults())
    with pytest.raises(DataError, match="differ in rate or length"):
        hold(faulty, spec=None)
    devices(Faults())
    with pytest.raises(DataError, match="all recordings were rejected.*23 rejected"):
        hold(wide, None, spec=BASE | {"short": "reject"})


# ---- memory


def test_memory_is_asked_for_before_anything_is_read(
    mixed: Path, devices: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchReader, "fill", lambda *_: pytest.fail("it was read"))
    samples_bytes = 2 * 4096 * len(lm.scan(mixed, split="training"))
    for limit_bytes in (500_000, samples_bytes + 50_000):  # for samples, but not for features
        (device,) = devices(Faults(limit_bytes=limit_bytes))
        with pytest.raises(
            MachineError, match=r"recordings and their features do not fit.*MB needed, .*B free.*Free memory"
        ):
            hold(mixed)
        assert device.counts["allocations"] == 0


def test_features_that_do_not_fit_and_chains_that_make_room(
    mixed: Path, right: np.ndarray, devices: Use
) -> None:
    (device,) = devices(Faults())
    with hold(mixed) as audio:
        assert same(audio.log_mel({"n_mels": 16}), right) is False
        gc.collect()
        n_rows = len(audio) + min(audio.n_wide, upload.PAGE_ROWS)
        need_bytes, with_chain = (
            recompute.feature_bytes(audio.log_mel().spec, n_rows),
            device.counts["device_bytes"],
        )
        device.faults = Faults(limit_bytes=with_chain + need_bytes - 1_000)
        assert same(audio.log_mel({"preset": "disjoint"}), right), "chains were given up"
        device.faults = Faults(limit_bytes=audio.n_bytes + need_bytes // 2)
        with pytest.raises(
            MachineError, match=r"the features of [\d,]+ recordings do not fit.*needed.*Let go of features"
        ):
            audio.log_mel()
        device.faults = Faults()
        assert same(audio.log_mel(), right), "and nothing is broken"


def test_each_allocation_may_fail(wide: Path, devices: Use, caplog: pytest.LogCaptureFixture) -> None:
    "Right features or an error that says so, and right features the next time."
    (device,) = devices(Faults())
    with hold(wide, None, spec=SHORT) as audio:
        n_hold = device.counts["allocations"]
        right = audio.log_mel().numpy()
    n = device.counts["allocations"]
    assert n > n_hold + 10
    smaller = 0
    for k in range(n):
        (device,) = devices(Faults(fail_alloc=k))
        if k < n_hold:
            with pytest.raises(MachineError, match="memory of fake:0"):
                hold(wide, None, spec=SHORT)
        else:
            with hold(wide, None, spec=SHORT) as audio:
                with error_saying("do not fit") as refused:
                    first = audio.log_mel()
                assert refused or same(first, right)
                smaller += audio._rack.n_block < recompute.MOST_RECORDINGS
                assert same(audio.log_mel(), right)
    assert smaller > 10
    assert "going on with blocks of 2048 recordings" in caplog.text


def test_memory_that_runs_out_between_launches(
    mixed: Path, right: np.ndarray, devices: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    "As on a card, where a launch itself can ask for memory."
    devices(Faults())
    monkeypatch.setattr(recompute, "MOST_RECORDINGS", 16)
    real, calls = FakeStream.do, itertools.count()

    def do(self: FakeStream, fn: Callable[[], object]) -> None:
        if next(calls) in (4, 5, 9, 10):
            raise FakeOutOfMemory("out of memory")
        real(self, fn)

    with hold(mixed) as audio:
        monkeypatch.setattr(FakeStream, "do", do)
        assert same(audio.log_mel(), right)
        assert audio._rack.n_block < 16
        monkeypatch.setattr(
            FakeStream,
            "do",
            lambda self, fn: (
                do(self, fn) if next(calls) < 0 else (_ for _ in ()).throw(FakeOutOfMemory("full"))
            ),
        )
        with pytest.raises(LeakmelError, match="ran out"):
            audio.log_mel()


def test_chains_are_made_once_for_a_spec_and_a_few_are_kept(
    wide: Path, devices: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    (device,) = devices(Faults())
    made: list[int] = []
    real = recompute.CHAINS["torch"]

    def chain(spec: lm.MelSpec, *rest: Any) -> Any:
        made.append(spec.n_mels)
        time.sleep(0.1)
        return real(spec, *rest)

    monkeypatch.setitem(recompute.CHAINS, "torch", chain)
    monkeypatch.setattr(recompute, "MOST_CHAINS", 3)
    most = 0
    with hold(wide, None, spec=SHORT) as audio:
        for n_mels in (8, 16, 24, 8, 16, 24, 32, 16, 8, 24, 32, 8):
            n_made = len(made)
            mels = audio.log_mel({"n_mels": n_mels}, check=0)
            if len(made) > n_made:
                assert mels.prepare_s > 0.1
            else:
                assert (
                    min(
                        mels.prepare_s,
                        *(audio.log_mel({"n_mels": n_mels}, check=0).prepare_s for _ in range(2)),
                    )
                    <= 0.1
                )  # in one of three tries
            del mels
            if made == [8, 16, 24]:
                most = device.counts["device_bytes"]
        assert made == [8, 16, 24, 32, 8, 24, 32]
        assert device.counts["device_bytes"] < 1.2 * most, "those that were given up are gone, at once"


# ---- when it fails


@pytest.mark.parametrize("kind", ["fail_call", "fail_work"])
def test_a_device_that_fails_is_said_and_keeps_nothing(wide: Path, devices: Use, kind: str) -> None:
    "At each operation, from the first copy to the last sum."
    right, failed = None, 0
    for k in (10_000, *range(0, 60, 3)):
        (device,) = devices(Faults(**{kind: k, "delay_s": 0.001}))
        with error_saying("fake:0") as said, hold(wide, None, spec=SHORT) as audio:
            mels, n = audio.log_mel().numpy(), device.counts["operations"]
        failed += len(said)
        if said:
            continue
        assert n <= k, "all of it was before the fault"
        if right is None:
            right = mels
        assert np.array_equal(mels, right)
    assert failed > 10


def test_a_machine_that_fails_while_reading(
    demo: Path, devices: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(Faults(delay_s=0.002))
    monkeypatch.setattr(upload, "SLOT_BYTES", 3 * 8192)
    real, calls = BatchReader.fill, itertools.count()

    def fill(self: BatchReader, slot: Any) -> int:
        if next(calls) == 4:
            raise MachineError("too many open files")
        return real(self, slot)

    monkeypatch.setattr(BatchReader, "fill", fill)
    with pytest.raises(MachineError, match="too many open files"):
        hold(demo)


def test_ctrl_c_while_recordings_are_read(demo: Path, devices: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(Faults(delay_s=0.01))
    monkeypatch.setattr(upload, "SLOT_BYTES", 3 * 8192)
    begun, real_wait, real = threading.Event(), threading.Event.wait, BatchReader.fill

    def fill(self: BatchReader, slot: Any) -> int:
        begun.set()
        return real(self, slot)

    def wait(self: threading.Event, timeout: float | None = None) -> bool:
        if timeout == 0.2 and real_wait(begun, 60):
            raise KeyboardInterrupt
        return real_wait(self, timeout)

    monkeypatch.setattr(BatchReader, "fill", fill)
    monkeypatch.setattr(threading.Event, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        hold(demo)


def test_ctrl_c_while_features_are_computed(
    mixed: Path, right: np.ndarray, devices: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    "What was launched is through before its memory is given back; the next call is right."
    devices(Faults(delay_s=0.01))
    monkeypatch.setattr(recompute, "MOST_RECORDINGS", 16)
    real, calls = recompute._Work.launch, itertools.count()

    def launch(self: Any, ready: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        real(self, ready)

    with hold(mixed) as audio:
        monkeypatch.setattr(recompute._Work, "launch", launch)
        with pytest.raises(KeyboardInterrupt):
            audio.log_mel()
        assert audio._rack.stream._queue.empty(), "the stream is idle"
        assert same(audio.log_mel(), right)


class Chain:
    "A chain with something wrong."

    def __init__(self, chain: Any, spoil: Callable[[torch.Tensor, int], None]):
        self.chain, self.granule, self.spoil, self.calls = chain, chain.granule, spoil, 0

    def features(self, x: torch.Tensor, mels: torch.Tensor, moments: torch.Tensor | None) -> None:
        self.chain.features(x, mels, moments)
        self.spoil(mels, self.calls)
        self.calls += 1


def nudge(mels: torch.Tensor, call: int) -> None:
    mels.add_(1.0)


def nudge_later(mels: torch.Tensor, call: int) -> None:
    mels[..., 0, 0].add_(1.0 if call > 1 else 0.0)


def one_nan(mels: torch.Tensor, call: int) -> None:
    mels[len(mels) // 2, 0, 0, 1, 0] = torch.nan if call > 1 else mels[len(mels) // 2, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("spoil", "error", "word"),
    [
        (nudge, EngineError, "does not reproduce the reference on fake:0"),
        (nudge_later, VerifyError, "differs from the reference"),
        (one_nan, EngineError, "values that are no numbers"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_wrong_features_are_not_given_out(
    mixed: Path, devices: Use, monkeypatch: pytest.MonkeyPatch, spoil: Any, error: type, word: str
) -> None:
    devices(Faults())
    real = recompute.CHAINS["torch"]

    def chain(*a: Any) -> Any:
        made, identity = real(*a)
        return Chain(made, spoil), identity

    monkeypatch.setitem(recompute.CHAINS, "torch", chain)
    with hold(mixed) as audio, pytest.raises(error, match=word):
        audio.log_mel(check=64 if error is VerifyError else 0)


def test_samples_that_changed_on_the_device_are_found(mixed: Path, devices: Use) -> None:
    "Also those of recordings of more than 16 bits."
    devices(Faults())
    with hold(mixed) as audio:
        for tensor in (audio._rows.samples[0], audio._rows.pages[0][0]):
            tensor[0] += 1
            with pytest.raises(VerifyError, match="not those that were read"):
                audio.log_mel()
            tensor[0] -= 1
        audio.log_mel(check=None)


def test_auto_passes_over_an_engine_that_is_wrong(
    mixed: Path,
    right: np.ndarray,
    devices: Use,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices(Faults())

    def wrong(*a: Any) -> Any:
        chain, _ = recompute.CHAINS["torch"](*a)
        return Chain(chain, nudge), "triton@0/fake"

    monkeypatch.setitem(recompute.CHAINS, "triton", wrong)
    with hold(mixed) as audio:
        assert same(audio.log_mel(), right)
    assert "engine triton passed over" in caplog.text


# ---- times, and what is shown


def test_times_are_honest(demo: Path, devices: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    "A chain that takes 30 ms a block: the device's clock says so, and the wait holds it and what came before."
    devices(Faults())
    monkeypatch.setattr(recompute, "MOST_RECORDINGS", 4)
    real = recompute.CHAINS["torch"]

    def chain(*a: Any) -> Any:
        time.sleep(0.1)
        made, identity = real(*a)
        return Chain(made, lambda mels, call: time.sleep(0.03)), identity

    monkeypatch.setitem(recompute.CHAINS, "torch", chain)
    with hold(demo, "validation", spec={"duration_s": 2.0, "sample_rate": 4096}) as audio:
        n_blocks = -(-len(audio) // 4)
        began = time.perf_counter()
        mels = audio.log_mel()
        waited = time.perf_counter() - began
        assert mels.prepare_s > 0.13
        assert 0.03 * n_blocks <= mels.kernel_s < mels.seconds - mels.prepare_s
        assert waited >= mels.seconds + mels.verify_s
        again = audio.log_mel(check=0)
        assert min(again.prepare_s, *(audio.log_mel(check=0).prepare_s for _ in range(2))) < 0.03, (
            "in one of three tries"
        )
        assert (again.verified.checked, mels.verified.checked) == (0, len(audio))
        assert mels.files_per_s == len(audio) / mels.seconds
        assert f"{len(audio):,} rows of (20" not in repr(mels)
        assert repr(mels).startswith(f"ResidentMels({len(audio)} rows of {mels.spec.row_shape} by torch@")
        assert "recomputed in float64" in repr(mels)
        assert repr(audio).startswith(f"ResidentAudio(VALIDATION: {len(audio)} of {len(audio)} recordings, ")
        assert audio.files_per_s == len(audio) / audio.seconds
        assert {s.stage for s in audio.timeline.spans} - {"decode", "resample"} == {"read", "copy_in"}
        assert sum(s.n_files for s in audio.timeline.spans if s.stage == "copy_in") == len(audio)


def test_features_outlive_the_recordings(demo: Path, devices: Use) -> None:
    (device,) = devices(Faults())
    with hold(demo, "validation", spec=None) as audio:
        mels = audio.log_mel()
    audio.close()  # a second time does nothing
    copy = mels.numpy()
    assert device.counts["device_bytes"] == mels.tensor.nbytes == copy.nbytes
    mels.tensor.zero_()
    assert copy.any()
    del mels


def test_time_resident_gives_figures_for_json(demo: Path, devices: Use) -> None:
    devices(Faults())
    with hold(demo, spec=None) as audio:
        facts = json.loads(json.dumps(time_resident(audio, {"preset": "overlap"}, 3)))
        gc.collect()
        assert facts["features_bytes"] == len(audio) * 2 * int(np.prod(facts["row_shape"]))
    assert (facts["rounds"], len(facts["seconds"]), len(facts["kernel_s"]), facts["device"]) == (
        3,
        3,
        3,
        "fake:0",
    )
    assert all(0 < k <= s for s, k in zip(facts["seconds"], facts["kernel_s"]))
    assert facts["files_per_s"] == facts["n_files"] / sorted(facts["seconds"])[1]
    assert facts["kernel_files_per_s"] >= facts["files_per_s"]
    assert facts["checked"] == facts["n_files"] if facts["n_files"] < 64 else 64
    assert 0 < facts["prepare_s"] < facts["first_s"]


# ---- on a card


@pytest.mark.gpu
def test_a_card_keeps_nothing(mixed: Path) -> None:
    skip_without("cuda")
    hold(mixed, device="cuda").close()
    before = taken()
    with hold(mixed, device="cuda") as audio:
        for spec in SPECS.values():
            audio.log_mel(spec)
        facts = time_resident(audio, None, 3)
        assert all(0 < k <= s for s, k in zip(facts["seconds"], facts["kernel_s"]))
        free = audio.device.free_bytes()
        with pytest.raises(MachineError, match="do not fit"):
            recompute.compute(audio._rack, _Many(audio, free), audio.spec, "torch")  # type: ignore[arg-type]
    assert taken() == before


class _Many:
    "Recordings without end."

    def __init__(self, audio: ResidentAudio, free_bytes: int):
        self.n, self.wide, self.pages, self.samples = (
            free_bytes,
            list[int](),
            list[torch.Tensor](),
            audio._rows.samples,
        )
