"""Sizes of memory as people write them: `2GiB`, `500MB`, or a plain number of bytes."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS_BYTES = {
    "TiB": 1 << 40, "TB": 10**12,
    "GiB": 1 << 30, "GB": 10**9,
    "MiB": 1 << 20, "MB": 10**6,
    "KiB": 1 << 10, "KB": 10**3,
    "B": 1,
}  # fmt: skip
_BY_NAME = {unit.upper(): size for unit, size in _UNITS_BYTES.items()}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS_BYTES)})?", re.ASCII | re.IGNORECASE)


def parse_size(value: object) -> int:
    """Bytes. Accepts `2GiB` (of 1024³), `1.5GB` (of 1000³), or a plain number of bytes. Raises ValueError."""
    match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is no size; write it like 2GiB, 500MB")
    return int(Decimal(match[1]) * _BY_NAME[(match[2] or "B").upper()])


def size_words(size_bytes: int) -> str:
    """A size as job.yaml has it, in the largest unit that tells it exactly: `2GiB`. `parse_size` gives it back."""
    unit = next((unit for unit, size in _UNITS_BYTES.items() if size_bytes % size == 0 < size_bytes), "B")
    return f"{size_bytes // _UNITS_BYTES[unit]}{unit}"
