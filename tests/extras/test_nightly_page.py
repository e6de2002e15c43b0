"visits.html: escaped names, no requests, players of recordings that are still the same, map, drift."

import base64
import hashlib
import io
import json
import os
import re
import wave
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from each import each
from made_detectors import made_detector, noise
from test_nightly import QUIET, name, put_at, write_nights

import leakmel as lm
from leakmel.core.errors import DataError
from leakmel.extras.nightly import run as module
from leakmel.extras.nightly.history import History
from leakmel.extras.nightly.nights import (
    MIN_RECORDINGS,
    quantities,
    ranges_of,
    recording_levels,
    reference_of_data_set,
    stored_reference,
)
from leakmel.extras.nightly.run import MAX_CLIP_BYTES, VISITS_HTML, nightly, place_of
from leakmel.recordings.wav import read_wav

pytestmark = pytest.mark.usefixtures("one_thread")
ALLOWED = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "code",
        "div",
        "span",
        "br",
        "footer",
    ),
    *("table", "thead", "tbody", "tr", "th", "td", "img", "audio"),
    *("script", "input"),  # the only script has its digest in the policy
    *("svg", "line", "polyline", "circle", "rect"),
}
HOSTILE = (
    "<script>alert(1)<\u2215script>",
    "'onmouseover='alert(1)",
    "<img src=http:x onerror=alert(1)>",
    '"><audio src=x>',
    "&lt;b&gt;",
    "--><svg onload=alert(1)>",
)


class Reader(HTMLParser):
    "Elements, addresses and attributes of a page."

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.names: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {key for key, _ in attrs}
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_page(state: Path) -> Reader:
    reader = Reader()
    reader.feed((state / VISITS_HTML).read_text(encoding="utf-8"))
    return reader


def test_hostile_names_stay_text(tmp_path):
    folder = tmp_path / "r"
    for k, sensor in enumerate(HOSTILE):
        for day in (1, 2):
            put_at(folder, name(sensor, day), noise(10 * k + day))
    nightly(folder, made_detector(), tmp_path / "s", audits=10, **QUIET)
    page = read_page(tmp_path / "s")
    assert set(page.tags) <= ALLOWED
    assert not any(attribute.startswith("on") for attribute in page.names)
    assert all(address.startswith("data:") for address in page.addresses)
    assert set(HOSTILE) <= set(page.text)
    assert page.tags.count("audio") == len(HOSTILE)


def test_a_page_of_many_sensors_has_the_first_in_full_and_a_table_that_filters(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "IN_FULL", 2)
    hostile = "</script><script>alert(1)"
    folder = write_nights(tmp_path / "r", range(1, 3), sensors=4)
    rows = ["path,label,sensor,start_time"]
    for path in sorted(folder.rglob("*.wav")):
        sensor = hostile if path.name.startswith("P3") else path.name[:2]
        rows.append(
            f"{path.relative_to(folder)},,{sensor},{path.parent.name.replace('d', '2025-01-0')}T23:00:00"
        )
    (tmp_path / "t.csv").write_text("\n".join(rows))
    done = nightly(
        folder,
        made_detector(),
        tmp_path / "s",
        manifest=lm.scan(folder, table=tmp_path / "t.csv"),
        audits=0,
        **QUIET,
    )
    page = (tmp_path / "s" / VISITS_HTML).read_text()
    shown = [r.sensor for r in done.sensors]
    (data,) = re.findall("id='rows'>(.*?)</script>", page)
    assert [line.split("\t")[0] for line in json.loads(data)] == shown[2:]
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    reader = read_page(tmp_path / "s")
    assert reader.tags.count("script") == 2
    assert set(shown[:2]) <= set(reader.text)

    audited = [replace(r, visit="audit", reason=f"why {k}") for k, r in enumerate(done.sensors)]
    page = module.visits_page(replace(done, sensors=tuple(audited)), {}, {})
    (data,) = re.findall("id='rows'>(.*?)</script>", page)
    assert [line.split("\t")[1] for line in json.loads(data)] == ["audit: why 2", "audit: why 3"]
    assert "These are the first 2 of 4 sensors to visit." in page


