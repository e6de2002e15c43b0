"Every remedy and next step that leakmel prints: its words exist, and the commands are run on the case that prints them."

import argparse
import ast
import errno
import json
import os
import re
import shlex
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from each import each

import leakmel as lm
from leakmel import cli
from leakmel.cli import main
from leakmel.core.errors import DataError, LeakmelError, UsageError, explain, similar_path, write_error
from leakmel.core.parameters import ParameterCheck
from leakmel.core.threads import machine_error
from leakmel.recordings.labels import read_labels
from leakmel.recordings.listing import existing_folder, list_error
from leakmel.recordings.problems import Problem, ProblemReport
from leakmel.recordings.tables import read_table_bytes
from leakmel.recordings.wav import MACHINE_FAULTS, read_error, read_wav

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of splits of a few sensors
    pytest.mark.usefixtures("one_thread", "few_trees"),
]
PACKAGE = Path(lm.__file__).parent
# parsed, not run: they need a network, a display, root, or a machine of another kind
NOT_RUN = {
    "pip": "installs from a network",
    "jupyter": "starts a server",
    "papermill": "takes a kernel; the notebooks are run by test_run_notebooks",
    "apt": "needs root and a network",
    "make": "belongs to the repository",
    "wsl": "belongs to Windows",
}
CNN = [
    "--detector",
    "cnn",
    "--epochs",
    "1",
    "--epoch-share",
    "0.1",
    "--batch-size",
    "64",
    "--channels",
    "2,4",
    "--device",
    "cpu",
]
Say = Callable[..., tuple[int, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    "Run a command in a folder of its own; returns status, and stdout with stderr."
    monkeypatch.chdir(tmp_path)

    def run(*words: str | os.PathLike) -> tuple[int, str]:
        status = main([os.fspath(w) for w in words])
        out, err = capsys.readouterr()
        return status, out + err

    return run


def commands_in(text: str) -> list[list[str]]:
    "Return the commands of leakmel that a text prints in backticks, in brackets, after a colon or on a line of their own."
    flat = re.sub(r"\s+", " ", text)
    found = re.findall(r"`(leakmel [^`]+)`", flat)
    found += re.findall(r"\((leakmel [^()]+?)(?: lists them[^()]*)?\)", flat)
    found += re.findall(r"^ *(leakmel [a-z]+ .+)$|: (leakmel [a-z]+ .+)$", text, re.M)
    words = [shlex.split(f if isinstance(f, str) else f[0] or f[1]) for f in found]
    named = [list(cli.with_name(w[1:], cli.GROUPS)) for w in words if not w[1].endswith(":")]
    return [w for w in named if w[0] in OPTIONS]


def _options() -> dict[str, argparse.ArgumentParser]:
    parser = cli._parser()
    return next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices


OPTIONS = _options()


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    "Yield the texts of a module; a value in a text is X."
    tree, inside = ast.parse(path.read_text()), set[int]()
    for n in ast.walk(tree):
        if isinstance(n, ast.JoinedStr):
            inside |= {id(v) for v in n.values}
            yield n.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in n.values)
    for n in ast.walk(tree):
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in inside:
            yield n.lineno, n.value


def remedies_of(path: Path) -> Iterator[tuple[int, str]]:
    "Yield the texts of a module that are given as remedy."
    for n in ast.walk(ast.parse(path.read_text())):
        if isinstance(n, ast.keyword) and n.arg == "remedy":
            for part in ast.walk(n.value):
                if isinstance(part, ast.JoinedStr):
                    yield (
                        n.value.lineno,
                        "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in part.values),
                    )
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield n.value.lineno, part.value


@pytest.mark.slow
def test_every_command_that_is_named_has_the_options_that_are_named() -> None:
    wrong, n = [], 0
    helps = [(0, a.help or "") for p in OPTIONS.values() for a in p._actions]
    for path in (Path("help"), *sorted(PACKAGE.rglob("*.py"))):
        for line, text in helps if path.name == "help" else texts_of(path):
            for found in re.finditer(
                r"leakmel ((?:machine )?[a-z]+\b(?: (?:--?[\w-]+|[A-Z][\w/.]*|X))*)", text
            ):
                command, *rest = cli.with_name(found[1].split(), cli.GROUPS)
                if command not in OPTIONS:
                    continue
                n += 1
                known = OPTIONS[command]._option_string_actions
                words = [w for w in rest if re.fullmatch(r"--[a-z][\w-]*", w)]
                wrong += [f"{path.name}:{line}: {command} {w}" for w in words if w not in known]
    assert not wrong
    assert n > 100


@pytest.mark.slow
def test_every_option_and_parameter_of_a_remedy_exists() -> None:
    options = {o for p in OPTIONS.values() for o in p._option_string_actions}
    options |= {word for cls in cli.OPERATIONS.values() for word in cls.command.words.split()}
    source = "\n".join(p.read_text() for p in PACKAGE.rglob("*.py"))
    names = set(re.findall(r"^\s+(\w+): .*[,=#]", source, re.M)) | set(re.findall(r'"(\w+)":', source))
    foreign = {"--gpus-per-task", "--system", "index", "mp_context", "data_files"}
    wrong, n = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, text in remedies_of(path):
            n += 1
            wrong += [
                f"{path.name}:{line}: {o}"
                for o in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)
                if o not in options | foreign
            ]
            wrong += [
                f"{path.name}:{line}: {w}="
                for w in re.findall(r"(?<![\w.'/-])([a-z][a-z_0-9]*)=", text)
                if w not in names | foreign
            ]
    assert not wrong
    assert n > 300


