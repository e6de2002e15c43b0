"File names that are not UTF-8 in all tables, where pandas stores text by pyarrow."

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_detectors import SPEC, made_detector, noise, put

import leakmel as lm
from leakmel.pages.dashboard import build_card, data_table, read_run, rejected_card, runs_table
from leakmel.pages.explore import recordings_of_scan

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET: dict[str, Any] = {"progress": "none", "device": "cpu"}
RAW, SHOWN = "a\udcff.wav", "a\\xff.wav"  # the name b"a\xff.wav" as Python and as leakmel show it


def test_every_table_holds_names_that_are_not_utf8(tmp_path: Path) -> None:
    "Folder, label, sensor and file have such names: scan, build, dashboard, explore, predict, embed, suggest, nightly."
    pytest.importorskip("pyarrow")
    root = tmp_path / "set\udcfe"
    for k in range(8):
        label = ("LEAK", "NO\udcffLEAK")[k % 2]
        put(root, f"{label}/S{k % 3}\udcff~{k:06d}~20210301_0000{k:02d}~24.wav", noise(k, level=100 * k + 50))
    put(root, f"LEAK/{RAW}", noise(20))
    put(root, "LEAK/silent\udcff.wav", np.zeros(4096, np.int16))
    (root / "LEAK" / "broken\udcff.wav").write_bytes(b"RIFF....WAVE")
    scan = lm.scan(root, content=True, progress="none")
    assert f"LEAK/{RAW}" in scan.table["path"].tolist()
    assert {"LEAK/broken\\xff.wav", "LEAK/silent\\xff.wav"} <= set(scan.problems["path"])
    assert "NO\\xffLEAK" in scan._repr_html_()
    assert scan.groups("sensor").loc["S1\udcff", "label NO\\xffLEAK"] == 2
    named = lm.scan(
        root, pattern="{label}/{sensor}~{recording}~{start_time}~{gain}", with_labels=True, progress="none"
    )
    assert "sensor" in repr(named.preview)
    built = lm.build(root, out=tmp_path / "out" / "set.h5", spec=SPEC, engine="cpu", check=2, progress="none")
    assert built.rejected["path"].tolist() == ["LEAK/broken\\xff.wav"]
    assert "LEAK/silent\\xff.wav" in built.problems["path"].tolist()
    run = read_run(tmp_path / "out")
    assert "NO\\xffLEAK" in set(data_table(run)[0]["label"])
    assert all(made is not None for made in (build_card([built]), rejected_card([built]), runs_table([run])))
    usable = recordings_of_scan(scan)
    assert len(usable.matching({"label": "NO\udcffLEAK", "sensor": "S1\udcff"})) == 2
    detector = made_detector()
    scored = lm.predict(root, detector, **QUIET)
    assert f"LEAK/{SHOWN}" in scored.table["path"].tolist()
    assert scored.rejected["path"].tolist() == ["LEAK/broken\\xff.wav"]
    for source in (root, built.path):
        vectors = lm.embed(None, source, progress="none")
        assert f"LEAK/{SHOWN}" in vectors.table["path"].tolist()
    near = lm.similar(root / "LEAK" / RAW, vectors, k=3, progress="none")
    assert near.table["path"][0] == f"LEAK/{SHOWN}"
    assert "\\xff" in near._repr_html_()
    suggested = lm.suggest(root, detector, n=6, **QUIET)
    assert all("\\xff" in path for path in suggested.table["path"])
    for number, given in enumerate((None, named)):
        night = lm.nightly(root, detector, tmp_path / f"state{number}", manifest=given, **QUIET)
        assert "S1\\xff" in night.table["sensor"].tolist()


@pytest.mark.slow
def test_names_that_are_not_utf8(tmp_path: Path, few_trees: None) -> None:
    pytest.importorskip("pyarrow")
    lm.write_demo(tmp_path / "demo", n_files=60)
    for path in sorted((tmp_path / "demo").rglob("*.wav")):
        name = os.fsencode(path.name).replace(b"~", b"\xfe~", 1)  # in the sensor, which is the group
        os.rename(path, os.path.join(os.fsencode(path.parent), name))
    sets = [b.path for b in lm.build_all(tmp_path / "demo", out_dir=tmp_path / "sets", progress="none")]
    settings = lm.TrainSettings(detector="spectral")
    lm.train(sets[0], out=tmp_path / "run", settings=settings, device="cpu", progress=False)
    found = lm.evaluate(tmp_path / "run", sets[-1], device="cpu", progress="none")
    assert all("\udcfe" in group for group in found.table["group"])
    found.save(tmp_path / "results")
    assert "\\xfe" in (tmp_path / "results" / "recordings.csv").read_text()
    folds = lm.cross_validate(
        sets[0], out=tmp_path / "folds", settings=settings, n_folds=2, jobs=1, progress="none"
    )
    assert all("\udcfe" in group for group in folds.table["group"])
