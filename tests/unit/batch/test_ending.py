"""The time by which a job that was asked to end has ended."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2

import pytest

from nvrx_slurm.batch.ending import ENDING_MARGIN_S, Ending
from nvrx_slurm.jobspec.budgets import grace_within
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.util.processes import AGAIN_S

SAVES = plain_bounds(teardown__grace=10.0, teardown__checkpoint_signal="SIGUSR1", teardown__checkpoint_timeout=60.0)
SAVES_NOT = plain_bounds(teardown__grace=10.0)


def test_without_slurm_the_teardown_and_a_margin_are_the_bound():
    """There is no KillWait: a cancelled job has its grace, and a margin for its last records."""
    ending = Ending(SAVES, None)
    assert ending.take(SIGTERM, 100.0) is None
    assert ending.give_up_at == 110.0 + ENDING_MARGIN_S
    assert ending.exit_code == 143


@pytest.mark.parametrize(("bounds", "saving_s"), [(SAVES, 60.0), (SAVES_NOT, 0.0)])
def test_time_limit_leaves_time_to_save(bounds, saving_s):
    """Ahead of the time limit workers get `checkpoint_timeout` in addition, if a checkpoint signal is set."""
    ending = Ending(bounds, 30.0)
    assert ending.take(SIGUSR1, 0.0) is None
    assert ending.give_up_at == saving_s + 10.0 + ENDING_MARGIN_S
    assert ending.exit_code == 124


@pytest.mark.parametrize("kill_wait_s", [2.0, 12.0, 30.0, 120.0])
@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
def test_slurms_kill_comes_after_the_batch_host_has_given_up(number, kill_wait_s):
    """However short KillWait is, agents kill their workers before the batch host gives up, and it gives up before
    KillWait ends."""
    ending = Ending(plain_bounds(teardown__grace=3600.0), kill_wait_s)
    ending.take(number, 0.0)
    assert grace_within(kill_wait_s) <= ending.give_up_at < ending.killed_at == kill_wait_s


def test_same_signal_again_kills_now():
    """A second SIGTERM some time after the first ends the teardown at once; one in the same moment counts as the
    first."""
    ending = Ending(SAVES, 30.0)
    assert ending.take(SIGTERM, 0.0) is None
    assert ending.take(SIGTERM, AGAIN_S / 2) is None
    assert ending.take(SIGTERM, 2 * AGAIN_S) == 0.0


def test_without_slurm_a_second_signal_is_meant_at_once():
    """Slurm sends one signal twice; Ctrl-C pressed twice is two signals."""
    ending = Ending(SAVES, None, again_s=0.0)
    assert ending.take(SIGINT, 0.0) is None
    assert ending.take(SIGINT, AGAIN_S / 10) == 0.0
    assert ending.exit_code == 130


def test_a_closed_terminal_gives_workers_their_grace():
    """A hangup ends the job as a cancellation does."""
    ending = Ending(SAVES, None, again_s=0.0)
    assert ending.take(SIGHUP, 0.0) is None
    assert ending.exit_code == 143


def test_cancel_while_saving_shortens_it_to_what_kill_wait_leaves():
    """A job that is cancelled while it saves ahead of its time limit gets the teardown of a cancelled job; the reason
    stays."""
    ending = Ending(SAVES, 12.0)
    ending.take(SIGUSR1, 0.0)
    assert ending.take(SIGTERM, 5.0) == min(10.0, grace_within(12.0))
    assert ending.give_up_at < ending.killed_at == 17.0
    assert ending.exit_code == 124


def test_loss_of_all_agents_hurries_nothing():
    """The batch host sends SIGUSR2 to itself: no agent is left that could kill a worker."""
    ending = Ending(SAVES, 30.0)
    ending.take(SIGTERM, 0.0)
    assert ending.take(SIGUSR2, 9.0) is None
    assert ending.exit_code == 143


def test_last_waits_fit_into_what_slurm_leaves():
    """Four waits in a row end before Slurm's kill; without a kill each has the time that it asked for."""
    ending = Ending(SAVES, 12.0)
    assert ending.in_time(5.0, 0.0) == 5.0
    ending.take(SIGTERM, 0.0)
    now = 9.0
    for _ in range(4):
        now += ending.in_time(5.0, now)
    assert now < ending.killed_at


@pytest.mark.parametrize(("limit_s", "at_s"), [(3600.0, 3500.0), (10.0, 5.0)])
def test_local_job_is_notified_ahead_of_its_time_limit(limit_s, at_s):
    """As in a Slurm job there is time to save and to tear down, and the notice never comes before the job's start."""
    assert limit_s - SAVES.teardown.notice_s(limit_s) == at_s
