"""Any rank may fail at any point: all healthy ranks enter the function again, together, and no other rank does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inprocess.scenarios import KILLED, UNFIT, Scenario, fault, play

RAISED = [
    Scenario(
        "an exception on one rank restarts all",
        3,
        ("012", "012"),
        (fault(1, "fn", "raise"),),
        kinds=frozenset({"exception"}),
    ),
    Scenario("an exception on rank 0 restarts all", 2, ("01", "01"), (fault(0, "fn", "raise"),)),
    Scenario("a lone rank restarts itself", 1, ("0", "0"), (fault(0, "fn", "raise"),)),
    Scenario(
        "an exception that cannot be copied restarts all",
        2,
        ("01", "01"),
        (fault(1, "fn", "raise parts"),),
        kinds=frozenset({"exception"}),
    ),
    Scenario("all ranks raise at once", 3, ("012", "012"), tuple(fault(rank, "fn", "raise") for rank in range(3))),
    Scenario(
        "one rank raises in three iterations in a row",
        2,
        ("01", "01", "01", "01"),
        tuple(fault(1, "fn", "raise", iteration) for iteration in range(3)),
    ),
    Scenario(
        "each rank raises in turn",
        3,
        ("012", "012", "012", "012"),
        tuple(fault(rank, "fn", "raise", rank) for rank in range(3)),
    ),
    Scenario(
        "a BaseException takes its rank out",
        3,
        ("012", "02"),
        (fault(1, "fn", "raise base"),),
        {1: "OwnExit"},
        frozenset({"base_exception"}),
    ),
    Scenario("a SystemExit takes its rank out", 2, ("01", "1"), (fault(0, "fn", "exit"),), {0: "SystemExit"}),
    Scenario(
        "a KeyboardInterrupt takes its rank out",
        2,
        ("01", "0"),
        (fault(1, "fn", "raise interrupt"),),
        {1: "KeyboardInterrupt"},
    ),
    Scenario(
        "a RestartAbort takes its rank out", 3, ("012", "01"), (fault(2, "fn", "raise abort"),), {2: "RestartAbort"}
    ),
    Scenario(
        "all ranks abort",
        2,
        ("01",),
        (fault(0, "fn", "raise abort"), fault(1, "fn", "abort when restarted")),
        {0: "RestartAbort", 1: "RestartAbort"},
    ),
]

DEATHS_BY_POINT = [
    Scenario("killed before its part of the first barrier", 3, ("02",), (fault(1, "ready", "kill"),), {1: KILLED}),
    Scenario(
        "rank 0 killed before its part of the first barrier", 3, ("12",), (fault(0, "ready", "kill"),), {0: KILLED}
    ),
    Scenario("killed in the first assignment", 3, ("", "02"), (fault(1, "rank_assignment", "kill"),), {1: KILLED}),
    Scenario(
        "rank 0 killed in the first assignment", 2, ("", "1"), (fault(0, "rank_assignment", "kill"),), {0: KILLED}
    ),
    Scenario("killed in Initialize", 3, ("", "01"), (fault(2, "initialize", "kill"),), {2: KILLED}),
    Scenario("rank 0 killed in Initialize", 3, ("", "12"), (fault(0, "initialize", "kill"),), {0: KILLED}),
    Scenario("killed in the first health check", 3, ("", "02"), (fault(1, "health_check", "kill"),), {1: KILLED}),
    Scenario(
        "killed in the function", 3, ("012", "02"), (fault(1, "fn", "kill"),), {1: KILLED}, frozenset({"terminated"})
    ),
    Scenario("rank 0 killed in the function", 3, ("012", "12"), (fault(0, "fn", "kill"),), {0: KILLED}),
    Scenario("crashed in the function", 2, ("01", "0"), (fault(1, "fn", "crash"),), {1: -11}),
    Scenario("left by os._exit", 2, ("01", "1"), (fault(0, "fn", "quit"),), {0: 5}),
    Scenario(
        "killed in its abort",
        3,
        ("012", "01"),
        (fault(1, "fn", "raise"), fault(2, "abort", "kill")),
        {2: KILLED},
        frozenset({"exception", "terminated"}),
    ),
    Scenario(
        "rank 0 raises, and is killed in its abort",
        3,
        ("012", "12"),
        (fault(0, "fn", "raise"), fault(0, "abort", "kill")),
        {0: KILLED},
    ),
    Scenario(
        "killed in Finalize", 3, ("012", "02"), (fault(0, "fn", "raise"), fault(1, "finalize", "kill")), {1: KILLED}
    ),
    Scenario(
        "killed in the health check after the fault",
        3,
        ("012", "12"),
        (fault(1, "fn", "raise"), fault(0, "recheck", "kill")),
        {0: KILLED},
    ),
    Scenario(
        "killed before its part of the next barrier",
        3,
        ("012", "01"),
        (fault(1, "fn", "raise"), fault(2, "ready", "kill", 1)),
        {2: KILLED},
    ),
    Scenario(
        "killed in the assignment after the fault",
        3,
        ("012", "", "02"),
        (fault(0, "fn", "raise"), fault(1, "rank_assignment", "kill", 1)),
        {1: KILLED},
        frozenset({"exception", "terminated"}),
    ),
    Scenario(
        "killed in Initialize after the fault",
        3,
        ("012", "", "12"),
        (fault(1, "fn", "raise"), fault(0, "initialize", "kill", 1)),
        {0: KILLED},
    ),
    Scenario("killed in Completion", 3, ("012",), (fault(1, "completion", "kill"),), {1: KILLED}),
    Scenario("rank 0 killed in Completion", 2, ("01",), (fault(0, "completion", "kill"),), {0: KILLED}),
]

SEVERAL = [
    Scenario(
        "two killed at once",
        4,
        ("0123", "02"),
        (fault(1, "fn", "kill"), fault(3, "fn", "kill")),
        {1: KILLED, 3: KILLED},
    ),
    Scenario(
        "all but one killed at once",
        4,
        ("0123", "3"),
        tuple(fault(rank, "fn", "kill") for rank in range(3)),
        dict.fromkeys(range(3), KILLED),
    ),
    Scenario(
        "neighbours killed at once in a group of eight",
        8,
        ("01234567", "014567"),
        (fault(2, "fn", "kill"), fault(3, "fn", "kill")),
        {2: KILLED, 3: KILLED},
    ),
    Scenario(
        "one killed as another one raises",
        3,
        ("012", "02"),
        (fault(1, "fn", "kill"), fault(2, "fn", "raise")),
        {1: KILLED},
    ),
    Scenario(
        "killed in two iterations in a row",
        4,
        ("0123", "123", "23"),
        (fault(0, "fn", "kill"), fault(1, "fn", "kill", 1)),
        {0: KILLED, 1: KILLED},
    ),
    Scenario(
        "killed down to the last one",
        4,
        ("0123", "123", "23", "3"),
        tuple(fault(rank, "fn", "kill", rank) for rank in range(3)),
        dict.fromkeys(range(3), KILLED),
    ),
    Scenario(
        "one killed in each part of one restart",
        5,
        ("01234", "", "03"),
        (
            fault(0, "fn", "raise"),
            fault(1, "abort", "kill"),
            fault(2, "finalize", "kill"),
            fault(4, "rank_assignment", "kill", 1),
        ),
        {1: KILLED, 2: KILLED, 4: KILLED},
    ),
    Scenario(
        "killed in the restart after a death",
        4,
        ("0123", "", "03"),
        (fault(1, "fn", "kill"), fault(2, "rank_assignment", "kill", 1)),
        {1: KILLED, 2: KILLED},
    ),
    Scenario(
        "one after the other in two assignments",
        4,
        ("0123", "", "", "03"),
        (fault(0, "fn", "raise"), fault(1, "rank_assignment", "kill", 1), fault(2, "rank_assignment", "kill", 2)),
        {1: KILLED, 2: KILLED},
    ),
]

ASSIGNED = [
    Scenario(
        "a rank in reserve takes over",
        4,
        ("01", "12"),
        (fault(0, "fn", "kill"),),
        {0: KILLED},
        arrangement="two active",
    ),
    Scenario(
        "reserve and active ranks restart after an exception",
        4,
        ("01", "01"),
        (fault(1, "fn", "raise"),),
        arrangement="two active",
    ),
    Scenario(
        "the whole reserve is used up",
        4,
        ("01", "12", "23", "3"),
        tuple(fault(rank, "fn", "kill", rank) for rank in range(3)),
        dict.fromkeys(range(3), KILLED),
        arrangement="two active",
    ),
    Scenario(
        "an uneven rank waits in reserve",
        4,
        ("0123", "02"),
        (fault(1, "fn", "kill"),),
        {1: KILLED},
        arrangement="even active",
    ),
    Scenario(
        "the last rank fills the gap",
        4,
        ("0123", "312"),
        (fault(0, "fn", "kill"),),
        {0: KILLED},
        arrangement="filled gaps",
    ),
    Scenario(
        "half of a pair is discarded",
        4,
        ("0123", "23"),
        (fault(1, "fn", "kill"),),
        {1: KILLED, 0: "RankDiscarded"},
        arrangement="pairs",
    ),
]

CALLBACKS = [
    Scenario(
        "Initialize raising restarts",
        3,
        ("", "012"),
        (fault(1, "initialize", "raise"),),
        kinds=frozenset({"exception"}),
    ),
    Scenario(
        "a BaseException of Initialize takes its rank out",
        3,
        ("", "02"),
        (fault(1, "initialize", "raise base"),),
        {1: "OwnExit"},
    ),
    Scenario(
        "a RestartAbort of Initialize takes its rank out",
        3,
        ("012", "", "12"),
        (fault(1, "fn", "raise"), fault(0, "initialize", "raise abort", 1)),
        {0: "RestartAbort"},
    ),
    Scenario(
        "Abort raising changes nothing", 3, ("012", "012"), (fault(1, "fn", "raise"), fault(2, "abort", "raise"))
    ),
    Scenario(
        "Finalize raising takes its rank out",
        3,
        ("012", "01"),
        (fault(1, "fn", "raise"), fault(2, "finalize", "raise")),
        {2: "ScenarioError"},
        frozenset({"exception", "unhealthy"}),
    ),
    Scenario(
        "a health check after the fault raising takes its rank out",
        3,
        ("012", "12"),
        (fault(1, "fn", "raise"), fault(0, "recheck", "raise")),
        {0: UNFIT},
        frozenset({"exception", "unhealthy"}),
    ),
    Scenario(
        "a rank assignment raising takes its rank out",
        3,
        ("", "02"),
        (fault(1, "rank_assignment", "raise"),),
        {1: "ScenarioError"},
    ),
    Scenario("Completion raising changes nothing", 2, ("01",), (fault(1, "completion", "raise"),)),
    Scenario(
        "Terminate raising is raised",
        2,
        ("01", "0"),
        (fault(1, "fn", "raise base"), fault(1, "terminate", "raise")),
        {1: "ScenarioError"},
    ),
]

SCENARIOS = RAISED + DEATHS_BY_POINT + SEVERAL + ASSIGNED + CALLBACKS


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.says.replace(" ", "-"))
def test_healthy_ranks_go_on_together(scenario: Scenario, start, valkey, tmp_path: Path) -> None:
    """The worlds of the scenario follow one another with the expected ranks, and each rank ends as expected."""
    script = scenario.script(str(tmp_path / "group"), ("RedisStore", {"url": valkey.url}))
    with start(scenario.ranks, script) as group:
        play(scenario, group)
