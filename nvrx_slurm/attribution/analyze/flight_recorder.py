"""PyTorch's flight recorder: what one rank's dump says of its collectives; pure, bytes to values.

The dump is a pickle or JSON of `{version, pg_config, pg_status, entries}`, the same for every backend
(torch/csrc/distributed/c10d/FlightRecorderDetail.hpp). Versions 1 and 2 are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from nvrx_slurm.attribution.analyze.unpickling import NotPlainError, load_plain
from nvrx_slurm.errors import MalformedRecord

DEFAULT_GROUP = "default_pg"
COMPLETED = "completed"
_INTEGER = re.compile(r"\b\d{1,9}\b", re.ASCII)
_MOST_DIMENSIONS = 16


class DumpError(MalformedRecord):
    """The bytes are no dump that can be read; the message says why."""


class CollectiveCall(msgspec.Struct, frozen=True):
    """One collective as a rank entered it. `seq` counts the group's collectives on that rank."""

    group: str
    description: str
    seq: int
    operation: str
    state: str
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def words(self) -> str:
        """`all_reduce number 4 of default_pg`."""
        group = self.description if self.description not in ("", "undefined") else f"group {self.group}"
        return f"{self.operation.rpartition(':')[2]} number {self.seq} of {group}"


class Dump(msgspec.Struct, frozen=True):
    """One rank's calls, in the order in which it made them, point-to-point ones left out. `members`: group → ranks,
    of the groups that the dump lists. `last`: group → number of the last collective in it that the rank entered."""

    rank: int
    calls: tuple[CollectiveCall, ...]
    members: Mapping[str, tuple[int, ...]]
    last: Mapping[str, int]

    @property
    def waits_in(self) -> CollectiveCall | None:
        """The call this rank is held up in: the first that has not completed, or, where the backend never reports
        completion (gloo), the last."""
        if not any(call.state == COMPLETED for call in self.calls):
            return self.calls[-1] if self.calls else None
        return next((call for call in self.calls if call.state != COMPLETED), None)


def read_dump(data: bytes, rank: int) -> Dump:
    """One rank's dump, from either form. Raises DumpError; never runs anything that the file holds."""
    try:
        raw = json.loads(data) if data[:1] in (b"{", b"[") else load_plain(data)
    except NotPlainError as error:
        raise DumpError(f"no plain pickle: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DumpError(f"no JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("entries", []), list):
        raise DumpError("no flight-recorder dump: it has no list of entries")
    entries = [entry for entry in raw.get("entries", []) if isinstance(entry, dict) and not entry.get("is_p2p")]
    try:
        calls = tuple(map(_call, entries))
        return Dump(rank, calls, _members(raw.get("pg_config")), {call.group: call.seq for call in calls})
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DumpError(f"no flight-recorder dump: {error}") from error


def _call(entry: dict[str, Any]) -> CollectiveCall:
    named = entry.get("process_group")
    if isinstance(named, (list, tuple)) and len(named) == 2:
        group, description = _text(named[0]), _text(named[1])
    else:  # version 1
        group, description = _text(entry.get("pg_id", "0")), ""

    # Only what looks like shapes of tensors: a hostile file could nest these without end.
    sizes, shapes = entry.get("input_sizes"), list[tuple[int, ...]]()
    if isinstance(sizes, (list, tuple)) and len(sizes) <= _MOST_DIMENSIONS:
        for shape in sizes:
            if isinstance(shape, (list, tuple)) and len(shape) <= _MOST_DIMENSIONS:
                shapes.append(tuple(_number(length) for length in shape))

    return CollectiveCall(
        group=group,
        description=description,
        seq=_number(entry.get("collective_seq_id", entry.get("seq_id"))),
        operation=_text(entry.get("profiling_name", "collective")),
        state=_text(entry.get("state", "")),
        shapes=tuple(shapes),
    )


def _members(config: object) -> dict[str, tuple[int, ...]]:
    """`pg_config` holds each group's ranks as a text, such as "[0, 1]"; gloo's is empty."""
    if not isinstance(config, dict):
        return {}
    listed = {
        _text(name): tuple(map(int, _INTEGER.findall(_text(group.get("ranks", "")))))
        for name, group in config.items()
        if isinstance(group, dict)
    }
    return {name: ranks for name, ranks in listed.items() if ranks}


def _text(value: object) -> str:
    """A name or a number; of anything else nothing. A list in which each list holds the one before many times takes a
    line in the file, but as a text all memory. Lone surrogates, which a name that is not UTF-8 has, become `?`: no
    record can hold them."""
    text = str(value) if isinstance(value, (str, int, float)) or value is None else ""
    return text.encode(errors="replace").decode()


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
