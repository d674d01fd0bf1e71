"""Ports of payload servers that are ill, each in a named way: for tests and benches, of users too.

A `SickPort` stands before a real server and passes on what both sides say: the bytes before a fault are real ones.
For transports other than tcp `SickLink` has those faults that are made of whole messages.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from nvrx_slurm.transport import protocol
from nvrx_slurm.transport.errors import PeerReset
from nvrx_slurm.transport.protocol import PeerLink, Seen, address_of, host_and_port

PIECE_BYTES = 1 << 16
CONNECT_S = 5.0
# A socket that lingers for 0 s is closed by a reset (socket(7)).
_NO_LINGER = struct.pack("ii", 1, 0)
_ACK_MARK = protocol.Ack(protocol.AckVerdict.TAKEN, 0, 0).pack()[:4]


class FaultStage(StrEnum):
    """Where in a conversation a fault shows: before its first byte, at what the server sends, or at the ack."""

    CONNECT = "connect"
    CHALLENGE = "challenge"
    ANSWER = "answer"
    PAYLOAD = "payload"
    ACK = "ack"


class PortAction(StrEnum):
    """What is done then."""

    HOLD = "hold"  # nothing more is sent, and the connection stays open
    RESET = "reset"  # in the middle of the message
    CLOSE = "close"  # likewise, but properly
    TRICKLE = "trickle"  # the message comes byte by byte
    LATE = "late"  # the message comes after a while
    REPLACE = "replace"  # another message comes in its place
    SWALLOW = "swallow"  # the message is lost, and all else goes on


class PortFault(NamedTuple):
    """`change`: what REPLACE makes of a message."""

    stage: FaultStage
    action: PortAction
    change: Callable[[bytes], bytes] = bytes


def _garbage(message: bytes) -> bytes:
    return random.randbytes(len(message))


def _flipped(message: bytes) -> bytes:
    """One bit of it, in the middle."""
    middle = len(message) // 2
    return message[:middle] + bytes([message[middle] ^ 0x10]) + message[middle + 1 :]


def _answer_with(**by: int) -> Callable[[bytes], bytes]:
    def change(message: bytes) -> bytes:
        answer = protocol.Response.unpack(message)
        more = {name: (getattr(answer, name) + number) % (1 << 64) for name, number in by.items()}
        return answer._replace(**more).pack()

    return change


def _refusing(message: bytes) -> bytes:
    """A server with another token: it makes another proof."""
    challenge = protocol.Challenge.unpack(message)
    return challenge._replace(proof=challenge.proof[::-1]).pack()


# All but "loses-acks" keep a reader from its payload, where there is no other port; that one keeps it from the
# server that the payload was taken.
FAULTS: Mapping[str, PortFault] = MappingProxyType(
    {
        "silent": PortFault(FaultStage.CONNECT, PortAction.HOLD),
        "silent-after-request": PortFault(FaultStage.ANSWER, PortAction.HOLD),
        "silent-in-payload": PortFault(FaultStage.PAYLOAD, PortAction.HOLD),
        "resets": PortFault(FaultStage.CONNECT, PortAction.RESET),
        "resets-after-request": PortFault(FaultStage.ANSWER, PortAction.RESET),
        "resets-in-payload": PortFault(FaultStage.PAYLOAD, PortAction.RESET),
        "resets-at-ack": PortFault(FaultStage.ACK, PortAction.RESET),
        "truncates": PortFault(FaultStage.PAYLOAD, PortAction.CLOSE),
        "truncates-challenge": PortFault(FaultStage.CHALLENGE, PortAction.CLOSE),
        "truncates-answer": PortFault(FaultStage.ANSWER, PortAction.CLOSE),
        "garbage": PortFault(FaultStage.CHALLENGE, PortAction.REPLACE, _garbage),
        "garbage-answer": PortFault(FaultStage.ANSWER, PortAction.REPLACE, _garbage),
        "garbage-payload": PortFault(FaultStage.PAYLOAD, PortAction.REPLACE, _garbage),
        "flips-a-bit": PortFault(FaultStage.PAYLOAD, PortAction.REPLACE, _flipped),
        "trickles": PortFault(FaultStage.PAYLOAD, PortAction.TRICKLE),
        "trickles-hello": PortFault(FaultStage.CHALLENGE, PortAction.TRICKLE),
        "slow-hello": PortFault(FaultStage.CHALLENGE, PortAction.LATE),
        "wrong-generation": PortFault(FaultStage.ANSWER, PortAction.REPLACE, _answer_with(generation=1)),
        "wrong-size": PortFault(FaultStage.ANSWER, PortAction.REPLACE, _answer_with(size=1)),
        "huge-size": PortFault(FaultStage.ANSWER, PortAction.REPLACE, _answer_with(size=1 << 62)),
        "wrong-checksum": PortFault(FaultStage.ANSWER, PortAction.REPLACE, _answer_with(checksum=1)),
        "refuses": PortFault(FaultStage.CHALLENGE, PortAction.REPLACE, _refusing),
        "loses-acks": PortFault(FaultStage.ACK, PortAction.SWALLOW),
    }
)


def fault_of(name: str) -> PortFault:
    """Raises ValueError, which lists what is valid."""
    try:
        return FAULTS[name]
    except KeyError:
        raise ValueError(f"{name!r} is none of the faults {', '.join(FAULTS)}") from None


class SickPort:
    """A port of this machine that leads to `server` (`tcp://host:port`): healthy until `make_sick`, and after `heal`.

    A fault disturbs each conversation that comes to its stage, those under way too; one that was disturbed stays so.
    `pace_s`: between two bytes of one that trickles; `late_s`: how late the late ones are. `connections`: how many
    were accepted; `injected`: how many faults they met. Without a `server` it is silent, or has another fault at the
    connect.
    """

    def __init__(
        self, server: str | None, *, host: str = "127.0.0.1", port: int = 0, pace_s: float = 1.0, late_s: float = 10.0
    ) -> None:
        self.connections = self.injected = 0
        self.server, self.pace_s, self.late_s = server, pace_s, late_s
        self._host, self._fault = host, None if server else FAULTS["silent"]
        self._over = threading.Event()
        self._guard = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._listening = self._listen(port)

    @property
    def address(self) -> str:
        """As refs name it."""
        return self.address_as("tcp")

    def address_as(self, scheme: str) -> str:
        """For a transport whose own handshake is to meet this port."""
        return address_of(scheme, self._host, self._port)

    def make_sick(self, fault: str) -> None:
        """From now on. Raises ValueError for a name that is none of FAULTS."""
        self._fault = fault_of(fault)

    def heal(self) -> None:
        """From now on; a conversation that was disturbed stays so."""
        self._fault = None

    def go_down(self) -> None:
        """Stop listening, and cut every conversation off."""
        self._over.set()
        with self._guard:
            for each in (self._listening, *self._sockets):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        # A thread that accepted meanwhile has started another: join until none is left.
        while True:
            with self._guard:
                threads = list(self._threads)
            if not threads:
                break
            for thread in threads:
                thread.join()
        self._listening.close()

    def come_back(self) -> None:
        """After `go_down`, on the same port."""
        self._over.clear()
        self._listening = self._listen(self._port)

    def close(self) -> None:
        self.go_down()

    def __enter__(self) -> SickPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fault_at(self, stage: FaultStage) -> PortFault | None:
        """The fault at that stage, if there is one now. It is counted as met."""
        fault = self._fault
        if fault is None or fault.stage is not stage:
            return None
        with self._guard:
            self.injected += 1
        return fault

    def _listen(self, port: int) -> socket.socket:
        listening = socket.create_server((self._host, port), backlog=1024)
        self._port: int = listening.getsockname()[1]
        self._start(lambda: self._accept_all(listening))
        return listening

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._guard:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=f"sick port {self._port}", daemon=True)
        with self._guard:
            thread.start()
            self._threads.add(thread)  # it ends after this: it must have the guard for that

    def _accept_all(self, listening: socket.socket) -> None:
        while not self._over.is_set():
            try:
                client, _ = listening.accept()
            # The port goes down, as the loop then finds, or the client has left already.
            except OSError:
                continue
            self.connections += 1
            self._start(partial(self._converse, client))

    def _converse(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, _Ended), self._kept(client):
            if (fault := self.fault_at(FaultStage.CONNECT)) is not None or self.server is None:
                _end(client, fault.action if fault else PortAction.HOLD)
                return
            # Only now: a port with a fault at the connect leaves its server alone.
            with self._kept(socket.create_connection(host_and_port(self.server), CONNECT_S)) as server:
                # CONNECT_S bounds the connect alone: a conversation may be silent for longer.
                server.settimeout(None)
                _Conversation(self, client, server).run()

    @contextlib.contextmanager
    def _kept(self, connection: socket.socket) -> Iterator[socket.socket]:
        """Open for so long, and among those that are cut off when the port goes down."""
        with connection:
            with self._guard:
                self._sockets.add(connection)
            try:
                # `go_down` may have come between `accept` and here: it has not seen this socket.
                if self._over.is_set():
                    raise _Ended
                yield connection
            finally:
                with self._guard:
                    self._sockets.discard(connection)


class _Ended(Exception):
    """The conversation is over."""


class _Conversation:
    """One client, and its server behind the port. One thread carries what either says, message by message."""

    def __init__(self, port: SickPort, client: socket.socket, server: socket.socket) -> None:
        self._port, self._client, self._server = port, client, server
        self._is_greeted = False
        self._sizes = iter((protocol.HELLO_BYTES, protocol.PROOF_BYTES))

    def run(self) -> None:
        """Until one of them leaves, or a fault ends it."""
        hears = {self._client.fileno(): self._from_client, self._server.fileno(): self._from_server}
        poll = select.poll()
        for descriptor in hears:
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                hears[descriptor]()

    def _from_client(self) -> None:
        size = next(self._sizes, None)
        if size is not None:
            self._server.sendall(_take(self._client, size))
            return
        # After the greeting a client sends requests and acks, of different lengths: the first bytes say which.
        mark = _take(self._client, len(_ACK_MARK))
        if mark != _ACK_MARK:
            self._server.sendall(mark + _take(self._client, protocol.REQUEST_BYTES - len(mark)))
            return
        ack = mark + _take(self._client, protocol.ACK_BYTES - len(mark))
        self._pass_on(FaultStage.ACK, ack, self._server)

    def _from_server(self) -> None:
        if not self._is_greeted:
            self._is_greeted = True
            self._pass_on(FaultStage.CHALLENGE, _take(self._server, protocol.CHALLENGE_BYTES), self._client)
            return
        frame = _take(self._server, protocol.ANSWER_BYTES)
        self._pass_on(FaultStage.ANSWER, frame, self._client)
        answer = protocol.Response.unpack(frame)
        if answer.status is not protocol.ResponseStatus.OK:
            return
        # The payload. Its first half is healthy where all of it would be too much to hold.
        healthy = answer.size // 2 if answer.size > PIECE_BYTES else 0
        for start in range(0, healthy, PIECE_BYTES):
            self._client.sendall(_take(self._server, min(PIECE_BYTES, healthy - start)))
        left = answer.size - healthy
        while left:
            piece = _take(self._server, min(PIECE_BYTES, left))
            self._pass_on(FaultStage.PAYLOAD, piece, self._client)
            left -= len(piece)

    def _pass_on(self, stage: FaultStage, message: bytes, to: socket.socket) -> None:
        fault = self._port.fault_at(stage)
        if fault is None:
            to.sendall(message)
            return
        match fault.action:
            case PortAction.SWALLOW:
                return
            case PortAction.REPLACE:
                to.sendall(fault.change(message))
            case PortAction.LATE:
                _pause(self._client, self._port.late_s)
                to.sendall(message)
            case PortAction.TRICKLE:
                for byte in message:
                    to.sendall(bytes([byte]))
                    _pause(self._client, self._port.pace_s)
            case PortAction.HOLD | PortAction.CLOSE | PortAction.RESET:
                # Of a message the first half is healthy: the fault comes in its middle. Of an ack nothing is sent.
                if stage is not FaultStage.ACK:
                    to.sendall(message[: len(message) // 2])
                _end(self._client, fault.action)
                raise _Ended


def _take(connection: socket.socket, size: int) -> bytes:
    """So many bytes; raises _Ended when there are no more."""
    taken = bytearray()
    while len(taken) < size:
        more = connection.recv(size - len(taken))
        if not more:
            raise _Ended
        taken += more
    return bytes(taken)


def _end(client: socket.socket, action: PortAction) -> None:
    """The conversation, in that way. Its caller closes the socket."""
    if action is PortAction.HOLD:
        _pause(client, None)
    elif action is PortAction.RESET:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def _pause(client: socket.socket, seconds: float | None) -> None:
    """Raises _Ended when the client leaves meanwhile, or the port goes down."""
    poll = select.poll()
    # Not POLLIN: what the client sends meanwhile stays unread, and must not end the pause.
    poll.register(client, select.POLLRDHUP)
    if poll.poll(None if seconds is None else seconds * 1000):
        raise _Ended


HOLD_S = 600.0
_STAGES = {protocol.CHALLENGE_BYTES: FaultStage.CHALLENGE, protocol.ANSWER_BYTES: FaultStage.ANSWER}


class SickLink:
    """A server's link, to be served in place of the healthy one: the fault applies to all that is sent over it.

    A message is whole here: one that is reset, or cut off, is half as long. None trickles, and none is late.
    """

    def __init__(self, link: PeerLink, fault: str) -> None:
        self._link, self._fault = link, fault_of(fault)
        self.needs_checksum = link.needs_checksum
        if self._fault.action in (PortAction.TRICKLE, PortAction.LATE):
            raise ValueError(f"{fault!r} is no fault of a link: use a SickPort")

    def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
        fault = self._fault
        if fault.stage is FaultStage.CONNECT:
            self._end(fault)
        if fault.stage is _STAGES.get(len(frame)):
            frame = self._with_fault(fault, frame, deadline)
        if fault.stage is FaultStage.PAYLOAD and payload:
            self._link.send(frame, None, deadline)
            frame, payload = self._with_fault(fault, bytes(payload), deadline), None
        self._link.send(frame, payload, deadline)

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        self._link.receive_into(buffer, deadline)
        if self._fault.stage is FaultStage.ACK and len(buffer) == protocol.ACK_BYTES:
            if self._fault.action is PortAction.SWALLOW:
                self._hold(deadline)
            self._end(self._fault)

    def receive_payload_into(self, buffer: memoryview, deadline: float, seen: Seen | None) -> None:
        self._link.receive_payload_into(buffer, deadline, seen)

    def is_stale(self) -> bool:
        return self._link.is_stale()

    def cut(self) -> None:
        self._link.cut()

    def close(self) -> None:
        self._link.close()

    def drop(self) -> None:
        self._link.drop()

    def _with_fault(self, fault: PortFault, message: bytes, deadline: float) -> bytes:
        """What is sent in its place; raises where nothing is."""
        if fault.action is PortAction.REPLACE:
            return fault.change(message)
        if fault.action is not PortAction.HOLD:
            self._link.send(message[: len(message) // 2], None, deadline)
        self._end(fault)
        raise AssertionError

    def _end(self, fault: PortFault) -> None:
        """Raises PeerReset."""
        if fault.action is PortAction.HOLD:
            self._hold(time.monotonic() + HOLD_S)
        self._link.cut() if fault.action is PortAction.RESET else self._link.close()
        raise PeerReset("this link is sick")

    def _hold(self, deadline: float) -> None:
        """Nothing more is said until the peer leaves: then it raises."""
        self._link.receive_into(memoryview(bytearray(1)), deadline)
