"""Real jobs for tests: workers that wait at a gate until the test releases them, and a job that can be watched."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nvrx_slurm.agent.supervisor import descendants, send_all
from nvrx_slurm.jobspec.model import StoreSpec
from nvrx_slurm.jobspec.plan import Plan, RolePlan, plan_to_json
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry, NodeJoined, Record
from nvrx_slurm.lab.faults.node import kill_local_node
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.report.source import Journal, so_far
from nvrx_slurm.util.processes import is_alive

WAIT_S = 60.0
GATE_WORKER = Path(__file__).parent / "gate_worker.py"
_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A worker that waits at the gate."""

    replica: str
    rank: int
    cycle: int
    pid: int
    env: dict[str, str]
    connection: socket.socket = field(compare=False)

    def go(self, exit_code: int = 0) -> None:
        """Have the worker exit with this code."""
        with contextlib.suppress(OSError):
            self.connection.sendall(bytes([exit_code]))


class Gate:
    """Where gate workers connect and wait. `wait` blocks until enough of them have connected."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._server.getsockname()[1]
        self._arrived: list[Waiting] = []
        self._is_open = False
        self._news = threading.Condition()
        self.accept_on(self._server)

    def accept_on(self, server: socket.socket) -> None:
        """Accept workers on this listener too: it may be in another network namespace."""
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-S", str(GATE_WORKER), str(self.port))

    def wait(
        self, count: int, *, cycle: int, replica: str = "main-0", generation: int = 0, timeout: float = WAIT_S
    ) -> dict[int, Waiting]:
        """The workers of a cycle by rank, once `count` of them have connected."""
        wanted = (replica, cycle, str(generation))
        with self._news:
            there: dict[int, Waiting] = {}

            def enough() -> bool:
                here = [w for w in self._arrived if (w.replica, w.cycle, w.env["NVRX_GENERATION"]) == wanted]
                there.update({w.rank: w for w in here})
                return len(there) >= count

            if not self._news.wait_for(enough, timeout):
                raise AssertionError(f"{replica} cycle {cycle}: {len(there)} of {count} workers came: {there}")
            return there

    def open(self) -> None:
        """Release every worker with exit code 0: those that wait, and those that connect later."""
        with self._news:
            self._is_open = True
            for worker in self._arrived:
                worker.go()

    def forget(self) -> None:
        """Disconnect and forget all workers that have connected so far, before another job begins."""
        with self._news:
            for worker in self._arrived:
                worker.connection.close()
            self._arrived.clear()

    def close(self) -> None:
        # A close alone would leave the thread in accept(2), and it would take workers of the next gate.
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for worker in self._arrived:
            worker.connection.close()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                said = b""
                with contextlib.suppress(ConnectionError), connection.makefile("rb") as file:
                    said = file.readline()
                if said.endswith(b"\n"):
                    self._let_in(connection, said.decode().rstrip("\n"))
                else:
                    connection.close()  # the worker was killed before it had sent its first line

    def _let_in(self, connection: socket.socket, said: str) -> None:
        env = dict(line.split("=", 1) for line in said.split("\0") if "=" in line)
        pid = int(env.pop("PID"))
        worker = Waiting(env["NVRX_REPLICA"], int(env["RANK"]), int(env["NVRX_CYCLE"]), pid, env, connection)
        with self._news:
            self._arrived.append(worker)
            if self._is_open:
                worker.go()
            self._news.notify_all()


class RunningJob:
    """A job that runs, and its journal as it grows. `process` is its batch host, or the process that waits for it."""

    def __init__(self, folder: JobFolder, process: Any) -> None:
        self.folder, self.process = folder, process
        self.entries: list[Entry] = []
        self._journal = Journal(folder, live=True)

    def expect(self, kind: type[_R], *, timeout: float = WAIT_S, **fields: Any) -> _R:
        """Wait for the first journal record of this kind with these fields."""
        return self.when(
            lambda record: isinstance(record, kind) and all(getattr(record, k) == v for k, v in fields.items()),
            what=f"{kind.__name__} {fields}",
            timeout=timeout,
        )

    def when(self, wanted: Callable[[Record], bool], *, what: str, timeout: float = WAIT_S) -> Any:
        deadline = time.monotonic() + timeout
        seen = 0
        while True:
            for entry in self.entries[seen:]:
                if wanted(entry.record):
                    return entry.record
            seen = len(self.entries)
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come in {timeout} s\n{self.story()}")
            self.entries += [item for item in self._journal.poll(0.2) if isinstance(item, Entry)]

    def finish(self, timeout: float = WAIT_S) -> int:
        """Wait for the end of the job; returns its exit code."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end in {timeout} s\n{self.story()}") from None
        self.close()
        self.entries = so_far(self.folder, live=False)
        return code

    def close(self) -> None:
        self._journal.close()

    def said(self, kind: type[_R]) -> list[_R]:
        """Every record of this kind so far."""
        return [entry.record for entry in self.entries if isinstance(entry.record, kind)]

    def agent_pid(self, node: str) -> int:
        """The newest agent process of a node, once it has a liveness connection to the controller: without one, the
        controller takes its death for a slow start."""
        self.expect(NodeJoined, node=node)
        deadline, log = time.monotonic() + WAIT_S, self.folder.node_log(node)
        while (said := log.read_text()).rfind("connected to the controller") < said.rfind("joined as"):
            assert time.monotonic() < deadline, f"{node} was not connected in {WAIT_S} s\n{self.story()}"
            time.sleep(0.01)
        return [record.pid for record in self.said(NodeJoined) if record.node == node][-1]

    def all_joined(self, *nodes: str) -> None:
        """Wait until all of these nodes have a liveness connection to the controller."""
        for node in nodes:
            self.agent_pid(node)

    def kill_node(self, node: str) -> None:
        """Send SIGKILL to all that runs on a (local) node: the agent, its supervisor, every descendant."""
        kill_local_node(self.agent_pid(node))

    def story(self) -> str:
        """The journal and the logs, for the message of a failed test."""
        parts = [str(entry) for entry in self.entries]
        for log in [self.folder.job_log, *sorted((self.folder.path / "nodes").glob("*.log"))]:
            if log.exists():
                parts.append(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        return "\n".join(parts)


def gate_plan(
    gate: Gate,
    base: Path,
    *,
    nodes: int = 2,
    spares: int = 1,
    workers: int = 2,
    min_nodes: int | None = None,
    **bounds: Any,
) -> Plan:
    """A plain job whose workers wait at the gate."""
    role = RolePlan(
        name="main", command=gate.command, nodes_per_replica=nodes, workers_per_node=workers, min_nodes=min_nodes
    )
    return plan_of(base, role, spares=spares, **bounds)


def plan_of(base: Path, *roles: RolePlan, spares: int = 0, time_limit_s: float | None = None, **bounds: Any) -> Plan:
    return Plan(
        name="test",
        roles=roles,
        spares=spares,
        workdir=str(base),
        folder=str(base / "jobs"),
        time_limit_s=time_limit_s,
        store=StoreSpec(server="bundled"),  # regardless of the servers on this machine's PATH
        fault_tolerance=plain_bounds(**{"teardown__grace": 5.0, **bounds}),
    )


def start_local(
    plan: Plan, *, job_id: str = "j1", env: dict[str, str] | None = None, launcher: Sequence[str] = ()
) -> RunningJob:
    """Start the batch host of a local job. `launcher`: a command that starts the agents instead of the batch host."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nvrx_slurm.batch", "--cluster", "local", "--", *launcher],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "NVRX_JOB_ID": job_id, **(env or {})},
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(plan_to_json(plan))
    process.stdin.close()
    return RunningJob(JobFolder(Path(plan.folder) / job_id), process)


def end_with_all(job: RunningJob) -> None:
    """End a test's job, whether it still runs or not, and wait until none of its processes runs."""
    job.close()
    everybody = [job.process.pid, *descendants(job.process.pid)]
    if job.process.poll() is None:
        send_all(everybody, signal.SIGKILL)
        job.process.wait()
    wait_gone(everybody)


def wait_gone(pids: list[int], timeout: float = WAIT_S) -> None:
    """Wait until none of the processes runs. An empty list is an error, as the wait would prove nothing."""
    assert pids, "no process was found, so none can be gone"
    deadline = time.monotonic() + timeout
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                poller = select.poll()
                poller.register(handle, 1)
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000) and is_alive(pid):
                    raise AssertionError(f"process {pid} still runs: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
            finally:
                os.close(handle)
