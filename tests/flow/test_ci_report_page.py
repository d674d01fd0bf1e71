"""The HTML report, opened in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from nvrx_slurm.lab.flow import report_html
from nvrx_slurm.lab.flow.report_text import write
from tests.flow.conftest import Tab
from tests.outcomes import HOSTILE, of_every_kind

SCREENS = {
    "desktop-light": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "light"},
    "phone-dark": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a suite with every kind of outcome, hostile texts among them."""
    path = tmp_path_factory.mktemp("report") / "ci.html"
    write(path, report_html.page(of_every_kind()))
    return path


@pytest.fixture(params=SCREENS)
def page(request: pytest.FixtureRequest, tab: Tab, report: Path) -> Iterator[Page]:
    """The report, opened, on each screen."""
    yield from tab.shows(report, SCREENS[request.param])


def shown(page: Page) -> list[str]:
    return page.locator(".flow:visible summary b").all_inner_texts()


def row(page: Page, name: str) -> Locator:
    return page.locator(".flow", has=page.locator("summary b", has_text=name))


def test_every_flow_is_listed_and_the_wrong_ones_come_first(page: Page) -> None:
    """All flows are listed without any interaction. Those that went wrong come first, and the first of them is
    open."""
    assert len(shown(page)) == len(of_every_kind().flows)
    assert shown(page)[0] == "spare-takes-over"
    assert shown(page)[-2:] == ["happy-path", "network-cut"]
    expect(page.locator(".flow").first.locator(".finding").first).to_be_visible()
    assert page.locator("details[open]").count() == 1


def test_the_filter_leaves_what_fits(page: Page) -> None:
    """Status and text filter together; the page counts the flows that match, and Escape clears the text."""
    page.get_by_text("failed 2").click()
    expect(page.locator(".flow:visible")).to_have_count(2)
    page.keyboard.press("/")
    page.keyboard.type("SPARE kill_node")
    expect(page.locator(".flow:visible")).to_have_count(1)
    expect(page.get_by_role("status")).to_have_text(f"1 of {len(of_every_kind().flows)} flows")
    page.keyboard.type(" nowhere")
    expect(page.get_by_role("status")).to_have_text("No flow fits.")
    page.keyboard.press("Escape")
    expect(page.locator(".flow:visible")).to_have_count(2)


def test_a_flow_opens_by_keyboard(page: Page) -> None:
    """Tab reaches each flow, and Enter opens it: its attempts, findings, faults and journal."""
    flaky = row(page, "frozen-node")
    flaky.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(flaky.get_by_role("heading", name="Attempt 2 of 2: passed")).to_be_visible()
    expect(flaky.locator(".finding").first).to_contain_text("ci/flows/spare-takes-over.yaml:14")
    expect(flaky.locator(".faults").first).to_contain_text("kill_node of rank 2")
    expect(flaky.locator(".journal").first).to_contain_text(
        "+1.204s      node_lost          n2: connection to its agent closed"
    )
    page.keyboard.press("Tab")
    expect(flaky.locator(".journal").first).to_be_focused()


def test_a_link_opens_the_flow_that_it_names(page: Page, report: Path) -> None:
    """`ci.html#frozen-node` shows that flow, opened."""
    page.goto(f"{report.as_uri()}#frozen-node")
    expect(page.locator("details#frozen-node")).to_have_attribute("open", "")


def test_hostile_texts_stay_texts(page: Page) -> None:
    """A name that is markup is shown as it is written; nothing of it runs or becomes an element."""
    hostile = row(page, "onerror")
    hostile.locator("summary").click()
    markup = HOSTILE[: HOSTILE.index("\x1b")]
    assert hostile.locator("summary b").inner_text() == markup + r"red\x00\ud800\x1b]0;t\x07\x9b\u202e"
    assert "&amp;{{7*7}}" in hostile.locator(".finding pre").inner_text()
    assert page.locator("img").count() == 0
    assert page.title().startswith("1 passed, 1 flaky, 2 failed")


def test_nothing_is_wider_than_the_screen(page: Page) -> None:
    """On a phone too, with everything open, the page itself does not scroll sideways."""
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_text_stands_out_from_its_ground(page: Page) -> None:
    """In both themes, each kind of text has the contrast that WCAG 2 asks of it (AA: 4.5 to 1)."""
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    weak = {
        selector: ratio
        for selector in (
            ".headline",
            ".when",
            ".kind",
            ".journal i",
            ".journal b",
            "code",
            "dt",
            "h3",
            ".faults small",
        )
        if (ratio := page.evaluate(CONTRAST, selector)) < 4.5
    }
    assert weak == {}


CONTRAST = """selector => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector);
  let ground = element;
  while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor].map(light);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""
"""The contrast ratio of an element's text, as WCAG 2.2 defines it (relative luminance)."""
