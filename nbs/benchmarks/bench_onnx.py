"""ONNX files of each kind of detector: size, differences from `predict`, and processor time of a recording."""

import csv
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import leakmel as lm
from leakmel.detector.model.detector import load_detector, required_spec
from leakmel.extras.machine.bench import record_head, spread

KINDS = ("spectral", "cnn", "blend")
# and what the tables call it; earlier records have files with 8-bit integers
FORMS = {"float": "float32", "int8": "int8"}


def _demo(folder: Path, n_files: int) -> tuple[Path, list[Path]]:
    "Write a synthetic network; return its folder, and the data sets of training and validation."
    root = folder / "synthetic"
    lm.write_demo(root, n_files=n_files, seed=1)
    done = lm.build_all(root, out_dir=folder / "mels", progress="none", check=0)
    return root, [r.path for name in ("TRAINING", "VALIDATION") for r in done if r.split == name]


def _real(folder: Path, recordings: Path) -> tuple[Path, list[Path]]:
    "Copy recordings under plain names, and build every second one of each label: clips of one recording count as different ones."
    root, rows = folder / "real", []
    for label in sorted(p for p in recordings.iterdir() if p.is_dir()):
        (root / label.name).mkdir(parents=True)
        for k, path in enumerate(sorted(label.rglob("*.wav"))):
            name = f"{label.name}/{label.name}x{k}.wav"
            shutil.copyfile(path, root / name)
            if k % 2 == 0:
                rows.append((name, label.name, f"{label.name}x{k}"))
    table, out = folder / "real.csv", folder / "real.h5"
    with table.open("w", newline="") as f:
        csv.writer(f).writerows([("path", "label", "sensor"), *rows])
    chosen = lm.scan(root, table=table, progress="none")
    return root, [lm.build(root, out=out, manifest=chosen, progress="none", check=0).path]


def _export(model: Path, root: Path, most: int) -> tuple[dict[str, Any], dict[str, Path]]:
    "Export a detector; return the figures and the file."
    out = model / "float.onnx"
    done = lm.export_onnx(model, out, recordings=root, most=most, progress="none")
    return {"float": {"n_bytes": done.n_bytes, **asdict(done.check)}}, {"float": out}


def _begin(core: int) -> None:
    "Let a process use one core and one thread."
    os.sched_setaffinity(0, {core})
    import torch

    torch.set_num_threads(1)


def time_scoring(
    model: Path, files: dict[str, Path], root: Path, rounds: int
) -> dict[str, dict[str, float]]:  # of a recording, seconds of a processor core
    "Measure `predict` on a folder and ONNX Runtime on its files one by one, in turn; reading is included, and the start is not."
    import onnxruntime
    import soundfile

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    detector = load_detector(model / "model.pt")
    n_samples = required_spec(detector).n_samples
    sessions = {
        form: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for form, path in files.items()
    }
    paths = sorted(p for p in root.rglob("*") if p.suffix.lower() == ".wav")
    taken: dict[str, list[float]] = {name: [] for name in ("predict", *files)}
    for i in range(-1, rounds):
        for name, kept in taken.items():
            began = time.process_time()
            if name == "predict":
                lm.predict(root, detector, length="spec", device="cpu", progress="none")
            else:
                for path in paths:
                    samples, _ = soundfile.read(path, dtype="float32")
                    sessions[name].run(None, {"samples": samples[None, :n_samples]})
            if i >= 0:
                kept.append((time.process_time() - began) / len(paths))
    return {name: spread(seconds) for name, seconds in taken.items()}


def measure_detector(
    kind: str, root: Path, data: Sequence[Path], folder: Path, *, epochs: int, most: int, rounds: int
) -> dict[str, Any]:
    "Train, export and time a detector."
    model = folder / f"{root.name}-{kind}"
    settings = lm.TrainSettings(detector=kind, epochs=epochs, epoch_share=1.0)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few recordings
        lm.train(data[0], *data[1:], out=model, settings=settings, device="cpu", progress=False)
    forms, files = _export(model, root, most)
    core = min(os.sched_getaffinity(0))
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (core,)) as process:
        seconds = process.submit(time_scoring, model, files, root, rounds).result()
    return {"recordings": root.name, "kind": kind, "forms": forms, "seconds": seconds}


def bench_onnx(
    folder: str | os.PathLike,  # work folder, without `synthetic` and `real`
    *,
    recordings: str = "",  # folder of label folders of real recordings; empty: synthetic ones only
    n_files: int = 48,  # recordings of the synthetic network, all splits
    epochs: int = 4,  # of networks: the agreement is measured, not the detector
    most: int = 64,  # recordings that are compared
    rounds: int = 5,  # counted rounds of the timing
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # the record
    "Measure ONNX files of all kinds of detectors on synthetic and real recordings."
    work = Path(folder)
    work.mkdir(parents=True, exist_ok=True)
    head = record_head("onnx")
    sets = [_demo(work, n_files)] + ([_real(work, Path(recordings))] if recordings else [])
    found = []
    for root, data in sets:
        for kind in KINDS:
            log(f"{root.name} recordings: {kind}")
            how = {"epochs": epochs, "most": most, "rounds": rounds}
            found.append(measure_detector(kind, root, data, work, **how))
    limits = {"epochs": epochs, "most": most, "rounds": rounds, "threads": 1}
    all_ok = all(f["score"] < 0.1 for d in found for f in d["forms"].values() if "score" in f)
    return {**head, **limits, "verified": {"all_ok": all_ok}, "detectors": found}


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    "Format a table in Markdown; columns after the third are numbers."
    marks = ["---" if k < 3 else "---:" for k in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, marks, *rows))


def _each(record: dict[str, Any]) -> list[tuple[list[str], dict[str, Any], dict[str, Any]]]:
    "First cells of a row, figures of the file and the detector."
    return [
        ([d["recordings"], d["kind"], FORMS[form]], figures, d)
        for d in record["detectors"]
        for form, figures in d["forms"].items()
        if "score" in figures
    ]


def difference_table(record: dict[str, Any] | None) -> str:
    "Largest differences from `predict` as a table in Markdown."
    if record is None:
        return "not measured"

    def number(x: float | None) -> str:
        return "none" if x is None else f"{x:.7f}"  # an exponent would be broken at its hyphen

    rows = []
    for cells, f, _ in _each(record):
        differences = [number(f[name]) for name in ("score", "segment_score", "probability")]
        rows.append([*cells, str(f["recordings"]), *differences, str(f["decisions"])])
    head = ["recordings", "detector", "file", "compared", "score", "score of a segment"]
    return _rows([*head, "probability", "decisions that differ"], rows)


def speed_table(record: dict[str, Any] | None) -> str:
    "Size of the files and processor time of a recording as a table in Markdown."
    if record is None:
        return "not measured"
    rows = []
    for cells, f, d in _each(record):
        form = "int8" if cells[2] == "int8" else "float"
        own, other = (d["seconds"][name]["median"] for name in (form, "predict"))
        times = [f"{own * 1e3:.1f}", f"{other * 1e3:.1f}", f"{other / own:.2f}"]
        rows.append([*cells, f"{f['n_bytes'] / 1e3:,.0f}", *times])
    head = ["recordings", "detector", "file", "kB", "ONNX Runtime, ms", "`predict`, ms", "ratio"]
    return _rows(head, rows)
