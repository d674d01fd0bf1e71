"""Jobs on this machine: real scripts under bash, observed by what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.cluster.local import HOST_LOG, LocalCluster, new_job_id
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result
from nvrx_slurm.util.clock import SystemClock
from tests.harness import wait_gone
from tests.still_clock import StillClock
from tests.waiting import until

BLOCKED = "exec sleep 300\n"
ANSWERS = 'read -r line <"$ASKED"; echo "$line" >"$ANSWERED"; exec sleep 300\n'
SUBMITS = f"""
import sys
from pathlib import Path
from nvrx_slurm.cluster.local import LocalCluster
folder = Path(sys.argv[1])
for script, detach in ({ANSWERS!r}, True), ({BLOCKED!r}, False):
    print(LocalCluster(folder).start(script, folder=folder, detach=detach)[1].pid)
"""
SUBMIT_ONE = """
import sys
from nvrx_slurm.cluster.local import LocalCluster
folder = pathlib.Path(sys.argv[1])
job_id, process = LocalCluster(folder).start("echo hello", folder=folder, detach=True)
(folder / "said").write_text(f"{job_id} {process.wait()}")
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[LocalCluster, JobFolder, subprocess.Popen[bytes]]]:
    """A detached job that does nothing; it is killed after the test."""
    cluster = LocalCluster(tmp_path)
    job_id, process = cluster.start(BLOCKED, folder=tmp_path, name="idle", detach=True)
    yield cluster, JobFolder(tmp_path / job_id), process
    process.kill()
    process.wait()


Started = tuple[LocalCluster, JobFolder, "subprocess.Popen[bytes]"]


def test_a_started_job_runs_and_its_folder_names_its_process(started: Started) -> None:
    """From the start `job.json` names the process to query and to cancel."""
    cluster, job, process = started
    info = job.read_info()
    assert info is not None
    assert (info.host_pid, info.cluster, info.name) == (process.pid, "local", "idle")
    assert cluster.states([job.job_id]) == {job.job_id: JobState.RUNNING}


def test_a_detached_job_has_its_own_session(started: Started) -> None:
    """The terminal's Ctrl-C does not reach it."""
    process = started[2]
    assert os.getsid(process.pid) == process.pid


def test_a_detached_job_outlives_its_submitter(tmp_path: Path) -> None:
    """The process that has submitted it ends, and the job runs on; a job that shares the terminal ends with it."""
    asked, answered = tmp_path / "asked", tmp_path / "answered"
    for fifo in (asked, answered):
        os.mkfifo(fifo)
    done = subprocess.run(
        [sys.executable, "-c", SUBMITS, tmp_path],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"ASKED": str(asked), "ANSWERED": str(answered)},
    )
    detached, attached = map(int, done.stdout.split())
    try:
        wait_gone([attached])
        # The process may exist while a signal that ends it is on its way. It answers only if there is none.
        with asked.open("rb+", buffering=0) as ask, answered.open("rb+", buffering=0) as answer:
            ask.write(b"well?\n")
            assert select.select([answer], [], [], 30.0)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(detached, signal.SIGKILL)


def test_a_daemon_without_standard_streams_starts_a_job(tmp_path: Path) -> None:
    """Neither the script nor the line that it waits for has the descriptor of one of the child's standard streams."""
    begin = f"import os, pathlib\nfor number in range(3):\n    os.close(number)\n{SUBMIT_ONE}"
    subprocess.run([sys.executable, "-c", begin, tmp_path], check=True)
    job_id, status = (tmp_path / "said").read_text().split()
    assert status == "0"
    assert (tmp_path / job_id / HOST_LOG).read_text() == "hello\n"


@pytest.mark.parametrize("cause", ["environment", "log"])
def test_a_start_that_fails_keeps_no_descriptor(tmp_path: Path, cause: str) -> None:
    """Either the environment is too long for execve, or the log cannot be opened, since a folder has its name."""
    cluster, job_id = LocalCluster(tmp_path), "local-1"
    if cause == "log":
        (tmp_path / job_id / HOST_LOG).mkdir(parents=True)
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match=r"Argument list too long|Is a directory"):
        cluster.start(
            BLOCKED,
            folder=tmp_path,
            job_id=job_id,
            detach=True,
            environment={"LONG": "x" * 200_000} if cause == "environment" else {},
        )
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_cancel_terminates_the_batch_host(started: Started) -> None:
    """SIGTERM goes to the script's own process, which exec keeps."""
    cluster, job, process = started
    _begin(job)
    cluster.cancel(job.job_id)
    assert process.wait(timeout=60) == -signal.SIGTERM
    cluster.cancel(job.job_id)


