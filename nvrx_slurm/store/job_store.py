"""The part of the job's store file that a worker needs: where the store is, and its password."""

from __future__ import annotations

from pathlib import Path

import msgspec

from nvrx_slurm.errors import MalformedRecord, UnsafePath
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.ownership import private_folder, read_owned


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
