"""The list of jobs, their states, and whether a process still runs them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.cluster.ending import EndWatch
from nvrx_slurm.cluster.queue_place import QueuePlace
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.cluster.tasks import tasks_of
from nvrx_slurm.errors import SlurmUnreachable, UsageError
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result, StoreAddress
from nvrx_slurm.journal.records import Entry, JobEnded
from nvrx_slurm.report import page, presence, snapshot
from nvrx_slurm.report.array_tasks import take_with_tasks
from nvrx_slurm.report.job_report import job_report
from nvrx_slurm.report.jobs import find_job, known_jobs, my_jobs
from nvrx_slurm.report.presence import Presence, still_in_slurm
from nvrx_slurm.report.removal import size_of
from nvrx_slurm.report.snapshot import list_jobs
from nvrx_slurm.report.view import new_view
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.durations import DAY_S
from tests.unit.report.recorder import (
    BEGIN,
    Recorder,
    ended,
    plain_plan,
    to_first_cycle,
    with_one_recovery,
    write,
)


def info(pid: int, *, started_at: float, host: str | None = None) -> JobInfo:
    host = socket.gethostname() if host is None else host
    return JobInfo(job_id="x", name="x", cluster="local", started_at=started_at, host=host, host_pid=pid)


def test_jobs_are_listed_newest_first(tmp_path: Path) -> None:
    """The newest job comes first; folders that are no jobs are ignored."""
    for number, job in enumerate(("a", "b", "c")):
        write(tmp_path, ended(), job=job).write_info(info(1, started_at=BEGIN + number))
    (tmp_path / "notes").mkdir()
    assert [folder.job_id for folder in known_jobs(tmp_path)] == ["c", "b", "a"]
    assert known_jobs(tmp_path / "nowhere") == []


def test_a_run_in_the_allocation_of_an_arrays_task_is_no_task(tmp_path: Path) -> None:
    """`1_3-run1` is beside `1_3`, and is another job."""
    for job in ("1_12", "1_3", "1_3-run1"):
        write(tmp_path, ended(), job=job)
    assert [folder.job_id for folder in tasks_of(tmp_path, "1")] == ["1_3", "1_12"]


@pytest.mark.parametrize("look", [1, 2])
def test_a_job_that_is_removed_meanwhile_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    """Another process removes its folder after this read of its plan; no batch host has started it yet."""
    for job in ("a", "b"):
        (write(tmp_path, ended(), job=job).path / "job.json").unlink()
    is_file, looks = Path.is_file, itertools.count(1)

    def vanishes(path: Path) -> bool:
        was_file = is_file(path)
        if path == tmp_path / "b" / "plan.json" and next(looks) == look:
            shutil.rmtree(path.parent)
        return was_file

    monkeypatch.setattr(Path, "is_file", vanishes)
    assert "a" in [folder.job_id for folder in my_jobs(tmp_path)]


@pytest.mark.parametrize("jobs_of", [known_jobs, my_jobs])
def test_a_base_folder_that_is_removed_has_no_jobs(
    jobs_of: Callable[[Path], Iterable[JobFolder]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes the folder just before it is read."""
    write(tmp_path / "jobs", ended())
    iterdir = Path.iterdir

    def vanishes(path: Path) -> Iterator[Path]:
        shutil.rmtree(path)
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", vanishes)
    assert list(jobs_of(tmp_path / "jobs")) == []


def test_the_size_of_a_folder_is_that_of_the_files_that_are_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes all other files when the first one's size is read."""
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("four")
    lstat = Path.lstat

    def vanish(path: Path) -> os.stat_result:
        for other in path.parent.iterdir():
            if other != path:
                other.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", vanish)
    assert size_of(tmp_path) == 4


def test_a_job_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    """The message names the folder, its jobs, and the job with the nearest name."""
    write(tmp_path, ended(), job="4711")
    with pytest.raises(UsageError, match=r"no job '4712' in .* \(did you mean 4711\?\); it holds 4711"):
        find_job(tmp_path, "4712")
    with pytest.raises(UsageError, match="holds no jobs; --folder names another"):
        find_job(tmp_path / "empty", "1")


