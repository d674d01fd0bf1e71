"""Which faults a journal implies, and at which moments of the job they came: as a flow file asks for them.

A journal has consequences only. A closed connection was a killed node, as far as the journal shows: so each
fault comes with the reason for which it was inferred. Moments are given by what had happened by then, never by time.
"""

from __future__ import annotations

from typing import Any

from nvrx_slurm.core.state import ControlState, Node, NodeState, Phase, Replica
from nvrx_slurm.journal.records import (
    ControllerStarted,
    Entry,
    JobEnded,
    JobStarted,
    NodeJoined,
    NodeLost,
    Progress,
    Recovered,
    Signalled,
    WorkerFailed,
    WorkerHung,
)
from nvrx_slurm.lab.flow.writing import NOTE, Item
from nvrx_slurm.util.durations import words

SIGKILL, SIGTERM = 9, 15
_LOST_BY = {
    "connection_closed": ("kill_node", "its connection closed"),
    "tether_lost": ("kill_node", "its connection closed"),  # the name of that cause until 0.2
    "heartbeat_timeout": ("stop_node", "it fell silent"),
}
_SIGNALLED_BY: dict[str, tuple[Item, str]] = {
    "cancel": ({}, "the job was cancelled"),
    "interrupt": ({"signal": "INT"}, "the job was interrupted"),
    "hangup": ({"signal": "HUP"}, "the job's terminal was closed"),
}
_ENDED_BY = {
    "time_limit": "the time limit of job.yaml ended the job; it must do so again",
    "agents_gone": "the job ended since no agent ran any more; they must end again",
    "no_agents": "the job ended since no agent could run in its container; so it must be again",
    "lease_lapsed": "the job ended since its lease was not renewed; it must lapse again",
    "preempted": "Slurm took the job's nodes back; it must do so again",
}
# How long the survivors of a batch host may take to have the job requeued, once they have stopped.
REQUEUED_S = 10.0

HELD_BACK = "Slurm holds a requeued job back for two minutes."

LOSE_BATCH_HOST: Item = {"kill_node": {"batch_host": True}}


