"""The kinds of values that job.yaml holds: what each accepts, its bounds, its JSON Schema."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated

from msgspec import Meta, Struct

from nvrx_slurm.jobspec.reading import After, Before, Schema, Written
from nvrx_slurm.util.durations import DAY_S, parse_duration, parse_time_limit, words

MOST_NODES = 100_000
SHORTEST_S, LONGEST_S = 0.01, 30 * DAY_S
SMALLEST_BYTES, LARGEST_BYTES = 1 << 20, 1 << 40
# What workers can be sent and can catch.
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT")

# msgspec searches for this pattern in plan.json: hence `^` and `\Z`, since `$` passes a newline at the end.
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[a-z][a-z0-9-]+")
_GPUS = re.compile(r"(?:[A-Za-z][A-Za-z0-9_.-]*:)?[0-9]{1,6}")

# Variables that nvrx-slurm sets for each worker; `env` cannot set them.
RESERVED_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
}


def _one_line(text: str) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ValueError("must be one line of printable text")
    return _portable(text)


def _portable(text: str) -> str:
    """Text that an argument, a variable and a UTF-8 file can hold."""
    if "\0" in text:
        raise ValueError("must not contain a NUL byte")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode; it holds half of a surrogate pair") from None
    return text


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter or digit")
    return text


def _between(least_s: float, most_s: float, *, or_none: str = "") -> After:
    def check(seconds: float) -> float:
        if not least_s <= seconds <= most_s and not (or_none and math.isinf(seconds)):
            raise ValueError(f"must be from {words(least_s)} to {words(most_s)}{or_none}, not {seconds:g}s")
        return seconds

    return After(check)


def _memory(size_bytes: int) -> int:
    if not SMALLEST_BYTES <= size_bytes <= LARGEST_BYTES:
        bounds = f"{size_words(SMALLEST_BYTES)} to {size_words(LARGEST_BYTES)}"
        raise ValueError(f"must be from {bounds}, not {size_words(size_bytes)}")
    return size_bytes


def _signal(value: object) -> object:
    """`usr1` and `SIGUSR1` are the same signal."""
    name = value.upper() if isinstance(value, str) else ""
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in SIGNALS:
        raise ValueError(f"must be one of {', '.join(SIGNALS)}, not {value!r}")
    return name


def _number(value: float) -> float | int:
    """Without a final `.0`."""
    return int(value) if value.is_integer() else value


def _command(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"cannot be split as a shell would: {error}") from None


def _some_words(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words or not words[0]:
        raise ValueError("must name a program")
    return words


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ValueError("is no name for an environment variable: letters, digits and '_' make one")
    if name in RESERVED_VARIABLES or name.startswith("NVRX_"):
        raise ValueError("is set by nvrx-slurm itself, for each rank; give yours another name")
    return name


def _text(value: object) -> object:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else _digits(value)


def _digits(value: object) -> object:
    """A number that a Python caller gives where text belongs; those in files are text already."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _gpus(value: object) -> object:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and not _GPUS.fullmatch(text):
        raise ValueError(f"must be a number or type:number, such as 8 or h100:8, not {text!r}")
    return text


def _flag_value(value: object) -> object:
    """`true` is a flag without a value; `false` leaves it out."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _flag(value: object) -> object:
    """Text, or whether the flag is there at all."""
    value = _digits(_flag_value(value))
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise ValueError(f"must be text, true or false, not {value!r}")
    return _one_line(value)


def _log_name(text: str) -> str:
    if other := re.search(r"%.?", re.sub(r"%[%jAxua]", "", text)):
        raise ValueError(f"can hold %j and %A (the job's id), %a, %x (its name), %u (you) and %%, not {other[0]}")
    return text


def _as_list(value: object) -> object:
    """A single text where a list belongs."""
    return [value] if isinstance(value, str) else value


def _lines(value: object) -> object:
    return value.splitlines() if isinstance(value, str) else value


def _extra(flag: str) -> str:
    if not _FLAG.fullmatch(flag):
        raise ValueError("is no sbatch flag; write its long form without dashes in front: `comment: text`")
    if flag in _REFUSED:
        raise ValueError(_REFUSED[flag])
    return flag


# sbatch flags that `slurm.extra` cannot hold, and why.
_BY_TOOL = "is set by nvrx-slurm itself"
_REFUSED = {
    "nodes": f"{_BY_TOOL}; set `nodes` and `spares`",
    "job-name": f"{_BY_TOOL}; set `name`",
    "ntasks-per-node": f"{_BY_TOOL}: one agent a node",
    "ntasks": f"{_BY_TOOL}: one agent a node",
    "no-kill": f"{_BY_TOOL}: a job with spares outlives its nodes",
    "output": f"{_BY_TOOL}; set `output`",
    "open-mode": f"{_BY_TOOL}: a requeued job goes on in the same log",
    "signal": f"{_BY_TOOL}: it fits the teardown's budget",
    "wrap": f"{_BY_TOOL}; set `command`",
    # Its sbatch would not answer for as long as the job runs, and be taken for one that a dead slurmctld holds up.
    "wait": "is no property of a job: use `nvrx-slurm submit --wait`, or `sbatch --wait` with a rendered script",
    "het-group": (
        "is not supported: a heterogeneous job's components are jobs of their own, and no step starts agents on all"
        " of them"
    ),
}


# ---------------------------------------------------------------------------------------------- sizes and allowances


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
    # Not by float: of 8.2GB, say, or of a long number of bytes, it would lose the last ones.
    return int(Decimal(match[1]) * _BY_NAME[(match[2] or "B").upper()])


def size_words(size_bytes: int) -> str:
    """A size as job.yaml has it, in the largest unit that divides it: `2GiB`. `parse_size` reads it back."""
    unit = next((unit for unit, size in _UNITS_BYTES.items() if size_bytes % size == 0 < size_bytes), "B")
    return f"{size_bytes // _UNITS_BYTES[unit]}{unit}"


MOST_ALLOWED = 1_000_000
_ALLOWANCE = re.compile(r"(\d{1,7})(?:\s+per\s+(\S+))?", re.ASCII)


class Allowance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often something may happen: `count` times, or so often within any `per_s` seconds."""

    count: int
    per_s: float | None = None

    def used(self, times: Sequence[float], now: float) -> int:
        """How many of what has happened at these times still counts."""
        return len(times) if self.per_s is None else sum(now - self.per_s < at for at in times)

    def left(self, times: Sequence[float], now: float) -> int:
        """How often it may happen again."""
        return max(0, self.count - self.used(times, now))


