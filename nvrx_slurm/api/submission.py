"""Submitting a job: check what can be checked beforehand, render the script, hand it over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.api.prepared import PreparedJob, prepare
from nvrx_slurm.cluster.base import DEFAULT_FOLDER, Cluster, folder_name
from nvrx_slurm.cluster.slurm import SlurmCluster
from nvrx_slurm.cluster.slurm_config import KillWaitQuestion
from nvrx_slurm.errors import ConfigError, StoreUnreachable, UnsafePath, UsageError
from nvrx_slurm.jobspec.budgets import grace_within
from nvrx_slurm.util.files import JobFiles
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import ClusterName, Job
    from nvrx_slurm.jobspec.model import JobSpec
    from nvrx_slurm.jobspec.plan import Plan

log = get_logger("submit")

STORE_ANSWER_S = 3.0
KILL_WAIT_ANSWER_S = 1.0
"""How long after sbatch's answer Slurm's answer to another question is waited for."""


def submit(
    spec: JobSpec,
    *,
    spares: int | None = None,
    folder: Path | str = DEFAULT_FOLDER,
    cluster: ClusterName = "slurm",
    exclude_suspects: bool = False,
) -> Job:
    """Submit a job: to Slurm, or to this machine. `spares` takes the place of the spec's own number;
    `exclude_suspects` adds the nodes that `nvrx-slurm nodes` lists to `slurm.exclude`.

    Relative paths in the spec count from the current folder. Raises ConfigError, SubmissionRefused,
    MissingProgramError, UsageError (the folder cannot be written), SlurmUnreachable, StoreUnreachable; then nothing
    was submitted and nothing is left behind.
    """
    from nvrx_slurm.api.handle import just_submitted  # only now: `hand_over` needs no handle
    from nvrx_slurm.jobspec.plan import plan

    if spares is not None:
        from msgspec.structs import replace

        from nvrx_slurm.jobspec.values import MOST_NODES

        if isinstance(spares, bool) or not isinstance(spares, int) or not 0 <= spares <= MOST_NODES:
            raise ConfigError(f"must be a whole number from 0 to {MOST_NODES}, not {spares!r}", key="spares")
        spec = replace(spec, spares=spares)
    its_plan = plan(spec, folder=Path(folder))
    if exclude_suspects:
        from nvrx_slurm.api.suspicion import avoiding

        if cluster == "local":
            raise UsageError("exclude_suspects chooses among Slurm's nodes, and a local job runs on none of them")
        spec = avoiding(spec, its_plan.fault_tolerance.attribution.ledger, log.warning)
    prepared = prepare(spec, its_plan, cluster=cluster)
    return just_submitted(hand_over(prepared, cluster=cluster), folder=prepared.folder, cluster=cluster)


def hand_over(prepared: PreparedJob, *, cluster: ClusterName) -> str:
    """Submit a job that was prepared for this cluster, and return its id. Raises what `submit` raises."""
    if prepared.uses_site_store:
        check_store(prepared)
    if cluster == "local":
        return _submitted(prepared, cluster)
    with KillWaitQuestion() as kill_wait:  # asked while sbatch runs, so that it costs no time
        job_id = _submitted(prepared, cluster)
        _warn_of_kill_wait(prepared, job_id, kill_wait.answer(timeout_s=KILL_WAIT_ANSWER_S))
    return job_id


def _submitted(prepared: PreparedJob, cluster: ClusterName) -> str:
    base = Path(prepared.folder)
    job_id = _open(cluster, base).submit(prepared.script, folder=base, name=prepared.name)
    files = JobFiles(base / folder_name(job_id))
    try:
        files.write_plan_json(prepared.plan_json.encode())  # so that readers know the job while it is in the queue
    except (OSError, UnsafePath) as error:  # the job is submitted: too late for an error
        log.warning("%s: the plan could not be kept there (%s)", files.path, error)
    return job_id


def _warn_of_kill_wait(prepared: PreparedJob, job_id: str, kill_wait_s: float | None) -> None:
    """Say it now where Slurm will cut the workers' grace short. Another cluster than the one that was asked may run
    the job: then its id names that one."""
    if kill_wait_s is None or ";" in job_id:
        return
    grace_s, left_s = prepared.teardown_grace_s, grace_within(kill_wait_s)
    if grace_s > left_s:
        log.warning(
            "teardown.grace is %gs, and KillWait=%g of this cluster leaves %gs: when the job is cancelled or"
            " preempted, workers get %gs",
            grace_s,
            kill_wait_s,
            left_s,
            left_s,
        )


def _open(cluster: ClusterName, base: Path) -> Cluster:
    if cluster == "slurm":
        return SlurmCluster()  # all that is needed of what `open_cluster` would load
    from nvrx_slurm.api.handle import open_cluster

    return open_cluster(cluster, base)


def check_store(prepared: PreparedJob) -> None:
    """Knock at the site's own store, as the batch host will. Raises StoreUnreachable, ConfigError."""
    import redis  # takes longer to import than all the rest, and the embedded store needs no knock

    from nvrx_slurm.jobspec.plan import plan_from_json

    plan = plan_from_json(prepared.plan_json.encode())
    assert plan.store.url is not None
    store = redis.Redis.from_url(
        plan.store.url,
        password=_store_password(plan),
        socket_connect_timeout=STORE_ANSWER_S,
        socket_timeout=STORE_ANSWER_S,
    )
    try:
        store.ping()
    except (redis.AuthenticationError, redis.ResponseError) as error:
        raise StoreUnreachable(
            f"the store at {plan.store.url} refuses the password ({error}): set store.password_file,"
            " or NVRX_SLURM_STORE_PASSWORD"
        ) from None
    except (redis.RedisError, OSError) as error:
        raise StoreUnreachable(
            f"the store at {plan.store.url} does not answer ({error}): check store.url, or leave it out for the"
            " embedded store"
        ) from None
    finally:
        store.close()


def _store_password(plan: Plan) -> str | None:
    from nvrx_slurm.jobspec import env
    from nvrx_slurm.jobspec.secret_file import secret_in

    if plan.store.password_file is None:
        return env.store_password()
    return secret_in(plan.store.password_file, key="store.password_file").strip()
