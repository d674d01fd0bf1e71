"""Fixtures that several tests of this folder share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ci import programs
from tests.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger of worker steps. Teardown asserts that each rank had at most one worker at a time."""
    ledger = Ledger(tmp_path / "ledger")
    yield ledger
    ledger.check()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser of this machine. Where there is none, tests are skipped; in CI they fail."""
    program = programs.browser()
    if program is None:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(
            f"no browser here, none of {', '.join(programs.BROWSERS)}; `python -m ci.programs browser` installs one"
        )
    expect.set_options(timeout=30_000)  # a deadline; the machine may be busy
    with sync_playwright() as playwright:
        # Root has no user namespaces for the browser's sandbox, and the project itself makes the page.
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


class Tab:
    """One browser page that opens one file after the other: a new page takes two seconds of processor time."""

    def __init__(self, page: Page) -> None:
        self._page, self._complaints, self._requests = page, list[str](), list[str]()
        page.on("console", lambda message: self._complaints.append(message.text))
        page.on("pageerror", lambda error: self._complaints.append(str(error)))
        page.on("request", lambda asked: self._requests.append(asked.url))

    def shows(self, file: Path, screen: dict[str, Any]) -> Iterator[Page]:
        """Open the file on this screen. Afterwards, assert that the page requested only the file itself, wrote
        nothing to the console and raised no error."""
        self._page.goto("about:blank")
        self._complaints.clear()
        self._requests.clear()
        self._page.set_viewport_size(screen["viewport"])
        self._page.emulate_media(color_scheme=screen["color_scheme"])
        self._page.goto(file.as_uri())
        yield self._page
        assert self._complaints == []
        assert self._requests == [file.as_uri()]


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Tab]:
    """One page for all tests of a module."""
    with browser.new_context() as context:
        yield Tab(context.new_page())