@each(
    ("command", "remedy", "expected"),
    [
        ("train", "or delete it with resume='never'", "or delete it with --resume never"),
        ("train", "train with use_compile=False", "train with --no-use-compile"),
        ("build", "again with fresh=True (--fresh)", "again with fresh=True (--fresh)"),
        ("build", "lower files_per_batch or slots", "lower --files-per-batch or slots"),
        ("build", "use /data/max_rejected/a_b", "use /data/max_rejected/a_b"),
        ("review", "use device='cpu'", "use device='cpu'"),  # it has no such option
        ("", "use device='cpu'", "use device='cpu'"),
    ],
)
def test_remedies_in_a_shell_name_options(command: str, remedy: str, expected: str) -> None:
    error = DataError("bad", code="data", remedy=remedy)
    assert cli._in_shell_words(error, command).lower() == f"bad. {expected}".lower()
    assert (
        cli._in_shell_words(DataError("bad files_per_batch", code="data"), command) == "bad files_per_batch"
    )


# ---- scan, build, join


def _split_folders(root: Path, make_wav: Any) -> list[str]:
    for k in range(12):
        split = ("TRAINING", "VALIDATION", "TESTING")[k % 3]
        make_wav(root / split / ("LEAK" if k % 2 else "NOLEAK") / f"H{k}~{k}~20250101_020000~8.wav", seed=k)
    return []


def _label_folders(root: Path, make_wav: Any) -> list[str]:
    for k in range(6):
        make_wav(root / ("LEAK" if k % 2 else "NOLEAK") / f"{k}.wav", seed=k)
    return []


def _by_table(root: Path, make_wav: Any) -> list[str]:
    for k in range(6):
        make_wav(root / f"{k}.wav", seed=k)
    rows = [f"{k}.wav,{'LEAK' if k % 2 else 'NOLEAK'},P{k}" for k in range(6)]
    (root.parent / "my table.csv").write_text("\n".join(["file,what,pipe", *rows]) + "\n")
    return ["--table", "my table.csv", "--columns", "label=what,sensor=pipe"]


def _by_pattern(root: Path, make_wav: Any) -> list[str]:
    for k in range(6):
        make_wav(root / f"{'LEAK' if k % 2 else 'NOLEAK'}_{k}.wav", seed=k)
    return ["--pattern", "{label}_{sensor}"]


LAYOUTS = (_split_folders, _label_folders, _by_table, _by_pattern)


@pytest.mark.slow
@each("name", ["recordings", "it's 2 $HOME", "-x", "Kanäle; ls"])
@each("layout", LAYOUTS)
def test_what_scan_and_build_propose_runs(
    layout: Callable[..., list[str]], name: str, tmp_path: Path, make_wav: Any, say: Say
) -> None:
    given = layout(tmp_path / name, make_wav)
    root = f"./{name}" if name.startswith("-") else name
    status, text = say("scan", root, *given)
    assert status == 0, text
    (command,) = commands_in(text)
    status, text = say(*command, "--quiet", "--check", "1")
    assert status == 0, text
    assert say(*command, "--quiet", "--check", "1")[0] == 0  # nothing to do


def test_problems_of_a_build_are_listed_by_the_command_that_it_prints(
    tmp_path: Path, make_wav: Any, say: Say
) -> None:
    root = tmp_path / "my data"
    given = _by_table(root, make_wav)
    (root / "4.wav").write_bytes((root / "2.wav").read_bytes())  # a copy
    status, text = say("build", "my data", *given, "--out", "x.h5", "--quiet", "--check", "1")
    assert status == 0, text
    command, train = commands_in(text)
    assert train[:1] == ["train"]
    assert command[:2] == ["scan", str(root)]
    status, text = say(*command)
    assert status == 0
    assert "1 x duplicate" in text


