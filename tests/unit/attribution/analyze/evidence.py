"""Hits and scans made by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvrx_slurm.attribution.analyze.aftermath import Finality
from nvrx_slurm.attribution.analyze.findings import Finding
from nvrx_slurm.attribution.rules.catalogue import Rule
from nvrx_slurm.attribution.scan import Hit, LogFile, LogKind, Scan
from nvrx_slurm.journal.verdicts import Failed, FailureKey, Inquiry, Scope, Verdict

KEY = FailureKey(job="/jobs/7", generation=0, replica="main-0", cycle=2, rank=3)


def rule(
    name: str = "cuda_oom.raised",
    verdict: Verdict = Verdict.STOP,
    *,
    scope: Scope = Scope.USER_CODE,
    role: Any = "cause",
    severity: int = 80,
) -> Rule:
    """A rule whose class is the first part of its name."""
    return Rule(
        name=name,
        fault=name.partition(".")[0],
        pattern=re.compile(name.encode()),
        literals=(name.encode(),),
        ignore_case=False,
        verdict=verdict,
        scope=scope,
        role=role,
        severity=severity,
        hint=f"hint of {name}",
        reference="",
    )


OOM = rule()
KEY_ERROR = rule("key_error.raised", severity=62)
XID = rule("gpu_lost.xid_79", Verdict.RESTART, scope=Scope.NODE, severity=96)
SEGFAULT = rule("segfault.native", Verdict.UNKNOWN, scope=Scope.USER_CODE, severity=60)
ANY_ERROR = rule("exception.raised", Verdict.UNKNOWN, severity=36)
TIMEOUT = rule("nccl_timeout.watchdog", Verdict.RESTART, scope=Scope.UNKNOWN, role="consequence", severity=34)
RESET = rule("peer_lost.reset", Verdict.RESTART, scope=Scope.NETWORK, role="consequence", severity=30)
NOISE = rule("noise.look_alike", Verdict.UNKNOWN, role="noise", severity=100)


def log(name: str, rank: int | None = None, node: str | None = None, kind: LogKind = "err") -> LogFile:
    """A log file; it need not exist."""
    return LogFile(Path("/logs") / name, rank, node, kind)


def hit(
    of: Rule,
    rank: int | None = 0,
    *,
    line: int = 10,
    t: float | None = None,
    node: str | None = None,
    kind: LogKind = "err",
    text: str = "",
    groups: Mapping[str, str] | None = None,
    file: str | None = None,
) -> Hit:
    """A line that the rule matched, in the rank's own file. Lines are 100 bytes long."""
    where = log(file or (f"health/{node}.txt" if kind == "health" else f"rank-{rank}.err"), rank, node, kind)
    return Hit(where, line, text or of.name, of, rank, node, t, groups or {}, line * 100)


def finding(of: Rule, rank: int | None = 0, finality: Finality = Finality.ENDED, **of_hit: Any) -> Finding:
    """A hit with its finality."""
    one = hit(of, rank, **of_hit)
    return Finding(one, rank, one.node, one.t, finality)


def scan(*hits: Hit, files: tuple[LogFile, ...] = ()) -> Scan:
    """The scan that logs with these lines would give."""
    known = dict.fromkeys((*files, *(each.file for each in hits)))
    return Scan(hits, tuple(known))


def inquiry(failed: Failed | None = None, **more: Any) -> Inquiry:
    """An inquiry about cycle 2 of two nodes with four ranks each."""
    facts: dict[str, Any] = {"nodes": ("n1", "n2"), "workers_per_node": 4, "paths": ("/logs",), **more}
    return Inquiry(key=KEY, failed=failed, **facts)


def failed(rank: int | None = 3, **more: Any) -> Failed:
    """A worker that ended by itself."""
    return Failed(**{"cause": "exited with 1", "node": "n1", "rank": rank, **more})
