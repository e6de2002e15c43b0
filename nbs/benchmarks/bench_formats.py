"""What the format of recordings costs: builds of the same sounds, as loggers and as other programs write them."""

import os, struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from leakmel.audio.wav import read_wav
from leakmel.mel.spec import MelSpec
from leakmel.ops.bench import (
    build_once,
    read_into_cache,
    record_head,
    require_rounds,
    spread,
    synthetic_set,
    verify_all,
)


def _with_note(path: Path, content: bytes, samples: np.ndarray, rate: int) -> None:
    note = b"LIST" + struct.pack("<I", 26) + b"INFOISFT" + struct.pack("<I", 14) + b"Lavf60.16.100\0"
    body = content[8:36] + note + content[36:]
    path.write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)


FORMATS: dict[str, Callable[[Path, bytes, np.ndarray, int], object]] = {
    "as loggers write it": lambda path, content, x, rate: path.write_bytes(content),
    "a LIST chunk before the samples": _with_note,
    "1 % shorter than a row": lambda path, content, x, rate: soundfile.write(
        path, x[: len(x) * 99 // 100], rate, "PCM_16"
    ),
    "two channels": lambda path, content, x, rate: soundfile.write(
        path, np.stack([x, x[::-1]], axis=1), rate, "PCM_16"
    ),
    "24 bits": lambda path, content, x, rate: soundfile.write(path, x.astype(np.int32) << 16, rate, "PCM_24"),
    "twice the rate": lambda path, content, x, rate: soundfile.write(
        path, np.repeat(x, 2), 2 * rate, "PCM_16"
    ),
}


def _make_set(root: Path, made: Path, name: str) -> Path:
    "Return the set in a format; an existing one is used again."
    folder = made / name.replace(" ", "-")
    if not folder.is_dir():
        new = folder.with_suffix(".new")
        for source in sorted((root / "TRAINING").rglob("*.wav")):
            path = new / source.relative_to(root)
            path.parent.mkdir(parents=True, exist_ok=True)
            recording = read_wav(source)
            FORMATS[name](path, source.read_bytes(), recording.samples[:, 0], recording.sample_rate)
        new.rename(folder)
    return folder


def bench_formats(
    folder: str | os.PathLike,  # work folder: the made sets are kept there and used again
    *,
    n_files: int = 2500,  # recordings of the training split
    rounds: int = 3,  # counted rounds
    log: Callable[[str], None] = lambda text: None,  # told what is going on
) -> dict[str, Any]:  # the figures, as they are stored
    "Build the same recordings in each format, in turn, from a warm page cache, and verify all rows."
    require_rounds(rounds)
    base = synthetic_set(folder, n_files, log)
    roots = {name: _make_set(base, Path(folder) / "formats", name) for name in FORMATS}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in FORMATS}
    spec = MelSpec.preset("disjoint")  # named, because those of most recordings are the default
    words = ["--split", "training", "--preset", "disjoint", "--no-fsync"]
    words += ["--sample-rate", f"{spec.sample_rate}", "--duration-s", f"{spec.duration_s}"]
    for i in range(-1, rounds):  # a round before the first one is not counted
        for name, root in roots.items():
            out = Path(folder) / "built" / root.name / "x"
            out.mkdir(parents=True, exist_ok=True)
            read_into_cache((root / "TRAINING").rglob("*.wav"))
            figures = build_once(root, out, words, n_files)
            if i >= 0:
                runs[name].append(figures)
            log(f"round {i + 1} of {rounds}: {name}: {figures['work_files_per_s']:,.0f} files/s")
    log("recomputing all rows")
    verified = {name: verify_all(root, Path(folder) / "built" / root.name) for name, root in roots.items()}
    return {
        **record_head("formats"),
        "n_files": n_files,
        "rounds": rounds,
        "cache": "warm",
        "interval": "work_s: first read to publication, without imports and listing; processes of their own",
        "ok": all(v["all_ok"] for v in verified.values()),
        "verified": verified,
        "figures": {
            name: {key: spread([r[key] for r in kept]) for key in ("work_s", "work_files_per_s", "cpu_s")}
            for name, kept in runs.items()
        },
    }


def formats_table(
    record: Mapping[str, Any] | None,  # of `bench_formats`; None: nothing was measured
) -> str:  # Markdown
    "Rate and processor time of each format, median and range."
    if record is None:
        return "not measured"
    lines = ["| recordings | files/s | processor time of the process, s |", "|---|---|---|"]
    for name, f in record["figures"].items():
        rate, cpu = f["work_files_per_s"], f["cpu_s"]
        lines.append(
            f"| {name} | {rate['median']:,.0f} ({rate['least']:,.0f} to {rate['most']:,.0f}) | {cpu['median']:.1f} |"
        )
    machine = record["machine"]
    return "\n".join(lines) + (
        f"\n\n{record['n_files']:,} recordings on {machine['n_cores']} cores ({machine['cpu']}), {record['rounds']} rounds, "
        f"commit {record['commit'][:8]}"
    )
