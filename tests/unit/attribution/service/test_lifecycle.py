"""The states of an inquiry, for events in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nvrx_slurm.attribution.service.lifecycle import (
    LOST_AT_MOST,
    InquiryRecord,
    accept,
    begin,
    conclude,
    give_up,
    is_news,
    look_again,
    recover,
)
from nvrx_slurm.attribution.service.wire import Intent, Submission
from nvrx_slurm.journal.verdicts import Attribution, Failed, FailureKey, Inquiry, Verdict

KEY = FailureKey(job="/jobs/1", generation=0, replica="main-0", cycle=2, rank=0)

_asking = st.builds(
    lambda intent, settled, path: Submission(inquiry=Inquiry(key=KEY, paths=(path,)), intent=intent, settled=settled),
    st.sampled_from(("track_only", "progressive", "terminal")),
    st.booleans(),
    st.sampled_from(("/logs/a", "/logs/b")),
)
_verdict = st.sampled_from(list(Verdict))
_event = st.one_of(_asking, _verdict, st.sampled_from(("begin", "lost", "problem", "restart", "timer")))


def _after(record: InquiryRecord, begun: InquiryRecord | None, event: object) -> InquiryRecord:
    """The record after an event; an event that cannot happen in its state changes nothing."""
    if isinstance(event, Submission):
        return accept(record, event, 2.0)
    if event == "restart":
        return recover(record, 2.0)
    if event == "timer" and record.is_followed:
        return look_again(record)
    if event == "begin" and record.state == "queued":
        return begin(record)
    if record.state == "running" and begun is not None:
        if isinstance(event, Verdict):
            return conclude(record, begun, Attribution(source="lib", verdict=event), 2.0)
        if event in ("lost", "problem"):
            return give_up(record, begun, "no", 2.0, lost=event == "lost")
    return record


@given(first=_asking, events=st.lists(_event, max_size=30))
def test_promises(first: Submission, events: list[object]) -> None:
    """A done inquiry never changes, and only a last look makes it done; an inquiry that is only tracked is never
    looked at; a record counts at most three lost workers; and asking twice changes nothing."""
    record, begun, intents = accept(None, first, 1.0), None, {first.intent}
    for event in events:
        before, record = record, _after(record, begun, event)
        if record.state == "running" and before.state != "running":
            begun = record
        if isinstance(event, Submission):
            intents.add(event.intent)
            assert not is_news(record, event)
        if before.state == "done":
            assert record == before
        if record.state == "done" and before.state != "done":
            assert begun is not None and begun.is_last and record.attribution is not None
        assert record.revision >= before.revision and record.lost <= LOST_AT_MOST
        if intents == {"track_only"}:
            assert record.state == "tracked"
        if record.state == "failed":
            assert record.problem


@given(events=st.lists(st.sampled_from(["begin", "lost", Verdict.UNKNOWN]), min_size=20, max_size=20))
def test_ends(events: list[object]) -> None:
    """A terminal inquiry that is being analysed is closed by its first look, with an answer or a failure."""
    record, begun = accept(None, _asked("terminal"), 1.0), None
    for event in ["begin", *events]:
        record = _after(record, begun, event)
        begun = record if event == "begin" and begun is None else begun
    assert not record.is_open or events == ["begin"] * len(events)


def _asked(intent: Intent, **inquiry: object) -> Submission:
    return Submission(inquiry=replace(Inquiry(key=KEY, paths=("/logs/a",)), **inquiry), intent=intent)


def test_merged() -> None:
    """A later submission may have more paths and less of the failure: nothing of either is lost."""
    failed = Failed(cause="exit", node="n1", exit_code=1)
    known = accept(None, _asked("track_only", failed=failed, nodes=("n1", "n2"), workers_per_node=4), 1.0)
    merged = accept(known, _asked("terminal", paths=("/logs/b",)), 2.0).inquiry
    assert merged.paths == ("/logs/a", "/logs/b")
    assert (merged.failed, merged.nodes, merged.workers_per_node) == (failed, ("n1", "n2"), 4)


def test_settled_during_a_look() -> None:
    """If an inquiry is settled during a look, it is looked at once more: the look may have come too early."""
    running = begin(accept(None, _asked("progressive"), 1.0))
    settled = accept(running, Submission(inquiry=running.inquiry, intent="progressive", settled=True), 2.0)
    early = conclude(settled, running, Attribution(source="lib", verdict=Verdict.UNKNOWN), 3.0)
    assert (settled.state, early.state) == ("running", "queued")
    assert conclude(early, begin(early), Attribution(source="lib", verdict=Verdict.STOP), 4.0).state == "done"


def test_same_again() -> None:
    """An attribution that differs only in latency and caching is no new revision."""
    running = begin(accept(None, _asked("progressive"), 1.0))
    once = conclude(running, running, Attribution(source="lib", verdict=Verdict.STOP, latency_s=1.0), 2.0)
    cached = Attribution(source="lib", verdict=Verdict.STOP, latency_s=0.1, cached=True)
    twice = conclude(begin(look_again(once)), running, cached, 3.0)
    assert (once.revision, twice.revision, twice.looks) == (1, 1, 2)
    assert twice.pause_s > once.pause_s
