"Every mode gives the same bytes; cached recordings are used only while they match the files; too little space selects the next mode."

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from each import each
from errors import raises
from left_threads import left_threads

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import LeakmelError, OutputError, UsageError
from leakmel.core.files import OutputLock
from leakmel.core.timeline import Timeline
from leakmel.dataset import modes
from leakmel.dataset.config import PipelineConfig
from leakmel.dataset.loader import BatchReader
from leakmel.dataset.modes import (
    MODES,
    SUFFIX,
    CachedReader,
    SampleCache,
    cache_folder,
    cache_key,
    cache_path,
    choose_mode,
    clear_cache,
    list_cache,
    load,
)
from leakmel.mel.spec import MelSpec
from leakmel.recordings.manifest import scan

SPEC = MelSpec.preset("disjoint", duration_s=1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    "No test touches the user's cache folder."
    monkeypatch.setenv("LEAKMEL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def mixed(tmp_path, make_wav) -> Path:
    "Recordings of every kind: plain, padded, cut, resampled, stereo, 24 bit, and some that are rejected."
    root = tmp_path / "data"
    for k in range(20):
        make_wav(root / ("LEAK" if k % 2 else "NOLEAK") / f"{k:02d}.wav", seed=k)
    make_wav(root / "LEAK" / "a short.wav", n=3000, seed=50)
    make_wav(root / "LEAK" / "b long.wav", n=6000, seed=51)
    make_wav(root / "LEAK" / "c 8 kHz.wav", n=8000, rate=8000, seed=52)
    noise = np.random.default_rng(5).normal(0, 0.1, (4096, 2)).astype(np.float32)
    soundfile.write(root / "LEAK" / "d stereo.wav", noise, 4096, subtype="FLOAT")
    soundfile.write(root / "NOLEAK" / "e 24.wav", noise[:, 0], 4096, subtype="PCM_24")
    (root / "LEAK" / "f pointer.wav").write_text("version https://git-lfs.github.com/spec/v1")
    (root / "NOLEAK" / "g empty.wav").write_bytes(b"")
    make_wav(root / "loose.wav")
    return root


def build(
    root: Path, out: Path, mode: str = "auto", *, preloaded=None, spec=SPEC, **config
) -> lm.BuildResult:
    config = {"monitor_interval_s": 0.0, "files_per_batch": 4} | config
    return lm.build(
        root,
        out=out,
        mode=mode,
        preloaded=preloaded,
        spec=spec,
        progress="none",
        pipeline=PipelineConfig(**config),
        fresh=True,
    )


def read_counter(monkeypatch) -> list[bytes]:
    "Paths that were read from their files, from now on."
    paths: list[bytes] = []
    real = BatchReader.fill_row

    def fill_row(self, slot, i):
        paths.append(self.listing.paths[slot.first + i])
        return real(self, slot, i)

    monkeypatch.setattr(BatchReader, "fill_row", fill_row)
    return paths


# ---- the same bytes


@pytest.mark.slow
@pytest.mark.parametrize("engine_threads", [pytest.param(1, marks=pytest.mark.long), 3])
def test_same_bytes_from_every_mode(tmp_path, mixed, engine_threads):
    results: dict[tuple[int, str], bytes] = {}
    for mode in (*MODES, "memmap"):
        results[len(results), mode] = build(
            mixed, tmp_path / "x.h5", mode, compute_workers=engine_threads
        ).path.read_bytes()
    with lm.preload(mixed, spec=SPEC, progress="none") as ready:
        for k in range(2):
            results[k, "preloaded"] = build(mixed, tmp_path / "x.h5", preloaded=ready).path.read_bytes()
    assert len(set(results.values())) == 1, {k: len(v) for k, v in results.items()}


def test_reports_of_all_modes_agree(tmp_path, mixed):
    rejected, statuses = set(), set()
    for mode in ("stream", "preload", "memmap", "memmap"):
        result = build(mixed, tmp_path / "x.h5", mode)
        rejected.add(tuple(map(tuple, result.rejected.to_numpy().tolist())))
        statuses.add(json.dumps(result.summary["status_counts"], sort_keys=True))
        assert result.rows + len(result.rejections) == result.found == 28
    assert len(rejected) == len(statuses) == 1


@pytest.mark.slow
def test_all_splits_from_every_mode(tmp_path, demo):
    found = set()
    for mode in ("stream", "preload", "memmap", "memmap"):
        results = lm.build_all(
            demo,
            out_dir=tmp_path / "out",
            mode=mode,
            progress="none",
            pipeline=PipelineConfig(monitor_interval_s=0.0),
            fresh=True,
        )
        found.add(tuple(r.path.read_bytes() for r in results))
        assert {r.summary["mode"] for r in results} == {mode}
    assert len(found) == 1


# ---- held means not read again


def test_preloaded_recordings_are_not_read_again(tmp_path, mixed, monkeypatch):
    with lm.preload(mixed, spec=SPEC, progress="none") as ready:
        read = read_counter(monkeypatch)
        for preset in ("disjoint", "overlap"):
            build(mixed, tmp_path / "x.h5", preloaded=ready, spec=MelSpec.preset(preset, duration_s=1))
    assert sorted(set(read)) == [
        b"LEAK/f pointer.wav",
        b"NOLEAK/g empty.wav",
        b"loose.wav",
    ]  # what was rejected is asked again
    assert ready.n_bytes == 0
    assert not ready.held


def test_cache_file_is_made_once_and_opened_later(tmp_path, mixed, monkeypatch, own_cache):
    first = build(mixed, tmp_path / "x.h5", "memmap")
    assert "cache file created, 25 of 28 recordings" in first.summary["mode_lines"][1]
    assert "files/s" in first.summary["mode_lines"][1]
    read = read_counter(monkeypatch)
    monkeypatch.setattr(modes, "OutputLock", None)  # the folder can be read-only
    later = build(mixed, tmp_path / "x.h5", "memmap", spec=MelSpec.preset("overlap", duration_s=1))
    assert "cache file loaded, 25 of 28" in later.summary["mode_lines"][1]
    assert len(read) == 3
    assert [p.suffix for p in own_cache.iterdir()] == [SUFFIX]  # no lock, no partial file
    auto = build(mixed, tmp_path / "x.h5")
    assert (auto.summary["mode"], auto.summary["mode_asked"]) == ("memmap", "auto")
    assert "exists" in auto.summary["mode_lines"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "rate",
        "duration_s",
        "new file",
        "touched",
        "longer",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("channels", "short", "removed")),
    ],
)
def test_other_recordings_or_rules_have_another_cache_file(tmp_path, mixed, own_cache, change):
    build(mixed, tmp_path / "x.h5", "memmap")
    spec = SPEC
    if change == "rate":
        spec = MelSpec.preset("disjoint", duration_s=1, sample_rate=8000)
    elif change == "duration_s":
        spec = MelSpec.preset("disjoint", duration_s=0.5)
    elif change == "channels":
        spec = MelSpec.preset("disjoint", duration_s=1, channels="first")
    elif change == "short":
        spec = MelSpec.preset("disjoint", duration_s=1, short="reject")
    elif change == "new file":
        (mixed / "LEAK" / "z.wav").write_bytes((mixed / "LEAK" / "01.wav").read_bytes())
    elif change == "touched":
        os.utime(mixed / "LEAK" / "01.wav", ns=(1, 1))
    elif change == "longer":
        (mixed / "LEAK" / "01.wav").write_bytes((mixed / "LEAK" / "01.wav").read_bytes() + b"more")
    else:
        (mixed / "LEAK" / "01.wav").unlink()
    held_ = build(mixed, tmp_path / "x.h5", "memmap", spec=spec)
    assert "created" in held_.summary["mode_lines"][1]
    assert len(list(own_cache.glob(f"*{SUFFIX}"))) == 2
    assert held_.path.read_bytes() == build(mixed, tmp_path / "y.h5", "stream", spec=spec).path.read_bytes()


