"""A job that ran becomes a flow: its journal, abstracted to what holds again on another run.

What is kept: who was lost, what was decided, how each rendezvous closed, that each recovery ended, how the job ended.
What races is left out or may come in any order: joins, which of several workers is reported first, who is ready when.
Nodes are named by captures, and only where it matters that one is meant twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.core.job import step
from nvrx_slurm.core.state import NodeState, new_job
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.records import (
    ControllerStarted,
    Decision,
    Entry,
    Fact,
    JobEnded,
    JobStarted,
    NodeJoined,
    NodeLost,
    Quarantined,
    Recovered,
    RendezvousClosed,
    ReplicaEnded,
    RestartDecided,
    Shutdown,
    Signalled,
    WorkerFailed,
    WorkerHung,
)
from nvrx_slurm.lab.flow.inferred_faults import LOSE_BATCH_HOST, SIGKILL, SIGTERM, Inference
from nvrx_slurm.lab.flow.writing import NOTE, Item, in_any_order, nice, without_never
from nvrx_slurm.util.durations import words
from nvrx_slurm.util.signals import signal_name

# How much longer than in the recording a recovery may take: another machine, and a busy one.
SLACK = 10.0

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
    story.close_generation()
    inference = story.inference
    notes = "\n".join(f"Note: {note}." for note in dict.fromkeys(inference.notes))
    document: Item = {NOTE: notes, "about": about, "job": job}
    document |= {"overrides": overrides} if overrides else {}
    if any(fault["do"] == LOSE_BATCH_HOST for fault in inference.faults):
        # The next generation needs all its nodes, and the dead one does not come back for it.
        document["cluster"] = {"nodes": plan.total_nodes + 1}
    document |= {"faults": inference.faults} if inference.faults else {}
    document["expect"] = story.expected if story.job.ended else list(without_never(story.expected))
    wall_s = nice(max(SHORTEST_WALL_S, WALL_SLACK * (story.ended - story.began)))
    return document | {"limits": {"wall": words(wall_s)}}


@dataclass(slots=True)
class _Episode:
    """A replica from its failure to its recovery. `exact`: what came, where only one thing went wrong at a time."""

    exact: list[Item] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # captures
    decided: list[RestartDecided] = field(default_factory=list)
    closed: RendezvousClosed | None = None
    by_term: bool = False
    failure: Item | None = None  # what a worker reported, until it is clear that no node was lost

    @property
    def is_loose(self) -> bool:
        return len(self.lost) > 1 or (bool(self.lost) and len(self.decided) > 1)


class _Story:
    """Takes the entries one by one; the core's own state says what each means."""

    def __init__(self, plan: Plan) -> None:
        self.job = new_job(plan)
        self.inference = Inference(self.job)
        self.expected: list[Item] = []  # of generations that are over
        self.chains: defaultdict[str, list[Item]] = defaultdict(list)  # replica → what comes, in order
        self.beside: list[list[Item]] = []  # what is of no replica
        self.episodes: defaultdict[str, _Episode] = defaultdict(_Episode)  # by replica
        self.ending: list[Item] = []
        self.spares_named = 0
        self.late_joins = False
        self.began = self.ended = 0.0

    def take(self, entry: Entry) -> None:
        self.began, self.ended = self.began or entry.t, entry.t
        record = entry.record
        # Before the core takes the entry: what it means depends on what was true until then.
        self.inference.see(entry)
        # Once the job is ending, what else comes depends on which node leaves first.
        if not self.ending or isinstance(record, JobEnded | JobStarted):
            if isinstance(record, Fact):
                self._take_fact(record)
            else:
                self._take_decision(record)
        if isinstance(record, Fact):
            step(self.job, record, entry.t)

    def _take_fact(self, fact: Fact) -> None:
        match fact:
            case JobStarted() if fact.generation:
                if self.beside and "controller_started" in self.beside[-1][0]:  # it began this generation
                    self.beside.pop()
                self.close_generation()
                self.expected.append({"job_started": {"generation": fact.generation}})
            case ControllerStarted() if self.job.started_at:
                self.beside.append([{"controller_started": {"epoch": f">= {fact.epoch}"}}])
            case NodeJoined():
                self.late_joins = self.late_joins or bool(self.inference.faults)
                if capture := self.inference.restored(fact.node):
                    self.beside.append([{"node_joined": {"node": capture}}])
            case NodeLost():
                node, capture = self.job.nodes.get(fact.node), self.inference.dead.get(fact.node)
                if node is None or capture is None:
                    return
                replica = self.job.replicas.get(node.replica or "")
                if replica is None or (replica.cycle <= 0 and node.state is not NodeState.ACTIVE):
                    self.beside.append([{"node_lost": {"node": capture}}])
                else:
                    self.episodes[replica.id].lost.append(capture)
                    self.episodes[replica.id].closed = None
            case WorkerFailed():
                how = signal_name(fact.signal) if fact.signal else fact.error or f"exit code {fact.exit_code}"
                note = "" if fact.signal == SIGKILL else f"By itself: rank {fact.rank}, {how}. It must do so again."
                self._note_failure(fact, {NOTE: note, "worker_failed": self._of(fact)})
                if fact.replica in self.episodes:
                    self.episodes[fact.replica].by_term = fact.signal == SIGTERM
                chain = self.chains.get(fact.replica)
                if fact.step is None and note and chain and chain[-1].get("recovered") == self._of(fact):
                    chain.pop()  # it fails at once: another time perhaps before all others have started
            case WorkerHung():
                self._note_failure(fact, {"worker_hung": self._of(fact)})
            case Signalled():
                # Slurm signals the steps before the job itself: workers that died of that have not failed.
                for name in [name for name, each in self.episodes.items() if each.by_term and not each.lost]:
                    del self.episodes[name]

    def _note_failure(self, fact: WorkerFailed | WorkerHung, item: Item) -> None:
        replica = self.job.replicas.get(fact.replica)
        if replica is not None and replica.cycle == fact.cycle:
            self.episodes[fact.replica].failure = item

    def _take_decision(self, decision: Decision) -> None:
        match decision:
            case RestartDecided():
                episode = self.episodes[decision.replica]
                episode.decided.append(decision)
                episode.closed = None  # a rendezvous that failed again is not what came of it
                if episode.failure is not None and not episode.lost:
                    episode.exact.append(episode.failure)
                episode.exact.append({"restart_decided": self._of(decision) | {"action": decision.action}})
                episode.failure = None
            case RendezvousClosed() if decision.replica in self.episodes:
                episode = self.episodes[decision.replica]
                episode.closed = decision
                if not episode.lost:
                    episode.exact.append(self._closed(decision))
            case RendezvousClosed():
                self.chains[decision.replica].append(self._closed(decision))
            case Recovered():
                self._end_episode(decision.replica)
                bounds = self.job.plan.fault_tolerance
                teardown_s = bounds.teardown.grace + bounds.rendezvous.last_call
                within_s = nice(max(SHORTEST_WITHIN_S, SLACK * decision.total_s, teardown_s))
                item = {"recovered": self._of(decision), "within": words(within_s)}
                self.chains[decision.replica].append(item)
            case ReplicaEnded():
                self._end_episode(decision.replica)
                ended = {"replica_ended": self._of(decision) | {"outcome": decision.outcome}}
                self.chains[decision.replica].append(ended)
            case Quarantined() if not self.inference.came_back:
                self.beside.append([{"quarantined": {"deaths": decision.deaths}}])
            case Shutdown():
                self._end_episodes()
                self.ending = [{"shutdown": {"exit_code": decision.exit_code}}]
            case JobEnded():
                self.ending.append({"job_ended": {"exit_code": decision.exit_code}})

    def close_generation(self) -> None:
        """Expect what came of every replica, in any order between them, and then how the generation ended."""
        self._end_episodes()
        self.expected += in_any_order([chain for chain in [*self.chains.values(), *self.beside] if chain])
        self.expected += self.ending
        self.chains.clear()
        self.beside, self.ending = [], []

    # ---- how it is said

    def _of(self, record: Any) -> Item:
        return self.inference.cycle_of(record.replica, record.cycle)

    def _closed(self, decision: RendezvousClosed) -> Item:
        """How a rendezvous closed. Job-wide counts hold again where one replica moves alone, and the pool is full."""
        said = self._of(decision) | self.inference.generation()
        if len(self.job.replicas) > 1:
            return {"rendezvous_closed": said | {"nodes": {"length": len(decision.nodes)}}}
        said |= {"active": decision.active}
        if decision.cycle and not self.late_joins:  # in the first rendezvous spares may still be on their way
            said |= {"standby": decision.standby}
        return {"rendezvous_closed": said}

    def _end_episodes(self) -> None:
        for replica_id in list(self.episodes):
            self._end_episode(replica_id)

    def _end_episode(self, replica_id: str) -> None:
        """Nothing more comes of the failure: expect what did."""
        if (episode := self.episodes.pop(replica_id, None)) is None:
            return
        chain, closed = self.chains[replica_id], episode.closed
        if episode.is_loose:
            self.inference.loose.add(replica_id)
        if not episode.lost:
            chain += episode.exact
            return
        # Whether the loss of a node is noticed before the decision differs from run to run.
        lost: list[Item] = [{"node_lost": {"node": capture}} for capture in episode.lost]
        decided = [{"restart_decided": self._of(each) | {"action": each.action}} for each in episode.decided[-1:]]
        chain += in_any_order([[item] for item in lost + decided])
        if closed is None:
            return
        item = self._closed(closed)
        chain.append(item)
        if episode.is_loose:
            return
        started = self.job.replicas[closed.replica].started  # of this cycle: no later one has begun
        if closed.promoted and started.issuperset(closed.promoted):
            # Each spare that the rendezvous promoted has started workers.
            captures = [f"$spare{self.spares_named + number}" for number in range(1, len(closed.promoted) + 1)]
            self.spares_named += len(captures)
            item["rendezvous_closed"]["promoted"] = captures
            of = self._of(closed)
            chain += in_any_order([[{"workers_started": {"node": capture} | of}] for capture in captures])
        # A killed node stays away to the end, as far as is known; a frozen one may come back.
        killed = {fault["as"] for fault in self.inference.faults if "kill_node" in fault["do"] and "as" in fault}
        chain += [{"never": {"workers_started": {"node": capture}}} for capture in episode.lost if capture in killed]
