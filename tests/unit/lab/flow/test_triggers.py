"""When faults are due: the scheduler reads journals of the real core, heartbeats and faults, and returns the faults
that are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import Entry, Heartbeat, JobStarted
from nvrx_slurm.lab.flow.load import load_flow
from nvrx_slurm.lab.flow.model import Fault
from nvrx_slurm.lab.flow.topology import resolved
from nvrx_slurm.lab.flow.triggers import FaultScheduler, state_of
from nvrx_slurm.report.model import ReceivedHeartbeat
from nvrx_slurm.report.view import JobView, fold
from tests.unit.report.recorder import BEGIN, Recorder, ended, roles_plan, to_first_cycle

Write = Callable[[str], Path]


def faults(write: Write, *items: str, expect: str = "job_ended") -> tuple[Fault, ...]:
    listed = "".join(f"  - {item}\n" for item in items)
    return load_flow(write(f"job: job.yaml\nexpect: [{expect}]\nfaults:\n{listed}")).faults


def director(write: Write, *items: str) -> FaultScheduler:
    return FaultScheduler(faults(write, *items))


def due(directs: FaultScheduler, t: float = BEGIN + 3600) -> list[str]:
    return [fault.describe() for fault in directs.due(t)]


def entry_at_which(directs: FaultScheduler, entries: Sequence[Entry]) -> int | None:
    """The entry with which the first fault is due."""
    for entry in entries:
        directs.feed(entry)
        if directs.due(entry.t):
            return entry.n
    return None


def heartbeat(t: float, steps: dict[int, int]) -> ReceivedHeartbeat:
    return ReceivedHeartbeat(t, Heartbeat(node="n1", incarnation="i1", replica="main-0", steps=steps))


# trigger → the entry of the journal at which it is met
TRIGGERS = {
    "{event: node_joined}": 3,
    "{event: node_joined, times: 4}": 6,
    "{event: node_joined, node: n5}": 9,
    "{event: rendezvous_closed, cycle: '>= 1'}": 25,
    "{event: progress, rank: 0, cycle: 1}": 31,
    "{event: progress, node: n3, step: 50}": 34,
    "{event: worker_hung}": None,
    "{event: node_joined, times: 7}": None,
    "{state: running}": 13,
    "{state: recovering}": 21,
    "{state: shutting_down}": 41,
    "{state: ended}": 47,
    "{state: pending}": None,
    "{all: [{event: node_joined, node: n5}, {event: rendezvous_closed}]}": 9,
    "{all: [{event: node_joined}, {event: worker_hung}]}": None,
    "{any: [{event: worker_hung}, {state: running}]}": 13,
    "{any: [{all: [{state: running}, {event: node_lost}]}, {event: recovered}]}": 18,
}


@pytest.mark.parametrize(("when", "entry"), TRIGGERS.items())
def test_with_which_entry_a_trigger_is_met(write: Write, when: str, entry: int | None) -> None:
    """A fault is due at exactly the entry for which it waits."""
    assert entry_at_which(director(write, f"{{when: {when}, do: kill_store}}"), ended().entries) == entry


def test_a_fault_is_handed_out_once(write: Write) -> None:
    """A fault that was returned is not returned again, and waits until it has happened."""
    directs = director(write, "{when: {event: node_joined}, do: kill_store}")
    directs.feed(ended().entries[2])
    assert due(directs) == ["kill_store"]
    assert due(directs) == []
    (fault,) = directs.waiting
    assert directs.why_not(fault) == "it was due, and its effect was not seen"
    directs.fault_happened(fault, BEGIN)
    assert directs.waiting == []


def test_heartbeats_count_as_progress_too(write: Write) -> None:
    """Any step from the given one on will do, since heartbeats skip steps; a step of another rank will not."""
    directs = director(write, "{when: {event: progress, rank: 2, step: 5}, do: kill_store}")
    directs.feed(heartbeat(BEGIN, {0: 9, 2: 3}))
    assert due(directs) == []
    assert directs.why_not(directs.waiting[0]) == (
        "progress {rank: 2, step: >= 5} never came; nearest: step: 3, not >= 5"
    )
    directs.feed(heartbeat(BEGIN + 1, {2: 8}))
    assert directs.next_at() == BEGIN + 1
    assert due(directs) == ["kill_store"]


def test_after(write: Write) -> None:
    """A fault may be delayed after its trigger, by the journal's clock; delays of parts and whole add up."""
    directs = director(
        write,
        "{when: {event: node_joined, after: 3s}, do: kill_store}",
        "{when: {any: [{event: node_joined, after: 5s}, {state: ended}], after: 1s}, do: kill_controller}",
    )
    assert directs.next_at() is None
    joined = ended().entries[2]
    directs.feed(joined)
    assert directs.next_at() == joined.t + 3
    assert due(directs, joined.t + 2.9) == []
    assert directs.why_not(directs.waiting[0]) == "its moment had not come"
    assert due(directs, joined.t + 3) == ["kill_store"]
    assert directs.next_at() == joined.t + 6


def test_faults_that_are_due_together_come_in_the_order_of_their_moments(write: Write) -> None:
    """The earlier time comes first; at the same time, the order of the file counts."""
    directs = director(
        write,
        "{when: {event: node_joined, after: 1s}, do: kill_store}",
        "{when: {event: node_joined}, do: kill_controller}",
        "{when: {event: node_joined}, do: kill_batch_host}",
    )
    directs.feed(ended().entries[2])
    assert due(directs) == ["kill_controller", "kill_batch_host", "kill_store"]


