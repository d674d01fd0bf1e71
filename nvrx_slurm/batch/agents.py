"""The steps of Slurm in which the agents run, and the nodes on which there is none.

One srun starts all agents. Slurm cancels that whole step where a node is lost before all of them have been launched,
and a step may end later too (srun was killed, a user cancelled it). Then agents are started again, in one step, on
the nodes that answer. A node whose agent alone is gone gets one when it answers again, and is a hot spare then.

Slurm is not polled. A step ends as a child process does; the controller reports nodes that it has lost; and whether
a lost node is back is asked of its own slurmd, by a TCP connection, in growing intervals. Only when one answers is
Slurm asked, once: whether the job still holds the node, and whether the node is well.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from nvrx_slurm.cluster.slurm_nodes import JobNodes, SlurmNode
from nvrx_slurm.journal.records import AgentsStarted
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import CANNOT_RUN

log = get_logger("batch")

# How long after the end of a step the controller may take to end the job: then it was no accident.
STEP_ENDED_S = 3.0

# How long before its srun the agents of a step may have ended with it.
ENDS_WITHIN_S = 15.0

# Before a lost node is looked at again; the same number of starts leads to the same pause.
PAUSES_S = (5.0, 10.0, 20.0, 40.0, 60.0)

# A node on which so many agents in a row have ended within `STABLE_S` gets no more.
MOST_STARTS = 6

STABLE_S = 60.0
# How long the job may be without any agent while none of its nodes answers.
NO_AGENT_S = 60.0

LOOKS_AT_ONCE = 64


def step_command(command: Sequence[str], nodes: Sequence[str]) -> tuple[str, ...]:
    """The srun that starts agents on these nodes alone, beside what is left of the steps before."""
    count = len(nodes)
    own = {"--nodes": count, "--ntasks": count}
    changed = [
        f"{name}={own[name]}" if (name := word.partition("=")[0]) in own and "=" in word else word
        for word in command[1:]
    ]
    # `--mem=0`: all that the job has there. On a lost node the step before holds its share until slurmctld gives the
    # node up, and `--overlap` does not share memory (seen on 22.05).
    return (command[0], "--overlap", "--mem=0", f"--nodelist={','.join(nodes)}", *changed)


class _Missing(msgspec.Struct):
    """A node without an agent. `step_ended`: with all others of its step."""

    since: float
    due: float
    step_ended: bool = False
    looks: int = 0


class _Starts(msgspec.Struct):
    """How many agents in a row were started on a node, the last one `at`, that ended soon."""

    count: int = 0
    at: float = 0.0


class Step(msgspec.Struct, eq=False):
    """One srun, and the nodes whose agent it has started."""

    process: Process
    nodes: set[str] = set()


class AgentSteps(msgspec.Struct, eq=False):
    """Runs the steps. `start` starts an srun for its command; `slurm` asks about the nodes; `tell` journals what is
    started; `is_over` says whether the job has ended. `own_flags`: the first step, too, names its nodes: the command
    is not for all that the job has."""

    nodes: tuple[str, ...]
    own_node: str | None
    command: tuple[str, ...]
    start: Callable[[Sequence[str]], Awaitable[Process]]
    slurm: JobNodes
    tell: Callable[[AgentsStarted], Awaitable[None]]
    is_over: Callable[[], bool]
    generation: int
    clock: Clock
    own_flags: bool = False
    steps: list[Step] = []
    _missing: dict[str, _Missing] = {}
    _starts: dict[str, _Starts] = {}
    _known: dict[str, SlurmNode] = {}  # where the slurmd of lost nodes listens
    _news: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    _closed: bool = False
    _has_joined: bool = False  # any agent, ever

    @property
    def processes(self) -> list[Process]:
        return [step.process for step in self.steps]

    def close(self) -> None:
        """The job is ending: start no more agents."""
        self._closed = True
        self._news.set()

    def lost(self, node: str) -> None:
        """The controller has lost the node's agent."""
        if node in self.nodes and node not in self._missing:
            self._miss(node, step_ended=False)
            self._news.set()

    def joined(self, node: str) -> None:
        """An agent of the node has joined."""
        self._has_joined = True
        self._missing.pop(node, None)

    async def run(self) -> list[int]:
        """Start the agents; return the last exit codes once none runs and none is to be started."""
        codes: list[int] = []
        first = step_command(self.command, self.nodes) if self.own_flags else self.command
        await self._start_step(first, self.nodes)
        alone_since: float | None = None
        while True:
            await self._wait()
            ended = [step for step in self.steps if step.process.returncode is not None]
            if ended:
                codes = [step.process.returncode or 0 for step in ended]
            for step in ended:
                self.steps.remove(step)
                log.warning("a step of agents ended (exit code %s)", step.process.returncode)
                for node in step.nodes:
                    self._miss(node, step_ended=len(step.nodes) > 1)
            if set(codes) == {CANNOT_RUN} and not self.steps and not self._has_joined:
                return codes
            now = self.clock.monotonic()
            alone_since = None if self.steps else now if alone_since is None else alone_since
            due = [node for node in self.nodes if node in self._missing and self._missing[node].due <= now]
            if due and not self._closed and not self.is_over():
                await self._bring_back(due)
            if self.steps:
                continue
            alone_s = 0.0 if alone_since is None else self.clock.monotonic() - alone_since
            # Not before each node has been looked at: one whose turn is still to come may answer.
            in_vain = alone_s > NO_AGENT_S and all(missing.looks for missing in self._missing.values())
            if self._closed or self.is_over() or not self._missing or in_vain:
                return codes

    # ---- the loop

    async def _wait(self) -> None:
        """Until a step has ended, a node was reported, or one is due."""
        loop = asyncio.get_running_loop()
        due = min((missing.due for missing in self._missing.values()), default=None)
        timeout = None if due is None or self._closed else max(0.0, due - self.clock.monotonic())
        waits = [loop.create_task(step.process.wait()) for step in self.steps]
        waits.append(loop.create_task(self._news.wait()))
        try:
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._news.clear()

    def _miss(self, node: str, *, step_ended: bool) -> None:
        now, starts = self.clock.monotonic(), self._starts.setdefault(node, _Starts())
        if now - starts.at > STABLE_S:
            starts.count = 0
        if starts.count >= MOST_STARTS:
            log.error("%s: %d agents in a row have ended soon; no more is started there", node, starts.count)
            self._missing.pop(node, None)
            return
        # After the first end of a step there is no pause but for the controller, which may be ending the job.
        pause_s = STEP_ENDED_S if step_ended and starts.count <= 1 else PAUSES_S[min(starts.count, len(PAUSES_S) - 1)]
        known = self._missing.get(node)
        if known is None:
            self._missing[node] = _Missing(since=now, due=now + pause_s, step_ended=step_ended)
        else:
            known.due = min(known.due, now + pause_s)
            # The controller sees the agents end sooner than srun does. One that was lost long before was lost alone.
            known.step_ended |= step_ended and now - known.since < ENDS_WITHIN_S

    async def _bring_back(self, due: Sequence[str]) -> None:
        """Start agents on those of the nodes that answer, and that the job still holds."""
        if unknown := [node for node in due if node not in self._known]:
            self._known.update(await self.slurm.nodes(unknown))
        answering = await self._answering(due)
        if answering:
            answering = await self._usable(answering)
        self._look_later(node for node in due if node not in answering)
        if not answering or self._closed or self.is_over():
            return
        attempt = 1 + max(self._starts[node].count for node in answering)
        # In the journal before they start: by that an open rendezvous waits for them. The nodes of a step that ended,
        # and one that was lost by itself, are two records: they differ in what counts against them.
        ended = {node: self._missing[node].step_ended for node in answering}  # a node may join while this tells
        for step_ended in (True, False):
            nodes = [node for node in answering if ended[node] is step_ended]
            if nodes:
                silent = tuple(node for node in self._missing if node not in answering)
                await self.tell(
                    AgentsStarted(
                        nodes=tuple(nodes),
                        missing=silent,
                        step_ended=step_ended,
                        attempt=attempt,
                        generation=self.generation,
                    )
                )
        if not (answering := [node for node in answering if node in self._missing]):
            return
        log.warning("starting agents on %s (attempt %d)", ", ".join(answering), attempt)
        try:
            await self._start_step(step_command(self.command, answering), answering)
        except (OSError, RuntimeError) as error:  # no process can be started now, or no thread that waits for it
            log.error("no agents can be started now: %s", error)
            self._look_later(answering)

    def _look_later(self, nodes: Iterable[str]) -> None:
        now = self.clock.monotonic()  # what the queries took, and they take seconds, counts too
        for node in nodes:
            if (missing := self._missing.get(node)) is not None:
                missing.looks += 1
                missing.due = now + PAUSES_S[min(missing.looks - 1, len(PAUSES_S) - 1)]

    async def _answering(self, nodes: Sequence[str]) -> list[str]:
        room = asyncio.Semaphore(LOOKS_AT_ONCE)

        async def answers(node: str) -> bool:
            async with room:
                return node in self._known and await self.slurm.answers(self._known[node])

        found = await asyncio.gather(*(answers(node) for node in nodes))
        if self.own_node in nodes and not found[nodes.index(self.own_node)]:
            log.warning("slurmd cannot be reached directly, not even here: which nodes are left is only tried out")
            return list(nodes)
        return [node for node, answer in zip(nodes, found, strict=True) if answer]

    async def _usable(self, nodes: Sequence[str]) -> list[str]:
        """Those that the job holds, and that are well by Slurm's word; the others of the job's nodes are given up."""
        held, states = await self.slurm.allocated(), await self.slurm.nodes(nodes)
        self._known.update(states)
        usable: list[str] = []
        for node in nodes:
            if held is not None and node not in held:
                log.warning("%s: Slurm has taken it from the job; no agent is started there", node)
                self._missing.pop(node, None)
            elif node in states and not states[node].takes_steps:
                log.info("%s answers, and is %s: it gets no agent yet", node, states[node].state)
            elif node in self._missing:
                usable.append(node)
        return usable

    async def _start_step(self, command: Sequence[str], nodes: Iterable[str]) -> None:
        step, now = Step(await self.start(command), set(nodes)), self.clock.monotonic()
        # A node counts to its newest step alone. The end of an older srun, which a lost node holds up, must not take
        # the node for missing again.
        for other in self.steps:
            other.nodes -= step.nodes
        self.steps.append(step)
        for node in step.nodes:
            self._missing.pop(node, None)
            starts = self._starts.setdefault(node, _Starts())
            starts.count, starts.at = starts.count + 1, now