@pytest.mark.parametrize("job_id", ["", ".", "..", "../x", "a/b", "/etc"])
def test_a_job_id_is_no_path(tmp_path: Path, job_id: str) -> None:
    """A path outside the base folder is never taken for a job."""
    base = tmp_path / "base"
    write(base, ended(), job="real")
    write(tmp_path, ended(), job="x")
    write(base / "a", ended(), job="b")
    with pytest.raises(UsageError, match="no job"):
        find_job(base, job_id)


def test_the_list_shows_the_state_of_each_job(tmp_path: Path) -> None:
    """State, nodes, cycle, restarts and step of each job come from its journal."""
    write(tmp_path, ended(), job="done")
    write(tmp_path, with_one_recovery(), job="running")
    by_id = {line.job: line for line in list_jobs(tmp_path)}
    assert (by_id["done"].state, by_id["done"].exit_code, by_id["done"].nodes) == ("completed", 0, "0/6")
    running = by_id["running"]
    assert (running.state, running.nodes, running.cycle, running.restarts, running.step) == (
        "running",
        "5/6",
        1,
        1,
        76,
    )


@pytest.mark.parametrize(
    ("exit_code", "state"),
    [
        (0, "completed"),
        (1, "failed"),
        (75, "lost"),
        (93, "stopped"),
        (124, "timeout"),
        (130, "cancelled"),
        (143, "cancelled"),
    ],
)
def test_the_result_says_how_a_job_ended(tmp_path: Path, exit_code: int, state: str) -> None:
    """The result's exit code decides, even if the journal has no end."""
    folder = write(tmp_path, with_one_recovery())
    folder.write_result(Result(exit_code=exit_code, reason="because", ended_at=BEGIN))
    shot = snapshot.take(folder)
    assert (shot.state, shot.exit_code, shot.reason) == (state, exit_code, "because")


def test_a_job_whose_journal_has_no_end_ends_with_its_result(tmp_path: Path) -> None:
    """Its batch host was killed: on each page its last steps count up to the time of the end in the result."""
    recorder = with_one_recovery()
    folder = write(tmp_path, recorder)
    folder.write_result(Result(exit_code=75, reason="batch host killed", ended_at=recorder.now + 3600.0))
    report = job_report(folder)
    shot = snapshot.take(folder)
    assert (shot.moment, snapshot.as_status(shot).ended_at) == (recorder.now + 3600.0,) * 2
    assert shot.elapsed_s == pytest.approx(3600.0, abs=60.0)
    assert report.goodput.parts_us["new_steps"] + report.goodput.parts_us["repeated_steps"] > 4 * 3590e6
    assert b'class="note"' in report.html


def test_the_end_of_the_journal_is_the_end_of_the_job(tmp_path: Path) -> None:
    """A time in the result, which is by the batch host's clock, does not change it, nor does one before the last
    entry."""
    recorder = ended()
    folder = write(tmp_path, recorder)
    folder.write_result(Result(exit_code=0, reason="done", ended_at=recorder.now + 3600.0))
    assert snapshot.take(folder).moment == recorder.now
    cut = write(tmp_path, with_one_recovery(), job="cut")
    cut.write_result(Result(exit_code=75, reason="batch host killed", ended_at=BEGIN - 30.0))
    shot = snapshot.take(cut)
    assert shot.moment == shot.view.t


