"""The page in a browser: what only a browser can tell. Skipped where there is none."""

import os
import re
from pathlib import Path

import pytest

from micronorm.report import Lead, write_page
from tests.report import browser
from tests.report.build import EVIL, begin, full_run

BINARY = browser.find()
pytestmark = [
    pytest.mark.skipif(BINARY is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is installed"),
    pytest.mark.skipif(os.name != "posix", reason="the pipes to the browser are those of a POSIX shell"),
]
SECTIONS = ["results", "paper", "training", "stat-diff", "shares", "resources"]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    assert BINARY is not None
    with browser.Browser(BINARY, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    evil = full_run(folder / "evil", name=EVIL, evil=EVIL, paper={"top1": 6.31})
    other = full_run(folder / "other", name="other", level=1.4, paper={"top1": 6.31})
    empty = begin(folder / "empty").path
    return {
        "several": write_page(folder / "several.html", runs=[evil, other], title=EVIL),
        "lead": write_page(folder / "lead.html", runs=[evil, other], lead=Lead(EVIL, EVIL, "7e-15", EVIL, EVIL)),
        "one": write_page(folder / "one.html", runs=[other]),
        "empty": write_page(folder / "empty.html", runs=[empty]),
    }


@pytest.mark.parametrize("name", ["several", "one", "empty", "lead"])
def test_the_page_opens_without_complaint_and_asks_for_nothing(chromium, pages, name):
    chromium.open(pages[name])
    assert chromium.complaints() == []
    assert chromium.requests() == [pages[name].as_uri()]


def test_every_section_is_present_and_drawn(chromium, pages):
    chromium.open(pages["several"])
    found = chromium.evaluate("[...document.querySelectorAll('section')].map(s => [s.id, s.offsetHeight])")
    assert [key for key, _ in found] == [*SECTIONS, "predictions", "facts"]
    assert min(height for _, height in found) > 50
    pictures = chromium.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
    assert pictures == [8] * 32


def test_text_from_runs_does_no_harm(chromium, pages):
    chromium.open(pages["several"])
    assert chromium.evaluate("document.scripts.length") == 0
    assert chromium.evaluate("document.querySelectorAll('img:not([src^=\"data:\"]), [onerror]').length") == 0
    assert chromium.evaluate("document.title") == EVIL
    assert EVIL in chromium.evaluate("document.querySelector('.legend').innerText")


def test_the_policy_refuses_scripts_styles_and_requests_that_are_not_the_pages_own(chromium, pages):
    chromium.open(pages["one"])
    plant = """
        window.hit = 0;
        const s = document.createElement("script"); s.textContent = "window.hit = 1"; document.body.append(s);
        const i = document.createElement("img"); i.src = "https://example.org/x.png"; document.body.append(i);
        window.hit
    """
    assert chromium.evaluate(plant) == 0
    refused = " ".join(chromium.complaints())
    assert "script" in refused
    assert "img-src" in refused


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme, background", [("light", "rgb(245, 246, 248)"), ("dark", "rgb(18, 21, 26)")])
def test_the_page_fits_wide_and_narrow_windows_in_either_scheme(chromium, pages, width, scheme, background):
    chromium.resize(width, 900)
    chromium.prefer(scheme)
    chromium.open(pages["several"])
    try:
        assert chromium.evaluate("document.documentElement.scrollWidth") == width
        assert chromium.evaluate("getComputedStyle(document.body).backgroundColor") == background
        wide = "[...document.querySelectorAll('figure svg')].every(s => s.getBoundingClientRect().right <= innerWidth)"
        assert chromium.evaluate(wide)
        # letters of a plot as they stand on the screen
        size = "(() => { const t = document.querySelector('figure svg text'); const s = t.ownerSVGElement;"
        size += " return parseFloat(getComputedStyle(t).fontSize) * s.getBoundingClientRect().width / 420 })()"
        assert chromium.evaluate(size) >= 9.5
    finally:
        chromium.resize(1280, 900)
        chromium.prefer("light")


@pytest.mark.parametrize(
    "selector, expected",
    [
        ("#training svg use", r"^.*, \d+: [\d.]+$"),
        ("#stat-diff figure:nth-child(2) svg use", r"^.*, \d: [\d.]+$"),
        ("#shares svg g:has(> title)", r"\w.*: [\d.]+% at first"),
    ],
)
def test_what_lies_under_the_pointer_has_its_values_as_title(chromium, pages, selector, expected):
    chromium.open(pages["several"])
    title = chromium.evaluate(
        f"(() => {{ const all = [...document.querySelectorAll({selector!r})]; const e = all[all.length - 1];"
        " e.scrollIntoView({block: 'center', behavior: 'instant'});"
        " const r = e.getBoundingClientRect();"
        " const hit = document.elementFromPoint(r.x + r.width / 2, r.y + r.height / 2);"
        " const owner = hit.closest(':has(> title)');"
        " return owner.querySelector('title').textContent })()"
    )
    assert re.search(expected, title)


def test_a_dark_scheme_changes_the_colours_of_charts_and_paper_has_the_light_ones(chromium, pages):
    stroke = "getComputedStyle(document.querySelector('#training svg use')).fill"
    chromium.open(pages["several"])
    light = chromium.evaluate(stroke)
    chromium.prefer("dark")
    try:
        dark = chromium.evaluate(stroke)
        chromium.call("Emulation.setEmulatedMedia", media="print")
        printed = chromium.evaluate(stroke)
    finally:
        chromium.call("Emulation.setEmulatedMedia", media="")
        chromium.prefer("light")
    assert (light, dark, printed) == ("rgb(11, 98, 184)", "rgb(90, 169, 245)", "rgb(11, 98, 184)")


def test_the_first_screen_holds_the_finding_the_picture_and_the_number(chromium, pages):
    chromium.resize(1280, 800)
    chromium.open(pages["lead"])
    try:
        bottoms = chromium.evaluate(
            "['.verdict', '.lead svg', '.law'].map(s => document.querySelector(s).getBoundingClientRect().bottom)"
        )
    finally:
        chromium.resize(1280, 900)
    assert max(bottoms) < 800


def test_it_prints_in_dark_schemes_too(chromium, pages, tmp_path):
    chromium.prefer("dark")
    chromium.open(pages["one"])
    try:
        chromium.print(tmp_path / "page.pdf")
        data = (tmp_path / "page.pdf").read_bytes()
        assert data.startswith(b"%PDF")
        assert 2 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 8
    finally:
        chromium.prefer("light")
