"""Parts of a worker's run that may take longer than a step, each with a deadline of its own."""

from __future__ import annotations

from _thread import get_native_id

from nvrx_slurm.workload.board import Opened, board
from nvrx_slurm.workload.layout import NAME_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])

LONGEST_S = 1e9


class section:
    """`with section("checkpoint", timeout="10m"):` reports to the agent what this worker does, and how long it may
    take.

    `timeout` is in seconds, or a text like `90s`, `10m`, `1h30m`. Without one, the deadline is learned from the run
    if job.yaml says so, and else there is none. Sections may be nested: each keeps its own deadline. They may be
    open in several threads and coroutines, and end in any order; an exception ends them too. Threads may share an
    object, coroutines make one each. While one of the main
    thread is open, the agent does not wait for the next step; one of another thread does not stop that clock. Also a
    decorator of functions and coroutine functions: each call is a section.

    Costs a few microseconds: no thread, and no lock. Without an agent, in a forked child, and in all processes of a
    worker but the first that opens a section, it does nothing. At most 16 are watched at a time.

    Raises TypeError or ValueError, with or without an agent, if `name` (1 to 40 bytes of printable text) or `timeout`
    (more than 0) is wrong, and TypeError if it decorates a generator function.
    """

    __slots__ = ("_name", "_open", "_timeout_ns")

    def __init__(self, name: str, timeout: float | str | None = None) -> None:
        self._open: list[Opened] = []  # more than one if it is entered again while it is open
        self._name = _checked_name(name)
        self._timeout_ns = 0 if timeout is None else max(1, int(_seconds(timeout) * 1e9))

    def __enter__(self) -> None:
        if (shared := board()) is not None:
            opened = Opened(shared)
            self._open.append(opened)  # before it is reported, so that an interrupt in between does not drop it
            opened.publish(self._name, self._timeout_ns)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        # Other threads may be in it too, and change the list: of a copy, the latest of this thread.
        me = get_native_id()
        mine = next((each for each in self._open[::-1] if each.thread == me), None)
        if mine is not None:
            self._open.remove(mine)
            mine.end(succeeded=kind is None)
        elif self._open:  # entered in another thread
            self._open.pop().end(succeeded=kind is None)

    def __call__(self, function: Function) -> Function:
        from nvrx_slurm.workload.decorator import decorated

        return decorated(function, lambda: section(self._name, self._timeout_ns / 1e9 or None))


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a section's name is a text, not {type(name).__name__}")
    if not name or not name.isprintable() or len(name.encode()) > NAME_BYTES:
        raise ValueError(f"{name!r} is no name for a section: it takes 1 to {NAME_BYTES} bytes of printable text")
    return name


def _seconds(timeout: object) -> float:
    if isinstance(timeout, str):
        from nvrx_slurm.util.durations import parse_duration

        seconds = parse_duration(timeout)
    elif isinstance(timeout, bool) or not hasattr(timeout, "__float__"):
        raise TypeError(f"a section's timeout is seconds or a text like '10m', not {type(timeout).__name__}")
    else:
        seconds = float(timeout)
    if not 0 < seconds < LONGEST_S:
        raise ValueError(f"a section's timeout is more than 0 s and less than {LONGEST_S:.0f} s, not {timeout!r}")
    return seconds
