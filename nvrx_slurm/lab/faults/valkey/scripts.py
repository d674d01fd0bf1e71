"""`store/lua`, in Python: each beside the name of the file that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from redis.exceptions import ResponseError

from nvrx_slurm.lab.faults.valkey.keyspace import Keyspace, Word, encoded

Script = Callable[[Keyspace, Sequence[str], Sequence[Word]], list[Any]]

ROUND_S = 3600
MOST_ORDERS = 4096


def acquire(data: Keyspace, keys: Sequence[str], args: Sequence[Word]) -> list[Any]:
    """A controller takes over."""
    epoch, lease, journal_n, cursor = keys
    owner, ttl_ms, kept = args
    number = data.incr(epoch)
    data.set(lease, owner, px=int(ttl_ms))
    data.set(journal_n, kept, nx=True)
    return [number, int(data.get(journal_n) or 0), data.get(cursor) or b"0-0"]


def commit(data: Keyspace, keys: Sequence[str], args: Sequence[Word]) -> list[Any]:
    """One batch of decisions: all or nothing, only by the newest controller, only onto the journal as it saw it."""
    epoch, journal_n, journal, orders, cursor, shutdown, controller, inbox, *rounds = keys
    seconds, micros = data.time()
    now = seconds * 1_000_000 + micros
    if data.get(epoch) != encoded(args[0]):
        return [b"fenced", now]
    first, entries = int(args[1]), int(args[5])
    last = int(data.get(journal_n) or 0)
    if entries and first != last + 1:
        return [b"already" if first <= last else b"gap", now]

    at = 6
    for entry in args[at : at + entries]:
        data.xadd(journal, {"m": entry})
    if entries:
        data.set(journal_n, last + entries)
    at += entries
    told = args[at + 1 : at + 1 + int(args[at])]
    field = at + 1 + len(told)
    for key in rounds:
        count = int(args[field])
        words = args[field + 1 : field + 1 + count]
        for node, assignment in zip(words[::2], words[1::2], strict=True):
            data.hset(key, node, assignment)
        data.expire(key, ROUND_S)
        field += count + 1
    if args[3] != "":
        data.set(shutdown, args[3], nx=True)
    if args[4] != "":
        data.set(controller, args[4])
    for order in told:
        data.xadd(orders, {"m": order}, maxlen=MOST_ORDERS)
    if args[2] != "":
        data.set(cursor, args[2])
        data.xtrim(inbox, minid=args[2])
    return [b"ok", now]


def join(data: Keyspace, keys: Sequence[str], args: Sequence[Word]) -> list[Any]:
    """An agent introduces itself."""
    inbox, orders, shutdown, controller, joins = keys
    record, incarnation = args
    if data.hget(joins, incarnation) is None:
        last = data.xrevrange(orders, count=1)
        data.hset(joins, incarnation, last[0][0] if last else b"0-0")
        data.xadd(inbox, {"m": record})
    return [data.hget(joins, incarnation), data.get(shutdown) or b"", data.get(controller) or b""]


def script_of(text: str) -> Script:
    """The one that does what a Lua text says. Raises ResponseError for a text that is none of ours."""
    try:
        return _BY_TEXT[text]
    except KeyError:
        raise ResponseError(f"the in-memory server has no Python for this script: {text[:60]!r}") from None


_LUA = resources.files("nvrx_slurm.store") / "lua"
_BY_TEXT: dict[str, Script] = {
    (_LUA / f"{script.__name__}.lua").read_text(): script for script in (acquire, commit, join)
}
