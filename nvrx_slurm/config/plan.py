"""JobSpec → Plan: what agents and the controller read, with nothing left to decide."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.config.model import JobSpec, Role
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.records import FaultTolerance, Plan, RolePlan

PLAIN_ROLE = "main"


def plan(spec: JobSpec, *, folder: Path, job_file: Path | None = None) -> Plan:
    """The plan of a job whose folder will be `<folder>/<job id>`.

    `workdir` counts from where job.yaml lies; without one workers start in the current folder. Raises ConfigError for
    a path that no log line and no UTF-8 file can hold.
    """
    here = job_file.resolve().parent if job_file else Path.cwd()
    bounds = spec.fault_tolerance
    return Plan(
        name=spec.name,
        roles=tuple(_role(name, role, spec, here) for name, role in _roles(spec).items()),
        spares=spec.spares,
        workdir=_plain(here / spec.workdir if spec.workdir else Path.cwd(), "the folder that workers start in"),
        folder=_plain(folder.resolve(), "the job folder"),
        fault_tolerance=FaultTolerance(
            max_restarts=bounds.max_restarts,
            heartbeat_interval_s=bounds.heartbeat.interval,
            heartbeat_timeout_s=bounds.heartbeat.timeout,
            join_timeout_s=bounds.rendezvous.join_timeout,
            last_call_s=bounds.rendezvous.last_call,
            teardown_grace_s=bounds.teardown.grace,
            control_plane_grace_s=bounds.control_plane_grace,
        ),
        time_limit_s=spec.slurm.time,
        store_url=spec.store.url,
        store_password_file=str(here / spec.store.password_file) if spec.store.password_file else None,
    )


def _plain(path: Path, what: str) -> str:
    text = str(path)
    if not text.isprintable():  # a newline, say, or bytes that are no UTF-8
        raise ConfigError(f"{what} is {text!r}; choose one whose path is printable text")
    return text


def _roles(spec: JobSpec) -> dict[str, Role]:
    if spec.roles:
        return spec.roles
    assert spec.command is not None
    plain = Role(
        command=spec.command,
        nodes_per_replica=spec.nodes,
        min_nodes=spec.min_nodes,
        workers_per_node=spec.workers_per_node,
    )
    return {PLAIN_ROLE: plain}


def _role(name: str, role: Role, spec: JobSpec, here: Path) -> RolePlan:
    return RolePlan(
        name=name,
        command=role.command,
        replicas=role.replicas,
        nodes_per_replica=role.nodes_per_replica,
        min_nodes=role.min_nodes,
        workers_per_node=role.workers_per_node,
        on_failure=role.on_failure,
        workdir=str(here / role.workdir) if role.workdir else None,
        env={**spec.env, **role.env},
    )
