"""Opens whatever a user calls a log, and gives its text piece by piece: unpacked, in a superset of ASCII.

Never follows a file that grows, never waits for a FIFO, touches no device, and maps nothing into memory: a file that
is cut while it is mapped kills its reader.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, cast

PIECE_BYTES = 256 << 10

_UNPACKERS: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file)),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_NOT_TEXT = {
    b"\x7fELF": "a program or a core dump",
    b"PK\x03\x04": "a zip archive, such as a checkpoint",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it first",
    b"\x89PNG": "an image",
    b"\x89HDF": "an HDF5 file",
    b"SQLite format 3\0": "a database",
    b"PAR1": "a Parquet file",
}

_KINDS = {
    stat.S_ISDIR: "a folder that cannot be listed",
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


class Unreadable(Exception):
    """Why a file cannot be read, or not to its end. Becomes one of a scan's problems."""


def refusal(mode: int) -> str | None:
    """What a file is, by its st_mode, that cannot be read as a log; None: it can."""
    return next((what for is_it, what in _KINDS.items() if is_it(mode)), None)


@contextlib.contextmanager
def opened(path: Path) -> Generator[IO[bytes], None, None]:
    """The file, unbuffered. Raises Unreadable."""
    try:
        _refuse(path.stat().st_mode)  # before it is opened: opening may rewind a tape or wake a terminal
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            _refuse(os.fstat(descriptor).st_mode)  # it may have been replaced meanwhile
            yield file
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None


def _refuse(mode: int) -> None:
    what = refusal(mode)
    if what is not None:
        raise Unreadable(f"is {what}, no log")


def pieces(file: IO[bytes], piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The text in pieces of at most about `piece_bytes`, as much as there was when this began.

    A packed file is unpacked, UTF-16 with a byte order mark becomes UTF-8. Raises Unreadable, also after some pieces.
    """
    descriptor = file.fileno()
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, 16, 0)
    for magic, what in _NOT_TEXT.items():
        if head.startswith(magic):
            raise Unreadable(f"is no log but {what}")
    unpack = next((unpack for magic, unpack in _UNPACKERS.items() if head.startswith(magic)), None)
    read = _plain(file, size, piece_bytes) if unpack is None else _unpacked(unpack(file), piece_bytes)
    yield from _in_utf_8(read)


def _plain(file: IO[bytes], size: int, piece_bytes: int) -> Iterator[bytes]:
    while size > 0:
        piece = file.read(min(piece_bytes, size))
        if not piece:
            raise Unreadable(f"was cut while it was read: {size} bytes are missing")
        size -= len(piece)
        yield piece


def _unpacked(file: IO[bytes], piece_bytes: int) -> Iterator[bytes]:
    """`read1`, not `read`: what was unpacked before a tear is not lost."""
    with file:
        try:
            while piece := file.read1(piece_bytes):  # type: ignore[attr-defined]
                yield piece
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise Unreadable(f"is torn: {error}") from None


def _in_utf_8(read: Iterator[bytes]) -> Iterator[bytes]:
    first = next(read, b"")
    if not first.startswith(_UTF_16):
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from read
        return
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    yield decoder.decode(first).encode("utf-8", "replace")
    for piece in read:
        yield decoder.decode(piece).encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")
