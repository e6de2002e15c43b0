"The first half hour on folders as users have them: what README and the printed next steps say is typed, and the answer is right."

import csv
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from each import each

from leakmel.recordings.demo import write_wav

pytestmark = [pytest.mark.site, pytest.mark.slow]
RATE = 8000
# a noun in the plural behind 1
NOUNS = "recording file row group sensor leak line name other problem label fit trial segment frame epoch fold notebook"
ONE = re.compile(rf"(?<![\w.,:~-])1 (?:more )?(?:{NOUNS.replace(' ', '|')})s\b")


def put(path: Path, is_leak: bool, seed: int, pipe: int, seconds: float = 4.0) -> None:
    "Write a recording: hum of a pipe, and in it the noise of a leak."
    rng, n = np.random.default_rng(seed), int(RATE * seconds)
    hz = np.fft.rfftfreq(n, 1 / RATE)
    spectrum = 1 / (1 + (hz / (150 + 20 * pipe)) ** 2)
    spectrum += is_leak * 0.35 * np.exp(-(((hz - 600 - 40 * pipe) / 250) ** 2))
    sound = np.fft.irfft(np.fft.rfft(rng.normal(size=n)) * spectrum, n)
    path.parent.mkdir(parents=True, exist_ok=True)
    level = rng.uniform(600, 2000) / sound.std()
    write_wav(path, (sound * level).clip(-32_000, 32_000).astype(np.int16), RATE)


def put_table(
    file: Path, rows: Sequence[Sequence[str]], delimiter: str = ",", encoding: str = "utf-8"
) -> None:
    "Write a table as a program saves it."
    with open(file, "w", encoding=encoding, newline="") as text:
        csv.writer(text, delimiter=delimiter).writerows(rows)


def unwrapped(text: str) -> list[str]:
    "Join the lines that were wrapped at 100 characters."
    lines: list[str] = []
    last = ""
    for line in text.splitlines():
        is_rest = line.startswith("  ") and len(last) + 1 + len(line.split()[0]) > 100
        lines = [*lines[:-1], f"{lines[-1]} {line.strip()}"] if lines and is_rest else [*lines, line]
        last = line
    return lines


class Walk:
    "A person at a shell, in a folder, with a home folder of their own."

    def __init__(self, folder: Path):
        self.folder = folder
        self.text = ""

    def type(self, line: str, status: int = 0, listing: int = 0) -> str:
        "Type a command, which answers in five lines below a listing of so many; return the answer."
        words = [sys.executable, "-m", *shlex.split(line)]
        environment = {**os.environ, "HOME": str(self.folder / "home"), "MPLBACKEND": "agg"}
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300
        )
        lines = unwrapped(done.stdout)
        self.text = "\n".join(lines)
        assert done.returncode == status, f"{line}\n{done.stdout}\n{done.stderr}"
        assert not ONE.search(done.stdout + done.stderr), f"{line}\n{ONE.search(done.stdout + done.stderr)}"
        answer = [x for x in lines if not re.match(r"next: |\(.* more lines: --full\)", x)]
        assert len(answer) <= listing + 5, f"{line}\n{self.text}"
        return self.text

    def proposed(self, beginning: str) -> str:
        "Return the command that the last answer proposes to paste."
        found = re.search(rf"^next: (leakmel {beginning} .*)$", self.text, re.M)
        assert found, f"no {beginning}:\n{self.text}"
        return found[1]

    def paste(self, line: str, words: Mapping[str, str]) -> None:
        "Type a command, and what it prints as the next one, with words in place of those in capitals."
        self.type(line, listing=20)
        for then in re.findall(r"^next: (leakmel .*)$", self.text, re.M):
            for name, word in words.items():
                then = re.sub(rf"(?<=\s){name}(?=\s|$)", word, then)
            self.type(
                f"{then} --no-lab"
                if then.startswith("leakmel review ") and "--suggest" not in then
                else then,
                listing=20,
            )

    def to_a_detector(self, scan: str, new: str = "") -> str:
        "Scan, build, train and predict as printed, each with its page; return what the training said."
        self.type(f"{scan} --content", listing=6)
        self.type(f"{self.proposed('build')} --report")
        said = self.type(f"{self.proposed('train')} --report")
        assert (self.folder / "detector" / "report.html").is_file()
        predict = self.proposed("predict").replace("FOLDER", new or shlex.split(scan)[2])
        self.type(f"{predict} --out scores.csv --report")
        assert (self.folder / "scores.report.html").is_file()
        self.proposed("review")
        return said

    def evaluate(self, data: str, *more: str) -> str:
        "Evaluate the detector, with its page."
        said = self.type(shlex.join(["leakmel", "evaluate", data, "--model", "detector", *more]))
        self.type(
            shlex.join(["leakmel", "evaluate", data, "--model", "detector", "--out", "test", "--figures"])
        )
        assert (self.folder / "test" / "evaluation.html").is_file()
        return said


