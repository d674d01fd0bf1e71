"""Why a job did not end with 0: a few lines on standard error, the same from every command that sees a job end.

The first failing rank's last lines with their traceback, the hint, the decision and its reason, and the command that
tells more. Where the sources of attribution had no time to answer, the rules are asked here.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.cluster.base import DEFAULT_FOLDER
from nvrx_slurm.cluster.tasks import first_failed, results_of_tasks
from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_NO_RESTART, EXIT_TERMINATED, EXIT_TIMEOUT, NvrxError
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.verdicts import Attribution, Verdict
from nvrx_slurm.report.failures import surest
from nvrx_slurm.report.jobs import ENDINGS, read_plan
from nvrx_slurm.report.logs import end_of
from nvrx_slurm.report.presence import in_slurm
from nvrx_slurm.report.words import at_last_step, others_lost_it, ranks_of
from nvrx_slurm.util.sanitize import one_line, uncoloured

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.plan import Plan
    from nvrx_slurm.report.failure_replay import ReplayedFailure

MOST_LINES = 10
MOST_TRACEBACK_LINES = 30
TAIL_BYTES = 64 << 10
# Of a cycle's logs: the command must end. `explain` reads them all.
MOST_ANALYZED_BYTES = 64 << 20

HOST_LOG = "host.log"
AGENT_ERROR = "nvrx-slurm agent: error: "
TRACEBACK = "Traceback (most recent call last)"
_HOW = {"cancelled": "was cancelled", "timeout": "ran out of time", "lost": "was lost", "stopped": "was stopped"}
# Of a job that ended so, earlier failures are not the reason.
NOT_BY_A_FAILURE = (EXIT_TIMEOUT, EXIT_INTERRUPTED, EXIT_TERMINATED)


def print_end(folder: JobFolder, exit_code: int, *, slurm_says: str | None = None) -> None:
    """Say on standard error why the job ended with `exit_code`; nothing for 0. Never raises for what it cannot read.

    `slurm_says`: Slurm's state, for a job that left no result.
    """
    if exit_code == 0:
        return
    lines = list(end_lines(folder, exit_code, slurm_says=slurm_says))
    if sys.stderr.isatty():
        import click

        lines = [click.style(lines[0], fg="red", bold=True), *lines[1:-1], click.style(lines[-1], bold=True)]
    sys.stdout.flush()  # where both lead to one terminal or file this comes last
    print("\n" + "\n".join(lines), file=sys.stderr, flush=True)


def end_lines(folder: JobFolder, exit_code: int, *, slurm_says: str | None = None) -> Iterator[str]:
    """The lines, each safe to print. The first names the job and its end, the last the command that tells more."""
    job_id = folder.job_id
    result = folder.read_result()
    if result is None and slurm_says is None and (end := folder.read_slurm_end()) is not None:
        slurm_says = end.state
    if result is not None:
        reason = result.reason
    elif not in_slurm(job_id, folder.read_info()):
        reason = "its host process is gone and left no result"
    else:
        reason = f"Slurm says {slurm_says}" if slurm_says else "it left no result"
    what, _, last = reason.partition("; last: ")
    how = ENDINGS.get(exit_code, "failed")
    how = _HOW.get(how, how)
    failure: ReplayedFailure | None = None
    plan, problem = None, ""
    if exit_code not in NOT_BY_A_FAILURE:
        try:
            if (plan := read_plan(folder)) is not None:
                from nvrx_slurm.report import source
                from nvrx_slurm.report.failure_replay import read_failures

                # Of the folder alone: the job has ended, and its store ends with it.
                failures, _ = read_failures(plan, folder, source.so_far(folder, live=False))
                # The one that ended the job. Of others the job had recovered, or was about to.
                failure = next((each for each in reversed(failures) if each.timeline.shutdown), None)
        except (NvrxError, OSError) as error:
            problem = f"  its journal cannot be read: {error}"
    why = "" if failure is not None or what == how.removeprefix("was ") else f": {what}"
    yield one_line(f"nvrx-slurm: job {job_id} {how} with exit code {exit_code}{why}")
    if problem:
        yield one_line(problem)
    if failure is not None and plan is not None:
        yield from _failure_lines(failure, plan, folder)
    elif exit_code not in NOT_BY_A_FAILURE:
        if last:
            yield one_line(f"  {last}")
        no_agent = [line for line in _last_lines(folder.job_log) if line.startswith(AGENT_ERROR)]
        yield from (one_line(f"  {line.removeprefix(AGENT_ERROR)}") for line in dict.fromkeys(no_agent))
        # What the job script printed, and what the batch host wrote from its start on.
        for log in (
            () if no_agent else (folder.path / HOST_LOG, folder.path.parent / f"slurm-{job_id}.out", folder.job_log)
        ):
            if lines := _last_lines(log):
                yield from _excerpt(log, lines)
                break
    yield one_line(f"  logs      {_from_here(folder.path)}")
    base = folder.path.parent
    where = "" if base.absolute() == DEFAULT_FOLDER.absolute() else f" --folder {shlex.quote(_from_here(base))}"
    # An array has no journal to explain: its first task that failed has.
    yield one_line(f"→ nvrx-slurm explain {first_failed(results_of_tasks(folder)) or job_id}{where}")


def _failure_lines(failure: ReplayedFailure, plan: Plan, folder: JobFolder) -> Iterator[str]:
    key, failed = failure.inquiry.key, failure.inquiry.failed
    if failed is None:
        return
    step = at_last_step(failed, failure.last_step)
    yield one_line(f"  {failed.cause}{step} ({key.replica} cycle {key.cycle})")
    if followed := others_lost_it(failure.peers_lost):
        yield one_line(f"  {followed}: {ranks_of(failure.peers_lost)}")
    answer = _answer(failure)
    rank = failed.rank
    if answer is not None and answer.primary is not None and answer.primary.rank is not None:
        rank = answer.primary.rank  # what failed first by the evidence, which need not be the first report
    if rank is not None:
        logs = folder.cycle_logs(key.replica, key.generation, key.cycle)
        for path in (logs / f"rank-{rank}.err", logs / f"rank-{rank}.out"):
            if lines := _last_lines(path):
                yield from _excerpt(path, lines)
                break
    if failed.hung and failed.rank is not None:
        stacks = folder.cycle_stacks(key.replica, key.generation, key.cycle) / f"rank-{failed.rank}.txt"
        if stacks.is_file():
            yield one_line(f"  stacks    {_from_here(stacks)}")
    if answer is not None and answer.hint:
        yield one_line(f"  hint      {answer.hint}")
    decided, shutdown = failure.timeline.decided, failure.timeline.shutdown
    if shutdown is not None and decided is not None:
        does = "fails" if decided.action == "fail_job" else "stops"
        yield one_line(f"  decision  the controller {does} the job: {shutdown.reason.partition('; last: ')[0]}")
    stopped = shutdown is not None and shutdown.exit_code == EXIT_NO_RESTART  # for a reason of the controller's own
    # The end of a job waits for no answer; but restarts before it went against such answers.
    counted = failure.timeline.verdict is not None or key.cycle > 0
    dry_run = counted and plan.fault_tolerance.attribution.dry_run
    if answer and answer.verdict is Verdict.STOP and dry_run and not stopped:
        so = f"{answer.source} says that a restart cannot help ({answer.fault.replace('_', ' ')})"
        yield one_line(
            f"  verdict   {so}; such answers are not acted on in a dry run (fault_tolerance.attribution.dry_run)"
        )


def _answer(failure: ReplayedFailure) -> Attribution | None:
    """The surest answer that names a line; where none does the rules are asked now. None: the logs cannot be read."""
    if (answer := surest(failure.timeline.answers)) is not None:
        return answer
    try:
        # Their sizes first: the user waits for the prompt.
        files = [file for path in failure.inquiry.paths for file in Path(path).rglob("*") if file.is_file()]
        if sum(file.stat().st_size for file in files) > MOST_ANALYZED_BYTES:
            return None
        from nvrx_slurm.attribution.analyze.analyzer import analyze_sync

        return analyze_sync(failure.inquiry)
    except (NvrxError, OSError):  # the logs may be removed meanwhile; the rest is said all the same
        return None


def _excerpt(path: Path, lines: list[str]) -> Iterator[str]:
    yield one_line(f"  {_from_here(path)}:")
    yield from (f"    {line}" for line in lines)


def _last_lines(path: Path) -> list[str]:
    """The last traceback in the file and what follows it, or its last lines; none: there is no such file."""
    text = end_of(path, TAIL_BYTES).replace("\r\n", "\n").rstrip()
    # Of a progress bar, which begins its line again with \r, only what it drew last.
    lines = [uncoloured(line.rpartition("\r")[2]) for line in text.split("\n")]
    begin = max((number for number, line in enumerate(lines) if TRACEBACK in line), default=None)
    if begin is not None and len(lines) - begin <= MOST_TRACEBACK_LINES:
        return lines[begin:]
    return lines[-MOST_LINES:] if any(lines) else []


def _from_here(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
