"Hostile HDF5 files: refused before data are read, in less than a second and 200 MB, by a process that opens and verifies them."

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from children import Server, server
from each import each

import leakmel as lm
from leakmel.dataset import schema
from leakmel.dataset.config import PipelineConfig

# Reads are noted, and nothing else is changed. What is open when the child ends is closed by the library.
OPEN_OR_VERIFY = """
import h5py
import leakmel as lm
from leakmel.core.errors import LeakmelError
from leakmel.dataset import schema
path, how, reads = {path!r}, {how!r}, []
real = h5py.Dataset.__getitem__, h5py.Dataset.read_direct
h5py.Dataset.__getitem__ = lambda self, *a, **k: (reads.append(self.name), real[0](self, *a, **k))[1]
h5py.Dataset.read_direct = lambda self, *a, **k: (reads.append(self.name), real[1](self, *a, **k))[1]
read_column = schema.read_column
schema.read_column = lambda x: (reads.append(getattr(x, "name", "")), read_column(x))[1]
try:
    if how == "open": lm.open_dataset(path).close(); said = ""
    elif how == "legacy": lm.open_dataset(path, legacy=True).close(); said = ""
    else: report = lm.verify(path); said = "" if report.ok else report.problems[0]
except LeakmelError as e: said = str(e)
print(json.dumps([said, reads]))
"""
SHAPE = (8, 4, 2, 24, 1)
ANYWHERE = 1 << 42  # 4 TiB


