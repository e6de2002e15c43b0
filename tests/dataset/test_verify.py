"The check can fail: every corruption of a finished data set is reported, and none raises an exception."

import ast
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from each import each
from independent import fit, leftovers, log_mel, read

import leakmel as lm
from leakmel.core.errors import VerifyError
from leakmel.dataset import job as waveforms
from leakmel.dataset import publish, verify
from leakmel.dataset.job import Job
from leakmel.dataset.pipeline import PipelineConfig
from leakmel.dataset.schema import DIGEST_ATTRIBUTE, metadata_digest, stored_spec
from leakmel.dataset.verify import EarlyCheck, Source, VerifyReport, check_early, pick_rows
from leakmel.dataset.writer import RowFile
from leakmel.mel.engines import ReferenceEngine
from leakmel.mel.spec import reference_log_mel
from leakmel.recordings import conform
from leakmel.recordings.wav import digest_of

N = 30


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    "A folder of 31 files, one of them broken, and its data set."
    from leakmel.recordings.demo import write_wav

    base = tmp_path_factory.mktemp("verify")
    for k in range(N):
        where = base / "data" / ("LEAK" if k % 2 else "NOLEAK")
        where.mkdir(parents=True, exist_ok=True)
        write_wav(
            where / f"s{k % 3}~{k:03d}~20240229_120000~5.wav",
            np.random.default_rng(k).integers(-8000, 8000, 4096, dtype=np.int16),
            4096,
        )
    (base / "data" / "LEAK" / "broken.wav").write_bytes(b"RIFF")
    result = lm.build(
        base / "data", out=base / "x.h5", progress="none", pipeline=PipelineConfig(monitor_interval_s=0.0)
    )
    assert (result.rows, len(result.rejections)) == (N, 1)
    return base / "data", result.path


@pytest.fixture
def data(built, tmp_path) -> Path:
    "A copy of the folder that may be spoiled."
    return Path(shutil.copytree(built[0], tmp_path / "data"))


@pytest.fixture
def file(built, tmp_path) -> Path:
    "A copy of the data set that may be spoiled."
    return Path(shutil.copy(built[1], tmp_path / "x.h5"))


def bad(report: VerifyReport, *words: str) -> VerifyReport:
    "The report says no, and why."
    assert not report.ok
    assert report.problems
    assert report.verdict.startswith("NOT OK")
    for w in words:
        assert any(w in p for p in report.problems), report.problems
    assert json.loads(json.dumps(report.to_dict()))["ok"] is False
    return report


def spoil(
    path: Path, change: Callable[[h5py.File], None], *, rows_resealed: bool = False, resealed: bool = False
) -> None:
    "Change a data set; resealed: with digests that fit, as a builder that is wrong, or a forger, would write it."
    with h5py.File(path, "r+") as f:
        change(f)
        if rows_resealed:
            f["digests/rows"][:] = np.array([digest_of(r) for r in f["segments_mel"][:]], "S32")
            if "segments_waveform" in f:
                f["digests/waveforms"][:] = np.array([digest_of(w) for w in f["segments_waveform"][:]], "S32")
        if rows_resealed or resealed:
            f.attrs[DIGEST_ATTRIBUTE] = metadata_digest(f)


# ---- good is good


def test_good_data_set(built):
    data, path = built
    report = lm.verify(path, root=data)
    assert report.ok
    assert (report.n_rows, report.checked, report.scope) == (N, N, "against the sources")
    assert 0 < report.max_abs_db < 0.1
    assert "recomputed" in report.verdict
    assert lm.verify(os.fspath(path), root=os.fspath(data), sample=None).checked == N
    assert lm.verify(path, root=data, sample=3).checked == 3


def test_verdict_without_sources_states_it(built):
    report = lm.verify(built[1])
    assert report.ok
    assert report.checked == 0
    assert "integrity only" in report.verdict
    assert "recomputed" not in report.verdict


def test_verify_changes_no_file(built):
    data, path = built
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in [path, *data.rglob("*.wav")]}
    lm.verify(path, root=data)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before} == before
    path.chmod(0o400)
    assert lm.verify(path).ok


def test_splits_are_found_from_the_root_and_labels_may_bear_their_names(demo, tmp_path):
    r = lm.build(demo, split="testing", out=tmp_path / "x.h5", progress="none")
    assert lm.verify(r.path, root=demo).ok
    bad(lm.verify(r.path, root=demo / "VALIDATION"))


@each("sample", [1, 2, 5, 29, 30, 64, None, 0])
def test_sample_has_its_size(built, sample):
    assert lm.verify(built[1], root=built[0], sample=sample).checked == min(
        N, N if sample is None else sample
    )


def test_sample_includes_extreme_rows():
    rng = np.random.default_rng(0)
    labels, level = rng.integers(0, 5, 10_000).astype(np.int16), rng.normal(size=10_000)
    labels[7777] = 9
    edges = (63, 64, 127, 128, 10_000)
    picked = set(pick_rows(10_000, 64, labels, level, edges).tolist())
    assert {0, 9999, 63, 64, 127, 128, 7777, int(level.argmin()), int(level.argmax())} <= picked
    assert len(picked) == 64
    assert picked == set(pick_rows(10_000, 64, labels, level, edges).tolist())
    for n in (1, 2, 63, 64, 65):
        rows = pick_rows(n, 64, np.zeros(n, np.int16), np.zeros(n))
        assert len(rows) == len(set(rows.tolist())) == min(n, 64)
        assert (np.diff(rows) > 0).all()


def test_most_of_a_sample_is_known_before_the_levels_are():
    "A build compares these rows while others are computed."
    labels, level = np.zeros(10_000, np.int16), np.random.default_rng(0).normal(size=10_000)
    before = set(pick_rows(10_000, 64, labels, np.zeros(1)).tolist())
    assert len(before & set(pick_rows(10_000, 64, labels, level, (63, 64, 127, 128)).tolist())) >= 58


# ---- rows compared before the file was complete


