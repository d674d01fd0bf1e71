"""What a development cluster is like at one moment."""

from __future__ import annotations

from nvrx_slurm.journal.records import Record


class NodeStatus(Record, frozen=True, kw_only=True):
    """One node. `slurm_state` is slurmctld's view, `slurmd` the truth: `alive`, `frozen` or `dead`."""

    name: str
    slurm_state: str
    slurmd: str
    processes: int


class ClusterStatus(Record, frozen=True, kw_only=True):
    """The cluster. `error` says why slurmctld did not answer; the nodes' states are then `unknown`."""

    name: str
    slurm_conf: str
    error: str | None
    nodes: tuple[NodeStatus, ...]
    daemons: dict[str, str]

    @property
    def healthy(self) -> bool:
        """Every daemon lives and every node gets jobs."""
        states = {"idle", "mixed", "allocated", "completing"}
        return all(condition == "alive" for condition in self.daemons.values()) and all(
            node.slurmd == "alive" and node.slurm_state in states for node in self.nodes
        )
