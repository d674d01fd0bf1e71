"""What holds for a rank's view of its group when a thread of it fails or is interrupted."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import NoReturn

import pytest

from nvrx_slurm.inprocess.cycle import CyclePhase, Event, RankCycle
from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.group import Group
from nvrx_slurm.inprocess.ledger import AnyEntry, Completed, GroupLedger, IterationOpened, Sealed, fold
from nvrx_slurm.lab.faults.inprocess_store import MemoryStore
from tests.unit.inprocess.bytecodes import another_thread_can_take, at_bytecode


class Cut(BaseException):
    """The exception of another signal's handler."""


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
    """A signal's handler raises in the main thread, anywhere in what it waits and reports with: the other threads
    can still move the cycle on."""

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


def test_who_knows_that_all_have_completed_does_not_fail() -> None:
    """A store that is lost after the group has completed takes no rank out."""
    entries: list[AnyEntry] = [
        Sealed(iteration=0, world_size=1),
        IterationOpened(iteration=0),
        Completed(iteration=0),
    ]
    group = group_at(fold(GroupLedger(1), entries), CyclePhase.LEAVING)
    group.fail(StoreError("the store does not answer"))
    assert group.failure is None
