"""A job that ran becomes a flow: its journal, abstracted to what holds again on another run.

What is kept: who was lost, what was decided, how each round closed, that each recovery ended, how the job did. What
races is left out or may come in any order: joins, which of several workers is reported first, who is ready when.
Nodes are named by captures, and only where it matters that one is meant twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import NodeState, new_job
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.records import (
    ControllerStarted,
    Entry,
    Fact,
    JobEnded,
    JobStarted,
    NodeJoined,
    NodeLost,
    Quarantined,
    Recovered,
    ReplicaEnded,
    RestartDecided,
    RoundClosed,
    Shutdown,
    Signalled,
    WorkerFailed,
    WorkerHung,
)
from nvrx_slurm.lab.flow.inferred_faults import LOSE_BATCH_HOST, SIGKILL, SIGTERM, Inference
from nvrx_slurm.lab.flow.writing import NOTE, Item, in_any_order, nice, without_never
from nvrx_slurm.util.durations import words

SLACK = 10.0
"""How much longer than in the recording a recovery may take: another machine, and a busy one."""

SHORTEST_WITHIN_S = 10.0
SHORTEST_WALL_S = 60.0
WALL_SLACK = 4.0


def record(plan: Plan, journal: Iterable[Entry], *, job: str, about: str, overrides: Item | None = None) -> Item:
    """The document of a flow (see `writing.to_yaml`) that asks for what this journal says. Pure.

    `job`: the job.yaml, as the flow names it; `overrides`: what the job had differently.
    """
    story = _Story(plan)
    for entry in journal:
        story.take(entry)
    document: Item = {NOTE: story.head(), "about": about, "job": job}
    document |= {"overrides": overrides} if overrides else {}
    if any(fault["do"] == LOSE_BATCH_HOST for fault in story.inference.faults):
        document["cluster"] = {
            "nodes": plan.total_nodes + 1
        }  # the dead one does not come back for the next generation
    document |= {"faults": story.inference.faults} if story.inference.faults else {}
    return document | {"expect": story.finish(), "limits": {"wall": words(story.wall_s)}}


@dataclass(slots=True)
class _Episode:
    """A replica from its failure to its recovery. `exact`: what came, where only one thing went wrong at a time."""

    exact: list[Item] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # captures
    decided: list[RestartDecided] = field(default_factory=list)
    closed: RoundClosed | None = None
    by_term: bool = False
    failure: Item | None = None  # what a worker reported, until it is clear that no node was lost

    @property
    def is_loose(self) -> bool:
        return len(self.lost) > 1 or (bool(self.lost) and len(self.decided) > 1)


class _Story:
    """Takes the entries one by one; the core's own state says what each means."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.job = plan, new_job(plan)
        self.inference = Inference(self.job)
        self.expected: list[Item] = []  # of generations that are over
        self.chains: dict[str, list[Item]] = {}  # replica → what comes, in order
        self.beside: list[list[Item]] = []  # what is of no replica
        self.episodes: dict[str, _Episode] = {}
        self.promoted: dict[str, int] = {}  # how many a replica's last round promoted
        self.ending: list[Item] = []  # once there is one, what else comes depends on who leaves first
        self.spares_named = 0
        self.late_joins = False
        self.began = self.ended = 0.0

    def take(self, entry: Entry) -> None:
        self.began, self.ended = self.began or entry.t, entry.t
        record = entry.record
        self.inference.see(entry)
        handle = self._HANDLERS.get(type(record))
        if handle is not None and (not self.ending or isinstance(record, JobEnded | JobStarted)):
            handle(self, record)
        if isinstance(record, Fact):
            step(self.job, record, entry.t)

    def finish(self) -> list[Item]:
        """All that is expected."""
        self._close_generation()
        return self.expected if self.job.ended else list(without_never(self.expected))

    def head(self) -> str:
        """The comment at the head of the flow."""
        return "\n".join(f"Note: {note}." for note in dict.fromkeys(self.inference.notes))

    @property
    def wall_s(self) -> float:
        return nice(max(SHORTEST_WALL_S, WALL_SLACK * (self.ended - self.began)))

    # ---- facts

    def _job_started(self, fact: JobStarted) -> None:
        if fact.generation:
            if self.beside and "controller_started" in self.beside[-1][0]:  # it began this generation
                self.beside.pop()
            self._close_generation()
            self.expected.append({"job_started": {"generation": fact.generation}})

    def _controller_started(self, fact: ControllerStarted) -> None:
        if self.job.started_at:
            self.beside.append([{"controller_started": {"epoch": f">= {fact.epoch}"}}])

    def _node_joined(self, fact: NodeJoined) -> None:
        self.late_joins = self.late_joins or bool(self.inference.faults)
        if capture := self.inference.restored(fact.node):
            self.beside.append([{"node_joined": {"node": capture}}])

    def _node_lost(self, fact: NodeLost) -> None:
        node, capture = self.job.nodes.get(fact.node), self.inference.dead.get(fact.node)
        if node is None or capture is None:
            return
        replica = self.job.replicas.get(node.replica or "")
        if replica is None or (replica.cycle <= 0 and node.state is not NodeState.ACTIVE):
            self.beside.append([{"node_lost": {"node": capture}}])
        else:
            episode = self._episode(replica.id)
            episode.lost.append(capture)
            episode.closed = None

    def _worker_failed(self, fact: WorkerFailed) -> None:
        how = f"signal {fact.signal}" if fact.signal else fact.error or f"exit code {fact.exit_code}"
        note = "" if fact.signal == SIGKILL else f"By itself: rank {fact.rank}, {how}. It must do so again."
        self._failed(fact, {NOTE: note, "worker_failed": self._of(fact)})
        if fact.replica in self.episodes:
            self.episodes[fact.replica].by_term = fact.signal == SIGTERM
        if fact.step is None and note:  # it fails at once: perhaps before all others have started
            chain = self.chains.get(fact.replica, [])
            if chain and chain[-1].get("recovered") == self._of(fact):
                chain.pop()

    def _signalled(self, fact: Signalled) -> None:
        """Slurm signals the steps first: workers that died of that have not failed."""
        terminated = [name for name, episode in self.episodes.items() if episode.by_term and not episode.lost]
        for replica_id in terminated:
            del self.episodes[replica_id]

    def _worker_hung(self, fact: WorkerHung) -> None:
        self._failed(fact, {"worker_hung": self._of(fact)})

    def _failed(self, fact: WorkerFailed | WorkerHung, item: Item) -> None:
        replica = self.job.replicas.get(fact.replica)
        if replica is not None and replica.cycle == fact.cycle:
            self._episode(fact.replica).failure = item

    # ---- decisions

    def _restart_decided(self, decision: RestartDecided) -> None:
        episode = self._episode(decision.replica)
        episode.decided.append(decision)
        episode.closed = None  # a round that failed again is not what came of it
        item = {"restart_decided": self._of(decision) | {"action": decision.action}}
        if episode.failure is not None and not episode.lost:
            episode.exact.append(episode.failure)
        episode.exact.append(item)
        episode.failure = None

    def _round_closed(self, decision: RoundClosed) -> None:
        self.promoted[decision.replica] = len(decision.promoted)
        if (episode := self.episodes.get(decision.replica)) is None:
            self._chain(decision.replica).append(self._closed(decision))
            return
        episode.closed = decision
        if not episode.lost:
            episode.exact.append(self._closed(decision))

    def _recovered(self, decision: Recovered) -> None:
        self._end_episode(decision.replica)
        bound_s = max(SHORTEST_WITHIN_S, SLACK * decision.total_s, self._teardown_s())
        item = {"recovered": self._of(decision), "within": words(nice(bound_s))}
        self._chain(decision.replica).append(item)

    def _replica_ended(self, decision: ReplicaEnded) -> None:
        self._end_episode(decision.replica)
        self._chain(decision.replica).append({"replica_ended": self._of(decision) | {"outcome": decision.outcome}})

    def _quarantined(self, decision: Quarantined) -> None:
        if not self.inference.came_back:
            self.beside.append([{"quarantined": {"deaths": decision.deaths}}])

    def _shutdown(self, decision: Shutdown) -> None:
        self._end_episodes()
        self.ending = [{"shutdown": {"exit_code": decision.exit_code}}]

    def _job_ended(self, decision: JobEnded) -> None:
        self.ending.append({"job_ended": {"exit_code": decision.exit_code}})

    _HANDLERS: dict[type, Callable[[_Story, Any], None]] = {  # noqa: RUF012  a table of this class's own methods
        JobStarted: _job_started,
        ControllerStarted: _controller_started,
        NodeJoined: _node_joined,
        NodeLost: _node_lost,
        WorkerFailed: _worker_failed,
        WorkerHung: _worker_hung,
        Signalled: _signalled,
        RestartDecided: _restart_decided,
        RoundClosed: _round_closed,
        Recovered: _recovered,
        ReplicaEnded: _replica_ended,
        Quarantined: _quarantined,
        Shutdown: _shutdown,
        JobEnded: _job_ended,
    }

    # ---- how it is said

    def _of(self, record: Any) -> Item:
        return self.inference.cycle_of(record.replica, record.cycle)

    def _chain(self, replica_id: str) -> list[Item]:
        return self.chains.setdefault(replica_id, [])

    def _episode(self, replica_id: str) -> _Episode:
        return self.episodes.setdefault(replica_id, _Episode())

    def _closed(self, decision: RoundClosed) -> Item:
        """How a round closed. Job-wide counts hold again where one replica moves alone, and the pool is full."""
        said = self._of(decision) | self.inference.generation()
        if len(self.job.replicas) > 1:
            return {"round_closed": said | {"nodes": {"length": len(decision.nodes)}}}
        said |= {"active": decision.active}
        if decision.cycle and not self.late_joins:  # in the first round spares may still be on their way
            said |= {"standby": decision.standby}
        return {"round_closed": said}

    def _end_episode(self, replica_id: str) -> None:
        """Nothing more comes of the failure: say what did."""
        if (episode := self.episodes.pop(replica_id, None)) is None:
            return
        if episode.is_loose:
            self.inference.loose.add(replica_id)
        self._chain(replica_id).extend(self._items_of(replica_id, episode))

    def _end_episodes(self) -> None:
        for replica_id in list(self.episodes):
            self._end_episode(replica_id)

    def _items_of(self, replica_id: str, episode: _Episode) -> Iterator[Item]:
        if not episode.lost:
            yield from episode.exact
            return
        lost: list[Item] = [{"node_lost": {"node": capture}} for capture in episode.lost]
        decided = [{"restart_decided": self._of(each) | {"action": each.action}} for each in episode.decided[-1:]]
        yield from in_any_order([[item] for item in lost + decided])
        if episode.closed is not None:
            yield from self._with_spares(episode.closed, exact=not episode.is_loose)
            if not episode.is_loose:
                yield from ({"never": {"workers_started": {"node": capture}}} for capture in self._gone(episode.lost))

    def _with_spares(self, closed: RoundClosed, *, exact: bool) -> Iterator[Item]:
        """The round, and that each spare which it promoted starts workers."""
        item = self._closed(closed)
        started = self.job.replicas[closed.replica].started  # of this cycle: no later one has begun
        if not (exact and closed.promoted and started.issuperset(closed.promoted)):
            yield item
            return
        captures = [f"$spare{self.spares_named + number + 1}" for number in range(len(closed.promoted))]
        self.spares_named += len(captures)
        item["round_closed"]["promoted"] = captures
        yield item
        yield from in_any_order([[{"workers_started": {"node": capture} | self._of(closed)}] for capture in captures])

    def _gone(self, captures: list[str]) -> list[str]:
        """Those that stay away to the end, as far as is known: a frozen node may be back."""
        killed = {fault["as"] for fault in self.inference.faults if "kill_node" in fault["do"] and "as" in fault}
        return [capture for capture in captures if capture in killed]

    def _close_generation(self) -> None:
        self._end_episodes()
        branches = [chain for chain in [*self.chains.values(), *self.beside] if chain]
        self.expected += branches[0] if len(branches) == 1 else in_any_order(branches)
        self.expected += self.ending
        self.chains, self.beside, self.ending = {}, [], []

    def _teardown_s(self) -> float:
        bounds = self.plan.fault_tolerance
        return bounds.teardown.grace + bounds.rendezvous.last_call
