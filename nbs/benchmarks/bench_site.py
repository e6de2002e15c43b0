"""A detector of the site, learned from visits, in place of the score in use; and the budget on many networks.

Protocol, written before the first run of the record:

1. Networks of the five kinds of noise of `bench_without_model`, 50 sensors and 365 nights, one recording a
   sensor and a night; no logger fails. At each sensor a leak begins after 20 nights and an exponential time
   of 250 nights on average, and each next one after 60 nights and such a time more; frequencies and levels
   are those of `bench_nightly`. In each quarter of the year a pump runs for three weeks at 10 % of the
   sensors, at 30 % in networks of the kind "pumps".
2. Scores in use: "without" compares steady levels without a model; "elsewhere" is a spectral detector that
   was trained on 60 recordings of another network, the case of a detector that hears little on a new site.
   The list is that of `nights.Evidence`, at the default budget, without the rule for sensors that are high
   from the start.
3. A listed sensor is visited in the same night, and every fourth night from night 20 on one other sensor, at
   random. One outcome in ten is wrong. A leak that was found is repaired; the evidence of a visited sensor
   begins again. After 60 visits the labels are those that `nights.recordings_of_visit` would give.
4. Two detectors of the site are fitted on them: "levels", the logistic regression of `run.site_outlook` on
   the levels that a history stores, and "spectral", logistic regression and trees on the features of
   recordings of a spectral detector, one to two (without its trees on windows, which take ten times as
   long). The rule: a detector of the site is shown to be better if its AUC, out-of-fold by sensor, exceeds
   that of the score in use on the same recordings by an interval (bootstrap over sensors, paired) that lies
   above 0, with at least 10 visited sensors with a leak and 10 without one.
5. From there on the same network is followed in three ways, whatever the rule says, without random visits:
   by the score in use, and by the scores of each detector of the site. Their evidence begins at 0 and
   compares with the nights of the sensor since its last visit, so the budget holds for both parts together.
6. Measured over the leaks that begin after the 60th visit, and all normal nights after it: the share listed
   within 3, 7, 14 and 30 nights, false visits per 100 sensor-nights, in how many networks the rule shows a
   detector to be better, and the AUCs. Seeds from 8,000 on. A pilot with seed 700 of each kind chose the
   features of "spectral" and no constant of the rule.
7. Goals: with the rule, false visits at most half of those of the score in use, and within 7 nights at least
   95 % of its share of leaks; without the rule the same, which says what a better rule could reach.
8. The budget: 100 networks, 20 of each kind, of 20 sensors and 120 nights, seeds from 9,000 on, visited as
   in 3 with true outcomes and no random visits, with both scores in use. By network, the interval of Garwood
   of the false visits contains the budget or lies below it in at least 93.
"""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_nightly import PUMP_NIGHTS, SensorPlan, plan_sensor, train_detector
from bench_without_model import KINDS, PUMP_SHARE, recorded

from leakmel.detector.data.segments import cut_into_rows
from leakmel.detector.metrics.significance import Bootstrap, differences, encode_groups, score_model
from leakmel.detector.model.detector import Detector, required_spec
from leakmel.detector.model.spectral import (
    REGULARISATION,
    fit_logistic,
    fit_trees,
    logistic_regression,
    segment_statistics,
    window_features,
)
from leakmel.detector.train.folds import make_folds
from leakmel.extras.machine.bench import record_head
from leakmel.extras.nightly.nights import (
    RECENT_NIGHTS,
    WINDOW,
    Budget,
    Evidence,
    above_hum,
    compared_scores,
    levels_of,
    night_logit,
    start_of_rise,
)
from leakmel.mel.engines import Engine, open_engine
from leakmel.recordings.demo import stream

WAYS = {"without": "without a model", "elsewhere": "detector of another network"}
SITES = {
    "in use": "score in use",
    "levels": "detector of the site on levels",
    "spectral": "spectral detector of the site",
}
FIRST_SEED = 8_000
BUDGET_SEED = 9_000
N_FILES = 60  # recordings of the network of the detector of another network
N_VISITS = 60
WRONG = 0.1  # share of the outcomes
LEAST_SENSORS = 10  # with a leak, and without one
WITHIN = (3, 7, 14, 30)  # nights
NEVER = 10_000
_CLEAR = 10.0  # factor of a rise from which on a leak labels nights, as in `nights.recordings_of_visit`

Scorer = Callable[[np.ndarray], np.ndarray]  # features [S, F] -> scores [S]


