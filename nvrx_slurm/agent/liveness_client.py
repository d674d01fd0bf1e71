"""The agent's end of the liveness connection: keep one to the newest controller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from nvrx_slurm.agent.machine import ControllerConnection, Held
from nvrx_slurm.journal.records import ControllerUp
from nvrx_slurm.liveness import connection as liveness
from nvrx_slurm.util.admission import RateLimitedLog
from nvrx_slurm.util.log import get_logger

log = get_logger("agent")

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 5.0
SPREAD_S_PER_NODE = 0.001
"""A thousand agents that connect at one moment take the controller longer than their round: each picks a moment of
its own within this time for each node of the job. Until then its beats tell that it lives."""


class LivenessClient:
    """Connects when a controller announces itself, and again when the connection breaks while that one is newest.

    `connect` and `random_s` as `Machine` has them.
    """

    def __init__(
        self,
        connect: Callable[[ControllerUp, str], Awaitable[ControllerConnection]],
        random_s: Callable[[float], float],
        *,
        nodes: int = 0,
    ) -> None:
        self._connect, self._random_s = connect, random_s
        self._spread_s = nodes * SPREAD_S_PER_NODE
        self._task: asyncio.Task[None] | None = None
        self._connection: ControllerConnection | None = None
        self._epoch = 0
        self._unproven = RateLimitedLog(log.warning)

    def controller_is(
        self,
        order: ControllerUp,
        incarnation: str,
        hold: Callable[[Held], None],
        fenced: Callable[[str], None],
    ) -> None:
        """A controller listens there. Older ones than the newest known are ignored.

        `hold` gets each new connection; `fenced` the incarnation, when the controller has given this node up.
        """
        if order.epoch < self._epoch:
            return
        self._epoch = order.epoch
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._keep(order, incarnation, hold, fenced))

    def silence_s(self) -> float | None:
        """Seconds since the controller's host last answered; None: there is no connection."""
        if self._connection is None:
            return None
        try:
            return self._connection.silence_s()
        except OSError:
            return None

    def say_alive(self) -> None:
        """Report that this node lives although its heartbeats do not reach the store."""
        self._say(liveness.ALIVE)

    async def close(self, *, goodbye: bool) -> None:
        """Let go; with `goodbye` the controller does not take it for a death."""
        if self._task is not None:
            self._task.cancel()
        if goodbye:
            self._say(liveness.GOODBYE)
        self._let_go()

    def _say(self, word: bytes) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.say(word)

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _keep(
        self,
        order: ControllerUp,
        incarnation: str,
        hold: Callable[[Held], None],
        fenced: Callable[[str], None],
    ) -> None:
        pause = FIRST_RETRY_S
        await asyncio.sleep(self._random_s(self._spread_s))
        while True:
            self._let_go()
            try:
                self._connection = await self._connect(order, incarnation)
            except liveness.UnprovenPeer as error:
                self._say_unproven(order, error)
            except OSError as error:
                log.debug("no connection to the controller at %s:%d: %s", order.host, order.port, error)
            else:
                log.info("connected to the controller of epoch %d at %s:%d", order.epoch, order.host, order.port)
                hold(self._connection)
                pause = FIRST_RETRY_S
                try:
                    await self._until_broken(self._connection, lambda: fenced(incarnation))
                except liveness.UnprovenPeer as error:
                    self._say_unproven(order, error)
            await asyncio.sleep(pause / 2 + self._random_s(pause / 2))  # not all agents of a job at one moment
            pause = min(2 * pause, LAST_RETRY_S)

    def _say_unproven(self, order: ControllerUp, error: liveness.UnprovenPeer) -> None:
        line = f"{order.host}:{order.port}: {error}; nothing it says is believed, and the agent tries again"
        self._unproven.say(line, asyncio.get_running_loop().time())

    @staticmethod
    async def _until_broken(there: ControllerConnection, fenced: Callable[[], None]) -> None:
        try:
            while said := await there.hear():
                if liveness.FENCED in said:
                    fenced()
        except liveness.UnprovenPeer:
            raise
        except OSError:
            return
