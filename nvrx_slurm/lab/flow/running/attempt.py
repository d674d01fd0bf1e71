"""`python -m nvrx_slurm.lab.flow.running.attempt FOLDER`: one run of one flow, in a process of its own.

Slurm's programs find their cluster by the environment, so each attempt has a process and an environment of its own.
It dies with the run that started it. On SIGTERM it cleans up; on SIGALRM it first writes a diagnosis; on SIGUSR1 it
writes its stacks into its log.
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
from nvrx_slurm.lab.flow.outcome import FlowAttempt, FlowFinding, Kind, Verdict
from nvrx_slurm.lab.flow.running import findings
from nvrx_slurm.lab.flow.running.artifacts import AttemptFolder, AttemptSpec
from nvrx_slurm.lab.flow.running.cleanup import CleanupList, clean_up
from nvrx_slurm.lab.flow.running.findings import OUT_OF_TIME, close
from nvrx_slurm.lab.flow.running.play import End, FlowRun, StatePoller
from nvrx_slurm.lab.flow.stages import open_stage
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.log import get_logger, set_up
from nvrx_slurm.util.processes import die_with

log = get_logger("ci")

CLEANUP_S = 2.0
"""How long jobs get to end by themselves after SIGTERM."""


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
        except NvrxError as error:
            verdict, exit_code = "broken", error.exit_code
            self._find("error", str(error))
        except Exception as error:
            log.exception("the harness failed")
            verdict, exit_code = "broken", EXIT_FAILED
            self._find("error", f"{type(error).__name__}: {error}", traceback.format_exc().splitlines())
        log.info("cleaning up what is left")
        for problem in clean_up(self._folder.path, CLEANUP_S):
            self._find("leftover", problem)
        if verdict == "passed" and self._findings:
            verdict = "failed"
        entries, struck = (self._run.entries, self._run.struck) if self._run else ([], [])
        attempt = FlowAttempt(
            number=self._spec.number,
            verdict=verdict,
            began_at=self._began_at,
            took_s=self._clock.monotonic() - self._began,
            findings=tuple(self._findings),
            struck=tuple(struck),
            recoveries_s=findings.recoveries_s(entries),
            job_id=self._run.poller.job.job_id if self._run else None,
            exit_code=findings.exit_code(entries),
            excerpt=findings.excerpt(entries, struck),
            artifacts=None if verdict == "passed" else str(self._folder.path),
        )
        self._folder.write_outcome(attempt)
        return exit_code

    def _perform(self) -> Verdict:
        spec, flow = self._spec, load_flow(Path(self._spec.flow))
        # The job ends once the run's lease is no longer touched.
        lease = (("lease.file", spec.lease), ("lease.timeout", spec.lease_timeout_s))
        flow = dataclasses.replace(flow, overrides=(*flow.overrides, *lease))
        with open_stage(flow, spec.stage, self._folder.path, self._cleanup) as stage:
            log.info("the stage %s is open", stage.name)
            env.adopt(stage.environment)
            if stage.name == "slurm":
                self._cleanup.queue(env.slurm_configuration())
            job = stage.submit(flow)
            log.info("job %s, in %s", job.job_id, job.folder)
            self._run = FlowRun(flow, stage, StatePoller(job, self._clock), self._clock)
            end: End
            try:
                end = self._run.run(self._began + flow.wall_s)
            except OutOfTime:
                end = "out_of_time"
            log.info("the flow's end: %s", end)
            self._findings += close(self._run, stage, self._folder, end)
        if end == "out_of_time":
            return "out_of_time"
        return "failed" if self._findings else "passed"

    def _find(self, kind: Kind, message: str, detail: Sequence[str] = ()) -> None:
        finding = FlowFinding(kind=kind, message=message, file=self._spec.flow, line=1, detail=tuple(detail))
        self._findings.append(finding)


def main(path: Path) -> int:
    """Run the attempt whose specification lies in this folder."""
    folder = AttemptFolder(path)
    spec = folder.read_spec()
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
    sys.exit(main(Path(sys.argv[1])))
