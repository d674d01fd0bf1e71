"""One rank of a scenario: `python -m tests.inprocess.rank FOLDER`. It follows `FOLDER/script.json` and the commands
on standard input (`ITERATION ACTION`, one per line), and reports its events on standard output, one JSON line
each."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess.environment import launch
from nvrx_slurm.inprocess.rank_assignment import RankAssignment, RankAssignmentCtx
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.util.log import set_up
from nvrx_slurm.util.processes import is_alive
from tests.inprocess.actions import ACTIONS, AFTER_LONG_S, POLL_S, WHEN_RESTARTED, ScenarioError, monitor_pid
from tests.inprocess.arrangements import ARRANGEMENTS
from tests.inprocess.belongings import Belongings
from tests.inprocess.script import Script


class Rank:
    """The behaviour of this process in its scenario."""

    def __init__(self, script: Script, rank: int) -> None:
        self.script, self.rank = script, rank
        self.call = 0
        self.assignments = 0
        self.interrupted = -1
        self._restarts: list[inprocess.Restart] = []
        self._commands = bytearray(4096)

    def report(self, event: str, **facts: Any) -> None:
        """Write the line in one write, since the interrupter's thread reports too."""
        line = msgspec.json.encode({"event": event, "call": self.call, **facts})
        os.write(sys.stdout.fileno(), line + b"\n")

    def point(self, name: str, iteration: int, **facts: Any) -> None:
        """Report that this point is reached, and do what the script has for it. The health check after an
        interruption is called `recheck`."""
        if name in ("abort", "finalize"):
            self.interrupted = iteration
        elif name == "health_check" and iteration == self.interrupted:
            name = "recheck"
        self.report(name, iteration=iteration, **facts)
        for fault in self.script.faults:
            if (fault.rank, fault.at, fault.iteration) == (self.rank, name, iteration) and name != "fn":
                ACTIONS[fault.does]()

    def commands(self, iteration: int) -> Iterator[str]:
        """The test's commands for this iteration. Commands for a later iteration are kept, even if the restart
        interrupts the reading: lines are read into a buffer, and removed from it in one step."""
        while True:
            if select.select([sys.stdin], [], [], POLL_S)[0]:
                os.readv(sys.stdin.fileno(), [memoryview(self._commands)[len(self._commands.rstrip(b"\0")) :]])
            *lines, rest = bytes(self._commands).rstrip(b"\0").split(b"\n")
            ours = [line for line in lines if int(line.partition(b" ")[0]) == iteration]
            others = b"\n".join([*(line for line in lines if line not in ours), rest])
            self._commands[:] = others.ljust(len(self._commands), b"\0")
            yield from (line.partition(b" ")[2].decode() for line in ours)

    # ---- the call

    def wrapped(self) -> Any:
        kinds = {name: kind for name, kind in _CALLBACKS.items() if name not in self.script.options}
        callbacks = {name: _probe(self, name, getattr(inprocess, kind)) for name, kind in kinds.items()}
        wrapper = inprocess.Wrapper(
            store_factory=getattr(inprocess, self.script.store[0]),
            rank_assignment=inprocess.Compose(ARRANGEMENTS[self.script.arrangement](), _Probe(self)),
            **callbacks,
            **self.script.wrapper_options(),
        )
        return wrapper(self.work)

    def work(self, call: inprocess.CallWrapper | None = None) -> str:
        """The wrapped function."""
        assert call is not None
        self._restarts = call.restarts
        self.point("fn", call.iteration, **self._surroundings(call))
        if self.script.soak is not None:
            return self._soak(call.iteration, self.script.soak)
        for command in self.commands(call.iteration):
            doing = functools.partial(self.report, "doing", iteration=call.iteration, command=command)
            if command in WHEN_RESTARTED:
                WHEN_RESTARTED[command](doing)
                continue
            doing()
            if command == "return":
                break
            if command in _WITH_CALL:
                _WITH_CALL[command](self, call)
            else:
                ACTIONS[command]()
            self.report("done", iteration=call.iteration, command=command)
        return f"value of {self.rank}"

    def _soak(self, iteration: int, restarts: int) -> str:
        if iteration < restarts:
            if iteration % int(os.environ["WORLD_SIZE"]) == self.rank:
                raise ScenarioError(f"in iteration {iteration}")
            next(self.commands(iteration))
        return f"value of {self.rank}"

    def _surroundings(self, call: inprocess.CallWrapper) -> dict[str, Any]:
        return {
            "rank": int(os.environ["RANK"]),
            "world_size": int(os.environ["WORLD_SIZE"]),
            "alive": [rank for rank, pid in self._pids() if is_alive(pid)],
            "threads": sorted({thread.name for thread in threading.enumerate()} - {"nvrx-interrupter"}),
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "rss_pages": int(Path("/proc/self/statm").read_text().split()[1]),
        }

    def _pids(self) -> list[tuple[int, int]]:
        files = Path(self.script.folder).glob("pid-*")
        return sorted((int(file.name.removeprefix("pid-")), int(file.read_text())) for file in files)

    # ---- around the call

    def run(self) -> None:
        """Make all calls of the script. An exception of a call ends the process, as in any program."""
        self.point("begin", 0, group=launch().group)
        wrapped = self.wrapped()
        for call in range(self.script.calls):
            self.call, self.assignments, self.interrupted = call, 0, -1
            self._call(wrapped)

    def _call(self, wrapped: Any) -> None:
        before = Belongings.of_this_process()
        try:
            value = wrapped()
        except BaseException as error:
            self.report("raised", kind=type(error).__name__, text=str(error), causes=_causes(error))
            self._tell_left(before)
            if self.rank in self.script.lingering:
                sys.stdin.read()
            if self.rank in self.script.stubborn and self.call + 1 < self.script.calls:
                return
            raise
        self.report("returned", value=value, restarts=[_record_of(restart) for restart in self._restarts])
        self._tell_left(before)

    def _tell_left(self, before: Belongings) -> None:
        self.report("left", more=Belongings.of_this_process().beyond(before))