def test_a_job_that_is_cancelled_before_it_begins_is_cancelled(tmp_path: Path) -> None:
    """Its exit code is not that of a lost node, and what its `setup` has started is ended too."""
    cluster, pid = LocalCluster(tmp_path), tmp_path / "pid"
    job_id, process = cluster.start(f"sleep 300 & echo $! >{pid}; wait\n", folder=tmp_path, detach=True)
    until(lambda: pid.exists() and pid.read_text().endswith("\n"), "setup runs")
    cluster.cancel(job_id)
    process.wait(timeout=60)
    wait_gone([int(pid.read_text())])
    assert cluster.states([job_id]) == {job_id: JobState.CANCELLED}


def _begin(job: JobFolder) -> None:
    """Mark the job as begun, as a batch host does once it handles signals."""
    info = job.read_info()
    assert info is not None
    job.write_info(msgspec.structs.replace(info, addr="127.0.0.1"))


def test_a_batch_host_is_known_while_it_becomes_another_program(tmp_path: Path) -> None:
    """During an exec /proc shows no environment. This job only calls exec and ignores SIGTERM. It is a Python
    program, since bash does not ignore SIGTERM for a moment after its start."""
    again, ready = tmp_path / "again.py", tmp_path / "ready"
    again.write_text(f"import os, sys\nopen({str(ready)!r}, 'w').close()\nos.execv(sys.executable, sys.orig_argv)\n")
    cluster = LocalCluster(tmp_path)
    job_id, process = cluster.start(
        f"trap '' TERM; exec '{sys.executable}' -ISE '{again}'\n", folder=tmp_path, detach=True
    )
    try:
        until(ready.exists, "the job ignores SIGTERM")
        _begin(JobFolder(tmp_path / job_id))
        for _ in range(300):
            cluster.cancel(job_id)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_host_that_went_without_a_result_is_a_lost_node(started: Started) -> None:
    """The exit code is 75: nothing shows that the job itself is at fault."""
    cluster, job, process = started
    process.kill()
    process.wait()
    state = cluster.states([job.job_id])[job.job_id]
    assert (state, state.exit_code) == (JobState.NODE_FAIL, 75)


def test_a_zombie_counts_as_dead(started: Started) -> None:
    """The process that started it may never reap it."""
    _, job, process = started
    info = job.read_info()
    assert info is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{process.pid}/stat").exists()
    assert not info.host_lives()


def test_another_process_with_the_same_number_is_not_the_host() -> None:
    """This process is younger than the job."""
    long_ago = JobInfo(
        job_id="a",
        name="a",
        cluster="local",
        started_at=SystemClock().wall() - 86_400,
        host=socket.gethostname(),
        host_pid=os.getpid(),
    )
    assert not long_ago.host_lives()


@pytest.mark.parametrize(
    ("exit_code", "state"),
    [(0, "COMPLETED"), (124, "TIMEOUT"), (130, "CANCELLED"), (143, "CANCELLED"), (93, "FAILED")],
)
def test_a_job_with_a_result_stands_as_it_says_once_its_host_is_gone(
    started: Started, exit_code: int, state: str
) -> None:
    """While the host still runs, the state is COMPLETING, as in Slurm."""
    cluster, job, process = started
    job.write_result(Result(exit_code=exit_code, reason="", ended_at=0.0))
    assert cluster.states([job.job_id])[job.job_id] is JobState.COMPLETING
    process.kill()
    process.wait()
    assert cluster.states([job.job_id])[job.job_id] == state


