"""Draw the pictures of the documentation: spectrograms of a finished run, the top of visits.html.

usage: python nbs/_tools/pictures.py RUN_FOLDER     (a folder below runs/ with TRAINING_DATASET.H5; needs kaleido and a Chromium)
       python nbs/_tools/pictures.py --visits PAGE     (visits.html of a nightly run; needs playwright)
"""

import shutil
import sys
from pathlib import Path

import numpy as np

from leakmel.dataset.reader import open_dataset
from leakmel.pages.plots import mels_by_label

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "nbs" / "images"


def save(png: bytes, path: Path) -> None:
    "Write a picture and say where it is."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png)
    print(path)


def draw_run(run: Path) -> None:
    "Mel pictures of a typical recording of each label."
    with open_dataset(run / "TRAINING_DATASET.H5") as ds:
        typical = ds.typical_rows()
        rows = np.stack([ds[row][0] for row in typical.values()])
        scales = {name: ds.file[name][:] for name in ("long_start_s", "short_start_s")}
        figure = mels_by_label(
            rows, list(typical), ds.spec.mel_hz, **scales, hop_s=ds.spec.hop_length / ds.spec.sample_rate
        )
    figure.update_layout(paper_bgcolor="white", plot_bgcolor="white")  # legible on any page
    save(figure.to_image("png", width=1100, height=460), IMAGES / "mels.png")


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
    if words[:1] == ["--visits"] and len(words) == 2:
        draw_visits(Path(words[1]))
    elif len(words) == 1 and words[0][:1] != "-":
        draw_run(Path(words[0]))
    else:
        raise SystemExit(__doc__)