@dataclass(frozen=True, eq=False)
class NightOfNetwork:
    "What is measured of a night, of each sensor."

    floor: np.ndarray  # [S] dB
    steady: np.ndarray  # [S, 12] dB
    mean: np.ndarray  # [S, 8] dB
    features: np.ndarray  # [S, F] of a spectral detector
    elsewhere: np.ndarray  # [S] score of the detector of another network

    def given(self, way: str, site: str) -> np.ndarray:  # [S, F]
        "Return what a detector of the site learns from."
        levels = self.steady if way == "without" else self.mean
        return np.column_stack([self.floor, levels]) if site == "levels" else self.features


class Network:
    "Recordings of a network, measured when they are first used."

    def __init__(self, kind: str, seed: int, sensors: int, nights: int, detector: Detector, engine: Engine):
        self.kind, self.seed = kind, seed
        self.detector, self.engine = detector, engine
        self.n_sensors, self.n_nights = sensors, nights
        rng = stream(seed, 21)
        share = PUMP_SHARE if kind == "pumps" else 0.1
        self.leaks: list[list[SensorPlan]] = []  # of each sensor, one after the other
        self.pumps: list[list[int]] = []
        for s in range(sensors):
            plan = replace(plan_sensor(s, seed, 365), fails_from=NEVER, failure="", pump_from=NEVER)
            begins = 20 + np.cumsum(rng.exponential(250, 20) + 60 * (np.arange(20) > 0))
            draws = [
                plan_sensor(s, seed + 10_000 * k, 365) for k in range(1, int((begins < nights).sum()) + 2)
            ]
            starts = [*begins[: len(draws) - 1].astype(int).tolist(), NEVER]
            self.leaks.append(
                [
                    replace(plan, leak_from=at, leak=d.leak, leak_db=d.leak_db)
                    for at, d in zip(starts, draws, strict=True)
                ]
            )
            quarters = [at + rng.integers(0, 90 - PUMP_NIGHTS) for at in range(0, nights, 90)]
            self.pumps.append([int(at) for at in quarters if rng.random() < share])
        shared = stream(seed, 10)
        season = 3 * np.sin(2 * np.pi * (np.arange(nights) / 365 + shared.random()))
        self.flow = (season + shared.normal(0, 1, nights)) * (kind == "seasons")
        rains = (shared.random(nights) < 1 / 12) & (kind == "rain")
        self.rain = np.where(rains, shared.normal(-10, 3, nights), -np.inf)
        self.known: dict[tuple[int, int, int], tuple[Any, ...]] = {}

    def _recorded(self, s: int, night: int, leak: int) -> np.ndarray:  # [L, S, M, T] dB
        "Record a night of a sensor whose first leaks are repaired, and compute its spectrogram."
        pump = max((at for at in self.pumps[s] if at <= night), default=-NEVER)
        plan = replace(self.leaks[s][leak], pump_from=pump)
        rng = stream(self.seed, 8, s, night)
        samples = recorded(self.kind, plan, night, rng, float(self.flow[night]), float(self.rain[night]))
        if samples is None:
            raise RuntimeError("no logger fails in these networks")
        spec = required_spec(self.detector)
        rows, counts = cut_into_rows(samples, spec)
        mels = np.empty((len(rows), *spec.row_shape), np.float16)
        self.engine.run(rows, mels)
        return mels[np.arange(spec.row_shape[0]) < counts[:, None]]

    def night(self, night: int, leaks: Sequence[int]) -> NightOfNetwork:
        "Measure a night; `leaks` is the number of repaired leaks of each sensor."
        keys = [(s, night, leak) for s, leak in enumerate(leaks)]
        new = [key for key in keys if key not in self.known]
        if new:
            mels = [self._recorded(s, night, leak) for s, _, leak in new]
            rows = torch.from_numpy(np.stack(mels))
            own, _ = window_features(*segment_statistics(rows), torch.ones(rows.shape[:2], dtype=torch.bool))
            segments = self.detector.segment_scores(rows).numpy()
            scores = self.detector.recording_scores(segments)
            for key, x, features, score in zip(new, mels, own[:, 0].numpy(), scores, strict=True):
                floor, steady = levels_of(x, steady=True)
                levels = np.round(floor, 1), np.round(steady, 1), np.round(levels_of(x)[1], 1)
                self.known[key] = (*levels, features, float(score))
        return NightOfNetwork(*map(np.array, zip(*(self.known[key] for key in keys), strict=True)))


