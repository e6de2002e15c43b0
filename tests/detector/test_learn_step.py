"One optimiser step: micro-batches add up to the batch, memory may run out anywhere, and a resumed training continues bit for bit."

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from io import BytesIO
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from each import each
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from leakmel.core.errors import MachineError
from leakmel.detector.data.segments import Batch, make_task
from leakmel.detector.model.files import is_out_of_memory
from leakmel.detector.model.net import (
    LeakNet,
    NetSettings,
    balanced_weights,
    batch_totals,
    item_losses,
    loss_weights,
    micro_batch_loss,
)
from leakmel.detector.model.settings import SPEED_ONLY, TrainSettings, with_length
from leakmel.detector.train import step
from leakmel.detector.train.state import differences, training_identity
from leakmel.detector.train.step import (
    StepFigures,
    Stepper,
    StepTimer,
    half_type,
    learning_rate,
    loader_advice,
    micro_batch_slices,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OFF: dict[str, Any] = {
    "level_db": 0.0,
    "colour_db": 0.0,
    "noise_share": 0.0,
    "n_band_masks": 0,
    "n_time_masks": 0,
}
TASK = make_task(["LEAK", "NORMAL", "QUIET"])
COUNTS = [10, 70, 20]
MEANS = torch.linspace(-60, -40, 8)
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def batch_of(n: int, seed: int = 0) -> Batch:
    "Rare leaks among others: the classes of pieces differ."
    g = torch.Generator().manual_seed(seed)
    y = torch.tensor([1, 1, 2, 1, 0, 1, 1])[torch.randint(7, (n,), generator=g)]
    return Batch(
        (torch.randn(n, 2, 8, 1, generator=g) * 6 - 50 + 5 * y[:, None, None, None]).half(),
        y,
        torch.arange(n),
    )


def net_of(dropout: float = 0.3, seed: int = 4, kind: type[LeakNet] = LeakNet) -> LeakNet:
    torch.manual_seed(seed)
    return kind(
        NetSettings(n_mels=8, width=2, n_classes=3, channels=(8, 8), dropout=dropout),
        MEANS,
        torch.full((8,), 8.0),
    )


def stepper_of(
    n_steps: int = 7, *, dropout: float = 0.3, net: LeakNet | None = None, device: str = "cpu", **changes: Any
) -> Stepper:
    mine: dict[str, Any] = {"batch_size": 24, "channels": (8, 8), "warmup_share": 0.2, **changes}
    return Stepper(net or net_of(dropout), TASK, TrainSettings(**mine), device, COUNTS, n_steps)


def weights_of(stepper: Stepper) -> list[Tensor]:
    return [p.detach().clone() for p in stepper.net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gradients(stepper: Stepper, batch: Batch) -> list[Tensor]:
    stepper._gradients(batch, stepper.portions.most)
    return [p.grad.clone() for p in stepper.net.parameters() if p.grad is not None]


# Losses


def test_balanced_weights_make_classes_count_the_same():
    weights = balanced_weights(COUNTS)
    shares = [w * n for w, n in zip(weights, COUNTS, strict=True)]
    assert max(shares) - min(shares) < 1e-9
    assert math.isclose(sum(shares), sum(COUNTS))


def test_leak_weights_set_the_leak_against_all_the_rest():
    weights = loss_weights(TASK, TrainSettings(), COUNTS)
    assert weights.leak.tolist() == pytest.approx([5.0, 100 / 180, 100 / 180])
    even = loss_weights(TASK, TrainSettings(class_weights=None), COUNTS)
    assert even.leak.tolist() == even.classes.tolist() == [1, 1, 1]


def test_losses_equal_textbook_formulas():
    logits, leak_logit, y = torch.randn(50, 3), torch.randn(50), torch.randint(3, (50,))
    s, weights = (
        TrainSettings(loss="focal", focal_gamma=1.5, aux_weight=0.7),
        loss_weights(TASK, TrainSettings(), COUNTS),
    )
    p, q = torch.softmax(logits.double(), 1)[range(50), y], torch.sigmoid(leak_logit.double())
    q = torch.where(y == 0, q, 1 - q)
    w, v = weights.classes.double()[y], weights.leak.double()[y]
    expected = (w * (1 - p) ** 1.5 * -p.log()).sum() / w.sum() + 0.7 * (
        v * (1 - q) ** 1.5 * -q.log()
    ).sum() / v.sum()
    assert float(
        micro_batch_loss(logits, leak_logit, y, s, weights, batch_totals(y, weights))
    ) == pytest.approx(float(expected), rel=1e-5)
    plain = item_losses(logits, leak_logit, y, TrainSettings(label_smoothing=0.2), 0)[0]
    spread = -(0.8 * p.log() + 0.2 * torch.log_softmax(logits.double(), 1).mean(1))
    assert torch.allclose(plain.double(), spread, atol=1e-5)


def test_focal_loss_has_gradients_for_perfect_predictions():
    logits = torch.tensor([[80.0, -80.0, -80.0]], requires_grad=True)
    for gamma in (0.5, 2.0):
        item_losses(
            logits, torch.tensor([80.0]), torch.tensor([0]), TrainSettings(loss="focal", focal_gamma=gamma), 0
        )[0].sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


# Learning rate and pieces


@quick
@given(st.integers(1, 400), st.floats(0, 1), st.floats(0, 1))
def test_learning_rate_rises_then_falls(n_steps, warmup_share, min_lr_share):
    s = TrainSettings(learning_rate=0.5, warmup_share=warmup_share, min_lr_share=min_lr_share)
    rates = [learning_rate(i, n_steps, s) for i in range(n_steps)]
    n_warm = math.ceil(warmup_share * n_steps)
    assert all(0 <= r <= 0.5 for r in rates)
    assert rates[:n_warm] == sorted(rates[:n_warm])
    assert rates[n_warm:] == sorted(rates[n_warm:], reverse=True)
    if n_warm:
        assert rates[n_warm - 1] == 0.5
    if n_steps - n_warm > 1:
        assert rates[-1] == pytest.approx(0.5 * min_lr_share)


@quick
@given(st.integers(1, 300), st.integers(1, 300))
def test_micro_batches_are_even_and_complete(n, most):
    bounds = micro_batch_slices(n, most)
    sizes = [p.stop - p.start for p in bounds]
    assert [i for p in bounds for i in range(n)[p]] == list(range(n))
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-n // most)


@pytest.mark.slow
@each("n", [24, 23, 7, 1])
@each("micro_batch", [12, 5, 1])
@each(
    "changes",
    [
        {},
        {"loss": "focal"},
        {"class_weights": None, "aux_weight": 0.0},
        {"label_smoothing": 0.1, "clip_norm": 0.01},
    ],
    ids=["ce", "focal", "plain", "clipped"],
)
def test_micro_batches_give_the_gradients_of_the_batch(n, micro_batch, changes):
    batch = batch_of(n)
    # channels first: norms round less in this layout
    changes = changes | {"dropout": 0.0, "channels_last": False}
    whole, pieces = (stepper_of(micro_batch=k, **changes) for k in (0, micro_batch))
    expected, found = gradients(whole, batch), gradients(pieces, batch)
    scale = max(float(g.abs().max()) for g in expected)
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6 * scale) for a, b in zip(expected, found, strict=True)
    )
    assert scale > 0
    given, forward = list[int](), pieces.forward

    def counting(x: Tensor) -> Any:
        given.append(len(x))
        return forward(x)

    pieces.forward = counting
    one, other = whole.step(batch), pieces.step(batch)
    assert float(one.loss) == pytest.approx(float(other.loss), rel=1e-5)
    assert int(one.n_correct) == int(other.n_correct)
    assert float(one.grad_norm) == pytest.approx(float(other.grad_norm), rel=1e-4)
    assert given == [p.stop - p.start for p in micro_batch_slices(n, micro_batch)]
    assert one.n == other.n == n


