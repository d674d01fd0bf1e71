"""Two ends of a connection in one process, over real sockets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

from nvrx_slurm.transport.protocol import PeerLink, TokenHandshake, pass_through
from nvrx_slurm.transport.tcp import TcpBackend
from tests.transport.harness import TOKEN, WAIT_S, soon

T = TypeVar("T")

OTHER_TOKEN = b"another job's token, 32 bytes..."


class Side:
    """One side's work, in a thread; `result` raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._results: SimpleQueue[object] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self._results.put(work())
        except BaseException as error:
            self._results.put(error)

    def result(self) -> object:
        value = self._results.get(timeout=WAIT_S)
        self._thread.join(WAIT_S)
        if isinstance(value, BaseException):
            raise value
        return value


@contextlib.contextmanager
def two_ends() -> Iterator[tuple[PeerLink, PeerLink]]:
    """The connecting end, and the accepting one."""
    accepted: SimpleQueue[PeerLink] = SimpleQueue()
    over = threading.Event()

    def keep(link: PeerLink) -> None:
        accepted.put(link)
        over.wait(WAIT_S)

    listener = TcpBackend().listen("127.0.0.1", 0, keep)
    try:
        link = TcpBackend().connect(listener.address, soon())
        try:
            yield link, accepted.get(timeout=WAIT_S)
        finally:
            link.close()
    finally:
        over.set()
        listener.close()


@contextlib.contextmanager
def server_of(serve: Callable[[PeerLink], None]) -> Iterator[str]:
    """A server that handles each connection with `serve`; yields its address."""
    links: list[PeerLink] = []

    def keep(link: PeerLink) -> None:
        links.append(link)
        serve(link)

    listener = TcpBackend().listen("127.0.0.1", 0, keep)
    try:
        yield listener.address
    finally:
        listener.close()
        for link in links:
            link.cut()


def admitted(link: PeerLink, token: bytes = TOKEN, *, eviction_s: float = 60.0) -> bool:
    return pass_through(link, TokenHandshake(token, eviction_s), soon())
