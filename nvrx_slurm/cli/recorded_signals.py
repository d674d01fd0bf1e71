"""Signals that a command waits for, or ends by."""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Self

from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}


def exit_on_sigterm() -> None:
    """Have SIGTERM end this process by an exception, as Ctrl-C does: what it has set up is undone on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))


class RecordedSignals:
    """Records SIGINT and SIGTERM instead of acting on them, until the context ends.

    A signal then acts between two looks at a job, and never inside of an import or a call.
    """

    exit_code: int | None = None
    """The exit code that stands for the first signal; None: none has arrived."""

    def __enter__(self) -> Self:
        # `set_wakeup_fd` refuses a descriptor that blocks.
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {number: signal.signal(number, self._record) for number in EXIT_CODES}
        # A signal writes a byte into the pipe, which ends the `select` of `wait`, whenever it arrives.
        self._woken = signal.set_wakeup_fd(self._pipe[1])
        return self

    def __exit__(self, *_: object) -> None:
        # First: until then a signal writes into the pipe, whose number may be another file's once it is closed.
        signal.set_wakeup_fd(self._woken)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for descriptor in self._pipe:
            os.close(descriptor)

    def wait(self, seconds: float | None) -> bool:
        """Wait until a signal arrives, but no longer than this; whether one has."""
        if self.exit_code is None:
            select.select([self._pipe[0]], [], [], seconds)
        return self.exit_code is not None

    def _record(self, number: int, _: object) -> None:
        self.exit_code = self.exit_code or EXIT_CODES[signal.Signals(number)]
