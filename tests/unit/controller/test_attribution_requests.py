"""What the controller sends to its broker, and when: a journal in, messages out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.controller.attribution_requests import EARLIER, AttributionRequests
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.records import Attributed, LogFindings, RestartAsked, WorkerFailed, WorkerHung, WorkersStarted
from nvrx_slurm.journal.verdicts import (
    MOST_FINDINGS_BYTES,
    AgentFindings,
    Attribution,
    Failed,
    FailureKey,
    Inquiry,
    Scope,
    Verdict,
    VerdictRecord,
)
from nvrx_slurm.util.files import JobFiles
from tests.unit.core.fleet import Fleet, plain, plan_of

DRY = AttributionSpec(enable_lib=True, dry_run=True)
ACTS = AttributionSpec(enable_lib=True, dry_run=False, decision_timeout=10.0)
FILES = JobFiles(Path("/jobs/42"))


class Hears:
    """A broker that records what it receives."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []
        self.whole: list[int] = []
        self.told: list[tuple[int, str]] = []
        self.inquiries: list[Inquiry] = []
        self.verdicts: list[VerdictRecord] = []
        self.findings: list[AgentFindings] = []

    def open(self) -> None: ...

    def ask(self, inquiry: Inquiry, *, settled: bool) -> None:
        self.asked.append((inquiry.key.cycle, settled))
        self.inquiries.append(inquiry)

    def settled(self, key: FailureKey) -> None:
        self.whole.append(key.cycle)

    def found(self, findings: AgentFindings) -> None:
        self.findings.append(findings)

    def judged(self, judged: VerdictRecord) -> None:
        self.told.append((judged.key.cycle, judged.action))
        self.verdicts.append(judged)

    async def close(self, within_s: float) -> None: ...


class Led:
    """A fleet whose journal is followed commit by commit, as a controller does."""

    def __init__(self, plan: Plan) -> None:
        self.fleet, self.broker, self._noted = Fleet(plan), Hears(), 0
        self.requests = AttributionRequests(self.fleet.job, FILES, self.broker)
        self.fleet.join(*self.fleet.names)
        self.go_on()

    def go_on(self) -> None:
        for entry in self.fleet.journal[self._noted :]:
            self.requests.note(entry.record, entry.t)
        self._noted = len(self.fleet.journal)
        self.requests.go_on()

    def fails(self, *, and_comes_back: bool = True) -> None:
        self.fleet.fail("n1")
        self.go_on()
        if and_comes_back:
            self.fleet.ready("n1", "n2")
            self.go_on()

    def hears(self, verdict: Verdict, cycle: int, *, rank: int = 0) -> None:
        answer: Any = Attribution(source="lib", verdict=verdict)
        generation = self.fleet.generation
        self.fleet.tell(
            Attributed(replica="main-0", cycle=cycle, rank=rank, generation=generation, attribution=answer)
        )
        self.go_on()


def test_a_slow_source_may_answer_while_the_job_fails_again() -> None:
    """The broker receives the outcome of each failure, however many cycles later its answer comes, and no other
    outcome."""
    led = Led(plain(attribution=DRY, max_restarts=99))
    for _ in range(2 * EARLIER):
        led.fails()
    assert led.broker.told == []
    for cycle in range(2 * EARLIER):
        led.hears(Verdict.RESTART, cycle)
    assert led.broker.told == [(cycle, "restart_replica") for cycle in range(2 * EARLIER)]


def test_what_was_reported_is_forgotten() -> None:
    """Jobs last for weeks, so memory is bounded."""
    led = Led(plain(attribution=DRY, max_restarts=99))
    for cycle in range(5 * EARLIER):
        led.fails()
        led.hears(Verdict.RESTART, cycle)
    assert len(led.requests._known) == EARLIER + 1


def test_cycles_that_users_ended_are_forgotten_too() -> None:
    led = Led(plain(attribution=DRY))
    for cycle in range(3 * EARLIER):
        led.fleet.tell(RestartAsked(request=f"r{cycle}", by="ada", cycles={"main-0": cycle}))
        led.fleet.ready("n1", "n2")
        led.go_on()
    assert len(led.requests._known) == EARLIER + 1
    assert led.broker.asked == []


def test_logs_are_whole_once_the_workers_are_gone() -> None:
    """The logs of the failed cycle are complete when the next rendezvous waits for no node any more."""
    led = Led(plain(attribution=DRY))
    led.fails(and_comes_back=False)
    assert led.broker.asked == [(0, False)]
    led.fleet.ready("n1")
    led.go_on()
    assert led.broker.whole == []
    led.fleet.ready("n2")
    for _ in range(2):
        led.go_on()
        assert led.broker.whole == [0]


