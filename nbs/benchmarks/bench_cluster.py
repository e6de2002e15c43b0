"""One build on this machine against two workers of Dask on the same machine, with the join of their parts."""

import gc
import os
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import leakmel as lm
from leakmel.dataset import pipeline as parts_module
from leakmel.extras.machine.bench import record_head, touch_memory
from leakmel.recordings.demo import WAV_BYTES


def _cpu_seconds() -> float:
    "CPU seconds of this process and its children so far."
    own = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (own, *own.children(recursive=True)))


def _linked(folder: Path, n: int, n_distinct: int) -> Path:
    "Make n recordings: hard links of some synthetic ones, two thousand in a folder."
    root = folder / f"links-{n}"
    if not root.exists():
        if not (folder / "demo").exists():
            lm.write_demo(folder / "demo", n_files=n_distinct)
        paths = sorted((folder / "demo" / "TRAINING").rglob("*.wav"))
        for k in range(n):
            path = paths[k % len(paths)]
            place = root / path.parent.name / f"{k // 2000:04d}"
            place.mkdir(parents=True, exist_ok=True)
            sensor, _, time_and_gain = path.stem.split("~", 2)
            os.link(path, place / f"{sensor}~{k:06d}~{time_and_gain}.wav")
    return root


def bench_cluster(
    folder: str | os.PathLike,  # work folder; the links stay there
    *,
    n: int = 200_000,  # recordings
    n_distinct: int = 8_000,  # synthetic recordings of which they are links, 82 kB each
    rounds: int = 3,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Build the same recordings in one process, and in parts by two workers with one thread each, alternately."
    from distributed import Client, LocalCluster

    work = Path(folder)
    work.mkdir(parents=True, exist_ok=True)
    root = _linked(work, n, n_distinct)
    options: dict[str, Any] = {"engine": "cpu", "progress": "none", "fresh": True}
    found, right = list[dict[str, Any]](), True
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        for k in range(-1, rounds):  # the first round is not counted
            digests = set[str]()
            for name, where in (("one", None), ("two workers", client)):
                out = work / "sets" / f"{name.replace(' ', '-')}.h5"
                gc.collect()
                touch_memory(n * WAV_BYTES // 4)  # twice the data set
                before, began = _cpu_seconds(), time.perf_counter()
                made = lm.build(root, out=out, cluster=where, **options)
                took = {"seconds": time.perf_counter() - began, "cpu_s": _cpu_seconds() - before}
                copied = [s for s in made.timeline.spans if s.stage == "write" and s.lane == "main"]
                took["copy_s"] = sum(s.end_s - s.start_s for s in copied)  # with waiting for parts
                if k >= 0:
                    found.append({"round": k, "how": name, "parts": made.summary["parts"]} | took)
                digests.add(sha256(out.read_bytes()).hexdigest())
                log(f"round {k + 1}, {name}: {took['seconds']:.1f} s, {took['cpu_s']:.1f} s of CPU")
            right = right and len(digests) == 1
    head = {**record_head("cluster"), "verified": {"all_ok": right}}
    return {**head, "recordings": n, "distinct": n_distinct, "workers": 2, "builds": found}


def _medians(record: dict[str, Any], name: str) -> dict[str, float]:
    own = [b for b in record["builds"] if b["how"] == name]
    return {key: float(np.median([b[key] for b in own])) for key in ("seconds", "cpu_s")}


def cluster_table(record: dict[str, Any]) -> str:
    "Medians as a text table, with the overhead of parts and join."
    names: Sequence[str] = ("one", "two workers")
    both = {name: _medians(record, name) for name in names}
    lines = [f"{record['recordings']:,} recordings, medians of {len(record['builds']) // 2} rounds"]
    lines += [f"{n:12s} {m['seconds']:7.1f} s {m['cpu_s']:7.1f} s of CPU" for n, m in both.items()]
    ratio = {key: both["two workers"][key] / both["one"][key] for key in ("seconds", "cpu_s")}
    lines.append(
        f"two workers on the same cores: {ratio['seconds']:.2f} times the time, {ratio['cpu_s']:.2f} of the CPU seconds"
    )
    return "\n".join(lines)


_MANY = 20  # parts, against one


def _seconds(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    made = function(*args, **options)
    return time.perf_counter() - began, made


def bench_part_costs(
    folder: str | os.PathLike,  # work folder; links and data sets stay there
    *,
    n: int = 100_000,  # recordings
    n_distinct: int = 8_000,  # synthetic recordings of which they are links
    rounds: int = 3,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Measure the start of a worker, its first build, what each further part costs, and the join by size."
    from distributed import Client, LocalCluster

    work = Path(folder)
    work.mkdir(parents=True, exist_ok=True)
    sizes = (n // 4, n)
    roots = {m: _linked(work, m, n_distinct) for m in sizes}
    options: dict[str, Any] = {"engine": "cpu", "progress": "none"}
    right = {m: lm.build(roots[m], out=work / "sets" / f"whole-{m}.h5", **options).path for m in sizes}
    for m in sizes:
        for k in range(1, 5):
            lm.build_part(roots[m], part=(k, 4), out=work / "sets" / f"joined-{m}.h5", **options)
    if not (work / "small").exists():
        lm.write_demo(work / "small", n_files=100)
    listing = lm.scan(roots[n], progress="none")
    usual = parts_module.PART_SIZE, parts_module._PARTS_PER_PROCESS
    found, ok = list[dict[str, Any]](), True
    for k in range(rounds):
        figures: dict[str, Any] = {"round": k}
        where: dict[str, Any] = {
            "threads_per_worker": 1,
            "host": "127.0.0.1",
            "dashboard_address": "127.0.0.1:0",
        }
        with LocalCluster(n_workers=1, **where) as cluster, Client(cluster) as client:
            began = time.perf_counter()
            cluster.scale(2)
            client.wait_for_workers(2)
            figures["worker_start_s"] = time.perf_counter() - began
        with LocalCluster(n_workers=1, **where) as cluster, Client(cluster) as client:
            small = {"split": "training", "out": work / "sets" / "small.h5", "cluster": client, "fresh": True}
            for name in ("first_build_s", "second_build_s"):
                figures[name], _ = _seconds(lm.build, work / "small", **small, **options)
            for name, n_parts in (("one_part_s", 1), ("parts_s", _MANY)):
                parts_module.PART_SIZE, parts_module._PARTS_PER_PROCESS = -(-n // n_parts), 1
                out = work / "sets" / "parts.h5"
                again = {"out": out, "manifest": listing, "cluster": client, "fresh": True}
                figures[name], made = _seconds(lm.build, roots[n], **again, **options)
                ok = ok and made.summary["parts"] == n_parts
                ok = ok and out.read_bytes() == right[n].read_bytes()
                own = [s for s in made.timeline.spans if "/worker-" in s.lane]
                figures[f"busy_in_{name}"] = sum(s.seconds for s in own)
            parts_module.PART_SIZE, parts_module._PARTS_PER_PROCESS = usual
        for m in sizes:
            joined = work / "sets" / f"joined-{m}.h5"
            joined.unlink(missing_ok=True)
            figures[f"join_{m}_s"], made = _seconds(lm.join, joined, keep_parts=True, progress="none")
            ok = ok and joined.read_bytes() == right[m].read_bytes()
        found.append(figures)
        log(f"round {k + 1} of {rounds}")
    head = {**record_head("part-costs"), "verified": {"all_ok": ok}}
    n_bytes = {str(m): right[m].stat().st_size for m in sizes}
    return {**head, "recordings": n, "parts": _MANY, "file_bytes": n_bytes, "rounds": found}


def part_costs(record: dict[str, Any]) -> dict[str, float]:
    "Least times of a record of `bench_part_costs`, which other programs disturb least; the join is a line through two sizes."
    both = {key: min(r[key] for r in record["rounds"]) for key in record["rounds"][0]}
    small, large = sorted(map(int, record["file_bytes"]))
    gb = (record["file_bytes"][str(large)] - record["file_bytes"][str(small)]) / 1e9
    per_gb = (both[f"join_{large}_s"] - both[f"join_{small}_s"]) / gb
    return {
        "worker_start_s": both["worker_start_s"],
        "first_build_s": both["first_build_s"] - both["second_build_s"],
        # 0: less than the differences between rounds
        "part_s": max(0.0, both["busy_in_parts_s"] - both["busy_in_one_part_s"]) / (record["parts"] - 1),
        "join_s_per_gb": per_gb,
        "worker_files_per_s": record["recordings"] / both["busy_in_one_part_s"],
        "bytes_per_row": record["file_bytes"][str(large)] / record["recordings"],
    }


def part_costs_table(record: dict[str, Any]) -> str:
    "The costs as a text table."
    c = part_costs(record)
    return "\n".join(
        [
            f"{record['recordings']:,} recordings, least of {len(record['rounds'])} rounds, files in the page cache",
            f"start of a worker              {c['worker_start_s']:6.2f} s, without the queue of the cluster",
            f"imports in its first build     {c['first_build_s']:6.2f} s",
            f"each further part              {1000 * c['part_s']:6.0f} ms"
            + ", less than the noise" * (not c["part_s"]),
            f"join                           {c['join_s_per_gb']:6.2f} s for each GB of the data set",
            f"a worker with one thread       {c['worker_files_per_s']:6,.0f} recordings/s",
        ]
    )


def ten_million(
    costs: dict[str, Any],  # record of `bench_part_costs`
    builds: dict[str, Any],  # record of `bench_cluster`
    workers: Sequence[int] = (4, 16, 64),  # with one thread each
) -> str:
    "Calculate the time of 10 million recordings from the records; nothing of this size was measured."
    n, c = 10_000_000, part_costs(costs)
    one = n * _medians(builds, "one")["seconds"] / builds["recordings"]
    n_parts, gb = -(-n // parts_module.PART_SIZE), n * c["bytes_per_row"] / 1e9
    join = gb * c["join_s_per_gb"]
    lines = [f"one machine, 2 threads {one:8,.0f} s"]
    for k in workers:
        at_work = n / c["worker_files_per_s"] / k + -(-n_parts // k) * c["part_s"]
        total = c["worker_start_s"] + c["first_build_s"] + max(at_work, join)
        lines.append(
            f"{k:3d} workers, 1 thread   {total:8,.0f} s: parts {at_work:,.0f} s, join {join:,.0f} s at the same time"
        )
    lines.append(
        f"storage at 10 Gbit/s   {n * 82_000 * 8 / 1e10:8,.0f} s to read 820 GB, whatever the number of workers"
    )
    return "\n".join(lines)
