"""Which node has which ranks, and what its assignment contains."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.assignment import assignments, passed_over, seat
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import Assignment, RendezvousClosed


def test_each_node_is_assigned_its_ranks_and_its_world() -> None:
    closed = RendezvousClosed(
        replica="main-0",
        cycle=3,
        nodes=("n2", "n1"),
        active=2,
        standby=0,
        world_size=8,
        master_addr="n2.example",
        master_port=29500,
    )
    role = RolePlan(name="main", command=("x",), nodes_per_replica=2, workers_per_node=4)
    of_n2, of_n1 = (
        Assignment(
            group_rank=group_rank,
            first_rank=4 * group_rank,
            workers=4,
            world_size=8,
            group_world_size=2,
            master_addr="n2.example",
            master_port=29500,
            restart_count=3,
            role="main",
            seen={"step": (5, 2.0)},
        )
        for group_rank in (0, 1)
    )
    assert list(assignments(closed, role, {"step": (5, 2.0)})) == [("n2", of_n2), ("n1", of_n1)]
    assert [told.seen for _, told in assignments(closed, role)] == [{}, {}]


@pytest.mark.parametrize(
    ("here", "spares", "suspects", "passed"),
    [
        ("ab", "s", "", ""),
        ("ab", "s", "a", "a"),
        ("ab", "s", "ab", "a"),  # one clean spare, one seat
        ("ab", "st", "ab", "ab"),
        ("ab", "s", "as", ""),  # the spare is no better
        ("ab", "b", "a", ""),  # it has a seat already
        ("a", "s", "a", ""),  # the spare is needed for the node that is missing
        ("a", "st", "a", "a"),
        ("", "stu", "", ""),
    ],
)
def test_suspects_lose_their_seats_to_clean_spares_that_no_other_seat_needs(
    here: str, spares: str, suspects: str, passed: str
) -> None:
    assert passed_over("ab", here, spares, 2, lambda name: name in suspects) == set(passed)


def test_survivors_keep_their_seats() -> None:
    assert seat("abc", "ac", "xc", 3) == ("a", "x", "c")
    assert seat("abc", "c", "", 3) == ("c",)
    assert seat("abc", "abc", "x", 2) == ("a", "b")
    assert seat("a", "a", "xy", 3) == ("a", "x", "y")
