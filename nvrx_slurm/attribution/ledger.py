"""The blames against one cluster's nodes, which the jobs of one user share: in a file or in a Redis."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import structs

from nvrx_slurm.attribution.blames import Blame, Suspect, merged, suspects
from nvrx_slurm.errors import MalformedRecord, NvrxError, StoreUnreachable, UsageError, WaitTimeout
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.urls import check_redis_url
from nvrx_slurm.journal.folder import JobInfo
from nvrx_slurm.journal.verdicts import Wire
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.locks import locked
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.ownership import read_owned
from nvrx_slurm.util.threads import in_thread

log = get_logger("suspects")

AMONG_S = 1.0
LOCK_S = 5.0
ANSWER_S = 3.0
REDIS_KEY = "nvrx:suspects"
# An abandoned ledger expires; every change postpones that.
REDIS_LIFE_S = 30 * 24 * 3600

MOST_TRIES = 50

Blames = tuple[Blame, ...]
# From the blames that are kept, and the present by the clock of what keeps them, which all processes share.
Change = Callable[[Blames, float], Iterable[Blame]]

# Clocks that differ by less say the same.
SAME_TIME_S = 60.0


class Ledger:
    """One cluster's part of what a storage keeps. Its methods raise NvrxError where the storage cannot be used."""

    def __init__(self, storage: LedgerStorage, *, cluster: str, clock: Clock) -> None:
        self.where, self.cluster = storage.where, cluster
        self._storage, self._clock = storage, clock

    def blame(self, blames: Iterable[Blame]) -> None:
        """Add these, of any cluster. A blame that the ledger has already is not added twice."""
        new = tuple(blames)

        def with_new(known: Blames, present: float) -> Blames:
            # A blame of a clock that is ahead would weigh in full until all other clocks have come as far.
            dated = (b if b.at <= present + SAME_TIME_S else structs.replace(b, at=present) for b in new)
            return self._worth_keeping((*known, *dated), present)

        if new:
            self._storage.change(with_new)

    def suspects(self, now: float | None = None) -> list[Suspect]:
        """The nodes that are suspect at `now` (seconds since the epoch; None: the present), the worst first."""
        return suspects(self._storage.read(), self.cluster, self._clock.wall() if now is None else now)

    def clear(self, node: str | None = None) -> tuple[str, ...]:
        """Remove the blames of a node (None: of all nodes of this cluster). Returns the nodes that had any."""
        cleared: set[str] = set()

        def without(known: Blames, present: float) -> Blames:
            gone = [b for b in known if b.cluster == self.cluster and node in (None, b.node)]
            cleared.update(blame.node for blame in gone)
            return self._worth_keeping((blame for blame in known if blame not in gone), present)

        self._storage.change(without)
        return tuple(sorted(cleared))

    def _worth_keeping(self, blames: Iterable[Blame], present: float) -> Blames:
        """By the earlier one of two clocks: one that is ahead would drop the blames of all others as too old."""
        return merged(blames, min(self._clock.wall(), present))


def open_ledger(where: str | None, *, cluster: str, clock: Clock | None = None) -> Ledger:
    """The ledger in a file, or at a `redis://` URL; None: the user's own file. Nothing is opened yet.

    The password of a Redis is NVRX_SLURM_STORE_PASSWORD. Raises UsageError for a URL that holds one.
    """
    clock = clock or SystemClock()
    if where is not None and "://" in where:
        try:
            url = check_redis_url(where, password_goes_to=f"put it into {env.STORE_PASSWORD}")
        except ValueError as error:  # which does not repeat the URL
            raise UsageError(f"the ledger of suspect nodes: it {error}; or name a file") from None
        storage: LedgerStorage = RedisStorage(url, env.get(env.STORE_PASSWORD))
    else:
        storage = FileStorage(Path(where).expanduser() if where else default_path(), clock)
    return Ledger(storage, cluster=cluster, clock=clock)


def default_path() -> Path:
    """`$XDG_STATE_HOME/nvrx-slurm/suspects.json`: on most clusters every node sees its user's home."""
    from nvrx_slurm.jobspec.site import state_folder

    return state_folder() / "suspects.json"


def suspects_among(
    nodes: Sequence[str],
    *,
    where: str | None,
    cluster: str | None,
    timeout_s: float = AMONG_S,
    clock: Clock | None = None,
) -> tuple[str, ...]:
    """Those of `nodes` that are suspect, in their order. Takes `timeout_s` at most, and never raises: a job that
    starts must not wait for this. `cluster` as `cluster_of` says; None: no node is suspect."""
    if cluster is None:
        return ()
    asked = in_thread(lambda: open_ledger(where, cluster=cluster, clock=clock).suspects(), "suspects")
    try:
        # A thread that hangs is left behind: it is a daemon, and does not keep this process from its end.
        names = {suspect.node for suspect in asked.result(timeout_s)}
    except concurrent.futures.TimeoutError:
        log.warning("the ledger of suspect nodes gave no answer within %g s: no node counts as suspect", timeout_s)
        return ()
    except Exception as error:  # any: a job that starts must not fail by this
        log.warning("no node counts as suspect: %s", error)
        return ()
    return tuple(node for node in nodes if node in names)


def cluster_of(job: JobInfo, ledger: str | None) -> str | None:
    """The cluster of a job that runs here, as the ledger names it (two clusters' n1 are two machines); None: its
    nodes are not blamed.

    So it is where Slurm does not say which cluster it is. A job without Slurm only simulates its nodes: the user's
    own ledger (`ledger` is None) has no entries for them.
    """
    if job.cluster == "slurm":
        return env.slurm_cluster_name()
    return f"local@{socket.gethostname()}" if ledger else None


