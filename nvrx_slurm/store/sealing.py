"""Records in the store are signed with the job's key; what is not signed, or cannot be decoded, is set aside.

Others may hold the password of a site's store and write into a job's keys. Each record is signed for the place where
it stands, so it is worth nothing in another key, field, job or generation. What its place does not distinguish (an
item of a stream that is copied to the stream's end) carries a number that grows: docs/decisions/0025.
"""

from __future__ import annotations

import msgspec

from nvrx_slurm.errors import ForgedRecord, MalformedRecord, UntrustedRecord
from nvrx_slurm.journal.records import Heartbeat, Record, RecordsRefused, pack
from nvrx_slurm.util.admission import RateLimitedLog
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.job_key import SIGNATURE_BYTES, JobKey
from nvrx_slurm.util.log import get_logger

log = get_logger("store")

NUMBER_BYTES = 8
LONGEST_WHY = 200


class RefusedRecords:
    """Counts the records that a reader has set aside, by stream, and logs one line a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._log = RateLimitedLog(log.error)
        self._since: dict[str, RecordsRefused] = {}

    def add(self, stream: str, identity: bytes | str, error: UntrustedRecord) -> None:
        """One was set aside. `stream` is its key, `identity` where it stands there."""
        where = identity.decode(errors="replace") if isinstance(identity, bytes) else identity
        line = f"{stream}: {where} was set aside: {error}; does another user of the store hold its password?"
        self._log.say(line, self._clock.monotonic())
        # One record for each stream and period: a flood of forged records must not fill the journal.
        before = self._since.get(stream) or RecordsRefused(stream=stream, count=0, why=str(error)[:LONGEST_WHY])
        self._since[stream] = msgspec.structs.replace(before, count=before.count + 1)

    def take(self) -> list[RecordsRefused]:
        """What was set aside since the last call."""
        taken, self._since = list(self._since.values()), {}
        return taken


def field_m(fields: dict[bytes, bytes]) -> bytes:
    """The record of a stream's item. Raises MalformedRecord."""
    try:
        return fields[b"m"]
    except KeyError:
        raise MalformedRecord("the item has no field m") from None


def seal_heartbeat(key: JobKey, stream: str, beat: Heartbeat, number: int) -> bytes:
    """A heartbeat, signed for its sender: the field `who` beside it cannot name another one."""
    return key.sign(f"{stream} {beat.incarnation}", number.to_bytes(NUMBER_BYTES, "big") + pack(beat))


def open_heartbeat(key: JobKey, stream: str, who: bytes, sealed: bytes) -> tuple[bytes, bytes]:
    """The heartbeat's number, which compares as the number itself does, and the packed `Heartbeat`. Raises
    UntrustedRecord."""
    try:
        place = f"{stream} {who.decode()}"
    except UnicodeDecodeError:
        raise MalformedRecord("the sender's name is not UTF-8") from None
    data = key.verify(place, sealed)
    return data[:NUMBER_BYTES], data[NUMBER_BYTES:]


def order_place(stream: str, generation: int) -> str:
    """An order of an earlier generation does not verify in a later one."""
    return f"{stream}:{generation}"


def seal_order(key: JobKey, place: str, order: Record, number: int) -> bytes:
    """An order with its number, which grows from order to order of a job's generation."""
    return key.sign(place, number.to_bytes(NUMBER_BYTES, "big") + pack(order))


def claimed_number(sealed: bytes) -> int:
    """The number of an order, before it is proven."""
    return int.from_bytes(sealed[SIGNATURE_BYTES:][:NUMBER_BYTES], "big")


def open_order(key: JobKey, place: str, sealed: bytes, passed: int) -> tuple[int, bytes]:
    """The order's number and its packed record. Raises ForgedRecord for one whose number was passed already: it is a
    copy of an older one."""
    data = key.verify(place, sealed)
    number = int.from_bytes(data[:NUMBER_BYTES], "big")
    if number <= passed:
        raise ForgedRecord(f"order {number} in {place} came again after order {passed}: it is a copy")
    return number, data[NUMBER_BYTES:]