def test_a_fault_after_another(write: Write) -> None:
    """`fault: 1` is met when that fault has happened, not when it was due."""
    directs = director(
        write,
        "{when: {event: node_joined}, do: {kill_node: {of_rank: 0}}, as: $dead}",
        "{when: {fault: 1, after: 2s}, do: {restore_node: $dead}}",
    )
    directs.feed(ended().entries[2])
    first, second = directs.waiting
    assert due(directs) == ["kill_node of rank 0"]
    assert directs.why_not(second) == "fault 1 had not happened"
    directs.fault_happened(first, BEGIN + 10, {"dead": "n3"})
    (found,) = directs.due(BEGIN + 12)
    assert (resolved(found.arguments, directs.bindings), directs.bindings) == ({"node": "n3"}, {"dead": "n3"})


def test_captures_of_triggers_and_expectations_are_the_same(write: Write) -> None:
    """A trigger binds an unbound capture, compares with one that an expectation has bound, and the target uses it."""
    item = "{when: {event: rendezvous_closed, cycle: 1, promoted: [$new]}, do: {kill_node: $new}}"
    fresh, bound = FaultScheduler(faults(write, item)), FaultScheduler(faults(write, item))
    for entry in ended().entries:
        fresh.feed(entry)
        bound.feed(entry, {"new": "n9"})
    assert [resolved(fault.arguments, fresh.bindings) for fault in fresh.due(BEGIN + 60)] == [{"node": "n4"}]
    assert due(bound) == []
    assert bound.why_not(bound.waiting[0]) == (
        "rendezvous_closed {cycle: 1, promoted: [$new]} never came; nearest: promoted: [n4], not [n9 ($new)]"
    )


def test_only_the_entry_that_counts_binds(write: Write) -> None:
    """With `times` a capture has the value of the last of these entries."""
    directs = director(write, "{when: {event: node_joined, node: $third, times: 3}, do: {kill_node: $third}}")
    for entry in ended().entries:
        directs.feed(entry)
    assert [resolved(fault.arguments, directs.bindings) for fault in directs.due(BEGIN + 60)] == [{"node": "n2"}]


def test_a_fault_whose_target_is_not_known_waits(write: Write) -> None:
    """A fault is not due before its captures have values."""
    (fault,) = faults(write, "{when: {event: node_joined}, do: {kill_node: $x}}", expect="'node_lost': {node: $x}")
    directs = FaultScheduler([fault])
    joined, *_, last = ended().entries[2:9]
    directs.feed(joined)
    assert (due(directs), directs.next_at()) == ([], None)
    assert directs.why_not(fault) == "$x had no value"
    directs.feed(last, {"x": "n1"})
    assert [resolved(fault.arguments, directs.bindings) for fault in directs.due(last.t)] == [{"node": "n1"}]


def test_unmet_conditions_are_named(write: Write) -> None:
    """The text for a fault that never happened names its unmet conditions."""
    directs = director(
        write,
        "{when: {event: node_joined, times: 7}, do: kill_store}",
        "{when: {state: pending}, do: kill_store}",
        "{when: {all: [{state: running}, {event: worker_hung}, {fault: 1}]}, do: kill_store}",
    )
    for entry in ended().entries:
        directs.feed(entry)
    assert [directs.why_not(fault) for fault in directs.waiting] == [
        "node_joined came 6 times of 7",
        "the job was never pending",
        "worker_hung never came; fault 1 had not happened",
    ]


def test_a_pending_job(write: Write) -> None:
    """This state is not in the journal: the caller reports it."""
    directs = director(write, "{when: {state: pending, after: 1s}, do: scancel}")
    directs.in_state(BEGIN, "pending")
    assert directs.next_at() == BEGIN + 1


# ---------------------------------------------------------------------------------------------------- states


def states(entries: Sequence[Entry]) -> list[str | None]:
    """The states that a job goes through by this journal."""
    view = JobView()
    told = [state_of(fold(view, entry)) for entry in entries]
    return [state for index, state in enumerate(told) if index == 0 or state != told[index - 1]]


def test_the_states_of_a_job() -> None:
    """They lead from the first rendezvous through a recovery to the end; in between the job is joining, or has no
    running workers."""
    met = [None, "running", "recovering", None, "running", None, "shutting_down", "ended"]
    assert states(ended().entries) == met


def test_a_job_runs_when_every_replica_does() -> None:
    """With several replicas the last one counts, and one that recovers makes the job recover."""
    recorder = Recorder(roles_plan())
    recorder.join()
    for replica in ("policy-0", "rollout-0", "rollout-1"):
        recorder.start_workers(replica)
    assert states(recorder.entries) == [None]
    recorder.start_workers("rollout-2")
    recorder.fail("n3", 0, replica="rollout-1", exit_code=1)
    assert states(recorder.entries) == [None, "running", "recovering"]


def test_a_replica_that_has_ended_does_not_keep_the_job_from_running() -> None:
    """A failed replica of a role with on_failure `ignore` does not count any more."""
    plan = roles_plan()
    ignored = RolePlan(name="rollout", command=("rollout",), replicas=3, on_failure="ignore")
    recorder = Recorder(type(plan)(name="rl", roles=(plan.roles[0], ignored), spares=1, workdir="/w", folder="/f"))
    recorder.join()
    for replica in ("policy-0", "rollout-0", "rollout-1"):
        recorder.start_workers(replica)
    recorder.fail("n3", 0, replica="rollout-1", exit_code=1)
    recorder.start_workers("rollout-2")
    assert states(recorder.entries) == [None, "running"]


def test_a_new_generation_starts_without_a_state() -> None:
    """After a requeue the job is running only when its workers run again."""
    recorder = to_first_cycle()
    recorder.tell(JobStarted(job="1", name="digits", expected=recorder.nodes, generation=1))
    assert states(recorder.entries) == [None, "running", None]
