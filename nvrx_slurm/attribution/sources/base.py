"""The port of every source of attribution, its answers, and when a view of unfinished logs is good enough."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, runtime_checkable

from msgspec.structs import replace

from nvrx_slurm.errors import MalformedRecord, SourceError
from nvrx_slurm.journal.verdicts import (
    AgentFindings,
    Attribution,
    Evidence,
    FailureKey,
    Inquiry,
    LogsRead,
    Scope,
    Verdict,
    Wire,
)
from nvrx_slurm.util.decoding import decode_json


class Source(Protocol):
    """Answers inquiries about failures.

    `open` prepares what an ask would have to wait for; an ask does not need it. `ask` raises SourceError where there
    is no verdict; it may be cancelled at any moment, and is after `timeout_s`. `settled` is set once all workers of
    the cycle have ended, so that their logs are complete.
    """

    name: str

    async def open(self) -> None: ...
    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution: ...
    async def close(self) -> None: ...


@runtime_checkable
class FindingsTaker(Protocol):
    """A source that judges by what agents have found in the logs of their nodes."""

    def found(self, findings: AgentFindings) -> None:
        """It never waits, and raises nothing."""
        ...


# Analyses the logs as they are now; its argument says whether they are complete.
Look = Callable[[bool], Awaitable[Attribution]]


def is_conclusive(attribution: Attribution | None, inquiry: Inquiry) -> bool:
    """Whether more of the logs would not change it: a verdict that rests on the failing rank's own lines.

    A line of another rank may be a consequence of the failure, whose own line is not written yet; and every rank
    whose peer has gone reports that the network failed.
    """
    if attribution is None or attribution.primary is None:
        return False
    if attribution.verdict not in (Verdict.STOP, Verdict.RESTART):
        return False
    rank = inquiry.key.rank
    return rank is None or (attribution.primary.rank == rank and attribution.scope is not Scope.NETWORK)


async def look_twice(look: Look, inquiry: Inquiry, *, settled: asyncio.Event, settle_s: float) -> Attribution:
    """Look at once; if that is not conclusive, look again when the logs are complete.

    If they are not within `settle_s`, the result of the first look stands.
    """
    if settled.is_set():
        return await look(True)
    first = await look(False)
    if is_conclusive(first, inquiry):
        return first
    try:
        async with asyncio.timeout(settle_s):
            await settled.wait()
    except TimeoutError:
        return first
    return await look(True)


# ---- the answers of a service or an MCP server, checked before they are used

# A longer answer is refused.
MOST_BYTES = 1 << 20

MOST_TEXT = 4_000
MOST_LINE = 400
MOST_SECONDARY = 32
# How much of an answer goes into the journal.
MOST_BLAMED = 1024

# No rank and no line has a greater number; the journal's MessagePack knows no integer beyond 64 bits.
MOST_RANK = (1 << 31) - 1
MOST_BYTES_READ = (1 << 63) - 1
COUNTS = ("files", "size_bytes", "ranks", "agents")


class SourceAnswer(Wire, frozen=True, kw_only=True):
    """The state of an inquiry. `done`: `attribution` is final; before, it is what the logs have shown so
    far, and `revision` counts how often that changed. `failed`: `problem` says why."""

    key: str
    state: Literal["tracked", "queued", "running", "done", "failed"]
    attribution: Attribution | None = None
    problem: str | None = None
    revision: int = 0

    @property
    def is_final(self) -> bool:
        return self.state in ("done", "failed")


def read_answer(data: bytes | str, key: FailureKey) -> SourceAnswer:
    """An answer from its JSON, complete and about this failure. Raises SourceError that says what is wrong."""
    try:
        answer = decode_json(SourceAnswer, data, "the answer")
    except MalformedRecord as error:
        start = data[:80] if isinstance(data, str) else data[:80].decode(errors="replace")
        raise SourceError(f"the answer is not what docs/attrsvc.md says: {error}: {start!r}") from None
    if answer.key != str(key):
        raise SourceError(f"the answer is about another failure: {answer.key[:MOST_LINE]!r} instead of {str(key)!r}")
    if answer.state == "done" and answer.attribution is None:
        raise SourceError("the answer says `done` and has no attribution")
    if answer.attribution is not None and not 0.0 <= answer.attribution.confidence <= 1.0:
        raise SourceError(f"the answer's confidence is {answer.attribution.confidence:g}; it must lie in 0 … 1")
    return answer


def verdict_of(answer: SourceAnswer) -> Attribution:
    """The attribution of an answer that is done. Raises SourceError for one that failed or has none."""
    if answer.state == "failed" or answer.attribution is None:
        raise SourceError(answer.problem or f"it says {answer.state!r} and no more")
    return answer.attribution


def trimmed(attribution: Attribution) -> Attribution:
    """The same with texts and lists of a length that the journal can hold."""
    return replace(
        attribution,
        fault=attribution.fault[:MOST_LINE],
        reference=attribution.reference[:MOST_LINE],
        ranks=_plausible(attribution.ranks),
        missing=_plausible(attribution.missing),
        nodes=tuple(node[:MOST_LINE] for node in attribution.nodes[:MOST_BLAMED]),
        explanation=attribution.explanation[:MOST_TEXT],
        hint=attribution.hint[:MOST_TEXT],
        problem=attribution.problem and attribution.problem[:MOST_TEXT],
        primary=attribution.primary and _short(attribution.primary),
        secondary=tuple(_short(evidence) for evidence in attribution.secondary[:MOST_SECONDARY]),
        runner_up=attribution.runner_up and _short(attribution.runner_up),
        settle=attribution.settle[:MOST_TEXT],
        meaning=attribution.meaning[:MOST_TEXT],
        read=attribution.read and _bounded(attribution.read),
    )


def _bounded(read: LogsRead) -> LogsRead:
    counts = {name: min(max(0, getattr(read, name)), MOST_BYTES_READ) for name in COUNTS}
    problems = tuple(problem[:MOST_LINE] for problem in read.problems[:MOST_SECONDARY])
    return replace(read, **counts, silent=_plausible(read.silent), problems=problems)


def _plausible(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if 0 <= rank <= MOST_RANK)[:MOST_BLAMED]


def _short(evidence: Evidence) -> Evidence:
    return replace(
        evidence,
        file=evidence.file[:MOST_TEXT],
        line=min(max(0, evidence.line), MOST_RANK),
        text=evidence.text[:MOST_LINE],
        rule=evidence.rule[:MOST_LINE],
        rank=evidence.rank if evidence.rank is None or 0 <= evidence.rank <= MOST_RANK else None,
        node=evidence.node and evidence.node[:MOST_LINE],
    )
