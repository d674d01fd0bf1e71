"""Arguments that are given by annotation: `def train(call: CallWrapper, …)`, `Optional` and quoted ones too."""

from __future__ import annotations

import inspect
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any


def inject(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], value: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments, with `value` for each parameter that is annotated with its type. The caller may leave
    such a parameter out, wherever it stands, or hold its place with None.

    Raises TypeError, as the call itself would, if the arguments do not fit.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin that does not tell its parameters
        return args, dict(kwargs)
    wanted = [name for name, each in _annotations(function, signature).items() if _asks_for(each, type(value))]
    given = _given(signature, wanted, args, kwargs) | dict.fromkeys(wanted, value)
    bound = inspect.BoundArguments(signature, OrderedDict(given))
    return bound.args, bound.kwargs


def _given(
    signature: inspect.Signature, wanted: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What the caller gives, by parameter."""
    kept = signature.replace(parameters=[each for name, each in signature.parameters.items() if name not in wanted])
    whole, without = (_bound(each, args, kwargs) for each in (signature, kept))
    if whole is not None and (without is None or all(whole.get(name) is None for name in wanted)):
        return whole
    return dict(kept.bind(*args, **kwargs).arguments)


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return None


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
