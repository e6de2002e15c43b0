"""Each part of a build by itself: reading, computing, writing, digests, checks."""

import filecmp, os, time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from leakmel.audio.conform import digests_of
from leakmel.audio.manifest import scan
from leakmel.audio.synth import WAV_BYTES
from leakmel.core.errors import UsageError
from leakmel.core.monitor import usable_cores
from leakmel.dataset.check.verify import check_data_set
from leakmel.dataset.file.writer import RowFile
from leakmel.dataset.run.config import PipelineConfig, plan_workers
from leakmel.dataset.run.job import Job
from leakmel.dataset.run.journal import Journal, folder_inodes, journal_identity, journal_path
from leakmel.dataset.run.existing import stamps_at_build, state_path, write_state
from leakmel.dataset.source.loader import BatchReader, Slot
from leakmel.mel.engines import CPU_ENGINES, COMPARISON_ENGINES, Engine, EngineUnavailable, open_engine
from leakmel.ops.bench import (
    read_into_cache,
    record_head,
    rounds_text,
    run_leakmel,
    spread,
    synthetic_set,
    touch_memory,
    verify_all,
)
from bench_gpu import GEOMETRIES, geometry_spec, geometry_words
from bench_compare import geometry_line, preset_spec
from contestants import list_split


def on_threads(
    work: Callable[[int, int], object],  # called with the number of the thread and of the batch
    n_batches: int,
    n_threads: int,
) -> dict[str, float]:  # seconds, cpu_s
    "Do all batches, each in the thread that is free."
    todo = iter(range(n_batches))

    def take_all(k: int) -> None:
        for batch in todo:
            work(k, batch)

    began, cpu_began = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(take_all, range(n_threads)))
    return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}


HELD = 1024  # recordings in memory


