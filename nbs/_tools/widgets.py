"""Widgets of executed notebooks as they stood when the run ended: a page has no kernel that could move them, and no script is fetched for them."""

from html import escape
from typing import Any

import nbformat
from figures import PLOTLY, figure_html

VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
NOTE = "<p class='still-note'>Controls are shown as they stood; in a running notebook they move what is below them.</p>"
CONTROLS = (
    "Slider",
    "Dropdown",
    "Select",
    "Checkbox",
    "Text",
    "ToggleButton",
    "RadioButtons",
    "Combobox",
    "Button",
    "Play",
    "IntProgress",
    "FloatProgress",
)


def still_widgets(notebook: Any) -> int:
    "Turn the widgets of a notebook into HTML; returns how many outputs had one."
    state = notebook.metadata.get("widgets", {}).get(STATE, {}).get("state", {})
    outputs = [
        o for c in notebook.cells if c.cell_type == "code" for o in c.outputs if VIEW in o.get("data", {})
    ]
    for o in outputs:
        shown = _shown(o.data[VIEW]["model_id"], state)
        if shown:
            o.data = nbformat.from_dict({"text/html": f"{NOTE}<div class='still-widgets'>{shown}</div>"})
        else:
            del o.data[VIEW]  # the text that Jupyter stores beside a widget remains
    return len(outputs)


def _shown(name: str, state: dict[str, Any]) -> str:
    "A widget and what is in it."
    model = state.get(name.removeprefix("IPY_MODEL_"))
    if model is None:
        return ""
    kind, values = model["model_name"].removesuffix("Model"), model["state"]
    if values.get("layout") and _hidden(values["layout"], state):
        return ""
    if "children" in values:
        return f"<div class='still-{kind.lower()}'>{''.join(_shown(child, state) for child in values['children'])}</div>"
    if kind == "Output":
        return "".join(map(_output, values.get("outputs", [])))
    if kind in ("HTML", "HTMLMath"):
        return f"<div>{values.get('value', '')}</div>"
    if kind in ("Image", "Audio"):
        return _media(kind, model)
    if any(word in kind for word in CONTROLS):
        return f"<span class='still-control'>{escape(values.get('description', ''))} <b>{escape(_value(values))}</b></span>"
    return f"<span>{escape(str(values['value']))}</span>" if isinstance(values.get("value"), str) else ""


def _hidden(layout: str, state: dict[str, Any]) -> bool:
    "Whether a widget's layout keeps it from the page."
    values = state.get(layout.removeprefix("IPY_MODEL_"), {}).get("state", {})
    return values.get("display") == "none" or values.get("visibility") == "hidden"


def _value(values: dict[str, Any]) -> str:
    "What a control is set to."
    labels, index = values.get("_options_labels"), values.get("index")
    if labels:
        return ", ".join(
            str(labels[i]) for i in (index if isinstance(index, (list, tuple)) else [index]) if i is not None
        )
    value = values.get("value", "")
    return (
        " to ".join(map(str, value))
        if isinstance(value, (list, tuple))
        else ""
        if value is None
        else str(value)
    )


def _media(kind: str, model: dict[str, Any]) -> str:
    "A picture or a sound, inside the page."
    data = next((b["data"] for b in model.get("buffers", []) if b["path"] == ["value"]), "")
    source = f"data:{kind.lower()}/{model['state'].get('format', 'png')};base64,{data}"
    if not data:
        return ""
    return f"<img alt='' src='{source}'>" if kind == "Image" else f"<audio controls src='{source}'></audio>"


def _output(output: dict[str, Any]) -> str:
    "An output that a widget holds."
    data = output.get("data", {})

    def text(kind: str) -> str:
        return "".join(data[kind])

    if PLOTLY in data:
        return figure_html(data[PLOTLY])
    if "text/html" in data:
        return text("text/html")
    if "image/png" in data:
        return f"<img alt='' src='data:image/png;base64,{text('image/png').strip()}'>"
    said = "".join(output.get("text", "")) or (text("text/plain") if "text/plain" in data else "")
    return f"<pre>{escape(said)}</pre>" if said else ""