@dataclass(frozen=True)
class VisitMade:
    "A visit of the simulation."

    night: int
    sensor: int
    leak: int  # number of the leak; -1: none
    says_leak: bool
    is_asked: bool


@dataclass(eq=False)
class Listing:
    "The list of a network, night by night."

    network: Network
    way: str  # of WAYS
    wrong: float = WRONG
    site: str = "in use"  # of SITES
    scorer: Scorer | None = None  # of the detector of the site
    nights: list[NightOfNetwork] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)  # in use, [S] of each night
    visits: list[VisitMade] = field(default_factory=list)
    labels: list[tuple[int, int, bool]] = field(default_factory=list)  # sensor, night, says leak

    def __post_init__(self) -> None:
        n = self.network.n_sensors
        self.repaired = [0] * n
        self.last = np.full(n, -1)
        self.evidence = Evidence(n, 1 if self.way == "elsewhere" else 9)

    def compared(self, night: int) -> np.ndarray:  # [S, V]
        "Return what the evidence compares of a night."
        x = self.nights[night]
        if self.scorer is not None:
            return night_logit(self.scorer(x.given(self.way, self.site)))[:, None]
        return night_logit(x.elsewhere)[:, None] if self.way == "elsewhere" else above_hum(x.steady / 10)

    def advance(self, *, audits: bool) -> None:
        "Add a night, and visit what is listed."
        night = len(self.nights)
        self.nights.append(self.network.night(night, self.repaired))
        bels = self.nights[-1].steady / 10
        in_use = self.nights[-1].elsewhere if self.way == "elsewhere" else compared_scores(bels, bels)
        self.scores.append(in_use)
        values = self.compared(night)
        self.evidence.add(values[:, 0], values if values.shape[1] > 1 else None)
        listed = np.flatnonzero(self.evidence.value >= Budget().limit).tolist()
        for s in listed:
            self._visit(s, night, is_asked=True)
        if audits and night >= 20 and night % 4 == 0:
            free = sorted({*range(len(self.last))} - {*listed})
            self._visit(int(stream(self.network.seed, 34, night).choice(free)), night, is_asked=False)

    def _visit(self, s: int, night: int, *, is_asked: bool) -> None:
        "Visit a sensor: its evidence begins again, and its nights get labels."
        k = self.repaired[s]
        is_leak = self.network.leaks[s][k].leak_from <= night
        says_leak = is_leak != (stream(self.network.seed, 35, s, night).random() < self.wrong)
        self.visits.append(VisitMade(night, s, k if is_leak else -1, says_leak, is_asked))
        own = range(max(int(self.last[s]) + 1, night + 1 - WINDOW), night + 1)
        first = 0
        if says_leak:
            self.repaired[s] += is_leak
            values = np.array([self.compared(i)[s] for i in own])
            rise = start_of_rise(values, _CLEAR) if len(own) > 1 else 0
            first = rise or max(0, len(own) - RECENT_NIGHTS)
        self.labels += [(s, i, says_leak) for i in own[first:]]
        self.last[s] = night
        self.evidence.n[s] = 0
        self.evidence.nights[s] = np.nan
        self.evidence.r[:, s] = 0

    def switched(self, site: str, scorer: Scorer | None) -> "Listing":
        "Return a copy that goes on with the scores of a detector of the site; None: with those in use."
        other = copy.copy(self)
        for name in ("nights", "scores", "visits", "labels", "repaired", "last"):
            setattr(other, name, copy.copy(getattr(self, name)))
        other.evidence = copy.deepcopy(self.evidence)
        if scorer is None:
            return other
        other.site, other.scorer = site, scorer
        other.evidence = Evidence(self.network.n_sensors, 1)
        now = len(self.nights)
        compared = np.array([other.compared(i) for i in range(max(0, now - WINDOW), now)])
        for s, last in enumerate(self.last.tolist()):
            own = compared[max(0, last + 1 - now + len(compared)) :, s]
            other.evidence.nights[s, :, WINDOW - len(own) :] = own.T
            other.evidence.n[s] = len(own)
        return other


def _fit(site: str, x: np.ndarray, y: np.ndarray) -> Scorer:
    "Fit a detector of the site on features [n, F] and outcomes [n]."
    if site == "levels":
        line = fit_logistic(x, y)
        return lambda z: line.predict_proba(z)[:, 1]
    linear = logistic_regression(C=REGULARISATION, max_iter=5000).fit(x, y)
    trees = fit_trees(x, y.astype(int), n_threads=1)
    return lambda z: (linear.predict_proba(z)[:, 1] + 2 * trees.predict_proba(z)[:, 1]) / 3


