"The page of scores on public sets: figures where they were measured, and nothing else."

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import bench_public as suite
import pytest
from made_sets import hongkong_loggers
from record_server import RecordServer

import leakmel as lm
from leakmel.extras.sets.fetch import SETS

pytestmark = pytest.mark.usefixtures("one_thread")


def lines_of(table: str, name: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith(f"| {name} |")]


def test_without_a_record_nothing_is_measured(tmp_path: Path) -> None:
    for record in (None, suite.bench_public(tmp_path / "work", sources=str(tmp_path))):
        table = suite.score_table(record)
        for name, s in SETS.items():
            assert len(lines_of(table, name)) == len(s.groupings)
            assert all(line.count("not measured") == 3 for line in lines_of(table, name))
        assert not any(c.isdigit() for c in table)


@pytest.mark.slow
def test_a_fetched_set_is_measured_by_its_groupings(
    publish: Callable[..., RecordServer], tmp_path: Path
) -> None:
    publish("hongkong-loggers", hongkong_loggers(1.0))
    lm.fetch("hongkong-loggers", tmp_path / "public" / "hongkong-loggers", yes=True, progress="none")
    whole = lm.generalisation

    def quick(path: Path, **given: Any) -> Any:
        return whole(path, **(given | {"n_folds": 2, "n_draws": 100, "jobs": 1, "device": "cpu"}))

    few = mock.patch("leakmel.detector.model.spectral.N_TREES", 5)
    with few, mock.patch.object(suite.lm, "generalisation", quick):
        record = suite.bench_public(tmp_path / "work", sources=str(tmp_path / "public"), detector="spectral")
    assert record["verified"]["all_ok"]
    assert [s["set"] for s in record["sets"]] == ["hongkong-loggers"]
    table = suite.score_table(record)
    random, held_out = lines_of(table, "hongkong-loggers")
    assert random.startswith("| hongkong-loggers | random recordings | 59 |")  # two are byte-equal
    assert held_out.startswith("| hongkong-loggers | whole group | 29 |")
    for line in (random, held_out):
        auc = float(line.split("|")[4].split("(")[0])
        assert 0 <= auc <= 1
        assert "not measured" not in line
    assert all("not measured" in line for line in lines_of(table, "dongguan"))


def test_published_figures_have_sources() -> None:
    table = suite.published_table()
    assert len(suite.PUBLISHED) == 15
    for figure in ("BA 0.747 / 0.781, AUC 0.776 / 0.855", "BA 0.458 / 0.448", "AUC 0.88 clip, 0.84 cluster"):
        assert figure in table
    assert {p.set for p in suite.PUBLISHED} <= set(SETS)
    assert all(p.source for p in suite.PUBLISHED)