def test_unreadable_recordings_are_listed_by_the_command_that_is_printed(tmp_path: Path, say: Say) -> None:
    for label in ("A", "B"):
        (tmp_path / "my data" / label).mkdir(parents=True)
        (tmp_path / "my data" / label / "1.wav").write_bytes(b"RIFF")
    status, text = say("build", "my data", "--out", "x.h5", "--quiet")
    assert status == 1
    (command,) = commands_in(text)
    assert "2 x not_wav" in say(*command)[1] or "not_wav" in say(*command)[1]


def test_next_steps_of_parts_lead_to_the_data_set(tmp_path: Path, make_wav: Any, say: Say) -> None:
    _label_folders(tmp_path / "my data", make_wav)
    status, text = say("build", "my data", "--out", "my set.h5", "--part", "1/2", "--quiet")
    assert status == 0
    (join,) = commands_in(text)
    status, text = say(*join, "--quiet")
    assert status == 1
    (part,) = re.findall(r"\(--part (\S+)\)", text)  # "build the missing parts (--part 2/2), then join again"
    assert say("build", "my data", "--out", "my set.h5", "--part", part, "--quiet")[0] == 0
    assert say(*join, "--quiet", "--check", "1")[0] == 0


def test_a_split_that_was_not_named_is_named(tmp_path: Path, make_wav: Any, say: Say) -> None:
    _split_folders(tmp_path / "d", make_wav)
    status, text = say("build", "d", "--out", "x.h5", "--quiet")
    assert status == 2
    options = [o.split() for o in re.findall(r"--split \w+", text)]
    assert len(options) >= 2
    for k, option in enumerate(options):
        assert say("build", "d", "--out", f"x{k}.h5", *option, "--quiet", "--check", "1")[0] == 0


