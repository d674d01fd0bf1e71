"""How far the workers have come: the step that each reports, or what their files say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nvrx_slurm.errors import UntrustedRecord
from nvrx_slurm.jobspec.model import ProgressSpec
from nvrx_slurm.journal.restarts import LONGEST_BYTES, InProcessRestart, decode
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import awaitable_thread
from nvrx_slurm.workload.slot import Reading, Slot

log = get_logger("agent")

# How long reading files may take, on a file system that is slow to answer.
READ_S = 1.0

TAIL_BYTES = 256 << 10
ERROR_FILE_BYTES, LONGEST_ERROR = 1 << 20, 400
LONGEST_LINE_BYTES = 4 << 10
LONGEST_NUMBER = 18
_LINE_END = re.compile(rb"[\r\n]+")


class ProgressBoard:
    """The slots of this node's workers, by rank; and the socket on which workers report what must be known at once:
    `<rank> <step>`, the first step (`workload.beat`); `!<rank> <pid>@<time> <error>`, that an uncaught exception is
    about to end the worker (`stacks/hook`; the time on the monotonic clock, in seconds); or `{…}`, that its group has
    restarted in process (`inprocess/timeline.py`).

    `folder` is new and this agent's alone; `close` removes it.
    """

    def __init__(
        self,
        folder: Path,
        on_first_step: Callable[[int, int], None],
        on_failing: Callable[[int, int, str, float | None], None],
        on_restart: Callable[[InProcessRestart], None],
    ) -> None:
        self._folder = folder
        self._on_first_step, self._on_failing, self._on_restart = on_first_step, on_failing, on_restart
        self._slots: dict[int, Slot] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def open(self) -> None:
        """Listen for first steps."""
        self._socket.setblocking(False)
        self._socket.bind(str(self._folder / "s"))
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def prepare(self, rank: int, cycle: int) -> dict[str, str]:
        """A fresh slot for a worker; returns what its environment needs."""
        path = self._folder / f"{cycle}.{rank}"
        self._slots[rank] = Slot.create(path)
        self._error_file(rank).unlink(missing_ok=True)
        return {
            "NVRX_BEAT_FILE": str(path),
            "NVRX_BEAT_SOCKET": str(self._folder / "s"),
            "TORCHELASTIC_ERROR_FILE": str(self._error_file(rank)),
        }

    def clear(self) -> None:
        """The cycle is over: forget its slots."""
        self._slots.clear()
        for path in self._folder.glob("*.*"):
            if path.is_dir():  # a worker was killed while it copied the package (`container.py`)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def steps(self) -> dict[int, int]:
        """Rank → last step, of those workers that have reported one."""
        return {rank: reading.step for rank, reading in self.readings().items() if reading.step is not None}

    def readings(self) -> dict[int, Reading]:
        """Rank → what its worker has reported. Judge the readings by a moment that was taken before this call."""
        return {rank: slot.read() for rank, slot in self._slots.items()}

    def recorded_error(self, rank: int) -> str | None:
        """The exception in this worker's error file, as `<type>: <first line>`; None without one. torch.distributed's
        `@record` writes it there; a torchrun that the worker is copies that of its own first failing worker."""
        try:
            with self._error_file(rank).open("rb") as file:
                message = json.loads(file.read(ERROR_FILE_BYTES))["message"]
        # Any process of the user's may write there.
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        if isinstance(message, dict):  # else a signal's: "Signal 11 (SIGSEGV) received by PID …"
            message = message.get("message")
        lines = str(message or "").strip().splitlines()
        # A path that is not UTF-8 stands there with surrogates, which no record can hold.
        return lines[0][:LONGEST_ERROR].encode(errors="replace").decode() if lines else None

    def _error_file(self, rank: int) -> Path:
        return self._folder / f"error.{rank}"

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                datagram = self._socket.recv(LONGEST_BYTES)
                # Any process of the user's can write here, in any language: the rest is dropped.
                with contextlib.suppress(ValueError, UntrustedRecord):
                    self._pass_on(datagram)

    def _pass_on(self, datagram: bytes) -> None:
        """Raises ValueError or UntrustedRecord for what is none of the three, or not of a worker of this node."""
        if datagram.startswith(b"!"):
            rank, pid, what = datagram[1:].decode(errors="replace").split(" ", 2)
            pid, _, at = pid.partition("@")
            self._on_failing(self._rank(rank), int(pid), what, float(at) if at else None)
        elif datagram.startswith(b"{"):
            self._on_restart(decode(datagram))
        else:
            rank, step = datagram.decode().split()
            if not 0 <= int(step) < 1 << 63:
                raise ValueError("a step must be from 0 to 2**63 - 1")
            self._on_first_step(self._rank(rank), int(step))

    def _rank(self, text: str) -> int:
        if int(text) not in self._slots:
            raise ValueError(f"rank {text[:20]} is none of this node's")
        return int(text)


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
        """The furthest step in them; `logs`: the cycle's folder. None: there is none, or reading took too long."""
        until_s = self._clock.monotonic() + READ_S
        reading = awaitable_thread(partial(self._read, logs, sorted(ranks), until_s), "step files")
        done, _ = await asyncio.wait([reading], timeout=READ_S)
        if not done:
            log.warning("how far the cycle has come could not be read within %g s", READ_S)
            return None
        return reading.result()

    def _read(self, logs: Path, ranks: list[int], until_s: float) -> int | None:
        found = [step_in(self._file)] if self._file is not None else []
        if self._pattern is not None:
            for path in (logs / f"rank-{rank}.{kind}" for rank in ranks for kind in ("out", "err")):
                for line in reversed(tail(path)):
                    if self._clock.monotonic() > until_s:  # no caller waits any more
                        return None
                    if (step := step_of(self._pattern, line)) is not None:
                        found.append(step)
                        break
        return max((step for step in found if step is not None), default=None)


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
    """The whole lines of a file's last 256 KiB; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            begins = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(begins)
            lines = _LINE_END.split(file.read(TAIL_BYTES))
    except OSError:
        return []
    # A torn line, as the last one of a worker that died while it printed, would give a step that never was.
    return lines[1 if begins else 0 : -1]
