"""How a node joins, with a port held for the rendezvous and a fence socket; the orders that it reads afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvrx_slurm.agent.events import JoinLost
from nvrx_slurm.agent.machine import Machine, WorkersPort
from nvrx_slurm.agent.reporting import FactPublisher
from nvrx_slurm.journal.records import AnyOrder, Assignment, ControllerUp, NodeJoined
from nvrx_slurm.liveness import fence
from nvrx_slurm.store.client import StoreClient, place_of
from nvrx_slurm.util.log import get_logger

log = get_logger("agent")


class Joining:
    """Joins as the publisher's incarnation, as often as that changes."""

    def __init__(
        self,
        machine: Machine,
        *,
        addr: str,
        token: str,
        store: StoreClient,
        publisher: FactPublisher,
        workers: WorkersPort,
        post: Callable[[AnyOrder | JoinLost], None],
    ) -> None:
        self._machine, self._addr, self._token = machine, addr, token
        self._store, self._publisher, self._workers, self._post = store, publisher, workers, post
        self._fence_port = 0
        self._one_at_a_time = asyncio.Lock()
        self._joined_under: ControllerUp | None = None
        self.port = machine.hold_port()

    def hold_port(self) -> int:
        """Hold a fresh port; returns its number."""
        self.port.release()
        self.port = self._machine.hold_port()
        return self.port.number

    def open_fence(self) -> None:
        """Give the controller a way to kill this node's workers without any process of this node."""
        try:
            key = fence.key_of(self._token, self._publisher.incarnation)
            fence_socket = self._machine.open_fence_socket(key, self._addr)
        except OSError as error:
            log.warning("no fence: %s; if this node freezes, others wait for its lease to lapse", error)
            self._fence_port = 0
        else:
            self._fence_port = fence_socket.getsockname()[1]
            self._workers.fence(fence_socket)

    async def join(self) -> str:
        """Join, and post what is known already: where the controller listens, and a shutdown order that came before.
        Returns the id of the last order before the join. Raises StoreUnreachable."""
        fact = self._publisher.fact(
            NodeJoined,
            addr=self._addr,
            port=self.port.number,
            pid=self._machine.pid,
            fence_port=self._fence_port,
        )
        # The supervisor may die, and the agent join again, while the first join still waits for the store. Orders are
        # read from the first join on: if the store carried out the second one before it, the agent would miss those
        # in between.
        joined = self._publisher.joined
        try:
            async with self._one_at_a_time:
                last, shutdown, controller = await self._store.join(fact)
                self._joined_under = controller
        finally:
            joined.set()
        log.info("joined as %s", fact.incarnation)
        for order in (controller, shutdown):
            if order is not None:
                self._post(order)
        return last

    async def look_for_join(self, controller: ControllerUp) -> None:
        """Post it if a store that lost its data before this controller took over has lost the join. One that is under
        way reaches the store that this controller reads. Raises StoreUnreachable."""
        incarnation = self._publisher.incarnation
        if controller == self._joined_under or not self._publisher.joined.is_set():
            return
        if not await self._store.has_join_of(incarnation):
            self._post(JoinLost(incarnation))


class Orders:
    """Posts every order after the one that `read` begins with."""

    def __init__(self, store: StoreClient, node: str, post: Callable[[AnyOrder], None]) -> None:
        self._store, self._node, self._post = store, node, post
        self._last = (0, 0)
        self._read_event = asyncio.Event()

    async def read(self, after: str) -> None:
        """Read for ever. Raises StoreUnreachable."""
        while True:
            for identity, order in await self._store.orders(after):
                after = identity
                if order is not None:
                    self._post(order)
            self._last = place_of(after)
            self._read_event.set()  # wakes every task that waits by now
            self._read_event.clear()

    async def assignment(self, replica: str, cycle: int, incarnation: str) -> Assignment | None:
        """What a closed rendezvous has for this agent of the node; None: nothing. When it returns, every order that
        is older than the answer has been posted."""
        assignment, newest = await self._store.assignment(replica, cycle, self._node, incarnation)
        # A node that was frozen may ask about a rendezvous that is long over: its ranks run elsewhere, and the order
        # that says so is still unread.
        while self._last < place_of(newest):
            await self._read_event.wait()
        return assignment
