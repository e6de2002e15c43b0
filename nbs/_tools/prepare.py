"""Write the pages of the site to _docs/source: notebooks with outputs, dressed, reference pages, the command line, the changelog.

What nbdev's directives say is kept: `hide` drops a cell, `echo: false` its source, `export` folds it, `eval: false` and `cuda` leave it unexecuted.
Executed notebooks are kept in _docs/cache under a digest of everything they depend on, so a second run is quick.
"""

import hashlib
import io
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
from api import module_page, public_page
from jupyter_client.manager import AsyncKernelManager
from messages import messages
from outputs import DIGEST, NEEDS, code_digest, directives_of, run_cells, without_local_paths
from warm import WarmKernelManager, context

from leakmel.pages.page_figures import html_figures, plotly_file

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS, PACKAGE = ROOT / "nbs", ROOT / "leakmel"
DOCS = ROOT / "_docs"
SOURCE, CACHE = DOCS / "source", DOCS / "cache"
ROOMS = {
    "core": "errors, files, timeline, progress and threads, used by all other modules",
    "recordings": "WAV reader, listing of recordings, names, tables, labels and quality checks",
    "mel": "log-mel spectrograms: settings, reference and engines",
    "dataset": "build, file format, verification and resume of data sets",
    "pages": "figures, reports, the dashboard and the view of recordings",
    "detector": "training, evaluation and prediction of leak detectors",
    "extras": "nightly lists, review, retraining, search, public sets, exports, localization, benchmarks",
    "operations": "what the command line and the run notebooks do, declared once",
    "cli": "command line",
}
GUIDES = {  # folder of notebooks that export nothing -> title and sentence of its page
    "guides": ("How to", "One page for one task."),
    "tutorials": ("Tutorials", "From the first recordings to a data set and a detector, step by step."),
    "explanations": ("Explanations", "What the library does with recordings, and why."),
    "benchmarks": ("Benchmarks", "Comparisons and measurements, drawn from the newest records."),
}
EXAMPLES = (
    "start",
    "build",
    "build_part",
    "train",
    "evaluate",
    "predict",
    "nightly",
    "correlate",
    "retrain",
    "search",
    "explore",
    "review",
    "dashboard",
    "tune",
    "doctor",
    "benchmark",
)  # run notebooks in the order of their work; those that are there get a page
PAGES = {"search": "search-settings"}  # Sphinx has a page of its own that is named search
# Guides in the order of their lists.
FIRST = (
    "different_rates",
    "small_sets",
    "public_sets",
    "correct_labels",
    "locate_leaks",
    "open_formats",
    "cluster",
    "first_build",
    "first_detector",
    "retraining",
    "every_night",
    "speed",
    "evaluation",
    "training",
    "file_format",
    "promises",
    "troubleshooting",
)
DEMO_FILES = 120


# ---- notebooks -----------------------------------------------------------------------------------------------------


def defined(cell: nbformat.NotebookNode) -> list[str]:
    "Names that an exported cell defines."
    found = re.findall(r"^(?:(?:class|def) (\w+)|(\w+)(?:: [^=\n]+)? =)", cell.source, re.M)
    return [a or b for a, b in found]


def render_cells(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    "Turn directives into the tags that the site knows, and figures into HTML."
    cells = [
        c
        for c in notebook.cells
        if c.cell_type != "code"
        or not any(d.startswith("default_exp") or d == "hide" for d in directives_of(c))
    ]
    for cell in cells:
        if cell.cell_type != "code":
            continue
        directives, tags = directives_of(cell), set(cell.metadata.get("tags", []))
        if "echo: false" in directives:
            tags.add("remove-input")
        if {"export", "exporti"} & {d.split(":")[0] for d in directives}:
            tags.add("hide-input")
            cell.metadata["mystnb"] = {
                "code_prompt_show": f"Source of {', '.join(defined(cell)) or 'the imports'}",
                "code_prompt_hide": "Hide the source",
            }
        cell.metadata["tags"] = sorted(tags)
        cell.source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("#|")).strip(
            "\n"
        )
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = formulas(cards(cell.source))
    notebook.cells = [c for c in cells if c.cell_type != "code" or c.source.strip()]
    drop_progress(notebook)
    html_figures(notebook)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        }
    )
    return notebook


