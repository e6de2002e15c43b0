"The suites `parts` and `growth`: every part runs, the tables say what the record says, and what is wrong is not counted."

import contextlib
import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import bench_growth
import bench_parts
import pytest
from each import each
from bench_growth import bytes_per_file, growth_figure, growth_sizes, growth_table, linked_set
from bench_parts import (
    BUILDS,
    PARTS,
    core_counts,
    fsync_words,
    on_cores,
    on_threads,
    one_part,
    parts_markdown,
    parts_table,
    price_of_trust,
)

from leakmel.audio.synth import write_demo
from leakmel.cli import main
from leakmel.core.errors import OutputError, SpaceError, UsageError
from leakmel.core.monitor import usable_cores
from leakmel.mel.engines import CPU_ENGINES, EngineUnavailable
from leakmel.ops import bench
from leakmel.ops.bench import ProcessRun, spread

pytestmark = pytest.mark.site


def here(*argv: str) -> ProcessRun:
    "`run_leakmel` without the start of a process."
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        status = main([*argv, "--json"])
    body = json.loads(text.getvalue())
    if status:
        raise OutputError(body.get("error", body.get("verdict", "failed")))
    return ProcessRun(body.get("seconds", 1.0) + 1, 0.5, 10**8, body)


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    "Builds and checks of the suites run in this process."
    for module in (bench, bench_parts, bench_growth):
        monkeypatch.setattr(module, "run_leakmel", here)


# ---- parts


def test_the_suite_parts_end_to_end(tmp_path, monkeypatch, in_this_process):
    monkeypatch.setattr(bench_parts, "core_counts", lambda: [1])
    read = list[list[str]]()
    monkeypatch.setattr(
        bench_parts, "read_into_cache", lambda files: read.append([Path(f).suffix for f in files])
    )
    figures = bench_parts.bench_parts(tmp_path / "work", n_files=24, rounds=1)
    n_reading = sum(part.startswith(("read", "write", "pass")) for part in PARTS)
    each = [[".wav"] * 24] * len(BUILDS) + [[".wav"] * 24 + [".h5"]] * n_reading
    assert [[s.lower() for s in files] for files in read] == 2 * 2 * each, "a warming round, two geometries"
    text = parts_table(figures)
    assert (figures["suite"], figures["n_files"], figures["cores"], figures["not_measured"]) == (
        "parts",
        24,
        [1],
        {},
    )
    assert list(figures["figures"]) == [f"{g}, {part}, 1 core" for g in "AB" for part in (*BUILDS, *PARTS)]
    assert {f"compute, {engine}" for engine in CPU_ENGINES} < set(PARTS)
    for name, f in figures["figures"].items():
        assert f["seconds"]["least"] > 0, name
        assert f["files"]["median"] == 24, name
        assert f["files_per_s"]["median"] == pytest.approx(24 / f["seconds"]["median"]), name
        assert name in text
    shapes = {g: figures["figures"][f"{g}, write, 1 core"]["bytes"]["median"] / 24 for g in "AB"}
    assert shapes == {"A": 80 * 64 * 2, "B": 237 * 64 * 2}
    assert (
        figures["figures"]["A, build, gzip, 1 core"]["bytes"]["median"]
        < figures["figures"]["A, build, 1 core"]["bytes"]["median"]
    )
    assert (
        figures["verified"]["data_sets"],
        figures["verified"]["checked"],
        figures["verified"]["all_ok"],
    ) == (4, 4 * 24, True)
    assert sorted(os.listdir(tmp_path / "work" / "parts")) == ["built", "same"], (
        "what was only measured with is removed"
    )
    table = parts_markdown(figures).splitlines()
    assert len([line for line in table if line.startswith("|")]) == 2 + len(BUILDS) + len(PARTS) + 2 + 4 + 5
    assert any(line.startswith("| journal and state | 0.0") for line in table)
    for g in "AB":
        trust = figures["trust"][f"{g}, 1 core"]
        assert trust["without_s"] + sum(trust["pieces_s"].values()) == pytest.approx(trust["build_s"])
        assert trust["share"] == pytest.approx(sum(trust["pieces_s"].values()) / trust["build_s"])


def test_builds_with_different_bytes_give_no_figures(tmp_path, monkeypatch, in_this_process):
    "One bit more or less by --check 0 or fsync would be a defect; then nothing is all right."
    monkeypatch.setattr(bench_parts, "core_counts", lambda: [1])
    monkeypatch.setattr(bench_parts, "GEOMETRIES", {"A": bench_parts.GEOMETRIES["A"]})
    monkeypatch.setattr(bench_parts, "PARTS", {})
    monkeypatch.setitem(
        bench_parts.BUILDS, "build, fsync", ("--channels", "first")
    )  # another setting, so other bytes
    figures = bench_parts.bench_parts(tmp_path, n_files=12, rounds=1)
    assert figures["not_measured"] == {"A, build, fsync, 1 core": "other bytes than without it"}
    assert not figures["verified"]["all_ok"]
    assert (figures["trust"], "A, build, fsync, 1 core" in figures["figures"]) == ({}, False)
    assert "NOT ALL RIGHT" in parts_table(figures)
    assert "other bytes" in parts_table(figures)


