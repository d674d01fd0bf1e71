"""Durations as people write them: `15s`, `2m`, `1h30m`, `250ms`; and Slurm's own formats for time limits."""

from __future__ import annotations

import contextlib
import math
import re
from datetime import datetime, time, timedelta
from decimal import Decimal

DAY_S = 86400.0
UNLIMITED = "UNLIMITED"
_UNITS_S = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_PLAIN = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_PART = re.compile(rf"({_PLAIN.pattern})(ms|s|m|h|d)", re.ASCII)
_SLURM = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)


def parse_duration(value: object) -> float:
    """Seconds. Accepts `15s`, `1h30m`, or a plain number of seconds. Raises ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    text = str(value).strip()
    if _PLAIN.fullmatch(text):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{value!r} is no duration; write it like 15s, 2m, 1h30m")
    return float(sum(Decimal(number) * _UNITS_S[unit] for number, unit in parts))


def parse_moment(text: str, now: float) -> float:
    """Seconds since the epoch: `10m` ago, `14:30` (the last one, local time), or a date and time as ISO 8601 has it,
    `2026-11-23T14:30` or `2026-11-23T13:30Z`. Raises ValueError."""
    with contextlib.suppress(ValueError):
        return now - parse_duration(text)
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text.strip()).timestamp()
    try:
        at = datetime.combine(datetime.fromtimestamp(now), time.fromisoformat(text.strip()))
    except ValueError:
        raise ValueError(f"{text!r} is no time; write it like 10m, 14:30 or 2026-11-23T14:30") from None
    return (at if at.timestamp() <= now else at - timedelta(days=1)).timestamp()


def parse_time_limit(value: object) -> float:
    """Seconds, from a time limit as sbatch takes it or from a duration. Raises ValueError.

    A plain number is minutes; otherwise M:S, H:M:S, D-H, D-H:M, D-H:M:S (sbatch(1), --time), or `12h`, `2d`.
    UNLIMITED and INFINITE, of any case, are infinite.
    """
    text = str(value).strip()
    if text.upper() in (UNLIMITED, "INFINITE"):
        return math.inf
    match = None if isinstance(value, (bool, float)) else _SLURM.fullmatch(text)
    if match is None:
        return parse_duration(text)
    days, first, second, third = (None if group is None else int(group) for group in match.groups())
    if days is not None:
        hours, minutes, seconds = first or 0, second or 0, third or 0
    elif third is not None:
        hours, minutes, seconds = first or 0, second or 0, third
    else:
        hours, minutes, seconds = 0, first or 0, second or 0
    return ((days or 0) * 24 + hours) * 3600.0 + minutes * 60.0 + seconds


def slurm_time(seconds: float) -> str:
    """A time limit in the one format that every Slurm reads: `D-HH:MM:SS`, or UNLIMITED."""
    if math.isinf(seconds):
        return UNLIMITED
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"


def words(seconds: float) -> str:
    """A duration as it is written in job.yaml: 90.0 → `1m30s`. `parse_duration` gives the same seconds back, and
    `parse_time_limit` an infinite time limit."""
    if math.isinf(seconds):
        return UNLIMITED
    exact = Decimal(repr(float(seconds)))
    if exact != int(exact):
        millis = exact * 1000
        return f"{int(millis)}ms" if seconds < 1 and millis == int(millis) else f"{exact:f}s"
    left, text = int(exact), ""
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, int(_UNITS_S[unit]))
        text += f"{count}{unit}" if count else ""
    return text or "0s"
