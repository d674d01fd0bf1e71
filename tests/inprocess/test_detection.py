"""Every hang of a rank is detected. The rank restarts with the others if it can; otherwise it is dead before they
restart."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.inprocess.scenarios import KILLED, Scenario, fault, play
from tests.inprocess.script import Script
from tests.inprocess.servers import Valkey

TERMINATED = -signal.SIGTERM
HASTY = {"soft_timeout": 4.0, "hard_timeout": 8.0}
FRAGILE = {"heartbeat_timeout": 8.0}

SOFT = [
    Scenario(
        "a rank that is nearly always in finalizers restarts",
        2,
        ("01", "01"),
        (fault(1, "fn", "wait in finalizers"), fault(0, "fn", "raise")),
        kinds=frozenset({"exception"}),
        options=HASTY | {"monitor_thread_interval": 1.0},
    ),
    Scenario(
        "a blocked main thread restarts",
        2,
        ("01", "01"),
        (fault(1, "fn", "block"),),
        kinds=frozenset({"soft_timeout"}),
        options=HASTY,
    ),
    Scenario(
        "a main thread in a system call restarts", 2, ("01", "01"), (fault(0, "fn", "block in read"),), options=HASTY
    ),
    Scenario(
        "a rank that no longer pings restarts",
        2,
        ("01", "01"),
        (fault(1, "fn", "ping"),),
        kinds=frozenset({"soft_timeout"}),
        options=HASTY,
    ),
    Scenario("blocked in Initialize", 2, ("", "01"), (fault(1, "initialize", "block"),), options=HASTY),
    Scenario("blocked in the first health check", 2, ("", "01"), (fault(1, "health_check", "block"),), options=HASTY),
]

HARD = [
    Scenario(
        "a rank that is about to be killed does not go on",
        3,
        ("012", "02"),
        (fault(1, "fn", "hold gil until terminated"),),
        {1: "RestartError"},
        frozenset({"soft_timeout", "hard_timeout"}),
        HASTY | {"termination_grace_time": 30.0},
    ),
    Scenario(
        "a stopped rank is killed",
        2,
        ("01", "0"),
        (fault(1, "fn", "stop"),),
        {1: TERMINATED},
        frozenset({"soft_timeout", "hard_timeout"}),
        HASTY,
    ),
    Scenario(
        "a rank that holds the GIL is terminated",
        2,
        ("01", "1"),
        (fault(0, "fn", "hold gil"),),
        {0: TERMINATED},
        options=HASTY,
    ),
    Scenario(
        "a rank that holds the GIL and ignores SIGTERM is killed",
        2,
        ("01", "0"),
        (fault(1, "fn", "hold gil deaf"),),
        {1: KILLED},
        options=HASTY,
    ),
    Scenario(
        "blocked in Finalize",
        3,
        ("012", "02"),
        (fault(0, "fn", "raise"), fault(1, "finalize", "block")),
        {1: TERMINATED},
        options=HASTY,
    ),
    Scenario(
        "blocked in the health check after the fault",
        3,
        ("012", "12"),
        (fault(1, "fn", "raise"), fault(0, "recheck", "block")),
        {0: TERMINATED},
        options=HASTY,
    ),
    Scenario(
        "blocked in Abort",
        3,
        ("012", "01"),
        (fault(1, "fn", "raise"), fault(2, "abort", "block")),
        {2: TERMINATED},
        options=HASTY,
    ),
    Scenario(
        "a restart that is caught for ever",
        3,
        ("012", "12"),
        (fault(0, "fn", "swallow for ever"), fault(1, "fn", "raise")),
        {0: TERMINATED},
        options=HASTY,
    ),
    Scenario(
        "the interpreter hangs in Abort",
        3,
        ("012", "01"),
        (fault(1, "fn", "raise"), fault(2, "abort", "hold gil")),
        {2: TERMINATED},
        options=HASTY,
    ),
    Scenario(
        "blocked in the rank assignment",
        2,
        ("", "0"),
        (fault(1, "rank_assignment", "block"),),
        {1: TERMINATED},
        options=HASTY,
    ),
    Scenario("blocked in Completion", 2, ("01",), (fault(1, "completion", "block"),), {1: TERMINATED}, options=HASTY),
]

MONITORS = [
    Scenario("a rank dies with its monitor", 3, ("012", "02"), (fault(1, "fn", "kill monitor"),), {1: KILLED}),
    Scenario("rank 0 dies with its monitor", 2, ("01", "1"), (fault(0, "fn", "kill monitor"),), {0: KILLED}),
    Scenario(
        "a monitor dies in the restart",
        3,
        ("012", "02"),
        (fault(0, "fn", "raise"), fault(1, "finalize", "kill monitor")),
        {1: KILLED},
    ),
    Scenario(
        "rank and monitor silent at once",
        3,
        ("012", "02"),
        (fault(1, "fn", "stop with monitor"),),
        {1: KILLED},
        options=FRAGILE,
    ),
    Scenario(
        "rank 0 and its monitor silent in the restart",
        3,
        ("012", "12"),
        (fault(2, "fn", "raise"), fault(0, "finalize", "stop with monitor")),
        {0: KILLED},
        options=FRAGILE,
    ),
    Scenario(
        "a monitor alone is silent", 2, ("01", "0"), (fault(1, "fn", "stop monitor"),), {1: KILLED}, options=FRAGILE
    ),
]

SWALLOWED = [
    Scenario(
        "a restart that is caught is raised again",
        2,
        ("01", "01"),
        (fault(1, "fn", "swallow"), fault(0, "fn", "raise")),
        kinds=frozenset({"exception"}),
    ),
    Scenario(
        "a restart that is lost in __del__ is raised again",
        2,
        ("01", "01"),
        (fault(1, "fn", "swallow in del"), fault(0, "fn", "raise")),
        kinds=frozenset({"exception"}),
    ),
    Scenario(
        "a restart that becomes another exception is a restart",
        2,
        ("01", "01"),
        (fault(1, "fn", "replace"), fault(0, "fn", "raise")),
        kinds=frozenset({"exception"}),
    ),
    Scenario(
        "one that has returned restarts with the others",
        3,
        ("012", "012"),
        (fault(0, "fn", "return"), fault(2, "fn", "return"), fault(1, "fn", "raise")),
    ),
    Scenario(
        "one that has returned goes on without the dead",
        3,
        ("012", "02"),
        (fault(0, "fn", "return"), fault(2, "fn", "return"), fault(1, "fn", "kill")),
        {1: KILLED},
    ),
]

SCENARIOS = SOFT + HARD + MONITORS + SWALLOWED


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.says.replace(" ", "-"))
def test_what_hangs_is_found(scenario: Scenario, start, valkey, tmp_path: Path) -> None:
    """The worlds of the scenario follow one another with the expected ranks, and each rank ends as expected."""
    script = scenario.script(str(tmp_path / "group"), ("RedisStore", {"url": valkey.url}))
    with start(scenario.ranks, script) as group:
        play(scenario, group)


@pytest.mark.parametrize("scenario", SOFT[:3], ids=lambda scenario: scenario.says.replace(" ", "-"))
def test_what_hangs_is_found_without_pending_calls(scenario: Scenario, start, valkey, tmp_path: Path) -> None:
    """The watchdog that uses a signal takes no wait for progress, and no progress for a wait."""
    script = scenario.script(str(tmp_path / "group"), ("RedisStore", {"url": valkey.url}))
    with start(scenario.ranks, script, variables={"NVRX_INPROCESS_WATCHDOG": "signal"}) as group:
        play(scenario, group)


def test_a_frozen_rank_that_thaws_is_dead_already(start) -> None:
    """Rank and monitor are stopped from outside and continued later. By then both have been killed."""
    with start(3, options=FRAGILE) as group:
        group.entered([0, 1, 2], 0)
        frozen = group.monitor_of(1)
        group.stop(frozen)
        group.signal(1, signal.SIGSTOP)
        group.entered([0, 2], 1, world_size=2, alive=[0, 2])
        group.thaw(frozen)
        group.signal(1, signal.SIGCONT)
        assert group.ended(1) == KILLED
        assert not group.all("fn", rank=1, iteration=1)
        group.order_all([0, 2], 1, "return")


def test_a_death_is_detected_though_its_own_monitor_is_stopped(start) -> None:
    """Another rank's monitor detects the death of a rank whose own monitor is stopped."""
    with start(3, options=FRAGILE) as group:
        group.entered([0, 1, 2], 0)
        group.stop(group.monitor_of(2))
        group.signal(2, signal.SIGKILL)
        group.entered([0, 1], 1, world_size=2, alive=[0, 1])
        group.order_all([0, 1], 1, "return")


