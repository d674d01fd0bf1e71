"""The page of a job, opened in a real browser at three sizes and in both themes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from bench.report import write_job
from nvrx_slurm.report.fleet import read_fleet
from nvrx_slurm.report.job_report import job_report
from nvrx_slurm.report.web.fleet_page import fleet_page
from tests.flow.conftest import Tab
from tests.jobs import write_eventful
from tests.unit.report.recorder import BEGIN

SCREENS: dict[str, Any] = {
    f"{size}-{theme}": {"viewport": {"width": width, "height": height}, "color_scheme": theme}
    for size, (width, height) in {"phone": (400, 844), "desktop": (1280, 900), "4k": (3840, 2160)}.items()
    for theme in ("light", "dark")
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a job with every kind of failure, and hostile texts."""
    folder = tmp_path_factory.mktemp("report")
    return job_report(write_eventful(folder)).write(folder / "report.html")


@pytest.fixture(params=["phone-light", "desktop-dark"])
def page(request: pytest.FixtureRequest, tab: Tab, report: Path) -> Iterator[Page]:
    """The page on two of the screens: its behaviour is the same at each size and in both themes."""
    yield from opened(tab, report, SCREENS[request.param])


@pytest.fixture(params=SCREENS)
def looked_at(request: pytest.FixtureRequest, tab: Tab, report: Path) -> Iterator[Page]:
    """The page on each screen, for tests of how it looks."""
    yield from opened(tab, report, SCREENS[request.param])


def opened(tab: Tab, report: Path, screen: dict[str, Any]) -> Iterator[Page]:
    for shown in tab.shows(report, screen):
        expect(shown.locator("#journal .found")).not_to_be_empty()
        yield shown


def test_everything_is_drawn(looked_at: Page) -> None:
    """The timeline with its marks, the goodput that adds up, the steps, and the journal."""
    expect(looked_at.locator("#timeline .marks button")).not_to_have_count(0)
    expect(looked_at.locator("#timeline .legend li")).not_to_have_count(0)
    expect(looked_at.locator("#goodput tbody tr").last).to_contain_text("100.0 %")
    assert looked_at.locator("#steps svg path.made").count() == 4
    assert looked_at.locator("#journal .row").count() > 10
    painted = looked_at.evaluate(
        "() => { const c = document.querySelector('canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "return new Set(Array.from({length: d.length / 4}, (_, i) => `${d[4 * i]},${d[4 * i + 1]}`)).size; }"
    )
    assert painted > 5


def test_it_is_accessible_and_fits(looked_at: Page) -> None:
    """With all folds open, axe-core finds no violation, and the page itself does not scroll sideways."""
    looked_at.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    found = Axe().run(looked_at)
    assert found.violations_count == 0, found.generate_report()
    assert looked_at.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_hostile_texts_stay_texts(page: Page) -> None:
    """What a job has printed is shown as it is written, in each section; nothing of it runs or becomes an element."""
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    why = page.locator("#failures .why").nth(1)
    expect(why).to_contain_text("<img src=x onerror=")
    assert r"\x1b[31m\u202e" in why.inner_text()
    expect(page.locator("#failures pre")).to_contain_text("</script><script>document.title")
    page.locator("#journal input").fill("onerror")
    page.locator("#journal .row").first.click()
    expect(page.locator("#journal .line")).to_contain_text("<img src=x onerror=")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert page.title() == "digits: completed"


def test_a_mark_opens_its_failure(page: Page) -> None:
    """By keyboard: with the focus on a mark, Enter opens its failure and moves the focus there."""
    mark = page.locator("#timeline .marks button").first
    mark.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#failure-0")).to_have_attribute("open", "")
    expect(page.locator("#failure-0 summary")).to_be_focused()


def test_the_timeline_zooms_by_keyboard(page: Page) -> None:
    """Plus zooms, an arrow moves, 0 shows all of it again."""
    said = page.locator("#timeline .window")
    whole = said.inner_text()
    page.locator("#timeline .rows").focus()
    page.keyboard.press("+")
    expect(said).not_to_have_text(whole)
    zoomed = said.inner_text()
    page.keyboard.press("ArrowRight")
    expect(said).not_to_have_text(zoomed)
    page.keyboard.press("0")
    expect(said).to_have_text(whole)


def test_the_journal_is_searched(page: Page) -> None:
    """Words and an event filter the journal, and Escape shows all entries again."""
    everything = page.locator("#journal .found").inner_text()
    page.keyboard.press("/")
    page.keyboard.type("N2 lost")
    expect(page.locator("#journal .found")).to_contain_text(" of ")
    expect(page.locator("#journal .row").first).to_contain_text("n2")
    page.keyboard.press("Escape")
    expect(page.locator("#journal .found")).to_have_text(everything)
    page.locator("#journal select").select_option(label="node_lost")
    expect(page.locator("#journal .row")).to_have_count(1)


def test_a_large_job_is_aggregated(tab: Tab, tmp_path: Path) -> None:
    """1,000 nodes and 10,000 entries: nodes with the same history share a row, each node can be shown alone, and only
    visible rows are elements of the page."""
    folder = write_job(tmp_path, "1", nodes=1000, spares=8, events=10_000)
    report = job_report(folder).write(tmp_path / "large.html")
    assert report.stat().st_size < 5_000_000
    for page in opened(tab, report, SCREENS["desktop-light"]):
        expect(page.locator("#journal .found")).to_contain_text("entries")
        assert page.locator("*").count() < 40_000
        assert page.locator("#journal .row").count() < 80
        grouped = page.evaluate("document.querySelector('.rows .spacer').clientHeight")
        page.get_by_role("button", name="Each node").click()
        single = page.evaluate("document.querySelector('.rows .spacer').clientHeight")
        assert grouped < single / 10
        page.locator("#journal .lines").evaluate("each => { each.scrollTop = each.scrollHeight; }")
        expect(page.locator("#journal .row").last).to_contain_text("shutdown")


@pytest.mark.parametrize("screen", ["phone-dark", "desktop-light"])
def test_the_page_of_all_jobs(tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, screen: str) -> None:
    """The page of all jobs requests nothing, axe-core finds no violation, and it does not scroll sideways."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fleet = read_fleet([write_eventful(tmp_path / "jobs")], since=BEGIN)
    report = tmp_path / "fleet.html"
    report.write_bytes(fleet_page(fleet, since=BEGIN, now=BEGIN + 1000.0))
    for page in tab.shows(report, SCREENS[screen]):
        expect(page.locator("#causes tbody tr")).to_have_count(3)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
