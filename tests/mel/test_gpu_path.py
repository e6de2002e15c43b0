"Whole builds over a device: the same bytes however it is used, next batches under way before the last ones are through, and nothing kept when it fails."

import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from each import each
from errors import raises
from fake_device import FakeDevice, Faults, Use, counted
from messy import write_messy

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import EngineError, LeakmelError, MachineError
from leakmel.dataset import config as run_config
from leakmel.dataset import targets
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.mel import torch_engine
from leakmel.mel.device_engine import DeviceEngine, DeviceLane
from leakmel.mel.engines import DeviceOptions

SPEC = {"sample_rate": 4096, "duration_s": 1.0}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    yield from counted(monkeypatch)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Mixed rates, encodings and faults in three splits."
    root = tmp_path_factory.mktemp("device") / "data"
    write_messy(root)
    return root


def build(root: Path, out: Path, **given: Any) -> list[lm.BuildResult]:
    config: dict[str, Any] = {
        "device": "fake",
        "monitor_interval_s": 0.0,
        "fsync": False,
        "files_per_batch": 8,
        "read_workers": 2,
    } | given
    return lm.build_all(
        root,
        out_dir=out,
        engine="torch",
        spec=SPEC,
        progress="none",
        fresh=True,
        pipeline=PipelineConfig(**config),
    )


def contents(results: list[lm.BuildResult]) -> list[bytes]:
    return [r.path.read_bytes() for r in results]


# ---- the same bytes


SETTINGS: dict[str, dict[str, Any]] = {
    "one file at a time": {"files_per_batch": 1, "slots": 3},
    "large batches": {"files_per_batch": 64},
    "one stream": {"gpu_streams": 1},
    "four streams": {"gpu_streams": 4, "read_workers": 4, "slots": 12},
    "copies on the stream of computing": {"async_copies": False},
    "no graph": {"cuda_graph": False},
    "four batches together": {"batch_accumulation": 4, "files_per_batch": 3},
    "more together than there are slots": {"batch_accumulation": 9, "slots": 4},
    "warm-up": {"warmup_slots": 5},
    "a warm-up that no split fills": {"warmup_slots": 1000, "files_per_batch": 64},
    "little memory": {"max_bytes_in_flight": 300_000},
}


@pytest.fixture(scope="module")
def right(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    "The data sets of one build, all rows of which were recomputed."
    results = build(mixed, tmp_path_factory.mktemp("right"))
    for r in results:
        assert lm.verify(r.path, root=mixed, sample=None).ok
    assert {r.summary["engine"] for r in results} == {"torch@3/fake"}
    return contents(results)


# Others of each kind, further from what is set by itself, stay in the short run.
LONG_SETTINGS = ("large batches", "one stream", "warm-up")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG_SETTINGS else []) for name in SETTINGS]
)
def test_settings_change_no_byte(mixed: Path, tmp_path: Path, right: list[bytes], name: str) -> None:
    assert contents(build(mixed, tmp_path, **SETTINGS[name])) == right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "n_devices"),
    [
        (2, 3),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2))),
    ],
)
def test_delayed_devices_do_not_change_bytes(
    mixed: Path, tmp_path: Path, right: list[bytes], devices: Callable, n_devices: int, seed: int
) -> None:
    "Every operation up to 4 ms late, on each device in another order."
    used = devices(*(Faults(delay_s=0.004, seed=seed) for _ in range(n_devices)))
    assert contents(build(mixed, tmp_path, batch_accumulation=seed)) == right
    for device in used:
        assert device.counts["launches"] > 2, "every device had a share"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["preload", "memmap"])
