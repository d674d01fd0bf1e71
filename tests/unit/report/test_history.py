"""What failed and what was decided: one timeline for each failure, whichever of its reports came first."""

from __future__ import annotations

from nvrx_slurm.journal.records import Entry, NodeJoined
from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.view import JobFold
from tests.unit.report.recorder import ended, to_first_cycle


def history_of(entries: list[Entry]) -> JobTimeline:
    history = JobTimeline()
    fold = JobFold(None, [history])
    for entry in entries:
        fold.take(entry)
    history.finish(fold.view)
    return history


def test_a_consequence_that_is_reported_first_is_no_failure_of_its_own() -> None:
    """A worker loses its peer, the rendezvous opens, and then that peer's node is known to be lost: this is one
    failure, caused by the node, which also counts the worker's report."""
    recorder = to_first_cycle()
    recorder.fail("n0", 0, exit_code=1, error="ConnectionResetError", peer_lost=True, step=80)
    recorder.lose("n2", after_s=0.2)
    recorder.ready(at=80)
    recorder.start_workers()
    recorder.progress(76)
    (story,) = history_of(recorder.entries).failures
    assert story.cause.kind == "node_lost"
    assert story.more == 1
    assert story.decided is not None and story.decided.node == "n2"


def test_failures_of_two_cycles_are_two() -> None:
    """Each has its own cycle; the second is a worker's exception."""
    recorder = to_first_cycle()
    recorder.lose("n2")
    recorder.ready()
    recorder.start_workers()
    recorder.progress(76)
    recorder.fail("n1", 3, exit_code=1, error="KeyError: 3")
    stories = history_of(recorder.entries).failures
    assert [story.cause.kind for story in stories] == ["node_lost", "worker_error"]
    assert [story.key[2] for story in stories if story.key] == [0, 1]


def test_an_agent_that_is_replaced_is_a_failure() -> None:
    """Only the join of the next agent shows it; the decision that follows belongs to this failure."""
    recorder = to_first_cycle()
    recorder.tell(NodeJoined(node="n2", incarnation="another", seq=1, addr="127.0.0.1", port=5000))
    recorder.ready()
    (story,) = history_of(recorder.entries).failures
    assert (story.cause.kind, story.cause.node, story.key) == ("node_lost", "n2", ("main-0", 0, 0))
    assert story.decided is not None and story.decided.cause == story.cause.why


def test_what_happens_while_the_job_ends_is_no_failure() -> None:
    recorder = ended()
    assert [story.cause.kind for story in history_of(recorder.entries).failures] == ["node_lost"]
    assert list(history_of(recorder.entries).of_nodes()) == list(recorder.nodes)
