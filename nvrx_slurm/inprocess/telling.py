"""One rank tells of a restart, for all of them: to the log, to the call's user, and to the agent."""

from __future__ import annotations

import time
from collections.abc import Mapping

from nvrx_slurm.inprocess import gates
from nvrx_slurm.inprocess.attribution import InterruptionRecord, format_interruption_records
from nvrx_slurm.inprocess.gates import Noticing, Starting
from nvrx_slurm.inprocess.group import Group
from nvrx_slurm.inprocess.journal import tell_agent
from nvrx_slurm.inprocess.timeline import Phase, RankTimeline, Restart
from nvrx_slurm.util.log import get_logger

log = get_logger("inprocess")


class Teller:
    """The listener's own."""

    def __init__(self, group: Group, name: str, call: int) -> None:
        self._group, self._name, self._call = group, name, call
        self._lost: set[int] = set()  # who was lost before, and told

    def tell(self, re_entered_s: float) -> Restart:
        """Of the restart that has just ended: put it together from what all ranks said, and tell it."""
        sealed = self._group.sealed
        places = self._group.arrivals(gates.start(sealed.iteration), Starting)
        places = {member: place for member, place in places.items() if member not in self._group.ledger.lost}
        restart = Restart(
            at=time.time(),
            group=self._name,
            call=self._call,
            iteration=sealed.iteration,
            world_size=len(places),
            active_world_size=max((place.active_world_size for place in places.values()), default=0),
            missing=sealed.missing,
            records=self._records(sealed.iteration),
            ranks=_ranks(places, re_entered_s),
        )
        log.warning("%s", in_one_line(restart))
        tell_agent(restart)
        return restart

    def pass_over(self) -> None:
        """Another rank tells of this one."""
        self._lost.update(self._group.ledger.lost)

    def _records(self, iteration: int) -> tuple[InterruptionRecord, ...]:
        """What was said since the function last ran: the causes first, then who is out, then who failed too."""
        ledger = self._group.ledger
        fresh = [lost for member, lost in ledger.lost.items() if member not in self._lost and not lost.inherited]
        entries = [*ledger.causes, *(lost for lost in fresh if lost not in ledger.causes)]
        named = {entry.member for entry in entries}
        notices = [
            notice.record()
            for before in range(iteration - len(ledger.causes), iteration)
            for member, notice in self._group.arrivals(gates.notice(before), Noticing).items()
            if member not in named
        ]
        self.pass_over()
        return (*(entry.record() for entry in entries), *(record for record in notices if record is not None))


def _ranks(places: Mapping[int, Starting], re_entered_s: float) -> tuple[RankTimeline, ...]:
    """All re-enter at once, by one entry of the log: what that took since their ranks were known is told by one."""
    return tuple(
        RankTimeline(
            member=member,
            rank=place.rank,
            host=place.process.host,
            phases={**place.phases, Phase.RE_ENTERED.value: re_entered_s},
        )
        for member, place in sorted(places.items(), key=lambda item: item[1].rank)
    )


def in_one_line(restart: Restart) -> str:
    """What happened, who is left, and what it took."""
    parts = ", ".join(f"{each.value} {1e3 * restart.slowest(each):.1f}" for each in Phase if restart.slowest(each))
    who = f"{restart.active_world_size} of {restart.world_size} ranks"
    return (
        f"restart in process: iteration {restart.iteration} began on {who}, after:"
        f" {format_interruption_records(restart.records)}; {1e3 * restart.total_s:.1f} ms ({parts})"
    )
