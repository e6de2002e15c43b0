"A real browser that logs the requests and errors of a page."

import os
import shutil
import subprocess
import tempfile
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


FONTS = ("DejaVu Sans", "Liberation Sans", "Noto Sans")  # of which most Linux machines have one


def is_installed(font: str) -> bool:
    "Whether a font is installed, as fontconfig says."
    tool = shutil.which("fc-list")
    if tool is None:
        return False
    return bool(subprocess.run([tool, font], capture_output=True, text=True).stdout.strip())


def font_settings(font: str, folder: Path) -> Path:
    "A fontconfig file by which a browser draws all text in one font."
    path = folder / f"{font}.conf"
    path.write_text(
        '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>'
        '<include ignore_missing="yes">/etc/fonts/fonts.conf</include><match target="pattern">'
        f'<edit name="family" mode="assign" binding="strong"><string>{font}</string></edit></match></fontconfig>'
    )
    return path


@contextmanager
def chromium(font: str | None = None) -> Iterator[Any]:
    "A browser, which draws all text in `font` where one is given; skips the test where there is no browser or font."
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    need(found, "Chromium")
    from playwright.sync_api import sync_playwright

    need(font is None or is_installed(font), f"the font {font}")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        env: dict[str, Any] = dict(os.environ)
        if font:
            env["FONTCONFIG_FILE"] = str(font_settings(font, Path(folder)))
        opened = playwright.chromium.launch(executable_path=found, args=FLAGS, env=env)
        yield opened
        opened.close()


# titles and subtitles of figures that reach out of their figure
CUT_TITLES = """[...document.querySelectorAll('.plotly-figure')].flatMap(e =>
    [...e.querySelectorAll('.gtitle, .gtitle-subtitle')]
        .filter(t => t.getBoundingClientRect().right > e.getBoundingClientRect().right)
        .map(t => t.textContent))"""


class Watched:
    "A page, with what it asked for and what it complained about."

    def __init__(self, page: Any):
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda r: self.requests.append(r.url))
        page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: self.complaints.append(str(e)))

    def picture(self, name: str, **options: Any) -> None:
        "Keep a screenshot in the folder LEAKMEL_SCREENSHOTS, where that is set: one of a tall page takes a second."
        if folder := os.environ.get("LEAKMEL_SCREENSHOTS"):
            self.page.screenshot(path=Path(folder) / name, **options)  # makes the folder

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
