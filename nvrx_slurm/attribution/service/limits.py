"""How often one client may ask: a token bucket for each, pure, with the time as an argument."""

from __future__ import annotations

from collections import OrderedDict

CLIENTS_AT_MOST = 10_000


class RateLimit:
    """`per_s` requests a second for each client, and `burst` at once after a silence."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, float(burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client → tokens left, as of when

    def take(self, client: str, now: float) -> float:
        """0.0 where the client may go on; otherwise in how many seconds it may."""
        left, since = self._buckets.get(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._per_s)
        allowed = left >= 1.0
        self._buckets[client] = (left - allowed, now)
        self._buckets.move_to_end(client)
        if len(self._buckets) > CLIENTS_AT_MOST:
            self._buckets.popitem(last=False)  # who has been silent for longest has most likely a full one
        return 0.0 if allowed else (1.0 - left) / self._per_s
