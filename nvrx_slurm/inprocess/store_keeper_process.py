"""The keeper's process (see `store_keeper.py`), by `python -m` with KIND FOLDER LOCK.

`LOCK` is the descriptor of the folder's lock, which goes with this process. Ranks are counted by their connections:
the kernel closes those, in whichever way a rank ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm.inprocess import store_tcp
from nvrx_slurm.inprocess.store_keeper import TORCH, VALKEY, HostedStore, take
from nvrx_slurm.store.embedded import EmbeddedStore, new_socket_name
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.ids import new_secret
from nvrx_slurm.util.processes import dies_with_parent, started_ticks

LOOK_S = 1.0

LINGER_LOOKS = 5  # after how many counts in a row without a connection it ends: ranks start late, and connect again
LOOPBACK = "127.0.0.1"
ESTABLISHED = "01"
# Of connections that the server has not accepted yet, and of those that it has.
CONNECTED = ("02", "03")
# Slurm and terminals send these to all processes of a step or a session; the store ignores them.
_STEP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class KeptValkey:
    """A Valkey in a process of its own, which is started again when it was killed. It then calls `moved`: its address
    has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket: str | None = None
        self.moved = _nothing

    def place(self) -> HostedStore:
        return HostedStore(
            url=self._server.url(LOOPBACK),
            password=self._password,
            mark=self._mark,
            keeper=os.getpid(),
            began=started_ticks(os.getpid()) or 0,
        )

    def connections(self) -> int:
        """How many there are, without its own."""
        return connections(self._server.port) if self._socket is None else connections_of_socket(self._socket)

    async def start(self) -> None:
        await self._start_server()
        self._going = asyncio.create_task(self._keep_going())

    async def _start_server(self) -> None:
        """Start it on a socket or a port, and with a password, that no earlier server had: another process may listen
        on the old port by now."""
        folder = self._folder / "store"
        folder.mkdir(mode=0o700, exist_ok=True)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                (folder / self._socket).unlink()
        self._socket = new_socket_name(folder)
        self._password = new_secret()
        self._mark = new_secret() if self._socket is None else None
        self._server = EmbeddedStore(
            folder,
            bind=LOOPBACK,
            name=self._socket,
            password=self._password,
            mark=self._mark,
            adopt=_adopted(),
        )
        self._process = await self._server.start()

    async def _keep_going(self) -> None:
        """Start it again whenever it was killed, with what it had."""
        while True:
            await self._process.wait()
            await self._start_server()
            self.moved()

    def check(self) -> None:
        """Raise what has ended it for good."""
        if self._going.done():
            self._going.result()

    async def stop(self) -> None:
        self._going.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class KeptTorchStore:
    """The same of torch's TCPStore, in this process."""

    def __init__(self, folder: Path) -> None:
        self.moved = _nothing
        self._listener = socket.create_server((LOOPBACK, 0), backlog=4096)
        self.port: int = self._listener.getsockname()[1]
        self._store: Any = None

    def place(self) -> HostedStore:
        return HostedStore(port=self.port, keeper=os.getpid(), began=started_ticks(os.getpid()) or 0)

    def connections(self) -> int:
        return connections(self.port) - 1  # the process that hosts a TCPStore is its client too

    async def start(self) -> None:
        store_tcp.only_store_of_torch()
        host = store_tcp.torch_store_class()
        descriptor = self._listener.detach()
        self._store = host(LOOPBACK, self.port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)

    def check(self) -> None:
        """Nothing to check: the store is in this process, and ends with it."""

    async def stop(self) -> None:
        self._store = None


def _nothing() -> None:
    pass


def _adopted() -> Callable[[], None]:
    """For the server: it dies with the keeper, and only SIGKILL ends it. The other signals are blocked, not ignored:
    the server sets handlers of its own."""
    die = dies_with_parent(signal.SIGKILL)

    def adopt() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STEP_SIGNALS)
        die()

    return adopt


KeptStore = KeptValkey | KeptTorchStore
_KINDS: dict[str, Callable[[Path], KeptStore]] = {VALKEY: KeptValkey, TORCH: KeptTorchStore}


async def keep(store: KeptStore, folder: Path, *, look_s: float = LOOK_S) -> None:
    """Run the store until no rank is connected. `look_s`: how often the connections are counted."""

    def announce() -> None:
        write_private(folder / "place.json", msgspec.json.encode(store.place()))

    await store.start()
    used = True
    while used:
        announce()
        store.moved = announce
        left = LINGER_LOOKS
        while left:
            await asyncio.sleep(look_s)
            store.check()
            left = LINGER_LOOKS if store.connections() > 0 else left - 1
        store.moved = _nothing
        (folder / "place.json").unlink(missing_ok=True)
        # No rank finds the store from now on, but one may have found it just before.
        await asyncio.sleep(look_s)
        used = store.connections() > 0
    await store.stop()


def connections(port: int) -> int:
    """How many connections a server on this port of this host has."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = (line.split(maxsplit=4) for line in lines)
    return sum(local.endswith(f":{port:04X}") and state == ESTABLISHED for _, local, _, state, _ in rows)


def connections_of_socket(name: str) -> int:
    """How many connections the server on the unix socket of this name has; the name is random."""
    rows = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return sum(len(row) == 8 and row[7].rpartition("/")[2] == name and row[5] in CONNECTED for row in rows)


def remove_abandoned(root: Path) -> None:
    """Remove what keepers that were killed have left in this host's memory."""
    for folder in root.iterdir():
        if (lock := take(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def main(kind: str, folder: Path) -> None:
    for number in _STEP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    remove_abandoned(folder.parent)
    asyncio.run(keep(_KINDS[kind](folder), folder))
    # The lock is still held: a rank that waits for it sees that the folder has gone.
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if os.fork() == 0:
        main(sys.argv[1], Path(sys.argv[2]))