@pytest.fixture
def early(data, file) -> dict[bytes, EarlyCheck]:
    "The comparison of each row, with one that is wrong."
    with h5py.File(file) as f:
        columns = f["files/path"][:].tolist(), f["segments_mel"][:], f["digests/rows"][:].tolist()
        spec = stored_spec(f)
    found = dict[bytes, EarlyCheck]()
    for path, row, digest in zip(*columns, strict=True):
        check = check_early(os.fsencode(data) + b"/" + path, row[None], digest, spec)
        assert check is not None
        assert check.verdict.ok
        found[path] = check
    assert len(found) == N
    name = sorted(found)[7]
    found[name] = replace(found[name], verdict=replace(found[name].verdict, n_wrong=3))
    return found


def checked(file: Path, data: Path, early: dict[bytes, EarlyCheck]) -> VerifyReport:
    return verify.check_data_set(file, root=data, sample=None, early=early)


def test_rows_compared_early_are_not_computed_again(data, file, early, monkeypatch):
    monkeypatch.setattr(verify, "expected_bounds", lambda *a: pytest.fail("a row was computed again"))
    bad(checked(file, data, early), "3 of")


def test_rows_are_compared_again_where_an_early_check_does_not_hold(data, file, early):
    "That of another row, another recording, or a recording that was touched since."
    name = next(name for name, check in early.items() if not check.verdict.ok)
    for known in (
        early | {name: replace(early[name], digest=b"0" * 32)},
        early | {name: replace(early[name], stamp=(0, 0, 0))},
        {other: check for other, check in early.items() if other != name},
    ):
        report = checked(file, data, known)
        assert report.ok, report.problems
        assert report.checked == N
    os.utime(os.fsencode(data) + b"/" + name, ns=(1, 1))
    assert checked(file, data, early).ok


def test_columns_are_compared_with_what_was_read_early(data, file, early, monkeypatch):
    "The facts of each row are those of its recording, as without an early check."
    name = sorted(early)[3]
    source = early[name].source
    early[name] = replace(early[name], source=Source(b"0" * 32, source.facts, None, None))
    bad(checked(file, data, early), "has changed since the row was computed")


# ---- rows


def test_swapped_rows(built, file):
    def swap(f):
        f["segments_mel"][[3, 17]] = f["segments_mel"][[3, 17]][::-1]

    spoil(file, swap)
    bad(lm.verify(file), "2 rows do not match their digest")
    spoil(file, swap)
    assert lm.verify(file).ok
    spoil(file, swap, rows_resealed=True)
    assert lm.verify(file).ok  # a forger's file: only the sources tell
    bad(lm.verify(file, root=built[0], sample=None), "row 3", "row 17")


@each("value", [0, -200, 1e-3])
def test_one_row_of_one_value(built, file, value):
    def flatten(f):
        f["segments_mel"][11] = value

    spoil(file, flatten)
    bad(lm.verify(file), "first row 11")
    spoil(file, lambda f: None, rows_resealed=True)
    bad(lm.verify(file, root=built[0]), "row 11")


