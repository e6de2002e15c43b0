"`leakmel machine tune`: what is recommended and what is not, the time it takes, and the file that later builds pick up."

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from build_runs import execute, plan_run
from each import each
from errors import raises

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, OutputError, write_error
from leakmel.core.operation import parameter_kinds
from leakmel.dataset.config import (
    LIMITS,
    SCHEMA,
    PipelineConfig,
    find_tuned,
    read_tuned,
    this_machine,
    tuned_path,
    with_tuned,
    write_tuned,
)
from leakmel.dataset.reader import write_spec
from leakmel.extras.machine import bench as tune_module
from leakmel.extras.machine.bench import (
    DEFAULT,
    BuildTrials,
    Key,
    Score,
    StateError,
    best_candidate,
    gain,
    sample_size,
    scores_of,
    sweep,
    take_sample,
    tune,
)
from leakmel.operations.data import Build, BuildPlan
from leakmel.recordings.manifest import scan

ROOT = Path(__file__).resolve().parents[2]
N_FILES = 1000


@pytest.fixture(autouse=True)
def own_config(tmp_path, monkeypatch) -> Path:
    "The user's folder of settings is one of the test's own."
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "leakmel"


# ---- trials with a clock of their own


class Clock:
    "A clock that only trials move; it stands in for that of `tune`."

    def __init__(self):
        self.now_s, self.order = 0.0, list[Key]()

    def __call__(self) -> float:
        return self.now_s

    def trial(self, key: Key, seconds: Callable[[], float], before_s: float = 0.0) -> Callable[[], float]:
        "A trial that lasts `seconds` after something that takes `before_s`."

        def run() -> float:
            self.order.append(key)
            took = seconds()
            self.now_s += before_s + took
            return took

        return run


@pytest.fixture
def clock(monkeypatch) -> Clock:
    "The clock by which a sweep shares out its time: it moves by what is made up, whatever the machine does meanwhile."
    made = Clock()
    monkeypatch.setattr(tune_module, "time", SimpleNamespace(monotonic=made))
    return made


def trials_of(
    clock: Clock, rates: dict[str, Callable[[], float]], states: tuple[str, ...] = ("cold", "warm")
) -> dict[Key, Callable[[], float]]:
    "Trials of some names, each with what gives its files/s."

    def seconds(rate: Callable[[], float]) -> Callable[[], float]:
        return lambda: N_FILES / rate()

    return {(name, c): clock.trial((name, c), seconds(rate)) for name, rate in rates.items() for c in states}


def made(
    rates: dict[str, float], around: float = 0.0, rounds: int = 5, seed: int = 0
) -> dict[str, list[Score]]:
    "Scores of trials whose rates lie so far around some means, at random."
    rng, clock = random.Random(seed), Clock()

    def rate(mean: float) -> Callable[[], float]:
        return lambda: mean * rng.uniform(1 - around, 1 + around)

    trials = trials_of(clock, {name: rate(mean) for name, mean in rates.items()})
    found = sweep(trials, rounds=rounds, ends_s=float("inf"))
    return {cache: scores_of(*found, cache, N_FILES) for cache in ("cold", "warm")}


TRIED = [DEFAULT, "a", "b", "c"]


def recommended(rates: dict[str, float], around: float = 0.0, seed: int = 0) -> str:
    "What a sweep comes to."
    return best_candidate(made(rates, around, 5, seed), TRIED)


def test_rounds_are_interleaved_and_never_in_the_same_order(clock):
    found, _ = sweep(trials_of(clock, {name: lambda: 100.0 for name in "abcd"}), rounds=4, ends_s=1e9)
    assert {len(seconds) for seconds in found.values()} == {4}
    rounds = [clock.order[8 * i : 8 * i + 8] for i in range(4)]
    assert all(set(r) == set(found) for r in rounds)
    assert len({tuple(r) for r in rounds}) == 4


