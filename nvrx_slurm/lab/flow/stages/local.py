"""This machine as a stage: its nodes are processes, or have networks of their own whose links can fail."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan, plan_to_json
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.faults.network import BATCH, HostNetwork
from nvrx_slurm.lab.flow.model import Flow, StageName
from nvrx_slurm.lab.flow.stages.base import Stage
from nvrx_slurm.lab.flow.stages.faults import Injector, Scene, inject_signal, revoke_password
from nvrx_slurm.lab.flow.stages.processes import FaultResult
from nvrx_slurm.lab.flow.stages.remote import by_command
from nvrx_slurm.lab.flow.stages.remote_journal import RemoteJournal
from nvrx_slurm.lab.flow.topology import Arguments, node_of
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.files import JobFiles
from nvrx_slurm.util.processes import AGAIN_S

if TYPE_CHECKING:
    from nvrx_slurm.lab.flow.cleanup import CleanupList
    from nvrx_slurm.report.source import Journal


class LocalStage(Stage):
    """Jobs of `nvrx-slurm submit --local`."""

    name: StageName = "local"

    def __init__(self, flow: Flow, folder: Path, cleanup: CleanupList, clock: Clock) -> None:
        super().__init__(flow, folder, cleanup, clock)
        self.injectors["scancel"] = self._cancel

    def _cancel(self, arguments: Arguments, scene: Scene) -> FaultResult:
        """What scancel does on Slurm: SIGTERM, or another signal, to the batch host."""
        name, reach = str(arguments.get("signal") or "SIGTERM"), self._reach(scene.job)
        hit = inject_signal("signal", "batch_host", arguments, scene, reach, name)
        if arguments.get("twice"):
            self.clock.sleep(AGAIN_S * 1.2)  # sooner, the job takes the second for the first
            inject_signal("signal", "batch_host", arguments, scene, reach, name)
        return hit


class OwnNetworkStage(LocalStage):
    """Jobs of which this process reaches the processes and files, and not the store: that is asked from inside."""

    def __init__(self, flow: Flow, folder: Path, cleanup: CleanupList, clock: Clock) -> None:
        super().__init__(flow, folder, cleanup, clock)
        self._network = HostNetwork([f"n{index}" for index in range(1, flow.nodes + 1)])
        self.started.callback(self._network.close)
        cleanup.process(self._network.pid)
        self.injectors |= Links(self._network, clock).table()
        reach = by_command(lambda _: self._network.inside(BATCH), self.environment)
        self.injectors["revoke_store_password"] = lambda arguments, scene: revoke_password(scene, reach)

    def _hand_over(self, spec: JobSpec, made: Plan) -> str:
        """The job's own script, but for the network that its batch host runs in, and who starts its agents."""
        command = [
            *self._network.inside(BATCH),
            *(sys.executable, "-P", "-m", "nvrx_slurm.batch", "--cluster", "local", "--"),
            *self._network.agents(),
        ]
        end, text = "NVRX_PLAN", plan_to_json(made)
        # The plan goes to the batch host by its stdin, as in every job script. The quotes keep the shell from
        # expanding anything in it.
        script = ["#!/bin/bash", *spec.setup, f"exec {shlex.join(command)} <<'{end}'", text.decode(), end, ""]
        cluster = LocalCluster(self.jobs, clock=self.clock)
        job_id = cluster.submit("\n".join(script), folder=self.jobs, name=made.name)
        # For readers of the folder, this process among them.
        JobFiles(self.jobs / job_id).write_plan_json(text)
        return job_id

    def journal(self, folder: JobFolder) -> Journal | RemoteJournal:
        reader = RemoteJournal(self._network.inside(BATCH), folder, self.clock)
        self.started.callback(reader.close)
        return reader


CUT, SLOW, HEALED = "cuts off", "slows", "carries all of"


class Links:
    """What is done to each node's link by now; several faults add up. `batch_host` means the host that is no node."""

    def __init__(self, network: HostNetwork, clock: Clock) -> None:
        self._network, self._clock = network, clock
        self._cut: set[str] = set()
        self._slow: dict[str, tuple[float, float]] = {}

    def table(self) -> dict[str, Injector]:
        return {
            "cut_link": partial(self._change, CUT),
            "slow_link": partial(self._change, SLOW),
            "heal_link": partial(self._change, HEALED),
        }

    def _change(self, what: str, arguments: Arguments, scene: Scene) -> FaultResult:
        """Change what the switch does, and compare with what it reports."""
        host = BATCH if arguments.get("batch_host") else node_of(arguments, scene.topology)
        at = self._clock.wall()
        if what == CUT:
            self._cut.add(host)
        elif what == SLOW:
            self._slow[host] = (float(arguments.get("delay", 0.0)), float(arguments.get("loss", 0.0)))
        else:
            if host not in self._cut | self._slow.keys():
                raise FaultFailed(f"the link of {host} is well: there is nothing to heal")
            self._cut.discard(host)
            self._slow.pop(host, None)
        # The switch gets the whole state each time, and answers with what it holds now.
        cut, slow = set(self._network.cut(self._cut)), self._network.slow(self._slow)
        if not {CUT: host in cut, SLOW: host in slow, HEALED: host not in cut and host not in slow}[what]:
            raise FaultFailed(f"the switch does not say that it {what} {host}, as it was told")
        how = f": {slow[host][0]:g} s late, {slow[host][1]:.0%} lost" if what == SLOW else ""
        return FaultResult(at=at, proof=f"the switch says that it {what} {host}{how}", bound=host)
