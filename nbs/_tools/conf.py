"""Sphinx settings of the site. Its pages are written to _docs/source by prepare.py, already executed; nothing is loaded from a network."""

import sys
from configparser import ConfigParser
from pathlib import Path

_parser = ConfigParser(delimiters=["="], interpolation=None)
_parser.read(Path(__file__).resolve().parents[2] / "settings.ini", encoding="utf-8")
_cfg = _parser["DEFAULT"]

project, author, copyright = _cfg["title"], _cfg["author"], _cfg["copyright"]
version = release = _cfg["version"]

extensions = ["myst_nb", "sphinx_copybutton", "sphinx_design"]
nb_execution_mode = "off"
nb_ipywidgets_js: dict = {}  # no widget state is stored, so no script has to be fetched for it
nb_merge_streams = True
nb_render_markdown_format = "myst"  # what a cell prints as Markdown may hold a table
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
python_maximum_signature_line_length = 110
highlight_language = "none"  # what names no language is a command or its output
add_module_names = False
exclude_patterns = ["**/.ipynb_checkpoints"]

html_theme = "pydata_sphinx_theme"
html_title = f"leakmel {version}"
html_css_files = ["leakmel.css"]
html_show_sourcelink = False
html_copy_source = False
# it would fetch every page that was found, which a browser forbids for pages from a disk
html_show_search_summary = False
html_sidebars: dict[str, list[str]] = {
    name: [] for name in ("index", "commands", "errors", "changelog", "search", "genindex", "py-modindex")
}
html_theme_options = {
    "show_nav_level": 2,
    "navigation_depth": 3,
    "show_prev_next": False,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_context = {"default_mode": "auto"}


def _load_scripts(app, page, template, context, doctree):
    "Give plotly's script, which is large and stored once, to the pages that have a figure, and the ranking to the search page."
    if 'class="plotly-figure"' in context.get("body", ""):
        app.add_js_file("plotly.min.js")
    if page == "search":
        app.add_js_file("page_index.js", loading_method="defer", priority=900)
        app.add_js_file("search.js", loading_method="defer", priority=901)


def _index_front_page(app):
    "Index the front page only, as an empty index is an error: search.js ranks the pages of page_index.js instead."
    whole = app.builder.index_page
    app.builder.index_page = lambda name, *rest: whole(name, *rest) if name == "index" else None


def setup(app):
    "Called by Sphinx."
    if not any((Path(app.srcdir) / f"index.{kind}").exists() for kind in ("ipynb", "md")):
        sys.exit("run prepare.py first: make docs does")
    app.connect(
        "config-inited", lambda app, config: config.html_static_path.append(str(Path(app.srcdir) / "static"))
    )
    app.connect("builder-inited", _index_front_page)
    app.connect("html-page-context", _load_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
