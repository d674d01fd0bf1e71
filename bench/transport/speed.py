"""Payloads of 1 KiB to 64 MiB from one process to another: nvrx-slurm beside what it could be made of."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.errors import PeerMissing
from bench.processes import interpreter, temporary_folder
from bench.tables import print_target
from bench.transport.pair import Contestant, Pair

KIB, MIB = 1 << 10, 1 << 20
LARGE = MIB

SHARED, SOCKETS, STREAMS = "shared memory, bare copy", "sockets, bare recv_into", "asyncio streams"
OURS_SHM, OURS_RING, OURS_RING_UNCHECKED, OURS_VIEW, OURS_TCP, OURS_UCXX = (
    "nvrx-slurm: client, shm",
    "nvrx-slurm: ring.read, checksum",
    "nvrx-slurm: ring.read, no checksum",
    "nvrx-slurm: ring.view, unchecked",
    "nvrx-slurm: client, tcp, checksum",
    "nvrx-slurm: client, ucxx, checksum",
)
UCXX_NEEDS, NIXL_NEEDS = ("ucxx", "numpy"), ("nixl_cu12", "numpy")
OURS_NEEDS = ("msgspec", "xxhash")


OVER_TCP = {"UCX_TLS": "tcp,self"}


def _payload_client(
    name: str, how: str, transport: str, *, checksum: bool = True, needs: tuple[str, ...] = ()
) -> Contestant:
    options = {"how": how, "transport": transport, "checksum": checksum}
    return Contestant(name, "payload_client", (*OURS_NEEDS, *needs), options, OVER_TCP)


CONTESTANTS = (
    Contestant(SHARED, "shared_memory"),
    _payload_client(OURS_SHM, "client", "shm"),
    _payload_client(OURS_RING, "ring", "shm"),
    _payload_client(OURS_RING_UNCHECKED, "ring", "shm", checksum=False),
    _payload_client(OURS_VIEW, "view", "shm"),
    Contestant(SOCKETS, "sockets"),
    _payload_client(OURS_TCP, "client", "tcp"),
    Contestant(STREAMS, "streams"),
    Contestant("pyzmq, tcp", "zeromq", ("zmq",)),
    Contestant("ucxx, bare, tcp", "ucx", UCXX_NEEDS, environment=OVER_TCP),
    _payload_client(OURS_UCXX, "client", "ucxx", needs=UCXX_NEEDS),
    Contestant("nixl, bare, tcp", "nixl", NIXL_NEEDS, environment=OVER_TCP),
    Contestant("nixl, bare, its choice on one node", "nixl", NIXL_NEEDS),
)


@dataclass(frozen=True, slots=True)
class Load:
    """`count` payloads are written and read in a turn; each contestant has `turns` of them in a run."""

    count: int
    turns: int


LOADS = {
    KIB: Load(128, 4),
    64 * KIB: Load(64, 4),
    MIB: Load(32, 8),
    16 * MIB: Load(8, 4),
    64 * MIB: Load(4, 4),
}


@dataclass(frozen=True, slots=True)
class Promise:
    """The least pace of `who`, as a multiple of `over`'s in the same round, for these sizes."""

    what: str
    who: str
    over: str
    sizes: range
    at_least: float


PROMISES = (
    Promise("of the bare shared-memory copy ≥ 0.8", OURS_SHM, SHARED, range(LARGE, 1 << 40), 0.8),
    Promise("of bare recv_into ≥ 0.85", OURS_TCP, SOCKETS, range(LARGE, 1 << 40), 0.85),
    Promise("asyncio streams ≥ 4 ×", OURS_TCP, STREAMS, range(16 * MIB, 1 << 40), 4.0),
    Promise("of bare recv_into's round trips a second ≥ 1/1.5", OURS_TCP, SOCKETS, range(KIB, KIB + 1), 1 / 1.5),
    Promise("of asyncio streams' round trips a second ≥ 1/1.5", OURS_TCP, STREAMS, range(KIB, KIB + 1), 1 / 1.5),
)
FLAT = 2.0

Taken = dict[str, list[float]]  # who → the median of each of its turns, in seconds


def transport(runs: int, peers: Path) -> None:
    """All of them in turn, at one size after the other."""
    there = dict(_there(peers))
    reads: dict[int, Taken] = {}
    for size, load in LOADS.items():
        writes, reads[size] = _measure(there, size, load, runs)
        _print("read", size, reads[size], SOCKETS)
        _print("write", size, {who: took for who, took in writes.items() if who in WRITERS}, SHARED)
        _print_promises(size, reads[size])
    _print_view({size: taken[OURS_VIEW] for size, taken in reads.items() if OURS_VIEW in taken})
    _print_overview(reads)


