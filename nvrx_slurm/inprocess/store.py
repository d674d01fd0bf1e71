"""What a group of ranks shares: a log that all append to, barriers where all arrive, and heartbeats.

A `Store` says where it is, and is cheap: the monitor gets one of its own from the same class and arguments. Each
thread opens its own `Connection`.

    store_redis.py           `RedisStore`: Redis or Valkey; the job's own, one by URL, or one started for the group
    store_file.py            `FileStore`: a folder that all ranks reach
    store_tcp.py             `TCPStore`: torch's, hosted outside of the ranks
    store_keeper.py          finds or starts the store of a group that has none
    store_keeper_process.py  the process that hosts it
"""

from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvrx_slurm.inprocess.store_file import FileStore
    from nvrx_slurm.inprocess.store_redis import RedisStore
    from nvrx_slurm.inprocess.store_tcp import TCPStore

__all__ = ["Cancelled", "Connection", "FileStore", "RedisStore", "Store", "TCPStore"]

_HOMES = {"FileStore": "store_file", "RedisStore": "store_redis", "TCPStore": "store_tcp"}

# Stores of users import `Store` and `Connection` from `nvrx_slurm.inprocess.store.port`, where these were once.
port = sys.modules[f"{__name__}.port"] = sys.modules[__name__]


def __getattr__(name: str) -> object:
    # Loaded when asked for: a process needs one of them.
    if name in _HOMES:
        return getattr(importlib.import_module(f"nvrx_slurm.inprocess.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Connection(abc.ABC):
    """One thread's access to what the group shares in one call.

    Members and barriers are those of the call that it was opened for. Every operation is idempotent, and may be
    tried again. It waits while a server restarts, and raises StoreError once the store has not answered for its
    patience. After `cancel` every operation raises `Cancelled`.
    """

    @abc.abstractmethod
    def append(self, entry: bytes, after: int) -> bool:
        """Put an entry into place `after` of the log (counted from 0), if nothing is there yet. Returns whether it
        is there now: of two that are appended to one place, the first one wins, and the same bytes again have won."""

    @abc.abstractmethod
    def read(self, after: int, wait_s: float) -> list[bytes]:
        """The log from place `after` on, in order; waits up to `wait_s` for the first entry, without polling.

        Empty bytes stand for an entry that was refused: a forged one, where entries are signed.
        """

    @abc.abstractmethod
    def arrive(self, barrier: str, member: int, payload: bytes = b"") -> int:
        """Arrive at a barrier with a payload; again replaces the payload. Returns how many members have arrived."""

    @abc.abstractmethod
    def arrivals(self, barrier: str) -> Mapping[int, bytes]:
        """The members that have arrived at a barrier, with their payloads. The cost grows with their number."""

    @abc.abstractmethod
    def arrival(self, barrier: str, member: int) -> bytes | None:
        """The payload of one member; None if it has not arrived."""

    def claim(self, barrier: str, member: int, payload: bytes) -> bytes:
        """Arrive as a member that has not arrived yet. Returns the member's payload, whichever process has arrived:
        of two that claim at once, both get that of the first one; and so does each later one.

        A store of a user that does not override this has a moment between the look and the arrival.
        """
        if (first := self.arrival(barrier, member)) is not None:
            return first
        self.arrive(barrier, member, payload)
        return payload if (now := self.arrival(barrier, member)) is None else now

    @abc.abstractmethod
    def beat(self, member: int, watched: int | None) -> int:
        """Count a heartbeat of a member, and return how many the watched one has sent (0 for None)."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Remove all keys of the call. Where the last member of a group dies, its keys expire after an hour."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """From any thread: a thread that waits in an operation stops waiting."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close sockets and files."""


class Cancelled(Exception):
    """The connection was cancelled."""


class Store(abc.ABC):
    """The place of a group's keys."""

    @abc.abstractmethod
    def connect(self, group: str, call: int) -> Connection:
        """A connection of the calling thread, to the keys of the group's call (counted from 0).

        `group` names one start of one set of processes; nothing else in the same store may ever have that name.
        Raises StoreError if the store cannot be reached.
        """
