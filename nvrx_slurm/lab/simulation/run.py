"""One simulated run: a job, its nodes, its control plane and its adversary, all drawn from one seed."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from msgspec.structs import replace

from nvrx_slurm.controller.mirror import in_order
from nvrx_slurm.errors import FencedError, SimulationStuck
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result, StoreAddress
from nvrx_slurm.journal.records import Entry, Fence, entry_to_json, pack
from nvrx_slurm.lab.simulation.adversary import Act, Trait, perform
from nvrx_slurm.lab.simulation.aims import AimedActs
from nvrx_slurm.lab.simulation.batch import BatchHost
from nvrx_slurm.lab.simulation.contact import CONTACT, Contact
from nvrx_slurm.lab.simulation.controller import controller_main
from nvrx_slurm.lab.simulation.loop import BEGIN_S, VirtualClock, VirtualLoop, unawaited
from nvrx_slurm.lab.simulation.monitors import Promise
from nvrx_slurm.lab.simulation.network import NetworkFault, SimulatedNetwork, apart
from nvrx_slurm.lab.simulation.node import SimulatedNode
from nvrx_slurm.lab.simulation.process import SimulatedProcess
from nvrx_slurm.lab.simulation.promises import Promises, broken_at_the_end, outage_of
from nvrx_slurm.lab.simulation.requeue import RequeuedJob
from nvrx_slurm.lab.simulation.scenario import Scenario, chance_of, draw_scenario
from nvrx_slurm.lab.simulation.shapes import Shape
from nvrx_slurm.lab.simulation.sockets import Sockets
from nvrx_slurm.lab.simulation.store import SimulatedKey, WatchedStore
from nvrx_slurm.lab.simulation.workers import SimulatedWorld
from nvrx_slurm.liveness import fence
from nvrx_slurm.store.keys import Keys

JOB = "1"
FENCED_WITHIN_S = 0.5
# A hundred times what a run takes: one that takes more goes in circles.
MOST_STEPS = 500_000


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to. `happened`: how many of its acts; `broken`: the first promise that was; `seen_by`: the
    monitor that noticed it, `contact` or `promises`; `digest`: of all that happened."""

    scenario: Scenario
    journal: tuple[Entry, ...]
    exit_code: int | None
    promise: Promise | None
    broken: str | None
    digest: str
    happened: int = 0
    seen_by: str | None = None

    @property
    def seed(self) -> int:
        return self.scenario.seed

    @property
    def shape(self) -> Shape:
        return self.scenario.shape

    @property
    def acts(self) -> tuple[Act, ...]:
        return self.scenario.acts

    @property
    def what(self) -> str:
        return f"{self.shape.cluster}, {self.shape.work_s:.1f} s of work: {self.shape.plan}"

    @property
    def lines(self) -> Iterator[str]:
        return (entry_to_json(entry).decode() for entry in self.journal)