@pytest.mark.slow
def test_gradients_are_those_of_the_formula():
    "Not only equal to each other: equal to what autograd says about the loss written down in one line."
    batch = batch_of(20)
    stepper = stepper_of(dropout=0.0, micro_batch=8, clip_norm=0.0, aux_weight=0.0, **OFF)
    found, net = gradients(stepper, batch), net_of(0.0)
    logits, _ = net(batch.x.float()[..., 0].transpose(1, 2))
    nn.functional.cross_entropy(logits, batch.y, weight=torch.tensor(balanced_weights(COUNTS))).backward()
    expected = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(expected, (f for f in found if f.abs().sum()), strict=True)
    )


def test_batches_that_are_accumulated_make_one_step():
    "As gradient_accumulation_steps means it: the step takes all items of the batches, a batch of them at a time."
    changes: dict[str, Any] = {"dropout": 0.0, "channels_last": False}
    several, one = stepper_of(batch_size=8, accumulate_batches=3, **changes), stepper_of(**changes)
    batch = batch_of(24)
    assert several.portions.most == 8
    assert float(several.step(batch).grad_norm) == pytest.approx(float(one.step(batch).grad_norm), rel=1e-4)


def test_former_name_of_the_micro_batch_is_taken_with_a_warning():
    with pytest.warns(
        FutureWarning,
        match="now micro_batch=8 .--micro-batch 8.; gradients of batches are added by accumulate_batches",
    ):
        settings = TrainSettings(batch_size=24, accumulation=3)
    assert settings == TrainSettings(batch_size=24, micro_batch=8)
    unknown = TrainSettings(accumulation=4)
    with pytest.warns(FutureWarning):
        assert with_length(unknown, 100).micro_batch == 16