def parse_allowance(value: object) -> Allowance:
    """`10`: so often in all. `10 per 24h`: so often within any 24 hours. Raises ValueError."""
    if isinstance(value, Allowance):
        return value
    match = None if isinstance(value, bool) else _ALLOWANCE.fullmatch(str(value).strip())
    if match is None or int(match[1]) > MOST_ALLOWED:
        raise ValueError(f"must be a count from 0 to {MOST_ALLOWED}, or a rate such as '10 per 24h', not {value!r}")
    if match[2] is None:
        return Allowance(count=int(match[1]))
    per_s = parse_duration(match[2])
    if per_s <= 0:
        raise ValueError(f"must be a rate within some time, such as '10 per 24h', not {value!r}")
    return Allowance(count=int(match[1]), per_s=per_s)


def allowance_words(allowance: Allowance) -> str | int:
    """An allowance as job.yaml has it. `parse_allowance` reads it back."""
    return allowance.count if allowance.per_s is None else f"{allowance.count} per {words(allowance.per_s)}"


# --------------------------------------------------------------------------------------------------------- the kinds


_SIGNAL_PATTERN = f"^(SIG)?({'|'.join(name.removeprefix('SIG') for name in SIGNALS)})$"
_SCALAR = {"type": ["string", "number", "boolean"]}  # a number or `true` arrives as it was written
Line = Annotated[str, Before(_digits), After(_one_line), Schema(_SCALAR)]
Text = Annotated[str, Before(_digits), After(_portable), Schema(_SCALAR)]
Name = Annotated[str, Meta(pattern=_NAME.pattern), After(_name)]  # also where plan.json is decoded
NonEmpty = Annotated[Line, After(_not_empty)]
LogName = Annotated[Line, After(_log_name)]
_DURATION_SCHEMA = {"type": ["string", "number"], "examples": ["15s", "2m", "1h30m"]}
_AS_WORDS = Written(words)
_Seconds = Annotated[float, Before(parse_duration), _AS_WORDS, Schema(_DURATION_SCHEMA)]
Duration = Annotated[_Seconds, _between(SHORTEST_S, LONGEST_S)]
Pause = Annotated[_Seconds, _between(0, LONGEST_S)]
TimeLimit = Annotated[
    float,
    Before(parse_time_limit),
    _between(60, 3650 * DAY_S, or_none=", or UNLIMITED"),
    _AS_WORDS,
    Schema({"type": ["string", "integer"], "examples": ["12h", "2-00:00:00", 60, "UNLIMITED"]}),
]
Command = Annotated[
    tuple[Text, ...],
    Before(_command),
    After(_some_words),
    Schema({"type": ["string", "array"], "items": _SCALAR}),
]
Environment = dict[Annotated[str, After(_variable)], Annotated[Text, Before(_text)]]
AS_LIST = Before(_as_list)
TEXT_OR_LIST = Schema({"type": ["string", "array"], "items": {"type": "string"}})
Lines = Annotated[tuple[Text, ...], Before(_lines), TEXT_OR_LIST]
Extra = Annotated[
    dict[Annotated[str, After(_extra)], Annotated[str | bool, Before(_flag)]],
    Schema({"type": "object", "additionalProperties": {"type": [*_SCALAR["type"], "null"]}}),
]
Gpus = Annotated[str, Before(_gpus), Schema({"type": ["integer", "string"]})]
Nodes = Annotated[int, Meta(ge=1, le=MOST_NODES)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Spares = Annotated[int, Meta(ge=0, le=MOST_NODES)]
Positive = Annotated[int, Meta(ge=1, le=1_000_000)]
Workers = Annotated[int, Meta(ge=1, le=1024)]
Factor = Annotated[float, Meta(ge=1.5, le=1000), Written(_number)]
Switch = Annotated[bool, Before(_flag_value)]
Size = Annotated[
    int,
    Before(parse_size),
    After(_memory),
    Written(size_words),
    Schema({"type": ["string", "integer"], "examples": ["2GiB", "500MB"]}),
]
SignalName = Annotated[
    str,
    Before(_signal),
    Schema({"type": "string", "pattern": _SIGNAL_PATTERN, "examples": ["SIGTERM", "USR1"]}),
]
CountOrRate = Annotated[
    Allowance,
    Before(parse_allowance),
    Written(allowance_words),
    Schema({"type": ["integer", "string"], "examples": [3, "10 per 24h"]}),
]
