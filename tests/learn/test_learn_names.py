"File names that are not UTF-8 in training and evaluation, where pandas stores text by pyarrow."

import os
from pathlib import Path

import pytest

import leakmel as lm

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    lm.write_demo(tmp_path / "demo", n_files=120)
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
