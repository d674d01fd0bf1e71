"""A source of configuration: what it says, and where each key of it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from nvrx_slurm.jobspec.yamlfile import KeyPath


class Origin(Struct, frozen=True):
    """Where a value came from: a file and line, a variable, a flag, or the default."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Layer(Struct, frozen=True):
    """One source's values, and where each key of it stands."""

    name: str
    data: dict[str, Any]
    lines: Mapping[KeyPath, int]
    key_names: Mapping[KeyPath, str]

    def origin(self, path: KeyPath) -> Origin:
        """Where the key stands; or else the block that holds it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.key_names:
                return Origin(self.key_names[path[:end]])
            if path[:end] in self.lines:
                return Origin(self.name, self.lines[path[:end]])
        below = path[:-1]  # of a key that is missing: what stands beside it
        named = (name for key, name in self.key_names.items() if below and key[: len(below)] == below)
        return Origin(next(named, self.name))

    def has(self, path: KeyPath) -> bool:
        """Whether it says anything of this key."""
        data: Any = self.data
        for part in path:
            try:
                data = data[part]
            except (KeyError, IndexError, TypeError):
                return False
        return True
