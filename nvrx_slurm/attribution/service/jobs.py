"""What the service and its workers tell each other, a line of JSON at a time."""

from __future__ import annotations

from nvrx_slurm.attribution.service.wire import Wire
from nvrx_slurm.journal.verdicts import Attribution, Inquiry


class Setup(Wire, frozen=True, kw_only=True):
    """What holds for all that follows."""

    roots: tuple[str, ...]
    rules: tuple[str, ...]
    memory_bytes: int


class Job(Wire, frozen=True, kw_only=True):
    inquiry: Inquiry
    timeout_s: float


class Result(Wire, frozen=True, kw_only=True):
    """One of the first two is set. `leaving`: the worker ends after this, and another is to take its place."""

    attribution: Attribution | None = None
    problem: str | None = None
    leaving: bool = False
