"""The kernel's own messages, from /dev/kmsg (Documentation/ABI/testing/dev-kmsg of the kernel).

A record is one read: `<priority>,<sequence>,<microseconds>,<flags>[,…];<text>`, and after a newline its dictionary.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

KMSG = Path("/dev/kmsg")
# As the kernel bounds a record (CONSOLE_EXT_LOG_MAX): into less than the record read(2) reads nothing, with EINVAL.
LONGEST_RECORD_BYTES = 8192
# Of a flood the beginning and the end are kept: what set it off, and how it ended.
FIRST_KEPT, LAST_KEPT = 500, 1500

DEBUG = 7
_RECORD = re.compile(rb"(\d+),\d+,(\d+),[^;]*;([^\n]*)", re.DOTALL)
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")


class KernelMessage(msgspec.Struct, frozen=True):
    """One message. `at_s`: by the kernel's clock, which starts with the machine; `facility` 0: the kernel itself."""

    at_s: float
    level: int
    facility: int
    text: str


class KernelLog:
    """What the kernel says from the moment this is opened on."""

    def __init__(self, path: Path = KMSG) -> None:
        """Raises OSError where the log is not to be read, as on most nodes for other users than root."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a pipe has no end to go to
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def news(self) -> list[KernelMessage]:
        """The messages since the last call, without those for debugging; of a flood the first and the last."""
        first: list[KernelMessage] = []
        last: deque[KernelMessage] = deque(maxlen=LAST_KEPT)
        for message in self._read():
            (first if len(first) < FIRST_KEPT else last).append(message)
        return [*first, *last]

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self) -> Iterator[KernelMessage]:
        while True:
            try:
                record = os.read(self._descriptor, LONGEST_RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                # EPIPE: the kernel has overwritten messages before they were read; the rest follows.
                if error.errno != errno.EPIPE:
                    return
                continue
            if not record:
                return
            message = parse_record(record)
            if message is not None and message.level < DEBUG:
                yield message


def parse_record(record: bytes) -> KernelMessage | None:
    """The message of one record; None if it is none."""
    match = _RECORD.match(record)
    if match is None:
        return None
    facility, level = divmod(int(match[1]), 8)
    text = _ESCAPE.sub(lambda escape: bytes([int(escape[1], 16)]), match[3])
    return KernelMessage(int(match[2]) / 1e6, level, facility, " ".join(text.decode(errors="replace").split("\n")))
