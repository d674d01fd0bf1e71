"""How a monitor looks after its sibling: by beats in the store (`ring.py`), and by its process (`neighbour.py`)."""

from __future__ import annotations

import math
import select
import time

from nvrx_slurm.errors import UntrustedRecord
from nvrx_slurm.inprocess import gates
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.gates import Joining, P, Starting
from nvrx_slurm.inprocess.ledger import Lost, Stage
from nvrx_slurm.inprocess.monitor.neighbour import Neighbour
from nvrx_slurm.inprocess.monitor.ring import Ring
from nvrx_slurm.inprocess.monitor.wire import MonitorOptions
from nvrx_slurm.inprocess.proposing import Log
from nvrx_slurm.inprocess.store.port import Connection
from nvrx_slurm.util.log import get_logger

log = get_logger("inprocess.monitor")


class SiblingWatch:
    """The scribe's: it beats, and hands on what the store answered. All methods raise what the store does."""

    def __init__(self, options: MonitorOptions, connection: Connection, log: Log, poller: select.poll) -> None:
        self._member, self._timeout_s = options.member, options.heartbeat_timeout_s
        self._connection, self._log, self._poller = connection, log, poller
        self.ring = Ring(
            member=options.member, timeout_s=options.heartbeat_timeout_s, interval_s=options.heartbeat_interval_s
        )
        self._neighbour: Neighbour | None = None

    def judge(self, asked_at: float) -> None:
        """Record whoever is silent: its beats were asked for at `asked_at`, and the log was read after that."""
        member = self.ring.silent(asked_at)
        if member is not None:
            self._record(member, Interruption.UNRESPONSIVE, f"no sign of life for {self._timeout_s:g} s")

    def meet(self) -> None:
        """Whoever is the sibling now: see whether its process can be watched from here."""
        sibling = self.ring.sibling
        if sibling is None or (self._neighbour is not None and self._neighbour.member == sibling.member):
            return
        ours, theirs = (self._joined(member) for member in (self._member, sibling.member))
        if ours is None or theirs is None:
            return
        if self._neighbour is not None:
            self._neighbour.forget(self._poller)
        self._neighbour = Neighbour(sibling.member, ours, theirs)
        self._neighbour.watch(self._poller)

    def process_ended(self) -> None:
        """The poller has told so."""
        if self._neighbour is not None:
            self._neighbour.forget(self._poller)
            self._neighbour.has_ended(time.monotonic())

    @property
    def due_at(self) -> float:
        """When `record_ended` has something to do."""
        return math.inf if self._neighbour is None else self._neighbour.record_at

    def record_ended(self) -> None:
        """The neighbour's process has ended; if its monitor has had the time to say so, and has not, we do."""
        neighbour = self._neighbour
        if neighbour is None or time.monotonic() < neighbour.record_at:
            return
        self._log.refresh()
        text = f"its process has ended, and its monitor did not say how (seen by member {self._member})"
        self._record(neighbour.member, Interruption.TERMINATED, text)
        neighbour.record_at = math.inf

    def _record(self, member: int, interruption: Interruption, text: str) -> None:
        """Unless the call is over: then members end as they please."""
        ledger = self._log.ledger
        if ledger.stage in (Stage.COMPLETED, Stage.BROKEN):
            return
        rank = self._rank_of(member)
        host = self._neighbour.host if self._neighbour is not None and self._neighbour.member == member else ""
        lost = Lost(
            iteration=ledger.iteration, member=member, interruption=interruption, rank=rank, text=text, host=host
        )
        if self._log.propose(lost):
            log.warning("rank %s (member %d) is lost: %s", rank, member, text)

    def _rank_of(self, member: int) -> int | None:
        """The rank that a member has, or had last."""
        for iteration in range(self._log.ledger.iteration, -1, -1)[:2]:
            if (place := self._arrival(gates.start(iteration), member, Starting)) is not None:
                return place.rank
        return None

    def _joined(self, member: int) -> Joining | None:
        return self._arrival(gates.JOIN, member, Joining)

    def _arrival(self, gate: str, member: int, kind: type[P]) -> P | None:
        """What a member has brought along; None: it is not there, or cannot be read."""
        payload = self._connection.arrival(gate, member)
        try:
            return None if payload is None else gates.unpack(payload, kind)
        except UntrustedRecord:
            return None
