"""Producers and consumers as processes that call methods as ordered, and can be killed or stopped meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from nvrx_slurm.lab.faults.sick_ports import SickLink
from nvrx_slurm.transport import (
    Limits,
    PayloadClient,
    PayloadRef,
    PayloadServer,
    ServerLimits,
    SharedRing,
    TransportError,
)
from nvrx_slurm.transport.backends import by_scheme
from nvrx_slurm.transport.protocol import PeerLink, greet, host_and_port, request
from nvrx_slurm.transport.ring import Claim
from nvrx_slurm.transport.slots import State
from tests.transport.harness import PROCESSES, TOKEN, WAIT_S, Async, admit_and_serve, digest_of, pattern, soon

BRISK = Limits(answer_s=0.5, bytes_per_s=1e6, calls=2, pause_s=0.02)
"""A client that gives up a silent port soon, which keeps tests short."""


class Node:
    """A process that creates one object, and calls its methods by name."""

    def __init__(self, make: Callable[..., Any], *args: Any, **named: Any) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_obey, args=(theirs, make, args, named))
        self._process.start()
        theirs.close()
        self.hear()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def hear(self, timeout: float = 3 * WAIT_S) -> Any:
        assert self._pipe.poll(timeout), "the other process does not answer"
        value = self._pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def do(self, method: str, *args: Any) -> Any:
        self.tell(method, *args)
        return self.hear()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(WAIT_S)

    def leave(self) -> int | None:
        """Let the process end by itself; returns its exit code."""
        self._pipe.close()
        self._process.join(WAIT_S)
        return self._process.exitcode

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()


def _obey(pipe: Any, make: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
    try:
        who = make(*args, **named)
    except Exception as error:
        pipe.send(error)
        return
    pipe.send(None)
    try:
        while True:
            method, given = pipe.recv()
            try:
                pipe.send(getattr(who, method)(*given))
            except TransportError as error:
                pipe.send(error)
            except Exception as error:
                pipe.send(AssertionError(f"{method} raised {error!r}"))
    except EOFError:
        who.end()


@contextlib.contextmanager
def node(make: Callable[..., Any], *args: Any, **named: Any) -> Iterator[Node]:
    started = Node(make, *args, **named)
    try:
        yield started
    finally:
        started.close()


class Liar:
    """One more port of a producer's ring. Links that connect while it has a `fault` get that fault."""

    def __init__(self, producer: Producer, fault: str | None) -> None:
        self.producer, self.fault = producer, fault
        self.links: list[PeerLink] = []
        self.listener = by_scheme(producer.scheme, TOKEN).listen("127.0.0.1", 0, self.serve)

    @property
    def address(self) -> str:
        return self.listener.address

    def serve(self, link: PeerLink) -> None:
        self.links.append(link)
        ring, seen = self.producer.ring, SickLink(link, self.fault) if self.fault else link
        admit_and_serve(seen, {ring.name: ring}, self.producer.limits)

    def close(self) -> None:
        self.listener.close()
        for link in self.links:
            link.cut()


