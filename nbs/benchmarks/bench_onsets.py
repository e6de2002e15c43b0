"""Nights until a leak is listed, by the night on which it begins, and false visits: drawn scores, this evidence and that of version 1.

Protocol, written before the first run of the record:

1. A network has 8, 16 or 50 sensors and 60 nights, one score a night and a sensor. Logits of normal nights: a
   mean of each sensor, normal(-1.5, 0.7); a standard deviation of each sensor, lognormal around 0.4 with 0.3;
   nights are independent. Each number of sensors and first night has its own seed; seeds from 10,000
   on had no part in any choice of a constant.
2. Leaks begin on night 1, 3, 6, 10 or 20 at one sensor of each network. A model that separates them well: the
   logit rises by 6 standard deviations of the nights of that sensor, and by 3.5 more at a leak from night 1,
   which has no quiet night (then above all other sensors). One that does not: by 1.5.
3. Budgets 0.2 (the default) and 1.0 false visits per 100 sensor-nights. A sensor is visited on the night on
   which it is listed; its evidence starts again after a visit without a leak. No detector with an evaluation:
   places without a leak of other networks take no part.
4. Measured: nights from the first night of the leak to the list (1: the first night), the share listed within
   20 nights, and the false visits per 100 normal sensor-nights with a 95 % interval over networks
   (bootstrap), for 100 networks in each cell.
5. Normal nights of other kinds, 100 networks of 50 sensors without leaks: heavy tails (t with 4 degrees of
   freedom), taps (one night in 20 higher by 3 standard deviations), skew (exponential), seasons (a sine of
   one standard deviation and 365 nights, common to all sensors).
6. Right if, for each kind of nights and each cell, the interval of the realised rate lies under the budget or
   contains it, and if a leak that the model separates well and that begins on night 3 or later is listed
   within 20 nights in at least 95 % of the networks at the default budget, and within the stated number of
   nights (`nights.nights_to_list`) plus 3 in at least 80 %.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from leakmel.extras.machine.bench import record_head
from leakmel.extras.nightly.nights import (
    MIN_NIGHTS,
    Budget,
    Evidence,
    first_listing,
    highest_from_start,
    nights_to_list,
)

SIZES = (8, 16, 50)  # sensors
STARTS = (1, 3, 6, 10, 20)  # first night of the leak
RISES = {"well": 6.0, "badly": 1.5}  # how the model separates leaks -> standard deviations
FROM_NIGHT_1 = 3.5  # more, for a leak that has no quiet night and is separated well
BUDGETS = (0.2, 1.0)
KINDS = ("normal", "heavy tails", "taps", "skew", "seasons")  # of nights without a leak
N_NIGHTS = 60
FIRST_SEED = 10_000
WITHIN = 20  # nights
NEVER = 10_000


class EvidenceOfVersion1:
    "The evidence until November 2026: a night against all nights before it, which the leak itself enters."

    def __init__(self, n_sensors: int):
        self.n, self.mean, self.m2 = np.zeros((3, n_sensors))
        self.r = np.zeros((3, n_sensors))
        self.nights = np.empty((n_sensors, 0))  # all are in the mean

    @property
    def value(self) -> np.ndarray:
        return self.r.mean(axis=0)

    def add(self, x: np.ndarray) -> np.ndarray:
        "Add a night; returns its p-values, NaN where it was not compared."
        from scipy.special import stdtr

        here = np.isfinite(x)
        compared = here & (self.n >= MIN_NIGHTS)
        p = np.full(len(x), np.nan)
        n = self.n[compared]
        sd = np.maximum(np.sqrt(self.m2[compared] / np.maximum(n - 1, 1)), 0.05)
        t = (x[compared] - self.mean[compared]) / (sd * np.sqrt(1 + 1 / np.maximum(n, 1)))
        p[compared] = stdtr(n - 1, -t)
        e = np.stack([b * np.maximum(p[compared], 0.005) ** (b - 1) for b in (0.1, 0.3, 0.6)])
        self.r[:, compared] = np.minimum((1 + self.r[:, compared]) * e, 1e12)
        self.n = self.n + here
        delta = np.where(here, x, self.mean) - self.mean
        self.mean = self.mean + delta / np.maximum(self.n, 1)
        self.m2 = self.m2 + delta * (np.where(here, x, self.mean) - self.mean)
        return p


def draw_nights(
    rng: np.random.Generator, kind: str, n_networks: int, n_sensors: int
) -> tuple[np.ndarray, np.ndarray]:
    "Draw logits [nights, networks, sensors] without a leak, and the standard deviation of each sensor."
    mean = rng.normal(-1.5, 0.7, (n_networks, n_sensors))
    sd = np.exp(rng.normal(np.log(0.4), 0.3, mean.shape))
    size = (N_NIGHTS, *mean.shape)
    if kind == "heavy tails":
        noise = rng.standard_t(4, size) / np.sqrt(2)
    elif kind == "skew":
        noise = rng.exponential(size=size) - 1
    else:
        noise = rng.normal(size=size)
    if kind == "taps":
        noise = noise + 3 * (rng.random(size) < 0.05)
    if kind == "seasons":
        noise = noise + np.sin(2 * np.pi * np.arange(N_NIGHTS) / 365)[:, None, None]
    return mean + sd * noise, sd


def visit(
    nights: np.ndarray, start: int, budget: Budget, *, old: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Visit what is listed, night by night; the leak is at sensor 0 from `start` on (0: no leak), and a sensor whose leak is found is repaired and leaves.

    Returns false visits [networks] because of evidence, those that were high from the start, and nights until the leak was listed [networks].
    """
    _, n_networks, n_sensors = nights.shape
    kind = EvidenceOfVersion1 if old else Evidence
    evidence = kind(n_networks * n_sensors)
    limit = 100 / budget.per_100_nights if old else budget.limit
    false, false_start = np.zeros((2, n_networks))
    found = np.full(n_networks, NEVER)
    first = np.median(nights[:MIN_NIGHTS], axis=0)
    was_listed = np.zeros((n_networks, n_sensors), bool)
    here = np.ones((n_networks, n_sensors), bool)
    for k, night in enumerate(nights, 1):
        evidence.add(np.where(here, night, np.nan).ravel())
        above = (evidence.value >= limit).reshape(here.shape) & here
        high = np.zeros_like(above)
        for network in range(n_networks if k >= MIN_NIGHTS and not old else 0):
            levels = {str(s): x for s, x in enumerate(first[network].tolist())}
            for name in highest_from_start(levels, dict.fromkeys(levels, k), budget):
                s = int(name)
                high[network, s] = here[network, s] and not was_listed[network, s]
        was_listed |= high
        is_leak = np.zeros_like(above)
        is_leak[:, 0] = 0 < start <= k
        false += (above & ~is_leak).sum(1)
        false_start += (high & ~above & ~is_leak).sum(1)
        hit = ((above | high) & is_leak)[:, 0] & (found == NEVER)
        found[hit] = k - start + 1
        here[hit, 0] = False
        again = (above | high).ravel()
        for name in ("n", "mean", "m2"):
            getattr(evidence, name)[again] = 0
        evidence.nights[again] = np.nan
        evidence.r[:, again] = 0
    return false, false_start, found


