"""What the service is sent and what it answers. An unknown field passes, so that two versions can meet."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry

# What is wanted: that the paths are remembered; an answer that may sharpen while logs grow; an answer for good.
Intent = Literal["track_only", "progressive", "terminal"]

State = Literal["tracked", "queued", "running", "done", "failed"]


class ServiceMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all that follows."""


class Submission(ServiceMessage, frozen=True, kw_only=True):
    """An inquiry. `settled`: all workers of the cycle are gone, so that their logs are whole."""

    inquiry: Inquiry
    intent: Intent
    settled: bool = False


class Answer(ServiceMessage, frozen=True, kw_only=True):
    """How far an inquiry has come.

    Where the state is `done`, the attribution is the last word for its key. Before, it is what the logs have said
    so far, and `revision` counts how often that changed. `problem` says why there is none.
    `ignored`: keys of what was submitted just now that this version does not know.
    """

    id: str
    key: str
    state: State
    attribution: Attribution | None = None
    problem: str | None = None
    revision: int = 0
    ignored: tuple[str, ...] = ()


class InFlight(ServiceMessage, frozen=True, kw_only=True):
    """Inquiries that are not answered yet, the oldest first: `total` of them, of which 1,000 are shown."""

    inquiries: tuple[Answer, ...]
    total: int


class Health(ServiceMessage, frozen=True, kw_only=True):
    status: Literal["ok", "draining"]


class WorkerStats(ServiceMessage, frozen=True, kw_only=True):
    """One worker process; `pid` is None while it is not started, `busy_s` while it is idle."""

    pid: int | None
    busy_s: float | None
    analyses: int


class Stats(ServiceMessage, frozen=True, kw_only=True):
    """Inquiries by state, and what was done since the start."""

    inquiries: dict[State, int]
    analyses: int
    workers_lost: int
    uptime_s: float
    mean_analysis_s: float
    workers: tuple[WorkerStats, ...]


class ErrorReply(ServiceMessage, frozen=True, kw_only=True):
    error: str


def id_of(key: FailureKey) -> str:
    """How a key is named in a URL: 32 hexadecimal digits."""
    return hashlib.sha256(str(key).encode()).hexdigest()[:32]
