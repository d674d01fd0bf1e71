"""A job's page as HTML, for a notebook: the facts and tables of `status`, without colours and without scripts."""

from __future__ import annotations

from html import escape

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report import page, snapshot

MOST_RANKS = 32


def job_html(folder: JobFolder) -> str:
    """How the job stands now, or why that is not known."""
    try:
        shot = snapshot.take(folder)
    except (NvrxError, OSError) as error:
        return f"<b>job {escape(folder.job_id)}</b>: {escape(str(error))}"
    facts = "".join(
        f"<tr><th style='text-align:left'>{escape(label)}</th><td style='text-align:left'>{escape(text)}</td></tr>"
        for label, text in (row.cells for row in page.facts(shot))
    )
    ranks, others = page.ranks(shot, MOST_RANKS)
    html = f"<table>{facts}</table>"
    for table in (page.replicas(shot.view), page.nodes(shot), ranks, page.recoveries(shot.view)):
        if table.rows:
            head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
            rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row.cells) for row in table.rows)
            html += f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    return html + escape(others or "")
