"""What is wrong with a flow file: all of it at once, each with its line, and the nearest of what is valid."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.reading import Misfit, dotted
from nvrx_slurm.jobspec.yamlfile import KeyPath

# How many valid names a message lists, nearest first.
MOST_NAMED = 5


@dataclass(slots=True)
class Problems:
    """Collects what is wrong with one file."""

    file: str
    lines: Mapping[KeyPath, int]
    found: list[ConfigError] = field(default_factory=list)

    def line(self, path: KeyPath) -> int:
        """The line of the key, or of the nearest one above it that has a line."""
        return next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), 1)

    def add(self, message: str, *path: str | int) -> None:
        """Something is wrong at this key."""
        self.found.append(ConfigError(message, file=self.file, line=self.line(path), key=dotted(path) or None))

    def add_at(self, message: str, line: int, key: str | None = None) -> None:
        """Something is wrong with what stands in this line."""
        self.found.append(ConfigError(message, file=self.file, line=line, key=key))

    @contextlib.contextmanager
    def caught(self, *path: str | int) -> Iterator[None]:
        """A `Misfit` of what is read meanwhile is a problem at this key, or below it."""
        try:
            yield
        except Misfit as misfit:
            self.add(str(misfit), *path, *misfit.path)


def nearest(name: str, valid: Iterable[str]) -> str:
    """`nearest: node_lost, node_left, …`: the valid names that are most like this one."""
    named = sorted(valid, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())
    if not named:
        return "there is none"
    rest = ", …" if len(named) > MOST_NAMED else ""
    return f"{'nearest: ' if len(named) > 1 else 'valid: '}{', '.join(named[:MOST_NAMED])}{rest}"


@contextlib.contextmanager
def below(*keys: str) -> Iterator[None]:
    """A `Misfit` that is raised meanwhile is about the value below these keys."""
    try:
        yield
    except Misfit as misfit:
        raise Misfit(str(misfit), *keys, *misfit.path) from None
