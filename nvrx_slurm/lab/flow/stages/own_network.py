"""This machine as a stage whose nodes have networks of their own, and the faults of their links."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan, plan_to_json
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.faults.network import BATCH, HostNetwork
from nvrx_slurm.lab.flow.model import Flow
from nvrx_slurm.lab.flow.stages.base import CleanupRecorder, FaultResult, JournalFeed, Scene
from nvrx_slurm.lab.flow.stages.faults import Injector, revoke_password
from nvrx_slurm.lab.flow.stages.local import LocalStage
from nvrx_slurm.lab.flow.stages.remote import by_command
from nvrx_slurm.lab.flow.stages.remote_journal import RemoteJournal
from nvrx_slurm.lab.flow.topology import Arguments, node_of
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.files import JobFiles


class OwnNetworkStage(LocalStage):
    """Jobs of which this process reaches the processes and files, and not the store: that is asked from inside."""

    def __init__(self, flow: Flow, folder: Path, cleanup: CleanupRecorder, clock: Clock) -> None:
        super().__init__(flow, folder, cleanup, clock)
        self._network = HostNetwork([f"n{index}" for index in range(1, flow.needs.nodes + 1)])
        cleanup.process(self._network.pid)
        self._listeners: list[RemoteJournal] = []
        self.injectors |= Links(self._network, clock).table()
        self.injectors["revoke_store_password"] = self._revoke

    def _hand_over(self, spec: JobSpec, made: Plan) -> str:
        """The job's own script, but for the network that its batch host runs in, and who starts its agents."""
        command = [
            *self._network.inside(BATCH),
            *(sys.executable, "-P", "-m", "nvrx_slurm.batch", "--cluster", "local", "--"),
            *self._network.agents(),
        ]
        end = "NVRX_PLAN"
        script = "\n".join(
            [
                "#!/bin/bash",
                *spec.setup,
                f"exec {shlex.join(command)} <<'{end}'",
                plan_to_json(made).decode(),
                end,
                "",
            ]
        )
        job_id = LocalCluster(self.jobs, clock=self.clock).submit(script, folder=self.jobs, name=made.name)
        JobFiles(self.jobs / job_id).write_plan_json(plan_to_json(made))
        return job_id

    def journal(self, folder: JobFolder) -> JournalFeed:
        self._listeners.append(RemoteJournal(self._network.inside(BATCH), folder, self.clock))
        return self._listeners[-1]

    def _revoke(self, arguments: Arguments, scene: Scene) -> FaultResult:
        return revoke_password(scene, by_command(lambda _: self._network.inside(BATCH), self.environment))

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._network.close()
        super().close()


CUT, SLOW, HEALED = "cuts off", "slows", "carries all of"


class Links:
    """What is done to each node's link by now; several faults add up. `batch_host` means the host that is no node."""

    def __init__(self, network: HostNetwork, clock: Clock) -> None:
        self._network, self._clock = network, clock
        self._cut: set[str] = set()
        self._slow: dict[str, tuple[float, float]] = {}

    def table(self) -> dict[str, Injector]:
        return {"cut_link": self.cut, "slow_link": self.slow, "heal_link": self.heal}

    def cut(self, arguments: Arguments, scene: Scene) -> FaultResult:
        host, at = _host(arguments, scene), self._clock.wall()
        self._cut.add(host)
        return self._hit(host, at, CUT)

    def slow(self, arguments: Arguments, scene: Scene) -> FaultResult:
        host, at = _host(arguments, scene), self._clock.wall()
        self._slow[host] = (float(arguments.get("delay", 0.0)), float(arguments.get("loss", 0.0)))
        return self._hit(host, at, SLOW)

    def heal(self, arguments: Arguments, scene: Scene) -> FaultResult:
        host, at = _host(arguments, scene), self._clock.wall()
        if host not in self._cut | self._slow.keys():
            raise FaultFailed(f"the link of {host} is well: there is nothing to heal")
        self._cut.discard(host)
        self._slow.pop(host, None)
        return self._hit(host, at, HEALED)

    def _hit(self, host: str, at: float, what: str) -> FaultResult:
        """Tell the switch, and compare what it holds by its own word."""
        cut, slow = set(self._network.cut(self._cut)), self._network.slow(self._slow)
        holds = CUT if host in cut and what == CUT else SLOW if host in slow and what == SLOW else HEALED
        if holds != what:
            raise FaultFailed(f"the switch {holds} {host}, against its orders")
        how = f": {slow[host][0]:g} s late, {slow[host][1]:.0%} lost" if what == SLOW else ""
        return FaultResult(at=at, proof=f"the switch says that it {what} {host}{how}", bound=host)


def _host(arguments: Arguments, scene: Scene) -> str:
    return BATCH if arguments.get("batch_host") else node_of(arguments, scene.topology)
