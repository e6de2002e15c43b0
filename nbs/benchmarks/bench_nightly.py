"""Delay of the visit list and false visits on synthetic networks, and the time of a year of nightly runs."""

import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from bench_onsets import EvidenceOfVersion1

import leakmel as lm
from leakmel.dataset.pipeline import build_all
from leakmel.detector.model.detector import Detector, load_detector
from leakmel.detector.predict.scoring import RecordingList
from leakmel.extras.machine.bench import record_head
from leakmel.extras.nightly import run as nightly_run
from leakmel.extras.nightly.history import History, HistoryEntry
from leakmel.extras.nightly.nights import (
    Budget,
    begin_without_model,
    flags_of,
    night_logit,
    normal_medians,
    record_run,
    sensor_table,
)
from leakmel.extras.nightly.run import LISTED, VISITS_HTML
from leakmel.mel.spec import MelSpec
from leakmel.recordings.demo import draw_scene, make_sensor, render, stream, write_wav
from leakmel.recordings.listing import Listing
from leakmel.recordings.naming import NameParts

FIRST_NIGHT = date(2025, 1, 1)
LEAK_SHARE = 0.4  # of the sensors get a leak
FIRST_LEAK = 20  # night
FAILURES = {"silent": 0.06, "quieter": 0.06, "no data": 0.06}  # share of the sensors that fail in this way
PUMP_SHARE = 0.1  # of the sensors: a pump runs in every recording of three weeks
PUMP_NIGHTS = 21
REST_NIGHTS = 28  # a sensor is not visited again by the threshold after a visit
# way to choose visits -> its name
WAYS = {
    "list": "evidence over nights",
    "own nights": "single recordings against the sensor's own nights",
    "threshold": "threshold on single recordings",
}
DELAYS = (1, 3, 7, 14, 30)  # nights
MISSED = 10_000  # nights of delay of a leak that was not listed


@dataclass(frozen=True)
class SensorPlan:
    "What happens at a sensor; nights from 0, beyond the last one: never."

    sensor: SimpleNamespace
    leak_from: int
    leak: dict[str, Any]  # of the scene, except its level
    leak_db: float  # mean level
    fails_from: int
    failure: str  # one of FAILURES, or ""
    pump_from: int


def plan_sensor(index: int, seed: int, n_nights: int) -> SensorPlan:
    "Draw the events of a sensor."
    rng = stream(seed, 7, index)
    never = n_nights + 1
    kinds = [*FAILURES, ""]
    failure = kinds[int(rng.choice(len(kinds), p=[*FAILURES.values(), 1 - sum(FAILURES.values())]))]
    has_leak = rng.random() < LEAK_SHARE
    leak: dict[str, Any] = {
        "leak_hz": float(np.exp(rng.uniform(np.log(180), np.log(1100)))),
        "leak_octaves": rng.uniform(0.5, 1.1),
        "leak_place": rng.uniform(0.05, 0.5),
    }
    return SensorPlan(
        make_sensor(index, seed=seed),
        int(rng.integers(FIRST_LEAK, n_nights - 30)) if has_leak else never,
        leak,
        rng.uniform(-4, 8),
        int(rng.integers(10, n_nights)) if failure else never,
        failure,
        int(rng.integers(10, n_nights - PUMP_NIGHTS)) if rng.random() < PUMP_SHARE else never,
    )


def night_samples(
    plan: SensorPlan, night: int, rng: np.random.Generator
) -> np.ndarray | None:  # [N] int16; None: no recording
    "Record a night."
    scene = draw_scene(plan.sensor, "NOLEAK", rng)
    scene.gain = plan.sensor.gain
    if night >= plan.leak_from:
        vars(scene).update(leak_db=plan.leak_db + rng.normal(0, 1.5), **plan.leak)
    if plan.pump_from <= night < plan.pump_from + PUMP_NIGHTS:
        scene.hum_db = plan.sensor.hum_db + 8 + rng.normal(0, 2)
    samples = render(plan.sensor, scene, rng)
    if night >= plan.fails_from:
        if plan.failure == "no data":
            return None
        samples = (samples * (0.0 if plan.failure == "silent" else 0.1)).astype(np.int16)
    return samples


