"""Bytes of a log as text that every terminal and every JSON reader takes."""

from __future__ import annotations

from nvrx_slurm.attribution.scan.model import LONGEST_TEXT

_BEFORE_MATCH = 80
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]


def _as_latin_1(byte: int) -> str:
    return bytes([byte]).decode("cp1252", "replace")


_CLEAN = {control: None for control in _CONTROLS if control != ord("\t")} | {
    0xDC00 + byte: _as_latin_1(byte) for byte in range(0x80, 0x100)
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
