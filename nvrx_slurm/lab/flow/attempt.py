"""`python -m nvrx_slurm.lab.flow.attempt FOLDER`: one run of one flow, in a process of its own.

Slurm's programs find their cluster by the environment, so each attempt has a process and an environment of its own.
It dies with the run that started it. On SIGTERM it cleans up; on SIGALRM it first writes a diagnosis; on SIGUSR1 it
writes its stacks into its log.

Four things are checked after every attempt without being asked for: every fault happened; the journal replays to the
same decisions; it has the job's end, unless a fault has happened, and result.json and Slurm agree on the exit code;
nothing of the job is left.
"""

from __future__ import annotations

from nvrx_slurm.util import garbage

if __name__ == "__main__":
    garbage.pause()

import contextlib
import dataclasses
import faulthandler
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from nvrx_slurm.api.handle import Job
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import EXIT_DONE, EXIT_FAILED, NvrxError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.journal.records import Entry, JobEnded, JobStarted, Recovered, Signalled
from nvrx_slurm.lab.flow.artifacts import LEASE_S, AttemptFolder, AttemptSpec
from nvrx_slurm.lab.flow.cleanup import CleanupList, clean_up
from nvrx_slurm.lab.flow.flow_run import End, FlowRun, StatePoller
from nvrx_slurm.lab.flow.load import load_flow
from nvrx_slurm.lab.flow.matching import Miss
from nvrx_slurm.lab.flow.model import Flow
from nvrx_slurm.lab.flow.outcome import FlowAttempt, FlowFinding, InjectedFault, Kind, Verdict, finding_of
from nvrx_slurm.lab.flow.replaying import explain, replay
from nvrx_slurm.lab.flow.stages import open_stage
from nvrx_slurm.lab.flow.stages.base import Stage
from nvrx_slurm.lab.flow.triggers import FaultScheduler
from nvrx_slurm.report.ending import end_lines
from nvrx_slurm.report.sentences import NAME_WIDTH, TIME_WIDTH, Lines
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.durations import words
from nvrx_slurm.util.log import get_logger, set_up
from nvrx_slurm.util.processes import die_with

log = get_logger("ci")

# How long jobs get to end by themselves after SIGTERM.
CLEANUP_S = 2.0

# How long a job may take to be gone: KillWait (30 s), and what Slurm does afterwards.
GONE_S = 60.0

# The same for one whose journal has its end already.
ENDING_S = 30.0

OUT_OF_TIME = "the whole run was out of time"
EXCERPT_LINES = 200


class AttemptTerminated(BaseException):
    """SIGTERM came: clean up now."""


class OutOfTime(BaseException):
    """SIGALRM came: the whole run is out of time."""


