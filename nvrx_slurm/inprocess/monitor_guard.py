"""What a monitor does about its rank: record a soft timeout, end the process after a hard one. Pure."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass

from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.ledger import Interrupted, Lost

AGAIN_S = 5.0  # how often SIGKILL is repeated, and logged, for a process that hangs in the kernel
# In this order: a stopped process ends as it continues, before it can restart with the others.
ASK = (signal.SIGTERM, signal.SIGCONT)
KILL = (signal.SIGKILL,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressBounds:
    """How long a rank may make no progress, and how long it may take to end after SIGTERM; in seconds."""

    soft_s: float
    hard_s: float
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """The rank that a monitor watches, as its records name it."""

    member: int
    rank: int
    host: str
    iteration: int = 0

    def lost(self, interruption: Interruption, text: str) -> Lost:
        return Lost(**dataclasses.asdict(self), interruption=interruption, text=text)

    def interrupted(self, interruption: Interruption, text: str) -> Interrupted:
        return Interrupted(**dataclasses.asdict(self), interruption=interruption, text=text)


@dataclass(frozen=True, slots=True)
class PendingKill:
    """Why the process must end, and when the next SIGKILL is due. `kills` were sent, the first at `killed_at`."""

    lost: Lost
    kill_at: float
    kills: int = 0
    killed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class RankGuard:
    """What the monitor has done so far. `recorded`: the last iteration whose soft timeout was recorded."""

    recorded: int | None = None
    pending_kill: PendingKill | None = None

    def with_kill(self, lost: Lost, kill_at: float) -> RankGuard:
        """The process must end. Of two reasons the first one counts, and of two times the earlier one."""
        if self.pending_kill is None:
            return dataclasses.replace(self, pending_kill=PendingKill(lost, kill_at))
        if self.pending_kill.kills == 0:
            kill_at = min(kill_at, self.pending_kill.kill_at)
            return dataclasses.replace(self, pending_kill=dataclasses.replace(self.pending_kill, kill_at=kill_at))
        return self


@dataclass(frozen=True, slots=True)
class SendSignals:
    """Signals to the process, and the reason for the log."""

    signals: tuple[signal.Signals, ...]
    why: str


def look(
    guard: RankGuard, bounds: ProgressBounds, watched: WatchedRank, now: float, silent_s: float
) -> tuple[RankGuard, Interrupted | SendSignals | None]:
    """What to do about a rank without progress for `silent_s`: put an entry into the group's log, or send signals."""
    if guard.pending_kill is not None:
        pending_kill = guard.pending_kill
        if now < pending_kill.kill_at:
            return guard, None
        if pending_kill.kills == 0:
            why, killed_at = pending_kill.lost.text, now
        else:
            killed_at = pending_kill.killed_at
            ago_s = now - killed_at
            why = f"it was sent SIGKILL {ago_s:.0f} s ago, and hangs in the kernel: the others wait for its end"
        later = PendingKill(pending_kill.lost, now + AGAIN_S, pending_kill.kills + 1, killed_at)
        return dataclasses.replace(guard, pending_kill=later), SendSignals(KILL, why)
    if silent_s >= bounds.hard_s:
        text = f"no progress for {silent_s:.3g} s: hard timeout"
        lost = watched.lost(Interruption.HARD_TIMEOUT, text)
        return guard.with_kill(lost, now + bounds.grace_s), SendSignals(ASK, text)
    if silent_s >= bounds.soft_s and guard.recorded != watched.iteration:
        entry = watched.interrupted(Interruption.SOFT_TIMEOUT, f"no progress for {silent_s:.3g} s: soft timeout")
        return dataclasses.replace(guard, recorded=watched.iteration), entry
    return guard, None
