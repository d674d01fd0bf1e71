"""What attribution is asked about a failure, and what it answers; the wire form of both.

A failure has one key. A source of attribution (the rules in this process, a service, an assistant) gets one `Inquiry`
for each key and answers with one `Attribution`. Frozen and versioned by growth, as all records are: a field may be
added with a default; none is renamed or removed, and an unknown field passes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import get_args

import msgspec


class Verdict(StrEnum):
    """What attribution says of a failure."""

    RESTART = "RESTART"  # it may well not happen again
    STOP = "STOP"  # it will happen again: a restart cannot help
    UNKNOWN = "UNKNOWN"  # the evidence says nothing, or the source failed (`problem` says how)
    TIMEOUT = "TIMEOUT"  # no answer in time


class Scope(StrEnum):
    """Where a failure comes from."""

    USER_CODE = "user_code"
    NODE = "node"
    NETWORK = "network"
    STORAGE = "storage"
    SCHEDULER = "scheduler"
    DATA = "data"
    UNKNOWN = "unknown"


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all that follows."""


# --------------------------------------------------------------------------------------------- asking


class FailureKey(Wire, frozen=True, kw_only=True):
    """Names one failure: the first of a replica's cycle. `rank` is None where a whole node was lost.

    `job` is the job folder's path: job ids repeat from cluster to cluster, paths do not.
    """

    job: str
    generation: int
    replica: str
    cycle: int
    rank: int | None = None

    def __str__(self) -> str:
        rank = "node" if self.rank is None else f"rank-{self.rank}"
        return f"{self.job}:{self.generation}:{self.replica}:{self.cycle}:{rank}"


class Failed(Wire, frozen=True, kw_only=True):
    """How the failure showed: an exit code or a signal of a worker, a hang, or a node that was lost."""

    cause: str
    node: str
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None
    hung: bool = False
    step: int | None = None
    t: float = 0.0  # seconds since the epoch, the store's clock


# As strerror(3) begins for ENOENT, EACCES, ENOEXEC and ENOTDIR: a report has no errno, only this text. What begins
# with `container.` names a key of that block.
_NEVER_RAN = ("No such ", "Permission denied", "Exec format error", "Not a directory", "container.")


def cannot_run(exit_code: int | None, signal: int | None, error: str | None) -> bool:
    """Whether a worker's program or folder is not there, or cannot be executed: the same start fails again; and so it
    is with a key of `container` that does not fit the node. What a busy node refuses (no memory, no process id) may
    start a moment later."""
    return exit_code is None and signal is None and error is not None and error.startswith(_NEVER_RAN)


def is_misconfigured(error: str | None) -> bool:
    """Whether a worker's uncaught exception says that its in-process wrapper has a wrong option: each start would end
    with it."""
    return error is not None and error.startswith("nvrx_slurm.inprocess.exception.OptionError: ")


# Of one replica. Where an inquiry names more its ranks are not enumerated.
MOST_RANKS = 1 << 20

# Of one node.
MOST_WORKERS = 1 << 18

MOST_NODES = 1 << 16
MOST_PATHS = 1000


class Inquiry(Wire, frozen=True, kw_only=True):
    """One failure with all that is known of it. Paths are absolute; a folder stands for every file below it.

    `nodes` are the cycle's, in group-rank order, each with `workers_per_node` ranks. `earlier`: the folders of the
    cycles before, newest first. `pids`: rank → process id, as the kernel's messages name them.
    """

    key: FailureKey
    paths: tuple[str, ...]
    failed: Failed | None = None
    nodes: tuple[str, ...] = ()
    workers_per_node: int = 1
    pids: dict[int, int] = {}
    started_at: float = 0.0
    earlier: tuple[str, ...] = ()

    def node_of(self, rank: int) -> str | None:
        """The node that held a rank; None: not known."""
        seat = rank // max(1, self.workers_per_node)
        return self.nodes[seat] if 0 <= seat < len(self.nodes) else None


