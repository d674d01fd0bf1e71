"""What came of a suite of flows. Written by each attempt as JSON, read by the suite and by every report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from nvrx_slurm.journal.records import Record

if TYPE_CHECKING:
    from nvrx_slurm.lab.flow.model import Flow

# `failed`: the product did not do what the flow says. `broken`: the flow could not be run (no Slurm, say).
Verdict = Literal["passed", "failed", "broken", "out_of_time", "interrupted"]

Status = Literal["passed", "flaky", "failed", "broken", "out_of_time", "interrupted", "left_out"]


Kind = Literal["expectation", "fault", "bound", "leftover", "replay", "exit_code", "error"]


class FlowFinding(Record, frozen=True, kw_only=True):
    """One thing that went wrong. `message`: one sentence; `detail`: lines that help to find the cause."""

    kind: Kind
    message: str
    file: str
    line: int
    detail: tuple[str, ...] = ()


def finding_of(flow: Flow, kind: Kind, message: str, *, line: int = 1, detail: Iterable[str] = ()) -> FlowFinding:
    """What went wrong with a flow. `line`: of its file; the first: of the flow itself."""
    return FlowFinding(kind=kind, message=message, file=str(flow.file), line=line, detail=tuple(detail))


class InjectedFault(Record, frozen=True, kw_only=True):
    """A fault that happened. `t`: when, on the journal's clock; `proof`: how that is known, in words."""

    number: int
    what: str
    t: float
    proof: str
    bindings: dict[str, str | int] = msgspec.field(default_factory=dict)


class FlowAttempt(Record, frozen=True, kw_only=True):
    """One run of a flow. Times are seconds; `began_at` is seconds since the epoch."""

    number: int
    verdict: Verdict
    began_at: float
    took_s: float
    findings: tuple[FlowFinding, ...] = ()
    injected: tuple[InjectedFault, ...] = ()
    recoveries_s: tuple[float, ...] = ()  # `Recovered.total_s`, in order
    job_id: str | None = None
    exit_code: int | None = None
    excerpt: tuple[str, ...] = ()  # the journal, as `nvrx-slurm events` prints it; its end, if it is long
    artifacts: str | None = None  # folder
    page: str | None = None  # the job on one HTML page


class FlowOutcome(Record, frozen=True, kw_only=True):
    """All attempts of one flow on one stage."""

    name: str
    about: str = ""
    file: str
    line: int = 1
    stage: str
    attempts: tuple[FlowAttempt, ...] = ()
    left_out: str | None = None  # why it was not run

    @property
    def status(self) -> Status:
        """As the last attempt went; one that passed after one that did not is flaky, and said to be."""
        if not self.attempts:
            return "left_out"
        last = self.attempts[-1].verdict
        return "flaky" if last == "passed" and len(self.attempts) > 1 else last

    @property
    def took_s(self) -> float:
        return sum(attempt.took_s for attempt in self.attempts)


class SuiteOutcome(Record, frozen=True, kw_only=True):
    """One `ci run`. `exit_code` is its own (`nvrx_slurm.errors`)."""

    stage: str
    began_at: float
    took_s: float
    flows: tuple[FlowOutcome, ...]
    exit_code: int
    note: str | None = None  # why it ended early


def to_json(outcome: FlowAttempt | SuiteOutcome) -> bytes:
    """Indented JSON; `status` of each flow stands in it too, so that `jq` finds it."""
    data = msgspec.to_builtins(outcome)
    if isinstance(outcome, SuiteOutcome):
        for shown, flow in zip(data["flows"], outcome.flows, strict=True):
            shown["status"] = flow.status
    return msgspec.json.format(msgspec.json.encode(data), indent=2)
