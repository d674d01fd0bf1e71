"""An in-memory Valkey: the commands that `store/` uses, with the real one's answers (`tests/contract` compares them).

stream.py     one stream
keyspace.py   every key, and the commands
scripts.py    `store/lua`, in Python
server.py     blocking reads; restarts
client.py     redis.asyncio's methods, for `Store` and `HeartbeatReader`
"""

from nvrx_slurm.lab.faults.valkey.client import DirectLink, MemoryClient, ServerLink
from nvrx_slurm.lab.faults.valkey.server import MemoryServer

__all__ = ["DirectLink", "MemoryClient", "MemoryServer", "ServerLink"]
