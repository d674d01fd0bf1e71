"""A journal becomes a flow: what is kept and what is left open, and that the flow is met by that journal."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.records import (
    ControllerStarted,
    JobStarted,
    NodeLost,
    Progress,
    Shutdown,
    SignalReason,
    WorkerFailed,
    WorkerHung,
    WorkersStarted,
)
from nvrx_slurm.lab.flow.load import load_flow
from nvrx_slurm.lab.flow.matching import FlowMatcher
from nvrx_slurm.lab.flow.model import Flow
from nvrx_slurm.lab.flow.recording import record
from nvrx_slurm.lab.flow.writing import NOTE, job_yaml, nice, to_yaml
from tests.unit.core.fleet import Fleet, plain, plan_of
from tests.unit.core.test_history import PLANS, History


def recorded(fleet: Fleet) -> dict:
    return record(fleet.plan, fleet.journal, job="job.yaml", about="Recorded.")


def at_work(plan: Plan | None = None) -> Fleet:
    """All nodes have joined, and the workers of every replica run."""
    fleet = Fleet(plan or plain())
    fleet.join(*fleet.names)
    for replica in fleet.job.replicas.values():
        begin(fleet, replica.id)
    return fleet


def begin(fleet: Fleet, replica_id: str = "main-0") -> None:
    """The workers of the replica's cycle start, with their pids and ranks."""
    replica = fleet.job.replicas[replica_id]
    for index, node in enumerate(replica.order):
        count = replica.role.workers_per_node
        pids = {rank: 100 + rank for rank in range(index * count, (index + 1) * count)}
        fleet.tell(WorkersStarted(**fleet.by(node), replica=replica_id, cycle=replica.cycle, pids=pids))


def worker(fleet: Fleet, node: str, rank: int, *, step: int | None = None, **how: object) -> None:
    """A worker of the running cycle ends."""
    of = {"replica": "main-0", "cycle": fleet.job.replicas["main-0"].cycle, "rank": rank, "step": step}
    fleet.tell(WorkerFailed(**fleet.by(node), **of, **how))


def finish(fleet: Fleet) -> Fleet:
    """All remaining workers are done, and all nodes leave."""
    for replica in fleet.job.replicas.values():
        fleet.done(*replica.order, replica=replica.id)
    fleet.leave(*[name for name in fleet.names if fleet.job.nodes[name].alive])
    assert fleet.job.ended
    return fleet


def without_notes(item: object) -> object:
    if isinstance(item, dict):
        return {key: without_notes(value) for key, value in item.items() if key != NOTE}
    return [without_notes(each) for each in item] if isinstance(item, list) else item


def faults(fleet: Fleet) -> object:
    return without_notes(recorded(fleet)["faults"])


def expected(fleet: Fleet) -> object:
    return without_notes(recorded(fleet)["expect"])


ALL_JOINED = {"event": "node_joined", "times": 3}
ENDING = [{"shutdown": {"exit_code": 0}}, {"job_ended": {"exit_code": 0}}]


def test_killed_node():
    """A node whose connection broke is killed again, at the step that it had reported; a capture names the lost
    node."""
    fleet = at_work()
    fleet.tell(NodeLost(node="n2", incarnation="n2.0", cause="connection_closed", step=7))
    fleet.ready("n1")
    begin(fleet)
    finish(fleet)
    assert faults(fleet) == [
        {
            "when": {"all": [{"event": "progress", "cycle": 0, "rank": 2, "step": 7}, ALL_JOINED]},
            "do": {"kill_node": {"of_rank": 2}},
            "as": "$dead1",
        }
    ]
    assert expected(fleet) == [
        {"rendezvous_closed": {"cycle": 0, "active": 2}},
        {
            "any_order": [
                {"node_lost": {"node": "$dead1"}},
                {"restart_decided": {"cycle": 0, "action": "restart_replica"}},
            ]
        },
        {"rendezvous_closed": {"cycle": 1, "active": 2, "standby": 0, "promoted": ["$spare1"]}},
        {"workers_started": {"node": "$spare1", "cycle": 1}},
        {"never": {"workers_started": {"node": "$dead1"}}},
        {"recovered": {"cycle": 1}, "within": "15s"},
        {"replica_ended": {"cycle": 1, "outcome": "done"}},
        *ENDING,
    ]


def test_killed_worker():
    """The worker gets SIGKILL again; the first one reported is left open, since the peers of a dead rank fail too."""
    fleet = at_work()
    worker(fleet, "n1", 1, signal=9, step=12)
    fleet.ready("n1", "n2")
    begin(fleet)
    finish(fleet)
    assert faults(fleet) == [
        {
            "when": {"all": [{"event": "progress", "cycle": 0, "rank": 1, "step": 12}, ALL_JOINED]},
            "do": {"kill_worker": 1},
        }
    ]
    assert expected(fleet)[1:3] == [
        {"worker_failed": {"cycle": 0}},
        {"restart_decided": {"cycle": 0, "action": "restart_replica"}},
    ]