@each("budget_s", [25.0, 60.0, 200.0])
def test_no_trial_starts_that_would_exceed_the_time(clock, budget_s):
    told = list[int]()
    trials = {
        ("x", "cold"): clock.trial(("x", "cold"), lambda: 7.0, 1.0),
        ("x", "warm"): clock.trial(("x", "warm"), lambda: 3.0),
    }
    sweep(trials, rounds=1000, ends_s=budget_s, tell=lambda n, what: told.append(n))
    assert budget_s - 8 < clock.now_s <= budget_s
    assert told == list(range(len(told)))


def test_defaults_are_measured_first_and_whatever_the_time(clock):
    trials = trials_of(clock, {"a": lambda: 100.0, DEFAULT: lambda: 100.0})
    found, _ = sweep(trials, rounds=5, ends_s=0)
    assert {key: len(seconds) for key, seconds in found.items() if seconds} == {
        (DEFAULT, "cold"): 1,
        (DEFAULT, "warm"): 1,
    }


def test_sample_size_fits_the_time():
    for n_there in (40, 1000, 100_000):
        for per_file_s in (1e-5, 2e-4, 1e-2, 0.5):
            for seconds in (2.0, 30.0, 500.0):
                n_files = sample_size(n_there, 28, per_file_s, seconds)
                assert min(64, n_there) <= n_files <= n_there
                least = 28 * 5 * min(64, n_there) * per_file_s  # below that the sweep ends early
                assert 28 * 5 * n_files * per_file_s <= max(seconds, least)


# ---- what is recommended


def test_a_clear_winner_is_recommended():
    assert recommended({DEFAULT: 100, "a": 103, "b": 130, "c": 99}, 0.02) == "b"


def test_nothing_is_recommended_where_all_are_equal():
    assert recommended(dict.fromkeys([DEFAULT, "a", "b", "c"], 100)) == DEFAULT


def test_negligible_gain_is_not_recommended():
    assert recommended({DEFAULT: 100, "a": 102, "b": 100, "c": 100}) == DEFAULT


def test_noise_is_hardly_ever_recommended():
    "Four hundred sweeps of settings that make no difference, on a machine whose rates vary by a fifth."
    seen = [recommended(dict.fromkeys([DEFAULT, "a", "b", "c"], 100.0), 0.2, seed) for seed in range(400)]
    assert sum(name != DEFAULT for name in seen) <= 16


def test_setting_that_is_slower_with_a_cold_cache_is_not_recommended():
    states = made({DEFAULT: 100, "a": 130}, 0.02) | {"warm": made({DEFAULT: 100, "a": 90}, 0.02)["warm"]}
    assert states["cold"][0]["name"] == "a"
    assert gain(states, "a") == 0
    assert best_candidate(states, TRIED[:2]) == DEFAULT


def test_too_few_rounds_recommend_nothing():
    assert best_candidate(made({DEFAULT: 100, "a": 150}, 0.01, 4), TRIED[:2]) == DEFAULT


def test_failed_trial_is_named_and_others_continue(clock):
    calls = []

    def fail() -> float:
        calls.append(1)
        raise PermissionError(1, "not allowed")

    trials = trials_of(clock, {DEFAULT: lambda: 100.0, "b": lambda: 130.0}, ("warm",)) | {("a", "warm"): fail}
    scores = scores_of(*sweep(trials, rounds=5, ends_s=1e9), "warm", N_FILES)
    assert calls == [1]
    assert [s["name"] for s in scores] == ["b", DEFAULT, "a"]
    assert "not allowed" in scores[-1]["failure"]
    assert scores[-1]["rounds"] == 0
    assert best_candidate({"warm": scores}, TRIED) == "b"
    assert best_candidate({"cold": [s for s in scores if s["name"] != DEFAULT], "warm": scores}, TRIED) == "b"
    only: dict[Key, list[float]] = {("a", "warm"): [], (DEFAULT, "warm"): []}
    assert best_candidate({"warm": scores_of(only, {}, "warm", N_FILES)}, TRIED) == DEFAULT


