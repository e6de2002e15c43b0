"A synthetic tree with many faults, end to end: every file has the expected result, every problem is named, every row is verified independently."

import base64
import csv
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import soundfile
from independent import content, fit, log_mel, off
from messy import LABELS, RATE, SPLITS, Messy, make_sound, write_messy

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import show_path
from leakmel.dataset.schema import DIGEST_ATTRIBUTE, metadata_digest
from leakmel.pages.dashboard import build_card, rejected_card
from leakmel.recordings.problems import ProblemReport, show_place

SPEC = lm.MelSpec.preset("disjoint", sample_rate=RATE, duration_s=1.0)
OPTIONS = ("--sample-rate", str(RATE), "--duration-s", "1")
FATES = {"not_wav", "empty", "truncated", "unsupported", "channels", "nonfinite", "no_label"}

ParsedPath = set[tuple[str, str]]  # kind and place of problems


# -- from outside -------------------------------------------------------------------------------------------------------------


def walk(root: Path, folder: Path) -> list[bytes]:
    "Paths of the recordings below a folder, in the order of their bytes; links are followed inside the root, a folder inside itself is not."
    top, base, out = os.path.realpath(os.fsencode(root)) + b"/", os.fsencode(folder), []

    def visit(here: bytes, above: tuple[bytes, ...]) -> None:
        for name in os.listdir(here):
            if name.startswith(b"."):
                continue
            at = os.path.join(here, name)
            real = os.path.realpath(at)
            if not real.startswith(top) or not os.path.exists(at):
                continue
            mode = os.stat(at).st_mode
            if stat.S_ISDIR(mode):
                if real not in above:
                    visit(at, (*above, real))
            elif not stat.S_ISREG(mode):
                continue
            elif name.lower().endswith((b".wav", b".wave")):
                out.append(os.path.relpath(at, base))

    visit(base, (os.path.realpath(base),))
    return sorted(out)


def samples(path: bytes) -> tuple[np.ndarray, int]:
    "Samples [n, channels] in float64 from -1 to 1 and rate in Hz, by libsndfile."
    fd = os.open(path, os.O_RDONLY)  # names that are no UTF-8
    with soundfile.SoundFile(fd, closefd=True) as f:
        return f.read(f.frames, dtype="float64", always_2d=True), f.samplerate


def right_rows(folder: Path, paths: list[bytes], config: dict[str, Any]) -> list[np.ndarray]:
    "The rows in float64."
    return [log_mel(fit(*samples(os.path.join(os.fsencode(folder), p)), config), config) for p in paths]


def shown(split: str, path: bytes) -> str:
    "A recording as reports show it: where it is below the root."
    return f"{SPLITS[split]}/{show_path(path)}"


def named(problems: Any) -> ParsedPath:
    "Kind and place of problems, those of ties apart; fails for one that is said twice."
    found = [(p["kind"], p["path"]) for p in problems if p["kind"] != "label_tied"]
    assert len(set(found)) == len(found), [p for p, n in Counter(found).items() if n > 1]
    return set(found)


def tied(problems: Any) -> set[tuple[str, str]]:
    "Labels and what gives them away."
    return {(p["path"], p["message"].split(":")[0]) for p in problems if p["kind"] == "label_tied"}


def mels(path: Path) -> dict[bytes, bytes]:
    "Path -> row."
    got = content(path)
    return dict(zip(got["files/path"].tolist(), (row.tobytes() for row in got["segments_mel"]), strict=True))


# -- the tree and what is built from it ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def messy(tmp_path_factory) -> Messy:
    return write_messy(tmp_path_factory.mktemp("messy") / "set")


@pytest.fixture(scope="module")
def built(messy: Messy, tmp_path_factory) -> list[lm.BuildResult]:
    "All splits, in the stream mode."
    return lm.build_all(
        messy.root, out_dir=tmp_path_factory.mktemp("built"), spec=SPEC, mode="stream", progress="none"
    )