def test_a_monitor_outlives_the_signals_of_its_step(start) -> None:
    """A monitor that gets SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 goes on."""
    with start(2) as group:
        group.entered([0, 1], 0)
        group.order(0, 0, "bother monitor")
        group.expect("done", 0, command="bother monitor")
        group.order(1, 0, "kill")
        group.entered([0], 1)
        group.order(0, 1, "return")
        assert group.expect("returned", 0).value == "value of 0"


def test_a_monitor_that_starts_slowly_causes_no_restart(start) -> None:
    """A rank that waits for its monitor for longer than the hard timeout is not taken for hung."""
    with start(2, options=HASTY, faults=(fault(1, "begin", "slow monitor"),)) as group:
        group.entered([0, 1], 0)
        group.order_all([0, 1], 0, "return")
        assert [group.expect("returned", rank).restarts for rank in (0, 1)] == [[], []]


@pytest.mark.parametrize("action", ["ping for long", "unprotected"])
def test_pings_and_unprotected_parts_cause_no_timeout(start, action: str) -> None:
    """Steady pings, and a part without hang protection, may take longer than the timeouts."""
    with start(2, options=HASTY) as group:
        group.entered([0, 1], 0)
        group.order(1, 0, action)
        group.expect("done", 1, command=action)
        group.order_all([0, 1], 0, "return")
        assert [group.expect("returned", rank).value for rank in (0, 1)] == ["value of 0", "value of 1"]
        assert not group.all("abort")


