"""Draw the pictures of the documentation: two from a finished run, the chart of the comparison from its newest record, the top of visits.html.

usage: python nbs/_tools/pictures.py RUN_FOLDER     (a folder below runs/ with TRAINING_DATASET.H5)
       python nbs/_tools/pictures.py --compare [RECORDS [IMAGES]]     (folders; runs/benchmarks and nbs/images where none is named)
       python nbs/_tools/pictures.py --visits PAGE     (visits.html of a nightly run; needs playwright)

The first writes mels.png and timeline.png into nbs/images, the second compare.png, in which it notes the record's time; a test compares that
with the newest record. Needs kaleido and a Chromium.
"""

import shutil
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

from leakmel.core.timeline import read_timeline
from leakmel.dataset.file.reader import open_dataset
from leakmel.insight.plots import mels_by_label
from leakmel.insight.timeline_plots import batch_timeline
from leakmel.ops.bench import newest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "nbs" / "benchmarks"))
from bench_figures import NOT_MEASURED, rate_figure

IMAGES = ROOT / "nbs" / "images"
KEY = b"Source\0"  # of the note in a picture


def draw(figure, height: int, scale: float = 1) -> bytes:
    "A figure on white, so that it is legible on any page, as PNG."
    figure.update_layout(paper_bgcolor="white", plot_bgcolor="white")
    return figure.to_image("png", width=1100, height=height, scale=scale)


def save(png: bytes, path: Path) -> None:
    "Write a picture and say where it is."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png)
    print(path)


def with_note(png: bytes, note: str) -> bytes:
    "A PNG with a note in a text chunk behind its header."
    body, at = b"tEXt" + KEY + note.encode("latin-1"), 8 + 25  # signature, IHDR
    return png[:at] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + png[at:]


def note_of(png: bytes) -> str | None:
    "The note of a PNG; None where there is none."
    at = 8
    while at < len(png):
        (n,), kind, data = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8], png[at + 8 :]
        if kind == b"tEXt" and data.startswith(KEY):
            return data[len(KEY) : n].decode("latin-1")
        at += 12 + n
    return None


def draw_run(run: Path) -> None:
    "Mel pictures of a typical recording of each label, and the batches' timeline."
    with open_dataset(run / "TRAINING_DATASET.H5") as ds:
        typical = ds.typical_rows()
        rows = np.stack([ds[row][0] for row in typical.values()])
        scales = {name: ds.file[name][:] for name in ("long_start_s", "short_start_s")}
        figure = mels_by_label(
            rows, list(typical), ds.spec.mel_hz, **scales, hop_s=ds.spec.hop_length / ds.spec.sample_rate
        )
    save(draw(figure, 460), IMAGES / "mels.png")
    save(
        draw(batch_timeline(read_timeline(run / "TRAINING_DATASET.H5.timeline.json")), 380),
        IMAGES / "timeline.png",
    )


def draw_compare(records: Path = ROOT / "runs" / "benchmarks", images: Path = IMAGES) -> None:
    "The chart of the newest comparison; without one it says so."
    record = newest("compare", records)
    figure = rate_figure(record)
    save(
        with_note(
            draw(figure, figure.layout.height, scale=2),
            NOT_MEASURED if record is None else record["made_utc"],
        ),
        images / "compare.png",
    )


def draw_visits(page: Path) -> None:
    "The top of the page of a nightly run."
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1200, "height": 760}, color_scheme="light")
        opened.goto(page.resolve().as_uri())
        save(opened.screenshot(), IMAGES / "visits.png")
        browser.close()


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["--compare"] and len(words) <= 3:
        draw_compare(*map(Path, words[1:]))
    elif words[:1] == ["--visits"] and len(words) == 2:
        draw_visits(Path(words[1]))
    elif len(words) == 1 and words[0][:1] != "-":
        draw_run(Path(words[0]))
    else:
        raise SystemExit(__doc__)
