"""Store in notebooks what their examples print and draw; `make export` runs those whose code has changed, OUTPUTS=all all of them.

A notebook runs twice: text that differs between the runs, such as a time, is not stored. A figure is stored as a picture, and with its data
if they are few. The code of the stored outputs is known by its digest, so that the check finds outputs of other code.
"""

import asyncio
import base64
import copy
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "nbs"
STORED = ("core", "recordings", "mel", "dataset", "pages", "detector", "extras", "operations")  # folders
PAGES = ("guides", "tutorials", "explanations")
RESULTS = "out*.ipynb"  # of papermill
# packages that the development environment lacks: no outputs are stored
NEEDS = {"mel/triton_kernel": ["triton"]}
DIGEST = "outputs_of"  # in the notebook's metadata: digest of the code that made the outputs
PICTURE_BYTES, DATA_BYTES, HTML_BYTES, TEXT_BYTES = 60_000, 30_000, 20_000, 10_000  # at most
PLOTLY = "application/vnd.plotly.v1+json"
PICTURES = ("image/png", "image/jpeg")
VARYING = r"0x[0-9a-f]{6,}|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d"  # addresses and times, in texts
_ONE_BROWSER = threading.Lock()
_NOT_STARTED = ("Kernel didn't respond", "Kernel died before replying")  # no cell was executed


def directives_of(cell: nbformat.NotebookNode) -> set[str]:
    "What nbdev is told about a cell."
    return {
        re.sub(r"\s*:\s*", ": ", line[2:].strip())
        for line in cell.source.splitlines()
        if line.startswith("#|")
    }


def is_skipped(cell: nbformat.NotebookNode) -> bool:
    "Whether a cell is not to be executed."
    return cell.cell_type == "code" and bool(directives_of(cell) & {"eval: false", "cuda"})


def stored_notebooks(root: Path = ROOT) -> list[Path]:
    "The notebooks whose outputs are stored."
    found = [p for folder in (*STORED, *PAGES) for p in sorted((root / "nbs" / folder).rglob("*.ipynb"))]
    names = {p: p.relative_to(root / "nbs").with_suffix("") for p in found if not p.match(RESULTS)}
    sources = {p: name for p, name in names.items() if not any(part[0] in "._" for part in name.parts)}
    return [p for p, name in sources.items() if name.as_posix() not in NEEDS]


def code_digest(notebook: nbformat.NotebookNode) -> str:
    "Of the code of a notebook."
    text = "\0".join(c.source for c in notebook.cells if c.cell_type == "code")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def outdated(root: Path = ROOT) -> list[Path]:
    "The notebooks whose outputs were made by other code."
    read = {p: nbformat.read(p, as_version=4) for p in stored_notebooks(root)}
    return [p for p, notebook in read.items() if notebook.metadata.get(DIGEST) != code_digest(notebook)]


def run_cells(
    notebook: nbformat.NotebookNode, folder: Path, manager: type[AsyncKernelManager] = AsyncKernelManager
) -> None:
    "Execute a notebook in a folder, without the cells that are to be skipped."
    every = notebook.cells
    notebook.cells = [c for c in every if not is_skipped(c)]
    for is_last in (False, True):
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            kernel_manager_class=manager,
            resources={"metadata": {"path": str(folder)}},
            extra_arguments=["--log-level=ERROR"],
        )
        try:
            asyncio.run(client.async_execute())  # a loop of this thread's own, closed at the end
            break
        except RuntimeError as e:  # perhaps another process took a port of the kernel
            if is_last or not str(e).startswith(_NOT_STARTED):
                raise
    notebook.cells = every


def without_local_paths(text: str) -> str:
    "Shorten paths below this checkout, temporary folders, the interpreter and the home folder: a page does not tell where it was made."
    temporary = re.escape(tempfile.gettempdir()) + r"/tmp\w{8}"
    here = rf"(?<![\w/.])(?:{re.escape(str(ROOT))}|{temporary})(?![\w-])"
    text = text.replace(sys.executable, "python")
    text = re.sub(rf"{here}/(?=\w)", "", text)
    text = re.sub(here, ".", text)
    home = str(Path.home()).rstrip("/")
    return re.sub(rf"(?<![\w/.]){re.escape(home)}(?=/)", "~", text) if home else text


