"""A small catalogue, and logs that it is tried on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from nvrx_slurm.attribution.rules.catalogue import Catalogue, Rule
from nvrx_slurm.attribution.scan import LogFile, Scan, scan
from nvrx_slurm.journal.verdicts import Scope, Verdict


def rule(
    name: str,
    pattern: str,
    *literals: str,
    ignore_case: bool = False,
    role: Literal["cause", "consequence", "noise"] = "cause",
) -> Rule:
    return Rule(
        name=name,
        fault=name,
        pattern=re.compile(pattern.encode(), re.IGNORECASE if ignore_case else 0),
        literals=tuple(literal.encode() for literal in literals),
        ignore_case=ignore_case,
        verdict=Verdict.RESTART,
        scope=Scope.NODE,
        role=role,
        severity=50,
        hint="",
        reference="",
    )


CATALOGUE = Catalogue(
    (
        rule("oom", r"^torch\.OutOfMemoryError: CUDA out of memory", "CUDA out of memory"),
        rule("xid", r"NVRM: Xid \((?P<gpu>[^)]+)\): (?P<xid>\d+)", "NVRM: Xid"),
        rule("value", r"^ValueError: (?!benign)", "ValueError"),
        rule("raised", r"^\w+Error: ", "Error: "),
        rule("nan", r"\bloss is nan\b", "oss ", ignore_case=True),
        rule("timeout", r"Watchdog caught .{0,80}timeout", "Watchdog caught", role="consequence"),
        rule("exited", r"rank (?P<rank>\d+) .*node (?P<node>\S+)", "rank "),
        rule("retried", r"retrying after ValueError|ValueError: retried", "retr", role="noise"),
    )
)


def scanned(path: Path, content: bytes, *, rank: int | None = None, node: str | None = None) -> Scan:
    """What a scan finds in a file of this content."""
    path.write_bytes(content)
    return scan([LogFile(path, rank, node, "mixed")], CATALOGUE)


def found(read: Scan) -> list[tuple[str, int, str]]:
    """Rule, line and text of each hit."""
    return [(hit.rule.name, hit.line, hit.text) for hit in read.hits]
