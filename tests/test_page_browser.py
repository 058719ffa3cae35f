"""The page in a browser: nothing is fetched or complained of, it fits a small dark screen, and tables are sorted."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pages
import pytest

from probes import report
from probes.results.folder import collect

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_fits_a_small_dark_screen_and_its_tables_are_sorted_by_their_heads(tmp_path, tmp_path_factory):
    collected = replace(collect(pages.shared(tmp_path_factory) / "report"), root=tmp_path)
    file = report.write(report.page_of(collected, pages.claims(), command="headwater report"), tmp_path)
    heard: list[str] = []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET)
        page = browser.new_context(viewport={"width": 390, "height": 900}, color_scheme="dark").new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: heard.append(request.url))
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        paper, words = (
            page.locator(at).first.evaluate(
                f"element => Math.max(...getComputedStyle(element).{name}.match(/[0-9]+/g))"
            )
            for at, name in (("body", "backgroundColor"), ("body", "color"))
        )
        assert paper < 64 < 128 < words
        folded = page.locator("#sinks details", has_text="Heads, the strongest sinks first").first
        folded.locator("summary").click()
        column = list(map(str.strip, folded.locator("thead th").all_inner_texts())).index("attends")

        def values() -> list[float]:
            return [float(row.locator("td").nth(column).inner_text()) for row in folded.locator("tbody tr").all()]

        plain = values()
        for expected in (sorted(plain), sorted(plain, reverse=True)):
            folded.locator("thead th").nth(column).click()
            assert values() == expected
        browser.close()
    assert [text for text in heard if not text.startswith(("file:", "data:"))] == []
