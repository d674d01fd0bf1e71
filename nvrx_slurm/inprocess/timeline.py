"""What a restart took: one record for the group, with each rank's phases."""

from __future__ import annotations

import enum

import msgspec

from nvrx_slurm.inprocess.attribution import InterruptionRecord


class Phase(enum.StrEnum):
    """The parts of a restart, in order; each ends where the next one begins."""

    DETECTED = "detected"  # from the fault, as far as this rank saw it, to knowing that the iteration is over
    LAST_CALL = "last_call"  # until all ranks were accounted for
    ABORTED = "aborted"  # until Abort was through, atomic sections waited for
    LEFT = "left"  # until the function was left
    FINALIZED = "finalized"
    CHECKED = "checked"  # until the health check was through
    SYNCHRONISED = "synchronised"  # until all were ready
    REASSIGNED = "reassigned"
    RE_ENTERED = "re_entered"  # until the function is called again


class RankTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's phases, in seconds. `member`: its initial rank; `rank`: its new one."""

    member: int
    rank: int
    host: str
    phases: dict[str, float]


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """One restart of a group. `at`: seconds since the epoch, when the first rank that tells it re-entered."""

    at: float
    group: str
    call: int
    iteration: int  # the one that began
    world_size: int
    active_world_size: int
    missing: tuple[int, ...]  # ranks of the iteration before that are out
    records: tuple[InterruptionRecord, ...]
    ranks: tuple[RankTimeline, ...]

    def slowest(self, phase: Phase) -> float:
        """The longest that a rank took for a phase, in seconds."""
        return max((rank.phases.get(phase, 0.0) for rank in self.ranks), default=0.0)

    @property
    def total_s(self) -> float:
        """From the fault to the last rank's return into the function."""
        return max((sum(rank.phases.values()) for rank in self.ranks), default=0.0)
