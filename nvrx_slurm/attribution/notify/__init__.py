"""Reports of decided failures: to Slack, an index, the ledger of suspect nodes.

base.py               a decided failure, the port of every receiver, its bounds
format.py             a decided failure as a Slack message, and as a document (pure)
outbox.py             the spool of one receiver, and the worker that delivers it
slack.py, dataflow.py the receivers
notifier.py           all of it, for one job; the ledger as a receiver
"""

from nvrx_slurm.attribution.notify.base import DecidedFailure, DeliveryLimits, FlushResult
from nvrx_slurm.attribution.notify.notifier import Notifier, flush

__all__ = ["DecidedFailure", "DeliveryLimits", "FlushResult", "Notifier", "flush"]