class Ground:
    "One made set under one geometry, and the numbers of a build of it on the cores this process may use."

    def __init__(self, root: Path, geometry: str, work: Path):
        self.root, self.geometry, self.work, self.spec = root, geometry, work, geometry_spec(geometry)
        self.manifest = scan(root, split="training")
        self.listing = self.manifest.listings[0]
        self.n = len(self.listing)
        with open_engine("auto", self.spec, device="cpu") as engine:
            self.engine_name, self.step = engine.name, self._step(engine)

    def _step(self, engine: Engine) -> int:
        return plan_workers(PipelineConfig(), self.spec, engine, self.n).files_per_batch

    def batches(self, n: int) -> int:
        return -(-n // self.step)

    def held(self, batch: int) -> slice:
        "Where the recordings that stand for a batch are among those in memory."
        first = batch % max(1, len(self.samples) // self.step) * self.step
        return slice(first, first + min(self.step, self.n - batch * self.step))

    @cached_property
    def samples(self) -> np.ndarray:
        "The first recordings, [HELD, N] int16."
        n = min(self.n, HELD)
        slot = Slot(n, self.spec)
        slot.begin(None, 0, 0, n)
        BatchReader(self.listing, self.spec).fill(slot)
        return slot.samples

    @cached_property
    def rows(self) -> np.ndarray:
        "Their rows, [HELD, L, S, M, T] float16."
        out = np.zeros((len(self.samples), *self.spec.row_shape), np.float16)
        with open_engine(self.engine_name, self.spec, device="cpu") as engine:
            for i in range(0, len(out), self.step):
                engine.run(self.samples[i : i + self.step], out[i : i + self.step])
        return out


FEW = {"reference": 64}  # recordings that an engine computes, where not all


def read_only(g: Ground) -> dict[str, Any]:
    "Fill slots with all recordings."
    reader, slots = BatchReader(g.listing, g.spec), [Slot(g.step, g.spec) for _ in range(usable_cores())]

    def fill(k: int, batch: int) -> None:
        slots[k].begin(None, batch, batch * g.step, min(g.step, g.n - batch * g.step))
        reader.fill(slots[k])

    return on_threads(fill, g.batches(g.n), len(slots)) | {"files": g.n, "bytes": g.listing.n_bytes}


def compute_only(g: Ground, name: str) -> dict[str, Any]:
    "Compute recordings that are in memory."
    with open_engine(name, g.spec, device="cpu") as engine:
        n, threads = (
            min(g.n, FEW.get(name, g.n)),
            plan_workers(PipelineConfig(), g.spec, engine, g.n).compute_workers,
        )
        out, samples = np.zeros((threads, g.step, *g.spec.row_shape), np.float16), g.samples

        def compute(k: int, batch: int) -> None:
            x = samples[g.held(batch)]
            engine.run(x, out[k, : len(x)])

        return on_threads(compute, g.batches(n), threads) | {"files": n, "bytes": n * samples[0].nbytes}


def write_only(g: Ground, fsync: bool) -> dict[str, Any]:
    "Write rows that are in memory."
    rows, began, cpu_began = g.rows, time.perf_counter(), time.process_time()
    file = RowFile(g.work / f"write-only-{g.geometry}.h5", g.spec.row_shape, g.n)
    try:
        on_threads(
            lambda k, batch: file.write(batch * g.step, rows[g.held(batch)]), g.batches(g.n), usable_cores()
        )
        if fsync:
            file.sync()
        return {
            "seconds": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu_began,
            "files": g.n,
            "bytes": g.n * rows[0].nbytes,
        }
    finally:
        file.abort()


def digests_only(g: Ground, what: str) -> dict[str, Any]:
    "Take the digests of recordings or rows."
    one = (g.samples if what == "recordings" else g.rows)[: g.step]
    return on_threads(lambda k, batch: digests_of(one), g.batches(g.n), usable_cores()) | {
        "files": g.n,
        "bytes": g.n * one[0].nbytes,
    }


def check_only(g: Ground, sample: int) -> dict[str, Any]:
    "Check the built data set as a build does before it publishes; without a sample only the pass over all rows."
    path, root = g.work / "built" / f"{g.geometry}-build" / "TRAINING_DATASET.H5", g.root if sample else None
    began, cpu_began = time.perf_counter(), time.process_time()
    report = check_data_set(path, root=root, sample=sample, accounting=False)
    figures = {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_began,
        "files": g.n,
        "bytes": os.path.getsize(path),
    }
    return figures | ({} if report.ok else {"error": report.verdict})


def journal_only(g: Ground) -> dict[str, Any]:
    "Enter all rows in a journal, and the state of the recordings at the end, as a build does that does not wait for the disk."
    job = Job(
        g.listing,
        g.spec,
        RowFile(g.work / f"journal-only-{g.geometry}.h5", g.spec.row_shape, g.n, start="none"),
    )
    job.good[:] = True
    journal = Journal(
        journal_path(job.file.target),
        journal_identity(
            g.listing, folder_inodes(g.listing, range(g.n)), "measured", g.spec.row_shape, False
        ),
        sync=False,
    )
    every = max(1, journal.every_bytes // job.file.row_bytes)
    began, cpu_began = time.perf_counter(), time.process_time()
    journal.open()
    for first in range(0, g.n, every):
        journal.note(first, min(every, g.n - first), 0)
        journal.enter(job.entry)
    n_bytes = journal.path.stat().st_size
    journal.close(remove=True)
    stamps = stamps_at_build(g.listing, job.good, job.facts["ctime_ns"], [], time.time_ns())
    write_state(job.file.target, Path(g.listing.folder), "measured", stamps)
    state_path(job.file.target).unlink()
    return {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_began,
        "files": g.n,
        "bytes": n_bytes,
    }


PARTS: dict[str, Callable[[Ground], dict[str, Any]]] = {
    "read": read_only,
    **{f"compute, {name}": partial(compute_only, name=name) for name in (*CPU_ENGINES, *COMPARISON_ENGINES)},
    "write": partial(write_only, fsync=False),
    "write, fsync": partial(write_only, fsync=True),
    "digests of recordings": partial(digests_only, what="recordings"),
    "digests of rows": partial(digests_only, what="rows"),
    "journal and state": journal_only,
    "pass over all rows": partial(check_only, sample=0),
    "pass and sample": partial(check_only, sample=64),
}


@cache
def _ground(root: str, geometry: str, work: str) -> Ground:
    "Ready to be measured on; kept for later rounds, in the process that measures."
    return Ground(Path(root), geometry, Path(work))


def one_part(
    part: str,  # of PARTS
    geometry: str,  # "A" or "B"
    root: str,  # the made set
    work: str,  # folder in which builds put "built"
) -> dict[
    str, Any
]:  # seconds, cpu_s, files_per_s ...; "missing" where an engine is not installed, "error" where a check failed
    "Measure a part once."
    try:
        figures = PARTS[part](_ground(root, geometry, work))
    except EngineUnavailable as e:
        return {"missing": str(e)}
    return figures | {
        "files_per_s": figures["files"] / figures["seconds"],
        "us_of_cpu_per_file": 1e6 * figures["cpu_s"] / figures["files"],
    }


def core_counts() -> list[int]:
    "Numbers of cores to measure with: one, and all that this process may use."
    return sorted({1, usable_cores()}) if hasattr(os, "sched_setaffinity") else [usable_cores()]


@contextmanager
def on_cores(
    n: int,  # at least 1
) -> Iterator[None]:
    "Let this thread, and the processes it starts, use so many cores."
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:n])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _words(n: int) -> str:
    return f"{n} core{'s' * (n > 1)}"


BUILDS: dict[str, tuple[str, ...]] = {
    "build": ("--no-fsync",),
    "build, fsync": (),
    "build, no check": ("--no-fsync", "--check", "0"),
    "build, gzip": ("--no-fsync", "--compression", "gzip"),
}
_VERIFIED = ("build", "build, gzip")


def _target(work: Path, geometry: str, name: str) -> Path:
    return (
        work
        / ("built" if name in _VERIFIED else "same")
        / f"{geometry}-{name.replace(', ', '-').replace(' ', '-')}"
        / "TRAINING_DATASET.H5"
    )


def _prepare(files: Iterable[str | os.PathLike], n_files: int) -> None:
    "Touch memory, then read files into the page cache: a virtual machine may have given the memory of both to its host."
    touch_memory(n_files * WAV_BYTES)
    read_into_cache(files)


def _build(root: Path, work: Path, geometry: str, name: str, n_files: int) -> dict[str, Any]:
    "One build in a process of its own."
    target = _target(work, geometry, name)
    target.unlink(missing_ok=True)  # a new data set, as nearly all are
    _prepare(list_split(root)[0], n_files)
    done = run_leakmel(
        "build",
        str(root),
        "--out",
        str(target),
        "--split",
        "training",
        *geometry_words(geometry),
        *BUILDS[name],
    )
    plain = _target(work, geometry, "build")
    if name not in _VERIFIED and not filecmp.cmp(plain, target, shallow=False):
        return {"error": "other bytes than without it"}
    return {
        "seconds": done.body["seconds"],
        "cpu_s": done.cpu_s,
        "files": done.body["found"],
        "bytes": done.body["file_bytes"],
        "files_per_s": done.body["files_per_s"],
        "us_of_cpu_per_file": 1e6 * done.cpu_s / done.body["found"],
        "process_s": done.wall_s,
        "start_up_s": done.body["start_up_s"],
        "peak_rss_bytes": done.peak_rss_bytes,
    }


def _round(
    root: Path,
    work: Path,
    workers: dict[int, ProcessPoolExecutor],
    keep: Callable[[str, dict[str, Any]], None],
    n_files: int,
) -> None:
    "Measure everything once."
    for geometry in GEOMETRIES:
        for n, worker in workers.items():
            with on_cores(n):
                for name in BUILDS:
                    keep(f"{geometry}, {name}, {_words(n)}", _build(root, work, geometry, name, n_files))
                for part in PARTS:
                    if part.startswith(("read", "write", "pass")):  # others take what they need from memory
                        _prepare([*list_split(root)[0], _target(work, geometry, "build")], n_files)
                    keep(
                        f"{geometry}, {part}, {_words(n)}",
                        worker.submit(one_part, part, geometry, str(root), str(work)).result(),
                    )


@contextmanager
def _hired(counts: list[int]) -> Iterator[dict[int, ProcessPoolExecutor]]:
    "A process for each number of cores."
    with ExitStack() as stack:
        yield {
            n: stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn"))) for n in counts
        }


def bench_parts(
    folder: str | os.PathLike,  # work folder: the made set is kept there and used again
    *,
    n_files: int = 8000,  # recordings of the training split
    rounds: int = 5,  # counted rounds
    log: Callable[[str], None] = lambda text: None,  # told what is going on
) -> dict[str, Any]:  # the figures, as they are stored
    "Measure the parts of a build, builds with and without extras, and the price of trust; then verify all rows."
    if rounds < 1:
        raise UsageError("rounds must be at least 1", found=rounds)
    root, work = synthetic_set(folder, n_files, log), Path(folder) / "parts"
    runs: dict[str, list[dict[str, Any]]] = {}
    wrong: dict[str, str] = {}
    with _hired(core_counts()) as workers:
        for i in range(-1, rounds):

            def keep(
                name: str,
                figures: dict[str, Any],
                counted: bool = i >= 0,
                where: str = "warming" if i < 0 else f"round {i + 1} of {rounds}",
            ) -> None:
                if why := figures.get("missing") or figures.get("error"):
                    wrong[name] = why
                elif counted:
                    runs.setdefault(name, []).append(figures)
                log(f"{where}: {name}: {why or format(figures['files_per_s'], ',.0f') + ' files/s'}")

            _round(root, work, workers, keep, n_files)
    log("recomputing every row")
    return _record(runs, wrong, n_files, rounds, verify_all(root, work / "built"))


def _record(
    runs: dict[str, list[dict[str, Any]]],
    wrong: dict[str, str],
    n_files: int,
    rounds: int,
    verified: dict[str, Any],
) -> dict[str, Any]:
    "The figures as they are stored."
    figures = {
        name: {key: spread([r[key] for r in kept]) for key in kept[0]}
        for name, kept in runs.items()
        if name not in wrong
    }
    verified["all_ok"] = verified["all_ok"] and not [name for name in wrong if "compute" not in name]
    return {
        **record_head("parts"),
        "n_files": n_files,
        "rounds": rounds,
        "cache": "warm",
        "cores": core_counts(),
        "interval": "builds: listing to published file, each in a process of its own; "
        "parts: alone in a process that may use so many cores, imports and self-check left out; "
        "before builds, and before parts that use files, memory is touched and the files are read into the page cache",
        "geometries": GEOMETRIES,
        "builds": {name: list(words) for name, words in BUILDS.items()},
        "verified": verified,
        "not_measured": wrong,
        "figures": figures,
        "trust": {
            f"{g}, {_words(n)}": price_of_trust(figures, g, _words(n))
            for g in GEOMETRIES
            for n in core_counts()
        }
        if verified["all_ok"]
        else {},
    }


def price_of_trust(
    figures: dict[str, Any],  # medians and ranges by name
    geometry: str,
    cores: str,  # "1 core"
) -> dict[str, Any]:  # seconds of a build; "share" of all but fsync
    "What being sure costs, in seconds of a build."

    def at(name: str, key: str = "seconds") -> dict[str, float]:
        return figures[f"{geometry}, {name}, {cores}"][key]

    def median(name: str, key: str = "seconds") -> float:
        return at(name, key)["median"]

    n, whole = int(cores.split()[0]), median("build")
    pieces = {name: median(name, "cpu_s") / n for name in ("digests of recordings", "digests of rows")}
    pieces["pass over all rows"] = median("pass over all rows")
    pieces["rows recomputed"] = max(0.0, median("pass and sample") - median("pass over all rows"))
    pieces["journal and state"] = median("journal and state")
    price = sum(pieces.values())
    return {
        "build_s": whole,
        "without_s": whole - price,
        "pieces_s": pieces,
        "share": price / whole,
        "share_of_sample_by_difference": 1 - median("build, no check") / whole,
        "fsync_s": median("build, fsync") - whole,
        "fsync_range_s": [
            at("build, fsync")["least"] - at("build")["most"],
            at("build, fsync")["most"] - at("build")["least"],
        ],
    }


def _range(f: dict[str, float]) -> str:
    return f"{f['median']:,.0f} ({f['least']:,.0f} to {f['most']:,.0f})"


def _bytes_of(part: str) -> str:
    "What the bytes of a part are."
    if part.startswith(("read", "compute")) or part == "digests of recordings":
        return "recordings"
    return "rows" if part.startswith(("write", "digests")) else "data set"


def fsync_words(
    trust: dict[str, Any],  # of `price_of_trust`
) -> str:
    "What fsync adds to a build, where its range says so."
    least, most = trust["fsync_range_s"]
    return "no difference seen" if least <= 0 <= most else f"{trust['fsync_s']:+.2f} s"


def _part_of(name: str) -> str:
    return name.split(", ", 1)[1].rsplit(", ", 1)[0]


def parts_table(
    figures: dict[str, Any] | None,  # of `bench_parts`; None: nothing was measured
) -> str:
    "The figures as text."
    if figures is None:
        return "not measured"
    m, v = figures["machine"], figures["verified"]
    lines = [f"{'part':<36} {'files/s':>28} {'CPU us/file':>11} {'MB/s':>7} of"]
    for name, f in figures["figures"].items():
        rate = f["bytes"]["median"] / f["seconds"]["median"] / 1e6
        lines.append(
            f"{name:<36} {_range(f['files_per_s']):>28} {f['us_of_cpu_per_file']['median']:>11,.1f} {rate:>7,.0f} "
            + _bytes_of(_part_of(name))
        )
    for name, t in figures["trust"].items():
        pieces = ", ".join(f"{what} {s:.3f} s" for what, s in t["pieces_s"].items())
        lines.append(
            f"trust, {name}: {t['share']:.0%} of {t['build_s']:.2f} s: {pieces}; fsync: {fsync_words(t)}"
        )
    lines += [f"not measured: {name} ({why})" for name, why in figures["not_measured"].items()]
    lines.append(geometry_line({g: preset_spec(changes) for g, changes in figures["geometries"].items()}))
    lines.append(
        f"{figures['n_files']:,} recordings, {rounds_text(figures)}, {figures['cache']} cache, {m['n_cores']} cores ({m['cpu']}); "
        "the CPU time of builds has the start of their process in it"
    )
    lines.append(
        f"{v['checked']:,} of {v['rows']:,} rows recomputed in float64: {'all right' if v['all_ok'] else 'NOT ALL RIGHT'}, "
        f"largest difference {v['max_abs_db']:.4f} dB"
    )
    return "\n".join(lines)


def parts_markdown(
    figures: dict[str, Any] | None,  # of `bench_parts`; None: nothing was measured
) -> str:  # Markdown: the parts, then the price of trust
    "The figures as two tables."
    if figures is None:
        return "not measured"
    places = [f"{g}, {_words(n)}" for g in figures["geometries"] for n in figures["cores"]]
    split = {name: _part_of(name) for name in figures["figures"]}
    lines = [f"| files/s, median (range) | {' | '.join(places)} |", "|---" * (1 + len(places)) + "|"]
    for part in dict.fromkeys(split.values()):
        cells = [figures["figures"].get(f"{p.split(', ')[0]}, {part}, {p.split(', ')[1]}") for p in places]
        lines.append(
            f"| {part} | {' | '.join(_range(f['files_per_s']) if f else 'not measured' for f in cells)} |"
        )
    if not (trust := list(figures["trust"].values())):
        return "\n".join(lines)
    lines += [
        "",
        f"| price of trust, s of the build | {' | '.join(places)} |",
        "|---" * (1 + len(places)) + "|",
    ]
    for what in trust[0]["pieces_s"]:
        lines.append(f"| {what} | {' | '.join(format(t['pieces_s'][what], '.3f') for t in trust)} |")
    for what, key, form in (
        ("share of the build", "share", ".0%"),
        ("whole build", "build_s", ".2f"),
        ("without all that", "without_s", ".2f"),
    ):
        lines.append(f"| {what} | {' | '.join(format(t[key], form) for t in trust)} |")
    return "\n".join([*lines, f"| fsync on top | {' | '.join(map(fsync_words, trust))} |"])
