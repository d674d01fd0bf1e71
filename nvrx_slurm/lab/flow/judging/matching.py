"""A flow's expectations against its job's journal, while the job runs. Pure: entries, strikes and the time come in.

Faults and entries reach the harness on different ways. So a fault that has struck at `t` is told with that time, and
what came meanwhile is judged again as if it had been known: which of the two is told first makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvrx_slurm.journal.records import Entry
from nvrx_slurm.lab.flow.judging.expectations import Judging, Verdict
from nvrx_slurm.lab.flow.judging.near import Miss as Miss
from nvrx_slurm.lab.flow.judging.near import Nearest as Nearest
from nvrx_slurm.lab.flow.judging.near import miss_of, nearest_entry
from nvrx_slurm.lab.flow.language.model import Flow

LAG_S = 2.0
"""An entry may reach us so long after the time that it carries; before that no silence counts as one."""


class Matcher:
    """Tells, as entries come, whether the flow's expectations are met. All times are seconds on the journal's clock.

    A capture that a fault names by `as` is bound by that fault alone, and stands for the same from the journal's
    start. While faults are to come no `within` runs out: any of them may be what it counts from.
    """

    def __init__(self, flow: Flow) -> None:
        self._expect, self._faults = flow.expect, flow.faults
        self._history: list[Entry] = []
        self._strikes: list[float] = []
        self._named: dict[str, Any] = {}
        self._over: str | None = None
        self._nearest: tuple[Verdict, int, Nearest | None] | None = None
        self._judging = self._start()

    def feed(self, entry: Entry) -> None:
        """The journal's next entry."""
        self._history.append(entry)
        self._judging.feed(entry)

    def struck(self, t: float, bindings: Mapping[str, Any]) -> None:
        """A fault has struck at `t`, before any of what follows from it; `bindings`: what its captures stand for."""
        self._strikes.append(t)
        self._named.update(bindings)
        self._judging = self._start()
        for entry in self._history:
            self._judging.feed(entry)
        if self._over is not None:
            self._judging.close(self._over)

    def look(self, t: float) -> None:
        """It is `t` now, and all that has come was fed."""
        self._judging.look(t - LAG_S)

    def next_deadline(self) -> float | None:
        """When to `look` again if nothing comes; None: never."""
        deadline = self._judging.next_deadline()
        return None if deadline is None else deadline + LAG_S

    def job_over(self, why: str = "the job ended") -> None:
        """No entry comes any more, for this reason."""
        self._over = why
        self._judging.close(why)

    @property
    def bindings(self) -> dict[str, Any]:
        """What the captures stand for, as far as is known."""
        return self._judging.bindings

    @property
    def miss(self) -> Miss | None:
        """The first expectation that is not met."""
        verdict = self._judging.verdict
        if verdict is None:
            return None
        seen = len(self._history)
        if self._nearest is None or self._nearest[:2] != (verdict, seen):
            self._nearest = (verdict, seen, nearest_entry(self._judging, verdict, self._history))
        return miss_of(self._judging, verdict, self._history, self._nearest[2])

    @property
    def settled(self) -> bool:
        """Everything is met, nothing that can yet go wrong is open, and no fault is to come."""
        return self._judging.settled and (self._over is not None or self._judging.pending == 0)

    def _start(self) -> Judging:
        promised = {fault.binds for fault in self._faults if fault.binds is not None}
        return Judging(
            self._expect,
            bindings=dict(self._named),
            strikes=tuple(self._strikes),
            pending=len(self._faults) - len(self._strikes),
            promised=frozenset(promised.difference(self._named)),
        )