class AttemptRun:
    """One attempt, from its flow file to its outcome."""

    def __init__(self, folder: AttemptFolder, spec: AttemptSpec, clock: Clock) -> None:
        self._folder, self._spec, self._clock = folder, spec, clock
        self._cleanup = CleanupList(folder.path)
        self._began, self._began_at = clock.monotonic(), clock.wall()
        self._run: FlowRun | None = None
        self._findings: list[FlowFinding] = []

    def run(self) -> int:
        """Run the flow, clean up, write the outcome; returns the exit code of this process."""
        # The first process of the list must be this one: the guard ends it before it ends anything else.
        self._cleanup.process(os.getpid())
        verdict: Verdict
        exit_code = EXIT_DONE
        try:
            verdict = self._perform()
        except AttemptTerminated:
            verdict = "interrupted"
            self._find("error", "interrupted")
        except OutOfTime:
            verdict = "out_of_time"
            self._find("bound", OUT_OF_TIME)
        # The flow could not be run. That says nothing about the product, so the flow has not failed.
        except NvrxError as error:
            verdict, exit_code = "broken", error.exit_code
            self._find("error", str(error))
        except Exception as error:
            log.exception("the harness failed")
            verdict, exit_code = "broken", EXIT_FAILED
            self._find("error", f"{type(error).__name__}: {error}", traceback.format_exc().splitlines())
        # On any error. After one interruption `main` ignores the next; if one comes only now it ends this, and
        # the suite cleans up instead.
        log.info("cleaning up what is left")
        for problem in clean_up(self._folder.path, CLEANUP_S):
            self._find("leftover", problem)
        if verdict == "passed" and self._findings:
            verdict = "failed"
        entries, injected = (self._run.entries, self._run.injected) if self._run else ([], [])
        attempt = FlowAttempt(
            number=self._spec.number,
            verdict=verdict,
            began_at=self._began_at,
            took_s=self._clock.monotonic() - self._began,
            findings=tuple(self._findings),
            injected=tuple(injected),
            recoveries_s=tuple(entry.record.total_s for entry in entries if isinstance(entry.record, Recovered)),
            job_id=self._run.poller.job.job_id if self._run else None,
            exit_code=exit_code_of(entries),
            excerpt=excerpt(entries, injected),
            artifacts=None if verdict == "passed" else str(self._folder.path),
        )
        # The outcome is written last: it also says what the clean-up could not end.
        self._folder.write_outcome(attempt)
        return exit_code

    def _perform(self) -> Verdict:
        spec, flow = self._spec, load_flow(Path(self._spec.flow))
        # The job ends once the run's lease is no longer touched.
        lease = (("lease.file", spec.lease), ("lease.timeout", LEASE_S))
        flow = dataclasses.replace(flow, overrides=(*flow.overrides, *lease))
        with contextlib.closing(open_stage(flow, spec.stage, self._folder.path, self._cleanup)) as stage:
            log.info("the stage %s is open", stage.name)
            # From here on Slurm's programs, and readers of the job, find the stage's cluster by the environment.
            env.adopt(stage.environment)
            if stage.name == "slurm":
                # Before the submission: Slurm may take the job and never answer with its id. On the stage `dev` the
                # whole cluster is removed, so its queue needs no line.
                self._cleanup.queue(env.slurm_configuration())
            job = stage.submit(flow)
            log.info("job %s, in %s", job.job_id, job.folder)
            self._run = FlowRun(
                flow, stage, StatePoller(job, self._clock), self._clock, partial(self._notify, flow.name, job)
            )
            end: End
            try:
                end = self._run.run(self._began + flow.wall_s)
            # Caught while the stage is still open: `close` below takes the diagnosis of the running job.
            except OutOfTime:
                end = "out_of_time"
            log.info("the flow's end: %s", end)
            self._findings += close(self._run, stage, self._folder, end)
        if end == "out_of_time":
            return "out_of_time"
        return "failed" if self._findings else "passed"

    def _notify(self, flow: str, job: Job, text: str) -> None:
        """Log it, and tell the user, who watches the run and not this log."""
        log.info("job %s %s", job.job_id, text)
        if self._spec.notices_fd is not None:
            with contextlib.suppress(OSError):  # nothing reads it any more
                os.write(self._spec.notices_fd, f"{flow}: job {job.job_id} {text}\n".encode())

    def _find(self, kind: Kind, message: str, detail: Sequence[str] = ()) -> None:
        finding = FlowFinding(kind=kind, message=message, file=self._spec.flow, line=1, detail=tuple(detail))
        self._findings.append(finding)


