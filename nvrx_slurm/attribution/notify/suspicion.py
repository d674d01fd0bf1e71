"""The ledger of suspect nodes, told like any other receiver: it may be as far away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from nvrx_slurm.attribution.ledger import Blame, blames_of, open_ledger
from nvrx_slurm.attribution.notify.decided import Decided
from nvrx_slurm.attribution.notify.receiver import Later, Refused, bounded
from nvrx_slurm.attribution.notify.spool import Parcel
from nvrx_slurm.errors import MalformedRecord, NvrxError, StoreUnreachable, WaitTimeout
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json

LEDGER_S = 10.0


class Suspicion:
    """Blames of nodes, for the ledger at `where`."""

    name, batch = "ledger", 1

    def __init__(self, where: str | None, *, cluster: str, clock: Clock) -> None:
        self._where, self._cluster, self._clock = where, cluster, clock

    def body(self, decided: Decided) -> bytes | None:
        now = self._clock.wall()
        blames = blames_of(decided.inquiry, decided.attributions, cluster=self._cluster, at=now)
        return msgspec.json.encode(blames) if blames else None

    async def deliver(self, parcels: Sequence[Parcel]) -> Mapping[str, str | None]:
        (parcel,) = parcels
        try:
            blames = decode_json(list[Blame], parcel.body, "the blames")
        except MalformedRecord:
            return {parcel.identity: "what waits in the spool blames nobody"}
        try:
            await bounded(lambda: self._note(blames), LEDGER_S)
        except (TimeoutError, WaitTimeout) as error:
            raise Later(f"the ledger does not answer ({error or 'in time'})") from None
        except StoreUnreachable as error:
            raise (Refused if error.refused else Later)(str(error)) from None
        except NvrxError as error:
            raise Refused(str(error)) from None
        return {parcel.identity: None}

    async def close(self) -> None:
        """It holds nothing open."""

    def _note(self, blames: Sequence[Blame]) -> None:
        open_ledger(self._where, cluster=self._cluster, clock=self._clock).blame(blames)
