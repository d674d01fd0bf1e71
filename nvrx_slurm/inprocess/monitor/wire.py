"""What rank and monitor say to each other, over a socket that keeps messages apart."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from nvrx_slurm.inprocess.ledger import Lost
from nvrx_slurm.util.decoding import decode as checked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvrx_slurm.inprocess.store.port import Store

MOST_BYTES = 64 << 10

READY = b"ready"
"""The monitor's first word, with the rank's end of the pipe that links their lifetimes; any other is why it cannot
begin."""

NOT_FOR_MONITORS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Slurm sends these to each process of a step: what comes of them is the rank's affair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """What one monitor watches, and by which bounds (`_s`: seconds). `rank`: the one that the process begins with."""

    store_factory: type[Store]
    store_kwargs: Mapping[str, Any] = field(default_factory=dict)
    group: str
    call: int
    member: int
    members: int
    rank: int
    soft_timeout_s: float
    hard_timeout_s: float
    heartbeat_timeout_s: float
    heartbeat_interval_s: float
    interval_s: float
    grace_s: float
    logfile: str | None = None
    host: str = ""  # as records name it; the machine's own name if empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a monitor begins with: its options, the rank's process, and descriptors that it has inherited."""

    options: MonitorOptions
    pid: int
    pidfd: int
    stamps: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a rank sends to its monitor."""


class NewRankOrder(Order, frozen=True, kw_only=True, tag="entered"):
    """The rank's number in the iteration to come."""

    iteration: int
    rank: int


class TerminateOrder(Order, frozen=True, kw_only=True, tag="condemned"):
    """The rank is out: its process ends within the grace, by itself or by SIGKILL, and then this is recorded."""

    lost: Lost
    grace_s: float


AnyOrder = NewRankOrder | TerminateOrder

encode = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[AnyOrder] = msgspec.json.Decoder(AnyOrder)


def decode(data: bytes) -> AnyOrder:
    """Raises MalformedRecord."""
    return checked(_decoder.decode, data, "an order of the rank")
