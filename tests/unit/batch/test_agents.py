"""When and where the agents' steps are started again, and when they are not any more; in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

import pytest

from nvrx_slurm.batch.agents import (
    MOST_STARTS,
    NO_AGENT_S,
    PAUSES_S,
    STABLE_S,
    STEP_ENDED_S,
    AgentSteps,
    step_command,
)
from nvrx_slurm.cluster.slurm_nodes import SlurmNode
from nvrx_slurm.lab.simulation.loop import VirtualClock, VirtualLoop

SRUN = ("srun", "--no-kill", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "python")
ALL = ("n1", "n2", "n3")


class Srun:
    """A step that runs until the test ends it."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.nodes, self.returncode = nodes, None
        self._ended = asyncio.Event()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def end(self, code: int = 1) -> None:
        self.returncode = code
        self._ended.set()


class World:
    """Slurm and the nodes. `dead`: nodes whose slurmd does not answer; `taken`: nodes that the job does not have any
    more; `asked`: how often slurmctld was queried."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.clock = VirtualClock(self.loop)
        self.dead: set[str] = set()
        self.taken: set[str] = set()
        self.drained: set[str] = set()
        self.over, self.asked, self.looks = False, 0, 0
        self.started: list[Srun] = []
        self.refusals: list[Exception] = []
        self.news = asyncio.Event()
        self.told: list[Any] = []
        self.hear: Callable[[Any], Coroutine[Any, Any, None]] | None = None

    def play(self, story: Callable[[World, AgentSteps], Coroutine[Any, Any, None]], *, own_node: str = "n1") -> None:
        async def main() -> None:
            steps = AgentSteps(
                ALL,
                own_node=own_node,
                command=SRUN,
                start=self._start,
                slurm=self,
                tell=self._tell,
                is_over=lambda: self.over,
                generation=0,
                clock=self.clock,
            )
            self.running = asyncio.get_running_loop().create_task(steps.run())
            await asyncio.sleep(0.1)
            try:
                await story(self, steps)
            finally:
                self.running.cancel()
                await asyncio.gather(self.running, return_exceptions=True)

        try:
            self.loop.run(main())
        finally:
            self.loop.close()

    async def has_started(self, count: int) -> bool:
        """Wait until so many steps have started, for ten minutes at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(600.0):
                while len(self.started) < count:
                    self.news.clear()
                    await self.news.wait()
        return len(self.started) >= count

    async def _start(self, command: Sequence[str]) -> Any:
        if self.refusals:
            raise self.refusals.pop()
        named = [word for word in command if word.startswith("--nodelist=")]
        nodes = tuple(named[0].removeprefix("--nodelist=").split(",")) if named else ALL
        self.started.append(Srun(nodes))
        self.news.set()
        return self.started[-1]

    async def _tell(self, fact: Any) -> None:
        await self.hear(fact) if self.hear else self.told.append(fact)

    async def allocated(self) -> tuple[str, ...]:
        self.asked += 1
        return tuple(node for node in ALL if node not in self.taken)

    async def nodes(self, names: Sequence[str]) -> dict[str, SlurmNode]:
        self.asked += 1
        return {name: SlurmNode(name, "MIXED+DRAIN" if name in self.drained else "MIXED") for name in names}

    async def answers(self, node: SlurmNode) -> bool:
        self.looks += 1
        await asyncio.sleep(0.1)
        return node.name not in self.dead


@pytest.fixture
def world() -> World:
    return World()


def test_step_that_cannot_be_started_now_is_started_later(world: World) -> None:
    """The batch host may lack processes or threads for a moment, while workers run on other nodes."""

    async def story(world: World, steps: AgentSteps) -> None:
        world.refusals = [BlockingIOError("fork"), RuntimeError("can't start new thread")]
        steps.lost("n2")
        await asyncio.sleep(STEP_ENDED_S + 3 * PAUSES_S[1])
        assert not world.running.done()
        assert [step.nodes for step in world.started] == [ALL, ("n2",)]

    world.play(story)


def test_step_that_ends_is_started_again_on_the_nodes_that_answer(world: World) -> None:
    """The new step starts once, without the lost node, and is in the journal; the lost node gets its agent when it
    answers."""

    async def story(world: World, steps: AgentSteps) -> None:
        world.dead = {"n2"}
        world.started[0].end()
        await asyncio.sleep(STEP_ENDED_S + 1.0)
        assert [step.nodes for step in world.started] == [ALL, ("n1", "n3")]
        (told,) = world.told
        assert (told.nodes, told.missing, told.step_ended, told.attempt) == (("n1", "n3"), ("n2",), True, 2)
        world.dead = set()
        await asyncio.sleep(PAUSES_S[0] + 1.0)
        assert [step.nodes for step in world.started][2:] == [("n2",)]

    world.play(story)


