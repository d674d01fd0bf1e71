"""The keeper's process (see `keeper.py`): `python -m nvrx_slurm.inprocess.store.keeping KIND FOLDER LOCK`.

`LOCK` is the descriptor of the folder's lock, which goes with this process. Ranks are counted by their connections:
whatever ends a rank, the kernel closes those.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nvrx_slurm.files import write_private
from nvrx_slurm.ids import new_secret
from nvrx_slurm.inprocess.store.keeper import TORCH, VALKEY, Place
from nvrx_slurm.processes import dies_with_parent
from nvrx_slurm.store.embedded import EmbeddedStore

LOOK_S = 1.0
"""How often the connections are counted."""

LINGER_LOOKS = 5
"""After how many looks without a connection it ends: a rank is about to come, or to come again."""

FIRST_LOOKS = 30
"""The same before the first one: ranks start, and import what they need."""

LOOPBACK = "127.0.0.1"
ESTABLISHED = "01"
_OTHERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What Slurm and terminals send to all processes of a step or a session; none of it is for the store."""


class _Kept(Protocol):
    """A store that is kept. `own`: how many connections it has to itself."""

    place: Place
    own: int

    async def start(self) -> None: ...
    async def mend(self) -> None: ...
    async def stop(self) -> None: ...


class _Valkey:
    own = 0

    def __init__(self, folder: Path) -> None:
        self._password = new_secret()
        self._server = EmbeddedStore(folder / "store", bind=LOOPBACK, password=self._password, adopt=_adopted())
        self._process: Process | None = None

    async def start(self) -> None:
        self._process = await self._server.start()
        self.place = Place(self._server.port, self._password)

    async def mend(self) -> None:
        """Start it again if it was killed: on the same port, with what it had."""
        if self._process is None or self._process.returncode is not None:
            await self.start()

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class _Torch:
    own = 1  # whoever hosts a TCPStore is its client too

    def __init__(self, folder: Path) -> None:
        self._listener = socket.create_server((LOOPBACK, 0), backlog=4096)
        self._store: Any = None

    async def start(self) -> None:
        host = importlib.import_module("torch.distributed").TCPStore
        self.place = Place(self._listener.getsockname()[1])
        descriptor = self._listener.detach()
        self._store = host(
            LOOPBACK, self.place.port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )

    async def mend(self) -> None:
        """It is in this process: it ends with it."""

    async def stop(self) -> None:
        self._store = None


def _adopted() -> Callable[[], None]:
    """For the server: it dies with us, and knows no signal but SIGKILL. Blocked, since it has handlers of its own."""
    die = dies_with_parent(signal.SIGKILL)

    def adopt() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _OTHERS)
        die()

    return adopt


_KINDS: dict[str, Callable[[Path], _Kept]] = {VALKEY: _Valkey, TORCH: _Torch}


async def keep(store: _Kept, folder: Path) -> None:
    """Until nobody is connected any more."""
    await store.start()
    place = folder / "place.json"
    while True:
        write_private(place, msgspec.json.encode(store.place))
        await _until_unused(store)
        place.unlink(missing_ok=True)  # nobody finds it from now on; somebody may just have done so
        if not connections(store.place.port) - store.own:
            break
    await store.stop()


async def _until_unused(store: _Kept) -> None:
    looks = FIRST_LOOKS
    while looks:
        await asyncio.sleep(LOOK_S)
        await store.mend()
        used = connections(store.place.port) > store.own
        looks = LINGER_LOOKS if used else looks - 1


def connections(port: int) -> int:
    """How many connections a server on this port of this host has."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = (line.split(maxsplit=4) for line in lines)
    return sum(local.endswith(f":{port:04X}") and state == ESTABLISHED for _, local, _, state, _ in rows)


def main(kind: str, folder: Path) -> None:
    for number in _OTHERS:
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(keep(_KINDS[kind](folder), folder))
    shutil.rmtree(folder, ignore_errors=True)  # with the lock still held: who waits for it sees that it has gone


if __name__ == "__main__":
    if os.fork() == 0:
        main(sys.argv[1], Path(sys.argv[2]))
