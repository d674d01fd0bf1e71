"""Waiting for a job's end, with a clock that advances only in waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest
import submitit

from nvrx_slurm.cluster.ending import LOST_AFTER_S, NOT_BEGUN_S, RESULT_GRACE_S, EndWatch
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.cluster.watcher import StateWatcher
from nvrx_slurm.errors import BatchHostLost, NvrxError, SlurmUnreachable, UsageError, WaitTimeout
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result
from tests.still_clock import StillClock
from tests.unit.cluster.waiting_clock import WaitingClock


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    folder = JobFolder(tmp_path / "7")
    folder.create()
    return folder


def in_turn(answers: Iterable[JobState | Exception]) -> Callable[[], JobState]:
    """Gives the answers one after the other, and the last one for ever."""
    left = list(answers)

    def ask() -> JobState:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def follow(watch: EndWatch, clock: WaitingClock) -> int:
    while (code := watch.look()) is None:
        clock.sleep(watch.pause_s())
    return code


def test_the_result_is_the_exit_code_in_any_state_of_slurms(job: JobFolder) -> None:
    """Slurm's own exit code is not used: Slurm turns 93 into 143."""
    clock = WaitingClock()
    job.write_result(Result(exit_code=93, reason="", ended_at=0.0))
    assert follow(EndWatch(job, in_turn([JobState.RUNNING]), clock), clock) == 93
    assert clock.slept == []


def test_an_array_ends_as_its_first_task_that_failed(job: JobFolder) -> None:
    """This is so while Slurm still has other tasks. A result may appear later than its task's end; without a
    result Slurm's state counts."""
    results = {"7_0": 0, "7_2": 93, "7_11": 124}
    for name in (*results, "7_3"):
        task = JobFolder(job.path.parent / name)
        task.create()
        task.write("job.json", b"{}")
        if name in results:
            task.write_result(Result(exit_code=results[name], reason="", ended_at=0.0))
    clock = WaitingClock()
    assert follow(EndWatch(job, in_turn([JobState.RUNNING, JobState.COMPLETED]), clock), clock) == 93
    assert sum(clock.slept) >= RESULT_GRACE_S, "7_3 has no result yet"
    for name in results:
        JobFolder(job.path.parent / name).write_result(Result(exit_code=0, reason="", ended_at=0.0))
    assert follow(EndWatch(job, in_turn([JobState.OUT_OF_MEMORY]), clock), clock) == JobState.OUT_OF_MEMORY.exit_code


def test_an_array_that_slurm_has_forgotten_ends_as_its_tasks_did(job: JobFolder) -> None:
    """Slurm forgets the array where there is no accounting."""
    task = JobFolder(job.path.parent / "7_0")
    task.create()
    task.write("job.json", b"{}")
    task.write_result(Result(exit_code=0, reason="", ended_at=0.0))
    clock = WaitingClock()
    assert follow(EndWatch(job, in_turn([JobState.UNKNOWN]), clock), clock) == 0


@pytest.mark.parametrize("code", [69, 75, 143])
def test_the_result_of_a_generation_that_slurm_requeues_is_not_the_jobs(job: JobFolder, code: int) -> None:
    """A preempted job leaves a result, waits in the queue, and runs again: its last result counts."""
    clock = WaitingClock()
    job.write_result(Result(exit_code=code, reason="cancelled", ended_at=0.0))
    states = iter([JobState.COMPLETING, JobState.PENDING, JobState.RUNNING])

    def ask() -> JobState:
        if (state := next(states, None)) is None:
            job.write_result(Result(exit_code=0, reason="done", ended_at=1.0))
            return JobState.RUNNING
        return state

    assert follow(EndWatch(job, ask, clock), clock) == 0


@pytest.mark.parametrize("last", [JobState.CANCELLED, JobState.UNKNOWN, SlurmUnreachable("away")])
def test_the_result_of_a_cancelled_job_counts_once_slurm_is_done(job: JobFolder, last: JobState | Exception) -> None:
    """It counts too if Slurm has forgotten the job, or does not answer."""
    clock = WaitingClock()
    job.write_result(Result(exit_code=143, reason="cancelled", ended_at=0.0))
    assert follow(EndWatch(job, in_turn([JobState.COMPLETING, last]), clock), clock) == 143


@pytest.mark.parametrize(("code", "ends_with"), [(75, 143), (69, 143), (143, 143), (1, 1)])
def test_a_job_that_is_cancelled_after_its_requeue_was_cancelled(job: JobFolder, code: int, ends_with: int) -> None:
    """Its last result is that of a generation, and says why Slurm requeued it. The exit code stays the same once
    Slurm has forgotten the job."""
    clock = WaitingClock()
    job.write_result(Result(exit_code=code, reason="preempted", ended_at=0.0))
    asked = in_turn([JobState.PENDING, JobState.CANCELLED])
    assert follow(EndWatch(job, asked, clock), clock) == ends_with
    assert follow(EndWatch(job, in_turn([JobState.UNKNOWN]), clock), clock) == ends_with
    job.remove_result()
    assert job.read_slurm_end() is None, "it does not count once the job has started again"


