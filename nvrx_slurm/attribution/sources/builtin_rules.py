"""The source `lib`: the built-in rules, in a process of their own, which `python -m` of this module is.

A user's rule may take for ever on one line, and hold Python's lock meanwhile; logs may be gigabytes. Neither may
delay the other sources. On the pipes: the settings in the first line, then one inquiry a line, and a line for each
result.
"""

from __future__ import annotations

from nvrx_slurm.util import garbage

if __name__ == "__main__":
    garbage.pause()

import asyncio
import contextlib
import itertools
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from nvrx_slurm.attribution.sources.base import look_twice
from nvrx_slurm.errors import MalformedRecord, NvrxError, SourceError
from nvrx_slurm.jobspec.model import LlmSpec
from nvrx_slurm.journal.verdicts import AgentFindings, Attribution, Inquiry, Verdict, Wire
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.log import set_up
from nvrx_slurm.util.processes import dies_with_parent, send_signal
from nvrx_slurm.util.threads import in_thread

# The analysis ends so long before its time is up, and returns what it knows by then; then it is killed.
SPARE_S = 0.5

# Of the decision's time: the rest is for the answer's way.
DECIDE_SHARE = 0.95

# So much time is there for an answer that comes too late anyway: it is recorded.
LEAST_DECIDE_S = 1.0

# Findings that wait for the process to start.
MOST_UNSENT = 2048

DIED = "the process that analyses has died; the next failure starts another"
LINE_BYTES = 16 << 20
COMMAND = (sys.executable, "-P", "-m", "nvrx_slurm.attribution.sources.builtin_rules")


class RulesSettings(Wire, frozen=True, kw_only=True):
    """The first line."""

    rules: tuple[str, ...] = ()
    llm: LlmSpec | None = None


class RulesRequest(Wire, frozen=True, kw_only=True, tag="ask"):
    """A line after it. `whole`: nothing more is written to the logs. `decide_s`: after this time an answer about logs
    that agents read would be too late."""

    number: int
    inquiry: Inquiry
    timeout_s: float
    whole: bool = False
    decide_s: float = math.inf


class RulesFindings(Wire, frozen=True, kw_only=True, tag="found"):
    """Another one: what an agent has found. It gets no answer."""

    found: AgentFindings


class RulesResult(Wire, frozen=True, kw_only=True):
    """A line that comes back; without an attribution `problem` says why. `incomplete`: agents have yet to send what
    they found."""

    number: int
    attribution: Attribution | None = None
    problem: str = ""
    incomplete: bool = False


class BuiltinRulesSource:
    """Analyses the logs where it runs. It waits `settle_s` for them to be whole, where a first look says little."""

    name = "lib"

    def __init__(
        self,
        *,
        rules: Sequence[str],
        llm: LlmSpec | None,
        settle_s: float,
        clock: Clock,
        decide_s: float = math.inf,
    ) -> None:
        """`decide_s`: how long the decision waits for an answer."""
        self._settings = RulesSettings(rules=tuple(rules), llm=llm)
        self._settle_s, self._decide_s, self._clock = settle_s, decide_s, clock
        self._unsent: deque[AgentFindings] = deque(maxlen=MOST_UNSENT)
        self._process: RulesProcess | None = None
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        await self._started()

    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution:
        """Look at once; again when the logs are whole. The answer's problem names rule files that cannot be used.
        Raises SourceError: there is nothing to read, or the process has died."""
        began = self._clock.monotonic()
        deadline = began + timeout_s - SPARE_S
        decide_at = min(deadline, began + self._decide_s * DECIDE_SHARE)
        is_incomplete = False

        async def look(whole: bool) -> Attribution:
            nonlocal is_incomplete
            process = await self._started()
            now = self._clock.monotonic()
            found = await process.analyze(
                inquiry, max(0.0, deadline - now), whole=whole, decide_s=max(LEAST_DECIDE_S, decide_at - now)
            )
            is_incomplete = found.incomplete
            if found.attribution is not None:
                return found.attribution
            if whole:
                raise SourceError(found.problem)
            return Attribution(source=self.name, verdict=Verdict.UNKNOWN, problem=found.problem)

        answer = await look_twice(look, inquiry, settled=settled, settle_s=min(self._settle_s, timeout_s))
        # The workers of some node do not end: the failure is judged by what there is.
        return await look(True) if is_incomplete else answer

    def found(self, findings: AgentFindings) -> None:
        """What an agent has found in the logs of its ranks: the process gets it, now or once it has started."""
        if self._process is None or self._process.is_over:
            self._unsent.append(findings)
        else:
            self._process.found(findings)

    async def close(self) -> None:
        if self._process is not None:
            await self._process.end()

    async def _started(self) -> RulesProcess:
        async with self._starting:
            if self._process is None or self._process.is_over:
                self._process = await RulesProcess.start(self._settings)
                while self._unsent:
                    self._process.found(self._unsent.popleft())
            return self._process


