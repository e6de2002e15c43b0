"""The suite `gpu`: parity of the engines and throughput of builds within a time budget.

python nbs/benchmarks/bench_gpu.py WORK [--out FOLDER] [--budget-s S] [--rounds N] [--files N] [--commit ID]

A machine with a GPU is often available for minutes only. The whole suite is therefore one command with a time budget, and the
record is stored after each build, so that no figure is lost with the machine, whatever ends the run. `leakmel machine doctor` compares
every engine with the float64 reference first; an engine that is not right is not measured. Each build is a command in its own
process, as a user runs it, so a device fault ends only that build. `bench_card.py` measures in one process what is open about the
GPU: the effect of each setting, training with CUDA graphs, evaluation and prediction, recordings at 48 kHz.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from leakmel.core.errors import LeakmelError, UsageError
from leakmel.core.timeline import aligned, covered_s, read_timeline
from leakmel.extras.machine.bench import (
    range_text,
    record_head,
    run_build,
    run_leakmel,
    spreads,
    store,
    synthetic_set_of_size,
    total_for_training,
    touch_memory,
    verify_all,
)
from leakmel.mel.engines import may_have_cuda
from leakmel.mel.spec import MelSpec

GEOMETRIES: dict[str, dict[str, Any]] = {
    "A": {"preset": "disjoint", "power": 2.0},
    "B": {"preset": "overlap", "power": 2.0, "n_mels": 64, "mel_norm": None},
}


def geometry_spec(name: str) -> MelSpec:
    "Return the settings of geometry A or B."
    changes = dict(GEOMETRIES[name])
    return MelSpec.preset(changes.pop("preset"), **changes)


def geometry_words(
    name: str,  # "A" or "B"
) -> list[str]:
    "Return a geometry as options of `leakmel build`."
    words = list[str]()
    for key, value in GEOMETRIES[name].items():
        words += ["--" + key.replace("_", "-"), "none" if value is None else str(value)]
    return words


LogLine = Callable[[str], object]  # called with a line of text before and after each step


def log_nothing(text: str) -> None:
    "Ignore a line of text."


def require_rounds(rounds: int) -> None:
    "Raise UsageError for less than one round."
    if rounds < 1:
        raise UsageError("the number of rounds must be at least 1", code="invalid-effort", found=rounds)


STAGES = ("read", "copy_in", "compute", "copy_out", "write", "publish", "verify")


def build_once(
    root: Path,  # data folder
    folder: Path,  # of the data sets; older ones in it are removed
    words: Iterable[str],  # options of `leakmel build`
    n_files: int,  # recordings of the set; memory of their size is touched first
) -> dict[str, float]:  # seconds, bytes and files/s; those of a stage are of the first split
    "Build new data sets with the command line, and return the figures of the build."
    done = run_build(root, folder, words, n_files)
    splits = done.body.get("splits", [done.body])
    spans = read_timeline(splits[0]["timeline_path"]).spans
    listed_s = next(s.start_s for s in spans if s.stage == "start_up" and s.lane == "main")
    first_s = min(s.start_s for s in spans if s.stage in ("read", "stage"))
    found, work_s = sum(s["found"] for s in splits), done.body["seconds"] - (first_s - listed_s)
    figures = {
        "seconds": done.body["seconds"],
        "files_per_s": done.body["files_per_s"],
        "work_s": work_s,
        "work_files_per_s": found / work_s,
        "process_s": done.wall_s,
        "cpu_s": done.cpu_s,
        "peak_rss_bytes": done.peak_rss_bytes,
        "start_up_s": splits[0]["start_up_s"],
        "to_first_batch_s": min(s.end_s for s in spans if s.stage == "compute"),
        "found": found,
    }
    for stage in STAGES:
        some = [s for s in spans if s.stage == stage]
        figures |= {f"{stage}_s": covered_s(some), f"{stage}_bytes": sum(s.n_bytes for s in some)}
    return figures


MEASURED_ENGINES = ("triton", "cpu", "torch")  # the most important first
SAMPLE_ROWS = "400"  # of each data set, recomputed at the end
SET_SIZES = 6  # memory that is touched, in sizes of the set: the recordings and the data sets of all engines in the page cache, and slots


def _usable_engines(figures: dict[str, Any], device: str) -> list[str]:
    "Return the engines that doctor found to be right; store what it found about the others."
    checks, right = {c["key"]: c for c in figures["checks"]}, list[str]()
    for engine in MEASURED_ENGINES:
        check = checks[f"engine_{engine}{'_cuda' if engine == 'torch' and device != 'cpu' else ''}"]
        if check["status"] == "ok":
            right.append(engine)
            continue
        figures["not_measured"].append({"what": f"engine {engine}", "why": check["found"]})
        if check["status"] != "missing":
            figures["errors"].append({"what": f"engine {engine}", "error": check["found"]})
    return right


def bench_gpu(
    folder: str | os.PathLike,  # work folder, on fast local storage; recordings in it are reused
    *,
    n_files: int | None = None,  # recordings of all splits; None: the reference set's 51,434
    rounds: int = 3,  # counted rounds
    budget_s: float = 420,  # time limit, seconds
    device: str = "cuda:0",  # "cpu": a rehearsal
    commit_id: str | None = None,  # where there is no git
    keep: Callable[[dict[str, Any]], object] = lambda figures: (
        None
    ),  # called with the record at the start and after each step
    log: LogLine = log_nothing,
) -> dict[str, Any]:  # the figures, as they are stored; raises UsageError where there is no device
    "Check the engines on a machine with a GPU, then measure builds with each of them."
    from leakmel.recordings.demo import SPLIT_SIZES, WAV_BYTES

    require_rounds(rounds)
    if budget_s <= 0:
        raise UsageError("the time budget must be above 0", code="invalid-effort", found=budget_s)
    if device != "cpu" and not may_have_cuda():
        raise _no_device("no CUDA driver, or CUDA_VISIBLE_DEVICES hides every GPU")
    began, n_files = time.monotonic(), n_files or sum(SPLIT_SIZES.values())
    figures = record_head("gpu" if device != "cpu" else "gpu-rehearsal") | {
        "rehearsal": device == "cpu",
        "cache": "warm",
        "interval": "listing to published file, all splits, no fsync, each build in its own process; "
        "work: from the first file that is read",
        "n_files": n_files,
        "rounds": rounds,
        "budget_s": budget_s,
        "touched": {},
        "checks": [],
        "builds": {},
        "verified": {},
        "not_measured": [],
        "errors": [],
        "ok": False,
        "finished": False,
    }
    figures["commit"] = figures["commit"] or commit_id

    def keep_state(figures: dict[str, Any]) -> None:
        keep(figures | {"seconds": time.monotonic() - began})

    keep_state(figures)
    root = synthetic_set_of_size(folder, n_files, log)
    out = root.with_name("built")
    log("touching memory")
    figures["touched"] = touch_memory(SET_SIZES * n_files * WAV_BYTES)
    keep_state(figures)
    log("checking the engines")
    figures["checks"] = run_leakmel("doctor", str(root)).body["checks"]
    checks = {c["key"]: c for c in figures["checks"]}
    if checks["compiled"]["status"] != "ok":  # without compiled code, a build measures Python
        figures["errors"].append({"what": "compiled code", "error": checks["compiled"]["found"]})
    if device != "cpu" and not checks["gpu"]["figures"].get("usable_by_torch"):
        figures["errors"].append({"what": "GPU", "error": checks["gpu"]["found"]})
        keep_state(figures)
        raise _no_device(checks["gpu"]["found"])
    keep_state(figures)
    engines = _usable_engines(figures, device)
    todo = [(geometry, engine) for geometry in GEOMETRIES for engine in engines]
    _measure_builds(figures, root, out, todo, device, began + budget_s, keep_state, log)
    if figures["builds"]:
        log("verifying the data sets")
        try:
            figures["verified"] = verify_all(root, out, SAMPLE_ROWS)
        except LeakmelError as e:
            figures["errors"].append({"what": "verify", "error": str(e)})
    figures["ok"] = bool(figures["builds"]) and not figures["errors"]
    figures["finished"] = True
    return figures | {"seconds": time.monotonic() - began}


def _measure_builds(
    figures: dict[str, Any],  # gets builds, errors, and what was not measured
    root: Path,  # data folder
    out: Path,  # folder of the data sets
    todo: list[tuple[str, str]],  # geometry and engine
    device: str,
    ends_s: float,  # no build is started that may last longer
    keep: Callable[[dict[str, Any]], object],
    log: LogLine,
) -> None:
    "Build in turn with all geometries and engines: a warm-up, then the counted rounds."
    runs, rounds, longest_s = dict[str, list[dict[str, float]]](), figures["rounds"], 0.0
    for i in range(-1, rounds):
        for geometry, engine in todo:
            name, started = f"{geometry}, {engine}", time.monotonic()
            if started + longest_s > ends_s:
                why = f"the time budget was used up before round {i + 1} of {rounds}"
                figures["not_measured"].append({"what": name, "why": why})
                continue
            words = ["--split", "all", *geometry_words(geometry), "--no-fsync", "--mode", "stream"]
            words += ["--engine", engine, "--device", "cpu" if engine == "cpu" else device]
            try:
                done = build_once(root, out / name.replace(", ", "-"), words, figures["n_files"])
            except LeakmelError as e:
                figures["errors"].append({"what": name, "error": str(e)})
                log(f"{name}: {e}")
                keep(figures)
                continue
            longest_s = max(longest_s, time.monotonic() - started)
            when = "warm-up" if i < 0 else f"round {i + 1} of {rounds}"
            log(f"{when}: {name}: {done['files_per_s']:,.0f} files/s")
            if i >= 0:
                runs.setdefault(name, []).append(done)
                figures["builds"][name] = spreads(runs[name]) | {"rounds": len(runs[name])}
            keep(figures)


def _no_device(found: str) -> UsageError:
    "Return the error for a machine without a usable GPU."
    return UsageError(
        "the suite gpu needs a CUDA device, and torch finds no CUDA device",
        code="no-gpu",
        found=found,
        remedy="run the suite on a machine with a GPU",
    )


def version_text(figures: dict[str, Any]) -> str:
    "Say of which commit and day a record is."
    return (
        f"commit {(figures.get('commit') or 'unknown')[:8]} of {figures.get('made_utc', 'unknown day')[:10]}"
    )


def gpu_table(
    figures: dict[str, Any] | None,  # of `bench_gpu`; None: nothing was measured
) -> str:
    "Return the main figures of the suite as text."
    if figures is None:
        return "not measured"
    lines = ["REHEARSAL: the figures below are not meaningful"] if figures["rehearsal"] else []
    lines += [] if figures.get("finished", True) else ["UNFINISHED: the run was stopped before its end"]
    shown = [c for c in figures["checks"] if c["key"] == "gpu" or c["key"].startswith("engine_")]
    lines += [f"{c['title']}: {c['found']}" for c in shown if c["status"] != "missing"]
    rows: list[tuple[str, ...]] = [
        ("build", "files/s", "range", "work only", "first batch s", "CPU s", "GB/s in")
    ]
    for name, f in figures["builds"].items():
        mid = {key: value["median"] for key, value in f.items() if isinstance(value, dict)}
        into = mid["copy_in_bytes"] / 1e9 / mid["copy_in_s"] if mid["copy_in_s"] else 0.0
        rows.append(
            (
                name,
                f"{mid['files_per_s']:,.0f}",
                range_text(f["files_per_s"]),
                f"{mid['work_files_per_s']:,.0f}",
                f"{mid['to_first_batch_s']:.2f}",
                f"{mid['cpu_s']:.1f}",
                f"{into:.1f}" if into else "-",
            )
        )
    lines.append(aligned(rows))
    if v := figures["verified"]:
        lines.append(f"all digests compared, {v['checked']:,} of {v['rows']:,} rows recomputed: all right")
    machine = f"{figures['machine']['n_cores']} cores ({figures['machine']['cpu']})"
    spent = f"{figures.get('seconds', 0):.0f} s of {figures['budget_s']:.0f}"
    done = [f["rounds"] for f in figures["builds"].values()]
    least = f"{min(done)} to " if done and min(done) < max(done) else ""
    rounds = f"{least}{max(done, default=0)} of {figures['rounds']} rounds"
    lines.append(f"{figures['n_files']:,} recordings, {rounds}, {machine}; {spent}; {version_text(figures)}")
    never = {
        x["what"]: x["why"] for x in reversed(figures["not_measured"]) if x["what"] not in figures["builds"]
    }
    lines += [f"not measured: {name} ({why})" for name, why in reversed(never.items())]
    return "\n".join(lines + [f"ERROR in {x['what']}: {x['error']}" for x in figures["errors"]])


def script_parser(
    text: str,  # of the module
    rounds: int,  # default
) -> argparse.ArgumentParser:
    "Return the options that the suites `gpu` and `train` share."
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", help="work folder, on fast local storage; what is in it is used again")
    parser.add_argument("--files", type=int, help="recordings of the training split (as the reference set)")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--budget-s", type=float, default=420)
    parser.add_argument("--commit", help="commit to store where there is no git")
    parser.add_argument("--out", default="runs/benchmarks")
    return parser


def run_script(
    bench: Callable[..., dict[str, Any]],  # a suite
    table: Callable[[dict[str, Any]], str],  # of its figures
    args: argparse.Namespace,  # of `script_parser`
    **options: Any,  # of the suite
) -> NoReturn:
    "Run a suite as a script: keep the record after each step, print the table, and exit with 1 where a figure is not valid."
    keep = partial(store, folder=args.out)
    try:
        record = bench(
            args.work, budget_s=args.budget_s, commit_id=args.commit, keep=keep, log=print, **options
        )
    except LeakmelError as e:
        raise SystemExit(f"error: {e}") from None
    print(table(record), keep(record), sep="\n")
    raise SystemExit(not record["ok"])


if __name__ == "__main__":
    args = script_parser(__doc__ or "", 3).parse_args()
    n_files = args.files and total_for_training(args.files)
    run_script(bench_gpu, gpu_table, args, n_files=n_files, rounds=args.rounds)
