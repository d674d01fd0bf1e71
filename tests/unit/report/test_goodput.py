"""How the time of a job's nodes was spent: three journals with sums made by hand, and thousands of generated ones."""

from __future__ import annotations

import inspect
from random import Random
from typing import get_args

import pytest

from nvrx_slurm.journal.records import (
    AnyRecord,
    AttributionJudged,
    ControllerStarted,
    Entry,
    JobEnded,
    JobResumed,
    JobStarted,
    JobSuspended,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReady,
    Progress,
    RendezvousClosed,
    RendezvousOpened,
    RestartedInProcess,
    Shutdown,
    WorkerFailed,
    WorkersDone,
    WorkersStarted,
)
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.report.fleet import JobSummary, add_up
from nvrx_slurm.report.goodput import OF_KIND, PARTS, Goodput, GoodputMeter
from nvrx_slurm.report.spans import Kind, Span
from nvrx_slurm.report.view import JobFold
from tests.unit.core.test_history import PLANS, Fleet, History
from tests.unit.report.recorder import Recorder, roles_plan, with_one_recovery

BEGIN = 1_790_000_000.0


def measured(journal: list[Entry], at: float | None = None) -> Goodput:
    meter = GoodputMeter()
    fold = JobFold(None, [meter])
    for entry in journal:
        fold.take(entry)
    return meter.result(fold.view, at)


def journal(*timed: tuple[float, AnyRecord]) -> list[Entry]:
    return [Entry(n=n, t=BEGIN + at, record=record) for n, (at, record) in enumerate(timed, 1)]


def seconds(goodput: Goodput) -> dict[str, float]:
    """The parts that are not zero, in seconds."""
    return {part: took / 1e6 for part, took in goodput.parts_us.items() if took}


_seq = iter(range(1, 1 << 30))


def agent(node: str, generation: int = 0) -> dict:
    return {"node": node, "incarnation": f"agent-of-{node}", "seq": next(_seq), "generation": generation}


def joined(node: str, generation: int = 0) -> NodeJoined:
    return NodeJoined(**agent(node, generation), addr="10.0.0.1", port=1)


def closed(cycle: int, *nodes: str, generation: int = 0, promoted: tuple[str, ...] = ()) -> RendezvousClosed:
    place = {
        "replica": "main-0",
        "cycle": cycle,
        "generation": generation,
        "master_addr": "10.0.0.1",
        "master_port": 2,
    }
    return RendezvousClosed(
        **place, nodes=nodes, promoted=promoted, active=len(nodes), standby=0, world_size=len(nodes)
    )


def at_work(kind: type, cycle: int, node: str, generation: int = 0, **more: object) -> AnyRecord:
    return kind(**agent(node, generation), replica="main-0", cycle=cycle, **more)


def test_a_job_without_a_fault() -> None:
    """Two nodes for 112 s: 100 s of steps each; the rest is joining, waiting for each other, start-up and the end."""
    goodput = measured(
        journal(
            (0, JobStarted(job="1", name="a", expected=("n0", "n1"))),
            (0, RendezvousOpened(replica="main-0", cycle=0)),
            (2, joined("n0")),
            (4, joined("n1")),
            (4, closed(0, "n0", "n1")),
            (5, at_work(WorkersStarted, 0, "n0", pids={0: 1})),
            (5, at_work(WorkersStarted, 0, "n1", pids={1: 1})),
            (10, at_work(Progress, 0, "n0", rank=0, step=1)),
            (10, at_work(Progress, 0, "n1", rank=1, step=1)),
            (110, at_work(WorkersDone, 0, "n0", step=100)),
            (110, at_work(WorkersDone, 0, "n1", step=100)),
            (110, Shutdown(exit_code=0, reason="done")),
            (112, NodeLeft(**agent("n0"), reason="done")),
            (112, JobEnded(exit_code=0, reason="done")),
            (113, NodeLeft(**agent("n1"), reason="done")),
        )
    )
    assert seconds(goodput) == {"joining": 6, "rendezvous": 2, "startup": 12, "new_steps": 200, "ending": 4}
    assert (goodput.total_us, goodput.ratio) == (224_000_000, 200 / 224)
    assert (goodput.steps_new, goodput.steps_repeated) == (100, 0)


