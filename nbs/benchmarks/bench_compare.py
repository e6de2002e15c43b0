"""leakmel's engines and other tools on the same recordings: verified first, then timed in turn."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from bench_gpu import GEOMETRIES, geometry_spec
from contestants import LIMIT, TOOLS, list_split
from process_tree import Took, run_command

from leakmel.core.errors import LeakmelError, OutputError, UsageError, write_error
from leakmel.extras.machine.bench import (
    evict,
    read_into_cache,
    record_head,
    rounds_text,
    spread,
    synthetic_set_of_size,
    total_for_training,
    touch_memory,
)
from leakmel.mel.engines import COMPARISON_ENGINES, CPU_ENGINES, EngineUnavailable
from leakmel.mel.spec import MelSpec, compare, reference_features, spec_from_dict
from leakmel.recordings.demo import WAV_BYTES


def linked_set(
    root: Path,  # a made set
    folder: Path,  # of the linked ones, on the same file system; one that is there is used again
    n_files: int,
    split: str = "",  # its folder is put above the label folders
) -> Path:  # a folder with n_files recordings
    "Return a data set whose files are hard links to the training recordings of a made one."
    target, new = folder / f"links-{n_files}", folder / f".links-{n_files}.new"
    if target.exists():
        return target
    shutil.rmtree(new, ignore_errors=True)
    originals = sorted(
        (root / "TRAINING").glob("*/*.wav"), key=lambda p: p.name.split("~")[1]
    )  # so that a few of them have both labels too
    for label in {p.parent.name for p in originals}:
        (new / split / label).mkdir(parents=True)
    names = (
        (p, new / split / p.parent.name / _named(p.name, k))
        for k in range(-(-n_files // len(originals)))
        for p in originals
    )
    try:
        for original, name in islice(names, n_files):
            os.link(original, name)
        new.rename(target)
    except OSError as e:
        raise _no_links(e, root) from e
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return target


def _named(name: str, k: int) -> str:
    "The name of copy k: of the same sensor, with a recording number of its own."
    sensor, recording, *rest = name.split("~")
    return "~".join([sensor, f"{recording}x{k:03d}", *rest])


def _no_links(error: OSError, root: Path) -> OutputError:
    "The error for a file system that does not take so many names."
    if error.errno == errno.EMLINK:
        return OutputError(
            "the file system allows no more names for one file",
            path=root,
            remedy="measure fewer files; each file has one name for each copy",
        )
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EACCES):
        return OutputError(
            f"recordings cannot be linked here ({os.strerror(error.errno)})",
            path=root,
            remedy="use a work folder on a file system with hard links",
        )
    return write_error(error, error.filename or root)


def preset_spec(
    changes: Mapping[str, Any],  # "preset", and settings that differ from it
) -> MelSpec:
    "Return the settings of an entry like those of GEOMETRIES."
    return MelSpec.preset(changes["preset"], **{k: v for k, v in changes.items() if k != "preset"})


def geometry_line(
    specs: Mapping[str, MelSpec],  # by the name of their geometry
) -> str:
    "Describe geometries: frames of a file, how many of them differ, bands."
    lines = []
    for name, spec in specs.items():
        n, distinct = spec.grid.frame_starts.size, len(spec.grid.distinct[0])
        lines.append(
            f"{name}: {n} frames a file" + ("" if n == distinct else f", {distinct} of them distinct")
        )
    bands = dict.fromkeys(str(spec.n_mels) for spec in specs.values())
    return "; ".join([*lines, " and ".join(bands) + " bands"])


@dataclass(frozen=True)
class Contestant:
    "A way to the file, run as a process of its own."

    what: str  # in words
    command: Callable[[Path, Path, str], list[str]]  # root, file to write, geometry -> words
    env: Mapping[str, str] = field(default_factory=dict)  # added to its environment


def build_command(engine: str, root: Path, out: Path, geometry: str) -> list[str]:
    "The words of a build by an engine on the CPU."
    changes = [
        w
        for key, value in GEOMETRIES[geometry].items()
        for w in (f"--{key.replace('_', '-')}", "none" if value is None else str(value))
    ]
    return [
        sys.executable,
        "-m",
        "leakmel",
        "build",
        str(root),
        "--out",
        str(out),
        "--split",
        "training",
        "--engine",
        engine,
        "--device",
        "cpu",
        "--no-fsync",
        "--fresh",
        "--json",
        *changes,
    ]


_TOOL = str(Path(__file__).with_name("contestants.py"))


def all_contestants() -> dict[str, Contestant]:
    "leakmel's engines for CPUs, then the other tools and C without checks."

    def build(engine: str) -> Contestant:
        return Contestant(f"leakmel build --engine {engine}", lambda *where: build_command(engine, *where))

    def tool(name: str) -> Contestant:
        return Contestant(
            (TOOLS[name].fill.__doc__ or name).rstrip("."),
            env=TOOLS[name].env,
            command=lambda root, out, geometry: [
                sys.executable,
                _TOOL,
                name,
                str(root),
                str(out),
                "--geometry",
                geometry,
            ],
        )

    return {f"leakmel {engine}": build(engine) for engine in (*CPU_ENGINES, *COMPARISON_ENGINES)} | {
        name: tool(name) for name in TOOLS
    }


def part_of(
    root: Path,  # a made set
    folder: Path,  # where parts are put
    n: int,  # recordings wanted
) -> Path:  # a folder of splits; the set itself where it has no more
    "A part of the training split, evenly chosen."
    paths, _ = list_split(root)
    if n >= len(paths):
        return root
    part = folder / f"part-{n}"
    if not part.exists():
        for label in sorted({Path(p).parent.name for p in paths}):
            (part / "TRAINING" / label).mkdir(parents=True)
        for i in np.linspace(0, len(paths) - 1, n).astype(int):
            os.link(paths[i], part / "TRAINING" / Path(paths[i]).parent.name / Path(paths[i]).name)
    return part


def rounded(n: float) -> int:
    "The two leading digits of a number, so that there are few parts."
    step = 10 ** max(0, len(str(int(n))) - 2)
    return int(n) // step * step


def check_file(
    path: Path,  # of a contestant
    root: Path,  # what it was made from
    spec: MelSpec,
    sample: int | None = None,  # rows to look at, evenly chosen; None: all
) -> dict[str, Any]:  # ok, why, rows, checked, n_wrong, max_abs_db
    "Whether a file has the rows and labels that it should have."
    import h5py

    paths, ids = list_split(root)
    shape = (len(paths), *spec.row_shape)
    found: dict[str, Any] = {
        "ok": False,
        "why": None,
        "rows": len(paths),
        "checked": 0,
        "n_wrong": 0,
        "max_abs_db": 0.0,
    }
    try:
        file = h5py.File(path, "r")
    except OSError as e:
        return found | {"why": f"no HDF5 file that can be read: {e}"}
    with file as f:
        if not {"segments_mel", "labels"} <= set(f):
            return found | {"why": f"segments_mel or labels is missing, there is {', '.join(f) or 'nothing'}"}
        rows, labels = f["segments_mel"], f["labels"][:]
        if rows.shape != shape or rows.dtype != np.float16:
            return found | {"why": f"segments_mel is {rows.dtype} {rows.shape}, not float16 {shape}"}
        if not np.array_equal(labels, ids):
            return found | {"why": "the labels are not those of the folders"}
        picked = np.unique(np.linspace(0, len(paths) - 1, min(len(paths), sample or len(paths))).astype(int))
        wrong = _compare_rows(rows, paths, picked, spec, found)
    if wrong:
        found["why"] = (
            f"{len(wrong)} of {len(picked)} rows are not right, first row {wrong[0]} ({Path(paths[wrong[0]]).name})"
        )
    return found | {"ok": not wrong, "checked": len(picked)}


def _compare_rows(
    rows: Any, paths: list[str], picked: np.ndarray, spec: MelSpec, found: dict[str, Any]
) -> list[int]:
    "Numbers of the rows that are not right; sums are added to `found`."
    from leakmel.recordings.wav import read_wav

    wrong = []
    for i in picked.tolist():
        verdict = compare(rows[i], reference_features(read_wav(paths[i]).samples[:, 0], spec), spec)
        found["n_wrong"], found["max_abs_db"] = (
            found["n_wrong"] + verdict.n_wrong,
            max(found["max_abs_db"], verdict.max_abs_db),
        )
        if not verdict.ok:
            wrong.append(i)
    return wrong


def run_once(
    contestant: Contestant,
    root: Path,  # a made set, or a part of one
    out: Path,  # file to write; what was there is removed
    geometry: str,
    *,
    cache: str = "warm",  # page cache: "warm" or "cold"
    watch: bool = False,  # weigh the process tree, which costs time
    limit_s: float = 600,
    originals: int | None = None,  # recordings of which the others are hard links; None: none are links
) -> dict[
    str, Any
]:  # raises EngineUnavailable for a package that is not installed, LeakmelError for a command that failed
    "Run a contestant; what it and the machine say of it."
    out.unlink(missing_ok=True)
    paths, _ = list_split(root)
    touch_memory(min(len(paths), originals or len(paths)) * WAV_BYTES)
    {"warm": read_into_cache, "cold": evict}[cache](paths)
    took = run_command(
        contestant.command(root, out, geometry), env=contestant.env, watch=watch, limit_s=limit_s
    )
    body = _printed(took)
    if "missing" in body:
        raise EngineUnavailable(body["missing"])
    if took.status or "seconds" not in body:
        reason = body.get("error") or next(
            (line for line in reversed(took.stderr_end.splitlines()) if line.strip()), "nothing"
        )
        raise LeakmelError(f"ended with status {took.status}", found=reason)
    return {
        "seconds": body["seconds"],
        "n_files": len(paths),
        "files_per_s": len(paths) / body["seconds"],
        "process_s": took.wall_s,
        "cpu_s": took.cpu_s,
        "peak_bytes": took.peak_bytes,
        "versions": body.get("versions", {}),
    }


def _printed(took: Took) -> dict[str, Any]:
    "The JSON object on the last line that was printed."
    lines = took.text.strip().splitlines() or ["{}"]
    try:
        return json.loads(lines[-1])
    except ValueError:
        return {}


_CHECKED = 48  # recordings of the first run, all of them compared
_SAMPLED = 24  # rows compared of later ones


@dataclass(frozen=True)
class Ground:
    "Where contestants run."

    root: Path  # the made set
    work: Path  # for parts and results
    n_files: int  # at the most
    run_s: float  # that a run may take, about
    originals: int | None = None  # recordings of which the others are hard links; None: none are links

    def part(self, n: int) -> Path:
        "A part of the set."
        return part_of(self.root, self.work, n)

    def out(self, name: str) -> Path:
        "File that a contestant writes."
        return self.work / f"{name.replace(' ', '-')}.H5"


def admit(
    ground: Ground, name: str, contestant: Contestant, geometry: str
) -> dict[
    str, Any
]:  # n_files, check, peak_bytes, versions; raises EngineUnavailable, or LeakmelError for what failed or is not right
    "Find whether a contestant is right, and how many recordings it gets."
    n, out, checks = min(_CHECKED, ground.n_files), ground.out(name), []
    while True:
        root = ground.part(n)
        done = run_once(contestant, root, out, geometry, watch=True, originals=ground.originals)
        checks.append(check_file(out, root, geometry_spec(geometry), None if n <= _CHECKED else _SAMPLED))
        out.unlink(missing_ok=True)
        if not checks[-1]["ok"]:
            raise NotRight(checks[-1]["why"], found=f"{checks[-1]['n_wrong']:,} values outside the tolerance")
        wanted = min(ground.n_files, max(n, rounded(n / done["seconds"] * ground.run_s)))
        enough = wanted <= n or (wanted < 1.5 * n and wanted < ground.n_files)
        if enough and len(checks) > 1:
            break  # a first run may have compiled and cached what later ones find
        n = n if enough else wanted
    return {
        "n_files": n,
        "peak_bytes": done["peak_bytes"],
        "versions": done["versions"],
        "check": {
            "ok": True,
            "checked": sum(c["checked"] for c in checks),
            "max_abs_db": max(c["max_abs_db"] for c in checks),
        },
    }


class NotRight(LeakmelError):
    "A contestant whose file is not what it should be."


def in_turn(names: list[str], i: int) -> list[str]:
    "The order of round `i`."
    k = i % max(1, len(names))
    return names[k:] + names[:k]


def _admit_all(
    ground: Ground, who: Mapping[str, Contestant], log: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    "What is known of each contestant before the rounds."
    every: dict[str, dict[str, Any]] = {}
    for name, contestant in who.items():
        every[name] = {
            "what": contestant.what,
            "env": dict(contestant.env),
            "status": "ok",
            "why": None,
            "versions": {},
            **{key: {} for key in ("n_files", "check", "peak_bytes", "rounds")},
        }
        with _held_against(every[name], name, log):
            for geometry in GEOMETRIES:
                known = admit(ground, name, contestant, geometry)
                every[name]["versions"] = known.pop("versions")
                for key, value in known.items():
                    every[name][key][geometry] = value
                log(f"{name}: right in {geometry}, {known['n_files']:,} recordings a run")
    return every


@contextmanager
def _held_against(entry: dict[str, Any], name: str, log: Callable[[str], None]) -> Iterator[None]:
    "Note what keeps a contestant out; the others go on."
    try:
        yield
    except LeakmelError as e:
        status = (
            "not installed"
            if isinstance(e, EngineUnavailable)
            else "not right"
            if isinstance(e, NotRight)
            else "failed"
        )
        entry.update(status=status, why=str(e), rounds={})
        log(f"{name}: {status}: {e}")


def _run_rounds(
    ground: Ground,
    who: Mapping[str, Contestant],
    every: dict[str, dict[str, Any]],
    rounds: int,
    caches: Iterable[str],
    log: Callable[[str], None],
) -> None:
    "All rounds; what each run took is added to `every`."
    settings = [(geometry, cache) for cache in caches for geometry in GEOMETRIES]
    for i in range(rounds):
        for geometry, cache in settings:
            for name in in_turn([n for n, e in every.items() if e["status"] == "ok"], i):
                with _held_against(every[name], name, log):
                    out = ground.out(name)
                    took = run_once(
                        who[name],
                        ground.part(every[name]["n_files"][geometry]),
                        out,
                        geometry,
                        cache=cache,
                        originals=ground.originals,
                    )
                    out.unlink(missing_ok=True)  # before its pages go to the disk and slow the next one down
                    every[name]["rounds"].setdefault(f"{geometry}, {cache}", []).append(
                        {k: v for k, v in took.items() if k not in ("versions", "peak_bytes")}
                    )
                    log(
                        f"round {i + 1} of {rounds}: {geometry}, {cache}: {name}: {took['files_per_s']:,.0f} files/s, {took['cpu_s']:.1f} s of CPU"
                    )


def best_peer(
    every: Mapping[str, dict[str, Any]],  # contestants with their rounds
    setting: str,  # "A, warm"
) -> str | None:  # None: nobody but leakmel
    "DALI, or else the fastest tool of others."
    rates = {
        name: spread([r["files_per_s"] for r in e["rounds"][setting]])["median"]
        for name, e in every.items()
        if setting in e["rounds"] and not name.startswith("leakmel") and name != LIMIT
    }
    return "dali" if "dali" in rates else max(rates, key=lambda name: rates[name], default=None)


def add_figures(every: Mapping[str, dict[str, Any]]) -> dict[str, str | None]:  # who is 1, by setting
    "Add medians and ranges, and ratios within rounds, to contestants with their rounds."
    peers: dict[str, str | None] = {}
    for e in every.values():
        e["figures"], e["ratio"] = (
            {s: {key: spread([r[key] for r in kept]) for key in kept[0]} for s, kept in e["rounds"].items()},
            {},
        )
    for setting in dict.fromkeys(s for e in every.values() for s in e["rounds"]):
        peers[setting] = peer = best_peer(every, setting)
        if peer is None:
            continue
        for e in every.values():
            if setting in e["rounds"]:
                e["ratio"][setting] = ratio_of_rounds(e, every[peer], setting)
    return peers


def ratio_of_rounds(
    entry: Mapping[str, Any], other: Mapping[str, Any], setting: str
) -> dict[str, float]:  # median, least, most
    "Rate of a contestant against another one's in the same round."
    return spread(
        [
            one["files_per_s"] / base["files_per_s"]
            for one, base in zip(entry["rounds"][setting], other["rounds"][setting], strict=False)
        ]
    )


def bench_compare(
    folder: str | os.PathLike,  # work folder: the made set is kept there and used again
    *,
    n_files: int = 8000,  # recordings of the training split
    originals: int | None = None,  # recordings that are written, the others are hard links to them; None: all
    rounds: int = 5,  # counted rounds
    run_s: float = 6.0,  # that a run may take, about; slower contestants get fewer recordings
    cold: bool = False,  # also from a cold page cache
    only: str | None = None,  # names of contestants, with commas between; None: all
    who: Mapping[str, Contestant] | None = None,  # others than `all_contestants`
    log: Callable[[str], None] = lambda text: None,  # told what is going on
) -> dict[str, Any]:  # the figures, as they are stored
    "Check every contestant, then run them in turn."
    if min(rounds, n_files, 1 if originals is None else originals) < 1:
        raise UsageError(
            "rounds, n_files and originals must be at least 1", found=f"{rounds}, {n_files}, {originals}"
        )
    if not run_s > 0:
        raise UsageError("a run must be given some time", found=run_s)
    chosen = _chosen(all_contestants() if who is None else who, only)
    work = Path(folder) / "compare"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if originals is None or originals >= n_files:
        originals, root = None, synthetic_set_of_size(folder, total_for_training(n_files), log)
    else:
        made = synthetic_set_of_size(folder, total_for_training(originals), log)
        originals = len(list((made / "TRAINING").glob("*/*.wav")))  # a few more than were asked for
        log(f"linking {n_files:,} files to {originals:,} recordings")
        root = linked_set(made, Path(folder) / "linked", n_files, "TRAINING")
    ground = Ground(root, work, n_files, run_s, originals)
    caches = ("warm", "cold") if cold else ("warm",)
    try:
        every = _admit_all(ground, chosen, log)
        _run_rounds(ground, chosen, every, rounds, caches, log)
    finally:
        shutil.rmtree(ground.work, ignore_errors=True)
    return {
        **record_head("compare"),
        "n_files": n_files,
        "originals": originals,
        "rounds": rounds,
        "caches": list(caches),
        "run_s": run_s,
        "ok": all(e["status"] in ("ok", "not installed") for e in every.values()),
        "interval": "listing to closed file, imports left out, after memory was touched; cpu_s is that of the whole process and its children, imports included",
        "memory": "largest sum over the process tree (RSS of one process, PSS of several), looked at 50 times a second in a run that is not counted",
        "settings": {name: geometry_spec(name).to_dict() for name in GEOMETRIES},
        "ratio_to": add_figures(every),
        "contestants": every,
    }


def _chosen(who: Mapping[str, Contestant], only: str | None) -> dict[str, Contestant]:
    "Those that were asked for."
    if only is None:
        return dict(who)
    wanted = [name.strip() for name in only.split(",")]
    if unknown := [name for name in wanted if name not in who]:
        raise UsageError("unknown contestant", found=", ".join(unknown), expected=", ".join(who))
    return {name: who[name] for name in who if name in wanted}


TARGETS = (5, 9)  # of `leakmel cpu` against DALI: must, aim
SHARE_OF_LIMIT = 0.75  # least share of the rate of C without checks that `leakmel cpu` is to reach


def against_targets(
    figures: dict[str, Any],  # of `bench_compare`
    name: str = "leakmel cpu",
) -> dict[str, bool | None]:  # by setting with a warm cache; None: not measured, or not against DALI
    "Whether an engine is as many times as fast as DALI as it must be."
    ratio = figures["contestants"].get(name, {}).get("ratio", {})

    def reached(setting: str) -> bool | None:
        if setting not in ratio or figures["ratio_to"].get(setting) != "dali":
            return None
        return bool(ratio[setting]["median"] >= TARGETS[0])

    return {
        setting: reached(setting) for setting in (f"{geometry}, warm" for geometry in figures["settings"])
    }


def shares_of_limit(
    figures: Mapping[str, Any],  # of `bench_compare`
    name: str = "leakmel cpu",
) -> dict[str, dict[str, float]]:  # median, least, most by setting; empty where C was not measured
    "Rates of an engine as shares of those of C without checks."
    own, limit = (figures["contestants"].get(who, {}) for who in (name, LIMIT))
    return {
        setting: ratio_of_rounds(own, limit, setting)
        for setting in limit.get("rounds", {})
        if setting in own.get("rounds", {})
    }


def _cells(entry: dict[str, Any], setting: str) -> dict[str, str]:
    "Rate, range, ratio, processor time and memory of a contestant in one setting, as text."
    f, geometry = entry["figures"].get(setting), setting.split(", ")[0]
    if f is None:
        return dict.fromkeys(("rate", "range", "ratio", "cpu", "peak"), "-")
    rate, ratio = f["files_per_s"], entry["ratio"].get(setting)
    return {
        "rate": f"{rate['median']:,.0f}",
        "range": f"{rate['least']:,.0f}-{rate['most']:,.0f}",
        "ratio": "-" if ratio is None else f"{ratio['median']:.2f}",
        "cpu": f"{1e3 * f['cpu_s']['median'] / entry['n_files'][geometry]:.2f}",
        "peak": f"{entry['peak_bytes'][geometry] / 1e6:,.0f}",
    }


def _ranked(figures: dict[str, Any], setting: str) -> list[tuple[str, dict[str, Any]]]:
    "Contestants, the fastest in a setting first, then those without figures."

    def rate(entry: dict[str, Any]) -> float:
        return entry["figures"].get(setting, {}).get("files_per_s", {}).get("median", -1.0)

    return sorted(figures["contestants"].items(), key=lambda pair: -rate(pair[1]))


SHORT_S = 2.0  # seconds of a run, below which starting up weighs more than the work


def short_runs(
    figures: Mapping[str, Any],  # of `bench_compare`
    *caches: str,  # to look at; none: all
) -> str:  # empty where nobody's runs were short
    "Whose runs were too short to say much, as a sentence."
    settings = [f"{g}, {cache}" for cache in caches or figures["caches"] for g in figures["settings"]]

    def is_short(entry: dict[str, Any]) -> bool:
        return any(_seconds(entry, setting) < SHORT_S for setting in settings)

    names = [name for name, entry in figures["contestants"].items() if is_short(entry)]
    return (
        f"runs under {SHORT_S:g} s measure starting up more than anything else: {', '.join(names)}"
        if names
        else ""
    )


def _seconds(entry: dict[str, Any], setting: str) -> float:
    return entry.get("figures", {}).get(setting, {}).get("seconds", {}).get("median", float("inf"))


def _why(entry: dict[str, Any]) -> str:
    "What keeps a contestant out."
    return f"{entry['status'].upper() if entry['status'] != 'not installed' else entry['status']}: {entry['why']}"


def compare_table(
    figures: dict[str, Any] | None,  # of `bench_compare`; None: nothing was measured
) -> str:
    "The comparison as text."
    if figures is None:
        return "not measured"
    lines = []
    for setting in (
        f"{geometry}, {cache}" for cache in figures["caches"] for geometry in figures["settings"]
    ):
        peer = figures["ratio_to"].get(setting)
        lines.append(
            f"{setting.replace(', ', ': ') + ' cache':<20} {'files/s':>9} {'range':>15} {f'/ {peer}' if peer else 'ratio':>8} {'CPU ms a file':>13} "
            f"{'peak MB':>7}"
        )
        for name, entry in _ranked(figures, setting):
            c = _cells(entry, setting)
            if entry["status"] == "ok":
                lines.append(
                    f"{name:<20} {c['rate']:>9} {c['range']:>15} {c['ratio']:>8} {c['cpu']:>13} {c['peak']:>7}"
                )
        lines.append("")
    return "\n".join([*lines, *_below(figures)])


def _below(figures: dict[str, Any]) -> list[str]:
    "Notes next to the figures."
    lines = [f"{name}: {_why(e)}" for name, e in figures["contestants"].items() if e["status"] != "ok"]
    for name, e in figures["contestants"].items():
        if e["status"] == "ok" and (
            fewer := {g: n for g, n in e["n_files"].items() if n < figures["n_files"]}
        ):
            lines.append(f"{name}: fewer recordings, " + ", ".join(f"{n:,} in {g}" for g, n in fewer.items()))
    ratio = figures["contestants"].get("leakmel cpu", {}).get("ratio", {})
    lines += [
        f"leakmel cpu against DALI in {setting}: {ratio[setting]['median']:.2f} ({ratio[setting]['least']:.2f} to {ratio[setting]['most']:.2f})"
        for setting, good in against_targets(figures).items()
        if good is not None
    ]
    for setting, share in shares_of_limit(figures).items():
        missed = (
            "" if share["median"] >= SHARE_OF_LIMIT else f"; the target of {SHARE_OF_LIMIT} is not reached"
        )
        lines.append(
            f"leakmel cpu against {LIMIT} in {setting}: {share['median']:.2f} ({share['least']:.2f} to {share['most']:.2f}){missed}"
        )
    if short := short_runs(figures):
        lines.append(short)
    lines += [
        "CPU: of the whole process, imports included",
        geometry_line({g: spec_from_dict(d) for g, d in figures["settings"].items()}),
    ]
    right = [c for e in figures["contestants"].values() for c in e["check"].values()]
    most = max((c["max_abs_db"] for c in right), default=0.0)
    lines.append(
        f"the rows of every tool were verified before it was timed: {sum(c['checked'] for c in right):,} rows compared with float64, at most {most:.4f} dB off"
    )
    m, commit = figures["machine"], (figures["commit"] or "unknown")[:8]
    count = f"{figures['n_files']:,} recordings"
    if figures.get("originals"):
        most = max((k for e in figures["contestants"].values() for k in e["n_files"].values()), default=0)
        count = f"up to {most:,} files (hard links to {figures['originals']:,} recordings, which leakmel reports as duplicates)"
    return [*lines, f"{count}, {rounds_text(figures)}, {m['n_cores']} cores ({m['cpu']}), commit {commit}"]


def compare_markdown(
    figures: dict[str, Any] | None,  # of `bench_compare`; None: nothing was measured
    cache: str = "warm",  # or "cold", where that was measured
) -> str:
    "The comparison as a Markdown table."
    if figures is None or cache not in figures["caches"]:
        return "not measured"
    cells = [
        f"{g} files/s (range) | {g} / {figures['ratio_to'].get(f'{g}, {cache}') or 'none'} | {g} CPU ms a file | {g} peak MB"
        for g in figures["settings"]
    ]
    lines = [f"| contestant | {' | '.join(cells)} |", "|---|" + "--:|" * 4 * len(cells)]
    for name, entry in _ranked(figures, f"A, {cache}"):
        each = [_cells(entry, f"{geometry}, {cache}") for geometry in figures["settings"]]
        if entry["status"] == "ok":
            text = " | ".join(
                f"{c['rate']} ({c['range'].replace('-', ' to ')}) | {c['ratio']} | {c['cpu']} | {c['peak']}"
                for c in each
            )
        else:
            text = _why(entry).replace("|", "\\|").replace("\n", " ") + " |" * (4 * len(each) - 1)
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines)
