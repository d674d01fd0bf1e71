"""What is told to others about a decided failure: Slack, an index, the ledger of suspect nodes.

decided      what a receiver is told of
telling      a decided failure ─▶ a Slack message, a document (pure)
spool        what is still to be told: files in the job's folder, in order
courier      carries a spool to its receiver: tries again, gives up, says so once
slack, dataflow, suspicion      the receivers
afterwards   all of it, for one job
"""

from nvrx_slurm.attribution.notify.afterwards import Afterwards, flush
from nvrx_slurm.attribution.notify.decided import Decided
from nvrx_slurm.attribution.notify.receiver import Flushed, Patience

__all__ = ["Afterwards", "Decided", "Flushed", "Patience", "flush"]
