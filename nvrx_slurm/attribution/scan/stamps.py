"""Time stamps of log lines, in the forms that training jobs, launchers, Slurm and kernels write.

A stamp without a zone is in this machine's, one without a year in the latest that is not after the file's last
change. A kernel's seconds since boot tell no time without the moment of the boot: such a line has no stamp.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, timezone, tzinfo

_WITHIN_BYTES = 200
_TRIES = 50
_DAY_S = 86400.0

_ANY = re.compile(rb"\d:\d\d:\d\d|\b1[5-9]\d{8}")

_CLOCK = rb"(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?"
_MONTHS = (b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec")

_ISO = re.compile(
    rb"(?<!\d)(?P<y>20\d\d)([-/])(?P<mo>\d\d)\2(?P<d>\d\d)[T _]"
    + _CLOCK
    + rb"(?: ?(?P<z>Z|UTC|[+-]\d\d:?\d\d)(?![\w:]))?"
)
_AMERICAN = re.compile(rb"(?<!\d)(?P<mo>\d\d)/(?P<d>\d\d)/(?P<y>20\d\d|\d\d),? " + _CLOCK)
_GLOG = re.compile(rb"(?<!\w)[IWEFDC](?P<y>20\d\d)?(?P<mo>\d\d)(?P<d>\d\d) +" + _CLOCK)
_SYSLOG = re.compile(
    rb"(?<!\w)(?P<month>" + b"|".join(_MONTHS) + rb") +(?P<d>\d{1,2}) " + _CLOCK + rb"(?: (?P<y>20\d\d)(?!\d))?"
)
_EPOCH = re.compile(
    rb"(?:^\W?|\"(?:ts|time|timestamp|asctime|created)\": ?\"?)(?P<t>1[5-9]\d{8}(?:\d{3}|\.\d+)?)(?![\w.])"
)


def stamp_of(line: bytes, changed_at: float) -> float | None:
    """Seconds since the epoch, by the stamp near a line's beginning. `changed_at`: when its file last changed."""
    head = line[:_WITHIN_BYTES]
    if not _ANY.search(head):
        return None
    for pattern, read in _FORMS:
        found = pattern.search(head)
        if found:
            try:
                return read(found, changed_at)
            except ValueError:  # 30 February: a number that only looks like a stamp
                continue
    return None


def first_stamp(lines: Iterable[bytes], changed_at: float) -> float | None:
    """The first stamp of the next lines that may have one."""
    stamps = (stamp_of(line, changed_at) for line in itertools.islice(lines, _TRIES))
    return next((stamp for stamp in stamps if stamp is not None), None)


def _dated(found: re.Match[bytes], changed_at: float) -> float:
    parts = found.groupdict()
    month = int(parts["mo"]) if "mo" in parts else _MONTHS.index(parts["month"]) + 1
    clock = int(parts["h"]), int(parts["mi"]), int(parts["s"])
    fraction = float(b"0." + (parts["f"] or b"0"))
    year = parts["y"] and int(parts["y"])
    if year:
        whole = datetime(
            year if year > 99 else year + 2000, month, int(parts["d"]), *clock, tzinfo=_zone(parts.get("z"))
        )
        return whole.timestamp() + fraction
    latest = datetime.fromtimestamp(changed_at).year
    this_year = datetime(latest, month, int(parts["d"]), *clock)
    if this_year.timestamp() > changed_at + _DAY_S:
        this_year = this_year.replace(year=latest - 1)
    return this_year.timestamp() + fraction


def _zone(text: bytes | None) -> tzinfo | None:
    """None: this machine's."""
    if text is None:
        return None
    if text in (b"Z", b"UTC"):
        return UTC
    ahead = timedelta(hours=int(text[1:3]), minutes=int(text[-2:]))
    return timezone(-ahead if text.startswith(b"-") else ahead)


def _epoch(found: re.Match[bytes], changed_at: float) -> float:
    digits = found["t"]
    return float(digits) / (1000 if len(digits) == len("1795283000123") and b"." not in digits else 1)


_FORMS: tuple[tuple[re.Pattern[bytes], Callable[[re.Match[bytes], float], float]], ...] = (
    (_ISO, _dated),
    (_GLOG, _dated),
    (_AMERICAN, _dated),
    (_SYSLOG, _dated),
    (_EPOCH, _epoch),
)
