"""The page in a browser: nothing is fetched or complained of, it fits any screen, light and dark, and tables obey."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pages
import pytest

from probes import report
from probes.results.folder import collect

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page")
    collected = replace(collect(pages.shared(tmp_path_factory) / "report"), root=out)
    return report.write(report.page_of(collected, pages.claims(), command="headwater report"), out)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(QUIET))
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Any]:
    """Opens the page; afterwards nothing may have been fetched or complained of."""
    contexts, complaints, requests = [], [], []

    def open_page(width: int, scheme: str) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    for context in contexts:
        context.close()


def color(page: Any, selector: str, name: str) -> list[int]:
    """Red, green and blue of an element's style."""
    style = page.locator(selector).first.evaluate(f"element => getComputedStyle(element).{name}")
    return [int(part) for part in style.removeprefix("rgba").removeprefix("rgb").strip("()").split(",")[:3]]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_takes_the_reader_s_colours(opened, width, scheme):
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper, words = color(page, "body", "backgroundColor"), color(page, "svg text", "fill")
    assert (max(paper) < 64, min(words) > 128) == ((True, True) if scheme == "dark" else (False, False))
    first = page.locator("header svg").bounding_box()
    assert first["y"] < 450
    assert first["width"] >= min(width - 100, 600)
    names = page.locator("section h2").all_inner_texts()
    assert names[0] == "Leakage"
    assert names[-2:] == ["Statements", "Models and provenance"]


def test_tables_are_folded_sorted_by_their_heads_and_statements_found_by_words(opened):
    page = opened(1280, "light")
    folded = page.locator("#sinks details", has_text="Heads, the strongest sinks first").first
    assert not folded.locator("table").is_visible()
    folded.locator("summary").click()
    column = list(map(str.strip, folded.locator("thead th").all_inner_texts())).index("attends")

    def values() -> list[float]:
        return [float(row.locator("td").nth(column).inner_text()) for row in folded.locator("tbody tr").all()]

    plain = values()
    for expected in (sorted(plain), sorted(plain, reverse=True)):
        folded.locator("thead th").nth(column).click()
        assert values() == expected
    statements = page.locator("#statements details").first
    statements.locator("summary").click()
    for words, count in (("", 2), ("swap removes", 1), ("[Gu] everywhere", 1), ("nothing of it", 0)):
        page.locator("#find").fill(words)
        assert statements.locator("tbody tr:visible").count() == count
