"""A worker's steps, written into memory that it shares with its agent."""

from __future__ import annotations

# This runs in the user's process, which `nvrx_slurm.jobspec.env` must not be loaded into: hence its own `os.environ`.
import os
from operator import index
from time import monotonic_ns

from nvrx_slurm.workload.layout import BEATS, BEATS_BEFORE, GAP, SIGN, STEP, map_slot

_words: memoryview | None = None  # from the first beat on
_begun = False
_mapped: memoryview | None = None

# When the main thread's open sections began. What happens inside of one says nothing about how long a step takes.
in_main_section: set[int] = set()


def beat(*, step: int) -> None:
    """Report to the agent that this worker has just done `step` (0 or more); call it once a step.

    Costs a fraction of a microsecond: a few stores into memory shared with the agent, no system call, no lock, no
    thread. The first call of a process also sends the agent one datagram, so that it need not poll for the first
    step. A forked child may call it too, and then reports in its parent's name. Without an agent, and for all that is
    wrong with the channel to it, this does nothing.

    Raises TypeError, with or without an agent, if `step` is not an integer; ValueError if it does not fit into 64
    bits.
    """
    number = index(step)
    words = _words
    if words is not None:
        now = monotonic_ns()
        try:
            words[STEP] = number
        except ValueError:
            raise ValueError(f"beat: step must be below 2**63, not {number}") from None
        if now - words[SIGN] > words[GAP]:
            _longest_yet(words, now)
        words[SIGN] = now
        words[BEATS] += 1  # last: a reader that sees the count grow finds the new step
    elif not _begun:
        _begin(number)


def silence_ends(words: memoryview, now: int) -> None:
    """Keep the time since the last sign if it is the longest yet; the agent looks too seldom to see it."""
    if now - words[SIGN] > words[GAP]:
        _longest_yet(words, now)


def slot_path() -> str | None:
    """Where the agent put this worker's slot; None without an agent."""
    return os.environ.get("NVRX_BEAT_FILE") or None


def shared_words() -> memoryview | None:
    """The slot, mapped once in the life of a process; None if there is none, or it is not to be had."""
    global _mapped
    if _mapped is None and (path := slot_path()):
        try:
            _mapped = map_slot(path)
        except (OSError, ValueError, ImportError):  # Debian's python3-minimal has no mmap
            return None
    return _mapped


def _longest_yet(words: memoryview, now: int) -> None:
    if words[BEATS] > words[BEATS_BEFORE] and not in_main_section:  # else it is the start-up, not a step
        words[GAP] = now - words[SIGN]


def _begin(step: int) -> None:
    """The first beat: finds the slot, stores the step in it, and then reports it to the agent."""
    global _begun, _words
    _begun = True
    _words = shared_words()
    if _words is not None:
        beat(step=step)
        _announce(step)


def _announce(step: int) -> None:
    """One datagram: `<rank> <step>`."""
    if path := slot_path():
        from nvrx_slurm.workload.channel import tell_agent  # here: a process without an agent never needs it

        rank = path.rpartition(".")[2]  # RANK is another one where a wrapper has given out ranks of its own
        tell_agent(f"{rank} {step}".encode())


def _forget_sections() -> None:
    """In a forked child, which closes none of its parent's sections, and whose gaps say nothing about a step."""
    in_main_section.add(0)


os.register_at_fork(after_in_child=_forget_sections)
