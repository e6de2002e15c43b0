"The benchmark of a million recordings, at a small size."

import bench_million as suite
import pytest
from errors import raises

pytestmark = pytest.mark.site


def test_set_holds_every_name_and_content_once(tmp_path):
    root = suite.distinct_set(tmp_path, 1000, True)
    paths = list(root.rglob("*.wav"))
    assert len(paths) == len({p.name for p in paths}) == 1000
    assert sum(p.stat().st_size == 0 for p in paths) == 2
    assert sum(p.stem.endswith("~1") for p in paths) == 5
    assert len({p.read_bytes() for p in paths}) == 999
    assert suite.distinct_set(tmp_path, 1000, True) == root


def test_steps_account_for_every_recording(tmp_path):
    root = suite.distinct_set(tmp_path, 1000, True)
    figures = suite.run_step(suite.STEPS["card of a scan"], root, tmp_path / "x.h5", 1000)
    parts = {f"part: {name}" for name in ("imports", "scan", "card", "table")}
    assert figures.keys() == {"process_s", "cpu_s", "peak_rss_bytes", *parts}
    assert all(value > 0 for value in figures.values())
    next(root.rglob("*.wav")).unlink()
    with raises("benchmark-not-right", found=999):
        suite.run_step(suite.STEPS["card of a scan"], root, tmp_path / "x.h5", 1000)


def test_sizes_are_checked(tmp_path):
    with raises("out-of-range"):
        suite.bench_million(tmp_path, n_files=10)