def learned(found: Listing, site: str) -> tuple[Scorer, dict[str, Any]]:
    "Fit a detector of the site on all labels; return also what the rule of the protocol says of it."
    sensors, at, outcome = (np.array(x) for x in zip(*found.labels, strict=True))
    y = outcome.astype(bool)
    x = np.array(
        [
            found.nights[i].given(found.way, site)[s]
            for s, i in zip(sensors.tolist(), at.tolist(), strict=True)
        ]
    )
    groups = encode_groups("sensor", sensors.astype(str))
    fold = make_folds(y.astype(int), groups.code, 5)
    score = np.empty(len(y))
    for k in np.unique(fold):
        score[fold == k] = _fit(site, x[fold != k], y[fold != k])(x[fold == k])
    in_use = np.array([found.scores[i][s] for s, i in zip(sensors.tolist(), at.tolist(), strict=True)])
    boot = Bootstrap(y, groups, n_draws=1000)
    own, used = (score_model(boot, v, name="", title="") for v in (score, in_use))
    difference = differences(boot, own, used)["auc"]
    fewest = min(len(np.unique(sensors[y])), len(np.unique(sensors[~y])))
    return _fit(site, x, y), {
        "auc": own.figures["auc"],
        "auc_in_use": used.figures["auc"],
        "difference": [difference.value, difference.interval.low, difference.interval.high],
        "fewest_sensors": fewest,
        "is_shown": bool(difference.is_better and fewest >= LEAST_SENSORS),
    }


def followed(found: Listing, since: int) -> dict[str, Any]:
    "Return false visits, normal sensor-nights and delays of leaks of a list from a night on."
    network = found.network
    delays, leak_nights = list[int](), 0
    for s, leaks in enumerate(network.leaks):
        at = {v.leak: v.night for v in found.visits if v.sensor == s and v.leak >= 0 and v.says_leak}
        first = {v.leak: v.night for v in reversed(found.visits) if v.sensor == s and v.leak >= 0}
        for k, plan in enumerate(leaks[:-1]):
            ends = at.get(k, network.n_nights - 1)
            leak_nights += max(0, ends - max(plan.leak_from, since) + 1)
            if plan.leak_from >= since:
                delays.append(first[k] - plan.leak_from + 1 if k in first else NEVER)
    false = sum(v.night >= since and v.leak < 0 and v.is_asked for v in found.visits)
    nights = network.n_sensors * (network.n_nights - since)
    return {"false": false, "nights": max(1, nights - leak_nights), "delays": delays}


def measure_network(network: Network, way: str) -> dict[str, Any]:
    "Visit a network, learn from the outcomes, and follow it in three ways."
    found = Listing(network, way)
    while len(found.visits) < N_VISITS and len(found.nights) < network.n_nights:
        found.advance(audits=True)
    since = len(found.nights)
    row: dict[str, Any] = {
        "kind": network.kind,
        "seed": network.seed,
        "switch_night": since,
        "leaks_found": sum(v.leak >= 0 for v in found.visits),
        "rule": {},
    }
    for site in SITES:
        scorer = None
        if site != "in use":
            scorer, row["rule"][site] = learned(found, site)
        other = found.switched(site, scorer)
        while len(other.nights) < network.n_nights:
            other.advance(audits=False)
        row[site] = followed(other, since)
    return row


def _rate(false: int, nights: int) -> list[float]:
    "Return false visits per 100 sensor-nights with the interval of Garwood."
    from scipy.special import gammaincinv

    low = float(gammaincinv(false, 0.025)) if false else 0.0
    return [100 * x / nights for x in (false, low, float(gammaincinv(false + 1, 0.975)))]