def test_trial_with_the_wrong_cache_state_is_repeated():
    n = iter([0.5, 0.0, 0.5, 0.5])

    def sometimes() -> float:
        if not (value := next(n)):
            raise StateError("it is warm")
        return value

    found, failures = sweep({("a", "cold"): sometimes}, rounds=4, ends_s=1e9)
    assert found["a", "cold"] == [0.5, 0.5, 0.5]
    assert "it is warm" in failures["a", "cold"]


# ---- real recordings


@pytest.fixture
def data(tmp_path, make_wav) -> Path:
    "Forty recordings of a second, and one that is broken."
    for k in range(40):
        make_wav(tmp_path / "data" / ("LEAK" if k % 2 else "NOLEAK") / f"{k:02}.wav", seed=k)
    (tmp_path / "data" / "LEAK" / "x.wav").write_bytes(b"RIFF")
    return tmp_path / "data"


def body(**changes: Any) -> dict[str, Any]:
    "What a file of settings holds."
    return {
        "schema": SCHEMA,
        "leakmel_version": lm.__version__,
        "machine": this_machine(),
        "made_utc": "2026-05-01T10:00:00+00:00",
        "engine": "auto",
        "device": "auto",
        "settings": {"files_per_batch": 3},
    } | changes


@pytest.mark.slow
def test_a_run_on_forty_recordings(data, tmp_path, capsys):
    (tmp_path / "work").mkdir()
    words = ["tune", str(data), "--budget-s", "3", "--work-dir", str(tmp_path / "work"), "--json"]
    assert main(words) == 0
    figures = json.loads(capsys.readouterr().out)
    assert os.listdir(tmp_path / "work") == []
    assert (figures["n_files"], figures["n_files_there"]) == (41, 41)
    assert figures["verified"]["ok"]
    assert figures["verified"]["same_bytes"]
    assert figures["verified"]["rows"] == 40
    for cache in figures["builds"]:
        by_name = {s["name"]: s for s in figures["builds"][cache]}
        default = by_name[DEFAULT]
        assert default["rounds"] >= 1
        assert default["least"] <= default["files_per_s"] <= default["most"]
    assert {"warm", "cold"} >= set(figures["builds"]) >= {"warm"}
    assert Path(figures["path"]) == tuned_path(data)
    assert read_tuned(figures["path"])["settings"] == figures["settings"]


def test_rates_of_engines_are_stored_side_by_side(data, tmp_path, monkeypatch, clock):
    "The rate of another engine that was measured before is kept."
    monkeypatch.setattr(BuildTrials, "run", lambda trials, changes, cache: len(trials.sample) / 100.0)
    before = {
        "triton/cuda": {"files_per_s": 90_000.0, "made_utc": "2026-05-01T10:00:00+00:00", "spec": "0123"}
    }
    write_tuned(data, body(rates=before))
    made = tune(data, budget_s=20, progress="none", work_dir=tmp_path)
    rates = read_tuned(tuned_path(data))["rates"]
    facts = {"made_utc": made["made_utc"], "spec": lm.MelSpec(**made["spec"]).fingerprint()}
    assert rates == before | {"cpu/cpu": {"files_per_s": pytest.approx(100.0), **facts}}


