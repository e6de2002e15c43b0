"""Figures of executed notebooks as HTML that one local copy of plotly.min.js draws, with no network."""

import hashlib
import json
from pathlib import Path
from typing import Any

PLOTLY = "application/vnd.plotly.v1+json"

_DIV = """<div id="{name}" class="plotly-figure" style="height:{height}px"></div>
<script>document.addEventListener("DOMContentLoaded", function () {{
  var figure = {figure};
  Plotly.newPlot("{name}", figure.data, figure.layout, {{responsive: true, displaylogo: false}});
}});</script>"""


def figure_html(figure: dict[str, Any]) -> str:
    "A plotly figure as a place and the script that fills it once the page is there."
    kept = {"data": figure["data"], "layout": figure["layout"]}
    text = (
        json.dumps(kept, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")
    )  # nothing in it may end the script
    name = "figure-" + hashlib.sha1(text.encode()).hexdigest()[:12]
    return _DIV.format(name=name, figure=text, height=figure["layout"].get("height", 450))


def show_figures(notebook: Any) -> int:
    "Turn every plotly output of a notebook into HTML; returns how many there were."
    outputs = [
        o for c in notebook.cells if c.cell_type == "code" for o in c.outputs if PLOTLY in o.get("data", {})
    ]
    for o in outputs:
        o.data = {"text/html": figure_html(o.data[PLOTLY])}
    return len(outputs)


def _stored_script() -> Path:
    "Plotly's script, which comes with the Python package."
    import plotly

    return Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


def plotly_script() -> str:
    "Plotly's script, to stand inside a page."
    return _stored_script().read_text(encoding="utf-8").replace("</script", "<\\/script")


def plotly_file() -> bytes:
    "Plotly's script as a file of its own."
    return _stored_script().read_bytes()
