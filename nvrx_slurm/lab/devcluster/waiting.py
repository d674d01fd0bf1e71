"""Waiting for a condition, with a bound."""

from __future__ import annotations

from collections.abc import Callable

from nvrx_slurm.errors import WaitTimeout
from nvrx_slurm.util.clock import Clock

_SHORTEST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str, clock: Clock) -> None:
    """Return as soon as `condition()` holds; it is asked often at first, then every 100 ms.

    Raises WaitTimeout, naming `what`, once `timeout_s` have passed and it still does not hold.
    """
    deadline, pause = clock.monotonic() + timeout_s, _SHORTEST_PAUSE_S
    while not condition():
        if clock.monotonic() >= deadline:
            raise WaitTimeout(f"waited {timeout_s:g} s for {what}, in vain")
        clock.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)
