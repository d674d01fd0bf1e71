"""Which verdict the evidence allows, and how sure it is. Pure.

Precision of STOP comes first: a STOP that was not needed costs a night. So a rule's STOP stands only where what else
is known agrees with it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.aftermath import Finality
from nvrx_slurm.attribution.analyze.findings import Finding
from nvrx_slurm.attribution.analyze.spread import Spread
from nvrx_slurm.journal.verdicts import Failed, Scope, Verdict, cannot_run
from nvrx_slurm.util.signals import signal_name


class CycleEnding(msgspec.Struct, frozen=True):
    """How one of the cycles before ended. `nodes`: where it began, as far as known."""

    fault: str
    fingerprint: str
    nodes: tuple[str, ...] = ()


class Repeat(msgspec.Struct, frozen=True):
    """How many of the last cycles, without a break, ended in the same way; and whether always on the same node."""

    times: int = 0
    same_node: bool = False
    other_nodes: bool = False


def repeat(now: CycleEnding, before: Sequence[CycleEnding]) -> Repeat:
    """Count back from now until a cycle ended otherwise. `before`: newest first. Unknown endings are no repeat, nor
    are hangs: it is not known where the ranks hung."""
    same: list[CycleEnding] = []
    for each in before:
        if each.fault in ("unknown", "hang") or each.fingerprint != now.fingerprint:
            break
        same.append(each)
    known = [set(each.nodes) for each in (now, *same) if each.nodes]
    if not same or len(known) < 2:
        return Repeat(len(same))
    shared = set.intersection(*known)
    return Repeat(len(same), same_node=bool(shared), other_nodes=not shared)


OUT_OF_MEMORY_FAULTS = frozenset({"host_oom"})


class WorkerEnding(msgspec.Struct, frozen=True):
    """A failure that no line explains: what exit codes, signals and the agent report. `sentence` says what happened,
    `hint` where to look."""

    fault: str
    verdict: Verdict
    scope: Scope
    confidence: float
    sentence: str
    hint: str = ""


_SIGNALS: dict[int, tuple[str, str]] = {
    signal.SIGSEGV: ("segfault", "Look at the native stack in the rank's .err file; a repeat means a bug."),
    signal.SIGBUS: ("bus_error", "Often /dev/shm or a mapped file was full or gone: compare the node's disk space."),
    signal.SIGABRT: ("abort", "A native library aborted: its last lines are in the rank's .err file."),
    signal.SIGILL: ("illegal_instruction", "A binary was built for another CPU than this node's."),
    signal.SIGFPE: ("arithmetic_error", "A native division by zero."),
    signal.SIGKILL: ("killed", "Look for the out-of-memory killer in the node's kernel messages."),
    signal.SIGTERM: ("terminated", "Slurm, a launcher or a person ended it."),
    signal.SIGINT: ("terminated", "A person or a launcher interrupted it."),
}


# Faults of a process itself: these signals do not come from outside.
CRASHES = frozenset({"segfault", "bus_error", "abort", "illegal_instruction", "arithmetic_error"})

# Without SIGABRT: a library that aborts has mostly printed its reason first.
_SUDDEN = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


# How the error of a worker that never ran begins → where to look. The agent names the key of `container`.
_NEVER_RAN = {
    "container.runtime": "`module load` the runtime in `setup`, or correct `container` in job.yaml.",
    "container.": "Correct `container` in job.yaml.",
    "": "Check the command, PATH and the working folder.",
}


def signal_of(failed: Failed) -> int | None:
    """The signal that ended the worker, also where a shell reports it as exit code 128 and more."""
    if failed.signal is not None:
        return failed.signal
    code = failed.exit_code or 0
    return code - 128 if 128 < code < 128 + signal.NSIG else None


def ending(failed: Failed | None) -> WorkerEnding:
    """What the way in which the worker ended says by itself."""
    if failed is None:
        return WorkerEnding("unknown", Verdict.UNKNOWN, Scope.UNKNOWN, 0.0, "No line reports a failure")
    if failed.hung:
        return WorkerEnding("hang", Verdict.UNKNOWN, Scope.UNKNOWN, 0.3, f"It made no progress ({failed.cause})")
    if failed.rank is None:
        sentence = f"Node {failed.node} was lost ({failed.cause})"
        return WorkerEnding(
            "node_lost", Verdict.RESTART, Scope.NODE, 0.8, sentence, "Ask Slurm and the node's console why."
        )
    number = signal_of(failed)
    if cannot_run(failed.exit_code, failed.signal, failed.error):
        sentence = f"It could not start ({failed.error})"
        hint = next(text for begin, text in _NEVER_RAN.items() if (failed.error or "").startswith(begin))
        return WorkerEnding("usage_error", Verdict.STOP, Scope.USER_CODE, 0.8, sentence, hint)
    if number is None:
        sentence = f"It ended with exit code {failed.exit_code}, and no line says why"
        if failed.exit_code is None and failed.error is not None:
            sentence = f"It could not start ({failed.error})"
        return WorkerEnding("unknown", Verdict.UNKNOWN, Scope.UNKNOWN, 0.2, sentence)
    fault, hint = _SIGNALS.get(number, ("killed", ""))
    sentence = f"It was ended by {signal_name(number)}, and no line says why"
    return WorkerEnding(fault, Verdict.UNKNOWN, Scope.UNKNOWN, 0.3, sentence, hint)


def is_sudden(failed: Failed) -> bool:
    """Whether the worker was ended by a signal that leaves it no time to print."""
    return failed.rank is not None and signal_of(failed) in _SUDDEN


def contradicts(failed: Failed, fault: str, rank: int | None) -> bool:
    """Whether the ending contradicts a Python error as its cause: SIGKILL ends a process that raises nothing."""
    return is_sudden(failed) and failed.rank == rank and fault not in OUT_OF_MEMORY_FAULTS


# A STOP with a lower confidence becomes UNKNOWN.
STOPS_FROM = 0.6

# How long loading and the first steps take.
START_S = 600.0

# A fault of hardware, network or scheduler this near to a cause in the user's code is a rival to it.
RIVAL_S = 120.0

# Rules for what a GPU with a silent error causes, too. Others come after many steps, or after a second look.
_MAY_BE_A_GPU = ("nan_loss.check", "nan_loss.message", "nan_loss.anomaly", "nan_loss.megatron_grad", "jax_nan.debug")

OF_THE_CLUSTER = (Scope.NODE, Scope.NETWORK, Scope.SCHEDULER)


class WeighedVerdict(msgspec.Struct, frozen=True):
    """A confidence from 0 to 1, and a verdict that it allows. `reasons`: why it is not the rule's own verdict."""

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
    shared: Spread = Spread(),  # noqa: B008 -- frozen
) -> WeighedVerdict:
    """`others`: all that was found beside the cause. `lasted_s`: how long the cycle went well, if known. `nodes`: how
    many the job has; 0 where that is not known. `shared`: who reports the cause."""
    rule = cause.hit.rule
    same_fault = [each for each in others if each.hit.rule.fault == rule.fault]
    conflicting = any(
        each.hit.rule.role == "cause"
        and each.finality is Finality.ENDED
        and each.hit.rule.fault != rule.fault
        and each.hit.rule.severity >= rule.severity
        for each in others
    )
    parts = (
        0.7 if cause.finality is Finality.ENDED else 0.55,
        0.1 * any(each.rank != cause.rank for each in same_fault),
        0.1 * (failed is not None and failed.rank is not None and failed.rank == cause.rank),
        0.05 * any(each.hit.rule.role == "consequence" for each in others),
        0.1 * bool(again.times),
        -0.1 * conflicting,
        -0.15 * (rule.verdict is Verdict.UNKNOWN),
    )
    confidence = max(0.1, min(0.98, sum(parts)))

    verdict, scope, reasons = rule.verdict, rule.scope, list[str]()
    # Widespread: several nodes report it, or several ranks of the only node.
    # Each of the following rules may overrule the ones before it.
    same = [cause, *same_fault]
    seen = {each.node for each in (cause, *others)} - {None}
    on_nodes = len({each.node for each in same} - {None})
    on_ranks = len({each.rank for each in same} - {None})
    if rule.widespread and (on_nodes > 1 or (max(nodes, len(seen)) <= 1 and on_ranks > 1)):
        verdict, scope = Verdict.STOP, Scope.USER_CODE
        reasons.append("more than one node or rank reports it")
    if shared.only_node is not None and verdict is Verdict.STOP and not again.other_nodes:
        verdict, scope = Verdict.RESTART, Scope.NODE
        reasons.append(f"only {shared.only_node} reports it, and ranks of other nodes came further")
    if shared.of_the_program:
        verdict, scope = Verdict.STOP, Scope.USER_CODE
        reasons.append("every rank of several nodes raises it, before the first step")
    if shared.alone and verdict is Verdict.STOP and rule.name in _MAY_BE_A_GPU and not again.times:
        verdict, confidence = Verdict.UNKNOWN, min(confidence, 0.5)
        reasons.append("one rank alone reports it, for the first time: it may be its GPU")
    if verdict is Verdict.STOP and (doubt := _doubt(cause, others, failed, confidence)):
        verdict, confidence = Verdict.UNKNOWN, min(confidence, 0.5)
        reasons.append(doubt)
    elif verdict is Verdict.UNKNOWN and again.times:
        verdict, scope, reason = _repeated(scope, again)
        reasons.append(reason)
    elif (
        # A job that passes its own memory limit at its start was given too little; later it may be a leak. One that
        # survived it, say because a framework ran the task again, has enough.
        rule.verdict is Verdict.UNKNOWN
        and cause.finality is Finality.ENDED
        and rule.fault in OUT_OF_MEMORY_FAULTS
        and rule.scope is Scope.USER_CODE
        and lasted_s is not None
        and lasted_s <= START_S
    ):
        # The time since the start decides what the rule leaves open.
        verdict, confidence = Verdict.STOP, max(confidence, STOPS_FROM)
        reasons.append(f"that was {lasted_s:.0f} s after the start, and will be so again")
    return WeighedVerdict(round(confidence, 2), verdict, scope, tuple(reasons))


