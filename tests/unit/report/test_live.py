"""Watching a job: when the watch ends although the job has not ended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import EXIT_UNREACHABLE, SlurmUnreachable, UsageError
from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.journal.records import Entry, JobEnded, JobStarted, entry_to_json
from nvrx_slurm.report import live, presence
from nvrx_slurm.util.terminal import is_unread
from tests.still_clock import StillClock
from tests.unit.report.recorder import JOB, with_one_recovery, write


@pytest.mark.parametrize("has_started", [False, True])
def test_a_watch_ends_when_slurm_stays_silent(
    has_started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Slurm no longer answers, the job neither ends nor reports: the watch has a bound, before the start of the
    job and after."""
    if has_started:
        write(tmp_path, with_one_recovery(), job="17", cluster="slurm")
    clock = StillClock()
    began = clock.now

    def ask_slurm(job_ids: Sequence[str]) -> Mapping[str, JobState]:
        return dict.fromkeys(job_ids, JobState.PENDING) if clock.now == began else {}

    monkeypatch.setattr(presence, "ask_slurm", ask_slurm)
    with pytest.raises(SlurmUnreachable) as raised:
        live.watch(tmp_path, "17", clock=clock)
    assert raised.value.exit_code == EXIT_UNREACHABLE
    assert live.GIVE_UP_S <= clock.now - began <= live.GIVE_UP_S + 3 * presence.ASK_SLURM_EVERY_S


def test_a_watch_of_anothers_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm knows the id, but no folder appears: the watch has a bound, and ends at once if the job is over."""
    for state, least_s in ((JobState.RUNNING, live.FOLDER_S), (JobState.COMPLETED, 0.0)):
        clock = StillClock()
        began = clock.now
        monkeypatch.setattr(presence, "ask_slurm", lambda job_ids, state=state: dict.fromkeys(job_ids, state))
        with pytest.raises(UsageError):
            live.watch(tmp_path, "17", clock=clock)
        assert least_s <= clock.now - began <= least_s + 1.0


class Requeue(StillClock):
    """Slurm starts the job again 5 s after the watch began; 3 s later the journal continues and ends."""

    def __init__(self, folder: JobFolder, entries: Sequence[Entry], now: float) -> None:
        super().__init__(now)
        self.slurm, self._folder, self._entries = JobState.PENDING, folder, entries
        self._began, self._looks = now, 0

    def monotonic(self) -> float:
        self._looks += 1
        assert self._looks < 10_000, "the watch loops without a pause"
        return self.now

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        info = self._folder.read_info()
        assert info is not None
        if self.now - self._began >= 5.0 and info.generation == 0:
            self.slurm = JobState.RUNNING
            self._folder.remove_result()
            self._folder.write_info(replace(info, generation=1))
        elif self.now - self._began >= 8.0 and self._entries:
            with self._folder.events_path.open("ab") as journal:
                journal.writelines(entry_to_json(entry) + b"\n" for entry in self._entries)
            self._folder.write_result(Result(exit_code=0, reason="done", ended_at=self.now))
            self._entries = ()


@pytest.mark.parametrize("left_an_end", [True, False])
def test_a_watch_goes_on_when_slurm_requeues_the_job(
    left_an_end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continues from the end of a generation, which may be missing in the journal, through the queue to the next
    generation."""
    recorder = with_one_recovery()
    number, at = len(recorder.entries) + 1, recorder.now
    if left_an_end:
        recorder.entries.append(Entry(n=number, t=at, record=JobEnded(exit_code=75, reason="preempted")))
    folder = write(tmp_path, recorder, job="17", cluster="slurm")
    folder.write_result(Result(exit_code=75, reason="preempted", ended_at=at))
    again = JobStarted(job=JOB, name="digits", expected=recorder.nodes, generation=1)
    follows = [
        Entry(n=number + left_an_end, t=at + 8.0, record=again),
        Entry(n=number + left_an_end + 1, t=at + 9.0, record=JobEnded(exit_code=0, reason="done")),
    ]
    clock = Requeue(folder, follows, at)
    monkeypatch.setattr(presence, "ask_slurm", lambda job_ids: dict.fromkeys(job_ids, clock.slurm))
    assert live.watch(tmp_path, "17", clock=clock) == 0
    assert clock.now - at >= 8.0


def test_only_whole_lines_of_ranks_are_passed_on(tmp_path: Path) -> None:
    """The job's own processes write into the same log, and a line may be written in two parts."""
    folder = JobFolder(tmp_path)
    printed = live.WorkersLines(folder)
    assert printed.new() == []
    with folder.job_log.open("a") as log:
        log.write("2026-11-24 nvrx-slurm batch: ready\n[main-0 1] hello\n[pol-0 12] ha")
        log.flush()
        assert printed.new() == ["[main-0 1] hello"]
        log.write("lf\n[1, 2, 3]\n")
        log.flush()
        assert printed.new() == ["[pol-0 12] half"]


def test_a_pipe_is_unread_once_its_reader_has_gone() -> None:
    """It is noticed before anything is written; a file always has a reader."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe, Path(os.devnull).open("w") as file:
        assert not is_unread(pipe)
        os.close(reading)
        assert is_unread(pipe)
        assert not is_unread(file)
