"The champion of a folder of retraining rounds."

import os
from pathlib import Path

from leakmel.detector.model.detector import Detector, load_detector
from leakmel.detector.model.files import champion_file


def load_champion(folder: str | os.PathLike) -> Detector:
    return load_detector(champion_file(Path(folder)))
