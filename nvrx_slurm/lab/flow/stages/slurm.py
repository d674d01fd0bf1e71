"""The site's Slurm as a stage: only what a user may do there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from nvrx_slurm.api.handle import ClusterName, Job
from nvrx_slurm.cluster.commands import SystemRunner
from nvrx_slurm.cluster.slurm import SlurmCluster
from nvrx_slurm.errors import SlurmUnreachable
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.flow.language.model import Flow, StageName
from nvrx_slurm.lab.flow.stages import leftovers
from nvrx_slurm.lab.flow.stages.base import Hit, Hold, Scene
from nvrx_slurm.lab.flow.stages.common import CommonStage, Diagnoses
from nvrx_slurm.lab.flow.stages.diagnosis import process_accounts, slurm_answers
from nvrx_slurm.lab.flow.stages.reach import Reach, by_command, overlapping_step
from nvrx_slurm.lab.flow.stages.slurm_strikes import SlurmStrikes
from nvrx_slurm.lab.flow.stages.strikes import node_strikes, signal_strikes
from nvrx_slurm.util.clock import Clock


class SlurmStage(CommonStage):
    """Jobs on the Slurm that this process's environment leads to; their processes are reached by a step of theirs."""

    name: StageName = "slurm"
    kind: ClusterName = "slurm"

    def __init__(self, flow: Flow, folder: Path, hold: Hold, clock: Clock) -> None:
        super().__init__(flow, folder, hold, clock)
        self._runner = SystemRunner(self.environment)
        self.strikes |= signal_strikes(lambda scene: self._reach(scene.job))
        self.strikes |= node_strikes(lambda scene: self._reach(scene.job))
        self.strikes |= SlurmStrikes(self._runner, clock).table()

    def _reach(self, job: Job) -> Reach:
        return by_command(overlapping_step(job.job_id), self.environment)

    def _note_killed(self, action: str, hit: Hit, scene: Scene) -> None:
        """When a batch script dies, Slurm kills the job's steps some seconds later, agents that still wait for the
        control plane among them."""
        super()._note_killed(action, hit, scene)
        nodes = scene.world.nodes  # none while the job is pending
        if action == "kill_batch_host" or (action == "kill_node" and hit.bound in nodes[:1]):
            self.killed |= set(nodes)

    def _left(self) -> list[str]:
        try:
            queued = leftovers.queue_left(self.its_job, SlurmCluster(self._runner, patience_s=0))
        except SlurmUnreachable as error:
            queued = [f"whether job {self.its_job.job_id} is still in the queue cannot be told: {error}"]
        return queued or super()._left()

    def _marks(self) -> Mapping[str, str] | None:
        """Several clusters on one machine each have a job 1; SLURM_CONF tells them apart."""
        conf = self.environment.get("SLURM_CONF") or env.get("SLURM_CONF")
        return {"SLURM_JOB_ID": self.its_job.job_id, "SLURM_CONF": conf} if conf else None

    def _places(self) -> tuple[str, ...]:
        """Where to look for the job's processes, one by one."""
        info = JobFolder(self.its_job.folder).read_info()
        return info.nodes if info else ()

    def _diagnoses(self, folder: Path) -> Diagnoses:
        job, out = self.its_job, folder / "processes"
        accounts: Diagnoses = {
            f"processes-{place}": partial(process_accounts, job, self._reach(job), place, out)
            for place in self._places()
        }
        slurm = partial(slurm_answers, self._runner, folder / "slurm")
        return super()._diagnoses(folder) | accounts | {"slurm": slurm}