def test_recommended_settings_are_stored_and_used(data, tmp_path, monkeypatch, clock):
    "With builds whose times are made up: smaller batches are faster, and no read-ahead is far slower when cold."

    def run(trials: BuildTrials, changes: dict[str, int], cache: str) -> float:
        clock.now_s += 0.001
        ahead = changes.get("read_ahead") == 0
        rate = 100.0 + 50 * ("files_per_batch" in changes) + 90 * ahead * (1 if cache == "warm" else -1)
        return len(trials.sample) / rate

    monkeypatch.setattr(BuildTrials, "run", run)
    figures = tune(data, budget_s=20, progress="none", work_dir=tmp_path)
    name = figures["builds"]["cold"][0]["name"]
    assert name.startswith("files_per_batch ")
    assert figures["settings"] == {"files_per_batch": int(name.split()[1])}
    assert figures["builds"]["warm"][0]["name"] == "read_ahead 0"
    assert f"leakmel build ... --files-per-batch {name.split()[1]}" in figures["advice"]
    tuned, _ = with_tuned(data, {})
    assert tuned.files_per_batch == figures["settings"]["files_per_batch"]
    (rate,) = (s["files_per_s"] for s in figures["builds"]["warm"] if s["name"] == name)
    assert figures["rate"] == {"engine": "cpu/cpu", "files_per_s": rate}
    assert (
        lm.build(data, out=tmp_path / "x.h5", pipeline=tuned, progress="none").summary["pipeline"][
            "tuned_from"
        ]
        == figures["path"]
    )


def test_uncertain_settings_are_not_stored(data, tmp_path, monkeypatch, clock):
    "The same, but with no time for enough rounds: the defaults stay, and the file that is kept changes nothing."

    def run(trials: BuildTrials, changes: dict[str, int], cache: str) -> float:
        clock.now_s += 0.001
        return len(trials.sample) / (200.0 if changes else 100.0)

    monkeypatch.setattr(BuildTrials, "run", run)
    figures = tune(data, budget_s=0.001, progress="none", work_dir=tmp_path)
    assert figures["settings"] == {}
    assert any("rounds of a comparison fit into the time" in note for note in figures["notes"])
    assert with_tuned(data, {}) == (PipelineConfig(), "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "message"),
    [(errno.EROFS, 1, "Read-only file system"), (errno.ENOSPC, 3, "No space left")],
)
@pytest.mark.parametrize("faster", [True, False])
def test_measurements_are_shown_if_they_cannot_be_stored(
    data, tmp_path, own_config, monkeypatch, capsys, clock, number, status, message, faster
):
    "The user's folder of settings cannot be written: a note of the error holds the figures, and how to do without."

    def run(trials: BuildTrials, changes: dict[str, int], cache: str) -> float:
        clock.now_s += 0.001
        return len(trials.sample) / (200.0 if faster and "files_per_batch" in changes else 100.0)

    def refusing(path: Path, content: bytes) -> Any:
        raise write_error(OSError(number, os.strerror(number)), path)

    monkeypatch.setattr(BuildTrials, "run", run)
    monkeypatch.setattr("leakmel.dataset.config.write_whole", refusing)
    words = ["tune", str(data), "--budget-s", "20", "--work-dir", str(tmp_path)]
    assert main(words) == status
    out, err = capsys.readouterr()
    assert "the settings were measured, but not stored for later builds" in err
    assert str(tuned_path(data)) in err
    assert message in err
    assert "\nstored for later builds in" not in out + err
    assert "builds, warm cache" in err, "the tables"
    assert ("leakmel build ... --files-per-batch " if faster else "builds need no options") in err
    assert main([*words, "--json"]) == status
    body = json.loads(capsys.readouterr().out)
    assert (body["ok"], body["exit_status"]) == (False, status)
    assert "path" not in body
    assert sorted(p.name for p in tmp_path.iterdir() if p != own_config.parent) == ["data"], "nothing is left"


