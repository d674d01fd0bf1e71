"""From hits and facts to one attribution. Pure: the same evidence gives the same answer.

hits ─ findings ─▶ first ─▶ weighing ─▶ Attribution
          │                    ▲ ▲
          └─ missing ◀─ dumps, stacks │ └─ history ◀─ earlier cycles
                               └─ endings ◀─ exit codes, signals
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nvrx_slurm.attribution.analyze.aftermath import TailLine
from nvrx_slurm.attribution.analyze.cause import beside, causes, consequences, first
from nvrx_slurm.attribution.analyze.collectives import MissingRanks, refined, waiting
from nvrx_slurm.attribution.analyze.findings import OF_THE_MACHINE, Finding, findings
from nvrx_slurm.attribution.analyze.flight_recorder import Dump
from nvrx_slurm.attribution.analyze.verdict import (
    CycleEnding,
    WeighedVerdict,
    WorkerEnding,
    again_ended,
    ending,
    fingerprint,
    is_sudden,
    repeat,
    weigh,
)
from nvrx_slurm.attribution.scan import Scan
from nvrx_slurm.journal.verdicts import Attribution, Evidence, Failed, Inquiry, Scope, Verdict


@dataclass(frozen=True, slots=True)
class SideEvidence:
    """`tails`: file → its last lines. `stacks`: rank → innermost frame of its main thread. `dumps`: of the flight
    recorder. `earlier`: what ended the cycles before, newest first. `problems`: files that could not be read."""

    tails: Mapping[str, tuple[TailLine, ...]] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    dumps: tuple[Dump, ...] = ()
    earlier: tuple[CycleEnding, ...] = ()
    problems: tuple[str, ...] = ()


SOURCE = "lib"
MOST_EVIDENCE = 16
_MOST_OF_A_FAULT = 3


def attribute(inquiry: Inquiry, scan: Scan, gathered: SideEvidence | None = None) -> Attribution:
    """What ended the cycle that the inquiry is about. `latency_s` and `cached` are the caller's to fill in."""
    return judged(inquiry, scan, gathered or SideEvidence())[0]


def judged(inquiry: Inquiry, scan: Scan, gathered: SideEvidence) -> tuple[Attribution, CycleEnding]:
    """The attribution, and what is kept of it to recognise the failure when it comes again."""
    found = findings(inquiry, scan, gathered.tails)
    waited = waiting(inquiry, scan, found, gathered.dumps, gathered.stacks)
    cause = first(causes(found), inquiry.failed) or first(consequences(found), inquiry.failed)
    if cause is None or _is_explained_by_ending(cause, inquiry.failed):
        ended = ending(inquiry.failed)
        now = _ended_now(ended, inquiry.failed)
        ended = again_ended(ended, repeat(now, gathered.earlier))
        return refined(_by_ending(inquiry, ended, waited, found), waited), now
    now = _now(cause)
    others = [each for each in found if each.place != cause.place]
    again, lasted_s = repeat(now, gathered.earlier), _lasted_s(inquiry, scan, cause)
    weight = weigh(cause, others, inquiry.failed, again, lasted_s, len(inquiry.nodes))
    answer = _by_line(inquiry, cause, others, waited, weight)
    return answer if cause.hit.rule.role == "cause" else refined(answer, waited), now


def _by_line(
    inquiry: Inquiry, cause: Finding, others: Sequence[Finding], waited: MissingRanks, weight: WeighedVerdict
) -> Attribution:
    rule = cause.hit.rule
    after = [each for each in others if _follows(each, cause)]
    ranks = _blamed(inquiry, cause, others, waited)
    return Attribution(
        source=SOURCE,
        verdict=weight.verdict,
        confidence=weight.confidence,
        fault=rule.fault,
        scope=weight.scope,
        transient=_transient(weight.verdict),
        ranks=ranks,
        nodes=_nodes(inquiry, weight.scope, ranks, cause.node),
        missing=waited.ranks,
        primary=cause.evidence,
        secondary=_folded(after),
        explanation=explanation(began(cause), followed(after), waited_for(waited), *weight.reasons),
        hint=rule.hint,
        reference=rule.reference,
    )


def _is_explained_by_ending(cause: Finding, failed: Failed | None) -> bool:
    """Where all that is said is that others noticed: a worker that was killed says nothing itself."""
    return not cause.is_strong and failed is not None and is_sudden(failed)


def _blamed(inquiry: Inquiry, cause: Finding, others: Sequence[Finding], waited: MissingRanks) -> tuple[int, ...]:
    """The rank that the line is of. Where it is nobody's, or a node's: those that tell of the same, were missing,
    or the only one that failed by itself."""
    if cause.hit.rule.role == "consequence":
        return waited.ranks or _of(cause)
    if cause.rank is not None:
        return _of(cause)
    failed = inquiry.failed
    if failed is not None and failed.rank is not None and failed.node == cause.node and is_sudden(failed):
        return (failed.rank,)
    beside = [each for each in causes(others) if each.rank is not None and each.node in (cause.node, None)]
    same = {each.rank for each in beside if each.hit.rule.fault == cause.hit.rule.fault}
    missing = {rank for rank in waited.ranks if inquiry.node_of(rank) == cause.node}
    own = {each.rank for each in beside if each.node is not None}
    ranks = same or missing or (own if len(own) == 1 else set())
    return tuple(sorted(rank for rank in ranks if rank is not None))


def _of(each: Finding) -> tuple[int, ...]:
    return () if each.rank is None else (each.rank,)