def rate_figures(false: np.ndarray, nights: float) -> dict[str, Any]:
    "Return the false visits per 100 sensor-nights of networks, with a bootstrap interval; `nights` are those of a network."
    rng = np.random.default_rng(0)
    draws = false[rng.integers(0, len(false), (2000, len(false)))].mean(1)
    low, high = (100 * np.quantile(draws, (0.025, 0.975)) / nights).tolist()
    return {"false_per_100": float(100 * false.mean() / nights), "interval": [low, high]}


def cell(
    kind: str, n_sensors: int, start: int, separates: str, per_100: float, networks: int, *, old: bool
) -> dict[str, Any]:
    "Measure a cell of the protocol."
    rng = np.random.default_rng([FIRST_SEED, KINDS.index(kind), n_sensors, start])
    nights, sd = draw_nights(rng, kind, networks, n_sensors)
    size = RISES.get(separates, 0.0) + FROM_NIGHT_1 * (separates == "well" and start == 1)
    if start:
        nights[start - 1 :, :, 0] += size * sd[:, 0]
    false, false_start, found = visit(nights, start, Budget(per_100), old=old)
    n_normal = N_NIGHTS * n_sensors - (N_NIGHTS - start + 1 if start else 0)
    row = {"kind": kind, "sensors": n_sensors, "start": start, "separates": separates, "budget": per_100}
    row |= {"evidence": 1 if old else 2, **rate_figures(false + false_start, n_normal)}
    row["from_start_per_100"] = float(100 * false_start.mean() / n_normal)
    if start:
        median = float(np.quantile(found, 0.5, method="inverted_cdf"))
        stated = int(nights_to_list(Budget(per_100))[start - 2]) if start > 1 else 0
        row |= {
            "median_nights": None if median >= NEVER else median,
            "within_20": float((found <= WITHIN).mean()),
            "within_stated": float((found <= stated + 3).mean()) if start > 1 else None,
            "stated": stated,
            "listed": float((found < NEVER).mean()),
        }
    return row


