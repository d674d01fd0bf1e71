"""Which nodes are late, suspected, dead. Two signals: heartbeats through the store, and the liveness connection.

| heartbeats | connection | what it means | what follows |
|---|---|---|---|
| arrive | up | it lives | nothing |
| arrive | closed | something between the hosts closed it | the agent connects again; no node is reaped |
| silent | reports "alive" | the store does not serve this node, or any | no node is reaped |
| silent | up, but silent | it is frozen: its kernel answers, its agent does not | reaped after the timeout |
| silent | closed | it is dead, or partitioned | reaped after `suspect_s`; at once if its kernel proves it |
| of all silent | any | the store's fault or the controller's own | no node is reaped for `fleet_grace_s` |

`heard` takes either signal: a heartbeat, or an "alive" on the connection. Times are seconds on one monotonic clock.
"""

from __future__ import annotations

import math


class Liveness:
    """Last signs of life of the registered nodes.

    `timeout_s`: how long a node that has been heard may be silent; `startup_s`: from its registration to its first
    sign. `grace_until`: a new controller declares no node dead before it has listened for a full timeout. `stall_s`:
    when no node at all was heard for longer than this, that time counts for no node, and none is judged meanwhile.
    `suspect_s`: how long a node whose connection closed may be silent.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        startup_s: float,
        suspect_s: float,
        stall_s: float,
        fleet_grace_s: float,
        grace_until: float,
    ) -> None:
        self._timeout_s, self._startup_s = timeout_s, max(startup_s, timeout_s)
        self._suspect_s, self._fleet_grace_s = min(suspect_s, timeout_s), fleet_grace_s
        # Half: a stall must be noticed before its own length makes a node late.
        self._stall_s, self._grace_until = min(stall_s, timeout_s / 2), grace_until
        self._heard: dict[str, float] = {}
        self._registered: dict[str, float] = {}  # not heard since it registered
        self._suspected: dict[str, float] = {}
        self._newest = 0.0
        self._look_at = 0.0  # no deadline is earlier

    def watch(self, node: str, now: float) -> None:
        """A node has registered: from now on its silence counts."""
        self.drop(node)
        if self._heard or self._registered:
            self._advance(now)  # a controller that was frozen takes in old registrations first, and then heartbeats
        self._registered[node] = now
        self._newest = max(self._newest, now)
        self._look_at = min(self._look_at, now + self._startup_s)

    def heard(self, node: str, at: float) -> None:
        """A sign of life. One from a node that is not registered (dead, or never joined) changes nothing."""
        last = self._heard.get(node)
        if last is None:
            if node not in self._registered or at < self._registered[node]:
                return  # of an earlier agent of that node
            del self._registered[node]
            self._look_at = min(self._look_at, at + self._timeout_s)
        elif at <= last:
            return
        self._heard[node] = at
        self._advance(at)
        if self._suspected and at > self._suspected.get(node, at):
            del self._suspected[node]

    def _advance(self, at: float) -> None:
        if at - self._newest > self._stall_s:
            # No node could be heard meanwhile. The first that is heard again must not make the others late.
            self._grace_until = max(self._grace_until, at + min(at - self._newest, self._timeout_s))
        self._newest = max(self._newest, at)

    def suspect(self, node: str, closed_at: float) -> None:
        """Its connection closed, and nothing proves why: unless it is heard again soon it is dead."""
        # It may have been heard since: whether its death can be proven was asked first, and that takes a while.
        if node in self._registered or self._heard.get(node, math.inf) <= closed_at:
            self._suspected[node] = closed_at
            self._look_at = min(self._look_at, closed_at + self._suspect_s)

    def stood_still(self, for_s: float, now: float) -> None:
        """The whole job stood still until now: that time is no silence."""
        for known in (self._heard, self._registered, self._suspected):
            for node, at in known.items():
                known[node] = min(now, at + for_s)
        self._newest = min(now, self._newest + for_s)
        # Nodes resume seconds apart: none is judged before a full timeout.
        self._grace_until, self._look_at = max(self._grace_until, now + self._timeout_s), 0.0

    def drop(self, node: str) -> None:
        """The node is dead or gone: stop watching."""
        for known in (self._heard, self._registered, self._suspected):
            known.pop(node, None)

    def dead(self, now: float) -> dict[str, float]:
        """The nodes whose silence has lasted too long, with its length in seconds; each is named once, and not
        watched any more. None, while no node at all is heard."""
        # This costs nothing until the earliest deadline, which heartbeats keep pushing ahead.
        if now < max(self._look_at, self._grace_until):
            return {}
        deadlines = {node: self._deadline(node) for node in (*self._heard, *self._registered)}
        self._look_at = min((at for at in deadlines.values() if at > now), default=now + self._timeout_s)
        late = [node for node, at in deadlines.items() if at <= now]
        # All are silent: for a while the store, or this controller, is to blame. `timeout_s` would be too short for
        # that: when all fall silent at once, the first is late an interval before the last.
        if late and self._stall_s < now - self._newest < self._fleet_grace_s:
            self._look_at = now
            return {}
        silences = {node: now - self._heard.get(node, self._registered.get(node, 0.0)) for node in late}
        for node in late:
            self.drop(node)
        return silences

    def _deadline(self, node: str) -> float:
        if node in self._suspected:
            return self._suspected[node] + self._suspect_s
        heard = self._heard.get(node)
        return self._registered[node] + self._startup_s if heard is None else heard + self._timeout_s