class SimulationRun:
    """A job under its adversary. `run` once."""

    HOST = "host"

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.seed, self.shape, self.acts = scenario, scenario.seed, scenario.shape, scenario.acts
        self.plan = self.shape.plan
        self.performed: list[Act] = []  # with the nodes that aimed ones were done to
        self.loop: VirtualLoop = VirtualLoop()
        self.disturbed_until_s = BEGIN_S  # the end of the last act
        self.aims = AimedActs(self.loop, self.shape.nodes)
        self.network = SimulatedNetwork(self.loop, self.chance("network"))
        self.sockets = Sockets(self.network)
        self.promise: Promise | None = None
        self.broken: str | None = None
        self.seen_by: str | None = None
        self.over: asyncio.Future[None] = asyncio.Future(loop=self.loop)
        self.contact: Contact = Contact(self, self._break)
        self.promises = Promises(self.plan, self._break, self._entered, lambda: outage_of(self.performed))
        self.host_clock = VirtualClock(self.loop)
        self.store_clock: VirtualClock = VirtualClock(self.loop)
        self.store: WatchedStore = WatchedStore(self)
        self.address = StoreAddress(url="redis://host", job=JOB, token="token", embedded=True)
        self.key = SimulatedKey(self.address.token)
        self.keys = Keys(JOB)
        self.copied: list[tuple[bytes, str]] = []  # orders that were copied, with the id of their first place
        self.folder = JobFolder(Path("/jobs") / JOB)
        self.info = JobInfo(
            job_id=JOB,
            name=self.plan.name,
            cluster=self.shape.cluster,
            started_at=self.host_clock.wall(),
            addr=self.HOST,
            nodes=self.shape.nodes,
            kill_wait_s=self.shape.kill_wait_s,
        )
        self.copy: list[Entry] = []
        self.result: Result | None = None
        self.exit_code: int | None = None
        self.controller: SimulatedProcess | None = None  # the newest of `controllers`
        self.controllers: list[SimulatedProcess] = []
        self.nodes: dict[str, SimulatedNode] = {name: SimulatedNode(self, name) for name in self.shape.nodes}
        self.agents_signalled = False
        self.suspended = False  # by Slurm
        self.cuts: Counter[str] = Counter()  # node → how many faults cut it off now
        self._worlds: dict[tuple[int, str, int], SimulatedWorld] = {}
        self.work_left_s = dict.fromkeys(self.promises.roles, self.shape.work_s)  # of a replica, over all its cycles
        self._pids = itertools.count(100)
        self.work_chance = self.chance("work")
        self.batch: BatchHost = BatchHost(self)
        self.requeue: RequeuedJob = RequeuedJob(self)

    def chance(self, concern: str) -> Random:
        return chance_of(self.seed, concern)

    # ---- running it

    def run(self) -> RunResult:
        """Until the job has ended and no process is left, or a promise is broken."""
        # The longest time that the run may take. An act costs a restart, and one more where it lasts.
        # What aimed ones wait for is one of those restarts, and they may come one after the other.
        last_s = max((act.at_s for act in self.acts), default=0.0) + sum(act.lasts_s for act in self.acts)
        last_s += self.requeue.longest_s * sum(bool(act.traits & Trait.REQUEUES) for act in self.acts)
        tries = 1 + 2 * len(self.acts) + self.plan.fault_tolerance.max_restarts.count * len(self.promises.roles)
        bound_s = last_s + tries * (self.shape.work_s + self.shape.recovery_s) + self.shape.leaves_within_s
        with unawaited() as forgotten:
            try:
                self.loop.run(self._play(), until_s=bound_s, most_steps=MOST_STEPS)
            except SimulationStuck as error:
                self._break(Promise.LEAVING, str(error))
        if self.broken is None:
            for promise, sentence in broken_at_the_end(self):
                self._break(promise, sentence)
        journal = tuple(self.promises.journal)
        # Only now: the `finally`s of the tasks that are closed here may still change what the checks above look at.
        with unawaited() as left:
            self.loop.close()
        for what in (*forgotten, *left):
            self._break(Promise.SOUND, what)
        digest = hashlib.sha256(b"".join(map(pack, journal)))
        # Steps and time as well: two runs with one journal may still have differed.
        digest.update(f"{self.exit_code} {self.broken} {self.loop.steps} {self.loop.now_s!r}".encode())
        return RunResult(
            scenario=self.scenario,
            journal=journal,
            exit_code=self.exit_code,
            promise=self.promise,
            broken=self.broken,
            digest=digest.hexdigest(),
            happened=len(self.performed),
            seen_by=self.seen_by,
        )

    async def _play(self) -> None:
        for index, act in enumerate(self.acts):
            if act.traits & Trait.AT_START:
                self._perform(index, act)
            elif index and act.aim is not None and act.aim.follows:
                pass  # the act before it arms it
            elif act.aim is not None:
                self.loop.call_outside(act.at_s, self.aims.arm, act, partial(self._perform, index))
            else:
                self.loop.call_outside(act.at_s, self._perform, index, act)
        self.batch.start()
        for node in self.nodes.values():
            node.start()
        await self.over

    def _perform(self, index: int, act: Act) -> None:
        perform(self, act)
        following = self.acts[index + 1] if index + 1 < len(self.acts) else None
        if following is not None and following.aim is not None and following.aim.follows:
            self.aims.arm(following, partial(self._perform, index + 1))

    def _break(self, promise: Promise, sentence: str) -> None:
        """The first broken promise ends the run."""
        if self.broken is None:
            self.promise, self.broken = promise, f"{promise}: {sentence} (at {self.loop.now_s - BEGIN_S:.3f} s)"
            self.seen_by = self.promises.monitors.broken_by or ("contact" if promise in CONTACT else "promises")
            self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    # ---- the product's processes

    def start_controller(self) -> SimulatedProcess:
        """What the batch host does, again and again."""
        controller = self.controller = SimulatedProcess(self.loop, "controller")
        self.controllers.append(controller)
        pid = next(self._pids)
        controller.on_death(lambda: self._controller_ended(controller, pid))
        self.contact.controller_begins(pid)
        controller.run(controller_main(self, controller, pid))
        return controller

    def begin_generation(self, info: JobInfo, *, is_fresh: bool) -> None:
        """The batch script runs again, in the same job folder. `is_fresh`: there is no `store.json`: the store is a
        new one, and the job has a new key."""
        self.info, self.result, self.exit_code, self.agents_signalled = info, None, None, False
        if is_fresh:
            self.address = replace(self.address, token=f"token {info.generation}")
            self.key = SimulatedKey(self.address.token)
            self.promises.begin_with(in_order(self.copy))
        self.store.come_up()
        self.disturbed_until_s = max(self.disturbed_until_s, self.loop.now_s)
        self.batch = BatchHost(self)
        self.batch.start()
        for node in self.allocated:
            node.start_again()

    @property
    def allocated(self) -> list[SimulatedNode]:
        """The nodes that the job has now."""
        return [self.nodes[name] for name in self.info.nodes]

    @property
    def was_suspended(self) -> bool:
        return any(act.traits & Trait.SUSPENDS for act in self.performed)

    def _controller_ended(self, controller: SimulatedProcess, pid: int) -> None:
        self._crashed(controller)
        if controller.exit_code == FencedError.exit_code and controller is self.controller:
            self.promises.controller_left(pid)

    def _crashed(self, process: SimulatedProcess) -> None:
        if process.error is not None:
            self._break(Promise.SOUND, f"the {process.name} crashed: {process.error!r}")
        if self.loop.troubles:
            self._break(Promise.SOUND, f"a task failed, and no code has read its exception: {self.loop.troubles[0]}")

    def agent_ended(self, node: SimulatedNode, agent: SimulatedProcess, generation: int) -> None:
        """It has left, or died: srun knows when all have."""
        self._crashed(agent)
        is_asked = self.agents_signalled or generation < self.info.generation
        if node.has_power and agent.exit_code is not None and agent.exit_code >= 0 and not is_asked:
            self.promises.left(node.name, agent.exit_code, node.supervisor_deaths)
        self.look_for_agents()

    def look_for_agents(self) -> None:
        """Has the last one ended, and does none start any more?"""
        if not any(node.has_agent for node in self.allocated):
            self.batch.agents_left.set()

    def _entered(self, entry: Entry) -> None:
        self.contact.entered(entry)
        if isinstance(entry.record, Fence):
            self._watch_fence(entry.record)

    def _watch_fence(self, ordered: Fence) -> None:
        """From now on the node's kernel must kill its supervisor, if nothing keeps the key from it."""
        node, controller = self.nodes[ordered.node], self.controller
        key = fence.key_of(self.address.token, ordered.incarnation)

        def look() -> None:
            controls = self.controller is controller and controller is not None and controller.running
            if controls and node.has_power and node.is_trapped_by(key):
                self._break(Promise.FENCED, f"{node.name} was fenced, and its kernel has not got the key")

        if not any(act.traits & (Trait.OUTAGE | Trait.NETWORK) for act in self.acts):
            # The key is sent when the commit is answered: each broken one is sent again after a longer pause.
            tries = 1 + sum(act.kind == "break_commit" for act in self.acts)
            self.loop.call_outside(FENCED_WITHIN_S * tries, look)

    # ---- the workers

    def world(self, generation: int, replica: str, cycle: int, size: int, rank: int) -> SimulatedWorld:
        """The one that a rank enters. One that has had the rank is over: a store without its data has forgotten that
        the rendezvous was closed, and it was closed once more."""
        world = self._worlds.get((generation, replica, cycle))
        if world is None or rank in world.members:
            world = self._worlds[generation, replica, cycle] = SimulatedWorld(self, replica, cycle, size)
        return world

    # ---- what is done to it

    def cut(self, nodes: Collection[str], for_s: float | None) -> Callable[[], None]:
        """These nodes reach each other, and no other host; None: until the result is called."""
        return self.disturb(nodes, NetworkFault(apart(frozenset(nodes)), cut=True), for_s)

    def disturb(self, nodes: Collection[str], fault: NetworkFault, for_s: float | None) -> Callable[[], None]:
        """A fault on the links of these nodes. A cut one also stops their workers' steps."""
        heal = self.network.begin(fault)
        self.cuts.update(nodes if fault.cut else ())
        self._look_at_worlds()

        def end() -> None:
            heal()
            self.cuts.subtract(nodes if fault.cut else ())
            self._look_at_worlds()

        if for_s is not None:
            self.loop.call_outside(for_s, end)
        return end

    def is_cut(self, node: str) -> bool:
        return self.cuts[node] > 0

    def _look_at_worlds(self) -> None:
        for world in self._worlds.values():
            world.look()

    def scancel(self, number: signal.Signals) -> None:
        """A user ends the job. Slurm signals every process of it, and kills what is left after KillWait."""
        self.batch.process.signal(number)
        if self.shape.kill_wait_s is not None:
            self.signal_agents(number)
            for node in self.allocated:
                if node.is_reachable:
                    for worker in list(node.workers):
                        worker.signal(number)
            self.loop.call_outside(self.shape.kill_wait_s, self.batch.kill)

    def signal_agents(self, number: int) -> None:
        """srun passes a signal on to the agents that it reaches."""
        self.agents_signalled = True
        for node in self.allocated:
            if node.agent is not None and node.is_reachable:
                node.agent.signal(number)

    def control_plane_dies(self) -> None:
        """The batch host has ended, so its children are killed, and the job is over. By now every process that waited
        must have left."""
        for process in (*self.controllers, self.store.process):
            process.kill()
        if self.requeue.is_asked:  # the run goes on with the next generation
            self.requeue.leave()
            return
        self.exit_code = self.batch.process.exit_code
        for node in self.nodes.values():
            if node.is_well and node.agent is not None and node.agent.alive:
                self._break(Promise.LEAVING, f"the job has ended, and the agent of {node.name} still runs")
            for worker in node.workers if node.is_well else ():
                self._break(Promise.LEAVING, f"the job has ended, and {worker} still lives")
        for node in self.nodes.values():
            node.kill()
        self._end()


def run_scenario(scenario: Scenario) -> RunResult:
    """The same scenario gives the same result, byte for byte."""
    return SimulationRun(scenario).run()


def run_seed(seed: int, nodes: int | None = None, acts: tuple[Act, ...] | None = None) -> RunResult:
    """Run a seed, or the same job with other acts."""
    scenario = draw_scenario(seed, nodes)
    return run_scenario(scenario if acts is None else dataclasses.replace(scenario, acts=acts))
