"""What a training script may import: standard library only, cheap to import, and silent where no agent listens.

```python
from nvrx_slurm.workload import beat

for step in range(first, last):
    train(step)
    beat(step=step)
```
"""

from __future__ import annotations

# This runs in the user's process, which `nvrx_slurm.config.env` must not be loaded into: hence its own `os.environ`.
import os
from operator import index
from time import monotonic_ns

__all__ = ["beat"]

_words: memoryview | None = None
_begun = False


def beat(*, step: int) -> None:
    """Tells the agent that this worker has just done `step` (0 or more); call it once a step.

    Costs a fraction of a microsecond: three stores into memory shared with the agent, no system call, no lock, no
    thread. The first call of a process also sends the agent one datagram, so that it need not poll for the first
    step. A forked child may call it too, and then tells in its parent's name. Without an agent, and whatever is
    wrong with the channel to it, this does nothing.

    Raises TypeError, with or without an agent, if `step` is not an integer.
    """
    number = index(step)
    words = _words
    if words is not None:
        words[0] = number
        words[2] = monotonic_ns()
        words[1] += 1  # last: whoever sees the count grow finds the new step
    elif not _begun:
        _begin(number)


def _begin(step: int) -> None:
    """The first beat: finds the slot, stores the step in it, and then says so."""
    global _begun, _words
    _begun = True
    path = os.environ.get("NVRX_BEAT_FILE")
    if not path:
        return
    from nvrx_slurm.workload.slot import map_slot

    try:
        _words = map_slot(path)
    except (OSError, ValueError):
        return
    beat(step=step)
    _announce(step)


def _announce(step: int) -> None:
    """One datagram, `<rank> <step>`; lost without a trace when the agent cannot take it at once."""
    path, rank = os.environ.get("NVRX_BEAT_SOCKET"), os.environ.get("RANK")
    if not path or not rank:
        return
    import socket

    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto(f"{rank} {step}".encode(), path)
    except OSError:
        return