def utility(walk: Walk) -> None:
    "A utility's loggers: sensors and dates in names such as LOG1001_20261101_0200.wav, labels in a table next to the folder."
    rows = [("file", "label")]
    for s, night in itertools.product(range(12), range(1, 7)):
        name = f"LOG{1001 + s}_202611{night:02d}_0200.wav"
        put(walk.folder / "recordings" / name, s % 3 == 0, 50 * s + night, s % 6)
        rows.append((name, "leak" if s % 3 == 0 else "no leak"))
    for s, night in itertools.product(range(12), range(7, 10)):
        name = f"LOG{1001 + s}_202611{night:02d}_0200.wav"
        put(walk.folder / "later" / name, s % 3 == 0 or s == 5, 1000 * night + s, s % 6)
    put_table(walk.folder / "labels.csv", rows)
    walk.type("leakmel scan recordings", status=1, listing=6)  # no recording has a label
    scan = walk.proposed("scan")
    assert scan == "leakmel scan recordings --table labels.csv"
    said = walk.to_a_detector(scan, "later")
    assert "72 recordings of 12 sensors, 5 folds by sensor" in said
    assert re.search(r"(\d+) of 36 recordings are leaks at threshold", walk.text)[1] == "15"  # type: ignore[index]
    said = walk.type("leakmel nightly later --model detector --state nightly")
    assert "too few nights to be sure (5): " in said
    assert "LOG1006" in said
    assert "leakmel review " in walk.proposed("review")


def lengths(walk: Walk) -> None:
    "Two label folders, with lengths that all differ."
    for k in range(40):
        name = f"rec{k:03d}.wav"
        put(walk.folder / "own" / ("NO_LEAK", "LEAK")[k % 2] / name, k % 2 > 0, k, k % 6, 4 + k / 20)
    said = walk.to_a_detector("leakmel scan own")
    assert "Name the sensor of each recording" in said
    assert re.search(r"(\d+) of 40 recordings are leaks at threshold", walk.text)[1] == "20"  # type: ignore[index]
    said = walk.evaluate("own.h5")
    assert "LEAKY SPLIT" in said
    assert "at a new sensor: cannot be told" in said


