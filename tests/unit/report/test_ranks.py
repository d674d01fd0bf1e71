"""What heartbeats report of ranks and nodes."""

from __future__ import annotations

from nvrx_slurm.journal.records import NodeJoined
from nvrx_slurm.report.model import RankView
from nvrx_slurm.report.ranks import beat_age_s, ranks, worst
from nvrx_slurm.report.view import fold, with_heartbeat
from tests.unit.report.recorder import Recorder, roles_plan, to_first_cycle, view_of


def rank(number: int, *, replica: str = "main-0", **how: object) -> RankView:
    return RankView(replica=replica, rank=number, node="n", **how)


def test_each_rank_is_as_far_behind_as_the_fastest_of_its_replica_is_ahead() -> None:
    """A lag counts steps within one replica; a rank whose node has sent no heartbeat has only its replica and
    node."""
    recorder = to_first_cycle()
    view = view_of(recorder)
    with_heartbeat(view, recorder.beat("n0", 100, 98))
    with_heartbeat(view, recorder.beat("n1", 101, 97))
    told = ranks(view, recorder.now)
    assert [(each.rank, each.step, each.lag) for each in told[:4]] == [
        (0, 100, 1),
        (1, 98, 3),
        (2, 101, 0),
        (3, 97, 4),
    ]
    assert told[4] == RankView(replica="main-0", rank=4, node="n2")
    assert len(told) == 8


def test_a_late_heartbeat_is_no_lag() -> None:
    """Ranks at the same step are not behind each other if their nodes' newest heartbeats are from different times."""
    recorder = to_first_cycle()
    view, began = view_of(recorder), recorder.now

    def beat(node: str, after_s: float, *steps: int) -> None:
        recorder.now = began + after_s
        with_heartbeat(view, recorder.beat(node, *steps))

    beat("n0", 1.0, 1000, 1000)
    beat("n1", 2.0, 2000, 1000)
    beat("n2", 1.5, 1500, 1500)
    beat("n2", 4.5, 4500, 4500)
    beat("n1", 4.0, 4000, 3000)
    # n0's second heartbeat is late, and n3 has sent only one, later than all others.
    beat("n3", 5.0, 5000, 5000)
    lags = {each.rank: each.lag for each in ranks(view, recorder.now)}
    assert lags == {0: 0, 1: 0, 2: 0, 3: 900, 4: 0, 5: 0, 6: 0, 7: 0}, "rank 3 is a second behind rank 2, less jitter"


def test_a_rank_that_stands_still_falls_behind() -> None:
    """Its node still sends heartbeats: its lag is the steps that the others have made meanwhile."""
    recorder = to_first_cycle()
    view = view_of(recorder)
    for at in (10, 20, 30):
        with_heartbeat(view, recorder.beat("n0", at, at))
        with_heartbeat(view, recorder.beat("n1", at, 10))
        recorder.now += 10.0
    assert [each.lag for each in ranks(view, recorder.now)][:4] == [0, 0, 0, 19]


def test_another_replicas_speed_is_no_lag() -> None:
    """A slow replica is not behind a fast one."""
    recorder = Recorder(roles_plan())
    recorder.join()
    for replica in recorder.job.replicas:
        recorder.start_workers(replica)
    view = view_of(recorder)
    with_heartbeat(view, recorder.beat("n0", 5))
    with_heartbeat(view, recorder.beat("n2", 900, 900))
    assert {(each.replica, each.lag) for each in ranks(view, None) if each.step} == {
        ("policy-0", 0),
        ("rollout-0", 0),
    }


def test_silence_and_sections_grow_older_with_their_heartbeat() -> None:
    """A heartbeat 5 s ago reported a rank silent for 0.1 s: the silence is now 5.1 s."""
    recorder = to_first_cycle()
    view = view_of(recorder)
    sections = {0: (("checkpoint", 12.0), ("fsync", 3.0))}
    with_heartbeat(view, recorder.beat("n0", 7, 7, quiet={0: 0.1}, sections=sections))
    first, second, *_ = ranks(view, recorder.now + 5.0)
    assert first.quiet_s is not None
    assert abs(first.quiet_s - 5.1) < 1e-6
    assert [each.name for each in first.sections] == ["checkpoint", "fsync"]
    assert abs(first.sections[0].open_s - 17.0) < 1e-6
    assert (second.quiet_s, second.sections) == (None, ())


def test_a_heartbeat_of_a_cycle_that_is_over_says_nothing_of_ranks() -> None:
    """After a restart the steps and sections of the old cycle are dropped, until heartbeats of the new cycle
    arrive."""
    recorder = to_first_cycle()
    old = recorder.beat("n0", 500, 500)
    recorder.lose("n2")
    recorder.ready()
    recorder.start_workers()
    view = with_heartbeat(view_of(recorder), old)
    assert [each.step for each in ranks(view, recorder.now)] == [None] * 8


def test_ranks_without_workers_are_not_listed() -> None:
    """While a rendezvous is open no node has ranks."""
    recorder = to_first_cycle()
    recorder.lose("n2")
    assert ranks(view_of(recorder), recorder.now) == ()


def test_a_heartbeats_age_is_by_the_stores_clock() -> None:
    """The age is the store's time now minus the heartbeat's own time stamp; without either it is not known."""
    recorder = to_first_cycle()
    view = with_heartbeat(view_of(recorder), recorder.beat("n0", 1))
    assert beat_age_s(view, "n0", recorder.now + 3.0) == 3.0
    assert beat_age_s(view, "n0", recorder.now - 0.001) == 0.0
    assert beat_age_s(view, "n0", None) is None
    assert beat_age_s(view, "n1", recorder.now) is None


def test_a_new_agent_is_not_shown_with_the_old_ones_heartbeats() -> None:
    """After a node has joined again, heartbeats of its former agent are ignored, whether they arrived before or
    arrive later."""
    recorder = to_first_cycle()
    old = recorder.beat("n5")
    recorder.lose("n5")
    view = with_heartbeat(view_of(recorder), old)
    assert beat_age_s(view, "n5", recorder.now + 1.0) is not None  # the time of the lost agent's last heartbeat
    recorder.tell(NodeJoined(node="n5", incarnation="second", seq=1, addr="h", port=1))
    for entry in recorder.entries:
        fold(view, entry)
    assert beat_age_s(view, "n5", recorder.now) is None
    assert beat_age_s(with_heartbeat(view, old), "n5", recorder.now) is None


def test_the_worst_come_first() -> None:
    """Ranks without a step come first, if others of their replica have one; then the order is by lag, then by
    silence."""
    silent = [rank(each, replica="server-0", quiet_s=float(each)) for each in (1, 2)]
    unborn = rank(9)
    behind, close, quiet = rank(0, step=5, lag=40), rank(1, step=44, lag=1), rank(2, step=44, lag=1, quiet_s=30.0)
    every = [close, *silent, behind, unborn, quiet]
    assert worst(every, 9) == [unborn, behind, quiet, close, *silent[::-1]]
    assert worst(every, 2) == [unborn, behind]
