"""The keys of job.yaml: types, bounds, defaults, and how they must relate. All values are frozen."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    WithJsonSchema,
    model_validator,
)

from nvrx_slurm.config.durations import DAY_S, parse_duration, parse_time_limit, words

MOST_NODES = 100_000
SHORTEST_S, LONGEST_S = 0.01, 30 * DAY_S
_IN_A_ROLE = {"nodes": "nodes_per_replica"}
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


def _store(value: object) -> object:
    return {} if value == "embedded" else value


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
        if (key := flag.replace("-", "_")) in Slurm.model_fields:
            raise Misfit(f"is a key of its own; set `slurm.{key}`", flag)
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
OnFailure = Literal["restart_replica", "restart_job", "ignore", "fail_job"]


_WHOLE = BeforeValidator(_whole_number)
Nodes = Annotated[int, Field(ge=1, le=MOST_NODES), _WHOLE]
Count = Annotated[int, Field(ge=0, le=1_000_000), _WHOLE]
Spares = Annotated[int, Field(ge=0, le=MOST_NODES), _WHOLE]
Positive = Annotated[int, Field(ge=1, le=1_000_000), _WHOLE]
Workers = Annotated[int, Field(ge=1, le=1024), _WHOLE]


class Block(BaseModel):
    """A mapping in job.yaml: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Slurm(Block):
    """What to ask Slurm for. A key that is not set is left to the cluster's default."""

    partition: Line | None = None
    """`--partition`"""
    account: Line | None = None
    """`--account`"""
    qos: Line | None = None
    """`--qos`"""
    time: TimeLimit | None = None
    """Time limit: a duration (`12h`), or as sbatch takes it (`2-00:00:00`; a plain number is minutes)."""
    gpus_per_node: Gpus | None = None
    """`--gpus-per-node`: a number, or `type:number`"""
    cpus_per_task: Positive | None = None
    """CPUs for each node's agent and all of its workers together (one task runs on each node)."""
    mem: Line | None = None
    """`--mem` per node, such as `64G`; `0` is all of it"""
    constraint: Line | None = None
    """`--constraint`"""
    exclude: Line | None = None
    """`--exclude`: nodes not to use"""
    reservation: Line | None = None
    """`--reservation`"""
    segment: Nodes | None = None
    """`--segment`: nodes of one network block (Slurm 23.11 and newer)"""
    extra: Extra = {}
    """Any other sbatch flag, without its dashes: `comment: text`; `true` for a flag without a value."""


class Heartbeat(Block):
    """Signs of life between agents and controller."""

    interval: Duration = 1.0
    """How often an agent says that it lives."""
    timeout: Duration = 15.0
    """How long a silent node is waited for. A death is noticed at once, by its broken connection."""


class Rendezvous(Block):
    """How a round of nodes comes together."""

    join_timeout: Duration = 600.0
    """How long a round may stay open. Then the job goes on with `min_nodes`, or ends with 75."""
    last_call: Pause = 5.0
    """How long a late node of the cycle before is still preferred to a hot spare that is there."""


class Teardown(Block):
    """How workers are stopped."""

    grace: Pause = 10.0
    """From SIGTERM to SIGKILL, for all that a worker has started."""


class FaultToleranceSpec(Block):
    """Budgets and bounds."""

    max_restarts: Count = 3
    """How many worker failures each replica is restarted after. Lost nodes are not counted: they cost spares."""
    heartbeat: Heartbeat = Heartbeat()
    rendezvous: Rendezvous = Rendezvous()
    teardown: Teardown = Teardown()

    @model_validator(mode="after")
    def _relations(self) -> Self:
        beat = self.heartbeat
        if beat.interval >= beat.timeout:
            raise Misfit(
                f"must be shorter than heartbeat.timeout ({words(beat.timeout)}), not {words(beat.interval)}",
                "heartbeat",
                "interval",
            )
        return self


