"""How one inquiry goes from asked to answered: pure; the service carries the records in and the work out.

```
                     progressive, not settled
                  ┌─────────────────────────────┐
                  ▼                             │
(new) ──▶ tracked ──▶ queued ──▶ running ──▶ (a look) ──▶ done      the last look: `terminal`, or settled
                        ▲                       └──────▶ failed     asked again, it is queued again
                        └───────────────────────────────────┘
```

A record that is done never changes: every reader gets the same answer.
"""

from __future__ import annotations

from msgspec.structs import replace

from nvrx_slurm.attribution.service.wire import Answer, Intent, ServiceMessage, State, Submission, id_of
from nvrx_slurm.journal.verdicts import MOST_PATHS, Attribution, Inquiry

# An inquiry that has taken so many workers with it is not tried again.
LOST_AT_MOST = 3

LONGEST_PAUSE_S = 30.0

_STRENGTH: dict[Intent, int] = {"track_only": 0, "progressive": 1, "terminal": 2}


class InquiryRecord(ServiceMessage, frozen=True, kw_only=True):
    """All that is known of one inquiry, as it is kept on disk. Times are seconds since the epoch.

    `looks`: analyses that ended. `revision`: how often what they said changed. `lost`: workers that hung or died.
    """

    inquiry: Inquiry
    intent: Intent
    state: State
    created_at: float
    changed_at: float
    settled: bool = False
    attribution: Attribution | None = None
    problem: str | None = None
    looks: int = 0
    revision: int = 0
    lost: int = 0

    @property
    def is_open(self) -> bool:
        return self.state in ("tracked", "queued", "running")

    @property
    def is_last(self) -> bool:
        """Whether what a look that begins now says is said for good."""
        return self.intent == "terminal" or (self.intent == "progressive" and self.settled)

    @property
    def is_followed(self) -> bool:
        """Whether it is looked at again when some time has passed."""
        return self.state == "tracked" and self.intent == "progressive"

    @property
    def pause_s(self) -> float:
        """How long until the next look: the longer, the more there were."""
        return min(LONGEST_PAUSE_S, 2.0 ** min(self.looks, 10))

    def answer(self) -> Answer:
        key = self.inquiry.key
        return Answer(
            id=id_of(key),
            key=str(key),
            state=self.state,
            attribution=self.attribution,
            problem=self.problem,
            revision=self.revision,
        )


def accept(known: InquiryRecord | None, asked: Submission, now: float) -> InquiryRecord:
    """The record after one more request, the first or the thousandth."""
    if known is None:
        state: State = "tracked" if asked.intent == "track_only" else "queued"
        return InquiryRecord(
            inquiry=asked.inquiry,
            intent=asked.intent,
            state=state,
            created_at=now,
            changed_at=now,
            settled=asked.settled,
        )
    if known.state == "done" or (known.state == "failed" and known.lost >= LOST_AT_MOST):
        return known
    older, newer = known.inquiry, asked.inquiry
    inquiry = replace(  # what the newer one says, with what only the older one knew
        newer,
        paths=_union(older.paths, newer.paths),
        # The newest cycle stands first, and the newer request knows it.
        earlier=_union(newer.earlier, older.earlier),
        failed=newer.failed or older.failed,
        nodes=newer.nodes or older.nodes,
        workers_per_node=newer.workers_per_node if newer.nodes else older.workers_per_node,
        pids=newer.pids or older.pids,
        started_at=newer.started_at or older.started_at,
    )
    merged = replace(
        known,
        inquiry=inquiry,
        intent=max(known.intent, asked.intent, key=_STRENGTH.__getitem__),
        settled=known.settled or asked.settled,
    )
    if merged.state == "failed" and asked.intent != "track_only":
        return replace(merged, state="queued", problem=None, changed_at=now)
    # Worth a look: the last one, the first one, or one at other files than before.
    adds = merged.is_last or merged.looks == 0 or inquiry.paths != older.paths
    if merged.state == "tracked" and merged.intent != "track_only" and adds:
        return replace(merged, state="queued", changed_at=now)
    return merged


def is_news(known: InquiryRecord, asked: Submission) -> bool:
    """Whether asking this would change anything."""
    return accept(known, asked, known.changed_at) != known


def begin(record: InquiryRecord) -> InquiryRecord:
    return replace(record, state="running")


def conclude(record: InquiryRecord, begun: InquiryRecord, attribution: Attribution, now: float) -> InquiryRecord:
    """The record after a look that began with `begun`; meanwhile it may have become what `record` is."""
    changed = record.attribution is None or _substance(attribution) != _substance(record.attribution)
    return replace(
        record,
        state=_after(record, begun, "done"),
        attribution=attribution,
        problem=None,
        changed_at=now,
        looks=record.looks + 1,
        revision=record.revision + changed,
    )


def give_up(record: InquiryRecord, begun: InquiryRecord, problem: str, now: float, *, lost: bool) -> InquiryRecord:
    """The record after a look that came to nothing; `lost`: the worker did not survive it."""
    losses = record.lost + lost
    state: State = "failed" if losses >= LOST_AT_MOST else _after(record, begun, "failed")
    return replace(record, state=state, problem=problem, changed_at=now, looks=record.looks + 1, lost=losses)


def close(record: InquiryRecord, now: float) -> InquiryRecord:
    """No client said that the logs are whole, and they have been followed for long enough: one last look."""
    return replace(record, settled=True, state="queued", changed_at=now)


def look_again(record: InquiryRecord) -> InquiryRecord:
    """The logs may have grown."""
    return replace(record, state="queued")


def recover(record: InquiryRecord, now: float) -> InquiryRecord:
    """The record that a service finds on disk: what was in hand when the last one ended is taken up again."""
    if record.state != "running":
        return record
    # Its analysis may be what ended the service, by taking all memory say: it counts as a loss.
    if record.lost + 1 >= LOST_AT_MOST:
        problem = f"{LOST_AT_MOST} workers, or the service itself, ended during its analysis"
        return replace(record, state="failed", problem=problem, changed_at=now, lost=LOST_AT_MOST)
    return replace(record, state="queued", changed_at=now, lost=record.lost + 1)


def _after(record: InquiryRecord, begun: InquiryRecord, last: State) -> State:
    if begun.is_last:
        return last
    return "queued" if record.is_last else "tracked"


def _union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))[:MOST_PATHS]


def _substance(attribution: Attribution) -> Attribution:
    """What it says, without how it came to be said."""
    return replace(attribution, latency_s=0.0, cached=False)