def test_a_node_that_is_lost() -> None:
    """n1 freezes at 106 s and is given up at 110 s; n2, a standby node, takes its ranks; 40 of the steps of cycle 1
    repeat earlier ones, which is two fifths of its time."""
    goodput = measured(
        journal(
            (0, JobStarted(job="1", name="a", expected=("n0", "n1", "n2"))),
            (0, joined("n0")),
            (0, joined("n1")),
            (0, joined("n2")),
            (0, RendezvousOpened(replica="main-0", cycle=0)),
            (0, closed(0, "n0", "n1")),
            (1, at_work(WorkersStarted, 0, "n0", pids={0: 1})),
            (10, at_work(Progress, 0, "n0", rank=0, step=1)),
            (10, at_work(Progress, 0, "n1", rank=1, step=1)),
            (110, NodeLost(node="n1", incarnation="agent-of-n1", cause="heartbeat_timeout", step=99, silent_s=4.0)),
            (111, RendezvousOpened(replica="main-0", cycle=1)),
            (113, at_work(NodeReady, 1, "n0", port=1, step=100)),
            (114, closed(1, "n0", "n2", promoted=("n2",))),
            (115, at_work(WorkersStarted, 1, "n0", pids={0: 1})),
            (120, at_work(Progress, 1, "n0", rank=0, step=61)),
            (120, at_work(Progress, 1, "n2", rank=1, step=61)),
            (220, at_work(WorkersDone, 1, "n0", step=160)),
            (220, Shutdown(exit_code=0, reason="done")),
            (222, JobEnded(exit_code=0, reason="done")),
        )
    )
    assert seconds(goodput) == {
        "new_steps": 192 + 120,
        "repeated_steps": 80,
        "detection": 8,
        "decision": 1,
        "teardown": 2,
        "rendezvous": 1,
        "startup": 32,
        "standby": 114,
        "lost": 112,
        "ending": 4,
    }
    assert goodput.total_us == 3 * 222_000_000
    assert (goodput.steps_new, goodput.steps_repeated) == (160, 40)


def test_a_job_that_is_requeued_suspended_and_judged() -> None:
    """One node, whose workers report no steps, so no step counts as new. Between the generations the job is in the
    queue, Slurm suspends it once, and one rendezvous waits three seconds for a verdict."""
    goodput = measured(
        journal(
            (0, JobStarted(job="1", name="a", expected=("n0",))),
            (0, RendezvousOpened(replica="main-0", cycle=0)),
            (0, joined("n0")),
            (0, closed(0, "n0")),
            (2, at_work(WorkersStarted, 0, "n0", pids={0: 1})),
            (10, JobSuspended(incarnations=("agent-of-n0",))),
            (15, JobResumed(stood_still_s=5.0)),
            (20, Shutdown(exit_code=75, reason="preempted or requeued")),
            (22, JobEnded(exit_code=75, reason="preempted or requeued")),
            (52, JobStarted(job="1", name="a", expected=("n0",), generation=1)),
            (52, RendezvousOpened(replica="main-0", cycle=0, generation=1)),
            (52, joined("n0", 1)),
            (52, closed(0, "n0", generation=1)),
            (53, at_work(WorkersStarted, 0, "n0", 1, pids={0: 1})),
            (63, at_work(WorkerFailed, 0, "n0", 1, rank=0, exit_code=1)),
            (63, RendezvousOpened(replica="main-0", cycle=1, generation=1)),
            (64, at_work(NodeReady, 1, "n0", 1, port=1)),
            (
                68,
                AttributionJudged(
                    replica="main-0", cycle=0, generation=1, verdict=Verdict.RESTART, acted=True, why="", waited_s=3.0
                ),
            ),
            (68, closed(1, "n0", generation=1)),
            (69, at_work(WorkersStarted, 1, "n0", 1, pids={0: 1})),
            (79, at_work(WorkersDone, 1, "n0", 1)),
            (79, Shutdown(exit_code=0, reason="done")),
            (80, JobEnded(exit_code=0, reason="done")),
        )
    )
    assert seconds(goodput) == {
        "unreported": 33,
        "startup": 4,
        "suspended": 5,
        "teardown": 1,
        "rendezvous": 1,
        "decision": 3,
        "ending": 3,
        "queue": 30,
    }
    assert (goodput.total_us, goodput.ratio) == (80_000_000, None)