def drop_progress(notebook: nbformat.NotebookNode) -> None:
    "Remove the lines of progress that a log gets and a page does not need: `build: 20 of 30 files in 5 s, ...`."
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                output["text"] = re.sub(
                    r"^[^:\n]+: [\d,]+ of [\d,]+ \S+ in .*\n", "", output["text"], flags=re.M
                )
        if "outputs" in cell:
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr" or o["text"]]


def cards(text: str) -> str:
    "Lists of `- **[title](page)** sentence` as cards, which a narrow screen stacks."
    items = r"(?:^- \*\*\[[^\]]+\]\([^)]+\)\*\*.*(?:\n  .*)*\n?)+"

    def sentence(text: str) -> str:
        return text[:1].upper() + re.sub(r"\n +", " ", text[1:])

    def grid(found: re.Match) -> str:
        entries = re.findall(r"^- \*\*(\[[^\]]+\]\([^)]+\))\*\*[:,]?\s*(.*(?:\n  .*)*)", found.group(), re.M)
        body = "\n".join(
            f":::{{grid-item-card}}\n**{link}**\n\n{sentence(text)}\n:::" for link, text in entries
        )
        return f"::::{{grid}} 1 1 3 3\n:gutter: 3\n:class-container: doors\n\n{body}\n::::\n"

    return re.sub(items, grid, text, flags=re.M)


SIGNS = {
    r"\frac12": "½",
    r"\sum": "Σ",
    r"\int": "∫",
    r"\pi": "π",
    r"\tau": "τ",
    r"\alpha": "α",
    r"\beta": "β",
    r"\nu": "ν",
    r"\rho": "ρ",
    r"\sigma": "σ",
    r"\cdot": "·",
    r"\cos": "cos",
    r"\log": "log",
    r"\ln": "ln",
    r"\sqrt": "√",
    r"\mathrm": "",
    r"\,": " ",
}


def formulas(text: str) -> str:
    "The few formulas of the notebooks in HTML: a renderer of formulas would be fetched from a network."

    def plain(found: re.Match) -> str:
        inner = found[1]
        for name, sign in SIGNS.items():
            inner = inner.replace(name, sign)
        inner = re.sub(r"√\{([^{}]*)\}", r"√(\1)", inner)
        for sign, tag in (("_", "sub"), (r"\^", "sup")):
            inner = re.sub(sign + r"(?:\{([^{}]*)\}|(\w))", rf"<{tag}>\1\2</{tag}>", inner)
        if "\\" in inner:
            raise ValueError(f"a formula with a sign that SIGNS does not have: {found[0]}")
        return f"<span class='formula'>{inner.replace('{', '').replace('}', '').replace('-', '−').strip()}</span>"

    parts = re.split(r"(```.*?```|`[^`]*`)", text, flags=re.S)  # code stays as it is
    return "".join(part if i % 2 else re.sub(r"\$([^$\n]+)\$", plain, part) for i, part in enumerate(parts))


def missing_package_note(name: str) -> str:
    "A sentence on what a library notebook needs and is not installed here; empty where all is there."
    package = ", ".join(p for p in NEEDS.get(name, ()) if not find_spec(p))
    return f"Not executed: {package} was not installed where this page was made." if package else ""


_ONE_AT_A_TIME = threading.Lock()


def execute(
    path: Path,
    parameters: str = "",  # assignments that follow the parameters cell
    prepare: Callable[[], None] | None = None,  # makes what the parameters name
) -> nbformat.NotebookNode:
    "A notebook with its outputs: those that are stored in it, or else of a run; from the cache where nothing that it depends on has changed."
    notebook = nbformat.read(path, as_version=4)
    if notebook.metadata.get(DIGEST) == code_digest(notebook):
        return notebook
    if reason := missing_package_note(path.relative_to(NOTEBOOKS).with_suffix("").as_posix()):
        notebook.cells.insert(1, nbformat.v4.new_markdown_cell(f"*{reason}*"))
        return notebook
    for i, cell in enumerate(notebook.cells):
        if parameters and "parameters" in cell.metadata.get("tags", []):
            notebook.cells.insert(
                i + 1, nbformat.v4.new_code_cell(parameters, metadata={"tags": ["remove-cell"]})
            )
            break
    kept = CACHE / f"{_digest(notebook)}.ipynb"
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    if prepare:
        with _ONE_AT_A_TIME:  # two notebooks may need the same files
            prepare()
    run_cells(notebook, path.parent, WarmKernelManager if sys.platform == "linux" else AsyncKernelManager)
    text = without_local_paths(nbformat.writes(notebook))
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(text, encoding="utf-8")
    return nbformat.reads(text, as_version=4)


