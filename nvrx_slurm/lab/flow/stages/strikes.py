"""Faults that are signals: to a worker, an agent, a supervisor, the control plane, or all that a node runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.journal.folder import JobInfo
from nvrx_slurm.lab.flow.stages.base import Hit, Scene
from nvrx_slurm.lab.flow.stages.deeds import Act, Deed, Part
from nvrx_slurm.lab.flow.stages.reach import Reach
from nvrx_slurm.lab.flow.stages.revocation import Revocation
from nvrx_slurm.lab.flow.stages.targets import Arguments, node_of, worker_of

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
    if scene.folder.read_plan().store_url is not None:
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
