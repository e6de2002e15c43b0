"""Write the section "Other parameters" of build.ipynb and train.ipynb from the settings classes of the package."""

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

HEADING = "## Other parameters"
INTRODUCTION = (
    "Set them by `-p NAME VALUE` too, or add them to the parameters cell. "
    "Papermill prints `Passed unknown parameter` for them; the notebook checks their names and types."
)


# Parameters of build.ipynb that are no field of a settings class: name, default, meaning.
OF_BUILD: list[tuple[str, object, str]] = [
    ("columns", "", "columns of the table that have other names, for example `sensor=pipe,recording=file`"),
    ("labels", None, "table of labels by people (labels.csv), which replace those of folders and tables"),
    ("mode", "auto", "how recordings are read: auto, stream, preload or memmap"),
    ("tuned", True, "use the settings that `leakmel machine tune` measured for this folder on this machine"),
]


def parameter_defaults(cls: type) -> dict[str, Any]:
    "Return the defaults of an operation's parameters in a notebook; None: a value is found, or not given."
    from leakmel.core.operation import parameter_fields

    found: dict[str, Any] = {}
    for f, g, _ in parameter_fields(cls):
        default = None if f.metadata.get("of") or g.default is MISSING else g.default
        if g is f and isinstance(default, tuple):
            default = None if f.metadata.get("several") else ",".join(map(str, default))
        found[g.name] = default
    return found


def other_rows(notebook: str, shown: set[str]) -> list[tuple[str, object, str]]:
    "All parameters of a run notebook that its parameters cell does not list."
    from leakmel.core.parameters import field_choices, source_comments
    from leakmel.dataset.config import PipelineConfig
    from leakmel.detector.model.settings import CheckpointSettings, TrainSettings
    from leakmel.mel.spec import MelSpec
    from leakmel.operations.detector import Train

    rows = [*OF_BUILD] if notebook == "build" else []
    passed_over = {*shown, "preset_name", "settings", "checkpoints", *(name for name, *_ in rows)}
    classes = (MelSpec, PipelineConfig) if notebook == "build" else (Train, TrainSettings, CheckpointSettings)
    for cls in classes:
        comments, choices = source_comments(cls), field_choices(cls)
        defaults = parameter_defaults(cls)
        for f in fields(cls):
            if f.name in passed_over or f.metadata.get("command_only"):
                continue
            default = "as in the preset" if cls is MelSpec else defaults[f.name]
            meaning = comments[f.name]
            if f.name in choices:
                meaning += f" ({', '.join(map(str, choices[f.name]))})"
            rows.append((f.name, default, meaning))
    return rows


def write_tables(root: Path) -> None:
    "Rewrite the section in both notebooks."
    for name in ("build", "train"):
        path = root / "nbs" / f"{name}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells = notebook["cells"]
        (parameters,) = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
        shown: dict[str, object] = {}
        exec("".join(parameters["source"]), {}, shown)
        (section,) = [c for c in cells if "".join(c["source"]).startswith(HEADING)]
        table = [
            f"| `{name}` | {default} | {meaning} |" for name, default, meaning in other_rows(name, set(shown))
        ]
        text = "\n".join(
            [HEADING, "", INTRODUCTION, "", "| parameter | default | meaning |", "|---|---|---|", *table]
        )
        section["source"] = text.splitlines(keepends=True)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_tables(Path(sys.argv[1]))
