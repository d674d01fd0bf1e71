"""What the wrapper raises.

RestartError (NvrxError)      this rank leaves the group; the others may go on without it
├── OptionError               an option of the wrapper is wrong, or two of them contradict each other
├── NestedCallError           a wrapped function was called inside of another one
├── HealthCheckError          a health check found this rank unfit; its cause is what the check raised
├── FaultCounterExceeded      this rank has failed more often than `FaultCounter` allows
├── RankDiscarded             the rank assignment leaves this rank out
├── TimeoutError              a bound passed; names the ranks that did not arrive
├── StoreError                the store cannot be reached, or holds another run's keys
└── InternalError             a callback that must not fail did, or the group's ranks disagree

RestartAbort (BaseException)        raised by a callback or the function: this rank makes no further attempt
RankShouldRestart (BaseException)   raised in the function when the group restarts; not to be caught for good
"""

from __future__ import annotations

from nvrx_slurm.errors import EXIT_TIMEOUT, EXIT_UNREACHABLE, EXIT_USAGE, NvrxError


class RestartError(NvrxError):
    """Base of what the wrapper raises as an `Exception`."""


class OptionError(RestartError, ValueError):
    """An option of the wrapper is wrong; the message names it, and what is valid.

    `options`: the options, arguments or environment variables that are wrong, as far as known.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *options: str) -> None:
        super().__init__(message)
        self.options = options


class NestedCallError(RestartError):
    """A wrapped function was called inside of another one, or outside of the main thread."""

    exit_code = EXIT_USAGE


class HealthCheckError(RestartError):
    """A health check found this rank unfit to go on."""


class FaultCounterExceeded(RestartError):
    """This rank has failed more often than `FaultCounter` allows."""


class RankDiscarded(RestartError):
    """The rank assignment leaves this rank out: it is healthy, and has no place in the next iteration."""


# Users import it by this name; qualified, it shadows nothing.
class TimeoutError(RestartError):
    """A bound has passed; the message names what did not end, or the ranks that did not arrive."""

    exit_code = EXIT_TIMEOUT


class StoreError(RestartError):
    """The store cannot be reached, or holds the keys of another run."""

    exit_code = EXIT_UNREACHABLE


class InternalError(RestartError):
    """A callback that must not fail did, or the ranks of the group disagree."""


class RestartAbort(BaseException):
    """Raised by the function or a callback: this rank leaves at once, also where a restart would be possible."""


class RankShouldRestart(BaseException):
    """Raised in the wrapped function when the group restarts, and again where it is caught, until the function is
    left."""
