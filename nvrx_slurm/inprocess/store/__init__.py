"""What a group shares: a log that all append to, barriers where all arrive, and signs of life.

port.py     what any store must do
redis.py    `RedisStore`: Redis or Valkey; the job's own, one by URL, or one that is started for the group
file.py     `FileStore`: a folder that all ranks reach
tcp.py      `TCPStore`: torch's, hosted outside of the ranks
keeper.py   finds or starts the store of a group that has none; keeping.py is the process that hosts it
inotify.py  waiting for a change of a file
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvrx_slurm.inprocess.store.file import FileStore
    from nvrx_slurm.inprocess.store.port import Connection, Store
    from nvrx_slurm.inprocess.store.redis import RedisStore
    from nvrx_slurm.inprocess.store.tcp import TCPStore

__all__ = ["Connection", "FileStore", "RedisStore", "Store", "TCPStore"]

_HOMES = {"Connection": "port", "FileStore": "file", "RedisStore": "redis", "Store": "port", "TCPStore": "tcp"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
