"""A thread's own view of a call's log, and its way to add to it."""

from __future__ import annotations

from nvrx_slurm.inprocess.ledger import AnyEntry, Ledger, accepts, decode, encode, fold
from nvrx_slurm.inprocess.store.port import Connection


class Log:
    """What one thread has read of the log so far."""

    def __init__(self, connection: Connection, members: int) -> None:
        self._connection = connection
        self.ledger = Ledger(members)

    def refresh(self) -> None:
        """Read on."""
        self.ledger = fold(self.ledger, map(decode, self._connection.read(self.ledger.length, 0.0)))

    def propose(self, entry: AnyEntry) -> bool:
        """Add an entry, unless it means nothing (any more). Returns whether it is in the log by this call."""
        data = encode(entry)
        if not accepts(self.ledger, entry):
            self.refresh()  # perhaps it means nothing yet, to one who has not read on
        while accepts(self.ledger, entry):
            if self._connection.append(data, self.ledger.length):
                self.refresh()
                return True
            self.refresh()
        return False
