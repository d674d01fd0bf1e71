"""A process whose reads are interrupted at random points by handlers that raise: `python -m … JSON of a ref`. Ends
with 0 if the only connection to each port is still usable afterwards."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from collections.abc import Callable

import msgspec

from nvrx_slurm.transport import PayloadRef, TransportError
from tests.transport.harness import WAIT_S, soon
from tests.transport.nodes import client_of

INTERRUPTIONS = 1000


class Interrupt(Exception):
    """The exception that the handler raises."""


came: list[int] = []


def interrupt(number: int, _: object) -> None:
    came.append(number)
    raise Interrupt


def read_until_interrupted(read: Callable[[], object]) -> None:
    """Read until interrupted. Where the interpreter drops the exception (in a weak reference's callback), return
    after that read."""
    came.clear()
    with contextlib.suppress(Interrupt):
        signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 1.5e-3))
        while not came:
            with contextlib.suppress(TransportError):
                read()


def main(ref: PayloadRef) -> None:
    signal.signal(signal.SIGALRM, interrupt)
    with client_of("tcp", connections_per_port=1) as client:
        for _ in range(INTERRUPTIONS):
            read_until_interrupted(lambda: client.read(ref, deadline=2.0, keep=True))
        alone = msgspec.structs.replace(ref, ports=ref.ports[:1])
        with client._fetcher._pool.connection(ref.ports[0], soon(), lambda link: None):
            for _ in range(INTERRUPTIONS):
                read_until_interrupted(lambda: client.read(alone, deadline=0.05, keep=True))
        for port in ref.ports:
            client.read(msgspec.structs.replace(ref, ports=(port,)), deadline=WAIT_S / 4, keep=True)


if __name__ == "__main__":
    main(PayloadRef.from_json(sys.argv[1]))