@pytest.fixture(scope="module")
def scanned(messy: Messy) -> list[dict[str, str]]:
    "The problems of a scan that reads."
    return lm.scan(messy.root, content=True, progress="none").problems.to_dict("records")  # type: ignore[return-value]


def test_the_tree_has_everything(messy: Messy) -> None:
    assert 150 <= len(messy.files) <= 300
    secret = messy.root / SPLITS["TESTING"] / "LEAK" / "secret.wav"
    assert {f.code for f in messy.files if f.code} == FATES | (
        set() if os.access(secret, os.R_OK) else {"unreadable"}
    )
    words = {word for f in messy.rows for word in f.status.split("+")}
    assert words == {"ok", "padded", "cut", "resampled", "downmixed", "identical_channels", "opposite_phase"}
    assert len({f.encoding for f in messy.rows}) == 8
    kinds = {k for f in messy.files for k in f.kinds} | {kind for kind, _ in messy.places}
    assert kinds >= FATES | {
        "other_rate",
        "other_length",
        "stereo",
        "opposite_phase",
        "clipped",
        "silent",
        "dc_offset",
        "dead_sensor",
        "duplicate",
        "duplicate_across_splits",
        "duplicate_labels",
        "gain_1",
        "case_twins",
        "empty_label",
        "link",
        "special",
        "passed_over",
        "not_a_split",
    }


def test_rows_and_rejections_account_for_all_files(messy: Messy, built: list[lm.BuildResult]) -> None:
    assert [r.split for r in built] == list(SPLITS)
    for r in built:
        there = walk(messy.root, messy.root / SPLITS[r.split])
        assert there == [f.path for f in messy.of(r.split)], "the list of what was planted is wrong"
        got = content(r.path)
        assert sorted([*got["files/path"].tolist(), *got["rejected/path"].tolist()]) == there
        assert (r.rows + len(r.rejections), r.found) == (len(there), len(there))


def test_every_planted_file_has_the_expected_result(messy: Messy, built: list[lm.BuildResult]) -> None:
    for r in built:
        got, files = content(r.path), messy.of(r.split)
        rows = [f for f in files if f.status]
        assert got["files/path"].tolist() == [f.path for f in rows]
        assert dict(zip(got["files/path"].tolist(), got["files/status"].astype(str), strict=True)) == {
            f.path: f.status for f in rows
        }
        assert got["files/encoding"].astype(str).tolist() == [f.encoding for f in rows]
        assert [LABELS[i] for i in got["labels"]] == [f.label for f in rows]
        lost = {f.path: f.code for f in files if f.code}
        assert dict(zip(got["rejected/path"].tolist(), got["rejected/code"].astype(str), strict=True)) == lost
        assert r.summary["rejected_by_code"] == dict(Counter(lost.values()))
        assert r.summary["status_counts"] == dict(Counter(f.status for f in rows if f.status != "ok"))
        assert all(got["rejected/message"])


