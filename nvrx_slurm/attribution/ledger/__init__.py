"""Nodes that evidence blames: a ledger that the jobs of one user share.

blaming    a decided failure ─▶ whom it blames (pure)
scoring    what has been said of nodes ─▶ who is suspect now (pure)
ledger     what has been said, kept by one of the shelves: a file, or a Redis
naming     whose nodes they are: node names repeat from cluster to cluster
"""

from nvrx_slurm.attribution.ledger.blames import Blame, Kind, Suspect, blames_of
from nvrx_slurm.attribution.ledger.ledger import Ledger, cluster_of, open_ledger, suspects_among

__all__ = ["Blame", "Kind", "Ledger", "Suspect", "blames_of", "cluster_of", "open_ledger", "suspects_among"]