class Inference:
    """Sees each entry before the core does; `job` is the core's state by then. `faults` fills on the way.

    `dead`: node → its capture, of those that a fault has hit. `loose`: replicas that were hit again while they
    recovered, which may cost them one cycle or two; `recording` adds them.
    """

    def __init__(self, job: ControlState) -> None:
        self.job = job
        self.faults: list[Item] = []
        self.dead: dict[str, str] = {}
        self.loose: set[str] = set()
        self.notes: list[str] = []
        self.came_back = False  # some node, in a way that the flow cannot repeat
        self._joined, self._joined_before = 0, -1
        self._frozen: set[str] = set()
        self._progressed: dict[tuple[str, int], Progress] = {}
        self._recovered: Recovered | None = None
        self._lost = self._ended = 0
        self._before_term: list[Item] | None = None

    def see(self, entry: Entry) -> None:
        job, is_ending = self.job, self.job.shutdown is not None
        match entry.record:
            case NodeJoined() as fact:
                self._joined += 1
                known = job.nodes.get(fact.node)
                if known is None or not known.incarnation or is_ending:
                    return
                if fact.node in self._frozen:
                    self._frozen.discard(fact.node)
                    capture = self.dead[fact.node]
                    after = [{"event": "node_lost", "node": capture}, *self._after_recovery()]
                    self._add("restore_node", capture, after, f"{fact.node} came back")
                else:
                    self.came_back = True
                    how = "the journal does not say how, and the flow does not repeat it"
                    self.notes.append(f"{fact.node} came with another agent; {how}")
            case NodeLost() as fact if fact.cause in _LOST_BY and not is_ending:
                node = job.nodes.get(fact.node)
                if node is None:
                    return
                action, why = _LOST_BY[fact.cause]
                if action == "stop_node":
                    self._frozen.add(node.name)
                self._lost += 1  # a node may be lost twice
                capture = self.dead[node.name] = f"$dead{self._lost}"
                target, moment = self._of_node(node, fact.step)
                self._add(action, target, moment, f"{node.name} was lost: {why}", names=capture)
            case WorkerFailed() as fact if self._is_of_running_cycle(fact):
                if fact.signal == SIGTERM:
                    # Slurm signals all steps of a job that is cancelled; the job's own signal may come later.
                    self._before_term = self._all_running()
                elif fact.signal == SIGKILL:
                    why = "was killed by SIGKILL: by hand, or by the kernel for want of memory"
                    self._add_worker("kill_worker", fact, why)
            case WorkerHung() as fact if self._is_of_running_cycle(fact):
                why = f"hung ({fact.why}): take this fault out if the workers do so by themselves"
                self._add_worker("stop_worker", fact, why)
            case ControllerStarted() if job.started_at and not job.ended and not is_ending:
                self._add("kill_controller", {}, self._all_running_or_opened(), "another controller took over")
            case JobStarted() as fact if fact.generation:
                self._next_generation()
            case Signalled() as fact:
                if fact.reason in _SIGNALLED_BY:
                    target, why = _SIGNALLED_BY[fact.reason]
                    self._add("scancel", target, self._before_term or self._all_running_or_opened(), why)
                else:
                    self.notes.append(_ENDED_BY[fact.reason])
            case Progress() as fact:
                self._progressed.setdefault((fact.replica, fact.cycle), fact)
            case Recovered() as decision:
                self._recovered, self._before_term = decision, None
            case JobEnded():
                self._ended += 1

    def _next_generation(self) -> None:
        # The controller that began it, and the cancelling before it, were no faults.
        if self.faults and next(iter(self.faults[-1]["do"])) in ("kill_controller", "scancel"):
            moment = self.faults.pop()["when"]
        else:
            moment = self._when(self._all_running())
        if self.job.ended:
            lost: Item = {"requeue": {}}
            why = "the job was requeued"
            self.notes = [note for note in self.notes if note != _ENDED_BY["preempted"]]  # it was for the requeue
            over: Item = {"event": "job_ended", "times": self._ended}
        else:
            lost, why = LOSE_BATCH_HOST, "its batch host was lost, and the job was requeued"
            grace_s = self.job.plan.fault_tolerance.control_plane_grace
            over = {"fault": len(self.faults) + 1, "after": words(grace_s + REQUEUED_S)}
        self.faults.append({NOTE: f"Inferred: {why}.", "when": moment, "do": lost})
        self.faults.append({NOTE: HELD_BACK, "when": over, "do": {"release": {}}})
        self._progressed.clear()
        self._recovered = None

    def restored(self, node: str) -> str | None:
        """The node's capture, if what was seen last was its return."""
        capture = self.dead.get(node)
        last = self.faults[-1]["do"] if self.faults else {}
        return capture if last == {"restore_node": capture} else None

    # ---- who was hit

    def _of_node(self, node: Node, step: int | None) -> tuple[Any, list[Item]]:
        """The target that names the node in another run, and what had happened there."""
        replica = self.job.replicas.get(node.replica or "")
        if replica is not None and node.name in replica.order:
            rank = replica.order.index(node.name) * replica.role.workers_per_node
            return {"of_rank": rank, **self.whose(replica.id)}, self._at_step(replica.id, rank, step)
        if node.state is not NodeState.STANDBY:
            return node.name, []
        spare = self.job.spares_in_order().index(node.name) + 1
        is_planned = spare <= self.job.plan.spares  # the pool holds more where a world has become smaller
        return {"spare": spare} if is_planned else node.name, self._all_running()

    def _is_of_running_cycle(self, fact: WorkerFailed | WorkerHung) -> bool:
        """What others report of a cycle that has failed already is a consequence."""
        replica = self.job.replicas.get(fact.replica)
        running = replica is not None and replica.phase is Phase.RUNNING and replica.cycle == fact.cycle
        return running and self.job.shutdown is None

    def whose(self, replica_id: str) -> Item:
        """The field that names a replica, where there are several."""
        return {"replica": replica_id} if len(self.job.replicas) > 1 else {}

    def cycle_of(self, replica_id: str, cycle: int) -> Item:
        """The fields that name a replica's cycle, as exactly as that can be foreseen."""
        return {**self.whose(replica_id), "cycle": f">= {cycle}" if replica_id in self.loose else cycle}

    def generation(self) -> Item:
        """The field that names the generation, of a later one."""
        return {"generation": self.job.generation} if self.job.generation else {}

    # ---- when that was

    def _at_step(self, replica_id: str, rank: int, step: int | None) -> list[Item]:
        replica = self.job.replicas[replica_id]
        if replica.phase is not Phase.RUNNING:
            return []
        if step is not None and not self.job.generation:  # a heartbeat does not carry its generation
            return [{"event": "progress", **self.cycle_of(replica_id, replica.cycle), "rank": rank, "step": step}]
        return [self._runs(replica)]

    def _runs(self, replica: Replica) -> Item:
        """All that is known to have happened in the replica's cycle."""
        first = self._progressed.get((replica.id, replica.cycle))
        of = {**self.cycle_of(replica.id, replica.cycle), **self.generation()}
        if first and not self.job.generation:
            return {"event": "progress", **of, "rank": first.rank, "step": first.step}
        if replica.started.issuperset(replica.order):
            return {"event": "workers_started", **of, "times": len(replica.order)}
        return {"event": "rendezvous_closed", **of}

    def _all_running(self) -> list[Item]:
        running = [replica for replica in self.job.replicas.values() if replica.phase is Phase.RUNNING]
        return [self._runs(replica) for replica in running]

    def _all_running_or_opened(self) -> list[Item]:
        """The same, and which rendezvous are open."""
        opened = [each for each in self.job.replicas.values() if each.phase is Phase.RENDEZVOUS and each.cycle > 0]
        rendezvous = [{"event": "rendezvous_opened", **self.cycle_of(each.id, each.cycle)} for each in opened]
        return self._all_running() + rendezvous

    def _after_recovery(self) -> list[Item]:
        done = self._recovered
        return [] if done is None else [{"event": "recovered", **self.cycle_of(done.replica, done.cycle)}]

    def _when(self, moment: list[Item]) -> Item:
        """All of: what the target had done; which nodes had joined; the recoveries and the faults before."""
        begun = {"event": "node_joined", "times": self._joined} if self._joined else {"event": "job_started"}
        joined = [begun] if self._joined != self._joined_before else []
        self._joined_before = self._joined
        before = [{"fault": len(self.faults)}] if self.faults else []
        # A moment of the very cycle in which the replica recovered says that already.
        named = {(item.get("replica"), item.get("cycle")) for item in moment}
        after = [item for item in self._after_recovery() if (item.get("replica"), item["cycle"]) not in named]
        every = [*moment, *joined, *after, *before]
        return every[0] if len(every) == 1 else {"all": every}

    def _add_worker(self, action: str, fact: WorkerFailed | WorkerHung, why: str) -> None:
        whose = self.whose(fact.replica)
        target = {"rank": fact.rank, **whose} if whose else fact.rank
        self._add(action, target, self._at_step(fact.replica, fact.rank, fact.step), f"rank {fact.rank} {why}")

    def _add(self, action: str, target: Any, moment: list[Item], why: str, *, names: str | None = None) -> None:
        fault: Item = {NOTE: f"Inferred: {why}.", "when": self._when(moment), "do": {action: target}}
        self.faults.append(fault | ({"as": names} if names else {}))
