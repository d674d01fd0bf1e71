"""The status page as plain text: aligned columns, no colour, no wrapping, the same words every time. For pipes."""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.report import page as sections
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.report.tables import Row, Table

GAP = "  "
MOST_RANKS = 64


def page(shot: Snapshot) -> str:
    """One job: facts, then tables, each under its column names."""
    ranks, others = sections.ranks(shot, MOST_RANKS)
    present = _tables(sections.replicas(shot.view), sections.nodes(shot), ranks)
    return "\n\n".join([pairs(sections.facts(shot)), *present, *([others] if others else []), *_history(shot)])


def summary(shot: Snapshot) -> str:
    """How a job went: its cycles, and each recovery's phases."""
    return "\n\n".join([pairs(sections.facts(shot)), *_history(shot)])


def _history(shot: Snapshot) -> list[str]:
    return _tables(sections.cycles(shot.view, shot.moment), sections.recoveries(shot.view))


def _tables(*tables: Table) -> list[str]:
    return [table(each) for each in tables if each.rows]


def pairs(rows: Sequence[Row]) -> str:
    """Labels and texts in two columns."""
    width = max(len(row.cells[0]) for row in rows)
    return "\n".join(f"{row.cells[0]:<{width}}{GAP}{row.cells[1]}{row.end}" for row in rows)


def table(each: Table) -> str:
    """Column names, then the rows; numbers to the right, no blanks at the end of a line."""
    lines = [each.columns, *(row.cells for row in each.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = []
    for cells in lines:
        columns = zip(cells, widths, each.columns, strict=True)
        row = (cell.rjust(width) if name in each.right else cell.ljust(width) for cell, width, name in columns)
        padded.append(GAP.join(row).rstrip())
    return "\n".join(padded)
