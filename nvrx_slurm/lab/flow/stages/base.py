"""What all stages share: submitting a job, faults by table, what is left of a job, and a diagnosis of it.

A fault either happened, and a `FaultResult` says how that is known, or `inject` raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nvrx_slurm.api.handle import Job, just_submitted
from nvrx_slurm.api.submission import hand_over, prepare
from nvrx_slurm.cluster.base import ClusterName
from nvrx_slurm.errors import FaultFailed, NvrxError, WaitTimeout
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan, plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.devcluster.processes import wait_until
from nvrx_slurm.lab.faults.disk import SmallDisk
from nvrx_slurm.lab.flow.model import Flow, StageName
from nvrx_slurm.lab.flow.stages import diagnosis
from nvrx_slurm.lab.flow.stages.faults import Injector, Scene, ScriptedService, disk_faults, signal_faults
from nvrx_slurm.lab.flow.stages.processes import FaultResult, described, processes_of
from nvrx_slurm.lab.flow.stages.remote import Reach, here
from nvrx_slurm.lab.flow.topology import resolved
from nvrx_slurm.report.source import Journal
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    from nvrx_slurm.lab.flow.cleanup import CleanupList
    from nvrx_slurm.lab.flow.stages.remote_journal import RemoteJournal

log = get_logger("ci")

# Where a scripted attribution service stands in job.yaml.
SERVICE_KEY = "fault_tolerance.attribution.http_urls"

# An attempt has a ledger of its own: what it does to nodes is no evidence against them.
LEDGER_KEY = "fault_tolerance.attribution.ledger"

Diagnoses = dict[str, Callable[[], object]]


class Stage:
    """Where a flow runs. Once it is closed nothing that it started is left.

    `jobs`: the base folder of its jobs; `injectors`: the faults that it can make; `cleanup` gets everything that must
    not outlive the attempt, before it exists or right after.
    """

    name: StageName
    kind: ClusterName = "local"

    def __init__(self, flow: Flow, folder: Path, cleanup: CleanupList, clock: Clock) -> None:
        self.cleanup, self.clock = cleanup, clock
        self.job: Job | None = None
        self.jobs = folder.absolute() / "jobs"
        self._ledger = folder.absolute() / "suspects.json"
        self.injectors: dict[str, Injector] = signal_faults(lambda scene: self._reach(scene.job))
        self.killed: set[str] = set()
        self.started = contextlib.ExitStack()  # what `close` ends, the last one first
        if flow.cluster.disk is not None:
            # A process holds the disk: when it ends, the disk is gone.
            disk = SmallDisk(f"size={flow.cluster.disk}")
            self.started.callback(disk.close)
            cleanup.process(disk.pid)
            self.jobs = disk.path / "jobs"
            self.injectors |= disk_faults(disk, clock)
        self._service: ScriptedService | None = None
        if flow.cluster.attribution is not None:
            self._service = ScriptedService(flow.cluster.attribution)
            self.started.callback(self._service.close)
            cleanup.process(self._service.pid)
            self.injectors |= self._service.injectors(clock)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which children, and Slurm's programs among them, find the stage's cluster."""
        return {}

    # ---- the job

    def submit(self, flow: Flow) -> Job:
        """Submit the flow's job with its overrides. Raises what `api.submit` raises."""
        service = {} if self._service is None else {SERVICE_KEY: [self._service.url]}
        # The flow's overrides come last, and win.
        spec = load(flow.job, {LEDGER_KEY: str(self._ledger), **service, **dict(flow.overrides)}).spec
        made = plan(spec, folder=self.jobs, job_file=flow.job)
        # The plan names the base folder as it is given: the path to a small disk must not be resolved.
        made = msgspec.structs.replace(made, folder=str(self.jobs))
        job_id = self._hand_over(spec, made)
        self.job = just_submitted(job_id, folder=self.jobs, cluster=self.kind, clock=self.clock)
        # At once: from now on the job must not outlive the attempt.
        self.cleanup.job(self.job)
        return self.job

    def _hand_over(self, spec: JobSpec, made: Plan) -> str:
        return hand_over(prepare(spec, made, cluster=self.kind), cluster=self.kind)

    def journal(self, folder: JobFolder) -> Journal | RemoteJournal:
        """The job's journal as it grows, with heartbeats where the stage can read them."""
        return Journal(folder, beats=True, clock=self.clock)

    def cancel(self, job: Job) -> None:
        """Ask the job to end. Raises SlurmUnreachable."""
        job.cancel()

    # ---- faults

    def _reach(self, job: Job) -> Reach:
        """How the job's processes are reached."""
        return here(self.clock)

    def inject(self, action: str, arguments: Mapping[str, Any], scene: Scene) -> FaultResult:
        """Make the fault happen, and prove that it did. Raises FaultFailed; never returns without a proof."""
        if action not in self.injectors:
            raise FaultFailed(f"{action} cannot be done on the stage {self.name}")
        try:
            hit = self.injectors[action](resolved(arguments, scene.bindings), scene)
        except (NvrxError, OSError) as error:
            raise FaultFailed(str(error)) from error
        self._note_killed(action, hit, scene)
        return hit

    def _note_killed(self, action: str, hit: FaultResult, scene: Scene) -> None:
        """Nodes on which no process of the job is left to clear away its folders in memory."""
        if action in ("kill_node", "kill_agent"):
            self.killed.add(str(hit.bound))

    # ---- the end

    def gone(self, job: Job, within_s: float) -> list[str]:
        """What is left of an ended job after so long, in words, with pids and command lines. Empty: nothing."""
        with contextlib.suppress(WaitTimeout):
            wait_until(lambda: not self._left(job), timeout_s=within_s, what="nothing to be left", clock=self.clock)
            return []
        return self._left(job)

    def _left(self, job: Job) -> list[str]:
        processes = [f"{described(pid)} still runs" for pid in processes_of(job.folder, self._marks(job))]
        # The folders only once no process is left, which may be about to clear them away.
        return processes or diagnosis.folders_left(job, self.killed)

    def _marks(self, job: Job) -> Mapping[str, str] | None:
        """Variables that only processes of the job have on this machine, and all of them do; None: it has none."""
        return {"NVRX_JOB_ID": job.job_id}

    def diagnose(self, folder: Path) -> None:
        """Write all that can be known of the job and its Slurm into files of the folder. Bounded; raises nothing."""
        if self.job is not None:
            try:
                diagnosis.take(self._diagnoses(self.job, folder), folder)
            except OSError as error:
                log.error("no diagnosis could be written: %s", error)

    def _diagnoses(self, job: Job, folder: Path) -> Diagnoses:
        """What to find out, by the name of the folder that it goes to."""
        logs, reach = [*diagnosis.logs_of(job), *self._logs()], self._reach(job)
        found: Diagnoses = {
            "workers": partial(diagnosis.worker_stacks, job, folder / "workers"),
            "logs": partial(diagnosis.log_tails, logs, folder / "logs"),
        }
        for place in self._places(job):
            name = f"processes-{place}" if place else "processes"
            found[name] = partial(diagnosis.process_accounts, job, reach, place, folder / "processes")
        return found

    def _places(self, job: Job) -> tuple[str, ...]:
        """Where to look for the job's processes, one node after the other; an empty name: on this machine."""
        return ("",)

    def _logs(self) -> list[Path]:
        """Logs of the stage's own."""
        return []

    def close(self) -> None:
        """End all that the stage started."""
        self.started.close()
