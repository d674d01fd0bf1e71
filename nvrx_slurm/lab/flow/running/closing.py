"""How an attempt ends: if something went wrong, look around first; end the job; see that it is gone; then judge."""

from __future__ import annotations

import faulthandler
import shutil
from collections.abc import Iterator

from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.lab.flow.outcome import Finding
from nvrx_slurm.lab.flow.running import aftermath
from nvrx_slurm.lab.flow.running.artifacts import AttemptFolder
from nvrx_slurm.lab.flow.running.play import End, Play
from nvrx_slurm.lab.flow.stages.base import Stage
from nvrx_slurm.util.durations import words
from nvrx_slurm.util.log import get_logger

log = get_logger("ci")

GONE_S = 60.0
"""How long a job may take to be gone: KillWait (30 s), and what Slurm does afterwards."""

LAST_WORDS_S = 30.0
"""The same for one that has told its end."""

_GOING = (JobState.RUNNING, JobState.COMPLETING)

OUT_OF_TIME = "the whole run was out of time"


def close(play: Play, stage: Stage, folder: AttemptFolder, end: End) -> list[Finding]:
    """End the job and say all that was not as it should be. Raises SlurmUnreachable."""
    flow = play.flow
    if end in ("bound", "out_of_time"):
        why = OUT_OF_TIME if end == "out_of_time" else f"limits.wall ({words(flow.limits.wall_s)}) has passed"
        play.matcher.job_over(why)
        if play.matcher.miss is None:
            play.findings.append(aftermath.of_bound(flow, why))
    if end not in ("met", "ended"):
        _look_around(stage, folder)
    was_cancelled = _end_job(play, stage)
    left = stage.gone(play.presence.job, GONE_S)
    play.drain()
    # Of a job that we have cancelled Slurm says so, also when it was just ending by itself.
    state = None if was_cancelled else play.presence.ask()
    found = [*_judged(play, end, state), *aftermath.of_leftovers(flow, left)]
    if found:
        _keep_job_folder(play, folder)
    return found


def _look_around(stage: Stage, folder: AttemptFolder) -> None:
    folder.diagnosis.mkdir(exist_ok=True)
    with (folder.diagnosis / "harness.txt").open("w") as file:
        faulthandler.dump_traceback(file)
    stage.diagnose(folder.diagnosis)


def _end_job(play: Play, stage: Stage) -> bool:
    """Have the job end, if it does not by itself; whether it had to be cancelled."""
    presence = play.presence
    if _is_ending(play):
        stage.gone(presence.job, LAST_WORDS_S)
    state = presence.ask()
    if state is not None and state.terminal:
        return False
    stage.cancel(presence.job)
    return True


def _is_ending(play: Play) -> bool:
    """Whether the job, having told its end, is about to go. One that is back in the queue is not."""
    return aftermath.exit_code(play.entries) is not None and play.presence.ask() in (*_GOING, None)


def _judged(play: Play, end: End, state: JobState | None) -> Iterator[Finding]:
    flow, entries, result = play.flow, play.entries, play.folder.read_result()
    if (miss := play.matcher.miss) is not None:
        yield aftermath.of_miss(flow, miss, entries)
    yield from play.findings
    if end not in ("missed", "out_of_time"):
        yield from aftermath.of_faults(flow, play.director)
    yield from aftermath.of_replay(flow, play.folder.read_plan(), entries)
    yield from aftermath.of_exit_code(flow, entries, result, state)


def _keep_job_folder(play: Play, folder: AttemptFolder) -> None:
    """It may lie on a disk that goes with the stage."""
    there = play.folder.path
    if not there.is_relative_to(folder.path):
        try:
            shutil.copytree(there, folder.path / "jobs" / there.name, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            log.warning("the job's folder %s could not be kept whole: %s", there, error)
