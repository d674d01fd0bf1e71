"""A controller that was overtaken decides nothing more, at any await at which it may have stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvrx_slurm.errors import EXIT_RETRY
from nvrx_slurm.journal.records import ControllerStarted
from nvrx_slurm.lab.simulation.adversary import AWAITS, Act
from nvrx_slurm.lab.simulation.aims import AFTER, BEFORE, LATE, UNANSWERED, Aim
from nvrx_slurm.lab.simulation.run import SimulationRun
from nvrx_slurm.lab.simulation.scenario import draw_scenario

PLAIN = next(
    each
    for each in (draw_scenario(seed, 4) for seed in range(1_000))
    if each.shape.plan.spares
    and len(each.shape.plan.roles) == 1
    and each.shape.plan.fault_tolerance.max_restarts.count
)
STANDS_S = 2.0


def controllers_of(act: Act) -> list[tuple[int, int | None]]:
    """Epoch and exit code of each controller of a job that finishes, although this act happens at its first
    rendezvous."""
    shape = replace(PLAIN.shape, work_s=2 * STANDS_S)  # the job outlasts the stop
    run = SimulationRun(replace(PLAIN, shape=shape, acts=(act,)))
    result = run.run()
    assert (result.broken, result.exit_code) == (None, 0)
    epochs = [entry.record.epoch for entry in result.journal if isinstance(entry.record, ControllerStarted)]
    return list(zip(epochs, [process.exit_code for process in run.controllers], strict=True))


@pytest.mark.parametrize("steps", range(0, AWAITS, 3))
def test_controller_that_was_overtaken_at_any_await_is_fenced(steps):
    """The old controller thaws while the next one leads, and ends; the job finishes."""
    aim = Aim(event="rendezvous_closed", moment="before")
    act = Act(at_s=0.0, kind="overtake", lasts_s=STANDS_S, number=steps, aim=aim)
    assert controllers_of(act) == [(1, EXIT_RETRY), (2, 0)]


@pytest.mark.parametrize("late_by", range(3))
@pytest.mark.parametrize("moment", [BEFORE, AFTER, LATE, UNANSWERED])
def test_commit_of_a_controller_that_was_overtaken_is_taken_whole_or_not_at_all(moment, late_by):
    """The commit may be refused, accepted, accepted without an answer, or in transit while the next controller
    commits."""
    number = moment + 4 * 4 + 20 * late_by  # at its fifth commit
    act = Act(at_s=0.0, kind="overtake_at_commit", lasts_s=STANDS_S, number=number)
    assert controllers_of(act) == [(1, EXIT_RETRY), (2, 0)]


@pytest.mark.parametrize("number", range(10))
def test_commit_whose_connection_breaks_is_sent_again(number):
    """The same controller sends it again, and it is executed once, whether the store had accepted it or not."""
    assert controllers_of(Act(at_s=0.0, kind="break_commit", number=number)) == [(1, 0)]
