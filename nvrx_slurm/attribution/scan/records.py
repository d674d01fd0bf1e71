"""Log lines that are JSON objects, as loggers and Docker's json-file driver write them: what they say, as text.

A record becomes its rank, its time, its level and its message, then its other plain values, then its exception on
lines of their own: `[rank3]: 2026-11-29T03:00:00Z ERROR training failed; step=12`. An object without a message
is left as it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import msgspec

# The first of these that a record has counts.
_MESSAGES = ("message", "msg", "event", "text")
_TIMES = ("asctime", "time", "timestamp", "@timestamp", "ts", "created")
_LEVELS = ("levelname", "level", "severity", "lvl")
_EXCEPTIONS = ("exc_info", "exception", "exc_text", "traceback", "stack_trace", "error")

# A record of one line that reports no error is as good as it stands, and most of a long log are such.
_MARKS = (rb"\n", *(b'"%s"' % level for level in (b"error", b"ERROR", b"critical", b"CRITICAL", b"fatal", b"FATAL")))
# A newline, a carriage return (a progress bar's line is many) or a NUL (a hole that a file system left).
LINE_END = re.compile(rb"[\n\r\0]")


def line_begin(text: bytes, low: int, at: int) -> int:
    """Behind the last end of a line between two positions; `low`, where there is none. Each search covers only what
    the one before it has left."""
    for end in (b"\n", b"\r", b"\0"):
        low = text.rfind(end, low, at) + 1 or low
    return low


def unwrapped(text: bytes) -> tuple[bytes, list[int] | None]:
    """The text with what its records say in their place, of those that report an error or have several lines; and for
    each line's end in the result, where in `text` the line begins that the next line comes from. None: it holds no
    such record, and is as it was."""
    if b'{"' not in text:  # as in most logs
        return text, None
    lines = sorted(set(itertools.chain.from_iterable(_lines_with(mark, text) for mark in _MARKS)))
    said: list[bytes] = []
    begins: list[int] = []
    done = 0
    for begin, end in lines:
        if (record := said_by(text[begin:end])) is not None:
            said += (text[done:begin], record)
            begins += (found.end() for found in LINE_END.finditer(text, done, begin))
            begins += [begin] * len(LINE_END.findall(record))
            done = end
    if not said:
        return text, None
    begins += (found.end() for found in LINE_END.finditer(text, done))
    return b"".join((*said, text[done:])), begins


def _lines_with(mark: bytes, text: bytes) -> Iterator[tuple[int, int]]:
    """Where the lines begin and end that may be records and hold a mark."""
    at = text.find(mark)
    while at >= 0:
        begin = line_begin(text, 0, at)
        found = LINE_END.search(text, at)
        end = found.start() if found else len(text)
        if text.startswith(b'{"', begin):
            yield begin, end
        at = text.find(mark, end)


def said_by(line: bytes) -> bytes | None:
    """What a record says, in one or more lines; None: the line is no record."""
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # torn, or no JSON
        return None
    if isinstance(output := record.get("log"), str) and "stream" in record:  # Docker's
        # As the Kubernetes log writer puts it.
        label = f"{record.get('time', '')} {record['stream']} F "
        return (label + output.removesuffix("\n")).encode(errors="replace")
    taken = {kind: _first(record, keys) for kind, keys in _KINDS.items()}
    if (message := taken["message"]) is None:
        return None
    rank = record.pop("rank", None)
    label = f"[rank{rank}]: " if isinstance(rank, int) else ""
    message, *others = message.splitlines() or [""]
    head = [text for text in (taken["time"], taken["level"] and taken["level"].upper(), message) if text]
    rest = [f"{key}={value}" for key, value in record.items() if isinstance(value, str | int | float)]
    # Behind a semicolon, or the message's last words would be read as a part of the first key.
    first = "; ".join(filter(None, (" ".join(head), " ".join(rest))))
    lines = [first, *others, *(taken["exception"] or "").splitlines()]
    return "\n".join(label + text for text in lines).encode(errors="replace")


_KINDS = {"message": _MESSAGES, "time": _TIMES, "level": _LEVELS, "exception": _EXCEPTIONS}


def _first(record: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    """The first of some keys' values that is text, or a number that is a time, taken out of the record."""
    kinds = str | int | float if keys is _TIMES else str
    return next((str(record.pop(key)) for key in keys if isinstance(record.get(key), kinds)), None)
