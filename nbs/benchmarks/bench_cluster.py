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
from leakmel.ops.bench import record_head


def _cpu_seconds() -> float:
    "CPU seconds of this process and its children so far."
    own = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (own, *own.children(recursive=True)))


def _linked(folder: Path, n: int, n_distinct: int) -> Path:
    "Make n recordings: hard links of some synthetic ones, two thousand in a folder."
    root = folder / f"links-{n}"
    if not root.exists():
        lm.write_demo(folder / "demo", n_files=n_distinct)
        paths = sorted((folder / "demo" / "TRAINING").rglob("*.wav"))
        for k in range(n):
            path = paths[k % len(paths)]
            place = root / path.parent.name / f"{k // 2000:04d}"
            place.mkdir(parents=True, exist_ok=True)
            os.link(path, place / f"{path.stem}_{k}.wav")
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
    found: list[dict[str, Any]] = []
    with (
        LocalCluster(2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        for k in range(rounds):
            digests = set[str]()
            for name, where in (("one", None), ("two workers", client)):
                out = work / "sets" / f"{name.replace(' ', '-')}.h5"
                gc.collect()
                before, began = _cpu_seconds(), time.perf_counter()
                made = lm.build(root, out=out, cluster=where, **options)
                took = {"seconds": time.perf_counter() - began, "cpu_s": _cpu_seconds() - before}
                copied = [s for s in made.timeline.spans if s.stage == "write" and s.lane == "main"]
                took["copy_s"] = sum(s.end_s - s.start_s for s in copied)  # with waiting for parts
                found.append({"round": k, "how": name, "parts": made.summary["parts"]} | took)
                digests.add(sha256(out.read_bytes()).hexdigest())
                log(f"round {k + 1}, {name}: {took['seconds']:.1f} s, {took['cpu_s']:.1f} s of CPU")
            found[-1]["equal"] = len(digests) == 1
    right = all(f.get("equal", True) for f in found)
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
