"""Arguments that are given by annotation: `def train(call: CallWrapper, …)`, `Optional` and quoted ones too."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any


def inject(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], value: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments, with `value` for each parameter that is annotated with its type.

    Raises TypeError, as the call itself would, if the arguments do not fit.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin that does not tell its parameters
        return args, dict(kwargs)
    wanted = [name for name, each in _annotations(function, signature).items() if _asks_for(each, type(value))]
    bound = signature.bind_partial(*args, **kwargs)
    bound.arguments.update(dict.fromkeys(wanted, value))
    bound = signature.bind(*bound.args, **bound.kwargs)
    return bound.args, bound.kwargs


def _annotations(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """Each parameter's annotation, read where the function was defined; as it is written where that is no use."""
    written = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    try:
        read = typing.get_type_hints(inspect.unwrap(function))
    except Exception:  # an annotation may name what exists for a type checker only
        read = {}
    return {name: read.get(name, annotation) for name, annotation in written.items()}


def _asks_for(annotation: Any, kind: type) -> bool:
    if isinstance(annotation, str):
        parts = annotation.replace("Optional[", "").replace("]", "").split("|")
        return any(part.strip().rsplit(".", 1)[-1] == kind.__name__ for part in parts)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_asks_for(each, kind) for each in typing.get_args(annotation))
    return annotation is kind
