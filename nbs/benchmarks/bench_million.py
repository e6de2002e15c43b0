"""What a user waits for around a build of a million recordings: time and memory of each step in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from leakmel.core.errors import LeakmelError, UsageError
from leakmel.extras.machine.bench import read_into_cache, record_head, rounds_text, spread
from leakmel.recordings.demo import plan_set, render_planned, wav_bytes
from leakmel.recordings.wav import HEADER_BYTES

MOST_BYTES, MOST_S = 2e9, 30.0  # of a step around a build, for a million recordings
N_SHORT, RATE = 4000, 8000  # samples and Hz of the recordings of half a second
N_NEW = 1000  # recordings of an update
N_SENSORS = 300
COLUMNS, UPDATE = "columns of a data set", f"update with {N_NEW:,} new"
BAD_EVERY, DRY_EVERY = 500, 200  # a file that is no recording; a name with gain 1

HEAD = """
import json, resource, sys, time
import leakmel as lm
root, out = sys.argv[1:]
spec = lm.MelSpec(sample_rate=8000, duration_s=0.5)
parts, last = {}, time.perf_counter()
def done(name):
    global last
    parts[name], last = time.perf_counter() - last, time.perf_counter()
done("imports")
"""
TAIL = "print(json.dumps([found, parts]))"
BUILD = """
r = lm.build(root, out=out, spec=spec, progress="none")
done("build")
found = r.rows + len(r.rejections) if r.verified.ok else 0
if written := [s.end_s for s in r.timeline.spans if s.stage == "write"]:
    parts |= {"after the last row": r.start_up_s + r.seconds - max(written), "seconds": r.seconds}
"""
PREDICT = """
import torch
from leakmel.detector.data.segments import make_task
from leakmel.detector.model.detector import Detector
from leakmel.detector.model.net import LeakNet, NetSettings
Detector.segment_scores = lambda self, mels, counts: torch.rand(mels.shape[:2])  # takes no time
detector = Detector(LeakNet(NetSettings(channels=(8, 8))), make_task(["LEAK", "NOLEAK"]), spec)
done("imports")
p = lm.predict(root, detector, manifest={manifest}, device="cpu", progress="none")
done("listing, reading, features")
"""
CSV_FILE = """
p.write(out + ".csv")
done("CSV file")
p.text()
found = p.found
done("summary")
"""
TABLE = """
found = len(p.table) + len(p.rejected)
done("table")
repr(p)
done("summary")
"""
STEPS = {
    "card of a scan": """
m = lm.scan(root, progress="none")
done("scan")
m._repr_html_()
done("card")
m.table
done("table")
m.problems
found = len(m)
""",
    "build": BUILD,
    COLUMNS: """
