"""Several callbacks of one kind as one."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from nvrx_slurm.inprocess.exception import OptionError
from nvrx_slurm.inprocess.rank_assignment import RankAssignment, RankAssignmentCtx, published_by
from nvrx_slurm.inprocess.state import Callback, FrozenState

T = TypeVar("T")


class Compose:
    """Calls its parts from right to left, each with what the one before it has returned.

    `Compose(a, b, c)(state)` is `a(b(c(state)))`; a part that returns None passes on what it was given. The object is
    an instance of `Compose`, and of the nearest class that all parts have in common, so it can be used wherever one
    of them can. An exception of a part ends the chain.

    Raises OptionError without parts, and for parts of different kinds: an Abort and a Finalize, say.
    """

    parts: tuple[Any, ...]

    def __new__(cls, *parts: T) -> T:  # type: ignore[misc]  # of its class and of another one
        if not parts:
            raise OptionError("Compose needs at least one part")
        shared = set.intersection(*(set(type(part).__mro__) for part in parts))
        kind = next(each for each in type(parts[0]).__mro__ if each in shared)
        if kind in (object, abc.ABC, Callback):
            kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
            raise OptionError(
                f"Compose takes parts of one kind: several Abort, or several HealthCheck, …; these are {kinds}"
            )
        chain = _ComposedAssignment if issubclass(kind, RankAssignment) else Compose
        own = {"parts": parts, "__new__": object.__new__, "__init__": object.__init__, "__doc__": Compose.__doc__}
        return type("Compose", (chain, kind), own)()  # type: ignore[no-any-return]

    def __call__(self, value: Any) -> Any:
        for part in reversed(self.parts):
            value = _passed_on(part(value), value)
        return value

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.parts))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Compose, self.parts


class _ComposedAssignment(Compose):
    """Rank assignments: each part publishes for itself, and sees only what the same part of other ranks published."""

    def publish(self, state: FrozenState) -> tuple[str, ...]:
        return tuple(text for part in self.parts for text in _framed(published_by(part, state)))

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        published = ctx.published
        for place, part in reversed(list(enumerate(self.parts))):

            def its_own(place: int = place) -> dict[int, tuple[str, ...]]:
                return {rank: list(_unframed(texts))[place] for rank, texts in published().items()}

            mine = dataclasses.replace(ctx, published=its_own)
            ctx = dataclasses.replace(_passed_on(part(mine), mine), published=published)
        return ctx


def _passed_on(returned: T | None, given: T) -> T:
    return given if returned is None else returned


def _framed(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The texts behind their number, so that those of several parts can follow one another."""
    return (str(len(texts)), *texts)


def _unframed(texts: Iterable[str]) -> Iterator[tuple[str, ...]]:
    rest = iter(texts)
    for length in rest:
        yield tuple(next(rest) for _ in range(int(length)))
