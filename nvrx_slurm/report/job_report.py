"""A job's page from its folder and, while it runs, its store; and the goodput and recoveries behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report import snapshot
from nvrx_slurm.report.goodput import Goodput
from nvrx_slurm.report.hindsight import stops_of
from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.jobs import read_plan
from nvrx_slurm.report.model import Recovery
from nvrx_slurm.report.recovery import PHASES
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.report.web.job_page import JournalLines, job_page
from nvrx_slurm.util.files import write_output

# Instead of a variable's value: it may be a token, and a page is handed on.
HIDDEN = "set, and not shown"


class Recoveries(tuple[Recovery, ...]):
    """The recoveries of a job, oldest first."""

    def frame(self) -> Any:
        """A pandas DataFrame with a row for each, and a column for each phase; these columns are there without a row,
        too. Raises UsageError without pandas."""
        try:
            import pandas
        except ImportError:
            raise UsageError("there is no pandas here: pip install pandas, or use the records themselves") from None
        fields = [name for name in Recovery.__struct_fields__ if name != "phases"] + ["steps_lost"]
        rows = [{**{name: getattr(each, name) for name in fields}, **each.phases} for each in self]
        columns = dict.fromkeys(name for row in [dict.fromkeys([*fields, *PHASES]), *rows] for name in row)
        return pandas.DataFrame(rows, columns=list(columns))


@dataclass(frozen=True, slots=True)
class JobReport:
    """A job's page, and the records that it shows. `html` is the whole file."""

    job_id: str
    html: bytes
    goodput: Goodput
    recoveries: tuple[Recovery, ...]

    def write(self, path: Path | str) -> Path:
        """Write the page, for this user alone (0600). Raises UsageError."""
        return write_page(Path(path), self.html)

    def _repr_html_(self) -> str:
        """For a notebook: the page in a frame, in which its own policy holds."""
        import html

        return (
            # Without `allow-same-origin` the page's script cannot reach the notebook that shows it.
            f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self.html.decode())}" '
            'style="width:100%;height:48rem;border:0" title="nvrx-slurm report"></iframe>'
        )


def read_job(folder: JobFolder) -> tuple[Snapshot, JobTimeline]:
    """The job as it is now, and its history. Raises OSError."""
    history = JobTimeline()
    shot = snapshot.take(folder, history)
    history.finish(shot.view, shot.until)
    return shot, history


def job_report(folder: JobFolder, *, live: bool = True) -> JobReport:
    """The page of a job: of what is there, if it runs, or if its journal is torn. Raises OSError."""
    history, journal = JobTimeline(), JournalLines()
    shot = snapshot.take(folder, history, journal, live=live)
    goodput = history.finish(shot.view, shot.until)
    html = job_page(shot, history, journal, configuration=configuration(folder), stops=stops_of(folder, history))
    return JobReport(folder.job_id, html, goodput, tuple(shot.view.recoveries.values()))


def write_page(path: Path, page: bytes) -> Path:
    """Write a page, for this user alone. Raises UsageError: where, and why not."""
    try:
        write_output(path, page)
    except OSError as error:
        raise UsageError(f"{path}: the page cannot be written there: {error.strerror}") from None
    return path


def configuration(folder: JobFolder) -> list[tuple[str, str, str]]:
    """Each key of the job with its value, and where that came from: as the submission has recorded it, or else the
    plan. Values of environment variables are left out."""
    plan = read_plan(folder)
    if plan is None:
        return []
    rows = folder.read_origins()
    if rows is None:
        rows = {}
        whole = msgspec.to_builtins(plan)
        blocks: list[tuple[str, Any]] = [("", {**whole, "roles": {role["name"]: role for role in whole["roles"]}})]
        while blocks:
            path, value = blocks.pop()
            if isinstance(value, dict) and value:
                blocks += [(f"{path}.{key}" if path else str(key), inner) for key, inner in reversed(value.items())]
            else:
                rows[path] = (msgspec.json.encode(value).decode(), "plan")
    return [(key, HIDDEN if ".env." in f".{key}" else value, origin) for key, (value, origin) in rows.items()]
