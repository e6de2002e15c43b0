"""Write an executed notebook as one HTML file with live figures that asks nothing from a network.

usage: python nbs/_tools/page.py NOTEBOOK [HTML]     (beside the notebook, with its name, where no HTML is named)

`jupyter nbconvert --to html` leaves figures out: they are stored as plotly's data, without a picture, so that a notebook stays small. Here each is
drawn by plotly's own script, which is written into the page once (4 to 5 MB). Widgets are shown as they stood.
"""

import sys
from pathlib import Path

import nbformat
from figures import plotly_script, show_figures
from nbconvert import HTMLExporter
from widgets import still_widgets

STYLE = "<style>body { max-width: 76rem; margin: 0 auto; padding: 0 1rem; } .plotly-figure { width: 100%; }</style>"


def page_html(notebook: nbformat.NotebookNode, title: str) -> str:
    "An executed notebook as a page of its own."
    still_widgets(notebook)
    show_figures(notebook)
    notebook.metadata.pop("widgets", None)
    exporter = HTMLExporter(
        embed_images=True,
        mathjax_url="",
        require_js_url="",
        jquery_url="",
        widget_renderer_url="",
        mermaid_js_url="",
    )
    body, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": title}})
    return body.replace("</head>", f"{STYLE}\n<script>{plotly_script()}</script>\n</head>", 1)


def main(words: list[str]) -> int:
    "Write a page and say where it is."
    if not 1 <= len(words) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    source = Path(words[0])
    target = Path(words[1]) if len(words) == 2 else source.with_suffix(".html")
    try:
        target.write_text(page_html(nbformat.read(source, as_version=4), source.stem), encoding="utf-8")
    except (OSError, nbformat.reader.NotJSONError) as e:
        print(f"page.py: {source}: {e}", file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
