"""The phases of a teardown, which share one budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.agent.teardown import KILL_S, ORDER, Teardown


def phases(teardown: Teardown, moments: list[float], *, workers_left: bool = True) -> list[str]:
    """The phases that begin at these moments."""
    return [phase for now in moments if (phase := teardown.advance(now, workers_left=workers_left))]


def test_every_phase_has_its_turn_and_the_last_ends_with_the_budget():
    """Of ten seconds the workers are asked for seven, dumped for two and terminated for one; the kill comes at
    ten."""
    teardown = Teardown.plan(100.0, 10.0)
    assert phases(teardown, [100.0, 106.9]) == ["ask"]
    assert phases(teardown, [107.0, 108.9]) == ["dump"]
    assert phases(teardown, [109.0, 109.9]) == ["terminate"]
    assert phases(teardown, [110.0]) == ["kill"]
    assert not teardown.over(110.0 + KILL_S - 0.1)
    assert teardown.over(110.0 + KILL_S)


def test_saving_comes_first_and_has_a_bound_of_its_own():
    """Saving comes first and has its own time: a checkpoint takes none from the grace."""
    teardown = Teardown.plan(0.0, 10.0, checkpoint_s=60.0)
    assert phases(teardown, [0.0, 59.9]) == ["checkpoint"]
    assert phases(teardown, [60.0]) == ["ask"]
    assert teardown.ends["terminate"] == 70.0


def test_without_a_grace_there_is_only_the_kill():
    """Without a grace the workers are killed at once, without saving: a fenced node may do nothing any more."""
    assert phases(Teardown.plan(0.0, 0.0, checkpoint_s=60.0), [0.0, 1.0]) == ["kill"]


def test_once_every_worker_has_ended_what_they_started_is_terminated():
    """Once all workers have ended, the processes that they started have the rest of the budget; no stacks are
    dumped."""
    teardown = Teardown.plan(0.0, 10.0)
    assert phases(teardown, [0.0]) == ["ask"]
    assert phases(teardown, [1.0, 9.9], workers_left=False) == ["terminate"]
    assert teardown.deadline() == 10.0


def test_dump_that_is_done_early_gives_its_time_away():
    """A phase whose work is done ends early."""
    teardown = Teardown.plan(0.0, 10.0)
    assert phases(teardown, [0.0, 7.0]) == ["ask", "dump"]
    assert teardown.advance(7.1, workers_left=True, work_done="dump") == "terminate"


def test_end_of_another_phase_changes_nothing():
    """The end of a dump that has not begun is ignored."""
    teardown = Teardown.plan(0.0, 10.0)
    teardown.advance(0.0, workers_left=True)
    assert teardown.advance(1.0, workers_left=True, work_done="dump") is None


def test_hurrying_skips_to_the_kill_and_gives_it_its_time():
    """A second signal skips to the kill, which keeps its own time."""
    teardown = Teardown.plan(0.0, 10.0)
    teardown.advance(0.0, workers_left=True)
    teardown.hurry(1.0)
    assert teardown.advance(1.0, workers_left=True) == "kill"
    assert teardown.deadline() == 1.0 + KILL_S


@given(st.floats(0, 1e6), st.floats(0, 600), st.floats(0, 600), st.lists(st.tuples(st.floats(0, 100), st.booleans())))
def test_phases_never_go_back_and_the_budget_is_kept(begin, grace_s, checkpoint_s, looks):
    """However irregularly the teardown advances, its phases come in order, and the kill comes when the budget is
    spent, not later."""
    teardown, now, seen = Teardown.plan(begin, grace_s, checkpoint_s), begin, []
    for pause, workers_left in looks:
        now += pause
        if phase := teardown.advance(now, workers_left=workers_left):
            seen.append(ORDER.index(phase))
        spent = now >= begin + grace_s + (checkpoint_s if grace_s else 0.0)
        assert (teardown.phase == "kill") == spent or abs(now - teardown.ends["terminate"]) < 1e-6
    assert seen == sorted(set(seen))


def test_the_kill_is_extended_for_a_minute_at_most():
    """The kill is extended for processes that are exiting, by a second each time."""
    teardown = Teardown.plan(0.0, 0.0)
    teardown.advance(0.0, workers_left=True)
    assert teardown.over(KILL_S)
    assert teardown.extend()
    assert not teardown.over(KILL_S)
    assert teardown.deadline() == KILL_S + 1.0
    assert [teardown.extend() for _ in range(60)] == [True] * 59 + [False]
