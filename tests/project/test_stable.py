"""Behaviour that a change of structure must keep: data sets, public names, keys of JSON output, exit codes.

What is compared with lies in `tests/stored/`. `python tests/project/test_stable.py --store` writes it again from the
code of this checkout (a command is added by writing it into exit_codes.json, with any number). That is for
deliberate changes only: where a test fails after a change that should alter nothing, the change is wrong, and
storing again would hide it.

The bytes of a data set depend on more than the code: on versions of libraries and on the CPU. These are
stored too (`depends`). Where they differ, what does not depend on them is still compared: rows, as far as
they do not, and always structure, attributes, labels, paths and the codes of rejected files.
"""

import contextlib
import dataclasses
import errno
import hashlib
import inspect
import io
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import nbformat
import numpy as np
import pytest
import soundfile
import soxr
from each import each
from llvmlite import binding
from odd_wavs import READ, REFUSED, canonical
from tiny_training import tiny_words

import leakmel as lm
from leakmel.cli import main
from leakmel.extras.locate.correlate import synthetic_pair

pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("default::UserWarning"),
]  # of splits of a few sensors

STORED = Path(__file__).resolve().parents[1] / "stored"
SMALL: dict[str, Any] = {"preset": "disjoint@1", "sample_rate": 4096, "duration_s": 1.0, "n_mels": 16}


def stored(name: str) -> Any:
    """Return the values that were stored under a name."""
    return json.loads((STORED / f"{name}.json").read_text(encoding="utf-8"))


def sha256(content: bytes) -> str:
    """Return the SHA-256 of some bytes as hexadecimal text."""
    return hashlib.sha256(content).hexdigest()


def as_json(value: Any) -> Any:
    """Return a value as it is after a way through JSON."""
    return json.loads(json.dumps(value))


# ---- data sets

# name -> recordings, and arguments of `build` beside those that all have
DATA_SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "disjoint": ("network", {"spec": {"preset": "disjoint@1"}, "engine": "cpu"}),
    "overlap": ("network", {"spec": {"preset": "overlap@1"}, "engine": "cpu"}),
    "reference": ("network", {"spec": {"preset": "disjoint@1"}, "engine": "reference"}),
    "gzip": (
        "network",
        {"spec": {"preset": "disjoint@1"}, "engine": "cpu", "pipeline": {"compression": "gzip"}},
    ),
    "waveforms": ("network", {"spec": SMALL, "engine": "cpu", "with_waveforms": True}),
    "demo": (
        "demo",
        {"spec": {"preset": "disjoint@1", "sample_rate": 4096, "duration_s": 10.0}, "engine": "cpu"},
    ),
    "faulty": ("faulty", {"spec": SMALL, "engine": "cpu", "pipeline": {"max_rejected": 1.0}}),
    "faulty_reference": ("faulty", {"spec": SMALL, "engine": "reference", "pipeline": {"max_rejected": 1.0}}),
}
VERSION_ATTRIBUTES = {"leakmel_version", "metadata_digest"}  # the digest is over the version too
TEXTS = ("files/path", "files/status", "files/encoding", "rejected/path", "rejected/code")
ONLY_FILE = {"leakmel", "hdf5", "h5py", "numpy_simd"}  # rows do not depend on these


def depends() -> dict[str, Any]:
    """Return what the bytes of a data set depend on beside the code."""
    return {
        "leakmel": lm.__version__,
        "hdf5": h5py.version.hdf5_version,
        "h5py": h5py.__version__,
        "numpy": np.__version__,
        "soxr": soxr.__version__,
        "libsndfile": soundfile.__libsndfile_version__,
        "numpy_simd": np.show_config(mode="dicts")["SIMD Extensions"]["found"],
        "machine": platform.machine(),
        "fma": bool(binding.get_host_cpu_features().get("fma")),
    }