def test_a_generation_without_an_end_ends_with_its_last_entry() -> None:
    """The batch host was lost: the time after that is queue time, although the next controller's record precedes the
    next generation's."""
    goodput = measured(
        journal(
            (0, ControllerStarted(epoch=1, host="h", pid=1)),
            (0, JobStarted(job="1", name="a", expected=("n0",))),
            (0, RendezvousOpened(replica="main-0", cycle=0)),
            (1, joined("n0")),
            (1, closed(0, "n0")),
            (2, at_work(WorkersStarted, 0, "n0", pids={0: 1})),
            (10, at_work(Progress, 0, "n0", rank=0, step=1)),
            (310, ControllerStarted(epoch=2, host="h", pid=2)),
            (310, JobStarted(job="1", name="a", expected=("n0",), generation=1)),
        )
    )
    assert seconds(goodput)["queue"] == 300
    assert goodput.total_us == 310_000_000


def with_rollouts(*reporting: str) -> Goodput:
    """A policy and three rollouts run, and the replicas `reporting` report steps; then an hour passes."""
    recorder = Recorder(roles_plan())
    recorder.join()
    for replica in list(recorder.job.replicas):
        recorder.start_workers(replica)
    for replica in reporting:
        recorder.progress(1, replica)
    return measured(recorder.entries, recorder.now + 3600.0)


def test_workers_that_report_no_steps_are_not_judged() -> None:
    """The ratio counts only the others: two nodes of the policy make new steps, one node is a spare."""
    goodput = with_rollouts("policy-0")
    assert goodput.share("unreported") == pytest.approx(1 / 2, abs=0.01)
    assert goodput.ratio == pytest.approx(2 / 3, abs=0.01)
    assert with_rollouts().ratio is None


def test_jobs_without_steps_have_no_part_in_the_ratio_of_all() -> None:
    """The same holds for workers without steps in a job whose other workers report steps."""
    base = {"job": "1", "name": "a", "folder": "/", "began": BEGIN, "ended": BEGIN, "exit_code": None}
    jobs = [JobSummary(**base, goodput=with_rollouts(*reporting)) for reporting in ((), ("policy-0",))]
    fleet = add_up(jobs)
    assert fleet.goodput.ratio == jobs[1].goodput.ratio
    assert fleet.goodput.total_us == sum(job.goodput.total_us for job in jobs)
    assert add_up(jobs[:1]).goodput.ratio is None


def test_restarts_in_process_cost_what_they_took() -> None:
    """Two restarts of 3 s in a world of two nodes are 12 node-seconds without steps, and never more than the job
    has."""
    restart = InProcessRestart(cause="x", iteration=1, world_size=2, active_world_size=2, total_s=3.0)
    start = (
        (0, JobStarted(job="1", name="a", expected=("n0", "n1"))),
        (0, joined("n0")),
        (0, joined("n1")),
        (0, RendezvousOpened(replica="main-0", cycle=0)),
        (0, closed(0, "n0", "n1")),
        (0, at_work(Progress, 0, "n0", rank=0, step=1)),
        (0, at_work(Progress, 0, "n1", rank=1, step=1)),
    )
    told = (100, at_work(RestartedInProcess, 0, "n0", restart=restart, times=2))
    assert seconds(measured(journal(*start, told))) == {"in_process": 12, "new_steps": 188}
    often = (100, at_work(RestartedInProcess, 0, "n0", restart=restart, times=2000))
    assert seconds(measured(journal(*start, often))) == {"in_process": 200}


