"""Many refs under one deadline: the reads run side by side, in rounds over those that are missing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from nvrx_slurm.transport.errors import PayloadTimeout, PeerRefused, PeerReset, StaleSlotError, TransportError
from nvrx_slurm.transport.fetching import Abort
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.retrying import Limits, pause_s
from nvrx_slurm.util.threads import ThreadPool

END_S = 1.0
_AWAY = (PeerReset, PeerRefused, PayloadTimeout)

Read = Callable[[PayloadRef, float, Abort], object]
"""One read: the ref, until when, and what ends it."""


class Fetched(dict[PayloadRef, Any]):
    """The objects that came, by their refs, in the order of the refs; `missing` says why the others did not."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: dict[PayloadRef, TransportError] = {}


class PayloadsMissing(TransportError):
    """Not all of a batch came. `fetched` has what did: nobody else can have that any more; `fetched.missing` the
    rest."""

    def __init__(self, message: str, *, fetched: Fetched) -> None:
        super().__init__(message)
        self.fetched = fetched

    def __reduce__(self) -> tuple[object, ...]:
        return partial(PayloadsMissing, self.said, fetched=self.fetched), ()


def fetch_all(
    read: Read,
    refs: Iterable[PayloadRef],
    deadline: float,
    limits: Limits,
    abort: Abort,
    *,
    crew: ThreadPool,
    concurrency: int,
) -> Fetched:
    """All that can be had until `deadline`. Raises nothing that a peer can cause."""
    wanted = list(dict.fromkeys(refs))
    got: dict[PayloadRef, object] = {}
    missing: dict[PayloadRef, TransportError] = {}
    for failed_rounds in range(limits.rounds):
        again = [ref for ref in wanted if ref not in got and not isinstance(missing.get(ref), StaleSlotError)]
        if failed_rounds and again:
            abort.pause(min(deadline, time.monotonic() + pause_s(limits, failed_rounds)))
        if not again or abort.is_set or (failed_rounds and time.monotonic() >= deadline):
            break
        round_ = _Round(read, again, deadline)
        round_.run(abort, crew, concurrency)
        got |= round_.got
        missing |= round_.missing
    fetched = Fetched()
    fetched.update((ref, got[ref]) for ref in wanted if ref in got)
    fetched.missing.update((ref, missing[ref]) for ref in wanted if ref not in got)
    return fetched


def checked(fetched: Fetched) -> Fetched:
    """Raises PayloadsMissing where one is missing."""
    if fetched.missing:
        first = next(iter(fetched.missing.values()))
        count = len(fetched.missing) + len(fetched)
        raise PayloadsMissing(f"{len(fetched.missing)} of {count} payloads are missing: {first}", fetched=fetched)
    return fetched


class _Round:
    """Asks for each ref once, in as many threads as there are places. Once a ring's server has failed, the ring's
    other refs are left for the next round: they would keep the places from those that can be read."""

    def __init__(self, read: Read, refs: list[PayloadRef], deadline: float) -> None:
        self._read, self._deadline = read, deadline
        self._guard = threading.Lock()
        self._left = deque(_interleaved(refs))
        self._away: dict[str, TransportError] = {}
        self.got: dict[PayloadRef, object] = {}
        self.missing: dict[PayloadRef, TransportError] = {
            ref: PayloadTimeout(f"{ref} was not read in time", ref=ref) for ref in refs
        }

    def run(self, abort: Abort, crew: ThreadPool, concurrency: int) -> None:
        """Until all have ended, or the deadline has passed; whoever leaves earlier by an exception ends them all."""
        ends = [Abort(within=abort) for _ in range(min(concurrency, len(self._left)))]
        running: list[Future[None]] = []
        try:
            for end in ends:
                running.append(crew.start(partial(self._work, end)))
            wait(running, self._deadline + END_S - time.monotonic())
        finally:
            for end in ends:
                end.abort()
        for future in running:
            if future.done():
                future.result()

    def _work(self, end: Abort) -> None:
        while not end.is_set:
            with self._guard:
                if not self._left:
                    return
                ref = self._left.popleft()
            if ref.ring in self._away:
                self.missing[ref] = self._away[ref.ring].of(ref)
                continue
            try:
                self.got[ref] = self._read(ref, self._deadline, end)
            except TransportError as error:
                self.missing[ref] = error
                if isinstance(error, _AWAY):
                    self._away[ref.ring] = error


def _interleaved(refs: list[PayloadRef]) -> list[PayloadRef]:
    """Those of one node apart from each other, or all places would ask one node's ports at a time."""
    by_node: dict[str, deque[PayloadRef]] = {}
    for ref in refs:
        by_node.setdefault(ref.node, deque()).append(ref)
    ordered: list[PayloadRef] = []
    while by_node:
        for node in list(by_node):
            ordered.append(by_node[node].popleft())
            if not by_node[node]:
                del by_node[node]
    return ordered