def test_worker_that_fails_by_itself():
    """An exit code is caused by the workload: it is no fault, is expected again, and a comment says so."""
    fleet = at_work(plain(max_restarts=1))
    for _ in range(2):
        worker(fleet, "n1", 0, exit_code=3)
        fleet.ready("n1", "n2")
        begin(fleet)
    fleet.leave("n1", "n2", "n3")
    document = recorded(fleet)
    assert "faults" not in document
    assert document["expect"][1][NOTE] == "By itself: rank 0, exit code 3. It must do so again."
    assert expected(fleet)[1:] == [
        {"worker_failed": {"cycle": 0}},
        {"restart_decided": {"cycle": 0, "action": "restart_replica"}},
        {"rendezvous_closed": {"cycle": 1, "active": 2, "standby": 1}},
        # `recovered` is left open: the worker fails at once, perhaps before all others have started
        {"worker_failed": {"cycle": 1}},
        {"restart_decided": {"cycle": 1, "action": "stop"}},
        {"shutdown": {"exit_code": 1}},
        {"job_ended": {"exit_code": 1}},
    ]


def test_hung_worker():
    """A hang is made by stopping the worker; a comment says what to do if it hangs by itself."""
    fleet = at_work()
    fleet.tell(WorkerHung(**fleet.by("n2"), replica="main-0", cycle=0, rank=3, why="no step for 9 s", step=5))
    (fault,) = recorded(fleet)["faults"]
    assert fault["do"] == {"stop_worker": 3}
    assert "take this fault out if the workers do so by themselves" in fault[NOTE]


def test_frozen_node_that_comes_back():
    """A silent node is frozen; if it came back, it is restored after the others have recovered."""
    fleet = at_work()
    fleet.lose("n1", safe_after_s=20.0)
    fleet.ready("n2")
    fleet.prove_dead("n1")
    begin(fleet)
    fleet.rejoin("n1")
    finish(fleet)
    frozen, restored = faults(fleet)
    assert (frozen["do"], frozen["as"]) == ({"stop_node": {"of_rank": 0}}, "$dead1")
    assert restored["do"] == {"restore_node": "$dead1"}
    assert {"event": "recovered", "cycle": 1} in restored["when"]["all"]
    # A node that returns may be a spare already when the rendezvous closes, or not yet.
    assert expected(fleet)[0]["any_order"][1] == {"node_joined": {"node": "$dead1"}}


def test_dead_spare():
    """A spare is named by its place in the pool, and its loss may come in any order with other events."""
    fleet = at_work(plain(nodes=2, spares=2))
    fleet.lose("n4")
    finish(fleet)
    (fault,) = faults(fleet)
    assert fault["do"] == {"kill_node": {"spare": 2}}
    assert expected(fleet)[0]["any_order"][1] == {"node_lost": {"node": "$dead1"}}


def test_two_nodes_at_once():
    """When a second node dies during the recovery from the first, there may be one cycle or two: the flow accepts
    both."""
    fleet = at_work(plain(nodes=3, spares=2))
    fleet.lose("n1")
    fleet.lose("n2")
    fleet.ready("n3")
    begin(fleet)
    finish(fleet)
    assert faults(fleet)[1]["when"] == {"fault": 1}
    assert expected(fleet)[1:] == [
        {
            "any_order": [
                {"node_lost": {"node": "$dead1"}},
                {"node_lost": {"node": "$dead2"}},
                {"restart_decided": {"cycle": ">= 0", "action": "restart_replica"}},
            ]
        },
        {"rendezvous_closed": {"cycle": ">= 1", "active": 3, "standby": 0}},
        {"recovered": {"cycle": ">= 1"}, "within": "15s"},
        {"replica_ended": {"cycle": ">= 1", "outcome": "done"}},
        *ENDING,
    ]


def test_second_fault_waits_for_the_first_recovery():
    """Faults keep their order, and each waits for the recoveries that had come before it."""
    policy = RolePlan(name="policy", command=("x",), nodes_per_replica=2)
    rollout = RolePlan(name="rollout", command=("x",), replicas=2)
    fleet = at_work(plan_of(policy, rollout, spares=2))
    fleet.lose("n3")
    begin(fleet, "rollout-0")
    fleet.lose("n4")
    assert faults(fleet)[1]["when"] == {
        "all": [
            {"event": "workers_started", "replica": "rollout-1", "cycle": 0, "times": 1},
            {"event": "recovered", "replica": "rollout-0", "cycle": 1},
            {"fault": 1},
        ]
    }


def test_replicas_come_in_any_order():
    """The events of several replicas may come in any order, those of one replica in its own."""
    fleet = finish(at_work(plan_of(RolePlan(name="rollout", command=("x",), replicas=2))))
    assert expected(fleet) == [
        {
            "any_order": [
                [
                    {"rendezvous_closed": {"replica": replica, "cycle": 0, "nodes": {"length": 1}}},
                    {"replica_ended": {"replica": replica, "cycle": 0, "outcome": "done"}},
                ]
                for replica in ("rollout-0", "rollout-1")
            ]
        },
        *ENDING,
    ]


