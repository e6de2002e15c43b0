"visits.html and pairs.html in a real browser: no requests, players that play, nothing wider than the window."

from pathlib import Path
from typing import Any

import pytest
from made_detectors import made_detector, noise
from test_nightly import QUIET, name, put_at
from test_nightly_page import HOSTILE
from test_pairs import line_of

import leakmel as lm
from leakmel.extras.nightly.run import VISITS_HTML, nightly

pytestmark = [pytest.mark.site, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
VIEWPORT = {"width": 1200, "height": 900}
CONTRAST = """() => {
  const parts = c => c.match(/[\\d.]+/g).slice(0, 3).map(x => { x /= 255; return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4 });
  const light = c => { const [r, g, b] = parts(c); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const page = light(getComputedStyle(document.body).backgroundColor);
  return Math.min(...[...document.querySelectorAll('td, th, p, .badge, .bad, .name')].map(e => {
    const text = light(getComputedStyle(e).color);
    return (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05) }));
}"""
PLAYED = """async () => {
  const players = [...document.querySelectorAll('audio')];
  return await Promise.all(players.map(a => new Promise(done => {
    a.onloadedmetadata = () => done(a.duration); a.onerror = () => done(-1); a.preload = 'auto'; a.load(); })));
}"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    for k, sensor in enumerate((*HOSTILE, "a-long-name-without-a-blank-" * 5)):
        for day in range(1, 9):
            put_at(root / "r", name(sensor, day), noise(10 * k + day, 4 * 4096))
    nightly(root / "r", made_detector(), root / "s", audits=4, **QUIET)
    return root / "s" / VISITS_HTML


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_quiet_and_readable(page_file: Path, watched: Any, scheme: str) -> None:
    page = watched.page
    page.emulate_media(color_scheme=scheme)
    page.goto(page_file.as_uri())
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert page.evaluate(PLAYED) == [4.0] * 4
    assert watched.outside(page_file.as_uri()) == []
    assert watched.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= VIEWPORT["width"]
    assert page.evaluate(CONTRAST) > 4.5
    watched.picture(f"visits-{scheme}.png", full_page=True)


def test_the_page_of_pairs_plays_both_loggers(tmp_path: Path, watched: Any) -> None:
    "The page has no script; players are those of the band, and behind a click those of all frequencies."
    recordings, table = line_of(tmp_path, 1.1, 2)
    done = lm.correlate_pairs(recordings, table, tmp_path / "state", progress="none")
    page = watched.page
    for scheme, width in (("light", 1280), ("dark", 400)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(done.page.as_uri())
        assert [round(s) for s in page.evaluate(PLAYED)] == [10] * 4
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CONTRAST) > 4.5
        watched.picture(f"pairs-{scheme}.png", full_page=True)
    assert page.evaluate(
        "new Promise(done => { const a = document.querySelector('audio'); a.ontimeupdate = () => a.currentTime > 0.2"
        " && done(a.currentTime > 0); a.muted = true; a.play().catch(e => done(String(e))); })"
    )
    assert not page.locator("details audio").first.is_visible()
    page.locator("summary").click()
    assert page.locator("details audio").first.is_visible()
    assert page.evaluate("document.querySelector('svg.pipe image').getBoundingClientRect().width") > 100
    assert watched.outside(done.page.as_uri()) == []
    assert watched.complaints == []
