"""The store takes another password, as at a site that rotates its secrets. Who is connected stays so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.journal.folder import JobFolder, StoreAddress
from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab.flow.stages.deeds import Evidence
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.ids import new_secret

ANSWER_S = 5.0


class Revocation(Record, frozen=True, kw_only=True, tag="revocation"):
    """Of the password by which the job in `folder` reaches its store."""

    folder: str


def revoke(order: Revocation, clock: Clock) -> Evidence:
    """Give the store another password, which nobody knows.

    Raises FaultFailed, also where a new connection with the old password is let in all the same.
    """
    from redis.exceptions import RedisError

    address = JobFolder(Path(order.folder)).read_store()
    if address is None:
        raise FaultFailed(f"{order.folder} names no store: the job has none now")
    if not address.embedded:
        raise FaultFailed("the store is the site's own, and has other users: leave `store.url` out of job.yaml")
    at = clock.wall()
    try:
        with _connection(address) as store:
            store.execute_command("ACL", "SETUSER", "default", "resetpass", f">{new_secret()}")
    except (RedisError, OSError) as error:
        raise FaultFailed(f"the store at {address.url} did not take another password: {error}") from None
    return Evidence(at=at, proof=_refusal(address))


def _refusal(address: StoreAddress) -> str:
    from redis.exceptions import AuthenticationError

    try:
        with _connection(address) as store:
            store.ping()
    except AuthenticationError as error:
        return f"the store refuses the old password ({error})"
    raise FaultFailed(f"the store at {address.url} still takes the password that was revoked")


def _connection(address: StoreAddress) -> Any:
    from nvrx_slurm.store.redis_client import client  # slow to import, and most flows revoke nothing

    # Without the mark a refused password counts at once: this process has been sent to the store's own host.
    return client(msgspec.structs.replace(address, mark=None), connect_s=ANSWER_S, answer_s=ANSWER_S)
