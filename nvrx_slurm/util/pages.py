"""Pages of docs/ with a diagram that a program draws."""

from __future__ import annotations

import sys
from pathlib import Path

END = "<!-- Until here. -->\n"


def with_diagram(page: str, command: str, diagram: str) -> str:
    """The page with this diagram between its two marks. Raises ValueError for a page that has them not."""
    beginning = f"<!-- Drawn by `{command}`. Do not edit. -->\n"
    before, found, rest = page.partition(beginning)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"the page needs these two lines, for the diagram to stand between:\n{beginning}{END}")
    return f"{before}{beginning}\n```mermaid\n{diagram}\n```\n\n{END}{after}"


def draw(command: str, diagram: str) -> None:
    """The program of `command`: put this diagram into the page that is its argument."""
    page = Path(sys.argv[1])
    page.write_text(with_diagram(page.read_text(), command, diagram))
