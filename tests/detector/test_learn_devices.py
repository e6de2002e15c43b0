"Devices by name; float32 precision; out of memory at any operation while recordings are scored."

import functools
import logging
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import Server, server
from each import each
from errors import raises
from fake_device import FakeDevice, FakeOutOfMemory, Faults
from torch.utils._python_dispatch import TorchDispatchMode

import leakmel as lm
from leakmel.core.errors import EngineError, MachineError, UsageError
from leakmel.detector.data.segments import Batch, Segments, make_task
from leakmel.detector.evaluate.evaluation import evaluate
from leakmel.detector.model import detector as detector_module
from leakmel.detector.model.detector import Detector, class_scores, score_rows
from leakmel.detector.model.files import AdaptiveBatches, pick_device
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.model.settings import TrainSettings
from leakmel.detector.predict import scoring
from leakmel.detector.train.step import Stepper
from leakmel.mel.torch_engine import full_float32_precision
from leakmel.recordings.demo import write_wav

pytestmark = pytest.mark.usefixtures("one_thread")
RATE = 4096
QUIET: dict[str, Any] = {"progress": "none", "device": "cpu", "engine": "torch"}


def full() -> Exception:
    return torch.OutOfMemoryError("out of memory: 2 GB asked for")


# ---- by name


def test_devices_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device(name) for name in ("auto", "cpu", "cuda", "cuda:1")] == [
        "cuda:0",
        "cpu",
        "cuda:0",
        "cuda:1",
    ]
    assert [pick_device(name, registered=True) for name in ("fake", "fake:3")] == ["fake:0", "fake:3"]
    with raises("no-device", UsageError, found="'cuda:2', 2 GPUs"):
        pick_device("cuda:2")
    for name in ("", "gpu", "cuda:", "cuda:-1", "fake", "cpu:0", "CPU"):
        with raises("unknown-device", UsageError):
            pick_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device() == "cpu"
    with raises("no-device", UsageError, says="0 GPUs"):
        pick_device("cuda", registered=True)


# ---- float32

BACKENDS: Any = torch.backends
SWITCHES = (
    BACKENDS.cudnn.conv,
    BACKENDS.cudnn.rnn,
    BACKENDS.cuda.matmul,
    BACKENDS.mkldnn.conv,
    BACKENDS.mkldnn.matmul,
)


def switches() -> list[Any]:
    "All that decides how exactly torch computes in float32."
    return [s.fp32_precision for s in SWITCHES]


EXACT = ["ieee"] * 5


@pytest.fixture
def own_switches() -> Iterator[None]:
    "Switches of the process that a test may turn."
    before, precision = switches(), torch.get_float32_matmul_precision()
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul
    for s, value in zip(SWITCHES, before, strict=True):
        s.fp32_precision = value
    assert switches() == before


def as_usual() -> None:
    pass


def matrices_rounded() -> None:
    torch.set_float32_matmul_precision("medium")


def nothing_rounded() -> None:
    torch.backends.cudnn.allow_tf32 = False


def only_convolutions() -> None:
    # now the older switch contradicts, and torch will not read it
    BACKENDS.cudnn.conv.fp32_precision = "ieee"


def all_rounded() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


@pytest.mark.parametrize(
    "turn", [as_usual, matrices_rounded, nothing_rounded, only_convolutions, all_rounded]
)
def test_float32_precision_is_enforced_and_restored(own_switches, turn):
    turn()
    before = switches()
    with full_float32_precision():
        assert switches() == EXACT
        with full_float32_precision():
            assert switches() == EXACT
        assert switches() == EXACT
        torch.nn.functional.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3))
    assert switches() == before
    with pytest.raises(KeyError), full_float32_precision():
        raise KeyError("x")
    assert switches() == before


ALLOWED = """
import warnings
import torch
ALLOW
from leakmel.detector.data.segments import Batch, make_task
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.model.settings import TrainSettings
from leakmel.detector.train.step import Stepper
from leakmel.mel.engines import open_engine
from leakmel.mel.spec import MelSpec
from leakmel.mel.torch_engine import float32_precisions, full_float32_precision
warnings.simplefilter("error")
before = float32_precisions()
assert before[2] == "tf32", before
net = LeakNet(NetSettings(channels=(8, 8)))
task, settings = make_task(["LEAK", "NORMAL"]), TrainSettings(batch_size=4, channels=(8, 8))
stepper = Stepper(net, task, settings, "cpu", [2, 2], 3)
stepper.step(Batch(torch.randn(4, 2, 64, 1).half(), torch.tensor([0, 1, 0, 1]), torch.arange(4)))
open_engine("torch", MelSpec(duration_s=0.5), device="cpu").close()
with full_float32_precision():
    assert set(float32_precisions()) == {"ieee"}, float32_precisions()
assert float32_precisions() == before
"""