def write_network(folder: Path, n: int) -> None:
    """Write recordings of integer noise, which are the same with every CPU and every version of NumPy."""
    for k in range(n):
        split, label = (
            ("TRAINING", "TRAINING", "VALIDATION", "TESTING")[k % 4],
            ("LEAK", "NOLEAK")[k // 4 % 2],
        )
        place = folder / split / label
        place.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(k).integers(-3000, 3000, 40_960)
        samples = noise // (1 + k % 5) + 20 * (np.arange(40_960) % (50 + 7 * k))
        content = canonical(n_bytes=2 * 40_960) + samples.astype("<i2").tobytes()
        (place / f"S{k % 3}~R{k:02d}~20250101_0200{k:02d}~8.wav").write_bytes(content)


def write_recordings(folder: Path) -> None:
    """Write a network, one with files of every odd kind, and one that `leakmel init --demo` makes, with faults."""
    write_network(folder / "network", 16)
    write_network(folder / "faulty", 16)
    lm.write_demo(folder / "demo", n_files=24, seed=8, faults=True)
    for label, kinds in (("LEAK", READ), ("NOLEAK", REFUSED)):
        odd = folder / "faulty" / "TRAINING" / label / "odd"
        odd.mkdir()
        for name, kind in kinds.items():
            (odd / f"{name}.wav").write_bytes(kind.content)


def content_of(path: Path) -> dict[str, Any]:
    """Return what a data set holds that depends on no version and no CPU."""
    sets: dict[str, Any] = {}

    def note(name: str, item: h5py.HLObject) -> None:
        if isinstance(item, h5py.Dataset):
            sets[name] = [item.dtype.str, list(item.shape), item.compression, sorted(item.attrs)]

    with h5py.File(path) as file:
        file.visititems(note)
        attributes = {name: np.asarray(value).tolist() for name, value in file.attrs.items()}
        texts = {name: [os.fsdecode(text) for text in file[name]] for name in TEXTS}
        labels = file["labels"][:].tolist()
    attributes = {name: value for name, value in attributes.items() if name not in VERSION_ATTRIBUTES}
    return as_json({"sets": sets, "attributes": attributes, "labels": labels} | texts)


def build_and_look(name: str, folder: Path, **pipeline: Any) -> dict[str, Any]:
    """Build one of the data sets; return its digests and its content."""
    recordings, given = DATA_SETS[name]
    config = lm.PipelineConfig(fsync=False, **given.get("pipeline", {}), **pipeline)
    given = given | {"pipeline": config, "split": "TRAINING", "progress": "none", "check": 4}
    result = lm.build(folder / recordings, out=folder / f"{name}.h5", **given)
    with h5py.File(result.path) as file:
        parts = [part for part in ("segments_mel", "segments_waveform") if part in file]
        rows = {part: sha256(file[part][:].tobytes()) for part in parts}
    engine = result.summary["engine"]
    return {
        "engine": engine,
        "file": sha256(result.path.read_bytes()),
        "rows": rows,
        "content": content_of(result.path),
    }


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the recordings of all data sets."""
    folder = tmp_path_factory.mktemp("stable")
    write_recordings(folder)
    return folder


@pytest.fixture(scope="module")
def moved_recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same recordings again, later and in a folder with a longer name."""
    folder = tmp_path_factory.mktemp("stable") / "a folder with a longer name" / "and one more"
    folder.mkdir(parents=True)
    write_recordings(folder)
    return folder


@each("name", DATA_SETS)
def test_data_set_is_as_stored(name: str, recordings: Path) -> None:
    record = stored("data_sets")
    found, wanted = build_and_look(name, recordings), record["sets"][name]
    for part, value in wanted["content"].items():
        assert found["content"][part] == value, part
    assert found["content"].keys() == wanted["content"].keys()
    assert found["engine"] == wanted["engine"]
    here = depends()
    only_file = ONLY_FILE - {"numpy_simd"} if DATA_SETS[name][0] == "demo" else ONLY_FILE
    other = {key for key, value in record["depends"].items() if here[key] != value}
    print("differs from what was stored:", ", ".join(sorted(other)) or "nothing")
    if not other - only_file:
        assert found["rows"] == wanted["rows"]
    if not other:
        assert found["file"] == wanted["file"]


@pytest.mark.slow
@each("name", DATA_SETS)
def test_data_set_does_not_depend_on_folder_time_and_workers(
    name: str, recordings: Path, moved_recordings: Path
) -> None:
    first = build_and_look(name, recordings)
    assert build_and_look(name, moved_recordings, compute_workers=1, files_per_batch=3) == first


# ---- public names


def signature_of(function: Any) -> str:
    """Return names and defaults of parameters as text, without annotations."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def members_of(kind: type) -> dict[str, str]:
    """Return the public methods of a class with their signatures, and its properties and class attributes."""
    found: dict[str, str] = {}
    own = [base for base in kind.__mro__ if base.__module__.startswith("leakmel")]
    for name in sorted({name for base in own for name in vars(base) if not name.startswith("_")}):
        value = inspect.getattr_static(kind, name)
        if isinstance(value, types.FunctionType | classmethod | staticmethod):
            found[name] = signature_of(getattr(kind, name))
        else:
            found[name] = "value"
    return found


def public_names() -> dict[str, Any]:
    """Return the public names of the package, with signatures, members and fields."""
    names = {name: getattr(lm, name) for name in lm.__all__}
    shown = [
        name
        for name in dir(lm)
        if not name.startswith("_") and not isinstance(getattr(lm, name), types.ModuleType)
    ]
    classes = {name: value for name, value in names.items() if isinstance(value, type)}
    records = {name: kind for name, kind in classes.items() if dataclasses.is_dataclass(kind)}
    return {
        "all": sorted(names),
        "dir": shown,
        "signatures": {name: signature_of(value) for name, value in names.items() if callable(value)},
        "members": {name: members_of(kind) for name, kind in classes.items()},
        "fields": {
            name: [field.name for field in dataclasses.fields(kind)] for name, kind in records.items()
        },
    }


def error_classes(kind: Any = lm.LeakmelError) -> dict[str, list[Any]]:
    """Return the exit code and the bases of the errors of the package that are loaded, by name."""
    found: dict[str, list[Any]] = {
        kind.__name__: [kind.exit_code, [base.__name__ for base in kind.__bases__]]
    }
    for below in kind.__subclasses__():
        if below.__module__.startswith("leakmel"):
            found |= error_classes(below)
    return {name: facts for name, facts in found.items() if not name.startswith("_")}


LEARNING = (
    "train",
    "search",
    "evaluate",
    "predict",
    "suggest",
    "similar",
    "embed",
    "nightly",
    "visited",
    "export",
    "retrain",
)
DATA = ("init", "demo", "scan", "build", "verify")
COMMANDS = (
    *DATA,
    *LEARNING,
    "review",
    "fetch",
    "correlate",
    "export",
    "card",
    "labels",
    "page",
    "cache",
    "bench",
    "tune",
    "doctor",
)


def options() -> dict[str, dict[str, None]]:
    """Return the options that the complete help of each command names."""
    texts = {command: run(f"{command} --help-all", Path(tempfile.gettempdir()))[1] for command in COMMANDS}
    return {
        # an option, and an earlier name of it on the same line
        command: dict.fromkeys(
            word
            for line in re.findall(r"^  (--\S+(?: \S+)*)", text, re.MULTILINE)
            for word in re.findall(r"(?:^|, )(--[\w-]+)", line)
        )
        for command, text in texts.items()
    }


@each("part", ["all", "dir", "signatures", "members", "fields"])
def test_public_names_are_as_stored(part: str) -> None:
    assert as_json(public_names())[part] == stored("names")[part]


def test_no_error_class_and_no_option_is_missing() -> None:
    wanted = stored("names")
    public_names()  # loads the modules of all public names
    found = as_json(error_classes())
    assert {name: found.get(name) for name in wanted["errors"]} == wanted["errors"]
    assert missing(wanted["options"], options()) == []


# ---- the command line

# name -> command whose JSON is looked at, run in this order; {name} is a file or folder of that name
OF_JSON = {
    "init": "init {work}",
    "demo": "demo {made} --files 40",
    "demo --faults": "demo {bad} --files 24 --faults",
    "scan": "scan {made}",
    "scan --content": "scan {bad} --content",
    "build": "build {bad} --split training --out {one} --sample-rate 4096 --duration-s 1 --report",
    "build --split all": "build {made} --split all --out {sets} --check 2 --report",
    "verify": "verify {one} --root {bad} --sample 2",
    "doctor": "doctor {made}",
    "train": " ".join(["train {sets} --out {run} --report", *tiny_words(1)]),
    "train --cross-validate": "train {sets} --out {folds} --cross-validate --detector spectral --folds 2 --seeds 1 --device cpu",
    "train --group": "train {sets} --out {groups} --cross-validate --group recording,sensor --detector spectral --folds 2 --seeds 1 --device cpu",
    "train --learning-curve": "train {sets} --out {curve} --learning-curve --seeds 1 --folds 2 --device cpu",
    "evaluate": "evaluate {sets} --model {run} --draws 100 --out {evaluation} --device cpu",
    "predict": "predict {bad} --split training --model {run} --out {scores}.csv --device cpu --report",
    "nightly": "nightly {bad} --model {run} --state {state} --device cpu",
    "suggest": "suggest {bad} --model {run} --n 4",
    "embed": "embed {labelled} --out {stored}.npz",
    "similar": "similar {labelled}/a.wav --in {stored}.npz",
    "export": "export {run} --onnx --out {exported}.onnx --recordings {bad} --most 4",
    "labels import": "labels import {labelled} --into {labels}.csv --by ann",
    "review": "review {labelled} --out {lab} --no-lab",
    "fetch": "fetch aghashahi --from {raw} --out {set} --yes",
    "fetch list": "fetch",
    "correlate": "correlate {pair}.wav --distance-m 120 --speed-m-s 1200",
    "export data set": "export {sets} --out {tables}",
    "card": "card {run}",
    "page": "page {run}.ipynb",
    "cache list": "cache list",
    "error": "build {missing} --out {x}",
    "usage error": "build {made} --out {x} --no-such-option",
}
OF_THE_MACHINE = {"missing"}  # its keys are what this machine cannot measure
FULL_DISK = "on a full disk: "


def run(command: str, folder: Path) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it printed."""
    words = [
        re.sub(r"\{(\w+)\}", lambda m: str(folder / m[1]), w) for w in command.removeprefix(FULL_DISK).split()
    ]
    out = io.StringIO()
    with contextlib.ExitStack() as around:
        around.enter_context(
            mock.patch.dict(os.environ, LEAKMEL_CACHE_DIR=str(folder / "cache"), COLUMNS="200")
        )
        around.enter_context(contextlib.redirect_stdout(out))
        around.enter_context(contextlib.redirect_stderr(io.StringIO()))
        if command.startswith(FULL_DISK):
            no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            around.enter_context(mock.patch("leakmel.dataset.writer.fallocate", side_effect=no_space))
        try:
            status = main(words)
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue()


def keys_of(value: Any) -> Any:
    """Return the keys of nested objects; a list of objects becomes a list with the keys of the first."""
    if isinstance(value, dict):
        return {key: None if key in OF_THE_MACHINE else keys_of(item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [keys_of(value[0])]
    return None


def missing(wanted: Any, found: Any, at: str = "") -> list[str]:
    """Return the places of stored keys that are not there; further keys are allowed."""
    if wanted is None:
        return []
    if type(found) is not type(wanted):
        return [f"{at}: no {type(wanted).__name__}"]
    if isinstance(wanted, list):
        return missing(wanted[0], found[0], f"{at}[0]")
    lost = [f"{at}/{key}" for key in wanted if key not in found]
    return lost + [
        p for key in wanted if key in found for p in missing(wanted[key], found[key], f"{at}/{key}")
    ]


def write_notebook(path: Path) -> None:
    """Write a notebook with one output."""
    v4 = nbformat.v4
    cell = v4.new_code_cell("x", outputs=[v4.new_output("stream", text="x")])
    nbformat.write(v4.new_notebook(cells=[cell]), path)


def write_track(folder: Path) -> None:
    """Write a recording with a label track next to it."""
    folder.mkdir()
    (folder / "a.wav").write_bytes(canonical(n_bytes=2 * 4096) + bytes(2 * 4096))
    (folder / "a.txt").write_text("0.1\t0.5\tLEAK\n")


def write_raw(folder: Path) -> None:
    """Write headerless recordings with names of a public set."""
    folder.mkdir()
    for name in ("BR_NL_ND_N_H1", "LO_CC_ND_N_H1"):
        (folder / f"{name}.raw").write_bytes((np.arange(8000, dtype="<i4") << 16).tobytes())


def json_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of what commands say to machines, and of the files beside a data set."""
    write_notebook(folder / "run.ipynb")
    write_track(folder / "labelled")
    write_raw(folder / "raw")
    pair = synthetic_pair(position_m=30.0)
    soundfile.write(folder / "pair.wav", pair.samples, pair.sample_rate, subtype="FLOAT")
    found = {name: json.loads(run(f"{command} --json", folder)[1]) for name, command in OF_JSON.items()}
    assert [name for name, body in found.items() if "error" in body] == ["error", "usage error"]
    for part in ("report", "timeline"):
        found[f"{part}.json"] = json.loads((folder / f"one.{part}.json").read_text(encoding="utf-8"))
    return {name: keys_of(value) for name, value in found.items()}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory, one_thread: None, few_trees: None) -> dict[str, Any]:
    """Run all commands once."""
    return json_keys(tmp_path_factory.mktemp("keys"))


@pytest.mark.slow
@each("name", [*OF_JSON, "report.json", "timeline.json"])
def test_no_key_of_json_is_missing(name: str, keys: dict[str, Any]) -> None:
    assert missing(stored("json_keys")[name], keys[name]) == []


def write_places(folder: Path) -> None:
    """Write what the commands of the table are given: recordings, a good data set, and bad ones."""
    write_recordings(folder)
    write_notebook(folder / "run.ipynb")
    (folder / "empty").mkdir()
    lm.build(folder / "network", split="training", out=folder / "good", progress="none", check=2)
    content = (folder / "good").read_bytes()
    with h5py.File(folder / "good") as file:
        at = file["segments_mel"].id.get_offset()
    (folder / "changed").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    (folder / "cut").write_bytes(content[: len(content) // 2])
    (folder / "text").write_text("no data set")


def exit_code(command: str, folder: Path) -> int:
    """Run a command of the table, with an empty folder {new}; return its exit code."""
    shutil.rmtree(folder / "new", ignore_errors=True)
    (folder / "new").mkdir()
    return run(command, folder)[0]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what the commands of the table are given."""
    folder = tmp_path_factory.mktemp("codes")
    write_places(folder)
    return folder


@each("command", stored("exit_codes"))
def test_exit_code_is_as_stored(command: str, places: Path) -> None:
    assert exit_code(command, places) == stored("exit_codes")[command]


# ---- storing


def store(folder: Path) -> None:
    """Write all stored values from the code of this checkout."""
    if Path(lm.__file__).resolve().parents[1] != Path(__file__).resolve().parents[2]:
        raise SystemExit(f"leakmel comes from {lm.__file__}, not from this checkout: set PYTHONPATH to it")
    for part in ("sets", "keys", "codes"):
        (folder / part).mkdir()
    write_recordings(folder / "sets")
    names = public_names() | {"errors": error_classes(), "options": options()}
    write_places(folder / "codes")
    values = {
        "data_sets": {
            "depends": depends(),
            "sets": {name: build_and_look(name, folder / "sets") for name in DATA_SETS},
        },
        "names": names,
        "json_keys": json_keys(folder / "keys"),
        "exit_codes": {command: exit_code(command, folder / "codes") for command in stored("exit_codes")},
    }
    for name, value in values.items():
        (STORED / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--store"]:
        raise SystemExit("usage: python tests/project/test_stable.py --store (for deliberate changes only)")
    with tempfile.TemporaryDirectory() as work:
        store(Path(work))
