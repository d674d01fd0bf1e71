"""The log of a call, and the ledger to which it folds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.inprocess.attribution import DEATHS, Interruption, InterruptionRecord
from nvrx_slurm.inprocess.ledger import (
    AnyEntry,
    Broken,
    Completed,
    GroupLedger,
    GroupResumed,
    GroupSuspended,
    Interrupted,
    IterationOpened,
    IterationStage,
    Log,
    Lost,
    Sealed,
    Settled,
    Void,
    accepts,
    decode,
    encode,
    fold,
)
from nvrx_slurm.inprocess.store import Connection
from nvrx_slurm.inprocess.store_file import FileStore
from tests.unit.inprocess.store_model import Line, Shared

MEMBERS = 3
SEALED, OPENED = Sealed(iteration=0, world_size=MEMBERS), IterationOpened(iteration=0)
COMPLETED = Completed(iteration=0)
FAILED = Interrupted(iteration=0, member=1, rank=1, interruption=Interruption.EXCEPTION, text="boom")
BROKEN = Broken(iteration=0, reason="two ranks are 1")

GATHERING: tuple[AnyEntry, ...] = ()
STARTING: tuple[AnyEntry, ...] = (SEALED,)
RUNNING: tuple[AnyEntry, ...] = (SEALED, OPENED)


def lost(member: int, interruption: Interruption = Interruption.TERMINATED, *, iteration: int = 0) -> Lost:
    return Lost(iteration=iteration, member=member, interruption=interruption)


def after(*entries: AnyEntry) -> GroupLedger:
    return fold(GroupLedger(MEMBERS), entries)


VOID = Void(iteration=-1)
EVERY_KIND = (SEALED, OPENED, FAILED, Settled(iteration=0), COMPLETED, lost(2), BROKEN, VOID)


@pytest.mark.parametrize("entry", EVERY_KIND, ids=lambda entry: type(entry).__name__)
def test_an_entry_is_read_as_it_was_written(entry: AnyEntry) -> None:
    """All members fold what one member appends."""
    assert decode(encode(entry)) == entry


@pytest.mark.parametrize("data", [b"", b'{"entry":"rumour","iteration":0}', b"\xff", b"[" * 10_000, b"7"])
def test_what_is_no_entry_takes_its_place_and_means_nothing(data: bytes) -> None:
    """All ranks count it, and none acts on it."""
    before = GroupLedger(2)
    assert decode(data) == VOID
    assert fold(before, [decode(data)]) == dataclasses.replace(before, length=1)


@pytest.mark.parametrize(
    ("before", "accepted"),
    [
        (GATHERING, {SEALED, lost(2), BROKEN}),
        (STARTING, {OPENED, FAILED, lost(2), BROKEN}),
        (RUNNING, {FAILED, COMPLETED, lost(2), BROKEN}),
        ((*RUNNING, COMPLETED), {lost(2)}),
        ((*RUNNING, FAILED), {Settled(iteration=0), lost(2)}),
        ((*RUNNING, FAILED, Settled(iteration=0)), {lost(2)}),
        ((BROKEN,), set()),
    ],
    ids=["gathering", "starting", "running", "completed", "interrupted", "settled", "broken"],
)
def test_what_counts_at_each_stage(before: tuple[AnyEntry, ...], accepted: set[AnyEntry]) -> None:
    """At each stage only these kinds of entries change the ledger."""
    assert {entry for entry in EVERY_KIND if accepts(after(*before), entry)} == accepted


def test_an_iteration_that_is_interrupted_is_not_completed() -> None:
    """A rank that completes too late finds that the iteration is over."""
    ledger = after(*RUNNING, FAILED, COMPLETED)
    assert (ledger.stage, ledger.iteration, ledger.causes) == (IterationStage.GATHERING, 1, (FAILED,))


def test_an_iteration_that_is_completed_is_not_interrupted() -> None:
    """A rank that fails or dies too late does not change what all have agreed on."""
    ledger = after(*RUNNING, COMPLETED, FAILED, lost(2))
    assert (ledger.stage, ledger.iteration, ledger.left) == (IterationStage.COMPLETED, 0, 2)


def test_an_entry_of_an_older_iteration_takes_a_place_and_changes_nothing() -> None:
    """All ranks count it, although it means nothing."""
    before = after(*RUNNING, FAILED)
    again = fold(before, [FAILED, OPENED, COMPLETED])
    assert (again.length, again.iteration, again.stage) == (before.length + 3, 1, IterationStage.GATHERING)


def test_a_death_interrupts_what_it_was_part_of() -> None:
    """While ranks start or run, none can go on without the dead one."""
    for part in (STARTING, RUNNING):
        ledger = after(*part, lost(2))
        assert (ledger.iteration, ledger.stage, ledger.left) == (1, IterationStage.GATHERING, 2)


def test_a_death_before_all_are_ready_interrupts_nothing() -> None:
    """The iteration has not begun: it begins without that member."""
    ledger = after(lost(2))
    assert (ledger.iteration, ledger.stage, ledger.left) == (0, IterationStage.GATHERING, 2)


def test_whom_the_assignment_discards_leaves_the_others_as_they_are() -> None:
    """The others know that it is left out, from their own assignment."""
    ledger = after(*STARTING, lost(2, Interruption.DISCARDED))
    assert (ledger.iteration, ledger.stage, ledger.left) == (0, IterationStage.STARTING, 2)


def test_a_seal_that_was_meant_before_a_loss_does_not_count() -> None:
    """Otherwise the world would have a lost member: it is sealed again, without it."""
    before = after(lost(2))
    assert not accepts(before, Sealed(iteration=0, world_size=3))
    assert accepts(before, Sealed(iteration=0, world_size=3, missing=(2,)))


def test_a_member_is_lost_once() -> None:
    """Both its monitor and its sibling may report it."""
    first, second = lost(2), lost(2, Interruption.UNRESPONSIVE)
    ledger = after(first, second)
    assert ledger.lost == {2: first}


def test_an_unknown_member_is_not_lost() -> None:
    """A member number beyond the group's belongs to another group."""
    assert after(lost(MEMBERS)).left == MEMBERS


