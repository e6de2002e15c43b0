"""leakmel: folders of pipe recordings to verified log-mel data sets.

Importing this package is light (no NumPy, no torch); each public name loads its module when it is first used.
"""

__version__ = "0.1.0"

from importlib import import_module as _import_module

# public name -> module that defines it; `make export` writes __init__.pyi from it, for type checkers and editors
_PUBLIC = {
    "LeakmelError": "core.errors",
    "read_wav": "audio.wav",
    "Recording": "audio.wav",
    "scan": "audio.manifest",
    "Manifest": "audio.manifest",
    "write_demo": "audio.synth",
    "MelSpec": "mel.spec",
    "log_mel": "mel.engines",
    "PipelineConfig": "dataset.run.config",
    "BuildResult": "dataset.run.publish",
    "build": "dataset.run.pipeline",
    "build_all": "dataset.run.pipeline",
    "build_part": "dataset.run.pipeline",
    "join": "dataset.run.pipeline",
    "PartResult": "dataset.run.pipeline",
    "preload": "dataset.run.modes",
    "Preloaded": "dataset.run.modes",
    "verify": "dataset.check.verify",
    "VerifyReport": "dataset.check.verify",
    "open_dataset": "dataset.file.reader",
    "MelDataset": "dataset.file.reader",
    "export_dataset": "dataset.export.formats",
    "ExportResult": "core.export",
    "export_history": "learn.nightly.history",
    "card": "dataset.export.formats",
    "Card": "dataset.cards",
    "train": "learn.train.loop",
    "TrainResult": "learn.train.loop",
    "TrainSettings": "learn.model.settings",
    "search": "learn.search.search",
    "SearchResult": "learn.search.search",
    "predict": "learn.predict.predict",
    "Predictions": "learn.predict.predict",
    "evaluate": "learn.evaluate.evaluation",
    "Evaluation": "learn.evaluate.evaluation",
    "cross_validate": "learn.evaluate.resampling",
    "CrossValidation": "learn.evaluate.resampling",
    "generalisation": "learn.evaluate.resampling",
    "Generalisation": "learn.evaluate.resampling",
    "learning_curve": "learn.evaluate.resampling",
    "LearningCurve": "learn.evaluate.resampling",
    "embed": "learn.embed.embed",
    "load_embeddings": "learn.embed.embed",
    "Embeddings": "learn.embed.embed",
    "similar": "learn.embed.embed",
    "SimilarRecordings": "learn.embed.embed",
    "export_onnx": "learn.predict.onnx_export",
    "OnnxExport": "learn.predict.onnx_export",
    "suggest": "learn.review.suggest",
    "Suggestions": "learn.review.suggest",
    "SampleMix": "learn.review.suggest",
    "nightly": "learn.nightly.run",
    "NightlyRun": "learn.nightly.run",
    "review": "learn.review.review",
    "ReviewApp": "learn.review.review",
    "retrain": "learn.retrain.rounds",
    "Round": "learn.retrain.rounds",
    "fetch": "sets.fetch",
    "FetchedSet": "sets.fetch",
    "correlate": "locate.correlate",
    "Correlation": "locate.correlate",
    "wave_speed": "locate.correlate",
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
