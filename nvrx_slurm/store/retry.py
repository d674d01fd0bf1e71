"""What to do about an error of a Redis or Valkey server: one policy for every client of a store in this package.

Pure: an error and the time go in, a decision comes out. `store/client.py` carries it out for asyncio, and
`store/connection.py` for threads. Here alone is written down which errors mean that the store is away. Standard
library only, and no redis-py: workers import this module.

Every retry has a pause and a bound. A server's configuration is changed only where this package has started that
server, and at most once in a row. A site's own server, which other jobs use too, is waited for.
"""

from __future__ import annotations

import re
from enum import Enum, auto

import msgspec

from nvrx_slurm.errors import StoreUnreachable

FIRST_PAUSE_S = 0.01
# The longest pause while a server is away. It restarts or fails over within seconds, and a recovery waits for it.
AWAY_PAUSE_S = 0.25

# The longest pause while a server answers and refuses: a person must act first, and each retry costs it work.
FULL_PAUSE_S = 2.0

# A call and the pause before it take less. Where more time has passed since the failure before, this process stood
# still (the job was suspended), and the excess is no patience spent.
LONGEST_ATTEMPT_S = 15.0

# The order to an embedded server whose disk is full. Everything it holds is also in its memory.
IN_MEMORY = ("CONFIG", "SET", "appendonly", "no")


class Cause(Enum):
    """Why a client gives up."""

    SILENT = auto()  # the server was away, or refused for a passing reason, for longer than the patience
    ACCESS = auto()  # the server refuses this user: waiting does not help
    COMMAND = auto()  # the server refuses this command: waiting does not help


class Retry(msgspec.Struct, frozen=True):
    """Ask again after `pause_s`. `warning`: what to log now, if anything. `reconfigure`: send `IN_MEMORY` first.
    `reconnect`: on a new connection, since the server's name may lead to another one by then."""

    pause_s: float
    warning: str = ""
    reconfigure: bool = False
    reconnect: bool = False


class GiveUp(msgspec.Struct, frozen=True):
    """End with this message."""

    message: str
    cause: Cause

    def unreachable(self) -> StoreUnreachable:
        """The error for a caller."""
        return StoreUnreachable(self.message, refused=self.cause is not Cause.SILENT)


class _Answer(Enum):
    AWAY = auto()  # it will serve again within seconds: it loads its file, or fails over
    WRITES_REFUSED = auto()  # it answers, and takes no writes until a person or a failover has helped
    ACCESS_REFUSED = auto()
    NOT_HERE = auto()  # another server of its cluster holds the key


_ONE_SERVER = "another server of its cluster holds this key; name a store that is one server"

# The first word of an error, what it means, and what a person can do. Any other error is the command's own fault.
_ANSWERS: dict[str, tuple[_Answer, str]] = {
    "LOADING": (_Answer.AWAY, ""),
    "MASTERDOWN": (_Answer.AWAY, ""),
    "CLUSTERDOWN": (_Answer.AWAY, ""),
    "TRYAGAIN": (_Answer.AWAY, ""),
    "BUSY": (_Answer.AWAY, ""),
    "UNBLOCKED": (_Answer.AWAY, ""),  # it became a replica while a client waited in XREAD
    "NOSCRIPT": (_Answer.AWAY, ""),  # its scripts were flushed; redis-py loads them again with the next call
    "MISCONF": (_Answer.WRITES_REFUSED, "it cannot write its files; is its disk full? Free space there"),
    "OOM": (_Answer.WRITES_REFUSED, "its memory is full; raise its maxmemory or free some"),
    "NOREPLICAS": (_Answer.WRITES_REFUSED, "too few replicas are connected; see its min-replicas-to-write"),
    "READONLY": (_Answer.WRITES_REFUSED, "it is a replica; name its primary, unless a failover is under way"),
    "NOAUTH": (_Answer.ACCESS_REFUSED, "check its password"),
    "WRONGPASS": (_Answer.ACCESS_REFUSED, "check its password"),
    "NOPERM": (_Answer.ACCESS_REFUSED, "check what its ACL allows this user"),
    "MOVED": (_Answer.NOT_HERE, _ONE_SERVER),
    "ASK": (_Answer.NOT_HERE, _ONE_SERVER),
}

# redis-py makes a class of some errors, and cuts their first word off.
_CLASSES = {
    "AuthenticationError": "NOAUTH",
    "NoPermissionError": "NOPERM",
    "BusyLoadingError": "LOADING",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "ReadOnlyError": "READONLY",
    "OutOfMemoryError": "OOM",
    "NoScriptError": "NOSCRIPT",
    "MovedError": "MOVED",
    "AskError": "ASK",
}
_AWAY_CLASSES = frozenset(
    {"OSError", "ConnectionError", "TimeoutError", "InvalidResponse"}
)  # Python's and redis-py's alike

