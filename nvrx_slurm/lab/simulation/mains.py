"""The product's own processes in a history: what `python -m nvrx_slurm.agent` and `… .controller` do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvrx_slurm.agent.agent import Agent
from nvrx_slurm.controller.controller import Controller
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.jobspec.budgets import grace_within
from nvrx_slurm.lab.faults.valkey import MemoryClient
from nvrx_slurm.lab.faults.valkey.client import SOCKET_S
from nvrx_slurm.lab.simulation.calls import ServiceLink
from nvrx_slurm.lab.simulation.machine import SimulatedMachine
from nvrx_slurm.lab.simulation.outside import SimulatedEnvironment
from nvrx_slurm.lab.simulation.process import Process
from nvrx_slurm.store.client import Store
from nvrx_slurm.store.heartbeat_reader import READ_S, HeartbeatReader

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.history import History
    from nvrx_slurm.lab.simulation.node import Node


async def agent_main(history: History, node: Node, machine: SimulatedMachine) -> int:
    """One node's agent."""
    bounds, kill_wait_s = history.plan.fault_tolerance, history.info.kill_wait_s
    grace_s = bounds.teardown.grace
    store = Store(
        history.address,
        clock=node.clock,
        patience_s=bounds.control_plane_grace,
        connection=_connection(history, node.name),
    )
    agent = Agent(
        plan=history.plan,
        folder=history.folder,
        node=node.name,
        addr=node.name,
        generation=0,
        store=store,
        token=history.address.token,
        machine=machine,
        clock=node.clock,
        ending_grace_s=grace_s if kill_wait_s is None else min(grace_s, grace_within(kill_wait_s)),
    )
    return await agent.run()


async def controller_main(history: History, process: Process, pid: int) -> int:
    """The controller."""
    clock, host = history.host_clock, history.HOST
    store = Store(history.address, clock=clock, connection=_connection(history, host))
    heartbeats = HeartbeatReader(
        history.address, store.keys.beats, clock=clock, connection=_connection(history, host, socket_s=READ_S)
    )
    controller = Controller(
        plan=history.plan,
        info=history.info,
        environment=SimulatedEnvironment(history, process, pid),
        store=store,
        heartbeats=heartbeats,
        token=history.address.token,
        bind="127.0.0.1" if history.info.cluster == "local" else "*",
        clock=clock,
    )
    try:
        await controller.run()
    except NvrxError as error:
        return error.exit_code
    return 0


def _connection(history: History, host: str, socket_s: float = SOCKET_S) -> MemoryClient:
    return MemoryClient(history.store, link=ServiceLink(host, history.service), socket_s=socket_s)