def test_modes_change_no_byte(
    mixed: Path, tmp_path: Path, right: list[bytes], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("LEAKMEL_CACHE_DIR", str(tmp_path / "cache"))
    results = lm.build_all(
        mixed,
        out_dir=tmp_path,
        engine="torch",
        spec=SPEC,
        progress="none",
        mode=mode,
        pipeline=PipelineConfig(device="fake", monitor_interval_s=0.0, fsync=False, files_per_batch=5),
    )
    assert contents(results) == right


@each(
    ("version", "given", "expected"),
    [(0, {}, 1 << 30), (2, {}, 256 << 20), (2, {"max_bytes_in_flight": 1 << 29}, 1 << 29)],
)
def test_wsl2_pins_less_memory_unless_told(
    monkeypatch: pytest.MonkeyPatch, version: int, given: dict[str, Any], expected: int
) -> None:
    "WSL2 pins 0.5 to 4 GB for all processes."
    monkeypatch.setattr(run_config, "wsl_version", lambda: version)
    spec = lm.MelSpec()
    with torch_engine.TorchEngine(spec, device="fake", options=DeviceOptions(max_block=8)) as engine:
        workers = run_config.plan_workers(
            PipelineConfig(device="fake", files_per_batch=64, slots=10_000, **given), spec, engine, 10**6
        )
    n_bytes = workers.slots * workers.files_per_batch * run_config.slot_bytes(spec)
    assert expected - 64 * run_config.slot_bytes(spec) < n_bytes <= expected


@each(
    ("changes", "version", "batch"),
    [({}, 0, 1024), ({"sample_rate": 16_000}, 0, 300), ({}, 2, 300)],
    ids=["usual", "long recordings", "WSL2"],
)
def test_readers_have_slots_while_others_are_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], version: int, batch: int
) -> None:
    monkeypatch.setattr(run_config, "wsl_version", lambda: version)
    engine: Any = SimpleNamespace(device="cuda:0", n_lanes=1)
    workers = run_config.plan_workers(PipelineConfig(), lm.MelSpec(**changes), engine, 10**6)
    assert workers.slots >= 2 * run_config.BATCHES_ON_DEVICE
    assert batch <= workers.files_per_batch <= 1024


# ---- nobody waits


@pytest.mark.slow
def test_slots_are_in_pinned_memory(
    demo: Path, tmp_path: Path, devices: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    "Allocated once, used again by every split, and said."
    (_device,) = devices(Faults())
    most = [0]
    real = FakeDevice.pinned

    def pinned(self, shape, dtype):
        made = real(self, shape, dtype)
        most[0] = max(most[0], self.counts["pinned_bytes"])
        return made

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, "leakmel"):
        patch.setattr(FakeDevice, "pinned", pinned)
        results = lm.build_all(
            demo,
            out_dir=tmp_path,
            engine="torch",
            progress="none",
            pipeline=PipelineConfig(
                device="fake", files_per_batch=4, slots=5, read_workers=1, monitor_interval_s=0.0
            ),
        )
    slot = 4 * 2 * (results[0].summary["spec"]["sample_rate"] * 10 + 40 * 2 * 64)
    assert [r.summary["pinned_bytes"] for r in results] == [5 * slot] * 3
    assert most[0] < 5 * slot + 500_000, "and nothing else but small results: no staging"
    assert [r.summary["pinned"] for r in results] == ["allocated", "reused", "reused"]


