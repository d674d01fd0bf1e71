"""What can happen to an agent, beside orders and the ends of workers; and the cycle that it is in."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from nvrx_slurm.agent.hangs import Hang
from nvrx_slurm.agent.heartbeat import ControllerSilent
from nvrx_slurm.agent.workers import WorkerEvent
from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.journal.records import AnyOrder, Assignment
from nvrx_slurm.journal.restarts import InProcessRestart


class AgentMode(StrEnum):
    """What the agent is at."""

    STANDBY = "standby"
    ACTIVE = "active"
    STOPPING = "stopping"


class Assigned(msgspec.Struct, frozen=True):
    """What this node does in a cycle, as the store has it. `asked_by`: the incarnation that asked for it."""

    replica: str
    cycle: int
    assignment: Assignment | None
    asked_by: str


class JoinLost(msgspec.Struct, frozen=True):
    """The store has lost the join of this incarnation: a controller may never have read it."""

    incarnation: str


class Signal(msgspec.Struct, frozen=True):
    """SIGTERM or SIGINT came: Slurm, or the process that started the agent, ends the node. Or `HURRY`."""

    name: str


class Resumed(msgspec.Struct, frozen=True):
    """This process has stood still for so long in a suspension of the job, or none has come."""

    stood_still_s: float


class Cycle(msgspec.Struct):
    """The cycle of a replica that this node is in."""

    replica: str
    number: int
    assignment: Assignment
    began: float
    pids: dict[int, int] = {}
    environments: dict[int, dict[str, str]] = {}  # what a rank was given, but for its slot's
    slot_names: frozenset[str] = frozenset()  # of the variables by which a worker reports: of no other process
    running: set[int] = set()
    reported: set[int] = set()  # ranks whose failure or hang the controller knows of
    peers_lost: set[int] = set()  # ranks that ended because they had lost a peer
    terminated: dict[int, float] = {}  # rank → when it died by SIGTERM, not yet reported
    warm: int = 0  # how many of its workers were forked from a warm process
    cold: str | None = None  # why the others were not, where the role has one
    modules_file: Path | None = None  # where a worker writes down what it imports
    dumped: bool = False  # the stacks of this cycle are on file
    has_stepped: bool = False
    step: int | None = None  # the furthest that its workers reported, once it is over
    restarts: int = 0  # in process
    unreported: int = 0  # how many of them are not reported yet
    newest: InProcessRestart | None = None

    @property
    def ranks(self) -> set[int]:
        first = self.assignment.first_rank
        return set(range(first, first + self.assignment.workers))


class Failing(msgspec.Struct, frozen=True):
    """A worker's interpreter reports that it is about to end with an uncaught exception. `at`: when, on the monotonic
    clock; None: it does not say."""

    rank: int
    pid: int
    what: str
    at: float | None = None


class Terminated(msgspec.Struct, frozen=True):
    """A worker died by SIGTERM some moments ago."""

    cycle: Cycle
    rank: int


class Done(msgspec.Struct, frozen=True):
    """All workers of the cycle ended with 0 some moments ago."""

    cycle: Cycle


class StacksOnFile(msgspec.Struct, frozen=True):
    """Rank → path below the job folder, and → its innermost line."""

    files: dict[int, str]
    where: dict[int, str]
    problems: tuple[str, ...] = ()


class Dumped(msgspec.Struct, frozen=True):
    """Stacks were written down: because of a hang, on request, or before a stop that goes on with `then`."""

    cycle: Cycle
    stacks: StacksOnFile
    why: str = ""
    hang: Hang | None = None
    request: str | None = None
    then: Callable[[], object] | None = None


class Crash(msgspec.Struct, frozen=True):
    """A task beside the loop failed unexpectedly: the agent ends, and its node counts as lost."""

    error: BaseException


Event = (
    AnyOrder
    | WorkerEvent
    | Assigned
    | Failing
    | Terminated
    | Done
    | Hang
    | Dumped
    | Signal
    | JoinLost
    | Resumed
    | StoreUnreachable
    | ControllerSilent
    | Crash
)
