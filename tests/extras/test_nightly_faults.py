"""Years of nightly runs under faults, from one seed, compared with a model that has none.

One line repeats a run: `pytest tests/extras/test_nightly_faults.py -k "seed3"`. The long variant has 10 years of 10 sensors.
"""

import math
import signal
from collections import Counter
from pathlib import Path

import pytest
from made_detectors import made_detector
from nightly_world import (
    World,
    evidence_of,
    failing,
    fresh_rows,
    in_child,
    last_visits,
    nightly,
    no_room,
    recordings_of,
    rows_of,
    score_files,
)

from leakmel.core.errors import LeakmelError
from leakmel.extras.nightly import nights, run
from leakmel.extras.nightly.history import History


def equal(a: object, b: object) -> bool:
    "Whether two values are equal; numbers to the last digits, because sums of many sensors are taken in another order."
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-9))


def told_by(world: World) -> dict[tuple[str, str], list[str]]:
    "Sensor and last visit before each one that was told -> the keys of its messages."
    found: dict[tuple[str, str], list[str]] = {}
    for line in (world.root / "told").read_text().splitlines() if (world.root / "told").exists() else ():
        key, sensor, visited = line.split()
        found.setdefault((sensor, visited), []).append(key)
    return found


def visits_of(state: Path) -> dict[str, list[str]]:
    with History(state) as history:
        return nights.stored_visits(history)


def disturbed(world: World, detector: object) -> None:
    "Runs of the night that come to nothing."
    if world.happens("folder gone", 0.02):
        world.folder.rename(world.root / "gone")
        with pytest.raises(LeakmelError):
            nightly(world, detector)
        (world.root / "gone").rename(world.folder)
    if world.happens("two runs at once", 0.02):
        with History(world.state), pytest.raises(LeakmelError) as e:
            nightly(world, detector)
        assert e.value.code == "output-locked"
    if world.happens("no room", 0.05):
        with failing(world.rng.randrange(3), no_room()):
            assert in_child(lambda: nightly(world, detector)) in (0, 2 << 8)
    if world.happens("killed", 0.2):
        n = world.rng.randrange(30)

        def killed() -> None:
            with failing(n, None):
                nightly(world, detector)

        status = in_child(killed)
        assert status in (0, signal.SIGKILL), status
        world.faults["killed in a write"] += status == signal.SIGKILL


def simulate(root: Path, seed: int, n_sensors: int, n_nights: int) -> Counter[str]:
    "Run the nights; return the faults that happened."
    world, detector = World(root, seed, n_sensors), made_detector()
    listed = set[tuple[str, str]]()  # sensor and last visit before each one that a complete run listed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_scored", score_files)
        patch.setattr(run, "_clips", lambda *args: {})
        for _ in range(n_nights):
            world.advance()
            if world.happens("another version", 0.003):
                patch.setattr(nights, "_EVIDENCE", f"of night {world.night}")
            disturbed(world, detector)
            done = nightly(world, detector)
            world.observe()
            assert rows_of(world.state, recordings_of) == sorted(
                (digest, *facts) for digest, facts in world.model.items()
            )
            assert {r.sensor for r in done.sensors} == {sensor for sensor, *_ in world.model.values()}
            visited = {sensor: x[-1] for sensor, x in visits_of(world.state).items()}
            now = {(r.sensor, visited.get(r.sensor, "-")) for r in done.to_visit}
            assert done.messages is not None
            told = told_by(world)
            if done.messages.left == 0:
                assert now <= told.keys()
            listed |= now
            if world.night % 60 == 59 or world.night == n_nights - 1:
                right = fresh_rows(world, last_visits(world))
                pairs = zip(rows_of(world.state, evidence_of), right, strict=True)
                wrong = [pair for pair in pairs if not all(map(equal, *pair))]
                assert not wrong, (
                    f"night {world.night}: {len(wrong)} rows, the first {wrong[0][0]} instead of {wrong[0][1]}"
                )
    told, world.faults["listed"] = told_by(world), len(listed)
    assert len({key for keys in told.values() for key in keys}) == len(told), "a visit has one key"
    # a killed run may have sent a message that it could not write down
    assert sum(len(keys) - 1 for keys in told.values()) <= world.faults["killed in a write"]
    return world.faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2), ids="seed{}".format)
def test_months_under_faults(tmp_path, seed, tried):
    faults = simulate(tmp_path / "world", seed, n_sensors=6, n_nights=240)
    assert faults["killed in a write"] > 20
    assert faults["listed"] > 0
    rare = {"another version", "visit removed", "same name", "clock ahead"}
    assert not [name for name, n in faults.items() if n == 0 and name not in rare]
    tried("S24", 240)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 103), ids="seed{}".format)
def test_ten_years_under_faults(tmp_path, seed, tried):
    faults = simulate(tmp_path / "world", seed, n_sensors=10, n_nights=3650)
    assert not [name for name, n in faults.items() if n == 0]
    tried("S24", 3650)
    print(dict(faults))