def test_lost_node_is_looked_at_without_slurm(world: World) -> None:
    """However long the node is away, slurmctld is asked once where the node's slurmd listens, and again when that
    answers."""

    async def story(world: World, steps: AgentSteps) -> None:
        world.dead = {"n2"}
        steps.lost("n2")
        await asyncio.sleep(3600.0)
        assert world.asked == 1
        assert world.looks <= 3600.0 / PAUSES_S[-1] + len(PAUSES_S)
        world.dead = set()
        await asyncio.sleep(PAUSES_S[-1] + 1.0)
        assert world.started[-1].nodes == ("n2",)
        assert [(told.nodes, told.step_ended) for told in world.told] == [(("n2",), False)]
        assert world.asked == 3

    world.play(story)


def test_node_that_slurm_has_taken_or_drained_gets_no_agent(world: World) -> None:
    """Slurm has given the node to another job, or a health check has drained it."""

    async def story(world: World, steps: AgentSteps) -> None:
        world.taken, world.drained = {"n2"}, {"n3"}
        steps.lost("n2")
        steps.lost("n3")
        await asyncio.sleep(600.0)
        assert len(world.started) == 1
        world.drained = set()
        world.taken = set()
        await asyncio.sleep(PAUSES_S[-1] + 1.0)
        assert [step.nodes for step in world.started[1:]] == [("n3",)]  # a node that was taken is not tried again

    world.play(story)


def test_node_that_joins_by_itself_needs_no_agent(world: World) -> None:
    """The node's frozen agent thaws and joins again before a new agent is due."""

    async def story(world: World, steps: AgentSteps) -> None:
        steps.lost("n2")
        steps.joined("n2")
        await asyncio.sleep(120.0)
        assert len(world.started) == 1

    world.play(story)


def test_node_may_join_while_the_start_of_its_agent_is_journaled(world: World) -> None:
    """After a partition slurmd answers, and the agent joins while the store is slow: the node needs no second
    agent."""

    async def story(world: World, steps: AgentSteps) -> None:
        async def slow(fact: Any) -> None:
            world.told.append(fact)
            steps.joined("n2")

        world.hear = slow
        world.started[0].end(7)
        assert await world.has_started(2)
        assert not world.running.done()
        assert "n2" not in world.started[1].nodes

    world.play(story)


def test_steps_that_end_at_once_are_started_with_pauses_and_not_for_ever(world: World) -> None:
    """After the bound `run` returns, and the batch host ends the job."""

    async def story(world: World, steps: AgentSteps) -> None:
        moments = []
        for number in range(MOST_STARTS):
            assert await world.has_started(number + 1)
            moments.append(asyncio.get_running_loop().time())
            world.started[number].end(7)
        assert await world.running == [7]
        pauses = [late - early for early, late in pairwise(moments)]
        assert pauses == sorted(pauses)
        assert pauses[-1] >= PAUSES_S[-1]

    world.play(story)


def test_step_that_lived_long_does_not_count(world: World) -> None:
    """A step that ends once an hour is always started again."""

    async def story(world: World, steps: AgentSteps) -> None:
        for number in range(2 * MOST_STARTS):
            await asyncio.sleep(STABLE_S + 60.0)
            world.started[number].end()
            await asyncio.sleep(STEP_ENDED_S + 1.0)
            assert len(world.started) == number + 2

    world.play(story)


def test_nothing_is_started_once_the_job_ends(world: World) -> None:
    """Nothing is started when the job is over, or while it is being ended."""

    async def over(world: World, steps: AgentSteps) -> None:
        world.over = True
        world.started[0].end(0)
        assert await world.running == [0]
        assert len(world.started) == 1

    async def closed(world: World, steps: AgentSteps) -> None:
        steps.close()
        world.started[0].end(0)
        assert await world.running == [0]
        assert len(world.started) == 1

    world.play(over)
    World().play(closed)


def test_job_without_any_node_that_answers_is_given_up(world: World) -> None:
    """`run` returns within a bound."""

    async def story(world: World, steps: AgentSteps) -> None:
        world.dead = set(ALL)
        world.started[0].end()
        began = asyncio.get_running_loop().time()
        await world.running
        assert NO_AGENT_S <= asyncio.get_running_loop().time() - began <= NO_AGENT_S + 2 * PAUSES_S[-1]

    world.play(story, own_node="none of them")


def test_where_no_slurmd_can_be_reached_the_start_is_tried(world: World) -> None:
    """If not even this host's slurmd answers, a firewall is in between, and the silence says nothing about the
    nodes."""

    async def story(world: World, steps: AgentSteps) -> None:
        world.dead = set(ALL)
        world.started[0].end()
        await asyncio.sleep(STEP_ENDED_S + 1.0)
        assert world.started[-1].nodes == ALL
        assert len(world.started) == 2

    world.play(story)


def test_command_of_a_later_step() -> None:
    """It is the first step's command for fewer nodes, and allows processes of the earlier steps beside it."""
    assert step_command(SRUN, ("n1", "n3")) == (
        "srun",
        "--overlap",
        "--mem=0",
        "--nodelist=n1,n3",
        "--no-kill",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "python",
    )
