"""The exception that a worker told its agent before it ended: known before its output is in any file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from nvrx_slurm.attribution.analyze.aftermath import of_another
from nvrx_slurm.attribution.rules.catalogue import Catalogue, Rule
from nvrx_slurm.attribution.scan import Hit, LogFile, Scan
from nvrx_slurm.journal.verdicts import Failed, Inquiry

NO_FILE = Path("uncaught exception")
"""What stands for a file's name in the evidence."""


def with_told(scan: Scan, inquiry: Inquiry, catalogue: Catalogue) -> Scan:
    """The scan with the failed worker's exception as a line of its own, unless its output has it already."""
    failed = inquiry.failed
    if failed is None or failed.error is None or _is_written(failed.error, failed, scan):
        return scan
    return replace(scan, hits=(*scan.hits, *_hits(failed.error, failed, catalogue)))


def _is_written(error: str, failed: Failed, scan: Scan) -> bool:
    own = (hit for hit in scan.hits if hit.rank in (failed.rank, None) and not of_another(hit.groups.get("aside")))
    return any(error in hit.text for hit in own)


def _hits(error: str, failed: Failed, catalogue: Catalogue) -> Iterator[Hit]:
    line = error.encode()
    log = LogFile(NO_FILE, failed.rank, failed.node, "err")
    for rule in catalogue.rules:
        if _may_match(rule, line) and (match := rule.pattern.search(line)):
            groups = {name: text.decode() for name, text in match.groupdict().items() if text}
            yield Hit(log, 0, error, rule, failed.rank, failed.node, failed.t, groups, 0)


def _may_match(rule: Rule, line: bytes) -> bool:
    """The cheap question first: most patterns are never compiled."""
    text = line.lower() if rule.ignore_case else line
    return any(literal in text for literal in rule.literals)
