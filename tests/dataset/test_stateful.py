"Recordings are added, removed and changed, builds are killed or finished: the data set always equals a fresh build."

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import leakmel as lm
from leakmel.dataset.job import Job
from leakmel.dataset.loader import BadFilesError
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.recordings.demo import write_wav

SPEC = lm.MelSpec.preset("disjoint", duration_s=0.5)
CONFIG = PipelineConfig(
    files_per_batch=2, compute_workers=2, fsync=False, monitor_interval_s=0.0, journal_bytes=1
)
NAMES = st.tuples(st.sampled_from(["A", "B"]), st.integers(0, 7))
GOOD, CUT = "good", "cut"
N_DAYS = 14
REFUSED, FAILED = 3, 4  # how a child ended
POLICIES = st.sampled_from(
    [{}, {}, {"max_rejected": 0.2}, {"on_bad_file": "stop"}]
)  # what bad files mean; {}: nearly all may be rejected


class Folder(RuleBasedStateMachine):
    "A data folder, its data set, and a dictionary of what should be in it."

    refused: ClassVar[
        list[bool]
    ] = []  # builds that bad files ended, in all days: whether there was a good one

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.data, self.target = self.place / "data", self.place / "out" / "x.h5"
        self.files: dict[
            tuple[str, int], tuple[int, str]
        ] = {}  # name -> seed of its content, and whether it can be read
        # what the data set that stands was made of
        self.built: dict[tuple[str, int], tuple[int, str]] | None = None

    def teardown(self) -> None:
        shutil.rmtree(self.place)

    def path(self, name: tuple[str, int]) -> Path:
        return self.data / name[0] / f"{name[1]}.wav"

    def put(self, name: tuple[str, int], seed: int) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        write_wav(self.path(name), samples_of(seed), 4096)
        self.files[name] = seed, GOOD

    @initialize(seed=st.integers(0, 1000), n_cut=st.integers(0, 2))
    def begin(self, seed: int, n_cut: int) -> None:
        for k, label in enumerate("AABBB"):
            self.put((label, k), seed + k)
        for k in range(n_cut):
            self.truncate(k)

    @rule(name=NAMES, seed=st.integers(0, 1000))
    def add_or_change(self, name: tuple[str, int], seed: int) -> None:
        self.put(name, seed)

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
        if name in self.files:
            os.utime(self.path(name))

    @rule(k=st.integers(0, 15))
    def cut(self, k: int) -> None:
        self.truncate(k)

    def truncate(self, k: int) -> None:
        "Half of the samples that the header tells of are gone."
        name = sorted(self.files)[k % len(self.files)]
        os.truncate(self.path(name), 1000)
        self.files[name] = self.files[name][0], CUT

    @rule(policy=POLICIES)
    def build(self, policy: dict[str, Any]) -> None:
        if self.refused_by(policy):
            before = self.target.read_bytes() if self.target.exists() else None
            with pytest.raises(BadFilesError) as raised:
                run(self.data, self.target, **policy)
            cut = {f"{label}/{k}.wav" for (label, k), (_, kind) in self.files.items() if kind == CUT}
            found = [os.fsdecode(r.path) for r in raised.value.rejections]
            assert (len(found) == 1 and found[0] in cut) if "on_bad_file" in policy else found == sorted(cut)
            assert (self.target.read_bytes() if self.target.exists() else None) == before
            self.refused.append(self.counts[0] > 0)
            return
        result = run(self.data, self.target, **policy)
        self.built = dict(self.files)
        assert (result.rows, len(result.rejections)) == self.counts
        run(self.data, self.place / "nothing" / "x.h5", fresh=True)
        assert self.target.read_bytes() == (self.place / "nothing" / "x.h5").read_bytes()

    @precondition(lambda self: any(kind == GOOD for _, kind in self.files.values()))
    @rule(at=st.integers(1, 6), policy=POLICIES)
    def build_and_be_killed(self, at: int, policy: dict[str, Any]) -> None:
        if (pid := os.fork()) == 0:
            try:
                real, n = Job.take, [0]

                def dying(job: Job, slot: Any) -> Any:
                    n[0] += 1
                    if n[0] == at:
                        time.sleep(0.01)  # the journal may have an entry by now, or not
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(job, slot)

                Job.take = dying  # type: ignore[method-assign,assignment]
                run(self.data, self.target, **policy)
                os._exit(0)
            except BadFilesError:
                os._exit(REFUSED)
            finally:
                os._exit(FAILED)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert ended in (-signal.SIGKILL, REFUSED if self.refused_by(policy) else 0)
        if ended == 0:
            self.built = dict(self.files)

    @invariant()
    def what_stands_is_right(self) -> None:
        "Rows, labels and rejected files are those of the dictionary at the time of the last build."
        if self.built is None:
            return
        with lm.open_dataset(self.target) as ds:
            paths = [os.fsdecode(p) for p in ds.files["path"]]
            assert sorted(paths) == sorted(
                f"{label}/{k}.wav" for (label, k), (_, kind) in self.built.items() if kind == GOOD
            )
            assert [p.split("/")[0] for p in paths] == [ds.class_names[i] for i in ds.labels]
            for i, path in enumerate(paths[:2]):
                right = lm.log_mel(samples_of(self.built[path[0], int(path[2])][0]), SPEC, engine="reference")
                assert np.abs(ds[i][0].astype(np.float64) - right).max() < 0.1

    def refused_by(self, policy: dict[str, Any]) -> bool:
        "Whether the bad files that are there end a build."
        n_good, n_cut = self.counts
        most = policy.get("max_rejected", CONFIG.max_rejected)
        return n_cut > 0 and (n_good == 0 or "on_bad_file" in policy or n_cut / (n_good + n_cut) > most)

    @property
    def counts(self) -> tuple[int, int]:
        return sum(kind == GOOD for _, kind in self.files.values()), sum(
            kind == CUT for _, kind in self.files.values()
        )


def samples_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8000, 8000, 2048, dtype=np.int16)


def run(data: Path, out: Path, *, fresh: bool = False, **policy: Any) -> lm.BuildResult:
    return lm.build(
        data,
        out=out,
        spec=SPEC,
        engine="reference",
        progress="none",
        check=2,
        pipeline=replace(CONFIG, **policy),
        fresh=fresh,
    )


@pytest.mark.slow
def test_random_histories_of_a_folder(tried: Callable) -> None:
    Folder.refused.clear()
    run_state_machine_as_test(
        Folder,
        settings=settings(
            max_examples=N_DAYS,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    tried("S1", N_DAYS)
    assert sum(Folder.refused) >= 3
