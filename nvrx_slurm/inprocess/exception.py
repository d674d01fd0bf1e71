"""What the wrapper raises: the tree of RestartError, and two of BaseException that the function should not catch."""

from __future__ import annotations

from nvrx_slurm.errors import EXIT_TIMEOUT, EXIT_UNREACHABLE, EXIT_USAGE, NvrxError


class RestartError(NvrxError):
    """This rank leaves the group; the others may go on without it. Base of all that is an `Exception`."""


class OptionError(RestartError, ValueError):
    """An option of the wrapper is wrong, or two of them conflict; the message names them, and what is valid.

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
    """A health check found this rank unfit to go on; the cause is what the check raised."""


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
