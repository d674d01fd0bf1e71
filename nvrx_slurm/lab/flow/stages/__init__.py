"""Where flows run: this machine, a Slurm started for one attempt, the site's Slurm; and the faults that happen there.

| module | what it does |
|---|---|
| `base.py` | the port: `Stage`, and what goes in and out of it |
| `checks.py` | whether a flow can run on a stage at all |
| `world.py`, `targets.py` | who is where in the job by now, and who is meant by a fault (pure) |
| `strikes.py`, `slurm_strikes.py`, `disk.py`, `links.py`, `revocation.py` | the faults, each with its proof |
| `deeds.py`, `reach.py`, `remote.py` | signals to processes, here or on their own node |
| `leftovers.py`, `diagnosis.py`, `accounts.py` | what is left of a job; what is known of one that went wrong |
| `local.py`, `own_network.py`, `dev.py`, `slurm.py` | the stages |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.lab.flow.language.model import Flow, StageName
from nvrx_slurm.lab.flow.stages.base import Hit, Hold, Scene, Stage
from nvrx_slurm.lab.flow.stages.checks import check
from nvrx_slurm.util.clock import Clock, SystemClock

__all__ = ["Hit", "Hold", "Scene", "Stage", "check", "open_stage"]


def open_stage(flow: Flow, stage: StageName, folder: Path, hold: Hold, *, clock: Clock | None = None) -> Stage:
    """Start what the flow needs: a development cluster, a disk, a network. `folder`: the attempt's.

    Raises what `check` raises, and MissingProgramError, WaitTimeout, NvrxError; nothing is left behind then.
    """
    check(flow, stage)
    make, clock = _stage_class(flow, stage), clock or SystemClock()
    return make(flow, folder, hold, clock)


def _stage_class(flow: Flow, stage: StageName) -> Callable[[Flow, Path, Hold, Clock], Stage]:
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
