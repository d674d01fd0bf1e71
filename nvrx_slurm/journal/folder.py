"""The job folder: one place on the shared file system for all that a job leaves behind.

<base>/<job id>/           0700
  plan.json                what runs (jobspec.plan.Plan)
  origins.json             each key of job.yaml, its value, and where that came from
  job.json                 how it was submitted: name, cluster, generation, times (JobInfo)
  cluster                  the cluster of Slurm's that runs it, if `submit` sent it to another one than its own
  store.json         0600  where the store is while the job runs, and its password
  attrsvc.json       0600  where the job's own attribution service is while it runs, and its token
  store/                   the embedded store's append-only file
  job.log                  every rank's output, prefixed, and what the job itself has to say
  events.jsonl             the journal, mirrored from the store (older parts: events.1.jsonl, …)
  result.json              how it ended (.reserve: the space for it, which even a full disk has)
  slurm.json               how it ended as Slurm said, where the job left no result: Slurm soon forgets it
  logs/<replica>/gen-<g>/cycle-<c>/
    rank-<r>.out, .err     what each rank has printed
    .times/rank-<r>.out    when, to ten seconds; of output that went on for longer than that
    stacks/rank-<r>.txt    what it was doing when it was asked
    health/<node>.txt      what each node said about itself when it failed
  nodes/<node>.log         what each agent did
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from nvrx_slurm.errors import (
    EXIT_RETRY,
    EXIT_TERMINATED,
    EXIT_UNREACHABLE,
    ConfigError,
    MalformedRecord,
    UsageError,
)
from nvrx_slurm.jobspec.plan import Plan, plan_from_json, plan_to_json
from nvrx_slurm.journal.records import Record
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import ORIGINS, JobFiles
from nvrx_slurm.util.processes import boot_id, is_alive, started_ticks

_T = TypeVar("_T")
LOOPBACK = "127.0.0.1"

# How far a node's clock, or the file system's, may be behind that of the batch host.
CLOCKS_DIFFER_S = 60.0


class JobInfo(Record, frozen=True, kw_only=True):
    """How the job was started. `cluster`: `slurm` or `local`. `allocation`: the job of Slurm's in whose allocation it
    runs, where that is the user's, and not made for this job. `host` and `host_pid`: where the batch host runs;
    `host_began` and `host_boot`: when that process began, in ticks, and since which boot; a later process of the same
    number differs there (None: an older version wrote this file). `addr`: the address at which other nodes reach it;
    `kill_wait_s`: Slurm's KillWait, which a job that is cancelled or preempted has from SIGTERM to SIGKILL (None:
    there is no Slurm, or it did not say); `left_in_grace`: this or an earlier generation left in the GraceTime of a
    preemption, and asked Slurm to requeue the job."""

    job_id: str
    name: str
    cluster: str
    generation: int = 0
    started_at: float
    host: str = ""
    addr: str = ""
    host_pid: int = 0
    host_began: int | None = None
    host_boot: str = ""
    nodes: tuple[str, ...] = ()  # the allocation, in Slurm's order
    kill_wait_s: float | None = None
    suspects: tuple[str, ...] = ()  # nodes of the allocation that other jobs' evidence blames
    left_in_grace: bool = False
    allocation: str | None = None

    @property
    def slurm_id(self) -> str:
        """What Slurm calls the job that holds the nodes."""
        return self.allocation or self.job_id

    @property
    def bind(self) -> str:
        """Where the job's servers listen: on loopback alone, unless other hosts must reach them."""
        return self.addr if self.addr == LOOPBACK else "*"

    @property
    def is_here(self) -> bool:
        """Whether the batch host runs on this machine."""
        return self.host == socket.gethostname()

    def host_lives(self) -> bool:
        """Whether the batch host's process runs, on this machine."""
        if not self.is_here:
            return False
        if self.host_began is None:
            return is_alive(self.host_pid, started_before=self.started_at)
        is_same = self.host_boot == boot_id() and started_ticks(self.host_pid) == self.host_began
        return is_same and is_alive(self.host_pid)


class StoreAddress(Record, frozen=True, kw_only=True):
    """Where the store listens, how to authenticate, and the job's name in its keys. `token` proves
    both ends of a liveness connection.

    `embedded`: the batch host started this server for this job alone. Its configuration may be changed; a site's own
    server, which other jobs use too, keeps its own.

    An embedded server gets a new port (or socket), a new password and a new `mark` at each start, and this file is
    replaced. `certificate`: the one certificate (PEM) that a server at a `rediss://` URL may show. `mark`: what a
    server at a `redis://` URL must answer once the client has logged in (`store/link.py`).
    """

    url: str
    password: str | None = None
    job: str
    token: str
    embedded: bool = False
    certificate: str | None = None
    mark: str | None = None


class Result(Record, frozen=True, kw_only=True):
    """How the job ended; written once, before the store stops."""

    exit_code: int
    reason: str
    ended_at: float


class SlurmEnd(Record, frozen=True, kw_only=True):
    """What Slurm said of a job that is over, where the job itself did not: it was cancelled in the queue, before it
    began or after a requeue, or its batch host was lost. Written by the first reader that sees it. `state`: Slurm's
    word."""

    state: str
    seen_at: float


