"""A connection to a Redis or Valkey that may be restarted: it waits for the server, and asks again."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import hiredis

from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.store.port import Cancelled
from nvrx_slurm.inprocess.store.wire import Address, Command, Line, Refused
from nvrx_slurm.store.retry import IN_MEMORY, GiveUp, StoreRetry
from nvrx_slurm.util.log import get_logger

log = get_logger("inprocess")

ANSWER_S = 5.0
"""How long a server may take for an answer, before it is asked again on a new connection."""

PLACE_IS_TAKEN = "ID specified in XADD is equal or smaller"


class PatientLine:
    """One thread's connection. `embedded`: this package has started the server for these ranks or this job, and may
    change its configuration. `asked_again`: the last answer took more than one request, and an earlier one may have
    been carried out as well."""

    def __init__(self, address: Address, *, patience_s: float, embedded: bool = False) -> None:
        self._where, self._patience_s, self._embedded = address.where, patience_s, embedded
        self._line = Line(address)
        self._cancelled = threading.Event()
        self.asked_again = False

    def cancel(self) -> None:
        """From any thread: whoever asks stops waiting, for good."""
        self._cancelled.set()
        self._line.cut()

    def close(self) -> None:
        self._line.close()

    def ask(self, *commands: Command, wait_s: float = 0.0) -> list[Any]:
        """Send all in one go, until the server answers: all replies. An error among them is one of a place that is
        taken. `wait_s`: how long the answer itself may take.

        Raises Cancelled; StoreError where it has not answered for the patience, refuses us, or refuses a command.
        """
        answer_s = min(ANSWER_S, self._patience_s)
        retry = StoreRetry(self._where, self._patience_s, embedded=self._embedded)
        self.asked_again = False
        while not self._cancelled.is_set():
            try:
                replies = self._line.ask(commands, wait_s + answer_s)
            except Refused as error:
                raise StoreError(f"the store at {self._where} {error}") from None
            except OSError as error:
                self._wait(retry, error)
                continue
            if (refusal := _refusal(replies)) is not None:
                self._wait(retry, refusal)
                continue
            if message := retry.answered(time.monotonic()):
                log.info("%s", message)
            return replies
        raise Cancelled

    def _wait(self, retry: StoreRetry, error: Exception) -> None:
        """Until it is worth asking again. Raises StoreError where it is not."""
        decision = retry.failed(error, time.monotonic())
        if self._cancelled.is_set():  # the error is that of a line which was cut
            return
        if isinstance(decision, GiveUp):
            raise StoreError(decision.message) from None
        if decision.warning:
            log.warning("%s", decision.warning)
        if decision.reconfigure:
            with contextlib.suppress(OSError, Refused):  # the next answer says how the server is
                self._line.ask([IN_MEMORY], ANSWER_S)
        if decision.reconnect:
            self._line.close()
        self.asked_again = True
        self._cancelled.wait(decision.pause_s)


def _refusal(replies: list[Any]) -> Exception | None:
    """The first error among the replies. A place that is taken is none."""
    errors = (reply for reply in replies if isinstance(reply, hiredis.ReplyError))
    return next((error for error in errors if PLACE_IS_TAKEN not in str(error)), None)
