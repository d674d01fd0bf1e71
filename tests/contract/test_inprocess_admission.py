"""Which run owns a group's name, when the other run's processes are on another host and only heartbeats show whether
they live."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.inprocess.admission import CALL_BITS, COMPLETED, LEFT, REGISTRY, RunAdmission, joined, latest
from nvrx_slurm.inprocess.barriers import MemberProcess, pack
from nvrx_slurm.inprocess.environment import RankIdentity
from nvrx_slurm.inprocess.exception import RestartError, StoreError, TimeoutError
from nvrx_slurm.inprocess.store import Store
from nvrx_slurm.util.processes import process_space, started_ticks
from nvrx_slurm.util.threads import in_thread
from tests.contract.inprocess_stores import DEADLINE_S, KINDS
from tests.waiting import until

GROUP = "group"
HERE = MemberProcess(host="here", pid=os.getpid(), began=started_ticks(os.getpid()) or 0, space=process_space())
ELSEWHERE = MemberProcess(host="elsewhere", pid=1, began=1, space="another host")
SILENT_S, INTERVAL_S = 1.0, 0.05


@pytest.fixture(params=["memory", "file", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with KINDS[request.param](tmp_path) as store:
        yield store


def admission(
    store: Store, rank: int = 0, world: int = 1, process: MemberProcess = HERE, within_s: float = DEADLINE_S, **more
) -> RunAdmission:
    own = RankIdentity(rank=rank, world_size=world, local_rank=None, group=GROUP, host="here", replaced=False)
    bounds = {"within_s": within_s, "heartbeat_timeout_s": SILENT_S, "interval_s": INTERVAL_S}
    return RunAdmission(store, own, process, **bounds, **more)


def test_all_ranks_of_a_run_get_the_same_calls(store: Store) -> None:
    """All ranks of a run get the same call numbers. Once they have left, the next run gets others."""
    ranks = [admission(store, rank, 3) for rank in range(3)]
    entering = [in_thread(rank.enter, "rank") for rank in ranks]
    runs = [each.result(DEADLINE_S) for each in entering]
    assert runs == [runs[0]] * 3
    assert runs[0].first % (1 << CALL_BITS) == 0 < runs[0].first
    for rank in ranks:
        rank.leave(runs[0], COMPLETED, 0)
    with contextlib.closing(store.connect(GROUP, REGISTRY)) as registry:
        assert latest(registry.read(0, 0.0)) is None
    assert admission(store).enter() != runs[0]


def test_a_silent_run_of_another_host_is_followed(store: Store) -> None:
    """A new run takes the name once the old run has sent no heartbeat for the heartbeat timeout."""
    before = admission(store, process=ELSEWHERE).enter()
    assert admission(store).enter().first != before.first


def test_a_run_of_another_host_with_heartbeats_keeps_its_name(store: Store) -> None:
    """A run that still sends heartbeats keeps the name. The new run gets an error that names the old run's
    process."""
    before = admission(store, process=ELSEWHERE).enter()
    ended = threading.Event()

    def beat() -> None:
        with contextlib.closing(store.connect(GROUP, before.first)) as call:
            while not ended.wait(INTERVAL_S):
                call.beat(0, None)

    beating = in_thread(beat, "beats")
    with pytest.raises(StoreError, match="process 1 on elsewhere"):
        admission(store, world=2).enter()
    ended.set()
    beating.result(DEADLINE_S)


def test_a_rank_that_waits_for_others_leaves_a_dead_run(store: Store) -> None:
    """Rank 1 joins a dead run, in which its place was free. Rank 0, whose place is taken there, finds that the run is
    dead; both then join a new run."""
    with contextlib.closing(store.connect(GROUP, REGISTRY)) as registry:
        dead = admission(store, 0, 2, ELSEWHERE, within_s=0.2)
        with pytest.raises(TimeoutError, match=r"waited 0\.2 s for rank 1"):
            dead.enter()
        waiting = in_thread(admission(store, 1, 2).enter, "rank 1")
        old = latest(registry.read(0, 0.0))
        assert old is not None
        until(lambda: registry.arrival(joined(old.first), 1) is not None, "rank 1 to join the dead run")
        run = admission(store, 0, 2).enter()
        assert waiting.result(DEADLINE_S) == run != old
        assert registry.arrival(joined(old.first), 0) == pack(ELSEWHERE)


def test_a_rank_that_left_is_refused_once_the_others_have_completed(store: Store) -> None:
    """Ranks that have all left a run get another one. A rank that left while the others completed is refused."""
    ranks = [admission(store, rank, 2) for rank in range(2)]
    entering = [in_thread(rank.enter, "rank") for rank in ranks]
    run, _ = [each.result(DEADLINE_S) for each in entering]
    ranks[0].leave(run, LEFT, 1)
    again = [admission(store, rank, 2, again=run) for rank in range(2)]
    waiting = in_thread(again[0].enter, "rank 0")
    ranks[1].leave(run, LEFT, 2)
    following = again[1].enter()
    assert waiting.result(DEADLINE_S) == following != run
    again[0].leave(following, LEFT, 1)
    again[1].leave(following, COMPLETED, 1)
    with pytest.raises(RestartError, match="has left its group in an earlier call"):
        admission(store, 0, 2, again=following).enter()
