"""`SharedRing`: payloads in POSIX shared memory, for the processes of one node.

ring.py     what users call                       claim.py, writing.py   one read, one write, step by step
steps.py    `slots.py` under the slots' locks     memory.py              a slot in memory; layout.py, where it lies
mutex.py    a lock that outlives its holder       futex.py               waiting without looking
owners.py   who is alive                          segment.py             the file: made, attached, removed, swept
copying.py  as fast as memcpy
"""

from __future__ import annotations

from nvrx_slurm.transport.ring.claim import Claim
from nvrx_slurm.transport.ring.ring import RingHandle, RingMetrics, SharedRing
from nvrx_slurm.transport.ring.segment import is_gone, sweep
from nvrx_slurm.transport.ring.writing import Writing

__all__ = ["Claim", "RingHandle", "RingMetrics", "SharedRing", "Writing", "is_gone", "sweep"]
