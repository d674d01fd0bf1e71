"""Runs flows, several at once, each attempt in a process of its own. Every wait is bounded, and so is the whole run.

flows ─▶ one coroutine each ─▶ attempt's process ─▶ outcome.json ─▶ SuiteOutcome
SIGINT, SIGTERM ─▶ SIGTERM to every attempt: it cleans up            ┐ an attempt that does not end in time is
timeout         ─▶ SIGALRM to every attempt: it writes a diagnosis   ┘ killed, and cleaned up from here
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nvrx_slurm.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EXIT_TIMEOUT,
    EXIT_USAGE,
    NvrxError,
)
from nvrx_slurm.jobspec import env
from nvrx_slurm.lab.flow.artifacts import LEASE_S, Artifacts, AttemptFolder, AttemptSpec
from nvrx_slurm.lab.flow.cleanup import MARK, clean_up, standing
from nvrx_slurm.lab.flow.guard import RunGuard
from nvrx_slurm.lab.flow.model import Flow, StageName
from nvrx_slurm.lab.flow.outcome import FlowAttempt, FlowOutcome, Kind, SuiteOutcome, Verdict, finding_of
from nvrx_slurm.report.job_report import job_report
from nvrx_slurm.report.jobs import find_job
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.durations import words
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import send_signal
from nvrx_slurm.util.signals import signal_name

log = get_logger("ci")

# How often the lease is touched within that time. The first touch that a job sees starts it, so they come often.
TOUCHES = 20

# What an attempt may take beyond its flow's `limits.wall`: to bring a cluster up, to diagnose, to clean up.
AROUND_S = 180.0

# How long jobs get to end by themselves that an attempt has left behind.
CLEANUP_S = 3.0


def write_job_page(folder: AttemptFolder, attempt: FlowAttempt, path: Path) -> Path | None:
    """The page of the attempt's job; None where it had none, or the page cannot be written: the flow is judged all
    the same."""
    if attempt.job_id is None:
        return None
    try:
        job = find_job(folder.path / "jobs", attempt.job_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        return job_report(job, live=False).write(path.absolute())
    except (OSError, NvrxError) as error:
        log.warning("%s: the job of %s has no page: %s", path, folder.path, error)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """How flows are run. `jobs`: how many at once; `retries`: how often one that did not pass is run again. `pages`:
    the folder that gets a page of each job, of flows that passed, too."""

    stage: StageName
    artifacts: Path
    jobs: int = 3
    retries: int = 0
    timeout_s: float = 1200.0
    pages: Path | None = None


def run_suite(
    flows: Sequence[Flow], options: SuiteOptions, on_outcome: Callable[[FlowOutcome], None]
) -> SuiteOutcome:
    """Run the flows that the stage is for; `on_outcome` gets each as it ends. SIGINT and SIGTERM end the run.

    Raises UsageError before anything has started. Afterwards nothing is left but the artifacts of what did not pass:
    if this process is killed, its guard cleans up.
    """
    artifacts = Artifacts(options.artifacts)
    artifacts.create()
    # Before the first attempt: from here on nothing outlives this process, however it ends.
    guard = RunGuard(artifacts.path)
    outcome = asyncio.run(_Suite(options, artifacts, on_outcome, SystemClock()).run(flows))
    # Every attempt has ended, and what it left was cleaned up: the guard has nothing to do.
    guard.dismiss()
    artifacts.sweep()
    return outcome


class _Suite:
    """One run, on its event loop."""

    def __init__(
        self, options: SuiteOptions, artifacts: Artifacts, on_outcome: Callable[[FlowOutcome], None], clock: Clock
    ) -> None:
        self._options, self._artifacts, self._on_outcome, self._clock = options, artifacts, on_outcome, clock
        self._places = asyncio.Semaphore(options.jobs)
        self._running: set[AttemptProcess] = set()
        self._exit_codes: dict[str, int] = {}  # of flows whose last attempt was broken
        self._ending: EarlyEnd | None = None
        self._notices: int | None = None
        with contextlib.suppress(OSError):  # stderr is closed
            # An attempt's own stderr is its log. Through this copy it reaches the user who watches the run.
            self._notices = os.dup(2)

    async def run(self, flows: Sequence[Flow]) -> SuiteOutcome:
        began, began_at = self._clock.monotonic(), self._clock.wall()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: its caller gets the signals
            for number, ending in INTERRUPTIONS.items():
                loop.add_signal_handler(number, self._end, ending)
        why = f"out of time: --timeout {words(self._options.timeout_s)}"
        out_of_time = EarlyEnd(why, EXIT_TIMEOUT, "out_of_time", "bound", signal.SIGALRM, DIAGNOSIS_S)
        loop.call_later(self._options.timeout_s, self._end, out_of_time)
        # Before the first attempt: no agent of a job starts until its lease has changed once.
        lease = asyncio.create_task(self._keep_lease())
        longest_first = sorted(flows, key=lambda flow: -flow.wall_s)  # so that none is left to run alone
        outcomes = {flow.file: asyncio.create_task(self._flow(flow)) for flow in longest_first}
        ended = await asyncio.gather(*(outcomes[flow.file] for flow in flows))
        lease.cancel()
        if self._notices is not None:
            os.close(self._notices)
        # An early end says more than the flows that it cut short; a failed flow more than one that could not be run.
        note = self._ending.why if self._ending else None
        if self._ending:
            exit_code = self._ending.exit_code
        elif all(flow.status == "left_out" for flow in ended):
            exit_code, note = EXIT_USAGE, f"no flow runs on the stage {self._options.stage}"
        elif any(flow.status == "failed" for flow in ended):
            exit_code = EXIT_FAILED
        else:
            broken = (flow.name for flow in ended if flow.status == "broken")
            exit_code = max((self._exit_codes[name] for name in broken), default=EXIT_DONE)
        return SuiteOutcome(
            stage=self._options.stage,
            began_at=began_at,
            took_s=self._clock.monotonic() - began,
            flows=tuple(ended),
            exit_code=exit_code,
            note=note,
        )

    async def _flow(self, flow: Flow) -> FlowOutcome:
        """All attempts of one flow."""
        attempts: list[FlowAttempt] = []
        left_out = None
        if self._options.stage in flow.on:
            # One place for all attempts of a flow: a retry does not wait behind all other flows.
            async with self._places:
                for number in range(1, self._options.retries + 2):
                    attempts.append(await self._attempt(flow, number))
                    if attempts[-1].verdict not in ("failed", "broken") or self._ending:
                        break
        else:
            left_out = f"not for this stage: it runs on {', '.join(flow.on)}"
        outcome = FlowOutcome(
            name=flow.name,
            about=flow.about or "",
            file=str(flow.file),
            stage=self._options.stage,
            attempts=tuple(attempts),
            left_out=left_out,
        )
        self._on_outcome(outcome)
        return outcome

    async def _attempt(self, flow: Flow, number: int) -> FlowAttempt:
        if self._ending:
            return self._unreported(flow, number, f"not begun: {self._ending.why}")
        folder = self._artifacts.attempt(flow.name, number)
        spec = AttemptSpec(
            flow=str(flow.file.absolute()),
            stage=self._options.stage,
            number=number,
            lease=str(self._artifacts.lease),
            parent=os.getpid(),
            notices_fd=self._notices,
        )
        try:
            folder.create(spec)
            process = await AttemptProcess.start(folder, self._clock, self._notices)
        except OSError as error:  # the disk is full, or no process can be had
            self._exit_codes[flow.name] = EXIT_FAILED
            return self._unreported(flow, number, f"the attempt could not begin: {error}")
        self._running.add(process)
        if self._ending:  # it came while the process was being started
            process.send(self._ending.signal)
        await process.ended(flow.wall_s + AROUND_S, INTERRUPTED_S)
        self._running.discard(process)
        attempt = folder.read_outcome() or self._unreported(flow, number, process.why_unreported, process)
        if self._ending is None and attempt.verdict in ("interrupted", "out_of_time"):
            # Not by the run's own end: of that it says nothing, and no flow that was cut short has passed.
            why = process.exceeded or "the attempt was ended by a signal that this run has not sent"
            cut_short = finding_of(flow, "error", why, detail=folder.log_tail())
            attempt = msgspec.structs.replace(attempt, verdict="broken", findings=(cut_short, *attempt.findings))
        if standing(folder.path):  # an attempt that was killed could not clean up
            # In a thread: Slurm may take seconds to answer, and the lease must be touched meanwhile.
            left = await asyncio.to_thread(clean_up, folder.path, 0.0 if self._ending else CLEANUP_S)
            if left:
                found = (*attempt.findings, *(finding_of(flow, "leftover", each) for each in left))
                verdict: Verdict = "failed" if attempt.verdict == "passed" else attempt.verdict
                attempt = msgspec.structs.replace(attempt, verdict=verdict, findings=found)
        if self._options.pages is not None:
            name = f"{flow.name}-{number}.html"
            page = await asyncio.to_thread(write_job_page, folder, attempt, self._options.pages / name)
            attempt = msgspec.structs.replace(attempt, page=None if page is None else str(page))
        if attempt.verdict == "broken":
            self._exit_codes[flow.name] = process.exit_code
        # Only now: the page of the job was written from this folder.
        if attempt.verdict == "passed":
            folder.remove()
        return attempt

    def _unreported(self, flow: Flow, number: int, why: str, process: AttemptProcess | None = None) -> FlowAttempt:
        """What is known of an attempt that did not begin, or wrote no outcome."""
        ending = self._ending
        if process and ending:
            why = ending.why
        detail = process.folder.log_tail() if process else ()
        return FlowAttempt(
            number=number,
            verdict=ending.verdict if ending else "broken",
            began_at=process.began_at if process else self._clock.wall(),
            took_s=process.took_s if process else 0.0,
            findings=(finding_of(flow, ending.kind if ending else "error", why, detail=detail),),
            artifacts=str(process.folder.path) if process else None,
        )

    # ---- the run

    def _end(self, ending: EarlyEnd) -> None:
        """Begin no more attempts, and have those that run end. A second interruption does not wait for that."""
        if self._ending and self._ending.verdict == "interrupted":
            self._kill()
            return
        self._ending = ending
        for process in self._running:
            process.send(ending.signal)
        asyncio.get_running_loop().call_later(ending.patience_s, self._kill)

    def _kill(self) -> None:
        for process in self._running:
            process.send(signal.SIGKILL)

    async def _keep_lease(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the disk may be full for a while
                os.utime(self._artifacts.lease)
            await asyncio.sleep(LEASE_S / TOUCHES)


# How long a process that hangs may take to write down its stacks.
STACKS_S = 1.0


class AttemptProcess:
    """One attempt's process. `why_unreported`: why it wrote no outcome, once it has ended; `exceeded`: that it has
    not kept to its bound."""

    def __init__(self, folder: AttemptFolder, process: Process, clock: Clock) -> None:
        self.folder, self._process, self._clock = folder, process, clock
        self.began_at, self._began = clock.wall(), clock.monotonic()
        self.exceeded: str | None = None

    @classmethod
    async def start(cls, folder: AttemptFolder, clock: Clock, notices: int | None = None) -> AttemptProcess:
        """In a session of its own: Ctrl-C is for the run, which signals its attempts. `notices`: a descriptor that it
        inherits."""
        with folder.log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "nvrx_slurm.lab.flow.attempt", str(folder.path)),
                env=env.child_environment({MARK: str(folder.path)}, with_secrets=True),
                stdin=DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
                pass_fds=() if notices is None else (notices,),
            )
        return cls(folder, process, clock)

    @property
    def took_s(self) -> float:
        return self._clock.monotonic() - self._began

    @property
    def exit_code(self) -> int:
        """Of a process that has ended, and not well."""
        return max(self._process.returncode or 0, EXIT_FAILED)

    @property
    def why_unreported(self) -> str:
        if self.exceeded:
            return self.exceeded
        code = self._process.returncode or 0
        end = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return f"the attempt's process {end} before it could report"

    async def ended(self, bound_s: float, patience_s: float) -> None:
        """Wait for its end. One that hangs is asked to write its stacks, then to end, and then killed."""
        for wait_s, then in ((bound_s, signal.SIGUSR1), (STACKS_S, signal.SIGTERM), (patience_s, signal.SIGKILL)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), wait_s)
                return
            self.exceeded = f"the attempt did not end within {words(bound_s)}, clean-up included"
            self.send(then)
        await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        send_signal(self._process, number)


# How long attempts may take to clean up, once interrupted: GitHub's runner kills 7.5 s after SIGINT.
INTERRUPTED_S = 5.0

# The same where they write a diagnosis first: stacks, Slurm's answers, ends of logs.
DIAGNOSIS_S = 90.0


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """`signal`: what attempts get; `patience_s`: how long they may take then, before they are killed."""

    why: str
    exit_code: int
    verdict: Verdict = "interrupted"
    kind: Kind = "error"
    signal: signal.Signals = signal.SIGTERM
    patience_s: float = INTERRUPTED_S


INTERRUPTIONS = {
    signal.SIGINT: EarlyEnd("interrupted", EXIT_INTERRUPTED),
    signal.SIGTERM: EarlyEnd("terminated", EXIT_TERMINATED),
}
