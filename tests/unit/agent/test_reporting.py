"""What the agent reports to the controller: restarts in process, combined if they are too frequent, and how workers
end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_slurm.agent.events import Cycle, Done, Failing
from nvrx_slurm.agent.reporting import OUR_SIGNAL_S, RESTARTS_AT_ONCE, RESTARTS_EVERY_S, Reporting
from nvrx_slurm.agent.workers import Exited
from nvrx_slurm.journal.records import Assignment, RestartedInProcess, WorkerFailed, WorkersDone
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.lab.simulation.loop import VirtualLoop

ASSIGNMENT = Assignment(
    group_rank=0,
    first_rank=0,
    workers=1,
    world_size=1,
    group_world_size=1,
    master_addr="h",
    master_port=1,
    role="main",
)


class KeepingPublisher:
    """A publisher that keeps its facts."""

    def __init__(self) -> None:
        self.facts: list[Any] = []

    def publish(self, kind: type[Any], **fields: Any) -> None:
        self.facts.append(kind(node="n1", incarnation="i", seq=1, **fields))


def restart(iteration: int) -> InProcessRestart:
    return InProcessRestart(cause="c", iteration=iteration, world_size=1, active_world_size=1, total_s=0.01)


def told_of(storms: list[float]) -> list[RestartedInProcess]:
    """The facts published for one cycle's restarts; `storms`: for each restart, the seconds since the one before."""
    loop, told = VirtualLoop(), KeepingPublisher()
    nothing: Any = None
    reporting = Reporting(
        told,  # type: ignore[arg-type]
        board=nothing,
        watch=nothing,
        output=nothing,
        clock=nothing,
        post=nothing,
        shares_signals=False,
    )
    cycle = Cycle("main-0", 3, ASSIGNMENT, began=0.0)

    async def happen() -> None:
        for iteration, after_s in enumerate(storms, 1):
            await asyncio.sleep(after_s)
            reporting.restarted(cycle, restart(iteration))
        await asyncio.sleep(2 * RESTARTS_EVERY_S)

    loop.run_until_complete(happen())
    loop.close()
    return told.facts


def test_restarts_are_reported_one_by_one_at_first() -> None:
    """The first restarts are reported one by one, each with its iteration and its cycle."""
    facts = told_of([0.01] * RESTARTS_AT_ONCE)
    assert [(fact.cycle, fact.restart.iteration, fact.times) for fact in facts] == [
        (3, iteration, 1) for iteration in range(1, RESTARTS_AT_ONCE + 1)
    ]


@pytest.mark.parametrize(("every_s", "count"), [(0.01, 5_000), (RESTARTS_EVERY_S / 4, 100)])
def test_a_function_that_fails_at_once_does_not_fill_the_journal(every_s: float, count: int) -> None:
    """Frequent restarts are combined into few facts: every restart is counted once, and a fact describes the newest
    of them."""
    facts = told_of([every_s] * count)
    assert sum(fact.times for fact in facts) == count
    assert facts[-1].restart.iteration == count
    assert len(facts) <= RESTARTS_AT_ONCE + count * every_s / RESTARTS_EVERY_S + 2


class Ends:
    """One cycle of two ranks, whose workers end."""

    def __init__(self, printed: str = "", recorded: str | None = None, *, on_slurm: bool = False) -> None:
        self.loop, self.kept, self.posted = VirtualLoop(), KeepingPublisher(), list[Any]()
        board = SimpleNamespace(steps=dict, recorded_error=lambda rank: recorded)
        watch = SimpleNamespace(ended=lambda rank, well: None, news=dict)
        output = SimpleNamespace(last_lines=lambda rank: printed)
        clock = SimpleNamespace(monotonic=lambda: 10.0)
        self.reporting = Reporting(
            self.kept,  # type: ignore[arg-type]
            board=board,  # type: ignore[arg-type]
            watch=watch,  # type: ignore[arg-type]
            output=output,  # type: ignore[arg-type]
            clock=clock,  # type: ignore[arg-type]
            post=self.posted.append,
            shares_signals=on_slurm,
        )
        self.cycle = Cycle("main-0", 3, ASSIGNMENT, began=1.0, pids={0: 70, 1: 71}, running={0, 1})

    def exited(self, *, restarting: bool = True, **how: Any) -> list[WorkerFailed]:
        """Rank 0 ends; returns the facts that the controller gets about it."""

        async def end() -> None:
            event = Exited(rank=0, at=9.5, **how)
            self.reporting.exited(self.cycle, event, at_work=not restarting, restarting=restarting)

        self.loop.run_until_complete(end())
        return self.kept.facts


TERM, KILL = frozenset({15}), frozenset({15, 9})
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:589] Connection closed by peer [n1]"


