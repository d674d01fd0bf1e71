"""Signals in messages. The supervisor imports this module: nothing but the standard library's `signal`."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 40` for one without a name: most real-time signals have none in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
