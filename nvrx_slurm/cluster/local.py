"""This machine as a cluster: the same job script under bash, without Slurm, and nodes that are processes.

The state of a local job follows from its folder: `result.json` once it has ended, else whether the batch host that
`job.json` names still lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from nvrx_slurm.cluster.base import LOCAL_PREFIX, SCRIPT_NAME, folder_name, not_writable, prepare_folder
from nvrx_slurm.cluster.states import JobState, state_of_result
from nvrx_slurm.errors import EXIT_TERMINATED, MissingProgramError, UsageError
from nvrx_slurm.jobspec.env import child_environment, handed_on
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result
from nvrx_slurm.journal.job_index import record_job
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.files import open_log
from nvrx_slurm.util.ids import new_incarnation
from nvrx_slurm.util.ownership import open_owned
from nvrx_slurm.util.processes import boot_id, dies_with_parent, environment_of, hold, send, started_ticks

# What a detached job's own script prints; Slurm keeps the same in its `--output` file.
HOST_LOG = "host.log"

# How long a process may be without an environment, because it is about to run another program.
EXEC_S, EXEC_LOOK_S = 2.0, 0.01

# bash waits for one line before it becomes the job, so that `job.json` names the process before the job can run,
# and a job whose starter dies in between never starts. exec keeps the pid: signals reach the batch host itself.
# bash gets the script as a descriptor: another file may have its name by the time that bash starts it.
_WAITING = 'read -r && exec bash -- "$1" </dev/null'

_job_info = msgspec.json.Decoder(JobInfo).decode

# Held until they end, so that none stays a zombie while this process lives.
_detached: list[subprocess.Popen[bytes]] = []


class LocalCluster:
    """Jobs of one base folder, on this machine."""

    def __init__(self, folder: Path, *, clock: Clock | None = None) -> None:
        self._base = folder
        self._clock = clock or SystemClock()

    def submit(self, script: str, *, folder: Path, name: str) -> str:
        """See `Cluster.submit`: the job runs on when this process has ended."""
        job_id, process = self.start(script, folder=folder, name=name, detach=True)
        _detached.append(process)
        return job_id

    def start(
        self,
        script: str,
        *,
        folder: Path,
        name: str = "",
        job_id: str | None = None,
        detach: bool,
        environment: Mapping[str, str] | None = None,
        allocation: tuple[str, tuple[str, ...]] | None = None,
    ) -> tuple[str, subprocess.Popen[bytes]]:
        """Run the script under bash. Returns the job's id and its batch host's process.

        It has a session of its own: of the keyboard's signals it gets what its starter passes on. Detached, it prints
        into the job folder; else into this terminal, and it ends when this process does. The script finds its id in
        NVRX_JOB_ID. `allocation`: the job of Slurm's in which its agents will run, and on which nodes.
        Raises UsageError, MissingProgramError.
        """
        job_id = job_id or new_job_id(self._clock)
        job = JobFolder(folder / folder_name(job_id))
        _write_script(job, script)
        go, process = _start_waiting(job, detach, environment or {})
        with os.fdopen(go, "wb", buffering=0) as opened:
            job.write_info(
                JobInfo(
                    job_id=job_id,
                    name=name,
                    cluster="slurm" if allocation else "local",
                    allocation=allocation[0] if allocation else None,
                    nodes=allocation[1] if allocation else (),
                    started_at=self._clock.wall(),
                    host=socket.gethostname(),
                    host_pid=process.pid,
                    host_began=started_ticks(process.pid),
                    host_boot=boot_id(),
                )
            )
            opened.write(b"\n")
        record_job(job.path)
        return job_id, process

    def states(self, job_ids: Sequence[str]) -> Mapping[str, JobState]:
        """See `Cluster.states`."""
        # poll() reaps those that have ended.
        _detached[:] = [process for process in _detached if process.poll() is None]
        return {job_id: _state(self._job(job_id)) for job_id in job_ids}

    def cancel(self, job_id: str) -> None:
        """See `Cluster.cancel`: SIGTERM to the batch host; one that has not begun yet is killed. Raises UsageError,
        also for a job of another machine, and where the process that `job.json` names is not proven to be this job's.
        """
        path = self._job(job_id).path / "job.json"
        info = _read_own(path)
        if info is None:
            raise UsageError(f"no local job {job_id} in {self._base}")
        if info.job_id != job_id:
            raise UsageError(f"{path}: describes another job ({info.job_id!r}); nothing was cancelled")
        if not info.is_here:
            whole = f", or end its whole allocation: scancel {info.allocation}" if info.allocation else ""
            raise UsageError(f"{job_id} runs on {info.host}: cancel it there{whole}")
        # The process is held by a descriptor before it is looked at: between the look and the signal its number
        # cannot pass to another process.
        # For kill(2) a number of 0 or less names a group of processes.
        if info.host_pid <= 0:
            return
        try:
            held = hold(info.host_pid)
        except ProcessLookupError:
            return
        try:
            # Ahead of the look whether it lives: this may take a while, and a job that ends meanwhile is no stranger.
            problem = self._stranger(info)
            if not info.host_lives():
                return
            if problem:
                raise UsageError(f"{path}: names process {info.host_pid}, which {problem}; it was not signalled")
            with contextlib.suppress(ProcessLookupError):
                if (_read_own(path) or info).addr:  # it may have begun during the look
                    send(held, info.host_pid, signal.SIGTERM)
                else:
                    self._end_before_it_begins(info)
        finally:
            if held is not None:
                os.close(held)

    def _end_before_it_begins(self, info: JobInfo) -> None:
        """The batch host names its address once signals end it in good order. Before, lines of `setup` may run, and
        nothing of the job itself does: they are killed, and the result is written here."""
        os.killpg(info.host_pid, signal.SIGKILL)  # it leads a session of its own
        job, reason = self._job(info.job_id), "cancelled before it began"
        if job.read_result() is None:
            job.write_result(Result(exit_code=EXIT_TERMINATED, reason=reason, ended_at=self._clock.wall()))

    def nodes(self, job_id: str) -> tuple[str, ...]:
        """See `Cluster.nodes`."""
        info = self._job(job_id).read_info()
        return info.nodes if info else ()

    def _stranger(self, info: JobInfo) -> str:
        """Why a process is not this job's batch host; empty if it is. Only its user can have set the variable."""
        try:
            if Path(f"/proc/{info.host_pid}").stat().st_uid != os.geteuid():
                return "belongs to another user"
        except FileNotFoundError:
            return "has ended"
        until = self._clock.monotonic() + EXEC_S
        # In the middle of an exec a process has no environment yet, and bash becomes the batch host by one.
        while not (environment := environment_of(info.host_pid)) and info.host_lives():
            if self._clock.monotonic() > until:
                break
            self._clock.sleep(EXEC_LOOK_S)
        return "" if environment.get("NVRX_JOB_ID") == info.job_id else "does not run this job"

    def _job(self, job_id: str) -> JobFolder:
        """Raises UsageError for what is no job id."""
        return JobFolder(self._base / folder_name(job_id))