def test_missing_engine_is_reported(tmp_path, monkeypatch):
    def absent(g: Any) -> dict[str, Any]:
        raise EngineUnavailable("engine torch is not installed here")

    monkeypatch.setitem(PARTS, "compute, torch", absent)
    root = write_demo(tmp_path / "demo", n_files=12).root
    assert one_part("compute, torch", "A", str(root), str(tmp_path)) == {
        "missing": "engine torch is not installed here"
    }


def test_failed_check_is_reported(tmp_path):
    "The pass over all rows must not be timed over a damaged data set in silence."
    root = write_demo(tmp_path / "demo", n_files=12).root
    target = tmp_path / "built" / "A-build" / "TRAINING_DATASET.H5"
    assert (
        main(["build", str(root), "--split", "training", "--out", str(target), "--power", "2", "--quiet"])
        == 0
    )
    assert "error" not in one_part("pass and sample", "A", str(root), str(tmp_path))
    with open(target, "r+b") as f:
        f.seek(target.stat().st_size // 2)
        f.write(b"\x55\xaa\x55")
    assert "digest" in one_part("pass over all rows", "A", str(root), str(tmp_path))["error"]


def test_overhead_of_checks_adds_up():
    made = {
        f"B, {name}, 4 cores": {"seconds": spread([0.9 * s, s, 1.1 * s]), "cpu_s": spread([c])}
        for name, s, c in (
            ("build", 4.0, 9.0),
            ("build, fsync", 5.5, 9.0),
            ("build, no check", 3.0, 8.0),
            ("digests of recordings", 9.9, 0.8),
            ("digests of rows", 9.9, 0.4),
            ("pass over all rows", 0.5, 9.9),
            ("pass and sample", 0.7, 9.9),
            ("journal and state", 0.08, 9.9),
        )
    }
    price = price_of_trust(made, "B", "4 cores")
    assert price["pieces_s"] == pytest.approx(
        {
            "digests of recordings": 0.2,
            "digests of rows": 0.1,
            "pass over all rows": 0.5,
            "rows recomputed": 0.2,
            "journal and state": 0.08,
        }
    )
    assert (price["share"], price["without_s"], price["fsync_s"]) == pytest.approx((0.27, 2.92, 1.5))
    assert price["fsync_range_s"] == pytest.approx([0.9 * 5.5 - 1.1 * 4, 1.1 * 5.5 - 0.9 * 4])
    assert fsync_words(price) == "+1.50 s"
    assert fsync_words(price | {"fsync_range_s": [-0.1, 0.2]}) == "no difference seen", (
        "however large the difference of the medians"
    )
    assert price["share_of_sample_by_difference"] == pytest.approx(0.25)


def test_cpu_affinity_is_restored():
    before = usable_cores()
    assert core_counts() == sorted({1, before})
    with on_cores(1):
        assert usable_cores() == 1
    assert usable_cores() == before
    with pytest.raises(UsageError), on_cores(1):
        raise UsageError("no")
    assert usable_cores() == before


def test_threads_process_every_batch_once_and_raise_errors():
    done: list[int] = []
    on_threads(lambda k, batch: done.append(batch), 1000, 4)
    assert sorted(done) == list(range(1000))
    with pytest.raises(ZeroDivisionError):
        on_threads(lambda k, batch: 1 // (batch - 3), 9, 2)


# ---- growth


def test_the_suite_growth_end_to_end(tmp_path):
    "With real processes, whose memory is what it is about."
    figures = bench_growth.bench_growth(tmp_path / "work", n_files=60, rounds=1)
    text = growth_table(figures)
    assert (list(figures["figures"]), figures["n_files"], figures["originals"]) == (["30", "60"], 60, 60)
    for n, f in figures["figures"].items():
        assert f["files_per_s"]["median"] == pytest.approx(int(n) / f["seconds"]["median"])
        assert f["file_bytes"]["median"] > int(n) * 80 * 64 * 2
        assert f["process_s"]["median"] > f["seconds"]["median"] + f["start_up_s"]["median"]
        assert f["peak_rss_bytes"]["median"] >= f["build_rss_bytes"]["median"] > 1 << 24
    assert figures["verified"] | {"max_abs_db": 0} == {
        "data_sets": 1,
        "rows": 30,
        "checked": 30,
        "all_ok": True,
        "max_abs_db": 0,
    }
    assert figures["bytes_per_file"] == {"build_rss_bytes": None, "peak_rss_bytes": None}
    assert "memory for one more file: not measured (needs more than 10,000 files)" in text
    assert ", 1 round, " in text
    assert sorted(os.listdir(tmp_path / "work" / "growth")) == ["links-30", "links-60"], (
        "data sets are removed"
    )


def test_each_linked_name_is_a_separate_recording(tmp_path, in_this_process):
    "Names differ, contents repeat: as many rows as names, in both labels, and copies are told."
    root = write_demo(tmp_path / "demo", n_files=40).root
    n = len(list((root / "TRAINING").glob("*/*.wav")))
    data = linked_set(root, tmp_path / "growth", 3 * n + 5)
    body = here("build", str(data), "--out", str(tmp_path / "x.h5")).body
    assert (body["found"], body["rows"], body["rejected"]) == (3 * n + 5, 3 * n + 5, 0)
    assert body["label_names"] == ["LEAK", "NOLEAK"]
    assert body["problems_by_kind"]
    assert {
        len(list(data.glob(f"{label}/*x{k:03d}~*"))) > 0 for label in body["label_names"] for k in range(3)
    } == {True}
    sensors = {p.name.split("~")[0] for p in (root / "TRAINING").glob("*/*.wav")}
    assert {p.name.split("~")[0] for p in data.glob("*/*.wav")} == sensors
    before = data.stat().st_mtime_ns
    assert linked_set(root, tmp_path / "growth", 3 * n + 5).stat().st_mtime_ns == before, (
        "one that is there is used again"
    )


@each(
    ("code", "says"),
    [
        (errno.EMLINK, "no more names"),
        (errno.EPERM, "cannot be linked"),
        (errno.EOPNOTSUPP, "cannot be linked"),
        (errno.ENOSPC, "no room left"),
    ],
)
def test_links_that_cannot_be_created_are_reported(tmp_path, monkeypatch, code, says):
    root = write_demo(tmp_path / "demo", n_files=12).root
    real, calls = os.link, iter(range(100))

    def few(a: Path, b: Path) -> None:
        if next(calls) > 5:
            raise OSError(code, os.strerror(code), str(a))
        real(a, b)

    monkeypatch.setattr(os, "link", few)
    with pytest.raises(OutputError, match=says):
        linked_set(root, tmp_path / "growth", 20)
    assert os.listdir(tmp_path / "growth") == []


def test_space_is_checked_before_writing(tmp_path):
    with pytest.raises(SpaceError):
        bench_growth.bench_growth(tmp_path / "work", n_files=10**10)
    assert os.listdir(tmp_path / "work") == []
    for n_files, rounds in ((1, 1), (100, 0)):
        with pytest.raises(UsageError):
            bench_growth.bench_growth(tmp_path / "work", n_files=n_files, rounds=rounds)


def record(slope: float, rounds: int = 2) -> dict[str, Any]:
    "Figures of growth with this many bytes of memory for each file."
    sizes = growth_sizes(200_000)

    def spread(value: float) -> dict[str, float]:
        return {"median": value, "least": 0.9 * value, "most": 1.2 * value}

    figures = {
        str(n): {
            key: spread(value)
            for key, value in (
                ("files_per_s", 9000.0 if n > 1000 else 3000.0),
                ("cpu_s", n / 5000),
                ("build_rss_bytes", 2e8 + slope * n),
                ("peak_rss_bytes", 2.1e8 + 3 * slope * n),
                ("rest_s", 1.0),
                ("file_bytes", 10_240 * n),
            )
        }
        for n in sizes
    }
    slopes = {
        key: bytes_per_file(sizes, [f[key]["median"] for f in figures.values()])
        for key in ("build_rss_bytes", "peak_rss_bytes")
    }
    return {
        "figures": figures,
        "bytes_per_file": slopes,
        "flat_from": 10_000,
        "originals": 4000,
        "geometry": "A",
        "rounds": rounds,
        "cache": "warm",
        "n_files": sizes[-1],
        "machine": {"n_cores": 2, "cpu": "a processor"},
        "verified": {"checked": 1000, "rows": 1000, "all_ok": True, "max_abs_db": 0.0157},
    }


def test_table_and_figure_agree_with_the_record():
    figures = record(400.0)
    text, fig = growth_table(figures), growth_figure(figures)
    assert (
        "memory for one more file, beyond 10,000: 400 bytes in the build, 1,200 bytes in the process" in text
    )
    assert (
        fig.layout.title.text.replace("<br>", " ")
        == "200,000 files at 100% of the best rate; memory grows by 400 bytes a file"
    )
    rate, build, process = fig.data
    assert list(rate.x) == growth_sizes(200_000)
    assert list(rate.y) == [f["files_per_s"]["median"] for f in figures["figures"].values()]
    assert list(build.y) == pytest.approx([200 + 0.0004 * n for n in rate.x])
    assert list(rate.error_y.array) == pytest.approx([0.2 * y for y in rate.y])
    assert (fig.layout.xaxis.type, fig.layout.xaxis2.type, rate.yaxis, build.yaxis, process.yaxis) == (
        "log",
        "log",
        "y",
        "y2",
        "y2",
    )
    assert "http" not in fig.to_json()
    assert (growth_table(None), parts_table(None), parts_markdown(None)) == ("not measured",) * 3