@dataclass(frozen=True, eq=False)
class Network:
    "Scores of a network; NaN: no recording."

    plans: Sequence[SensorPlan]
    score: np.ndarray  # [S, N]
    silent: np.ndarray  # [S, N] bool


def score_network(seed: int, n_sensors: int, n_nights: int, detector: Detector, work: Path) -> Network:
    "Write the recordings of a network, score them, and remove them."
    plans = [plan_sensor(s, seed, n_nights) for s in range(n_sensors)]
    score = np.full((n_sensors, n_nights), np.nan)
    silent = np.zeros((n_sensors, n_nights), bool)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        for s, plan in enumerate(plans):
            rng = stream(seed, 8, s)
            for night in range(n_nights):
                if (samples := night_samples(plan, night, rng)) is not None:
                    write_wav(Path(folder) / f"{s}-{night}.wav", samples)
        found = lm.predict(folder, detector, device="cpu", progress="none")
    for one in found.scored:
        s, night = map(int, one.path.decode().removesuffix(".wav").split("-"))
        score[s, night] = found.rule.score(one.segment_scores)
        silent[s, night] = bool(one.facts["silent"])
    return Network(plans, score, silent)


@dataclass(frozen=True, eq=False)
class Visits:
    "Visits of a network."

    false: np.ndarray  # [S] visits of a sensor without a leak at that time
    nights: np.ndarray  # [S] normal nights with a usable recording
    delay: np.ndarray  # [K] nights until each leak was listed; MISSED: not within the simulation
    leak_sensor: np.ndarray  # [K]


def visits_of_list(
    network: Network,
    budget: Budget,
    normal: np.ndarray,
    folder: Path,
    steady: tuple[MelSpec, np.ndarray] | None = None,  # without a model: features and levels [S, N, V], dB
) -> Visits:
    "Visit what the list shows, night by night; a leak that was found is repaired, and its sensor leaves the simulation."
    n_sensors, n_nights = network.score.shape
    false = np.zeros(n_sensors)
    found_at = np.full(n_sensors, -1)
    visited: dict[str, str] = {}
    for night in range(n_nights):
        day = (FIRST_NIGHT + timedelta(days=night)).isoformat()
        entries = [
            HistoryEntry(
                f"{s * n_nights + night:032x}",
                f"{s}",
                f"{s}-{night}.wav",
                f"{day}T23:00:00",
                day,
                float(network.score[s, night]),
                -40.0,
                -60.0,
                0.0,
                flags_of(bool(network.silent[s, night]), False, 0.0),
                "" if steady is None else " ".join(f"{x:.1f}" for x in steady[1][s, night]),
            )
            for s in np.flatnonzero(np.isfinite(network.score[:, night]) & (found_at < 0)).tolist()
        ]
        with History(folder) as history:
            history.begin()
            if steady is not None:
                begin_without_model(history, steady[0])
            record_run(history, entries, budget, visited)
            history.commit()
            rows = sensor_table(history, budget, normal=normal, audits=0)
        for row in rows:
            s = int(row.sensor)
            if row.visit in LISTED and found_at[s] < 0:
                visited[row.sensor] = day
                if night >= network.plans[s].leak_from:
                    found_at[s] = night
                else:
                    false[s] += 1
    return _counted(network, false, found_at)


def _counted(network: Network, false: np.ndarray, found_at: np.ndarray) -> Visits:
    "Count normal nights and delays."
    n_nights = network.score.shape[1]
    usable = np.isfinite(network.score) & ~network.silent
    leak_from = np.array([p.leak_from for p in network.plans])
    normal = usable & (np.arange(n_nights) < leak_from[:, None])
    # a logger that failed before the leak cannot show it
    leaks = np.flatnonzero(
        [
            p.leak_from < n_nights
            and not (p.failure in ("silent", "no data") and p.fails_from <= p.leak_from + 1)
            for p in network.plans
        ]
    )
    delay = np.where(found_at[leaks] < 0, MISSED, found_at[leaks] - leak_from[leaks] + 1)
    return Visits(false, normal.sum(1), delay, leaks)


def own_history_values(network: Network) -> np.ndarray:  # [S, N]; NaN: not compared
    "Compare each recording with the earlier nights of its sensor: minus the logarithm of its p-value."
    n_sensors, n_nights = network.score.shape
    evidence = EvidenceOfVersion1(n_sensors)
    usable = np.isfinite(network.score) & ~network.silent
    x = np.where(usable, night_logit(np.nan_to_num(network.score)), np.nan)
    p = np.stack([evidence.add(x[:, night]) for night in range(n_nights)], 1)
    return -np.log(np.maximum(p, 1e-300))


