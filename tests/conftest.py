"Shared fixtures: small made sets, and skips that may not happen where everything is installed."
import os
from pathlib import Path

import numpy as np
import pytest

from leakmel.audio.synth import write_demo, write_wav

# `.ci/run` sets LEAKMEL_REQUIRE_ALL: what a test needs and cannot find is a failure there, and a skip elsewhere.
REQUIRE_ALL = bool(os.environ.get("LEAKMEL_REQUIRE_ALL"))


def need(found: object, what: str) -> None:
    "Skip the test where `what` is not there; fail where everything has to be."
    if found: return
    if REQUIRE_ALL: pytest.fail(f"{what} is required here")
    pytest.skip(f"{what} is not there")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    "With `-m gpu`, import only the files that have such tests: a bare machine with a GPU lacks what some of the others need."
    if config.option.markexpr.strip() != "gpu" or not collection_path.match("test_*.py"): return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    "A made set of 60 recordings in three splits."
    root = tmp_path_factory.mktemp("data") / "demo"
    write_demo(root, n_files=60)
    return root


@pytest.fixture(scope="session")
def faulty(tmp_path_factory) -> Path:
    "A made set with planted faults."
    root = tmp_path_factory.mktemp("data") / "faulty"
    write_demo(root, n_files=24, faults=True)
    return root


@pytest.fixture
def make_wav():
    "Write a canonical recording of seeded noise; returns its samples."
    def make(path: Path, n: int = 4096, rate: int = 4096, seed: int = 0) -> np.ndarray:
        path.parent.mkdir(parents=True, exist_ok=True)
        x = np.random.default_rng(seed).integers(-8000, 8000, n, dtype=np.int16)
        write_wav(path, x, rate)
        return x
    return make
