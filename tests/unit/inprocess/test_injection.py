from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nvrx_slurm.inprocess.wrap import inject


class Call:
    """The object that is injected by annotation."""


CALL = Call()


def first(call: Call, config: str, *rest: str, steps: int = 3) -> list[Any]:
    return [call, config, *rest, steps]


def first_of_optional(call: Call | None = None, config: str = "default") -> list[Any]:
    return [call, config]


def between(config: str, call: Call, steps: int) -> list[Any]:
    return [call, config, steps]


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (first, ("a",), {}, [CALL, "a", 3]),
        (first, ("a", "b", "c"), {"steps": 4}, [CALL, "a", "b", "c", 4]),
        (first_of_optional, ("a",), {}, [CALL, "a"]),
        (first_of_optional, (), {}, [CALL, "default"]),
        (between, ("a", 3), {}, [CALL, "a", 3]),
        (between, ("a",), {"steps": 3}, [CALL, "a", 3]),
    ],
)
def test_what_is_given_by_annotation_takes_no_argument(
    function: Callable[..., list[Any]], args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[Any]
):
    """Wherever the annotated parameter is, the caller's arguments go to the others."""
    args, kwargs = inject(function, args, kwargs, CALL)
    assert function(*args, **kwargs) == expected


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [(first_of_optional, (None,), [CALL, "default"]), (between, ("a", None, 3), [CALL, "a", 3])],
)
def test_none_may_be_passed_in_its_place(
    function: Callable[..., list[Any]], args: tuple[Any, ...], expected: list[Any]
):
    """If a caller passes None for the parameter, it is injected."""
    args, kwargs = inject(function, args, {}, CALL)
    assert function(*args, **kwargs) == expected


def test_arguments_that_do_not_fit_are_refused():
    """The error is that of a call with the caller's own parameters."""
    with pytest.raises(TypeError, match="missing a required argument: 'steps'"):
        inject(between, ("a",), {}, CALL)
