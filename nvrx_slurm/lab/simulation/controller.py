"""The real controller in a run, and what surrounds it there: connections, Slurm, job folder, attribution sources."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nvrx_slurm.cluster.slurm_job import SlurmJob
from nvrx_slurm.cluster.slurm_nodes import SlurmNode
from nvrx_slurm.controller.attribution_broker import Answered
from nvrx_slurm.controller.controller import Controller
from nvrx_slurm.controller.environment import FIRST_PAUSE_S, NodeCallback, send_fence
from nvrx_slurm.controller.mirror import in_order
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.journal.folder import Result
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.journal.verdicts import AgentFindings, Attribution, FailureKey, Inquiry, Scope, Verdict, VerdictRecord
from nvrx_slurm.lab.simulation.process import SimulatedProcess
from nvrx_slurm.liveness.connection import LivenessServer
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.store.heartbeat_reader import READ_S, HeartbeatReader
from nvrx_slurm.util.files import JobFiles

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.run import SimulationRun

SLURM_ANSWERS_S = 0.05
VERDICTS = (*[Verdict.RESTART] * 5, *[Verdict.UNKNOWN] * 2, Verdict.TIMEOUT)


async def controller_main(run: SimulationRun, process: SimulatedProcess, pid: int) -> int:
    """As `python -m nvrx_slurm.controller` runs it; returns its exit code."""
    clock, host = run.host_clock, run.HOST
    store = StoreClient(
        run.address, clock=clock, generation=run.info.generation, connection=run.store.client(host), key=run.key
    )
    heartbeats = HeartbeatReader(
        run.address,
        store.keys.beats,
        clock=clock,
        connection=run.store.client(host, socket_s=READ_S),
        job_key=run.key,
    )
    controller = Controller(
        plan=run.plan,
        info=run.info,
        environment=SimulatedEnvironment(run, process, pid),
        store=store,
        heartbeats=heartbeats,
        token=run.address.token,
        bind="127.0.0.1" if run.info.cluster == "local" else "*",
        clock=clock,
    )
    try:
        await controller.run()
    except NvrxError as error:
        return error.exit_code
    return 0


class SimulatedMirror:
    """The journal's copy in the job folder: what it holds outlives every controller."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def start(self, journal: Sequence[Entry]) -> None:
        last = self.last_number()
        self._entries += [entry for entry in journal if entry.n > last]

    def last_number(self) -> int:
        return max((entry.n for entry in self._entries), default=0)

    def add(self, entries: Sequence[Entry]) -> None:
        self._entries += entries

    def close(self, timeout_s: float) -> None: ...


class SimulatedEnvironment:
    """For one controller process."""

    def __init__(self, run: SimulationRun, process: SimulatedProcess, pid: int) -> None:
        self.run, self.process = run, process
        self.host, self.pid = run.HOST, pid
        self.files = JobFiles(Path("/simulated"))
        self.mirror = SimulatedMirror(run.copy)

    def read_copy(self) -> list[Entry]:
        return in_order(self.run.copy)

    def write_result(self, result: Result) -> None:
        self.run.result = result

    def liveness_server(self, token: str, alive: NodeCallback, lost: NodeCallback) -> SimulatedLivenessServer:
        def heard(node: str, incarnation: str) -> None:
            if self.run.contact.listens(self.pid):
                self.run.contact.heard(incarnation)
            alive(node, incarnation)

        return SimulatedLivenessServer(self, token, heard, lost)

    def attribution_broker(self, answered: Answered) -> SimulatedBroker:
        return SimulatedBroker(self.run, self.process, answered)

    async def is_dead(
        self, addr: str, port: int, message: bytes, within_s: float, *, pause_s: float = FIRST_PAUSE_S
    ) -> bool:
        channel = self.run.sockets.dial(self.host, addr, port)
        return await send_fence(channel, message, within_s, pause_s)

    async def node_state(self, node: str) -> SlurmNode | None:
        await asyncio.sleep(SLURM_ANSWERS_S)
        return SlurmNode(node, "IDLE" if self.run.nodes[node].has_power else "DOWN*")

    async def signalled_job(self, job_id: str, generation: int) -> SlurmJob | None:
        await asyncio.sleep(SLURM_ANSWERS_S)
        return SlurmJob(preempted=False, has_grace=False, may_requeue=False)

    def on_signal(self, number: signal.Signals, callback: Callable[[signal.Signals], None]) -> None:
        self.run.loop.add_signal_handler(number, callback, number)

    def report_node(self, node: str, *, is_lost: bool) -> None:
        """Only the batch host of a Slurm would start an agent: here the adversary brings nodes back."""


class SimulatedLivenessServer(LivenessServer):
    """The product's, on simulated sockets."""

    def __init__(
        self, environment: SimulatedEnvironment, token: str, alive: NodeCallback, lost: NodeCallback
    ) -> None:
        super().__init__(token, alive, lost)
        self._environment = environment
        self._stop_listening: Callable[[], object] = lambda: None

    async def start(self, bind: str) -> int:
        its = self._environment
        its.run.contact.lease_taken(its.pid)  # a controller listens once it has the lease
        listener = its.run.sockets.listen(its.host, its.process, self.protocol)
        self.port, self._stop_listening = listener.port, listener.close
        return self.port

    async def close(self) -> None:
        self._stop_listening()
        await super().close()


class SimulatedBroker:
    """The broker of one controller process; nothing of it outlives that. Its sources read no logs, and no service is
    notified."""

    def __init__(self, run: SimulationRun, process: SimulatedProcess, answered: Answered) -> None:
        self._run, self._process, self._answered = run, process, answered

    def open(self) -> None: ...
    def settled(self, key: FailureKey) -> None: ...
    def found(self, findings: AgentFindings) -> None: ...
    def judged(self, judged: VerdictRecord) -> None: ...
    async def close(self, within_s: float) -> None: ...

    def ask(self, inquiry: Inquiry, *, settled: bool) -> None:
        """Every source draws what it says, of which node, and when, from the key: asked again it says the same."""
        sources, key = self._run.shape.sources, inquiry.key
        for source in self._run.plan.fault_tolerance.attribution.sources:
            chance = self._run.chance(f"source/{source}/{key}")
            if chance.random() < sources.silent:
                continue  # it never answers
            attribution = Attribution(
                source=source,
                verdict=Verdict.STOP if chance.random() < sources.stops else chance.choice(VERDICTS),
                confidence=chance.random(),
                scope=chance.choice((Scope.NODE, Scope.USER_CODE)),
                nodes=(chance.choice(inquiry.nodes),) if inquiry.nodes else (),
            )
            for _ in range(2 if chance.random() < sources.repeats else 1):
                later_s = chance.uniform(sources.quick_s, sources.slow_s)
                self._say(key, attribution, chance.choice((sources.quick_s, later_s)))
            if chance.random() < sources.lies:
                other = chance.choice(
                    (
                        replace(key, cycle=key.cycle + chance.choice((-1, 1))),
                        replace(key, generation=key.generation + chance.choice((-1, 1))),
                        replace(key, rank=None if key.rank is not None else 0),
                    )
                )
                self._say(
                    other, replace(attribution, verdict=Verdict.STOP), chance.uniform(sources.quick_s, sources.slow_s)
                )

    def _say(self, key: FailureKey, attribution: Attribution, after_s: float) -> None:
        def say() -> None:
            if self._process.alive:
                self._answered(key, attribution)

        self._run.loop.call_later(after_s, say)
