"""Keeps long multi-node Slurm jobs alive: hot spares, fast restarts, and a journal that says why.

    import nvrx_slurm as nv

    job = nv.submit(nv.load_job("job.yaml"), spares=2)
    code = job.wait(timeout=3600)

The names below are imported when they are first used: the agents and the workers, which import this package too, then
load nothing of Slurm, msgspec or redis.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvrx_slurm.api.analysis import analyze
    from nvrx_slurm.api.handle import Job, job, jobs
    from nvrx_slurm.api.submission import submit
    from nvrx_slurm.cluster.states import JobState
    from nvrx_slurm.errors import NvrxError, WaitTimeout
    from nvrx_slurm.jobspec.load import load_job
    from nvrx_slurm.jobspec.model import JobSpec

__all__ = [
    "Job",
    "JobSpec",
    "JobState",
    "NvrxError",
    "WaitTimeout",
    "analyze",
    "job",
    "jobs",
    "load_job",
    "submit",
]

_HOMES = {
    "Job": "nvrx_slurm.api.handle",
    "JobSpec": "nvrx_slurm.jobspec.model",
    "JobState": "nvrx_slurm.cluster.states",
    "NvrxError": "nvrx_slurm.errors",
    "WaitTimeout": "nvrx_slurm.errors",
    "analyze": "nvrx_slurm.api.analysis",
    "job": "nvrx_slurm.api.handle",
    "jobs": "nvrx_slurm.api.handle",
    "load_job": "nvrx_slurm.jobspec.load",
    "submit": "nvrx_slurm.api.submission",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
