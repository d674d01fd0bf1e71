"""`DevCluster`: a real Slurm on this machine, without root: up, down, status, node faults, healing."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
from collections.abc import Mapping, Sequence

import msgspec

from nvrx_slurm.errors import ConfigError, SlurmUnreachable, UsageError
from nvrx_slurm.journal.folder import LOOPBACK
from nvrx_slurm.lab.devcluster import lifecycle, places, processes
from nvrx_slurm.lab.devcluster import programs as slurm
from nvrx_slurm.lab.devcluster import spec as members
from nvrx_slurm.lab.devcluster.daemons import living, start
from nvrx_slurm.lab.devcluster.lifecycle import Say, free_ports, ports_of_clusters
from nvrx_slurm.lab.devcluster.processes import wait_until
from nvrx_slurm.lab.devcluster.programs import ACCOUNTING_PROGRAMS, SLURM_PROGRAMS, require
from nvrx_slurm.lab.devcluster.spec import ClusterSpec, ClusterStatus, DevNodeStatus, check_request, decode, is_usable
from nvrx_slurm.util import ownership
from nvrx_slurm.util.clock import Clock, SystemClock

DEFAULT_NAME = "dev"
HEAL_TIMEOUT_S = 60.0
_PORT_TRIES = 3


def _silent(_: str) -> None:
    pass


class DevCluster:
    """One development cluster, healthy or not. It outlives the process that brought it up.

    `say` gets what the cluster waits for, whenever that changes. As a context manager it goes down at the end.
    """

    def __init__(self, spec: ClusterSpec, *, clock: Clock | None = None, say: Say = _silent) -> None:
        self.spec = spec
        self._clock = clock or SystemClock()
        self._say = say

    @classmethod
    def up(
        cls,
        *,
        name: str = DEFAULT_NAME,
        nodes: int = 6,
        cpus_per_node: int = 4,
        accounting: bool = False,
        settings: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        say: Say = _silent,
    ) -> DevCluster:
        """Start a cluster and return once every node is idle. On any failure nothing is left behind.

        `settings`: lines that replace generated ones of slurm.conf, such as `{"KillWait": "10"}`.

        Raises UsageError (a bad value, or the name is taken), MissingProgramError, WaitTimeout, or NvrxError with the
        end of the failed daemon's log.
        """
        check_request(name, nodes, cpus_per_node)
        programs = require(SLURM_PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ()))
        clock = clock or SystemClock()
        tries_left = _PORT_TRIES
        while True:
            tries_left -= 1
            claimed = places.claim(name)
            try:
                controller_port, database_port, *node_ports = free_ports(nodes + 2, ports_of_clusters())
                spec = ClusterSpec(
                    name=name,
                    user=pwd.getpwuid(os.getuid()).pw_name,
                    # NodeHostname is what `hostname -s` prints (slurm.conf(5)).
                    hostname=socket.gethostname().split(".")[0],
                    slurm_version=slurm.slurm_version(programs["slurmctld"]),
                    cpus_per_node=cpus_per_node,
                    controller_port=controller_port,
                    database_port=database_port if accounting else None,
                    node_ports=tuple(node_ports),
                    state=str(claimed.state),
                    runtime=str(claimed.runtime),
                    settings=dict(settings or {}),
                )
                lifecycle.launch(spec, programs, clock, say)
                return cls(spec, clock=clock, say=say)
            except BaseException as error:  # Ctrl-C too: nothing of the attempt stays
                remove(name, clock=clock)
                if not (isinstance(error, lifecycle.DaemonDied) and error.port_was_taken and tries_left):
                    raise

    @classmethod
    def load(cls, name: str = DEFAULT_NAME, *, clock: Clock | None = None, say: Say = _silent) -> DevCluster:
        """The cluster of that name, running or not. Raises UsageError, which lists the names there are, or which says
        that another user could have written its records."""
        places.check(name)
        path = places.clusters_folder() / name / "cluster.json"
        try:
            return cls(decode(ownership.read_owned(path)), clock=clock, say=say)
        except FileNotFoundError:
            known = ", ".join(names()) or "none"
            raise UsageError(
                f"no cluster {name!r} here (there are: {known}); start it with `nvrx-slurm cluster up --name {name}`"
            ) from None
        except msgspec.DecodeError as error:
            remedy = f"`nvrx-slurm cluster down --name {name}` takes the cluster down all the same"
            raise ConfigError(f"is damaged ({error}); {remedy}", file=str(path)) from None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def nodes(self) -> tuple[str, ...]:
        """n1, n2, …"""
        return self.spec.nodes

    def environment(self) -> dict[str, str]:
        """Variables to add to a child's environment, so that sbatch, srun and the others speak to this cluster."""
        return self.spec.client_environment

    def status(self) -> ClusterStatus:
        """Every node as Slurm sees it and as it is, and which daemons live. Does not raise on a dead cluster."""
        table = processes.read_table()
        alive = living(self.spec.places, table)
        counts = {node: len(pids) for node, pids in members.of_nodes(self.spec, table).items()}
        states: dict[str, str] = {}
        error: str | None = None
        if "slurmctld" not in alive:
            error = "slurmctld is dead"
        else:
            try:
                states = slurm.node_states(self.environment())
            except SlurmUnreachable as unreachable:
                error = str(unreachable)
        conditions = dict.fromkeys(self.spec.daemons, "dead")
        for daemon, pid in alive.items():
            conditions[daemon] = "frozen" if table[pid].state == "T" else "alive"
        return ClusterStatus(
            name=self.name,
            slurm_conf=str(self.spec.places.slurm_conf),
            error=error,
            nodes=tuple(
                DevNodeStatus(
                    name=node,
                    slurm_state=states.get(node, "unknown"),
                    slurmd=conditions.pop(node),
                    processes=counts[node],
                )
                for node in self.nodes
            ),
            daemons=conditions,
        )

    def node_processes(self, node: str) -> list[int]:
        """The pids of the node's slurmd, its steps, and all that runs below them; empty when the node is dead."""
        self._check_node(node)
        return sorted(members.of_nodes(self.spec, processes.read_table())[node])

    def kill_node(self, node: str) -> list[int]:
        """Lose the node: all its processes are stopped, then SIGKILLed in one sweep. Returns their pids.

        Returns when they are dead and the kernel has closed their sockets; slurmctld notices some 15 s later.
        Raises UsageError, WaitTimeout.
        """
        self._check_node(node)
        return sorted(processes.kill(lambda table: members.of_nodes(self.spec, table)[node], self._clock))

    def stop_node(self, node: str) -> list[int]:
        """Freeze (SIGSTOP) all processes of the node: its sockets stay open and nothing answers. Returns the pids."""
        self._check_node(node)
        return sorted(processes.freeze(lambda table: members.of_nodes(self.spec, table)[node], self._clock))

    def mark_down(self, node: str) -> None:
        """Mark the node as lost in slurmctld now, as a site's health check would; slurmctld would notice later."""
        self._check_node(node)
        slurm.set_node_state(self.environment(), node, "DOWN")

    def restore_node(self, node: str) -> None:
        """Bring the node back and wait until Slurm uses it again.

        Frozen processes continue; a dead slurmd is restarted; a node that Slurm holds for down is resumed.
        Raises UsageError, WaitTimeout.
        """
        self._check_node(node)
        revive(self.spec, node)
        await_usable(self.spec, [node], self._clock, self._say)

    def heal(self, timeout_s: float = HEAL_TIMEOUT_S) -> None:
        """End every job and restore every node: afterwards all are idle and run nothing. Raises WaitTimeout, and
        NvrxError where slurmctld has died."""
        lifecycle.check_alive(self.spec, ["slurmctld"])
        # Nodes before jobs: a frozen slurmd would never report that a job of its node has ended.
        for node in self.nodes:
            revive(self.spec, node)

        def below_slurmds(table: processes.Table) -> set[int]:
            on_nodes = set[int]().union(*members.of_nodes(self.spec, table).values())
            return on_nodes - set(living(self.spec.places, table).values())

        def ended() -> bool:
            if not slurm.unfinished_jobs(self.environment()):
                return True
            # At each look: a job may have been submitted, or requeued, since the last one.
            slurm.cancel_all(self.environment(), self.spec.user)
            table = processes.read_table()
            below = [table[pid] for pid in below_slurmds(table)]
            # Killed, without a grace period. Not the slurmstepds: they report how the job ended.
            doomed = (process for process in below if process.program not in ("slurmstepd", "slurmd"))
            processes.send(doomed, signal.SIGKILL)
            return False

        wait_until(ended, timeout_s=timeout_s, what="all jobs to end", clock=self._clock)
        # What a job has detached is part of no step: Slurm has called the job ended, and left that alone.
        processes.kill(below_slurmds, self._clock)
        await_usable(self.spec, self.nodes, self._clock, self._say)
        lifecycle.await_idle(self.spec, self._clock, self._say, timeout_s)

    def down(self) -> None:
        """Kill every process of the cluster and its jobs, and delete its files. Works on a half-dead cluster too."""
        processes.kill(lambda table: members.of_cluster(self.spec, table), self._clock)
        self.spec.places.remove()

    def __enter__(self) -> DevCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def _check_node(self, node: str) -> None:
        if node not in self.nodes:
            raise UsageError(f"cluster {self.name!r} has no node {node!r}; it has {', '.join(self.nodes)}")


