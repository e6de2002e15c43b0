"Engines on devices: the same bytes with any delays, no row of a failed batch, all memory freed. Fake devices, and a GPU if available."

import inspect
import itertools
import logging
import mmap
import re
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import need
from each import each
from errors import raises
from fake_device import FakeDevice, FakeOutOfMemory, FakeStream, Faults, taken
from left_threads import left_threads

from leakmel.core.errors import EngineError, UsageError
from leakmel.core.timeline import Timeline
from leakmel.mel import device_engine, engines
from leakmel.mel.device_engine import Device, DeviceEngine, DeviceRunner, open_devices
from leakmel.mel.engines import DeviceOptions, EngineLane, Ticket, check_recording, open_engine, self_check
from leakmel.mel.spec import MelSpec, compare, reference_features, reference_log_mel
from leakmel.mel.torch_engine import TorchEngine
from leakmel.recordings.conform import moments_of


@pytest.fixture(autouse=True)
def early_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    "Graphs from the second block on, so that small tests replay some."
    monkeypatch.setattr(device_engine, "GRAPH_AFTER", 2)


# A recording of 128 samples and a row of 16 values: what is under test is the way to the device and back.
TINY = MelSpec(
    n_fft=16,
    hop_length=16,
    short_window=16,
    short_hop=16,
    long_window=32,
    long_hop=32,
    n_mels=2,
    duration_s=1 / 32,
)
N_VALUES = int(np.prod(TINY.row_shape))


class SumOfEndsChain:
    "A chain whose row is the sum of a recording's two ends: every late, early or misplaced byte shows."

    granule = 1

    def __init__(self, granule: int = 1):
        self.granule = granule

    def features(self, x: torch.Tensor, mels: torch.Tensor, moments: torch.Tensor | None) -> None:
        mels.copy_((x[:, :N_VALUES] + x[:, -N_VALUES:]).reshape(mels.shape))
        if moments is not None:
            moments.copy_(torch.from_numpy(moments_of(x.numpy())))


def recordings(n: int, seed: int = 0, dtype: Any = np.int16) -> np.ndarray:
    return np.random.default_rng(seed).integers(-999, 999, (n, TINY.n_samples)).astype(dtype)


def right_rows(x: np.ndarray) -> np.ndarray:
    return (x[:, :N_VALUES] + x[:, -N_VALUES:]).reshape(len(x), *TINY.row_shape).astype(np.float16)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    "Every stream has ended when its engine is closed, or was never opened."
    before = left_threads()
    yield
    assert left_threads() <= before


def all_memory_is_freed(devices: list[FakeDevice]) -> None:
    "Device memory and pinned memory have been given back."
    for d in devices:
        assert (d.counts["device_bytes"], d.counts["pinned_bytes"]) == (0, 0), d.name


def result_within_limit(work: Callable[[], Any], limit_s: float = 60) -> Any:
    "The result of work that must not hang."
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert found, "it hangs"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def submitted(
    lanes: list[EngineLane], batches: list[tuple[np.ndarray, np.ndarray]], accumulation: int
) -> list[Ticket]:
    "Batches dealt to lanes, some at a time."
    groups = [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]
    return [t for lane, group in zip(itertools.cycle(lanes), groups) for t in lane.submit(group)]


