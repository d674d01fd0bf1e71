"""The source `lib`: the rules, in a process of their own.

A rule of the user's own may take for ever on one line, and hold Python's lock while it does; logs may be gigabytes.
Neither may keep the other sources from being heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

import msgspec

from nvrx_slurm.attribution.sources.patience import look_twice
from nvrx_slurm.errors import MalformedRecord, SourceError
from nvrx_slurm.jobspec.model import LlmSpec
from nvrx_slurm.journal.verdicts import Attribution, Inquiry, Verdict, Wire
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.processes import dies_with_parent

SPARE_S = 0.5
"""The analysis ends so long before its time is up, and tells what it knows by then; who has not is ended."""

DIED = "the process that analyses has died; the next failure starts another"
LINE_BYTES = 16 << 20
COMMAND = (sys.executable, "-P", "-m", "nvrx_slurm.attribution.sources.lib_process")


class Settings(Wire, frozen=True, kw_only=True):
    """The first line."""

    rules: tuple[str, ...] = ()
    llm: LlmSpec | None = None


class Question(Wire, frozen=True, kw_only=True):
    """A line after it."""

    number: int
    inquiry: Inquiry
    timeout_s: float


class Found(Wire, frozen=True, kw_only=True):
    """A line that comes back; without an attribution `problem` says why."""

    number: int
    attribution: Attribution | None = None
    problem: str = ""


class LibSource:
    """Analyses the logs where it runs. It waits `patience_s` for them to be whole, where a first look says little."""

    name = "lib"

    def __init__(self, *, rules: Sequence[str], llm: LlmSpec | None, patience_s: float, clock: Clock) -> None:
        self._settings = Settings(rules=tuple(rules), llm=llm)
        self._patience_s, self._clock = patience_s, clock
        self._process: LibProcess | None = None
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        await self._started()

    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution:
        """Look at once; again when the logs are whole. Raises SourceError: a rule file is wrong, there is nothing to
        read, or the process has died."""
        deadline = self._clock.monotonic() + timeout_s - SPARE_S

        async def look(whole: bool) -> Attribution:
            process = await self._started()
            found = await process.analyze(inquiry, max(0.0, deadline - self._clock.monotonic()))
            if found.attribution is not None:
                return found.attribution
            if whole:
                raise SourceError(found.problem)
            return Attribution(source=self.name, verdict=Verdict.UNKNOWN, problem=found.problem)

        return await look_twice(look, inquiry, settled=settled, patience_s=min(self._patience_s, timeout_s))

    async def close(self) -> None:
        if self._process is not None:
            await self._process.end()

    async def _started(self) -> LibProcess:
        async with self._starting:
            if self._process is None or self._process.is_over:
                self._process = await LibProcess.start(self._settings)
            return self._process


class LibProcess:
    """One process that analyses, many inquiries at a time. It dies with this one."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Found]] = {}
        self._hearing = asyncio.create_task(self._hear())
        self.is_over = False

    @classmethod
    async def start(cls, settings: Settings) -> LibProcess:
        """Start one. Raises SourceError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES, preexec_fn=dies_with_parent(signal.SIGKILL)
            )
        except OSError as error:
            raise SourceError(f"the analysis cannot be started: {error}") from None
        started = cls(process)
        started._say(settings)
        return started

    async def analyze(self, inquiry: Inquiry, timeout_s: float) -> Found:
        """What it finds. Raises SourceError where it dies. Called off, it is killed: it has not kept to its time."""
        if self.is_over:
            raise SourceError(DIED)
        number = next(self._numbers)
        found: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._open[number] = found
        try:
            self._say(Question(number=number, inquiry=inquiry, timeout_s=timeout_s))
            return await found
        except asyncio.CancelledError:
            self._kill()
            raise
        finally:
            del self._open[number]

    async def end(self) -> None:
        """Kill it: it holds nothing that anybody needs."""
        self._kill()
        await self._hearing

    def _say(self, line: Settings | Question) -> None:
        self._stdin.write(msgspec.json.encode(line) + b"\n")

    def _kill(self) -> None:
        self.is_over = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # Process.kill would reap it, and take its exit code along

    async def _hear(self) -> None:
        with contextlib.suppress(ValueError, MalformedRecord):  # a line without end: it is not what we know
            while line := await self._stdout.readline():
                found = decode_json(Found, line, "a line of the analysis")
                if (waiting := self._open.get(found.number)) is not None and not waiting.done():
                    waiting.set_result(found)
        self._kill()
        code = await self._process.wait()
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(SourceError(f"{DIED} ({code})"))
