"""Ways of reading recordings and of listing them, side by side, from a warm and from a cold page cache."""

import json, math, os, subprocess, sys, threading, time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from leakmel.audio import native_code as calls
from leakmel.audio.conform import digests_of
from leakmel.audio.listing import Listing
from leakmel.audio.manifest import scan
from leakmel.audio.wav import OPEN_FLAGS
from leakmel.audio.wav import HEADER_BYTES, digest_of
from leakmel.core.errors import LeakmelError, UsageError
from leakmel.core.jit import address
from leakmel.core.monitor import usable_cores
from leakmel.dataset.run.config import BATCH_FILES
from leakmel.dataset.source.loader import BatchReader, Slot
from leakmel.dataset.source.read_ahead import ReadAhead, plan_read_ahead
from leakmel.mel.spec import MelSpec
from leakmel.ops.bench import read_into_cache, evict, synthetic_set, record_head, rounds_text, spread


NO_ADVICE = -1


@njit(nogil=True)
def _read_files(paths, starts, first, last, rows, head, flags, advice):
    "Read files into rows; returns how many were read whole."
    pieces, whole = np.zeros(4, np.int64), 0
    for i in range(first, last):
        fd = calls.openat(calls.HERE, address(paths) + starts[i], flags, 0)
        if fd < 0:
            continue
        if advice != NO_ADVICE:
            calls.fadvise(fd, 0, 0, advice)
        pieces[0], pieces[1], pieces[2], pieces[3] = (
            address(head),
            len(head),
            address(rows[i - first]),
            rows.shape[1],
        )
        whole += calls.preadv(fd, address(pieces), 2, 0) == len(head) + rows.shape[1]
        calls.close(fd)
    return whole


@dataclass(frozen=True)
class Way:
    "A way of reading all recordings of a listing."

    threads: int
    flags: int = OPEN_FLAGS
    advice: int = NO_ADVICE  # to the system, about each file when it is opened
    window: int = 0  # files that a further thread has fetched ahead
    batch: int = BATCH_FILES["cpu"]
    as_build: bool = False  # by `BatchReader`, digests included; fetched ahead where it decides to, unless `window` is below 0


BUILD_WAY = "as a build reads"


def ways_of_reading(
    cores: int,
) -> dict[str, Way]:
    "What is compared: everything differs from `plain` in one thing."
    plain, found = Way(cores), {"plain": Way(cores)}
    if hasattr(os, "O_NOATIME"):
        found["O_NOATIME"] = replace(plain, flags=OPEN_FLAGS | os.O_NOATIME)
    for name in ("SEQUENTIAL", "RANDOM", "WILLNEED"):
        if hasattr(os, "posix_fadvise"):
            found[f"advice {name}"] = replace(plain, advice=getattr(os, f"POSIX_FADV_{name}"))
    for n in sorted({1, *(cores * k for k in (2, 4, 8, 16))} - {cores}):
        found[f"{n} thread{'s' * (n > 1)}"] = replace(plain, threads=n)
    for n in (8, 32):
        found[f"batches of {n}"] = replace(plain, batch=n)
    for n in (16, 64, 128, 256, 512, 1024):
        found[f"{n} files ahead"] = replace(plain, window=n)
    found[f"{16 * cores} threads, 512 files ahead"] = replace(plain, threads=16 * cores, window=512)
    return found | {
        f"{BUILD_WAY}, nothing ahead": replace(plain, as_build=True, window=-1),
        BUILD_WAY: replace(plain, as_build=True),
    }


assert len(ways_of_reading(2)) == len(set(ways_of_reading(2).values()))


