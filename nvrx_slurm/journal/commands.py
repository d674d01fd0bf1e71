"""What passes between a user who runs a command beside a rank (`nvrx-slurm exec`) and the agent that runs it.

Two streams of the store carry it, one each way, both named after the request. None of it is in the journal: that has
the request, and how the command ended.
"""

from __future__ import annotations

import msgspec

from nvrx_slurm.journal.records import Count, Record, Step
from nvrx_slurm.util.decoding import decode

# A command is killed when its user has not been heard for so long.
ASKER_GONE_S = 5.0

# So many pieces of output may be on their way: a command that prints faster than its user reads waits.
WINDOW = 64

CHUNK_BYTES = 32 << 10
# How long the store keeps the streams of a command that has no reader any more.
KEPT_S = 600


class AskerWord(Record, frozen=True, kw_only=True):
    """The user is there. `taken`: the number of the last piece that has arrived; `signal`: one for the command;
    `gone`: the user leaves, and the command has to end."""

    taken: Step = 0
    signal: Count = 0
    gone: bool = False


class CommandWord(Record, frozen=True, kw_only=True):
    """The agent is there. `data` is a piece of what the command has printed, to its standard output or, with
    `is_error`, its standard error. `over`: how it ended, behind all output."""

    data: bytes = b""
    is_error: bool = False
    over: CommandEnd | None = None


class CommandEnd(Record, frozen=True, kw_only=True):
    """How a command ended; one of the three. `error`: why it could not be run, or was ended."""

    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None


_asker = msgspec.msgpack.Decoder(AskerWord)
_command = msgspec.msgpack.Decoder(CommandWord)


def unpack_asker(data: bytes) -> AskerWord:
    """Raises MalformedRecord."""
    return decode(_asker.decode, data, "a word of a command's user")


def unpack_command(data: bytes) -> CommandWord:
    """Raises MalformedRecord."""
    return decode(_command.decode, data, "a word of a command")
