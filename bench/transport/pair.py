"""A contestant: its carrier in two processes, a producer and a reader, that do as they are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.processes import JsonChild


@dataclass(frozen=True, slots=True, eq=False)
class Contestant:
    """`carrier`: its module; `needs`: what its interpreter must be able to import; `options`: for the carrier."""

    name: str
    carrier: str
    needs: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Pair:
    """A contestant at one size. `writes` and `reads`: seconds of each of a turn's."""

    def __init__(self, contestant: Contestant, python: Path, size: int, count: int, room: Path) -> None:
        self._children: list[JsonChild] = []
        self._contestant, self._python, self._log = contestant, python, room / f"{contestant.carrier}.log"
        given = {"size": size, "count": count, "options": dict(contestant.options)}
        self._producer, given["where"] = self._start("producer", given)
        self._reader, _ = self._start("reader", given)

    def turn(self) -> tuple[list[float], list[float]]:
        """As many payloads as there is room for are written, then read: seconds of each write, and of each read."""
        written = self._producer.ask(None)
        return written["took"], self._reader.ask(written["refs"])["took"]

    def end(self) -> None:
        for child in reversed(self._children):
            child.end()

    def _start(self, role: str, given: dict[str, Any]) -> tuple[JsonChild, Any]:
        who = self._contestant
        argv = (str(self._python), "-m", "bench.transport.side", who.carrier, role)
        child = JsonChild(f"{who.name}, {role}", argv, environment=who.environment, log=self._log)
        self._children.append(child)
        return child, child.ask(given)
