"A real browser that notes what a page asks for and complains about."

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import need

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# What JupyterLab itself says on a machine without a network or a user; anything else on the console fails the test.
HARMLESS = ("favicon", "Failed to load resource", "ResizeObserver")
MARKS = ".point path, path.point, .lines path, .hm image"  # what plotly draws bars, points, lines and pictures with


@contextmanager
def chromium() -> Iterator[Any]:
    "A browser; skips the test where there is none."
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    need(found, "Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


class Watched:
    "A page, with what it asked for and what it complained about."

    def __init__(self, page: Any):
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda r: self.requests.append(r.url))
        page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: self.complaints.append(str(e)))

    def picture(self, path: Path, **options: Any) -> None:
        "Keep a screenshot, and another one in the folder LEAKMEL_SCREENSHOTS, where that is set."
        self.page.screenshot(path=path, **options)
        if folder := os.environ.get("LEAKMEL_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, Path(folder) / path.name)

    @property
    def serious(self) -> list[str]:
        "Complaints that are not JupyterLab's habit."
        return [c for c in self.complaints if not any(h in c for h in HARMLESS)]

    def outside(self, *allowed: str) -> list[str]:
        "Requests that went anywhere but to `allowed`."
        return [u for u in self.requests if not u.startswith((*allowed, "data:", "blob:"))]


def assert_figures(page: Any, n: int) -> None:
    "A page of the site shows n figures, each with a title and something drawn."
    page.wait_for_function(
        f"document.querySelectorAll('.plotly-figure .gtitle').length === {n}", timeout=60_000
    )
    marks = page.evaluate(
        f"[...document.querySelectorAll('.plotly-figure')].map(e => e.querySelectorAll('{MARKS}').length)"
    )
    assert len(marks) == n
    assert all(marks), marks
