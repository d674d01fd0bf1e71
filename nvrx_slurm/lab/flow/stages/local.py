"""What all stages share: submitting, faults by table, leftovers. And this machine as a stage, its nodes processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from nvrx_slurm.api.handle import ClusterName, Job, just_submitted
from nvrx_slurm.api.prepared import prepare
from nvrx_slurm.api.submission import hand_over
from nvrx_slurm.errors import FaultFailed, NvrxError
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan, plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.faults.disk import SmallDisk
from nvrx_slurm.lab.flow.model import Flow, StageName
from nvrx_slurm.lab.flow.stages import diagnosis
from nvrx_slurm.lab.flow.stages.base import CleanupRecorder, FaultResult, JournalFeed, Scene
from nvrx_slurm.lab.flow.stages.diagnosis import process_accounts
from nvrx_slurm.lab.flow.stages.faults import (
    Injector,
    ScriptedService,
    disk_faults,
    inject_signal,
    node_faults,
    signal_faults,
)
from nvrx_slurm.lab.flow.stages.remote import here
from nvrx_slurm.lab.flow.topology import Arguments, resolved
from nvrx_slurm.report.source import Journal
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import AGAIN_S

log = get_logger("ci")

SERVICE_KEY = "fault_tolerance.attribution.http_urls"
"""Where a scripted attribution service stands in job.yaml."""

LEDGER_KEY = "fault_tolerance.attribution.ledger"
"""An attempt has a ledger of its own: what it does to nodes is no evidence against them."""

Diagnoses = dict[str, Callable[[], object]]


class CommonStage:
    """A stage without faults of its own. `jobs`: the base folder of its jobs."""

    name: StageName
    kind: ClusterName = "local"

    def __init__(self, flow: Flow, folder: Path, cleanup: CleanupRecorder, clock: Clock) -> None:
        self.cleanup, self.clock = cleanup, clock
        self.job: Job | None = None
        self.jobs = folder.absolute() / "jobs"
        self._ledger = folder.absolute() / "suspects.json"
        self.injectors: dict[str, Injector] = {}
        self.killed: set[str] = set()
        self._disk: SmallDisk | None = None
        if flow.needs.disk_bytes is not None:
            self._disk = SmallDisk(f"size={flow.needs.disk_bytes}")
            cleanup.process(self._disk.pid)
            self.jobs = self._disk.path / "jobs"
            self.injectors |= disk_faults(self._disk, clock)
        self._service: ScriptedService | None = None
        if flow.needs.attribution is not None:
            self._service = ScriptedService(flow.needs.attribution)
            cleanup.process(self._service.pid)
            self.injectors |= self._service.injectors(clock)

    @property
    def environment(self) -> Mapping[str, str]:
        return {}

    # ---- the job

    def submit(self, flow: Flow, settings: Mapping[str, Any] | None = None) -> Job:
        service = {} if self._service is None else {SERVICE_KEY: [self._service.url]}
        own = {LEDGER_KEY: str(self._ledger), **service}
        spec = load(flow.job, {**own, **dict(flow.overrides), **(settings or {})}).spec
        made = plan(spec, folder=self.jobs, job_file=flow.job)
        # The plan names the base folder as it is given: the path to a small disk must not be resolved.
        made = msgspec.structs.replace(made, folder=str(self.jobs))
        job_id = self._hand_over(spec, made)
        self.job = just_submitted(job_id, folder=self.jobs, cluster=self.kind, clock=self.clock)
        self.cleanup.job(self.job, self.environment)
        return self.job

    def _hand_over(self, spec: JobSpec, made: Plan) -> str:
        return hand_over(prepare(spec, made, cluster=self.kind), cluster=self.kind)

    @property
    def its_job(self) -> Job:
        assert self.job is not None, "no job was submitted"
        return self.job

    def journal(self, folder: JobFolder) -> JournalFeed:
        return Journal(folder, beats=True, clock=self.clock)

    def cancel(self, job: Job) -> None:
        job.cancel()

    # ---- faults

    def inject(self, action: str, arguments: Mapping[str, Any], scene: Scene) -> FaultResult:
        if action not in self.injectors:
            raise FaultFailed(f"{action} cannot be done on the stage {self.name}")
        try:
            hit = self.injectors[action](resolved(arguments, scene.bindings), scene)
        except FaultFailed:
            raise
        except (NvrxError, OSError) as error:
            raise FaultFailed(f"{action}: {error}") from error
        self._note_killed(action, hit, scene)
        return hit

    def _note_killed(self, action: str, hit: FaultResult, scene: Scene) -> None:
        """Nodes on which no process of the job is left to clear away its folders in memory."""
        if action in ("kill_node", "kill_agent"):
            self.killed.add(str(hit.bound))

    # ---- the end

    def gone(self, job: Job, within_s: float) -> list[str]:
        return diagnosis.after(self._left, within_s, self.clock)

    def _left(self) -> list[str]:
        left = diagnosis.processes_left(self.its_job, self._marks())
        return left or diagnosis.folders_left(self.its_job, self.killed)

    def _marks(self) -> Mapping[str, str] | None:
        """Variables that only processes of the job have on this machine, and all of them do; None: it has none."""
        return {"NVRX_JOB_ID": self.its_job.job_id}

    def diagnose(self, folder: Path) -> None:
        if self.job is not None:
            try:
                diagnosis.take(self._diagnoses(folder), folder)
            except OSError as error:
                log.error("no diagnosis could be written: %s", error)

    def _diagnoses(self, folder: Path) -> Diagnoses:
        """What to find out, by the name of the folder that it goes to."""
        job = self.its_job
        logs = [*diagnosis.logs_of(job), *self._logs()]
        return {
            "workers": partial(diagnosis.worker_stacks, job, folder / "workers"),
            "logs": partial(diagnosis.log_tails, logs, folder / "logs"),
        }

    def _logs(self) -> list[Path]:
        """Logs of the stage's own."""
        return []

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
        if self._service is not None:
            self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalStage(CommonStage):
    """Jobs of `nvrx-slurm submit --local`."""

    name: StageName = "local"

    def __init__(self, flow: Flow, folder: Path, cleanup: CleanupRecorder, clock: Clock) -> None:
        super().__init__(flow, folder, cleanup, clock)
        self._here = here(clock)
        self.injectors |= signal_faults(lambda _: self._here) | node_faults(lambda _: self._here)
        self.injectors["scancel"] = self._cancel

    def _cancel(self, arguments: Arguments, scene: Scene) -> FaultResult:
        """What scancel does on Slurm: SIGTERM, or another signal, to the batch host."""
        name = str(arguments.get("signal") or "SIGTERM")
        hit = inject_signal("signal", "batch_host", arguments, scene, self._here, name)
        if arguments.get("twice"):
            self.clock.sleep(AGAIN_S * 1.2)  # sooner, the job takes the second for the first
            inject_signal("signal", "batch_host", arguments, scene, self._here, name)
        return hit

    def _diagnoses(self, folder: Path) -> Diagnoses:
        accounts = partial(process_accounts, self.its_job, self._here, "", folder / "processes")
        return super()._diagnoses(folder) | {"processes": accounts}
