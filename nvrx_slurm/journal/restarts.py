"""What a group of ranks reports of a restart in process: one datagram to its agent, one part of the journal."""

from __future__ import annotations

import msgspec

from nvrx_slurm.util.decoding import decode as checked

MOST_RANKS = 8
MOST_FAULTS = 8
MOST_MISSING = 64
LONGEST_TEXT = 300
LONGEST_NAME = 64
# No datagram is longer, for any exception and any number of ranks: the numbers above bound it.
LONGEST_BYTES = 32 << 10


class _Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what follows. As in `records`: a field may be added with a default, and an unknown one passes."""


class RankFault(_Word, frozen=True, kw_only=True):
    """What one rank had to say: its kind of interruption, and the first line of what it raised."""

    kind: str
    rank: int | None = None
    host: str = ""
    text: str = ""


class RankPhases(_Word, frozen=True, kw_only=True):
    """One rank's way through the restart: phase → seconds."""

    rank: int
    host: str
    phases: dict[str, float]


class InProcessRestart(_Word, frozen=True, kw_only=True):
    """One restart of a group inside its processes (`inprocess.Wrapper`), as the first of its active ranks reports it.

    `call` counts the wrapped calls of the processes, `iteration` the attempts of the call: it is the one that began.
    `phases`: phase → the longest that any rank took for it, in seconds, and `slowest`: which one did; they do not add
    up to `total_s`, the slowest rank's whole way from the fault into the function. `ranks`: the slowest of them.
    """

    cause: str
    call: int = 0
    iteration: int
    world_size: int
    active_world_size: int
    total_s: float
    phases: dict[str, float] = {}
    slowest: dict[str, int] = {}
    faults: tuple[RankFault, ...] = ()
    """The first ones."""
    lost: int = 0
    """How many ranks of the iteration before are not in this one."""
    missing: tuple[int, ...] = ()
    """Which ranks these are; the first 64."""
    ranks: tuple[RankPhases, ...] = ()


_decoder = msgspec.json.Decoder(InProcessRestart)


def encode(restart: InProcessRestart) -> bytes:
    """The datagram: JSON, which begins with a brace as nothing else does that a worker says."""
    return msgspec.json.encode(restart)


def decode(data: bytes) -> InProcessRestart:
    """Raises MalformedRecord for what is no such datagram."""

    def fitting(data: bytes) -> InProcessRestart:
        restart = _decoder.decode(data)
        # The journal takes no number beyond 64 bits, and JSON has them.
        msgspec.msgpack.encode(restart)
        return restart

    return checked(fitting, data, "a restart in process")