def submit_many(
    devices: list[FakeDevice],
    options: DeviceOptions,
    *,
    size: int = 5,
    n: int = 43,
    accumulation: int = 1,
    pinned: bool = True,
    dtype: Any = np.int16,
    chain: Callable[..., Any] = SumOfEndsChain,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    "Submit many batches to an engine; return samples, rows and moments."
    with DeviceEngine(TINY, list[Device](devices), lambda device, n_block: chain(), options) as engine:
        make = engine.host_array if pinned else np.zeros
        x, out = make((n, TINY.n_samples), dtype), make((n, *TINY.row_shape), np.float16)
        x[:], out[:] = recordings(n, dtype=dtype), np.nan
        lanes = [engine.open_lane(k) for k in range(engine.n_lanes)]
        tickets = submitted(
            lanes, [(x[i : i + size], out[i : i + size]) for i in range(0, n, size)], accumulation
        )
        moments = np.concatenate([t.wait() for t in tickets])
        for lane in lanes:
            lane.close()
    all_memory_is_freed(devices)
    return x, out, moments


def engine_of_devices(n: int, seed: int, delay_s: float = 0.001) -> list[FakeDevice]:
    return [FakeDevice(f"fake:{i}", Faults(delay_s=delay_s, seed=seed)) for i in range(n)]


# ---- the same bytes --------------------------------------------------------------------------------------------------

OPTIONS = [
    DeviceOptions(max_block=4),
    DeviceOptions(max_block=4, gpu_streams=1, buffers_per_stream=1),
    DeviceOptions(max_block=7, gpu_streams=3, graph=False),
    DeviceOptions(max_block=3, async_copies=False),
    DeviceOptions(max_block=3, async_copies=False, graph=False),
    DeviceOptions(buffers_per_stream=3),
]


@pytest.mark.slow
@each("options", OPTIONS, ids=repr)
@each("n_devices", [1, 2, 3])
def test_performance_settings_do_not_change_bytes(options: DeviceOptions, n_devices: int) -> None:
    for seed, (size, accumulation, pinned, dtype) in enumerate(
        [
            (1, 4, True, np.int16),
            (5, 1, True, np.int16),
            (5, 3, False, np.int16),
            (16, 1, True, np.float32),
            (43, 2, False, np.float32),
            (7, 2, True, np.int16),
        ]
    ):
        x, rows, moments = submit_many(
            engine_of_devices(n_devices, seed),
            options,
            size=size,
            accumulation=accumulation,
            pinned=pinned,
            dtype=dtype,
        )
        assert np.array_equal(rows, right_rows(x))
        assert np.array_equal(moments, moments_of(x))


def ordering_lines() -> list[str]:
    "The lines of `send` that keep an order: every wait, and every record that somebody waits for."
    return [
        line
        for line in inspect.getsource(DeviceRunner.send).splitlines()
        if ".wait(" in line or ".record(events.c" in line
    ]


@each("line", ordering_lines(), ids=str.strip)
def test_each_stream_wait_is_necessary(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    "Without it, some delay gives wrong rows; with it, the same delays give none."

    def shows() -> bool:
        for seed in range(40):
            for options in (
                DeviceOptions(max_block=3, gpu_streams=1, buffers_per_stream=1, graph=False),
                DeviceOptions(max_block=3, graph=False),
            ):
                try:
                    x, rows, moments = submit_many(engine_of_devices(1, seed, 0.003), options, n=24, size=3)
                except EngineError:
                    return True  # an event without a time
                if not (np.array_equal(rows, right_rows(x)) and np.array_equal(moments, moments_of(x))):
                    return True
        return False

    source = textwrap.dedent(inspect.getsource(DeviceRunner.send))
    assert source.count(line.strip()) == 1
    space = vars(device_engine).copy()
    exec(source.replace(line.strip(), "pass"), space)
    with monkeypatch.context() as m:
        m.setattr(DeviceRunner, "send", space["send"])
        assert shows(), "nothing notices that this line is gone"


def test_send_has_seven_ordering_lines() -> None:
    assert len(ordering_lines()) == 7


def test_mixed_batches_in_one_submit() -> None:
    "16-bit and float batches, empty ones, arrays that are pinned, are not, or do not lie in one piece."
    devices = engine_of_devices(1, 3)
    with DeviceEngine(
        TINY, list[Device](devices), lambda device, n_block: SumOfEndsChain(), DeviceOptions(max_block=4)
    ) as engine:
        x, wide = engine.host_array((6, TINY.n_samples), np.int16), recordings(5, 1, np.float32)
        x[:] = recordings(6, 2)
        strided = recordings(10, 3)[::2]
        outs = [np.full((len(a), *TINY.row_shape), np.nan, np.float32) for a in (x, wide, x[:0], strided)]
        lane = engine.open_lane()
        tickets = lane.submit(list(zip((x, wide, x[:0], strided), outs, strict=True)))
        for ticket, a, out in zip(tickets, (x, wide, x[:0], strided), outs, strict=True):
            assert np.array_equal(ticket.wait(), moments_of(a))
            assert np.array_equal(ticket.wait(), moments_of(a)), "waiting twice is the same"
            assert np.array_equal(out, right_rows(a))
        for bad in ((x[:, :5], outs[0]), (x, outs[1]), (x.astype(np.int32), outs[0])):
            with raises("not-a-batch", UsageError):
                lane.submit([bad])
        lane.close()
    all_memory_is_freed(devices)


@pytest.mark.parametrize("pinned", [True, False])
def test_both_kinds_of_samples_share_buffers(pinned: bool) -> None:
    "Blocks of 16-bit and of float samples in turn, of many sizes and by graphs; memory is taken once."
    (device,) = devices = engine_of_devices(1, 2)
    with DeviceEngine(
        TINY, list[Device](devices), lambda device, n_block: SumOfEndsChain(), DeviceOptions(max_block=64)
    ) as engine:
        make = engine.host_array if pinned else np.zeros
        arrays = {kind: make((64, TINY.n_samples), kind) for kind in (np.int16, np.float32)}
        out = make((64, *TINY.row_shape), np.float16)
        lane, before = engine.open_lane(), device.counts["device_bytes"]
        for n in (3, 3, 3, 3, 3, 3, 3, 3, 3, 64, 3, 3, 3, 3, 3, 64, 3):
            for kind, x in arrays.items():
                x[:], out[:] = recordings(64, device.counts["operations"], kind), np.nan
                (ticket,) = lane.submit([(x[:n], out[:n])])
                ticket.wait()
                assert np.array_equal(out[:n], right_rows(x[:n]))
        assert device.counts["device_bytes"] == before
        assert device.counts["captures"] > 0
        lane.close()
    all_memory_is_freed(devices)


def test_two_threads_with_a_lane_each() -> None:
    devices = engine_of_devices(2, 1)
    with DeviceEngine(
        TINY, list[Device](devices), lambda device, n_block: SumOfEndsChain(), DeviceOptions(max_block=4)
    ) as engine:
        x, out = recordings(160), np.full((160, *TINY.row_shape), np.nan, np.float16)

        def work(k: int) -> None:
            lane = engine.open_lane(k)
            for i in range(10 * k, 160, 20):
                lane.submit([(x[i : i + 10], out[i : i + 10])])[0].wait()
            lane.close()

        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert np.array_equal(out, right_rows(x))
        assert all(d.counts["launches"] for d in devices)
        threads = [
            threading.Thread(target=lambda i=i: engine.run(x[i : i + 40], out[i : i + 40]))
            for i in range(0, 160, 40)
        ]
        out[:] = np.nan
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert np.array_equal(out, right_rows(x)), "run, from four threads"
    all_memory_is_freed(devices)


# ---- nothing waits, nothing is copied twice ----------------------------------------------------------------------------


def test_submit_does_not_wait_for_the_device() -> None:
    "Thirty batches are queued while the device stands still."
    devices, gate = engine_of_devices(1, 0, 0.0), threading.Event()

    class Held(SumOfEndsChain):
        def features(self, *tensors: Any) -> None:
            gate.wait()
            super().features(*tensors)

    with DeviceEngine(
        TINY, list[Device](devices), lambda device, n_block: Held(), DeviceOptions(max_block=4, graph=False)
    ) as engine:
        x, out = (
            engine.host_array((120, TINY.n_samples), np.int16),
            engine.host_array((120, *TINY.row_shape), np.float16),
        )
        x[:] = recordings(120)
        lane = engine.open_lane()
        try:
            tickets = result_within_limit(
                lambda: submitted([lane], [(x[i : i + 4], out[i : i + 4]) for i in range(0, 120, 4)], 1)
            )
            assert not out.any()
        finally:
            gate.set()
        for t in tickets:
            t.wait()
        assert np.array_equal(out, right_rows(x))
        lane.close()


def test_pinned_arrays_are_copied_without_staging() -> None:
    for pinned in (True, False):
        (device,) = devices = engine_of_devices(1, 0, 0.0)
        with DeviceEngine(
            TINY, list[Device](devices), lambda device, n_block: SumOfEndsChain(), DeviceOptions(max_block=8)
        ) as engine:
            make = engine.host_array if pinned else np.zeros
            x, out = make((64, TINY.n_samples), np.int16), make((64, *TINY.row_shape), np.float16)
            held, before = device.counts["pinned_bytes"], device.counts["copies"]
            assert engine.host_bytes == (x.nbytes + out.nbytes if pinned else 0)
            lane = engine.open_lane()
            for t in submitted([lane], [(x[i : i + 8], out[i : i + 8]) for i in range(0, 64, 8)], 1):
                t.wait()
            assert device.counts["copies"] - before == 3 * 8, "samples, rows and figures of each block"
            assert device.counts["waits"] == (0 if pinned else 2 * 8), "the caller waits for other arrays"
            lane.close()
            assert device.counts["pinned_bytes"] - held == len(engine.runners[0].free_events) * 6 * 8 * 8
        x[:], out[:] = 1, 2  # ordinary memory now
        assert (x == 1).all()
        assert engine.host_bytes == 0
        all_memory_is_freed(devices)


@pytest.mark.slow
def test_thousands_of_batches_take_no_more_memory() -> None:
    (device,) = devices = engine_of_devices(1, 0, 0.0)
    timeline = Timeline()
    with DeviceEngine(
        TINY, list[Device](devices), lambda device, n_block: SumOfEndsChain(), DeviceOptions(max_block=4)
    ) as engine:
        x, out = (
            engine.host_array((4, TINY.n_samples), np.int16),
            engine.host_array((40, 4, *TINY.row_shape), np.float16),
        )
        lane, held = engine.open_lane(0, timeline), []
        for i in range(3000):
            tickets = lane.submit([(x, out[i % 40])], labels=[("TRAINING", i)])
            if i % 3:
                tickets[0].wait()  # others are forgotten
            held.append((device.counts["device_bytes"], device.counts["pinned_bytes"]))
        lane.close()
        assert held[-1] == held[1000]
        assert not engine.runners[0].pending
        assert sum(s.n_files for s in timeline.spans) == 3 * 4 * 3000
    all_memory_is_freed(devices)


# ---- telemetry -----------------------------------------------------------------------------------------------------------


def test_spans_of_a_block_follow_each_other() -> None:
    devices, timeline = engine_of_devices(2, 5, 0.002), Timeline()
    with DeviceEngine(
        TINY, list[Device](devices), lambda device, n_block: SumOfEndsChain(), DeviceOptions(max_block=4)
    ) as engine:
        x, out = recordings(40), np.zeros((40, *TINY.row_shape), np.float16)
        lanes, began_s = [engine.open_lane(k, timeline) for k in range(2)], timeline.now_s()
        tickets = [
            t
            for i in range(10)
            for t in lanes[i % 2].submit(
                [(x[4 * i : 4 * i + 4], out[4 * i : 4 * i + 4])], labels=[("TESTING", i)]
            )
        ]
        for t in tickets:
            t.wait()
        ended_s = timeline.now_s()
        for lane in lanes:
            lane.close()
    assert {s.lane for s in timeline.spans} == {"fake:0", "fake:1"}
    for i in range(10):
        found = {s.stage: s for s in timeline.spans if s.batch == i}
        copy_in, compute, copy_out = (found[stage] for stage in ("copy_in", "compute", "copy_out"))
        assert (
            began_s
            <= copy_in.start_s
            <= copy_in.end_s
            <= compute.start_s
            <= compute.end_s
            <= copy_out.start_s
            <= copy_out.end_s
            <= ended_s
        )
        assert {(s.split, s.n_files) for s in found.values()} == {("TESTING", 4)}
        assert (copy_in.n_bytes, copy_out.n_bytes) == (4 * 2 * TINY.n_samples, 4 * (2 * N_VALUES + 48))


# ---- graphs --------------------------------------------------------------------------------------------------------------


def test_graphs_pay_only_in_long_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    "Four captures in mid-stream cost about 20 ms, which 400 blocks save."
    monkeypatch.undo()
    assert 4 * device_engine.GRAPH_AFTER == 400
    monkeypatch.setattr(device_engine, "GRAPH_AFTER", 9)
    for n_blocks, n_captures in ((8, 0), (9, 1)):
        (device,) = devices = engine_of_devices(1, 0, 0.0)
        options = DeviceOptions(max_block=4, gpu_streams=1, buffers_per_stream=1)
        submit_many(devices, options, size=4, n=4 * n_blocks)
        assert device.counts["captures"] == n_captures


def test_triton_engine_uses_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    "It has three launches, so that a graph saves nothing."
    need(find_spec("triton"), "triton")
    from leakmel.mel import triton_kernel

    class Launched:
        granule = 1

        def features(self, x: torch.Tensor, mels: torch.Tensor, moments: torch.Tensor | None) -> None:
            mels.fill_(1)
            if moments is not None:
                moments.fill_(0)

    monkeypatch.setattr(triton_kernel.TritonEngine, "make_chain", lambda *_: Launched())
    device = FakeDevice()
    with triton_kernel.TritonEngine(SHORT, device=[device], options=DeviceOptions(max_block=1)) as engine:
        x = check_recording(SHORT)
        for _ in range(20):
            engine.run(x, np.zeros((1, *SHORT.row_shape), np.float16))
    assert device.counts["captures"] == 0


def test_graphs_are_captured_for_repeated_sizes() -> None:
    (device,) = devices = engine_of_devices(1, 0, 0.0)
    submit_many(devices, DeviceOptions(max_block=4, gpu_streams=1, buffers_per_stream=1), size=4, n=43)
    assert device.counts["captures"] == 1, "blocks of 4, and a tail of 3 that does not come again"
    assert device.counts["replays"] == 1 + 8, "checked once; the first two blocks went without"
    for quiet in (DeviceOptions(max_block=4, graph=False), DeviceOptions(max_block=64)):
        (device,) = devices = engine_of_devices(1, 0, 0.0)
        submit_many(devices, quiet, size=43)
        assert device.counts["captures"] == 0


@each("fault", ["does nothing", "other bits", "cannot be made", "cannot be replayed"])
def test_wrong_graph_is_detected(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    "The build goes on with launches one by one: those are what the self-check has seen."

    def capture(self: FakeDevice, stream: FakeStream, fn: Callable[[], object]) -> Callable[[], None]:
        if fault == "cannot be made":
            raise RuntimeError("operation not permitted when stream is capturing")
        if fault == "cannot be replayed":
            return lambda: (_ for _ in ()).throw(RuntimeError("no such graph"))
        return lambda: None if fault == "does nothing" else _nudged(fn)

    def _nudged(fn: Any) -> None:
        fn()
        fn.func.__self__.mels[0, 0].add_(1)  # of the buffers whose launch was captured

    monkeypatch.setattr(FakeDevice, "capture", capture)
    if fault == "cannot be replayed":  # an error on the device: nothing can be trusted any more
        with raises("device-failed", EngineError, says="no such graph"):
            result_within_limit(lambda: submit_many(engine_of_devices(1, 0), DeviceOptions(max_block=4)))
        return
    x, rows, moments = submit_many(engine_of_devices(1, 0), DeviceOptions(max_block=4))
    assert np.array_equal(rows, right_rows(x))
    assert np.array_equal(moments, moments_of(x))
    assert "continues without a CUDA graph" in caplog.text


# ---- memory that runs out --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_out_of_memory_at_any_allocation(dtype: Any, caplog: pytest.LogCaptureFixture) -> None:
    (counted,) = engine_of_devices(1, 0, 0.0)
    submit_many([counted], DeviceOptions(max_block=8), dtype=dtype)
    assert counted.counts["allocations"] >= 8
    for k in range(counted.counts["allocations"]):
        caplog.clear()
        device = FakeDevice(faults=Faults(fail_alloc=k, delay_s=0.0005))
        x, rows, moments = result_within_limit(
            partial(submit_many, [device], DeviceOptions(max_block=8), dtype=dtype)
        )
        assert np.array_equal(rows, right_rows(x))
        assert np.array_equal(moments, moments_of(x))
        assert "out of memory, continuing with blocks of 4" in caplog.text


def test_out_of_memory_in_the_chain_and_while_launching(caplog: pytest.LogCaptureFixture) -> None:
    "A library that finds no memory when it is called, as cuFFT's plans may."
    calls = itertools.count()

    class LimitedRoom(FakeDevice):
        def capture(self, stream: Any, fn: Any) -> Any:
            raise self._full()

        def stream(self) -> Any:
            made = super().stream()
            queue = made.do

            def do(fn: Callable[[], object]) -> None:
                if next(calls) in (2, 3, 9):
                    raise self._full()
                queue(fn)

            made.do = do  # type: ignore[method-assign]
            return made

        def _full(self) -> Exception:
            return FakeOutOfMemory("out of memory in a library")

    x, rows, _ = submit_many([LimitedRoom(faults=Faults(delay_s=0.001))], DeviceOptions(max_block=16), n=150)
    assert np.array_equal(rows, right_rows(x))
    assert [r.message.split("blocks of ")[1] for r in caplog.records if "blocks of" in r.message] == [
        f"{n} recordings" for n in (8, 4, 2)
    ]


def test_blocks_are_halved_down_to_the_smallest_size(caplog: pytest.LogCaptureFixture) -> None:
    row_bytes = 2 * N_VALUES
    device = FakeDevice(faults=Faults(largest_bytes=4 * 4 * TINY.n_samples))  # samples of four recordings
    x, rows, _ = submit_many([device], DeviceOptions(max_block=32))
    assert np.array_equal(rows, right_rows(x))
    assert "blocks of 4 recordings" in caplog.text
    assert "blocks of 2" not in caplog.text
    small = FakeDevice(faults=Faults(largest_bytes=5 * row_bytes))
    with raises("device-memory", EngineError, says=" 6 recordings") as caught:
        submit_many([small], DeviceOptions(max_block=32), chain=lambda: SumOfEndsChain(granule=6))
    assert "out of memory" in str(caught.value)
    all_memory_is_freed([small])


def test_out_of_memory_at_the_smallest_block_fails_the_batch() -> None:
    "A library that finds no memory for a recording: its batch says so, and its lane that it is closed."
    full = threading.Event()

    class LimitedRoom(FakeDevice):
        def stream(self) -> Any:
            made = super().stream()
            queue = made.do

            def do(fn: Callable[[], object]) -> None:
                if full.is_set():
                    raise FakeOutOfMemory("out of memory in a library")
                queue(fn)

            made.do = do  # type: ignore[method-assign]
            return made

    device = LimitedRoom()
    with DeviceEngine(
        TINY, [device], lambda device, n_block: SumOfEndsChain(), DeviceOptions(max_block=8)
    ) as engine:
        x, out = recordings(5), np.zeros((5, *TINY.row_shape), np.float16)
        lane = engine.open_lane()
        (first,) = lane.submit([(x, out)])
        full.set()
        wide, later = lane.submit([(x.astype(np.float32), out.copy()), (x, out.copy())])
        assert np.array_equal(first.wait(), moments_of(x))
        with raises("device-memory", EngineError, says=" 1 recordings"):
            wide.wait()
        with raises("device-closed", EngineError):
            later.wait()
        with raises("device-closed", EngineError):
            lane.submit([(x, out)])[0].wait()
        lane.close()
    all_memory_is_freed([device])


# ---- failures ------------------------------------------------------------------------------------------------------------


def results_after_fault(device: FakeDevice, options: DeviceOptions, *, pinned: bool) -> list[str]:
    "Results of six batches and of one more afterwards: correct rows or an error."
    try:
        engine = DeviceEngine(TINY, [device], lambda device, n_block: SumOfEndsChain(), options)
    except EngineError:
        return ["not opened"]
    with engine:
        make = engine.host_array if pinned else np.zeros
        x, out = make((18, TINY.n_samples), np.int16), make((18, *TINY.row_shape), np.float16)
        x[:], out[:] = recordings(18), np.nan
        try:
            lane = engine.open_lane(0, Timeline())
        except EngineError:
            return ["no lane"]
        output = []
        groups = [
            [(x[i : i + 3], out[i : i + 3]) for i in range(start, start + 6, 3)] for start in (0, 6, 12)
        ]
        for start, tickets in enumerate([*(lane.submit(g) for g in groups), lane.submit(groups[0][:1])]):
            for i, ticket in enumerate(tickets):
                rows = slice(6 * start + 3 * i, 6 * start + 3 * i + 3) if start < 3 else slice(0, 3)
                try:
                    moments = ticket.wait()
                except EngineError:
                    output.append("error")
                else:
                    assert np.array_equal(out[rows], right_rows(x[rows])), "success with wrong rows"
                    assert np.array_equal(moments, moments_of(x[rows]))
                    output.append("right")
        lane.close()
        return output


@pytest.mark.slow
@each(
    "options",
    [DeviceOptions(max_block=2, buffers_per_stream=1), DeviceOptions(max_block=32, async_copies=False)],
    ids=["streams", "one stream"],
)
@each("how", ["fail_call", "fail_work"])
def test_failure_of_every_operation(how: str, options: DeviceOptions) -> None:
    "Refused when it is queued, or failed on the device: an error and never a wrong row, no hang, nothing kept."
    counted = FakeDevice()
    assert results_after_fault(counted, options, pinned=True) == ["right"] * 7
    errors = 0
    for k in range(counted.counts["operations"]):
        device = FakeDevice(faults=Faults(seed=k, delay_s=0.0003 * (k % 5 == 0), **{how: k}))
        output = result_within_limit(partial(results_after_fault, device, options, pinned=k % 3 > 0))
        all_memory_is_freed([device])
        errors += "error" in output
        if how == "fail_call" and "error" in output[:-1]:
            assert output[-1] == "right", "the lane is as good as new"
        if how == "fail_work" and "error" in output:
            assert output[-1] == "error", "the device is past help"
    assert errors > counted.counts["operations"] / 2


def test_closing_with_tickets_outstanding() -> None:
    for pinned in (True, False):
        devices = engine_of_devices(2, 4)
        engine = DeviceEngine(
            TINY, list[Device](devices), lambda device, n_block: SumOfEndsChain(), DeviceOptions(max_block=4)
        )
        make = engine.host_array if pinned else np.zeros
        x, out = make((60, TINY.n_samples), np.int16), make((60, *TINY.row_shape), np.float16)
        x[:] = recordings(60)
        tickets = submitted(
            [engine.open_lane(k) for k in range(2)],
            [(x[i : i + 6], out[i : i + 6]) for i in range(0, 60, 6)],
            2,
        )
        result_within_limit(engine.close)
        assert np.array_equal(out, right_rows(x)), "what was queued has been done"
        assert np.array_equal(np.concatenate([t.wait() for t in tickets])[:6], moments_of(x[:6]))
        with raises("device-closed", EngineError):
            engine.run(x[:6], out[:6])
        result_within_limit(engine.close)
        all_memory_is_freed(devices)


def test_nan_row_fails_its_batch() -> None:
    calls = itertools.count()

    class Broken(SumOfEndsChain):
        def features(self, x: torch.Tensor, mels: torch.Tensor, moments: torch.Tensor | None) -> None:
            super().features(x, mels, moments)
            if next(calls) == 1:
                mels[2, 1, 0, 1] = np.inf

    with DeviceEngine(
        TINY,
        [FakeDevice()],
        lambda device, n_block: Broken(),
        DeviceOptions(max_block=4, graph=False, gpu_streams=1),
    ) as engine:
        x, out = recordings(12), np.zeros((12, *TINY.row_shape), np.float16)
        tickets = engine.open_lane().submit([(x[i : i + 4], out[i : i + 4]) for i in range(0, 12, 4)])
        assert np.array_equal(tickets[0].wait(), moments_of(x[:4]))
        with raises("not-a-number", EngineError, found="recording 2 of its batch"):
            tickets[1].wait()
        assert np.array_equal(tickets[2].wait(), moments_of(x[8:]))
        wide = recordings(4, dtype=np.float32)
        wide[1, 0] = np.nan
        engine.run(wide, out[:4])
        assert np.isnan(out[1]).any(), "samples that are no numbers give a row that is none"
        assert np.array_equal(out[[0, 2, 3]], right_rows(wide[[0, 2, 3]]))


def test_an_engine_that_cannot_open_a_device_closes_the_others() -> None:
    devices = [FakeDevice("fake:0"), FakeDevice("fake:1", Faults(limit_bytes=10)), FakeDevice("fake:2")]
    with raises("device-memory", EngineError, says="fake:1"):
        DeviceEngine(TINY, list[Device](devices), lambda d, n: SumOfEndsChain())
    all_memory_is_freed(devices)


def test_devices_must_give_equal_rows() -> None:
    class ByReference:
        "The reference on a device; one of its values may be a least bit off."

        granule = 1

        def __init__(self, off: bool):
            self.off = off

        def features(self, x: torch.Tensor, mels: torch.Tensor, moments: torch.Tensor | None) -> None:
            mels.copy_(torch.from_numpy(reference_log_mel(x.numpy(), TINY)))
            if self.off:
                mels.view(-1).view(torch.int16)[mels.view(-1).abs().argmin()] += 1  # within the tolerance
            if moments is not None:
                moments.copy_(torch.from_numpy(moments_of(x.numpy())))

    with DeviceEngine(TINY, open_devices("fake*2"), lambda device, n: ByReference(False)) as engine:
        self_check(engine)
    with (
        DeviceEngine(
            TINY, open_devices("fake*2"), lambda device, n: ByReference(device.name == "fake:1")
        ) as engine,
        raises("devices-differ", EngineError, says="device 1"),
    ):
        self_check(engine)


# ---- the torch engine on devices -------------------------------------------------------------------------------------------

SHORT = MelSpec.preset("overlap", duration_s=0.5)
HARD = [
    DeviceOptions(),
    DeviceOptions(graph=False),
    DeviceOptions(gpu_streams=1, buffers_per_stream=1),
    DeviceOptions(async_copies=False),
    DeviceOptions(gpu_streams=4),
]


def on_device(device: str, n: int = 0) -> list[Device]:
    "Devices by name; skips where there is no GPU."
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    if device == "cuda":
        return open_devices("cuda:0")
    return [FakeDevice(f"fake:{i}", Faults(delay_s=0.002, seed=i)) for i in range(max(1, n))]


on_each = pytest.mark.parametrize("device", ["fake", pytest.param("cuda", marks=pytest.mark.gpu)])


def test_silent_frames_beside_loud_ones(monkeypatch):
    "A transform of an odd number of real samples mixes frames on a GPU (seen on an H200), so it is not used there."

    def mixing(transform: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def mixed(x: torch.Tensor) -> torch.Tensor:
            whole = transform(x)
            is_mixed = x.shape[-1] % 2 and not x.is_complex()
            return whole + 1e-6 * whole.roll(1, dims=-2) if is_mixed else whole

        return mixed

    for name in ("rfft", "fft"):  # torch computes both with the real transform, if the samples are real
        monkeypatch.setattr(torch.fft, name, mixing(getattr(torch.fft, name)))
    spec = MelSpec(n_fft=501, n_mels=40, duration_s=2.5)
    x = np.zeros((1, spec.n_samples), np.int16)
    x[0, spec.n_samples // 3] = 32_767
    with TorchEngine(spec, device=on_device("fake")) as engine:
        out = engine.host_array((1, *spec.row_shape), np.float16)
        samples = engine.host_array(x.shape, np.int16)
        samples[:] = x
        engine.run(samples, out)
    verdict = compare(out, reference_features(x, spec), spec)
    assert verdict.ok, str(verdict)


def check_batches(
    engine: DeviceEngine, x: np.ndarray, alone: np.ndarray, size: int, accumulation: int
) -> None:
    "All rows, in batches of a size, through all lanes."
    out = engine.host_array(alone.shape, np.float16)
    samples = engine.host_array(x.shape, x.dtype.type)
    samples[:], out[:] = x, np.nan
    lanes = [engine.open_lane(k) for k in range(engine.n_lanes)]
    tickets = submitted(
        lanes, [(samples[i : i + size], out[i : i + size]) for i in range(0, len(x), size)], accumulation
    )
    assert np.array_equal(np.concatenate([t.wait() for t in tickets]), moments_of(x))
    for lane in lanes:
        lane.close()
    assert np.array_equal(out.view(np.int16), alone.view(np.int16))


@pytest.mark.slow
@on_each
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_fft": 256, "hop_length": 100, "long_hop": 700, "short_hop": 300, "n_mels": 24, "power": 1}],
    ids=["overlap", "uneven"],
)
def test_torch_rows_do_not_depend_on_batches(device: str, changes: dict[str, Any]) -> None:
    spec = MelSpec.preset("overlap", duration_s=0.5, **changes)
    rng = np.random.default_rng(2)
    x = np.concatenate(
        [check_recording(spec), rng.integers(-32_768, 32_767, (20, spec.n_samples), dtype=np.int16)]
    )
    alone: np.ndarray = np.full((len(x), *spec.row_shape), np.nan, np.float16)
    with TorchEngine(spec, device=on_device(device)) as engine:
        self_check(engine)
        for i in range(len(x)):
            engine.run(x[i : i + 1], alone[i : i + 1])
    for options, size, accumulation, n in zip(
        HARD, (1, 7, 20, 5, 21), (4, 1, 1, 3, 2), (1, 2, 1, 3, 1), strict=True
    ):
        devices = on_device(device, n)
        with TorchEngine(spec, device=devices, options=options) as engine:
            check_batches(engine, x, alone, size, accumulation)
            check_batches(engine, (x / np.float32(32_768)).astype(np.float32), alone, size, accumulation)
        all_memory_is_freed([d for d in devices if isinstance(d, FakeDevice)])


@on_each
@pytest.mark.parametrize("long_hop", [512, 700], ids=["even", "uneven"])
def test_torchaudio_rows_do_not_depend_on_batches(device: str, long_hop: int) -> None:
    "The transform of torchaudio in blocks, batches of several sizes, int16 and float32."
    if find_spec("torchaudio") is None:
        pytest.skip("torchaudio is not installed here")
    spec = MelSpec.preset("overlap", duration_s=0.5, long_hop=long_hop)
    rng = np.random.default_rng(2)
    noise = rng.integers(-32_768, 32_767, (20, spec.n_samples), dtype=np.int16)
    x = np.concatenate([check_recording(spec), noise])
    alone: np.ndarray = np.full((len(x), *spec.row_shape), np.nan, np.float16)
    from leakmel.mel.torch_engine import TorchaudioEngine

    with TorchaudioEngine(spec, device=on_device(device)) as engine:
        self_check(engine)
        assert engine.identity.startswith(f"torchaudio@1/{device}")
        for i in range(len(x)):
            engine.run(x[i : i + 1], alone[i : i + 1])
        check_batches(engine, x, alone, 7, 2)
        check_batches(engine, (x / np.float32(32_768)).astype(np.float32), alone, 20, 1)


def test_torchaudio_rows_need_full_float32_products() -> None:
    "The transform multiplies float32 matrices, which a setting of the process may make less precise."
    if find_spec("torchaudio") is None:
        pytest.skip("torchaudio is not installed here")
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with raises("float32-precision", EngineError, found="'tf32'"):
            open_engine("torchaudio", SHORT, device="fake")
    finally:
        matmul.fp32_precision = before
    open_engine("torchaudio", SHORT, device="fake").close()


def test_torch_engine_out_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    "At each allocation of a chain and its flights: the chain needs all its buffers whatever the block, so it is opened at the second try."
    counted = FakeDevice()
    with TorchEngine(SHORT, device=[counted], options=DeviceOptions(max_block=4096)) as engine:
        n = counted.counts["allocations"]
    for k in range(0, n, 3):
        device = FakeDevice(faults=Faults(fail_alloc=k))
        with TorchEngine(SHORT, device=[device], options=DeviceOptions(max_block=4096)) as engine:
            self_check(engine)
        all_memory_is_freed([device])
    assert "out of memory" in caplog.text


def precision_recordings(spec: MelSpec) -> np.ndarray:
    "Test recordings: noise, and a tone at full scale over noise of 1 LSB, [2, N] int16."
    n = spec.n_samples
    rng = np.random.default_rng(7)
    tone = 32_766 * np.sin(2 * np.pi * (spec.n_fft // 5 + 0.3) / spec.n_fft * np.arange(n) + 0.3)
    noise = np.clip(rng.normal(0, 3000, n), -32_768, 32_767)
    return np.stack([noise, tone + rng.integers(-1, 2, n)]).round().astype(np.int16)


@on_each
def test_float32_is_exact_enough_for_quiet_bands(device: str) -> None:
    spec = MelSpec.preset("disjoint", duration_s=2)
    x = precision_recordings(spec)
    out = np.full((2, *spec.row_shape), np.nan, np.float16)
    with TorchEngine(spec, device=on_device(device)) as engine:
        self_check(engine)
        engine.run(x, out)
        assert engine.identity.startswith(f"torch@{TorchEngine.version}/{device}")
    assert compare(out, reference_features(x, spec), spec).max_abs_db < 0.1


def test_names_of_devices() -> None:
    for name in ("toaster", "cuda*2", "auto:1", ""):
        with raises("unknown-device", UsageError, found=repr(name)):
            open_devices(name)
    with open_engine("torch", SHORT, device="fake*2", options=DeviceOptions(max_block=64)) as engine:
        assert (engine.n_lanes, engine.device, engine.identity) == (
            2,
            "fake",
            f"torch@{TorchEngine.version}/fake",
        )
    with open_engine("torch", SHORT, device="fake:3") as engine:
        assert engine.device == "fake:3"
    with open_engine("torch", SHORT, device="cpu") as engine:
        array = engine.host_array((3, 4), np.int16)
        assert (array.shape, array.dtype, array.any(), engine.host_bytes) == (
            (3, 4),
            np.dtype(np.int16),
            np.False_,
            0,
        )


def test_a_mel_product_in_tf32_cannot_happen() -> None:
    "Torch takes float32 products in TF32 where the process allows it; the chain has none."
    taken: list[torch.dtype] = []

    class Listening(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(name in str(func) for name in ("mm", "matmul", "addmv", "conv")):
                taken.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    from leakmel.mel.torch_engine import TorchChain

    device = FakeDevice()
    chain = TorchChain(SHORT, device, 64)
    x, mels, moments = (
        torch.zeros(2, SHORT.n_samples, dtype=torch.int16),
        torch.zeros(2, *SHORT.row_shape).half(),
        torch.zeros(2, 5).double(),
    )
    with Listening():
        chain.features(x, mels, moments)
    assert taken == [torch.float64]
    device.close()


# ---- the CUDA device, as far as that goes without a card -------------------------------------------------------------------


def flags_of(address: int) -> set[str]:
    "What the system knows of the memory at an address."
    for one in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, stop = (int(x, 16) for x in one.split(" ", 1)[0].split("-"))
        if start <= address < stop:
            return set(one.split("VmFlags:")[1].split())
    raise AssertionError("no memory there")


class Cudart:
    "Takes all host memory, or refuses it."

    def __init__(self, code: int = 0):
        self.code, self.held = code, dict[int, int]()

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        if not self.code:
            self.held[address] = n_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.held.pop(address) else 1


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    "CUDA's calls for host memory."
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return made


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists() or not hasattr(mmap, "MADV_HUGEPAGE"),
    reason="Linux tells what memory is like",
)
def test_pinned_memory_is_private_in_huge_pages_and_stays_with_its_process(cudart: Cudart) -> None:
    device = Device(0)
    large, small = device.pinned((3, 1 << 20), torch.float16), device.pinned((5,), torch.float64)
    assert cudart.held == {large.data_ptr(): 6 << 20, small.data_ptr(): 40}
    assert large.data_ptr() % (2 << 20) == 0
    large_flags, small_flags = flags_of(large.data_ptr()), flags_of(small.data_ptr())
    assert "hg" in large_flags
    assert "sh" not in large_flags | small_flags, "shared memory has small pages"
    assert {"dc"} <= large_flags & small_flags, "not copied at a fork"
    device.close()
    assert not cudart.held
    assert "dc" not in flags_of(large.data_ptr()) | flags_of(small.data_ptr()), "ordinary again"
    large[2, -1], small[4] = 1, 2
    assert (large.sum(), small.sum()) == (1, 2)


class Plain:
    "Memory of torch that is pinned, where the system pins some."

    def __init__(self, works: bool):
        self.works, self.zeros = works, torch.zeros

    def __call__(
        self, *shape: Any, pin_memory: bool = False, device: Any = None, **given: Any
    ) -> torch.Tensor:
        if pin_memory and not self.works:
            raise RuntimeError("CUDA error: out of memory")
        return self.zeros(*shape, **given)


@pytest.mark.parametrize("torch_can", [True, False])
def test_memory_that_cannot_be_registered(
    torch_can: bool, cudart: Cudart, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    "Torch's pinned memory takes its place, then ordinary memory; only what is pinned is entered, and one warning has the remedy."
    monkeypatch.setattr(torch, "zeros", Plain(torch_can))
    monkeypatch.setattr(FakeDevice, "pinned", Device.pinned)
    monkeypatch.setattr(FakeDevice, "is_pinned", Device.is_pinned)
    device: Any = FakeDevice()
    device._pinned, device._has_warned = {}, False
    with TorchEngine(SHORT, device=[device], options=DeviceOptions(max_block=64)) as engine:
        cudart.code = 2
        arrays = [engine.host_array((3, 5), np.int16) for _ in range(4)]
        assert engine.host_bytes == (4 * 30 if torch_can else 0)
        assert len(engine._arrays) == (4 if torch_can else 0)
        assert not any(a.any() for a in arrays)
    assert caplog.text.count("could not pin") == (0 if torch_can else 1)
    assert ("Lower max_bytes_in_flight" in caplog.text) != torch_can
    arrays[0][:] = 7
    assert arrays[0].sum() == 105, "usable after the engine is closed"


class Contexts:
    "CUDA devices of which each call uses the current one, as the driver does."

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.current, self.used = 0, list[int]()
        outer = self

        class Selected:
            def __init__(self, device: torch.device):
                self.index = device.index

            def __enter__(self) -> None:
                self.before, outer.current = outer.current, self.index

            def __exit__(self, *_: object) -> None:
                outer.current = self.before  # torch selects only a device that has a context

        class Entered(Selected):
            def __init__(self, stream: "Stream"):
                self.index = stream.device.index

            def __exit__(self, *_: object) -> None:
                super().__exit__()
                outer.used.append(self.before)  # torch selects it, which makes a context

        class Event:
            def __init__(self, **_: bool):
                pass

            def synchronize(self) -> None:
                outer.used.append(outer.current)

            def elapsed_time(self, other: "Event") -> float:
                outer.used.append(outer.current)
                return 1.0

        class Stream:
            def __init__(self, device: torch.device):
                self.device = device

            def wait_event(self, event: Event) -> None:
                outer.used.append(outer.current)

            record_event = wait_event

        for name, value in {"device": Selected, "stream": Entered, "Event": Event, "Stream": Stream}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
        monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())


@each("call", ["do", "copy", "wait", "record", "synchronize", "elapsed_time", "capture"])
def test_a_second_gpu_uses_no_context_of_the_first(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    "Each thread begins with GPU 0 as its current device."
    contexts = Contexts(monkeypatch)
    device = Device(1)
    stream, event = device.stream(), device.event()
    calls: dict[str, Callable[[], object]] = {
        "do": lambda: stream.do(lambda: contexts.used.append(contexts.current)),
        "copy": lambda: stream.copy(torch.zeros(2), torch.ones(2)),
        "wait": lambda: stream.wait(event),
        "record": lambda: stream.record(event),
        "synchronize": event.synchronize,
        "elapsed_time": lambda: event.elapsed_time(device.event()),
        "capture": lambda: device.capture(stream, lambda: None),
    }
    calls[call]()
    assert set(contexts.used) == {1}
    assert contexts.current == 0


# ---- several cards, of which some fail -------------------------------------------------------------------------------------


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    "Let this machine have cards, by compute capability; those that fail get an empty one. Returns the names of those that were opened."
    opened: list[str] = []

    def make(*capabilities: str) -> list[str]:
        def open_card(index: int) -> Device:
            faults = Faults() if capabilities[index] else Faults(fail_work=0)
            card = FakeDevice(f"cuda:{index}", faults)
            card.processor = capabilities[index] or "9.0"
            opened.append(card.name)
            return card

        monkeypatch.setattr(device_engine, "_open_device", open_card)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(engines, "may_have_cuda", lambda: True)
        return opened

    return make


@pytest.mark.parametrize(
    ("capabilities", "n_lanes", "last"),
    [
        (("9.0", "9.0", "9.0"), 3, ["cuda:0", "cuda:1", "cuda:2"]),
        (("9.0", "", "9.0"), 2, ["cuda:0", "cuda:2"]),
        (("8.0", "9.0", "9.0"), 2, ["cuda:1", "cuda:2"]),
        (("", "", "8.9"), 1, ["cuda:2"]),
    ],
)
def test_auto_leaves_out_cards_that_fail(
    cards: Callable[..., list[str]],
    capabilities: tuple[str, ...],
    n_lanes: int,
    last: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    "One broken or odd card does not cost the others."
    opened = cards(*capabilities)
    with open_engine("auto", SHORT, options=DeviceOptions(max_block=8)) as engine:
        assert (engine.name, engine.n_lanes, engine.device) == (
            "torch",
            n_lanes,
            "fake" if n_lanes > 1 else last[0],
        )
    assert opened[-n_lanes:] == last
    assert ("engine torch does not use" in caplog.text) == ("" in capabilities)


def test_auto_without_a_card_that_works_takes_the_cpu(cards: Callable[..., list[str]]) -> None:
    cards("", "")
    with open_engine("auto", SHORT) as engine:
        assert engine.device == "cpu"


def test_devices_by_several_numbers(cards: Callable[..., list[str]]) -> None:
    cards("9.0", "9.0", "9.0")
    assert [d.name for d in open_devices("cuda:2,0,2")] == ["cuda:2", "cuda:0"]
    with raises("no-device", EngineError, found="cuda:1,3"):
        open_devices("cuda:1,3")


def test_failed_gpu_is_closed_without_a_further_error(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    "What went wrong before is what has to be told."
    device = Device(0)
    device.pinned((4,), torch.int16)

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "device", fails)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    device.close()
    device.close()


def test_unused_gpu_is_not_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    "To select a card sets it up: half a second, and hundreds of megabytes of its memory."

    def touched(*_: Any) -> Any:
        raise AssertionError("touched")

    for name in ("device", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    Device(1).close()


def test_no_device_synchronisation_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    "That would break it, whichever thread does it; and a capture begins outside of inference mode."
    seen: list[tuple[str, bool]] = []

    def note(what: str) -> Callable[..., None]:
        return lambda *_: seen.append((what, device_engine._CAPTURING.locked()))

    class Graph:
        def __init__(self, *_: Any, **words: Any):
            assert words["capture_error_mode"] == "thread_local"

        def __enter__(self) -> None:
            seen.append(
                ("begin", device_engine._CAPTURING.locked() and not torch.is_inference_mode_enabled())
            )

        def __exit__(self, *_: object) -> None:
            seen.append(("end", device_engine._CAPTURING.locked() and not torch.is_inference_mode_enabled()))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", note("empty_cache"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda raw: nullcontext())
    device = Device(0)
    device.synchronize()
    device.trim()
    stream: Any = SimpleNamespace(raw=None, pool=(0, 1))
    device.capture(stream, lambda: seen.append(("work", torch.is_inference_mode_enabled())))
    assert seen == [(what, True) for what in ("synchronize", "empty_cache", "begin", "work", "end")]
    assert not device_engine._CAPTURING.locked()


# ---- on a card -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_tf32_changes_no_bit_on_a_gpu() -> None:
    (device,) = on_device("cuda")
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with TorchEngine(SHORT, device=[device]) as engine:
        x, out = check_recording(SHORT), np.zeros((2, 1, *SHORT.row_shape), np.float16)
        try:
            for i, setting in enumerate(("ieee", "tf32")):
                matmul.fp32_precision = setting
                engine.run(x, out[i])
        finally:
            matmul.fp32_precision = before
    assert np.array_equal(out[0], out[1])


@pytest.mark.gpu
def test_gpu_that_runs_out_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    "Refused at some allocations; whatever was taken is given back."
    (device,) = on_device("cuda")
    before, calls, whole = taken(), itertools.count(), device.empty

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if next(calls) in (3, 20):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(shape, dtype)

    device.empty = empty  # type: ignore[method-assign]
    x, out = np.concatenate([check_recording(SHORT)] * 300), np.zeros((300, *SHORT.row_shape), np.float16)
    with TorchEngine(SHORT, device=[device], options=DeviceOptions(max_block=4096)) as engine:
        engine.run(x, out)
    assert (out == out[0]).all()
    assert "out of memory, continuing" in caplog.text
    assert taken() == before


@pytest.mark.gpu
def test_gpu_keeps_the_order_of_streams() -> None:
    "Long and short batches in turn for a while, pinned and staged, against rows computed alone; graphs are used."
    on_device("cuda")[0].close()
    with open_engine(
        "torch", SHORT, device="cuda:0", options=DeviceOptions(max_block=64, gpu_streams=4)
    ) as engine:
        assert isinstance(engine, DeviceEngine)
        rng = np.random.default_rng(1)
        x = rng.integers(-9999, 9999, (2048, SHORT.n_samples), dtype=np.int16)
        alone: np.ndarray = np.zeros((len(x), *SHORT.row_shape), np.float16)
        engine.run(x, alone)
        began = time.perf_counter()
        for size in itertools.cycle((64, 63, 512, 1, 100)):
            check_batches(engine, x[: 64 * size], alone[: 64 * size], size, 3)
            if time.perf_counter() - began > 5:
                break
        assert any(b.graphs for b in engine.runners[0].buffers)
        assert logging.getLogger("leakmel").isEnabledFor(logging.WARNING)