def test_players_have_the_samples_that_were_scored(tmp_path, monkeypatch):
    folder = write_nights(tmp_path / "r", range(1, 4), sensors=3)
    put_at(folder, f"d3/{name('P9', 3)}", noise(9, 41_000 * 3, level=50))
    (tmp_path / "r" / "d3" / name("P0", 3)).unlink()
    done = nightly(folder, made_detector(), tmp_path / "s", audits=10, **QUIET)
    page = read_page(tmp_path / "s")
    sounds = [base64.b64decode(a.partition(",")[2]) for a in page.addresses if a.startswith("data:audio/wav")]
    assert len(sounds) == len(done.sensors) == 4
    longest = max(sounds, key=len)
    with wave.open(io.BytesIO(longest)) as sound:
        assert sound.getframerate() == 4096
        assert sound.getnframes() == min(40_960, MAX_CLIP_BYTES // 2)
        pcm = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
    assert -21 < 20 * np.log10(np.sqrt(np.mean((pcm / 32_768) ** 2))) < -19
    for path in folder.rglob("P1*"):
        path.unlink()
    other = folder / "d3" / name("P2", 3)
    put_at(folder, f"d3/{name('P2', 3)}", noise(77))
    assert other.is_file()
    nightly(folder, made_detector(), tmp_path / "s", audits=10, **QUIET)
    monkeypatch.setattr(module, "MAX_CLIPS", 2)  # the recording of the first sensor has changed
    assert "no player" in "".join(read_page(tmp_path / "s").text)
    nightly(folder, made_detector(), tmp_path / "s", audits=10, **QUIET)
    assert read_page(tmp_path / "s").tags.count("audio") == 1


def test_a_map_of_a_table_with_coordinates(tmp_path):
    folder = write_nights(tmp_path / "r", range(1, 3), sensors=3)
    rows = ["path,label,sensor,lat,lon"]
    places = {"P0": "48.2,16.3", "P1": "48.3,16.4", "P2": "north,16"}
    for path in sorted(folder.rglob("*.wav")):
        sensor = path.name[:2]
        rows.append(f"{path.relative_to(folder)},,{sensor},{places[sensor]}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    found = lm.scan(folder, table=tmp_path / "t.csv")
    nightly(folder, made_detector(), tmp_path / "s", manifest=found, audits=1, **QUIET)
    text = (tmp_path / "s" / VISITS_HTML).read_text()
    (drawn,) = re.findall(r"<svg class='map'.*?</svg>", text)
    assert drawn.count("<circle") == 2
    assert place_of({"lat": "91", "lon": "0"}) is None


def test_the_reference_of_a_data_set_leaves_out_the_padding_of_short_recordings(tmp_path):
    "A nightly run measures the segments of a recording only."
    spec = lm.MelSpec.preset("disjoint", duration_s=2.0)
    for k in range(MIN_RECORDINGS):
        put_at(tmp_path / "set" / "A", f"{k:02d}.wav", noise(k, n=4096, level=500 + 20 * k))
    built = lm.build(tmp_path / "set", out=tmp_path / "set.h5", spec=spec, progress="none", check=0)
    found = reference_of_data_set(built.path, made_detector(spec))
    paths = sorted((tmp_path / "set" / "A").iterdir())
    digests = [read_wav(path).digest for path in paths]
    levels = recording_levels(tmp_path, [os.fsencode(p) for p in paths], digests, spec, progress="none")
    bands = np.array([x[1] for x in levels if x is not None])
    own = ranges_of(quantities(np.zeros(len(bands)), None, bands))
    assert found.n == len(bands) == MIN_RECORDINGS
    for band in (f"band {k + 1}" for k in range(bands.shape[1])):
        assert found.ranges[band] == pytest.approx(own[band], abs=0.05), band


def test_drift_against_a_data_set(tmp_path):
    spec = lm.MelSpec.preset("disjoint", duration_s=1.0)
    for k in range(MIN_RECORDINGS + 4):
        put_at(tmp_path / "set" / "A", name("Q", 1 + k % 28).replace("~", f"~{k}", 1), noise(k, level=900))
    built = lm.build(tmp_path / "set", out=tmp_path / "set.h5", spec=spec, progress="none", check=0)
    folder = write_nights(tmp_path / "r", range(1, 13), sensors=6)
    detector = made_detector(spec)
    done = nightly(folder, detector, tmp_path / "s", reference=built.path, **QUIET)
    assert done.drift is not None
    assert done.drift.moved[0] == "level"
    assert done.drift.sensors["P0"][0] == "level"
    assert done.warnings
    assert done.warnings[0] in "".join(read_page(tmp_path / "s").text)
    again = nightly(folder, detector, tmp_path / "s", **QUIET)
    assert again.drift is not None
    assert again.drift.reference.source.startswith("data set set.h5")
    other = made_detector(lm.MelSpec.preset("disjoint", duration_s=1.0, n_mels=32))
    with pytest.raises(DataError) as e:
        nightly(folder, other, tmp_path / "other", reference=built.path, **QUIET)
    assert e.value.code == "features-differ"


@each("text", ["", "[]", "{}", '{"n": 5, "source": "x", "ranges": {"level": [1, 2]}}', "[" * 100_000])
def test_a_damaged_reference_is_refused(tmp_path, text):
    with History(tmp_path) as history:
        history.begin()
        history.set_meta("reference", text[:9000])
        with pytest.raises(DataError) as e:
            stored_reference(history)
    assert e.value.code == "invalid-history"