class Reading:
    "All recordings of a listing, read in one way or another."

    def __init__(self, listing: Listing, spec: MelSpec):
        self.listing, self.spec = listing, spec
        self.files = [listing.full_path(i) for i in range(len(listing))]
        self.paths = np.frombuffer(b"\0".join(self.files) + b"\0", np.uint8).copy()
        self.starts = np.append(0, np.cumsum([len(p) + 1 for p in self.files])).astype(np.int64)
        self.n_bytes = len(listing) * (HEADER_BYTES + 2 * spec.n_samples)

    def run(
        self,
        way: Way,
        digests: np.ndarray | None = None,  # [n] S32, filled with those of the samples, which takes time
    ) -> dict[str, float]:
        "Read everything once; raises LeakmelError where a file was not read whole."
        reader = BatchReader(self.listing, self.spec)
        before, began, cpu = _storage_bytes(), time.perf_counter(), os.times()
        if way.as_build:
            ahead = plan_read_ahead([reader], 0 if way.window < 0 else None)
        else:
            ahead = (
                ReadAhead([reader], way.window, math.ceil(way.window * self.n_bytes / len(self.listing)))
                if way.window
                else None
            )
        whole = _read_all(self, way, reader, ahead, digests)
        seconds, cpu_now = time.perf_counter() - began, os.times()
        if whole != len(self.listing):
            raise LeakmelError("not all recordings were read", found=whole, expected=len(self.listing))
        return {
            "seconds": seconds,
            "files_per_s": whole / seconds,
            "cpu_s": max(0.0, cpu_now.user + cpu_now.system - cpu.user - cpu.system),
            "from_device": (_storage_bytes() - before) / self.n_bytes,
        }


def _read_all(
    reading: Reading, way: Way, reader: BatchReader, ahead: ReadAhead | None, digests: np.ndarray | None
) -> int:
    "The threads of a run; returns how many files were read whole."
    n_files, whole = len(reading.listing), list[int]()
    todo, lock = iter(range(0, n_files, way.batch)), threading.Lock()

    def work() -> None:
        slot, head = Slot(way.batch, reading.spec), np.zeros(HEADER_BYTES, np.uint8)
        while True:
            with lock:
                first = next(todo, None)
            if first is None:
                return
            n = min(way.batch, n_files - first)
            if ahead is not None:
                ahead.take(n)
            if way.as_build:
                slot.begin(None, 0, first, n)
                reader.fill(slot)
                whole.append(int(slot.facts["good"].sum()))
            else:
                whole.append(
                    _read_files(
                        reading.paths,
                        reading.starts,
                        first,
                        first + n,
                        slot.samples.view(np.uint8),
                        head,
                        way.flags,
                        way.advice,
                    )
                )
            if digests is not None:
                digests[first : first + n] = digests_of(slot.samples[:n])

    threads = [threading.Thread(target=work) for _ in range(way.threads)]
    if ahead is not None:
        threads.append(threading.Thread(target=ahead.run, args=("read-ahead",)))
    for t in threads:
        t.start()
    for t in threads[: way.threads]:
        t.join()
    if ahead is not None:
        ahead.stop()
    for t in threads:
        t.join()
    return sum(whole)


def _content(path: bytes) -> bytes:
    "A whole file."
    with open(path, "rb") as f:
        return f.read()


def _storage_bytes() -> int:
    "Bytes that storage has delivered for this process."
    try:
        return int(
            next(
                line
                for line in Path("/proc/self/io").read_text().splitlines()
                if line.startswith("read_bytes")
            ).split()[1]
        )
    except OSError:
        return 0


LISTED = 50_000
_LIST = """
import json, sys, time
from leakmel.audio.manifest import scan
if sys.argv[2] == "compiled": import leakmel.audio.native, leakmel.audio.native
began, cpu = time.perf_counter(), time.process_time()
n = len(scan(sys.argv[1]))
print(json.dumps({"n": n, "seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}))
"""


