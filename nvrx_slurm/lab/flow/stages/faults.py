"""Faults that need no Slurm: signals to the job's processes, a full disk, another store password, and signals to a
scripted attribution service. Each returns its proof."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping

from nvrx_slurm.errors import FaultFailed, NvrxError
from nvrx_slurm.journal.folder import JobInfo
from nvrx_slurm.lab.devcluster.waiting import wait_until
from nvrx_slurm.lab.faults.disk import SmallDisk
from nvrx_slurm.lab.flow.stages.base import Hit, Scene
from nvrx_slurm.lab.flow.stages.processes import Act, Deed, Part
from nvrx_slurm.lab.flow.stages.remote import Reach, Revocation
from nvrx_slurm.lab.flow.stages.world import Arguments, node_of, worker_of
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.processes import dies_with_parent, stat_fields

Strike = Callable[[Arguments, Scene], Hit]
"""Makes one fault happen. Raises FaultFailed."""

ReachOf = Callable[[Scene], Reach]
"""How the processes of a job are reached."""

_ACTS: tuple[Act, ...] = ("kill", "stop", "continue")

Blow = Callable[[Act, Arguments, Scene, Reach], Hit]


def signal_strikes(reach_of: ReachOf) -> dict[str, Strike]:
    """`kill_worker`, `stop_controller`, and all the others of that kind, by name."""
    table: dict[str, Strike] = {}
    for act in _ACTS:
        for whom, blow in _BLOWS.items():
            table[f"{act}_{whom}"] = _strike(act, blow, reach_of)
    table["revoke_store_password"] = lambda arguments, scene: revoke_password(scene, reach_of(scene))
    return table


def node_strikes(reach_of: ReachOf) -> dict[str, Strike]:
    """`kill_node` and its like where a node is no more than what the job runs there."""
    names: dict[str, Act] = {"kill_node": "kill", "stop_node": "stop", "restore_node": "continue"}
    return {name: _strike(act, _node, reach_of) for name, act in names.items()}


def _strike(act: Act, blow: Blow, reach_of: ReachOf) -> Strike:
    return lambda arguments, scene: blow(act, arguments, scene, reach_of(scene))


def _worker(act: Act, arguments: Arguments, scene: Scene, reach: Reach) -> Hit:
    worker = worker_of(arguments, scene.world)
    return _hit(reach, worker.node, _deed(scene, act, str(worker), worker.pid), bound=worker.rank)


def _agent(act: Act, arguments: Arguments, scene: Scene, reach: Reach) -> Hit:
    node = node_of(arguments, scene.world)
    return _hit(reach, node, _deed(scene, act, f"the agent of {node}", scene.world.agent(node)), bound=node)


def _supervisor(act: Act, arguments: Arguments, scene: Scene, reach: Reach) -> Hit:
    node = node_of(arguments, scene.world)
    deed = _deed(scene, act, f"the supervisor of {node}", scene.world.agent(node), part="supervisor")
    return _hit(reach, node, deed, bound=node)


def _node(act: Act, arguments: Arguments, scene: Scene, reach: Reach) -> Hit:
    """On the node of a Slurm job's batch host, that goes too."""
    node, info = node_of(arguments, scene.world), _info(scene)
    pids = [scene.world.agent(node)]
    if info.cluster == "slurm" and node == scene.world.batch_host:
        pids.append(info.host_pid)
    return _hit(reach, node, _deed(scene, act, f"all that the job runs on {node}", *pids, part="tree"), bound=node)


def _controller(act: Act, arguments: Arguments, scene: Scene, reach: Reach) -> Hit:
    return _hit(reach, _host_node(scene), _deed(scene, act, "the controller", scene.world.controller))


def _store(act: Act, arguments: Arguments, scene: Scene, reach: Reach) -> Hit:
    if scene.folder.read_plan().store.url is not None:
        raise FaultFailed("the store is the site's own, and not ours to harm: leave `store.url` out of job.yaml")
    return _hit(reach, _host_node(scene), _deed(scene, act, "the store", _info(scene).host_pid, part="store"))


def _batch_host(act: Act, arguments: Arguments, scene: Scene, reach: Reach) -> Hit:
    return _hit(reach, _host_node(scene), _deed(scene, act, "the batch host", _info(scene).host_pid))


