"""`python -m nvrx_slurm.lab.flow.guard FOLDER`: outlives a run that is killed, and ends what is left.

It holds the reading end of a pipe from the run. A run that ends by itself writes "goodbye" to it; end of file without
that means that the run was killed. The kernel has then sent SIGTERM to its attempts, and they clean up; this process
ends what those leave. If this process is killed as well, the jobs' lease lapses and they end.
"""

from __future__ import annotations

import contextlib
import glob
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvrx_slurm.errors import UnsafePath, WaitTimeout
from nvrx_slurm.jobspec import env
from nvrx_slurm.lab.devcluster import processes
from nvrx_slurm.lab.devcluster.processes import wait_until
from nvrx_slurm.lab.flow.artifacts import GUARD_LOG
from nvrx_slurm.lab.flow.cleanup import HELD, HeldProcess, clean_up, standing
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.log import get_logger, set_up

log = get_logger("ci")

GOODBYE = b"goodbye\n"
# How long attempts may take to end after SIGTERM.
ATTEMPTS_END_S = 8.0

PATIENCE_S = 3.0
# GitHub's runner ends every process that has this in its environment when a workflow job is over.
KILLER_OF_CHILDREN = "RUNNER_TRACKING_ID"


class RunGuard:
    """The guard of one run, from the run's side."""

    def __init__(self, folder: Path) -> None:
        """Start it: from now on all attempts in `folder` are cleaned up if this process is killed."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nvrx_slurm.lab.flow.guard", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env.child_environment({}, without=[KILLER_OF_CHILDREN]),
            start_new_session=True,  # Ctrl-C in a terminal must not end it with the run
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """The run ends by itself, and nothing is left."""
        # A guard that is slow to end is not waited for: it has its goodbye, and ends without this process.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(GOODBYE, timeout=ATTEMPTS_END_S)

    def abandon(self) -> None:
        """Leave everything to the guard, as the kernel does for a run that is killed, and wait until it is done."""
        self._process.communicate()


def clean(folder: Path, patience_s: float = PATIENCE_S) -> list[str]:
    """End all that the attempts of this run still hold, and say what could not be ended. A folder that is not there
    holds nothing."""
    found = glob.glob(f"*/*/{HELD}", root_dir=folder)  # noqa: PTH207  Path.glob trips over a folder that goes meanwhile
    held: list[Path] = []
    problems: list[str] = []
    for attempt in (Path(folder, name).parent for name in sorted(found)):
        try:
            held += [attempt] if standing(attempt) else []
        except UnsafePath as error:  # the others are ended all the same
            problems.append(str(error))
    if not held:
        return problems
    # Side by side: each of them may take all of its patience.
    with ThreadPoolExecutor(len(held)) as pool:
        ended = pool.map(lambda each: _end(each, patience_s), held)
        return [*problems, *(problem for each in ended for problem in each)]


def _end(folder: Path, patience_s: float) -> list[str]:
    """The attempt itself first: it knows which jobs it has submitted."""
    # The first process of the list is the attempt: `AttemptRun.run` writes its own line before all others.
    runners = [held.process for held in standing(folder) if isinstance(held, HeldProcess)][:1]
    living = [runner for runner in runners if processes.lives(runner)]
    processes.send(living, signal.SIGTERM)
    with contextlib.suppress(WaitTimeout):  # it will be killed
        wait_until(
            lambda: not any(map(processes.lives, living)),
            timeout_s=ATTEMPTS_END_S,
            what=f"the attempt in {folder} to end",
            clock=SystemClock(),
        )
    return clean_up(folder, patience_s)


def main(arguments: Iterable[str]) -> None:
    """Wait for the run's end; if it was killed, clean up."""
    (folder,) = map(Path, arguments)
    if sys.stdin.buffer.read() == GOODBYE:
        return
    with (folder / GUARD_LOG).open("a") as log_file:
        set_up("guard", stream=log_file)
        log.info("the run was killed: ending what it has left")
        for problem in clean(folder):
            log.error("%s", problem)
        log.info("done")


if __name__ == "__main__":
    main(sys.argv[1:])
