"""Where flows run: this machine, a Slurm started for one attempt, the site's Slurm; and the faults that happen there.

| module | what it does |
|---|---|
| `base.py` | `Stage`: what all of them share |
| `local.py`, `dev.py`, `slurm.py` | the stages, with the faults that only they can make |
| `faults.py` | the faults that need no Slurm, each with its proof |
| `processes.py`, `remote.py` | signals to processes, on this machine or on their own node |
| `diagnosis.py` | leftovers of a job; files about one that went wrong |
| `remote_journal.py` | the journal of a job whose store only processes in another network reach |
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.cluster.commands import SystemRunner
from nvrx_slurm.errors import ConfigError, MissingProgramError
from nvrx_slurm.jobspec.reading import together
from nvrx_slurm.lab.devcluster.programs import SLURM_PROGRAMS, find, require
from nvrx_slurm.lab.flow.faults import FAULTS
from nvrx_slurm.lab.flow.model import STAGES, Flow, StageName
from nvrx_slurm.util.clock import SystemClock

if TYPE_CHECKING:
    from nvrx_slurm.lab.flow.cleanup import CleanupList
    from nvrx_slurm.lab.flow.stages.base import Stage

ANSWER_S = 10.0


def open_stage(flow: Flow, stage: StageName, folder: Path, cleanup: CleanupList) -> Stage:
    """Start what the flow needs: a development cluster, a disk, a network. `folder`: the attempt's.

    Raises what `check` raises, and MissingProgramError, WaitTimeout, NvrxError; nothing is left behind then.
    """
    check(flow, stage)
    make: type[Stage]
    # Imported only now: `ci check` needs neither Slurm nor networks.
    if stage == "slurm":
        from nvrx_slurm.lab.flow.stages.slurm import SlurmStage

        make = SlurmStage
    elif stage == "dev":
        from nvrx_slurm.lab.flow.stages.dev import DevStage

        make = DevStage
    else:
        from nvrx_slurm.lab.flow.stages.local import LocalStage, OwnNetworkStage

        make = OwnNetworkStage if flow.cluster.network else LocalStage
    return make(flow, folder, cleanup, SystemClock())


def check(flow: Flow, stage: StageName) -> None:
    """Raises ConfigError with all that this stage cannot do for the flow: each with its line, and where it can be
    done."""
    cluster, has_disk = flow.cluster, flow.cluster.disk is not None
    needs: tuple[tuple[object, str, str, tuple[StageName, ...]], ...] = (
        (True, "on", "this flow", flow.on),
        (has_disk, "cluster.disk", "a small disk", ("local", "dev")),
        (cluster.attribution is not None, "cluster.attribution", "a scripted attribution service", ("local", "dev")),
        (cluster.network, "cluster.network", "a network of each node's own", ("local",)),
        (cluster.network and has_disk, "cluster.disk", "a small disk beside networks of their own", ()),
        # Without Slurm there is nothing to set.
        (stage != "local" and cluster.settings, "cluster.settings", "a slurm.conf of the flow's own", ("dev",)),
    )
    # Line, key, what, and the stages that can do it.
    asked = [(flow.lines.get(key, 1), key, what, able) for is_asked, key, what, able in needs if is_asked]
    for fault in flow.faults:
        kind = FAULTS[fault.action]
        asked.append((fault.line, fault.action, f"the fault {fault.action}", kind.stages))
        if fault.action == "restore_node" and any(fault.restores(other) for other in flow.faults):
            asked.append((fault.line, fault.action, "a killed node that boots again", ("dev",)))
        if fault.arguments.get("batch_host") and kind.needs != "network":
            key = f"{fault.action}.batch_host"
            asked.append((fault.line, key, "a node that the batch host runs on", ("dev", "slurm")))

    found = []
    for line, key, what, able in asked:
        if stage not in able:
            where = [name for name in STAGES if name in able]
            on = (
                f"cannot be had on the stage {stage}; it can on {' and '.join(where)}: say `on: [{', '.join(where)}]`"
            )
            message = f"{what} {on}" if where else f"{what}: no stage can do that"
            found.append(ConfigError(message, file=str(flow.file), line=line, key=key))
    if found:
        raise together(found)


def choose_stage() -> StageName:
    """`slurm` if its slurmctld answers, else `dev` if its programs are installed. Raises MissingProgramError."""
    if find("sbatch"):
        with contextlib.suppress(FileNotFoundError):
            if SystemRunner()(("scontrol", "ping"), timeout_s=ANSWER_S).ok:
                return "slurm"
    try:
        require(SLURM_PROGRAMS)
    except MissingProgramError as error:
        raise MissingProgramError(f"{error}; or run the flows without Slurm: --on local") from None
    return "dev"
