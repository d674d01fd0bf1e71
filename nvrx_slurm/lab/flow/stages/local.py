"""This machine as a stage: nodes are processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from nvrx_slurm.lab.flow.language.model import Flow, StageName
from nvrx_slurm.lab.flow.stages.base import Hit, Hold, Scene
from nvrx_slurm.lab.flow.stages.common import CommonStage, Diagnoses
from nvrx_slurm.lab.flow.stages.diagnosis import process_accounts
from nvrx_slurm.lab.flow.stages.reach import here
from nvrx_slurm.lab.flow.stages.strikes import node_strikes, signal_batch_host, signal_strikes
from nvrx_slurm.lab.flow.stages.targets import Arguments
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.processes import AGAIN_S


class LocalStage(CommonStage):
    """Jobs of `nvrx-slurm submit --local`."""

    name: StageName = "local"

    def __init__(self, flow: Flow, folder: Path, hold: Hold, clock: Clock) -> None:
        super().__init__(flow, folder, hold, clock)
        self._here = here(clock)
        self.strikes |= signal_strikes(lambda _: self._here) | node_strikes(lambda _: self._here)
        self.strikes["scancel"] = self._cancel

    def _cancel(self, arguments: Arguments, scene: Scene) -> Hit:
        """What scancel does on Slurm: SIGTERM, or another signal, to the batch host."""
        name = str(arguments.get("signal") or "SIGTERM")
        hit = signal_batch_host(name, scene, self._here)
        if arguments.get("twice"):
            self.clock.sleep(AGAIN_S * 1.2)  # sooner, the job takes the second for the first
            signal_batch_host(name, scene, self._here)
        return hit

    def _diagnoses(self, folder: Path) -> Diagnoses:
        accounts = partial(process_accounts, self.its_job, self._here, "", folder / "processes")
        return super()._diagnoses(folder) | {"processes": accounts}