class StoreSpec(Block):
    """Where the job keeps its state. Without `url`: an embedded Valkey on the batch host."""

    url: Line | None = None
    """`redis://host:port/db` or `rediss://…` of your own Redis or Valkey; without a password in it"""
    password_file: Line | None = None
    """A file (mode 0600) with its password; or set NVRX_SLURM_STORE_PASSWORD"""

    @model_validator(mode="after")
    def _no_password_in_the_url(self) -> Self:
        if self.url is None:
            return self
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("redis", "rediss") and parts.hostname and parts.port != 0
        except ValueError:  # urlsplit and `port` look closer than this function does
            usable = False
        if not usable:
            raise Misfit("must look like redis://host:6379/0 or rediss://host:6380/0", "url")
        if parts.password is not None or "password" in dict(parse_qsl(parts.query, keep_blank_values=True)):
            raise Misfit(
                "must not hold a password, since the job script would show it; put it into a file (mode 0600)"
                " named by store.password_file, or into NVRX_SLURM_STORE_PASSWORD",
                "url",
            )
        return self


class Role(Block):
    """One kind of worker in a job with several."""

    command: Command
    """What each worker runs: a list, or one string that is split as a shell would; no shell runs it."""
    replicas: Nodes = 1
    """How many worlds of this role run side by side."""
    nodes_per_replica: Nodes = 1
    """Nodes in each of them."""
    min_nodes: Nodes | None = None
    """With no spare left, a replica goes on with as few as this."""
    workers_per_node: Workers = 1
    """Worker processes on each node."""
    on_failure: OnFailure = "restart_replica"
    """What follows when a worker fails: its replica starts again, or all do; the replica ends alone; the job ends."""
    workdir: Line | None = None
    """Where this role's workers start."""
    env: Environment = {}
    """Environment of this role's workers, on top of the job's."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        _check_min_nodes(self.min_nodes, self.nodes_per_replica, "nodes_per_replica")
        return self


class JobSpec(Block):
    """A job: what to run, on how many nodes, and what to do when something breaks."""

    name: Name
    """The job's name, for Slurm and for people."""
    command: Command | None = None
    """What each worker runs: a list, or one string that is split as a shell would; no shell runs it."""
    nodes: Nodes = 1
    """Nodes that work. Hot spares come on top."""
    spares: Spares = 0
    """Hot spares: nodes that stand by in the allocation. All roles share them."""
    min_nodes: Nodes | None = None
    """With no spare left, go on with as few nodes as this. Without it the job ends with 75, worth a retry."""
    workers_per_node: Workers = 1
    """Worker processes on each node, usually one a GPU."""
    workdir: Line | None = None
    """Where workers start; relative to the folder of job.yaml. Without it: the folder you submit from."""
    env: Environment = {}
    """Environment of all workers. No secrets: the job script shows it."""
    setup: Lines = ()
    """Shell lines of the job script before anything starts: `module load …`, `source venv/bin/activate`."""
    roles: dict[Name, Role] | None = None
    """Several kinds of workers, by name, instead of `command` and `nodes` (an RL job: policy and rollout)."""
    slurm: Slurm = Slurm()
    fault_tolerance: FaultToleranceSpec = FaultToleranceSpec()
    store: Annotated[StoreSpec, BeforeValidator(_store)] = StoreSpec()

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.roles:
            plain = {"command", "nodes", "min_nodes", "workers_per_node"} & self.model_fields_set
            if plain:
                key = min(plain)
                raise Misfit(f"with `roles`, set `{_IN_A_ROLE.get(key, key)}` in each role instead", key)
        elif self.command is None:
            raise ValueError("`command` is missing: say what each worker runs (or give `roles`)")
        _check_min_nodes(self.min_nodes, self.nodes, "nodes")
        roles = (self.roles or {}).values()
        total = self.spares + (sum(role.replicas * role.nodes_per_replica for role in roles) or self.nodes)
        if total > MOST_NODES:
            raise Misfit(f"{total} nodes with the spares; at most {MOST_NODES} are possible", "spares")
        return self


def _check_min_nodes(min_nodes: int | None, nodes: int, key: str) -> None:
    if min_nodes is not None and min_nodes > nodes:
        raise Misfit(f"must be at most `{key}` ({nodes}), not {min_nodes}", "min_nodes")