def without_paths(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    "An output with shorter paths."
    return nbformat.from_dict(json.loads(without_local_paths(json.dumps(output, ensure_ascii=False))))


def picture_of(figure: dict[str, Any]) -> dict[str, str]:
    "A figure as an image in Base64, smaller where it is too large; empty if it does not become small enough."
    import plotly.graph_objects as go

    height = figure["layout"].get("height") or 380
    for kind, width in (("png", 800), ("jpeg", 800), ("png", 560), ("jpeg", 560), ("jpeg", 400)):
        with _ONE_BROWSER:
            shown = go.Figure(figure)
            if kind == "jpeg":  # which has no transparency: it would become black
                shown.update_layout(paper_bgcolor="white")
            drawn = shown.to_image(kind, width=width, height=height * width // 800)
        if len(drawn) <= PICTURE_BYTES:
            return {f"image/{kind}": base64.b64encode(drawn).decode()}
    return {}


def figure_output(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    "A figure as it is stored."
    figure = output.data[PLOTLY]
    data: dict[str, Any] = picture_of(figure)
    if len(str(figure)) <= DATA_BYTES and not re.search(VARYING, str(figure)):
        data[PLOTLY] = figure
    return nbformat.v4.new_output("display_data", data=data) if data else None


def text_output(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    "Another output as it is stored: without execution count and what is too large; None for errors, warnings and progress."
    if output.output_type == "stream":
        is_kept = output.name == "stdout" and 0 < len(output.text) <= TEXT_BYTES
        return nbformat.v4.new_output("stream", name="stdout", text=output.text) if is_kept else None
    limits = {"text/plain": TEXT_BYTES, "text/html": HTML_BYTES, "text/markdown": HTML_BYTES}
    limits |= {"image/svg+xml": HTML_BYTES, "image/png": PICTURE_BYTES * 4 // 3}
    data = output.get("data", {})
    kept = {kind: data[kind] for kind, most in limits.items() if 0 < len(data.get(kind, "")) <= most}
    if "text/html" in kept or "image/png" in kept:
        kept.pop("text/plain", None)
    return nbformat.v4.new_output("display_data", data=kept) if kept else None


def joined_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    "Outputs of a cell with what follows each other on a stream as one: a busy machine sends it in pieces."
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = found[-1] if found else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def store_outputs(path: Path) -> tuple[int, int]:
    """Run a notebook twice and store what it shows; return the numbers of outputs that are stored and of those that differ between the runs.

    Raises RuntimeError without a Chromium for figures, or if the notebook was saved meanwhile.
    """
    before = path.read_bytes()
    notebook = nbformat.reads(before.decode(), as_version=4)
    runs = [copy.deepcopy(notebook) for _ in range(2)]
    for run in runs:
        run_cells(run, path.parent)
    n_stored = n_varying = 0
    for cell, *both in zip(notebook.cells, *(run.cells for run in runs), strict=True):
        if cell.cell_type != "code":
            continue
        cell.outputs, cell.execution_count = [], None
        if is_skipped(cell) or "hide" in directives_of(cell):
            continue
        for run in both:
            run.outputs = joined_streams(run.outputs)
        for k, output in enumerate(both[0].outputs):
            if PLOTLY in output.get("data", {}):
                kept = figure_output(output)
            else:
                texts = [without_local_paths(str(run.outputs[k : k + 1])) for run in both]
                kept = text_output(output)
                if kept and (texts[0] != texts[1] or re.search(VARYING, texts[0])):
                    kept = None
                    n_varying += 1
            if kept is not None:
                cell.outputs.append(kept)
                n_stored += 1
        cell.outputs = list(map(without_paths, cell.outputs))
    notebook.metadata[DIGEST] = code_digest(notebook)
    if path.read_bytes() != before:
        raise RuntimeError(f"{path} was saved while it ran; repeat `make export`")
    new = path.with_name(f".{path.name}.new")
    new.write_text(nbformat.writes(notebook), encoding="utf-8")
    new.replace(path)
    return n_stored, n_varying


def store_all(paths: list[Path]) -> None:
    "Store the outputs of notebooks, two at a time."
    os.environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    with ThreadPoolExecutor(max_workers=2) as pool:
        for path, (n_stored, n_varying) in zip(paths, pool.map(store_outputs, paths), strict=True):
            print(f"{path.relative_to(ROOT)}: {n_stored} outputs stored, {n_varying} differ between two runs")
