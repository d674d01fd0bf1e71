"""What the controller is told: restarts in process, until they come too fast for that, and how workers end."""

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
    """What is told of one cycle's restarts, given how long after the last one each comes."""
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


def test_restarts_are_told_one_by_one_at_first() -> None:
    """Each with its iteration, in the cycle that it was in."""
    facts = told_of([0.01] * RESTARTS_AT_ONCE)
    assert [(fact.cycle, fact.restart.iteration, fact.times) for fact in facts] == [
        (3, iteration, 1) for iteration in range(1, RESTARTS_AT_ONCE + 1)
    ]


@pytest.mark.parametrize(("every_s", "count"), [(0.01, 5_000), (RESTARTS_EVERY_S / 4, 100)])
def test_a_function_that_fails_at_once_does_not_fill_the_journal(every_s: float, count: int) -> None:
    """Later ones are told together: every restart is counted once, and the newest of them is the one that is told."""
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
        """Rank 0 ends; returns what the controller is told of it."""

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
        ({"signal": 9, "sent": TERM}, True),  # somebody else's: the out-of-memory killer's, perhaps
        ({"signal": 9, "sent": KILL}, False),
        ({"signal": 11, "sent": frozenset()}, True),
        ({"signal": 11, "sent": TERM}, False),  # while it was ending as asked
        ({"signal": 15, "sent": TERM}, False),
        ({"code": 1, "sent": frozenset()}, True),
        ({"code": 1, "sent": TERM}, False),
        ({"code": 0, "sent": frozenset()}, False),
    ],
)
def test_end_within_a_teardown_is_told_if_the_agent_did_not_cause_it(how, is_told):
    """With the moment at which the supervisor reaped it."""
    facts = Ends().exited(**how)
    assert [(fact.rank, fact.signal, fact.ago_s) for fact in facts] == [(0, how.get("signal"), 0.5)] * is_told


def test_death_by_sigterm_is_told_before_the_node_is_ready():
    """Nobody is asked whether the job ends: a rendezvous is open. But not if the worker was asked to end."""
    ends = Ends()
    assert ends.exited(signal=15) == []
    ends.reporting.terminated(ends.cycle)
    assert [(fact.signal, fact.ago_s) for fact in ends.kept.facts] == [(15, 0.5)]
    ends.reporting.terminated(ends.cycle)
    assert len(ends.kept.facts) == 1


@pytest.mark.parametrize("on_slurm", [False, True])
def test_workers_are_done_once_no_signal_can_have_ended_them(on_slurm):
    """Slurm signals workers and agent at once: there the agent waits whether it is signalled too."""
    ends = Ends(on_slurm=on_slurm)
    ends.cycle.running = {0}
    facts = list(ends.exited(restarting=False, code=0, sent=frozenset()))
    assert [type(fact) for fact in facts] == [WorkersDone] * (not on_slurm)
    ends.loop.run_until_complete(asyncio.sleep(OUR_SIGNAL_S))
    assert ends.posted == [Done(ends.cycle)] * on_slurm


@pytest.mark.parametrize("how", [{"code": 1}, {"signal": 6}])
def test_lost_peer_is_known_by_the_last_lines(how):
    """Of a worker whose exception nobody reported; a signal of its own is told as ever."""
    assert [fact.peer_lost for fact in Ends(RESET).exited(restarting=False, **how)] == [True]
    assert [fact.peer_lost for fact in Ends("step 7").exited(restarting=False, **how)] == [False]
    assert [fact.peer_lost for fact in Ends(RESET).exited(restarting=False, signal=11)] == [False]


def test_lost_peers_of_a_teardown_are_counted_only():
    """The controller knows of one already; `node_ready` names the others."""
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
def test_error_file_explains_an_exit_that_nobody_reported(how, error):
    """But no death by a signal: the exception in the file was caught, or came before."""
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
    """A worker that is torchrun has the exception of its own first failing worker in its error file."""
    ends = Ends(recorded=recorded)
    ends.reporting.failing(ends.cycle, Failing(0, 70, what, at=5.0), asked_at=None)
    assert [fact.error for fact in ends.kept.facts] == [error]
