"""The keys of a flow file. What stands below `faults` and `expect`: see `expectation_form` and `fault_form`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import field

from nvrx_slurm.jobspec.reading import After, Before, Block, Schema
from nvrx_slurm.jobspec.values import Duration, Line, Name, Nodes, Size
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


Disk = Annotated[Size, Before(_disk_size), Schema({"type": "string", "examples": ["4m", "64MiB"]})]


def _behaviour(text: str) -> str:
    from nvrx_slurm.lab.faults.attribution_server import behaviour

    behaviour(text)
    return text


Behaviour = Annotated[Line, After(_behaviour)]
Stages = Annotated[
    tuple[StageName, ...],
    Before(_one_or_more),
    After(_some),
    Schema({"type": ["array", "string"], "items": {"enum": list(STAGES)}}),
]


class ClusterNeeds(Block, frozen=True, kw_only=True):
    """What the flow needs of a cluster."""

    nodes: Annotated[
        Nodes | None, "How many nodes; not set: as many as the job asks for. A `dev` cluster gets that many."
    ] = None
    settings: Annotated[dict[str, Line], "Lines of `slurm.conf`, such as `KillWait: 10`. On `dev` only."] = field(
        default_factory=dict
    )
    disk: Annotated[
        Disk | None, "The job's folder lies on a disk of this size, such as `4m`. On `local` and `dev` only."
    ] = None
    attribution: Annotated[
        Behaviour | None,
        "A scripted attribution service that the job asks, and how it behaves: `stop`, `restart`, "
        "`garbage`, `hang`, `slow:8s`, … On `local` and `dev` only.",
    ] = None
    network: Annotated[
        Literal["own"] | None, "Each node has a network of its own, which can be cut and slowed. On `local` only."
    ] = None


class FlowLimits(Block, frozen=True, kw_only=True):
    """How long it may take."""

    wall: Annotated[Duration, "One attempt, its clean-up aside."] = Limits().wall_s


class FlowFile(Block, frozen=True, kw_only=True):
    """A flow: a job, faults that really happen to it, and what its journal must then say."""

    name: Annotated[Name | None, "What reports call it. Not set: the file's name without `.yaml`."] = None
    about: Annotated[Line, "One sentence: what holds if it passes."] = ""
    job: Annotated[Line, "The job.yaml to submit; relative to the folder of the flow file."]
    overrides: Annotated[
        dict[str, Any],
        "Keys of job.yaml that are otherwise here, nested or dotted (`slurm.time: 2m`). Checked as job.yaml is.",
    ] = field(default_factory=dict)
    on: Annotated[
        Stages,
        "Where it can run: `local` (this machine, no Slurm), `dev` (a Slurm started for it alone), "
        "`slurm` (the site's). Elsewhere it is left out, and said to be.",
    ] = STAGES
    cluster: Annotated[ClusterNeeds, "What it needs of a cluster."] = ClusterNeeds()
    faults: Annotated[tuple[Any, ...], "What happens to the job, and when."] = ()
    expect: Annotated[tuple[Any, ...], "What the journal must say, in this order."]
    limits: Annotated[
        FlowLimits, "How long it may take: `wall`, for one attempt, its clean-up aside. Not set: two minutes."
    ] = FlowLimits()
