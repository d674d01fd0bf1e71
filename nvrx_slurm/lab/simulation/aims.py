"""Acts that are aimed: not at a time, but at an event of the journal, one scheduling step before or after it.

Most defects of a control plane need a fault at one moment: between a decision and its commit, between the commit and
the moment at which an agent reads the order. A time drawn at random hits such a moment rarely. `AimedActs` sees every
commit that reaches the store, and every order that an agent reads, and carries out the acts that are due there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Literal

from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab.simulation.loop import VirtualLoop

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.adversary import Act

# One scheduling step before the store accepts the commit, or after; the same of an agent that reads the order.
Moment = Literal["before", "after", "before receipt", "after receipt"]

# What becomes of a commit whose controller is killed or overtaken: the connection breaks before the store has taken
# it; it is taken; it is on its way until the next controller has taken over; it is taken, and the connection breaks.
BEFORE, AFTER, LATE, UNANSWERED = range(4)

# Each kind of journal event → how often it is aimed at.
COMMITTED: dict[str, float] = {
    "job_started": 0.5,
    "controller_started": 1,
    "node_joined": 2,
    "node_ready": 3,
    "workers_started": 3,
    "progress": 1,
    "worker_failed": 2,
    "worker_hung": 1,
    "node_isolated": 2,
    "workers_done": 2,
    "node_left": 1,
    "node_lost": 3,
    "node_fenced": 2,
    "quarantined": 1,
    "rendezvous_opened": 3,
    "rendezvous_closed": 4,
    "restart_decided": 3,
    "attribution_asked": 1,
    "attributed": 1,
    "attribution_judged": 1,
    "recovered": 1,
    "replica_ended": 1,
    "fence": 2,
    "shutdown": 1,
    "job_ended": 0.5,
}

# There is no second one of these, or it comes when the job has ended but for it.
ONCE = frozenset({"job_started", "replica_ended", "shutdown", "job_ended"})

# The orders among them: agents read these.
READ = ("rendezvous_opened", "rendezvous_closed", "rendezvous_closed", "replica_ended", "shutdown", "fence")


@dataclass(frozen=True, slots=True)
class Aim:
    """At the event number `nth` of its kind, from the act's `at_s` on; with `follows` only those count that come
    after the act before this one in the list was carried out. `steps`: so many scheduling steps later."""

    event: str
    moment: Moment
    nth: int = 0
    steps: int = 0
    follows: bool = False

    def __str__(self) -> str:
        later = f" and {self.steps} steps" if self.steps else ""
        since = " after the act above" if self.follows else ""
        return f"{self.moment}{later} {self.event}[{self.nth}]{since}"


def draw_aim(chance: Random, *, may_follow: bool) -> Aim:
    """At any kind of event; most often at its first."""
    moment: Moment = chance.choice(("before", "after", "before receipt", "after receipt"))
    if moment in ("before", "after"):
        event = chance.choices(list(COMMITTED), list(COMMITTED.values()))[0]
    else:
        event = chance.choice(READ)
    return Aim(
        event=event,
        moment=moment,
        nth=0 if event in ONCE else chance.choice((0, 0, 0, 1, 2, 5)),
        steps=chance.choice((0, 0, 0, 1, 2)),
        follows=may_follow and chance.random() < 0.5,
    )


# These come in each run, when its work is done.
ENDINGS = frozenset({"workers_done", "replica_ended", "node_left", "shutdown", "job_ended"})


class _Armed:
    """An act that waits for its event; `left`: how many such events it lets pass."""

    def __init__(self, act: Act, aim: Aim, perform: Callable[[Act], None]) -> None:
        self.act, self.aim, self.perform, self.left = act, aim, perform, aim.nth


class AimedActs:
    """Those of one run, which has these nodes."""

    def __init__(self, loop: VirtualLoop, nodes: Sequence[str]) -> None:
        self._loop, self._nodes = loop, nodes
        self.armed: list[_Armed] = []  # the callers look first: without an aim no event is decoded
        self._done_at: float | None = None  # when the workers that step will have finished

    def arm(self, act: Act, perform: Callable[[Act], None]) -> None:
        """From now on it waits for its event; `perform` carries it out, with a node if it had none."""
        assert act.aim is not None
        self.armed.append(_Armed(act, act.aim, perform))
        self._bound(self.armed[-1])

    def work_until(self, moment: float | None) -> None:
        """Workers step, and finish at that moment unless something happens; None: some have stopped. An act whose
        event has not come by a part of that time does not wait any longer, or the job would end without it."""
        self._done_at = moment
        for armed in self.armed:
            self._bound(armed)

    def _bound(self, armed: _Armed) -> None:
        if self._done_at is not None and armed.aim.event not in ENDINGS:
            # From the act's number, not drawn here: another draw would change all that the run draws later.
            share = 0.2 + 0.7 * (armed.act.number % 100) / 100
            left_s = max(0.0, self._done_at - self._loop.now_s)
            self._loop.call_outside(share * left_s, self._expire, armed, self._done_at)

    def _expire(self, armed: _Armed, done_at: float) -> None:
        if armed in self.armed and self._done_at == done_at:  # else the work has stopped since, or ends later
            self.armed.remove(armed)
            armed.perform(self._with_node(armed.act, ()))

    def sees(self, records: Iterable[Record], moment: Moment, reader: str = "") -> bool:
        """Carry out what is due at these events, as the world's next steps; whether there was any. `reader`: the
        node whose agent reads the order."""
        seen = [(str(record.__struct_config__.tag), record) for record in records]
        fired = False
        for armed in list(self.armed):
            for tag, record in seen:
                if (tag, moment) != (armed.aim.event, armed.aim.moment):
                    continue
                if armed.left == 0:
                    self.armed.remove(armed)
                    self._fire(armed, record, reader)
                    fired = True
                    break
                armed.left -= 1
        return fired

    def _fire(self, armed: _Armed, record: Record, reader: str) -> None:
        nodes = getattr(record, "nodes", ())[armed.act.number % 4 :]
        act = self._with_node(armed.act, (reader, getattr(record, "node", None), *nodes))
        self._later(armed.aim.steps, armed.perform, act)

    def _with_node(self, act: Act, about: Sequence[str | None]) -> Act:
        """Done to the node that the event is about, or one of those, unless it has a node."""
        if not act.is_on_node or act.node:
            return act
        known = [name for name in about if name is not None and name in self._nodes]
        return replace(act, node=known[0] if known else self._nodes[act.number % len(self._nodes)])

    def _later(self, steps: int, perform: Callable[[Act], None], act: Act) -> None:
        if steps:
            self._loop.call_outside(0.0, self._later, steps - 1, perform, act)
        else:
            self._loop.call_outside(0.0, perform, act)
