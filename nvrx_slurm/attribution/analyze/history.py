"""Whether the cycles before ended in the same way: what happens again is no accident."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nvrx_slurm.journal.verdicts import Evidence

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_QUOTED_PATH = re.compile(r"/[\w./-]*/")
_LONGEST = 160


@dataclass(frozen=True, slots=True)
class Earlier:
    """How one of the cycles before ended. `nodes`: where it began, as far as known."""

    fault: str
    fingerprint: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """How often, without a break up to now, the same happened before; and whether always on the same node."""

    times: int = 0
    same_node: bool = False
    other_nodes: bool = False


def fingerprint(fault: str, primary: Evidence | None, frames: str = "") -> str:
    """What makes two failures the same: class, words of the line without their numbers, innermost frame."""
    if primary is None:
        return fault
    words = _NUMBERS.sub("#", _QUOTED_PATH.sub("/", primary.text))[:_LONGEST]
    return f"{fault}|{words}|{frames.partition('|')[0]}"


def repeat(now: Earlier, before: Sequence[Earlier]) -> Repeat:
    """Count back from now, newest first, until a cycle ended otherwise. What is not known is no repeat."""
    same: list[Earlier] = []
    for each in before:
        if each.fault == "unknown" or each.fingerprint != now.fingerprint:
            break
        same.append(each)
    known = [set(each.nodes) for each in (now, *same) if each.nodes]
    if not same or len(known) < 2:
        return Repeat(len(same))
    shared = set.intersection(*known)
    return Repeat(len(same), same_node=bool(shared), other_nodes=not shared)
