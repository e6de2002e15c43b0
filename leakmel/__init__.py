"""leakmel: folders of pipe recordings to verified log-mel data sets.

Importing this package is light (no NumPy, no torch); each public name loads its module when it is first used.
"""

__version__ = "0.1.0"

from importlib import import_module as _import_module

# public name -> module that defines it
_PUBLIC = {
    "LeakmelError": "core.errors",
    "read_wav": "audio.wav",
    "Recording": "audio.wav",
    "scan": "audio.manifest",
    "Manifest": "audio.manifest",
    "write_demo": "audio.synth",
    "MelSpec": "mel.spec",
    "log_mel": "mel.engines",
    "PipelineConfig": "dataset.config",
    "BuildResult": "dataset.publish",
    "build": "dataset.pipeline",
    "build_all": "dataset.pipeline",
    "preload": "dataset.modes",
    "Preloaded": "dataset.modes",
    "hold_on_device": "dataset.resident",
    "ResidentAudio": "dataset.resident",
    "ResidentMels": "dataset.resident",
    "verify": "dataset.verify",
    "VerifyReport": "dataset.verify",
    "open_dataset": "dataset.reader",
    "MelDataset": "dataset.reader",
    "train": "learn.training",
    "TrainResult": "learn.training",
    "TrainSettings": "learn.train_settings",
    "search": "learn.search",
    "SearchResult": "learn.search_results",
    "predict": "learn.predict",
    "Predictions": "learn.predictions",
    "evaluate": "learn.evaluation",
    "Evaluation": "learn.results",
    "retrain": "learn.rounds",
    "Round": "learn.rounds",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    "Load the module of a public name on first use (PEP 562)."
    if name not in _PUBLIC:
        raise AttributeError(f"module 'leakmel' has no attribute {name!r}")
    value = getattr(_import_module(f"leakmel.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
