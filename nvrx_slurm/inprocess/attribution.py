"""Why an iteration was interrupted, and by which rank."""

from __future__ import annotations

import enum
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

from nvrx_slurm.inprocess.exception import HealthCheckError


class Interruption(enum.Enum):
    """What ended an iteration for a rank."""

    EXCEPTION = "exception"  # the function, or Initialize, raised; of no rank: some had not returned in time
    BASE_EXCEPTION = "base_exception"  # it raised a BaseException that is no Exception: the rank leaves
    SOFT_TIMEOUT = "soft_timeout"  # no progress; the rank may restart
    HARD_TIMEOUT = "hard_timeout"  # no progress until its process was killed
    TERMINATED = "terminated"  # its process died
    UNRESPONSIVE = "unresponsive"  # no heartbeat of rank and monitor: the expired lease has killed both by now
    MONITOR_PROCESS_EXCEPTION = "monitor_process_exception"  # its monitor failed, so its process was killed
    UNHEALTHY = "unhealthy"  # a health check, or Finalize, raised
    DISCARDED = "discarded"  # the rank assignment left it out


# After these the process is gone: the launcher can put another one in its place.
DEATHS = frozenset(
    {
        Interruption.HARD_TIMEOUT,
        Interruption.TERMINATED,
        Interruption.UNRESPONSIVE,
        Interruption.MONITOR_PROCESS_EXCEPTION,
    }
)


@dataclass(frozen=True, slots=True)
class InterruptionRecord:
    """One rank's interruption. `rank` as the function knew it; `text`, `host` and `stack` where they are known."""

    rank: int | None
    interruption: Interruption
    text: str = ""
    host: str = ""
    stack: str = ""


def format_interruption_records(records: Iterable[InterruptionRecord]) -> str:
    """The records as one line: each kind, the ranks that it hit, and the first text among its records."""
    by_kind: dict[Interruption, list[InterruptionRecord]] = {}
    for record in records:
        by_kind.setdefault(record.interruption, []).append(record)
    parts = []
    for kind, group in by_kind.items():
        ranks = ", ".join(str(rank) for rank in sorted({record.rank for record in group if record.rank is not None}))
        words = next((record.text.splitlines()[0] for record in group if record.text), "")
        where = f" on rank{'s' if ',' in ranks else ''} {ranks}" if ranks else ""
        parts.append(f"{kind.value}{where}{f' ({words})' if words else ''}")
    return "; ".join(parts)


TEXT_CHARS = 2000
STACK_CHARS = 4000  # how much of a stack goes into a record: its end


def in_words(error: BaseException) -> str:
    """The exception's type and message, in one line."""
    line = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
    return clean(line if len(line) <= TEXT_CHARS else f"{line[:TEXT_CHARS]} …")


def place_of(error: BaseException) -> str:
    """Where it was raised; of a failed health check, where the check raised. The whole stack is in the record."""
    while isinstance(error, HealthCheckError) and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else "nowhere in Python"


def stack_of(error: BaseException) -> str:
    """The end of its traceback, with its causes."""
    return clean("".join(traceback.format_exception(error))[-STACK_CHARS:])


def clean(text: str) -> str:
    """The text with lone surrogates escaped: JSON cannot carry those, which a path that is not UTF-8 has."""
    return text.encode(errors="backslashreplace").decode()


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of all frames that an error has passed through, and those of the errors that led to
    it: its causes, its contexts, and the members of its groups."""
    seen, left = set[int](), [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        left += filter(None, (each.__cause__, each.__context__))
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
