"""The site's Slurm as a stage, and the faults that Slurm makes: cancel, requeue, time limit, drained and lost nodes,
preemption. Only what a user may do there; each fault is proven by Slurm's own answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.api.handle import Job
from nvrx_slurm.cluster.base import ClusterName
from nvrx_slurm.cluster.commands import Runner, SlurmPrograms, SystemRunner
from nvrx_slurm.cluster.slurm import SlurmCluster
from nvrx_slurm.cluster.slurm_text import fields_of
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import FaultFailed, SlurmUnreachable
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.devcluster.processes import wait_until
from nvrx_slurm.lab.devcluster.spec import USABLE
from nvrx_slurm.lab.flow.model import Flow, StageName
from nvrx_slurm.lab.flow.stages.base import Diagnoses, Stage
from nvrx_slurm.lab.flow.stages.diagnosis import slurm_answers
from nvrx_slurm.lab.flow.stages.faults import Injector, Scene
from nvrx_slurm.lab.flow.stages.processes import FaultResult
from nvrx_slurm.lab.flow.stages.remote import Reach, by_command, overlapping_step
from nvrx_slurm.lab.flow.topology import Arguments, node_of
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.processes import AGAIN_S

if TYPE_CHECKING:
    from nvrx_slurm.lab.flow.cleanup import CleanupList


class SlurmStage(Stage):
    """Jobs on the Slurm that this process's environment leads to; their processes are reached by a step of theirs."""

    name: StageName = "slurm"
    kind: ClusterName = "slurm"

    def __init__(self, flow: Flow, folder: Path, cleanup: CleanupList, clock: Clock) -> None:
        super().__init__(flow, folder, cleanup, clock)
        self._runner = SystemRunner(self.environment)
        self.injectors |= SlurmFaults(self._runner, clock).table()

    def _reach(self, job: Job) -> Reach:
        return by_command(overlapping_step(job.job_id), self.environment)

    def _note_killed(self, action: str, hit: FaultResult, scene: Scene) -> None:
        """When a batch script dies, Slurm kills the job's steps some seconds later, agents that still wait for the
        control plane among them."""
        super()._note_killed(action, hit, scene)
        nodes = scene.topology.nodes  # none while the job is pending
        if action == "kill_batch_host" or (action == "kill_node" and hit.bound in nodes[:1]):
            self.killed |= set(nodes)

    def _left(self, job: Job) -> list[str]:
        # No patience with Slurm: `gone` asks again until its own time is over.
        try:
            state = SlurmCluster(self._runner, patience_s=0).states([job.job_id])[job.job_id]
        except SlurmUnreachable as error:
            return [f"whether job {job.job_id} is still in the queue is not known: {error}"]
        if not state.terminal and state is not JobState.UNKNOWN:
            return [f"squeue still lists job {job.job_id}: {state}"]
        return super()._left(job)

    def _marks(self, job: Job) -> Mapping[str, str] | None:
        """Several clusters on one machine each have a job 1; SLURM_CONF distinguishes them."""
        conf = self.environment.get("SLURM_CONF") or env.get("SLURM_CONF")
        return {"SLURM_JOB_ID": job.job_id, "SLURM_CONF": conf} if conf else None

    def _places(self, job: Job) -> tuple[str, ...]:
        info = JobFolder(job.folder).read_info()
        return info.nodes if info else ()

    def _diagnoses(self, job: Job, folder: Path) -> Diagnoses:
        slurm = partial(slurm_answers, self._runner, folder / "slurm")
        return super()._diagnoses(job, folder) | {"slurm": slurm}


PROOF_S = 5.0
# How long slurmctld may take to act by itself: it plans every few seconds only.
SCHEDULING_S = 30.0

# slurmd compares whole seconds of when a job's credential was made and revoked.
REVOKED_S = 2.0

# The partition whose jobs come first.
PREEMPTING = "flow-preempts"

# What slurm.conf must say for a fault.
_REQUEUES = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "preempt": _REQUEUES,
    "preempt_with_notice": _REQUEUES | {"SlurmctldParameters": "preempt_send_user_signal"},
    "preempt_by_suspending": {
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "SUSPEND,GANG",
        "SelectTypeParameters": "CR_Core",  # memory is no resource: a suspended job keeps its own
        "SchedulerTimeSlice": "5",  # the shortest: how long a suspended job waits once the nodes are free again
    },
    "down_node": {"ReturnToService": "1"},  # else its slurmd brings it back at once
}