@pytest.mark.slow
def test_the_next_split_is_read_before_the_last_one_is_written(
    demo: Path, tmp_path: Path, devices: Callable
) -> None:
    devices(Faults(delay_s=0.01, seed=3))
    results = lm.build_all(
        demo,
        out_dir=tmp_path,
        engine="torch",
        progress="none",
        pipeline=PipelineConfig(
            device="fake", files_per_batch=4, slots=5, read_workers=1, monitor_interval_s=0.0
        ),
    )
    spans = results[0].timeline.spans

    def times(split: str, stage: str) -> list[tuple[float, float]]:
        return [(s.start_s, s.end_s) for s in spans if (s.split, s.stage) == (split, stage)]

    for last, following in (("TRAINING", "VALIDATION"), ("VALIDATION", "TESTING")):
        assert min(times(following, "read"))[0] < max(times(last, "write"))[1], (
            f"{following} waited for {last}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("n_devices", "together"), [(2, 1), (1, 5)])
def test_timeline_separates_copies_and_computing(
    demo: Path, tmp_path: Path, devices: Callable, n_devices: int, together: int
) -> None:
    # late, so that one device does not take all batches; on a busy machine it may, so there are several tries
    used = devices(*(Faults(delay_s=0.004, seed=k) for k in range(n_devices)))
    names = {device.name for device in used}
    for k in range(100):
        spans = build(demo, tmp_path / str(k), batch_accumulation=together, slots=12)[0].timeline.spans
        lanes = {s.lane for s in spans if s.stage in ("copy_in", "compute", "copy_out")}
        assert lanes <= names
        if lanes == names:
            break
    assert lanes == names
    for split in ("TRAINING", "VALIDATION", "TESTING"):
        stages = ("read", "copy_in", "compute", "copy_out", "write")
        n_files = {
            stage: sum(s.n_files for s in spans if (s.stage, s.split) == (stage, split)) for stage in stages
        }
        assert len(set(n_files.values())) == 1, (split, n_files)
    assert all(s.end_s >= s.start_s for s in spans)


def submissions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    "Batches handed to the engine together, and slots filled until then, from now on."
    seen: list[tuple[int, int]] = []
    filled = [0]
    real_submit, real_read = DeviceLane.submit, targets._read

    def submit(self, batches, **named):
        if threading.current_thread().name.startswith("leakmel-engine"):
            seen.append((len(batches), filled[0]))  # and not the self-check
        return real_submit(self, batches, **named)

    def read(*a):
        real_read(*a)
        filled[0] += 1

    monkeypatch.setattr(DeviceLane, "submit", submit)
    monkeypatch.setattr(targets, "_read", read)
    return seen


def test_accumulated_batches_are_launched_together(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Four at a time as they come; a group ends where its split does."
    seen = submissions(monkeypatch)
    build(demo, tmp_path, batch_accumulation=4, files_per_batch=4, read_workers=1)
    splits = [k for k, listing in enumerate(lm.scan(demo).listings) for _ in range(-(-len(listing) // 4))]
    groups = [splits[i : i + 4] for i in range(0, len(splits), 4)]
    assert [n for n, _ in seen] == [group.count(k) for group in groups for k in dict.fromkeys(group)]
    assert max(n for n, _ in seen) == 4


@pytest.mark.parametrize("warmup", [1, 4])
def test_device_starts_when_a_group_of_batches_is_read(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup: int
) -> None:
    seen = submissions(monkeypatch)
    real, n_read, until = targets._read, [0], time.monotonic() + 30

    def slowly(*a):
        if n_read[0] < warmup:
            time.sleep(
                0.01
            )  # so that a device that did not wait would be ahead; one that waits for more than it is told to is late
        while n_read[0] >= warmup and not seen and time.monotonic() < until:
            time.sleep(0.002)
        real(*a)
        n_read[0] += 1

    monkeypatch.setattr(targets, "_read", slowly)
    build(demo, tmp_path, warmup_slots=warmup, files_per_batch=4, read_workers=1, slots=8)
    assert seen[0][1] == warmup


# ---- when it fails


@pytest.fixture(scope="module")
def old(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Data sets of an earlier build."
    folder = tmp_path_factory.mktemp("old") / "out"
    build(demo, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "k"),
    [
        pytest.param(
            kind,
            k,
            marks=[]
            if (kind, k) in (("fail_call", 0), ("fail_work", 7), ("fail_work", 90))
            else pytest.mark.long,
        )
        for kind in ("fail_call", "fail_work")
        for k in (0, 7, 20, 60, 90)
    ],
)
def test_a_failing_device_fails_the_build_and_nothing_else(
    demo: Path, tmp_path: Path, devices: Callable, old: Path, kind: str, k: int
) -> None:
    shutil.copytree(old, tmp_path / "out")
    devices(replace(Faults(delay_s=0.002), **{kind: k}))
    with pytest.raises(LeakmelError) as caught:
        build(demo, tmp_path / "out")
    assert "fake" in str(caught.value)
    files = sorted(tmp_path.glob("out/*"))
    assert [p.name for p in files if p.suffix == ".H5"] == [
        "TESTING_DATASET.H5",
        "TRAINING_DATASET.H5",
        "VALIDATION_DATASET.H5",
    ]
    assert not [p for p in files if "partial" in p.name or "lock" in p.name]
    assert [p.read_bytes() for p in files if p.suffix == ".H5"] == [
        p.read_bytes() for p in sorted(old.glob("*.H5"))
    ]


@pytest.mark.slow
def test_device_memory_that_runs_out_makes_blocks_smaller(
    mixed: Path, tmp_path: Path, right: list[bytes], devices: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    devices(Faults(largest_bytes=2_000_000))
    assert contents(build(mixed, tmp_path, files_per_batch=32)) == right
    assert "out of memory, continuing with blocks of" in caplog.text


def test_out_of_device_memory_is_reported(demo: Path, tmp_path: Path, devices: Callable) -> None:
    devices(Faults(limit_bytes=1000))
    with raises("device-memory", EngineError):
        build(demo, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.int16, np.float32])
def test_out_of_host_memory_is_reported(
    mixed: Path, tmp_path: Path, devices: Callable, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    "When slots are made, and when one of them meets its first wide recording."
    devices(Faults())
    real = DeviceEngine.host_array

    def host_array(self, shape, dtype):
        if dtype is kind:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")  # as mapping memory says it
        return real(self, shape, dtype)

    monkeypatch.setattr(DeviceEngine, "host_array", host_array)
    with pytest.raises(MachineError, match=r"out of memory.*[Ll]ower files_per_batch, slots"):
        build(mixed, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_device_is_busy(
    demo: Path, tmp_path: Path, devices: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(Faults(delay_s=0.02, seed=5))
    begun, pressed = threading.Event(), threading.Event()
    real, real_wait = DeviceLane.submit, threading.Event.wait

    def submit(self, batches, **named):
        tickets = real(self, batches, **named)
        if threading.current_thread().name.startswith("leakmel-engine"):  # and not the self-check
            begun.set()
            real_wait(pressed, 60)  # else the build may be through before the main thread has its turn
        return tickets

    monkeypatch.setattr(DeviceLane, "submit", submit)

    def wait(self, timeout=None):
        if timeout == 0.2 and real_wait(begun, 60):
            pressed.set()
            raise KeyboardInterrupt
        return real_wait(self, timeout)

    monkeypatch.setattr(threading.Event, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        build(demo, tmp_path)
    assert {p.name.rsplit(".", 1)[1] for p in tmp_path.iterdir()} <= {"journal", "partial"}, (
        "or nothing, where the signal came before the first row"
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", ["release_buffers", "drain"])
def test_ctrl_c_while_an_engine_is_closed(
    devices: Callable, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    "Every device is given back all the same."
    from leakmel.mel.device_engine import DeviceRunner

    once = [True]
    real = getattr(DeviceRunner, step)

    def interrupted(self, *a):
        real(self, *a)
        if once and (step != "rest" or self.closed):
            once.clear()
            raise KeyboardInterrupt

    fresh = devices(Faults(), Faults())
    engine = torch_engine.TorchEngine(lm.MelSpec(), device="fake")
    monkeypatch.setattr(DeviceRunner, step, interrupted)
    if step == "rest":
        engine.runners[0].closed = "about to be"
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert not once
    assert [d.counts["pinned_bytes"] for d in fresh] == [0, 0]


def test_an_unknown_device_is_an_error_of_use(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        main(
            [
                "build",
                str(demo),
                "--split",
                "training",
                "--out",
                str(tmp_path / "x.h5"),
                "--device",
                "toaster",
                "--quiet",
            ]
        )
        == 2
    )
    assert "no device has this name" in capsys.readouterr().err
    assert "was skipped" not in caplog.text


def test_auto_takes_the_first_engine_that_can(
    demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "leakmel"):
        r = lm.build(
            demo,
            split="testing",
            out=tmp_path / "x.h5",
            progress="none",
            pipeline=PipelineConfig(device="fake", monitor_interval_s=0.0),
        )
    assert r.summary["engine"] == "torch@3/fake"
    assert "was skipped" not in caplog.text
