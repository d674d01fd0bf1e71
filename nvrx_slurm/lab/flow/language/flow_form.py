"""The keys of a flow file. What stands below `faults` and `expect`: see `expectation_form` and `fault_form`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from nvrx_slurm.jobspec.values import Duration, Line, Name, Nodes, Size
from nvrx_slurm.lab.flow.language.block import FlowBlock
from nvrx_slurm.lab.flow.language.model import STAGES, Limits, StageName


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _some(stages: tuple[StageName, ...]) -> tuple[StageName, ...]:
    if not stages:
        raise ValueError(f"names no stage; leave it out for all of {', '.join(STAGES)}")
    return stages


def _disk_size(value: object) -> object:
    """`4m` as mount(8) has it."""
    is_short = isinstance(value, str) and value[-1:].lower() in ("k", "m", "g")
    return f"{value}iB" if is_short else value


Disk = Annotated[Size, BeforeValidator(_disk_size), WithJsonSchema({"type": "string", "examples": ["4m", "64MiB"]})]


def _behaviour(text: str) -> str:
    from nvrx_slurm.lab.faults.attribution_server import behaviour

    behaviour(text)
    return text


Behaviour = Annotated[Line, AfterValidator(_behaviour)]
Stages = Annotated[
    tuple[StageName, ...],
    BeforeValidator(_one_or_more),
    AfterValidator(_some),
    WithJsonSchema({"type": ["array", "string"], "items": {"enum": list(STAGES)}}),
]


class ClusterNeeds(FlowBlock):
    """What the flow needs of a cluster."""

    nodes: Nodes | None = None
    """How many nodes; not set: as many as the job asks for. A `dev` cluster gets that many."""
    settings: dict[str, Line] = Field(default_factory=dict)
    """Lines of `slurm.conf`, such as `KillWait: 10`. On `dev` only."""
    disk: Disk | None = None
    """The job's folder lies on a disk of this size, such as `4m`. On `local` and `dev` only."""
    attribution: Behaviour | None = None
    """A scripted attribution service that the job asks, and how it behaves: `stop`, `restart`, `garbage`, `hang`,
    `slow:8s`, … On `local` and `dev` only."""
    network: Literal["own"] | None = None
    """Each node has a network of its own, which can be cut and slowed. On `local` only."""


class FlowLimits(FlowBlock):
    """How long it may take."""

    wall: Duration = Limits().wall_s
    """One attempt, its clean-up aside."""


class FlowFile(FlowBlock):
    """A flow: a job, faults that really happen to it, and what its journal must then say."""

    name: Name | None = None
    """What reports call it. Not set: the file's name without `.yaml`."""
    about: Line = ""
    """One sentence: what holds if it passes."""
    job: Line
    """The job.yaml to submit; relative to the folder of the flow file."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of job.yaml that are otherwise here, nested or dotted (`slurm.time: 2m`). Checked as job.yaml is."""
    on: Stages = STAGES
    """Where it can run: `local` (this machine, no Slurm), `dev` (a Slurm started for it alone), `slurm` (the site's).
    Elsewhere it is left out, and said to be."""
    cluster: ClusterNeeds = ClusterNeeds()
    """What it needs of a cluster."""
    faults: list[Any] = Field(default_factory=list)
    """What happens to the job, and when."""
    expect: list[Any]
    """What the journal must say, in this order."""
    limits: FlowLimits = FlowLimits()
    """How long it may take: `wall`, for one attempt, its clean-up aside. Not set: two minutes."""