def test_labels_that_lie_elsewhere_are_found_by_the_command_that_is_printed(
    tmp_path: Path, make_wav: Any, say: Say
) -> None:
    "In the parent folder; in a table of a spreadsheet with its own names of columns; in folders one level deeper."
    _label_folders(tmp_path / "d", make_wav)
    status, text = say("scan", "d/LEAK")
    assert status == 1
    parent = re.search(r"give its parent (.+)$", text, re.M)
    assert parent is not None
    assert say("scan", parent[1])[0] == 0
    for k in range(8):
        make_wav(tmp_path / "loggers" / f"LOG{k // 2}_2026110{1 + k % 2}_0200.wav", seed=k)
        make_wav(tmp_path / "sites" / "AB"[k % 2] / ("Leck", "kein Leck")[k // 4] / f"{k}.wav", seed=k)
    cells = [f"LOG{k // 2}_2026110{1 + k % 2}_0200.wav;{('Leck', 'trocken')[k // 4]};{k},5" for k in range(8)]
    (tmp_path / "liste.csv").write_text("\n".join(["\ufeffDatei;Zustand;Pegel", *cells]), encoding="utf-8")
    status, text = say("scan", "loggers")
    assert status == 1
    assert "give its parent" not in text
    (command,) = commands_in(text)
    assert command == ["scan", "loggers", "--table", "liste.csv", "--columns", "path=Datei,label=Zustand"]
    status, text = say(*command)
    assert status == 0, text
    assert "groups: 4 sensors, read from the names by --pattern" in text
    (command,) = commands_in(text)
    assert say(*command, "--quiet", "--check", "1")[0] == 0
    given = ("--table", "liste.csv", "--columns", "path=Datei,label=Zustand")
    assert "ok: " in say("verify", "loggers.h5", "--root", "loggers", *given)[1]
    with lm.open_dataset("loggers.h5") as ds:
        assert ds.files["sensor"].nunique() == 4
        assert ds.files["start_time"][0] == "2026-11-01T02:00:00"
    assert say("build", "sites", "--out", "x.h5", "--quiet")[0] == 1
    (command,) = commands_in(say("scan", "sites")[1])
    status, text = say(*command)
    assert "Leck 4, kein Leck 4" in text
    assert "2 sessions" in text
    (command,) = commands_in(text)
    assert say(*command, "--quiet", "--check", "1")[0] == 0


# ---- lines that are not shown


@each("counts", [{"gain_1": 14, "silent": 1}, {"a": 250}, {"label_tied": 150, "b": 3}, {}])
def test_most_is_used_up_and_all_hides_nothing(counts: dict[str, int]) -> None:
    problems = [Problem(kind, f"{kind} {k}", "message") for kind, n in counts.items() for k in range(n)]
    for most in (None, len(problems), 10_000):
        report = ProblemReport(problems, most)
        lines = repr(report).splitlines()
        assert report.more == 0
        assert sum(line.startswith("    ") for line in lines) == len(problems)
        assert not any("more" in line for line in lines)
    for most in (1, 5, 20):
        report = ProblemReport(problems, most)
        shown = sum(line.startswith("    ") for line in repr(report).splitlines())
        assert shown >= min(most, len(problems))
        assert shown + report.more == len(problems)
    for most in (0, -1):
        assert ProblemReport(problems, most).more == len(problems)


def test_most_of_scan(tmp_path: Path, make_wav: Any, say: Say) -> None:
    for k in range(30):
        make_wav(tmp_path / "d" / "LEAK" / f"A~{k:06d}~20250101_020000~1.wav", seed=k)
    make_wav(tmp_path / "d" / "NOLEAK" / "B~000001~20250101_020000~8.wav", seed=99)
    (tmp_path / "d" / "NOLEAK" / "x.mp3").touch()
    n = len(json.loads(say("scan", "d", "--json")[1])["problems"])
    assert n >= 31
    for most in ("all", str(n), str(10 * n)):
        text = say("scan", "d", "--most", most)[1].partition("Proposed build")[0]
        assert sum(line.startswith("    ") for line in text.splitlines()) == n
        assert "--most" not in text
    text = say("scan", "d", "--most", "7")[1]
    assert f"and {n - 7} more (--most N" in text
    assert f"and {n} more" in say("scan", "d", "--most", "0")[1]
    for wrong in ("-1", "some", "1.5", ""):
        status, text = say("scan", "d", "--most", wrong)
        assert status == 2
        assert "0 or more, or all" in text


# ---- detectors


def _set_of(tmp_path: Path, make_wav: Any, sensors: dict[str, str], name: str = "d", n: int = 4) -> Path:
    "Build a set; of each sensor, recordings of the labels whose first letters are given."
    labels = {"L": "LEAK", "N": "NOLEAK", "P": "PUMP"}
    seed = 0
    for sensor, own in sensors.items():
        for letter in own:
            for k in range(n):
                seed += 1
                file = f"{sensor}~{seed:06d}~20250101_0200{k:02d}~8.wav"
                make_wav(tmp_path / name / labels[letter] / file, n=4096, seed=seed)
    out = tmp_path / f"{name}.h5"
    lm.build(tmp_path / name, out=out, spec={"duration_s": 1.0}, progress="none", check=0)
    return out


TRAININGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "one sensor": ({"A": "LN"}, []),
    "one sensor, a network": ({"A": "LN"}, CNN),
    "a sensor for each label": ({"A": "L", "B": "N"}, []),
    "a sensor for each label, a network": ({"A": "L", "B": "N"}, CNN),
    "leaks at one sensor": ({"A": "LN", "B": "N", "C": "N"}, []),
    "leaks at one sensor, a network": ({"A": "LN", "B": "N", "C": "N"}, CNN),
    "four sensors": (dict.fromkeys("ABCD", "LN"), []),
    "four sensors, a network": (dict.fromkeys("ABCD", "LN"), CNN),
    "another leak label, a network": (dict.fromkeys("ABCD", "NP"), ["--leak-label", "PUMP", *CNN]),
    "a label left out, a network": (
        {"A": "LNP", "B": "LN", "C": "LN"},
        ["--leave-out", "PUMP", "--kind", "binary", *CNN],
    ),
}


@pytest.mark.slow
@each("case", TRAININGS)
def test_next_steps_of_a_training_run(case: str, tmp_path: Path, make_wav: Any, say: Say) -> None:
    sensors, options = TRAININGS[case]
    path = _set_of(tmp_path, make_wav, sensors, "my d")
    other = _set_of(tmp_path, make_wav, {"Y": "".join(sorted({*"".join(sensors.values())}))}, "other")
    status, text = say("train", path, "--out", "my model", *options, "--quiet")
    assert status == 0, text
    flat = " ".join(text.split())
    steps = commands_in(text)
    assert "--cross-validate" not in flat, "the training made one where it is possible"
    assert steps
    card = (tmp_path / "my model" / "model_card.md").read_text()
    assert ("--cross-validate" in card) == ("--cross-validate" in flat)
    for step in steps:
        words = [str(other) if w == "TEST_SET" else "my d" if w == "FOLDER" else w for w in step]
        status, text = say(*words, "--quiet")
        assert status == 0, (words, text)


@pytest.mark.slow
def test_a_number_of_false_alarms_is_advised_where_scores_are_kept(
    small_sets: Path, tmp_path: Path, say: Say
) -> None:
    from dataclasses import replace

    from leakmel.detector.model.card import EvaluationRecord
    from leakmel.detector.model.detector import load_detector, steps_of

    assert say("train", small_sets, "--out", "m", "--detector", "spectral", "--quiet")[0] == 0
    detector = load_detector(tmp_path / "m" / "model.pt")
    better = replace(detector, evaluations=tuple(replace(e, beats=True) for e in detector.evaluations))
    assert any("--false-alarms" in step for step in steps_of(better))
    assert not any("--false-alarms" in step for step in steps_of(replace(better, held_out=None)))
    assert isinstance(detector.evaluations[0], EvaluationRecord)
    for command in (c for step in steps_of(better, model="m/model.pt") for c in commands_in(step)):
        places = {
            "FOLDER": small_sets.parent / "demo" / "TESTING",
            "TEST_SET": small_sets / "TESTING_DATASET.H5",
        }
        assert say(*(places.get(w, w) for w in command), "--quiet")[0] == 0, command


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "search"])
def test_divisions_that_are_proposed_are_possible_for_the_command(
    command: str, tmp_path: Path, make_wav: Any, say: Say
) -> None:
    path = _set_of(tmp_path, make_wav, {"A": "LN", "B": "LN", "C": "N", "D": "N", "E": "N"})
    more = [] if command == "train" else ["--trials", "1", "--again", "0"]
    words = [command, path, "--group", "sensor", "--quiet", *CNN, *more]
    status, text = say(*words, "--out", "a")
    assert status == 1
    ways = re.findall(r"--(?:validation none|cross-validate|group \S+|leave-out \S+|allow-leaky-split)", text)
    assert ways
    assert command == "train" or not {"--validation none", "--cross-validate"} & {*ways}
    for k, way in enumerate(ways):
        base = [w for w in words if w not in ("--group", "sensor")] if way.startswith("--group") else words
        status, text = say(*base, *way.split(), "--out", f"out{k}")
        assert status == 0, (way, text)


