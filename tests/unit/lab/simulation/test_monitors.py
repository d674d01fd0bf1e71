"""Each monitor of the journal finds a violation of its promise, and none in a sound journal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nvrx_slurm.jobspec.model import AttributionSpec, HangSpec
from nvrx_slurm.jobspec.values import Allowance
from nvrx_slurm.journal.records import (
    Attributed,
    AttributionJudged,
    ControllerStarted,
    DrainAsked,
    Entry,
    Fence,
    FirstStepReached,
    JobEnded,
    NodeFenced,
    NodeUndrained,
    Quarantined,
    Record,
    Recovered,
    RendezvousClosed,
    RendezvousOpened,
    RequestRefused,
    RestartAsked,
    RestartDecided,
    RestartOrdered,
    Shutdown,
    WorkerFailed,
    WorkersDone,
)
from nvrx_slurm.journal.verdicts import Attribution, Verdict
from nvrx_slurm.lab.simulation.monitors import JournalMonitors, Promise
from tests.unit.core.fleet import Fleet, plain, running

ASKS = AttributionSpec(enable_lib=True, dry_run=False, timeout=30.0, decision_timeout=10.0)


def broken(fleet: Fleet, journal: list[Entry]) -> set[Promise]:
    """The promises that the monitors report as broken."""
    seen: set[Promise] = set()
    monitors = JournalMonitors(fleet.plan, lambda promise, _: seen.add(promise))
    for entry in journal:
        monitors.enter(entry)
    monitors.complete()
    return seen


def changed(fleet: Fleet, kind: type[Record], **fields: Any) -> list[Entry]:
    """The journal, with other fields in its last record of a kind."""
    last = max(index for index, entry in enumerate(fleet.journal) if isinstance(entry.record, kind))
    entry = fleet.journal[last]
    other = msgspec.structs.replace(entry, record=msgspec.structs.replace(entry.record, **fields))
    return [*fleet.journal[:last], other, *fleet.journal[last + 1 :]]


def without(fleet: Fleet, kind: type[Record]) -> list[Entry]:
    return [entry for entry in fleet.journal if not isinstance(entry.record, kind)]


def earlier(fleet: Fleet, kind: type[Record], by_s: float) -> list[Entry]:
    """The journal up to the last record of a kind, whose step is moved to an earlier time."""
    last = max(index for index, entry in enumerate(fleet.journal) if isinstance(entry.record, kind))
    t = fleet.journal[last].t
    return [msgspec.structs.replace(each, t=t - by_s) if each.t == t else each for each in fleet.journal[: last + 1]]


def unopened(fleet: Fleet) -> list[Entry]:
    """The journal up to a failure that opens no rendezvous."""
    last = max(index for index, entry in enumerate(fleet.journal) if isinstance(entry.record, RendezvousOpened))
    return fleet.journal[:last]


def failed() -> Fleet:
    """A worker has failed, and its replica runs again."""
    fleet = running(plain(max_restarts=Allowance(count=2, per_s=60.0)))
    fleet.fail("n1")
    fleet.ready("n1", "n2")
    return fleet


def stepping() -> Fleet:
    """A worker has failed, and the nodes of its replica report steps again."""
    fleet = failed()
    fleet.now += 1.0
    fleet.started("n1", "n2")
    fleet.step("n1")
    fleet.now += 1.0
    fleet.step("n2")
    return fleet


def lost() -> Fleet:
    """A node fell silent, its death was proven, and a spare has its ranks."""
    fleet = running()
    fleet.lose("n1", safe_after_s=30.0)
    fleet.ready("n2")
    fleet.now += 5.0
    fleet.prove_dead("n1")
    return fleet


def late() -> Fleet:
    """A node was late for its rendezvous, and is fenced after the last call."""
    fleet = running()
    fleet.fail("n1")
    fleet.ready("n2")
    fleet.later(20.0)
    return fleet


def quarantined() -> Fleet:
    """A node that was lost too often comes back."""
    fleet = running(plain(quarantine_after=1))
    fleet.lose("n1")
    fleet.rejoin("n1")
    return fleet


def smaller() -> Fleet:
    """A rendezvous closed with fewer nodes, since no more can join."""
    fleet = running(plain(3, 0, min_nodes=2))
    fleet.lose("n3")
    fleet.ready("n1", "n2")
    return fleet


def stopped() -> Fleet:
    """The verdict STOP of a source has ended the job."""
    fleet = running(plain(attribution=ASKS))
    fleet.fail("n1")
    answer = Attribution(source="lib", verdict=Verdict.STOP)
    fleet.tell(Attributed(replica="main-0", cycle=0, rank=0, attribution=answer))
    fleet.leave("n1", "n2", "n3")
    return fleet


def drained() -> Fleet:
    """A user has moved a node's ranks to the spare, and may not have another node drained."""
    fleet = running()
    fleet.tell(DrainAsked(request="1", by="u", node="n1"))
    fleet.ready("n1", "n2")
    fleet.tell(DrainAsked(request="2", by="u", node="n2"))
    fleet.tell(RestartAsked(request="3", by="u", cycles={"main-0": 1}))
    return fleet


def taken_back() -> Fleet:
    """The spare for a drain is lost before it gets the ranks."""
    fleet = running()
    fleet.tell(DrainAsked(request="1", by="u", node="n1"))
    fleet.ready("n1")
    fleet.lose("n3")
    fleet.ready("n2")
    return fleet


def skewed() -> Fleet:
    """Two nodes are done one after the other."""
    fleet = running(plain(hang=HangSpec(exit_skew=5.0)))
    fleet.done("n1")
    fleet.now += 4.0
    fleet.done("n2")
    return fleet


