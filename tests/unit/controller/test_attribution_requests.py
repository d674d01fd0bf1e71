"""What the broker is told, and when: a journal in, its words out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvrx_slurm.controller.attribution_requests import EARLIER, AttributionRequests
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.records import Attributed
from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry, Verdict, VerdictRecord
from nvrx_slurm.util.files import JobFiles
from tests.unit.core.fleet import Fleet, plain, plan_of

DRY = AttributionSpec(enable_lib=True, dry_run=True)
FILES = JobFiles(Path("/jobs/42"))


class Hears:
    """A broker that keeps what it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []
        self.whole: list[int] = []
        self.told: list[tuple[int, str]] = []

    def open(self) -> None: ...

    def ask(self, inquiry: Inquiry, *, settled: bool) -> None:
        self.asked.append((inquiry.key.cycle, settled))

    def settled(self, key: FailureKey) -> None:
        self.whole.append(key.cycle)

    def judged(self, judged: VerdictRecord) -> None:
        self.told.append((judged.key.cycle, judged.action))

    async def close(self, within_s: float) -> None: ...


class Led:
    """A fleet whose journal is followed as a controller does, commit by commit."""

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

    def hears(self, verdict: Verdict, cycle: int) -> None:
        answer: Any = Attribution(source="lib", verdict=verdict)
        self.fleet.tell(Attributed(replica="main-0", cycle=cycle, rank=0, attribution=answer))
        self.go_on()


def test_a_slow_source_is_heard_out_while_the_job_fails_on() -> None:
    """The broker is told what came of each failure, however many cycles later its answer comes, and of no other."""
    led = Led(plain(attribution=DRY, max_restarts=99))
    for _ in range(2 * EARLIER):
        led.fails()
    assert led.broker.told == []
    for cycle in range(2 * EARLIER):
        led.hears(Verdict.RESTART, cycle)
    assert led.broker.told == [(cycle, "restart_replica") for cycle in range(2 * EARLIER)]


def test_what_is_told_is_forgotten() -> None:
    """Jobs last for weeks."""
    led = Led(plain(attribution=DRY, max_restarts=99))
    for cycle in range(5 * EARLIER):
        led.fails()
        led.hears(Verdict.RESTART, cycle)
    assert len(led.requests._known) <= EARLIER + 1


def test_logs_are_whole_once_the_workers_are_gone() -> None:
    """Those of the cycle that failed: when the next rendezvous awaits nobody any more."""
    led = Led(plain(attribution=DRY))
    led.fails(and_comes_back=False)
    assert led.broker.asked == [(0, False)]
    led.fleet.ready("n1")
    led.go_on()
    assert led.broker.whole == []
    led.fleet.ready("n2")
    led.go_on()
    assert led.broker.whole == [0]


def test_logs_are_whole_where_no_round_follows() -> None:
    """A role whose failures are ignored: its nodes say that they are free."""
    ignored = RolePlan(name="main", command=("x",), nodes_per_replica=2, on_failure="ignore")
    led = Led(plan_of(ignored, RolePlan(name="other", command=("x",)), attribution=DRY))
    led.fleet.fail("n1")
    led.go_on()
    assert led.broker.asked == [(0, False)]
    led.fleet.ready("n1", "n2", cycle=1)
    led.go_on()
    assert led.broker.whole == [0]