def test_cancelled_job():
    """The job is cancelled again when it has come as far."""
    fleet = at_work()
    fleet.tell(Progress(**fleet.by("n1"), replica="main-0", cycle=0, rank=0, step=4))
    fleet.signal("cancel")
    fleet.leave("n1", "n2", "n3")
    assert faults(fleet) == [
        {
            "when": {"all": [{"event": "progress", "cycle": 0, "rank": 0, "step": 4}, ALL_JOINED]},
            "do": {"scancel": {}},
        }
    ]


@pytest.mark.parametrize("reason", get_args(SignalReason))
def test_each_end_from_outside_has_a_cause(reason):
    """A flow that expects such an end without a cause could never pass."""
    fleet = at_work()
    fleet.signal(reason)
    fleet.leave("n1", "n2", "n3")
    document = recorded(fleet)
    assert document.get("faults") or "must" in document[NOTE]


def test_workers_that_slurm_signalled_first():
    """scancel also sends SIGTERM to the workers: one that dies of it before the job is signalled is no failure."""
    fleet = at_work()
    worker(fleet, "n1", 0, signal=15)
    fleet.signal("cancel")
    fleet.leave("n1", "n2", "n3")
    assert expected(fleet) == [
        {"rendezvous_closed": {"cycle": 0, "active": 2}},
        {"shutdown": {"exit_code": 143}},
        {"job_ended": {"exit_code": 143}},
    ]
    assert faults(fleet)[0]["when"]["all"][0] == {"event": "workers_started", "cycle": 0, "times": 2}


def test_killed_controller():
    """If another controller started in the same generation, the one before was killed."""
    fleet = at_work()
    fleet.tell(ControllerStarted(epoch=2, host="h", pid=9))
    finish(fleet)
    assert faults(fleet)[0]["do"] == {"kill_controller": {}}
    assert {"controller_started": {"epoch": ">= 2"}} in expected(fleet)[0]["any_order"]


@pytest.mark.parametrize("was_told", ["cancel", "preempted", None])
def test_next_generation(was_told):
    """A job that ran again was requeued; without a signal before that, its batch host was lost."""
    fleet = at_work()
    if was_told:
        fleet.signal(was_told)
        fleet.leave("n1", "n2", "n3")
    fleet.tell(ControllerStarted(epoch=2, host="h", pid=9))
    fleet.tell(JobStarted(job="1", name="t", expected=fleet.names, generation=1))
    document = recorded(fleet)
    lost, released = document["faults"]
    assert lost["do"] == ({"requeue": {}} if was_told else {"kill_node": {"batch_host": True}})
    assert released["do"] == {"release": {}}
    assert document[NOTE] == ""
    assert document["expect"][-1] == {"job_started": {"generation": 1}}
    assert document.get("cluster") == (None if was_told else {"nodes": 4})


def test_job_without_an_end():
    """Without an end, the flow has no `never`: it would wait for that until its time limit."""
    fleet = at_work()
    fleet.lose("n2")
    fleet.ready("n1")
    begin(fleet)
    assert not any("never" in item for item in expected(fleet))


@pytest.mark.parametrize(("seconds", "bound"), [(0.1, 1), (31, 45), (61, 90), (3601, 7200)])
def test_bounds_are_round(seconds, bound):
    """Bounds are rounded to durations that people write."""
    assert nice(seconds) == bound


def loaded(fleet: Fleet, folder: Path) -> Flow:
    plan = msgspec.structs.replace(fleet.plan, workdir=str(folder))
    (folder / "job.yaml").write_text(job_yaml(plan, "Recorded."))
    (folder / "flow.yaml").write_text(to_yaml(recorded(fleet)))
    return load_flow(folder / "flow.yaml")


def lost_in_order(fleet: Fleet) -> list[str]:
    """The nodes that were lost before the job's shutdown."""
    lost: list[str] = []
    for entry in fleet.journal:
        if isinstance(entry.record, Shutdown):
            break
        lost += [entry.record.node] if isinstance(entry.record, NodeLost) else []
    return lost


class RecordedHistory(History):
    """For any history the recorded flow can be loaded, and is met by its own journal."""

    @initialize(plan=st.sampled_from(PLANS))
    def start(self, plan):
        self.watch(at_work(plan))

    def teardown(self):
        if not recorded(self.fleet)["expect"]:
            return
        with tempfile.TemporaryDirectory() as folder:
            flow = loaded(self.fleet, Path(folder))
        matcher, lost = FlowMatcher(flow), iter(lost_in_order(self.fleet))
        for fault in flow.faults:
            names = fault.binds is not None
            matcher.fault_happened(self.fleet.journal[0].t, {fault.binds: next(lost)} if names else {})
        for entry in self.fleet.journal:
            matcher.feed(entry)
        matcher.job_over()
        assert matcher.miss is None, (matcher.miss, to_yaml(recorded(self.fleet)))


TestRecordedHistory = RecordedHistory.TestCase
TestRecordedHistory.settings = settings(max_examples=40, stateful_step_count=20)
