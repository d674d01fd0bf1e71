"""Who is silent for too long. Two witnesses: beats through the store, and the tether's connection.

A tether that breaks while its controller lives is a known death: the kernel of that node (or of its neighbour) closed
the connection, and the agent's supervisor, which holds it too, ends only after the last worker. Silence alone is
weaker evidence: it counts after the heartbeat timeout, and only while others are heard; a fleet that falls silent as
one is the store's or the controller's own fault, and nobody is reaped for it.
"""

from __future__ import annotations

from collections import OrderedDict


class Liveness:
    """Last signs of life of the joined nodes. Times are seconds on one monotonic clock; `grace_until` is the startup
    guard: before it nobody is declared silent."""

    def __init__(self, *, timeout_s: float, grace_until: float) -> None:
        self._timeout_s = timeout_s
        self._grace_until = grace_until
        self._heard: OrderedDict[str, float] = OrderedDict()  # oldest first

    def watch(self, node: str, now: float) -> None:
        """A node has joined: from now on its silence counts."""
        self._heard[node] = now
        self._heard.move_to_end(node)

    def heard(self, node: str, now: float) -> None:
        """A sign of life. One from a node that is not watched (dead, or not joined) changes nothing."""
        if node in self._heard and now >= self._heard[node]:
            self.watch(node, now)

    def drop(self, node: str) -> None:
        """The node is dead or gone: stop watching."""
        self._heard.pop(node, None)

    def silent(self, now: float) -> list[str]:
        """The watched nodes whose silence has lasted the timeout; empty while nobody at all is heard."""
        if now < self._grace_until or not self._heard:
            return []
        limit = now - self._timeout_s
        newest = next(reversed(self._heard.values()))
        if newest <= limit:
            return []
        late = []
        for node, at in self._heard.items():
            if at > limit:
                break
            late.append(node)
        return late

    def next_deadline(self) -> float | None:
        """When somebody may become silent, if nothing is heard until then."""
        oldest = next(iter(self._heard.values()), None)
        return None if oldest is None else max(oldest + self._timeout_s, self._grace_until)