def test_a_job_that_goes_on_counts_up_to_the_moment_that_is_shown() -> None:
    """All six nodes are counted until now."""
    recorder = with_one_recovery()
    began, now = recorder.entries[0].t, recorder.now + 1000.0
    goodput = measured(recorder.entries, at=now)
    assert goodput.total_us == 6 * round((now - began) * 1e6)
    assert goodput.parts_us["new_steps"] + goodput.parts_us["repeated_steps"] > 4 * 1000 * 1_000_000


def test_every_part_has_words() -> None:
    """Each part has a description, for the tables; each kind of span has a part, for the sum."""
    assert all(part.words and part.meaning for part in PARTS.values())
    assert {OF_KIND.get(kind, kind) for kind in get_args(Kind)} - {"stepping", "unstepped"} < set(PARTS)
    assert set(OF_KIND) < set(get_args(Kind))


# ------------------------------------------------------------------------------------ arbitrary histories

RULES = [
    method
    for _, method in inspect.getmembers(History, inspect.isfunction)
    if hasattr(method, "hypothesis_stateful_rule")
]


def wandering(seed: int) -> list[Entry]:
    """The journal of one wandering fleet."""
    return wandering_fleet(seed).journal


def wandering_fleet(seed: int) -> Fleet:
    """A fleet in which anything happens in any order: the rules of `test_history`, drawn by a seed."""
    chance = Random(seed)
    machine = History()
    machine.watch(Fleet(chance.choice(PLANS)))
    for name in machine.fleet.names if chance.random() < 0.8 else ():
        machine.fleet.join(name)
    for _ in range(chance.randrange(10, 60)):
        rule = chance.choice(RULES)
        drawn = {
            "index": chance.randrange(6),
            "blamed": chance.randrange(6),
            "behind": chance.randrange(2),
            "back": chance.randrange(1, 3),
            "again": chance.randrange(5),
            "ahead": chance.choice([0, 0, 1, -1]),
            "step": chance.randrange(1, 30),
            "count": chance.randrange(1, 10),
            "longest": chance.random() * 9,
            "force": chance.random() < 0.5,
            "seconds": chance.choice([0.1, 3.0, 20.0, 700.0]),
            "reason": chance.choice(["cancel", "time_limit", "agents_gone"]),
            "rarely": chance.randrange(40),
            "source": "lib",
            "verdict": chance.choice(list(Verdict)),
        }
        rule(machine, **{name: drawn[name] for name in inspect.signature(rule).parameters if name != "self"})
    return machine.fleet


def held_us(entries: list[Entry]) -> int:
    """The same total, computed only from the start and the end of the job."""
    began, ended, nodes = entries[0].t, entries[-1].t, 0
    for entry in entries:
        if isinstance(entry.record, JobStarted):
            nodes = len(entry.record.expected)
        elif isinstance(entry.record, JobEnded):
            ended = entry.t
            break
    return nodes * (round(ended * 1e6) - round(began * 1e6))


@pytest.mark.parametrize("block", range(8))
def test_the_parts_add_up_in_every_history(block: int) -> None:
    """In 2,000 histories no part is negative, and the sum is the time for which the job had its nodes; the spans of
    each node follow each other without a gap."""
    for seed in range(block * 250, block * 250 + 250):
        entries = wandering(seed)
        spans: list[Span] = []
        meter = GoodputMeter(spans)
        fold = JobFold(None, [meter])
        for entry in entries:
            fold.take(entry)
        goodput = meter.result(fold.view)
        assert min(goodput.parts_us.values()) >= 0, seed
        assert sum(goodput.parts_us.values()) == goodput.total_us == held_us(entries), seed
        spans += meter.spans.pending()
        ends: dict[str, int] = {}
        for span in spans:
            assert ends.get(span.node, round(entries[0].t * 1e6)) == span.since_us < span.until_us, (seed, span)
            ends[span.node] = span.until_us
