"""Draw a picture of the documentation: the top of visits.html, or the first place of pairs.html.

usage: python nbs/_tools/pictures.py PAGE     (visits.html or pairs.html of a run; needs playwright and a Chromium)
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "nbs" / "images"


def save(png: bytes, path: Path) -> None:
    "Write a picture and say where it is."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png)
    print(path)


def draw(page: Path) -> None:
    "The top of the page of a nightly run, or the first section of that of pairs."
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1200, "height": 760}, color_scheme="light")
        opened.goto(page.resolve().as_uri())
        part = opened if page.stem == "visits" else opened.locator("section").first
        save(part.screenshot(), IMAGES / f"{page.stem}.png")
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    draw(Path(sys.argv[1]))
