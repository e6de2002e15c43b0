"""What each part of the GPU path is worth: kernel, bus, launches, settings.

python nbs/benchmarks/bench_gpu_design.py WORK [--out FOLDER] [--budget-s S]    on a machine with a GPU; without Jupyter
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from bench_gpu import (
    GEOMETRIES,
    LogLine,
    bench_gpu,
    build_once,
    geometry_spec,
    geometry_words,
    gpu_table,
    log_nothing,
)

from leakmel.core.errors import EngineError, LeakmelError
from leakmel.extras.machine.bench import spread, spreads, store, synthetic_set_of_size
from leakmel.mel.engines import ENGINES, DeviceOptions
from leakmel.mel.spec import MelSpec


def timed(
    device: Any,  # a mel.device.Device
    stream: Any,
    work: Callable[[], object],  # launches something
    *,
    window_s: float = 0.1,
    windows: int = 5,
) -> list[float]:  # seconds per launch, one value per window
    "Measure the duration of work on a device with its own events."
    begin, end = device.event(), device.event()

    def window(n: int) -> float:
        stream.record(begin)
        for _ in range(n):
            stream.do(work)
        stream.record(end)
        end.synchronize()
        return max(1e-3 * begin.elapsed_time(end), 1e-9) / n

    window(3)  # the first time compiles and warms
    n = max(1, min(10_000, round(window_s / window(3))))
    return [window(n) for _ in range(windows)]


def copy_alone(device: str, sizes: list[int], window_s: float) -> dict[str, Any]:
    "Return GB/s of plain pinned copies by size: to the device (`in`), and from it (`out`)."
    import torch

    from leakmel.mel.device_engine import open_devices

    on, found = open_devices(device)[0], dict[str, Any]()
    try:
        for n_bytes in sizes:
            host, there = on.pinned((n_bytes,), torch.uint8), on.empty((n_bytes,), torch.uint8)
            if not on.is_pinned(host):
                raise EngineError(
                    "CUDA cannot pin host memory", code="device-failed", found=f"{n_bytes:,} bytes"
                )
            on.synchronize()
            rates = {}
            for way, target, source in (("in", there, host), ("out", host, there)):
                copy = partial(target.copy_, source, non_blocking=True)
                times = timed(on, on.stream(), copy, window_s=window_s)
                rates[way] = [n_bytes / s / 1e9 for s in times]
            on.unpin(host)
            found[str(n_bytes)] = rates
        return found
    finally:
        on.close()


def kernel_alone(engine: str, device: str, name: str, n_block: int, window_s: float) -> dict[str, Any]:
    "Return recordings per second of the chain of launches on a block that lies on the device."
    spec, (module, kind) = geometry_spec(name), ENGINES[engine]
    options = DeviceOptions(gpu_streams=1, buffers_per_stream=1, max_block=n_block)
    with getattr(import_module(module), kind)(spec, device=device, options=options) as opened:
        runner = opened.runners[0]
        buffers, on, n = runner.buffers[0], runner.device, runner.n_block
        launch = partial(buffers.chain.features, *block_on_device(on, spec, n))
        one_by_one = timed(on, buffers.stream, launch, window_s=window_s)
        try:
            by_graph = timed(on, buffers.stream, on.capture(buffers.stream, launch), window_s=window_s)
        except Exception:
            by_graph = []  # a chain that cannot be captured
    return {
        "n_block": n,
        "one_by_one": [n / s for s in one_by_one],
        "by_graph": [n / s for s in by_graph] or None,
    }


def block_on_device(on: Any, spec: MelSpec, n: int) -> tuple[Any, Any, Any]:
    "Return samples, and room for features and moments, on a device."
    import torch

    x = on.empty((n, spec.n_samples), torch.int16)
    x.copy_(torch.from_numpy(np.random.default_rng(13).normal(0, 3000, x.shape).astype(np.int16)))
    mels = on.empty((n, *spec.row_shape), torch.float16)
    moments = on.empty((n, 5), torch.float64)
    on.synchronize()
    return x, mels, moments


def block_work(
    spec: MelSpec,
) -> tuple[int, int]:  # of one recording: bytes to and from device memory, half-precision operations
    "Return the least work of the fused kernel."
    n_bins = spec.n_fft // 2 + 1
    per_frame = 2 * 3 * 2 * (spec.n_fft // 2) * n_bins + 2 * 3 * n_bins * spec.n_mels
    return 2 * spec.n_samples + 2 * int(np.prod(spec.row_shape)) + 40, len(spec.grid.distinct[0]) * per_frame


def both_ways(device: str, n_bytes: int, window_s: float) -> dict[str, list[float]]:
    "GB/s each way of pinned copies while the other way is in use."
    import torch

    from leakmel.mel.device_engine import open_devices

    on = open_devices(device)[0]
    try:
        host, back = on.pinned((n_bytes,), torch.uint8), on.pinned((n_bytes,), torch.uint8)
        here, there = on.empty((n_bytes,), torch.uint8), on.empty((n_bytes,), torch.uint8)
        on.synchronize()
        rates = _both_ways(on, (here, host), (back, there), n_bytes, window_s)
        on.unpin(host)
        on.unpin(back)
        return {"both_each_way": rates}
    finally:
        on.close()


def _both_ways(
    on: Any, way_in: tuple[Any, Any], way_out: tuple[Any, Any], n_bytes: int, window_s: float
) -> list[float]:
    "Return GB/s each way while the other way is in use."
    first, second, found = on.stream(), on.stream(), []
    begin, end, other = on.event(), on.event(), on.event()
    n = max(2, round(window_s * 2e10 / n_bytes))
    for _ in range(3):
        first.record(begin)
        second.wait(begin)
        for _ in range(n):
            first.copy(*way_in)
            second.copy(*way_out)
        second.record(other)
        first.wait(other)
        first.record(end)
        end.synchronize()
        found.append(n * n_bytes / max(1e-3 * begin.elapsed_time(end), 1e-9) / 1e9)
    return found


def card_alone(device: str, n_bytes: int, n_matrix: int, window_s: float) -> dict[str, Any]:
    "Return bytes per second, read and written, of a copy on the device, and operations per second of a float16 matrix product."
    import torch

    from leakmel.mel.device_engine import open_devices

    on = open_devices(device)[0]
    try:
        stream, a, b = on.stream(), on.empty((n_bytes,), torch.uint8), on.empty((n_bytes,), torch.uint8)
        x, y, z = (on.empty((n_matrix, n_matrix), torch.float16).zero_() for _ in range(3))
        x.normal_()
        y.normal_()
        on.synchronize()
        copies = timed(on, stream, lambda: a.copy_(b), window_s=window_s)
        products = timed(on, stream, lambda: torch.matmul(x, y, out=z), window_s=window_s)
    finally:
        on.close()
    return {
        "memory_bytes_per_s": [2 * n_bytes / s for s in copies],
        "float16_per_s": [2 * n_matrix**3 / s for s in products],
    }


LAUNCHES = (
    (128, 8, 3),
    (128, 8, 2),
    (128, 8, 4),
    (128, 4, 3),
    (64, 4, 3),
    (64, 4, 4),
    (64, 2, 3),
    (256, 8, 3),
)  # rows, warps, stages


def launches(device: str, name: str, n_block: int, window_s: float) -> dict[str, Any]:
    "Recordings per second of the fused kernel alone, by rows, warps and stages."
    import torch

    from leakmel.mel.device_engine import open_devices
    from leakmel.mel.triton_kernel import TritonChain, launch_for

    spec, on, found = geometry_spec(name), open_devices(device)[0], dict[str, Any]()
    try:
        x, mels, moments = block_on_device(on, spec, n_block)
        stream, right = on.stream(), None
        for rows, warps, stages in LAUNCHES:
            mels.fill_(torch.nan)
            on.synchronize()
            try:
                shape = replace(
                    launch_for(on.torch_device), rows=rows, warps=warps, stages=stages, float_stages=stages
                )
                chain = TritonChain(spec, on.torch_device, n_block, launch=shape)
                times = timed(on, stream, partial(chain.features, x, mels, moments), window_s=window_s)
                right = mels.clone() if right is None else right
                found[f"{rows} rows, {warps} warps, {stages} stages"] = {
                    "recordings_per_s": [n_block / s for s in times],
                    "same_bits": torch.equal(mels.view(torch.int16), right.view(torch.int16)),
                }
            except Exception as e:
                found[f"{rows} rows, {warps} warps, {stages} stages"] = {
                    "error": f"{type(e).__name__}: {e}"[:200]
                }
        return found
    finally:
        on.close()


def reuse(engine: str, device: str, name: str, n: int, batches: int) -> dict[str, list[float]]:
    "Seconds per batch of `n` recordings with an engine that is kept, and with one made for each batch."
    module, kind = ENGINES[engine]
    make, spec = getattr(import_module(module), kind), geometry_spec(name)
    x = np.random.default_rng(14).normal(0, 3000, (n, spec.n_samples)).astype(np.int16)

    def batch(opened: Any, samples: np.ndarray, out: np.ndarray) -> None:
        samples[:] = x
        opened.run(samples, out)

    def anew(spec: MelSpec) -> None:
        with make(spec, device=device) as opened:
            batch(
                opened,
                opened.host_array(x.shape, np.int16),
                opened.host_array((n, *spec.row_shape), np.float16),
            )

    def seconds(work: Callable[[], None]) -> list[float]:
        times = [time.perf_counter()]
        for _ in range(batches + 1):
            work()
            times.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(times)]  # the first one warms

    with make(spec, device=device) as opened:
        samples, out = (
            opened.host_array(x.shape, np.int16),
            opened.host_array((n, *spec.row_shape), np.float16),
        )
        kept = seconds(lambda: batch(opened, samples, out))
    return {
        "kept": kept,
        "made for each batch": seconds(lambda: anew(spec)),
        "and the filter bank too": seconds(lambda: anew(replace(spec))),
    }


COPY_SIZES = (1 << 20, 8 << 20, 42 << 20, 256 << 20)  # bytes
_ROOM = ("--max-bytes-in-flight", str(4 << 30))
VARIED: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "graph off": ("--no-cuda-graph",),
    "async copies off": ("--no-async-copies",),
    "accumulation 4": ("--batch-accumulation", "4"),
    "streams 1": ("--gpu-streams", "1"),
    "fsync on": ("--fsync",),
    "check off": ("--check", "0"),
    "monitor off": ("--monitor-interval-s", "0"),
    "streams 4": ("--gpu-streams", "4"),
    "streams 8": ("--gpu-streams", "8"),
    **{f"batch {n}": ("--files-per-batch", str(n), *_ROOM) for n in (128, 256, 1024, 2048)},
    **{f"readers {n}": ("--read-workers", str(n)) for n in (4, 8, 32)},
    **{f"writers {n}": ("--write-workers", str(n)) for n in (1, 2, 8)},
    **{f"slots {n}": ("--slots", str(n), *_ROOM) for n in (6, 12, 40)},
    "warm-up 8": ("--warmup-slots", "8"),
    "4 GB in flight": _ROOM,
    "mode preload": ("--mode", "preload"),
    "mode memmap, first": ("--mode", "memmap"),
    "mode memmap, later": ("--mode", "memmap"),
}  # options of `leakmel build`

Part = tuple[str, str, Callable[[], dict[str, Any]]]  # key of the record, key in it, what measures


def device_parts(engines: list[str], device: str, tiny: bool = False) -> list[Part]:
    "Return the measurements in this process, the most important first."
    first, window_s, copies = engines[0], 0.005 if tiny else 0.1, [1 << 16] if tiny else [*COPY_SIZES]
    n = (4,) if tiny else (1024, 256, 2048)
    parts: list[Part] = [("alone", "bus", partial(copy_alone, device, copies, window_s))]
    parts += [("both ways", str(size), partial(both_ways, device, size, window_s)) for size in copies]
    card = (1 << 16, 32) if tiny else (1 << 30, 8192)
    parts.append(("alone", "card", partial(card_alone, device, *card, window_s)))
    for block in n:
        for name in GEOMETRIES:
            for engine in engines:
                work = partial(kernel_alone, engine, device, name, block, window_s)
                parts.append(("kernel", f"{name}, {engine}, block {block}", work))
    parts.append(
        ("reuse", f"A, {first}", partial(reuse, first, device, "A", *((4, 1) if tiny else (512, 5))))
    )
    if "triton" in engines:
        parts.append(("launches", "A", partial(launches, device, "A", n[-1], window_s)))
    return parts


def varied_builds(
    root: Path,  # of the recordings
    folder: Path,  # of the data sets
    engine: str,
    device: str,
    varied: dict[str, tuple[str, ...]],
    n_files: int,  # recordings
) -> list[Part]:
    "Return builds of geometry A with the settings, each in its own process."
    usual = ["--split", "all", *geometry_words("A"), "--engine", engine, "--device", device]
    parts = list[Part]()
    for name, words in varied.items():
        options = [*usual, *(() if "--mode" in words else ("--mode", "stream"))]
        options += [*(() if "--fsync" in words else ("--no-fsync",)), *words]
        parts.append(("varied", name, partial(build_once, root, folder, options, n_files)))
    return parts


def measure_parts(
    figures: dict[str, Any],  # gets the figures, errors, and what was not measured
    parts: list[Part],
    ends_s: float,
    keep: Callable[[dict[str, Any]], object],
    log: LogLine,
) -> None:
    "Run measurements until the time is over; builds of the same settings are rounds."
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for group, name, work in parts:
        what = f"{group}: {name}"
        if time.monotonic() > ends_s:
            figures["not_measured"].append({"what": what, "why": "the time budget was used up"})
            continue
        try:
            done = work()
        except (LeakmelError, RuntimeError) as e:  # RuntimeError: of torch and its device
            figures["errors"].append({"what": what, "error": str(e)})
            continue
        runs.setdefault((group, name), []).append(done)
        figures.setdefault(group, {})[name] = spreads(runs[group, name]) if group == "varied" else done
        log(f"{what}: done")
        keep(figures)


def bench_gpu_design(
    folder: str | os.PathLike,
    *,
    n_files: int | None = None,
    rounds: int = 3,
    budget_s: float = 900,
    device: str = "cuda:0",
    engines: tuple[str, ...] = ("triton", "torch"),
    varied: dict[str, tuple[str, ...]] = VARIED,
    tiny: bool = False,  # sizes for tests on a CPU
    suite: Callable[..., dict[str, Any]] = bench_gpu,
    keep: Callable[[dict[str, Any]], object] = lambda figures: None,
    log: LogLine = log_nothing,
) -> dict[str, Any]:
    "Run the suite `gpu`, then measure what each part of the design is worth."
    ends_s = time.monotonic() + budget_s
    os.environ.setdefault("LEAKMEL_CACHE_DIR", str(Path(folder) / "cache"))
    figures = suite(
        folder, n_files=n_files, rounds=rounds, budget_s=budget_s / 2, device=device, keep=keep, log=log
    )
    right = [e for e in engines if any(name.endswith(e) for name in figures["builds"])]
    if right:
        root = synthetic_set_of_size(folder, figures["n_files"], log)
        builds = varied_builds(root, root.with_name("varied"), right[0], device, varied, figures["n_files"])
        measure_parts(figures, device_parts(right, device, tiny) + builds * rounds, ends_s, keep, log)
    return figures | {"ok": figures["ok"] and not figures["errors"]}


def design_table(figures: dict[str, Any] | None) -> str:
    "The figures of the parts as text, below those of the suite `gpu`."
    if figures is None:
        return "not measured"
    lines = [gpu_table(figures)]
    for size, f in figures.get("alone", {}).get("bus", {}).items():
        rates = f"in {spread(f['in'])['median']:.1f}, out {spread(f['out'])['median']:.1f} GB/s"
        lines.append(f"plain copy of {int(size) / 1e6:,.1f} MB: {rates}")
    for size, f in figures.get("both ways", {}).items():
        rate = spread(f["both_each_way"])["median"]
        lines.append(f"copies of {int(size) / 1e6:,.1f} MB both ways at once: {rate:.1f} GB/s each way")
    card = figures.get("alone", {}).get("card")
    for name, f in figures.get("kernel", {}).items():
        rate, floor = max(spread(f[way])["median"] for way in ("one_by_one", "by_graph") if f[way]), ""
        if card:
            n_bytes, n_operations = block_work(geometry_spec(name[0]))
            memory, products = (
                spread(card[key])["median"] for key in ("memory_bytes_per_s", "float16_per_s")
            )
            best = 1 / (n_bytes / memory + n_operations / products)
            floor = f", {rate / best:.0%} of the floor's {best / 1e6:.2f} M"
        lines.append(f"kernel alone, {name}: {rate / 1e6:.3f} M recordings/s{floor}")
    base = figures.get("varied", {}).get("as it is", {}).get("files_per_s", {}).get("median")
    for name, f in figures.get("varied", {}).items() if base else ():
        lines.append(f"{name}: {f['files_per_s']['median'] / base:.2f} x")
    for launch, f in (figures.get("launches", {}).get("A") or {}).items():
        if isinstance(f, dict) and ("error" in f or "same_bits" in f):
            said = f.get("error") or f"{spread(f['recordings_per_s'])['median'] / 1e6:.3f} M recordings/s"
            lines.append(
                f"triton launched with {launch}: {said}{'' if f.get('same_bits', True) else ', OTHER BITS'}"
            )
    for name, f in figures.get("reuse", {}).items():
        kept = [f"{k} {spread(s)['median'] * 1e3:,.1f} ms" for k, s in f.items() if s]
        lines.append(f"a batch with an engine that is, {name}: {', '.join(kept)}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work")
    parser.add_argument("--out", default="runs/benchmarks")
    parser.add_argument("--budget-s", type=float, default=900)
    args = parser.parse_args()
    keep = partial(store, folder=args.out)
    record = bench_gpu_design(args.work, budget_s=args.budget_s, keep=keep, log=print)
    print(design_table(record), store(record, args.out), sep="\n")