# ---- options that an error proposes: each is added to the command that failed


def _bad_file(tmp_path: Path, make_wav: Any) -> None:
    _label_folders(tmp_path / "d", make_wav)
    (tmp_path / "d" / "LEAK" / "x.wav").write_bytes(b"RIFF")


def _sets(tmp_path: Path, make_wav: Any) -> None:
    _set_of(tmp_path, make_wav, dict.fromkeys("ABCD", "LN"))
    lm.train(
        tmp_path / "d.h5", out=tmp_path / "m", settings=lm.TrainSettings(detector="spectral"), progress=False
    )


def _two_kinds(tmp_path: Path, make_wav: Any) -> None:
    for k in range(12):
        make_wav(tmp_path / "d" / "AB"[k % 2] / f"{k}.wav", n=4096 * (1 + 9 * (k % 4 > 1)), seed=k)


def _by_person(tmp_path: Path, make_wav: Any) -> None:
    _by_table(tmp_path / "d", make_wav)
    text = (tmp_path / "my table.csv").read_text()
    (tmp_path / "my table.csv").write_text(re.sub(",(NO)?LEAK,", ",,", text))
    lm.build(
        _labelled(tmp_path, make_wav),
        out=tmp_path / "d.h5",
        spec={"duration_s": 1.0},
        progress="none",
        check=0,
    )
    lm.train(
        tmp_path / "d.h5",
        out=tmp_path / "MODEL",
        settings=lm.TrainSettings(detector="spectral"),
        progress=False,
    )


def _labelled(tmp_path: Path, make_wav: Any) -> Path:
    for k in range(16):
        make_wav(
            tmp_path / "l" / ("LEAK" if k % 2 else "NOLEAK") / f"S{k // 4}~{k}~20250101_020000~8.wav", seed=k
        )
    return tmp_path / "l"


BUILD = "build d --out x.h5 --quiet --check 1"
# what makes the case, the command, the pattern of what the error proposes, and the status of the command with it
PROPOSED: dict[str, tuple[Callable[[Path, Any], None], str, str, int]] = {
    "a bad file is rejected": (_bad_file, f"{BUILD} --on-bad-file stop", r"(--on-bad-file reject)", 0),
    "more may be rejected": (_bad_file, f"{BUILD} --max-rejected 0", r"(--max-rejected)", 0),
    "the table has no labels": (
        _by_person,
        f"{BUILD} --table 'my table.csv' --columns sensor=pipe,label=what",
        r"\((leakmel .+\.csv)\)",
        0,
    ),
    "a model exists": (
        _sets,
        "train d.h5 --out m --quiet --detector spectral --seed 1",
        r"(--resume never)",
        0,
    ),
    "an unfinished word": (_bad_file, f"{BUILD} --max-rejectd 0.5", r"did you mean (\S+)\?", 0),
    "a detector is exported": (_sets, "export m --out x.onnx --quiet", r"(--onnx)", 0),
    "settings of two kinds": (_two_kinds, BUILD, r"(--duration-s \d+)", 0),
    "errors need scores": (_sets, "review d --no-lab --queue errors", r"(--scores cross_validation.csv)", 0),
    "folds need a wish": (_sets, "train d.h5 --out f --quiet --folds 2", r"(--cross-validate)", 0),
    "a report needs a file": (_sets, "predict d --model m --quiet --report", r"(--out scores.csv)", 0),
    "figures need a folder": (_sets, "evaluate d.h5 --model m --quiet --figures", r"(--out DIR)", 0),
}


