"""The time in which a worker restarts its function inside its own process: `nvrx_slurm.inprocess` opens it."""

from __future__ import annotations

from time import monotonic_ns

from nvrx_slurm.workload.board import Board, board
from nvrx_slurm.workload.layout import BEATS, BEATS_BEFORE, RESTARTED, UNDER_WAY
from nvrx_slurm.workload.sections import section

NAME = "in-process restart"


class restarting(section):
    """`with restarting(timeout):` in the main thread, from the end of the function to its next beginning.

    A section with this timeout, and more. Until its end nothing else counts as a hang. After it the worker is at its
    start-up again until it next beats, since the function begins with imports and a checkpoint as in a new process.
    And the silence before it is not learned from: it may have been a hang.
    """

    __slots__ = ("_shared",)

    def __init__(self, timeout: float | str) -> None:
        super().__init__(NAME, timeout)
        self._shared: Board | None = None

    def __enter__(self) -> None:
        self._shared = board()
        if self._shared is not None:
            words = self._shared.words
            words[BEATS_BEFORE] = words[BEATS]  # first: from here on no silence is kept
            words[RESTARTED] = UNDER_WAY
        super().__enter__()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        if self._shared is not None and self._shared is board():  # not in a child that was forked meanwhile
            self._shared.words[RESTARTED] = monotonic_ns()  # last: in between nothing counts