def visits_of_threshold(network: Network, values: np.ndarray, threshold: float) -> Visits:
    "Visit a sensor when the value of a single recording reaches a threshold, but not again within four weeks."
    n_sensors, _n_nights = network.score.shape
    false = np.zeros(n_sensors)
    found_at = np.full(n_sensors, -1)
    for s, plan in enumerate(network.plans):
        last = -REST_NIGHTS
        for night in np.flatnonzero((values[s] >= threshold) & ~network.silent[s]).tolist():
            if night < last + REST_NIGHTS:
                continue
            last = night
            if night >= plan.leak_from:
                found_at[s] = night
                break
            false[s] += 1
    return _counted(network, false, found_at)


def false_rate(found: Sequence[Visits]) -> float:
    "Return the false visits per 100 normal sensor-nights."
    return 100 * sum(v.false.sum() for v in found) / sum(v.nights.sum() for v in found)


def matched_visits(networks: Sequence[Network], values: Sequence[np.ndarray], rate: float) -> list[Visits]:
    "Visits by the lowest threshold whose rate of false visits is at most a given one, on the same networks: as good as it can be chosen."

    def visits(threshold: float) -> list[Visits]:
        return [visits_of_threshold(n, x, threshold) for n, x in zip(networks, values, strict=True)]

    steps = np.unique(np.concatenate([x[np.isfinite(x)] for x in values]))
    low, high = 0, len(steps)  # the rate falls with the threshold, but for the rest of four weeks
    while low < high:
        middle = (low + high) // 2
        if false_rate(visits(steps[middle])) <= rate:
            high = middle
        else:
            low = middle + 1
    return visits(steps[low] if low < len(steps) else np.inf)


def visit_figures(found: Sequence[Visits], *, n_draws: int = 1000, seed: int = 0) -> dict[str, Any]:
    "Rates and delays with 95 % intervals; sensors are drawn."
    false, nights = (np.concatenate([getattr(v, name) for v in found]) for name in ("false", "nights"))
    delay = np.concatenate([v.delay for v in found])
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(false), (n_draws, len(false)))
    rates = 100 * false[draws].sum(1) / nights[draws].sum(1)
    of_leaks = rng.integers(0, len(delay), (n_draws, len(delay)))

    def interval(values: np.ndarray) -> list[float]:
        return np.quantile(values, (0.025, 0.975), method="inverted_cdf").tolist()

    medians = np.quantile(delay[of_leaks], 0.5, axis=1, method="inverted_cdf")
    within = {
        str(n): {"share": float((delay <= n).mean()), "interval": interval((delay[of_leaks] <= n).mean(1))}
        for n in DELAYS
    }
    return {
        "false_visits": int(false.sum()),
        "sensor_nights": int(nights.sum()),
        "false_per_100": float(100 * false.sum() / nights.sum()),
        "false_interval": interval(rates),
        "leaks": len(delay),
        "median_delay": _delay(float(np.quantile(delay, 0.5, method="inverted_cdf"))),
        "median_interval": [_delay(x) for x in interval(medians)],
        "within": within,
    }


def _delay(nights: float) -> float | None:  # None: more than half of the leaks were not listed
    return None if nights >= MISSED else nights


def train_detector(work: Path, n_files: int, log: Callable[[str], None]) -> Detector:
    "Train a detector on another synthetic network; it is kept in the work folder."
    if not (work / "model" / "model.pt").exists():
        log("training")
        lm.write_demo(work / "labelled", n_files=n_files)
        build_all(work / "labelled", out_dir=work / "sets", progress="none")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lm.train(
                work / "sets" / "TRAINING_DATASET.H5",
                None,
                out=work / "model",
                settings=lm.TrainSettings(detector="spectral"),
                device="cpu",
                progress=False,
            )
    return load_detector(work / "model" / "model.pt")


