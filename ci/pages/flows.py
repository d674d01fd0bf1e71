"""docs/flows.md: the tables of keys and faults, from the model itself."""

from __future__ import annotations

from typing import Any

from nvrx_slurm.jobspec.reading import Block, as_written, keys_of
from nvrx_slurm.lab.flow.faults import (
    FAULTS,
    NEEDS,
    Cancel,
    NodeTarget,
    Preempt,
    SlowLink,
    Suspend,
    TimeLimit,
    WorkerTarget,
)
from nvrx_slurm.lab.flow.load import ClusterNeeds, FlowFile
from nvrx_slurm.lab.flow.matching import LAG_S
from nvrx_slurm.lab.flow.model import STAGES
from nvrx_slurm.util.durations import words

_ARGUMENTS: dict[str, type[Block]] = {
    "A node": NodeTarget,
    "A worker": WorkerTarget,
    "`slow_link`, beside a node": SlowLink,
    "`scancel`": Cancel,
    "`preempt`": Preempt,
    "`shorten_time_limit`": TimeLimit,
    "`suspend`, `preempt_by_suspending`": Suspend,
}
_KINDS: dict[type[Block], str] = {NodeTarget: "a node", WorkerTarget: "a worker"}


def parts() -> dict[str, str]:
    """The parts of the page."""
    faults = ["| fault | takes | | on |", "|---|---|---|---|"]
    for name, kind in FAULTS.items():
        takes = _KINDS.get(kind.arguments, "see below") if kind.arguments.__struct_fields__ else ""
        where = "all" if kind.stages == STAGES else ", ".join(f"`{stage}`" for stage in kind.stages)
        needs = "" if kind.needs is None else f", with `cluster: {{{NEEDS[kind.needs]}}}`"
        faults.append(f"| `{name}` | {takes} | {kind.about} | {where}{needs} |")
    arguments = (_keys(f"#### {title}", block) for title, block in _ARGUMENTS.items())
    return {
        "keys": "\n".join([_keys("## The keys", FlowFile), _keys("### `cluster`", ClusterNeeds)]),
        "lag": words(LAG_S),
        "faults": "\n".join([*faults, "", *arguments]),
    }


def _keys(title: str, block: type[Block]) -> str:
    rows = []
    inherited = getattr(block.__base__, "__struct_fields__", ())
    for name, key in keys_of(block).items():
        if name in inherited:
            continue
        value: Any = None if key.is_required else as_written(key.rule, key.default)
        if key.is_required:
            default = "required"
        elif value == list(STAGES):
            default = "all"
        else:
            default = f"`{value}`" if value and not isinstance(value, (dict, list)) else ""
        about = (key.rule.about or "").replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{name}` | {default} | {about} |")
    return "\n".join([title, "", "| key | default | |", "|---|---|---|", *rows, ""])
