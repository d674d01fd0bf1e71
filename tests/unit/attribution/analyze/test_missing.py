"""Which ranks the others waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.attribution.analyze.attributing import SideEvidence, attribute
from nvrx_slurm.attribution.analyze.flight_recorder import read_dump
from nvrx_slurm.journal.verdicts import Attribution, Scope, Verdict
from tests.unit.attribution.analyze.evidence import TIMEOUT, failed, hit, inquiry, rule, scan

DUMPS = Path(__file__).with_name("dumps")
WAITING = "distributed_c10d.py:2810 in all_reduce"


def answer(told_by: list[int], gathered: SideEvidence | None = None, **facts: object) -> Attribution:
    """The attribution if these of eight ranks report a timeout."""
    lines = [hit(TIMEOUT, rank, t=100.0 + rank / 10, groups={"seq": "7"}) for rank in told_by]
    return attribute(inquiry(failed(told_by[0]) if told_by else None, **facts), scan(*lines), gathered)


def test_the_one_rank_that_reports_no_timeout() -> None:
    """The only rank without a timeout never entered the collective in which the others waited."""
    found = answer([0, 1, 2, 3, 4, 6, 7])
    assert (found.missing, found.ranks, found.verdict) == ((5,), (5,), Verdict.RESTART)
    assert "The others waited for rank 5" in found.explanation


def test_a_whole_node_that_says_nothing_is_blamed() -> None:
    """If all ranks of a node are silent, the node is at fault."""
    found = answer([0, 1, 2, 3])
    assert (found.missing, found.nodes, found.scope) == ((4, 5, 6, 7), ("n2",), Scope.NODE)
    assert found.confidence >= 0.5


def test_a_rank_that_another_names() -> None:
    """A line of one rank may name another as missing."""
    barrier = rule("nccl_barrier.missing", Verdict.RESTART, scope=Scope.UNKNOWN, role="consequence", severity=40)
    found = attribute(inquiry(failed(0)), scan(hit(barrier, 0, groups={"rank": "2"})))
    assert (found.missing, found.ranks) == ((2,), (2,))


@pytest.mark.parametrize("told_by", [[0, 1, 2, 3, 4, 5, 6, 7], [0, 4], [0]])
def test_no_rank_is_named_where_it_is_not_clear(told_by: list[int]) -> None:
    """No rank is missing if all report a timeout, or so few that most ended before their watchdog could report
    one."""
    found = answer(told_by)
    assert (found.missing, found.nodes) == ((), ())


def test_the_rank_whose_stack_is_elsewhere() -> None:
    """The other ranks are in one collective, on the same line of it or not."""
    stacks = dict.fromkeys(range(8), WAITING) | {2: "reader.py:88 in fetch"}
    asked = inquiry(failed(0, hung=True, cause="no progress for 600 s"))
    found = attribute(asked, scan(), SideEvidence(stacks=stacks))
    assert (found.fault, found.missing, found.ranks) == ("hang", (2,), (2,))
    assert "reader.py:88 in fetch" in found.explanation


def test_stacks_that_all_differ_name_no_rank() -> None:
    """Ranks that work are each in a different place."""
    stacks = {rank: f"model.py:{rank} in layer_{rank}" for rank in range(8)}
    assert attribute(inquiry(failed(0, hung=True)), scan(), SideEvidence(stacks=stacks)).missing == ()


def test_the_flight_recorder_is_believed_before_all_else() -> None:
    """Real dumps of four ranks show that rank 2 is missing, whichever ranks reported a timeout."""
    dumps = tuple(read_dump((DUMPS / f"nccl_trace_rank_{rank}").read_bytes(), rank) for rank in range(4))
    found = answer([0, 1, 2], SideEvidence(dumps=dumps), nodes=("n1",))
    assert found.missing == (2,)
    assert "the others wait in all_reduce number 4 of default_pg" in found.explanation


def test_ranks_that_disagree_about_the_next_collective() -> None:
    """A mismatch is a bug, but perhaps one that a restart works around: it is no reason to stop."""
    one, two = ((DUMPS / f"trace_{rank}.json").read_bytes() for rank in (0, 1))
    dumps = (read_dump(one, 0), read_dump(two, 1), read_dump(two.replace(b"gloo:all_reduce", b"gloo:broadcast"), 3))
    found = answer([0, 1], SideEvidence(dumps=dumps), nodes=("n1",))
    assert (found.fault, found.scope, found.verdict) == ("collective_mismatch", Scope.USER_CODE, Verdict.UNKNOWN)
    assert found.ranks == (3,)
