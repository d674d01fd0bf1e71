"""What can happen to an agent, beside orders and the ends of workers; and the cycle that it is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nvrx_slurm.agent.workers import WorkerEvent
from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.records import AnyOrder, Assignment


class Mode(StrEnum):
    """What the agent is at."""

    STANDBY = "standby"
    ACTIVE = "active"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Assigned:
    """The answer to the question what this node does in a round."""

    replica: str
    cycle: int
    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class Signal:
    """SIGTERM or SIGINT came: Slurm, or whoever started us, wants the node to end."""

    name: str


@dataclass(slots=True)
class Cycle:
    """The cycle of a replica that this node is in."""

    replica: str
    number: int
    assignment: Assignment
    began: float
    pids: dict[int, int] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    failed: bool = False
    has_stepped: bool = False


@dataclass(frozen=True, slots=True)
class Crash:
    """Something beside the loop failed in a way that nobody foresaw: the agent ends, and its node counts as lost."""

    error: BaseException


Event = AnyOrder | WorkerEvent | Assigned | Signal | StoreUnreachable | Crash
