"""The agent's signs of life: heartbeats to the store, and the liveness connection to the controller.

Each interval one heartbeat goes to the store. While that fails, "alive" goes over the liveness connection. A
heartbeat that takes longer than an interval is not cancelled: on a slow network a new connection needs several round
trips, and cancelling each attempt would never let one succeed.

Whichever of the two answered last renews the supervisor's lease. When neither has answered for `fence_timeout` the
lease lapses: the workers die, since by then another node may have their ranks. The controller's own sign of life is
its lease in the store; while it is silent workers go on, up to `control_plane_grace`.

While Slurm suspends the job (`hold`) the workers outlive their lease: no process runs that could renew it, or give
their ranks away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec

from nvrx_slurm.agent.machine import ControllerConnection, Holdable
from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.journal.records import ControllerUp, Heartbeat
from nvrx_slurm.liveness import connection as liveness
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.util.admission import RateLimitedLog
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("agent")

# How long a heartbeat may take at least, however short the interval, before "alive" is sent instead.
SHORTEST_WAIT_S = 0.5

# Trimming the stream costs the store as much as the heartbeat itself: every so many heartbeats is enough.
TRIM_EVERY = 16


# How long workers live in a suspension that never ends. In milliseconds it must fit into poll(2)'s int.
OUTLIVE_S = 14 * 86400.0


class ControllerSilent(msgspec.Struct, frozen=True):
    """No controller has shown a sign of life for the control plane's grace."""

    for_s: float


