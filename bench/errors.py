"""What a benchmark can end in, besides a result."""

from __future__ import annotations

from nvrx_slurm.errors import NvrxError, WaitTimeout


class PeerMissing(NvrxError):
    """A peer to compare with is not installed; the message names the line that installs it."""


class PeerFailed(NvrxError):
    """A peer runs and does not do what is asked; the message holds its output."""


class BenchTimeout(WaitTimeout):
    """A bound passed; the message says what was waited for."""
