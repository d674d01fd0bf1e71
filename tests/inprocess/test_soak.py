"""Eighty restarts in a row."""

from __future__ import annotations

import pytest

RANKS = 8
RESTARTS = 80
SETTLED = 20
"""From this iteration on no resource grows."""


@pytest.mark.timeout(300)
def test_restarts_of_eight_ranks_leave_nothing_behind(start, valkey) -> None:
    """Each rank raises in turn. The threads, descriptors, keys and memory of all ranks are the same at the end as
    near the beginning."""
    with start(RANKS, soak=RESTARTS) as group:
        for rank in range(RANKS):
            group.expect("ready", rank, iteration=SETTLED)
        keys = len(valkey.keys(of=group.name))
        for rank in range(RANKS):
            last = group.expect("fn", rank, iteration=RESTARTS, timeout=200.0)
            # an iteration may end before a rank is in the function
            first = next(report for report in group.all("fn", rank=rank) if report.iteration >= SETTLED)
            assert (last.threads, last.fds) == (first.threads, first.fds)
            assert last.rss_pages < 1.1 * first.rss_pages
            assert group.expect("returned", rank).value == f"value of {rank}"
        assert len(valkey.keys(of=group.name)) <= keys
