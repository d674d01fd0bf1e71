"""A user's end of the two streams of a command that an agent runs (`journal/commands.py`)."""

from __future__ import annotations

from nvrx_slurm.errors import UntrustedRecord
from nvrx_slurm.journal.commands import KEPT_S, AskerWord, CommandWord, unpack_command
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.report.journal_stream import answered, connect
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.store.sealing import RefusedRecords, field_m, open_order, seal_order
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.job_key import JobKey


class CommandStream:
    """One connection. Every method raises StoreUnreachable where the store does not answer."""

    def __init__(self, address: StoreAddress, request: str) -> None:
        self._where, self._key = address.url, JobKey(address.token)
        keys = Keys(address.job)
        self._in, self._out = keys.command_in(request), keys.command_out(request)
        self._redis = connect(address)
        self._refused = RefusedRecords(SystemClock())
        self._after: str | bytes = "0-0"
        self._said = 0
        self.passed = 0
        """The number of the last word that was read."""

    def close(self) -> None:
        self._redis.close()

    def say(self, word: AskerWord) -> None:
        """Post a word to the agent."""
        self._said += 1
        sealed = seal_order(self._key, self._in, word, self._said)

        def send() -> None:
            self._redis.xadd(self._in, {"m": sealed}, maxlen=KEPT_S)
            self._redis.expire(self._in, KEPT_S)

        answered(self._where, send)

    def read(self, wait_s: float) -> list[CommandWord]:
        """The agent's words that are new, in order; waits up to `wait_s` for one."""
        block_ms = max(1, int(wait_s * 1000))
        reply = answered(self._where, lambda: self._redis.xread({self._out: self._after}, block=block_ms))
        words = []
        for _, items in reply or ():
            for identity, fields in items:
                self._after = identity
                try:
                    self.passed, packed = open_order(self._key, self._out, field_m(fields), self.passed)
                    words.append(unpack_command(packed))
                except UntrustedRecord as error:
                    self._refused.add(self._out, identity, error)
        return words
