"""The kinds of values that job.yaml holds: what each accepts, how it is bounded, what the JSON Schema says of it."""

from __future__ import annotations

import re
import shlex
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    WithJsonSchema,
)

from nvrx_slurm.jobspec.allowances import allowance_words, parse_allowance
from nvrx_slurm.jobspec.sizes import parse_size, size_words
from nvrx_slurm.journal.records import Allowance
from nvrx_slurm.util.durations import DAY_S, parse_duration, parse_time_limit, words

MOST_NODES = 100_000
SHORTEST_S, LONGEST_S = 0.01, 30 * DAY_S
SMALLEST_BYTES, LARGEST_BYTES = 1 << 20, 1 << 40
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT")
"""What workers can be sent and can catch."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[a-z][a-z0-9-]+")
_GPUS = re.compile(r"(?:[A-Za-z][A-Za-z0-9_.-]*:)?[0-9]{1,6}")

RESERVED_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
}
"""What every worker is told about itself; `env` cannot say otherwise."""


class Misfit(ValueError):
    """What is wrong with one key of a mapping that is looked at as a whole. `path`: that key, from the mapping."""

    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = path


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


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter or digit")
    return text


def _whole_number(value: object) -> object:
    if isinstance(value, bool):  # Python takes True for 1
        raise ValueError(f"must be a whole number, not {value!r}")
    return value


def _between(least_s: float, most_s: float) -> AfterValidator:
    def check(seconds: float) -> float:
        if not least_s <= seconds <= most_s:
            raise ValueError(f"must be from {words(least_s)} to {words(most_s)}, not {seconds:g}s")
        return seconds

    return AfterValidator(check)


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
    """Without the `.0` that nobody writes."""
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


def _environment(value: object) -> object:
    if not isinstance(value, dict):
        return value
    for name in value:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise Misfit("is no name for an environment variable: letters, digits and '_' make one", str(name))
        if name in RESERVED_VARIABLES or name.startswith("NVRX_"):
            raise Misfit("is set by nvrx-slurm itself, for each rank; give yours another name", name)
    return {name: _text(text) for name, text in value.items()}


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


def _lines(value: object) -> object:
    return value.splitlines() if isinstance(value, str) else value


def _extra(value: object) -> object:
    if not isinstance(value, dict):
        return value
    for flag in value:
        if not isinstance(flag, str) or not _FLAG.fullmatch(flag):
            raise Misfit("is no sbatch flag; write its long form without dashes in front: `comment: text`", str(flag))
        if flag in _OURS:
            raise Misfit(f"is set by nvrx-slurm itself{_OURS[flag]}", flag)
    return {flag: _flag_value(text) for flag, text in value.items()}


_OURS = {
    "nodes": "; set `nodes` and `spares`",
    "job-name": "; set `name`",
    "ntasks-per-node": ": one agent a node",
    "ntasks": ": one agent a node",
    "no-kill": ": a job with spares outlives its nodes",
    "output": ": the job folder holds the logs",
    "open-mode": ": a requeued job goes on in the same log",
    "signal": ": it fits the teardown's budget",
    "array": ": submit several jobs instead",
    "wrap": "; set `command`",
}
"""sbatch flags that `slurm.extra` cannot hold, and why."""

_SIGNAL_PATTERN = f"^(SIG)?({'|'.join(name.removeprefix('SIG') for name in SIGNALS)})$"
_SCALAR = {"type": ["string", "number", "boolean"]}  # a number or `true` arrives as it was written
Line = Annotated[str, BeforeValidator(_digits), AfterValidator(_one_line), WithJsonSchema(_SCALAR)]
Text = Annotated[str, BeforeValidator(_digits), AfterValidator(_portable), WithJsonSchema(_SCALAR)]
Name = Annotated[str, AfterValidator(_name)]
_DURATION_SCHEMA = {"type": ["string", "number"], "examples": ["15s", "2m", "1h30m"]}
_AS_WORDS = PlainSerializer(words, return_type=str, when_used="json")
_Seconds = Annotated[float, BeforeValidator(parse_duration), _AS_WORDS, WithJsonSchema(_DURATION_SCHEMA)]
Duration = Annotated[_Seconds, _between(SHORTEST_S, LONGEST_S)]
Pause = Annotated[_Seconds, _between(0, LONGEST_S)]
TimeLimit = Annotated[
    float,
    BeforeValidator(parse_time_limit),
    _between(60, 3650 * DAY_S),
    _AS_WORDS,
    WithJsonSchema({"type": ["string", "integer"], "examples": ["12h", "2-00:00:00", 60]}),
]
Command = Annotated[
    tuple[Text, ...],
    BeforeValidator(_command),
    AfterValidator(_some_words),
    WithJsonSchema({"type": ["string", "array"], "items": _SCALAR}),
]
Environment = Annotated[dict[str, Text], BeforeValidator(_environment)]
Lines = Annotated[
    tuple[Text, ...],
    BeforeValidator(_lines),
    WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}}),
]
Extra = Annotated[
    dict[str, Line | StrictBool],
    BeforeValidator(_extra),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": [*_SCALAR["type"], "null"]}}),
]
Gpus = Annotated[str, BeforeValidator(_gpus), WithJsonSchema({"type": ["integer", "string"]})]


_WHOLE = BeforeValidator(_whole_number)
Nodes = Annotated[int, Field(ge=1, le=MOST_NODES), _WHOLE]
Count = Annotated[int, Field(ge=0, le=1_000_000), _WHOLE]
Spares = Annotated[int, Field(ge=0, le=MOST_NODES), _WHOLE]
Positive = Annotated[int, Field(ge=1, le=1_000_000), _WHOLE]
Workers = Annotated[int, Field(ge=1, le=1024), _WHOLE]
Factor = Annotated[float, Field(ge=1.5, le=1000), PlainSerializer(_number, when_used="json")]
Switch = Annotated[StrictBool, BeforeValidator(_flag_value)]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    AfterValidator(_memory),
    PlainSerializer(size_words, return_type=str, when_used="json"),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["2GiB", "500MB"]}),
]
SignalName = Annotated[
    str,
    BeforeValidator(_signal),
    WithJsonSchema({"type": "string", "pattern": _SIGNAL_PATTERN, "examples": ["SIGTERM", "USR1"]}),
]
CountOrRate = Annotated[
    Allowance,
    PlainValidator(parse_allowance),
    PlainSerializer(allowance_words, when_used="json"),
    WithJsonSchema({"type": ["integer", "string"], "examples": [3, "10 per 24h"]}),
]