def names() -> list[str]:
    """The names of all clusters of this user, running or not."""
    folder = places.clusters_folder()
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def remove(name: str, clock: Clock | None = None) -> None:
    """Take the cluster down, also one whose `up` was killed, or whose cluster.json is damaged. Raises UsageError."""
    try:
        cluster = DevCluster.load(name, clock=clock)
    # A ConfigError, of a damaged `cluster.json`, is one too.
    except UsageError:
        if name not in names():
            raise
        left = places.existing(name)
        processes.kill(lambda table: members.of_daemons(left, table), clock or SystemClock())
        left.remove()
    else:
        cluster.down()


USABLE_TIMEOUT_S = 30.0
CALL_S = 1.0
_REFUSES_JOBS = ("down", "drained", "draining")  # and answers: the state would have a star if it did not


def revive(spec: ClusterSpec, node: str) -> None:
    """Continue all that is frozen on the node, and start its slurmd if that is dead."""
    table = processes.read_table()
    processes.send((table[pid] for pid in members.of_nodes(spec, table)[node]), signal.SIGCONT)
    slurmd = living(spec.places, table).get(node)
    if slurmd is None:
        start(lifecycle.slurmd(spec, node, require(["slurmd"])["slurmd"]), spec.places)
    # The table is older than the SIGCONT: it shows whether slurmd was frozen.
    elif table[slurmd].state == "T":
        # So it registers at once. If slurmctld holds it for down by now, it would ask for that only some 30 s later.
        processes.send([table[slurmd]], signal.SIGHUP)
        # The race: slurmd looks for a signal, then waits for a connection (`_msg_engine`, slurmd.c). A signal that
        # comes in between is seen only after the next connection, so make one.
        port = spec.node_ports[spec.nodes.index(node)]
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=CALL_S):
            pass


def await_usable(spec: ClusterSpec, nodes: Sequence[str], clock: Clock, say: Say) -> None:
    """Wait until Slurm gives jobs to these nodes, and resume the ones that it holds for down. Raises WaitTimeout."""

    def usable() -> bool:
        states = slurm.node_states(spec.client_environment)
        for node in nodes:
            if states[node] in _REFUSES_JOBS:
                with contextlib.suppress(SlurmUnreachable):  # refused: it came back by itself meanwhile
                    slurm.set_node_state(spec.client_environment, node, "RESUME")
        return all(is_usable(states[node]) for node in nodes)

    what = f"Slurm to use {', '.join(nodes)}"
    say(f"waiting for {what}")
    wait_until(usable, timeout_s=USABLE_TIMEOUT_S, what=what, clock=clock)
