"""Many agents connect to one controller, as when a job starts or its controller was replaced: from the first connect
to the last proof. Beside it: the same while another user keeps opening connections that send nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from statistics import median

from bench.stage import read_line, send_line, start_fleet
from bench.tables import print_rows, print_target
from nvrx_slurm.agent.heartbeat import SPREAD_S_PER_NODE
from nvrx_slurm.journal.folder import LOOPBACK
from nvrx_slurm.liveness.connection import LivenessServer
from nvrx_slurm.util.admission import MOST_UNPROVEN
from nvrx_slurm.util.ids import new_secret
from nvrx_slurm.util.processes import raise_descriptor_limit

FLEETS = 2
FLOOD = 500
SIZES = (1000, 10_000)


def connections(runs: int, peers: Path) -> None:
    """Every size: all at one moment, spread as agents spread themselves, and spread beside a flood."""
    raise_descriptor_limit()
    samples: dict[str, list[float]] = {}
    for _ in range(runs):
        for size in SIZES:
            spread_s = size * SPREAD_S_PER_NODE
            samples.setdefault(f"{size:6,d} at one moment", []).append(asyncio.run(measure(size, 0.0)))
            for name, flood in (("", 0), (f", {FLOOD} silent connections beside", FLOOD)):
                took = asyncio.run(measure(size, spread_s, flood)) - spread_s
                samples.setdefault(f"{size:6,d} within {spread_s:g} s{name}", []).append(took)
    print_rows(
        "until the last agent is connected, after the last one began", samples, unit="ms", first=next(iter(samples))
    )
    slowest = max(map(median, samples.values()))
    print_target("every agent connected within 5 s", slowest, at_most=5.0)


async def measure(size: int, spread_s: float, flood: int = 0) -> float:
    """Seconds from the first agent's start to the last one's proof."""
    token = new_secret()
    most = 0

    def alive(node: str, incarnation: str) -> None:
        nonlocal most
        most = max(most, len(server.connections) - len(server.proven))

    server = LivenessServer(token, alive, lambda node, incarnation: None)
    port = await server.start(LOOPBACK)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.close)
        fleets = []
        if flood:
            flooding = await start_fleet(
                stack, "bench.fleet.connecting", str(port), "0", str(flood), "0", "flood", first=token
            )
            send_line(flooding, "begin")
        for part in range(FLEETS):
            count = size // FLEETS
            words = (str(port), str(part * count), str(count), str(spread_s))
            fleets.append(await start_fleet(stack, "bench.fleet.connecting", *words, first=token))
        before = os.times()
        for fleet in fleets:
            send_line(fleet, "begin")
        results = [(await read_line(fleet)).split() for fleet in fleets]
        after = os.times()
        took = max(float(words[1]) for words in results) - min(float(words[0]) for words in results)
        again = sum(int(words[2]) for words in results)
        cpu_s = after.user + after.system - before.user - before.system
        what = f"{size} agents within {spread_s:g} s, {flood} silent: {took:.2f} s, {again} failed attempts"
        print(f"{what}, at most {most} unproven, {cpu_s:.2f} s of CPU", flush=True)
        assert len(server.proven) == size
        assert most <= MOST_UNPROVEN
        return took