@pytest.mark.slow
def test_every_row_and_column_is_right(messy: Messy, built: list[lm.BuildResult]) -> None:
    for r in built:
        got, folder = content(r.path), messy.root / SPLITS[r.split]
        config, rows = json.loads(got["@config_json"]), [f for f in messy.of(r.split) if f.status]
        right = right_rows(folder, [f.path for f in rows], config)
        for k, f in enumerate(rows):
            assert off(got["segments_mel"][k], right[k]) <= 0, (f.path, off(got["segments_mel"][k], right[k]))
        for k, f in enumerate(rows):
            x, rate = samples(os.path.join(os.fsencode(folder), f.path))
            assert (got["files/sample_rate"][k], got["files/n_samples"][k], got["files/channels"][k]) == (
                rate,
                *x.shape,
            )
            rms = np.sqrt((x**2).mean())  # of the recording as it lies in its file, whatever was made of it
            assert got["files/rms_db"][k] == pytest.approx(20 * np.log10(rms) if rms else -200, abs=0.01), (
                f.path
            )
            assert (got["files/peak"][k], got["files/dc_offset"][k]) == pytest.approx(
                (np.abs(x).max(), x.mean()), abs=1e-6
            ), f.path
            assert bool(got["files/silent"][k]) == (np.ptp(x) <= 1 / 32_768), f.path
            sensor, recording, time, gain = f.fields or ("", "", "", "nan")
            start = (
                f"{time[:4]}-{time[4:6]}-{time[6:8]}T{time[9:11]}:{time[11:13]}:{time[13:]}"
                if len(time) == 15
                else ""
            )
            assert [os.fsdecode(got[f"files/{c}"][k]) for c in ("sensor", "recording", "start_time")] == [
                sensor,
                recording,
                start,
            ], f.path
            assert (
                np.isnan(got["files/gain"][k]) if not gain.isdigit() else got["files/gain"][k] == float(gain)
            )
            assert got["files/folder"][k] == b"/".join(f.path.split(b"/")[1:-1])


# -- problems ------------------------------------------------------------------------------------------------------------------


def test_a_scan_names_every_problem_and_no_other(messy: Messy, scanned: list[dict[str, str]]) -> None:
    planted = {(kind, shown(f.split, f.path)) for f in messy.files for kind in f.kinds} | messy.places
    assert named(scanned) == planted
    assert tied(scanned) == {(label, what) for _, label, what in messy.tied}
    assert all(p["message"] for p in scanned)
    (rate,) = [p["message"] for p in scanned if p["kind"] == "label_tied" and p["path"] == "QUIET"]
    share = 100 * sum(f.label == "QUIET" for f in messy.rows) / len(messy.rows)
    assert (
        f"18 of the 18 recordings with 8000 Hz have this label, which {share:.0f} % of all recordings have; "
        in rate
    )


def expected_of(messy: Messy, split: str) -> ParsedPath:
    "What the report of a split has to name, rejected files apart."
    own = {(kind, shown(split, f.path)) for f in messy.of(split) if f.status for kind in f.kinds}
    folders = tuple(f"{folder}/" for other, folder in SPLITS.items() if other != split)
    places = {p for p in messy.places if not p[1].startswith(folders)}
    return own | (
        places if split == "TRAINING" else places - {("dead_sensor", "H9")}
    )  # the sensor recorded for that split only


def test_the_report_of_a_build_names_every_problem_and_no_other(
    messy: Messy, built: list[lm.BuildResult]
) -> None:
    for r in built:
        report = json.loads(Path(f"{r.path}.report.json").read_text(encoding="utf-8"))
        assert named(report["problems"]) == expected_of(messy, r.split)
        assert tied(report["problems"]) == {
            (label, what) for split, label, what in messy.tied if split == r.split
        }
        assert report["problems"] == r.problems.to_dict("records")
        assert (
            report["problems_by_kind"]
            == r.summary["problems_by_kind"]
            == dict(Counter(p["kind"] for p in report["problems"]))
        )
        exact = [
            base64.b64decode(x["path_base64"]) if "path_base64" in x else x["path"].encode()
            for x in report["rejected_files"]
        ]
        assert dict(zip(exact, (x["code"] for x in report["rejected_files"]), strict=True)) == {
            f.path: f.code for f in messy.of(r.split) if f.code
        }


def test_reported_paths_are_relative_to_the_root(
    messy: Messy, scanned: list[dict[str, str]], built: list[lm.BuildResult]
) -> None:
    no_paths = {"label_tied", "dead_sensor", "case_twins", "empty_label"}
    shown_places = {p["path"] for p in scanned if p["kind"] not in no_paths}
    for r in built:
        report = json.loads(Path(f"{r.path}.report.json").read_text(encoding="utf-8"))
        shown_places |= {p["path"] for p in report["problems"] if p["kind"] not in no_paths}
        assert report["folder"] == SPLITS[r.split]
    rejected_places = [show_place(r.summary["folder"], x.path) for r in built for x in r.rejections]
    assert all(escape(place) in rejected_card(built, most=1000)._repr_html_() for place in rejected_places)
    assert sorted(rejected_places) == sorted(shown(f.split, f.path) for f in messy.files if f.code)
    assert len(shown_places) > 100
    for place in shown_places | set(rejected_places):
        assert os.path.lexists(messy.root / place), place


