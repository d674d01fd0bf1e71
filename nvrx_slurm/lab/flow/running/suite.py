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

from nvrx_slurm.batch.children import send_signal
from nvrx_slurm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_TIMEOUT
from nvrx_slurm.jobspec import env
from nvrx_slurm.lab.flow.language.model import Flow, StageName
from nvrx_slurm.lab.flow.outcome import Attempt, Finding, FlowOutcome, Kind, SuiteOutcome, Verdict
from nvrx_slurm.lab.flow.running.artifacts import Artifacts, AttemptFolder, AttemptSpec
from nvrx_slurm.lab.flow.running.cleanup import MARK, standing, undo
from nvrx_slurm.lab.flow.running.guard import Guard
from nvrx_slurm.lab.flow.stages import check
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.durations import words

LEASE_S = 10.0
"""How long jobs outlive a run that was killed together with its guard."""

TOUCHES = 20
"""How often the lease is touched within that time. The first touch that a job sees starts it, so they come often."""

AROUND_S = 180.0
"""What an attempt may take beyond its flow's `limits.wall`: to bring a cluster up, to diagnose, to clean up."""

UNDO_S = 3.0
"""How long jobs get to end by themselves that an attempt has left behind."""

Told = Callable[[FlowOutcome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """How flows are run. `jobs`: how many at once; `retries`: how often one that did not pass is run again."""

    stage: StageName
    artifacts: Path
    jobs: int = 3
    retries: int = 0
    timeout_s: float = 1200.0


def run_suite(
    flows: Sequence[Flow], options: SuiteOptions, told: Told = lambda flow: None, clock: Clock | None = None
) -> SuiteOutcome:
    """Run the flows that the stage is for; `told` hears of each as it ends. SIGINT and SIGTERM end the run.

    Raises ConfigError (a fault that the stage cannot do) and UsageError before anything has started. Afterwards
    nothing is left but the artifacts of what did not pass: whatever happens to this process, a guard sees to that.
    """
    for flow in flows:
        if options.stage in flow.on:
            check(flow, options.stage)
    artifacts = Artifacts(options.artifacts)
    artifacts.create()
    guard = Guard(artifacts.path)
    outcome = asyncio.run(_Suite(options, artifacts, told, clock or SystemClock()).run(flows))
    guard.dismiss()
    artifacts.sweep()
    return outcome


class _Suite:
    """One run, on its event loop."""

    def __init__(self, options: SuiteOptions, artifacts: Artifacts, told: Told, clock: Clock) -> None:
        self._options, self._artifacts, self._told, self._clock = options, artifacts, told, clock
        self._places = asyncio.Semaphore(options.jobs)
        self._running: set[Launched] = set()
        self._exit_codes: dict[str, int] = {}  # of flows whose last attempt was broken
        self._ending: Ending | None = None

    async def run(self, flows: Sequence[Flow]) -> SuiteOutcome:
        began, began_at = self._clock.monotonic(), self._clock.wall()
        self._listen()
        lease = asyncio.create_task(self._keep_lease())
        longest_first = sorted(flows, key=lambda flow: -flow.limits.wall_s)  # so that none is left to run alone
        ended = await asyncio.gather(*map(self._flow, longest_first))
        lease.cancel()
        order = {flow.file: place for place, flow in enumerate(flows)}
        return SuiteOutcome(
            stage=self._options.stage,
            began_at=began_at,
            took_s=self._clock.monotonic() - began,
            flows=tuple(sorted(ended, key=lambda flow: order[Path(flow.file)])),
            exit_code=self._exit_code(ended),
            note=self._ending.why if self._ending else None,
        )

    def _exit_code(self, flows: Sequence[FlowOutcome]) -> int:
        if self._ending:
            return self._ending.exit_code
        if any(flow.status == "failed" for flow in flows):
            return EXIT_FAILED
        broken = (flow.name for flow in flows if flow.status == "broken")
        return max((self._exit_codes[name] for name in broken), default=EXIT_DONE)

    # ---- flows

    async def _flow(self, flow: Flow) -> FlowOutcome:
        """All attempts of one flow."""
        attempts: list[Attempt] = []
        left_out = self._left_out(flow)
        if left_out is None:
            async with self._places:
                while self._wants_another(attempts):
                    attempts.append(await self._attempt(flow, len(attempts) + 1))
        outcome = FlowOutcome(
            name=flow.name,
            about=flow.about or "",
            file=str(flow.file),
            line=flow.line,
            stage=self._options.stage,
            attempts=tuple(attempts),
            left_out=left_out,
        )
        self._told(outcome)
        return outcome

    def _left_out(self, flow: Flow) -> str | None:
        return None if self._options.stage in flow.on else f"not for this stage: it runs on {', '.join(flow.on)}"

    def _wants_another(self, attempts: Sequence[Attempt]) -> bool:
        if not attempts:
            return True
        again = attempts[-1].verdict in ("failed", "broken") and self._ending is None
        return again and len(attempts) <= self._options.retries

    async def _attempt(self, flow: Flow, number: int) -> Attempt:
        if self._ending:
            return self._untold(flow, number, f"not begun: {self._ending.why}")
        folder = self._artifacts.attempt(flow.name, number)
        folder.create(self._spec(flow, number))
        launched = await self._launched(flow, folder)
        attempt = folder.read_outcome() or self._untold(flow, number, launched.why_untold, launched)
        if left := await self._undone(folder):
            attempt = _with_leftovers(attempt, flow, left)
        if attempt.verdict == "broken":
            self._exit_codes[flow.name] = launched.exit_code
        if attempt.verdict == "passed":
            folder.remove()
        return attempt

    async def _launched(self, flow: Flow, folder: AttemptFolder) -> Launched:
        """The attempt's process, from its start to its end."""
        launched = await Launched.start(folder, self._clock)
        self._running.add(launched)
        if self._ending:  # while it was being started
            launched.tell(self._ending.signal)
        await launched.ended(flow.limits.wall_s + AROUND_S, INTERRUPTED_S)
        self._running.discard(launched)
        return launched

    async def _undone(self, folder: AttemptFolder) -> list[str]:
        """End what the attempt has left behind, as one that was killed does; says what could not be ended."""
        if not standing(folder.path):
            return []
        return await asyncio.to_thread(undo, folder.path, 0.0 if self._ending else UNDO_S)

    def _spec(self, flow: Flow, number: int) -> AttemptSpec:
        return AttemptSpec(
            flow=str(flow.file.absolute()),
            stage=self._options.stage,
            number=number,
            lease=str(self._artifacts.lease),
            lease_timeout_s=LEASE_S,
            parent=os.getpid(),
        )

    def _untold(self, flow: Flow, number: int, why: str, launched: Launched | None = None) -> Attempt:
        """What is known of an attempt that did not begin, or could not tell how it went."""
        ending = self._ending
        finding = Finding(
            kind=ending.kind if ending else "error",
            message=ending.why if launched and ending else why,
            file=str(flow.file),
            line=flow.line,
            detail=launched.folder.last_words() if launched else (),
        )
        return Attempt(
            number=number,
            verdict=ending.verdict if ending else "broken",
            began_at=launched.began_at if launched else self._clock.wall(),
            took_s=launched.took_s if launched else 0.0,
            findings=(finding,),
            artifacts=str(launched.folder.path) if launched else None,
        )

    # ---- the run

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: signals go to whoever called
            for number, ending in INTERRUPTIONS.items():
                loop.add_signal_handler(number, self._end, ending)
        timeout_s = self._options.timeout_s
        loop.call_later(timeout_s, self._end, out_of_time(timeout_s))

    def _end(self, ending: Ending) -> None:
        """Begin no more attempts, and have those that run end. A second interruption does not wait for that."""
        if self._ending and self._ending.verdict == "interrupted":
            self._kill()
            return
        self._ending = ending
        for launched in self._running:
            launched.tell(ending.signal)
        asyncio.get_running_loop().call_later(ending.patience_s, self._kill)

    def _kill(self) -> None:
        for launched in self._running:
            launched.tell(signal.SIGKILL)

    async def _keep_lease(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the disk may be full for a while
                os.utime(self._artifacts.lease)
            await asyncio.sleep(LEASE_S / TOUCHES)


def _with_leftovers(attempt: Attempt, flow: Flow, left: Sequence[str]) -> Attempt:
    found = (Finding(kind="leftover", message=each, file=str(flow.file), line=flow.line) for each in left)
    verdict: Verdict = "failed" if attempt.verdict == "passed" else attempt.verdict
    return msgspec.structs.replace(attempt, verdict=verdict, findings=(*attempt.findings, *found))


STACKS_S = 1.0
"""How long a process that hangs may take to write down its stacks."""


class Launched:
    """One attempt's process. `why_untold`: why it may not have told how it went, once it has ended."""

    def __init__(self, folder: AttemptFolder, process: Process, clock: Clock) -> None:
        self.folder, self._process, self._clock = folder, process, clock
        self.began_at, self._began = clock.wall(), clock.monotonic()
        self._exceeded: str | None = None

    @classmethod
    async def start(cls, folder: AttemptFolder, clock: Clock) -> Launched:
        """In a session of its own: Ctrl-C is for the run, which tells its attempts."""
        with folder.log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "nvrx_slurm.lab.flow.running.attempt", str(folder.path)),
                env=env.child_environment({MARK: str(folder.path)}, with_secrets=True),
                stdin=DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
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
    def why_untold(self) -> str:
        if self._exceeded:
            return self._exceeded
        code = self._process.returncode or 0
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"the attempt's process {end} before it could tell how it went"

    async def ended(self, bound_s: float, patience_s: float) -> None:
        """Wait for its end. One that hangs is told to write down its stacks, then to end, and then is killed."""
        for wait_s, then in ((bound_s, signal.SIGUSR1), (STACKS_S, signal.SIGTERM), (patience_s, signal.SIGKILL)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), wait_s)
                return
            self._exceeded = f"the attempt did not end within {words(bound_s)}, clean-up included"
            self.tell(then)
        await self._process.wait()

    def tell(self, number: signal.Signals) -> None:
        send_signal(self._process, number)


INTERRUPTED_S = 5.0
"""How long attempts may take to undo what they did, once interrupted: GitHub's runner kills 7.5 s after SIGINT."""

LOOK_AROUND_S = 90.0
"""The same where they look around first: stacks, Slurm's answers, ends of logs."""


@dataclass(frozen=True, slots=True)
class Ending:
    """`signal`: how attempts are told; `patience_s`: how long they may take then, before they are killed."""

    why: str
    verdict: Verdict
    kind: Kind
    exit_code: int
    signal: signal.Signals
    patience_s: float


def _interruption(why: str, exit_code: int) -> Ending:
    return Ending(why, "interrupted", "error", exit_code, signal.SIGTERM, INTERRUPTED_S)


INTERRUPTIONS = {
    signal.SIGINT: _interruption("interrupted", EXIT_INTERRUPTED),
    signal.SIGTERM: _interruption("terminated", EXIT_TERMINATED),
}


def out_of_time(timeout_s: float) -> Ending:
    """The whole run has reached its bound."""
    why = f"out of time: --timeout {words(timeout_s)}"
    return Ending(why, "out_of_time", "bound", EXIT_TIMEOUT, signal.SIGALRM, LOOK_AROUND_S)