# ---- stale, damaged, half written


@pytest.mark.parametrize("mode", ["preload", "memmap"])
def test_changed_file_is_rejected_in_every_mode(tmp_path, mixed, mode):
    "The same manifest, and one file that is another one now: rejected as changed, not taken from what is held."
    manifest = lm.scan(mixed)
    with lm.preload(mixed, spec=SPEC, manifest=manifest, mode=mode, progress="none") as ready:
        path = mixed / "LEAK" / "03.wav"
        path.write_bytes(path.read_bytes()[:-2] + b"\1\1")
        (mixed / "LEAK" / "05.wav").unlink()
        common: dict[str, Any] = {"manifest": manifest, "spec": SPEC, "progress": "none"}
        from_held = lm.build(mixed, out=tmp_path / "x.h5", preloaded=ready, **common)
        streamed = lm.build(mixed, out=tmp_path / "y.h5", mode="stream", **common)
    assert from_held.path.read_bytes() == streamed.path.read_bytes()
    assert {"LEAK/03.wav", "LEAK/05.wav"} <= set(from_held.rejected.query("code == 'changed'")["path"])


def test_outdated_preloaded_recordings_are_refused(tmp_path, mixed, make_wav):
    with lm.preload(mixed, spec=SPEC, progress="none") as ready:
        with raises("other-recordings", UsageError):
            build(mixed, tmp_path / "x.h5", preloaded=ready, spec=MelSpec.preset("disjoint", duration_s=0.5))
        make_wav(mixed / "LEAK" / "new.wav", seed=77)
        with raises("other-recordings", UsageError):
            build(mixed, tmp_path / "x.h5", preloaded=ready)
        with raises("mode-conflict", UsageError):
            build(mixed, tmp_path / "x.h5", "stream", preloaded=ready)
    assert not (tmp_path / "x.h5").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        "cut by 1",
        "cut in rows",
        "other file",
        "empty",
        "zeros",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("cut to footer", "longer")),
        *(f"flipped {at}" for at in (-400, -40, -20, -5)),  # facts, their digest, where they begin, kind
    ],
)
def test_damaged_cache_file_is_replaced(tmp_path, mixed, own_cache, damage):
    plain = build(mixed, tmp_path / "x.h5", "stream").path.read_bytes()
    build(mixed, tmp_path / "x.h5", "memmap")
    (path,) = own_cache.iterdir()
    raw = bytearray(path.read_bytes())
    broken = {
        "cut by 1": raw[:-1],
        "cut in rows": raw[:5000],
        "cut to footer": raw[-64:],
        "empty": b"",
        "longer": raw + b"x",
        "other file": b"%PDF-1.7" * 100,
        "zeros": bytes(len(raw)),
    }
    if damage.startswith("flipped"):
        raw[int(damage.split()[1])] ^= 4
    path.write_bytes(broken.get(damage, raw))
    again = build(mixed, tmp_path / "x.h5", "memmap")
    assert "created" in again.summary["mode_lines"][1]
    assert again.path.read_bytes() == plain
    assert "loaded" in build(mixed, tmp_path / "x.h5", "memmap").summary["mode_lines"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "at",
    [0, pytest.param(12_345, marks=pytest.mark.long), pytest.param(100_000, marks=pytest.mark.long), 230_000],
)
def test_flipped_bit_in_cached_rows_is_detected_and_read_again(tmp_path, mixed, own_cache, caplog, at):
    plain = build(mixed, tmp_path / "x.h5", "stream").path.read_bytes()
    build(mixed, tmp_path / "x.h5", "memmap")
    (path,) = own_cache.iterdir()
    before = path.stat().st_mtime_ns
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 16]))
    os.utime(path, ns=(before, before))
    with caplog.at_level(logging.WARNING, "leakmel"):
        again = build(mixed, tmp_path / "x.h5", "memmap")
    assert "loaded" in again.summary["mode_lines"][1]
    assert again.path.read_bytes() == plain
    row = at // (2 * SPEC.n_samples)
    rejected = {b"LEAK/f pointer.wav", b"NOLEAK/g empty.wav", b"loose.wav"}
    wide = {b"LEAK/c 8 kHz.wav", b"LEAK/d stereo.wav", b"NOLEAK/e 24.wav"}
    paths = scan(mixed).listings[0].paths  # behind their 16-bit rows lie the rows of more than 16 bits
    if row >= len(paths) or paths[row] not in rejected | wide:
        assert "cached samples have changed" in caplog.text  # else nothing is held there