def bench_visits(
    work: Path,
    networks: int,
    sensors: int,
    nights: int,
    n_files: int,
    budgets: Sequence[float],
    log: Callable[[str], None],
) -> dict[str, Any]:
    "Measure the list and the threshold."
    detector = train_detector(work, n_files, log)
    if detector.held_out is None:
        raise RuntimeError("the detector has no held-out scores")
    normal = normal_medians(detector)
    made = []
    for k in range(networks):
        log(f"network {k + 1} of {networks}")
        made.append(score_network(100 + k, sensors, nights, detector, work))
    singles = {"threshold": [n.score for n in made], "own nights": list(map(own_history_values, made))}
    rows = []
    for per_100 in budgets:
        log(f"budget {per_100:g}")
        found = []
        for network in made:
            with tempfile.TemporaryDirectory(dir=work) as folder:
                found.append(visits_of_list(network, Budget(per_100), normal, Path(folder)))
        rate = false_rate(found)
        row = {"budget": per_100, "list": visit_figures(found)}
        for kind, values in singles.items():
            row[kind] = visit_figures(matched_visits(made, values, rate))
        rows.append(row)
    return {
        "networks": networks,
        "sensors": sensors,
        "nights": nights,
        "detector": [str(e) for e in detector.evaluations],
        "failing_sensors": sum(p.failure != "" for n in made for p in n.plans),
        "rows": rows,
    }


def _year_night(k: int, n_sensors: int, kept: int) -> RecordingList:
    "List what the folder holds after night k: one recording of each sensor for the last nights."
    names = [NameParts(sensor=f"P{s:04d}") for s in range(n_sensors)]
    nights = range(max(0, k - kept + 1), k + 1)
    paths = [f"{night:03d}/P{s:04d}.wav".encode() for night in nights for s in range(n_sensors)]
    n = len(paths)
    listing = Listing(
        "", Path("/nowhere"), paths, np.full(n, 81_964), np.zeros(n, np.int64), np.full(n, -1, np.int16)
    )
    return RecordingList(listing, np.full(n, "", object), names * len(nights))


