"""The workers' group: a star of TCP connections around rank 0, and sums over it that are the same every time."""

from __future__ import annotations

import selectors
import socket
import struct
import time

import numpy as np

RETRY_S = 0.002
GREETING = struct.Struct("!8sii")  # magic, rank, world size
MAGIC = b"digits-1"


class PeerLost(Exception):
    """A worker that this one is connected to has gone."""


class Group:
    """All ranks make the same calls in the same order; rank 0 is connected to all, the others to rank 0.

    Any call raises PeerLost as soon as the other end of a connection is gone. Then this rank should leave: so its
    own peers learn of it, and within a round trip all have.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self.rank = rank
        self._peers = dict(sorted(peers.items()))
        self._selector = selectors.DefaultSelector()
        for peer, connection in self._peers.items():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def all_reduce(self, vector: np.ndarray) -> None:
        """Replaces `vector` by the sum over all ranks, added up in rank order: the same bits every time."""
        if self.rank == 0:
            incoming = np.empty_like(vector)
            for peer in self._peers:
                self._receive(peer, incoming)
                vector += incoming
        else:
            self._send(0, vector)
        self.broadcast(vector)

    def broadcast(self, array: np.ndarray) -> None:
        """Replaces `array` by rank 0's."""
        for peer in self._peers:
            if self.rank == 0:
                self._send(peer, array)
            else:
                self._receive(peer, array)

    def rest(self, seconds: float) -> None:
        """Waits so long, or until a peer goes on. Raises PeerLost at once when one is gone."""
        for key, _ in self._selector.select(seconds):
            try:
                alive = key.fileobj.recv(1, socket.MSG_PEEK)
            except OSError as error:
                raise PeerLost(f"rank {key.data} ({error.strerror})") from error
            if not alive:
                raise PeerLost(f"rank {key.data}")

    def close(self) -> None:
        self._selector.close()
        for connection in self._peers.values():
            connection.close()

    def _send(self, peer: int, array: np.ndarray) -> None:
        try:
            self._peers[peer].sendall(array.tobytes())
        except OSError as error:
            raise PeerLost(f"rank {peer} ({error.strerror})") from error

    def _receive(self, peer: int, array: np.ndarray) -> None:
        missing = memoryview(array.reshape(-1).view(np.uint8))
        while missing:
            try:
                count = self._peers[peer].recv_into(missing)
            except OSError as error:
                raise PeerLost(f"rank {peer} ({error.strerror})") from error
            if not count:
                raise PeerLost(f"rank {peer}")
            missing = missing[count:]


def join_group(rank: int, world: int, host: str, port: int, timeout_s: float = 60.0) -> Group:
    """Meets the other ranks at rank 0's address. Raises TimeoutError unless all have come within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    if world == 1:
        return Group(rank, {})
    if rank == 0:
        return Group(rank, _accept_all(world, port, deadline))
    return Group(rank, {0: _connect(rank, world, host, port, deadline)})


def _accept_all(world: int, port: int, deadline: float) -> dict[int, socket.socket]:
    """Rank 0's side: one connection to each other rank. Whoever greets otherwise is turned away."""
    peers: dict[int, socket.socket] = {}
    with socket.create_server(("", port), backlog=world) as server:
        while len(peers) < world - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                absent = [rank for rank in range(1, world) if rank not in peers]
                raise TimeoutError(f"these ranks did not come to port {port}: {absent}") from None
            rank = _read_greeting(connection, world)
            if rank is None or rank in peers:
                connection.close()
            else:
                peers[rank] = connection
    return peers


def _read_greeting(connection: socket.socket, world: int) -> int | None:
    connection.settimeout(1.0)
    try:
        magic, rank, size = GREETING.unpack(connection.recv(GREETING.size))
    except (OSError, struct.error):
        return None
    return rank if magic == MAGIC and size == world and 0 < rank < world else None


def _connect(rank: int, world: int, host: str, port: int, deadline: float) -> socket.socket:
    """The other ranks' side: tries until rank 0 listens, which may start later than they."""
    while time.monotonic() < deadline:
        connection = socket.socket()
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection.connect((host, port))
            # Before anybody listens, the kernel may give our end this very port, and we reach ourselves.
            if connection.getsockname() != connection.getpeername():
                connection.sendall(GREETING.pack(MAGIC, rank, world))
                return connection
        except (OSError, TimeoutError):
            pass  # not there yet; the deadline says when it never will be
        connection.close()
        time.sleep(RETRY_S)
    raise TimeoutError(f"rank 0 did not answer at {host}:{port}")
