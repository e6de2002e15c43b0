"Recordings come, go and change, builds are killed or done: at any time what stands is what a build from nothing would give."
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

import leakmel as lm
from leakmel.audio.synth import write_wav
from leakmel.core.errors import DataError
from leakmel.dataset.job import Job
from leakmel.dataset.pipeline import PipelineConfig

SPEC = lm.MelSpec.preset("disjoint", duration_s=0.5)
CONFIG = PipelineConfig(files_per_batch=2, compute_workers=2, fsync=False, monitor_interval_s=0.0, journal_bytes=1)
NAMES = st.tuples(st.sampled_from(["A", "B"]), st.integers(0, 7))
GOOD, CUT = "good", "cut"
N_DAYS = 12


class Folder(RuleBasedStateMachine):
    "A data folder, its data set, and a dictionary of what should be in it."

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.data, self.target = self.place / "data", self.place / "out" / "x.h5"
        self.files: dict[tuple[str, int], tuple[int, str]] = {}      # name -> seed of its content, and whether it can be read
        self.built: dict[tuple[str, int], tuple[int, str]] | None = None      # what the data set that stands was made of

    def teardown(self) -> None: shutil.rmtree(self.place)

    def path(self, name: tuple[str, int]) -> Path: return self.data / name[0] / f"{name[1]}.wav"

    def put(self, name: tuple[str, int], seed: int) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        write_wav(self.path(name), samples_of(seed), 4096)
        self.files[name] = seed, GOOD

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        for k, label in enumerate("AABB"): self.put((label, k), seed + k)

    @rule(name=NAMES, seed=st.integers(0, 1000))
    def add_or_change(self, name: tuple[str, int], seed: int) -> None: self.put(name, seed)

    @rule(name=NAMES)
    def remove(self, name: tuple[str, int]) -> None:
        if name in self.files and sum(label == name[0] for label, _ in self.files) > 1:
            self.path(name).unlink()
            del self.files[name]

    @rule(name=NAMES, goal=NAMES)
    def rename(self, name: tuple[str, int], goal: tuple[str, int]) -> None:
        if name in self.files and sum(label == name[0] for label, _ in self.files) > 1 and name != goal:
            self.path(name).replace(self.path(goal))
            self.files[goal] = self.files.pop(name)

    @rule(name=NAMES)
    def touch(self, name: tuple[str, int]) -> None:
        if name in self.files: os.utime(self.path(name))

    @rule(name=NAMES)
    def truncate(self, name: tuple[str, int]) -> None:
        "Half of the samples that the header tells of are gone."
        if name not in self.files: return
        os.truncate(self.path(name), 1000)
        self.files[name] = self.files[name][0], CUT

    @rule()
    def build(self) -> None:
        before = self.target.read_bytes() if self.target.exists() else None
        try: result = run(self.data, self.target)
        except DataError:      # all are rejected
            assert all(kind == CUT for _, kind in self.files.values())
            assert (self.target.read_bytes() if self.target.exists() else None) == before
            return
        self.built = dict(self.files)
        assert (result.rows, len(result.rejections)) == self.counts
        run(self.data, self.place / "nothing" / "x.h5", fresh=True)
        assert self.target.read_bytes() == (self.place / "nothing" / "x.h5").read_bytes()

    @precondition(lambda self: any(kind == GOOD for _, kind in self.files.values()))
    @rule(at=st.integers(1, 6))
    def build_and_be_killed(self, at: int) -> None:
        if (pid := os.fork()) == 0:
            try:
                real, n = Job.take, [0]
                def dying(job: Job, slot: Any) -> Any:
                    n[0] += 1
                    if n[0] == at:
                        time.sleep(0.01)      # the journal may have an entry by now, or not
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(job, slot)
                Job.take = dying  # type: ignore[method-assign,assignment]
                run(self.data, self.target)
            finally: os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0: self.built = dict(self.files)

    @invariant()
    def what_stands_is_right(self) -> None:
        "Rows, labels and rejected files are those of the dictionary at the time of the last build."
        if self.built is None: return
        with lm.open_dataset(self.target) as ds:
            paths = [os.fsdecode(p) for p in ds.files["path"]]
            assert sorted(paths) == sorted(f"{label}/{k}.wav" for (label, k), (_, kind) in self.built.items() if kind == GOOD)
            assert [p.split("/")[0] for p in paths] == [ds.class_names[i] for i in ds.labels]
            for i, path in enumerate(paths[:2]):
                right = lm.log_mel(samples_of(self.built[path[0], int(path[2])][0]), SPEC, engine="reference")
                assert np.abs(ds[i][0].astype(np.float64) - right).max() < 0.1

    @property
    def counts(self) -> tuple[int, int]:
        return sum(kind == GOOD for _, kind in self.files.values()), sum(kind == CUT for _, kind in self.files.values())


def samples_of(seed: int) -> np.ndarray: return np.random.default_rng(seed).integers(-8000, 8000, 2048, dtype=np.int16)


def run(data: Path, out: Path, *, fresh: bool = False) -> lm.BuildResult:
    return lm.build(data, out=out, spec=SPEC, engine="reference", progress="none", check=2, pipeline=CONFIG, fresh=fresh)


def test_any_days_of_a_folder(tried: Callable) -> None:
    run_state_machine_as_test(Folder, settings=settings(max_examples=N_DAYS, stateful_step_count=12, deadline=None, derandomize=True, database=None,
                                                        suppress_health_check=list(HealthCheck)))
    tried("S1", N_DAYS)
