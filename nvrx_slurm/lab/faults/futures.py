"""Futures that somebody may have given up."""

from __future__ import annotations

import asyncio
from typing import Any


def settle(future: asyncio.Future[Any], result: Any) -> None:
    """Give it its result, or the exception that stands for one, unless nobody waits any more."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
