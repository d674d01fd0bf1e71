"""Which nodes are alive, by heartbeats in the store and liveness connections; and the fence for those that are not.

Its findings are posted as facts; the rule itself is `core.liveness`. A reap is journaled first and fenced then: the
controller calls `fence` once a `Fence` is in the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from nvrx_slurm.controller.environment import ControllerEnvironment
from nvrx_slurm.core.liveness import Liveness
from nvrx_slurm.core.state import Node
from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import LOOPBACK, JobInfo
from nvrx_slurm.journal.records import (
    AnyFact,
    Fact,
    NodeFenced,
    NodeJoined,
    NodeLeft,
    NodeLost,
    SlurmNodeState,
    unpack_heartbeat,
)
from nvrx_slurm.liveness import fence
from nvrx_slurm.store.heartbeat_reader import HeartbeatReader
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.ids import precedes
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.tasks import end, start

log = get_logger("controller")

MOST_PACE_S = 0.25
# A node whose connection closed is dead when it is silent for so many heartbeat intervals more.
SUSPECT_BEATS = 3

# Without a heartbeat of any node for so many intervals, the store or this controller stood still.
STALL_BEATS = 2

# An agent whose heartbeats do not reach the store sends "alive" so often, however short the interval: that is no
# stall.
SLOWEST_BEAT_S = 0.5

# How long a node whose connection closed may take to prove that its processes are gone.
PROBE_S = 0.25

TEST_S = 0.2
# A thousand nodes that join at once are not all tested in the moment in which their rendezvous is to close.
TEST_SPREAD_S_PER_NODE = 0.002

FENCE_S = 5.0
# A dying process closes its sockets a moment before the kernel kills its children (do_exit, linux/kernel/exit.c).
SETTLE_S = 0.1
# The same where a connection closed: then nearly always a supervisor has ended in order, after its workers, and a
# recovery waits for this.
PROBE_SETTLE_S = 0.005


class FailureDetector:
    """Posts `NodeLost` when a node is dead, and `NodeFenced` when its workers are, for certain."""

    def __init__(
        self,
        *,
        plan: Plan,
        info: JobInfo,
        nodes: Callable[[], Mapping[str, Node]],
        heartbeats: HeartbeatReader,
        environment: ControllerEnvironment,
        token: str,
        clock: Clock,
        post: Callable[[AnyFact], None],
    ) -> None:
        self.plan, self.info, self.nodes, self.heartbeats = plan, info, nodes, heartbeats
        self.environment, self.token, self.clock, self.post = environment, token, clock, post
        bounds = plan.fault_tolerance
        self.pace_s = min(MOST_PACE_S, bounds.heartbeat.interval / 4)
        self.liveness = Liveness(
            timeout_s=bounds.heartbeat.timeout,
            startup_s=bounds.heartbeat.startup_timeout,
            suspect_s=SUSPECT_BEATS * bounds.heartbeat.interval,
            stall_s=STALL_BEATS * max(bounds.heartbeat.interval, SLOWEST_BEAT_S),
            fleet_grace_s=max(bounds.control_plane_grace, bounds.gives_away_after_s),
            grace_until=clock.monotonic() + bounds.heartbeat.timeout,
        )
        self.server = environment.liveness_server(token, self._alive, self._connection_lost)
        self.watched: dict[bytes, str] = {}  # incarnation → its node
        self.incarnations: dict[str, bytes] = {}  # node → the incarnation that is watched
        self.last_heartbeats: dict[str, bytes] = {}
        self.joined_at: dict[str, float] = {}  # node → when its agent joined, seconds since the epoch
        self.trusted: set[str] = set()  # incarnations whose kernel's refusal proves a death
        self.disconnected: set[str] = set()  # nodes whose connection closed, until they connect again
        self.suspended = False  # the job is: no silence is judged
        self._tasks: set[asyncio.Task[None]] = set()

    def start_with(self, nodes: Iterable[Node]) -> None:
        """Watch the nodes that a new controller knows from the journal."""
        # They joined long ago. So their silence counts from now on, and not from a first heartbeat: a node that died
        # with the controller before does not get `startup_timeout`.
        for node in nodes:
            self._watch(node.name, node.incarnation, node.addr, node.fence_port)
            self.liveness.heard(node.name, self.clock.monotonic())

    def take_note(self, fact: Fact) -> None:
        """A fact that the core has accepted may change which nodes are watched."""
        if isinstance(fact, NodeJoined):
            self._watch(fact.node, fact.incarnation, fact.addr, fact.fence_port)
        elif isinstance(fact, NodeLost | NodeLeft):
            self.liveness.drop(fact.node)
            self.watched.pop(fact.incarnation.encode(), None)
            self.last_heartbeats.pop(fact.node, None)
            self.disconnected.discard(fact.node)

    def resume(self, stood_still_s: float) -> None:
        """The job runs again."""
        self.suspended = False
        self.liveness.stood_still(stood_still_s, self.clock.monotonic())

    async def close(self) -> None:
        await end(self._tasks)
        await self.server.close()

    # ---- detection

    async def run(self) -> None:
        """Read the heartbeats a few times a second, and declare dead each node that was silent for too long."""
        unread_since: float | None = None
        while True:
            asked_at = self.clock.monotonic()
            try:
                batch = await self.heartbeats.read()
            except StoreUnreachable as error:
                if unread_since is None:
                    unread_since = self.clock.monotonic()
                    log.warning("%s; until it does, no node is declared dead", error)
            else:
                now = self.clock.monotonic()
                if unread_since is not None:
                    log.info("the heartbeats can be read again, after %.1f s", now - unread_since)
                    unread_since = None
                watched, alive, last_heartbeats = self.watched, self.liveness.heard, self.last_heartbeats
                for age_s, who, packed in batch.beats:
                    if (name := watched.get(who)) is not None:
                        alive(name, now - age_s)
                        last_heartbeats[name] = packed
                # Only now, and as of the question: the answer has all that had arrived by then, also where this
                # process was frozen before it asked, or since.
                bounds = self.plan.fault_tolerance
                for name, silent_s in ({} if self.suspended else self.liveness.dead(asked_at)).items():
                    log.warning("%s: nothing heard for %.1f s; it is given up", name, silent_s)
                    suspected = silent_s < bounds.heartbeat.timeout
                    cause = "connection_closed" if suspected else "heartbeat_timeout"
                    safe_after_s = max(0.0, bounds.gives_away_after_s - silent_s)
                    self._lose(name, cause, safe_after_s=safe_after_s, silent_s=silent_s)
            await asyncio.sleep(self.pace_s)

    def _watch(self, node: str, incarnation: str, addr: str, port: int) -> None:
        self.liveness.watch(node, self.clock.monotonic())
        self.joined_at[node] = self.clock.wall()
        former = self.incarnations.get(node, b"")
        self.watched.pop(former, None)  # an agent that was replaced is not heard any more
        if precedes(former.decode(), incarnation):
            self.liveness.heard(node, self.clock.monotonic())  # the same process: its heartbeats have begun long ago
        self.incarnations[node] = incarnation.encode()
        self.watched[self.incarnations[node]] = node
        if not port:  # the node has no fence: the kernel refuses this port also while its workers live
            return
        if self.info.addr == LOOPBACK:  # no firewall stands between this host and itself
            self.trusted.add(incarnation)
        else:
            self._go(self._test_refusal(node, incarnation, addr, port))

    async def _test_refusal(self, node: str, incarnation: str, addr: str, port: int) -> None:
        """Find out whether a refused probe will prove the node's death."""
        # Not where a firewall refuses the probe now, while the node lives.
        spread_s = TEST_SPREAD_S_PER_NODE * self.plan.total_nodes
        if spread_s > TEST_S:
            await asyncio.sleep(spread_s * self.nodes()[node].index / self.plan.total_nodes)
        if not await self.environment.is_dead(addr, port, fence.PROBE, TEST_S, pause_s=TEST_S / 2):
            self.trusted.add(incarnation)
            return
        await asyncio.sleep(STALL_BEATS * self.plan.fault_tolerance.heartbeat.interval)
        if self._current(node, incarnation):  # it did not die in this very moment
            log.warning("%s: a firewall answers for it; its death cannot be proven, only waited for", node)

    def _alive(self, node: str, incarnation: str) -> None:
        if self._current(node, incarnation):
            self.liveness.heard(node, self.clock.monotonic())
            if node in self.disconnected:
                self.disconnected.discard(node)
                log.info("%s: its agent is connected again", node)

    def _connection_lost(self, node: str, incarnation: str) -> None:
        if self._current(node, incarnation):
            log.warning("%s: the connection to its agent closed", node)
            self.disconnected.add(node)
            self._go(self._probe(node, incarnation))

    async def _probe(self, name: str, incarnation: str) -> None:
        """A connection closed: either the node's processes are gone, or a host between the two closed it."""
        began = self.clock.monotonic()
        node = self.nodes()[name]
        proven = incarnation in self.trusted and await self.environment.is_dead(
            node.addr, node.fence_port, fence.PROBE, PROBE_S
        )
        if proven:
            await asyncio.sleep(PROBE_SETTLE_S)
        if not self._current(name, incarnation):  # meanwhile it was lost, or has joined again
            return
        if proven:
            self._lose(name, "connection_closed", ago_s=self.clock.monotonic() - began)
        elif name in self.disconnected:
            log.warning("%s: nothing proves its death; waiting for its heartbeats", name)
            self.liveness.suspect(name, began)

    def _lose(
        self, name: str, cause: str, *, ago_s: float = 0.0, safe_after_s: float = 0.0, silent_s: float = 0.0
    ) -> None:
        node, packed = self.nodes()[name], self.last_heartbeats.get(name)
        steps = unpack_heartbeat(packed).steps if packed else {}
        self.liveness.drop(name)  # now: until the core has taken the fact in, the node must not be found dead again
        self.post(
            NodeLost(
                node=name,
                incarnation=node.incarnation,
                cause=cause,
                step=max(steps.values(), default=None),
                ago_s=ago_s,
                safe_after_s=safe_after_s,
                silent_s=round(silent_s, 6),
            )
        )

    def _current(self, name: str, incarnation: str) -> bool:
        node = self.nodes().get(name)
        return node is not None and node.alive and node.incarnation == incarnation

    # ---- fencing

    def fence(self, name: str, incarnation: str) -> None:
        """Have the node's workers killed, and post the proof when there is one."""
        # All ways at once: which of them reaches the node depends on what is wrong with it.
        self.server.fence(name, incarnation)
        node = self.nodes()[name]
        if node.fence_port:
            self._go(self._send_fence(name, incarnation, node.addr, node.fence_port))
        if self.info.cluster == "slurm":
            self._go(self._ask_slurm(name, incarnation))

    async def _send_fence(self, name: str, incarnation: str, addr: str, port: int) -> None:
        key = fence.key_of(self.token, incarnation)
        # The key is sent to every node; a refusal is proof only where no firewall may have made it.
        if await self.environment.is_dead(addr, port, key, FENCE_S) and incarnation in self.trusted:
            await asyncio.sleep(SETTLE_S)
            self.post(NodeFenced(node=name, incarnation=incarnation, proof="its kernel says that they are gone"))

    async def _ask_slurm(self, name: str, incarnation: str) -> None:
        node = await self.environment.node_state(name)
        if node is None:
            return
        self.post(SlurmNodeState(node=name, state=node.state, reason=node.reason))
        if node.proves_dead(heard_at=self.joined_at[name]):
            self.post(NodeFenced(node=name, incarnation=incarnation, proof="it has booted since"))

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        start(work, self._tasks, lambda error: log.error("a task of the failure detector failed: %r", error))
