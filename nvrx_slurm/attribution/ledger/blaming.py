"""A decided failure, and which nodes it speaks against. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nvrx_slurm.attribution.ledger.scoring import Blame, Kind
from nvrx_slurm.journal.verdicts import Attribution, Evidence, Failed, FailureKey, Inquiry, Scope

KINDS = {Scope.NODE: Kind.HARDWARE, Scope.NETWORK: Kind.NETWORK, Scope.STORAGE: Kind.STORAGE}
"""Failures of any other scope follow the job to whatever node it runs on: they blame none."""

LEAST_CERTAINTY = 0.5
"""What a source is less sure of than this does not count."""

LONGEST_EVIDENCE = 300


def blames_of(inquiry: Inquiry, attributions: Iterable[Attribution], *, cluster: str, at: float) -> list[Blame]:
    """What one failure, with what the sources said of it, says of nodes. `at`: seconds since the epoch."""
    found = [blame for each in attributions for blame in _blamed(inquiry, each, cluster, at)]
    return found + list(_lost(inquiry, cluster, at))


def _blamed(inquiry: Inquiry, attribution: Attribution, cluster: str, at: float) -> Iterator[Blame]:
    kind = KINDS.get(attribution.scope)
    if kind is None or attribution.confidence < LEAST_CERTAINTY:
        return
    if attribution.primary is None and inquiry.failed is not None and is_loss(inquiry.key, inquiry.failed):
        return  # no line says why the node went: that it did is all there is, and weighs what a loss does
    for node in attribution.nodes:
        yield Blame(
            cluster=cluster,
            node=node,
            kind=kind,
            failure=str(inquiry.key),
            at=at,
            certainty=min(attribution.confidence, 1.0),
            fault=attribution.fault,
            job=inquiry.key.job,
            evidence=_line(attribution.primary, inquiry.key.job),
        )


def _lost(inquiry: Inquiry, cluster: str, at: float) -> Iterator[Blame]:
    failed = inquiry.failed
    if failed is not None and is_loss(inquiry.key, failed):
        yield Blame(
            cluster=cluster,
            node=failed.node,
            kind=Kind.LOST,
            failure=str(inquiry.key),
            at=at,
            fault="node_lost",
            job=inquiry.key.job,
            evidence=failed.cause[:LONGEST_EVIDENCE],
        )


def is_loss(key: FailureKey, failed: Failed) -> bool:
    """Whether a whole node went away without a word. One that was drained or preempted has said that it left."""
    return key.rank is None and failed.rank is None and not failed.cause.startswith(f"{failed.node} left:")


def _line(evidence: Evidence | None, job: str) -> str:
    """With the file's path below the job's folder, which the blame names too."""
    if evidence is None:
        return ""
    return f"{evidence.file.removeprefix(f'{job}/')}:{evidence.line}: {evidence.text}"[:LONGEST_EVIDENCE]
