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
from nvrx_slurm.lab.flow.judging.triggers import Director
from nvrx_slurm.lab.flow.language.model import Flow
from nvrx_slurm.lab.flow.outcome import Finding, Kind, Struck
from nvrx_slurm.lab.flow.replaying import explain, replay
from nvrx_slurm.lab.flow.running.artifacts import AttemptFolder
from nvrx_slurm.lab.flow.running.play import End, Play
from nvrx_slurm.lab.flow.stages.base import Stage
from nvrx_slurm.report.sentences import NAME_WIDTH, TIME_WIDTH, Lines
from nvrx_slurm.util.durations import words
from nvrx_slurm.util.log import get_logger

EXCERPT_LINES = 200


def of_miss(flow: Flow, miss: Miss, entries: Sequence[Entry]) -> Finding:
    """The first expectation that was not met, with what came around that moment and what almost was it."""
    shown = _in_words(entries)
    detail = []
    if miss.around:
        detail += ["around that moment:", *(f"  {shown[entry.n]}" for entry in miss.around)]
    if miss.nearest is not None:
        detail += ["nearest:", f"  {shown[miss.nearest.entry.n]}"]
        detail += [f"    {difference}" for difference in miss.nearest.differences]
    message = f"expected {miss.expected}: {miss.reason}"
    return Finding(kind="expectation", message=message, file=str(flow.file), line=miss.line, detail=tuple(detail))


def of_faults(flow: Flow, director: Director) -> Iterator[Finding]:
    """Each fault that never struck: without it the flow has shown nothing."""
    for fault in director.waiting:
        message = f"fault {fault.number} ({fault.describe()}) never struck: {director.why_not(fault)}"
        yield Finding(kind="fault", message=message, file=str(flow.file), line=fault.line)


def of_replay(flow: Flow, plan: Plan, entries: Sequence[Entry]) -> Iterator[Finding]:
    """The journal, fed through the core once more, must give the decisions that it holds."""
    parting = replay(plan, entries).parting
    if parting is not None:
        message = f"the journal does not replay: entry {parting.entry.n} is not what the core decides"
        yield _of_flow(flow, "replay", message, explain(parting, entries))


def of_exit_code(
    flow: Flow, entries: Sequence[Entry], result: Result | None, state: JobState | None
) -> Iterator[Finding]:
    """Journal, `result.json` and Slurm must tell the same end."""
    said = exit_code(entries)
    if said is None:
        return
    if result is not None and result.exit_code != said:
        message = f"the journal ends with exit code {said}, result.json with {result.exit_code}: {result.reason}"
        yield _of_flow(flow, "exit_code", message)
    if state is not None and state.terminal and (state is JobState.COMPLETED) != (said == 0):
        yield _of_flow(flow, "exit_code", f"the journal ends with exit code {said}, and Slurm says {state}")


def of_leftovers(flow: Flow, left: Iterable[str]) -> Iterator[Finding]:
    """What of the job outlived it, a finding each."""
    return (_of_flow(flow, "leftover", f"left behind: {what}") for what in left)


def of_bound(flow: Flow, message: str) -> Finding:
    return _of_flow(flow, "bound", message)


def exit_code(entries: Sequence[Entry]) -> int | None:
    """How the job's last generation ended, by its journal; None: it does not say."""
    for entry in reversed(entries):
        if isinstance(entry.record, JobEnded | JobStarted):
            return entry.record.exit_code if isinstance(entry.record, JobEnded) else None
    return None


def recoveries_s(entries: Sequence[Entry]) -> tuple[float, ...]:
    """How long each recovery took, in order."""
    return tuple(entry.record.total_s for entry in entries if isinstance(entry.record, Recovered))


def excerpt(entries: Sequence[Entry], struck: Iterable[Struck]) -> tuple[str, ...]:
    """The journal as `nvrx-slurm events` prints it, with each fault in its place; its end, if it is long."""
    if not entries:
        return ()
    told = [(entry.t, line) for entry, line in zip(entries, _in_words(entries).values(), strict=True)]
    told += [(fault.t, _fault_line(fault, entries[0].t)) for fault in struck]
    return tuple(line for _, line in sorted(told, key=lambda each: each[0]))[-EXCERPT_LINES:]


def _fault_line(fault: Struck, begin: float) -> str:
    time = f"{fault.t - begin:+.3f}s"
    return f"{time:<{TIME_WIDTH}} {'fault':<{NAME_WIDTH}} {fault.number}: {fault.what}"


def _in_words(entries: Sequence[Entry]) -> dict[int, str]:
    lines = Lines()
    return {entry.n: lines.in_words(entry) for entry in entries}


def _of_flow(flow: Flow, kind: Kind, message: str, detail: Iterable[str] = ()) -> Finding:
    return Finding(kind=kind, message=message, file=str(flow.file), line=flow.line, detail=tuple(detail))


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
            play.findings.append(of_bound(flow, why))
    if end not in ("met", "ended"):
        _look_around(stage, folder)
    was_cancelled = _end_job(play, stage)
    left = stage.gone(play.presence.job, GONE_S)
    play.drain()
    # Of a job that we have cancelled Slurm says so, also when it was just ending by itself.
    state = None if was_cancelled else play.presence.ask()
    found = [*_judged(play, end, state), *of_leftovers(flow, left)]
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
    return exit_code(play.entries) is not None and play.presence.ask() in (*_GOING, None)


def _judged(play: Play, end: End, state: JobState | None) -> Iterator[Finding]:
    flow, entries, result = play.flow, play.entries, play.folder.read_result()
    if (miss := play.matcher.miss) is not None:
        yield of_miss(flow, miss, entries)
    yield from play.findings
    if end not in ("missed", "out_of_time"):
        yield from of_faults(flow, play.director)
    yield from of_replay(flow, play.folder.read_plan(), entries)
    yield from of_exit_code(flow, entries, result, state)


def _keep_job_folder(play: Play, folder: AttemptFolder) -> None:
    """It may lie on a disk that goes with the stage."""
    there = play.folder.path
    if not there.is_relative_to(folder.path):
        try:
            shutil.copytree(there, folder.path / "jobs" / there.name, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            log.warning("the job's folder %s could not be kept whole: %s", there, error)
