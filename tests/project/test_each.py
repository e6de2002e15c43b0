"A table of cases that runs as one test: each case runs, in a fresh state, and those that fail are named."

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from each import each


def run(test: Callable, own: Path | None = None, **fixtures: Any) -> list[tuple[str, int]]:
    "Run a test as pytest does; returns what it reports."
    node = SimpleNamespace(user_properties=[])
    named = ["tmp_path"] if own else []
    test(SimpleNamespace(fixturenames=named, node=node, getfixturevalue=lambda name: own), **fixtures)
    return node.user_properties


def test_every_case_runs_and_those_that_fail_are_named() -> None:
    seen = []

    @each("a", [1, 2, 3], ids=["one", "two", "three"])
    @each("b, c", [("x", int), pytest.param("y", str, id="Y")])
    def table(a: int, b: str, c: type) -> None:
        seen.append((a, b, c))
        if a == 3:
            pytest.fail("bad")
        assert (a, b) != (2, "y")

    with pytest.raises(BaseExceptionGroup) as info:
        run(table)
    assert len(seen) == len(set(seen)) == 6
    assert "3 of 6 cases failed: Y, two; x, int, three; Y, three" in str(info.value)
    assert info.value.exceptions[0].__notes__ == ["the case: Y, two"]


def test_cases_that_hold_are_counted() -> None:
    @each("a", [1, 2])
    def table(a: int) -> None:
        assert a

    assert run(table) == [("cases", 2)]


def test_a_skipped_case_skips_the_test_after_the_others() -> None:
    seen = []

    @each("a", [1, 2, 3])
    def table(a: int) -> None:
        seen.append(a)
        if a == 1:
            pytest.skip("not here")

    with pytest.raises(pytest.skip.Exception, match="not here"):
        run(table)
    assert seen == [1, 2, 3]


def test_each_case_has_a_fresh_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("as it was")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").touch()
    folders = []

    @each("a", range(3))
    def table(
        a: int, file: Path, both: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folders.append(tmp_path)
        assert Path.cwd() == tmp_path
        assert file.read_text() == "as it was"
        assert [p.name for p in both[0].iterdir()] == ["a"]
        assert list(tmp_path.iterdir()) == []
        assert "LEAKMEL_TRIED" not in os.environ
        monkeypatch.setenv("LEAKMEL_TRIED", "1")
        (tmp_path / "new").touch()
        both[0].joinpath("b").touch()
        file.unlink()

    monkeypatch.chdir(tmp_path)
    given = {"file": tmp_path / "file", "both": (tmp_path / "folder", 1), "monkeypatch": monkeypatch}
    assert run(table, tmp_path, tmp_path=tmp_path, **given) == [("cases", 3)]
    assert len(set(folders)) == 3
    assert (Path.cwd(), (tmp_path / "file").read_text()) == (tmp_path, "as it was")


def test_cases_with_marks_are_refused() -> None:
    with pytest.raises(TypeError, match="a test of its own"):
        each("a", [pytest.param(1, marks=pytest.mark.slow)])
    with pytest.raises(TypeError, match="are not values of"):
        each("a, b", [(1, 2, 3)])
