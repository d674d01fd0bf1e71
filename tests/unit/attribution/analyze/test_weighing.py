"""What is known beside a cause, and which verdict it allows."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.findings import Finding
from nvrx_slurm.attribution.analyze.verdict import Repeat, WeighedVerdict, weigh
from nvrx_slurm.journal.verdicts import Scope, Verdict
from tests.unit.attribution.analyze.evidence import TIMEOUT, XID, finding, rule

NEW = Repeat(times=0, same_node=False, other_nodes=False)
INTERFACE = replace(rule("no_interface.named", Verdict.RESTART, scope=Scope.NETWORK), widespread=True)
ORDINAL = replace(rule("device_ordinal.raised", Verdict.UNKNOWN, scope=Scope.UNKNOWN), widespread=True)


def weighed(cause: Finding, *others: Finding, nodes: int = 0) -> WeighedVerdict:
    return weigh(cause, others, None, NEW, nodes=nodes)


@pytest.mark.parametrize("of", [INTERFACE, ORDINAL])
def test_what_several_nodes_report_is_the_jobs_own(of: object) -> None:
    """A name that several nodes do not know is a setting of the job: no other node would help."""
    assert isinstance(of, type(INTERFACE))
    weight = weighed(finding(of, 0, node="n1"), finding(of, 4, node="n2"), nodes=2)
    assert (weight.verdict, weight.scope) == (Verdict.STOP, Scope.USER_CODE)
    assert weight.reasons == ("more than one node or rank reports it",)


def test_what_one_of_several_nodes_reports_may_be_that_nodes() -> None:
    """All ranks of one node lack what the ranks of the other node have."""
    alone = [finding(INTERFACE, rank, node="n1") for rank in range(4)]
    assert weighed(*alone, finding(TIMEOUT, 4, node="n2")).verdict is Verdict.RESTART
    assert weighed(*alone, nodes=2).verdict is Verdict.RESTART


def test_what_several_ranks_of_the_only_node_report_is_the_jobs_own() -> None:
    """Four ranks name GPUs beyond those of the node, a wrong setting; a single lost GPU affects one rank."""
    ranks = [finding(ORDINAL, rank, node="n1") for rank in (4, 5, 6, 7)]
    assert weighed(*ranks, nodes=1).verdict is weighed(*ranks).verdict is Verdict.STOP
    assert weighed(ranks[0], nodes=1).verdict is Verdict.UNKNOWN


def test_a_broken_machine_rules_out_a_wrong_setting() -> None:
    """Several ranks name GPUs that are missing since one fell off the bus."""
    ranks = [finding(ORDINAL, rank, node="n1") for rank in (4, 5)]
    assert weighed(*ranks, finding(XID, None, node="n1", kind="health"), nodes=1).verdict is Verdict.UNKNOWN
