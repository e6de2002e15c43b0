"""A fake GPU on the CPU: streams, events, pinned memory and graphs made of threads, as asynchronous as a card, with faults on request.

`leakmel.mel.engines.DEVICES` is where kinds of devices are registered. tests/conftest.py adds this one:
`DEVICES["fake"] = ("fake_device", "open_fake")`. Then `device="fake"`, `"fake:1"` and `"fake*3"` (three devices) work wherever a
device has a name, also in `lm.build`. Only numpy, torch and leakmel are imported here.
"""

import gc
import random
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from left_threads import left_threads

from leakmel.mel.device_engine import Device
from leakmel.mel.engines import DEVICES
from leakmel.mel.torch_engine import one_thread

Work = Callable[[], object]
Use = Callable[..., list["FakeDevice"]]


class FakeOutOfMemory(RuntimeError):
    "The fake device has no room."


class FakeFault(RuntimeError):
    "A failure that was ordered."


@dataclass(frozen=True)
class Faults:
    "Faults of a fake device; operations and allocations are counted from 0."

    delay_s: float = 0.0  # each operation may come as much as this late
    seed: int = 0  # of the delays
    limit_bytes: int = 1 << 28  # device memory; it is filled with NaN, so more of it takes time
    fail_alloc: int | None = None  # allocation of device memory for which there is no room
    fail_call: int | None = None  # operation that is refused when it is queued
    fail_work: int | None = None  # operation that fails when its turn comes
    largest_bytes: int | None = None  # no single piece of device memory may be larger


class Mark:
    "One recording of an event."

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.time_s = 0.0
        self.error: Exception | None = None


class FakeEvent:
    "A point in a stream."

    def __init__(self) -> None:
        self.mark: Mark | None = None

    def synchronize(self) -> None:
        "Block until the stream has come here; raises what went wrong before."
        if (mark := self.mark) is None:
            return
        mark.passed.wait()
        if mark.error is not None:
            raise FakeFault(str(mark.error))  # a new one each time: a traceback holds what its frames hold

    def elapsed_time(self, end: "FakeEvent") -> float:
        "Milliseconds from this event to another one; both have been passed."
        if self.mark is None or end.mark is None:
            raise RuntimeError("an event that was never recorded has no time")
        return 1e3 * (end.mark.time_s - self.mark.time_s)


class FakeStream:
    "A thread that does what is queued, in order."

    def __init__(self, device: "FakeDevice", number: int):
        self._device = device
        self._queue: SimpleQueue[tuple[int, Work, Mark | None] | None] = SimpleQueue()
        self._delays = random.Random(f"{device.faults.seed} {device.name} {number}")
        self._thread = threading.Thread(target=self._run, name=f"leakmel-{device.name}-{number}", daemon=True)
        self._thread.start()

    def do(self, fn: Work) -> None:
        "Queue a launch."
        self._device.counts["launches"] += 1
        self._put(fn)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        "Queue a copy; wait for it, as CUDA does, where the array of the host is not pinned."
        self._device.counts["copies"] += 1
        if self._device.is_pinned(target) or self._device.is_pinned(source):
            self._put(lambda: target.copy_(source))
            return
        self._device.counts["waits"] += 1
        mark = Mark()
        self._put(lambda: target.copy_(source), mark)
        mark.passed.wait()

    def wait(self, event: FakeEvent) -> None:
        "Let what is queued from now on wait for an event."
        if (mark := event.mark) is not None:
            self._put(mark.passed.wait)

    def record(self, event: FakeEvent) -> None:
        "Mark this place in the queue."
        mark = Mark()
        self._put(lambda: None, mark)
        event.mark = mark

    def close(self) -> None:
        "End the thread when its queue is empty."
        self._queue.put(None)
        self._thread.join()

    def _put(self, work: Work, mark: Mark | None = None) -> None:
        self._queue.put((self._device.issue(), work, mark))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            number, work, mark = item
            try:
                if self._device.error is None:
                    self._work(number, work)
            except Exception as e:
                self._device.error = self._device.error or as_fault(e)
            if mark is not None:
                mark.time_s = time.perf_counter()
                mark.error = self._device.error
                mark.passed.set()
            del item, work, mark  # or what they hold would stay until the next one comes

    def _work(self, number: int, work: Work) -> None:
        faults = self._device.faults
        if faults.delay_s and self._delays.random() < 0.5:
            time.sleep(self._delays.random() * faults.delay_s)
        if number == faults.fail_work:
            raise FakeFault(f"operation {number} failed on {self._device.name}")
        with torch.inference_mode(), one_thread():
            work()


def as_fault(error: Exception) -> FakeFault:
    "An error as a device reports it, without the frames it came from: they hold memory."
    return FakeFault(str(error) if isinstance(error, FakeFault) else f"{type(error).__name__}: {error}")


PINNED: dict[int, int] = {}  # address -> bytes, of all fake devices


