"""Which of several lines was the cause."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.aftermath import Finality
from nvrx_slurm.attribution.analyze.cause import first
from nvrx_slurm.attribution.analyze.findings import Finding
from tests.unit.attribution.analyze.evidence import KEY_ERROR, OOM, SEGFAULT, XID, failed, finding

CASES: dict[str, tuple[list[Finding], int]] = {
    "the earliest of several ranks": (
        [finding(OOM, 0, t=100.0), finding(KEY_ERROR, 1, t=40.0), finding(OOM, 2, t=90.0)],
        1,
    ),
    "at one moment the most severe": ([finding(KEY_ERROR, 0, t=100.0), finding(XID, 1, t=103.0)], 1),
    "without times the most severe": ([finding(KEY_ERROR, 0), finding(OOM, 1), finding(SEGFAULT, 2)], 1),
    "on one rank what is nearer to the cause": (
        [finding(KEY_ERROR, 0, line=90), finding(OOM, 0, line=95), finding(SEGFAULT, 0, line=99)],
        1,
    ),
    "on one rank not what stands far above": (
        [finding(KEY_ERROR, 0, Finality.LIKELY, line=10), finding(SEGFAULT, 0, line=900)],
        1,
    ),
    "not what was surely later, at an unknown time": (
        [finding(KEY_ERROR, 0, t=100.0), replace(finding(OOM, 1), since=160.0)],
        0,
    ),
    "what has no time at all by its severity": ([finding(KEY_ERROR, 0, t=100.0), finding(OOM, 1)], 1),
    "on one rank the first of a kind": ([finding(OOM, 0, line=30), finding(OOM, 0, line=20)], 1),
    "a sure end before a likely one": ([finding(OOM, 0, Finality.LIKELY, t=1.0), finding(KEY_ERROR, 1, t=9.0)], 1),
}


@pytest.mark.parametrize("name", CASES)
def test_first(name: str) -> None:
    """The earliest line that ended its rank wins."""
    lines, expected = CASES[name]
    assert first(lines, None) is lines[expected]


def test_of_equals_the_one_that_was_seen_to_fail_first() -> None:
    """Of equal lines, the one of the rank that failed first counts: the agents know the order in which workers
    ended."""
    lines = [finding(OOM, rank) for rank in range(4)]
    assert first(lines, failed(3)) is lines[3]
    assert first(lines, None) is lines[0]


def test_no_line_is_no_cause() -> None:
    """Without a line there is no cause, only exit codes and signals."""
    assert first([], failed(3)) is None
