"""Watching a job: when the watch ends although the job does not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import EXIT_UNREACHABLE, SlurmUnreachable
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report import live, presence
from nvrx_slurm.util.terminal import is_unread
from tests.still_clock import StillClock
from tests.unit.report.recorder import with_one_recovery, write


@pytest.mark.parametrize("has_started", [False, True])
def test_a_watch_ends_when_slurm_stays_silent(
    has_started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a Slurm that is gone neither ends nor reports: in the queue and after its start, the watch has a
    bound."""
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
    """Before anything is written to it; a file always has a reader."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe, Path(os.devnull).open("w") as file:
        assert not is_unread(pipe)
        os.close(reading)
        assert is_unread(pipe)
        assert not is_unread(file)