class HeartbeatSender:
    """Sends until it is cancelled. `make` makes the next heartbeat, `lease` as `machine.WorkersPort` has it."""

    def __init__(
        self,
        *,
        bounds: FaultToleranceSpec,
        nodes: int,
        store: StoreClient,
        liveness: LivenessClient,
        clock: Clock,
        make: Callable[[], Heartbeat],
        lease: Callable[..., None],
        post: Callable[[ControllerSilent], None],
    ) -> None:
        self._bounds, self._store, self._liveness, self._clock = bounds, store, liveness, clock
        self._make, self._lease, self._post = make, lease, post
        self._keep = 2 * nodes + 16
        self._sent = 0
        self._bound_s = max(bounds.heartbeat.interval, SHORTEST_WAIT_S)
        self._sending: asyncio.Timeout | None = None  # of the heartbeat that is on its way
        self._is_replaced = False
        self._late: asyncio.TimerHandle  # when that has taken an interval
        self._due = 0.0  # when the next one is
        self._sent_event = asyncio.Event()
        self._touched_at = self._controller_at = self._asked_at = self._looked_at = clock.monotonic()
        self._warned_of_store = self._warned_of_controller = False
        self._grant: int | None = None  # the suspension in which the workers outlive their lease
        self._resumed_at: float | None = None  # the grant ends with the first touch after this

    async def run(self) -> None:
        """Send one heartbeat each interval, also while the store is away."""
        self._due = self._clock.monotonic()
        while True:
            await self._send_once()
            self._take_stock()
            await asyncio.sleep(self._due - self._clock.monotonic())

    def renew(self) -> None:
        """Let the workers live for as long as the last touch allows. Called before they start, and once an
        interval."""
        if self._grant is not None:
            self._lease(OUTLIVE_S, grant=self._grant)
        else:
            self._lease(max(0.0, self._bounds.fence_timeout - self._out_of_touch_s()))

    def hold(self, suspension: int) -> None:
        """Let the workers outlive their lease: the controller has granted it for this suspension."""
        # Until `release` has reached the supervisor the controller gives their ranks away on proof only.
        self._grant, self._resumed_at = suspension, None
        self.renew()

    def release(self, stood_still_s: float) -> None:
        """This node runs again. The time that it stood still is no silence."""
        if self._grant is not None:
            # The grant goes on until a heartbeat arrives: store and controller may be resumed seconds later.
            now = self._resumed_at = self._clock.monotonic()
            self._touched_at = min(now, self._touched_at + stood_still_s)
            self._controller_at = now

    def release_now(self) -> None:
        """Back to the ordinary lease, if the workers outlive it."""
        if self._grant is not None:
            self._grant = self._resumed_at = None
            self.renew()

    @property
    def is_in_touch(self) -> bool:
        """Whether workers that start now would have at least half of their lease."""
        # Workers started with less would be killed at once, and one partition would cost restart after restart.
        return self._out_of_touch_s() <= self._bounds.fence_timeout / 2

    async def touch(self) -> None:
        """Return once it is in touch."""
        # An order has arrived, so the store can be reached: a heartbeat that a partition holds up, on a connection of
        # its own, is replaced by a new one.
        if self._sending is not None and not self._sending.expired():
            self._is_replaced = True
            self._sending.reschedule(asyncio.get_running_loop().time())
        while not self.is_in_touch:
            self._sent_event.clear()
            await self._sent_event.wait()

    async def _send_once(self) -> None:
        """Send a heartbeat, and report "alive" if it does not arrive, or not within an interval."""
        # Contact counts from before the request: an answer proves nothing about the time that it has taken.
        began, timeout_s = self._clock.monotonic(), self._bounds.heartbeat.timeout
        # No task for each heartbeat, and no wait for it: nearly all are answered at once, and the timer is cancelled.
        self._watch_sending()
        try:
            async with asyncio.timeout(max(timeout_s / 2, SHORTEST_WAIT_S)) as self._sending:
                self._sent += 1
                await self._store.send_heartbeat(self._make(), self._keep if self._sent % TRIM_EVERY == 0 else None)
                # After a silence as long as the lease the store may serve the job's next generation, which has given
                # this node's ranks away, and whose orders this agent cannot read.
                has_lapsed = self._out_of_touch_s() > self._bounds.fence_timeout
                if not has_lapsed:
                    self._touched_at = began
                if has_lapsed or began - self._asked_at >= timeout_s / 3:
                    self._asked_at = began
                    if await self._store.controller_lives():
                        self._touched_at = self._controller_at = began
            self._warned_of_store = False
        except Exception as error:
            if not self._is_replaced:  # by `touch`, which wants a new one
                self._has_failed(str(error) or "no answer")  # it is not sent again: the next heartbeat is newer
        finally:
            self._late.cancel()
            self._sending, self._is_replaced = None, False

    def _watch_sending(self) -> None:
        self._late = asyncio.get_running_loop().call_later(self._bound_s, self._is_late)

    def _is_late(self) -> None:
        """The heartbeat that is on its way has taken another interval."""
        self._watch_sending()
        self._has_failed(f"no answer in {self._bound_s:g} s")
        self._take_stock()

    def _has_failed(self, problem: str) -> None:
        self._liveness.say(liveness.ALIVE)
        if not self._warned_of_store:
            log.warning("a heartbeat did not reach the store: %s", problem)
        self._warned_of_store = True

    def _take_stock(self) -> None:
        """Once an interval: the lease follows the last touch, and who waits for one looks."""
        if self._resumed_at is not None and self._touched_at > self._resumed_at:
            self._grant = self._resumed_at = None
        self.renew()
        self._sent_event.set()
        self._watch_controller()
        # At a fixed rate, not one pause after another; and without a burst that catches up.
        self._due = max(self._due + self._bounds.heartbeat.interval, self._clock.monotonic())

    def _watch_controller(self) -> None:
        """Log its silence once; after the grace, post `ControllerSilent`."""
        now = self._clock.monotonic()
        # Once an interval, unless this process stood still. So did the controller, perhaps: that time is no silence.
        stood_still_s = max(0.0, now - self._looked_at - 2 * self._bound_s)
        self._looked_at, self._controller_at = now, min(now, self._controller_at + stood_still_s)
        if self._grant is not None and self._resumed_at is None:
            return
        if self._warned_of_store and (silence_s := self._liveness.silence_s()) is not None:
            self._controller_at = max(self._controller_at, now - silence_s)  # the store cannot be asked
        for_s = now - self._controller_at
        if for_s > self._bounds.control_plane_grace:
            self._post(ControllerSilent(for_s))
        elif for_s > self._bounds.heartbeat.timeout and not self._warned_of_controller:
            self._warned_of_controller = True
            log.warning(
                "the controller has been silent for %.0f s; workers go on, for up to %.0f s",
                for_s,
                self._bounds.control_plane_grace,
            )
        elif for_s < self._bounds.heartbeat.timeout and self._warned_of_controller:
            self._warned_of_controller = False
            log.info("the controller answers again")

    def _out_of_touch_s(self) -> float:
        """Seconds since the store answered, or the controller's host did on the liveness connection."""
        since_store = self._clock.monotonic() - self._touched_at
        since_connection = self._liveness.silence_s()
        return since_store if since_connection is None else min(since_store, since_connection)