def _digest(notebook: nbformat.NotebookNode) -> str:
    "Of a notebook's sources, the package, the records that pages draw, and the versions below all that."
    helpers = (NOTEBOOKS / "benchmarks").glob("*.py")
    read = [
        *sorted(PACKAGE.rglob("*.py")),
        *sorted((ROOT / "runs" / "benchmarks").glob("*.json")),
        *sorted(helpers),
    ]
    parts = [
        sys.version,
        *(f"{c.cell_type}{c.source}" for c in notebook.cells),
        *(p.read_text(encoding="utf-8") for p in read),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def write_page(notebook: nbformat.NotebookNode, name: str, extra: str = "") -> None:
    "Write a dressed notebook as a page; `extra` is Markdown for its end."
    page = render_cells(notebook)
    if extra:
        page.cells.append(nbformat.v4.new_markdown_cell(extra))
    for number, cell in enumerate(page.cells):
        cell.id = f"cell-{number}"  # new cells get random ones, which would change the page
    write_if_changed(f"{name}.ipynb", nbformat.writes(page).encode())


_written: set[Path] = set()  # files of SOURCE that this run has written


def write_if_changed(name: str, content: bytes) -> None:
    "Write a file of SOURCE; one that is as it was keeps its time, so that Sphinx does not read it again."
    target = SOURCE / name
    _written.add(target)
    if target.is_file() and target.read_bytes() == content:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def remove_others() -> None:
    "Remove the files of SOURCE that an earlier run wrote and this one did not."
    for path in SOURCE.rglob("*"):
        if path.is_file() and path not in _written:
            path.unlink()


# ---- pages ---------------------------------------------------------------------------------------------------------


def toctree(names: list[str], *options: str) -> str:
    "A list of pages."
    return "\n".join(["```{toctree}", *(f":{o}" for o in options), "", *names, "```"])


def write_text(name: str, text: str) -> None:
    "Write a Markdown page."
    write_if_changed(f"{name}.md", (text.rstrip("\n") + "\n").encode())


def module_notebooks() -> list[Path]:
    "Notebooks that export a module."
    found = [
        p
        for p in sorted(NOTEBOOKS.rglob("*.ipynb"))
        if not any(part[0] in "_." for part in p.relative_to(NOTEBOOKS).parts)
    ]
    return [
        p
        for p in found
        if any(c.source.startswith("#| default_exp") for c in nbformat.read(p, as_version=4).cells)
    ]


def guide_notebooks() -> list[Path]:
    "Tutorials and explanations."

    def place(p: Path) -> tuple[int, str]:
        return FIRST.index(p.stem) if p.stem in FIRST else len(FIRST), p.stem

    return [
        p
        for folder in GUIDES
        for p in sorted((NOTEBOOKS / folder).glob("*.ipynb"), key=place)
        if p.name[0] not in "_."
    ]


# ---- run notebooks: parameters, and what these name ---------------------------------------------------------------


def demo_folder() -> Path:
    return DOCS / "demo"


def learning_folder() -> Path:
    return DOCS / "learning"


@cache
def make_demo() -> None:
    "The synthetic recordings that all examples share."
    from leakmel.recordings.demo import write_demo

    if not (demo_folder() / "TRAINING").is_dir():
        write_demo(demo_folder(), n_files=DEMO_FILES)


def make_build() -> None:
    make_demo()
    shutil.rmtree(DOCS / "run", ignore_errors=True)


def make_start() -> None:
    make_demo()
    shutil.rmtree(DOCS / "start", ignore_errors=True)


def make_runs() -> None:
    "Two runs, of which the dashboard compares the second with the first."
    import leakmel as lm

    make_demo()
    shutil.rmtree(DOCS / "runs", ignore_errors=True)
    for name, readers in (("combined-threads", None), ("separate-reader", 1)):
        pipeline = lm.PipelineConfig(read_workers=readers)
        lm.build_all(demo_folder(), out_dir=DOCS / "runs" / name, pipeline=pipeline, progress="none")


@cache
def make_detector() -> None:
    "Data sets of the recordings, and a small detector."
    import leakmel as lm

    make_demo()
    shutil.rmtree(learning_folder(), ignore_errors=True)
    lm.build_all(demo_folder(), out_dir=learning_folder() / "mels", progress="none")
    lm.train(
        learning_folder() / "mels" / "TRAINING_DATASET.H5",
        learning_folder() / "mels" / "VALIDATION_DATASET.H5",
        out=learning_folder() / "model",
        settings=lm.TrainSettings(**SMALL, channels=(16, 32)),
        device="cpu",
        progress="none",
    )


@cache
def make_new_recordings() -> None:
    "A data set of another synthetic network, for a round of retraining."
    import leakmel as lm

    make_detector()
    shutil.rmtree(DOCS / "new", ignore_errors=True)
    lm.write_demo(DOCS / "new", n_files=DEMO_FILES, seed=1)
    lm.build(DOCS / "new", split="training", out=learning_folder() / "new.H5", progress="none")


SMALL: dict[str, Any] = {
    "detector": "cnn",
    "batch_size": 256,
    "epochs": 6,
    "epoch_share": 1.0,
    "profile_every": 5,
}


def as_assignments(values: Mapping[str, object]) -> str:
    return "\n".join(f"{name} = {value!r}" for name, value in values.items())


def run_notebooks() -> dict[str, tuple[Mapping[str, object], Callable[[], None] | None]]:
    "Run notebooks, their parameters for the site, and what makes the files that these name."
    return {
        "start": (
            {
                "data_root": str(demo_folder()),
                "out": str(DOCS / "start"),
                "detector": "spectral",
                "device": "cpu",
            },
            make_start,
        ),
        "build": ({"data_root": str(demo_folder()), "out": str(DOCS / "run")}, make_build),
        "build_part": (
            {"data_root": str(demo_folder()), "split": "training", "out": str(DOCS / "parts" / "training.h5")}
            | {"part": "1/2"},
            make_demo,
        ),
        "train": (
            {"data": str(learning_folder() / "mels"), "out": str(learning_folder() / "train"), **SMALL}
            | {"channels": "16,32", "device": "cpu"},
            make_detector,
        ),
        "predict": (
            {
                "data_root": str(demo_folder() / "TESTING"),
                "model": str(learning_folder() / "model" / "model.pt"),
            }
            | {"out": str(learning_folder() / "scores"), "device": "cpu"},
            make_detector,
        ),
        "nightly": (
            {
                "data_root": str(demo_folder() / "TESTING"),
                "model": str(learning_folder() / "model" / "model.pt"),
            }
            | {"state": str(learning_folder() / "nightly"), "device": "cpu"},
            make_detector,
        ),
        "correlate": ({"out": str(DOCS / "correlate")}, None),
        "evaluate": (
            {"data": str(learning_folder() / "mels"), "model": str(learning_folder() / "model")}
            | {"out": str(learning_folder() / "report"), "device": "cpu"},
            make_detector,
        ),
        "retrain": (
            {"data": str(learning_folder() / "new.H5"), "replay": str(learning_folder() / "mels")}
            | {"champion": str(learning_folder() / "model"), "out": str(learning_folder() / "rounds")}
            | {"device": "cpu"},
            make_new_recordings,
        ),
        "search": (
            {"data": str(learning_folder() / "mels"), "out": str(learning_folder() / "search"), **SMALL}
            | {"epochs": 2, "trials": 4, "again": 0, "channels": "16,32", "device": "cpu"},
            make_detector,
        ),
        "tune": ({"data_root": str(demo_folder()), "out": str(DOCS / "tune"), "budget_s": 10.0}, make_demo),
        "doctor": ({"data_root": str(demo_folder()), "out": str(DOCS / "doctor")}, make_demo),
        "explore": ({"data_root": str(demo_folder())}, make_demo),
        "review": (
            {"data_root": str(demo_folder() / "TESTING"), "model": str(learning_folder() / "model")}
            | {"labels": str(learning_folder() / "labels.csv"), "by": "ann", "device": "cpu"},
            make_detector,
        ),
        "dashboard": ({"run": str(DOCS / "runs")}, make_runs),
        "benchmark": ({"run": False}, None),
    }


def start_notebooks(pool: Executor, library: list[Path], guides: list[Path]) -> dict[Path, Future]:
    "Read or execute the front page, the examples, the benchmarks' pages, the guides and the library notebooks, those that take long first."
    done = {}
    for name, (values, prepare) in run_notebooks().items():
        path = NOTEBOOKS / f"{name}.ipynb"
        done[path] = pool.submit(execute, path, as_assignments(values), prepare)
    done |= {p: pool.submit(execute, p, "run = False") for p in guides}  # of those with parameters
    return done | {p: pool.submit(execute, p) for p in [*library, NOTEBOOKS / "index.ipynb"]}


def write_notebooks(done: Mapping[Path, Future], library: list[Path], guides: list[Path]) -> None:
    "Write the pages of notebooks as they come; a library notebook links to its signatures."
    for path, future in done.items():
        name = str(path.relative_to(NOTEBOOKS).with_suffix(""))
        if path in library:
            write_page(future.result(), f"reference/{name}", reference_link(name))
        else:
            is_front = path == NOTEBOOKS / "index.ipynb"
            write_page(future.result(), PAGES.get(name, name), contents(guides) if is_front else "")


LIBRARY_TEXT = """The library is written in these notebooks, one for each module, and each was executed to make its page. A module imports
only from its own package and from packages above it in this list."""


def contents(guides: list[Path]) -> str:
    "The site's table of contents."
    folders = [f"{folder}/index" for folder in GUIDES if any(p.parent.name == folder for p in guides)]
    return toctree(
        [*folders, "examples", "commands", "errors", "api/index", "reference/index", "changelog"], "hidden:"
    )


def reference_link(name: str) -> str:
    "The way from a library notebook to the signatures of its module."
    module, up = name.replace("/", "."), "../" * (name.count("/") + 1)
    return f"## Signatures\n\nFunctions and classes of this notebook with their parameters: [`leakmel.{module}`]({up}api/{name}.md)."


def write_guides(guides: list[Path]) -> None:
    "The pages that list tutorials and explanations."
    for folder, (title, text) in GUIDES.items():
        here = [p for p in guides if p.parent.name == folder]
        listed = "\n".join(f"- [{title_of(p)}]({p.name}): {sentence(p)}" for p in here)
        if here:
            write_text(
                f"{folder}/index",
                "\n\n".join([f"# {title}", text, listed, toctree([p.stem for p in here], "hidden:")]),
            )


EXAMPLES_TEXT = """Notebooks that run in JupyterLab or with papermill, executed here on a small synthetic data set: figures are interactive, and
measured values are those of the machine that built the site."""


def write_examples() -> None:
    "The page that lists the executed run notebooks."
    here = {PAGES.get(name, name): NOTEBOOKS / f"{name}.ipynb" for name in EXAMPLES}
    here = {page: p for page, p in here.items() if p.exists() and (SOURCE / f"{page}.ipynb").exists()}
    listed = "\n".join(f"- [{title_of(p)}]({page}.ipynb): {sentence(p)}" for page, p in here.items())
    write_text("examples", "\n\n".join(["# Examples", EXAMPLES_TEXT, listed, toctree(list(here), "hidden:")]))


def title_of(path: Path) -> str:
    "A notebook's first line."
    return str(nbformat.read(path, as_version=4).cells[0].source.splitlines()[0]).lstrip("# ")


def _reference_texts(names: tuple[str, ...]) -> dict[str, str]:
    from leakmel.core import jit

    compiled, jit.compiled = jit.compiled, lambda signature: jit.njit  # compiling all functions takes 10 s
    for name in names:
        if not missing_package_note(name):
            import_module(f"leakmel.{name.replace('/', '.')}")
    jit.compiled = compiled
    texts = {
        f"api/{name}": f"# {name}\n\n{note}"
        if (note := missing_package_note(name))
        else module_page(f"leakmel.{name.replace('/', '.')}")
        for name in names
    }
    return {**texts, "api/names": public_page()}


@cache
def reference_texts(names: tuple[str, ...]) -> dict[str, str]:
    "The reference pages by name, made in another process: no other part of this one is to see functions that are not compiled."
    with ProcessPoolExecutor(1, mp_context=context()) as process:
        return process.submit(_reference_texts, names).result()


def names_of(library: list[Path]) -> tuple[str, ...]:
    "Library notebooks as the parts of their addresses: `mel/spec`."
    return tuple(p.relative_to(NOTEBOOKS).with_suffix("").as_posix() for p in library)


def write_lists(library: list[Path]) -> None:
    "The reference pages, and the pages that list them and the notebooks by room."
    notebooks, api = ["# Notebooks", LIBRARY_TEXT], ["# API", API_TEXT, toctree(["names"], "hidden:")]
    for room, what in ROOMS.items():
        here = {str(p.relative_to(NOTEBOOKS).with_suffix("")): sentence(p) for p in library}
        here = {name: text for name, text in here.items() if name.split("/")[0] == room}
        if not here:
            continue
        for page, kind in ((notebooks, "ipynb"), (api, "md")):
            listed = "\n".join(
                f"- [{name.split('/', 1)[-1]}]({name}.{kind}): {text}" for name, text in here.items()
            )
            page += [
                f"## {room}",
                f"{what[0].upper()}{what[1:]}.",
                listed,
                toctree(list(here), "hidden:", f"caption: {room}"),
            ]
    for name, text in reference_texts(names_of(library)).items():
        write_text(name, text)
    write_text("reference/index", "\n\n".join(notebooks))
    write_text("api/index", "\n\n".join(api))


API_TEXT = """Signatures, parameters with units, and results. [Public names](names.md) lists the functions and classes of `import leakmel as lm`, on
which scripts can rely. Below are all modules; the {ref}`index <genindex>` lists all names alphabetically."""


def sentence(path: Path) -> str:
    "What a notebook is for: the line under its title."
    lines = nbformat.read(path, as_version=4).cells[0].source.splitlines()
    return next((line[1:].strip().rstrip(".") for line in lines if line.startswith(">")), "")


@cache
def commands_text() -> str:
    "The `--help-all` texts of the command line, as Markdown."
    from leakmel.cli import OPERATIONS, main

    os.environ["COLUMNS"] = "110"

    def help_text(*args: str) -> str:
        with redirect_stdout(io.StringIO()) as text, suppress(SystemExit):
            main([*args])
        return text.getvalue().strip("\n")

    general = help_text("--help")
    parts = [
        "# Command line",
        "The same functions from a shell. Every command has `--json`, which prints one object and nothing else. "
        "`leakmel COMMAND --help` shows the options that are changed most; this page shows every option (`--help-all`).",
    ]
    parts.append(f"```text\n{general}\n```")
    for name, cls in OPERATIONS.items():
        words = cls.command.words or name
        parts += [f"## leakmel {words}", f"```text\n{help_text(*words.split(), '--help-all')}\n```"]
    return "\n\n".join(parts)


ERRORS_TEXT = """Every error of leakmel has a code, which stays when the message changes: `error.code` in Python, `"code"` in the output of
`--json`. A message begins with the file or folder, then says what happened, what was found and what was expected, and ends
with the remedy. The list shows what happened and the remedy; `{...}` stands for a value that the message shows."""


@cache
def errors_text() -> str:
    "All error codes, from their registry, with the messages that have them, as Markdown."
    from leakmel.core.error_codes import TABLES

    texts: dict[str, list[str]] = {}
    for m in messages():
        text = f"{m.text}: {m.remedy}" if m.remedy else m.text
        if not re.search("[a-z]", re.sub(r"\{[^{}]*\}", "", text)):
            continue  # all of it is inserted
        texts.setdefault(m.code, []).append(re.sub(r"([|<>*_`])", r"\\\1", " ".join(text.split())))
    parts = ["# Error codes", ERRORS_TEXT]
    for title, table in TABLES.items():
        rows = []
        for code, meaning in sorted(table.items()):
            own = list(dict.fromkeys(texts.get(code, [])))
            remedies = "<br>".join(f"• {text}" for text in own) if len(own) > 1 else "".join(own)
            rows.append(f"| `{code}` | {meaning} | {remedies} |")
        parts += [f"## {title}", "\n".join(["| code | meaning | messages |", "|---|---|---|", *rows])]
    return "\n\n".join(parts)


# Weights of pages in the search: a page about a task ranks before the page of a module that has the same words.
WEIGHTS = {
    "guides": 3.0,
    "tutorials": 2.5,
    "explanations": 2.5,
    "benchmarks": 1.5,
    "reference": 0.5,
    "api": 0.4,
}


def plain_text(path: Path, with_code: bool) -> str:
    "The words of a notebook: its prose, and its code if that is wanted."
    cells = nbformat.read(path, as_version=4).cells
    kept = [c.source for c in cells if c.cell_type == "markdown" or (with_code and not directives_of(c))]
    text = re.sub(r"\]\([^)]*\)|^[#>]+|[*`|\[\]]|^-+$|^:::.*$", " ", "\n".join(kept), flags=re.M)
    return " ".join(text.split())


def page_index(library: list[Path], guides: list[Path]) -> list[list[object]]:
    "Name, title, weight and words of each page that the search finds."
    pages: list[list[object]] = []
    for path in guides:
        weight = WEIGHTS[path.parent.name]
        pages.append([f"{path.parent.name}/{path.stem}", title_of(path), weight, plain_text(path, True)])
    for name in EXAMPLES:
        path = NOTEBOOKS / f"{name}.ipynb"
        pages.append([PAGES.get(name, name), f"{title_of(path)} (run notebook)", 1.5, plain_text(path, True)])
    front = NOTEBOOKS / "index.ipynb"
    if front.exists():
        pages.append(["index", title_of(front), 2.0, plain_text(front, True)])
    for path in library:
        name = str(path.relative_to(NOTEBOOKS).with_suffix(""))
        module = "leakmel." + name.replace("/", ".")
        pages.append(
            [f"reference/{name}", f"{module} (notebook)", WEIGHTS["reference"], plain_text(path, False)]
        )
        source = (ROOT / "leakmel" / f"{name}.py").read_text(encoding="utf-8")
        names = re.findall(r"^(?:def|class) ([A-Za-z]\w*)", source, re.M)
        pages.append([f"api/{name}", f"{module} (API)", WEIGHTS["api"], " ".join([sentence(path), *names])])
    for name, title, text in (
        ("commands", "Command line", commands_text()),
        ("errors", "Error codes", errors_text()),
        ("api/names", "Public names", reference_texts(names_of(library))["api/names"]),
    ):
        pages.append([name, title, 1.5, " ".join(re.sub(r"[*`|#]", " ", text).split())])
    return pages


def write_site(library: list[Path], guides: list[Path]) -> None:
    "Write all pages; `library` and `guides` are the notebooks that get one."
    _written.clear()
    static = Path(__file__).parent / "static"
    for path in [p for p in static.rglob("*") if p.is_file()]:
        write_if_changed(f"static/{path.relative_to(static)}", path.read_bytes())
    write_if_changed("static/plotly.min.js", plotly_file())
    for picture in [p for kind in ("png", "svg", "jpg") for p in NOTEBOOKS.rglob(f"*.{kind}")]:
        write_if_changed(str(picture.relative_to(NOTEBOOKS)), picture.read_bytes())
    with ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as pool:
        done = start_notebooks(pool, library, guides)
        write_guides(guides)
        write_lists(library)
        write_notebooks(done, library, guides)
    write_examples()
    write_text("commands", commands_text())
    write_text("errors", errors_text())
    script = f"const LEAKMEL_PAGES = {json.dumps(page_index(library, guides), ensure_ascii=False)};\n"
    write_if_changed("static/page_index.js", script.encode())
    write_text("changelog", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](nbs/", "]("))
    if not (NOTEBOOKS / "index.ipynb").exists():
        write_text("index", f"# leakmel\n\n{contents(guides)}")
    remove_others()


if __name__ == "__main__":
    write_site(module_notebooks(), guide_notebooks())
