"""What the shell completes: job ids, and what belongs to a job.

The user types meanwhile: nothing here asks Slurm or the store, and what cannot be read gives no answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from nvrx_slurm.errors import NvrxError

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.reading import Block
    from nvrx_slurm.journal.folder import JobFolder

MOST_JOBS = 50
_FLOW_NAME = re.compile(r"^name:[ \t]*([\w.-]+)", re.MULTILINE)

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completing(answers: Callable[[click.Context], Iterable[str]]) -> Complete:
    """What click calls: those of the answers that begin with what is typed."""

    @functools.wraps(answers)
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            fitting = (text for text in answers(ctx) if text.startswith(incomplete))
            return [CompletionItem(text) for text in islice(fitting, MOST_JOBS)]
        except (NvrxError, OSError):
            return []

    return complete


@completing
def complete_jobs(ctx: click.Context) -> Iterator[str]:
    """The ids of the user's jobs, the newest first."""
    from nvrx_slurm.report.jobs import my_jobs

    return (job.job_id for job in my_jobs(_base(ctx)))


@completing
def complete_ranks(ctx: click.Context) -> Iterator[str]:
    """The ranks of the job, or of the replica, that the line names."""
    from nvrx_slurm.report.jobs import read_plan

    plan = read_plan(_job(ctx))
    replica = ctx.params.get("replica") or ""
    roles = [role for role in plan.roles if replica.startswith(f"{role.name}-") or not replica] if plan else []
    return map(str, range(max((role.world_size for role in roles), default=0)))


@completing
def complete_replicas(ctx: click.Context) -> Iterator[str]:
    """The replicas of the job."""
    from nvrx_slurm.report.jobs import read_plan

    plan = read_plan(_job(ctx))
    return iter(plan.replica_roles if plan else ())


@completing
def complete_job_or_node(ctx: click.Context) -> Iterator[str]:
    """For `[JOB] NODE`: the nodes of the newest job and the ids of all; after a job, its nodes."""
    from nvrx_slurm.report.jobs import my_jobs

    words = ctx.params.get("words") or ()
    info = _job(ctx, words[0] if words else None).read_info()
    yield from info.nodes if info else ()
    if not words:
        yield from (job.job_id for job in my_jobs(_base(ctx)))


@completing
def complete_events(ctx: click.Context) -> list[str]:
    """The events of a journal."""
    from nvrx_slurm.report.words import event_names

    return event_names()


@completing
def complete_keys(ctx: click.Context) -> Iterator[str]:
    """Every key of job.yaml that holds a value, as --set takes it."""
    from nvrx_slurm.jobspec.model import JobSpec

    return (f"{key}=" for key in _keys(JobSpec))


@completing
def complete_flows(ctx: click.Context) -> Iterator[str]:
    """The names of the flows in the files and folders that the line names."""
    for path in map(Path, ctx.params.get("paths") or ctx.args):
        for file in sorted(path.glob("*.yaml")) if path.is_dir() else [path]:
            if not file.name.endswith(".job.yaml") and (found := _FLOW_NAME.search(file.read_text(errors="replace"))):
                yield found[1]


def _keys(block: type[Block], above: str = "") -> Iterator[str]:
    from nvrx_slurm.jobspec.reading import block_in, keys_of

    for name, key in keys_of(block).items():
        inner = block_in(key.rule)
        if inner is None:
            yield above + name
        elif key.rule.kind is not dict:  # the keys of `roles` are the user's
            yield from _keys(inner, f"{above}{name}.")


def _job(ctx: click.Context, job_id: str | None = None) -> JobFolder:
    """The job that the line so far means. Raises UsageError."""
    from nvrx_slurm.report.jobs import base_of, find_job, newest_job

    # While an option's value is typed, click leaves the arguments before it in `args`.
    base, job_id = _base(ctx), job_id or ctx.params.get("job_id") or next(iter(ctx.args), None)
    if job_id is None or job_id == "last":
        return newest_job(base)
    return find_job(base_of(job_id) if base is None else base, job_id)


def _base(ctx: click.Context) -> Path | None:
    """The base folder that the line so far names."""
    from click.core import ParameterSource

    named = ctx.get_parameter_source("folder")
    return None if named in (None, ParameterSource.DEFAULT) else ctx.params["folder"]
