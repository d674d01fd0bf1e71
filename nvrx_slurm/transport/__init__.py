"""Payload transport: what one process writes into a ring in shared memory, others read, on this node or on another.

```python
from nvrx_slurm import transport

ring = transport.SharedRing.create(slots=8, slot_bytes=64 << 20)     # the producer
server = transport.PayloadServer(ring)
transport.publish(server.write({"obs": observations, "reward": rewards}))

client = transport.PayloadClient()                                    # a consumer, anywhere in the job
for published in transport.lookup():
    rollout = client.read(published.ref, deadline=30)
```

It never returns wrong bytes, never takes longer than its deadline, and loses no payload that was not read.

The modules, and how they work together: "Payloads between workers" in docs/architecture.md.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvrx_slurm.transport.client import AsyncPayloadClient, Fetched, PayloadClient, PayloadsMissing
    from nvrx_slurm.transport.directory import Directory, Following, Published, lookup, publish
    from nvrx_slurm.transport.errors import (
        Attempt,
        ForeignRing,
        PayloadCorrupt,
        PayloadTimeout,
        PayloadTruncated,
        PeerRefused,
        PeerReset,
        RingError,
        RingFull,
        StaleSlotError,
        TransportError,
    )
    from nvrx_slurm.transport.ref import PayloadRef
    from nvrx_slurm.transport.retrying import Limits
    from nvrx_slurm.transport.ring import Claim, RingHandle, RingMetrics, SharedRing, Writing, sweep
    from nvrx_slurm.transport.server import PayloadServer, ServerLimits
    from nvrx_slurm.transport.slots import Refusal, State

__all__ = [
    "AsyncPayloadClient",
    "Attempt",
    "Claim",
    "Directory",
    "Fetched",
    "Following",
    "ForeignRing",
    "Limits",
    "PayloadClient",
    "PayloadCorrupt",
    "PayloadRef",
    "PayloadServer",
    "PayloadTimeout",
    "PayloadTruncated",
    "PayloadsMissing",
    "PeerRefused",
    "PeerReset",
    "Published",
    "Refusal",
    "RingError",
    "RingFull",
    "RingHandle",
    "RingMetrics",
    "ServerLimits",
    "SharedRing",
    "StaleSlotError",
    "State",
    "TransportError",
    "Writing",
    "lookup",
    "publish",
    "sweep",
]

_HOMES = {
    "client": ("AsyncPayloadClient", "Fetched", "PayloadClient", "PayloadsMissing"),
    "errors": (
        "Attempt",
        "ForeignRing",
        "PayloadCorrupt",
        "PayloadTimeout",
        "PayloadTruncated",
        "PeerRefused",
        "PeerReset",
        "RingError",
        "RingFull",
        "StaleSlotError",
        "TransportError",
    ),
    "ring": ("Claim", "RingHandle", "RingMetrics", "SharedRing", "Writing", "sweep"),
    "directory": ("Directory", "Following", "Published", "lookup", "publish"),
    "retrying": ("Limits",),
    "ref": ("PayloadRef",),
    "server": ("PayloadServer", "ServerLimits"),
    "slots": ("Refusal", "State"),
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used: to look up a ref does not load rings and servers."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
