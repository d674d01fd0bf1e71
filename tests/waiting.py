"""Waiting for what another thread or process does, and reports by no event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 60.0
LOOK_S = 0.002
T = TypeVar("T")


def until(condition: Callable[[], T], what: str = "it", timeout: float = WAIT_S) -> T:
    """Wait until it holds; returns what it gave."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {timeout:g} s: {what}"
        time.sleep(LOOK_S)
    return value


async def async_until(condition: Callable[[], object], what: str = "it", timeout: float = WAIT_S) -> None:
    """The same on an event loop."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout:g} s: {what}"
        await asyncio.sleep(LOOK_S)
