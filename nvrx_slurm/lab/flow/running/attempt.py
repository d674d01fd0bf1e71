"""`python -m nvrx_slurm.lab.flow.running.attempt FOLDER`: one run of one flow, in a process of its own.

Slurm's programs find their cluster by the environment: so each attempt has one of its own. It dies with the run that
started it. SIGTERM has it undo what it did, SIGALRM look around first; SIGUSR1 writes its stacks into its log.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from nvrx_slurm.errors import EXIT_DONE, EXIT_FAILED, NvrxError
from nvrx_slurm.jobspec import env
from nvrx_slurm.lab.flow.language.load import load_flow
from nvrx_slurm.lab.flow.language.model import Flow
from nvrx_slurm.lab.flow.outcome import Attempt, Finding, Kind, Verdict
from nvrx_slurm.lab.flow.running import findings
from nvrx_slurm.lab.flow.running.artifacts import AttemptFolder, AttemptSpec
from nvrx_slurm.lab.flow.running.cleanup import Hold, undo
from nvrx_slurm.lab.flow.running.findings import OUT_OF_TIME, close
from nvrx_slurm.lab.flow.running.play import End, Play, Presence
from nvrx_slurm.lab.flow.stages import open_stage
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.log import get_logger, set_up
from nvrx_slurm.util.processes import die_with

log = get_logger("ci")

UNDO_S = 2.0
"""How long jobs get to end by themselves when the attempt was told to end."""


class ToldToEnd(BaseException):
    """SIGTERM came: undo everything, now."""


class OutOfTime(BaseException):
    """SIGALRM came: the whole run is out of time."""


class Running:
    """One attempt, from its flow file to its outcome."""

    def __init__(self, folder: AttemptFolder, spec: AttemptSpec, clock: Clock) -> None:
        self._folder, self._spec, self._clock = folder, spec, clock
        self._hold = Hold(folder.path)
        self._began, self._began_at = clock.monotonic(), clock.wall()
        self._play: Play | None = None
        self._findings: list[Finding] = []

    def run(self) -> int:
        """Run the flow, undo everything, write the outcome; returns the exit code of this process."""
        self._hold.process(os.getpid())
        verdict, exit_code = self._verdict()
        log.info("undoing what is left")
        problems = undo(self._folder.path, UNDO_S)
        self._findings += [self._finding("leftover", problem) for problem in problems]
        if verdict == "passed" and self._findings:
            verdict = "failed"
        self._folder.write_outcome(self._outcome(verdict))
        return exit_code

    def _verdict(self) -> tuple[Verdict, int]:
        try:
            return self._perform(), EXIT_DONE
        except ToldToEnd:
            self._findings.append(self._finding("error", "interrupted"))
            return "interrupted", EXIT_DONE
        except OutOfTime:
            self._findings.append(self._finding("bound", OUT_OF_TIME))
            return "out_of_time", EXIT_DONE
        except NvrxError as error:
            self._findings.append(self._finding("error", str(error)))
            return "broken", error.exit_code
        except Exception as error:
            log.exception("the harness failed")
            detail = traceback.format_exc().splitlines()
            self._findings.append(self._finding("error", f"{type(error).__name__}: {error}", detail))
            return "broken", EXIT_FAILED

    def _perform(self) -> Verdict:
        spec, flow = self._spec, self._leased(load_flow(Path(self._spec.flow)))
        with open_stage(flow, spec.stage, self._folder.path, self._hold) as stage:
            log.info("the stage %s is open", stage.name)
            env.adopt(stage.environment)
            if stage.name == "slurm":
                self._hold.queue(env.slurm_configuration())
            job = stage.submit(flow)
            log.info("job %s, in %s", job.job_id, job.folder)
            self._play = Play(flow, stage, Presence(job, self._clock), self._clock)
            end: End
            try:
                end = self._play.run(self._began + flow.limits.wall_s)
            except OutOfTime:
                end = "out_of_time"
            log.info("the flow's end: %s", end)
            self._findings += close(self._play, stage, self._folder, end)
        if end == "out_of_time":
            return "out_of_time"
        return "failed" if self._findings else "passed"

    def _leased(self, flow: Flow) -> Flow:
        """The flow, with a job that ends once nobody touches the run's lease."""
        lease = (("lease.file", self._spec.lease), ("lease.timeout", self._spec.lease_timeout_s))
        return dataclasses.replace(flow, overrides=(*flow.overrides, *lease))

    def _outcome(self, verdict: Verdict) -> Attempt:
        entries, struck = (self._play.entries, self._play.struck) if self._play else ([], [])
        return Attempt(
            number=self._spec.number,
            verdict=verdict,
            began_at=self._began_at,
            took_s=self._clock.monotonic() - self._began,
            findings=tuple(self._findings),
            struck=tuple(struck),
            recoveries_s=findings.recoveries_s(entries),
            job_id=self._play.presence.job.job_id if self._play else None,
            exit_code=findings.exit_code(entries),
            excerpt=findings.excerpt(entries, struck),
            artifacts=None if verdict == "passed" else str(self._folder.path),
        )

    def _finding(self, kind: Kind, message: str, detail: Sequence[str] = ()) -> Finding:
        return Finding(kind=kind, message=message, file=self._spec.flow, line=1, detail=tuple(detail))


def _listen() -> None:
    """Signals end what is going on, whatever that is; a second SIGTERM changes nothing."""

    def told_to_end(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        raise ToldToEnd

    def out_of_time(*_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        raise OutOfTime

    signal.signal(signal.SIGTERM, told_to_end)
    signal.signal(signal.SIGINT, told_to_end)
    signal.signal(signal.SIGALRM, out_of_time)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def main(path: Path) -> int:
    """Run the attempt whose specification lies in this folder."""
    folder = AttemptFolder(path)
    spec = folder.read_spec()
    die_with(spec.parent, signal.SIGTERM)
    set_up("attempt")
    _listen()
    return Running(folder, spec, SystemClock()).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
