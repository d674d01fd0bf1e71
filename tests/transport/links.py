"""The far end of links: a process that acts on each link as ordered, and can be killed or stopped meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from nvrx_slurm.transport.backends import by_scheme
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.protocol import PeerLink
from tests.transport.harness import PROCESSES, WAIT_S, digest_of, pattern, soon

Spec = tuple[int, int]
"""A payload, by its size and seed."""


def send(link: PeerLink, frame: bytes, payload: Spec | None = None, seconds: float = WAIT_S) -> None:
    link.send(frame, None if payload is None else pattern(*payload).toreadonly(), soon(seconds))


def receive(link: PeerLink, size: int, seconds: float = WAIT_S) -> bytes:
    frame = bytearray(size)
    link.receive_into(memoryview(frame), soon(seconds))
    return bytes(frame)


def receive_payload(link: PeerLink, size: int, seconds: float = WAIT_S) -> int:
    """The digest of the received payload."""
    buffer = bytearray(size)
    link.receive_payload_into(memoryview(buffer), soon(seconds), None)
    return digest_of(buffer)


def close(link: PeerLink) -> None:
    link.close()


def fork_and_drop(link: PeerLink) -> int:
    """Fork a child that drops the link and stays until it is killed; returns its pid."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            link.drop()
            link.close()
            os.write(told, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(ready, "rb") as pipe:
        assert pipe.read(1) == b"!"
    return pid


VERBS: dict[str, Callable[..., Any]] = {
    verb.__name__: verb for verb in (send, receive, receive_payload, close, fork_and_drop)
}


class Far:
    """The process at the far end. Its links are numbered in the order of their arrival from 0, and from 0 again after
    `begin_again`."""

    def __init__(self, scheme: str, *, port: int = 0) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_far, args=(theirs, scheme, port), daemon=True)
        self._process.start()
        theirs.close()
        self._heard: defaultdict[str, deque[Any]] = defaultdict(deque)
        self._first = self._next = 0
        self._is_spent = False
        self.address: str = self._hear("address")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def accepted(self) -> int:
        """Wait for the next link; returns its number."""
        self._next = int(self._hear("link")) + 1
        return self._next - 1 - self._first

    def connect(self, address: str) -> int:
        """Connect to this address; returns the number of the link."""
        self._pipe.send(("connect", address))
        return self.accepted()

    def tell(self, link: int, verb: str, *args: Any) -> None:
        """Order this on a link, after the earlier orders; `hear` waits for the result."""
        self._pipe.send((self._first + link, verb, args))

    def hear(self, link: int) -> Any:
        value = self._hear(self._first + link)
        if isinstance(value, BaseException):
            raise value
        return value

    def do(self, link: int, verb: str, *args: Any) -> Any:
        self.tell(link, verb, *args)
        return self.hear(link)

    def begin_again(self) -> bool:
        """Close all links, for the next test. Returns False if this process cannot be used again."""
        if self._is_spent or not self._process.is_alive():
            return False
        try:
            for link in range(self._next - self._first):
                self.tell(link, "close")
        except OSError:  # it has just been killed
            return False
        self._first = self._next
        return True

    def close_listener(self) -> None:
        self._is_spent = True
        self._pipe.send(("close listener", None))
        self._hear("closed")

    def kill(self) -> None:
        self._process.kill()
        self._process.join(WAIT_S)

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()

    def _hear(self, of: str | int) -> Any:
        heard = self._heard[str(of)]
        while not heard:
            assert self._pipe.poll(WAIT_S), f"the far end has reported nothing about {of}"
            who, value = self._pipe.recv()
            self._heard[str(who)].append(value)
        return heard.popleft()


class _Told:
    """In the far process: the orders of each link, which its own thread carries out."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._guard = threading.Lock()
        self._queues: dict[int, SimpleQueue[tuple[str, tuple[Any, ...]]]] = {}
        self._numbers = itertools.count()

    def say(self, who: str | int, value: Any) -> None:
        with self._guard:
            self._pipe.send((who, value))

    def tell(self, number: int, verb: str, args: tuple[Any, ...]) -> None:
        if number in self._queues:
            self._queues[number].put((verb, args))

    def serve(self, link: PeerLink) -> None:
        with self._guard:
            number = next(self._numbers)
            self._queues[number] = SimpleQueue()
        self.say("link", number)
        while True:
            verb, args = self._queues[number].get()
            try:
                value = VERBS[verb](link, *args)
            except TransportError as error:
                value = error
            except Exception as error:
                traceback.print_exc()
                value = AssertionError(f"a link raised {error!r}")
            self.say(number, value)
            if verb == "close":
                self._queues.pop(number)
                return


def _far(pipe: Connection, scheme: str, port: int) -> None:
    told = _Told(pipe)
    backend = by_scheme(scheme)
    listener = backend.listen("127.0.0.1", port, told.serve)
    told.say("address", listener.address)
    with contextlib.suppress(EOFError):
        while True:
            match pipe.recv():
                case ("connect", address):
                    link = backend.connect(address, soon())
                    threading.Thread(target=told.serve, args=(link,), daemon=True).start()
                case ("close listener", _):
                    listener.close()
                    told.say("closed", None)
                case (number, verb, args):
                    told.tell(number, verb, args)
