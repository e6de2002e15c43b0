"A bit that flips anywhere in rows, labels, paths or digests is found by verify, without the sources."

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

import leakmel as lm
from leakmel.dataset.config import PipelineConfig

pytestmark = pytest.mark.quick

KINDS: dict[str, tuple[str, ...]] = {
    "rows": ("segments_mel", "segments_waveform"),
    "labels": ("labels",),
    "paths": ("files/path", "rejected/path"),
    "digests": ("digests/rows", "digests/waveforms", "files/digest"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, list[tuple[int, int]]]]:
    "A data set of 40 rows with waveforms and a rejected file, and where its parts lie: offset and bytes."
    place = tmp_path_factory.mktemp("rot")
    lm.write_demo(place / "network", n_files=60, faults=True)
    path = lm.build(
        place / "network",
        split="training",
        out=place / "x.h5",
        spec=lm.MelSpec(sample_rate=4096, duration_s=1.0, n_mels=16, long="cut"),
        with_waveforms=True,
        engine="reference",
        progress="none",
        pipeline=PipelineConfig(fsync=False),
    ).path
    with h5py.File(path) as f:
        assert len(f["labels"]) > 30
        assert len(f["rejected/path"]) > 0
        parts = {
            kind: [(f[n].id.get_offset(), f[n].id.get_storage_size()) for n in names]
            for kind, names in KINDS.items()
        }
    return path.read_bytes(), parts


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [25, pytest.param(250, marks=pytest.mark.long)])
def test_flipped_bits(
    whole: tuple[bytes, dict[str, list[tuple[int, int]]]], tmp_path: Path, tried: Callable, kind: str, n: int
) -> None:
    raw, parts = whole
    path, rng = tmp_path / "x.h5", np.random.default_rng(n)
    path.write_bytes(raw)
    assert lm.verify(path).ok
    with path.open("r+b", buffering=0) as f:
        for k in range(n):
            begin, size = parts[kind][k % len(parts[kind])]
            at, bit = begin + int(rng.integers(size)), int(rng.integers(8))
            f.seek(at)
            f.write(bytes([raw[at] ^ 1 << bit]))
            assert not lm.verify(path).ok, f"bit {bit} of byte {at}"
            f.seek(at)
            f.write(raw[at : at + 1])
            tried("S14")
    assert path.read_bytes() == raw
    assert lm.verify(path).ok
