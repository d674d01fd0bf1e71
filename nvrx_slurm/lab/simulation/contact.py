"""Who was in touch with whom, as it truly was: each heartbeat that the store has accepted, each sign on a liveness
connection, each link that is cut. What the controller and the agents conclude from silence is compared with it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from nvrx_slurm.journal.records import (
    ControllerStarted,
    Entry,
    JobStarted,
    JobSuspended,
    NodeFenced,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeResumed,
)
from nvrx_slurm.lab.simulation.monitors import Promise
from nvrx_slurm.liveness import fence

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.node import SimulatedNode
    from nvrx_slurm.lab.simulation.run import SimulationRun

# Signs of life of one agent that are kept.
KEPT = 128

# By how much silence may be misjudged: heartbeats are read a few times a second, and what is read was on its way.
ERROR_S = 0.5

SUSPECT_BEATS, STALL_BEATS = 3, 2
SHORTEST_S = 0.5

# How long after its deadline a node is given up, at most, by a controller that runs.
LATEST_S = 1.5

# With these acts time passes between a controller's judgement and its entry in the journal.
DELAYS_ENTRIES = frozenset({"freeze_controller", "overtake", "restart_store", "empty_store", "freeze_store"})

# With these acts alone it is known when a node has to be given up.
DELAYS_NO_LOSS = frozenset({"power_off", "kill_controller", "kill_worker", "fail_worker"})

# The promises that are checked here, and only here.
CONTACT = frozenset({Promise.PROVEN, Promise.SILENT, Promise.GUARD, Promise.TOUCH, Promise.PROMPTLY})


class Contact:
    """Checks each node that is given up, each proof of a death, and each lease that an agent renews."""

    def __init__(self, run: SimulationRun, broken: Callable[[Promise, str], None]) -> None:
        self._run, self._broken, self._bounds = run, broken, run.plan.fault_tolerance
        beats = self._bounds.heartbeat
        self._stall_s = min(STALL_BEATS * max(beats.interval, SHORTEST_S), beats.timeout / 2)
        self._signs: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))  # incarnation → when
        self._began: dict[int, float] = {}  # a controller's process id → when it began
        self._has_lease: int | None = None
        self._controller_began_at = 0.0
        self.leader: int | None = None  # the process id of the controller that decides
        self._agents: dict[str, str] = {}  # incarnation → its node
        self._joined_at: dict[str, float] = {}  # incarnation → when
        self._watched: dict[str, str] = {}  # node → the incarnation that the controller expects signs of
        self._grants: dict[str, int] = {}  # node → the suspension in which its workers may outlive their lease

    def heard(self, incarnation: str) -> None:
        """The store has accepted a heartbeat, or the controller has received a sign on a liveness connection."""
        self._signs[incarnation].append(self._run.loop.now_s)

    def _arrived_at(self, entry: Entry) -> float:
        """The moment of an entry's time: its commit has been on its way since."""
        return self._run.loop.now_s - max(0.0, self._run.store_clock.wall() - entry.t)

    def others_heard_at(self, node: str) -> float:
        """The last sign of any other node."""
        others = [signs[-1] for who, signs in self._signs.items() if signs and self._agents.get(who) != node]
        return max(others, default=-math.inf)

    def controller_begins(self, pid: int) -> None:
        """A controller process starts."""
        self._began[pid] = self._run.loop.now_s

    @property
    def newest_leads(self) -> bool:
        """Whether the journal names the controller that began last as the one that decides."""
        return self.leader is not None and self.leader == max(self._began)

    def lease_taken(self, pid: int) -> None:
        """A controller has the lease; that it leads is on its way to the journal."""
        self._has_lease = pid

    def listens(self, pid: int) -> bool:
        """Whether what this controller hears counts. One that was frozen, and has a successor, hears what is long
        past."""
        return pid == self.leader == self._has_lease

    def entered(self, entry: Entry) -> None:
        """The journal has this."""
        run = self._run
        match entry.record:
            case ControllerStarted(pid=pid):
                self._controller_began_at, self.leader = self._began.get(pid, run.loop.now_s), pid
            case JobStarted():
                self._watched.clear()
            case NodeJoined(node=name, incarnation=incarnation):
                self._agents[incarnation], self._watched[name] = name, incarnation
                self._joined_at[incarnation] = run.loop.now_s
                self._grants.pop(name, None)
                # Its join is its first sign, unless the store has accepted a heartbeat before the commit.
                self._signs.setdefault(incarnation, deque([self._arrived_at(entry)], KEPT))
            case JobSuspended(incarnations=incarnations, suspension=suspension):
                self._grants.update((self._agents[each], suspension) for each in incarnations)
            case NodeResumed(node=name):
                self._grants.pop(name, None)
            case NodeLeft(node=name):
                self._watched.pop(name, None)
            case NodeLost(node=name):
                self._check_loss(entry.record, self._arrived_at(entry))
                self._watched.pop(name, None)
            case NodeFenced(node=name, incarnation=incarnation):
                if self._may_live(name, incarnation):
                    self._broken(Promise.PROVEN, f"{name}'s supervisor lives, and this is journaled: {entry.record}")

    def lease_renewed(self, node: SimulatedNode, seconds: float, since_s: float, grant: int | None = None) -> None:
        """An agent, which has run for `since_s`, lets its workers live for so long without contact. `grant`: the
        suspension in which it lets them outlive their lease; by the journal that holds until the agent has confirmed
        an ordinary lease again."""
        run = self._run
        if grant is not None:
            if self._grants.get(node.name, -1) < grant:
                why = f"{node.name}'s workers live by the grant of suspension {grant}, which is over by the journal"
                self._broken(Promise.TOUCH, why)
            return
        silent_s = min(run.network.silence_s(node.name, run.HOST), since_s)
        most_s = self._bounds.fence_timeout - silent_s * node.clock.rate
        if silent_s and seconds > max(0.0, most_s) + ERROR_S:
            why = f"{node.name} was cut off for {silent_s:.3f} s, and renewed its workers' lease for {seconds:.3f} s"
            self._broken(Promise.TOUCH, why)

    def _may_live(self, node: str, incarnation: str) -> bool:
        return self._run.nodes[node].is_trapped_by(fence.key_of(self._run.address.token, incarnation))

    def _check_loss(self, lost: NodeLost, at: float) -> None:
        """A node may be given up when its kernel proves its death, or when neither witness has seen it for as long as
        the plan allows: never by a controller that has not listened for so long, and not if no node was seen."""
        if any(act.kind in ("set_clock", "suspend_all") for act in self._run.performed):
            return  # which moment the entry's time was is not known then
        beats, what = self._bounds.heartbeat, f"{lost.node} was given up ({lost.cause})"
        signs = [sign for sign in self._signs.get(lost.incarnation, ()) if sign <= at]
        # A silence that has just ended counts too: its end may have been on its way, behind the question for it.
        ended = [later - sooner for sooner, later in pairwise(signs) if at - later < ERROR_S]
        # The controller may have been frozen after it had judged, or have waited for the store, and the node be heard
        # since: the silence that it names counts.
        delay_s = max((act.lasts_s for act in self._run.performed if act.kind in DELAYS_ENTRIES), default=0.0)
        for sooner, later in pairwise(signs):
            if at - later < delay_s and later - sooner > lost.silent_s - ERROR_S:
                ended.append(later - sooner)
        silent_s = max((at - signs[-1] if signs else at, *ended))
        # A closed connection without a wait is a proof, however long the controller stood still before.
        is_proof = lost.cause == "connection_closed" or silent_s < self._bounds.gives_away_after_s - ERROR_S
        if not lost.safe_after_s and is_proof:
            if self._may_live(lost.node, lost.incarnation):
                self._broken(Promise.PROVEN, f"{what} as proven dead, and its supervisor lives")
            return
        self._check_delay(lost, at, signs[-1] if signs else 0.0)
        suspect_s = min(SUSPECT_BEATS * beats.interval, beats.timeout)
        least_s = suspect_s if lost.cause == "connection_closed" else beats.timeout
        if silent_s < least_s - ERROR_S:
            self._broken(Promise.SILENT, f"{what} after a silence of {silent_s:.3f} s, of {least_s:.3f} s")
        listened_s = at - self._controller_began_at
        if listened_s < beats.timeout - ERROR_S:
            why = f"{what} by a controller that had listened for {listened_s:.3f} s, of {beats.timeout:.3f} s"
            self._broken(Promise.GUARD, why)
        judged_at = [at]
        if signs and lost.silent_s:  # the controller may have been frozen after it had judged
            judged_at.append(min(at, max(signs[-1], self._controller_began_at) + lost.silent_s))
        if all(map(self._saw_no_node, judged_at)):
            self._broken(Promise.SILENT, f"{what} when no node had been seen for a while")

    def _saw_no_node(self, at: float) -> bool:
        """Whether no node had been seen for a while then, though not for so long that all count as lost."""
        beats = self._bounds.heartbeat
        # The controller may not have counted the last signs of nodes that have gone since; and those of an agent that
        # has not joined, or has been replaced, count for no node.
        newest = self._newest(at, self._signs)
        newest_here = self._newest(at, self._watched.values())
        grace_s = max(self._bounds.control_plane_grace, self._bounds.gives_away_after_s)
        return self._stall_s + ERROR_S < at - newest and at - newest_here < grace_s - beats.interval - ERROR_S

    def _check_delay(self, lost: NodeLost, at: float, last_sign: float) -> None:
        """A node that a controller knows from the journal is given up within the timeout, counted from its last sign
        or from the take-over: it does not get the time that a node has for its first heartbeat."""
        run, began = self._run, self._controller_began_at
        if self._joined_at.get(lost.incarnation, math.inf) >= began or not all(
            act.kind in DELAYS_NO_LOSS for act in run.performed
        ):
            return
        beats, since = self._bounds.heartbeat, max(last_sign, began)
        others = [
            sign for who, signs in self._signs.items() if who != lost.incarnation for sign in signs if sign > since
        ]
        moments = sorted([since, *others, at])
        if max(later - sooner for sooner, later in pairwise(moments)) > self._stall_s - ERROR_S:
            return  # no node was heard for a while: that is no node's silence
        if (late_s := at - since - beats.timeout) > LATEST_S:
            why = f"{lost.node} was given up {late_s:.3f} s after its timeout of {beats.timeout:.3f} s"
            self._broken(Promise.PROMPTLY, why)

    def _newest(self, at: float, among: Iterable[str]) -> float:
        """The last sign of these agents until then, or the moment at which the controller began to listen."""
        signs = (sign for who in among for sign in self._signs.get(who, ()) if sign <= at)
        return max((*signs, self._controller_began_at))
