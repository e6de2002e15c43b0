"""`make build`: run build.ipynb by papermill for all splits and say where the results are.

DATA, OUT and SETTINGS come through the environment: DATA is the data folder (else LEAKMEL_DATA, else a demo set), OUT the folder of results,
SETTINGS more parameters of the notebook, as in "sample_rate=4096 duration_s=1 preset=overlap"; values with blanks are quoted as in a shell.
"""

import json
import os
import shlex
import sys
from datetime import datetime
from pathlib import Path

from leakmel.core.threads import start_process

ROOT = Path(__file__).resolve().parents[2]
PATHS = ("table", "cache_dir")  # parameters that name files: relative to where make is called


def results_folder() -> Path:
    "The folder that OUT names, or a new one below runs/."
    if os.environ.get("OUT"):
        return Path(os.path.abspath(os.path.expanduser(os.environ["OUT"])))
    name = f"{datetime.now():%Y%m%d-%H%M%S}-all"
    return next(
        p for n in range(1000) if not (p := ROOT / "runs" / (name if n == 0 else f"{name}-{n}")).exists()
    )


def describe_run(folder: Path) -> str:
    "Where the results of a run are, and the verdict, in a few lines for a terminal."
    from leakmel.core.errors import show_path
    from leakmel.dataset.publish import rate_text, reused_rows_sentence

    path = folder / "summary.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for s in body["splits"]:
        speed = reused_rows_sentence(s) or rate_text(s)
        rows = f"{s['rows']:,} rows, {s['rejected']:,} rejected"
        lines.append(f"{s['path']}\n    {rows}; {speed}; {s['verified']['verdict']}")
    lines += [f"executed notebook: {show_path(p)}" for p in sorted(folder.glob("*.ipynb"))]
    lines.append(f"report: {show_path(folder / 'report.html')}")
    checked = sum(s["verified"]["checked"] for s in body["splits"])
    verdict = "NOT OK"
    if body["ok"]:
        verdict = f"all data sets verified, {checked:,} of {body['rows']:,} rows recomputed"
    return "\n".join([*lines, f"summary: {show_path(path)}", f"verdict: {verdict}"])


def refuse(data: str, out: Path) -> str:
    "Why this cannot be run; empty where it can. Nothing may be put into the data folder, not even a notebook."
    if not data:
        return ""
    root = Path(os.path.realpath(os.path.expanduser(data)))
    if not root.is_dir():
        return f"there is no data folder {root}"
    target = Path(os.path.realpath(out))
    if root != target and root not in target.parents:
        return ""
    return f"the results cannot go into the data folder: {target}. Name another one: make build OUT=folder"


def given_settings(text: str) -> dict[str, str]:
    "What SETTINGS says; raises ValueError for what is no setting. Whether the notebook knows it, the notebook says."
    settings = {}
    for word in shlex.split(text):
        name, sign, value = word.partition("=")
        if not sign or not name.isidentifier():
            raise ValueError(f"not NAME=VALUE: {word!r}")
        if name in ("data_root", "out"):
            raise ValueError(f"{name} is said by {'OUT' if name == 'out' else 'DATA'}=folder")
        settings[name] = value
    return settings


def as_parameters(settings: dict[str, str]) -> list[str]:
    "Options of papermill: numbers, True, False and None are typed by it, paths stay text."

    def option(name: str, value: str) -> list[str]:
        if name not in PATHS or value in ("", "None"):
            return ["-p", name, value]
        return ["-r", name, os.path.abspath(os.path.expanduser(value))]

    return [word for name, value in ({"split": "all"} | settings).items() for word in option(name, value)]


def main() -> int:
    "Run the notebook."
    data, out = os.environ.get("DATA") or os.environ.get("LEAKMEL_DATA") or "", results_folder()
    try:
        settings = given_settings(os.environ.get("SETTINGS", ""))
    except ValueError as e:
        print(
            f'make build: SETTINGS: {e}; for example SETTINGS="sample_rate=4096 duration_s=1"',
            file=sys.stderr,
        )
        return 2
    if why := refuse(data, out):
        print(f"make build: {why}", file=sys.stderr)
        return 2
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        print(f"make build: the folder of results cannot be made: {e}", file=sys.stderr)
        return 2
    executed = out / "build.ipynb"
    parameters = [*as_parameters(settings), "-r", "out", str(out)]
    if data:
        parameters += ["-r", "data_root", os.path.abspath(os.path.expanduser(data))]
    papermill = Path(sys.executable).parent / "papermill"
    words = [papermill, ROOT / "nbs" / "build.ipynb", executed, *parameters]
    with start_process([str(word) for word in words], ROOT / "nbs") as process:
        status = process.wait()
    if status:
        place = (
            f"the notebook up to the error: {executed}" if executed.exists() else "no notebook was written"
        )
        print(f"\nmake build: failed (exit status {status}); {place}", file=sys.stderr)
        return status if 0 < status < 256 else 128 - status
    print("\n" + describe_run(out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
