"Rehearsed devices whose memory is counted, and the memory of a card: shared by the tests of what computes on devices."

import gc
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from leakmel.mel.rehearsal import Faults, HostDevice

Use = Callable[..., list[HostDevice]]


def counted(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Iterator[Use]:
    "Decide which rehearsed devices a module opens from now on; at the end, none of them holds memory and no thread is left."
    made: list[HostDevice] = []

    def use(*faults: Faults) -> list[HostDevice]:
        fresh = [HostDevice(f"rehearsal:{i}", f) for i, f in enumerate(faults)]
        made.extend(fresh)
        monkeypatch.setattr(module, "open_devices", lambda name: fresh)
        return fresh

    yield use
    for device in made:
        device.error = None
    gc.collect()  # errors hold frames, and frames what they worked on
    for device in made:
        assert (device.counts["device_bytes"], device.counts["pinned_bytes"]) == (0, 0)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("leakmel")]


def taken() -> int:
    "Bytes in use on the card, what its library of matrix products keeps for each stream left out."
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()
