"""What an event loop runs, and whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, Protocol, TypeVar

import msgspec

MOST_AWAITS_WHILE_CLOSING = 16

_T = TypeVar("_T")


class Owner(Protocol):
    """The process that a step belongs to. While it is not `running` its steps are `held` instead."""

    name: str
    running: bool

    def hold(self, handle: Handle) -> None: ...
    def on_signal(self, number: int, handle: Handle | None) -> None: ...


OWNER: ContextVar[Owner | None] = ContextVar("owner")
"""Whose step this is. Tasks and callbacks inherit it with their context; without it a step is the world's own."""


class Handle(msgspec.Struct, eq=False):
    """A step to be: what asyncio.Handle and TimerHandle are to their callers, and four times as cheap to make."""

    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    context: Context
    due_s: float = 0.0

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.due_s


class Task(asyncio.Task[_T]):
    """asyncio's own, but a set of them is walked in the same order in each run: their hash is no address."""

    __slots__ = ("number", "owner")

    def __init__(self, number: int, owner: Owner | None, *args: Any, **options: Any) -> None:
        self.number, self.owner = number, owner  # first: the constructor below hashes it
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self.number

    @property
    def is_unheard(self) -> bool:
        """Whether it failed, and nobody has asked how."""
        return self.done() and self._log_traceback


def close(task: Task[Any]) -> None:
    """Leave an unfinished task through all its `finally`s, unheard; one that awaits in them is pushed on."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine: Any = task.get_coro()
    for _ in range(MOST_AWAITS_WHILE_CLOSING):
        try:
            coroutine.close()
        except BaseException as error:  # its last words: nobody is there any more
            if isinstance(error, RuntimeError) and "ignored GeneratorExit" in str(error):
                continue
        return