@pytest.fixture(scope="module")
def children() -> Iterator[Server]:
    with server(
        "import leakmel as lm, h5py\nfrom leakmel.dataset import reader; from leakmel.dataset import verify\nfrom leakmel.cli import main\n"
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A data set of eight rows."
    place = tmp_path_factory.mktemp("strangers")
    lm.write_demo(place / "network", n_files=12)
    path = lm.build(
        place / "network",
        split="training",
        out=place / "x.h5",
        spec=lm.MelSpec(sample_rate=4096, duration_s=1.0, n_mels=24, long="cut"),
        engine="reference",
        progress="none",
        pipeline=PipelineConfig(fsync=False),
    ).path
    with h5py.File(path) as f:
        assert f["segments_mel"].shape == SHAPE
    return path


def instead(f: h5py.File, name: str = "segments_mel") -> np.ndarray:
    "Take a part away, so that another can have its name."
    values = f[name][()]
    del f[name]
    return values


def other_file(f: h5py.File, name: str) -> str:
    "Another file with a data set that would fit."
    path = f.filename + ".other"
    with h5py.File(path, "w") as g:
        g[name] = f[name][()]
    return path


def rows_in_another_file(f: h5py.File) -> None:
    Path(f.filename + ".secret").write_bytes(bytes(range(256)) * 64)
    instead(f)
    f.create_dataset(
        "segments_mel", SHAPE, "f2", external=[(f.filename + ".secret", 0, 2 * int(np.prod(SHAPE)))]
    )


def labels_in_another_file(f: h5py.File) -> None:
    instead(f, "labels")
    f.create_dataset("labels", (8,), "i2", external=[("/etc/passwd", 0, 16)])


def external_link(f: h5py.File) -> None:
    other = other_file(f, "segments_mel")
    instead(f)
    f["segments_mel"] = h5py.ExternalLink(other, "segments_mel")


def external_link_to_a_pipe(f: h5py.File) -> None:
    os.mkfifo(f.filename + ".pipe")
    f["files/more"] = h5py.ExternalLink(f.filename + ".pipe", "x")


def soft_link(f: h5py.File) -> None:
    f["elsewhere"] = instead(f)
    f["segments_mel"] = h5py.SoftLink("/elsewhere")


def soft_link_to_itself(f: h5py.File) -> None:
    instead(f)
    f["segments_mel"] = h5py.SoftLink("/segments_mel")


def virtual(f: h5py.File) -> None:
    other = other_file(f, "segments_mel")
    instead(f)
    layout = h5py.VirtualLayout(SHAPE, "f2")
    layout[:] = h5py.VirtualSource(other, "segments_mel", SHAPE)
    f.create_virtual_dataset("segments_mel", layout)


def virtual_without_its_source(f: h5py.File) -> None:
    instead(f, "labels")
    layout = h5py.VirtualLayout((8,), "i2")
    layout[:] = h5py.VirtualSource("gone.h5", "labels", (8,))
    f.create_virtual_dataset("labels", layout)


def terabytes_in_chunks(f: h5py.File) -> None:
    instead(f)
    f.create_dataset("segments_mel", (ANYWHERE // 256, *SHAPE[1:]), "f2", chunks=(64, *SHAPE[1:]))
    instead(f, "labels")
    f.create_dataset("labels", (ANYWHERE // 256,), "i2", chunks=(1 << 20,))
    f.attrs["n_rows"] = ANYWHERE // 256


def terabytes_in_one_piece(f: h5py.File) -> None:
    instead(f)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    h5py.h5d.create(
        f.id,
        b"segments_mel",
        h5py.h5t.IEEE_F16LE,
        h5py.h5s.create_simple((ANYWHERE // 256, *SHAPE[1:])),
        plist,
    )


def terabytes_of_labels(f: h5py.File) -> None:
    instead(f, "labels")
    f.create_dataset("labels", (ANYWHERE // 2,), "i2", chunks=(1 << 20,))


def a_huge_chunk(f: h5py.File) -> None:
    "One chunk of nearly 4 GiB, of which a reader would have to make room for all."
    rows = instead(f)
    f.create_dataset(
        "segments_mel",
        SHAPE,
        "f2",
        maxshape=(None, *SHAPE[1:]),
        chunks=((1 << 32) // 384 - 1, *SHAPE[1:]),
        compression="gzip",
    )
    del rows


def groups_in_a_cycle(f: h5py.File) -> None:
    f["files/up"] = f["/"]


def rows_that_are_the_labels_too(f: h5py.File) -> None:
    instead(f, "labels")
    f["labels"] = f["segments_mel"]


def texts_for_rows(f: h5py.File) -> None:
    instead(f)
    f.create_dataset("segments_mel", SHAPE, h5py.string_dtype())


def references_for_labels(f: h5py.File) -> None:
    instead(f, "labels")
    f.create_dataset("labels", (8,), h5py.ref_dtype)


def records_for_rows(f: h5py.File) -> None:
    instead(f)
    f.create_dataset("segments_mel", SHAPE, np.dtype([("a", "f2"), ("b", "f2")]))


def a_type_of_gigabytes(f: h5py.File) -> None:
    instead(f, "labels")
    kind = h5py.h5t.C_S1.copy()
    kind.set_size((1 << 31) - 1)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    h5py.h5d.create(f.id, b"labels", kind, h5py.h5s.create_simple((8,)), plist)


def names_of_ten_megabytes(f: h5py.File) -> None:
    f.attrs["labels_json"] = json.dumps(["x" * 100] * 100_000)


def a_text_of_a_hundred_megabytes(f: h5py.File) -> None:
    f.attrs["labels_json"] = "x" * 100_000_000


def a_text_of_a_hundred_megabytes_in_its_attribute(f: h5py.File) -> None:
    "Of fixed length: the newer format of the library has room for it."
    path, other = f.filename, f.filename + ".new"
    with h5py.File(other, "w", libver="latest") as g:
        for name in f:
            f.copy(f[name], g, name)
        for name, value in f.attrs.items():
            g.attrs[name] = value
        g.attrs.create("more", np.full((), b"x" * 100_000_000, "S100000000"))
    f.close()
    os.replace(other, path)


def a_hundred_texts_of_a_megabyte(f: h5py.File) -> None:
    for k in range(100):
        f.attrs[f"more {k}"] = "x" * 1_000_000


def rows_that_were_never_written(f: h5py.File) -> None:
    "Shown as zeros."
    instead(f)
    f.create_dataset("segments_mel", SHAPE, "f2", chunks=SHAPE)


def labels_packed_a_thousandfold(f: h5py.File) -> None:
    "A file of a few megabytes whose labels fill gigabytes, though no chunk lies."
    n = 1 << 30
    for name, width in (("segments_mel", (n, 1, 1, 1, 1)), ("labels", (n,))):
        instead(f, name)
        f.create_dataset(
            name, width, "f2" if len(width) > 1 else "i2", chunks=(1 << 22, *width[1:]), compression="gzip"
        )
    f.attrs["n_rows"] = n
    f.create_dataset("ballast", data=np.zeros(3 << 20, np.uint8))


def rows_beyond_the_end(f: h5py.File) -> None:
    patch(f, lambda at, size: (at + (1 << 40), size))


def rows_of_another_size(f: h5py.File) -> None:
    patch(f, lambda at, size: (at, size * 1000))


def patch(f: h5py.File, change: Callable[[int, int], tuple[int, int]]) -> None:
    "Let the rows' place in the file be another than it is."
    at, size = f["segments_mel"].id.get_offset(), f["segments_mel"].id.get_storage_size()
    path = f.filename
    f.close()
    raw = Path(path).read_bytes()
    was, now = struct.pack("<QQ", at, size), struct.pack("<QQ", *change(at, size))
    assert raw.count(was) == 1
    Path(path).write_bytes(raw.replace(was, now))


def ten_thousand_groups_deep(f: h5py.File) -> None:
    place = f["files"].id
    for _ in range(10_000):
        place = h5py.h5g.create(place, b"g")


def a_hundred_thousand_groups(f: h5py.File) -> None:
    for k in range(100_000):
        h5py.h5g.create(f.id, b"g%d" % k)


def thousands_of_axes_names(f: h5py.File) -> None:
    for k in range(3000):
        f.attrs[f"more {k}"] = "x" * 1000


STRANGE: list[Callable[[h5py.File], Any]] = [
    rows_in_another_file,
    labels_in_another_file,
    external_link,
    external_link_to_a_pipe,
    soft_link,
    soft_link_to_itself,
    virtual,
    virtual_without_its_source,
    terabytes_in_chunks,
    terabytes_in_one_piece,
    terabytes_of_labels,
    a_huge_chunk,
    groups_in_a_cycle,
    rows_that_are_the_labels_too,
    texts_for_rows,
    references_for_labels,
    records_for_rows,
    a_type_of_gigabytes,
    names_of_ten_megabytes,
    a_text_of_a_hundred_megabytes,
    a_text_of_a_hundred_megabytes_in_its_attribute,
    a_hundred_texts_of_a_megabyte,
    rows_that_were_never_written,
    labels_packed_a_thousandfold,
    rows_beyond_the_end,
    rows_of_another_size,
    ten_thousand_groups_deep,
    a_hundred_thousand_groups,
    thousands_of_axes_names,
]


@pytest.mark.slow
@each("strange", STRANGE, ids=lambda s: s.__name__)
def test_hostile_file_is_refused(
    good: Path, tmp_path: Path, children: Server, tried: Callable, strange: Callable[[h5py.File], Any]
) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(good.read_bytes())
    with h5py.File(path, "r+") as f:
        strange(f)
    for how in ("open", "legacy", "verify"):
        done = children.run(code=OPEN_OR_VERIFY.format(path=os.fspath(path), how=how), seconds=30)
        assert (done.hung, done.status) == (False, 0), f"{how}: {done.err}"
        output, reads = json.loads(done.out)
        assert output, how
        assert reads == [], f"{how}: {output}"
        assert done.peak_bytes < 200e6, f"{how}: {done.peak_bytes / 1e6:.0f} MB"
        tried("S18")


def a_group_among_digests(f: h5py.File) -> None:
    f.create_group("digests/x")


def a_group_among_columns(f: h5py.File) -> None:
    f.create_group("files/extra/zz")


def a_type_among_columns(f: h5py.File) -> None:
    f["files/mytype"] = np.dtype("f4")


@pytest.mark.slow
@each("strange", [a_group_among_digests, a_group_among_columns, a_type_among_columns])
def test_an_object_that_is_no_column_is_reported(
    good: Path, tmp_path: Path, strange: Callable[[h5py.File], Any]
) -> None:
    "No digest covers it, and readers of columns fail."
    path = tmp_path / "x.h5"
    path.write_bytes(good.read_bytes())
    with h5py.File(path, "r+") as f:
        strange(f)
    assert not lm.verify(path).ok


@pytest.mark.slow
def test_many_packed_columns_are_not_kept_in_memory(good: Path, tmp_path: Path, children: Server) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(good.read_bytes())
    with h5py.File(path, "r+") as f:
        f["files/whole"] = np.zeros(17 << 20, np.uint8)  # a column may be as large as the file
        for k in range(40):
            f.create_dataset(f"files/c{k}", (16 << 20,), "u1", chunks=(16 << 20,), compression=1)[:] = 0
    done = children.run(code=OPEN_OR_VERIFY.format(path=os.fspath(path), how="verify"), seconds=60)
    output, _ = json.loads(done.out)
    assert "digest" in output
    assert done.peak_bytes < 300e6, f"{done.peak_bytes / 1e6:.0f} MB"


def test_a_part_of_a_column_that_was_never_written_reads_as_zeros(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as f:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((100,))
        plist.set_deflate(1)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((1000,))
        column = h5py.Dataset(h5py.h5d.create(f.id, b"x", h5py.h5t.NATIVE_INT64, space, plist))
        column[:100] = 7
        del column
        for _ in range(20):
            _used = np.full(1000, -1)
            del _used
            values = schema.read_column(f["x"])
            assert np.array_equal(values, np.repeat([7, 0], [100, 900]))


def test_metadata_digest_is_not_computed_past_a_link(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(good.read_bytes())
    with h5py.File(path, "r+") as f:
        f["aaa"] = h5py.SoftLink("/labels")
        with pytest.raises(ValueError, match="link"):
            schema.metadata_digest(f)


@pytest.mark.slow
def test_a_good_file_is_not_refused(good: Path, children: Server) -> None:
    for how in ("open", "legacy", "verify"):
        done = children.run(code=OPEN_OR_VERIFY.format(path=os.fspath(good), how=how))
        output, reads = json.loads(done.out)
        assert (done.status, output) == (0, "")
        assert "/labels" in reads