def test_a_result_that_is_written_during_the_last_question_is_not_missed(job: JobFolder) -> None:
    """The job may end between the look at its folder and the answer of the cluster."""
    clock = WaitingClock()

    def ask() -> JobState:
        job.write_result(Result(exit_code=124, reason="", ended_at=0.0))
        return JobState.FAILED

    assert follow(EndWatch(job, ask, clock), clock) == 124


@pytest.mark.parametrize("state", [state for state in JobState if state.terminal])
def test_without_a_result_the_state_gives_the_exit_code(job: JobFolder, state: JobState) -> None:
    """A job that never started leaves no result."""
    clock = WaitingClock()
    asked = in_turn([JobState.PENDING, JobState.RUNNING, state])
    assert follow(EndWatch(job, asked, clock), clock) == state.exit_code


def test_the_result_of_a_job_that_ran_is_waited_for_a_little(job: JobFolder) -> None:
    """On a shared file system the result may appear after Slurm's own state; the wait for it has a bound."""
    clock = WaitingClock()
    job.write_info(JobInfo(job_id="7", name="a", cluster="slurm", started_at=0.0))
    assert follow(EndWatch(job, in_turn([JobState.COMPLETED]), clock), clock) == 0
    assert RESULT_GRACE_S <= clock.monotonic() < RESULT_GRACE_S + 2


def test_the_pauses_grow_and_are_bounded(job: JobFolder) -> None:
    """The end of a short job is noticed quickly, and a long job costs few queries."""
    clock = WaitingClock()
    follow(EndWatch(job, in_turn([JobState.RUNNING] * 30 + [JobState.CANCELLED]), clock), clock)
    assert clock.slept == sorted(clock.slept)
    assert (clock.slept[0], clock.slept[-1]) == (0.1, 1.0)


def test_a_wait_ends_at_its_bound_and_says_what_it_waited_for(job: JobFolder) -> None:
    """The exit code is 124, and the message has the job's state."""
    clock = WaitingClock()
    with pytest.raises(WaitTimeout, match=r"job 7 has not ended within 2\.5 s: it is RUNNING") as caught:
        follow(EndWatch(job, in_turn([JobState.RUNNING]), clock, timeout_s=2.5), clock)
    assert caught.value.exit_code == 124
    assert clock.monotonic() == pytest.approx(2.5)


def test_a_slurm_that_does_not_answer_ends_no_wait(job: JobFolder, caplog: pytest.LogCaptureFixture) -> None:
    """The failure is logged once; the job goes on, and so does the wait."""
    clock = WaitingClock()
    away = SlurmUnreachable("nobody there")
    asked = in_turn([JobState.RUNNING, away, away, away, JobState.TIMEOUT])
    assert follow(EndWatch(job, asked, clock), clock) == 124
    assert caplog.text.count("nobody there") == 1


def test_a_job_that_is_not_known_any_more_is_given_up_with_an_error(job: JobFolder) -> None:
    """A job that is absent has not ended, but the wait for it has a bound."""
    clock = WaitingClock()
    with pytest.raises(NvrxError, match="job 7"):
        follow(EndWatch(job, in_turn([JobState.UNKNOWN]), clock), clock)
    assert clock.monotonic() > LOST_AFTER_S


def test_each_change_of_state_is_reported_once(job: JobFolder) -> None:
    """A user who waits sees each change."""
    clock, told = WaitingClock(), list[JobState]()
    states = [JobState.PENDING, JobState.PENDING, JobState.RUNNING, JobState.RUNNING, JobState.CANCELLED]
    follow(EndWatch(job, in_turn(states), clock, on_state=told.append), clock)
    assert told == [JobState.PENDING, JobState.RUNNING, JobState.CANCELLED]


class Ledger:
    """A cluster that answers from a dict and records the queries."""

    def __init__(self, states: dict[str, JobState]) -> None:
        self.states_now, self.asked = states, list[list[str]]()

    def states(self, job_ids: list[str]) -> dict[str, JobState]:
        self.asked.append(list(job_ids))
        return {job_id: self.states_now[job_id] for job_id in job_ids}


def test_the_handles_of_a_process_share_one_question() -> None:
    """The watcher asks about all registered jobs at once, and not again about those that have ended."""
    ledger = Ledger({"1": JobState.RUNNING, "2": JobState.PREEMPTED})
    watcher = StateWatcher(ledger)  # type: ignore[arg-type]
    for job_id in ("1", "2"):
        watcher.register_job(job_id)
    assert watcher.state("2") is JobState.PREEMPTED
    assert watcher.state("1") is JobState.RUNNING
    assert ledger.asked == [["1", "2"]]
    watcher.state("1", mode="cache")
    watcher.update()
    assert ledger.asked == [["1", "2"], ["1"]]


