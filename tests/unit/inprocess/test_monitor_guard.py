"""How a monitor acts on a rank that makes no progress, at given times."""

from __future__ import annotations

from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.ledger import Interrupted
from nvrx_slurm.inprocess.monitor_guard import (
    AGAIN_S,
    ASK,
    KILL,
    ProgressBounds,
    RankGuard,
    SendSignals,
    WatchedRank,
    look,
)

BOUNDS = ProgressBounds(soft_s=60.0, hard_s=90.0, grace_s=5.0)
RANK = WatchedRank(member=3, rank=2, host="n1", iteration=4)
UNHEALTHY = RANK.lost(Interruption.UNHEALTHY, "no GPU")


def test_progress_is_left_alone():
    """No action is taken before the soft timeout."""
    assert look(RankGuard(), BOUNDS, RANK, 100.0, 59.9) == (RankGuard(), None)


def test_soft_timeout_is_recorded_once_an_iteration():
    """The rank may still restart: the timeout is only recorded, for all ranks."""
    guard, act = look(RankGuard(), BOUNDS, RANK, 100.0, 60.0)
    assert isinstance(act, Interrupted)
    assert (act.interruption, act.member, act.rank) == (Interruption.SOFT_TIMEOUT, 3, 2)
    assert (act.iteration, act.host) == (4, "n1")
    assert look(guard, BOUNDS, RANK, 101.0, 61.0) == (guard, None)
    later = WatchedRank(member=3, rank=2, host="n1", iteration=5)
    assert isinstance(look(guard, BOUNDS, later, 200.0, 60.0)[1], Interrupted)


def test_hard_timeout_asks_then_kills():
    """A stopped process is continued first, so that it can act on SIGTERM; after the grace it gets SIGKILL."""
    guard, asked = look(RankGuard(), BOUNDS, RANK, 100.0, 90.0)
    assert isinstance(asked, SendSignals) and asked.signals == ASK
    assert guard.pending_kill and guard.pending_kill.lost.interruption is Interruption.HARD_TIMEOUT
    assert look(guard, BOUNDS, RANK, 104.9, 94.9) == (guard, None)
    _, killed = look(guard, BOUNDS, RANK, 105.0, 95.0)
    assert isinstance(killed, SendSignals) and killed.signals == KILL


def test_progress_does_not_undo_a_hard_timeout():
    """A rank that got SIGTERM is killed even if it goes on: SIGTERM may have ended part of it."""
    guard, _ = look(RankGuard(), BOUNDS, RANK, 100.0, 90.0)
    assert isinstance(look(guard, BOUNDS, RANK, 105.0, 0.0)[1], SendSignals)


def test_survivor_of_sigkill_is_killed_again_and_again():
    """It hangs in the kernel; the log says why the other ranks wait."""
    guard, _ = look(RankGuard().with_kill(UNHEALTHY, 10.0), BOUNDS, RANK, 10.0, 0.0)
    assert look(guard, BOUNDS, RANK, 10.0 + AGAIN_S - 0.1, 0.0) == (guard, None)
    for time in (1, 2):
        guard, act = look(guard, BOUNDS, RANK, 10.0 + time * AGAIN_S, 0.0)
        assert (
            isinstance(act, SendSignals)
            and f"{time * AGAIN_S:.0f} s ago" in act.why
            and "hangs in the kernel" in act.why
        )


def test_first_reason_and_earliest_moment_count():
    """A second reason may bring the kill forward, and never delays it."""
    unresponsive = RANK.lost(Interruption.UNRESPONSIVE, "silent")
    hastened = RankGuard().with_kill(UNHEALTHY, 10.0).with_kill(unresponsive, 5.0).pending_kill
    assert hastened and (hastened.lost, hastened.kill_at) == (UNHEALTHY, 5.0)
    late = RankGuard().with_kill(UNHEALTHY, 10.0).with_kill(unresponsive, 15.0).pending_kill
    assert late and late.kill_at == 10.0
    killed, _ = look(RankGuard().with_kill(UNHEALTHY, 10.0), BOUNDS, RANK, 10.0, 0.0)
    assert killed.with_kill(unresponsive, 11.0) == killed
