"""What the notebooks of this folder share: measure and store a record, or find the newest one."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from IPython.display import Markdown, display

from leakmel.core.errors import LeakmelError
from leakmel.dataset.pipeline import runs_folder
from leakmel.extras.machine.bench import newest, store


def find_record(
    suite: str,
    bench: Callable[..., dict[str, Any]],  # takes a work folder, `log` and options
    *,
    run: bool,  # False: the newest record
    folder: str | None,  # work folder, which stays; None: a temporary one
    out: str
    | None,  # folder of the records; None: a new one below runs/, or runs/benchmarks where nothing is run
    **options: Any,
) -> dict[str, Any] | None:  # None: not measured
    "Measure and store a record, or find the newest one."
    if not run:
        return newest(suite, out or runs_folder() / "benchmarks")
    shown = display(Markdown("starting"), display_id=True)
    work = folder or tempfile.mkdtemp(prefix="leakmel-bench-")
    try:
        record = bench(work, log=lambda text: shown.update(Markdown(text)), **options)
    finally:
        if folder is None:
            shutil.rmtree(work, ignore_errors=True)
    path = store(record, out or Path(runs_folder(), f"{datetime.now():%Y%m%d-%H%M%S}-{suite}"))
    shown.update(Markdown(f"stored as `{path}`"))
    return record


def is_right(record: Mapping[str, Any]) -> bool:
    "Return whether all results that a record has figures for are right."
    return bool(record["ok"] if "ok" in record else record.get("verified", {}).get("all_ok", False))


def require_valid(
    records: Mapping[str, Mapping[str, Any] | None],  # suite -> record
) -> str:  # a sentence; raises LeakmelError
    "Return which suites were measured; raise an error if a result is wrong."
    measured = {suite: record for suite, record in records.items() if record is not None}
    if wrong := [suite for suite, record in measured.items() if not is_right(record)]:
        raise LeakmelError(
            "the benchmark found wrong results, so its figures are not valid",
            code="benchmark-not-right",
            found=", ".join(wrong),
            remedy="read `verified`, `errors` or `contestants` in the records",
        )
    absent = [suite for suite in records if suite not in measured]
    partly = {suite: len(r["not_measured"]) for suite, r in measured.items() if r.get("not_measured")}
    whole = [suite for suite in measured if suite not in partly]
    some = [f"{suite} ({n} of its measurements are missing)" for suite, n in partly.items()]
    parts = (("verified and measured", whole), ("verified, measured in part", some), ("not measured", absent))
    return "; ".join(f"{words}: {', '.join(names)}" for words, names in parts if names)