FIRST_RETRY_S = 0.05
LAST_RETRY_S = 5.0
# A thousand agents that connect at one moment take the controller longer than their rendezvous: each picks a moment
# of its own within this time for each node of the job. Until then its heartbeats show that it lives.
SPREAD_S_PER_NODE = 0.001


class LivenessClient:
    """Connects when a controller announces itself, and again when the connection breaks while that one is newest.

    `connect` and `random_s` as `Machine` has them. `hold` gets each new connection; `fenced` the incarnation that the
    controller has given up.
    """

    def __init__(
        self,
        connect: Callable[[ControllerUp, str], Awaitable[ControllerConnection]],
        random_s: Callable[[float], float],
        *,
        hold: Callable[[Holdable], None],
        fenced: Callable[[str], None],
        nodes: int = 0,
    ) -> None:
        self._connect, self._random_s, self._hold, self._fenced = connect, random_s, hold, fenced
        self._spread_s = nodes * SPREAD_S_PER_NODE
        self._task: asyncio.Task[None] | None = None
        self._connection: ControllerConnection | None = None
        self._epoch = 0
        self._unproven = RateLimitedLog(log.warning)

    def controller_is(self, order: ControllerUp, incarnation: str) -> None:
        """A controller listens there. Older ones than the newest known are ignored."""
        if order.epoch < self._epoch:
            return
        self._epoch = order.epoch
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._keep(order, incarnation))

    def silence_s(self) -> float | None:
        """Seconds since the controller's host last answered; None: there is no connection."""
        if self._connection is None:
            return None
        try:
            return self._connection.silence_s()
        except OSError:
            return None

    def say(self, word: bytes) -> None:
        """Send a word of the liveness connection; without a connection it is lost."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.say(word)

    async def close(self, *, goodbye: bool) -> None:
        """Let go; with `goodbye` the controller does not take it for a death."""
        if self._task is not None:
            self._task.cancel()
        if goodbye:
            self.say(liveness.GOODBYE)
        self._let_go()

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _keep(self, order: ControllerUp, incarnation: str) -> None:
        pause = FIRST_RETRY_S
        await asyncio.sleep(self._random_s(self._spread_s))
        while True:
            self._let_go()
            try:
                connection = self._connection = await self._connect(order, incarnation)
                log.info("connected to the controller of epoch %d at %s:%d", order.epoch, order.host, order.port)
                self._hold(connection)
                pause = FIRST_RETRY_S
                while words := await connection.hear():
                    if liveness.FENCED in words:
                        self._fenced(incarnation)
            except liveness.UnprovenPeer as error:
                line = f"{order.host}:{order.port}: {error}; nothing it says is believed, and the agent tries again"
                self._unproven.say(line, asyncio.get_running_loop().time())
            except OSError as error:
                log.debug("no connection to the controller at %s:%d: %s", order.host, order.port, error)
            await asyncio.sleep(pause / 2 + self._random_s(pause / 2))  # not all agents of a job at one moment
            pause = min(2 * pause, LAST_RETRY_S)
