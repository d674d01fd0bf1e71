"""This machine as a stage whose nodes have networks of their own, which can be cut and slowed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Plan, plan_to_json
from nvrx_slurm.lab.faults.network import BATCH, Network
from nvrx_slurm.lab.flow.language.model import Flow
from nvrx_slurm.lab.flow.stages.base import Hit, Hold, JournalFeed, Scene
from nvrx_slurm.lab.flow.stages.links import Links
from nvrx_slurm.lab.flow.stages.listening import Listener
from nvrx_slurm.lab.flow.stages.local import LocalStage
from nvrx_slurm.lab.flow.stages.reach import by_command
from nvrx_slurm.lab.flow.stages.strikes import revoke_password
from nvrx_slurm.lab.flow.stages.targets import Arguments
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.files import JobFiles


class OwnNetworkStage(LocalStage):
    """Jobs of which this process reaches the processes and files, and not the store: that is asked from inside."""

    def __init__(self, flow: Flow, folder: Path, hold: Hold, clock: Clock) -> None:
        super().__init__(flow, folder, hold, clock)
        self._network = Network([f"n{index}" for index in range(1, flow.needs.nodes + 1)])
        hold.process(self._network.pid)
        self._listeners: list[Listener] = []
        self.strikes |= Links(self._network, clock).table()
        self.strikes["revoke_store_password"] = self._revoke

    def _hand_over(self, spec: JobSpec, made: Plan) -> str:
        """The job's own script, but for the network that its batch host runs in, and who starts its agents."""
        script = _script(spec.setup, [*self._network.inside(BATCH), *_batch_host(self._network)], made)
        job_id = LocalCluster(self.jobs, clock=self.clock).submit(script, folder=self.jobs, name=made.name)
        JobFiles(self.jobs / job_id).write_plan_json(plan_to_json(made))
        return job_id

    def journal(self, folder: JobFolder) -> JournalFeed:
        self._listeners.append(Listener(self._network.inside(BATCH), folder, self.clock))
        return self._listeners[-1]

    def _revoke(self, arguments: Arguments, scene: Scene) -> Hit:
        return revoke_password(scene, by_command(lambda _: self._network.inside(BATCH), self.environment))

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._network.close()
        super().close()


def _batch_host(network: Network) -> list[str]:
    return [sys.executable, "-P", "-m", "nvrx_slurm.batch", "--cluster", "local", "--", *network.agents()]


def _script(setup: Sequence[str], command: Sequence[str], made: Plan) -> str:
    end = "NVRX_PLAN"
    return "\n".join(
        ["#!/bin/bash", *setup, f"exec {shlex.join(command)} <<'{end}'", plan_to_json(made).decode(), end, ""]
    )
