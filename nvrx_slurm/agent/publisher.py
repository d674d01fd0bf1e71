"""Sends the agent's facts to the controller, in order, each until the store has taken it."""

from __future__ import annotations

import asyncio
from typing import Any

from nvrx_slurm.journal.records import FromAgent
from nvrx_slurm.store.client import Store
from nvrx_slurm.util.ids import succeeding


class FactPublisher:
    """Sends from a task of its own: a slow store never delays the agent's handling of its workers."""

    def __init__(self, *, node: str, generation: int, store: Store, incarnation: str) -> None:
        self._node, self._generation, self._store = node, generation, store
        self._outbox: asyncio.Queue[FromAgent | None] = asyncio.Queue()
        self._seq = self._joins = 0
        self._process = self.incarnation = incarnation

    def renew_incarnation(self) -> None:
        """Use a new incarnation from now on. Its name shows that it is newer: joins may overtake each other."""
        self._joins += 1
        self.incarnation, self._seq = succeeding(self._process, self._joins), 0

    def fact(self, kind: type[Any], **fields: Any) -> Any:
        """The next fact of this incarnation."""
        self._seq += 1
        own = {"node": self._node, "incarnation": self.incarnation, "seq": self._seq, "generation": self._generation}
        return kind(**own, **fields)

    def publish(self, kind: type[FromAgent], **fields: Any) -> None:
        self._outbox.put_nowait(self.fact(kind, **fields))

    def finish(self) -> None:
        """Publish no more; `run` returns once all is sent."""
        self._outbox.put_nowait(None)

    async def run(self) -> None:
        while (fact := await self._outbox.get()) is not None:
            await self._store.tell(fact)
