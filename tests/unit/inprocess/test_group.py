"""A rank's view of its group when one of its threads fails or is interrupted."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import NoReturn

import pytest

from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.barriers import Noticing, Ready, pack
from nvrx_slurm.inprocess.cycle import CyclePhase, Event, RankCycle
from nvrx_slurm.inprocess.exception import StoreError, TimeoutError
from nvrx_slurm.inprocess.group import Barrier, Group
from nvrx_slurm.inprocess.ledger import (
    AnyEntry,
    Completed,
    GroupLedger,
    Interrupted,
    IterationOpened,
    Lost,
    Sealed,
    Settled,
    decode,
    fold,
)
from nvrx_slurm.lab.simulation.inprocess.memory_store import MemoryConnection, MemoryStore
from tests.unit.inprocess.bytecodes import another_thread_can_take, at_bytecode


class Cut(BaseException):
    """An exception that another signal's handler raises."""


def group_at(ledger: GroupLedger, phase: CyclePhase = CyclePhase.ENTERING) -> Group:
    return Group(
        MemoryStore(),
        "group",
        0,
        RankCycle(0, ledger, phase=phase),
        tick=lambda: None,
        tick_s=0.01,
        on_phase=lambda cycle: None,
        on_heard=lambda before: None,
    )


@contextlib.contextmanager
def left_by(group: Group) -> Iterator[None]:
    group.feed(Event.LEAVES)
    yield


USES: list[Callable[[Group], object]] = [
    lambda group: group.feed(Event.LEAVES),
    lambda group: group.wait_while(CyclePhase.ENTERING, within_s=0.015),
    lambda group: group.fail(StoreError("gone")),
]


@pytest.mark.parametrize("use", USES, ids=["feed", "wait_while", "fail"])
def test_a_handler_that_raises_leaves_no_lock_taken(use: Callable[[Group], object]) -> None:
    """A signal handler raises in the main thread, at any point of waiting and reporting: the other threads can still
    move the cycle on."""

    def in_locks(frame: FrameType) -> bool:
        return frame.f_code.co_filename.endswith(("/threading.py", "/threads.py"))

    def act(_: FrameType) -> NoReturn:
        raise Cut

    def cut_at(number: int, group: Group) -> bool:
        def used() -> None:
            with contextlib.suppress(Cut):
                use(group)

        return at_bytecode(number, in_locks, act, used)[1]

    for number in itertools.count():
        group = group_at(GroupLedger(1))
        was_cut = cut_at(number, group)
        assert another_thread_can_take(partial(left_by, group))
        assert group.phase is CyclePhase.LEAVING
        if not was_cut:
            break
    assert number > 5


def test_a_rank_that_knows_that_all_have_completed_does_not_fail() -> None:
    """If the store is lost after the group has completed, no rank fails."""
    entries: list[AnyEntry] = [
        Sealed(iteration=0, world_size=1),
        IterationOpened(iteration=0),
        Completed(iteration=0),
    ]
    group = group_at(fold(GroupLedger(1), entries), CyclePhase.LEAVING)
    group.fail(StoreError("the store does not answer"))
    assert group.failure is None


LOST = Lost(iteration=0, member=2, interruption=Interruption.TERMINATED)
SEALED = Sealed(iteration=0, world_size=3, missing=(2,))


def arrived_and_lost(barrier: str) -> tuple[Group, MemoryConnection]:
    """Member 0 of three; member 2 has arrived at the barrier and was lost after that. Member 1 has not arrived."""
    group = group_at(GroupLedger(3))
    others = group._connect()
    assert isinstance(others, MemoryConnection)
    others.arrive(barrier, 2, pack(Ready(rank=2)))
    assert group.propose(LOST)
    group._take(0, others.read(0, 0.0))
    return group, others


def test_a_barrier_does_not_count_members_who_are_lost() -> None:
    """As many have arrived as remain, but one of them is lost: the barrier waits for the remaining one."""
    group, others = arrived_and_lost("ready:0")
    waiting = Barrier("ready:0", (CyclePhase.ENTERING,), 0.0, lambda ledger: ledger.left, lambda here: SEALED)
    with pytest.raises(TimeoutError, match="rank 1"):
        group.arrive(waiting, Ready(rank=0))
    assert len(others.read(0, 0.0)) == 1
    others.arrive("ready:0", 1, pack(Ready(rank=1)))
    with pytest.raises(TimeoutError):  # no listener reads the entry here
        group.arrive(waiting, Ready(rank=0))
    assert [decode(data) for data in others.read(1, 0.0)] == [SEALED]


def test_a_rank_that_has_moved_on_does_not_wait_at_a_barrier() -> None:
    """The iteration was interrupted, and the interruption settled, before the main thread arrives from the function:
    only this thread moves the rank on, so it does not wait for the others here."""
    group = group_at(GroupLedger(2), CyclePhase.UNWINDING)
    completed = Completed(iteration=0)
    group.arrive(Barrier("complete:0", (CyclePhase.COMPLETING,), 0.0, lambda _: 2, lambda _: completed))
    assert group._connect().arrivals("complete:0") == {}


def test_a_notice_does_not_count_members_who_are_lost() -> None:
    """The interruption is settled when all remaining members know of it, and not before."""
    group, others = arrived_and_lost("notice:0")
    for entry in (Sealed(iteration=0, world_size=3, missing=(2,)), IterationOpened(iteration=0)):
        assert group.propose(entry)
    failed = Interrupted(iteration=0, member=0, rank=0, interruption=Interruption.EXCEPTION)
    assert group.propose(failed)
    group._take(1, others.read(1, 0.0))
    settled = Settled(iteration=0)
    group.notice(0, Noticing())
    assert decode(others.read(0, 0.0)[-1]) == failed
    others.arrive("notice:0", 1, pack(Noticing()))
    group.notice(0, Noticing())
    assert decode(others.read(0, 0.0)[-1]) == settled
