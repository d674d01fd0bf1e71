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

It never returns wrong bytes, never takes longer than its deadline, and loses nothing that was not read.

    slots.py     the life of a slot, as rules (pure)         ring/         the slots in shared memory
    ref.py       `PayloadRef`: where one payload is          payloads/     objects as schema and bytes, and back
    wire.py      what goes over a connection (pure)          handshake.py  the token, proved by both sides
    serving.py   one connection of a server                  server.py     `PayloadServer`
    reading.py   one payload over one connection             pool.py       the connections of a client
    choosing.py  which port, and for how long not (pure)     retrying.py   when again, when no more (pure)
    fetching.py  one read, through all of these              batch.py      many, under one deadline
    client.py    `PayloadClient`, `AsyncPayloadClient`       local.py      the rings of this node
    directory.py publish and look up, in the job's store     published.py, asking.py  its records, its patience
    backends/    tcp, ucxx, shm behind one small port        environment.py what the agent has told us
    doctor.py    what this node can do                       pace.py       how fast it does
    arguments.py what callers give us, looked at (pure)
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvrx_slurm.transport.batch import Fetched, PayloadsMissing
    from nvrx_slurm.transport.client import AsyncPayloadClient, PayloadClient
    from nvrx_slurm.transport.directory import Directory, Following, lookup, publish
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
    from nvrx_slurm.transport.published import Published
    from nvrx_slurm.transport.ref import PayloadRef
    from nvrx_slurm.transport.retrying import Limits
    from nvrx_slurm.transport.ring import Claim, RingHandle, RingMetrics, SharedRing, Writing, sweep
    from nvrx_slurm.transport.server import PayloadServer
    from nvrx_slurm.transport.serving import ServerLimits
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

_HOME = {
    "AsyncPayloadClient": "client",
    "Attempt": "errors",
    "Claim": "ring",
    "Directory": "directory",
    "Fetched": "batch",
    "Following": "directory",
    "ForeignRing": "errors",
    "Limits": "retrying",
    "PayloadClient": "client",
    "PayloadCorrupt": "errors",
    "PayloadRef": "ref",
    "PayloadServer": "server",
    "PayloadTimeout": "errors",
    "PayloadTruncated": "errors",
    "PayloadsMissing": "batch",
    "PeerRefused": "errors",
    "PeerReset": "errors",
    "Published": "published",
    "Refusal": "slots",
    "RingError": "errors",
    "RingFull": "errors",
    "RingHandle": "ring",
    "RingMetrics": "ring",
    "ServerLimits": "serving",
    "SharedRing": "ring",
    "StaleSlotError": "errors",
    "State": "slots",
    "TransportError": "errors",
    "Writing": "ring",
    "lookup": "directory",
    "publish": "directory",
    "sweep": "ring",
}


def __getattr__(name: str) -> object:
    """Imported when first used: whoever only looks a ref up need not load the rest."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
