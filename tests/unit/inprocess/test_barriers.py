"""The barriers at which members arrive, and the data that they pass there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.barriers import (
    MemberProcess,
    NewPlace,
    Noticing,
    Payload,
    Ready,
    disagreement,
    pack,
    unpack,
)
from nvrx_slurm.inprocess.ledger import GroupLedger, Interrupted, Lost, fold

PROCESS = MemberProcess(host="n1", pid=7, began=99)
FAULT = InterruptionRecord(2, Interruption.EXCEPTION, "boom", "n1", "at line 3")


def place(rank: int, of: int, active: int | None = None, active_of: int = 0) -> NewPlace:
    return NewPlace(rank=rank, world_size=of, active_rank=active, active_world_size=active_of, process=PROCESS)


def all_active(*ranks: int, of: int) -> dict[int, NewPlace]:
    return {member: place(rank, of, rank, of) for member, rank in enumerate(ranks)}


@pytest.mark.parametrize(
    "payload",
    [PROCESS, Ready(rank=3, published=("host", "n1")), place(1, 2, None, 1), Noticing(fault=FAULT)],
    ids=lambda payload: type(payload).__name__,
)
def test_a_payload_is_read_as_it_was_packed(payload: Payload) -> None:
    """The data that one member passes is what another reads."""
    assert msgspec.json.decode(pack(payload), type=type(payload)) == payload


def test_each_iteration_has_barriers_of_its_own() -> None:
    """A member that is late at one barrier is not counted at that of the next iteration."""
    kinds = (barriers.ready, barriers.start, barriers.notice, barriers.complete)
    names = {kind(iteration) for kind in kinds for iteration in range(3)} | {barriers.JOIN, barriers.LEFT}
    assert len(names) == 3 * len(kinds) + 2


def test_one_world_of_all_ranks_agrees() -> None:
    """The ranks may be in any order, with some in reserve."""
    assert disagreement(all_active(2, 0, 1, of=3)) == ""
    assert disagreement({0: place(1, 2, 0, 1), 5: place(0, 2, None, 1)}) == ""


@pytest.mark.parametrize(
    ("places", "named"),
    [
        (all_active(0, 1, of=3), ("2 ranks", "sizes 3")),
        ({0: place(0, 2, 0, 2), 1: place(1, 3, 1, 2)}, ("sizes 2, 3",)),
        (all_active(0, 0, of=2), ("ranks 0, 0",)),
        (all_active(0, 2, of=2), ("ranks 0, 2",)),
        ({0: place(0, 2, 0, 1), 1: place(1, 2, 0, 1)}, ("active ranks are 0, 0", "sizes 1")),
        ({0: place(0, 2, 0, 2), 1: place(1, 2, None, 2)}, ("active ranks are 0,", "sizes 2")),
    ],
    ids=["too few", "two sizes", "twice", "a gap", "active twice", "active too few"],
)
def test_ranks_that_are_no_world_are_refused(places: dict[int, NewPlace], named: tuple[str, ...]) -> None:
    """Wrong ranks of a user's rank assignment are refused, with the numbers that it gave."""
    assert all(each in disagreement(places) for each in named)


def test_a_rank_that_reports_no_failure_leaves_no_record() -> None:
    """Only ranks that failed themselves have records, with all that they reported."""
    assert unpack(pack(Noticing()), Noticing).fault is None
    about: dict[str, Any] = {"rank": 2, "text": "boom", "host": "n1", "stack": "at line 3"}
    failed = Interrupted(iteration=4, member=1, interruption=Interruption.EXCEPTION, **about)
    assert unpack(pack(Noticing(fault=failed.record())), Noticing).fault == failed.record() == FAULT


@pytest.mark.parametrize("data", [b"", b"{", b'{"rank":"x"}', b"7"])
def test_a_payload_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedRecord):
        unpack(data, Ready)
    assert unpack(pack(PROCESS), MemberProcess) == PROCESS


@pytest.mark.parametrize(
    ("member", "lost", "was_last", "reads"),
    [
        (0, (), False, True),
        (1, (), False, False),
        (1, (), True, True),
        (2, (0, 1), False, True),
        (2, (1,), False, False),
    ],
)
def test_who_closes_a_barrier(member: int, lost: tuple[int, ...], was_last: bool, reads: bool) -> None:
    """Both the member that arrived last and the lowest remaining one close it, since the former may be lost before it
    does."""
    ledger = fold(
        GroupLedger(3),
        [Lost(iteration=0, member=each, interruption=Interruption.TERMINATED) for each in lost],
    )
    assert barriers.reads_arrivals(member, ledger, was_last) is reads