@pytest.mark.slow
@each("case", PROPOSED)
def test_what_an_error_proposes_works(case: str, tmp_path: Path, make_wav: Any, say: Say) -> None:
    make, line, pattern, wanted = PROPOSED[case]
    make(tmp_path, make_wav)
    words = shlex.split(line)
    if case == "a detector is exported":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    status, text = say(*words)
    assert status, text
    found = re.search(pattern, " ".join(text.split()))
    assert found is not None, text
    more = shlex.split(found[1])
    if case == "the table has no labels":
        words = more[1:]
    elif case == "more may be rejected":
        words[words.index("--max-rejected") + 1] = "0.9"
    elif case == "a bad file is rejected":
        words[words.index("--on-bad-file") + 1] = more[1]
    elif case == "an unfinished word":
        words[words.index("--max-rejectd")] = f"--{more[0].replace('_', '-')}"
    else:
        words += more
    if "cross_validation.csv" in words:
        assert say("train", "d.h5", "--out", ".", "--cross-validate", "--folds", "2", "--quiet")[0] == 0
    status, text = say(*words)
    assert status == wanted, (words, text)


def test_commands_of_a_fetched_set_run(tmp_path: Path, say: Say) -> None:
    from made_sets import hongkong_hydrophones

    for name, data in hongkong_hydrophones(1.0).items():
        (tmp_path / "down loads" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "down loads" / name).write_bytes(data)
    status, text = say(
        "fetch", "hongkong-hydrophones", "--from", "down loads", "--out", "my set", "--yes", "--quiet"
    )
    assert status == 0, text
    commands = commands_in(text)
    assert [c[0] for c in commands] == ["scan", "build", "train"]
    for command in commands[:2]:
        status, text = say(*command, *(["--check", "1"] if command[0] == "build" else []), "--quiet")
        assert status == 0, text
    assert argparse.Namespace is type(
        cli._parse(commands[2])
    )  # hundreds of fits: test_fetch_sets has such a run