def test_a_local_job_whose_host_process_is_gone_died(tmp_path: Path) -> None:
    """With no result, no job_ended and no process, the state is `died`."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    folder = write(tmp_path, with_one_recovery())
    folder.write_info(info(child.pid, started_at=SystemClock().wall()))
    child.wait()
    assert snapshot.take(folder).state == "died"


def test_a_process_lives_unless_it_is_a_zombie_or_its_pid_was_reused() -> None:
    """The host is alive if its pid is in use by a process that is no zombie and no younger than the job."""
    now = SystemClock().wall()
    assert info(os.getpid(), started_at=now).host_lives()
    assert not info(os.getpid(), started_at=now - 10 * 365 * 86_400).host_lives(), "a recycled process id"
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not info(child.pid, started_at=now).host_lives(), "a zombie"
    child.wait()


def test_a_process_on_another_host_is_given_the_benefit_of_the_doubt(tmp_path: Path) -> None:
    """A reader on this host cannot know that the process has ended, so it takes the job for running."""
    folder = write(tmp_path, with_one_recovery())
    folder.write_info(info(2**22 + 1, started_at=BEGIN, host="another"))
    assert not Presence(folder).gone()


def test_a_result_ends_a_job_once_its_store_is_gone(tmp_path: Path) -> None:
    """Until the batch host has removed its store, the job is still ending."""
    folder = write(tmp_path, ended())
    folder.write_store(StoreAddress(url="redis://127.0.0.1:1", job="1", token="t"))
    folder.write_result(Result(exit_code=0, reason="done", ended_at=SystemClock().wall()))
    assert not Presence(folder).gone()
    folder.remove_store()
    assert Presence(folder).gone()


def test_a_batch_host_that_was_killed_behind_its_result_clears_nothing_away(tmp_path: Path) -> None:
    """The store's address is left behind, and `events -f` must still end: because the process has ended, or after a
    time."""
    folder, now = write(tmp_path, with_one_recovery()), SystemClock().wall()
    folder.write_store(StoreAddress(url="redis://127.0.0.1:1", job="1", token="t"))
    for pid, host, ago_s, gone in (
        (os.getpid(), None, 3600.0, False),
        (2**22 + 1, None, 0.0, True),
        (2**22 + 1, "another", 0.0, False),
        (2**22 + 1, "another", 3600.0, True),
    ):
        folder.write_info(info(pid, started_at=now, host=host))
        folder.write_result(Result(exit_code=69, reason="no store", ended_at=now - ago_s))
        assert Presence(folder).gone() == gone, (pid, host, ago_s)


class _Clock(SystemClock):
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_slurm_is_asked_rarely_and_believed_when_a_job_is_over(tmp_path: Path) -> None:
    """A reader asks Slurm every 30 s at most, and not while the job itself answers."""
    folder, asked, clock = write(tmp_path, with_one_recovery(), job="17", cluster="slurm"), [], _Clock()
    answers = [JobState.RUNNING, JobState.NODE_FAIL]

    def slurm(job_id: str) -> JobState:
        asked.append(job_id)
        return answers[len(asked) - 1]

    presence = Presence(folder, clock=clock, slurm=slurm)
    assert not presence.gone()
    clock.now = 20.0
    assert not presence.gone()
    presence.heard()
    clock.now = 40.0
    assert not presence.gone()
    assert asked == ["17"]
    clock.now = 51.0
    assert presence.gone()
    assert presence.ask().exit_code == 75


def test_a_reader_without_signs_of_slurm_and_the_job_gives_up(tmp_path: Path) -> None:
    """The bound counts from the first unanswered question; an answer of Slurm, or a sign of the job, resets it."""
    folder, clock = write(tmp_path, with_one_recovery(), job="17", cluster="slurm"), _Clock()
    answers: dict[float, JobState] = {60.0: JobState.RUNNING}
    presence = Presence(folder, clock=clock, slurm=lambda job_id: answers.get(clock.now), gives_up_s=120.0)

    def ask_at(*moments: float) -> None:
        for clock.now in moments:
            presence.ask()

    ask_at(0.0, 30.0, 60.0, 90.0, 120.0, 150.0, 180.0)
    presence.heard()
    ask_at(190.0, 210.0, 240.0, 270.0, 300.0)
    assert presence.ask().slurm_says == "RUNNING", "its last answer"
    clock.now = 330.0
    with pytest.raises(SlurmUnreachable):
        presence.ask()


def test_a_submitted_job_that_has_not_started_is_pending(tmp_path: Path) -> None:
    """A folder with only the job script belongs to a job in Slurm's queue; Slurm's state is shown."""
    folder = JobFolder(tmp_path / "17")
    folder.create()
    (folder.path / "job.sh").write_text("#!/bin/bash\n")
    assert find_job(tmp_path, "17").path == folder.path
    shot = snapshot.take(folder, slurm=lambda job_id: JobState.PENDING)
    assert (shot.state, shot.reason, shot.started_at) == ("pending", "PENDING in Slurm", None)
    cancelled = snapshot.take(folder, slurm=lambda job_id: JobState.CANCELLED)
    assert (cancelled.state, cancelled.exit_code) == ("cancelled", 143)


def test_the_json_object_is_the_same_for_every_job(tmp_path: Path) -> None:
    """Running, ended or pending, `status --json` has the same keys; times and numbers are JSON numbers."""
    pending = JobFolder(tmp_path / "p")
    pending.create()
    folders = [write(tmp_path, to_first_cycle(), job="a"), write(tmp_path, ended(), job="b"), pending]
    objects = [
        msgspec.json.decode(msgspec.json.encode(snapshot.as_status(snapshot.take(folder)))) for folder in folders
    ]
    assert {frozenset(each) for each in objects} == {frozenset(snapshot.Status.__struct_fields__)}
    running = objects[0]
    assert running["spares_left"] == ["n4", "n5"]
    assert running["replicas"][0]["waits_for"] == []
    assert running["nodes"][0]["ranks"] == [0, 1]
    assert isinstance(running["elapsed_s"], float)


@pytest.mark.parametrize(
    ("state", "later_s", "shown"),
    [
        (JobState.COMPLETING, 1.0, "COMPLETING"),
        (JobState.COMPLETED, 1.0, None),
        (JobState.UNKNOWN, 1.0, None),
        (None, 1.0, None),
        (JobState.COMPLETING, 3600.0, None),
    ],
)
def test_slurm_may_still_have_a_job_that_has_ended(tmp_path: Path, state, later_s, shown) -> None:
    """Slurm is asked only for a short time after the job's end."""
    folder, clock = write(tmp_path, ended(), job="17", cluster="slurm"), SystemClock()
    folder.write_result(Result(exit_code=0, reason="done", ended_at=clock.wall() - later_s))
    assert still_in_slurm(folder, clock=clock, slurm=lambda job_id: state) == shown
    shot = snapshot.take(folder, clock=clock, slurm=lambda job_id: state)
    assert (shot.state, shot.slurm_state) == ("completed", shown)
    assert any(row.cells[0] == "slurm" for row in page.facts(shot)) == (shown is not None)


