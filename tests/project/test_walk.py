"The first half hour on folders as users have them: what README and the printed next steps say is typed, and the answer is right."

import csv
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from each import each

from leakmel.recordings.demo import write_wav

pytestmark = [pytest.mark.site, pytest.mark.slow]
RATE = 8000


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


class Walk:
    "A person at a shell, in a folder."

    def __init__(self, folder: Path):
        self.folder = folder
        self.text = ""

    def type(self, line: str, most_lines: int = 20) -> str:
        "Type a command that must succeed and say at most so much; return what it said."
        words = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, timeout=300)
        self.text = done.stdout
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert len(self.text.splitlines()) <= most_lines, f"{line}\n{self.text}"
        return self.text

    def command(self, beginning: str) -> str:
        "Return the command that the last text proposes."
        found = re.search(rf"^(?:next:)? *(leakmel {beginning} [^;\n]*)", self.text, re.M)
        assert found, f"no {beginning}:\n{self.text}"
        return found[1]

    def to_a_detector(self, scan: str) -> str:
        "Scan, build, train and predict as printed; return what the training said."
        self.type(f"{scan} --content")
        self.type(self.command("build"), 8)
        said = self.type(self.command("train"), 12)
        self.type(self.command("predict").replace("FOLDER", shlex.split(scan)[2]))
        return said


def lengths(walk: Walk) -> None:
    "Two label folders, with lengths that all differ."
    for k in range(40):
        put(
            walk.folder / "own" / ("NO_LEAK", "LEAK")[k % 2] / f"rec{k:03d}.wav",
            k % 2 > 0,
            k,
            k % 6,
            4 + k / 20,
        )
    said = walk.to_a_detector("leakmel scan own")
    assert "Name the sensor of each recording" in " ".join(said.split())
    assert re.search(r"(\d+) of 40 recordings are leaks at threshold", walk.text)[1] == "20"  # type: ignore[index]


def table(walk: Walk) -> None:
    "A table of German Excel: semicolons, a mark of UTF-8, decimal commas, other names of columns."
    rows = [("Datei", "Zustand", "Schacht", "Pegel")]
    for k in range(40):
        put(walk.folder / "messung" / f"Aufnahme {k:03d}.wav", k % 2 == 0, k, k // 2 % 10)
        rows.append(
            (f"Aufnahme {k:03d}.wav", ("Leck", "kein Leck")[k % 2], f"Schächte {k // 2 % 10}", f"0,{k}")
        )
    with open(walk.folder / "liste.csv", "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=";").writerows(rows)
    names = "--table liste.csv --columns path=Datei,label=Zustand,sensor=Schacht"
    said = walk.to_a_detector(f"leakmel scan messung {names}")
    assert "40 recordings of 10 sensors, 5 folds by sensor" in " ".join(said.split())


def pipes(walk: Walk) -> None:
    "40 recordings of three pipes: nothing can be said of a new one."
    for k in range(40):
        name = f"P{k % 3 + 1}~{k:03d}~202601{1 + k % 28:02d}_020000~8.wav"
        put(walk.folder / "own" / ("NO_LEAK", "LEAK")[k % 2] / name, k % 2 > 0, k, k % 3)
    walk.to_a_detector("leakmel scan own")
    said = " ".join(walk.type("leakmel train own.h5 --out split --group sensor").split())
    assert "at a new sensor: cannot be told" in said
    said = walk.type("leakmel train own.h5 --out folds --group sensor --cross-validate")
    assert "each of 3 sensors was left out once" in said


def fleet(walk: Walk) -> None:
    "Nights of sixteen loggers with names of their own, one of which begins to hear a leak; the detector is from elsewhere."
    for k in range(40):
        put(walk.folder / "own" / ("NO_LEAK", "LEAK")[k % 2] / f"rec{k:03d}.wav", k % 2 > 0, k, k % 6)
    for night in range(1, 9):
        for s in range(16):
            name = f"LOG{1001 + s}_202611{night:02d}_0200.wav"
            put(walk.folder / "fleet" / f"LOG{1001 + s}" / name, s == 5 and night > 3, 100 * night + s, s % 6)
    walk.to_a_detector("leakmel scan own")
    said = walk.type("leakmel nightly fleet --model detector --state nightly")
    assert "LOG1006" in said
    assert "{sensor}_{start_time}" in said
    assert (walk.folder / "nightly" / "visits.html").is_file()


@each("user", [lengths, table, pipes, fleet])
def test_the_first_half_hour(user: Callable[[Walk], None], tmp_path: Path) -> None:
    user(Walk(tmp_path))
