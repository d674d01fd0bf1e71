"""What a seed draws for producers and readers of payloads: the rings, who reads what, and the faults."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from random import Random


class PayloadFault(enum.StrEnum):
    """What the adversary does."""

    KILL_READER = "a reader is killed"
    KILL_PRODUCER = "a producer is killed, and comes back at the same ports"
    STOP_READER = "a reader is stopped"
    STOP_PRODUCER = "a producer is stopped"
    POWER_OFF = "a producer's host loses power, and comes back"
    CUT_OFF = "no byte reaches a producer's host"
    PORT_DOWN = "no byte reaches one port"
    RESETS = "connections break"
    CORRUPT = "bits flip on the way"
    OTHER_JOB = "another job's server takes a dead producer's ports"


LASTING = frozenset(PayloadFault) - {PayloadFault.KILL_READER, PayloadFault.KILL_PRODUCER}


@dataclass(frozen=True, slots=True)
class PayloadAct:
    """One fault: of which producer or reader, when, and for how long."""

    at_s: float
    fault: PayloadFault
    which: int
    lasts_s: float = 0.0

    def __str__(self) -> str:
        lasts = f", for {self.lasts_s:.3f} s" if self.fault in LASTING else ""
        return f"{self.at_s:8.3f} s: number {self.which}: {self.fault}{lasts}"


@dataclass(frozen=True, slots=True)
class PayloadShape:
    """Producers, one to a host, and readers. `local`: readers on the first producer's host; `shared`: each payload
    is offered to two readers, and the second may find that it is gone; `kept`: reads leave the payload; `views`:
    local readers look at it in the ring."""

    producers: int
    readers: int
    local: int
    threads: int
    ports: int
    slots: int
    bytes: int
    payloads: int
    overwrite: bool
    checksum: bool
    shared: bool
    kept: bool
    batches: bool
    views: bool
    lease_s: float
    deadline_s: float
    every_s: float

    def __str__(self) -> str:
        kinds = ("overwrite", "checksum", "shared", "kept", "batches", "views")
        return (
            f"{self.producers} producers with {self.ports} ports and {self.slots} slots of {self.bytes} bytes,"
            f" {self.readers} readers ({self.local} of them local) of {self.threads} threads,"
            f" {self.payloads} payloads"
            f" every {self.every_s:.3f} s, each read within {self.deadline_s:.1f} s, leases of {self.lease_s:.1f} s;"
            f" {', '.join(kind for kind in kinds if getattr(self, kind)) or 'plain'}"
        )


def draw_payload_shape(chance: Random) -> PayloadShape:
    readers = chance.randint(1, 3)
    return PayloadShape(
        producers=chance.choice((1, 1, 2)),
        readers=readers,
        local=chance.randint(0, readers) if chance.random() < 0.6 else 0,
        threads=chance.choice((1, 1, 2)),
        ports=chance.randint(1, 3),
        slots=chance.choice((1, 2, 2, 3, 4)),
        bytes=chance.choice((16, 64, 200)),
        payloads=chance.randint(3, 10),
        overwrite=chance.random() < 0.4,
        checksum=chance.random() < 0.7,
        shared=chance.random() < 0.4,
        kept=chance.random() < 0.15,
        batches=chance.random() < 0.25,
        views=chance.random() < 0.5,
        lease_s=chance.choice((0.3, 2.0, 10.0)),
        deadline_s=chance.choice((0.5, 3.0, 12.0)),
        every_s=chance.choice((0.0005, 0.01, 0.2)),
    )


def draw_payload_acts(chance: Random, shape: PayloadShape) -> tuple[PayloadAct, ...]:
    """A tenth of the histories has no fault; each knows some kinds of them."""
    if chance.random() < 0.1:
        return ()
    known = [fault for fault in PayloadFault if chance.random() < 0.4] or [chance.choice(list(PayloadFault))]
    acts = []
    at_s = 0.001
    for _ in range(chance.choice((1, 1, 2, 2, 3, 5))):
        at_s += chance.choice((0.001, 0.01, 0.3, 3.0)) * chance.random()
        fault = chance.choice(known)
        lasts_s = chance.choice((0.01, 0.5, 3.0, 12.0)) * chance.random()
        acts.append(PayloadAct(at_s, fault, chance.randrange(6), lasts_s if fault in LASTING else 0.0))
    return tuple(acts)