def test_problems_of_a_kind_that_the_walk_finds_are_in_order(
    messy: Messy, scanned: list[dict[str, str]]
) -> None:
    for split in SPLITS.values():
        walked = [
            p["path"]
            for p in scanned
            if p["kind"] in ("link", "special") and p["path"].startswith(f"{split}/")
        ]
        assert walked == sorted(walked, key=os.fsencode)
        assert len(walked) == (8 if split == SPLITS["TRAINING"] else 0)


def test_every_kind_has_an_example_and_some_have_all(
    messy: Messy, scanned: list[dict[str, str]], built: list[lm.BuildResult], say
) -> None:
    always = {"label_tied", "dead_sensor", "duplicate_labels", "empty_label"}
    text = say("scan", messy.root, "--content", "--quiet")[1]
    output = {
        (path, message)
        for p in scanned
        if (line := f"    {(path := p['path'])}: {(message := p['message'])}\n") and line in text
    }
    assert {p["kind"] for p in scanned if (p["path"], p["message"]) in output} == {p["kind"] for p in scanned}
    assert all((p["path"], p["message"]) in output for p in scanned if p["kind"] in always)
    for r in built:
        assert len({p.kind for p in r.noted}) > (0 if r.split == "VALIDATION" else 12) - 1
        table = ProblemReport(r.noted, most=12)
        given = table.given
        assert set(given) == {p.kind for p in r.noted}
        assert all(n >= 1 for n in given.values())
        for p in r.noted:
            if p.kind not in always:
                continue
            assert f"    {p.path}: {p.message}\n" in repr(table) + "\n"
            assert escape(f"{p.path}: {p.message}") in table._repr_html_()
    assert "    " not in say("scan", messy.root, "--content", "--quiet", "--most", "0")[1]


