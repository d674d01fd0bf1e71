"""Clocks of nodes that differ."""

from __future__ import annotations

import pytest

from nvrx_slurm.attribution.analyze import findings
from nvrx_slurm.attribution.scan import Hit
from tests.unit.attribution.analyze.evidence import OOM, TIMEOUT, hit, inquiry


def offsets(hits: list[Hit]) -> dict[str, float]:
    """The offsets that follow from the lines alone."""
    return findings.offsets(hits, inquiry(nodes=()))


def timeouts(ahead: dict[str, float], seqs: int = 3) -> list[Hit]:
    """Each node reports the same collectives, stamped by its own clock."""
    return [
        hit(TIMEOUT, node=node, t=1000.0 + seq * 60 + offset, line=seq, groups={"seq": str(seq)})
        for node, offset in ahead.items()
        for seq in range(seqs)
    ]


def test_a_clock_that_is_ahead_is_found() -> None:
    """A clock's offset follows from the collectives whose timeout every node reports."""
    assert offsets(timeouts({"n1": 0.0, "n2": 0.3, "n3": 240.0})) == {"n3": pytest.approx(239.7)}


def test_clocks_within_the_slack_are_taken_for_the_same() -> None:
    """A watchdog looks once a second, so small differences do not count."""
    assert offsets(timeouts({"n1": 0.0, "n2": 2.5, "n3": -2.0})) == {}


def test_one_event_that_was_not_simultaneous_does_not_matter() -> None:
    """The median over several events is used."""
    late = hit(TIMEOUT, node="n2", t=5000.0, groups={"seq": "9"})
    early = hit(TIMEOUT, node="n1", t=4000.0, groups={"seq": "9"})
    assert offsets([*timeouts({"n1": 0.0, "n2": 0.0}), late, early]) == {}


def test_causes_are_no_common_event() -> None:
    """Causes are no common event: two nodes may run out of memory at different times."""
    assert offsets([hit(OOM, node="n1", t=0.0), hit(OOM, node="n2", t=500.0)]) == {}


def test_without_a_node_each_rank_has_a_clock_of_its_own() -> None:
    """Logs that are read offline do not show a rank's node, so each rank counts as having its own clock."""
    hits = [hit(TIMEOUT, rank, t=t, groups={"seq": "4"}) for rank, t in ((0, 10.0), (1, 10.5), (2, 70.0))]
    assert offsets(hits) == {"rank 2": pytest.approx(59.5)}
