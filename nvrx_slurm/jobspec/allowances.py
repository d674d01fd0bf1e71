"""How often something may happen, as people write it: a count (`10`), or a rate (`10 per 24h`)."""

from __future__ import annotations

import re

from nvrx_slurm.journal.records import Allowance
from nvrx_slurm.util.durations import parse_duration, words

MOST = 1_000_000
_ALLOWANCE = re.compile(r"(\d{1,7})(?:\s+per\s+(\S+))?", re.ASCII)


def parse_allowance(value: object) -> Allowance:
    """`10`: so often in all. `10 per 24h`: so often within any 24 hours. Raises ValueError."""
    if isinstance(value, Allowance):
        return value
    match = None if isinstance(value, bool) else _ALLOWANCE.fullmatch(str(value).strip())
    if match is None or int(match[1]) > MOST:
        raise ValueError(f"must be a count from 0 to {MOST}, or a rate such as '10 per 24h', not {value!r}")
    if match[2] is None:
        return Allowance(count=int(match[1]))
    per_s = parse_duration(match[2])
    if per_s <= 0:
        raise ValueError(f"must be a rate within some time, such as '10 per 24h', not {value!r}")
    return Allowance(count=int(match[1]), per_s=per_s)


def allowance_words(allowance: Allowance) -> str | int:
    """An allowance as job.yaml has it. `parse_allowance` gives it back."""
    return allowance.count if allowance.per_s is None else f"{allowance.count} per {words(allowance.per_s)}"
