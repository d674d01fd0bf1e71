"""What the agent has set for this process: its node, and the job's store and key.

The one module of the transport that reads the environment. Without an agent the token is what the caller names.
"""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from nvrx_slurm.errors import UsageError
from nvrx_slurm.store.job_store import read_job_store
from nvrx_slurm.util.job_key import JobKey

LOOPBACK = "127.0.0.1"
LEAST_TOKEN_BYTES = 16


def node_name() -> str:
    """The node's name in the job; without an agent, the machine's."""
    return os.environ.get("NVRX_NODE") or socket.gethostname()


def job_id() -> str | None:
    """The job that this process is a worker of; None without an agent."""
    return os.environ.get("NVRX_JOB_ID") or None


def job_store_file() -> Path | None:
    """The agent's file with the address and the password of the job's own store."""
    value = os.environ.get("NVRX_STORE_FILE")
    return Path(value) if value else None


def default_host() -> str:
    """The name by which other nodes reach this one. In a job on one host, nothing listens beyond loopback."""
    path = job_store_file()
    if path is not None and (store := read_job_store(path, UsageError)).embedded:
        where = urlsplit(store.url)
        if where.scheme == "unix" or where.hostname == LOOPBACK:
            return LOOPBACK
    return socket.gethostname()


class Producer(NamedTuple):
    """Who publishes: which life of which replica, and on which node. Without an agent `replica` is empty."""

    replica: str
    node: str
    generation: int
    cycle: int


def producer() -> Producer:
    """This process, as the agent has named it."""
    generation, cycle = (int(os.environ.get(name) or 0) for name in ("NVRX_GENERATION", "NVRX_CYCLE"))
    return Producer(os.environ.get("NVRX_REPLICA", ""), node_name(), generation, cycle)


def token_or_none(token: bytes | None) -> bytes | None:
    """The token that is named, else the job's, else None. Raises UsageError for one that is too short."""
    if token is not None:
        if not isinstance(token, bytes) or len(token) < LEAST_TOKEN_BYTES:
            raise UsageError(f"token must be at least {LEAST_TOKEN_BYTES} bytes; make one: secrets.token_bytes(32)")
        return token
    path = job_store_file()
    return None if path is None else _job_token(path)


@lru_cache(maxsize=4)
def _job_token(path: Path) -> bytes | None:
    """The job's token, from the job's key alone: other users may know the password of a site's store."""
    token = read_job_store(path, UsageError).token
    return JobKey(token).derive("payloads") if token else None