def test_a_lost_member_interrupts_nothing_any_more() -> None:
    """An entry of a dead process may still arrive."""
    again = Sealed(iteration=1, world_size=3, missing=(1,))
    ledger = after(*RUNNING, lost(1), again, IterationOpened(iteration=1))
    late = Interrupted(iteration=1, member=1, rank=1, interruption=Interruption.EXCEPTION)
    assert not accepts(ledger, late)


def test_the_ring_leaves_out_who_is_lost() -> None:
    """Each member watches the next remaining one; the last remaining member watches none."""
    assert after().next_member(2) == 0
    assert after(lost(0)).next_member(2) == 1
    assert after(lost(0), lost(1)).next_member(2) is None


def test_records_have_the_failed_rank_and_the_reason() -> None:
    """The record of an interruption has the rank that the function had."""
    about: dict[str, Any] = {"rank": 5, "text": "boom", "host": "n1"}
    failed = Interrupted(iteration=0, member=1, interruption=Interruption.EXCEPTION, stack="at line 3", **about)
    assert failed.record() == InterruptionRecord(5, Interruption.EXCEPTION, "boom", "n1", "at line 3")
    gone = Lost(iteration=0, member=1, interruption=Interruption.HARD_TIMEOUT, **about)
    assert gone.record() == InterruptionRecord(5, Interruption.HARD_TIMEOUT, "boom", "n1")
    assert gone.interruption in DEATHS


def test_a_failure_before_the_iteration_runs_adds_to_what_led_there() -> None:
    """The causes of earlier iterations are dropped when an iteration runs."""
    early = Interrupted(iteration=1, member=2, rank=2, interruption=Interruption.EXCEPTION)
    sealed = Sealed(iteration=1, world_size=MEMBERS)
    assert after(*RUNNING, FAILED, sealed, early).causes == (FAILED, early)
    assert after(*RUNNING, FAILED, sealed, IterationOpened(iteration=1), early).causes == (early,)


def test_the_whole_ledger_of_a_call_with_every_kind_of_interruption() -> None:
    """Member 1 fails, all know of it, member 2 dies in the next iteration, and the one after that is completed."""
    dead = lost(2, iteration=1)
    second = (Sealed(iteration=1, world_size=3), IterationOpened(iteration=1), dead)
    ledger = GroupLedger(
        MEMBERS, length=7, iteration=2, stage=IterationStage.GATHERING, lost={2: dead}, causes=(dead,), settled=False
    )
    assert after(*RUNNING, FAILED, Settled(iteration=0), *second) == ledger
    third = (
        Settled(iteration=1),
        Sealed(iteration=2, world_size=3, missing=(2,)),
        IterationOpened(iteration=2),
        Completed(iteration=2),
    )
    completed = dataclasses.replace(ledger, length=11, stage=IterationStage.COMPLETED, settled=True)
    assert fold(ledger, third) == completed


def test_a_broken_group_says_why() -> None:
    assert after(*STARTING, BROKEN).reason == BROKEN.reason


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    connection = FileStore(path=tmp_path).connect("group", 0)
    yield connection
    connection.close()