def taken_over() -> Fleet:
    """A controller takes over after `exit_skew` has passed, and only then reads that the second node is done."""
    fleet = running(plain(hang=HangSpec(exit_skew=5.0)))
    fleet.done("n1")
    fleet.now += 5.5
    fleet.tell(ControllerStarted(epoch=2, host="host", pid=1))
    fleet.done("n2")
    return fleet


def unanswered() -> Fleet:
    """A worker lost its peer, whose node has not answered within the join timeout, and there is no replacement."""
    fleet = running(plain(spares=0, rendezvous__join_timeout=15.0))
    fleet.tell(WorkerFailed(**fleet.by("n1"), replica="main-0", cycle=0, rank=0, exit_code=1, peer_lost=True))
    fleet.ready("n1")
    fleet.later(15.0)
    return fleet


def slower(fleet: Fleet, kind: type[Record], by_s: float) -> list[Entry]:
    """The journal, with its last record of a kind and all later ones moved to a later time."""
    last = max(index for index, entry in enumerate(fleet.journal) if isinstance(entry.record, kind))
    late = (msgspec.structs.replace(entry, t=entry.t + by_s) for entry in fleet.journal[last:])
    return [*fleet.journal[:last], *late]


STORIES = (
    skewed,
    taken_over,
    drained,
    taken_back,
    failed,
    stepping,
    lost,
    late,
    quarantined,
    smaller,
    stopped,
    unanswered,
)


@pytest.mark.parametrize("story", STORIES)
def test_a_sound_journal_breaks_nothing(story: Callable[[], Fleet]) -> None:
    """The decisions of the core are those that the second model expects."""
    fleet = story()
    assert broken(fleet, fleet.journal) == set()


CASES: list[tuple[Promise, Callable[[], Fleet], Callable[[Fleet], list[Entry]]]] = [
    (Promise.FRESH, failed, lambda fleet: changed(fleet, WorkerFailed, generation=1)),
    (Promise.FRESH, failed, lambda fleet: changed(fleet, WorkerFailed, cycle=1)),
    (Promise.FRESH, failed, lambda fleet: changed(fleet, WorkerFailed, seq=1)),
    (Promise.FAILURES, failed, unopened),
    (Promise.FAILURES, skewed, lambda fleet: slower(fleet, WorkersDone, 3.0)),
    (Promise.BUDGET, failed, lambda fleet: changed(fleet, RestartDecided, restarts_left=2)),
    (Promise.BUDGET, failed, lambda fleet: changed(fleet, RestartDecided, action="stop", by="budget")),
    (Promise.BUDGET, failed, lambda fleet: changed(fleet, RestartDecided, delay_s=1.0)),
    (Promise.FAILURES, drained, lambda fleet: without(fleet, RestartAsked)),
    (Promise.REQUESTS, drained, lambda fleet: without(fleet, RestartOrdered)),
    (Promise.REQUESTS, drained, lambda fleet: without(fleet, RequestRefused)),
    (Promise.REQUESTS, drained, lambda fleet: changed(fleet, DrainAsked, request="1")),
    (Promise.REQUESTS, drained, lambda fleet: changed(fleet, RendezvousClosed, nodes=("n1", "n2"))),
    (Promise.REQUESTS, taken_back, lambda fleet: without(fleet, NodeUndrained)),
    (Promise.CAUSE, unanswered, lambda fleet: changed(fleet, RestartDecided, node="n1", rank=0)),
    (Promise.LATE, late, lambda fleet: earlier(fleet, Fence, 10.0)),
    (Promise.QUARANTINE, quarantined, lambda fleet: without(fleet, Quarantined)),
    (Promise.SIZE, smaller, lambda fleet: changed(fleet, RendezvousClosed, nodes=("n1",), world_size=2)),
    (Promise.SIZE, failed, lambda fleet: changed(fleet, RendezvousClosed, nodes=("n2", "n1"))),
    (Promise.PROMPT, failed, lambda fleet: fleet.journal[:-1]),
    (Promise.RECOVERY, stepping, lambda fleet: without(fleet, Recovered)),
    (Promise.RECOVERY, stepping, lambda fleet: without(fleet, FirstStepReached)),
    (Promise.RECOVERY, stepping, lambda fleet: changed(fleet, Recovered, total_s=2.0)),
    (Promise.RECOVERY, stepping, lambda fleet: changed(fleet, FirstStepReached, total_s=1.0)),
    (Promise.VERDICT, stopped, lambda fleet: changed(fleet, AttributionJudged, verdict=Verdict.RESTART)),
    (Promise.VERDICT, stopped, lambda fleet: changed(fleet, AttributionJudged, acted=False)),
    (Promise.ENDING, stopped, lambda fleet: changed(fleet, Shutdown, exit_code=1)),
    (Promise.ENDING, stopped, lambda fleet: changed(fleet, JobEnded, missing=("n1",))),
]


@pytest.mark.parametrize(("promise", "story", "change"), CASES)
def test_a_changed_journal_breaks_its_promise(
    promise: Promise, story: Callable[[], Fleet], change: Callable[[Fleet], list[Entry]]
) -> None:
    """The monitor of the promise reports a record that was changed or removed."""
    fleet = story()
    assert promise in broken(fleet, change(fleet))


def test_ranks_that_are_given_away_without_a_proof() -> None:
    """The rendezvous closes as if the death had been proven, which it was not."""
    fleet = lost()
    assert broken(fleet, without(fleet, NodeFenced)) == {Promise.GIVEN_AWAY}
