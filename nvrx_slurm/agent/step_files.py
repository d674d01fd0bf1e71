"""How far a cycle has come, where workers do not tell it themselves: by a file that they write, or by their logs."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from nvrx_slurm.jobspec.model import ProgressSpec
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import awaitable_thread

log = get_logger("agent")

READ_S = 1.0
"""How long reading may take, on a file system that is slow to answer."""

TAIL_BYTES = 256 << 10
LONGEST_LINE_BYTES = 4 << 10
LONGEST_NUMBER = 18
_LINE_END = re.compile(rb"[\r\n]+")


class StepFiles:
    """What `progress` names: an iteration file, a pattern for the logs, both or neither."""

    def __init__(self, progress: ProgressSpec, clock: Clock) -> None:
        self._file = Path(progress.iteration_file) if progress.iteration_file else None
        self._pattern = re.compile(progress.log_pattern.encode()) if progress.log_pattern else None
        self._clock = clock

    @property
    def are_named(self) -> bool:
        """Whether there is anything to read."""
        return self._file is not None or self._pattern is not None

    async def last_step(self, logs: Path, ranks: set[int]) -> int | None:
        """The furthest step that they tell; `logs`: the cycle's folder. None: they tell none, or not in time."""
        until_s = self._clock.monotonic() + READ_S
        reading = awaitable_thread(partial(self._read, logs, sorted(ranks), until_s), "step files")
        done, _ = await asyncio.wait([reading], timeout=READ_S)
        if not done:
            log.warning("how far the cycle has come was not to be read within %g s", READ_S)
            return None
        return reading.result()

    def _read(self, logs: Path, ranks: list[int], until_s: float) -> int | None:
        return max(self._steps(logs, ranks, until_s), default=None)

    def _steps(self, logs: Path, ranks: list[int], until_s: float) -> Iterator[int]:
        if self._file is not None and (step := step_in(self._file)) is not None:
            yield step
        if self._pattern is None:
            return
        for path in (logs / f"rank-{rank}.{kind}" for rank in ranks for kind in ("out", "err")):
            for line in reversed(tail(path)):
                if self._clock.monotonic() > until_s:  # nobody waits any more
                    return
                if (step := step_of(self._pattern, line)) is not None:
                    yield step
                    break


def step_in(path: Path) -> int | None:
    """The number that is all of a file's text. None where it is none: Megatron's file may say `release`."""
    try:
        with path.open("rb") as file:
            return number(file.read(64).strip())
    except OSError:
        return None


def step_of(pattern: re.Pattern[bytes], line: bytes) -> int | None:
    """The number in the pattern's group, of its last match in the line."""
    found = None
    for match in pattern.finditer(line[:LONGEST_LINE_BYTES]):
        found = number(match[1] or b"")
    return found


def number(text: bytes) -> int | None:
    """`1200` and `1,200`; None for all that is no step."""
    digits = text.replace(b",", b"")
    return int(digits) if digits.isdigit() and len(digits) <= LONGEST_NUMBER else None


def tail(path: Path) -> list[bytes]:
    """The whole lines of a file's last 256 KiB; none where it cannot be read.

    One that is torn, as the last one is of a worker that died while it printed, would tell a step that never was.
    """
    try:
        with path.open("rb") as file:
            begins = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(begins)
            lines = _LINE_END.split(file.read(TAIL_BYTES))
    except OSError:
        return []
    return lines[1 if begins else 0 : -1]
