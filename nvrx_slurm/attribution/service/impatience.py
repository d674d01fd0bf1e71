"""Connections that have proven nothing are few and short: uvicorn itself would keep any number of them for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from nvrx_slurm.util.admission import PROOF_S, Admission, RateLimitedLog
from nvrx_slurm.util.log import get_logger

log = get_logger("attrsvc")


class Impatient(H11Protocol):
    """HTTP/1.1 whose first request must have arrived, headers and token and all, within `proof_s`.

    Of the others at most 64 are open at a time: a newer one takes the place of the oldest. Without a token
    `/healthz` is answered all the same; its connection ends with the time.
    """

    proof_s: ClassVar[float] = PROOF_S
    admission: ClassVar[Admission[Impatient]] = Admission()
    dropped: ClassVar[RateLimitedLog] = RateLimitedLog(log.warning)

    @staticmethod
    def is_known(scope: Any) -> bool:
        """Where there is no token, a whole request is proof enough."""
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_proven = False
        now = self.loop.time()
        oldest = self.admission.admit(self, now, self.client[0] if self.client else "")
        if oldest is not None:
            most = self.admission.most
            self.dropped.say(f"more than {most} connections without a token: the oldest is closed", now)
            oldest.transport.abort()
        self._hurry = self.loop.call_later(self.proof_s, self._close_unproven)

    def handle_events(self) -> None:
        super().handle_events()
        if not self._is_proven and self.cycle is not None and self.is_known(self.scope):
            self._is_proven = True
            self.admission.proven(self)
            self._hurry.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hurry.cancel()
        self.admission.gone(self)
        super().connection_lost(exc)

    def _close_unproven(self) -> None:
        self.admission.gone(self)
        self.transport.close()


def impatient(is_known: Callable[[Any], bool]) -> type[Impatient]:
    """For one server: what proves a request, and an account of its own."""
    members = {"is_known": staticmethod(is_known), "admission": Admission[Impatient]()}
    return type("ImpatientProtocol", (Impatient,), members)
