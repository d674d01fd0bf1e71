"""Submitting a job: check what can be checked beforehand, render the script, hand it over."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nvrx_slurm.cluster.base import DEFAULT_FOLDER, SCRIPT_NAME, Cluster, check_cluster, folder_name
from nvrx_slurm.cluster.slurm import SlurmCluster
from nvrx_slurm.cluster.slurm_config import KillWaitQuestion
from nvrx_slurm.errors import ConfigError, NvrxError, StoreUnreachable, UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.budgets import grace_within
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import CLUSTER, ORIGINS, JobFiles
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import Job
    from nvrx_slurm.cluster.base import ClusterName
    from nvrx_slurm.jobspec.model import JobSpec, StoreSpec
    from nvrx_slurm.jobspec.plan import Plan

log = get_logger("submit")

STORE_ANSWER_S = 3.0
# How long after sbatch's answer Slurm's answer to another question is waited for.
KILL_WAIT_ANSWER_S = 1.0


class PreparedJob(NamedTuple):
    """A job that is ready for a cluster: all that is left to do needs no configuration.

    `folder`: the base folder, absolute. `plan_json`: as `plan.json`.
    """

    name: str
    folder: str
    script: str
    plan_json: str
    site_store: StoreSpec | None = None
    """The site's own store, which is knocked at before anything is submitted."""
    origins_json: str = ""
    """As `Loaded.origins`; of a job whose configuration was made in Python: nothing."""
    teardown_grace_s: float = 0.0
    """What Slurm's KillWait is compared with when the job is submitted."""


def prepare(
    spec: JobSpec, plan: Plan, *, cluster: ClusterName, origins: dict[str, tuple[str, str]] | None = None
) -> PreparedJob:
    """Render the job's script, which runs under this interpreter. Raises ConfigError, also for a file of failure
    attribution that cannot be used."""
    check_attribution(plan)
    from nvrx_slurm.jobspec.plan import plan_to_json
    from nvrx_slurm.jobspec.script import render_job

    return PreparedJob(
        name=plan.name,
        folder=plan.folder,
        script=render_job(spec, plan, cluster=cluster, python=sys.executable),
        plan_json=plan_to_json(plan).decode(),
        teardown_grace_s=plan.fault_tolerance.teardown.grace,
        site_store=None if plan.store.url is None else plan.store,
        origins_json=json.dumps(origins) if origins else "",
    )


def submit(
    spec: JobSpec,
    *,
    spares: int | str | None = None,
    folder: Path | str | None = None,
    cluster: ClusterName = "slurm",
    exclude_suspects: bool = False,
) -> Job:
    """Submit a job: to Slurm, or to this machine. `spares` takes the place of the spec's own, a number or
    `"0..2"`; `exclude_suspects` adds the nodes that `nvrx-slurm nodes` lists to `slurm.exclude`. Without `folder`:
    NVRX_SLURM_FOLDER, or else `nvrx-jobs` here.

    Relative paths in the spec count from the current folder. Raises ConfigError, SubmissionRefused,
    MissingProgramError, UsageError (the folder cannot be written), SlurmUnreachable, StoreUnreachable; then nothing
    was submitted and nothing is left behind.
    """
    check_cluster(cluster)
    from nvrx_slurm.api.handle import just_submitted  # only now: `hand_over` needs no handle
    from nvrx_slurm.jobspec.plan import plan

    if spares is not None:
        from msgspec.structs import replace

        try:
            spec = replace(spec, spares=spares)  # which checks it, and takes a range apart
        except ValueError as error:
            problem = str(error).removeprefix("spares: ")
            raise ConfigError(f"{problem} (a number, or a range like '0..2')", key="spares") from None
    its_plan = plan(spec, folder=Path(folder or env.base_folder() or DEFAULT_FOLDER))
    if exclude_suspects:
        from nvrx_slurm.api.suspicion import avoiding

        if cluster == "local":
            raise UsageError("exclude_suspects chooses among Slurm's nodes, and a local job runs on none of them")
        # A plan holds no `slurm.exclude`: the one that was made before is still that of this spec.
        spec = avoiding(spec, its_plan.fault_tolerance.attribution.ledger, log.warning)
    prepared = prepare(spec, its_plan, cluster=cluster)
    return just_submitted(hand_over(prepared, cluster=cluster), folder=prepared.folder, cluster=cluster)


def hand_over(prepared: PreparedJob, *, cluster: ClusterName) -> str:
    """Submit a job that was prepared for this cluster, and return its id. Raises what `submit` raises."""
    if prepared.site_store is not None:
        check_store(prepared.site_store)
    if cluster == "local":
        return _submitted(prepared, cluster)
    with KillWaitQuestion() as kill_wait:  # asked while sbatch runs, so that it costs no time
        job_id = _submitted(prepared, cluster)
        kill_wait_s = kill_wait.answer(timeout_s=KILL_WAIT_ANSWER_S)
    # An id that names a cluster: another one than that which was asked may run the job.
    if kill_wait_s is not None and ";" not in job_id:
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
    return job_id


