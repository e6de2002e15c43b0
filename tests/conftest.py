"Shared fixtures: small synthetic sets, skips that are errors where everything is installed, and trials for each promise."

import faulthandler
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from promise_counts import Counted, function_of, names_of_promises

from leakmel.dataset import existing
from leakmel.mel.engines import DEVICES
from leakmel.recordings.demo import write_demo, write_wav

# Tests build right after they write files; a build reads files again that changed within a step of the clock before it.
existing._CLOCK_STEP_NS = 0
DEVICES["fake"] = ("fake_device", "open_fake")  # `device="fake"` is a GPU played on the CPU

# `.ci/run` sets LEAKMEL_REQUIRE_ALL: what a test needs and cannot find is a failure there, and a skip elsewhere.
REQUIRE_ALL = bool(os.environ.get("LEAKMEL_REQUIRE_ALL"))
# LEAKMEL_SKIPPED=FILE gets the names of skipped tests, which `.ci/run` runs again with more packages.
SKIPPED = os.environ.get("LEAKMEL_SKIPPED", "")
# LEAKMEL_ABSENT=triton,pyarrow plays that packages are not installed, in this process and in its children.
if os.environ.get("LEAKMEL_ABSENT"):
    sys.path.insert(0, str(Path(__file__).with_name("helpers") / "absent"))
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    import_module("sitecustomize")
# A script starts what it runs in the background with SIGINT ignored; tests send it, to this process and to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# LEAKMEL_PROMISES=FILE keeps what the tests of each promise tried: see promise_counts.py.
RECORD = os.environ.get("LEAKMEL_PROMISES", "")
HANG_S = 900.0  # a test that takes longer hangs; tests marked `long` may take hours
STDERR = pytest.StashKey[int]()  # standard error, which is captured during a test


def need(found: object, what: str) -> None:
    "Skip the test where `what` is not there; fail where everything has to be."
    if found:
        return
    if REQUIRE_ALL:
        pytest.fail(f"{what} is required here")
    pytest.skip(f"{what} is not there")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` or `-m quick`, import only the files that have such tests.

    A bare machine with a GPU lacks what some of the others need, and importing them takes longer than the quick tests.
    """
    mark = re.match(r"(gpu|quick)\b", config.option.markexpr.strip())
    if mark is None or not collection_path.match("test_*.py"):
        return None
    return True if f"mark.{mark[1]}" not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(trylast=True)  # after `-m` has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    "Files that may take long come first: begun last, one of them would keep a single core busy at the end."
    weight = Counter[Path]()
    for item in items:
        weight[item.path] += 10 if item.get_closest_marker("slow") or item.get_closest_marker("site") else 1
    items.sort(key=lambda item: (-weight[item.path], item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    "End the process if a test hangs, after the tracebacks of all threads: pytest-xdist then names the test and goes on."
    if not item.get_closest_marker("long"):
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_configure(config: pytest.Config) -> None:
    "Count in the process that reports: workers hand what a test said to it with the test's report."
    config.stash[STDERR] = os.dup(2)
    if RECORD and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Counted(config, Path(RECORD)))


def note_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    "Append the name of a test, or of a file, that was skipped: in the processes that run tests, because others do not get all reports."
    if SKIPPED and report.skipped and not hasattr(report, "wasxfail"):
        with open(SKIPPED, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


pytest_runtest_logreport = pytest_collectreport = note_skipped


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[..., None]:
    'Say what was tried for a promise and held: `tried("S3")`, or `tried("S3", 100)` for a hundred trials.'
    promises = names_of_promises().get(function_of(request.node.nodeid), [])

    def say(promise: str, n: int = 1) -> None:
        if promise not in promises:
            raise LookupError(f"{promise} in promises.toml does not name {request.node.name}")
        request.node.user_properties.append(("tried", [promise, int(n)]))

    return say


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    "A made set of 60 recordings in three splits."
    root = tmp_path_factory.mktemp("data") / "demo"
    write_demo(root, n_files=60)
    return root


@pytest.fixture(scope="session")
def small_sets(tmp_path_factory) -> Path:
    "Data sets of a small synthetic network, for trainings of seconds; nobody writes here."
    import leakmel as lm

    root = tmp_path_factory.mktemp("data") / "small"
    write_demo(root / "demo", n_files=40)
    lm.build_all(root / "demo", out_dir=root / "sets", progress="none", check=2)
    return root / "sets"


@pytest.fixture(scope="session")
def faulty(tmp_path_factory) -> Path:
    "A made set with planted faults."
    root = tmp_path_factory.mktemp("data") / "faulty"
    write_demo(root, n_files=24, faults=True)
    return root


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    "A real browser, in the font with the widest letters; skips the test where there is none."
    from watched import FONTS, chromium

    with chromium(FONTS[0]) as opened:
        yield opened


@pytest.fixture
def watched(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    "A page of the size that the test's module wants."
    from watched import Watched

    page = browser.new_page(viewport=request.module.VIEWPORT)
    page.set_default_timeout(60_000)
    yield Watched(page)
    page.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    "Let torch compute with one thread: nets of tests are tiny, and threads that wait for each other take a loaded machine four times as long."
    import torch

    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.fixture(scope="module")
def few_trees() -> Iterator[None]:
    "Let the forests that this process fits have a tenth of their trees: fitting them takes most of a cross-validation of a small set."
    from tiny_training import FEW_TREES

    from leakmel.detector.model import spectral

    with mock.patch.object(spectral, "N_TREES", FEW_TREES):
        yield


@pytest.fixture
def make_wav():
    "Write a canonical recording of seeded noise; returns its samples."

    def make(path: Path, n: int = 4096, rate: int = 4096, seed: int = 0) -> np.ndarray:
        path.parent.mkdir(parents=True, exist_ok=True)
        x = np.random.default_rng(seed).integers(-8000, 8000, n, dtype=np.int16)
        write_wav(path, x, rate)
        return x

    return make


@pytest.fixture
def publish() -> Iterator[Callable[..., Any]]:
    "Publish files as the record of a public set on this machine, for the time of a test: publish(name, files) -> RecordServer."
    from record_server import RecordServer

    from leakmel.extras.sets.fetch import SETS

    with ExitStack() as stack:

        def start(name: str, files: Mapping[str, bytes]) -> RecordServer:
            server = stack.enter_context(RecordServer(files))
            s = SETS[name]
            record = server.url + ("/mendeley" if s.version else "/zenodo")
            stack.enter_context(mock.patch.dict(SETS, {name: replace(s, record=record)}))
            return server

        yield start