def test_a_local_job_of_another_machine_is_waited_for_there(job: JobFolder) -> None:
    """The message names the job's machine, since Slurm never knew the job; nor has its workload failed."""
    job.write_info(JobInfo(job_id="7", name="t", cluster="local", started_at=0.0, host="elsewhere"))
    clock = WaitingClock()
    watch = EndWatch(job, lambda: JobState.UNKNOWN, clock)
    assert watch.look() is None
    clock.sleep(LOST_AFTER_S + 1)
    with pytest.raises(UsageError, match="elsewhere"):
        watch.look()


def test_a_thread_may_register_a_job_while_another_asks() -> None:
    """The waits of an event loop send queries from threads (`AwaitableJob`)."""
    watcher = StateWatcher(Ledger({str(n): JobState.RUNNING for n in range(9)}))  # type: ignore[arg-type]
    for n in range(8):
        watcher.register_job(str(n))

    class Registers(dict[str, JobState]):
        def get(self, job_id: str, default: JobState) -> JobState:  # type: ignore[override]
            watcher._registered.add("8")  # as another thread may do in between
            return super().get(job_id, default)

    watcher._states = Registers()
    for _ in range(2):
        watcher.update()
    assert watcher.state("8", mode="cache") is JobState.RUNNING


def test_a_jobs_own_submitit_handle_asks_this_watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted job has ended; submitit itself would wait for it for ever."""
    watcher = StateWatcher(Ledger({"1": JobState.PREEMPTED, "2": JobState.REQUEUED}))  # type: ignore[arg-type]
    monkeypatch.setattr(submitit.SlurmJob, "watcher", watcher)
    preempted, requeued = (submitit.SlurmJob[None](tmp_path, job_id) for job_id in ("1", "2"))
    assert (preempted.state, requeued.state) == ("PREEMPTED", "REQUEUED")
    assert preempted.get_info(mode="cache") == {"JobID": "1", "State": "PREEMPTED"}
    assert preempted.done()
    assert not requeued.done()


def test_slurm_is_asked_more_rarely_as_time_passes() -> None:
    """The first query is sent at once, the next after 2 s, and later ones after half the time since the newest job,
    at most 10 s."""
    clock, ledger, asked_at = StillClock(0.0), Ledger({"1": JobState.RUNNING}), list[float]()
    watcher = StateWatcher(ledger, clock=clock)  # type: ignore[arg-type]
    while clock.now < 60:
        before = watcher.num_calls
        watcher.state("1")
        asked_at += [clock.now] * (watcher.num_calls - before)
        clock.sleep(0.5)
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert pauses[0] == 2.5  # the first look after 2 s
    assert pauses == sorted(pauses)
    assert pauses[-1] == 10.5


def test_a_job_whose_batch_host_was_lost_before_it_began_is_not_waited_for(job: JobFolder) -> None:
    """Slurm shows the job as RUNNING until its time limit. The batch host is checked seldom, and not at all once an
    agent of this generation has begun: that agent has the job requeued."""
    clock, asked = WaitingClock(), list[float]()

    def lost() -> str | None:
        asked.append(clock.monotonic())
        return "n1" if len(asked) == 3 else None

    def later_generation(node: str, *, agent_at: float) -> None:
        """The batch host began at 1000 s; the node's log was written last at `agent_at`."""
        info = JobInfo(job_id="7", name="t", cluster="slurm", generation=1, started_at=1000.0, nodes=(node,))
        job.write_info(info)
        job.node_log(node).parent.mkdir(exist_ok=True)
        job.node_log(node).touch()
        os.utime(job.node_log(node), (agent_at, agent_at))

    began = clock.monotonic()
    watch = EndWatch(job, in_turn([JobState.PENDING, JobState.RUNNING]), clock, lost_batch_host=lost)
    with pytest.raises(BatchHostLost, match="n1"):
        follow(watch, clock)
    assert len(asked) == 3
    assert 3 * NOT_BEGUN_S <= clock.monotonic() - began < 3 * NOT_BEGUN_S + 10.0
    asked.clear()
    later_generation("n2", agent_at=700.0)  # of the generation before
    with pytest.raises(BatchHostLost, match="n1"):
        follow(EndWatch(job, in_turn([JobState.RUNNING]), clock, lost_batch_host=lost), clock)
    later_generation("n2", agent_at=1001.0)
    with pytest.raises(WaitTimeout):
        follow(EndWatch(job, in_turn([JobState.RUNNING]), clock, timeout_s=900.0, lost_batch_host=lost), clock)
    assert len(asked) == 3