class RulesProcess:
    """One process that analyses, many inquiries at a time. It dies with this one."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[RulesResult]] = {}
        self._reading = asyncio.create_task(self._read_results())
        self.is_over = False

    @classmethod
    async def start(cls, settings: RulesSettings) -> RulesProcess:
        """Start one. Raises SourceError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES, preexec_fn=dies_with_parent(signal.SIGKILL)
            )
        except OSError as error:
            raise SourceError(f"the analysis cannot be started: {error}") from None
        started = cls(process)
        started._write(settings)
        return started

    async def analyze(
        self, inquiry: Inquiry, timeout_s: float, *, whole: bool = True, decide_s: float = math.inf
    ) -> RulesResult:
        """What it finds. Raises SourceError where it dies. Where this is cancelled the process is killed: it has not
        kept to its time."""
        if self.is_over:
            raise SourceError(DIED)
        number = next(self._numbers)
        found: asyncio.Future[RulesResult] = asyncio.get_running_loop().create_future()
        self._open[number] = found
        try:
            self._write(
                RulesRequest(
                    number=number,
                    inquiry=inquiry,
                    timeout_s=timeout_s,
                    whole=whole,
                    decide_s=min(decide_s, timeout_s),
                )
            )
            return await found
        except asyncio.CancelledError:
            self._kill()
            raise
        finally:
            del self._open[number]

    def found(self, findings: AgentFindings) -> None:
        """Pass on what an agent has found."""
        self._write(RulesFindings(found=findings))

    async def end(self) -> None:
        """Kill it: it holds nothing of value."""
        self._kill()
        await self._reading

    def _write(self, line: RulesSettings | RulesRequest | RulesFindings) -> None:
        # Without `drain`, which would wait for as long as the process hangs. It is killed then, and the buffer goes.
        self._stdin.write(msgspec.json.encode(line) + b"\n")

    def _kill(self) -> None:
        self.is_over = True
        send_signal(self._process, signal.SIGKILL)

    async def _read_results(self) -> None:
        with contextlib.suppress(ValueError, MalformedRecord):  # a line that is too long or not valid
            while line := await self._stdout.readline():
                found = decode_json(RulesResult, line, "a line of the analysis")
                if (waiting := self._open.get(found.number)) is not None and not waiting.done():
                    waiting.set_result(found)
        self._kill()
        code = await self._process.wait()
        # The process answers none of the open inquiries any more: each gets the error at once.
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(SourceError(f"{DIED} ({code})"))


async def serve() -> None:
    """The process: answer each line as it is done, until the input ends."""
    # Only in this process: the analyzer loads vectorscan, and the source's own process never needs it.
    from nvrx_slurm.attribution.analyze.analyzer import Analyzer
    from nvrx_slurm.attribution.analyze.gathering import IncompleteFindings, ReceivedFindings
    from nvrx_slurm.attribution.rules.catalogue import usable_files
    from nvrx_slurm.util.tasks import standard_streams

    reader, writer = await standard_streams(LINE_BYTES)
    settings = msgspec.json.decode(await reader.readline(), type=RulesSettings)
    received = ReceivedFindings()
    # The job was submitted with good files. One that has broken since must not cost it the built-in rules.
    rules, wrong = usable_files([Path(rule) for rule in settings.rules])
    analyzer = Analyzer(rules=rules, llm=settings.llm, received=received)
    in_thread(analyzer.warm_up, "compile rules")
    running: set[asyncio.Task[None]] = set()
    lines = msgspec.json.Decoder(RulesRequest | RulesFindings)

    async def answer(request: RulesRequest) -> None:
        try:
            attribution = await analyzer.analyze(
                request.inquiry, timeout_s=request.timeout_s, whole=request.whole, decide_s=request.decide_s
            )
        except NvrxError as error:
            is_incomplete = isinstance(error, IncompleteFindings)
            result = RulesResult(number=request.number, problem=str(error), incomplete=is_incomplete)
        else:
            if wrong:
                problems = filter(None, (attribution.problem, "rules of yours were not used", *map(str, wrong)))
                attribution = replace(attribution, problem="; ".join(problems))
            result = RulesResult(number=request.number, attribution=attribution)
        writer.write(msgspec.json.encode(result) + b"\n")
        await writer.drain()

    while line := await reader.readline():
        message = lines.decode(line)
        if isinstance(message, RulesFindings):
            received.put(message.found)
            continue
        task = asyncio.create_task(answer(message))
        running.add(task)
        task.add_done_callback(running.discard)
    os._exit(0)  # the reader of the results has gone


if __name__ == "__main__":
    garbage.resume()
    set_up("attribution")
    asyncio.run(serve())