@pytest.mark.parametrize(
    ("how", "is_told"),
    [
        ({"signal": 9, "sent": frozenset()}, True),
        ({"signal": 9, "sent": TERM}, True),  # another process sent it, perhaps the out-of-memory killer
        ({"signal": 9, "sent": KILL}, False),
        ({"signal": 11, "sent": frozenset()}, True),
        ({"signal": 11, "sent": TERM}, False),  # it was already ending as asked
        ({"signal": 15, "sent": TERM}, False),
        ({"code": 1, "sent": frozenset()}, True),
        ({"code": 1, "sent": TERM}, False),
        ({"code": 0, "sent": frozenset()}, False),
    ],
)
def test_end_within_a_teardown_is_reported_if_the_agent_did_not_cause_it(how, is_told):
    """An end during a teardown is reported, with the moment at which the supervisor reaped the worker, unless the
    agent caused it."""
    facts = Ends().exited(**how)
    assert [(fact.rank, fact.signal, fact.ago_s) for fact in facts] == [(0, how.get("signal"), 0.5)] * is_told


def test_death_by_sigterm_is_reported_before_the_node_is_ready():
    """While a rendezvous is open, a death by SIGTERM is reported without asking whether the job ends, unless the
    agent asked the worker to end."""
    ends = Ends()
    assert ends.exited(signal=15) == []
    ends.reporting.terminated(ends.cycle)
    assert [(fact.signal, fact.ago_s) for fact in ends.kept.facts] == [(15, 0.5)]
    ends.reporting.terminated(ends.cycle)
    assert len(ends.kept.facts) == 1


@pytest.mark.parametrize("on_slurm", [False, True])
def test_workers_are_done_once_no_signal_can_have_ended_them(on_slurm):
    """On Slurm the agent delays `workers_done` until it knows whether it was signalled too: Slurm signals workers and
    agent at once."""
    ends = Ends(on_slurm=on_slurm)
    ends.cycle.running = {0}
    facts = list(ends.exited(restarting=False, code=0, sent=frozenset()))
    assert [type(fact) for fact in facts] == [WorkersDone] * (not on_slurm)
    ends.loop.run_until_complete(asyncio.sleep(OUR_SIGNAL_S))
    assert ends.posted == [Done(ends.cycle)] * on_slurm


@pytest.mark.parametrize("how", [{"code": 1}, {"signal": 6}])
def test_lost_peer_is_known_by_the_last_lines(how):
    """If a worker's exception was not reported, its last lines show a lost peer; a signal of its own, such as
    SIGSEGV, is reported as usual."""
    assert [fact.peer_lost for fact in Ends(RESET).exited(restarting=False, **how)] == [True]
    assert [fact.peer_lost for fact in Ends("step 7").exited(restarting=False, **how)] == [False]
    assert [fact.peer_lost for fact in Ends(RESET).exited(restarting=False, signal=11)] == [False]


def test_lost_peers_of_a_teardown_are_counted_only():
    """Lost peers during a teardown are only counted, for `node_ready`: the controller knows of one already."""
    ends = Ends(RESET)
    assert ends.exited(code=1) == []
    assert ends.cycle.peers_lost == {0}


@pytest.mark.parametrize(
    ("what", "asked_at", "told"),
    [
        ("ValueError: bad", None, [False]),
        (RESET, None, [True]),
        ("ValueError: bad", 6.0, [False]),  # it was raised at 5.0, before the workers were asked to stop
        ("ValueError: bad", 4.0, []),
        (RESET, 6.0, []),
        (RESET, 4.0, []),
    ],
)
def test_exception_counts_if_it_was_raised_before_the_stop(what, asked_at, told):
    ends = Ends()
    ends.reporting.failing(ends.cycle, Failing(0, 70, what, at=5.0), asked_at=asked_at)
    assert [(fact.peer_lost, fact.ago_s) for fact in ends.kept.facts] == [(lost, 5.0) for lost in told]
    assert ends.cycle.peers_lost == ({0} if what == RESET else set())


@pytest.mark.parametrize("at", [None, -1e9, 1e9, float("inf"), float("-inf"), float("nan")])
def test_any_moment_that_a_worker_names_is_within_the_cycle(at):
    ends = Ends()
    ends.reporting.failing(ends.cycle, Failing(0, 70, "E: x", at=at), asked_at=None)
    assert 0.0 <= ends.kept.facts[0].ago_s <= 9.0


@pytest.mark.parametrize(("how", "error"), [({"code": 1}, "ValueError: bad"), ({"signal": 9}, None)])
def test_error_file_explains_an_exit_that_was_not_reported(how, error):
    """The error file explains an exit, but no death by a signal: its exception was caught, or came earlier."""
    assert [fact.error for fact in Ends(recorded="ValueError: bad").exited(**how)] == [error]


@pytest.mark.parametrize(
    ("what", "recorded", "error"),
    [
        ("ChildFailedError: train.py FAILED", "ValueError: bad", "ValueError: bad"),
        (
            "ValueError: bad (after RuntimeError: worse)",
            "ValueError: bad",
            "ValueError: bad (after RuntimeError: worse)",
        ),
        ("ValueError: bad", None, "ValueError: bad"),
    ],
)
def test_launchers_exception_gives_way_to_its_childs(what, recorded, error):
    """A worker that is torchrun is reported with the exception of its first failing worker, which its error file
    contains."""
    ends = Ends(recorded=recorded)
    ends.reporting.failing(ends.cycle, Failing(0, 70, what, at=5.0), asked_at=None)
    assert [fact.error for fact in ends.kept.facts] == [error]
