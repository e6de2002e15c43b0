"The command line: exit codes, one JSON object, errors on stderr, no traceback; and a light import."

import argparse
import ast
import fcntl
import io
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
from contextlib import redirect_stderr, suppress
from dataclasses import fields
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import need
from each import each
from independent import check, leftovers, walk
from prose import words_in

import leakmel as lm
from leakmel import cli
from leakmel.cli import main
from leakmel.core.operation import make
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.recordings.demo import write_wav


def shell(
    *args: str | os.PathLike, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    "Run `python -m leakmel` in a process of its own; a traceback fails at once."
    command = [sys.executable, "-m", "leakmel", *[os.fspath(a) for a in args]]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        env=os.environ | (env or {}),
        cwd=cwd,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def say(capsys):
    "Run main() with some arguments; returns status, stdout and stderr."

    def run(*args: str | os.PathLike) -> tuple[int, str, str]:
        try:
            status = main([os.fspath(a) for a in args])
        except SystemExit as e:
            status = int(e.code or 0)  # argparse
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def data(tmp_path, make_wav) -> Path:
    "Nine recordings of 1 s, and one that is broken."
    for k in range(9):
        make_wav(tmp_path / "data" / ("LEAK" if k % 2 else "NOLEAK") / f"{k}.wav", seed=k)
    (tmp_path / "data" / "LEAK" / "x.wav").write_bytes(b"RIFF")
    return tmp_path / "data"


def test_error_without_a_majority_counts_six_kinds_of_recordings(tmp_path, make_wav, say):
    for k in range(9):  # half are short and differ, half are so much longer that no length fits both
        make_wav(tmp_path / "set" / "A" / f"odd{k}.wav", n=4000 - 300 * k, seed=k)
        make_wav(tmp_path / "set" / "A" / f"long{k}.wav", n=65_536 + 4096 * k, seed=k)
    for k in range(3):
        make_wav(tmp_path / "set" / "A" / f"plain{k}.wav", n=4096, seed=20 + k)
    status, _, err = say("build", tmp_path / "set", "--out", tmp_path / "x.h5", "--quiet")
    assert status == 1
    assert "found 3 of 1 s at 4096 Hz; 1 of " in err
    assert err.count(" s at 4096 Hz") == 6
    assert "and 13 more" in err


def only_json(text: str) -> dict:
    "The one JSON object that is all of stdout; NaN and Infinity are no JSON."

    def refuse(word: str):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


# ---- each command as a person would type it


# what a build with cached code does not import: front ends, compilers and data frames, which cost more time than all of its own modules
NOT_IN_A_BUILD = {
    *("numba", "pandas", "scipy", "torch", "torchaudio", "triton", "sklearn", "soundfile", "soxr"),
    *("plotly", "IPython", "ipywidgets", "matplotlib", "jupyterlab", "papermill", "nbformat", "tqdm"),
    *("asyncio", "multiprocessing", "unittest", "http", "sqlite3", "xml", "numpy.f2py", "numpy.testing"),
}
BUILD = """
import sys
from leakmel.cli import main
from leakmel.dataset import targets
plain = targets.run_threads
def run_threads(*a):
    print(*sys.modules)
    return plain(*a)
targets.run_threads = run_threads
assert main([*sys.argv[1:], "--quiet"]) == 0
print(*sys.modules)
"""


@pytest.mark.slow
def test_a_build_imports_little(demo, tmp_path):
    "Neither before its first batch nor later, once its compiled code is stored; see `bench_start` for the time."
    command = ["build", str(demo), "--split", "training", "--engine", "auto", "--device", "cpu", "--json"]
    for name in ("first", "second"):  # the first build may have to compile
        done = subprocess.run(
            [sys.executable, "-c", BUILD, *command, "--out", str(tmp_path / f"{name}.h5")],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    before, *_, after = done.stdout.splitlines()
    assert {"leakmel.mel.cpu_engine", "leakmel.recordings.native"} <= set(before.split())
    assert set(before.split()) & (NOT_IN_A_BUILD | {"numpy.ma"}) == set()
    assert set(after.split()) & NOT_IN_A_BUILD == set()


@pytest.mark.slow
def test_demo_build_and_verify(tmp_path):
    done = shell("init", "--demo", tmp_path / "demo", "--files", "12", "--faults")
    assert done.returncode == 0, done.stderr
    assert "planted" in done.stdout
    assert len(walk(tmp_path / "demo")) == 27
    done = shell("scan", tmp_path / "demo")
    assert done.returncode == 1  # one file lies in no label folder
    assert "no_label" in done.stdout
    done = shell(
        "build",
        tmp_path / "demo",
        "--split",
        "all",
        "--out",
        tmp_path / "out",
        "--sample-rate",
        "4096",
        "--duration-s",
        "10",
    )
    assert done.returncode == 0, done.stderr
    for split in ("TRAINING", "VALIDATION", "TESTING"):
        path = tmp_path / "out" / f"{split}_DATASET.H5"
        assert f"{path.name}: " in done.stdout
        check(path, tmp_path / "demo" / split)
    done = shell(
        "verify", tmp_path / "out" / "TRAINING_DATASET.H5", "--root", tmp_path / "demo", "--sample", "all"
    )
    assert done.returncode == 0, done.stdout
    assert "recomputed" in done.stdout
    assert done.stderr == ""
    assert shell("--version").stdout == f"leakmel {lm.__version__}\n"


# ---- exit codes and JSON


def test_json_is_one_object_and_nothing_else(data, tmp_path, say):
    status, out, err = say("init", "--demo", tmp_path / "demo", "--files", "6", "--json")
    assert (status, err) == (0, "")
    assert only_json(out)["n_files"] == 6
    status, out, err = say("scan", data, "--json", "--content")
    assert (status, err) == (1, "")
    assert only_json(out)["would_be_rejected"] == 1
    assert only_json(out)["found"] == 10
    status, out, err = say("build", data, "--out", tmp_path / "x.h5", "--json")
    assert (status, err) == (0, "")
    body = only_json(out)
    assert body["ok"] is True
    assert body["exit_status"] == 0
    assert body["rows"] + body["rejected"] == body["found"] == 10
    assert body["verified"]["ok"] is True
    status, out, err = say("verify", tmp_path / "x.h5", "--root", data, "--json")
    assert (status, err) == (0, "")
    assert only_json(out)["checked"] == 9
    status, out, err = say("build", tmp_path / "demo", "--split", "all", "--out", tmp_path / "o", "--json")
    assert status == 0
    assert [s["split"] for s in only_json(out)["splits"]] == ["TRAINING", "VALIDATION", "TESTING"]


def test_failures_are_json_with_a_message_on_stderr(data, tmp_path, say):
    target = tmp_path / "x.h5"
    cases: list[tuple[int, tuple[str | Path, ...]]] = [
        (1, ("build", tmp_path / "nowhere", "--out", target)),
        (1, ("scan", tmp_path / "nowhere")),
        (1, ("verify", tmp_path / "nowhere.h5")),
        (2, ("build", data, "--out", target, "--n-mels", "300")),
        (2, ("build", data, "--out", target, "--slots", "0")),
        (2, ("build", data, "--out", target, "--preset", "magic")),
        (2, ("init", "--demo", tmp_path / "d", "--files", "2")),
        (1, ("build", data, "--out", data / "x.h5")),
        (1, ("init", "--demo", data)),
    ]
    for status, args in cases:
        got, out, err = say(*args, "--json")
        body = only_json(out)
        assert (got, body["exit_status"], body["ok"]) == (status, status, False)
        plain, out, err = say(*args)
        assert plain == status
        if args[0] != "verify":
            assert err.startswith(f"leakmel {args[0]}{' --demo' * (args[0] == 'init')}: ")
            assert body["error"] in err
            assert out == ""
    assert leftovers(tmp_path) == ["data"]


@each(
    "args",
    [
        ("--nonsense",),
        ("magic",),
        ("build",),
        ("build", "x"),
        ("build", "x", "--out", "y", "--n-mels", "many"),
        ("verify", "x", "--sample", "-3"),
        ("build", "x", "--out", "y", "--check", "some"),
        ("build", "x", "--out", "y", "--engine", "steam"),
        ("init", "--demo"),
        ("machine", "docto"),
        ("build", "x", "--out", "y", "--mel-scale"),
    ],
)
def test_usage_errors(args, say):
    status, out, err = say(*args)
    assert status == 2
    assert out == ""
    assert err.startswith("leakmel")
    assert err.endswith("--help\n")
    assert err.count("\n") == 1, "one line that says what is wrong"


@each(
    ("words", "answer"),
    [
        ("predict x --modl y", "unknown option --modl: modl is unknown; did you mean model?"),
        ("train x --mode memmap --out y", "unknown option --mode: it is an option of leakmel build"),
        ("train x --out y --nights 3", "unknown option --nights. See"),
        ("build x --out y --check many", "--check must be a number (0 or more, or all), got 'many'"),
        ("predict x --model y --threshold 50%", "--threshold must be a number, got '50%'"),
        ("build x --out", "--out needs a value"),
        ("train x", "--out is missing: folder of the model"),
        ("verify", "file is missing: data set"),
        ("build x --out y --num-workers 4", "num_workers has no counterpart in leakmel (there are no worker"),
    ],
)
def test_what_is_wrong_with_an_option_is_a_sentence(say, words, answer):
    status, _, err = say(*words.split())
    assert (status, answer in err) == (2, True), err


def test_without_a_command_the_first_day_is_shown_and_a_misspelt_command_is_named(say):
    status, out, err = say()
    assert (status, err) == (2, "")
    shown = [line.split()[1] for line in out.splitlines() if line.startswith("  leakmel ")]
    assert shown == ["scan", "build", "train", "predict", "init"]
    assert max(map(len, out.splitlines())) <= 100
    for word, answer in (
        ("bulid", "bulid is unknown; did you mean build?"),
        ("Predict", "Predict is written predict"),
        ("nightley", "nightley is unknown; did you mean nightly?"),
    ):
        status, _, err = say(word, "x")
        assert status == 2
        assert f"unknown command: {answer}" in err


def test_invalid_choice_lists_valid_ones(data, tmp_path, say):
    status, _, err = say("build", data, "--out", tmp_path / "x.h5", "--mel-scale", "bark")
    assert status == 2
    assert "htk" in err
    assert "slaney" in err
    assert "parqet is unknown; did you mean parquet?" in say("export", data, "--to", "parqet")[2]
    assert "did you mean training?" in say("scan", data, "--split", "trainin")[2]
    assert "leakmel train mels --out detector" in say("predict", data)[2], "a way to a detector"
    status, _, err = say("build", data, "--out", tmp_path / "x.h5", "--split", "holdout")
    assert status == 2
    assert "training" in err


def test_insufficient_space_exits_with_3(data, tmp_path, say, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096))
    status, _, err = say("build", data, "--out", tmp_path / "x.h5")
    assert status == 3
    assert "bytes are missing" in err
    assert str(tmp_path) in err


def test_bad_data_set_exits_with_1(data, tmp_path, say):
    say("build", data, "--out", tmp_path / "x.h5", "--quiet")
    with h5py.File(tmp_path / "x.h5", "r+") as f:
        f["segments_mel"][3] = 0
    status, out, _ = say("verify", tmp_path / "x.h5")
    assert status == 1
    assert "NOT OK" in out
    assert out.count("do not match their digest") == 1, "one problem, said once"
    status, out, _ = say("verify", tmp_path / "x.h5", "--json")
    assert status == 1
    assert only_json(out)["ok"] is False
    assert only_json(out)["problems"]


def test_options_reach_the_build(data, tmp_path, say):
    status, out, _ = say(
        "build",
        data,
        "--out",
        tmp_path / "x.h5",
        "--preset",
        "overlap",
        "--n-mels",
        "20",
        "--f-max-hz",
        "1500",
        "--mel-norm",
        "none",
        "--rate",
        "reject",
        "--check",
        "all",
        "--engine",
        "reference",
        "--files-per-batch",
        "2",
        "--no-fsync",
        "--compression",
        "gzip",
        "--monitor-interval-s",
        "0",
        "--json",
    )
    body = only_json(out)
    assert status == 0
    for name, value in {
        "n_mels": 20,
        "f_max_hz": 1500.0,
        "mel_norm": None,
        "rate": "reject",
        "power": 2.0,
    }.items():
        assert body["spec"][name] == value
    for name, setting in {"files_per_batch": 2, "fsync": False, "compression": "gzip"}.items():
        assert body["pipeline"][name] == setting
    assert body["verified"]["checked"] == 9
    assert body["engine"].startswith("reference@")
    check(tmp_path / "x.h5", data)


def test_help_has_one_option_per_field(say):
    status, out, err = say("build", "--help-all")
    assert (status, err) == (0, "")
    words = out.replace(",", " ").split()
    for cls in (lm.MelSpec, PipelineConfig):
        for f in fields(cls):
            if f.name != "preset_name":
                assert "--" + f.name.replace("_", "-") in words, f.name
    assert "--preset-name" not in words
    for command in ("scan", "verify"):
        status, out, err = say(command, "--help")
        assert (status, err) == (0, "")
        assert "--json" in out
    new = {name: cls.command.words for name, cls in cli.OPERATIONS.items() if cls.command.words}
    assert len(new) == 11
    for name, words in new.items():  # old names
        status, out, err = say(name, "--help")
        line = f"`leakmel {name}` is now `leakmel {words}`; the old name works in this release\n"
        assert (status, err) == (0, line), name
        assert out.startswith(f"usage: leakmel {words}")
        example = shlex.split(cli.OPERATIONS[name].command.example)[1 + len(words.split()) :]
        with redirect_stderr(io.StringIO()):
            assert cli._parse([name, *example]) == cli._parse([*words.split(), *example]), name
    out = say("export", "--help")[1]
    assert "leakmel export --labels" in out.replace("\n", " ")
    status, out, _ = say("--help")
    assert all(f"  {cls.command.words or name}  " in out for name, cls in cli.OPERATIONS.items())
    assert len({line.split()[0] for line in out.splitlines() if re.match("  \\w", line)}) <= 17
    assert "exit status" in out


@pytest.mark.slow
@each("command", cli.OPERATIONS)
def test_help_fits_on_two_screens_and_help_all_has_every_option(command, say, monkeypatch):
    "60 lines of 100 columns; each option has a metavar and a help text in plain words."
    monkeypatch.setenv("COLUMNS", "102")  # argparse leaves two columns free
    words = cli.OPERATIONS[command].command.words or command
    status, short, err = say(*words.split(), "--help")
    assert (status, err) == (0, "")
    assert len(short.splitlines()) <= 60
    assert max(map(len, short.splitlines())) <= 100
    assert "--help-all" in short
    assert f"\nexample: leakmel {words} " in short
    status, whole, err = say(*words.split(), "--help-all")
    assert (status, err) == (0, "")
    commands = next(a for a in cli._parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    actions = commands.choices[command]._actions
    for action in actions:
        name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
        assert re.search(rf"(?m)^  .*{re.escape(name)}(?!\w)", whole), name
        assert action.help, name
        assert not words_in(action.help), f"{name}: {action.help}"
        assert action.nargs == 0 or action.metavar != "X", name
    needed = [a for a in actions if a.required and a.option_strings]
    status, _, err = say(*words.split()) if needed else (2, "", "")
    assert status == 2
    for action in needed:  # each is explained
        meaning = (
            "For a detector, "
            if "--model" in action.option_strings
            else f"{action.option_strings[0]} is missing: {str(action.help).split(';')[0]}"
        )
        assert meaning in err
    example = shlex.split(cli.OPERATIONS[command].command.example)
    args = cli._parse(example[1:])
    assert args.command == command, "the example is accepted"
    asked = make(cli.OPERATIONS[command], vars(args))
    again = shlex.split(asked.typed())
    assert make(cli.OPERATIONS[command], vars(cli._parse(again[1:]))) == asked, (
        "so that it can be typed again"
    )


def test_quiet_and_progress(data, tmp_path, say):
    status, out, err = say("build", data, "--out", tmp_path / "x.h5", "--quiet")
    assert (status, err) == (0, "")
    assert "9 rows + 1 rejected = 10 files found" in out
    assert "rejected: 1 x not_wav" in out
    (data / "LEAK" / "x.wav").unlink()
    for k in range(9):
        (data / ("LEAK" if k % 2 else "NOLEAK") / f"{k}.wav").rename(data / f"{k}.off")
    (data / "0.off").rename(data / "LEAK" / "0.wav")
    (data / "NOLEAK").rmdir()
    one = tmp_path / "one.h5"
    for words in (
        ("scan", data),
        ("build", data, "--out", one),
        ("verify", one),
        ("similar", data / "LEAK" / "0.wav", "--in", one),
    ):
        text = "".join(say(*words, "--full")[1:])
        assert not re.search(r"(?<![\w.,:~-])1 (?:more )?[a-z]{3,}s\b", text), text


def test_tables_with_labels_by_people_are_named_and_results_are_not(
    data, tmp_path, make_wav, say, monkeypatch
):
    row = "LEAK/1.wav,NOLEAK"
    decided = f"path,digest,label,by,when,note\nLEAK/1.wav,,NOLEAK,ann,2026-01-31T08:15:00Z,\n{row}"
    tables = {
        data / "table.csv": f"file,label\n{row}\n",
        data.parent / "labels.csv": decided,
        data / "scores.csv": f"path,label,score\n{row},0.5\n",
        data / "others.csv": "path,label\nLEAK/99.wav,NOLEAK\n",
        data / "torn.csv": 'path,label\n"',
    }
    for file, text in tables.items():
        file.write_text(text)
    table, labels = [*tables][:2]
    err = say("scan", data)[2]
    assert err.splitlines() == [
        f"{table} lists recordings with their labels and is not used: add --table {table}",
        f"{labels} has labels by people and is not used: leakmel build uses it with --labels",
    ]
    out = data.parent / "x.h5"
    err = say("build", data, "--out", out, "--labels", labels, "--quiet")[2]
    assert str(labels) not in err
    assert str(table) in err
    asked = (out, "--out", data.parent / "m", "--leak-label", "absent")
    err = say("train", *asked)[2]
    assert str(table) not in err, "scan and build have named it"
    assert str(labels) not in err, "the build used it"
    say("build", data, "--out", out, "--quiet")
    assert f"{labels} has labels by people and is not used: add --labels {labels}" in say("train", *asked)[2]
    # a table next to the only folder with recordings, which is no label; where folders are labels, one that names nearly all
    monkeypatch.chdir(tmp_path)
    for k in range(10):
        make_wav(tmp_path / "b" / "audio" / f"{k}.wav", seed=k)
    rows = [f"{k}.wav,{'leak' if k % 2 else 'calm'}\n" for k in range(10)]
    table = tmp_path / "b" / "list.csv"
    table.write_text(f"file,label\n{''.join(rows)}")
    table.with_name("few.csv").write_text(f"file,label\n{rows[0]}")
    command = "leakmel scan b/audio --table b/list.csv"
    assert f"next: {command}\n" in say("scan", "b")[1], "it names more than the other"
    out = say("build", "b", "--out", "b.h5", "--quiet")[1]
    assert "Every recording has the label audio, and a detector needs two: give a table" in out
    assert f"next: {command}\n" in out
    (tmp_path / "b" / "audio").rename(tmp_path / "b" / "leak")
    make_wav(tmp_path / "b" / "quiet" / "0.wav")
    table.write_text("file,label\n" + "".join(f"leak/{row}" for row in rows[:9]))
    assert "next: leakmel build b --out b.h5\n" in say("scan", "b")[1], "it names nine of eleven"
    table.write_text("file,label\n" + "".join(f"leak/{row}" for row in rows))
    command = "leakmel scan b --table b/list.csv"
    out = say("scan", "b", "--content")[1]
    assert f"next: {command} --content\n" in out
    assert say(*shlex.split(command)[1:])[0] == 0


def test_hostile_names_are_shown_on_one_line(tmp_path, make_wav, say):
    root = tmp_path / "data"
    make_wav(root / "A" / "good.wav")
    (root / "A" / os.fsdecode(b"a\n\x1b[31m\xff.wav")).write_bytes(b"")
    status, out, _ = say("scan", root, "--content")
    assert status == 1
    assert "\x1b" not in out
    assert "a\\n\\x1b[31m\\xff.wav" in out
    status, out, _ = say("build", root, "--out", tmp_path / "--x\n.h5")
    assert status == 0
    assert "--x\\n.h5" in out


# ---- the process around it


@pytest.mark.slow
@each("level", ["DEBUG", "warning", "nonsense", "", "17", "  info "])
def test_log_level(data, level):
    done = shell("scan", data, env={"LEAKMEL_LOG_LEVEL": level})
    assert done.returncode == 0
    assert "recordings" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_terminals_with_limited_encodings(tmp_path, make_wav, env):
    make_wav(tmp_path / "Größe 水" / "Straße 水" / "ä.wav")
    done = shell("build", tmp_path / "Größe 水", "--out", tmp_path / "Größe.h5", env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "Größe.h5").exists()
    done = shell("build", tmp_path / "fehlt 水", "--out", tmp_path / "Größe.h5", env=env)
    assert done.returncode == 1
    assert "no such folder" in done.stderr


@pytest.mark.slow
def test_closed_pipe_ends_the_command(data):
    for more in ([], ["--json"]):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "leakmel", "scan", str(data), *more]
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        os.close(writing)
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
        assert done.returncode in (0, 1)


def test_objects_of_triton_are_not_reported_as_leaked(data):
    "Its bindings list at the end of the process what the command did not collect; torch imports triton for an export, for example."
    pytest.importorskip("triton")
    code = "import sys, triton; from leakmel.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "scan", data], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "nanobind" in done.stderr) == (0, False), done.stderr


@pytest.mark.slow
def test_python_m_and_the_installed_command_are_the_same(data):
    script = Path(sys.executable).with_name("leakmel")
    need(script.exists(), "the installed command")
    done = subprocess.run([script, "scan", data], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == shell("scan", data).stdout


def test_signal_handlers_are_restored(data, say):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    say("scan", data)
    say("scan", data / "nowhere")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_main_works_in_a_thread(data):
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(main(["scan", os.fspath(data), "--json"])))
    thread.start()
    thread.join()
    assert got == [0]


# ---- import


HEAVY = (
    "numpy",
    "torch",
    "torchaudio",
    "pandas",
    "plotly",
    "IPython",
    "h5py",
    "scipy",
    "soundfile",
    "soxr",
    "psutil",
    "pynvml",
    "tqdm",
    "xxhash",
    "asyncio",
)


def modules_after(statement: str) -> set[str]:
    "Top-level modules that a fresh process holds after a statement."
    code = f"import sys\n{statement}\nprint(sorted({{m.split('.')[0] for m in sys.modules}}))"
    return set(
        ast.literal_eval(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
            ).stdout
        )
    )


