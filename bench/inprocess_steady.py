"""What a wrapped function costs while nothing fails: a ping, and the CPU of all that watches it."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from pathlib import Path

from bench import usage
from bench.errors import PeerFailed
from bench.inprocess_group import NEEDS, OURS, SIDES, Group, group, valkey
from bench.processes import interpreter, temporary_folder
from bench.tables import Target, print_rows, print_targets
from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.util.clock import SystemClock

SIZE = 4
SETTLED_S, MEASURED_S = 5.0, 30.0
PING, SHARE = "ping", "share"

Samples = dict[str, dict[str, list[float]]]  # ping or share → who → what was measured


def steady(runs: int, peers: Path) -> None:
    """Both sides in turn, with default options; as many times a million pings as runs."""
    samples: Samples = defaultdict(lambda: defaultdict(list))
    asyncio.run(_measure(samples, runs, interpreter(NEEDS, peers)))
    print_rows("a million pings, so the ns of one", samples[PING], unit="ms", first=OURS)
    print_targets(samples[PING], [Target("≤ 1 s a million, so 1 µs each", None, (OURS,), at_most=1.0)])
    title = f"watchdog and monitor over {MEASURED_S:.0f} s, in thousandths of a core a rank"
    print_rows(title, samples[SHARE], unit="s", first=OURS)
    print_targets(samples[SHARE], [Target("< 1 thousandth of a core a rank", None, (OURS,), at_most=1.0)])


async def _measure(samples: Samples, runs: int, python: Path) -> None:
    with temporary_folder() as room:
        async with valkey(room) as store:
            for side in SIDES:
                before = set(descendants(os.getpid()))
                async with group(python, side, SIZE, {}, store, room) as ranks:
                    samples[SHARE][side] += await _shares(ranks, before)
                    for _ in range(runs):
                        ranks.send_line(0, "ping")
                        samples[PING][side].append(await ranks.until_printed("pings"))
                    await ranks.finish()


async def _shares(ranks: Group, before: set[int]) -> list[float]:
    """Thousandths of a core: each rank's threads beside the main one, and its part of all monitors.

    Raises PeerFailed where there are fewer monitors than ranks.
    """
    await asyncio.sleep(SETTLED_S)
    members = [process.pid for process in ranks.processes.values()]
    monitors = set(descendants(os.getpid())) - before - set(members)
    if len(monitors) < len(members):
        raise PeerFailed(f"{len(members)} ranks have {len(monitors)} monitors")
    first = _usages(members, main_thread=False), _usages(monitors, main_thread=True)
    await asyncio.sleep(MEASURED_S)
    last = _usages(members, main_thread=False), _usages(monitors, main_thread=True)
    watching = sum(last[1][pid].share_since(first[1][pid]) for pid in monitors) / len(members)
    return [1000.0 * (last[0][pid].share_since(first[0][pid]) + watching) for pid in members]


def _usages(pids: list[int] | set[int], *, main_thread: bool) -> dict[int, usage.Usage]:
    clock = SystemClock()
    return {pid: usage.of(pid, clock, main_thread=main_thread) for pid in pids}
