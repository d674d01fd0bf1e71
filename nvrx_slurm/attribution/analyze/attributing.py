"""From hits and facts to one attribution. Pure: the same evidence gives the same answer.

hits ──▶ findings ──▶ cause ──▶ verdict ──▶ Attribution
tails ──────┘           │          ├── the cycles before
dumps, stacks ──▶ collectives      └── exit code, signal, hang
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from nvrx_slurm.attribution.analyze.aftermath import Nature, TailLine, nature
from nvrx_slurm.attribution.analyze.cause import beside, causes, consequences, first, without_other_processes
from nvrx_slurm.attribution.analyze.collectives import MissingRanks, missing_ranks, refined
from nvrx_slurm.attribution.analyze.findings import OF_THE_MACHINE, Finding, findings
from nvrx_slurm.attribution.analyze.flight_recorder import Dump
from nvrx_slurm.attribution.analyze.spread import Spread, fingerprint, spread
from nvrx_slurm.attribution.analyze.verdict import (
    CycleEnding,
    WeighedVerdict,
    WorkerEnding,
    again_ended,
    ending,
    is_sudden,
    repeat,
    weigh,
)
from nvrx_slurm.attribution.scan import Scan
from nvrx_slurm.journal.verdicts import Attribution, Evidence, Inquiry, Scope, Verdict

SOURCE = "lib"
MOST_EVIDENCE = 16
_MOST_OF_A_FAULT = 3
_MOST_RANKS_NAMED = 6
_MOST_FAULTS_NAMED = 3
_LONGEST_LAST = 120

_TRANSIENT = {Verdict.STOP: False, Verdict.RESTART: True}


class SideEvidence(msgspec.Struct, frozen=True):
    """What is known beside the scan. `tails`: file → its last lines. `stacks`: rank → innermost frame of its main
    thread. `dumps`: of the flight recorder. `earlier`: how the cycles before ended, newest first. `problems`: files
    that could not be read."""

    tails: Mapping[str, tuple[TailLine, ...]] = {}
    stacks: Mapping[int, str] = {}
    dumps: tuple[Dump, ...] = ()
    earlier: tuple[CycleEnding, ...] = ()
    problems: tuple[str, ...] = ()


def attribute(inquiry: Inquiry, scan: Scan, side: SideEvidence | None = None) -> Attribution:
    """What ended the cycle that the inquiry is about. `latency_s` and `cached` are the caller's to fill in."""
    return attribute_cycle(inquiry, scan, side or SideEvidence())[0]


def attribute_cycle(inquiry: Inquiry, scan: Scan, side: SideEvidence) -> tuple[Attribution, CycleEnding]:
    """The attribution, and what is kept of it to recognise the failure when it comes again."""
    failed = inquiry.failed
    found = without_other_processes(findings(inquiry, scan, side.tails), inquiry)
    missing = missing_ranks(inquiry, scan, found, side.dumps, side.stacks)
    # A line that can be the cause, however late, before any that only follows from one.
    cause = first(causes(found), failed) or first(consequences(found), failed)
    # A worker that was killed prints nothing, nor do those of a lost node. Then a weak cause is only what the others
    # noticed.
    is_silent = failed is not None and (is_sudden(failed) or failed.rank is None)
    if cause is not None and not cause.is_strong and is_silent:
        cause = None

    weighed: WeighedVerdict | WorkerEnding
    if cause is None:
        # No line reports a cause: what is left are exit codes, signals, and who was waited for.
        end = ending(failed)
        now = CycleEnding(end.fault, end.fault, () if failed is None else (failed.node,))
        weighed = end = again_ended(end, repeat(now, side.earlier))
        own = () if failed is None or failed.rank is None else (failed.rank,)
        ranks = missing.ranks if failed is None or failed.hung else own
        node = None if failed is None else failed.node
        after = consequences(found)
        secondary = [*after, *beside(found)]
        fault, hint, reference = end.fault, end.hint, ""
        sentence, reasons = end.sentence, tuple[str, ...]()
    else:
        rule, node = cause.hit.rule, cause.node
        frames = cause.hit.groups.get("frames", "")
        now = CycleEnding(
            rule.fault, fingerprint(rule.fault, cause.evidence, frames), () if node is None else (node,)
        )
        others = [each for each in found if each.place != cause.place]
        lasted_s = _lasted_s(inquiry, scan, side, cause)
        shared = spread(cause, found, inquiry, scan)
        weighed = weigh(
            cause,
            others,
            failed,
            repeat(now, side.earlier),
            lasted_s,
            len(inquiry.nodes),
            shared,
        )
        ranks = _blamed_ranks(inquiry, cause, others, missing)
        secondary = [each for each in others if _follows(each, cause)]
        # The sentence on the cause speaks for lines of the same ranks that report the same.
        after = [
            each
            for each in secondary
            if each.hit.rule.fault != rule.fault or not (shared.everywhere or each.whose == cause.whose)
        ]
        fault, hint, reference = rule.fault, rule.hint, rule.reference
        sentence, reasons = _who(cause, shared, missing, scan), weighed.reasons

    # Only a fault of a node blames one.
    nodes: tuple[str, ...] = ()
    if weighed.scope is Scope.NODE:
        held = (inquiry.node_of(rank) for rank in ranks)
        nodes = (node,) if node is not None else tuple(dict.fromkeys(name for name in held if name is not None))
    runner_up, settle = None, ""
    if weighed.verdict is Verdict.UNKNOWN:
        rivals = [each for each in causes(found) if cause is None or each.hit.rule.fault != cause.hit.rule.fault]
        rivals = rivals or ([*beside(found)] if cause is None else [])
        runner_up = max(rivals, key=lambda each: (-each.finality, each.hit.rule.severity), default=None)
        # A command that shows what the logs do not.
        settle = _COMMANDS.get(_ALIKE.get(fault, fault), "nvrx-slurm analyze JOB_FOLDER --last 2")
        settle = settle.replace("{node}", next(iter(nodes), node or "NODE"))
    answer = Attribution(
        source=SOURCE,
        verdict=weighed.verdict,
        confidence=weighed.confidence,
        fault=fault,
        scope=weighed.scope,
        transient=_TRANSIENT.get(weighed.verdict),
        ranks=ranks,
        nodes=nodes,
        missing=missing.ranks,
        primary=None if cause is None else cause.evidence,
        secondary=_folded(secondary),
        explanation=_explanation(sentence, after, missing, reasons),
        hint=hint,
        reference=reference,
        runner_up=None if runner_up is None else runner_up.evidence,
        settle=settle,
    )
    knows_cause = cause is not None and cause.hit.rule.role == "cause"
    return answer if knows_cause else refined(answer, missing), now


