"""Draws the cycle in docs/inprocess.md anew: `python -m nvrx_slurm.inprocess.docs docs/inprocess.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from nvrx_slurm.inprocess.cycle import diagram
from nvrx_slurm.util import pages

COMMAND = "python -m nvrx_slurm.inprocess.docs docs/inprocess.md"


def with_diagram(page: str) -> str:
    """The page, with the cycle as it is now. Raises ValueError for a page without a place for it."""
    return pages.with_diagram(page, COMMAND, diagram())


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_diagram(page.read_text()))