# ---- where it is kept


class LedgerStorage(Protocol):
    """Keeps one ledger. Both raise NvrxError where it cannot be reached; content that cannot be read is set aside."""

    where: str

    def read(self) -> Blames: ...

    def change(self, change: Change) -> None:
        """Replace all that is kept by what `change` makes of it and of the storage's own time. Concurrent changes are
        not lost, nor seen in half."""
        ...


class _StoredLedger(Wire, frozen=True, kw_only=True):
    blames: list[msgspec.Raw]


def encode_blames(blames: Iterable[Blame]) -> bytes:
    return msgspec.json.encode({"blames": list(blames)})


def decode_blames(data: bytes) -> Blames:
    """Raises MalformedRecord. A blame of a kind that only a newer version knows is left out."""
    found = []
    for raw in decode_json(_StoredLedger, data, "the ledger").blames:
        with contextlib.suppress(MalformedRecord):
            found.append(decode_json(Blame, bytes(raw), "a blame"))
    return tuple(found)


class FileStorage:
    """A file for its owner alone (0600)."""

    def __init__(self, path: Path, clock: Clock, *, lock_s: float = LOCK_S) -> None:
        self.where = str(path)
        self._path, self._clock, self._lock_s = path, clock, lock_s

    def read(self) -> Blames:
        try:
            return self._read(sets_aside=False)  # no lock: a change replaces the whole file at once
        except OSError as error:
            raise self._unusable(error) from None

    def change(self, change: Change) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # On a file of its own: each change replaces the ledger, and a lock on that would go with the old file.
            lock = self._path.with_name(f"{self._path.name}.lock")
            with locked(lock, timeout_s=self._lock_s, clock=self._clock):
                os.utime(lock)  # on NFS the server sets the time, by its own clock
                write_private(self._path, encode_blames(change(self._read(sets_aside=True), lock.stat().st_mtime)))
        except TimeoutError as error:
            raise WaitTimeout(f"the ledger of suspect nodes was not changed: {error}") from None
        except OSError as error:
            raise self._unusable(error) from None

    def _read(self, *, sets_aside: bool) -> Blames:
        try:
            return decode_blames(read_owned(self._path))  # the folder may be one that others can write to, as /tmp
        except FileNotFoundError:
            return ()
        except MalformedRecord:
            if not sets_aside:  # without the lock: another process may be writing a sound one
                log.warning(
                    "the ledger %s is torn: it counts as empty until the next change sets it aside", self.where
                )
                return ()
            aside = self._path.with_name(f"{self._path.name}.torn")
            self._path.replace(aside)
            log.warning("the ledger %s was torn: a new one starts, and the torn one is kept as %s", self.where, aside)
            return ()

    def _unusable(self, error: OSError) -> NvrxError:
        return UsageError(
            f"the ledger of suspect nodes {self.where} cannot be used ({error.strerror or error}): name another file,"
            " or a redis:// URL, with fault_tolerance.attribution.ledger or --ledger"
        )


class RedisStorage:
    """One value under `nvrx:suspects`, shared by all who name the same database. Imports redis only now."""

    def __init__(self, url: str, password: str | None) -> None:
        import redis

        self.where = url
        self._failures = redis.exceptions
        # Any: redis-py's stubs know neither decoded nor raw replies for certain.
        self._redis: Any = redis.Redis.from_url(
            url, password=password, socket_connect_timeout=ANSWER_S, socket_timeout=ANSWER_S
        )

    def read(self) -> Blames:
        try:
            return self._decoded(self._redis.get(REDIS_KEY), None)
        except (self._failures.RedisError, OSError) as error:
            raise self._unreachable(error) from None

    def change(self, change: Change) -> None:
        try:
            for _ in range(MOST_TRIES):
                with contextlib.suppress(self._failures.WatchError), self._redis.pipeline() as pipe:
                    # WATCH makes EXEC fail with WatchError where another client has changed the key since.
                    pipe.watch(REDIS_KEY)
                    known, (seconds, _) = pipe.get(REDIS_KEY), pipe.time()
                    # Both were sent at once; what follows is queued until EXEC.
                    pipe.multi()
                    changed = change(self._decoded(known, pipe), float(seconds))
                    pipe.set(REDIS_KEY, encode_blames(changed), ex=REDIS_LIFE_S)
                    pipe.execute()
                    return
        except (self._failures.RedisError, OSError) as error:
            raise self._unreachable(error) from None
        raise WaitTimeout(
            f"the ledger at {self.where} was not changed: others changed it {MOST_TRIES} times meanwhile"
        )

    def _decoded(self, data: bytes | None, setting_aside: Any) -> Blames:
        try:
            return decode_blames(data) if data else ()
        except MalformedRecord:
            log.warning("%s at %s holds no ledger: a new one starts", REDIS_KEY, self.where)
            if setting_aside is not None:
                setting_aside.set(f"{REDIS_KEY}:torn", data, ex=REDIS_LIFE_S)
            return ()

    def _unreachable(self, error: Exception) -> StoreUnreachable:
        if isinstance(error, (self._failures.AuthenticationError, self._failures.NoPermissionError)):
            return StoreUnreachable(
                f"the Redis at {self.where} refuses the password ({error}): set NVRX_SLURM_STORE_PASSWORD",
                refused=True,
            )
        return StoreUnreachable(
            f"the ledger of suspect nodes at {self.where} cannot be used ({error}): check"
            " fault_tolerance.attribution.ledger, or leave it out for a file of your own"
        )
