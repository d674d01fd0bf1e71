"""`@section(…)`: each call of the function is a section. Apart, as it is not needed by those who use `with`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def decorated(function: Function, begin: Callable[[], AbstractContextManager[None]]) -> Function:
    """`function` inside of what `begin` gives, at each call. Raises TypeError for a generator function."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__name__} is a generator function; write `with section(...)` inside of it")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with begin():
                return await function(*args, **kwargs)

        return cast(Function, awaited)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with begin():
            return function(*args, **kwargs)

    return cast(Function, called)