class JobFolder(JobFiles):
    """The records of one job's folder, read and written atomically: a reader sees an old file or a new one."""

    def write_plan(self, plan: Plan) -> None:
        self.write_plan_json(plan_to_json(plan))

    def read_plan(self, digest: str | None = None) -> Plan:
        """The plan; see `JobFiles.read_plan_json`. Raises what that does, and ConfigError."""
        return self._decoded("plan.json", plan_from_json, self.read_plan_json(digest))

    def read_origins(self) -> dict[str, tuple[str, str]] | None:
        """Key of job.yaml → its value in JSON, and where that came from; None: the submission has not recorded it."""
        return self._read(ORIGINS, dict[str, tuple[str, str]])

    def write_origins(self, origins: dict[str, tuple[str, str]]) -> None:
        """As `Loaded.origins` has them. Raises OSError, UnsafePath."""
        self.write(ORIGINS, msgspec.json.encode(origins))

    def write_info(self, info: JobInfo) -> None:
        self.write("job.json", msgspec.json.encode(info))

    def read_info(self) -> JobInfo | None:
        return self._read("job.json", JobInfo)

    def write_store(self, address: StoreAddress) -> None:
        self.write("store.json", msgspec.json.encode(address))

    def read_store(self) -> StoreAddress | None:
        return self._read("store.json", StoreAddress)

    def remove_store(self) -> None:
        self.remove(self.store_path.name)

    def write_result(self, result: Result) -> None:
        data = msgspec.json.encode(result)
        try:
            self.write_last("result.json", data)
        except FileNotFoundError:
            # A user removed the folder while the job ran. It ends with its own exit code all the same, and all that
            # wait for it look here.
            self.create()
            self.write_last("result.json", data)

    def read_result(self) -> Result | None:
        """How the job ended: as its last generation, unless Slurm requeued it, and it was cancelled in the queue."""
        result = self._read("result.json", Result)
        if result is None or result.exit_code not in (EXIT_UNREACHABLE, EXIT_RETRY):
            return result
        end = self.read_slurm_end()
        if end is None or not end.state.startswith("CANCELLED"):
            return result
        reason = f"cancelled in Slurm's queue; its last generation ended with exit code {result.exit_code}"
        return Result(exit_code=EXIT_TERMINATED, reason=f"{reason}: {result.reason}", ended_at=end.seen_at)

    @property
    def has_end(self) -> bool:
        """Whether it has left how it ended, or Slurm's word for that, readable or not."""
        return any(os.path.exists(self.path / name) for name in ("result.json", "slurm.json"))

    def remove_result(self) -> None:
        self.remove("result.json")
        self.remove("slurm.json")

    def write_slurm_end(self, end: SlurmEnd) -> None:
        self.write("slurm.json", msgspec.json.encode(end))

    def read_slurm_end(self) -> SlurmEnd | None:
        return self._read("slurm.json", SlurmEnd)

    def _read(self, name: str, kind: type[_T]) -> _T | None:
        try:
            data = self.read(name)
        except FileNotFoundError:
            return None
        return self._decoded(name, lambda text: decode_json(kind, text, name), data)

    def _decoded(self, name: str, decode: Callable[[bytes], _T], data: bytes) -> _T:
        try:
            return decode(data)
        except MalformedRecord as error:
            remedy = "restore the file, or remove the job's folder if nothing in it is needed"
            raise ConfigError(f"{error}; {remedy}", file=str(self.path / name)) from None


def set_earlier_job_aside(job: JobFolder, *, begun_before: float = math.inf) -> Path | None:
    """Make room for a job that begins, where another one with this id has left its folder: after its last id Slurm
    starts at the first again, and so does a new cluster. Returns the other's new folder, `ID-TIME`; None: there is
    none that began before `begun_before`, by this machine's clock. Two processes may do so at once.

    Raises UsageError where the other may still run, ConfigError where its `job.json` cannot be read, OSError.
    """
    earlier = job.read_info()
    # What began later is the new job itself, whose batch host may have made its folder by now.
    if earlier is None or earlier.started_at >= begun_before - (0 if earlier.is_here else CLOCKS_DIFFER_S):
        return None
    # Without a result it is over only where its process ran here, and has gone.
    if job.read_result() is None and not (earlier.is_here and not earlier.host_lives()):
        raise UsageError(
            f"{job.path} belongs to another job {job.job_id}, {earlier.name}, which has left no result and may still"
            f" run on {earlier.host}. Move the folder away if it does not, or submit with another --folder"
        )
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(earlier.started_at))
    aside = job.path.with_name(f"{job.path.name}-{began}")
    try:
        job.path.rename(aside)  # never the new job's folder: once the other is there, this fails
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            return None
        raise
    return aside


def clear_runtime_folders(job: JobFiles, node: str | None = None) -> None:
    """Remove what killed agents of the job (or of one node of it) have left in this machine's memory."""
    for folder in job.runtime_folders(node):
        shutil.rmtree(folder, ignore_errors=True)


def claim_node(job: JobFolder, node: str) -> tuple[Path, int]:
    """Make this agent the node's only one: a new runtime folder, and a descriptor that locks it. What killed agents
    have left is removed. Raises UsageError where another agent of the job still runs on the node.

    The lock ends with the last process that has the descriptor, also when that is killed. The supervisor gets it too:
    so a lock that is free says that no worker is left either.
    """
    own = job.make_runtime_folder(node)
    try:
        lock = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        # Not locked yet, it was taken for a killed agent's by one that began at the same moment.
        raise UsageError(f"another agent of job {job.job_id} runs on {node}: it has removed {own}") from None
    # It blocks: an agent that began at the same moment may be trying this lock, and lets go of it at once.
    fcntl.flock(lock, fcntl.LOCK_EX)
    # The own lock first: of two agents that start at one moment each may see the other's, and then both leave; but
    # never does either miss the other's.
    others = [folder for folder in job.runtime_folders(node) if folder != own]
    for other in others:
        try:
            held = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # its agent has just removed it
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            shutil.rmtree(own, ignore_errors=True)
            os.close(lock)
            raise UsageError(f"another agent of job {job.job_id} runs on {node}: {other} is locked") from None
        finally:
            os.close(held)
        shutil.rmtree(other, ignore_errors=True)
    return own, lock