def test_norms_and_biases_do_not_decay():
    groups = stepper_of(weight_decay=0.1).optimiser.param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert {p.ndim for p in groups[1]["params"]} == {1}
    assert min(p.ndim for p in groups[0]["params"]) == 2


def test_gradients_are_clipped():
    stepper = stepper_of(clip_norm=0.01)
    figures = stepper.step(batch_of(24))
    left = torch.stack([p.grad.norm() for p in stepper.net.parameters() if p.grad is not None]).norm()
    assert float(figures.grad_norm) > 0.01
    assert float(left) == pytest.approx(0.01, rel=1e-3)


def test_step_figures_are_correct():
    stepper, batch = stepper_of(10, learning_rate=0.01), batch_of(24)
    figures = stepper.step(batch)
    assert isinstance(figures, StepFigures)
    assert learning_rate(0, 10, stepper.settings) == stepper.optimiser.param_groups[0]["lr"]
    assert 0 <= int(figures.n_correct) <= 24
    assert not figures.loss.requires_grad
    assert stepper.first_step_s is not None
    assert stepper.n_done == 1


# Memory that runs out


class RunsOut(TorchDispatchMode):
    "Every operation of torch that comes along is counted; some of them find no memory."

    def __init__(
        self, at: set[int], error: Callable[[], Exception] = lambda: torch.OutOfMemoryError("out of memory")
    ):
        super().__init__()
        self.at, self.error, self.n = at, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        if self.n in self.at:
            raise self.error()
        return func(*args, **(kwargs or {}))


NO_MEMORY: Callable[[], Exception] = lambda: torch.OutOfMemoryError("out of memory")  # noqa: E731


class RepeatedlyOutOfMemory:
    "A second step in which memory runs out, again and again from the same place."

    def __init__(self):
        self.stepper, self.batch = stepper_of(4, micro_batch=12), batch_of(24, 1)
        self.stepper.step(batch_of(24, 0))
        self.noted = (
            self.stepper.state_dict(),
            {n: v.clone() for n, v in self.stepper.net.state_dict().items()},
        )

    def step(
        self, at: set[int], error: Callable[[], Exception] = NO_MEMORY, micro_batch: int = 12
    ) -> tuple[Stepper, int]:
        "The stepper after the step, and how many operations it took."
        self.stepper.load_state_dict(self.noted[0])
        self.stepper.net.load_state_dict(self.noted[1])
        self.stepper.portions.most = micro_batch
        with RunsOut(at, error) as counted:
            self.stepper.step(self.batch)
        return self.stepper, counted.n


@pytest.fixture(scope="module")
def out_of_memory_step() -> RepeatedlyOutOfMemory:
    return RepeatedlyOutOfMemory()


@pytest.fixture(scope="module")
def n_before_writing(out_of_memory_step) -> int:
    "Operations of a step up to the gradients."
    stepper = stepper_of(4, micro_batch=12)
    stepper.step(out_of_memory_step.batch)
    with RunsOut(set()) as counted:
        stepper._gradients(out_of_memory_step.batch, stepper.portions.most)
    return counted.n


def check_operations(out_of_memory_step: RepeatedlyOutOfMemory, operations: range) -> None:
    expected = weights_of(out_of_memory_step.step(set(), micro_batch=6)[0])
    assert not same(
        expected, weights_of(out_of_memory_step.step(set())[0])
    )  # dropout draws for each piece: smaller pieces are another step
    for k in operations:
        stepper, _ = out_of_memory_step.step({k})
        assert (stepper.portions.n_ran_out, stepper.portions.most, stepper.n_done) == (1, 6, 2), k
        assert same(weights_of(stepper), expected), f"operation {k}"


@pytest.mark.slow
def test_memory_may_run_out_at_an_operation(out_of_memory_step, n_before_writing):
    assert n_before_writing > 150
    check_operations(out_of_memory_step, range(1, n_before_writing + 1, 11))
    check_operations(out_of_memory_step, range(n_before_writing - 3, n_before_writing + 1))