def test_a_suspension_of_all_ranks_kills_none(start, tmp_path: Path, valkey: Valkey) -> None:
    """Ranks that are suspended as Slurm does it, with SIGTSTP first, go on afterwards. A rank that is stopped for as
    long without SIGTSTP is killed by its lease."""
    store = ("RedisStore", {"url": valkey.url})
    scripts = [Script(folder=str(tmp_path / name), store=store, options=FRAGILE) for name in "ab"]
    with start(3, scripts[0]) as job, start(1, scripts[1]) as lone:
        job.entered([0, 1, 2], 0)
        lone.entered([0], 0)
        monitors = [job.monitor_of(rank) for rank in range(3)]
        for pid in monitors:
            os.kill(pid, signal.SIGTSTP)
        for rank in range(3):
            job.until_logged(rank, "about to be stopped")
        job.freeze([0, 1, 2])
        for pid in monitors:
            job.stop(pid)
        lone.stop(lone.monitor_of(0))
        lone.freeze([0])
        assert lone.ended(0) == KILLED
        for pid in (*monitors, *(job.ranks[rank].pid for rank in range(3))):
            job.thaw(pid)
        job.order(1, 0, "raise")
        job.entered([0, 1, 2], 1, world_size=3)
        job.order_all([0, 1, 2], 1, "return")
        assert [job.expect("returned", rank).value for rank in range(3)] == [f"value of {rank}" for rank in range(3)]
