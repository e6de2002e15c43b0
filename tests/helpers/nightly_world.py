"""A water network whose recordings reach a folder as they do in the field, and what a history has to know of them.

Everything follows from one seed. A night brings recordings that are late, doubled, renamed, damaged or dated by a wrong clock, a folder
that is gone, runs that are killed, refused or without room, tables of visits that are corrected, and another version of the evidence.
The model has none of this: it knows which recordings have arrived and could be read.
"""

import errno
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leakmel.core import files as core_files
from leakmel.core.errors import LeakmelError
from leakmel.dataset.schema import Rejected
from leakmel.extras.nightly import handover, nights, run
from leakmel.extras.nightly.history import _EXPORTED, History, HistoryEntry, night_of

FIRST = date(2014, 1, 1)
KEPT_NIGHTS = 20  # recordings that are older leave the folder
DAMAGED = b"damaged"


@dataclass
class World:
    "A folder of recordings, night by night."

    root: Path  # of everything
    seed: int
    n_sensors: int
    rng: random.Random = field(init=False)
    night: int = -1
    late: list[tuple[int, str, bytes]] = field(default_factory=list)  # night of arrival, path, content
    repairs: list[tuple[int, str, bytes]] = field(default_factory=list)
    model: dict[str, tuple[str, str, float]] = field(default_factory=dict)  # digest -> sensor, night, score
    visits: dict[tuple[str, str], str] = field(default_factory=dict)  # sensor and night -> outcome
    faults: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.leaks = {
            f"P{s}": self.rng.randrange(40, 300) for s in range(self.n_sensors) if self.rng.random() < 0.6
        }
        self.folder.mkdir(parents=True)

    @property
    def folder(self) -> Path:
        return self.root / "recordings"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def today(self) -> date:
        return FIRST + timedelta(self.night)

    def happens(self, fault: str, share: float) -> bool:
        "Draw whether a fault happens, and count it."
        found = self.rng.random() < share
        self.faults[fault] += found
        return found

    def _recording(self, sensor: str) -> tuple[str, bytes]:
        "Path and content of the recording of a night: the content is its score, and a number that no other has."
        has_leak = self.night >= self.leaks.get(sensor, 10**9)
        score = 1 / (1 + 2.718281828 ** -self.rng.gauss(1.5 if has_leak else -1.0, 0.5))
        when = datetime.combine(self.today, datetime.min.time()) + timedelta(hours=26.5)  # 02:30
        if self.happens("clock set back", 0.004):
            when = datetime(2000, 1, 1, 2, 30) + timedelta(minutes=self.rng.randrange(10**5))
        elif self.happens("clock ahead", 0.002):
            when = when.replace(year=2070)
        name = f"{sensor}_{when:%Y%m%d_%H%M%S}.wav"
        return f"{self.today:%Y-%m}/{name}", f"{score:.6f} {self.rng.getrandbits(64):x}".encode()

    def _put(self, path: str, content: bytes) -> None:
        file = self.folder / path
        if file.exists() and file.read_bytes() != content:  # the hour that comes twice when summer time ends
            self.faults["same name"] += 1
            file = file.with_name(f"again-{len(content)}-{self.night}").joinpath(file.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        when = datetime.combine(self.today, datetime.min.time()).timestamp() + 100_000 + len(self.model)
        os.utime(file, (when, when))

    def advance(self) -> None:
        "Let the recordings of a night arrive."
        self.night += 1
        for sensor in (f"P{s}" for s in range(self.n_sensors)):
            if self.happens("no recording", 0.05):
                continue
            path, content = self._recording(sensor)
            if self.happens("late", 0.03):
                self.late.append((self.night + self.rng.randrange(1, 12), path, content))
                continue
            if self.happens("damaged", 0.01):
                self._put(path, DAMAGED + content)
                self.repairs.append((self.night + self.rng.randrange(1, 5), path, content))
                continue
            self._put(path, content)
            if self.happens("doubled", 0.01):
                self._put(f"copies/{self.night}/{Path(path).name}", content)
            if self.happens("twice in an hour", 0.003):
                self._put(path, self._recording(sensor)[1])
        for waiting in (self.late, self.repairs):
            for item in [x for x in waiting if x[0] <= self.night]:
                waiting.remove(item)
                if waiting is self.repairs:
                    (self.folder / item[1]).unlink(missing_ok=True)
                self._put(*item[1:])
        self._tidy()
        self._visit()

    def _tidy(self) -> None:
        "Remove old recordings, and rename some."
        oldest = datetime.combine(self.today - timedelta(KEPT_NIGHTS), datetime.min.time()).timestamp()
        for file in sorted(self.folder.rglob("*.wav")):
            if file.stat().st_mtime < oldest:
                file.unlink()
            elif self.happens("renamed", 0.002):
                moved = self.folder / "moved" / f"{self.night}" / file.name
                moved.parent.mkdir(parents=True, exist_ok=True)
                file.rename(moved)
        for folder in sorted(self.folder.glob("**/"), reverse=True):
            if folder != self.folder and not any(folder.iterdir()):
                folder.rmdir()

    def _visit(self) -> None:
        "Write visits, and correct some of them."
        if self.night > 30 and self.happens("visit", 0.1):
            sensor = f"P{self.rng.randrange(self.n_sensors)}"
            outcome = self.rng.choice(["leak", "no_leak", "not_found", "no_access"])
            self.visits[sensor, (self.today - timedelta(1)).isoformat()] = outcome
            if outcome == "leak" and self.night >= self.leaks.get(sensor, 10**9):
                self.leaks[sensor] = self.night + self.rng.randrange(30, 900)  # repaired; the next one comes
        if self.visits and self.happens("visit corrected", 0.01):
            self.visits[self.rng.choice(sorted(self.visits))] = self.rng.choice(["no_access", "leak"])
        if self.visits and self.happens("visit removed", 0.005):
            del self.visits[self.rng.choice(sorted(self.visits))]
        table = [f"{s},{n},{o}" for (s, n), o in sorted(self.visits.items())]
        (self.root / "visits.csv").write_text("\n".join(["sensor,night,outcome", *table]) + "\n")

    def observe(self) -> None:
        "Note what a complete run learns from the folder as it is."
        for file in sorted(self.folder.rglob("*.wav"), key=lambda f: os.fsencode(f.relative_to(self.folder))):
            content = file.read_bytes()
            digest = digest_of(content)
            sensor, day, clock = file.stem.split("_")
            if content.startswith(DAMAGED) or digest in self.model or day >= "2070":
                continue
            when = datetime.strptime(day + clock, "%Y%m%d%H%M%S").isoformat()
            self.model[digest] = sensor, night_of(when), float(content.split()[0])


def digest_of(content: bytes) -> str:
    "32 hexadecimal digits of a recording of the world."
    return f"{int(content.split()[1], 16):032x}"


def entry_of(digest: str, sensor: str, night: str, score: float) -> HistoryEntry:
    return HistoryEntry(
        digest, sensor, "", f"{night}T23:00:00", night, score, -40.0, -60.0, 0.0, "", "-60.0 -61.0"
    )


def score_files(x: Any, *args: Any) -> tuple[list[Any], Sequence[nights.Levels], list[Rejected], list[float]]:
    "In place of a detector: the score is what the file says."
    scored, rejected = [], list[Rejected]()
    for path, name in zip(x.paths, x.names, strict=True):
        content = Path(os.fsdecode(os.path.join(os.fsencode(x.folder), path))).read_bytes()
        if content.startswith(DAMAGED):
            rejected.append(Rejected(path, "not_wav", "damaged"))
            continue
        facts = {
            "digest": digest_of(content).encode(),
            "silent": False,
            "clipped_share": 0.0,
            "rms_db": -40.0,
        }
        scored.append(SimpleNamespace(path=path, sensor=name.sensor, gain=24, facts=facts, content=content))
    levels: list[nights.Levels] = [(-60.0, (-60.0, -61.0))] * len(scored)
    return scored, levels, rejected, [float(s.content.split()[0]) for s in scored]


_, _sensor_nights = _EXPORTED["nights"]
# functions that write, or stand between writes
PLACES: tuple[tuple[Any, str], ...] = (
    (os, "fsync"),
    (os, "replace"),
    (os, "link"),
    (History, "write"),
    (History, "commit"),
    (nights, "sensor_table"),
    (core_files, "write_whole"),
)


@contextmanager
def failing(n: int, error: OSError | None) -> Iterator[None]:
    "Let the n-th write, from 0, kill the process, or fail for want of room."
    left = [n]

    def counted(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                if error is not None:
                    raise error
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in PLACES if error is None else PLACES[:1]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield


def in_child(work: Any) -> int:
    "Run something in a forked process; return its status as of `os.waitpid`."
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except LeakmelError:
            status = 2
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def no_room() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def recordings_of(history: History) -> list[tuple]:
    "Digest, sensor, night and score of each recording."
    found = (h for night in history.nights() for h in history.entries(night))
    return sorted((h.digest, h.sensor, h.night, h.score) for h in found)


def evidence_of(history: History) -> list[tuple]:
    "All nights of each sensor, and what its evidence is after the last one."
    state = nights.SensorStates(history)
    states = [(s, name, *state[name][k].ravel().tolist()) for s, k in state.ids.items() for name in state]
    return [*sorted(states), *_sensor_nights(history)]


def rows_of(state: Path, read: Callable[[History], list[tuple]]) -> list[tuple]:
    with History(state) as history:
        return read(history)


def fresh_rows(world: World, visits: dict[str, str]) -> list[tuple]:
    "The evidence of a new history of all recordings of the model, added at once."
    with History(world.root / "fresh") as history:
        history.begin()
        entries = [entry_of(digest, *facts) for digest, facts in world.model.items()]
        nights.record_run(history, entries, nights.Budget(), visits, last_repairs(world))
        found = evidence_of(history)
        history.commit()
    shutil.rmtree(world.root / "fresh")
    return found


def last_visits(world: World) -> dict[str, str]:
    "Sensor -> last night before its last visit at which somebody looked."
    found: dict[str, str] = {}
    for (sensor, night), outcome in sorted(world.visits.items(), key=lambda x: x[0][1]):
        if outcome != "no_access" and any(s == sensor for s, *_ in world.model.values()):
            found[sensor] = night
    return found


def last_repairs(world: World) -> dict[str, list[str]]:
    "Sensor whose last visit found a leak -> night of its last other visit, and of the visits that found leaks since."
    found: dict[str, list[str]] = {}
    for (sensor, night), outcome in sorted(world.visits.items(), key=lambda x: x[0][1]):
        if outcome == "leak":
            found.setdefault(sensor, [""]).append(night)
        elif outcome != "no_access":
            found[sensor] = [night]
    return {sensor: visits for sensor, visits in found.items() if len(visits) > 1}


def nightly(world: World, detector: Any, **more: Any) -> run.NightlyRun:
    "A run that tells its list to a server that often fails; what arrives is in `told`."

    def post(url: str, message: Mapping[str, Any]) -> None:
        with (world.root / "told").open("a") as f:
            if random.Random(f.tell() + world.night).random() < 0.3:
                raise handover.NotDelivered("HTTP 500")
            f.write(f"{message['key']} {message['sensor']} {message['last_visit'] or '-'}\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "post", post)
        patch.setattr(handover, "WAITS_S", (0.0, 0.0))
        return _nightly(world, detector, **more)


def _nightly(world: World, detector: Any, **more: Any) -> run.NightlyRun:
    return run.nightly(
        world.folder,
        detector,
        world.state,
        notify="http://127.0.0.1/",
        visited=world.root / "visits.csv",
        audits=0,
        device="cpu",
        progress="none",
        **more,
    )
