"""What readers that stay cost on a job of 1,000 ranks: `metrics --listen` while it is scraped, and `top`.

Store and controller are the real ones; every node sends a heartbeat once a second, with the step of each of its
ranks, and the journal grows. Shares are of CPU time, so other processes of the machine disturb them little.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import urllib.request
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from bench.processes import temporary_folder
from bench.stage import STEP_S, Stage, send_line, set_up, start_controller, start_fleet, start_python, until_ordered
from bench.tables import print_target
from nvrx_slurm.journal.records import DumpAsked, RendezvousClosed
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.report.journal_stream import post
from nvrx_slurm.util.clock import SystemClock

NODES = 125
SCRAPE_S = 15.0
"""Prometheus's usual interval is 15 s or 60 s."""
WINDOW_S = 30.0
ENTRY_S = 0.5
MOST_SHARE = 0.02


def live_readers(runs: int, peers: Path) -> None:
    """Print the share of a core of each, over `runs` windows."""
    shares = asyncio.run(_measure(runs))
    for name, found in shares.items():
        print(f"  {name:20}  {' '.join(f'{share:.2%}' for share in found)}")
        print_target(f"{name} ≤ {MOST_SHARE:.0%} of a core, in %", 100 * min(found), at_most=100 * MOST_SHARE)


async def _measure(runs: int) -> dict[str, list[float]]:
    clock = SystemClock()
    with temporary_folder() as room:
        async with contextlib.AsyncExitStack() as stack:
            stage = await set_up(stack, room, size=NODES, bounds=plain_bounds())
            await start_controller(stack, stage)
            fleet = await start_fleet(stack, "bench.fleet.heartbeats", str(stage.folder.path), "1", str(NODES), "1")
            send_line(fleet, "begin")
            await until_ordered(stage, RendezvousClosed, "the first rendezvous")
            metrics, url = await _start_metrics(stack, room)
            readers = {"metrics --listen": metrics, "top": await _start_top(stack, room)}
            helpers = [asyncio.create_task(each) for each in (_write(stage), _scrape(url))]
            stack.callback(lambda: [each.cancel() for each in helpers])
            await asyncio.sleep(SCRAPE_S)  # both have read what was there
            shares: dict[str, list[float]] = {name: [] for name in readers}
            for _ in range(runs):
                began, before = clock.monotonic(), {name: _cpu_s(reader.pid) for name, reader in readers.items()}
                await asyncio.sleep(WINDOW_S)
                for name, reader in readers.items():
                    shares[name].append((_cpu_s(reader.pid) - before[name]) / (clock.monotonic() - began))
            for each in helpers:
                assert not each.done(), each.exception()
    return shares


def _cpu_s(pid: int) -> float:
    # Threads that have ended count too: the server has one for each scrape, which `usage.of` would miss.
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _start_metrics(stack: contextlib.AsyncExitStack, room: Path) -> tuple[Process, str]:
    words = ("metrics", "bench", "--listen", "127.0.0.1:0", "--folder", str(room))
    process = await start_python(stack, "-m", "nvrx_slurm", *words, stderr=PIPE)
    assert process.stderr is not None
    said = await asyncio.wait_for(process.stderr.readline(), STEP_S)
    found = re.search(r"http://\S+", said.decode())
    assert found is not None, said
    return process, found[0]


async def _start_top(stack: contextlib.AsyncExitStack, room: Path) -> Process:
    """On a terminal of 120 × 50, whose lines are read and counted for its ranks."""
    master, slave = pty.openpty()
    stack.callback(os.close, master)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
    words = ("top", "bench", "--folder", str(room))
    process = await start_python(stack, "-m", "nvrx_slurm", *words, stdin=slave, stdout=slave)
    os.close(slave)
    drawn, seen = asyncio.Event(), bytearray()

    def read() -> None:
        seen.extend(os.read(master, 1 << 16))
        if b"RANK  NODE" in seen:
            drawn.set()
            del seen[:-16]

    loop = asyncio.get_running_loop()
    loop.add_reader(master, read)
    stack.callback(loop.remove_reader, master)
    await asyncio.wait_for(drawn.wait(), STEP_S)
    return process


async def _write(stage: Stage) -> None:
    """A user's request each half second: with the controller's answer two entries of the journal."""
    for number in range(1 << 30):
        fact = DumpAsked(request=f"bench{number}", by="bench", ranks=(0,))
        await asyncio.to_thread(post, stage.address, fact)
        await asyncio.sleep(ENTRY_S)


async def _scrape(url: str) -> None:
    def once() -> None:
        with urllib.request.urlopen(url, timeout=STEP_S) as reply:
            assert b"nvrx_rank_quiet_max_seconds" in reply.read()

    while True:
        await asyncio.to_thread(once)
        await asyncio.sleep(SCRAPE_S)
