"""Where flows run: this machine, a Slurm started for one attempt, the site's Slurm; and the faults that happen there.

| module | what it does |
|---|---|
| `base.py` | the port: `Stage`, and what goes in and out of it |
| `faults.py`, `slurm.py`, `own_network.py` | the faults, each with its proof |
| `processes.py`, `remote.py` | signals to processes, on this machine or on their own node |
| `diagnosis.py` | leftovers of a job; files about one that went wrong |
| `local.py`, `own_network.py`, `dev.py`, `slurm.py` | the stages |
| `remote_journal.py` | the journal of a job whose store only processes in another network reach |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from nvrx_slurm.cluster.commands import SystemRunner
from nvrx_slurm.errors import ConfigError, MissingProgramError
from nvrx_slurm.lab.devcluster.programs import SLURM_PROGRAMS, find, require
from nvrx_slurm.lab.flow.faults import FAULTS
from nvrx_slurm.lab.flow.model import STAGES, Flow, StageName
from nvrx_slurm.lab.flow.stages.base import CleanupRecorder, FaultResult, Scene, Stage
from nvrx_slurm.util.clock import Clock, SystemClock

__all__ = ["CleanupRecorder", "FaultResult", "Scene", "Stage", "check", "open_stage"]


def open_stage(
    flow: Flow, stage: StageName, folder: Path, cleanup: CleanupRecorder, *, clock: Clock | None = None
) -> Stage:
    """Start what the flow needs: a development cluster, a disk, a network. `folder`: the attempt's.

    Raises what `check` raises, and MissingProgramError, WaitTimeout, NvrxError; nothing is left behind then.
    """
    check(flow, stage)
    make, clock = _stage_class(flow, stage), clock or SystemClock()
    return make(flow, folder, cleanup, clock)


def _stage_class(flow: Flow, stage: StageName) -> Callable[[Flow, Path, CleanupRecorder, Clock], Stage]:
    """Imported only now: who merely checks flows needs neither Slurm nor networks."""
    if stage == "slurm":
        from nvrx_slurm.lab.flow.stages.slurm import SlurmStage

        return SlurmStage
    if stage == "dev":
        from nvrx_slurm.lab.flow.stages.dev import DevStage

        return DevStage
    if flow.needs.own_network:
        from nvrx_slurm.lab.flow.stages.own_network import OwnNetworkStage

        return OwnNetworkStage
    from nvrx_slurm.lab.flow.stages.local import LocalStage

    return LocalStage


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


ANSWER_S = 10.0


def choose_stage() -> StageName:
    """`slurm` if its slurmctld answers, else `dev` if its programs are installed. Raises MissingProgramError."""
    if find("sbatch") and _answers():
        return "slurm"
    try:
        require(SLURM_PROGRAMS)
    except MissingProgramError as error:
        raise MissingProgramError(f"{error}; or run the flows without Slurm: --on local") from None
    return "dev"


def _answers() -> bool:
    try:
        return SystemRunner()(("scontrol", "ping"), timeout_s=ANSWER_S).ok
    except FileNotFoundError:
        return False
