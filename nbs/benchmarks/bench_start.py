"""How long a build takes from the command to its first batch and to its end, with compiled code in the cache and without."""

import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leakmel.core.errors import UsageError
from leakmel.core.timeline import read_timeline
from leakmel.extras.machine.bench import (
    ProcessRun,
    record_head,
    rounds_text,
    run_leakmel,
    spread,
    synthetic_set_of_size,
    total_for_training,
)

WAYS = {"code in the cache": "cpu", "empty cache": "cpu", "engine torch": "torch"}  # and the engine of each


@contextmanager
def _cache(folder: str):
    "Compiled code in a folder, and Python's bytecode kept as in an installation, for processes started in the body."
    before = dict(os.environ)
    os.environ["NUMBA_CACHE_DIR"] = folder
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _first_batch_s(done: ProcessRun) -> float:
    "Time from the start of the process to the end of its first computed batch."
    timeline = read_timeline(done.body["timeline_path"])
    first_s = min(span.end_s for span in timeline.spans if span.stage == "compute")
    return timeline.meta["clock_origin_s"] + first_s - done.started_s


def _once(root: Path, out: Path, way: str, warm: str) -> dict[str, Any]:
    "One build in a process of its own."
    with tempfile.TemporaryDirectory() as empty, _cache(empty if way == "empty cache" else warm):
        done = run_leakmel(
            "build",
            str(root),
            "--split",
            "training",
            "--out",
            str(out),
            "--engine",
            WAYS[way],
            "--device",
            "cpu",
        )
    return {
        "process_s": done.wall_s,
        "first_batch_s": _first_batch_s(done),
        "cpu_s": done.cpu_s,
        "start_up_s": done.body["start_up_s"],
        "seconds": done.body["seconds"],
        "peak_rss_bytes": done.peak_rss_bytes,
        "found": done.body["found"],
        "verified": done.body["verified"]["ok"],
    }


def bench_start(
    folder: str | os.PathLike,  # work folder
    *,
    n_files: int = 100,  # recordings of the training split
    rounds: int = 5,  # counted rounds
    log: Callable[[str], None] = lambda text: None,  # told what is going on
) -> dict[str, Any]:  # the figures, as they are stored
    "Measure commands that build a few recordings, ways in turn."
    if rounds < 1:
        raise UsageError("rounds must be at least 1", found=rounds)
    root = synthetic_set_of_size(folder, total_for_training(n_files), log)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as warm, tempfile.TemporaryDirectory() as out:
        for i in range(-1, rounds):  # a round before the first one fills the cache
            for way, kept in runs.items():
                figures = _once(root, Path(out) / "D.H5", way, warm)
                if i >= 0:
                    kept.append(figures)
                log(
                    f"{'warming' if i < 0 else f'round {i + 1} of {rounds}'}: {way}: {figures['process_s']:.2f} s"
                )
    return {
        **record_head("start"),
        "n_files": n_files,
        "rounds": rounds,
        "interval": "start to end of the command, all imports included",
        "verified": {"all_ok": all(r["verified"] for kept in runs.values() for r in kept)},
        "figures": {
            way: {key: spread([r[key] for r in kept]) for key in kept[0] if key != "verified"}
            for way, kept in runs.items()
        },
    }


def start_table(figures: dict[str, Any]) -> str:
    "Figures of the suite as a text table."
    lines = [
        f"{'build of a few recordings':<26} {'whole s':>8} {'range':>12} {'first batch s':>14} {'imports s':>10} {'build s':>8} {'CPU s':>6} {'peak MB':>8}"
    ]
    for way, f in figures["figures"].items():
        whole, first = f["process_s"], f.get("first_batch_s")
        lines.append(
            f"{way:<26} {whole['median']:>8.2f} {whole['least']:>6.2f}-{whole['most']:<5.2f} "
            f"{'not measured' if first is None else format(first['median'], '.2f'):>14} {f['start_up_s']['median']:>10.2f} "
            f"{f['seconds']['median']:>8.2f} {f['cpu_s']['median']:>6.2f} {f['peak_rss_bytes']['median'] / 1e6:>8,.0f}"
        )
    m = figures["machine"]
    lines.append(
        f"{figures['n_files']:,} recordings, {rounds_text(figures)}, {m['n_cores']} cores ({m['cpu']}), every build verified: "
        f"{'yes' if figures['verified']['all_ok'] else 'NO'}"
    )
    return "\n".join(lines)
