"""The answers of a service or an MCP server, checked before they are used."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from nvrx_slurm.errors import MalformedRecord, SourceError
from nvrx_slurm.journal.verdicts import Attribution, Evidence, FailureKey, Wire
from nvrx_slurm.util.decoding import decode_json

MOST_BYTES = 1 << 20
"""A longer answer is refused."""

MOST_TEXT = 4_000
MOST_LINE = 400
MOST_SECONDARY = 32
MOST_BLAMED = 1024
"""How much of an answer goes into the journal."""

MOST_RANK = (1 << 31) - 1
"""No rank and no line has a greater number; the journal's MessagePack knows no integer beyond 64 bits."""


class SourceAnswer(Wire, frozen=True, kw_only=True):
    """The state of an inquiry. `done`: `attribution` is final; before, it is what the logs have shown so
    far, and `revision` counts how often that changed. `failed`: `problem` says why."""

    key: str
    state: Literal["tracked", "queued", "running", "done", "failed"]
    id: str = ""
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
    )


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
