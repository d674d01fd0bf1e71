"""Why a job failed, from its journal: the failure that is asked about, and what is known of it."""

from __future__ import annotations

from msgspec.structs import replace

from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report import source
from nvrx_slurm.report.explanation import Explanation, explanation
from nvrx_slurm.report.failures import FailureTimeline, read_failures
from nvrx_slurm.report.jobs import read_plan
from nvrx_slurm.report.model import JobView
from nvrx_slurm.report.words import asked_for, plural


def explain(job: JobFolder, *, cycle: int | None = None, replica: str | None = None) -> Explanation:
    """Of the last failure that fits. Raises UsageError where there is none."""
    return explain_job(job, cycle=cycle, replica=replica)[0]


def explain_job(job: JobFolder, *, cycle: int | None = None, replica: str | None = None) -> tuple[Explanation, Plan]:
    """The same, and the job's plan. Where the rules were not asked while the job ran, they are asked now."""
    plan = read_plan(job)
    if plan is None:
        raise UsageError(f"job {job.job_id} has not started yet: there is nothing to explain")
    history, view = read_failures(plan, job, source.so_far(job))
    each = _chosen(history.timelines, view, job.job_id, cycle, replica)
    now = None
    if not any(answer.attribution.primary for answer in each.answers):
        from nvrx_slurm.attribution.analyze.analyzer import analyze_sync

        now = analyze_sync(each.inquiry)
    report = explanation(each, job=job.job_id, name=plan.name, now=now)
    return replace(report, restarts_asked=view.restarts_asked), plan


def _chosen(
    timelines: list[FailureTimeline], view: JobView, job_id: str, cycle: int | None, replica: str | None
) -> FailureTimeline:
    """The last failure that fits. Raises UsageError with those that there are."""
    keys = [each.inquiry.key for each in timelines]
    for each, key in zip(reversed(timelines), reversed(keys), strict=True):
        if cycle in (None, key.cycle) and replica in (None, key.replica):
            return each
    if timelines:
        known = ", ".join(f"{key.replica} cycle {key.cycle}" for key in keys[-8:])
        raise UsageError(f"no such failure in job {job_id}; it has: {known}")
    end = f"; it ended with {view.shutdown.exit_code}" if view.shutdown else ""
    count = view.restarts_in_process
    inside = f"; its ranks restarted in process {plural(count, 'time')}, as `events` shows" if count else ""
    asked = view.restarts_asked
    users = f"; {asked_for(asked)}, as `events` shows" if asked else ""
    raise UsageError(f"nothing has failed in job {job_id}{inside}{users}{end}")