def _who(cause: Finding, shared: Spread, missing: MissingRanks, scan: Scan) -> str:
    """`all 8 ranks on 2 nodes raise the same: key error`; `rank 3 on n2 failed first: cuda oom`, as far as known; of
    a hang `rank 4 never entered ALLREDUCE 1594; its last line: step 1079`."""
    rule = cause.hit.rule
    if rule.role == "consequence" and missing.ranks and (collective := cause.hit.groups.get("collective")):
        call = " ".join(filter(None, (collective, cause.hit.groups.get("seq"))))
        tails = (scan.of(log).tail for log in scan.files if log.rank == missing.ranks[0])
        last = next((line.strip() for tail in tails for line in reversed(tail) if line.strip()), "")
        its = f"; its last line: {last[:_LONGEST_LAST]}" if last else "; it has printed nothing"
        return f"{_named(missing.ranks)} never entered {call}{its}"
    if shared.everywhere and rule.role == "cause":
        on = f" on {len(shared.nodes)} nodes" if len(shared.nodes) > 1 else ""
        return f"all {len(shared.ranks)} ranks{on} raise the same: {_words(rule.fault)}"
    rank = None if cause.rank is None else f"rank {cause.rank}"
    on = f"{'on' if rank else 'node'} {cause.node}" if cause.node else ""
    where = " ".join(filter(None, (rank, on))) or "one rank"
    how = "failed first" if rule.role == "cause" else "reported a failure first"
    return f"{where} {how}: {_words(rule.fault)}"


_COMMANDS = {
    "killed": "srun -w {node} dmesg -T | grep -i -E 'oom|killed process'",
    "host_oom": "sacct -j JOB --format=JobID,NodeList,MaxRSS,ReqMem,State",
    "segfault": "srun -w {node} dmesg -T | grep -E 'segfault|general protection'",
    "bus_error": "srun -w {node} df -h /dev/shm /tmp",
    "hang": "nvrx-slurm dump JOB",
    "nan_loss": "srun -w {node} dcgmi diag -r 3",
    "cuda_error": "srun -w {node} dmesg -T | grep -E 'NVRM|Xid|amdgpu'",
    "unknown": "sacct -j JOB --format=JobID,NodeList,State,ExitCode,Reason",
}
_ALIKE = {
    "abort": "segfault",
    "heap_corruption": "segfault",
    "gpu_hang": "cuda_error",
    "cuda_illegal_access": "cuda_error",
    "cuda_launch_failure": "cuda_error",
    "cublas_error": "cuda_error",
    "cudnn_error": "cuda_error",
    "gpu_application_fault": "cuda_error",
    "data_worker_killed": "killed",
}


