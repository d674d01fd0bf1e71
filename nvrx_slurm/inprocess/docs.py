"""Draws the cycle in docs/inprocess.md anew: `python -m nvrx_slurm.inprocess.docs docs/inprocess.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from nvrx_slurm.inprocess.cycle import diagram

BEGINNING = "<!-- Drawn by `python -m nvrx_slurm.inprocess.docs docs/inprocess.md`. Do not edit. -->\n"
END = "<!-- Until here. -->\n"


def with_diagram(page: str) -> str:
    """The page, with the cycle as it is now. Raises ValueError for a page without a place for it."""
    before, beginning, rest = page.partition(BEGINNING)
    _, end, after = rest.partition(END)
    if not (beginning and end):
        raise ValueError(f"the page needs these two lines, for the diagram to stand between:\n{BEGINNING}{END}")
    return f"{before}{BEGINNING}\n```mermaid\n{diagram()}\n```\n\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_diagram(page.read_text()))
