"""A job's page as HTML, for a notebook: the facts and tables of `status`, without colours and without scripts."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report import page, snapshot
from nvrx_slurm.report.tables import Table

MOST_RANKS = 32


def job_html(folder: JobFolder, *, problem: str | None = None) -> str:
    """How the job stands now; or, with `problem`, why that is not known."""
    if problem is not None:
        return f"<b>job {escape(folder.job_id)}</b>: {escape(problem)}"
    shot = snapshot.take(folder)
    facts = "".join(
        f"<tr><th style='text-align:left'>{escape(label)}</th><td style='text-align:left'>{escape(text)}</td></tr>"
        for label, text in (row.cells for row in page.facts(shot))
    )
    ranks, others = page.ranks(shot, MOST_RANKS)
    tables = [page.replicas(shot.view), page.nodes(shot), ranks, page.recoveries(shot.view)]
    return "".join([f"<table>{facts}</table>", *map("".join, map(_table, tables)), escape(others or "")])


def _table(table: Table) -> Iterator[str]:
    if table.rows:
        yield f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in table.columns)}</tr>"
        for row in table.rows:
            yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells)}</tr>"
        yield "</table>"