def test_cache_file_truncated_during_a_build_raises_no_sigbus(tmp_path, mixed, own_cache, caplog):
    with lm.preload(mixed, spec=SPEC, mode="memmap", progress="none") as ready:
        (path,) = own_cache.iterdir()
        os.truncate(path, 20_000)
        with caplog.at_level(logging.WARNING, "leakmel"):
            result = build(mixed, tmp_path / "x.h5", preloaded=ready)
    assert result.path.read_bytes() == build(mixed, tmp_path / "y.h5", "stream").path.read_bytes()
    assert "cache file cannot be read" in caplog.text


def test_killed_cache_writer_leaves_no_cache_file(tmp_path, mixed, own_cache):
    "Killed while the cache file is being written: no file under its name, the next build makes it."
    code = (
        "import os, sys, leakmel as lm\nfrom leakmel.dataset.modes import SampleCache\n"
        "SampleCache.save = lambda *a: os.kill(os.getpid(), 9)\n"
        f"lm.build({str(mixed)!r}, out={str(tmp_path / 'k.h5')!r}, mode='memmap', spec=lm.MelSpec.preset('disjoint', duration_s=1), progress='none')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -9
    left = [p.name for p in own_cache.iterdir()]
    assert not [n for n in left if n.endswith(SUFFIX)]
    assert [n for n in left if n.endswith(".partial")]
    assert "created" in build(mixed, tmp_path / "x.h5", "memmap").summary["mode_lines"][1]
    assert [p.suffix for p in own_cache.iterdir()] == [SUFFIX]


@pytest.mark.slow
def test_two_processes_share_one_cache_file(tmp_path, mixed, own_cache):
    "Started together: one makes the file, the other waits and opens it; both data sets are the stream's."
    command = [
        sys.executable,
        "-m",
        "leakmel",
        "build",
        str(mixed),
        "--mode",
        "memmap",
        "--duration-s",
        "1",
        "--sample-rate",
        "4096",
        "--json",
        "--out",
    ]
    both = [
        subprocess.Popen([*command, str(tmp_path / f"{k}.h5")], stdout=subprocess.PIPE, text=True)
        for k in range(2)
    ]
    bodies = [json.loads(p.communicate(timeout=60)[0]) for p in both]
    assert sorted(b["mode_lines"][1].split(",")[0] for b in bodies) == [
        "memmap: cache file created",
        "memmap: cache file loaded",
    ]
    plain = build(mixed, tmp_path / "x.h5", "stream").path.read_bytes()
    assert all((tmp_path / f"{k}.h5").read_bytes() == plain for k in range(2))
    assert len(list(own_cache.iterdir())) == 1


def test_second_cache_writer_waits(tmp_path, mixed):
    path = cache_path(cache_folder(), "", cache_key(scan(mixed).listings[0], SPEC))
    path.parent.mkdir()
    done = threading.Event()

    def work():
        build(mixed, tmp_path / "x.h5", "memmap")
        done.set()

    with OutputLock(path):
        thread = threading.Thread(target=work)
        thread.start()
        assert not done.wait(0.5)
    thread.join(60)
    assert done.is_set()


# ---- a place that is too small


def test_preload_larger_than_memory_falls_back_to_a_cache_file(tmp_path, mixed, own_cache):
    result = build(mixed, tmp_path / "x.h5", "preload", ram_fraction=1e-9)
    lines = result.summary["mode_lines"]
    assert result.summary["mode"] == "memmap"
    assert "preload was asked for" in lines[0]
    assert "do not fit" in lines[0]
    assert "created" in lines[1]
    assert len(list(own_cache.iterdir())) == 1


def test_out_of_memory_during_preload_falls_back_to_a_cache_file(tmp_path, mixed, monkeypatch):
    real = SampleCache.take

    def none(self, slot):
        if self.in_memory:
            raise MemoryError
        real(self, slot)

    monkeypatch.setattr(SampleCache, "take", none)
    result = build(mixed, tmp_path / "x.h5", "preload")
    assert result.summary["mode"] == "memmap"
    assert any("mode preload failed" in line for line in result.summary["mode_lines"])


def test_wide_rows_larger_than_memory_fall_back_to_a_cache_file(tmp_path, make_wav, monkeypatch):
    "Need is known for 16 bits only; resampled recordings take three times as much."
    for k in range(20):
        make_wav(tmp_path / "data" / "A" / f"{k}.wav", n=8000, rate=8000, seed=k)
    monkeypatch.setattr(modes, "free_memory", lambda: 20 * 3 * SPEC.n_samples * 2)
    result = build(tmp_path / "data", tmp_path / "x.h5", "preload")
    assert result.summary["mode"] == "memmap"
    assert "more memory than ram_fraction allows" in result.summary["mode_lines"][1]
    assert result.path.read_bytes() == build(tmp_path / "data", tmp_path / "y.h5", "stream").path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["no room", "disk full on the way", "a file for a folder"])
