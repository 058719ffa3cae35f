"""The page in a browser: nothing fetched, nothing on the console, and every switch does what it says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest

from probes.report import build
from probes.results.folder import collect

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
ALL = "all charts"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(shutil.copytree(pages.shared(tmp_path_factory) / "report", tmp_path_factory.mktemp("page") / "report"))
    said = ["The first sentence of the answer.", "The second."]
    picture = root / "sinks" / "sinks.png"
    return build(collect(root), pages.claims(), root, command="headwater report", picture=picture, sentences=said)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(QUIET))
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Any]:
    """Opens the page and draws some charts, or all; afterwards nothing may have been fetched or complained of."""
    contexts, complaints, requests = [], [], []

    def open_page(*charts: str, **context: Any) -> Any:
        contexts.append(browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | context)))
        page = contexts[-1].new_page()
        page.on("console", lambda one: complaints.append(one.text) if one.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        every = [figure.get_attribute("data-chart") for figure in page.locator("figure.chart").all()]
        for chart in every if charts == (ALL,) else charts:
            page.locator(f"#figure-{chart}").scroll_into_view_if_needed()
            page.locator(f"#figure-{chart}[data-drawn]").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def visible(page: Any, chart: str) -> list[dict[str, Any]]:
    """What is drawn in a chart: meta, x and y of the traces that are shown."""
    script = f"""document.querySelector('#figure-{chart} .plot').data.filter((one) => one.visible)
        .map((one) => ({{meta: one.meta, x: Array.from(one.x ?? []), y: Array.from(one.y ?? [])}}))"""
    return page.evaluate(script)


def press(page: Any, chart: str, label: str) -> None:
    """A chip of a chart, by its words."""
    page.locator(f"#figure-{chart} .chip", has=page.get_by_text(label, exact=True)).click()


def test_switches_choose_what_is_drawn(opened):
    page = opened("sensitivity", "keys")
    shown = visible(page, "sensitivity")
    assert {one["meta"]["condition"] for one in shown} == {"pretrained", "init"}
    assert {one["meta"]["model"] for one in shown} == {"ape", pages.ROGUE}
    press(page, "sensitivity", "ape")
    press(page, "sensitivity", "init")
    shown = visible(page, "sensitivity")
    assert {(one["meta"]["model"], one["meta"]["condition"]) for one in shown} == {(pages.ROGUE, "pretrained")}
    assert {one["meta"]["curve"] for one in shown} == {"measured"}
    press(page, "sensitivity", "second-moment kernel")
    assert {one["meta"]["curve"] for one in visible(page, "sensitivity")} == {"measured", "second-moment kernel"}
    for quantity in ("mean weight α", "sink rate [Gu]"):  # of which one is shown at a time
        press(page, "keys", quantity)
        assert {one["meta"]["quantity"] for one in visible(page, "keys")} == {quantity}


def test_axes_can_be_switched(opened):
    page = opened("sensitivity")
    for chip, scale in (("", "log"), ("linear", "linear"), ("fraction", "linear"), ("log", "log")):
        if chip:
            press(page, "sensitivity", chip)
        assert page.evaluate("document.querySelector('#figure-sensitivity .plot').layout.yaxis.type") == scale
        x = visible(page, "sensitivity")[0]["x"]
        assert (min(x), max(x)) == (0, pages.LENGTH - 1 if chip in ("", "linear") else 1)


def test_a_click_on_a_head_shows_it(opened):
    page = opened("heads")
    figure = page.locator("#figure-heads")
    cells = figure.locator(".plot .nsewdrag")
    box = cells.bounding_box()
    middle = {"x": box["width"] * 2.5 / 4, "y": box["height"] * 1.5 / 3}  # of block 1 of 3, head 2 of 4
    cells.hover(position=middle)
    figure.locator(".hoverlayer text").first.wait_for()
    cells.click(position=middle)
    page.wait_for_function("document.querySelector('#figure-heads select').value === '1.2'", timeout=5000)
    assert "block 1, head 2" in figure.locator(".head-body h4").inner_text()
    assert figure.locator(".head-body dd").count() >= 9
    with_pattern = figure.locator("option", has_text="with pattern").first.get_attribute("value")
    figure.locator("select").select_option(with_pattern)
    figure.locator(".pattern .heatmaplayer image").wait_for(state="attached")
    without = figure.locator("option").filter(has_not_text="with pattern").first.get_attribute("value")
    figure.locator("select").select_option(without)
    assert "--pictures" in figure.locator(".head-body p").inner_text()
    press(page, "heads", pages.ROGUE)
    assert figure.locator(".head-body h4").inner_text().startswith(pages.ROGUE)


def rows(page: Any) -> list[str]:
    return [row.get_attribute("id") for row in page.locator("#claims-table tbody:visible").all()]


def test_claims_are_sorted_filtered_and_opened(opened):
    page = opened()
    assert rows(page) == ["claim-b-second", "claim-a-first", "claim-c-third"]
    header = page.locator("#claims-table th", has_text="Verdict")
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    assert rows(page) == ["claim-a-first", "claim-b-second", "claim-c-third"]
    header.locator("button").press("Enter")  # by keyboard
    assert rows(page) == ["claim-c-third", "claim-b-second", "claim-a-first"]
    page.locator("#find").fill("40 swap")
    assert rows(page) == ["claim-a-first"]
    assert page.locator("#shown").inner_text() == "1 of 3 claims"
    page.locator("#find").fill("")
    page.locator("#source").select_option("[Gu]")
    assert rows(page) == ["claim-c-third", "claim-b-second"]
    page.locator(".filters .chip", has_text="does not hold").click()
    assert rows(page) == ["claim-c-third"]
    more = page.locator("#claim-c-third button.more")
    more.click()
    assert more.get_attribute("aria-expanded") == "true"
    assert "the number is above 0.3" in page.locator("#claim-c-third .detail").inner_text()
    page.locator("#source").select_option("all")
    page.locator("a.count", has_text="does not hold").click()  # the tally leads to its claims
    assert rows(page) == ["claim-b-second"]


def colour(page: Any, of: str, what: str = "color") -> str:
    return page.evaluate(f"getComputedStyle(document.querySelector('{of}')).getPropertyValue('{what}')")


def test_light_and_dark_follow_the_system_and_the_button(opened):
    page = opened("sensitivity", color_scheme="dark")
    dark = colour(page, "body", "background-color")
    axis = "document.querySelector('#figure-sensitivity .plot').layout.font.color"
    soft = page.evaluate(axis)
    page.locator("#theme").click()
    light = colour(page, "body", "background-color")
    assert page.locator("html").get_attribute("data-theme") == "light"
    assert light != dark
    assert page.evaluate(axis) != soft
    page.locator("#theme").click()
    assert colour(page, "body", "background-color") == dark
    assert page.locator("#theme").get_attribute("aria-label") == "Colour scheme: dark"
    page.reload()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.locator("#theme").click()
    page.emulate_media(color_scheme="light")
    assert colour(page, "body", "background-color") == light


@pytest.mark.parametrize(("width", "touch"), [(390, True), (1200, False)])
def test_the_page_scrolls_down_only_names_are_text_and_every_control_has_one(opened, width, touch):
    page = opened(ALL, viewport={"width": width, "height": 844}, is_mobile=touch, has_touch=touch)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for figure in page.locator("figure.chart .plot").all():
        assert figure.bounding_box()["width"] <= width
    press(page, "keys", "over τ [Wu]")
    assert {one["meta"]["quantity"] for one in visible(page, "keys")} == {"over τ [Wu]"}
    assert page.locator(".card h3", has_text="<script>").inner_text() == pages.ROGUE
    assert pages.ROGUE in page.locator("#figure-sources .xtick text").all_text_contents()
    nameless = """[...document.querySelectorAll('button, input, select, a')].filter((one) =>
        !one.closest('.modebar') && !(one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length))
        .map((one) => one.outerHTML)"""
    assert page.evaluate(nameless) == []