def bench_onsets(
    folder: str | os.PathLike,  # not used: the protocol needs no recordings
    *,
    networks: int = 100,  # in each cell
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Run the protocol."
    rows = []
    for per_100 in BUDGETS:
        for old in (False, True):
            for n_sensors in SIZES:
                log(f"budget {per_100:g}, {n_sensors} sensors, evidence {1 if old else 2}")
                for start in STARTS:
                    for separates in RISES:
                        given = ("normal", n_sensors, start, separates, per_100, networks)
                        rows.append(cell(*given, old=old))
            rows += [cell(kind, 50, 0, "", per_100, networks, old=old) for kind in KINDS]
    own = [r for r in rows if r["evidence"] == 2]
    clear = [
        r
        for r in own
        if r["separates"] == "well" and r["start"] >= 3 and r["budget"] == Budget().per_100_nights
    ]
    checks = {
        "false_visits": all(r["interval"][0] <= r["budget"] for r in own),
        "within_20": all(r["within_20"] >= 0.95 for r in clear),
        "within_stated": all(r["within_stated"] >= 0.8 for r in clear),
    }
    return {
        **record_head("onsets"),
        "verified": {"all_ok": all(checks.values()), **checks},
        "networks": networks,
        "nights": N_NIGHTS,
        "first_listing": {f"{b:g}": first_listing(Budget(b)) for b in BUDGETS},
        "rows": rows,
    }


def onsets_table(record: dict[str, Any]) -> str:
    "Nights until a leak is listed and false visits, as a text table."
    lines = [
        f"{'budget':>6s} {'sensors':>7s} {'leak from':>9s} {'separated':>9s} | evidence 1, 2: median nights, listed within 20 | false visits per 100"
    ]

    def shown(r: dict[str, Any]) -> tuple[str, str]:
        nights = "never" if r.get("median_nights") is None else f"{r['median_nights']:.0f}"
        low, high = r["interval"]
        rate = f"{r['false_per_100']:.2f} ({low:.2f} to {high:.2f})"
        return f"{nights} ({100 * r['within_20']:.0f} %)" if r["start"] else "", rate

    keys = ("budget", "kind", "sensors", "start", "separates")
    by_key: dict[tuple, dict[int, dict[str, Any]]] = {}
    for r in record["rows"]:
        by_key.setdefault(tuple(r[k] for k in keys), {})[r["evidence"]] = r
    for (budget, kind, sensors, start, separates), found in by_key.items():
        (old, old_rate), (new, new_rate) = (shown(found[k]) for k in (1, 2))
        where = f"night {start}" if start else kind
        lines.append(
            f"{budget:>6g} {sensors:>7d} {where:>11s} {separates:>7s} | {old:>14s} {new:>14s} | {old_rate:>20s} {new_rate:>20s}"
        )
    return "\n".join(lines)
