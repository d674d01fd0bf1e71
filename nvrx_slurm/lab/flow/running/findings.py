"""How an attempt ends: diagnose if something went wrong, end the job, wait until it is gone, then check everything.

Four things are checked after every attempt without being asked for: every fault happened; the journal replays to the
same decisions; journal, result.json and Slurm agree on the exit code; nothing of the job is left.
"""

from __future__ import annotations

import faulthandler
import shutil
from collections.abc import Iterable, Iterator, Sequence

from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import Result
from nvrx_slurm.journal.records import Entry, JobEnded, JobStarted, Recovered
from nvrx_slurm.lab.flow.judging.matching import Miss
from nvrx_slurm.lab.flow.judging.triggers import FaultScheduler
from nvrx_slurm.lab.flow.language.model import Flow
from nvrx_slurm.lab.flow.outcome import FlowFinding, InjectedFault, Kind
from nvrx_slurm.lab.flow.replaying import explain, replay
from nvrx_slurm.lab.flow.running.artifacts import AttemptFolder
from nvrx_slurm.lab.flow.running.play import End, FlowRun
from nvrx_slurm.lab.flow.stages.base import Stage
from nvrx_slurm.report.sentences import NAME_WIDTH, TIME_WIDTH, Lines
from nvrx_slurm.util.durations import words
from nvrx_slurm.util.log import get_logger

log = get_logger("ci")

EXCERPT_LINES = 200

GONE_S = 60.0
"""How long a job may take to be gone: KillWait (30 s), and what Slurm does afterwards."""

ENDING_S = 30.0
"""The same for one whose journal has its end already."""

OUT_OF_TIME = "the whole run was out of time"


def close(run: FlowRun, stage: Stage, folder: AttemptFolder, end: End) -> list[FlowFinding]:
    """End the job and return every finding. Raises SlurmUnreachable."""
    flow, poller = run.flow, run.poller
    if end in ("bound", "out_of_time"):
        why = OUT_OF_TIME if end == "out_of_time" else f"limits.wall ({words(flow.wall_s)}) has passed"
        run.matcher.job_over(why)
        if run.matcher.miss is None:
            run.findings.append(_of_flow(flow, "bound", why))
    if end not in ("met", "ended"):
        folder.diagnosis.mkdir(exist_ok=True)
        with (folder.diagnosis / "harness.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        stage.diagnose(folder.diagnosis)

    # A job whose journal has its end is about to go, unless it is back in the queue.
    if exit_code(run.entries) is not None and poller.ask() in (JobState.RUNNING, JobState.COMPLETING, None):
        stage.gone(poller.job, ENDING_S)
    state = poller.ask()
    was_cancelled = state is None or not state.terminal
    if was_cancelled:
        stage.cancel(poller.job)
    left = stage.gone(poller.job, GONE_S)
    run.drain()
    # Slurm reports a job that was cancelled here as cancelled, also where it was just ending by itself.
    state = None if was_cancelled else poller.ask()

    found: list[FlowFinding] = []
    if (miss := run.matcher.miss) is not None:
        found.append(of_miss(flow, miss, run.entries))
    found += run.findings
    if end not in ("missed", "out_of_time"):
        found += of_faults(flow, run.scheduler)
    found += of_replay(flow, run.folder.read_plan(), run.entries)
    found += of_exit_code(flow, run.entries, run.folder.read_result(), state)
    found += [_of_flow(flow, "leftover", f"left behind: {what}") for what in left]
    there = run.folder.path
    if found and not there.is_relative_to(folder.path):  # it may lie on a disk that goes with the stage
        try:
            shutil.copytree(there, folder.path / "jobs" / there.name, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            log.warning("the job's folder %s could not be kept whole: %s", there, error)
    return found


# ------------------------------------------------------------------------------------------------ findings


def of_miss(flow: Flow, miss: Miss, entries: Sequence[Entry]) -> FlowFinding:
    """The first expectation that was not met, with the entries around that moment and the nearest one."""
    shown = _formatted(entries)
    detail = []
    if miss.around:
        detail += ["around that moment:", *(f"  {shown[entry.n]}" for entry in miss.around)]
    if miss.nearest is not None:
        detail += ["nearest:", f"  {shown[miss.nearest.entry.n]}"]
        detail += [f"    {difference}" for difference in miss.nearest.differences]
    message = f"expected {miss.expected}: {miss.reason}"
    return FlowFinding(kind="expectation", message=message, file=str(flow.file), line=miss.line, detail=tuple(detail))


def of_faults(flow: Flow, scheduler: FaultScheduler) -> Iterator[FlowFinding]:
    """Each fault that did not happen: without it the flow has shown nothing."""
    for fault in scheduler.waiting:
        message = f"fault {fault.number} ({fault.describe()}) did not happen: {scheduler.why_not(fault)}"
        yield FlowFinding(kind="fault", message=message, file=str(flow.file), line=fault.line)


def of_replay(flow: Flow, plan: Plan, entries: Sequence[Entry]) -> Iterator[FlowFinding]:
    """The journal, fed through the core once more, must give the decisions that it holds."""
    parting = replay(plan, entries).parting
    if parting is not None:
        message = f"the journal does not replay: entry {parting.entry.n} is not what the core decides"
        yield _of_flow(flow, "replay", message, explain(parting, entries))


def of_exit_code(
    flow: Flow, entries: Sequence[Entry], result: Result | None, state: JobState | None
) -> Iterator[FlowFinding]:
    """Journal, `result.json` and Slurm must agree on the end."""
    code = exit_code(entries)
    if code is None:
        return
    if result is not None and result.exit_code != code:
        message = f"the journal ends with exit code {code}, result.json with {result.exit_code}: {result.reason}"
        yield _of_flow(flow, "exit_code", message)
    if state is not None and state.terminal and (state is JobState.COMPLETED) != (code == 0):
        yield _of_flow(flow, "exit_code", f"the journal ends with exit code {code}, and Slurm says {state}")


def _of_flow(flow: Flow, kind: Kind, message: str, detail: Iterable[str] = ()) -> FlowFinding:
    return FlowFinding(kind=kind, message=message, file=str(flow.file), line=flow.line, detail=tuple(detail))


# --------------------------------------------------------------------------------------- from the journal


def exit_code(entries: Sequence[Entry]) -> int | None:
    """How the job's last generation ended, by its journal; None: it does not say."""
    for entry in reversed(entries):
        if isinstance(entry.record, JobEnded | JobStarted):
            return entry.record.exit_code if isinstance(entry.record, JobEnded) else None
    return None


def recoveries_s(entries: Sequence[Entry]) -> tuple[float, ...]:
    """How long each recovery took, in order."""
    return tuple(entry.record.total_s for entry in entries if isinstance(entry.record, Recovered))


def excerpt(entries: Sequence[Entry], struck: Iterable[InjectedFault]) -> tuple[str, ...]:
    """The journal as `nvrx-slurm events` prints it, with each fault in its place; its end, if it is long."""
    if not entries:
        return ()
    lines = [(entry.t, line) for entry, line in zip(entries, _formatted(entries).values(), strict=True)]
    for fault in struck:
        time = f"{fault.t - entries[0].t:+.3f}s"
        lines.append((fault.t, f"{time:<{TIME_WIDTH}} {'fault':<{NAME_WIDTH}} {fault.number}: {fault.what}"))
    return tuple(line for _, line in sorted(lines, key=lambda each: each[0]))[-EXCERPT_LINES:]


def _formatted(entries: Sequence[Entry]) -> dict[int, str]:
    lines = Lines()
    return {entry.n: lines.in_words(entry) for entry in entries}
