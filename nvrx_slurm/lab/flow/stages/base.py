"""What a stage can do for a flow: the port that this machine, a development cluster and a site's Slurm stand behind.

A fault either happened, and a `FaultResult` says how that is known, or `inject` raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nvrx_slurm.lab.flow.topology import JobTopology

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import Job
    from nvrx_slurm.journal.folder import JobFolder
    from nvrx_slurm.journal.records import Entry
    from nvrx_slurm.lab.flow.model import Flow, StageName
    from nvrx_slurm.report.model import Heard


@dataclass(frozen=True, slots=True)
class FaultResult:
    """A fault that happened. `at`: seconds since the epoch, right before the fault; `proof`: how that is known, in
    words; `bound`: the node's name, or the rank, that was hit: what `as:` binds."""

    at: float
    proof: str
    bound: str | int | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """What a fault may look at: the job, its journal so far, and the flow's captures."""

    job: Job
    folder: JobFolder
    topology: JobTopology
    bindings: Mapping[str, Any]


class CleanupRecorder(Protocol):
    """Records everything that must not outlive the attempt, before it exists or right after."""

    def cluster(self, name: str) -> None:
        """A development cluster is about to be brought up."""
        ...

    def job(self, job: Job, environment: Mapping[str, str]) -> None:
        """A job was submitted; `environment` reaches its Slurm."""
        ...

    def process(self, pid: int) -> None:
        """This process holds a disk or a network; it, and all below it, must end."""
        ...


class JournalFeed(Protocol):
    """The journal as it grows (`report.source.Journal`)."""

    n: int
    ended: bool
    store_error: str | None

    def poll(self, wait_s: float = 0.0) -> list[Entry | Heard]: ...
    def catch_up(self) -> list[Entry | Heard]: ...
    def store_time(self) -> float | None: ...
    def close(self) -> None: ...


class Stage(Protocol):
    """Where a flow runs. A context manager: at its end nothing that it started is left."""

    name: StageName

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which children, and Slurm's programs among them, find the stage's cluster."""
        ...

    def submit(self, flow: Flow, settings: Mapping[str, Any] | None = None) -> Job:
        """Submit the flow's job with its overrides. `settings`: dotted keys of job.yaml, stronger than these.

        Raises what `api.submit` raises.
        """
        ...

    def journal(self, folder: JobFolder) -> JournalFeed:
        """The job's journal as it grows, with heartbeats where the stage can read them."""
        ...

    def inject(self, action: str, arguments: Mapping[str, Any], scene: Scene) -> FaultResult:
        """Make the fault happen, and prove that it did. Raises FaultFailed; never returns without a proof."""
        ...

    def gone(self, job: Job, within_s: float) -> list[str]:
        """What is left of an ended job after so long, in words, with pids and command lines. Empty: nothing."""
        ...

    def diagnose(self, folder: Path) -> None:
        """Write all that can be known of the job and its Slurm into files of the folder. Bounded; raises nothing."""
        ...

    def cancel(self, job: Job) -> None:
        """Ask the job to end. Raises SlurmUnreachable."""
        ...

    def close(self) -> None:
        """End all that the stage started."""
        ...

    def __enter__(self) -> Stage: ...
    def __exit__(self, *_: object) -> None: ...
