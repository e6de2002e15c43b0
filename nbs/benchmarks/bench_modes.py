"""What each mode costs: the first build and later ones, with a warm and a cold page cache."""

import os, shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


from leakmel.core.errors import UsageError
from leakmel.ops.bench import (
    read_into_cache,
    evict,
    synthetic_set,
    record_head,
    run_leakmel,
    spread,
    verify_all,
)


_ONE_BUILD = ("stream", "preload", "memmap, first", "memmap, later")


def _build_once(root: Path, work: Path, name: str, cold: bool) -> dict[str, Any]:
    "One build by a mode in a process of its own."
    cache, out, mode = (
        work / "cache",
        work / name.replace(", ", "-") / "TRAINING_DATASET.H5",
        name.split(",")[0],
    )
    out.unlink(missing_ok=True)
    if name == "memmap, first":
        shutil.rmtree(cache, ignore_errors=True)
    (evict if cold else read_into_cache)([*(root / "TRAINING").rglob("*.wav"), *cache.glob("*")])
    words = [
        "--split",
        "training",
        "--no-fsync",
        "--mode",
        mode,
        *(["--cache-dir", str(cache)] if mode == "memmap" else []),
    ]
    done = run_leakmel("build", str(root), "--out", str(out), *words)
    return {
        "seconds": done.body["seconds"],
        "files_per_s": done.body["files_per_s"],
        "cpu_s": done.cpu_s,
        "peak_rss_bytes": done.peak_rss_bytes,
        "held_seconds": done.body["held_seconds"],
    }


def _build_preloaded(root: Path, work: Path, rounds: int) -> list[dict[str, Any]]:
    "Builds of this process from recordings that `leakmel.preload` holds; the first one, which warms up, is not counted."
    import leakmel

    config, kept = leakmel.PipelineConfig(fsync=False), []
    with leakmel.preload(root, split="training", pipeline=config, progress="none") as ready:
        for _ in range(rounds + 1):
            began = os.times()
            out = work / "preload-later" / "TRAINING_DATASET.H5"
            result = leakmel.build(
                root, split="training", out=out, preloaded=ready, pipeline=config, progress="none", fresh=True
            )
            ended = os.times()
            kept.append(
                {
                    "seconds": result.seconds,
                    "files_per_s": result.files_per_s,
                    "cpu_s": ended.user + ended.system - began.user - began.system,
                    "peak_rss_bytes": result.summary["peak_rss_bytes"],
                    "held_seconds": ready.seconds,
                }
            )
    return kept[1:]


def bench_modes(
    folder: str | os.PathLike,  # work folder: the made set is kept there and used again
    *,
    n_files: int = 8000,  # recordings of the training split
    rounds: int = 3,  # counted rounds
    log: Callable[[str], None] = lambda text: None,  # told what is going on
) -> dict[str, Any]:  # the figures, as they are stored
    "Measure every mode on a made set, warm and cold in turn, then verify all rows."
    if rounds < 1:
        raise UsageError("rounds must be at least 1", found=rounds)
    root, work = synthetic_set(folder, n_files, log), Path(folder) / "modes"
    runs: dict[str, list[dict[str, Any]]] = {
        f"{name}, {cache}": [] for cache in ("warm", "cold") for name in _ONE_BUILD
    }
    for i in range(-1, rounds):  # a round before the first one is not counted
        for name, kept in runs.items():
            plain, cache = name.rsplit(", ", 1)
            figures = _build_once(root, work, plain, cache == "cold")
            if i >= 0:
                kept.append(figures)
            log(
                f"{'warming' if i < 0 else f'round {i + 1} of {rounds}'}: {name}: {figures['seconds']:.2f} s, {figures['files_per_s']:,.0f} files/s"
            )
    runs["preload, later, warm"] = _build_preloaded(root, work, rounds)
    log("recomputing every row")
    bytes_of = {p.read_bytes() for p in sorted(work.glob("*/TRAINING_DATASET.H5"))}
    return {
        **record_head("modes"),
        "n_files": n_files,
        "rounds": rounds,
        "cache": "named",
        "interval": "listing to published file, imports left out, loading included",
        "same_bytes": len(bytes_of) == 1,
        "verified": verify_all(root, work),
        "figures": {
            name: {key: spread([r[key] for r in kept]) for key in kept[0]} for name, kept in runs.items()
        },
    }


def modes_table(
    figures: dict[str, Any] | None,  # of `bench_modes`; None: nothing was measured
) -> str:  # Markdown
    "First and later builds of each mode in seconds, median and range."

    def cell(name: str) -> str:
        if figures is None or name not in figures["figures"]:
            return "not measured"
        s = figures["figures"][name]["seconds"]
        return f"{s['median']:.2f} s ({s['least']:.2f} to {s['most']:.2f})"

    rows = [
        ("stream", "stream", "stream"),
        ("preload", "preload", "preload, later"),
        ("memmap", "memmap, first", "memmap, later"),
    ]
    lines = [
        "| mode | first build, warm | later build, warm | first build, cold | later build, cold |",
        "|---|---|---|---|---|",
    ]
    for mode, first, later in rows:
        cold_later = "needs nothing of the disk" if mode == "preload" else cell(f"{later}, cold")
        lines.append(
            f"| `{mode}` | {cell(f'{first}, warm')} | {cell(f'{later}, warm')} | {cell(f'{first}, cold')} | {cold_later} |"
        )
    return "\n".join(lines)
