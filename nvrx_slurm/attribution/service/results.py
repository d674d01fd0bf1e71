"""Inquiries on disk, one file each: what was answered survives a restart, and what was in hand is taken up again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.service.lifecycle import Record
from nvrx_slurm.attribution.service.wire import id_of
from nvrx_slurm.errors import MalformedRecord, UsageError
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.locks import locked
from nvrx_slurm.util.log import get_logger

log = get_logger("attrsvc")

_NAME = re.compile(r"[0-9a-f]{32}\.json")
_HALF = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]+")
"""What `write_private` leaves of a file if it is killed over it."""


class Results:
    """A state folder. Its methods block; all raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> dict[str, Record]:
        """id → record of all that is kept. A file that cannot be read is left out, and told of."""
        return {id_of(record.inquiry.key): record for record in self._read()}

    def save(self, identity: str, record: Record) -> None:
        """Whoever reads it sees the record before or this one, never half of it."""
        write_private(self._path(identity), msgspec.json.encode(record))

    def drop(self, identities: list[str]) -> None:
        for identity in identities:
            self._path(identity).unlink(missing_ok=True)

    def _path(self, identity: str) -> Path:
        return self._folder / f"{identity}.json"

    def _read(self) -> Iterator[Record]:
        for path in sorted(self._folder.iterdir()):
            if _HALF.fullmatch(path.name):
                path.unlink(missing_ok=True)
            elif _NAME.fullmatch(path.name):
                try:
                    yield decode_json(Record, path.read_bytes(), path.name)
                except (OSError, MalformedRecord) as error:
                    log.warning("%s is left out: %s", path, error)


@contextlib.contextmanager
def opened(folder: Path, clock: Clock) -> Iterator[Results]:
    """The folder, made if need be (0700), for one service alone. Raises UsageError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder / ".service.lock", timeout_s=0.0, clock=clock):
            yield Results(folder)
    except TimeoutError:
        raise UsageError(f"--state-dir {folder}: another service uses it; give each its own") from None
    except OSError as error:
        raise UsageError(f"--state-dir {folder}: cannot be written: {error.strerror or error}") from None