@each("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(file, value):
    def put(f):
        f["segments_mel"][29, 3, 1, 63, 0] = value

    spoil(file, put, rows_resealed=True)
    bad(lm.verify(file), "values of row 29 are not finite")


@each("row", [0, 14, N - 1])
def test_the_largest_difference_is_that_of_all_blocks(built, file, row):
    "Rows are checked some at a time; the worst may be in the first lot or the last."

    def lift(f):
        f["segments_mel"][row] = f["segments_mel"][row] + np.float16(3)

    spoil(file, lift, rows_resealed=True)
    report = bad(lm.verify(file, root=built[0], sample=None), f"row {row} ")
    assert len(report.problems) == 1
    assert report.max_abs_db == pytest.approx(3, abs=0.2)


def wrong_rows(f: h5py.File, data: Path, change: Callable[[np.ndarray, dict], np.ndarray]) -> None:
    "Rewrite all rows with slightly different features."
    config = json.loads(f.attrs["config_json"])
    for k, p in enumerate(f["files/path"][:].tolist()):
        f["segments_mel"][k] = change(fit(*read(os.path.join(os.fsencode(data), p)), config), config)


@pytest.mark.slow
@each(
    ("name", "change"),
    [
        ("shift by a frame", lambda x, c: log_mel(np.roll(x, -c["hop_length"]), c)),
        ("shift by a sample", lambda x, c: log_mel(np.roll(x, 1), c)),
        ("other mel scale", lambda x, c: log_mel(x, c | {"mel_scale": "slaney"})),
        ("slaney norm", lambda x, c: log_mel(x, c | {"mel_norm": "slaney"})),
        ("power", lambda x, c: log_mel(x, c | {"power": 2.0})),
        ("symmetric window", lambda x, c: log_mel(x, c, periodic=False)),
        ("scaled by 32767", lambda x, c: log_mel(x * 32_768 / 32_767 * 1.003, c)),
        ("bands turned over", lambda x, c: log_mel(x, c)[:, :, ::-1]),
        ("segments exchanged", lambda x, c: log_mel(x, c)[:, ::-1]),
        ("clipped 80 dB below the maximum", lambda x, c: np.maximum(log_mel(x, c), log_mel(x, c).max() - 20)),
    ],
)
def test_features_of_another_definition(built, file, name, change):
    spoil(file, lambda f: wrong_rows(f, built[0], change), rows_resealed=True)
    assert lm.verify(file).ok
    report = bad(lm.verify(file, root=built[0], sample=4), "differs from the reference")
    assert len(report.problems) == 4


def test_rows_of_the_independent_implementation_pass(built, file):
    spoil(file, lambda f: wrong_rows(f, built[0], lambda x, c: log_mel(x, c)), rows_resealed=True)
    assert lm.verify(file, root=built[0], sample=None).ok


@pytest.mark.slow
@each("bit", [5, 9, 12, 14, 15])
def test_a_flipped_bit_of_a_row(built, file, bit):
    "From the mantissa's middle to the sign; a lower one may be as small as honest rounding, and only its digest tells."

    def flip(f):
        row = f["segments_mel"][8].view(np.uint16)
        row[2, 1, 40, 0] ^= 1 << bit
        f["segments_mel"][8] = row.view(np.float16)

    spoil(file, flip)
    bad(lm.verify(file), "first row 8")
    spoil(file, lambda f: None, rows_resealed=True)
    bad(lm.verify(file, root=built[0], sample=None), "row 8")


# ---- builders that are wrong


def swap_two(engine, out, samples) -> None:
    out[[0, 1]] = out[[1, 0]]


def zero_one(engine, out, samples) -> None:
    out[-1] = 0


def shift_a_frame(engine, out, samples) -> None:
    out[...] = reference_log_mel(np.roll(samples, -engine.spec.hop_length, axis=1), engine.spec)


def flip_a_bit(engine, out, samples) -> None:
    out.view(np.uint16)[0, 3, 1, 7, 0] ^= 1 << 12


def other_scale(engine, out, samples) -> None:
    for x, row in zip(samples, out, strict=True):
        row[...] = log_mel(x / 32_768, engine.spec.to_dict() | {"mel_scale": "slaney"})


def symmetric_window(engine, out, samples) -> None:
    for x, row in zip(samples, out, strict=True):
        row[...] = log_mel(x / 32_768, engine.spec.to_dict(), periodic=False)


QUIET: dict[str, Any] = {
    "engine": "reference",
    "progress": "none",
    "pipeline": PipelineConfig(files_per_batch=5, monitor_interval_s=0.0),
}


@pytest.mark.slow
@each("wrong", [swap_two, zero_one, shift_a_frame, other_scale, symmetric_window, flip_a_bit])
def test_verify_finds_wrong_rows_by_the_sources(built, tmp_path, monkeypatch, wrong):
    "The digests are those of the wrong rows: without the sources the file is in order."
    real = ReferenceEngine.run

    def run(self, samples, out, **more):
        moments = real(self, samples, out, **more)
        if len(samples) > 1:
            wrong(self, out, samples)  # one alone: the engine's check of itself
        return moments

    monkeypatch.setattr(ReferenceEngine, "run", run)
    r = lm.build(built[0], out=tmp_path / "y.h5", check=0, **QUIET)
    assert lm.verify(r.path).ok
    bad(lm.verify(r.path, root=built[0], sample=None), "differs from the reference")
    with pytest.raises(VerifyError, match="differs from the reference"):
        lm.build(built[0], out=tmp_path / "y.h5", check=None, **QUIET)


def shifted_by_one_row(file, first, rows, real):
    return real(file, first + (first == 5), rows)


def missing_write(file, first, rows, real):
    return rows.nbytes if first == 10 else real(file, first, rows)


def swapped_rows(file, first, rows, real):
    return real(file, first, np.ascontiguousarray(rows[::-1]))


def flipped_bit(file, first, rows, real):
    rows = rows.copy()
    rows.view(np.uint16).reshape(-1)[0] ^= 1
    return real(file, first, rows)


def cut_file(file, first, rows, real):
    n = real(file, first, rows)
    os.ftruncate(file.fd, file.offset + first * file.row_bytes + 3)
    return n


@each("rejected", [True, False])
@each("wrong", [shifted_by_one_row, missing_write, swapped_rows, flipped_bit, cut_file])
def test_writer_faults_prevent_publication(data, tmp_path, monkeypatch, wrong, rejected):
    "Rows that reach the file otherwise than they left the engine, down to one bit, do not match their digest; no source is needed."
    if not rejected:
        (data / "LEAK" / "broken.wav").unlink()
    real = RowFile.write
    monkeypatch.setattr(RowFile, "write", lambda self, first, rows, part=0: wrong(self, first, rows, real))
    with pytest.raises(VerifyError, match=r"do not match their digest|shorter than its header"):
        lm.build(data, out=tmp_path / "out" / "y.h5", check=0, **QUIET)
    assert leftovers(tmp_path / "out") == []


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_each_row_is_read_back_once(data, tmp_path, monkeypatch, compiled):
    "Rows are read back when they are written; when the file is complete, only rows that were moved since, and compressed ones."
    if not compiled:
        monkeypatch.setattr(conform, "native", lambda: None)
    rows = []
    real = verify._row_problems

    def note(pool, f, name, digests, unread):
        rows.append(N if unread is None else int(unread.sum()))
        return real(pool, f, name, digests, unread)

    monkeypatch.setattr(verify, "_row_problems", note)
    lm.build(data, out=tmp_path / "y.h5", **QUIET)  # LEAK/broken.wav is the first file
    (data / "LEAK" / "broken.wav").rename(data / "NOLEAK" / "z.wav")  # now the last one
    lm.build(data, out=tmp_path / "y.h5", fresh=True, **QUIET)
    (data / "NOLEAK" / "z.wav").unlink()
    lm.build(data, out=tmp_path / "y.h5", fresh=True, **QUIET)
    (data / "LEAK" / "s1~001~20240229_120000~5.wav").unlink()
    lm.build(data, out=tmp_path / "y.h5", **QUIET)  # the other rows are copied
    pipeline = PipelineConfig(monitor_interval_s=0.0, compression="gzip")
    lm.build(data, out=tmp_path / "z.h5", progress="none", pipeline=pipeline)
    lm.build(data, out=tmp_path / "w.h5", with_waveforms=True, **QUIET)
    twice = len(np.unique(np.linspace(0, N - 1, publish._READ_TWICE).astype(int)))
    without_last = len(np.unique(np.linspace(0, N - 2, publish._READ_TWICE).astype(int)))
    assert rows[1:4] == [twice, twice, without_last]
    assert [rows[0], *rows[4:]] == [N, N - 1, N - 1, N - 1]
    assert lm.verify(tmp_path / "y.h5").ok
    assert rows[-1] == N
    lm.build(data, out=tmp_path / "v.h5", check=None, **QUIET)
    assert rows[-1] == N - 1  # all rows are to be checked


def test_rows_that_lie_elsewhere_in_the_complete_file_prevent_publication(data, tmp_path, monkeypatch):
    "Some rows are read once more when the file is complete, the first and the last of them."
    real = RowFile.finish

    def moves_rows(self, meta):
        digest = real(self, meta)
        with open(self.partial, "r+b") as f:
            f.seek(self.offset)
            rows = f.read(len(meta.labels) * self.row_bytes)
            f.seek(self.offset)
            f.write(rows[2:] + rows[:2])
        return digest

    monkeypatch.setattr(RowFile, "finish", moves_rows)
    with pytest.raises(VerifyError, match="do not match their digest"):
        lm.build(data, out=tmp_path / "out" / "y.h5", check=0, **QUIET)
    assert leftovers(tmp_path / "out") == []


def test_batch_that_replaces_rows_of_another_one(data, tmp_path, monkeypatch):
    "Rows that were read back are not written again: such a batch belongs elsewhere."
    real = Job.take
    monkeypatch.setattr(Job, "take", lambda self, slot: (real(self, slot), real(self, slot))[1])
    with pytest.raises(VerifyError, match="replace rows of another"):
        lm.build(data, out=tmp_path / "out" / "y.h5", check=0, **QUIET)


@pytest.mark.parametrize("wrong", [swapped_rows, flipped_bit])
def test_writer_faults_of_an_update_prevent_publication(data, tmp_path, monkeypatch, wrong):
    "Rows that are copied from the existing data set are read back too."
    lm.build(data, out=tmp_path / "out" / "y.h5", **QUIET)
    before = (tmp_path / "out" / "y.h5").read_bytes()
    (data / "LEAK" / "s1~001~20240229_120000~5.wav").unlink()
    real = RowFile.write
    monkeypatch.setattr(RowFile, "write", lambda self, first, rows, part=0: wrong(self, first, rows, real))
    with pytest.raises(VerifyError, match="do not match their digest"):
        lm.build(data, out=tmp_path / "out" / "y.h5", check=0, **QUIET)
    assert (tmp_path / "out" / "y.h5").read_bytes() == before


def test_value_that_is_not_finite_is_not_counted_as_read_back(tmp_path):
    file = RowFile(tmp_path / "x.h5", (1, 1, 64, 4), 3)
    rows = np.zeros((3, 1, 1, 64, 4), np.float16)
    rows[1, 0, 0, 5, 1], rows[2, 0, 0, 0, 0] = np.inf, np.nan
    file.write(0, rows)
    right = np.array([digest_of(row) for row in rows], "S32")
    assert file.match_digests(0, right).tolist() == [True, False, False]
    assert file.match_digests(1, right[:1]).tolist() == [False]
    file.abort()


def test_writer_that_leaves_gaps_publishes_nothing(data, tmp_path, monkeypatch):
    (data / "LEAK" / "s0~000.wav").write_bytes(b"no recording")  # comes first

    def gap(self, good):
        self.waveform_offset -= int((~good).sum()) * self.row_bytes

    monkeypatch.setattr(RowFile, "compact_rows", gap)
    with pytest.raises(VerifyError, match="do not match their digest"):
        lm.build(data, out=tmp_path / "out" / "y.h5", check=0, **QUIET)
    monkeypatch.undo()
    real = RowFile.finish

    def early(self, meta):
        real(self, meta)
        os.truncate(self.partial, self.partial.stat().st_size - 1)

    monkeypatch.setattr(RowFile, "finish", early)
    with pytest.raises(VerifyError, match="nothing was published"):
        lm.build(data, out=tmp_path / "out" / "y.h5", check=0, **QUIET)
    assert leftovers(tmp_path / "out") == []


def test_verify_imports_no_code_of_the_builder():
    "No path of imports leads from verify to the loader, the engines, the ring or the writer."
    import leakmel.dataset.verify

    package = Path(lm.__file__).parent
    seen, todo = set(), [Path(leakmel.dataset.verify.__file__)]
    while todo:
        if (path := todo.pop()) in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            if not node.level and (node.module or "").partition(".")[0] != "leakmel":
                continue
            above = path.parents[node.level - 1] if node.level else package.parent
            base = above.joinpath(*(node.module or "").split("."))
            todo += [
                p
                for p in (base.with_suffix(".py"), *(base / f"{a.name}.py" for a in node.names))
                if p.is_file()
            ]
    names = {"/".join(p.relative_to(package).with_suffix("").parts) for p in seen}
    assert {"dataset/verify", "dataset/schema", "mel/spec", "recordings/conform"} <= names
    assert not {
        n
        for n in names
        if n.split("/")[-1]
        in ("loader", "targets", "pipeline", "writer", "waveforms", "engines", "torch_engine", "stock")
    }


# ---- waveforms


@pytest.fixture(scope="module")
def built_with_waveforms(built, tmp_path_factory) -> Path:
    "The data set of the same folder with its waveforms."
    return lm.build(
        built[0], out=tmp_path_factory.mktemp("waves") / "x.h5", with_waveforms=True, **QUIET
    ).path


@pytest.fixture
def waved(built_with_waveforms, tmp_path) -> Path:
    "A copy of the data set with waveforms that may be spoiled."
    return Path(shutil.copy(built_with_waveforms, tmp_path / "w.h5"))


def test_good_waveforms(built, built_with_waveforms):
    report = lm.verify(built_with_waveforms, root=built[0], sample=None)
    assert report.ok
    assert report.checked == N
    assert lm.verify(built_with_waveforms).ok


def change_waves(change: Callable[[np.ndarray], None]) -> Callable[[h5py.File], None]:
    "Something done to the waveforms of a file."

    def done(f):
        waves = f["segments_waveform"][:]
        change(waves)
        f["segments_waveform"][:] = waves

    return done


def swap_waves(w: np.ndarray) -> None:
    w[[3, 17]] = w[[17, 3]]


def scale_waves(w: np.ndarray) -> None:
    w *= np.float32(32_768 / 32_767)


def zero_waves(w: np.ndarray) -> None:
    w[17] = 0


def shift_waves(w: np.ndarray) -> None:
    w[:] = np.roll(w.reshape(len(w), -1), 1, axis=1).reshape(w.shape)


def reverse_waves(w: np.ndarray) -> None:
    w[17] = -w[17]


def flip_lowest_bit(w: np.ndarray) -> None:
    w.view(np.uint32)[17, 3, 1, 511] ^= 1


def exchange_segments(w: np.ndarray) -> None:
    w[17] = w[17][:, ::-1].copy()


@pytest.mark.slow
@each(
    "change",
    [swap_waves, scale_waves, zero_waves, shift_waves, reverse_waves, flip_lowest_bit, exchange_segments],
)
def test_spoiled_waveforms(built, waved, change):
    "Found by their digests; with digests that a forger repaired, by the recordings, to the last bit."
    spoil(waved, change_waves(change))
    bad(lm.verify(waved), "waveforms of", "do not match their digest")
    spoil(waved, lambda f: None, rows_resealed=True)
    assert lm.verify(waved).ok
    bad(lm.verify(waved, root=built[0], sample=None), "row 17", "the waveforms differ from the recording")


@each("value", [np.nan, np.inf, -np.inf])
def test_waveforms_that_are_not_finite(waved, value):
    spoil(waved, change_waves(lambda w: w.__setitem__((29, 3, 1, 511), value)), rows_resealed=True)
    bad(lm.verify(waved), "values of the waveforms of row 29 are not finite")


@pytest.mark.slow
@each(
    ("name", "change"),
    [
        ("no digests", lambda f: f.__delitem__("digests/waveforms")),
        ("no waveforms", lambda f: f.__delitem__("segments_waveform")),
        (
            "digests exchanged",
            lambda f: f["digests/waveforms"].__setitem__(slice(0, 2), f["digests/waveforms"][:2][::-1]),
        ),
        ("one digest less", lambda f: replace_set(f, "digests/waveforms", f["digests/waveforms"][:-1])),
        ("one row less", lambda f: replace_set(f, "segments_waveform", f["segments_waveform"][:-1])),
        (
            "one row more",
            lambda f: replace_set(
                f,
                "segments_waveform",
                np.concatenate([f["segments_waveform"][:], f["segments_waveform"][:1]]),
            ),
        ),
        (
            "float64",
            lambda f: replace_set(f, "segments_waveform", f["segments_waveform"][:].astype(np.float64)),
        ),
        (
            "int16",
            lambda f: replace_set(
                f, "segments_waveform", np.round(f["segments_waveform"][:] * 32_768).astype(np.int16)
            ),
        ),
        ("flat", lambda f: replace_set(f, "segments_waveform", f["segments_waveform"][:].reshape(N, -1))),
        ("a group", lambda f: (f.__delitem__("segments_waveform"), f.create_group("segments_waveform"))),
        ("a scalar", lambda f: replace_set(f, "segments_waveform", np.array(1, np.float32))),
    ],
)
def test_waveforms_that_are_something_else(built, waved, name, change):
    spoil(waved, change, resealed=True)
    bad(lm.verify(waved))
    bad(lm.verify(waved, root=built[0]))


def replace_set(f: h5py.File, name: str, values: np.ndarray) -> None:
    "Put a data set in the place of another."
    del f[name]
    f[name] = values


def test_waveforms_added_to_a_data_set_are_detected(built, file):
    spoil(file, lambda f: f.create_dataset("segments_waveform", data=np.zeros((N, 4, 2, 512), np.float32)))
    bad(lm.verify(file), "waveforms without digests")


def cut_late(samples, spec):
    return REAL_VIEW(np.ascontiguousarray(np.roll(samples, 1, axis=1)), spec)


def cut_from_neighbours(samples, spec):
    return REAL_VIEW(np.ascontiguousarray(np.roll(samples, 1, axis=0)), spec)


def cut_backwards(samples, spec):
    return REAL_VIEW(samples, spec)[..., ::-1]


def cut_by_32767(samples, spec):
    return REAL_VIEW((samples * (32_768 / 32_767)).astype(np.float32), spec)


REAL_VIEW = waveforms.segment_view


@each("wrong", [cut_late, cut_from_neighbours, cut_backwards, cut_by_32767])
def test_wrongly_cut_waveforms_prevent_publication(built, tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(waveforms, "segment_view", wrong)
    with pytest.raises(VerifyError, match="the waveforms differ from the recording"):
        lm.build(built[0], out=tmp_path / "y.h5", with_waveforms=True, check=None, **QUIET)
    assert leftovers(tmp_path) == []


def test_lost_or_changed_waveform_prevents_publication(built, tmp_path, monkeypatch):
    real = RowFile.write

    def lost(self, k, items, part=0):
        return items.nbytes if part and k == 9 else real(self, k, items, part)

    def flipped(self, k, items, part=0):
        items = items.copy()
        items.view(np.uint8).reshape(-1)[0] ^= part
        return real(self, k, items, part)

    for wrong in (lost, flipped):
        monkeypatch.setattr(RowFile, "write", wrong)
        with pytest.raises(VerifyError, match=r"waveforms of .* do not match their digest"):
            lm.build(built[0], out=tmp_path / "y.h5", with_waveforms=True, check=0, **QUIET)
    assert leftovers(tmp_path) == []


# ---- labels, names, attributes


@pytest.mark.slow
@each(
    ("name", "change"),
    [
        ("label", lambda f: f["labels"].__setitem__(5, 1 - f["labels"][5])),
        ("label out of range", lambda f: f["labels"].__setitem__(5, 77)),
        ("negative label", lambda f: f["labels"].__setitem__(5, -1)),
        ("label names turned over", lambda f: f.attrs.__setitem__("labels_json", '["NOLEAK", "LEAK"]')),
        ("a label name less", lambda f: f.attrs.__setitem__("labels_json", '["LEAK"]')),
        ("order of paths", lambda f: f["files/path"].__setitem__(slice(0, 2), f["files/path"][:2][::-1])),
        ("path twice", lambda f: f["files/path"].__setitem__(1, f["files/path"][0])),
        ("rejected code", lambda f: f["rejected/code"].__setitem__(0, b"weather")),
        ("count", lambda f: f.attrs.__setitem__("n_rows", N + 1)),
        ("not complete", lambda f: f.attrs.__setitem__("complete", False)),
        (
            "other geometry",
            lambda f: f.attrs.__setitem__(
                "config_json", json.dumps(json.loads(f.attrs["config_json"]) | {"long_hop": 512})
            ),
        ),
        (
            "senseless geometry",
            lambda f: f.attrs.__setitem__(
                "config_json", json.dumps(json.loads(f.attrs["config_json"]) | {"n_fft": 0})
            ),
        ),
        (
            "unknown setting",
            lambda f: f.attrs.__setitem__(
                "config_json", json.dumps(json.loads(f.attrs["config_json"]) | {"colour": 1})
            ),
        ),
        ("path up", lambda f: f["files/path"].__setitem__(0, b"LEAK/../../../../../../../../etc/passwd")),
        ("schema", lambda f: f.attrs.__setitem__("schema_version", 2)),
        ("digest algorithm", lambda f: f.attrs.__setitem__("digest_algorithm", "md5")),
        ("label numbers", lambda f: f.attrs.__setitem__("label2id_json", '{"LEAK": 1, "NOLEAK": 0}')),
        (
            "label numbers that are none",
            lambda f: f.attrs.__setitem__("label2id_json", '{"LEAK": "0", "NOLEAK": "1"}'),
        ),
        (
            "a label number twice",
            lambda f: f.attrs.__setitem__("label2id_json", '{"LEAK": 0, "LEAK": 1, "NOLEAK": 1}'),
        ),
        (
            "a label name twice",
            lambda f: f.attrs.update(
                labels_json='["LEAK", "NOLEAK", "LEAK"]', label2id_json='{"LEAK": 2, "NOLEAK": 1}'
            ),
        ),
        (
            "label names that are none",
            lambda f: f.attrs.update(labels_json='["LEAK", 7]', label2id_json='{"LEAK": 0, "7": 1}'),
        ),
        ("band centres turned over", lambda f: f["mel_hz"].__setitem__(slice(None), f["mel_hz"][:][::-1])),
        ("a band centre", lambda f: f["mel_hz"].__setitem__(5, f["mel_hz"][5] * (1 + 1e-9))),
        ("long starts", lambda f: f["long_start_s"].__setitem__(3, np.nextafter(f["long_start_s"][3], 9))),
        ("short starts", lambda f: f["short_start_s"].__setitem__(slice(None), np.nan)),
        ("band centres less", lambda f: replace_set(f, "mel_hz", f["mel_hz"][:-1])),
        ("band centres narrow", lambda f: replace_set(f, "mel_hz", f["mel_hz"][:].astype(np.float32))),
        ("fingerprint", lambda f: f.attrs.__setitem__("fingerprint", "0" * 12)),
        ("engine", lambda f: f.attrs.__setitem__("engine", "magic@1/cpu")),
        (
            "floor",
            lambda f: f.attrs.__setitem__(
                "config_json",
                json.dumps(json.loads(f.attrs["config_json"]) | {"floor": 1e-9}, sort_keys=True),
            ),
        ),
        ("no split", lambda f: f.attrs.__setitem__("split", "TRAIN")),
        ("signal", lambda f: f.attrs.__setitem__("signal", "labels")),
        ("axes", lambda f: f.attrs.__setitem__("axes", ["x"])),
        ("class", lambda f: f.attrs.__setitem__("NX_class", "NXentry")),
        ("count that is none", lambda f: f.attrs.__setitem__("n_rows", N + 0.5)),
        ("rejected message less", lambda f: replace_set(f, "rejected/message", f["rejected/message"][:0])),
        ("rejected path up", lambda f: replace_set(f, "rejected/path", np.array([b"../secret.wav"]))),
        ("a row that is rejected too", lambda f: replace_set(f, "rejected/path", f["files/path"][:1])),
        (
            "a name too long",
            lambda f: replace_set(f, "rejected/path", np.array([b"LEAK/" + b"a" * 252 + b".wav"])),
        ),
    ],
)
def test_metadata_that_contradict_themselves_are_found_even_when_resealed(file, name, change):
    spoil(file, change, resealed=True)
    bad(lm.verify(file))


@pytest.mark.slow
@each(
    ("name", "change"),
    [
        (
            "path within its folder",
            lambda f: f["files/path"].__setitem__(N - 1, f["files/path"][N - 1][:-5] + b"9.wav"),
        ),
        ("level", lambda f: f["files/rms_db"].__setitem__(3, -3)),
        ("rate", lambda f: f["files/sample_rate"].__setitem__(3, 44_100)),
        ("sensor", lambda f: f["files/sensor"].__setitem__(3, b"s9")),
        ("status", lambda f: f["files/status"].__setitem__(3, b"up")),
        ("source digest", lambda f: f["files/digest"].__setitem__(3, b"0" * 32)),
        ("rejected path", lambda f: f["rejected/path"].__setitem__(0, b"LEAK/brokem.wav")),
        ("rejected message", lambda f: f["rejected/message"].__setitem__(0, b"fine")),
        ("band centres", lambda f: f["mel_hz"].__setitem__(3, 1.0)),
        ("start times", lambda f: f["long_start_s"].__setitem__(3, 1.0)),
        ("fingerprint", lambda f: f.attrs.__setitem__("fingerprint", "0" * 12)),
        ("engine", lambda f: f.attrs.__setitem__("engine", "magic@1/cpu")),
        (
            "floor",
            lambda f: f.attrs.__setitem__(
                "config_json",
                json.dumps(json.loads(f.attrs["config_json"]) | {"floor": 1e-9}, sort_keys=True),
            ),
        ),
        ("split", lambda f: f.attrs.__setitem__("split", "TRAINING")),
        ("naming", lambda f: f.attrs.__setitem__("naming_json", f.attrs["naming_json"].replace(" ", ""))),
        ("folder", lambda f: f["files/folder"].__setitem__(3, b"x")),
    ],
)
def test_any_change_of_the_metadata_is_found_without_the_sources(file, name, change):
    spoil(file, change)
    bad(lm.verify(file))


@pytest.mark.slow
@each(
    ("name", "change"),
    [
        (
            "path within its folder",
            lambda f: f["files/path"].__setitem__(N - 1, f["files/path"][N - 1][:-5] + b"9.wav"),
        ),
        ("status", lambda f: f["files/status"].__setitem__(3, b"up")),
        ("source digest", lambda f: f["files/digest"].__setitem__(3, b"0" * 32)),
        ("rejected path", lambda f: f["rejected/path"].__setitem__(0, b"LEAK/brokem.wav")),
        ("folder", lambda f: f["files/folder"].__setitem__(3, b"x")),
        ("session", lambda f: f["files/session"].__setitem__(3, b"x")),
    ],
)
def test_resealed_metadata_are_found_with_the_sources(built, file, name, change):
    spoil(file, change, resealed=True)
    assert lm.verify(file).ok
    bad(lm.verify(file, root=built[0]))


@pytest.mark.slow
@each(
    "name",
    [
        "segments_mel",
        "labels",
        "files",
        "files/path",
        "files/digest",
        "files/rms_db",
        "files/status",
        "digests/rows",
        "digests",
        "rejected",
        "rejected/code",
        "mel_hz",
        "rejected/path",
    ],
)
def test_missing_parts(built, file, name):
    spoil(file, lambda f: f.__delitem__(name))
    bad(lm.verify(file))
    bad(lm.verify(file, root=built[0]))


@pytest.mark.slow
@each(
    "name",
    [
        "config_json",
        "labels_json",
        "n_rows",
        "complete",
        DIGEST_ATTRIBUTE,
        "split",
        "schema_version",
        "fingerprint",
    ],
)
def test_missing_attributes(built, file, name):
    spoil(file, lambda f: f.attrs.__delitem__(name))
    bad(lm.verify(file))
    bad(lm.verify(file, root=built[0]))


@pytest.mark.slow
@each(
    "name",
    [
        "segments_mel",
        "labels",
        "files/path",
        "files/rms_db",
        "files/status",
        "digests/rows",
        "rejected/path",
        "rejected/code",
    ],
)
@each("kind", ["shorter", "longer", "scalar", "empty", "group", "float64", "flat", "text", "dangling link"])
def test_parts_of_another_shape_or_type_are_reported_and_no_exception(built, file, name, kind):
    def change(f):
        values = f[name][()]
        del f[name]
        match kind:
            case "shorter":
                f[name] = values[:-1]
            case "longer":
                f[name] = np.concatenate([values, values[:1]])
            case "scalar":
                f[name] = values[0] if values.ndim == 1 else values[0, 0, 0, 0, 0]
            case "empty":
                f[name] = h5py.Empty(values.dtype)
            case "group":
                f.create_group(name)
            case "float64":
                f[name] = np.zeros(values.shape)
            case "flat":
                f[name] = np.zeros((1, values.size), np.int32)
            case "text":
                f.create_dataset(name, data=["x"] * len(values), dtype=h5py.string_dtype())
            case "dangling link":
                f[name] = h5py.SoftLink("/nowhere")

    spoil(file, change)
    bad(lm.verify(file))
    bad(lm.verify(file, root=built[0]))


@pytest.mark.slow
@each(
    "value",
    [
        7,
        "7",
        "[]",
        "{",
        "null",
        "[1, 2]",
        '{"a": 1}',
        b"\xff\xfe",
        np.zeros(3),
        "[" * 100_000,
        h5py.Empty("S1"),
    ],
)
@each(
    "name",
    ["config_json", "labels_json", "n_rows", "complete", "split", "digest_algorithm", DIGEST_ATTRIBUTE],
)
def test_senseless_attributes_are_reported_and_no_exception(built, file, name, value):
    def change(f):
        del f.attrs[name]
        f.attrs[name] = value

    spoil(file, change)
    bad(lm.verify(file))
    bad(lm.verify(file, root=built[0]))


# ---- files that are no data set


@each("content", [b"", b"x", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(5000)])
def test_no_data_set_at_all(tmp_path, content):
    (tmp_path / "x.h5").write_bytes(content)
    bad(lm.verify(tmp_path / "x.h5"))
    bad(lm.verify(tmp_path / "nowhere.h5"), "nowhere.h5")
    bad(lm.verify(tmp_path))
    with h5py.File(tmp_path / "y.h5", "w"):
        pass
    bad(lm.verify(tmp_path / "y.h5"))
    os.mkfifo(tmp_path / "z.h5")
    bad(lm.verify(tmp_path / "z.h5"))


@each("n", [1, 2, 100, 4096])
def test_truncated(file, n):
    os.truncate(file, file.stat().st_size - n)
    bad(lm.verify(file))


def test_data_set_that_claims_to_be_huge(tmp_path, file):
    "A terabyte of nothing in a few kilobytes: refused before anything is read into memory."

    def change(f):
        del f["segments_mel"]
        f.create_dataset("segments_mel", (1 << 33, 4, 2, 64, 1), "f2", chunks=(64, 4, 2, 64, 1))

    spoil(file, change)
    bad(lm.verify(file))


# ---- sources


def test_changed_source(built, data, file):
    victim = sorted(data.rglob("s*.wav"))[4]
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    bad(lm.verify(file, root=data), "has changed since the row was computed")


def test_missing_renamed_and_added_sources(data, file):
    victim = sorted(data.rglob("s*.wav"))[4]
    victim.rename(victim.with_name("other.wav"))
    report = bad(
        lm.verify(file, root=data, sample=0), "no longer exist in the folder", "neither rows nor rejected"
    )
    assert any("other.wav" in p for p in report.problems)
    assert any(victim.name in p for p in report.problems)
    victim.with_name("other.wav").unlink()
    bad(lm.verify(file, root=data, sample=0), "1 recordings of the data set no longer exist in the folder")
    bad(lm.verify(file, root=data), "the recording cannot be read now")


def test_removed_rejected_source_is_reported(data, file):
    (data / "LEAK" / "broken.wav").unlink()
    bad(lm.verify(file, root=data), "broken.wav")


def test_wrong_root(tmp_path, file):
    bad(lm.verify(file, root=tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    bad(lm.verify(file, root=tmp_path / "empty"), "give the data folder that the data set was built from")


def test_links_in_the_folder_are_no_false_alarm(tmp_path, data, make_wav):
    "A circle, a folder elsewhere and a link to a recording: what a scan leaves out, the accounting leaves out too."
    make_wav(tmp_path / "elsewhere" / "a.wav")
    (data / "LEAK" / "circle").symlink_to(data)
    (data / "LEAK" / "away").symlink_to(tmp_path / "elsewhere")
    (data / "LEAK" / "away.wav").symlink_to(tmp_path / "elsewhere" / "a.wav")
    (data / "LEAK" / "twin.wav").symlink_to(sorted((data / "NOLEAK").iterdir())[0])
    (data / "NOLEAK" / "more").symlink_to(data / "LEAK")
    r = lm.build(data, out=tmp_path / "y.h5", progress="none")
    assert r.rows > N

    report = lm.verify(r.path, root=data, sample=None)
    assert report.ok, report.problems
    assert report.checked == r.rows


def test_hostile_paths_do_not_leave_the_root(tmp_path, data, make_wav):
    "A data set from somebody else names files outside the folder: they are not opened."
    samples = make_wav(tmp_path / "secret" / "a.wav", seed=5)
    assert len(samples) == 4096
    r = lm.build(data, out=tmp_path / "y.h5", progress="none")
    for name in (b"../secret/a.wav", os.fsencode(tmp_path / "secret" / "a.wav"), b"LEAK/../../secret/a.wav"):

        def change(f, name=name):
            paths = f["files/path"][:].astype("S200")
            paths[0] = name
            del f["files/path"]
            f["files/path"] = paths

        whole = r.path.read_bytes()
        spoil(r.path, change, resealed=True)
        report = bad(lm.verify(r.path, root=data))
        assert not any("digest than when" in p for p in report.problems), "the file outside was read"
        r.path.write_bytes(whole)


# ---- bit rot


def _verify_quietly(path: str, queue) -> None:
    queue.put(lm.verify(path).ok)


def verdict_of_child(path: Path, seconds: float = 60) -> str:
    "What verify says in a process of its own: HDF5 may hang or crash on a damaged file."
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_verify_quietly, args=(os.fspath(path), queue))
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
        return "hung"
    if child.exitcode:
        return f"died of {child.exitcode}"
    return "ok" if queue.get() else "not ok"


def regions(path: Path) -> dict[str, tuple[int, int]]:
    "Where the parts of a data set lie in its file."
    with h5py.File(path) as f:
        names = [
            "segments_mel",
            "labels",
            *(f"{g}/{n}" for g in ("digests", "files", "rejected") for n in f[g]),
        ]
        if "segments_waveform" in f:
            names.append("segments_waveform")
        return {n: (f[n].id.get_offset(), f[n].id.get_storage_size()) for n in names}


@pytest.mark.slow
@each("seed", range(2))
def test_flipped_bits_in_the_data_are_all_found(file, seed):
    rng, raw = np.random.default_rng(seed), file.read_bytes()
    for name, (at, size) in regions(file).items():
        for _ in range(6 if name in ("segments_mel", "labels", "files/path", "digests/rows") else 1):
            damaged = bytearray(raw)
            damaged[at + int(rng.integers(size))] ^= 1 << int(rng.integers(8))
            file.write_bytes(damaged)
            report = lm.verify(file)
            assert not report.ok, name
    file.write_bytes(raw)
    assert lm.verify(file).ok


@pytest.mark.slow
@each("name", ["segments_waveform", "digests/waveforms", "segments_mel"])
def test_flipped_bits_next_to_waveforms_are_all_found(waved, name):
    rng, raw, (at, size) = np.random.default_rng(5), waved.read_bytes(), regions(waved)[name]
    for _ in range(20):
        damaged = bytearray(raw)
        damaged[at + int(rng.integers(size))] ^= 1 << int(rng.integers(8))
        waved.write_bytes(damaged)
        assert not lm.verify(waved).ok


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_flipped_bits_anywhere_else_are_found_or_harmless(file):
    "In the structure around the data: the file does not open, is not ok, or reads exactly as before."
    from independent import content, same

    rng, raw, before = np.random.default_rng(1), file.read_bytes(), content(file)
    spans = sorted(regions(file).values())
    inside = np.zeros(len(raw), bool)
    for at, size in spans:
        inside[at : at + size] = True
    outside = np.flatnonzero(~inside)
    verdicts: dict[str, int] = {}
    for at in rng.choice(outside, 60, replace=False):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        verdict = verdict_of_child(file)
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
        if verdict == "ok":
            assert same(content(file), before, "@axes"), f"byte {at}"
    assert set(verdicts) <= {"ok", "not ok"}, verdicts


# ---- a data folder that is none ----------------------------------------------------------------------------------------------


def test_invalid_root_is_no_fault_of_the_data_set(file, tmp_path):
    report = bad(
        lm.verify(file, root=tmp_path / "nowhere"),
        f"the data folder cannot be used; the data set was not compared: {tmp_path / 'nowhere'}: no such folder",
    )
    assert (len(report.problems), report.labels_compared, report.scope, report.checked) == (
        1,
        False,
        "integrity only",
        0,
    )
    assert report.n_rows > 0
    bad(lm.verify(file, root=file), "this is a file, but a folder is needed")
    (tmp_path / "twice" / "train").mkdir(parents=True)
    (tmp_path / "twice" / "TRAINING").mkdir()
    report = bad(
        lm.verify(file, root=tmp_path / "twice"),
        "the data folder cannot be used; the data set was not compared",
    )
    assert not any("cannot be read as a data set" in p for p in report.problems)
    with h5py.File(file, "r+") as f:
        f["segments_mel"][0] = 0
    bad(lm.verify(file, root=tmp_path / "nowhere"), "do not match their digest")


def test_labels_of_unreadable_sources_are_reported_as_not_compared(file, data, tmp_path):
    assert lm.verify(file).labels_compared
    (tmp_path / "none.h5").write_bytes(b"nothing")
    assert not bad(lm.verify(tmp_path / "none.h5"), "not an HDF5 file").labels_compared
    (tmp_path / "elsewhere").mkdir()
    assert not bad(
        lm.verify(file, root=tmp_path / "elsewhere"), "give the data folder that the data set was built from"
    ).labels_compared