def listing_set(
    folder: str | os.PathLike,
    n_files: int = LISTED,
) -> Path:
    "A set of empty files in the work folder; one that is there is used again."
    from leakmel.audio.synth import plan_set

    root = Path(folder) / f"listing-{n_files}"
    if root.exists():
        return root
    partial = Path(folder) / f".listing-{n_files}"
    for planned in plan_set(n_files, 0):
        path = partial / planned.path(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return partial.rename(root)


def list_once(root: Path, how: str, n_files: int) -> dict[str, float]:
    "Seconds of one listing in a process of its own."
    done = json.loads(
        subprocess.run(
            [sys.executable, "-c", _LIST, os.fspath(root), how], capture_output=True, text=True, check=True
        ).stdout
    )
    if done.pop("n") != n_files:
        raise LeakmelError("not all files were listed", path=root)
    return done | {"files_per_s": n_files / done["seconds"], "from_device": 0.0}


def bench_reader(
    folder: str | os.PathLike,  # work folder: the made set is kept there and used again
    *,
    n_files: int = 8000,  # recordings of the training split
    rounds: int = 5,  # counted rounds
    listed: int = LISTED,  # empty files to list
    log: Callable[[str], None] = lambda text: None,  # told what is going on
) -> dict[str, Any]:  # the figures, as they are stored
    "Measure ways of reading and listing, in turn, warm and cold; in the round that warms up, the digests of what is read are compared with the files'."
    if rounds < 1:
        raise UsageError("rounds must be at least 1", found=rounds)
    root, empty = synthetic_set(folder, n_files, log), listing_set(folder, listed)
    listing = scan(root, split="training").listings[0]
    reading, ways = Reading(listing, MelSpec.preset("disjoint")), ways_of_reading(usable_cores())
    right, same = (
        np.array([digest_of(x[HEADER_BYTES:]) for x in map(_content, reading.files)], "S32"),
        list[bool](),
    )
    runs: dict[str, list[dict[str, float]]] = {
        f"{name}, {cache}": [] for cache in ("cold", "warm") for name in ways
    }
    runs |= {f"listing, {how}": [] for how in ("python", "compiled")}
    for i in range(-1, rounds):  # a round before the first one is not counted
        seen = np.zeros(len(listing), "S32") if i < 0 else None
        for name in sorted(
            runs, key=lambda name: digest_of(f"{i} {name}".encode())
        ):  # in another order each time
            way, cache = name.rsplit(", ", 1)
            if way == "listing":
                figures = list_once(empty, cache, listed)
            else:
                (evict if cache == "cold" else read_into_cache)(map(os.fsdecode, reading.files))
                figures = reading.run(ways[way], seen)
                if seen is not None:
                    same.append(np.array_equal(seen, right))
            if i >= 0:
                runs[name].append(figures)
            log(
                f"{'warming' if i < 0 else f'round {i + 1} of {rounds}'}: {name}: {figures['files_per_s']:,.0f} files/s, {figures['cpu_s']:.2f} s of CPU"
            )
    return {
        **record_head("reader"),
        "n_files": len(listing),
        "listed": listed,
        "rounds": rounds,
        "cache": "named",
        "interval": "first file to last, threads started and joined; no computing, no writing",
        "threads": usable_cores(),
        "verified": {"runs": len(same), "all_ok": all(same)},
        "figures": {
            name: {key: spread([r[key] for r in kept]) for key in kept[0]} for name, kept in runs.items()
        },
    }


MIN_ROUNDS = 3  # from which a way is judged


def effect(
    figures: dict[str, Any],
    name: str,  # of a way, without its cache
    cache: str,  # "cold" or "warm"
) -> str:  # "helps", "harms", "no difference seen", or "too few rounds"
    "What a way does against the plain one, by the ranges of their rates."
    if figures["rounds"] < MIN_ROUNDS:
        return "too few rounds"
    it, plain = (figures["figures"][f"{n}, {cache}"]["files_per_s"] for n in (name, "plain"))
    return (
        "helps"
        if it["least"] > plain["most"]
        else "harms"
        if it["most"] < plain["least"]
        else "no difference seen"
    )


def reader_table(
    figures: dict[str, Any] | None,  # of `bench_reader`; None: nothing was measured
) -> str:  # Markdown
    "Rates of each way, cold and warm: median and range; CPU seconds; and what it does against the plain way."
    if figures is None:
        return "not measured"
    f = figures["figures"]

    def cell(name: str) -> str:
        return (
            "{median:,.0f} ({least:,.0f} to {most:,.0f})".format(**f[name]["files_per_s"])
            + f" | {f[name]['cpu_s']['median']:.2f}"
        )

    lines = [
        "| way | cold, files/s | CPU s | against plain | warm, files/s | CPU s | against plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (n.rsplit(", ", 1)[0] for n in f if n.endswith(", cold")):
        against = [effect(figures, name, cache) if name != "plain" else "" for cache in ("cold", "warm")]
        lines.append(
            f"| {name} | {cell(f'{name}, cold')} | {against[0]} | {cell(f'{name}, warm')} | {against[1]} |"
        )
    checked = figures["verified"]
    lines += [
        "",
        f"- {rounds_text(figures)}; {checked['runs']} reads compared with the files by digests: "
        + ("all equal" if checked["all_ok"] else "NOT ALL EQUAL"),
        *(
            f"- listing {figures['listed']:,} files, {how}: {s['median']:.3f} s ({s['least']:.3f} to {s['most']:.3f})"
            for how in ("python", "compiled")
            for s in [f[f"listing, {how}"]["seconds"]]
        ),
    ]
    return "\n".join(lines)
