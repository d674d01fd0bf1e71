"""A Slurm of its own for each attempt, without root, on this machine: nodes die, freeze, drain, and come back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nvrx_slurm.api.handle import Job
from nvrx_slurm.errors import FaultFailed, NvrxError
from nvrx_slurm.lab.devcluster import DevCluster
from nvrx_slurm.lab.devcluster.spec import of_nodes
from nvrx_slurm.lab.flow.model import Flow, StageName
from nvrx_slurm.lab.flow.stages.faults import Scene
from nvrx_slurm.lab.flow.stages.processes import Act, FaultAction, FaultResult, perform
from nvrx_slurm.lab.flow.stages.remote import Reach, here
from nvrx_slurm.lab.flow.stages.slurm import SETTINGS, SlurmStage
from nvrx_slurm.lab.flow.topology import Arguments, node_of
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.ids import new_incarnation

if TYPE_CHECKING:
    from nvrx_slurm.lab.flow.cleanup import CleanupList


class DevStage(SlurmStage):
    """Jobs on a development cluster that is brought up for this attempt alone."""

    name: StageName = "dev"

    def __init__(self, flow: Flow, folder: Path, cleanup: CleanupList, clock: Clock) -> None:
        name = f"ci-{os.getpid()}-{new_incarnation()[:4]}"
        # Before it exists: a cluster that was only half started when this process was killed is removed by its name.
        cleanup.cluster(name)
        # What the flow's faults need, and the flow's own lines of slurm.conf on top.
        needed = {key: value for fault in flow.faults for key, value in SETTINGS.get(fault.action, {}).items()}
        settings = {**needed, **flow.cluster.settings}
        self.cluster: DevCluster = DevCluster.up(name=name, nodes=flow.nodes, settings=settings, clock=clock)
        try:
            super().__init__(flow, folder, cleanup, clock)
        except BaseException:
            self.cluster.down()
            raise
        self.injectors |= {
            "kill_node": partial(self._signal_node, "kill"),
            "stop_node": partial(self._signal_node, "stop"),
            "restore_node": self._restore_node,
        }

    @property
    def environment(self) -> Mapping[str, str]:
        return self.cluster.environment()

    def _reach(self, job: Job) -> Reach:
        return here(self.clock)

    # ---- nodes

    def _signal_node(self, act: Act, arguments: Arguments, scene: Scene) -> FaultResult:
        node = node_of(arguments, scene.topology)
        self.cluster.node_processes(node)  # raises UsageError: a job that is pending knows no node, and takes any
        action = FaultAction(act=act, who=f"slurmd of {node} with all below it", pids=(), folder="")
        hit = perform(action, lambda table: of_nodes(self.cluster.spec, table)[node], self.clock)
        return msgspec.structs.replace(hit, bound=node)

    def _restore_node(self, arguments: Arguments, scene: Scene) -> FaultResult:
        node, at = node_of(arguments, scene.topology), self.clock.wall()
        self.cluster.restore_node(node)
        status = next(each for each in self.cluster.status().nodes if each.name == node)
        if status.slurmd != "alive":
            raise FaultFailed(f"{node} is not back: its slurmd is {status.slurmd}")
        self.killed.discard(node)
        return FaultResult(
            at=at, proof=f"slurmd of {node} lives, and Slurm holds it for {status.slurm_state}", bound=node
        )

    # ---- the end

    def gone(self, job: Job, within_s: float) -> list[str]:
        # Nodes that the flow has left dead are down, as Slurm would find in some seconds; frozen ones go on.
        for node in self.cluster.status().nodes:
            with contextlib.suppress(NvrxError):
                if node.slurmd == "frozen":
                    self.cluster.restore_node(node.name)
                elif node.slurmd == "dead":
                    self.cluster.mark_down(node.name)
        return super().gone(job, within_s)

    def _places(self, job: Job) -> tuple[str, ...]:
        return ("",)  # all of them are here

    def _logs(self) -> list[Path]:
        return sorted(self.cluster.spec.places.logs.glob("*.log"))

    def close(self) -> None:
        # The cluster first: its jobs may still use the disk and the service that `super` ends.
        self.cluster.down()
        super().close()
