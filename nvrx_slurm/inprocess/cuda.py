"""CUDA as far as this process uses it already: nothing here imports torch, or makes a CUDA context."""

from __future__ import annotations

import sys
from typing import Any

from nvrx_slurm.inprocess.environment import launch
from nvrx_slurm.inprocess.exception import OptionError


def initialised() -> Any | None:
    """`torch.cuda` if this process has a CUDA context; else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_available() and cuda.is_initialized() else None


def own_device(cuda: Any) -> int:
    """This rank's device: the one of its local rank; the calling thread's own where no launcher gave it a local rank,
    or where it sees fewer devices than that (a launcher that shows each rank only its own)."""
    try:
        local_rank = launch().local_rank
    except OptionError:
        local_rank = None
    if local_rank is not None and local_rank < cuda.device_count():
        return local_rank
    return int(cuda.current_device())
