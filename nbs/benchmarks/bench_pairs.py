"""Pairs of loggers: coverage and error of positions, false events, power, clocks, speeds of lines, CPU time of a pair.

Protocol, written before the first run. Recordings are those of `tests/helpers/pipe_world.py`, a simulator that was written apart from
the solver. Seeds below 2,000 were used to choose constants of the solver; no figure here uses them. One seed is one case.

1. Leaks, seeds from 40,000: 300 on one section for each of five materials, then 900 on two or three sections. Each is solved twice:
   with speeds known within 2 %, and with materials and sizes only. Lengths are given exactly, as the issue's simulators have them, and
   the solver has the default of `lm.correlate_pairs` for their standard error. Kinds: sections, materials (one section), branch, hum and
   taps, signal-to-noise below and from 6 dB. Of each kind: the share of 95 % intervals that hold the leak, with the interval of Clopper and
   Pearson, of leaks with a position; their median error; and on the same cases the median error of the highest cross-correlation and of
   GCC-PHAT with one mean speed. Then the same leaks with given lengths that are wrong by 0.5 m (standard error, of the whole pipe), where
   the solver is told so, and where it is not; and exact lengths with 0.5 m told.
2. Sources beyond a logger (900, seeds from 50,000) and recordings without a source (900, seeds from 55,000), on one to three sections.
3. False events, pairs of one to three sections over 30 nights, the row of a pair after each night: (a) 60 pairs without a source, seeds from
   60,000: noise, hum, taps, at every second pair a buzz (100 Hz and its harmonics up to 2 kHz, in phase at both loggers); (b) 60 pairs with a
   pump (broadband noise) beyond a logger on 7 nights, seeds from 61,000; (c) 40,000 pairs at the level of delays: the share of nights that the solver
   takes as an upper limit (`FALSE_SHARE`) has a delay, uniform over all that it looks for; no recording is made. An event is counted
   when it appears. The rate per 1,000 pair-nights has the interval of Garwood; budgets 1 and 10. Not among them, for nothing in two
   recordings tells them from a leak: a consumer that runs all night between the loggers, and broadband interference in both channels.
4. Power: the share of leaks that are an event within 7 nights; 24 pairs for each signal-to-noise ratio, seeds from 62,000, speeds known.
5. Clocks, at the level of delays, 7 nights, speeds known, 0.5 ms stated, 2,000 lines each: true scatter of 0.5, 1, 2, 5 and 20 ms, one step of
   20 ms after 4 nights, and a constant offset of 20 ms: shares of the verdict clock, of events, and of event intervals that hold the leak.
6. Speed of a line, at the level of delays: 2,000 lines of three loggers on a pipe of which the material is known, a source anywhere from 40 m before
   the first to 40 m after the last, lengths wrong by 0.5 m and told so; the same without being told. Share of 95 % intervals that hold the speed.
7. CPU: 100 loggers in a row, 4 nights, 10 s at 8 kHz, `lm.correlate_pairs` with files, state and result: CPU seconds of all threads.

A kind is right if the interval of its share touches 93 to 97 % and its median error is at most 1 m (known) or 2.5 m (material); the issue's other
limits: at most 2 % of pairs without a source get a position, at least 95 % of sources beyond a logger are called so, rates of (a), (b) and (c)
whose lower ends are at most the budget, at most 6 ms a pair. What is not met stays in the record.
"""

import math
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special, stats
from scipy.io import wavfile

import leakmel as lm
from leakmel.extras.locate import pairs as pairs_of
from leakmel.extras.locate import sections
from leakmel.extras.locate.pairs import FALSE_SHARE, NightRow, Pair, Repeat, posterior_speeds, section_of
from leakmel.extras.machine.bench import record_head, store

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
from pipe_world import MATERIALS, RATE, Case, make_case

CLOCK_S = signature(lm.correlate_pairs).parameters["clock_error_s"].default
LENGTH_ERROR_M = signature(lm.correlate_pairs).parameters["distance_error_m"].default
WRONG_M = 0.5  # standard error of lengths that are not exact
LOUD_DB = 6.0
BUDGETS = (1.0, 10.0)
POWER_DB = (-18.0, -15.0, -12.0, -9.0, -6.0, -3.0, 6.0)
MEDIANS = ("leakmel", "correlation", "phat", "width")
LENGTHS = ("exact, 0.5 m told", "wrong by 0.5 m, told", "wrong by 0.5 m, not told")
WAYS = {"known": 1.0, "material": 2.5}  # what is known of the speed -> most median error, m


