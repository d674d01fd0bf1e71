"""The blames against one cluster's nodes, and which nodes are suspect by them."""

from __future__ import annotations

import concurrent.futures
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from nvrx_slurm.attribution.ledger.blames import Blame, Suspect, merged, suspects
from nvrx_slurm.attribution.ledger.storage import Blames, FileStorage, LedgerStorage, RedisStorage
from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.urls import check_redis_url
from nvrx_slurm.journal.folder import JobInfo
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import in_thread

log = get_logger("suspects")

AMONG_S = 1.0


class Ledger:
    """One cluster's part of what a storage keeps. Its methods raise NvrxError where the storage cannot be used."""

    def __init__(self, storage: LedgerStorage, *, cluster: str, clock: Clock) -> None:
        self.where, self.cluster = storage.where, cluster
        self._storage, self._clock = storage, clock

    def blame(self, blames: Iterable[Blame]) -> None:
        """Add these, of any cluster. A blame that the ledger has already is not added twice."""
        new = tuple(blames)
        if new:
            self._storage.change(lambda known: merged((*known, *new), self._clock.wall()))

    def suspects(self, now: float | None = None) -> list[Suspect]:
        """The nodes that are suspect at `now` (seconds since the epoch; None: the present), the worst first."""
        return suspects(self._storage.read(), self.cluster, self._clock.wall() if now is None else now)

    def clear(self, node: str | None = None) -> tuple[str, ...]:
        """Remove the blames of a node (None: of all nodes of this cluster). Returns the nodes that had any."""
        cleared: set[str] = set()

        def without(known: Blames) -> Blames:
            gone = [b for b in known if b.cluster == self.cluster and node in (None, b.node)]
            cleared.update(blame.node for blame in gone)
            return merged((blame for blame in known if blame not in gone), self._clock.wall())

        self._storage.change(without)
        return tuple(sorted(cleared))


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