def excess(inquiry: Inquiry) -> tuple[str, str] | None:
    """What of an inquiry from outside is out of bounds, and the key that holds it; None: nothing is.

    Each bound by itself, as a schema can say it. Of more than MOST_RANKS on all nodes none is enumerated."""
    if inquiry.workers_per_node < 1:
        return "Expected 1 or more", "workers_per_node"
    if inquiry.workers_per_node > MOST_WORKERS:
        return f"Expected {MOST_WORKERS} at most", "workers_per_node"
    if len(inquiry.nodes) > MOST_NODES:
        return f"Expected {MOST_NODES} nodes at most", "nodes"
    for name, paths in (("paths", inquiry.paths), ("earlier", inquiry.earlier)):
        if len(paths) > MOST_PATHS:
            return f"Expected {MOST_PATHS} paths at most", name
    # JSON from outside may hold longer integers than the wire form of records takes.
    for name in inquiry.__struct_fields__:
        try:
            msgspec.msgpack.encode(getattr(inquiry, name))
        except OverflowError:
            return "Expected integers of 64 bits at most", name
    return None


def unknown_keys(given: object, kind: type[msgspec.Struct]) -> list[str]:
    """Keys of a decoded object that its type does not know, with their paths: a newer client's, or mistaken ones."""
    if not isinstance(given, dict):
        return []
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    found = [str(key) for key in given if key not in fields]
    for key, part in given.items():
        kind_of = fields.get(key)
        inner = next((each for each in (Inquiry, FailureKey, Failed) if each in (kind_of, *get_args(kind_of))), None)
        if inner is not None:
            found += [f"{key}.{name}" for name in unknown_keys(part, inner)]
    return found


# From this size of a cycle's logs on, agents read those of their own nodes; less the broker reads in a second.
SHARED_FROM_BYTES = 64 << 20

# Of one node. The findings of eight ranks usually have some ten thousand bytes.
MOST_FINDINGS_BYTES = 1 << 20


# Before the findings, on their way from the process that reads to its agent: how long they are.
FINDINGS_LENGTH_BYTES = 4


class AgentFindings(Wire, frozen=True, kw_only=True):
    """What a node's agent has found in the logs of its ranks of one cycle (attribution/analyze/node_findings.py).
    `folder`: the cycle's, as an inquiry names it. `whole`: no worker of the cycle was left when they were read."""

    folder: str
    node: str
    whole: bool
    data: bytes


# ------------------------------------------------------------------------------------------ answering


class Evidence(Wire, frozen=True, kw_only=True):
    """One line of a file. `line` counts from 1 (0: the file as a whole); `t`: seconds since the epoch, if the line
    tells; `rule`: what recognised it."""

    file: str
    line: int
    text: str
    rule: str = ""
    rank: int | None = None
    node: str | None = None
    t: float | None = None


class LogsRead(Wire, frozen=True, kw_only=True):
    """What an answer is made from. `silent`: known ranks of which no log was found. `problems`: files that could not
    be read, or not to their end, at most 20 of them. `agents`: nodes whose agents have read the logs of their ranks;
    the rest the source has read itself."""

    files: int = 0
    size_bytes: int = 0
    ranks: int = 0
    silent: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    agents: int = 0


class Attribution(Wire, frozen=True, kw_only=True):
    """What one source says of one failure.

    `confidence` is between 0 and 1. `fault` is the class of failure, such as `cuda_oom` (docs/rules.md has all of
    them). `ranks` and `nodes` are the blamed ones; `missing` are ranks that the others waited for. `primary` is the
    line where it began, `secondary` what followed from it, in order. `problem`: why there is no verdict.
    `read`: which logs. Where the verdict is UNKNOWN, `runner_up` is the next best line, and `settle` a command that
    would show more. `meaning`: what the verdict means, in one sentence; `analyze --json` fills it in.
    """

    source: str
    verdict: Verdict
    confidence: float = 0.0
    fault: str = "unknown"
    scope: Scope = Scope.UNKNOWN
    transient: bool | None = None
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    primary: Evidence | None = None
    secondary: tuple[Evidence, ...] = ()
    explanation: str = ""
    hint: str = ""
    reference: str = ""
    latency_s: float = 0.0
    cached: bool = False
    problem: str | None = None
    read: LogsRead | None = None
    runner_up: Evidence | None = None
    settle: str = ""
    meaning: str = ""


class VerdictRecord(Wire, frozen=True, kw_only=True):
    """What the controller made of the answers. `acted`: the verdict decided, else `why` says why not; `action`: what
    is done now, as `RestartDecided.action` has it; `nodes_blamed`: who gets ranks only where no other is left."""

    key: FailureKey
    verdict: Verdict
    acted: bool = False
    why: str = ""
    action: str = ""
    nodes_blamed: tuple[str, ...] = ()
    dry_run: bool = False
