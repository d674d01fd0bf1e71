"""The part of the job's store file that a worker needs: where the store is, and its password."""

from __future__ import annotations

from pathlib import Path

import msgspec


class JobStore(msgspec.Struct, frozen=True):
    """What our agent tells by NVRX_STORE_FILE (`folder.StoreAddress` is the whole of it). `embedded`: it serves this
    job alone, and its configuration may be changed."""

    url: str
    job: str
    password: str | None = None
    embedded: bool = False


def read_job_store(path: Path, error: type[Exception]) -> JobStore:
    """Raises `error` where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobStore)
    except (OSError, msgspec.DecodeError) as seen:
        raise error(f"the job's store file {path} (NVRX_STORE_FILE) cannot be read: {seen}") from None