# redis-py writes "Command # 2 (…) of pipeline caused error: ('MISCONF …',)", Redis 6 "… @user_script: 3: -MISCONF …".
_WRAPPED = re.compile(r"of pipeline caused error: \(?['\"]?|@user_script: ?\d+: -")


def code_of(error: Exception) -> str | None:
    """The first word of a server's error; "" for a connection that failed, None for what is neither."""
    names = [kind.__name__ for kind in type(error).__mro__]
    known = next((_CLASSES[name] for name in names if name in _CLASSES), None)
    if known is not None:
        return known
    text = str(error)
    if "max number of clients reached" in text:  # its first word is a plain ERR
        return ""
    code = _WRAPPED.split(text)[-1].partition(" ")[0]
    if code in _ANSWERS:
        return code
    return "" if _AWAY_CLASSES.intersection(names) else None


def is_away(error: Exception) -> bool:
    """Whether the server will serve within seconds, without a person's help."""
    code = code_of(error)
    return code is not None and _ANSWERS.get(code, (_Answer.AWAY, ""))[0] is _Answer.AWAY


class StoreRetry:
    """The retries of one call, or of one reader.

    `patience_s`: for how long in a row it may go without an answer. `embedded`: whether this package started the
    server and may change its configuration. `began`: when the call began, if the patience counts from there; else it
    counts from the first failure.
    """

    def __init__(self, where: str, patience_s: float, *, embedded: bool, began: float | None = None) -> None:
        self._where, self._embedded, self._began = where, embedded, began
        self._patience_s = patience_s
        self._reset()

    def _reset(self) -> None:
        self._since: float | None = None
        self._failed_at: float | None = self._began
        self._warned: str | None = None
        self._pause_s = FIRST_PAUSE_S
        self._has_reconfigured = False

    def hurry(self, patience_s: float, at: float) -> None:
        """From `at` on this patience counts."""
        self._patience_s, self._began = patience_s, max(at, self._began or at)
        self._since = None if self._since is None else max(at, self._since)
        self._failed_at = None if self._failed_at is None else max(at, self._failed_at)

    def failed(self, error: Exception, now: float, *, served: bool = False) -> Retry | GiveUp:
        """What to do about an error that a call has raised. `served`: the server answers on another connection of
        this client, so a call whose own login was refused waits for that one."""
        code = code_of(error)
        answer, advice = (None, "") if code is None else _ANSWERS.get(code, (_Answer.AWAY, ""))
        waits_for_another = served and code in ("NOAUTH", "WRONGPASS")
        if answer is None or answer is _Answer.NOT_HERE:
            hint = f"; {advice}" if advice else ""
            return GiveUp(f"the store at {self._where} refuses a command: {error}{hint}", Cause.COMMAND)
        refusal = GiveUp(f"the store at {self._where} refuses us: {error}; {advice}", Cause.ACCESS)
        if answer is _Answer.ACCESS_REFUSED and not waits_for_another:
            return refusal
        if self._since is None:
            self._since = now if self._began is None else self._began
        # This process may have stood still since the failure before: that time is no patience spent.
        if self._failed_at is not None:
            self._since += max(0.0, now - self._failed_at - LONGEST_ATTEMPT_S)
        self._failed_at = now
        # An embedded store whose disk is full goes on in memory: the job's own server, which no other job uses.
        if code == "MISCONF" and self._embedded and not self._has_reconfigured:
            self._has_reconfigured = True
            message = "the store cannot write its file (is the disk full?): it goes on in memory alone"
            return Retry(0.0, message, reconfigure=True)
        is_away = answer is _Answer.AWAY
        left_s = self._since + self._patience_s - now
        if left_s <= 0 and waits_for_another:
            return refusal
        if left_s <= 0:
            problem = "does not answer" if is_away else f"has refused writes for {now - self._since:.0f} s: {advice}"
            return GiveUp(f"the store at {self._where} {problem}: {error}", Cause.SILENT)
        problem = "the store does not answer" if is_away else f"the store at {self._where} refuses writes: {advice}"
        if waits_for_another:
            problem = f"the store at {self._where} refuses a new connection, and those that are open still work"
        warning = ""
        if self._warned != problem:
            # A server that begins to refuse after it was away is asked often again.
            self._warned, self._pause_s = problem, FIRST_PAUSE_S
            warning = f"{problem} ({error}); waiting up to {self._patience_s:g} s"
        pause_s = min(self._pause_s, left_s)
        longest_s = FULL_PAUSE_S if answer is _Answer.WRITES_REFUSED else AWAY_PAUSE_S
        self._pause_s = min(2 * self._pause_s, longest_s)
        # After a failover the server's name leads to another one: only a new connection finds it.
        return Retry(pause_s, warning, reconnect=code == "READONLY")

    def answered(self, now: float) -> str:
        """The server has answered. Returns what to log, if anything."""
        since, has_warned = self._since, self._warned is not None
        self._reset()
        return f"the store answers again, after {now - since:.1f} s" if since is not None and has_warned else ""