def test_what_is_proposed_is_read_by_all(connection: Connection) -> None:
    """Each thread folds the same entries, and continues reading from its last position."""
    mine, other = Log(connection, MEMBERS), Log(connection, MEMBERS)
    assert mine.propose(SEALED)
    assert mine.ledger == after(SEALED)
    assert other.propose(OPENED), "it first reads the entries that it has missed"
    assert other.ledger == after(*RUNNING)
    mine.refresh()
    assert mine.ledger == other.ledger
    assert connection.read(0, 0.0) == [encode(SEALED), encode(OPENED)]


class WatchedLine(Line):
    """A connection that records for how long each read of the log may wait."""

    def __init__(self) -> None:
        super().__init__(Shared())
        self.waits_s: list[float] = []

    def read(self, after: int, wait_s: float) -> list[bytes]:
        self.waits_s.append(wait_s)
        return super().read(after, wait_s)


def test_a_proposal_waits_for_nothing_and_reads_no_more_than_it_needs() -> None:
    """A proposal that is valid for what the thread has read is appended at once and read back; another one is judged
    after one read."""
    line = WatchedLine()
    log = Log(line, MEMBERS)
    assert log.propose(SEALED)
    assert line.waits_s == [0.0]
    assert not log.propose(SEALED)
    assert line.waits_s == [0.0, 0.0]


def test_what_means_nothing_any_more_is_not_written(connection: Connection) -> None:
    """Of two entries that end an iteration the first one counts; the other rank reads it, and appends nothing."""
    mine, other = Log(connection, MEMBERS), Log(connection, MEMBERS)
    assert mine.propose(SEALED)
    assert mine.propose(OPENED)
    other.refresh()
    assert mine.propose(FAILED)
    assert not other.propose(COMPLETED)
    assert other.ledger == mine.ledger == after(*RUNNING, FAILED)
    assert len(connection.read(0, 0.0)) == 3


@pytest.mark.parametrize("late", [COMPLETED, OPENED, SEALED, BROKEN], ids=lambda entry: type(entry).__name__)
@pytest.mark.parametrize("there", [0, 1, 2], ids=["gathering", "starting", "running"])
def test_an_entry_of_an_iteration_that_was_interrupted_means_nothing(there: int, late: AnyEntry) -> None:
    """Its author had not read of the interruption; at each stage of the next iteration it changes only the log's
    length."""
    next_one = (Sealed(iteration=1, world_size=MEMBERS), IterationOpened(iteration=1))[:there]
    ledger = after(*RUNNING, FAILED, *next_one)
    assert fold(ledger, [late]) == dataclasses.replace(ledger, length=ledger.length + 1)


@pytest.mark.parametrize("stage", [(), (Sealed(iteration=1, world_size=3),), (IterationOpened(iteration=1),)])
def test_an_interruption_of_a_cycle_that_has_closed_does_not_count(stage: tuple[AnyEntry, ...]) -> None:
    """A rank that was slow to report interrupts no later iteration, at any stage: otherwise all others would restart
    again for a fault from which they have recovered."""
    seal = (Sealed(iteration=1, world_size=3),) if stage and isinstance(stage[0], IterationOpened) else ()
    before = after(*RUNNING, FAILED, *seal, *stage)
    late = Interrupted(iteration=0, member=2, rank=2, interruption=Interruption.SOFT_TIMEOUT)
    assert not accepts(before, late)
    assert fold(before, [late]) == dataclasses.replace(before, length=before.length + 1)


@pytest.mark.parametrize("iteration", [0, 1, 2])
def test_nothing_interrupts_what_is_completed(iteration: int) -> None:
    """This holds for any iteration that it names: some ranks have returned by then."""
    late = Interrupted(iteration=iteration, member=2, rank=2, interruption=Interruption.EXCEPTION)
    assert not accepts(after(*RUNNING, COMPLETED), late)


def test_while_all_are_suspended_the_clock_proves_no_death() -> None:
    """A process that has ended is lost nevertheless."""
    suspended = fold(GroupLedger(3), [GroupSuspended(iteration=0), GroupSuspended(iteration=0)])
    silent = Lost(iteration=0, member=1, interruption=Interruption.UNRESPONSIVE)
    dead = Lost(iteration=0, member=2, interruption=Interruption.TERMINATED)
    assert (accepts(suspended, silent), accepts(suspended, dead)) == (False, True)
    assert accepts(fold(suspended, [GroupResumed(iteration=0)]), silent)
    assert not accepts(GroupLedger(3), GroupResumed(iteration=0))