WRITERS = (SHARED, OURS_RING, OURS_RING_UNCHECKED)
"""Into whose memory a write is one of shared memory: a bare copy, and a ring with and without a checksum."""


def _there(peers: Path) -> Iterator[tuple[Contestant, Path]]:
    """Who takes part, and the interpreter of its processes; who is missing is named."""
    for contestant in CONTESTANTS:
        try:
            yield contestant, interpreter(contestant.needs, peers)
        except PeerMissing as missing:
            print(f"{contestant.name} is left out: {missing}", flush=True)


def _measure(there: Mapping[Contestant, Path], size: int, load: Load, runs: int) -> tuple[Taken, Taken]:
    """The median of each contestant's turns, writing and reading."""
    writes: Taken = defaultdict(list)
    reads: Taken = defaultdict(list)
    # New processes for each run: which memory they get is worth a tenth of a copy, and luck.
    for _ in range(runs):
        with _pairs(there, size, load.count) as pairs:
            names = list(pairs)
            # Each has one turn in each round, so that whatever else the machine does hits all alike, and in each
            # round another one is the first. The first round, and the first payload of each turn, are for warming up.
            for number in range(load.turns + 1):
                first = number % len(names)
                for name in (*names[first:], *names[:first]):
                    written, read = pairs[name].turn()
                    if number:
                        writes[name].append(median(written[1:]))
                        reads[name].append(median(read[1:]))
    return writes, {name: reads[name] for name in names}


@contextlib.contextmanager
def _pairs(there: Mapping[Contestant, Path], size: int, count: int) -> Iterator[dict[str, Pair]]:
    with temporary_folder() as room, contextlib.ExitStack() as stack:
        pairs: dict[str, Pair] = {}
        for contestant, python in there.items():
            pairs[contestant.name] = pair = Pair(contestant, python, size, count, room)
            stack.callback(pair.end)
        yield pairs


def _print(what: str, size: int, taken: Taken, over: str) -> None:
    print(f"\n{what} {_text(size)} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; × the time of: {over})")
    width = max(map(len, taken))
    for name, took in taken.items():
        middle = median(took)
        times = f"{middle * 1e6:10.1f} µs  ({min(took) * 1e6:.1f} … {max(took) * 1e6:.1f}, {len(took)} turns)"
        print(f"  {name:<{width}}  {times:<52} {size / middle / 1e9:7.2f} GB/s {_ratio(taken, name, over):8.2f} ×")


def _print_promises(size: int, taken: Taken) -> None:
    for promise in PROMISES:
        if size in promise.sizes and {promise.who, promise.over} <= taken.keys():
            pace = _ratio(taken, promise.over, promise.who)
            print_target(f"{promise.who}, {_text(size)}: {promise.what}", pace, at_least=promise.at_least)


def _print_view(by_size: Mapping[int, list[float]]) -> None:
    if by_size:
        small, large = median(by_size[min(by_size)]), median(by_size[max(by_size)])
        what = f"{OURS_VIEW}: {_text(max(by_size))} takes ≤ {FLAT:g} × the time of {_text(min(by_size))}"
        print_target(what, large / small, at_most=FLAT)


def _print_overview(reads: Mapping[int, Taken]) -> None:
    _print_matrix("round trip (µs)", {size: _medians(taken, 1e-6) for size, taken in reads.items()})
    paces = {
        size: {who: 1 / took for who, took in _medians(taken, size / 1e6).items()} for size, taken in reads.items()
    }
    _print_matrix("throughput (MB/s)", paces)


def _print_matrix(title: str, columns: Mapping[int, Mapping[str, float]]) -> None:
    names = list(next(iter(columns.values())))
    width = max(map(len, names))
    print(f"\n{title:<{width + 2}} {' '.join(f'{_text(size):>10}' for size in columns)}")
    for name in names:
        print(f"  {name:<{width}} {' '.join(f'{column[name]:10.1f}' for column in columns.values())}", flush=True)


def _medians(taken: Taken, unit: float) -> dict[str, float]:
    return {who: median(took) / unit for who, took in taken.items()}


def _ratio(taken: Taken, name: str, over: str) -> float:
    # Of the rounds' own ratios: what slows a whole round down is in both.
    return median(one / other for one, other in zip(taken[name], taken[over], strict=True))


def _text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