class Producer:
    """A ring and its server."""

    def __init__(
        self,
        scheme: str = "tcp",
        *,
        slots: int = 4,
        slot_bytes: int = 1 << 20,
        overwrite: bool = False,
        ports: int = 2,
        eviction_s: float = 60.0,
        read_s: float = 120.0,
        most_links: int = 1024,
    ) -> None:
        self.scheme = scheme
        self.limits = ServerLimits(read_s=read_s, eviction_s=eviction_s)
        self.most_links = most_links
        self.ring = SharedRing.create(slots, slot_bytes, overwrite=overwrite)
        self.liars: dict[str, Liar] = {}
        self.writing: Async | None = None
        self.server = self._serve(ports)

    def ports(self) -> tuple[str, ...]:
        return self.server.ports

    def write(self, size: int, seed: int = 1) -> PayloadRef:
        return self.server.refer(self.ring.write_raw(pattern(size, seed)))

    def write_many(self, count: int, size: int, first: int = 0) -> list[PayloadRef]:
        """Write payloads, each with its index as its seed."""
        return [self.write(size, seed) for seed in range(first, first + count)]

    def write_on(self, size: int) -> None:
        """Overwrite as fast as possible in a thread, until `stop_writing`."""
        self.refs = [self.write(size, 0)]
        self.is_enough = threading.Event()

        def write() -> None:
            while not self.is_enough.is_set():
                self.refs.append(self.write(size, len(self.refs)))

        self.writing = Async(write)

    def newest(self) -> tuple[int, PayloadRef]:
        """The seed and the ref of the newest payload."""
        seed = len(self.refs) - 1
        return seed, self.refs[seed]

    def stop_writing(self) -> None:
        assert self.writing is not None
        self.is_enough.set()
        self.writing.result()

    def states(self) -> list[State]:
        return [slot.state for slot in self.ring.slot_states()]

    def counts(self) -> dict[str, int]:
        metrics = self.ring.metrics()._asdict()
        metrics.pop("states")
        return metrics

    def ready(self) -> int:
        return self.ring.get_ready_count()

    def links(self) -> int:
        return len(self.server._links)

    def lie(self, fault: str) -> str:
        """Open another port of this ring, on which every link has the fault; returns its address."""
        liar = Liar(self, fault)
        self.liars[liar.address] = liar
        return liar.address

    def lied_to(self) -> list[int]:
        """The number of links that each of these ports has had."""
        return [len(liar.links) for liar in self.liars.values()]

    def tell_the_truth(self, address: str) -> None:
        """Let later links to that port have no fault."""
        self.liars[address].fault = None

    def close_server(self) -> float:
        """Close the server; returns how long that took."""
        began = time.monotonic()
        self.server.close()
        return time.monotonic() - began

    def serve_again(self) -> None:
        """Serve on the same ports as before."""
        self.server = self._serve([host_and_port(port)[1] for port in self.server.ports])

    def fork(self) -> int:
        """Fork a child that closes the server and ends; returns its exit code."""
        return _in_child(lambda: self.server.close())

    def end(self) -> None:
        for liar in self.liars.values():
            liar.close()
        self.server.close()
        self.ring.close()
        self.ring.unlink()

    def _serve(self, ports: int | list[int]) -> PayloadServer:
        return PayloadServer(
            self.ring,
            transport=self.scheme,
            ports=ports,
            host="127.0.0.1",
            node="n1",
            token=TOKEN,
            limits=self.limits,
            most_links=self.most_links,
        )


class Consumer:
    """A process with a client."""

    def __init__(self, *transports: str) -> None:
        self.client = client_of(*transports)

    def read(self, ref: PayloadRef, deadline: float = WAIT_S) -> int:
        """The digest of the payload."""
        payload = self.client.read(ref, deadline=deadline)
        assert isinstance(payload, bytes | bytearray | memoryview)
        return digest_of(payload)

    def fork_and_read(self, mine: PayloadRef, childs: PayloadRef, expected: int) -> tuple[int, int]:
        """Read in a child, and then in this process. Returns the digest of the latter, and the child's exit code."""

        def read() -> None:
            assert self.read(childs) == expected

        code = _in_child(read)
        return self.read(mine), code

    def hang_at(self, ref: PayloadRef) -> None:
        """Request a payload, begin to receive it, and never go on."""
        link = asked(ref)
        link.receive_payload_into(memoryview(bytearray(ref.size)), soon(), lambda piece: threading.Event().wait())

    def end(self) -> None:
        self.client.close()


def client_of(*transports: str, limits: Limits | None = None, **named: Any) -> PayloadClient:
    return PayloadClient(token=TOKEN, transports=transports or ("tcp",), limits=limits, **named)


class StandingRing:
    """A ring whose server pauses for longer than its lease just after it has claimed a slot."""

    def __init__(self, ring: SharedRing, meanwhile: Callable[[], object]) -> None:
        self._ring, self._meanwhile = ring, meanwhile

    def claim(self, slot: int, generation: int, lease_s: float) -> object:
        claim = self._ring.claim(slot, generation, lease_s=1e-6)
        assert isinstance(claim, Claim)
        self._meanwhile()
        return claim

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


def asked(ref: PayloadRef, budget_s: float = WAIT_S) -> PeerLink:
    """A reader's link over which the payload was requested, and nothing was received yet."""
    link = by_scheme(ref.ports[0].partition("://")[0], TOKEN).connect(ref.ports[0], soon())
    link.send(greet(link, TOKEN, soon()).proof, None, soon())
    request(link, ref, budget_s=budget_s, deadline=soon())
    return link


def _in_child(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
