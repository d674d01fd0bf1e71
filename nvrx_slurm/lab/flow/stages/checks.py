"""Whether a flow can run on a stage: what can be said before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.lab.flow.language.faults import FAULTS
from nvrx_slurm.lab.flow.language.model import STAGES, Flow, StageName


def check(flow: Flow, stage: StageName) -> None:
    """Raises ConfigError with all that this stage cannot do for the flow: each with its line, and where it can be
    done."""
    found = [
        ConfigError(_sentence(why, able, stage), file=str(flow.file), line=line, key=key)
        for line, key, why, able in _misfits(flow, stage)
        if stage not in able
    ]
    if len(found) == 1:
        raise found[0]
    if found:
        raise ConfigError("\n  ".join([f"{len(found)} problems:", *map(str, found)]))


def _misfits(flow: Flow, stage: StageName) -> Iterator[tuple[int, str, str, tuple[StageName, ...]]]:
    """The line, the key, what is asked for, and the stages that can do it; of all that is asked for."""
    needs = flow.needs
    yield flow.line, "on", "this flow", flow.on
    if needs.disk_bytes is not None:
        yield flow.line, "cluster.disk", "a small disk", ("local", "dev")
    if needs.attribution is not None:
        yield flow.line, "cluster.attribution", "a scripted attribution service", ("local", "dev")
    if needs.own_network:
        yield flow.line, "cluster.network", "a network of each node's own", ("local",)
    if needs.own_network and needs.disk_bytes is not None:
        yield flow.line, "cluster.disk", "a small disk beside networks of their own", ()
    if needs.settings and stage != "local":  # where there is no Slurm there is nothing to set
        yield flow.line, "cluster.settings", "a slurm.conf of the flow's own", ("dev",)
    for fault in flow.faults:
        yield fault.line, fault.action, f"the fault {fault.action}", FAULTS[fault.action].stages
        if fault.arguments.get("batch_host") and FAULTS[fault.action].needs != "network":
            able: tuple[StageName, ...] = ("dev", "slurm")
            yield fault.line, f"{fault.action}.batch_host", "a node that the batch host runs on", able


def _sentence(what: str, able: tuple[StageName, ...], stage: StageName) -> str:
    where = [name for name in STAGES if name in able]
    if not where:
        return f"{what}: no stage can do that"
    return (
        f"{what} cannot be had on the stage {stage}; it can on {' and '.join(where)}: say `on: [{', '.join(where)}]`"
    )
