"The made set of odd WAV files, and any other set with a manifest: each file is read as libsndfile reads it, bit for bit, or refused as foretold."

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from independent import content, fit, log_mel, off, walk
from odd_wavs import KINDS, READ, REFUSED, by_libsndfile, sample_digest, write_odd_wavs

import leakmel as lm
from leakmel.core.errors import REJECT_CODES, RecordingError
from leakmel.recordings.wav import read_wav

pytestmark = pytest.mark.quick

MAX_BYTES = 16_000_000  # that reading one of them may allocate
KEYS = {
    "samples": {"encoding", "sample_rate", "channels", "n_frames", "sha256"},
    "refused": {"code", "offset"},
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "The made set."
    folder = tmp_path_factory.mktemp("odd") / "set"
    write_odd_wavs(folder)
    return folder


# -- one file against its entry -----------------------------------------------------------------------------------------


def outcome(path: Path) -> dict[str, Any]:
    "What reading a file gives, in the words of a manifest; memory is bounded."
    tracemalloc.start()
    try:
        got = read_wav(path)
    except RecordingError as e:
        return refusal(e, path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_BYTES + 16 * path.stat().st_size, f"{path.name}: {peak:,} bytes allocated"
    return {
        "expect": "samples",
        "encoding": got.encoding,
        "sample_rate": got.sample_rate,
        "channels": got.samples.shape[1],
        "n_frames": len(got.samples),
        "sha256": sample_digest(got.samples),
    }


def refusal(error: RecordingError, path: Path) -> dict[str, Any]:
    "A refusal, found to name path and place."
    assert os.fspath(error.path or "") == os.fspath(path)
    assert str(path) in str(error)
    if error.offset is not None:
        assert f"(byte {error.offset})" in str(error)
    return {"expect": "refused", "code": error.reject_code, "offset": error.offset}


def complaint(folder: Path, entry: dict[str, Any]) -> str:
    "What is wrong about a file; empty where it is read or refused as its entry says."
    if unknown := set(entry) - {"file", "expect"} - KEYS[entry["expect"]]:
        return f"{entry['file']}: the manifest has unknown keys {sorted(unknown)}"
    path = folder / entry["file"]
    got = outcome(path)
    wrong = {k: (got.get(k), v) for k, v in entry.items() if k != "file" and got.get(k) != v}
    if wrong:
        return f"{entry['file']}: " + ", ".join(f"{k} is {a}, not {b}" for k, (a, b) in wrong.items())
    if got["expect"] == "refused":
        return ""
    right, rate = by_libsndfile(path.read_bytes(), got["encoding"])
    same = (sample_digest(right), rate, right.shape) == (
        got["sha256"],
        got["sample_rate"],
        (got["n_frames"], got["channels"]),
    )
    return "" if same else f"{entry['file']}: libsndfile reads it otherwise"


def complaints(folder: Path) -> list[str]:
    "All that is wrong about a folder with a manifest."
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest, "a manifest that lists nothing"
    return [output for entry in manifest if (output := complaint(folder, entry))]


def named_folders() -> list[Path]:
    "The folders in LEAKMEL_ODD_WAVS."
    return [Path(name) for name in os.environ.get("LEAKMEL_ODD_WAVS", "").split(os.pathsep) if name]


# -- the made set -------------------------------------------------------------------------------------------------------


def test_every_file_is_read_or_refused_as_in_the_manifest(odd: Path) -> None:
    assert complaints(odd) == []


def test_odd_set_has_all_kinds_of_files(odd: Path) -> None:
    manifest = json.loads((odd / "manifest.json").read_text())
    assert len({e["file"] for e in manifest}) == len(READ) + len(REFUSED) >= 200
    assert {e["encoding"] for e in manifest if e["expect"] == "samples"} >= {
        f"{kind}{bits}" for kind, bits in KINDS
    } | {"alaw", "ulaw"}
    codes = {e["code"] for e in manifest if e["expect"] == "refused"}
    assert (
        codes
        == {"empty", "not_wav", "truncated", "unsupported", "channels", "nonfinite"}
        <= set(REJECT_CODES)
    )
    assert all(e["offset"] is not None for e in manifest if e["expect"] == "refused"), (
        "whatever is wrong inside a file has a place"
    )


def test_false_sizes_in_headers_allocate_no_memory(odd: Path) -> None:
    "In a process of its own, where the decoder's memory counts too."
    liars = [f"{odd}/{e['file']}" for e in json.loads((odd / "manifest.json").read_text())]
    script = """
import contextlib, resource, sys
from leakmel.recordings.wav import read_wav
from leakmel.core.errors import RecordingError
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
for name in ("A-law", "float64", "pcm24"): read_wav(f"{sys.argv[1]}/{name}.wav")
before = peak()
for path in sys.stdin.read().splitlines():
    with contextlib.suppress(RecordingError): read_wav(path)
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(odd)],
        input="\n".join(liars),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert int(done.stdout) < MAX_BYTES


# -- other sets ---------------------------------------------------------------------------------------------------------


def test_named_folders(odd: Path) -> None:
    "Where none is named, the made set stands in."
    for folder in named_folders() or [odd]:
        assert complaints(folder) == [], folder


def test_named_folder_is_checked(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "The test above passes on the made set; it fails on one with a wrong entry, on a folder without a manifest, and where there is none."
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "canonical.wav").write_bytes(READ["canonical"].content)
    (tmp_path / "wrong" / "manifest.json").write_text(
        json.dumps([{"file": "canonical.wav", "expect": "refused", "code": "empty", "offset": 40}])
    )
    (tmp_path / "bare").mkdir()
    monkeypatch.setenv("LEAKMEL_ODD_WAVS", str(odd))
    test_named_folders(tmp_path / "not looked at")
    monkeypatch.setenv("LEAKMEL_ODD_WAVS", f"{odd}{os.pathsep}{tmp_path / 'wrong'}")
    with pytest.raises(AssertionError, match="expect is samples, not refused"):
        test_named_folders(odd)
    for name in ("bare", "gone"):
        monkeypatch.setenv("LEAKMEL_ODD_WAVS", str(tmp_path / name))
        with pytest.raises(FileNotFoundError):
            test_named_folders(odd)


def changed(entry: dict[str, Any], key: str) -> dict[str, Any]:
    "An entry with one value that is wrong."
    value = entry[key]
    return entry | {
        key: value + 1
        if isinstance(value, int)
        else "empty"
        if key == "code"
        else {"samples": "refused", "refused": "samples"}.get(value, "x")
    }


@pytest.mark.parametrize("expect", ["samples", "refused"])
def test_each_wrong_manifest_value_is_detected(odd: Path, expect: str) -> None:
    entry = next(
        e
        for e in json.loads((odd / "manifest.json").read_text())
        if e["expect"] == expect and e.get("code") != "empty"
    )
    assert complaint(odd, entry) == ""
    for key in KEYS[expect]:
        assert key in complaint(odd, changed(entry, key)), key
    assert complaint(odd, entry | {"offsett": 3})
    assert complaint(odd, {"file": entry["file"], "expect": expect}) == "", (
        "a key that is left out is not compared"
    )
    with pytest.raises(FileNotFoundError):
        complaint(odd, entry | {"file": "gone.wav"})


def test_unknown_offset_is_null(odd: Path) -> None:
    entry = next(e for e in json.loads((odd / "manifest.json").read_text()) if e["expect"] == "refused")
    assert "offset" in complaint(odd, entry | {"offset": None})


# -- a build ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "reference"])
def test_a_build_over_the_whole_set(tmp_path: Path, engine: str) -> None:
    manifest = {f"LEAK/{e['file']}": e for e in write_odd_wavs(tmp_path / "data" / "LEAK")}
    spec = lm.MelSpec(
        sample_rate=4096,
        duration_s=0.25,
        long_window=512,
        long_hop=512,
        n_fft=512,
        short_window=512,
        short_hop=512,
    )
    r = lm.build(
        tmp_path / "data", out=tmp_path / "x.h5", spec=spec, engine=engine, check=None, progress="none"
    )
    got = content(r.path)
    assert r.rows + len(r.rejections) == r.found == len(walk(tmp_path / "data")) == len(manifest)
    rejected = {
        os.fsdecode(p): (c.decode(), m.decode())
        for p, c, m in zip(got["rejected/path"], got["rejected/code"], got["rejected/message"], strict=True)
    }
    assert {p: c for p, (c, _) in rejected.items()} == {
        p: e["code"] for p, e in manifest.items() if e["expect"] == "refused"
    }
    for path, (_, message) in rejected.items():
        assert message.endswith(f"(byte {manifest[path]['offset']})"), path
    config, encodings = json.loads(got["@config_json"]), got["files/encoding"]
    assert len(got["segments_mel"]) == r.rows == len(READ)
    for k, name in enumerate(map(os.fsdecode, got["files/path"])):
        entry = manifest[name]
        assert (
            encodings[k].decode(),
            got["files/sample_rate"][k],
            got["files/channels"][k],
            got["files/n_samples"][k],
        ) == tuple(entry[key] for key in ("encoding", "sample_rate", "channels", "n_frames")), name
        x, rate = by_libsndfile((tmp_path / "data" / name).read_bytes(), entry["encoding"])
        row = fit(x.astype(np.float64) / (32_768 if x.dtype == np.int16 else 1), rate, config)
        worst = off(got["segments_mel"][k], log_mel(row, config))
        assert worst <= 0, f"{name} is {worst:.3g} dB out of what is allowed"
    assert lm.verify(r.path, root=tmp_path / "data", sample=None).ok
