"""The collectives of examples/digits, over real TCP between threads."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from group import Group, PeerLost, join_group

from nvrx_slurm.lab.devcluster.lifecycle import free_ports


@contextmanager
def groups(world: int) -> Iterator[list[Group]]:
    (port,) = free_ports(1)
    with ThreadPoolExecutor(world) as pool:
        joined = list(pool.map(lambda rank: join_group(rank, world, "127.0.0.1", port, 20.0), range(world)))
    try:
        yield joined
    finally:
        for group in joined:
            group.close()


def together(members: list[Group], call: Callable[[Group], None]) -> None:
    """Each rank makes the call in its own thread; an exception of any rank is raised."""
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(call, members))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_reduce_is_the_sum_in_rank_order_to_the_last_bit(world: int) -> None:
    """Every rank ends with the bits of adding the vectors one after the other, rank 0 first."""
    draw = np.random.default_rng(7)
    vectors = draw.standard_normal((world, 1000)) * 10.0 ** draw.integers(-12, 12, (world, 1000))
    expected = vectors[0].copy()
    for vector in vectors[1:]:
        expected += vector
    results = vectors.copy()
    with groups(world) as members:
        together(members, lambda group: group.all_reduce(results[group.rank]))
    for result in results:
        assert result.tobytes() == expected.tobytes()


def test_a_vector_larger_than_any_socket_buffer_goes_through() -> None:
    """Sixteen megabytes are summed without a deadlock in which two ranks both send and neither reads."""
    vectors = np.ones((3, 2_000_000))
    with groups(3) as members:
        together(members, lambda group: group.all_reduce(vectors[group.rank]))
    assert (vectors == 3.0).all()


def test_broadcast_gives_all_ranks_what_rank_0_has() -> None:
    """A record with several fields arrives whole, though it has no dimension."""
    kind = np.dtype([("step", "<i8"), ("weights", "<f8", 3)])
    records = [np.zeros((), kind) for _ in range(3)]
    records[0][...] = (41, (1.5, 2.5, 3.5))
    with groups(3) as members:
        together(members, lambda group: group.broadcast(records[group.rank]))
    assert all(record == records[0] for record in records)
    assert int(records[2]["step"]) == 41


@pytest.mark.parametrize("lost, learned", [(2, {0: "rank 2", 1: "rank 0"}), (0, {1: "rank 0", 2: "rank 0"})])
def test_a_peer_that_vanishes_ends_the_sum_for_all(lost: int, learned: dict[int, str]) -> None:
    """Each remaining rank loses a peer and names it, whether or not it was connected to the lost rank."""
    with groups(3) as members, ThreadPoolExecutor(2) as pool:
        members[lost].close()
        left = [group for group in members if group.rank != lost]
        assert dict(pool.map(_sum_until_a_loss, left)) == learned


def _sum_until_a_loss(group: Group) -> tuple[int, str]:
    """Sums until a peer is lost, then leaves as a worker does; returns which peer it lost, without the system's
    reason."""
    with pytest.raises(PeerLost) as loss:
        while True:
            group.all_reduce(np.zeros(10))
    group.close()
    return group.rank, str(loss.value).split(" (")[0]


def test_a_rest_ends_when_a_peer_vanishes() -> None:
    """A rank that rests notices the loss at once: it does not sleep until the rest is over."""
    with groups(2) as members:
        members[1].close()
        with pytest.raises(PeerLost, match="rank 1"):
            members[0].rest(100.0)


def test_a_rest_ends_when_a_peer_goes_on() -> None:
    """Data from a peer is not taken for a loss, and can be read afterwards."""
    with groups(2) as members, ThreadPoolExecutor(1) as pool:
        theirs, ours = np.full(4, 2.0), np.full(4, 1.0)
        other = pool.submit(members[1].all_reduce, theirs)
        members[0].rest(100.0)
        members[0].all_reduce(ours)
        other.result(20.0)
    assert ours.tolist() == theirs.tolist() == [3.0] * 4


def test_a_connection_that_is_no_rank_of_the_world_is_refused() -> None:
    """A connection with a wrong greeting, or of a rank of another world, takes no rank's place."""
    port = free_ports(1)[0]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join_group, 0, 2, "127.0.0.1", port, 20.0)
        for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"digits-1" + bytes([0, 0, 0, 1, 0, 0, 0, 9])):
            with _connected(port, first.done) as stranger:
                stranger.sendall(greeting)
                assert not _answer(stranger)
        second = pool.submit(join_group, 1, 2, "127.0.0.1", port, 20.0)
        for group in (first.result(20.0), second.result(20.0)):
            group.close()


def _connected(port: int, given_up: Callable[[], bool]) -> socket.socket:
    while not given_up():
        try:
            return socket.create_connection(("127.0.0.1", port), 20.0)
        except ConnectionRefusedError:
            continue
    raise AssertionError("rank 0 left without waiting for its peer")


def _answer(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(1)
    except ConnectionResetError:
        return b""


def test_ranks_that_do_not_connect_are_named() -> None:
    """Rank 0 names the ranks that did not connect in time."""
    with pytest.raises(TimeoutError, match=r"\[1, 2\]"):
        join_group(0, 3, "127.0.0.1", free_ports(1)[0], 0.01)


def test_a_rank_0_that_does_not_answer_is_named() -> None:
    """The error names the address that the rank tried."""
    port = free_ports(1)[0]
    with pytest.raises(TimeoutError, match=f"rank 0 did not answer at 127.0.0.1:{port}"):
        join_group(1, 3, "127.0.0.1", port, 0.01)
