"""The orders that a test gives to the ranks of a scenario before they start."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

QUICK: dict[str, Any] = {
    "monitor_thread_interval": 0.02,
    "monitor_process_interval": 0.02,
    "heartbeat_interval": 0.05,
    "progress_watchdog_interval": 0.02,
    "soft_timeout": 30.0,
    "hard_timeout": 40.0,
    "heartbeat_timeout": 20.0,
    "barrier_timeout": 50.0,
    "completion_timeout": 50.0,
    "last_call_wait": 0.1,
    "termination_grace_time": 2.0,
}
"""Options of the wrapper, in seconds: short intervals to detect a fault fast, long timeouts for a busy machine."""


class Fault(msgspec.Struct, frozen=True):
    """One rank's action at one point of one iteration. `rank`: its initial rank; `at`: `fn`, or a callback's name."""

    rank: int
    at: str
    does: str
    iteration: int = 0


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The orders, the same for all ranks of a group. `store`: a store's name and its arguments; `arrangement`: the
    name of a rank assignment; `lingering`: ranks that stay alive after a call that raised; `stubborn`: ranks that
    make the next call even then; `calls`: the number of calls, one after the other; `soak`: in this many iterations
    one rank raises, each in turn, and after that all return. Without `soak` the ranks wait for commands."""

    folder: str
    store: tuple[str, dict[str, Any]]
    faults: tuple[Fault, ...] = ()
    options: dict[str, Any] = {}
    arrangement: str = "default"
    lingering: tuple[int, ...] = ()
    stubborn: tuple[int, ...] = ()
    calls: int = 1
    soak: int | None = None

    def wrapper_options(self) -> dict[str, Any]:
        """Keyword arguments of `Wrapper`, including those of the store."""
        options = {**QUICK, **self.options}
        return _with_times(options) | {"store_kwargs": _with_times(self.store[1])}


def _with_times(options: dict[str, Any]) -> dict[str, Any]:
    times = ("_interval", "_timeout", "_wait", "_time", "patience")
    return {name: timedelta(seconds=value) if name.endswith(times) else value for name, value in options.items()}