# -- modes, rules, verify ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["preload", "memmap"])
def test_every_mode_gives_the_same_bytes(
    messy: Messy, built: list[lm.BuildResult], mode: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("LEAKMEL_CACHE_DIR", str(tmp_path / "cache"))
    results = lm.build_all(
        messy.root, out_dir=tmp_path / "out", spec=SPEC, mode=mode, check=2, progress="none"
    )
    for r, plain in zip(results, built, strict=True):
        assert r.summary["mode"] == mode
        assert r.path.read_bytes() == plain.path.read_bytes()
        assert r.noted == plain.noted
        assert r.rejections == plain.rejections


def test_rejecting_rules_reject_the_recordings_that_others_change(
    messy: Messy, built: list[lm.BuildResult], tmp_path: Path
) -> None:
    spec = {"sample_rate": RATE, "duration_s": 1.0, "rate": "reject", "short": "reject", "long": "reject"}
    for r, plain in zip(
        lm.build_all(messy.root, out_dir=tmp_path, spec=spec, check=2, progress="none"), built, strict=True
    ):
        code = {"resampled": "wrong_rate", "padded": "too_short", "cut": "too_long"}
        expected = {
            f.path: f.code or next((c for word, c in code.items() if word in f.status), "")
            for f in messy.of(r.split)
        }
        assert {x.path: x.code for x in r.rejections} == {path: c for path, c in expected.items() if c}
        before = mels(plain.path)
        assert mels(r.path) == {path: before[path] for path, c in expected.items() if not c}


@pytest.mark.slow
def test_verify_recomputes_all_rows_and_finds_two_swapped_rows(
    messy: Messy, built: list[lm.BuildResult], tmp_path: Path
) -> None:
    for r in built:
        report = lm.verify(r.path, root=messy.root, sample=None)
        assert (report.ok, report.checked, report.problems) == (True, r.rows, [])
        twisted = tmp_path / r.path.name
        shutil.copy(r.path, twisted)
        with h5py.File(twisted, "r+") as f:
            a, b = 0, r.rows - 1
            for name in ("segments_mel", "digests/rows"):
                f[name][a], f[name][b] = f[name][b], f[name][a]
            f.attrs[DIGEST_ATTRIBUTE] = metadata_digest(f)
        assert lm.verify(twisted).ok, "all digests are right: without the recordings nobody can know"
        report = lm.verify(twisted, root=messy.root, sample=None)
        assert not report.ok
        assert [p.split(" ")[:2] for p in report.problems] == [["row", "0"], ["row", str(b)]]


# -- tables and patterns ----------------------------------------------------------------------------------------------------------


def write_table(messy: Messy, path: Path) -> None:
    "All that has a label as a table, in another order; names that are no UTF-8 in base64."
    with open(path, "w", newline="", encoding="utf-8") as f:
        table = csv.writer(f)
        table.writerow(["label", "path", "path_base64", "split", "sensor"])
        for p in sorted((p for p in messy.files if p.label), key=lambda p: p.below_root[::-1]):
            try:
                plain, coded = p.below_root.decode(), ""
            except UnicodeDecodeError:
                plain, coded = "", base64.b64encode(p.below_root).decode()
            table.writerow(
                [p.label, plain, coded, p.split.lower(), p.fields[0] if p.fields and not coded else ""]
            )


@pytest.mark.slow
def test_the_same_tree_by_a_table_gives_the_same_rows(
    messy: Messy, built: list[lm.BuildResult], tmp_path: Path
) -> None:
    write_table(messy, tmp_path / "table.csv")
    manifest = lm.scan(messy.root, table=tmp_path / "table.csv")
    missing = [p for p in manifest.problems.to_dict("records") if p["kind"] == "not_in_table"]
    assert [p["message"].split(" ")[0] for p in missing] == [str(2 + 2)], (
        "without a label, or beside the splits"
    )
    for r, plain in zip(
        lm.build_all(messy.root, manifest=manifest, out_dir=tmp_path, spec=SPEC, check=2, progress="none"),
        built,
        strict=True,
    ):
        folder = os.fsencode(SPLITS[r.split]) + b"/"
        before = content(plain.path)
        assert mels(r.path) == {folder + path: row for path, row in mels(plain.path).items()}
        got = content(r.path)
        for name in ("labels", "files/status", "files/digest", "files/rms_db"):
            assert got[name].tobytes() == before[name].tobytes(), name
        assert {x.path: x.code for x in r.rejections} == {
            folder + x.path: x.code for x in plain.rejections if x.code != "no_label"
        }
        assert lm.verify(r.path, root=messy.root, table=tmp_path / "table.csv", sample=None).ok


@pytest.mark.slow
@pytest.mark.parametrize("above", ["", "{split}/"])
def test_a_pattern_gives_the_same_rows_for_names_that_have_the_fields(
    messy: Messy, built: list[lm.BuildResult], above: str, tmp_path: Path
) -> None:
    manifest = lm.scan(messy.root, pattern=above + "{label}/{**}/{sensor}~{recording}~{start_time}~{gain}")
    for r, plain in zip(
        lm.build_all(messy.root, manifest=manifest, out_dir=tmp_path, spec=SPEC, check=2, progress="none"),
        built,
        strict=True,
    ):
        folder = os.fsencode(SPLITS[r.split]) + b"/" if above else b""
        with_fields = {f.path for f in messy.of(r.split) if f.fields and all(f.fields)}
        if above:
            with_fields -= {
                p for p in with_fields if p.startswith(b"NOLEAK/again/")
            }  # one walk for all splits: a linked folder is listed once
        assert len(with_fields) > 5
        assert mels(r.path) == {
            folder + path: row for path, row in mels(plain.path).items() if path in with_fields
        }
        got, before = content(r.path), content(plain.path)
        keep = np.isin(before["files/path"], list(with_fields))
        for name in ("files/sensor", "files/recording", "files/start_time", "files/gain", "labels"):
            assert got[name].tolist() == before[name][keep].tolist(), name


def test_pattern_mismatch_is_reported_once(messy: Messy, tmp_path: Path, say) -> None:
    pattern = "{label}/{**}/{sensor}~{recording}~{start_time}~{gain}"
    misfits = {shown(f.split, f.path) for f in messy.files if not (f.fields and all(f.fields))}
    status, text = say("scan", messy.root, "--pattern", pattern, "--json", "--quiet")
    body = json.loads(text)
    places = Counter((p["kind"], p["path"]) for p in body["problems"])
    assert {path for kind, path in places if kind == "no_match"} == misfits
    assert max(places.values()) == 1
    assert "no_label" not in body["problems_by_kind"]
    assert (status, body["would_be_rejected"]) == (1, len(misfits))
    r = lm.build(
        messy.root,
        split="testing",
        out=tmp_path / "x.h5",
        manifest=lm.scan(messy.root, pattern=pattern),
        spec=SPEC,
        check=2,
        progress="none",
    )
    assert "no_match" not in r.summary["problems_by_kind"], "it is rejected, which says so"
    assert {x.message for x in r.rejections if x.code == "no_label"} == {
        "the name does not match the pattern, so it has no label"
    }
    status, text = say("scan", messy.root, "--pattern", "{sensor}~{*}", "--json", "--quiet")
    loose = [p for p in json.loads(text)["problems"] if p["path"] == "dataset_Training/loose.wav"]
    assert [p["kind"] for p in loose] == ["no_label"], "it lies in no label folder, whatever its name says"


# -- the command line ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def say(capsys):
    "Run the command line: exit status and standard output."

    def run(*argv: object) -> tuple[int, str]:
        status = main([str(a) for a in argv])
        return status, capsys.readouterr().out

    return run


def unwrapped(text: str) -> str:
    "Text whose long lists are on one line again."
    return re.sub(r"\n    (?! )", " ", text)


def test_scan_on_the_command_line_names_everything(messy: Messy, scanned: list[dict[str, str]], say) -> None:
    status, text = say("scan", messy.root, "--content", "--json")
    body = json.loads(text)
    assert status == 1
    assert body["problems"] == scanned
    assert body["problems_by_kind"] == dict(Counter(p["kind"] for p in scanned))
    assert (body["found"], body["would_be_rejected"]) == (
        len(messy.files),
        sum(bool(f.code) for f in messy.files),
    )
    status, text = say("scan", messy.root, "--content", "--most", "1000", "--quiet")
    assert status == 1
    for kind, n in body["problems_by_kind"].items():
        assert f"  {n} x {kind}: " in text
    for p in scanned:
        assert f"    {p['path']}: {p['message']}\n" in text


@pytest.mark.slow
def test_build_on_the_command_line_counts_everything(
    messy: Messy, built: list[lm.BuildResult], tmp_path: Path, say
) -> None:
    status, text = say("build", messy.root, "--split", "all", "--out", tmp_path / "json", "--json", *OPTIONS)
    body = json.loads(text)
    assert (status, body["ok"], body["found"], body["rows"]) == (0, True, len(messy.files), len(messy.rows))
    for output, plain in zip(body["splits"], built, strict=True):
        for key in (
            "found",
            "rows",
            "rejected",
            "rejected_by_code",
            "status_counts",
            "problems_by_kind",
            "label_names",
        ):
            assert output[key] == plain.summary[key], key
        assert (tmp_path / "json" / plain.path.name).read_bytes() == plain.path.read_bytes()
    command = [
        sys.executable,
        "-m",
        "leakmel",
        "build",
        str(messy.root),
        "--split",
        "all",
        "--out",
        str(tmp_path / "text"),
        "--full",
        *OPTIONS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for plain in built:
        assert (
            f": {plain.rows} rows + {len(plain.rejections)} rejected = {plain.found} files found; ok:"
            in done.stdout
        )
        for word, n in plain.summary["rejected_by_code"].items():
            assert f"{n} x {word}" in unwrapped(done.stdout)
        counts = sorted(plain.summary["status_counts"].items(), key=lambda item: (-item[1], item[0]))
        assert list(plain.summary["status_counts"].items()) == counts
        assert len(counts) > 6
        words = ", ".join(f"{n} x {word}" for word, n in counts[:6])
        assert f"  {plain.split}, changed to fit: {words} and {len(counts) - 6} more\n" in unwrapped(
            done.stdout
        )
    card = " ".join(repr(build_card(built)).split())
    for word in {w for plain in built for w in plain.summary["status_counts"]}:
        total = sum(plain.summary["status_counts"].get(word, 0) for plain in built)
        assert f"{total} x {word}" in card.replace("\N{NO-BREAK SPACE}", " ")
    problems = sum((Counter(plain.summary["problems_by_kind"]) for plain in built), Counter())
    kinds = ", ".join(
        f"{n:,} x {kind}" for kind, n in sorted(problems.items(), key=lambda x: (-x[1], x[0]))[:6]
    )
    assert f"problems: {kinds} and {len(problems) - 6} more" in " ".join(done.stdout.split())
    lines = done.stdout.splitlines()
    assert lines[-1] == f"next: leakmel train {tmp_path / 'text'} --out detector"
    assert max(len(line) for line in lines if "leakmel " not in line) <= 100


# -- recordings, not rows ------------------------------------------------------------------------------------------------------


def test_build_and_scan_report_the_same_problems(tmp_path: Path) -> None:
    "Clipping is gone after resampling, opposite channels are silent after the mean: the report is about what was recorded."
    root = tmp_path / "set"

    def hard(n: int, seed: int) -> np.ndarray:
        return np.clip(4 * make_sound(seed, 0.5, n), -1, 32_767 / 32_768)

    def put(name: str, x: np.ndarray, rate: int = RATE, subtype: str = "PCM_16") -> None:
        soundfile.write(root / name, x, rate, subtype=subtype)

    for split in ("TRAINING", "VALIDATION", "TESTING"):
        for label in LABELS[:2]:
            (root / split / label).mkdir(parents=True)
            for k in range(6):
                put(
                    f"{split}/{label}/H1~{k}~20250101_000000~8.wav",
                    make_sound(len(split) * 100 + len(label) * 10 + k),
                )
    put("TRAINING/LEAK/fast.wav", hard(48_000, 1), 48_000)
    put("TRAINING/LEAK/one of two.wav", np.hstack([hard(RATE, 2), make_sound(3)]))
    put("TRAINING/LEAK/24 bits.wav", np.clip(4 * make_sound(4, 0.5), -0.9, 1 - 2.0**-23), subtype="PCM_24")
    for k in range(4):
        put(f"TRAINING/NOLEAK/H8~wired{k}~20250101_000000~8.wav", make_sound(50 + k, 0.1) * [[1, -1]])
    put("TESTING/NOLEAK/lent.wav", make_sound(50, 0.1) * [[1, -1]])
    scanned = lm.scan(root, content=True, progress="none").problems
    assert {p for k, p in zip(scanned["kind"], scanned["path"], strict=True) if k == "clipped"} == {
        f"TRAINING/LEAK/{n}.wav" for n in ("fast", "one of two", "24 bits")
    }
    built = lm.build_all(root, out_dir=tmp_path / "out", spec=SPEC, check=2, progress="none")
    assert set().union(*(named(r.problems.to_dict("records")) for r in built)) == named(
        scanned.to_dict("records")
    )
