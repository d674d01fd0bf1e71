"""Where a worker's store is, and its password: by the job's store file, or as the user names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nvrx_slurm.errors import ConfigError, MalformedRecord, UnsafePath
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.ownership import private_folder, read_owned
from nvrx_slurm.util.redis_url import RedisUrl, parse_redis_url
from nvrx_slurm.util.secret_file import secret_in

if TYPE_CHECKING:
    from nvrx_slurm.store.connection import Look


class JobStore(msgspec.Struct, frozen=True):
    """The store file of NVRX_STORE_FILE, as far as workers read it (`folder.StoreAddress` is the whole of it).

    `token`: the job's key. `embedded`: it serves this job alone, and its configuration may be changed.
    """

    url: str
    job: str
    password: str | None = None
    token: str | None = None
    embedded: bool = False
    certificate: str | None = None
    mark: str | None = None


_decoder = msgspec.json.Decoder(JobStore)


def read_job_store(path: Path, error: type[Exception]) -> JobStore:
    """Raises `error` where it cannot be read, or another user could have written it."""
    try:
        # The folder first, then the file relative to it: another user cannot exchange the folder in between.
        with private_folder(path.parent) as folder:
            return decode(_decoder.decode, read_owned(path, dir_fd=folder), path.name)
    except (OSError, UnsafePath, MalformedRecord) as seen:
        raise error(f"the job's store file {path} (NVRX_STORE_FILE) cannot be read: {seen}") from None


def server_of_job(path: Path, error: type[Exception]) -> tuple[JobStore, tuple[RedisUrl, str | None] | Look]:
    """The job's store, and its server as `RetryingRedis` takes it. Raises as `read_job_store`."""
    store = read_job_store(path, error)
    if store.embedded:
        # It has another address after each of its starts.
        return store, partial(read_job_store, path, OSError)
    return store, (parse_redis_url(store.url), store.password)


def named_server(
    owner: str, url: str, password_file: str | None, error: Callable[[str, str], Exception]
) -> tuple[RedisUrl, str | None]:
    """The server that a user names to `owner`, a class, as `RetryingRedis` takes it. Raises `error`, with a message
    and the argument that is wrong."""
    try:
        password = None if password_file is None else secret_in(password_file, key="password_file").strip()
    except ConfigError as seen:
        raise error(f"{owner}: {seen}", "password_file") from None
    try:
        return parse_redis_url(url), password
    except ValueError as seen:
        raise error(f"{owner}: url {seen}", "url") from None