def route_of(case: Case, known: bool, longer: float = 1.0) -> sections.Route:
    "Return what a user knows: speeds within 2 %, or materials and sizes; lengths are wrong by a factor."
    made = []
    for k, (s, speed) in enumerate(zip(case.sections, case.known_m_s, strict=True)):
        given = speed if known else lm.wave_speed(s.material, s.diameter_mm, s.wall_mm)
        # sections differ in their speed, also those of one size
        made.append(replace(section_of(longer * s.length_m, given), pipe=str(k)))
    return sections.Route(tuple(made))


def delay_of(case: Case, route: sections.Route) -> sections.PairDelay:
    "Return the delay between the recordings of a case."
    n = sections.segment_length(route.most_s, case.rate, case.samples.shape[1])
    x, y = (sections.recording_spectra(samples, case.rate, n) for samples in case.samples)
    return sections.pair_delay(x, y, route, CLOCK_S)


def place_of(
    found: sections.PairDelay, route: sections.Route, length_error_m: float = LENGTH_ERROR_M
) -> sections.Place:
    "Return verdict and position of a delay."
    if found.verdict != "found":
        return sections.Place(found.verdict, None, None, None, 0.0)
    error_s = math.hypot(found.error_s, CLOCK_S)
    return sections.place_source(route, found.delay_s, error_s, found.centre_hz, length_error_m)


def by_scipy(case: Case, known: bool, phat: bool) -> float:
    "Return the position of the highest cross-correlation, or that of GCC-PHAT, for one mean speed."
    length = case.length_m
    speed = length / sum(s.length_m / s.usual_m_s for s in route_of(case, known).sections)
    n = 2 * case.samples.shape[1]
    cross = np.fft.rfft(case.samples[0], n) * np.fft.rfft(case.samples[1], n).conj()
    values = np.fft.irfft(cross / np.maximum(np.abs(cross), 1e-30) if phat else cross, n)
    most = int(length / speed * RATE) + 1
    lag = np.argmax(np.concatenate([values[-most:], values[: most + 1]])) - most
    return float(np.clip((length + speed * lag / RATE) / 2, 0, length))


def _solved(case: Case, known: bool, seed: int) -> dict[str, Any]:
    "Return what is measured of a leak."
    wrong_m = WRONG_M * np.random.default_rng([seed, 5]).standard_normal()
    exact, wrong = route_of(case, known), route_of(case, known, max(0.8, 1 + wrong_m / case.length_m))
    found, other = delay_of(case, exact), delay_of(case, wrong)
    placed = [place_of(found, exact), place_of(found, exact, WRONG_M)]
    placed += [place_of(other, wrong, WRONG_M), place_of(other, wrong)]
    places = dict(zip(("", *LENGTHS), placed, strict=True))
    at: Any = case.position_m
    return {
        "verdict": places[""].verdict,
        "covers": {name: p.low_m <= at <= p.high_m for name, p in places.items() if p.low_m is not None},
        "width": places[""].high_m - places[""].low_m if places[""].low_m is not None else math.nan,
        "leakmel": abs(places[""].position_m - at) if places[""].low_m is not None else math.nan,
        "correlation": abs(by_scipy(case, known, False) - at),
        "phat": abs(by_scipy(case, known, True) - at),
    }


def kinds_of(case: Case) -> dict[str, bool]:
    "The kinds of a leak, and whether it is one."
    one = len(case.sections) == 1
    return {
        "all": True,
        "1 section": one,
        "2 or 3 sections": not one,
        **{name: one and case.sections[0].material == name for name in MATERIALS},
        "no branch": not case.has_branch,
        "branch": case.has_branch,
        "no hum": not case.has_hum,
        "hum": case.has_hum,
        "no taps": not case.has_tap,
        "taps": case.has_tap,
        f"below {LOUD_DB:g} dB": case.snr_db < LOUD_DB,
        f"from {LOUD_DB:g} dB": case.snr_db >= LOUD_DB,
    }


