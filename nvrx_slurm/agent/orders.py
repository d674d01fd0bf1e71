"""What the controller has ordered, read in its order; and what this node does in a round, as of then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvrx_slurm.journal.records import AnyOrder, Assignment
from nvrx_slurm.store.client import Store


class Orders:
    """Posts every order after the one that `read` begins with."""

    def __init__(self, store: Store, node: str, post: Callable[[AnyOrder], None]) -> None:
        self._store, self._node, self._post = store, node, post
        self._last = (0, 0)
        self._have_come = asyncio.Event()

    async def read(self, after: str) -> None:
        """For ever, or until the store cannot be reached."""
        while True:
            for identity, order in await self._store.orders(after):
                after = identity
                if order is not None:
                    self._post(order)
            self._last = _place(after)
            self._have_come.set()  # wakes all who wait by now
            self._have_come.clear()

    async def assignment(self, replica: str, cycle: int, incarnation: str) -> Assignment | None:
        """What a round has for this agent of the node; None: nothing. By its return every order that was older than
        the answer is posted.

        A node that was frozen may ask about a round that is long over: its ranks run elsewhere, and the order that
        says so is still unread.
        """
        assignment, newest = await self._store.assignment(replica, cycle, self._node, incarnation)
        while self._last < _place(newest):
            await self._have_come.wait()
        return assignment


def _place(identity: str) -> tuple[int, int]:
    milliseconds, _, number = identity.partition("-")
    return int(milliseconds), int(number)