ds = lm.open_dataset(out)
repr(ds)
done("open")
found = len(ds.files)
done("files")
""",
    "update with nothing new": BUILD,
    UPDATE: BUILD,
    # as `leakmel predict`, and as in a notebook
    "prediction of a folder": PREDICT.replace("{manifest}", "None") + CSV_FILE,
    "prediction of a manifest": PREDICT.replace("{manifest}", 'lm.scan(root, progress="none")') + TABLE,
}


def _name(i: int) -> str:
    "The path of recording i below the root."
    k = i // 2
    when = datetime(2024, 1, 1) + timedelta(minutes=10 * (k // N_SENSORS), seconds=i % 2)
    gain = 1 if i % DRY_EVERY == 7 else 20 + k % 5
    label = ("LEAK", "NOLEAK")[i % 2]
    return f"{label}/S-{k % N_SENSORS:03d}~{k // N_SENSORS:06d}{i % 2}~{when:%Y%m%d_%H%M%S}~{gain}.wav"


def _bodies(short: bool) -> dict[str, list[bytearray]]:
    "Make some hundred WAV files of each label."
    made: dict[str, list[bytearray]] = {"LEAK": [], "NOLEAK": []}
    for planned in plan_set(200 if short else 600):
        samples = render_planned(planned)[1]
        files = [wav_bytes(samples)]
        if short:
            files = [
                wav_bytes(samples[k * N_SHORT :][:N_SHORT], RATE) for k in range(len(samples) // N_SHORT)
            ]
        made[planned.label] += map(bytearray, files)
    return made


def _own(bodies: list[bytearray], i: int) -> bytearray:
    "Return a WAV file whose samples no other recording has: its last four bytes are the number."
    body = bodies[i // 2 % len(bodies)]
    body[-4:] = i.to_bytes(4, "little")
    return body


def distinct_set(
    folder: Path,  # work folder; a set that is there is used again
    n_files: int,
    short: bool,  # recordings of half a second, some of them files that are no recordings; else of 10 s
) -> Path:  # a folder of label folders
    "Make recordings, each with samples of its own."
    root, new = folder / f"{'short' if short else 'long'}-{n_files}", folder / ".distinct.new"
    if root.exists():
        return root
    shutil.rmtree(new, ignore_errors=True)
    for label in ("LEAK", "NOLEAK"):
        (new / label).mkdir(parents=True)
    made = _bodies(short)
    for i in range(n_files):
        name = _name(i)
        is_bad = short and i % BAD_EVERY == 13
        (new / name).write_bytes(b"" if is_bad else _own(made[name.partition("/")[0]], i))
    new.rename(root)
    return root


def run_step(
    code: str,
    root: Path,
    out: Path,
    n_found: int,  # recordings that the step must account for
) -> dict[str, float]:  # raises LeakmelError
    "Run a step in a process of its own; return its seconds, also by part, CPU seconds and peak memory."
    words = [sys.executable, "-c", HEAD + code + TAIL, str(root), str(out)]
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise LeakmelError("a step of the benchmark failed", code="command-failed", found=process.returncode)
    found, parts = json.loads(text)
    if found != n_found:
        raise LeakmelError(
            "a step lost recordings", code="benchmark-not-right", found=found, expected=n_found
        )
    whole = {
        "process_s": time.perf_counter() - began,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": float(usage.ru_maxrss * 1024),
    }
    return whole | {f"part: {name}": seconds for name, seconds in parts.items()}


def _read_all(root: Path) -> None:
    "Read the recordings into the page cache, which may lose pages that nobody has used for a minute."
    for label in ("LEAK", "NOLEAK"):
        read_into_cache(os.scandir(root / label))


def _add_new(root: Path, n_files: int) -> list[Path]:
    "Add recordings for an update; return their paths."
    bodies = _bodies(True)["LEAK"]
    paths = [root / "LEAK" / f"S-new~{k:06d}~20250101_000000~20.wav" for k in range(N_NEW)]
    for k, path in enumerate(paths):
        path.write_bytes(_own(bodies, n_files + k))
    return paths


def bench_million(
    folder: str | os.PathLike,  # work folder: recordings are kept there and used again
    *,
    n_files: int = 1_000_000,
    tail_files: int = 51_434,  # of a build of recordings of 10 s, whose work after the last row is measured
    rounds: int = 1,
    log: Callable[[str], None] = lambda text: None,  # told what is going on
) -> dict[str, Any]:  # the figures, as they are stored
    "Measure each step around a build of many recordings."
    if min(n_files, tail_files) < 1000 or rounds < 1:
        raise UsageError(
            "n_files and tail_files must be at least 1,000, and rounds at least 1",
            code="out-of-range",
            found=f"{n_files}, {tail_files}, {rounds}",
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    log(f"writing {n_files:,} recordings")
    root, out = distinct_set(folder, n_files, True), folder / "MILLION.H5"
    n_bad = len(range(13, n_files, BAD_EVERY))  # files that are no row
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in STEPS}
    for _ in range(rounds):
        _remove(out)
        for name, code in STEPS.items():
            _read_all(root)
            added = _add_new(root, n_files) if name == UPDATE else []
            try:
                n_found = n_files - (name == COLUMNS) * n_bad + len(added)
                runs[name].append(run_step(code, root, out, n_found))
            finally:
                for path in added:
                    path.unlink()
            log(f"{name}: {runs[name][-1]['process_s']:.1f} s")
    _remove(out)
    log(f"writing {tail_files:,} recordings")
    small, target = distinct_set(folder, tail_files, False), folder / "TAIL.H5"
    code = BUILD.replace("spec=spec", "pipeline=lm.PipelineConfig(fsync=False)")
    tails = []
    for _ in range(2 * rounds + 3):
        _read_all(small)
        tails.append(run_step(code, small, target, tail_files))
        _remove(target)
        log(f"build of {tail_files:,}: {tails[-1]['process_s']:.1f} s")
    return {
        **record_head("million"),
        "ok": True,  # a step that loses a recording raises
        "n_files": n_files,
        "bytes_each": HEADER_BYTES + 2 * N_SHORT,
        "tail_files": tail_files,
        "rounds": rounds,
        "cache": "warm",
        "interval": "each step in a process of its own, imports and interpreter included; scores of the predictions take no "
        "time; recordings of half a second, each a file with samples of its own",
        "steps": {name: _spreads(kept) for name, kept in runs.items()},
        "tail": _spreads(tails)
        | {"share": spread([t["part: after the last row"] / t["part: seconds"] for t in tails])},
    }


def _remove(out: Path) -> None:
    for path in [*out.parent.glob(f"{out.name}*"), out.with_name(f".{out.name}.state")]:
        path.unlink(missing_ok=True)


def _spreads(kept: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {key: spread([one[key] for one in kept]) for key in kept[0]}


def million_table(
    record: dict[str, Any] | None,  # of `bench_million`; None: nothing was measured
) -> str:
    "The figures as text."
    if record is None:
        return "not measured"
    lines = [f"{'step':<26} {'process s':>9} {'CPU s':>7} {'peak MB':>8}  parts (s)"]
    for name, f in record["steps"].items():
        parts = ", ".join(
            f"{key.removeprefix('part: ')} {value['median']:.1f}"
            for key, value in f.items()
            if key.startswith("part: ")
        )
        lines.append(
            f"{name:<26} {f['process_s']['median']:>9.1f} {f['cpu_s']['median']:>7.1f} "
            f"{f['peak_rss_bytes']['median'] / 1e6:>8,.0f}  {parts}"
        )
    tail, share = record["tail"], record["tail"]["share"]
    lines.append(
        f"build of {record['tail_files']:,} recordings of 10 s: {tail['part: after the last row']['median']:.2f} s after the last "
        f"row, {share['median']:.1%} of the build (range {share['least']:.1%} to {share['most']:.1%})"
    )
    m = record["machine"]
    lines.append(
        f"{record['n_files']:,} recordings of half a second, {rounds_text(record)}, {record['cache']} cache, "
        f"{m['n_cores']} cores ({m['cpu']})"
    )
    return "\n".join(lines)