def _follows(each: Finding, cause: Finding) -> bool:
    """By the common clock, or in the same file by the line."""
    if each.t is not None and cause.t is not None:
        return each.t >= cause.t
    return each.place[0] != cause.place[0] or each.hit.line > cause.hit.line


def _blamed_ranks(
    inquiry: Inquiry, cause: Finding, others: Sequence[Finding], missing: MissingRanks
) -> tuple[int, ...]:
    """The line's own rank. For a line of no rank: those of its node that report the same fault, or were missing, or
    the only one that failed by itself."""
    own = () if cause.rank is None else (cause.rank,)
    if cause.hit.rule.role == "consequence":
        return missing.ranks or own
    if own:
        return own
    failed = inquiry.failed
    if failed is not None and failed.rank is not None and failed.node == cause.node and is_sudden(failed):
        return (failed.rank,)
    near = [each for each in causes(others) if each.rank is not None and each.node in (cause.node, None)]
    same = {each.rank for each in near if each.hit.rule.fault == cause.hit.rule.fault}
    absent = {rank for rank in missing.ranks if inquiry.node_of(rank) == cause.node}
    failed_there = {each.rank for each in near if each.node is not None}
    ranks = same or absent or (failed_there if len(failed_there) == 1 else set())
    return tuple(sorted(rank for rank in ranks if rank is not None))


def _lasted_s(inquiry: Inquiry, scan: Scan, side: SideEvidence, cause: Finding) -> float | None:
    """From the cycle's start to the line: by the inquiry, or by the stamps in the workers' logs."""
    workers = {log: scan.of(log) for log in scan.files if log.kind not in OF_THE_MACHINE}
    began = inquiry.started_at or None
    if began is None:
        for log, read in workers.items():
            tail = side.tails.get(str(log.path), ())
            stepped = any(nature(line) is Nature.PROGRESS for line in read.tail)
            stepped = stepped or any(line.nature is Nature.PROGRESS for line in tail)
            # A log that begins with a step was cut, and one that shows steps without times says not when it began.
            if nature(read.head) is Nature.PROGRESS or (stepped and read.first_t is None):
                return None
        # The cause's own stamp is no start: a kernel's log may begin with it.
        stamps = [read.first_t for read in workers.values() if read.first_t is not None]
        began = min((t for t in stamps if cause.hit.t is None or t < cause.hit.t), default=None)
    known = inquiry.failed.t if inquiry.failed is not None else 0.0
    last = max((read.last_t for read in workers.values() if read.last_t is not None), default=None)
    ended = cause.t or known or last
    return None if began is None or ended is None else max(0.0, ended - began)


def _folded(after: Sequence[Finding]) -> tuple[Evidence, ...]:
    """The first few lines of each fault, in order of time: a cascade repeats itself on every rank."""
    ordered = sorted(after, key=lambda each: (each.t is None, each.t or 0.0, each.place))
    kept: dict[str, list[Finding]] = {}
    for each in ordered:
        lines = kept.setdefault(each.hit.rule.fault, [])
        if len(lines) < _MOST_OF_A_FAULT and all(line.rank != each.rank for line in lines):
            lines.append(each)
    chosen = {id(each) for lines in kept.values() for each in lines}
    return tuple(each.evidence for each in ordered if id(each) in chosen)[:MOST_EVIDENCE]


def _explanation(sentence: str, after: Sequence[Finding], missing: MissingRanks, reasons: Sequence[str]) -> str:
    """In sentences: what failed, what followed, which ranks were waited for, and why the verdict is this one."""
    sentences = [sentence]
    # `then followed nccl timeout (15 ranks), connection reset (3 ranks)`
    # A dict, not a set: of equal counts the fault that was found first is named first, in every process.
    counts = Counter(fault for fault, _ in dict.fromkeys((each.hit.rule.fault, each.whose) for each in after))
    faults = [
        f"{_words(fault)} ({count} rank{'s'[: count != 1]})"
        for fault, count in counts.most_common(_MOST_FAULTS_NAMED)
    ]
    if faults:
        sentences.append(f"then followed {', '.join(faults)}")
    if missing.ranks:
        sentences.append(f"the others waited for {_named(missing.ranks)}: {missing.how}")
    return " ".join(f"{each[:1].upper()}{each[1:].rstrip('.')}." for each in (*sentences, *reasons))


def _named(ranks: Sequence[int]) -> str:
    """`rank 3`; `ranks 0, 1, … (16 in all)`."""
    names = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    more = f", … ({len(ranks)} in all)" if len(ranks) > _MOST_RANKS_NAMED else ""
    return f"rank{'s'[: len(ranks) != 1]} {names}{more}"


def _words(fault: str) -> str:
    return fault.replace("_", " ")
