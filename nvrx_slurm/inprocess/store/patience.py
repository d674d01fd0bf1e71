"""A connection to a Redis or Valkey that may be restarted: it waits for the server, and asks again."""

from __future__ import annotations

import threading
import time
from typing import Any

import hiredis

from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.store.port import Cancelled
from nvrx_slurm.inprocess.store.wire import Address, Command, Line, Refused
from nvrx_slurm.log import get_logger

log = get_logger("inprocess")

ANSWER_S = 5.0
"""How long a server may take for an answer, before it is asked again on a new connection."""

FIRST_RETRY_S, LAST_RETRY_S = 0.01, 0.25

REFUSALS = ("NOAUTH", "WRONGPASS", "NOPERM")
AWAY = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "READONLY", "BUSY ", "TRYAGAIN")
"""What a server says that may serve us later: it loads its file, or fails over."""

DISK_FULL = "MISCONF"
"""It cannot write its file, and takes no more writes."""

PLACE_IS_TAKEN = "ID specified in XADD is equal or smaller"


class PatientLine:
    """One thread's connection. `asked_again`: the last answer took more than one request, and an earlier one may have
    been carried out as well."""

    def __init__(self, address: Address, *, patience_s: float) -> None:
        self._where, self._patience_s = address.where, patience_s
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
        silent_since, pause_s = None, FIRST_RETRY_S
        while not self._cancelled.is_set():
            try:
                replies = self._line.ask(commands, wait_s + answer_s)
                self._check(replies)
            except Refused as error:
                raise StoreError(f"the store at {self._where} {error}") from None
            except OSError as error:
                silent_since = self._still_patient(error, silent_since)
                self._cancelled.wait(pause_s)
                pause_s = min(2 * pause_s, LAST_RETRY_S)
            else:
                if silent_since is not None:
                    log.info("the store answers again, after %.1f s", time.monotonic() - silent_since)
                self.asked_again = silent_since is not None
                return replies
        raise Cancelled

    def _still_patient(self, error: OSError, silent_since: float | None) -> float:
        """Since when there was no answer. Raises StoreError where that is too long ago."""
        now = time.monotonic()
        if self._cancelled.is_set():
            return now
        if silent_since is None:
            log.warning("the store does not answer (%s); waiting up to %g s", error, self._patience_s)
            return now
        if now - silent_since > self._patience_s:
            raise StoreError(f"the store at {self._where} does not answer: {error}") from None
        return silent_since

    def _check(self, replies: list[Any]) -> None:
        """Raises what an error among the replies comes to. A place that is taken is none."""
        for reply in replies:
            if not isinstance(reply, hiredis.ReplyError):
                continue
            if str(reply).startswith(REFUSALS):
                raise Refused.by(reply)
            if str(reply).startswith(DISK_FULL):
                self._go_on_in_memory()
            if str(reply).startswith((*AWAY, DISK_FULL)):
                raise ConnectionError(str(reply))
            if PLACE_IS_TAKEN not in str(reply):
                raise StoreError(f"the store at {self._where} refuses a command: {reply}")

    def _go_on_in_memory(self) -> None:
        """What the server holds is also in its memory: that has to do. A site's own may not let us say so; then its
        disk is waited for."""
        log.error("the store cannot write its file (is the disk full?): it goes on in memory alone")
        self._line.ask([["CONFIG", "SET", "appendonly", "no"]], ANSWER_S)
