"""What a rank did after a line: whether that line ended it, or was survived.

An error that was caught and retried reads the same as one that was not. What tells them apart is what follows: of a
process that is ending, stacks and complaints; of one that lives, progress.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum


class Nature(Enum):
    """What kind of line it is."""

    PROGRESS = "progress"  # a step of training was made
    CRASH = "crash"  # stacks, complaints, clearing away: what a process prints while it ends
    CALM = "calm"  # anything else


class Finality(IntEnum):
    """How surely a line ended its rank; lower is surer."""

    ENDED = 0
    LIKELY = 1
    SURVIVED = 2


@dataclass(frozen=True, slots=True)
class TailLine:
    """One of the last lines of a file. `offset`: of its first byte, in the file's own (unpacked) bytes. `rank`: as
    its label or the file's name says."""

    offset: int
    text: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Aftermath:
    """How many lines of each kind the same rank printed afterwards, as far as the file's tail goes."""

    progress: int = 0
    calm: int = 0


_PROGRESS = re.compile(
    r"""\b(?:iter(?:ation)?|(?:global[_ ])?step|batch|epoch)s?\b\s*[:=#]?\s*\[?\s*\d+  # iteration 12/ 100, step=12
      | \bit\b\s*\d+\s*/\s*\d+
      | ^\W*\d+%\|.{0,80}\d+/\d+                                                       # tqdm's bar
      | \bit/s\b|\bs/it\b|\bloss\b\s*[:=]?\s*-?\d+\.\d                                     # loss: 2.31
      | \b(?:samples|tokens)(?:/s|\s+per\s+sec)""",
    re.VERBOSE | re.IGNORECASE,
)
_CRASH = re.compile(
    r"""^\s*$ | ^\s+File\ " | ^\s+(?:\^|~)+ | ^Traceback\b | ^\s*frame\ \#\d | ^\s*at\ \S+\( | ^\s{4,}\S
      | ^(?:Fatal\ Python\ error|Current\ thread|Thread\ 0x|Extension\ modules)
      | ^\S*(?:Error|Exception|Exit|Interrupt|Warning)\b | ^\*\*\*|^={8,}|^-{8,}|^\#\d+\s
      | \b(?:ERROR|CRITICAL|FATAL|SIG[A-Z]{3,5}|abort(?:ed|ing)?|terminat(?:e|ed|ing)|destroy(?:ed|ing)?)\b
      | \b(?:Signal|signal)\ \d|\b(?:core\ dumped|Killed|exit(?:ing|ed|code)?|shut(?:ting)?\ ?down)\b
      | ^\[?(?:rank|default)?\d*\]?:?\s*\[?[EF]\d{4}\ | ^(?:srun|slurmstepd|wandb):
      | \bNCCL\ (?:INFO|WARN)\b | ^(?:During\ handling|The\ above\ exception)\b | \btime\s+:\s | \bhost\s+:\s
    """,
    re.VERBOSE,
)

TOLD_BESIDE = frozenset({"thread", "process"})
"""Asides that ended something, if not the rank: worth telling."""

_NEVER_ENDED = frozenset({"ignored", "task", "thread"})
_MAY_HAVE_GONE_ON = frozenset({"process", "logged", "warned"})

_MOST_CALM_AT_AN_END = 6
_MOST_CALM_BEFORE_AN_END = 60


def nature(text: str) -> Nature:
    """What kind of line this is, without its label."""
    if _CRASH.search(text):
        return Nature.CRASH
    return Nature.PROGRESS if _PROGRESS.search(text) else Nature.CALM


def aftermath(offset: int, rank: int | None, tail: Sequence[TailLine]) -> Aftermath:
    """What `rank` printed after the line at `offset`; of every rank, where none is known."""
    after = [line for line in tail if line.offset > offset and (rank is None or line.rank in (rank, None))]
    kinds = [nature(line.text) for line in after]
    return Aftermath(kinds.count(Nature.PROGRESS), kinds.count(Nature.CALM))


def may_have_gone_on(aside: str | None) -> bool:
    """Whether a traceback is of those that a rank lives on with, unless it is seen to have ended."""
    return aside in _MAY_HAVE_GONE_ON


def of_another(aside: str | None) -> bool:
    """Whether a traceback is none that the rank's own end prints."""
    return aside in _NEVER_ENDED or aside == "process"


def finality(after: Aftermath, *, shared: bool, aside: str | None = None) -> Finality:
    """Judge by what followed. `shared`: other ranks, which go on a little, print into the same lines. `aside`: what
    stands above the traceback."""
    most_progress = 3 if shared else 0 if may_have_gone_on(aside) else 1
    if aside in _NEVER_ENDED or after.progress > most_progress:
        return Finality.SURVIVED
    if aside == "process" and after.calm <= _MOST_CALM_BEFORE_AN_END:
        return Finality.LIKELY
    if after.calm <= _MOST_CALM_AT_AN_END:
        return Finality.ENDED
    return Finality.LIKELY if after.calm <= _MOST_CALM_BEFORE_AN_END else Finality.SURVIVED
