"""In-process restart: a fault restarts the wrapped function on all healthy ranks, inside the same processes.

```python
from nvrx_slurm import inprocess

@inprocess.Wrapper(initialize=inprocess.RetryController(max_iterations=10))
def train(call: inprocess.CallWrapper, config: Config) -> None: ...

train(config)
```

A group of ranks needs a store that is in none of them (`store.py`), and nothing else: any launcher will do.

The modules, and how they work together: "Restarts inside the processes" in docs/architecture.md.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvrx_slurm.inprocess import (
        abort,
        attribution,
        completion,
        exception,
        finalize,
        health_check,
        initialize,
        monitor_thread,
        rank_assignment,
        rank_filter,
        state,
        store,
        terminate,
    )
    from nvrx_slurm.inprocess.abort import Abort, AbortTorchDistributed
    from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
    from nvrx_slurm.inprocess.call import CallWrapper
    from nvrx_slurm.inprocess.completion import Completion
    from nvrx_slurm.inprocess.compose import Compose
    from nvrx_slurm.inprocess.exception import (
        HealthCheckError,
        InternalError,
        RankDiscarded,
        RankShouldRestart,
        RestartAbort,
        RestartError,
    )
    from nvrx_slurm.inprocess.finalize import Finalize, ThreadedFinalize
    from nvrx_slurm.inprocess.health_check import ChainedHealthCheck, CudaHealthCheck, FaultCounter, HealthCheck
    from nvrx_slurm.inprocess.initialize import Initialize, RetryController
    from nvrx_slurm.inprocess.rank_assignment import (
        ActivateAllRanks,
        ActiveWorldSizeDivisibleBy,
        FillGaps,
        FilterCountGroupedByKey,
        Layer,
        LayerFlag,
        MaxActiveWorldSize,
        RankAssignment,
        RankAssignmentCtx,
        ShiftRanks,
        Tree,
    )
    from nvrx_slurm.inprocess.rank_filter import RankFilter
    from nvrx_slurm.inprocess.state import FrozenState, Mode, State
    from nvrx_slurm.inprocess.store import FileStore, RedisStore, Store, TCPStore
    from nvrx_slurm.inprocess.terminate import Terminate
    from nvrx_slurm.inprocess.timeline import Restart
    from nvrx_slurm.inprocess.wrap import Wrapper

# fmt: off
__all__ = [
    "Abort", "AbortTorchDistributed", "ActivateAllRanks", "ActiveWorldSizeDivisibleBy", "CallWrapper",
    "ChainedHealthCheck", "Completion", "Compose", "CudaHealthCheck", "FaultCounter", "FileStore", "FillGaps",
    "FilterCountGroupedByKey", "Finalize", "FrozenState", "HealthCheck", "HealthCheckError", "Initialize",
    "InternalError", "Interruption", "InterruptionRecord", "Layer", "LayerFlag", "MaxActiveWorldSize", "Mode",
    "RankAssignment", "RankAssignmentCtx", "RankDiscarded", "RankFilter", "RankShouldRestart", "RedisStore",
    "Restart", "RestartAbort", "RestartError", "RetryController", "ShiftRanks", "State", "Store", "TCPStore",
    "Terminate", "ThreadedFinalize", "Tree", "Wrapper",
    # modules
    "abort", "attribution", "completion", "exception", "finalize", "health_check", "initialize", "monitor_thread",
    "rank_assignment", "rank_filter", "state", "store", "terminate",
]

# The names of each module. A module is loaded when a name of it is used: the monitor process needs few of them.
_HOMES = {
    "abort": ("Abort", "AbortTorchDistributed"),
    "attribution": ("Interruption", "InterruptionRecord"),
    "call": ("CallWrapper",),
    "completion": ("Completion",),
    "compose": ("Compose",),
    "exception": (
        "HealthCheckError", "InternalError", "RankDiscarded", "RankShouldRestart", "RestartAbort", "RestartError",
    ),
    "finalize": ("Finalize", "ThreadedFinalize"),
    "health_check": ("ChainedHealthCheck", "CudaHealthCheck", "FaultCounter", "HealthCheck"),
    "initialize": ("Initialize", "RetryController"),
    "rank_assignment": (
        "ActivateAllRanks", "ActiveWorldSizeDivisibleBy", "FillGaps", "FilterCountGroupedByKey", "Layer", "LayerFlag",
        "MaxActiveWorldSize", "RankAssignment", "RankAssignmentCtx", "ShiftRanks", "Tree",
    ),
    "rank_filter": ("RankFilter",),
    "state": ("FrozenState", "Mode", "State"),
    "store": ("FileStore", "RedisStore", "Store", "TCPStore"),
    "terminate": ("Terminate",),
    "timeline": ("Restart",),
    "wrap": ("Wrapper",),
}
# fmt: on


def __getattr__(name: str) -> object:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is not None:
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
