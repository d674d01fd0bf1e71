"""Which verdict the evidence allows, and how sure it is."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nvrx_slurm.attribution.analyze.aftermath import Finality
from nvrx_slurm.attribution.analyze.findings import Finding
from nvrx_slurm.journal.verdicts import Evidence, Failed, Scope, Verdict

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_QUOTED_PATH = re.compile(r"/[\w./-]*/")
_LONGEST = 160


@dataclass(frozen=True, slots=True)
class CycleEnding:
    """How one of the cycles before ended. `nodes`: where it began, as far as known."""

    fault: str
    fingerprint: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """How often, without a break up to now, the same happened before; and whether always on the same node."""

    times: int = 0
    same_node: bool = False
    other_nodes: bool = False


def fingerprint(fault: str, primary: Evidence | None, frames: str = "") -> str:
    """What makes two failures the same: class, words of the line without their numbers, innermost frame."""
    if primary is None:
        return fault
    words = _NUMBERS.sub("#", _QUOTED_PATH.sub("/", primary.text))[:_LONGEST]
    return f"{fault}|{words}|{frames.partition('|')[0]}"


def repeat(now: CycleEnding, before: Sequence[CycleEnding]) -> Repeat:
    """Count back from now, newest first, until a cycle ended otherwise. What is not known is no repeat."""
    same: list[CycleEnding] = []
    for each in before:
        if each.fault == "unknown" or each.fingerprint != now.fingerprint:
            break
        same.append(each)
    known = [set(each.nodes) for each in (now, *same) if each.nodes]
    if not same or len(known) < 2:
        return Repeat(len(same))
    shared = set.intersection(*known)
    return Repeat(len(same), same_node=bool(shared), other_nodes=not shared)


OUT_OF_MEMORY_FAULTS = frozenset({"host_oom"})


@dataclass(frozen=True, slots=True)
class WorkerEnding:
    """An ending without any line that explains it. `sentence` says what happened, `hint` where to look."""

    fault: str
    verdict: Verdict
    scope: Scope
    confidence: float
    sentence: str
    hint: str = ""


_SIGNALS: dict[int, tuple[str, str]] = {
    signal.SIGSEGV: ("segfault", "Look at the native stack in the rank's .err file; a repeat means a bug."),
    signal.SIGBUS: ("bus_error", "Often /dev/shm or a mapped file was full or gone: compare the node's disk space."),
    signal.SIGABRT: ("abort", "A native library gave up: its last words are in the rank's .err file."),
    signal.SIGILL: ("illegal_instruction", "A binary was built for another CPU than this node's."),
    signal.SIGFPE: ("arithmetic_error", "A native division by zero."),
    signal.SIGKILL: ("killed", "Look for the out-of-memory killer in the node's kernel messages."),
    signal.SIGTERM: ("terminated", "Somebody ended it: Slurm, a launcher, or a person."),
    signal.SIGINT: ("terminated", "Somebody interrupted it."),
}


CRASHES = frozenset({"segfault", "bus_error", "abort", "illegal_instruction", "arithmetic_error"})
"""Faults of a process itself: nobody sends these signals from outside."""

_SUDDEN = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def signal_of(failed: Failed) -> int | None:
    """The signal that ended the worker, also where a shell told it as exit code 128 and more."""
    if failed.signal is not None:
        return failed.signal
    code = failed.exit_code or 0
    return code - 128 if 128 < code < 128 + signal.NSIG else None


def signal_name(number: int) -> str:
    """`SIGKILL`; a number that has no name as `signal 61`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending(failed: Failed | None) -> WorkerEnding:
    """What is to be said when nothing else is known."""
    if failed is None:
        return WorkerEnding("unknown", Verdict.UNKNOWN, Scope.UNKNOWN, 0.0, "No line tells of a failure")
    if failed.hung:
        return WorkerEnding("hang", Verdict.UNKNOWN, Scope.UNKNOWN, 0.3, f"It made no progress ({failed.cause})")
    if failed.rank is None:
        sentence = f"Node {failed.node} was lost ({failed.cause})"
        return WorkerEnding(
            "node_lost", Verdict.RESTART, Scope.NODE, 0.8, sentence, "Ask Slurm and the node's console why."
        )
    number = signal_of(failed)
    if number is None:
        sentence = f"It ended with exit code {failed.exit_code}, and no line says why"
        return WorkerEnding("unknown", Verdict.UNKNOWN, Scope.UNKNOWN, 0.2, sentence)
    fault, hint = _SIGNALS.get(number, ("killed", ""))
    sentence = f"It was ended by {signal_name(number)}, and no line says why"
    return WorkerEnding(fault, Verdict.UNKNOWN, Scope.UNKNOWN, 0.3, sentence, hint)


def is_sudden(failed: Failed) -> bool:
    """Whether a signal ended the worker that leaves it no time for words."""
    return failed.rank is not None and signal_of(failed) in _SUDDEN


def contradicts(failed: Failed, fault: str, rank: int | None) -> bool:
    """Whether the ending speaks against a Python error as its cause: SIGKILL ends a process that raises nothing."""
    if failed.rank is None or failed.rank != rank or fault in OUT_OF_MEMORY_FAULTS:
        return False
    return signal_of(failed) in _SUDDEN


STOPS_FROM = 0.6
"""A STOP that is less sure than this is not said."""

START_S = 600.0
"""Loading and the first steps."""

RIVAL_S = 120.0
"""A fault of hardware, network or scheduler this near to a cause in the user's code is a rival to it."""

OF_THE_CLUSTER = (Scope.NODE, Scope.NETWORK, Scope.SCHEDULER)


