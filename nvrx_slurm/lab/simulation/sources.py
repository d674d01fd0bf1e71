"""The sources of attribution in a history: they answer late, twice, wrongly about the key, or never."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from nvrx_slurm.controller.attribution_broker import Answered
from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry, Scope, Verdict, VerdictRecord
from nvrx_slurm.lab.simulation.process import Process

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.history import History

VERDICTS = (*[Verdict.RESTART] * 5, *[Verdict.UNKNOWN] * 2, Verdict.TIMEOUT, Verdict.STOP)
AT_LEAST_S, AT_MOST_S = 0.01, 20.0


class SimulatedBroker:
    """The broker of one controller process; nothing of it outlives that."""

    def __init__(self, history: History, process: Process, answered: Answered) -> None:
        self._history, self._process, self._answered = history, process, answered

    def open(self) -> None:
        """It is always there."""

    def ask(self, inquiry: Inquiry, *, settled: bool) -> None:
        """Every source draws what it says, of whom, and when, from the key: whoever asks again hears the same."""
        for source in self._history.plan.fault_tolerance.attribution.sources:
            chance = self._history.chance(f"source/{source}/{inquiry.key}")
            if chance.random() < 0.15:
                continue  # it never answers
            attribution = Attribution(
                source=source,
                verdict=chance.choice(VERDICTS),
                confidence=chance.random(),
                scope=chance.choice((Scope.NODE, Scope.USER_CODE)),
                nodes=(chance.choice(inquiry.nodes),) if inquiry.nodes else (),
            )
            for _ in range(chance.choice((1, 1, 2))):
                self._say(
                    inquiry.key, attribution, chance.choice((AT_LEAST_S, chance.uniform(AT_LEAST_S, AT_MOST_S)))
                )
            if chance.random() < 0.2:
                stale = replace(inquiry.key, cycle=inquiry.key.cycle + chance.choice((-1, 1)))
                self._say(stale, replace(attribution, verdict=Verdict.STOP), chance.uniform(AT_LEAST_S, AT_MOST_S))

    def settled(self, key: FailureKey) -> None:
        """None of them looks at logs."""

    def judged(self, judged: VerdictRecord) -> None:
        """Nobody is told."""

    async def close(self, within_s: float) -> None:
        """There is nothing to end."""

    def _say(self, key: FailureKey, attribution: Attribution, after_s: float) -> None:
        def say() -> None:
            if self._process.alive:
                self._answered(key, attribution)

        self._history.loop.call_later(after_s, say)
