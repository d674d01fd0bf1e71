"""Hangs, silence and death in a view: how a hung worker, a silent node and a node that is lost again and again are
shown."""

from __future__ import annotations

from nvrx_slurm.journal import records
from nvrx_slurm.report.page import waiting
from nvrx_slurm.report.view import fold
from tests.unit.report.recorder import Recorder, to_first_cycle, view_of


def flapping() -> Recorder:
    """The spare n5 was lost three times, and joins again."""
    recorder = to_first_cycle()
    for time in range(3):
        recorder.lose("n5", at=None)
        recorder.tell(records.NodeJoined(node="n5", incarnation=f"again-{time}", seq=1, addr="h", port=1))
    return recorder


def test_a_hung_worker_is_a_failure_like_a_failed_one() -> None:
    """The failure has the rank that hangs, since when and where, and the file with its stacks; the decision follows
    it."""
    recorder = to_first_cycle()
    recorder.hang("n1", 3)
    view = view_of(recorder)
    failure = view.last_failure
    assert failure is not None
    assert failure.why == "rank 3 on n1 hung: no step for 612 s (limit 600 s) after step 41, in train.py:41 in step"
    assert (failure.rank, failure.node, failure.step, failure.cycle) == (3, "n1", 41, 0)
    assert failure.stacks == "stacks/main-0/rank-3.txt"
    assert view.last_stacks is not None
    assert view.last_stacks.files == {3: "stacks/main-0/rank-3.txt"}
    assert view.restarts_left(view.t) == 2
    assert view.replicas["main-0"].phase == "stopping"


def test_a_hang_during_the_teardown_is_no_failure() -> None:
    """When the job is ending, the hung worker is torn down with the others."""
    recorder = to_first_cycle()
    recorder.cancel()
    recorder.hang("n1", 3)
    assert view_of(recorder).last_failure is None


def test_a_silent_nodes_ranks_wait_for_proof_of_its_death() -> None:
    """The rendezvous stays open although every survivor is ready, and names the node whose death must be proven; the
    proof lets it close."""
    recorder = to_first_cycle()
    recorder.lose("n2", safe_after_s=34.0)
    lost_at = recorder.now
    recorder.ready()
    view = view_of(recorder)
    assert view.nodes["n2"].state == "lost"
    assert view.nodes["n2"].held_until == lost_at + 34.0
    assert waiting(view) == "main-0 waits for proof of the death of n2"
    recorder.tell(records.NodeFenced(node="n2", incarnation="agent-of-n2", proof="its kernel said so"))
    view = view_of(recorder)
    assert view.nodes["n2"].held_until is None
    assert view.nodes["n4"].state == "active"


def test_time_is_proof_too() -> None:
    """When the bound has passed, the rendezvous closes and no ranks wait any more."""
    recorder = to_first_cycle()
    recorder.lose("n2", safe_after_s=34.0)
    recorder.ready()
    recorder.tell(records.Tick(), after_s=34.0)
    view = view_of(recorder)
    assert view.nodes["n2"].held_until is None
    assert view.replicas["main-0"].phase == "starting"


def test_no_ranks_wait_for_a_silent_spare() -> None:
    """It had no ranks, so no rendezvous waits for the proof."""
    recorder = to_first_cycle()
    recorder.lose("n5", at=None, safe_after_s=34.0)
    assert view_of(recorder).nodes["n5"].held_until is None


def test_proof_about_an_older_agent_says_nothing_of_the_new_one() -> None:
    """A proof counts only for the agent that it names."""
    recorder = to_first_cycle()
    recorder.lose("n2", safe_after_s=34.0)
    view = view_of(recorder)
    proof = records.NodeFenced(node="n2", incarnation="another", proof="x")
    fold(view, records.Entry(n=view.n + 1, t=recorder.now, record=proof))
    assert view.nodes["n2"].held_until is not None


def test_what_slurm_says_of_a_lost_node_is_kept() -> None:
    """The view keeps Slurm's state and reason of the node until the node comes back."""
    recorder = to_first_cycle()
    recorder.lose("n2")
    recorder.tell(records.SlurmNodeState(node="n2", state="DOWN+NOT_RESPONDING", reason="Not responding"))
    assert view_of(recorder).nodes["n2"].slurm_says == "DOWN+NOT_RESPONDING (Not responding)"
    recorder.tell(records.NodeJoined(node="n2", incarnation="second", seq=1, addr="h", port=1))
    assert view_of(recorder).nodes["n2"].slurm_says is None


def test_a_node_that_keeps_dying_is_quarantined() -> None:
    """The node has joined, but is no spare; its note says how often it was lost; no rendezvous waits for it."""
    recorder = flapping()
    view = view_of(recorder)
    assert view.nodes["n5"].state == "quarantined"
    assert view.nodes["n5"].why == "lost 3 times (limit 3)"
    assert view.spares == ("n4",)
    assert "n5" in view.present
    recorder.fail("n0", 0, exit_code=1)
    assert "n5" not in view_of(recorder).waiting["main-0"]


def test_a_node_that_stopped_its_own_workers_is_the_failure() -> None:
    """The report of the isolated node is the reason of the restart; the node stays, and the rendezvous waits for
    it."""
    recorder = to_first_cycle()
    recorder.tell(records.NodeIsolated(**recorder.agent("n1"), replica="main-0", cycle=0, for_s=31.2))
    view = view_of(recorder)
    assert view.last_failure is not None
    assert view.last_failure.why == "n1 had lost store and controller for 31.2 s and stopped its workers"
    assert view.waits_for("main-0") == ("n0", "n1", "n2", "n3")


def test_stacks_and_what_was_learned_change_no_node() -> None:
    """The view keeps the last dump and changes nothing else; what was learned is in the journal only."""
    recorder = to_first_cycle()
    before = view_of(recorder)
    recorder.tell(records.DumpAsked(request="ab12", by="ann@login"))
    files = {2: "a/rank-2.txt", 3: "a/rank-3.txt"}
    recorder.tell(records.StacksDumped(**recorder.agent("n1"), why="asked for (ab12)", files=files))
    recorder.tell(records.Learned(**recorder.agent("n1"), role="main", seen={"step": (50, 1.3)}))
    view = view_of(recorder)
    assert view.last_stacks is not None
    assert (view.last_stacks.node, view.last_stacks.files) == ("n1", files)
    assert (view.nodes, view.replicas, view.last_decision) == (before.nodes, before.replicas, before.last_decision)


def test_a_node_whose_workers_are_done_is_marked() -> None:
    """The node keeps its ranks and is marked as done until the next cycle."""
    recorder = to_first_cycle()
    recorder.tell(records.WorkersDone(**recorder.agent("n1"), replica="main-0", cycle=0))
    assert [node.name for node in view_of(recorder).nodes.values() if node.done] == ["n1"]
    recorder.fail("n0", 0, exit_code=1)
    recorder.ready()
    assert not any(node.done for node in view_of(recorder).nodes.values())
