"""A job of gate workers whose nodes have a network of their own (`nvrx_slurm.lab.faults.network`)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.jobspec.plan import Plan, plan_to_json
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.faults.network import BATCH, HostNetwork
from nvrx_slurm.report.source import Journal
from nvrx_slurm.util.processes import dies_with_parent
from tests.harness import Gate, RunningJob

LISTEN = """
import sys
from pathlib import Path
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.report.source import Journal
folder = JobFolder(Path(sys.argv[1]))
journal = Journal(folder, beats=True)
while True:
    for item in journal.poll(1.0):
        if not isinstance(item, Entry):
            print(item.heartbeat.node, flush=True)
"""


class GateNetwork(HostNetwork):
    """A network with a listener for the gate on each host. Where none can be created the test is skipped; in CI it
    fails."""

    def __init__(self, nodes: Sequence[str], gate: Gate) -> None:
        try:
            super().__init__(nodes, door=gate.port)
        except NvrxError as error:
            refuse = pytest.fail if os.environ.get("CI") else pytest.skip
            refuse(str(error))
        for door in self.doors:
            gate.accept_on(door)

    def close(self) -> None:
        super().close()
        for door in self.doors:
            door.shutdown(socket.SHUT_RDWR)  # close does not wake a thread that waits in accept(2)
            door.close()

    def start(self, plan: Plan, *, job_id: str = "1") -> NetworkJob:
        """Start a job's batch host, which starts its agents, as a Slurm job's script would."""
        batch = [sys.executable, "-m", "nvrx_slurm.batch", "--cluster", "local", "--", *self.agents()]
        process = subprocess.Popen(
            [*self.inside(BATCH), *batch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "NVRX_JOB_ID": job_id},
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )
        assert process.stdin is not None
        process.stdin.write(plan_to_json(plan))
        process.stdin.close()
        return NetworkJob(JobFolder(Path(plan.folder) / job_id), process)

    @contextlib.contextmanager
    def beats(self, job: RunningJob) -> Iterator[Callable[[], Counter[str]]]:
        """Read heartbeats on the batch host. Gives a function that returns how many each node has sent since."""
        argv = [*self.inside(BATCH), sys.executable, "-c", LISTEN, str(job.folder.path)]
        with tempfile.NamedTemporaryFile() as heard, subprocess.Popen(argv, stdout=heard) as listener:
            try:
                yield lambda: Counter(Path(heard.name).read_text().split())
            finally:
                listener.kill()


class NetworkJob(RunningJob):
    """A job whose store the test cannot reach: the test reads the journal's copy instead."""

    def __init__(self, folder: JobFolder, process: Any) -> None:
        super().__init__(folder, process)
        self._journal = Journal(folder, live=False)

    @property
    def store_port(self) -> int:
        address = self.folder.read_store()
        assert address is not None
        port = urlsplit(address.url).port
        assert port is not None
        return port