_ENDING = ("CANCELLED", "COMPLETING", "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
_IN_QUEUE = ("PENDING", "COMPLETING", "REQUEUED", "PREEMPTED", "CONFIGURING")
_DOWN, _DRAIN = ("down",), ("drain",)


class SlurmFaults:
    """Faults by the programs of one Slurm."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._programs, self._clock = SlurmPrograms(runner, patience_s=PROOF_S), clock

    def table(self) -> dict[str, Injector]:
        """All of them, by name."""
        return {
            "scancel": self.cancel,
            "requeue": self.requeue,
            "shorten_time_limit": self.shorten_time_limit,
            "release": self.release,
            "preempt": self.preempt,
            "preempt_with_notice": self.preempt,
            "preempt_by_suspending": self.preempt_by_suspending,
            "suspend": self.suspend,
            "drain_node": lambda arguments, scene: self._set_node(arguments, scene, "DRAIN", _DRAIN),
            "down_node": lambda arguments, scene: self._set_node(arguments, scene, "DOWN", _DOWN),
            "resume_node": lambda arguments, scene: self._set_node(arguments, scene, "RESUME", USABLE),
        }

    # ---- the job

    def cancel(self, arguments: Arguments, scene: Scene) -> FaultResult:
        # Plain scancel must end the job; a signal goes to the batch script, as ahead of the time limit.
        job, at, name = scene.job.job_id, self._clock.wall(), arguments.get("signal")
        before = self._show(job)["JobState"]
        # One that is COMPLETING may be on its way back into the queue.
        if before in _ENDING and before != "COMPLETING":
            raise FaultFailed(f"job {job} has ended already: Slurm says that it is {before}")
        command = ("scancel", "--batch", f"--signal={name}", job) if name else ("scancel", job)
        self._ask(*command)
        if arguments.get("twice"):
            self._clock.sleep(AGAIN_S * 1.2)  # sooner, the job takes the second for the first
            self._programs.ask(*command)  # which Slurm refuses, of a job that ends already
        if name:
            return FaultResult(at=at, proof=f"`{' '.join(command)}`: Slurm has sent it")

        proofs = ("CANCELLED",) if before == "COMPLETING" else _ENDING
        proof = self._reached(job, proofs, f"job {job} to be {' or '.join(proofs)}", PROOF_S)
        return FaultResult(at=at, proof=proof)

    def requeue(self, arguments: Arguments, scene: Scene) -> FaultResult:
        # How often it was restarted before: a job may be back in the queue, or even run again, before Slurm is asked.
        job, at, before = scene.job.job_id, self._clock.wall(), int(self._show(scene.job.job_id).get("Restarts", 0))
        self._ask("scontrol", "requeue", job)

        def queued() -> str | None:
            shown = self._show(job)
            back = shown["JobState"] in _IN_QUEUE or int(shown.get("Restarts", 0)) > before
            return f"job {job} is {shown['JobState']}, restarted {shown.get('Restarts', 0)} times" if back else None

        return FaultResult(at=at, proof=self._seen(queued, f"job {job} to be back in the queue", PROOF_S))

    def shorten_time_limit(self, arguments: Arguments, scene: Scene) -> FaultResult:
        job, at, to_s = scene.job.job_id, self._clock.wall(), float(arguments["to"])
        before = self._show(job)
        # Slurm counts in minutes: a limit is rounded up to one. Where no time at all is left, the job's end is set
        # instead: two seconds from now, for Slurm refuses an end that has passed when slurmctld reads it.
        change = f"TimeLimit={max(1, -int(-to_s // 60))}" if to_s else "EndTime=now+2"
        self._ask("scontrol", "update", f"JobId={job}", change)

        def shortened() -> str | None:
            now = self._show(job)
            keys = [key for key in ("TimeLimit", "EndTime") if now.get(key) != before.get(key)]
            return f"Slurm says {', '.join(f'{key}={now.get(key)}' for key in keys)}" if keys else None

        return FaultResult(at=at, proof=self._seen(shortened, f"another time limit of job {job}", PROOF_S))

    def release(self, arguments: Arguments, scene: Scene) -> FaultResult:
        job, at = scene.job.job_id, self._clock.wall()
        pending_since: list[float] = []

        def running() -> str | None:
            shown = self._show(job)
            if shown["JobState"] == "PENDING":
                pending_since.append(self._clock.monotonic())
                # Not at once: a job that starts in the second in which it was requeued counts as revoked. And again
                # and again: Slurm sets the two minutes at some moment after the job is in the queue.
                if pending_since[-1] - pending_since[0] < REVOKED_S:
                    return None
                self._programs.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
            again = shown["JobState"] == "RUNNING" and int(shown.get("Restarts", 0)) > scene.topology.generation
            return f"job {job} runs again, restarted {shown['Restarts']} times" if again else None

        return FaultResult(at=at, proof=self._seen(running, f"job {job} to run again", SCHEDULING_S))

    def _submit_rival(self, job: str, settings: Sequence[str], wrap: str, *of_partition: str) -> str:
        """Submit a job to a partition of higher priority, for as many nodes as `job` has; returns its id. `settings`:
        of the job's own partition; `of_partition`: of the other one."""
        shown = self._show(job)
        self._ask("scontrol", "update", f"PartitionName={shown['Partition']}", *settings)
        # Not `_ask`: the partition may be there, from an earlier fault of the flow.
        made = ("scontrol", "create", f"PartitionName={PREEMPTING}", "Nodes=ALL", "PriorityTier=10", *of_partition)
        self._programs.ask(*made)
        nodes = shown.get("NumNodes", "1").partition("-")[0]
        where = (f"--partition={PREEMPTING}", f"--nodes={nodes}", "--exclusive", "--output=/dev/null")
        return self._ask("sbatch", "--parsable", *where, f"--wrap={wrap}").strip()

    def preempt(self, arguments: Arguments, scene: Scene) -> FaultResult:
        """A job that ends at once takes every node of the flow's job, from a partition of higher priority."""
        job, at, grace_s = scene.job.job_id, self._clock.wall(), round(float(arguments.get("grace", 0.0)))
        before = self._show(job)
        settings = (f"GraceTime={grace_s}", f"PreemptMode={arguments.get('mode', 'REQUEUE')}")
        rival = self._submit_rival(job, settings, "true")

        def preempted() -> str | None:
            now = self._show(job)
            state, signs = now["JobState"], ("PreemptTime", "Restarts")
            # Not by COMPLETING: a job that ends by itself is that too.
            if state in ("PREEMPTED", "PENDING") or any(now.get(key) != before.get(key) for key in signs):
                return f"job {rival} came first: job {job} is {state}"
            if state in ("COMPLETED", "FAILED", "TIMEOUT"):
                raise FaultFailed(f"job {job} has ended by itself, before job {rival} could take its nodes: {state}")
            return None

        return FaultResult(at=at, proof=self._seen(preempted, f"job {rival} to take the nodes", SCHEDULING_S))

    def preempt_by_suspending(self, arguments: Arguments, scene: Scene) -> FaultResult:
        """A job from a partition of higher priority takes the nodes for a while, and the flow's job stands still."""
        job, at, lasts_s = scene.job.job_id, self._clock.wall(), round(float(arguments["lasts"]))
        rival = self._submit_rival(job, ["PreemptMode=SUSPEND"], f"sleep {lasts_s}", "PreemptMode=OFF")
        proof = self._reached(job, ("SUSPENDED",), f"job {rival} to take the nodes", SCHEDULING_S)
        self._reached(job, ("RUNNING",), f"job {job} to run again", lasts_s + SCHEDULING_S)
        return FaultResult(at=at, proof=f"job {rival} came first: {proof}")

    def suspend(self, arguments: Arguments, scene: Scene) -> FaultResult:
        job, at = scene.job.job_id, self._clock.wall()
        self._ask("scontrol", "suspend", job)
        proof = self._reached(job, ("SUSPENDED",), f"job {job} to be suspended", PROOF_S)
        self._clock.sleep(float(arguments["lasts"]))
        self._ask("scontrol", "resume", job)
        self._reached(job, ("RUNNING",), f"job {job} to run again", PROOF_S)
        return FaultResult(at=at, proof=proof)

    # ---- nodes

    def _set_node(self, arguments: Arguments, scene: Scene, state: str, wanted: tuple[str, ...]) -> FaultResult:
        node, at = node_of(arguments, scene.topology), self._clock.wall()
        # Slurm refuses to drain or down a node without a reason.
        reason = () if state == "RESUME" else ("Reason=nvrx-slurm",)
        self._ask("scontrol", "update", f"NodeName={node}", f"State={state}", *reason)

        def so() -> str | None:
            now = self._ask("sinfo", "--noheader", f"--nodes={node}", "--Node", "--format=%T").split()
            return f"Slurm says that {node} is {now[0]}" if now and now[0].startswith(wanted) else None

        return FaultResult(at=at, proof=self._seen(so, f"{node} to be {' or '.join(wanted)}", PROOF_S), bound=node)

    # ---- asking

    def _show(self, job: str) -> Mapping[str, str]:
        return fields_of(self._ask("scontrol", "--oneliner", "show", "job", job))

    def _ask(self, *command: str) -> str:
        output = self._programs.ask(*command)
        if not output.ok:
            raise FaultFailed(f"`{' '.join(command)}`: {output.reason}")
        return output.stdout

    def _reached(self, job: str, states: Sequence[str], what: str, within_s: float) -> str:
        """The proof that Slurm holds the job for being in one of these states. Raises WaitTimeout."""

        def look() -> str | None:
            state = self._show(job)["JobState"]
            return f"Slurm says that job {job} is {state}" if state in states else None

        return self._seen(look, what, within_s)

    def _seen(self, look: Callable[[], str | None], what: str, within_s: float) -> str:
        """What `look` returns, as soon as that is not None. Raises WaitTimeout."""
        return wait_until(look, timeout_s=within_s, what=what, clock=self._clock)