@pytest.mark.slow
def test_trials_use_the_settings_of_the_build(data, tmp_path, monkeypatch, capsys):
    "A spec file, a setting beside it and waveforms: the trials make the rows that the same words make of a build."
    write_spec(tmp_path / "spec.json", {"preset": "overlap", "n_mels": 24, "n_fft": 256})
    words = ["--spec", str(tmp_path / "spec.json"), "--n-mels", "20", "--with-waveforms", "--engine", "cpu"]
    assert main(["build", str(data), "--out", str(tmp_path / "x.h5"), *words, "--quiet", "--no-tuned"]) == 0
    capsys.readouterr()
    built = list[tuple[lm.MelSpec, bool]]()
    right = BuildTrials.build

    def watched(trials: BuildTrials, name: str, config: PipelineConfig, **more: Any) -> Any:
        result = right(trials, name, config, **more)
        with lm.open_dataset(result.path) as ds:
            built.append((ds.spec, ds.waveforms is not None))
        return result

    monkeypatch.setattr(BuildTrials, "build", watched)
    monkeypatch.setattr(BuildTrials, "run", lambda trials, changes, cache: len(trials.sample) / 100.0)
    assert main(["machine", "tune", str(data), "--budget-s", "1", *words, "--quiet", "--full"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    named = f"spec of {tmp_path / 'spec.json'}: preset overlap@2, n_mels 24, n_fft 256"
    assert f"{named}; n_mels 20 was asked for instead of 24" in output
    with lm.open_dataset(tmp_path / "x.h5") as ds:
        assert set(built) == {(ds.spec, True)}
    assert len(built) >= 3
    assert main(["machine", "tune", str(data), *words, "--preset", "disjoint", "--quiet"]) == 2
    assert "the requested preset differs from the preset of the spec file" in capsys.readouterr().err
    assert main(["machine", "tune", str(data), "--spec", str(tmp_path / "none.json"), "--quiet"]) == 1
    assert "no such spec file" in capsys.readouterr().err


def test_tune_accepts_settings_that_change_a_build(capsys):
    wanted = {f.name for f in fields(lm.MelSpec)} - {"preset_name"} | {
        "preset",
        "spec",
        "with_waveforms",
        "engine",
        "device",
        "table",
        "pattern",
    }
    for command in ("build", "tune"):
        with pytest.raises(SystemExit):
            main([command, "--help-all"])
        assert {
            name.replace("-", "_")
            for name in re.findall(r"^  --([\w-]+)", capsys.readouterr().out, re.MULTILINE)
        } >= wanted, command


def test_sample_has_readable_recordings_only(data):
    sample = take_sample(scan(data), 1000)
    assert len(sample) == 41
    few = take_sample(scan(data), 5)
    assert len(few) == 5
    assert set(few.listings[0].paths) < set(sample.listings[0].paths)
    (data / "A").mkdir()
    assert len(few.label_names) == len(set(few.listings[0].label_ids.tolist()))
    for path in data.rglob("*.wav"):
        path.write_bytes(b"")
    with raises("nothing-to-tune-with", path=scan(data).listings[0].folder):
        take_sample(scan(data), 5)


@pytest.mark.slow
def test_cold_cache_is_checked(data, monkeypatch):
    "Where evicting does nothing, a trial that was to be cold does not count, and says so."
    trials = BuildTrials(take_sample(scan(data), 40), data.parent)
    assert trials.run({}, "warm") > 0
    monkeypatch.setattr(tune_module, "evict", lambda files: None)
    with raises("cache-state", StateError):
        trials.run({}, "cold")
    figures = tune(data, budget_s=1, progress="none", keep=False)
    assert set(figures["builds"]) == {"warm"}
    assert any(note.startswith("cold: not measured") for note in figures["notes"])


@pytest.mark.slow
def test_setting_that_changes_bytes_is_not_stored(data, tmp_path, monkeypatch):
    "A setting that changed a row would never be kept."
    right = BuildTrials.build

    def wrong(trials: BuildTrials, name: str, config: PipelineConfig, **more: Any) -> Any:
        result = right(trials, name, config, **more)
        if name == "chosen":
            result.path.write_bytes(result.path.read_bytes()[:-1] + b"x")
        return result

    monkeypatch.setattr(BuildTrials, "build", wrong)
    with raises("tuned-bytes-differ"):
        tune(data, budget_s=1, progress="none", work_dir=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["data"]


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing(data, tmp_path):
    (tmp_path / "work").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "leakmel", "tune", str(data), "--work-dir", str(tmp_path / "work"), "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(1200):
        if list((tmp_path / "work").glob("*/*")):
            break
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err, err
    assert os.listdir(tmp_path / "work") == []
    assert not tuned_path(data).exists()


@each("budget_s", [0, -1, float("nan"), float("inf")])
def test_invalid_time_is_refused(data, budget_s):
    with raises("invalid-effort"):
        tune(data, budget_s=budget_s)


# ---- the file of settings


def test_settings_survive_a_round_trip(data, own_config):
    assert find_tuned(data) is None
    path = write_tuned(data, body(settings={"files_per_batch": 7, "read_ahead": 0}))
    assert path.parent == own_config
    tuned = find_tuned(data)
    assert tuned is not None
    assert tuned_path(data) == path
    assert tuned["settings"] == {"files_per_batch": 7, "read_ahead": 0}
    config, before = with_tuned(data, {})[0], PipelineConfig()
    assert vars(config)["tuned_from"] == str(path)
    assert config.files_per_batch == 7
    assert all(getattr(config, name) == getattr(before, name) for name in vars(before) if name not in LIMITS)


@each(
    "changes",
    [
        {"machine": {"cpu": "Another 9000", "n_cores": 2, "gpu": None}},
        {"machine": this_machine() | {"n_cores": 1 + this_machine()["n_cores"]}},
        {"machine": None},
        {"leakmel_version": "0.0.1"},
        {"schema": 2},
        {"settings": {"read_workers": -1}},
        {"settings": {"compute_workers": 10**12}},
        {"settings": {"slots": 0}},
        {"settings": {"slots": True}},
        {"settings": {"files_per_batch": "64"}},
        {"settings": {"files_per_batch": 64.0}},
        {"settings": {"read_ahead": None}},
        {"settings": {"read_ahead": [[]]}},
        {"settings": {"device": "fake"}},
        {"settings": {"fsync": 0}},
        {"settings": {"cache_dir": "/x"}},
        {"settings": {"n_mels": 2}},
        {"settings": []},
    ],
)
def test_invalid_settings_file_is_refused_and_reported_once(data, caplog, changes):
    path = write_tuned(data, body())
    path.write_text(json.dumps(body(**changes)))
    with raises("invalid-tuned-file", DataError, path=path):
        read_tuned(path)
    assert with_tuned(data, {}) == (PipelineConfig(), "")
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert record.levelname == "WARNING"


@each(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000, b'{"schema": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut", "list", "no text", "null", "deep", "long number"],
)
def test_a_damaged_file_is_refused(data, caplog, content):
    path = write_tuned(data, body())
    path.write_bytes(content)
    with raises("invalid-tuned-file", DataError):
        read_tuned(path)
    assert find_tuned(data) is None
    assert len(caplog.records) == 1


def test_a_folder_of_settings_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "f").write_text("a file")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "f"))
    assert find_tuned(tmp_path) is None
    with pytest.raises(lm.LeakmelError, match="cannot be written"):
        write_tuned(tmp_path, body())


