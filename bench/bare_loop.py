"""A launcher that only respawns: no membership, no journal, no store, no bound on anything. Standard library only.

Usage: bare_loop.py NODES WORKERS_PER_NODE SPARES COMMAND…

A hub with one child a node, over TCP. A node starts its workers when it receives a cycle, and reports when one of
them dies; the hub then has every node kill its workers and starts the next cycle on the first nodes that are alive.
"""

import os
import select
import signal
import socket
import sys

NODES, PER_NODE, SPARES = map(int, sys.argv[1:4])
COMMAND = sys.argv[4:]


def hub() -> None:
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    for _ in range(NODES + SPARES):
        if os.fork() == 0:
            node(server.getsockname())
    nodes = [at_once(server.accept()[0]) for _ in range(NODES + SPARES)]
    print("all nodes are here", flush=True)
    while len(nodes) >= NODES:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]  # the number of the cycle, and where rank 0 of a training listens
        active = nodes[:NODES]
        for index, connection in enumerate(active):
            connection.sendall(b"%d %d\n" % (port, index))
        wait_for_death(nodes)
        for connection in list(nodes):
            if not is_idle(connection):
                nodes.remove(connection)


def at_once(connection: socket.socket) -> socket.socket:
    # Without it the kernel waits for more to send, 40 ms a round.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def wait_for_death(nodes: list[socket.socket]) -> None:
    """Until a node says that a worker died, or is dead itself; a spare's word is none."""
    readable, _, _ = select.select(nodes, [], [])
    for connection in readable:
        connection.recv(64, socket.MSG_PEEK)


def is_idle(connection: socket.socket) -> bool:
    """Have a node kill its workers; whether it answers."""
    try:
        connection.sendall(b"stop\n")
        said = b""
        while not said.endswith(b"idle\n"):
            chunk = connection.recv(64)
            if not chunk:
                return False
            said += chunk
    except ConnectionError:
        return False
    return True


def node(address: tuple[str, int]) -> None:
    ended, write_end = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    connection = at_once(socket.create_connection(address))
    workers: set[int] = set()
    sources: list[socket.socket | int] = [connection, ended]
    while True:
        for readable in select.select(sources, [], [])[0]:
            if readable is ended:
                os.read(ended, 64)
                if workers and os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    connection.sendall(b"died\n")
            elif (order := connection.recv(64)) == b"stop\n":
                for pid in workers:
                    os.kill(pid, signal.SIGKILL)
                while workers:
                    workers.discard(os.wait()[0])
                connection.sendall(b"idle\n")
            else:
                workers = spawn(*map(int, order.split()))


def spawn(port: int, index: int) -> set[int]:
    workers = set()
    world = {"WORLD_SIZE": str(NODES * PER_NODE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for rank in range(index * PER_NODE, (index + 1) * PER_NODE):
        env = {**os.environ, **world, "RANK": str(rank)}
        # A session each, as all launchers do: on a busy machine Linux shares the processors out by session.
        workers.add(os.posix_spawnp(COMMAND[0], COMMAND, env, setsid=True))
    return workers


hub()
