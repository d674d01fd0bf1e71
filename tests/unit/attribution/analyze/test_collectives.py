"""Which ranks wait for which others in collectives."""

from __future__ import annotations

import pytest

from nvrx_slurm.attribution.analyze.collectives import standstill
from nvrx_slurm.attribution.analyze.flight_recorder import CollectiveCall, Dump

Step = tuple[str, str, str]
"""Group, operation, state."""

DONE, OPEN = "completed", "scheduled"
MEMBERS = {"world": (0, 1, 2, 3), "left": (0, 1), "right": (2, 3)}


def dump(rank: int, *steps: Step, shape: tuple[int, ...] = (8,)) -> Dump:
    """A rank's dump of these calls, numbered within each group."""
    last: dict[str, int] = {}
    calls = []
    for group, operation, state in steps:
        last[group] = last.get(group, 0) + 1
        calls.append(CollectiveCall(group, "", last[group], f"nccl:{operation}", state, (shape,)))
    return Dump(rank, tuple(calls), MEMBERS, last)


FIRST = ("world", "all_reduce", DONE)
SECOND = ("world", "all_reduce", OPEN)

CASES = {
    "one never came": (
        [dump(0, FIRST, SECOND), dump(1, FIRST, SECOND), dump(2, FIRST), dump(3, FIRST, SECOND)],
        ("missing", (2,)),
    ),
    "one wrote no dump": (
        [dump(0, FIRST, SECOND), dump(1, FIRST, SECOND), dump(3, FIRST, SECOND)],
        ("missing", (2,)),
    ),
    "a rank waits for another that is the missing one": (
        [
            dump(0, FIRST, SECOND),
            dump(1, FIRST, SECOND),
            dump(2, FIRST, ("right", "all_gather", OPEN)),
            dump(3, FIRST),
        ],
        ("missing", (3,)),
    ),
    "ranks wait for each other": (
        [
            dump(0, FIRST, SECOND),
            dump(1, FIRST, ("left", "all_gather", OPEN)),
            dump(2, FIRST, SECOND),
            dump(3, FIRST, SECOND),
        ],
        ("deadlock", ()),
    ),
    "one does something else": (
        [dump(0, FIRST, SECOND), dump(1, FIRST, SECOND), dump(2, FIRST, ("world", "broadcast", OPEN))],
        ("mismatch", (2,)),
    ),
    "one has another shape": (
        [dump(0, FIRST, SECOND), dump(1, FIRST, SECOND), dump(2, FIRST, SECOND, shape=(9,))],
        ("mismatch", (2,)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_standstill(name: str) -> None:
    """A rank that others wait for, and that waits for none, holds up the job."""
    dumps, expected = CASES[name]
    still = standstill(dumps)
    assert still is not None
    assert (still.kind, still.ranks) == expected


def test_ranks_that_have_completed_every_call_have_no_standstill() -> None:
    """Nor have ranks without any call, and ranks that are all in the same one: none of them holds up the others."""
    assert standstill([dump(rank, FIRST) for rank in range(4)]) is None
    assert standstill([dump(rank) for rank in range(4)]) is None
    assert standstill([dump(rank, FIRST, SECOND) for rank in range(4)]) is None


def test_the_rank_without_a_dump_is_found_among_a_thousand() -> None:
    """All others have full dumps, whose calls are open."""
    ranks = tuple(range(1000))
    calls = tuple(CollectiveCall("0", "default_pg", seq, "nccl:all_reduce", OPEN) for seq in range(1, 301))
    dumps = [Dump(rank, calls, {"0": ranks}, {"0": 300}) for rank in ranks if rank != 77]
    still = standstill(dumps)
    assert still is not None
    assert still.ranks == (77,)