@pytest.mark.parametrize(("cluster", "hosts"), [("slurm", ["elsewhere"]), ("local", [])])
def test_a_page_without_the_store_says_what_happens_to_the_job(tmp_path: Path, cluster: str, hosts) -> None:
    """Its batch host may be lost: a note says after which time Slurm is asked to requeue the job."""
    folder = write(tmp_path, to_first_cycle(), job="17", cluster=cluster)
    shot = snapshot.take(folder, live=False, slurm=lambda job_id: JobState.RUNNING)
    notes = [row.cells[1] for row in page.facts(dataclasses.replace(shot, store_error="the store is away"))]
    assert "the store is away; what follows is from the job folder" in notes
    assert [host for note in notes for host in ("elsewhere",) if host in note and "10m" in note] == hosts


def test_a_job_that_was_requeued_waits_in_the_queue_however_long(tmp_path: Path) -> None:
    """If it is cancelled there, it has ended, also after Slurm has forgotten it."""
    folder, clock = write(tmp_path, ended(), job="17", cluster="slurm"), SystemClock()
    folder.write_result(Result(exit_code=75, reason="preempted", ended_at=clock.wall() - DAY_S))
    shot = snapshot.take(folder, clock=clock, slurm=lambda job_id: JobState.PENDING)
    assert (shot.state, shot.exit_code, shot.slurm_state) == ("pending", None, "PENDING")
    cancelled = snapshot.take(folder, clock=clock, slurm=lambda job_id: JobState.CANCELLED)
    assert (cancelled.state, cancelled.exit_code) == ("cancelled", 143)
    assert cancelled.reason is not None and cancelled.reason.endswith("exit code 75: preempted")
    assert snapshot.take(folder, clock=clock, slurm=lambda job_id: None).state == "cancelled"