def figures_of(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    "Join what `followed` returns of some networks."
    false, nights = (sum(p[name] for p in parts) for name in ("false", "nights"))
    delays = np.array([d for p in parts for d in p["delays"]])
    within_budget = [_rate(p["false"], p["nights"])[1] <= Budget().per_100_nights for p in parts]
    return {
        "false": false,
        "nights": nights,
        "false_per_100": _rate(false, nights),
        "leaks": len(delays),
        "within": {str(n): float((delays <= n).mean()) for n in WITHIN},
        "networks_within_budget": sum(within_budget),
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    "Return the figures of all networks of a way: by site, and as the rule decides."
    found: dict[str, Any] = {site: figures_of([r[site] for r in rows]) for site in SITES}
    for site in ("levels", "spectral"):
        shown = [r["rule"][site]["is_shown"] for r in rows]
        chosen = [r[site if is_shown else "in use"] for r, is_shown in zip(rows, shown, strict=True)]
        found[f"{site}, by the rule"] = figures_of(chosen)
        found[f"{site}, shown"] = sum(shown)
    return found


def _is_reached(ours: dict[str, Any], in_use: dict[str, Any]) -> bool:
    return ours["false"] <= in_use["false"] / 2 and ours["within"]["7"] >= 0.95 * in_use["within"]["7"]


def bench_site(
    folder: str | os.PathLike,  # work folder: the detector stays there
    *,
    networks: int = 3,  # of each kind
    sensors: int = 50,  # of a network
    nights: int = 365,
    budget_networks: int = 20,  # of each kind
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Run the protocol."
    head = record_head("site")
    work = Path(folder) / "elsewhere"
    work.mkdir(parents=True, exist_ok=True)
    detector = train_detector(work, N_FILES, log)
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    kept: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with open_engine("auto", required_spec(detector), device="cpu") as engine:
        for k in range(networks * len(KINDS)):
            kind = KINDS[k % len(KINDS)]
            network = Network(kind, FIRST_SEED + k, sensors, nights, detector, engine)
            for way, found in rows.items():
                log(f"network {k + 1} of {networks * len(KINDS)}: {kind}, {WAYS[way]}")
                found.append(measure_network(network, way))
        for k in range(budget_networks * len(KINDS)):
            log(f"budget: network {k + 1} of {budget_networks * len(KINDS)}")
            network = Network(KINDS[k % len(KINDS)], BUDGET_SEED + k, 20, 120, detector, engine)
            for way, found in kept.items():
                listing = Listing(network, way, wrong=0.0)
                while len(listing.nights) < network.n_nights:
                    listing.advance(audits=False)
                found.append({"kind": network.kind} | followed(listing, 0))
    summary = {way: _summary(found) for way, found in rows.items()}
    pairs = [
        (s[site], s[f"{site}, by the rule"], s["in use"])
        for s in summary.values()
        for site in ("levels", "spectral")
    ]
    same = all(len({s[site]["leaks"] for site in SITES}) == 1 for s in summary.values())
    budgets = {way: figures_of(found) for way, found in kept.items()}
    n = budget_networks * len(KINDS)
    return {
        **head,
        "verified": {"all_ok": same},
        "goals": {
            "halved_by_the_rule": any(_is_reached(by_rule, in_use) for _, by_rule, in_use in pairs),
            "halved_without_the_rule": any(_is_reached(own, in_use) for own, _, in_use in pairs),
            "budget_by_network": all(b["networks_within_budget"] >= 0.93 * n for b in budgets.values()),
        },
        "networks": networks * len(KINDS),
        "sensors": sensors,
        "nights": nights,
        "detector": [str(e) for e in detector.evaluations],
        "rows": rows,
        "summary": summary,
        "budget_networks": n,
        "budget": budgets,
    }


def site_table(record: dict[str, Any]) -> str:
    "Leaks, false visits and what the rule says as a text table."
    names = (
        "score in use",
        "followed by",
        "shown better",
        "leaks",
        "in 7 nights",
        "in 30",
        "false visits per 100",
    )
    widths = (28, 32, 12, 5, 11, 6, 24)
    lines = [" ".join(f"{name:>{w}s}" for name, w in zip(names, widths, strict=True))]
    n = record["networks"]
    for way, found in record["summary"].items():
        for site, name in SITES.items():
            r = found[site]
            shown = "" if site == "in use" else f"{found[f'{site}, shown']} of {n}"
            rate = "{:.3f} ({:.3f} to {:.3f})".format(*r["false_per_100"])
            within = [f"{100 * r['within'][nights]:.0f} %" for nights in ("7", "30")]
            cells = (WAYS[way], name, shown, str(r["leaks"]), *within, rate)
            lines.append(" ".join(f"{cell:>{w}s}" for cell, w in zip(cells, widths, strict=True)))
    for way, r in record["budget"].items():
        rate = "{:.3f} ({:.3f} to {:.3f})".format(*r["false_per_100"])
        lines.append(
            f"{WAYS[way]}: budget of {Budget().per_100_nights:g} kept in {r['networks_within_budget']} of "
            f"{record['budget_networks']} networks; {rate} false visits per 100 sensor-nights"
        )
    missed = [name.replace("_", " ") for name, is_met in record["goals"].items() if not is_met]
    lines.append(f"goals that are not met: {', '.join(missed) or 'none'}")
    return "\n".join(lines)