class FakeDevice(Device):
    "A CPU that behaves like a GPU, with faults and with counts of what it did."

    kind = "fake"

    def __init__(self, name: str = "fake:0", faults: Faults | None = None):
        self.name = name
        self.torch_device = torch.device("cpu")
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        self.error: Exception | None = None  # from then on nothing is done
        self._lock = threading.RLock()
        self._held: dict[int, torch.Tensor] = {}  # pinned, by address
        self._streams: list[FakeStream] = []

    def issue(self) -> int:
        "The number of the next operation; raises where it is to be refused."
        with self._lock:
            number = self.counts["operations"]
            self.counts["operations"] += 1
        if number == self.faults.fail_call:
            raise FakeFault(f"operation {number} was refused by {self.name}")
        return number

    def free_bytes(self) -> int:
        "Device memory that is left."
        return self.faults.limit_bytes - self.counts["device_bytes"]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        "Device memory that holds NaN; it is counted, and given back when nobody holds it."
        made = torch.empty(shape, dtype=dtype, device="meta")
        n_bytes = made.numel() * made.element_size()
        with self._lock:
            number = self.counts["allocations"]
            self.counts["allocations"] += 1
            too_big = self.faults.largest_bytes is not None and n_bytes > self.faults.largest_bytes
            if number == self.faults.fail_alloc or too_big or n_bytes > self.free_bytes():
                raise FakeOutOfMemory(
                    f"out of memory: {n_bytes} bytes asked for, {self.free_bytes()} free on {self.name}"
                )
            self.counts["device_bytes"] += n_bytes
        if not n_bytes:
            return torch.empty(shape, dtype=dtype)
        memory = np.full(n_bytes, 0xFF, np.uint8)  # NaN in every format of floats
        weakref.finalize(memory, self._count, "device_bytes", -n_bytes).atexit = False
        return torch.from_numpy(memory).view(dtype).view(shape)

    def _count(self, name: str, by: int) -> None:
        with self._lock:
            self.counts[name] += by

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        "A copy in device memory."
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        "Host memory from which the device copies by itself, zeroed."
        try:
            made = torch.zeros(shape, dtype=dtype)
        except RuntimeError as e:
            raise MemoryError(str(e)) from e  # what torch says of it
        if made.nbytes:
            self._held[made.data_ptr()] = made
            PINNED[made.data_ptr()] = made.nbytes
        self._count("pinned_bytes", made.nbytes)
        return made

    def unpin(self, tensor: torch.Tensor) -> None:
        "Make pinned memory ordinary again."
        if self._held.pop(tensor.data_ptr(), None) is not None:
            self._count("pinned_bytes", -PINNED.pop(tensor.data_ptr()))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        "Whether a tensor lies in pinned memory."
        first = tensor.data_ptr()
        last = first + tensor.nbytes
        return any(start <= first and last <= start + n for start, n in list(PINNED.items()))

    def stream(self) -> FakeStream:
        "A new stream."
        self._streams.append(FakeStream(self, len(self._streams)))
        return self._streams[-1]

    def event(self) -> FakeEvent:
        "A new event."
        return FakeEvent()

    def capture(self, stream: FakeStream, fn: Work) -> Callable[[], None]:
        "A graph of what `fn` launches; calling it inside `stream.do` replays it."
        self.issue()
        self.counts["captures"] += 1

        def replay() -> None:
            self._count("replays", 1)
            fn()

        return replay

    def synchronize(self) -> None:
        "Block until all streams are idle; raises what went wrong."
        for stream in self._streams:
            event = self.event()
            stream.record(event)
            event.synchronize()

    def ran_out(self, error: BaseException) -> bool:
        "Whether an error means that device memory ran out."
        return isinstance(error, FakeOutOfMemory)

    def trim(self) -> None:
        "Nothing: memory is free when nobody holds it."

    def close(self) -> None:
        "End the streams and make pinned memory ordinary again."
        while self._streams:
            self._streams.pop().close()
        for tensor in list(self._held.values()):
            self.unpin(tensor)


def open_fake(
    device: str,  # "fake", "fake:1", or "fake*3" for three
) -> list[FakeDevice]:
    "Open fake devices by name."
    found = re.fullmatch(r"fake(?::(\d{1,3})|\*([1-9]\d?))?", device)
    assert found, device
    numbers = [int(found[1])] if found[1] else range(int(found[2] or 1))
    return [FakeDevice(f"fake:{i}") for i in numbers]


def register() -> None:
    "Let `device='fake'` name a fake device; tests/conftest.py says the same without importing torch."
    DEVICES["fake"] = (__name__, "open_fake")


def counted(monkeypatch: Any) -> Iterator[Use]:
    "Decide which fake devices are opened from now on; at the end, none of them holds memory and no thread is left."
    made: list[FakeDevice] = []
    fresh: list[FakeDevice] = []

    def use(*faults: Faults) -> list[FakeDevice]:
        fresh[:] = [FakeDevice(f"fake:{i}", f) for i, f in enumerate(faults)]
        made.extend(fresh)
        monkeypatch.setattr(f"{__name__}.open_fake", lambda name: list(fresh))
        return list(fresh)

    yield use
    for device in made:
        device.error = None
    gc.collect()  # errors hold frames, and frames what they worked on
    for device in made:
        assert (device.counts["device_bytes"], device.counts["pinned_bytes"]) == (0, 0)
    assert not left_threads()


def taken() -> int:
    "Bytes in use on the card, what its library of matrix products keeps for each stream left out."
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()