def test_a_job_cancelled_in_the_queue_stays_cancelled(tmp_path: Path) -> None:
    """A reader that saw it records it: it stays cancelled after Slurm has forgotten the job, or when Slurm does not
    answer. A later start of the job overrides it."""
    folder = JobFolder(tmp_path / "17")
    folder.create()
    folder.write("job.sh", b"#!/bin/bash\n")
    assert snapshot.take(folder, slurm=lambda job_id: JobState.PENDING).state == "pending"
    for state in (JobState.CANCELLED, JobState.UNKNOWN, None):
        shot = snapshot.take(folder, slurm=lambda job_id, state=state: state)
        assert (shot.state, shot.exit_code, shot.reason) == ("cancelled", 143, "CANCELLED in Slurm")
    requeued = snapshot.take(folder, slurm=lambda job_id: JobState.PENDING)
    assert requeued.state == "pending", "Slurm's own state counts"
    folder.remove_result()  # as the batch host does when it starts
    assert snapshot.take(folder, slurm=lambda job_id: JobState.UNKNOWN).exit_code is None


def test_the_page_of_a_pending_job_says_why(tmp_path: Path) -> None:
    """The page and the object have Slurm's reason."""
    folder = JobFolder(tmp_path / "17")
    folder.create()
    place = QueuePlace(job_id="17", reason="JobHeldUser", submitted_at=SystemClock().wall() - 60.0)
    outside = Presence(folder, slurm=lambda job_id: JobState.PENDING, queue=lambda job_id: place).ask()
    shot = snapshot.snap(new_view(), folder, outside=outside)
    assert snapshot.as_status(shot).queue == place
    assert any("JobHeldUser" in row.cells[1] for row in page.facts(shot))


@pytest.mark.parametrize(
    ("code", "slurm", "state", "exit_code"),
    [
        (75, JobState.COMPLETING, "stopping", None),
        (75, JobState.PENDING, "pending", None),
        (143, JobState.COMPLETING, "stopping", None),
        (143, JobState.CANCELLED, "cancelled", 143),
        (75, JobState.UNKNOWN, "lost", 75),
        (75, None, "lost", 75),
        (1, JobState.COMPLETING, "failed", 1),
    ],
)
def test_status_and_wait_agree_on_a_job_that_slurm_may_requeue(tmp_path: Path, code, slurm, state, exit_code) -> None:
    """A job with a result that Slurm may requeue has not ended until Slurm has removed it."""
    folder, clock = write(tmp_path, ended(), job="17", cluster="slurm"), SystemClock()
    folder.write_result(Result(exit_code=code, reason="because", ended_at=clock.wall()))
    shot = snapshot.take(folder, clock=clock, slurm=lambda job_id: slurm)
    assert (shot.state, shot.exit_code) == (state, exit_code)

    def ask() -> JobState:
        if slurm is None:
            raise SlurmUnreachable("no answer")
        return slurm

    assert EndWatch(folder, ask, clock).look() == exit_code