def test_commands_in_guides_and_remedies_are_parsed() -> None:
    n = 0
    for name, cls in cli.OPERATIONS.items():
        assert cli._parse(shlex.split(cls.command.example)[1:]).command == name
    for path in sorted((PACKAGE.parent / "nbs").rglob("*.ipynb")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            text = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            for line in re.findall(r"^(leakmel [a-z]+ .+[^\\])$", text, re.M):
                words = shlex.split(line.split(" | ")[0].split(" > ")[0].split(" && ")[0], comments=True)
                command, *rest = cli.with_name(words[1:], cli.GROUPS)
                if command in OPTIONS and "..." not in words:
                    n += 1
                    known = OPTIONS[command]._option_string_actions
                    wrong = [w for w in rest if w.startswith("--") and w.partition("=")[0] not in known]
                    assert not wrong, (path.name, line)
    assert n > 30


# ---- paths


def _variants(name: str) -> dict[str, str]:
    "Return ways of writing the name of a file that exists."
    return {
        "blank at the end": f"{name} ",
        "blank in front": f" {name}",
        "newline": f"{name}\n",
        "quotes": f'"{name}"',
        "single quotes": f"'{name}'",
        "other form of Unicode": unicodedata.normalize("NFD", name),
        "zero width": f"{name}\u200b",
        "case": name.swapcase(),
    }


COMMANDS_OF_PATHS: dict[str, Callable[[str], list[str]]] = {
    "scan": lambda p: ["scan", p],
    "build": lambda p: ["build", p, "--out", "x.h5", "--check", "1"],
    "table": lambda p: ["scan", "d", "--table", p],
    "spec": lambda p: ["build", "d", "--spec", p, "--out", "x.h5", "--check", "1"],
    "similar": lambda p: ["similar", p, "--in", "d"],
    "labels": lambda p: ["build", "d", "--labels", p, "--out", "x.h5", "--check", "1"],
    "train": lambda p: ["train", p, "--out", "m"],
    "predict": lambda p: ["predict", "d", "--model", p],
    "page": lambda p: ["page", p],
    "card": lambda p: ["card", p],
    "doctor": lambda p: ["doctor", p],
    "review": lambda p: ["review", p, "--no-lab"],
    "fetch": lambda p: ["fetch", "dongguan", "--yes", "--from", p],
    "embed": lambda p: ["embed", "d", "--out", "e.npz", "--model", p],
    "space": lambda p: ["search", "s.h5", "--out", "s", "--space", p],
}
FOLDERS = ("scan", "build", "doctor", "review")


def _in_turn(commands: Iterable[str], kinds: Iterable[str]) -> list[tuple[str, str]]:
    "Pairs for a rule that all commands share: the first command with each kind, each other one with two of them in turn."
    first, *others = commands
    names = list(kinds)
    half = max(1, len(names) // 2)
    turns = [
        (command, names[(k + step) % len(names)]) for k, command in enumerate(others) for step in (0, half)
    ]
    return [*((first, name) for name in names), *turns]


@pytest.mark.slow
@each(("command", "variant"), _in_turn(COMMANDS_OF_PATHS, _variants("é")))
def test_a_path_that_looks_like_another_one_is_answered_by_it(
    command: str, variant: str, tmp_path: Path, make_wav: Any, say: Say
) -> None:
    _label_folders(tmp_path / "d", make_wav)
    exact = "Kanäle 2"
    if command in FOLDERS:
        _label_folders(tmp_path / exact, make_wav)
    else:
        (tmp_path / exact).write_text("x")
    if command == "space":
        lm.build(tmp_path / "d", out=tmp_path / "s.h5", spec={"duration_s": 1.0}, progress="none", check=0)
    given = _variants(exact)[variant]
    status, text = say(*COMMANDS_OF_PATHS[command](given), "--quiet")
    assert status != 0
    assert f'there is "{tmp_path / exact}"' in text, text
    found = re.search(r'but there is "(.+?)"', text)
    assert found is not None
    _, text = say(*COMMANDS_OF_PATHS[command](found[1]), "--quiet")
    assert "check the path" not in text.lower()


def test_nothing_is_proposed_where_nothing_looks_alike(tmp_path: Path, say: Say) -> None:
    (tmp_path / "recordings").mkdir()
    for given in ("sounds", "recordings2", "~nobody", "recordings/x", "recordings/ /y", "..."):
        assert similar_path(tmp_path / given) is None
        assert "but there is" not in say("scan", given)[1]


def test_home_is_named(tmp_path: Path, make_wav: Any, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    _label_folders(tmp_path / "home" / "rec", make_wav)
    assert f'there is "{tmp_path / "home" / "rec"}"' in say("scan", "~/rec")[1]


LONG = {
    "path": "/".join(["abcdefghi"] * 420),
    "name": "x" * 256,
    "name of many bytes": "ä" * 200,
    "both": "/".join(["y" * 300] * 20),
}
WRITING: dict[str, Callable[[str], list[str]]] = {
    "out": lambda p: ["build", "d", "--out", p],
    "demo": lambda p: ["demo", p, "--files", "6"],
    "init": lambda p: ["init", p],
    "save": lambda p: ["scan", "d", "--save", p],
}


@pytest.mark.slow
@each(("command", "long"), _in_turn([*COMMANDS_OF_PATHS, *WRITING], LONG))
def test_a_path_that_is_too_long_is_said_to_be_too_long(
    command: str, long: str, tmp_path: Path, make_wav: Any, say: Say
) -> None:
    _label_folders(tmp_path / "d", make_wav)
    if command == "space":
        lm.build(tmp_path / "d", out=tmp_path / "s.h5", spec={"duration_s": 1.0}, progress="none", check=0)
    status, text = say(*(COMMANDS_OF_PATHS | WRITING)[command](LONG[long]), "--quiet")
    assert status == 1
    assert "ENAMETOOLONG" in text
    assert "shorter names" in text
    assert "permission" not in text
    assert ("4,095 bytes" in text) == (long in ("path", "both"))


# ---- causes that the system names

CAUSES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a file, not a folder",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "for writing",
    errno.ELOOP: "symbolic link",
    errno.ENAMETOOLONG: "shorter names",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EMFILE: "ulimit -n",
    errno.ENFILE: "ulimit -n",
    errno.EIO: "check the disk",
    errno.ESTALE: "mount it again",
    errno.ETIMEDOUT: "mount it again",
    errno.EBUSY: "other program",
    errno.EFBIG: "larger files",
    errno.EISDIR: "this is a folder",
    errno.EXDEV: "check the file system",
}
ENTRY_POINTS: dict[str, Callable[[OSError, Path], LeakmelError | BaseException]] = {
    "list": lambda e, p: list_error(e, p),
    "read": lambda e, p: read_error(e, os.fsencode(p)),
    "write": lambda e, p: write_error(e, p),
    "thread": lambda e, p: machine_error(OSError(e.errno, "", str(p))),
}


def _raised(work: Callable[[], object]) -> LeakmelError:
    with pytest.raises(LeakmelError) as info:
        work()
    return info.value


def _failing(
    name: str, work: Callable[[Path], object], owner: Any = os
) -> Callable[[OSError, Path], LeakmelError]:
    "Let a call of the system fail for one path."

    def run(error: OSError, path: Path) -> LeakmelError:
        real = getattr(owner, name)

        def call(given: Any, *more: Any, **named: Any) -> Any:
            if not isinstance(given, int) and os.fspath(given) in (str(path), os.fsencode(path)):
                raise OSError(error.errno, os.strerror(error.errno or 0), str(path))
            return real(given, *more, **named)

        with pytest.MonkeyPatch.context() as m:
            m.setattr(owner, name, call)
            return _raised(lambda: work(path))

    return run


INJECTED = {
    "existing folder": _failing("stat", existing_folder),
    "table": _failing("open", read_table_bytes),
    "labels": _failing("open", read_labels),
    "recording": _failing("open", read_wav),
    "spec": _failing("open", lambda p: lm.load_spec(p) if hasattr(lm, "load_spec") else existing_spec(p)),
}


def existing_spec(path: Path) -> object:
    from leakmel.dataset.reader import _load

    return _load(path)


@each("entry", [*ENTRY_POINTS, *INJECTED])
@each("number", CAUSES, ids=lambda n: errno.errorcode[n])
def test_each_cause_has_its_remedy_at_each_entry(number: int, entry: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("path,label\n")
    error = (ENTRY_POINTS | INJECTED)[entry](OSError(number, os.strerror(number)), path)
    assert isinstance(error, LeakmelError)
    text = str(error)
    if entry in ("read", "recording") and number in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        assert error.code == "changed"  # a recording that was listed is gone: the build reports it
        return
    if entry == "existing folder" and number in (errno.ENOENT, errno.ENOTDIR):
        assert error.code == "no-such-folder"
        return
    if entry == "spec" and number == errno.ENOENT:
        assert "spec file" in text
        return
    assert errno.errorcode[number] in text
    if entry != "write" or number != errno.ENOENT:
        assert CAUSES[number] in (error.remedy or ""), error.remedy
    if number not in (errno.EACCES, errno.EPERM):
        assert "permission" not in (error.remedy or "")
    if number in MACHINE_FAULTS and entry in ("list", "read", "recording", "existing folder"):
        assert error.code == "io-fault"


def test_causes_that_can_be_made(tmp_path: Path, say: Say) -> None:
    (tmp_path / "file").touch()
    os.symlink("loop", tmp_path / "loop")
    os.symlink("nowhere", tmp_path / "dangling")
    texts = {name: say("scan", name)[1] for name in ("file", "file/x", "loop", "dangling", "none")}
    assert "a folder is needed" in texts["file"]
    assert "no such folder" in texts["file/x"]
    assert "symbolic link" in texts["loop"]
    assert "no such folder" in texts["dangling"]
    assert "no such folder" in texts["none"]
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0)
        assert "permission" in say("scan", "closed")[1]
        assert "permission" in say("scan", "closed/x")[1]
        os.chmod(tmp_path / "closed", 0o700)
    assert explain(ValueError("embedded null byte"), "a\0b")[0] == "the path holds a zero byte"


# ---- parameters by papermill

PATH_LIKE = ["2024", "007", "1e3", "1.5", "True", "False", "nan", "1_000", "inf"]


@each("typed", PATH_LIKE)
def test_a_text_that_papermill_changes_is_given_by_r(typed: str) -> None:
    resolve = need_papermill()
    check = ParameterCheck({})
    kinds: dict[str, tuple[type | None, ...]] = {"data_root": (str, None), "out": (str,), "n": (int,)}
    for name in ("data_root", "out"):
        with pytest.raises(UsageError) as info:
            check.take({name: resolve(typed)}, kinds)
        words = re.search(rf"papermill: -r {name} (\S+) \(as it was typed", str(info.value))
        assert words is not None
        if str(resolve(typed)) == typed:
            assert words[1] == typed
        assert check.take({name: words[1]}, kinds) == {name: words[1]}  # -r gives the text


@each(
    ("name", "raw", "value"),
    [
        ("fresh", "true", True),
        ("fresh", "False", False),
        ("n", "5", 5),
        ("share", "0.5", 0.5),
        ("n", "none", None),
    ],
)
def test_a_value_that_was_given_as_text_is_given_by_p(name: str, raw: str, value: object) -> None:
    resolve = need_papermill()
    check = ParameterCheck({})
    kinds: dict[str, tuple[type | None, ...]] = {"fresh": (bool,), "n": (int, None), "share": (float,)}
    with pytest.raises(UsageError) as info:
        check.take({name: raw}, kinds)
    words = re.search(rf"papermill: -p {name} (\S+)", str(info.value))
    assert words is not None
    assert check.take({name: resolve(words[1])}, kinds) == {name: value}
    for nonsense in ("x", "-", "1-2", ""):
        with pytest.raises(UsageError) as info:
            check.take({name: nonsense}, kinds)
        assert "papermill" not in str(info.value)


def need_papermill() -> Callable[[str], Any]:
    return pytest.importorskip("papermill.cli")._resolve_type
