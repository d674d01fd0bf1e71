"""JobSpec → Plan: what agents and the controller read, with nothing left to decide.

A plan is written once, into the job script and from there into `plan.json`. It holds the blocks of the model as they
are, so `plan.json` nests as job.yaml does; durations are seconds, sizes bytes, files absolute paths.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.container import ContainerSpec, is_file, parts_of_mount
from nvrx_slurm.jobspec.model import FaultToleranceSpec, JobSpec, LeaseSpec, RoleSpec, StoreSpec
from nvrx_slurm.jobspec.prewarm import PrewarmSpec
from nvrx_slurm.jobspec.urls import is_redis
from nvrx_slurm.jobspec.values import Name
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.ids import replica_id

PLAIN_ROLE = "main"


class RolePlan(RoleSpec, frozen=True, kw_only=True):
    """One role: `replicas` worlds of `nodes_per_replica` × `workers_per_node` ranks that run `command`."""

    name: Name

    @property
    def world_size(self) -> int:
        """How many ranks a replica has."""
        return self.nodes_per_replica * self.workers_per_node


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that agents and the controller need to know of a job, settled before it starts."""

    name: str
    roles: tuple[RolePlan, ...]
    spares: int = 0  # how many the job has
    min_spares: int | None = None  # with how few it may start; the batch host then settles `spares`
    workdir: str
    folder: str  # the base folder; the job's own is `<folder>/<job id>`
    fault_tolerance: FaultToleranceSpec = FaultToleranceSpec()
    time_limit_s: float | None = None
    store: StoreSpec = StoreSpec()
    lease: LeaseSpec | None = None
    output: str | None = None  # where the job makes a link to its log; a pattern of sbatch
    version: int = 2  # of this form; 1 was flat

    @property
    def agent_module(self) -> str:
        """What the nodes' Python runs: the agent, or what starts it in the job's container."""
        inside = self.roles[0].container
        return "nvrx_slurm.agent.inside" if inside is not None and inside.agents_inside else "nvrx_slurm.agent"

    @property
    def replica_roles(self) -> dict[str, RolePlan]:
        """The name of each replica → its role, in the order in which replicas get nodes."""
        return {replica_id(role.name, index): role for role in self.roles for index in range(role.replicas)}

    @property
    def active_nodes(self) -> int:
        """How many nodes the replicas want, spares not counted."""
        return sum(role.replicas * role.nodes_per_replica for role in self.roles)

    @property
    def total_nodes(self) -> int:
        """How many nodes to ask for."""
        return self.active_nodes + self.spares

    @property
    def least_nodes(self) -> int:
        """With how many nodes the job can start."""
        return self.active_nodes + (self.spares if self.min_spares is None else self.min_spares)


def plan(spec: JobSpec, *, folder: Path, job_file: Path | None = None) -> Plan:
    """The plan of a job whose folder will be `<folder>/<job id>`.

    Files and `workdir` count from where job.yaml lies; without the latter workers start in the current folder. Raises
    ConfigError for a path that no log line and no UTF-8 file can hold.
    """
    here = job_file.resolve().parent if job_file else Path.cwd()

    def find(file: str | None, here: Path = here) -> str | None:
        """The absolute path of a file that job.yaml names, if it does."""
        if not file:
            return None
        return str(here / (Path(file).expanduser() if file.startswith("~/") else file))

    if spec.roles:
        roles = spec.roles
    else:
        assert spec.command is not None
        roles = {
            PLAIN_ROLE: RoleSpec(
                command=spec.command,
                nodes_per_replica=spec.nodes,
                min_nodes=spec.min_nodes,
                workers_per_node=spec.workers_per_node,
            )
        }
    # What a role does not set it takes from the job.
    own = {}
    for name, role in roles.items():
        container = _found(role.container or spec.container, find)
        own[name] = {
            "workdir": find(role.workdir),
            "env": {**spec.env, **role.env, **(container.env if container else {})},
            "container": container,
            "prewarm": _prewarmed(role.prewarm or spec.prewarm, here),
        }
    bounds, asked = spec.fault_tolerance, spec.fault_tolerance.attribution
    attribution = replace(
        asked,
        token_file=find(asked.token_file),
        rules=tuple(str(find(file)) for file in asked.rules),
        llm=replace(asked.llm, key_file=find(asked.llm.key_file)) if asked.llm else None,
        slack=replace(asked.slack, token_file=find(asked.slack.token_file)) if asked.slack else None,
        dataflow=replace(asked.dataflow, token_file=find(asked.dataflow.token_file)) if asked.dataflow else None,
        ledger=asked.ledger if is_redis(asked.ledger) else find(asked.ledger),
    )
    progress = replace(bounds.progress, iteration_file=find(bounds.progress.iteration_file))
    return Plan(
        name=spec.name,
        roles=tuple(
            RolePlan(name=name, **(msgspec.structs.asdict(role) | own[name])) for name, role in roles.items()
        ),
        spares=spec.spares,
        min_spares=spec.min_spares,
        workdir=_plain(Path(find(spec.workdir) or Path.cwd()), "the folder that workers start in"),
        folder=_plain(folder.resolve(), "the job folder"),
        fault_tolerance=replace(
            bounds,
            # One that is equal stays the same object: then msgspec leaves a default out of plan.json.
            attribution=asked if attribution == asked else attribution,
            progress=bounds.progress if progress == bounds.progress else progress,
        ),
        time_limit_s=None if spec.slurm.time == math.inf else spec.slurm.time,
        store=replace(spec.store, password_file=find(spec.store.password_file)),
        lease=replace(spec.lease, file=str(find(spec.lease.file))) if spec.lease else None,
        output=find(spec.output, Path(str(here).replace("%", "%%"))),  # only what the user wrote is a pattern
    )