@dataclass(frozen=True, slots=True)
class WeighedVerdict:
    """A confidence from 0 to 1, and a verdict that it allows. `reasons`: what changed the rule's own verdict."""

    confidence: float
    verdict: Verdict
    scope: Scope
    reasons: tuple[str, ...] = ()


def weigh(
    cause: Finding,
    others: Sequence[Finding],
    failed: Failed | None,
    again: Repeat,
    lasted_s: float | None = None,
    nodes: int = 0,
) -> WeighedVerdict:
    """`others`: all that was found beside the cause. `lasted_s`: how long the cycle went well, if that is known.
    `nodes`: how many the job has; 0 where that is not known."""
    confidence = _confidence(cause, others, failed, again)
    verdict, scope, reasons = cause.hit.rule.verdict, cause.hit.rule.scope, list[str]()
    if cause.hit.rule.widespread and _is_widespread(cause, others, nodes):
        verdict, scope = Verdict.STOP, Scope.USER_CODE
        reasons.append("it is not of one node or rank alone")
    if verdict is Verdict.STOP and (doubt := _doubt(cause, others, failed, confidence)):
        verdict, confidence = Verdict.UNKNOWN, min(confidence, 0.5)
        reasons.append(doubt)
    elif verdict is Verdict.UNKNOWN and again.times:
        verdict, scope, reason = _repeated(scope, again)
        reasons.append(reason)
    elif _is_too_little_memory(cause, lasted_s):
        verdict = Verdict.STOP
        reasons.append(f"that was {lasted_s:.0f} s after the start, and will be so again")
    return WeighedVerdict(round(confidence, 2), verdict, scope, tuple(reasons))


def _is_widespread(cause: Finding, others: Sequence[Finding], nodes: int) -> bool:
    """Whether several nodes tell of it, or several ranks of the only node."""
    same = [cause, *(each for each in others if each.hit.rule.fault == cause.hit.rule.fault)]
    if len({each.node for each in same} - {None}) > 1:
        return True
    seen = {each.node for each in (cause, *others)} - {None}
    return max(nodes, len(seen)) <= 1 and len({each.rank for each in same} - {None}) > 1


def _is_too_little_memory(cause: Finding, lasted_s: float | None) -> bool:
    """A job that passes its own memory limit at its start, and ends of it, was given too little; later, it may be a
    leak."""
    rule = cause.hit.rule
    if cause.finality is not Finality.ENDED:  # a framework has run the task again, say
        return False
    if rule.fault not in OUT_OF_MEMORY_FAULTS or rule.scope is not Scope.USER_CODE or lasted_s is None:
        return False
    return rule.verdict is Verdict.UNKNOWN and lasted_s <= START_S


def _confidence(cause: Finding, others: Sequence[Finding], failed: Failed | None, again: Repeat) -> float:
    rule = cause.hit.rule
    agreeing = any(each.hit.rule.fault == rule.fault and each.rank != cause.rank for each in others)
    conflicting = any(
        each.hit.rule.role == "cause"
        and each.finality is Finality.ENDED
        and each.hit.rule.fault != rule.fault
        and each.hit.rule.severity >= rule.severity
        for each in others
    )
    followed = any(each.hit.rule.role == "consequence" for each in others)
    seen = failed is not None and failed.rank is not None and failed.rank == cause.rank
    parts = (
        0.7 if cause.finality is Finality.ENDED else 0.55,
        0.1 * agreeing,
        0.1 * seen,
        0.05 * followed,
        0.1 * bool(again.times),
        -0.1 * conflicting,
        -0.15 * (rule.verdict is Verdict.UNKNOWN),
    )
    return max(0.1, min(0.98, sum(parts)))


def _doubt(cause: Finding, others: Sequence[Finding], failed: Failed | None, confidence: float) -> str | None:
    """Why a STOP must not be said; None: nothing speaks against it."""
    if confidence < STOPS_FROM:
        return "the evidence for a stop is thin"
    if failed is not None and contradicts(failed, cause.hit.rule.fault, cause.rank):
        return f"the worker was ended by signal {signal_of(failed)}, which this error does not explain"
    rival = next((each for each in others if _is_rival(each, cause)), None)
    return f"at that time there was also {rival.hit.rule.fault}" if rival is not None else None


def _is_rival(other: Finding, cause: Finding) -> bool:
    rule = other.hit.rule
    if rule.role != "cause" or rule.scope not in OF_THE_CLUSTER or rule == cause.hit.rule:
        return False
    if cause.hit.rule.scope in OF_THE_CLUSTER and not cause.hit.rule.widespread:
        return False
    if rule.verdict is not Verdict.RESTART or other.finality is Finality.SURVIVED:
        return False
    return other.t is None or cause.t is None or abs(other.t - cause.t) <= RIVAL_S


def again_ended(end: WorkerEnding, again: Repeat) -> WorkerEnding:
    """A crash that only its signal tells of, in the light of the cycles before."""
    if end.fault not in CRASHES or not (again.same_node or again.other_nodes):
        return end
    verdict, scope, reason = _repeated(end.scope, again)
    return replace(end, verdict=verdict, scope=scope, confidence=0.6, sentence=f"{end.sentence}; {reason}")


def _repeated(scope: Scope, again: Repeat) -> tuple[Verdict, Scope, str]:
    """What a failure means whose rule could not tell, and that has happened before in the same way."""
    times = "once" if again.times == 1 else f"{again.times} times"
    if again.same_node:
        # The node is left out, so that the next cycle tells whether it was the node or the program.
        return Verdict.RESTART, Scope.NODE, f"the same happened {times} before, always on this node"
    if again.other_nodes or scope is Scope.USER_CODE:
        where = ", on another node" if again.other_nodes else ""
        return Verdict.STOP, Scope.USER_CODE, f"the same happened {times} before{where}"
    return Verdict.UNKNOWN, scope, f"the same happened {times} before"
