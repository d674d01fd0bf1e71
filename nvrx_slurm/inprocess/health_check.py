"""Whether a rank can go on."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from nvrx_slurm.inprocess import callback_support
from nvrx_slurm.inprocess.callback_support import bounded
from nvrx_slurm.inprocess.exception import FaultCounterExceeded, HealthCheckError, OptionError
from nvrx_slurm.inprocess.state import Callback, FrozenState

__all__ = ["ChainedHealthCheck", "CudaHealthCheck", "FaultCounter", "FaultCounterExceeded", "HealthCheck"]


class HealthCheck(Callback):
    """Checks this process and its node alone: other ranks may be gone, or still in the function.

    Called after every fault, once Finalize has returned: an exception of it takes this rank out, and ends its
    process, before the others go on. Called in every iteration before the function, too: there an exception is a
    fault, after which the check is called again. `Compose` makes one of several, and `ChainedHealthCheck` one whose
    error names the check that failed.
    """


class ChainedHealthCheck(HealthCheck):
    """Several checks, one after the other, in the order given. The first that fails ends the chain.

    Raises HealthCheckError that names the check by its place and class; its cause is what the check raised. Raises
    OptionError for what is no health check.
    """

    def __init__(self, *checks: HealthCheck) -> None:
        for check in checks:
            if not isinstance(check, HealthCheck):
                raise OptionError(f"ChainedHealthCheck takes health checks, not {check!r}")
        self.checks = checks

    def __call__(self, state: FrozenState) -> FrozenState:
        for place, check in enumerate(self.checks, start=1):
            try:
                check(state)
            except Exception as error:
                name, words = type(check).__name__, f"{type(error).__name__}: {error}"
                raise HealthCheckError(f"check {place} of {len(self.checks)}, {name}, failed: {words}") from error
        return state


@dataclass(frozen=True)
class CudaHealthCheck(HealthCheck):
    """This rank's GPU completes its work within `timeout`; without a CUDA context in this process: nothing.

    Waits for all kernels of the device: only then is it certain that none of them breaks the context later. Raises
    what CUDA raises (after an error of a kernel its context never works again), and TimeoutError.
    """

    timeout: datetime.timedelta = datetime.timedelta(seconds=30)

    def __call__(self, state: FrozenState) -> FrozenState:
        in_use = callback_support.initialised()
        if in_use is None:
            return state
        device = callback_support.own_device(in_use)

        def synchronise() -> None:
            # The first call waits for the kernels, the second one shows whether they have broken the context.
            in_use.synchronize(device)
            in_use.synchronize(device)

        bounded(synchronise, self.timeout, f"CudaHealthCheck: the work on device {device} of rank {state.rank}")
        return state


class FaultCounter(HealthCheck):
    """Counts the faults of this process: exceptions of the function on this rank, and no other rank's.

    Raises FaultCounterExceeded at the first one beyond `max_rank_faults` (None: never). The count is this object's,
    over all calls that it is used in. Raises OptionError for less than 0.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        if max_rank_faults is not None and max_rank_faults < 0:
            raise OptionError(
                f"FaultCounter: max_rank_faults is {max_rank_faults}; it must be 0 or more", "max_rank_faults"
            )
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        if state.fn_exception is None:
            return state
        self.faults_count += 1
        if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
            many = f"{self.faults_count} times, more than max_rank_faults={self.max_rank_faults}"
            raise FaultCounterExceeded(f"rank {state.rank} has failed {many}") from state.fn_exception
        return state