def close(run: FlowRun, stage: Stage, folder: AttemptFolder, end: End) -> list[FlowFinding]:
    """End the job and return every finding. Raises SlurmUnreachable."""
    flow, poller = run.flow, run.poller
    if end in ("bound", "out_of_time"):
        # The first expectation that is open was not met in time; if none is open, the bound itself is the finding.
        why = OUT_OF_TIME if end == "out_of_time" else f"limits.wall ({words(flow.wall_s)}) has passed"
        run.matcher.job_over(why)
        if run.matcher.miss is None:
            run.findings.append(finding_of(flow, "bound", why))
    if end not in ("met", "ended"):
        folder.diagnosis.mkdir(exist_ok=True)
        with (folder.diagnosis / "harness.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        # While the job still runs: later there are no stacks.
        stage.diagnose(folder.diagnosis)

    # A job whose journal has its end is about to go, unless it is back in the queue.
    if exit_code_of(run.entries) is not None and poller.ask() in (JobState.RUNNING, JobState.COMPLETING, None):
        stage.gone(poller.job, ENDING_S)
    state = poller.ask()
    was_cancelled = state is None or not state.terminal
    if was_cancelled:
        stage.cancel(poller.job)
    left = stage.gone(poller.job, GONE_S)
    # Only now the journal is complete: a controller writes its last entries while its job ends.
    run.drain()
    # Slurm reports a job that was cancelled here as cancelled, also where it was just ending by itself.
    state = None if was_cancelled else poller.ask()

    # The expectation first: it is what a report shows in its headline. But of a job that never started, why.
    found: list[FlowFinding] = []
    if not run.entries and run.queue.place is not None:
        why = f"Slurm did not start the job: {run.queue.place.describe(stage.clock.wall())}"
        found.append(finding_of(flow, "bound", why))
    elif end == "ended":
        found += of_unexplained_end(flow, run.entries, run.injected, run.folder, state)
    if (miss := run.matcher.miss) is not None:
        explained = end != "ended" or not run.injected or exit_code_of(run.entries) is not None
        found.append(of_miss(flow, miss, run.entries, [] if explained else how_it_ended(run.folder, state)))
    found += run.findings
    # A job that was ended early was not given the time for its later faults.
    if end not in ("missed", "out_of_time"):
        found += of_faults(flow, run.scheduler)
    found += of_replay(flow, run.folder.read_plan(), run.entries)
    found += of_exit_code(flow, run.entries, run.folder.read_result(), state)
    found += [finding_of(flow, "leftover", f"left behind: {what}") for what in left]
    there = run.folder.path
    if found and not there.is_relative_to(folder.path):  # it may lie on a disk that goes with the stage
        try:
            shutil.copytree(there, folder.path / "jobs" / there.name, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            log.warning("the job's folder %s could not be kept whole: %s", there, error)
    return found


# ------------------------------------------------------------------------------------------------ findings


def of_miss(flow: Flow, miss: Miss, entries: Sequence[Entry], end: Sequence[str] = ()) -> FlowFinding:
    """The first expectation that was not met, with the entries around that moment and the nearest one. `end`: how the
    job has ended, where its journal does not say it."""
    shown = _formatted(entries)
    detail = []
    if miss.around:
        detail += ["around that moment:", *(f"  {shown[entry.n]}" for entry in miss.around)]
    if miss.nearest is not None:
        detail += ["nearest:", f"  {shown[miss.nearest.entry.n]}"]
        detail += [f"    {difference}" for difference in miss.nearest.differences]
    detail += end
    message = f"expected {miss.expected}: {miss.reason}"
    return finding_of(flow, "expectation", message, line=miss.line, detail=detail)


def of_unexplained_end(
    flow: Flow, entries: Sequence[Entry], injected: Sequence[InjectedFault], folder: JobFolder, state: JobState | None
) -> Iterator[FlowFinding]:
    """Without a fault a job does not end but by its journal's word. One that never began has broken no `never`."""
    if injected or exit_code_of(entries) is not None:
        return
    when = "the journal says how" if entries else "its journal began"
    message = f"the job ended before {when}: its state is {state or JobState.UNKNOWN}"
    yield finding_of(flow, "exit_code", message, detail=how_it_ended(folder, state))


def how_it_ended(folder: JobFolder, state: JobState | None) -> list[str]:
    """What the job's folder and Slurm say of its end."""
    says, result = state or JobState.UNKNOWN, folder.read_result()
    code = says.exit_code or EXIT_FAILED if result is None else result.exit_code
    return list(end_lines(folder, code, slurm_says=says))


def of_faults(flow: Flow, scheduler: FaultScheduler) -> Iterator[FlowFinding]:
    """Each fault that did not happen: without it the flow has shown nothing."""
    for fault in scheduler.waiting:
        message = f"fault {fault.number} ({fault.describe()}) did not happen: {scheduler.why_not(fault)}"
        yield finding_of(flow, "fault", message, line=fault.line)


def of_replay(flow: Flow, plan: Plan, entries: Sequence[Entry]) -> Iterator[FlowFinding]:
    """The journal, fed through the core once more, must give the decisions that it holds."""
    parting = replay(plan, entries).parting
    if parting is not None:
        message = f"the journal does not replay: entry {parting.entry.n} is not what the core decides"
        yield finding_of(flow, "replay", message, detail=explain(parting, entries))


def of_exit_code(
    flow: Flow, entries: Sequence[Entry], result: Result | None, state: JobState | None
) -> Iterator[FlowFinding]:
    """Journal, `result.json` and Slurm must agree on the end."""
    code = exit_code_of(entries)
    if code is None:
        return
    if result is not None and result.exit_code != code:
        message = f"the journal ends with exit code {code}, result.json with {result.exit_code}: {result.reason}"
        yield finding_of(flow, "exit_code", message)
    # Slurm after 22.05 takes each later end of a job that has once left in its GraceTime for the preemption's.
    signals = [entry.record.reason for entry in entries if isinstance(entry.record, Signalled)]
    if state is JobState.PREEMPTED and "preempted" in signals:
        return
    if state is not None and state.terminal and (state is JobState.COMPLETED) != (code == 0):
        yield finding_of(flow, "exit_code", f"the journal ends with exit code {code}, and Slurm says {state}")


# --------------------------------------------------------------------------------------- from the journal


def exit_code_of(entries: Sequence[Entry]) -> int | None:
    """How the job's last generation ended, by its journal; None: it does not say."""
    for entry in reversed(entries):
        if isinstance(entry.record, JobEnded | JobStarted):
            return entry.record.exit_code if isinstance(entry.record, JobEnded) else None
    return None


def excerpt(entries: Sequence[Entry], injected: Iterable[InjectedFault]) -> tuple[str, ...]:
    """The journal as `nvrx-slurm events` prints it, with each fault in its place; its end, if it is long."""
    if not entries:
        return ()
    lines = [(entry.t, line) for entry, line in zip(entries, _formatted(entries).values(), strict=True)]
    for fault in injected:
        time = f"{fault.t - entries[0].t:+.3f}s"
        lines.append((fault.t, f"{time:<{TIME_WIDTH}} {'fault':<{NAME_WIDTH}} {fault.number}: {fault.what}"))
    return tuple(line for _, line in sorted(lines, key=lambda each: each[0]))[-EXCERPT_LINES:]


def _formatted(entries: Sequence[Entry]) -> dict[int, str]:
    lines = Lines()  # it shows times since the first entry, so all of them go through one
    return {entry.n: lines.in_words(entry) for entry in entries}


def main(path: Path) -> int:
    """Run the attempt whose specification lies in this folder."""
    folder = AttemptFolder(path)
    spec = folder.read_spec()
    # Before the handlers below: nothing has been started yet, so SIGTERM may end this process at once.
    die_with(spec.parent, signal.SIGTERM)
    set_up("attempt")

    def terminated(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):  # a second one must not interrupt the cleanup
            signal.signal(number, signal.SIG_IGN)
        raise AttemptTerminated

    def out_of_time(*_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        raise OutOfTime

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, terminated)
    signal.signal(signal.SIGALRM, out_of_time)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    return AttemptRun(folder, spec, SystemClock()).run()


if __name__ == "__main__":
    garbage.resume()
    sys.exit(main(Path(sys.argv[1])))
