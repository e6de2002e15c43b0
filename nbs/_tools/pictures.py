"""Draw the front page's pictures from a finished run.

usage: python nbs/_tools/pictures.py RUN_FOLDER     (a folder below runs/ with TRAINING_DATASET.H5)

Writes nbs/images/mels.png and nbs/images/timeline.png. Needs kaleido and a Chromium.
"""
import sys
from pathlib import Path

import numpy as np

from leakmel.core.timeline import read_timeline
from leakmel.dataset.reader import open_dataset
from leakmel.insight.plots import batch_timeline, mels_by_label

IMAGES = Path(__file__).resolve().parents[1] / "images"


def save(figure, name: str, height: int) -> None:
    "Write a figure on white, so that it is legible on any page."
    figure.update_layout(paper_bgcolor="white", plot_bgcolor="white")
    figure.write_image(IMAGES / name, width=1100, height=height)
    print(IMAGES / name)


def main(run: Path) -> None:
    "Mel pictures of a typical recording of each label, and the batches' timeline."
    IMAGES.mkdir(exist_ok=True)
    with open_dataset(run / "TRAINING_DATASET.H5") as ds:
        typical = ds.typical_rows()
        rows = np.stack([ds[row][0] for row in typical.values()])
        scales = {name: ds.file[name][:] for name in ("long_start_s", "short_start_s")}
        save(mels_by_label(rows, list(typical), ds.spec.mel_hz, **scales, hop_s=ds.spec.hop_length / ds.spec.sample_rate), "mels.png", 460)
    save(batch_timeline(read_timeline(run / "TRAINING_DATASET.H5.timeline.json")), "timeline.png", 380)


if __name__ == "__main__":
    if len(sys.argv) != 2: raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
