"""Waiting for another thread or process that reports its progress by no event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 60.0
STARTS_S = 120.0
"""Three processes import torch or a framework on a busy machine."""

LOOK_S, LONGEST_PAUSE_S = 0.002, 0.1
T = TypeVar("T")


def until(condition: Callable[[], T], what: str = "it", timeout: float = WAIT_S) -> T:
    """Wait until the condition is true; returns its value."""
    deadline, pause_s = time.monotonic() + timeout, LOOK_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {timeout:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    return value


async def async_until(condition: Callable[[], object], what: str = "it", timeout: float = WAIT_S) -> None:
    """The same on an event loop."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout:g} s: {what}"
        await asyncio.sleep(LOOK_S)
