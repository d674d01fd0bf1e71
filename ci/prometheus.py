"""See to it that this machine has Prometheus for the tests of metrics; `python -m ci.prometheus`."""

from __future__ import annotations

import shutil
import sys

from ci.slurm_packages import try_to_install

PROGRAMS = ("prometheus", "promtool")
DEBIAN = ("prometheus",)


def missing() -> list[str]:
    """The programs that are not here."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def main() -> int:
    """Always 0: without them these tests are skipped (in CI they fail), and all others run."""
    if lacking := missing():
        try_to_install(DEBIAN, lacking)
    if lacking := missing():
        print(f"no Prometheus: {', '.join(lacking)} not on PATH", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