def test_import_is_light():
    assert not modules_after("import leakmel") & set(HEAVY)
    assert not modules_after("import leakmel; dir(leakmel); leakmel.__version__") & set(HEAVY)
    later = {"torch", "torchaudio", "pandas", "plotly", "IPython", "soundfile", "soxr", "pynvml", "scipy"}
    assert not modules_after("import leakmel.dataset.pipeline, leakmel.cli") & later
    assert not modules_after("import leakmel; leakmel.MelSpec; leakmel.read_wav; leakmel.scan") & {
        "torch",
        "pandas",
        "h5py",
        "plotly",
        "IPython",
    }


def test_import_loads_few_modules():
    assert modules_after("import leakmel") <= modules_after("import importlib") | {"leakmel"}


def test_public_names():
    for name in lm.__all__:
        assert getattr(lm, name) is not None
    assert set(lm.__all__) <= set(dir(lm))
    assert {
        "build",
        "build_all",
        "verify",
        "open_dataset",
        "scan",
        "read_wav",
        "log_mel",
        "MelSpec",
        "LeakmelError",
        "__version__",
    } <= set(lm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        _ = lm.magic  # type: ignore[attr-defined]


# ---- what people get wrong -------------------------------------------------------------------------------------------


def test_scan_of_an_empty_folder_exits_with_1(tmp_path, say):
    (tmp_path / "empty").mkdir()
    status, out, _ = say("scan", tmp_path / "empty")
    assert status == 1
    assert "empty 0 (none)\ncannot be used:\n  1 x no_recordings" in out
    assert "no .wav or .wave file was found below" in out
    status, out, _ = say("scan", tmp_path / "empty", "--json")
    assert (only_json(out)["found"], only_json(out)["would_be_rejected"]) == (0, 0)


def test_scan_with_one_empty_split_exits_with_0(tmp_path, make_wav, say):
    make_wav(tmp_path / "set" / "TRAINING" / "LEAK" / "a.wav")
    (tmp_path / "set" / "TESTING").mkdir()
    status, out, _ = say("scan", tmp_path / "set", "--split", "all")
    assert status == 0
    assert "TESTING: no .wav or .wave file was found" in out
    status, out, _ = say("scan", tmp_path / "set", "--split", "testing")
    assert status == 1, "nothing else was asked for"


def test_scan_of_a_label_folder_and_of_a_file(data, say):
    status, out, _ = say("scan", data / "LEAK")
    assert status == 1
    assert out.count("this looks like one label folder: give its parent") == 1
    assert out.index("this looks like") < out.index("no_label")
    status, _, err = say("scan", data / "LEAK" / "1.wav")
    assert status == 1
    assert "1.wav: this is a file, but a folder is needed" in err


def test_scan_reports_sensors_in_several_splits(tmp_path, make_wav, say):
    for split, sensor in (("TRAINING", "H1"), ("TRAINING", "H2"), ("TESTING", "H1")):
        make_wav(tmp_path / "set" / split / "LEAK" / f"{sensor}~1~20250101_000000~5.wav")
    status, out, _ = say("scan", tmp_path / "set")
    assert status == 0
    assert "\n1 of 2 sensors lie in more than one split\n" in out
    _, out, _ = say("scan", tmp_path / "set", "--json")
    assert only_json(out)["groups"] == {"sensor": {"n": 2, "in_more_than_one_split": 1}}
    assert only_json(out)["hints"] == ["1 of 2 sensors lie in more than one split"]


def test_help_names_the_other_names_of_path(say):
    for command in ("scan", "build"):
        assert "path (or file, filename) and label" in " ".join(say(command, "--help")[1].split())


def test_verify_with_missing_root_or_unrelated_table(data, tmp_path, say):
    say("build", data, "--out", tmp_path / "x.h5", "--quiet")
    status, out, _ = say("verify", tmp_path / "x.h5", "--root", tmp_path / "nowhere")
    assert status == 1
    assert out.count("the data set was not compared") == 1
    assert "nowhere: no such folder" in out
    assert "cannot be read as a data set" not in out
    (tmp_path / "t.csv").write_text("path,label\nLEAK/1.wav,LEAK\n")
    status, out, err = say("verify", tmp_path / "x.h5", "--table", tmp_path / "t.csv")
    assert (status, out) == (2, "")
    assert "the labels of this data set come from folders: omit the table" in err


WRONG_WORDS = [
    ("build", "x", "--out", "y", "--mode", "fast"),
    ("scan", "x", "--most", "-1"),
    ("cache",),
    ("scan", "x", "--contents"),
    ("nothing",),
    ("predict", "x", "--modl", "y"),
]


@each("words", WRONG_WORDS)
def test_usage_errors_are_json(words, capsys):
    assert main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    body = json.loads(out)
    assert (body["ok"], body["exit_status"], body["error_type"]) == (False, 2, "UsageError")
    assert body["error"] in err
    assert main(list(words)) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("where", ["the folder", "the figures"])
def test_bench_checks_folders_before_measuring(tmp_path, say, where):
    "Figures of minutes are not lost for a folder that cannot be written to."
    (tmp_path / "file").write_text("mine")
    wrong, right = tmp_path / "file" / "b", tmp_path / "b"
    places = (wrong, "--out", right) if where == "the folder" else (right, "--out", wrong)
    status, _, err = say("machine", "bench", *places, "--files", "6")
    assert status == 1
    assert f"{wrong}: the folder cannot be written to (Not a directory). Choose another folder" in err
    assert (tmp_path / "file").read_text() == "mine"
    assert not list(tmp_path.rglob("*.wav"))


def test_missing_label_folder_and_missing_spec_file_have_remedies(tmp_path, make_wav, say):
    make_wav(tmp_path / "flat" / "x.wav")
    status, _, err = say("build", tmp_path / "flat", "--out", tmp_path / "x.h5")
    assert status == 1
    assert "expected one folder per label. Give the parent of the label folders" in err
    output = say("build", tmp_path / "flat", "--out", tmp_path / "x.h5", "--spec", tmp_path / "none.json")[2]
    assert "none.json" in output
    assert "explore.ipynb" in output


def test_cache_is_listed_in_columns(tmp_path, capsys):
    assert main(["machine", "cache", "list", "--cache-dir", str(tmp_path / "none")]) == 0
    assert "no such folder" in " ".join(capsys.readouterr().out.split())
    assert main(["machine", "cache", "clear", "--cache-dir", str(tmp_path), "--unused-days", "-1"]) == 2


# ---- on a terminal


def on_terminal(columns: int, *args: str | os.PathLike) -> tuple[int, str]:
    "Run the command on a terminal of some width; returns status and all that was written."
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command, output = [sys.executable, "-m", "leakmel", *[os.fspath(a) for a in args]], b""
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env=os.environ | {"COLUMNS": "", "LINES": ""}
    ) as process:
        os.close(theirs)
        with suppress(OSError):  # a terminal that nobody writes to any more
            while part := os.read(ours, 65536):
                output += part
    os.close(ours)
    return process.returncode, output.decode()