@pytest.mark.long
def test_memory_may_run_out_at_any_operation(out_of_memory_step, n_before_writing):
    check_operations(out_of_memory_step, range(1, n_before_writing + 1))


def test_repeated_out_of_memory(out_of_memory_step):
    stepper, _ = out_of_memory_step.step({5, 60, 150})
    assert (stepper.portions.n_ran_out, stepper.portions.most, stepper.n_done) == (3, 1, 2)


def test_memory_that_is_too_small_for_one_item():
    stepper, tried = stepper_of(4), []

    def forward(x: Tensor) -> None:
        tried.append(len(x))
        raise torch.OutOfMemoryError("no room")

    stepper.forward = forward
    batch = batch_of(24)
    with raises("out-of-memory", MachineError, found="no room"):
        stepper.step(batch)
    assert tried == [24, 12, 6, 3, 1]
    assert stepper.n_done == 0
    assert all(p.grad is None for p in stepper.net.parameters())


def test_memory_that_runs_out_while_weights_are_written(out_of_memory_step, n_before_writing):
    n = out_of_memory_step.step(set())[1]
    assert n > n_before_writing
    for k in range(n_before_writing + 1, n + 1):
        with raises("out-of-memory", MachineError, remedy="resume from the last checkpoint"):
            out_of_memory_step.step({k})