def _submitted(prepared: PreparedJob, cluster: ClusterName) -> str:
    base = Path(prepared.folder)
    port: Cluster = SlurmCluster()
    if cluster == "local":
        from nvrx_slurm.cluster.local import LocalCluster  # a Slurm job needs nothing of it

        port = LocalCluster(base)
    # Before sbatch: a record in the job's folder that is older is of an earlier job.
    began = SystemClock().wall()
    job_id = port.submit(prepared.script, folder=base, name=prepared.name)
    files = JobFiles(base / folder_name(job_id))
    try:
        if cluster == "slurm" and (files.path / "job.json").exists():
            from nvrx_slurm.journal.folder import JobFolder, set_earlier_job_aside  # 30 ms, and hardly ever needed

            if aside := set_earlier_job_aside(JobFolder(files.path), begun_before=began):
                log.warning("an earlier job had the id %s; its folder is now %s", job_id, aside)
                files.create()
                for name in (CLUSTER, SCRIPT_NAME):  # which this submission has written there
                    with contextlib.suppress(FileNotFoundError):
                        (aside / name).replace(files.path / name)
        # So that readers know the job while it is in the queue. The plan of a batch host that has started by now
        # stays: it has settled the spares, and agents refuse any other by its SHA-256.
        with contextlib.suppress(FileExistsError):
            files.write_plan_json(prepared.plan_json.encode(), replace=False)
        if prepared.origins_json:
            files.write(ORIGINS, prepared.origins_json.encode())
    except (OSError, NvrxError) as error:  # the job is submitted: too late for an error
        log.warning("%s: the plan could not be kept there (%s)", files.path, error)
    return job_id


def check_attribution(plan: Plan) -> None:
    """Read the files that failure attribution names, as the job will at its first failure, and warn where a package
    is missing that it needs. Raises ConfigError, which lists all that is wrong with the files."""
    asked = plan.fault_tolerance.attribution
    files = {
        "token_file": asked.token_file if asked.attrsvc_url or asked.http_urls else None,
        "llm.key_file": asked.llm.key_file if asked.llm else None,
        "slack.token_file": asked.slack.token_file if asked.slack else None,
        "dataflow.token_file": asked.dataflow.token_file if asked.dataflow else None,
    }
    problems: list[ConfigError] = []
    for key, file in files.items():
        if file is not None:
            from nvrx_slurm.attribution.http_client import token_of  # loads asyncio; few jobs name such a file

            try:
                token_of(file, None, key=f"fault_tolerance.attribution.{key}")
            except ConfigError as problem:
                problems.append(problem)
    if asked.rules:
        from nvrx_slurm.attribution.rules.catalogue import usable_files

        _, wrong = usable_files([Path(rule) for rule in asked.rules])
        problems += wrong
    if problems:
        from nvrx_slurm.jobspec.reading import together

        raise together(problems)
    needed = {"mcp": asked.enable_mcp}
    has_service = asked.manage_attrsvc or bool(asked.attrsvc_url or asked.http_urls)
    needed["httpx2"] = has_service or any(each is not None for each in (asked.llm, asked.slack, asked.dataflow))
    needed["starlette"] = needed["uvicorn"] = asked.manage_attrsvc
    # The job runs under this interpreter. No error: the job runs without these sources and receivers, too.
    missing = [name for name, is_needed in needed.items() if is_needed and importlib.util.find_spec(name) is None]
    if missing:
        log.warning(
            "failure attribution is configured with sources or receivers that need %s, which is not installed:"
            " pip install 'nvrx-slurm[attribution]'",
            ", ".join(missing),
        )


# What a job needs of a store: its keys, and scripts that write to them.
_WRITE_AND_REMOVE = "redis.call('SET', KEYS[1], '1', 'EX', 60) return redis.call('UNLINK', KEYS[1])"


def check_store(site: StoreSpec) -> None:
    """Write one key to the site's own store, below the job's namespace, and remove it. Raises StoreUnreachable,
    ConfigError."""
    import redis  # takes longer to import than all the rest, and the embedded store needs no check

    from nvrx_slurm.store.keys import Keys, in_namespace
    from nvrx_slurm.util.ids import new_incarnation
    from nvrx_slurm.util.secret_file import secret_in

    assert site.url is not None
    file = site.password_file
    store = redis.Redis.from_url(
        site.url,
        password=env.get(env.STORE_PASSWORD) if file is None else secret_in(file, key="store.password_file").strip(),
        socket_connect_timeout=STORE_ANSWER_S,
        socket_timeout=STORE_ANSWER_S,
    )
    key = Keys(in_namespace(site.namespace, f"check-{new_incarnation()}")).epoch
    try:
        store.evalsha(store.script_load(_WRITE_AND_REMOVE), 1, key)
    # In this order: to redis-py a wrong password is a kind of ConnectionError, and so a RedisError.
    except (redis.AuthenticationError, redis.exceptions.AuthenticationWrongNumberOfArgsError) as error:
        raise StoreUnreachable(
            f"the store at {site.url} refuses the password ({error}): set store.password_file,"
            " or NVRX_SLURM_STORE_PASSWORD"
        ) from None
    except redis.ResponseError as error:  # a replica, a node of a cluster, a full server, an ACL user's rule
        raise StoreUnreachable(
            f"the store at {site.url} does not take a job's records ({error}): store.url must name a primary, and its"
            " user must have what `nvrx-slurm store acl` prints for store.namespace"
        ) from None
    except (redis.RedisError, OSError) as error:
        raise StoreUnreachable(
            f"the store at {site.url} does not answer ({error}): check store.url, or leave it out for the"
            " embedded store"
        ) from None
    finally:
        store.close()
