"""The report as one HTML file that loads nothing else. Its template, style and script are in `report_page/`."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nvrx_slurm.lab.flow import report_text as words
from nvrx_slurm.lab.flow.outcome import FlowAttempt, FlowOutcome, SuiteOutcome
from nvrx_slurm.report.web.document import policy_hash
from nvrx_slurm.report.words import seconds

PAGE = Path(__file__).parent / "report_page"
# The time line's width in its own units.
AXIS = 1000

LEAST_WIDTH = 6
_JOURNAL_LINE = re.compile(r"(\+\d+\.\d+s)(\s+)(\w+)(\s*)(.*)")


def page(outcome: SuiteOutcome, base: Path | None = None, *, file: Path | None = None) -> str:
    """The whole file. Paths are relative to `base`; nothing in the outcome can become markup or script. `file`: where
    it will lie, from which links to the pages of jobs are relative."""
    environment = Environment(loader=FileSystemLoader(PAGE), undefined=StrictUndefined, autoescape=True)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.globals.update(AXIS=AXIS, WORDS={status: style.word for status, style in words.STYLES.items()})
    environment.filters.update(
        seconds=seconds,
        recovery=words.recovery,
        headline=words.headline,
        journal=_journal,
        searchable=_searchable,
        since_start=lambda fault, attempt: seconds(max(0.0, fault.t - attempt.began_at)),
        utc=lambda moment: datetime.fromtimestamp(moment, UTC),
        place=words.place,
        link=lambda page: quote(os.path.relpath(page, (file or Path(page)).absolute().parent)),
        seen_from=lambda file, base: words.path_from(base, file),
    )
    style, script = ((PAGE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    text = environment.get_template("page.html.j2").render(
        outcome=outcome,
        flows=words.worst_first(outcome),
        counts=words.counts(outcome),
        axis=_Axis(outcome),
        base=base,
        # Not escaped, since they are part of the package. The browser may run only what has their hashes.
        style=Markup(style),
        script=Markup(script),
        style_hash=policy_hash(style),
        script_hash=policy_hash(script),
    )
    return words.plain(text)


class _Axis:
    """Where moments of the run lie on its time line."""

    def __init__(self, outcome: SuiteOutcome) -> None:
        self._began_at, self._took_s = outcome.began_at, max(outcome.took_s, 1e-3)

    def at(self, moment: float) -> int:
        share = (moment - self._began_at) / self._took_s
        return round(AXIS * min(1.0, max(0.0, share)))

    def start(self, attempt: FlowAttempt) -> int:
        return min(self.at(attempt.began_at), AXIS - LEAST_WIDTH)

    def width(self, attempt: FlowAttempt) -> int:
        return max(LEAST_WIDTH, self.at(attempt.began_at + attempt.took_s) - self.start(attempt))

    def offset(self, attempt: FlowAttempt) -> str:
        return seconds(max(0.0, attempt.began_at - self._began_at))


def _journal(lines: tuple[str, ...]) -> Markup:
    """The journal's lines, their times and event names marked."""
    marked = []
    for line in lines:
        match = _JOURNAL_LINE.fullmatch(line)
        if match is None:
            marked.append(Markup("{}").format(line))
        else:
            marked.append(Markup("<i>{}</i>{}<b>{}</b>{}{}").format(*match.groups()))
    return Markup("\n").join(marked)


def _searchable(flow: FlowOutcome) -> str:
    found = [finding.message for attempt in flow.attempts for finding in attempt.findings]
    injected = [fault.what for attempt in flow.attempts for fault in attempt.injected]
    return " ".join([flow.name, flow.about, flow.file, words.headline(flow), *found, *injected]).casefold()
