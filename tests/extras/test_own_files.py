"""Files that leakmel writes and reads again: a flipped bit, a cut or a block of zeros is refused, or changes nothing.

Each case names a file and what uses it: what that returns for the whole file has to be what it returns for the damaged one, unless it is refused.
A cache that is damaged is made again, so there the result is always the same.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from each import each
from made_detectors import SPEC, made_detector, noise, put
from test_nightly import write_nights

import leakmel as lm
from leakmel.core import machine_code
from leakmel.core.errors import DataError, LeakmelError
from leakmel.core.files import open_private, read_own_json, sealed, sealed_json, unsealed
from leakmel.dataset.config import PipelineConfig, this_machine, tuned_path, with_tuned, write_tuned
from leakmel.dataset.existing import read_state, state_path
from leakmel.dataset.modes import list_cache
from leakmel.detector.model.files import (
    Lineage,
    latest_checkpoint,
    model_file,
    save_checkpoint,
    write_lineage,
)
from leakmel.detector.train.folds import FoldTrainer
from leakmel.extras.nightly.history import HISTORY_FILE
from leakmel.extras.nightly.run import nightly
from leakmel.extras.search import Trial
from leakmel.extras.search import read_state as read_search
from leakmel.extras.search import write_state as write_search
from leakmel.pages.dashboard import read_run
from leakmel.recordings.manifest import Manifest
from leakmel.recordings.native import CODE

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET: dict[str, Any] = {"device": "cpu", "progress": "none"}


class Case(SimpleNamespace):
    "A file, and what uses it."

    path: Path
    use: Callable[[], Any]


def without_seal(path: Path) -> None:
    "Make the file one of an earlier version."
    path.write_bytes(unsealed(path.read_bytes()))


def model(tmp: Path) -> Case:
    path = made_detector().save(tmp / "model.pt")
    put(tmp / "r", "a.wav", noise(1, 9000))
    return Case(path=path, use=lambda: lm.predict(tmp / "r", path, **QUIET).table.to_csv())


def nights(tmp: Path) -> Case:
    folder, state = write_nights(tmp / "r", range(1, 4)), tmp / "s"
    trained = made_detector().save(tmp / "model.pt")
    nightly(folder, trained, state, **QUIET)

    def use() -> str:
        nightly(folder, trained, state, **QUIET)
        return (state / "sensors.csv").read_text()

    return Case(path=state / HISTORY_FILE, use=use)


def listing(tmp: Path) -> Case:
    for k in range(6):
        put(tmp / "r", f"{'LEAK' if k % 2 else 'NOLEAK'}/{k}.wav", noise(k, 3000))
    path = lm.scan(tmp / "r", progress="none").save(tmp / "m.npz")

    def use() -> Any:
        (found,) = Manifest.load(path).listings
        values = (found.paths, found.sizes, found.mtimes_ns, found.label_ids, found.parts, found.naming)
        return repr(values), found.folder, found.split

    return Case(path=path, use=use)


def listing_without_digest(tmp: Path) -> Case:
    case = listing(tmp)
    without_seal(case.path)
    return case


def tuned(tmp: Path) -> Case:
    os.environ["XDG_CONFIG_HOME"] = str(tmp)  # the fixture `home` sets it back
    facts: dict[str, Any] = {"schema": 1, "leakmel_version": lm.__version__, "machine": this_machine()}
    facts |= {
        "settings": {"files_per_batch": 7},
        "engine": "auto",
        "device": "auto",
        "made_utc": "2026-01-01",
    }
    path = write_tuned(tmp / "r", facts)

    def use() -> Any:
        config, line = with_tuned(tmp / "r", {})
        if config == PipelineConfig():
            raise DataError("not used", code="invalid-tuned-file")
        return asdict(config), line

    assert path == tuned_path(tmp / "r")
    return Case(path=path, use=use)


def embeddings(tmp: Path) -> Case:
    for k in range(4):
        put(tmp / "r", f"LEAK/{k}.wav", noise(k, 3000 + k))
    lm.embed(None, tmp / "r", out=tmp / "e.npz", spec=SPEC, progress="none")
    use = lambda: lm.similar(tmp / "r" / "LEAK" / "1.wav", tmp / "e.npz", progress="none").table.to_csv()  # noqa: E731
    return Case(path=tmp / "e.npz", use=use)


def search(tmp: Path) -> Case:
    trials = [Trial(0, "complete", {"learning_rate": 0.01}, (0.25, 0.5), (0.75, float("nan")), 1.5)]
    write_search(tmp, {"seed": 3}, trials)
    return Case(path=tmp / "search.json", use=lambda: repr(read_search(tmp)))


def champion(tmp: Path) -> Case:
    from leakmel.extras.retrain import save_champion

    write_lineage(tmp, Lineage((save_champion(tmp, 0, made_detector()),), "testing"))
    return Case(path=tmp / "champion.json", use=lambda: model_file(tmp))


def checkpoint(tmp: Path) -> Case:
    import torch

    path = save_checkpoint(tmp, {"weights": torch.arange(300.0)}, 7).path

    def use() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (found := latest_checkpoint(tmp)) is None:
                raise DataError("skipped", code="damaged-file")
        return found[1]["weights"].tolist()

    return Case(path=path, use=use)


def built(tmp: Path, **options: Any) -> Path:
    for k in range(8):
        put(tmp / "r", f"{'LEAK' if k % 2 else 'NOLEAK'}/{k}.wav", noise(k, 4096 + 50 * k))
    pipeline = lm.PipelineConfig(fsync=False, **options)
    return lm.build(tmp / "r", out=tmp / "x.h5", spec=SPEC, progress="none", check=0, pipeline=pipeline).path


def state(tmp: Path) -> Case:
    path = built(tmp)

    def use() -> Any:
        if (found := read_state(path)) is None:
            raise DataError("not used", code="damaged-file")
        return found[0], found[1].tolist()

    return Case(path=state_path(path), use=use)


def report(tmp: Path) -> Case:
    path = built(tmp)

    def use() -> Any:
        return json.dumps(read_run(tmp).reports, sort_keys=True)

    return Case(path=path.with_name("x.h5.report.json"), use=use)


def samples(tmp: Path) -> Case:
    build = lambda: lm.build(  # noqa: E731
        tmp / "r", out=tmp / "x.h5", spec=SPEC, progress="none", check=0, mode="memmap",
        pipeline=PipelineConfig(fsync=False, cache_dir=str(tmp / "cache")), fresh=True,
    ).path.read_bytes()  # fmt: skip
    for k in range(4):
        put(tmp / "r", f"LEAK/{k}.wav", noise(k, 4096))
    build()
    (path,) = (tmp / "cache").glob("*.samples")
    return Case(path=path, use=build)


def fit(tmp: Path) -> Case:
    n = 6
    data = SimpleNamespace(training=SimpleNamespace(rows=np.arange(n)), identity={})
    trainer = FoldTrainer(data, lm.TrainSettings(), None, folder=tmp)  # type: ignore[arg-type]
    trainer.ds = SimpleNamespace(row_shape=(3, 1, 1, 1))  # type: ignore[assignment]
    right = np.linspace(0, 1, 9, dtype=np.float32).reshape(3, 3)

    def use() -> list[list[float]]:
        from unittest import mock

        from leakmel.detector.train import folds

        with (
            mock.patch.object(folds, "score_rows", return_value=right),
            mock.patch.object(FoldTrainer, "fit"),
            mock.patch.object(FoldTrainer, "_segments"),
        ):
            return trainer.scores("cnn", np.arange(3), np.arange(3, 6)).tolist()

    use()
    (path,) = tmp.glob("*.npy")
    return Case(path=path, use=use)


def code(tmp: Path) -> Case:
    assert CODE.path is not None
    path = Path(shutil.copy(CODE.path, tmp))

    def use() -> Any:
        try:
            functions, constants = machine_code._read(path)
        except (ValueError, KeyError) as e:
            raise DataError("compiled again", code="damaged-file") from e
        return {name: f.arrays for name, f in functions.items()}, constants

    return Case(path=path, use=use)


CASES = {
    f.__name__: f
    for f in (
        model,
        nights,
        listing,
        listing_without_digest,
        tuned,
        embeddings,
        search,
        champion,
        checkpoint,
        state,
        report,
        samples,
        fit,
        code,
    )
}
SLOW = {"samples": 10, "code": 2}  # fewer trials: each builds, or links compiled code


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def damages(raw: bytes, n: int, rng: np.random.Generator) -> Any:
    "Yield n flipped bits, and a tenth as many cuts and blocks of zeros: a name and the bytes."
    for at in rng.integers(len(raw), size=n).tolist():
        bit = int(rng.integers(8))
        yield f"bit {bit} of byte {at}", raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]
    for at in [*rng.integers(len(raw), size=n // 10).tolist(), len(raw) - 1]:
        yield f"cut to {at} bytes", raw[:at]
    for at in [*rng.integers(len(raw), size=n // 10).tolist(), 0, max(0, len(raw) - 512)]:
        block = raw[at : at + 512]
        if any(block):
            yield f"512 zeros from {at}", raw[:at] + bytes(len(block)) + raw[at + 512 :]


@pytest.mark.slow
@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CASES)
def test_damage_is_refused_or_changes_nothing(
    home: None, tmp_path: Path, tried: Callable, name: str, n: int
) -> None:
    case = CASES[name](tmp_path)
    raw, right = case.path.read_bytes(), case.use()
    assert case.use() == right
    st = case.path.stat()
    refused = 0
    n_done = 0
    for what, damaged in damages(raw, n // SLOW.get(name, 1), np.random.default_rng(n)):
        case.path.write_bytes(damaged)
        case.path.chmod(st.st_mode & 0o777)
        os.utime(case.path, ns=(st.st_atime_ns, st.st_mtime_ns))
        try:
            found = case.use()
        except LeakmelError:
            refused += 1
        else:
            assert found == right, what
        n_done += 1
    tried("S20", n_done)
    assert refused or name in ("samples", "fit")  # those are made again
    case.path.write_bytes(raw)
    assert case.use() == right


@each("name", ["listing", "model", "embeddings", "tuned", "search", "champion"])
def test_files_of_earlier_versions_without_a_digest_are_read(home: None, tmp_path: Path, name: str) -> None:
    case = CASES[name](tmp_path)
    right = case.use()
    without_seal(case.path)
    assert case.use() == right


@pytest.mark.slow
@each("values", [{"a": 1}, {"digest": "x", "a": [1, "é"]}, {"a": {"b": None}}])
@each("options", [{}, {"indent": None}, {"indent": None, "separators": (",", ":")}])
def test_each_bit_of_a_sealed_json_file_counts(tmp_path: Path, values: dict, options: dict) -> None:
    path, whole = tmp_path / "x.json", sealed_json(values, **options)
    path.write_bytes(whole)
    assert read_own_json(path) == values
    assert json.loads(whole) | values == json.loads(whole)  # also for other programs
    for k in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[k // 8] ^= 1 << k % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="digest"):
            read_own_json(path)


@each("content", [b"", b"x", bytes(100), os.urandom(3000)])
def test_each_bit_of_a_sealed_file_counts(tmp_path: Path, content: bytes) -> None:
    whole = sealed(content)
    assert unsealed(whole) == content
    for k in range(0, 8 * len(whole), 1 if len(whole) < 1000 else 11):
        damaged = bytearray(whole)
        damaged[k // 8] ^= 1 << k % 8
        with pytest.raises(ValueError, match="digest"):
            unsealed(bytes(damaged))


def test_an_archive_that_is_cut_within_its_digest_is_refused(tmp_path: Path) -> None:
    whole = made_detector().save(tmp_path / "model.pt").read_bytes()
    content = unsealed(whole)
    for n in range(len(content), len(whole)):
        if n == len(content):
            assert unsealed(whole[:n]) == content  # as an earlier version writes it
            continue
        with pytest.raises(ValueError, match="digest"):
            unsealed(whole[:n])


@pytest.mark.slow
def test_caches_that_another_user_can_write_are_not_used(tmp_path: Path) -> None:
    case = samples(tmp_path)
    right, raw = case.use(), case.path.read_bytes()
    for mode in (0o620, 0o602, 0o666):
        case.path.chmod(mode)
        with pytest.raises(ValueError):
            open_private(case.path)
        (listed,) = list_cache(tmp_path / "cache")
        assert "another user" in listed.problem
        assert case.use() == right  # made again
        assert case.path.stat().st_mode & 0o777 == 0o600
    case.path.rename(tmp_path / "elsewhere")
    case.path.symlink_to(tmp_path / "elsewhere")
    assert case.use() == right  # from the recordings: a link is not followed
    assert (tmp_path / "elsewhere").read_bytes() == raw


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_cache_files_of_another_user_are_not_used(tmp_path: Path) -> None:
    case = samples(tmp_path)
    right = case.use()
    os.chown(case.path, 12345, 12345)
    assert case.use() == right
    assert case.path.stat().st_uid == 0
