"""Does a build of two hundred thousand recordings cost two hundred times what one of a thousand costs, and no more memory?"""

import errno, os, shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, TYPE_CHECKING

import numpy as np

from leakmel.core.errors import OutputError, UsageError, write_error
from leakmel.core.files import require_space
from leakmel.dataset.file.writer import SPARE_BYTES, part_bytes
from leakmel.dataset.run.existing import state_path
from leakmel.insight.plots import STAGE_COLORS, _apply_style
from leakmel.ops.bench import read_into_cache, synthetic_set, record_head, rounds_text, run_leakmel, spread
from leakmel.ops.bench_gpu import geometry_spec, geometry_words


if TYPE_CHECKING:
    import plotly.graph_objects as go

LEAST_FILES = 1000
ORIGINALS = 4000  # recordings that stand under many names


def growth_sizes(
    most: int,  # files of the largest build
) -> list[int]:  # ascending
    "Numbers of files to build."
    if most < 2:
        raise UsageError("growth needs at least 2 files", found=most)
    steps = (m * 10**k for k in range(3, 10) for m in (1, 2, 5))
    return [*(n for n in steps if LEAST_FILES <= n < most), most] if most > LEAST_FILES else [most // 2, most]


def linked_set(
    root: Path,  # a made set
    folder: Path,  # of the linked ones, on the same file system; one that is there is used again
    n_files: int,
    split: str = "",  # its folder is put above the label folders
) -> Path:  # a folder with n_files recordings
    "Return a data set whose files are hard links to the training recordings of a made one."
    target, new = folder / f"links-{n_files}", folder / f".links-{n_files}.new"
    if target.exists():
        return target
    shutil.rmtree(new, ignore_errors=True)
    originals = sorted(
        (root / "TRAINING").glob("*/*.wav"), key=lambda p: p.name.split("~")[1]
    )  # so that a few of them have both labels too
    for label in {p.parent.name for p in originals}:
        (new / split / label).mkdir(parents=True)
    names = (
        (p, new / split / p.parent.name / _named(p.name, k))
        for k in range(-(-n_files // len(originals)))
        for p in originals
    )
    try:
        for original, name in islice(names, n_files):
            os.link(original, name)
        new.rename(target)
    except OSError as e:
        raise _no_links(e, root) from e
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return target


def _named(name: str, k: int) -> str:
    "The name of copy k: of the same sensor, with a recording number of its own."
    sensor, recording, *rest = name.split("~")
    return "~".join([sensor, f"{recording}x{k:03d}", *rest])


def _no_links(error: OSError, root: Path) -> OutputError:
    "The error for a file system that does not take so many names."
    if error.errno == errno.EMLINK:
        return OutputError(
            "the file system allows no more names for one file",
            path=root,
            remedy=f"measure fewer files; there are {ORIGINALS:,} recordings",
        )
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EACCES):
        return OutputError(
            f"recordings cannot be linked here ({os.strerror(error.errno)})",
            path=root,
            remedy="use a work folder on a file system with hard links",
        )
    return write_error(error, error.filename or root)


def _build(data: Path, target: Path, geometry: str) -> dict[str, Any]:
    "Build a linked set once; the data set is removed afterwards."
    try:
        done = run_leakmel("build", str(data), "--out", str(target), "--no-fsync", *geometry_words(geometry))
        if done.body["rows"] != done.body["found"]:
            raise OutputError("recordings were rejected", path=data, found=f"{done.body['rejected']:,}")
        return {
            "seconds": done.body["seconds"],
            "files_per_s": done.body["files_per_s"],
            "cpu_s": done.cpu_s,
            "process_s": done.wall_s,
            "start_up_s": done.body["start_up_s"],
            "rest_s": done.wall_s - done.body["start_up_s"] - done.body["seconds"],
            "peak_rss_bytes": done.peak_rss_bytes,
            "build_rss_bytes": done.body["peak_rss_bytes"],
            "file_bytes": done.body["file_bytes"],
        }
    finally:
        for path in [*target.parent.glob(f"{target.name}*"), state_path(target)]:
            path.unlink(missing_ok=True)


def _verify_one(data: Path, target: Path, geometry: str) -> dict[str, Any]:
    "Build the smallest set and recompute all of its rows."
    run_leakmel("build", str(data), "--out", str(target), "--no-fsync", *geometry_words(geometry))
    body = run_leakmel("verify", str(target), "--root", str(data), "--sample", "all").body
    for path in [*target.parent.glob(f"{target.name}*"), state_path(target)]:
        path.unlink(missing_ok=True)
    return {
        "data_sets": 1,
        "rows": body["n_rows"],
        "checked": body["checked"],
        "all_ok": body["ok"],
        "max_abs_db": body["max_abs_db"],
    }


FLAT_FROM = 10_000  # files


def bytes_per_file(
    sizes: list[int],
    peaks: list[float],  # bytes, one for each size
) -> float | None:  # None: too few sizes
    "How much memory one more file takes, from FLAT_FROM files up."
    far = np.array([(n, peak) for n, peak in zip(sizes, peaks) if n >= FLAT_FROM])
    return float(np.polyfit(far[:, 0], far[:, 1], 1)[0]) if len(far) > 1 else None


def bench_growth(
    folder: str | os.PathLike,  # work folder: recordings and links are kept there and used again
    *,
    n_files: int = 200_000,  # of the largest build
    rounds: int = 3,  # counted rounds
    geometry: str = "A",
    log: Callable[[str], None] = lambda text: None,  # told what is going on
) -> dict[str, Any]:  # the figures, as they are stored
    "Measure builds of ever more files, sizes in turn."
    if rounds < 1:
        raise UsageError("rounds must be at least 1", found=rounds)
    sizes, folder = growth_sizes(n_files), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, n_files * (part_bytes(geometry_spec(geometry).row_shape, None)[0] + SPARE_BYTES))
    root = synthetic_set(folder, min(ORIGINALS, n_files), log)
    data = {n: linked_set(root, folder / "growth", n) for n in sizes}
    target = folder / "growth" / "GROWTH.H5"
    read_into_cache((root / "TRAINING").rglob("*.wav"))
    log(f"recomputing every row of {sizes[0]:,}")
    verified = _verify_one(data[sizes[0]], target, geometry)
    runs: dict[int, list[dict[str, Any]]] = {n: [] for n in sizes}
    for i in range(rounds):
        for n, kept in runs.items():
            kept.append(_build(data[n], target, geometry))
            log(
                f"round {i + 1} of {rounds}: {n:,} files: {kept[-1]['files_per_s']:,.0f} files/s, {kept[-1]['build_rss_bytes'] / 1e6:,.0f} MB"
            )
    return _record(runs, len(list((root / "TRAINING").glob("*/*.wav"))), rounds, geometry, verified)


def _record(
    runs: dict[int, list[dict[str, Any]]],
    n_originals: int,
    rounds: int,
    geometry: str,
    verified: dict[str, Any],
) -> dict[str, Any]:
    "The figures as they are stored."
    figures = {str(n): {key: spread([r[key] for r in kept]) for key in kept[0]} for n, kept in runs.items()}
    slopes = {
        key: bytes_per_file([*runs], [f[key]["median"] for f in figures.values()])
        for key in ("build_rss_bytes", "peak_rss_bytes")
    }
    return {
        **record_head("growth"),
        "n_files": max(runs),
        "originals": n_originals,
        "geometry": geometry,
        "rounds": rounds,
        "cache": "warm",
        "interval": "listing to published file, imports left out; "
        "each build in a process of its own; files are hard links of the originals, so the page cache holds all of them",
        "verified": verified,
        "flat_from": FLAT_FROM,
        "bytes_per_file": slopes,
        "figures": figures,
    }


def _memory_words(figures: dict[str, Any]) -> str:
    "What one more file takes."
    slope, flat_from = figures["bytes_per_file"], figures["flat_from"]
    if slope["build_rss_bytes"] is None:
        return f"memory for one more file: not measured (needs more than {flat_from:,} files)"
    return (
        f"memory for one more file, beyond {flat_from:,}: {slope['build_rss_bytes']:,.0f} bytes in the build, "
        f"{slope['peak_rss_bytes']:,.0f} bytes in the process, which reports on the copies"
    )


def growth_table(
    figures: dict[str, Any] | None,  # of `bench_growth`; None: nothing was measured
) -> str:
    "The figures as text."
    if figures is None:
        return "not measured"
    m, v = figures["machine"], figures["verified"]
    lines = [
        f"{'files':>9} {'files/s':>9} {'range':>17} {'CPU us/file':>11} {'build MB':>9} {'process MB':>10} {'rest s':>8} {'file MB':>8}"
    ]
    for n, f in figures["figures"].items():
        rate, cpu_us = f["files_per_s"], 1e6 * f["cpu_s"]["median"] / int(n)
        lines.append(
            f"{int(n):>9,} {rate['median']:>9,.0f} {rate['least']:>8,.0f}-{rate['most']:<8,.0f} {cpu_us:>11,.1f} "
            f"{f['build_rss_bytes']['median'] / 1e6:>9,.0f} {f['peak_rss_bytes']['median'] / 1e6:>10,.0f} {f['rest_s']['median']:>8.2f} "
            f"{f['file_bytes']['median'] / 1e6:>8,.0f}"
        )
    lines.append(_memory_words(figures))
    lines.append(
        f"{figures['originals']:,} recordings under many names, geometry {figures['geometry']}, {rounds_text(figures)}, {figures['cache']} cache, "
        f"{m['n_cores']} cores ({m['cpu']})"
    )
    lines.append(
        f"{v['checked']:,} of {v['rows']:,} rows of the smallest recomputed in float64: {'all right' if v['all_ok'] else 'NOT ALL RIGHT'}, "
        f"largest difference {v['max_abs_db']:.4f} dB; 64 rows in every other build"
    )
    return "\n".join(lines)


def growth_figure(
    figures: dict[str, Any],  # of `bench_growth`
) -> "go.Figure":
    "Draw files per second and peak memory over the number of files."
    from plotly.subplots import make_subplots

    sizes = [int(n) for n in figures["figures"]]
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    fig.layout.template = {}
    curves = (
        ("rate", "files_per_s", 1.0, "compute", 1),
        ("memory, build", "build_rss_bytes", 1e-6, "read", 2),
        ("memory, process with its report", "peak_rss_bytes", 1e-6, "verify", 2),
    )
    for name, key, factor, stage, row in curves:
        fig.add_trace(
            _points(name, sizes, [f[key] for f in figures["figures"].values()], factor, STAGE_COLORS[stage]),
            row=row,
            col=1,
        )
    for row, title in ((1, "files/s"), (2, "peak memory (MB)")):
        fig.update_yaxes(title=dict(text=title), rangemode="tozero", row=row, col=1)
    fig.update_xaxes(type="log", tickvals=sizes, ticktext=[f"{n:,}" for n in sizes])
    fig.update_xaxes(title=dict(text="files"), row=2, col=1)
    about = f"Median and range of {rounds_text(figures)}; files are hard links of {figures['originals']:,} recordings"
    return _apply_style(fig, _growth_title(figures), about, 420)


def _points(
    name: str, sizes: list[int], spreads: list[dict[str, float]], factor: float, colour: str
) -> "go.Scatter":
    "Medians as points on a line, ranges as bars."
    import plotly.graph_objects as go

    median, least, most = (
        np.array([s[key] for s in spreads]) * factor for key in ("median", "least", "most")
    )
    return go.Scatter(
        name=name,
        x=sizes,
        y=median,
        mode="lines+markers",
        line=dict(color=colour, width=1.6),
        error_y=dict(
            type="data", symmetric=False, array=most - median, arrayminus=median - least, thickness=1, width=3
        ),
        hovertemplate="%{y:,.4~g} at %{x:,} files<extra>%{fullData.name}</extra>",
    )


def _growth_title(figures: dict[str, Any]) -> str:
    "The rate at the largest size against its best, and what a file costs in memory."
    rates, slope = (
        [f["files_per_s"]["median"] for f in figures["figures"].values()],
        figures["bytes_per_file"]["build_rss_bytes"],
    )
    memory = "" if slope is None else f"; memory grows by {max(0.0, slope):,.0f} bytes a file"
    return f"{figures['n_files']:,} files at {rates[-1] / max(rates):.0%} of the best rate{memory}"
