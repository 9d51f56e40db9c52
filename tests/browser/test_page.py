"""The pinned page in a real headless browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashladder import paths

PAGE = (paths.PAPER / "generated" / "report.html").as_uri()
SCREENSHOTS = Path(os.environ.get("FLASHLADDER_SCREENSHOTS", paths.BUILD / "screenshots"))
SECTIONS = ("ladder", "shapes", "roofline-section", "predictions")

pytestmark = pytest.mark.browser
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run 'nox -s page'")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        found = str(own) if own.exists() else shutil.which("chromium") or shutil.which("google-chrome")
        if found is None:
            pytest.skip("no Chromium; run 'playwright install chromium' or install the package chromium")
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        running = playwright.chromium.launch(executable_path=found, args=sandbox)
        yield running
        running.close()


def opened(browser: Any, width: int = 1280, **options: Any) -> Any:
    """The page, drawn. Any error or warning on its console, and any request, fails the test that closes it."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    context.set_default_timeout(15_000)
    page = context.new_page()
    page.said = []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.said.append(request.url) if request.url.startswith("http") else None)
    page.goto(PAGE)
    page.wait_for_selector("html[data-ready]")
    return page


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    found = opened(browser)
    yield found
    assert found.said == []
    found.context.close()


@pytest.mark.parametrize(
    ("name", "width", "scheme"), [("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "light")]
)
def test_it_loads_silently_in_every_dress(browser: Any, name: str, width: int, scheme: str) -> None:
    page = opened(browser, width, color_scheme=scheme)
    assert page.said == []
    assert page.locator(".chart svg").count() >= 5
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if scheme == "dark" else "light")
    page.add_style_tag(content="nav { position: static !important }")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for section in SECTIONS:
        page.locator(f"section[aria-labelledby={section}]").screenshot(path=SCREENSHOTS / f"{name}-{section}.png")
    page.locator("article").nth(8).screenshot(path=SCREENSHOTS / f"{name}-card.png")
    page.context.close()


def rows(page: Any) -> int:
    return int(page.locator("#shape-table tbody tr:visible").count())


def choose(page: Any, name: str, value: str) -> None:
    page.evaluate("document.documentElement.removeAttribute('data-ready')")
    page.select_option(f"select[name={name}]", value)
    page.wait_for_selector("html[data-ready]")


def test_filters_change_the_table_and_the_charts(page: Any) -> None:
    choose(page, "dtype", "")
    every, labels = rows(page), page.locator("#heat svg").text_content()
    assert page.locator("#scaling figure").count() == 8
    choose(page, "dtype", "bf16")
    choose(page, "mask", "causal")
    choose(page, "dim", "128")
    assert 0 < rows(page) < every
    cells = page.locator("#shape-table tbody tr:visible td").all_text_contents()
    assert "causal" in cells
    assert "full" not in cells
    assert page.locator("#scaling figure").count() == 1
    assert page.locator("#heat svg").text_content() != labels
    assert page.locator("#count").text_content() == f"{rows(page)} of {every} shapes"
    for name in ("dtype", "mask", "dim"):
        choose(page, name, "")
    assert rows(page) == every


@pytest.mark.parametrize(
    ("chart", "says"), [("#ladder-portable", "change"), ("#ladder-hopper", "x parent"), ("#heat", "peer")]
)
def test_hovering_shows_what_a_mark_is(page: Any, chart: str, says: str) -> None:
    place = page.locator(chart)
    place.scroll_into_view_if_needed()
    mark = place.locator("g.mark-symbol path, g.mark-rect path").nth(3)
    mark.scroll_into_view_if_needed()
    mark.hover(force=True)
    tip = page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert says in tip.inner_text()
    page.mouse.move(0, 0)


def test_the_theme_can_be_chosen_and_charts_follow(page: Any) -> None:
    colour = "getComputedStyle(document.querySelector('#ladder-portable svg text')).fill"
    light = page.evaluate(colour)
    page.select_option("#theme", "dark")
    page.wait_for_selector("html[data-theme=dark][data-ready]")
    dark = page.evaluate(colour)
    assert dark != light
    page.select_option("#theme", "light")
    page.wait_for_selector("html[data-theme=light][data-ready]")
    assert page.evaluate(colour) == light


def test_the_keyboard_reaches_everything_and_reads_the_charts(browser: Any) -> None:
    page = opened(browser)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert {"theme", "ladder-portable", "ladder-hopper", "dtype", "mask", "dim", "heat"} <= reached
    page.focus("#ladder-portable")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator("#ladder-portable-said").inner_text().startswith("r01_tiled: ")
    assert page.said == []
    page.context.close()


def test_it_prints_with_the_details_open(browser: Any, tmp_path: Path) -> None:
    page = opened(browser)
    page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert page.evaluate("[...document.querySelectorAll('details')].every((d) => d.open)")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    page.context.close()


def test_without_javascript_the_tables_are_there(browser: Any) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(PAGE)
    assert page.locator("noscript").count() == 1
    assert page.locator("#shape-table tbody tr").count() > 10
    page.context.close()