def share_of(k: int, n: int) -> dict[str, Any]:
    "A share with the interval of Clopper and Pearson."
    return {"k": k, "n": n, "share": k / max(n, 1), "interval": [*stats.binomtest(k, n).proportion_ci()]}


def rate_of(k: int, n: int) -> dict[str, Any]:
    "A rate per 1,000 with the interval of Garwood."
    low = float(special.gammaincinv(k, 0.025)) if k else 0.0
    ends = [1000 * low / n, 1000 * float(special.gammaincinv(k + 1, 0.975)) / n]
    return {"k": k, "n": n, "per_1000": 1000 * k / n, "interval": ends}


def measure_leaks(each: int, on_more: int, log: Callable[[str], None]) -> dict[str, Any]:
    "Part 1: figures of each kind, by what is known of the speed; and those of other lengths."
    plan = [(name, 1) for name in MATERIALS for _ in range(each)] + [
        (None, 2 + k % 2) for k in range(on_more)
    ]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for k, (material, n) in enumerate(plan):
        if k % 100 == 0:
            log(f"leak {k} of {len(plan)}")
        case = make_case(40_000 + k, "leak", n, material)
        for way in WAYS:
            solved = _solved(case, way == "known", 40_000 + k)
            for kind, is_one in kinds_of(case).items():
                rows[way, kind] += [solved] * is_one
    found: dict[str, Any] = {way: {} for way in WAYS}
    for (way, kind), own in rows.items():
        if not own:
            continue
        held = [r["covers"][""] for r in own if "" in r["covers"]]
        medians = {f"{name}_m": float(np.nanmedian([r[name] for r in own])) for name in MEDIANS}
        found[way][kind] = share_of(sum(held), len(held)) | medians
        found[way][kind]["verdicts"] = dict(Counter(r["verdict"] for r in own))
    lengths: dict[str, Any] = {}
    for way in WAYS:
        covers = [r["covers"] for r in rows[way, "all"]]
        told = {name: [x[name] for x in covers if name in x] for name in LENGTHS}
        lengths[way] = {name: share_of(sum(own), len(own)) for name, own in told.items()}
    return {"leaks": found, "lengths": lengths}


def measure_others(n: int, log: Callable[[str], None]) -> dict[str, Any]:
    "Part 2: verdicts of sources beyond a logger and of recordings without a source."
    found: dict[str, Any] = {way: {} for way in WAYS}
    for kind, seed in (("outside", 50_000), ("none", 55_000)):
        log(f"{n} cases: {kind}")
        verdicts: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
        for k in range(n):
            case = make_case(seed + k, kind, 1 + k % 3)
            for way in WAYS:
                route = route_of(case, way == "known")
                verdicts[way][place_of(delay_of(case, route), route).verdict] += 1
        for way, own in verdicts.items():
            asked = "outside" if kind == "outside" else "leak"
            found[way][kind] = share_of(own[asked], n) | {"verdicts": dict(own)}
    return found


def night_row(found: sections.PairDelay) -> NightRow:
    "Return the row of a night."
    return NightRow("", found.verdict, found.delay_s, found.error_s, found.centre_hz, found.drift, b"")


def events_of(route: sections.Route, rows: Sequence[NightRow], budget: float, nights: Iterable[int]) -> int:
    "Count the events that appear, by the row of a pair after some of the nights."
    pair = Pair("A", "B", route, "")
    shown = [pairs_of._row(pair, rows[: k + 1], CLOCK_S, LENGTH_ERROR_M, budget).event for k in nights]
    return sum(bool(now) and not before for before, now in zip([None, *shown], shown, strict=False))


def buzzing(case: Case, rng: np.random.Generator) -> Case:
    "Add harmonics of 100 Hz to both recordings, in phase."
    t = np.arange(case.samples.shape[1]) / case.rate
    levels = rng.exponential(size=20)
    buzz = sum(a * np.sin(2 * np.pi * 100 * (k + 1) * t + k) for k, a in enumerate(levels))
    return replace(case, samples=case.samples + buzz * case.samples.std(axis=1, keepdims=True))


