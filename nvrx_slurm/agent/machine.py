"""The node as its agent touches it: everything outside of the agent's own process, but for the store.

`linux.py` has the real one; the simulation brings a node of its own, and the agent's code is the same on both.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nvrx_slurm.agent.teardown import Phase
from nvrx_slurm.agent.workers import WorkerEvent
from nvrx_slurm.journal.records import Assignment, ControllerUp
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.workload.slot import Reading

if TYPE_CHECKING:
    from nvrx_slurm.agent.events import Cycle, StacksOnFile


class Holdable(Protocol):
    """Something of the kernel's that stays open until its last holder closes it, or is dead."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class FenceSocketPort(Protocol):
    """Where the node takes its fence key (`fence.FenceSocket`)."""

    def getsockname(self) -> tuple[str, int]: ...
    def filenos(self) -> list[int]: ...
    def close(self) -> None: ...


class ControllerConnection(Holdable, Protocol):
    """The agent's end of a liveness connection, proven by both. `hear` returns the words that arrived, none at the
    end. `say`, `hear` and `silence_s` raise OSError once it is closed; `hear` raises UnprovenPeer for a word that is
    not the controller's."""

    def say(self, word: bytes) -> None: ...
    async def hear(self) -> bytes: ...
    def silence_s(self) -> float: ...


class ReservedPort(Protocol):
    """A port that is held free for the workers' rendezvous (`linux.HeldPort`)."""

    number: int

    def release(self) -> None: ...


class WorkersPort(Protocol):
    """What `workers.Workers` promises."""

    def start(self) -> None: ...
    def spawn(
        self,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        out: int,
        err: int,
        warm: str | None = None,
    ) -> None: ...
    def warm(
        self,
        role: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        spec: Sequence[str],
        ahead: int = 0,
    ) -> None: ...
    def cool(self, role: str) -> None: ...
    def run_command(
        self,
        request: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        beside: int,
        out: int,
        err: int,
        without: Collection[str] = (),
    ) -> None: ...
    def signal_command(self, request: str, number: int) -> None: ...
    def stop(self, grace_s: float, number: int = ..., checkpoint: tuple[int, float] | None = ...) -> None: ...
    def phase_done(self, phase: Phase) -> None: ...
    def lease(self, seconds: float, grant: int | None = ...) -> None: ...
    def fence(self, fence_socket: FenceSocketPort) -> None: ...
    def hold(self, connection: Holdable) -> None: ...
    def close(self) -> None: ...


class BoardPort(Protocol):
    """What `progress.ProgressBoard` promises."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def prepare(self, rank: int, cycle: int) -> dict[str, str]: ...
    def clear(self) -> None: ...
    def steps(self) -> dict[int, int]: ...
    def readings(self) -> dict[int, Reading]: ...
    def recorded_error(self, rank: int) -> str | None: ...


class OutputPort(Protocol):
    """What `output.Output` promises."""

    def capture(self, path: Path, prefix: str, rank: int = ...) -> int: ...
    def last_at(self, rank: int) -> float | None: ...
    def last_lines(self, rank: int) -> str: ...
    def close(self, timeout_s: float) -> None: ...


class StacksPort(Protocol):
    """What `stacks.Stacks` promises."""

    def environment(self, own: Mapping[str, str]) -> dict[str, str]: ...
    def clear(self) -> None: ...
    async def dump(
        self,
        cycle: Cycle,
        *,
        why: str,
        timeout_s: float,
        ranks: Collection[int] | None = None,
        may_pause: bool = False,
    ) -> StacksOnFile: ...


class HealthPort(Protocol):
    """What `node_health.NodeHealth` promises."""

    def begin(self) -> None: ...
    def look(self, out: Path, why: str) -> None: ...
    def look_for_news(self, out: Path) -> None: ...
    async def close(self) -> None: ...


class StepFilesPort(Protocol):
    """What `step_files.StepFiles` promises."""

    @property
    def are_named(self) -> bool: ...
    async def last_step(self, logs: Path, ranks: set[int]) -> int | None: ...


class LogReaderPort(Protocol):
    """What `log_reader.LogReader` promises."""

    def begin(self, logs: Path, assignment: Assignment, found: Callable[[bool, bytes], None]) -> None: ...
    def whole(self) -> None: ...
    async def close(self) -> None: ...


class Machine(Protocol):
    """One node. `pid`: of the agent itself; `output`, `stacks`, `health`, `step_files` and `log_reader` serve it from
    its start to its end."""

    @property
    def pid(self) -> int: ...
    @property
    def output(self) -> OutputPort: ...
    @property
    def stacks(self) -> StacksPort: ...
    @property
    def health(self) -> HealthPort: ...
    @property
    def step_files(self) -> StepFilesPort: ...
    @property
    def log_reader(self) -> LogReaderPort: ...

    def workers(self, post: Callable[[WorkerEvent], None]) -> WorkersPort:
        """The node's workers; what happens to them is posted."""
        ...

    def board(
        self,
        on_first_step: Callable[[int, int], None],
        on_failing: Callable[[int, int, str, float | None], None],
        on_restart: Callable[[InProcessRestart], None],
    ) -> BoardPort:
        """Where the workers report their steps, their restarts in process, and their uncaught exceptions."""
        ...

    def open_fence_socket(self, key: bytes, addr: str) -> FenceSocketPort:
        """At this address of the node. Raises OSError where the kernel has none."""
        ...

    def hold_port(self) -> ReservedPort: ...

    async def connect(self, controller: ControllerUp, incarnation: str) -> ControllerConnection:
        """A liveness connection to that controller. Raises OSError (TimeoutError too) where there is none."""
        ...

    def new_incarnation(self) -> str:
        """A name that no other agent of the job has."""
        ...

    def random_s(self, most_s: float) -> float:
        """A moment between now and `most_s` from now, in seconds: not the same on every node."""
        ...

    def on_signal(self, number: signal.Signals, callback: Callable[[str], None]) -> None:
        """Call back with the signal's name, from the event loop, whenever this process gets it."""
        ...
