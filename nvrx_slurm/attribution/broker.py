"""The broker: asks every source once about each failure, and returns the answers to the controller as they come.

    controller ── ask, found, settled, judged ──▶ SourceBroker ── one ask a source ──▶ sources
               ◀──────────── answer ────────────        └──────── judged ────────────▶ notify

One event loop, in a process of its own (`python -m nvrx_slurm.attribution`): the controller goes on even where a
source hangs or crashes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from nvrx_slurm.attribution.sources.guard import GuardedSource
from nvrx_slurm.journal.verdicts import AgentFindings, Attribution, FailureKey, Inquiry, Verdict, VerdictRecord
from nvrx_slurm.util import tasks
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    from nvrx_slurm.attribution.notify import DecidedFailure


log = get_logger("attribution")

# How many failures are remembered, beside those that still wait for an answer.
MOST_KEPT = 64

# With so many tasks under way no further line is read.
MOST_AT_WORK = 4096

# At the end: how long the answers may still take, then writing decisions into the spool, then sending them.
ANSWERS_S = 1.5
SPOOL_S = 0.5
AFTERWARDS_S = 3.0

CLOSED = "the controller went away before the answer came"

Answered = Callable[[FailureKey, Attribution], Awaitable[None]]


class DecisionListener(Protocol):
    """Informs others of a decision. Neither raises."""

    async def decided(self, decided: DecidedFailure) -> None: ...
    async def close(self, timeout_s: float) -> None: ...


@dataclass(slots=True)
class AskedFailure:
    """One failure: what each source says of it, or will."""

    inquiry: Inquiry
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    answers: list[asyncio.Task[Attribution]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return not all(answer.done() for answer in self.answers)


class SourceBroker:
    """`answered` gets one attribution for each source and ask, and may take its time.

    Each source bounds its own answer (`sources.guard`); `timeout_s` is what it is given. `afterwards` is called when
    the first decision comes.
    """

    def __init__(
        self,
        sources: Sequence[GuardedSource],
        afterwards: Callable[[], DecisionListener],
        *,
        timeout_s: float,
        answered: Answered,
    ) -> None:
        self._sources, self._make_afterwards = sources, afterwards
        self._timeout_s, self._answered = timeout_s, answered
        self._afterwards: DecisionListener | None = None
        self._cases: dict[FailureKey, AskedFailure] = {}  # the oldest first
        self._work: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Start to get all sources ready."""
        for source in self._sources:
            self._do(source.open())

    def ask(self, inquiry: Inquiry, *, settled: bool) -> None:
        """Ask every source; one that was asked about this key before gives the same answer again."""
        case = self._cases.get(inquiry.key)
        if case is None:
            # Forget the oldest beyond MOST_KEPT, but none that still waits for an answer.
            over = len(self._cases) + 1 - MOST_KEPT
            answered = [key for key, known in self._cases.items() if not known.is_open] if over > 0 else []
            for key in answered[:over]:
                del self._cases[key]
            case = self._cases[inquiry.key] = AskedFailure(inquiry)
            for source in self._sources:
                ask = source.ask(inquiry, settled=case.settled, timeout_s=self._timeout_s)
                case.answers.append(asyncio.create_task(ask))
        if settled:
            case.settled.set()
        # Also for a known key: a controller that took over asks again for the answers that the journal lacks.
        for source, answer in zip(self._sources, case.answers, strict=True):
            self._do(self._answer(inquiry.key, source.name, answer))

    def settled(self, key: FailureKey) -> None:
        """All workers of the cycle are gone. An unknown key is ignored."""
        if key in self._cases:
            self._cases[key].settled.set()

    def found(self, findings: AgentFindings) -> None:
        """An agent has read its node's logs."""
        for source in self._sources:
            source.found(findings)

    def judged(self, judged: VerdictRecord) -> None:
        """Inform others of a decision, once all sources have answered."""
        self._do(self._inform(judged))

    async def room(self) -> None:
        """Wait until there is room for one more line."""
        while len(self._work) >= MOST_AT_WORK:
            await asyncio.wait(self._work, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Finish what was asked, within five seconds and a moment."""
        # In this order: answers become reports, and reports are in the spool before the receivers are closed.
        answers = [answer for case in self._cases.values() for answer in case.answers]
        if answers:
            await asyncio.wait(answers, timeout=ANSWERS_S)
        for answer in answers:
            answer.cancel()
        if self._work:
            await asyncio.wait(self._work, timeout=SPOOL_S)
        closing = [source.close() for source in self._sources]
        if self._afterwards is not None:
            closing.append(self._afterwards.close(timeout_s=AFTERWARDS_S))
        await asyncio.gather(*closing)

    async def _answer(self, key: FailureKey, source: str, answer: asyncio.Task[Attribution]) -> None:
        # Not `await answer`: `close` may cancel it, and the CancelledError would end this task without an answer.
        await asyncio.wait({answer})
        gone = Attribution(source=source, verdict=Verdict.UNKNOWN, problem=CLOSED)
        await self._answered(key, gone if answer.cancelled() else answer.result())

    async def _inform(self, judged: VerdictRecord) -> None:
        from nvrx_slurm.attribution.notify import DecidedFailure

        # A failure that is not known here was asked about by the process before this one.
        case = self._cases.get(judged.key) or AskedFailure(Inquiry(key=judged.key, paths=()))
        if case.is_open:
            await asyncio.wait(case.answers)
        attributions = tuple(answer.result() for answer in case.answers if not answer.cancelled())
        self._afterwards = self._afterwards or self._make_afterwards()
        await self._afterwards.decided(
            DecidedFailure(key=judged.key, inquiry=case.inquiry, attributions=attributions, judged=judged)
        )

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        tasks.start(work, self._work, partial(log.error, "the broker goes on after: %r"))