def test_a_job_of_another_machine_is_unknown_and_cannot_be_cancelled(tmp_path: Path) -> None:
    """Its process number has no meaning on this machine."""
    job = JobFolder(tmp_path / "local-a")
    job.create()
    job.write_info(JobInfo(job_id="local-a", name="a", cluster="local", started_at=0.0, host="far", host_pid=1))
    cluster = LocalCluster(tmp_path)
    assert cluster.states(["local-a"])["local-a"] is JobState.UNKNOWN
    with pytest.raises(UsageError, match="runs on far"):
        cluster.cancel("local-a")


def test_an_unknown_job_is_unknown_and_cannot_be_cancelled(tmp_path: Path) -> None:
    """A job without a folder is not known."""
    cluster = LocalCluster(tmp_path)
    assert cluster.states(["local-b"])["local-b"] is JobState.UNKNOWN
    with pytest.raises(UsageError, match="no local job"):
        cluster.cancel("local-b")


def test_the_script_gets_its_id_and_its_output_is_kept(tmp_path: Path) -> None:
    """What the script prints before the job folder's log exists is not lost; the script's standard input is empty."""
    script = 'echo "id $NVRX_JOB_ID extra $EXTRA"\ncat\n'
    cluster = LocalCluster(tmp_path)
    job_id, process = cluster.start(script, folder=tmp_path, detach=True, environment={"EXTRA": "a b"})
    assert process.wait(timeout=60) == 0
    assert (tmp_path / job_id / "host.log").read_text() == f"id {job_id} extra a b\n"
    assert (tmp_path / job_id / "job.sh").read_text() == script


def test_an_attached_job_has_a_session_of_its_own(tmp_path: Path) -> None:
    """It gets only the keyboard's signals that its starter passes on: none reaches an interpreter that is still
    starting."""
    cluster = LocalCluster(tmp_path)
    job_id, process = cluster.start(BLOCKED, folder=tmp_path, job_id="local-mine", detach=False)
    try:
        assert job_id == "local-mine"
        assert os.getsid(process.pid) == process.pid
    finally:
        process.kill()
        process.wait()


def test_a_job_whose_starter_dies_before_it_is_named_never_runs(tmp_path: Path) -> None:
    """The gate opens only after `job.json` is written; if its writer closes it before, the script never runs."""
    from nvrx_slurm.cluster import local

    job = JobFolder(tmp_path / "local-c")
    local._write_script(job, f"touch {tmp_path}/ran\n")
    gate, process = local._start_waiting(job, True, {})
    os.close(gate)
    assert process.wait(timeout=60) != 0
    assert not (tmp_path / "ran").exists()


def test_submit_returns_the_id_of_a_job_that_runs(tmp_path: Path) -> None:
    """`submit` is the port's own method; it creates a folder that is missing."""
    fifo = tmp_path / "done"
    os.mkfifo(fifo)
    cluster = LocalCluster(tmp_path / "new" / "jobs")
    job_id = cluster.submit(f"echo here > {fifo}\n", folder=tmp_path / "new" / "jobs", name="a")
    reader = threading.Thread(target=fifo.read_text, daemon=True)
    reader.start()
    reader.join(timeout=60)
    assert not reader.is_alive()
    assert (tmp_path / "new" / "jobs" / job_id / "job.json").is_file()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    """A file is in the place of the base folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--folder"):
        LocalCluster(tmp_path / "file").submit("true\n", folder=tmp_path / "file", name="a")


def test_ids_sort_by_time_and_differ() -> None:
    """Two jobs of one second have different folders."""
    clock = StillClock(1790000000.0)
    ids = [new_job_id(clock) for _ in range(3)]
    assert len(set(ids)) == 3
    clock.sleep(86400.0)
    assert new_job_id(clock) > max(ids)
    assert all(re.fullmatch(r"local-\d{8}-\d{6}-[0-9a-f]{4}", job_id) for job_id in ids)


def test_the_nodes_of_a_job_are_those_its_host_wrote_down(tmp_path: Path) -> None:
    """They come in the order in which the host lists them."""
    job = JobFolder(tmp_path / "local-d")
    job.create()
    info = JobInfo(
        job_id="local-d", name="d", cluster="local", started_at=0.0, host=socket.gethostname(), nodes=("n2", "n1")
    )
    job.write_info(info)
    assert LocalCluster(tmp_path).nodes("local-d") == ("n2", "n1")
    assert LocalCluster(tmp_path).nodes("local-e") == ()
