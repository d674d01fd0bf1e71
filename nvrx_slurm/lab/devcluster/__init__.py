"""The development cluster: a real multi-node Slurm on this machine, without root, with real faults."""

from __future__ import annotations

from nvrx_slurm.lab.devcluster.cluster import DevCluster, names, remove
from nvrx_slurm.lab.devcluster.spec import ClusterStatus, DevNodeStatus

__all__ = ["ClusterStatus", "DevCluster", "DevNodeStatus", "names", "remove"]
