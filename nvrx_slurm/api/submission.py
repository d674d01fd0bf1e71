"""Submitting a job: check what can be checked beforehand, render the script, hand it over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.api.handle import ClusterName, Job, open_cluster
from nvrx_slurm.cluster.base import DEFAULT_FOLDER
from nvrx_slurm.errors import ConfigError, StoreUnreachable
from nvrx_slurm.folder import JobFolder
from nvrx_slurm.log import get_logger

if TYPE_CHECKING:
    from nvrx_slurm.config.model import JobSpec
    from nvrx_slurm.records import Plan

log = get_logger("submit")

STORE_ANSWER_S = 3.0


def submit(
    spec: JobSpec,
    *,
    spares: int | None = None,
    folder: Path | str = DEFAULT_FOLDER,
    cluster: ClusterName = "slurm",
) -> Job:
    """Submit a job: to Slurm, or to this machine. `spares` takes the place of the spec's own number.

    Relative paths in the spec count from the current folder. Raises ConfigError, SubmissionRefused,
    MissingProgramError, UsageError (the folder cannot be written), SlurmUnreachable, StoreUnreachable; then nothing
    was submitted and nothing is left behind.
    """
    from nvrx_slurm.config.plan import plan

    if spares is not None:
        spec = _with_spares(spec, spares)
    return submit_planned(spec, plan(spec, folder=Path(folder)), cluster=cluster)


def submit_planned(spec: JobSpec, plan: Plan, *, cluster: ClusterName) -> Job:
    """`submit`, where the plan has been made already."""
    if plan.store_url is not None:
        check_store(plan)
    script = render(spec, plan, cluster=cluster)
    base = Path(plan.folder)
    job_id = open_cluster(cluster, base).submit(script, folder=base, name=plan.name)
    job = Job(job_id, folder=base, cluster=cluster)
    try:
        JobFolder(job.folder).write_plan(plan)  # so that readers know the job while it is still in the queue
    except OSError as error:  # the job is submitted: too late for an error
        log.warning("%s: the plan could not be kept there (%s)", job.folder, error.strerror)
    return job


def render(spec: JobSpec, plan: Plan, *, cluster: ClusterName) -> str:
    """The job script that `submit_planned` submits."""
    from nvrx_slurm.render.script import render_job

    return render_job(spec, plan, cluster=cluster, python=sys.executable)


def check_store(plan: Plan) -> None:
    """Knock at the site's own store, as the batch host will. Raises StoreUnreachable, ConfigError."""
    import redis  # takes longer to import than all the rest, and the embedded store needs no knock

    assert plan.store_url is not None
    store = redis.Redis.from_url(
        plan.store_url,
        password=_store_password(plan),
        socket_connect_timeout=STORE_ANSWER_S,
        socket_timeout=STORE_ANSWER_S,
    )
    try:
        store.ping()
    except (redis.AuthenticationError, redis.ResponseError) as error:
        raise StoreUnreachable(
            f"the store at {plan.store_url} refuses the password ({error}): set store.password_file,"
            " or NVRX_SLURM_STORE_PASSWORD"
        ) from None
    except (redis.RedisError, OSError) as error:
        raise StoreUnreachable(
            f"the store at {plan.store_url} does not answer ({error}): check store.url, or leave it out for the"
            " embedded store"
        ) from None
    finally:
        store.close()


def _store_password(plan: Plan) -> str | None:
    from nvrx_slurm.config import env

    if plan.store_password_file is None:
        return env.store_password()
    try:
        return Path(plan.store_password_file).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"{plan.store_password_file}: cannot be read ({error.strerror})", key="store.password_file"
        ) from None


def _with_spares(spec: JobSpec, spares: int) -> JobSpec:
    from nvrx_slurm.config.model import MOST_NODES

    if isinstance(spares, bool) or not isinstance(spares, int) or not 0 <= spares <= MOST_NODES:
        raise ConfigError(f"must be a whole number from 0 to {MOST_NODES}, not {spares!r}", key="spares")
    return spec.model_copy(update={"spares": spares})
