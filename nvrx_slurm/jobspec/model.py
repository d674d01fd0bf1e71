"""The keys of job.yaml: their types, defaults, and how they must relate. All values are frozen."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from nvrx_slurm.jobspec.block import Block as Block
from nvrx_slurm.jobspec.budgets import AFTER_GRACE_S, least_notice_s, most_notice_s
from nvrx_slurm.jobspec.fault_tolerance import FOLLOWS as _FOLLOWS
from nvrx_slurm.jobspec.fault_tolerance import FaultToleranceSpec, Teardown
from nvrx_slurm.jobspec.urls import check_redis_url
from nvrx_slurm.jobspec.values import MOST_NODES as MOST_NODES
from nvrx_slurm.jobspec.values import (
    Command,
    Duration,
    Environment,
    Extra,
    Gpus,
    Line,
    Lines,
    Misfit,
    Name,
    Nodes,
    Positive,
    Spares,
    TimeLimit,
    Workers,
)
from nvrx_slurm.journal.records import OnFailure
from nvrx_slurm.util.durations import words

_BOUNDS = "fault_tolerance"
FOLLOWS: dict[tuple[str | int, ...], tuple[str, tuple[tuple[str, ...], ...]]] = {
    (_BOUNDS, *key): (relation, tuple((_BOUNDS, *leader) for leader in leaders))
    for key, (relation, leaders) in _FOLLOWS.items()
}
"""key → what it is not, `shorter` or `longer`, when nobody sets it, than any of these keys."""

_IN_A_ROLE = {"nodes": "nodes_per_replica"}


class Slurm(Block):
    """What to ask Slurm for. A key that is not set is left to the cluster's default."""

    partition: Line | None = None
    """`--partition`"""
    account: Line | None = None
    """`--account`"""
    qos: Line | None = None
    """`--qos`"""
    time: TimeLimit | None = None
    """Time limit: a duration (`12h`), or as sbatch takes it (`2-00:00:00`; a plain number is minutes)."""
    gpus_per_node: Gpus | None = None
    """`--gpus-per-node`: a number, or `type:number`"""
    cpus_per_task: Positive | None = None
    """CPUs for each node's agent and all of its workers together (one task runs on each node)."""
    mem: Line | None = None
    """`--mem` per node, such as `64G`; `0` is all of it"""
    constraint: Line | None = None
    """`--constraint`"""
    exclude: Line | None = None
    """`--exclude`: nodes not to use"""
    reservation: Line | None = None
    """`--reservation`"""
    segment: Nodes | None = None
    """`--segment`: nodes of one network block (Slurm 23.11 and newer)"""
    extra: Extra = Field(default_factory=dict)
    """Any other sbatch flag, without its dashes: `comment: text`; `true` for a flag without a value."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        for flag in self.extra:
            if (key := flag.replace("-", "_")) in Slurm.model_fields:
                raise Misfit(f"is a key of its own; set `slurm.{key}`", "extra", flag)
        return self


def _store_url(text: str) -> str:
    place = "put it into a file (mode 0600) named by store.password_file, or into NVRX_SLURM_STORE_PASSWORD"
    return check_redis_url(text, password_goes_to=place)


StoreUrl = Annotated[Line, AfterValidator(_store_url)]


def _store_server(text: str) -> str:
    if text in ("auto", "bundled") or text.startswith("/"):
        return text
    raise ValueError("must be `auto`, `bundled`, or the absolute path of a valkey-server or redis-server")


StoreServer = Annotated[Line, AfterValidator(_store_server)]


class StoreSpec(Block):
    """Where the job keeps its state. Without `url`: an embedded Valkey on the batch host."""

    url: StoreUrl | None = None
    """`redis://host:port/db` or `rediss://…` of your own Redis or Valkey; without a password in it. After `rediss://…`
    may stand `?ssl_ca_certs=/file`, and `ssl_certfile` and `ssl_keyfile`; the server's certificate and the host name
    in it are always checked"""
    server: StoreServer = "auto"
    """The program of the embedded store, version 7.0 or newer. `bundled`: the one that is installed with this tool.
    `auto`: a `valkey-server` or `redis-server` on the batch host's PATH, where it has TLS and the job has several
    nodes, or where it is a newer Valkey; else the bundled one. Or the path of a program that only root or you may
    write"""
    password_file: Line | None = None
    """A file (mode 0600) with its password; or set NVRX_SLURM_STORE_PASSWORD"""
    namespace: Name | None = None
    """With `url`: the job's keys begin with `nvrx:{<namespace>/`, for a store that others use too. An ACL user of the
    server can then be kept to them: `nvrx-slurm store acl` prints its rule, and `redis://user@host…` logs it in"""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.url is not None and self.server != "auto":
            raise Misfit(
                "starts a server of its own, and store.url names one that runs: set one of the two", "server"
            )
        if self.url is None and self.namespace is not None:
            raise Misfit("is for a store that several users share: set store.url, too", "namespace")
        return self


class LeaseSpec(Block):
    """The job ends itself, with 143, once nobody has touched this file for so long: whoever submitted it is gone.

    Its workers start once somebody has, so a job whose turn in the queue comes too late runs nothing."""

    file: Line
    """The file, on a file system that the job's nodes share; relative to the folder of job.yaml. `touch` it, several
    times within the timeout."""
    timeout: Duration = 30.0
    """How long after the last touch the job goes on, by the clock of its own batch host."""


class Role(Block):
    """One kind of worker in a job with several."""

    command: Command
    """What each worker runs: a list, or one string that is split as a shell would; no shell runs it."""
    replicas: Nodes = 1
    """How many worlds of this role run side by side."""
    nodes_per_replica: Nodes = 1
    """Nodes in each of them."""
    min_nodes: Nodes | None = None
    """With no spare left, a replica goes on with as few as this."""
    workers_per_node: Workers = 1
    """Worker processes on each node."""
    on_failure: OnFailure = "restart_replica"
    """What follows when a worker fails: its replica starts again, or all do; the replica ends alone; the job ends."""
    workdir: Line | None = None
    """Where this role's workers start."""
    env: Environment = Field(default_factory=dict)
    """Environment of this role's workers, on top of the job's."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        _check_min_nodes(self.min_nodes, self.nodes_per_replica, "nodes_per_replica")
        return self


def _store(value: object) -> object:
    return {} if value == "embedded" else value


class JobSpec(Block):
    """A job: what to run, on how many nodes, and what to do when something breaks."""

    name: Name
    """The job's name, for Slurm and for people."""
    command: Command | None = None
    """What each worker runs: a list, or one string that is split as a shell would; no shell runs it."""
    nodes: Nodes = 1
    """Nodes that work. Hot spares come on top."""
    spares: Spares = 0
    """Hot spares: nodes that stand by in the allocation. All roles share them."""
    min_nodes: Nodes | None = None
    """With no spare left, go on with as few nodes as this. Without it the job ends with 75, worth a retry."""
    workers_per_node: Workers = 1
    """Worker processes on each node, usually one a GPU."""
    workdir: Line | None = None
    """Where workers start; relative to the folder of job.yaml. Without it: the folder you submit from."""
    env: Environment = Field(default_factory=dict)
    """Environment of all workers. No secrets: the job script shows it."""
    setup: Lines = ()
    """Shell lines of the job script before anything starts: `module load …`, `source venv/bin/activate`."""
    roles: dict[Name, Role] | None = None
    """Several kinds of workers, by name, instead of `command` and `nodes` (an RL job: policy and rollout)."""
    slurm: Slurm = Slurm()
    fault_tolerance: FaultToleranceSpec = FaultToleranceSpec()
    store: Annotated[StoreSpec, BeforeValidator(_store)] = StoreSpec()
    lease: LeaseSpec | None = None
    """A file that keeps the job alive; see below."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.roles:
            plain = {"command", "nodes", "min_nodes", "workers_per_node"} & self.model_fields_set
            if plain:
                key = min(plain)
                raise Misfit(f"with `roles`, set `{_IN_A_ROLE.get(key, key)}` in each role instead", key)
        elif self.command is None:
            raise ValueError("`command` is missing: say what each worker runs (or give `roles`)")
        _check_min_nodes(self.min_nodes, self.nodes, "nodes")
        roles = (self.roles or {}).values()
        total = self.spares + (sum(role.replicas * role.nodes_per_replica for role in roles) or self.nodes)
        if total > MOST_NODES:
            raise Misfit(f"{total} nodes with the spares; at most {MOST_NODES} are possible", "spares")
        _check_notice(self.fault_tolerance.teardown, self.slurm.time)
        return self


def _check_min_nodes(min_nodes: int | None, nodes: int, key: str) -> None:
    if min_nodes is not None and min_nodes > nodes:
        raise Misfit(f"must be at most `{key}` ({nodes}), not {min_nodes}", "min_nodes")


def _check_notice(teardown: Teardown, time_limit_s: float | None) -> None:
    """What happens ahead of the time limit must fit there. The defaults always do: no time limit is that short."""
    if time_limit_s is None:
        return
    needed_s, most_s = least_notice_s(teardown.grace, teardown.checkpoint_s), most_notice_s(time_limit_s)
    if needed_s <= most_s:
        return
    saving = f"teardown.checkpoint_timeout ({words(teardown.checkpoint_s)}), " if teardown.checkpoint_s else ""
    raise Misfit(
        f"{saving}teardown.grace ({words(teardown.grace)}) and {words(AFTER_GRACE_S)} for the kill take"
        f" {words(needed_s)} ahead of slurm.time ({words(time_limit_s)}); at most half of it ({words(most_s)}) can be"
        " spent so: shorten them, or ask for more time",
        "fault_tolerance",
        "teardown",
        "checkpoint_timeout" if teardown.checkpoint_s > teardown.grace else "grace",
    )
