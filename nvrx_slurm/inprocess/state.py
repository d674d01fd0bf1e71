"""What a rank is, in this iteration and at the start of the call."""

from __future__ import annotations

import abc
import dataclasses
import enum
from dataclasses import dataclass


class Mode(enum.Enum):
    """What a rank does in an iteration."""

    INITIALIZED = "initialized"  # before the first rank assignment
    ACTIVE = "active"  # calls the function
    INACTIVE = "inactive"  # waits, in reserve
    TERMINATED = "terminated"  # is out


@dataclass(frozen=True)
class FrozenState:
    """One rank's place in the group, as callbacks see it: it cannot be changed.

    `rank` of `world_size`: among the ranks that take part. `active_rank` of `active_world_size`: among the ranks that
    call the function, which sees them as RANK and WORLD_SIZE; None for a rank that does not call it. `initial_rank`
    names the process for the whole call. `fn_exception` is what the function raised on this rank in this iteration.
    """

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "world_size"):
            if getattr(self, f"initial_{name}") is None:
                object.__setattr__(self, f"initial_{name}", getattr(self, name))


class State(FrozenState):
    """A FrozenState that a rank assignment may change."""

    rank: int | None
    world_size: int
    active_rank: int | None
    active_world_size: int | None
    initial_rank: int | None
    initial_world_size: int | None
    iteration: int
    mode: Mode
    fn_exception: BaseException | None

    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    def advance(self) -> None:
        """Go on to the next iteration."""
        self.iteration += 1
        self.fn_exception = None

    def freeze(self) -> FrozenState:
        """A copy that cannot be changed."""
        return FrozenState(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


class Callback(abc.ABC):
    """What a rank calls at some moment of an iteration: its subclasses say when, and what an exception means."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns the state as it is."""
