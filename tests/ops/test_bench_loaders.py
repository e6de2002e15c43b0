"The suite that measures ways of loading."

from pathlib import Path

import bench_loaders as suite
import pytest
from errors import raises

pytestmark = [pytest.mark.site, pytest.mark.usefixtures("one_thread")]


def test_the_suite_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [
        suite.LoaderTrial("device", (("kind", "device"),)),
        suite.LoaderTrial("stream", (("kind", "stream"),)),
        suite.LoaderTrial("no workers", (("kind", "workers"), ("num_workers", 0))),
    ]
    monkeypatch.setattr(suite, "usual_trials", lambda: ways)
    record = suite.bench_loaders(tmp_path / "work", n_files=12, rounds=2)
    output = suite.loaders_table(record)
    assert max(map(len, output.splitlines())) <= 100
    assert set(record["figures"]) == {
        "contiguous, device",
        "contiguous, stream",
        "contiguous, no workers",
        "gzip, device",
        "gzip, stream",
    }
    assert record["verified"]["all_ok"]
    for name, f in record["figures"].items():
        assert 0 < f["slowest_round"] <= f["batches_per_s"] <= f["fastest_round"], name
        assert name in output


def test_default_trials_of_the_loader_suite() -> None:
    names = [t.name for t in suite.usual_trials()]
    assert names == ["device", "stream", "8 x 4, fork", "8 x 4, spawn", "4 x 8, fork", "4 x 8, spawn"]
    with raises("usage"):
        suite.bench_loaders("nowhere", rounds=0)
