"""Detectors on public leak recordings, by cross-validation with groupings from random recordings to a held-out topology."""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import leakmel as lm
from leakmel.extras.machine.bench import record_head
from leakmel.extras.sets.fetch import SET_FILE, SETS, FetchedSet


@dataclass(frozen=True)
class Published:
    "A figure that others have published."

    set: str
    source: str
    task: str
    split: str
    result: str


_CNN = "PeterImoniose (CNN on log spectrogram, results/metrics.csv)"
_HYDROPHONE, _ACCELEROMETER = (
    "leak / no leak, hydrophone, 120 recordings",
    "leak / no leak, accelerometer, 80 recordings",
)
_LEVELS = "IchamRaison/leakless, 194 test clips in 41 clusters"
PUBLISHED = (
    Published("aghashahi", _CNN, _HYDROPHONE, "random windows", "BA 0.988 window, 1.000 recording"),
    Published(
        "aghashahi", _CNN, _HYDROPHONE, "held-out physical tests", "BA 0.747 / 0.781, AUC 0.776 / 0.855"
    ),
    Published("aghashahi", _CNN, _HYDROPHONE, "held-out flow condition", "BA 0.850 / 0.912"),
    Published("aghashahi", _CNN, _HYDROPHONE, "held-out topology", "BA 0.458 / 0.448"),
    Published(
        "aghashahi", _CNN, _ACCELEROMETER, "held-out tests; topology", "BA 0.804 / 0.898; 0.595 / 0.617"
    ),
    Published(
        "aghashahi",
        _CNN,
        "leak type (5), hydrophone",
        "random; tests; topology",
        "1.000; 0.617; 0.133 (recording)",
    ),
    Published(
        "aghashahi",
        "PeterImoniose (random forest)",
        "leak / no leak, hydrophone",
        "held-out tests; topology",
        "BA 0.703; 0.604 (recording)",
    ),
    Published(
        "aghashahi",
        "square-box-hash (wavelet + SVM)",
        "leak / no leak, accelerometer",
        "leave one experiment out",
        "accuracy 0.800, BA 0.734",
    ),
    Published(
        "aghashahi",
        "Leonzio et al., IEEE Access 2025 (complex CNN, hydrophone + accelerometer)",
        "detection and type",
        "not known here",
        "BA 0.99",
    ),
    Published(
        "aghashahi",
        "Donatoni et al. (mel spectrogram, DTW, boosting, fusion; 'a laboratory-based leak dataset')",
        "detection; type",
        "not known here",
        "accuracy 0.991; 0.984",
    ),
    Published(
        "aghashahi",
        "Martinez-Rios, 2024 (Morse scalogram, GoogLeNet)",
        "type, accelerometer",
        "test part; code of a sister study splits windows at random",
        "78.3 % looped, 76.3 % branched",
    ),
    Published("dongguan", _LEVELS, "leak / rest, level (RMS)", "groups apart", "AUC 0.88 clip, 0.84 cluster"),
    Published(
        "dongguan", _LEVELS, "leak / rest, amplitude shape", "groups apart", "AUC 0.90 clip, 0.93 cluster"
    ),
    Published(
        "dongguan", _LEVELS, "leak / rest, averaged spectrum", "groups apart", "AUC 0.71 clip, 0.78 cluster"
    ),
    Published(
        "dongguan",
        "Steven-Yang05/acoustic-leak-fingerprint (fine-tuned wav2vec 2.0), 200 clips",
        "leak / rest",
        "groups apart",
        "0.950 / 0.950 / 0.9676, read as accuracy, F1, AUC; 5 false alarms, 5 misses",
    ),
)


def _measure(found: FetchedSet, work: Path, detector: str) -> dict[str, Any]:
    "Build the data set of a public set, and cross-validate by all of its groupings."
    s = SETS[found.name]
    path = work / f"{s.name}.h5"
    manifest = lm.scan(found.recordings, table=found.table, progress="none")
    built = lm.build(found.recordings, out=path, manifest=manifest, spec=dict(s.spec), progress="none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = lm.generalisation(
            path,
            groups=s.groupings,
            out=work / s.name,
            kind="binary",
            settings=lm.TrainSettings(detector=detector),  # type: ignore[arg-type]
            progress="none",
        )
    return {
        "set": s.name,
        "doi": s.doi,
        "counts": found.facts["counts"],
        "differences": found.facts["differences"],
        "rows": built.rows,
        "verified": built.verified.ok,
        "groupings": made.to_dict()["generalisation"],
        "answer": made.answer["text"],
    }


def bench_public(
    folder: str | os.PathLike,  # work folder: data sets and finished fits are kept there and used again
    *,
    sources: str = "",  # folder with the folders that leakmel fetch made; sets that are not there are not measured
    names: Sequence[str] = tuple(SETS),
    detector: str = "auto",  # kind of detector
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Measure a detector and its baselines on public sets, with every grouping of each."
    work, found = Path(folder), []
    work.mkdir(parents=True, exist_ok=True)
    for name in names:
        place = Path(sources) / name
        if not (sources and (place / SET_FILE).is_file()):
            log(f"{name} is not in {sources or 'sources'}")
            continue
        log(name)
        fetched = lm.fetch(name, place)
        found.append(_measure(fetched, work, detector))
    ok = all(f["verified"] for f in found)
    return {**record_head("public-sets"), "detector": detector, "verified": {"all_ok": ok}, "sets": found}


def _figure(model: dict[str, Any], name: str) -> str:
    "Format a figure with its interval."
    f = model["figures"][name]
    if f["value"] is None:
        return str(f["note"])
    interval = "" if f["low"] is None else f" ({f['low']:.2f}-{f['high']:.2f})"
    return f"{f['value']:.3f}{interval}"


def _row_of(measured: dict[str, Any] | None, grouping: str) -> list[str]:
    "Cells of a grouping: groups, AUC and balanced accuracy of the detector, AUC of the level."
    rows = [] if measured is None else measured["groupings"]
    own = next((g for g in rows if grouping in (g["by"], *g["same_groups"])), None)
    if own is None:
        return ["", "not measured", "not measured", "not measured"]
    if own["left_out"] is not None:
        return [str(own["groups"]), own["left_out"]["reason"], "", ""]
    detector, level = own["models"]["detector"], own["models"]["level"]
    return [
        str(own["groups"]),
        _figure(detector, "auc"),
        _figure(detector, "balanced_accuracy"),
        _figure(level, "auc"),
    ]


def score_table(record: dict[str, Any] | None) -> str:
    "Scores of each set by its groupings, as a table in Markdown; what is not in the record reads not measured."
    measured = {} if record is None else {f["set"]: f for f in record["sets"]}
    lines = [
        "| set | held out | groups | AUC | balanced accuracy | AUC of the level alone |",
        "|---|---|---|---|---|---|",
    ]
    for name, s in SETS.items():
        for grouping in s.groupings:
            held = "random recordings" if grouping == "recording" else f"whole {grouping}"
            lines.append(f"| {' | '.join([name, held, *_row_of(measured.get(name), grouping)])} |")
    return "\n".join(lines)


def published_table() -> str:
    "Figures of others with their sources, as a table in Markdown."
    lines = ["| set | source | task | split | result |", "|---|---|---|---|---|"]
    lines += [f"| {p.set} | {p.source} | {p.task} | {p.split} | {p.result} |" for p in PUBLISHED]
    return "\n".join(lines)
