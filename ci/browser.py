"""See to it that this machine has a browser for the test that opens the HTML report; `python -m ci.browser`."""

from __future__ import annotations

import shutil
import sys

from ci.slurm_packages import try_to_install

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")  # one is enough
DEBIAN = ("chromium",)


def find() -> str | None:
    """The path of a browser of Chromium's kind, if one is here."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def main() -> int:
    """Always 0: without a browser that one test is skipped (in CI it fails), and all others run."""
    if find() is None:
        try_to_install(DEBIAN, PROGRAMS)
    if find() is None:
        print(f"no browser: none of {', '.join(PROGRAMS)} is on PATH", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
