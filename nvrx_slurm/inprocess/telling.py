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
from nvrx_slurm.log import get_logger

log = get_logger("inprocess")


def tell(group: Group, name: str, call: int, re_entered_s: float) -> Restart:
    """The listener's, of the restart that has just ended: put it together from what all ranks said, and tell it."""
    sealed, cause = group.sealed, group.ledger.cause
    places = group.arrivals(gates.start(sealed.iteration), Starting)
    notices = group.arrivals(gates.notice(sealed.iteration - 1), Noticing)
    records = {cause.member: cause.record()} if cause is not None else {}
    records |= {m: record for m, notice in notices.items() if (record := notice.record()) and m not in records}
    restart = Restart(
        at=time.time(),
        group=name,
        call=call,
        iteration=sealed.iteration,
        world_size=len(places),
        active_world_size=max((place.active_world_size for place in places.values()), default=0),
        missing=sealed.missing,
        records=tuple(records.values()),
        ranks=_ranks(places, re_entered_s),
    )
    log.warning("%s", in_one_line(restart, tuple(records.values())))
    tell_agent(restart)
    return restart


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


def in_one_line(restart: Restart, records: tuple[InterruptionRecord, ...]) -> str:
    """What happened, who is left, and what it took."""
    parts = ", ".join(f"{each.value} {1e3 * restart.slowest(each):.1f}" for each in Phase if restart.slowest(each))
    return (
        f"iteration {restart.iteration} began on {restart.active_world_size} of {restart.world_size} ranks, after:"
        f" {format_interruption_records(records)}; {1e3 * restart.total_s:.1f} ms ({parts})"
    )
