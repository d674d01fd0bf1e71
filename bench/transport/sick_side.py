"""One process of `sick.py`: `python -m bench.transport.sick_side producer|reader`. Lines of JSON, each answered.

producer   in    [payloads, bytes of each, healthy ports, faults]
           out   {"token", "refs", "ports", "sick": a port for each fault}
reader     in    [token, its refs]                                           out   null
           in    [whose connections, ports, at least so many reads, seconds] out   {"reads", "took_s", "slowest_s"}
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec

from nvrx_slurm.lab.faults.sick_ports import SickPort
from nvrx_slurm.transport import PayloadClient, PayloadRef, PayloadServer, SharedRing

DEADLINE_S = 60.0


def produce(count: int, size: int, healthy: int, faults: list[str]) -> None:
    with SharedRing.create(count, size) as ring, contextlib.ExitStack() as stack:
        server = stack.enter_context(PayloadServer(ring, ports=healthy, host="127.0.0.1"))
        payload = bytes(range(256)) * (size // 256)
        refs = [ring.write_raw(payload).to_json().decode() for _ in range(count)]
        sick = {fault: stack.enter_context(SickPort(server.ports[0])) for fault in faults}
        for fault, port in sick.items():
            port.make_sick(fault)
        addresses = {fault: port.address for fault, port in sick.items()}
        say({"token": server.token.hex(), "refs": refs, "ports": server.ports, "sick": addresses})
        sys.stdin.read()


def read(token: str, refs: list[str]) -> None:
    mine = [PayloadRef.from_json(ref) for ref in refs]
    clients: dict[str, PayloadClient] = {}  # each has its own quarantines
    buffer = bytearray(max(ref.size for ref in mine))
    say(None)
    for name, ports, at_least, seconds in map(json.loads, sys.stdin):
        if name not in clients:
            clients[name] = PayloadClient(token=bytes.fromhex(token), transports=("tcp",))
        there = [msgspec.structs.replace(ref, ports=tuple(ports)) for ref in mine]
        say(_reads(clients[name], there, buffer, at_least, monotonic() + seconds))
    for client in clients.values():
        client.close()


def _reads(
    client: PayloadClient, refs: list[PayloadRef], buffer: bytearray, at_least: int, until: float
) -> dict[str, Any]:
    reads, slowest_s, started = 0, 0.0, monotonic()
    for ref in itertools.cycle(refs):
        began = monotonic()
        if reads >= at_least and began >= until:
            break
        client.read(ref, deadline=DEADLINE_S, into=buffer, keep=True)
        slowest_s = max(slowest_s, monotonic() - began)
        reads += 1
    return {"reads": reads, "took_s": monotonic() - started, "slowest_s": slowest_s}


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {"producer": produce, "reader": read}
    roles[sys.argv[1]](*json.loads(sys.stdin.readline()))
