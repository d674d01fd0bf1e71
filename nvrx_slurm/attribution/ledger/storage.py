"""Where a ledger is kept: a file on a file system that the jobs share, or a Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nvrx_slurm.attribution.ledger.blames import Blame
from nvrx_slurm.errors import MalformedRecord, NvrxError, StoreUnreachable, UsageError, WaitTimeout
from nvrx_slurm.journal.verdicts import Wire
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.locks import locked
from nvrx_slurm.util.log import get_logger

log = get_logger("suspects")

LOCK_S = 5.0
ANSWER_S = 3.0
REDIS_KEY = "nvrx:suspects"
REDIS_LIFE_S = 30 * 24 * 3600
"""An abandoned ledger expires; every change postpones that."""

MOST_TRIES = 50

Blames = tuple[Blame, ...]
Change = Callable[[Blames], Iterable[Blame]]


class LedgerStorage(Protocol):
    """Keeps one ledger. Both raise NvrxError where it cannot be reached; content that cannot be read is set aside."""

    where: str

    def read(self) -> Blames: ...

    def change(self, change: Change) -> None:
        """Replace all that is kept by what `change` makes of it. Concurrent changes are not lost, nor seen in
        half."""
        ...


class _StoredLedger(Wire, frozen=True, kw_only=True):
    blames: list[msgspec.Raw]


def encode(blames: Iterable[Blame]) -> bytes:
    return msgspec.json.encode({"blames": list(blames)})


def decode(data: bytes) -> Blames:
    """Raises MalformedRecord. A blame of a kind that only a newer version knows is left out."""
    found = []
    for raw in decode_json(_StoredLedger, data, "the ledger").blames:
        with contextlib.suppress(MalformedRecord):
            found.append(decode_json(Blame, bytes(raw), "a blame"))
    return tuple(found)


class FileStorage:
    """A file for its owner alone (0600). Readers take no lock: a change replaces the whole file at once."""

    def __init__(self, path: Path, clock: Clock, *, lock_s: float = LOCK_S) -> None:
        self.where = str(path)
        self._path, self._clock, self._lock_s = path, clock, lock_s

    def read(self) -> Blames:
        try:
            return decode(self._path.read_bytes())
        except FileNotFoundError:
            return ()
        except MalformedRecord:
            log.warning("the ledger %s is torn: it counts as empty until the next change sets it aside", self.where)
            return ()
        except OSError as error:
            raise self._unusable(error) from None

    def change(self, change: Change) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._path.with_name(f"{self._path.name}.lock"), timeout_s=self._lock_s, clock=self._clock):
                write_private(self._path, encode(change(self._whole())))
        except TimeoutError as error:
            raise WaitTimeout(f"the ledger of suspect nodes was not changed: {error}") from None
        except OSError as error:
            raise self._unusable(error) from None

    def _whole(self) -> Blames:
        try:
            return decode(self._path.read_bytes())
        except FileNotFoundError:
            return ()
        except MalformedRecord:
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
                    pipe.watch(REDIS_KEY)
                    known = pipe.get(REDIS_KEY)
                    pipe.multi()
                    pipe.set(REDIS_KEY, encode(change(self._decoded(known, pipe))), ex=REDIS_LIFE_S)
                    pipe.execute()
                    return
        except (self._failures.RedisError, OSError) as error:
            raise self._unreachable(error) from None
        raise WaitTimeout(
            f"the ledger at {self.where} was not changed: others changed it {MOST_TRIES} times meanwhile"
        )

    def _decoded(self, data: bytes | None, setting_aside: Any) -> Blames:
        try:
            return decode(data) if data else ()
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