def table(walk: Walk) -> None:
    "A table of German Excel: semicolons, a mark of UTF-8, decimal commas, other names of columns."
    rows = {
        "liste.csv": [("Datei", "Zustand", "Schacht", "Datum", "Pegel")],
        "neu.csv": [("Datei", "Zustand", "Schacht", "Datum", "Pegel")],
    }
    for k in range(60):
        name, file = f"Aufnahme {k:03d}.wav", ("liste.csv", "neu.csv")[k >= 40]
        put(walk.folder / ("messung", "neu")[k >= 40] / name, k % 2 == 0, k, k // 2 % 10)
        manhole = f"Schächte {k // 2 % 10 + 10 * (k >= 40)}"
        rows[file].append(
            (name, ("Leck", "kein Leck")[k % 2], manhole, f"{k % 28 + 1:02d}.11.2026 02:00", f"0,{k}")
        )
    for file, own in rows.items():
        put_table(walk.folder / file, own, ";", "utf-8-sig")
    walk.type("leakmel scan messung", status=1, listing=6)
    scan = walk.proposed("scan")
    columns = "path=Datei,label=Zustand,sensor=Schacht,start_time=Datum"
    assert scan == f"leakmel scan messung --table liste.csv --columns {columns}"
    said = walk.to_a_detector(scan)
    assert "40 recordings of 10 sensors, 5 folds by sensor" in said
    assert re.search(r"(\d+) of 40 recordings are leaks at threshold", walk.text)[1] == "20"  # type: ignore[index]
    walk.type(f"leakmel scan neu --table neu.csv --columns {columns}", listing=6)
    walk.type(walk.proposed("build"))
    said = walk.evaluate("neu.h5", "--training", "messung.h5")
    assert "of 10 leaks found 10; of 10 without a leak 0 false alarms" in said
    assert "better than a level meter: yes" in said


def pipes(walk: Walk) -> None:
    "40 recordings of three pipes: nothing can be said of a new one."
    for k in range(40):
        name = f"P{k % 3 + 1}~{k:03d}~202601{1 + k % 28:02d}_020000~8.wav"
        put(walk.folder / "own" / ("NO_LEAK", "LEAK")[k % 2] / name, k % 2 > 0, k, k % 3)
    walk.to_a_detector("leakmel scan own")
    said = walk.type("leakmel train own.h5 --out split --group sensor")
    assert "at a new sensor: cannot be told" in said
    said = walk.type("leakmel train own.h5 --out folds --group sensor --cross-validate --report")
    assert "only 3 sensors with a leak" in said
    assert (walk.folder / "folds" / "report.html").is_file()
    assert "of 20 leaks found" in walk.evaluate("own.h5")


def nights(walk: Walk) -> None:
    "Nights of sixteen loggers, one of which begins to record a leak in the eleventh night; the detector is from elsewhere."
    for k in range(40):
        name = f"rec{k:03d}.wav"
        put(walk.folder / "own" / ("NO_LEAK", "LEAK")[k % 2] / name, k % 2 > 0, k, k % 6)
    walk.to_a_detector("leakmel scan own")
    for first, last in ((1, 10), (11, 15)):
        for night, s in itertools.product(range(first, last + 1), range(16)):
            name = f"LOG{1001 + s}_202611{night:02d}_0200.wav"
            is_leak = s == 5 and night > 10
            put(walk.folder / "fleet" / f"LOG{1001 + s}" / name, is_leak, 100 * night + s, s % 6)
        said = walk.type("leakmel nightly fleet --model detector --state nightly")
        assert said.startswith(f"{last // 15} of 16 sensors to visit for their scores")
    assert re.search(r"1  LOG1006  evidence  leak score \d+  Scores rose", said)
    assert f"leakmel review {walk.folder / 'fleet'} --model" in walk.proposed("review")
    assert "LOG1006" in (walk.folder / "nightly" / "visits.html").read_text(encoding="utf-8")


def inside(walk: Walk) -> None:
    "Recordings in a folder below the one that is named, and their table next to it."
    rows = [("file", "Ort", "label")]
    for k in range(40):
        put(walk.folder / "own" / "audio" / f"rec{k:03d}.wav", k % 2 > 0, k, k % 6)
        rows.append((f"rec{k:03d}.wav", f"Platz {k // 2 % 8}", ("no leak", "leak")[k % 2]))
    put_table(walk.folder / "own" / "list.csv", rows)
    said = walk.type("leakmel build own --out one.h5")
    assert "Every recording has the label audio, and a detector needs two" in said
    scan = walk.proposed("scan")
    assert scan == "leakmel scan own/audio --table own/list.csv"
    said = walk.to_a_detector(scan)
    assert "40 recordings" in said


def readme(walk: Walk) -> None:
    "README's three commands, and each next command that the commands print, where the names that come to mind are taken."
    for k, split in enumerate(("TRAINING", "VALIDATION", "TESTING")):
        for s, night in itertools.product(range(6 * k, 6 * k + 6), range(1, 5)):
            folder = walk.folder / "recordings" / split / ("NO_LEAK", "LEAK")[night % 2]
            put(folder / f"LOG{1001 + s}_202611{night:02d}_0200.wav", night % 2 > 0, 50 * s + night, s % 6)
    assert "read from the names by --pattern" in walk.type("leakmel scan recordings --content", listing=6)
    said = walk.type("leakmel build recordings --split all --out mels")
    assert "sensors and times from the names: {**}/{sensor}_{start_time}\n" in said
    walk.type("leakmel train mels --out detector")
    for name in ("folds", "to_label.csv", "similar.html", "position.html", "detector-folds", "cnn-folds"):
        (walk.folder / name).write_text("something else")
    (walk.folder / "recordings.h5").mkdir()
    one = "recordings/TESTING/LEAK/LOG1013_20261101_0200.wav"
    places = {"FOLDER": "recordings", "TEST_SET": "mels", "DATA": "mels", "RECORDING.wav": one}
    for line in (
        "scan recordings",
        "scan recordings/TRAINING",
        "build recordings --split all --out mels",
        "build recordings/TRAINING --out plain.h5 --pattern none",
        "verify mels/TESTING_DATASET.H5",
        "train plain.h5 --out plain",
        "train mels --out cnn --detector cnn --epochs 1 --batch-size 32 --no-evaluation",
        "train mels --out by-sensor --cross-validate --group sensor --keep-level",
        "evaluate mels --model detector",
        "predict recordings --model detector",
        "predict recordings --model detector --out scores.csv",
        "review --suggest recordings --model detector --n 4",
        "review --suggest recordings --model detector --n 4 --out queue.csv",
        "review recordings --no-lab",
        f"similar {one} --in mels/TESTING_DATASET.H5 --n 2",
        "similar --store mels/TESTING_DATASET.H5 --out stored.npz",
        f"correlate {one} {one.replace('1013', '1014')} --distance-m 100 --speed-m-s 1200 --clock-error-s 0.001",
        "nightly recordings --model detector --state nightly",
        "export mels/TESTING_DATASET.H5 --out exported",
        "machine doctor recordings",
        "machine tune recordings/TRAINING --budget-s 5",
        "machine cache list",
    ):
        walk.paste(f"leakmel {line}", places)


@each("user", [utility, lengths, table, pipes, nights, inside, readme])
def test_the_first_half_hour(user: Callable[[Walk], None], tmp_path: Path) -> None:
    user(Walk(tmp_path))
