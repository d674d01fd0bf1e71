"""What an agent says to the controller: facts, in order, each as often as it takes."""

from __future__ import annotations

import asyncio
from typing import Any

from nvrx_slurm.journal.records import FromAgent
from nvrx_slurm.store.client import Store
from nvrx_slurm.util.ids import succeeding


class Voice:
    """Sends from a task of its own, so that an ill store never keeps the agent's loop from its workers."""

    def __init__(self, *, node: str, generation: int, store: Store, incarnation: str) -> None:
        self._node, self._generation, self._store = node, generation, store
        self._outbox: asyncio.Queue[FromAgent | None] = asyncio.Queue()
        self._seq = self._joins = 0
        self._process = self.incarnation = incarnation

    def begin_anew(self) -> None:
        """Speak as a new agent from now on. Its name tells that it is newer: joins may overtake each other."""
        self._joins += 1
        self.incarnation, self._seq = succeeding(self._process, self._joins), 0

    def fact(self, kind: type[Any], **fields: Any) -> Any:
        """The next fact of this incarnation."""
        self._seq += 1
        own = {"node": self._node, "incarnation": self.incarnation, "seq": self._seq, "generation": self._generation}
        return kind(**own, **fields)

    def tell(self, kind: type[FromAgent], **fields: Any) -> None:
        self._outbox.put_nowait(self.fact(kind, **fields))

    def finish(self) -> None:
        """There will be no more; `run` returns once all has been said."""
        self._outbox.put_nowait(None)

    async def run(self) -> None:
        while (fact := await self._outbox.get()) is not None:
            await self._store.tell(fact)
