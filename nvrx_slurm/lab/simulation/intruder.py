"""Processes beside those of the job. One that has not the job's key must have no effect, whatever it sends to the
store and to the controller."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.journal.records import NodeJoined, Record, Signalled, WorkerFailed, WorkersStarted
from nvrx_slurm.lab.simulation.sockets import HandshakeStream
from nvrx_slurm.liveness import connection as liveness
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.util.job_key import JobKey

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.run import SimulationRun

ITS_KEY = "another job's"
# How long it stays where it was let in.
CONNECTED_S = 0.5


def forge_record(run: SimulationRun, number: int) -> None:
    """As another user of a store that several jobs share: it posts the end of the job, or of a worker."""
    started = [entry.record for entry in run.promises.journal if isinstance(entry.record, WorkersStarted)]
    fact: Record = Signalled(reason="cancel")
    if started and number % 2:
        of = started[number % len(started)]
        fact = WorkerFailed(
            node=of.node,
            incarnation=of.incarnation,
            seq=of.seq + 1000,
            replica=of.replica,
            cycle=of.cycle,
            rank=0,
            exit_code=1,
        )
    run.loop.create_task(_post(run, fact, JobKey(ITS_KEY)))


def post_outside(run: SimulationRun, fact: Record) -> None:
    """Post a fact with the job's key: one that arrives late or twice, or one of a user."""
    run.loop.create_task(_post(run, fact, run.key))


async def _post(run: SimulationRun, fact: Record, key: JobKey) -> None:
    store = StoreClient(run.address, clock=run.host_clock, connection=run.store.client(run.HOST), key=key)
    with contextlib.suppress(StoreUnreachable):
        await store.post(fact)


async def copy_order(run: SimulationRun, identity: bytes, fields: list[bytes]) -> None:
    """Add an order to the end of its stream as it is: its signature is good for every place there."""
    copied = dict(zip(fields[::2], fields[1::2], strict=True))
    # Noted first: an agent may read the copy before this process has its answer.
    run.copied.append((fields[1], identity.decode()))
    with contextlib.suppress(RedisError, OSError):
        await run.store.client(run.HOST).xadd(run.keys.orders, copied)


def forge_connection(run: SimulationRun, number: int) -> None:
    """It connects to the controller in the name of an agent."""
    agents = [entry.record for entry in run.promises.journal if isinstance(entry.record, NodeJoined)]
    ports = run.sockets.ports(run.HOST)
    if agents and ports:
        run.loop.create_task(_connect(run, agents[number % len(agents)], ports[-1]))


async def _connect(run: SimulationRun, agent: NodeJoined, port: int) -> None:
    with contextlib.suppress(OSError):  # the controller, which is not convinced, closes the connection
        async with asyncio.timeout(liveness.HANDSHAKE_S):
            stream = HandshakeStream(await run.sockets.connect(agent.node, run.HOST, port))
            try:
                await liveness.introduce(
                    stream, token=ITS_KEY, node=agent.node, incarnation=agent.incarnation, port=port
                )
                run.promises.let_in(agent.node)
                await asyncio.sleep(CONNECTED_S)
            finally:
                stream.end.close()
