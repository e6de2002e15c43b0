"""Which loader gives most batches a second, on this machine and this data set."""

import os, time, warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TYPE_CHECKING

import numpy as np
from torch.utils.data import DataLoader

from leakmel.core.errors import UsageError
from leakmel.learn.data.loaders import open_loader
from leakmel.learn.data.segments import Segments
from leakmel.ops.bench import synthetic_set, record_head, rounds_text, run_leakmel


if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LoaderTrial:
    "One way to load."

    name: str
    settings: tuple[tuple[str, Any], ...]  # of `open_loader`; kind "workers": of a DataLoader of torch


def usual_trials() -> list[LoaderTrial]:
    "Device and stream, and 8 workers x 4 batches against 4 x 8, forked and spawned."
    pairs = [(w, p, how) for w, p in ((8, 4), (4, 8)) for how in ("fork", "spawn")]

    def workers(w: int, p: int, how: str) -> LoaderTrial:
        return LoaderTrial(
            f"{w} x {p}, {how}",
            (
                ("kind", "workers"),
                ("num_workers", w),
                ("prefetch_factor", p),
                ("multiprocessing_context", how),
                ("persistent_workers", True),
            ),
        )

    return [
        LoaderTrial("device", (("kind", "device"),)),
        LoaderTrial("stream", (("kind", "stream"),)),
        *(workers(*pair) for pair in pairs),
    ]


def _opened(ds: Segments, batch_size: int, device: str, settings: Mapping[str, Any]) -> Any:
    "Open a loader of leakmel, or a DataLoader of torch; a context manager."
    if settings["kind"] != "workers":
        return open_loader(ds, batch_size, device=device, progress="none", **settings)
    options = {name: value for name, value in settings.items() if name != "kind"}
    return nullcontext(DataLoader(ds, batch_size=batch_size, shuffle=True, **options))


def _timed(loader: Any, epochs: int) -> tuple[float, float, float, float]:
    "Seconds to the first batch and to the end of the first epoch; milliseconds a batch in the epochs after it, mean and longest."
    begin = time.perf_counter()
    marks = [time.perf_counter() for _ in range(epochs + 1) for _ in loader]
    waits = np.diff(marks)[len(loader) - 1 :] * 1000
    return marks[0] - begin, marks[len(loader) - 1] - begin, float(waits.mean()), float(waits.max())


def time_loaders(
    ds: Segments,  # opened with preload_to_ram=False, unless that is what is to be measured
    batch_size: int = 5632,  # items
    *,
    epochs: int = 2,  # to time in each trial, after the first one
    rounds: int = 3,
    trials: Sequence[LoaderTrial] | None = None,  # None: `usual_trials`
    device: str = "cpu",
) -> "pd.DataFrame":  # a row for each trial; rates are of the epochs after the first
    "Measure ways to load a data set: the loader alone, without training."
    import pandas as pd

    if epochs < 1 or rounds < 1:
        raise UsageError("epochs and rounds must be at least 1", found=(epochs, rounds))
    chosen = usual_trials() if trials is None else list(trials)
    found: dict[str, list[tuple[float, float, float, float]]] = {t.name: [] for t in chosen}
    for _ in range(rounds):
        for t in chosen:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "This DataLoader will create", UserWarning
                )  # more workers than cores: that is the question
                with _opened(ds, batch_size, device, dict(t.settings)) as loader:
                    found[t.name].append(_timed(loader, epochs))
    rows = []
    for name, results in found.items():
        first, epoch, wait, longest = np.array(results).T
        rows.append(
            {
                "loader": name,
                "batches_per_s": 1000 / np.median(wait),
                "slowest_round": 1000 / wait.max(),
                "fastest_round": 1000 / wait.min(),
                "mean_ms": np.median(wait),
                "longest_ms": longest.max(),
                "first_batch_s": np.median(first),
                "first_epoch_s": np.median(epoch),
                "epochs": epochs,
                "rounds": rounds,
            }
        )
    return pd.DataFrame(rows)


BATCH = 5632  # long segments, as trainings on a GPU take
_FORMS: Mapping[str, tuple[str, ...]] = {
    "contiguous": (),
    "gzip": ("--compression", "gzip"),
}  # of the data set, and the options of its build
_TOO_SLOW = {"gzip": "workers"}  # kinds that are left out: each batch of a worker unpacks the whole file
_COLUMNS = (
    "batches_per_s",
    "slowest_round",
    "fastest_round",
    "mean_ms",
    "longest_ms",
    "first_batch_s",
    "first_epoch_s",
)


def _measured(path: Path, form: str, rounds: int) -> dict[str, dict[str, float]]:
    "Figures of each way for one data set."
    from leakmel.learn.data.segments import Segments

    ways = [t for t in usual_trials() if dict(t.settings)["kind"] != _TOO_SLOW.get(form)]
    with Segments(path, level="long", preload_to_ram=False) as ds:
        found = time_loaders(ds, min(BATCH, len(ds)), rounds=rounds, trials=ways)
    return {
        str(row["loader"]): {name: float(row[name]) for name in _COLUMNS} for row in found.to_dict("records")
    }


def bench_loaders(
    folder: str | os.PathLike,  # work folder: the made set is kept there and used again
    *,
    n_files: int = 8000,  # recordings of the training split
    rounds: int = 3,  # counted rounds
    log: Callable[[str], None] = lambda text: None,  # told what is going on
) -> dict[str, Any]:  # the figures, as they are stored
    "Measure ways of loading, in turn, on a made set."
    if rounds < 1:
        raise UsageError("rounds must be at least 1", found=rounds)
    root, figures, right = synthetic_set(folder, n_files, log), {}, True
    for form, words in _FORMS.items():
        out = Path(folder) / "loaders" / form / "TRAINING_DATASET.H5"
        done = run_leakmel("build", str(root), "--split", "training", "--out", str(out), "--no-fsync", *words)
        right &= bool(done.body["verified"]["ok"])
        log(f"{form}: {rounds_text({'rounds': rounds})} of each way")
        for name, found in _measured(out, form, rounds).items():
            figures[f"{form}, {name}"] = found
            log(
                f"{form}: {name}: {found['batches_per_s']:,.1f} batches/s, the first one after {found['first_batch_s']:.2f} s"
            )
    return {
        **record_head("loaders"),
        "n_files": n_files,
        "rounds": rounds,
        "batch": BATCH,
        "interval": "two epochs after the first one, loader alone, page cache warm",
        "verified": {"all_ok": right},
        "figures": figures,
    }


def loaders_table(figures: dict[str, Any]) -> str:
    "Figures of the suite as a text table."
    lines = [
        f"{'loader':<28} {'batches/s':>10} {'range':>15} {'mean ms':>8} {'longest ms':>11} {'first batch s':>14}"
    ]
    for name, f in figures["figures"].items():
        lines.append(
            f"{name:<28} {f['batches_per_s']:>10,.1f} {f['slowest_round']:>7,.1f}-{f['fastest_round']:<7,.1f} {f['mean_ms']:>8.2f} "
            f"{f['longest_ms']:>11.1f} {f['first_batch_s']:>14.2f}"
        )
    m = figures["machine"]
    lines.append(
        f"W x P: W processes that read P batches ahead each; batches of {figures['batch']:,} long segments of {figures['n_files']:,} recordings,"
    )
    lines.append(f"{rounds_text(figures)}, {m['n_cores']} cores ({m['cpu']})")
    return "\n".join(lines)
