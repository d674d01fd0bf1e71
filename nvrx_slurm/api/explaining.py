"""Why a job failed, from its journal: the failure that is asked about, and what is known of it."""

from __future__ import annotations

from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report import source
from nvrx_slurm.report.explanation import Explanation, explanation
from nvrx_slurm.report.failure_replay import ReplayedFailure, read_failures
from nvrx_slurm.report.jobs import read_plan
from nvrx_slurm.report.model import JobView
from nvrx_slurm.report.words import asked_for, plural


def explain_job(job: JobFolder, *, cycle: int | None = None, replica: str | None = None) -> tuple[Explanation, Plan]:
    """The last failure that fits, and the job's plan. Raises UsageError where there is none."""
    plan = read_plan(job)
    if plan is None:
        raise UsageError(f"job {job.job_id} has not started yet: there is nothing to explain")
    failures, view = read_failures(plan, job, source.so_far(job))
    each = _chosen(failures, view, job.job_id, cycle, replica)
    now = None
    # The rules were not asked while the job ran, or a source that was asked names no line: they are asked now.
    if not any(answer.attribution.primary for answer in each.timeline.answers):
        from nvrx_slurm.attribution.analyze.analyzer import analyze_sync

        now = analyze_sync(each.inquiry)
    return explanation(each, view, job=job.job_id, name=plan.name, now=now), plan


def _chosen(
    failures: list[ReplayedFailure], view: JobView, job_id: str, cycle: int | None, replica: str | None
) -> ReplayedFailure:
    """The last failure that fits. Raises UsageError with those that there are."""
    keys = [each.inquiry.key for each in failures]
    for each, key in zip(reversed(failures), reversed(keys), strict=True):
        if cycle in (None, key.cycle) and replica in (None, key.replica):
            return each
    if failures:
        known = ", ".join(f"{key.replica} cycle {key.cycle}" for key in keys[-8:])
        raise UsageError(f"no such failure in job {job_id}; it has: {known}")
    end = f"; it ended with {view.shutdown.exit_code}" if view.shutdown else ""
    count = view.restarts_in_process
    inside = f"; its ranks restarted in process {plural(count, 'time')}, as `events` shows" if count else ""
    asked = view.restarts_asked
    users = f"; {asked_for(asked)}, as `events` shows" if asked else ""
    raise UsageError(f"nothing has failed in job {job_id}{inside}{users}{end}")