def _found(container: ContainerSpec | None, find: Callable[[str], str | None]) -> ContainerSpec | None:
    """The same with absolute paths of the host."""
    if container is None:
        return None
    mounts = []
    for mount in container.mounts:
        source, target, options = parts_of_mount(mount)
        host = str(find(source))
        mounts.append(":".join([host, target or host, *([options] if options else [])]))
    image = str(find(container.image)) if is_file(container.image) else container.image
    return replace(container, image=image, mounts=tuple(mounts))


def _prewarmed(prewarm: PrewarmSpec | None, here: Path) -> PrewarmSpec | None:
    """The same with absolute patterns; None where it is switched off."""
    if prewarm is None or prewarm.is_off:
        return None
    patterns = []
    # Only what the user wrote is a pattern: the folder of job.yaml, or the home, may have a `[` in its name.
    for pattern in prewarm.read:
        if pattern.startswith("~/"):
            patterns.append(glob.escape(str(Path.home())) + pattern[1:])
        else:
            patterns.append(str(Path(glob.escape(str(here))) / pattern))
    return replace(prewarm, read=tuple(patterns))


def _plain(path: Path, what: str) -> str:
    text = str(path)
    if not text.isprintable():  # a newline, say, or bytes that are no UTF-8
        raise ConfigError(f"{what} is {text!r}; choose one whose path is printable text")
    return text


# ------------------------------------------------------------------------------------------------ plan.json


def plan_to_json(plan: Plan) -> bytes:
    """`plan.json`, indented for people."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2)


def plan_from_json(text: bytes) -> Plan:
    """The plan of `plan.json`, of this form or of version 1. Raises MalformedRecord."""

    def read(text: bytes) -> Plan:
        raw: dict[str, Any] = msgspec.json.decode(text, type=dict)
        return msgspec.convert(raw if raw.get("version", 1) != 1 else _nested(raw), Plan)

    return decode(read, text, "plan.json")


# Version 1: field → block and key. A job that was submitted then may be requeued after an upgrade, and its journal is
# replayed against its plan.
_STORE = {
    "store_url": "url",
    "store_password_file": "password_file",
    "store_namespace": "namespace",
    "store_server": "server",
}
_BOUNDS: dict[str, tuple[str, ...]] = {
    "heartbeat_interval_s": ("heartbeat", "interval"),
    "heartbeat_timeout_s": ("heartbeat", "timeout"),
    "startup_timeout_s": ("heartbeat", "startup_timeout"),
    "fence_timeout_s": ("fence_timeout",),
    "join_timeout_s": ("rendezvous", "join_timeout"),
    "last_call_s": ("rendezvous", "last_call"),
    "teardown_grace_s": ("teardown", "grace"),
    "stop_signal": ("teardown", "stop_signal"),
    "checkpoint_signal": ("teardown", "checkpoint_signal"),
    "checkpoint_timeout_s": ("teardown", "checkpoint_timeout"),
    "gpu_memory_below_bytes": ("teardown", "gpu_memory_below"),
    "gpu_reclaim_timeout_s": ("teardown", "gpu_reclaim_timeout"),
    "control_plane_grace_s": ("control_plane_grace",),
}
_BELOW = {
    "hang": {
        "startup_s": "startup_timeout",
        "step_s": "step_timeout",
        "no_output_s": "no_output",
        "exit_skew_s": "exit_skew",
    },
    "progress": {"max_cycles": "max_no_progress_cycles", "min_steps": "min_progress_steps"},
    "backoff": {"within_s": "within", "initial_s": "initial", "max_s": "max"},
    "attribution": {"timeout_s": "timeout", "decision_timeout_s": "decision_timeout"},
    "llm": {"timeout_s": "timeout"},
}


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """A plan of version 1 in today's form, with what was its defaults."""
    bounds: dict[str, Any] = {"attribution": {}, "backoff": None}
    for name, value in flat.get("fault_tolerance", {}).items():
        *above, key = _BOUNDS.get(name, (name,))
        block = bounds.setdefault(above[0], {}) if above else bounds
        block[key] = _renamed(name, value)
    per_s = bounds.pop("max_restarts_per_s", None)
    bounds["max_restarts"] = {"count": bounds.get("max_restarts", 3), "per_s": per_s}
    bounds["backoff"] = bounds["backoff"] if bounds["backoff"] is not None else {"max": 0.0}  # none unless it says so
    bounds["attribution"].setdefault("enable_lib", False)
    store = {key: flat[name] for name, key in _STORE.items() if name in flat}
    lease = flat.get("lease")
    lease = lease and {"file": lease["file"], "timeout": lease["timeout_s"]}
    rest = {name: value for name, value in flat.items() if name not in _STORE}
    return {**rest, "fault_tolerance": bounds, "store": store, "lease": lease, "version": 2}


def _renamed(name: str, block: Any) -> Any:
    if not isinstance(block, Mapping):
        return block
    names = _BELOW.get(name, {})
    return {names.get(key, key): _renamed(key, value) for key, value in block.items()}