def _record_of(restart: inprocess.Restart) -> dict[str, Any]:
    kinds = [[record.rank, record.interruption.value, record.text] for record in restart.records]
    return {"iteration": restart.iteration, "missing": restart.missing, "records": kinds}


def _causes(error: BaseException) -> list[str]:
    causes = []
    while error.__cause__ is not None:
        error = error.__cause__
        causes.append(type(error).__name__)
    return causes


# ---- callbacks that report

_CALLBACKS = {
    "initialize": "Initialize",
    "abort": "Abort",
    "finalize": "Finalize",
    "health_check": "HealthCheck",
    "completion": "Completion",
    "terminate": "Terminate",
}


def _probe(rank: Rank, name: str, kind: type) -> Any:
    """A callback of this kind that reaches the scenario's point of the same name."""

    def reached(self: Any, state: FrozenState) -> FrozenState:
        error = type(state.fn_exception).__name__ if state.fn_exception else None
        rank.point(name, state.iteration, rank=state.rank, mode=state.mode.value, fn_exception=error)
        with contextlib.suppress(AttributeError):
            state.rank = 99  # type: ignore[misc]  # it is frozen
            rank.report("thawed", at=name)
        return state

    return type(f"Probing{kind.__name__}", (kind,), {"__call__": reached})()


class _Probe(RankAssignment):
    """Reaches two points of its own: `ready` for an iteration, and `rank_assignment` before ranks are assigned."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def publish(self, state: FrozenState) -> tuple[str, ...]:
        self._rank.point("ready", self._rank.assignments)
        return ()

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        self._rank.assignments += 1
        self._rank.point("rank_assignment", self._rank.assignments - 1, terminated=sorted(ctx.terminated_ranks))
        return ctx


# ---- commands that need the call


def _atomic(rank: Rank, call: inprocess.CallWrapper) -> None:
    """Stay in an atomic block until ordered to leave it."""
    with call.atomic():
        rank.report("atomic", iteration=call.iteration)
        next(command for command in rank.commands(call.iteration) if command == "leave")
        rank.report("atomic done", iteration=call.iteration)


def _nest(rank: Rank, call: inprocess.CallWrapper) -> None:
    try:
        rank.wrapped()()
    except inprocess.exception.NestedCallError as error:
        rank.report("refused", text=str(error))


def _in_thread(rank: Rank, call: inprocess.CallWrapper) -> None:
    thread = threading.Thread(target=_nest, args=(rank, call))
    thread.start()
    thread.join()


def _silent(rank: Rank, call: inprocess.CallWrapper) -> None:
    """Make no progress for longer than the hard timeout, with the hang protection off."""
    with call.disable_hang_protection():
        threading.Event().wait(AFTER_LONG_S)


def _ping_for_long(rank: Rank, call: inprocess.CallWrapper) -> None:
    """Ping for longer than the soft timeout."""
    ended = threading.Event()
    for _ in range(int(AFTER_LONG_S / POLL_S)):
        call.ping()
        ended.wait(POLL_S)


def _bother_monitor(rank: Rank, call: inprocess.CallWrapper) -> None:
    """Send the monitor the signals that Slurm sends to all processes of a step."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(monitor_pid(), number)


def _own_exception(rank: Rank, call: inprocess.CallWrapper) -> None:
    with contextlib.suppress(ScenarioError):
        ACTIONS["raise"]()


_WITH_CALL = {
    "atomic": _atomic,
    "nest": _nest,
    "nest in thread": _in_thread,
    "unprotected": _silent,
    "ping": lambda rank, call: call.ping(),
    "ping for long": _ping_for_long,
    "handle own": _own_exception,
    "bother monitor": _bother_monitor,
}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = int(os.environ["RANK"])
    set_up(f"rank {number}", level=logging.DEBUG)
    script = msgspec.json.decode(Path(sys.argv[1], "script.json").read_bytes(), type=Script)
    Path(script.folder, f"pid-{number}").write_text(str(os.getpid()))
    Rank(script, number).run()


if __name__ == "__main__":
    main()
