"""Draws docs/report.png: `python -m ci.report_picture docs/report.png`.

The tool runs `nvrx-slurm demo`, which loses a node, and takes the picture of the page that the demo writes at its
end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from ci import programs

WIDTH, HEIGHT = 1200, 930


def main() -> int:
    """The exit code: that of the demo, or 2 without a browser."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--page", type=Path, help="take the picture of this page, and run no demo")
    options = parser.parse_args()
    program = programs.browser()
    if program is None:
        print(f"no browser: none of {', '.join(programs.BROWSERS)} is on PATH", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="nvrx-picture-") as folder:
        page = options.page
        if page is None:
            done = subprocess.run([sys.executable, "-m", "nvrx_slurm", "demo", "--keep", folder], check=False)
            if done.returncode:
                return done.returncode
            page = Path(folder) / "report.html"
        draw(page, options.picture, program)
    return 0


def draw(page: Path, picture: Path, program: str) -> None:
    """The top of the page, as a browser shows it."""
    with sync_playwright() as playwright:
        # Root has no user namespaces to shut the browser in; the page is our own.
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        shown = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        shown.goto(page.absolute().as_uri())
        shown.locator("#timeline .marks button").first.wait_for()
        shown.screenshot(path=picture)
        chromium.close()


if __name__ == "__main__":
    sys.exit(main())