def _by_ending(inquiry: Inquiry, end: WorkerEnding, waited: MissingRanks, found: Sequence[Finding]) -> Attribution:
    """No line says anything: what is left are exit codes, signals, and who was waited for."""
    failed = inquiry.failed
    after = consequences(found)
    own = () if failed is None or failed.rank is None else (failed.rank,)
    ranks = waited.ranks if failed is None or failed.hung else own
    return Attribution(
        source=SOURCE,
        verdict=end.verdict,
        confidence=end.confidence,
        fault=end.fault,
        scope=end.scope,
        transient=_transient(end.verdict),
        ranks=ranks,
        nodes=_nodes(inquiry, end.scope, ranks, failed.node if failed else None),
        missing=waited.ranks,
        secondary=_folded([*after, *beside(found)]),
        explanation=explanation(end.sentence, followed(after), waited_for(waited)),
        hint=end.hint,
    )


def _now(cause: Finding) -> CycleEnding:
    """This failure in the form in which earlier ones are kept."""
    rule, hit = cause.hit.rule, cause.hit
    nodes = () if cause.node is None else (cause.node,)
    return CycleEnding(rule.fault, fingerprint(rule.fault, cause.evidence, hit.groups.get("frames", "")), nodes)


def _ended_now(end: WorkerEnding, failed: Failed | None) -> CycleEnding:
    """The same of a failure that only its ending tells of."""
    return CycleEnding(end.fault, end.fault, () if failed is None else (failed.node,))


def _lasted_s(inquiry: Inquiry, scan: Scan, cause: Finding) -> float | None:
    """From the cycle's start to the line: as the inquiry says, or by the stamps in the logs."""
    workers = [str(file.path) for file in scan.files if file.kind not in OF_THE_MACHINE]
    stamps = [scan.first_t[name] for name in workers if name in scan.first_t]
    began = inquiry.started_at or min(stamps, default=None)
    known = inquiry.failed.t if inquiry.failed is not None else 0.0
    ends = [scan.last_t[name] for name in workers if name in scan.last_t]
    ended = cause.t or known or max(ends, default=None)
    return None if began is None or ended is None else max(0.0, ended - began)


def _follows(each: Finding, cause: Finding) -> bool:
    """What is told before the cause, by the common clock or in the same file, did not follow from it."""
    if each.t is not None and cause.t is not None:
        return each.t >= cause.t
    return each.place[0] != cause.place[0] or each.hit.line > cause.hit.line


def _folded(after: Sequence[Finding]) -> tuple[Evidence, ...]:
    """The first few lines of each class, in order of time: a cascade repeats itself on every rank."""
    ordered = sorted(after, key=lambda each: (each.t is None, each.t or 0.0, each.place))
    kept: dict[str, list[Finding]] = {}
    for each in ordered:
        lines = kept.setdefault(each.hit.rule.fault, [])
        if len(lines) < _MOST_OF_A_FAULT and all(line.rank != each.rank for line in lines):
            lines.append(each)
    chosen = {id(each) for lines in kept.values() for each in lines}
    return tuple(each.evidence for each in ordered if id(each) in chosen)[:MOST_EVIDENCE]


def _nodes(inquiry: Inquiry, scope: Scope, ranks: Sequence[int], node: str | None) -> tuple[str, ...]:
    """Only a fault of a node blames one."""
    if scope is not Scope.NODE:
        return ()
    if node is not None:
        return (node,)
    held = (inquiry.node_of(rank) for rank in ranks)
    return tuple(dict.fromkeys(name for name in held if name is not None))


def _transient(verdict: Verdict) -> bool | None:
    return {Verdict.STOP: False, Verdict.RESTART: True}.get(verdict)


_MOST_NAMED = 6
_MOST_FAULTS = 3


def explanation(*sentences: str) -> str:
    """Sentences that are not empty, each with a capital and a full stop."""
    return " ".join(f"{each[:1].upper()}{each[1:].rstrip('.')}." for each in sentences if each)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`; `ranks 0, 1, 5`; `ranks 0, 1, … (16 in all)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"ranks {shown}" + (f", … ({len(ranks)} in all)" if len(ranks) > _MOST_NAMED else "")


def who(each: Finding) -> str:
    """`rank 3 on n2`, as far as known."""
    rank = "" if each.rank is None else f"rank {each.rank}"
    node = "" if each.node is None else f"{'on ' if rank else 'node '}{each.node}"
    return " ".join(part for part in (rank, node) if part) or "one rank"


def began(cause: Finding) -> str:
    """Who failed first, and of what; or who told first that something was wrong elsewhere."""
    how = "failed first" if cause.hit.rule.role == "cause" else "was the first to tell"
    return f"{who(cause)} {how}: {words_of(cause.hit.rule.fault)}"


def followed(after: Sequence[Finding]) -> str:
    """The cascade, by classes: `then nccl timeout (15 ranks), connection reset (3 ranks)`."""
    seen = {(each.hit.rule.fault, each.whose) for each in after}
    counts = Counter(fault for fault, _ in seen)
    told = [
        f"{words_of(fault)} ({count} rank{'s'[: count != 1]})" for fault, count in counts.most_common(_MOST_FAULTS)
    ]
    return f"then followed {', '.join(told)}" if told else ""


def waited_for(waiting: MissingRanks) -> str:
    """Who was missing, and how that is known."""
    return f"the others waited for {ranks_in_words(waiting.ranks)}: {waiting.how}" if waiting.ranks else ""


def words_of(fault: str) -> str:
    """`cuda_oom` → `cuda oom`."""
    return fault.replace("_", " ")
