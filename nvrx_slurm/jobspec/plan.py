"""JobSpec → Plan: what agents and the controller read, with nothing left to decide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.model import (
    AttributionSpec,
    BackoffSpec,
    DataflowSpec,
    FaultToleranceSpec,
    HangSpec,
    JobSpec,
    LlmSpec,
    ProgressSpec,
    RoleSpec,
    SlackSpec,
)
from nvrx_slurm.jobspec.urls import is_redis
from nvrx_slurm.journal.records import (
    BackoffPlan,
    FaultTolerance,
    HangBounds,
    Lease,
    Plan,
    ProgressPlan,
    RolePlan,
)
from nvrx_slurm.journal.verdicts import AttributionPlan, DataflowPlan, LlmPlan, SlackPlan

PLAIN_ROLE = "main"
_Find = Callable[[str | None], str | None]
"""The absolute path of a file that job.yaml names, if it does."""


def plan(spec: JobSpec, *, folder: Path, job_file: Path | None = None) -> Plan:
    """The plan of a job whose folder will be `<folder>/<job id>`.

    Files and `workdir` count from where job.yaml lies; without the latter workers start in the current folder. Raises
    ConfigError for a path that no log line and no UTF-8 file can hold.
    """
    here = job_file.resolve().parent if job_file else Path.cwd()

    def find(file: str | None) -> str | None:
        if not file:
            return None
        return str(here / (Path(file).expanduser() if file.startswith("~/") else file))

    return Plan(
        name=spec.name,
        roles=tuple(_role(name, role, spec, here) for name, role in _roles(spec).items()),
        spares=spec.spares,
        workdir=_plain(here / spec.workdir if spec.workdir else Path.cwd(), "the folder that workers start in"),
        folder=_plain(folder.resolve(), "the job folder"),
        fault_tolerance=_fault_tolerance(spec.fault_tolerance, find),
        time_limit_s=spec.slurm.time,
        store_url=spec.store.url,
        store_password_file=find(spec.store.password_file),
        store_server=spec.store.server,
        store_namespace=spec.store.namespace,
        lease=Lease(file=str(here / spec.lease.file), timeout_s=spec.lease.timeout) if spec.lease else None,
    )


def _fault_tolerance(bounds: FaultToleranceSpec, find: _Find) -> FaultTolerance:
    beat, teardown = bounds.heartbeat, bounds.teardown
    return FaultTolerance(
        max_restarts=bounds.max_restarts.count,
        max_restarts_per_s=bounds.max_restarts.per_s,
        max_job_restarts=bounds.max_job_restarts,
        max_node_losses=bounds.max_node_losses,
        max_preemptions=bounds.max_preemptions,
        progress=_progress(bounds.progress, find),
        attribution=_attribution(bounds.attribution, find),
        quarantine_after=bounds.quarantine_after,
        heartbeat_interval_s=beat.interval,
        heartbeat_timeout_s=beat.timeout,
        startup_timeout_s=beat.startup_timeout,
        fence_timeout_s=bounds.fence_timeout,
        join_timeout_s=bounds.rendezvous.join_timeout,
        last_call_s=bounds.rendezvous.last_call,
        teardown_grace_s=teardown.grace,
        stop_signal=teardown.stop_signal,
        checkpoint_signal=teardown.checkpoint_signal,
        checkpoint_timeout_s=teardown.checkpoint_timeout,
        gpu_memory_below_bytes=teardown.gpu_memory_below,
        gpu_reclaim_timeout_s=teardown.gpu_reclaim_timeout,
        control_plane_grace_s=bounds.control_plane_grace,
        hang=_hang(bounds.hang),
        backoff=_backoff(bounds.backoff),
    )


def _hang(bounds: HangSpec) -> HangBounds:
    return HangBounds(
        startup_s=bounds.startup_timeout,
        step_s=bounds.step_timeout,
        no_output_s=bounds.no_output,
        exit_skew_s=bounds.exit_skew,
        learn=bounds.learn,
        safety_factor=bounds.safety_factor,
        warmup=bounds.warmup,
    )


def _backoff(asked: BackoffSpec) -> BackoffPlan | None:
    if not asked.max:
        return None
    return BackoffPlan(after=asked.after, within_s=asked.within, initial_s=asked.initial, max_s=asked.max)


def _progress(progress: ProgressSpec, find: _Find) -> ProgressPlan:
    return ProgressPlan(
        max_cycles=progress.max_no_progress_cycles,
        min_steps=progress.min_progress_steps,
        iteration_file=find(progress.iteration_file),
        log_pattern=progress.log_pattern,
    )


def _attribution(asked: AttributionSpec, find: _Find) -> AttributionPlan:
    return AttributionPlan(
        enable_lib=asked.enable_lib,
        attrsvc_url=asked.attrsvc_url,
        manage_attrsvc=asked.manage_attrsvc,
        enable_mcp=asked.enable_mcp,
        mcp_command=asked.mcp_command or (),
        http_urls=asked.http_urls,
        token_file=find(asked.token_file),
        timeout_s=asked.timeout,
        decision_timeout_s=asked.decision_timeout,
        dry_run=asked.dry_run,
        aggregation=asked.aggregation,
        rules=tuple(str(find(file)) for file in asked.rules),
        llm=_llm(asked.llm, find) if asked.llm else None,
        slack=_slack(asked.slack, find) if asked.slack else None,
        dataflow=_dataflow(asked.dataflow, find) if asked.dataflow else None,
        ledger=asked.ledger if is_redis(asked.ledger) else find(asked.ledger),
    )


def _llm(llm: LlmSpec, find: _Find) -> LlmPlan:
    return LlmPlan(url=llm.url, model=llm.model, key_file=find(llm.key_file), style=llm.style, timeout_s=llm.timeout)


def _slack(slack: SlackSpec, find: _Find) -> SlackPlan:
    return SlackPlan(channel=slack.channel, token_file=find(slack.token_file), mention=slack.mention, url=slack.url)


def _dataflow(dataflow: DataflowSpec, find: _Find) -> DataflowPlan:
    return DataflowPlan(url=dataflow.url, index=dataflow.index, token_file=find(dataflow.token_file))


def _plain(path: Path, what: str) -> str:
    text = str(path)
    if not text.isprintable():  # a newline, say, or bytes that are no UTF-8
        raise ConfigError(f"{what} is {text!r}; choose one whose path is printable text")
    return text


def _roles(spec: JobSpec) -> dict[str, RoleSpec]:
    if spec.roles:
        return spec.roles
    assert spec.command is not None
    plain = RoleSpec(
        command=spec.command,
        nodes_per_replica=spec.nodes,
        min_nodes=spec.min_nodes,
        workers_per_node=spec.workers_per_node,
    )
    return {PLAIN_ROLE: plain}


def _role(name: str, role: RoleSpec, spec: JobSpec, here: Path) -> RolePlan:
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
