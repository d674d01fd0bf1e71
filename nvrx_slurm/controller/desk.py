"""The attribution desk: one process beside the controller that asks the sources, so that reading gigabytes of logs
never holds up a decision.

It is started when first needed, dies with the controller, and is started again when it dies; what it had not
answered by then it is asked again. It is talked to in lines of JSON: `{"ask": …}`, `{"settled": …}`, `{"judged": …}`
one way, `{"answer": …}` the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nvrx_slurm.log import get_logger
from nvrx_slurm.processes import dies_with_parent
from nvrx_slurm.verdicts import Attribution, FailureKey, Inquiry, Wire

log = get_logger("controller")

MOST_STARTS = 5
"""A desk that dies so often is left alone: the failures that it was asked about have no verdict."""

LINE_BYTES = 4 << 20
Answered = Callable[[FailureKey, Attribution], None]


class Judged(Wire, frozen=True, kw_only=True):
    """What came of a failure, for those who are told about it."""

    key: FailureKey
    verdict: str
    acted: bool
    why: str
    action: str
    nodes_blamed: tuple[str, ...] = ()
    dry_run: bool = False


class Desk(Protocol):
    """Asks the sources. None of this waits, and nothing that goes wrong there is an error here."""

    def open(self) -> None:
        """Get ready: a question is soon to come."""
        ...

    def ask(self, inquiry: Inquiry, *, settled: bool) -> None:
        """Ask every source, once for a key. `settled`: all workers of the cycle are gone, so its logs are whole."""
        ...

    def settled(self, key: FailureKey) -> None: ...
    def judged(self, judged: Judged) -> None: ...

    async def close(self, within_s: float) -> None:
        """Let it finish what follows from its answers, up to `within_s`; then it is gone."""
        ...


class _Answer(msgspec.Struct):
    key: FailureKey
    attribution: Attribution


class _Line(msgspec.Struct):
    answer: _Answer


class DeskProcess:
    """`python -m nvrx_slurm.attribution`, in the job's environment."""

    def __init__(self, log_path: Path, answered: Answered) -> None:
        self._log_path, self._answered = log_path, answered
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._starts = 0
        self._open: dict[FailureKey, Inquiry] = {}
        self._settled: set[FailureKey] = set()
        self._unsent: list[bytes] = []
        self._closing = False

    def open(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    def ask(self, inquiry: Inquiry, *, settled: bool) -> None:
        self._open[inquiry.key] = inquiry
        if settled:
            self._settled.add(inquiry.key)
        self._say({"ask": inquiry, "settled": settled})

    def settled(self, key: FailureKey) -> None:
        if key in self._open:
            self._settled.add(key)
            self._say({"settled": key})

    def judged(self, judged: Judged) -> None:
        self._open.pop(judged.key, None)
        self._settled.discard(judged.key)
        self._say({"judged": judged})

    async def close(self, within_s: float) -> None:
        self._closing = True
        if self._task is None:
            return
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait([self._task], timeout=within_s)
        self._task.cancel()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _say(self, message: dict[str, Any]) -> None:
        self.open()
        line = msgspec.json.encode(message) + b"\n"
        if self._process is None or self._process.stdin is None or self._process.stdin.is_closing():
            self._unsent.append(line)
        else:
            self._process.stdin.write(line)

    # ---- the process

    async def _keep(self) -> None:
        while not self._closing and self._starts < MOST_STARTS:
            self._starts += 1
            try:
                process = await self._start()
            except OSError as error:
                log.error("the attribution desk cannot be started: %s", error)
                return
            await self._hear(process)
            code = await process.wait()
            self._process = None
            if not self._closing:
                log.warning("the attribution desk ended (%s); see %s", code, self._log_path)
                self._unsent = [
                    msgspec.json.encode({"ask": inquiry, "settled": key in self._settled}) + b"\n"
                    for key, inquiry in self._open.items()
                ]

    async def _start(self) -> Process:
        with self._log_path.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "nvrx_slurm.attribution"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                limit=LINE_BYTES,
                start_new_session=True,
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )
        assert process.stdin is not None
        process.stdin.writelines(self._unsent)
        self._unsent = []
        self._process = process
        return process

    async def _hear(self, process: Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than any answer is
                log.error("the attribution desk has sent a line of more than %d bytes; it is ended", LINE_BYTES)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                return
            if not line:
                return
            try:
                answer = msgspec.json.decode(line, type=_Line).answer
            except msgspec.DecodeError as error:
                log.error("the attribution desk has sent what is no answer (%s): %.200r", error, line)
                continue
            self._answered(answer.key, answer.attribution)
