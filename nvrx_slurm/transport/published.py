"""`Published`: a payload's ref as it stands in the job's store, and who has put it there. Pure."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Annotated

import msgspec

from nvrx_slurm.errors import MalformedRecord, UsageError
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.util.decoding import decode

VERSION = 1
LONGEST_RECORD_BYTES = 128 << 10
MOST_PUBLISHERS = 4096
LARGEST_WORD = (1 << 64) - 1

_TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_Name = Annotated[str, msgspec.Meta(max_length=255)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Published(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A ref, and the worker that has published it: its `node`, and which life of which `replica` it is (its cycle
    within its generation); outside of a job there is no replica.

    `id`: its place in the topic; ids of one topic grow. `publisher` and `number` tell a record that was put there
    twice, because the answer to the first was lost. `version` grows only where older readers must not read on.
    """

    ref: PayloadRef
    replica: _Name = ""
    node: _Name = ""
    generation: _Count = 0
    cycle: _Count = 0
    publisher: _Name = ""
    number: _Count = 0
    version: _Count = VERSION
    id: str = ""

    def is_outlived_by(self, other: Published) -> bool:
        """Whether `other` comes from a later life of the same replica: then nobody is left who would serve this."""
        same = self.replica == other.replica and bool(self.replica)
        return same and (self.generation, self.cycle) < (other.generation, other.cycle)


class Duplicates:
    """Knows a record that a reader has had. A publisher's numbers grow, and it publishes one after the other."""

    def __init__(self, most: int = MOST_PUBLISHERS) -> None:
        self._most = most
        self._last: OrderedDict[str, int] = OrderedDict()

    def has_had(self, published: Published) -> bool:
        """Whether it was there before; it has been from now on."""
        publisher, number = published.publisher, published.number
        if not publisher:
            return False
        last = self._last.pop(publisher, -1)
        self._last[publisher] = max(last, number)
        if len(self._last) > self._most:
            self._last.popitem(last=False)  # who has been silent for longest
        return number <= last


def pack(published: Published) -> bytes:
    """Raises TransportError for what no reader would take."""
    data = _encode(published)
    unpack(data, "")
    return data


def unpack(data: bytes, identity: str) -> Published:
    """Raises TransportError for what is no record, or one of a version that is not ours."""
    if len(data) > LONGEST_RECORD_BYTES:
        raise TransportError(f"this record has {len(data)} bytes; none is longer than {LONGEST_RECORD_BYTES}")
    try:
        published = decode(_decoder.decode, data, "the item")
    except (MalformedRecord, UsageError) as error:
        raise TransportError(f"this is no record of a payload: {error}") from None
    if published.version > VERSION:
        raise TransportError(f"this record is of version {published.version}; this side reads {VERSION}")
    return msgspec.structs.replace(published, id=identity)


def checked_topic(topic: str) -> str:
    """Raises UsageError for what cannot be part of a key."""
    if not isinstance(topic, str) or not _TOPIC.fullmatch(topic):
        raise UsageError(
            f"topic {topic!r} must be 1 to 64 letters, digits, `.`, `_` and `-`, no sign at its beginning"
        )
    return topic


def checked_id(identity: str) -> str:
    """Raises UsageError for what is no place in a topic."""
    if not isinstance(identity, str) or not _ID.fullmatch(identity) or max(place(identity)) > LARGEST_WORD:
        raise UsageError(f"after {identity!r} must be the `id` of a Published, such as 1700000000000-0")
    return identity


def place(identity: str) -> tuple[int, int]:
    """An id as numbers, in the order of the topic."""
    milliseconds, _, number = identity.partition("-")
    return int(milliseconds), int(number)


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Published)
