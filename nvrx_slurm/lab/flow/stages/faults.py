"""Faults that need no Slurm: signals to the job's processes, a full disk, another store password, and signals to a
scripted attribution service. Each returns its proof."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from nvrx_slurm.errors import FaultFailed, NvrxError
from nvrx_slurm.journal.folder import JobFolder, JobInfo
from nvrx_slurm.lab.faults.disk import SmallDisk
from nvrx_slurm.lab.flow.stages.processes import Act, FaultAction, FaultResult, Part, perform
from nvrx_slurm.lab.flow.stages.remote import Reach, Revocation
from nvrx_slurm.lab.flow.topology import Arguments, JobTopology, node_of, worker_of
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.processes import dies_with_parent

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import Job


@dataclass(frozen=True, slots=True)
class Scene:
    """What a fault may look at: the job, its journal so far, and the flow's captures."""

    job: Job
    folder: JobFolder
    topology: JobTopology
    bindings: Mapping[str, Any]


# Makes one fault happen. Raises NvrxError, OSError: it did not happen.
Injector = Callable[[Arguments, Scene], FaultResult]

Target = Literal["worker", "agent", "supervisor", "node", "controller", "store", "batch_host"]
TARGETS: tuple[Target, ...] = ("worker", "agent", "supervisor", "controller", "store", "batch_host")
ACTS: tuple[Act, ...] = ("kill", "stop", "continue")


def signal_faults(reach_of: Callable[[Scene], Reach]) -> dict[str, Injector]:
    """`kill_worker`, `stop_controller`, and all the others of that kind, by name; and `kill_node` and its like where
    a node is no more than what the job runs there. `reach_of`: how the processes of a job are reached."""

    def injector(act: Act, target: Target) -> Injector:
        return lambda arguments, scene: inject_signal(act, target, arguments, scene, reach_of(scene))

    table = {f"{act}_{target}": injector(act, target) for act in ACTS for target in TARGETS}
    table["kill_node"] = injector("kill", "node")
    table["stop_node"] = injector("stop", "node")
    table["restore_node"] = injector("continue", "node")
    table["revoke_store_password"] = lambda arguments, scene: revoke_password(scene, reach_of(scene))
    return table


def inject_signal(
    act: Act, target: Target, arguments: Arguments, scene: Scene, reach: Reach, signal: str = "SIGTERM"
) -> FaultResult:
    """Signal processes of the job, and return once the effect is proven. `signal`: of the act of that name.

    Raises FaultFailed.
    """
    part: Part = "itself"
    bound: str | int | None = None
    if target == "worker":
        worker = worker_of(arguments, scene.topology)
        node, who, pids, bound = worker.node, str(worker), [worker.pid], worker.rank
    elif target in ("agent", "supervisor", "node"):
        node = bound = node_of(arguments, scene.topology)
        who, pids = f"the {target} of {node}", [scene.topology.agent(node)]
        if target == "supervisor":
            part = "supervisor"
        elif target == "node":
            who, part, info = f"all that the job runs on {node}", "tree", _info(scene)
            if info.cluster == "slurm" and node == scene.topology.batch_host:
                pids.append(info.host_pid)  # the batch host runs outside the agent's tree
    else:
        if target == "store":
            if scene.folder.read_plan().store.url is not None:
                raise FaultFailed("the store is the site's own: to harm it, leave `store.url` out of job.yaml")
            part = "store"
        info = _info(scene)
        node, who = info.nodes[0] if info.nodes else "", f"the {target.replace('_', ' ')}"
        # The store is found as a child of the batch host. Of controllers, of which the batch host may have started
        # several, the journal has the newest.
        pids = [scene.topology.controller if target == "controller" else info.host_pid]
    action = FaultAction(act=act, who=who, pids=tuple(pids), folder=str(scene.folder.path), part=part, signal=signal)
    return msgspec.structs.replace(reach(action, node), bound=bound)


def revoke_password(scene: Scene, reach: Reach) -> FaultResult:
    """The store takes another password from now on. Raises FaultFailed."""
    nodes = _info(scene).nodes
    return reach(Revocation(folder=str(scene.folder.path)), nodes[0] if nodes else "")


def _info(scene: Scene) -> JobInfo:
    info = scene.folder.read_info()
    if info is None:
        raise FaultFailed(f"job {scene.job.job_id} has not started: there is no {scene.folder.path}/job.json")
    return info


def disk_faults(disk: SmallDisk, clock: Clock) -> dict[str, Injector]:
    """`fill_disk` and `free_disk`, proven by statvfs(3)."""

    def change(is_full: bool, change_it: Callable[[], object]) -> FaultResult:
        at = clock.wall()
        if not is_full and not disk.ballast.exists():
            raise FaultFailed("the disk was not filled: there is nothing to free")
        change_it()
        free_bytes = disk.free_bytes
        if is_full is bool(free_bytes):
            raise FaultFailed(f"statvfs says that {free_bytes} bytes are free on {disk.path}")
        return FaultResult(at=at, proof=f"statvfs says that {free_bytes} bytes are free")

    return {
        "fill_disk": lambda arguments, scene: change(True, disk.fill),
        "free_disk": lambda arguments, scene: change(False, disk.free),
    }


LISTENS_WITHIN_S = 30.0


class ScriptedService:
    """`python -m nvrx_slurm.lab.faults.attribution_server`; it dies with this process."""

    def __init__(self, behaviour: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nvrx_slurm.lab.faults.attribution_server", "--behaviour", behaviour],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )
        assert self._process.stdout is not None
        # The service prints its address once it listens.
        answers, _, _ = select.select([self._process.stdout], [], [], LISTENS_WITHIN_S)
        said = self._process.stdout.readline() if answers else ""
        if not said:
            self.close()
            raise NvrxError(f"the scripted attribution service did not start ({behaviour})")
        self.url = said.split()[-1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def injectors(self, clock: Clock) -> dict[str, Injector]:
        """`kill_attribution_service` and its like, proven by /proc."""

        def injector(act: Act) -> Injector:
            action = FaultAction(act=act, who="the attribution service", pids=(self.pid,), folder="")
            return lambda arguments, scene: perform(action, lambda table: {self.pid} & table.keys(), clock)

        return {f"{act}_attribution_service": injector(act) for act in ACTS}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
