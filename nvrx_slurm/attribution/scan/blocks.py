"""Cuts a stream of bytes into blocks of whole lines, without the codes that colour a terminal, in bounded memory.

A line that is a JSON record is replaced by what it says (records.py). A line ends at a newline, at a carriage return
(a progress bar's line is many) and at a NUL (a hole that a file system left). A line longer than `LONGEST_LINE_BYTES`
is read as several, and of one longer than `KEPT_OF_A_LINE_BYTES` the rest is left out. So what is found does not
depend on where reads end, and a line without end costs no more than reading it.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nvrx_slurm.attribution.scan.model import LONGEST_TEXT
from nvrx_slurm.attribution.scan.records import LINE_END, line_begin, unwrapped

# Bounds what one search of a pattern can cost, and the memory of a line without end.
LONGEST_LINE_BYTES = 8 << 10

# The rest of a longer line is not searched. A line of 100 MB that matched in each part took minutes.
KEPT_OF_A_LINE_BYTES = 64 << 10

# How far back a line can look, for the traceback that it ends.
HISTORY_BYTES = 64 << 10

_ESCAPE = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n\r\0]*(?:\x07|\x1b\\)?|[()][0-2A-B]|[=>78DEHMNOZc])?"
)


@dataclass(frozen=True)
class LogBlock:
    """Whole lines. `raw` is what the file holds, `text` the same without escape codes; `before` what stood before, at
    most 64 KiB; `offset` that of `raw` in the file's text, `line` the number of its first line. `begins`: for the end
    of each line of `text`, where in `raw` the line begins that the next one comes from; None: both have the same
    lines."""

    text: bytes
    raw: bytes
    before: bytes
    offset: int
    line: int
    begins: Sequence[int] | None = None

    def window(self, start: int) -> bytes:
        """The text before a position of `text`, at most 64 KiB."""
        if start >= HISTORY_BYTES:
            return self.text[start - HISTORY_BYTES : start]
        return (self.before + self.text[:start])[-HISTORY_BYTES:]

    def offset_of(self, start: int) -> int:
        """Where in the file's text a line begins that begins at `start` of `text`."""
        if self.raw is self.text:
            return self.offset + start
        ends_before = bisect.bisect_right(self._text_ends, start)
        return self.offset + (self._raw_ends[ends_before - 1] if ends_before else 0)

    def line_of(self, start: int) -> int:
        """The number of the line that begins at `start` of `text`."""
        # A few hits a block: counting costs less than a list.
        return self.line + self.raw.count(b"\n", 0, self.offset_of(start) - self.offset)

    @functools.cached_property
    def _text_ends(self) -> list[int]:
        return [end.end() for end in LINE_END.finditer(self.text)]

    @functools.cached_property
    def _raw_ends(self) -> Sequence[int]:
        """As many as there are in `text`: no escape code holds the end of a line."""
        return [end.end() for end in LINE_END.finditer(self.raw)] if self.begins is None else self.begins

    def bounds(self, at: int) -> tuple[int, int]:
        """Where the line begins and ends that holds the byte at a position of `text`; in a long line, the part."""
        text, low = self.text, max(0, at - KEPT_OF_A_LINE_BYTES)
        start = line_begin(text, low, at)
        start += (at - start) // LONGEST_LINE_BYTES * LONGEST_LINE_BYTES
        high = start + LONGEST_LINE_BYTES
        end = text.find(b"\n", at, high)
        end = min(high, len(text)) if end < 0 else end
        for other in (b"\r", b"\0"):
            found = text.find(other, at, end)
            end = end if found < 0 else found
        return start, end


def plain(text: bytes) -> bytes:
    """The text without escape codes."""
    return _ESCAPE.sub(b"", text) if b"\x1b" in text else text


def readable(text: bytes) -> bytes:
    """The text as blocks have it: what JSON records say, without escape codes."""
    return plain(unwrapped(text)[0])


def blocks(pieces: Iterable[bytes]) -> Iterator[LogBlock]:
    """The stream's lines, in order, none left out; of those that are too long the beginning."""
    before, offset, line = b"", 0, 1
    for raw, left_out, newlines in _whole_lines(pieces):
        said, begins = unwrapped(raw)
        text = plain(said)
        # The part of a long line that is left out has no bytes here: it only counts for what follows it.
        if raw:
            yield LogBlock(text, raw, before, offset, line, begins)
        before = text[-HISTORY_BYTES:] if len(text) >= HISTORY_BYTES else (before + text)[-HISTORY_BYTES:]
        offset += len(raw) + left_out
        line += raw.count(b"\n") + newlines


def _whole_lines(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """The stream cut after ends of lines, and after what is kept of a line that is too long; then how many bytes of
    that line are left out, and how many newlines among them: one or none."""
    rest, in_long = b"", False
    for piece in pieces:
        if in_long:
            end = LINE_END.search(piece)
            left_out = end.end() if end else len(piece)
            yield b"", left_out, piece.count(b"\n", 0, left_out)
            rest, in_long = piece[left_out:], end is None
        else:
            rest += piece
        while not in_long and (at := _too_long(rest)) is not None:
            kept = at + KEPT_OF_A_LINE_BYTES
            end = LINE_END.search(rest, kept)
            next_line = end.end() if end else len(rest)
            yield rest[:kept], next_line - kept, rest.count(b"\n", kept, next_line)
            rest, in_long = rest[next_line:], end is None
        if end_of_last := line_begin(rest, 0, len(rest)):
            yield rest[:end_of_last], 0, 0
            rest = rest[end_of_last:]
    if rest:
        yield rest, 0, 0


def _too_long(text: bytes) -> int | None:
    """Where the first line begins that is longer than what is kept of a line; None: no line is."""
    at = 0
    while len(text) - at > KEPT_OF_A_LINE_BYTES:
        # Jump to the last line that begins within reach.
        next_line = line_begin(text, at, at + KEPT_OF_A_LINE_BYTES + 1)
        if next_line == at:
            return at
        at = next_line
    return None


_BEFORE_MATCH = 80
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]


# `surrogateescape` decodes a byte that is not UTF-8 as U+DC00 plus that byte.
_CLEAN = {control: None for control in _CONTROLS if control != ord("\t")} | {
    0xDC00 + byte: bytes([byte]).decode("cp1252", "replace") for byte in range(0x80, 0x100)
}


def decoded(line: bytes) -> str:
    """UTF-8, and what is not UTF-8, byte by byte, as Latin-1; without control characters."""
    return line.decode("utf-8", "surrogateescape").translate(_CLEAN).rstrip()


def excerpt(line: bytes, at: int = 0) -> str:
    """At most 400 characters of a line: its beginning, or in a long one what stands around a position."""
    text = decoded(line)
    if len(text) <= LONGEST_TEXT:
        return text
    skipped = max(0, len(decoded(line[:at])) - _BEFORE_MATCH)
    if skipped + _BEFORE_MATCH < LONGEST_TEXT // 2:
        return text[: LONGEST_TEXT - 1] + "…"
    part = text[skipped : skipped + LONGEST_TEXT - 2]
    return f"…{part}…" if skipped + len(part) < len(text) else f"…{part}"
