"""A full round: simulated nodes, the real store, the real controller, each in processes of their own.

`join` is the first round: from the first join sent to the last assignment read, with every node's first beat beside
its join. `restart` is the second: from one worker's failure told, over everybody's `node_ready`, to the last
assignment read. Tethers are no part of a round; but real agents connect theirs at the moment of the first one, to the
process that is deciding it, so that is measured too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.errors import BenchTimeout
from bench.tables import growth_exponent, print_rows, print_target
from nvrx_slurm.batch import children
from nvrx_slurm.clock import SystemClock
from nvrx_slurm.config import env
from nvrx_slurm.folder import JobFolder, JobInfo, StoreAddress
from nvrx_slurm.ids import new_secret
from nvrx_slurm.processes import dies_with_parent
from nvrx_slurm.records import FaultTolerance, Plan, RolePlan
from nvrx_slurm.store.client import Store
from nvrx_slurm.store.embedded import EmbeddedStore

SIZES = (256, 512, 1000, 2000)
FLEETS = 2
STEP_S = 30.0
TARGET_SIZE, TARGET_S, TARGET_EXPONENT = 1000, 0.25, 1.1
CONTROLLER = (sys.executable, "-m", "nvrx_slurm.controller")


@dataclass(frozen=True, slots=True)
class Setting:
    """What one measurement runs with."""

    size: int
    tethered: bool = False
    controller: tuple[str, ...] = CONTROLLER


def rounds(runs: int, peers: Path) -> None:
    """Every size, `runs` times; then once more at the size that has a target, with tethers."""
    measured: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    for _ in range(runs):  # in turns, so that noise meets all sizes alike
        for size, taken in measured.items():
            taken.append(asyncio.run(measure(Setting(size))))
    for index, name in enumerate(("join", "restart")):
        _tell(f"round, {name}", {size: [run[index] for run in taken] for size, taken in measured.items()})
    tethered = [asyncio.run(measure(Setting(TARGET_SIZE, tethered=True)))[0] for _ in range(runs)]
    _tell("round, join, while every node is tethered too", {TARGET_SIZE: tethered})


def _tell(title: str, samples: Mapping[int, Sequence[float]]) -> None:
    print_rows(title, {_row(size): taken for size, taken in samples.items()}, unit="ms", first=_row(TARGET_SIZE))
    middles = {size: median(taken) for size, taken in samples.items()}
    at_target = middles[TARGET_SIZE]
    print_target(f"≤ {TARGET_S * 1000:.0f} ms at {TARGET_SIZE}", at_target * 1000, met=at_target <= TARGET_S)
    if len(middles) > 1:
        exponent = growth_exponent(list(middles), list(middles.values()))
        print_target(f"growth exponent ≤ {TARGET_EXPONENT}", exponent, met=exponent <= TARGET_EXPONENT)


def _row(size: int) -> str:
    return f"{size:5d} nodes"


async def measure(setting: Setting) -> tuple[float, float]:
    """Seconds of the first round, and of a restart."""
    with tempfile.TemporaryDirectory(prefix="nvrx-bench-") as room:
        async with contextlib.AsyncExitStack() as stack:
            folder = await _prepare(stack, Path(room), setting.size)
            await _start_controller(stack, folder, setting.controller)
            fleets = [await _start_fleet(stack, folder, part, setting) for part in range(FLEETS)]
            join = await _one_round(fleets, b"begin\n", to=fleets)
            restart = await _one_round(fleets, b"fail\n", to=fleets[:1])
            return join, restart


async def _prepare(stack: contextlib.AsyncExitStack, room: Path, size: int) -> JobFolder:
    """A job folder as the batch host leaves it, and the store that it names."""
    folder = JobFolder(room / "bench")
    folder.create()
    role = RolePlan(name="main", command=("true",), nodes_per_replica=size, workers_per_node=8)
    # A restart is given all the time it needs here, since these nodes beat from a loop that is busy.
    bounds = FaultTolerance(heartbeat_timeout_s=120.0)
    plan = Plan(name="bench", roles=(role,), workdir=str(room), folder=str(room), fault_tolerance=bounds)
    folder.write_plan(plan)
    nodes = tuple(f"n{index}" for index in range(1, size + 1))
    started_at = SystemClock().wall()
    folder.write_info(
        JobInfo(job_id="bench", name="bench", cluster="local", started_at=started_at, host="127.0.0.1", nodes=nodes)
    )
    password = new_secret()
    store = EmbeddedStore(folder.store_dir, bind="127.0.0.1", password=password)
    stack.push_async_callback(_kill, await store.start())
    url = f"redis://127.0.0.1:{store.port}"
    folder.write_store(StoreAddress(url=url, password=password, job="bench", token=new_secret()))
    return folder


async def _start_controller(stack: contextlib.AsyncExitStack, folder: JobFolder, argv: Sequence[str]) -> None:
    """Start it, and wait until it has announced itself."""
    given = env.child_environment({"NVRX_JOB_FOLDER": str(folder.path)})
    process = await children.start(argv, given, on_death=signal.SIGKILL, own_session=False)
    stack.push_async_callback(_kill, process)
    address = folder.read_store()
    assert address is not None
    store = Store(address, clock=SystemClock())
    async with contextlib.aclosing(_orders(store)) as announced, asyncio.timeout(STEP_S):
        await anext(announced)
    await store.close()


async def _orders(store: Store) -> AsyncGenerator[object, None]:
    while True:
        for _, order in await store.orders("0-0"):
            yield order


async def _start_fleet(stack: contextlib.AsyncExitStack, folder: JobFolder, part: int, setting: Setting) -> Process:
    """Start one of the processes that the nodes are divided among, and wait until it is connected."""
    count = setting.size // FLEETS
    argv = [sys.executable, "-m", "bench.fleet", str(folder.path), str(1 + part * count), str(count)]
    argv += ["tethered"] * setting.tethered
    adopt = dies_with_parent(signal.SIGKILL)
    fleet = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, preexec_fn=adopt)
    stack.push_async_callback(_kill, fleet)
    await _line(fleet)
    return fleet


async def _one_round(fleets: Sequence[Process], order: bytes, *, to: Sequence[Process]) -> float:
    for fleet in to:
        assert fleet.stdin is not None
        fleet.stdin.write(order)
    said = [(await _line(fleet)).split() for fleet in fleets]
    began = min(float(words[1]) for words in said if float(words[1]))
    return max(float(words[2]) for words in said) - began


async def _line(fleet: Process) -> str:
    assert fleet.stdout is not None
    try:
        line = await asyncio.wait_for(fleet.stdout.readline(), STEP_S)
    except TimeoutError:
        raise BenchTimeout(f"a simulated fleet did not get through its round in {STEP_S:.0f} s") from None
    if not line:
        raise BenchTimeout("a simulated fleet died; what it said is above")
    return line.decode()


async def _kill(process: Process) -> None:
    """By the process's number: its own `send_signal` would take its exit away from who waits for it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    await process.wait()
