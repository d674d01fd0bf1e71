"""Bringing nodes and whole clusters back to health."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Sequence

from nvrx_slurm.errors import SlurmUnreachable
from nvrx_slurm.journal.folder import LOOPBACK
from nvrx_slurm.lab.devcluster import lifecycle, members, processes, slurm
from nvrx_slurm.lab.devcluster.daemons import living, start
from nvrx_slurm.lab.devcluster.lifecycle import Say, client_environment
from nvrx_slurm.lab.devcluster.programs import require
from nvrx_slurm.lab.devcluster.spec import ClusterSpec
from nvrx_slurm.lab.devcluster.waiting import wait_until
from nvrx_slurm.util.clock import Clock

USABLE_TIMEOUT_S = 30.0
CALL_S = 1.0
_REFUSES_JOBS = ("down", "drained", "draining")  # and answers: the state would have a star if it did not
USABLE = ("idle", "mixed", "allocated", "completing")


def revive(spec: ClusterSpec, node: str) -> None:
    """Continue all that is frozen on the node, and start its slurmd if that is dead."""
    table = processes.read_table()
    processes.send((table[pid] for pid in members.of_node(spec, node, table)), signal.SIGCONT)
    slurmd = living(spec.places, table).get(node)
    if slurmd is None:
        start(lifecycle.slurmd(spec, node, require(["slurmd"])["slurmd"]), spec.places)
    elif table[slurmd].state == "T":
        # So it registers at once. If slurmctld holds it for down by now, it would ask for that only some 30 s later.
        processes.send([table[slurmd]], signal.SIGHUP)
        _call(spec.node_ports[spec.nodes.index(node)])


def _call(port: int) -> None:
    """slurmd looks whether a signal has come before it waits for the next connection (`_msg_engine`, slurmd.c): one
    that comes just in between is seen only after that connection."""
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=CALL_S):
        pass


def await_usable(spec: ClusterSpec, nodes: Sequence[str], clock: Clock, say: Say) -> None:
    """Wait until Slurm gives jobs to these nodes, and resume the ones that it holds for down. Raises WaitTimeout."""
    environment = client_environment(spec)

    def usable() -> bool:
        states = slurm.node_states(environment)
        for node in nodes:
            if states[node] in _REFUSES_JOBS:
                with contextlib.suppress(SlurmUnreachable):  # refused: it came back by itself meanwhile
                    slurm.set_node_state(environment, node, "RESUME")
        return all(states[node] in USABLE for node in nodes)

    what = f"Slurm to use {', '.join(nodes)}"
    say(f"waiting for {what}")
    wait_until(usable, timeout_s=USABLE_TIMEOUT_S, what=what, clock=clock)


def end_jobs(spec: ClusterSpec, clock: Clock, timeout_s: float) -> None:
    """Cancel every job and wait until none is left. Its processes are killed: no grace period. Raises WaitTimeout."""
    environment = client_environment(spec)

    def ended() -> bool:
        if not slurm.unfinished_jobs(environment):
            return True
        slurm.cancel_all(environment, spec.user)
        processes.send(_job_processes(spec), signal.SIGKILL)
        return False

    wait_until(ended, timeout_s=timeout_s, what="all jobs to end", clock=clock)
    processes.kill(lambda table: _below_slurmds(spec, table), clock)


def _job_processes(spec: ClusterSpec) -> list[processes.Process]:
    """What jobs run. Their slurmstepds are not among it: these shall report how it ended."""
    table = processes.read_table()
    below = (table[pid] for pid in _below_slurmds(spec, table))
    return [process for process in below if process.program not in ("slurmstepd", "slurmd")]


def _below_slurmds(spec: ClusterSpec, table: processes.Table) -> set[int]:
    on_nodes = set[int]().union(*members.of_nodes(spec, table).values())
    return on_nodes - set(living(spec.places, table).values())