# ---- what a build does with it


def build_json(capsys: pytest.CaptureFixture, data: Path, out: Path, *words: str) -> dict[str, Any]:
    "The summary of a build on the command line."
    assert main(["build", str(data), "--out", str(out), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_build_uses_and_reports_tuned_settings_with_equal_bytes(data, tmp_path, capsys):
    plain = build_json(capsys, data, tmp_path / "plain.h5")
    assert "tuned_from" not in plain["pipeline"]
    path = write_tuned(data, body(settings={"files_per_batch": 3, "compute_workers": 1}))
    done = build_json(capsys, data, tmp_path / "tuned.h5")
    report = json.loads((tmp_path / "tuned.h5.report.json").read_text())
    for summary in (done, report):
        assert summary["pipeline"]["tuned_from"] == str(path)
        workers = summary["pipeline"]
        assert (workers["files_per_batch"], workers["compute_workers"]) == (3, 1)
    assert (tmp_path / "tuned.h5").read_bytes() == (tmp_path / "plain.h5").read_bytes()
    assert "tuned_from" not in build_json(capsys, data, tmp_path / "x.h5", "--no-tuned")["pipeline"]
    assert main(["build", str(data), "--out", str(tmp_path / "y.h5"), "--quiet", "--full"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (str(path), "files_per_batch 3", "--no-tuned"):
        assert part in text


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        ({"files_per_batch": 4}, {}, "files_per_batch 4 was asked for"),
        ({}, {"engine": "reference"}, "engine auto"),
        ({"device": "fake"}, {}, "device auto"),
    ],
)
def test_given_settings_precede_tuned_ones(data, given, more, message):
    write_tuned(data, body())
    config, line = with_tuned(data, given, **more)
    assert config == PipelineConfig(**given)
    assert "not used" in line
    assert message in line


def test_other_given_settings_cause_no_conflict(data):
    write_tuned(data, body())
    config, line = with_tuned(data, {"fsync": False, "files_per_batch": 3, "cache_dir": "/x"})
    assert (config.fsync, config.files_per_batch, config.cache_dir) == (False, 3, "/x")
    assert "not used" not in line


def test_tuned_defaults_are_not_reported(data):
    write_tuned(data, body(settings={}))
    assert with_tuned(data, {}) == (PipelineConfig(), "")


def test_a_user_without_a_home_can_build(data, monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert find_tuned(data) is None
    with raises("tuned-file-not-written", OutputError):
        write_tuned(data, body())


# ---- the build notebook and the library call


def planned(data: Path, out: Path, **more: Any) -> BuildPlan:
    "What the build notebook would do with its own parameters, and some of the user's."
    cell = next(
        c
        for c in json.loads((ROOT / "nbs" / "build.ipynb").read_text())["cells"]
        if c["metadata"].get("tags") == ["parameters"]
    )
    parameters: dict[str, Any] = {}
    exec("".join(cell["source"]), parameters)
    return plan_run(
        {name: parameters[name] for name in parameter_kinds(Build) if name in parameters}
        | {"data_root": str(data), "out": str(out)}
        | more,
        progress="none",
    )


def test_build_notebook_uses_and_reports_tuned_settings(data, tmp_path):
    plain = planned(data, tmp_path / "plain")
    assert "tuned" not in dict(plain.rows())
    path = write_tuned(data, body(settings={"files_per_batch": 3, "compute_workers": 1}))
    plan = planned(data, tmp_path / "tuned")
    assert dict(plan.rows())["tuned"] == (
        f"tuned settings of {path}: files_per_batch 3, compute_workers 1 (measured 2026-05-01; tuned=False ignores them)"
    )
    assert (plan.workers.files_per_batch, plan.workers.compute_workers) == (3, 1)
    (result,), (right,) = execute(plan, progress="none"), execute(plain, progress="none")
    assert result.summary["pipeline"]["tuned_from"] == str(path)
    assert result.path.read_bytes() == right.path.read_bytes()
    off = planned(data, tmp_path / "off", tuned=False)
    assert "tuned" not in dict(off.rows())
    assert off.config == PipelineConfig()


def test_notebook_parameters_precede_tuned_settings(data, tmp_path):
    write_tuned(data, body(settings={"files_per_batch": 3}))
    assert (plan := planned(data, tmp_path / "a", slots=2)).config.slots == 2
    assert plan.config.files_per_batch == 3
    assert (plan := planned(data, tmp_path / "b", files_per_batch=5)).config == PipelineConfig(
        files_per_batch=5
    )
    assert "not used: files_per_batch 5 was asked for" in dict(plan.rows())["tuned"]


def test_library_call_uses_tuned_settings_only_on_request(data, tmp_path):
    "A function does what its arguments say: no file of the user's changes it."
    write_tuned(data, body())
    assert "tuned_from" not in lm.build(data, out=tmp_path / "x.h5", progress="none").summary["pipeline"]
    config, _ = with_tuned(data, {})
    assert (
        lm.build(data, out=tmp_path / "y.h5", pipeline=config, progress="none").summary["pipeline"][
            "files_per_batch"
        ]
        == 3
    )