def new_job_id(clock: Clock) -> str:
    """`local-20261121-093012-4f2a`: sorts by time, and no two are alike."""
    return f"{LOCAL_PREFIX}{datetime.fromtimestamp(clock.wall()):%Y%m%d-%H%M%S}-{new_incarnation()[:4]}"


def _state(job: JobFolder) -> JobState:
    """As Slurm has it, a job is COMPLETING while its result is there and its processes are not gone yet.

    A host that went without leaving a result is a lost node.
    """
    info = job.read_info()
    lives = info is not None and info.host_lives()
    # After the look at the batch host, which writes the result as its last act: one that has gone in between has left
    # it by now.
    result = job.read_result()
    if result is not None:
        return JobState.COMPLETING if lives else state_of_result(result.exit_code)
    if info is not None and info.allocation is not None and not info.is_here:
        from nvrx_slurm.cluster.slurm import SlurmCluster

        state = SlurmCluster(patience_s=0).states([info.allocation])[info.allocation]
        return JobState.NODE_FAIL if state.terminal else state  # it cannot have outlived the allocation
    if info is None or not info.is_here:
        return JobState.UNKNOWN
    return JobState.RUNNING if lives else JobState.NODE_FAIL


def _read_own(path: Path) -> JobInfo | None:
    """A job.json that this user wrote; None if there is none. Raises UsageError for another user's: it may name any
    process."""
    try:
        # Another user may have put a link there, or a pipe, whose opening would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    with os.fdopen(descriptor, "rb") as file:
        owner = os.fstat(descriptor).st_uid
        if owner != os.geteuid():
            raise UsageError(
                f"{path}: belongs to user {owner}, not to you; a job is cancelled by the user who runs it"
            )
        return decode(_job_info, file.read(), str(path))


def _write_script(job: JobFolder, script: str) -> None:
    prepare_folder(job.path.parent)
    try:
        job.create()
        job.write(SCRIPT_NAME, script.encode())
    except OSError as error:
        raise not_writable(job.path, error) from error


def _start_waiting(
    job: JobFolder, detach: bool, environment: Mapping[str, str]
) -> tuple[int, subprocess.Popen[bytes]]:
    """The process, and the descriptor to which the line that it waits for is written."""
    with contextlib.ExitStack() as opened:
        # Where this process has closed its standard streams: the child's take the place of what has their numbers.
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            opened.callback(os.close, number)
        os.close(number)
        with job.opened() as folder:
            script = open_owned(job.path / SCRIPT_NAME, dir_fd=folder)
        opened.callback(os.close, script)
        reading, go = os.pipe()
        opened.callback(os.close, reading)
        opened.callback(os.close, go)
        log = open_log(job.path / HOST_LOG) if detach else None
        if log is not None:
            opened.callback(os.close, log)
        variables, descriptors = opened.enter_context(handed_on())
        try:
            process = subprocess.Popen(
                ["bash", "-c", _WAITING, "nvrx-job", f"/proc/self/fd/{script}"],
                env=child_environment({**environment, **variables, "NVRX_JOB_ID": job.job_id}),
                stdin=reading,
                stdout=log,
                stderr=log,
                pass_fds=[script, *descriptors],
                start_new_session=True,
                preexec_fn=None if detach else dies_with_parent(signal.SIGTERM),
            )
        except FileNotFoundError:
            raise MissingProgramError("bash is not on PATH, and job scripts need it") from None
        return os.dup(go), process
