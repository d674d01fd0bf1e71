"""Job specifications from keys alone, without a file."""

from __future__ import annotations

from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.reading import read


def job_spec(keys: dict[str, object]) -> JobSpec:
    """The specification that a job.yaml with these keys gives."""
    spec, complaints = read(JobSpec, keys)
    assert spec is not None, complaints
    return spec
