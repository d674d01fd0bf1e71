"""torchrun and NVRx's ft_launcher: one agent process a node, all on this machine, at their fastest settings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import processes
from bench.errors import PeerMissing
from bench.launchers.base import NODES, WORKERS_PER_NODE, Task
from nvrx_slurm.store.embedded import free_port

Agent = subprocess.Popen[bytes]
TORCH = "--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu"
NVRX = "nvidia-resiliency-ext==0.4.1"
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without it a restart finds the port of the cycle before in use
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True, slots=True)
class TorchElastic:
    """A launcher of the torchelastic family, from the `bin` folder of the peers' virtual environment."""

    name: str
    program: Path
    options: tuple[str, ...] = ()
    conf: str = ""  # for the rendezvous

    def start(self, task: Task) -> ElasticFleet:
        if not self.program.exists():
            raise PeerMissing(f"{self.program} is not there; install it with: {install_line(self.program)}")
        port = free_port("127.0.0.1")
        fleet = ElasticFleet(partial(self._agent, task, port), port, task)
        for _ in range(NODES):
            fleet.add()
        return fleet

    def _agent(self, task: Task, port: int, index: int) -> Agent:
        argv = [
            str(self.program),
            f"--nnodes={NODES}",
            f"--nproc-per-node={WORKERS_PER_NODE}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=bench",
            f"--rdzv-conf=is_host={str(index == 0).lower()}{self.conf and ','}{self.conf}",
            "--local-addr=127.0.0.1",
            "--max-restarts=1000",
            "--monitor-interval=0.01",
            *self.options,
            "--no-python",
            *task.command,
        ]
        return processes.start(argv, log=task.room / f"agent-{index}.log", extra=ENVIRONMENT)


def torchrun(peers: Path) -> TorchElastic:
    """As it comes: a silent node is given up after 3 × 5 s."""
    return TorchElastic("torchrun", peers / "torchrun")


def torchrun_tuned(peers: Path) -> TorchElastic:
    """With the shortest keep-alive that survives one late heartbeat: a silent node is given up after 2 × 1 s."""
    return TorchElastic(
        "torchrun, keep-alive 2 × 1 s",
        peers / "torchrun",
        conf="keep_alive_interval=1,keep_alive_max_attempt=2",
    )


def ft_launcher(peers: Path) -> TorchElastic:
    """NVRx in its default restart policy. The workers send its monitors no heartbeats, so it is to expect none."""
    options = (
        "--ignore-missing-fault-tol-cfg",
        "--ft-initial-rank-heartbeat-timeout=86400",
        "--ft-rank-heartbeat-timeout=86400",
    )
    return TorchElastic("ft_launcher", peers / "ft_launcher", options)


def install_line(program: Path) -> str:
    """How to get the program where it is looked for. torch comes first, or the GPU build's gigabytes come along."""
    home = program.parent.parent
    pip = program.with_name("pip")
    return f"python3.11 -m venv {home} && {pip} install {TORCH} && {pip} install {NVRX}"


class ElasticFleet:
    """Agents that share a rendezvous."""

    def __init__(self, start: Callable[[int], Agent], port: int, task: Task) -> None:
        self._start, self._port, self._task = start, port, task
        self._agents: list[Agent] = []
        self.parent_of_nodes = os.getpid()

    def add(self) -> None:
        """One more agent."""
        self._agents.append(self._start(len(self._agents)))

    def wait_spares(self, timeout_s: float) -> None:
        """Have one agent stand by; an agent joins as soon as it is connected to the rendezvous store."""
        # Only one, and only once the world is complete: with several, torch 2.13 restarts for ever after a death.
        if self._task.spares:
            self.add()

        def all_have_joined() -> bool:
            return all(
                agent.poll() is not None or processes.is_connected(agent.pid, self._port) for agent in self._agents
            )

        processes.wait_until(all_have_joined, timeout_s, "the connection of each agent to their store")

    def log(self) -> str:
        texts = [path.read_text(errors="replace")[-800:] for path in sorted(self._task.room.glob("agent-*.log"))]
        return "\n".join(texts)

    def stop(self) -> None:
        for agent in self._agents:
            processes.end(agent)
