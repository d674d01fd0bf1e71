"""Two hundred restarts in a row."""

from __future__ import annotations

import pytest

RANKS = 8
RESTARTS = 200
SETTLED = 20
"""From this iteration on nothing grows any more."""


@pytest.mark.timeout(300)
def test_two_hundred_restarts_of_eight_ranks_leave_nothing_behind(start, valkey) -> None:
    """Each rank raises in its turn; threads, files, keys and memory of all are the same at the end as near the
    beginning."""
    with start(RANKS, soak=RESTARTS) as group:
        group.entered(list(range(RANKS)), SETTLED)
        keys = len(valkey.keys(of=group.name))
        for rank in range(RANKS):
            first = group.expect("fn", rank, iteration=SETTLED)
            last = group.expect("fn", rank, iteration=RESTARTS, timeout=200.0)
            assert (last.threads, last.fds) == (first.threads, first.fds)
            assert last.rss_pages < 1.1 * first.rss_pages
            assert group.expect("returned", rank).value == f"value of {rank}"
        assert len(valkey.keys(of=group.name)) <= keys
