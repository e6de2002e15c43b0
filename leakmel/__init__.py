"""leakmel: folders of pipe recordings to verified log-mel data sets.

Importing this package is light (no NumPy, no torch); each public name loads its module when it is first used.
"""

__version__ = "0.1.0"

from importlib import import_module as _import_module

# public name -> module that defines it; `make export` writes __init__.pyi from it, for type checkers and editors
_PUBLIC = {
    "LeakmelError": "core.errors",
    "read_wav": "recordings.wav",
    "Recording": "recordings.wav",
    "scan": "recordings.manifest",
    "Manifest": "recordings.manifest",
    "write_demo": "recordings.demo",
    "MelSpec": "mel.spec",
    "log_mel": "mel.engines",
    "PipelineConfig": "dataset.config",
    "BuildResult": "dataset.publish",
    "build": "dataset.pipeline",
    "build_all": "dataset.pipeline",
    "build_part": "dataset.pipeline",
    "join": "dataset.pipeline",
    "PartResult": "dataset.pipeline",
    "preload": "dataset.modes",
    "Preloaded": "dataset.modes",
    "verify": "dataset.verify",
    "VerifyReport": "dataset.verify",
    "open_dataset": "dataset.reader",
    "MelDataset": "dataset.reader",
    "export_dataset": "extras.formats",
    "ExportResult": "core.export",
    "export_history": "extras.nightly.history",
    "card": "extras.formats",
    "Card": "core.export",
    "train": "detector.train.loop",
    "TrainResult": "detector.train.loop",
    "TrainSettings": "detector.model.settings",
    "search": "extras.search",
    "SearchResult": "extras.search",
    "predict": "detector.predict.predict",
    "Predictions": "detector.predict.predict",
    "evaluate": "detector.evaluate.evaluation",
    "Evaluation": "detector.evaluate.evaluation",
    "cross_validate": "detector.evaluate.resampling",
    "CrossValidation": "detector.evaluate.resampling",
    "generalisation": "detector.evaluate.resampling",
    "Generalisation": "detector.evaluate.resampling",
    "learning_curve": "detector.evaluate.resampling",
    "LearningCurve": "detector.evaluate.resampling",
    "embed": "extras.similar",
    "load_embeddings": "extras.similar",
    "Embeddings": "extras.similar",
    "similar": "extras.similar",
    "SimilarRecordings": "extras.similar",
    "export_onnx": "extras.onnx",
    "OnnxExport": "extras.onnx",
    "suggest": "extras.review.suggest",
    "Suggestions": "extras.review.suggest",
    "SampleMix": "extras.review.suggest",
    "nightly": "extras.nightly.run",
    "NightlyRun": "extras.nightly.run",
    "review": "extras.review.review",
    "ReviewApp": "extras.review.review",
    "retrain": "extras.retrain",
    "Round": "extras.retrain",
    "fetch": "extras.sets.fetch",
    "FetchedSet": "extras.sets.fetch",
    "correlate": "extras.locate.correlate",
    "Correlation": "extras.locate.correlate",
    "correlate_pairs": "extras.locate.pairs",
    "wave_speed": "extras.locate.correlate",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    "Load the module of a public name on first use (PEP 562)."
    if name not in _PUBLIC:
        raise AttributeError(f"module 'leakmel' has no attribute {name!r}")
    try:
        module = _import_module(f"leakmel.{_PUBLIC[name]}")
    except ModuleNotFoundError as e:
        from .core.errors import missing_package

        raise missing_package(e) from e
    from .core.parameters import add_comments

    globals()[name] = add_comments(getattr(module, name))
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