def test_logs_are_whole_while_the_rendezvous_waits_for_the_verdict() -> None:
    """The rendezvous is open, and waits for no node any more."""
    led = Led(plain(attribution=ACTS))
    led.fails()
    assert (led.broker.asked, led.broker.whole) == ([(0, False)], [0])


def test_logs_are_whole_where_no_rendezvous_follows() -> None:
    """The nodes of a role whose failures are ignored report that their workers are gone."""
    ignored = RolePlan(name="main", command=("x",), nodes_per_replica=2, on_failure="ignore")
    led = Led(plan_of(ignored, RolePlan(name="other", command=("x",)), attribution=DRY))
    led.fleet.fail("n1")
    led.go_on()
    assert led.broker.asked == [(0, False)]
    led.fleet.ready("n1", "n2", cycle=1)
    led.go_on()
    assert led.broker.whole == [0]


def crash(led: Led, cycle: int) -> None:
    """Rank 3, on n2, fails after its workers have started."""
    fleet = led.fleet
    fleet.tell(WorkersStarted(**fleet.by("n1"), replica="main-0", cycle=cycle, pids={0: 10, 1: 11}))
    fleet.tell(WorkersStarted(**fleet.by("n2"), replica="main-0", cycle=cycle, pids={2: 12, 3: 13}))
    fleet.now += 5.0
    fleet.tell(
        WorkerFailed(
            **fleet.by("n2"), replica="main-0", cycle=cycle, rank=3, exit_code=7, error="E: x", step=41, ago_s=0.5
        )
    )
    led.go_on()


def key(cycle: int, rank: int | None = 3) -> FailureKey:
    return FailureKey(job=str(FILES.path), generation=1, replica="main-0", cycle=cycle, rank=rank)


def logs(cycle: int) -> str:
    return str(FILES.cycle_logs("main-0", 1, cycle))


def requeued() -> Led:
    led = Led(plain(attribution=DRY, max_restarts=99))
    led.fleet.tell(WorkersStarted(**led.fleet.by("n1"), replica="main-0", cycle=0, pids={9: 9}))
    led.go_on()
    led.fleet.requeue()
    led.fleet.join(*led.fleet.names)
    led.go_on()
    return led


def test_an_inquiry_has_all_that_the_journal_has_about_a_failure() -> None:
    """The failure is in the second generation and the second cycle; a lost node has no rank and no exit code."""
    led = requeued()
    led.fails()
    started_at = led.fleet.now
    crash(led, 1)
    cause = "rank 3 on n2 failed: E: x"
    about: dict[str, Any] = {"cause": cause, "node": "n2", "rank": 3, "exit_code": 7, "error": "E: x", "step": 41}
    whole: dict[str, Any] = {"nodes": ("n1", "n2"), "workers_per_node": 2, "started_at": started_at}
    assert led.broker.inquiries[-1] == Inquiry(
        key=key(1),
        paths=(logs(1),),
        failed=Failed(**about, signal=None, hung=False, t=led.fleet.now - 0.5),
        pids={0: 10, 1: 11, 2: 12, 3: 13},
        earlier=(logs(0),),
        **whole,
    )
    led.fleet.ready("n1", "n2")
    led.fleet.lose("n1")
    led.go_on()
    lost = Failed(cause="n1 lost: connection to its agent closed", node="n1", t=led.fleet.now)
    assert led.broker.inquiries[-1] == Inquiry(
        key=key(2, None),
        paths=(logs(2),),
        failed=lost,
        earlier=(logs(1), logs(0)),
        **{**whole, "started_at": led.fleet.now},
    )


def test_a_signal_and_a_hang_are_reported_as_such() -> None:
    led = requeued()
    about: dict[str, Any] = {"replica": "main-0", "rank": 3}
    led.fleet.tell(WorkerFailed(**led.fleet.by("n2"), **about, cycle=0, signal=9))
    led.go_on()
    led.fleet.ready("n1", "n2")
    led.fleet.tell(WorkerHung(**led.fleet.by("n2"), **about, cycle=1, why="no step"))
    led.go_on()
    told = [inquiry.failed for inquiry in led.broker.inquiries]
    at = led.fleet.now
    assert told == [
        Failed(cause="rank 3 on n2 was killed by SIGKILL", node="n2", rank=3, signal=9, t=at),
        Failed(cause="rank 3 on n2 hung: no step", node="n2", rank=3, hung=True, t=at),
    ]


