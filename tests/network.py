"""A job whose nodes have a network of their own, which can be cut, slowed and lied to. It needs no root.

`network_switch.py` tells how. Everything else is shared: processes, files, the monotonic clock.
"""

from __future__ import annotations

import contextlib
import json
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

from nvrx_slurm.folder import JobFolder
from nvrx_slurm.processes import dies_with_parent
from nvrx_slurm.records import Plan, plan_to_json
from nvrx_slurm.report.source import Journal
from tests.harness import Gate, RunningJob

HERE = Path(__file__).parent
BATCH = "batch"
SCONTROL = '#!/bin/sh\n[ "$2" = hostnames ] && printf "%s\\n" {nodes}\n'
"""Slurm is not what is tested: all that is asked of it is the list of nodes."""

NO_NAMESPACES = (
    "it needs `ip` (iproute2), and a kernel that lets us have user namespaces: a container's seccomp profile may "
    "forbid them, and Ubuntu does unless `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
)

LISTEN = """
import sys
from pathlib import Path
from nvrx_slurm.folder import JobFolder
from nvrx_slurm.records import Entry
from nvrx_slurm.report.source import Journal
folder = JobFolder(Path(sys.argv[1]))
journal = Journal(folder, beats=True)
while True:
    for item in journal.poll(1.0):
        if not isinstance(item, Entry):
            print(item.beat.node, flush=True)
"""


class Network:
    """Namespaces for the batch host and for each node, and the switch between them."""

    def __init__(self, nodes: Sequence[str], gate: Gate) -> None:
        self.nodes = tuple(nodes)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._switch = subprocess.Popen(
                [
                    *("unshare", "--user", "--map-root-user", "--net", "--uts", sys.executable, "-S"),
                    *(str(HERE / "network_switch.py"), str(theirs.fileno()), str(gate.port), BATCH, *nodes),
                ],
                pass_fds=[theirs.fileno()],
            )
        data, listeners, _, _ = socket.recv_fds(self._control, 65536, 1 + len(nodes))
        if not data:
            self._control.close()
            self._switch.wait()
            refuse = pytest.fail if os.environ.get("CI") else pytest.skip
            refuse(f"no network of our own: {NO_NAMESPACES}")
        self._pid, self._namespaces = (json.loads(data)[key] for key in ("pid", "namespaces"))
        self._listeners = [socket.socket(fileno=listener) for listener in listeners]
        for listener in self._listeners:
            gate.accept_on(listener)

    def close(self) -> None:
        self._control.close()
        self._switch.wait()
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # who waits in accept(2) is not woken by a close
            listener.close()

    # ---- faults

    def cut(self, *hosts: str) -> None:
        """These hosts' frames are lost from now on, in silence; nobody else's are."""
        self._ask(cut=hosts)

    def heal(self) -> None:
        """All frames pass, all at once."""
        self._ask(cut=(), rules=(), slow=(0.0, 0.0))

    def rule(self, *rules: dict[str, Any]) -> None:
        """What of the rest is lost or refused: `network_switch.Rule`."""
        self._ask(rules=rules)

    def slow(self, delay_s: float, loss: float) -> None:
        """Every frame comes so late, and this share of them never."""
        self._ask(slow=(delay_s, loss))

    def reset(self, rule: dict[str, Any]) -> int:
        """Break TCP connections as a third party does; returns how many ends were told."""
        return int(self._ask(reset=rule))

    def count(self, rule: dict[str, Any]) -> int:
        """How many packets have matched since this was first asked."""
        return int(self._ask(count=rule))

    def _ask(self, **orders: Any) -> Any:
        self._control.send(json.dumps(orders).encode())
        return json.loads(self._control.recv(65536))

    # ---- processes

    def inside(self, host: str) -> list[str]:
        """What to write before a command that shall run on that host."""
        process = f"/proc/{self._pid}"
        net = f"--net={process}/fd/{self._namespaces[host]}"
        return ["nsenter", "--preserve-credentials", f"--user={process}/ns/user", f"--uts={process}/ns/uts", net]

    def start(self, plan: Plan, *, job_id: str = "1") -> NetworkJob:
        """Start a job's batch host, which starts its agents, as a Slurm job's script would."""
        base = Path(plan.folder)
        base.mkdir(exist_ok=True)
        scontrol = base / "scontrol"
        scontrol.write_text(SCONTROL.format(nodes=" ".join(self.nodes)))
        scontrol.chmod(0o700)
        programs = os.pathsep.join([str(base), str(Path(sys.executable).parent), os.environ["PATH"]])
        agents = [f"{node}={self._namespaces[node]}" for node in self.nodes]
        launcher = ["sh", str(HERE / "network_agents.sh"), str(self._pid), *agents]
        process = subprocess.Popen(
            [*self.inside(BATCH), sys.executable, "-m", "nvrx_slurm.batch", "--cluster", "slurm", "--", *launcher],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PATH": programs, "SLURM_JOB_ID": job_id, "SLURM_CONF": str(base / "none")},
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )
        assert process.stdin is not None
        process.stdin.write(plan_to_json(plan))
        process.stdin.close()
        return NetworkJob(JobFolder(base / job_id), process)

    @contextlib.contextmanager
    def beats(self, job: RunningJob) -> Iterator[Callable[[], Counter[str]]]:
        """Listen on the batch host; gives a function that tells how often each node has been heard since."""
        argv = [*self.inside(BATCH), sys.executable, "-c", LISTEN, str(job.folder.path)]
        with tempfile.NamedTemporaryFile() as heard, subprocess.Popen(argv, stdout=heard) as listener:
            try:
                yield lambda: Counter(Path(heard.name).read_text().split())
            finally:
                listener.kill()


class NetworkJob(RunningJob):
    """Its store is out of the test's reach: the journal's copy is read instead."""

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
