"""`SharedRing`: payloads in POSIX shared memory, for the processes of one node.

ring.py     what users call                       access.py  `Claim` and `Writing`: one read, one write
steps.py    `slots.py` under the slots' locks     memory.py  where everything lies in the file; a slot in memory
locks.py    the slots' mutexes, and the futex     owners.py  which processes are alive
segment.py  the file: made, attached, removed     copying.py copies as fast as memcpy
"""

from __future__ import annotations

from nvrx_slurm.transport.ring.access import Claim, Writing
from nvrx_slurm.transport.ring.ring import RingHandle, RingMetrics, SharedRing
from nvrx_slurm.transport.ring.segment import is_gone, sweep

__all__ = ["Claim", "RingHandle", "RingMetrics", "SharedRing", "Writing", "is_gone", "sweep"]
