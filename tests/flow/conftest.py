"""What several tests of this folder use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from ci import programs


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser of this machine. In CI there must be one."""
    program = programs.browser()
    if program is None:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(
            f"no browser here, none of {', '.join(programs.BROWSERS)}; `python -m ci.programs browser` installs one"
        )
    expect.set_options(timeout=30_000)  # a deadline; the machine may be busy
    with sync_playwright() as playwright:
        # Root has no user namespaces to shut the browser in; the page is our own.
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()
