"""What an agent sends, byte for byte as redis-py would, and what it gets back."""

from __future__ import annotations

import hashlib
from importlib import resources

from nvrx_slurm.store.client import BLOCK_MS
from nvrx_slurm.store.keys import Keys

JOIN_SCRIPT = (resources.files("nvrx_slurm.store") / "lua" / "join.lua").read_text()
JOIN_SHA = hashlib.sha1(JOIN_SCRIPT.encode()).hexdigest()
_BLOCK = str(BLOCK_MS)


def command(*parts: bytes | str) -> bytes:
    """One command in RESP."""
    raw = [part.encode() if isinstance(part, str) else part for part in parts]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in raw)


def join(keys: Keys, incarnation: str, packed: bytes) -> bytes:
    """`Store.join`."""
    names = (keys.inbox, keys.orders, keys.shutdown(0), keys.controller, keys.joins)
    return command("EVALSHA", JOIN_SHA, "5", *names, packed, incarnation)


def post(keys: Keys, packed: bytes) -> bytes:
    """`Store.post`."""
    return command("XADD", keys.inbox, "*", "m", packed)


def beat(keys: Keys, incarnation: str, packed: bytes, keep: int | None = None) -> bytes:
    """`Store.send_heartbeat`."""
    trimmed = ("MAXLEN", "~", str(keep)) if keep is not None else ()
    return command("XADD", keys.beats, *trimmed, "*", "who", incarnation, "m", packed)


def orders(keys: Keys, after: bytes) -> bytes:
    """`Store.orders`."""
    return command("XREAD", "COUNT", "1024", "BLOCK", _BLOCK, "STREAMS", keys.orders, after)


def assignment(keys: Keys, replica: str, cycle: int, node: str) -> bytes:
    """`Store.assignment`."""
    return command("HGET", keys.rendezvous(replica, 0, cycle), node)
