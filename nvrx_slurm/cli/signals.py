"""Signals that end a wait: recorded, so that they act between two looks and never inside an import or a call."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator

from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}


class RecordedSignal:
    """Whether, and by which signal, this process was asked to end."""

    def __init__(self, wakeup: int) -> None:
        self._wakeup = wakeup
        self.exit_code: int | None = None
        """The exit code for the first signal that came; None: none has."""

    def wait(self, seconds: float) -> bool:
        """Wait, but no longer than until a signal comes; whether one has."""
        if self.exit_code is None:
            select.select([self._wakeup], [], [], seconds)
        return self.exit_code is not None

    def record(self, number: int, _: object) -> None:
        self.exit_code = self.exit_code or EXIT_CODES[signal.Signals(number)]


@contextlib.contextmanager
def recorded() -> Iterator[RecordedSignal]:
    """Record SIGINT and SIGTERM instead of acting on them; afterwards they act as before."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    interruption = RecordedSignal(reading)
    before = {number: signal.signal(number, interruption.record) for number in EXIT_CODES}
    woken = signal.set_wakeup_fd(writing)
    try:
        yield interruption
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
