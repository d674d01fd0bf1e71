"""A job without agents: its folder, the real store, the real controller and simulated nodes, in processes apart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchTimeout
from nvrx_slurm.batch import children
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.folder import LOOPBACK, JobFolder, JobInfo, StoreAddress
from nvrx_slurm.journal.records import AnyOrder
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.store.embedded import EmbeddedStore
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.ids import new_secret
from nvrx_slurm.util.processes import dies_with_parent

STEP_S = 60.0
CONTROLLER = (sys.executable, "-m", "nvrx_slurm.controller")


@dataclass(frozen=True, slots=True)
class Stage:
    """A job folder as the batch host leaves it, and the store that it names."""

    folder: JobFolder
    address: StoreAddress
    store: Process


async def set_up(
    stack: contextlib.AsyncExitStack, room: Path, *, size: int, bounds: FaultToleranceSpec, spares: int = 0
) -> Stage:
    """A local job of `size` nodes, `spares` of them hot spares, whose store runs until the stack is left."""
    folder = JobFolder(room / "bench")
    folder.create()
    role = RolePlan(name="main", command=("true",), nodes_per_replica=size - spares, workers_per_node=8)
    plan = Plan(
        name="bench", roles=(role,), spares=spares, workdir=str(room), folder=str(room), fault_tolerance=bounds
    )
    folder.write_plan(plan)
    nodes = tuple(f"n{index}" for index in range(1, size + 1))
    started_at = SystemClock().wall()
    folder.write_info(
        JobInfo(job_id="bench", name="bench", cluster="local", started_at=started_at, addr=LOOPBACK, nodes=nodes)
    )
    url, password, process = await start_store(stack, folder.store_dir)
    address = StoreAddress(url=url, password=password, job="bench", token=new_secret())
    folder.write_store(address)
    return Stage(folder, address, process)


async def start_store(stack: contextlib.AsyncExitStack, folder: Path) -> tuple[str, str, Process]:
    """The real server, as a job's embedded store is. Returns its URL, its password, and its process."""
    password = new_secret()
    store = EmbeddedStore(folder, bind=LOOPBACK, password=password)
    process = await store.start()
    stack.push_async_callback(kill, process)
    return store.url(LOOPBACK), password, process


async def start_controller(
    stack: contextlib.AsyncExitStack, stage: Stage, argv: Sequence[str] = CONTROLLER
) -> Process:
    """Start it, and wait until it has announced itself."""
    given = env.child_environment({"NVRX_JOB_FOLDER": str(stage.folder.path)})
    process = await children.start(argv, given, on_death=signal.SIGKILL)
    stack.push_async_callback(kill, process)
    await until_ordered(stage, object, "a controller's announcement")
    return process


async def until_ordered(stage: Stage, kind: type[object], what: str) -> None:
    """Wait until an order of this kind has been given, since the job began."""
    store = StoreClient(stage.address, clock=SystemClock())
    try:
        async with contextlib.aclosing(_orders(store)) as orders, asyncio.timeout(STEP_S):
            async for order in orders:
                if isinstance(order, kind):
                    return
    except TimeoutError:
        raise BenchTimeout(f"{what} did not come in {STEP_S:.0f} s") from None
    finally:
        await store.close()


async def _orders(store: StoreClient) -> AsyncGenerator[AnyOrder, None]:
    last = "0-0"
    while True:
        for identity, order in await store.orders(last):
            last = identity
            if order is not None:  # one that only a newer version knows
                yield order


async def start_python(stack: contextlib.AsyncExitStack, *arguments: str, **streams: Any) -> Process:
    """A process of this Python, which is killed when the stack is left, or this process dies."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, **streams, preexec_fn=dies_with_parent(signal.SIGKILL)
    )
    stack.push_async_callback(kill, process)
    return process


async def start_fleet(
    stack: contextlib.AsyncExitStack, module: str, *arguments: str, first: str | None = None
) -> Process:
    """Start a process of simulated nodes, and wait until it is connected. `first` is the first line of its input."""
    fleet = await start_python(stack, "-m", module, *arguments, stdin=PIPE, stdout=PIPE)
    if first is not None:
        send_line(fleet, first)
    await read_line(fleet)
    return fleet


def send_line(fleet: Process, order: str) -> None:
    """Send one line to a fleet."""
    assert fleet.stdin is not None
    fleet.stdin.write(f"{order}\n".encode())


async def read_line(fleet: Process) -> str:
    """The next line that a fleet prints. Raises BenchTimeout."""
    assert fleet.stdout is not None
    try:
        line = await asyncio.wait_for(fleet.stdout.readline(), STEP_S)
    except TimeoutError:
        raise BenchTimeout(f"a simulated fleet did not answer in {STEP_S:.0f} s") from None
    if not line:
        raise BenchTimeout("a simulated fleet died; its messages are above")
    return line.decode()


async def kill(process: Process) -> None:
    # By the process's number: its own `send_signal` would take its exit away from the task that waits for it.
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    await process.wait()