@each(
    "error",
    [
        MemoryError,
        lambda: RuntimeError("CUDNN_STATUS_ALLOC_FAILED"),
        lambda: RuntimeError("CUDA error: out of memory"),
        lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_messages_are_recognised(error, out_of_memory_step):
    assert is_out_of_memory(error())
    assert out_of_memory_step.step({30}, error)[0].portions.n_ran_out == 1


def test_other_errors_are_not_treated_as_out_of_memory(out_of_memory_step):
    with pytest.raises(RuntimeError, match="an illegal address"):
        out_of_memory_step.step({30}, lambda: RuntimeError("an illegal address"))
    with pytest.raises(ValueError, match="no such thing"):
        out_of_memory_step.step({30}, lambda: ValueError("no such thing"))


# Nothing waits for the device


def test_step_reads_no_value_from_the_device_before_gradients():
    "Each such reading would let a GPU run dry."

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    names: set[str] = set()
    for changes in (
        {"micro_batch": 8},
        {"loss": "focal", "noise_share": 1.0, "label_smoothing": 0.0},
        {"amp": "bf16"},
    ):
        stepper, batch = stepper_of(**changes), batch_of(24)
        with Notes():
            stepper._gradients(batch, stepper.portions.most)
    assert {"aten.convolution", "aten.exponential_", "aten.native_dropout"} & names
    assert not {
        n
        for n in names
        if n.split(".")[1]
        in ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select")
    }


# Half precision


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_half_precision_gives_nearly_the_same_weights(amp):
    batch, full, half = batch_of(24), stepper_of(dropout=0.0, amp="off"), stepper_of(dropout=0.0, amp=amp)
    a, b = gradients(full, batch), gradients(half, batch)
    assert all(p.dtype is torch.float32 for p in half.net.parameters())
    assert half.half is {"bf16": torch.bfloat16, "fp16": torch.float16}[amp]
    assert (
        torch.cosine_similarity(torch.cat([g.flatten() for g in a]), torch.cat([g.flatten() for g in b]), 0)
        > 0.98
    )
    assert not same(a, b)
    assert half.scaler.is_enabled() == (amp == "fp16")
    assert half_type(TrainSettings(), torch.device("cpu")) is None


def test_half_precision_is_that_of_the_device(monkeypatch):
    "Torch's own question is about the current device, which can be another one."
    capabilities = {torch.device("cuda", 0): (7, 5), torch.device("cuda", 1): (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    found = [half_type(TrainSettings(), device) for device in capabilities]
    assert found == [torch.float16, torch.bfloat16]


def test_overflowing_gradients_skip_the_step():
    stepper, batch = stepper_of(amp="fp16"), batch_of(24)
    stepper.step(batch)
    before, scale = weights_of(stepper), stepper.scaler.get_scale()
    stepper.scaler.update(1e38)
    figures = stepper.step(batch)
    assert same(before, weights_of(stepper))
    assert not math.isfinite(float(figures.grad_norm))
    assert stepper.n_done == 2
    assert stepper.scaler.get_scale() < 1e38
    assert scale == 65536
    stepper.scaler.update(1024.0)
    stepper.step(batch)
    assert not same(before, weights_of(stepper))


def test_out_of_memory_keeps_the_gradient_scale():
    stepper, batch = stepper_of(amp="fp16"), batch_of(24)
    stepper.step(batch)
    stepper.scaler.update(512.0)
    with RunsOut({80, 300}):
        stepper.step(batch)
    assert stepper.portions.n_ran_out == 2
    assert stepper.scaler.get_scale() == 512.0
    assert stepper.n_done == 2


@each("last", [True, False, "auto"])
def test_memory_layout_does_not_change_gradients(last):
    usual, other = stepper_of(dropout=0.0), stepper_of(dropout=0.0, channels_last=last)
    weight = next(p for p in other.net.parameters() if p.ndim == 4 and p.shape[1] > 1)
    assert weight.is_contiguous(memory_format=torch.channels_last) == (last is not False)
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(gradients(usual, batch_of(24)), gradients(other, batch_of(24)), strict=True)
    )


@pytest.mark.slow
def test_steps_reuse_the_memory_of_the_steps_before():
    "A step of the usual size on a CPU makes arrays of 50 MB; a page that the kernel clears anew is a page fault."
    code = """if True:
        import resource, torch
        from leakmel.detector.data.segments import Batch, make_task
        from leakmel.detector.model.net import LeakNet, NetSettings
        from leakmel.detector.model.settings import TrainSettings
        from leakmel.detector.train.step import Stepper
        net = LeakNet(NetSettings(n_mels=64, width=2, channels=(48, 96, 192)))
        settings = TrainSettings(batch_size=256)
        stepper = Stepper(net, make_task(["LEAK", "NO"], "LEAK"), settings, "cpu", [128, 128], 99)
        batch = Batch(torch.randn(256, 2, 64, 1), torch.arange(256) % 2, torch.arange(256))
        for _ in range(9):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            stepper.step(batch)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert min(map(int, out.split()[3:])) < 1000


# Compiling


def test_use_compile_compiles_the_net(monkeypatch):
    asked = []

    def note(net, dynamic):
        assert dynamic is False  # with sizes that change, a GPU reported misaligned addresses
        asked.append(net)
        return net

    monkeypatch.setattr(torch, "compile", note)
    stepper = stepper_of(use_compile=True)
    stepper.step(batch_of(24))
    assert asked == [stepper.net]
    assert stepper.net.training


def test_only_whole_batches_are_compiled(monkeypatch):
    sizes = []

    def compiled(net, dynamic):
        def forward(x):
            sizes.append(len(x))
            return net(x)

        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    stepper = stepper_of(use_compile=True, micro_batch=12)
    for n in (24, 17, 24, 5):
        stepper.step(batch_of(n))
    assert sizes == [12] * 4
    few = stepper_of(use_compile=True)  # fewer items than a batch
    few.step(batch_of(9))
    assert sizes[4:] == [9]


def test_compile_error_names_the_remedy(monkeypatch):
    from torch._dynamo.exc import TorchDynamoException

    def refuse(*args):
        raise TorchDynamoException("no compiler\nand much more")

    monkeypatch.setattr(torch, "compile", lambda net, dynamic: refuse)
    stepper = stepper_of(use_compile=True)
    with raises("not-compiled", MachineError, found="no compiler", remedy="train with use_compile=False"):
        stepper.step(batch_of(24))


# Going on


def run(stepper: Stepper, steps: range) -> list[float]:
    losses = []
    for i in steps:
        torch.rand(i + 1)  # others draw random numbers too
        losses.append(float(stepper.step(batch_of(24 - i, i)).loss))
    return losses


@each(
    "changes",
    [{"micro_batch": 8}, {"amp": "bf16"}, {"amp": "fp16"}, {"loss": "focal", "noise_share": 1.0}],
    ids=str,
)
def test_resumed_training_continues_bit_for_bit(changes):
    whole = stepper_of(7, **changes)
    losses = run(whole, range(7))
    part, file = stepper_of(7, **changes), BytesIO()
    first = run(part, range(3))
    torch.save({"net": part.net.state_dict(), "step": part.state_dict()}, file)
    file.seek(0)
    noted = torch.load(file, weights_only=True)
    torch.manual_seed(99)
    resumed = stepper_of(7, net=net_of(seed=77), **changes)
    resumed.net.load_state_dict(noted["net"])
    resumed.load_state_dict(noted["step"])
    assert first + run(resumed, range(3, 7)) == losses
    assert same(weights_of(whole), weights_of(resumed))
    assert resumed.n_done == 7
    a, b = whole.optimiser.state_dict()["state"], resumed.optimiser.state_dict()["state"]
    assert all(torch.equal(a[i][k], b[i][k]) for i in a for k in a[i])
    assert whole.scaler.state_dict() == resumed.scaler.state_dict()


def test_resumed_training_repeats_dropout_and_augmentation():
    "Or bit for bit would mean nothing."
    usual = run(stepper_of(7), range(4))
    assert usual != run(stepper_of(7, dropout=0.0), range(4))
    assert usual != run(stepper_of(7, level_db=0.0), range(4))
    assert usual != run(stepper_of(7, seed=1), range(4))
    assert usual == run(stepper_of(7), range(4))


def test_stored_state_is_not_changed_by_later_steps():
    stepper = stepper_of(7)
    run(stepper, range(2))
    noted = stepper.state_dict()
    kept = torch.cat([v.clone().flatten() for s in noted["optimiser"]["state"].values() for v in s.values()])
    run(stepper, range(2, 4))
    other = stepper_of(7)
    other.load_state_dict(noted)
    run(other, range(2, 3))
    assert torch.equal(
        kept, torch.cat([v.flatten() for s in noted["optimiser"]["state"].values() for v in s.values()])
    )


def test_smaller_micro_batches_stay_after_resume():
    stepper, batch = stepper_of(7), batch_of(24)
    with RunsOut({40}):
        stepper.step(batch)
    other = stepper_of(7)
    other.load_state_dict(stepper.state_dict())
    assert other.portions.most == 12
    assert other.portions.n_ran_out == 1
    assert other.n_done == 1


@pytest.mark.parametrize("orders", [(False, True), (True, False)])
def test_optimiser_state_follows_the_memory_layout_of_weights(orders):
    "A training that began on a CPU goes on on a GPU, channels last: a fused kernel takes both as they lie in memory."
    then, now, same_as_then = (stepper_of(7, channels_last=last) for last in (*orders, orders[0]))
    run(then, range(2))
    for stepper in (now, same_as_then):
        stepper.net.load_state_dict(then.net.state_dict())
        stepper.load_state_dict(then.state_dict())
    for p, held in now.optimiser.state.items():
        assert held["exp_avg"].stride() == held["exp_avg_sq"].stride() == p.stride()
    run(now, range(2, 4))
    run(same_as_then, range(2, 4))
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(weights_of(now), weights_of(same_as_then), strict=True)
    )


OTHERS: dict[str, Any] = {
    "level_db": 1.0,
    "colour_db": 0.5,
    "noise_share": 0.3,
    "noise_snr_db": 3.0,
    "noise_snr_range_db": 10.0,
    "n_band_masks": 2,
    "band_mask_width": 3,
    "n_time_masks": 1,
    "time_mask_width": 2,
    "loader": "stream",
    "preload_to_ram": False,
    "device_fraction": 0.25,
    "buffer_blocks": 8,
    "detector": "spectral",
    "keep_level": True,
    "epochs": 3,
    "epoch_share": 0.5,
    "batch_size": 48,
    "accumulate_batches": 2,
    "micro_batch": 12,
    "learning_rate": 1e-4,
    "warmup_share": 0.3,
    "min_lr_share": 0.1,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "loss": "focal",
    "focal_gamma": 1.0,
    "class_weights": None,
    "label_smoothing": 0.1,
    "aux_weight": 0.1,
    "amp": "bf16",
    "use_compile": True,
    "channels_last": True,
    "vote": "mean",
    "vote_share": 0.25,
    "early_stop_epochs": 1,
    "seed": 5,
    "profile_every": 3,
    "channels": (8, 9),
    "dropout": 0.1,
}


def test_each_setting_has_another_test_value():
    usual = asdict(TrainSettings(batch_size=24, channels=(8, 8), warmup_share=0.2))
    assert set(OTHERS) == set(usual) - {"accumulation"}  # a former name
    assert all(usual[name] != value for name, value in OTHERS.items())


@each("name", sorted(OTHERS))
def test_only_performance_settings_may_differ_on_resume(name):
    then = TrainSettings(batch_size=24, channels=(8, 8), warmup_share=0.2)
    now, data = (
        replace(then, **{name: OTHERS[name]}),
        SimpleNamespace(identity=dict.fromkeys(("task", "training", "validation"), "")),
    )
    output = differences(training_identity(data, then), training_identity(data, now))  # type: ignore[arg-type]
    assert [text.partition("=")[0] for text in output] == ([] if name in SPEED_ONLY else [name])


# Timing


class LoadedBatches:
    "Batches that are brought over one by one."

    def __init__(self, n: int):
        self.n, self.n_moved, self.closed = n, 0, False

    def transfer(self, batch: Batch) -> Batch:
        self.n_moved += 1
        return batch

    def __iter__(self):
        try:
            for i in range(self.n):
                yield self.transfer(batch_of(4, i))
        finally:
            self.closed = True


class TickingClock:
    "A clock on which ten milliseconds pass whenever it is read."

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 0.01
        return self.now_s


@each(
    ("n", "every", "sampled"), [(0, 5, 0), (1, 5, 0), (2, 5, 1), (11, 5, 2), (12, 5, 3), (6, 1, 5), (7, 2, 3)]
)
def test_a_sample_of_the_batches_is_timed(n, every, sampled, monkeypatch):
    monkeypatch.setattr(step, "time", TickingClock())
    loads, timer = LoadedBatches(n), StepTimer("cpu", every)
    for _ in timer.batches(loads):
        with timer.step():
            pass
    times = timer.times()
    assert times["n_batches"] == n
    assert len(timer.computed) == len(timer.moved) == sampled  # the first one never is
    for ms in (times["compute_ms"], times["h2d_ms"]):
        assert ms == pytest.approx(10 if sampled else math.nan, nan_ok=True)
    # a wait without its copy is two readings of the clock, so 20 ms of waiting and 10 of copying for 10 of computing
    assert times["loader_mean_ms"] == pytest.approx(20 if n > 1 else math.nan, nan_ok=True)
    assert times["io_to_compute"] == pytest.approx(3 if n > 1 else math.nan, nan_ok=True)
    assert loads.n_moved == 0
    assert math.isnan(times["loader_mean_ms"]) == math.isnan(times["loader_max_ms"]) == (n < 2)
    assert math.isnan(times["first_wait_ms"]) == (n == 0)
    assert math.isnan(times["reserved_bytes"])
    assert math.isnan(times["allocated_bytes"])
    list(loads)
    assert loads.n_moved == n  # the loader has its own way back


def test_synchronous_copy_is_not_counted_as_loader_wait(monkeypatch):
    "From memory that is not page-locked a copy holds the host up: it is counted once, as a copy. Nothing but copies moves the clock."
    now_s = [100.0]
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    class Slow(Batch):
        def to(self, device: torch.device) -> Batch:
            now_s[0] += 0.02
            return self

    class Slowly(LoadedBatches):
        def __iter__(self):
            for i in range(self.n):
                yield self.transfer(Slow(*vars(batch_of(4, i)).values()))

    timer = StepTimer("cpu", 1)
    for _ in timer.batches(Slowly(4)):
        with timer.step():
            pass
    times = timer.times()
    assert times["h2d_ms"] == pytest.approx(20)
    assert times["loader_mean_ms"] == pytest.approx(0)


def test_timer_restarts_each_epoch():
    timer = StepTimer("cpu", 2)
    for n in (5, 3):
        for _ in timer.batches(LoadedBatches(n)):
            with timer.step():
                pass
        assert timer.times()["n_batches"] == n


def test_interrupted_loop_restores_the_loader():
    loads, timer = LoadedBatches(5), StepTimer("cpu", 1)
    waiting = timer.batches(loads)
    next(waiting)
    waiting.close()  # type: ignore[attr-defined]
    assert "transfer" not in vars(loads)
    assert loads.closed


def test_a_step_that_fails_is_not_timed():
    timer = StepTimer("cpu", 1)

    def loop() -> None:
        for _ in timer.batches(LoadedBatches(3)):
            with timer.step():
                raise KeyError("x")

    with pytest.raises(KeyError):
        loop()
    assert timer.computed == []
    assert math.isnan(timer.times()["compute_ms"])


def test_advice_follows_the_loader_wait():
    def times(wait_ms: float) -> dict[str, float]:
        return {"loader_mean_ms": wait_ms, "io_to_compute": wait_ms / 20}

    assert loader_advice(times(math.nan)) is None
    assert loader_advice(times(30)) is None
    assert "too slow" in str(loader_advice(times(51)))
    assert "2.5 times the computing time" in str(loader_advice(times(51)))


class FakeEvent:
    "An event of a device that is ten steps behind."

    made: ClassVar[list["FakeEvent"]] = []
    done = False

    def __init__(self, enable_timing: bool = False):
        assert enable_timing
        FakeEvent.made.append(self)
        self.at: int | None = None

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:0"
        self.at = len(FakeEvent.made)

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert FakeEvent.done
        assert self.at is not None
        assert other.at is not None
        return 2.0 * (other.at - self.at)


def test_gpu_timer_does_not_synchronise_before_the_end(monkeypatch):
    calls: list[str] = []

    def settle(device: torch.device) -> None:
        calls.append("settle")
        FakeEvent.done = True

    monkeypatch.setattr(FakeEvent, "made", [])
    monkeypatch.setattr(FakeEvent, "done", False)
    replaced: dict[str, Any] = {
        "Event": FakeEvent,
        "current_stream": lambda device: f"stream of {device}",
        "synchronize": settle,
        "max_memory_allocated": lambda device: 7,
        "max_memory_reserved": lambda device: 9,
        "reset_peak_memory_stats": lambda device: calls.append("reset"),
    }
    for name, fake in replaced.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    timer, loads = StepTimer("cuda:0", 2), LoadedBatches(6)
    monkeypatch.setattr(Batch, "to", lambda batch, device: batch)
    for _ in timer.batches(loads):
        with timer.step():
            pass
    assert "settle" not in calls
    times = timer.times()
    assert (times["compute_ms"], times["h2d_ms"]) == (2.0, 2.0)
    assert (times["allocated_bytes"], times["reserved_bytes"]) == (7, 9)
    assert len(FakeEvent.made) == 12  # two around each of three transfers and three steps
    assert calls.count("settle") == 1


# What needs a GPU


def need_gpu() -> None:
    "Skip where there is none."
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


@pytest.mark.gpu
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_gpu_and_cpu_training_agree(amp):
    need_gpu()
    on_cpu, on_gpu = stepper_of(dropout=0.0, **OFF), stepper_of(dropout=0.0, device="cuda", amp=amp, **OFF)
    a, b = gradients(on_cpu, batch_of(24)), gradients(on_gpu, batch_of(24))
    assert (
        torch.cosine_similarity(
            torch.cat([g.flatten() for g in a]), torch.cat([g.flatten().cpu() for g in b]), 0
        )
        > 0.98
    )


@pytest.mark.gpu
def test_training_resumes_on_a_gpu():
    need_gpu()
    whole, part = stepper_of(7, device="cuda"), stepper_of(7, device="cuda")
    run(whole, range(7))
    run(part, range(3))
    resumed = stepper_of(7, net=net_of(seed=77), device="cuda")
    resumed.net.load_state_dict(part.net.state_dict())
    resumed.load_state_dict(part.state_dict())
    run(resumed, range(3, 7))
    assert all(
        torch.allclose(a, b, atol=1e-4) for a, b in zip(weights_of(whole), weights_of(resumed), strict=True)
    )
    moved = stepper_of(7, net=net_of(seed=77))
    moved.load_state_dict(part.state_dict())
    run(moved, range(3, 4))


@pytest.mark.gpu
def test_gpu_time_is_measured_by_events():
    need_gpu()
    stepper, timer = stepper_of(20, device="cuda"), StepTimer("cuda", 2)
    for batch in timer.batches(LoadedBatches(20)):
        with timer.step():
            stepper.step(batch)
    times = timer.times()
    assert times["compute_ms"] > 0
    assert times["h2d_ms"] >= 0
    assert times["allocated_bytes"] > 0
    assert times["reserved_bytes"] > 0
    assert len(timer.computed) == 10


@pytest.mark.gpu
def test_a_step_does_not_wait_for_a_gpu():
    need_gpu()
    stepper, batches = (
        stepper_of(20, device="cuda", amp="bf16", micro_batch=12),
        [batch_of(24, i).to(torch.device("cuda")) for i in range(4)],
    )
    stepper.step(batches[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            stepper.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stepper.n_done == 4


@pytest.mark.gpu
def test_real_memory_runs_out():
    need_gpu()
    stepper, batch = (
        stepper_of(2, device="cuda", batch_size=1 << 16),
        batch_of(1 << 16).to(torch.device("cuda")),
    )
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (96 << 20)) / total)
        stepper.step(batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert stepper.portions.n_ran_out >= 1
    assert stepper.n_done == 1


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:.*script_method.*:DeprecationWarning"
)  # torch's own, in what it compiles with
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_and_plain_nets_agree(device):
    if device == "cuda":
        need_gpu()
    usual, compiled = (
        stepper_of(3, dropout=0.0, device=device, amp="off", use_compile=c) for c in (False, True)
    )
    for i in range(3):
        usual.step(batch_of(24, i))
        compiled.step(batch_of(24 - i, i) if i == 1 else batch_of(24, i))
        if i == 0:
            assert all(
                torch.allclose(a, b, atol=1e-4)
                for a, b in zip(weights_of(usual), weights_of(compiled), strict=True)
            )
    assert compiled.first_step_s
    assert compiled.n_done == 3
    assert set(compiled.net.state_dict()) == set(usual.net.state_dict())