@pytest.fixture(scope="module")
def children() -> Iterator[Server]:
    "Processes that have imported torch, and nothing of leakmel that uses it."
    with server("import torch\ntorch.set_num_threads(1)\n") as s:
        yield s


@pytest.mark.slow
@each(
    "allow",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
    ],
)
def test_a_process_that_allows_tf32_can_train_and_compute(children: Server, allow: str) -> None:
    "By the older or the newer switches: torch raises an error where older ones are read after newer ones were set."
    done = children.run(code=ALLOWED.replace("ALLOW", allow))
    assert done.status == 0, done.err[-2000:]


@pytest.mark.parametrize(
    "advice",
    [
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.",
        "Please use the new API settings to control TF32 behavior, such as torch.backends.cudnn.conv.fp32_precision",
    ],
)
def test_advice_of_torch_on_tf32_fails_no_test(advice: str) -> None:
    "Torch gives it on each card that has TF32; every other warning is an error."
    warnings.warn(advice, UserWarning, stacklevel=1)
    with pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", UserWarning, stacklevel=1)


def test_concurrent_threads_restore_the_precision_settings(own_switches):
    "The first to come is the first to go, while the second one still computes."
    before, entered, left = switches(), threading.Event(), threading.Event()

    def first() -> None:
        with full_float32_precision():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(60)
    with full_float32_precision():
        left.set()
        thread.join()
        assert switches() == EXACT
    assert switches() == before


class Watching(LeakNet):
    "Notes how exactly it computes, forward and backward."

    seen: list[list[str]]

    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "seen"):
            self.seen = []
        self.seen.append(switches())
        found = super().forward(x)
        if found[0].requires_grad:
            found[0].register_hook(lambda g: self.seen.append(switches()))
        return found


def seen_by(detector: Detector) -> list[list[str]]:
    assert isinstance(detector.classifier, Watching)
    return detector.classifier.seen


def made_detector(kind: type[LeakNet] = LeakNet, spec: lm.MelSpec | None = None) -> Detector:
    "A net that was never trained, with scores all over the range."
    torch.manual_seed(0)
    net = kind(NetSettings(channels=(8, 8)), np.full(64, -30.0), np.full(64, 3.0))
    with torch.no_grad():
        net.classes.weight.mul_(20)
    return Detector(
        net.eval(), make_task(["LEAK", "NORMAL"]), spec or lm.MelSpec.preset("disjoint", duration_s=1.0)
    )


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_step_computes_in_float32(own_switches, amp):
    matrices_rounded()
    before, detector = switches(), made_detector(Watching)
    settings = TrainSettings(batch_size=4, channels=(8, 8), amp=amp)
    assert isinstance(detector.classifier, LeakNet)
    stepper = Stepper(detector.classifier, detector.task, settings, "cpu", [2, 2], 3)
    stepper.step(Batch(torch.randn(4, 2, 64, 1).half(), torch.tensor([0, 1, 0, 1]), torch.arange(4)))
    assert seen_by(detector) == [EXACT, EXACT]
    assert switches() == before


@pytest.mark.slow
def test_scores_are_of_float32(own_switches, network, wavs):
    matrices_rounded()
    before = switches()
    with Segments(network, level="recording") as ds:
        for work in (score_rows, class_scores):
            detector = made_detector(Watching, ds.sources[0].spec)
            work(detector, ds)
            assert set(map(tuple, seen_by(detector))) == {tuple(EXACT)}
    for device in ("cpu", "fake"):
        detector = made_detector(Watching)
        lm.predict(wavs, detector, **QUIET | {"device": device})
        assert set(map(tuple, seen_by(detector))) == {tuple(EXACT)}
    assert switches() == before


# ---- portions


def test_portions_are_halved_with_one_warning(caplog):
    caplog.set_level(logging.WARNING)
    trimmed, tried = [], []

    def work(part: slice) -> list[int]:
        tried.append(part.stop - part.start)
        if len(tried) > 2 and tried[-1] > 5:
            raise full()
        return list(range(100)[part])

    portions = AdaptiveBatches(32, lambda: trimmed.append(len(tried)))
    assert functools.reduce(operator.iadd, portions.each(50, work), []) == list(range(50))
    assert portions.each(0, work) == []
    portions.each(9, work)
    assert tried == [32, 18, 9, 4, 4, 1]
    assert [r.getMessage() for r in caplog.records] == [
        "memory ran out: continuing with 4 recordings at once"
    ]
    assert (portions.n_ran_out, portions.most, trimmed) == (1, 4, [3])