def measure_false_events(n_pairs: int, n_delays: int, log: Callable[[str], None]) -> dict[str, Any]:
    "Part 3: events of pairs without a source between the loggers, by budget."
    counts: Counter[tuple[str, float]] = Counter()
    nights: Counter[str] = Counter()
    for kind, seed, n in (("none", 60_000, 30), ("outside", 61_000, 7)):
        for k in range(n_pairs):
            log(f"events: {kind}, pair {k} of {n_pairs}")
            cases = [make_case(seed + k, kind, 1 + k % 3, night=night) for night in range(n)]
            if kind == "none" and k % 2 == 0:
                cases = [buzzing(case, np.random.default_rng([k, i])) for i, case in enumerate(cases)]
            for way in WAYS:
                route = route_of(cases[0], way == "known")
                rows = [night_row(delay_of(case, route)) for case in cases]
                name = f"{'no source' if kind == 'none' else 'pump beyond a logger'}, {way}"
                nights[name] += n
                for budget in BUDGETS:
                    counts[name, budget] += events_of(route, rows, budget, range(n))
    log("events: delays by chance")
    rng = np.random.default_rng(63_000)
    name = "delays by chance, known"
    route = sections.Route((section_of(100.0, 1200.0),))
    for heard in rng.random((n_delays, 30)) < FALSE_SHARE:
        delays = 1.25 * route.most_s * rng.uniform(-1, 1, 30)
        rows = [
            NightRow("", "found" if is_heard else "none", t, 1e-4, 300.0, 0.0, b"")
            for t, is_heard in zip(delays.tolist(), heard, strict=True)
        ]
        nights[name] += 30
        for budget in BUDGETS:
            counts[name, budget] += events_of(route, rows, budget, np.flatnonzero(heard))
    return {
        name: {f"{budget:g}": rate_of(counts[name, budget], n) for budget in BUDGETS}
        for name, n in nights.items()
    }


def measure_power(n_pairs: int, log: Callable[[str], None]) -> dict[str, Any]:
    "Part 4: share of leaks that are an event within 7 nights, and of nights with a delay, by signal-to-noise ratio."
    found = {}
    for i, snr_db in enumerate(POWER_DB):
        log(f"power at {snr_db:g} dB")
        n_events = n_nights = 0
        for k in range(n_pairs):
            seed = 62_000 + i * n_pairs + k
            cases = [make_case(seed, "leak", 1 + k % 3, night=night, snr_db=snr_db) for night in range(7)]
            route = route_of(cases[0], True)
            rows = [night_row(delay_of(case, route)) for case in cases]
            n_nights += sum(row.verdict == "found" for row in rows)
            n_events += events_of(route, rows, 1.0, range(7)) > 0
        found[f"{snr_db:g}"] = share_of(n_events, n_pairs) | {"nights": n_nights / (7 * n_pairs)}
    return found


def measure_clocks(n_lines: int) -> dict[str, Any]:
    "Part 5: what clocks do that differ from what is stated."
    ways: dict[str, tuple[float, np.ndarray]] = {
        "scatter of 0.5 ms, as stated": (0.5e-3, np.zeros(7)),
        "scatter of 1 ms": (1e-3, np.zeros(7)),
        "scatter of 2 ms": (2e-3, np.zeros(7)),
        "scatter of 5 ms": (5e-3, np.zeros(7)),
        "scatter of 20 ms": (20e-3, np.zeros(7)),
        "one step of 20 ms after 4 nights": (0.5e-3, 20e-3 * (np.arange(7) >= 4)),
        "offset of 20 ms in all nights": (0.5e-3, np.full(7, 20e-3)),
    }
    found = {}
    for k, (name, (scatter_s, offset_s)) in enumerate(ways.items()):
        rng = np.random.default_rng(64_000 + k)
        kinds: Counter[str] = Counter()
        for _ in range(n_lines):
            length, true = rng.uniform(60, 180), 1200.0
            at = rng.uniform(0.03, 0.97) * length
            route = sections.Route((section_of(length, true * rng.uniform(0.98, 1.02)),))
            delays = (2 * at - length) / true + offset_s + rng.normal(0, np.hypot(scatter_s, 1e-4), 7)
            rows = [NightRow("", "found", t, 1e-4, 100.0, 0.0, b"") for t in delays.tolist()]
            row: Any = pairs_of._row(Pair("A", "B", route, ""), rows, CLOCK_S, 0.0, 1.0)
            kinds[row.verdict] += 1
            if row.event:
                kinds["events"] += 1
                kinds["covered"] += row.low_m <= at <= row.high_m
        found[name] = {
            "clock": kinds["clock"] / n_lines,
            "outside": kinds["outside"] / n_lines,
            "events": kinds["events"] / n_lines,
            "covered": share_of(kinds["covered"], max(kinds["events"], 1)),
        }
    return found