def _doubt(cause: Finding, others: Sequence[Finding], failed: Failed | None, confidence: float) -> str | None:
    """Why STOP cannot be the verdict; None: nothing contradicts it."""
    if confidence < STOPS_FROM:
        return "the evidence for a STOP is weak"
    if failed is not None and (number := signal_of(failed)) and contradicts(failed, cause.hit.rule.fault, cause.rank):
        return f"the worker was ended by {signal_name(number)}, which this error does not explain"
    rule = cause.hit.rule
    if rule.scope in OF_THE_CLUSTER and not rule.widespread:
        return None
    for other in others:
        rival = other.hit.rule
        if (
            rival.role == "cause"
            and rival.scope in OF_THE_CLUSTER
            and rival != rule
            and rival.verdict is Verdict.RESTART
            and other.finality is not Finality.SURVIVED
            and (other.t is None or cause.t is None or abs(other.t - cause.t) <= RIVAL_S)
        ):
            return f"at that time there was also {rival.fault}"
    return None


def again_ended(end: WorkerEnding, again: Repeat) -> WorkerEnding:
    """An ending with what the cycles before say of it, for a crash of which only the signal is known."""
    if end.fault not in CRASHES or not (again.same_node or again.other_nodes):
        return end
    verdict, scope, reason = _repeated(end.scope, again)
    return replace(end, verdict=verdict, scope=scope, confidence=0.6, sentence=f"{end.sentence}; {reason}")


def _repeated(scope: Scope, again: Repeat) -> tuple[Verdict, Scope, str]:
    """What a failure means that its rule leaves UNKNOWN, and that has happened before in the same way."""
    times = "once" if again.times == 1 else f"{again.times} times"
    if again.same_node:
        # Without the node the next cycle shows whether the node or the program was the cause.
        return Verdict.RESTART, Scope.NODE, f"the same happened {times} before, always on this node"
    if again.other_nodes or scope is Scope.USER_CODE:
        where = ", on another node" if again.other_nodes else ""
        return Verdict.STOP, Scope.USER_CODE, f"the same happened {times} before{where}"
    return Verdict.UNKNOWN, scope, f"the same happened {times} before"
