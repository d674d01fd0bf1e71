"""8 readers on 4 ports of which 1 is sick, beside the same readers on the 3 healthy ones."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.processes import JsonChild, temporary_folder
from bench.tables import print_target

READERS, HEALTHY, EACH, SIZE = 8, 3, 4, 1 << 20
FAULTS = ("silent", "resets", "truncates")
FIRST_READS = 4 * (HEALTHY + 1)
"""So many meet each port: what is asked next goes on from port to port."""

TURN_S = 0.5
IN_QUARANTINE_S = 20.0
"""A first quarantine takes no less than 24 s: all turns must fit into it."""

AT_LEAST = 0.9


def transport_sick(runs: int, peers: Path) -> None:
    """Each fault in turn. First every reader meets the sick port; then they read in turns, from 3 ports and 4."""
    with temporary_folder() as room, contextlib.ExitStack() as stack:

        def start(role: str, given: Any) -> tuple[JsonChild, Any]:
            child = JsonChild(role, (sys.executable, "-m", "bench.transport.sick_side", role), log=room / role)
            stack.callback(child.end)
            return child, child.ask(given)

        _, server = start("producer", [READERS * EACH, SIZE, HEALTHY, FAULTS])
        readers = [
            start("reader", [server["token"], server["refs"][number * EACH : (number + 1) * EACH]])[0]
            for number in range(READERS)
        ]
        for fault in FAULTS:
            _measure(readers, fault, server["ports"], server["sick"][fault], runs)


def _measure(readers: Sequence[JsonChild], fault: str, healthy: list[str], sick: str, runs: int) -> None:
    turn_s = min(TURN_S, IN_QUARANTINE_S / (4 * runs))
    three, four = f"{HEALTHY} ports", f"{HEALTHY + 1} ports, one {fault}"
    ports = {three: healthy, four: [*healthy, sick]}
    met = [_read(readers, [name, ports[name], FIRST_READS, 0.0]) for name in (three, four)][1]
    pace: dict[str, list[float]] = {three: [], four: []}
    for number in range(2 * runs):
        for name in (three, four) if number % 2 else (four, three):
            took = _read(readers, [name, ports[name], 0, turn_s])
            pace[name].append(sum(each["reads"] / each["took_s"] for each in took) * SIZE / 1e6)
    print(f"\n{READERS} readers of 1 MiB (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs)")
    for name, paces in pace.items():
        print(f"  {name:<28} {median(paces):8.1f} MB/s  ({min(paces):.1f} … {max(paces):.1f}, {len(paces)} turns)")
    print(f"  the read that met the sick port took up to {max(each['slowest_s'] for each in met):.2f} s")
    share = median(one / other for one, other in zip(pace[four], pace[three], strict=True))
    what = f"{four}: after the first quarantine ≥ {AT_LEAST:g} of the pace on {three}"
    print_target(what, share, at_least=AT_LEAST)


def _read(readers: Sequence[JsonChild], order: list[Any]) -> list[dict[str, Any]]:
    """All at once."""
    for reader in readers:
        reader.order(order)
    return [reader.answer() for reader in readers]
