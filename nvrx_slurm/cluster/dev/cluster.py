"""`DevCluster`: a real Slurm on this machine, without root, with faults on demand."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import TracebackType

from nvrx_slurm.clock import Clock, SystemClock
from nvrx_slurm.cluster.dev import lifecycle, members, places, processes, slurm
from nvrx_slurm.cluster.dev.daemons import living, start
from nvrx_slurm.cluster.dev.programs import ACCOUNTING_PROGRAMS, SLURM_PROGRAMS, require
from nvrx_slurm.cluster.dev.spec import ClusterSpec, check_request, decode
from nvrx_slurm.cluster.dev.status import ClusterStatus, NodeStatus
from nvrx_slurm.cluster.dev.waiting import wait_until
from nvrx_slurm.errors import SlurmUnreachable, UsageError

_PORT_TRIES = 3
_HEAL_TIMEOUT_S = 60.0


def _silent(_: str) -> None:
    pass


class DevCluster:
    """One running (or half-dead) development cluster. It outlives the process that brought it up.

    `say` is told what is waited for, whenever that changes. As a context manager it goes down at the end.
    """

    def __init__(
        self, spec: ClusterSpec, *, clock: Clock | None = None, say: Callable[[str], None] = _silent
    ) -> None:
        self.spec = spec
        self._clock = clock or SystemClock()
        self._say = say

    @classmethod
    def up(
        cls,
        *,
        name: str = "dev",
        nodes: int = 6,
        cpus_per_node: int = 4,
        accounting: bool = False,
        clock: Clock | None = None,
        say: Callable[[str], None] = _silent,
    ) -> DevCluster:
        """Start a cluster and return once every node is idle. On any failure nothing is left behind.

        Raises UsageError (a bad value, or the name is taken), MissingProgramError, WaitTimeout, or NvrxError with the
        end of the failed daemon's log.
        """
        check_request(name, nodes, cpus_per_node)
        programs = require(SLURM_PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ()))
        for last_try in (False,) * (_PORT_TRIES - 1) + (True,):
            claimed = places.claim(name)
            try:
                spec = lifecycle.plan_cluster(name, nodes, cpus_per_node, accounting, claimed, programs["slurmctld"])
                cluster = cls(spec, clock=clock, say=say)
                lifecycle.launch(spec, programs, cluster._clock, say)
                return cluster
            except lifecycle.DaemonDied as died:
                cluster.down()
                if last_try or not died.port_was_taken:
                    raise
            except BaseException:
                remove(name, clock=clock)
                raise
        raise AssertionError("the last try returns or raises")

    @classmethod
    def load(
        cls, name: str = "dev", *, clock: Clock | None = None, say: Callable[[str], None] = _silent
    ) -> DevCluster:
        """The cluster of that name, running or not. Raises UsageError, which lists the names there are."""
        path = places.state_folder(name) / "cluster.json"
        try:
            return cls(decode(path.read_bytes()), clock=clock, say=say)
        except FileNotFoundError:
            raise UsageError(_unknown(name)) from None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.spec.nodes

    def environment(self) -> dict[str, str]:
        """Variables to add to a child's environment, so that sbatch, srun and the others speak to this cluster."""
        return lifecycle.client_environment(self.spec)

    def status(self) -> ClusterStatus:
        """Every node as Slurm sees it and as it is, and which daemons live. Never raises on a dead cluster."""
        table = processes.read_table()
        daemons = living(self.spec.places, table)
        try:
            states, error = slurm.node_states(self.environment()), None
        except SlurmUnreachable as unreachable:
            states, error = {}, str(unreachable)
        return ClusterStatus(
            name=self.name,
            slurm_conf=str(self.spec.places.slurm_conf),
            error=error,
            nodes=tuple(
                NodeStatus(
                    name=node,
                    slurm_state=states.get(node, "unknown"),
                    slurmd=_condition(table, daemons.get(node)),
                    processes=len(members.of_node(self.spec, node, table)),
                )
                for node in self.nodes
            ),
            daemons={
                daemon: _condition(table, daemons.get(daemon))
                for daemon in self.spec.daemons
                if daemon not in self.nodes
            },
        )

    def node_processes(self, node: str) -> list[int]:
        """The pids of the node's slurmd, its steps, and all that runs below them; empty when the node is dead."""
        self._check_node(node)
        return sorted(members.of_node(self.spec, node, processes.read_table()))

    def kill_node(self, node: str) -> list[int]:
        """Lose the node: all its processes are stopped, then SIGKILLed in one sweep. Returns their pids.

        The kernel closes their sockets, as it does for the peers of a node whose kernel has died and been replaced.
        Returns when they are dead; slurmctld notices later. Raises UsageError, WaitTimeout.
        """
        self._check_node(node)
        return sorted(processes.kill(lambda table: members.of_node(self.spec, node, table), self._clock))

    def stop_node(self, node: str) -> list[int]:
        """Freeze (SIGSTOP) all processes of the node: its sockets stay open and nobody answers. Returns the pids."""
        self._check_node(node)
        return sorted(processes.freeze(lambda table: members.of_node(self.spec, node, table)))

    def restore_node(self, node: str) -> None:
        """Bring the node back and wait until Slurm gives it jobs again.

        Frozen processes continue; a dead slurmd is started anew; and a node that Slurm took for down is resumed.
        Raises UsageError, WaitTimeout.
        """
        self._revive(node)
        self._await_usable([node])

    def heal(self, timeout_s: float = _HEAL_TIMEOUT_S) -> None:
        """End every job and restore every node: afterwards all are idle and nothing of a job runs. Raises WaitTimeout."""
        for node in self.nodes:
            self._revive(node)
        self._end_jobs(timeout_s)
        self._await_usable(self.nodes)
        lifecycle.await_idle(self.spec, self._clock, self._say, timeout_s)

    def down(self) -> None:
        """Kill every process of the cluster and its jobs, and delete its files. Works on a half-dead cluster too."""
        processes.kill(lambda table: members.of_cluster(self.spec, table), self._clock)
        self.spec.places.remove()

    def __enter__(self) -> DevCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def _check_node(self, node: str) -> None:
        if node not in self.nodes:
            raise UsageError(f"cluster {self.name!r} has no node {node!r}; it has {', '.join(self.nodes)}")

    def _revive(self, node: str) -> None:
        self._check_node(node)
        processes.send(self.node_processes(node), signal.SIGCONT)
        if node not in living(self.spec.places, processes.read_table()):
            program = require(["slurmd"])["slurmd"]
            start(lifecycle.slurmd(self.spec, node, program), self.spec.places)

    def _await_usable(self, nodes: tuple[str, ...] | list[str]) -> None:
        def usable() -> bool:
            states = slurm.node_states(self.environment())
            for node in nodes:
                if states[node] in ("down", "drained", "draining"):  # answers, and still gets no jobs
                    slurm.ask(self.environment(), "scontrol", "update", f"NodeName={node}", "State=RESUME")
            return all(states[node] in ("idle", "mixed", "allocated", "completing") for node in nodes)

        what = f"{', '.join(nodes)} to be usable"
        self._say(f"waiting for {what}")
        wait_until(usable, timeout_s=_HEAL_TIMEOUT_S, what=what, clock=self._clock)

    def _end_jobs(self, timeout_s: float) -> None:
        if not slurm.unfinished_jobs(self.environment()):
            self._end_strays()
            return
        slurm.ask(self.environment(), "scancel", "--user", self.spec.user)
        self._say("waiting for all jobs to end")

        def ended() -> bool:
            self._end_strays()
            return not slurm.unfinished_jobs(self.environment())

        wait_until(ended, timeout_s=timeout_s, what="all jobs to end", clock=self._clock)

    def _end_strays(self) -> None:
        """SIGKILL what jobs run, and spare Slurm's own daemons: so no job uses up its grace period."""
        table = processes.read_table()
        slurmds = set(living(self.spec.places, table).values())
        pids = {pid for node in self.nodes for pid in members.of_node(self.spec, node, table)} - slurmds
        processes.send((pid for pid in pids if table[pid].program not in ("slurmstepd", "slurmd")), signal.SIGKILL)


def _condition(table: processes.Table, pid: int | None) -> str:
    if pid is None:
        return "dead"
    return "frozen" if table[pid].state == "T" else "alive"


def names() -> list[str]:
    """The names of all clusters of this user, running or not."""
    folder = places.clusters_folder()
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def remove(name: str, clock: Clock | None = None) -> None:
    """Take the cluster down, also one whose `up` died before it had written anything down. Raises UsageError."""
    try:
        DevCluster.load(name, clock=clock).down()
    except UsageError:
        state = places.state_folder(name)
        if not state.is_dir():
            raise
        places.Places(state=state, runtime=state / "none").remove()


def _unknown(name: str) -> str:
    known = ", ".join(names()) or "none"
    return f"no cluster {name!r} here (there are: {known}); start it with `nvrx-slurm cluster up --name {name}`"