def test_unusable_cache_folder_falls_back_to_streaming(tmp_path, mixed, own_cache, monkeypatch, trouble):
    plain = build(mixed, tmp_path / "x.h5", "stream").path.read_bytes()

    def full(*a, **k):
        raise OSError(28, "No space left on device")

    if trouble == "no room":
        monkeypatch.setattr(
            modes, "require_space", lambda *a: (_ for _ in ()).throw(OutputError("not enough room"))
        )
    if trouble == "disk full on the way":
        monkeypatch.setattr(SampleCache, "take", full)
    if trouble == "a file for a folder":
        own_cache.write_text("mine")
    result = build(mixed, tmp_path / "x.h5", "memmap")
    assert result.summary["mode"] == "stream"
    assert "mode memmap failed" in result.summary["mode_lines"][-1]
    assert result.path.read_bytes() == plain
    if trouble != "a file for a folder":
        assert list(own_cache.iterdir()) == []


def test_error_while_loading_fails_the_build(tmp_path, mixed, monkeypatch, own_cache):
    def broken(self, slot):
        raise ValueError("a bug")

    monkeypatch.setattr(BatchReader, "fill", broken)
    for mode in ("preload", "memmap"):
        with pytest.raises(ValueError, match="a bug"):
            build(mixed, tmp_path / "x.h5", mode)
    assert not list(tmp_path.glob("*x.h5*"))
    assert list(own_cache.iterdir()) == []
    assert not left_threads()