def measure_speeds(n_lines: int) -> dict[str, Any]:
    "Part 6: whether the posterior of the speed of a line holds the speed."
    counts: Counter[str] = Counter()
    widths: dict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(65_000)
    for _ in range(n_lines):
        pipe = lm.wave_speed(str(rng.choice(list(MATERIALS))), 150, 9)
        true = rng.uniform(*pipe.measured_m_s)
        lengths = rng.uniform(40, 120, 2)
        loggers = np.array([0.0, lengths[0], lengths.sum()])
        arrivals = np.abs(rng.uniform(-40, lengths.sum() + 40) - loggers) / true
        given = lengths + WRONG_M * rng.standard_normal(2)
        error_s = 3e-4
        delays = [
            Repeat(7, 7, float(d + error_s * rng.standard_normal()), error_s, 100.0, 0.0, False)
            for d in arrivals[:2] - arrivals[1:]
        ]
        for name, told_m in (("told", WRONG_M), ("not told", 0.0)):
            own = posterior_speeds(section_of(100.0, pipe), zip(given.tolist(), delays, strict=True), told_m)
            low, high = np.interp([0.025, 0.975], sections.SHARES, own)
            counts[name] += bool(low <= true <= high)
            widths[name].append(float((high - low) / true))
    return {
        name: share_of(counts[name], n_lines) | {"width": float(np.median(widths[name]))} for name in widths
    }


def measure_cpu(work: Path, n_loggers: int = 100, n_nights: int = 4) -> dict[str, Any]:
    "Part 7: CPU time of a pair, with reading and the state."
    rate, n = 8000, 80_000
    rng = np.random.default_rng(66_000)
    recordings = work / "recordings"
    recordings.mkdir()
    for night in range(n_nights):
        source = rng.standard_normal(n + 2000)
        for k in range(n_loggers):
            # neighbours hear the same source with a delay of up to 62 ms
            start = int(rng.integers(500))
            heard = source[start : start + n] + 2 * rng.standard_normal(n)
            name = f"LOG{1001 + k}~{k}~202511{10 + night}_020000~8.wav"
            wavfile.write(recordings / name, rate, (3000 * heard).astype(np.int16))
    rows = [f"LOG{1001 + k},LOG{1002 + k},100,ductile-iron,150,6" for k in range(n_loggers - 1)]
    (work / "pairs.csv").write_text("\n".join(["a,b,length_m,material,diameter_mm,wall_mm", *rows]))
    start_s, wall_s = time.process_time(), time.perf_counter()
    done = lm.correlate_pairs(recordings, work / "pairs.csv", work / "state", progress="none")
    cpu_s = time.process_time() - start_s
    return {
        "pairs": done.n_added,
        "cpu_s": cpu_s,
        "ms_per_pair": 1000 * cpu_s / done.n_added,
        "wall_s": time.perf_counter() - wall_s,
    }


def goals_of(r: dict[str, Any]) -> dict[str, bool]:
    "What the protocol calls right."
    kinds = [(way, own) for way in WAYS for own in r["leaks"][way].values()]
    rates = [(float(b), x) for own in r["events"].values() for b, x in own.items()]
    return {
        "coverage": all(x["interval"][0] <= 0.97 and x["interval"][1] >= 0.93 for _, x in kinds),
        "error": all(x["leakmel_m"] <= WAYS[way] for way, x in kinds),
        "none": all(r["others"][way]["none"]["share"] <= 0.02 for way in WAYS),
        "outside": all(r["others"][way]["outside"]["share"] >= 0.95 for way in WAYS),
        "events": all(x["interval"][0] <= budget for budget, x in rates),
        "speeds": r["speeds"]["told"]["interval"][1] >= 0.93,
        "cpu": r["cpu"]["ms_per_pair"] <= 6,
    }


