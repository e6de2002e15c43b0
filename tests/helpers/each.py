"One test for a table of cases of one rule: `@each` runs all of them, each in a fresh state, and names those that failed."

import functools
import inspect
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

ONLY = os.environ.get("LEAKMEL_CASE", "")  # run only the cases that have this in their name
Case = tuple[str, dict[str, Any]]


def label_of(value: object) -> str:
    "A short name of a value."
    text = value if isinstance(value, str) else getattr(value, "__name__", repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def cases_of(names: list[str], rows: Iterable[Any], ids: Any) -> Iterator[Case]:
    "Yield name and arguments of each case; `rows` and `ids` are written as for pytest.mark.parametrize."
    for k, row in enumerate(rows):
        name = ids[k] if isinstance(ids, Sequence) else None
        if isinstance(row, type(pytest.param())):
            if row.marks:
                raise TypeError("a case with marks has to be a test of its own")
            name, values = row.id or name, row.values
        else:
            values = (row,) if len(names) == 1 else tuple(row)
        if len(values) != len(names):
            raise TypeError(f"{values!r} are not values of {names}")
        label = ids if callable(ids) else label_of
        yield str(name or ", ".join(str(label(v)) for v in values)), dict(zip(names, values, strict=True))


def remove(path: Path) -> None:
    "Remove a file or a folder, if it is there."
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def put_back(paths: list[Path], folder: Path) -> Iterator[None]:
    "Keep files and folders, and put them back as they were."
    kept = {p: folder / str(k) for k, p in enumerate(paths)}
    folder.mkdir(exist_ok=True)
    for path, copy in kept.items():
        if path.is_dir():
            shutil.copytree(path, copy, symlinks=True)
        else:
            shutil.copy2(path, copy)
    try:
        yield
    finally:
        for path, copy in kept.items():
            remove(path)
            shutil.move(copy, path)


def values_of(fixtures: dict[str, Any]) -> Iterator[Path]:
    "The paths among fixtures, also in tuples."
    for value in fixtures.values():
        yield from (v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Path))


@contextmanager
def fresh(fixtures: dict[str, Any], own: Path | None, k: int) -> Iterator[dict[str, Any]]:
    "Fixtures for case `k`: a folder of its own, files as they were, nothing patched, nothing printed."
    used, cwd = dict(fixtures), Path.cwd()
    patch = used["monkeypatch"] = pytest.MonkeyPatch()
    for name in {"capsys", "capfd"} & used.keys():
        used[name].readouterr()
    if "recwarn" in used:
        used["recwarn"].clear()
    if "caplog" in used:
        used["caplog"].clear()
    paths, absent = list[Path](), list[Path]()
    if own is not None:
        paths = [p for p in values_of(fixtures) if own in p.parents and p.exists()]
        folder = used["tmp_path"] = own / f"case-{k}"
        folder.mkdir()
        if "LEAKMEL_CACHE_DIR" in os.environ:
            patch.setenv("LEAKMEL_CACHE_DIR", str(folder / "cache"))
        absent = [p for p in values_of(fixtures) if own in p.parents and not p.exists()]
        if cwd == own:
            os.chdir(folder)
    try:
        with put_back(paths, own.with_name(f"{own.name}-kept-{k}")) if own and paths else nullcontext():
            yield used
    finally:
        patch.undo()
        os.chdir(cwd)
        for path in absent:
            remove(path)


def each(
    names: str | Sequence[str], rows: Iterable[Any], *, ids: Any = None
) -> Callable[[Callable], Callable]:
    "Run a test for each of these cases, which are written as for pytest.mark.parametrize; several `@each` are combined."
    wanted = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    own_cases = list(cases_of(wanted, rows, ids))
    if not own_cases:
        raise ValueError(f"no case of {names}")

    def decorate(test: Callable) -> Callable:
        inner: list[Case] = getattr(test, "cases", [("", {})])
        body: Callable = getattr(test, "body", test)
        cases = [
            (f"{b}, {a}" if b else a, one | other)
            for (a, one), (b, other) in itertools.product(own_cases, inner)
        ]
        given = set(cases[0][1]) if cases else set(wanted)
        parameters = inspect.signature(body).parameters

        @functools.wraps(test)
        def run(request: pytest.FixtureRequest, **fixtures: Any) -> None:
            own = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
            fixtures |= {"request": request}
            failed: list[BaseException] = []
            n_held = 0
            skipped: BaseException | None = None
            for k, (name, values) in enumerate(cases):
                if ONLY not in name:
                    continue
                try:
                    with fresh(fixtures, own, k) as used:
                        body(**{n: v for n, v in (used | values).items() if n in parameters})
                    n_held += 1
                except pytest.skip.Exception as e:
                    skipped = e
                except (Exception, pytest.fail.Exception) as e:
                    e.add_note(f"the case: {name}")
                    failed.append(e)
            request.node.user_properties.append(("cases", n_held))
            if failed:
                which = "; ".join(e.__notes__[-1].removeprefix("the case: ") for e in failed)
                raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} cases failed: {which}", failed)
            if skipped is not None:
                raise skipped
            if not n_held:
                pytest.skip(f"no case has {ONLY!r} in its name")

        others = [
            p.replace(kind=p.KEYWORD_ONLY) for n, p in parameters.items() if n not in given | {"request"}
        ]
        request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature([request, *others])  # type: ignore[attr-defined]
        run.cases, run.body = cases, body  # type: ignore[attr-defined]
        return run

    return decorate