def test_ctrl_c_while_loading(tmp_path, mixed, monkeypatch, own_cache):
    def wait(self, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", wait)
    for mode in ("preload", "memmap"):
        with pytest.raises(KeyboardInterrupt):
            lm.preload(mixed, spec=SPEC, mode=mode, progress="none")
    assert not own_cache.exists() or list(own_cache.iterdir()) == []
    assert not left_threads()


@pytest.mark.parametrize("mode", ["preload", "memmap"])
def test_spec_is_the_same_in_each_mode_and_with_preloaded_recordings(tmp_path, make_wav, mode):
    for name in "abc":
        make_wav(tmp_path / "data" / "A" / f"{name}.wav")
    make_wav(tmp_path / "data" / "A" / "d.wav", n=5000)
    made = build(tmp_path / "data", tmp_path / "x.h5", "stream", spec=None)
    assert made.summary["status_counts"] == {"cut": 1}
    other = build(tmp_path / "data", tmp_path / "y.h5", mode, spec=None)
    with lm.preload(tmp_path / "data", mode=mode, progress="none") as ready:
        preloaded = build(tmp_path / "data", tmp_path / "z.h5", spec=None, preloaded=ready)
    assert made.path.read_bytes() == other.path.read_bytes() == preloaded.path.read_bytes()


@each("cause", ["closed", "split", "rate", "channels", "gone", "changed", "root"])
def test_reason_why_cached_recordings_do_not_fit_is_reported(tmp_path, mixed, demo, cause):
    output = {
        "closed": "nothing (closed)",
        "split": "TRAINING with",
        "rate": "sample_rate=4096",
        "channels": "channels='mean'",
    }.get(cause, "one folder")
    if cause == "split":
        with (
            lm.preload(demo, split="training", progress="none") as ready,
            raises("other-recordings", UsageError, says=output),
        ):
            lm.build(demo, split="testing", out=tmp_path / "x.h5", preloaded=ready, progress="none")
        return
    root, spec = mixed, SPEC
    with lm.preload(mixed, spec=SPEC, progress="none") as ready:
        if cause == "closed":
            ready.close()
        elif cause == "rate":
            spec = MelSpec.preset("disjoint", duration_s=1, sample_rate=8000)
        elif cause == "channels":
            spec = MelSpec.preset("disjoint", duration_s=1, channels="first")
        elif cause == "gone":
            (mixed / "LEAK" / "03.wav").unlink()
        elif cause == "changed":
            os.utime(mixed / "LEAK" / "03.wav", ns=(1, 1))
        elif cause == "root":
            root = shutil.copytree(mixed, tmp_path / "copy")
        with raises("other-recordings", UsageError, says=output):
            build(root, tmp_path / "x.h5", preloaded=ready, spec=spec)


def test_a_file_replaced_with_its_times_set_back_is_read_again(tmp_path, mixed):
    build(mixed, tmp_path / "x.h5", "memmap")
    path = mixed / "LEAK" / "03.wav"
    st, raw = path.stat(), path.read_bytes()
    path.write_bytes(raw[:100] + raw[:99:-1])
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
    again = build(mixed, tmp_path / "x.h5", "memmap")
    assert "loaded" in again.summary["mode_lines"][1]
    assert again.path.read_bytes() == build(mixed, tmp_path / "y.h5", "stream").path.read_bytes()


def test_a_cache_folder_among_the_recordings_is_refused(tmp_path, mixed):
    with raises("inside-data", UsageError):
        build(mixed, tmp_path / "x.h5", "memmap", cache_dir=str(mixed / "LEAK"))
    assert not list(mixed.rglob(f"*{SUFFIX}"))


def test_fallback_mode_is_reported_in_all_front_ends(tmp_path, mixed, caplog):
    lm.preload(mixed, spec=SPEC, progress="none", pipeline=PipelineConfig(ram_fraction=1e-9)).close()
    assert "mode memmap (preload was asked for)" in caplog.text


def test_arguments_of_the_wrong_kind(tmp_path, mixed):
    with raises("wrong-type", UsageError):
        lm.build(mixed, out=tmp_path / "x.h5", pipeline={"fsync": False})  # type: ignore[arg-type]
    with raises("wrong-type", UsageError, found="'x'"):
        lm.build(mixed, out=tmp_path / "x.h5", preloaded="x", progress="none")  # type: ignore[arg-type]
    with raises("usage", UsageError, found=-1):
        clear_cache(unused_days=-1)


# ---- the choice, the folder, the command


def test_auto_reports_needed_and_free_memory_and_the_reason(mixed, tmp_path):
    config, gb = PipelineConfig(ram_fraction=0.5), 10**9
    fits, not_ = (
        choose_mode("auto", gb, config, free_bytes=4 * gb),
        choose_mode("auto", 3 * gb, config, free_bytes=4 * gb),
    )
    assert fits.used == not_.used == "stream"
    assert fits.reason != not_.reason
    assert "cache_dir" in not_.reason
    assert "1.00 GB of samples, 4.00 GB of memory free" in str(fits)
    assert choose_mode("auto", gb, config, free_bytes=gb, cached=True).used == "memmap"
    assert choose_mode("auto", gb, PipelineConfig(cache_dir="c"), free_bytes=gb).used == "memmap"
    assert choose_mode("preload", 2 * gb, config, free_bytes=4 * gb).used == "preload"
    assert choose_mode("preload", 2 * gb + 1, config, free_bytes=4 * gb).used == "memmap"
    with raises("unknown-mode", UsageError, expected="auto, stream, preload, memmap"):
        build(mixed, tmp_path / "x.h5", "ram")


def test_mode_lines_are_printed_with_the_run(tmp_path, mixed, capsys, caplog):
    with caplog.at_level(logging.INFO, "leakmel"):
        lm.build(mixed, out=tmp_path / "x.h5", mode="preload", spec=SPEC, progress="log")
    assert "mode preload: 229 kB of samples" in caplog.text
    assert "preload: read into memory, 25 of 28 recordings" in caplog.text
    assert "data: preload: 28 of 28 files" in caplog.text
    assert "data: 28 of 28 files" in caplog.text
    assert capsys.readouterr().out == ""


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache_folder(tmp_path / "named") == tmp_path / "named"
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("LEAKMEL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "leakmel"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative, which the standard says to ignore")
    assert cache_folder() == Path.home() / ".cache" / "leakmel"


def test_list_and_clear_by_command(tmp_path, mixed, own_cache, capsys):
    def run(*words):
        assert main(["machine", "cache", *words]) == 0
        said = capsys.readouterr().out
        return json.loads(said) if "--json" in words else said

    assert run("list", "--json")["files"] == []
    build(mixed, tmp_path / "x.h5", "memmap")
    (own_cache / f"training-{0:032x}{SUFFIX}").write_bytes(b"half")
    (own_cache / "notes.txt").write_text("mine")
    (own_cache / f"blood{SUFFIX}").write_text("somebody else's")
    (own_cache / f"folder{SUFFIX}").mkdir()
    listed = run("list", "--json")
    assert {f["recordings"] for f in listed["files"]} == {28, 0}
    assert any("not a complete cache file" in f["problem"] for f in listed["files"])
    assert f"28 recordings of {mixed}" in " ".join(run("list").split())
    assert "removed 0 cache files" in run("clear", "--unused-days", "1")
    assert run("clear", "--json")["n_bytes"] > 0
    assert sorted(p.name for p in own_cache.iterdir()) == [f"blood{SUFFIX}", f"folder{SUFFIX}", "notes.txt"]


def test_clear_keeps_a_cache_file_that_is_being_written(mixed, own_cache):
    own_cache.mkdir()
    target = own_cache / f"all-{1:032x}{SUFFIX}"
    partial = own_cache / f".{target.name}.partial"
    partial.write_bytes(b"")
    with OutputLock(target):
        clear_cache()
        assert partial.exists()
    clear_cache()
    assert not partial.exists()
    assert list_cache() == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_special_files_are_not_opened(tmp_path, mixed, own_cache, kind):
    path = cache_path(own_cache, "", cache_key(scan(mixed).listings[0], SPEC))
    own_cache.mkdir()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(b"mine")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    result = build(mixed, tmp_path / "x.h5", "memmap")
    assert result.verified.ok
    if kind == "link":
        assert (tmp_path / "elsewhere").read_bytes() == b"mine"
        assert (result.summary["mode"], path.is_symlink()) == ("memmap", False)


def test_cache_key_ignores_mel_settings_only(mixed):
    listing = scan(mixed).listings[0]
    assert (
        cache_key(listing, SPEC)
        == cache_key(listing, MelSpec.preset("overlap", duration_s=1))
        == cache_key(scan(mixed).listings[0], SPEC)
    )
    other = [
        MelSpec.preset("disjoint", duration_s=1, **c)
        for c in ({"long": "reject"}, {"rate": "reject"}, {"sample_rate": 4000}, {"channels": "first"})
    ]
    assert len({cache_key(listing, s) for s in [SPEC, *other]}) == 5


def test_memory_estimate_equals_the_samples(mixed):
    with lm.preload(mixed, spec=SPEC, progress="none") as ready:
        wide = 3 * 4 * SPEC.n_samples
        assert ready.n_bytes == 28 * 2 * SPEC.n_samples + wide
        assert "25 of 28 recordings" in repr(ready)
        assert ready.seconds > 0


def test_threads_of_a_loader_end_with_the_first_error(mixed):
    listing = scan(mixed).listings[0]

    class Broken(BatchReader):
        def fill(self, slot):
            raise LeakmelError("enough")

    with pytest.raises(LeakmelError, match="enough"):
        load(
            Broken(listing, SPEC),
            SampleCache("k", len(listing), SPEC.n_samples),
            PipelineConfig(read_workers=4),
            Timeline(),
            "none",
        )
    assert modes.MODES[0] == "auto"


# ---- found by a careful look


@pytest.mark.parametrize("mode", ["memmap", "preloaded"])
def test_cached_recordings_are_independent_of_labels(tmp_path, mixed, mode):
    "Held under one naming, built under another that gives some of them no label: rejected, as by the stream."
    pattern = "{label}/{recording} {*}"
    with lm.preload(
        mixed, spec=SPEC, progress="none", mode="preload" if mode == "preloaded" else "memmap"
    ) as ready:
        manifest = lm.scan(mixed, pattern=pattern)
        common: dict[str, Any] = {"manifest": manifest, "spec": SPEC, "progress": "none"}
        got = lm.build(
            mixed,
            out=tmp_path / "x.h5",
            **common,
            **({"preloaded": ready} if mode == "preloaded" else {"mode": "memmap"}),
        )
    plain = lm.build(mixed, out=tmp_path / "y.h5", mode="stream", **common)
    assert got.path.read_bytes() == plain.path.read_bytes()
    assert "no_label" in set(got.rejected["code"])
    assert got.rows > 0


def test_damaged_and_touched_rows_are_read_again_until_the_cache_is_cleared(
    tmp_path, mixed, own_cache, caplog
):
    plain = build(mixed, tmp_path / "x.h5", "memmap").path.read_bytes()
    (path,) = own_cache.iterdir()
    with path.open("r+b") as f:
        f.write(b"damaged")
    for file in (mixed / "LEAK").iterdir():
        os.chmod(file, 0o600)  # touched, not changed
    for _ in range(2):
        caplog.clear()
        again = build(mixed, tmp_path / "x.h5", "memmap")
        assert "loaded" in again.summary["mode_lines"][1]
        assert again.path.read_bytes() == plain
        assert "until leakmel machine cache clear --cache-dir" in caplog.text
    clear_cache()
    assert "created" in build(mixed, tmp_path / "x.h5", "memmap").summary["mode_lines"][1]


@pytest.mark.parametrize("part", ["Slot", "fill", "take"])
def test_out_of_memory_anywhere_while_loading(tmp_path, mixed, monkeypatch, part):
    "Once, at any place of a loading thread: the next mode is taken, and what was held so far is given back."
    plain, once, kept = build(mixed, tmp_path / "y.h5", "stream").path.read_bytes(), [True], []
    owner = {"Slot": modes, "fill": BatchReader, "take": SampleCache}[part]
    real, real_rows = getattr(owner, part), SampleCache.__init__

    def broken(*a, **k):
        if once.pop() if once else False:
            raise MemoryError
        return real(*a, **k)

    def init(self, *a, **k):
        kept.append(self)
        real_rows(self, *a, **k)

    monkeypatch.setattr(owner, part, broken)
    monkeypatch.setattr(SampleCache, "__init__", init)
    result = build(mixed, tmp_path / "x.h5", "preload")
    assert result.summary["mode"] == "memmap"
    assert result.path.read_bytes() == plain
    assert all(rows.fd == -1 for rows in kept if rows.in_memory)


def test_preload_of_one_split_and_of_a_manifest(tmp_path, demo, mixed):
    manifest = lm.scan(demo)
    with lm.preload(demo, split="training", manifest=manifest, progress="none") as ready:
        assert list(ready.held) == ["TRAINING"]
        assert lm.build(
            demo, split="training", mode="preload", out=tmp_path / "x.h5", preloaded=ready, progress="none"
        ).verified.ok
    with raises("other-manifest", UsageError):
        lm.preload(mixed, manifest=manifest, progress="none")


def test_cache_that_fell_back_serves_the_requested_mode(tmp_path, mixed):
    with lm.preload(mixed, spec=SPEC, progress="none", pipeline=PipelineConfig(ram_fraction=1e-9)) as ready:
        assert ready.choice.used == "memmap"
        assert build(mixed, tmp_path / "x.h5", "preload", preloaded=ready).verified.ok


@pytest.mark.parametrize("mode", ["preload", "memmap"])
def test_cache_closed_during_a_build(tmp_path, mixed, monkeypatch, mode, caplog):
    "Whoever closes what a build still reads gets a warning and right rows, not an error of NumPy."
    plain = build(mixed, tmp_path / "y.h5", "stream").path.read_bytes()
    ready = lm.preload(mixed, spec=SPEC, mode=mode, progress="none")
    real = CachedReader.fill

    def fill(self, slot):
        if slot.batch == 2:
            ready.close()
        return real(self, slot)

    monkeypatch.setattr(CachedReader, "fill", fill)
    assert build(mixed, tmp_path / "x.h5", preloaded=ready, compute_workers=1).path.read_bytes() == plain
    assert "read from their files instead" in caplog.text


def test_process_that_writes_the_cache_file_is_reported(tmp_path, mixed, caplog):
    path = cache_path(cache_folder(), "", cache_key(scan(mixed).listings[0], SPEC))
    path.parent.mkdir()
    with OutputLock(path), caplog.at_level(logging.INFO, "leakmel"):
        thread = threading.Thread(
            target=lambda: lm.build(mixed, out=tmp_path / "x.h5", mode="memmap", spec=SPEC, progress="log")
        )
        thread.start()
        until = time.monotonic() + 60
        while thread.is_alive() and "waiting for process" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
        assert thread.is_alive()
        assert f"waiting for process {os.getpid()}, which is writing the cache file" in caplog.text
    thread.join(60)
    assert (tmp_path / "x.h5").exists()


def test_a_cache_file_of_other_recordings_is_made_again(tmp_path, mixed, own_cache):
    build(mixed, tmp_path / "x.h5", "memmap")
    (path,) = own_cache.iterdir()
    (mixed / "LEAK" / "03.wav").write_bytes((mixed / "LEAK" / "01.wav").read_bytes())
    other = cache_path(own_cache, "", cache_key(scan(mixed).listings[0], SPEC))
    assert other != path
    path.rename(other)
    again = build(mixed, tmp_path / "x.h5", "memmap")
    assert "created" in again.summary["mode_lines"][1]
    assert again.path.read_bytes() == build(mixed, tmp_path / "y.h5", "stream").path.read_bytes()


@pytest.mark.parametrize(
    "code",
    [
        errno.EACCES,
        errno.ENOMEM,
        *(pytest.param(code, marks=pytest.mark.long) for code in (errno.EMFILE, errno.EIO)),
    ],
)
def test_cache_file_that_cannot_be_opened_is_kept(tmp_path, mixed, own_cache, monkeypatch, code):
    plain = build(mixed, tmp_path / "x.h5", "memmap").path.read_bytes()
    (path,) = own_cache.iterdir()
    inode, real = path.stat().st_ino, os.open

    def refuse(name, *args, **options):
        if name == path:
            raise OSError(code, os.strerror(code), str(path))
        return real(name, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    again = build(mixed, tmp_path / "x.h5", "memmap")
    assert again.summary["mode"] == "stream"
    assert again.path.read_bytes() == plain
    assert path.stat().st_ino == inode
    assert os.strerror(code) in list_cache()[0].problem


def test_clear_keeps_a_recently_used_cache_file(mixed, own_cache, monkeypatch):
    path = own_cache / f"all-{1:032x}{SUFFIX}"
    own_cache.mkdir()
    path.write_bytes(b"")
    listed = list_cache()
    os.utime(path, (time.time() + 60,) * 2)
    monkeypatch.setattr(modes, "list_cache", lambda folder: listed)
    assert (clear_cache(), path.exists()) == ([], True)
