"""A worker's way to its agent: one datagram at a time, never waited for."""

from __future__ import annotations

# This runs in the user's process, which `nvrx_slurm.jobspec.env` must not be loaded into: hence its own `os.environ`.
import os


def has_agent() -> bool:
    """Whether an agent listens to this process."""
    return bool(os.environ.get("NVRX_BEAT_SOCKET"))


def tell_agent(word: bytes) -> None:
    """One datagram; lost without a trace when there is no agent, or it cannot take it at once."""
    path = os.environ.get("NVRX_BEAT_SOCKET")
    if not path:
        return
    import socket

    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto(word, path)
    except OSError:
        return
