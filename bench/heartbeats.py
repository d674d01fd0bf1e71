"""One controller reads a whole fleet's heartbeats: what that costs it and the store, and how soon a silent node is
reaped.

Store and controller are the real ones, in processes of their own; every node has joined and has its ranks. Shares are
of CPU time, so other processes of the machine disturb them little.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import PIPE
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from bench import usage
from bench.errors import BenchTimeout
from bench.processes import temporary_folder
from bench.stage import (
    STEP_S,
    Stage,
    kill,
    read_line,
    send_line,
    set_up,
    start_controller,
    start_fleet,
    start_python,
    until_ordered,
)
from bench.tables import print_target
from nvrx_slurm.journal.records import NodeLost, RendezvousClosed
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.util.clock import SystemClock

SIZES = (100, 1000, 10_000)
FLEETS = 2
CONNECTIONS = 4
SETTLE_S, WINDOW_S, BARE_S = 2.0, 10.0, 5.0
TIMEOUT_S = 3.0
CONTROLLER_SHARE, STORE_SHARE, REAP_S = 0.15, 0.15, TIMEOUT_S + 0.5
BARE = Path(__file__).parent / "bare_listener.py"


@dataclass(frozen=True, slots=True)
class Setting:
    """What one measurement runs with: `connections` are of each fleet to the store."""

    size: int
    connections: int = CONNECTIONS

    @property
    def name(self) -> str:
        apart = self.connections * FLEETS == self.size
        return f"{self.size:6d} nodes" + (", a connection each" if apart else "")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one size took: shares of a core, resident bytes before and after, seconds from heartbeat to reap."""

    controller: float
    store: float
    bare: float
    controller_bytes: tuple[int, int]
    store_bytes: tuple[int, int]
    reaps_s: tuple[float, ...]


def heartbeats(runs: int, peers: Path) -> None:
    """Every size, with `runs` nodes that fall silent; then the largest with a connection for each node."""
    print(f"\n{'':27}  {'controller':>10}  {'bare loop':>9}  {'×':>5}  {'store':>6}", end="")
    print(f"  {'controller MB':>15}  {'store MB':>15}  silence to reap (timeout {TIMEOUT_S:.0f} s)", flush=True)
    apart = Setting(SIZES[-1], connections=SIZES[-1] // FLEETS)
    for setting in (*map(Setting, SIZES), apart):
        cost = asyncio.run(measure(setting, runs))
        print(_row(setting, cost), flush=True)
        if setting == Setting(SIZES[-1]):
            largest = cost
    for name, share, most in (
        ("controller", largest.controller, CONTROLLER_SHARE),
        ("store", largest.store, STORE_SHARE),
    ):
        print_target(f"{name} ≤ {most:.0%} of a core at {SIZES[-1]}, in %", 100 * share, at_most=100 * most)
    what = f"every reap ≤ {REAP_S:.1f} s after the last heartbeat at {SIZES[-1]}"
    print_target(what, max(largest.reaps_s), at_most=REAP_S)


def _row(setting: Setting, cost: Cost) -> str:
    sizes = [
        f"{before / 2**20:6.1f} → {after / 2**20:6.1f}" for before, after in (cost.controller_bytes, cost.store_bytes)
    ]
    reaps = f"{median(cost.reaps_s):.2f} s ({min(cost.reaps_s):.2f} … {max(cost.reaps_s):.2f})"
    shares = f"{cost.controller:10.1%}  {cost.bare:9.1%}  {cost.controller / cost.bare:5.1f}  {cost.store:6.1%}"
    return f"{setting.name:27}  {shares}  {sizes[0]:>15}  {sizes[1]:>15}  {reaps}"


async def measure(setting: Setting, silent: int) -> Cost:
    """One size: join, settle, watch for `WINDOW_S`, watch the bare loop beside it, then silence `silent` nodes."""
    clock = SystemClock()
    bounds = plain_bounds(heartbeat__timeout=TIMEOUT_S)
    with temporary_folder() as room:
        async with contextlib.AsyncExitStack() as stack:
            stage = await set_up(stack, room, size=setting.size, bounds=bounds, spares=silent)
            controller = await start_controller(stack, stage)
            fleets = []
            for part in range(FLEETS):
                count = setting.size // FLEETS
                numbers = map(str, (1 + part * count, count, setting.connections))
                fleets.append(await start_fleet(stack, "bench.fleet.heartbeats", str(stage.folder.path), *numbers))
            for fleet in fleets:
                send_line(fleet, "begin")
            await until_ordered(stage, RendezvousClosed, "the first round's end")
            await asyncio.sleep(SETTLE_S)
            pids = controller.pid, stage.store.pid
            before = [usage.of(pid, clock) for pid in pids]
            await asyncio.sleep(WINDOW_S)
            after = [usage.of(pid, clock) for pid in pids]
            bare = await _bare_share(stack, stage)
            names = [f"n{1 + index}" for index in range(silent)]
            send_line(fleets[0], f"silence {' '.join(names)}")
            last = [(await read_line(fleets[0])).split() for _ in names]  # when each sent its last heartbeat
            reaps_s = await _reaps(stage, {name: float(at) for name, at in last})
            shares = [late.share_since(early) for early, late in zip(before, after, strict=True)]
            ends = [usage.of(pid, clock).resident_bytes for pid in pids]
            sizes = [(early.resident_bytes, end) for early, end in zip(before, ends, strict=True)]
            return Cost(shares[0], shares[1], bare, sizes[0], sizes[1], reaps_s)


async def _bare_share(stack: contextlib.AsyncExitStack, stage: Stage) -> float:
    """The share of a core of a loop that reads the same heartbeats, and only counts them."""
    clock, where = SystemClock(), urlsplit(stage.address.url)
    words = (str(where.hostname), str(where.port), Keys(stage.address.job).beats)
    bare = await start_python(stack, str(BARE), *words, stdin=PIPE)
    assert bare.stdin is not None
    bare.stdin.write((stage.address.password or "").encode())
    bare.stdin.close()
    await asyncio.sleep(1.0)
    before = usage.of(bare.pid, clock)
    await asyncio.sleep(BARE_S)
    share = usage.of(bare.pid, clock).share_since(before)
    await kill(bare)
    return share


async def _reaps(stage: Stage, last_beats: dict[str, float]) -> tuple[float, ...]:
    """Wait until the journal holds every silent node's loss; seconds from its last heartbeat to that."""
    store = StoreClient(stage.address, clock=SystemClock())
    try:
        async with asyncio.timeout(STEP_S):
            while True:
                lost = {e.record.node: e.t for e in await store.journal() if isinstance(e.record, NodeLost)}
                if strangers := lost.keys() - last_beats.keys():
                    raise BenchTimeout(
                        f"nodes that sent heartbeats were given up: {', '.join(sorted(strangers)[:8])}"
                    )
                if lost.keys() == last_beats.keys():
                    return tuple(lost[name] - at for name, at in last_beats.items())
                await asyncio.sleep(0.25)
    except TimeoutError:
        raise BenchTimeout(f"silent nodes were not given up in {STEP_S:.0f} s") from None
    finally:
        await store.close()
