"Recordings with gain 1 in the name: kept and reported, or rejected, by one setting."

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_runs import plan_run

import leakmel as lm
from leakmel.cli import main
from leakmel.recordings.wav import canonical_header

SPEC = {"sample_rate": 4096, "duration_s": 1.0}
DRY = ("LEAK/H1~03~20250101_000000~1.wav", "NOLEAK/H2~04~20250101_000000~1.wav")
N = 12


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(N):
        path = tmp_path / "data" / ("NOLEAK", "LEAK")[i % 2] / f"H{1 + i // 4}~{i:02d}~20250101_000000~8.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        x = rng.normal(0, 3000, 4096).astype("<i2")
        path = path.with_name(path.name.replace("~8", "~1")) if i in (3, 4) else path
        path.write_bytes(canonical_header(4096, 4096) + x.tobytes())
    return tmp_path / "data"


def build(data: Path, rule: str, out: str = "x.h5", **more):
    config = lm.PipelineConfig(on_dry_file=rule, on_bad_file=more.pop("on_bad_file", "reject"))  # type: ignore[arg-type]
    given: dict[str, Any] = {"spec": SPEC, "progress": "none", "engine": "cpu", "pipeline": config}
    return lm.build(data, out=data.parent / out, **given, **more)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stream", "preload"])
def test_dry_recordings_are_kept_or_rejected(data, mode):
    kept = build(data, "keep", "kept.h5", mode=mode)
    assert (kept.rows, len(kept.rejections), kept.found) == (N, 0, N)
    assert kept.summary["problems_by_kind"]["gain_1"] == 2
    left_out = build(data, "reject", "rejected.h5", mode=mode, on_bad_file="stop")
    assert (left_out.rows, left_out.found) == (N - 2, N)
    assert sorted(left_out.rejected["path"]) == sorted(DRY)
    assert left_out.summary["rejected_by_code"] == {"dry": 2}
    assert "gain_1" not in left_out.summary["problems_by_kind"]
    assert left_out.summary["pipeline"]["on_dry_file"] == "reject"
    for result in (kept, left_out):
        assert lm.verify(result.path, root=data, sample=None).ok
    with lm.open_dataset(kept.path) as a, lm.open_dataset(left_out.path) as b:
        assert set(a.files["path"]) - set(b.files["path"]) == set(DRY)


@pytest.mark.slow
def test_a_build_with_the_other_rule_gives_the_bytes_of_a_fresh_one(data):
    fresh = {rule: build(data, rule, f"{rule}.h5").path.read_bytes() for rule in ("keep", "reject")}
    for rule, copied in (("keep", 0), ("reject", N - 2), ("keep", N - 2)):
        again = build(data, rule)
        assert again.summary["copied_rows"] == copied
        assert again.path.read_bytes() == fresh[rule]
    assert build(data, "keep").summary["nothing_to_do"]
    assert build(data, "reject", "reject.h5").summary["nothing_to_do"]


def test_the_default_keeps_them(data, capsys):
    assert lm.PipelineConfig().on_dry_file == "keep"
    words = ["build", str(data), "--out", str(data.parent / "y.h5"), "--sample-rate", "4096", "--quiet"]
    assert main([*words, "--duration-s", "1", "--engine", "cpu"]) == 0
    assert "gain_1" in capsys.readouterr().out
    assert main([*words, "--duration-s", "1", "--engine", "cpu", "--on-dry-file", "reject"]) == 0
    assert "rejected: 2 x dry" in capsys.readouterr().out


@pytest.mark.parametrize(("rule", "text"), [("keep", "kept and reported"), ("reject", "rejected as dry")])
def test_the_plan_counts_them(data, rule, text):
    given: dict[str, Any] = {
        "data_root": str(data),
        "engine": "cpu",
        "on_dry_file": rule,
        "out": str(data.parent / "run"),
    }
    assert (
        f"2 of 12 recordings have gain 1: {text}"
        in dict(plan_run(given | SPEC, progress="none").rows())["dry"]
    )


def test_gain_in_a_table(data):
    m = lm.scan(data)
    table = m.table.assign(gain=[1.0] + [8.0] * (N - 1))
    table.to_csv(data.parent / "t.csv", index=False)
    m = lm.scan(data, table=data.parent / "t.csv")
    result = build(data, "reject", manifest=m)
    assert result.rejected["path"].tolist() == [table["path"][0]]
    assert lm.verify(result.path, root=data, table=data.parent / "t.csv").ok
    table.assign(gain=8.0).to_csv(data.parent / "t.csv", index=False)
    report = lm.verify(result.path, root=data, table=data.parent / "t.csv")
    assert [p for p in report.problems if "rejected as dry" in p]