def test_a_verdict_that_ends_the_job_and_one_that_the_end_overtakes() -> None:
    """No restart follows either failure."""
    led = Led(plain(attribution=ACTS))
    led.fails()
    led.hears(Verdict.STOP, 0)
    assert [(each.acted, each.action) for each in led.broker.verdicts] == [(True, "stop")]
    led = Led(plain(attribution=ACTS))
    led.fails()
    led.fleet.signal("cancel")
    led.fleet.leave(*led.fleet.names)
    led.go_on()
    assert [(each.acted, each.action) for each in led.broker.verdicts] == [(False, "stop")]


def test_no_more_than_the_last_cycles_are_named() -> None:
    led = requeued()
    for _ in range(2 * EARLIER):
        led.fails()
    assert led.broker.inquiries[-1].earlier == tuple(logs(cycle) for cycle in range(2 * EARLIER - 2, EARLIER - 2, -1))


def test_what_came_of_a_failure_is_reported_as_a_whole() -> None:
    led = requeued()
    crash(led, 0)
    answer = Attribution(source="lib", verdict=Verdict.STOP, scope=Scope.NODE, nodes=("n2",), confidence=0.9)
    led.fleet.tell(Attributed(replica="main-0", cycle=0, rank=3, generation=1, attribution=answer))
    led.go_on()
    assert led.broker.verdicts == [
        VerdictRecord(
            key=key(0),
            verdict=Verdict.STOP,
            acted=False,
            why="dry run; lib: STOP",
            action="restart_replica",
            nodes_blamed=("n2",),
            dry_run=True,
        )
    ]
    led.go_on()
    assert len(led.broker.verdicts) == 1


def test_a_new_controller_asks_again_what_is_open_and_nothing_else() -> None:
    """What was judged is not reported again; what was asked is asked in the same words."""
    led = requeued()
    crash(led, 0)
    led.hears(Verdict.RESTART, 0, rank=3)
    led.fleet.ready("n1", "n2")
    crash(led, 1)
    broker = Hears()
    requests = AttributionRequests(led.fleet.job, FILES, broker)
    requests.replayed((entry.record, entry.t) for entry in led.fleet.journal)
    requests.go_on()
    assert broker.inquiries == led.broker.inquiries[-1:]
    assert (broker.asked, broker.told) == ([(1, False)], [])


def test_a_new_controller_does_not_ask_about_a_symptom() -> None:
    """In a dry run no source is asked about a lost connection before its cause is known."""
    led = Led(plain(attribution=DRY))
    lost = {"exit_code": 1, "error": "R: reset", "peer_lost": True}
    led.fleet.tell(WorkerFailed(**led.fleet.by("n2"), replica="main-0", cycle=0, rank=1, **lost))
    led.go_on()
    broker = Hears()
    requests = AttributionRequests(led.fleet.job, FILES, broker)
    requests.replayed((entry.record, entry.t) for entry in led.fleet.journal)
    requests.go_on()
    assert broker.asked == led.broker.asked == []


def findings(led: Led, **other: Any) -> LogFindings:
    """Findings of n1 about the cycle that failed."""
    node = led.fleet.job.nodes["n1"]
    fields: dict[str, Any] = {
        "node": "n1",
        "incarnation": node.incarnation,
        "seq": 0,
        "replica": "main-0",
        "cycle": 0,
        "whole": True,
        "data": b"found",
    }
    return LogFindings(**{**fields, **other})


def test_what_an_agent_has_found_is_passed_on() -> None:
    """Findings are passed on under the cycle's folder, as the inquiry names it, and as often as they arrive."""
    led = Led(plain(attribution=ACTS))
    led.fails(and_comes_back=False)
    for whole in (False, True, True):
        led.requests.found(findings(led, whole=whole))
    (folder,) = led.broker.inquiries[0].paths
    assert led.broker.findings == [
        AgentFindings(folder=folder, node="n1", whole=whole, data=b"found") for whole in (False, True, True)
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"node": "n9"},
        {"incarnation": "before"},
        {"generation": 1},
        {"replica": "other-0"},
        {"cycle": 1},
        {"data": b"x" * (MOST_FINDINGS_BYTES + 1)},
    ],
)
def test_findings_that_were_not_asked_for_are_dropped(other: dict[str, Any]) -> None:
    """Their node, agent, generation, replica or cycle has no open inquiry, or they are too long."""
    led = Led(plain(attribution=ACTS))
    led.fails(and_comes_back=False)
    led.requests.found(findings(led, **other))
    assert led.broker.findings == []


def test_findings_of_a_fenced_node_are_dropped() -> None:
    """The node was given up, so what its agent sends later does not count. Its logs are in the shared folder."""
    led = Led(plain(attribution=ACTS))
    led.fails(and_comes_back=False)
    late = findings(led)
    led.fleet.lose("n1")
    led.go_on()
    led.requests.found(late)
    assert led.broker.findings == []