def _year_scores(k: int, n_sensors: int) -> dict[str, list[Any]]:
    "Draw the scores of a night; leaks begin at a tenth of the sensors in the course of the year."
    rng = np.random.default_rng(k)
    night = (FIRST_NIGHT + timedelta(days=k)).isoformat()
    mean = np.linspace(-3, 1, n_sensors)
    leaks = (np.arange(n_sensors) % 10 == 0) & (np.arange(n_sensors) * 365 // n_sensors < k)
    scores = 1 / (1 + np.exp(-rng.normal(mean + 2 * leaks, 0.5)))
    level = rng.normal(-40, 2, n_sensors)
    bands = rng.normal(-60, 2, (n_sensors, 8)).round(1)
    entries, rows = [], []
    for s in range(n_sensors):
        digest, path = f"{k * n_sensors + s:032x}", f"{k:03d}/P{s:04d}.wav"
        text = " ".join(map(str, bands[s].tolist()))
        entries.append(
            HistoryEntry(
                digest,
                f"P{s:04d}",
                path,
                f"{night}T23:00:00",
                night,
                float(scores[s]),
                float(level[s]),
                -60.0,
                0.0,
                "",
                text,
            )
        )
        rows.append((path.encode(), 81_964, 0, digest, ""))
    return {"entries": entries, "rows": rows}


def _learn(new: dict[str, list[Any]], files: Any, *_: Any) -> None:
    "Take the scores of a night in place of `read_new`."
    vars(files).update(new)


def _timed_night(k: int, sensors: int, kept: int, detector: Any, state: str) -> tuple[Any, float]:
    "Run night k of a synthetic fleet without reading audio; return its result and its seconds."
    found, new = _year_night(k, sensors, kept), _year_scores(k, sensors)
    began = time.perf_counter()
    with (
        mock.patch.object(nightly_run, "find_recordings", return_value=found),
        mock.patch.object(nightly_run, "read_new", partial(_learn, new)),
        mock.patch.object(nightly_run, "_clips", return_value={}),
    ):
        done = nightly_run.nightly(
            "/nowhere", detector, state, time_from="file", device="cpu", progress="none"
        )
    return done, time.perf_counter() - began


def bench_year(
    work: Path, sensors: int, nights: int, kept: int, log: Callable[[str], None]
) -> dict[str, Any]:
    "Time `lm.nightly` for a year with a simulated clock; listing, scoring and players are replaced."
    detector = load_detector(work / "model" / "model.pt")
    seconds: list[float] = []
    last: Any = None
    with tempfile.TemporaryDirectory(dir=work) as state:
        for k in range(nights):
            last, took = _timed_night(k, sensors, kept, detector, state)
            seconds.append(took)
            if k % 60 == 59:
                log(f"night {k + 1}: {sum(seconds):.0f} s")
        size = (Path(state) / "history.sqlite").stat().st_size
        page = (Path(state) / VISITS_HTML).stat().st_size
    return {
        "sensors": sensors,
        "nights": nights,
        "nights_kept": kept,
        "seconds": sum(seconds),
        "first_month_ms": 1000 * float(np.median(seconds[:30])),
        "last_month_ms": 1000 * float(np.median(seconds[-30:])),
        "history_bytes": size,
        "page_bytes": page,
        "listed": len(last.to_visit),
        "known": last.counts.known,
    }


def bench_fleet(
    work: Path, sensors: int, log: Callable[[str], None], *, recorded: int = 34, kept: int = 2
) -> dict[str, Any]:
    """Time the last two of 36 nights of many sensors, without reading audio.

    The nights before are recorded without tables and page. Of the recordings the folder keeps those of two nights.
    """
    detector = load_detector(work / "model" / "model.pt")
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(dir=work) as state:
        with History(state) as history:
            for k in range(recorded):
                history.begin()
                history.set_meta("model", nightly_run.model_digest(detector))
                record_run(history, _year_scores(k, sensors)["entries"], Budget())
                history.commit()
        log(f"{sensors:,} sensors: {recorded} nights recorded")
        file = Path(state) / "history.sqlite"
        sizes = [file.stat().st_size]
        for k in range(recorded, recorded + 2):
            last, took = _timed_night(k, sensors, kept, detector, state)
            seconds.append(took)
            log(f"night {k + 1}: {seconds[-1]:.1f} s")
        with History(state) as history:
            sql = "SELECT avg(length(content)) FROM parts WHERE name < 'a'"
            night = history.query(sql)[0][0]
        sizes.append(file.stat().st_size)
        page = (Path(state) / VISITS_HTML).stat().st_size
    return {
        "sensors": sensors,
        "nights": recorded + 2,
        "nights_kept": kept,
        "seconds": seconds,
        # of the process, with the simulation
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "history_bytes": sizes[-1],
        "bytes_per_night": night,
        "year_bytes": sizes[-1] + (365 - recorded - 2) * night,
        "page_bytes": page,
        "listed": len(last.to_visit),
        "known": last.counts.known,
    }


def bench_nightly(
    folder: str | os.PathLike,  # work folder: the detector stays there
    *,
    networks: int = 6,
    sensors: int = 50,  # of a network
    nights: int = 120,
    n_files: int = 400,  # recordings of the detector's network
    budgets: str = "0.05,0.1,0.2,0.5,1,2",  # false visits per 100 sensor-nights
    year_sensors: int = 500,
    year_nights: int = 365,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Measure delay and false visits, and the time of a year."
    work = Path(folder)
    work.mkdir(parents=True, exist_ok=True)
    wanted = [float(word) for word in budgets.split(",")]
    began = datetime.now()
    visits = bench_visits(work, networks, sensors, nights, n_files, wanted, log)
    year = bench_year(work, year_sensors, year_nights, 7, log)
    log(f"{(datetime.now() - began).total_seconds():.0f} s in all")
    right = all(row[kind]["leaks"] == row["list"]["leaks"] for row in visits["rows"] for kind in WAYS)
    right &= year["known"] == year_sensors * min(6, year_nights - 1)
    return {**record_head("nightly"), "verified": {"all_ok": right}, "visits": visits, "year": year}


def bench_fleets(
    folder: str | os.PathLike,  # work folder
    *,
    sensors: str = "1000,10000,100000",
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Measure a night of fleets: time, memory, state and page. The detector is trained on 100 recordings, and scores nothing."
    work = Path(folder)
    work.mkdir(parents=True, exist_ok=True)
    train_detector(work, 100, log)
    fleets = [bench_fleet(work, int(n), log) for n in sensors.split(",")]
    right = all(f["known"] == f["sensors"] for f in fleets)
    return {**record_head("fleet"), "verified": {"all_ok": right}, "fleets": fleets}


def fleet_table(record: dict[str, Any]) -> str:
    "Time, memory, state and page of a night as a text table."
    lines = [
        f"{'sensors':>8s} {'night, s':>9s} {'memory, GB':>11s} {'state, GB a year':>17s} {'page, MB':>9s}"
    ]
    lines += [
        f"{f['sensors']:>8,} {f['seconds'][-1]:>9.1f} {f['peak_bytes'] / 1e9:>11.2f} {f['year_bytes'] / 1e9:>17.2f} {f['page_bytes'] / 1e6:>9.1f}"
        for f in record["fleets"]
    ]
    return "\n".join(lines)


def nightly_table(record: dict[str, Any]) -> str:
    "Delay and false visits as a text table, and the time of the year."
    lines = [
        f"{'budget':>6s} {'':10s} {'false visits per 100':>24s} {'median delay (95 %)':>22s}"
        f" {'found in 7 nights':>22s} {'in 30 nights':>22s}"
    ]
    for row in record["visits"]["rows"]:
        for kind in WAYS:
            r = row[kind]
            low, high = r["false_interval"]
            rate = f"{r['false_per_100']:.2f} ({low:.2f} to {high:.2f})"
            days = [
                ("never" if x is None else f"{x:.0f}") for x in (r["median_delay"], *r["median_interval"])
            ]
            shares = []
            for n in ("7", "30"):
                low, high = r["within"][n]["interval"]
                shares.append(f"{100 * r['within'][n]['share']:.0f} % ({100 * low:.0f} to {100 * high:.0f})")
            lines.append(
                f"{row['budget']:>6g} {kind:10s} {rate:>24s} {f'{days[0]} ({days[1]} to {days[2]})':>22s} {shares[0]:>22s} {shares[1]:>22s}"
            )
    v, y = record["visits"], record["year"]
    first = v["rows"][0]["list"]
    lines.append(
        f"{v['networks']} networks of {v['sensors']} sensors, {v['nights']} nights: {first['leaks']} leaks, {first['sensor_nights']:,} normal sensor-nights, "
        f"{v['failing_sensors']} failing loggers; intervals over sensors"
    )
    lines.append(
        f"a year: {y['nights']} runs of {y['sensors']} sensors in {y['seconds']:.0f} s ({y['first_month_ms']:.0f} ms a run in the first month, "
        f"{y['last_month_ms']:.0f} ms in the last); history {y['history_bytes'] / 1e6:.0f} MB"
    )
    return "\n".join(lines)


def shares_within(figures: Sequence[dict[str, Any]], nights: int) -> tuple[np.ndarray, dict[str, Any]]:
    "Return the shares of leaks that are found within some nights, in percent, and their error bars for plotly."
    found = [f["within"][str(nights)] for f in figures]
    share = np.array([100 * f["share"] for f in found])
    low, high = 100 * np.array([f["interval"] for f in found]).T
    return share, {"type": "data", "array": high - share, "arrayminus": share - low, "thickness": 1}


def nightly_figure(record: dict[str, Any]) -> Any:
    "Draw the share of leaks that are found within 14 nights, by false visits."
    import plotly.graph_objects as go

    fig = go.Figure()
    for (kind, name), colour in zip(WAYS.items(), ("#1F82C6", "#009E73", "#D55E00"), strict=True):
        rows = [row[kind] for row in record["visits"]["rows"]]
        share, error = shares_within(rows, 14)
        fig.add_trace(
            go.Scatter(
                x=[r["false_per_100"] for r in rows],
                y=share,
                error_y=error,
                name=name,
                mode="lines+markers",
                line={"color": colour},
            )
        )
    at = next((row for row in record["visits"]["rows"] if row["budget"] == 0.2), record["visits"]["rows"][0])
    ours, single = (100 * at[kind]["within"]["14"]["share"] for kind in ("list", "threshold"))
    fig.update_xaxes(title="false visits per 100 sensor-nights")
    fig.update_yaxes(title="leaks listed within 14 nights, %", range=[0, 102])
    title = f"Budget {at['budget']:g}: the list shows {ours:.0f} % of the leaks within 14 nights, a threshold {single:.0f} %"
    fig.update_layout(title=title, height=440, legend={"orientation": "h", "y": -0.25})
    return fig