@each(("n", "most", "fits"), [(1, 1, 1), (64, 64, 1), (65, 64, 63), (7, 64, 3), (10, 3, 2), (33, 32, 32)])
def test_portions_cover_all_rows(n, most, fits, caplog):
    caplog.set_level(logging.WARNING)
    tried = []

    def work(part: slice) -> np.ndarray:
        tried.append(part.stop - part.start)
        if tried[-1] > fits:
            raise MemoryError
        return np.arange(n)[part]

    portions = AdaptiveBatches(most)
    assert np.concatenate(portions.each(n, work)).tolist() == list(range(n))
    assert portions.n_ran_out == sum(k > fits for k in tried) == len(tried) - sum(k <= fits for k in tried)
    assert len(caplog.records) == portions.n_ran_out


def test_failed_allocation_is_released_before_a_retry():
    held: list[weakref.ref] = []

    def work(part: slice) -> int:
        assert all(ref() is None for ref in held)
        made = torch.zeros(4)
        held.append(weakref.ref(made))
        if part.stop - part.start > 1:
            raise full()
        return 1

    assert AdaptiveBatches(8).each(2, work) == [1, 1]
    assert len(held) == 3


def test_single_row_out_of_memory_and_other_errors_are_raised():
    def too_much(_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory: 2 GB\nand much more")

    def broken(_: Any) -> None:
        raise RuntimeError("an illegal address")

    with pytest.raises(
        MachineError, match=r"too small for a single recording; found out of memory: 2 GB. Free some"
    ):
        AdaptiveBatches(8).each(3, too_much)
    with raises("out-of-memory", MachineError):
        AdaptiveBatches(8).fit(too_much)
    for work in (AdaptiveBatches(8).fit, lambda w: AdaptiveBatches(8).each(3, w)):
        with pytest.raises(RuntimeError, match="illegal"):
            work(broken)

    def five(n: int) -> int:
        if n > 5:
            raise full()
        return n

    assert AdaptiveBatches(64).fit(five) == 4


# ---- rows of data sets


@pytest.fixture(scope="module")
def network(small_sets: Path) -> Path:
    return small_sets / "TRAINING_DATASET.H5"


class LimitedRoom:
    "A net with room for so many items at once; notes how many it was given."

    def __init__(self, detector: Detector, items: int, error: Callable[[], Exception] = full):
        self.given, self.most, real = list[int](), items, detector.classifier.forward

        def forward(x: torch.Tensor) -> Any:
            self.given.append(len(x))
            if len(x) > self.most:
                raise error()
            return real(x)

        detector.classifier.forward = forward  # type: ignore[method-assign]


@pytest.mark.slow
@each("judge", [score_rows, class_scores])
@each("rows_that_fit", [1, 3, 7])
def test_rows_that_do_not_fit_at_once_are_scored_in_portions(
    network, caplog, judge, rows_that_fit, monkeypatch
):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(
        detector_module, "_MAX_ITEMS_ON_CPU", 640
    )  # a batch of eight recordings is one portion
    with Segments(network, level="recording") as ds:
        n_long, detector = ds.row_shape[0], made_detector(spec=ds.sources[0].spec)
        right, tight = (
            judge(detector, ds, files_per_batch=8),
            LimitedRoom(detector, rows_that_fit * ds.row_shape[0]),
        )
        told: list[int] = []
        found = judge(detector, ds, files_per_batch=8, progress=told.append)
        most = {1: 1, 3: 2, 7: 4}[rows_that_fit]
        assert np.array_equal(found, judge(made_detector(spec=detector.spec), ds, files_per_batch=most)), (
            "as if as few had been asked for"
        )
        assert np.allclose(found, right, atol=1e-6)
    assert max(tight.given[tight.given.index(most * n_long) :]) == most * n_long, "and stays so"
    assert told == [*range(8, len(found), 8), len(found)]
    assert caplog.records[-1].getMessage() == f"memory ran out: continuing with {most} recordings at once"


@pytest.mark.parametrize("judge", [score_rows, class_scores])
def test_a_recording_that_does_not_fit_alone(network, judge):
    with Segments(network, level="recording") as ds:
        detector = made_detector(spec=ds.sources[0].spec)
        LimitedRoom(detector, ds.row_shape[0] - 1)
        with raises("out-of-memory", MachineError, says="device='cpu'"):
            judge(detector, ds)
        LimitedRoom(detector, 0, lambda: RuntimeError("an illegal address"))
        with pytest.raises(RuntimeError, match="illegal"):
            judge(detector, ds)

        def refuse(*args: Any) -> None:
            raise full()

        detector.classifier.to = refuse  # type: ignore[method-assign, assignment]
        with raises("out-of-memory", MachineError):
            judge(detector, ds)


class RunsOut(TorchDispatchMode):
    "One operation of torch finds no memory."

    def __init__(self, at: int):
        super().__init__()
        self.at, self.n = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        if self.n == self.at:
            raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_memory_may_run_out_at_any_operation(network):
    "Bit for bit the scores are those of either number of recordings at once."
    with Segments(network, level="recording", rows=np.arange(10)) as ds:
        detector = made_detector(spec=ds.sources[0].spec)
        right = [score_rows(detector, ds, files_per_batch=n) for n in (4, 2)]
        with RunsOut(0) as counted:
            score_rows(detector, ds, files_per_batch=4)
        assert counted.n > 50
        unread = list[str]()
        for k in range(1, counted.n + 1):
            try:
                with RunsOut(k):
                    found = score_rows(detector, ds, files_per_batch=4)
            except MachineError as e:
                unread.append(str(e))
                continue
            assert np.array_equal(found, np.where(found == right[0], *right), equal_nan=True), (
                f"operation {k}"
            )
        assert all("memory is too small to read" in text for text in unread)
        assert len(unread) < counted.n / 4


def test_rows_that_cannot_be_read_for_want_of_memory(network, monkeypatch):
    def never(*args: Any, **options: Any) -> None:
        raise MemoryError("no room")

    with Segments(network, level="recording") as ds:
        monkeypatch.setattr(detector_module, "open_loader", never)
        with raises("out-of-memory", MachineError, says="files_per_batch"):
            score_rows(made_detector(spec=ds.sources[0].spec), ds)


def test_evaluation_continues_with_smaller_batches(network, caplog):
    caplog.set_level(logging.WARNING)
    with lm.open_dataset(network) as ds:
        spec, names = ds.spec, ds.class_names
    detector = made_detector(spec=spec)
    detector.task = make_task(names, kind="binary")
    right = evaluate(detector, network, n_draws=100, progress="none")
    LimitedRoom(detector, 40 * 3)
    found = evaluate(detector, network, n_draws=100, progress="none")
    assert found.table["score_mean"].tolist() == pytest.approx(right.table["score_mean"].tolist(), abs=1e-6)
    assert any("recordings at once" in r.getMessage() for r in caplog.records)
    LimitedRoom(detector, 1)
    with raises("out-of-memory", MachineError):
        evaluate(detector, network, n_draws=100, progress="none")


# ---- predictions


@pytest.fixture(scope="module")
def wavs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Recordings as long as the model's rows, longer ones, and some at another rate, whose samples are float32."
    folder, rng = tmp_path_factory.mktemp("wavs"), np.random.default_rng(0)
    for k in range(14):
        n, rate = ((RATE, RATE), (3 * RATE + 7, RATE), (16_000, 8000))[(k > 7) + (k > 10)]
        write_wav(
            folder / f"{k:02}.wav", rng.integers(-900 - 300 * k, 900 + 300 * k, n).astype(np.int16), rate
        )
    return folder


def scores_of(p: lm.Predictions) -> np.ndarray:
    return np.concatenate([s.segment_scores for s in p.scored])


class SmallDevice(FakeDevice):
    "A device with room for the samples of a few recordings only, as int16; of half as many as float32."

    rows = 1_000_000

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        "Device memory."
        is_samples = shape[1:] == (RATE,) and dtype in (torch.int16, torch.float32)
        if is_samples and shape[0] * dtype.itemsize > 2 * self.rows:
            raise FakeOutOfMemory("out of memory")
        return super().empty(shape, dtype)


def fake_devices(monkeypatch: pytest.MonkeyPatch, rows: int = 1_000_000, **faults: Any) -> list[FakeDevice]:
    "Devices that are opened for predictions from here on."
    opened: list[FakeDevice] = []

    def open_one(name: str) -> list[FakeDevice]:
        opened.append(device := SmallDevice(name, Faults(**faults)))
        device.rows = rows
        return [device]

    monkeypatch.setattr(scoring, "open_devices", open_one)
    return opened


@pytest.fixture(scope="module")
def right(wavs: Path) -> np.ndarray:
    return scores_of(lm.predict(wavs, made_detector(), **QUIET))


@each("device", ["cpu", "fake"])
@each("engine", ["torch", "reference"])
def test_prediction_continues_with_smaller_batches(wavs, right, caplog, device, engine):
    caplog.set_level(logging.WARNING)
    detector = made_detector()
    tight = LimitedRoom(detector, 4 * 3)
    found = scores_of(
        lm.predict(
            wavs, detector, files_per_batch=8, read_workers=1, **QUIET | {"device": device, "engine": engine}
        )
    )
    assert np.abs(found - right).max() < 1e-3
    assert max(tight.given) == 4 * 8
    assert caplog.records[-1].getMessage() == "memory ran out: continuing with 2 recordings at once"
    LimitedRoom(detector, 1)
    with pytest.raises(MachineError, match="too small for a single recording; found out of memory: 2 GB"):
        lm.predict(wavs, detector, files_per_batch=8, **QUIET | {"device": device, "engine": engine})


@each("rows", [15, 8, 5, 2])
def test_buffers_fit_the_free_memory(wavs, right, monkeypatch, rows):
    "Of float32 samples, which come later, a half as many rows fit; a block goes through its buffers in parts."
    opened = fake_devices(monkeypatch, rows, delay_s=0.001)
    found = scores_of(lm.predict(wavs, made_detector(), files_per_batch=8, **QUIET | {"device": "fake"}))
    assert np.abs(found - right).max() < 1e-4
    assert opened[0].free_bytes() == opened[0].faults.limit_bytes, "all memory was given back"


def test_device_without_memory_for_one_row(wavs, monkeypatch):
    fake_devices(monkeypatch, largest_bytes=1000)
    with pytest.raises(MachineError, match=r"a single recording; found out of memory.*device='cpu'"):
        lm.predict(wavs, made_detector(), **QUIET | {"device": "fake"})


@pytest.mark.slow
def test_allocation_that_fails_once_is_retried(wavs, right, monkeypatch):
    "Whichever it is; and what is no lack of memory is still a fault."
    opened = fake_devices(monkeypatch)
    lm.predict(wavs, made_detector(), files_per_batch=8, **QUIET | {"device": "fake"})
    n = opened[0].counts["allocations"]
    assert n > 8
    for k in range(n):
        fake_devices(monkeypatch, fail_alloc=k)
        found = scores_of(lm.predict(wavs, made_detector(), files_per_batch=8, **QUIET | {"device": "fake"}))
        assert np.abs(found - right).max() < 1e-4, k
    fake_devices(monkeypatch, fail_work=opened[0].counts["operations"] // 2)
    with pytest.raises(EngineError, match="failed"):
        lm.predict(wavs, made_detector(), files_per_batch=8, **QUIET | {"device": "fake"})


def test_engine_out_of_memory_launches_smaller_blocks(wavs, right, monkeypatch):
    "Memory that the engine asks for while it computes, as a GPU's libraries do."
    from leakmel.mel.torch_engine import TorchChain

    real, given = TorchChain.features, list[int]()

    def features(chain: TorchChain, samples: torch.Tensor, *rest: Any) -> None:
        given.append(len(samples))
        if len(samples) > 3:
            raise full()
        real(chain, samples, *rest)

    monkeypatch.setattr(TorchChain, "features", features)
    found = scores_of(
        lm.predict(wavs, made_detector(), files_per_batch=8, read_workers=1, **QUIET | {"device": "fake"})
    )
    assert np.abs(found - right).max() < 1e-4
    assert max(given) == 8
    assert given.count(2) > 3


def test_parts_are_scored_by_threads_with_one_thread_of_torch_each() -> None:
    "As many as torch has; scores come in order, and torch has its threads afterwards."
    seen = set[tuple[int, int]]()
    together = threading.Barrier(2)

    def score(x: torch.Tensor) -> torch.Tensor:
        together.wait(60)  # both threads are in here at once
        seen.add((threading.get_ident(), torch.get_num_threads()))
        assert torch.is_inference_mode_enabled()
        return 2 * x

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.arange(12.0).reshape(6, 2)
        found = detector_module._score_parts(score, zip(x.split(1), strict=True))
        assert found.equal(2 * x)
        assert [n for _, n in seen] == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