def test_a_requeued_job_that_begins_again_has_not_ended(tmp_path: Path) -> None:
    """Its batch host has removed the result of the earlier generation; its journal still ends with that generation's
    end."""
    recorder = ended()
    end = JobEnded(exit_code=75, reason="preempted")
    recorder.entries.append(Entry(n=len(recorder.entries) + 1, t=recorder.now, record=end))
    folder = write(tmp_path, recorder, job="17", cluster="slurm")
    shot = snapshot.take(folder, slurm=lambda job_id: JobState.RUNNING)
    assert (shot.state, shot.exit_code, shot.reason) == ("lost", 75, "done"), "it could not write a result"
    again = JobInfo(job_id="17", name="digits", cluster="slurm", generation=1, started_at=recorder.now)
    folder.write_info(again)
    shot = snapshot.take(folder, slurm=lambda job_id: JobState.RUNNING)
    assert (shot.state, shot.exit_code, shot.reason) == ("starting", None, "RUNNING in Slurm")
    shot = snapshot.take(folder, slurm=lambda job_id: JobState.CANCELLED)
    assert (shot.state, shot.exit_code) == ("cancelled", 143)


def test_a_job_array_is_what_slurm_and_its_tasks_say(tmp_path: Path) -> None:
    """The array has a folder, and no batch host. When Slurm has forgotten it, the results of its tasks decide its
    state."""
    array = JobFolder(tmp_path / "17")
    array.create()
    array.write("job.sh", b"#SBATCH --array=0-1\n")
    assert snapshot.take(array, slurm=lambda job_id: JobState.PENDING).state == "pending"
    first, second = (write(tmp_path, ended(), job=f"17_{number}") for number in (0, 1))
    assert snapshot.take(array, slurm=lambda job_id: JobState.RUNNING).state == "running"
    second.write_result(Result(exit_code=0, reason="done", ended_at=0.0))
    first.write_result(Result(exit_code=93, reason="budget", ended_at=0.0))
    shot = snapshot.take(array, slurm=lambda job_id: JobState.UNKNOWN)
    assert (shot.state, shot.exit_code) == ("stopped", 93)
    first.write_result(Result(exit_code=0, reason="done", ended_at=0.0))
    assert snapshot.take(array, slurm=lambda job_id: JobState.UNKNOWN).state == "completed"
    second.remove_result()
    assert snapshot.take(array, slurm=lambda job_id: JobState.UNKNOWN).exit_code is None


def test_a_job_of_slurms_without_a_folder_is_one_only_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job submitted with plain sbatch gets its folder when it starts; a running job without a folder is not of this
    tool."""
    monkeypatch.setattr(presence, "ask_queue", lambda job_ids: {})
    for state in (JobState.PENDING, JobState.CONFIGURING):
        monkeypatch.setattr(presence, "ask_slurm", lambda job_ids, state=state: dict.fromkeys(job_ids, state))
        assert take_with_tasks(tmp_path, "17").slurm_state == state
    for state in (JobState.RUNNING, JobState.COMPLETED, JobState.UNKNOWN):
        monkeypatch.setattr(presence, "ask_slurm", lambda job_ids, state=state: dict.fromkeys(job_ids, state))
        with pytest.raises(UsageError):
            take_with_tasks(tmp_path, "17")


def test_a_job_that_slurm_forgot_before_it_started_is_not_pending(tmp_path: Path) -> None:
    """It was cancelled in the queue and no reader saw it; a job that was just submitted may be unknown to Slurm
    yet."""
    folder = write(tmp_path, Recorder(plain_plan(), start=False), job="17", cluster="slurm")
    (folder.path / "job.json").unlink()
    clock = SystemClock()
    assert snapshot.take(folder, clock=clock, slurm=lambda job_id: JobState.UNKNOWN).state == "pending"
    an_hour_ago = clock.wall() - 3600.0
    os.utime(folder.plan_path, (an_hour_ago, an_hour_ago))
    assert snapshot.take(folder, clock=clock, slurm=lambda job_id: JobState.UNKNOWN).state == "died"
    assert snapshot.take(folder, clock=clock, slurm=lambda job_id: None).state == "pending", "no answer: pending"