def bench_pairs(
    folder: str | os.PathLike,  # work folder
    *,
    part: float = 1.0,  # of the cases; below 1: a rehearsal
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Run the protocol."
    head = record_head("pairs")
    start_s = time.process_time()
    work = Path(folder)
    work.mkdir(parents=True, exist_ok=True)

    def some(n: int) -> int:
        return max(1, round(part * n))

    with tempfile.TemporaryDirectory(dir=work) as inner:
        cpu = measure_cpu(Path(inner), max(3, some(100)))
    measured = {
        "cpu": cpu,
        **measure_leaks(some(300), some(900), log),
        "others": measure_others(some(900), log),
        "events": measure_false_events(some(60), some(40_000), log),
        "power": measure_power(some(24), log),
        "clocks": measure_clocks(some(2000)),
        "speeds": measure_speeds(some(2000)),
    }
    goals = goals_of(measured)
    ok = cpu["pairs"] == 4 * (max(3, some(100)) - 1)
    cpu_s = time.process_time() - start_s
    return {
        **head,
        "rehearsal": part < 1,
        "verified": {"all_ok": ok},
        "goals": goals,
        "length_error_m": LENGTH_ERROR_M,
        "cpu_s": cpu_s,
        **measured,
    }


def _percent(x: dict[str, Any]) -> str:
    low, high = (100 * v for v in x["interval"])
    return f"{100 * x['share']:.1f} % ({low:.1f} to {high:.1f})"


def pairs_table(record: dict[str, Any]) -> str:
    "Coverage and median errors of each kind as a text table."
    lines = [
        f"{'speed':8s} {'leaks':16s} {'n':>5s} {'95 % interval holds':>23s} {'width':>7s} {'median error':>12s} {'correlation':>11s} {'GCC-PHAT':>9s}"
    ]
    for way, kinds in record["leaks"].items():
        for kind, x in kinds.items():
            errors = [f"{x[f'{name}_m']:.2f} m" for name in ("leakmel", "correlation", "phat")]
            lines.append(
                f"{way:8s} {kind:16s} {x['n']:5d} {_percent(x):>23s} {x['width_m']:5.1f} m {errors[0]:>12s} {errors[1]:>11s} {errors[2]:>9s}"
            )
    return "\n".join(lines)


def other_pairs_table(record: dict[str, Any]) -> str:
    "Other lengths, verdicts, events, power, clocks and speeds as text."
    lines = []
    for way in WAYS:
        lines += [
            f"{way}: lengths {name}: interval holds {_percent(x)}"
            for name, x in record["lengths"][way].items()
        ]
        own = record["others"][way]
        lines.append(f"{way}: sources beyond a logger that are called so: {_percent(own['outside'])}")
        lines.append(f"{way}: recordings without a source that get a position: {_percent(own['none'])}")
    for name, rates in record["events"].items():
        for budget, x in rates.items():
            ends = "{:.2f} to {:.2f}".format(*x["interval"])
            lines.append(
                f"events, {name}, budget {budget}: {x['per_1000']:.2f} ({ends}) per 1,000 pair-nights, {x['k']} in {x['n']:,}"
            )
    for snr_db, x in record["power"].items():
        lines.append(
            f"leaks at {snr_db} dB that are an event within 7 nights: {_percent(x)}; nights with a delay {100 * x['nights']:.0f} %"
        )
    for name, x in record["clocks"].items():
        shares = ", ".join(f"{what} {100 * x[what]:.1f} %" for what in ("clock", "outside", "events"))
        lines.append(f"clocks, {name}: {shares}; intervals of events hold {_percent(x['covered'])}")
    for name, x in record["speeds"].items():
        lines.append(f"speed of a line, lengths wrong by 0.5 m, {name}: interval holds {_percent(x)}")
    lines.append(f"{record['cpu']['ms_per_pair']:.1f} ms CPU a pair of 10 s at 8 kHz")
    return "\n".join(lines)


if __name__ == "__main__":
    rehearsed = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    made = bench_pairs(sys.argv[1], part=rehearsed, log=lambda text: print(text, file=sys.stderr))
    print(pairs_table(made))
    print(other_pairs_table(made))
    print(made["goals"], f"{made['cpu_s']:.0f} s CPU")
    print(store(made, Path(sys.argv[1])))
