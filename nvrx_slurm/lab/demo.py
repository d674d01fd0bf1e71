"""`nvrx-slurm demo`: train twice on this machine, once without a fault and once with a node killed, and compare.

No Slurm and no root: the nodes are processes, and the script is the one that `init` writes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import NamedTuple, Self

from nvrx_slurm.api.submission import submit
from nvrx_slurm.errors import EXIT_DONE, EXIT_FAILED
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.prewarm import PrewarmSpec
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import (
    FirstStepReached,
    JobEnded,
    JobStarted,
    NodeJoined,
    NodeLost,
    Recovered,
    RendezvousClosed,
    RestartDecided,
)
from nvrx_slurm.lab.faults.node import kill_local_node
from nvrx_slurm.report import recovery
from nvrx_slurm.report.ending import print_end
from nvrx_slurm.report.job_report import job_report, write_page
from nvrx_slurm.report.model import ReceivedHeartbeat, Recovery
from nvrx_slurm.report.sentences import Lines
from nvrx_slurm.report.source import Journal
from nvrx_slurm.report.view import JobFold
from nvrx_slurm.report.words import how_started, seconds
from nvrx_slurm.util.clock import Clock, SystemClock

STEPS, KILL_AT_STEP = 300, 150
VICTIM = "n2"
# What the script imports, and each node's warm process ahead of it.
IMPORTS = ("argparse", "json", "random", "socket", "nvrx_slurm.workload")

# The entries of the journal that are told.
SHOWN = (JobStarted, NodeLost, RestartDecided, RendezvousClosed, Recovered, FirstStepReached, JobEnded)

# After so long without a line, one says what goes on.
SILENCE_S = 0.7


class Narrator:
    """Writes lines; where none has come for `SILENCE_S`, a thread of its own writes `now`: what goes on."""

    now = ""

    def __init__(self, write: Callable[[str], None], clock: Clock) -> None:
        self._write, self._clock = write, clock
        self._said_at = clock.monotonic()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._fill_silence, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def say(self, line: str) -> None:
        with self._lock:
            self._said_at = self._clock.monotonic()
            self._write(line)

    def _fill_silence(self) -> None:
        while not self._ended.wait(SILENCE_S / 7):
            if self._clock.monotonic() - self._said_at >= SILENCE_S:
                try:
                    self.say(f"  {self.now}")
                except OSError:  # the reader is gone; the demo's own next line raises it too
                    return


class DemoRun(NamedTuple):
    """One training: its job's folder and exit code, the error of its weights, and its recovery up to the first step,
    if a node was killed."""

    folder: JobFolder
    exit_code: int
    error: float | None
    recovery: Recovery | None


def demo(base: Path, write: Callable[[str], None], *, report: Path | None = None) -> int:
    """Both trainings, in jobs of the folder `base`; 0 if they end with the same weights. `report`: where the page of
    the second one is written."""
    write(f"A training of {STEPS} steps on 4 nodes × 2 workers, with 2 hot spares; here a node is a process.\n")
    with Narrator(write, SystemClock()) as narrator:
        narrator.say("Once without a fault, to compare:")
        last = calm = train(base, "calm", narrator, step_time_s=0.0, kills=False)
        if calm.exit_code == 0:
            narrator.say(f"\nOnce more, with {VICTIM} killed at step {KILL_AT_STEP}:")
            # Slower than the first run: without a pause it might end before a poll of the journal sees step 150.
            last = train(base, "disturbed", narrator, step_time_s=0.02, kills=True)
    if last.exit_code:
        print_end(last.folder, last.exit_code)
        return EXIT_FAILED
    write("")
    for label, text in results(calm.error, last):
        write(f"{label:<40}{text}")
    if report is not None:
        write(f"\n{'the job on one page':<40}{write_page(report, job_report(last.folder).html)}")
    return EXIT_DONE if calm.error == last.error and last.recovery is not None else EXIT_FAILED


def results(calm_error: float | None, last: DemoRun) -> list[tuple[str, str]]:
    """The demo's last lines: label and text."""
    lines = [(f"from the death of {VICTIM} to the next step", "no node was lost")]
    if last.recovery is not None and last.recovery.to_first_step_s is not None:
        lines = [(f"from the death of {VICTIM} to the next step", seconds(last.recovery.to_first_step_s))]
        for _, label, took in recovery.in_order(last.recovery):
            lines.append((f"  {label}", seconds(took)))
        if how := how_started(last.recovery.warm, last.recovery.cold):
            lines.append(("  how workers started", how))
    return [
        *lines,
        ("error without a fault", repr(calm_error)),
        (f"error with {VICTIM} killed", repr(last.error)),
        ("", "the same, bit for bit" if calm_error == last.error else "DIFFERENT"),
    ]


def train(base: Path, name: str, narrator: Narrator, *, step_time_s: float, kills: bool) -> DemoRun:
    """Run one training to its end, told as it goes; `kills` a node midway. No process of it is left."""
    narrator.now = "starting"
    checkpoints = base / f"checkpoints-{name}"
    script = resources.files("nvrx_slurm.jobspec") / "templates" / "train.py"
    options = {
        "--steps": STEPS,
        "--step-time": step_time_s,
        "--checkpoint-every": 10,
        "--checkpoint-dir": checkpoints,
    }
    spec = JobSpec(
        name=f"demo-{name}",
        command=(sys.executable, str(script), *(str(word) for option in options.items() for word in option)),
        nodes=4,
        spares=2,
        workers_per_node=2,
        prewarm=PrewarmSpec(imports=IMPORTS),
    )
    job = submit(spec, cluster="local", folder=base)
    try:
        recovered = _follow(JobFolder(base / job.job_id), narrator, kills=kills)
        narrator.now = "ending"
        exit_code = job.wait(timeout=60.0)
    finally:  # also when the demo is interrupted: nothing is left, and the folder can go
        job.cancel()
        job.wait_until_gone()
    error = json.loads((checkpoints / "trained.json").read_text())["error"] if exit_code == 0 else None
    return DemoRun(JobFolder(base / job.job_id), exit_code, error, recovered)


def _follow(folder: JobFolder, narrator: Narrator, *, kills: bool) -> Recovery | None:
    """Tell the training until it ends. Returns its last recovery in which all nodes have stepped."""
    journal, lines, fold = Journal(folder, beats=True), Lines(), JobFold()
    agent = step = 0
    stepped: Recovery | None = None
    try:
        while not journal.ended:
            for item in journal.poll(0.2):
                fold.take(item)
                if isinstance(item, ReceivedHeartbeat):
                    step = max(step, *item.heartbeat.steps.values(), 0)
                    narrator.now = f"step {step} of {STEPS}" if step else "starting"
                    continue
                line, record = lines.in_words(item), item.record
                if isinstance(record, NodeJoined) and record.node == VICTIM:
                    agent = record.pid
                elif isinstance(record, FirstStepReached):
                    stepped = fold.view.recoveries[record.replica, fold.view.generation, record.cycle]
                if kills and isinstance(record, SHOWN):
                    narrator.say(f"  {line}")
            if kills and agent and step >= KILL_AT_STEP:
                narrator.say(f"  kill -9: all processes of {VICTIM}, at step {step}")
                kill_local_node(agent)
                agent = 0
    finally:
        journal.close()
    return stepped
