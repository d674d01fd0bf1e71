"""Nodes that evidence blames: a ledger that the jobs of one user share.

blames     what a failure says against nodes, and which nodes are suspect by it
ledger     the blames against one cluster's nodes
storage    where they are kept: a file, or a Redis
"""

from nvrx_slurm.attribution.ledger.blames import Blame, BlameKind, Suspect, blames_of
from nvrx_slurm.attribution.ledger.ledger import Ledger, cluster_of, open_ledger, suspects_among

__all__ = ["Blame", "BlameKind", "Ledger", "Suspect", "blames_of", "cluster_of", "open_ledger", "suspects_among"]
