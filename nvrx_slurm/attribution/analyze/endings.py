"""What the way in which a worker ended says by itself: exit codes and signals, a hang, a lost node."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from nvrx_slurm.journal.verdicts import Failed, Scope, Verdict

OUT_OF_MEMORY_FAULTS = frozenset({"host_oom"})


@dataclass(frozen=True, slots=True)
class Ending:
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


def ending(failed: Failed | None) -> Ending:
    """What is to be said when nothing else is known."""
    if failed is None:
        return Ending("unknown", Verdict.UNKNOWN, Scope.UNKNOWN, 0.0, "No line tells of a failure")
    if failed.hung:
        return Ending("hang", Verdict.UNKNOWN, Scope.UNKNOWN, 0.3, f"It made no progress ({failed.cause})")
    if failed.rank is None:
        sentence = f"Node {failed.node} was lost ({failed.cause})"
        return Ending(
            "node_lost", Verdict.RESTART, Scope.NODE, 0.8, sentence, "Ask Slurm and the node's console why."
        )
    number = signal_of(failed)
    if number is None:
        sentence = f"It ended with exit code {failed.exit_code}, and no line says why"
        return Ending("unknown", Verdict.UNKNOWN, Scope.UNKNOWN, 0.2, sentence)
    fault, hint = _SIGNALS.get(number, ("killed", ""))
    sentence = f"It was ended by {signal_name(number)}, and no line says why"
    return Ending(fault, Verdict.UNKNOWN, Scope.UNKNOWN, 0.3, sentence, hint)


def is_sudden(failed: Failed) -> bool:
    """Whether a signal ended the worker that leaves it no time for words."""
    return failed.rank is not None and signal_of(failed) in _SUDDEN


def contradicts(failed: Failed, fault: str, rank: int | None) -> bool:
    """Whether the ending speaks against a Python error as its cause: SIGKILL ends a process that raises nothing."""
    if failed.rank is None or failed.rank != rank or fault in OUT_OF_MEMORY_FAULTS:
        return False
    return signal_of(failed) in _SUDDEN