@pytest.mark.slow
def test_a_terminal_of_80_columns(data, tmp_path):
    status, output = on_terminal(80, "build", data, "--out", tmp_path / "x.h5")
    lines = output.replace("\r\n", "\n").split("\n")
    assert status == 0
    assert output.count("mode stream (auto was asked for)") == 1
    assert (
        max(
            len(part)
            for line in lines
            if "\x1b" not in line and str(tmp_path) not in line
            for part in line.split("\r")
        )
        <= 80
    )
    words = " ".join(output.split())
    assert "one build reads each recording once" in words, "no word is cut"
    assert "9 rows + 1 rejected = 10 files found" in words
    assert "files/s" in words
    assert "PERFORMANCE ANALYSIS" not in words
    status, full = on_terminal(80, "build", data, "--out", tmp_path / "y.h5", "--analysis", "full")
    assert (status, "PERFORMANCE ANALYSIS" in full) == (0, True)


@each(
    ("labels", "next_words", "said"),
    [
        (("LEAK", "NO_LEAK"), "--out detector", ""),
        (("kein Leck", "Leck"), "--out detector --leak-label Leck", ""),
        (
            ("clips_5s", "recordings"),
            "--out detector --leak-label LABEL",
            "Which label names leaks? Found clips_5s, recordings. Folders that are no labels: --table FILE",
        ),
        (
            ("LEAK_A", "LEAK_B"),
            "--out detector --leak-label LABEL",
            "Which label names leaks? Found LEAK_A, LEAK_B",
        ),
    ],
)
def test_a_build_says_which_label_names_leaks(tmp_path, capsys, labels, next_words, said):
    "Folders that are no labels are no advice for a training."
    for k in range(8):
        path = tmp_path / "own" / labels[k % 2] / f"{k}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_wav(path, np.random.default_rng(k).integers(-900, 900, 4096).astype(np.int16), 4096)
    words = [os.fspath(tmp_path / "own"), "--out", os.fspath(tmp_path / "x.h5"), "--quiet", "--check", "2"]
    assert main(["build", *words]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1].endswith(next_words)
    assert [line for line in lines if line.startswith("Which label")] == [said] * bool(said)