_BLOWS: Mapping[str, Blow] = {
    "worker": _worker,
    "agent": _agent,
    "supervisor": _supervisor,
    "controller": _controller,
    "store": _store,
    "batch_host": _batch_host,
}


def signal_batch_host(name: str, scene: Scene, reach: Reach) -> Hit:
    """Send the batch host a signal, such as `SIGUSR1`, and see that it took it. Raises FaultFailed."""
    return _hit(reach, _host_node(scene), _deed(scene, "signal", "the batch host", _info(scene).host_pid, name=name))


def revoke_password(scene: Scene, reach: Reach) -> Hit:
    """The store takes another password from now on. Raises FaultFailed."""
    evidence = reach(Revocation(folder=str(scene.folder.path)), _host_node(scene))
    return Hit(at=evidence.at, proof=evidence.proof)


def _deed(scene: Scene, act: Act, who: str, *pids: int, part: Part = "itself", name: str = "SIGTERM") -> Deed:
    return Deed(act=act, who=who, pids=pids, folder=str(scene.folder.path), part=part, signal=name)


def _hit(reach: Reach, node: str, deed: Deed, bound: str | int | None = None) -> Hit:
    evidence = reach(deed, node)
    return Hit(at=evidence.at, proof=evidence.proof, bound=bound)


def _info(scene: Scene) -> JobInfo:
    info = scene.folder.read_info()
    if info is None:
        raise FaultFailed(f"job {scene.job.job_id} has not started: nobody has written {scene.folder.path}/job.json")
    return info


def _host_node(scene: Scene) -> str:
    nodes = _info(scene).nodes
    return nodes[0] if nodes else ""


def disk_strikes(disk: SmallDisk, clock: Clock) -> dict[str, Strike]:
    """`fill_disk` and `free_disk`, proven by statvfs(3)."""

    def fill(arguments: Arguments, scene: Scene) -> Hit:
        at = clock.wall()
        disk.fill()
        return Hit(at=at, proof=f"statvfs says that {_free(disk, wanted=False)} bytes are free")

    def free(arguments: Arguments, scene: Scene) -> Hit:
        at = clock.wall()
        if not disk.ballast.exists():
            raise FaultFailed("the disk was not filled: there is nothing to free")
        disk.free()
        return Hit(at=at, proof=f"statvfs says that {_free(disk, wanted=True)} bytes are free")

    return {"fill_disk": fill, "free_disk": free}


def _free(disk: SmallDisk, *, wanted: bool) -> int:
    free_bytes = disk.free_bytes
    if bool(free_bytes) is not wanted:
        raise FaultFailed(f"statvfs says that {free_bytes} bytes are free on {disk.path}")
    return free_bytes


PROVEN_WITHIN_S = 5.0
SIGNALS = {
    "kill": (signal.SIGKILL, "ZX-"),
    "stop": (signal.SIGSTOP, "T"),
    "continue": (signal.SIGCONT, "SRD"),
}
"""What is done to it → the signal, and the states of a process (proc(5)) that prove it; `-`: it is no more."""


class AttributionService:
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
        said = self._process.stdout.readline()
        if not said:
            self.close()
            raise NvrxError(f"the scripted attribution service did not start ({behaviour})")
        self.url = said.split()[-1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def strikes(self, clock: Clock) -> dict[str, Strike]:
        """`kill_attribution_service` and its like, proven by /proc."""
        return {f"{act}_attribution_service": self._strike(act, clock) for act in SIGNALS}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _strike(self, act: str, clock: Clock) -> Strike:
        number, states = SIGNALS[act]

        def strike(arguments: Arguments, scene: Scene) -> Hit:
            if self._state() in "ZX-":
                raise FaultFailed("the attribution service is dead already")
            at = clock.wall()
            os.kill(self.pid, number)
            what = f"the attribution service to be in state {' or '.join(states)} after {number.name}"
            wait_until(lambda: self._state() in states, timeout_s=PROVEN_WITHIN_S, what=what, clock=clock)
            return Hit(at=at, proof=f"process {self.pid} is in state {self._state()}")

        return strike

    def _state(self) -> str:
        fields = stat_fields(self.pid)
        return "-" if fields is None else fields[0]
