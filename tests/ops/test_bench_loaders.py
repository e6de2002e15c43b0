"The suite that measures ways of loading: from the command to its record."

import json
from pathlib import Path

import pytest

from leakmel.cli import main
from leakmel.core.errors import UsageError
from leakmel.learn import loader_bench
from leakmel.ops.bench_loaders import bench_loaders

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_suite_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ways = [
        loader_bench.LoaderTrial("device", (("kind", "device"),)),
        loader_bench.LoaderTrial("stream", (("kind", "stream"),)),
        loader_bench.LoaderTrial("no workers", (("kind", "workers"), ("num_workers", 0))),
    ]
    monkeypatch.setattr(loader_bench, "usual_trials", lambda: ways)
    assert (
        main(
            [
                "bench",
                str(tmp_path / "work"),
                "--suite",
                "loaders",
                "--files",
                "12",
                "--rounds",
                "2",
                "--out",
                str(tmp_path / "records"),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert max(map(len, said.partition("stored as")[0].splitlines())) <= 100
    (stored,) = (tmp_path / "records").glob("loaders-*.json")
    record = json.loads(stored.read_text())
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
        assert name in said


def test_the_usual_ways_are_those_that_are_in_question() -> None:
    names = [t.name for t in loader_bench.usual_trials()]
    assert names == ["device", "stream", "8 x 4, fork", "8 x 4, spawn", "4 x 8, fork", "4 x 8, spawn"]
    with pytest.raises(UsageError, match="rounds"):
        bench_loaders("nowhere", rounds=0)
