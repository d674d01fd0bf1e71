"""Tells the agent of a restart, for the job's journal. Without an agent it does nothing."""

from __future__ import annotations

from collections.abc import Iterable

from nvrx_slurm.inprocess.attribution import InterruptionRecord, format_interruption_records
from nvrx_slurm.inprocess.timeline import Phase, RankTimeline, Restart
from nvrx_slurm.inprocess.words import clean
from nvrx_slurm.journal.restarts import (
    LONGEST_NAME,
    LONGEST_TEXT,
    MOST_FAULTS,
    MOST_MISSING,
    MOST_RANKS,
    InProcessRestart,
    RankFault,
    RankPhases,
    encode,
)
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.workload.channel import has_agent
from nvrx_slurm.workload.channel import tell_agent as send

log = get_logger("inprocess")


def tell_agent(restart: Restart) -> None:
    """One datagram to this node's agent, if there is one; one rank of a group tells.

    Never waits and never raises: an agent that cannot take it at once does not hear it, and the group goes on.
    """
    if not has_agent():
        return
    try:
        send(encode(shortened(restart)))
    except Exception:  # the group has restarted: a journal without it is no reason to fail
        log.warning("the agent was not told of the restart", exc_info=True)


def shortened(restart: Restart) -> InProcessRestart:
    """What fits into one datagram, however many ranks there are and whatever they have raised."""
    longest, slowest = _longest(restart.ranks)
    return InProcessRestart(
        cause=_clean(format_interruption_records(restart.records), LONGEST_TEXT),
        call=restart.call,
        iteration=restart.iteration,
        world_size=restart.world_size,
        active_world_size=restart.active_world_size,
        total_s=round(restart.total_s, 6),
        phases=longest,
        slowest=slowest,
        faults=tuple(_fault(record) for record in restart.records[:MOST_FAULTS]),
        lost=len(restart.missing),
        missing=restart.missing[:MOST_MISSING],
        ranks=tuple(_phases(rank) for rank in sorted(restart.ranks, key=_took_s, reverse=True)[:MOST_RANKS]),
    )


def _longest(ranks: Iterable[RankTimeline]) -> tuple[dict[str, float], dict[str, int]]:
    """Phase → the longest that it took, and → the rank that took so long."""
    longest: dict[str, float] = {}
    slowest: dict[str, int] = {}
    known = list(ranks)
    for phase in Phase:
        took = [(rank.phases[phase], rank.rank) for rank in known if phase in rank.phases]
        if took:
            seconds, slowest[phase.value] = max(took)
            longest[phase.value] = round(seconds, 6)
    return longest, slowest


def _fault(record: InterruptionRecord) -> RankFault:
    first_line = record.text.strip().partition("\n")[0]
    return RankFault(
        kind=record.interruption.value,
        rank=record.rank,
        host=_clean(record.host, LONGEST_NAME),
        text=_clean(first_line, LONGEST_TEXT),
    )


def _phases(rank: RankTimeline) -> RankPhases:
    known = {phase.value: round(rank.phases[phase], 6) for phase in Phase if phase in rank.phases}
    return RankPhases(rank=rank.rank, host=_clean(rank.host, LONGEST_NAME), phases=known)


def _took_s(rank: RankTimeline) -> float:
    return sum(rank.phases.values())


def _clean(text: str, most: int) -> str:
    return clean(text[:most])
