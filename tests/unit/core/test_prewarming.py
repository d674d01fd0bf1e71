"""What agents report about their warm processes: the core records it, and nothing follows."""

from __future__ import annotations

import copy

import pytest

from nvrx_slurm.core.job import next_deadline
from nvrx_slurm.journal.records import FromAgent, Prewarmed, PrewarmFailed
from tests.unit.core.fleet import running

KINDS = [(Prewarmed, {"modules": 3}), (PrewarmFailed, {"why": "it died"})]


@pytest.mark.parametrize(("kind", "fields"), KINDS)
def test_nothing_follows_and_a_repetition_is_dropped(kind: type[FromAgent], fields: dict[str, object]) -> None:
    """A spare's warm process is recorded as well; a fact that arrives twice, or of a replaced agent, is not."""
    fleet = running()
    before = copy.deepcopy(fleet.job)
    fact = kind(**fleet.by("n3"), role="main", **fields)
    assert fleet.tell(fact) == []
    before.nodes["n3"].seq = fact.seq
    assert fleet.job == before
    assert next_deadline(fleet.job) == next_deadline(before)
    assert fleet.tell(fact) is None
    late = kind(**fleet.by("n3"), role="main", **fields)
    fleet.rejoin("n3")
    assert fleet.tell(late) is None
